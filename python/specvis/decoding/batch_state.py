"""State with a row for each image of a batch, so that images can leave the batch and others can take their rows."""
from copy import copy

import torch


class BatchState:
    """Tensors with a row for each of B images, or with two: row b reads a condition, and row B + b reads none.

    A subclass names its tensors by the class attributes. No row depends on another one. So an image's tokens are the
    tokens that it has alone.
    """

    ROWS: tuple[str, ...] = ()    # names of tensors with one row for each image
    PAIRS: tuple[str, ...] = ()   # names of tensors with two rows for each image
    PARTS: tuple[str, ...] = ()   # names of other batch states
    CACHES: tuple[str, ...] = ()  # names of models' caches, with two rows for each image

    def select(self, rows: list[int], batch: int) -> "BatchState":
        """These rows of B = batch alone, in new memory."""
        other, both = copy(self), pairs(rows, batch)
        for name, value in self._own(self.ROWS):
            setattr(other, name, value[rows])
        for name, value in self._own(self.PAIRS):
            setattr(other, name, value[both])
        for name, value in self._own(self.CACHES):
            setattr(other, name, value.select(torch.tensor(both)))
        for name, value in self._own(self.PARTS):
            setattr(other, name, value.select(rows, batch))
        return other

    def insert(self, rows: list[int], batch: int, source: "BatchState") -> None:
        """Overwrite these rows of B = batch by the rows of `source`. The memory stays in place."""
        both = pairs(rows, batch)
        for name, value in self._own(self.ROWS):
            value[rows] = getattr(source, name)
        for name, value in self._own(self.PAIRS):
            value[both] = getattr(source, name)
        for name, value in self._own(self.CACHES):
            value.insert(torch.tensor(both), getattr(source, name))
        for name, value in self._own(self.PARTS):
            value.insert(rows, batch, getattr(source, name))

    def _own(self, names):
        return [(name, value) for name in names if (value := getattr(self, name, None)) is not None]


def pairs(rows: list[int], batch: int) -> list[int]:
    """The rows of these images with their condition, and without it."""
    return [*rows, *(row + batch for row in rows)]
