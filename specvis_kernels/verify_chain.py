"""verify_chain: verify_tree for chains of different lengths, one after the other, as serving code holds them."""
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from ._candidate import Candidate, residual_mass
from ._checks import INTEGERS, check, check_count, check_dims, check_one_of, integers, setting
from ._define import checked_once, checks, define
from ._numbers import FIXED_ONE, draw, log, to_fixed_point
from .status import EMPTY_RESIDUAL, INVALID_DRAFT, INVALID_ROW, INVALID_TREE, StatusError
from .verify_tree import Rule, check_rule, verify_nodes

RULES = ("strict", "block", "fly")


class VerifyChainResult(NamedTuple):
    num_accepted: Tensor  # (B,) int32
    next_token: Tensor    # (B,) int64
    tv_excess: Tensor     # (B,) float32
    status: Tensor        # (B,) int32


@checked_once
def verify_chain(target_probs: Tensor, draft_tokens: Tensor, cu_num_draft_tokens: Tensor, uniforms: Tensor, *,
                 bonus_tokens: Tensor | None = None, draft_probs: Tensor | None = None,
                 neighbors: Tensor | None = None, delta: Tensor | float | None = None, cutoff: str = "tvd",
                 offset: int = 0, omega: Tensor | float | None = None, residual: str = "optimal",
                 empty: str = "target", greedy: Tensor | bool | None = None, rule: str = "strict",
                 window: int | None = None, entropy: float | None = None,
                 backend: str | None = None) -> VerifyChainResult:
    """Accept the leading drafts of each request, one guess for each position, and draw the token that follows them.

    This is `verify_tree` on trees in which every node has one child, with equal decisions, bit for bit. But requests
    may have different numbers of drafts, also none, and nothing is padded. Request b's drafts are

        draft_tokens[cu_num_draft_tokens[b - 1]:cu_num_draft_tokens[b]]        from 0 for b = 0

    A request with n drafts has n + 1 rows of target_probs: row i is the target's distribution after the first i of
    them. The rows of all requests follow each other. With `bonus_tokens` the last row of each is left out: the token
    that follows if all drafts are accepted has been drawn from it already. Drafts from cu_num_draft_tokens[B - 1] on,
    and rows and uniforms after the last request's, belong to no request: buffers may be larger than their content.
    With SPECVIS_CHECK=1 in the environment these are an error (StatusError): it is the sign of counts that were not
    summed up.

    (vLLM's rejection sampler takes drafts in this form; Leviathan et al., arXiv:2211.17192.)

    Two other rules look at more than one draft. They take no neighbors and no omega.

    - "block" (Sun et al., arXiv:2403.10444) is lossless, and accepts as many drafts or more, in the mean.
      The first i drafts have the ratio p_i = min(1, p_(i-1) P_i(x_i) / Q_i(x_i)), with p_0 = 1; a ratio below 2^-42
      ends the drafts before it. With s_i, the sum of max(p_i P_(i+1) - Q_(i+1), 0), all i are accepted for which i is
      the largest with u_i < s_i / (s_i + 1 - p_i), for the last draft u_n < p_n; the next token is drawn from that
      residual, or from P_(n+1). Without draft_probs it is the strict rule: no lossless rule accepts more point masses.
    - "fly" (Li et al., arXiv:2511.22972, as vLLM has it) is lossy. A draft that the strict rule rejects is accepted if
      it has a probability, the entropy of its row is high, and the strict rule accepts the next `window` drafts. The
      entropy is -sum p log p in nats over the row's three largest probabilities p, which need not sum to 1. vLLM 0.33
      takes 0.3 for the threshold, and a window of 6, or of one less than the most drafts of a request if that is less.

    A greedy request accepts argmaxes by "block" too; by "fly" the rejected drafts are those that are no argmax.

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
        rule:                 "strict", "block" or "fly"
        window:               how many drafts after a rejected one "fly" looks at, >= 1
        entropy:              the least entropy at which "fly" does so, in nats, >= 0, as float32; inf: never
        backend:              None for the device's own kernel; a name from `backends()` to force one

    Returns:
        num_accepted:  (B,) int32    how many drafts are accepted
        next_token:    (B,) int64    the token that follows them, in [0, V); a bonus token as it was given
        tv_excess:     (B,) float32  the added total variation, estimated, as in verify_tree. By "fly" a sum over the
                                     drafts on the way that have such an entropy and such drafts after them, and that
                                     no rejected draft needed: the probability that the strict rule rejects them. Its
                                     mean is the mean number of drafts that are accepted although rejected, which the
                                     total variation of the emitted tokens does not exceed
        status:        (B,) int32    INVALID_TREE: a token outside [0, V); the drafts end there. Or the request's drafts
                                     are not where they can be: cu_num_draft_tokens has fallen, is negative or has gone
                                     beyond D, here or at an earlier request; nothing is accepted, and next_token is 0.
                                     INVALID_ROW, INVALID_DRAFT, INVALID_RULE, EMPTY_RESIDUAL: as in verify_tree. A
                                     request without drafts needs no rule: its omega is not read. By "block" also what
                                     ends the drafts after those that are accepted

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above, V is 0, neighbors come without delta,
            cutoff, residual, empty or rule is unknown, "released" with a single column, window and entropy are not
            those of "fly", or "block" or "fly" with another residual or empty, with omega or with neighbors

    Examples:
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
    num_bonus = bonus_tokens.numel() if isinstance(bonus_tokens, Tensor) else B
    if 1 < B == (T - D if bonus_tokens is None else num_bonus) + 1:
        raise ValueError(f"cu_num_draft_tokens must be (B,), one number for each request, got {B} numbers where the "
                         f"other arguments are of {B - 1} requests: did you pass a leading 0?")
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
    check_one_of("rule", rule, RULES)
    for name, value, only in (("neighbors", neighbors, None), ("omega", omega, None), ("residual", residual, "optimal"),
                              ("empty", empty, "target")) if rule != "strict" else ():
        if value != only:
            got = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name} must be {only!r} for rule {rule!r}, got {got}")
    if rule == "fly":
        window = check_count("window", window, 1)
        if not isinstance(entropy, Real) or isinstance(entropy, bool) or not entropy >= 0:
            raise ValueError(f"entropy must be a number >= 0 for rule 'fly', got {entropy!r}")
    elif window is not None or entropy is not None:
        raise ValueError(f"window and entropy must be None for rule {rule!r}, got {window!r} and {entropy!r}")
    if rule == "block" and draft_probs is None:
        rule = "strict"
    result = _call(backend, target_probs, draft_tokens, cu_num_draft_tokens, uniforms, bonus_tokens, draft_probs,
                   neighbors, delta, omega, greedy, cutoff, offset, residual, empty, rule, window or 0,
                   float(entropy or 0))
    if B and checks(result.status) and (end := cu_num_draft_tokens[-1].item()) != D:
        raise StatusError("verify_chain: cu_num_draft_tokens must end with the number of drafts, "
                          f"D={D}, got {end}: are the counts summed up?")
    return result


def _drafts_of_requests(cu_num_draft_tokens: Tensor, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first draft of each request, how many it has, and whether they are where they can be."""
    end = cu_num_draft_tokens.long()
    first = torch.nn.functional.pad(end[:-1], (1, 0))
    is_in_place = ((first <= end) & (end <= D)).long().cumprod(0) == 1
    return torch.where(is_in_place, first, 0), torch.where(is_in_place, end - first, 0), is_in_place


def _oracle(target_probs: Tensor, draft_tokens: Tensor, cu_num_draft_tokens: Tensor, uniforms: Tensor,
            bonus_tokens: Tensor | None, draft_probs: Tensor | None, neighbors: Tensor | None, delta: Tensor | None,
            omega: Tensor | None, greedy: Tensor | None, cutoff: str, offset: int, residual: str, empty: str, rule: str,
            window: int, entropy: float):
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
    is_accepted = is_accepted == 1
    if rule != "strict" and D > 0:
        tried = _try(rows[root], None if draft_probs is None else draft_probs[draft], tokens, has_draft)
    if rule == "fly" and D > 0:
        is_deferred, excess = _defer(tried, is_accepted, status, of_row(greedy), window, entropy)
        is_accepted, tv_excess = is_accepted | is_deferred, excess

    # A request's first row whose draft is not accepted: at the latest the row after its drafts.
    last = _first_false(is_accepted, R - 1)[begin.clamp(max=R - 1)]
    is_visited = (row >= begin.unsqueeze(1)) & (row <= last.unsqueeze(1))
    num_accepted, next_token, status = last - begin, next_token[last], status[last]
    if rule == "block" and D > 0:
        samples = torch.ones_like(is_in_place) if greedy is None else ~greedy
        by_block = _verify_block(tried, begin, uniforms, draw_and_accept[:, 0])
        num_accepted, next_token, status = (torch.where(samples, a, b) for a, b in zip(
            by_block, (num_accepted, next_token, status)))
    tv_excess = torch.where(is_visited, tv_excess, 0.0).sum(1)
    if bonus_tokens is not None:
        next_token = torch.where(num_accepted == num_drafts, bonus_tokens, next_token)
    return (torch.where(is_in_place, num_accepted, 0).int(), torch.where(is_in_place, next_token, 0),
            torch.where(is_in_place, tv_excess, 0.0).float(), torch.where(is_in_place, status, INVALID_TREE).int())


def _first_false(flags, if_none):
    """For each of the flags, where the first one from it on is that is False."""
    index = torch.arange(len(flags), device=flags.device)
    return torch.where(flags, if_none, index).flip(0).cummin(0).values.flip(0)


class _Tried(NamedTuple):
    """Every row, with the draft that it decides."""
    mass: Tensor          # (R, V) int64  of the target
    draft_mass: Tensor    # (R, V) int64
    draft: Candidate
    is_row_valid: Tensor  # (R,) bool
    has_draft: Tensor     # (R,) bool
    status: Tensor        # (R,) int64    why a draft that is there cannot be tried


def _try(rows, draft_rows, tokens, has_draft):
    R, V = rows.shape
    is_sampled = torch.full_like(has_draft, draft_rows is not None)
    mass, total, is_row_valid = to_fixed_point(rows)
    draft_mass, draft_total, is_draft_valid = to_fixed_point(rows if draft_rows is None else draft_rows)
    x = tokens.clamp(0, V - 1)
    row = torch.arange(R, device=rows.device)
    status = torch.where((tokens < 0) | (tokens >= V), INVALID_TREE, 0)
    if draft_rows is not None:
        status = torch.where(is_draft_valid & ((status != 0) | (draft_mass[row, x] > 0)), status, INVALID_DRAFT)
    status = torch.where(is_row_valid, torch.where(has_draft, status, 0), INVALID_ROW)
    draft = Candidate(x, is_sampled, mass[row, x], mass[row, x], total, draft_mass[row, x], draft_total,
                      torch.ones(R, dtype=torch.float64, device=rows.device))
    return _Tried(mass, draft_mass, draft, is_row_valid, has_draft, status)


def _defer(tried, is_accepted, status, greedy, window, entropy):
    """FLy: which rows' drafts are accepted although rejected (R,) bool, and what each row adds to tv_excess."""
    row = torch.arange(len(status), device=status.device)
    first_rejected = torch.nn.functional.pad(_first_false(is_accepted, len(row)), (0, 1), value=len(row))[1:]
    top = tried.mass.topk(min(3, tried.mass.shape[1])).values.double()
    top = (top / tried.draft.total.double().unsqueeze(1)).float()
    terms = torch.where(top > 0, -(top * log(torch.where(top > 0, top, 1.0))), 0.0)
    is_high = sum(terms.unbind(1)) >= torch.tensor(entropy, dtype=torch.float32, device=row.device)
    is_rejected = tried.has_draft & (status & ~EMPTY_RESIDUAL == 0) & ~is_accepted
    may_defer = (is_accepted | is_rejected) & (tried.draft.token_mass > 0) & is_high & (first_rejected > row + window)
    accept_prob = tried.draft.accept_prob()
    if greedy is not None:
        accept_prob = torch.where(greedy, is_accepted.double(), accept_prob)
    is_deferred = may_defer & is_rejected
    last_deferred = torch.where(is_deferred, row, -window - 1).cummax(0).values
    last_deferred = torch.nn.functional.pad(last_deferred, (1, 0), value=-window - 1)[:-1]
    is_needed = row - last_deferred <= window
    return is_deferred, torch.where(may_defer & ~is_needed, 1 - accept_prob, 0.0)


def _verify_block(tried, begin, uniforms, draw_uniforms):
    """Block verification: how many drafts each request accepts, the token after them, and the status."""
    R, V = tried.mass.shape
    row = torch.arange(R, device=begin.device)
    is_first = (row.unsqueeze(1) == begin).any(1)
    goes_on = tried.has_draft & (tried.status == 0)

    # A row is read if the drafts before it can be tried, and their ratio is a probability in fixed point.
    ratios, ratio = [], torch.zeros((), dtype=torch.float64, device=begin.device)
    for r in range(R):
        ratios.append(torch.where(is_first[r], 1.0, torch.where(ratio * FIXED_ONE >= 1, ratio, 0.0)))
        draft = Candidate(*(field[r] for field in tried.draft))._replace(omega=ratios[-1])
        ratio = torch.where(goes_on[r], draft.accept_prob(), 0.0)
    p = torch.stack(ratios)
    draft = tried.draft._replace(omega=p)

    # max(p P - Q, 0) is p times max(P - Q / p, 0).
    none = begin.new_zeros(R)
    residual = residual_mass("optimal", tried.mass, tried.draft_mass, tried.draft._replace(
        draft_total=torch.where(goes_on & (p > 0), p * draft.draft_total.double(), 1.0)), none, none.new_empty(R, 0))
    s = p * (residual.sum(1).double() / FIXED_ONE)
    as_last = torch.nn.functional.pad(draft.accepts(torch.nn.functional.pad(uniforms[1:], (0, 1))), (1, 0))[:-1]
    is_accepted = is_first | (p > 0) & torch.where(goes_on, uniforms.double() * (s + (1 - p)) < s, as_last)

    is_empty = goes_on & (residual.sum(1) == 0)
    mass = torch.where((goes_on & ~is_empty).unsqueeze(1), residual, tried.mass)
    next_token = torch.where(tried.is_row_valid, draw(mass, mass.sum(1), draw_uniforms), 0)
    end = torch.nn.functional.pad(begin[1:], (0, 1), value=R).unsqueeze(1)
    is_own = (row >= begin.unsqueeze(1)) & (row < end) & (p > 0)
    last = torch.where(is_own & is_accepted, row, 0).amax(1)
    status = torch.where(is_own, tried.status, 0).amax(1) | torch.where(is_empty, EMPTY_RESIDUAL, 0)[last]
    return last - begin, next_token[last], status


def _meta(target_probs, cu_num_draft_tokens):
    B = len(cu_num_draft_tokens)
    return (target_probs.new_empty(B, dtype=torch.int32), target_probs.new_empty(B, dtype=torch.int64),
            target_probs.new_empty(B), target_probs.new_empty(B, dtype=torch.int32))


_call = define("verify_chain", oracle=_oracle, meta=_meta, result=VerifyChainResult, batch=None)
