"""What the reports on discrete and on continuous tokens share: items, pages, and the features of pictures."""
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
from PIL import Image
from scipy.stats import t
from torch import Tensor
from tqdm import tqdm

from specvis.files import csv_text, write_whole
from specvis.study.discrete import BATCH, PictureRun
from specvis.study.jobs import Job, Study, read_arrays

from .page import Claim, Section
from .quality import Features, network


@dataclass(frozen=True)
class Scope:
    """How much is run: numbers of pictures, and the values of the sweeps."""

    images: int  # each run has this many, and more where they decide a claim


@dataclass
class Report(ABC):
    """What the items look at, and the sections that they have written. A subclass writes the `cover`."""

    study: Study
    scope: Scope
    out: Path
    sections: list[Section] = field(default_factory=list)
    results: dict = field(default_factory=dict)  # what several items ask for
    at_work: str = ""                            # the item that is being written

    def once(self, name, make: Callable):
        """What `make` returns, which is called the first time only."""
        if name not in self.results:
            self.results[name] = make()
        return self.results[name]

    @abstractmethod
    def cover(self, command: str, origin: str) -> str:
        """The first page: what was run, and a line for each trend."""

    def links(self) -> list[str]:
        """The rows of a table of claims, and a list of the sections."""
        claims = [f"| [{name}]({name}.md) | {claim.text} | {claim.evidence} | {claim.finding} |"
                  for name, claim in self.claims]
        return [f"| | the paper says | here | {self.verdicts} |", "|---|---|---|---|", *claims, "",
                *(f"- [{section.title}]({section.name}.md)" for section in self.sections), ""]

    @property
    def claims(self) -> list[tuple[str, Claim]]:
        """Each claim, after the name of its section."""
        return [(section.name, claim) for section in self.sections for claim in section.claims]

    @property
    def verdicts(self) -> str:
        """How many claims agree, how many do not, and how many are open."""
        found = [claim.finding for _, claim in self.claims]
        return ", ".join(f"{found.count(finding)} {words}" for finding, words in (
            ("agrees", "agree"), ("does not agree", "do not agree"), ("not decided", "are not decided")))


@dataclass(frozen=True)
class Item:
    """One table or figure: the jobs that it needs, and the function that writes its section."""

    name: str
    title: str
    jobs: Callable[[Scope], Iterable[Job]]
    write: Callable[[Report, Section], None]
    quick: bool         # a quick report has it too
    uses_network: bool  # the network of quality.py


def item(registry: dict[str, Item], name: str, title: str, jobs: Callable[[Scope], Iterable[Job]], *,
         quick: bool = True, uses_network: bool = False):
    """A decorator: the function that writes a section becomes an item of `registry`."""
    def register(write):
        registry[name] = Item(name, title, jobs, write, quick, uses_network)
        return write
    return register


def choose_items(items: dict[str, Item], names: tuple[str, ...], quick: bool = False) -> list[Item]:
    """The items of these names, in the report's order; no names: all, or the items of a quick report.

    Raises:
        ValueError: an unknown name; the known are listed
    """
    names = [name.strip() for text in names for name in text.split(",") if name.strip()]
    for name in names:
        if name not in items:
            raise ValueError(f"unknown table or figure {name!r}; known: {', '.join(items)}")
    return [item for item in items.values() if (item.name in names if names else item.quick or not quick)]


def write_report(report: Report, items: list[Item], *, command: str, whole: bool) -> None:
    """Compute what is missing, then write a page for each item; if `whole`, a README.md that leads to them.

    Raises:
        ValueError: a package is missing
    """
    study, out = report.study, report.out
    if any(item.uses_network for item in items):
        network()  # a missing package is reported before hours of work
    study.compute([job for item in items for job in item.jobs(report.scope)])
    origin = study.origins_text
    with tqdm(items, desc="writing", disable=None) as bar:
        for number, item in enumerate(bar, 1):
            bar.set_postfix_str(item.name)
            report.at_work = item.name
            if bar.disable:
                click.echo(f"page {number} of {len(items)}, {item.name}", err=True)
            section = Section(item.name, item.title, out, f"{command} --only {item.name} | {origin}")
            item.write(report, section)
            write_whole(out / f"{item.name}.md", section.markdown())
            report.sections.append(section)
    if whole:
        write_whole(out / "README.md", report.cover(command, origin))
        write_whole(out / "claims.csv", csv_text(["item", "the paper says", "here", "finding"], [
            {"item": name, "the paper says": claim.text, "here": claim.evidence, "finding": claim.finding}
            for name, claim in report.claims]))
    where = out / "README.md" if whole else ", ".join(str(out / f"{item.name}.md") for item in items)
    click.echo(f"{where}: of {len(report.claims)} claims of the papers {report.verdicts}")


def pixels(study: Study, tokens: Tensor) -> np.ndarray:
    """The pictures (n, H, W, 3) uint8 that the tokens of n images decode to."""
    return np.stack([np.asarray(picture) for part in tokens.split(BATCH)
                     for picture in study.pipeline.pictures(part.to(study.pipeline.device))])


def features(study: Study, run: PictureRun) -> Features:
    """The features of a run's pictures. They are kept beside the pictures."""
    def read_or_make(part: PictureRun) -> dict[str, np.ndarray]:
        def make():
            vectors, classes = network()(pixels(study, study.pictures(part).decoded.tokens))
            write_whole(path, lambda file: np.savez(file, vectors=vectors, classes=classes))

        path = study.path(part).with_suffix(".features.npz")
        shapes = {"vectors": (part.count, None), "classes": (part.count, None)}
        return study.read_or_make(path, lambda path: read_arrays(path, shapes), make)

    parts = study.parts(run)
    arrays = [read_or_make(part) for part in parts]
    names = np.concatenate([part.start + np.arange(part.count) for part in parts]) % len(study.prompts)
    return Features(*(np.concatenate([part[name] for part in arrays]) for name in ("vectors", "classes")), names)


def reference_pictures(folder: Path) -> tuple[list[str], np.ndarray]:
    """Prompts (n) and the pictures (n, H, W, 3) that they name, from prompts.json and prompts.png beside the weights.

    The pictures are in rows, as many in each as there are rows.

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
    except (OSError, ValueError, SyntaxError, RecursionError, Image.DecompressionBombError) as error:
        raise ValueError(f"weights must have prompts.json, a list of captions, and prompts.png, a square of their "
                         f"pictures, to compare with: {error}") from error
    across = round(len(prompts) ** 0.5)
    side = sheet.shape[1] // across
    if across ** 2 != len(prompts) or sheet.shape[:2] != (side * across, side * across):
        raise ValueError(f"{folder / 'prompts.png'} must be a square of as many pictures as prompts.json has captions "
                         f"({len(prompts)}), got {sheet.shape[1]} x {sheet.shape[0]} pixels")
    return prompts, sheet.reshape(across, side, across, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)


def mean_and_half(values: Tensor) -> tuple[float, float]:
    """The mean over pictures (n,) float, and twice its standard error; pictures that failed (NaN) do not count."""
    values = values[~values.isnan()]
    return values.mean().item(), 2 * values.std().item() / len(values) ** 0.5


def decided(value: float, half: float) -> bool | None:
    """Say whether a value is above 0; None: its interval, from value - half to value + half, has both signs."""
    return None if abs(value) <= half else value > 0


SHOWN = (0, 1, 2, 3, 6, 7, 9, 10)  # the pictures in figures: not of the prompts of hands, whose gestures may be rude
SMALL_CHANGE = 0.02  # of tau or of seconds: a smaller gain counts as none
SMALL_EXCESS = 1e-3  # of added total variation per token: a smaller difference counts as none


def all_hold(*holds: bool | None) -> bool | None:
    """Say whether all are so; None: it is open."""
    return False if False in holds else None if None in holds else True


@dataclass(frozen=True)
class Finding:
    """What pictures tell of a number."""

    value: float
    half: float         # of the interval, which in 19 of 20 studies holds the number, however often one looks
    pictures: int       # of each run
    holds: bool | None  # None: the interval leaves it open
    needed: float       # roughly how many pictures would decide it

    def __str__(self) -> str:
        return f"{self.value:+.3g} +- {self.half:.3g}{self.count}"

    @property
    def count(self) -> str:
        """The number of pictures, in words; and how many it would take where nothing is decided."""
        if self.holds is not None:
            return f", {self.pictures} pictures"
        needed = float(f"{min(self.needed, 1e9):.1e}")
        enough = ("a few more" if needed <= self.pictures else f"about {needed:,.0f}" if needed < 1e5 else
                  "more than 100,000")
        return f", {self.pictures} pictures; it would take {enough}"

    @property
    def factor(self) -> str:
        """The ratio whose logarithm was estimated, with its interval."""
        low, high = math.exp(self.value - self.half), math.exp(self.value + self.half)
        return f"{math.exp(self.value):.2f} times ({low:.2f} to {high:.2f}{self.count})"


def look_counts(first: int, most: int) -> list[int]:
    """The numbers of pictures that a claim is looked at with: ever twice as many, and about `most` at the end."""
    last = max(1, most // first) * first
    return [*(first << look for look in range(10) if first << look < last), last]


def draw_until_decided(estimate: Callable[[int], tuple[float, float, int]], counts: list[int], *, least: float = 0.0,
                       margin: float | None = None) -> Finding:
    """Look at ever more pictures until they decide, or show that not even the largest count would.

    Each look has its share of the 5 % of cases in which chance decides (Bonferroni), so that looking again does no
    harm. From the second look on drawing stops where the largest count would not decide, even if the mean were a
    standard error further from what is asked: to stop can only leave open.

    Args:
        estimate: from a number of pictures, which it draws, a mean over them, its standard error, and the error's
                  degrees of freedom
        counts:   the numbers of pictures of the looks, growing
        least:    is the mean above 0, and was at least this measured? It is not if it is below this
        margin:   another question: is the mean nearer to 0 than this?
    """
    for look, count in enumerate(counts):
        value, error, freedom = estimate(count)
        half, last = (float(t.ppf(1 - 0.05 / (2 * len(counts)), n)) * error for n in (freedom, counts[-1] - 1))
        last = half if count == counts[-1] else last
        is_so = 0 < value >= least if margin is None else abs(value) < margin
        gap = abs(margin - abs(value)) if margin is not None else value if is_so else least - value
        if gap > half > 0 or not half and count == counts[-1]:
            return Finding(value, half, count, bool(is_so), count)
        if look and last > (gap + error) * (counts[-1] / count) ** 0.5:
            break
    return Finding(value, half, count, None, count * (last / gap) ** 2 if gap else math.inf)
