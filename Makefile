# Five verbs. Each builds .venv by itself; the second time the stamp makes that free.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
BENCH_STAMP := .venv/.installed-bench
DOCS_STAMP := .venv/.installed-docs
# The suite is made of small single-threaded tests: two processes use two cores.
PARALLEL := -n 2 --dist worksteal

PIP := -m pip install --quiet --disable-pip-version-check
# Outside the tree: what is tested there is the wheel, not the sources.
ELSEWHERE := $(or $(TMPDIR),/tmp)/kronecell-torch
TORCH ?= 2.10.0
CROSS ?= aarch64-linux-gnu-g++
CHECK := csrc/check/kernels.cpp csrc/check/quantized.cpp csrc/width.cpp
CHECK_FLAGS := -std=c++17 -O3 -ffp-contract=fast -Wno-psabi -Icsrc

.PHONY: demo test test-all fuzz faults lint bench docs wheel sanitize test-torch test-aarch64 clean

# PASSIVE: threads that spin while they wait make a busy machine many times slower.
demo: $(STAMP)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/kronecell demo

test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL)

test-all: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m "slow or not slow"

# Fresh mutations of every kind of file that is read back, and of requests; what breaks goes to tests/fuzz/corpus.
MINUTES ?= 10
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

# Kills, full and broken disks at many places of every work; the table of docs/reliability.md.
faults: $(STAMP)
	$(BIN)/python -m tests.faults --write

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks

docs: $(DOCS_STAMP)
	$(BIN)/python docs/generate.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

# A wheel for this platform, every Python and every torch from 2.10 on, with the kernels inside.
wheel: $(STAMP)
	rm -rf build/lib* build/bdist* dist
	KRONECELL_REQUIRE_KERNELS=1 $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps \
		--no-build-isolation --wheel-dir dist .
	$(BIN)/python -m zipfile --list dist/*.whl | grep _kernels.so

# The laws of the operators under AddressSanitizer and UndefinedBehaviorSanitizer, at every width of the processor.
sanitize: $(STAMP)
	rm -rf build/sanitize/lib
	KRONECELL_REQUIRE_KERNELS=1 KRONECELL_CXXFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined" \
		$(BIN)/python setup.py --quiet build --build-base build/sanitize --build-lib build/sanitize/lib
	cp -r tests build/sanitize/lib
	widths=$$($(BIN)/python -c \
		"from kronecell.ops.kernels import register_width as most; print(*[w for w in (16, 8, 4) if w <= most()])") && \
		cd build/sanitize/lib && for width in $$widths; do \
		KRONECELL_WIDTH=$$width ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		$(CURDIR)/$(BIN)/python -m pytest -q -p no:cacheprovider tests/ops/test_operators.py tests/ops/test_recurrence.py \
		tests/ops/test_quantized.py tests/ops/test_sparse_prepared.py \
		-k "not opcheck and not gradients_of_gradients and not second and not transforms and not choice" || exit 1; done

# The wheel beside another torch: make test-torch TORCH=2.10.0. Downloads that torch, most of them with gigabytes of CUDA.
test-torch: wheel
	$(PYTHON) -m venv --clear $(ELSEWHERE)-$(TORCH)
	$(ELSEWHERE)-$(TORCH)/bin/python $(PIP) torch==$(TORCH) dist/*.whl
	cp tests/wheel_smoke.py $(ELSEWHERE)-$(TORCH)
	cd $(ELSEWHERE)-$(TORCH) && bin/python wheel_smoke.py

# The kernels without torch, for this processor and for aarch64 in an emulator.
test-aarch64:
	mkdir -p build/check
	$(or $(CXX),g++) $(CHECK_FLAGS) $(CHECK) -o build/check/native
	build/check/native
	@if command -v $(CROSS) >/dev/null && command -v qemu-aarch64 >/dev/null; then set -e -x; \
		$(CROSS) $(CHECK_FLAGS) -fno-tree-loop-vectorize -static $(CHECK) -o build/check/aarch64; \
		qemu-aarch64 build/check/aarch64; \
	else echo "skipped for aarch64: needs g++-aarch64-linux-gnu and qemu-user"; fi

# torch comes first: the kernels are built with its headers, so without isolation.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard csrc/*.cpp csrc/*.h)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(PIP) -c constraints.txt torch "setuptools>=77"
	$(BIN)/python $(PIP) -c constraints.txt --no-build-isolation -e ".[video,report,export,dev]"
	@test ! -f build/no-kernels.txt || cat build/no-kernels.txt
	touch $@

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python $(PIP) -c constraints.txt --no-build-isolation -e ".[bench]"
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python $(PIP) -c constraints.txt --no-build-isolation -e ".[docs]"
	touch $@

clean:
	rm -rf .venv site build dist *.egg-info kronecell/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
