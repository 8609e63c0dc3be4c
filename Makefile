# Needs python >= 3.11 and nothing else. `make train` is the main job; `make test` is what CI runs.
# On a machine without a GPU a smaller torch can be had with: make train PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
PIP_ARGS ?=
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test test-all check bench layouts clean

train: $(VENV)/installed
	$(BIN)/heptad train default

test: check
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

test-all: check
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not gpu"

check: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/installed-test
	$(BIN)/python -m benchmarks.run

layouts: $(VENV)/installed-test
	$(BIN)/python -m tests.verify.tally

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# A stale or half-made environment is made again: the marker is written last and is older than a changed pyproject.toml.
# torch goes first, by its exact release, so that no other package's wishes choose another build of it.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Heptad needs python 3.11 or newer (make PYTHON=...)")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIP_ARGS) torch==2.13.0
	$(BIN)/python -m pip install -q $(PIP_ARGS) -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install -q $(PIP_ARGS) -e '.[test]'
	touch $@
