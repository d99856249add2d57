import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning turns 0.05 ms into 16 where cores are shared

import pytest  # noqa: E402  the variables are read when torch and triton are first imported
import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton kernels run on the CPU,
    from tests import cuda_on_cpu
    cuda_on_cpu.load()  # and so do the CUDA ones


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty gives NaN or the largest integer: an element that no kernel wrote cannot pass by luck."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
