# Every target sets itself up: scripts/find-python.sh looks for a CPython 3.10 to 3.13 and says
# what to install when there is none; environments are made under .venv and .venvs, once.

LANES = @python=$$(scripts/find-python.sh) && exec "$$python" scripts/lanes.py
JOBS ?= 2

.PHONY: help demo test test-all test-engines test-mori e2e-vllm test-net soak soak-mori lint docs clean

help: ## say what can be made
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' Makefile | expand -t 20
	@echo '  make lane-NAME    run one lane:'
	$(LANES) list

demo: ## blocks move from a prefill to a decode process; ARGS="--faults ..." are passed on
	$(LANES) demo $(ARGS)

test: ## the portable test suite, about as fast as tests get
	$(LANES) run portable

test-all: ## every lane: engines, Pythons, distributions, demo, documentation
	$(LANES) run --all --jobs $(JOBS)

test-engines: ## real MoRI-IO, NIXL and Mooncake, two processes each
	$(LANES) run mori nixl mooncake --jobs $(JOBS)

test-net: ## two hosts in network namespaces, their link cut and healed; needs root
	$(LANES) run net

test-mori: ## the real MoRI-IO engine over software RDMA
	$(LANES) run mori

e2e-vllm: ## real vLLM engines on CPU, prefill and decode
	$(LANES) run vllm

soak: ## 200 rounds of killed and stopped processes; ROUNDS=n for another number
	@SOAK_ROUNDS=$(or $(ROUNDS),200); export SOAK_ROUNDS; $(LANES:@%=%) run soak

soak-mori: ## 50 rounds of killed, stopped and restarted peers over MoRI-IO; ROUNDS=n for another number
	@SOAK_ROUNDS=$(or $(ROUNDS),50); export SOAK_ROUNDS; $(LANES:@%=%) run soak-mori

lint: ## ruff check, ruff format, mypy --strict
	$(LANES) run lint

docs: ## build the documentation into .venvs/site
	$(LANES) run docs

lane-%:
	$(LANES) run $*

clean: ## remove the environments and everything built
	rm -rf .venv .venvs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis kvxfer/backends/shm/_copy.*.so
