# make demo · make test · make lint · make bench · make chaos · make simulate
PYTHON ?= python3
BIN := .venv/bin
SEED ?= 1
MINUTES ?= 2
# Most tests wait for processes, leases and time-outs rather than for a core.
TEST_PROCESSES ?= 2

.PHONY: demo test lint bench chaos simulate venv test-gpu gpu-bundle clean

venv: .venv/.ready

.venv/.ready: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q -e '.[embedded,remote,data,test,lint]'
	@touch $@

demo: venv
	@$(BIN)/python examples/demo.py

lint: venv
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/pytest -q tests/house

test: lint
	@$(BIN)/pytest -q -n $(TEST_PROCESSES) --dist worksteal --durations 15 --ignore=tests/house

bench: venv
	@for b in benchmarks/[a-z]*.py; do echo "== $$b"; $(BIN)/python $$b $(ARGS) || exit 1; done

chaos: venv
	@PYTHONPATH=tests $(BIN)/python -m chaos.random_faults --seed $(SEED) --minutes $(MINUTES)

simulate: venv
	@PYTHONPATH=tests $(BIN)/python -m simulation.run --minutes $(MINUTES)

# On a machine with a GPU and torch; what else is needed comes from .wheels, which gpu-bundle fills where there is a
# network. GPU_TESTS=tests/gpu/test_faults.py: one file of them.
GPU_TESTS ?= tests/gpu

test-gpu:
	@export PYTHONPATH=$(CURDIR):$(CURDIR)/.wheels/$$(python3 -c 'import sys; print("cp%d%d" % sys.version_info[:2])'):$$PYTHONPATH; \
	python3 -c 'import pytest' 2>/dev/null || { \
		echo "pytest is missing here: run 'make gpu-bundle' where there is a network, and bring .wheels along" >&2; exit 1; }; \
	python3 -m pytest -q -m gpu $(GPU_TESTS)

gpu-bundle:
	@python3 tests/gpu/wheels.py

clean:
	@rm -rf .venv .wheels build dist *.egg-info
