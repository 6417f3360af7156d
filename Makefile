# make demo: everything from a fresh clone to a streamed, measured model.  make test: the tests.  make lab: JupyterLab.  make lint: all linters.
PY ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
SRC := $(shell find csrc -type f) CMakeLists.txt pyproject.toml
.PHONY: demo test lab lint build clean

build: $(VENV)/.built

$(VENV)/.deps: pyproject.toml
	$(PY) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(TORCH) numpy
	$(BIN)/python -m pip install -q "scikit-build-core>=0.11" ninja "cmake>=3.25"
	touch $@

$(VENV)/.built: $(VENV)/.deps $(SRC)
	$(BIN)/python -m pip install -q -e ".[dev]" --no-build-isolation
	touch $@

demo: build
	$(BIN)/exl2nb demo

test: build
	$(BIN)/python -m pytest tests

lab: build
	$(BIN)/python -m jupyter lab notebooks

lint: build
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/lint-imports && $(BIN)/pyright

clean:
	rm -rf build $(VENV)
