"""Who drafts: EAGLE's head, which reads the target's hidden states, or a model that reads the tokens alone.

Both are `models.interface.DraftModel`s: row b of R has the condition of request b; row B + b, if any, has none.
"""
from copy import copy

from torch import Tensor

from ..models.eagle import EagleHead
from ..models.interface import DraftModel, ModelCache, Nodes, TargetModel, has_guidance
from ..models.transformers_eagle import TransformersEagleHead
from .batch_state import model_rows
from .graphs import can_replay


class EagleDraftModel:
    """EAGLE's head on its target. It is one position behind the target, and borrows the target's output layer."""

    def __init__(self, target: TargetModel, head: EagleHead | TransformersEagleHead, condition: Tensor,
                 padding_mask: Tensor):
        """What `cfg_inputs` gives for the target: condition (R, S, dim), padding_mask (R, S) bool. ValueError if the
        head is for a target of other sizes, or has another dtype or device."""
        head.check(target)
        self.head, self.condition, self.padding_mask = head, condition, padding_mask[:, :-1]
        self.target, self.logits = target, target.logits
        self.grid, self.vocab_size, self.prefix_len = target.grid, target.vocab_size, target.prefix_len - 1

    @property
    def can_replay(self) -> bool:
        return getattr(self.head, "can_replay", True)  # where its target can

    def select(self, requests: list[int]) -> "EagleDraftModel":
        other, rows = copy(self), selected_rows(self, self.target, requests)
        other.condition, other.padding_mask = self.condition[rows], self.padding_mask[rows]
        return other

    def new_cache(self, columns: int) -> ModelCache:
        return self.head.new_cache(len(self.padding_mask), columns)

    def prefill(self, hidden: Tensor, cache: ModelCache) -> None:
        if self.prefix_len:
            cache.check(*self.padding_mask.shape, hidden.dtype)
            self.head.prefill(self.condition, hidden, self.padding_mask, cache)

    def extend(self, tokens: Tensor, previous_hidden: Tensor, nodes: Nodes, cache: ModelCache) -> Tensor:
        return self.head.extend(tokens, previous_hidden, nodes, cache)


class SmallDraftModel:
    """Any `TargetModel` with the target's grid and vocabulary: it drafts from the condition and the tokens alone."""

    reads_hidden = False

    def __init__(self, model: TargetModel, condition: Tensor, padding_mask: Tensor):
        """What `cfg_inputs` gives for this model: condition (R, S, dim), padding_mask (R, S) bool."""
        self.model, self.condition, self.padding_mask = model, condition, padding_mask
        self.logits, self.prefix_len = model.logits, model.prefix_len
        self.grid, self.vocab_size = model.grid, model.vocab_size

    @property
    def can_replay(self) -> bool:
        return can_replay(self.model)

    def select(self, requests: list[int]) -> "SmallDraftModel":
        rows = selected_rows(self, self.model, requests)
        return SmallDraftModel(self.model, self.condition[rows], self.padding_mask[rows])

    def new_cache(self, columns: int) -> ModelCache:
        return self.model.new_cache(len(self.padding_mask), columns)

    def prefill(self, hidden: Tensor, cache: ModelCache) -> None:
        self.model.prefill(self.condition, self.padding_mask, cache)

    def extend(self, tokens: Tensor, previous_hidden: Tensor, nodes: Nodes, cache: ModelCache) -> Tensor:
        return self.model.extend(tokens, nodes, cache)


def selected_rows(draft_model: DraftModel, model: TargetModel, requests: list[int]) -> list[int]:
    """The rows of some requests among those of a draft model, which has the rows of `model`."""
    num_rows = len(draft_model.padding_mask)
    return model_rows(requests, num_rows // (1 + has_guidance(model)), num_rows)
