# `make demo` and `make test` do all the set-up they need.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The Mooncake wheel for machines with CUDA needs libcuda at import; the other is the same module without it.
EXTRA  := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)

.DEFAULT_GOAL := help
.PHONY: help setup demo pd-demo drills test test-slow test-gpu check format size bench diagrams clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/ready ## Make the virtual environment and install what nanopd needs

$(VENV)/ready: pyproject.toml constraints.txt
	@sh .ci/system-packages $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRA),dev]'
	@touch $@

demo: setup ## Answer a question with a real model: our scheduler, KV cache and runner
	$(BIN)/nanopd --verbose generate --chat "What is the capital of France? Answer in one sentence."

pd-demo: setup ## Watch a prefill and a decode node at work, and compare with a single node
	$(BIN)/nanopd pd-demo

drills: setup ## Break P, D and the router on purpose, in every way there is (minutes)
	$(BIN)/nanopd pd-demo --drill all

test: setup ## Run the tests (minutes)
	@sh .ci/system-packages $(PYTHON) tests
	$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder

test-slow: setup ## Run only the long tests (half an hour)
	@sh .ci/system-packages $(PYTHON) tests
	$(BIN)/python -m pytest -m slow

test-gpu: setup ## Run the tests that need a CUDA device
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -m gpu

check: setup ## Lint, format check, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy nanopd tests/bench lessons diagrams

format: setup ## Format the code
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

size: ## Count the lines of code of the package
	@$(PYTHON) tests/size.py

bench: setup ## Measure the scheduler and the engine on this machine
	$(BIN)/nanopd bench scheduler
	$(BIN)/nanopd bench offline

diagrams: setup ## Draw the pictures in diagrams/ again
	$(BIN)/python -m diagrams

clean: ## Remove what make and the tools made (not the model cache)
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
