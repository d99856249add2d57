"""tree_paths in Triton: after tree_links, one program per tree and block of nodes.

Each leaf counts the leaves before it, which gives its row. The lowest bit in which the ancestors of two leaves differ
is a child of their last common ancestor: the leaf under this child comes first.
"""
import torch
import triton
import triton.language as tl

from ._kernel import kernel
from .tree_links import tree_links


@triton.jit
def is_leaf(depth, child, max_depth):
    return (depth == max_depth) | ((depth >= 0) & (depth < max_depth) & (child < 0))


@kernel()
def tree_paths_kernel(
        parents,             # (B, N)
        ancestors,           # (B, N, W)
        depth, first_child,  # (B, N)
        paths,               # (B, N, max_depth + 1), all -1
        N, W, max_depth, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    parents += b * N
    depth += b * N
    first_child += b * N
    ancestors += b * N * W
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own_depth = tl.load(depth + n, mask=n < N, other=-1)
    is_own_leaf = is_leaf(own_depth, tl.load(first_child + n, mask=n < N, other=-1), max_depth)

    before = tl.zeros([BLOCK], tl.int64)
    start = 0
    while start < N:
        m = start + tl.arange(0, BLOCK)
        other_depth = tl.load(depth + m, mask=m < N, other=-1)
        other_child = tl.load(first_child + m, mask=m < N, other=-1)
        is_pair = is_own_leaf[:, None] & is_leaf(other_depth, other_child, max_depth)[None, :]
        w = 0
        while w < W:                                     # until the words of a pair differ
            words = tl.load(ancestors + n.to(tl.int64) * W + w, mask=n < N, other=0)[:, None]
            others = tl.load(ancestors + m.to(tl.int64) * W + w, mask=m < N, other=0)[None, :]
            differs = words ^ others
            before += tl.sum((is_pair & ((others & differs & -differs) != 0)).to(tl.int64), axis=1)
            is_pair = is_pair & (differs == 0)
            w += 1
        start += BLOCK

    row = paths + (b * N + before) * (max_depth + 1)
    node = tl.where(is_own_leaf, n, -1)                  # where this walk is; -1: it is over
    active = tl.max(node, axis=0) >= 0
    while active:
        tl.store(row + own_depth, node.to(tl.int64), mask=node >= 0)
        node = tl.load(parents + node, mask=node >= 0, other=-1)
        own_depth -= 1
        active = tl.max(node, axis=0) >= 0


def tree_paths(parents, max_depth):
    B, N = parents.shape
    ancestors, depth, first_child, *_ = tree_links(parents)
    paths = parents.new_full((B, N, max_depth + 1), -1, dtype=torch.int64)
    if B > 0:
        tree_paths_kernel[(B, triton.cdiv(N, 64))](
            parents, ancestors, depth, first_child, paths, N, ancestors.shape[2], max_depth, BLOCK=64, num_warps=8)
    return paths
