# One line for each thing a person wants. All of them set up .venv first, and set nothing up twice.
#
#   make demo    get a small model and watch requests being served
#   make test    ruff, pyright, pytest, and every notebook
#   make lab     open the course in JupyterLab
#   make outputs run the notebooks anew and keep what they print (after a deliberate change, on a quiet machine)
#
# Settings, for example `make demo PYTHON=python3.12`:
#   PYTHON       the interpreter that makes .venv (3.11 or newer)
#   TORCH        the version of torch to install
#   TORCH_INDEX  where torch comes from; empty means pip's own settings. From PyPI on Linux that is the CUDA build (about 3 GB).
#                The CPU build is 200 MB:  make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
#   WORKERS      how many processes test at the same time, each with one thread and up to 2 GB (default: 2)

PYTHON ?= python3
TORCH ?= 2.13.0
TORCH_INDEX ?=
WORKERS ?= 2

BIN := .venv/bin
STAMP := .venv/installed
# Two processes of one thread are faster than one of two: most of what is tested is Python, and tiny tensors gain nothing from threads.
# A file is tested by one process, in the order of names, so what its tests share is made once.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder
NBVAL := --nbval-lax --nbval-current-env --nbval-cell-timeout 120 --nbval-sanitize-with notebooks/nbval.cfg

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint unit notebooks lab outputs fmt clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

setup: $(STAMP)

# The stamp is written last, so an interrupted install is taken up again. Torch goes first and by itself: with no torch
# there, `torch>=2.11` would take the newest build, whatever its size.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "minserve needs Python 3.11 or newer; %s is %s. Try: make PYTHON=python3.12" % (sys.executable, sys.version.split()[0]))'
	@rm -f $(STAMP)
	@echo "Setting up .venv, once. First torch $(TORCH): 200 MB for the CPU build, about 3 GB for the CUDA build ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH)
	@echo "... then minserve, its tests and JupyterLab ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $(STAMP)
	@echo "... done."

demo: $(STAMP)
	@$(BIN)/minserve demo

test: lint unit notebooks

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# nbval is left out here: it would cost every run a second to import. -rs says what was not tested, and why.
# core is covered by its own tests; counting lines in the others too would take three times as long wherever the scheduler runs.
unit: $(STAMP)
	$(PYTEST) -rs -p no:nbval --cov=minserve/core --cov-fail-under=95 minserve/core tests/core
	$(PYTEST) -rs -p no:nbval --ignore=minserve/core --ignore=tests/core

notebooks: $(STAMP)
	$(PYTEST) $(NBVAL) notebooks

# In a container everybody is root, and JupyterLab wants to be told that this is meant.
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

lab: $(STAMP)
	$(BIN)/jupyter lab $(AS_ROOT) --notebook-dir=notebooks notebooks/00_start_here.ipynb

# Figures that a notebook exports for the README go to figures/. The second line joins the pieces of a streamed answer, each of which
# GitHub would show on a line of its own.
outputs: $(STAMP)
	MINSERVE_FIGURES="$(CURDIR)/figures" $(BIN)/jupyter nbconvert --to notebook --execute --inplace \
		--ExecutePreprocessor.record_timing=False --ExecutePreprocessor.store_widget_state=False notebooks/*.ipynb
	$(BIN)/jupyter nbconvert --coalesce-streams notebooks/*.ipynb

fmt: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .coverage build dist
