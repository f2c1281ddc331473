"""The kernels compile for four chips that are not here, and stay within a budget (T3).

The compiler and the interpreter exclude each other within a process, so this asks a second one. That the host wrappers run
there on meta tensors, which have no data, also shows that they never read a value from the device.

    python -m tests.kernels.test_aot      measure again and rewrite aot_budget.json: look at the difference before committing
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

CHECKOUT = Path(__file__).parents[2]
BUDGET = Path(__file__).with_name("aot_budget.json")
FIGURES = ("registers", "spills", "shared")


def measure(*targets: str) -> list[dict]:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench.aot", *targets]
    done = subprocess.run(command, env=env, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def key(row: dict) -> str:
    return f"{row['target']} {row['shape']} {row['kernel']}"


def check(*targets: str) -> None:
    rows, budget = measure(*targets), json.loads(BUDGET.read_text())
    assert len(rows) == 3 * 5 * len(targets)
    for row in rows:
        assert row["shared"] <= row["shared_limit"], key(row)
        assert row["registers"] > 0, key(row)
        assert row["instructions"]["load"] > 0, key(row)
        assert row["instructions"]["store"] > 0, key(row)
        if row["target"] == "sm_90":
            assert row["spills"] == 0, key(row)
        if row["kernel"].startswith("attention"):
            assert row["instructions"]["matrix"] > 0, key(row)  # tensor cores, not scalar multiplies
        if budget["triton"] == triton.__version__:  # another compiler allots registers in another way
            over = {f: (row[f], budget[key(row)][f]) for f in FIGURES if row[f] > budget[key(row)][f]}
            assert not over, f"{key(row)} uses more than its budget: {over}"


def test_hopper():
    check("sm_90")


@pytest.mark.slow
def test_ampere_blackwell_and_amd():
    check("sm_80", "sm_100", "gfx942")


if __name__ == "__main__":
    entries = {key(row): {f: row[f] for f in FIGURES} for row in measure("sm_80", "sm_90", "sm_100", "gfx942")}
    lines = [
        f"{json.dumps(name)}: {json.dumps(figures)}"
        for name, figures in {"triton": triton.__version__, **entries}.items()
    ]
    BUDGET.write_text("{\n  " + ",\n  ".join(lines) + "\n}\n")
