PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# torch, onnxruntime and the BLAS behind numpy fight for cores on a busy machine; one thread each is faster there.
export OMP_NUM_THREADS ?= 1

.PHONY: test lint clean

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/dev.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .demo
