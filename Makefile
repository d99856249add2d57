# On a fresh machine `make test` and `make demo` do everything: a virtual environment in .venv, torch, both packages.
#   make test TORCH=torch==2.11.0      another torch
#   make test TORCH= PYTHON=python3.12 the interpreter's own torch

PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP := .venv/bin/python -m pip --disable-pip-version-check
PYTEST := .venv/bin/python -m pytest -q --benchmark-disable --durations=20 -n auto --dist worksteal
# Where packages are: --system-site-packages does not see those of a parent that is a virtual environment too.
SITE := "import sysconfig; print(sysconfig.get_path('purelib'))"
CLANG_FORMAT := .venv/bin/clang-format csrc/* tests/cuda_on_cpu/*.h tests/cuda_on_cpu/*.cu
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: install test test-all lint format demo bench sass bounds gpu clean

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

gpu:  # with the machine's own torch: nothing is installed; PARTS="build tests" for some parts
	PYTHON=$(PYTHON) bash benchmarks/gpu.sh $(PARTS)

.venv/installed: setup.py pyproject.toml python/pyproject.toml $(wildcard csrc/*)
	test -x .venv/bin/python || $(PYTHON) -m venv $(if $(TORCH),,--system-site-packages) .venv
	$(if $(TORCH),$(PIP) install "$(TORCH)",$(PYTHON) -c $(SITE) > "$$(.venv/bin/python -c $(SITE))/parent.pth")
	$(PIP) install "setuptools>=77"
	.venv/bin/python -c "import triton" 2>/dev/null || $(PIP) install --no-deps "triton>=3.6" \
		|| echo "no Triton for this machine: going on without it"
	$(PIP) install --no-build-isolation -e ".[test]" -e "./python[test]"
	touch $@

clean:
	rm -rf .venv build dist out *.egg-info python/build python/*.egg-info specvis_kernels/*.so .pytest_cache .ruff_cache .benchmarks
	find . -name __pycache__ -prune -exec rm -rf {} +
