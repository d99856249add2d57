"""commit_kv in Triton: one launch a tensor, one program per block of a column in a run of columns.

It moves its block of each column, one column after the other. So no two programs touch the same memory.
"""
import torch
import triton
import triton.language as tl

from ._kernel import cdiv, kernel, next_power_of_2


@triton.jit
def source_of(accepted_nodes, first, b, P, i):
    """The column of node i of the accepted path; the root is i = 0."""
    return first + tl.load(accepted_nodes + b * P + i - 1, mask=i > 0, other=0).to(tl.int64)


@triton.jit
def moves_to_the_front(accepted_nodes, slots, b, length, first, num_moves, num_slots, B, P, R, T):
    """Whether all of a request's columns are there, and none of its moves overwrites what a later one reads."""
    is_valid = (num_moves >= 0) & (num_moves <= P) & (length >= 0) & (length <= first) & (first < T)
    is_valid = is_valid & (length + num_moves < T)
    last = tl.where(is_valid, num_moves, 0)
    previous = first
    i = b * 0 + 1
    while i <= last:
        source = source_of(accepted_nodes, first, b, P, i)
        is_valid = is_valid & (source > previous) & (source < T)
        previous = source
        i += 1
    if slots is not None:
        r = b
        while r < R:
            i = b * 0
            while i <= last:
                source = source_of(accepted_nodes, first, b, P, i)
                from_slot = tl.load(slots + r * T + source, mask=is_valid, other=0)
                to_slot = tl.load(slots + r * T + length + i, mask=is_valid, other=0)
                is_valid = is_valid & (from_slot >= 0) & (from_slot < num_slots)
                is_valid = is_valid & (to_slot >= 0) & (to_slot < num_slots)
                i += 1
            r += B
    return is_valid


@kernel("cache", "units")
def commit_kv_kernel(
        cache,                         # (outer, R, middle, T, units), or (outer, num_slots, units) with slots
        accepted_nodes,                # (B, P)
        num_accepted, lengths, start,  # (B)
        slots, new_lengths,            # (R, T) or None, (B)
        B, P, R, T, middle, num_slots, units, num_runs, BLOCK: tl.constexpr):
    run = tl.program_id(0).to(tl.int64)
    r = run // middle % R
    b = tl.where(run < num_runs, r % B, run - num_runs)
    length = tl.load(lengths + b)
    first = tl.load(start + b)
    accepted = tl.load(num_accepted + b).to(tl.int64)
    is_valid = moves_to_the_front(accepted_nodes, slots, b, length, first, accepted, num_slots, B, P, R, T)
    if run >= num_runs:               # the programs after the runs write the lengths
        tl.store(new_lengths + b, length + tl.where(is_valid, 1 + accepted, 0))
    else:
        unit = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        last = tl.where(is_valid, accepted, -1)
        i = b * 0
        while i <= last:
            source = source_of(accepted_nodes, first, b, P, i)
            target = length + i
            if slots is not None:
                group = run // (middle * R) * num_slots
                source = group + tl.load(slots + r * T + source)
                target = group + tl.load(slots + r * T + target)
            else:
                source += run * T
                target += run * T
            held = tl.load(cache + source * units + unit, mask=unit < units)
            tl.store(cache + target * units + unit, held, mask=unit < units)
            tl.debug_barrier()        # a later column goes where an earlier one was read
            i += 1


def commit_kv(caches, accepted_nodes, num_accepted, lengths, start, slots, row_dim, column_dim):
    B, P = accepted_nodes.shape
    shape = caches[0].shape
    new_lengths = torch.empty_like(lengths)
    if B == 0:
        return new_lengths
    R, T = slots.shape if slots is not None else (shape[row_dim], shape[column_dim])
    outer, middle = shape[:column_dim].numel(), 1
    if slots is None:
        outer, middle = shape[:row_dim].numel(), shape[row_dim + 1:column_dim].numel()
    num_runs = outer * R * middle
    inner = shape[column_dim + 1:].numel() * caches[0].element_size()
    for i, cache in enumerate(caches):
        types = (torch.int64, torch.int32, torch.int16, torch.int8)
        wide = next(t for t in types if inner % t.itemsize == cache.data_ptr() % t.itemsize == 0)
        units = inner // wide.itemsize
        block = min(next_power_of_2(max(units, 1)), 1024)
        num_lengths = B if i == 0 else 0
        programs = num_runs * (cache.numel() > 0) + num_lengths
        if programs > 0:
            commit_kv_kernel[(programs, max(cdiv(units, block), 1))](
                cache.view(-1).view(wide), accepted_nodes, num_accepted, lengths, lengths if start is None else start,
                slots, new_lengths, B, P, R, T, middle, shape[column_dim], units, programs - num_lengths,
                BLOCK=block)
    return new_lengths
