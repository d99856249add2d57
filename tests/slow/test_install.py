"""The wheels: the ops', alone with torch in an empty environment, and the program's. And a table of environments: an
installation there ends with kernels, or with a line that says what to do."""
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import specvis_kernels

ROOT = Path(__file__).parent.parent.parent


def run(*command, cwd, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([*map(str, command)], cwd=cwd, env=environment | variables, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)


def dependencies(name: str, found: dict) -> dict:
    """The distribution of this name and the distributions that it requires, as far as they are installed."""
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
    by links, and nothing else; or with `home` they are a user's, which the environment sees as it does the system's."""
    def environment(*names, home=None):
        folder = tmp_path_factory.mktemp("venv")
        venv.create(folder, symlinks=True, system_site_packages=bool(home))
        paths = {"base": str(folder), "platbase": str(folder), "userbase": f"{home}/.local"}
        site = Path(sysconfig.get_path("purelib", "posix_user" if home else "venv", vars=paths))
        site.mkdir(parents=True, exist_ok=True)
        found = {}
        for name in names:
            dependencies(name, found)
        for distribution in found.values():
            for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
                if not (site / top).exists():
                    (site / top).symlink_to(distribution.locate_file(top))
        return folder / "bin/python"

    return environment


PIP = sys.executable, "-m", "pip", "--disable-pip-version-check"
WHEEL = *PIP, "wheel", ".", "--no-build-isolation", "--no-deps", "-w"
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
STUB = f"""#!/bin/sh
case "$*" in *"${{FAILS:-nothing}}"*) echo "it fails here"; exit 1;; esac
[ "$1" = --list-gpu-arch ] && printf "compute_%s\\n" 75 80 86 89 90 100 120
while [ $# -gt 1 ]; do
    case "$1" in -MF) : > "$2";; -o) /bin/cat "{ROOT}/specvis_kernels/${{2##*/}}" > "$2" 2> /dev/null;; esac
    shift
done
exit 0
"""  # g++ or nvcc: objects are empty, libraries are those that are built here


def put_stubs(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("#!/bin/sh\nexec \"$@\"\n" if name == "ccache" else STUB)
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The sources of a wheel, without the files of earlier builds; compiled objects are used again."""
    return copy_sources(tmp_path_factory.mktemp("sources"))


def copy_sources(folder):
    folder.mkdir(exist_ok=True)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, folder)
    for name in ("csrc", "specvis_kernels", "tests", *(f"build/{path.name}" for path in ROOT.glob("build/objects-*"))):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


OPS = f"specvis_kernels-{specvis_kernels.__version__}"
INFORMATION = "METADATA", "WHEEL", "RECORD", "top_level.txt"


def ours(package: str, root: Path, *patterns: str) -> set[str]:
    """The files of a package that a wheel must hold, and no others."""
    return {str(path.relative_to(root)) for pattern in patterns for path in (root / package).rglob(pattern)}


def read(wheel: Path, name: str) -> str:
    return zipfile.ZipFile(wheel).read(name).decode()


def test_the_wheel_works_with_torch_alone(empty, sources, tmp_path):
    built = run(*WHEEL, tmp_path, cwd=sources)
    assert built.returncode == 0, built.stdout
    wheel, = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.stat().st_size < 6e6 and "-py3-none-" in wheel.name
    libraries = {name for name in names if name.endswith(".so")}
    assert libraries <= {"specvis_kernels/_ops.so", "specvis_kernels/_ops_cuda.so"}
    assert ("-manylinux_2_" in wheel.name) == bool(libraries)  # which one, tests/test_libraries.py says
    assert {*names} - libraries == ours("specvis_kernels", ROOT, "*.py", "py.typed") | {
        f"{OPS}.dist-info/{name}" for name in (*INFORMATION, "entry_points.txt", "licenses/LICENSE")}
    assert "\nLicense-Expression: Apache-2.0\n" in read(wheel, f"{OPS}.dist-info/METADATA")
    folders = [str(folder).encode() for folder in (sources, importlib.metadata.distribution("torch").locate_file(""))]
    for name in libraries - {"specvis_kernels/_ops_cuda.so"}:  # nvcc writes into its own what it was linked with
        assert not [folder for folder in folders if folder in zipfile.ZipFile(wheel).read(name)], name

    python = empty("torch")
    installed = run(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
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
    wheels = []
    for folder in (tmp_path, tmp_path / "again"):
        built = run(*WHEEL, folder, cwd=sources, SOURCE_DATE_EPOCH="315532800")
        assert built.returncode == 0, built.stdout
        wheels += folder.glob("*.whl")
    wheel, again = wheels
    assert wheel.name.endswith("-py3-none-any.whl") and wheel.read_bytes() == again.read_bytes()
    files = zipfile.ZipFile(wheel)
    information = f"specvis-{specvis_kernels.__version__}.dist-info"
    expected = ours("specvis", sources, "*.py", "weights/*")
    assert len(expected) > 50 and {*files.namelist()} == expected | {f"{information}/{name}" for name in (
        *INFORMATION, "entry_points.txt", "licenses/LICENSE", "licenses/specvis/weights/LICENSE")}
    assert all(files.read(name) == (sources / name).read_bytes() for name in expected)
    assert files.read(f"{information}/entry_points.txt").decode().split("\n")[:2] == [
        "[console_scripts]", "specvis = specvis.__main__:main"]
    for license in ("LICENSE", "specvis/weights/LICENSE"):
        assert files.read(f"{information}/licenses/{license}") == (sources / license).read_bytes()
    assert "\nLicense-Expression: Apache-2.0 AND MIT\n" in read(wheel, f"{information}/METADATA")
    assert (ROOT / "python/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()

    packed = run(sys.executable, "-c", "import setuptools; setuptools.setup()", "sdist", "--dist-dir", tmp_path,
                 cwd=sources)
    assert packed.returncode == 0, packed.stdout
    assert {name for name in packed_in(tmp_path) if ".egg-info/" not in name} == expected | {
        "LICENSE", "PKG-INFO", "pyproject.toml", "setup.cfg"}


def packed_in(folder: Path) -> set[str]:
    """The files of the one archive of sources that is there."""
    archive, = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        return {member.name.partition("/")[2] for member in files if member.isfile()}


@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize("source", [
    "rows.cpp", pytest.param("commit_tokens.cu", marks=pytest.mark.skipif(not shutil.which("nvcc"),
                                                                          reason="needs nvcc"))])
def test_a_wheel_is_the_same_from_another_folder(tmp_path, source):
    """One object is compiled in each; the others are from this folder's build. nvcc names kernels by the folder."""
    wheels = []
    for name in ("one", "two"):
        folder = copy_sources(tmp_path / ("a" if source.endswith(".cu") else name))
        for built in (folder / "build").rglob(f"{source}.o"):
            built.unlink()
        said = run(*WHEEL, tmp_path / f"{name}.wheel", cwd=folder, SOURCE_DATE_EPOCH="315532800",
                   SPECVIS_CUDA=str(int(source.endswith(".cu"))), TORCH_CUDA_ARCH_LIST="9.0")
        assert said.returncode == 0, said.stdout
        wheels += (tmp_path / f"{name}.wheel").glob("*.whl")
        shutil.rmtree(folder)
    one, two = wheels
    assert one.read_bytes() == two.read_bytes()


def test_a_wheel_without_libraries_is_for_any_platform(sources, tmp_path):
    built = run(sys.executable, "setup.py", "bdist_wheel", "--dist-dir", tmp_path, cwd=sources, CXX="", PATH="")
    assert built.returncode == 0 and built.stdout.splitlines()[-1].startswith(
        "specvis_kernels: no C++ compiler: built without C++ and CUDA kernels, "), built.stdout
    wheel, = tmp_path.glob("*.whl")
    assert wheel.name == f"{OPS}-py3-none-any.whl"
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert "Root-Is-Purelib: true\n" in read(wheel, f"{OPS}.dist-info/WHEEL")


def fake_torch(folder, version, cuda="None", headers=True):
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").touch()
    (folder / "torch/version.py").write_text(f"__version__ = '{version}'\ncuda: Optional[str] = {cuda}\n")
    if headers:
        (folder / "torch/include/torch/csrc/stable").mkdir(parents=True)
        (folder / "torch/include/torch/csrc/stable/library.h").touch()


@pytest.mark.parametrize("torch_cuda, first", [
    ("None", "torch has no CUDA: no CUDA kernels are built; SPECVIS_CUDA=1 builds them"),
    ("'13.0'", "CUDA kernels are built by {folder}/nvcc for sm_90"),
])
def test_a_build_says_what_it_does(tmp_path, torch_cuda, first):
    """Which libraries, for which GPUs, and which file of how many; commands where they fail."""
    copy_sources(tmp_path)
    fake_torch(tmp_path, "2.11.0", torch_cuda)
    put_stubs(tmp_path, "c++", "nvcc")
    program = "import sys; sys.path.insert(0, '.'); sys.argv = ['setup.py', 'build_ext', '-q']; import setup"
    variables = {"CXX": str(tmp_path / "c++"), "PATH": f"{tmp_path}:/usr/bin:/bin", "TORCH_CUDA_ARCH_LIST": "9.0",
                 "SPECVIS_CUDA": "", "CUDA_HOME": "", "MAX_JOBS": "1"}
    built = run(sys.executable, "-c", program, cwd=tmp_path, **variables)
    assert built.returncode == 0, built.stdout
    lines = [line for line in built.stdout.splitlines() if line.startswith("specvis_kernels: ")]
    cpp, cuda = ([str(file.relative_to(tmp_path)) for pattern in patterns
                  for file in sorted(tmp_path.glob(f"csrc/{pattern}"), reverse=True)]
                 for patterns in (("cpu/*.cpp", "bindings/cpu/*.cpp", "bindings/*.cpp"),
                                  ("cuda/*.cu", "cuda/*.cpp", "bindings/*.cpp")))
    cuda = cuda if torch_cuda != "None" else []
    steps = [[f"[{i + 1}/{len(part)}] {file}" for i, file in enumerate(part)] for part in (cpp, cuda)]
    said = [*steps[0], first.format(folder=tmp_path), *steps[1]] if cuda else [first, *steps[0]]
    assert lines == [f"specvis_kernels: {line}" for line in said]

    failed = run(sys.executable, "-c", program, cwd=tmp_path, FAILS="csrc/cpu/rows.cpp -o", **variables)
    assert failed.returncode == 1 and "\nit fails here\n" in failed.stdout
    assert re.search(rf"specvis_kernels: failed: {tmp_path}/c\+\+ -O3 .* -c csrc/cpu/rows.cpp -o ", failed.stdout)


def test_an_editable_install_is_found_beside_the_clone(empty, tmp_path):
    """As make installs: where a folder beside the program has the package's name and is no package."""
    sources = shutil.copytree(ROOT / "python", tmp_path / "specvis",
                              ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    python = empty("setuptools")
    options = re.search(r"^EDITABLE := (.*)", (ROOT / "Makefile").read_text(), re.M)[1].split()
    installed = run(*PIP, "--python", python, "install", "--no-build-isolation", "--no-deps", "--no-index", *options,
                    "-e", sources, cwd=tmp_path)
    assert installed.returncode == 0, installed.stdout
    found = run(python, "-c", "import importlib.util; print(importlib.util.find_spec('specvis').origin)", cwd=tmp_path)
    assert found.stdout == f"{sources}/specvis/__init__.py\n"


PIP_INSTALL = *PIP, "--python", "PYTHON", "install", "-v", "--no-deps"
UV_INSTALL = "UV", "pip", "install", "--python", "PYTHON", "--no-deps"
OFF = "--no-build-isolation"
UNPRIVILEGED = [shutil.which("setpriv"), "--bounding-set=-dac_override"] if os.geteuid() == 0 else []  # root may write
NO_CUDA, WITHOUT_75 = "torch has no CUDA: no CUDA kernels", "7.5 left out: the kernels need 8.0 or later, and "
NO_TORCH = "no torch is found: python -m pip install 'torch>=2.10'. If it is installed, "
FAILS = "the compiler does not compile int main() {} by "
ENVIRONMENTS = {  # what the installation ends with, a line that it says, and what the environment is
    "pip": ("kernels", NO_CUDA, {"by": (*PIP_INSTALL, ".")}),
    "pip, torch of the system": ("kernels", NO_CUDA, {"by": (*PIP_INSTALL, "."), "torch": "system"}),
    "pip, editable": ("kernels", NO_CUDA, {"by": (*PIP_INSTALL, "-e", ".")}),
    "pip, isolation off": ("kernels", NO_CUDA, {}),
    "pip, no torch": ("a line", NO_TORCH, {"torch": None}),
    "pip, old torch": ("a line", "torch 2.9.1 is too old: python -m pip install 'torch>=2.10'", {"torch": "2.9.1"}),
    "pip, torch without headers": ("a line", "torch 2.12.0 has no headers in ", {"torch": "2.12.0"}),
    "pip, read-only": ("a line", "a build writes into FOLDER, and may not: install from a copy of the sources",
                       {"by": (*UNPRIVILEGED, *PIP_INSTALL, OFF, "."), "mode": "a-w"}),
    "uv": ("a line", f"{NO_TORCH}python -m pip install {OFF} . or uv pip install {OFF} . finds it",
           {"by": (*UV_INSTALL, ".")}),
    "uv, isolation off": ("kernels", None, {"by": (*UV_INSTALL, OFF, ".")}),
    "NVIDIA's image": ("kernels", WITHOUT_75, {"SPECVIS_CUDA": "1", "MAX_JOBS": "",  # 26.07
                                               "TORCH_CUDA_ARCH_LIST": "7.5 8.0 8.6 9.0 10.0 12.0+PTX"}),
    "vLLM's image": ("kernels", WITHOUT_75, {"SPECVIS_CUDA": "1",  # vllm-openai 0.29
                                             "TORCH_CUDA_ARCH_LIST": "7.5 8.0 8.6 8.9 9.0 10.0 12.0"}),
    "no GPU remains": ("a line", "of 7.0, 7.5 no GPU remains: the kernels need 8.0 or later, and ",
                       {"SPECVIS_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "7.0 7.5+PTX"}),
    "no compiler": ("oracles", "no C++ compiler: built without C++ and CUDA kernels", {"tools": ()}),
    "no nvcc": ("a line", "SPECVIS_CUDA=1, but no nvcc in ", {"tools": ["g++"], "SPECVIS_CUDA": "1"}),
    "ccache": ("kernels", NO_CUDA, {"CXX": "ccache g++ -m64"}),
    "CXX is missing": ("a line", "the compiler clang++ -std=c++17 -x c++ does not run: ", {"CXX": "clang++"}),
    "g++ fails": ("a line", f"{FAILS}g++ -std=c++17 -x c++: it fails here", {"FAILS": "-x c++"}),
    "nvcc fails": ("a line", FAILS, {"FAILS": "-x cu", "SPECVIS_CUDA": "1"}),
    "SPECVIS_CUDA=yes": ("a line", "SPECVIS_CUDA must be 0 or 1, got 'yes'", {"SPECVIS_CUDA": "yes"}),
}


@pytest.fixture(scope="module")
def uv(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uv")
    installed = run(*PIP, "install", "--target", folder, "uv", cwd=folder)
    return folder / "bin/uv" if not installed.returncode else pytest.skip(f"no uv: {installed.stdout[-300:]}")


@pytest.mark.skipif(not (ROOT / "specvis_kernels/_ops.so").exists(), reason="needs the C++ kernels")
@pytest.mark.parametrize("end, line, what", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_an_installation_ends_with_kernels_or_with_a_line(empty, request, tmp_path, end, line, what):
    """From a folder with a space in its name. The compilers are stubs, and no others are found."""
    variables = {"PATH": put_stubs(tmp_path / "bin", *what.get("tools", ("g++", "nvcc", "ccache"))), "CXX": "",
                 "SPECVIS_CUDA": "", "CUDA_HOME": "", "TORCH_CUDA_ARCH_LIST": "", "HOME": str(tmp_path / "home")}
    variables |= {name: value for name, value in what.items() if name.isupper()}
    torch = what.get("torch", "torch")
    python = empty("setuptools", *(["torch"] if torch in ("torch", "system") else []),
                   home=tmp_path / "home" if torch == "system" else None)
    if torch and torch[0].isdigit():
        fake_torch(next(python.parent.parent.glob("lib/*/site-packages")), torch, headers=torch == "2.9.1")
    sources = copy_sources(tmp_path / "a cloné")
    setup = (sources / "setup.py").read_text()
    (sources / "setup.py").write_text(setup.replace("/usr/local/cuda", "/no/cuda"))
    run("chmod", "-R", what.get("mode", "u+w"), sources, cwd=tmp_path)
    command = [python if word == "PYTHON" else request.getfixturevalue("uv") if word == "UV" else word
               for word in what.get("by", (*PIP_INSTALL, OFF, "."))]
    said = run(*command, cwd=sources, **variables)
    lines = [text.strip() for text in said.stdout.splitlines() if text.strip().startswith("specvis_kernels: ")]
    start = f"specvis_kernels: {line}".replace("FOLDER", str(sources))
    assert line is None or [text for text in lines if text.startswith(start)], said.stdout
    assert (said.returncode == 0) == (end != "a line"), said.stdout
    if end == "a line":
        assert "Traceback" not in said.stdout and len(lines) == 1, said.stdout
        return
    used = run(python, "-c", "import specvis_kernels as s; print(s.__file__, s.backends('tree_links', 'cpu'))",
               cwd=tmp_path, **variables)
    assert used.stdout.endswith(" ['oracle', 'cpu']\n" if end == "kernels" else " ['oracle']\n"), used.stdout
    assert ("UserWarning: specvis_kernels has no compiled kernels" in used.stdout) == (end == "oracles"), used.stdout


def test_two_builds_in_one_folder_take_turns(tmp_path):
    sources = copy_sources(tmp_path / "sources")
    variables = os.environ | {"CXX": "", "SPECVIS_CUDA": "0", "PATH": put_stubs(tmp_path / "bin", "g++")}
    command = sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir"
    builds = [subprocess.Popen([*command, tmp_path / str(i)], cwd=sources, env=variables) for i in range(3)]
    assert [build.wait() for build in builds] == [0, 0, 0]
    first, *others = [next((tmp_path / str(i)).glob("*.whl")) for i in range(3)]
    assert all(zipfile.ZipFile(first).namelist() == zipfile.ZipFile(other).namelist() for other in others)


def test_sources_are_packed_without_torch(empty, sources, tmp_path):
    packed = run(empty("setuptools"), "setup.py", "sdist", "--dist-dir", tmp_path, cwd=sources)
    assert packed.returncode == 0, packed.stdout
    csrc = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")}
    assert {name for name in packed_in(tmp_path) if ".egg-info/" not in name} == csrc | ours(
        "specvis_kernels", ROOT, "*.py", "py.typed") | {
        "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "setup.py"}
