# Each target sets itself up: only Python >= 3.11 and make need to be there.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
TRITON := .venv/.triton

.PHONY: demo test test-data fuzz kills lint bench clean

demo: $(INSTALLED)
	$(BIN)/expunge demo

test: $(INSTALLED) $(TRITON)
	-tests/browser/install
	$(BIN)/python -m pytest -n auto

test-data: $(INSTALLED)
	@test -n "$(EXPUNGE_DATA)" || { echo "make test-data needs the folder of the datasets: EXPUNGE_DATA=folder make test-data"; exit 2; }
	EXPUNGE_DATA="$(EXPUNGE_DATA)" $(BIN)/python -m pytest tests/vision/datasets/test_real_files.py

# Ten thousand damaged and forged files, a few minutes; random models for ten minutes; as many changes of single bytes in the folder of a
# deletion request as MUTATIONS says. Those that end as none should are kept in fuzz-failures/.
MUTATIONS ?= 100000
fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz.run $(FUZZ)
	$(BIN)/python -m tests.fuzz.modules $(or $(FUZZ_MODULES),--seconds 600)
	EXPUNGE_MUTATIONS=$(MUTATIONS) $(BIN)/python -m pytest tests/requests/test_verifying.py -k mutations

# Every command is killed again and again, and must end with what an undisturbed run leaves; about a quarter of an hour.
KILLS ?= 100
kills: $(INSTALLED)
	$(BIN)/python -m tests.kills.run --kills $(KILLS)
	EXPUNGE_KILLS=$(KILLS) $(BIN)/python -m pytest tests/requests/test_kills.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# For all variants alike: threads that wait actively, and a C library that keeps memory instead of giving it back after every pass.
STEADY := OMP_WAIT_POLICY=active MALLOC_TRIM_THRESHOLD_=8000000000 MALLOC_MMAP_THRESHOLD_=2000000000 PYTHONPATH=src
bench: $(INSTALLED)
	benchmarks/install
	$(STEADY) .venv-bench/bin/python benchmarks/fisher_speed.py
	$(STEADY) .venv-bench/bin/python benchmarks/activation_speed.py
	$(STEADY) .venv-bench/bin/python benchmarks/training_share.py
	$(STEADY) $(BIN)/python benchmarks/stored_sums.py

clean:
	rm -rf .venv .venv-bench .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and alone: it is the large one, and an interrupted set-up need not fetch it again.
$(INSTALLED): pyproject.toml constraints.txt hatch_build.py $(wildcard src/expunge/fisher/closed_forms/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "expunge needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# For the tests of the CUDA kernel, in Triton's interpreter; a gigabyte, so not for the demo.
$(TRITON): $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt "triton; sys_platform == 'linux'"
	touch $@
