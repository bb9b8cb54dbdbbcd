# Every target sets up what it needs. `make demo` and `make test` are the two that a newcomer runs.
PYTHON ?= python3
BIN := .venv/bin
RUN := runs/demo

.PHONY: demo test install lint type bench lock clean

demo: install ## Generate scored GRPO groups on one prefill and two decode engines.
	$(BIN)/splitroll rollout --task products --task-set min_digits=1 --task-set max_digits=1 \
	  --num 16 --n 8 --max-tokens 32 --seed 0 --out $(RUN)/samples.jsonl --overwrite

test: install lint type ## Everything: lint, types, unit, contract and end-to-end tests.
	$(BIN)/pytest

install: .venv/installed ## Everything into .venv.

.venv/installed: requirements/cpu.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-deps -r requirements/cpu.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: install
	$(BIN)/mypy

bench: install ## Two colocated engines against one prefill and one decode, in turn.
	$(BIN)/splitroll bench

lock: install ## Write requirements/cpu.lock anew from what .venv holds.
	$(BIN)/pip freeze --exclude-editable > requirements/cpu.lock

clean:
	rm -rf .venv build src/*.egg-info
