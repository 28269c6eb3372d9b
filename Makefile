# Everything runs from .venv, which any target makes first. The targets are what CI runs.
PYTHON ?= python3
BIN := .venv/bin
CPU := JAX_PLATFORMS=cpu
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
ARGS ?=

# pip would compile every module that comes with the packages, in as long as all else that it does takes. Python compiles
# the few that are imported, once, when it first imports them: an environment that forbids it would have it each time.
# The pip that comes with Python can be years old, and takes twice as long as today's to choose among versions.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help setup train test test-all check format bench pictures clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { echo "flaxasync needs Python 3.12 or later; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv .venv && $(PIP) --upgrade pip || { rm -rf .venv; exit 1; }

.venv/.train: pyproject.toml | .venv/bin/python
	$(PIP) --editable '.[train]'
	@touch $@

.venv/.dev: pyproject.toml | .venv/bin/python
	$(PIP) --editable '.[dev]'
	@touch $@ .venv/.train

.venv/.bench: pyproject.toml | .venv/bin/python
	$(PIP) --editable '.[bench]'
	@touch $@ .venv/.dev .venv/.train

setup: .venv/.dev  ## make .venv with everything a developer needs

train: .venv/.train  ## train configs/tiny.py tensor-parallel on 8 simulated CPU devices; ARGS='--steps 100' adds options
	$(CPU) $(BIN)/python train/run.py configs/tiny.py $(ARGS)

test: .venv/.dev  ## run the tests; ARGS='tests/test_ring.py -k both' narrows them
	$(CPU) $(BIN)/python -m pytest $(or $(ARGS),-n 2 --dist loadfile --no-loadscope-reorder tests)

check: .venv/.dev  ## format check, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/.dev  ## format and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-all: .venv/.dev  ## run the slow tests, too
	FLAXASYNC_BENCH=1 $(MAKE) test

bench: .venv/.bench  ## measure the tables that the documents quote, and draw their pictures
	$(CPU) $(BIN)/python benchmarks/train_throughput.py --write README.md
	$(CPU) $(BIN)/python benchmarks/timeline.py --write docs/check.md --pictures docs/img
	$(CPU) $(BIN)/python benchmarks/async_table.py --write docs/async.md
	$(CPU) $(BIN)/python benchmarks/player.py --write docs/player.md --pictures docs/img
	$(CPU) $(BIN)/python benchmarks/mesh_matmul.py --write docs/kernels.md
	$(CPU) $(BIN)/python benchmarks/player_layers.py --write docs/player.md
	$(BIN)/python benchmarks/dispatch.py --write docs/dispatch.md
	$(CPU) $(BIN)/python benchmarks/attention.py --write docs/ring.md

pictures: .venv/.dev  ## draw the pictures in docs/img
	$(BIN)/python docs/loop_picture.py
	$(BIN)/python docs/ring_step_picture.py
	$(CPU) $(BIN)/python docs/player_picture.py
	$(BIN)/python docs/ring_pictures.py

clean:  ## remove .venv, runs and caches
	rm -rf .venv runs build dist .mypy_cache .pytest_cache .ruff_cache
