"""How one program verifies a request, for verify_tree and verify_chain: from the root to a leaf.

The rest of the target at the current node, and the draft row of its children, are in scratch of this program, in fixed
point. There is a barrier wherever threads read what others wrote, or write what others may still be reading.

Links that are None mean that the tree is a chain: node n's only child is n + 1, of draft row n, down to node N - 1 at
depth P. Its omega is one number, and its accepted nodes are not returned. `bonus` points to the token that follows node
N - 1, which then has no row; else it is None.

`ids` says which ids the row of each node has: (id_range (N, 2) or None, first_id, last_id), as in row_range().
"""
import triton
import triton.language as tl

from ._filters import row_range
from ._rows import neighbor_prefix


@triton.jit
def load_link(links, node, of_chain, mask=None):
    """A child or sibling of a node, or -1."""
    if links is None:
        return of_chain
    else:
        return tl.load(links + node, mask=mask, other=None if mask is None else -1).to(tl.int64)


@triton.jit
def relax(row, V, neighbors, C, k, offset, ids, node, token, token_mass, total, delta, CUTOFF: tl.constexpr,
          RESIDUAL: tl.constexpr, IS_FLOAT: tl.constexpr, BLOCK_K: tl.constexpr):
    """The relaxed mass of a token, and how many neighbors it keeps. A token outside the ids of the row keeps none."""
    relaxed_mass = token_mass
    num_kept = (token * 0).to(tl.int32)
    if neighbors is not None:
        num_considered = k
        if RESIDUAL == "released":
            num_considered = k - 1
        id_range, first_id, last_id = ids
        first, last, _ = row_range(id_range, node, first_id, last_id, V)
        num_considered = tl.where((token >= first) & (token < last), num_considered, 0)
        neighbor_mass, num_kept = neighbor_prefix(
            row, V, neighbors, C, k, num_considered, offset, token, token_mass, total, total, tl.load(delta), CUTOFF,
            IS_FLOAT, BLOCK_K)
        relaxed_mass += neighbor_mass
    return relaxed_mass, num_kept


@triton.jit
def store_outputs(num_accepted_out, next_token_out, tv_excess_out, status_out, num_accepted, next_token, tv_excess,
                  status):
    b = tl.program_id(0)
    tl.store(num_accepted_out + b, num_accepted)
    tl.store(next_token_out + b, next_token)
    tl.store(tv_excess_out + b, tv_excess.to(tl.float32))
    tl.store(status_out + b, status)
