"""Hostile inputs for every op on every backend that runs here: `python -m tests.fuzz`.

    values.py    numbers and layouts that a caller might pass by mistake
    maker.py     sizes, and groups of arguments that several ops have
    cases.py     a case: the arguments of one call, made from an op's name and a number
    valid.py     which arguments are valid: for these a status has no bit INVALID_*
    check.py     a case on its backends, compared with the oracle
    workers.py   many cases in several processes, and the findings
    sanitized.py the C++ kernels with ASan and UBSan

A case's number is its seed: `--op verify_tree --case 123` is one call, equal on every machine.
"""


def setup(is_sanitized):
    """Prepare a process for cases: load the emulated CUDA kernels, and fill unwritten memory with NaN."""
    import warnings

    import torch

    from tests import cuda_on_cpu
    cuda_on_cpu.load()
    if is_sanitized:
        from tests.fuzz import sanitized
        sanitized.load()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.simplefilter("ignore")  # NumPy and Triton's interpreter warn about NaN
