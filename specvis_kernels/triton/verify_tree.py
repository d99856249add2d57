"""verify_tree in Triton: one program per request, walking from the root to a leaf.

The residual target and the draft row of the current node stand in scratch of this program, in fixed point. A
barrier stands wherever threads read what others wrote, or write what others may still be reading.
"""
import torch
import triton
import triton.language as tl

from ._rows import (EMPTY_RESIDUAL, INVALID_ROW, INVALID_RULE, INVALID_TREE, block, draw, kept_prefix,
                    load_weights, residual_weights, weigh)


@triton.jit
def clear_neighbors(weights, V, near, count, offset, BLOCK_K: tl.constexpr):
    """The weights of the first `count` neighbors become 0; returns their sum, an id that repeats once."""
    sums = tl.zeros([BLOCK_K], tl.int64)
    start = count * 0
    while start < count:
        j = start + tl.arange(0, BLOCK_K)
        ids = tl.load(near + j, mask=j < count, other=0).to(tl.int64) + offset
        inside = (j < count) & (ids >= 0) & (ids < V)
        sums += tl.where(inside, tl.atomic_xchg(weights + ids, tl.zeros([BLOCK_K], tl.int64), mask=inside), 0)
        start += BLOCK_K
    return tl.sum(sums, axis=0)


@triton.jit
def spare_neighbors(draft, V, near, count, offset, BLOCK_K: tl.constexpr):
    """`draft` spares the first `count` neighbors once: marked by negatives, which subtract() undoes."""
    start = count * 0
    while start < count:
        j = start + tl.arange(0, BLOCK_K)
        ids = tl.load(near + j, mask=j < count, other=0).to(tl.int64) + offset
        inside = (j < count) & (ids >= 0) & (ids < V)
        drafted = tl.load(draft + ids, mask=inside, other=0)
        tl.store(draft + ids, tl.where(drafted >= 0, -drafted - 1, drafted), mask=inside)
        tl.debug_barrier()  # an id listed twice must be seen as marked
        start += BLOCK_K


@triton.jit
def subtract(weights, draft, V, total, draft_total, slack, BLOCK: tl.constexpr):
    """weights becomes the residual after a sampled proposal; returns its total."""
    sums = tl.zeros([BLOCK], tl.int64)
    start = 0
    while start < V:
        v = start + tl.arange(0, BLOCK)
        weight = tl.load(weights + v, mask=v < V, other=0)
        drafted = tl.load(draft + v, mask=v < V, other=0)
        tl.store(draft + v, tl.where(drafted < 0, -drafted - 1, drafted), mask=v < V)
        rest = residual_weights(weight, total, tl.maximum(drafted, 0), draft_total, slack)
        tl.store(weights + v, rest, mask=v < V)
        sums += rest
        start += BLOCK
    return tl.sum(sums, axis=0)


@triton.jit
def odds(sampled, mass, total, drafted, draft_total, factor):
    """The probability that a candidate of this mass is accepted."""
    gain = factor * mass.to(tl.float64)
    scale = total.to(tl.float64)
    if sampled:
        gain *= draft_total.to(tl.float64)
        scale *= drafted.to(tl.float64)
    likely = (mass > 0) & (gain > 0.0)
    sure = gain >= scale
    return tl.where(likely, tl.where(sure, 1.0, gain / tl.where(sure, 1.0, scale)), 0.0)


@triton.jit
def walk(target_probs, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors, cutoff,
         omega, weights, draft, path, N, V, M, P, C, columns, offset,
         KIND: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """A sampling request; returns accepted, next_token, excess, status."""
    zero = tl.program_id(0).to(tl.int64) * 0
    status = zero.to(tl.int32)
    if omega is not None:
        d = 0
        while d < P:
            allowed = tl.load(omega + d) >= 0.0
            if neighbors is not None and RESIDUAL == "optimal":
                allowed = tl.load(omega + d) >= 1.0
            status = tl.where(allowed, status, INVALID_RULE)
            d += 1
    refused = status != 0

    node = zero
    accepted = zero.to(tl.int32)
    excess = zero.to(tl.float64)
    total = zero
    valid = zero == 0
    changed = zero != 0  # do the weights differ from the target's row?
    going = zero == 0
    while going:
        tl.debug_barrier()
        row = target_probs + node * V
        child = tl.load(first_child + node).to(tl.int64)
        trying = (child >= 0) & (accepted < P) & (refused == 0)
        total, valid = weigh(row, V, weights, tl.where(trying, V, 0), BLOCK)
        changed = zero != 0
        status |= tl.where(valid, 0, INVALID_ROW)
        trying = trying & valid
        sampled = zero != 0
        draft_total = zero
        if draft_probs is not None:
            source = tl.load(draft_row + node).to(tl.int64)
            sampled = source >= 0
            status |= tl.where(trying & (source >= M), INVALID_TREE, 0)
            trying = trying & (source < M)
            if trying & sampled:
                draft_total, sound = weigh(draft_probs + source * V, V, draft, V, BLOCK)
                status |= tl.where(sound, 0, INVALID_ROW)
                trying = sound
        tl.debug_barrier()

        previous = node
        chosen = zero - 1
        reach = zero.to(tl.float64) + 1.0
        while trying:
            follows = (child > previous) & (child < N)
            x = tl.load(tokens + child, mask=follows, other=-1)
            trying = follows & (x >= 0) & (x < V)
            status |= tl.where(trying, 0, INVALID_TREE)
            if trying & ((sampled == 0) | (draft_total > 0)):
                own = tl.load(weights + x)
                drafted = zero
                if draft_probs is not None:
                    if sampled:
                        drafted = tl.load(draft + x)
                rho = own
                kept = accepted * 0
                if neighbors is not None:
                    looked = columns
                    if RESIDUAL == "released":
                        looked = columns - 1
                    moved, kept = kept_prefix(weights, V, neighbors, C, columns, looked, offset, x, own,
                                              total, tl.load(cutoff), KIND, False, BLOCK_K)
                    rho += moved
                factor = excess * 0.0 + 1.0
                if omega is not None:
                    factor = tl.load(omega + accepted).to(tl.float64)

                u = tl.load(uniforms + child).to(tl.float64)
                mass = total.to(tl.float64)
                need = u * mass
                gain = factor * rho.to(tl.float64)
                if sampled:
                    need = (u * drafted.to(tl.float64)) * mass
                    gain = gain * draft_total.to(tl.float64)
                likely = odds(sampled, rho, total, drafted, draft_total, factor)
                strict = odds(sampled, own, total, drafted, draft_total, excess * 0.0 + 1.0)
                excess += reach * tl.maximum(likely - strict, 0.0)
                reach *= 1.0 - likely
                tl.debug_barrier()
                if (need < gain) & (rho > 0):
                    chosen = child
                else:
                    slack = tl.where(factor < 1.0, 1.0 - factor, 0.0)
                    if draft_probs is not None:
                        if sampled:
                            if neighbors is not None and RESIDUAL == "relaxed":
                                clear_neighbors(weights, V, neighbors + (x - offset) * columns, kept, offset,
                                                BLOCK_K)
                                tl.debug_barrier()
                                tl.store(weights + x, rho)
                            if neighbors is not None and RESIDUAL == "released":
                                spare_neighbors(draft, V, neighbors + (x - offset) * columns,
                                                tl.where(kept > 0, columns, 0), offset, BLOCK_K)
                            if RESIDUAL != "optimal":
                                slack = slack * 0.0
                            tl.debug_barrier()
                            total = subtract(weights, draft, V, total, draft_total, slack, BLOCK)
                            tl.debug_barrier()
                            tl.store(draft + x, zero)
                            draft_total -= drafted
                    if sampled == 0:
                        left = zero
                        if RESIDUAL == "optimal":
                            left = (slack * own.to(tl.float64)).to(tl.int64)
                        tl.store(weights + x, left)
                        total += left - own
                        if neighbors is not None and RESIDUAL != "optimal":
                            tl.debug_barrier()
                            count = kept
                            if RESIDUAL == "released":
                                count = tl.where(kept > 0, columns, 0)
                            total -= clear_neighbors(weights, V, neighbors + (x - offset) * columns, count,
                                                     offset, BLOCK_K)
                    tl.debug_barrier()
                    changed = total != 0
                    if total == 0:
                        status |= EMPTY_RESIDUAL
                        total, valid = weigh(row, V, weights, V, BLOCK)
                        tl.debug_barrier()
            previous = child
            trying = trying & (chosen < 0)
            child = tl.load(next_sibling + child, mask=trying, other=-1).to(tl.int64)
            trying = trying & (child >= 0)

        going = chosen >= 0
        if going:
            tl.store(path + accepted, chosen.to(tl.int32))
            accepted += 1
            node = chosen

    token = zero
    if valid:
        if changed:
            token = draw(weights, V, total, tl.load(uniforms), False, BLOCK)
        else:
            token = draw(target_probs + node * V, V, total, tl.load(uniforms), True, BLOCK)
    return accepted, token, excess, status


@triton.jit
def argmax(row, V, BLOCK: tl.constexpr):
    """The row's largest weight and its lowest id."""
    most = tl.full([BLOCK], -1, tl.int64)
    at = tl.zeros([BLOCK], tl.int64)
    start = 0
    while start < V:
        v = start + tl.arange(0, BLOCK)
        weight = load_weights(row, v, v < V, True)
        more = (weight > most) & (v < V)
        most = tl.where(more, weight, most)
        at = tl.where(more, v, at)
        start += BLOCK
    top = tl.max(most, axis=0)
    return top, tl.min(tl.where(most == top, at, V), axis=0)


@triton.jit
def judge(target_probs, tokens, first_child, next_sibling, neighbors, cutoff, notes, path, N, V, P, C,
          columns, offset, KIND: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
          BLOCK_K: tl.constexpr):
    """A greedy request: nodes in order, each with its chain of children. Returns what walk() does."""
    zero = tl.program_id(0).to(tl.int64) * 0
    status = zero.to(tl.int32)
    depth = notes               # (N) of an accepted node, else -1
    parent = notes + N          # (N) written where the node is accepted
    departures = notes + 2 * N  # (N) nodes on its path that strict greedy would refuse
    n = zero
    while n < N:
        tl.store(depth + n, tl.where(n == 0, 0, -1))
        n += 1
    tl.store(departures, 0)
    tl.debug_barrier()

    best = zero
    accepted = zero.to(tl.int32)
    n = zero
    while n < N:
        here = tl.load(depth + n)
        best = tl.where(here > accepted, n, best)
        accepted = tl.maximum(here, accepted)
        child = tl.load(first_child + n).to(tl.int64)
        if (here >= 0) & (here < P) & (child >= 0):
            row = target_probs + n * V
            total, trying = weigh(row, V, None, 0, BLOCK)
            most, top = argmax(row, V, BLOCK)
            previous = n
            while trying:
                follows = (child > previous) & (child < N)
                x = tl.load(tokens + child, mask=follows, other=-1)
                trying = follows & (x >= 0) & (x < V)
                status |= tl.where(trying, 0, INVALID_TREE)
                rho = load_weights(row, x, trying, True)
                if neighbors is not None:
                    looked = columns
                    if RESIDUAL == "released":
                        looked = columns - 1
                    moved, _ = kept_prefix(row, V, neighbors, C, columns, looked, offset, x, rho, total,
                                           tl.load(cutoff), KIND, True, BLOCK_K)
                    rho += moved
                if trying & ((x == top) | (rho > most) | ((rho == most) & (x < top))):
                    tl.store(depth + child, here + 1)
                    tl.store(parent + child, n.to(tl.int32))
                    tl.store(departures + child, tl.load(departures + n) + tl.where(x == top, 0, 1))
                previous = child
                child = tl.load(next_sibling + child, mask=trying, other=-1).to(tl.int64)
                trying = trying & (child >= 0)
            tl.debug_barrier()
        n += 1

    row = target_probs + best * V
    total, valid = weigh(row, V, None, 0, BLOCK)
    most, top = argmax(row, V, BLOCK)
    status |= tl.where(valid, 0, INVALID_ROW)
    excess = tl.load(departures + best).to(tl.float64)
    d = accepted
    while d > 0:
        tl.store(path + d - 1, best.to(tl.int32))
        best = tl.load(parent + best).to(tl.int64)
        d -= 1
    return accepted, tl.where(valid, top, 0).to(tl.int64), excess, status


@triton.jit(do_not_specialize=["N", "M", "P", "C", "columns", "offset"])  # they change from step to step
def verify_tree_kernel(
        target_probs,               # (B, N, V)
        tokens,                     # (B, N)
        first_child, next_sibling,  # (B, N)
        uniforms,                   # (B, N)
        draft_probs,                # (B, M, V) or None
        draft_row,                  # (B, N)
        neighbors,                  # (C, columns) or None
        cutoff,                     # (B)
        omega,                      # (B, P) or None
        greedy,                     # (B) or None
        weights, draft,             # (B, V) scratch
        notes,                      # (B, 3, N) scratch
        path,                       # (B, P)
        accepted, next_token, excess, status,  # (B)
        N, V, M, P, C, columns, offset, KIND: tl.constexpr, RESIDUAL: tl.constexpr,
        BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    target_probs += b * N * V
    tokens += b * N
    first_child += b * N
    next_sibling += b * N
    uniforms += b * N
    weights += b * V
    path += b * P
    if draft_probs is not None:
        draft_probs += b * M * V
        draft_row += b * N
        draft += b * V
    if neighbors is not None:
        cutoff += b
    if omega is not None:
        omega += b * P

    d = 0
    while d < P:
        tl.store(path + d, -1)
        d += 1
    tl.debug_barrier()
    sampling = b >= 0
    if greedy is not None:
        sampling = tl.load(greedy + b) == 0
    if sampling:
        count, token, meter, found = walk(
            target_probs, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors,
            cutoff, omega, weights, draft, path, N, V, M, P, C, columns, offset, KIND, RESIDUAL, BLOCK,
            BLOCK_K)
        tl.store(accepted + b, count)
        tl.store(next_token + b, token)
        tl.store(excess + b, meter.to(tl.float32))
        tl.store(status + b, found)
    if greedy is not None:
        if sampling == 0:
            count, token, meter, found = judge(
                target_probs, tokens, first_child, next_sibling, neighbors, cutoff, notes + b * 3 * N, path,
                N, V, P, C, columns, offset, KIND, RESIDUAL, BLOCK, BLOCK_K)
            tl.store(accepted + b, count)
            tl.store(next_token + b, token)
            tl.store(excess + b, meter.to(tl.float32))
            tl.store(status + b, found)


def verify_tree(target_probs, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors,
                cutoff, omega, greedy, kind, offset, residual, P):
    B, N, V = target_probs.shape
    M = 0 if draft_probs is None else draft_probs.shape[1]
    C, columns = (0, 0) if neighbors is None else neighbors.shape
    path, accepted = tokens.new_empty(B, P, dtype=torch.int32), tokens.new_empty(B, dtype=torch.int32)
    next_token, excess = tokens.new_empty(B), target_probs.new_empty(B)
    status = tokens.new_empty(B, dtype=torch.int32)
    if B > 0:
        weights = tokens.new_empty(B, V)
        draft = None if draft_probs is None else tokens.new_empty(B, V)
        notes = None if greedy is None else tokens.new_empty(B, 3, N, dtype=torch.int32)
        verify_tree_kernel[(B,)](
            target_probs, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors,
            cutoff, omega, None if greedy is None else greedy.view(torch.uint8), weights, draft, notes,
            path, accepted, next_token, excess, status, N, V, M, P, C, columns, offset,
            KIND=kind, RESIDUAL=residual, BLOCK=block("V", V), BLOCK_K=block("k", max(columns, 1)),
            num_warps=8, enable_fp_fusion=False)
    return path, accepted, next_token, excess, status
