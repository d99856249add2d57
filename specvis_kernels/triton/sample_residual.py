"""sample_residual in Triton: one program per row; a pass for each total, then the search, block by block."""
import torch
import triton
import triton.language as tl

from ._rows import (EMPTY_RESIDUAL, INVALID_ROW, INVALID_RULE, block, draw, draw_at, load_weights,
                    residual_weights, weigh)


@triton.jit
def left(target, draft, v, V, total, draft_total, slack):
    """The residual's weights of tokens v."""
    weight = load_weights(target, v, v < V, True)
    drafted = load_weights(draft, v, v < V, True)
    return residual_weights(weight, total, drafted, draft_total, slack)


@triton.jit
def sample_residual_kernel(
        target_probs,    # (R, V)
        draft_probs,     # (R, V) or None
        uniforms,        # (R)
        omega,           # (R) or None
        tokens, status,  # (R)
        V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = target_probs + row * V
    uniform = tl.load(uniforms + row)
    total, valid = weigh(target, V, None, 0, BLOCK)
    found = 0
    slack = tl.full([], 0.0, tl.float64)
    if omega is not None:
        factor = tl.load(omega + row).to(tl.float64)
        found = tl.where(factor >= 0.0, 0, INVALID_RULE)
        slack = tl.where(factor < 1.0, 1.0 - factor, slack)

    from_target = valid
    token = total * 0
    if draft_probs is not None:
        draft = draft_probs + row * V
        draft_total, sound = weigh(draft, V, None, 0, BLOCK)
        valid = valid & sound
        from_target = valid
        if valid & (found == 0):
            sums = tl.zeros([BLOCK], tl.int64)
            v = tl.arange(0, BLOCK)
            start = 0
            while start < V:
                sums += left(target, draft, start + v, V, total, draft_total, slack)
                start += BLOCK
            rest_total = tl.sum(sums, axis=0)
            from_target = rest_total == 0
            if rest_total == 0:
                found = EMPTY_RESIDUAL
            else:
                at = draw_at(uniform, rest_total)
                begin = 0
                below = rest_total * 0
                rest = left(target, draft, v, V, total, draft_total, slack)
                mass = tl.sum(rest, axis=0)
                while (begin + BLOCK < V) & (below + mass <= at):
                    below += mass
                    begin += BLOCK
                    rest = left(target, draft, begin + v, V, total, draft_total, slack)
                    mass = tl.sum(rest, axis=0)
                before = (below + tl.cumsum(rest, axis=0) <= at).to(tl.int64)
                token = tl.minimum(begin + tl.sum(before, axis=0), V - 1)
    if from_target:
        token = draw(target, V, total, uniform, True, BLOCK)
    tl.store(tokens + row, token)
    tl.store(status + row, found | tl.where(valid, 0, INVALID_ROW))


def sample_residual(target_probs, draft_probs, uniforms, omega):
    R, V = target_probs.shape
    tokens, status = uniforms.new_empty(R, dtype=torch.int64), uniforms.new_empty(R, dtype=torch.int32)
    if R > 0:
        sample_residual_kernel[(R,)](target_probs, draft_probs, uniforms, omega, tokens, status, V,
                                     BLOCK=block("V", V), num_warps=8, enable_fp_fusion=False)
    return tokens, status
