"""Decoded pictures, kept in a folder: an interruption loses only the job that was being computed."""
import hashlib
import io
import json
import platform
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TypeVar

import click
import numpy as np
import torch
from torch import nn
from tqdm import tqdm

import specvis_kernels

from ..decoding.methods import ContinuousMethod, Method
from ..files import remove_leftovers, write_json, write_new, write_whole
from ..pipelines.discrete import Pipeline
from ..pipelines.mar import MARPair
from ..terminal import printable

Result = TypeVar("Result")
Arrays = dict[str, np.ndarray]
ArrayShapes = dict[str, tuple[int | None, ...]]


class Job:
    """What a study computes once and keeps in a file. A subclass is a frozen dataclass, whose fields name the file.

    It has `title(study)`, what the progress bar shows, and `cost(study)`, roughly the seconds that it takes on two
    processor cores, for the estimate of the remaining time. `arrays(study, progress)` computes what the file holds,
    and calls `progress` with each share of the job that is done. `shapes(study)` has the shapes of these arrays by
    name (None: any size).
    """

    method: Method | ContinuousMethod

    def make(self, study: "Study", progress: Callable[[float], None] = lambda share: None) -> None:
        """Write the file."""
        arrays = self.arrays(study, progress)
        write_whole(study.path(self), lambda file: np.savez_compressed(file, **arrays))


class Study(ABC):
    """Jobs of one model on the same prompts and seeds. The result of each job is a file in `folder`.

    Args:
        prompts:  picture i is of prompt i modulo their number and has seed `seed + i`
        configs:  configurations that distinguish the model from others, beside its weights
        settings: what else all results in the folder have in common
    """

    def __init__(self, pipeline: Pipeline | MARPair, folder: str | Path, prompts: list[str], seed: int, configs: list,
                 **settings):
        """
        Raises:
            ValueError: the folder holds results of another model, version or setting
        """
        self.pipeline, self.prompts, self.seed, self.settings = pipeline, prompts, seed, settings
        self.machine = machine(pipeline.device)
        self.loaded: dict = {}  # what was read from the folder
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.record = self.folder / "study.json"
        remove_leftovers(self.folder)
        identity = {"model": digest_of(pipeline, *configs), "version": specvis_kernels.__version__, "seed": seed,
                    "prompts": prompts, **settings}
        if not self.record.exists():  # if two processes make it at once, the second one reads that of the first
            write_new(self.record, json.dumps(identity | {"origins": []}, indent=1) + "\n")
        try:
            found = read_json(self.record)
            if not is_list_of(found.get("origins"), str):
                raise NotWhole(f"{self.record} cannot be read: it has no list of origins")
        except NotWhole as error:  # nobody knows what the results are of
            raise ValueError(f"{error}; choose another folder, or remove {self.folder}") from error
        for key, wanted in identity.items():
            if found.get(key) != wanted:
                many = isinstance(wanted, list)
                difference = "" if many else f" ({found.get(key)}; here it is {wanted})"
                raise ValueError(f"{self.folder} holds results of {'other' if many else 'another'} {key}{difference}: "
                                 "choose another folder, or remove it")

    def prompts_of(self, start: int, count: int) -> list[str]:
        return [self.prompts[i % len(self.prompts)] for i in range(start, start + count)]

    @property
    def origins(self) -> list[str]:
        """Where the results come from: the revision, machine and day of each time that some were computed."""
        return read_json(self.record)["origins"]

    @property
    def origins_text(self) -> str:
        """The origins in one line: the revisions of each machine and day."""
        revisions = {}
        for origin in self.origins:
            revision, _, machine_and_day = origin.partition(", ")
            revisions.setdefault(machine_and_day, []).append(revision)
        return "; ".join(f"{' '.join(names)}, {machine_and_day}" for machine_and_day, names in revisions.items())

    @abstractmethod
    def pictures(self, run: Job):
        """All pictures of a run, with a field `decoded`. Missing ones are decoded now."""

    @abstractmethod
    def key(self, job: Job) -> list:
        """What distinguishes a job from others."""

    def path(self, job: Job) -> Path:
        digest = hashlib.sha256(repr(self.key(job)).encode()).hexdigest()[:16]
        return self.folder / f"{job.method.name}-{digest}.npz"

    def read_or_make(self, path: Path, read: Callable[[Path], Result], make: Callable[[], None]) -> Result:
        """What `read` finds in a file that `make` writes. A damaged file is made again, with a message."""
        if path.exists():
            try:
                return read(path)
            except NotWhole as error:
                tqdm.write(printable(f"{error}; it is made again"), file=sys.stderr)
        make()
        return read(path)

    def read(self, job: Job) -> Arrays:
        """The arrays in a job's file. NotWhole if it is damaged or holds something else."""
        return read_arrays(self.path(job), job.shapes(self))

    def arrays(self, job: Job) -> Arrays:
        """The arrays of a job, which is computed now if it was not before."""
        return self.read_or_make(self.path(job), lambda path: self.read(job), lambda: job.make(self))

    def parts(self, job: Job) -> list[Job]:
        """The jobs that it consists of. These are computed and kept."""
        return [job]

    def pending(self, jobs: list[Job]) -> list[Job]:
        """The parts of these jobs that are not in the folder yet, each once."""
        parts = [part for job in jobs for part in self.parts(job)]
        return [part for part in dict.fromkeys(parts) if not self.path(part).exists()]

    def compute(self, jobs: list[Job], label: str = "") -> None:
        """Compute what is pending of `jobs`, with a bar that shows the remaining time."""
        pending = self.pending(jobs)
        for method in dict.fromkeys(job.method for job in pending):
            self.pipeline.check(method)
        origin = f"{revision()}, {self.machine}, {date.today()}"
        if pending and origin not in self.origins:
            record = read_json(self.record)
            write_json(self.record, record | {"origins": [*self.origins, origin]})
        costs = [job.cost(self) for job in pending]
        start, done = time.perf_counter(), 0.0
        bar_format = "{desc} {percentage:3.0f}% |{bar}| {elapsed} gone, {remaining} left of these"
        with tqdm(total=sum(costs), bar_format=bar_format, smoothing=0, disable=None) as bar:
            for number, (job, cost) in enumerate(zip(pending, costs), 1):
                text = f"{label}{number} of {len(pending)}, {job.title(self)}"
                bar.set_description(text)
                if bar.disable:
                    left = (time.perf_counter() - start) / done * (sum(costs) - done) if done else None
                    click.echo(text + ("" if left is None else f", {left / 60:.0f} min left of these"), err=True)
                job.make(self, lambda share, cost=cost: bar.update(cost * share))
                done += cost


def digest_of(module: nn.Module, *configs) -> str:
    """Sixteen digits that two models share if their weights and configurations are equal."""
    digest = hashlib.sha256(repr(configs).encode())
    for name, weight in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def machine(device: torch.device) -> str:
    """The name that the system gives to the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return f"{names[0]}, {torch.get_num_threads()} threads"
    except (OSError, IndexError):
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def revision() -> str:
    """The commit of this checkout, or the version where there is no checkout."""
    this = Path(__file__)
    try:
        def git(*arguments):
            command = ["git", "-C", str(this.parent), *arguments]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        git("ls-files", "--error-unmatch", str(this))  # fails for a repository around an installed package
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", str(this.parents[2]))
                                                      else "")
    except (OSError, subprocess.CalledProcessError):
        return f"version {specvis_kernels.__version__}"


class NotWhole(ValueError):
    """A file of results is damaged, or its content does not fit its name."""


def read_json(path: Path) -> dict:
    """The object in a JSON file.

    Raises:
        NotWhole: it holds no JSON object
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
        return content
    except (ValueError, RecursionError) as error:
        raise NotWhole(f"{path} cannot be read: {error}") from error


def read_arrays(path: Path, shapes: ArrayShapes) -> Arrays:
    """The arrays in a NumPy archive, by name. They must have these shapes; None allows any size.

    Raises:
        NotWhole: the archive is damaged or has other arrays
    """
    content = io.BytesIO(path.read_bytes())  # errors after this line are not those of the disk
    try:
        with np.load(content) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # from zipfile, zlib, NumPy or its parser of headers: many kinds
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
