"""token_log_probs: what probability a model's logits gave to tokens, before and after the filters."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import check_dims, integers
from ._define import checked_once, define
from ._filters import MASS_ONE, check_filters, check_logits, check_settings, filter_logits, range_of_nodes, to_mass
from ._numbers import exp, log
from .status import INVALID_ROW


class TokenLogProbsResult(NamedTuple):
    sampled: Tensor  # (B, K) float32
    full: Tensor     # (B, K) float32
    status: Tensor   # (B, K) int32


@checked_once
def token_log_probs(logits: Tensor, uncond: Tensor | None, guidance: Tensor | float | None,
                    temperature: Tensor | float, top_k: Tensor | int | None, top_p: Tensor | float | None,
                    tokens: Tensor, *, min_p: Tensor | float | None = None, rows: Tensor | None = None,
                    id_range: Tensor | tuple[int, int] | None = None, filters: str = "k_then_p",
                    backend: str | None = None) -> TokenLogProbsResult:
    """Compute the log-probabilities of given tokens: in the distribution they are sampled from, and without filters.

    Guidance, temperature, top-k, top-p and min-p work as in `guided_probs`, and keep the same ids. With x the logits
    after guidance and temperature, over the row's range of ids:

        sampled = x[token] - log(sum of exp(x) over the kept ids), -inf for an id that is not kept
        full    = x[token] - log(sum of exp(x) over all ids)

    At temperature 0 `full` is at temperature 1, and `sampled` is 0 for every token whose logit is the largest and -inf
    for the others. Importance weights want `sampled`, policy gradients `full`.

    Both are differences to the row's largest logit in float32. The sums are in fixed point and log has one form, so
    all backends give the same bits: within 1e-6 + 1e-6 |log p| of float64 computed from the same x.

    Args:
        logits:       (B, N, V) float32, float16 or bfloat16   with the condition
        uncond:       (B, N, V) the same dtype                 without the condition; None: no guidance
        guidance:     (B,) float32 or a number   s, the guidance scale; None, or the number 1, without `uncond`
        temperature:  (B,) float32 or a number   >= 0
        top_k:        (B,) int32 or int64, or a number   off if <= 0 or at least the number of ids; None: off
        top_p:        (B,) float32 or a number in [0, 1]   off if <= 0 or >= 1; None: off
        min_p:        (B,) float32 or a number in [0, 1]   off if <= 0; None: off
        tokens:       (B, K) int32 or int64   a token outside the row's range of ids has log-probability -inf
        rows:         (B, K) int32 or int64   which of the N rows predicts each token; negative: there is no token.
                                              None: row k predicts token k, and K is N
        id_range:     two integers first, last: the ids [first, last) of every row; or (B, N, 2) int32 or int64, the
                      ids of each row. None: all ids
        filters:      "k_then_p" or "p_then_k", the order of top-k and top-p
        backend:      None for the device's own kernel; a name from `backends()` to force one

    Returns:
        sampled:  (B, K) float32   in nats, at most 0 up to rounding; 0 where there is no token
        full:     (B, K) float32   the same
        status:   (B, K) int32     INVALID_ROW, with log-probabilities -inf: the row is invalid, as in `guided_probs`,
                                   or is not one of the N

    Raises:
        ValueError: a dtype, shape or device differs from the above, id_range is two integers but not
            0 <= first < last <= V, a number is out of its range, N is 0, V is 0 or above 2**19, or filters is neither
            of the two

    Examples:
        >>> logits = torch.tensor([[[0.5, 0.25, 0.125, 0.125]]]).log()  # one request, one row
        >>> tokens = torch.tensor([[0]])
        >>> result = token_log_probs(logits, None, None, temperature=1.0, top_k=2, top_p=1.0, tokens=tokens)
        >>> result.sampled.exp(), result.full.exp()    # among the two likeliest ids, and among all
        (tensor([[0.6667]]), tensor([[0.5000]]))
    """
    B, N, V = check_logits(logits, uncond)
    settings = check_settings(guidance, temperature, top_k, top_p, min_p, logits, uncond)
    ids = check_filters(id_range, filters, like=logits)
    K = N
    if rows is not None:
        _, K = check_dims("rows", rows, "BK")
        rows = integers("rows", rows, torch.int64, logits, B=B, K=K)
    tokens = integers("tokens", tokens, torch.int64, logits, B=B, K=K)
    return _call(backend, logits, uncond, *settings, tokens, rows, *ids, filters)


def _oracle(logits: Tensor, uncond: Tensor | None, guidance: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor,
            min_p: Tensor | None, tokens: Tensor, rows: Tensor | None, id_range: Tensor | None, first_id: int,
            last_id: int, filters: str):
    B, N, V = logits.shape
    if rows is None:
        rows = torch.arange(N, device=logits.device).expand(B, N)
    id_range = range_of_nodes(id_range, first_id, last_id, like=logits)
    request, row, token = torch.arange(B, device=logits.device)[:, None], rows.clamp(0, N - 1), tokens.clamp(0, V - 1)
    is_id, has_token = tokens == token, rows >= 0

    def log_probs(top_k, top_p, min_p):
        kept = filter_logits(logits, uncond, guidance, temperature, top_k, top_p, min_p, id_range, filters)
        total = (to_mass(exp(kept.margins)).sum(-1).double() / MASS_ONE).float()  # equal in any order of summation
        margins = torch.where(is_id & (rows < N), kept.margins[request, row, token], -torch.inf)
        return margins, margins - log(torch.where(kept.is_valid, total, 1.0))[request, row], kept.is_valid[request, row]

    margins, full, is_valid = log_probs(torch.zeros_like(top_k), torch.zeros_like(top_p), None)
    _, sampled, _ = log_probs(top_k, top_p, min_p)
    greedy = torch.where(margins == 0, 0.0, margins.new_tensor(-torch.inf))
    sampled = torch.where(temperature[:, None] == 0, greedy, sampled)
    sampled, full = (torch.where(has_token, x, 0.0) for x in (sampled, full))
    return sampled, full, torch.where(has_token & ~(is_valid & (rows < N)), INVALID_ROW, 0).int()


def _meta(tokens):
    return (tokens.new_empty(tokens.shape, dtype=torch.float32), tokens.new_empty(tokens.shape, dtype=torch.float32),
            tokens.new_empty(tokens.shape, dtype=torch.int32))


_call = define("token_log_probs", oracle=_oracle, meta=_meta, result=TokenLogProbsResult)
