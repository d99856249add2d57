"""A report's sections: text, tables and plots, as Markdown, CSV and PNG in one folder."""
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from specvis.files import csv_text, write_whole
from specvis.study.plots import plt, save_figure

from . import papers
from .quality import Score

LABEL_GAP = 5  # from a point to its label, in typographic points


@dataclass
class Claim:
    """A trend that a paper states, and whether it is seen here; None: here it can be neither seen nor refused."""

    text: str
    holds: bool | None
    evidence: str

    @property
    def finding(self) -> str:
        return {True: "agrees", False: "does not agree", None: "not decided"}[self.holds]


@dataclass
class Section:
    """One table or figure of a paper, on our model."""

    name: str
    title: str
    folder: Path
    origin: str                      # command, revision, machine
    parts: list[str] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)

    def text(self, *paragraphs: str) -> None:
        self.parts += paragraphs

    def claim(self, text: str, holds: bool | None, evidence: str) -> None:
        self.claims.append(Claim(text, None if holds is None else bool(holds), evidence))

    def table(self, rows: list[dict], ending: str = "", csv_only: bool = False) -> None:
        """A table in the text and as <name><ending>.csv. In the CSV each score has a second column: is it significant?

        csv_only: the text has the link alone, for a long table
        """
        path = self.folder / f"{self.name}{ending}.csv"
        flat = [dict(cell for key, value in row.items() for cell in csv_cells(key, value)) for row in rows]
        write_whole(path, csv_text(dict.fromkeys(key for row in flat for key in row), flat))
        link = f"([CSV]({path.name}))"
        columns = list(dict.fromkeys(key for row in rows for key in row))
        lines = [columns, ["---"] * len(columns), *([format_cell(row.get(key, "")) for key in columns] for row in rows)]
        markdown = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        self.parts.append(link if csv_only else f"{markdown}\n\n{link}")

    def beside(self, name: str, here: Callable[[dict[str, str]], dict], ending: str = "", **where: str) -> None:
        """A paper's table with our numbers after the paper's, in the same rows.

        here:  from a row of the paper our cells by column; {}: it was not run. Columns that the paper lacks come last
        where: only rows that have these cells
        """
        rows = [row for row in papers.table(name) if where.items() <= row.items()]
        columns = [column for column in rows[0] if column not in where and any(row[column] for row in rows)]
        ours = [here(row) for row in rows]
        added = dict.fromkeys(column for cells in ours for column in cells)
        merged = []
        for row, cells in zip(rows, ours):
            line = {}
            for column in columns:
                line[f"{column}, paper" if column in added else column] = row[column] or "-"
                if column in added:
                    line[column] = cells.get(column, "not run")
            merged.append(line | {column: cells.get(column, "not run") for column in added if column not in columns})
        self.text(papers.caption(name))
        self.table(merged, ending)

    def figure(self, figure, caption: str, ending: str = "") -> None:
        """A plot as <name><ending>.png, signed with where it comes from."""
        path = self.folder / f"{self.name}{ending}.png"
        width, height = figure.get_size_inches()
        lines = textwrap.wrap(self.origin, int(26 * width))
        strip = 0.085 * len(lines) / height
        figure.get_layout_engine().set(rect=(0, strip, 1, 1 - strip))
        figure.text(0.995, 0.03 / height, "\n".join(lines), fontsize=5, ha="right", va="bottom", color="gray")
        spread_labels(figure)
        save_figure(figure, path)
        self.parts.append(f"![{caption}]({path.name})\n\n*{caption}*")

    def markdown(self) -> str:
        claims = [f"- **{c.finding}**: {c.text}. Here: {c.evidence}." for c in self.claims]
        return "\n\n".join([f"## {self.title}", f"`{self.name}`", *self.parts, "\n".join(claims)]).rstrip() + "\n"


def csv_cells(key: str, value) -> list[tuple[str, str]]:
    """The columns that a value has in a CSV, and their texts."""
    if isinstance(value, Score):
        return [(key, format_cell(value.value)), (f"{key} differs", "yes" if value.significant else "no")]
    return [(key, format_cell(value))]


def format_cell(value) -> str:
    """A number with three significant digits, with a star for a significant score; None is "not measured"."""
    if value is None:
        return "not measured"
    if isinstance(value, Score):
        return format_cell(value.value) + "*" * value.significant
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"
    return str(value)


def axes(rows: int, columns: int, width: float, height: float, **others):
    """A figure of rows x columns plots, each width x height inches."""
    return plt.subplots(rows, columns, squeeze=False, figsize=(width * columns, height * rows + 0.1),
                        layout="constrained", **others)


def label(axis, text: str, point: tuple[float, float]) -> None:
    """Name a point. `Section.figure` finds the place, within the axis, so that the layout leaves no space for it."""
    axis.annotate(text, point, (LABEL_GAP, 0), textcoords="offset points", va="center", fontsize=6, in_layout=False,
                  path_effects=[withStroke(linewidth=1.5, foreground="white")])  # it is read over bars and lines


def spread_labels(figure) -> None:
    """Move the labels up or down, on either side of their points, to the nearest place within the axis that overlaps
    no other label and no point; if there is no such place, to where it overlaps fewest."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # a second layout would shift the points a little
    pixels = figure.dpi / 72  # of a typographic point
    gap = LABEL_GAP * pixels
    for axis in figure.axes:
        points = [point for line in axis.lines for point in line.get_transform().transform(line.get_xydata())]
        taken = [Bbox.from_bounds(*(point - gap / 2), gap, gap) for point in points]
        for text in sorted((text for text in axis.texts if isinstance(text, Annotation)), key=lambda text: text.xy[1]):
            box = text.get_window_extent()
            step, reach = 1.1 * box.height, int(axis.bbox.height / box.height)
            places = [box.translated(shift, n * step) for n in sorted(range(-reach, reach + 1), key=abs)
                      for shift in (0, -box.width - 2 * gap)]
            place = min(places, key=lambda place: (axis.bbox.padded(-gap).count_contains(place.get_points()) < 2,
                                                   place.count_overlaps(taken)))
            taken.append(place)
            is_right, offset = place.x0 == box.x0, (place.y0 - box.y0) / pixels
            text.set(ha="left" if is_right else "right", position=(LABEL_GAP if is_right else -LABEL_GAP, offset))
            if offset:
                axis.annotate("", text.xy, text.get_position(), textcoords="offset points",
                              arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "gray", "shrinkA": 0})


def heatmap(axis, values, rows, columns, title: str, names: tuple[str, str]) -> None:
    """Draw numbers as a colored table; names: of the rows and of the columns."""
    axis.imshow(values, cmap="viridis", aspect="auto")
    middle = (values.min() + values.max()) / 2
    for i, line in enumerate(values):
        for j, value in enumerate(line):
            number = f"{value:.3g}" if abs(value) >= 0.1 else f"{value:.1g}"
            axis.text(j, i, number, ha="center", va="center", fontsize=8,
                      color="black" if value > middle else "white")
    axis.set(xticks=range(len(columns)), xticklabels=[str(c) for c in columns], yticks=range(len(rows)),
             yticklabels=[str(r) for r in rows], ylabel=names[0], xlabel=names[1])
    axis.set_title(title, fontsize=9)


def show(axis, image, title: str = "") -> None:
    """Draw a picture without axes."""
    axis.imshow(np.asarray(image))
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
    axis.set_title(title, fontsize=7)
