# make train: from a fresh clone to a trained quickstart. `dsc train` prepares the data while it compiles.
# make check: lint, types, and what pins the language, plans, schedules, proofs and goldens.
# make test: what every change is tried with.
# make landing: the rest of what must hold before a change lands.
# make soak: what is too long for both.
# docs/testing.md says what each of them is for, and how long it takes.
PYTHON ?= python3
# Where everything is made. A checkout that may not be written to: make BUILD=FOLDER test
BUILD ?= .
VENV := $(BUILD)/.venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
FOR_TESTS := $(VENV)/.installed-for-tests
NATIVE := hatch_build.py runtime/ops/native/compile_cpp.py $(wildcard runtime/ops/native/*.cpp runtime/ops/native/*.h)
EXTENSION := compiler/tools/editor/vscode
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# The modules that the first `dsc train` imports, in all of its processes.
OF_A_RUN := compiler.cli.commands.compile, compiler.cli.commands.train, compiler.pipeline, compiler.emit.folder, \
  compiler.machine.topology.device_graph, compiler.model.segments.trace, compiler.model.segments.torch_ops, \
  compiler.tools.report.run_page, torch._functorch.aot_autograd, runtime.data.__main__, gigatoken, awkward, \
  runtime.run.train, runtime.run.loop, runtime.run.starts, runtime.launch.launcher
STORE_BYTECODE := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c 'import $(OF_A_RUN)'
ifneq ($(BUILD),.)
export DSC_NATIVE := $(abspath $(BUILD))/native
export PYTHONPYCACHEPREFIX := $(abspath $(BUILD))/bytecode
export RUFF_CACHE_DIR := $(abspath $(BUILD))/ruff
export MYPY_CACHE_DIR := $(abspath $(BUILD))/mypy
endif

.PHONY: train check pins test tier landing tools mutants kernels bench gpu study-balance study-fp8 soak census reliability lint docs extension bless clean

train: $(INSTALLED)
	@out=runs/quickstart; n=2; \
	while [ -e $$out/checkpoints ]; do out=runs/quickstart-$$n; n=$$((n+1)); done; \
	echo $(BIN)/dsc train specs/quickstart.dsc --out $$out; \
	$(BIN)/dsc train specs/quickstart.dsc --out $$out

# A worker that dies ends the tests: xdist may wait for ever for another one. The tests start hundreds of processes, so
# bytecode is stored even where the environment asks for none. Three workers keep two cores busy while one waits.
WORKERS ?= 3
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -o cache_dir=$(abspath $(BUILD))/.pytest_cache -n $(WORKERS) --dist loadscope --no-loadscope-reorder --max-worker-restart 0

check: $(FOR_TESTS)
	@$(MAKE) --no-print-directory -j 2 lint pins

pins: $(FOR_TESTS)
	$(PYTEST) --tier check

# mypy takes one core: the tests begin beside it.
test: tools $(FOR_TESTS)
	@$(BIN)/python -P runtime/ops/native/compile_cpp.py > /dev/null
	@$(MAKE) --no-print-directory -j 2 lint tier || { echo "make test: failed; make lint and make tier are its parts" >&2; exit 1; }

tier: $(FOR_TESTS)
	$(PYTEST) --tier test

landing: tools $(FOR_TESTS)
	@$(BIN)/python -P runtime/ops/native/compile_cpp.py > /dev/null
	$(PYTEST) --tier landing

# Which of some 300 small changes of the product the tests of `make test` notice, and the tables of docs/testing.md.
# What is found is kept in MUTANTS, so that what was stopped goes on; an hour on two idle cores.
MUTANTS ?= $(BUILD)/.mutants
mutants: $(FOR_TESTS)
	$(BIN)/python -m tests.measure.mutants $(MUTANTS)
	$(BIN)/python -m tests.measure.page $(MUTANTS)

# A C++ compiler and Chromium: installed where that may be, else said before anything long begins.
tools:
	@$(PYTHON) -m tests.tools

# Before a release. Every kernel of every shipped spec: compiled for four devices and read, and checked in Triton's
# interpreter; on the Triton that is installed, then on 3.6.0, the other one that kernels are written for. 40 minutes on
# two idle cores; it goes on behind a failure, and where it was stopped, for verdicts are kept in .triton/verdicts.
# test_passes is left out: the sweep compiles the same, and more.
OLDER := $(BUILD)/.triton/3.6.0
kernels: $(FOR_TESTS) $(OLDER)/.installed
	@failed=0; export OMP_NUM_THREADS=1; for path in "" "$(abspath $(OLDER))"; do export PYTHONPATH="$$path"; \
	$(BIN)/python -m tests.compiler.emit.kernels.sweep || failed=1; \
	$(BIN)/python -m pytest -n 2 tests/compiler/emit/kernels --deselect tests/compiler/emit/kernels/test_gate.py::test_passes || failed=1; \
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
	$(BIN)/python -m tests.compiler.program.proof.census --count 5400

# What faults do to a run, and docs/reliability.md; an hour, or some rows of it: make reliability ROWS=R1,R3
ROWS ?=
reliability: $(FOR_TESTS)
	$(BIN)/python -m tests.reliability --rows "$(ROWS)"

# Our training beside transformers and torch's pipelining, and docs/performance.md; some 20 minutes, on an idle machine.
bench: $(FOR_TESTS)
	$(BIN)/python -m benchmarks.speed

# Small models trained in variants, from three seeds each, and docs/balancing.md, docs/fp8.md. What has a result in
# benchmarks/results is not trained again, and what was stopped goes on. All of it takes some 10 minutes on two idle
# cores, and 20.
study-balance study-fp8: study-%: $(FOR_TESTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.studies $*

# On a machine with a GPU, all that needs one: every kernel checked and timed, the quickstart trained; ten minutes.
# It installs nothing: a machine with a GPU has its own torch, and often no network.
GPU_PYTHON ?= python3
gpu:
	$(GPU_PYTHON) -m benchmarks.gpu

lint: $(FOR_TESTS)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy

docs: $(FOR_TESTS)
	$(BIN)/python -m pytest --bless tests/dsl/test_reference.py -k page_is_current

# The extension for VS Code: its tests in the engines of the editor, and the package. Needs node 20 and npm.
extension: $(FOR_TESTS)
	cd $(EXTENSION) && npm ci && npm test && npm run package
	$(BIN)/python -m tests.compiler.tools.editor.vsix $(EXTENSION)/dsc.vsix

bless: $(FOR_TESTS)
	$(BIN)/python -m pytest --bless tests/dsl/test_ui.py tests/golden

clean:
	rm -rf build runs $(BUILD)/.triton $(MUTANTS) $(VENV)

# One call of pip, so that each package is looked for once, beside the compilation of the C++, for which it does not
# wait. constraints.txt pins torch: without it, a package may ask for another build. pip would store the bytecode of all
# modules, which takes it longer than all else: only that of modules which are imported is stored, here of those of a
# run, also where the environment asks for none.
define install
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "dsc needs Python 3.11 or newer: make PYTHON=python3.11")'
	@test -e $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PYTHON) -P runtime/ops/native/compile_cpp.py own > /dev/null 2>&1 & $(PIP) $(1) && $(STORE_BYTECODE); code=$$?; wait; exit $$code
	@$(BIN)/python -P runtime/ops/native/compile_cpp.py own > /dev/null || true
	@touch $@
endef

$(INSTALLED): pyproject.toml constraints.txt $(NATIVE)
	$(call install,-e .)

$(FOR_TESTS): pyproject.toml constraints.txt $(NATIVE)
	$(call install,-e '.[dev]')
	@touch $(INSTALLED)
