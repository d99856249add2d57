# On a fresh machine `make test` and `make demo` do everything: a virtual environment in .venv, torch, the package.
#   make test TORCH=torch==2.11.0      another torch
#   make test TORCH= PYTHON=python3.12 the interpreter's own torch

PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP := .venv/bin/python -m pip --disable-pip-version-check
# Where packages are: --system-site-packages does not see those of a parent that is a virtual environment too.
SITE := "import sysconfig; print(sysconfig.get_path('purelib'))"
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: test demo bench gpu clean

test: .venv/installed
	.venv/bin/python -m pytest -q --benchmark-disable

demo: .venv/installed
	.venv/bin/specvis compare

bench: .venv/installed
	.venv/bin/python -m benchmarks.ops --json

gpu:  # with the machine's own torch: nothing is installed
	PYTHON=$(PYTHON) bash benchmarks/gpu.sh

.venv/installed: setup.py pyproject.toml $(wildcard csrc/*)
	test -x .venv/bin/python || $(PYTHON) -m venv $(if $(TORCH),,--system-site-packages) .venv
	$(if $(TORCH),$(PIP) install "$(TORCH)",$(PYTHON) -c $(SITE) > "$$(.venv/bin/python -c $(SITE))/parent.pth")
	$(PIP) install "setuptools>=77" wheel
	.venv/bin/python -c "import triton" 2>/dev/null || $(PIP) install --no-deps "triton>=3.6" \
		|| echo "no Triton for this machine: going on without it"
	$(PIP) install --no-build-isolation -e ".[test]"
	touch $@

clean:
	rm -rf .venv build dist out *.egg-info specvis_kernels/*.so .pytest_cache .benchmarks
	find . -name __pycache__ -prune -exec rm -rf {} +
