"""Who drafts: EAGLE's head, which reads the target's hidden states, or a smaller model that reads tokens alone.

Both are read alike by python/specvis/decode.py. Row b of a batch has the caption of request b, row B + b has none.
"""
import torch
from torch import Tensor

from ..models.eagle import Drafter
from ..models.layers import Cache
from ..models.llamagen import GPT, condition_mask


class Eagle:
    """It stands one position behind the target, and its hidden states go through the target's head."""

    def __init__(self, gpt: GPT, drafter: Drafter, valid: Tensor):
        """valid (2B, S): which conditions are not padding."""
        self.head, self.drafter = gpt, drafter
        self.shown = gpt.config.condition_tokens - 1  # entries before the first token's
        self.valid = valid[:, : self.shown]

    def new_cache(self, columns: int) -> Cache:
        return self.drafter.new_cache(len(self.valid), columns)

    def read_condition(self, hidden: Tensor, cache: Cache) -> None:
        """Fill the cache; hidden (2B, S, dim) are the target's states at the condition."""
        if self.shown:
            places = torch.arange(self.shown, device=hidden.device)[None].expand(len(hidden), -1)
            self.drafter(torch.zeros_like(places), hidden[:, : self.shown], places,
                         condition_mask(self.valid, self.shown), cache, places)

    def read(self, tokens: Tensor, hidden: Tensor, places: Tensor, mask: Tensor, cache: Cache, slots: Tensor) -> Tensor:
        """Hidden states (2B, N, dim) at tokens (2B, N); hidden (2B, N, dim): the states before them."""
        return self.drafter(tokens, hidden, places, mask, cache, slots)


class Independent:
    """A smaller GPT of the target's family, which is told the caption itself."""

    def __init__(self, gpt: GPT, condition: Tensor, valid: Tensor):
        """condition (2B, S, its dim), valid (2B, S)."""
        self.head, self.condition, self.valid = gpt, condition, valid
        self.shown = gpt.config.condition_tokens

    def new_cache(self, columns: int) -> Cache:
        return self.head.new_cache(len(self.valid), columns)

    def read_condition(self, hidden: Tensor, cache: Cache) -> None:
        places = torch.arange(self.shown, device=hidden.device)[None].expand(len(hidden), -1)
        self.head(self.condition, places, condition_mask(self.valid, self.shown), cache, places)

    def read(self, tokens: Tensor, hidden: Tensor, places: Tensor, mask: Tensor, cache: Cache, slots: Tensor) -> Tensor:
        return self.head(self.head.tok_embeddings(tokens), places, mask, cache, slots)
