"""PEANUT's figures: where and how much is accepted, and drafting with and without guidance."""
from dataclasses import replace

import numpy as np
import torch

from specvis.decoding.methods import parse_method
from specvis.pipelines.positions import steps_gain
from specvis.study.discrete import BATCH, PictureRun
from specvis.study.plots import method_color

from . import papers
from .adt_tree import textures
from .base import Item, item, mean_and_half, pixels
from .discrete import DiscreteReport, DiscreteScope
from .page import Section, axes

ITEMS: dict[str, Item] = {}
COMPARED = ("eagle1", "eagle2", "lantern", "adt-tree", "adt-tree+lantern", "cool-sd")


@item(ITEMS, "peanut-figures-1-2", "PEANUT, Figures 1 and 2: where and how much is accepted",
      lambda scope: [PictureRun.of(text) for text in COMPARED], quick=False)
def figures_1_2(report: DiscreteReport, section: Section) -> None:
    pictures = {text: report.study.pictures(PictureRun.of(text)) for text in COMPARED}
    gains = {text: steps_gain(those.decoded.num_accepted).float() for text, those in pictures.items()}
    side = report.study.pipeline.gpt.config.grid
    maps = {text: values.mean(0).view(side, side).numpy() for text, values in gains.items()}
    top = max(values.max() for values in maps.values())
    figure, (all_axes,) = axes(1, len(COMPARED), 2.1, 2.2)
    for axis, (text, values) in zip(all_axes, maps.items()):
        image = axis.imshow(values, vmin=1, vmax=top)
        axis.set(xticks=[], yticks=[])
        axis.set_title(f"{text}, mean {values.mean():.2f}", fontsize=8)
    figure.colorbar(image, ax=all_axes, label="tokens of the step")
    section.figure(figure, "A map for each method: tokens gained by the step that drew each position, mean over "
                           "pictures, temperature 1 (a step of many tokens counts at many positions: these means "
                           "exceed tau)", "-maps")
    figure, (all_axes,) = axes(1, len(COMPARED), 2.1, 2.2)
    rows, longest = [], max(those.accepted_per_step.max().item() for those in pictures.values())
    for axis, (text, those) in zip(all_axes, pictures.items()):
        lengths = those.accepted_per_step
        share = torch.bincount(lengths, minlength=longest + 1).float() / len(lengths)
        axis.bar(range(longest + 1), share.numpy(), color=method_color(text))
        axis.set(ylim=(0, 1), xlabel="accepted drafts", ylabel="share of steps")
        axis.set_title(text, fontsize=8)
        rows.append({"method": text, **{f"{n}": value.item() for n, value in enumerate(share)},
                     "mean accepted drafts": lengths.float().mean().item()})
    section.figure(figure, "Bars for each method: the share of steps, from 0 to 1, over how many drafts they accept",
                   "-lengths")
    section.table(rows)
    run = PictureRun.of("eagle2")
    finding = report.contrast("gain of smooth regions", {run: 1.0}, lambda run: np.subtract(*by_texture(report, run)))
    smooth, textured = by_texture(report, replace(run, count=finding.pictures)).mean(1)
    paper = [f"{papers.value('records', 'figure', method='ADT-Tree', unit=f'tokens a step in {regions} regions'):g}"
             for regions in ("smooth", "textured")]
    section.claim(f"smooth regions accept more than textured ones (more than {paper[0]} tokens a step, against at most "
                  f"{paper[1]})", finding.holds,
                  f"EAGLE-2's steps gain {smooth:.2f} tokens at the smoothest quarter of a picture's positions, "
                  f"{textured:.2f} at the most textured: {finding}")


def by_texture(report: DiscreteReport, run: PictureRun) -> np.ndarray:
    """(2, n) the tokens gained by the steps at the smoothest quarter of a picture's positions, and at the most
    textured."""
    study, decoded = report.study, report.study.pictures(run).decoded
    order = textures(pixels(study, decoded.tokens), study.pipeline.gpt.config.grid).argsort(1)
    gains, quarter = steps_gain(decoded.num_accepted).double(), order.shape[1] // 4
    return np.stack([gains.gather(1, part).mean(1).numpy() for part in (order[:, :quarter], order[:, -quarter:])])


GUIDED = ("eagle2", "eagle1")


def figure_7_runs(scope: DiscreteScope) -> list[PictureRun]:
    count = min(scope.images, BATCH)
    return [PictureRun(parse_method(f"{text}:draft_guidance={share}"), count=count, guidance=guidance)
            for guidance in (None, 3.0) for text in GUIDED for share in (1, 0)]


@item(ITEMS, "peanut-figure-7", "PEANUT, Figure 7: drafting with and without guidance", figure_7_runs, quick=False)
def figure_7(report: DiscreteReport, section: Section) -> None:
    rows, tau, usual = [], {}, report.study.settings["guidance"]
    for run in figure_7_runs(report.scope):
        pictures = report.study.pictures(run)
        tau[run.method.name, run.guidance, run.method.drafts.draft_guidance] = mean_and_half(pictures.decoded.tau)
        rows.append({"method": run.method.name, "guidance": f"{run.guidance or usual:g}",
                     "draft model": "guided" if run.method.drafts.draft_guidance else "not guided", "tau": pictures.tau,
                     "acceptance": pictures.decoded.acceptance_rate})
    section.text("The draft model's distribution is moved by the request's guidance, or is that with the caption "
                 "alone. The paper's figure is a flow chart and measures nothing.")
    section.table(rows)
    figure, (all_axes,) = axes(1, 2, 3.6, 2.8)
    for axis, guidance in zip(all_axes, (None, 3.0)):
        for shift, share, label, hatch in ((-0.2, 1.0, "guided draft model", ""), (0.2, 0.0, "not guided", "///")):
            heights, errors = zip(*(tau[text, guidance, share] for text in GUIDED))
            axis.bar(np.arange(len(GUIDED)) + shift, heights, 0.4, yerr=errors, label=label, hatch=hatch,
                     color=[method_color(text) for text in GUIDED], edgecolor="white", ecolor="gray")
        axis.set(xticks=range(len(GUIDED)), xticklabels=GUIDED, ylabel="tau",
                 title=f"guidance {guidance or usual:g}")
        axis.legend(fontsize=7)
    section.figure(figure, "tau of each method, with the draft model guided (full bars) and not (hatched), left with "
                           "the usual guidance and right with 3; lines are two standard errors over pictures")
