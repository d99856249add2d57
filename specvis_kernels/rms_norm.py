"""rms_norm: RMSNorm of rows, after a residual is added to them."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import FLOATS, check, check_eps, check_rows
from ._define import define


class RMSNormResult(NamedTuple):
    """What `rms_norm` returns where it adds a residual. Its docstring explains the fields."""
    normed: Tensor  # as x
    stream: Tensor  # as x


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, *, residual: Tensor | None = None,
             backend: str | None = None) -> Tensor | RMSNormResult:
    """Normalize rows by their root mean square (arXiv:1910.07467), as Llama-shaped decoders do.

        stream = x + residual, rounded to x's dtype;  x where there is no residual
        normed = stream / sqrt(mean(stream^2) + eps) * weight

    `normed` is computed in float32 and rounded once. The mean and its root are float64, so that the order of the terms
    hardly ever shows: backends give equal bits, but for about one row of float32 in a million. PyTorch's operations
    round at each step, and are four launches on a GPU for a row of bfloat16.

    Args:
        x:        (.., E) float32, float16 or bfloat16
        weight:   (E,)    as x
        eps:      a number >= 0, rounded to float32
        residual: (.., E) as x   what is added to x first; None: nothing
        backend:  None for the device's own kernel; a name from `backends("rms_norm")` to force one

    Returns:
        normed:   (.., E) as x
        stream:   (.., E) as x   only with a residual: then the result is the pair (normed, stream)

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above

    Examples:
        >>> rms_norm(torch.tensor([[3., 4.]]), torch.tensor([1., 2.]), residual=torch.tensor([[-3., 1.]])).stream
        tensor([[0., 5.]])
    """
    check_rows("x", x, "E", FLOATS)
    check("weight", weight, x.dtype, like=x, E=x.shape[-1])
    if residual is not None:
        check_rows("residual", residual, "E", x.dtype, like=x)
    check_eps("eps", eps, ": residual is given by name")
    E = x.shape[-1]
    normed, stream = _call(backend, x.reshape(-1, E), weight, None if residual is None else residual.reshape(-1, E),
                           float(eps))
    return normed.view(x.shape) if residual is None else RMSNormResult(normed.view(x.shape), stream.view(x.shape))


def _oracle(x: Tensor, weight: Tensor, residual: Tensor | None, eps: float):
    stream = x if residual is None else x + residual
    mean = stream.double().square().sum(-1, keepdim=True) / x.shape[1]
    eps = torch.full((), eps, dtype=torch.float32, device=x.device).double()
    factor = (1 / (mean + eps).sqrt()).float()  # PyTorch's square root of float32 may be off by one unit
    normed = (stream.float() * factor * weight.float()).to(x.dtype)
    return normed, x.new_empty(0) if residual is None else stream


_call = define("rms_norm", oracle=_oracle, result=RMSNormResult, batch=None,
               meta=lambda x, residual: (x.new_empty(x.shape), x.new_empty(0 if residual is None else x.shape)))
