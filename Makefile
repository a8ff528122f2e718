# Each target does the set-up that it needs, into .venv. A machine needs Python >= 3.10, a C++ compiler
# and a package registry. Only `make gpu` and `make gpu-first` use the machine's own Python and torch; see
# benchmarks/README.md.

PYTHON ?= python3
GPU_PYTHON ?= python3
OUT ?= out
CASES ?= 2
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SAY := @echo "fastbert:"
CPP := $(foreach suffix,h cpp cu cuh,'csrc/*.$(suffix)') 'ptxmachine/csrc/*.h' 'ptxmachine/csrc/*.cpp' 'tests/*.cpp'
SOURCES := setup.py $(shell find csrc -type f 2>/dev/null)

.PHONY: help setup demo test every-case turn test-processors test-arm test-viewer viewer ahead-of-time emulate calibrate mutate mutate-viewer sanitize soak conformance conformance-transformers conformance-peers conformance-wrappers checkpoints fuzz check newest bench docs lint format gpu gpu-first wheel release-check clean

help:
	@echo "make setup            creates .venv, compiles the C++ kernels and installs fastbert in place"
	@echo "make demo             pre-trains a small BERT, reopens it in transformers, writes $(OUT)/demo/report.md"
	@echo "make test             runs a selection of the cases of every test: 8 minutes on two idle cores (TESTS='tests/ops': a part)"
	@echo "make every-case       runs all cases of all tests: 40 minutes on two idle cores (TESTS='tests/ops': a part)"
	@echo "make turn             runs the slice of make every-case and the gate whose turn it is (NAMES='ops check': these; NAMES=--list: names)"
	@echo "make test-processors  runs the numeric tests as older processors would judge them"
	@echo "make test-arm         builds fastbert for aarch64 and tests it under emulation; unpacks Debian's packages in build/arm (PROCESSORS='max': a part)"
	@echo "make test-viewer      tests the page of fastbert view in Chromium; installs Chromium, playwright and axe-core"
	@echo "make viewer           builds the page of fastbert view from its sources; needs node"
	@echo "make ahead-of-time    compiles every Triton launch for five architectures of GPUs, and judges the binaries (ARCH=90: a part)"
	@echo "make emulate          runs the compiled GPU kernels on the CPU, for sm_80 and sm_90, into $(OUT)/emulate (CASES=2: random cases per operation; TRITON=3.6.0: another release)"
	@echo "make calibrate        runs kernels that are right on GPUs on the PTX machine; installs CUTLASS's headers"
	@echo "make mutate           puts one fault at a time into the kernels and counts those that a test catches (PART=3/16: a part)"
	@echo "make mutate-viewer    puts one fault at a time into the page of fastbert view and counts those that a test catches"
	@echo "make sanitize         runs the tests of the C++ operators under GCC's sanitizers (SANITIZERS=thread: a part)"
	@echo "make soak             uses models in turns, and looks for growing memory, open files and threads (MINUTES=60)"
	@echo "make conformance      runs the tests of transformers (-transformers FAMILIES='bert': a part), of Liger and of PEFT (-peers) with fastbert, and libraries around encoders (-wrappers WRAPPERS='setfit': a part)"
	@echo "make checkpoints      compares trained checkpoints of other people in fastbert and in transformers (PACKAGES='rxnfp': a part)"
	@echo "make fuzz             reads damaged models, tokenizers, checkpoints, corpora, data and PTX texts in processes with limits (SECONDS=600: that long)"
	@echo "make check            prints the errors of every operation, backend and dtype on this machine"
	@echo "make newest           installs fastbert with the newest torch into .venv-newest, as README does, and runs make check there"
	@echo "make bench            times fastbert and other engines on the CPU, into $(OUT)/cpu (SECTIONS='training': a part)"
	@echo "make docs             builds the documentation into $(OUT)/docs; needs network only to install its tools"
	@echo "make lint             runs ruff, mypy and clang-format; make format applies automatic fixes"
	@echo "make gpu-first        shows in eight minutes what runs on a GPU machine, into $(OUT)/gpu-first"
	@echo "make gpu              builds, tests, checks and times on a GPU machine, into $(OUT)/gpu (SECTIONS='build check': a part)"
	@echo "make wheel            builds dist/*.whl"
	@echo "make release-check    decides whether this commit can be released, and writes its packages and records into $(OUT)/release (STEPS='packages parity': a part)"
	@echo "make clean            removes .venv and everything that was built"

.venv/torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "fastbert needs Python >= 3.10")'
	$(SAY) "Creating .venv and installing torch and the build tools: 1 to 3 minutes, most of it download."
	$(PYTHON) -m venv .venv
	$(PIP) torch 'setuptools>=77' wheel ninja pybind11
	@touch $@

# Only changed files are compiled, because the objects stay in build/. pip would compile in silence, so
# setup.py compiles first. SHORT shortens each command of ninja to a counter and the name of the file,
# which is in csrc/ or in build/; ninja puts a path with a space between quotation marks.
SHORT := sed -u -E "s,^(\[[0-9]+/[0-9]+\]) .* -c .*/((csrc|build)/[^ ']+)'? -o .*,\1 compiled \2,"
.venv/fastbert: SHELL := bash
.venv/fastbert: .SHELLFLAGS := -o pipefail -c
.venv/fastbert: .venv/torch pyproject.toml $(SOURCES)
	$(SAY) "Compiling the C++ kernels: 1 to 2 minutes on two idle cores, up to 15 on busy ones. A line" \
		"is printed for each finished file. Later builds compile only the changed files."
	@$(BIN)/python setup.py --quiet build_ext --inplace 2>&1 | $(SHORT)
	$(SAY) "Installing fastbert and its Python packages: 1 to 2 minutes, most of it download."
	$(PIP) --no-build-isolation --editable '.[test]'
	@touch $@

# An editable install would write the path of the checkout into a .pth file. Python reads that file in
# the encoding of the locale, and does not start when the path cannot be decoded.
.venv/ptxmachine: .venv/torch $(wildcard $(addprefix ptxmachine/,csrc/* src/ptxmachine/*.py* setup.py pyproject.toml))
	$(SAY) "Compiling and installing ptxmachine, which runs the GPU kernels on the CPU: 1 to 3 minutes."
	$(PIP) --no-build-isolation ./ptxmachine
	@touch $@

# A peer that cannot be installed is no error; the benchmark's table lists the peer as not installed.
.venv/bench: pyproject.toml | .venv/fastbert
	$(SAY) "Installing the peers of the benchmark: 1 to 2 minutes."
	$(PIP) --no-build-isolation --editable '.[bench]' || echo "fastbert: some peers could not be installed."
	$(PIP) --no-deps --upgrade --target .venv/peers torchao || echo "fastbert: torchao could not be installed."
	@touch $@

.venv/lint: requirements-lint.txt | .venv/fastbert
	$(SAY) "Installing ruff, mypy and clang-format: half a minute."
	$(PIP) --requirement requirements-lint.txt
	@touch $@

.venv/docs: requirements-docs.txt | .venv/fastbert
	$(SAY) "Installing the documentation tools: half a minute."
	$(PIP) --requirement requirements-docs.txt
	@touch $@

setup: .venv/fastbert .venv/ptxmachine

demo: setup
	$(SAY) "Training a tokenizer and a small BERT, then checking and timing it: 2 to 4 minutes on two idle cores."
	$(BIN)/fastbert demo --out $(OUT)/demo

# A process that a hang has ended is replaced once; pytest-xdist would repeat the hang eight times.
# The files with few tests are not the short ones, so the order of the files stays.
PARALLEL := --numprocesses 2 --max-worker-restart 1 --no-loadscope-reorder --dist

test: setup
	$(SAY) "Running the cases of make test: 8 minutes on two idle cores. The last line says how long it took."
	$(BIN)/python -m pytest $(PARALLEL) loadscope $(TESTS)

every-case: setup
	$(SAY) "Running all cases: 40 minutes on two idle cores, without TESTS. The last line says how long it took."
	$(BIN)/python -m pytest $(PARALLEL) loadscope --every-case $(TESTS)

turn: setup
	$(BIN)/python tests/turns.py $(if $(MINUTES),--minutes $(MINUTES)) $(NAMES)

test-processors: setup
	$(SAY) "Running the numeric tests as three processors would judge them: 5 minutes on two idle cores."
	$(BIN)/python tests/processors.py $(PARALLEL) worksteal

test-arm: .venv/torch
	$(SAY) "Building fastbert for aarch64 and testing it on two processors under emulation: about 20 minutes on two idle cores."
	$(BIN)/python tests/arm/arm.py $(PROCESSORS)

# The page of `fastbert view`. Its users need no node; the built page is committed.
WEB := fastbert/viewer/web
$(WEB)/node_modules: $(WEB)/package-lock.json
	$(SAY) "Installing the libraries and the tools of the page: a few seconds."
	command -v npm || { apt-get update -qq && apt-get install -qq --yes nodejs npm; }
	cd $(WEB) && npm ci --no-audit --no-fund --ignore-scripts
	@touch $@

viewer: $(WEB)/node_modules
	cd $(WEB) && node build.mjs

# Only root can install Chromium; others are told to.
.venv/viewer: pyproject.toml | .venv/fastbert
	$(SAY) "Installing playwright, and Chromium if there is none: up to a minute, most of it download."
	$(PIP) --no-build-isolation --editable '.[test,viewer]'
	command -v chromium || { apt-get update -qq && apt-get install -qq --yes chromium; }
	@touch $@

test-viewer: .venv/viewer $(WEB)/node_modules
	$(BIN)/python -m pytest tests/viewer --every-case $(PARALLEL) loadfile

ahead-of-time: setup
	$(SAY) "Compiling all Triton launches for sm_80, sm_89, sm_90, sm_100 and sm_120: about 4 minutes each on two idle cores."
	$(BIN)/fastbert check --aot $(if $(ARCH),--arch $(ARCH))

# Another release of Triton, which `make emulate TRITON=3.6.0` runs.
.venv/triton-%: | .venv/fastbert
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==$*

emulate: setup $(if $(TRITON),.venv/triton-$(TRITON))
	$(SAY) "Compiling the Triton and CUDA C++ kernels for sm_80 and sm_90 and running them on the PTX machine:" \
		"about 10 minutes on two idle cores if nothing was compiled before. A line is printed for each finished run."
	$(if $(TRITON),PYTHONPATH=.venv/triton-$(TRITON)) $(BIN)/python tests/ptx/emulate_all.py --cases $(CASES) --out $(OUT)/emulate

.venv/cutlass: .venv/fastbert
	$(SAY) "Installing the headers of CUTLASS: half a minute, most of it download."
	$(PIP) --no-deps --target $@ nvidia-cutlass

calibrate: .venv/cutlass
	$(BIN)/python -m pytest tests/ptx/calibration --every-case $(PARALLEL) loadfile -o faulthandler_timeout=4000

mutate: setup
	$(BIN)/python tests/mutation/mutate.py $(if $(PART),--part $(PART))

mutate-viewer: .venv/viewer $(WEB)/node_modules
	$(BIN)/python tests/mutation/mutate_page.py

SANITIZERS ?= address thread
sanitize: $(addprefix sanitize-,$(SANITIZERS))

sanitize-%: setup
	$(BIN)/python tests/sanitizers/sanitize.py $*

soak: setup
	$(BIN)/python tests/soak/soak.py $(if $(MINUTES),--minutes $(MINUTES))

.venv/conformance: .venv/fastbert
	$(SAY) "Installing the test tools of transformers: a few seconds."
	$(PIP) parameterized
	@touch $@

conformance: conformance-transformers conformance-peers conformance-wrappers

conformance-transformers: .venv/conformance
	$(BIN)/python tests/conformance/transformers_suite.py $(FAMILIES)

conformance-peers: .venv/conformance
	$(BIN)/python tests/conformance/peers_suite.py $(PEERS)

conformance-wrappers: .venv/conformance
	$(BIN)/python tests/conformance/wrappers_suite.py $(WRAPPERS)

# The first run downloads 175 MB into build/checkpoints; later runs need no network.
checkpoints: setup
	$(BIN)/python tests/checkpoints/checkpoints.py $(PACKAGES)

# A case that fails is kept in $(OUT)/fuzz with the command that runs it again.
SECONDS ?= 120
fuzz: setup
	$(BIN)/python tests/fuzz/fuzz.py --seconds $(SECONDS) --out $(OUT)/fuzz

check: setup
	$(BIN)/fastbert check

# The pins of constraints.txt do not apply here. The objects are kept apart from those of .venv.
NEWEST := .venv-newest/bin
newest: export DIST_EXTRA_CONFIG := $(CURDIR)/.venv-newest/build.cfg
newest:
	$(SAY) "Installing the newest torch into .venv-newest, which is a CUDA build of 5 GB on Linux, and compiling" \
		"the C++ kernels: 5 to 30 minutes on two idle cores, most of it for the CUDA kernels if nvcc is found."
	$(PYTHON) -m venv --clear .venv-newest
	printf '[build]\nbuild_base = build/newest\n' > .venv-newest/build.cfg
	$(NEWEST)/python -m pip install --quiet torch 'setuptools>=77' wheel ninja pybind11
	$(NEWEST)/python -m pip install --quiet --no-build-isolation '.[transformers,triton]'
	$(NEWEST)/fastbert info
	$(NEWEST)/fastbert check

bench: .venv/bench
	$(BIN)/python -m benchmarks.cpu $(SECTIONS) --out $(OUT)/cpu

docs: .venv/docs
	$(BIN)/python -m mkdocs build --strict --site-dir $(OUT)/docs

# PLW1514, which is still a preview of ruff: the encoding of a text file must not be the user's locale.
lint: .venv/lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 .
	$(BIN)/mypy
	git ls-files $(CPP) | xargs $(BIN)/clang-format --dry-run -Werror

format: .venv/lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	git ls-files $(CPP) | xargs $(BIN)/clang-format -i

gpu:
	$(GPU_PYTHON) -m benchmarks.gpu $(SECTIONS) $(if $(MINUTES),--minutes $(MINUTES)) --out $(OUT)/gpu

gpu-first:
	$(GPU_PYTHON) -m benchmarks.gpu.first --out $(OUT)/gpu-first

wheel: .venv/torch
	$(PIP) build
	$(BIN)/python -m build --wheel --no-isolation

release-check: .venv/lint .venv/docs setup
	$(PIP) build
	$(SAY) "Checking this commit as a release: 90 minutes on two idle cores, most of it conformance."
	$(BIN)/python tests/release/release_check.py --out $(OUT)/release $(if $(STEPS),--only $(STEPS))

clean:
	rm -rf .venv .venv-newest build dist out *.egg-info fastbert/*.so ptxmachine/build ptxmachine/src/*.egg-info ptxmachine/src/ptxmachine/*.so
