"""The CUDA kernels on the CPU, as backend "cuda_emulated": csrc/cuda/*.cu, by g++ with the headers here."""
import fcntl
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from specvis_kernels import _define

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
BUILD = HERE.parent.parent / "build"
NAMESPACE = "specvis_kernels_emulated"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined",
            "-O0"]  # to optimize what sanitizers add takes longer than it saves
RACES = ["-DCUDA_ON_CPU_RACES", "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"]
FLAGS = ["-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall",
         "-Wno-unknown-pragmas", f"-I{HERE}"]


def newer(file: Path, others) -> bool:
    return file.exists() and file.stat().st_mtime > max(other.stat().st_mtime for other in others)


def build(sources, library: Path, *flags: str, races: bool = False, others=()) -> Path:
    """Compile what changed since the last time, and link it with other objects. Raises CalledProcessError. With `races`
    the kernels tell races.cpp what they access, see there."""
    if races:
        sources = [*sources, HERE / "races.cpp"]
    if any(source.suffix == ".cu" for source in sources):
        flags = ("-DSPECVIS_CUDA", "-DSPECVIS_EMULATED", *flags)
    compiler = os.environ.get("CXX", "g++")
    torch_folder = Path(torch.__file__).parent
    library.parent.mkdir(parents=True, exist_ok=True)
    lock = open(library.parent / "lock", "w")  # until this function returns: other processes may build too
    fcntl.flock(lock, fcntl.LOCK_EX)

    def object_of(source: Path) -> Path:
        target = library.parent / (source.name + ".o")
        made = target.with_suffix(".made")  # whole or not at all
        includes = target.with_suffix(".d")  # what the compiler read of ours the last time, as a rule of make;
        # in a copy of a build folder these are files elsewhere, so the source itself counts too
        rule = includes.read_text() if includes.exists() else ""
        known = [Path(name) for name in rule.replace("\\\n", " ").split()[1:]]
        if not known or not all(map(Path.exists, known)) or not newer(target, [Path(__file__), source, *known]):
            told = [] if not races else RACES if source.suffix == ".cu" else RACES[:1]
            subprocess.run([compiler, *FLAGS, *flags, *told, "-MMD", "-MF", includes, "-x", "c++", "-c", source,
                            "-o", made, "-isystem", torch_folder / "include",
                            "-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY"], check=True)
            subprocess.run(["objcopy", "--rename-section", ".noinit=specvis_shared", made, target], check=True)
        return target

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
        objects = [*pool.map(object_of, sources), *others]
    if not newer(library, objects):
        subprocess.run([compiler, "-shared", *flags, *objects, f"-L{torch_folder / 'lib'}", "-ltorch_cpu",
                        "-o", library], check=True)
    return library


def load() -> None:
    """Adds backend "cuda_emulated" to every op that has a kernel. Without a compiler there is none."""
    if not shutil.which(os.environ.get("CXX", "g++")):
        return
    sanitize = os.environ.get("CUDA_ON_CPU_SANITIZE") == "1"  # needs LD_PRELOAD, see test_cuda_on_cpu.py
    folder = BUILD / ("cuda_on_cpu_sanitized" if sanitize else "cuda_on_cpu")
    register(build([*kernels(), *bindings()], folder / "emulated.so", *(SANITIZE if sanitize else [])))


def build_some(sources, library: Path, *flags: str, races: bool = False) -> Path:
    """A library of these kernels, compiled with `flags`, and of all others as `load` has them."""
    plain, every = BUILD / "cuda_on_cpu", [*kernels(), *bindings()]
    build(every, plain / "emulated.so")
    names = {source.name for source in sources}
    others = [plain / f"{source.name}.o" for source in every if source.name not in names]
    return build(sources, library, *flags, races=races, others=others)


def kernels() -> list:
    return sorted(CSRC.glob("cuda/*.cu"))


def bindings() -> list:
    return sorted(CSRC.glob("bindings/*.cpp"))


def register(path: Path) -> None:
    library = torch.library.Library(NAMESPACE, "DEF")
    register.keep = library  # its ops live as long as it does
    for op in (kernel.stem for kernel in kernels()):
        library.define(str(getattr(torch.ops.specvis_kernels, op).default._schema).partition("::")[2])
        _define._kernels[op]["cuda_emulated"] = getattr(getattr(torch.ops, NAMESPACE), op).default
    torch.ops.load_library(path)
