"""draft_children in Triton: the rows of guided_probs, then one program per row draws from it as in draw_children."""
import torch
import triton
import triton.language as tl

from ._kernel import kernel
from ._keys import NONE, entries_of, id_of
from ._rows import fill
from .draw_children import draw_by_noise, draw_by_uniforms, sizes_of
from .expand_tree import without
from .guided_probs import guided_probs


@triton.jit
def find_likeliest(row, tokens, V, K, BLOCK: tl.constexpr):
    """Stores the K most probable tokens, 0 for a missing one."""
    keys = tl.full([BLOCK], NONE, tl.int64)
    start = tl.full([], 0, tl.int64)
    while start < V:
        ids = start + tl.arange(0, BLOCK)
        keys = tl.maximum(keys, entries_of(tl.load(row + ids, mask=ids < V, other=0.0), ids, 0.0))
        start += BLOCK
    best = tl.max(keys, axis=0)
    n = 0
    while (n < K) & (best > NONE):
        tl.store(tokens + n, id_of(best))
        keys = without(keys, best, row, 0, V, 0.0, BLOCK)
        best = tl.max(keys, axis=0)
        n += 1
    fill(tokens, 0, n, K)


@kernel("probs", "V")
def draft_children_kernel(
        probs,        # (B, F, V)
        uniforms,     # (B, F, K) or None: by noise
        temperature,  # (B)
        seeds,        # (B) or None
        positions,    # (B, F) or None
        tokens,       # (B, F, K)
        F, V, K, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    row = probs + r * V
    tokens += r * K
    if tl.load(temperature + r // F) == 0:
        find_likeliest(row, tokens, V, K, BLOCK)
    else:
        if uniforms is not None:
            draw_by_uniforms(row, uniforms + r * K, tokens, V, K, BLOCK, BLOCKS, BLOCK_K)
        else:
            draw_by_noise(row, tl.load(seeds + r // F), tl.load(positions + r), tokens, V, K, BLOCK, BLOCKS)


def draft_children(logits, uncond, uniforms, guidance, temperature, top_k, top_p, seeds, positions, id_range, first_id,
                   last_id, filters, num_children):
    (B, F, V), K = logits.shape, num_children
    probs, status = guided_probs(logits, uncond, guidance, temperature, top_k, top_p, id_range, first_id, last_id,
                                 filters)
    tokens = logits.new_empty((B, F, K), dtype=torch.int64)
    if B > 0:
        draft_children_kernel[(B * F,)](probs, uniforms, temperature, seeds, positions, tokens, F, V, K,
                                        **sizes_of(V, K))
    return tokens, probs, status
