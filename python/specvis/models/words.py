"""Words instead of a text encoder: a caption's features are learned vectors, one per word."""
import difflib

import torch
import torch.nn as nn
from torch import Tensor

STYLES = ("fluent-3d", "fluent-flat", "noto")  # the first words of the shipped models' captions
PUNCTUATION = ".,:;!?\"'()"


class UnknownWords(ValueError):
    """A prompt holds words that the model was not trained on."""


def bare(word: str) -> str:
    """A word in small letters, without the punctuation around it."""
    return word.lower().strip(PUNCTUATION)


def repeated(words: list[int], length: int) -> list[int]:
    """The words over and over, `length` of them: attention to conditions is uniform, so their number weighs."""
    return (words * -(-length // len(words)))[:length]


class Words(nn.Module):
    """Features (B, S, C) of prompts of at most S words, repeated to S. Entry 0 of `vocabulary` is not a word."""

    def __init__(self, vocabulary: list[str], length: int, width: int):
        super().__init__()
        self.vocabulary, self.length = vocabulary, length
        self.ids = {word: index for index, word in enumerate(vocabulary)}
        self.table = nn.Embedding(len(vocabulary), width)
        nn.init.normal_(self.table.weight, std=0.25)

    @property
    def styles(self) -> tuple[str, ...]:
        """Those of STYLES that the vocabulary has: a prompt begins with one of them, see `prompts.with_style`."""
        return tuple(style for style in STYLES if style in self.ids)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, S) int64 -> features (B, S, C)."""
        return self.table(ids)

    def source(self, prompts: list[str], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, None]:
        """What `condition` of a model takes: features (B, S, C) of prompts, and no padding mask. Errors: `encode`'s."""
        return self(self.encode(prompts)).to(device, dtype), None

    def encode(self, prompts: list[str]) -> Tensor:
        """Prompts, words between spaces -> ids (B, S) int64. Case and punctuation around a word do not count.
        UnknownWords names the words, and suggests near ones. ValueError: a prompt is empty or longer than S words"""
        rows = []
        for prompt in prompts:
            words = [word if word in self.ids else bare(word) for word in prompt.lower().split()]
            words = [word for word in words if word]
            if not 1 <= len(words) <= self.length:
                raise ValueError(f"a prompt must have 1 to {self.length} words, style included, "
                                 f"got {len(words)}: {prompt!r}")
            unknown = [word for word in words if self.ids.get(word, 0) == 0]
            if unknown:
                hints = [f"{word!r}{self._near(word)}" for word in unknown]
                raise UnknownWords(f"prompt {prompt!r} has unknown words: {', '.join(hints)}")
            if words[0] in STYLES and len(words) == 1:
                raise ValueError(f"a prompt must have a word after its style, got {prompt!r}")
            rows.append(repeated([self.ids[word] for word in words], self.length))
        return torch.tensor(rows, device=self.table.weight.device)

    def _near(self, word: str) -> str:
        near = difflib.get_close_matches(word[:100], self.vocabulary[1:], n=3, cutoff=0.6)
        return f" (near: {', '.join(near)})" if near else " (nothing near it; specvis info --words lists all)"
