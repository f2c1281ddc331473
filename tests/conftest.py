"""Fixtures for all tests. One thread: small matrices gain nothing from more, and busy machines lose."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported; `make test-gpu` sets 0
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
