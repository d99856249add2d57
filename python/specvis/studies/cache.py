"""Results of long work, kept in a folder: an interruption loses only the one that was being computed."""
import hashlib
import io
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import TypeVar

import click
import numpy as np
import torch
from torch import nn
from tqdm import tqdm

import specvis_kernels

from ..files import remove_leftovers, write_json, write_new

Result = TypeVar("Result")


class ResultCache:
    """Jobs, each computed once; its result is a file in `folder`.

    A job is a frozen dataclass with a field `method`. A subclass says what a job is: the `suffix` of its file, its
    `title`, its `cost` in seconds, how to `make` it, and its `key` if more than its fields tells it from others.
    """

    def __init__(self, folder: str | Path, machine: str, identity: dict):
        """
        Raises:
            ValueError: the folder holds results of another `identity`
        """
        self.folder, self.machine = Path(folder), machine
        self.folder.mkdir(parents=True, exist_ok=True)
        self.record = self.folder / "study.json"
        remove_leftovers(self.folder)
        if not self.record.exists():  # of two processes that make it at once, one finds the other's
            write_new(self.record, json.dumps(identity | {"origins": []}, indent=1) + "\n")
        try:
            found = read_json(self.record)
            if not is_list_of(found.get("origins"), str):
                raise NotWhole(f"{self.record} cannot be read: it has no list of origins")
        except NotWhole as error:  # what the results are of is not known any more
            raise ValueError(f"{error}; choose another folder, or remove {self.folder}") from error
        for key, wanted in identity.items():
            if found.get(key) != wanted:
                many = isinstance(wanted, list)
                difference = "" if many else f" ({found.get(key)}; here it is {wanted})"
                raise ValueError(f"{self.folder} holds results of {'other' if many else 'another'} {key}{difference}: "
                                 "choose another folder, or remove it")

    @property
    def origins(self) -> list[str]:
        """Where the results come from: revision, machine and day of each time that some were computed."""
        return read_json(self.record)["origins"]

    @property
    def origins_text(self) -> str:
        """The origins in one line: the revisions of each machine and day."""
        revisions = {}
        for origin in self.origins:
            revision, _, machine_and_day = origin.partition(", ")
            revisions.setdefault(machine_and_day, []).append(revision)
        return "; ".join(f"{' '.join(names)}, {machine_and_day}" for machine_and_day, names in revisions.items())

    def key(self, job) -> list:
        """What tells a job from others."""
        return [getattr(job, field.name) for field in fields(job)]

    def path(self, job) -> Path:
        digest = hashlib.sha256(repr(self.key(job)).encode()).hexdigest()[:16]
        return self.folder / f"{job.method.name}-{digest}.{self.suffix(job)}"

    def read_or_make(self, path: Path, read: Callable[[Path], Result], make: Callable[[], None]) -> Result:
        """What `read` finds in a file that `make` writes. One that is not whole is made again, and this is said."""
        if path.exists():
            try:
                return read(path)
            except NotWhole as error:
                tqdm.write(f"{error}; it is made again", file=sys.stderr)
        make()
        return read(path)

    def parts(self, job) -> list:
        """The jobs that it consists of. These are what is computed and kept."""
        return [job]

    def pending(self, jobs: list) -> list:
        """The parts of these jobs that are not in the folder yet, each once."""
        parts = [part for job in jobs for part in self.parts(job)]
        return [part for part in dict.fromkeys(parts) if not self.path(part).exists()]

    def compute(self, jobs: list, label: str = "") -> None:
        """Compute what is pending of `jobs`, with a bar that tells how much time is left."""
        pending = self.pending(jobs)
        origin = f"{revision()}, {self.machine}, {date.today()}"
        if pending and origin not in self.origins:
            record = read_json(self.record)
            write_json(self.record, record | {"origins": [*self.origins, origin]})
        costs = [self.cost(job) for job in pending]
        start, done = time.perf_counter(), 0.0
        bar_format = "{desc} {percentage:3.0f}% |{bar}| {elapsed} gone, {remaining} left of these"
        with tqdm(total=sum(costs), bar_format=bar_format, smoothing=0, disable=None) as bar:
            for number, (job, cost) in enumerate(zip(pending, costs), 1):
                text = f"{label}{number} of {len(pending)}, {self.title(job)}"
                bar.set_description(text)
                if bar.disable:
                    left = (time.perf_counter() - start) / done * (sum(costs) - done) if done else None
                    click.echo(text + ("" if left is None else f", {left / 60:.0f} min left of these"), err=True)
                self.make(job, lambda share, cost=cost: bar.update(cost * share))
                done += cost


def fingerprint(module: nn.Module, *configs) -> str:
    """Sixteen digits of a model's weights and configurations: models that have the same are the same."""
    digest = hashlib.sha256(repr(configs).encode())
    for name, weight in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def machine(device: torch.device) -> str:
    """The processor, as the system names it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return f"{names[0]}, {torch.get_num_threads()} threads"
    except (OSError, IndexError):
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def revision() -> str:
    """The commit that this package is a checkout of, else its version."""
    this = Path(__file__)
    try:
        def git(*arguments):
            command = ["git", "-C", str(this.parent), *arguments]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        git("ls-files", "--error-unmatch", str(this))  # not that of a repository around an installed package
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", str(this.parents[1]))
                                                      else "")
    except (OSError, subprocess.CalledProcessError):
        return f"version {specvis_kernels.__version__}"


class NotWhole(ValueError):
    """A file of results is hurt, or is not what its name says."""


def read_json(path: Path) -> dict:
    """The object in a JSON file.

    Raises:
        NotWhole: not a JSON object
    """
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
        return content
    except (ValueError, RecursionError) as error:
        raise NotWhole(f"{path} cannot be read: {error}") from error


def read_arrays(path: Path, shapes: dict[str, tuple[int | None, ...]]) -> dict[str, np.ndarray]:
    """The arrays in a NumPy archive, by name, which must have these shapes; a size that is None may be any.

    Raises:
        NotWhole: not a whole archive, or one of other arrays
    """
    content = io.BytesIO(path.read_bytes())  # what is wrong from here on is not the disk's fault
    try:
        with np.load(content) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # of zipfile, zlib, NumPy or what parses its headers: a hurt archive has met many
        raise NotWhole(f"{path} cannot be read: {error or type(error).__name__}") from error
    if arrays.keys() != shapes.keys():
        raise NotWhole(f"{path} must hold {', '.join(shapes)}, got {', '.join(arrays) or 'nothing'}")
    for name, array in arrays.items():
        wanted = shapes[name]
        if array.dtype.kind not in "biuf" or array.ndim != len(wanted) or any(
                size not in (None, got) for size, got in zip(wanted, array.shape)):
            raise NotWhole(f"{path} must hold {name} of the shape {wanted}, got {array.dtype} {array.shape}")
    return arrays


def is_list_of(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)
