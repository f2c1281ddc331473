"""The environment and the order of all tests. One thread: small matrices gain nothing from more, and busy machines lose."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported; `make test-gpu` sets 0
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# `make test` gives each of two workers a file at a time. Those that take long come first, so that at the end no worker has
# to wait for the other; and the first two in different workers, of which one mostly waits.
LONG = ["drills/test_soak.py", "lessons/test_exercises.py", "lessons/test_course.py", "drills/test_drills.py"]
LONG += ["cli/test_cli.py", "pd/test_parity.py", "pd/test_ends.py", "serve/test_lifecycle.py", "drills/test_cells.py"]
LONG += ["trace/test_viewer.py", "lessons/test_pd_demo.py", "engine/test_cascade.py", "engine/test_triton.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = {Path(__file__).parent / name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: first.get(item.path, len(first)))
