# On a fresh machine `make test` and `make demo` do everything: a virtual environment in .venv, torch, both packages.
#   make test TORCH=torch==2.11.0      another torch
#   make test TORCH= PYTHON=python3.12 the interpreter's own torch

PYTHON ?= python3
TORCH ?= torch==2.13.0
# Python compiles what it imports, a fraction of what is installed.
PIP := .venv/bin/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --no-compile
PYTEST := .venv/bin/python -m pytest -q --benchmark-disable --durations=20 -n auto --dist worksteal
# Where packages are: --system-site-packages does not see those of a parent that is a virtual environment too.
SITE := "import sysconfig; print(sysconfig.get_path('purelib'))"
MINUTES ?= 10
SEED ?= 0
KILLS ?= 100
CLANG_FORMAT := .venv/bin/clang-format csrc/* tests/cuda_on_cpu/*.h tests/cuda_on_cpu/*.cu
export OMP_WAIT_POLICY ?= PASSIVE
# Where this is set, every process compiles torch anew: twice the time of an import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install test test-all lint format demo bench sass bounds fuzz gpu clean

install: .venv/installed

test: lint
	$(PYTEST) -m "not slow"

test-all: lint
	$(PYTEST)

lint: .venv/installed
	.venv/bin/ruff check
	$(CLANG_FORMAT) --dry-run --Werror

format: .venv/installed  # what lint asks for, as far as it can be done by machine
	.venv/bin/ruff check --fix
	$(CLANG_FORMAT) -i

demo: .venv/installed
	.venv/bin/specvis compare

bench: .venv/installed
	.venv/bin/python -m benchmarks.ops --json

sass: .venv/installed  # counts in the machine code of the CUDA kernels; no GPU takes part
	.venv/bin/python -m benchmarks.sass $(OPS)

bounds: .venv/installed  # what an H200 could do at best, counted
	.venv/bin/python -m benchmarks.bounds

fuzz: .venv/installed  # hostile inputs for MINUTES, as long with sanitizers, KILLS of each command; JSON=file for counts
	failed=0; \
	.venv/bin/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED) $(if $(JSON),--json $(JSON)) || failed=1; \
	.venv/bin/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED) --sanitized || failed=1; \
	.venv/bin/python -m tests.interruption --kills $(KILLS) --seed $(SEED) || failed=1; \
	exit $$failed

gpu:  # with the machine's own torch: nothing is installed; PARTS="build tests" for some parts
	PYTHON=$(PYTHON) bash benchmarks/gpu.sh $(PARTS)

.venv/installed: setup.py pyproject.toml python/pyproject.toml $(wildcard csrc/*)
	test -x .venv/bin/python || $(PYTHON) -m venv $(if $(TORCH),,--system-site-packages) .venv
	$(if $(TORCH),$(INSTALL) "$(TORCH)",$(PYTHON) -c $(SITE) > "$$(.venv/bin/python -c $(SITE))/parent.pth")
	$(INSTALL) "setuptools>=77"
	.venv/bin/python -c "import triton" 2>/dev/null || $(INSTALL) --no-deps "triton>=3.6" \
		|| echo "no Triton for this machine: going on without it"
	$(INSTALL) --no-build-isolation -e ".[test]" -e "./python[test]"
	$(PIP) list --format=freeze --exclude-editable > $@.new && mv $@.new $@  # what the tests ran with: pip install -c .venv/installed repeats it

clean:
	rm -rf .venv build dist out *.egg-info python/build python/*.egg-info specvis_kernels/*.so .pytest_cache .ruff_cache .benchmarks
	find . -name __pycache__ -prune -exec rm -rf {} +
