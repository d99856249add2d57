"""Random steps of a dynamic tree, as LANTERN's and EAGLE's decoders have them, and logits processors."""
import random
from typing import NamedTuple

import torch

GUIDANCE = 3.0


# Logits processors under the names that transformers gives them, so that it need not be installed.
class TemperatureLogitsWarper(NamedTuple):
    temperature: float

    def __call__(self, input_ids, scores):
        return scores / self.temperature


class TopKLogitsWarper(NamedTuple):
    top_k: int

    def __call__(self, input_ids, scores):
        return scores.masked_fill(scores < scores.topk(min(self.top_k, scores.shape[-1]))[0][..., -1:], -torch.inf)


class TopPLogitsWarper(NamedTuple):
    top_p: float

    def __call__(self, input_ids, scores):
        rising, ids = scores.sort()
        is_out = rising.softmax(-1).cumsum(-1) <= 1 - self.top_p
        is_out[..., -1] = False
        return scores.masked_fill(is_out.scatter(-1, ids, is_out), -torch.inf)


class Processors(list):
    """A list of the above, as LogitsProcessorList."""

    def __call__(self, input_ids, scores):
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


class Case(NamedTuple):
    """A step of decoding: a tree of N nodes, and the target's outputs for it."""
    logits: torch.Tensor            # (2, N, V) of the target: with the condition, then without it
    tokens: torch.Tensor            # (1, N)
    retrieve_indices: torch.Tensor  # (L, D)


def random_tree(nodes: int) -> list[int]:
    """Parents of a tree of five levels, about as wide as dynamic trees are, in the order of EAGLE's nodes."""
    parents, above = [-1], [0]
    for share in (10, 14, 14, 12, 8):
        width = min(max(share * nodes // 59, 1), nodes - len(parents))
        weights = [1 / (1 + i) for i in range(len(above))]
        chosen = sorted(random.choices(above, weights, k=width))
        above = list(range(len(parents), len(parents) + width)) or above
        parents += chosen
    return parents


def paths_of(parents: list[int]) -> torch.Tensor:
    """retrieve_indices in lexicographic order."""
    paths = []
    for leaf in set(range(len(parents))) - set(parents):
        nodes = [leaf]
        while nodes[0]:
            nodes.insert(0, parents[nodes[0]])
        paths.append(nodes)
    depth = max(map(len, paths))
    return torch.tensor([nodes + [-1] * (depth - len(nodes)) for nodes in sorted(paths)])


def random_rows(vocab: int, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a target (2, N, V), and a draft's (N, V) that is not far from it."""
    target, uncond = 3 * torch.randn(nodes, vocab), torch.randn(nodes, vocab)
    draft = target + 0.7 * torch.randn(nodes, vocab)
    return torch.stack([uncond + (target - uncond) / GUIDANCE, uncond]), draft


def dynamic_case(vocab: int, nodes: int, image: slice = slice(None)) -> Case:
    """A node's children are its draft's likeliest tokens, in their order."""
    parents = random_tree(nodes)
    logits, draft = random_rows(vocab, len(parents))
    best = draft[:, image].topk(min(len(parents), draft[:, image].shape[1])).indices + (image.start or 0)
    rank = [parents[:node].count(parent) for node, parent in enumerate(parents)]
    tokens = best[torch.tensor(parents).clamp(min=0), torch.tensor(rank)]
    return Case(logits, tokens[None], paths_of(parents))


def ring_of_neighbors(codes: int, columns: int) -> torch.Tensor:
    """A table of distinct neighbors (codes, columns) int64, without measuring distances."""
    offsets = 1 + torch.randperm(codes - 1)[:columns]
    return (torch.arange(codes)[:, None] + offsets) % codes
