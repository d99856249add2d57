"""`specvis compare`: methods side by side on the same prompts and seeds: pictures, plots and a table."""
import platform
import re
import statistics
import textwrap
from dataclasses import replace
from pathlib import Path

import click
import torch

from ..decoding.methods import ContinuousMethod, Method, parse_methods
from ..files import csv_text, locked, replacing_together, write_whole
from ..models.words import repeated
from ..pipelines.prompts import with_style
from . import options
from .figures import draw_jacobi, draw_pictures
from .runs import MODULES, ComparedResult, ComparedRun, report_differences, run_all

PROMPTS = ["fluent-3d red heart", "fluent-flat blue heart", "noto grinning face", "fluent-3d cat face",
           "fluent-flat pirate flag", "noto chequered flag"]  # with seeds 0 to 5 they come out well
METHODS = "vanilla, jacobi, jacobi:window=16, gsd, speculative, eagle1, lantern++"
COLUMNS = ("method", "temperature", "tau", "target_forwards", "seconds", "speedup", "speedup_over_modules",
           "batch_seconds", "batch_speedup", "same_tokens", "overhead", "acceptance", "tv_excess")
WIDTH = 80  # columns of a terminal that the table fits


def windows_of(context, parameter, text: str | None) -> list[int]:
    """The numbers of --windows."""
    if text is not None and not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text, re.ASCII):
        raise ValueError(f"windows must be whole numbers with commas between them, such as 4,8,16,32, got {text!r}")
    return list(dict.fromkeys(map(int, text.split(",")))) if text else []


@click.command()
@click.option("--prompt", "prompts", multiple=True, help="May be repeated. [default: six]")
@options.style_option
@click.option("--methods", "names", multiple=True, default=(METHODS,),
              help="Methods with commas between them, each a NAME or NAME:PARAMETER=VALUE:...; all (of discrete "
              "tokens), or continuous. The default ones have a row of PyTorch's own modules beside them.")
@click.option("-n", "count", type=click.IntRange(1, options.MAX_COUNT),
              help="How many pictures a method. [default: one a prompt]")
@click.option("--singles", type=click.IntRange(0), default=2,
              help="How many of the pictures are also decoded alone, for their seconds. Discrete tokens only.")
@click.option("--temperature", "temperatures", multiple=True, type=float, show_default="1, or what the family says",
              help="May be repeated.")
@click.option("--windows", callback=windows_of, metavar="N,N,...",
              help="Also run jacobi with these windows, for a curve in its figure, such as 4,8,16,32.")
@options.dtype_option
@click.option("--out", type=click.Path(path_type=Path), default="out", help="Folder for the pictures and the table.")
@options.sampling_options
def compare(prompts, style, names, count, singles, temperatures, windows, dtype, out, seed, filters, model, device):
    """Run methods side by side: pictures, plots, a table.

    Where a method draws the baseline's tokens by its definition, that is checked. compare.csv has more than the table:

    \b
    target_forwards  of a picture
    seconds, speedup of pictures that are decoded alone, each after the
                     baseline's (medians); the baseline has the same kind of
                     tokens, at the same temperature
    speedup_over_modules
                     the same over the baseline by PyTorch's modules, on one
                     thread; of the shipped model
    batch_seconds, batch_speedup
                     of a picture in the batch
    same_tokens      pictures whose tokens are the baseline's, every one
                     (empty: the method does not promise that)
    overhead         the share of the seconds that is not forwards of the models
    acceptance       accepted drafts per drafted level; of continuous tokens,
                     per draft that was verified
    tv_excess        added total variation per token, estimated (at temperature
                     0 the share of tokens that strict acceptance would have
                     rejected)
    """
    methods = list(dict.fromkeys(parse_methods(names, model.methods())))
    for method in methods:
        model.check(method)
    by_modules = not options.is_given("names") and model.model == options.SHIPPED
    if style is not None and not prompts:
        raise ValueError("style must be given with --prompt: the prompts of compare have theirs")
    prompts = list(prompts or (options.FAMILY_PROMPTS if model.family else PROMPTS))
    prompts = repeated(prompts, count or len(prompts))
    methods = list(dict.fromkeys(method.with_window(device, 1 if singles else len(prompts)) for method in methods))
    seeds = list(range(seed, seed + len(prompts)))
    if any(isinstance(method, ContinuousMethod) for method in methods) and options.is_given("dtype"):
        raise ValueError("dtype must not be given with continuous tokens: it is for discrete ones")
    if all(isinstance(method, ContinuousMethod) for method in methods):
        options.refuse_filters(methods[0].name)
    temperatures = list(dict.fromkeys(temperatures or [model.family and model.settings().temperature or 1.0]))
    runs = [ComparedRun(method, temperature, options.sampling_for(
                method, seeds, filters, temperature, model, device))
            for temperature in temperatures for method in methods
            if temperature or not isinstance(method, ContinuousMethod)]
    runs = [other for run in runs for other in (run, replace(run, by_modules=True))
            if by_modules and run.method.is_baseline or other is run]
    if not runs:
        raise ValueError(f"temperature must be positive for {methods[0].name}, got 0")
    if len(runs) < len(methods) * len(temperatures):
        click.echo("temperature 0: left out for continuous tokens, which have no likeliest one")
    jacobi = jacobi_run(runs)
    if windows and jacobi is None:
        raise ValueError("windows must not be given without vanilla and jacobi among the methods")
    of_windows = {window: replace(jacobi, method=jacobi.method.changed(window=window), purpose="for jacobi.png: ")
                  for window in windows}
    pipelines = {kind: model.load(kind, device, **({"dtype": getattr(torch, dtype)} if kind is Method else {}))
                 for kind in dict.fromkeys(type(run.method) for run in runs)}
    reader = next(iter(pipelines.values())).prompts
    prompts = [with_style(prompt, reader.styles, style, default=True) for prompt in prompts]
    reader.encode(prompts)

    with options.resumable("nothing was written; the same command begins anew"), locked(options.writable_folder(out)):
        every = run_all(pipelines, list({run.key: run for run in (*runs, *of_windows.values())}.values()), prompts,
                        singles)
        found = {result.key: result for result in every}
        results = [found[run.key] for run in runs]
        rows = table(results)
        with replacing_together(out, last="compare.csv") as new:
            draw_pictures(pipelines, [result for result in results if not result.by_modules], prompts,
                          new / "compare.png")
            if jacobi:
                draw_jacobi(pipelines[Method], found[jacobi.key], {window: found[run.key] for window, run in
                                                                   of_windows.items()}, prompts, new / "jacobi.png")
            write_whole(new / "compare.csv", csv_text(COLUMNS, rows))
    print_table(rows)
    print_origin(results, torch.device(device))
    click.echo(f"pictures and all columns: {out}")
    for result in results:
        for i in result.decoded.failed.nonzero()[:, 0].tolist():
            click.echo(f"{result.name}: {prompts[i]!r} ended early: the model's output was not finite")
    report_differences(pipelines, every, prompts)


def jacobi_run(runs: list[ComparedRun]) -> ComparedRun | None:
    """The seed-exact run of `jacobi` with the widest window that has a baseline; one that samples rather than a greedy
    one."""
    discrete = [run for run in runs if isinstance(run.method, Method)]
    baselines = {run.temperature for run in discrete if run.method.is_baseline}
    return max((run for run in discrete if run.method.drafting == "jacobi" and run.method.seed_exact
                and run.temperature in baselines), key=lambda run: (run.temperature > 0, run.method.drafts.window),
               default=None)


def table(results: list[ComparedResult]) -> list[dict]:
    """A row of COLUMNS for each result."""
    def rounded(value, digits):
        return "" if value is None else round(value, digits)

    rows = []
    for r in results:
        B, L = r.decoded.tokens.shape[:2]
        rows.append({
            "method": r.name, "temperature": r.temperature, "tau": round(r.decoded.tau.nanmean().item(), 2),
            "target_forwards": round(r.decoded.target_forwards.float().mean().item(), 1),
            "seconds": rounded(statistics.median(r.seconds) if r.seconds else None, 3),
            "speedup": rounded(r.speedup(r.baseline), 2), "speedup_over_modules": rounded(r.speedup(r.modules), 2),
            "batch_seconds": round(r.batch_seconds / B, 3), "batch_speedup": rounded(r.batch_speedup, 2),
            "same_tokens": "" if r.same_tokens is None else f"{r.same_tokens.sum()} of {B}",
            "overhead": rounded(r.overhead, 3),
            "acceptance": "" if r.method.drafting == "none" else round(r.decoded.acceptance_rate, 3),
            "tv_excess": round(r.decoded.tv_excess.mean().item() / L, 4) if isinstance(r.method, Method) else ""})
    return rows


def print_table(rows: list[dict]) -> None:
    """Up to seven columns in lines of at most WIDTH letters; a long name has a line of its own."""
    batch, of_batch = ("", "") if all(row["seconds"] != "" for row in rows) else ("batch_", "batch's")
    over = any(row["speedup_over_modules"] != "" for row in rows)
    above, below, names, forms = zip(
        *[("", "T", "temperature", "g")] * (len({row["temperature"] for row in rows}) > 1),
        ("tokens a", "forward", "tau", ".2f"), (of_batch, "seconds", f"{batch}seconds", ".2f"),
        (of_batch, "speedup", f"{batch}speedup", ".2f"), *[("over", "PyTorch", "speedup_over_modules", ".2f")] * over,
        ("same", "tokens", "same_tokens", ""), ("added", "TV", "tv_excess", ".4f"))
    lines = [("", above), ("method", below), *((row["method"], ["" if row[name] == "" else f"{row[name]:{form}}"
                                                                for name, form in zip(names, forms)]) for row in rows)]
    widths = [2 + max(map(len, column)) for column in zip(*(cells for _, cells in lines))]
    first = min(max(len(row["method"]) for row in rows), WIDTH - sum(widths))
    for method, cells in lines:
        if len(method) > first:
            click.echo(method)
            method = ""
        click.echo(f"{method:{first}}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths)))


def print_origin(results: list[ComparedResult], device: torch.device) -> None:
    """Say what the numbers mean, and by what they were measured."""
    count, alone = len(results[0].decoded.tokens), min(len(r.seconds) for r in results)
    temperatures = ", ".join(f"{T:g}" for T in dict.fromkeys(r.temperature for r in results))
    of_seconds = f"median of {alone} decoded alone" if alone else "a picture's part of the batch"
    click.echo(f"Tokens a forward: mean of {count} pictures. Seconds: {of_seconds}.\n"
               "Added TV: added total variation a token, estimated.")
    if any(r.by_modules for r in results):
        click.echo(f"vanilla: plain decoding. {MODULES}: the same without decoder_layers,\n"
                   "on one thread, where they are faster than on two.")
    click.echo(textwrap.shorten(f"Temperature {temperatures}; {machine(device)}, torch {torch.__version__}", WIDTH))


def machine(device: torch.device) -> str:
    """The name that the system gives to the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    name, count = (names or [platform.processor() or platform.machine()])[0], torch.get_num_threads()
    return f"{name}, {count} thread{'s' * (count > 1)}"
