"""What `specvis compare` runs: methods on the same prompts and seeds, as a batch and one by one; are they the same?"""
import statistics
import time
from dataclasses import dataclass, replace

import click
import torch
from tqdm import tqdm

from ..decoding.continuous import ContinuousDecoded, ContinuousSampling
from ..decoding.discrete import Decoded
from ..decoding.methods import ContinuousMethod, Method
from ..decoding.sampling import Sampling
from ..pipelines.discrete import Pipeline
from ..pipelines.mar import MARPair
from ..studies.positions import draw_margins, is_near_a_filter
from .options import is_exact

ROUNDING = 1e-4  # two candidates for a token that are nearer than this may change places by rounding

Pipelines = dict[type, Pipeline | MARPair]  # by the type of the methods that they decode by


@dataclass
class Run:
    """One method at one temperature, on all prompts."""

    method: Method | ContinuousMethod
    temperature: float
    sampling: Sampling | ContinuousSampling

    @property
    def label(self) -> str:
        return f"{self.method.label}, temperature {self.temperature:g}"


@dataclass
class Singles:
    """The first pictures once more, each decoded alone and right after the baseline's of its prompt and seed."""

    seconds: list[float]
    baseline_seconds: list[float]  # empty: the baseline was not among the methods

    @property
    def speedup(self) -> float | None:
        """The median over the pictures; None: there is no baseline."""
        ratios = [baseline / own for baseline, own in zip(self.baseline_seconds, self.seconds)]
        return statistics.median(ratios) if ratios else None


@dataclass
class Result(Run):
    decoded: Decoded | ContinuousDecoded
    seconds: float                # wall time of the whole batch
    model_seconds: float | None   # of that, in forwards of the models; None: not measured
    baseline: "Result | None" = None  # of the same kind of tokens at the same temperature
    singles: Singles | None = None    # None: no picture was decoded alone

    @property
    def overhead(self) -> float | None:
        """The share of the time that is not forwards of the models."""
        return None if self.model_seconds is None else 1 - self.model_seconds / self.seconds

    @property
    def speedup(self) -> float | None:
        return None if self.baseline is None else self.baseline.seconds / self.seconds

    @property
    def same_tokens(self) -> torch.Tensor | None:
        """(B,) bool: which pictures are the baseline's, token for token; None: this is not promised."""
        if self.baseline in (None, self) or not is_exact(self.method, self.temperature):
            return None
        return (self.decoded.tokens == self.baseline.decoded.tokens).all(1)


def run_all(pipelines: Pipelines, runs: list[Run], prompts: list[str], singles: int) -> list[Result]:
    """Decode all prompts as one batch in each run, then the first `singles` of them alone.

    Continuous tokens are not decoded alone: their baseline would take minutes.
    """
    for run in runs:
        pipelines[type(run.method)].check(run.method)  # and the neighbors are found, before the clock starts
    baselines = {(type(run.method), run.temperature): run for run in runs if run.method.is_baseline}
    alone = min(singles, len(prompts))
    discrete = [run for run in runs if isinstance(run.method, Method)]
    single_runs = sum(1 + (not run.method.is_baseline and (Method, run.temperature) in baselines) for run in discrete)
    total = len(prompts) * sum(pipelines[type(run.method)].num_tokens for run in runs)
    total += alone * single_runs * (pipelines[Method].num_tokens if discrete else 0)
    with tqdm(total=total, unit="token", smoothing=0.05, disable=None) as bar:
        results = [decode_batch(pipelines[type(run.method)], run, prompts, bar) for run in runs]
        found = {(type(r.method), r.temperature): r for r in results if r.method.is_baseline}
        for result in results:
            result.baseline = found.get((type(result.method), result.temperature))
            if alone and isinstance(result.method, Method):
                result.singles = decode_alone(pipelines[Method], result, prompts[:alone], bar)
    return results


def announce(bar: tqdm, text: str) -> None:
    """Say what is done now: before the bar, or in a line where there is none, as in a log."""
    bar.set_description(text)
    if bar.disable:
        click.echo(text, err=True)


def decode_batch(pipeline: Pipeline | MARPair, run: Run, prompts: list[str], bar: tqdm) -> Result:
    announce(bar, run.label)
    with ModelClock(pipeline) as clock:
        start = time.perf_counter()
        decoded = pipeline.tokens(prompts, run.method, run.sampling, bar.update)
        seconds = time.perf_counter() - start
    return Result(run.method, run.temperature, run.sampling, decoded, seconds, clock.seconds)


def decode_alone(pipeline: Pipeline, result: Result, prompts: list[str], bar: tqdm) -> Singles:
    """Seconds of pictures that are decoded one at a time, the baseline's and the method's in turn."""
    announce(bar, f"{result.label}, one at a time")

    def seconds(run: Run, i: int) -> float:
        start = time.perf_counter()
        pipeline.tokens([prompts[i]], run.method, run.sampling[[i]], bar.update)
        return time.perf_counter() - start

    singles = Singles([], [])
    for i in range(len(prompts)):
        if result.baseline not in (None, result):
            singles.baseline_seconds.append(seconds(result.baseline, i))
        singles.seconds.append(seconds(result, i))
    if result.baseline is result:
        singles.baseline_seconds = singles.seconds
    return singles


class ModelClock:
    """Adds up the seconds that a pipeline's models spend, on the CPU: elsewhere to wait for them would cost time."""

    def __init__(self, pipeline: Pipeline | MARPair):
        if isinstance(pipeline, MARPair):
            models = [mar for mar in (pipeline.mar, pipeline.mar_draft) if mar is not None]
            self.modules = [*models, *(part for m in models for part in (m.diffloss.net, m.diffloss.net.time_embed,
                                                                         m.diffloss.net.cond_embed))]
        else:
            gpts = [gpt for gpt in (pipeline.gpt, pipeline.draft_model) if gpt is not None]
            self.modules = [*gpts, *(gpt.output for gpt in gpts), *filter(None, [pipeline.drafter])]
        self.seconds = 0.0 if pipeline.device.type == "cpu" else None

    def __enter__(self):
        def start(*_):
            self.start = time.perf_counter()

        def stop(*_):
            self.seconds += time.perf_counter() - self.start

        measured = [] if self.seconds is None else self.modules
        self.hooks = [hook for module in measured
                      for hook in (module.register_forward_pre_hook(start), module.register_forward_hook(stop))]
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()


def report_differences(pipelines: Pipelines, results: list[Result], prompts: list[str]) -> None:
    """Say where a picture differs that should be the baseline's. More than rounding is an error.

    The baseline reads one node a forward and other methods read many, and the two round differently. Where two
    candidates for a token are as good as equal, that may decide between them; and which ids top-k and top-p keep.

    Raises:
        click.ClickException: a token differs although its two best candidates are more than ROUNDING apart, and no
            change of the logits by as much draws another
    """
    wrong = 0
    for result in results:
        same = result.same_tokens
        for i in [] if same is None else (~same).nonzero()[:, 0].tolist():
            tokens = result.baseline.decoded.tokens[i: i + 1]
            position = (result.decoded.tokens[i: i + 1] != tokens).nonzero()[0, 1].item()
            margins = draw_margins(pipelines[Method], [prompts[i]], tokens, result.sampling[[i]])
            margin = margins[0, position].item()
            reason = ": rounding" if margin <= ROUNDING else ""
            if not reason and is_near_a_filter(pipelines[Method], prompts[i], tokens, result.sampling[[i]], position,
                                               ROUNDING):
                reason = ": rounding, which changes what the filters keep"
            wrong += not reason
            click.echo(f"{'' if reason else 'ERROR: '}{result.label}: {prompts[i]!r} (picture {i}) differs from the "
                       f"baseline's from token {position} on, where its two best candidates are {margin:.1e} apart"
                       f"{reason}", err=not reason)
    if wrong:
        raise click.ClickException(f"pictures that differ from the baseline's by more than rounding ({ROUNDING:g}): "
                                   f"{wrong}")


def with_window(result: Result, window: int) -> Run:
    """The same run of `jacobi` with another window."""
    return Run(replace(result.method, window=window), result.temperature, result.sampling)
