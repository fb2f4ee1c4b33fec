# make train: from a fresh clone to a trained quickstart.  make test: everything, lint and types included.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: train test lint bless soak clean

train: $(STAMP)
	$(BIN)/dsc compile specs/quickstart.dsc
	$(BIN)/dsc train specs/quickstart.dsc

test: $(STAMP) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bless: $(STAMP)
	$(BIN)/python -m pytest --bless -q tests/ui tests/golden

clean:
	rm -rf build runs $(VENV)

# torch first and pinned: with it there, no other package asks for another build of it
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "dsc needs Python 3.11 or newer; try: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)
