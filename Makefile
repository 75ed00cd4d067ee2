# Every target sets up .venv by itself (once, see the stamp); PYTHON=python3.12 picks another interpreter.
#   make smoke      a small DeepSeek-V3 learns real text, within five minutes including the set-up
#   make test       the quick tests          make test-all   the slow ones too
#   make check      linter, formatter, types
#   make tables     the plan's tables in configs/*/README.md and docs/deepspeed.md
#   make bench      step time and memory against transformers; cost of the accumulation core
#   make gpu        tests that need a CUDA device, and each kernel's speed there
# On a machine without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves the CUDA build of torch.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: smoke test test-all check tables bench gpu clean

smoke: $(STAMP)
	$(BIN)/python -m moetrain --config configs/671B/smoke.yaml

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: $(STAMP)
	$(BIN)/python -m pytest -m "not gpu"

gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python benchmarks/kernels.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

tables: $(STAMP)
	$(BIN)/python docs/tables.py

bench: $(STAMP)
	$(BIN)/python benchmarks/step.py --shapes tiny small wide-experts
	$(BIN)/python benchmarks/accumulate.py

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
		--editable '.[test,lint,transformers,accelerate,deepspeed,tensorboard]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
