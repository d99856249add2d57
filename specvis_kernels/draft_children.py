"""draft_children: one level of a static draft tree, from the draft model's logits to the children that are drawn."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import Seeds
from ._define import checked_once, define
from ._filters import check_filters, check_logits, check_settings
from .draw_children import _oracle as draw_children
from .draw_children import check_draws
from .expand_tree import _oracle as expand_tree
from .guided_probs import _oracle as guided_probs


class DraftChildrenResult(NamedTuple):
    tokens: Tensor  # (B, F, K) int64
    probs: Tensor   # (B, F, V) float32
    status: Tensor  # (B, F)    int32


@checked_once
def draft_children(logits: Tensor, uncond: Tensor | None, uniforms: Tensor | None, guidance: Tensor | float | None,
                   temperature: Tensor | float, top_k: Tensor | int | None, top_p: Tensor | float | None, *,
                   min_p: Tensor | float | None = None, seeds: Seeds | None = None, positions: Tensor | None = None,
                   num_children: int | None = None, id_range: Tensor | tuple[int, int] | None = None,
                   filters: str = "k_then_p", backend: str | None = None) -> DraftChildrenResult:
    """Draw the children of a static tree's nodes from the draft model's logits.

    This is `guided_probs` and then `draw_children`, bit for bit: from each row of probabilities K different tokens are
    drawn without replacement, with `uniforms`, or with the noise of `seeds` and `positions`.

    At temperature 0 nothing is drawn. The children are the K most probable tokens, most probable first; ties go to the
    lower id.

    `verify_tree` and `verify_logits` take the rows as draft_probs, if the children were drawn with uniforms. Children
    that were drawn with noise are verified by equality: by `verify_greedy`, or by `verify_logits` with seeds.

    (The static trees of EAGLE, arXiv:2401.15077; LANTERN++, arXiv:2502.06352; COOL-SD, arXiv:2601.09212.)

    Args:
        logits:        (B, F, V) float32, float16 or bfloat16   of the draft model after each of F nodes
        uncond:        (B, F, V) the same dtype                 without the condition; None: no guidance
        uniforms:      (B, F, K) float32   in [0, 1), one for each child; None: draw with the noise of `seeds`
        guidance:      (B,) float32 or a number   these five as in `guided_probs`; None without `uncond`
        temperature:   (B,) float32 or a number
        top_k:         (B,) int32 or int64, or a number
        top_p:         (B,) float32 or a number
        min_p:         (B,) float32 or a number
        seeds:         (B,) int32 or int64, or integers   one for each request; None: draw with `uniforms`
        positions:     (B, F) int32 or int64   of the token that follows each node; the low 32 bits count. Only with
                                               seeds
        num_children:  K, how many children to draw for each node. Only with seeds
        id_range:      two integers, (B, F, 2) int32 or int64, or None: the ids of a child, as in `guided_probs`
        filters:       "k_then_p" or "p_then_k", as in `guided_probs`
        backend:       None for the device's own kernel; a name from `backends()` to force one

    Returns:
        tokens:        (B, F, K) int64     the children, in the order in which they were drawn; 0 where a row has no
                                           mass left for one
        probs:         (B, F, V) float32   the rows
        status:        (B, F)    int32     INVALID_ROW as in `guided_probs`; then the row and the tokens are 0

    Raises:
        ValueError: a dtype, shape or device differs from the above, F or K is 0, V is 0 or above 2**19, both or neither
                    of uniforms and seeds are given, or id_range or filters is not as in `guided_probs`

    Examples:
        >>> logits = torch.tensor([[[0.0, 2.0, 1.0, -1.0]]])
        >>> settings = dict(guidance=1.0, temperature=1.0, top_k=3, top_p=1.0)
        >>> level = draft_children(logits, None, torch.tensor([[[0.9, 0.0, 0.5, 0.5]]]), **settings)
        >>> level.tokens                                 # after three the row is empty
        tensor([[[2, 0, 1, 0]]])
        >>> level.probs.round(decimals=2)
        tensor([[[0.0900, 0.6700, 0.2400, 0.0000]]])
        >>> draft_children(logits, None, None, **settings | dict(temperature=0.0), seeds=torch.tensor([7]),
        ...                positions=torch.tensor([[0]]), num_children=3).tokens
        tensor([[[1, 2, 0]]])
    """
    B, F, V = check_logits(logits, uncond, nodes="F")
    settings = check_settings(guidance, temperature, top_k, top_p, min_p, logits, uncond)
    ids = check_filters(id_range, filters, like=logits, nodes="F")
    uniforms, *noise, num_children = check_draws(uniforms, seeds, positions, num_children, like=logits)
    return _call(backend, logits, uncond, uniforms, *settings, *noise, *ids, filters, num_children)


def _oracle(logits: Tensor, uncond: Tensor | None, uniforms: Tensor | None, guidance: Tensor, temperature: Tensor,
            top_k: Tensor, top_p: Tensor, min_p: Tensor | None, seeds: Tensor | None, positions: Tensor | None,
            id_range: Tensor | None, first_id: int, last_id: int, filters: str, num_children: int):
    (B, F, _), K = logits.shape, num_children
    probs, _ = guided_probs(logits, uncond, guidance, temperature, top_k, top_p, min_p, id_range, first_id, last_id,
                            filters)
    tokens, _, status = draw_children(probs, uniforms, seeds, positions, K)
    width = torch.full((B,), K, dtype=torch.int32, device=logits.device)
    likeliest = expand_tree(probs, probs.new_zeros(B, F), width, K)[0]
    return torch.where((temperature == 0)[:, None, None], likeliest, tokens), probs, status


def _meta(logits, top_k, num_children):
    nodes = logits.shape[:2]
    return (logits.new_empty((*nodes, num_children), dtype=torch.int64),
            torch.empty_like(logits, dtype=torch.float32), top_k.new_empty(nodes))


_call = define("draft_children", oracle=_oracle, meta=_meta, result=DraftChildrenResult)
