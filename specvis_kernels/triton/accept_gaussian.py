"""accept_gaussian in Triton: one program per request takes BLOCK positions at a time, and LANES of their channels."""
import torch
import triton.language as tl

from ._gaussian import LANES, add_lanes, distance_factor, exp64, is_finite, log_ratio_terms
from ._kernel import kernel
from ._rows import INVALID_ROW


@kernel("C")
def accept_gaussian_kernel(
        tokens,                                                          # (B, G, C)
        log_ratio, uniforms,                                             # (B, G)
        target_means, target_log_sigmas, draft_means, draft_log_sigmas,  # (B, G, C) or None
        temperature, num_drafted,                                        # (B) or None
        num_accepted,                                                    # (B)
        is_accepted_out, is_rejected_out, log_r, status,                 # (B, G), but status (B)
        G, C, TRUNCATE: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    num_tested = G
    if num_drafted is not None:
        num_tested = tl.minimum(tl.load(num_drafted + b), G).to(tl.int32)
    factor, status_bits = distance_factor(temperature, b)

    lane = tl.arange(0, LANES)
    num_bad = tl.zeros([BLOCK], tl.int32)
    begin = 0
    while begin < G:
        g = begin + tl.arange(0, BLOCK)
        row = b * G + g
        is_drafted = g < num_tested
        sums = tl.zeros([BLOCK, LANES], tl.float64)
        bad_tokens = tl.zeros([BLOCK, LANES], tl.int32)
        start = 0
        while start < C:
            c = start + lane
            at = row[:, None] * C + c[None, :]
            mask = is_drafted[:, None] & (c < C)[None, :]
            x = tl.load(tokens + at, mask=mask, other=0.0)
            bad_tokens += tl.where(is_finite(x), 0, 1)
            if target_means is not None:
                sums += log_ratio_terms(x, tl.load(target_means + at, mask=mask, other=0.0),
                                        tl.load(target_log_sigmas + at, mask=mask, other=0.0),
                                        tl.load(draft_means + at, mask=mask, other=0.0),
                                        tl.load(draft_log_sigmas + at, mask=mask, other=0.0), factor)
            start += LANES
        earlier_steps = tl.load(log_ratio + row, mask=is_drafted, other=0.0).to(tl.float64)
        ratio = (earlier_steps + add_lanes(sums, BLOCK)).to(tl.float32)
        uniform = tl.load(uniforms + row, mask=is_drafted, other=0.0)
        num_bad += tl.sum(bad_tokens, axis=1) + tl.where(is_finite(ratio) & is_finite(uniform), 0, 1)
        tl.store(log_r + row, ratio, mask=g < G)
        begin += BLOCK
    is_valid = tl.sum(num_bad, axis=0) == 0
    tl.debug_barrier()                                   # other threads read the ratios

    num_tested = tl.where(is_valid & (status_bits == 0), num_tested, 0)
    count = 0
    num_rejected = 0
    begin = 0
    while begin < G:
        g = begin + tl.arange(0, BLOCK)
        row = b * G + g
        is_tested = g < num_tested
        ratio = tl.load(log_r + row, mask=is_tested, other=0.0)
        uniform = tl.load(uniforms + row, mask=is_tested, other=0.0).to(tl.float64)
        r = exp64(ratio.to(tl.float64))
        is_accepted = is_tested & (uniform < r)
        is_rejected = is_tested & (uniform >= r)
        if TRUNCATE:
            rejections = num_rejected + tl.cumsum(is_rejected.to(tl.int32), axis=0)
            num_rejected += tl.sum(is_rejected.to(tl.int32), axis=0)
            is_accepted = is_accepted & (rejections == 0)
            is_rejected = is_rejected & (rejections == 1)
        count += tl.sum(is_accepted.to(tl.int32), axis=0)
        tl.store(is_accepted_out + row, is_accepted.to(tl.uint8), mask=g < G)
        tl.store(is_rejected_out + row, is_rejected.to(tl.uint8), mask=g < G)
        tl.store(log_r + row, ratio, mask=g < G)
        begin += BLOCK
    tl.store(num_accepted + b, count)
    tl.store(status + b, status_bits | tl.where(is_valid, 0, INVALID_ROW))


def accept_gaussian(tokens, log_ratio, uniforms, target_means, target_log_sigmas, draft_means, draft_log_sigmas,
                    temperature, num_drafted, truncate):
    B, G, C = tokens.shape
    num_accepted, status = (uniforms.new_empty(B, dtype=torch.int32) for _ in range(2))
    is_accepted, is_rejected = (uniforms.new_empty((B, G), dtype=torch.uint8) for _ in range(2))
    log_r = torch.empty_like(uniforms)
    if B > 0:
        accept_gaussian_kernel[(B,)](
            tokens, log_ratio, uniforms, target_means, target_log_sigmas, draft_means, draft_log_sigmas, temperature,
            num_drafted, num_accepted, is_accepted, is_rejected, log_r, status, G, C, TRUNCATE=truncate, BLOCK=16,
            num_warps=2, enable_fp_fusion=False)
    return num_accepted, is_accepted.view(torch.bool), is_rejected.view(torch.bool), log_r, status
