"""What guidance, temperature, top-k and top-p make of logits, for the oracles of guided_probs and draw_tokens."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._numbers import exp

MASS_ONE = 2.0 ** 40  # exp(logit - best) <= 1 as an integer
MOST_IDS = 2 ** 22    # of a row: the sum of its masses is at most 2**62


class Filtered(NamedTuple):
    """Rows of logits after guidance, temperature and filters."""
    margins: Tensor     # (B, N, V) float32  logit - best logit; only where `is_kept`, else -inf
    is_kept: Tensor     # (B, N, V) bool     nothing of an invalid row is
    is_valid: Tensor    # (B, N) bool
    is_sampled: Tensor  # (B, 1) bool        the temperature is not 0


def check_num_ids(V: int) -> None:
    """Raise ValueError unless a row of logits has at least one id and at most MOST_IDS."""
    if not 1 <= V <= MOST_IDS:
        raise ValueError(f"logits must have 1 <= V <= {MOST_IDS} (masses are summed in 63 bits), got V={V}")


def filter_logits(logits: Tensor, uncond: Tensor | None, guidance: Tensor, temperature: Tensor, top_k: Tensor,
                  top_p: Tensor, first_id: int | Tensor, last_id: int | Tensor) -> Filtered:
    """The arguments are those of `guided_probs`; first_id and last_id may be (B, N) int64 too."""
    V = logits.shape[-1]
    first_id, last_id = (torch.as_tensor(i, device=logits.device).reshape(*i.shape, 1) if isinstance(i, Tensor) else i
                         for i in (first_id, last_id))
    ids = torch.arange(V, device=logits.device)
    is_inside = (ids >= first_id) & (ids < last_id)
    num_ids = last_id - first_id
    guidance, temperature, top_k, top_p = (t[:, None, None] for t in (guidance, temperature, top_k, top_p))
    x = logits.float()
    if uncond is not None:
        u = uncond.float()
        x = torch.where((x == -torch.inf) & (u < torch.inf), -torch.inf, u + guidance * (x - u))
    is_sampled = temperature != 0
    x = torch.where(is_inside, x / torch.where(is_sampled, temperature, 1.0), -torch.inf)
    best = x.amax(-1, keepdim=True)  # NaN if any is
    is_valid = (best.abs() < torch.inf) & (temperature >= 0)
    x = torch.where(is_valid, x, 0.0)
    best = torch.where(is_valid, best, 0.0)

    descending = x.sort(-1, descending=True).values
    k = torch.where(is_sampled & (top_k > 0) & (top_k < num_ids), top_k.long(), V)
    k = k.clamp(max=V)  # an invalid range may have more ids
    is_kept = is_inside & (x >= descending.gather(-1, k.expand(*x.shape[:-1], 1) - 1))

    e = torch.where(is_kept, exp(x - best), 0.0)
    mass = (e.sort(-1, descending=True).values * MASS_ONE).long().cumsum(-1)  # in the order of `descending`
    mass_before = torch.cat([torch.zeros_like(mass[..., :1]), mass[..., :-1]], -1)
    limit = (top_p.double() * mass[..., -1:].double()).ceil().long()
    crossing = (mass_before < limit).sum(-1, keepdim=True) - 1
    has_top_p = is_sampled & (top_p > 0) & (top_p < 1)
    is_kept = is_kept & (~has_top_p | (x >= descending.gather(-1, crossing.clamp(min=0)))) & is_valid
    return Filtered(torch.where(is_kept, x - best, -torch.inf), is_kept, is_valid[..., 0], is_sampled[..., 0])
