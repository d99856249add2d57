# On a fresh machine `make test` and `make demo` do everything: a virtual environment in .venv, torch, both packages, in
# the versions of constraints.txt.
#   make test TORCH=torch==2.11.0      another torch
#   make test TORCH= PYTHON=python3.12 the interpreter's own torch
#   make test CONSTRAINTS=             the newest of everything, in .venv-newest

PYTHON ?= python3
TORCH ?= torch
CONSTRAINTS ?= constraints.txt
VENV := $(if $(CONSTRAINTS),.venv,.venv-newest)
# TORCH counts more than the constraints of torch and of what it needs; a Triton that torch brings, more than Triton's.
OF_TORCH := torch|setuptools|sympy|networkx|filelock|fsspec|Jinja2|typing_extensions
OWN_TORCH := $(filter-out file,$(origin TORCH))
TRITON := $(or $(if $(OWN_TORCH),,$(shell grep '^triton==' $(or $(CONSTRAINTS),/dev/null))),triton>=3.6)
BRINGS_TRITON := "import importlib.metadata as m; raise SystemExit(not any('triton' in r for r in m.requires('torch')))"
# Python compiles what it imports, a fraction of what is installed.
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --no-compile $(if $(CONSTRAINTS),-c $(VENV)/constraints.txt,--upgrade --upgrade-strategy eager)
# So that a folder named specvis beside this one, as a clone may be, is not taken for the package.
EDITABLE := --config-settings editable_mode=compat
PYTEST := $(VENV)/bin/python -m pytest -q --benchmark-disable --durations=20 -n auto --dist worksteal
# Where packages are: --system-site-packages does not see those of a parent that is a virtual environment too.
SITE := "import sysconfig; print(sysconfig.get_path('purelib'))"
MINUTES ?= 10
SEED ?= 0
VERSION ?= 4.57.6
SERVERS := $(VENV)/servers
TESTED := "from specvis_kernels.compat._versions import TESTED; \
	print(*(f'{server}=={TESTED[server][-1]}' for server in ('vllm', 'sglang')))"
CLANG_FORMAT := $(VENV)/bin/clang-format csrc/*/*.* csrc/*/*/*.* tests/cuda_on_cpu/*.h tests/cuda_on_cpu/*.c*
# Where this is set, every process compiles torch anew: twice the time of an import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install cuda test test-all test-transformers test-servers constraints lint format demo compare bench \
	tables fuzz gpu hub clean

install: $(VENV)/installed

test: lint
	$(PYTEST) --ignore tests/slow

test-all: lint cuda  # tests/slow too, and Triton's interpreter in every test of an op
	$(PYTEST) --triton

test-transformers: $(VENV)/installed  # what uses transformers, with its VERSION, beside what is installed
	sed -E '/^(transformers|huggingface_hub|tokenizers)==/d' $(VENV)/constraints.txt > $(VENV)/constraints-$(VERSION).txt
	$(PIP) install -q --upgrade --target $(VENV)/transformers-$(VERSION) -c $(VENV)/constraints-$(VERSION).txt \
		transformers==$(VERSION)
	PYTHONPATH=$(VENV)/transformers-$(VERSION) $(PYTEST) tests/compat/test_transformers.py tests/compat/test_hosts.py \
		tests/models/test_transformers.py tests/models/test_transformers_eagle.py tests/pipelines/test_families.py \
		tests/test_examples.py tests/test_documents.py tests/laws/test_docstrings.py \
		-k "transformers or hosts or use_it or families"

test-servers: $(VENV)/installed  # the plugins in the servers' own classes, 375 MB; WHEELS="vllm sglang": the newest
	rm -rf $(SERVERS)
	$(PIP) download -q --no-deps --only-binary :all: -d $(SERVERS)/wheels $(or $(WHEELS),$$($(VENV)/bin/python -c $(TESTED)))
	for wheel in $(SERVERS)/wheels/*; do unzip -q $$wheel "*.py" "*.cuh" "*/METADATA" -d $(SERVERS) || exit 1; done
	$(PIP) install -q --no-compile --no-deps --target $(SERVERS) dill msgspec
	SPECVIS_UNPACKED=1 VLLM_TARGET_DEVICE=cpu PYTHONPATH=$(SERVERS) $(PYTEST) --dist loadfile \
		tests/compat/test_vllm_plugin.py tests/compat/test_sglang_plugin.py

constraints:  # constraints.txt anew: the newest of everything, and the tests with it
	$(MAKE) install CONSTRAINTS=
	sed -e 's/+.*//' -e '/^pip==/d' .venv-newest/installed > constraints.txt
	$(MAKE) test CONSTRAINTS=

lint: $(VENV)/installed
	$(VENV)/bin/ruff check
	$(CLANG_FORMAT) --dry-run --Werror

format: $(VENV)/installed  # what lint asks for, as far as it can be done by machine
	$(VENV)/bin/ruff check --fix
	$(CLANG_FORMAT) -i

demo: $(VENV)/installed  # pictures and a table: plain decoding, by PyTorch's modules too, and five methods
	$(VENV)/bin/specvis compare

compare: $(VENV)/installed  # pictures and a table of all methods
	$(VENV)/bin/specvis compare --methods all --temperature 0 --temperature 1 --singles 4 --windows 4,8,16,32 \
		--out out/compare

bench: $(VENV)/installed
	$(VENV)/bin/python -m benchmarks.ops --json

tables: $(VENV)/installed  # the documents' tables of measured numbers, from benchmarks/results
	$(VENV)/bin/python -m benchmarks.tables
	$(VENV)/bin/python -m benchmarks.papers --tables

fuzz: $(VENV)/installed  # hostile inputs for MINUTES, as long with sanitizers; JSON=file for counts
	failed=0; \
	$(VENV)/bin/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED) $(if $(JSON),--json $(JSON)) || failed=1; \
	$(VENV)/bin/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED) --sanitized || failed=1; \
	exit $$failed

gpu:  # with the machine's own torch: nothing is installed; PARTS="smoke tests" for some parts; DRY=1 without a GPU
	PYTHON=$(PYTHON) DRY=$(DRY) bash benchmarks/gpu.sh $(PARTS)

cuda: $(VENV)/installed  # the CUDA library, for this machine's GPU; without one for 9.0, which the tests know
	PATH=$${CUDA_HOME:+$$CUDA_HOME/bin:}$$PATH:/usr/local/cuda/bin; \
	command -v nvidia-smi > /dev/null || export TORCH_CUDA_ARCH_LIST=$${TORCH_CUDA_ARCH_LIST:-9.0}; \
	if command -v nvcc > /dev/null; then SPECVIS_CUDA=1 $(VENV)/bin/python setup.py build_ext --inplace; \
	else echo "no nvcc in CUDA_HOME, PATH or /usr/local/cuda: going on without the CUDA library"; fi

hub: $(VENV)/installed  # build/hub, for Hugging Face's library `kernels`
	$(VENV)/bin/python setup.py hub

HINT := $(if $(CONSTRAINTS),|| { echo "$(CONSTRAINTS) may not fit this Python or machine (see above): make CONSTRAINTS= takes the newest"; exit 1; })

# An environment is mended where another torch or other constraints are asked for, and with the newest each time.
$(VENV)/asked: FORCE
	@mkdir -p $(VENV); echo "$(TORCH) $(CONSTRAINTS)" | cmp -s - $@ $(if $(CONSTRAINTS),,&& false) || echo "$(TORCH) $(CONSTRAINTS)" > $@
FORCE:

$(VENV)/installed: setup.py pyproject.toml python/pyproject.toml $(CONSTRAINTS) $(VENV)/asked $(wildcard csrc/*/*.* csrc/*/*/*.*)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(if $(TORCH),,--system-site-packages) $(VENV)
	sed -E -e '/^triton==/d' $(if $(OWN_TORCH),-e '/^($(OF_TORCH))==/d') $(or $(CONSTRAINTS),/dev/null) \
		> $(VENV)/constraints.txt
	$(if $(TORCH),$(INSTALL) "$(TORCH)" $(HINT),$(PYTHON) -c $(SITE) > "$$($(VENV)/bin/python -c $(SITE))/parent.pth")
	$(INSTALL) "setuptools>=77" $(HINT)
	$(VENV)/bin/python -c $(BRINGS_TRITON) || $(INSTALL) --no-deps "$(TRITON)" \
		|| echo "no Triton for this machine: going on without it"
	$(VENV)/bin/python setup.py build_ext --inplace
	$(INSTALL) --no-build-isolation $(EDITABLE) -e ".[test]" -e "./python[test]" $(if $(TORCH),"$(TORCH)") $(HINT)
	$(PIP) list --format=freeze --exclude-editable > $@.new && mv $@.new $@

clean:
	rm -rf .venv .venv-newest build dist out *.egg-info python/build python/*.egg-info specvis_kernels/*.so .pytest_cache .ruff_cache .benchmarks
	find . -name __pycache__ -prune -exec rm -rf {} +
