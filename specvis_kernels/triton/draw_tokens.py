"""draw_tokens in Triton: one program per row. All ids are filtered in one block. Then the row is read again, TILE ids
at a time, since the noise of all ids would not fit into registers beside their keys.
"""
import torch
import triton
import triton.language as tl

from ._filters import filter_logits, load_logits, num_warps
from ._keys import NONE, entries_of, id_of, keys_of
from ._noise import gumbel_noise
from ._rows import INVALID_ROW


@triton.jit
def draw_tokens_kernel(
        logits, uncond,                        # (B, N, V); uncond may be None
        guidance, temperature, top_k, top_p,   # (B)
        seeds,                                 # (B)
        positions,                             # (B, N)
        id_range,                              # (B, N, 2) or None
        guesses,                               # (B, N) or None
        tokens,                                # (B, N)
        num_accepted,                          # (B), where N stands before
        ahead_tokens,                          # (B, N)
        status,                                # (B, N)
        N, V, ahead, BLOCK: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)                  # row = b * N + n
    b = row // N
    logits += row * V
    if uncond is not None:
        uncond += row * V
    first_id = tl.full((), 0, tl.int64)
    last_id = first_id + V
    is_range = True
    if id_range is not None:
        first_id = tl.load(id_range + row * 2)
        last_id = tl.load(id_range + row * 2 + 1)
        is_range = (first_id >= 0) & (first_id < last_id) & (last_id <= V)
        first_id = tl.where(is_range, first_id, 0)
        last_id = tl.where(is_range, last_id, 1)
    s = tl.load(guidance + b)
    t = tl.load(temperature + b)

    i = tl.arange(0, BLOCK)
    num_ids = (last_id - first_id).to(tl.int32)
    mask = i < num_ids
    x = load_logits(logits, uncond, s, t, first_id + i, mask)
    keys, best, lowest_kept, is_valid = filter_logits(x, mask, num_ids, t, tl.load(top_k + b), tl.load(top_p + b))
    is_valid = is_valid & is_range
    token = tl.full((), 0, tl.int64)
    ahead_token = token
    if is_valid & (t == 0):
        token = first_id + tl.argmax(keys, axis=0, tie_break_left=True)
        ahead_token = token
    if is_valid & (t > 0):
        seed = tl.load(seeds + b)
        position = tl.load(positions + row)
        largest = tl.full([TILE], NONE, tl.int64)
        ahead_largest = largest
        begin = first_id & -4                            # the noise is made for four ids at once
        while begin < last_id:
            v = begin + tl.arange(0, TILE)
            is_inside = (v >= first_id) & (v < last_id)
            tile = load_logits(logits, uncond, s, t, v, is_inside)
            margins = tl.where(is_inside & (keys_of(tile) >= lowest_kept), tile - best, -float("inf"))
            score = margins + gumbel_noise(seed, position, begin, TILE)
            largest = tl.maximum(largest, entries_of(score, v, -float("inf")))
            if ahead > 0:
                score = margins + gumbel_noise(seed, position + ahead, begin, TILE)
                ahead_largest = tl.maximum(ahead_largest, entries_of(score, v, -float("inf")))
            begin += TILE
        token = id_of(tl.max(largest, axis=0))
        ahead_token = token
        if ahead > 0:
            ahead_token = id_of(tl.max(ahead_largest, axis=0))
    tl.store(tokens + row, token)
    tl.store(ahead_tokens + row, ahead_token)
    tl.store(status + row, tl.where(is_valid, 0, INVALID_ROW))
    if guesses is not None:
        if (is_valid == 0) | (tl.load(guesses + row) != token):
            tl.atomic_min(num_accepted + b, (row - b * N).to(tl.int32))


def draw_tokens(logits, uncond, guidance, temperature, top_k, top_p, seeds, positions, id_range, guesses, ahead):
    B, N, V = logits.shape
    tokens, ahead_tokens = torch.empty_like(positions), torch.empty_like(positions)
    num_accepted = seeds.new_full((B,), 0 if guesses is None else N, dtype=torch.int32)
    status = logits.new_empty((B, N), dtype=torch.int32)
    if B > 0:
        block = triton.next_power_of_2(V)
        warps = num_warps(block)
        draw_tokens_kernel[(B * N,)](
            logits, uncond, guidance, temperature, top_k, top_p, seeds, positions, id_range, guesses, tokens,
            num_accepted, ahead_tokens, status, N, V, ahead, BLOCK=block, TILE=min(max(4, block), 128 * warps),
            num_warps=warps, enable_fp_fusion=False)
    return tokens, num_accepted, ahead_tokens, status
