"""`specvis compare`: methods side by side on the same prompts and seeds: pictures, plots and a table."""
import statistics
from pathlib import Path

import click

from ..decoding.methods import ContinuousMethod, Method, parse_methods
from ..files import csv_text, locked, replacing_together, write_whole
from ..models.words import repeated
from .figures import draw_all, draw_jacobi
from .options import MAX_COUNT, PROMPTS, load_model, refuse_filters, sampling_for, sampling_options, writable_folder
from .runs import Pipelines, Result, Run, report_differences, run_all, with_window

COLUMNS = ("method", "temperature", "tau", "target_forwards", "seconds", "speedup", "single_seconds", "single_speedup",
           "same_tokens", "overhead", "acceptance", "tv_bound", "tv_excess", "tv_excess_bound")
WINDOWS = (4, 8, 16, 32)  # of jacobi, for its figure
LEGEND = """\
tau: tokens a target forward
seconds, speedup: of a picture in a batch of {batch}; against the baseline of the same kind of tokens, at the same
    temperature
single_seconds, single_speedup: of pictures that are decoded alone, each right after the baseline's (medians)
same_tokens: pictures whose tokens are the baseline's, every one (empty: the method does not promise that)
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
@click.option("-n", "count", type=click.IntRange(1, MAX_COUNT),
              help="How many pictures a method. [default: one a prompt]")
@click.option("--singles", type=click.IntRange(0), default=4,
              help="How many of the pictures are also decoded alone, for their seconds. Discrete tokens only.")
@click.option("--temperature", "temperatures", multiple=True, type=float, default=(0.0, 1.0),
              help="May be repeated.")
@click.option("--out", type=click.Path(path_type=Path), default="out", help="Folder for the pictures and the table.")
@sampling_options
def compare(prompts, names, count, singles, temperatures, out, seed, guidance, top_k, top_p, model, device):
    """Run methods side by side: pictures, plots, a table.

    Where a method draws the baseline's tokens by its definition, that is checked.
    """
    methods = parse_methods(names)
    prompts = list(prompts or PROMPTS)
    prompts = repeated(prompts, count or len(prompts))
    seeds = list(range(seed, seed + len(prompts)))
    if all(isinstance(method, ContinuousMethod) for method in methods):
        refuse_filters(methods[0].name)
    runs = [Run(method, temperature, sampling_for(method, seeds, guidance, temperature, top_k, top_p, model, device))
            for temperature in temperatures for method in methods
            if temperature or not isinstance(method, ContinuousMethod)]  # continuous tokens have no likeliest one
    if not runs:
        raise ValueError(f"temperature must be positive for {methods[0].name}, got 0")
    if len(runs) < len(methods) * len(temperatures):
        click.echo("temperature 0: left out for continuous tokens, which have no likeliest one")
    pipelines = {kind: load_model(kind, model, device) for kind in dict.fromkeys(type(run.method) for run in runs)}
    next(iter(pipelines.values())).prompts.encode(prompts)

    windows = window_runs(runs) if singles else []
    with locked(writable_folder(out)):
        every = run_all(pipelines, runs + windows, prompts, singles)
        results = every[:len(runs)]
        rows = table(results)
        with replacing_together(out, last="compare.csv") as new:
            draw_all(pipelines, results, prompts, new)
            if windows:
                draw_windows(pipelines, results, every[len(runs):], prompts, new)
            write_whole(new / "compare.csv", csv_text(COLUMNS, rows))
    print_table(rows, len(prompts))
    print_sameness(results)
    click.echo(f"the table and the pictures are in {out}")
    for result in results:
        for i in result.decoded.failed.nonzero()[:, 0].tolist():
            click.echo(f"{result.method.label}: {prompts[i]!r} ended early: the model's output was not finite")
    report_differences(pipelines, every, prompts)


def window_runs(runs: list[Run]) -> list[Run]:
    """The first `jacobi` that samples (or else is greedy) with several windows, for its figure."""
    discrete = [run for run in runs if isinstance(run.method, Method)]
    baselines = {run.temperature for run in discrete if run.method.is_baseline}
    jacobi = [run for run in discrete if run.method.drafting == "jacobi" and run.method.seed_exact]
    chosen = max((run for run in jacobi if run.temperature in baselines), key=lambda run: run.temperature > 0,
                 default=None)
    return [with_window(chosen, window) for window in WINDOWS] if chosen else []


def draw_windows(pipelines: Pipelines, results: list[Result], windows: list[Result], prompts: list[str],
                 out: Path) -> None:
    """The figure of `jacobi`, from the run that the `windows` vary."""
    jacobi = next(r for r in results if r.method.drafting == "jacobi" and r.sampling is windows[0].sampling)
    draw_jacobi(pipelines[Method], jacobi.baseline, jacobi, dict(zip(WINDOWS, windows)), prompts, out / "jacobi.png")


def table(results: list[Result]) -> list[dict]:
    """A row of COLUMNS for each result."""
    rows = []
    for r in results:
        B, L = r.decoded.tokens.shape[:2]
        row = dict.fromkeys(COLUMNS, "") | {
            "method": r.method.label,
            "temperature": r.temperature,
            "tau": round(r.decoded.tau.nanmean().item(), 2),
            "target_forwards": round(r.decoded.target_forwards.float().mean().item(), 1),
            "seconds": round(r.seconds / B, 2),
        }
        if r.speedup is not None:
            row["speedup"] = round(r.speedup, 2)
        if r.singles is not None:
            row["single_seconds"] = round(statistics.median(r.singles.seconds), 2)
            if r.singles.speedup is not None:
                row["single_speedup"] = round(r.singles.speedup, 2)
        if r.same_tokens is not None:
            row["same_tokens"] = f"{r.same_tokens.sum()} of {B}"
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
    widths = [2 + max(len(str(row[name])) for row in [*rows, {name: name}]) for name in COLUMNS[1:]]
    for row in [dict(zip(COLUMNS, COLUMNS)), *rows]:
        click.echo(f"{row['method']:{name_width}}"
                   + "".join(f"{row[name]:>{width}}" for name, width in zip(COLUMNS[1:], widths)))
    click.echo(LEGEND.format(batch=batch))


def print_sameness(results: list[Result]) -> None:
    """A line for each method that promises the baseline's tokens."""
    labels = dict.fromkeys(r.method.label for r in results if isinstance(r.method, Method) and r.method.seed_exact)
    for label in labels:
        counts = [f"{r.same_tokens.sum()} of {len(r.same_tokens)} (temperature {r.temperature:g})" for r in results
                  if r.method.label == label and r.same_tokens is not None]
        if counts:
            click.echo(f"{label}: same tokens as vanilla: {', '.join(counts)}")
