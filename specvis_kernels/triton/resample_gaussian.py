"""resample_gaussian in Triton: one program per position looks at BLOCK tries at a time, until one ends the search."""
import torch
import triton
import triton.language as tl

from ._gaussian import LANES, add_lanes, distance_factor, exp64, is_finite, log_ratio_terms
from ._kernel import kernel, next_power_of_2
from ._rows import INVALID_ROW, OUT_OF_TRIES

MAX_TRIES = 16  # how many tries a program reads together


@triton.jit
def sample(mean, log_sigma, normals):
    return (mean.to(tl.float64) + exp64(log_sigma.to(tl.float64)) * normals.to(tl.float64)).to(tl.float32)


@kernel("C")
def resample_gaussian_kernel(
        tokens,                                                          # (B, G, C)
        is_accepted_in, is_rejected_in,                                  # (B, G)
        proposals,                                                       # (B, G, M, C)
        log_ratio,                                                       # (B, G), or (B, G, M) without the last step
        uniforms, fallback,                                              # (B, G, M), (B, G, C)
        target_means, target_log_sigmas, draft_means, draft_log_sigmas,  # (B, G, C) or None
        temperature,                                                     # (B) or None
        out, num_tries, status,                                          # (B, G, C), then (B, G)
        G, C, M, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    is_rejected = tl.load(is_rejected_in + i)
    is_accepted = (tl.load(is_accepted_in + i) != 0) & (is_rejected == 0)
    factor, rule_bits = distance_factor(temperature, i // G)
    is_resampled = (is_rejected != 0) & (rule_bits == 0)
    status_bits = tl.where(is_rejected != 0, rule_bits, 0)

    lane = tl.arange(0, LANES)
    j = tl.arange(0, BLOCK)
    start = 0
    last = M  # the try that ends the search
    while is_resampled & (start < M) & (last == M):
        m = start + j
        exists = m < M
        sums = tl.zeros([BLOCK, LANES], tl.float64)
        bad_tokens = tl.zeros([BLOCK, LANES], tl.int32)
        first_channel = 0
        while first_channel < C:
            c = first_channel + lane
            mask = exists[:, None] & (c < C)[None, :]
            x = tl.load(proposals + (i * M + m[:, None]) * C + c[None, :], mask=mask, other=0.0)
            if target_means is not None:
                at = i * C + c[None, :]
                channel = (c < C)[None, :]
                mean = tl.load(target_means + at, mask=channel, other=0.0)
                log_sigma = tl.load(target_log_sigmas + at, mask=channel, other=0.0)
                x = sample(mean, log_sigma, x)
                terms = log_ratio_terms(x, mean, log_sigma, tl.load(draft_means + at, mask=channel, other=0.0),
                                        tl.load(draft_log_sigmas + at, mask=channel, other=0.0), factor)
                sums += tl.where(mask, terms, 0.0)
            bad_tokens += tl.where(is_finite(x), 0, tl.where(mask, 1, 0))
            first_channel += LANES
        given = log_ratio + i + m * 0
        if target_means is None:
            given = log_ratio + i * M + m
        ratio = (tl.load(given, mask=exists, other=0.0).to(tl.float64) + add_lanes(sums, BLOCK)).to(tl.float32)
        uniform = tl.load(uniforms + i * M + m, mask=exists, other=0.0)
        bad = tl.sum(bad_tokens, axis=1) + tl.where(is_finite(ratio) & is_finite(uniform), 0, 1)
        succeeds = (ratio > 0.0) & (uniform.to(tl.float64) < 1.0 - exp64(-ratio.to(tl.float64)))
        last = tl.min(tl.where(exists & (succeeds | (bad > 0)), m, M), axis=0)
        if tl.max(tl.where(m == last, bad, 0), axis=0) > 0:
            status_bits = INVALID_ROW
        start += BLOCK

    c = tl.arange(0, BLOCK_C)
    mask = c < C
    chosen = tl.load(tokens + i * C + c, mask=c < tl.where(is_accepted, C, 0), other=0.0)
    count = 0
    if is_resampled:
        count = tl.minimum(last + 1, M)
        if last == M:
            status_bits = OUT_OF_TRIES
            chosen = tl.load(fallback + i * C + c, mask=mask, other=0.0)
        else:
            chosen = tl.load(proposals + (i * M + last) * C + c, mask=mask, other=0.0)
            if target_means is not None:
                chosen = sample(tl.load(target_means + i * C + c, mask=mask, other=0.0),
                                tl.load(target_log_sigmas + i * C + c, mask=mask, other=0.0), chosen)
    if tl.max(tl.where(is_finite(chosen), 0, tl.where(mask, 1, 0)), axis=0) > 0:
        status_bits = status_bits | INVALID_ROW
    tl.store(out + i * C + c, tl.where((status_bits & INVALID_ROW) == 0, chosen, 0.0), mask=mask)
    tl.store(num_tries + i, count)
    tl.store(status + i, status_bits)


def resample_gaussian(tokens, is_accepted, is_rejected, proposals, log_ratio, uniforms, fallback, target_means,
                      target_log_sigmas, draft_means, draft_log_sigmas, temperature):
    B, G, C = tokens.shape
    M = uniforms.shape[2]
    out = torch.empty_like(tokens)
    num_tries, status = (uniforms.new_empty((B, G), dtype=torch.int32) for _ in range(2))
    if B > 0:
        block = min(next_power_of_2(M), MAX_TRIES)
        resample_gaussian_kernel[(B * G,)](
            tokens, is_accepted.view(torch.uint8), is_rejected.view(torch.uint8), proposals, log_ratio, uniforms,
            fallback, target_means, target_log_sigmas, draft_means, draft_log_sigmas, temperature, out, num_tries,
            status, G, C, M, BLOCK=block, BLOCK_C=next_power_of_2(C), num_warps=max(1, block // 4),
            enable_fp_fusion=False)
    return out, num_tries, status
