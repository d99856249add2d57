"""ADT-Tree's tables and figures (arXiv:2512.21857)."""
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from specvis.pipelines.positions import steps_gain, teacher_forced_probs
from specvis.study.discrete import DiscretePictures, Latency, PictureRun

from . import papers
from .base import SHOWN, Item, all_hold, item, pixels
from .discrete import EAGLE2, DiscreteReport, DiscreteScope, lantern
from .page import Section, axes, show

ITEMS: dict[str, Item] = {}
ANOLE = "width_step=3:widths=4,13"  # ADT-Tree's steps and bounds for Anole; the recipe has LlamaGen's
FORCED_BATCH = 8  # pictures that the models read at once


def compared(scope: DiscreteScope) -> dict[str, str]:
    """The methods of the paper's tables by name."""
    k = scope.own_k(1000)
    return {"EAGLE-2": EAGLE2, "LANTERN": lantern(k, 0.4), "ADT-Tree": f"adt-tree:{ANOLE}",
            "ADT-Tree + LANTERN": f"adt-tree+lantern:{ANOLE}:k={k}:delta=0.4"}


def table_1_jobs(scope: DiscreteScope) -> Iterator[PictureRun | Latency]:
    yield scope.baseline()
    for T in scope.temperatures:
        for text in compared(scope).values():
            yield PictureRun.of(text, T)
            yield Latency.of(text, T)


@item(ITEMS, "adt-table-1", "ADT-Tree, Tables I to IV: speed, mean depth and quality", table_1_jobs, quick=False)
def table_1(report: DiscreteReport, section: Section) -> None:
    scope, methods = report.scope, compared(report.scope)

    def pictures(text: str, T: float = 1.0) -> DiscretePictures:
        return report.study.pictures(PictureRun.of(text, T))

    def here(row: dict[str, str]) -> dict:
        if float(row["T"]) not in scope.temperatures:
            return {}
        if row["method"] == "Anole":
            return {"speed-up": 1.0, "tau": 1.0}
        run = PictureRun.of(methods[row["method"]], float(row["T"]))
        those = report.study.pictures(run)
        return {"speed-up": report.speedup(run), "tau": those.tau, "mean depth": those.mean_depth,
                "mean nodes": those.mean_nodes, "acceptance": those.decoded.acceptance_rate}

    section.beside("adt-table-1", here)
    section.beside("adt-table-2", here, "-parti")
    section.text("Here both tables have the same runs: EAGLE-2's and LANTERN's trees have 5 levels, ADT-Tree's the "
                 "steps and bounds that the paper has for Anole, all at most 60 nodes, and a depth is of drafted "
                 f"levels. {scope.about_k(1000)} HPSv2 and CLIP score need weights that no package brings. Quality at "
                 "temperature 1:")
    runs = {name: PictureRun.of(text) for name, text in methods.items()}
    section.beside("adt-table-3", lambda row: {} if row["method"] == "Anole" else
                   report.quality(runs[row["method"]]), "-quality")
    report.noise(section, list(runs.values()))
    for T in scope.temperatures[::-1]:
        speed = [papers.value("adt-table-1", "speed-up", T=T, method=name) for name in ("ADT-Tree", "EAGLE-2")]
        finding = report.faster(methods["ADT-Tree"], EAGLE2, T)
        section.claim(f"at temperature {T:g} ADT-Tree is faster than EAGLE-2, {speed[0] / speed[1]:.2f} times",
                      finding.holds, f"{finding.factor} in seconds of single pictures")
    holds, evidence = report.gain(methods["ADT-Tree"], EAGLE2, larger=False)
    section.claim("at temperature 1 ADT-Tree does not accept more than EAGLE-2: its gain is cheaper trees", holds,
                  f"{evidence}; mean nodes {pictures(methods['ADT-Tree']).mean_nodes:.1f} against "
                  f"{pictures(EAGLE2).mean_nodes:.1f}")
    shallower = report.contrast("mean depth", {EAGLE2: 1.0, methods["ADT-Tree"]: -1.0})
    section.claim("ADT-Tree's trees are shallower than EAGLE-2's at temperature 1", shallower.holds,
                  f"levels that EAGLE-2's trees have more: {shallower}")
    section.claim("LANTERN's acceptance adds to ADT-Tree's",
                  *report.gain(methods["ADT-Tree + LANTERN"], methods["ADT-Tree"]))


BASES = {"TokenFlock": "adt-tree:start=tokenflock", "depth from 1": "adt-tree:flat_depth=1",
         "width from 25": "adt-tree:flat_width=25",
         "depth from 1, width from 25": "adt-tree:flat_depth=1:flat_width=25", "ADT-Tree": "adt-tree"}


def table_5_jobs(scope: DiscreteScope) -> Iterator[PictureRun | Latency]:
    for text in BASES.values():
        yield from (PictureRun.of(text), Latency.of(text))


@item(ITEMS, "adt-table-5", "ADT-Tree, Table V: where depth and width start from", table_5_jobs, quick=False)
def table_5(report: DiscreteReport, section: Section) -> None:
    def here(row: dict[str, str]) -> dict:
        run = PictureRun.of(BASES[row["base values"]])
        those = report.study.pictures(run)
        return {"speed-up": report.speedup(run), "tau": those.tau, "mean depth": those.mean_depth,
                "mean nodes": those.mean_nodes}

    section.beside("adt-table-5", here)
    section.text("Here one model stands beside both. Where the paper leaves a choice open, `Adaptation` in trees.py "
                 "names ours.")
    section.claim("a depth that starts from 1 accepts less", *report.gain("adt-tree", BASES["depth from 1"]))
    section.claim("a width that starts from 25 does not accept less",
                  *report.gain("adt-tree", BASES["width from 25"], larger=False))


STARTS = {"horizontal (the default)": "adt-tree", "vertical": "adt-tree:start=vertical",
          "random": "adt-tree:start=random"}


@item(ITEMS, "adt-figure-8", "ADT-Tree, Figure 8: from which neighbor a tree's shape starts",
      lambda scope: [job.of(text) for text in STARTS.values() for job in (PictureRun, Latency)], quick=False)
def figure_8(report: DiscreteReport, section: Section) -> None:
    rows = []
    for name, text in STARTS.items():
        pictures = report.study.pictures(PictureRun.of(text))
        rows.append({"start": name, "speedup": report.speedup(PictureRun.of(text)), "tau": pictures.tau,
                     "mean depth": pictures.mean_depth, "mean nodes": pictures.mean_nodes,
                     "acceptance": pictures.decoded.acceptance_rate})
    section.text("At temperature 1. The paper's figure has bars without numbers.")
    section.table(rows)
    for name in ("vertical", "random"):
        finding = report.faster(STARTS["horizontal (the default)"], STARTS[name])
        section.claim(f"to start from the left neighbor's shape is faster than {name}", finding.holds,
                      f"{finding.factor} in seconds of single pictures")


def forced(report: DiscreteReport, run: PictureRun) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the models say of the finished pictures of a run.

    Returns:
        (n, L) the largest target probability; (n, L - 1), from the second token on, the largest draft probability,
        sum min(P, Q), and log2(1 + how many tokens the draft has before the drawn one)
    """
    def compute():
        study, parts = report.study, []
        for tokens in study.pictures(run).decoded.tokens.split(FORCED_BATCH):
            start = FORCED_BATCH * len(parts)
            target, draft = teacher_forced_probs(study.pipeline, study.prompts_of(start, len(tokens)),
                                                 tokens.to(study.pipeline.device),
                                                 study.sampling_of(start, len(tokens), run.temperature))
            drawn = draft.gather(2, tokens[:, 1:, None].to(draft.device))
            parts.append((target.max(-1).values, draft.max(-1).values, torch.minimum(target[:, 1:], draft).sum(-1),
                          torch.log2(1 + (draft > drawn).sum(-1))))
        return tuple(torch.cat(part).cpu() for part in zip(*parts))

    return report.once(("forced", run), compute)


def correlations(a: Tensor, b: Tensor) -> np.ndarray:
    """(n,) the correlation of two maps (n, positions) of each picture, NaN where one does not vary."""
    return np.array([np.corrcoef(x, y)[0, 1] if x.std() and y.std() else np.nan
                     for x, y in zip(a.flatten(1).double().numpy(), b.flatten(1).double().numpy())])


def textures(images: np.ndarray, side: int) -> Tensor:
    """(n, side * side) the standard deviation of each token's pixels, of pictures (n, H, W, 3)."""
    n, height, width, _ = images.shape
    return torch.from_numpy(images.reshape(n, side, height // side, side, width // side, 3).astype(np.float64)
                            .std((2, 4)).mean(-1)).flatten(1)


def maps_of(report: DiscreteReport, run: PictureRun) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs of maps (n, positions) of a run's pictures, by what their correlation is called."""
    def compute():
        study, side = report.study, report.study.pipeline.gpt.config.grid
        decoded = study.pictures(run).decoded
        top, _, overlap, rank = forced(report, run)
        gains, texture = steps_gain(decoded.num_accepted).float(), textures(pixels(study, decoded.tokens), side)
        maps = top.view(-1, side, side)
        return {"the texture of its pixels with the tokens gained by the step": (texture, gains),
                "the texture of its pixels with the token's rank in the draft": (texture[:, 1:], rank),
                "the texture of its pixels with the target's top-1": (texture, top),
                "the target's top-1 with the tokens gained by the step": (top, gains),
                "sum min(target, draft) with the tokens gained by the step": (overlap, gains[:, 1:]),
                "the target's top-1 with the left neighbor's": (maps[:, :, 1:], maps[:, :, :-1]),
                "the target's top-1 with the upper neighbor's": (maps[:, 1:], maps[:, :-1])}

    return report.once(("maps", run), compute)


@item(ITEMS, "adt-figures-4-5-9", "ADT-Tree, Figures 3b, 4, 5 and 9: probabilities, ranks and gains by position",
      lambda scope: [PictureRun.of(EAGLE2)], quick=False)
def figures_4_5_9(report: DiscreteReport, section: Section) -> None:
    study, run = report.study, PictureRun.of(EAGLE2)
    images = pixels(study, study.pictures(run).decoded.tokens)
    top, draft, overlap, _ = forced(report, run)
    side, unknown = study.pipeline.gpt.config.grid, torch.full((len(top), 1), torch.nan)  # at the first token
    gains = steps_gain(study.pictures(run).decoded.num_accepted).float()
    draft, shared = (torch.cat([unknown, values], 1) for values in (draft, overlap))
    shown = [i for i in SHOWN[:6] if i < len(top)]
    figure, all_axes = axes(4, len(shown), 1.5, 1.5)
    for column, i in zip(all_axes.T, shown):
        show(column[0], images[i], study.prompts[i % len(study.prompts)])
        show(column[1], top[i].view(side, side), "target's top-1")
        show(column[2], draft[i].view(side, side), "draft's top-1")
        show(column[3], gains[i].view(side, side), "tokens of the step")
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
    finding = {name: report.contrast(f"correlation of {name}", {run: 1.0},
                                     lambda run, name=name: correlations(*maps_of(report, run)[name]))
               for name in maps_of(report, run)}
    section.text("Texture is the standard deviation of a token's pixels, rank the logarithm of one more than the "
                 "number of tokens that are likelier for the draft model, of all tokens from the second on. The "
                 "correlations are over the positions of a picture, means over pictures:")
    section.table([{"correlation of": name, "mean": found.value, "+-": found.half, "pictures": found.pictures}
                   for name, found in finding.items()])
    by_texture, deep, sharp, by_top, _, left, up = finding.values()
    section.claim("simple regions accept more", by_texture.value < 0 if by_texture.holds is not None else None,
                  f"correlation of texture with the tokens gained {by_texture}")
    section.claim("in complex regions tokens have a deeper rank in the draft (Figure 3b, of "
                  "accepted ones)", deep.holds,
                  f"correlation of texture with the rank {deep}")
    section.claim("complex regions have the sharper distributions", sharp.holds,
                  f"correlation of texture with the target's top-1 {sharp}")
    section.claim("a low top-1 goes with more acceptance", by_top.value < 0 if by_top.holds is not None else None,
                  f"correlation of the target's top-1 with the tokens gained {by_top}")
    section.claim("neighbors are alike", all_hold(left.holds, up.holds),
                  f"correlation with the left neighbor {left}; with the upper {up}")
