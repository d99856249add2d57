"""How one program verifies a request by the rules of csrc/shared/chain_rules.h: block verification, and FLy's."""
import triton
import triton.language as tl

from ._noise import log
from ._rows import (
    EMPTY_RESIDUAL,
    FIXED_ONE,
    FIXED_UNIT,
    INVALID_DRAFT,
    INVALID_ROW,
    INVALID_TREE,
    accept_prob,
    accepts,
    draw,
    draw_residual,
    load_mass,
    to_fixed_point,
)
from ._verify_greedy import row_argmax


@triton.jit
def read_rows(row, draft_row, tokens, i, num_drafts, reads_draft, V, BLOCK: tl.constexpr):
    """Row i and draft i: the status bits of what is wrong, the token, its masses in target and draft, the totals."""
    total, is_valid = to_fixed_point(row, V, None, 0, BLOCK)
    has_draft = is_valid & (i < num_drafts)
    draft_total = total * 0
    token = tl.load(tokens + i, mask=has_draft, other=0).to(tl.int64)
    is_token = (token >= 0) & (token < V)
    status = tl.where(has_draft & (is_token == 0), INVALID_TREE, 0)
    token_draft_mass = total * 0
    if draft_row is not None:
        if has_draft & reads_draft:
            draft_total, is_draft_valid = to_fixed_point(draft_row, V, None, 0, BLOCK)
            token_draft_mass = load_mass(draft_row, token, is_token, True)
            status = tl.where(is_draft_valid & ((is_token == 0) | (token_draft_mass > 0)), status, INVALID_DRAFT)
    status = tl.where(is_valid, status, INVALID_ROW)
    return status, token, load_mass(row, token, is_token, True), token_draft_mass, total, draft_total


@triton.jit
def draw_after(row, draft_row, mass, is_rejected, is_greedy, token, token_mass, total, draft_total, uniform, status, V,
               BLOCK: tl.constexpr):
    """The token after accepted drafts, and the status: from the residual of a rejected draft, or from the row."""
    next_token = total * 0
    if (status & INVALID_ROW) == 0:
        if is_greedy:
            _, argmax = row_argmax(row, V, None, None, BLOCK)
            next_token = argmax.to(tl.int64)
        else:
            residual_total = total * 0
            if is_rejected:
                if draft_row is not None:
                    next_token, residual_total = draw_residual(
                        row, draft_row, V, total, draft_total, 0.0, uniform, None, 0, 0, False, BLOCK)
                else:
                    residual_total = total - token_mass
                    to_fixed_point(row, V, mass, V, BLOCK)
                    tl.debug_barrier()
                    tl.store(mass + token, total * 0)
                    tl.debug_barrier()
                    next_token = draw(mass, V, residual_total, uniform, False, BLOCK)
                    tl.debug_barrier()
                status |= tl.where(residual_total == 0, EMPTY_RESIDUAL, 0)
            if residual_total == 0:
                next_token = draw(row, V, total, uniform, True, BLOCK)
    return next_token, status


@triton.jit
def row_entropy(row, V, total, BLOCK: tl.constexpr):
    """Of the three likeliest tokens, in nats."""
    max_mass, last_id = row_argmax(row, V, None, None, BLOCK)
    entropy = 0.0
    for _ in tl.static_range(3):
        p = (max_mass.to(tl.float64) / total.to(tl.float64)).to(tl.float32)
        entropy += tl.where(p > 0.0, -(p * log(tl.where(p > 0.0, p, 1.0))), 0.0)
        max_mass, last_id = row_argmax(row, V, max_mass, last_id, BLOCK)
        max_mass = tl.maximum(max_mass, 0)
    return entropy


@triton.jit
def verify_block(rows, draft_rows, tokens, uniforms, bonus, N, V, BLOCK: tl.constexpr):
    """Returns num_accepted, next_token, tv_excess, status; N is the number of drafts."""
    zero = tl.program_id(0).to(tl.int64) * 0
    num_accepted = tl.full((), 0, tl.int64)  # Triton 3.9 does not carry an alias of `i` to which the loop assigns `i`
    next_token = zero
    status = zero.to(tl.int32)
    found = zero.to(tl.int32)
    p = zero.to(tl.float64) + 1.0
    as_last = zero == 0  # whether the drafts are accepted if they are all
    i = zero
    descends = zero == 0
    if bonus is not None:
        if N == 0:
            next_token = tl.load(bonus)
            descends = zero != 0
    while descends:
        row = rows + i * V
        draft_row = draft_rows + i * V
        bits, token, token_mass, token_draft_mass, total, draft_total = read_rows(
            row, draft_row, tokens, i, N, zero == 0, V, BLOCK)
        uniform = tl.load(uniforms + i)
        descends = (bits == 0) & (i < N)
        if descends & (i > 0):
            drawn, residual_total = draw_residual(
                row, draft_row, V, total, p * draft_total.to(tl.float64), 0.0, tl.load(uniforms), None, 0, 0, False,
                BLOCK)
            s = p * (residual_total.to(tl.float64) * FIXED_UNIT)
            if uniform.to(tl.float64) * (s + (1.0 - p)) < s:
                num_accepted = i
                next_token = drawn
                status = zero.to(tl.int32)
        else:
            if as_last:
                num_accepted = i
                next_token, status = draw_after(row, draft_row, None, descends, zero != 0, token, token_mass, total,
                                                draft_total, tl.load(uniforms), bits.to(tl.int32), V, BLOCK)
        found = bits.to(tl.int32)
        if descends:
            uniform = tl.load(uniforms + i + 1)
            as_last = accepts(True, uniform, token_mass, total, token_draft_mass, draft_total, p)
            p = accept_prob(True, token_mass, total, token_draft_mass, draft_total, p)
            i += 1
            descends = p * FIXED_ONE >= 1.0
            if bonus is not None:
                if descends & (i == N):
                    descends = zero != 0
                    if as_last:
                        num_accepted = i
                        next_token = tl.load(bonus)
                        status = zero.to(tl.int32)
    return num_accepted.to(tl.int32), next_token, zero.to(tl.float64), status | found


@triton.jit
def verify_fly(rows, draft_rows, tokens, uniforms, bonus, mass, excess, is_greedy, N, V, window, entropy,
               BLOCK: tl.constexpr):
    """Returns num_accepted, next_token, tv_excess, status; N is the number of drafts, `excess` (N) is scratch."""
    zero = tl.program_id(0).to(tl.int64) * 0
    num_accepted = tl.full((), 0, tl.int64)  # Triton 3.9 does not carry an alias of `i` to which the loop assigns `i`
    next_token = zero
    status = zero.to(tl.int32)
    tv_excess = zero.to(tl.float64)
    is_sampled = is_greedy == 0
    if draft_rows is None:
        is_sampled = zero != 0
    num_in_row = zero
    is_deferred = zero != 0
    i = zero
    descends = zero == 0
    while descends:
        at_bonus = zero != 0
        if bonus is not None:
            at_bonus = i == N
        if at_bonus:
            if bonus is not None:
                num_accepted = i
                next_token = tl.load(bonus)
                status = zero.to(tl.int32)
            descends = zero != 0
        else:
            row = rows + i * V
            draft_row = None
            if draft_rows is not None:
                draft_row = draft_rows + i * V
            bits, token, token_mass, token_draft_mass, total, draft_total = read_rows(
                row, draft_row, tokens, i, N, is_greedy == 0, V, BLOCK)
            is_tried = (bits == 0) & (i < N)
            is_accepted = zero != 0
            may_defer = zero != 0
            if is_tried:
                prob = accept_prob(is_sampled, token_mass, total, token_draft_mass, draft_total, tv_excess * 0.0 + 1.0)
                is_accepted = accepts(is_sampled, tl.load(uniforms + i + 1), token_mass, total, token_draft_mass,
                                      draft_total, tv_excess * 0.0 + 1.0)
                if is_greedy:
                    _, argmax = row_argmax(row, V, None, None, BLOCK)
                    is_accepted = token == argmax
                    prob = is_accepted.to(tl.float64)
                may_defer = ((is_deferred == 0) & (token_mass > 0) & (i + window < N)
                             & ((is_accepted == 0) | (prob < 1.0)))
                if may_defer:
                    may_defer = row_entropy(row, V, total, BLOCK) >= entropy
                tl.store(excess + i, tl.where(may_defer, 1.0 - prob, 0.0))
                tl.debug_barrier()
            if is_accepted:
                num_in_row += 1
                if (num_in_row >= window) & (i >= window):
                    tv_excess += tl.load(excess + i - window)
                is_deferred = is_deferred & (num_in_row < window)
            else:
                descends = may_defer
                if is_deferred == 0:
                    num_accepted = i
                    next_token, status = draw_after(row, draft_row, mass, is_tried, is_greedy, token, token_mass, total,
                                                    draft_total, tl.load(uniforms), bits.to(tl.int32), V, BLOCK)
                is_deferred = zero == 0
                num_in_row = zero
            i += 1
    return num_accepted.to(tl.int32), next_token, tv_excess, status
