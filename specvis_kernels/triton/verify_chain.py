"""verify_chain in Triton: one program per request, a tree in which node n's only child is n + 1, see _verify.py."""
import torch
import triton
import triton.language as tl

from ._chain_rules import verify_block, verify_fly
from ._kernel import kernel
from ._rows import INVALID_TREE, block
from ._verify import store_outputs
from ._verify_greedy import verify_greedy
from ._verify_sampled import verify_sampled


@triton.jit
def is_in_place(ends, b, D, BLOCK: tl.constexpr):
    """Whether the drafts of requests 0 to b follow each other, the last of them within D."""
    num_wrong = tl.zeros([BLOCK], tl.int32)
    start = b * 0
    while start <= b:
        i = start + tl.arange(0, BLOCK)
        first = tl.load(ends + i - 1, mask=(i > 0) & (i <= b), other=0)
        end = tl.load(ends + i, mask=i <= b, other=0)
        num_wrong += tl.where((i <= b) & ((end < first) | (end > D)), 1, 0)
        start += BLOCK
    return tl.sum(num_wrong, axis=0) == 0


@kernel("target_probs", "draft_probs", "mass", "draft_mass", "V")
def verify_chain_kernel(
        target_probs, draft_tokens,                                   # (T, V), (D)
        ends,                                                         # (B) where each request's drafts end
        uniforms, bonus_tokens, draft_probs,                          # (D + B), (B) or None, (D, V) or None
        neighbors, delta, omega, greedy,                              # (C, k), (B), (B) and (B); or None
        mass, draft_mass, greedy_scratch,                             # scratch: (B, V), (B, V), (3 (D + B))
        num_accepted_out, next_token_out, tv_excess_out, status_out,  # (B)
        D, V, C, k, offset, CUTOFF: tl.constexpr, RESIDUAL: tl.constexpr, EMPTY: tl.constexpr,
        BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    zero = b * 0
    is_mine = is_in_place(ends, b, D, 64)
    if is_mine:
        first = tl.load(ends + b - 1, mask=b > 0, other=0).to(tl.int64)
        P = tl.load(ends + b).to(tl.int64) - first
        N = P + 1
        tokens = draft_tokens + first - 1  # node 1 is the first draft
        uniforms += first + b
        mass += b * V
        row = first + b
        bonus = None
        if bonus_tokens is not None:
            row = first
            bonus = bonus_tokens + b
        if draft_probs is not None:
            draft_probs += first * V
            draft_mass += b * V
        if neighbors is not None:
            delta += b
        if omega is not None:
            omega += b
        rows = target_probs + row * V
        is_sampling = b >= 0
        if greedy is not None:
            is_sampling = tl.load(greedy + b) == 0
        if is_sampling:
            num_accepted, next_token, tv_excess, status = verify_sampled(
                rows, (None, 0, V), tokens, None, None, uniforms, draft_probs, None, neighbors, delta, omega, bonus,
                mass, draft_mass, None, N, V, P, P, C, k, offset, CUTOFF, RESIDUAL, EMPTY, BLOCK, BLOCK_K)
            store_outputs(num_accepted_out, next_token_out, tv_excess_out, status_out, num_accepted, next_token,
                          tv_excess, status)
        if greedy is not None:
            if is_sampling == 0:
                num_accepted, next_token, tv_excess, status = verify_greedy(
                    rows, (None, 0, V), tokens, None, None, neighbors, delta, bonus, greedy_scratch + 3 * (first + b),
                    None, N, V, P, C, k, offset, CUTOFF, RESIDUAL, BLOCK, BLOCK_K)
                store_outputs(num_accepted_out, next_token_out, tv_excess_out, status_out, num_accepted, next_token,
                              tv_excess, status)
    else:
        store_outputs(num_accepted_out, next_token_out, tv_excess_out, status_out, zero.to(tl.int32), zero,
                      zero.to(tl.float64), zero.to(tl.int32) + INVALID_TREE)


@kernel("target_probs", "draft_probs", "mass", "V")
def verify_by_rule_kernel(
        target_probs, draft_tokens,                                   # (T, V), (D)
        ends,                                                         # (B) where each request's drafts end
        uniforms, bonus_tokens, draft_probs, greedy,                  # (D + B), (B), (D, V) and (B); or None
        mass, excess,                                                 # scratch: (B, V), (D)
        num_accepted_out, next_token_out, tv_excess_out, status_out,  # (B)
        D, V, window, entropy, RULE: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    num_accepted = tl.full((), 0, tl.int32)
    next_token = b * 0
    tv_excess = next_token.to(tl.float64)
    status = num_accepted + INVALID_TREE
    if is_in_place(ends, b, D, 64):
        first = tl.load(ends + b - 1, mask=b > 0, other=0).to(tl.int64)
        N = tl.load(ends + b).to(tl.int64) - first
        row = first + b
        bonus = None
        if bonus_tokens is not None:
            row = first
            bonus = bonus_tokens + b
        rows = target_probs + row * V
        draft_rows = None
        if draft_probs is not None:
            draft_rows = draft_probs + first * V
        if mass is not None:
            mass += b * V
        is_greedy = b < 0
        if greedy is not None:
            is_greedy = tl.load(greedy + b) != 0
        if RULE == "block":
            if is_greedy:  # the strict rule: nothing is as long as the window
                num_accepted, next_token, tv_excess, status = verify_fly(
                    rows, draft_rows, draft_tokens + first, uniforms + first + b, bonus, mass, excess + first,
                    is_greedy, N, V, N + 1, entropy, BLOCK)
            else:
                num_accepted, next_token, tv_excess, status = verify_block(
                    rows, draft_rows, draft_tokens + first, uniforms + first + b, bonus, N, V, BLOCK)
        else:
            num_accepted, next_token, tv_excess, status = verify_fly(
                rows, draft_rows, draft_tokens + first, uniforms + first + b, bonus, mass, excess + first,
                is_greedy, N, V, window, entropy, BLOCK)
    store_outputs(num_accepted_out, next_token_out, tv_excess_out, status_out, num_accepted, next_token, tv_excess,
                  status)


def verify_chain(target_probs, draft_tokens, cu_num_draft_tokens, uniforms, bonus_tokens, draft_probs, neighbors, delta,
                 omega, greedy, cutoff, offset, residual, empty, rule, window, entropy):
    D, B, V = len(draft_tokens), len(cu_num_draft_tokens), target_probs.shape[1]
    C, k = (0, 0) if neighbors is None else neighbors.shape
    num_accepted = target_probs.new_empty(B, dtype=torch.int32)
    next_token = target_probs.new_empty(B, dtype=torch.int64)
    tv_excess, status = target_probs.new_empty(B), target_probs.new_empty(B, dtype=torch.int32)
    if B > 0 and rule != "strict":
        mass = target_probs.new_empty(B, V, dtype=torch.int64) if draft_probs is None else None
        verify_by_rule_kernel[(B,)](
            target_probs, draft_tokens, cu_num_draft_tokens, uniforms, bonus_tokens, draft_probs,
            None if greedy is None else greedy.view(torch.uint8), mass, target_probs.new_empty(D, dtype=torch.float64),
            num_accepted, next_token, tv_excess, status, D, V, window, entropy, RULE=rule, BLOCK=block("V", V),
            num_warps=8, enable_fp_fusion=False)
    elif B > 0:
        mass = target_probs.new_empty(B, V, dtype=torch.int64)
        draft_mass = None if draft_probs is None else target_probs.new_empty(B, V, dtype=torch.int64)
        greedy_scratch = None if greedy is None else target_probs.new_empty(3 * (D + B), dtype=torch.int32)
        verify_chain_kernel[(B,)](
            target_probs, draft_tokens, cu_num_draft_tokens, uniforms, bonus_tokens, draft_probs, neighbors, delta,
            omega, None if greedy is None else greedy.view(torch.uint8), mass, draft_mass, greedy_scratch,
            num_accepted, next_token, tv_excess, status, D, V, C, k, offset, CUTOFF=cutoff, RESIDUAL=residual,
            EMPTY=empty, BLOCK=block("V", V), BLOCK_K=block("k", max(k, 1)), num_warps=8, enable_fp_fusion=False)
    return num_accepted, next_token, tv_excess, status
