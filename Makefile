# Every target sets up what it needs.
export RAY_USAGE_STATS_ENABLED ?= 0
# Without Python's caches each of the hundreds of processes that tests start would compile the checkout anew.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
BIN := .venv/bin
# One process more than the two cores of CI, because many tests wait for others. A file's tests share its servers.
PYTEST := $(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder
# The machines with GPUs have torch and pytest, but no pip to build a .venv with.
GPU_PYTHON := $(if $(wildcard .venv/.done),$(BIN)/python,$(PYTHON))

.PHONY: demo test rest test-all test-gpu check coverage dev bench dist wheelhouse test-peers

demo: dev
	$(BIN)/baton demo

# Lint, types and the tests marked fast: for every commit. With COVERAGE=1, as CI runs it, the fast tests alone must reach
# most of every room; that makes them half as long again.
check: COVERED := $(if $(COVERAGE),--cov --cov-report=term:skip-covered --cov-fail-under=80)
check: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) $(COVERED) -m "fast and not long and not slow and not gpu"

# The whole default suite (neither slow nor gpu).
test: dev
	$(PYTEST)

# What `check` has left out: CI runs each test once. Pyright takes one core for half a minute: beside the tests.
rest: dev
	types=$$(mktemp); $(BIN)/pyright >"$$types" 2>&1 & \
	$(PYTEST) -m "not slow and not gpu and not (fast and not long)"; tests=$$?; \
	wait $$!; found=$$?; cat "$$types"; rm "$$types"; exit $$((tests | found))

# With coverage of every room, of which the tests marked fast alone must reach most: half as long again as without.
coverage: dev
	$(PYTEST) --cov --cov-report=term:skip-covered --cov-fail-under=80 -m "fast and not long and not slow and not gpu"
	$(PYTEST) --cov --cov-report=term:skip-covered --cov-fail-under=90

# Fuzzes HTTP and gRPC for 15 minutes each; without these variables, for seconds.
test-all: export BATON_FUZZ_HTTP_S ?= 900
test-all: export BATON_FUZZ_GRPC_S ?= 900
test-all: dev
	$(PYTEST) -m "not gpu"

# `baton` must be importable as the parent of this folder sees it; .gpu/baton is the checkout.
test-gpu:
	mkdir -p .gpu && ln -sfn .. .gpu/baton
	PYTHONPATH=$(CURDIR)/.gpu $(GPU_PYTHON) -m pytest -q -c tests/gpu/pytest.ini --rootdir=. -m gpu tests/gpu

# vLLM's own tests of its OpenAI server, against ours; fetches its source distribution once.
test-peers: dev
	$(BIN)/pip install -q -c constraints.txt -e '.[peers]'
	scripts/test_peers $(BIN)/python

bench: dev
	$(BIN)/baton bench kv

# The wheel and the source distribution of the last commit; with `wheelhouse`, what they depend on as well.
dist: dev
	scripts/build_dist $(BIN)/python

wheelhouse: dev
	scripts/build_dist $(BIN)/python --wheelhouse

dev: .venv/.done

# torch alone first: on a machine without a GPU pip then takes the CPU build, and no CUDA packages with it.
.venv/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	mkdir -p .venv/ns && ln -sfn ../.. .venv/ns/baton
	touch $@
