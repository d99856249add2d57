"""Runs of one model, kept in a folder, so that long work may be interrupted and goes on where it stopped."""
import hashlib
import json
import platform
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from datetime import date
from functools import cached_property
from pathlib import Path
from zipfile import BadZipFile

import click
import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

import specvis_kernels

from ..decoding.discrete import Decoded, Sampling, Step
from ..decoding.methods import Method, parse_method
from ..pipelines.discrete import Pipeline
from .quality import GROUPS, MORE_SCORES, Network, Score, Seen, quality

CHUNK = 32  # pictures decoded as one batch
STEPS = 12  # that memory is looked at for: caches have their full size from the first


@dataclass(frozen=True)
class Run:
    """`count` pictures of a method, decoded in batches: for what pictures are like and how many steps they take."""

    method: Method
    temperature: float = 1.0
    count: int = 0                 # 0: as many as the study has
    start: int = 0                 # picture i is of prompt i modulo the number of prompts, with seed i
    guidance: float | None = None  # None: the study's

    @staticmethod
    def of(text: str, temperature: float = 1.0, **others) -> "Run":
        return Run(parse_method(text), temperature, **others)


@dataclass(frozen=True)
class Latency:
    """`count` pictures of a method, each alone and right after the same picture by plain decoding: for seconds."""

    method: Method
    temperature: float = 1.0
    count: int = 0                 # 0: as many as the study times


@dataclass(frozen=True)
class Memory:
    """The most bytes that the tensors of one picture take between operations, in the first steps of its decoding."""

    method: Method
    temperature: float = 1.0


Work = Run | Latency | Memory


@dataclass
class Pictures:
    """What a run gave: `Decoded`, and of every step how its trees were."""

    decoded: Decoded
    ranks: Tensor    # (n, L) int64  elder siblings of the draft that was accepted here; -1: drawn, not drafted
    nodes: Tensor    # (n, L) int64  nodes of the tree whose step began here, the root counted; 0: none began

    @property
    def tau(self) -> float:
        return self.decoded.tau.nanmean().item()

    @property
    def depth(self) -> float:
        """Mean levels of a tree, the last ones of an image, which its end cuts, left out."""
        began = self.decoded.accepted >= 0
        whole = began & (torch.arange(began.shape[1]) < began.shape[1] - 10)
        whole = whole if whole.any() else began
        return self.decoded.drafted[whole].float().mean().item()

    @property
    def lengths(self) -> Tensor:
        """(steps,) how many drafts each step accepted."""
        return self.decoded.accepted[self.decoded.accepted >= 0]

    @property
    def excess(self) -> Tensor:
        """(n,) the fidelity meter per token."""
        return self.decoded.excess / self.decoded.tokens.shape[1]


@dataclass
class Seconds:
    """Latencies of single pictures, each beside plain decoding's of the same one."""

    plain: list[float]
    method: list[float]
    tau: list[float]
    tokens: list[list[int]]  # of the method's pictures

    @property
    def speedup(self) -> np.ndarray:
        return np.array(self.plain) / np.array(self.method)


class Recorder:
    """An observer that writes ranks and nodes of each step to their places."""

    def __init__(self, count: int, length: int):
        self.ranks = torch.full((count, length + 1), -1, dtype=torch.int64)  # behind the end: scratch
        self.nodes = torch.zeros(count, length, dtype=torch.int64)

    def __call__(self, step: Step) -> None:
        ancestors, depth = step.links[0].cpu(), step.links[1].cpu()
        B, N, W = ancestors.shape
        node = torch.arange(N)
        own = torch.zeros(N, W, dtype=torch.int64)
        own[node, node // 64] = torch.ones(1, dtype=torch.int64) << node % 64
        above = ancestors ^ own * (depth >= 0)[..., None]
        siblings = (above[:, :, None] == above[:, None]).all(-1) & (depth[:, None] == depth[..., None])
        elder = siblings.tril(-1).sum(-1)                                             # (B, N)
        path, first, going = step.path.long().cpu(), step.first.cpu(), step.going.cpu()
        taken = (torch.arange(path.shape[1]) < step.accepted.cpu()[:, None]) & going[:, None]
        last = self.ranks.shape[1] - 1
        places = torch.where(taken, first[:, None] + torch.arange(path.shape[1]), last).clamp(max=last)
        self.ranks.scatter_(1, places, elder.gather(1, path.clamp(min=0)))
        rows = going.nonzero()[:, 0]
        self.nodes[rows, first[rows]] = (depth >= 0).sum(1)[rows]


def fingerprint(module: nn.Module, *configs) -> str:
    """Sixteen digits of weights and configurations: two models with the same are the same."""
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
    here = Path(__file__)
    try:
        def git(*arguments):
            command = ["git", "-C", str(here.parent), *arguments]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        git("ls-files", "--error-unmatch", str(here))  # not that of a repository around an installed package
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", str(here.parents[1]))
                                                      else "")
    except (OSError, subprocess.CalledProcessError):
        return f"version {specvis_kernels.__version__}"


class Kept:
    """Works that are done once each and kept in `folder`, a file each.

    Who inherits says how: `suffix`, `title`, `cost` and `make` of a work, its `key` if more than its fields tell it
    from others, and for the network `prompts` and `images_of` a run.
    """

    def __init__(self, folder: str | Path, machine: str, identity: dict):
        """
        Raises:
            ValueError: the folder holds results of another `identity`
        """
        self.folder, self.machine = Path(folder), machine
        self.folder.mkdir(parents=True, exist_ok=True)
        self.record = self.folder / "study.json"
        if not self.record.exists():
            write(self.record, json.dumps(identity | {"made": []}, indent=1) + "\n")
        other = read_json(self.record)
        for key, wanted in identity.items():
            if other.get(key) != wanted:
                differ = f" ({other.get(key)}; here it is {wanted})" if not isinstance(wanted, list) else ""
                other_key = f"another {key}" if not isinstance(wanted, list) else f"other {key}"
                raise ValueError(f"{self.folder} holds results of {other_key}{differ}: choose another folder, or "
                                 "remove it")

    @property
    def made(self) -> list[str]:
        """Where the runs come from: revision, machine and day of each time that some were done."""
        return read_json(self.record)["made"]

    def key(self, work) -> list:
        """What tells a work from others."""
        return [getattr(work, field.name) for field in fields(work)]

    def path(self, work) -> Path:
        digest = hashlib.sha256(repr(self.key(work)).encode()).hexdigest()[:16]
        return self.folder / f"{work.method.name}-{digest}.{self.suffix(work)}"

    def parts(self, work) -> list:
        """The works that it is made of, which are kept."""
        return [work]

    def pending(self, works: list) -> list:
        """What of it is not in the folder yet, each once."""
        parts = [part for work in works for part in self.parts(work)]
        return [work for work in dict.fromkeys(parts) if not self.path(work).exists()]

    def do(self, works: list, say: str = "") -> None:
        """Do what is pending of `works`, with a bar that tells how much time is left."""
        pending = self.pending(works)
        origin = f"{revision()}, {self.machine}, {date.today()}"
        if pending and origin not in self.made:
            write(self.record, json.dumps(read_json(self.record) | {"made": [*self.made, origin]}, indent=1) + "\n")
        costs = [self.cost(work) for work in pending]
        began, done = time.perf_counter(), 0.0
        form = "{desc}: {percentage:3.0f}% |{bar}| {elapsed} gone, {remaining} left"
        with tqdm(total=sum(costs), bar_format=form, smoothing=0, disable=None) as bar:
            for number, (work, price) in enumerate(zip(pending, costs), 1):
                what = f"{say}{number} of {len(pending)}, {self.title(work)}"
                bar.set_description(what)
                if bar.disable:
                    left = (time.perf_counter() - began) / done * (sum(costs) - done) if done else None
                    click.echo(what + ("" if left is None else f", {left / 60:.0f} min left"), err=True)
                self.make(work, lambda share: bar.update(price * share))
                done += price

    def seen(self, run) -> Seen:
        """What the network sees in a run's pictures, kept beside them."""
        arrays = [self._seen(part) for part in self.parts(run)]
        names = np.concatenate([part.start + np.arange(part.count) for part in self.parts(run)]) % len(self.prompts)
        return Seen(*(np.concatenate([kept[name] for kept in arrays]) for name in ("features", "classes")), names)

    def _seen(self, part) -> dict[str, np.ndarray]:
        path = self.path(part).with_suffix(".features.npz")
        if not path.exists():
            features, classes = self.network(self.images_of(part))
            write(path, lambda file: np.savez(file, features=features, classes=classes))
        return read_arrays(path)

    @cached_property
    def network(self) -> Network:
        return Network()


class Study(Kept):
    """Runs of a pipeline under the same settings; each is done once and kept in `folder`.

    Args:
        prompts: of which the first `images` are used, over and over: picture i has seed `seed + i`
        images:  pictures of a run
        timed:   pictures of a latency
    """

    def __init__(self, pipeline: Pipeline, folder: str | Path, prompts: list[str], *, images: int, timed: int = 4,
                 seed: int = 0, guidance: float = 1.2, top_k: int = 100, top_p: float = 0.8):
        """
        Raises:
            ValueError: the folder holds runs of another model, version or setting
        """
        self.pipeline = pipeline
        self.prompts, self.images, self.timed, self.seed = prompts[:images], images, timed, seed
        self.settings = {"guidance": guidance, "top_k": top_k, "top_p": top_p}
        pipeline.words.encode(prompts)
        self.kept: dict[tuple, Pictures] = {}
        small = pipeline.small and pipeline.small.config
        model = fingerprint(pipeline, pipeline.gpt.config, pipeline.tokenizer.config, small, pipeline.words.vocabulary)
        super().__init__(folder, machine(pipeline.device), {
            "model": model, "version": specvis_kernels.__version__, "seed": seed, "prompts": prompts, **self.settings})

    # --- what is to do -------------------------------------------------------------------------------------------

    def chunks(self, run: Run) -> list[Run]:
        """The run as batches of at most CHUNK pictures, aligned, so that longer runs of a method share them."""
        count, runs, start = run.count or self.images, [], run.start
        while start < run.start + count:
            end = min(run.start + count, (start // CHUNK + 1) * CHUNK)
            runs.append(Run(run.method, run.temperature, end - start, start, run.guidance))
            start = end
        return runs

    def parts(self, work: Work) -> list[Work]:
        if isinstance(work, Run):
            return self.chunks(work)
        return [self.whole(work) if isinstance(work, Latency) else work]

    def key(self, work: Work) -> list:
        values = super().key(work) + [len(self.prompts)]
        return values if isinstance(work, Run) else values + [self.machine]

    def suffix(self, work: Work) -> str:
        return "npz" if isinstance(work, Run) else "json"

    def whole(self, latency: Latency) -> Latency:
        return Latency(latency.method, latency.temperature, latency.count or self.timed)

    def pending(self, works: list[Work]) -> list[Work]:
        """What of it is not in the folder yet, each once. Runs of many pictures come last."""
        return super().pending(sorted(works, key=lambda work: isinstance(work, Run)))

    def do(self, works: list[Work], say: str = "") -> None:
        for method in {work.method: None for work in self.pending(works)}:
            self.pipeline.check(method)
        super().do(works, say)

    def title(self, work: Work) -> str:
        return f"{work.method.label}, T = {work.temperature:g}"

    def cost(self, work: Work) -> float:
        return cost(work)

    def make(self, work: Work, gained: Callable[[float], None]) -> None:
        tokens = self.pipeline.gpt.config.tokens
        if isinstance(work, Run):
            self._decode(work, lambda new: gained(new / (work.count * tokens)))
        elif isinstance(work, Latency):
            self._time(work, lambda: gained(1 / work.count))
        else:
            self.memory(work)
            gained(1)

    # --- what was done -------------------------------------------------------------------------------------------

    def pictures(self, run: Run) -> Pictures:
        """All of a run, decoded now if it was not before."""
        key = (run, self.images)
        if key not in self.kept:
            parts = [self._read(chunk) for chunk in self.chunks(run)]
            decoded = [part.decoded for part in parts]
            self.kept[key] = Pictures(
                Decoded(*(torch.cat([getattr(d, field.name) for d in decoded]) for field in fields(Decoded))),
                torch.cat([part.ranks for part in parts]), torch.cat([part.nodes for part in parts]))
        return self.kept[key]

    def seconds(self, latency: Latency) -> Seconds:
        latency = self.whole(latency)
        if not self.path(latency).exists():
            self._time(latency)
        return Seconds(**read_json(self.path(latency)))

    def memory(self, work: Memory) -> int:
        """Bytes, of all tensors together; the model's weights do not count."""
        path = self.path(work)
        if not path.exists():
            write(path, json.dumps({"bytes": self._peak(work)}) + "\n")
        return read_json(path)["bytes"]

    def images_of(self, run: Run) -> np.ndarray:
        """(n, H, W, 3) uint8."""
        tokens = self.pictures(run).decoded.tokens
        return np.stack([np.asarray(image) for part in tokens.split(CHUNK) for image in self.pipeline.pictures(part)])

    def quality(self, run: Run, own: np.ndarray) -> dict[str, Score]:
        """Distances to plain decoding's pictures at the same temperature, and scores; own: see quality.quality."""
        count = run.count or self.images
        plain = Run.of("vanilla", run.temperature, count=GROUPS * count if run.temperature else count)
        result = quality(self.seen(run), self.seen(plain), own)
        for name in MORE_SCORES:
            groups = self.more(name, plain).reshape(-1, count).mean(1)
            result[name] = Score.of(self.more(name, run).mean(), groups.tolist())
        return result

    def more(self, name: str, run: Run) -> np.ndarray:
        """(n,) one of quality.MORE_SCORES."""
        if (name, run) not in self.kept:
            self.kept[name, run] = np.asarray(MORE_SCORES[name](self.images_of(run), self._prompts(
                run.start, run.count or self.images)), dtype=np.float64)
        return self.kept[name, run]

    # --- doing it ------------------------------------------------------------------------------------------------

    def _sampling(self, start: int, count: int, temperature: float, guidance: float | None = None) -> Sampling:
        settings = self.settings | ({} if guidance is None else {"guidance": guidance})
        return Sampling.of(list(range(self.seed + start, self.seed + start + count)), temperature=temperature,
                           device=self.pipeline.device, **settings)

    def _prompts(self, start: int, count: int) -> list[str]:
        return [self.prompts[i % len(self.prompts)] for i in range(start, start + count)]

    def _read(self, run: Run) -> Pictures:
        path = self.path(run)
        if not path.exists():
            self._decode(run)
        of = {name: torch.from_numpy(value) for name, value in read_arrays(path).items()}
        whole = ("tokens", "forwards", "accepted", "drafted")
        decoded = Decoded(**{field.name: of[field.name].long() if field.name in whole else of[field.name]
                             for field in fields(Decoded)})
        return Pictures(decoded, of["ranks"].long(), of["nodes"].long())

    def _decode(self, run: Run, progress: Callable[[int], None] | None = None) -> None:
        length = self.pipeline.gpt.config.tokens
        recorder = Recorder(run.count, length)
        sampling = self._sampling(run.start, run.count, run.temperature, run.guidance)
        decoded = self.pipeline.tokens(self._prompts(run.start, run.count), run.method, sampling, progress, recorder)
        arrays = {field.name: getattr(decoded, field.name).cpu().numpy() for field in fields(Decoded)}
        arrays |= {"ranks": recorder.ranks[:, :length].numpy(), "nodes": recorder.nodes.numpy()}
        arrays = {name: a.astype(np.int32) if a.dtype == np.int64 else a for name, a in arrays.items()}
        write(self.path(run), lambda file: np.savez_compressed(file, **arrays))

    def _time(self, latency: Latency, progress: Callable[[], None] | None = None) -> None:
        plain, kept = parse_method("vanilla"), Seconds([], [], [], [])
        for i in range(-1, latency.count):  # the first is thrown away: caches fill, memory is touched
            prompt, sampling = self._prompts(max(i, 0), 1), self._sampling(max(i, 0), 1, latency.temperature)
            for method, into in ((plain, kept.plain), (latency.method, kept.method)):
                began = time.perf_counter()
                decoded = self.pipeline.tokens(prompt, method, sampling)
                if self.pipeline.device.type == "cuda":
                    torch.cuda.synchronize()
                if i >= 0:
                    into.append(time.perf_counter() - began)
            if i >= 0:
                kept.tau.append(decoded.tau.item())
                kept.tokens.append(decoded.tokens[0].tolist())
                if progress:
                    progress()
        write(self.path(latency), json.dumps(asdict(kept)) + "\n")

    def _peak(self, work: Memory) -> int:
        steps = iter(range(STEPS))

        def enough(_) -> None:
            if next(steps, None) is None:
                raise Enough

        cuda = self.pipeline.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        profiled = nullcontext() if cuda else torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        with profiled as profiler:
            try:
                self.pipeline.tokens(self._prompts(0, 1), work.method, self._sampling(0, 1, work.temperature), enough)
            except Enough:
                pass
        if cuda:
            return torch.cuda.max_memory_allocated() - before
        changes = sorted((event.time_range.end, event.self_cpu_memory_usage) for event in profiler.events())
        held = np.cumsum([change for _, change in changes])
        return int(held.max())


class Enough(Exception):
    """As many steps as were wanted."""


def cost(work: Work) -> float:
    """About how many seconds of two processor cores, for the estimate of what is left."""
    m = work.method
    if isinstance(work, Memory):
        return 5.0
    if isinstance(work, Latency):
        return (work.count + 1) * (3.0 if m.adaptation else 2.2)
    if m.drafting == "none":
        return 0.12 * work.count
    return work.count * (0.35 + 0.02 * m.tree_nodes)


def read_json(path: Path) -> dict:
    """
    Raises:
        ValueError: not a JSON object
    """
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
        return content
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; remove it, it will be made again") from error


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """
    Raises:
        ValueError: not a whole archive of arrays
    """
    try:
        with np.load(path) as kept:
            return {name: kept[name] for name in kept.files}
    except (ValueError, OSError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path} cannot be read: {error}; remove it, it will be made again") from error


def write(path: Path, content: str | Callable) -> None:
    """A text, or what a function writes to an open file, at once: an interruption leaves no half of it."""
    part = path.with_name(f".{path.name}.part")
    if isinstance(content, str):
        part.write_text(content)
    else:
        with open(part, "wb") as file:
            content(file)
    part.replace(path)
