"""What `specvis compare` runs: methods on the same prompts and seeds, as a batch and one by one; are they the same?"""
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import truediv
from unittest.mock import patch

import click
import torch

from ..decoding.continuous_state import ContinuousDecoded, ContinuousSampling
from ..decoding.decoded import Decoded
from ..decoding.methods import ContinuousMethod, Method
from ..decoding.sampling import Sampling
from ..models import layers
from ..pipelines.discrete import Pipeline
from ..pipelines.mar import MARPair
from ..pipelines.positions import draw_margins, is_near_a_filter, logit_rounding
from .options import is_exact
from .progress import Steps

MODULES = "PyTorch's modules"
ROUNDING = 1e-4  # two candidates for a token that are nearer than this may change places by rounding in float32

Pipelines = dict[type, Pipeline | MARPair]  # the key is the type of the methods by which they decode


@dataclass
class ComparedRun:
    """One method at one temperature, on all prompts."""

    method: Method | ContinuousMethod
    temperature: float
    sampling: Sampling | ContinuousSampling
    purpose: str = ""  # why a run is done that is not in the table
    by_modules: bool = False  # PyTorch's modules read, not `decoder_layers`

    @property
    def key(self) -> tuple:
        """Two runs with one key are one run."""
        return self.method, self.temperature, self.by_modules

    @property
    def name(self) -> str:
        return MODULES if self.by_modules else self.method.label

    @property
    def label(self) -> str:
        return f"{self.name}, temperature {self.temperature:g}"

    @contextmanager
    def forwards(self):
        """What reads. Modules get one thread: with two, the shipped model waits more than it computes."""
        threads = torch.get_num_threads()
        with patch.object(layers, "USE_KERNELS", not self.by_modules):
            torch.set_num_threads(1 if self.by_modules else threads)
            try:
                yield
            finally:
                torch.set_num_threads(threads)


@dataclass
class ComparedResult(ComparedRun):
    decoded: Decoded | ContinuousDecoded = field(kw_only=True)
    batch_seconds: float = field(kw_only=True)         # wall time of the whole batch
    model_seconds: float | None = field(kw_only=True)  # the part in forwards of the models; None: not measured
    baseline: "ComparedResult | None" = None  # it has the same kind of tokens and temperature
    modules: "ComparedResult | None" = None   # the baseline by PyTorch's modules
    alone: list[Decoded] = field(default_factory=list)  # the first pictures, each decoded again alone
    seconds: list[float] = field(default_factory=list)  # of these

    @property
    def overhead(self) -> float | None:
        """The share of the time that is not forwards of the models."""
        return None if self.model_seconds is None else 1 - self.model_seconds / self.batch_seconds

    @property
    def batch_speedup(self) -> float | None:
        return None if self.baseline is None else self.baseline.batch_seconds / self.batch_seconds

    def speedup(self, over: "ComparedResult | None") -> float | None:
        """The median over the pictures that were decoded alone; None: no picture was, or nothing to compare with."""
        return statistics.median(map(truediv, over.seconds, self.seconds)) if over and self.seconds else None

    @property
    def shown(self) -> Decoded | ContinuousDecoded:
        """The pictures that `seconds` tells of; without any, those of the batch."""
        return Decoded.merged(self.alone, list(range(len(self.alone)))) if self.alone else self.decoded

    @property
    def same_tokens(self) -> torch.Tensor | None:
        """(B,) bool: which pictures are the baseline's, token for token; None: this is not promised."""
        is_promised = self.by_modules or is_exact(self.method, self.temperature)
        if self.baseline is None or self.baseline is self or not is_promised:
            return None
        return (self.decoded.tokens == self.baseline.decoded.tokens).all(1)


def run_all(pipelines: Pipelines, runs: list[ComparedRun], prompts: list[str], singles: int) -> list[ComparedResult]:
    """Decode all prompts as one batch in each run, then the first `singles` of them alone.

    Each picture is decoded alone by the baseline, then by all others: their seconds are from one minute. Continuous
    tokens are not decoded alone: their baseline would take minutes.
    """
    for run in runs:
        pipelines[type(run.method)].check(run.method)  # and the neighbors are found, before the clock starts
    alone = range(min(singles, len(prompts)))
    is_alone = bool(alone) and Method in pipelines
    with Steps(len(runs) + is_alone) as progress:
        results = [decode_together(pipelines[type(run.method)], run, prompts, progress) for run in runs]
        baselines = {(type(r.method), r.temperature, r.by_modules): r for r in results if r.method.is_baseline}
        for result in results:
            result.baseline, result.modules = (baselines.get((type(result.method), result.temperature, by_modules))
                                               for by_modules in (False, True))
        discrete = sorted((r for r in results if isinstance(r.method, Method)),
                          key=lambda r: (r.temperature, not r.method.is_baseline))
        if is_alone:
            progress.begin(f"by each method in turn, {len(alone)} of the pictures alone",
                           len(alone) * len(discrete) * pipelines[Method].num_tokens)
        works = [lambda i, run=run: decode_alone(pipelines[Method], run, prompts, i, progress) for run in discrete]
        for result, seconds in zip(discrete, timed_in_turns(works, len(alone))):
            result.seconds = seconds
    return results


def timed_in_turns(works: list[Callable[[int], None]], turns: int) -> list[list[float]]:
    """The seconds of each work in each turn. Other load on the machine slows the works of one turn alike."""
    seconds = [[] for _ in works]
    for turn in range(turns):
        for work, own in zip(works, seconds):
            start = time.perf_counter()
            work(turn)
            own.append(time.perf_counter() - start)
    return seconds


def decode_together(pipeline: Pipeline | MARPair, run: ComparedRun, prompts: list[str],
                    progress: Steps) -> ComparedResult:
    progress.begin(f"{run.purpose}{run.label}, {len(prompts)} at once", len(prompts) * pipeline.num_tokens)
    with ModelClock(pipeline) as clock, run.forwards():
        start = time.perf_counter()
        decoded = pipeline.tokens(prompts, run.method, run.sampling, progress.update)
        seconds = time.perf_counter() - start
    return ComparedResult(**vars(run), decoded=decoded, batch_seconds=seconds, model_seconds=clock.seconds)


def decode_alone(pipeline: Pipeline, run: ComparedResult, prompts: list[str], i: int, progress: Steps) -> None:
    with run.forwards():
        run.alone.append(pipeline.tokens([prompts[i]], run.method, run.sampling[[i]], progress.update))


class ModelClock:
    """Adds up the seconds that a pipeline's models spend, on the CPU: elsewhere to wait for them would cost time."""

    def __init__(self, pipeline: Pipeline | MARPair):
        self.calls = []  # (whose, name): what a module's hooks do not see, or what they would keep from an op
        if isinstance(pipeline, MARPair):
            models = [mar for mar in (pipeline.mar, pipeline.mar_draft) if mar is not None]
            nets = [m.diffloss.net for m in models]
            self.modules = [*models, *(m.diffloss for m in models), *nets, *(net.time_embed for net in nets)]
            self.calls = [(m.diffloss, "cond_embeddings") for m in models]
        else:
            models, names = (pipeline.gpt, pipeline.small, pipeline.eagle), ("prefill", "extend", "logits")
            self.modules = []
            self.calls = [(m, name) for m in models for name in names if hasattr(m, name)]
        self.seconds = 0.0 if pipeline.device.type == "cpu" else None

    def __enter__(self):
        def start(*_):
            self.start = time.perf_counter()

        def stop(*_):
            self.seconds += time.perf_counter() - self.start

        def timed(call):
            def timed_call(*args):
                start()
                result = call(*args)
                stop()
                return result
            return timed_call

        measured, calls = ([], []) if self.seconds is None else (self.modules, self.calls)
        self.hooks = [hook for module in measured
                      for hook in (module.register_forward_pre_hook(start), module.register_forward_hook(stop))]
        for module, name in calls:
            vars(module)[name] = timed(getattr(module, name))
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()
        for module, name in self.calls:
            vars(module).pop(name, None)


def report_differences(pipelines: Pipelines, results: list[ComparedResult], prompts: list[str]) -> None:
    """Say where a picture differs that should be the baseline's. More than rounding is an error.

    The baseline reads one node a forward and other methods read many, and the two round differently. Where two
    candidates for a token are as good as equal, that may decide between them; and which ids top-k and top-p keep.

    Raises:
        click.ClickException: a token differs although its two best candidates are more than ROUNDING apart, or than
            `logit_rounding` where that is more, and no change of the logits by as much draws another
    """
    wrong, pipeline = [], pipelines.get(Method)
    for result in results:
        same = result.same_tokens
        for i in [] if same is None else (~same).nonzero()[:, 0].tolist():
            tokens = result.baseline.decoded.tokens[i: i + 1]
            position = (result.decoded.tokens[i: i + 1] != tokens).nonzero()[0, 1].item()
            margin = draw_margins(pipeline, [prompts[i]], tokens, result.sampling[[i]])[0, position].item()
            rounding = max(ROUNDING, logit_rounding(pipeline, prompts[i], tokens, position))
            reason = ": rounding" if margin <= rounding else ""
            if not reason and is_near_a_filter(pipeline, prompts[i], tokens, result.sampling[[i]], position, rounding):
                reason = ": rounding, which changes what the filters keep"
            if not reason:
                wrong.append(rounding)
            click.echo(f"{'' if reason else 'ERROR: '}{result.label}: {prompts[i]!r} (picture {i}) differs from the "
                       f"baseline's from token {position} on, where its two best candidates are {margin:.1e} apart"
                       f"{reason}", err=not reason)
    if wrong:
        raise click.ClickException("pictures that differ from the baseline's by more than rounding "
                                   f"({max(wrong):.1g}): {len(wrong)}")
