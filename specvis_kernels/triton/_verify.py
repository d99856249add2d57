"""How one program verifies a request's tree, from the root to a leaf, from probabilities or from logits (_nodes.py).

The rest of the target at the current node, and the draft row of its children, are in scratch of this program, in fixed
point. There is a barrier wherever threads read what others wrote, or write what others may still be reading.

Links that are None mean that the tree is a chain: node n's only child is n + 1, of draft row n, down to node N - 1 at
depth P. Its omega is one number, and its accepted nodes are not returned. `bonus` points to the token that follows node
N - 1, which then has no row; else it is None.
"""
import triton
import triton.language as tl

from ._rows import fill
from ._verify_greedy import verify_greedy
from ._verify_sampled import verify_sampled


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
    """Verifies this program's request in a batch of trees. `rows` are of the request; is_greedy None: it samples."""
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
