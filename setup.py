"""Builds csrc/ into specvis_kernels/_ops.so and _ops_cuda.so, shared libraries against torch's stable C ABI.

One build serves every Python and every torch from 2.10 on, with or without CUDA, so the wheel is
py3-none-<platform>. torch's headers are found by path and torch is not imported, so the build also works
in pip's isolation, which runs the same Python. uv's isolation runs another: there it needs --no-build-isolation.
Without a C++ compiler the package is built without libraries, and its wheel is py3-none-any: then the oracles and
Triton answer. The CUDA library is built if torch has CUDA and nvcc is found, with or without a GPU.

A build says what it builds and which file it compiles; pip shows that with -v alone. What cannot be built is one line,
before anything is compiled. Objects are kept in build/, so that a second build takes seconds, and ccache is used where
it is in PATH.

The same sources, compiler and torch make the same wheel in any folder, byte for byte, if SOURCE_DATE_EPOCH
says when it was made. With CUDA, for the same GPUs and in folders of the same names: nvcc writes a hash of its
own into the kernels' names, and where torch is into the library.

    CXX                   the C++ compiler, also with arguments: "ccache g++ -m64"
    MAX_JOBS              how many of them run at once; unless set, as the cores and the memory here allow
    SPECVIS_CUDA          0: no CUDA library; 1: one for a torch without CUDA too, and an error if there is no nvcc
    CUDA_HOME             where nvcc is, if it is neither in PATH nor in /usr/local/cuda
    TORCH_CUDA_ARCH_LIST  the GPUs to build for, as torch reads it ("8.6 9.0a+PTX", "Ampere;Hopper"), without those
                          before 8.0 and those that nvcc does not know; unless set, this machine's, and without one
                          "8.0;9.0;10.0+PTX"
"""
import base64
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NoReturn

import setuptools
from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

if int(setuptools.__version__.partition(".")[0]) < 77:  # without isolation it is the environment's
    sys.exit(f"specvis_kernels: setuptools {setuptools.__version__} is too old: python -m pip install 'setuptools>=77'")
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402  older ones have none

NEED_TORCH = {"build", "build_ext", "bdist_wheel", "dist_info", "editable_wheel", "hub", "install", "develop"}
OBJECTS = Path("build", f"objects-{sysconfig.get_platform()}")  # kept between builds, editable ones too
DEFINES = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY"]  # what torch 2.10 has
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall",
         "-fno-trapping-math", "-fno-math-errno",  # loops vectorize, results stay
         "-ffp-contract=off"]                      # every backend rounds alike
CUDA_FLAGS = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall",
              "-fmad=false",                       # on the GPU too
              "-Xptxas=-v"]                        # what each kernel uses, for tests/test_cuda_build.py
NAMED = {  # the GPUs as torch names them
    "kepler": "3.5", "maxwell": "5.0", "pascal": "6.0", "volta": "7.0", "turing": "7.5", "ampere+tegra": "8.7",
    "ampere": "8.0;8.6+PTX", "ada": "8.9+PTX", "hopper": "9.0+PTX", "blackwell+tegra": "11.0",
    "blackwell": "10.0;10.3;12.0;12.1+PTX", "common": "8.0;8.6;8.9;9.0;10.0;12.0+PTX"}
LINKER = "--no-undefined,--gc-sections,--version-script=csrc/exports.map"  # of libstdc++ only what is used, hidden

FOR_OLDER_LOADERS = """import importlib.util
import sys
from pathlib import Path

name = "{name}"
if name not in sys.modules:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent.parent / "__init__.py")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
globals().update(vars(sys.modules[name]))
"""  # Hugging Face's `kernels` looked for a folder of the kernel's name


def say(line: str) -> None:
    print(f"specvis_kernels: {line}", flush=True)


def refuse(why: str) -> NoReturn:
    sys.exit(f"specvis_kernels: {why}")


@cache
def find_torch() -> Path:
    """The torch that this Python finds. pip's isolation hides it here, but not from a new process."""
    program = "import importlib.util; print(importlib.util.find_spec('torch').origin)"
    spec = importlib.util.find_spec("torch")
    torch = Path(spec and spec.origin or said_by(sys.executable, "-E", "-c", program).strip()).parent
    match = (torch / "version.py").exists() and re.search(
        r"^__version__ = '((\d+)\.(\d+)[^']*)'", (torch / "version.py").read_text(), re.M)
    if not match:
        refuse("no torch is found: python -m pip install 'torch>=2.10'. If it is installed, python -m pip install "
               "--no-build-isolation . or uv pip install --no-build-isolation . finds it")
    if (int(match[2]), int(match[3])) < (2, 10):
        refuse(f"torch {match[1]} is too old: python -m pip install 'torch>=2.10'")
    if not (torch / "include/torch/csrc/stable/library.h").exists():
        refuse(f"torch {match[1]} has no headers in {torch}/include: python -m pip install --force-reinstall torch")
    return torch


@cache
def find_compiler() -> list[str] | None:
    """The command that CXX names, else g++ if there is one."""
    asked = os.environ.get("CXX", "").strip()
    try:
        command = [asked] if shutil.which(asked) else shlex.split(asked) or ["g++"]
    except ValueError as error:
        refuse(f"CXX must be a compiler and its arguments, got {asked!r}: {error}")
    if not asked and not shutil.which("g++"):
        return None
    check_that_it_works(*command, "-std=c++17", "-x", "c++")
    return [shutil.which(command[0]), *command[1:]]


def check_that_it_works(*command: str, way_out: str = "") -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "line")
        source.write_text("int main() {}\n")
        try:
            run = subprocess.run([*command, source, "-o", f"{folder}/program"], stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, text=True)
        except OSError as error:
            refuse(f"the compiler {shlex.join(command)} does not run: {error.strerror}")
    if run.returncode:
        why = re.search(".*error.*", run.stdout) or re.search(".+", run.stdout) or [f"status {run.returncode}"]
        refuse(f"the compiler does not compile int main() {{}} by {shlex.join(command)}: {why[0]}{way_out}")


def cuda_of(torch: Path) -> str | None:
    """The CUDA that torch was built with, e.g. 12.8"""
    match = re.search(r"^cuda\b[^=]*= '([\d.]+)'", (torch / "version.py").read_text(), re.M)
    return match and match[1]


def find_nvcc(torch: Path) -> str | None:
    """What compiles the CUDA library. None if there will be none, after a line that says why."""
    wanted = os.environ.get("SPECVIS_CUDA")
    folders = [Path(os.environ["CUDA_HOME"], "bin")] if os.environ.get("CUDA_HOME") else []
    folders += [*os.environ.get("PATH", "").split(os.pathsep), "/usr/local/cuda/bin"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(map(str, folders)))
    no_nvcc = "no nvcc in CUDA_HOME, PATH or /usr/local/cuda"
    if wanted == "1" and not nvcc:
        refuse(f"SPECVIS_CUDA=1, but {no_nvcc}")
    if wanted == "1" or wanted != "0" and nvcc and cuda_of(torch):
        return nvcc
    if wanted == "0":
        why = "SPECVIS_CUDA=0: no CUDA kernels are built"
    elif cuda_of(torch):
        why = f"{no_nvcc}: no CUDA kernels are built"
    else:
        why = "torch has no CUDA: no CUDA kernels are built; SPECVIS_CUDA=1 builds them"
    say(why)
    return None


def cached(*command: str) -> list[str]:
    """The compiler, by ccache where there is one. Its own variables, such as CCACHE_DISABLE, count."""
    ccache = shutil.which("ccache")
    return [ccache, *command] if ccache and Path(command[0]).resolve().name != "ccache" else [*command]


def for_nvcc(command: list[str]) -> list[str]:
    """The C++ compiler as nvcc takes it: a program, and each option by itself."""
    end = next((i for i, word in enumerate(command) if word.startswith("-")), len(command))
    return ["-ccbin", command[end - 1], *(f"-Xcompiler={option}" for option in command[end:])]


def said_by(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def gpus_here(known: list[tuple[str, str]]) -> str:
    """The GPUs of this machine that the kernels are for, as TORCH_CUDA_ARCH_LIST names them; "" without one."""
    nvidia_smi = shutil.which("nvidia-smi")
    said = said_by(nvidia_smi, "--query-gpu=compute_cap", "--format=csv,noheader") if nvidia_smi else ""
    found = {(major, minor) for major, minor in re.findall(r"^(\d+)\.(\d)$", said, re.M) if int(major) >= 8}
    names = [".".join(arch) for arch in known if arch in found]
    return ";".join(names) + "+PTX" if names else ""


def gpu_flags(nvcc: str) -> list[str]:
    """For what is asked for, else this machine's GPUs, else our own list, without those that the kernels or nvcc do not
    know. PTX is for what is later."""
    known = re.findall(r"compute_(\d+)(\d)\b", said_by(nvcc, "--list-gpu-arch"))
    all_known = [".".join(arch) for arch in known]
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip("; ,").lower() or gpus_here(known) or "8.0;9.0;10.0+PTX"
    for name, archs in {**NAMED, "all": ";".join(all_known) + "+PTX"}.items():
        asked = asked.replace(name, archs)
    built, left_out = {}, {}
    for name in re.split("[; ,]+", asked):
        match = re.fullmatch(r"(\d+)\.?(\d)([af]?)(\+PTX)?(\+TEGRA|\+TESLA)?", name, re.I)
        if not match:
            refuse(f"TORCH_CUDA_ARCH_LIST must be like 8.0;9.0+PTX or Ampere;Hopper, got {name!r}")
        is_built = int(match[1]) >= 8 and (not known or match.groups()[:2] in known)
        (built if is_built else left_out)[match] = int(match[1] + match[2])
    names = ", ".join(f"{match[1]}.{match[2]}" for match in left_out)
    why = f"the kernels need 8.0 or later, and {nvcc} knows {', '.join(all_known)}"
    if not built:
        refuse(f"of {names} no GPU remains: {why}: choose by TORCH_CUDA_ARCH_LIST")
    if left_out:
        say(f"{names} left out: {why}")
    flags = {}  # no flag twice
    for match, number in built.items():
        arch = "".join(match.groups()[:3]).lower()
        flags[f"arch=compute_{arch},code=sm_{arch}"] = None
        if match[4]:
            flags[f"arch=compute_{arch},code=compute_{arch}"] = None
        if number == max(built.values()) < max(left_out.values(), default=0):  # of 9.0a no later GPU takes PTX
            flags[f"arch=compute_{number},code=compute_{number}"] = None
    return [word for flag in flags for word in ("-gencode", flag)]


def archs_of(flags: list[str]) -> list[str]:
    """The GPUs of flags of nvcc as TORCH_CUDA_ARCH_LIST names them."""
    codes = re.findall(r"code=(sm|compute)_(\d+)(\d[af]?)", " ".join(flags))
    return [f"{major}.{minor}{'+PTX' if kind == 'compute' else ''}" for kind, major, minor in codes]


def release_of(nvcc: str) -> str | None:
    """E.g. 13.0"""
    match = re.search(r"release (\d+\.\d+)", said_by(nvcc, "--version"))
    return match and match[1]


def compression_flags(nvcc: str) -> list[str]:
    """The libraries are a third as large so. nvcc 13 knows this, and every driver that its code runs on."""
    release = release_of(nvcc)
    return ["--compress-mode=size"] if release and float(release) >= 13 else []


def warn_of_another_cuda(nvcc: str, torch: Path) -> None:
    """The library has a CUDA runtime of its own, so what counts is the driver, which may be as old as torch's CUDA."""
    cuda, release = cuda_of(torch), release_of(nvcc)
    if cuda and release and cuda.partition(".")[0] != release.partition(".")[0]:
        say(f"warning: nvcc is of CUDA {release}, but torch of CUDA {cuda}: where the driver does not know CUDA "
            f"{release.partition('.')[0]}, Triton's kernels run")


def own_libstdcxx(compiler: list[str]) -> list[str]:
    """The flag that puts libstdc++ into the library, so that it loads beside an older one. It needs a static one."""
    archive = Path(said_by(*compiler, "-print-file-name=libstdc++.a").strip())
    return ["-static-libstdc++"] if archive.is_file() else []


def manylinux(tag: str, libraries: list[Path]) -> str:
    """The tag of a platform, with the oldest glibc that has what the libraries need, but at least 2.28, torch's own.
    The versions that they need stand in them. If they need a libstdc++ newer than that glibc's, the tag stays."""
    inside = b"".join(library.read_bytes() for library in libraries)
    glibc, libstdcxx = ([int(version) for version in re.findall(name + rb"([0-9]+)[0-9.]*\0", inside)]
                        for name in (rb"GLIBC_2\.", rb"GLIBCXX_3\.4\."))
    if not glibc or max(libstdcxx, default=0) > 24:
        return tag
    return re.sub("^linux_", f"manylinux_2_{max(28, *glibc)}_", tag)


def read_by(target: Path) -> list[Path]:
    """What the compiler read of ours for this object, by the rule of make that it wrote beside it."""
    rule = target.with_suffix(".d")
    names = rule.read_text().replace("\\\n", " ").partition(":")[2].split() if rule.exists() else []
    return [Path(name) for name in names]


def is_fresh(target: Path) -> bool:
    """Whether an object is newer than all that it was made from. torch's headers are as new as torch/version.py."""
    files = read_by(target)
    files += [Path(__file__), find_torch() / "version.py"] if files else []
    return bool(files) and all(file.exists() for file in [target, *files]) \
        and target.stat().st_mtime > max(file.stat().st_mtime for file in files)


def run(*command, log: Path) -> None:
    """What the command says goes to the log, and is shown if it warns or fails."""
    with open(log, "w") as file:
        failed = subprocess.run([*map(str, command)], stdout=file, stderr=subprocess.STDOUT).returncode
    if failed or "warning" in log.read_text():
        print(log.read_text(), flush=True)
    if failed:
        refuse(f"failed: {' '.join(map(str, command))}")


def number_of_jobs(cgroup="/sys/fs/cgroup") -> int:
    """MAX_JOBS if it is a number, as for torch's own extensions. Else as many as this container has cores and 300 MB of
    memory: a compiler takes up to 270 MB."""
    asked = os.environ.get("MAX_JOBS", "").strip()
    if asked.isdecimal() and int(asked):
        return int(asked)

    def said(*names: str) -> str:  # by version 2 or version 1 of control groups; no limit is "max" or -1
        return " ".join(path.read_text() for path in (Path(cgroup, name) for name in names) if path.exists())

    free = re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())
    quota = re.match(r"(\d+)\s+(\d+)", said("cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
    limit = re.match(r"\d+", said("memory.max", "memory/memory.limit_in_bytes"))
    cores = [len(os.sched_getaffinity(0)), *([-(-int(quota[1]) // int(quota[2]))] if quota else [])]
    memory = [int(free[1]) * 1024, *([int(limit[0])] if limit else [])]
    return max(1, min(*cores, min(memory) // 300_000_000))


class Build(build_ext):
    namespace = "specvis_kernels"  # in torch.ops

    def get_ext_filename(self, name):  # no tag of a Python version: it is not a Python module
        return name.replace(".", os.sep) + ".so"

    def run(self):
        self.torch, self.cpp = find_torch(), find_compiler()
        self.nvcc = find_nvcc(self.torch)
        if self.nvcc and self.cpp:
            self.gpus = gpu_flags(self.nvcc)
            check_that_it_works(self.nvcc, *for_nvcc(self.cpp), *self.gpus, "-std=c++17", "-x", "cu",
                                way_out=" (CXX names another compiler for it; SPECVIS_CUDA=0 builds no CUDA kernels)")
        else:
            self.extensions = [e for e in self.extensions if not e.name.endswith("_cuda")]
        super().run()

    def build_extension(self, extension):
        nowhere = f"-ffile-prefix-map={self.torch}=torch"  # the library names no folder
        compile, link, objects = [*cached(*self.cpp), *FLAGS, nowhere], self.cpp, OBJECTS
        defines = [*DEFINES, f"-DSPECVIS_NAMESPACE={self.namespace}"]
        if extension.name.endswith("_cuda"):  # nvcc knows where CUDA's headers and its static runtime are
            nvcc = [self.nvcc, *for_nvcc(self.cpp)]
            compile = [*cached(*nvcc), *CUDA_FLAGS, "-Xcompiler", nowhere, *self.gpus, *compression_flags(self.nvcc)]
            link = [*nvcc, "-Xlinker", f"{LINKER},-s",  # without the names of nvcc's temporary files
                    *(f"-Xcompiler={flag}" for flag in own_libstdcxx(self.cpp))]
            defines.append("-DSPECVIS_CUDA")
            codes = [flag.partition("code=")[2] for flag in self.gpus[1::2]]
            objects = OBJECTS / "-".join(codes)
            say(f"CUDA kernels are built by {self.nvcc} for {', '.join(codes)}")
            warn_of_another_cuda(self.nvcc, self.torch)
        else:
            link = [*link, f"-Wl,{LINKER}", *own_libstdcxx(self.cpp)]
        # From the end of the alphabet: verify_* take the longest, and should not be what a last core is left with.
        targets = {objects / (self.namespace if "bindings" in source else "") / f"{source}.o": source
                   for source in extension.sources[::-1]}
        compile += [*defines, "-isystem", self.torch / "include"]
        command = shlex.join(map(str, compile))

        def made_by(target: Path) -> Path:  # has the command: another CXX makes another object
            return target.with_suffix(".command")

        old = [target for target in targets if not is_fresh(target) or not made_by(target).exists()
               or made_by(target).read_text() != command]

        def compile_one(number: int, target: Path) -> None:
            say(f"[{number}/{len(old)}] {targets[target]}")
            target.parent.mkdir(parents=True, exist_ok=True)
            new = target.with_suffix(".new.o")  # in its place when it is whole: a build may be killed
            began = time.time()
            run(*compile, "-MMD", "-MF", target.with_suffix(".d"), "-c", targets[target], "-o", new,
                log=target.with_suffix(".log"))
            made_by(target).write_text(command)
            os.utime(new, (began, began))  # older than a source that was changed meanwhile
            os.replace(new, target)

        with ThreadPoolExecutor(number_of_jobs()) as pool:
            list(pool.map(compile_one, range(1, len(old) + 1), old))
        library = Path(self.get_ext_fullpath(extension.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        run(*link, "-shared", *targets, f"-L{self.torch / 'lib'}", "-ltorch_cpu", "-lpthread", "-ldl", "-o", library,
            log=objects / f"{library.name}.log")  # in libpthread and libdl is what glibc has itself from 2.34 on

    def copy_file(self, source, target, *_, **__):  # to the source folder, in one step: others may be loading it
        shutil.copy(source, f"{target}.new")
        os.replace(f"{target}.new", target)
        return target, True


class Hub(Command):
    """python setup.py hub: build/hub, a repository for Hugging Face's library `kernels`, with the variant for this
    machine. Its sources decide its id, which is the namespace of its ops: it loads beside the installed package, and
    beside its other versions. (https://huggingface.co/docs/kernels/kernel-requirements)"""
    user_options = []

    def initialize_options(self):
        pass

    def finalize_options(self):
        pass

    def run(self):
        if not find_compiler():
            refuse("the hub's variants are of compiled kernels, but there is no C++ compiler")
        nvcc = find_nvcc(find_torch())
        backend = {"type": "cuda", "archs": archs_of(gpu_flags(nvcc))} if nvcc else {"type": "cpu"}
        package = [path for path in sorted(Path("specvis_kernels").rglob("*")) if path.suffix in (".py", ".typed")]
        made_of = hashlib.sha256(b"".join(path.read_bytes() for path in [
            Path("setup.py"), *package, *sorted(path for path in Path("csrc").rglob("*") if path.is_file())]))
        name = f"_specvis_kernels_{backend['type']}_{made_of.hexdigest()[:7]}"

        system = f"cu{release_of(nvcc).replace('.', '')}" if nvcc else "cpu"
        variant = Path("build/hub/build", f"torch-stable-abi210-{system}-{platform.machine()}-linux")
        shutil.rmtree(variant, ignore_errors=True)
        for path in package:
            target = variant / path.relative_to("specvis_kernels")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        build = self.reinitialize_command("build_ext", build_lib="build/hub/libraries")
        build.namespace = name
        self.run_command("build_ext")
        for library in Path("build/hub/libraries/specvis_kernels").glob("*.so"):
            library.replace(variant / library.name)
        shutil.rmtree("build/hub/libraries")
        (variant / "specvis_kernels").mkdir()
        (variant / "specvis_kernels/__init__.py").write_text(FOR_OLDER_LOADERS.format(name=name))
        files = {str(path.relative_to(variant)): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
                 for path in sorted(variant.rglob("*")) if path.is_file()}
        (variant / "metadata.json").write_text(json.dumps({
            "name": "specvis-kernels", "id": name, "version": 0, "license": "Apache-2.0", "python-depends": [],
            "backend": backend, "digest": {"algorithm": "sha256", "files": files}}, indent=2) + "\n")
        say(f"{variant} has {name}: kernels.get_local_kernel(Path('build/hub')) loads it")


class Wheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", manylinux(super().get_tag()[2], sorted(Path(self.bdist_dir).rglob("_ops*.so")))


def sources(*patterns: str) -> list[str]:
    return [str(file) for pattern in patterns for file in sorted(Path("csrc").glob(pattern))]


EXTENSIONS = [
    Extension("specvis_kernels._ops", sources("bindings/*.cpp", "bindings/cpu/*.cpp", "cpu/*.cpp")),
    Extension("specvis_kernels._ops_cuda", sources("bindings/*.cpp", "cuda/*.cpp", "cuda/*.cu")),
]
IS_BUILD = not NEED_TORCH.isdisjoint(sys.argv)
for FOLDER in (Path.cwd(), OBJECTS.resolve()):
    if FOLDER.exists() and not os.access(FOLDER, os.W_OK):
        refuse(f"a build writes into {FOLDER}, and may not: install from a copy of the sources")
if IS_BUILD:
    find_torch()  # before anything else, so that a missing torch is the first line that a build prints
    if os.environ.get("SPECVIS_CUDA", "") not in ("", "0", "1"):
        refuse(f"SPECVIS_CUDA must be 0 or 1, got {os.environ['SPECVIS_CUDA']!r}")
    if not find_compiler() and os.environ.get("SPECVIS_CUDA") == "1":
        refuse("SPECVIS_CUDA=1, but there is no C++ compiler")
    OBJECTS.mkdir(parents=True, exist_ok=True)
    # Two builds in one folder take turns, until the process ends or its next build opens the file anew.
    sys.specvis_lock = open(OBJECTS / "lock", "w")
    with suppress(OSError):  # a file system without locks
        try:
            fcntl.flock(sys.specvis_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waits for another build in {Path.cwd()}")
            fcntl.flock(sys.specvis_lock, fcntl.LOCK_EX)

setup(
    ext_modules=EXTENSIONS if IS_BUILD and find_compiler() else [],  # without them, the wheel is for any platform
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel, "hub": Hub},
)
if IS_BUILD and not find_compiler():
    say("no C++ compiler: built without C++ and CUDA kernels, so that only the slow oracles and Triton answer; install "
        "g++, or name a compiler by CXX, and install again")
