"""commit_tokens in Triton: one program per request."""
import triton.language as tl

from ._kernel import kernel
from ._rows import INVALID_ROW


@kernel()
def commit_tokens_kernel(
        tokens, counts,                            # (B, C), (B)
        node_tokens, accepted_nodes,               # (B, N), (B, P)
        num_accepted, next_token,                  # (B)
        failed, target_forwards,                   # (B); these and the next two lines: all are given, or None is
        num_accepted_at, num_drafted_at,           # (B, L)
        tv_excess, step_excess, status, depth,     # (B)
        new_tokens, nodes, num_new,                # (B, P + 1), (B, P + 1), (B)
        C, L, N, P, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + b)
    last = tl.load(num_accepted + b).to(tl.int64)
    last = tl.minimum(tl.maximum(last, 0), P)
    is_active = (count >= 0) & (count < L)
    tl.debug_barrier()  # every thread has read the count

    room = L - 1 - count
    last_written = tl.where(is_active, tl.minimum(last, room), -1)
    tl.store(nodes + b * (P + 1), b * 0)
    start = b * 0
    while start <= P:
        i = start + tl.arange(0, BLOCK)
        is_drafted = i < last
        node = tl.load(accepted_nodes + b * P + i, mask=is_drafted, other=0).to(tl.int64)
        node = tl.where((node >= 0) & (node < N), node, 0)
        token = tl.load(node_tokens + b * N + node, mask=is_drafted, other=0)
        token = tl.where(i == last, tl.load(next_token + b), token)
        tl.store(new_tokens + b * (P + 1) + i, token, mask=i <= P)
        tl.store(nodes + b * (P + 1) + 1 + i, node, mask=i < P)
        tl.store(tokens + b * C + count + i, token, mask=i <= last_written)
        start += BLOCK

    tl.store(num_new + b, last + 1)
    is_full = last >= room
    if failed is not None:
        tl.store(num_accepted_at + b * L + count, last, mask=is_active)
        tl.store(num_drafted_at + b * L + count, tl.minimum(tl.load(depth + b), room), mask=is_active)
        tl.store(target_forwards + b, tl.load(target_forwards + b) + 1, mask=is_active)
        tl.store(tv_excess + b, tl.load(tv_excess + b) + tl.load(step_excess + b), mask=is_active)
        is_invalid = (tl.load(status + b) & INVALID_ROW) != 0
        tl.store(failed + b, is_invalid, mask=is_active & is_invalid)
        is_full |= is_invalid
    tl.store(counts + b, tl.where(is_full, L, count + last + 1), mask=is_active)


def commit_tokens(tokens, counts, node_tokens, accepted_nodes, num_accepted, next_token, *accounts):
    (B, C), N, P = tokens.shape, node_tokens.shape[1], accepted_nodes.shape[1]
    num_accepted_at = accounts[2]
    L = C if num_accepted_at is None else num_accepted_at.shape[1]
    new_tokens, nodes = (tokens.new_empty(B, P + 1) for _ in range(2))
    num_new = tokens.new_empty(B)
    if B > 0:
        commit_tokens_kernel[(B,)](
            tokens, counts, node_tokens, accepted_nodes, num_accepted, next_token, *accounts, new_tokens, nodes,
            num_new, C, L, N, P, BLOCK=32, num_warps=1, enable_fp_fusion=False)
    return new_tokens, nodes, num_new
