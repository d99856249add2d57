"""LANTERN's tables and figures (arXiv:2410.03355). LANTERN++'s runs are among COOL-SD's, which compares with it."""
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from specvis.study.discrete import Latency, PictureRun
from specvis.study.plots import curve_styles, method_style

from . import papers
from .base import Item, alike, decided, item, mean_and_half, pixels
from .discrete import DiscreteReport, DiscreteScope, lantern
from .general import curve_gap
from .page import Section, axes, heatmap, show
from .quality import network

ITEMS: dict[str, Item] = {}


def grows(values: np.ndarray, axis: int, slack: float) -> bool:
    return bool((np.diff(values, axis=axis) >= -slack).all())


def grid_jobs(scope: DiscreteScope) -> list[PictureRun]:
    return [scope.baseline(), PictureRun.of("eagle2"), *scope.grid]


@item(ITEMS, "lantern-table-2", "LANTERN, Table 2: average acceptance over k and delta", grid_jobs)
def table_2(report: DiscreteReport, section: Section) -> None:
    scope, study = report.scope, report.study
    acceptance, tau = (np.array([[value(study.pictures(PictureRun.of(lantern(k, delta)))) for delta in scope.delta]
                                 for k in scope.k])
                       for value in (lambda p: p.decoded.acceptance_rate, lambda p: p.tau))
    eagle = study.pictures(PictureRun.of("eagle2"))
    section.text("Accepted drafts per drafted level at temperature 1. k counts other codes of "
                 f"{study.pipeline.gpt.config.vocabulary}; LANTERN's k is of 16384, and counts the draft's own.")
    section.table([{"k": 0, **{f"delta {delta:g}": eagle.decoded.acceptance_rate for delta in scope.delta}},
                   *({"k": k, **{f"delta {delta:g}": value for delta, value in zip(scope.delta, line)}}
                     for k, line in zip(scope.k, acceptance.tolist()))])
    figure, (both,) = axes(1, 2, 4.2, 3)
    heatmap(both[0], acceptance, scope.k, scope.delta, "acceptance", ("k", "delta"))
    heatmap(both[1], tau, scope.k, scope.delta, "tau", ("k", "delta"))
    section.figure(figure, "Colored tables of acceptance (left) and tau (right): a row for each k, a column for each "
                           "delta")
    section.text("The paper: a draft of naive speculative decoding is accepted with probability 4 % (a note on the "
                 "paper); the table's numbers were not at hand.")
    section.claim("more neighbors and a larger delta accept more", grows(acceptance, 0, 0.01) and
                  grows(acceptance, 1, 0.01) and acceptance[-1, -1] > eagle.decoded.acceptance_rate,
                  f"from {eagle.decoded.acceptance_rate:.3f} without neighbors to {acceptance[-1, -1]:.3f}")


def table_3_jobs(scope: DiscreteScope) -> Iterator[PictureRun | Latency]:
    for T in (0.0, 1.0):
        yield scope.baseline(T)
        for text in ("eagle2", "lantern", scope.strongest):
            yield PictureRun.of(text, T)
            yield Latency.of(text, T)


@item(ITEMS, "lantern-table-3", "LANTERN, Table 3: speed and quality at temperature 0 and 1", table_3_jobs)
def table_3(report: DiscreteReport, section: Section) -> None:
    strongest, jobs = report.scope.strongest, list(table_3_jobs(report.scope))
    runs = [job for job in jobs if isinstance(job, PictureRun) and job.method.drafting != "none"]
    section.text("The paper, LlamaGen-XL (its abstract gives the ratios 1.75 and 1.82, a note on it these numbers):")
    section.table(papers.LANTERN_TABLE_3, "-paper")
    section.text(f"Here, {report.study.num_images} pictures in batches:")
    section.table([report.row(run) for run in runs])
    report.noise(section, [run for run in runs if run.temperature])
    section.text("At temperature 0 the baseline has one picture a prompt: the noise is 0, every change counts.")
    section.text("Single pictures, each right after the baseline's of the same prompt:")
    section.table([report.latency_row(job) for job in jobs if isinstance(job, Latency)], "-latency")
    for T, ratio in ((0.0, "1.75"), (1.0, "1.82")):
        eagle, ours = (report.tau(text, T) for text in ("eagle2", strongest))
        holds, times = report.faster(strongest, "eagle2", T)
        section.claim(f"at temperature {T:g} LANTERN is faster than EAGLE-2, {ratio} times", holds,
                      f"{times:.2f} times in seconds of single pictures; tau grows {ours / eagle:.2f} times, from "
                      f"{eagle:.2f} to {ours:.2f}")
    scores = report.quality(PictureRun.of(strongest))
    name, distance = scores["nearest name"], scores["kernel distance"]
    section.claim("its agreement with the prompt stays (CLIP score)",
                  False if name.significant and name.value < name.baseline else None,
                  f"nearest name {name.value:.3g}, the baseline's {name.baseline:.3g} +- {name.noise:.2g}")
    section.claim("its distance (FID) grows somewhat", decided(distance.value - distance.baseline, distance.noise),
                  f"kernel distance {distance.value:.3g}, the baseline's own {distance.baseline:.2g} +- "
                  f"{distance.noise:.2g}")


def table_4_runs(scope: DiscreteScope) -> list[PictureRun]:
    texts = [*(lantern(100, 0.2, metric=metric) for metric in ("l2", "cosine", "random")),
             *(lantern(100, delta, cutoff="jsd") for delta in (0.02, 0.05, 0.1)),
             *(lantern(100, delta) for delta in scope.delta)]
    return list(dict.fromkeys(map(PictureRun.of, texts)))


@item(ITEMS, "lantern-table-4", "LANTERN, Table 4: metric of nearness and measure of divergence",
      lambda scope: [scope.baseline(), *table_4_runs(scope)], quick=False)
def table_4(report: DiscreteReport, section: Section) -> None:
    runs = table_4_runs(report.scope)
    section.table([report.row(run) for run in runs])
    report.noise(section, runs)
    of = {metric: PictureRun.of(lantern(100, 0.2, metric=metric)) for metric in ("l2", "cosine", "random")}
    margin = report.quality(of["l2"])["kernel distance"].noise
    gap, half = report.contrast(lambda d: d(of["cosine"]) - d(of["l2"]), list(of.values()))
    same = torch.equal(*(report.study.pictures(of[metric]).decoded.tokens for metric in ("l2", "cosine")))
    section.claim("l2 and cosine are about equal", same or alike(gap, half, margin),
                  "the codes have unit length: both find the same neighbors and draw the same pictures" if same else
                  f"the kernel distance with cosine differs by {gap:+.2g} +- {half:.2g}; the baseline's own noise is "
                  f"{margin:.2g}")
    gap, half = report.contrast(lambda d: d(of["random"]) - (d(of["l2"]) + d(of["cosine"])) / 2, list(of.values()))
    section.claim("at equal delta random neighbors are slower, and their distance (FID) is lower", decided(-gap, half),
                  f"with random ones the kernel distance differs by {gap:+.2g} +- {half:.2g}, tau is "
                  f"{report.study.pictures(of['random']).tau:.2f} against {report.study.pictures(of['l2']).tau:.2f}")
    rules = [(run, run.method.acceptance) for run in runs]
    cutoffs = {cutoff: sorted((run for run, rule in rules if rule.cutoff == cutoff and rule.metric == "l2"),
                              key=lambda run: report.study.pictures(run).tau) for cutoff in ("tvd", "jsd")}
    gap, half, shared = curve_gap(report, cutoffs["jsd"], cutoffs["tvd"])
    section.claim("total variation and Jensen-Shannon divergence do equally well at equal speed",
                  alike(gap, half, margin) if shared else None,
                  f"over tau {shared[0]:.2f} to {shared[1]:.2f} the kernel distance with the latter differs by "
                  f"{gap:+.2g} +- {half:.2g}" if shared else "their curves have no tau in common")


def resampled(report: DiscreteReport, tokens: Tensor) -> dict[str, Tensor]:
    """Tokens (n, L) of pictures, and each of them replaced by one of its nearest codes, drawn uniformly."""
    V = report.study.pipeline.gpt.config.vocabulary
    pick = torch.randint(2**31, tokens.shape, generator=torch.Generator().manual_seed(0))
    versions = {"as drawn": tokens}
    for k in (k for k in (10, 30, 100, 300) if k < V):
        neighbors = report.study.pipeline.neighbors(k).long().cpu()
        nearest = torch.cat([torch.arange(V)[:, None], neighbors], 1)  # the code itself is the first of its nearest
        versions[f"{k} nearest"] = nearest[tokens].gather(2, (pick % k)[..., None])[..., 0]
    return versions | {"any code": pick % V}


@item(ITEMS, "lantern-figure-3", "LANTERN, Figure 3: codes re-sampled among their nearest",
      lambda scope: [scope.baseline()])
def figure_3(report: DiscreteReport, section: Section) -> None:
    study = report.study
    tokens = study.pictures(report.scope.baseline()).decoded.tokens[:study.num_images]
    pictures = {name: pixels(study, version) for name, version in resampled(report, tokens).items()}
    vectors = {name: network()(these)[0] for name, these in pictures.items()}
    count = min(8, len(tokens))
    figure, all_axes = axes(count, len(pictures), 0.95, 0.95)
    for column, (name, these) in enumerate(pictures.items()):
        for line, picture in enumerate(these[:count]):
            show(all_axes[line, column], picture, name if line == 0 else "")
    section.figure(figure, "Pictures, a row for each: as drawn in the first column, then with every code replaced by "
                           "one drawn uniformly among its nearest, itself counted, ever more of them")
    drawn = pictures["as drawn"].astype(np.float64)

    def cosine(name):
        a, b = (vectors[n] / np.linalg.norm(vectors[n], axis=1, keepdims=True) for n in ("as drawn", name))
        return float((a * b).sum(1).mean())

    rows = []
    for name, these in list(pictures.items())[1:]:
        error = ((these - drawn) ** 2).mean((1, 2, 3))
        rows.append({"codes": name, "PSNR (dB)": float((10 * np.log10(255**2 / error.clip(1e-9))).mean()),
                     "cosine of features": cosine(name)})
    section.table(rows)
    V = study.pipeline.gpt.config.vocabulary
    section.text(f"Of {V} codes 100 are {100 / V:.1%}; of LlamaGen's 16384 they are 0.6 %: the row of 30 is the like "
                 "of the paper's.")
    survived = next((row for row in rows if row["codes"] == "30 nearest"), rows[0])
    section.claim("the picture survives", survived["cosine of features"] > (1 + rows[-1]["cosine of features"]) / 2,
                  f"features keep a cosine of {survived['cosine of features']:.2f} with 30 nearest, "
                  f"{rows[-1]['cosine of features']:.2f} with any code")


@item(ITEMS, "lantern-figures-5-7", "LANTERN, Figures 5 to 7: trade-off curves and grids over k and delta", grid_jobs)
def figures_5_7(report: DiscreteReport, section: Section) -> None:
    scope, study = report.scope, report.study
    runs = {(k, delta): PictureRun.of(lantern(k, delta)) for k in scope.k for delta in scope.delta}
    names = list(report.quality(runs[scope.k[0], scope.delta[0]]))
    values = {name: np.array([[report.quality(runs[k, d])[name].value for d in scope.delta] for k in scope.k])
              for name in names}
    tau, errors = np.array([[mean_and_half(study.pictures(runs[k, d]).decoded.tau) for d in scope.delta]
                            for k in scope.k]).transpose(2, 0, 1)
    figure, (all_axes,) = axes(1, len(names), 3.6, 3.2)
    for axis, name in zip(all_axes, names):
        score = report.quality(PictureRun.of("eagle2"))[name]
        for k, x, error, y, style in zip(scope.k, tau, errors, values[name], curve_styles("lantern", len(scope.k))):
            axis.errorbar(x, y, score.noise, error, ms=4, lw=1, elinewidth=0.4, label=f"k {k}", **style)
        x, error = mean_and_half(study.pictures(PictureRun.of("eagle2")).decoded.tau)
        axis.errorbar(x, score.value, score.noise, error, elinewidth=0.4, label="EAGLE-2", **method_style("eagle2"))
        axis.axhspan(score.baseline - score.noise, score.baseline + score.noise, color="gray", alpha=0.25)
        axis.set(xlabel="tau", ylabel=name)
        axis.legend(fontsize=6)
    section.figure(figure, "Distances to baseline pictures and scores, over tau: a curve for each k, a point for each "
                           "delta, and EAGLE-2 without relaxation; bars are the noise and two standard errors of tau, "
                           "the band is the baseline with its noise", "-curves")
    figure, (all_axes,) = axes(1, 1 + len(names), 3.0, 2.6)
    for axis, (name, table) in zip(all_axes, {"tau": tau, **values}.items()):
        heatmap(axis, table, scope.k, scope.delta, name, ("k", "delta"))
    section.figure(figure, "Colored tables of tau, and of every distance and score: a row for each k, a column for "
                           "each delta", "-grid")
    for index in (0, 2, 5):
        if index < study.num_images:
            section.figure(picture_grid(report, runs, index), "A picture, a row for each k, a column for the baseline "
                           f"and for each delta, {study.prompts[index % len(study.prompts)]!r}", f"-pictures-{index}")
    section.claim("larger k and delta are faster", grows(tau, 0, 0.05) and grows(tau, 1, 0.05),
                  f"tau from {tau.min():.2f} to {tau.max():.2f}")
    corners = [runs[k, d] for k in (scope.k[0], scope.k[-1]) for d in (scope.delta[0], scope.delta[-1])]
    gap, half = report.contrast(lambda d: d(corners[3]) - d(corners[0]), corners)
    section.claim("and lower the quality", decided(gap, half),
                  f"from the smallest to the largest the kernel distance grows by {gap:+.2g} +- {half:.2g}")
    gap, half = report.contrast(lambda d: d(corners[2]) - d(corners[0]), corners)
    margin = report.quality(corners[0])["kernel distance"].noise
    section.claim("at a small delta a larger k is without significant loss", alike(gap, half, margin),
                  f"at delta {scope.delta[0]:g} tau goes from {tau[0, 0]:.2f} to {tau[-1, 0]:.2f}, the kernel distance "
                  f"by {gap:+.2g} +- {half:.2g}; the baseline's own noise is {margin:.2g}")


def picture_grid(report: DiscreteReport, runs: dict[tuple[int, float], PictureRun], index: int):
    """A figure of picture `index`: a row for each k, a column for the baseline and for each delta."""
    scope, study = report.scope, report.study
    figure, all_axes = axes(len(scope.k), 1 + len(scope.delta), 1.0, 1.05)
    figure.suptitle(study.prompts[index % len(study.prompts)], fontsize=8)
    for line, k in enumerate(scope.k):
        for column, run in enumerate((scope.baseline(), *(runs[k, d] for d in scope.delta))):
            tokens = study.pictures(run).decoded.tokens[index:index + 1]
            title = "baseline" if column == 0 else f"delta {scope.delta[column - 1]:g}, k {k}"
            show(all_axes[line, column], pixels(study, tokens)[0], title)
    return figure
