"""`specvis generate`: pictures of a prompt, side by side, or a picture for each prompt of a file."""
import re
import time
from pathlib import Path

import click
import torch
from PIL import Image
from tqdm import tqdm

from ..decoding.methods import CONTINUOUS, METHODS, ContinuousMethod, parse_method
from .options import (
    is_exact,
    is_given,
    load_model,
    refuse_filters,
    sampling_for,
    sampling_options,
    writable_file,
    writable_folder,
)

STYLES = ("fluent-3d", "fluent-flat", "noto")  # the first words of the shipped model's captions


@click.command()
@click.option("--prompt", help='Words, e.g. "red heart"; a caption or the number of a class for a model of '
              "these.")
@click.option("--prompts", "file", type=click.Path(path_type=Path), metavar="FILE",
              help="In place of --prompt: a file with a prompt a line. Empty lines and those that begin with # are "
              "skipped. Each picture is a file of its own, written as soon as it is finished.")
@click.option("--batch", default=8, help="With --prompts: how many pictures are drawn at once. When one is finished, "
              "the next takes its place.")
@click.option("--style", type=click.Choice(STYLES), default=STYLES[0], help="Whose drawing style. "
              "The shipped model only.")
@click.option("--method", "name", default="jacobi",
              help=f"One of {', '.join([*METHODS, *CONTINUOUS])}; or NAME:PARAMETER=VALUE:..., "
              "see `specvis methods`.")
@click.option("--delta", type=float, help="The same as :delta=...")
@click.option("-k", type=int, help="The same as :k=...")
@click.option("--depth", type=int, help="The same as :depth=...")
@click.option("--width", type=int, help="The same as :width=...")
@click.option("--nodes", type=int, help="The same as :nodes=...")
@click.option("-n", "count", default=1, help="How many pictures of a prompt.")
@click.option("--temperature", default=1.0, help="0 always takes the likeliest token.")
@click.option("--scale", type=int, show_default="4 for the shipped model, 1 for pictures of 256 pixels and more",
              help="Enlarge the picture by this factor.")
@click.option("--out", type=click.Path(path_type=Path), show_default="specvis.png; with --prompts the folder pictures",
              help="The picture to write; with --prompts a folder for them.")
@click.option("--text-encoder", type=click.Path(path_type=Path), help="Folder with FLAN-T5-XL, for a model whose "
              "prompts are captions. [default: the one given to specvis convert]")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32",
              help="Of the weights in memory. Discrete tokens only.")
@sampling_options
def generate(prompt, file, batch, style, name, delta, k, depth, width, nodes, count, temperature, scale, out,
             text_encoder, dtype, seed, guidance, top_k, top_p, model, device):
    """Draw pictures of a prompt, side by side, or of each prompt of a file.

    What a method's parameters are, and their defaults: specvis methods.
    """
    if (prompt is None) == (file is None):
        raise ValueError("one of --prompt and --prompts must be given" + (", not both" if file else ""))
    if prompt is not None and not prompt.split():
        raise ValueError("prompt must have at least one word")
    if count < 1:
        raise ValueError(f"n must be at least 1, got {count}")
    if scale is not None and scale < 1:
        raise ValueError(f"scale must be at least 1, got {scale}")
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    if prompt is not None and is_given("batch"):
        raise ValueError("batch must not be given with --prompt: its pictures are drawn all at once")
    method = parse_method(name, delta=delta, k=k, depth=depth, width=width, nodes=nodes)
    if isinstance(method, ContinuousMethod):
        refuse_filters(method.name)
        if file:
            raise ValueError(f"prompts must not be given with {method.name}: continuous tokens take --prompt only")
        for option in ("text_encoder", "dtype"):
            if is_given(option):
                raise ValueError(f"{option} must not be given with {method.name}: it is for discrete tokens")
    lines = read_prompts(file) if file else {0: prompt}
    total = len(lines) * count
    sampling = sampling_for(method, list(range(seed, seed + total)), guidance, temperature, top_k, top_p, model, device)
    if not file:
        out = writable_file(out or Path("specvis.png"))
    options = {} if isinstance(method, ContinuousMethod) else {"dtype": getattr(torch, dtype),
                                                               "text_encoder": text_encoder}
    pipeline = load_model(type(method), model, device, **options)
    if pipeline.words is None and is_given("style"):
        raise ValueError(f"style must not be given with the model in {model}: it was not trained with these")
    names = [words for words in lines.values() for _ in range(count)]
    prompts = [f"{style} {words}" for words in names] if pipeline.words else names
    for line, words in zip(lines, prompts[::count]):  # bad input is found before the bar and the clock start
        try:
            pipeline.prompts.encode([words])
        except ValueError as error:
            raise ValueError(f"{file}, line {line}: {error}" if file else error) from error
    pipeline.check(method)
    if file:
        out = writable_folder(out or Path("pictures"))

    start, finished = time.perf_counter(), []
    with tqdm(total=total * pipeline.num_tokens, unit="token", desc=method.label, disable=None) as bar:
        def write(requests, images):
            for i, picture, fails in zip(requests, pipeline.pictures(images.tokens), images.failed.tolist()):
                if not fails:
                    finished.append(i)
                    save(side_by_side([picture], scale), out / file_name(i + 1, total, names[i]))
            bar.set_postfix_str(f"{len(finished)} of {total} pictures")

        queue = {"batch": batch, "finished": write} if file else {}
        decoded = pipeline.tokens(prompts, method, sampling, bar.update, **queue)
    seconds = time.perf_counter() - start

    failed = decoded.failed.tolist()
    for i, fails in enumerate(failed):
        if fails:
            which = f"{i + 1:03}, {names[i]!r}" if file else i
            click.echo(f"picture {which} (seed {seed + i}) ended early: the model's output was not finite", err=True)
    if all(failed):
        raise click.ClickException("no picture was finished; nothing was written")
    if not file:
        pictures = pipeline.pictures(decoded.tokens)
        finished = [picture for picture, fails in zip(pictures, failed) if not fails]
        save(side_by_side(finished, scale), out)
    seeds = f"seed {seed}" if total == 1 else f"seeds {seed} to {seed + total - 1}"
    click.echo(f"{out}: {len(finished)} of {total} pictures, {seconds:.1f} s, "
               + (f"{len(finished) / seconds:.2f} pictures a second, " if file else "")
               + f"{decoded.target_forwards.float().mean():.0f} target forwards a picture, "
               f"tau {decoded.tau.nanmean():.2f} tokens a forward"
               + (f"; vanilla draws the same tokens with {seeds}"
                  if is_exact(method, temperature) and not method.is_baseline and not any(failed) else ""))


def read_prompts(file: Path) -> dict[int, str]:
    """The prompts of a file by the numbers of their lines; empty lines and those that begin with # are none."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ValueError(f"prompts must be a text file that can be read, got {file}: {why}") from error
    prompts = {number: line.strip() for number, line in enumerate(lines, 1)
               if line.strip() and not line.strip().startswith("#")}
    if not prompts:
        raise ValueError(f"prompts must be a file with at least one prompt, got {file}")
    return prompts


def file_name(number: int, total: int, prompt: str) -> str:
    """Of the picture with this number, out of so many: 001-words-of-the-prompt.png."""
    words = re.sub(r"[\W_]+", "-", prompt.lower()).strip("-")[:60]
    return f"{number:0{max(3, len(str(total)))}}-{words}".rstrip("-") + ".png"


def side_by_side(pictures: list[Image.Image], scale: int | None) -> Image.Image:
    side = pictures[0].width * (scale or max(1, 256 // pictures[0].width))
    row = Image.new("RGB", (side * len(pictures), side), "white")
    for i, picture in enumerate(pictures):
        row.paste(picture.resize((side, side), Image.Resampling.BICUBIC), (i * side, 0))
    return row


def save(image: Image.Image, path: Path) -> None:
    """Write beside the goal first, so that an interruption leaves no half of a picture."""
    part = path.with_name(f".{path.name}.part")
    image.save(part, format=Image.registered_extensions()[path.suffix.lower()])
    part.replace(path)
