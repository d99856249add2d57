"""What PyTorch does on a CPU by several threads, done by one.

PyTorch's threads wait busily for milliseconds after each operation, on cores that the next op of `specvis_kernels`
wants. So a step of decoding asks for none of them where that can be helped.
"""
import numpy as np
import torch
from torch import Tensor, nn

MOST = 2**15 - 1  # as many numbers PyTorch writes by one thread
BITS = {2: torch.int16, 4: torch.int32}


def needs_one_thread(x: Tensor, size: int) -> bool:
    """Whether PyTorch would take several threads for so many numbers, where `x` is."""
    return size > MOST and x.device.type == "cpu" and x.itemsize in BITS and not torch.is_grad_enabled()


def embed(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    """embedding(tokens)"""
    dim = embedding.embedding_dim
    if not needs_one_thread(embedding.weight, tokens.numel() * dim):
        return embedding(tokens)
    return cat([embedding(part) for part in tokens.flatten().split(max(MOST // dim, 1))], 0).view(*tokens.shape, dim)


def cat(tensors: list[Tensor], dim: int) -> Tensor:
    """torch.cat(tensors, dim), of floats of one dtype"""
    if not needs_one_thread(tensors[0], sum(t.numel() for t in tensors)):
        return torch.cat(tensors, dim)
    bits = BITS[tensors[0].itemsize]
    return torch.from_numpy(np.concatenate([t.view(bits).numpy() for t in tensors], dim)).view(tensors[0].dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), of a contiguous x"""
    if x.dtype == dtype or not needs_one_thread(x, x.numel()):
        return x.to(dtype)
    return cat([part.to(dtype) for part in x.flatten().split(MOST)], 0).view(x.shape)
