"""The shape of the package: which op has which kernels, what it brings along, which way imports point."""
import inspect
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import specvis_kernels
from benchmarks.ops import ROWS
from tests.kernels import inputs

ROOT = Path(__file__).parent.parent
CUDA = {"cuda", "cuda_emulated"}  # the same files; the second in tests, where there is no GPU
KERNELS = {  # op -> every backend it has, on a machine that has everything
    "accept_gaussian": {"oracle", "cpu", "triton"},
    "codebook_neighbors": {"oracle"},
    "draw_children": {"oracle", "cpu", "triton", *CUDA},
    "expand_tree": {"oracle", "cpu", "triton", *CUDA},
    "guided_probs": {"oracle", "cpu", "triton", *CUDA},
    "neighborhood_sum": {"oracle", "cpu", "triton", *CUDA},
    "resample_gaussian": {"oracle", "cpu", "triton"},
    "sample_residual": {"oracle", "cpu", "triton", *CUDA},
    "select_tree": {"oracle", "cpu", "triton", *CUDA},
    "tree_links": {"oracle", "cpu", "triton", *CUDA},
    "tree_mask": {"oracle", "cpu", "triton", *CUDA},
    "verify_tree": {"oracle", "cpu", "triton", *CUDA},
}
PACKAGE = Path(specvis_kernels.__file__).parent
HERE = {"oracle"} | ({"triton"} if find_spec("triton") else set())
if inputs.DEVICE == "cuda":
    HERE |= {"cuda"} if (PACKAGE / "_ops_cuda.so").exists() else set()
else:
    HERE |= {"cpu"} if (PACKAGE / "_ops.so").exists() else set()
    HERE |= {"cuda_emulated"} if shutil.which(os.environ.get("CXX", "g++")) else set()


def test_the_table_names_every_op():
    assert KERNELS.keys() == set(specvis_kernels.ops())


@pytest.mark.parametrize("op", KERNELS)
def test_no_kernel_has_gone_missing(op):
    assert set(specvis_kernels.backends(op, inputs.DEVICE)) == KERNELS[op] & HERE


@pytest.mark.parametrize("op", KERNELS)
def test_files_have_the_name_of_the_op(op):
    files = {"oracle": f"specvis_kernels/{op}.py", "cpu": f"csrc/{op}.cpp", "cuda": f"csrc/{op}.cu",
             "triton": f"specvis_kernels/triton/{op}.py"}
    for backend, file in files.items():
        assert (ROOT / file).exists() == (backend in KERNELS[op]), file
    assert (ROOT / f"tests/test_{op}.py").exists()
    assert op in inputs.CASES and op in ROWS


@pytest.mark.parametrize("op", KERNELS)
def test_an_op_says_what_it_takes_and_gives(op):
    function = getattr(specvis_kernels, op)
    assert op in specvis_kernels.__all__
    text = inspect.getdoc(function)
    arguments, returns, raises = (text.find(f"\n{part}:\n") for part in ("Args", "Returns", "Raises"))
    assert 0 < arguments < returns < raises
    for name in inspect.signature(function).parameters:
        assert re.search(rf"^ +{name}:? ", text[arguments:returns], re.M), f"{op} does not explain {name}"


def lines(files, pattern):
    """What matches in these files, with the name of the file."""
    return [f"{file.relative_to(ROOT)}: {line}" for file in sorted(ROOT.glob(files))
            for line in file.read_text().splitlines() if re.search(pattern, line)]


def test_imports_point_one_way():
    """csrc -> specvis_kernels -> python/specvis; tests and benchmarks look on."""
    beyond_the_stable_abi = r"#include <(Python\.h|pybind|ATen/|c10/|torch/(?!csrc/stable/|headeronly/))"
    assert not lines("csrc/*", beyond_the_stable_abi)
    assert not lines("specvis_kernels/**/*.py", r"^\s*(from|import)\s+(specvis|tests|benchmarks)\b")
    assert not lines("python/**/*.py", r"^\s*(from|import)\s+(tests|benchmarks)\b")
    assert not lines("python/**/*.py", r"from specvis_kernels\.|import specvis_kernels\.")  # what is public


def test_import_is_quick_and_leaves_triton_alone():
    program = """if True:
        import sys, time, torch
        before, start = set(sys.modules), time.perf_counter()
        import specvis_kernels
        print(time.perf_counter() - start, "triton" in sys.modules.keys() - before)"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    seconds, triton = run.stdout.decode().split()
    assert float(seconds) < 2 and triton == "False"


def test_an_unbuilt_source_folder_says_so(tmp_path):
    here = Path(specvis_kernels.__file__).parent
    shutil.copytree(here, tmp_path / "specvis_kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "csrc").mkdir()
    run = subprocess.run([sys.executable, "-c", "import specvis_kernels"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0 and "is a source folder without built libraries" in run.stderr
