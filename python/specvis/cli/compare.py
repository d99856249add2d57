"""`specvis compare`: methods side by side on the same prompts and seeds: pictures, plots and a table."""
import csv
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import click
import matplotlib
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ..decoding.continuous import ContinuousDecoded, ContinuousSampling
from ..decoding.discrete import Decoded
from ..decoding.methods import ContinuousMethod, Method, parse_methods
from ..decoding.sampling import Sampling
from ..models.words import repeated
from ..pipelines.discrete import Pipeline
from ..pipelines.mar import MARPair
from ..studies.page import save_figure
from ..studies.positions import steps_gain, teacher_forced_probs
from .options import PROMPTS, refuse_filters, sampling_for, sampling_options, writable_folder

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  the backend is chosen first: there may be no screen

COLUMNS = ("method", "temperature", "tau", "target_forwards", "seconds", "speedup", "overhead", "acceptance",
           "tv_bound", "tv_excess", "tv_excess_bound")
LEGEND = """\
tau: tokens a target forward
seconds: of a picture, in a batch of {batch}
speedup: against the baseline method of the same kind of tokens at the same temperature
overhead: the share of the seconds that is not forwards of the models
acceptance: accepted drafts per drafted level; of continuous tokens, per draft that was verified
tv_bound: how far one accept test can move the distribution it tests against (empty: not known)
tv_excess: added total variation per token, estimated (0: lossless; at temperature 0 the share of tokens that strict
    acceptance would have rejected)
tv_excess_bound: a bound of tv_excess, COOL-SD's eq. (4), estimated on the drafted chains (empty: not known)"""


@click.command()
@click.option("--prompt", "prompts", multiple=True,
              help="A prompt with its style first; may be repeated. [default: eight]")
@click.option("--methods", "names", multiple=True, default=("all",),
              help="all (of discrete tokens), continuous, or methods with commas between them, each a NAME or "
              "NAME:PARAMETER=VALUE:...")
@click.option("-n", "count", type=click.IntRange(1), help="How many pictures a method. [default: one a prompt]")
@click.option("--temperature", "temperatures", multiple=True, type=float, default=(0.0, 1.0),
              help="May be repeated.")
@click.option("--out", type=click.Path(path_type=Path), default="out", help="Folder for the pictures and the table.")
@sampling_options
def compare(prompts, names, count, temperatures, out, seed, guidance, top_k, top_p, weights, device):
    """Run methods side by side: pictures, plots, a table."""
    methods = parse_methods(names)
    prompts = list(prompts or PROMPTS)
    prompts = repeated(prompts, count or len(prompts))
    seeds = list(range(seed, seed + len(prompts)))
    if all(isinstance(method, ContinuousMethod) for method in methods):
        refuse_filters(methods[0].name)
    runs = [Run(method, temperature, sampling_for(method, seeds, guidance, temperature, top_k, top_p, device))
            for temperature in temperatures for method in methods
            if temperature or not isinstance(method, ContinuousMethod)]  # continuous tokens have no likeliest one
    if not runs:
        raise ValueError(f"temperature must be positive for {methods[0].name}, got 0")
    if len(runs) < len(methods) * len(temperatures):
        click.echo("temperature 0: left out for continuous tokens, which have no likeliest one")
    loaders = {Method: Pipeline.load, ContinuousMethod: MARPair.load}
    pipelines = {kind: loaders[kind](weights, device) for kind in dict.fromkeys(type(run.method) for run in runs)}
    next(iter(pipelines.values())).words.encode(prompts)
    writable_folder(out)

    results = decode_all(pipelines, runs, prompts)
    rows = table(results)
    draw_all(pipelines, results, prompts, out)
    with open(out / "compare.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    print_table(rows, len(prompts))
    print(f"the table and the pictures are in {out}")
    for result in results:
        for i in result.decoded.failed.nonzero()[:, 0].tolist():
            click.echo(f"{result.method.label}: {prompts[i]!r} ended early: the model's output was not finite")


@dataclass
class Run:
    """One method at one temperature, on all prompts."""

    method: Method | ContinuousMethod
    temperature: float
    sampling: Sampling | ContinuousSampling


@dataclass
class Result(Run):
    decoded: Decoded | ContinuousDecoded
    seconds: float               # wall time of the whole batch
    model_seconds: float | None  # of that, in forwards of the models; None: not measured

    @property
    def overhead(self) -> float | None:
        """The share of the time that is not forwards of the models."""
        return None if self.model_seconds is None else 1 - self.model_seconds / self.seconds


def decode_all(pipelines: dict[type, Pipeline | MARPair], runs: list[Run], prompts: list[str]) -> list[Result]:
    """Decode all prompts as one batch in each run; `pipelines`: by the type of the methods that they decode by."""
    for run in runs:
        pipelines[type(run.method)].check(run.method)  # and the neighbors are found, before the clock starts
    results = []
    total = len(prompts) * sum(pipelines[type(run.method)].num_tokens for run in runs)
    with tqdm(total=total, unit="token", smoothing=0.05, disable=None) as bar:
        for run in runs:
            pipeline = pipelines[type(run.method)]
            bar.set_description(f"{run.method.label}, temperature {run.temperature:g}")
            with ModelClock(pipeline) as clock:
                start = time.perf_counter()
                decoded = pipeline.tokens(prompts, run.method, run.sampling, bar.update)
                seconds = time.perf_counter() - start
            results.append(Result(run.method, run.temperature, run.sampling, decoded, seconds, clock.seconds))
    return results


class ModelClock:
    """Adds up the seconds that a pipeline's models spend, on the CPU: elsewhere to wait for them would cost time."""

    def __init__(self, pipeline: Pipeline | MARPair):
        if isinstance(pipeline, MARPair):
            models = (pipeline.mar, pipeline.mar_draft)
            self.modules = [*models, *(part for m in models for part in (m.diffloss.net, m.diffloss.net.time_embed,
                                                                         m.diffloss.net.cond_embed))]
        else:
            gpts = [gpt for gpt in (pipeline.gpt, pipeline.draft_model) if gpt is not None]
            self.modules = [*gpts, *(gpt.output for gpt in gpts), pipeline.drafter]
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


def table(results: list[Result]) -> list[dict]:
    """A row of COLUMNS for each result."""
    baseline = {(type(r.method), r.temperature): r.seconds for r in results if r.method.is_baseline}
    rows = []
    for r in results:
        B, L = r.decoded.tokens.shape[:2]
        seconds = baseline.get((type(r.method), r.temperature))
        row = dict.fromkeys(COLUMNS, "") | {
            "method": r.method.label,
            "temperature": r.temperature,
            "tau": round(r.decoded.tau.nanmean().item(), 2),
            "target_forwards": round(r.decoded.target_forwards.float().mean().item(), 1),
            "seconds": round(r.seconds / B, 2),
        }
        if seconds is not None:
            row["speedup"] = round(seconds / r.seconds, 2)
        if r.overhead is not None:
            row["overhead"] = round(r.overhead, 3)
        if r.method.drafting != "none":
            row["acceptance"] = round(r.decoded.acceptance_rate, 3)
        if isinstance(r.method, Method):
            row["tv_excess"] = round(r.decoded.tv_excess.mean().item() / L, 4)
            if r.method.tv_bound is not None:
                row["tv_bound"] = round(r.method.tv_bound, 3)
            if not r.decoded.tv_bound.isnan().any():
                row["tv_excess_bound"] = round(r.decoded.tv_bound.mean().item() / L, 4)
        rows.append(row)
    return rows


def print_table(rows: list[dict], batch: int) -> None:
    name_width = max(len(row["method"]) for row in rows) + 1
    widths = [max(12, len(name) + 2) for name in COLUMNS[1:]]
    for row in [dict(zip(COLUMNS, COLUMNS)), *rows]:
        click.echo(f"{row['method']:{name_width}}"
                   + "".join(f"{row[name]:>{width}}" for name, width in zip(COLUMNS[1:], widths)))
    click.echo(LEGEND.format(batch=batch))


def draw_all(pipelines: dict[type, Pipeline | MARPair], results: list[Result], prompts: list[str], out: Path) -> None:
    draw_pictures(pipelines, results, prompts, out / "compare.png")
    discrete = [r for r in results if isinstance(r.method, Method)]
    if discrete:
        draw_acceptance(pipelines[Method], discrete, out / "acceptance.png")
    sampled = next((r for r in discrete if r.temperature > 0 and not r.decoded.failed.any()), None)
    if sampled:
        draw_distributions(pipelines[Method], prompts, sampled.decoded.tokens, sampled.sampling,
                           out / "distributions.png")


def by_method(results: list[Result]) -> tuple[list[str], list[float], dict]:
    """Labels of methods and temperatures, in order, and the result of each pair."""
    table = {(r.method.label, r.temperature): r for r in results}
    return list(dict.fromkeys(label for label, _ in table)), list(dict.fromkeys(T for _, T in table)), table


def draw_pictures(pipelines: dict[type, Pipeline | MARPair], results: list[Result], prompts: list[str],
                  path: Path) -> None:
    """Rows are methods, columns prompts, once for each temperature."""
    labels, temperatures, table = by_method(results)
    count = len(prompts)
    figure, axes = plt.subplots(len(labels), count * len(temperatures), squeeze=False, layout="constrained",
                                figsize=(0.95 * count * len(temperatures) + 1.8, 0.95 * len(labels) + 0.7))
    figure.get_layout_engine().set(w_pad=0.01, h_pad=0.01, wspace=0, hspace=0)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    for (label, temperature), result in table.items():
        row, start = axes[labels.index(label)], count * temperatures.index(temperature)
        pictures = pipelines[type(result.method)].pictures(result.decoded.tokens)
        for axis, picture in zip(row[start: start + count], pictures):
            axis.imshow(picture)
        row[0].set_ylabel(label.replace(":", "\n"), rotation=0, ha="right", va="center")
    for start, temperature in enumerate(temperatures):
        for axis, prompt in zip(axes[0, count * start:], prompts):
            axis.set_title(f"T = {temperature:g}\n" + "\n".join(textwrap.wrap(prompt, 13)), fontsize=7)
    save_figure(figure, path)


def draw_acceptance(pipeline: Pipeline, results: list[Result], path: Path) -> None:
    """How many tokens the step gave that made each position, mean over pictures (ADT-Tree, Figure 2)."""
    labels, temperatures, table = by_method([r for r in results if r.method.drafting != "none"])
    if not table:
        return
    grid = pipeline.gpt.config.grid
    gains = {key: steps_gain(r.decoded.num_accepted).float().mean(0).view(grid, grid).numpy()
             for key, r in table.items()}
    figure, axes = plt.subplots(len(temperatures), len(labels), squeeze=False, layout="constrained",
                                figsize=(2.0 * len(labels) + 0.8, 2.4 * len(temperatures)))
    top = max(gain.max() for gain in gains.values())
    for (label, temperature), gain in gains.items():
        axis = axes[temperatures.index(temperature), labels.index(label)]
        image = axis.imshow(gain, vmin=1, vmax=top, cmap="viridis")
        axis.set(xticks=[], yticks=[])
        axis.set_title(label.replace(":", "\n") + f"\nT = {temperature:g}, mean {gain.mean():.2f}", fontsize=8)
    figure.colorbar(image, ax=axes, label="tokens of the step that made this position")
    save_figure(figure, path)


def draw_distributions(pipeline: Pipeline, prompts: list[str], tokens: Tensor, sampling: Sampling, path: Path) -> None:
    """Target and draft over the union of their 20 likeliest tokens (LANTERN, Figure 2b); top-1 maps
    (ADT-Tree, Figure 4)."""
    if tokens.shape[1] < 4:
        return  # no room for three positions to look at
    target, draft = (probs.cpu() for probs in teacher_forced_probs(pipeline, prompts, tokens, sampling))
    grid = pipeline.gpt.config.grid
    figure, axes = plt.subplots(2, 3, constrained_layout=True, figsize=(12, 6))
    positions = [min(row * grid * grid // 4 + grid // 2, grid * grid - 1) for row in (1, 2, 3)]
    for axis, position in zip(axes[0], positions):
        p, q = target[0, position], draft[0, position - 1]
        likeliest = min(20, len(p))
        union = torch.cat([p.topk(likeliest).indices, q.topk(likeliest).indices]).unique()
        union = union[p[union].argsort(descending=True)]
        x = np.arange(len(union))
        axis.bar(x - 0.2, p[union].numpy(), 0.4, label="target")
        axis.bar(x + 0.2, q[union].numpy(), 0.4, label="draft")
        overlap = torch.minimum(p, q).sum()
        axis.set(xticks=[], xlabel="union of the 20 likeliest tokens of each", ylabel="probability",
                 title=f"{prompts[0]}\nrow {position // grid}, column {position % grid}, sum of min {overlap:.2f}")
        axis.legend()
    top = target.max(-1).values
    for axis, (name, values) in zip(axes[1], {prompts[0]: top[0], "mean of all prompts": top.mean(0)}.items()):
        image = axis.imshow(values.view(grid, grid).numpy(), vmin=0, vmax=1)
        axis.set(xticks=[], yticks=[], title=f"top-1 probability of the target\n{name}")
        figure.colorbar(image, ax=axis)
    axes[1, 2].hist(top.flatten().numpy(), bins=40, range=(0, 1), density=True)
    axes[1, 2].set(xlabel="top-1 probability of the target", ylabel="density of positions",
                   title=f"mean {top.mean():.3f}, top-10 {target.topk(10, -1).values.sum(-1).mean():.3f}")
    save_figure(figure, path)
