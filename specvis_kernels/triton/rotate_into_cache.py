"""rotate_into_cache in Triton: one program per node and some of its heads."""
import torch
import triton
import triton.language as tl

from ._kernel import kernel
from ._rounding import rounded

ENTRIES = 1024  # of a program, about


@kernel("qkv", "kv_cache", "q", "D")
def rotate_into_cache_kernel(
        qkv,                             # (R, N, H + 2 G, D)
        kv_cache,                        # (R, T, 2 G, D)
        lengths, positions, rotations,   # (B), (Y, N), (P, D / 2, 2)
        q,                               # (R, N, H, D)
        B, N, T, H, G, D, Y, P, first_node, HALVES: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    node = tl.program_id(0).to(tl.int64)
    r = node // N
    n = node % N
    length = tl.load(lengths + r % B)
    column = length + first_node + n
    position = tl.load(positions + r % Y * N + n)
    position = tl.minimum(tl.maximum(position, 0), P - 1)
    h = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, PAIRS)[None, :]
    inside = (h < H + 2 * G) & (i < D // 2)
    first = i if HALVES else 2 * i
    second = i + D // 2 if HALVES else 2 * i + 1
    source = qkv + node * (H + 2 * G) * D + h * D
    a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(rotations + position * D + 2 * i, mask=i < D // 2, other=0.0)
    s = tl.load(rotations + position * D + 2 * i + 1, mask=i < D // 2, other=0.0)
    is_turned = h < H + G
    turned = rounded(tl.where(is_turned, a * c - b * s, a), q.dtype.element_ty)
    other = rounded(tl.where(is_turned, a * s + b * c, b), q.dtype.element_ty)
    is_query = inside & (h < H)
    target = q + node * H * D + h * D
    tl.store(target + first, turned, mask=is_query)
    tl.store(target + second, other, mask=is_query)
    has_column = (length >= 0) & (length < T - first_node - n)
    is_entry = inside & (h >= tl.where(has_column, H, H + 2 * G))
    target = kv_cache + ((r * T + column) * 2 * G + h - H) * D
    tl.store(target + first, turned, mask=is_entry)
    tl.store(target + second, other, mask=is_entry)


def rotate_into_cache(qkv, kv_cache, lengths, positions, rotations, first_node, rotates_halves):
    R, N, Q = qkv.shape
    T, _, G, D = kv_cache.shape[1:]
    H = Q // D - 2 * G
    q = torch.empty((R, N, H, D), dtype=qkv.dtype, device=qkv.device)
    if R > 0:
        pairs = triton.next_power_of_2(D // 2)
        heads = min(max(ENTRIES // (2 * pairs), 1), triton.next_power_of_2(H + 2 * G))
        rotate_into_cache_kernel[(R * N, triton.cdiv(H + 2 * G, heads))](
            qkv, kv_cache, lengths, positions, rotations, q, len(lengths), N, T, H, G, D, len(positions),
            len(rotations), first_node, HALVES=rotates_halves, HEADS=heads, PAIRS=pairs, num_warps=4,
            enable_fp_fusion=False)
    return q
