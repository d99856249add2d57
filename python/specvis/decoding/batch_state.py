"""State with a row for each image of a batch, so that images can leave the batch and others can take their rows."""
from copy import copy

import torch


class BatchState:
    """Tensors with a row for each of B images, or with two: row b reads a condition, and row B + b, if any, reads none.

    A subclass names its tensors by the class attributes. No row depends on another one. So an image's tokens are the
    tokens that it has alone.
    """

    ROWS: tuple[str, ...] = ()    # names of tensors with one row for each image
    PAIRS: tuple[str, ...] = ()   # names of tensors with one or two rows for each image, as the models read them
    PARTS: tuple[str, ...] = ()   # names of other batch states
    CACHES: tuple[str, ...] = ()  # names of models' caches, of `num_rows` rows

    @property
    def num_rows(self) -> int:
        return len(self.padding_mask)

    def select(self, rows: list[int], batch: int) -> "BatchState":
        """These rows of B = batch alone, in new memory."""
        other = copy(self)
        for name, value in self._own(self.ROWS):
            setattr(other, name, value[rows])
        for name, value in self._own(self.PAIRS):
            setattr(other, name, value[model_rows(rows, batch, len(value))])
        for name, value in self._own(self.CACHES):
            setattr(other, name, value.select(torch.tensor(model_rows(rows, batch, self.num_rows), device="cpu")))
        for name, value in self._own(self.PARTS):
            setattr(other, name, value.select(rows, batch))
        return other

    def insert(self, rows: list[int], batch: int, source: "BatchState") -> None:
        """Overwrite these rows of B = batch by the rows of `source`. The memory stays in place."""
        for name, value in self._own(self.ROWS):
            value[rows] = getattr(source, name)
        for name, value in self._own(self.PAIRS):
            value[model_rows(rows, batch, len(value))] = getattr(source, name)
        for name, value in self._own(self.CACHES):
            value.insert(torch.tensor(model_rows(rows, batch, self.num_rows), device="cpu"), getattr(source, name))
        for name, value in self._own(self.PARTS):
            value.insert(rows, batch, getattr(source, name))

    def _own(self, names):
        return [(name, value) for name in names if (value := getattr(self, name, None)) is not None]


def model_rows(images: list[int], batch: int, num_rows: int) -> list[int]:
    """The rows of these images, of num_rows rows: row r is of image r % B, with B = batch."""
    return [image + first for first in range(0, num_rows, batch) for image in images]
