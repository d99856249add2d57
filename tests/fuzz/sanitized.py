"""The C++ kernels and the emulated CUDA ones with the sanitizers of g++: of addresses and of undefined behaviour.

`python -m tests.fuzz.sanitized 16`, under the environment of runtimes(), runs that many cases of each emulated kernel.
"""
import os
import shutil
import subprocess
import sys

CPU = "specvis_kernels_sanitized"  # the namespace of the C++ kernels that are built here
FLAGS = ["-fsanitize=float-cast-overflow", "-fno-sanitize-recover=float-cast-overflow", f"-DSPECVIS_NAMESPACE={CPU}"]


def runtimes():
    """The environment in which a process can load libraries with sanitizers."""
    compiler = os.environ.get("CXX", "g++")
    libraries = [subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
                 for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    # What torch allocates by its libstdc++, the package frees by the one that is in its own library.
    return {"LD_PRELOAD": " ".join(libraries), "CUDA_ON_CPU_SANITIZE": "1",
            "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0",
            "UBSAN_OPTIONS": "print_stacktrace=1", "OMP_NUM_THREADS": "1"}


def prepare():
    """Build the sources that changed. Returns the environment of the processes that use them."""
    if not shutil.which(os.environ.get("CXX", "g++")):
        sys.exit("the sanitizers need a C++ compiler")
    from tests import cuda_on_cpu
    build_cpu()
    cuda_on_cpu.build([*cuda_on_cpu.kernels(), *cuda_on_cpu.bindings()],
                      cuda_on_cpu.BUILD / "cuda_on_cpu_sanitized" / "emulated.so", *cuda_on_cpu.SANITIZE)
    return runtimes()


def build_cpu():
    from tests import cuda_on_cpu
    sources = [*cuda_on_cpu.bindings(), *sorted(cuda_on_cpu.CSRC.glob("**/cpu/*.cpp"))]
    return cuda_on_cpu.build(sources, cuda_on_cpu.BUILD / "ops_sanitized" / "_ops.so", *cuda_on_cpu.SANITIZE, *FLAGS)


def load():
    """The sanitized C++ kernels take the place of backend "cpu"."""
    import torch

    from specvis_kernels import _define
    library = torch.library.Library(CPU, "DEF")
    load.keep = library  # its ops live as long as it does
    for op, kernels in _define._kernels.items():
        if "cpu" in kernels:
            library.define(str(getattr(torch.ops.specvis_kernels, op).default._schema).partition("::")[2])
            kernels["cpu"] = getattr(getattr(torch.ops, CPU), op).default
    torch.ops.load_library(build_cpu())


def main(count):
    from tests import fuzz
    from tests.fuzz import cases, check
    fuzz.setup(False)
    found = []
    for op in cases.ops():
        for case in (cases.make(op, number) for number in range(count)):
            if "cuda_emulated" in case.backends:
                what = check.problem(case, "cuda_emulated")
                found += [f"--op {op} --case {case.number}: {what}"] if what else []
    print(*found, f"{len(found)} found", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
