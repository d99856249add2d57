"""resample_gaussian in Triton: one program per position; BLOCK tries at a time, until one ends the search."""
import torch
import triton
import triton.language as tl

from ._gaussian import LANES, add_lanes, exp64, finite, distance_weight_of, log_ratio_terms
from ._rows import INVALID_ROW, OUT_OF_TRIES

TRIES = 16  # that a program looks at together, at most


@triton.jit
def draw(mean, log_sigma, normals):
    return (mean.to(tl.float64) + exp64(log_sigma.to(tl.float64)) * normals.to(tl.float64)).to(tl.float32)


@triton.jit
def resample_gaussian_kernel(
        tokens,                                                          # (B, G, C)
        keep, redraw,                                                    # (B, G)
        proposals,                                                       # (B, G, M, C)
        log_ratio,                                                       # (B, G), or (B, G, M) without the last step
        uniforms,                                                        # (B, G, M)
        fallback,                                                        # (B, G, C)
        target_means, target_log_sigmas, draft_means, draft_log_sigmas,  # (B, G, C) or None
        temperature,                                                     # (B) or None
        out,                                                             # (B, G, C)
        tries, status,                                                   # (B, G)
        G, C, M, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    rejected = tl.load(redraw + i)
    kept = (tl.load(keep + i) != 0) & (rejected == 0)
    distance_weight, refused = distance_weight_of(temperature, i // G)
    wanted = (rejected != 0) & (refused == 0)
    found = tl.where(rejected != 0, refused, 0)

    lane = tl.arange(0, LANES)
    j = tl.arange(0, BLOCK)
    start = 0
    first = M  # the try that ends the search
    while wanted & (start < M) & (first == M):
        m = start + j
        here = m < M
        sums = tl.zeros([BLOCK, LANES], tl.float64)
        bad = tl.zeros([BLOCK, LANES], tl.int32)
        begin = 0
        while begin < C:
            c = begin + lane
            inside = here[:, None] & (c < C)[None, :]
            x = tl.load(proposals + (i * M + m[:, None]) * C + c[None, :], mask=inside, other=0.0)
            if target_means is not None:
                at = i * C + c[None, :]
                channel = (c < C)[None, :]
                mean = tl.load(target_means + at, mask=channel, other=0.0)
                log_sigma = tl.load(target_log_sigmas + at, mask=channel, other=0.0)
                x = draw(mean, log_sigma, x)
                terms = log_ratio_terms(x, mean, log_sigma, tl.load(draft_means + at, mask=channel, other=0.0),
                                        tl.load(draft_log_sigmas + at, mask=channel, other=0.0), distance_weight)
                sums += tl.where(inside, terms, 0.0)
            bad += tl.where(finite(x), 0, tl.where(inside, 1, 0))
            begin += LANES
        given = log_ratio + i + m * 0
        if target_means is None:
            given = log_ratio + i * M + m
        ratio = (tl.load(given, mask=here, other=0.0).to(tl.float64) + add_lanes(sums, BLOCK)).to(tl.float32)
        uniform = tl.load(uniforms + i * M + m, mask=here, other=0.0)
        broken = tl.sum(bad, axis=1) + tl.where(finite(ratio) & finite(uniform), 0, 1)
        taken = (ratio > 0.0) & (uniform.to(tl.float64) < 1.0 - exp64(-ratio.to(tl.float64)))
        first = tl.min(tl.where(here & (taken | (broken > 0)), m, M), axis=0)
        if tl.max(tl.where(m == first, broken, 0), axis=0) > 0:
            found = INVALID_ROW
        start += BLOCK

    c = tl.arange(0, BLOCK_C)
    inside = c < C
    chosen = tl.load(tokens + i * C + c, mask=c < tl.where(kept, C, 0), other=0.0)
    number = 0
    if wanted:
        number = tl.minimum(first + 1, M)
        if first == M:
            found = OUT_OF_TRIES
            chosen = tl.load(fallback + i * C + c, mask=inside, other=0.0)
        else:
            chosen = tl.load(proposals + (i * M + first) * C + c, mask=inside, other=0.0)
            if target_means is not None:
                chosen = draw(tl.load(target_means + i * C + c, mask=inside, other=0.0),
                              tl.load(target_log_sigmas + i * C + c, mask=inside, other=0.0), chosen)
    if tl.max(tl.where(finite(chosen), 0, tl.where(inside, 1, 0)), axis=0) > 0:
        found = found | INVALID_ROW
    tl.store(out + i * C + c, tl.where((found & INVALID_ROW) == 0, chosen, 0.0), mask=inside)
    tl.store(tries + i, number)
    tl.store(status + i, found)


def resample_gaussian(tokens, keep, redraw, proposals, log_ratio, uniforms, fallback, target_means,
                      target_log_sigmas, draft_means, draft_log_sigmas, temperature):
    B, G, C = tokens.shape
    M = uniforms.shape[2]
    out = torch.empty_like(tokens)
    tries, status = (uniforms.new_empty((B, G), dtype=torch.int32) for _ in range(2))
    if B > 0:
        block = min(triton.next_power_of_2(M), TRIES)
        resample_gaussian_kernel[(B * G,)](
            tokens, keep.view(torch.uint8), redraw.view(torch.uint8), proposals, log_ratio, uniforms, fallback,
            target_means, target_log_sigmas, draft_means, draft_log_sigmas, temperature, out, tries, status, G, C, M,
            BLOCK=block, BLOCK_C=triton.next_power_of_2(C), num_warps=max(1, block // 4), enable_fp_fusion=False)
    return out, tries, status
