"""neighborhood_sum in Triton: one program per row; a pass for its validity, then its neighbors."""
import torch
import triton
import triton.language as tl

from ._rows import FIXED_ONE, FIXED_UNIT, INVALID_ROW, INVALID_TREE, block, kept_prefix, load_weights, weigh


@triton.jit(do_not_specialize=["C", "columns", "offset"])
def neighborhood_sum_kernel(
        probs,             # (R, V)
        tokens,            # (R)
        neighbors,         # (C, columns)
        cutoff,            # (R)
        mass, kept, status,  # (R)
        V, C, columns, offset, KIND: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, valid = weigh(probs + row * V, V, None, 0, BLOCK)
    token = tl.load(tokens + row)
    inside = (token >= 0) & (token < V)
    x = tl.where(inside, token, 0)
    own = load_weights(probs + row * V, x, inside, True)
    whole = tl.full([], FIXED_ONE, tl.float64).to(tl.int64)
    moved, count = kept_prefix(probs + row * V, V, neighbors, C, columns, columns, offset, x, own, whole,
                               tl.load(cutoff + row), KIND, True, BLOCK_K)
    ok = valid & inside
    tl.store(mass + row, tl.where(ok, (own + moved).to(tl.float32) * FIXED_UNIT, 0.0))
    tl.store(kept + row, tl.where(ok, count, 0))
    tl.store(status + row, tl.where(valid, 0, INVALID_ROW) | tl.where(inside, 0, INVALID_TREE))


def neighborhood_sum(probs, tokens, neighbors, cutoff, kind, offset):
    (R, V), (C, columns) = probs.shape, neighbors.shape
    mass = probs.new_empty(R)
    kept, status = probs.new_empty(R, dtype=torch.int32), probs.new_empty(R, dtype=torch.int32)
    if R > 0:
        neighborhood_sum_kernel[(R,)](
            probs, tokens, neighbors, cutoff, mass, kept, status, V, C, columns, offset, KIND=kind,
            BLOCK=block("V", V), BLOCK_K=block("k", columns), num_warps=8, enable_fp_fusion=False)
    return mass, kept, status
