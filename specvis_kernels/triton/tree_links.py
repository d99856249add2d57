"""tree_links in Triton: one program per request; all nodes of a block walk up to the root side by side."""
import torch
import triton.language as tl

from ._kernel import cdiv, kernel
from ._rows import INVALID_TREE


@kernel()
def tree_links_kernel(
        parents, ancestors,                # (B, N), (B, N, W)
        depth, first_child, next_sibling,  # (B, N)
        status,                            # (B)
        N, W, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    parents += b * N
    any_wrong = 0
    start = 0
    while start < N:
        n = start + tl.arange(0, BLOCK_N)
        parent = tl.load(parents + n, mask=n < N, other=-2)
        row = b * N + n
        node_depth = tl.full([BLOCK_N], -1, tl.int32)
        is_used = n < N
        first_word = 0
        while first_word < W:
            word = first_word + tl.arange(0, BLOCK_W)
            bits = tl.zeros([BLOCK_N, BLOCK_W], tl.int64)
            node_depth = tl.full([BLOCK_N], -1, tl.int32)
            is_used = n < N
            node = tl.where(is_used, n, -1)              # where this walk is; -1: it is over
            active = tl.max(node, axis=0) >= 0
            while active:
                has_word = (node[:, None] // 64 == word[None, :]) & (node[:, None] >= 0)
                bits |= tl.where(has_word, tl.full([], 1, tl.int64) << (node[:, None] & 63).to(tl.int64), 0)
                node_depth += tl.where(node >= 0, 1, 0)
                up = tl.load(parents + node, mask=node >= 0, other=-2)
                is_valid = ((up >= 0) & (up < node)) | ((node == 0) & (up == -1))
                is_used = is_used & (is_valid | (node < 0))
                node = tl.where(is_valid & (node > 0), up, -1)
                active = tl.max(node, axis=0) >= 0
            tl.store(ancestors + row[:, None] * W + word[None, :], tl.where(is_used[:, None], bits, 0),
                     mask=(n < N)[:, None] & (word < W)[None, :])
            first_word += BLOCK_W
        is_wrong = (n < N) & (is_used == 0) & ((parent != -2) | (n == 0))
        any_wrong |= tl.max(is_wrong.to(tl.int32), axis=0)

        # A later node whose parent is a used node is used too.
        child = tl.full([BLOCK_N], N, tl.int32)
        sibling = tl.full([BLOCK_N], N, tl.int32)
        other_start = 0
        while other_start < N:
            m = other_start + tl.arange(0, BLOCK_N)
            other_parent = tl.load(parents + m, mask=m < N, other=-2)
            is_later = (m[None, :] > n[:, None]) & (other_parent[None, :] >= 0)
            child = tl.minimum(child, tl.min(
                tl.where(is_later & (other_parent[None, :] == n[:, None]), m[None, :], N), axis=1))
            sibling = tl.minimum(sibling, tl.min(
                tl.where(is_later & (other_parent[None, :] == parent[:, None]), m[None, :], N), axis=1))
            other_start += BLOCK_N

        tl.store(depth + row, tl.where(is_used, node_depth, -1), mask=n < N)
        tl.store(first_child + row, tl.where(is_used & (child < N), child, -1), mask=n < N)
        tl.store(next_sibling + row, tl.where(is_used & (sibling < N), sibling, -1), mask=n < N)
        start += BLOCK_N
    tl.store(status + b, any_wrong * INVALID_TREE)


def tree_links(parents):
    B, N = parents.shape
    W = cdiv(N, 64)
    ancestors = parents.new_empty((B, N, W), dtype=torch.int64)
    out = [parents.new_empty((B, N)) for _ in range(3)]
    status = parents.new_empty(B)
    if B > 0:
        tree_links_kernel[(B,)](parents, ancestors, *out, status, N, W, BLOCK_N=64, BLOCK_W=4, num_warps=8)
    return ancestors, *out, status
