"""rotate_into_cache in Triton: one program per node and some of its heads."""
import torch
import triton.language as tl

from ._kernel import cdiv, kernel, next_power_of_2
from ._rounding import rounded

ENTRIES = 512  # of a program, about: one warp has 16 bytes of each load for a thread


@kernel("qkv", "kv_cache", "rotations", "scale", "shift", "q", "D", "C")
def rotate_into_cache_kernel(
        qkv,                             # (R, N, H + 2 G, D)
        kv_cache,                        # (R, T, 2 G, D)
        lengths, positions, rotations,   # (B), (Y, N), (P, C, 2)
        scale, shift,                    # (H + G, D) or None
        q,                               # (R, N, H, D)
        B, N, T, H, G, D, C, Y, P, first_node, eps, HALVES: tl.constexpr,
        IN_ORDER: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    node = tl.program_id(0).to(tl.int64)
    r = node // N
    n = node % N
    position = tl.load(positions + r % Y * N + n)
    position = tl.minimum(tl.maximum(position, 0), P - 1)
    # A head is one row of the tile, in the order of memory where it can be: that keeps loads and stores wide. Entry e
    # is one of pair i, whose entries are neighbors in memory, or C apart.
    h = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    e = tl.arange(0, 2 * PAIRS)[None, :]
    i = e % PAIRS if HALVES else e // 2
    d = tl.where(i < C, i + e // PAIRS * C, 2 * i + e // PAIRS) if HALVES and not IN_ORDER else e
    inside = (h < H + 2 * G) & (d < D)
    length = tl.load(lengths + r % B)
    column = length + first_node + n
    is_normed = inside & (h < H + G)
    if scale is not None:
        weight = tl.load(scale + h * D + d, mask=is_normed, other=0.0).to(tl.float32)
        bias = tl.load(shift + h * D + d, mask=is_normed, other=0.0).to(tl.float32)
    of_pair = tl.load(rotations + position * 2 * C + tl.arange(0, 2 * PAIRS), mask=tl.arange(0, 2 * PAIRS) < 2 * C,
                      other=0.0)
    # The row comes last, since the compiler waits for it before what follows.
    row = tl.load(qkv + node * (H + 2 * G) * D + h * D + d, mask=inside, other=0.0).to(tl.float32)
    if scale is not None:
        wide = row.to(tl.float64)
        mean = tl.sum(wide, axis=1)[:, None] / D
        square = tl.where(inside, (wide - mean) * (wide - mean), 0.0)
        variance = tl.sum(square, axis=1)[:, None] / D
        factor = (1.0 / tl.sqrt(variance + eps)).to(tl.float32)
        row = tl.where(is_normed, (row - mean.to(tl.float32)) * factor * weight + bias, row)
    if HALVES:
        a, b = tl.split(tl.permute(tl.reshape(row, (HEADS, 2, PAIRS)), (0, 2, 1)))
    else:
        a, b = tl.split(tl.reshape(row, (HEADS, PAIRS, 2)))
    c, s = tl.split(tl.reshape(of_pair, (1, PAIRS, 2)))
    turned = tl.join(a * c - b * s, a * s + b * c)
    if HALVES:
        turned = tl.permute(turned, (0, 2, 1))
    turned = tl.reshape(turned, (HEADS, 2 * PAIRS))
    turned = rounded(tl.where((h < H + G) & (i < C), turned, row), q.dtype.element_ty)
    tl.store(q + node * H * D + h * D + d, turned, mask=inside & (h < H))
    has_column = (length >= 0) & (length < T - first_node - n)
    is_entry = inside & (h >= tl.where(has_column, H, H + 2 * G))
    tl.store(kv_cache + ((r * T + column) * 2 * G + h - H) * D + d, turned, mask=is_entry)


def rotate_into_cache(qkv, kv_cache, lengths, positions, rotations, scale, shift, first_node, rotates_halves, eps):
    R, N, Q = qkv.shape
    T, _, G, D = kv_cache.shape[1:]
    H = Q // D - 2 * G
    q = torch.empty((R, N, H, D), dtype=qkv.dtype, device=qkv.device)
    if R > 0:
        pairs = next_power_of_2(D // 2)
        heads = min(max(ENTRIES // (2 * pairs), 1), next_power_of_2(H + 2 * G))
        rotate_into_cache_kernel[(R * N, cdiv(H + 2 * G, heads))](
            qkv, kv_cache, lengths, positions, rotations, scale, shift, q, len(lengths), N, T, H, G, D,
            rotations.shape[1], len(positions), len(rotations), first_node, eps, HALVES=rotates_halves,
            IN_ORDER=not rotates_halves or rotations.shape[1] == pairs, HEADS=heads, PAIRS=pairs, num_warps=1,
            enable_fp_fusion=False)
    return q
