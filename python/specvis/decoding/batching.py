"""The rows of a batch: images finish at different times, and others can take their places.

A loop's state has a row for each image that is decoded. `Slots` knows which request is in which row. When an image is
finished, the next request that waits takes its row; when none waits, finished images are let go. No row depends on the
others, so an image's tokens are those that it has alone.
"""
from collections import deque
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .discrete import Decoded

Finished = Callable[[list[int], "Decoded"], None]  # called with requests whose images are finished, and their images


class Rows:
    """Something with a row for each of B images, or with two: row b reads a condition, and row B + b reads none."""

    ROWS: tuple[str, ...] = ()   # names of tensors with one row for each image
    PAIRS: tuple[str, ...] = ()  # names of tensors with two
    PARTS: tuple[str, ...] = ()  # names of other such things
    CACHES: tuple[str, ...] = ()  # names of models' caches, with two rows for each image

    def select(self, rows: list[int], batch: int) -> "Rows":
        """These rows of B = batch alone, in memory of their own."""
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

    def insert(self, rows: list[int], batch: int, source: "Rows") -> None:
        """Let these rows of B = batch be the rows of `source`, in the same memory as before."""
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


class Slots:
    """Which request is in which row of a batch, which ones wait for a row, and which images are finished."""

    def __init__(self, num_requests: int, batch: int, finished: Finished | None):
        """batch: how many requests are decoded at once"""
        self.requests, self.waiting = list(range(min(batch, num_requests))), deque(range(batch, num_requests))
        self.finished, self.parts, self.whole = finished, [], set()  # whole: requests whose images are in the parts

    def turn_over(self, state, begin: Callable):
        """Keep the images that are finished, and let the next requests take their rows, or let them go. Returns the
        state. It is called before the first step, too: an image may be known as a whole, or fail at once.

        begin: (requests) -> the state of these requests, as it is before its first step
        """
        L, batch = state.settings.num_tokens, len(self.requests)
        while True:
            done = [row for row, count in enumerate(state.host_counts) if count == L]
            self.keep(state, [row for row in done if self.requests[row] not in self.whole])
            free = done[:len(self.waiting)]
            if not free:
                break
            following = [self.waiting.popleft() for _ in free]
            state.insert(free, batch, begin(following))
            for row, request in zip(free, following):
                self.requests[row] = request
            state.look()  # at the new requests: their trees may be deeper and wider than those before
        # Letting images go costs a copy of all others: it is done once a quarter of them is finished.
        if state.can_select and 0 < batch - len(done) <= 0.75 * batch:
            left = [row for row in range(batch) if row not in done]
            self.requests = [self.requests[row] for row in left]
            return state.select(left, batch)
        return state

    def keep(self, state, rows: list[int]) -> None:
        """The images in these rows are finished."""
        if not rows:
            return
        requests, images = [self.requests[row] for row in rows], state.decoded().select(rows)
        self.whole.update(requests)
        self.parts.append((requests, images))
        if self.finished:
            self.finished(requests, images)

    def decoded(self) -> "Decoded":
        """All images, in the order of the requests, once all are finished."""
        order = [request for requests, _ in self.parts for request in requests]
        images = [images for _, images in self.parts]
        return type(images[0]).merged(images, torch.tensor(order))
