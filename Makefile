# make demo: set up and emulate the main job.   make test: set up and pass all tests.   make lint: ruff and mypy.   make docs: the site.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 3
MATRIX ?= .matrix
# Compiled kernels are cached by the age of one file, not of what it imports: every tree gets a cache of its own.
export NUMBA_CACHE_DIR ?= $(CURDIR)/$(VENV)/numba
# Hundreds of processes of the tests would compile our sources anew where the environment forbids to keep them compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test record bench lint format docs native matrix matrix-sandbox clean

demo: $(VENV)/ready
	$(BIN)/windtunnel emulate --cluster h100-sxm:16x8 examples/train_llama.py --size 8b --parallel fsdp --seq 8192 --batch 2 --ac selective

test: $(VENV)/ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --durations=25 --durations-min=1

# Logs of decisions that lie in the repository are recorded anew: all, or NAME=training.elastic.
record: $(VENV)/ready
	PYTHONPATH=tests:. $(BIN)/python -m parity.record $(NAME)

# A benchmark: make bench NAME=training.emulate ARGS="--quick --only memory"
bench: $(VENV)/ready
	$(BIN)/python -m benchmarks $(NAME) $(ARGS)

lint: $(VENV)/ready
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site goes to site/; nothing is fetched but, once, the tools that build it.
docs: $(VENV)/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Rebuild what lies built beside its source: the absent device, the sandboxes' init, CRIU's limits and steps, programs of the kernel.
native: $(VENV)/ready
	$(BIN)/python -m windtunnel.training.emulate.live.native_library
	$(BIN)/python -m windtunnel.agents.sandbox.live.machine.native
	$(BIN)/python -m windtunnel.agents.sandbox.live.criu.preload
	$(BIN)/python -m windtunnel.agents.sandbox.live.criu.steps
	$(BIN)/python -m windtunnel.agents.sandbox.live.inspect.kernel
	$(BIN)/python -m windtunnel.network.sharing.live.native
	$(BIN)/python -m benchmarks.network.sharing.packet
	$(BIN)/python -m windtunnel.network.hostrate.live.native

# Emulates with CUDA builds of PyTorch too, and writes what comes out to docs/frameworks.md. Pulls some 14 GB, once.
matrix: $(VENV)/ready
	$(BIN)/python tests/training/emulate/matrix/matrix.py --into $(MATRIX)

# Foreign programs in sandboxes: killed in the middle of their work, restored, forked. The table goes to docs/sandbox.md.
matrix-sandbox: $(VENV)/ready
	PYTHONPATH=tests:. $(BIN)/python -m conformance.sandbox.matrix --packages | xargs apt-get install --quiet --yes --no-install-recommends
	PYTHONPATH=tests:. $(BIN)/python -m conformance.sandbox.matrix --into docs/sandbox.md

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade 'pip>=24'
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[train,serve,agents,dev]'
	touch $@

$(VENV)/docs-ready: $(VENV)/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) site
