"""Builds csrc/*.cpp into specvis_kernels/_ops.so, a plain shared library against torch's stable C ABI.

One library serves every Python and every torch from 2.10 on, with or without CUDA, so the wheel is
py3-none-<platform>. torch's headers are found by path, torch is not imported: the build works in pip's
isolation too. Without a C++ compiler the package is built without the library, and the oracles and Triton
answer. CXX names the compiler, MAX_JOBS limits how many run at once.
"""
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

OBJECTS = Path("build", f"objects-{sysconfig.get_platform()}")  # kept between builds, editable ones too
DEFINES = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY"]  # what torch 2.10 has
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall",
         "-fno-trapping-math", "-fno-math-errno",  # loops vectorize, results stay
         "-ffp-contract=off"]                      # every backend rounds alike


def find_torch() -> Path:
    for folder in [*sys.path, sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]:
        if Path(folder, "torch/include/torch/csrc/stable/library.h").exists():
            return Path(folder, "torch")
    sys.exit("specvis_kernels: torch >= 2.10 must be installed first: python -m pip install torch")


def run(*command) -> None:
    print(*command, flush=True)
    if subprocess.run([*map(str, command)]).returncode:
        sys.exit(f"specvis_kernels: failed: {' '.join(map(str, command))}")


class Build(build_ext):
    def get_ext_filename(self, name):  # no tag of a Python version: it is not a Python module
        return name.replace(".", os.sep) + ".so"

    def run(self):
        self.compiler_path = shutil.which(os.environ.get("CXX", "g++"))
        if not self.compiler_path:
            print("specvis_kernels: no C++ compiler: built without C++ kernels", flush=True)
            self.extensions = []
        super().run()

    def build_extension(self, extension):
        torch = find_torch()
        shared = [Path(__file__), torch / "version.py", *Path("csrc").glob("*.h")]  # of every object

        def object_of(source: str) -> Path:
            target = OBJECTS / (source + ".o")
            target.parent.mkdir(parents=True, exist_ok=True)
            newest = max(path.stat().st_mtime for path in [Path(source), *shared])
            if not target.exists() or target.stat().st_mtime <= newest:
                run(self.compiler_path, *FLAGS, *DEFINES, "-isystem", torch / "include", "-c", source,
                    "-o", target)
            return target

        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            objects = list(pool.map(object_of, extension.sources))
        library = Path(self.get_ext_fullpath(extension.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        run(self.compiler_path, "-shared", *objects, f"-L{torch / 'lib'}", "-ltorch_cpu",
            "-Wl,--no-undefined", "-o", library)


class Wheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    # A CUDA library would be a second Extension here, specvis_kernels._ops_cuda, built where nvcc is.
    ext_modules=[Extension("specvis_kernels._ops", sorted(map(str, Path("csrc").glob("*.cpp"))))],
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
)
