# make train: from a fresh clone to a trained quickstart.
# make check: lint, types, and what pins the language, plans, schedules, proofs and goldens; about a minute.
# make test: all that must hold before landing; 34 minutes, with the installation, when it was last measured.
# make soak: the rest, some three hours.  These times are of two idle cores; tests/tiers.py and tests/soak.txt say which test is where.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
FOR_TESTS := $(VENV)/.installed-for-tests
NATIVE := hatch_build.py runtime/native/compile_cpp.py $(wildcard runtime/native/*.cpp runtime/native/*.h)
EXTENSION := compiler/editor/vscode
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: train check pins test tier tools kernels bench gpu study-balance study-fp8 soak census reliability lint docs extension bless clean

train: $(INSTALLED)
	$(BIN)/dsc compile specs/quickstart.dsc
	@out=runs/quickstart; n=2; \
	while [ -e $$out/checkpoints ]; do out=runs/quickstart-$$n; n=$$((n+1)); done; \
	$(BIN)/dsc train specs/quickstart.dsc --out $$out

# A worker that dies ends the tests: xdist may wait for ever for another one. The tests start hundreds of processes, so
# bytecode is stored even where the environment asks for none. Three workers keep two cores busy while one waits.
WORKERS ?= 3
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder --max-worker-restart 0

check: $(FOR_TESTS)
	@$(MAKE) --no-print-directory -j 2 lint pins

pins: $(FOR_TESTS)
	$(PYTEST) --tier check

# mypy takes one core: the tests begin beside it.
test: tools $(FOR_TESTS)
	@$(BIN)/python -m runtime.native.compile_cpp > /dev/null
	@$(MAKE) --no-print-directory -j 2 lint tier

tier: $(FOR_TESTS)
	$(PYTEST) --tier test

# A C++ compiler and Chromium: installed where that may be, else said before anything long begins.
tools:
	@$(PYTHON) -m tests.tools

# Before a release. Every kernel of every shipped spec: compiled for four devices and read, and checked in Triton's
# interpreter; on the Triton that is installed, then on 3.6.0, the other one that kernels are written for. 40 minutes on
# two idle cores; it goes on behind a failure, and where it was stopped, for verdicts are kept in .triton/verdicts.
# test_passes is left out: the sweep compiles the same, and more.
OLDER := .triton/3.6.0
kernels: $(FOR_TESTS) $(OLDER)/.installed
	@failed=0; export OMP_NUM_THREADS=1; for path in "" "$(CURDIR)/$(OLDER)"; do export PYTHONPATH="$$path"; \
	$(BIN)/python -m tests.kernels.sweep || failed=1; \
	$(BIN)/python -m pytest -n 2 tests/kernels --deselect tests/kernels/test_gate.py::test_passes || failed=1; \
	done; exit $$failed

$(OLDER)/.installed: | $(FOR_TESTS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(OLDER) triton==3.6.0 'numpy<2.4'
	@touch $@

# A client and a server of S3, for the tests of checkpoints in a store; they are no part of the environment of dsc.
STORES := .stores
$(STORES)/.installed: | $(FOR_TESTS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(STORES) s3fs==2026.9.0 'moto[s3,server]==5.2.5'
	@touch $@

# The trainer of TRL without what this test of it does not need; no part of the environment of dsc either.
TRL := .trl
FOR_TRL := trl==1.16.0 accelerate==1.15.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 psutil==7.2.2
$(TRL)/.installed: | $(FOR_TESTS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target $(TRL) $(FOR_TRL)
	@touch $@

# What `make test` has a sample of, then a million inputs to the language, some 90 minutes on one core, which go on where
# they were stopped with START=…
COUNT ?= 1000000
START ?= 0
soak: tools $(FOR_TESTS) $(STORES)/.installed $(TRL)/.installed
	$(PYTEST) --tier soak
	$(BIN)/python -m tests.fuzz.run --count $(COUNT) --start $(START)

# What the proof says of 5,400 broken programs, some 10 minutes on one core.
census: $(FOR_TESTS)
	$(BIN)/python -m tests.proof.census --count 5400

# What faults do to a run, and docs/reliability.md; an hour, or some rows of it: make reliability ROWS=R1,R3
ROWS ?=
reliability: $(FOR_TESTS)
	$(BIN)/python -m tests.reliability --rows "$(ROWS)"

# Our training beside transformers and torch's pipelining, and docs/performance.md; some 15 minutes, on an idle machine.
bench: $(FOR_TESTS)
	$(BIN)/python -m benchmarks.speed

# Small models trained in variants, from three seeds each, and docs/balancing.md, docs/fp8.md. What has a result in
# benchmarks/results is not trained again, and what was stopped goes on. All of it takes some 10 minutes on two idle
# cores, and 20.
study-balance study-fp8: study-%: $(FOR_TESTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.studies $*

# On a machine with a GPU, all that needs one: every kernel checked and timed, the quickstart trained; ten minutes.
gpu: $(FOR_TESTS)
	$(BIN)/python -m benchmarks.gpu

lint: $(FOR_TESTS)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy

docs: $(FOR_TESTS)
	$(BIN)/python -m pytest --bless tests/dsl/test_reference.py -k page_is_current

# The extension for VS Code: its tests in the engines of the editor, and the package. Needs node 20 and npm.
extension: $(FOR_TESTS)
	cd $(EXTENSION) && npm ci && npm test && npm run package
	$(BIN)/python -m tests.editor.vsix $(EXTENSION)/dsc.vsix

bless: $(FOR_TESTS)
	$(BIN)/python -m pytest --bless tests/dsl/test_ui.py tests/golden

clean:
	rm -rf build runs .triton $(VENV)

# torch comes first and pinned: with it there, no other package asks for another build of it.
# pip keeps to itself what building said, so the C++ is asked for again: what is there is not made a second time.
$(INSTALLED): pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "dsc needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	@$(BIN)/python -m runtime.native.compile_cpp > /dev/null || true
	@touch $@

$(FOR_TESTS): $(INSTALLED)
	$(PIP) -e '.[dev]'
	@touch $@
