"""Forwards on a GPU in which a row has equal bits with any number of rows."""
import os
from contextlib import contextmanager

import torch

from specvis_kernels import backends

from .checkpoint import check_device

WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}  # too small for sums in parts
REDUCTIONS = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"


@contextmanager
def batch_invariant(device: torch.device | str = "cuda"):
    """Inside, products and `tree_attention` on this GPU give a row the same bits with any number of rows and nodes.

    It sets how the whole process computes. All is set back at the end but two environment variables, which cuBLAS reads
    once. TF32 stays as it is. On a CPU it changes nothing: bits are so there anyway.

    Args:
        device: where models compute

    Raises:
        ValueError:   the device is no NVIDIA GPU of compute capability 9.0 or newer, or there is no Triton
        RuntimeError: CUDA runs already, and the environment does not have the variables
    """
    if not torch.cuda.is_available() or torch.device(device).type != "cuda":
        yield
        return
    is_late = torch.cuda.is_initialized() and not os.environ.items() >= WORKSPACES.items()
    check_device(device)
    if torch.version.hip or torch.cuda.get_device_capability(device) < (9, 0) or "triton" not in backends(
            "tree_attention", device):
        raise ValueError("device must be an NVIDIA GPU of compute capability 9.0 or newer, with Triton installed, for "
                         f"batch_invariant, got {torch.cuda.get_device_name(device)} (leave batch_invariant out)")
    if is_late:
        raise RuntimeError("batch_invariant must begin before CUDA does, since cuBLAS reads the environment once (call "
                           f"it first, or set {' '.join(map('='.join, WORKSPACES.items()))} before Python starts)")
    from specvis_kernels.triton import tree_attention  # Triton takes a second or two to import
    matmul, prefer = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library
    library, was_invariant = prefer(), tree_attention.is_batch_invariant
    reductions = {name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k")) for name in REDUCTIONS}
    os.environ.update(WORKSPACES)
    try:
        prefer("cublaslt")
        for name in REDUCTIONS:
            setattr(matmul, name, (False, False))
        tree_attention.is_batch_invariant = True
        yield
    finally:
        prefer(library)
        for name, value in reductions.items():
            setattr(matmul, name, value)
        tree_attention.is_batch_invariant = was_invariant
