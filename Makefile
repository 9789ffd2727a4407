PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.installed-demo
STAMP := $(VENV)/.installed
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo record check test test-all test-engines lint format bench gpu notebooks docs clean

help:  ## list the targets and what each costs (times: 2 CPU cores)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv and install the tools of all targets (minutes: downloads torch)

$(RUN): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[demo]'
	touch $@

$(STAMP): $(RUN)
	$(INSTALL) -e '.[dev]'
	touch $@

demo: $(RUN)  ## train a small GPT in five variants, and BF16 with AVX-512; a table and a figure (5 to 8 minutes)
	$(BIN)/python -m notebooks.nanogpt --preset small

record: $(RUN)  ## the demo, with its results written into README.md and docs/ (5 to 8 minutes)
	rm -rf out/record
	$(BIN)/python -m notebooks.nanogpt --preset small --out out/record
	$(BIN)/python -m docs.demo out/record
	$(BIN)/python -m docs.build

check: lint  ## lint, call each public name, run the tests of files changed since main (about a minute)
	tests=$$($(BIN)/python -m tests.changed) && $(BIN)/python -m pytest -n auto --dist worksteal \
	  tests/test_smoke.py tests/test_structure.py $$tests

test: $(STAMP)  ## run the tests (4 to 7 minutes, no GPU)
	$(BIN)/python -m pytest -n auto --dist worksteal

test-all: $(STAMP)  ## run the tests and the exhaustive checks, every fp32 bit pattern (long)
	$(BIN)/python -m pytest -n auto --dist worksteal -m ''

test-engines: $(STAMP)  ## make environments of other trainers and of TransformerEngine; run their tests (an hour)
	$(BIN)/python -m tests.engines.environments

lint: $(STAMP)  ## check with ruff and mypy (seconds)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## format the code with ruff (seconds)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## run every benchmark, results in benchmarks/results (hours)
	$(BIN)/python -m benchmarks

gpu: $(STAMP)  ## measure what FP8 gains on the GPU of this machine (at most 8 minutes)
	$(BIN)/python -m benchmarks.gpu

notebooks: $(STAMP)  ## run the notebooks and save their outputs (minutes)
	$(BIN)/python -m notebooks.execute

docs: $(STAMP)  ## write the generated pages, and the site to out/site (a minute)
	$(BIN)/python -m docs.build
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

clean:  ## remove the environment and all generated files (seconds)
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
