"""How one program verifies a sampling request's tree, see _verify.py."""
import triton
import triton.language as tl

from ._residual import fill_uniform, reject
from ._rows import (
    EMPTY_RESIDUAL,
    INVALID_DRAFT,
    INVALID_ROW,
    INVALID_RULE,
    INVALID_TREE,
    accept_prob,
    accepts,
    draw,
    to_fixed_point,
)
from ._verify import load_link, relax


@triton.jit
def check_omega(omega, omega_step, P, neighbors, RESIDUAL: tl.constexpr):
    """INVALID_RULE if an omega is negative or NaN, or below 1 with neighbors and the optimal residual; else 0."""
    status = omega_step * 0
    if omega is not None:
        d = 0
        while d < P:
            is_defined = tl.load(omega + d * omega_step) >= 0.0
            if neighbors is not None and RESIDUAL == "optimal":
                is_defined = tl.load(omega + d * omega_step) >= 1.0
            status = tl.where(is_defined, status, INVALID_RULE)
            d += 1
    return status


@triton.jit
def verify_sampled(target_probs, ids, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors,
                   delta, omega, bonus, mass, draft_mass, accepted_nodes, N, V, M, P, C, k, offset,
                   CUTOFF: tl.constexpr, RESIDUAL: tl.constexpr, EMPTY: tl.constexpr, BLOCK: tl.constexpr,
                   BLOCK_K: tl.constexpr):
    """Verifies a request that samples; returns num_accepted, next_token, tv_excess, status."""
    zero = tl.program_id(0).to(tl.int64) * 0
    omega_step = zero.to(tl.int32)
    if first_child is not None:
        omega_step += 1
    status = check_omega(omega, omega_step, P, neighbors, RESIDUAL)
    is_undefined = status != 0

    node = zero
    num_accepted = zero.to(tl.int32)
    tv_excess = zero.to(tl.float64)
    total = zero
    is_valid = zero == 0
    is_changed = zero != 0  # whether the mass differs from the target's row
    descends = zero == 0
    if bonus is not None:
        descends = N > 1
    enters = zero == 0  # else the residual was empty, and the node's row is read again
    child = zero
    previous = zero
    is_sampled = zero != 0
    draft_total = zero
    reach_prob = tv_excess + 1.0
    while descends:
        tl.debug_barrier()
        if enters:
            child = load_link(first_child, node, node + 1)
            child = tl.where((num_accepted < P) & (is_undefined == 0), child, -1)
            previous = node
            reach_prob = tv_excess * 0.0 + 1.0
        active = child >= 0
        total, is_valid = to_fixed_point(
            target_probs + node * V, V, mass, tl.where(active | (enters == 0), V, 0), BLOCK)
        is_changed = zero != 0
        if EMPTY == "uniform":
            if enters == 0:
                tl.debug_barrier()
                total = fill_uniform(mass, V, BLOCK)
                is_changed = zero == 0
        status |= tl.where(is_valid, 0, INVALID_ROW)
        active = active & is_valid
        if draft_probs is not None:
            if enters:
                m = load_link(draft_row, node, node)
                is_sampled = m >= 0
                draft_total = zero
                status |= tl.where(active & (m >= M), INVALID_TREE, 0)
                active = active & (m < M)
                if active & is_sampled:
                    draft_total, draft_is_valid = to_fixed_point(draft_probs + m * V, V, draft_mass, V, BLOCK)
                    status |= tl.where(draft_is_valid, 0, INVALID_DRAFT)
                    active = draft_is_valid
        tl.debug_barrier()

        accepted_child = zero - 1
        is_empty = zero != 0
        while active:
            is_later = (child > previous) & (child < N)
            token = tl.load(tokens + child, mask=is_later, other=-1).to(tl.int64)
            active = is_later & (token >= 0) & (token < V)
            status |= tl.where(active, 0, INVALID_TREE)
            token_draft_mass = zero
            if draft_probs is not None:
                if is_sampled & active:
                    token_draft_mass = tl.load(draft_mass + token)
            is_drawn = (is_sampled == 0) | (token_draft_mass > 0)
            status |= tl.where(active & (is_drawn == 0) & (draft_total > 0), INVALID_DRAFT, 0)
            if active & is_drawn:
                token_mass = tl.load(mass + token)
                relaxed_mass, num_kept = relax(mass, V, neighbors, C, k, offset, ids, node, token, token_mass, total,
                                               delta, CUTOFF, RESIDUAL, False, BLOCK_K)
                omega_d = tv_excess * 0.0 + 1.0
                if omega is not None:
                    omega_d = tl.load(omega + num_accepted * omega_step).to(tl.float64)
                relaxed_prob = accept_prob(is_sampled, relaxed_mass, total, token_draft_mass, draft_total, omega_d)
                strict_prob = accept_prob(is_sampled, token_mass, total, token_draft_mass, draft_total,
                                          tv_excess * 0.0 + 1.0)
                tv_excess += reach_prob * tl.maximum(relaxed_prob - strict_prob, 0.0)
                reach_prob *= 1.0 - relaxed_prob
                tl.debug_barrier()
                if accepts(is_sampled, tl.load(uniforms + child), relaxed_mass, total, token_draft_mass, draft_total,
                           omega_d):
                    accepted_child = child
                else:
                    total, draft_total = reject(
                        mass, draft_mass, V, token, token_mass, relaxed_mass, token_draft_mass, total, draft_total,
                        is_sampled, omega_d, neighbors, num_kept, k, offset, RESIDUAL, BLOCK, BLOCK_K)
                    tl.debug_barrier()
                    is_changed = zero == 0
                    is_empty = total == 0
                    status |= tl.where(is_empty, EMPTY_RESIDUAL, 0)
            previous = child
            active = active & (accepted_child < 0)
            child = load_link(next_sibling, child, zero - 1, active)
            active = active & (child >= 0) & (is_empty == 0)

        descends = (accepted_child >= 0) | is_empty
        enters = is_empty == 0
        if accepted_child >= 0:
            if accepted_nodes is not None:
                tl.store(accepted_nodes + num_accepted, accepted_child.to(tl.int32))
            num_accepted += 1
            node = accepted_child
        if bonus is not None:
            descends = descends & (node < N - 1)

    next_token = zero
    if bonus is not None:
        is_valid = is_valid & (node < N - 1)
        if node == N - 1:
            next_token = tl.load(bonus)
    if is_valid:
        if is_changed:
            next_token = draw(mass, V, total, tl.load(uniforms), False, BLOCK)
        else:
            next_token = draw(target_probs + node * V, V, total, tl.load(uniforms), True, BLOCK)
    return num_accepted, next_token, tv_excess, status
