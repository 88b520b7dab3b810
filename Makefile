# make pretrain   set up, build a small corpus, pre-train a small PoS-BERT on two ranks
# make test       set up, run all tests but the exhaustive grids
# make test-exhaustive   what make test leaves out: pairs of grids, and slow tests near to others
# make test-cluster   under a SLURM of its own, and on namespaces as hosts: as root; it says which packages are missing
# make test-faults   100,000 damaged files for every reader (TRP_SCALE_FUZZ=N: so many), 20 kills, 10 stops
# make matrix     setup, unit tests and `make pretrain` under each of PYTHONS, in environments under build/matrix
# make docs       build the site of docs/ into build/site; a broken link or anchor is an error
# make setup | lint | types | wheel-test | clean
#
# PYTHON=python3.12 chooses the interpreter, RANKS=4 the ranks of `make pretrain`, DEVICE=cpu leaves out CUDA's libraries.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help setup absent-extras pretrain test unit test-exhaustive test-cluster test-faults matrix docs lint types wheel-test clean

PYTHON ?= python3
PYTHONS ?= python3.11 python3.12 python3.13
RANKS ?= 2
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
# The stamp exists only when the whole installation went through, and holds its extras; .installing marks one that began
# and did not end.
INSTALLED := $(VENV)/.installed
INSTALLING := $(VENV)/.installing
EXTRAS ?= deepspeed,vision,wandb,tensorboard,datasets,torchjd,text,pictures,evaluation,remote,ray,megatron,docs,test
CORPUS := data/embedded/dataset.json
comma := ,
HAS := $(shell cat $(INSTALLED) 2>/dev/null)
# Extras that are asked for and not there: they are added to an environment that is.
ABSENT := $(if $(filter-out file,$(origin EXTRAS)),$(filter-out $(HAS),$(subst $(comma), ,$(EXTRAS))))
DEVICE ?= cuda
TORCH_CPU ?= https://download.pytorch.org/whl/cpu
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# uv takes a fifth of pip's time, but does not read pip's configuration: where it cannot install, pip does.
define install
$(BIN)/python -m uv pip install --quiet --python $(BIN)/python -c constraints.txt $(1) || $(PIP) $(1)
endef

# ninja and the deepspeed launcher's children are looked up here.
export PATH := $(BIN):$(PATH)
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
# One more than cores: tests wait a part of their time, for processes that they have started.
WORKERS ?= $(shell echo $$(( $(CORES) + 1 )))
THREADS := $(shell echo $$(( $(CORES) > $(RANKS) ? $(CORES) / $(RANKS) : 1 )))

help:
	@sed -n 's/^# //p' Makefile | head -n 9

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt $(if $(ABSENT),absent-extras)
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and f"$(PYTHON) is Python {v}; trp-scale needs 3.11 or newer: make PYTHON=python3.12 setup")'
	@if [ -e $(INSTALLING) ]; then echo "the last installation did not finish: starting again in an empty $(VENV)"; rm -rf $(VENV); fi
	@mkdir -p $(VENV) && rm -f $(INSTALLED) && touch $(INSTALLING)
	@echo "installing into $(VENV) for $(DEVICE): some minutes, and $(if $(filter cpu,$(DEVICE)),1.5 GB or more,6 GB with CUDA's libraries)"
	@$(PYTHON) -m venv $(VENV) || { echo "no virtual environment could be made; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PIP) uv
	$(if $(filter cpu,$(DEVICE)),$(call install,--index-url $(TORCH_CPU) torch $(if $(filter vision,$(subst $(comma), ,$(EXTRAS))),torchvision)))
	$(call install,-e '.[$(EXTRAS)]')
	@rm -f $(INSTALLING) && echo $(sort $(HAS) $(subst $(comma), ,$(EXTRAS))) > $(INSTALLED)

absent-extras:

# Order-only: a newer installation does not make the corpus old.
$(CORPUS): | $(INSTALLED)
	$(BIN)/trp-scale shard-text --embedded --output data/embedded --length 128 --vocab_size 8192 --rows_per_block 64 --processes 2

FREE_PORT = $(shell $(BIN)/python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')

pretrain: $(INSTALLED) $(CORPUS)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$(THREADS)} $(BIN)/deepspeed --num_gpus $(RANKS) --master_port $(or $(MASTER_PORT),$(FREE_PORT)) launch/pretrain.py --ds_config ds_configs/zero2.json --recipe pos_modern_tiny

test: $(INSTALLED)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

unit: $(INSTALLED)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests/unit

matrix:
	tests/matrix.sh $(PYTHONS)

test-exhaustive: $(INSTALLED)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m exhaustive

test-cluster: $(INSTALLED)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -rs -m "cluster and not exhaustive" tests/cluster

test-faults: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m faults tests/faults

# Strict: what mkdocs.yml says under `validation` fails the build; with --quiet mkdocs would not count it. The variable leaves
# out an advertisement.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Also of the benchmarks, and of the files that the documents show.
types: $(INSTALLED)
	$(BIN)/python -m tests.extending build/documents
	$(BIN)/mypy trp_scale build/documents
	$(BIN)/mypy -p benchmarks

# Shards, pre-trains, reports and exports with the wheel in a new environment, from an empty folder.
wheel-test: $(INSTALLED)
	PYTHON=$(BIN)/python tests/wheel.sh

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@echo "kept: data/ and runs/"
