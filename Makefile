PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.installed-demo
STAMP := $(VENV)/.installed
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo record test test-all lint format bench notebooks docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv and install everything the other targets need

$(RUN): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[demo]'
	touch $@

$(STAMP): $(RUN)
	$(INSTALL) -e '.[dev]'
	touch $@

demo: $(RUN)  ## train a small GPT in FP32, FP8, unit-scaled and unit-scaled FP8, with a table and a plot
	$(BIN)/python -m notebooks.nanogpt --preset small

record: $(RUN)  ## the demo, with its table, figures and plot written into the README
	rm -rf out/record
	$(BIN)/python -m notebooks.nanogpt --preset small --out out/record
	$(BIN)/python -m docs.demo out/record

test: $(STAMP)  ## the tests (minutes, no GPU)
	$(BIN)/python -m pytest -n auto --dist worksteal

test-all: $(STAMP)  ## the tests and the exhaustive checks (every fp32 bit pattern)
	$(BIN)/python -m pytest -n auto --dist worksteal -m ''

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## every benchmark, results in benchmarks/results
	$(BIN)/python -m benchmarks

notebooks: $(STAMP)  ## run the notebooks and keep their outputs
	$(BIN)/python -m notebooks.execute

docs: $(STAMP)  ## write the pages that are made from the code, and the site to out/site
	$(BIN)/python -m docs.build
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

clean:  ## remove the environment and everything generated
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
