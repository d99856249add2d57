"""The shape of the packages: which op has which kernels, files and documents, and which way imports point."""
import ast
import importlib.metadata
import inspect
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from torch import Tensor

import specvis_kernels
from benchmarks.ops import ROWS
from specvis_kernels import _define
from tests import cases

ROOT = Path(__file__).parent.parent
OPS = specvis_kernels.ops()
FILES = {"oracle": "specvis_kernels/{}.py", "cpu": "csrc/cpu/{}.cpp", "cuda": "csrc/cuda/{}.cu",
         "cuda_emulated": "csrc/cuda/{}.cu", "triton": "specvis_kernels/triton/{}.py"}  # backend -> the file of an op
PACKAGE = Path(specvis_kernels.__file__).parent
HERE = {"oracle"} | ({"triton"} if find_spec("triton") else set())
if cases.DEVICE == "cuda":
    HERE |= {"cuda"} if (PACKAGE / "_ops_cuda.so").exists() else set()
else:
    HERE |= {"cpu"} if (PACKAGE / "_ops.so").exists() else set()
    HERE |= {"cuda_emulated"} if shutil.which(os.environ.get("CXX", "g++")) else set()


@pytest.mark.parametrize("op", OPS)
def test_an_op_has_the_backends_of_its_files(op):
    """tests/test_documents.py compares the files with the table of ops."""
    there = {backend for backend, file in FILES.items() if (ROOT / file.format(op)).exists()}
    assert set(specvis_kernels.backends(op, cases.DEVICE)) == there & HERE and "oracle" in there
    assert (ROOT / f"tests/kernels/test_{op}.py").exists()
    assert op in cases.CASES and op in ROWS


def test_files_of_kernels_have_the_names_of_ops():
    kernels = [*ROOT.glob("csrc/cuda/*.cu"), *ROOT.glob("specvis_kernels/triton/[a-z]*.py")]
    assert {file.stem for file in kernels} <= set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_an_op_says_what_it_takes_and_gives(op):
    function = getattr(specvis_kernels, op)
    assert op in specvis_kernels.__all__
    text = inspect.getdoc(function)
    parts = ("Args", "Returns", "Raises", "Examples")
    arguments, returns, raises, examples = (text.find(f"\n{part}:\n") for part in parts)
    assert 0 < arguments < returns < raises < examples and ">>> " in text[examples:]
    for name in inspect.signature(function).parameters:
        assert re.search(rf"^ +{name}: ", text[arguments:returns], re.M), f"{op} does not explain {name}"
    for name in getattr(result_of(function), "_fields", ()):
        assert re.search(rf"^ +{name}: ", text[returns:raises], re.M), f"{op} does not explain {name}"


def result_of(function):
    return inspect.signature(function, eval_str=True).return_annotation


@pytest.mark.parametrize("op", OPS)
def test_several_tensors_come_as_a_named_tuple(op):
    result = result_of(getattr(specvis_kernels, op))
    returns = getattr(torch.ops.specvis_kernels, op).default._schema.returns
    if len(returns) == 1:
        assert result is Tensor
    elif op == "rms_norm":  # the second tensor is there with a residual only
        assert result == Tensor | specvis_kernels.RMSNormResult and "RMSNormResult" in specvis_kernels.__all__
    else:
        assert issubclass(result, tuple) and set(result.__annotations__.values()) == {Tensor}
        assert len(result._fields) == len(returns)
        # commit_tokens takes the status of another op; a NaN of denoise_tokens shows in what it returns
        assert (result._fields[-1] == "status") == (op not in ("commit_tokens", "denoise_tokens"))
        assert getattr(specvis_kernels, result.__name__) is result
        assert result.__name__ in specvis_kernels.__all__


def test_an_oracle_has_no_defaults():
    def oracle(x: Tensor, k: int = 2):
        return x + k

    with pytest.raises(TypeError, match="the oracle of never must have no defaults"):
        _define.define("never", oracle=oracle, meta=lambda x: x)


def lines(files, pattern):
    """The matching lines of these files, with the name of the file."""
    return [f"{file.relative_to(ROOT)}: {line}" for file in sorted(ROOT.glob(files))
            for line in file.read_text().splitlines() if re.search(pattern, line)]


def imports(file: Path, source: str, root: Path) -> set[str]:
    """The modules that a file imports, at its top or in a function, by full name: from a import b is a.b."""
    package = file.relative_to(root).parts[:-1]
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        if isinstance(node, ast.ImportFrom):
            above = package[:len(package) + 1 - node.level] if node.level else ()
            modules |= {".".join([*above, *filter(None, [node.module]), name.name]) for name in node.names}
    return modules


def imported(root: Path, folder: str) -> dict[str, set[str]]:
    """File -> the modules that it imports, for the Python files of a folder."""
    return {str(file.relative_to(root)): imports(file, file.read_text(), root)
            for file in sorted((root / folder).rglob("*.py"))}


def test_the_ops_need_torch_alone_and_declare_types():
    assert (PACKAGE / "py.typed").exists()  # then a type checker reads the annotations of a package (PEP 561)
    written = (ROOT / "pyproject.toml").read_text()
    assert re.search(r"^dependencies = (\[.*?\])", written, re.M)[1] == '["torch>=2.10.0a0"]'
    for file, modules in imported(ROOT, "specvis_kernels").items():
        allowed = {"torch", "specvis_kernels", *sys.stdlib_module_names} | ({"triton"} if "triton/" in file else set())
        if "/compat/" in file:  # it may import the package that it serves, only in functions
            decoder = Path(file).stem.lstrip("_")
            assert not lines(file, rf"^(from|import) {decoder}\b")
            allowed |= {decoder}
        assert {module.partition(".")[0] for module in modules} <= allowed, file


# Each imports itself and the layers before it.
LAYERS = ("terminal", "files", "models", "decoding", "pipelines", "cli")
MAY_IMPORT = {layer: LAYERS[:i + 1] for i, layer in enumerate(LAYERS)} | {
    "cli": (*LAYERS, "interrupts"),
    "__init__": ("models", "decoding", "pipelines"),
    "interrupts": (),
    "__main__": ("cli", "interrupts"),
}


def imports_that_point_up(root: Path) -> list[str]:
    return [f"{file} imports {module}" for file, modules in imported(root, "specvis").items()
            for module in sorted(modules) if module.startswith("specvis.")
            and not any(f"{module}.".startswith(f"specvis.{allowed}.")
                        for allowed in MAY_IMPORT[Path(file).parts[1].removesuffix(".py")])
            or module.startswith("training")]


def test_imports_point_down(tmp_path):
    """cli -> pipelines -> decoding -> models, in python/specvis; training is beside it. One that points up is found."""
    assert not imports_that_point_up(ROOT / "python")
    lines = {"models/gpt.py": "from ..decoding import trees", "decoding/trees.py": "from ..models import gpt",
             "cli/main.py": "from training import run"}
    for file, line in lines.items():
        (tmp_path / "specvis" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "specvis" / file).write_text(line)
    assert imports_that_point_up(tmp_path) == [
        "specvis/cli/main.py imports training.run", "specvis/models/gpt.py imports specvis.decoding.trees"]


def test_imports_point_one_way():
    """csrc -> specvis_kernels -> python/specvis; tests and benchmarks look on."""
    beyond_the_stable_abi = r"#include <(Python\.h|pybind|ATen/|c10/|torch/(?!csrc/stable/|headeronly/))"
    assert not lines("csrc/**/*.*", beyond_the_stable_abi)
    assert not lines("python/**/*.py", r"^\s*(from|import)\s+(tests|benchmarks)\b")
    beside_public_names = (r"from specvis_kernels\.(?!compat\._(?:hosts|layers|replay) import |triton import )"
                           r"|import specvis_kernels\.")
    assert not lines("python/**/*.py", beside_public_names)  # but for what a host's model may be, graphs, and a setting


def test_the_version_stands_in_one_place():
    version = specvis_kernels.__version__
    files = ("pyproject.toml", "setup.py", "csrc/**/*.*", "specvis_kernels/**/*.py", "python/specvis/**/*.py")
    found = [line for pattern in files for line in lines(pattern, rf"(?<![\d.]){re.escape(version)}(?![\d.])")]
    assert found == [f'specvis_kernels/__init__.py: __version__ = "{version}"']
    assert f'\nversion = "{version}"' in (ROOT / "python/pyproject.toml").read_text()  # a package of its own
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


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
    assert run.returncode == 0 and "UserWarning: specvis_kernels has no compiled kernels" in run.stderr


def test_the_constraints_meet_what_the_packages_require():
    """One public version of each: pip takes 2.13.0 for 2.13.0+cpu and for PyPI's build with CUDA. (The latter brings a
    Triton of its own, which make lets it.)"""
    constraints = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    assert all(re.fullmatch(r"\d[\w.]*", version) for version in constraints.values())
    constraints = {canonicalize_name(name): version for name, version in constraints.items()}
    lines = [line for name in ("specvis_kernels", "specvis") for line in importlib.metadata.requires(name)]
    if constraints["torch"] == importlib.metadata.version("torch").partition("+")[0]:
        lines += importlib.metadata.requires("torch")
    required = [requirement for requirement in map(Requirement, lines)
                if not requirement.name.startswith(("specvis", "nvidia", "cuda", "triton")) and (
                    requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in (
                        "", "test", "ray", "transformers")))]
    assert {"torch", "transformers", "pytest", "ray"} <= {requirement.name for requirement in required}
    for requirement in required:
        assert requirement.specifier.contains(constraints[canonicalize_name(requirement.name)]), requirement


def test_every_file_of_data_has_a_license():
    """The wheels hold code, whose license is at the top, and the weights' folder, see tests/slow/test_install.py."""
    weights = ROOT / "python/specvis/weights"
    patterns = re.findall(r"[\w*]+\.\w+", (weights / "LICENSE").read_text())
    assert not [path.name for path in weights.iterdir()
                if path.name != "LICENSE" and not any(path.match(pattern) for pattern in patterns)]
    assert "*.png" not in patterns  # some pictures are MIT
