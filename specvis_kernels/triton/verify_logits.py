"""verify_logits in Triton, by the kernels of other ops: guided_probs of all rows and verify_tree, or with seeds
draw_tokens of all rows and verify_greedy. Where the probabilities would take too much memory, one group of requests
follows another.
"""
import torch

from ._filters import IS_INTERPRETED
from .draw_tokens import draw_tokens
from .guided_probs import guided_probs
from .verify_greedy import verify_greedy
from .verify_tree import verify_tree

# Bytes of probabilities in a group of more than one request; few in the interpreter, so that tests have groups.
MOST_PROBS = 40_000 if IS_INTERPRETED else 2**28


def of(requests, *tensors):
    return [None if tensor is None else tensor[requests] for tensor in tensors]


def verify_logits(logits, uncond, tokens, first_child, next_sibling, uniforms, guidance, temperature, top_k, top_p,
                  min_p, id_range, draft_probs, draft_row, neighbors, delta, omega, seeds, positions, first_id, last_id,
                  filters, cutoff, offset, residual, empty, max_depth):
    B, N, V = logits.shape
    if seeds is not None:
        drawn, _, _, row_status = draw_tokens(logits, uncond, guidance, temperature, top_k, top_p, min_p, seeds,
                                              positions, id_range, first_id, last_id, filters, None, 0)
        *path, status = verify_greedy(drawn, tokens, first_child, next_sibling, max_depth, row_status)
        return *path, torch.zeros_like(guidance), status

    size = max(1, MOST_PROBS // (N * V * 4))
    groups = []
    for first in range(0, max(B, 1), size):
        own = slice(first, first + size)
        *rows, ids = of(own, logits, uncond, guidance, temperature, top_k, top_p, min_p, id_range)
        tree = of(own, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row)
        rule = of(own, delta, omega, temperature == 0)
        probs, _ = guided_probs(*rows, ids, first_id, last_id, filters)
        groups.append(verify_tree(probs, *tree, neighbors, *rule, cutoff, offset, residual, empty, max_depth, ids,
                                  first_id, last_id))
    return groups[0] if len(groups) == 1 else tuple(map(torch.cat, zip(*groups, strict=True)))
