"""The command line: specvis generate | compare | report | tune | methods | info."""
import os
import platform
import tempfile
import textwrap
import time
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")      # the profiler that finds memory tells of its starts
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads hold each other up where cores are shared

import click  # noqa: E402  torch reads the variable when it is first imported
import torch  # noqa: E402
from click.core import ParameterSource
from PIL import Image
from tqdm import tqdm

import specvis_kernels

from .options import Commands, device_option
from .compare import PROMPTS, compare_methods
from ..decoding.continuous import ContinuousSampling
from ..decoding.discrete import Sampling
from ..pipelines.mar import MARPair
from ..decoding.methods import (CONTINUOUS, CONTINUOUS_PARAMETERS, METHODS, PARAMETERS, ContinuousMethod, Method, parameters_of,
                      parse_method, parse_methods, written)
from ..models.words import repeated
from ..pipelines.discrete import SHIPPED, Pipeline
from ..studies.cspd import ITEMS as CONTINUOUS_ITEMS
from ..studies.items import ITEMS
from ..decoding.trees import TREES, static_tree

GUIDANCE, CONTINUOUS_GUIDANCE = 1.2, 2.5  # of the shipped models
STYLES = ("fluent-3d", "fluent-flat", "noto")  # the first words of the shipped model's captions


def takes_files(folder: Path) -> bool:
    """Tried, not asked: permissions alone do not tell."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def writable_file(path: Path) -> Path:
    """`path` if a picture can be written there, found out without leaving anything behind."""
    if path.suffix.lower() not in Image.registered_extensions():
        raise ValueError(f"out must end in the name of a picture format such as .png, got {path}")
    if path.is_dir() or not takes_files(path.parent) or path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"out must be a file in a folder that exists and can be written, got {path}")
    return path


def writable_folder(path: Path) -> Path:
    """`path` as a folder that exists and can be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out must be a folder that can be made, got {path}: {error.strerror}") from error
    if not takes_files(path):
        raise ValueError(f"out must be a folder that can be written, got {path}")
    return path


def save(image: Image.Image, path: Path) -> None:
    """Write beside the goal first, so that an interruption leaves no half of a picture."""
    part = path.with_name(f".{path.name}.part")
    image.save(part, format=Image.registered_extensions()[path.suffix.lower()])
    part.replace(path)


def in_a_row(pictures: list[Image.Image], scale: int) -> Image.Image:
    side = pictures[0].width * scale
    row = Image.new("RGB", (side * len(pictures), side), "white")
    for i, picture in enumerate(pictures):
        row.paste(picture.resize((side, side), Image.Resampling.BICUBIC), (i * side, 0))
    return row


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(specvis_kernels.__version__)
def main():
    """Pictures from words, token by token, with and without speculative decoding."""


def sampling_options(command):
    for option in reversed((
        click.option("--seed", type=click.IntRange(0, 2**32), default=0,
                     help="Seed of the first picture; the next ones count on."),
        click.option("--guidance", type=float, help="Strength of classifier-free guidance; 1 is none. "
                     f"[default: {GUIDANCE}; {CONTINUOUS_GUIDANCE} for continuous tokens]"),
        click.option("--top-k", default=100, help="Keep the likeliest TOP_K tokens; 0 keeps all. "
                     "Discrete tokens only."),
        click.option("--top-p", default=0.8, help="Keep the likeliest tokens up to this probability, in (0, 1]. "
                     "Discrete tokens only."),
        click.option("--weights", type=click.Path(path_type=Path), default=SHIPPED, show_default="the shipped model",
                     help="Folder with the model."),
        device_option,
    )):
        command = option(command)
    return command


def sampling_of(method: Method | ContinuousMethod, seeds: list[int], guidance: float | None, temperature: float,
                top_k: int, top_p: float, device: str = "cpu") -> Sampling | ContinuousSampling:
    """How to draw by this method; ValueError names the option that is out of its range."""
    if not isinstance(method, ContinuousMethod):
        return Sampling.of(seeds, guidance=GUIDANCE if guidance is None else guidance, temperature=temperature,
                           top_k=top_k, top_p=top_p, device=device)
    return ContinuousSampling(torch.tensor(seeds, device=device),
                              CONTINUOUS_GUIDANCE if guidance is None else guidance, temperature)


def refuse_filters(what: str) -> None:
    """Raise ValueError where filters of discrete tokens are given."""
    for name in ("top_k", "top_p"):
        if click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ValueError(f"{name} must not be given with {what}: continuous tokens have no filters")


@main.command()
@click.option("--prompt", required=True, help='Words, e.g. "red heart".')
@click.option("--style", type=click.Choice(STYLES), default=STYLES[0], help="Whose drawing style.")
@click.option("--method", "name", default="lantern",
              help=f"One of {', '.join([*METHODS, *CONTINUOUS])}; or NAME:PARAMETER=VALUE:..., "
              "see `specvis methods`.")
@click.option("--delta", type=float, help="The same as :delta=...")
@click.option("-k", type=int, help="The same as :k=...")
@click.option("--depth", type=int, help="The same as :depth=...")
@click.option("--width", type=int, help="The same as :width=...")
@click.option("--nodes", type=int, help="The same as :nodes=...")
@click.option("-n", "count", default=1, help="How many pictures.")
@click.option("--temperature", default=1.0, help="0 always takes the likeliest token.")
@click.option("--scale", default=4, help="Enlarge the picture's 64 pixels by this factor.")
@click.option("--out", type=click.Path(path_type=Path), default="specvis.png", help="The picture to write.")
@sampling_options
def generate(prompt, style, name, delta, k, depth, width, nodes, count, temperature, scale, out, seed, guidance, top_k,
             top_p, weights, device):
    """Draw pictures of a prompt, side by side.

    What a method's parameters are, and their defaults: specvis methods.
    """
    if not prompt.split():
        raise ValueError("prompt must have at least one word")
    if count < 1:
        raise ValueError(f"n must be at least 1, got {count}")
    if scale < 1:
        raise ValueError(f"scale must be at least 1, got {scale}")
    chosen = parse_method(name, delta=delta, k=k, depth=depth, width=width, nodes=nodes)
    if isinstance(chosen, ContinuousMethod):
        refuse_filters(chosen.name)
    sampling = sampling_of(chosen, list(range(seed, seed + count)), guidance, temperature, top_k, top_p, device)
    writable_file(out)
    pipeline = (MARPair if isinstance(chosen, ContinuousMethod) else Pipeline).load(weights, device)
    prompts = [f"{style} {prompt}"] * count
    pipeline.words.encode(prompts[:1])  # bad input is found before the bar and the clock start
    pipeline.check(chosen)
    start = time.perf_counter()
    with tqdm(total=count * pipeline.places, unit="token", desc=chosen.label, disable=None) as bar:
        decoded = pipeline.tokens(prompts, chosen, sampling, bar.update)
    seconds = time.perf_counter() - start
    pictures = pipeline.pictures(decoded.tokens)
    for i in decoded.failed.nonzero()[:, 0].tolist():
        click.echo(f"picture {i} (seed {seed + i}) ended early: the model's output was not finite", err=True)
    kept = [picture for picture, failed in zip(pictures, decoded.failed.tolist()) if not failed]
    if not kept:
        raise click.ClickException("no picture was finished; nothing was written")
    save(in_a_row(kept, scale), out)
    click.echo(f"{out}: {len(kept)} of {count} pictures, {seconds:.1f} s, {decoded.forwards.float().mean():.0f} target "
               f"forwards a picture, tau {decoded.tau.nanmean():.2f}")


@main.command()
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
    if all(isinstance(m, ContinuousMethod) for m in methods):
        refuse_filters(methods[0].name)
    runs = [(m, temperature, sampling_of(m, seeds, guidance, temperature, top_k, top_p, device))
            for temperature in temperatures for m in methods
            if temperature or not isinstance(m, ContinuousMethod)]  # continuous tokens have no likeliest one
    if not runs:
        raise ValueError(f"temperature must be positive for {methods[0].name}, got 0")
    if len(runs) < len(methods) * len(temperatures):
        click.echo("temperature 0: left out for continuous tokens, which have no likeliest one")
    loaders = {Method: Pipeline.load, ContinuousMethod: MARPair.load}
    pipelines = {kind: loaders[kind](weights, device) for kind in dict.fromkeys(type(m) for m, *_ in runs)}
    next(iter(pipelines.values())).words.encode(prompts)
    compare_methods(pipelines, runs, writable_folder(out), prompts)


@main.command()
@click.option("--continuous", is_flag=True, help="CSpD's tables and figures, of continuous tokens.")
@click.option("--only", "names", multiple=True, help=f"Of {', '.join(ITEMS)}; with --continuous of "
              f"{', '.join(CONTINUOUS_ITEMS)}; several with commas. [default: all]")
@click.option("--quick", is_flag=True, help="Few pictures and the main tables only: under 10 minutes on two cores "
              "(with --continuous not timed).")
@click.option("--images", type=click.IntRange(1), help="Pictures a method, decoded in batches. [default: 48, quick 12; "
              "with --continuous 4, quick 2]")
@click.option("--timed", type=click.IntRange(1), help="Pictures a method, timed alone. [default: 4, quick 1]")
@click.option("--score", "scores", multiple=True, help="One more score, as clip=my_module:function; the function takes "
              "pictures (n, H, W, 3) uint8 and n prompts and returns n numbers.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the report and its runs. [default: "
              "out/report; with --continuous out/report-continuous]")
@sampling_options
def report(continuous, names, quick, images, timed, scores, out, seed, guidance, top_k, top_p, weights, device):
    """The papers' tables and figures on this model, beside the papers' own numbers.

    Every run is kept in the folder: after an interruption the same command goes on where it stopped.
    """
    from ..studies.write import chosen, judged, more_scores, scope_of, write_report

    command = " ".join(["specvis report", *given(but=("names", "out", "device"))])
    if continuous:
        continuous_report(names, quick, images, out or Path("out/report-continuous"), seed, guidance, weights, device,
                          command)
        return
    guidance = GUIDANCE if guidance is None else guidance
    items = chosen(names, quick)
    more_scores(scores)
    Sampling.of([seed], guidance=guidance, top_k=top_k, top_p=top_p)
    scope = scope_of(quick, images, timed, len(judged(weights)[0]))
    with goes_on():
        write_report(Pipeline.load(weights, device), weights, writable_folder(out or Path("out/report")), items, scope,
                     command=command, whole=not names, seed=seed, guidance=guidance, top_k=top_k, top_p=top_p)


def continuous_report(names, quick, images, out, seed, guidance, weights, device, command) -> None:
    """`report` of continuous tokens."""
    from ..studies.cspd import LEFT_OUT, scope_of, write_report
    from ..studies.write import chosen, judged

    refuse_filters("--continuous")
    for name, what in (("timed", "what is timed is timed in batches"), ("scores", "its pictures are too few to score")):
        if click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ValueError(f"{name.removesuffix('s')} must not be given with --continuous: {what}")
    items = chosen(names, quick, CONTINUOUS_ITEMS, LEFT_OUT)
    scope = scope_of(quick, images, guidance)
    ContinuousSampling(torch.tensor([seed]), scope.guidance)
    judged(weights)
    with goes_on():
        write_report(MARPair.load(weights, device), weights, writable_folder(out), items, scope, command=command,
                     whole=not names, seed=seed)


def given(but: tuple[str, ...]) -> list[str]:
    """The options that this command was given, as one would write them again; `but`: without these."""
    context = click.get_current_context()
    words = []
    for option in context.command.params:
        value = context.params[option.name]
        if option.name not in but and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
            words += [option.opts[0]] if option.is_flag else [
                f"{option.opts[0]} {one}" for one in (value if option.multiple else [value])]
    return words


@main.command()
@click.option("--target-tv", type=click.FloatRange(0, 1), help="The most total variation a token: the fidelity meter.")
@click.option("--target-speedup", type=click.FloatRange(0, min_open=True), help="The least speed-up.")
@click.option("--by", type=click.Choice(["tau", "seconds"]), default="tau",
              help="Speed-up is tokens per target forward, or seconds of single pictures on this machine.")
@click.option("--images", type=click.IntRange(4), default=16, help="Pictures that the last methods are judged by.")
@click.option("--out", type=click.Path(path_type=Path), default="out/tune", help="Folder for the table and its runs.")
@sampling_options
def tune(target_tv, target_speedup, by, images, out, seed, guidance, top_k, top_p, weights, device):
    """Find the fastest method within a budget of fidelity, or the most faithful that is fast enough.

    Every run is kept in the folder: after an interruption the same command goes on where it stopped.
    """
    from . import tune as search
    from ..studies.base import Study

    guidance = GUIDANCE if guidance is None else guidance
    if (target_tv is None) == (target_speedup is None):
        raise ValueError("give one of --target-tv and --target-speedup")
    Sampling.of([seed], guidance=guidance, top_k=top_k, top_p=top_p)
    study = Study(Pipeline.load(weights, device), writable_folder(out) / "runs", PROMPTS, images=images, seed=seed,
                  guidance=guidance, top_k=top_k, top_p=top_p)
    with goes_on():
        trials, chosen = search.tune(study, target_tv, target_speedup, pictures=images, by_seconds=by == "seconds")
    rows = search.rows_of(trials, chosen)
    search.write_trials(rows, out / "tune.csv")
    search.draw_trials(trials, chosen, target_tv, target_speedup, out / "tune.png")
    wide = max(len(row["method"]) for row in rows) + 1
    for row in [dict(zip(search.COLUMNS, search.COLUMNS)), *(row for row in rows if row["frontier"])]:
        click.echo(f"{row['method']:{wide}}" + "".join(f"{row[name]:>10}" for name in search.COLUMNS[1:6]))
    click.echo(f"(the frontier of {len(rows)} methods, temperature 1; TV meter: estimated total variation per token; "
               f"all in {out / 'tune.csv'})")
    if chosen is None:
        wanted = f"TV meter of {target_tv:g}" if target_tv is not None else f"speed-up of {target_speedup:g} by {by}"
        fastest = max(trials, key=lambda t: t.speed)
        raise click.ClickException(f"no method that was tried reaches a {wanted}; the fastest is "
                                   f"{fastest.method.label} at {fastest.speed:.2f}")
    click.echo(f"chosen: {chosen.method.label}, {by} {chosen.speed:.2f}, TV meter {chosen.tv:.4f} +- {chosen.error:.4f}"
               + "\n  " + " ".join(['specvis generate --prompt "red heart" --method', chosen.method.label, *given(
                   but=("target_tv", "target_speedup", "by", "images", "out", "seed"))]))


@contextmanager
def goes_on():
    """An interruption of work that is kept is no failure."""
    try:
        yield
    except KeyboardInterrupt:
        raise click.ClickException("interrupted; the same command goes on from here") from None


@main.command("methods")
def list_methods():
    """List the decoding methods, with their parameters."""
    for m in [*METHODS.values(), *CONTINUOUS.values()]:
        if m.name == next(iter(CONTINUOUS)):
            click.echo("\ncontinuous tokens:\n")
        click.echo(f"{m.name:18}{m.source}")
        shown = [f"{key} {written(value)}"
                 for key, value in parameters_of(m).items() if value is not None]
        for line in textwrap.wrap(", ".join(shown) or "no parameters", 100):
            click.echo(f"{'':18}{line}")
    click.echo("\nTo change some: --method lantern:delta=0.1:k=300, --methods vanilla,adt-tree:start=vertical\n")
    for name, what in (PARAMETERS | CONTINUOUS_PARAMETERS).items():
        click.echo(f"{name:21}{what}")
    click.echo()
    for name in TREES:
        tree = static_tree(name)
        click.echo(f"tree {name:24}{len(tree.parents) - 1} drafts on {tree.depth} levels")


@main.command()
def info():
    """Show which ops have which backends here, versions and devices."""
    from importlib.metadata import PackageNotFoundError, version

    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = ("oracle", "cpu", "triton", "cuda")
    click.echo(f"{'op':20}" + "".join(f"{name:>8}" for name in names))
    for op in specvis_kernels.ops():
        here = specvis_kernels.backends(op, device)
        click.echo(f"{op:20}" + "".join(f"{'yes' if name in here else '-':>8}" for name in names))
    click.echo(f"(for {device} tensors; Triton runs on a CPU only under its interpreter, TRITON_INTERPRET=1)\n")
    folder = Path(specvis_kernels.__file__).parent
    for name, file, use in (("C++ kernels", "_ops.so", ""),
                            ("CUDA kernels", "_ops_cuda.so", ", for a torch with CUDA")):
        click.echo(f"{name:20}" + (f"built{use}" if (folder / file).exists() else "not built"))
    for package in ("specvis_kernels", "torch", "triton", "numpy"):
        try:
            click.echo(f"{package:20}{version(package)}")
        except PackageNotFoundError:
            click.echo(f"{package:20}not installed")
    click.echo(f"{'python':20}{platform.python_version()}")
    click.echo(f"{'devices':20}cpu with {torch.get_num_threads()} threads"
               + "".join(f", {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())))


