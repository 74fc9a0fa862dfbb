# Everything a person runs here. `make` alone explains; `make run` is where to start.
#
# Targets work in the virtual environment .venv and set it up first, once. `PYTHON=python3` on the
# command line uses that interpreter as it is instead and installs nothing: for a GPU machine
# that already has torch.

VENV := .venv
READY := $(VENV)/.ready
EXTRAS := cuda13,triton,lab,dev,docs
PIP_ARGS ?=
ARGS ?=

# pytest takes every core, so torch takes one a worker: more would only fight each other.
ifeq ($(origin PYTHON),command line)
  SETUP :=
  TORCH := has-torch
  RUN := PYTHONPATH=src $(PYTHON)
  CLANG_FORMAT := clang-format
  WORKERS :=
  THREADS :=
else
  SETUP := $(READY)
  TORCH :=
  RUN := $(VENV)/bin/python
  CLANG_FORMAT := $(VENV)/bin/clang-format
  WORKERS := -n auto --maxprocesses 8 --dist worksteal
  THREADS := OMP_NUM_THREADS=1
endif

DEVICE_CODE = $(shell find src tests -name '*.cu' -o -name '*.cuh' -o -name '*.h')
CLI = $(RUN) -m online_softmax.lab.cli

.DEFAULT_GOAL := help
.PHONY: help has-torch run test test-all test-gpu sanitize-gpu lint types format readme docs docs-serve wheel hooks clean

help: ## this page
	@echo 'online-softmax: softmax from three passes over memory to one, on any machine.'
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | column -t -s '|' 2>/dev/null \
	  || sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1: \2/p' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'The first target that needs it makes .venv (python >= 3.10; with g++ or clang++'
	@echo 'kernels run without a GPU).'
	@echo '  ARGS=...        more arguments: make run ARGS="--rows 64 --cols 1000"'
	@echo '                  make test ARGS="-k trace"'
	@echo '  PYTHON=python3  that interpreter, as it is, and no environment. With a CUDA'
	@echo '                  torch in it: make test-gpu PYTHON=python3'
	@echo "  PIP_ARGS=...    more for pip: make run PIP_ARGS='--find-links DIR' (of wheels)"

# ---- for everyone

run: $(SETUP) $(TORCH) ## climb the ladder: checked, counted; timed on a GPU
	$(CLI) ladder $(ARGS)

test: $(SETUP) $(TORCH) ## all tests that need no GPU: kernels run on the CPU
	$(THREADS) $(RUN) -m pytest $(WORKERS) -m 'not gpu' $(ARGS)

test-all: export ONLINE_SOFTMAX_TEST_ALL = 1
test-all: test ## make test, and every planned instance compiles

test-gpu: $(SETUP) $(TORCH) ## the tests that need a GPU, in full
	@$(RUN) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("test-gpu: torch sees no CUDA device here. make test runs what needs none.")'
	$(RUN) -m pytest -m gpu $(ARGS)

# Under Python memcheck is silent about API calls: cuda-bindings asks the driver for what it lacks.
sanitize-gpu: $(SETUP) $(TORCH) ## compute-sanitizer over every kernel (needs nvcc)
	@$(RUN) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("sanitize-gpu: torch sees no CUDA device here. make test runs the rungs under the host sanitizers.")'
	mkdir -p build
	for driver in sanitize_driver sanitize_parts; do \
	  nvcc -std=c++17 -lineinfo -arch=native tests/$$driver.cu -o build/$$driver || exit; \
	  for tool in memcheck racecheck synccheck initcheck; do \
	    compute-sanitizer --tool $$tool --error-exitcode 9 build/$$driver || exit; done; done
	for tool in memcheck racecheck; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=src compute-sanitizer --tool $$tool --error-exitcode 9 \
	    $$([ $$tool = memcheck ] && echo --report-api-errors no) \
	    $(firstword $(filter-out PYTHONPATH=src,$(RUN))) tests/sanitize_rungs.py || exit; done

# ---- for a change

lint: $(SETUP) ## ruff and clang-format, both only looking
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	@[ -z '$(DEVICE_CODE)' ] || $(CLANG_FORMAT) --dry-run -Werror $(DEVICE_CODE)

types: $(SETUP) ## mypy on src
	$(RUN) -m mypy

format: $(SETUP) ## ruff and clang-format, both writing
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
	@[ -z '$(DEVICE_CODE)' ] || $(CLANG_FORMAT) -i $(DEVICE_CODE)

readme: $(SETUP) $(TORCH) ## tables and pictures again, from the stored results
	$(RUN) -m online_softmax.lab.report $(ARGS)

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(SETUP) $(TORCH) ## the site, into build/site; anything amiss is an error
	@mkdir -p build/docs
	@rm -f build/site.built && touch build/site.begun
	$(RUN) -m mkdocs build $(ARGS)
	@mv build/site.begun build/site.built # tests take this build, if nothing is newer
	@echo "build/site/index.html opens in a browser, its search too; make docs-serve serves it."

docs-serve: export NO_MKDOCS_2_WARNING = 1
docs-serve: $(SETUP) $(TORCH) ## the site at 127.0.0.1:8000, made anew on a change
	@mkdir -p build/docs
	$(RUN) -m mkdocs serve $(ARGS)

wheel: $(SETUP) $(TORCH) ## sdist and wheel; the wheel is installed and tried
	$(RUN) tests/try_wheel.py build/dist

hooks: $(SETUP) ## run lint and types before each commit
	$(RUN) -m pre_commit install

clean: ## remove the environment, caches and build output
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- set-up, once and after a change of what is needed

# The first of these that starts and is new enough.
FIND_PYTHON = for python in python3 python3.13 python3.12 python3.11 python3.10; do \
	    $$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$python && break; \
	  done

# With PYTHON=...: what is missing there, in a sentence instead of a traceback.
has-torch:
	@$(PYTHON) -c '' 2>/dev/null || { echo 'PYTHON=$(PYTHON) is no Python that starts here: name another, or leave PYTHON away and make sets up $(VENV).' >&2; exit 1; }
	@$(RUN) -c 'import sys; from importlib.util import find_spec; \
	lacking = [name for name in ("torch", "numpy", "rich", "typer") if find_spec(name) is None]; \
	lacking and sys.exit("PYTHON=$(PYTHON) has no " + ", no ".join(lacking) + ": name a Python that has, or leave PYTHON away and make sets up $(VENV).")'

$(READY): pyproject.toml constraints-dev.txt
	@python=$$($(FIND_PYTHON)); \
	  [ -n "$$python" ] || { echo 'This needs Python 3.10 or newer; no python3 on PATH is.' >&2; exit 1; }; \
	  echo "Setting up $(VENV) with $$($$python --version): torch, NVRTC, Triton and the tools. Once, a few minutes."; \
	  $$python -m venv $(VENV)
	@quiet=; [ -t 1 ] || quiet=--quiet; \
	  $(VENV)/bin/python -m pip install $$quiet -c constraints-dev.txt $(PIP_ARGS) -e '.[$(EXTRAS)]'
	@touch $@
