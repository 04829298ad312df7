# Two commands do all the set-up: `make demo` and `make test`.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON := .venv/bin/python
LOCK := requirements/cpu.txt
export UV_CACHE_DIR ?= $(HOME)/.cache/clora/uv
export HF_HUB_OFFLINE := 1
# container images often set it; without bytecode each start of an engine compiles five thousand modules anew (15 s)
unexport PYTHONDONTWRITEBYTECODE

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

# ---------------------------------------------------------------- set-up

.venv/.installed: $(LOCK) pyproject.toml local/install.sh
	@local/install.sh

setup: .venv/.installed  ## the Python environment (.venv)

generate: setup  ## CRD manifests from the models
	$(PYTHON) -m clora_api.generate write

lock: setup  ## hash-pinned requirements from pyproject.toml
	local/lock.sh

# ---------------------------------------------------------------- the demo

demo: ## everything on this machine: control plane, operator, engine, three experiments
	@local/demo.sh

demo-down: setup  ## ends what `make demo` left running
	@$(PYTHON) -m local.demo down

cluster: setup  ## a real one-node cluster with pods (root)
	@$(PYTHON) -m local.node up

cluster-down: setup  ## ends `make cluster`
	@$(PYTHON) -m local.node down

# ---------------------------------------------------------------- checks

lint: setup  ## formatting, lint, types, import contracts, generated files
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(PYTHON) -m clora_api.generate check

unit: setup  ## fast tests
	$(PYTHON) -m pytest

test: lint  ## lint, types, unit tests, and integration tests against the real vLLM and the real API server
	@local/test.sh

e2e: setup  ## operator, charts and pods on the real API server and a real node: a part of `make test`
	@local/test.sh e2e

# ---------------------------------------------------------------- benchmarks

bench-sampler: setup  ## sampler against serial, stock vLLM and no LoRA (half an hour on a quiet machine): docs/benchmarks
	$(PYTHON) -m benchmarks.sampler --out docs/benchmarks/sampler.json
	$(PYTHON) -m benchmarks.sampler render docs/benchmarks/sampler.json >docs/benchmarks/sampler.md

bench-trainer: setup  ## trainer with many tenants against turns and PEFT (half an hour on a quiet machine): docs/benchmarks
	$(PYTHON) -m benchmarks.trainer --out docs/benchmarks/trainer.json
	$(PYTHON) -m benchmarks.trainer render docs/benchmarks/trainer.json >docs/benchmarks/trainer.md

bench-operator: setup  ## operator with up to 400 experiments (a quarter of an hour): docs/benchmarks
	$(PYTHON) -m benchmarks.operator_scale --out docs/benchmarks/operator.json
	$(PYTHON) -m benchmarks.operator_scale render docs/benchmarks/operator.json >docs/benchmarks/operator.md

WORK ?= $(HOME)/.cache/clora/benchmarks

bench-learning: setup  ## what experiments learn alone and beside others (3 hours, goes on where it was stopped)
	$(PYTHON) -m benchmarks.learning --work $(WORK)/learning --out docs/benchmarks/learning.json
	$(PYTHON) -m benchmarks.learning render docs/benchmarks/learning.json >docs/benchmarks/learning.md

GSM8K ?= gsm8k

bench-gsm8k: setup  ## the real GSM8K, whose files are in GSM8K=folder, before and after (an hour): docs/benchmarks
	$(PYTHON) -m benchmarks.gsm8k --data $(GSM8K) --work $(WORK)/gsm8k --out docs/benchmarks/gsm8k.json
	$(PYTHON) -m benchmarks.gsm8k render docs/benchmarks/gsm8k.json >docs/benchmarks/gsm8k.md

bench: setup  ## eight experiments, N at a time, against one after the other (5 hours, goes on where it was stopped)
	$(PYTHON) -m benchmarks.throughput --work $(WORK)/throughput --out docs/benchmarks/throughput.json
	$(PYTHON) -m benchmarks.throughput render docs/benchmarks/throughput.json >docs/benchmarks/throughput.md

bench-node-model: setup  ## simulation of an 8-GPU node, fitted to the reference (a few minutes): docs/benchmarks
	$(PYTHON) -m benchmarks.node_model --out docs/benchmarks/node_model.json
	$(PYTHON) -m benchmarks.node_model render docs/benchmarks/node_model.json >docs/benchmarks/node_model.md
	$(PYTHON) -m benchmarks.node_model plot docs/benchmarks/node_model.json docs/benchmarks/node_model.svg

bench-peers: setup  ## clora against TRL and SkyRL on the same work (2 hours, goes on where it was stopped)
	$(PYTHON) -m benchmarks.peers --work $(WORK)/peers --out docs/benchmarks/peers.json
	$(PYTHON) -m benchmarks.peers render docs/benchmarks/peers.json >docs/benchmarks/peers.md

.PHONY: help setup generate lock demo demo-down cluster cluster-down lint unit test e2e bench-sampler bench-trainer bench-operator bench-learning bench-gsm8k bench bench-peers bench-node-model
