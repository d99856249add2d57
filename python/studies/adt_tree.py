"""ADT-Tree's tables, figures and cost model (arXiv:2512.21857)."""
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from specvis.cli.discrete_study import Latency, PictureRun
from specvis.decoding.methods import Method, parse_method
from specvis.pipelines.positions import steps_gain, teacher_forced_probs

from . import papers
from .base import Item, item, pixels
from .discrete import DiscreteReport, DiscreteScope
from .memory import Memory
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
    section.text("Here; depth is drafted levels (EAGLE-2 drafts 5 there, 4 in our recipe).")
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


@item(ITEMS, "adt-table-5", "ADT-Tree, Table V: where a tree's shape starts from",
      lambda scope: [PictureRun.of(text) for text in STARTS.values()], quick=False)
def table_5(report: DiscreteReport, section: Section) -> None:
    rows = []
    for name, text in STARTS.items():
        pictures = report.study.pictures(PictureRun.of(text))
        rows.append({"start": name, "tau": pictures.tau, "mean depth": pictures.mean_depth,
                     "mean nodes": pictures.mean_nodes, "acceptance": pictures.decoded.acceptance_rate})
    section.text("At temperature 1. The last two rows are the ablation's fixed starts; where the paper leaves a choice "
                 "open, `Adaptation` in trees.py says what was taken.")
    section.table(rows)
    for name in ("vertical", "random"):
        section.claim(f"the default, the left neighbor's shape, is a better start than {name}",
                      *report.tau_gain(STARTS["horizontal (the default)"], STARTS[name]))


RANKED = ("eagle2:width=10:nodes=60", "adt-tree")
MAX_RANK = 12


@item(ITEMS, "adt-figure-3b", "ADT-Tree, Figure 3b: rank of the accepted token",
      lambda scope: [PictureRun.of(text) for text in RANKED], quick=False)
def figure_3b(report: DiscreteReport, section: Section) -> None:
    rows, means = [], {}
    figure, (both,) = axes(1, 2, 4.2, 3.2)
    for axis, run in zip(both, map(PictureRun.of, RANKED)):
        ranks, (top, _, _) = report.study.pictures(run).ranks, forced(report, run)
        sure = top >= top.median()
        for name, where in (("likelier half", sure), ("less likely half", ~sure)):
            those = ranks[where & (ranks >= 0)].clamp(max=MAX_RANK - 1)
            share = torch.bincount(those, minlength=MAX_RANK).float() / max(len(those), 1)
            mean = 1 + those.float().mean().item() if len(those) else None  # no draft was accepted there
            means.setdefault(name, []).append(mean)
            axis.plot(1 + np.arange(MAX_RANK), share.where(share > 0, torch.nan).numpy(), "o-", ms=4, lw=1, label=name)
            rows.append({"method": run.method.label, "positions": name, "accepted drafts": len(those),
                         "mean rank": mean, "rank 1": share[0].item(), "rank 2": share[1].item(),
                         "rank 3": share[2].item(), "rank 4 or more": share[3:].sum().item()})
        axis.set(xlabel=f"rank among the siblings ({MAX_RANK}: and beyond)", ylabel="share of accepted drafts",
                 yscale="log")
        axis.set_title(run.method.label, fontsize=8)
        axis.legend(fontsize=7)
    section.figure(figure, "Rank, by the draft's probability, of the sibling that was accepted, for positions where "
                           "the target's likeliest token is likelier or less likely than its median")
    section.table(rows)
    easy, hard = means["likelier half"], means["less likely half"]
    is_known = None not in easy + hard
    section.claim("wide trees pay where prediction is hard",
                  all(b > a for a, b in zip(easy, hard)) if is_known else None,
                  f"EAGLE-2's accepted ranks average {hard[0]:.2f} there, {easy[0]:.2f} elsewhere" if is_known else
                  "in one half no draft was accepted")


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
    section.figure(figure, "Pictures of EAGLE-2, the largest probability of target and draft at each token, and how "
                           "many tokens the step gained that drew it", "-pictures")
    figure, (three,) = axes(1, 3, 3.4, 3)
    for axis, (name, values) in zip(three, {"target's top-1": top, "tokens of the step": gains,
                                            "sum min(target, draft)": shared}.items()):
        image = axis.imshow(values.mean(0).view(side, side).numpy())
        axis.set(xticks=[], yticks=[])
        axis.set_title(f"{name}, mean of {len(top)} pictures", fontsize=8)
        figure.colorbar(image, ax=axis)
    section.figure(figure, "Means over all pictures", "-means")
    maps = top.view(-1, side, side)
    difficulty, left, up = (correlation(a, b) for a, b in (
        (top, gains), (maps[:, :, 1:], maps[:, :, :-1]), (maps[:, 1:], maps[:, :-1])))
    section.table([{"correlation over all positions of": name, "value": value} for name, value in (
        ("the target's top-1 with the tokens gained by the step", difficulty),
        ("sum min(target, draft) with the tokens gained by the step", correlation(overlap, gains[:, 1:])),
        ("the target's top-1 with the left neighbor's", left), ("the target's top-1 with the upper neighbor's", up))])
    section.text("At the edges of the pictures, which are white, the target is unsure among codes that are all white, "
                 "and so is the draft: there top-1 is low, and yet what they share and what is accepted is much.")
    section.claim("difficulty differs between regions, and acceptance follows it", difficulty > 0.1,
                  f"correlation of the target's top-1 with the tokens gained {difficulty:.2f}")
    section.claim("neighbors are alike", min(left, up) > 0.2,
                  f"correlation with the left neighbor {left:.2f}, with the upper {up:.2f}")


# --- the cost of a tree ------------------------------------------------------------------------------------------

VANILLA = Memory(parse_method("vanilla"))


def cost_jobs(scope: DiscreteScope) -> list[tuple[Method, Latency, Memory]]:
    methods = [parse_method(f"eagle2:depth={depth}:width={width}:nodes={1 + width + min(depth - 1, 5) * width}")
               for depth in scope.depth for width in scope.width]
    return [(m, Latency(m, 1.0, 2 if len(scope.depth) > 2 else 1), Memory(m)) for m in methods]


def cost_rows(report: DiscreteReport) -> list[dict]:
    """A row for each tree. Fitted columns are still 0."""
    study, rows = report.study, []
    for method, latency, memory in cost_jobs(report.scope):
        timings, (d, w, N) = study.seconds(latency), (method.depth, method.width, method.max_nodes)
        steps = np.array([study.pipeline.num_tokens / tau for tau in timings.tau])
        rows.append({"depth d": d, "width w": w, "nodes N": N,
                     "step (ms)": 1e3 * float(np.median(np.array(timings.method) / steps)), "C_T fitted (ms)": 0.0,
                     "rows C_S": N + w + (d - 1) * w,
                     "memory (MB)": (memory.bytes(study) - VANILLA.bytes(study)) / 1e6, "C_S fitted (MB)": 0.0,
                     "tau": float(np.mean(timings.tau))})
    return rows


@item(ITEMS, "adt-cost", "ADT-Tree, equations 4 and 5: cost of a tree in time and space",
      lambda scope: [job for jobs in cost_jobs(scope) for job in jobs[1:]] + [VANILLA], quick=False)
def cost(report: DiscreteReport, section: Section) -> None:
    section.text("The equations' text was not at hand. As cost in time we take C_T = d t_D(w) + t_T(N), d forwards of "
                 "the drafter on w nodes and one of the target on N; as cost in space C_S = N + w + (d - 1) w, the "
                 "rows of V probabilities that the target's and the drafter's forwards give. Memory is the most that "
                 "all tensors of one picture took together, less the baseline's.")
    rows = cost_rows(report)
    depth, width, nodes, space, step, memory = np.array([[row[name] for name in (
        "depth d", "width w", "nodes N", "rows C_S", "step (ms)", "memory (MB)")] for row in rows], dtype=np.float64).T
    one = np.ones(len(rows))
    time_fit, time_weights, time_share = least_squares(np.stack([one, depth, (depth - 1) * width, nodes], 1), step)
    space_fit, space_weights, space_share = least_squares(np.stack([one, space], 1), memory)
    for row, a, b in zip(rows, time_fit, space_fit):
        row |= {"C_T fitted (ms)": float(a), "C_S fitted (MB)": float(b)}
    section.table(rows)
    few = " (as many weights as trees: R^2 says nothing)" if len(rows) <= time_weights.size else ""
    section.text(f"Least squares, single pictures: a step takes {time_weights[0]:.2f} ms + {time_weights[1]:.2f} ms a "
                 f"level + {time_weights[2]:.3f} ms a drafted inner node + {time_weights[3]:.3f} ms a verified node, "
                 f"R^2 {time_share:.2f}{few}; memory is {space_weights[0]:.2f} MB + {1e3 * space_weights[1]:.1f} kB a "
                 f"row, R^2 {space_share:.2f}. (A row of float32 is "
                 f"{4e-3 * report.study.pipeline.gpt.config.vocabulary:.1f} kB; a node has two rows of logits too.)")
    figure, (three,) = axes(1, 3, 3.6, 3)
    for axis, x, y, unit in ((three[0], step, time_fit, "step (ms)"), (three[1], memory, space_fit, "memory (MB)")):
        axis.plot(x, y, "o", ms=4)
        axis.plot([0, 1.05 * max(x.max(), y.max())], [0, 1.05 * max(x.max(), y.max())], "k:", lw=1)
        axis.set(xlabel=f"measured {unit}", ylabel=f"fitted {unit}")
    for value in report.scope.width:
        axis = three[2]
        axis.plot(depth[width == value], step[width == value], "o-", ms=4, lw=1, label=f"width {value}")
    three[2].set(xlabel="depth", ylabel="measured step (ms)")
    three[2].legend(fontsize=7)
    section.figure(figure, "The linear costs against measured steps and memory of single pictures")


def least_squares(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Fitted values, weights, and the share of y's variance that they explain."""
    weights, *_ = np.linalg.lstsq(x, y, rcond=None)
    spread = ((y - y.mean()) ** 2).sum()
    return x @ weights, weights, float(1 - ((y - x @ weights) ** 2).sum() / spread) if spread else 1.0
