"""tree_from_mask in Triton: one program per tree and block of rows."""
import torch
import triton
import triton.language as tl

from ._kernel import kernel


@kernel()
def tree_from_mask_kernel(
        mask,     # (B, N, N)
        parents,  # (B, N)
        N, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    mask += b * N * N
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = mask + n[:, None].to(tl.int64) * N
    parent = tl.full([BLOCK_N], -1, tl.int32)
    start = 0
    while start < N:
        c = start + tl.arange(0, BLOCK_C)[None, :]
        sees = tl.load(row + c, mask=(n[:, None] < N) & (c < N), other=0) != 0
        parent = tl.maximum(parent, tl.max(tl.where(sees & (c != n[:, None]), c, -1), axis=1))
        start += BLOCK_C

    wrong = (parent > n).to(tl.int32)
    parents_row = mask + parent[:, None].to(tl.int64) * N
    start = 0
    while start < N:
        c = start + tl.arange(0, BLOCK_C)[None, :]
        has_parent = (parent[:, None] >= 0) & (c < N)
        sees = (tl.load(row + c, mask=has_parent, other=0) != 0) & (c != n[:, None])
        parent_sees = (tl.load(parents_row + c, mask=has_parent, other=0) != 0) | (c == parent[:, None])
        wrong |= tl.max((has_parent & (sees != parent_sees)).to(tl.int32), axis=1)
        start += BLOCK_C
    parent = tl.where(parent < 0, tl.where(n == 0, -1, -2), tl.where(wrong != 0, N, parent))
    tl.store(parents + b * N + n, parent, mask=n < N)


def tree_from_mask(mask):
    B, N, _ = mask.shape
    parents = mask.new_empty((B, N), dtype=torch.int32)
    if B > 0:
        tree_from_mask_kernel[(B, triton.cdiv(N, 16))](mask, parents, N, BLOCK_N=16, BLOCK_C=64)
    return parents
