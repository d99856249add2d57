"""rotate_into_cache in Triton: one program per node and some of its heads."""
import torch
import triton
import triton.language as tl

from ._kernel import kernel
from ._rounding import rounded

ENTRIES = 512  # of a program, about: one warp has 16 bytes of each load for a thread


@kernel("qkv", "kv_cache", "scale", "shift", "q", "D")
def rotate_into_cache_kernel(
        qkv,                             # (R, N, H + 2 G, D)
        kv_cache,                        # (R, T, 2 G, D)
        lengths, positions, rotations,   # (B), (Y, N), (P, C, 2)
        scale, shift,                    # (H + G, D) or None
        q,                               # (R, N, H, D)
        B, N, T, H, G, D, C, Y, P, first_node, eps, HALVES: tl.constexpr,
        HEADS: tl.constexpr, PAIRS: tl.constexpr):
    node = tl.program_id(0).to(tl.int64)
    r = node // N
    n = node % N
    length = tl.load(lengths + r % B)
    column = length + first_node + n
    position = tl.load(positions + r % Y * N + n)
    position = tl.minimum(tl.maximum(position, 0), P - 1)
    # A pair's entries are neighbors in memory, or C apart: one tile of all keeps loads and stores wide.
    h = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None, None]
    i = tl.arange(0, PAIRS)[None, :, None]
    j = tl.arange(0, 2)[None, None, :]
    inside = (h < H + 2 * G) & (i < D // 2)
    if HALVES:
        d = tl.where(i < C, i + j * C, 2 * i + j)
    else:
        d = 2 * i + j
    x = tl.load(qkv + node * (H + 2 * G) * D + h * D + d, mask=inside, other=0.0)
    row = x.to(tl.float32)
    if scale is not None:
        wide = row.to(tl.float64)
        mean = tl.sum(tl.sum(wide, axis=2), axis=1)[:, None, None] / D
        square = tl.where(inside, (wide - mean) * (wide - mean), 0.0)
        variance = tl.sum(tl.sum(square, axis=2), axis=1)[:, None, None] / D
        factor = (1.0 / tl.sqrt(variance + eps)).to(tl.float32)
        is_normed = inside & (h < H + G)
        weight = tl.load(scale + h * D + d, mask=is_normed, other=0.0).to(tl.float32)
        bias = tl.load(shift + h * D + d, mask=is_normed, other=0.0).to(tl.float32)
        row = tl.where(is_normed, (row - mean.to(tl.float32)) * factor * weight + bias, row)
    a, b = tl.split(row)
    c, s = tl.split(tl.load(rotations + position * 2 * C + 2 * i + j, mask=i < C, other=0.0))
    turned = tl.join(a * c - b * s, a * s + b * c)
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
        pairs = triton.next_power_of_2(D // 2)
        heads = min(max(ENTRIES // (2 * pairs), 1), triton.next_power_of_2(H + 2 * G))
        rotate_into_cache_kernel[(R * N, triton.cdiv(H + 2 * G, heads))](
            qkv, kv_cache, lengths, positions, rotations, scale, shift, q, len(lengths), N, T, H, G, D,
            rotations.shape[1], len(positions), len(rotations), first_node, eps, HALVES=rotates_halves, HEADS=heads,
            PAIRS=pairs, num_warps=1, enable_fp_fusion=False)
    return q
