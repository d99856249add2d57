"""Pictures of discrete tokens by many methods, and the seconds of single ones, kept in a folder."""
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..decoding.decoded import Decoded, Step
from ..decoding.methods import ContinuousMethod, Method, parse_method
from ..decoding.sampling import Sampling
from ..pipelines.discrete import Pipeline
from .jobs import Arrays, ArrayShapes, Job, NotWhole, Study

BATCH = 16  # pictures decoded as one batch
SAVED = [field.name for field in fields(Decoded) if field.name != "log_probs"]
BY_POSITION = ("tokens", "num_accepted", "num_drafted", "nodes")  # these arrays are (pictures, L)
INTEGERS = (*BY_POSITION, "num_known", "target_forwards")         # int64, but int32 in the file


@dataclass(frozen=True)
class PictureRun(Job):
    """`count` pictures of a method. Picture i is of prompt i modulo the number of prompts, with seed i."""

    method: Method | ContinuousMethod
    temperature: float = 1.0
    count: int = 0                 # 0: as many as the study has
    start: int = 0
    guidance: float | None = None  # None: the study's

    @classmethod
    def of(cls, text: str, temperature: float = 1.0, **others) -> "PictureRun":
        return cls(parse_method(text), temperature, **others)

    def title(self, study: "DiscreteStudy") -> str:
        return f"{self.method.label}, T = {self.temperature:g}"

    def cost(self, study: "DiscreteStudy") -> float:
        each = {"none": 0.0, "jacobi": 0.015}.get(self.method.drafting, 0.03)
        return self.count * (0.2 + each * self.method.max_nodes)

    def shapes(self, study: "DiscreteStudy") -> ArrayShapes:
        return {name: (self.count, study.pipeline.num_tokens) if name in BY_POSITION else (self.count,)
                for name in (*SAVED, "nodes")}

    def arrays(self, study: "DiscreteStudy", progress: Callable[[float], None]) -> Arrays:
        length = study.pipeline.num_tokens
        recorder = Recorder(self.count, length)
        sampling = study.sampling_of(self.start, self.count, self.temperature, self.guidance)
        decoded = study.pipeline.tokens(study.prompts_of(self.start, self.count), self.method, sampling,
                                        lambda new: progress(new / (self.count * length)), recorder)
        arrays = {name: getattr(decoded, name).cpu().numpy() for name in SAVED} | {"nodes": recorder.nodes.numpy()}
        return {name: a.astype(np.int32) if a.dtype == np.int64 else a for name, a in arrays.items()}


@dataclass(frozen=True)
class Latency(Job):
    """`count` batches of a method, each decoded right after the baseline's of the same prompts: for seconds."""

    method: Method
    temperature: float = 1.0
    count: int = 0  # batches; 0: as many as the study times
    batch: int = 1  # pictures decoded at once
    start: int = 0  # the first batch
    title = PictureRun.title

    @classmethod
    def of(cls, text: str, temperature: float = 1.0) -> "Latency":
        return cls(parse_method(text), temperature)

    def cost(self, study: "DiscreteStudy") -> float:
        return (self.count + 1) * self.batch * (0.6 + 0.02 * self.method.max_nodes)

    def shapes(self, study: "DiscreteStudy") -> ArrayShapes:
        return {"baseline": (self.count,), "method": (self.count,), "tau": (self.count,),
                "tokens": (self.count, study.pipeline.num_tokens)}

    def arrays(self, study: "DiscreteStudy", progress: Callable[[float], None]) -> Arrays:
        results = {"baseline": [], "method": [], "tau": [], "tokens": []}
        for i in range(-1, self.count):  # the first is dropped: it fills caches and touches memory
            first = (self.start + max(i, 0)) * self.batch
            arguments = study.prompts_of(first, self.batch), study.sampling_of(first, self.batch, self.temperature)
            for method, name in ((parse_method("vanilla"), "baseline"), (self.method, "method")):
                start = time.perf_counter()
                decoded = study.pipeline.tokens(arguments[0], method, arguments[1])
                if study.pipeline.device.type == "cuda":
                    torch.cuda.synchronize()
                if i >= 0:
                    results[name].append((time.perf_counter() - start) / self.batch)
            if i >= 0:
                results["tau"].append(decoded.tau.mean().item())
                results["tokens"].append(decoded.tokens[0].tolist())
                progress(1 / self.count)
        return results


@dataclass
class DiscretePictures:
    """The pictures of a run: `Decoded`, and the sizes of the trees of its steps."""

    decoded: Decoded
    nodes: Tensor  # (n, L) int64  nodes of the tree whose step began here, with the root; 0: no step began here

    @property
    def tau(self) -> float:
        return self.decoded.tau.nanmean().item()

    @property
    def first_acceptance(self) -> float:
        """The share of drafting steps whose first level was accepted."""
        drafted = self.decoded.num_drafted > 0
        return (self.decoded.num_accepted[drafted] > 0).float().mean().item()

    @property
    def mean_depth(self) -> float:
        """Mean of `depths`."""
        return self.depths.nanmean().item()

    @property
    def depths(self) -> Tensor:
        """(n,) mean number of levels of each picture's trees, without the trees of its last ten tokens: its end cuts
        them."""
        whole = (self.decoded.num_accepted >= 0)[:, :-10]
        return (self.decoded.num_drafted[:, :-10] * whole).sum(1) / whole.sum(1)

    @property
    def mean_nodes(self) -> float:
        """Mean number of nodes of a tree."""
        return self.nodes[self.nodes > 0].float().mean().item()

    @property
    def accepted_per_step(self) -> Tensor:
        """(steps,) how many drafts each step accepted."""
        return self.decoded.num_accepted[self.decoded.num_accepted >= 0]

    @property
    def tv_excess(self) -> Tensor:
        """(n,) added total variation per token, estimated."""
        return self.decoded.tv_excess / self.decoded.tokens.shape[1]


@dataclass
class Timings:
    """Seconds of a picture in each batch, beside the seconds of the baseline with the same prompts and seeds."""

    baseline: np.ndarray
    method: np.ndarray
    tau: np.ndarray
    tokens: np.ndarray  # (batches, L) the method's, of one picture of each batch

    @property
    def speedup(self) -> np.ndarray:
        return self.baseline / self.method


class Recorder:
    """An observer that notes at the first position of each step how many nodes its tree has."""

    def __init__(self, count: int, length: int):
        self.nodes = torch.zeros(count, length, dtype=torch.int64, device="cpu")

    def __call__(self, step: Step) -> None:
        rows = step.active.cpu().nonzero()[:, 0]
        self.nodes[rows, step.position.cpu()[rows]] = (step.links[1].cpu() >= 0).sum(1)[rows]


class DiscreteStudy(Study):
    """Runs and latencies of a pipeline.

    Args:
        prompts: the first `images` of them are used, again and again
        images:  pictures of a run
        timed:   batches of a latency
    """

    def __init__(self, pipeline: Pipeline, folder: str | Path, prompts: list[str], *, images: int, timed: int = 4,
                 seed: int = 0, guidance: float = 1.2, top_k: int = 100, top_p: float = 0.8):
        """
        Raises:
            ValueError: the folder holds runs of another model, version or setting
        """
        pipeline.prompts.encode(prompts)
        draft_config = pipeline.small and pipeline.small.config
        super().__init__(pipeline, folder, prompts, seed, [
            pipeline.gpt.config, pipeline.tokenizer.config, draft_config,
            pipeline.words and pipeline.words.vocabulary],
            guidance=guidance, top_k=top_k, top_p=top_p)
        self.prompts, self.num_images, self.timed = prompts[:images], images, timed

    def key(self, job: Job) -> list:
        values = [*(getattr(job, field.name) for field in fields(job)), len(self.prompts)]
        return values if isinstance(job, PictureRun) else [*values, self.machine]

    def parts(self, job: Job) -> list[Job]:
        """The job in aligned parts, so that longer ones share them: pictures in batches of about BATCH, latencies in as
        many batches as the study times."""
        few = self.num_images if self.num_images < 2 * BATCH else BATCH
        size, count = (few, job.count or self.num_images) if isinstance(job, PictureRun) else (
            self.timed, job.count or self.timed)
        ends = [*range((job.start // size + 1) * size, job.start + count, size), job.start + count]
        return [replace(job, start=start, count=end - start) for start, end in zip([job.start, *ends], ends)]

    def pending(self, jobs: list[Job]) -> list[Job]:
        """The parts of these jobs that are not in the folder yet, each once. Runs of many pictures come last."""
        return super().pending(sorted(jobs, key=lambda job: isinstance(job, PictureRun)))

    def sampling_of(self, start: int, count: int, temperature: float, guidance: float | None = None) -> Sampling:
        settings = self.settings | ({} if guidance is None else {"guidance": guidance})
        return Sampling.of(list(range(self.seed + start, self.seed + start + count)), temperature=temperature,
                           device=self.pipeline.device, **settings)

    def pictures(self, run: PictureRun) -> DiscretePictures:
        key = (run, self.num_images)
        if key not in self.loaded:
            parts = [self.arrays(batch) for batch in self.parts(run)]
            values = {name: torch.from_numpy(np.concatenate([part[name] for part in parts]))
                      for name in (*SAVED, "nodes")}
            values |= {name: values[name].long() for name in INTEGERS}
            nodes = values.pop("nodes")
            self.loaded[key] = DiscretePictures(Decoded(**values), nodes)
        return self.loaded[key]

    def read(self, job: Job) -> Arrays:
        arrays, vocabulary = super().read(job), self.pipeline.gpt.config.vocabulary
        if not ((arrays["tokens"] >= 0) & (arrays["tokens"] < vocabulary)).all():
            raise NotWhole(f"{self.path(job)} must hold tokens below {vocabulary}")
        return arrays

    def seconds(self, latency: Latency) -> Timings:
        parts = [self.arrays(part) for part in self.parts(latency)]
        return Timings(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
