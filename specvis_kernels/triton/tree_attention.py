"""tree_attention in Triton: one program per row, head of keys and block of queries; a softmax that runs along the keys.

It takes CHUNK columns at a time, in tiles that begin at multiples of their size: first those of cached columns, whose
loads overlap with the tile before, then those with nodes' columns, which the ancestors' bits make visible. The chunks'
results are merged in order. If there are fewer rows and heads than multiprocessors, each chunk has a program of its own
and a second kernel merges, with equal bits.

With `is_batch_invariant` queries have one tile for any number of nodes. Then a node after its parent has the bits that
it has when its parent is cached.
"""
import os

import torch
import triton
import triton.language as tl

from ._kernel import cdiv, kernel, next_power_of_2

CHUNK = 128
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
is_batch_invariant = False  # read at each launch; `specvis.batch_invariant` sets it


@triton.jit
def merge(best, total, attended, other_best, other_total, other_attended):
    """Merges two parts of a softmax."""
    new_best = tl.maximum(best, other_best)
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    rescale = tl.exp(best - shift)
    other_rescale = tl.exp(other_best - shift)
    attended = attended * rescale[:, None] + other_attended * other_rescale[:, None]
    return new_best, total * rescale + other_total * other_rescale, attended


@triton.jit
def attend_tile(
        q, best, total, attended,            # (BLOCK_M, BLOCK_D), (BLOCK_M), (BLOCK_M), (BLOCK_M, BLOCK_D)
        k_row, v_row, first, in_use, is_seen,  # the tile's first column; (BLOCK_T), (BLOCK_M, BLOCK_T)
        k_stride, v_stride, D, scale, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    i = tl.arange(0, BLOCK_T)[:, None]
    d = tl.arange(0, BLOCK_D)
    inside = in_use[:, None] & (d < D)[None, :]            # unseen entries may hold anything
    # Keys come second: with up to 32 queries the compiler waits for them before what follows.
    v = tl.load(v_row + first * v_stride + (i * v_stride + d[None, :]), mask=inside, other=0.0)
    k = tl.load(k_row + first * k_stride + (i * k_stride + d[None, :]), mask=inside, other=0.0)
    if WIDE:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(is_seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    shares = tl.exp(scores - shift[:, None])
    rescale = tl.exp(best - shift)
    total = total * rescale + tl.sum(shares, axis=1)
    attended = attended * rescale[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
    return new_best, total, attended


@triton.jit
def load_columns(lengths, b, T, W):
    """How many cached columns a request has, the column of its first node, and where its nodes' columns end."""
    length = tl.load(lengths + b)
    first_node = tl.where(length < 0, T, tl.minimum(length, T)).to(tl.int32)  # T: there is no column for a node
    num_node_columns = tl.minimum(T - first_node, 64 * tl.minimum(W, T // 64 + 1))  # 64 W may be too large for int32
    return tl.where(length < 0, 0, first_node), first_node, first_node + num_node_columns


@triton.jit
def cached_of(t, num_columns, key_mask, mask_row, S):
    """Which of the columns t are cached ones that all nodes see."""
    is_cached = t < num_columns
    if key_mask is not None:
        is_cached = is_cached & (tl.load(key_mask + mask_row + t, mask=t < S, other=1) != 0)
    return is_cached


@triton.jit
def words_from(first, num_bits, ancestors, n, N, W):
    """Of each node n the 64 bits from bit `first` on; those from num_bits on are 0."""
    word = first >> 6
    shift = first & 63
    row = ancestors + n.to(tl.int64) * W + word
    low = tl.load(row, mask=n < tl.where(word >= 0, N, 0), other=0)
    high = tl.load(row + 1, mask=n < tl.where(word < W - 1, N, 0), other=0)
    words = (low.to(tl.uint64, bitcast=True) >> shift) | (high.to(tl.uint64, bitcast=True) << 1 << (63 - shift))
    return words & ((tl.full([], 2, tl.uint64) << tl.minimum(num_bits - 1, 63)) - 1)


@triton.jit
def either(words, others):
    return words | others


@triton.jit
def bit_of(words, t):
    """Bit t of words. To shift their 64 bits would take more instructions."""
    return ((tl.where(t < 32, words.to(tl.uint32), (words >> 32).to(tl.uint32)) >> (t & 31)) & 1) != 0


@kernel("q", "k_cache", "v_cache", "out", "parts", "q_row", "q_node", "q_head", "k_row", "k_column", "k_head", "v_row",
        "v_column", "v_head", "D")
def tree_attention_kernel(
        q,                                   # (R, N, H, D)
        k_cache, v_cache,                    # (R, T, Hkv, D)
        lengths,                             # (B)
        ancestors,                           # (B, N, W)
        key_mask,                            # (R, S) or None
        out,                                 # (R, N, H, D)
        parts, bests, totals,                # (chunks, R, N, H, D) and twice (chunks, R, N, H), to be merged
        q_row, q_node, q_head, k_row, k_column, k_head, v_row, v_column, v_head,  # strides
        R, B, N, T, S, W, D, scale, H: tl.constexpr, G: tl.constexpr, CHUNK: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    r = (tl.program_id(0) // (H // G)).to(tl.int64)
    h = tl.program_id(0) % (H // G)
    b = tl.program_id(0) // (H // G) % B
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)  # query head m % G of node m // G
    n = m // G
    is_query = n < N
    d = tl.arange(0, BLOCK_D)
    inside = is_query[:, None] & (d < D)[None, :]
    head = h * G + m % G
    x = tl.load(q + r * q_row + n[:, None].to(tl.int64) * q_node + head[:, None] * q_head + d[None, :], mask=inside,
                other=0.0)
    if WIDE:
        x = x.to(tl.float32)
    k_cache += r * k_row + h * k_head
    v_cache += r * v_row + h * v_head
    num_columns, first_node, end = load_columns(lengths, b, T, W)
    first_tile = first_node // BLOCK_T * BLOCK_T  # the first with nodes' columns
    t = tl.arange(0, BLOCK_T)
    chunk = tl.program_id(2) * CHUNK
    is_whole = tl.num_programs(2) == 1
    if not is_whole:
        end = tl.minimum(end, chunk + CHUNK)

    whole_best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    whole_total = tl.zeros([BLOCK_M], tl.float32)
    whole = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    while chunk < end:
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        attended = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in tl.range(chunk, tl.minimum(chunk + CHUNK, tl.minimum(num_columns, first_tile)), BLOCK_T,
                              num_stages=3):
            is_cached = cached_of(start + t, num_columns, key_mask, r * S, S)
            best, total, attended = attend_tile(
                x, best, total, attended, k_cache, v_cache, r * 0 + start, is_cached, is_cached[None, :], k_column,
                v_column, D, scale, BLOCK_T, BLOCK_D, WIDE)
        start = tl.maximum(chunk, first_tile)
        while start < tl.minimum(chunk + CHUNK, end):
            words = words_from(start - first_node, end - start, ancestors + b.to(tl.int64) * N * W, n, N, W)
            is_cached = cached_of(start + t, num_columns, key_mask, r * S, S)
            is_seen = is_cached[None, :] | bit_of(words[:, None], t[None, :])
            in_use = is_cached | bit_of(tl.reduce(words, 0, either), t)
            best, total, attended = attend_tile(
                x, best, total, attended, k_cache, v_cache, r * 0 + start, in_use, is_seen, k_column, v_column, D,
                scale, BLOCK_T, BLOCK_D, WIDE)
            start += BLOCK_T
        if is_whole:  # else there is one chunk, which merge_kernel merges
            whole_best, whole_total, whole = merge(whole_best, whole_total, whole, best, total, attended)
        else:
            whole_best, whole_total, whole = best, total, attended
        chunk += CHUNK
    row = (r * N + n) * H + head
    if is_whole:
        whole = whole / tl.where(whole_total > 0, whole_total, 1.0)[:, None]
        tl.store(out + row[:, None] * D + d[None, :], whole.to(out.dtype.element_ty), mask=inside)
    else:
        part = row + tl.program_id(2) * R * N * H
        tl.store(parts + part[:, None] * D + d[None, :], whole, mask=inside)
        tl.store(bests + part, whole_best, mask=is_query)
        tl.store(totals + part, whole_total, mask=is_query)


@kernel("parts", "out", "D")
def merge_kernel(
        parts, bests, totals,                # what the first kernel stored
        lengths,                             # (B)
        out,                                 # (R, N, H, D)
        R, B, N, T, W, D, H: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    _, _, end = load_columns(lengths, r % B, T, W)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    is_query = m < N * H
    inside = is_query[:, None] & (d < D)[None, :]
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    attended = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row = r * N * H + m
    part = row
    for _ in tl.range(0, end, CHUNK, num_stages=3):
        best, total, attended = merge(best, total, attended, tl.load(bests + part, mask=is_query, other=0.0),
                                      tl.load(totals + part, mask=is_query, other=0.0),
                                      tl.load(parts + part[:, None] * D + d[None, :], mask=inside, other=0.0))
        part += R * N * H
    attended = attended / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + row[:, None] * D + d[None, :], attended.to(out.dtype.element_ty), mask=inside)


def num_multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def tree_attention(q, k_cache, v_cache, lengths, ancestors, key_mask, scale):
    R, N, H, D = q.shape
    _, T, Hkv, _ = k_cache.shape
    B, _, W = ancestors.shape
    out = torch.empty((R, N, H, D), dtype=q.dtype, device=q.device)
    if R > 0:
        G = H // Hkv
        block_d = max(next_power_of_2(D), 16)
        # Only three block sizes, since the number of queries changes from step to step.
        most, queries = 128 // q.element_size(), 32 if is_batch_invariant else N * G
        block_m = 16 if queries <= 16 else max(16, min(most, 2 * most * 32 // block_d, 32 if queries <= 32 else most))
        block_t = 16 if D % 16 != 0 else max(16, min(most, most * most // block_d))
        grid = R * Hkv, cdiv(N * G, block_m)
        num_chunks = cdiv(T, CHUNK) if grid[0] < num_multiprocessors(q.device) else 1
        parts = bests = totals = torch.empty(1, dtype=torch.float32, device=q.device)
        if num_chunks > 1:
            parts = torch.empty((num_chunks, R, N, H, D), dtype=torch.float32, device=q.device)
            bests, totals = torch.empty((2, num_chunks, R, N, H), dtype=torch.float32, device=q.device)
        num_warps = 8 if q.element_size() == 4 and block_m * block_d >= 1024 else 4
        wide = q.dtype == torch.float32 or IS_INTERPRETED     # the interpreter's bfloat16 is wrong
        tree_attention_kernel[(*grid, num_chunks)](
            q, k_cache, v_cache, lengths, ancestors, None if key_mask is None else key_mask.view(torch.uint8), out,
            parts, bests, totals, *q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3], R, B, N, T,
            0 if key_mask is None else key_mask.shape[1], W, D, scale, H=H, G=G, CHUNK=CHUNK, BLOCK_M=block_m,
            BLOCK_T=block_t, BLOCK_D=block_d, WIDE=wide, num_warps=num_warps, enable_fp_fusion=False)
        if num_chunks > 1:
            merge_kernel[(R, cdiv(N * H, 16))](
                parts, bests, totals, lengths, out, R, B, N, T, W, D, H=H, CHUNK=CHUNK, BLOCK_M=16, BLOCK_D=block_d,
                num_warps=4, enable_fp_fusion=False)
    return out
