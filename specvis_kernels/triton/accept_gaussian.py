"""accept_gaussian in Triton: one program per request takes all positions at once, LANES channels at a time."""
import torch
import triton
import triton.language as tl

from ._gaussian import LANES, add_lanes, distance_factor, exp64, is_finite, log_ratio_terms
from ._rows import INVALID_ROW, MAX_WARPS


@triton.jit
def accept_gaussian_kernel(
        tokens,                                                          # (B, G, C)
        log_ratio, uniforms,                                             # (B, G)
        target_means, target_log_sigmas, draft_means, draft_log_sigmas,  # (B, G, C) or None
        temperature, num_drafted,                                        # (B) or None
        num_accepted,                                                    # (B)
        is_accepted_out, is_rejected_out, log_r,                         # (B, G)
        status,                                                          # (B)
        G, C, TRUNCATE: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, BLOCK)
    is_drafted = g < G
    if num_drafted is not None:
        is_drafted = is_drafted & (g < tl.load(num_drafted + b))
    factor, status_bits = distance_factor(temperature, b)

    row = b * G + g
    lane = tl.arange(0, LANES)
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
    bad = tl.sum(bad_tokens, axis=1) + tl.where(is_finite(ratio) & is_finite(uniform), 0, 1)
    is_valid = tl.sum(bad, axis=0) == 0
    is_tested = is_drafted & is_valid & (status_bits == 0)
    r = exp64(ratio.to(tl.float64))
    is_accepted = is_tested & (uniform.to(tl.float64) < r)
    is_rejected = is_tested & (uniform.to(tl.float64) >= r)
    if TRUNCATE:
        rejections = tl.cumsum(is_rejected.to(tl.int32), axis=0)
        is_accepted = is_accepted & (rejections == 0)
        is_rejected = is_rejected & (rejections == 1)
    tl.store(num_accepted + b, tl.sum(is_accepted.to(tl.int32), axis=0))
    tl.store(is_accepted_out + row, is_accepted.to(tl.uint8), mask=g < G)
    tl.store(is_rejected_out + row, is_rejected.to(tl.uint8), mask=g < G)
    tl.store(log_r + row, tl.where(is_tested, ratio, 0.0), mask=g < G)
    tl.store(status + b, status_bits | tl.where(is_valid, 0, INVALID_ROW))


def accept_gaussian(tokens, log_ratio, uniforms, target_means, target_log_sigmas, draft_means, draft_log_sigmas,
                    temperature, num_drafted, truncate):
    B, G, C = tokens.shape
    num_accepted, status = (uniforms.new_empty(B, dtype=torch.int32) for _ in range(2))
    is_accepted, is_rejected = (uniforms.new_empty((B, G), dtype=torch.uint8) for _ in range(2))
    log_r = torch.empty_like(uniforms)
    if B > 0:
        block = triton.next_power_of_2(G)
        accept_gaussian_kernel[(B,)](
            tokens, log_ratio, uniforms, target_means, target_log_sigmas, draft_means, draft_log_sigmas, temperature,
            num_drafted, num_accepted, is_accepted, is_rejected, log_r, status, G, C, TRUNCATE=truncate, BLOCK=block,
            num_warps=min(MAX_WARPS, max(1, block // 8)), enable_fp_fusion=False)
    return num_accepted, is_accepted.view(torch.bool), is_rejected.view(torch.bool), log_r, status
