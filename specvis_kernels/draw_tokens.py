"""draw_tokens: the target's own draw at many rows at once, by noise that a seed and a position decide."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import Seeds, check_count, check_seeds, integers
from ._define import checked_once, define
from ._filters import check_filters, check_logits, check_settings, filter_logits, range_of_nodes
from .noise import gumbel_noise
from .status import INVALID_ROW


class DrawTokensResult(NamedTuple):
    tokens: Tensor        # (B, N) int64
    num_accepted: Tensor  # (B,)   int32
    ahead_tokens: Tensor  # (B, N) int64
    status: Tensor        # (B, N) int32


@checked_once
def draw_tokens(logits: Tensor, uncond: Tensor | None, guidance: Tensor | float | None, temperature: Tensor | float,
                top_k: Tensor | int | None, top_p: Tensor | float | None, seeds: Seeds, positions: Tensor, *,
                min_p: Tensor | float | None = None, id_range: Tensor | tuple[int, int] | None = None,
                filters: str = "k_then_p", guesses: Tensor | None = None, ahead: int = 0,
                backend: str | None = None) -> DrawTokensResult:
    """Draw one token from each row of logits. The seed and the position decide the noise, and nothing else does.

    Guidance, temperature, top-k, top-p and min-p work as in `guided_probs`, and keep the same ids. Then

        token = argmax over the kept ids of (logit / temperature + g)

    where g is standard Gumbel noise of (seed, position, id), see `gumbel_noise`. So a token has the probability that
    `guided_probs` gives it, the draws at different positions are independent, and the same row at the same position
    always gives the same token, in any batch and in any order. At temperature 0 the token is the argmax of the logits.
    The lowest id wins a tie. Neither a softmax nor the noise is stored.

    Probabilities are logits too: draw from them by `probs.log()` with temperature 1, top_k 0 and top_p 1.

    A guess is compared with the token that was drawn in its place. Jacobi decoding reads the guesses of the next
    positions in one forward, and keeps the leading guesses that equal their draws: decoding one by one would draw these
    tokens. So the first num_accepted + 1 of `tokens` are final, and the others are guesses for the next step.

    With `ahead`, each row is drawn a second time, with the noise of a position that is `ahead` positions later. On a
    grid of that width this is the position below, and the token is a first guess for it.

    (The Gumbel-max trick: Maddison, Tarlow and Minka, arXiv:1411.0030; shared noise in Jacobi decoding:
    arXiv:2510.24211.)

    Args:
        logits:       (B, N, V) float32, float16 or bfloat16   with the condition
        uncond:       (B, N, V) the same dtype                 without the condition; None: no guidance
        guidance:     (B,) float32 or a number   s, the guidance scale; None, or the number 1, without `uncond`
        temperature:  (B,) float32 or a number   >= 0
        top_k:        (B,) int32 or int64, or a number   off if <= 0 or at least the number of ids; None: off
        top_p:        (B,) float32 or a number in [0, 1]   off if <= 0 or >= 1; None: off
        min_p:        (B,) float32 or a number in [0, 1]   off if <= 0; None: off
        seeds:        (B,) int32 or int64, or integers   one for each request
        positions:    (B, N) int32 or int64   of the token that each row predicts; the low 32 bits count. Rows of one
                                              position draw with equal noise
        id_range:     two integers first, last: the ids [first, last) that every row may draw; or (B, N, 2) int32
                      or int64, the ids of each row. None: all ids
        filters:      "k_then_p" or "p_then_k", the order of top-k and top-p
        guesses:      (B, N) int32 or int64   a guess for each row's token; -1: no guess. None: no guesses at all. The
                                              guess of row n is the token of node n + 1, the last row has none
        ahead:        by how many positions the second draw's noise is later; 0: there is no second draw
        backend:      None for the device's own kernel; a name from `backends()` to force one

    Returns:
        tokens:        (B, N) int64   in [0, V); 0 where the row is invalid
        num_accepted:  (B,)   int32   how many leading guesses equal their tokens; a guess at an invalid row does not
        ahead_tokens:  (B, N) int64   the second draw; equal to `tokens` if ahead is 0
        status:        (B, N) int32   INVALID_ROW: the row is invalid, as in `guided_probs`

    Raises:
        ValueError: a dtype, shape or device differs from the above, id_range is two integers but not
            0 <= first < last <= V, a number is out of its range, N is 0, V is 0 or above 2**19, filters is neither of
            the two, or ahead is negative

    Examples:
        >>> logits = torch.tensor([[4.0, 2.0, 1.0, 0.0]]).repeat(1, 3, 1)  # one request, three positions
        >>> settings = dict(guidance=1.0, temperature=2.0, top_k=3, top_p=1.0, seeds=torch.tensor([1]))
        >>> first = draw_tokens(logits, None, positions=torch.tensor([[0, 1, 2]]), **settings)
        >>> again = draw_tokens(logits, None, positions=torch.tensor([[0, 1, 2]]), guesses=first.tokens, **settings)
        >>> again.num_accepted
        tensor([3], dtype=torch.int32)
    """
    B, N, V = check_logits(logits, uncond)
    settings = check_settings(guidance, temperature, top_k, top_p, min_p, logits, uncond)
    seeds = check_seeds(seeds, logits, B)
    positions = integers("positions", positions, torch.int64, logits, B=B, N=N)
    ids = check_filters(id_range, filters, like=logits)
    if guesses is not None:
        guesses = integers("guesses", guesses, torch.int64, logits, B=B, N=N)
    ahead = check_count("ahead", ahead, 0)
    return _call(backend, logits, uncond, *settings, seeds, positions, *ids, filters, guesses, ahead)


def _oracle(logits: Tensor, uncond: Tensor | None, guidance: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor,
            min_p: Tensor | None, seeds: Tensor, positions: Tensor, id_range: Tensor | None, first_id: int,
            last_id: int, filters: str, guesses: Tensor | None, ahead: int):
    V = logits.shape[-1]
    id_range = range_of_nodes(id_range, first_id, last_id, like=logits)
    row = filter_logits(logits, uncond, guidance, temperature, top_k, top_p, min_p, id_range, filters)

    def draw(positions):
        noise = torch.where(row.is_sampled[..., None], gumbel_noise(seeds, positions, V), 0.0)
        return torch.where(row.is_valid, (row.margins + noise).argmax(-1), 0)

    tokens = draw(positions)
    num_accepted = torch.zeros_like(seeds)
    if guesses is not None:
        num_accepted = (row.is_valid & (guesses == tokens)).long().cumprod(-1).sum(-1)
    ahead_tokens = draw(positions + ahead) if ahead else tokens.clone()
    return tokens, num_accepted.int(), ahead_tokens, torch.where(row.is_valid, 0, INVALID_ROW).int()


def _meta(seeds, positions):
    return (torch.empty_like(positions), seeds.new_empty(seeds.shape, dtype=torch.int32),
            torch.empty_like(positions), positions.new_empty(positions.shape, dtype=torch.int32))


_call = define("draw_tokens", oracle=_oracle, meta=_meta, result=DrawTokensResult)
