"""ADT-Tree's tables and figures (arXiv:2512.21857)."""
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from specvis.pipelines.positions import steps_gain, teacher_forced_probs
from specvis.study.discrete import Latency, PictureRun

from . import papers
from .base import Item, item, pixels
from .discrete import DiscreteReport, DiscreteScope
from .page import Section, axes, show

ITEMS: dict[str, Item] = {}
COMPARED = ("eagle2", "lantern", "adt-tree", "adt-tree+lantern")
FORCED_BATCH = 8  # pictures that the models read at once


def table_1_jobs(scope: DiscreteScope) -> Iterator[PictureRun | Latency]:
    for T in (0.0, 1.0):
        for text in COMPARED:
            yield PictureRun.of(text, T)
            yield Latency.of(text, T)


@item(ITEMS, "adt-table-1", "ADT-Tree, Table I: speedup, tau and mean depth", table_1_jobs)
def table_1(report: DiscreteReport, section: Section) -> None:
    study = report.study
    section.text("The paper, Anole:")
    section.table(papers.ADT_TABLE_1, "-paper")
    section.text("Here; depth is drafted levels (EAGLE-2 drafts 5 there, 4 in our recipe). In the paper ADT-Tree gains "
                 "by cheaper trees and not by tau; here its trees are larger than EAGLE-2's.")
    rows, tau, depth = [], {}, {}
    for T in (0.0, 1.0):
        for text in COMPARED:
            pictures = study.pictures(PictureRun.of(text, T))
            tau[text, T], depth[text, T] = pictures.tau, pictures.mean_depth
            rows.append({"method": text, "T": f"{T:g}", "tau": pictures.tau, "mean depth": pictures.mean_depth,
                         "mean nodes": pictures.mean_nodes, "acceptance": pictures.decoded.acceptance_rate})
    section.table(rows)
    section.text("Single pictures, each right after the baseline's:")
    section.table([report.latency_row(Latency.of(text, T)) for T in (0.0, 1.0) for text in COMPARED], "-latency")
    for T, paper in ((1.0, "at temperature 1 ADT-Tree is faster than EAGLE-2 (1.06 against 0.76 times the baseline)"),
                     (0.0, "and at temperature 0, where most of its gain is")):
        holds, times = report.faster("adt-tree", "eagle2", T)
        section.claim(paper, holds, f"{times:.2f} times in seconds of single pictures, tau {tau['adt-tree', T]:.2f} "
                                    f"against {tau['eagle2', T]:.2f}")
    section.claim("LANTERN's acceptance adds to it", *report.tau_gain("adt-tree+lantern", "adt-tree"))
    section.claim("its trees are shallower than EAGLE-2's at temperature 1",
                  depth["adt-tree", 1.0] < depth["eagle2", 1.0],
                  f"mean depth {depth['adt-tree', 1.0]:.2f} against {depth['eagle2', 1.0]:.2f}")


STARTS = {"horizontal (the default)": "adt-tree", "vertical": "adt-tree:start=vertical",
          "random": "adt-tree:start=random", "TokenFlock": "adt-tree:start=tokenflock",
          "depth from 1": "adt-tree:flat_depth=1", "width from 25": "adt-tree:flat_width=25"}


@item(ITEMS, "adt-table-5", "ADT-Tree, Figure 8 and Table V: where a tree's shape starts from",
      lambda scope: [PictureRun.of(text) for text in STARTS.values()], quick=False)
def table_5(report: DiscreteReport, section: Section) -> None:
    rows = []
    for name, text in STARTS.items():
        pictures = report.study.pictures(PictureRun.of(text))
        rows.append({"start": name, "tau": pictures.tau, "mean depth": pictures.mean_depth,
                     "mean nodes": pictures.mean_nodes, "acceptance": pictures.decoded.acceptance_rate})
    section.text("At temperature 1. The first four rows are the starts of the paper's Figure 8, the last two the fixed "
                 "starts of its Table V; where the paper leaves a choice open, `Adaptation` in trees.py names ours.")
    section.table(rows)
    for name in ("vertical", "random"):
        section.claim(f"the default, the left neighbor's shape, is a better start than {name}",
                      *report.tau_gain(STARTS["horizontal (the default)"], STARTS[name]))


def forced(report: DiscreteReport, run: PictureRun) -> tuple[Tensor, Tensor, Tensor]:
    """What the models say of the finished pictures of a run.

    Returns:
        (n, L) the largest target probability; (n, L - 1), from the second token on, the largest draft probability
        and sum min(P, Q)
    """
    def compute():
        study, parts = report.study, []
        for tokens in study.pictures(run).decoded.tokens.split(FORCED_BATCH):
            start = FORCED_BATCH * len(parts)
            target, draft = teacher_forced_probs(study.pipeline, study.prompts_of(start, len(tokens)),
                                                 tokens.to(study.pipeline.device),
                                                 study.sampling_of(start, len(tokens), run.temperature))
            parts.append((target.max(-1).values, draft.max(-1).values, torch.minimum(target[:, 1:], draft).sum(-1)))
        return tuple(torch.cat(part).cpu() for part in zip(*parts))

    return report.once(("forced", run), compute)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(np.corrcoef(a.flatten().numpy(), b.flatten().numpy())[0, 1])


@item(ITEMS, "adt-figures-4-5-9", "ADT-Tree, Figures 4, 5 and 9: maps of the likeliest token's probability",
      lambda scope: [PictureRun.of("eagle2")])
def figures_4_5_9(report: DiscreteReport, section: Section) -> None:
    study, run = report.study, PictureRun.of("eagle2")
    top, draft, overlap = forced(report, run)
    side, unknown = study.pipeline.gpt.config.grid, torch.full((len(top), 1), torch.nan)  # at the first token
    gains = steps_gain(study.pictures(run).decoded.num_accepted).float()
    draft, shared = (torch.cat([unknown, values], 1) for values in (draft, overlap))
    count = min(6, len(top))
    figure, all_axes = axes(4, count, 1.5, 1.5)
    for i, picture in enumerate(pixels(study, study.pictures(run).decoded.tokens[:count])):
        show(all_axes[0, i], picture, study.prompts[i % len(study.prompts)])
        show(all_axes[1, i], top[i].view(side, side), "target's top-1")
        show(all_axes[2, i], draft[i].view(side, side), "draft's top-1")
        show(all_axes[3, i], gains[i].view(side, side), "tokens of the step")
    section.figure(figure, "A column for each picture of EAGLE-2: the picture, and maps of the largest probability of "
                           "the target and of the draft at each token, and of how many tokens the step gained that "
                           "drew it; bright is much", "-pictures")
    figure, (three,) = axes(1, 3, 3.4, 3)
    for axis, (name, values) in zip(three, {"target's top-1": top, "tokens of the step": gains,
                                            "sum min(target, draft)": shared}.items()):
        image = axis.imshow(values.mean(0).view(side, side).numpy())
        axis.set(xticks=[], yticks=[])
        axis.set_title(f"{name}, mean of {len(top)} pictures", fontsize=8)
        figure.colorbar(image, ax=axis)
    section.figure(figure, "Maps of means over all pictures, by position: the target's largest probability, the tokens "
                           "that the step gained, and what target and draft share", "-means")
    maps = top.view(-1, side, side)
    difficulty, left, up = (correlation(a, b) for a, b in (
        (top, gains), (maps[:, :, 1:], maps[:, :, :-1]), (maps[:, 1:], maps[:, :-1])))
    section.table([{"correlation over all positions of": name, "value": value} for name, value in (
        ("the target's top-1 with the tokens gained by the step", difficulty),
        ("sum min(target, draft) with the tokens gained by the step", correlation(overlap, gains[:, 1:])),
        ("the target's top-1 with the left neighbor's", left), ("the target's top-1 with the upper neighbor's", up))])
    section.text("At the edges of the pictures, which are white, the target is unsure among codes that are all white, "
                 "and so is the draft: there top-1 is low, and yet what they share and what is accepted is much.")
    section.claim("simple regions have a low top-1 probability, and accept more", difficulty < -0.1,
                  f"correlation of the target's top-1 with the tokens gained {difficulty:.2f}")
    section.claim("neighbors are alike", min(left, up) > 0.2,
                  f"correlation with the left neighbor {left:.2f}, with the upper {up:.2f}")
