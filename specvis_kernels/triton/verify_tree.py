"""verify_tree in Triton: one program per request, from the root of its tree to a leaf.

What is left of the target at the current node, and the draft row of its children, stand in scratch of this
program, in fixed point. A barrier stands wherever threads read what others wrote, or write what others may still
be reading.
"""
import torch
import triton
import triton.language as tl

from ._rows import (
    EMPTY_RESIDUAL,
    INVALID_ROW,
    INVALID_RULE,
    INVALID_TREE,
    accept_prob,
    block,
    draw,
    load_mass,
    neighbor_prefix,
    residual_mass,
    to_fixed_point,
)


@triton.jit
def clear_neighbors(mass, V, token_neighbors, count, offset, BLOCK_K: tl.constexpr):
    """The mass of the first `count` neighbors becomes 0; returns its sum, in which an id counts once."""
    sums = tl.zeros([BLOCK_K], tl.int64)
    start = count * 0
    while start < count:
        j = start + tl.arange(0, BLOCK_K)
        ids = tl.load(token_neighbors + j, mask=j < count, other=0).to(tl.int64) + offset
        in_vocabulary = (j < count) & (ids >= 0) & (ids < V)
        cleared = tl.atomic_xchg(mass + ids, tl.zeros([BLOCK_K], tl.int64), mask=in_vocabulary)
        sums += tl.where(in_vocabulary, cleared, 0)
        start += BLOCK_K
    return tl.sum(sums, axis=0)


@triton.jit
def protect_neighbors(draft_mass, V, token_neighbors, count, offset, BLOCK_K: tl.constexpr):
    """The next subtract() takes nothing from the first `count` neighbors: negatives mark them, which it undoes."""
    start = count * 0
    while start < count:
        j = start + tl.arange(0, BLOCK_K)
        ids = tl.load(token_neighbors + j, mask=j < count, other=0).to(tl.int64) + offset
        in_vocabulary = (j < count) & (ids >= 0) & (ids < V)
        entry = tl.load(draft_mass + ids, mask=in_vocabulary, other=0)
        tl.store(draft_mass + ids, tl.where(entry >= 0, -entry - 1, entry), mask=in_vocabulary)
        tl.debug_barrier()  # an id listed twice must be seen as marked
        start += BLOCK_K


@triton.jit
def subtract(mass, draft_mass, V, total, draft_total, slack, BLOCK: tl.constexpr):
    """mass becomes the residual after a child from the draft row; returns its total."""
    totals = tl.zeros([BLOCK], tl.int64)
    start = 0
    while start < V:
        v = start + tl.arange(0, BLOCK)
        entry = tl.load(mass + v, mask=v < V, other=0)
        draft_entry = tl.load(draft_mass + v, mask=v < V, other=0)
        tl.store(draft_mass + v, tl.where(draft_entry < 0, -draft_entry - 1, draft_entry), mask=v < V)
        residual = residual_mass(entry, total, tl.maximum(draft_entry, 0), draft_total, slack)
        tl.store(mass + v, residual, mask=v < V)
        totals += residual
        start += BLOCK
    return tl.sum(totals, axis=0)


@triton.jit
def verify_sampled(target_probs, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors, delta,
                   omega, mass, draft_mass, accepted_nodes, N, V, M, P, C, k, offset,
                   CUTOFF: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """A request that samples; returns num_accepted, next_token, tv_excess, status."""
    zero = tl.program_id(0).to(tl.int64) * 0
    status = zero.to(tl.int32)
    if omega is not None:
        d = 0
        while d < P:
            is_defined = tl.load(omega + d) >= 0.0
            if neighbors is not None and RESIDUAL == "optimal":
                is_defined = tl.load(omega + d) >= 1.0
            status = tl.where(is_defined, status, INVALID_RULE)
            d += 1
    is_undefined = status != 0

    node = zero
    num_accepted = zero.to(tl.int32)
    tv_excess = zero.to(tl.float64)
    total = zero
    is_valid = zero == 0
    is_changed = zero != 0  # does the mass differ from the target's row?
    descends = zero == 0
    while descends:
        tl.debug_barrier()
        target_row = target_probs + node * V
        child = tl.load(first_child + node).to(tl.int64)
        active = (child >= 0) & (num_accepted < P) & (is_undefined == 0)
        total, is_valid = to_fixed_point(target_row, V, mass, tl.where(active, V, 0), BLOCK)
        is_changed = zero != 0
        status |= tl.where(is_valid, 0, INVALID_ROW)
        active = active & is_valid
        is_sampled = zero != 0
        draft_total = zero
        if draft_probs is not None:
            m = tl.load(draft_row + node).to(tl.int64)
            is_sampled = m >= 0
            status |= tl.where(active & (m >= M), INVALID_TREE, 0)
            active = active & (m < M)
            if active & is_sampled:
                draft_total, draft_is_valid = to_fixed_point(draft_probs + m * V, V, draft_mass, V, BLOCK)
                status |= tl.where(draft_is_valid, 0, INVALID_ROW)
                active = draft_is_valid
        tl.debug_barrier()

        previous = node
        accepted_child = zero - 1
        reach_prob = zero.to(tl.float64) + 1.0
        while active:
            is_later = (child > previous) & (child < N)
            token = tl.load(tokens + child, mask=is_later, other=-1)
            active = is_later & (token >= 0) & (token < V)
            status |= tl.where(active, 0, INVALID_TREE)
            if active & ((is_sampled == 0) | (draft_total > 0)):
                token_mass = tl.load(mass + token)
                token_draft_mass = zero
                if draft_probs is not None:
                    if is_sampled:
                        token_draft_mass = tl.load(draft_mass + token)
                relaxed_mass = token_mass
                num_kept = num_accepted * 0
                if neighbors is not None:
                    num_considered = k
                    if RESIDUAL == "released":
                        num_considered = k - 1
                    neighbor_mass, num_kept = neighbor_prefix(
                        mass, V, neighbors, C, k, num_considered, offset, token, token_mass, total, tl.load(delta),
                        CUTOFF, False, BLOCK_K)
                    relaxed_mass += neighbor_mass
                omega_d = tv_excess * 0.0 + 1.0
                if omega is not None:
                    omega_d = tl.load(omega + num_accepted).to(tl.float64)

                # u Q(x) < omega * relaxed mass, both sides times the totals of R and of the draft row.
                uniform = tl.load(uniforms + child).to(tl.float64)
                need = uniform * total.to(tl.float64)
                numerator = omega_d * relaxed_mass.to(tl.float64)
                if is_sampled:
                    need = (uniform * token_draft_mass.to(tl.float64)) * total.to(tl.float64)
                    numerator = numerator * draft_total.to(tl.float64)
                relaxed_prob = accept_prob(is_sampled, relaxed_mass, total, token_draft_mass, draft_total, omega_d)
                strict_prob = accept_prob(is_sampled, token_mass, total, token_draft_mass, draft_total,
                                          tv_excess * 0.0 + 1.0)
                tv_excess += reach_prob * tl.maximum(relaxed_prob - strict_prob, 0.0)
                reach_prob *= 1.0 - relaxed_prob
                tl.debug_barrier()
                if (need < numerator) & (relaxed_mass > 0):
                    accepted_child = child
                else:
                    slack = tl.where(omega_d < 1.0, 1.0 - omega_d, 0.0)  # the share of R that stays at least
                    if RESIDUAL != "optimal":
                        slack = slack * 0.0
                    if draft_probs is not None:
                        if is_sampled:
                            if neighbors is not None and RESIDUAL == "relaxed":
                                clear_neighbors(mass, V, neighbors + (token - offset) * k, num_kept, offset, BLOCK_K)
                                tl.debug_barrier()
                                tl.store(mass + token, relaxed_mass)
                            if neighbors is not None and RESIDUAL == "released":
                                protect_neighbors(draft_mass, V, neighbors + (token - offset) * k,
                                                  tl.where(num_kept > 0, k, 0), offset, BLOCK_K)
                            tl.debug_barrier()
                            total = subtract(mass, draft_mass, V, total, draft_total, slack, BLOCK)
                            tl.debug_barrier()
                            tl.store(draft_mass + token, zero)
                            draft_total -= token_draft_mass
                    if is_sampled == 0:
                        left = (slack * token_mass.to(tl.float64)).to(tl.int64)
                        tl.store(mass + token, left)
                        total += left - token_mass
                        if neighbors is not None and RESIDUAL != "optimal":
                            tl.debug_barrier()
                            num_cleared = num_kept
                            if RESIDUAL == "released":
                                num_cleared = tl.where(num_kept > 0, k, 0)
                            total -= clear_neighbors(mass, V, neighbors + (token - offset) * k, num_cleared, offset,
                                                     BLOCK_K)
                    tl.debug_barrier()
                    is_changed = total != 0
                    if total == 0:
                        status |= EMPTY_RESIDUAL
                        total, is_valid = to_fixed_point(target_row, V, mass, V, BLOCK)
                        tl.debug_barrier()
            previous = child
            active = active & (accepted_child < 0)
            child = tl.load(next_sibling + child, mask=active, other=-1).to(tl.int64)
            active = active & (child >= 0)

        descends = accepted_child >= 0
        if descends:
            tl.store(accepted_nodes + num_accepted, accepted_child.to(tl.int32))
            num_accepted += 1
            node = accepted_child

    next_token = zero
    if is_valid:
        if is_changed:
            next_token = draw(mass, V, total, tl.load(uniforms), False, BLOCK)
        else:
            next_token = draw(target_probs + node * V, V, total, tl.load(uniforms), True, BLOCK)
    return num_accepted, next_token, tv_excess, status


@triton.jit
def row_argmax(row, V, BLOCK: tl.constexpr):
    """The row's largest mass and its lowest id."""
    largest = tl.full([BLOCK], -1, tl.int64)
    ids = tl.zeros([BLOCK], tl.int64)
    start = 0
    while start < V:
        v = start + tl.arange(0, BLOCK)
        mass = load_mass(row, v, v < V, True)
        is_larger = (mass > largest) & (v < V)
        largest = tl.where(is_larger, mass, largest)
        ids = tl.where(is_larger, v, ids)
        start += BLOCK
    max_mass = tl.max(largest, axis=0)
    return max_mass, tl.min(tl.where(largest == max_mass, ids, V), axis=0)


@triton.jit
def verify_greedy(target_probs, tokens, first_child, next_sibling, neighbors, delta, scratch, accepted_nodes, N, V, P,
                  C, k, offset, CUTOFF: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
                  BLOCK_K: tl.constexpr):
    """A greedy request: nodes in order, each with its chain of children. Returns what verify_sampled() does."""
    zero = tl.program_id(0).to(tl.int64) * 0
    status = zero.to(tl.int32)
    depth = scratch                   # (N) of a node on an accepted path, else -1
    parent = scratch + N              # (N) written where the node is accepted
    num_non_argmax = scratch + 2 * N  # (N) accepted tokens down to this node that are not their row's argmax
    n = zero
    while n < N:
        tl.store(depth + n, tl.where(n == 0, 0, -1))
        n += 1
    tl.store(num_non_argmax, 0)
    tl.debug_barrier()

    end_node = zero
    num_accepted = zero.to(tl.int32)
    n = zero
    while n < N:
        node_depth = tl.load(depth + n)
        end_node = tl.where(node_depth > num_accepted, n, end_node)
        num_accepted = tl.maximum(node_depth, num_accepted)
        child = tl.load(first_child + n).to(tl.int64)
        if (node_depth >= 0) & (node_depth < P) & (child >= 0):
            row = target_probs + n * V
            total, active = to_fixed_point(row, V, None, 0, BLOCK)
            max_mass, argmax = row_argmax(row, V, BLOCK)
            previous = n
            while active:
                is_later = (child > previous) & (child < N)
                token = tl.load(tokens + child, mask=is_later, other=-1)
                active = is_later & (token >= 0) & (token < V)
                status |= tl.where(active, 0, INVALID_TREE)
                relaxed_mass = load_mass(row, token, active, True)
                if neighbors is not None:
                    num_considered = k
                    if RESIDUAL == "released":
                        num_considered = k - 1
                    neighbor_mass, _ = neighbor_prefix(
                        row, V, neighbors, C, k, num_considered, offset, token, relaxed_mass, total, tl.load(delta),
                        CUTOFF, True, BLOCK_K)
                    relaxed_mass += neighbor_mass
                is_best = ((token == argmax) | (relaxed_mass > max_mass)
                           | ((relaxed_mass == max_mass) & (token < argmax)))
                if active & is_best:
                    tl.store(depth + child, node_depth + 1)
                    tl.store(parent + child, n.to(tl.int32))
                    tl.store(num_non_argmax + child, tl.load(num_non_argmax + n) + tl.where(token == argmax, 0, 1))
                previous = child
                child = tl.load(next_sibling + child, mask=active, other=-1).to(tl.int64)
                active = active & (child >= 0)
            tl.debug_barrier()
        n += 1

    row = target_probs + end_node * V
    total, is_valid = to_fixed_point(row, V, None, 0, BLOCK)
    max_mass, argmax = row_argmax(row, V, BLOCK)
    status |= tl.where(is_valid, 0, INVALID_ROW)
    tv_excess = tl.load(num_non_argmax + end_node).to(tl.float64)
    node = end_node
    d = num_accepted
    while d > 0:
        tl.store(accepted_nodes + d - 1, node.to(tl.int32))
        node = tl.load(parent + node).to(tl.int64)
        d -= 1
    return num_accepted, tl.where(is_valid, argmax, 0).to(tl.int64), tv_excess, status


@triton.jit(do_not_specialize=["N", "M", "P", "C", "k", "offset"])  # they change from step to step
def verify_tree_kernel(
        target_probs,               # (B, N, V)
        tokens,                     # (B, N)
        first_child, next_sibling,  # (B, N)
        uniforms,                   # (B, N)
        draft_probs,                # (B, M, V) or None
        draft_row,                  # (B, N)
        neighbors,                  # (C, k) or None
        delta,                      # (B)
        omega,                      # (B, P) or None
        greedy,                     # (B) or None
        mass, draft_mass,           # (B, V) scratch
        greedy_scratch,             # (B, 3, N)
        accepted_nodes,             # (B, P)
        num_accepted_out, next_token_out, tv_excess_out, status_out,  # (B)
        N, V, M, P, C, k, offset, CUTOFF: tl.constexpr, RESIDUAL: tl.constexpr,
        BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    target_probs += b * N * V
    tokens += b * N
    first_child += b * N
    next_sibling += b * N
    uniforms += b * N
    mass += b * V
    accepted_nodes += b * P
    if draft_probs is not None:
        draft_probs += b * M * V
        draft_row += b * N
        draft_mass += b * V
    if neighbors is not None:
        delta += b
    if omega is not None:
        omega += b * P

    d = 0
    while d < P:
        tl.store(accepted_nodes + d, -1)
        d += 1
    tl.debug_barrier()
    is_sampling = b >= 0
    if greedy is not None:
        is_sampling = tl.load(greedy + b) == 0
    if is_sampling:
        num_accepted, next_token, tv_excess, status = verify_sampled(
            target_probs, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors, delta, omega,
            mass, draft_mass, accepted_nodes, N, V, M, P, C, k, offset, CUTOFF, RESIDUAL, BLOCK, BLOCK_K)
        tl.store(num_accepted_out + b, num_accepted)
        tl.store(next_token_out + b, next_token)
        tl.store(tv_excess_out + b, tv_excess.to(tl.float32))
        tl.store(status_out + b, status)
    if greedy is not None:
        if is_sampling == 0:
            num_accepted, next_token, tv_excess, status = verify_greedy(
                target_probs, tokens, first_child, next_sibling, neighbors, delta, greedy_scratch + b * 3 * N,
                accepted_nodes, N, V, P, C, k, offset, CUTOFF, RESIDUAL, BLOCK, BLOCK_K)
            tl.store(num_accepted_out + b, num_accepted)
            tl.store(next_token_out + b, next_token)
            tl.store(tv_excess_out + b, tv_excess.to(tl.float32))
            tl.store(status_out + b, status)


def verify_tree(target_probs, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors, delta,
                omega, greedy, cutoff, offset, residual, max_depth):
    B, N, V = target_probs.shape
    M = 0 if draft_probs is None else draft_probs.shape[1]
    C, k = (0, 0) if neighbors is None else neighbors.shape
    accepted_nodes = tokens.new_empty(B, max_depth, dtype=torch.int32)
    num_accepted, next_token = tokens.new_empty(B, dtype=torch.int32), tokens.new_empty(B)
    tv_excess, status = target_probs.new_empty(B), tokens.new_empty(B, dtype=torch.int32)
    if B > 0:
        mass = tokens.new_empty(B, V)
        draft_mass = None if draft_probs is None else tokens.new_empty(B, V)
        greedy_scratch = None if greedy is None else tokens.new_empty(B, 3, N, dtype=torch.int32)
        verify_tree_kernel[(B,)](
            target_probs, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors, delta,
            omega, None if greedy is None else greedy.view(torch.uint8), mass, draft_mass, greedy_scratch,
            accepted_nodes, num_accepted, next_token, tv_excess, status, N, V, M, max_depth, C, k, offset,
            CUTOFF=cutoff, RESIDUAL=residual, BLOCK=block("V", V), BLOCK_K=block("k", max(k, 1)),
            num_warps=8, enable_fp_fusion=False)
    return accepted_nodes, num_accepted, next_token, tv_excess, status
