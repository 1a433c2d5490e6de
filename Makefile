# Two commands: `make demo` makes an agent better and shows the proof; `make test` passes the tests.
PYTHON ?= python3
TORCH ?= torch==2.13.0
LOCK ?=
OPENAI ?= 1.109.1 2.8.0 3.54.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo demo-long test test-slow fault check fix install bench clients clean

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

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow and not fault" -n auto --dist loadfile

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow --timeout 1800

fault: $(STAMP)
	$(BIN)/python -m pytest tests/fault --timeout 3000

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/contract/test_layering.py

# TRL, which our speed is measured against, is installed by this alone
bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[all,dev,bench]"
	@sed -n 's/^ *python benchmarks/$(subst /,\/,$(BIN))\/python benchmarks/p' benchmarks/*.py

# the official clients, each in an environment of its own, against our stand-in of the service
clients: $(STAMP)
	for version in $(OPENAI); do \
		$(PYTHON) -m venv .clients/openai-$$version && \
		.clients/openai-$$version/bin/python -m pip install --quiet --disable-pip-version-check openai==$$version && \
		$(BIN)/python -m tests.clients .clients/openai-$$version/bin/python || exit 1; \
	done

fix: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .clients build dist *.egg-info src/*.egg-info
