"""Options that several commands share, and the checks of their values."""
import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

import click
import torch
from click.core import ParameterSource
from PIL import Image

from ..decoding.continuous_state import ContinuousSampling
from ..decoding.methods import ContinuousMethod, Method
from ..decoding.sampling import Sampling
from ..interrupts import quiet
from ..models.words import STYLES
from ..pipelines.checkpoint import CONTINUOUS_GUIDANCE, FILTERS, ModelSettings, check_device, read_settings
from ..pipelines.discrete import SHIPPED, Pipeline
from ..pipelines.families import FAMILIES, FamilyPipeline, found
from ..pipelines.invariant import batch_invariant
from ..pipelines.mar import MARPair
from .commands import Interrupted

MAX_COUNT = 1000  # pictures of a prompt or of a method; all may be decoded at once
MAX_SIDES = {"PNG": 2**31 - 1, "JPEG": 65500, "WEBP": 16383, "GIF": 65535, "BMP": 2**31 - 1, "TIFF": 2**31 - 1,
             "PPM": 2**31 - 1}  # the formats that pictures are written in, and the most pixels a side that each holds
CODES = ".npy"  # the end of a file of codes
MAX_PIXELS = 2 * 89_478_485  # more in a file, and Pillow takes it for an attack when it is opened
OWN = "or what the model's folder or family says"
FAMILY_PROMPTS = ["a red heart", "a zebra at noon", "a lighthouse on a rock", "a bowl of fruit"]
PROMPTS = ["fluent-3d red heart", "fluent-flat blue heart", "fluent-3d grinning face", "noto neutral face",
           "fluent-flat raised fist", "fluent-3d thumbs up", "fluent-flat pirate flag", "noto chequered flag"]


def usable_device(context, parameter, device: str) -> str:
    if context.meta.get("batch_invariant"):
        context.with_resource(batch_invariant(device))  # before CUDA starts
    check_device(device)
    return device


device_option = click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True,
                             callback=usable_device, help="Where to compute.")


style_option = click.option(
    "--style", type=click.Choice(STYLES), show_default=STYLES[0],
    help="Put before prompts; an error for one that begins with a style. The shipped model only.")


dtype_option = click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32",
                            help="Of the weights in memory. Discrete tokens only.")


@dataclass(frozen=True)
class ModelFiles:
    """Where a model is: --model, and for one of transformers' families what goes with it."""

    model: Path
    family: str | None = None    # None: a folder that `specvis convert` makes
    draft: Path | None = None
    vq: Path | None = None
    image_size: int | None = None

    def __post_init__(self):
        if self.family is not None and self.model == SHIPPED:
            raise ValueError(f"model must be given with --family {self.family}: its folder")
        for name in ("draft", "vq", "image_size"):
            if self.family is None and getattr(self, name) is not None:
                raise ValueError(f"{name} must not be given without --family")

    def settings(self) -> ModelSettings:
        """How its pictures are drawn unless one says otherwise."""
        return FAMILIES[self.family].settings if self.family else read_settings(self.model)

    def filters(self, given: dict | None = None, temperature: float | None = None) -> dict:
        """How discrete tokens are drawn: as given, or else as the model says."""
        return self.settings().filters(**given or {}, temperature=temperature)

    def methods(self) -> dict[str, dict]:
        """Parameters of methods that this model's paper has otherwise."""
        return FAMILIES[self.family].methods if self.family else {}

    def check(self, method: Method | ContinuousMethod) -> None:
        """Raise ValueError if a draft model is missing, before any weights are read."""
        if self.family and self.draft is None and method.parameters.get("draft_model"):
            raise ValueError(f"draft must be given for {method.name}: an EAGLE head, or a smaller model of the family "
                             "(docs/families.md); vanilla, jacobi and gsd need none")

    def absolute(self) -> "ModelFiles":
        """The same for processes in other folders."""
        model, draft, vq = (path and (found(path) if self.family else path).absolute()
                            for path in (self.model, self.draft, self.vq))
        return ModelFiles(model, self.family, draft, vq, self.image_size)

    def load(self, kind: type, device: str, **options) -> Pipeline | MARPair:
        """The pipeline for methods of a kind, `Method` or `ContinuousMethod`."""
        if self.family:
            if kind is ContinuousMethod:
                raise ValueError(f"method must be one for discrete tokens, such as jacobi: {self.family} has these")
            if options.pop("text_encoder", None):
                raise ValueError(f"text_encoder must not be given with --family {self.family}")
            with quiet():
                pipeline = FamilyPipeline.load(self.model, self.family, device, draft=self.draft, vq=self.vq,
                                               image_size=self.image_size, **options)
            if pipeline.note:
                click.echo(pipeline.note, err=True)
            return pipeline
        holds = {Method: (self.model / "config.json").exists(), ContinuousMethod: (self.model / "mar.json").exists()}
        if not holds[kind] and any(holds.values()):
            tokens, other = ("continuous", "mar:num_iter=64") if holds[ContinuousMethod] else ("discrete", "jacobi")
            raise ValueError(f"method must be one for {tokens} tokens, such as {other}: these are the tokens of "
                             f"{self.model}")
        with quiet():  # C++ now imports much of torch, and a KeyboardInterrupt would abort it
            return (MARPair if kind is ContinuousMethod else Pipeline).load(self.model, device, **options)


def with_options(*options):
    """A decorator of commands: these options, in this order."""
    def add(command):
        for option in reversed(options):
            command = option(command)
        return command

    return add


def model_options(command):
    """The options of `ModelFiles`, which the command gets as `model`."""
    @with_options(
        click.option("--model", type=click.Path(path_type=Path), default=SHIPPED, show_default="the shipped model",
                     help="Folder with the model, such as `specvis convert` makes; with --family as transformers has "
                     "it, or its name on a model hub, if it was fetched."),
        click.option("--family", type=click.Choice(list(FAMILIES)), show_default="none",
                     help="Which of transformers' families the model is of."),
        click.option("--draft", type=click.Path(path_type=Path), help="With --family: an EAGLE head, or a smaller "
                     "model of the family."),
        click.option("--vq", type=click.Path(path_type=Path), help="With --family anole or lumina-mgpt: Chameleon's "
                     "vqgan.ckpt, which makes pictures of codes."),
        click.option("--image-size", type=click.IntRange(1), help="With --family: pixels a side. [default: the "
                     "family's]"))
    @wraps(command)
    def with_files(model, family, draft, vq, image_size, **options):
        return command(model=ModelFiles(model, family, draft, vq, image_size), **options)

    return with_files


_sampling_options = with_options(
    click.option("--seed", type=click.IntRange(0, 2**32), default=0,
                 help="Seed of the first picture; the next ones count on."),
    click.option("--guidance", type=float, help="Strength of classifier-free guidance; 1 is none. "
                 f"[default: {FILTERS['guidance']}, {CONTINUOUS_GUIDANCE} for continuous tokens, {OWN}]"),
    click.option("--top-k", type=int, help="Keep the likeliest TOP_K tokens; 0 keeps all. Discrete tokens only. "
                 f"[default: {FILTERS['top_k']}, {OWN}]"),
    click.option("--top-p", type=float, help="Keep the likeliest tokens up to this probability, in (0, 1]. "
                 f"Discrete tokens only. [default: {FILTERS['top_p']}, {OWN}]"),
    click.option("--min-p", type=float, help="Keep of these the tokens of at least this share of the likeliest one's "
                 f"probability; 0 keeps all. Discrete tokens only. [default: {FILTERS['min_p']:g}, {OWN}]"),
    device_option,
    click.option("--batch-invariant", is_flag=True, is_eager=True, expose_value=False,  # read before --device
                 callback=lambda context, parameter, value: context.meta.update(batch_invariant=value),
                 help="On a GPU add in one order for any number of pictures and of nodes (docs/determinism.md)."),
    model_options)


def sampling_options(command):
    """The options of how to draw. Of these the command gets guidance and the filters as one dict, `filters`."""
    @_sampling_options
    @wraps(command)
    def with_filters(guidance, top_k, top_p, min_p, **options):
        return command(filters=dict(guidance=guidance, top_k=top_k, top_p=top_p, min_p=min_p), **options)

    return with_filters


def sampling_for(method: Method | ContinuousMethod, seeds: list[int], filters: dict, temperature: float | None,
                 model: ModelFiles, device: str = "cpu") -> Sampling | ContinuousSampling:
    """How to draw by this method. ValueError names an option that is out of its range."""
    if isinstance(method, ContinuousMethod):
        return ContinuousSampling.of(seeds, guidance=model.settings().continuous_guidance(filters["guidance"]),
                                     temperature=1.0 if temperature is None else temperature, device=device)
    return Sampling.of(seeds, **model.filters(filters, temperature), device=device)


def is_exact(method: Method | ContinuousMethod, temperature: float) -> bool:
    """Does the method draw the baseline's tokens with the same seed, each of them?"""
    return isinstance(method, Method) and (method.seed_exact or temperature == 0 and method.lossless)


def is_given(name: str) -> bool:
    """Whether the user gave the option; otherwise it has its default."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def refuse_filters(what: str) -> None:
    """Raise ValueError where filters of discrete tokens are given."""
    for name in ("top_k", "top_p", "min_p"):
        if is_given(name):
            raise ValueError(f"{name} must not be given with {what}: continuous tokens have no filters")


def takes_files(folder: Path) -> bool:
    """Whether files can be made in `folder`. It tries: permissions alone do not say so."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def writable_file(path: Path, option: str = "out") -> Path:
    """`path` if a picture can be written there, in a folder that may have to be made. No file remains."""
    format = format_of(path)
    if (format not in MAX_SIDES or format not in Image.SAVE) and (path.suffix, option) != (CODES, "out"):
        known = ", ".join(sorted(suffix for suffix, kind in Image.registered_extensions().items() if kind in MAX_SIDES))
        raise ValueError(f"{option} must end in the name of a picture format, one of {known}, got {path}")
    try:
        folder = next(folder for folder in path.absolute().parents if folder.exists())
        is_right = not path.is_dir() and takes_files(folder) and (not path.exists() or os.access(path, os.W_OK))
    except (OSError, ValueError):  # as for a name of 300 letters
        is_right = False
    if not is_right:
        raise ValueError(f"{option} must be a file in a folder that can be made and written, got {path}")
    return path


def format_of(path: Path) -> str | None:
    """The format of pictures that a file's name says."""
    return Image.registered_extensions().get(path.suffix.lower())


def check_picture(width: int, height: int, format: str = "PNG") -> None:
    """ValueError if a picture of this size cannot be written, or opened again."""
    if max(width, height) > MAX_SIDES[format]:
        raise ValueError(f"out must be of another format: {format} holds at most {MAX_SIDES[format]} pixels a side, "
                         f"got {width} x {height}")
    if width * height > MAX_PIXELS:
        raise ValueError(f"scale and n must give a picture of at most {MAX_PIXELS} pixels, got {width} x {height}")


def writable_folder(path: Path) -> Path:
    """`path` as a folder that exists and can be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out must be a folder that can be made, got {path}: {error.strerror}") from error
    if not takes_files(path):
        raise ValueError(f"out must be a folder that can be written, got {path}")
    return path


@contextmanager
def resumable(how: str = "the same command goes on from here"):
    """Ctrl-C ends the command with a line that says how to go on. The default of `how` needs saved runs."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {how}") from None
