"""tree_from_paths in Triton: one program per tree and block of nodes, which looks for them in all paths."""
import torch
import triton
import triton.language as tl

from ._kernel import kernel


@kernel()
def tree_from_paths_kernel(
        paths,    # (B, L, D)
        parents,  # (B, N)
        size, D, N, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    paths += b * size
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    largest = tl.full([BLOCK_N], -2, tl.int32)
    smallest = tl.full([BLOCK_N], 0, tl.int32) + N
    is_root_wrong = 0
    start = 0
    while start < size:
        i = start + tl.arange(0, BLOCK_I)
        is_child = (i < size) & (i % D > 0)
        node = tl.load(paths + i, mask=i < size, other=-1)
        parent = tl.load(paths + i - 1, mask=is_child, other=-1)
        parent = tl.minimum(tl.maximum(parent, -1), N).to(tl.int32)[None, :]
        is_root_wrong |= tl.max(((node >= N) | (is_child & (node == 0))).to(tl.int32), axis=0)
        is_here = is_child[None, :] & (node[None, :] == n[:, None])
        largest = tl.maximum(largest, tl.max(tl.where(is_here, parent, -2), axis=1))
        smallest = tl.minimum(smallest, tl.min(tl.where(is_here, parent, N), axis=1))
        start += BLOCK_I
    parent = tl.where((largest == -2) | (largest == smallest), largest, N)
    parent = tl.where(n == 0, tl.where(is_root_wrong != 0, N, -1), parent)
    tl.store(parents + b * N + n, parent, mask=n < N)


def tree_from_paths(paths, num_nodes):
    B, L, D = paths.shape
    parents = paths.new_empty((B, num_nodes), dtype=torch.int32)
    if B > 0:
        tree_from_paths_kernel[(B, triton.cdiv(num_nodes, 64))](
            paths, parents, L * D, D, num_nodes, BLOCK_N=64, BLOCK_I=64)
    return parents
