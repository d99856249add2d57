"""Builds csrc/ into specvis_kernels/_ops.so and _ops_cuda.so, shared libraries against torch's stable C ABI.

One build serves every Python and every torch from 2.10 on, with or without CUDA, so the wheel is
py3-none-<platform>. torch's headers are found by path and torch is not imported, so the build also works
in pip's isolation, which runs the same Python. Without a C++ compiler the package is built without
libraries: then the oracles and Triton answer. The CUDA library is built if nvcc is found, with or without
a GPU.

    CXX                   the C++ compiler
    MAX_JOBS              how many of them run at once
    SPECVIS_CUDA          0: no CUDA library; 1: an error if there is no nvcc
    CUDA_HOME             where nvcc is, if it is neither in PATH nor in /usr/local/cuda
    TORCH_CUDA_ARCH_LIST  the GPUs to build for, "8.0;9.0;10.0+PTX" unless set
"""
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NEED_TORCH = {"build", "build_ext", "bdist_wheel", "dist_info", "editable_wheel", "install", "develop"}
OBJECTS = Path("build", f"objects-{sysconfig.get_platform()}")  # kept between builds, editable ones too
DEFINES = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY"]  # what torch 2.10 has
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall",
         "-fno-trapping-math", "-fno-math-errno",  # loops vectorize, results stay
         "-ffp-contract=off"]                      # every backend rounds alike
CUDA_FLAGS = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall",
              "-fmad=false",                       # on the GPU too
              "-Xptxas", "-v"]                     # what each kernel uses, for tests/kernels/test_cuda_build.py


def find_torch() -> Path:
    what_to_do = "python -m pip install 'torch>=2.10'"
    for folder in [*sys.path, sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]:
        version = Path(folder, "torch/version.py")
        match = version.exists() and re.search(r"^__version__ = '((\d+)\.(\d+)[^']*)'", version.read_text(), re.M)
        if match and (int(match[2]), int(match[3])) < (2, 10):
            sys.exit(f"specvis_kernels: torch {match[1]} is too old: {what_to_do}")
        if match and Path(folder, "torch/include/torch/csrc/stable/library.h").exists():
            return Path(folder, "torch")
    sys.exit(f"specvis_kernels: torch must be installed first: {what_to_do}")


def find_nvcc() -> str | None:
    wanted = os.environ.get("SPECVIS_CUDA", "")
    folders = [Path(os.environ["CUDA_HOME"], "bin")] if os.environ.get("CUDA_HOME") else []
    folders += [*os.environ.get("PATH", "").split(os.pathsep), "/usr/local/cuda/bin"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(map(str, folders))) if wanted != "0" else None
    if wanted == "1" and not nvcc:
        sys.exit("specvis_kernels: SPECVIS_CUDA=1, but no nvcc in CUDA_HOME, PATH or /usr/local/cuda")
    return nvcc


def gpu_flags() -> list[str]:
    flags = []
    for name in re.split("[; ,]+", os.environ.get("TORCH_CUDA_ARCH_LIST") or "8.0;9.0;10.0+PTX"):
        match = re.fullmatch(r"(\d+)\.?(\d)([af]?)(\+PTX)?", name)
        if not match:
            sys.exit(f"specvis_kernels: TORCH_CUDA_ARCH_LIST must be like 8.0;9.0+PTX, got {name!r}")
        arch = "".join(match.groups()[:3])
        flags += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
        if match[4]:
            flags += ["-gencode", f"arch=compute_{arch},code=compute_{arch}"]
    return flags


def compression_flags(nvcc: str) -> list[str]:
    """The libraries are a third as large so. nvcc 13 knows this, and every driver that its code runs on."""
    release = re.search(r"release (\d+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout)
    return ["--compress-mode=size"] if release and int(release[1]) >= 13 else []


def own_files() -> list[Path]:
    """What every object depends on, apart from its source and torch."""
    return [Path(__file__), *Path("csrc").glob("*.h"), *Path("csrc").glob("*.cuh")]


def run(*command, log: Path | None = None) -> None:
    """With a log, what the command says goes there, and is shown if it warns or fails."""
    print(*command, flush=True)
    with open(log, "w") if log else nullcontext() as file:
        failed = subprocess.run([*map(str, command)], stdout=file, stderr=file and subprocess.STDOUT).returncode
    if log and (failed or "warning" in log.read_text()):
        print(log.read_text(), flush=True)
    if failed:
        sys.exit(f"specvis_kernels: failed: {' '.join(map(str, command))}")


class Build(build_ext):
    def get_ext_filename(self, name):  # no tag of a Python version: it is not a Python module
        return name.replace(".", os.sep) + ".so"

    def run(self):
        compiler, self.nvcc = shutil.which(os.environ.get("CXX", "g++")), find_nvcc()
        if not compiler:
            if os.environ.get("SPECVIS_CUDA") == "1":
                sys.exit("specvis_kernels: SPECVIS_CUDA=1, but there is no C++ compiler")
            print("specvis_kernels: no C++ compiler: built without C++ and CUDA kernels", flush=True)
            self.extensions = []
        if not self.nvcc:
            print("specvis_kernels: no nvcc: built without CUDA kernels", flush=True)
            self.extensions = [e for e in self.extensions if not e.name.endswith("_cuda")]
        self.compiler_path = compiler
        super().run()

    def build_extension(self, extension):
        torch = find_torch()
        shared = [torch / "version.py", *own_files()]
        compile, link, objects = [self.compiler_path, *FLAGS], [self.compiler_path], OBJECTS
        has_log = extension.name.endswith("_cuda")
        if has_log:  # nvcc knows where CUDA's headers and its static runtime are
            host = [self.nvcc, "-ccbin", self.compiler_path]
            compile = [*host, *CUDA_FLAGS, *gpu_flags(), *compression_flags(self.nvcc)]
            link = [*host, "-Xlinker", "--no-undefined"]
            objects = OBJECTS / "-".join(flag.partition("code=")[2] for flag in gpu_flags()[1::2])
        else:
            link += ["-Wl,--no-undefined"]

        def object_of(source: str) -> Path:
            target = objects / (source + ".o")
            target.parent.mkdir(parents=True, exist_ok=True)
            newest = max(path.stat().st_mtime for path in [Path(source), *shared])
            if not target.exists() or target.stat().st_mtime <= newest:
                run(*compile, *DEFINES, "-isystem", torch / "include", "-c", source, "-o", target,
                    log=target.with_suffix(".log") if has_log else None)
            return target

        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            built = list(pool.map(object_of, extension.sources))
        library = Path(self.get_ext_fullpath(extension.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        run(*link, "-shared", *built, f"-L{torch / 'lib'}", "-ltorch_cpu", "-o", library)

    def copy_file(self, source, target, *_, **__):  # to the source folder, in one step: others may be loading it
        shutil.copy(source, f"{target}.new")
        os.replace(f"{target}.new", target)
        return target, True


class Wheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


if NEED_TORCH & {*sys.argv[1:]}:
    find_torch()  # before anything else, so that a missing torch is the first line that a build prints

BINDINGS = "csrc/bindings.cpp"
setup(
    ext_modules=[
        Extension("specvis_kernels._ops", sorted({*map(str, Path("csrc").glob("*.cpp"))} - {BINDINGS})),
        Extension("specvis_kernels._ops_cuda", sorted(map(str, Path("csrc").glob("*.cu"))) + [BINDINGS]),
    ],
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
)
