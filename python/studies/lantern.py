"""LANTERN's tables and figures (arXiv:2410.03355). LANTERN++'s runs are among COOL-SD's, which compares with it."""
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from specvis.study.discrete import Latency, PictureRun
from specvis.study.plots import curve_styles, method_style

from . import papers
from .base import SHOWN, SMALL_CHANGE, Item, all_hold, draw_until_decided, item, mean_and_half, pixels
from .discrete import EAGLE2, DiscreteReport, DiscreteScope, lantern
from .page import Section, axes, heatmap, show
from .quality import mean_and_error, network

ITEMS: dict[str, Item] = {}


def run_of(row: dict[str, str], scope: DiscreteScope) -> PictureRun:
    """Our run of a row of the paper's tables."""
    text = {"plain": "vanilla", "EAGLE-2": EAGLE2, "LANTERN": ""}[row.get("method", "LANTERN")]
    if not text:
        changed = {name: row[column].lower() for name, column in (("metric", "nearness"), ("cutoff", "divergence"))
                   if row.get(column) not in (None, "l2", "TVD")}
        text = lantern(scope.own_k(int(row.get("k", 1000))), float(row["delta"]), **changed)
    return PictureRun.of(text, float(row.get("T", 1.0)))


def runs_of(name: str, scope: DiscreteScope, **where: str) -> list[PictureRun]:
    return [run_of(row, scope) for row in papers.table(name) if where.items() <= row.items()]


NAIVE = {"speculative decoding, LlamaGen-L drafts": "speculative", "EAGLE-2": EAGLE2}


@item(ITEMS, "lantern-table-1", "LANTERN, Table 1: naive methods at temperature 0",
      lambda scope: [PictureRun.of(text, 0.0) for text in NAIVE.values()], quick=False)
def table_1(report: DiscreteReport, section: Section) -> None:
    section.beside("lantern-table-1", lambda row: {"tau, here": report.tau(NAIVE[row["method"]], 0.0)}
                   if row["method"] in NAIVE else {})
    section.text("Here EAGLE's head drafts for speculative decoding, too: a chain of 4. Medusa is not implemented.")


def grid_jobs(scope: DiscreteScope) -> list[PictureRun]:
    return [scope.baseline(), PictureRun.of(EAGLE2), *scope.grid]


@item(ITEMS, "lantern-table-2", "LANTERN, Table 2: acceptance over k and delta", grid_jobs, quick=False)
def table_2(report: DiscreteReport, section: Section) -> None:
    scope, study = report.scope, report.study
    runs = {(k, delta): PictureRun.of(lantern(k, delta)) for k in scope.k for delta in scope.delta}

    def here(row: dict[str, str]) -> dict:
        run = run_of(row, scope)
        if row["method"] == "LANTERN" and run not in scope.grid:
            return {}
        pictures = study.pictures(run)
        return {"acceptance": pictures.first_acceptance, "of all levels": pictures.decoded.acceptance_rate,
                "tau": pictures.tau}

    section.beside("lantern-table-2", here)
    section.text(f"{scope.about_k(*scope.paper_k)} Ours counts other codes than the draft's own. Our temperature is 1, "
                 "and a level has up to 10 drafts: it is accepted if one of them is, while the paper's number is of "
                 "one drafted token.")
    tau = np.array([[study.pictures(runs[k, delta]).tau for delta in scope.delta] for k in scope.k])
    figure, ((axis,),) = axes(1, 1, 4.2, 3)
    heatmap(axis, tau, scope.k, scope.delta, "tau", ("k", "delta"))
    section.figure(figure, "tau over k (rows) and delta (columns): tokens per target forward")
    few, least = (scope.k[0], scope.delta[-1]), (scope.k[0], scope.delta[0])
    many, small = (scope.k[-1], scope.delta[-1]), (scope.k[-1], scope.delta[0])
    for text, more, less in (("more neighbors accept more", lantern(*many), lantern(*few)),
                             ("a larger delta accepts more", lantern(*many), lantern(*small)),
                             ("the smallest k and delta accept more than EAGLE-2", lantern(*least), EAGLE2)):
        section.claim(text, *report.gain(more, less))


def table_3_jobs(scope: DiscreteScope) -> Iterator[PictureRun | Latency]:
    for run in runs_of("lantern-table-3", scope, version="v1"):
        if run.temperature in scope.temperatures:
            yield from ([scope.baseline(run.temperature)] if run.method.is_baseline else
                        [run, Latency(run.method, run.temperature)])


@item(ITEMS, "lantern-table-3", "LANTERN, Table 3: speed and quality at temperature 0 and 1", table_3_jobs)
def table_3(report: DiscreteReport, section: Section) -> None:
    scope = report.scope

    def here(row: dict[str, str]) -> dict:
        run = run_of(row, scope)
        if run.temperature not in scope.temperatures:
            return {}
        if run.method.is_baseline:
            return {"speed-up": 1.0, "tau": 1.0}
        return {"speed-up": report.speedup(run)} | report.cells(run)

    section.beside("lantern-table-3", here, version="v1")
    section.text("The paper's later version (v3, ICLR 2025) has these speed-ups:")
    section.table([{column: row[column] for column in ("T", "method", "speed-up")}
                   for row in papers.table("lantern-table-3") if row["version"] == "v3"], "-v3")
    section.text(f"{scope.about_k(1000)} CLIP score needs weights that no package brings.")
    report.noise(section, runs_of("lantern-table-3", scope, version="v1", T="1")[1:])
    if 0.0 in scope.temperatures:
        section.text("At temperature 0 the baseline has one picture a prompt: the noise is 0, every change counts.")
    for T in scope.temperatures if scope.timed > 1 else ():  # one picture decides nothing
        best = [run for run in runs_of("lantern-table-3", scope, version="v1") if run.temperature == T][-1].method.label
        ratios = [papers.value("lantern-table-3", "speed-up", version="v3", T=T, method=method)
                  for method in ("LANTERN", "EAGLE-2")]
        finding = report.faster(best, EAGLE2, T)
        section.claim(f"at temperature {T:g} LANTERN is faster than EAGLE-2, {ratios[0] / ratios[1]:.2f} times (v3)",
                      finding.holds, f"{finding.factor} in seconds of single pictures")
    run = runs_of("lantern-table-3", scope, version="v1", T="1")[-1]
    name = report.contrast("nearest name", {run: 1.0, PictureRun.of("jacobi"): -1.0}, margin=SMALL_SHARE)
    section.claim("LANTERN keeps the agreement with the prompt (CLIP score)", name.holds,
                  f"the share of pictures that are nearest to their prompt's differs from the baseline's by {name}; "
                  f"asked: less than {SMALL_SHARE:g}")
    distance = report.contrast("kernel distance", {run: 1.0})
    section.claim("LANTERN's distance from plain pictures grows (FID)", distance.holds,
                  f"kernel distance to the baseline {distance}")


SMALL_SHARE = 0.05  # of pictures: a smaller change counts as none


@item(ITEMS, "lantern-table-4", "LANTERN, Table 4: metric of nearness and measure of divergence",
      lambda scope: [scope.baseline(), *runs_of("lantern-table-4", scope)], quick=False)
def table_4(report: DiscreteReport, section: Section) -> None:
    scope = report.scope
    section.beside("lantern-table-4", lambda row: report.cells(run_of(row, scope)))
    section.text(scope.about_k(1000))
    runs = {(run.method.acceptance.metric, run.method.acceptance.cutoff, run.method.acceptance.delta): run
            for run in runs_of("lantern-table-4", scope)}
    report.noise(section, list(runs.values()))
    near, far, jsd = (runs[key] for key in (("l2", "tvd", 0.2), ("random", "tvd", 0.2), ("l2", "jsd", 0.2)))
    tokens = [report.study.pictures(run).decoded.tokens for run in (near, runs["cosine", "tvd", 0.2])]
    section.claim("l2 and cosine are alike", *(
        (True, f"all {len(tokens[0])} pictures are the same, token for token") if torch.equal(*tokens) else
        report.gain(near.method.label, runs["cosine", "tvd", 0.2].method.label, margin=SMALL_CHANGE)))
    section.claim("at equal delta random neighbors are slower (here: accept less)",
                  *report.gain(near.method.label, far.method.label))
    nearer = report.contrast("kernel distance", {near: 1.0, far: -1.0})
    section.claim("at equal delta the distance of random neighbors is lower (FID)", nearer.holds,
                  f"kernel distance of l2 less that of random {nearer}")
    pairs = (jsd, near), (runs["l2", "tvd", 0.4], jsd)
    (above, by), (below, less) = (report.gain(a.method.label, b.method.label) for a, b in pairs)
    section.claim("JSD 0.2 accepts more than TVD 0.2 and less than TVD 0.4", all_hold(above, below),
                  f"JSD 0.2 and TVD 0.2: {by}; TVD 0.4 and JSD 0.2: {less}")
    above, below = (report.contrast("kernel distance", {a: 1.0, b: -1.0}) for a, b in pairs)
    section.claim("the distance of JSD 0.2 is between that of TVD 0.2 and 0.4 (FID)",
                  all_hold(above.holds, below.holds),
                  f"kernel distance above TVD 0.2's by {above}; below 0.4's by {below}")


def resampled(report: DiscreteReport, tokens: Tensor) -> dict[str, Tensor]:
    """Tokens (n, L) of pictures, and each of them replaced by one of its k nearest codes, drawn uniformly."""
    V = report.study.pipeline.gpt.config.vocabulary
    pick = torch.randint(2**31, tokens.shape, generator=torch.Generator().manual_seed(0))
    versions = {"as drawn": tokens}
    for k in dict.fromkeys(map(report.scope.own_k, (30, 100, 300, 1000))):
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
    shown = [i for i in SHOWN if i < len(tokens)]
    figure, all_axes = axes(len(shown), len(pictures), 0.95, 0.95)
    for column, (name, these) in enumerate(pictures.items()):
        for line, picture in enumerate(these[shown]):
            show(all_axes[line, column], picture, name if line == 0 else "")
    section.figure(figure, "Pictures, a row for each: as drawn in the first column, then with every code replaced by "
                           "one drawn uniformly among its nearest, itself counted, ever more of them")
    drawn = pictures["as drawn"].astype(np.float64)

    def cosines(name):
        a, b = (vectors[n] / np.linalg.norm(vectors[n], axis=1, keepdims=True) for n in ("as drawn", name))
        return (a * b).sum(1)

    rows = []
    for name, these in list(pictures.items())[1:]:
        error = ((these - drawn) ** 2).mean((1, 2, 3))
        rows.append({"codes": name, "PSNR (dB)": float((10 * np.log10(255**2 / error.clip(1e-9))).mean()),
                     "cosine of features": float(cosines(name).mean())})
    section.table(rows)
    section.text(report.scope.about_k(100))
    kept, lost = cosines(f"{report.scope.own_k(100)} nearest"), cosines("any code")
    finding = draw_until_decided(lambda count: mean_and_error(kept - (1 + lost) / 2, np.zeros(count)), [len(kept)])
    section.claim("a picture survives that its codes are redrawn among their nearest", finding.holds,
                  f"features keep a cosine of {kept.mean():.2f}, with any code {lost.mean():.2f}; above the middle of "
                  f"that and 1 by {finding}")


@item(ITEMS, "lantern-figures-5-7", "LANTERN, Figures 5 to 7: trade-off curves and grids over k and delta", grid_jobs,
      quick=False)
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
        score = report.quality(PictureRun.of(EAGLE2))[name]
        for k, x, error, y, style in zip(scope.k, tau, errors, values[name], curve_styles("lantern", len(scope.k))):
            axis.errorbar(x, y, score.noise, error, ms=4, lw=1, elinewidth=0.4, label=f"k {k}", **style)
        x, error = mean_and_half(study.pictures(PictureRun.of(EAGLE2)).decoded.tau)
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
    for index in SHOWN[:6:2]:
        if index < study.num_images:
            section.figure(picture_grid(report, runs, index), "A picture, a row for each k, a column for the baseline "
                           f"and for each delta, {study.prompts[index % len(study.prompts)]!r}", f"-pictures-{index}")
    small, more, large = (runs[key] for key in ((scope.k[0], scope.delta[0]), (scope.k[-1], scope.delta[0]),
                                                (scope.k[-1], scope.delta[-1])))
    section.claim("larger k and delta are faster (here: accept more)",
                  *report.gain(large.method.label, small.method.label))
    worse = report.contrast("kernel distance", {large: 1.0, small: -1.0})
    section.claim("larger k and delta lower the quality (FID)", worse.holds,
                  f"from the smallest to the largest the kernel distance grows {worse}")
    text = "at a small delta a larger k costs no quality (FID)"
    if not worse.holds:
        section.claim(text, None, "asked: less than a quarter of the growth in the claim before, which is not shown")
        return
    cost = report.contrast("kernel distance", {more: 1.0, small: -1.0}, least=worse.value / 4)
    section.claim(text, None if cost.holds is None else not cost.holds,
                  f"at delta {scope.delta[0]:g} the kernel distance grows {cost}; asked: by less than a quarter of the "
                  f"above, {worse.value / 4:.2g} as it was measured")


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
