# `make demo` and `make test` are all the set-up there is: each makes .venv where there is none,
# installs into it when pyproject.toml or constraints.txt changed, and runs.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   ?=
TESTS  ?=
# Two files of tests at a time; each keeps its processes for all of its tests. In the order of their
# names: else files of few long tests come last, one after the other. PARALLEL= runs one.
PARALLEL ?= -n 2 --dist loadfile --no-loadscope-reorder

# On x86-64 Linux the default index serves torch with the whole of CUDA, several gigabytes. Without an
# NVIDIA driver only a CPU build is taken, from the configured indexes or from TORCH_CPU_INDEX.
TORCH           := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH_CPU_INDEX ?=
CPU_ONLY        := $(shell [ "$$(uname -sm)" = "Linux x86_64" ] && ! command -v nvidia-smi >/dev/null 2>&1 && echo yes)

# One thread a rank: ranks share the cores, and more threads than cores only wait for each other.
demo test soak: export OMP_NUM_THREADS ?= 1

.PHONY: help demo test soak lint format clean

help:
	@echo 'make demo    train the example on 4 CPU ranks, or all GPUs (DEMO="--max-steps 20 ..." passes flags)'
	@echo 'make test    run the tests (TESTS="tests/planning -k name" runs some)'
	@echo 'make soak    run the tests that take minutes each: thousands of iterations, hundreds of configurations'
	@echo 'make lint    ruff, mypy, import-linter'
	@echo 'make format  ruff format and safe fixes'
	@echo 'make clean   remove the environment and caches'

demo: $(STAMP)
	$(BIN)/python examples/stdlib_lm.py $(DEMO)

# DeepSpeed compiles a small op when it is first used; not inside a test, which has a time limit.
test: $(STAMP)
	@$(BIN)/python -c "from lightning_dcp.strategies.extension_lock import wait_for_build_lock as wait; wait(); \
	  from deepspeed.comm.torch import build_shm_op as build; build()" > /dev/null
	$(BIN)/python -m pytest $(PARALLEL) $(TESTS)

soak: $(STAMP)
	$(BIN)/python -m pytest -m slow $(TESTS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
ifeq ($(CPU_ONLY),yes)
	@$(BIN)/python -m pip install -q -c constraints.txt 'torch==$(TORCH)+cpu' $(TORCH_CPU_INDEX:%=--extra-index-url %) || { \
	  echo "There is no CPU build of torch $(TORCH) for this Python on the configured package indexes."; \
	  echo "Set TORCH_CPU_INDEX to the index of CPU builds that pytorch.org names for pip, or install"; \
	  echo "torch==$(TORCH) into $(VENV) yourself, and run make again with CPU_ONLY=no."; exit 1; }
endif
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
