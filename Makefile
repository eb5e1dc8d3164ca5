# make venv · make demo · make test · make test-fast · make lint · make bench · make chaos · make soak · make simulate
PYTHON ?= python3
# make test TORCH=2.15.0: the same in an environment of its own. The package index may have that torch for CUDA only:
# some 5 GB. PYTHON=python3.13 with it: another Python.
TORCH ?=
# Compiled modules are kept: the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
# oldest or newest, by test-oldest and test-newest alone: an environment at that end of what pyproject.toml allows.
END ?=
END_EXTRAS := .[embedded,remote,data,test]
# make VENV=.venv-mine test: in another folder. One that make has not made is left alone: it may hold another torch.
VENV := .venv$(if $(END),-$(END))$(if $(TORCH),-$(TORCH))
MADE := $(VENV)/.made-by-make
BIN := $(VENV)/bin
CONSTRAINTS := $(if $(END)$(TORCH),$(VENV)/constraints.txt,constraints.txt)
SEED ?= 1
MINUTES ?= 2
# Twice the cores: for half of their time tests wait, for leases, time-outs and steps.
TEST_PROCESSES ?= 4
CASES ?= 300
CASE ?=
SHRINK ?=

.PHONY: demo recording test test-end test-oldest test-newest test-fast test-of golden test-long examples bench-smoke evidence evidence-check style lint bench chaos faults soak simulate venv test-compat test-gpu test-cuda-fork gpu-bundle docs dist clean

venv: $(VENV)/.ready

# Marked before it is filled, so that a set-up that was interrupted is completed by the next one.
$(VENV)/.ready: pyproject.toml constraints.txt
	@if test ! -e $@ && test ! -e $(MADE); then \
		if test -e $(VENV); then \
			echo "$(abspath $(VENV)) was not made by make, and is left as it is: move it away, or name another folder," \
				"make VENV=.venv-make $(MAKECMDGOALS)" >&2; exit 1; fi; \
		mkdir -p $(VENV) && touch $(MADE); fi
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(if $(END),$(BIN)/python -m pip install -q packaging && $(BIN)/python .ci/allowed.py $(END) $(CONSTRAINTS) $(TORCH),\
		$(if $(TORCH),echo torch==$(TORCH) > $(CONSTRAINTS)))
	@$(BIN)/python .ci/venv.py $(CONSTRAINTS) $(if $(END),'$(END_EXTRAS)')
	@touch $@

demo: venv
	@$(BIN)/python examples/demo.py

# A kill, recorded in a terminal, as docs/kill.svg.
recording: venv
	@$(BIN)/python examples/record.py docs/kill.svg --shown "make demo" -- $(BIN)/python examples/demo.py --kill

style: venv
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

lint: style
	@$(BIN)/mypy
	@$(BIN)/pytest -q tests/house

# mypy takes one core for half a minute, beside the tests.
test: style
	@$(BIN)/mypy & types=$$!; \
	$(BIN)/pytest -q -n $(TEST_PROCESSES) --dist worksteal --durations 15 -m "not long"; tests=$$?; \
	wait $$types && exit $$tests

# The oldest versions that pyproject.toml allows, and the newest, each in an environment of its own (.venv-oldest): a part
# of the tests that reaches every dependency. TORCH=2.10.0: that torch, where its CPU build is not in the package index.
END_TESTS := tests/contract/test_etcd.py tests/checkpoint tests/unit/test_testing.py tests/daemon/test_metrics.py \
	tests/daemon/test_elasticctl.py tests/daemon/test_ctl_absent.py tests/daemon/test_other_users.py \
	tests/daemon/test_certificates.py tests/worker/test_stream_shapes.py \
	tests/agent/test_recovery.py::test_killed_workers_cost_no_step_and_change_no_bit

test-oldest:
	@$(MAKE) --no-print-directory test-end END=oldest

test-newest:
	@$(MAKE) --no-print-directory test-end END=newest

test-end: venv
	@$(BIN)/python .ci/allowed.py installed
	@$(BIN)/pytest -q -n $(TEST_PROCESSES) --dist worksteal --durations 5 -m "not long" $(END_TESTS)

# Decisions and files alone, for the inner loop: under half a minute.
test-fast: venv
	@$(BIN)/pytest -q -n logical --dist worksteal -m "not long and not slow" tests/unit tests/checkpoint

# The tests that import a module of one folder or file, without the slow ones: test-of PLACE=elastic/worker/state. Those of
# tests/daemon that import nothing of ours and only run the commands belong to what the commands reach first.
PLACE ?=
IMPORTS_OURS := ^ *(from|import) elastic(d)?[. ]

test-of: venv
	@files=$$(PYTHONPATH=tests $(BIN)/python -m support.tests_of '$(PLACE)') && test -n "$$files" || { \
		echo "no test imports a module of PLACE=$(PLACE)" >&2; exit 1; }; \
	commands=$(if $(filter daemon/api% daemon/ctl% daemon/node%,$(PLACE)),$$(grep -LE '$(IMPORTS_OURS)' tests/daemon/test_*.py)); \
	$(BIN)/pytest -q -n logical --dist worksteal -m "not long and not slow and not chaos" $$files $$commands

# Everything in the repository that is generated, anew: look at `git diff` then. Golden histories, the example settings,
# the page of all reasons, the pictures of the documentation, the tables and diagrams of states, the
# fields of the API, the pages of commands, of a job's fields and of settings; etcd's messages; all public names.
golden: venv
	@PYTHONPATH=tests $(BIN)/python -m support.etcd_descriptors
	@PYTHONPATH=tests $(BIN)/python -m simulation.diagram > $(VENV)/states.md && mv $(VENV)/states.md docs/states.md
	@PYTHONPATH=tests $(BIN)/python -m support.api_doc
	@PYTHONPATH=tests $(BIN)/python -m support.reference_doc
	@ELASTIC_REWRITE=1 $(BIN)/pytest -q tests/unit/test_scenarios.py tests/unit/test_reasons.py tests/systemd/test_files.py \
		tests/house/test_public_names.py
	@$(BIN)/python docs/pictures/make.py
	@git status --short tests/scenarios tests/unit/reasons.txt tests/house/public_names.txt systemd docs elastic/etcd

# What `make test` leaves out: more faults, more histories, the planted mistakes. About 20 minutes on two cores.
test-long: venv
	@$(BIN)/pytest -q -n $(TEST_PROCESSES) --dist worksteal --durations 15 -m long

bench: venv
	@for b in benchmarks/[a-z]*.py; do echo "== $$b"; $(BIN)/python $$b $(ARGS) || exit 1; done

# What people copy or install: the examples, each killed once, the pages on faults, the packages.
examples: venv
	@$(BIN)/pytest -q -n 2 -m "long or not long" tests/chaos/test_examples.py tests/chaos/test_testing_cluster.py \
		tests/chaos/test_testing_stranger.py tests/deploy/test_dist.py tests/deploy/test_typed.py

# Each benchmark in its smallest size: it runs to its end, and its last line is complete.
bench-smoke: venv
	@$(BIN)/pytest -q -n 2 --dist worksteal -o faulthandler_timeout=400 -m "long or not long" tests/worker/test_benchmarks_run.py \
		tests/worker/test_state_benchmark.py

# The records behind the figures that README and docs quote, in docs/evidence: some 35 minutes of a quiet machine.
evidence: venv
	@$(BIN)/python benchmarks/evidence.py

evidence-check: venv
	@$(BIN)/python benchmarks/evidence.py --check

chaos: venv
	@PYTHONPATH=tests $(BIN)/python -m chaos.random_faults --seed $(SEED) --minutes $(MINUTES)

# Every kind of fault into a real job, and the verdict on it: faults TIMES=10, KINDS=spin,deadlock. About 5 s each.
TIMES ?= 1
KINDS ?=

faults: venv
	@PYTHONPATH=tests $(BIN)/python -m chaos.fault_kinds --times $(TIMES) $(if $(KINDS),--kinds $(KINDS))

soak: $(if $(CASE),venv,test-long)
	@PYTHONPATH=tests $(BIN)/python -m soak.run --cases $(CASES) --seed $(SEED) $(if $(CASE),--case $(CASE)) $(if $(SHRINK),--shrink)

simulate: venv
	@PYTHONPATH=tests $(BIN)/python -m simulation.run --minutes $(MINUTES)

# Trainer, Accelerate, Lightning and unchanged scripts, in an environment of their own with the versions of
# tests/compat/constraints.txt; never part of `make test`. COMPAT_TESTS=tests/compat/test_lightning.py: one file of them.
COMPAT_VENV ?= .venv-compat
COMPAT_TESTS ?= tests/compat tests/deploy/test_kubernetes_job.py

test-compat: $(if $(TORCH),venv)
	@test -x $(COMPAT_VENV)/bin/python || $(PYTHON) -m venv $(COMPAT_VENV)
	@$(COMPAT_VENV)/bin/python -m pip install -q -c $(CONSTRAINTS) -c tests/compat/constraints.txt \
		-e '.[embedded,remote,data,test,transformers,lightning]' peft datasets scikit-learn webdataset kubernetes-validate
	@$(COMPAT_VENV)/bin/pytest -q -n $(TEST_PROCESSES) --dist worksteal --durations 15 $(COMPAT_TESTS)

# On a machine with a GPU and torch; what else is needed comes from .wheels, which gpu-bundle fills where there is a
# network. GPU_TESTS=tests/gpu/test_faults.py: one file of them.
GPU_TESTS ?= tests/gpu

test-gpu:
	@export PYTHONPATH=$(CURDIR):$(CURDIR)/.wheels/$$(python3 -c 'import sys; print("cp%d%d" % sys.version_info[:2])'):$$PYTHONPATH; \
	python3 -c 'import pytest' 2>/dev/null || { \
		echo "pytest is missing here: run 'make gpu-bundle' where there is a network, and bring .wheels along" >&2; exit 1; }; \
	python3 -m pytest -q -m gpu $(GPU_TESTS)

# A CUDA build of torch, on a machine without a GPU that seems to have one. Makes an environment of its own in
# CUDA_VENV, of about 5 GB; never part of `make test`. A torch of the version range in pyproject.toml that the package
# index has with CUDA.
CUDA_VENV ?= /tmp/elasticd-cuda-venv
CUDA_TORCH ?= torch==2.12.1

test-cuda-fork: venv
	@test -x $(CUDA_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_VENV)
	@$(CUDA_VENV)/bin/python -c 'import torch, etcd3, msgspec' 2>/dev/null || \
		$(CUDA_VENV)/bin/python -m pip install -q --no-cache-dir '$(CUDA_TORCH)' -e '.'
	@$(CUDA_VENV)/bin/python -c 'import torch; assert torch.version.cuda, "not a CUDA build"'
	@ELASTIC_CUDA_PYTHON=$(CUDA_VENV)/bin/python $(BIN)/pytest -v tests/cuda_fork

# BUNDLE_PYTHON=3.12: for that Python alone.
gpu-bundle:
	@python3 tests/gpu/wheels.py $(BUNDLE_PYTHON)

# The docs as a site, in site/; and a source distribution and a wheel, checked, in dist/. In an environment of their own.
.venv-docs/.ready: pyproject.toml
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > .venv-docs/requirements.txt
	@.venv-docs/bin/python -m pip install -q -r .venv-docs/requirements.txt
	@touch $@

docs: .venv-docs/.ready
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build -q
	@echo "site/index.html"

dist: .venv-docs/.ready
	@.venv-docs/bin/python .ci/dist.py dist
	@.venv-docs/bin/twine check --strict dist/*

clean:
	@for each in .venv .venv-*; do \
		if test -e $$each/.ready || test -e $$each/.made-by-make; then rm -rf $$each; fi; done
	@rm -rf .venv-compat .wheels build dist site *.egg-info
