# Every target sets up what it needs. `make demo` and `make test` are the two that a newcomer runs.
PYTHON ?= python3
BIN := .venv/bin
DEMO := runs/demo
# torch's CPU build is not on PyPI. Where pip does not find it by itself, it comes from here.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := $(shell grep '^torch==' requirements/cpu.lock)
PIP_INSTALL := $(BIN)/pip install --quiet --no-deps --disable-pip-version-check

.PHONY: demo test soak install lint type bench lock clean

demo: install ## Train the small model with GRPO on samples of one prefill and two decode engines.
	$(BIN)/splitroll train --out $(DEMO) --overwrite

test: install lint type ## Lint, types, unit, contract and end-to-end tests, but for what soak runs.
	$(BIN)/pytest

soak: install ## What takes long on real engines, 20 rounds of starting many among it: half an hour or more.
	$(BIN)/pytest -m soak

install: .venv/installed ## Everything into .venv.

.venv/installed: requirements/cpu.lock requirements/debian.sh pyproject.toml
	requirements/debian.sh
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) '$(TORCH)' || $(PIP_INSTALL) --index-url $(TORCH_INDEX) '$(TORCH)'
	$(PIP_INSTALL) -r requirements/cpu.lock
	$(PIP_INSTALL) --no-build-isolation --editable .
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: install
	$(BIN)/mypy

bench: install ## Policies, and vllm-router over stock servers, on seven workloads: some hours.
	$(BIN)/splitroll bench --out runs/bench

lock: install ## Write requirements/cpu.lock anew from what .venv holds.
	$(BIN)/pip freeze --all --exclude-editable --exclude pip > requirements/cpu.lock

clean:
	rm -rf .venv build src/*.egg-info
