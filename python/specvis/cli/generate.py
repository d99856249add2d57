"""`specvis generate`: pictures of a prompt, side by side, or a picture for each prompt of a file."""
import math
import re
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import click
import numpy as np
import torch
from PIL import Image, ImageOps

from ..decoding.methods import CONTINUOUS, METHODS, ContinuousMethod, Method, parse_method
from ..files import first_line, locked, write_whole
from ..pipelines.checkpoint import FAMILY_FILES, fingerprint
from ..pipelines.discrete import Pipeline
from ..pipelines.families import FAMILIES
from ..terminal import printable
from . import options
from .animation import MAX_ANIMATED, draw_animation
from .manifest import Manifest
from .many import SHOWN, Drawing, Picture, PictureRequest, draw_here, encoded, enlarged, scale_for
from .progress import ProgressBar
from .workers import draw_by_workers

WITH_FILE = ("batch", "workers", "cpus_per_worker", "gpus_per_worker", "page")  # options that go with --prompts alone
MAX_PICTURES = 1_000_000  # a command draws no more
MAX_SCALE, MAX_BATCH, MAX_WORKERS = 1024, 1024, 1024


@click.command()
@click.option("--prompt", help='Words, e.g. "red heart" or "noto red heart"; for a model of these a caption, or a '
              "class's number or ImageNet's name of it.")
@click.option("--prompts", "file", type=click.Path(path_type=Path), metavar="FILE",
              help="In place of --prompt: a file with a prompt a line. Empty lines and those that begin with # are "
              "skipped. Each picture is a file of its own, written as soon as it is finished; the same command draws "
              "what is missing.")
@click.option("--batch", type=click.IntRange(1, MAX_BATCH), default=8,
              help="With --prompts: how many pictures are drawn at once. When one is finished, the next takes its "
              "place.")
@click.option("--workers", type=click.IntRange(0, MAX_WORKERS), default=0,
              help="With --prompts: how many processes draw, each with a model of its own, on Ray. 0: this one alone, "
              "without Ray. The pictures are the same, but for rounding.")
@click.option("--cpus-per-worker", type=click.FloatRange(0, min_open=True), show_default="its part of all",
              help="Of --workers, as Ray counts them; and threads.")
@click.option("--gpus-per-worker", type=click.FloatRange(0), show_default="1 where --device is cuda",
              help="Of --workers. 0.5: two of them share a GPU.")
@click.option("--page", is_flag=True, help="With --prompts: write index.html, which shows the folder's pictures with "
              "their prompts and seeds, and sheet.png, all of them in one picture.")
@options.style_option
@click.option("--method", "name", default="jacobi",
              help=f"One of {', '.join([*METHODS, *CONTINUOUS])}; or NAME:PARAMETER=VALUE:..., "
              "see `specvis methods`.")
@click.option("-n", "count", type=click.IntRange(1, options.MAX_COUNT), default=1,
              help="How many pictures of each prompt (in compare: of each method).")
@click.option("--temperature", type=float, show_default="what the model's folder or family says (the shipped "
              "model's 0.5), or 1; 1 for continuous tokens",
              help="0 always takes the likeliest token.")
@click.option("--scale", type=click.IntRange(1, MAX_SCALE),
              show_default="4 for the shipped model, 1 for pictures of 256 pixels and more",
              help="Enlarge the picture by this factor.")
@click.option("--out", type=click.Path(path_type=Path), show_default="specvis.png; with --prompts the folder pictures",
              help="The picture to write, or its codes, NAME.npy; with --prompts a folder for pictures.")
@click.option("--animate", type=click.Path(path_type=Path), metavar="FILE.gif",
              help="In place of --out: a film of vanilla and the method drawing the same pictures, at one clock of "
              "target forwards.")
@click.option("--known", metavar="FILE:ROWS", help="With --prompt: complete a picture, whose first ROWS rows of "
              "tokens are kept. FILE has its codes, as --out NAME.npy writes them, or is a picture, whose middle "
              "square is encoded.")
@click.option("--text-encoder", type=click.Path(path_type=Path), help="Folder with FLAN-T5-XL, for a model whose "
              "prompts are captions. [default: the one given to specvis convert]")
@options.dtype_option
@options.sampling_options
def generate(prompt, file, batch, workers, cpus_per_worker, gpus_per_worker, page, style, name, count, temperature,
             scale, out, animate, known, text_encoder, dtype, seed, filters, model, device):
    """Draw pictures of a prompt, side by side, or of each prompt of a file.

    What a method's parameters are, and their defaults: specvis methods NAME.
    """
    if (prompt is None) == (file is None):
        raise ValueError("one of --prompt and --prompts must be given" + (", not both" if file else ""))
    if prompt is not None and not prompt.split():
        raise ValueError("prompt must have at least one word")
    if prompt is not None and (given := [option for option in WITH_FILE if options.is_given(option)]):
        raise ValueError(f"{given[0]} must not be given with --prompt: its pictures are drawn all at once")
    for option, value in (("cpus_per_worker", cpus_per_worker), ("gpus_per_worker", gpus_per_worker)):
        if value is not None and not workers:
            raise ValueError(f"{option} must not be given without --workers")
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{option} must be finite, got {value}")
        if value is not None and value > 1 and value % 1:
            raise ValueError(f"{option} must be at most 1 or a whole number, got {value}")
    if workers and device.startswith("cuda:"):
        raise ValueError(f"device must be cuda where there are workers, each of which sees its own GPU, got {device}")
    method = parse_method(name, model.methods())
    model.check(method)
    if model.family and style is not None:
        raise ValueError(f"style must not be given with --family {model.family}, whose prompts are free text")
    if known and (file or animate or model.family or isinstance(method, ContinuousMethod)):
        raise ValueError("known must be given with --prompt and discrete tokens, without --animate and --family")
    if animate:
        if given := [option for option in ("out", *WITH_FILE) if options.is_given(option)]:
            raise ValueError(f"{given[0]} must not be given with --animate: its pictures are drawn all at once")
        if isinstance(method, ContinuousMethod) or method.is_baseline:
            raise ValueError(f"method must be one of discrete tokens other than vanilla with --animate, got {name}")
        if options.format_of(animate) != "GIF":
            raise ValueError(f"animate must end in .gif, got {animate}")
    if isinstance(method, ContinuousMethod):
        options.refuse_filters(method.name)
        if out and out.suffix == options.CODES:
            raise ValueError(f"out must be a picture with {method.name}, whose tokens are no codes, got {out}")
        for option in ("text_encoder", "dtype"):
            if options.is_given(option):
                raise ValueError(f"{option} must not be given with {method.name}: it is for discrete tokens")
        filters |= {"guidance": model.settings().continuous_guidance(filters["guidance"]),
                    "temperature": 1.0 if temperature is None else temperature}
    else:
        filters = model.filters(filters, temperature)
    drawing = Drawing(file, model.absolute(), text_encoder and text_encoder.absolute(), dtype, device,
                      style, method, scale=scale, batch=batch,
                      batch_invariant=click.get_current_context().meta["batch_invariant"], **filters)
    lines = read_prompts(file) if file else {0: prompt}
    if len(lines) * count > MAX_PICTURES:
        raise ValueError(f"n must give at most {MAX_PICTURES} pictures, got {count} of each of {len(lines)} prompts")
    requests = [PictureRequest(i, *line, seed + i) for i, line in
                enumerate(line for line in lines.items() for _ in range(count))]
    drawing.sampling(requests)  # settings out of their range are found before the model is read
    at_once = min(batch, len(requests)) if file else len(requests)
    drawing = replace(drawing, method=method.with_window(device, at_once))
    if animate:
        if len(requests) > MAX_ANIMATED:
            raise ValueError(f"animate must be given with at most {MAX_ANIMATED} pictures, got {len(requests)}")
        draw_animation(drawing, requests, options.writable_file(animate, "animate"))
    elif file:
        many(drawing, requests, out or Path("pictures"), workers, cpus_per_worker, gpus_per_worker,
             settings_of(drawing, method, seed, count), page)
    else:
        side_by_side(drawing, requests, options.writable_file(out or Path("specvis.png")), known)


def side_by_side(drawing: Drawing, requests: list[PictureRequest], out: Path, known: str | None) -> None:
    """Draw pictures of one prompt, as one picture. `known`: see `known_rows`."""
    pipeline, start, method = drawing.load(requests), time.perf_counter(), drawing.method
    keeps_codes = out.suffix == options.CODES
    side = pipeline.side * scale_for(pipeline.side, drawing.scale)
    options.check_picture(side * len(requests), side, "PNG" if keeps_codes else options.format_of(out))
    kept = {"known_tokens": known_rows(known, pipeline, len(requests))} if known else {}
    num_drawn = pipeline.num_tokens - sum(tokens.shape[1] for tokens in kept.values())
    with ProgressBar(len(requests) * num_drawn, "token", method.label) as bar:
        decoded = pipeline.tokens([drawing.text(request, pipeline) for request in requests], method,
                                  drawing.sampling(requests), bar.update, **kept)
    failed = decoded.failed.tolist()
    for i, fails in enumerate(failed):
        if fails:
            say_failed(str(i), requests[i].seed)
    if all(failed):
        raise click.ClickException("no picture was finished; nothing was written")
    verb = "overwrote" if out.exists() else "wrote"
    out.parent.mkdir(parents=True, exist_ok=True)
    tokens = decoded.tokens[~decoded.failed.to(decoded.tokens.device)]
    if keeps_codes:
        codes = pipeline.on_grid(tokens).cpu().numpy()
        write_whole(out, partial(np.save, arr=codes))
    else:
        row = Image.new("RGB", (side * len(tokens), side), "white")
        with ProgressBar(len(tokens), "picture", "decoding pictures") as bar:
            for i in range(len(tokens)):
                row.paste(enlarged(pipeline.pictures(tokens[i: i + 1])[0], drawing.scale), (i * side, 0))
                bar.update()
        write_whole(out, encoded(row, options.format_of(out)))
    kind = f"codes of {codes.shape[1]} x {codes.shape[2]}" if keeps_codes else size(pipeline.side, drawing.scale)
    click.echo(f"{verb} {out}: {len(tokens)} of {len(requests)} pictures, {kind}, "
               f"drawn and written in {time.perf_counter() - start:.1f} s, "
               + told(drawing, requests, decoded.target_forwards, decoded.tau, known))


def known_rows(known: str, pipeline: Pipeline, count: int) -> torch.Tensor:
    """The tokens (count, K) int64 of the first rows of a picture, "FILE:ROWS". FILE is a picture, or has codes."""
    file, _, rows = known.rpartition(":")
    grid = pipeline.gpt.config.grid
    if not file or not rows.isdecimal() or not 1 <= int(rows) < grid:
        raise ValueError(f"known must be FILE:ROWS, with 1 to {grid - 1} of the {grid} rows of tokens, got {known}")
    try:
        if file.endswith(options.CODES):
            codes = torch.from_numpy(np.asarray(np.load(file, allow_pickle=False)).astype(np.int64, casting="safe"))
        else:
            picture = Image.open(file).convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    except (OSError, EOFError, SyntaxError, TypeError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"known must be a picture or a file of codes, got {file}: {first_line(error)}") from error
    if not file.endswith(options.CODES):
        pixels = torch.from_numpy(np.array(ImageOps.fit(picture, (pipeline.side, pipeline.side))))
        codes = pipeline.on_grid(pipeline.tokenizer.encode(
            pixels.permute(2, 0, 1)[None].to(pipeline.device, pipeline.dtype) / 127.5 - 1))
    if codes.shape[1:] != (grid, grid) or len(codes) not in (1, count):
        raise ValueError(f"known must have codes ({' or '.join(map(str, sorted({1, count})))}, {grid}, {grid}), "
                         f"got {tuple(codes.shape)} in {file}")
    if not ((codes >= 0) & (codes < pipeline.gpt.config.vocabulary)).all():
        raise ValueError(f"known must have codes in [0, {pipeline.gpt.config.vocabulary}), got others in {file}")
    return codes[:, :int(rows)].flatten(1).expand(count, -1).to(pipeline.device)


def many(drawing: Drawing, requests: list[PictureRequest], out: Path, workers: int, cpus: float | None,
         gpus: float | None, settings: dict, page: bool) -> None:
    """Draw each picture that is not in the folder `out` yet."""
    manifest = Manifest(out, settings, requests)
    missing, new, lost = [request for request in requests if request.index not in manifest.drawn], [], {}
    num_before, start, lock = len(manifest.drawn), 0.0, ExitStack()

    def begin():
        nonlocal start
        start = time.perf_counter()
        lock.enter_context(locked(options.writable_folder(out)))
        if Manifest(out, settings, requests).drawn.keys() != manifest.drawn.keys():
            raise ValueError(f"out must be a folder that no other command writes to, got {out}: one has drawn pictures "
                             "there just now; the same command draws what is still missing")
        manifest.begin()

    def keep(picture: Picture):
        manifest.add(picture, file_name(picture.request.index + 1, len(requests), picture.request.prompt))
        new.append(picture)

    with options.resumable(), lock:
        if not missing:
            pass
        elif workers:
            lost = draw_by_workers(drawing, missing, begin, keep, num_workers=workers, cpus=cpus, gpus=gpus)
        else:
            draw_here(drawing, missing, begin, keep)
        if page and manifest.drawn:
            manifest.write_page()
    seconds = time.perf_counter() - start

    for request in sorted(picture.request for picture in new if picture.failed):
        say_failed(f"{request.index + 1:03}, {request.prompt!r}", request.seed)
    for index, reason in sorted(lost.items())[:SHOWN]:
        click.echo(printable(f"picture {index + 1:03}, {requests[index].prompt!r} (seed {requests[index].seed}) was "
                             f"given up: {reason}"), err=True)
    if new and not manifest.drawn:
        raise click.ClickException("no picture was finished")
    line = f"{out}: {len(manifest.drawn)} of {len(requests)} pictures"
    if num_before:
        line += f" ({num_before} were there)"
    if new:
        rate = sum(not picture.failed for picture in new) / seconds
        target_forwards, tau = (torch.tensor([getattr(picture, name) for picture in new])
                                for name in ("target_forwards", "tau"))
        line += (f", {size(new[0].side, drawing.scale)}, drawn and written in {seconds:.1f} s, {rate:.2f} pictures a "
                 "second, "
                 + told(drawing, requests, target_forwards, tau))
    click.echo(line)
    if lost:
        raise click.ClickException(f"{len(lost)} pictures were given up; the same command tries them again")


def size(side: int, scale: int | None) -> str:
    """How large the pictures are, and how much larger than the model drew them."""
    scale = scale_for(side, scale)
    return f"{side} x {side} pixels" + (f" enlarged {scale} times" if scale > 1 else "")


def told(drawing: Drawing, requests: list[PictureRequest], target_forwards: torch.Tensor, tau: torch.Tensor,
         known: str | None = None) -> str:
    """What was saved, and whether the pictures are the baseline's."""
    is_the_baselines = (options.is_exact(drawing.method, drawing.temperature) and not drawing.method.is_baseline
                        and not tau.isnan().any())
    return (f"by {drawing.method.label}, {target_forwards.float().mean():.0f} target forwards a picture, "
            f"tau {tau.nanmean():.2f} tokens a forward"
            + (f"; same picture{'s' * (len(requests) > 1)} as --method vanilla --seed {requests[0].seed}"
            + (f" --known {known}" if known else "")
               if is_the_baselines else ""))


def say_failed(which: str, seed: int) -> None:
    click.echo(printable(f"picture {which} (seed {seed}) ended early: the model's output was not finite"), err=True)


def settings_of(drawing: Drawing, method: Method | ContinuousMethod, seed: int, count: int) -> dict:
    """What the pictures of a folder have in common. The device is not among it, nor how many are drawn at once; what
    `method` is with the window for these is only noted. What pipeline.json says is here in numbers."""
    encoder, files = drawing.text_encoder or drawing.model.settings().text_encoder, drawing.model
    settings = {"specvis": version("specvis")} | vars(drawing) | {
        "model": fingerprint(files.model, but=("pipeline.json",)), "folder": str(files.model), "method": method.label,
        "min_p": drawing.min_p or None,  # as in a folder that was begun before there was one
        "drawn_by": drawing.method.label, "seed": seed, "n": count,
        "text_encoder": encoder and fingerprint(Path(encoder))}
    if files.family:
        settings |= {"family": files.family, "image_size": files.image_size or FAMILIES[files.family].image_size}
        settings |= {name: path and fingerprint(path, known_files=FAMILY_FILES) for name, path in (
            ("model", files.model), ("draft", files.draft), ("vq", files.vq))}
    return {name: value for name, value in settings.items() if name not in ("file", "device", "batch")}


def read_prompts(file: Path) -> dict[int, str]:
    """The prompts of a file by the numbers of their lines, without empty lines and lines that begin with #."""
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
    """The name of picture `number` of `total`: 001-words-of-the-prompt.png."""
    words = re.sub(r"[\W_]+", "-", prompt.lower()).strip("-")[:60]
    return f"{number:0{max(3, len(str(total)))}}-{words}".rstrip("-") + ".png"
