"""neighborhood_sum in Triton: one program per row; a pass for its validity, then its neighbors."""
import torch
import triton.language as tl

from ._kernel import kernel
from ._rows import FIXED_ONE, FIXED_UNIT, INVALID_ROW, INVALID_TREE, block, load_mass, neighbor_prefix, to_fixed_point

NO_LIMIT = tl.constexpr(2**63 - 1)


@kernel("probs", "V")
def neighborhood_sum_kernel(
        probs, tokens, neighbors, delta,      # (R, V), (R), (C, k), (R)
        relaxed_mass, num_neighbors, status,  # (R)
        V, C, k, offset, CUTOFF: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    row = probs + r * V
    _, is_valid = to_fixed_point(row, V, None, 0, BLOCK)
    token = tl.load(tokens + r)
    in_vocabulary = (token >= 0) & (token < V)
    token = tl.where(in_vocabulary, token, 0)
    token_mass = load_mass(row, token, in_vocabulary, True)
    total = tl.full([], FIXED_ONE, tl.float64).to(tl.int64)  # delta is compared with 1, not the row's rounded sum
    neighbor_mass, num_kept = neighbor_prefix(
        row, V, neighbors, C, k, k, offset, token, token_mass, total, NO_LIMIT, tl.load(delta + r), CUTOFF, True,
        BLOCK_K)
    ok = is_valid & in_vocabulary
    tl.store(relaxed_mass + r, tl.where(ok, (token_mass + neighbor_mass).to(tl.float32) * FIXED_UNIT, 0.0))
    tl.store(num_neighbors + r, tl.where(ok, num_kept, 0))
    tl.store(status + r, tl.where(is_valid, 0, INVALID_ROW) | tl.where(in_vocabulary, 0, INVALID_TREE))


def neighborhood_sum(probs, tokens, neighbors, delta, cutoff, offset):
    (R, V), (C, k) = probs.shape, neighbors.shape
    relaxed_mass = probs.new_empty(R)
    num_neighbors, status = probs.new_empty(R, dtype=torch.int32), probs.new_empty(R, dtype=torch.int32)
    if R > 0:
        neighborhood_sum_kernel[(R,)](
            probs, tokens, neighbors, delta, relaxed_mass, num_neighbors, status, V, C, k, offset, CUTOFF=cutoff,
            BLOCK=block("V", V), BLOCK_K=block("k", k), num_warps=8, enable_fp_fusion=False)
    return relaxed_mass, num_neighbors, status
