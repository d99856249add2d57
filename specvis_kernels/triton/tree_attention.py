"""tree_attention in Triton: one program per row, head of keys and block of queries; a softmax that runs along the keys.

First come the tiles of cached columns, then those of the nodes, whose bits say who sees them.
"""
import os

import torch
import triton
import triton.language as tl


@triton.jit
def attend_tile(
        q, best, total, attended,            # (BLOCK_M, BLOCK_D), (BLOCK_M), (BLOCK_M), (BLOCK_M, BLOCK_D)
        k_row, v_row, first, is_seen,        # the tile's first column; (BLOCK_M, BLOCK_T)
        k_stride, v_stride, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    i = tl.arange(0, BLOCK_T)[:, None]
    d = tl.arange(0, BLOCK_D)
    in_use = tl.max(is_seen.to(tl.int32), axis=0) > 0      # what nobody sees may hold anything
    inside = in_use[:, None] & (d < D)[None, :]
    k = tl.load(k_row + first * k_stride + (i * k_stride + d[None, :]), mask=inside, other=0.0)
    v = tl.load(v_row + first * v_stride + (i * v_stride + d[None, :]), mask=inside, other=0.0)
    if WIDE:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores = tl.where(is_seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    shares = tl.exp(scores - shift[:, None])
    rescale = tl.exp(best - shift)
    total = total * rescale + tl.sum(shares, axis=1)
    attended = attended * rescale[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
    return new_best, total, attended


@triton.jit(do_not_specialize=["B", "N", "T", "S", "W"])
def tree_attention_kernel(
        q,                                   # (R, N, H, D)
        k_cache, v_cache,                    # (R, T, Hkv, D)
        lengths,                             # (B)
        ancestors,                           # (B, N, W)
        key_mask,                            # (R, S) or None
        out,                                 # (R, N, H, D)
        q_row, q_node, q_head, k_row, k_column, k_head, v_row, v_column, v_head,  # strides
        B, N, T, S, W, D, scale, H: tl.constexpr, G: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    r = (tl.program_id(0) // (H // G)).to(tl.int64)
    h = tl.program_id(0) % (H // G)
    b = r % B
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)  # query head m % G of node m // G
    n = m // G
    is_query = n < N
    d = tl.arange(0, BLOCK_D)
    inside = is_query[:, None] & (d < D)[None, :]
    head = h * G + m % G
    x = tl.load(q + r * q_row + n[:, None].to(tl.int64) * q_node + head[:, None] * q_head + d[None, :], mask=inside,
                other=0.0)
    x = x.to(tl.float32) * scale
    if not WIDE:
        x = x.to(q.dtype.element_ty)
    k_cache += r * k_row + h * k_head
    v_cache += r * v_row + h * v_head
    length = tl.load(lengths + b)
    first_node = tl.where(length < 0, T, tl.minimum(length, T))  # T: there is no column for a node
    num_columns = tl.where(length < 0, 0, first_node)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    attended = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    start = length * 0
    while start < num_columns:
        t = start + tl.arange(0, BLOCK_T)
        is_cached = t < num_columns
        if key_mask is not None:
            is_cached = is_cached & (tl.load(key_mask + r * S + t, mask=t < S, other=1) != 0)
        best, total, attended = attend_tile(x, best, total, attended, k_cache, v_cache, start,
                                            is_query[:, None] & is_cached[None, :], k_column, v_column, D,
                                            BLOCK_T, BLOCK_D, WIDE)
        start += BLOCK_T
    start = length * 0
    num_nodes = tl.minimum(T - first_node, 64 * W)
    while start < num_nodes:
        j = start + tl.arange(0, BLOCK_T)
        is_node = is_query[:, None] & (j < num_nodes)[None, :]
        words = tl.load(ancestors + (b * N + n[:, None]) * W + j[None, :] // 64, mask=is_node, other=0)
        is_seen = is_node & (((words >> (j & 63)[None, :]) & 1) != 0)
        if tl.max(tl.max(is_seen.to(tl.int32), axis=1), axis=0) > 0:
            best, total, attended = attend_tile(x, best, total, attended, k_cache, v_cache, first_node + start,
                                                is_seen, k_column, v_column, D, BLOCK_T, BLOCK_D, WIDE)
        start += BLOCK_T
    attended = attended / tl.where(total > 0, total, 1.0)[:, None]
    to = out + ((r * N + n[:, None]) * H + head[:, None]) * D + d[None, :]
    tl.store(to, attended.to(out.dtype.element_ty), mask=inside)


def tree_attention(q, k_cache, v_cache, lengths, ancestors, key_mask, scale):
    R, N, H, D = q.shape
    _, T, Hkv, _ = k_cache.shape
    B, _, W = ancestors.shape
    out = torch.empty((R, N, H, D), dtype=q.dtype, device=q.device)
    if R > 0:
        G = H // Hkv
        block_d = max(triton.next_power_of_2(D), 16)
        block_m = min(max(triton.next_power_of_2(N * G), 16), 128 // q.element_size())
        block_t = max(16, min(32, 8192 // (block_d * q.element_size())))
        wide = q.dtype == torch.float32 or os.environ.get("TRITON_INTERPRET") == "1"  # its bfloat16 is wrong
        tree_attention_kernel[(R * Hkv, triton.cdiv(N * G, block_m))](
            q, k_cache, v_cache, lengths, ancestors, None if key_mask is None else key_mask.view(torch.uint8), out,
            *q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3], B, N, T,
            0 if key_mask is None else key_mask.shape[1], W, D, scale, H=H, G=G, BLOCK_M=block_m, BLOCK_T=block_t,
            BLOCK_D=block_d, WIDE=wide, num_warps=4 if block_m * block_d * q.element_size() < 4096 else 8)
    return out
