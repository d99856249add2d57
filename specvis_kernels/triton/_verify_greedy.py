"""How one program verifies a greedy request's tree, see _verify.py."""
import triton
import triton.language as tl

from ._rows import INVALID_ROW, INVALID_TREE, load_mass, to_fixed_point
from ._verify import load_link, relax


@triton.jit
def row_argmax(row, V, last_mass, last_id, BLOCK: tl.constexpr):
    """The row's largest mass and its lowest id; unless they are None, of those that follow this mass and id."""
    largest = tl.full([BLOCK], -1, tl.int64)
    ids = tl.zeros([BLOCK], tl.int64)
    start = 0
    while start < V:
        v = start + tl.arange(0, BLOCK)
        mass = load_mass(row, v, v < V, True)
        is_larger = (mass > largest) & (v < V)
        if last_mass is not None:
            is_larger = is_larger & ((mass < last_mass) | ((mass == last_mass) & (v > last_id)))
        largest = tl.where(is_larger, mass, largest)
        ids = tl.where(is_larger, v, ids)
        start += BLOCK
    max_mass = tl.max(largest, axis=0)
    return max_mass, tl.min(tl.where(largest == max_mass, ids, V), axis=0)


@triton.jit
def verify_greedy(target_probs, ids, tokens, first_child, next_sibling, neighbors, delta, bonus, scratch,
                  accepted_nodes, N, V, P, C, k, offset, CUTOFF: tl.constexpr, RESIDUAL: tl.constexpr,
                  BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Verifies a greedy request: the nodes in order, each with its children, then the row at the end of the path.

    Returns num_accepted, next_token, tv_excess, status.
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
            row = target_probs + node * V
            total, is_valid = to_fixed_point(row, V, None, 0, BLOCK)
            max_mass, argmax = row_argmax(row, V, None, None, BLOCK)
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
                token_mass = load_mass(row, token, active, True)
                relaxed_mass, _ = relax(row, V, neighbors, C, k, offset, ids, node, token, token_mass, total, delta,
                                        CUTOFF, RESIDUAL, True, BLOCK_K)
                is_best = ((token == argmax) | (relaxed_mass > max_mass)
                           | ((relaxed_mass == max_mass) & (token < argmax)))
                if active & is_best:
                    tl.store(depth + child, node_depth + 1)
                    tl.store(parent + child, node.to(tl.int32))
                    tl.store(num_non_argmax + child, tl.load(num_non_argmax + node) + tl.where(token == argmax, 0, 1))
                previous = child
                child = load_link(next_sibling, child, zero - 1, active)
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
