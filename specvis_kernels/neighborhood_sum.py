"""neighborhood_sum: the probability of a token together with that of its neighbors in the codebook."""
import math

import torch
from torch import Tensor

from ._dispatch import INVALID_ROW, INVALID_TREE, check, check_dims, define
from ._numbers import CEILING, FIXED_BITS, FIXED_ONE, to_fixed_point

KINDS = ("tvd", "ratio", "jsd")


def neighborhood_sum(probs: Tensor, tokens: Tensor, neighbors: Tensor, cutoff: Tensor, *, kind: str = "tvd",
                     offset: int = 0, backend: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The probability of each token, plus that of its nearest codes for as long as the cutoff allows.

    Neighbors are added nearest first. With S the running sum of their probabilities and r the token's own,
    one is kept while

        tvd    S <= cutoff               moving them to the token changes the row by TV = S (LANTERN)
        ratio  S <= cutoff * r           (LANTERN++: a release's `lantern_delta` l is the ratio l - 1)
        jsd    JSD(S, r) <= cutoff       1/2 [S ln 2 + r ln(r / h) + (r + S) ln((r + S) / h)], h = r + S / 2

    and the first that is not ends the list. A neighbor of probability 0 takes a place and no budget. A
    negative or NaN cutoff keeps nothing. Sums are in fixed point, floor(p * 2**42), so their order does not
    matter.
    (LANTERN, arXiv:2410.03355, section 4; LANTERN++, arXiv:2502.06352.)

    Args:
        probs:      (R, V) float32          rows of probabilities, each of total 1
        tokens:     (R,)   int64            one token of each row; outside [0, V) it is reported
        neighbors:  (C, k) uint16 or int32  each code's neighbors, nearest first: distinct, itself excluded
        cutoff:     (R,)   float32          what the sum is compared with
        kind:       "tvd", "ratio" or "jsd"
        offset:     the token id of code 0; a token outside [offset, offset + C) has no neighbors
        backend:    None for the device's own kernel; a name from `backends()` to force one

    Returns:
        mass:    (R,) float32  the token's probability and its kept neighbors'
        kept:    (R,) int32    how many neighbors were kept
        status:  (R,) int32    INVALID_ROW, INVALID_TREE (token out of range); mass and kept are then 0

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above, or offset + C > V
    """
    R, V = check_dims("probs", probs, "RV")
    check("probs", probs, torch.float32, R=R, V=V)
    check("tokens", tokens, torch.int64, like=probs, R=R)
    check_neighbors(neighbors, kind, offset, V, like=probs)
    check("cutoff", cutoff, torch.float32, like=probs, R=R)
    rows = [t.contiguous() for t in (probs, tokens, neighbors, cutoff)]
    return _call(backend, *rows, kind, offset)


def check_neighbors(neighbors: Tensor, kind: str, offset: int, V: int, like: Tensor) -> None:
    """Raise ValueError unless the table, the kind of cutoff and the offset fit a vocabulary of V."""
    C, k = check_dims("neighbors", neighbors, "Ck")
    check("neighbors", neighbors, (torch.uint16, torch.int32), like=like, C=C, k=k)
    if C < 1 or k < 1:
        raise ValueError(f"neighbors must have at least one row and one column, got shape ({C}, {k})")
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if not isinstance(offset, (int, torch.SymInt)) or offset < 0 or offset + C > V:
        raise ValueError(f"offset must be in [0, V - C] = [0, {V - C}], got {offset} with V={V}, C={C}")


def kept_prefix(weights: Tensor, total: Tensor, tokens: Tensor, neighbors: Tensor, cutoff: Tensor, kind: str,
                offset: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which of the first `columns` neighbors the cutoff keeps. For oracles.

    weights (..., V) int64, total, tokens (in [0, V)) and cutoff (...) -> the kept ones' sum (...) int64, how
    many (...), and the ids (..., all columns) int64 of every neighbor, V where there is none.
    """
    V, C = weights.shape[-1], neighbors.shape[0]
    row = tokens - offset
    known = ((row >= 0) & (row < C)).unsqueeze(-1)
    ids = neighbors[row.clamp(0, C - 1)].long() + offset
    ids = torch.where(known & (ids >= 0) & (ids < V), ids, V)
    near = ids[..., :columns]
    near_weights = torch.where(near < V, weights.gather(-1, near.clamp(max=V - 1)), 0)
    own = weights.gather(-1, tokens.unsqueeze(-1))
    sums, total, cutoff = near_weights.cumsum(-1), total.unsqueeze(-1), cutoff.unsqueeze(-1).double()
    if kind == "jsd":
        fits = _jsd(sums.double() / total.double(), own.double() / total.double()) <= cutoff
    else:
        threshold = cutoff * (total if kind == "tvd" else own).double()
        threshold = torch.where(threshold < CEILING, threshold, CEILING).to(torch.int64)
        fits = sums <= threshold
    kept = (fits & known & (cutoff >= 0)).long().cumprod(-1)
    return (near_weights * kept).sum(-1), kept.sum(-1), ids


def _jsd(moved: Tensor, own: Tensor) -> Tensor:
    half = own + moved / 2
    both = own + moved
    first = torch.where(own > 0, own * (own / half).log(), 0.0)
    second = torch.where(both > 0, both * (both / half).log(), 0.0)
    return 0.5 * (moved * math.log(2) + first + second)


def _oracle(probs, tokens, neighbors, cutoff, kind, offset):
    V = probs.shape[1]
    weights, _, valid = to_fixed_point(probs)
    inside = (tokens >= 0) & (tokens < V)
    tokens = tokens.clamp(0, V - 1)
    whole = torch.full_like(tokens, 1 << FIXED_BITS)
    moved, kept, _ = kept_prefix(weights, whole, tokens, neighbors, cutoff, kind, offset, neighbors.shape[1])
    mass = (weights.gather(1, tokens.unsqueeze(1)).squeeze(1) + moved).float() / FIXED_ONE
    ok = valid & inside
    status = torch.where(valid, 0, INVALID_ROW) | torch.where(inside, 0, INVALID_TREE)
    return torch.where(ok, mass, 0.0), torch.where(ok, kept, 0).int(), status.int()


def _meta(probs, tokens, neighbors, cutoff, kind, offset):
    R = probs.shape[0]
    return probs.new_empty(R), probs.new_empty(R, dtype=torch.int32), probs.new_empty(R, dtype=torch.int32)


_call = define(
    "neighborhood_sum(Tensor probs, Tensor tokens, Tensor neighbors, Tensor cutoff, str kind, SymInt offset)"
    " -> (Tensor, Tensor, Tensor)",
    oracle=_oracle, meta=_meta)
