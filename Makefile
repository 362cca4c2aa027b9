# The README's two commands. Both make their own environment in .venv and need nothing but Python >= 3.10.
PYTHON ?= python3
VENV ?= .venv
# The CPU build on most machines; on a GPU machine the plain package from PyPI brings CUDA.
TORCH ?= torch==2.13.0

.PHONY: quickstart test lint

quickstart: $(VENV)/.installed
	$(VENV)/bin/accelerate launch --config_file accelerate_configs/single.yaml recipes/train_populora.py --config recipes/tiny/quickstart.yaml

test: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade pip
	$(VENV)/bin/pip install --quiet $(TORCH)
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(VENV)/bin/pip install --quiet --editable ".[report]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	$(VENV)/bin/pip install --quiet --editable ".[dev,deepspeed,report]"
	touch $@
