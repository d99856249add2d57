"""tree_links in Triton: one program per request; all nodes of a block walk up to the root side by side."""
import torch
import triton
import triton.language as tl


@triton.jit
def tree_links_kernel(
        parents,                           # (B, N)
        ancestors,                         # (B, N, W)
        depth, first_child, next_sibling,  # (B, N)
        status,                            # (B)
        N, W, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    parents += b * N
    word = tl.arange(0, BLOCK_W)
    found = 0
    start = 0
    while start < N:
        n = start + tl.arange(0, BLOCK_N)
        own = tl.load(parents + n, mask=n < N, other=-2)
        bits = tl.zeros([BLOCK_N, BLOCK_W], tl.int64)
        steps = tl.full([BLOCK_N], -1, tl.int32)
        used = n < N
        at = tl.where(used, n, -1)                       # -1: this walk is over
        going = tl.max(at, axis=0) >= 0
        while going:
            here = (at[:, None] // 64 == word[None, :]) & (at[:, None] >= 0)
            bits |= tl.where(here, tl.full([], 1, tl.int64) << (at[:, None] & 63).to(tl.int64), 0)
            steps += tl.where(at >= 0, 1, 0)
            up = tl.load(parents + at, mask=at >= 0, other=-2)
            good = ((up >= 0) & (up < at)) | ((at == 0) & (up == -1))
            used = used & (good | (at < 0))
            at = tl.where(good & (at > 0), up, -1)
            going = tl.max(at, axis=0) >= 0
        wrong = (n < N) & (used == 0) & ((own != -2) | (n == 0))
        found |= tl.max(wrong.to(tl.int32), axis=0)

        # What names a used node as its parent and stands behind it is used too.
        child = tl.full([BLOCK_N], N, tl.int32)
        sibling = tl.full([BLOCK_N], N, tl.int32)
        other = 0
        while other < N:
            m = other + tl.arange(0, BLOCK_N)
            theirs = tl.load(parents + m, mask=m < N, other=-2)
            later = (m[None, :] > n[:, None]) & (theirs[None, :] >= 0)
            child = tl.minimum(child, tl.min(
                tl.where(later & (theirs[None, :] == n[:, None]), m[None, :], N), axis=1))
            sibling = tl.minimum(sibling, tl.min(
                tl.where(later & (theirs[None, :] == own[:, None]), m[None, :], N), axis=1))
            other += BLOCK_N

        row = b * N + n
        tl.store(ancestors + row[:, None] * W + word[None, :], tl.where(used[:, None], bits, 0),
                 mask=(n < N)[:, None] & (word < W)[None, :])
        tl.store(depth + row, tl.where(used, steps, -1), mask=n < N)
        tl.store(first_child + row, tl.where(used & (child < N), child, -1), mask=n < N)
        tl.store(next_sibling + row, tl.where(used & (sibling < N), sibling, -1), mask=n < N)
        start += BLOCK_N
    tl.store(status + b, found * 4)                      # INVALID_TREE


def tree_links(parents):
    B, N = parents.shape
    W = triton.cdiv(N, 64)
    ancestors = parents.new_empty((B, N, W), dtype=torch.int64)
    out = [parents.new_empty((B, N)) for _ in range(3)]
    status = parents.new_empty(B)
    if B > 0:
        tree_links_kernel[(B,)](parents, ancestors, *out, status, N, W,
                                BLOCK_N=min(triton.next_power_of_2(N), 64), BLOCK_W=triton.next_power_of_2(W),
                                num_warps=8)
    return ancestors, *out, status
