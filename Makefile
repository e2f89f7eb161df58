# Every target does all its own set-up; nothing but make, git and Python 3.11+ is expected.
# State (the model, CRIU, snapshots) goes to .state/ here, not to the system's folder.

export NAGARA_STATE ?= $(CURDIR)/.state
# Nothing is looked up on a model hub: models are folders of this machine.
export HF_HUB_OFFLINE := 1

BIN := .venv/bin
MODEL := $(NAGARA_STATE)/models/smollm2/nagara-model.json

CHAOS_SECONDS ?= 600
TEST_WORKERS ?= 2

.PHONY: demo test test-servers test-cluster restores check chaos bench docs docs-test format \
    screenshots setup model tools transcript figures clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:
	@echo "make demo    cold start, snapshot and restored start of a real model"
	@echo "make test    all checks and all tests"
	@echo "make test-servers  real servers (vLLM, llama.cpp, FastAPI ...), some GB of environments"
	@echo "make test-cluster  several machines on this one: cut off, killed and slowed (needs root)"
	@echo "make chaos   ten minutes of killed processes and full disks under load (needs root)"
	@echo "make restores  a torch server put back 200 times under requests"
	@echo "make check   formatting, lint, types, import rules, size budgets"
	@echo "make bench   the headline measurement; nagara bench --help lists all"
	@echo "make docs    the documents as a site, into build/site"
	@echo "make docs-test  every command of README and guides, in an empty environment"
	@echo "make screenshots  pictures of the page, into build/screenshots"
	@echo "make format  format the code"
	@echo "make transcript  README.md's output of nagara doctor, made anew here"
	@echo "make figures  README.md's figures, measured anew here (root; some minutes)"
	@echo "make setup   only the environment; make clean removes it"

demo: model tools
	$(BIN)/nagara demo

# Tests wait more than they compute, and have folders, ports and namespaces of their own: two files
# of them at a time. TEST_WORKERS=0 runs one after the other.
test: check model tools
	$(BIN)/pytest -n $(TEST_WORKERS) --dist loadfile --max-worker-restart 0

# Environments that cannot be made are named, and their tests skipped with the reason.
test-servers: model tools
	-$(BIN)/python scripts/environments.py caddy qemu web vllm llama-node llama
	NAGARA_SERVERS=1 $(BIN)/pytest tests/servers tests/whole/test_foreign.py \
	    tests/node/test_foreign_servers.py tests/node/test_preflight.py

# Machines as network namespaces, with links that are cut and slowed: some twenty minutes. Root.
test-cluster: tools
	NAGARA_CLUSTER=1 $(BIN)/pytest tests/cluster tests/cli/test_lab_machines.py \
	    tests/cli/cluster/test_autoscaler.py tests/whole/test_ray.py

chaos: tools
	$(BIN)/python scripts/chaos.py --seconds $(CHAOS_SECONDS)

restores: model tools
	NAGARA_RESTORES=200 $(BIN)/pytest tests/whole/test_restores.py

check: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/mypy scripts
	$(BIN)/lint-imports
	$(BIN)/python scripts/budgets.py

bench: model tools
	$(BIN)/nagara bench coldstart

format: setup
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# The site goes to build/site; a link or anchor that leads nowhere fails it.
docs: setup
	# Not --quiet: then warnings would not count.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# In an empty environment with the wheel; it installs torch, so it takes a few minutes.
docs-test: tools model
	$(BIN)/python scripts/docs_test.py

screenshots: setup
	$(BIN)/python scripts/screenshots.py

setup: .venv/.ready

.venv/.ready: pyproject.toml scripts/requirements.txt scripts/debian-packages.txt scripts/setup.sh
	scripts/setup.sh

model: $(MODEL)

$(MODEL): | setup
	$(BIN)/nagara models add smollm2

# Containers and snapshots need root; without them everything runs as plain processes.
tools: setup
	@if [ "$$(id -u)" = 0 ]; then \
	    $(BIN)/nagara setup || \
	        echo "going on without containers and snapshots" >&2; \
	else \
	    echo "not root: going on without containers and snapshots" >&2; \
	fi

transcript: tools
	$(BIN)/python scripts/readme.py transcript

# On a quiet machine, as root: starts are measured with an emptied page cache.
figures: model tools
	$(BIN)/python scripts/readme.py figures --measure

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
