"""Hostile inputs for every op on every backend that runs here: `python -m tests.fuzz`.

    values.py    numbers and layouts that a caller might hand over by mistake
    cases.py     a case: the arguments of one call, which an op's name and a number decide
    statuses/    what an op's docstring says about a result, written a second time
    check.py     a case on its backends, against the oracle and against the docstring
    shrink.py    a case that fails, made small and printed as a test
    workers.py   many cases in several processes, and what was found
    sanitized.py the C++ kernels with ASan and UBSan

A number of a case is its seed: `--op verify_tree --case 123` is the same call on every machine.
"""


def setup(is_sanitized):
    """A process as cases need it: the emulated CUDA kernels, and memory that nobody wrote holds NaN."""
    import warnings

    import torch

    from tests import cuda_on_cpu
    cuda_on_cpu.load()
    if is_sanitized:
        from tests.fuzz import sanitized
        sanitized.load()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.simplefilter("ignore")  # NumPy and Triton's interpreter say where a number is none
