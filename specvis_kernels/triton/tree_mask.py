"""tree_mask in Triton: dense, one program per node and block of columns; packed, one per block of bytes."""
import torch
import triton
import triton.language as tl

from ._kernel import cdiv, kernel


@triton.jit
def has_bits(words, N, W):
    """Whether the nodes whose words start here are used: one of their first N bits is set."""
    last_bits = N - (W - 1) * 64                         # bits of the last word, 1 to 64
    bits = tl.load(words + (W - 1)) << (64 - last_bits)
    if W > 1:                                            # Triton 3.6 cannot compile a loop that never runs
        w = 0
        while w < W - 1:
            bits |= tl.load(words + w)
            w += 1
    return bits != 0


@triton.jit
def is_visible(words, is_used, n, c, length, start, N):
    """Whether column c is visible to node n, whose ancestor words start at `words`; node 0 has the column `start`."""
    node = c - start
    is_node = (node >= 0) & (node < N)
    shifted = tl.load(words + tl.where(is_node, node // 64, 0), mask=is_node, other=0) >> (node & 63)
    return (is_used & ((c < length) | (is_node & ((shifted & 1) != 0)))) | ((is_used == 0) & (node == n))


@triton.jit
def load_columns(lengths, starts, b, N, columns):
    """How many cached columns request b has, and the column of its node 0."""
    length = b * 0
    if lengths is not None:
        length = tl.load(lengths + b).to(tl.int64)
    start = length
    if starts is not None:  # beyond these bounds the mask does not change
        start = tl.minimum(tl.maximum(tl.load(starts + b), -N), columns)
    return length, start


@kernel("mask")
def dense_kernel(
        ancestors,        # (B, N, W)
        lengths, starts,  # (B) or None
        mask,             # (B, N, columns)
        N, W, columns, ADDITIVE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)                  # row = b * N + n
    length, start = load_columns(lengths, starts, row // N, N, columns)
    words = ancestors + row * W
    c = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    visible = is_visible(words, has_bits(words, N, W), row % N, c, length, start, N)
    if ADDITIVE:
        visible = tl.where(visible, 0.0, float("-inf"))
    tl.store(mask + row * columns + c, visible.to(mask.dtype.element_ty), mask=c < columns)


@kernel()
def packed_kernel(
        ancestors,        # (B, N, W)
        lengths, starts,  # (B) or None
        mask,             # (B, size)
        N, W, columns, row_bits, size, BLOCK: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    length, start = load_columns(lengths, starts, b, N, columns)
    # Only the block's first entry is divided in 64 bits, the others count from there.
    first = tl.program_id(0).to(tl.int64) * BLOCK
    bit = tl.arange(0, 8)
    divisor = tl.full([], row_bits, tl.uint32)
    entry = (tl.arange(0, BLOCK)[:, None] * 8 + bit[None, :]).to(tl.uint32)
    entry += (first * 8 % row_bits).to(tl.uint32)
    n = first * 8 // row_bits + (entry // divisor).to(tl.int64)
    c = (entry % divisor).to(tl.int64)
    inside = (n < N) & (c < columns)
    n = tl.where(inside, n, 0)
    words = ancestors + (b * N + n) * W
    visible = is_visible(words, has_bits(words, N, W), n, c, length, start, N) & inside
    byte = first + tl.arange(0, BLOCK)
    tl.store(mask + b * size + byte, tl.sum(visible.to(tl.int32) << bit[None, :], axis=1).to(tl.uint8),
             mask=byte < size)


def tree_mask(ancestors, lengths, start, form, columns, dtype):
    B, N, W = ancestors.shape
    if form in ("packed", "packed_rows"):
        row_bits = columns if form == "packed" else cdiv(columns, 8) * 8
        size = cdiv(N * row_bits, 8)
        mask = ancestors.new_empty((B, size), dtype=torch.uint8)
        if B > 0:
            packed_kernel[(cdiv(size, 128), B)](ancestors, lengths, start, mask, N, W, columns, row_bits, size,
                                                BLOCK=128)
        return mask if form == "packed" else mask.view(B, N, row_bits // 8)
    mask = ancestors.new_empty((B, N, columns), dtype=torch.uint8 if form == "bool" else dtype)
    if B > 0:
        dense_kernel[(B * N, cdiv(columns, 1024))](ancestors, lengths, start, mask, N, W, columns,
                                                   ADDITIVE=form == "additive", BLOCK=1024)
    return mask.view(torch.bool) if form == "bool" else mask
