"""draft_children in Triton: the rows of guided_probs, from which draw_children's kernel draws."""
import torch

from .draw_children import draw_children_kernel, sizes_of
from .guided_probs import guided_probs


def draft_children(logits, uncond, uniforms, guidance, temperature, top_k, top_p, min_p, seeds, positions, id_range,
                   first_id, last_id, filters, num_children):
    (B, F, V), K = logits.shape, num_children
    probs, status = guided_probs(logits, uncond, guidance, temperature, top_k, top_p, min_p, id_range, first_id,
                                 last_id, filters)
    tokens = probs.new_empty((B, F, K), dtype=torch.int64)
    if B > 0:
        draw_children_kernel[(B * F,)](probs, uniforms, seeds, positions, temperature, tokens, None, None, F, V, K,
                                       **sizes_of(V, K))
    return tokens, probs, status
