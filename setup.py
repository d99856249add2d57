"""Builds csrc/ into specvis_kernels/_ops.so and _ops_cuda.so, shared libraries against torch's stable C ABI.

One build serves every Python and every torch from 2.10 on, with or without CUDA, so the wheel is
py3-none-<platform>. torch's headers are found by path and torch is not imported, so the build also works
in pip's isolation, which runs the same Python. Without a C++ compiler the package is built without
libraries, and its wheel is py3-none-any: then the oracles and Triton answer. The CUDA library is built if
torch has CUDA and nvcc is found, with or without a GPU.

A build says what it builds and which file it compiles; pip shows that with -v alone. Objects are kept in build/, so
that a second build takes seconds, and ccache is used where it is in PATH.

The same sources, compiler and torch make the same wheel in any folder, byte for byte, if SOURCE_DATE_EPOCH
says when it was made. With CUDA, for the same GPUs and in folders of the same names: nvcc writes a hash of its
own into the kernels' names, and where torch is into the library.

    CXX                   the C++ compiler
    MAX_JOBS              how many of them run at once
    SPECVIS_CUDA          0: no CUDA library; 1: one for a torch without CUDA too, and an error if there is no nvcc
    CUDA_HOME             where nvcc is, if it is neither in PATH nor in /usr/local/cuda
    TORCH_CUDA_ARCH_LIST  the GPUs to build for; unless set, this machine's, and without one those of
                          "8.0;9.0;10.0+PTX" that nvcc knows
"""
import base64
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NEED_TORCH = {"build", "build_ext", "bdist_wheel", "dist_info", "editable_wheel", "hub", "install", "develop"}
OBJECTS = Path("build", f"objects-{sysconfig.get_platform()}")  # kept between builds, editable ones too
DEFINES = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY"]  # what torch 2.10 has
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall",
         "-fno-trapping-math", "-fno-math-errno",  # loops vectorize, results stay
         "-ffp-contract=off"]                      # every backend rounds alike
CUDA_FLAGS = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall",
              "-fmad=false",                       # on the GPU too
              "-Xptxas=-v"]                        # what each kernel uses, for tests/test_cuda_build.py
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


def find_compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


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
        sys.exit(f"specvis_kernels: SPECVIS_CUDA=1, but {no_nvcc}")
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


def cached(compiler: str) -> list[str]:
    """The compiler, by ccache where there is one. Its own variables, such as CCACHE_DISABLE, count."""
    ccache = shutil.which("ccache")
    return [ccache, compiler] if ccache and Path(compiler).resolve().name != "ccache" else [compiler]


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
    """Of what was asked for, everything, or an error. Else this machine's GPUs; without one, those of our own list that
    this nvcc knows."""
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST")
    known = re.findall(r"compute_(\d+)(\d)\b", said_by(nvcc, "--list-gpu-arch"))
    archs, unknown = [], []
    for name in re.split("[; ,]+", asked or gpus_here(known) or "8.0;9.0;10.0+PTX"):
        match = re.fullmatch(r"(\d+)\.?(\d)([af]?)(\+PTX)?", name)
        if not match:
            sys.exit(f"specvis_kernels: TORCH_CUDA_ARCH_LIST must be like 8.0;9.0+PTX, got {name!r}")
        (archs if not known or match.groups()[:2] in known else unknown).append(match)
    if unknown and (asked or not archs):
        sys.exit(f"specvis_kernels: {nvcc} cannot build for {', '.join(match[0] for match in unknown)}, only for "
                 f"{', '.join(map('.'.join, known))}: choose of these by TORCH_CUDA_ARCH_LIST")
    if unknown:
        say(f"{nvcc} does not know {', '.join('.'.join(match.groups()[:2]) for match in unknown)}: "
            f"built for {', '.join('.'.join(match.groups()[:2]) for match in archs)}, and as PTX for what is later")
    flags = []
    for match in archs:
        arch = "".join(match.groups()[:3])
        flags += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
        if match[4] or unknown and match is archs[-1]:
            flags += ["-gencode", f"arch=compute_{arch},code=compute_{arch}"]
    return flags


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


def own_libstdcxx(compiler: str) -> list[str]:
    """The flag that puts libstdc++ into the library, so that it loads beside an older one. It needs a static one."""
    archive = Path(said_by(compiler, "-print-file-name=libstdc++.a").strip())
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
        sys.exit(f"specvis_kernels: failed: {' '.join(map(str, command))}")


class Build(build_ext):
    namespace = "specvis_kernels"  # in torch.ops

    def get_ext_filename(self, name):  # no tag of a Python version: it is not a Python module
        return name.replace(".", os.sep) + ".so"

    def run(self):
        self.torch = find_torch()
        self.compiler_path, self.nvcc = find_compiler(), find_nvcc(self.torch)
        if not self.nvcc:
            self.extensions = [e for e in self.extensions if not e.name.endswith("_cuda")]
        super().run()

    def build_extension(self, extension):
        nowhere = f"-ffile-prefix-map={self.torch}=torch"  # the library names no folder
        compile, link, objects = [*cached(self.compiler_path), *FLAGS, nowhere], [self.compiler_path], OBJECTS
        defines = [*DEFINES, f"-DSPECVIS_NAMESPACE={self.namespace}"]
        if extension.name.endswith("_cuda"):  # nvcc knows where CUDA's headers and its static runtime are
            ccbin = ["-ccbin", self.compiler_path]
            gpus = gpu_flags(self.nvcc)
            compile = [*cached(self.nvcc), *ccbin, *CUDA_FLAGS, "-Xcompiler", nowhere, *gpus,
                       *compression_flags(self.nvcc)]
            link = [self.nvcc, *ccbin, "-Xlinker", f"{LINKER},-s",  # without the names of nvcc's temporary files
                    *(f"-Xcompiler={flag}" for flag in own_libstdcxx(self.compiler_path))]
            defines.append("-DSPECVIS_CUDA")
            codes = [flag.partition("code=")[2] for flag in gpus[1::2]]
            objects = OBJECTS / "-".join(codes)
            say(f"CUDA kernels are built by {self.nvcc} for {', '.join(codes)}")
            warn_of_another_cuda(self.nvcc, self.torch)
        else:
            link += [f"-Wl,{LINKER}", *own_libstdcxx(self.compiler_path)]
        # From the end of the alphabet: verify_* take the longest, and should not be what a last core is left with.
        targets = {objects / (self.namespace if "bindings" in source else "") / f"{source}.o": source
                   for source in extension.sources[::-1]}
        old = [target for target in targets if not is_fresh(target)]

        def compile_one(number: int, target: Path) -> None:
            say(f"[{number}/{len(old)}] {targets[target]}")
            target.parent.mkdir(parents=True, exist_ok=True)
            began = time.time()
            run(*compile, *defines, "-isystem", self.torch / "include", "-MMD", "-MF", target.with_suffix(".d"),
                "-c", targets[target], "-o", target, log=target.with_suffix(".log"))
            os.utime(target, (began, began))  # older than a source that was changed meanwhile

        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
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
            sys.exit("specvis_kernels: the hub's variants are of compiled kernels, but there is no C++ compiler")
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
if NEED_TORCH & {*sys.argv[1:]}:
    find_torch()  # before anything else, so that a missing torch is the first line that a build prints
    if not find_compiler():
        if os.environ.get("SPECVIS_CUDA") == "1":
            sys.exit("specvis_kernels: SPECVIS_CUDA=1, but there is no C++ compiler")
        say("no C++ compiler: built without C++ and CUDA kernels")

setup(
    ext_modules=EXTENSIONS if find_compiler() else [],  # without them, the wheel is for any platform
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel, "hub": Hub},
)
