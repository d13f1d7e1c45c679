# Everything here is also what CI runs. `make` alone lists the targets.
PYTHON ?=
ARGS ?=
export PYTHON
# Dozens of processes start here: without caches of bytecode each would compile torch anew, seconds of a core.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup upgrade quickstart demo test test-long test-root test-images lint format docs bench chaos gpu-check scale staleness peers clean

help:  ## list the targets
	@echo 'streamrl: make TARGET'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## install everything into .venv; seconds when nothing changed (PYTHON=python3.12 for another interpreter)
	@.ci/setup

upgrade:  ## install the newest versions of all packages, and pin them in .ci/constraints.txt
	@.ci/setup upgrade

quickstart: setup  ## watch a small model learn, a few minutes (ARGS="seed=2" for other settings)
	@.venv/bin/streamrl quickstart $(ARGS)

demo:  ## watch a pretrained model learn, a quarter of an hour (ARGS="seed=2" for other settings)
	@.ci/setup demo
	@.venv/bin/streamrl demo $(ARGS)

test:  ## lint, types and the fast tests, as CI runs them: 20 to 35 minutes on two cores (ARGS="-k word" for some)
	@.ci/tier fast $(ARGS)

test-long:  ## the tests that take minutes each: at most 60 minutes
	@.ci/tier long $(ARGS)

test-root:  ## the tests that need root (network namespaces, disk limits): at most 30 minutes
	@.ci/tier root $(ARGS)

test-images:  ## images built and the manifests' pods run, with podman and without a network: at most 40 minutes
	@.ci/tier images $(ARGS)

lint: setup  ## style, formatting and types, without changing anything
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: setup  ## mend what ruff can mend by itself
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

docs: setup  ## the documentation as a site, in build/docs/site (`python -m http.server -d build/docs/site` shows it)
	@.ci/docs $(ARGS)

bench: setup  ## measure one part against a peer or a limit (ARGS="transport --quick"; without ARGS it lists the parts)
	.venv/bin/python -m bench $(or $(ARGS),--help)

chaos: setup  ## all that a run must survive, in one table (ARGS="full", "random --minutes 30", "judge --minutes 60")
	.venv/bin/python -m tests.faults.chaos $(ARGS)

gpu-check: setup  ## measure a machine with a GPU in half an hour; without one, tiny shapes (ARGS="--json", "steps")
	.venv/bin/python -m bench.gpu_check $(ARGS)

scale: setup  ## 1 to 2,000 simulated workers on a real Redis, and what that says of 10,000 GPUs (ARGS="--quick")
	.venv/bin/python -m bench scale $(ARGS)

staleness: setup  ## what each loss makes of samples that are 0 to 32 steps old (ARGS="--quick", "--pretrained": hours)
	.venv/bin/python -m bench $(if $(filter --pretrained,$(ARGS)),stale-llm,staleness) $(filter-out --pretrained,$(ARGS))

peers: setup  ## a whole run against TRL's RLOO trainer, on two cores: about 20 minutes (ARGS="--quick")
	.venv/bin/python -m bench peers $(ARGS)

clean:  ## remove caches and build outputs; .venv and runs/ stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
