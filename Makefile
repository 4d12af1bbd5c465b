# make demo | test | lint | types | bench: each sets up .venv on a fresh machine, then runs.
PYTHON  ?= python3
WORKERS ?= 2
ARGS    ?=

VENV  := .venv
STAMP := $(VENV)/.installed
PIP   := $(VENV)/bin/python -m pip --disable-pip-version-check

.PHONY: help setup demo test lint types bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    run the demonstration"
	@echo "make test    run the tests             (ARGS='-k window', WORKERS=4)"
	@echo "make lint    ruff"
	@echo "make types   pyright"
	@echo "make bench   run the benchmarks        (ARGS='--quick', '--only delta')"
	@echo "make setup   create $(VENV) only        (PYTHON=python3.12)"
	@echo "make clean   remove $(VENV), caches and build output"

setup: $(STAMP)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Redone when what is installed changes.
$(STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "setting up $(VENV) (PyTorch is large: this takes a minute or more)"
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev,plot,graph,triton]'
	@touch $@

demo: $(STAMP)
	$(VENV)/bin/memkit demo $(ARGS)

# One thread a worker: torch's own threads would otherwise fight over the cores.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n auto --maxprocesses $(WORKERS) $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .

types: $(STAMP)
	$(VENV)/bin/pyright

bench: $(STAMP)
	$(VENV)/bin/python benchmarks/cpu.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
