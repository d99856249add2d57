"""Loads the compiled kernels, where they are built."""
import ctypes
import re
import warnings
from multiprocessing import parent_process
from pathlib import Path

import torch


def load_libraries() -> None:
    """Load what is built, which registers its kernels. A built library that does not load is an error: no other kernel
    answers in its place without a word."""
    here = Path(__file__).parent
    if not (here / "_ops.so").exists() and not parent_process():  # a server's first process says it for all
        what_to_do = "install g++, and the package again from its sources"
        if (here.parent / "csrc").exists():
            what_to_do = "this is a source folder: run Python elsewhere, or build here by python -m pip install -e ."
        warnings.warn(f"specvis_kernels has no compiled kernels in {here}, so only slow oracles and Triton answer: "
                      f"{what_to_do}; PYTHONWARNINGS='ignore:specvis_kernels has no' ends this warning", stacklevel=3)
    for name in ("_ops.so", "_ops_cuda.so"):
        path = here / name
        if path.exists() and (name == "_ops.so" or torch.version.cuda and _driver_knows(path)):
            try:
                torch.ops.load_library(path)
            except OSError as error:
                raise ImportError(f"{path} does not load, build the package again: {error}") from error


def _driver_knows(library: Path) -> bool:
    """Whether the driver is new enough for the CUDA library, which brings a runtime of its own; it warns if not.

    A driver runs what any release of its major version was built with. Without a driver there is nothing to run.
    """
    built = re.search(rb"specvis_kernels is built with CUDART_VERSION (\d+)", library.read_bytes())
    version = ctypes.c_int()
    try:
        found = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0
    except (OSError, AttributeError):
        found = False
    if not built or not found or version.value // 1000 >= int(built[1]) // 1000:
        return True
    names = [f"{number // 1000}.{number % 1000 // 10}" for number in (int(built[1]), version.value)]
    warnings.warn(f"{library} is built with CUDA {names[0]}, and the driver knows CUDA {names[1]}: Triton's kernels "
                  f"answer on CUDA, where there is Triton. Build it with CUDA {version.value // 1000} instead",
                  stacklevel=4)
    return False
