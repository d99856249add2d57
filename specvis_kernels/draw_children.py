"""draw_children: the children of a static draft tree's nodes, sampled without replacement."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import Seeds, check, check_count, check_dims, check_seeds, integers
from ._define import define
from ._numbers import draw, log, to_fixed_point
from .noise import gumbel_noise
from .status import INVALID_ROW


class DrawChildrenResult(NamedTuple):
    tokens: Tensor        # (B, F, K) int64
    num_children: Tensor  # (B, F)    int32
    status: Tensor        # (B, F)    int32


def draw_children(draft_probs: Tensor, uniforms: Tensor | None = None, *, seeds: Seeds | None = None,
                  positions: Tensor | None = None, num_children: int | None = None,
                  backend: str | None = None) -> DrawChildrenResult:
    """Draw K different tokens for each node, one after the other, without replacement.

    A token without mass is never drawn. Once no mass is left the other children do not exist: their tokens are 0, and
    `num_children` says how many exist.

    With `uniforms`, child k is drawn by inverse CDF in vocabulary order, from what the earlier children have left of
    the row. It is the first token whose running sum of the remaining mass exceeds floor(uniforms[b, f, k] * the
    remaining total). Then its mass is removed.

    With `seeds` and `positions`, the children are drawn with the noise of `draw_tokens`. Child k is the token with the
    k-th largest

        score = (log(p) - best) + g

    where best is log(p) of the row's largest p, and g the noise that `gumbel_noise` gives for (seed, position, token).
    The lowest token comes first on ties. So if the target's row is the draft's, the first child is the token that the
    target draws there, up to the rounding of log(p). Children that are drawn by noise are distributed like children
    that are drawn with uniforms.

    verify_tree, with these rows as its draft_probs, removes mass in the same way. There draft_row[b, n] is the row from
    which the children of node n were drawn: for the tree [-1, 0, 0, 1, 1] it is [0, 1, -1, -1, -1]. verify_tree skips a
    child that does not exist, so it stays exact even on a tree that has such children. Children that share the target's
    noise are verified by verify_greedy instead: they are not independent of the target's draws, as verify_tree assumes.

    (The static trees of EAGLE, arXiv:2401.15077; LANTERN++, arXiv:2502.06352; COOL-SD, arXiv:2601.09212. Sampling
    without replacement by Gumbel noise: Kool, van Hoof and Welling, arXiv:1903.06059.)

    Args:
        draft_probs:   (B, F, V) float32   the draft's probabilities after each of F nodes
        uniforms:      (B, F, K) float32   in [0, 1), one for each child; None: draw with the noise of `seeds`
        seeds:         (B,) int32 or int64, or integers   one for each request; None: draw with `uniforms`
        positions:     (B, F) int32 or int64   of the token that follows each node; the low 32 bits count. Only with
                                               seeds
        num_children:  K, how many children to draw for each node. Only with seeds
        backend:       None for the device's own kernel; a name from `backends()` to force one

    Returns:
        tokens:        (B, F, K) int64     the children, in the order in which they were drawn
        num_children:  (B, F)    int32     how many of them exist
        status:        (B, F)    int32     INVALID_ROW: an entry of the row is NaN, negative or above 2, or the whole
                                           row is 0 in fixed point; then the node has no children

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above, F, V or K is 0, or both or neither of
                    uniforms and seeds are given

    Examples:
        >>> draft_probs = torch.tensor([[[0.5, 0.25, 0.25, 0.0]]])
        >>> uniforms = torch.tensor([[[0.6, 0.7, 0.0, 0.0]]])
        >>> children = draw_children(draft_probs, uniforms)
        >>> children.tokens, children.num_children
        (tensor([[[1, 2, 0, 0]]]), tensor([[3]], dtype=torch.int32))
        >>> noisy = draw_children(draft_probs, seeds=torch.tensor([7]), positions=torch.tensor([[0]]), num_children=4)
        >>> noisy.num_children  # the token of probability 0 is no child
        tensor([[3]], dtype=torch.int32)
    """
    B, F, V = check_dims("draft_probs", draft_probs, "BFV", torch.float32, not_empty="FV")
    return _call(backend, draft_probs, *check_draws(uniforms, seeds, positions, num_children, draft_probs))


def check_draws(uniforms: Tensor | None, seeds: Seeds | None, positions: Tensor | None, num_children: int | None,
                like: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
    """Raise ValueError unless these say how to draw from rows `like` (B, F, V); returns them, and K."""
    B, F, _ = like.shape
    if (uniforms is None) == (seeds is None):
        raise ValueError("exactly one of uniforms and seeds must be given, got "
                         + ("neither" if seeds is None else "both"))
    if seeds is None:
        for name, value in (("positions", positions), ("num_children", num_children)):
            if value is not None:
                raise ValueError(f"{name} must be None with uniforms, got {type(value).__name__}")
        K = check_dims("uniforms", uniforms, "BFK", not_empty="K")[2]
        check("uniforms", uniforms, torch.float32, like=like, B=B, F=F, K=K)
        return uniforms, None, None, K
    seeds = check_seeds(seeds, like, B)
    positions = integers("positions", positions, torch.int64, like, B=B, F=F)
    return None, seeds, positions, check_count("num_children", num_children, 1)


def _oracle(draft_probs: Tensor, uniforms: Tensor | None, seeds: Tensor | None, positions: Tensor | None,
            num_children: int):
    mass, total, is_valid = to_fixed_point(draft_probs)
    if uniforms is None:
        tokens, num_drawn = draw_by_noise(draft_probs, (mass > 0) & is_valid[..., None], seeds, positions, num_children)
    else:
        tokens, num_drawn = draw_by_inverse_cdf(mass, torch.where(is_valid, total, 0), uniforms)
    return tokens, num_drawn.int(), torch.where(is_valid, 0, INVALID_ROW).int()


def draw_by_inverse_cdf(mass, total, uniforms):
    tokens, num_drawn = [], torch.zeros_like(total)
    for uniform in uniforms.unbind(-1):
        exists = total > 0
        token = torch.where(exists, draw(mass, total, uniform), 0).unsqueeze(-1)
        total = total - torch.where(exists, mass.gather(-1, token)[..., 0], 0)
        mass = mass.scatter(-1, token, 0)
        tokens.append(token)
        num_drawn = num_drawn + exists
    return torch.cat(tokens, -1), num_drawn


def draw_by_noise(draft_probs, exists, seeds, positions, num_children):
    V, K = draft_probs.shape[-1], num_children
    x = torch.where(exists, log(torch.where(exists, draft_probs, 1.0)), -torch.inf)
    best = torch.where(exists.any(-1), x.amax(-1), 0.0)
    score = (x - best[..., None]) + gumbel_noise(seeds, positions, V)
    tokens = score.sort(dim=-1, descending=True, stable=True).indices[..., :K]
    tokens = torch.nn.functional.pad(tokens, (0, max(K - V, 0)))
    num_drawn = exists.sum(-1).clamp(max=K)
    return torch.where(torch.arange(K, device=x.device) < num_drawn[..., None], tokens, 0), num_drawn


def _meta(draft_probs, num_children):
    nodes = draft_probs.shape[:2]
    return (draft_probs.new_empty((*nodes, num_children), dtype=torch.int64),
            draft_probs.new_empty(nodes, dtype=torch.int32), draft_probs.new_empty(nodes, dtype=torch.int32))


_call = define("draw_children", oracle=_oracle, meta=_meta, result=DrawChildrenResult)
