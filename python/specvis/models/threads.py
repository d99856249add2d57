"""What PyTorch does on a CPU by several threads, done by one.

PyTorch's threads wait busily for milliseconds after each operation, on cores that the next op of `specvis_kernels`
wants. So a step of decoding asks for none of them where that can be helped.
"""
import os
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from .layers import is_transformed, is_unchanged

MOST = 2**15 - 1  # the most numbers that PyTorch writes by one thread
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

if hasattr(os, "register_at_fork"):  # a forked child has none of them, and OpenMP would wait for them for ever
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


def takes_several(like: Tensor, size: int) -> bool:
    """Whether PyTorch takes several threads to write that many numbers, of the kind and device of `like`."""
    return (size > MOST and like.device.type == "cpu" and like.itemsize in BITS and not torch.is_grad_enabled()
            and type(like) in (Tensor, nn.Parameter) and not is_transformed())


def cat(tensors: list[Tensor], dim: int) -> Tensor:
    """torch.cat(tensors, dim), of one dtype"""
    if not takes_several(tensors[0], sum(t.numel() for t in tensors)):
        return torch.cat(tensors, dim)
    bits = BITS[tensors[0].itemsize]
    return torch.from_numpy(np.concatenate([t.view(bits).numpy() for t in tensors], dim)).view(tensors[0].dtype)


def copy(to: Tensor, x: Tensor) -> None:
    """to.copy_(x), of one dtype and shape"""
    if takes_several(x, x.numel()):
        np.copyto(to.view(BITS[x.itemsize]).numpy(), x.view(BITS[x.itemsize]).numpy())
    else:
        to.copy_(x)


def in_parts(function: Callable[..., Tensor], size: int, *rows: Tensor, dim: int = 0) -> Tensor:
    """function(*rows), some rows at a time, joined along `dim`. It makes `size` numbers of a row."""
    if not takes_several(rows[0], len(rows[0]) * size):
        return function(*rows)
    return cat([function(*part) for part in zip(*(each.split(max(MOST // size, 1)) for each in rows))], dim)


def embed(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    """embedding(tokens). Whatever has hooks, or is of another class, is called once."""
    if not is_unchanged(embedding, (nn.Embedding,)):
        return embedding(tokens)
    dim = embedding.embedding_dim
    return in_parts(embedding, dim, tokens.flatten()).view(*tokens.shape, dim)


def layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """norm(x), of few rows. PyTorch's own takes several threads for any two."""
    wide = x.float()
    variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
    return ((wide - mean) * (variance + norm.eps).rsqrt() * norm.weight + norm.bias).to(x.dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype)"""
    if x.dtype == dtype:
        return x
    return in_parts(lambda rows: rows.to(dtype), x.shape[-1], x.flatten(0, -2)).view(x.shape)
