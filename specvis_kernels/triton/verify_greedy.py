"""verify_greedy in Triton: one program per request walks down its tree, a child at a time."""
import triton
import triton.language as tl

from ._kernel import kernel
from ._rows import INVALID_TREE, fill


@triton.jit
def find_child(tokens, next_sibling, wanted, node, child, N):
    """Finds the first child, from `child` on, whose token is `wanted`; returns it, or -1, and the status."""
    previous = node
    found = node * 0 - 1
    status = (node * 0).to(tl.int32)
    searching = child != -1
    while searching:
        is_later = (child > previous) & (child < N)
        status |= tl.where(is_later, 0, INVALID_TREE)
        token = tl.load(tokens + child, mask=is_later, other=0)
        found = tl.where(is_later & (token == wanted), child, found)
        searching = is_later & (found < 0)
        previous = child
        child = tl.load(next_sibling + child, mask=searching, other=-1).to(tl.int64)
        searching = searching & (child != -1)
    return found, status


@kernel()
def verify_greedy_kernel(
        target_tokens, tokens,             # (B, N)
        first_child, next_sibling,         # (B, N)
        row_status,                        # (B, N) or None: a row with a status ends the path
        accepted_nodes,                    # (B, P)
        num_accepted, next_token, status,  # (B)
        N, P):
    b = tl.program_id(0).to(tl.int64)
    tokens += b * N
    next_sibling += b * N
    node = b * 0
    depth = node
    wrong = node.to(tl.int32)
    target_token = tl.load(target_tokens + b * N)
    active = depth < P
    if row_status is not None:
        wrong |= tl.load(row_status + b * N)
        active = active & (wrong == 0)
    while active:
        child = tl.load(first_child + b * N + node).to(tl.int64)
        found, found_wrong = find_child(tokens, next_sibling, target_token, node, child, N)
        wrong |= found_wrong
        if found >= 0:
            tl.store(accepted_nodes + b * P + depth, found.to(tl.int32))
            target_token = tl.load(target_tokens + b * N + found)
            node = found
            depth += 1
        active = (found >= 0) & (depth < P)
        if row_status is not None:
            node_status = tl.where(found >= 0, tl.load(row_status + b * N + node), 0)
            wrong |= node_status
            active = active & (node_status == 0)
    fill(accepted_nodes + b * P, -1, depth, P)
    tl.store(num_accepted + b, depth.to(tl.int32))
    tl.store(next_token + b, target_token)
    tl.store(status + b, wrong)


def verify_greedy(target_tokens, tokens, first_child, next_sibling, max_depth, row_status=None):
    B, N = tokens.shape
    accepted_nodes = first_child.new_empty((B, max_depth))
    num_accepted, status = (first_child.new_empty(B) for _ in range(2))
    next_token = tokens.new_empty(B)
    if B > 0:
        verify_greedy_kernel[(B,)](target_tokens, tokens, first_child, next_sibling, row_status, accepted_nodes,
                                   num_accepted, next_token, status, N, max_depth, num_warps=1)
    return accepted_nodes, num_accepted, next_token, status
