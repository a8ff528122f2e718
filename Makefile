# Each target does the set-up that it needs, into .venv. A machine needs Python >= 3.10, a C++ compiler
# and a package registry. `make gpu` alone uses the machine's own Python and torch: see benchmarks/README.md.

PYTHON ?= python3
GPU_PYTHON ?= python3
OUT ?= out
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SAY := @echo "fastbert:"
SOURCES := setup.py $(shell find csrc -type f 2>/dev/null)

.PHONY: help setup demo test test-processors mutate sanitize conformance check bench docs lint format gpu wheel clean

help:
	@echo "make setup   create .venv, build the extension, install fastbert in place"
	@echo "make demo    pre-train a small BERT, reopen it in transformers, write $(OUT)/demo/report.md"
	@echo "make test    the whole test suite"
	@echo "make test-processors  the numeric tests beside the yardsticks of other processors"
	@echo "make mutate  put one fault after another into the kernels, Triton and C++: does a test notice?"
	@echo "make sanitize  the C++ operators' tests under the address, undefined and thread sanitizers"
	@echo "make conformance  transformers' own model tests, stock beside accelerated (FAMILIES='bert': a part)"
	@echo "make check   the parity table: every op x backend x dtype of this machine"
	@echo "make bench   the CPU beside its peers: table, JSON, plots in $(OUT)/cpu (SECTIONS='training': a part)"
	@echo "make docs    build this documentation into $(OUT)/docs, without network once its tools are installed"
	@echo "make lint    ruff, mypy, clang-format (make format mends what can be mended)"
	@echo "make gpu     on a GPU machine: build, test, check, bench into $(OUT)/gpu (SECTIONS='build check': a part)"
	@echo "make wheel   build dist/*.whl"

.venv/torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "fastbert needs Python >= 3.10")'
	$(SAY) "Creating .venv and installing torch and the build tools: 1 to 3 minutes, most of it download."
	$(PYTHON) -m venv .venv
	$(PIP) torch 'setuptools>=77' wheel ninja pybind11
	@touch $@

# Only what has changed is compiled: the objects stay in build/.
.venv/fastbert: .venv/torch pyproject.toml $(SOURCES)
	$(SAY) "Installing the Python packages and compiling the C++ kernels: 2 minutes on two idle cores," \
		"15 on busy ones. pip prints nothing meanwhile; later builds compile changed files only."
	$(PIP) --no-build-isolation --editable '.[test]'
	@touch $@

# A peer that cannot be installed is no fault: the table says that it is not there.
.venv/bench: pyproject.toml | .venv/fastbert
	$(SAY) "Installing the peers of the benchmark: 1 to 2 minutes."
	$(PIP) --no-build-isolation --editable '.[bench]' || echo "some peers are missing"
	@touch $@

.venv/lint: requirements-lint.txt | .venv/fastbert
	$(PIP) --requirement requirements-lint.txt
	@touch $@

.venv/docs: requirements-docs.txt | .venv/fastbert
	$(SAY) "Installing the documentation tools: half a minute."
	$(PIP) --requirement requirements-docs.txt
	@touch $@

setup: .venv/fastbert

demo: setup
	$(SAY) "Training a tokenizer and a small BERT, then checking and timing it: 2 to 4 minutes on two cores."
	$(BIN)/fastbert demo --out $(OUT)/demo

test: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist loadscope

test-processors: setup
	$(BIN)/python tests/processors.py --numprocesses 2 --dist loadscope

mutate: setup
	$(BIN)/python tests/mutation/mutate.py

sanitize: setup
	$(BIN)/python tests/sanitizers/sanitize.py address
	$(BIN)/python tests/sanitizers/sanitize.py thread

.venv/conformance: .venv/fastbert
	$(PIP) parameterized
	@touch $@

conformance: .venv/conformance
	$(BIN)/python tests/conformance/transformers_suite.py $(FAMILIES)

check: setup
	$(BIN)/fastbert check

bench: .venv/bench
	$(BIN)/python -m benchmarks.cpu $(SECTIONS) --out $(OUT)/cpu

docs: .venv/docs
	$(BIN)/python -m mkdocs build --strict --site-dir $(OUT)/docs

lint: .venv/lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

format: .venv/lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' | xargs $(BIN)/clang-format -i

gpu:
	$(GPU_PYTHON) -m benchmarks.gpu $(SECTIONS) --out $(OUT)/gpu

wheel: .venv/torch
	$(PIP) build
	$(BIN)/python -m build --wheel --no-isolation

clean:
	rm -rf .venv build dist out *.egg-info fastbert/*.so
