"""guided_probs: from a model's logits to the distribution that is sampled."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._dispatch import INVALID_ROW, check, check_dims, define

HALF_OR_FLOAT = (torch.float32, torch.float16, torch.bfloat16)
MASS_ONE = 2.0 ** 40  # exp(logit - best) <= 1 as an integer: any vocabulary's sum stays far below 2**63


class GuidedProbsResult(NamedTuple):
    """What `guided_probs` returns."""
    probs: Tensor   # (B, N, V) float32
    status: Tensor  # (B, N) int32


def guided_probs(logits: Tensor, uncond: Tensor | None, guidance: Tensor, temperature: Tensor, top_k: Tensor,
                 top_p: Tensor, *, first_id: int = 0, last_id: int | None = None,
                 backend: str | None = None) -> GuidedProbsResult:
    """The distribution that a model's logits stand for after guidance, temperature, top-k and top-p.

    In this order, in float32 whatever the dtype of the logits: guidance, uncond + s (logits - uncond); only
    ids in [first_id, last_id) are looked at, the others get probability 0; division by the temperature;
    top-k keeps every token whose logit is at least the k-th largest, ties included; top-p keeps every token
    for which the strictly more probable ones, of those that top-k left, hold less than `top_p` of the mass:
    the token that crosses the threshold stays, and so do its ties; softmax over what is kept. Temperature 0
    (greedy decoding) is the softmax at temperature 1 without top-k and top-p. A logit of -inf has
    probability 0, whatever the guidance; -inf in `uncond` alone makes its row invalid.

    (Ho and Salimans, arXiv:2207.12598; the order of the filters is LlamaGen's, arXiv:2406.06525.)

    Args:
        logits:       (B, N, V) float32, float16 or bfloat16   with the condition
        uncond:       (B, N, V) the same dtype                 without it; None: no guidance
        guidance:     (B,)      float32   s; not used without `uncond`
        temperature:  (B,)      float32   >= 0
        top_k:        (B,)      int32     off if <= 0 or at least the number of ids
        top_p:        (B,)      float32   off if <= 0 or >= 1
        first_id:     the first id of the range, e.g. of the image tokens in a mixed vocabulary
        last_id:      one past the last id of the range; None: V
        backend:      None for the device's own kernel; a name from `backends()` to force one

    Returns:
        probs:        (B, N, V) float32   each row sums to 1 up to rounding
        status:       (B, N)    int32     INVALID_ROW, with probs all zero, where after the division something
                                          is NaN or +inf or all is -inf, or the temperature is negative or NaN

    Raises:
        ValueError: a dtype, shape or device differs from the above, or not 0 <= first_id < last_id <= V
    """
    B, N, V = check_dims("logits", logits, "BNV")
    check("logits", logits, HALF_OR_FLOAT, B=B, N=N, V=V)
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
    def per_row(setting):
        return setting[:, None, None]

    x = logits[..., first_id:last_id].float()  # (B, N, ids)
    ids = x.shape[-1]
    if uncond is not None:
        u = uncond[..., first_id:last_id].float()
        guided = u + per_row(guidance) * (x - u)
        x = torch.where((x == -torch.inf) & (u < torch.inf), -torch.inf, guided)
    sampling = per_row(temperature) != 0
    x = x / torch.where(sampling, per_row(temperature), 1.0)
    best = x.amax(-1, keepdim=True)  # NaN if any is
    invalid = ~(best.abs() < torch.inf) | ~(per_row(temperature) >= 0)
    x = torch.where(invalid, 0.0, x)
    best = torch.where(invalid, 0.0, best)

    ordered = x.sort(-1, descending=True).values
    k = per_row(top_k).long()
    k = torch.where(sampling & (k > 0) & (k < ids), k, ids).expand(*x.shape[:-1], 1)
    kept = x >= ordered.gather(-1, k - 1)

    e = torch.where(kept, (x - best).exp(), 0.0)
    mass = (e.sort(-1, descending=True).values * MASS_ONE).long().cumsum(-1)  # in the order of `ordered`
    above = torch.cat([torch.zeros_like(mass[..., :1]), mass[..., :-1]], -1)  # of the tokens before this one
    limit = (per_row(top_p).double() * mass[..., -1:].double()).ceil().long()
    crossing = (above < limit).sum(-1, keepdim=True) - 1
    on = sampling & (per_row(top_p) > 0) & (per_row(top_p) < 1)
    kept = kept & (~on | (x >= ordered.gather(-1, crossing.clamp(min=0))))

    e = torch.where(kept & ~invalid, e, 0.0)
    total = e.double().sum(-1, keepdim=True).float()
    probs = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    probs[..., first_id:last_id] = e / torch.where(invalid, 1.0, total)
    return probs, torch.where(invalid[..., 0], INVALID_ROW, 0).int()


def _meta(logits, uncond, guidance, temperature, top_k, top_p, first_id, last_id):
    return (torch.empty_like(logits, dtype=torch.float32),
            logits.new_empty(logits.shape[:2], dtype=torch.int32))


_call = define(
    "guided_probs(Tensor logits, Tensor? uncond, Tensor guidance, Tensor temperature, Tensor top_k,"
    " Tensor top_p, SymInt first_id, SymInt last_id) -> (Tensor probs, Tensor status)",
    oracle=_oracle, meta=_meta, result=GuidedProbsResult)
