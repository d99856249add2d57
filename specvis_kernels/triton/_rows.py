"""How the verification kernels read a row of probabilities: one program, BLOCK entries at a time."""
import os

import triton
import triton.language as tl

from ._kernel import next_power_of_2

FIXED_ONE = tl.constexpr(2.0 ** 42)
FIXED_UNIT = tl.constexpr(2.0 ** -42)
EMPTY_RESIDUAL = tl.constexpr(1)  # the status bits of specvis_kernels/status.py
INVALID_ROW = tl.constexpr(2)
INVALID_TREE = tl.constexpr(4)
INVALID_RULE = tl.constexpr(8)
OUT_OF_TRIES = tl.constexpr(16)
INVALID_DRAFT = tl.constexpr(32)

# The most tokens and neighbors that a program takes at a time. The interpreter is as fast on many as on few.
MAX_BLOCK = {"V": 4096 if os.environ.get("TRITON_INTERPRET") == "1" else 2048, "k": 256}


def block(letter, size):
    """The block size for a dimension of this letter and size."""
    return min(next_power_of_2(size), MAX_BLOCK[letter])


@triton.jit
def fill(pointer, value, first, end):
    """Sets the entries first .. end - 1 to `value`."""
    start = first
    while start < end:
        i = start + tl.arange(0, 32)
        tl.store(pointer + i, tl.full([32], value, pointer.dtype.element_ty), mask=i < end)
        start += 32


@triton.jit
def load_mass(row, v, mask, IS_FLOAT: tl.constexpr):
    """Entries of a row in fixed point: of probabilities (IS_FLOAT), or of a row that is in fixed point already."""
    if IS_FLOAT:
        p = tl.load(row + v, mask=mask, other=0.0)
        return (tl.where((p >= 0.0) & (p <= 2.0), p, 0.0) * FIXED_ONE).to(tl.int64)
    else:
        return tl.load(row + v, mask=mask, other=0)


@triton.jit
def to_fixed_point(probs, V, copy, num_copied, BLOCK: tl.constexpr):
    """A row's total in fixed point and its validity. The first `num_copied` entries go to `copy`, if not None."""
    totals = tl.zeros([BLOCK], tl.int64)
    num_invalid = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < V:
        v = start + tl.arange(0, BLOCK)
        p = tl.load(probs + v, mask=v < V, other=0.0)
        is_prob = (p >= 0.0) & (p <= 2.0)
        mass = (tl.where(is_prob, p, 0.0) * FIXED_ONE).to(tl.int64)
        if copy is not None:
            tl.store(copy + v, mass, mask=v < num_copied)
        totals += mass
        num_invalid += tl.where(is_prob, 0, 1)
        start += BLOCK
    total = tl.sum(totals, axis=0)
    return total, (tl.sum(num_invalid, axis=0) == 0) & (total > 0)


@triton.jit
def jsd(neighbor_mass, token_mass):
    mean = token_mass + neighbor_mass / 2
    relaxed_mass = token_mass + neighbor_mass
    divisor = tl.where(mean > 0, mean, 1.0)
    first = token_mass * tl.log(tl.where(token_mass > 0, token_mass / divisor, 1.0))
    second = relaxed_mass * tl.log(tl.where(relaxed_mass > 0, relaxed_mass / divisor, 1.0))
    return 0.5 * (neighbor_mass * 0.6931471805599453 + first + second)


@triton.jit
def neighbor_prefix(row, V, neighbors, C, k, num_considered, offset, token, token_mass, total, limit, delta,
                    CUTOFF: tl.constexpr, IS_FLOAT: tl.constexpr, BLOCK_K: tl.constexpr):
    """Which of the token's first `num_considered` neighbors the cutoff keeps: their mass, and how many.

    The token and these neighbors have at most the mass `limit`. Only ids that are listed twice could have more.
    """
    token_prob = token_mass.to(tl.float64) / total.to(tl.float64)
    bound = delta.to(tl.float64)
    if CUTOFF == "tvd":
        bound *= total.to(tl.float64)
    if CUTOFF == "ratio":
        bound *= token_mass.to(tl.float64)
    bound = tl.where(delta >= 0.0, bound, 0.0)
    threshold = total * 0 + limit - token_mass
    if CUTOFF != "jsd":
        is_less = bound < threshold.to(tl.float64)
        threshold = tl.where(is_less, tl.where(is_less, bound, 0.0).to(tl.int64), threshold)

    code = token - offset
    active = (delta >= 0.0) & (code >= 0) & (code < C) & (num_considered > 0)
    neighbor_mass = total * 0
    num_kept = num_considered * 0
    while active:
        j = tl.arange(0, BLOCK_K)
        is_considered = num_kept + j < num_considered
        ids = tl.load(neighbors + code * k + num_kept + j, mask=is_considered, other=0).to(tl.int64) + offset
        each_mass = load_mass(row, ids, is_considered & (ids >= 0) & (ids < V), IS_FLOAT)
        sums = neighbor_mass + tl.cumsum(each_mass, axis=0)
        is_over = sums > threshold
        if CUTOFF == "jsd":
            is_over = is_over | (jsd(sums.to(tl.float64) / total.to(tl.float64), token_prob) > bound)
        # Sums only grow: the first entry above the bound, or the table's end, ends the prefix.
        num_new = tl.min(tl.where(is_over | (num_kept + j >= num_considered), j, BLOCK_K), axis=0)
        neighbor_mass += tl.sum(tl.where(j < num_new, each_mass, 0), axis=0)
        num_kept += num_new
        active = (num_new == BLOCK_K) & (num_kept < num_considered)
    return neighbor_mass, num_kept


@triton.jit
def draw_threshold(uniform, total):
    """Inverse CDF: the token is the first whose running sum of mass exceeds this. A NaN counts as 0."""
    target_sum = uniform.to(tl.float64) * total.to(tl.float64)
    is_inside = (target_sum > 0.0) & (target_sum < total.to(tl.float64))
    threshold = tl.where(is_inside, target_sum, 0.0).to(tl.int64)
    return tl.where(target_sum >= total.to(tl.float64), total - 1, threshold)


@triton.jit
def draw(row, V, total, uniform, IS_FLOAT: tl.constexpr, BLOCK: tl.constexpr):
    threshold = draw_threshold(uniform, total)
    start = 0
    sum_before = total * 0
    v = tl.arange(0, BLOCK)
    mass = load_mass(row, v, v < V, IS_FLOAT)
    block_total = tl.sum(mass, axis=0)
    while (start + BLOCK < V) & (sum_before + block_total <= threshold):
        sum_before += block_total
        start += BLOCK
        mass = load_mass(row, start + v, start + v < V, IS_FLOAT)
        block_total = tl.sum(mass, axis=0)
    is_before = (sum_before + tl.cumsum(mass, axis=0) <= threshold).to(tl.int64)
    return tl.minimum(start + tl.sum(is_before, axis=0), V - 1)


@triton.jit
def residual_mass(mass, total, draft_mass, draft_total, slack):
    """max(R - Q, slack R, 0) in fixed point."""
    r = mass.to(tl.float64) * (1.0 / total.to(tl.float64))
    residual = tl.maximum(r - draft_mass.to(tl.float64) * (1.0 / draft_total.to(tl.float64)), slack * r)
    return (tl.maximum(residual, 0.0) * FIXED_ONE).to(tl.int64)


@triton.jit
def load_residual(target_row, draft_row, v, V, total, draft_total, slack, is_treated, token, token_mass,
                  MOVES_MASS: tl.constexpr):
    """The residual of the target's row at tokens v. Treated neighbors, if not None, have lost their mass to `token`
    (MOVES_MASS), or nothing is taken from them."""
    mass = load_mass(target_row, v, v < V, True)
    draft_mass = load_mass(draft_row, v, v < V, True)
    if is_treated is not None:
        treated = tl.load(is_treated + v, mask=v < V, other=0) != 0
        if MOVES_MASS:
            mass = tl.where(v == token, token_mass, tl.where(treated, 0, mass))
        else:
            draft_mass = tl.where(treated, 0, draft_mass)
    return residual_mass(mass, total, draft_mass, draft_total, slack)


@triton.jit
def draw_residual(target_row, draft_row, V, total, draft_total, slack, uniform, is_treated, token, token_mass,
                  MOVES_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """A token from the residual, and the residual's total; if the total is 0 the token means nothing."""
    v = tl.arange(0, BLOCK)
    totals = tl.zeros([BLOCK], tl.int64)
    start = 0
    while start < V:
        totals += load_residual(target_row, draft_row, start + v, V, total, draft_total, slack, is_treated, token,
                                token_mass, MOVES_MASS)
        start += BLOCK
    residual_total = tl.sum(totals, axis=0)
    threshold = draw_threshold(uniform, residual_total)
    begin = 0
    sum_before = residual_total * 0
    residual = load_residual(target_row, draft_row, v, V, total, draft_total, slack, is_treated, token, token_mass,
                             MOVES_MASS)
    block_total = tl.sum(residual, axis=0)
    while (begin + BLOCK < V) & (sum_before + block_total <= threshold):
        sum_before += block_total
        begin += BLOCK
        residual = load_residual(target_row, draft_row, begin + v, V, total, draft_total, slack, is_treated, token,
                                 token_mass, MOVES_MASS)
        block_total = tl.sum(residual, axis=0)
    is_before = (sum_before + tl.cumsum(residual, axis=0) <= threshold).to(tl.int64)
    return tl.minimum(begin + tl.sum(is_before, axis=0), V - 1), residual_total


@triton.jit
def accept_prob(is_sampled, mass, total, token_draft_mass, draft_total, omega_d):
    """The probability that a child of this mass is accepted."""
    numerator = omega_d * mass.to(tl.float64)
    denominator = total.to(tl.float64)
    if is_sampled:
        numerator *= draft_total.to(tl.float64)
        denominator *= token_draft_mass.to(tl.float64)
    is_possible = (mass > 0) & (numerator > 0.0)
    is_certain = numerator >= denominator
    return tl.where(is_possible, tl.where(is_certain, 1.0, numerator / tl.where(is_certain, 1.0, denominator)), 0.0)


@triton.jit
def accepts(is_sampled, uniform, mass, total, token_draft_mass, draft_total, omega_d):
    """u Q(x) < omega * mass, both sides times the totals of target and draft; never without mass."""
    need = uniform.to(tl.float64) * total.to(tl.float64)
    numerator = omega_d * mass.to(tl.float64)
    if is_sampled:
        need = (uniform.to(tl.float64) * token_draft_mass.to(tl.float64)) * total.to(tl.float64)
        numerator = numerator * draft_total.to(tl.float64)
    return (need < numerator) & (mass > 0)
