"""draw_tokens in Triton: each program takes one row after the other, see _draws.py."""
import torch
import triton.language as tl

from ._draws import draw_row
from ._filters import programs_and_scratch, tiles
from ._kernel import kernel
from ._rows import INVALID_ROW


@kernel("logits", "uncond", "scratch", "V")
def draw_tokens_kernel(
        logits, uncond,                        # (B, N, V); uncond may be None
        guidance, temperature, top_k, top_p,   # (B)
        min_p,                                 # (B) or None
        seeds, positions,                      # (B), (B, N)
        id_range, guesses,                     # (B, N, 2) and (B, N), or None
        scratch,                               # (programs, 2, V)
        tokens,                                # (B, N)
        num_accepted,                          # (B), each N before the launch
        ahead_tokens, status,                  # (B, N)
        num_rows, N, V, first_id, last_id, ahead, FILTERS: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr):
    scratch += tl.program_id(0).to(tl.int64) * 2 * V
    row = tl.program_id(0).to(tl.int64)
    while row < num_rows:                      # row = b * N + n
        b = row // N
        token, ahead_token, is_valid = draw_row(
            logits, uncond, scratch, id_range, row, V, first_id, last_id, tl.load(guidance + b),
            tl.load(temperature + b), tl.load(top_k + b), tl.load(top_p + b), None if min_p is None else min_p + b,
            tl.load(seeds + b), tl.load(positions + row), ahead, FILTERS, TILE, BITS)
        tl.store(tokens + row, token)
        tl.store(ahead_tokens + row, ahead_token)
        tl.store(status + row, tl.where(is_valid, 0, INVALID_ROW))
        if guesses is not None:
            if (is_valid == 0) | (tl.load(guesses + row) != token):
                tl.atomic_min(num_accepted + b, (row - b * N).to(tl.int32))
        row += tl.num_programs(0)


def draw_tokens(logits, uncond, guidance, temperature, top_k, top_p, min_p, seeds, positions, id_range, first_id,
                last_id, filters, guesses, ahead):
    B, N, V = logits.shape
    tokens, ahead_tokens = torch.empty_like(positions), torch.empty_like(positions)
    num_accepted = seeds.new_full((B,), 0 if guesses is None else N, dtype=torch.int32)
    status = logits.new_empty((B, N), dtype=torch.int32)
    if B > 0:
        programs, scratch = programs_and_scratch(B * N, V, logits.device)
        draw_tokens_kernel[(programs,)](
            logits, uncond, guidance, temperature, top_k, top_p, min_p, seeds, positions, id_range, guesses, scratch,
            tokens, num_accepted, ahead_tokens, status, B * N, N, V, first_id, last_id, ahead, FILTERS=filters,
            **tiles(V), enable_fp_fusion=False)
    return tokens, num_accepted, ahead_tokens, status
