"""The study of discrete tokens: whole pictures, seconds and memory of single ones, and what a report asks of them."""
import gc
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..decoding.decoded import Decoded, Step
from ..decoding.methods import Method, parse_method
from ..decoding.sampling import Sampling
from ..files import write_whole
from ..pipelines.discrete import Pipeline
from .base import BATCH, Report, Run, Scope, Study, decided, reference_pictures
from .cache import NotWhole, is_list_of, read_arrays, read_json
from .page import Section
from .quality import GROUPS, MORE_SCORES, Baseline, Score, quality

MEMORY_STEPS = 12  # that memory is looked at for: caches have their full size from the first
SECOND_TIME = "second time"  # a mark in the profile
LEAST_IMAGES = 12  # with about so many the kernel distance of the strongest relaxation exceeds the noise


@dataclass(frozen=True)
class Latency:
    """`count` pictures of a method, `batch` at once, right after the baseline's of the same prompts: for seconds."""

    method: Method
    temperature: float = 1.0
    count: int = 0  # batches; 0: as many as the study times
    batch: int = 1  # pictures decoded at once

    @classmethod
    def of(cls, text: str, temperature: float = 1.0) -> "Latency":
        return cls(parse_method(text), temperature)


@dataclass(frozen=True)
class Memory:
    """The most bytes that the tensors of one picture take between operations, in the first steps of its decoding."""

    method: Method
    temperature: float = 1.0


Job = Run | Latency | Memory


@dataclass
class Pictures:
    """What a run gave: `Decoded`, and what the trees of its steps were."""

    decoded: Decoded
    ranks: Tensor  # (n, L) int64  how many older siblings the draft has that was accepted here; -1: not a draft
    nodes: Tensor  # (n, L) int64  nodes of the tree whose step began here, the root counted; 0: none began

    @property
    def tau(self) -> float:
        return self.decoded.tau.nanmean().item()

    @property
    def mean_depth(self) -> float:
        """Mean number of levels of a tree. Those of a picture's last ten tokens do not count: its end cuts them."""
        began = self.decoded.num_accepted >= 0
        whole = began & (torch.arange(began.shape[1]) < began.shape[1] - 10)
        whole = whole if whole.any() else began
        return self.decoded.num_drafted[whole].float().mean().item()

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
    """Seconds a picture of each batch, beside the baseline's of the same prompts and seeds."""

    baseline: list[float]
    method: list[float]
    tau: list[float]
    tokens: list[list[int]]  # of the method's pictures, one of each batch

    @property
    def speedup(self) -> np.ndarray:
        return np.array(self.baseline) / np.array(self.method)


class Recorder:
    """An observer that writes ranks and nodes of each step to the positions of its tokens."""

    def __init__(self, count: int, length: int):
        self.ranks = torch.full((count, length + 1), -1, dtype=torch.int64)  # behind the end: scratch
        self.nodes = torch.zeros(count, length, dtype=torch.int64)

    def __call__(self, step: Step) -> None:
        ancestors, depth = step.links[0].cpu(), step.links[1].cpu()
        B, N, W = ancestors.shape
        node = torch.arange(N)
        self_bits = torch.zeros(N, W, dtype=torch.int64)
        self_bits[node, node // 64] = torch.ones(1, dtype=torch.int64) << node % 64
        proper = ancestors ^ self_bits * (depth >= 0)[..., None]                      # without the node itself
        siblings = (proper[:, :, None] == proper[:, None]).all(-1) & (depth[:, None] == depth[..., None])
        older_siblings = siblings.tril(-1).sum(-1)                                    # (B, N)
        nodes, position, active = step.accepted_nodes.long().cpu(), step.position.cpu(), step.active.cpu()
        index = torch.arange(nodes.shape[1])
        is_accepted = (index < step.num_accepted.cpu()[:, None]) & active[:, None]
        end = self.ranks.shape[1] - 1
        positions = torch.where(is_accepted, position[:, None] + index, end).clamp(max=end)
        self.ranks.scatter_(1, positions, older_siblings.gather(1, nodes.clamp(min=0)))
        rows = active.nonzero()[:, 0]
        self.nodes[rows, position[rows]] = (depth >= 0).sum(1)[rows]


class DiscreteStudy(Study):
    """Runs of a pipeline under the same settings; each is computed once and kept in `folder`.

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
        pipeline.prompts.encode(prompts)
        draft_config = pipeline.draft_model and pipeline.draft_model.config
        super().__init__(pipeline, folder, prompts, seed, [
            pipeline.gpt.config, pipeline.tokenizer.config, draft_config,
            pipeline.words and pipeline.words.vocabulary],
            guidance=guidance, top_k=top_k, top_p=top_p)
        self.prompts, self.num_images, self.timed = prompts[:images], images, timed

    # --- what is to be computed ----------------------------------------------------------------------------------

    def batches(self, run: Run) -> list[Run]:
        """The run as batches of at most BATCH pictures, aligned, so that longer runs of a method share them."""
        count, runs, start = run.count or self.num_images, [], run.start
        while start < run.start + count:
            end = min(run.start + count, (start // BATCH + 1) * BATCH)
            runs.append(replace(run, count=end - start, start=start))
            start = end
        return runs

    def parts(self, job: Job) -> list[Job]:
        if isinstance(job, Run):
            return self.batches(job)
        return [self.counted(job) if isinstance(job, Latency) else job]

    def key(self, job: Job) -> list:
        values = super().key(job) + [len(self.prompts)]
        return values if isinstance(job, Run) else values + [self.machine]

    def suffix(self, job: Job) -> str:
        return "npz" if isinstance(job, Run) else "json"

    def counted(self, latency: Latency) -> Latency:
        """The latency with its number of pictures."""
        return replace(latency, count=latency.count or self.timed)

    def pending(self, jobs: list[Job]) -> list[Job]:
        """The parts of these jobs that are not in the folder yet, each once. Runs of many pictures come last."""
        return super().pending(sorted(jobs, key=lambda job: isinstance(job, Run)))

    def compute(self, jobs: list[Job], label: str = "") -> None:
        for method in {job.method: None for job in self.pending(jobs)}:
            self.pipeline.check(method)
        super().compute(jobs, label)

    def title(self, job: Job) -> str:
        return f"{job.method.label}, T = {job.temperature:g}"

    def cost(self, job: Job) -> float:
        """About how many seconds of two processor cores, for the estimate of what is left."""
        method = job.method
        if isinstance(job, Memory):
            return 5.0
        if isinstance(job, Latency):
            return (job.count + 1) * job.batch * (3.0 if "start" in method.parameters else 2.2)
        if method.drafting == "none":
            return 0.12 * job.count
        return job.count * (0.35 + 0.02 * method.max_nodes)

    def make(self, job: Job, progress: Callable[[float], None]) -> None:
        """progress: called with the share of the job that was just done"""
        if isinstance(job, Run):
            self._decode(job, lambda new: progress(new / (job.count * self.pipeline.num_tokens)))
        elif isinstance(job, Latency):
            self._time(job, lambda: progress(1 / job.count))
        else:
            self.memory(job)
            progress(1)

    # --- what was computed ---------------------------------------------------------------------------------------

    def pictures(self, run: Run) -> Pictures:
        """All of a run, decoded now if it was not before."""
        key = (run, self.num_images)
        if key not in self.loaded:
            parts = [self._read(batch) for batch in self.batches(run)]
            decoded = [part.decoded for part in parts]
            self.loaded[key] = Pictures(
                Decoded(*(torch.cat([getattr(d, field.name) for d in decoded]) for field in fields(Decoded))),
                torch.cat([part.ranks for part in parts]), torch.cat([part.nodes for part in parts]))
        return self.loaded[key]

    def seconds(self, latency: Latency) -> Timings:
        latency = self.counted(latency)

        def read(path: Path) -> Timings:
            found = read_json(path)
            numbers = [found.get(name) for name in ("baseline", "method", "tau")]
            tokens = found.get("tokens")
            if (len(found) != 4 or any(not is_list_of(part, (int, float)) or len(part) != latency.count
                                       for part in numbers)
                    or not is_list_of(tokens, list) or any(not is_list_of(part, int) for part in tokens)):
                raise NotWhole(f"{path} must hold the seconds and tokens of {latency.count} pictures")
            return Timings(**found)

        return self.read_or_make(self.path(latency), read, lambda: self._time(latency))

    def memory(self, job: Memory) -> int:
        """Bytes, of all tensors together; the model's weights do not count."""
        path = self.path(job)

        def read(path: Path) -> int:
            found = read_json(path)
            if not isinstance(found.get("bytes"), int):
                raise NotWhole(f"{path} must hold a number of bytes")
            return found["bytes"]

        return self.read_or_make(path, read, lambda: write_whole(path, json.dumps({"bytes": self._peak(job)}) + "\n"))

    # --- computing it --------------------------------------------------------------------------------------------

    def sampling_of(self, start: int, count: int, temperature: float, guidance: float | None = None) -> Sampling:
        settings = self.settings | ({} if guidance is None else {"guidance": guidance})
        return Sampling.of(list(range(self.seed + start, self.seed + start + count)), temperature=temperature,
                           device=self.pipeline.device, **settings)

    def _read(self, run: Run) -> Pictures:
        return self.read_or_make(self.path(run), lambda path: self._pictures_in(path, run.count),
                                 lambda: self._decode(run))

    def _pictures_in(self, path: Path, count: int) -> Pictures:
        by_position = ("tokens", "num_accepted", "num_drafted", "ranks", "nodes")
        names = [*(field.name for field in fields(Decoded)), "ranks", "nodes"]
        found = read_arrays(path, {name: (count, self.pipeline.num_tokens) if name in by_position else (count,)
                                   for name in names})
        vocabulary = self.pipeline.gpt.config.vocabulary
        if not ((found["tokens"] >= 0) & (found["tokens"] < vocabulary)).all():
            raise NotWhole(f"{path} must hold tokens below {vocabulary}")
        arrays = {name: torch.from_numpy(value) for name, value in found.items()}
        integers = ("tokens", "num_known", "target_forwards", "num_accepted", "num_drafted")
        decoded = Decoded(**{field.name: arrays[field.name].long() if field.name in integers else arrays[field.name]
                             for field in fields(Decoded)})
        return Pictures(decoded, arrays["ranks"].long(), arrays["nodes"].long())

    def _decode(self, run: Run, progress: Callable[[int], None] | None = None) -> None:
        length = self.pipeline.num_tokens
        recorder = Recorder(run.count, length)
        sampling = self.sampling_of(run.start, run.count, run.temperature, run.guidance)
        decoded = self.pipeline.tokens(self.prompts_of(run.start, run.count), run.method, sampling, progress, recorder)
        arrays = {field.name: getattr(decoded, field.name).cpu().numpy() for field in fields(Decoded)}
        arrays |= {"ranks": recorder.ranks[:, :length].numpy(), "nodes": recorder.nodes.numpy()}
        arrays = {name: a.astype(np.int32) if a.dtype == np.int64 else a for name, a in arrays.items()}
        write_whole(self.path(run), lambda file: np.savez_compressed(file, **arrays))

    def _time(self, latency: Latency, progress: Callable[[], None] | None = None) -> None:
        timings = Timings([], [], [], [])
        B = latency.batch
        for i in range(-1, latency.count):  # the first is thrown away: caches fill, memory is touched
            start = max(i, 0) * B
            prompts, sampling = self.prompts_of(start, B), self.sampling_of(start, B, latency.temperature)
            for method, seconds in ((parse_method("vanilla"), timings.baseline), (latency.method, timings.method)):
                start = time.perf_counter()
                decoded = self.pipeline.tokens(prompts, method, sampling)
                if self.pipeline.device.type == "cuda":
                    torch.cuda.synchronize()
                if i >= 0:
                    seconds.append((time.perf_counter() - start) / B)
            if i >= 0:
                timings.tau.append(decoded.tau.mean().item())
                timings.tokens.append(decoded.tokens[0].tolist())
                if progress:
                    progress()
        write_whole(self.path(latency), json.dumps(asdict(timings)) + "\n")

    def _peak(self, job: Memory) -> int:
        def decode_some_steps() -> None:
            steps = iter(range(MEMORY_STEPS))

            def stop_after_steps(_) -> None:
                if next(steps, None) is None:
                    raise StopDecoding

            with suppress(StopDecoding):
                self.pipeline.tokens(self.prompts_of(0, 1), job.method, self.sampling_of(0, 1, job.temperature),
                                     stop_after_steps)

        if (device := self.pipeline.device).type == "cuda":
            decode_some_steps()  # the first time weights are packed, and they do not count
            gc.collect()
            torch.cuda.reset_peak_memory_stats(device)
            allocated = torch.cuda.memory_allocated(device)
            decode_some_steps()
            return torch.cuda.max_memory_allocated(device) - allocated
        # The profiler sees the first time too: of memory that it did not see allocated it knows no size, or a wrong
        # one, that of an older profile's tensor at the same address.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            decode_some_steps()
            gc.collect()
            with torch.profiler.record_function(SECOND_TIME):
                decode_some_steps()
        events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        second = next(i for i, event in enumerate(events) if event.name() == SECOND_TIME)
        allocated = np.cumsum([event.nbytes() if event.name() == "[memory]" else 0 for event in events])
        return int(allocated[second:].max() - allocated[second])


class StopDecoding(Exception):
    """As many steps were decoded as were wanted."""


def lantern(k: int, delta: float, **others) -> str:
    """LANTERN with these parameters, as the command line has it."""
    return f"lantern:k={k}:delta={delta:g}" + "".join(f":{key}={value}" for key, value in others.items())


@dataclass(frozen=True)
class DiscreteScope(Scope):
    """How much is run of discrete tokens."""

    timed: int                   # pictures of each latency
    k: tuple[int, ...]
    delta: tuple[float, ...]     # LANTERN's
    omega: tuple[float, ...]     # COOL-SD's delta
    ratio: tuple[float, ...]     # LANTERN++'s lambda
    depth: tuple[int, ...]       # of the cost model's trees
    width: tuple[int, ...]

    def baseline(self, temperature: float = 1.0) -> Run:
        """Pictures that others are compared with. Where temperature makes them differ: GROUPS times as many."""
        return Run.of("vanilla", temperature, count=GROUPS * self.images if temperature else self.images)

    @property
    def grid(self) -> list[Run]:
        """LANTERN over k and delta."""
        return [Run.of(lantern(k, delta)) for k in self.k for delta in self.delta]

    @property
    def strongest(self) -> str:
        """LANTERN with the largest k and delta."""
        return lantern(self.k[-1], self.delta[-1])

    @property
    def sweeps(self) -> list[Run]:
        """The methods on static trees, over how much they relax."""
        runs = []
        for omega in self.omega:
            runs += [Run.of(f"uniform-rsd:omega={omega:g}"), Run.of(f"cool-sd:omega={omega:g}")]
        for ratio in self.ratio:
            runs += [Run.of(f"lantern++:delta={ratio:g}"), Run.of(f"lantern++:delta={ratio:g}:residual=optimal")]
        return runs


FULL = DiscreteScope(48, 4, (30, 100, 300, 1000), (0.05, 0.1, 0.2, 0.4), (1.1, 1.5, 2.0, 3.0), (0.5, 1.0, 2.0, 4.0),
                     (1, 2, 4, 6), (2, 6, 10))
QUICK = DiscreteScope(12, 1, (100, 1000), (0.1, 0.4), (1.1, 2.0), (1.0, 4.0), (1, 4), (2, 10))


def scope_of(quick: bool, images: int | None, timed: int | None, num_prompts: int) -> DiscreteScope:
    """The scope of a report, quick or full.

    Raises:
        ValueError: too few pictures for a score, or not every prompt equally often
    """
    scope = QUICK if quick else FULL
    scope = replace(scope, images=images or scope.images, timed=timed or scope.timed)
    if scope.images < LEAST_IMAGES:
        raise ValueError(f"images must be at least {LEAST_IMAGES}, got {scope.images}: with fewer, baseline pictures "
                         "differ more by chance than the strongest relaxation makes them. The report says how many "
                         "would be needed to tell a method from the baseline")
    if scope.images > num_prompts and scope.images % num_prompts:
        raise ValueError(f"images must be at most {num_prompts} or a multiple of it, the number of prompts, "
                         f"got {scope.images}")
    return scope


@dataclass
class DiscreteReport(Report):
    """What the items on discrete tokens look at."""

    study: DiscreteStudy
    scope: DiscreteScope
    references: np.ndarray = field(kw_only=True)  # features of the pictures that the prompts name

    @staticmethod
    def of(pipeline: Pipeline, weights: Path, out: Path, scope: DiscreteScope, **settings) -> "DiscreteReport":
        """A report in `out`, whose runs are in `out`/runs.

        Raises:
            ValueError: `out` holds runs of another model, version or setting, or a package is missing
        """
        prompts, pictures = reference_pictures(weights)
        study = DiscreteStudy(pipeline, out / "runs", prompts, images=scope.images, timed=scope.timed, **settings)
        references, _ = study.network(pictures[:min(scope.images, len(prompts))])
        return DiscreteReport(study, scope, out, references=references)

    def quality(self, run: Run) -> dict[str, Score]:
        """Distances to baseline pictures at the same temperature, and scores."""
        return self.once(("quality", run), lambda: self._quality(run))

    def _quality(self, run: Run) -> dict[str, Score]:
        count = run.count or self.study.num_images
        baseline = Run.of("vanilla", run.temperature, count=GROUPS * count if run.temperature else count)
        beside = self.once(("baseline", baseline), lambda: Baseline.of(self.study.features(baseline), count,
                                                                       self.references))
        scores = quality(self.study.features(run), beside, self.references)
        for name in MORE_SCORES:
            groups = self._more(name, baseline).reshape(-1, count).mean(1)
            scores[name] = Score.of(self._more(name, run).mean(), groups.tolist())
        return scores

    def _more(self, name: str, run: Run) -> np.ndarray:
        """(n,) one of quality.MORE_SCORES."""
        prompts = self.study.prompts_of(run.start, run.count or self.study.num_images)
        return self.once((name, run), lambda: np.asarray(MORE_SCORES[name](self.study.pixels_of(run), prompts),
                                                         dtype=np.float64))

    def tau(self, text: str, temperature: float = 1.0) -> float:
        return self.study.pictures(Run.of(text, temperature)).tau

    def tv_excess(self, run: Run) -> float:
        """Added total variation per token, estimated, of all its pictures."""
        return self.study.pictures(run).tv_excess.mean().item()

    def row(self, run: Run) -> dict:
        """A run's row of a table: tau, tv_excess and every score. It has no seconds: those are of single pictures."""
        return {"method": run.method.label, "T": f"{run.temperature:g}", "nodes": run.method.max_nodes,
                "tau": self.study.pictures(run).tau, "tv_excess": self.tv_excess(run)} | self.quality(run)

    def latency_row(self, latency: Latency) -> dict:
        """Seconds of a picture. The speedup is the median of ratios of neighbors in time."""
        timings = self.study.seconds(latency)
        return {"method": latency.method.label, "T": f"{latency.temperature:g}",
                "seconds": float(np.mean(timings.method)), "+-": float(np.std(timings.method)),
                "baseline_seconds": float(np.mean(timings.baseline)), "speedup": float(np.median(timings.speedup)),
                "min": float(timings.speedup.min()), "max": float(timings.speedup.max()),
                "tau": float(np.mean(timings.tau)), "pictures": latency.batch * len(timings.tau)}

    def contrast(self, statistic: Callable[[Callable[[Run], float]], float], runs: list[Run],
                 name: str = "kernel distance") -> tuple[float, float]:
        """A weighted sum of runs' distances to the baseline, and what chance alone adds or takes in 19 of 20 cases.

        statistic: from a function that gives each run's distance; linear in it. Every run is taken to have the noise
        that the baseline has, of its own.
        """
        weights = [statistic(lambda other, run=run: float(other == run)) for run in runs]
        value = statistic(lambda run: self.quality(run)[name].value)
        return value, self.quality(runs[0])[name].noise * float(np.linalg.norm(weights))

    def faster(self, a: str, b: str, temperature: float) -> tuple[bool | None, float]:
        """Say whether a is faster than b in every picture, both beside the baseline (None: in some); and the median
        ratio of their speeds."""
        speedups = [self.study.seconds(Latency.of(text, temperature)).speedup for text in (a, b)]
        ratios = speedups[0] / speedups[1]
        return (True if ratios.min() > 1 else False if ratios.max() < 1 else None), float(np.median(ratios))

    def tau_gain(self, a: str, b: str) -> tuple[bool | None, str]:
        """Say whether a has the larger tau at temperature 1, by differences of the same pictures; and put it in
        words."""
        taus = [self.study.pictures(Run.of(text)).decoded.tau for text in (a, b)]
        change = (taus[0] - taus[1])[~(taus[0] - taus[1]).isnan()]
        half = 2 * change.std().item() / len(change) ** 0.5
        return decided(change.mean().item(), half), (f"tau {taus[0].nanmean():.2f} against {taus[1].nanmean():.2f}, a "
                                                     f"difference of {change.mean():+.2f} +- {half:.2f}")

    def noise(self, section: Section, runs: list[Run]) -> None:
        """Write below a table of these runs what their scores can tell."""
        scores, count = self.quality(runs[0]), self.study.num_images
        parts = [f"{name} {score.baseline:.3g} +- {score.noise:.2g}" for name, score in scores.items()]
        chance = 0.05 * len(runs) * len(scores)
        text = (f"{count} baseline pictures beside the other baseline pictures: {'; '.join(parts)}. A star marks what "
                f"is outside; of that many numbers about {chance:.0f} would be by chance alone.")
        relaxed = [self.quality(run)["kernel distance"] for run in runs if not run.method.lossless]
        hidden = sorted(score.pictures_needed(count) for score in relaxed if not score.significant and score.effect)
        if hidden:
            text += (f" {len(hidden)} of {len(relaxed)} relaxed methods cannot be told from the baseline by the "
                     f"kernel distance of {count} pictures: half of them would need {hidden[len(hidden) // 2]} or "
                     "more.")
        section.text(text)

    def cover(self, command: str, origin: str) -> str:
        config, settings, scope = self.study.pipeline.gpt.config, self.study.settings, self.scope
        return "\n".join([
            "# The papers' tables and figures on our model", "",
            f"`{command}`", "",
            f"Runs: {origin}.", "",
            f"Model: {config.layers} layers of width {config.dim}, {config.vocabulary} codes, {config.tokens} tokens a "
            f"picture. {scope.images} pictures a method, {GROUPS * scope.images} of the baseline, of "
            f"{len(self.study.prompts)} prompts; guidance {settings['guidance']:g}, top-k {settings['top_k']}, "
            f"top-p {settings['top_p']:g}. Seconds are of single pictures, {scope.timed} a method, everything "
            "else of pictures decoded in batches.", "",
            "The baseline is `vanilla`: a token a target forward. Frechet and kernel distance are to its pictures, on "
            "the features of an ImageNet network (EfficientNet-Lite0); the inception score is on its classes; nearest "
            "name is the share of pictures whose features are nearest to those of the picture that their prompt "
            "names. `tv_excess` is added total variation per token, estimated. CLIP score, HPSv2, ImageReward and the "
            "aesthetic predictor need weights that no package brings: not measured (`--score` takes them). "
            "Medusa is out of scope.", "",
            "The papers' models have 0.8 to 7 billion parameters on A100 GPUs, ours has millions on what is named "
            "above: what can agree is a trend. Of the papers only abstracts, released repositories and notes by others "
            "were at hand; their numbers stand here where they could be read, and nowhere else.", "",
            *self.links()])
