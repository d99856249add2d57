"""Pictures by many methods, and the seconds of single ones, kept in a folder: an interruption loses one file's."""
import hashlib
import io
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

import specvis_kernels

from ..decoding.decoded import Decoded
from ..decoding.methods import Method, parse_method
from ..decoding.sampling import Sampling
from ..files import remove_leftovers, write_json, write_new, write_whole
from ..pipelines.discrete import Pipeline
from ..terminal import printable

Arrays = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]
BATCH = 16  # pictures decoded as one batch
SAVED = [field.name for field in fields(Decoded) if field.name != "log_probs"]
BY_POSITION = ("tokens", "num_accepted", "num_drafted")       # these arrays are (pictures, L)
INTEGERS = (*BY_POSITION, "num_known", "target_forwards")     # int64, but int32 in the file


@dataclass(frozen=True)
class PictureRun:
    """`count` pictures of a method. Picture i is of prompt i modulo the number of prompts, with seed i."""

    method: Method
    temperature: float = 1.0
    count: int = 0  # 0: as many as the study has
    start: int = 0

    @classmethod
    def of(cls, text: str, temperature: float = 1.0) -> "PictureRun":
        return cls(parse_method(text), temperature)

    def cost(self) -> float:
        """Roughly the seconds that it takes on two processor cores."""
        each = {"none": 0.0, "jacobi": 0.015}.get(self.method.drafting, 0.03)
        return self.count * (0.2 + each * self.method.max_nodes)

    def shapes(self, length: int) -> Shapes:
        return {name: (self.count, length) if name in BY_POSITION else (self.count,) for name in SAVED}

    def measure(self, study: "DiscreteStudy", progress: Callable[[float], None]) -> Arrays:
        tokens = self.count * study.pipeline.num_tokens
        decoded = study.pipeline.tokens(*study.requests(self), progress=lambda new: progress(new / tokens))
        arrays = {name: getattr(decoded, name).cpu().numpy() for name in SAVED}
        return {name: a.astype(np.int32) if a.dtype == np.int64 else a for name, a in arrays.items()}


@dataclass(frozen=True)
class Latency(PictureRun):
    """`count` single pictures of a method, each decoded right after the baseline's, for their seconds."""

    def cost(self) -> float:
        return (self.count + 1) * (0.6 + 0.02 * self.method.max_nodes)

    def shapes(self, length: int) -> Shapes:
        return dict.fromkeys(("baseline", "method", "tau"), (self.count,))

    def measure(self, study: "DiscreteStudy", progress: Callable[[float], None]) -> Arrays:
        results = {"baseline": [], "method": [], "tau": []}
        for i in range(-1, self.count):  # the first is dropped: it fills caches and touches memory
            one = replace(self, start=self.start + max(i, 0), count=1)
            for run, name in ((replace(one, method=parse_method("vanilla")), "baseline"), (one, "method")):
                start = time.perf_counter()
                decoded = study.pipeline.tokens(*study.requests(run))
                if study.pipeline.device.type == "cuda":
                    torch.cuda.synchronize()
                if i >= 0:
                    results[name].append(time.perf_counter() - start)
            if i >= 0:
                results["tau"].append(decoded.tau.item())
                progress(1 / self.count)
        return results


@dataclass
class DiscretePictures:
    """The pictures of a run."""

    decoded: Decoded

    @property
    def tv_excess(self) -> Tensor:
        """(n,) added total variation per token, estimated."""
        return self.decoded.tv_excess / self.decoded.tokens.shape[1]


@dataclass
class Timings:
    """Seconds of single pictures, beside the seconds of the baseline with the same prompts and seeds."""

    baseline: np.ndarray
    method: np.ndarray
    tau: np.ndarray

    @property
    def speedup(self) -> np.ndarray:
        return self.baseline / self.method


class DiscreteStudy:
    """Runs and latencies of a pipeline. Each is a file in `folder`, or several of BATCH pictures.

    Args:
        prompts: the first `images` of them are used, again and again; picture i has seed `seed + i`
        images:  pictures of a run that does not say how many
    """

    def __init__(self, pipeline: Pipeline, folder: str | Path, prompts: list[str], *, images: int, seed: int = 0,
                 guidance: float = 1.2, top_k: int = 100, top_p: float = 0.8):
        """
        Raises:
            ValueError: the folder holds runs of another model, version or setting
        """
        pipeline.prompts.encode(prompts)
        self.pipeline, self.prompts, self.seed, self.num_images = pipeline, prompts[:images], seed, images
        self.settings = {"guidance": guidance, "top_k": top_k, "top_p": top_p}
        self.machine = machine(pipeline.device)
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.record = self.folder / "study.json"
        remove_leftovers(self.folder)
        configs = [pipeline.gpt.config, pipeline.tokenizer.config, pipeline.small and pipeline.small.config,
                   pipeline.words and pipeline.words.vocabulary]
        identity = {"model": digest_of(pipeline, *configs), "version": specvis_kernels.__version__, "seed": seed,
                    "prompts": prompts, **self.settings}
        if not self.record.exists():  # if two processes make it at once, the second one reads that of the first
            write_new(self.record, json.dumps(identity | {"origins": []}, indent=1) + "\n")
        try:
            found = read_json(self.record)
        except NotWhole as error:  # nobody knows what the results are of
            raise ValueError(f"{error}; choose another folder, or remove {self.folder}") from error
        for key, wanted in identity.items():
            if found.get(key) != wanted:
                many = isinstance(wanted, list)
                difference = "" if many else f" ({found.get(key)}; here it is {wanted})"
                raise ValueError(f"{self.folder} holds results of {'other' if many else 'another'} {key}{difference}: "
                                 "choose another folder, or remove it")

    def requests(self, run: PictureRun) -> tuple[list[str], Method, Sampling]:
        """What `Pipeline.tokens` is given for a run."""
        numbers = range(run.start, run.start + run.count)
        sampling = Sampling.of([self.seed + i for i in numbers], temperature=run.temperature,
                               device=self.pipeline.device, **self.settings)
        return [self.prompts[i % len(self.prompts)] for i in numbers], run.method, sampling

    def path(self, run: PictureRun) -> Path:
        key = [run.method, run.temperature, run.count, run.start, len(self.prompts)]
        key += [self.machine] if isinstance(run, Latency) else []
        return self.folder / f"{run.method.name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.npz"

    def parts(self, run: PictureRun) -> list[PictureRun]:
        """The run in parts of at most BATCH pictures, each of which is a file."""
        end = run.start + (run.count or self.num_images)
        return [replace(run, start=start, count=min(BATCH, end - start)) for start in range(run.start, end, BATCH)]

    def make(self, part: PictureRun, progress: Callable[[float], None] = lambda share: None) -> None:
        arrays = part.measure(self, progress)
        write_whole(self.path(part), lambda file: np.savez_compressed(file, **arrays))

    def read(self, part: PictureRun) -> Arrays:
        """The arrays in a part's file. NotWhole if it is damaged or holds something else."""
        arrays = read_arrays(self.path(part), part.shapes(self.pipeline.num_tokens))
        vocabulary = self.pipeline.gpt.config.vocabulary
        if "tokens" in arrays and not ((arrays["tokens"] >= 0) & (arrays["tokens"] < vocabulary)).all():
            raise NotWhole(f"{self.path(part)} must hold tokens below {vocabulary}")
        return arrays

    def arrays(self, run: PictureRun) -> Arrays:
        """The arrays of all parts. Missing ones are measured now, and damaged ones again, with a message."""
        found = []
        for part in self.parts(run):
            try:
                found.append(self.read(part))
            except (NotWhole, FileNotFoundError) as error:
                if isinstance(error, NotWhole):
                    tqdm.write(printable(f"{error}; it is made again"), file=sys.stderr)
                self.make(part)
                found.append(self.read(part))
        return {name: np.concatenate([arrays[name] for arrays in found]) for name in found[0]}

    def pictures(self, run: PictureRun) -> DiscretePictures:
        values = {name: torch.from_numpy(array) for name, array in self.arrays(run).items()}
        return DiscretePictures(Decoded(**values | {name: values[name].long() for name in INTEGERS}))

    def seconds(self, latency: Latency) -> Timings:
        return Timings(**self.arrays(latency))

    def compute(self, runs: list[PictureRun], label: str = "") -> None:
        """Measure what is missing of `runs`, with a bar that shows the remaining time. Many pictures come last."""
        parts = [part for run in sorted(runs, key=lambda run: not isinstance(run, Latency))
                 for part in self.parts(run)]
        pending = [part for part in dict.fromkeys(parts) if not self.path(part).exists()]
        for method in dict.fromkeys(part.method for part in pending):
            self.pipeline.check(method)
        origin, record = f"{revision()}, {self.machine}, {date.today()}", read_json(self.record)
        if pending and origin not in record["origins"]:
            write_json(self.record, record | {"origins": [*record["origins"], origin]})
        costs = [part.cost() for part in pending]
        start, done = time.perf_counter(), 0.0
        bar_format = "{desc} {percentage:3.0f}% |{bar}| {elapsed} gone, {remaining} left of these"
        with tqdm(total=sum(costs), bar_format=bar_format, smoothing=0, disable=None) as bar:
            for number, (part, cost) in enumerate(zip(pending, costs), 1):
                text = f"{label}{number} of {len(pending)}, {part.method.label}, T = {part.temperature:g}"
                bar.set_description(text)
                if bar.disable:
                    left = (time.perf_counter() - start) / done * (sum(costs) - done) if done else None
                    click.echo(text + ("" if left is None else f", {left / 60:.0f} min left of these"), err=True)
                self.make(part, lambda share, cost=cost: bar.update(cost * share))
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
    """A study's record.

    Raises:
        NotWhole: it holds no JSON object with a list of origins
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        if not isinstance(content, dict) or not isinstance(content.get("origins"), list):
            raise ValueError("it has no list of origins")
        return content
    except (ValueError, RecursionError) as error:
        raise NotWhole(f"{path} cannot be read: {error}") from error


def read_arrays(path: Path, shapes: Shapes) -> Arrays:
    """The arrays in a NumPy archive, by name.

    Raises:
        NotWhole: the archive is damaged, or has other arrays or shapes
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
        if array.dtype.kind not in "biuf" or array.shape != shapes[name]:
            raise NotWhole(f"{path} must hold {name} of the shape {shapes[name]}, got {array.dtype} {array.shape}")
    return arrays
