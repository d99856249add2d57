"""The row of a tree's node, from probabilities or from logits, and the relaxed mass of a token in it.

`rows` is a tuple: the request's probabilities (N, V) or None; and if it is None, its logits (N, V), its logits without
the condition or None, guidance, temperature, top_k, top_p, id_range (N, 2) or None, first_id, last_id, and scratch.
"""
import triton
import triton.language as tl

from ._filters import filter_and_sum, load_probs
from ._rows import FIXED_ONE, neighbor_prefix, to_fixed_point


@triton.jit
def read_row(rows, node, V, mass, num_copied, FILTERS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Reads the row of a node: its total, whether it is valid, and its ids, from the first to one past the last.

    The first `num_copied` entries of probabilities go to `mass`, or all entries of logits.
    """
    probs, logits, uncond, guidance, temperature, top_k, top_p, id_range, first_id, last_id, scratch = rows
    zero = tl.full((), 0, tl.int64)
    if probs is not None:
        total, is_valid = to_fixed_point(probs + node * V, V, mass, num_copied, BLOCK)
        return total, is_valid, zero, zero + V
    else:
        first, last, is_valid, begin, end, best, lowest_kept, total = filter_and_sum(
            logits, uncond, scratch, id_range, node, V, first_id, last_id, guidance, temperature, top_k, top_p, FILTERS,
            BLOCK, BITS)
        sums = tl.zeros([BLOCK], tl.int64)
        start = 0
        while start < V:
            v = start + tl.arange(0, BLOCK)
            p = load_probs(scratch, start, V, begin, end, best, lowest_kept, total, BLOCK)
            entries = (p * FIXED_ONE).to(tl.int64)
            tl.store(mass + v, entries, mask=v < V)
            sums += entries
            start += BLOCK
        return tl.sum(sums, axis=0), is_valid, first.to(tl.int64), last.to(tl.int64)


@triton.jit
def unchanged_row(rows, node, V, mass):
    """The entries that read_row() has read: floats of probabilities, else in fixed point."""
    probs, logits, uncond, guidance, temperature, top_k, top_p, id_range, first_id, last_id, scratch = rows
    if probs is not None:
        return probs + node * V
    else:
        return mass


@triton.jit
def load_link(links, node, of_chain):
    """A child or sibling of a node, or -1."""
    if links is None:
        return of_chain
    else:
        return tl.load(links + node).to(tl.int64)


@triton.jit
def relax(row, V, neighbors, C, k, offset, token, token_mass, total, first_id, last_id, delta, CUTOFF: tl.constexpr,
          RESIDUAL: tl.constexpr, IS_FLOAT: tl.constexpr, BLOCK_K: tl.constexpr):
    """The relaxed mass of a token, and how many neighbors it keeps. A token outside the ids of the row keeps none."""
    relaxed_mass = token_mass
    num_kept = (token * 0).to(tl.int32)
    if neighbors is not None:
        num_considered = k
        if RESIDUAL == "released":
            num_considered = k - 1
        num_considered = tl.where((token >= first_id) & (token < last_id), num_considered, 0)
        neighbor_mass, num_kept = neighbor_prefix(
            row, V, neighbors, C, k, num_considered, offset, token, token_mass, total, total, tl.load(delta), CUTOFF,
            IS_FLOAT, BLOCK_K)
        relaxed_mass += neighbor_mass
    return relaxed_mass, num_kept
