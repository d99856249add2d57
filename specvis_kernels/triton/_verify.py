"""How one program verifies a request's tree, from the root to a leaf, whatever the target's rows are made of.

`rows` is a tuple: the request's probabilities (N, V) or None; and if it is None, its logits (N, V), the same without
the condition or None, guidance, temperature, top_k, top_p, id_range (N, 2) or None, first_id, last_id, and scratch.

What is left of the target at the current node, and the draft row of its children, stand in scratch of this program, in
fixed point. A barrier stands wherever threads read what others wrote, or write what others may still be reading.

Links that are None say that the tree is a chain: node n's only child is n + 1, of draft row n, down to node N - 1 at
depth P. Its omega is one number, and nobody asks for its accepted nodes. `bonus` points to the token that follows node
N - 1, which then has no row; else it is None.
"""
import triton
import triton.language as tl

from ._filters import filter_and_sum, load_probs
from ._rows import (
    EMPTY_RESIDUAL,
    FIXED_ONE,
    INVALID_DRAFT,
    INVALID_ROW,
    INVALID_RULE,
    INVALID_TREE,
    accept_prob,
    draw,
    fill,
    load_mass,
    neighbor_prefix,
    residual_mass,
    to_fixed_point,
)


@triton.jit
def read_row(rows, node, V, mass, num_copied, FILTERS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Reads the row of a node: its total, whether it is valid, and its ids, from the first to one past the last.

    The first `num_copied` entries of probabilities go to `mass`; of logits, all do.
    """
    probs, logits, uncond, guidance, temperature, top_k, top_p, id_range, first_id, last_id, scratch = rows
    zero = tl.full((), 0, tl.int64)
    if probs is not None:
        total, is_valid = to_fixed_point(probs + node * V, V, mass, num_copied, BLOCK)
        return total, is_valid, zero, zero + V
    else:
        first, last, is_valid, begin, end, best, lowest_kept, total = filter_and_sum(
            logits, uncond, scratch, id_range, node, V, first_id, last_id, guidance, temperature, top_k, top_p, FILTERS,
            BLOCK, BITS)
        sums = tl.zeros([BLOCK], tl.int64)
        start = 0
        while start < V:
            v = start + tl.arange(0, BLOCK)
            p = load_probs(scratch, start, V, begin, end, best, lowest_kept, total, BLOCK)
            entries = (p * FIXED_ONE).to(tl.int64)
            tl.store(mass + v, entries, mask=v < V)
            sums += entries
            start += BLOCK
        return tl.sum(sums, axis=0), is_valid, first.to(tl.int64), last.to(tl.int64)


@triton.jit
def unchanged_row(rows, node, V, mass):
    """Where the entries stand that read_row() has read: floats of probabilities, else in fixed point."""
    probs, logits, uncond, guidance, temperature, top_k, top_p, id_range, first_id, last_id, scratch = rows
    if probs is not None:
        return probs + node * V
    else:
        return mass


@triton.jit
def load_link(links, node, of_chain):
    """A child or sibling of a node, or -1."""
    if links is None:
        return of_chain
    else:
        return tl.load(links + node).to(tl.int64)


@triton.jit
def fill_uniform(mass, V, BLOCK: tl.constexpr):
    """mass becomes the uniform distribution; returns its total."""
    each = tl.full((), FIXED_ONE, tl.float64).to(tl.int64) // V
    start = 0
    while start < V:
        v = start + tl.arange(0, BLOCK)
        tl.store(mass + v, tl.zeros([BLOCK], tl.int64) + each, mask=v < V)
        start += BLOCK
    return each * V


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
def verify_sampled(rows, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors, delta, omega,
                   bonus, mass, draft_mass, accepted_nodes, N, V, M, P, C, k, offset, CUTOFF: tl.constexpr,
                   RESIDUAL: tl.constexpr, EMPTY: tl.constexpr, FILTERS: tl.constexpr, IS_FLOAT: tl.constexpr,
                   BLOCK: tl.constexpr, BITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """A request that samples; returns num_accepted, next_token, tv_excess, status."""
    zero = tl.program_id(0).to(tl.int64) * 0
    status = zero.to(tl.int32)
    omega_step = zero.to(tl.int32)
    if first_child is not None:
        omega_step += 1
    if omega is not None:
        d = 0
        while d < P:
            is_defined = tl.load(omega + d * omega_step) >= 0.0
            if neighbors is not None and RESIDUAL == "optimal":
                is_defined = tl.load(omega + d * omega_step) >= 1.0
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
    if bonus is not None:
        descends = N > 1
    enters = zero == 0  # else the node's row is read again, because nothing was left of it
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
        total, is_valid, first_id, last_id = read_row(
            rows, node, V, mass, tl.where(active | (enters == 0), V, 0), FILTERS, BLOCK, BITS)
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
                    num_considered = tl.where((token >= first_id) & (token < last_id), num_considered, 0)
                    neighbor_mass, num_kept = neighbor_prefix(
                        mass, V, neighbors, C, k, num_considered, offset, token, token_mass, total, total,
                        tl.load(delta), CUTOFF, False, BLOCK_K)
                    relaxed_mass += neighbor_mass
                omega_d = tv_excess * 0.0 + 1.0
                if omega is not None:
                    omega_d = tl.load(omega + num_accepted * omega_step).to(tl.float64)

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
                    is_changed = zero == 0
                    is_empty = total == 0
                    status |= tl.where(is_empty, EMPTY_RESIDUAL, 0)
            previous = child
            active = active & (accepted_child < 0)
            if next_sibling is None:
                child = zero - 1
            else:
                child = tl.load(next_sibling + child, mask=active, other=-1).to(tl.int64)
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
            next_token = draw(unchanged_row(rows, node, V, mass), V, total, tl.load(uniforms), IS_FLOAT, BLOCK)
    return num_accepted, next_token, tv_excess, status


@triton.jit
def row_argmax(row, V, IS_FLOAT: tl.constexpr, BLOCK: tl.constexpr):
    """The row's largest mass and its lowest id."""
    largest = tl.full([BLOCK], -1, tl.int64)
    ids = tl.zeros([BLOCK], tl.int64)
    start = 0
    while start < V:
        v = start + tl.arange(0, BLOCK)
        mass = load_mass(row, v, v < V, IS_FLOAT)
        is_larger = (mass > largest) & (v < V)
        largest = tl.where(is_larger, mass, largest)
        ids = tl.where(is_larger, v, ids)
        start += BLOCK
    max_mass = tl.max(largest, axis=0)
    return max_mass, tl.min(tl.where(largest == max_mass, ids, V), axis=0)


@triton.jit
def verify_greedy(rows, tokens, first_child, next_sibling, neighbors, delta, bonus, mass, scratch, accepted_nodes, N, V,
                  P, C, k, offset, CUTOFF: tl.constexpr, RESIDUAL: tl.constexpr, FILTERS: tl.constexpr,
                  IS_FLOAT: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """A greedy request: nodes in order, each with its chain of children; at last the row at the end of the path.

    Returns what verify_sampled() does.
    """
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
    next_token = zero
    n = zero
    while n <= N:
        is_end = n == N
        node = tl.where(is_end, end_node, n)
        node_depth = tl.load(depth + node)
        end_node = tl.where(node_depth > num_accepted, node, end_node)
        num_accepted = tl.maximum(node_depth, num_accepted)
        child = load_link(first_child, node, node + 1)
        reads = is_end | ((node_depth >= 0) & (node_depth < P) & (child >= 0))
        if bonus is not None:
            if is_end & (node == N - 1):
                next_token = tl.load(bonus)
                reads = zero != 0
        if reads:
            total, is_valid, first_id, last_id = read_row(rows, node, V, mass, 0, FILTERS, BLOCK, BITS)
            tl.debug_barrier()
            row = unchanged_row(rows, node, V, mass)
            max_mass, argmax = row_argmax(row, V, IS_FLOAT, BLOCK)
            if is_end:
                next_token = tl.where(is_valid, argmax, 0).to(tl.int64)
                status |= tl.where(is_valid, 0, INVALID_ROW)
            active = is_valid & (is_end == 0)
            previous = node
            while active:
                is_later = (child > previous) & (child < N)
                token = tl.load(tokens + child, mask=is_later, other=-1).to(tl.int64)
                active = is_later & (token >= 0) & (token < V)
                status |= tl.where(active, 0, INVALID_TREE)
                relaxed_mass = load_mass(row, token, active, IS_FLOAT)
                if neighbors is not None:
                    num_considered = k
                    if RESIDUAL == "released":
                        num_considered = k - 1
                    num_considered = tl.where((token >= first_id) & (token < last_id), num_considered, 0)
                    neighbor_mass, _ = neighbor_prefix(
                        row, V, neighbors, C, k, num_considered, offset, token, relaxed_mass, total, total,
                        tl.load(delta), CUTOFF, IS_FLOAT, BLOCK_K)
                    relaxed_mass += neighbor_mass
                is_best = ((token == argmax) | (relaxed_mass > max_mass)
                           | ((relaxed_mass == max_mass) & (token < argmax)))
                if active & is_best:
                    tl.store(depth + child, node_depth + 1)
                    tl.store(parent + child, node.to(tl.int32))
                    tl.store(num_non_argmax + child, tl.load(num_non_argmax + node) + tl.where(token == argmax, 0, 1))
                previous = child
                if next_sibling is None:
                    child = zero - 1
                else:
                    child = tl.load(next_sibling + child, mask=active, other=-1).to(tl.int64)
                active = active & (child >= 0)
            tl.debug_barrier()
        n += 1

    tv_excess = tl.load(num_non_argmax + end_node).to(tl.float64)
    if accepted_nodes is not None:
        node = end_node
        d = num_accepted
        while d > 0:
            tl.store(accepted_nodes + d - 1, node.to(tl.int32))
            node = tl.load(parent + node).to(tl.int64)
            d -= 1
    return num_accepted, next_token, tv_excess, status


@triton.jit
def store_outputs(num_accepted_out, next_token_out, tv_excess_out, status_out, num_accepted, next_token, tv_excess,
                  status):
    b = tl.program_id(0)
    tl.store(num_accepted_out + b, num_accepted)
    tl.store(next_token_out + b, next_token)
    tl.store(tv_excess_out + b, tv_excess.to(tl.float32))
    tl.store(status_out + b, status)


@triton.jit
def verify_request(rows, is_greedy, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors,
                   delta, omega, mass, draft_mass, greedy_scratch, accepted_nodes, num_accepted_out, next_token_out,
                   tv_excess_out, status_out, N, V, M, P, C, k, offset, CUTOFF: tl.constexpr, RESIDUAL: tl.constexpr,
                   EMPTY: tl.constexpr, FILTERS: tl.constexpr, IS_FLOAT: tl.constexpr, BLOCK: tl.constexpr,
                   BITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """The request of this program, in a batch of trees. `rows` are its own already; is_greedy may be None: it samples.
    """
    b = tl.program_id(0).to(tl.int64)
    tokens += b * N
    first_child += b * N
    next_sibling += b * N
    accepted_nodes += b * P
    mass += b * V
    if neighbors is not None:
        delta += b
    fill(accepted_nodes, -1, 0, P)
    tl.debug_barrier()
    samples = b >= 0
    if is_greedy is not None:
        samples = is_greedy == 0
    if samples:
        if draft_probs is not None:
            draft_probs += b * M * V
            draft_row += b * N
            draft_mass += b * V
        if omega is not None:
            omega += b * P
        num_accepted, next_token, tv_excess, status = verify_sampled(
            rows, tokens, first_child, next_sibling, uniforms + b * N, draft_probs, draft_row, neighbors, delta, omega,
            None, mass, draft_mass, accepted_nodes, N, V, M, P, C, k, offset, CUTOFF, RESIDUAL, EMPTY, FILTERS,
            IS_FLOAT, BLOCK, BITS, BLOCK_K)
        store_outputs(num_accepted_out, next_token_out, tv_excess_out, status_out, num_accepted, next_token,
                      tv_excess, status)
    if is_greedy is not None:
        if is_greedy:
            num_accepted, next_token, tv_excess, status = verify_greedy(
                rows, tokens, first_child, next_sibling, neighbors, delta, None, mass, greedy_scratch + b * 3 * N,
                accepted_nodes, N, V, P, C, k, offset, CUTOFF, RESIDUAL, FILTERS, IS_FLOAT, BLOCK, BITS, BLOCK_K)
            store_outputs(num_accepted_out, next_token_out, tv_excess_out, status_out, num_accepted, next_token,
                          tv_excess, status)
