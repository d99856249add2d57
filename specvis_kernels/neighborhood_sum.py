"""neighborhood_sum: the probability of a token and of its neighbors in the codebook."""
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import check, check_dims, check_one_of, integers, setting, to_integer
from ._define import define
from ._numbers import FIXED_BITS, FIXED_ONE, to_fixed_point
from .status import INVALID_ROW, INVALID_TREE

CUTOFFS = ("tvd", "ratio", "jsd")


class NeighborhoodSumResult(NamedTuple):
    relaxed_mass: Tensor   # (R,) float32
    num_neighbors: Tensor  # (R,) int32
    status: Tensor         # (R,) int32


def neighborhood_sum(probs: Tensor, tokens: Tensor, neighbors: Tensor, delta: Tensor | float, *, cutoff: str = "tvd",
                     offset: int = 0, backend: str | None = None) -> NeighborhoodSumResult:
    """Compute the relaxed mass of each token: its own probability plus the probabilities of its nearest neighbors.

    Neighbors are taken one by one, the nearest first. The cutoff says which are kept. With r the probability of
    the token and S the sum over the neighbors so far, the next one included, a neighbor is kept if

        tvd    S <= delta        moving these neighbors' mass onto the token changes the row by S in total
                                 variation (LANTERN)
        ratio  S <= delta * r    LANTERN++; a released `lantern_delta` l above 1 is delta = l - 1 here
        jsd    JSD(S, r) <= delta, the Jensen-Shannon divergence between the row and the row with this mass
                                 moved: 1/2 [S ln 2 + r ln(r / h) + (r + S) ln((r + S) / h)], h = r + S / 2

    The first neighbor that does not fit ends the list. A neighbor of probability 0 fits if the neighbors before
    it do. If delta is negative or NaN no neighbor is kept; an infinite one keeps all. Sums are taken in fixed point,
    floor(p * 2**42), so they do not depend on the order of addition. An id that is listed twice counts twice.

    `verify_tree` applies this rule itself. This op is for decoders with an acceptance of their own.

    (LANTERN, arXiv:2410.03355, section 4; LANTERN++, arXiv:2502.06352.)

    Args:
        probs:      (R, V) float32          rows of probabilities, each of total 1
        tokens:     (R,) int32 or int64     one token of each row; a token outside [0, V) is reported
        neighbors:  (C, k) uint16, int32 or int64  each code's neighbors, nearest first: distinct, itself excluded
        delta:      (R,) float32 or a number >= 0   how much the cutoff allows
        cutoff:     the rule by which delta limits the sum: "tvd", "ratio" or "jsd"
        offset:     the token id of code 0; a token outside [offset, offset + C) has no neighbors
        backend:    None for the device's own kernel; a name from `backends()` to force one

    Returns:
        relaxed_mass:   (R,) float32  the probability of the token and of the neighbors that were kept
        num_neighbors:  (R,) int32    how many neighbors were kept
        status:         (R,) int32    INVALID_ROW: the row has an entry that is NaN, negative or above 2, or it is
                                      0 in fixed point. INVALID_TREE: the token is outside [0, V).
                                      With either, the other two results are 0

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above, cutoff is unknown, or
            offset + C > V

    Examples:
        >>> probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
        >>> neighbors = torch.tensor([[1, 2, 3], [0, 2, 3], [3, 1, 0], [2, 1, 0]], dtype=torch.int32)
        >>> result = neighborhood_sum(probs, torch.tensor([0]), neighbors, torch.tensor([0.375]))
        >>> result.relaxed_mass, result.num_neighbors  # 1/2 of its own, 1/4 + 1/8 of tokens 1 and 2
        (tensor([0.8750]), tensor([2], dtype=torch.int32))
    """
    R, V = check_dims("probs", probs, "RV", torch.float32)
    tokens = integers("tokens", tokens, torch.int64, probs, R=R)
    check_dims("neighbors", neighbors, "Ck")
    offset = check_neighbors(neighbors, cutoff, offset, V, like=probs)
    delta = setting("delta", delta, torch.float32, probs, at_least=0, R=R)
    return _call(backend, probs, tokens, neighbors, delta, cutoff, offset)


def check_neighbors(neighbors: Tensor | None, cutoff: str, offset: int, V: int, like: Tensor) -> int:
    """Raise ValueError unless the table, the cutoff and the offset fit a vocabulary of V. Returns the offset."""
    check_one_of("cutoff", cutoff, CUTOFFS)
    offset = to_integer(given := offset)
    if offset is None:
        raise ValueError(f"offset must be an integer, got {given!r}")
    if neighbors is None:
        return 0
    C, k = check_dims("neighbors", neighbors, "Ck")
    check("neighbors", neighbors, (torch.uint16, torch.int32, torch.int64), like=like, C=C, k=k)
    if C < 1 or k < 1:
        raise ValueError(f"neighbors must have at least one row and one column, got shape ({C}, {k})")
    if offset < 0 or offset + C > V:
        raise ValueError(f"offset must be in [0, V - C] = [0, {V - C}], got {offset} with V={V}, C={C}")
    return offset


def neighbors_of(codes: Tensor, neighbors: Tensor) -> Tensor:
    """Rows `codes` (...) of the table (C, k), as int64 (..., k)."""
    if neighbors.dtype == torch.uint16:  # torch 2.10 cannot index uint16 on CUDA
        return neighbors.view(torch.int16)[codes].long() & 0xFFFF
    return neighbors[codes].long()


def neighbor_prefix(mass: Tensor, total: Tensor, tokens: Tensor, neighbors: Tensor, delta: Tensor, cutoff: str,
                    offset: int, num_considered: int, limit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which of the first `num_considered` neighbors the cutoff keeps. For oracles.

    mass (..., V) int64, total, tokens (in [0, V)) and delta (...) -> neighbor_mass, the sum over the neighbors
    kept (...) int64, num_kept, how many these are (...), and ids, the token of every neighbor in the table,
    (..., k) int64, V for a missing one. The token and its kept neighbors have at most the mass `limit` (...) int64.
    """
    V, C = mass.shape[-1], neighbors.shape[0]
    code = tokens - offset
    in_codebook = ((code >= 0) & (code < C)).unsqueeze(-1)
    ids = neighbors_of(code.clamp(0, C - 1), neighbors) + offset
    ids = torch.where(in_codebook & (ids >= 0) & (ids < V), ids, V)
    considered = ids[..., :num_considered]
    each_mass = torch.where(considered < V, mass.gather(-1, considered.clamp(max=V - 1)), 0)
    token_mass = mass.gather(-1, tokens.unsqueeze(-1))
    sums, total, delta = each_mass.cumsum(-1), total.unsqueeze(-1), delta.unsqueeze(-1).double()
    fits = sums <= limit.unsqueeze(-1) - token_mass
    if cutoff == "jsd":
        fits = fits & (_jsd(sums.double() / total.double(), token_mass.double() / total.double()) <= delta)
    else:
        bound = delta * (total if cutoff == "tvd" else token_mass).double()
        fits = fits & ((sums <= bound.to(torch.int64)) | ~(bound < 2.0 ** 63))
    is_kept = (fits & in_codebook & (delta >= 0)).long().cumprod(-1)
    return (each_mass * is_kept).sum(-1), is_kept.sum(-1), ids


def _jsd(neighbor_mass: Tensor, token_mass: Tensor) -> Tensor:
    mean = token_mass + neighbor_mass / 2
    relaxed_mass = token_mass + neighbor_mass
    first = torch.where(token_mass > 0, token_mass * (token_mass / mean).log(), 0.0)
    second = torch.where(relaxed_mass > 0, relaxed_mass * (relaxed_mass / mean).log(), 0.0)
    return 0.5 * (neighbor_mass * math.log(2) + first + second)


def _oracle(probs: Tensor, tokens: Tensor, neighbors: Tensor, delta: Tensor, cutoff: str, offset: int):
    V = probs.shape[1]
    fixed_probs, _, is_valid = to_fixed_point(probs)
    in_vocabulary = (tokens >= 0) & (tokens < V)
    tokens = tokens.clamp(0, V - 1)
    total = torch.full_like(tokens, 1 << FIXED_BITS)  # delta is compared with 1, not with the row's rounded sum
    neighbor_mass, num_kept, _ = neighbor_prefix(
        fixed_probs, total, tokens, neighbors, delta, cutoff, offset, neighbors.shape[1],
        limit=torch.full_like(tokens, 2**63 - 1))
    token_mass = fixed_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    relaxed_mass = (token_mass + neighbor_mass).float() / FIXED_ONE
    ok = is_valid & in_vocabulary
    status = torch.where(is_valid, 0, INVALID_ROW) | torch.where(in_vocabulary, 0, INVALID_TREE)
    return torch.where(ok, relaxed_mass, 0.0), torch.where(ok, num_kept, 0).int(), status.int()


def _meta(probs):
    R = probs.shape[0]
    return probs.new_empty(R), probs.new_empty(R, dtype=torch.int32), probs.new_empty(R, dtype=torch.int32)


_call = define("neighborhood_sum", oracle=_oracle, meta=_meta, result=NeighborhoodSumResult)
