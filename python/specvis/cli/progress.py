"""How far a command is: a bar on a terminal, a line from time to time in a log or a pipe."""
import time

import click
from tqdm import tqdm

EVERY = 30  # seconds from one line to the next, at least


class Progress:
    """Counts up to `total`; `bar` is what a terminal shows."""

    def __init__(self, total: int, unit: str, label: str):
        self.bar = tqdm(total=total, unit=unit, desc=label, disable=None)
        self.total, self.unit, self.label, self.count = total, unit, label, 0
        self.start = self.told = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()

    def update(self, count: int = 1) -> None:
        """So many more are done."""
        self.count += count
        self.bar.update(count)
        now = time.monotonic()
        if self.bar.disable and now - self.told >= EVERY and self.count:
            self.told, seconds = now, now - self.start
            click.echo(f"{self.label}: {self.count} of {self.total} {self.unit}s, {seconds:.0f} s, about "
                       f"{seconds * (self.total / self.count - 1):.0f} s left", err=True)
