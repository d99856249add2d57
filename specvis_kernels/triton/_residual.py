"""The residual after a rejection, in scratch of the program that verifies a request, see _verify.py."""
import triton
import triton.language as tl

from ._rows import FIXED_ONE, residual_mass


@triton.jit
def fill_uniform(mass, V, BLOCK: tl.constexpr):
    """Sets mass to the uniform distribution; returns its total."""
    each = tl.full((), FIXED_ONE, tl.float64).to(tl.int64) // V
    start = 0
    while start < V:
        v = start + tl.arange(0, BLOCK)
        tl.store(mass + v, tl.zeros([BLOCK], tl.int64) + each, mask=v < V)
        start += BLOCK
    return each * V


@triton.jit
def clear_neighbors(mass, V, token_neighbors, count, offset, BLOCK_K: tl.constexpr):
    """Sets the mass of the first `count` neighbors to 0; returns its sum, in which an id counts once."""
    sums = tl.zeros([BLOCK_K], tl.int64)
    start = count * 0
    while start < count:
        j = start + tl.arange(0, BLOCK_K)
        ids = tl.load(token_neighbors + j, mask=j < count, other=0).to(tl.int64) + offset
        in_vocabulary = (j < count) & (ids >= 0) & (ids < V)
        # As atomic_xchg, which Triton 3.7 and 3.8 do not compile for AMD's GPUs.
        cleared = tl.atomic_and(mass + ids, tl.zeros([BLOCK_K], tl.int64), mask=in_vocabulary)
        sums += tl.where(in_vocabulary, cleared, 0)
        start += BLOCK_K
    return tl.sum(sums, axis=0)


@triton.jit
def protect_neighbors(draft_mass, V, token_neighbors, count, offset, BLOCK_K: tl.constexpr):
    """Marks the first `count` neighbors by negative numbers: the next subtract() skips and unmarks them."""
    start = count * 0
    while start < count:
        j = start + tl.arange(0, BLOCK_K)
        ids = tl.load(token_neighbors + j, mask=j < count, other=0).to(tl.int64) + offset
        in_vocabulary = (j < count) & (ids >= 0) & (ids < V)
        entry = tl.load(draft_mass + ids, mask=in_vocabulary, other=0)
        tl.store(draft_mass + ids, tl.where(entry >= 0, -entry - 1, entry), mask=in_vocabulary)
        tl.debug_barrier()  # an id listed twice must be seen as marked
        start += BLOCK_K


@triton.jit
def subtract(mass, draft_mass, V, total, draft_total, slack, BLOCK: tl.constexpr):
    """Sets mass to the residual after a child from the draft row; returns its total."""
    totals = tl.zeros([BLOCK], tl.int64)
    start = 0
    while start < V:
        v = start + tl.arange(0, BLOCK)
        entry = tl.load(mass + v, mask=v < V, other=0)
        draft_entry = tl.load(draft_mass + v, mask=v < V, other=0)
        tl.store(draft_mass + v, tl.where(draft_entry < 0, -draft_entry - 1, draft_entry), mask=v < V)
        residual = residual_mass(entry, total, tl.maximum(draft_entry, 0), draft_total, slack)
        tl.store(mass + v, residual, mask=v < V)
        totals += residual
        start += BLOCK
    return tl.sum(totals, axis=0)


@triton.jit
def reject(mass, draft_mass, V, token, token_mass, relaxed_mass, token_draft_mass, total, draft_total, is_sampled,
           omega, neighbors, num_kept, k, offset, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sets mass to the residual after the rejected token, and takes the token from draft_mass; returns their totals."""
    slack = tl.where(omega < 1.0, 1.0 - omega, 0.0)  # the share of R that stays at least
    if RESIDUAL != "optimal":
        slack = slack * 0.0
    if draft_mass is not None:
        if is_sampled:
            if neighbors is not None and RESIDUAL == "relaxed":
                clear_neighbors(mass, V, neighbors + (token - offset) * k, num_kept, offset, BLOCK_K)
                tl.debug_barrier()
                tl.store(mass + token, relaxed_mass)
            if neighbors is not None and RESIDUAL == "released":
                protect_neighbors(draft_mass, V, neighbors + (token - offset) * k,
                                  tl.where(num_kept > 0, k, 0), offset, BLOCK_K)
            tl.debug_barrier()
            total = subtract(mass, draft_mass, V, total, draft_total, slack, BLOCK)
            tl.debug_barrier()
            tl.store(draft_mass + token, token * 0)
            draft_total -= token_draft_mass
    if is_sampled == 0:
        left = (slack * token_mass.to(tl.float64)).to(tl.int64)
        tl.store(mass + token, left)
        total += left - token_mass
        if neighbors is not None and RESIDUAL != "optimal":
            tl.debug_barrier()
            num_cleared = num_kept
            if RESIDUAL == "released":
                num_cleared = tl.where(num_kept > 0, k, 0)
            total -= clear_neighbors(mass, V, neighbors + (token - offset) * k, num_cleared, offset, BLOCK_K)
    return total, draft_total
