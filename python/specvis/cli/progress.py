"""The progress of a command: a bar on a terminal, a line from time to time in a log or a pipe."""
import time

import click
from tqdm import tqdm

EVERY = 30  # seconds from one line to the next, at least
SOON = 4    # seconds from one line to the next in a command of many short steps


class ProgressBar:
    """Counts up to `total`; `bar` is what a terminal shows."""

    def __init__(self, total: int, unit: str, label: str):
        self.bar = tqdm(total=total, unit=unit, desc=label, disable=None)
        self.total, self.unit, self.label, self.count = total, unit, label, 0
        self.start = self.said = time.monotonic()
        self.first = None  # when the first update came, and what was done then: the start is in its time

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()

    def update(self, count: int = 1) -> None:
        """Counts that many more as done."""
        self.count += count
        self.bar.update(count)
        now = time.monotonic()
        self.first = self.first or (now, self.count)
        if self.bar.disable and now - self.said >= EVERY and self.count:
            self.said, (begun, done) = now, self.first
            left = "" if self.count == done else (
                f", about {(now - begun) * (self.total - self.count) / (self.count - done):.0f} s left")
            click.echo(f"{self.label}: {self.count} of {self.total} {self.unit}s, {now - self.start:.0f} s{left}",
                       err=True)


class Steps:
    """Steps, one after the other, each with a bar or lines of its own."""

    def __init__(self, steps: int):
        self.steps, self.number = steps, 0
        self.bar = tqdm(total=1, bar_format="{percentage:3.0f}% |{bar:20}| {desc}", leave=False, disable=None)

    def begin(self, text: str, total: int) -> None:
        """Begin the next step, of `total` tokens."""
        self.number += 1
        self.text, self.total, self.done = f"{self.number} of {self.steps}, {text}", total, 0
        self.bar.reset(total)
        self.bar.set_description_str(self.text)
        self._say(self.text)

    def update(self, count: int) -> None:
        """`count` tokens more are drawn."""
        self.done += count
        self.bar.update(count)
        if time.monotonic() - self.said >= SOON:
            self._say(f"{self.text}: {self.done / self.total:.0%}")

    def _say(self, line: str) -> None:
        self.said = time.monotonic()
        if self.bar.disable:
            click.echo(line, err=True)

    def __enter__(self) -> "Steps":
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()
