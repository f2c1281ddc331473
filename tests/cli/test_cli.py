"""The command line as its users see it: real processes, exit codes, files."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nanopd import OPENMP
from tests import forked
from tests.bench.worker import started
from tests.engine.conftest import tiny_model

__all__ = ["tiny_model"]  # a fixture
FAST = ["--num-blocks", "200", "--dtype", "float32"]


def nanopd(*args: str, stdin: str | bytes = b"", **env: str) -> "subprocess.CompletedProcess[str]":
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = forked.run(["-m", "nanopd", *args], data, os.environ | env)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return subprocess.CompletedProcess(args, done.returncode, done.stdout.decode(), done.stderr.decode())


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def options(tiny_model: Path) -> list[str]:
    return ["--model", str(tiny_model), *FAST]


def test_one_prompt_streams_its_text(options: Sequence[str]):
    done = nanopd("generate", *options, "--max-tokens", "5", "--ignore-eos", "hello")
    assert done.returncode == 0
    assert done.stdout.endswith("\n")
    assert len(done.stdout) > 1
    assert nanopd("generate", *options, "--max-tokens", "5", "--ignore-eos", stdin="hello").stdout == done.stdout


def test_json_is_one_object_a_line_and_nothing_else(options: Sequence[str]):
    done = nanopd(
        "-v", "generate", *options, "--json", "--max-tokens", "3", "--ignore-eos", "--logprobs", "1", "a", "b"
    )
    (a, b) = rows(done.stdout)
    assert {"id", "prompt_token_ids", "token_ids", "text", "finish_reason", "metrics", "logprobs"} <= a.keys()
    assert (a["id"], b["id"], len(a["token_ids"])) == ("0", "1", 3)
    assert {"queue_time", "time_to_first_token", "num_cached_tokens", "num_preemptions"} <= a["metrics"].keys()
    assert "KV cache: 200 blocks" in done.stderr


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["generate", "--top-p", "3", "x"], 2, "top_p is 3.0"),
        (["generate", "--no-such-option", "x"], 2, "No such option"),
        (["generate", "--max-tokens", "many", "x"], 2, "max-tokens"),
        (["nonsense"], 2, "No such command"),
        (["generate", "--model", "/no/such/model", "x"], 2, "/no/such/model"),
        (["generate", "--input", "/no/such/file"], 2, "No such file"),
        (["generate", "--input", "x", "prompt"], 2, "exclude --input"),
        (["generate", "--input", "x", "--chat"], 2, "exclude --input"),
        (["generate", "--output", "x", "prompt"], 2, "--output goes with --input"),
        (["generate", "--resume", "--input", "x"], 2, "--resume with --output"),
        (["generate", "--model", "~nobody/x", "x"], 2, "~nobody/x"),
        (["generate", "--model", "x" * 5000, "x"], 2, "name of the model"),
        (["chat", "--n", "2"], 2, "--n 1"),
        (["generate", "--structured-outputs", "{", "x"], 2, "structured_outputs: "),
        (["generate", "--structured-outputs", '{"regex": "a", "choice": ["b"]}', "x"], 2, "exactly one of json"),
        (["bench", "offline", "--requests", "0"], 2, "--requests"),
        (["bench", "offline", "--input-len", "x"], 2, "range like 32-256"),
        (["bench", "step", "--batch", "1,x"], 2, "--batch is '1,x'"),
        (["bench", "peers", "--peer", "x"], 2, "no peer 'x'"),
        (["bench", "peers", "--workload", "X"], 2, "no workload 'X'"),
        (["bench", "peers", "--workload", ""], 2, "--workload is empty"),
        (["bench", "peers", "--dtype", "int8"], 2, "--dtype is 'int8'"),
        (["bench", "peers", "--peer-python", "/nope"], 2, "--peer-python is '/nope'"),
        (["bench", "kernels", "--target", "sm_1"], 2, "Unknown target"),
    ],
)
def test_mistakes_get_a_sentence_and_exit_code_2(args: list[str], code: int, says: str, options: Sequence[str]):
    extra = options if "offline" in args else []
    done = nanopd(*args, *extra)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert done.stdout == ""


LINES = [
    {"prompt": "plain"},
    {"id": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    {"id": "ids", "prompt_token_ids": [1, 2, 3], "temperature": 0.5, "seed": 4},
    "{broken",
    {"id": "chat", "prompt": "the same id again"},
    {"prompt": "x", "surprise": 1},
    {"prompt": "x", "top_p": 7},
    {"prompt": "x", "messages": []},
    {"id": "long", "prompt": "x" * 1000},
    {"id": "empty", "prompt": ""},
    {"prompt": 5},
    {"id": "stops", "prompt": "abc", "stop": ["q", "zz"], "stop_token_ids": [1]},
    [1],
    {"id": "bad ids", "prompt_token_ids": [10**30]},
    {"id": "odd messages", "messages": "hi"},
    {"messages": [1]},
    {"messages": None},
    {"messages": {}},
    {"prompt": "x" * 40, "cache_salt": 5},
    {"prompt": "x", "stop_token_ids": [-99999], "min_tokens": 2},
    {"prompt": "x", "stop_token_ids": [99999]},
    {"prompt": "x", "stop": {}},
    {"id": None, "prompt": "x"},
    {"prompt_token_ids": [True]},
    '{"prompt": ' + "[" * 100_000,
    r'{"prompt": "\ud800"}',
    {"id": "last", "prompt": "still here"},
]
GOOD = {"1", "chat", "ids", "stops", "last"}


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_batch_of_good_and_bad_lines(options: Sequence[str], tmp_path: Path):
    path = write_lines(tmp_path / "in.jsonl", LINES)
    done = nanopd(
        "generate", *options, "--input", str(path), "--output", str(tmp_path / "out.jsonl"), "--max-tokens", "4"
    )
    assert done.returncode == 1, done.stderr
    out = rows((tmp_path / "out.jsonl").read_text())
    assert {row["id"] for row in out if "error" not in row} == GOOD
    assert {row["line"] for row in out if "error" in row} == {4, 5, 6, 7, 8, 9, 10, 11, *range(13, 27)}
    for number in (4, 9, 13):
        assert f"line {number}: " in done.stderr
    assert done.stdout == ""


def test_structured_outputs(options: Sequence[str], tmp_path: Path):
    """S12: a grammar that cannot be used is known when it is compiled. Its line gets an error, the others go on."""
    wishes = [{"choice": ["yes"]}, {"regex": "("}, None]
    lines = [{"id": f"r{i}", "prompt": "x", "structured_outputs": wish} for i, wish in enumerate(wishes)]
    path, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = ["generate", *options, "--max-tokens", "4"]
    for resume in ([], ["--resume"]):
        done = nanopd(*command, "--input", str(path), "--output", str(out), *resume)
        assert done.returncode == 1 and "request r1: structured_outputs: " in done.stderr
        answers = {row["id"]: row for row in rows(out.read_text())}
        assert answers.keys() == {"r0", "r1", "r2"}
        assert answers["r0"]["text"] == "yes" and "unclosed group" in answers["r1"]["error"]
    done = nanopd(*command, "--structured-outputs", '{"choice": ["no"]}', "x")
    assert (done.returncode, done.stdout) == (0, "no\n"), done.stderr
    done = nanopd(*command, "--structured-outputs", '{"regex": "("}', "x")
    assert (done.returncode, done.stdout) == (2, "") and "unclosed group" in done.stderr


def test_a_broken_line_takes_no_id_from_a_good_one(options: Sequence[str], tmp_path: Path):
    path = write_lines(tmp_path / "in.jsonl", ["broken", {"id": 1, "prompt": "a"}])
    command = ["generate", *options, "--input", str(path), "--output", str(tmp_path / "out"), "--max-tokens", "2"]
    for resume in ([], ["--resume"]):
        assert nanopd(*command, *resume).returncode == 1
        out = rows((tmp_path / "out").read_text())
        assert [(row["id"], row["line"]) for row in out if "error" in row] == [("1", 1)]
        assert [row["id"] for row in out if "error" not in row] == ["1"]


def test_output_is_not_overwritten_and_resume_goes_on(options: Sequence[str], tmp_path: Path):
    path = write_lines(tmp_path / "in.jsonl", [{"id": f"r{i}", "prompt": f"prompt {i}"} for i in range(8)])
    out = tmp_path / "out.jsonl"
    command = ["generate", *options, "--input", str(path), "--output", str(out), "--max-tokens", "4", "--ignore-eos"]
    assert nanopd(*command).returncode == 0
    complete = {row["id"]: row["token_ids"] for row in rows(out.read_text())}
    assert len(complete) == 8
    done = nanopd(*command)
    assert done.returncode == 2
    assert "--resume" in done.stderr
    kept = out.read_text().splitlines()[:3]
    out.write_text("\n".join([*kept, '{"id": "r7", "error": "x"}', '{"id": "r6", "token_i']))  # cut short, as by a kill
    assert nanopd(*command, "--resume").returncode == 0
    resumed = rows(out.read_text())
    assert out.read_text().splitlines()[:3] == kept
    assert {row["id"]: row["token_ids"] for row in resumed} == complete
    assert len(resumed) == 8


def test_resume_leaves_files_alone_that_are_not_its_own(options: Sequence[str], tmp_path: Path):
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    precious = tmp_path / "precious.txt"
    mine = ("a line of mine\n", "no line at all", '{"some": "json"}\n', '{"id": "1", "finish_reason": "stop"}\n[]\n')
    for content in mine:
        precious.write_text(content)
        done = nanopd("generate", *options, "--input", str(path), "--output", str(precious), "--resume")
        assert done.returncode == 2, done.stderr
        assert precious.read_text() == content
    same = nanopd("generate", *options, "--input", str(path), "--output", str(path), "--resume")
    assert (same.returncode, "the same file" in same.stderr) == (2, True)
    assert rows(path.read_text()) == [{"prompt": "a"}]


def test_resume_writes_through_a_link_and_keeps_the_mode(options: Sequence[str], tmp_path: Path):
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    target, link = tmp_path / "target.jsonl", tmp_path / "link.jsonl"
    target.write_text('{"id": "1", "finish_reason": "stop"}\n{"id": "2", "err')
    target.chmod(0o640)
    link.symlink_to(target)
    args = ["--input", str(path), "--output", str(link), "--resume", "--max-tokens", "2"]
    assert nanopd("generate", *options, *args).returncode == 0
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert [row["id"] for row in rows(target.read_text())] == ["1", "2"]


def test_resumed_samples_are_those_of_an_uninterrupted_run(options: Sequence[str], tmp_path: Path):
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "same", "temperature": 1.0}] * 8)
    out = tmp_path / "out.jsonl"
    command = ["generate", *options, "--input", str(path), "--output", str(out), "--max-tokens", "4", "--ignore-eos"]
    nanopd(*command)
    complete = {row["id"]: row["token_ids"] for row in rows(out.read_text())}
    assert len({tuple(tokens) for tokens in complete.values()}) > 4, "each line has a seed of its own"
    out.write_text("\n".join(out.read_text().splitlines()[:3]) + "\n")
    nanopd(*command, "--resume")
    assert {row["id"]: row["token_ids"] for row in rows(out.read_text())} == complete


def test_input_that_is_no_text_and_streams_that_are_closed(options: Sequence[str]):
    for command, code in (("generate", 2), ("chat", 0)):  # a chat goes on after a line it cannot read
        done = nanopd(command, *options, stdin=b"\xff\xfe\n")
        assert (done.returncode, "not UTF-8" in done.stderr) == (code, True)
    command = f"{sys.executable} -m nanopd generate {' '.join(options)} --max-tokens 1"
    for redirection, code in (("<&-", 2), ("--input - <&-", 2), ("x >&-", 0), ("x > /dev/full", 2), ("$'\\xff'", 2)):
        done = subprocess.run(["bash", "-c", f"{command} {redirection}"], capture_output=True, text=True)
        assert done.returncode == code, (redirection, done.stderr)
        assert "Traceback" not in done.stderr, redirection


def test_ctrl_c_keeps_what_is_finished(options: Sequence[str], tmp_path: Path):
    lines = [{"id": f"r{i}", "prompt": "x" * (i % 40 + 1), "max_tokens": 2 + i % 60} for i in range(400)]
    path, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = ["generate", *options, "--input", str(path), "--output", str(out), "--ignore-eos", "--max-num-seqs", "4"]
    process = subprocess.Popen([sys.executable, "-m", "nanopd", *command], stderr=subprocess.PIPE)
    while not (out.exists() and out.read_text().count("\n") >= 5):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert b"Traceback" not in err
    finished = rows(out.read_text())
    assert 5 <= len(finished) < 400
    assert nanopd(*command, "--resume").returncode == 0
    assert {row["id"] for row in rows(out.read_text())} == {f"r{i}" for i in range(400)}


def test_n_completions_as_json_and_as_text(options: Sequence[str]):
    args = ["generate", *options, "--n", "2", "--temperature", "1", "--max-tokens", "3", "--ignore-eos", "x"]
    (row,) = rows(nanopd(*args, "--json").stdout)
    assert [len(c["token_ids"]) for c in row["outputs"]] == [3, 3]
    assert nanopd(*args).stdout.count("--- 0") == 2


def test_chat_keeps_the_conversation_until_reset(options: Sequence[str]):
    args = ["chat", *options, "--max-tokens", "4", "--ignore-eos"]
    done = nanopd(*args, stdin="hi\n/reset\nhi\n\n/exit\nnever\n")
    assert done.returncode == 0
    first, reset, second = done.stdout.splitlines()
    assert "forgotten" in reset
    assert first == second
    too_long = nanopd(*args, stdin="x" * 600 + "\nhi\n")
    assert "max_model_len is 512" in too_long.stderr
    assert too_long.stdout.splitlines() == [first], "the line that did not fit is not in the history"


def test_bench_offline_json(options: Sequence[str]):
    args = ["--requests", "3", "--input-len", "5-9", "--output-len", "4", "--shared-prefix", "32", "--json"]
    (row,) = rows(nanopd("bench", "offline", *options, *args).stdout)
    assert {"engine", "model", "dtype", "seconds", "output_tokens_per_s", "ttft_p50_ms", "itl_p99_ms"} <= row.keys()
    assert (row["requests"], row["output_tokens"], row["cached_tokens"]) == (3, 12, 64)
    assert "steps" not in row
    (row,) = rows(nanopd("bench", "offline", *options, *args, "--concurrency", "1", "--profile").stdout)
    assert (row["steps"], row["output_tokens"]) == (3 * 4, 12)
    assert row["linear_ms"] > 0
    assert row["cascade_saved_tokens"] == 0
    args = ["--requests", "4", "--input-len", "5", "--output-len", "4", "--shared-prefix", "400", "--json"]
    (row,) = rows(nanopd("bench", "offline", *options, *args, "--cascade-attention").stdout)
    assert row["cascade_saved_tokens"] == 400 * 3 * 3, "read once for four in each of three decode steps"


def test_bench_step_table_and_json(options: Sequence[str]):
    args = ["bench", "step", *options, "--batch", "1,2", "--context", "30", "--steps", "2"]
    table = nanopd(*args).stdout.splitlines()
    assert [line.split()[:2] for line in table] == [["batch", "context"], ["1", "30"], ["2", "30"]]
    one, two = rows(nanopd(*args, "--json").stdout)
    assert (one["batch"], two["batch"], one["context"]) == (1, 2, 30)
    assert 0 < one["linear_ms"] < one["step_ms"]


def test_benchmarks_are_found_from_anywhere_and_missed_without_a_checkout(tmp_path: Path):
    checkout = Path(__file__).parents[2]
    command = [sys.executable, "-m", "nanopd"]
    (tmp_path / "tests" / "bench").mkdir(parents=True)  # somebody else's `tests` comes first on the path
    for module in ("tests/__init__.py", "tests/bench/__init__.py", "tests/bench/commands.py"):
        (tmp_path / module).write_text("raise RuntimeError('not ours')\n")
    env = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run([*command, "bench", "--help"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, "scheduler" in done.stdout) == (0, True), done.stderr
    shutil.copytree(checkout / "nanopd", tmp_path / "site" / "nanopd", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run([*command, "bench", "offline"], cwd=tmp_path / "site", capture_output=True, text=True)
    assert (done.returncode, "need a source checkout" in done.stderr) == (2, True), done.stderr
    done = subprocess.run([*command, "--help"], cwd=tmp_path / "site", capture_output=True, text=True)
    assert (done.returncode, "bench" in done.stdout) == (0, False)


def test_model_list(tmp_path: Path):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "config.json").write_text("{}")
    (row,) = rows(nanopd("model", "list", "--json", NANOPD_CACHE=str(tmp_path)).stdout)
    assert row == {"name": "mine", "path": str(tmp_path / "models" / "mine")}


def test_version_and_help():
    assert nanopd("--version").stdout.startswith("nanopd 0.")
    done = nanopd("generate", "--help")
    for option in ("--max-num-batched-tokens", "--no-prefix-caching", "--kv-layout", "--stop-token-id", "--seed"):
        assert option in done.stdout


def test_bench_peers_takes_turns_and_both_do_the_same_work(tiny_model: Path, tmp_path: Path):
    args = ["bench", "peers", "--peer", "transformers", "--model", str(tiny_model), "--threads", "1"]
    args += ["--workload", "SP", "--requests", "3", "--pairs", "1", "--logs", str(tmp_path), "--json"]
    pair, median, *prefill = rows(nanopd(*args).stdout)
    assert (pair["pair"], median["pair"]) == (0, "median")
    assert [row["requests"] for row in (pair, median, *prefill)] == [1, 1, 3, 3]
    assert pair["same_tokens"] == prefill[0]["same_tokens"] == 1
    assert pair["ratio"] == pair["their_seconds"] / pair["our_seconds"]
    assert pair["our_output_tokens_per_s"] == pytest.approx(128 / pair["our_seconds"])
    assert {path.name for path in tmp_path.iterdir()} == {"peer_worker-nanopd.log", "peer_worker-transformers.log"}


def test_a_peer_that_cannot_be_started_is_named(tiny_model: Path, tmp_path: Path):
    done = nanopd("bench", "peers", "--peer", "vllm", "--model", str(tiny_model), "--logs", str(tmp_path), "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "No module named 'vllm'" in done.stderr


def test_a_peer_gets_the_environment_of_the_user_not_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """How OpenMP's threads wait is worth tenths of a step: whoever is compared with us must have its own default."""
    got: dict[str, dict[str, str]] = {}

    class Seen:
        def __init__(self, python: str, script: Path, name: str, options: str, env: dict[str, str], log: Path) -> None:
            got[name] = env

        def wait_until_loaded(self) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr("tests.bench.worker.Worker", Seen)
    for key, value in (OPENMP | {"OTHER": "1"}).items():
        monkeypatch.setenv(key, value)
    for name in ("nanopd", "vllm"):
        with started(sys.executable, "peer_worker.py", name, "{}", {"LD_PRELOAD": "x"}, tmp_path):
            pass
    assert OPENMP.items() <= got["nanopd"].items() and not OPENMP.keys() & got["vllm"].keys()
    assert got["vllm"]["OTHER"] == "1" and got["vllm"]["LD_PRELOAD"] == "x"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")  # the user's word
    with started(sys.executable, "peer_worker.py", "vllm", "{}", {}, tmp_path):
        assert got["vllm"]["OMP_WAIT_POLICY"] == "active"


def test_a_peer_does_not_outlive_a_benchmark_that_is_told_twice_to_stop(tmp_path: Path):
    """The first signal waits for the peer to end, the second does not."""
    (tmp_path / "deaf.py").write_text('import time; print(\'{"engine": "deaf"}\', flush=True); time.sleep(600)')
    code = f"""
import sys, time
from pathlib import Path
from tests.bench.worker import Worker
worker = Worker(sys.executable, Path("{tmp_path}/deaf.py"), env={{}}, log=Path("{tmp_path}/log"))
try:
    worker.wait_until_loaded()
    print(worker._process.pid, flush=True)
    time.sleep(600)
finally:
    print("closing", flush=True)
    worker.close()
"""
    bench = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert bench.stdout
    peer = int(bench.stdout.readline())
    bench.send_signal(signal.SIGTERM)
    assert bench.stdout.readline() == "closing\n"
    time.sleep(0.5)
    assert bench.poll() is None, "it waits"
    bench.send_signal(signal.SIGTERM)
    assert bench.wait(20) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(peer, 0)
