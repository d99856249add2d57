"""verify_chain: verify_tree for chains of different lengths, one after the other, as serving code holds them."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import INTEGERS, check, check_dims, integers, setting
from ._define import define
from .status import INVALID_TREE
from .token_log_probs import log_probs_of
from .verify_tree import Rule, check_rule, verify_nodes


class VerifyChainResult(NamedTuple):
    """What `verify_chain` returns. Its docstring explains the fields."""
    num_accepted: Tensor  # (B,) int32
    next_token: Tensor    # (B,) int64
    tv_excess: Tensor     # (B,) float32
    status: Tensor        # (B,) int32
    log_probs: Tensor | None = None


def verify_chain(target_probs: Tensor, draft_tokens: Tensor, cu_num_draft_tokens: Tensor, uniforms: Tensor, *,
                 bonus_tokens: Tensor | None = None, draft_probs: Tensor | None = None,
                 neighbors: Tensor | None = None, delta: Tensor | float | None = None, cutoff: str = "tvd",
                 offset: int = 0, omega: Tensor | float | None = None, residual: str = "optimal",
                 empty: str = "target", greedy: Tensor | bool | None = None, log_probs: bool = False,
                 backend: str | None = None) -> VerifyChainResult:
    """Accept the leading drafts of each request, one guess for each position, and draw the token that follows them.

    This is `verify_tree` on trees in which every node has one child, with equal decisions, bit for bit. But requests
    may have different numbers of drafts, also none, and nothing is padded. Request b's drafts are

        draft_tokens[cu_num_draft_tokens[b - 1]:cu_num_draft_tokens[b]]        from 0 for b = 0

    A request with n drafts has n + 1 rows of target_probs: row i is the target's distribution after the first i of
    them. The rows of all requests follow each other. With `bonus_tokens` the last row of each is left out: the token
    that follows if all drafts are accepted has been drawn from it already. Drafts from cu_num_draft_tokens[B - 1] on,
    and rows and uniforms after the last request's, belong to no request: buffers may be larger than their content.

    (vLLM's rejection sampler takes drafts in this form; Leviathan et al., arXiv:2211.17192.)

    Args:
        target_probs:         (T, V)   float32         T = D + B; with bonus_tokens T = D
        draft_tokens:         (D,)     int32 or int64  in [0, V)
        cu_num_draft_tokens:  (B,)     int32 or int64  how many drafts requests 0 to b have together
        uniforms:             (D + B,) float32         in [0, 1): n + 1 of each request, one request after the other.
                                                       The first draws the next token, the i-th after it decides the
                                                       i-th draft
        bonus_tokens:         (B,)     int32 or int64  the next token if all drafts are accepted; None: it is drawn
        draft_probs:          (D, V)   float32         row d is the distribution that draft d was drawn from; None: each
                                                       draft is a point mass
        neighbors:            (C, k) uint16, int32 or int64  each code's neighbors, nearest first: distinct, itself
                                                             excluded
        delta:                (B,) float32 or a number >= 0   how much the cutoff allows
        cutoff:               the rule by which delta limits the neighbors: "tvd", "ratio" or "jsd"
        offset:               the token id of code 0; a token outside [offset, offset + C) has no neighbors
        omega:                (B,) float32 or a number >= 0   the factor on the accept test of every draft; None is 1
        residual:             "optimal", "relaxed" or "released"
        empty:                "target" or "uniform": what takes the place of an empty residual
        greedy:               (B,) bool, or one for all  which requests are greedy; None: no request
        log_probs:            whether to compute the log-probabilities of the accepted drafts and next tokens, too
        backend:              None for the device's own kernel; a name from `backends()` to force one

    Returns:
        num_accepted:  (B,) int32    how many drafts are accepted
        next_token:    (B,) int64    the token that follows them, in [0, V); a bonus token as it was given
        tv_excess:     (B,) float32  the added total variation, estimated, as in verify_tree
        status:        (B,) int32    INVALID_TREE: a token outside [0, V); the drafts end there. Or the request's drafts
                                     are not where they can be: cu_num_draft_tokens has fallen, is negative or has gone
                                     beyond D, here or at an earlier request; nothing is accepted, and next_token is 0.
                                     INVALID_ROW, INVALID_DRAFT, INVALID_RULE, EMPTY_RESIDUAL: as in verify_tree. A
                                     request without drafts needs no rule: its omega is not read
        log_probs:     (T,) float32  in nats, of the token that each row of target_probs gave, in this row: an accepted
                                     draft, or the next token; -inf for probability 0, 0 where a row gave none. A bonus
                                     token has no row. Where neighbors or omega above 1 relax the rule, the target has
                                     not drawn the tokens, but these are its probabilities still. None unless asked for

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above, V is 0, neighbors come without delta,
            cutoff, residual or empty is unknown, or "released" with a single column

    Examples:
        >>> import torch
        >>> from specvis_kernels import verify_chain
        >>> row = [0.5, 0.25, 0.125, 0.125]
        >>> target_probs = torch.tensor([row, row, row, row])     # of two requests: with two drafts, and with none
        >>> result = verify_chain(target_probs, torch.tensor([0, 1]), torch.tensor([2, 2]),
        ...                       torch.tensor([0.6, 0.4, 0.3, 0.0]))
        >>> result.num_accepted  # token 0: 0.4 is below its probability, 1/2; token 1: 0.3 is not below 1/4
        tensor([1, 0], dtype=torch.int32)
        >>> result.next_token    # the residual without token 1, at 0.6; the second row, at 0
        tensor([0, 0])
    """
    T, V = check_dims("target_probs", target_probs, "TV", not_empty="V")
    D, = check_dims("draft_tokens", draft_tokens, "D")
    B, = check_dims("cu_num_draft_tokens", cu_num_draft_tokens, "B")
    check("target_probs", target_probs, torch.float32, T=D + B if bonus_tokens is None else D, V=V)
    check("draft_tokens", draft_tokens, INTEGERS, like=target_probs, D=D)
    check("cu_num_draft_tokens", cu_num_draft_tokens, INTEGERS, like=target_probs, B=B)
    check("uniforms", uniforms, torch.float32, like=target_probs, **{"D + B": D + B})
    if bonus_tokens is not None:
        bonus_tokens = integers("bonus_tokens", bonus_tokens, torch.int64, target_probs, B=B)
    if draft_probs is not None:
        check("draft_probs", draft_probs, torch.float32, like=target_probs, D=D, V=V)
    _, delta, _, offset = check_rule(None, None, neighbors, delta, cutoff, offset, None, residual, empty, 0,
                                  like=target_probs.expand(B, T, V))
    if omega is not None:
        omega = setting("omega", omega, torch.float32, target_probs, at_least=0, B=B)
    if greedy is not None:
        greedy = setting("greedy", greedy, torch.bool, target_probs, B=B)
    result = _call(backend, target_probs, draft_tokens, cu_num_draft_tokens, uniforms, bonus_tokens, draft_probs,
                   neighbors, delta, omega, greedy, cutoff, offset, residual, empty)
    if not log_probs:
        return result
    return result._replace(log_probs=_log_probs(target_probs, draft_tokens, cu_num_draft_tokens, result,
                                                num_bonus_rows=0 if bonus_tokens is not None else 1))


def _log_probs(target_probs: Tensor, draft_tokens: Tensor, cu_num_draft_tokens: Tensor, result: VerifyChainResult,
               num_bonus_rows: int) -> Tensor:
    """(T,) see `verify_chain`. num_bonus_rows: how many rows a request has beside those of its drafts"""
    T, D, B, device = len(target_probs), len(draft_tokens), len(cu_num_draft_tokens), target_probs.device
    if B == 0:
        return target_probs.new_zeros(T)
    first, num_drafts, is_in_place = _drafts_of_requests(cu_num_draft_tokens, D)
    begin, row = first + torch.arange(B, device=device) * num_bonus_rows, torch.arange(T, device=device)
    request = ((begin[:, None] <= row) & is_in_place[:, None]).sum(0).sub(1).clamp(min=0)  # of each row
    index, num_accepted = row - begin[request], result.num_accepted[request]
    draft = torch.nn.functional.pad(draft_tokens.long(), (0, 1))[(row - request * num_bonus_rows).clamp(0, D)]
    tokens = torch.where(index < num_accepted, draft, result.next_token[request])
    has_token = (index <= num_accepted) & (index < num_drafts[request] + num_bonus_rows) & is_in_place[request]
    return torch.where(has_token, log_probs_of(target_probs, tokens), 0.0)


def _drafts_of_requests(cu_num_draft_tokens: Tensor, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first draft of each request, how many it has, and whether they are where they can be."""
    end = cu_num_draft_tokens.long()
    first = torch.nn.functional.pad(end[:-1], (1, 0))
    is_in_place = ((first <= end) & (end <= D)).long().cumprod(0) == 1
    return torch.where(is_in_place, first, 0), torch.where(is_in_place, end - first, 0), is_in_place


def _oracle(target_probs: Tensor, draft_tokens: Tensor, cu_num_draft_tokens: Tensor, uniforms: Tensor,
            bonus_tokens: Tensor | None, draft_probs: Tensor | None, neighbors: Tensor | None, delta: Tensor | None,
            omega: Tensor | None, greedy: Tensor | None, cutoff: str, offset: int, residual: str, empty: str):
    """A draft is tried against a row of its own. So each of the R rows is a tree of two nodes, a root and its draft."""
    (_, V), D, B = target_probs.shape, len(draft_tokens), len(cu_num_draft_tokens)
    R, device = D + B, target_probs.device
    if B == 0:
        return _meta(target_probs, cu_num_draft_tokens)
    first, num_drafts, is_in_place = _drafts_of_requests(cu_num_draft_tokens, D)

    row = torch.arange(R, device=device)
    begin = torch.where(is_in_place, first + torch.arange(B, device=device), R)  # each request's first row
    request = ((begin.unsqueeze(1) <= row).sum(0) - 1).clamp(min=0)              # of each row
    has_draft = (row >= begin[request]) & (row < begin[request] + num_drafts[request])
    draft = (row - request).clamp(0, max(D - 1, 0))

    # The row after all others, which every request may read, makes token 0 certain.
    certain = (torch.arange(V, device=device) == 0).float().unsqueeze(0)
    rows = torch.cat([target_probs, certain])
    root = row if bonus_tokens is None else torch.where(has_draft, draft, len(rows) - 1)

    def of_row(setting):
        return None if setting is None else setting[request]

    tokens = torch.nn.functional.pad(draft_tokens.long(), (0, 1))[draft]
    no_link = torch.full((R, 2), -1, device=device)
    child = torch.where(has_draft.unsqueeze(1), no_link.new_tensor([[1, -1]]), no_link)
    draw_and_accept = torch.stack([uniforms[begin.clamp(max=R - 1)[request]], uniforms[(row + 1).clamp(max=R - 1)]], 1)
    omega = None if omega is None else torch.where(has_draft, omega[request], 1.0).unsqueeze(1)
    _, is_accepted, next_token, tv_excess, status = verify_nodes(
        lambda node: rows[torch.where(node == 0, root, len(rows) - 1)], V,
        (torch.stack([tokens, tokens], 1), child, no_link, draw_and_accept),
        lambda _: draft_probs[draft], 0 if draft_probs is None or D == 0 else 1, child - 1,
        Rule(neighbors, of_row(delta), omega, cutoff, offset, residual, empty, 1), of_row(greedy))

    # A request's first row whose draft is not accepted: at the latest the row after its drafts.
    last = torch.where(is_accepted == 1, R - 1, row).flip(0).cummin(0).values.flip(0)[begin.clamp(max=R - 1)]
    is_visited = (row >= begin.unsqueeze(1)) & (row <= last.unsqueeze(1))
    num_accepted, next_token, status = last - begin, next_token[last], status[last]
    tv_excess = torch.where(is_visited, tv_excess, 0.0).sum(1)
    if bonus_tokens is not None:
        next_token = torch.where(num_accepted == num_drafts, bonus_tokens, next_token)
    return (torch.where(is_in_place, num_accepted, 0).int(), torch.where(is_in_place, next_token, 0),
            torch.where(is_in_place, tv_excess, 0.0), torch.where(is_in_place, status, INVALID_TREE).int())


def _meta(target_probs, cu_num_draft_tokens):
    B = len(cu_num_draft_tokens)
    return (target_probs.new_empty(B, dtype=torch.int32), target_probs.new_empty(B, dtype=torch.int64),
            target_probs.new_empty(B), target_probs.new_empty(B, dtype=torch.int32))


_call = define("verify_chain", oracle=_oracle, meta=_meta, result=VerifyChainResult, batch=None)
