# Main commands. Each target first creates and fills .venv if it is missing or pyproject.toml has changed.
#
#   EXTRA=cpu|vllm   the vLLM build to install into .venv (default: vllm if a GPU is found, else cpu)
#   PYTHON=python3   the Python (3.11 or newer) for .venv
#   ARGS=...         passed on: make demo ARGS="--image photo.jpg", make test ARGS="-k arena"
#   JOBS=3           number of processes that run unit tests in parallel; most of their time they wait

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
EXTRA ?= $(if $(wildcard /dev/nvidia0 /dev/nvidiactl),vllm,cpu)
ARGS ?=
SECONDS ?= 600
SEED ?= 1
JOBS ?= 3

# Tests start hundreds of Python processes: without it each would compile our modules again.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
STAMP := .venv/.filled-$(EXTRA)
LOG := .venv/install.log
STATES := tests/e2e_families/test_family_embedding_states.py

.PHONY: help venv demo test check fuzz bench test-families test-embeddings test-gpu clean

help:           ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

venv: $(STAMP)  ## create .venv and install medialane with vLLM into it
	@:

demo: $(STAMP)  ## images through gateway and two workers, compared with plain vLLM
	$(BIN)/medialane demo $(ARGS)

check: $(STAMP) ## lint, format, types, architecture
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_architecture.py

test: check     ## check, then every test that needs no GPU
	@$(call pytest,tests/unit tests/seams tests/test_conftest.py --ignore=tests/unit/vllm_bridge -n $(JOBS) --dist worksteal)
	@$(call pytest,tests/hostile tests/fuzz tests/contract tests/unit/vllm_bridge -n 3 --no-loadscope-reorder)
	@$(call pytest,tests/e2e)
	@$(call pytest,tests/e2e_families -n 2)

fuzz: $(STAMP)  ## mutated inputs for SECONDS=600 from SEED=1; findings in .fuzz/
	$(BIN)/pytest tests/fuzz --fuzz-seconds $(SECONDS) --fuzz-seed $(SEED) $(ARGS)

test-families: $(STAMP) ## `medialane check` of every family of tests/families, and docs/models.md (half an hour)
	$(BIN)/pytest tests/e2e_families --ignore=$(STATES) --reports .families -n 2 $(ARGS)
	$(BIN)/python tests/families/models_page.py .families

test-embeddings: $(STAMP) ## the states of an embedding in each family (two minutes for each: ARGS="-k gemma3")
	$(BIN)/pytest $(STATES) $(ARGS)

test-gpu: $(STAMP) ## the tests that need a GPU
	$(BIN)/pytest -m gpu $(ARGS)

bench: $(STAMP) ## all benchmarks; tables on the screen, figures in bench-results/
	@mkdir -p bench-results
	$(BIN)/medialane bench all --json bench-results/$$(git rev-parse --short HEAD 2>/dev/null || echo release).json $(ARGS)

clean:          ## remove .venv and every cache
	rm -rf .venv .families .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One process for each kind of test: once imported, vLLM changes the process's logging and leaves child processes. Tests
# that neither import vLLM nor start it run in several processes (pytest-xdist). Property tests use the same examples in
# every run, so that a failure is caused by the change under test; `make fuzz` searches for new examples, as does plain
# pytest. With ARGS a kind may have no tests (pytest's exit status 5).
pytest = echo "$(BIN)/pytest $(1)"; $(BIN)/pytest $(1) -m "not gpu and not slow" --hypothesis-profile=ci $(ARGS) || { status=$$?; [ $$status = 5 -a -n '$(ARGS)' ] || exit $$status; }

# A requirement of the extra that is on no index is installed from its folder in the same call, so that pip finds it.
packages-cpu := ./packages/medialane-cpu-torch

# Only pip's progress lines are shown; the full output is in the log, whose end is shown on failure.
$(STAMP): pyproject.toml $(shell find packages -type f -not -path '*/__pycache__/*')
	@echo "medialane: filling .venv with the '$(EXTRA)' extra (some minutes the first time; details: $(LOG))"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"medialane: Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}")'
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	@rm -f .venv/.filled-*
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -e '.[$(EXTRA),nixl,ray,dev]' $(packages-$(EXTRA)) 2>&1 | tee $(LOG) \
	  | awk '/^ *(Downloading|Using cached) .*whl/ { sub(/^ *(Downloading|Using cached) /, ""); sub(/-(cp|py)[0-9][^ ]*\.whl/, ""); print "  " $$0; fflush() } /^Installing/ { print "  installing" }' \
	  || { grep -v ^WARNING $(LOG) | tail -20; echo "medialane: filling .venv failed; all of pip's output: $(LOG)"; exit 1; }
	@touch $@
