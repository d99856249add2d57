"""What guidance, temperature, top-k, top-p and min-p make of logits, for guided_probs and the ops that begin by it."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import FLOATS, check, check_dims, check_one_of, integers, setting, to_integer
from ._numbers import exp

FILTERS = ("k_then_p", "p_then_k")

MASS_ONE = 2.0 ** 40  # exp(logit - best) <= 1 as an integer
# By what a model masks an id: the least finite number of its dtype. A float32 may have been a bfloat16.
MASKS = {torch.float16: -65504.0, torch.bfloat16: -3.3895313892515355e38, torch.float32: -3.3895313892515355e38}


class Filtered(NamedTuple):
    """Rows of logits after guidance, temperature and filters."""
    margins: Tensor     # (B, N, V) float32  logit - best logit; only where `is_kept`, else -inf
    is_kept: Tensor     # (B, N, V) bool     False in an invalid row
    is_valid: Tensor    # (B, N) bool
    is_sampled: Tensor  # (B, 1) bool        the temperature is not 0


def check_logits(logits: Tensor, uncond: Tensor | None, nodes: str = "N",
                 not_empty: str = "NFV") -> tuple[int, int, int]:
    """Raise ValueError unless these are logits of a model, perhaps with guidance; returns B, N and V.

    nodes: the letter of the second dimension
    """
    B, N, V = check_dims("logits", logits, f"B{nodes}V", not_empty=not_empty)
    if logits.dtype not in FLOATS:
        check("logits", logits, FLOATS, **{"B": B, nodes: N, "V": V})
    if uncond is not None:
        check("uncond", uncond, logits.dtype, like=logits, **{"B": B, nodes: N, "V": V})
    return B, N, V


def check_settings(guidance: Tensor | float | None, temperature: Tensor | float, top_k: Tensor | int | None,
                   top_p: Tensor | float | None, min_p: Tensor | float | None, like: Tensor,
                   uncond: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Raise ValueError unless each is a tensor (B,) or one number for all requests; returns the tensors.

    Without `uncond` no kernel looks at the guidance: it may be None, and a number must be 1. Filters of None are off.
    """
    B = like.shape[0]
    if uncond is None:
        if isinstance(guidance, (int, float)) and guidance != 1:
            raise ValueError("guidance must be 1 or None without uncond, the logits without the condition, "
                             f"got {guidance!r}")
        guidance = 1.0 if guidance is None else guidance
    return (setting("guidance", guidance, torch.float32, like, B=B),
            setting("temperature", temperature, torch.float32, like, at_least=0, B=B),
            setting("top_k", 0 if top_k is None else top_k, torch.int32, like, B=B),
            setting("top_p", 1.0 if top_p is None else top_p, torch.float32, like, at_least=0, at_most=1, B=B),
            None if min_p is None else setting("min_p", min_p, torch.float32, like, at_least=0, at_most=1, B=B))


def check_filters(id_range: Tensor | tuple[int, int] | None, filters: str, like: Tensor,
                  nodes: str = "N") -> tuple[Tensor | None, int, int]:
    """Raise ValueError unless both fit logits `like`. Returns (id_range, first_id, last_id) as the schemas have them.

    The tensor counts if there is one, else the pair does; without both, the pair holds all ids.
    """
    B, N, V = like.shape
    check_one_of("filters", filters, FILTERS)
    if id_range is None:
        return None, 0, V
    if isinstance(id_range, Tensor):
        return integers("id_range", id_range, torch.int64, like, **{"B": B, nodes: N, "bounds": 2}), 0, V
    ids = [to_integer(i) for i in id_range] if isinstance(id_range, (tuple, list)) else []
    if len(ids) != 2 or None in ids or not 0 <= ids[0] < ids[1] <= V:
        raise ValueError(f"id_range must be int64 or int32 (B={B}, {nodes}={N}, bounds=2), or two integers "
                         f"with 0 <= first < last <= V={V}, got {id_range!r}")
    return None, *ids


def range_of_nodes(id_range: Tensor | None, first_id: int, last_id: int, like: Tensor) -> Tensor:
    """(B, N, 2) int64: what check_filters() returned, of every row of logits `like`."""
    if id_range is not None:
        return id_range
    return torch.stack([torch.full(like.shape[:2], i, dtype=torch.int64, device=like.device)
                        for i in (first_id, last_id)], -1)


def to_mass(e: Tensor) -> Tensor:
    """exp(logit - best) as integers, whose sums do not depend on the order."""
    return (e * MASS_ONE).long()


def filter_logits(logits: Tensor, uncond: Tensor | None, guidance: Tensor, temperature: Tensor, top_k: Tensor,
                  top_p: Tensor, min_p: Tensor | None, id_range: Tensor, filters: str) -> Filtered:
    """Filter rows with the arguments of `guided_probs`; id_range is a tensor (B, N, 2)."""
    V = logits.shape[-1]
    first_id, last_id = id_range[..., :1], id_range[..., 1:]
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
    is_valid = is_valid & (first_id >= 0) & (first_id < last_id) & (last_id <= V)
    is_valid = is_valid & (is_inside & ~(logits <= MASKS[logits.dtype])).any(-1, keepdim=True)
    x = torch.where(is_valid, x, 0.0)
    best = torch.where(is_valid, best, 0.0)

    descending = x.sort(-1, descending=True).values
    k = torch.where(is_sampled & (top_k > 0) & (top_k < num_ids), top_k.long(), V)
    k = k.clamp(max=V)  # an invalid range may have more ids
    is_kept = is_inside & (x >= descending.gather(-1, k.expand(*x.shape[:-1], 1) - 1))

    # Both filters keep the ids from some logit upwards. So their order only changes the mass of which top_p is a
    # share: the mass of the ids that top-k kept, or of all ids.
    e = torch.where(is_kept if filters == "k_then_p" else is_inside, exp(x - best), 0.0)
    mass = to_mass(e.sort(-1, descending=True).values).cumsum(-1)  # in the order of `descending`
    mass_before = torch.cat([torch.zeros_like(mass[..., :1]), mass[..., :-1]], -1)
    limit = (top_p.double() * mass[..., -1:].double()).ceil().long()
    crossing = (mass_before < limit).sum(-1, keepdim=True) - 1
    has_top_p = is_sampled & (top_p > 0) & (top_p < 1)
    is_kept = is_kept & (~has_top_p | (x >= descending.gather(-1, crossing.clamp(min=0)))) & is_valid
    if min_p is not None:
        least = torch.where(is_sampled & (min_p > 0)[:, None, None], min_p.clamp(max=1.0)[:, None, None], 0.0)
        is_kept = is_kept & (exp(x - best) >= least)
    return Filtered(torch.where(is_kept, x - best, -torch.inf), is_kept, is_valid[..., 0], is_sampled[..., 0])
