# make quickstart   set up, then train a small model on the CPU and show what it learned
# make test         set up, then run the test suite
# make test-long    the tests that take minutes each: the quickstart's answers, every preset, every objective
# make check        lint and types
# make install      set up alone: .venv/bin/tuner

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TESTS ?= tests

.PHONY: install quickstart test test-long check clean

install: $(INSTALLED)

$(INSTALLED): requirements.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tuner needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip setuptools wheel
	$(BIN)/pip install --quiet -r requirements.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $(INSTALLED)

quickstart: install
	$(BIN)/tuner train tiny_full_sample_e3
	@echo "tuner is $(BIN)/tuner here. To call it by its name in this shell, first: source $(BIN)/activate"

test: install
	$(BIN)/pytest -n 2 --dist worksteal $(TESTS)

test-long: install
	$(BIN)/pytest -n 2 --dist worksteal -m long $(TESTS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check tuner tests bench
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info
