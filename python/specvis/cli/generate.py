"""`specvis generate`: pictures of a prompt, side by side."""
import time
from pathlib import Path

import click
from PIL import Image
from tqdm import tqdm

from ..decoding.methods import CONTINUOUS, METHODS, ContinuousMethod, parse_method
from ..pipelines.discrete import Pipeline
from ..pipelines.mar import MARPair
from .options import is_exact, refuse_filters, sampling_for, sampling_options, writable_file

STYLES = ("fluent-3d", "fluent-flat", "noto")  # the first words of the shipped model's captions


@click.command()
@click.option("--prompt", required=True, help='Words, e.g. "red heart".')
@click.option("--style", type=click.Choice(STYLES), default=STYLES[0], help="Whose drawing style.")
@click.option("--method", "name", default="jacobi",
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
    method = parse_method(name, delta=delta, k=k, depth=depth, width=width, nodes=nodes)
    if isinstance(method, ContinuousMethod):
        refuse_filters(method.name)
    sampling = sampling_for(method, list(range(seed, seed + count)), guidance, temperature, top_k, top_p, device)
    writable_file(out)
    pipeline = (MARPair if isinstance(method, ContinuousMethod) else Pipeline).load(weights, device)
    prompts = [f"{style} {prompt}"] * count
    pipeline.words.encode(prompts[:1])  # bad input is found before the bar and the clock start
    pipeline.check(method)

    start = time.perf_counter()
    with tqdm(total=count * pipeline.num_tokens, unit="token", desc=method.label, disable=None) as bar:
        decoded = pipeline.tokens(prompts, method, sampling, bar.update)
    seconds = time.perf_counter() - start

    failed = decoded.failed.tolist()
    finished = [picture for picture, fails in zip(pipeline.pictures(decoded.tokens), failed) if not fails]
    for i, fails in enumerate(failed):
        if fails:
            click.echo(f"picture {i} (seed {seed + i}) ended early: the model's output was not finite", err=True)
    if not finished:
        raise click.ClickException("no picture was finished; nothing was written")
    save(side_by_side(finished, scale), out)
    seeds = f"seed {seed}" if count == 1 else f"seeds {seed} to {seed + count - 1}"
    click.echo(f"{out}: {len(finished)} of {count} pictures, {seconds:.1f} s, "
               f"{decoded.target_forwards.float().mean():.0f} target forwards a picture, "
               f"tau {decoded.tau.nanmean():.2f} tokens a forward"
               + (f"; the same tokens as vanilla's by {seeds}"
                  if is_exact(method, temperature) and not method.is_baseline and not any(failed) else ""))


def side_by_side(pictures: list[Image.Image], scale: int) -> Image.Image:
    side = pictures[0].width * scale
    row = Image.new("RGB", (side * len(pictures), side), "white")
    for i, picture in enumerate(pictures):
        row.paste(picture.resize((side, side), Image.Resampling.BICUBIC), (i * side, 0))
    return row


def save(image: Image.Image, path: Path) -> None:
    """Write beside the goal first, so that an interruption leaves no half of a picture."""
    part = path.with_name(f".{path.name}.part")
    image.save(part, format=Image.registered_extensions()[path.suffix.lower()])
    part.replace(path)
