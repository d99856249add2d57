"""A picture for each prompt of a file: which ones, by which settings, and how one process draws them.

A picture depends on its prompt, its seed and the settings. It does not depend on the pictures that are drawn beside
it, so any process may draw any part of them (see `workers`).
"""
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from ..decoding.methods import ContinuousMethod, Method
from ..pipelines.discrete import Pipeline
from ..pipelines.mar import MARPair
from ..pipelines.prompts import with_style
from .options import ModelFiles, check_picture, sampling_for
from .progress import ProgressBar

PIECE = 32  # so many batches of requests are given to the model at once: conditions take memory
SHOWN = 20  # wrong lines of a file, or pictures that were not drawn, are named


@dataclass(frozen=True, order=True)
class PictureRequest:
    """One picture that is wanted."""

    index: int   # among all pictures, from 0
    line: int    # its line in the file of prompts, from 1
    prompt: str  # as it is there
    seed: int


@dataclass(frozen=True)
class Picture:
    """One picture that is drawn."""

    request: PictureRequest
    png: bytes | None     # None: it ended early, since the model's output was not finite
    target_forwards: int
    tau: float            # tokens per target forward; NaN if it ended early
    side: int             # pixels, before it is enlarged

    @property
    def failed(self) -> bool:
        return self.png is None


@dataclass(frozen=True)
class Drawing:
    """The model and the settings by which pictures are drawn."""

    file: Path | None  # it has the prompts
    model: ModelFiles
    text_encoder: Path | None  # None: the model's own, if it needs one
    dtype: str
    device: str
    style: str | None  # for prompts without a style; None: the model's first, if it has any
    method: Method | ContinuousMethod
    temperature: float
    guidance: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    scale: int | None  # None: so that pictures have at least 256 pixels a side
    batch: int
    batch_invariant: bool = False

    @property
    def is_continuous(self) -> bool:
        return isinstance(self.method, ContinuousMethod)

    def load(self, requests: list[PictureRequest]) -> Pipeline | MARPair:
        """The model. ValueError if it cannot be read, or names the lines of prompts that it cannot take."""
        options = {} if self.is_continuous else {"dtype": getattr(torch, self.dtype), "text_encoder": self.text_encoder}
        pipeline = self.model.load(type(self.method), self.device, **options)
        with_style("", pipeline.prompts.styles, self.style)  # an unknown style is reported once, not for each line
        wrong = []
        for line, request in {request.line: request for request in requests}.items():
            try:
                pipeline.prompts.encode([self.text(request, pipeline)])
            except ValueError as error:
                wrong.append(f"line {line}: {error}" if self.file else str(error))
            if len(wrong) == SHOWN:
                wrong.append(f"these are the first {SHOWN} wrong lines")
                break
        if wrong:
            raise ValueError((f"{self.file}, " if self.file else "") + "; ".join(wrong))
        pipeline.check(self.method)
        check_picture(*2 * [pipeline.side * scale_for(pipeline.side, self.scale)])
        return pipeline

    def text(self, request: PictureRequest, pipeline: Pipeline | MARPair) -> str:
        """What the model reads."""
        return with_style(request.prompt, pipeline.prompts.styles, self.style, default=True)

    def sampling(self, requests: list[PictureRequest]):
        filters = dict(guidance=self.guidance, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)
        return sampling_for(self.method, [request.seed for request in requests], filters, self.temperature, self.model,
                            self.device)


def draw(pipeline: Pipeline | MARPair, drawing: Drawing, requests: list[PictureRequest],
         keep: Callable[[Picture], None], progress: Callable[[int], None] | None = None) -> None:
    """Draw these pictures. `keep` gets each as soon as it is finished."""
    size = drawing.batch * (1 if drawing.is_continuous else PIECE)
    for start in range(0, len(requests), size):
        piece = requests[start: start + size]

        def finished(numbers, images, piece=piece):
            accounts = zip(numbers, images.tokens, images.failed.tolist(), images.target_forwards.tolist(),
                           images.tau.tolist())
            for i, tokens, fails, target_forwards, tau in accounts:
                # one by one: a batch of pictures may be rounded in another way than each of them
                png = None if fails else encoded(enlarged(pipeline.pictures(tokens[None])[0], drawing.scale))
                keep(Picture(piece[i], png, target_forwards, tau, pipeline.side))

        prompts = [drawing.text(request, pipeline) for request in piece]
        arguments = prompts, drawing.method, drawing.sampling(piece), progress
        if drawing.is_continuous:  # all its images finish in one step
            finished(range(len(piece)), pipeline.tokens(*arguments))
        else:
            pipeline.tokens(*arguments, batch=drawing.batch, finished=finished)


def draw_here(drawing: Drawing, requests: list[PictureRequest], begin: Callable[[], None],
              keep: Callable[[Picture], None]) -> None:
    """Draw them in this process. `begin` is called when the model and all prompts are known to be right."""
    pipeline = drawing.load(requests)
    begin()
    # tokens do not say how long pixels take: of a large model's last batch they take longer than the tokens
    with (ProgressBar(len(requests) * pipeline.num_tokens, "token", drawing.method.label) as drawn,
          ProgressBar(len(requests), "picture", "finished") as finished):
        def then(picture):
            keep(picture)
            finished.update()

        draw(pipeline, drawing, requests, then, drawn.update)


def scale_for(side: int, scale: int | None) -> int:
    """The factor by which pictures of `side` pixels a side are enlarged: as given, or up to 256 pixels."""
    return scale or max(1, 256 // side)


def enlarged(picture: Image.Image, scale: int | None) -> Image.Image:
    scale = scale_for(picture.width, scale)
    return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.BICUBIC)


def encoded(picture: Image.Image, format: str = "PNG") -> bytes:
    """The file of a picture."""
    file = io.BytesIO()
    picture.save(file, format)
    return file.getvalue()
