# `make quickstart` and `make test` are all that is needed; both make the virtual environment first if there is none.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
QUICKSTART ?= runs/quickstart
# The fast tests compile most of the time and compute little: they take a third as long without LLVM's optimisation, and
# with what one process has compiled at hand for the others.
QUICK_COMPILES := XLA_FLAGS="--xla_backend_optimization_level=0 $$XLA_FLAGS" \
  JAX_COMPILATION_CACHE_DIR=$(abspath $(VENV))/compiled JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.3

.PHONY: quickstart test test-slow lint format
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   train RoPE, Kerple and DAPE-Kerple at length 64, compare them up to 2,048 (minutes)"
	@echo "make test         the fast tests          make test-slow   the slow ones"
	@echo "make lint         ruff and pyright        make format      rewrite the code as ruff formats it"

$(VENV)/ready: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements.txt
	@touch $@

$(VENV)/ready-dev: $(VENV)/ready requirements-dev.txt
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	@touch $@

quickstart: $(VENV)/ready
	@set -e; for position in rope kerple dape_kerple; do \
	  $(BIN)/python -m experiments.train --config=configs/quickstart.py:$$position --workdir=$(QUICKSTART)/$$position; \
	  $(BIN)/python -m experiments.evaluate --workdir=$(QUICKSTART)/$$position; \
	done
	@$(BIN)/python -m experiments.compare $(addprefix $(QUICKSTART)/,rope kerple dape_kerple)

test: $(VENV)/ready-dev
	$(QUICK_COMPILES) $(BIN)/python -m pytest -n auto -m "not slow"

test-slow: $(VENV)/ready-dev
	$(BIN)/python -m pytest -n auto -m slow

lint: $(VENV)/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/ready-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
