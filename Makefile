# Five verbs. Each builds .venv by itself; the second time the stamp makes that free.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
BENCH_STAMP := .venv/.installed-bench
DOCS_STAMP := .venv/.installed-docs
# The suite is made of small single-threaded tests: two processes use two cores.
PARALLEL := -n 2 --dist worksteal

.PHONY: demo test test-all lint bench docs clean

# PASSIVE: threads that spin while they wait make a busy machine many times slower.
demo: $(STAMP)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/kronecell demo

test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL)

test-all: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m "slow or not slow"

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks

docs: $(DOCS_STAMP)
	$(BIN)/python docs/generate.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

$(STAMP): pyproject.toml constraints.txt $(wildcard native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[video,report,export,dev]"
	touch $@

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

clean:
	rm -rf .venv site build dist *.egg-info kronecell/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
