# Everything a fresh machine needs: `make demo` and `make test` make their own environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# torch first and pinned, so that no other requirement pulls in a larger build.
TORCH ?= torch==2.13.0
DEEPSPEED ?= deepspeed==0.19.8
MEGATRON ?= megatron-core==0.16.1

.PHONY: env demo test test-all lint types wheel-check clean

env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[test,dev,zeusd]" "$(DEEPSPEED)" einops
	$(BIN)/python -m pip install --quiet --no-deps "$(MEGATRON)"
	touch $@

# One training job three times on emulated GPUs; ends with a table and runs/demo/summary.json.
demo: env
	$(BIN)/python examples/demo.py

lint: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# mypy cannot see through the mapping of integrations/ and launch/: give it a tree of links.
types: env
	rm -rf .typecheck && mkdir -p .typecheck/kareus_pp
	ln -s $(CURDIR)/kareus_pp/* .typecheck/kareus_pp/
	ln -s $(CURDIR)/integrations $(CURDIR)/launch $(CURDIR)/configs .typecheck/kareus_pp/
	MYPYPATH=.typecheck $(BIN)/mypy --explicit-package-bases -p kareus_pp

test: env lint types
	$(BIN)/python -m pytest

test-all: env lint types
	$(BIN)/python -m pytest -m "not gpu"

clean:
	rm -rf $(VENV) build dist .typecheck *.egg-info
