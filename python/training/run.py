"""A training run: schedule, progress bar, log, checkpoints, resuming."""
import hashlib
import io
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import torch
from torch import nn
from tqdm import tqdm

from specvis.files import first_line, locked, reading, write_whole
from specvis.pipelines.checkpoint import read_state

VERSION = 3                   # checkpoints of other versions are refused
CHECKPOINT = "checkpoint.pt"  # written in a run's folder while the learning rate is constant
FALLING = "falling.pt"        # written while the learning rate falls
SAVED_EVERY = 120             # seconds
FALL = 0.2                    # the learning rate falls in this last share of a run
HORIZON = 1000                # steps that the average of the weights covers, about


def compiling(step: Callable, compiled: bool) -> Callable:
    """The function, compiled if it is to be. ValueError at its first call if it cannot be."""
    if not compiled:
        return step
    fast = torch.compile(step, dynamic=False)

    def call(*arguments):
        try:
            return fast(*arguments)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise ValueError(f"compile must be off, --no-compile, where torch.compile fails: {first_line(error)}"
                             ) from error

    return call


def mixed_precision(device: torch.device):
    return torch.autocast(device.type, torch.bfloat16)


def differing(found: dict, wanted: dict) -> list[str]:
    """The names whose values differ."""
    return [name for name in dict.fromkeys((*found, *wanted)) if found.get(name) != wanted.get(name)]


class TrainingRun:
    """A training run. Iterating over it gives the numbers of the steps that are still to do.

    The learning rate rises for `warmup` steps, stays at `lr`, and falls to zero in the last fifth (FALL) of `minutes`
    or `steps`. With neither the run has no end: the rate stays. So the length need not be known. The state before the
    fall is kept: a longer run goes on from there, a shorter one falls from where it is.

    A run that was interrupted goes on from its checkpoint, with its time and its steps. Ctrl-C ends it after the step
    that is being done, and its checkpoint is written; a second Ctrl-C ends it at once.

        for step in run:
            loss = ...
            run.descend(loss)

    Draw random numbers from `run.generator(step)`. A resumed run then draws what an uninterrupted run draws.
    `average` is the moving average of the parameters that are trained; see `averaged`.
    """

    def __init__(self, folder: Path, model: nn.Module, *, lr: float, weight_decay: float, minutes: float | None,
                 steps: int | None, configuration: dict | None = None, inputs: dict[str, Path] | None = None,
                 warmup: int = 100, seed: int = 0):
        """
        Args:
            configuration: the model's numbers by name; a checkpoint of others is refused
            inputs: the files that it is trained on, or starts from, by name; likewise
        Raises:
            ValueError: minutes and steps are both given, or less than the run has had; a checkpoint that cannot be
                read, or is of another version, another configuration or other inputs
        """
        if minutes is not None and steps is not None:
            raise ValueError(f"set at most one of minutes and steps, got minutes={minutes}, steps={steps}")
        self.folder, self.model, self.seed = folder, model, seed
        self.minutes, self.steps, self.peak, self.warmup = minutes, steps, lr, warmup
        self.configuration = json.loads(json.dumps(configuration or {}))
        self.inputs = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in (inputs or {}).items()}
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": weight_decay},
                  {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
        self.average = [p.detach().clone() for p in self.parameters]
        self.step, self.seconds, self.lr, self.fall_from = 0, 0.0, 0.0, None
        folder.mkdir(parents=True, exist_ok=True)
        self.known = self._states_of_checkpoints()
        falling = self._read(folder / FALLING)
        if falling is not None and falling["length"] == self.length:
            self._take(falling, folder / FALLING)
        elif (state := self._read(folder / CHECKPOINT)) is not None:
            self._take(state, folder / CHECKPOINT)
            had = self.step if steps else round(self.seconds / 60, 1)
            if self.length and self.progress >= self.length[1] and state["length"] != self.length:
                unit, length = self.length
                raise ValueError(f"{unit} must be more than {had}, which {folder} has had already, got {length:g}")

    @property
    def length(self) -> list | None:
        """Its unit and how many of it."""
        return ["steps", self.steps] if self.steps else ["minutes", self.minutes] if self.minutes else None

    @property
    def progress(self) -> float:
        """How much of the length is over, in its unit."""
        return self.step if self.steps else self.seconds / 60

    @property
    def done(self) -> float:
        """The share of the run that is over, 0 to 1; 0 if it has no end."""
        return min(1.0, self.progress / self.length[1]) if self.length else 0.0

    def _read(self, path: Path) -> dict | None:
        """A checkpoint of this version, configuration and inputs, or None if it does not exist."""
        if not path.exists():
            return None
        advice = "choose another --runs, or remove it"
        with reading(path, f"; it is of another run: {advice}"):
            state = read_state(path)
            version, numbers = int(state.get("version", 1)), dict(state.get("configuration", {}))
            inputs = dict(state.get("inputs", {}))
        if version != VERSION:
            raise ValueError(f"{path} is a checkpoint of version {version}, this program reads version {VERSION}: "
                             f"{advice}")
        if others := differing(numbers, self.configuration):
            raise ValueError(f"{path} is of another configuration: " + ", ".join(
                f"{name} is {numbers.get(name)} there and {self.configuration.get(name)} here" for name in others)
                + f"; {advice}")
        if others := differing(inputs, self.inputs):
            raise ValueError(f"{path} was trained with another {' and another '.join(others)}: {advice}")
        return state

    def _take(self, state: dict, path: Path) -> None:
        with reading(path, "; it is of another run: choose another --runs, or remove it"), torch.no_grad():
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            for mine, found in zip(self.average, state["average"], strict=True):
                mine.copy_(found)
            self.step, self.seconds, self.fall_from = int(state["step"]), float(state["seconds"]), state["fall_from"]

    def generator(self, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + step)

    def __iter__(self) -> Iterator[int]:
        with locked(self.folder, "runs"):
            if self._states_of_checkpoints() != self.known:
                raise ValueError(f"runs must be a folder that no other command writes to, but one has written "
                                 f"a checkpoint to {self.folder} meanwhile: run the command again")
            yield from self._until_interrupted()

    def _states_of_checkpoints(self) -> list[tuple[int, int]]:
        found = [path.stat() for name in (CHECKPOINT, FALLING) if (path := self.folder / name).exists()]
        return [(file.st_ino, file.st_mtime_ns) for file in found]

    def _until_interrupted(self) -> Iterator[int]:
        if threading.current_thread() is not threading.main_thread():  # no other thread sees a Ctrl-C
            yield from self._steps(lambda: False)
            return
        presses = []

        def press(*_):
            presses.append(True)
            if len(presses) > 1:
                raise KeyboardInterrupt
            click.echo("\nending after this step; Ctrl-C again ends at once", err=True)

        def go_on(*_):  # a pause is not the run's time
            self.last = time.monotonic()

        handlers = {signal.SIGINT: press} | ({signal.SIGCONT: go_on} if hasattr(signal, "SIGCONT") else {})
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield from self._steps(lambda: bool(presses))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if presses:
            if self.done < 1:
                click.echo("\ninterrupted: the same command goes on from here", err=True)
                if self.length is None:
                    click.echo(f"To end the run, give more than its {self.seconds / 60:.1f} minutes as --minutes, or "
                               f"more than its {self.step} steps as --steps. Its learning rate falls in the last fifth "
                               "of them, at once if that is over.", err=True)
            raise KeyboardInterrupt

    def _steps(self, is_interrupted: Callable[[], bool]) -> Iterator[int]:
        log = self.folder / "log.jsonl"
        if log.exists():  # lines after the checkpoint will be written again, and one that was being written
            with reading(log, "; remove it"):
                lines = [line for line in log.read_text().split("\n")[:-1] if json.loads(line)["step"] < self.step]
            write_whole(log, "".join(f"{line}\n" for line in lines))
        saved = self.last = time.monotonic()
        with self._bar() as self.bar:
            while self.done < 1 and not is_interrupted():
                if self.fall_from is None and self.done >= 1 - FALL:
                    self.save()
                    self.fall_from = self.done
                self.lr = self.peak * min(1, (self.step + 1) / self.warmup)
                if self.fall_from is not None:
                    self.lr *= (1 - self.done) / (1 - self.fall_from)
                for group in self.optimizer.param_groups:
                    group["lr"] = self.lr
                yield self.step
                self.step += 1
                now = time.monotonic()
                self.seconds, self.last = self.seconds + now - self.last, now
                self.bar.update(round(100 * self.done, 1) - self.bar.n if self.length else 1)
                if now - saved > SAVED_EVERY:
                    self.save()
                    saved = now
            self.save()

    def _bar(self) -> tqdm:
        if self.length is None:
            return tqdm(initial=self.step, unit=" steps", desc=self.folder.name)
        return tqdm(total=100, initial=round(100 * self.done, 1), unit="%", desc=self.folder.name,
                    bar_format="{l_bar}{bar}| {elapsed}<{remaining} {postfix}")

    def descend(self, loss: torch.Tensor) -> None:
        """A step of the optimizer, and of the average. Early in a run the average covers fewer steps."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.parameters, max(1 / HORIZON, 9 / (10 + self.step)))

    def learn(self, losses_of: Callable[[torch.Generator], dict[str, torch.Tensor]], every: int,
              measured: Callable[[], dict[str, float]]) -> None:
        """Do the remaining steps. Each minimizes the sum of the losses of a batch that `losses_of` draws.

        After every `every` steps a line of the log has the means of the losses, and what `measured` returns for the
        averaged parameters.
        """
        recent = []
        for step in self:
            losses = losses_of(self.generator(step))
            loss = sum(losses.values())
            self.descend(loss)
            recent.append({name: loss.detach() for name, loss in losses.items()})
            if self.step % every == every - 1:
                with self.averaged(), mixed_precision(loss.device):
                    numbers = measured()
                means = {name: torch.stack([losses[name] for losses in recent]).mean() for name in losses}
                self.log(**means, **numbers, lr=self.lr)
                recent = []

    def report(self, measured: dict[str, Callable[[], dict[str, float]]], digits: int) -> None:
        """Log and print what is measured at the end, each part under its name."""
        for name, measure in measured.items():
            numbers = measure()
            self.log(**{f"{name}, {key}": value for key, value in numbers.items()})
            click.echo(f"{name}: " + ", ".join(f"{key} {value:.{digits}f}" for key, value in numbers.items()))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """While this is open, the model has the averaged parameters, and is not in training mode."""
        with torch.no_grad():
            own = [p.clone() for p in self.parameters]
            torch._foreach_copy_(self.parameters, self.average)
            self.model.eval()
            try:
                yield
            finally:
                torch._foreach_copy_(self.parameters, own)
                self.model.train()

    def log(self, **numbers: float) -> None:
        """Append one line to <folder>/log.jsonl and show it beside the bar."""
        numbers = {name: float(f"{float(value):.5g}") for name, value in numbers.items()}
        path = self.folder / "log.jsonl"
        try:
            with open(path, "a") as file:
                print(json.dumps({"step": self.step, "seconds": round(self.seconds), **numbers}), file=file)
        except OSError as error:
            error.filename = error.filename or str(path)  # a full disk's error does not name the file
            raise
        self.bar.set_postfix(numbers)

    def save(self) -> None:
        state = {"version": VERSION, "configuration": self.configuration, "inputs": self.inputs,
                 "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "average": self.average,
                 "step": self.step, "seconds": self.seconds, "fall_from": self.fall_from, "length": self.length}
        content = io.BytesIO()
        torch.save(state, content)  # where it writes to a full disk itself, it raises a RuntimeError
        write_whole(self.folder / (CHECKPOINT if self.fall_from is None else FALLING), content.getvalue())
