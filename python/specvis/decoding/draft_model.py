"""Who drafts: EAGLE's head, which reads the target's hidden states, or a model that reads the tokens alone.

Both are `models.interface.DraftModel`s: row b of R has the condition of request b; row B + b, if any, has none.
"""
from copy import copy

import torch
from torch import Tensor

from ..models.eagle import EagleHead
from ..models.interface import ModelCache, Nodes, TargetModel, has_guidance
from ..models.layers import Cache
from ..models.llamagen import GPT, condition_nodes
from .batch_state import model_rows
from .graphs import can_replay


class EagleDraftModel:
    """EAGLE's head on a GPT. It is one position behind the target, and borrows the target's output layer."""

    can_replay = True

    def __init__(self, gpt: GPT, head: EagleHead, padding_mask: Tensor):
        """padding_mask (2B, S) bool: True where the target's condition is real.

        Raises:
            ValueError: the head is for a GPT of other sizes, or has another dtype or device
        """
        sizes = ("dim", "vocabulary", "grid", "condition_tokens")
        for what, of_gpt, of_head in ((", ".join(sizes), *([getattr(c, size) for size in sizes]
                                                          for c in (gpt.config, head.config))),
                                      ("dtype", gpt.output.weight.dtype, head.fc.weight.dtype),
                                      ("device", gpt.output.weight.device, head.fc.weight.device)):
            if of_gpt != of_head:
                raise ValueError(f"head must have the target's {what}, {of_gpt}, got {of_head}")
        self.head, self.logits, self.grid, self.vocab_size = head, gpt.logits, gpt.grid, gpt.vocab_size
        self.prefix_len = gpt.prefix_len - 1
        self.padding_mask = padding_mask[:, : self.prefix_len]

    def select(self, requests: list[int]) -> "EagleDraftModel":
        other = copy(self)
        num_rows = len(self.padding_mask)
        other.padding_mask = self.padding_mask[model_rows(requests, num_rows // 2, num_rows)]
        return other

    def new_cache(self, columns: int) -> Cache:
        return self.head.new_cache(len(self.padding_mask), columns)

    def prefill(self, hidden: Tensor, cache: Cache) -> None:
        if self.prefix_len:
            cache.check(*self.padding_mask.shape, hidden.dtype)
            no_tokens = torch.zeros_like(self.padding_mask, dtype=torch.int64)
            self.head.extend(no_tokens, hidden[:, : self.prefix_len], condition_nodes(self.padding_mask), cache)

    def extend(self, tokens: Tensor, previous_hidden: Tensor, nodes: Nodes, cache: Cache) -> Tensor:
        return self.head.extend(tokens, previous_hidden, nodes, cache)


class SmallDraftModel:
    """A model that drafts by itself: it knows the condition and the tokens, and nothing of the target's states.

    Any `TargetModel` with the target's grid and vocabulary will do.
    """

    reads_hidden = False

    def __init__(self, model: TargetModel, condition: Tensor, padding_mask: Tensor):
        """What `cfg_inputs` gives for this model: condition (R, S, dim), padding_mask (R, S) bool."""
        self.model, self.condition, self.padding_mask = model, condition, padding_mask
        self.logits, self.prefix_len, self.can_replay = model.logits, model.prefix_len, can_replay(model)
        self.grid, self.vocab_size = model.grid, model.vocab_size

    def select(self, requests: list[int]) -> "SmallDraftModel":
        num_rows = len(self.padding_mask)
        rows = model_rows(requests, num_rows // (1 + has_guidance(self.model)), num_rows)
        return SmallDraftModel(self.model, self.condition[rows], self.padding_mask[rows])

    def new_cache(self, columns: int) -> ModelCache:
        return self.model.new_cache(len(self.padding_mask), columns)

    def prefill(self, hidden: Tensor, cache: ModelCache) -> None:
        self.model.prefill(self.condition, self.padding_mask, cache)

    def extend(self, tokens: Tensor, previous_hidden: Tensor, nodes: Nodes, cache: ModelCache) -> Tensor:
        return self.model.extend(tokens, nodes, cache)
