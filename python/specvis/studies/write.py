"""`specvis report`: do what is not done yet, then write every section."""
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import click
import numpy as np
from PIL import Image
from tqdm import tqdm

from ..pipelines.discrete import Pipeline
from .items import FULL, ITEMS, QUICK, Item, Report, Scope
from .page import Section
from .quality import DISTANCES, GROUPS, MORE_SCORES, SCORES
from .base import Study, write

LEAST = 12  # pictures: with about so many the kernel distance of the strongest relaxation exceeds the noise
LEFT_OUT = ("lantern-table-4", "adt-table-5", "adt-figure-3b", "adt-cost", "peanut-figure-7", "cool-figure-2")


def chosen(names: tuple[str, ...], quick: bool = False, items: dict[str, Item] = ITEMS,
           left_out: tuple[str, ...] = LEFT_OUT) -> list[Item]:
    """The items of these names, in the report's order; none named: all, or those of a quick report.

    Raises:
        ValueError: an unknown name; the known are listed
    """
    names = [name.strip() for text in names for name in text.split(",") if name.strip()]
    for name in names:
        if name not in items:
            raise ValueError(f"unknown table or figure {name!r}; known: {', '.join(items)}")
    return [item for name, item in items.items()
            if (name in names if names else not (quick and name in left_out))]


def judged(folder: Path) -> tuple[list[str], np.ndarray]:
    """Prompts (n) and the pictures (n, H, W, 3) that they name, from prompts.json and prompts.png beside the weights.

    The pictures stand in rows, as many in each as there are rows.

    Raises:
        ValueError: a file is missing or the picture does not hold as many as there are prompts
    """
    if not folder.is_dir():
        raise ValueError(f"weights must be a folder, got {folder}")
    try:
        prompts = json.loads((folder / "prompts.json").read_text())
        if not (isinstance(prompts, list) and prompts and all(isinstance(p, str) for p in prompts)):
            raise ValueError("prompts.json is no list of strings")
        sheet = np.array(Image.open(folder / "prompts.png").convert("RGB"))
    except (OSError, ValueError) as error:
        raise ValueError(f"weights must have prompts.json, a list of captions, and prompts.png, a square of their "
                         f"pictures, to be judged by: {error}") from error
    across = round(len(prompts) ** 0.5)
    side = sheet.shape[1] // across
    if across ** 2 != len(prompts) or sheet.shape[:2] != (side * across, side * across):
        raise ValueError(f"{folder / 'prompts.png'} must be a square of as many pictures as prompts.json has captions "
                         f"({len(prompts)}), got {sheet.shape[1]} x {sheet.shape[0]} pixels")
    return prompts, sheet.reshape(across, side, across, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)


def more_scores(texts: tuple[str, ...]) -> None:
    """Register "name=module:function", a score of pictures and prompts as quality.MORE_SCORES has them.

    Raises:
        ValueError: not of this form, or no such function
    """
    for text in texts:
        name, _, where = text.partition("=")
        module, _, function = where.partition(":")
        if "" not in sys.path:
            sys.path.insert(0, "")  # modules of the folder that the command is run in
        try:
            score = getattr(import_module(module), function)
            values = np.asarray(score(np.zeros((2, 64, 64, 3), np.uint8), ["red heart", "blue heart"]))
            if not name or name in (*DISTANCES, *SCORES) or values.shape != (2,):
                raise ValueError("it needs a name of its own, and must return a number for each of two pictures")
        except (ImportError, AttributeError, TypeError, ValueError) as error:  # absent, or not of this form
            raise ValueError(f"score must be like clip=my_module:function, got {text!r}: {error}") from error
        MORE_SCORES[name] = score


def scope_of(quick: bool, images: int | None, timed: int | None, prompts: int) -> Scope:
    """
    Raises:
        ValueError: too few pictures for a score, or not every prompt equally often
    """
    scope = QUICK if quick else FULL
    scope = replace(scope, images=images or scope.images, timed=timed or scope.timed)
    if scope.images < LEAST:
        raise ValueError(f"images must be at least {LEAST}, got {scope.images}: with fewer, plain decoding's own "
                         "pictures differ more by chance than the strongest relaxation makes them. The report says how "
                         "many would be needed to tell a method from plain decoding")
    if scope.images > prompts and scope.images % prompts:
        raise ValueError(f"images must be at most {prompts} or a multiple of it, the number of prompts, "
                         f"got {scope.images}")
    return scope


def write_report(pipeline: Pipeline, weights: Path, out: Path, items: list[Item], scope: Scope, *, command: str,
                 whole: bool, **settings) -> None:
    """Sections, tables and plots in `out`, its runs in `out`/runs; if `whole`, a README.md that leads to them.

    Raises:
        ValueError: `out` holds runs of another model, version or setting, or a package is missing
    """
    prompts, pictures = judged(weights)
    count = min(scope.images, len(prompts))
    study = Study(pipeline, out / "runs", prompts, images=scope.images, timed=scope.timed, **settings)
    own, _ = study.network(pictures[:count])
    study.do([work for item in items for work in item.works(scope)])
    report = Report(study, scope, own)
    write_items(report, items, out, command, cover if whole else None)


def write_items(report, items: list[Item], out: Path, command: str, cover: Callable | None) -> None:
    """A page for each item in `out`, and if there is a `cover`, what it makes of the sections as README.md."""
    origin, sections = "; ".join(report.study.made), []
    with tqdm(items, desc="writing", disable=None) as bar:
        for item in bar:
            bar.set_postfix_str(item.name)
            section = Section(item.name, item.title, out, f"{command} --only {item.name} | {origin}")
            item.write(report, section)
            write(out / f"{item.name}.md", section.markdown())
            sections.append(section)
    if cover:
        write(out / "README.md", cover(report, sections, command, origin))
    claims = [claim for section in sections for claim in section.claims]
    agree = sum(claim.holds is True for claim in claims)
    first = "README" if cover else ",".join(item.name for item in items)
    click.echo(f"{out / first}.md: {len(sections)} tables and figures; of {len(claims)} trends that the papers state "
               f"{agree} are seen here")


def cover(report: Report, sections: list[Section], command: str, origin: str) -> str:
    """The first page: what was run, and a line for each trend."""
    study, scope = report.study, report.scope
    config = study.pipeline.gpt.config
    lines = [
        "# The papers' tables and figures on our model", "",
        f"`{command}`", "",
        f"Runs: {origin}.", "",
        f"Model: {config.layers} layers of width {config.dim}, {config.vocabulary} codes, {config.tokens} tokens a "
        f"picture. {scope.images} pictures a method, {GROUPS * scope.images} of plain decoding, of "
        f"{len(study.prompts)} prompts; guidance {study.settings['guidance']:g}, top-k {study.settings['top_k']}, "
        f"top-p {study.settings['top_p']:g}. Seconds are of single pictures, {scope.timed} a method, everything "
        "else of pictures decoded in batches.", "",
        "Frechet and kernel distance are to plain decoding's pictures, on the features of an ImageNet network "
        "(EfficientNet-Lite0); the inception score is on its classes; nearest name is the share of pictures whose "
        "features are nearest to those of the picture that their prompt names. CLIP score, HPSv2, ImageReward and the "
        "aesthetic predictor need weights that no package brings: not measured (`--score` takes them). "
        "Medusa, SJD and GSD are out of scope.", "",
        "The papers' models have 0.8 to 7 billion parameters on A100 GPUs, ours has millions on what is named above: "
        "what can agree is a trend. Of the papers only abstracts, released repositories and notes by others were at "
        "hand; their numbers stand here where they could be read, and nowhere else.", "",
        "| | the paper says | here | |", "|---|---|---|---|",
    ]
    return "\n".join(lines + links(sections))


def links(sections: list[Section]) -> list[str]:
    """The rows of a table of claims, and a list of the sections."""
    claims = [f"| [{section.name}]({section.name}.md) | {claim.text} | {claim.seen} | {claim.verdict} |"
              for section in sections for claim in section.claims]
    return [*claims, "", *(f"- [{section.title}]({section.name}.md)" for section in sections), ""]
