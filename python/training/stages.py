"""What the stages of training share: their options, the files of other stages, and pictures that are drawn."""
import json
import math
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor

from specvis.cli.options import device_option, with_options
from specvis.files import reading


class Positive(click.FloatRange):
    """A finite number above 0."""

    def __init__(self):
        super().__init__(0, min_open=True)

    def convert(self, value, parameter, context):
        value = super().convert(value, parameter, context)
        if not math.isfinite(value):
            self.fail(f"it must be finite, got {value}", parameter, context)
        return value


runs_option = click.option("--runs", type=click.Path(path_type=Path), default="runs", show_default=True,
                           help="Folder of the training stages.")


def options(*more, batch: int, lr: float, compiled: bool = True):
    """A decorator: the options that every stage with a model has, and `more`. compiled: --compile too"""
    every = [
        runs_option,
        click.option("--minutes", type=Positive(),
                     help="Length of the run in minutes, counted across interruptions. [default: no end]"),
        click.option("--steps", type=click.IntRange(1), help="Length of the run in steps, instead of minutes."),
        click.option("--batch", type=click.IntRange(1), default=batch, show_default=True, help="Pictures a step."),
        click.option("--lr", type=Positive(), default=lr, show_default=True,
                     help="Learning rate, which falls in the last fifth of a run that has a length."),
        device_option, *more]
    if compiled:
        every.append(click.option(
            "--compile/--no-compile", "compiled", default=True, show_default=True,
            help="Compile the training step, which makes it faster and takes a minute at the start."))
    return with_options(*every)


def made(path: Path, stage: str) -> Path:
    """`path`, a file that an earlier stage makes. ValueError if it is missing."""
    if not path.exists():
        raise ValueError(f"{path} is missing: run `python -m training {stage}` with the same --runs first")
    return path


def arrays_of(path: Path, stage: str | None, *names: str) -> dict[str, np.ndarray]:
    """The arrays that an earlier stage wrote, or this one, by name; `names` are some that are used. ValueError if the
    file is missing or damaged."""
    advice = f"run `python -m training {stage}` again" if stage else "remove it, and it is made again"
    with reading(made(path, stage) if stage else path, f"; {advice}"), np.load(path) as archive:
        arrays = dict(archive)
        if missing := [name for name in names if name not in arrays]:
            raise ValueError(f"it has no {missing[0]}")
        return arrays


def vocabulary_of(runs: Path) -> list[str]:
    """The words of the captions, by number, from the data stage."""
    path = made(runs / "data" / "vocabulary.json", "data")
    with reading(path, "; run `python -m training data` again"):
        return json.loads(path.read_text())


class Sampled:
    """Pictures of which some are held out. The others are drawn by weight."""

    def __init__(self, held_out: np.ndarray, weights: np.ndarray):
        is_held_out = torch.from_numpy(held_out)
        self.train, self.test = (~is_held_out).nonzero()[:, 0], is_held_out.nonzero()[:, 0]
        self.sampling_weights = torch.from_numpy(weights).float()[self.train]

    def rows(self, batch: int, generator: torch.Generator) -> Tensor:
        """The numbers (B,) int64 of drawn training pictures."""
        return self.train[torch.multinomial(self.sampling_weights, batch, replacement=True, generator=generator)]


def spread(pictures: Tensor, count: int) -> Tensor:
    """At most `count` of these rows (int64), evenly spaced."""
    return pictures[:: max(1, len(pictures) // count)][:count]
