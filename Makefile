# The two commands that do all set-up: `make demo` and `make test`. Everything else builds on the same environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# W1 to W11 of the targets, and the kernels of a GPU where there is one. `make bench BENCH_FLAGS=--quick` shows that all
# of them run; `BENCH_FLAGS=--save` keeps their results.
BENCHMARKS := attention exchange end_to_end scaling sweep ring_peer capacity driver start rounding memory serving gpu honest
BENCH_FLAGS ?=

.DEFAULT_GOAL := test
.PHONY: demo check test test-slow test-faults test-clients bench clean

# One stamp stands for "installed from these two files"; a second run finds it newer and installs nothing.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/same_tokens.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --doctest-modules heddle

# Whole files go to one of two workers: what a file builds once is built once.
test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow --timeout 7200

# Ranks that fail in every way, in every phase; prints how long each took to be noticed and to be over.
test-faults: $(STAMP)
	$(BIN)/python -m pytest tests/faults tests/runner/test_stray_calls.py -m 'not slow and not gpu' --timeout 3600 --capture=no

# Clients of others (lm-eval, guidellm), in environments of their own; fetches them once.
test-clients: $(STAMP)
	$(BIN)/python tests/clients/run.py

bench: $(STAMP)
	set -e; for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py $(BENCH_FLAGS); done

clean:
	rm -rf $(VENV) .venv-clients build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find heddle tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
