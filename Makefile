# Everything a contributor runs. Needs python3 (3.11 or newer), make and a C compiler; the rest installs itself.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed.stamp
# Older versions, such as the one Python 3.11 brings, resolve the constraints slowly.
PIP_VERSION := 26.3
# On a terminal pip shows what it downloads; in a log its stages are enough.
PIP := $(BIN)/python -m pip --disable-pip-version-check $$([ -t 2 ] || echo --quiet)
# Constraints hold for what is installed, not for the isolated environments in which pip builds packages.
INSTALL := $(PIP) install --constraint constraints.txt

# Many tests wait for processes: two at a time take half as long, and more would disturb each other.
TEST_PROCESSES ?= 2

.PHONY: help install protos check test test-long demo clients peers clean

help:
	@echo "make install     create $(VENV) and install everything at the pinned versions"
	@echo "make protos      generate baton/v1 from protos/"
	@echo "make check       lint, format, types, import rules, executors, sizes, fresh protos, docs of the commands"
	@echo "make test        all tests but the long ones"
	@echo "make test-long   soaks and long simulations"
	@echo "make demo        a whole cluster on this machine"
	@echo "make clients     load clients of others against a cluster; installs them under build/clients, 5 GB"
	@echo "make peers       engines of others for benchmarks.engine, under build/clients, 5 GB"
	@echo "make clean       remove caches and build output"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one with make PYTHON=...")'
	@echo "install: virtual environment"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install pip==$(PIP_VERSION)
	@echo "install: torch"
	@$(INSTALL) torch
	@echo "install: Baton and its tools"
	@PYTHONWARNINGS=ignore $(INSTALL) --editable '.[dev]'
	@touch $@
	@echo "install: done"

protos: install
	@$(BIN)/python -m checks.protos --write

check: install
	@echo "check: lint"
	@$(BIN)/ruff check --quiet .
	@echo "check: format"
	@$(BIN)/ruff format --check --quiet . || { echo "run $(BIN)/ruff format ."; exit 1; }
	@echo "check: types"
	@$(BIN)/mypy
	@echo "check: imports"
	@$(BIN)/lint-imports
	@echo "check: executors"
	@$(BIN)/python -m checks.executors
	@echo "check: sizes"
	@$(BIN)/python -m checks.size
	@echo "check: protos"
	@$(BIN)/python -m checks.protos
	@echo "check: command line's reference"
	@$(BIN)/python -m checks.cli_docs
	@echo "check: chart"
	@$(BIN)/python -m checks.chart

test: install
	@$(BIN)/python -m pytest -m "not long" -n $(TEST_PROCESSES) --dist loadgroup

test-long: install
	@$(BIN)/python -m pytest -m long

demo: install
	@$(BIN)/baton demo

clients: install
	@$(BIN)/python -m benchmarks.clients

peers: install
	@$(BIN)/python -m benchmarks.clients --install-only vllm

clean:
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
