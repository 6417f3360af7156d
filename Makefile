# make demo   from a fresh clone to a streamed, measured model      make test   the tests            make lab    JupyterLab on the course
# make lint   all linters     make wheel   dist/*.whl, for here     make bench  benchmarks           make docs   the site in build/site
# make site   builds it and serves it at http://127.0.0.1:8000             make lighthouse   scores of its landing page (npm, Chromium)
# make release   sdist, manylinux wheels, checks, notes (tools/release.py)
# make test-gpu   the tests that need a GPU                         make sanitize   compute-sanitizer (memcheck, racecheck) over some of them
# make fuzz SECONDS=60   hostile inputs (tests/fuzz)              make sanitize-cpu   ASan, UBSan and TSan over the CPU engine
# make soak MINUTES=60   one engine under random requests (tools/soak.py)
#
# Needs python3 >= 3.10 with venv, and a C++20 compiler; everything else is installed into .venv, each step only what it needs.
PY ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# Where torch comes from. Empty: PyTorch's CPU index where there is no NVIDIA GPU and the index answers (200 MB, not 3 GB), else pip's own.
TORCH_INDEX ?=
# Processes of `make test`, each with one thread (tests/conftest.py).
TESTS_AT_ONCE ?= 2
CPU_INDEX := https://download.pytorch.org/whl/cpu
ENGINE := numpy safetensors tokenizers jinja2 pandas
BUILD := "scikit-build-core>=0.11" ninja "cmake>=3.25"
RELEASE := build twine wheel "auditwheel>=6.2" "ziglang==0.17.*"
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
SRC := $(shell find csrc -type f) CMakeLists.txt pyproject.toml
# Python's own build settings may name a compiler that is not installed (x86_64-linux-gnu-g++), so name one that is.
ifeq ($(origin CXX),default)
export CXX := $(firstword $(foreach c,g++ clang++ c++,$(shell command -v $(c))))
endif
ifeq ($(origin CC),default)
export CC := $(firstword $(foreach c,gcc clang cc,$(shell command -v $(c))))
endif

.PHONY: demo test test-gpu sanitize sanitize-cpu fuzz soak lab lint docs site lighthouse wheel release bench build clean
.DELETE_ON_ERROR:

build: $(VENV)/.built

$(VENV)/.torch:
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "exl2nb: $(PY) is too old or missing; needs Python >= 3.10 (make PY=python3.11 ...)"; exit 1; }
	@test -n "$(CXX)" || { echo "exl2nb: no C++ compiler found; on Debian: apt-get install g++"; exit 1; }
	@$(PY) -m venv $(VENV) || { echo "exl2nb: no virtual environment; on Debian: apt-get install python3-venv"; exit 1; }
	@index="$(TORCH_INDEX)"; \
	if [ -z "$$index" ] && ! command -v nvidia-smi >/dev/null && \
	  $(PY) -c "import urllib.request as r; r.urlopen('$(CPU_INDEX)/torch/', timeout=5)" 2>/dev/null; then index=$(CPU_INDEX); fi; \
	echo "[1/3] installing $(TORCH) and the engine's packages into $(VENV) (once, 200 MB and up)"; \
	$(PIP) install $${index:+--extra-index-url $$index} $(TORCH) $(ENGINE) $(BUILD)
	@touch $@

$(VENV)/.built: $(VENV)/.torch $(SRC)
	@echo "[2/3] compiling the kernels"
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.lab: pyproject.toml | $(VENV)/.built
	@echo "[3/3] installing JupyterLab and the widgets' packages"
	@$(PIP) install --no-build-isolation -e ".[lab]"
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.built
	@echo "[3/3] installing JupyterLab and the test tools"
	@$(PIP) install --no-build-isolation -e ".[dev]"
	@touch $@ $(VENV)/.lab

$(VENV)/.docs: pyproject.toml | $(VENV)/.built
	@echo "installing what the site is built with"
	@$(PIP) install --no-build-isolation -e ".[docs]"
	@touch $@

demo: build
	@echo "[3/3] running the demo"
	@$(BIN)/exl2nb demo

# the tests of rooms that work on any device
ON_EITHER := tests/cache tests/sampling tests/constraint tests/generator tests/llm tests/test_bad_input.py

# bytecode is written, so that the many processes that tests start do not compile the package again
test: build $(VENV)/.dev
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n $(TESTS_AT_ONCE) --dist worksteal

test-gpu: build $(VENV)/.dev
	$(BIN)/python -m pytest tests -m gpu
	$(BIN)/python -m pytest --device cuda $(ON_EITHER)

# racecheck follows other kernels (csrc/cuda/runtime/pdl.cuh)
sanitize: build $(VENV)/.dev
	$(BIN)/python tools/sanitize_gpu.py --tools memcheck
	EXL2NB_KERNEL_OPTIONS=-DEXL2NB_EVERY_LANE_ARRIVES $(BIN)/python tools/sanitize_gpu.py --tools racecheck

# hours; ONLY="ops/test_cpu_sample.py generator" for some, TOOLS=thread for one sanitizer
sanitize-cpu: build $(VENV)/.dev
	$(BIN)/python tools/sanitize_cpu.py $(if $(TOOLS),--tools $(TOOLS)) $(if $(ONLY),--only $(ONLY))

MINUTES ?= 60
DEVICE ?= cpu
soak: build $(VENV)/.dev
	$(BIN)/python tools/soak.py --minutes $(MINUTES) --device $(DEVICE)

# SECONDS: of all targets together
SECONDS ?= 60
SEED ?= 0
fuzz: build $(VENV)/.dev
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(PIP) install "atheris>=3"
	$(BIN)/python tests/fuzz/fuzz.py --seconds $(SECONDS) --seed $(SEED) $(TARGETS)

lab: build $(VENV)/.lab
	$(BIN)/exl2nb lab

lint: build $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright
	$(BIN)/clang-format --dry-run -Werror $$(find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh')
	@if command -v npm >/dev/null; then cd widgets && { test -d node_modules || npm ci --silent; } && npm run --silent lint && npm run --silent check; \
	else echo "no npm: widgets not checked"; fi

# the engine and the model that the site runs in the reader's browser
build/wasm/engine.wasm: tools/wasm.py $(SRC) | $(VENV)/.docs
	@mkdir -p build/wasm
	$(BIN)/python tools/wasm.py engine $@

build/wasm/model.bin: tools/wasm.py $(SRC) $(wildcard tests/data/demo-exl2-4.0bpw/*) | $(VENV)/.built
	@mkdir -p build/wasm
	$(BIN)/python tools/wasm.py model $@

docs: build $(VENV)/.docs build/wasm/engine.wasm build/wasm/model.bin
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# with another port: make site PORT=8100
PORT ?= 8000
site: docs
	@echo "http://127.0.0.1:$(PORT)/index.html (Ctrl-C ends it)"
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site $(PORT)

lighthouse: docs
	$(BIN)/python tools/lighthouse.py

wheel: $(VENV)/.torch
	$(PIP) wheel --no-deps --no-build-isolation -w dist .

$(VENV)/.release: | $(VENV)/.torch
	@$(PIP) install $(BUILD) $(RELEASE)
	@touch $@

# STEPS="sdist wheels check notes": some of them only
release: $(VENV)/.release
	$(BIN)/python tools/release.py $(STEPS)

bench: build
	$(BIN)/python benchmarks/gemv.py
	$(BIN)/python benchmarks/decode.py

clean:
	rm -rf build dist $(VENV)
