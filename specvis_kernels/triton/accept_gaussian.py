"""accept_gaussian in Triton: one program per request, all its positions at once, LANES channels at a time."""
import torch
import triton
import triton.language as tl

from ._gaussian import LANES, add_lanes, exp64, finite, distance_weight_of, log_ratio_terms
from ._rows import INVALID_ROW, MOST_WARPS


@triton.jit
def accept_gaussian_kernel(
        tokens,                                                          # (B, G, C)
        log_ratio, uniforms,                                             # (B, G)
        target_means, target_log_sigmas, draft_means, draft_log_sigmas,  # (B, G, C) or None
        temperature, drafted,                                            # (B) or None
        accepted,                                                        # (B)
        keep, redraw, log_r,                                             # (B, G)
        status,                                                          # (B)
        G, C, TRUNCATE: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, BLOCK)
    here = g < G
    if drafted is not None:
        here = here & (g < tl.load(drafted + b))
    distance_weight, found = distance_weight_of(temperature, b)

    row = b * G + g
    lane = tl.arange(0, LANES)
    sums = tl.zeros([BLOCK, LANES], tl.float64)
    bad = tl.zeros([BLOCK, LANES], tl.int32)
    start = 0
    while start < C:
        c = start + lane
        at = row[:, None] * C + c[None, :]
        inside = here[:, None] & (c < C)[None, :]
        x = tl.load(tokens + at, mask=inside, other=0.0)
        bad += tl.where(finite(x), 0, 1)
        if target_means is not None:
            sums += log_ratio_terms(x, tl.load(target_means + at, mask=inside, other=0.0),
                                    tl.load(target_log_sigmas + at, mask=inside, other=0.0),
                                    tl.load(draft_means + at, mask=inside, other=0.0),
                                    tl.load(draft_log_sigmas + at, mask=inside, other=0.0), distance_weight)
        start += LANES

    ratio = (tl.load(log_ratio + row, mask=here, other=0.0).to(tl.float64) + add_lanes(sums, BLOCK)).to(tl.float32)
    uniform = tl.load(uniforms + row, mask=here, other=0.0)
    wrong = tl.sum(bad, axis=1) + tl.where(finite(ratio) & finite(uniform), 0, 1)
    valid = tl.sum(wrong, axis=0) == 0
    judged = here & valid & (found == 0)
    odds = exp64(ratio.to(tl.float64))
    kept = judged & (uniform.to(tl.float64) < odds)
    rejected = judged & (uniform.to(tl.float64) >= odds)
    if TRUNCATE:
        rejections = tl.cumsum(rejected.to(tl.int32), axis=0)
        kept = kept & (rejections == 0)
        rejected = rejected & (rejections == 1)
    tl.store(accepted + b, tl.sum(kept.to(tl.int32), axis=0))
    tl.store(keep + row, kept.to(tl.uint8), mask=g < G)
    tl.store(redraw + row, rejected.to(tl.uint8), mask=g < G)
    tl.store(log_r + row, tl.where(judged, ratio, 0.0), mask=g < G)
    tl.store(status + b, found | tl.where(valid, 0, INVALID_ROW))


def accept_gaussian(tokens, log_ratio, uniforms, target_means, target_log_sigmas, draft_means, draft_log_sigmas,
                    temperature, drafted, truncate):
    B, G, C = tokens.shape
    accepted, status = (uniforms.new_empty(B, dtype=torch.int32) for _ in range(2))
    keep, redraw = (uniforms.new_empty((B, G), dtype=torch.uint8) for _ in range(2))
    log_r = torch.empty_like(uniforms)
    if B > 0:
        block = triton.next_power_of_2(G)
        accept_gaussian_kernel[(B,)](
            tokens, log_ratio, uniforms, target_means, target_log_sigmas, draft_means, draft_log_sigmas, temperature,
            drafted, accepted, keep, redraw, log_r, status, G, C, TRUNCATE=truncate, BLOCK=block,
            num_warps=min(MOST_WARPS, max(1, block // 8)), enable_fp_fusion=False)
    return accepted, keep.view(torch.bool), redraw.view(torch.bool), log_r, status
