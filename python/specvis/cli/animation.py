"""`specvis generate --animate`: plain decoding and a method draw the same pictures, at one clock of target forwards."""
import io
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import click
import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ..decoding.decoded import Decoded
from ..decoding.methods import METHODS
from ..files import write_whole
from ..pipelines.positions import forward_numbers
from .many import Drawing, PictureRequest, enlarged
from .options import check_picture
from .progress import Steps

MAX_ANIMATED = 16     # pictures in a row
SIDE = 128            # pixels of a picture, at least, where no --scale is given
FRAMES = 128          # at most, until the slower one has finished
SHOWN, LAST = 60, 3000  # milliseconds that a frame is shown, and the last one
TRANSPARENT = 255     # the color of what has not changed
UNKNOWN = 225         # the gray of tokens that no forward has drawn
GAP, LINE = 6, 22     # pixels between the pictures, and of a line of text


def draw_animation(drawing: Drawing, requests: list[PictureRequest], out: Path) -> None:
    """Draw the pictures by the baseline and by the method, and write how they came to be."""
    pipeline, rows = drawing.load(requests), {}
    prompts, sampling = [drawing.text(request, pipeline) for request in requests], drawing.sampling(requests)
    scale = drawing.scale or max(1, SIDE // pipeline.side)
    check_picture(len(requests) * scale * pipeline.side, 2 * scale * pipeline.side)
    with Steps(2) as progress:
        for method in (METHODS["vanilla"], drawing.method):
            progress.begin(method.label, len(requests) * pipeline.num_tokens)
            decoded = pipeline.tokens(prompts, method, sampling, progress.update)
            if decoded.failed.any():
                raise click.ClickException("the model's output was not finite; nothing was written")
            rows[method.label] = decoded, [enlarged(picture, scale) for picture in pipeline.pictures(decoded.tokens)]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, animation(rows, pipeline.on_grid))
    forwards = ", ".join(f"{label} {decoded.target_forwards.max()}" for label, (decoded, _) in rows.items())
    click.echo(f"{out}: {len(requests)} pictures; target forwards: {forwards}")


def animation(rows: dict[str, tuple[Decoded, list[Image.Image]]], on_grid: Callable[[Tensor], Tensor]) -> bytes:
    """A GIF with a row of pictures for each label. A token is shown from the forward on that drew it, as in the
    finished picture.

    rows: label -> what was decoded, and its B pictures, all of one size; on_grid: see `Pipeline.on_grid`
    """
    numbers = {label: on_grid(forward_numbers(decoded.num_accepted.cpu())) for label, (decoded, _) in rows.items()}
    last = max(int(number.max()) for number in numbers.values()) + 1
    step = -(-last // FRAMES)
    clock = [*range(1, last, step), last]
    frames = [frame({label: (number < now, rows[label][1], min(now, int(number.max()) + 1))
                     for label, number in numbers.items()}) for now in clock]
    # one palette, and what has not changed since the frame before is transparent: most of a frame takes no bytes
    palette = frames[-1].quantize(TRANSPARENT)
    indices = [np.asarray(image.quantize(palette=palette, dither=Image.Dither.NONE)) for image in frames]
    changes = [indices[0], *(np.where(now == before, np.uint8(TRANSPARENT), now) for before, now in pairwise(indices))]
    films = [Image.fromarray(change).convert("P") for change in changes]
    for film in films:
        film.putpalette(palette.getpalette())
    file = io.BytesIO()
    films[0].save(file, "GIF", save_all=True, append_images=films[1:], loop=0, optimize=False, disposal=1,
                  transparency=TRANSPARENT, duration=[SHOWN] * (len(films) - 1) + [LAST])
    return file.getvalue()


def frame(rows: dict[str, tuple[Tensor, list[Image.Image], int]]) -> Image.Image:
    """One frame: for each label, which tokens (B, grid, grid) bool are drawn, the pictures, and after how many
    forwards."""
    side, count = next((pictures[0].width, len(pictures)) for _, pictures, _ in rows.values())
    image = Image.new("RGB", (count * (side + GAP) + GAP, len(rows) * (side + GAP + LINE) + GAP), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")), 14)
    for number, (label, (known, pictures, now)) in enumerate(rows.items()):
        top, finished = number * (side + GAP + LINE) + GAP, bool(known.all())
        draw.text((GAP, top), f"{label}: {now} forwards" + ", finished" * finished, "black", font)
        for i, picture in enumerate(pictures):
            mask = Image.fromarray(known[i].numpy().astype(np.uint8) * 255)
            mask = mask.resize(picture.size, Image.Resampling.NEAREST)
            place = GAP + i * (side + GAP), top + LINE
            image.paste((UNKNOWN,) * 3, (*place, place[0] + side, place[1] + side))
            image.paste(picture, place, mask)
    return image
