"""How far a command is: a bar on a terminal; elsewhere, as in a pipe or a log, a line every few seconds."""
import time

import click
from tqdm import tqdm

EVERY = 4.0  # seconds from one line to the next


class Progress:
    """Of so many steps, one after the other. Use it as a context."""

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
        """So many tokens more are drawn."""
        self.done += count
        self.bar.update(count)
        if time.monotonic() - self.said >= EVERY:
            self._say(f"{self.text}: {self.done / self.total:.0%}")

    def _say(self, line: str) -> None:
        self.said = time.monotonic()
        if self.bar.disable:
            click.echo(line, err=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()
