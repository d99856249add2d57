"""What a decoder has without these ops: the same work in plain PyTorch, as the released decoders write it.

RIVALS[op][name] takes the op's arguments, but for backend and kind. They round and draw in their own ways; where
that can be told, tests/test_benchmarks.py holds them against the oracle too.
"""
import torch
from torch import Tensor


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    return (target_probs - draft_probs).clamp(min=0)


def multinomial(target_probs, draft_probs, uniforms):
    return torch.multinomial(residual(target_probs, draft_probs), 1)


def searchsorted(target_probs, draft_probs, uniforms):
    sums = residual(target_probs, draft_probs).cumsum(-1)
    return torch.searchsorted(sums, uniforms[:, None] * sums[:, -1:], right=True)


def without_replacement(draft_probs, uniforms):
    return torch.multinomial(draft_probs.flatten(0, 1), uniforms.shape[-1]).view(uniforms.shape)


def topk_twice(logits, scores, width, *, K):
    """EAGLE-2's level: log_softmax, topk, add, topk."""
    log_probs, tokens = logits.log_softmax(-1).topk(K, -1)
    scores = scores[..., None] + log_probs
    return tokens, scores, scores.flatten(1).topk(K, -1)


def warpers(logits, uncond, guidance, temperature, top_k, top_p, *, first_id=0, last_id=None):
    """Guidance, temperature, top-k and top-p, one after the other, by sorting."""
    def per_row(setting):
        return setting[:, None, None]

    x = (uncond + per_row(guidance) * (logits - uncond)).float() / per_row(temperature)
    x[..., :first_id] = -torch.inf
    if last_id is not None:
        x[..., last_id:] = -torch.inf
    if top_k[0] > 0:
        x = x.masked_fill(x < x.topk(int(top_k[0]), -1).values[..., -1:], -torch.inf)
    if top_p[0] < 1:
        ordered, order = x.sort(-1, descending=True)
        probs = ordered.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= per_row(top_p)
        x = x.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    return x.softmax(-1)


def gather_cumsum(probs, tokens, neighbors, cutoff, *, offset):
    """All neighbors' probabilities, their running sums, the last within the cutoff."""
    codes = (tokens - offset).clamp(0, len(neighbors) - 1)
    near = probs.gather(1, neighbors[codes].long() + offset)
    kept = near.cumsum(-1) <= cutoff[:, None]
    return probs.gather(1, tokens[:, None])[:, 0] + (near * kept).sum(-1), kept.sum(-1)


def python_walk(target_probs, tokens, first_child, next_sibling, uniforms, *, P, neighbors=None, cutoff=None,
                offset=0, residual="optimal"):
    """verify_tree with deterministic drafts: a request, a node, a candidate at a time, as LANTERN's release walks."""
    results = []
    for b in range(len(tokens)):
        node, path = 0, []
        while True:
            row = target_probs[b, node].clone()
            child = first_child[b, node].item() if len(path) < P else -1
            while child >= 0:
                token = tokens[b, child].item()
                chance, near = row[token], None
                if neighbors is not None and 0 <= token - offset < len(neighbors):
                    near = neighbors[token - offset].long() + offset
                    sums = row[near].cumsum(0)
                    near = near[: int((sums <= cutoff[b]).sum())]
                    chance = chance + row[near].sum()
                if uniforms[b, child].item() < chance.item():
                    break
                row[token] = 0
                if residual == "relaxed" and near is not None:
                    row[near] = 0
                row /= row.sum()
                child = next_sibling[b, child].item()
            if child < 0:
                break
            path.append(child)
            node = child
        results.append((path, int((row.cumsum(0) <= uniforms[b, 0] * row.sum()).sum())))
    return results


RIVALS = {
    "draw_children": {"multinomial": without_replacement},
    "expand_tree": {"topk twice": topk_twice},
    "guided_probs": {"warpers": warpers},
    "neighborhood_sum": {"gather": gather_cumsum},
    "sample_residual": {"multinomial": multinomial, "searchsorted": searchsorted},
    "verify_tree": {"python walk": python_walk},
}
