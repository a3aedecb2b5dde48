# make demo: set up and emulate the main job.   make test: set up and pass all tests.   make conformance: foreign programs, attacks, kills.
PYTHON ?= python3
VENV ?= .venv
# Every version that is installed: `make lock` renews it.
LOCK ?= constraints.txt
BIN := $(VENV)/bin
WORKERS ?= 3
# Further options of pytest.
ARGS ?=
MATRIX ?= .matrix
EDGE ?= .edge
# Compiled kernels are cached by the age of one file, not of what it imports: every tree gets a cache of its own.
export NUMBA_CACHE_DIR ?= $(CURDIR)/$(VENV)/numba
# Hundreds of processes of the tests would compile our sources anew where the environment forbids to keep them compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test conformance newest record mutants bench lock lint format docs native matrix matrix-sandbox clean

demo: $(VENV)/ready
	$(BIN)/windtunnel emulate --cluster h100-sxm:16x8 examples/train_llama.py --size 8b --parallel fsdp --seq 8192 --batch 2 --ac selective

test: $(VENV)/ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --durations=25 --durations-min=1 $(ARGS)

# Attacks, kills, matrices, foreign programs and packages; as root also what needs CRIU.
conformance: $(VENV)/conformance-ready
	$(BIN)/python -m pytest -m 'conformance or root' -n $(WORKERS) --dist loadgroup --durations=25 --durations-min=1 $(ARGS)

# `make test` with the newest versions that pyproject.toml allows, but for PyTorch.
newest:
	grep '^torch==' constraints.txt > .newest.txt
	$(MAKE) test VENV=.newest LOCK=.newest.txt

# Logs of decisions that lie in the repository are recorded anew: all, or NAME=training.elastic.
record: $(VENV)/ready
	PYTHONPATH=tests:. $(BIN)/python -m parity.record $(NAME)

# Changed rules, one at a time, and whether the recorded logs and fresh runs find each of them out: all, or NAME=training.
mutants: $(VENV)/ready
	PYTHONPATH=tests:. $(BIN)/python -m mutants $(NAME)

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

# Rebuild what lies built beside its source: the absent device, the sandboxes' init, CRIU's steps, programs of the kernel.
native: $(VENV)/ready
	$(BIN)/python -m windtunnel.training.emulate.live.native_library
	$(BIN)/python -m windtunnel.agents.sandbox.machine.walls
	$(BIN)/python -c "from windtunnel.agents.sandbox.criu import STEPS; STEPS.rebuild()"
	$(BIN)/python -m windtunnel.agents.sandbox.inspect.kernel
	$(BIN)/python -m windtunnel.network.sharing.live.native
	$(BIN)/python -m benchmarks.network.sharing.packet
	$(BIN)/python -m windtunnel.network.hostrate.live.native

# Emulates with CUDA builds of PyTorch too, and writes what comes out to docs/benchmarks/frameworks.md. Pulls some 14 GB, once.
matrix: $(VENV)/ready
	$(BIN)/python tests/conformance/training/emulate/matrix.py --into $(MATRIX)

# Foreign programs in sandboxes: killed in the middle of their work, restored, forked. The table goes to docs/benchmarks/sandbox-programs.md.
matrix-sandbox: $(VENV)/ready
	PYTHONPATH=tests:. $(BIN)/python -m conformance.sandbox.matrix --packages | xargs apt-get install --quiet --yes --no-install-recommends
	PYTHONPATH=tests:. $(BIN)/python -m conformance.sandbox.matrix --into docs/benchmarks/sandbox-programs.md

# The versions in constraints.txt, which stand for Python 3.11 and all extras but Flower's, which has its own.
LOCKED := uv pip compile pyproject.toml --upgrade --python-version 3.11 --no-emit-index-url --no-annotate --no-header --quiet
EXTRAS := train serve agents network data control trust ray silicon strangers docs dev
lock: $(VENV)/ready
	$(BIN)/pip install --quiet uv
	$(BIN)/$(LOCKED) $(EXTRAS:%=--extra %) --output-file constraints.txt
	$(BIN)/$(LOCKED) --extra edge --output-file constraints-edge.txt

$(VENV)/ready: pyproject.toml $(LOCK)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint $(LOCK) pip hatchling editables
	$(BIN)/pip install --quiet --constraint $(LOCK) --no-build-isolation --editable '.[train,serve,agents,network,data,control,trust,dev]'
	touch $@

# Flower, beside the rest.
$(EDGE)/ready: pyproject.toml constraints-edge.txt
	$(PYTHON) -m venv $(EDGE)
	$(EDGE)/bin/pip install --quiet --constraint constraints-edge.txt --editable '.[edge]'
	touch $@

# TorchRec asks for the CUDA build of fbgemm, whose CPU build is among the strangers.
$(VENV)/conformance-ready: $(VENV)/ready $(EDGE)/ready
	$(BIN)/pip install --quiet --constraint $(LOCK) --editable '.[strangers,ray]'
	$(BIN)/pip install --quiet --no-deps torchrec==1.8.0 HolisticTraceAnalysis==0.5.0
	if [ "$$(id -u)" = 0 ]; then $(BIN)/windtunnel sandbox setup --pool-size 2G; fi
	touch $@

$(VENV)/docs-ready: $(VENV)/ready
	$(BIN)/pip install --quiet --constraint $(LOCK) --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) $(EDGE) .newest .newest.txt site
