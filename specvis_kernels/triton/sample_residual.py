"""sample_residual in Triton: one program per row; a pass for each total, then the search, block by block."""
import torch
import triton.language as tl

from ._kernel import kernel
from ._rows import EMPTY_RESIDUAL, INVALID_DRAFT, INVALID_ROW, INVALID_RULE, block, draw, draw_residual, to_fixed_point


@kernel("target_probs", "draft_probs", "V")
def sample_residual_kernel(
        target_probs, draft_probs,  # (R, V); draft_probs may be None
        uniforms, omega,            # (R); omega may be None
        tokens, status,             # (R)
        V, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    target_row = target_probs + r * V
    uniform = tl.load(uniforms + r)
    total, is_valid = to_fixed_point(target_row, V, None, 0, BLOCK)
    row_status = 0
    slack = tl.full([], 0.0, tl.float64)  # the share of the target that stays at least
    if omega is not None:
        omega_r = tl.load(omega + r).to(tl.float64)
        row_status = tl.where(omega_r >= 0.0, 0, INVALID_RULE)
        slack = tl.where(omega_r < 1.0, 1.0 - omega_r, slack)

    draws_from_target = is_valid
    token = total * 0
    if draft_probs is not None:
        draft_row = draft_probs + r * V
        draft_total, draft_is_valid = to_fixed_point(draft_row, V, None, 0, BLOCK)
        row_status |= tl.where(draft_is_valid, 0, INVALID_DRAFT)
        if is_valid & (row_status == 0):
            token, residual_total = draw_residual(target_row, draft_row, V, total, draft_total, slack, uniform, None,
                                                  0, 0, False, BLOCK)
            draws_from_target = residual_total == 0
            if residual_total == 0:
                row_status = EMPTY_RESIDUAL
    if draws_from_target:
        token = draw(target_row, V, total, uniform, True, BLOCK)
    tl.store(tokens + r, token)
    tl.store(status + r, row_status | tl.where(is_valid, 0, INVALID_ROW))


def sample_residual(target_probs, draft_probs, uniforms, omega):
    R, V = target_probs.shape
    tokens, status = uniforms.new_empty(R, dtype=torch.int64), uniforms.new_empty(R, dtype=torch.int32)
    if R > 0:
        sample_residual_kernel[(R,)](target_probs, draft_probs, uniforms, omega, tokens, status, V,
                                     BLOCK=block("V", V), num_warps=16, enable_fp_fusion=False)
    return tokens, status
