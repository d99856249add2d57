"""guided_probs: from a model's logits to the distribution that tokens are sampled from."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._dispatch import INVALID_ROW, check, check_dims, define
from ._filters import check_num_ids, filter_logits
from ._numbers import exp

HALF_OR_FLOAT = (torch.float32, torch.float16, torch.bfloat16)


class GuidedProbsResult(NamedTuple):
    """What `guided_probs` returns. Its docstring explains the fields."""
    probs: Tensor   # (B, N, V) float32
    status: Tensor  # (B, N)    int32


def guided_probs(logits: Tensor, uncond: Tensor | None, guidance: Tensor, temperature: Tensor, top_k: Tensor,
                 top_p: Tensor, *, first_id: int = 0, last_id: int | None = None,
                 backend: str | None = None) -> GuidedProbsResult:
    """Compute the distribution of the next token: classifier-free guidance, temperature, top-k, top-p, softmax.

    Everything is computed in float32, whatever the dtype of the logits, in this order:

        guidance      x = uncond + s (logits - uncond)
        range         only ids in [first_id, last_id) are looked at; the others get probability 0
        temperature   x is divided by it
        top-k         keeps every token whose x is at least the k-th largest, ties included
        top-p         of the tokens that top-k kept, keeps each one for which the strictly more probable ones hold
                      less than `top_p` of the mass: the token that crosses the threshold is kept, and so are its ties
        softmax       over the tokens that were kept

    Temperature 0 stands for greedy decoding: it gives the softmax at temperature 1, without top-k and top-p. A logit
    of -inf has probability 0, whatever the guidance. If only `uncond` is -inf, the row is invalid.

    (Ho and Salimans, arXiv:2207.12598; the order of the filters is LlamaGen's, arXiv:2406.06525.)

    Args:
        logits:       (B, N, V) float32, float16 or bfloat16   with the condition
        uncond:       (B, N, V) the same dtype                 without the condition; None: no guidance
        guidance:     (B,)      float32   s, the guidance scale; not used without `uncond`
        temperature:  (B,)      float32   >= 0
        top_k:        (B,)      int32     off if <= 0 or at least the number of ids
        top_p:        (B,)      float32   off if <= 0 or >= 1
        first_id:     the first id of the range, e.g. of the image tokens in a mixed vocabulary
        last_id:      one past the last id of the range; None: V
        backend:      None for the device's own kernel; a name from `backends()` to force one

    Returns:
        probs:        (B, N, V) float32   each row sums to 1 up to rounding
        status:       (B, N)    int32     INVALID_ROW, with probs all zero: after the division an entry is NaN or
                                          +inf or all are -inf, or the temperature is negative or NaN

    Raises:
        ValueError: a dtype, shape or device differs from the above, not 0 <= first_id < last_id <= V, or V > 2**22

    Example:
        >>> import torch
        >>> from specvis_kernels import guided_probs
        >>> logits = torch.tensor([[[4.0, 2.0, 1.0, 0.0]]])       # one request, one position, four tokens
        >>> uncond = torch.tensor([[[3.0, 2.0, 1.0, 0.0]]])
        >>> probs, status = guided_probs(logits, uncond, guidance=torch.tensor([2.0]), temperature=torch.tensor([1.0]),
        ...                              top_k=torch.tensor([2], dtype=torch.int32), top_p=torch.tensor([1.0]))
        >>> probs.round(decimals=2)                               # softmax of 5 and 2
        tensor([[[0.9500, 0.0500, 0.0000, 0.0000]]])
    """
    B, N, V = check_dims("logits", logits, "BNV")
    check("logits", logits, HALF_OR_FLOAT, B=B, N=N, V=V)
    check_num_ids(V)
    if uncond is not None:
        check("uncond", uncond, logits.dtype, like=logits, B=B, N=N, V=V)
        uncond = uncond.contiguous()
    check("guidance", guidance, torch.float32, like=logits, B=B)
    check("temperature", temperature, torch.float32, like=logits, B=B)
    check("top_k", top_k, torch.int32, like=logits, B=B)
    check("top_p", top_p, torch.float32, like=logits, B=B)
    last_id = V if last_id is None else last_id
    if not all(isinstance(i, (int, torch.SymInt)) for i in (first_id, last_id)) or not 0 <= first_id < last_id <= V:
        raise ValueError(f"first_id and last_id must be integers, 0 <= first_id < last_id <= V={V}, "
                         f"got {first_id!r} and {last_id!r}")
    return _call(backend, logits.contiguous(), uncond, guidance.contiguous(), temperature.contiguous(),
                 top_k.contiguous(), top_p.contiguous(), first_id, last_id)


def _oracle(logits, uncond, guidance, temperature, top_k, top_p, first_id, last_id):
    row = filter_logits(logits, uncond, guidance, temperature, top_k, top_p, first_id, last_id)
    e = torch.where(row.is_kept, exp(row.margins), 0.0)
    total = e.double().sum(-1, keepdim=True).float()
    probs = e / torch.where(row.is_valid[..., None], total, 1.0)
    return probs, torch.where(row.is_valid, 0, INVALID_ROW).int()


def _meta(logits, uncond, guidance, temperature, top_k, top_p, first_id, last_id):
    return (torch.empty_like(logits, dtype=torch.float32),
            logits.new_empty(logits.shape[:2], dtype=torch.int32))


_call = define(
    "guided_probs(Tensor logits, Tensor? uncond, Tensor guidance, Tensor temperature, Tensor top_k,"
    " Tensor top_p, SymInt first_id, SymInt last_id) -> (Tensor probs, Tensor status)",
    oracle=_oracle, meta=_meta, result=GuidedProbsResult)
