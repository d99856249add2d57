"""The wheels: the ops', alone with torch in an empty environment, and the program's. And what the ops' build says where
torch is missing or too old."""
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import specvis_kernels

ROOT = Path(__file__).parent.parent


def run(*command, cwd, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([*map(str, command)], cwd=cwd, env=environment | variables, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)


def dependencies(name: str, found: dict) -> dict:
    """The distribution of this name and those that it requires, as far as they are installed."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key not in found:
        try:
            found[key] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # for another platform or another Python
            return found
        for requirement in found[key].requires or []:
            if "extra ==" not in requirement:
                dependencies(re.match(r"[\w.-]+", requirement)[0], found)
    return found


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """environment(*names): the Python of a new virtual environment that sees these distributions and what they require,
    by links, and nothing else."""
    def environment(*names):
        folder = tmp_path_factory.mktemp("venv")
        venv.create(folder, symlinks=True)
        paths = {"base": str(folder), "platbase": str(folder)}
        site = Path(sysconfig.get_path("purelib", "venv", vars=paths))
        found = {}
        for name in names:
            dependencies(name, found)
        for distribution in found.values():
            for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
                if not (site / top).exists():
                    (site / top).symlink_to(distribution.locate_file(top))
        return folder / "bin/python"

    return environment


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """What a wheel is built from, apart from the files of earlier builds; compiled objects are used again."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, folder)
    for name in ("csrc", "specvis_kernels", "tests", *(f"build/{path.name}" for path in ROOT.glob("build/objects-*"))):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


def test_the_wheel_works_with_torch_alone(empty, sources, tmp_path):
    pip = sys.executable, "-m", "pip", "--disable-pip-version-check"
    built = run(*pip, "wheel", ".", "--no-build-isolation", "--no-deps", "-w", tmp_path, cwd=sources)
    assert built.returncode == 0, built.stdout
    wheel, = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.stat().st_size < 6e6 and "-py3-none-" in wheel.name
    information = f"specvis_kernels-{specvis_kernels.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"specvis_kernels", information}
    assert "specvis_kernels/py.typed" in names
    assert {Path(name).suffix for name in names if name.startswith("specvis_kernels/")} <= {".py", ".so", ".typed"}

    python = empty("torch")
    installed = run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    assert installed.returncode == 0, installed.stdout
    program = """if True:
        import importlib.util, sys, torch, specvis_kernels
        assert specvis_kernels.__file__.startswith(sys.prefix), specvis_kernels.__file__
        for name in ("numpy", "click", "specvis", "safetensors", "matplotlib"):
            assert not importlib.util.find_spec(name), name
        links = specvis_kernels.tree_links(torch.tensor([[-1, 0, 0, 1]], dtype=torch.int32))
        print(specvis_kernels.backends("tree_links", "cpu"), links[1].tolist())"""
    used = run(python, "-c", program, cwd=tmp_path)
    assert used.returncode == 0, used.stdout
    backends, _, depths = used.stdout.splitlines()[-1].rpartition(" [[")
    assert depths == "0, 1, 1, 2]]" and ("cpu" in backends) == ("specvis_kernels/_ops.so" in names)


def test_the_wheel_of_the_program_has_its_weights_and_its_command(tmp_path):
    sources = shutil.copytree(ROOT / "python", tmp_path / "python",
                              ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    built = run(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", ".", "--no-build-isolation",
                "--no-deps", "-w", tmp_path, cwd=sources)
    assert built.returncode == 0, built.stdout
    wheel, = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    files = zipfile.ZipFile(wheel)
    information = f"specvis-{specvis_kernels.__version__}.dist-info"
    assert {name.partition("/")[0] for name in files.namelist()} == {"specvis", information}
    for folder in ("specvis", "specvis/weights"):  # all of it, as it is here
        expected = {path for path in (sources / folder).iterdir() if path.is_file()}
        assert expected and all(files.read(f"{folder}/{path.name}") == path.read_bytes() for path in expected)
    assert files.read(f"{information}/entry_points.txt").decode().split("\n")[:2] == [
        "[console_scripts]", "specvis = specvis.cli.main:main"]
    for license in ("LICENSE", "specvis/weights/LICENSE"):
        assert files.read(f"{information}/licenses/{license}") == (sources / license).read_bytes()


@pytest.mark.parametrize("command", ["dist_info", "bdist_wheel", "editable_wheel", "build_ext"])
def test_a_build_without_torch_says_what_to_do(empty, sources, command):
    """In its first line; pip runs these commands."""
    said = run(empty("setuptools"), "setup.py", command, cwd=sources)
    assert said.returncode == 1
    assert said.stdout == "specvis_kernels: torch must be installed first: python -m pip install 'torch>=2.10'\n"


def test_a_build_with_an_old_torch_says_what_to_do(empty, sources, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text("__version__ = '2.9.1+cpu'\ncuda = None\n")
    code = f"import runpy, sys; sys.argv = ['setup.py', 'build_ext']; sys.path.insert(0, {str(tmp_path)!r});" \
        " runpy.run_path('setup.py', run_name='__main__')"
    said = run(empty("setuptools"), "-c", code, cwd=sources)
    assert said.returncode == 1
    assert said.stdout == "specvis_kernels: torch 2.9.1+cpu is too old: python -m pip install 'torch>=2.10'\n"


def test_sources_are_packed_without_torch(empty, sources, tmp_path):
    packed = run(empty("setuptools"), "setup.py", "sdist", "--dist-dir", tmp_path, cwd=sources)
    assert packed.returncode == 0 and list(tmp_path.glob("*.tar.gz")), packed.stdout


def test_both_packages_have_one_version():
    written = (ROOT / "python/pyproject.toml").read_text()
    assert re.search(r'^version = "(.*)"', written, re.M)[1] == specvis_kernels.__version__


def test_the_ops_depend_on_torch_alone():
    written = (ROOT / "pyproject.toml").read_text()
    assert re.search(r"^dependencies = (\[.*?\])", written, re.M)[1] == '["torch>=2.10"]'
