# Every target runs from .venv and makes it first if it is missing. CI runs the same targets.
PYTHON ?= python3
BIN := .venv/bin
CPU := JAX_PLATFORMS=cpu
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
ARGS ?=

# pip gets --no-compile because compiling every module of every package doubles the time of an installation. Python
# compiles the modules that are imported when it first imports them, and stores the result unless the environment has
# PYTHONDONTWRITEBYTECODE, which is therefore emptied here. pip is upgraded first because the version that comes with
# Python can be years old and needs twice as long to resolve versions.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help setup train train-2 test test-slow check format bench bench-long pictures clean

help:  ## list all targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

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

.venv/.hf-test: pyproject.toml | .venv/bin/python
	$(PIP) --editable '.[hf-test]'
	@touch $@ .venv/.dev .venv/.train

.venv/.bench: pyproject.toml | .venv/bin/python
	$(PIP) --editable '.[bench]'
	@touch $@ .venv/.dev .venv/.train

setup: .venv/.dev  ## make .venv with every tool that development needs

train: .venv/.train  ## train the preset configs/tiny.py on 8 simulated CPU devices; ARGS='--steps 100' adds options
	$(CPU) $(BIN)/python train/run.py configs/tiny.py $(ARGS)

train-2: .venv/.train  ## the same with two processes of four devices each
	@export OMPI_MCA_orte_hnp_uri='1.0;tcp://127.0.0.1:29431' JAX_COORDINATOR_ADDRESS=127.0.0.1:29431 \
	  OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0; \
	run="$(CPU) $(BIN)/python train/run.py configs/tiny.py --mesh.distributed True --mesh.cpu_devices 4 --mesh.data 2 --mesh.model 4 $(ARGS)"; \
	OMPI_COMM_WORLD_RANK=1 env $$run & OMPI_COMM_WORLD_RANK=0 env $$run; code=$$?; wait; exit $$code

PYTEST := $(CPU) $(BIN)/python -m pytest
EVERYTHING := -n 2 --dist worksteal tests

test: .venv/.dev  ## run the tests that every change needs; ARGS='tests/test_ring.py -k both' selects some of them
	$(PYTEST) $(or $(ARGS),$(EVERYTHING))

test-slow: .venv/.hf-test  ## run all other tests; ARGS selects some of them
	$(PYTEST) -m slow $(or $(ARGS),$(EVERYTHING))

check: .venv/.dev  ## check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/.dev  ## format the code and fix the lint errors that ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

CACHE := runs/bench

bench: .venv/.bench  ## measure or predict the tables that take minutes, and draw their pictures
	$(CPU) $(BIN)/python benchmarks/train_throughput.py --write README.md
	$(CPU) $(BIN)/python benchmarks/train_throughput.py --experts --write docs/moe.md
	$(CPU) $(BIN)/python benchmarks/timeline.py --write docs/check.md --pictures docs/img
	$(CPU) $(BIN)/python benchmarks/async_starts.py --write docs/async.md
	$(CPU) $(BIN)/python benchmarks/vector_memory.py --write docs/tpu.md
	$(CPU) $(BIN)/python benchmarks/player.py --write docs/player.md --pictures docs/img
	$(CPU) $(BIN)/python benchmarks/player_v6e.py --write docs/player.md
	$(CPU) $(BIN)/python benchmarks/player_layers.py --write docs/player.md
	$(CPU) $(BIN)/python benchmarks/mesh_matmul.py --write docs/kernels/mesh_matmul.md
	$(CPU) $(BIN)/python benchmarks/all_gather_matmul.py --write docs/kernels/all_gather_matmul.md
	$(CPU) $(BIN)/python benchmarks/attention_kernel.py --write docs/kernels/layers.md
	$(CPU) $(BIN)/python benchmarks/attention.py --write docs/ring.md
	$(CPU) $(BIN)/python benchmarks/scaling.py --write docs/scaling.md
	$(CPU) $(BIN)/python benchmarks/gpu.py --write docs/gpu.md
	$(CPU) $(BIN)/python benchmarks/gpu_steps.py --programs $(CACHE) --write docs/gpu.md
	$(CPU) $(BIN)/python benchmarks/dispatch.py --write docs/dispatch.md

bench-long: .venv/.bench  ## predict the tables that take hours; what is in runs/bench is not played or compiled again
	$(CPU) $(BIN)/python benchmarks/tp_mlp.py --write docs/kernels/layers.md
	$(CPU) $(BIN)/python benchmarks/step.py --programs $(CACHE) --write docs/kernels/layers.md
	$(CPU) $(BIN)/python benchmarks/two_cores.py --programs $(CACHE) --write docs/kernels.md
	$(CPU) $(BIN)/python benchmarks/plan.py --programs $(CACHE) --write docs/plan.md
	$(CPU) $(BIN)/python benchmarks/plan_layers.py --programs $(CACHE) --write docs/plan.md
	$(CPU) $(BIN)/python benchmarks/recipes.py --programs $(CACHE) --write docs/scaling.md
	$(CPU) $(BIN)/python benchmarks/published_models.py --programs $(CACHE) --write docs/scaling.md
	$(CPU) $(BIN)/python benchmarks/data_axis.py --write docs/scaling.md
	$(CPU) $(BIN)/python benchmarks/moe.py --programs $(CACHE) --write docs/moe.md
	$(CPU) $(BIN)/python benchmarks/quantization.py --programs $(CACHE) --write docs/quantization.md
	$(CPU) $(BIN)/python benchmarks/whole_step.py --programs $(CACHE) --write docs/scaling.md
	$(CPU) $(BIN)/python benchmarks/measured.py --write docs/check.md
	$(CPU) $(BIN)/python benchmarks/soak.py --write docs/operations.md

pictures: .venv/.dev  ## draw the pictures in docs/img that need no benchmark
	$(BIN)/python docs/loop_picture.py
	$(BIN)/python docs/ring_step_picture.py
	$(BIN)/python docs/design_picture.py
	$(BIN)/python docs/ring_pictures.py

clean:  ## remove .venv, runs and caches
	rm -rf .venv runs build dist .mypy_cache .pytest_cache .ruff_cache
