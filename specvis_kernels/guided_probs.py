"""guided_probs: from a model's logits to the distribution that tokens are sampled from."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._define import checked_once, define
from ._filters import MASS_ONE, check_filters, check_logits, check_settings, filter_logits, range_of_nodes, to_mass
from ._numbers import exp
from .status import INVALID_ROW


class GuidedProbsResult(NamedTuple):
    probs: Tensor   # (B, N, V) float32
    status: Tensor  # (B, N)    int32


@checked_once
def guided_probs(logits: Tensor, uncond: Tensor | None, guidance: Tensor | float | None, temperature: Tensor | float,
                 top_k: Tensor | int | None, top_p: Tensor | float | None, *,
                 min_p: Tensor | float | None = None, id_range: Tensor | tuple[int, int] | None = None,
                 filters: str = "k_then_p", backend: str | None = None) -> GuidedProbsResult:
    """Compute the distribution of the next token: classifier-free guidance, temperature, top-k, top-p, min-p, softmax.

    Everything is computed in float32, whatever the dtype of the logits, in this order:

        guidance      x = uncond + s (logits - uncond)
        range         only the row's ids, [first, last), are read; the others get probability 0
        temperature   x is divided by it
        top-k         keeps every token whose x is at least the k-th largest, ties included
        top-p         keeps a token that top-k kept if the strictly more probable ones hold less than `top_p` of the
                      mass: the token that crosses the threshold is kept, and so are its ties
        min-p         keeps of these a token if its probability is at least `min_p` times the largest: exp(x - max x),
                      in float32, is at least min_p
        softmax       over the tokens that were kept

    With filters="p_then_k" top-p comes first, as in the releases of EAGLE and LANTERN: it takes its share of the mass
    of all ids, and top-k filters the rest. Ties are kept in either order.

    Temperature 0 means greedy decoding: it gives the softmax at temperature 1, without top-k, top-p and min-p. A logit
    of -inf has probability 0, whatever the guidance. If only `uncond` is -inf, the row is invalid.

    Models of transformers mask an id by the least finite number of their dtype. Beside others it has probability 0. A
    row that has nothing else in `logits` is invalid, even a forced one: the model says nothing about these ids.

    (Ho and Salimans, arXiv:2207.12598; the order of the filters is LlamaGen's, arXiv:2406.06525; min-p:
    arXiv:2407.01082.)

    Args:
        logits:       (B, N, V) float32, float16 or bfloat16   with the condition
        uncond:       (B, N, V) the same dtype                 without the condition; None: no guidance
        guidance:     (B,) float32 or a number   s, the guidance scale; None, or the number 1, without `uncond`
        temperature:  (B,) float32 or a number   >= 0
        top_k:        (B,) int32 or int64, or a number   off if <= 0 or at least the number of ids; None: off
        top_p:        (B,) float32 or a number in [0, 1]   off if <= 0 or >= 1; None: off
        min_p:        (B,) float32 or a number in [0, 1]   off if <= 0; None: off. 1 keeps the largest and its ties
        id_range:     two integers first, last: the ids [first, last) of every row, such as the image tokens of a mixed
                      vocabulary; or (B, N, 2) int32 or int64, a range for each row: [x, x + 1) forces token x. None:
                      all ids
        filters:      "k_then_p" or "p_then_k"
        backend:      None for the device's own kernel; a name from `backends()` to force one

    Returns:
        probs:        (B, N, V) float32   each row sums to 1 up to rounding
        status:       (B, N)    int32     INVALID_ROW, with probs all zero: after the division an entry is NaN or
                                          +inf or all are -inf, or the model has masked all ids, or the
                                          temperature is negative or NaN, or the tensor id_range has not
                                          0 <= first < last <= V

    Raises:
        ValueError: a dtype, shape or device differs from the above, id_range is two integers but not
            0 <= first < last <= V, V is 0 or above 2**19, or filters is neither of the two

    Examples:
        >>> logits = torch.tensor([[[4.0, 2.0, 1.0, 0.0]]])       # one request, one position, four tokens
        >>> uncond = torch.tensor([[[3.0, 2.0, 1.0, 0.0]]])
        >>> probs, status = guided_probs(logits, uncond, guidance=2.0, temperature=1.0, top_k=2, top_p=1.0)
        >>> probs.round(decimals=2)                               # softmax of 5 and 2
        tensor([[[0.9500, 0.0500, 0.0000, 0.0000]]])
    """
    check_logits(logits, uncond, not_empty="V")
    settings = check_settings(guidance, temperature, top_k, top_p, min_p, logits, uncond)
    return _call(backend, logits, uncond, *settings, *check_filters(id_range, filters, like=logits), filters)


def _oracle(logits: Tensor, uncond: Tensor | None, guidance: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor,
            min_p: Tensor | None, id_range: Tensor | None, first_id: int, last_id: int, filters: str):
    id_range = range_of_nodes(id_range, first_id, last_id, like=logits)
    row = filter_logits(logits, uncond, guidance, temperature, top_k, top_p, min_p, id_range, filters)
    e = torch.where(row.is_kept, exp(row.margins), 0.0)
    total = (to_mass(e).sum(-1, keepdim=True).double() / MASS_ONE).float()  # equal in any order of summation
    probs = e / torch.where(row.is_valid[..., None], total, 1.0)
    return probs, torch.where(row.is_valid, 0, INVALID_ROW).int()


def _meta(logits):
    return torch.empty_like(logits, dtype=torch.float32), logits.new_empty(logits.shape[:2], dtype=torch.int32)


_call = define("guided_probs", oracle=_oracle, meta=_meta, result=GuidedProbsResult)
