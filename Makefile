# Two commands for a fresh machine with Python and make: `make demo` and `make test`.
# Each makes the virtual environments it needs under .venv/ (a few minutes, once) and says so.

PYTHON ?= python3
NEMO_VERSIONS ?= 3.0.0 2.7.3
DEMO_NEMO = 3.0.0
ENVIRONMENTS = $(NEMO_VERSIONS:%=.venv/nemo-%/ready)

.PHONY: help demo test test-% lint benchmark clean
.PRECIOUS: .venv/nemo-%/ready

help:
	@echo "make demo       stock NeMo against NeMo with nemo_patches, on this machine's CPU"
	@echo "make test       lint, types and all tests, on NeMo $(NEMO_VERSIONS)"
	@echo "make benchmark  ratios against stock"
	@echo "make clean      remove .venv/"

demo: .venv/nemo-$(DEMO_NEMO)/ready
	.venv/nemo-$(DEMO_NEMO)/bin/nemo-patches demo

test: lint $(NEMO_VERSIONS:%=test-%)

test-%: .venv/nemo-%/ready
	@echo "== tests on NeMo $*"
	.venv/nemo-$*/bin/python -m pytest -q

lint: .venv/nemo-$(firstword $(NEMO_VERSIONS))/ready
	@echo "== ruff and mypy"
	$(dir $<)bin/ruff check .
	$(dir $<)bin/ruff format --check .
	$(dir $<)bin/mypy

benchmark: .venv/nemo-$(DEMO_NEMO)/ready
	.venv/nemo-$(DEMO_NEMO)/bin/python benchmarks/length_sync.py

# torch first, alone: a later requirement then finds it there and downloads no other build.
.venv/nemo-%/ready: constraints.txt pyproject.toml
	@echo "== making the virtual environment .venv/nemo-$* with torch and nemo_toolkit[asr]==$* (some minutes, once)"
	$(PYTHON) -m venv .venv/nemo-$*
	.venv/nemo-$*/bin/python -m pip install -q -c constraints.txt torch
	.venv/nemo-$*/bin/python -m pip install -q -c constraints.txt "nemo_toolkit[asr]==$*"
	.venv/nemo-$*/bin/python -m pip install -q -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf .venv
