# Everything a developer runs. `make help` lists it.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# python3 where it is new enough, else the newest other one; override with `make PYTHON=python3.13 setup`.
suitable := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for candidate in python3 python3.14 python3.13 python3.12 python3.11; do \
	if $$candidate -c '$(suitable)' >/dev/null 2>&1; then echo $$candidate; break; fi; done)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-for-demo

# Two threads: results and timings that are the same on a laptop and on a small CI machine. Tests have as many workers.
THREADS ?= 2
export OMP_NUM_THREADS := $(THREADS)
export MKL_NUM_THREADS := $(THREADS)
test test-ci test-accelerator test-all golden: export OMP_NUM_THREADS := 1
test test-ci test-accelerator test-all golden: export MKL_NUM_THREADS := 1
# Threads that spin while they wait for each other make small operations a hundred times slower on a busy machine.
export OMP_WAIT_POLICY ?= PASSIVE

CODE := $(wildcard rkgb rockmate solvers/rk_solvers examples benchmarks)
PYTEST := $(BIN)/python -m pytest
# Files of tests take turns in as many processes; WORKERS=0 runs them in one, as where a GPU's memory is measured.
WORKERS ?= 2
IN_PARALLEL := --numprocesses $(WORKERS) --dist loadfile
PYTEST_ARGS ?=
# What machines with a GPU, PyTorch and the usual libraries beside it lack; name others as in LACKING="msgspec rich".
LACKING ?= fast-sugiyama msgspec platformdirs psutil

.PHONY: help setup test test-ci test-accelerator test-all test-torches test-torch test-oldest setup-oldest torch-env gpu-site lint format types demo bench gpu gpu-wheels notebooks docs golden clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  \033[1m%-16s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv and install the project with its development tools

# What of the project is to be installed, such as .[dev].
define install
	@if [ -z "$(PYTHON)" ]; then \
		echo "No suitable Python found: Python 3.11 or newer with the venv module is needed" >&2; \
		echo "(on Debian or Ubuntu: apt install python3 python3-venv). Or name one: make PYTHON=/path/to/python3" >&2; \
		exit 1; fi
	@if [ ! -x $(BIN)/python ]; then echo "creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); fi
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '$(1)'
endef

$(STAMP): pyproject.toml constraints.txt
	$(call install,.[dev])
	@touch $@ $(DEMO_STAMP)

# The project and what makes it quick, without what tests, trainers, notebooks and pages need.
$(DEMO_STAMP): pyproject.toml constraints.txt
	$(call install,.[fast])
	@touch $@

test: $(STAMP) ## Run the tests that take minutes: each promise, all units, oracles and golden files
	$(PYTEST) $(IN_PARALLEL) -m "not ci and not slow" $(PYTEST_ARGS)

test-ci: $(STAMP) ## Run all tests but long sweeps
	$(PYTEST) $(IN_PARALLEL) -m "not slow" $(PYTEST_ARGS)

test-accelerator: $(STAMP) ## Run the tests on an accelerator that is built for them
	$(PYTEST) --numprocesses $(WORKERS) --dist load -m "not slow" tests/accelerator $(PYTEST_ARGS)

test-all: $(STAMP) ## Run every test, long sweeps too
	$(PYTEST) --numprocesses $(WORKERS) --dist load tests/accelerator $(PYTEST_ARGS)
	$(PYTEST) $(IN_PARALLEL) $(PYTEST_ARGS)

# Each release that is supported, beside the pinned one: the quick tests, in an environment of its own.
TORCHES ?= 2.9.1 2.10.0 2.11.0 2.12.1 2.14.1 2.15.0
test-torches: ## Run the quick tests with each PyTorch of TORCHES; gigabytes are installed into .venv-torch
	@failed=; for version in $(TORCHES); do $(MAKE) --no-print-directory test-torch TORCH=$$version || failed="$$failed $$version"; \
		done; if [ -n "$$failed" ]; then echo "not with PyTorch$$failed" >&2; exit 1; fi

test-torch: torch-env
	$(IN_TORCH) -m "not ci and not slow" $(PYTEST_ARGS)

# What CI runs with the oldest release that is supported: names of its own that PyTorch may change, and exactness.
OLDEST := 2.9.1
OLDEST_TESTS := tests/graph/test_torch_private.py tests/graph/test_torch_private_shapes.py tests/graph/test_torch_private_tracers.py \
	tests/graph/test_torch_private_parts.py tests/graph/test_undetected.py tests/module/test_exactness.py \
	tests/module/test_transparent.py tests/module/test_offload.py tests/regions/test_build.py tests/loops tests/test_tiny.py
test-oldest setup-oldest: TORCH := $(OLDEST)
test-oldest setup-oldest: EXTRAS := test
test-oldest: torch-env ## Run the tests that tell most of it with the oldest PyTorch that is supported, as CI does
	$(IN_TORCH) -m "not ci and not slow" $(OLDEST_TESTS) $(PYTEST_ARGS)

setup-oldest: torch-env

# One environment for each release; it takes gigabytes, as most releases come with the libraries of CUDA.
EXTRAS ?= test,notebooks,docs
# Of what is installed little is imported: it is compiled to bytecode then, which PYTHONDONTWRITEBYTECODE would not keep.
IN_TORCH = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 .venv-torch/$(TORCH)/bin/python -m pytest $(IN_PARALLEL)

torch-env:
	@[ -n "$(TORCH)" ] || { echo "say which: make test-torch TORCH=2.11.0" >&2; exit 1; }
	@[ -x .venv-torch/$(TORCH)/bin/python ] || $(PYTHON) -m venv .venv-torch/$(TORCH)
	@grep -v -E "^(torch|torchmetrics)==" constraints.txt > .venv-torch/$(TORCH)/constraints.txt
	@[ .venv-torch/$(TORCH)/.installed-$(EXTRAS) -nt pyproject.toml ] || { \
		.venv-torch/$(TORCH)/bin/python -m pip install --disable-pip-version-check --no-cache-dir --no-compile --quiet \
		-c .venv-torch/$(TORCH)/constraints.txt torch==$(TORCH) -e '.[$(EXTRAS)]' \
		&& touch .venv-torch/$(TORCH)/.installed-$(EXTRAS); }

lint: $(STAMP) ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## Repair style and formatting where a tool can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## Check types
	$(BIN)/mypy $(CODE)

demo: $(DEMO_STAMP) ## Train GPT-2 and ResNet-50 under three budgets; table and figure in demo_output/
	$(BIN)/python examples/demo.py $(ARGS)

bench: $(STAMP) ## Measure time and memory against eager and torch.utils.checkpoint
	$(BIN)/python benchmarks/step.py $(ARGS)

# A machine with a GPU has PyTorch of its own and no network: what it lacks comes from $(WHEELS).
WHEELS ?= .whl
DEVICE ?= cuda
OUT ?= first_hour_output
SITE := $(OUT)/site
gpu: $(if $(filter cuda,$(DEVICE)),gpu-site,$(STAMP)) ## All that a GPU is to show, into OUT=folder; DEVICE=cpu or testacc show that it runs
	PYTHONPATH=.:solvers:$(SITE) $(if $(filter cuda,$(DEVICE)),$(PYTHON),$(abspath $(BIN))/python) \
		benchmarks/first_hour.py --device $(DEVICE) --output $(OUT) $(ARGS)

gpu-site:
	@mkdir -p $(SITE)
	$(if $(wildcard $(WHEELS)/*.whl),$(PYTHON) -m pip install --disable-pip-version-check --quiet --no-index --no-deps \
		--upgrade --target $(SITE) $(wildcard $(WHEELS)/*.whl),@echo "no wheels in $(WHEELS): all is to be there")

gpu-wheels: $(STAMP) ## Fill .whl with what a machine with PyTorch and no network lacks
	$(BIN)/python -m pip download --disable-pip-version-check --quiet --no-deps --only-binary=:all: --dest $(WHEELS) \
		--python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
		--platform manylinux_2_34_x86_64 -c constraints.txt $(LACKING)

notebooks: $(STAMP) ## Execute every notebook
	$(PYTEST) tests/test_notebooks.py $(PYTEST_ARGS)

docs: $(STAMP) ## Build the documentation's site in docs/_build/html, warnings being errors
	$(BIN)/python -m sphinx -b html -c docs --fail-on-warning --keep-going --nitpicky --quiet . docs/_build/html
	@echo "open docs/_build/html/index.html"

golden: $(STAMP) ## Rewrite the golden files from what the code does now; then read the diff
	$(PYTEST) --update-golden $(PYTEST_ARGS)

clean: ## Remove what the other targets made, .venv too
	rm -rf $(VENV) .venv-torch build dist demo_output docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
