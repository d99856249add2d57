"""What all training stages have in common: schedule, progress bar, log, checkpoints, resuming."""
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from ..cli.options import device_option
from ..files import locked, reading, write_whole
from ..pipelines.checkpoint import read_state

CHECKPOINT = "checkpoint.pt"  # in a run's folder
SAVED_EVERY = 120             # seconds


def options(batch: int, lr: float):
    """The options that every stage with a model has."""
    every = (
        click.option("--runs", type=click.Path(path_type=Path), default="runs", show_default=True,
                     help="Folder of the training stages."),
        click.option("--minutes", type=click.FloatRange(0, min_open=True),
                     help="Length of the run in minutes, counted across interruptions."),
        click.option("--steps", type=click.IntRange(1), help="Length of the run in steps, instead of minutes."),
        click.option("--batch", type=click.IntRange(1), default=batch, show_default=True, help="Pictures a step."),
        click.option("--lr", type=click.FloatRange(0, min_open=True), default=lr, show_default=True,
                     help="Peak learning rate."),
        device_option,
    )

    def add(command):
        for option in reversed(every):
            command = option(command)
        return command

    return add


def made(path: Path, stage: str) -> Path:
    """`path`, a file that an earlier stage makes. ValueError if it is missing."""
    if not path.exists():
        raise ValueError(f"{path} is missing: run `python -m specvis.train {stage}` with the same --runs first")
    return path


def arrays_of(path: Path, stage: str | None, *names: str) -> dict[str, np.ndarray]:
    """The arrays that an earlier stage wrote, or this one, by name; `names` are some that are used.

    ValueError if the file is missing or hurt.
    """
    advice = f"run `python -m specvis.train {stage}` again" if stage else "remove it, and it is made again"
    with reading(made(path, stage) if stage else path, f"; {advice}"), np.load(path) as archive:
        arrays = dict(archive)
        if missing := [name for name in names if name not in arrays]:
            raise ValueError(f"it has no {missing[0]}")
        return arrays


class Run:
    """A training run. Iterating over it gives the numbers of the steps that are still to do.

    A run that was interrupted goes on from its checkpoint, with its time and its steps. Ctrl-C ends it after the step
    that is being done, and its checkpoint is written; a second Ctrl-C ends it at once.

        for step in run:
            loss = ...
            run.descend(loss)

    Draw random numbers from `run.generator(step)`. A resumed run then draws the same as one without interruption.
    """

    def __init__(self, folder: Path, model: nn.Module, *, lr: float, weight_decay: float, minutes: float | None,
                 steps: int | None, warmup: int = 100, floor: float = 0.03, seed: int = 0):
        if (minutes is None) == (steps is None):
            raise ValueError(f"set exactly one of minutes and steps, got minutes={minutes}, steps={steps}")
        self.folder, self.model, self.seed = folder, model, seed
        self.minutes, self.steps, self.peak, self.warmup, self.floor = minutes, steps, lr, warmup, floor
        matrices = [p for p in model.parameters() if p.ndim >= 2 and p.requires_grad]
        vectors = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
        self.step, self.seconds, self.lr = 0, 0.0, 0.0
        self.checkpoint = folder / CHECKPOINT
        folder.mkdir(parents=True, exist_ok=True)
        self.known = self._state_of_checkpoint()
        if self.known is not None:
            with reading(self.checkpoint, "; it is of another run: choose another --runs, or remove it"):
                state = read_state(self.checkpoint)
                model.load_state_dict(state["model"])
                self.optimizer.load_state_dict(state["optimizer"])
                self.step, self.seconds = int(state["step"]), float(state["seconds"])

    @property
    def done(self) -> float:
        """The share of the run that is over, 0 to 1."""
        return min(1.0, self.step / self.steps if self.steps else self.seconds / (60 * self.minutes))

    def generator(self, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + step)

    def __iter__(self) -> Iterator[int]:
        with locked(self.folder, "runs"):
            if self._state_of_checkpoint() != self.known:
                raise ValueError(f"runs must be a folder that no other command writes to, but one has written "
                                 f"{self.checkpoint} meanwhile: run the command again")
            yield from self._until_interrupted()

    def _state_of_checkpoint(self) -> tuple[int, int] | None:
        if not self.checkpoint.exists():
            return None
        found = self.checkpoint.stat()
        return found.st_ino, found.st_mtime_ns

    def _until_interrupted(self) -> Iterator[int]:
        if threading.current_thread() is not threading.main_thread():  # no other thread sees a Ctrl-C
            yield from self._steps(lambda: False)
            return
        before, presses = signal.getsignal(signal.SIGINT), []

        def press(*_):
            presses.append(True)
            if len(presses) > 1:
                raise KeyboardInterrupt
            click.echo("\nending after this step; Ctrl-C again ends at once", err=True)

        signal.signal(signal.SIGINT, press)
        try:
            yield from self._steps(lambda: bool(presses))
        finally:
            signal.signal(signal.SIGINT, before)
        if presses:
            if self.done < 1:
                click.echo("\ninterrupted: the same command goes on from here", err=True)
            raise KeyboardInterrupt

    def _steps(self, is_interrupted: Callable[[], bool]) -> Iterator[int]:
        log = self.folder / "log.jsonl"
        if log.exists():  # lines behind the checkpoint will be written again, and one that was being written
            with reading(log, "; remove it"):
                lines = [line for line in log.read_text().split("\n")[:-1] if json.loads(line)["step"] < self.step]
            write_whole(log, "".join(f"{line}\n" for line in lines))
        saved = last = time.monotonic()
        with tqdm(total=100, initial=round(100 * self.done, 1), unit="%", desc=self.folder.name,
                  bar_format="{l_bar}{bar}| {elapsed}<{remaining} {postfix}") as self.bar:
            while self.done < 1 and not is_interrupted():
                cosine = 0.5 * (1 + math.cos(math.pi * self.done))
                self.lr = self.peak * min(1, (self.step + 1) / self.warmup) * (self.floor + (1 - self.floor) * cosine)
                for group in self.optimizer.param_groups:
                    group["lr"] = self.lr
                yield self.step
                self.step += 1
                now = time.monotonic()
                self.seconds, last = self.seconds + now - last, now
                self.bar.update(round(100 * self.done, 1) - self.bar.n)
                if now - saved > SAVED_EVERY:
                    self.save()
                    saved = now
            self.save()

    def descend(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def log(self, **numbers: float) -> None:
        """Append one line to <folder>/log.jsonl and show it beside the bar."""
        numbers = {name: round(float(value), 4) for name, value in numbers.items()}
        with open(self.folder / "log.jsonl", "a") as file:
            print(json.dumps({"step": self.step, "seconds": round(self.seconds), **numbers}), file=file)
        self.bar.set_postfix(numbers)

    def save(self) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                 "step": self.step, "seconds": self.seconds}
        write_whole(self.checkpoint, lambda file: torch.save(state, file))
