"""COOL-SD's tables and figures (arXiv:2601.09212), with LANTERN++ (arXiv:2502.06352), which it compares with."""
import numpy as np
import torch

from specvis.study.discrete import Latency, PictureRun
from specvis.study.jobs import Job
from specvis.study.plots import method_style

from . import papers
from .base import SMALL_EXCESS, Item, item, pixels
from .discrete import MC_SIM, DiscreteReport, DiscreteScope, lantern
from .general import curve_gap, families, plot_curves
from .page import Section, axes, show

ITEMS: dict[str, Item] = {}
COMPARED = {"Eagle-1": "eagle1", "LANTERN++": f"{MC_SIM}:delta=2", "COOL-SD, 1.1": "cool-sd",
            "COOL-SD, 2": "cool-sd:omega=2"}
PAPER_KS = (10, 30, 100, 300, 1000)  # of Figure 4


def name_of(row: dict[str, str]) -> str:
    """Which of COMPARED a row of the paper's table is."""
    return ", ".join(filter(None, (row["method"], row["delta"])))


def paper_gains(method: str, other: str) -> str:
    """The paper's tau of a method over another's, on each of its models that has both."""
    tau = {(row["model"], name_of(row)): float(row["tau"]) for row in papers.table("cool-table-1")}
    ratios = [f"{tau[model, method] / tau[model, other]:.2f}" for model in ("Lumina-mGPT 7B", "LlamaGen-XL 775M")
              if (model, method) in tau]
    return f"{' and '.join(ratios)} times"


def table_1_jobs(scope: DiscreteScope) -> list[Job]:
    texts = (*COMPARED.values(), "lantern++")
    return [scope.baseline(), *map(PictureRun.of, texts), *map(Latency.of, texts)]


@item(ITEMS, "cool-table-1", "COOL-SD, Table 1: speed and quality of static trees", table_1_jobs)
def table_1(report: DiscreteReport, section: Section) -> None:
    runs = {name: PictureRun.of(text) for name, text in COMPARED.items()}

    def here(row: dict[str, str]) -> dict:
        if row["method"] == "plain":
            timed = report.latency_row(Latency.of("eagle1"))
            return {"tau": 1.0, "speed-up": 1.0, "latency (s)": timed["baseline_seconds"]}
        run = runs[name_of(row)]
        timed = report.latency_row(Latency(run.method))
        return {"latency (s)": timed["seconds"], "latency (s) +-": timed["+-"],
                "speed-up": timed["speedup"]} | report.cells(run)

    section.beside("cool-table-1", here)
    section.text("Here one model stands beside both, at temperature 1, all methods on EAGLE-1's tree, as in the paper; "
                 "LANTERN++ has ratio 2. (As the released code means lambda, 2 is our ratio 1.) On its own tree, which "
                 "is larger, and with ratio 1:")
    own = PictureRun.of("lantern++")
    section.table([report.row(own) | {"speed-up": report.speedup(own)}], "-own-tree")
    report.noise(section, [*runs.values(), own])
    section.text(f"LANTERN++ has k = 10, as in the paper, here of {report.scope.codes} codes. CLIP score and "
                 "ImageReward need weights that no package brings.")
    for a, b, text in (("COOL-SD, 1.1", "Eagle-1", "COOL-SD with delta 1.1 accepts more than Eagle-1"),
                       ("COOL-SD, 2", "COOL-SD, 1.1", "COOL-SD with delta 2 accepts more than with 1.1"),
                       ("LANTERN++", "Eagle-1", "LANTERN++ accepts more than Eagle-1"),
                       ("COOL-SD, 1.1", "LANTERN++", "COOL-SD with delta 1.1 accepts more than LANTERN++")):
        section.claim(f"{text}, {paper_gains(a, b)}", *report.gain(COMPARED[a], COMPARED[b]))


@item(ITEMS, "cool-figure-3", "COOL-SD, Figure 3: annealed against uniform relaxation",
      lambda scope: [scope.baseline(), PictureRun.of("eagle1"), *scope.sweeps], quick=False)
def figure_3(report: DiscreteReport, section: Section) -> None:
    scope, of = report.scope, families(report.scope)
    runs = {name: [run for run in scope.sweeps if of[name](run.method)]
            for name in ("UniformRSD", "COOL-SD", "LANTERN++")}
    every = [*sum(runs.values(), []), PictureRun.of("eagle1")]
    section.text("Delta of UniformRSD and COOL-SD (our `omega`): " + ", ".join(f"{x:g}" for x in scope.omega)
                 + "; lambda of LANTERN++ (our `delta`): " + ", ".join(f"{x:g}" for x in scope.ratio)
                 + f", with k = 10, as in the paper, here of {scope.codes} codes. All have EAGLE-1's tree.")
    section.figure(plot_curves(report, every),
                   "Added total variation per token (left) and kernel distance to baseline pictures (right, band: the "
                   "baseline's own) over tokens per target forward: a curve for each method over how much it relaxes, "
                   "and EAGLE-1, which is lossless. Bars: two standard errors over pictures, of distances the noise")
    section.table([report.row(run) for run in every])
    report.noise(section, every)
    for number, what in (("kernel distance", "FID"), ("tv_excess", "added total variation")):
        finding, shared = curve_gap(report, number, runs["COOL-SD"], runs["UniformRSD"])
        section.claim(f"at equal speed (here: tau) annealed relaxation is nearer to the target than uniform ({what})",
                      finding and (None if finding.holds is None else not finding.holds),
                      f"over tau {shared[0]:.2f} to {shared[1]:.2f} its {number} is larger by {finding}"
                      if finding else "the curves have no tau in common")


def figure_4_runs(scope: DiscreteScope) -> list[PictureRun]:
    """For each k LANTERN++ with its own residual and with the optimal one."""
    ks = dict.fromkeys(map(scope.own_k, PAPER_KS))
    return [PictureRun.of(f"{MC_SIM}:delta=2:k={k}{tail}") for k in ks for tail in ("", ":residual=optimal")]


@item(ITEMS, "cool-figure-4", "COOL-SD, Figure 4: the optimal residual over k",
      lambda scope: [scope.baseline(), *figure_4_runs(scope)], quick=False, uses_network=True)
def figure_4(report: DiscreteReport, section: Section) -> None:
    runs = figure_4_runs(report.scope)
    ks = [run.method.acceptance.k for run in runs[::2]]
    section.text("LANTERN++ on EAGLE-1's tree at ratio 2, with its own residual and with COOL-SD's. "
                 f"{report.scope.about_k(*PAPER_KS)} The paper's figure has no numbers.")
    section.table([report.row(run) for run in runs])
    report.noise(section, runs)
    figure, (both,) = axes(1, 2, 4.2, 3.2)
    for axis, number in zip(both, ("tv_excess", "kernel distance")):
        for first, label, line in ((0, "its own residual", "-"), (1, "the optimal residual", "--")):
            axis.errorbar(ks, *zip(*(report.with_error(number, run) for run in runs[first::2])), ls=line, lw=1,
                          label=label, **method_style("lantern++", not first))
        axis.set(xscale="log", xlabel="k: neighbors", ylabel=number)
        axis.legend(fontsize=7)
    section.figure(figure, "tv_excess and kernel distance of LANTERN++ over k, with its own and with the optimal "
                           "residual; bars: two standard errors, and the baseline's own noise")
    for own, optimal in (runs[:2], runs[-2:]):
        finding = report.contrast("tv_excess", {own: 1.0, optimal: -1.0}, least=SMALL_EXCESS)
        section.claim(f"the optimal residual is nearer to the target, k {own.method.acceptance.k}", finding.holds,
                      f"tv_excess of its own residual is larger by {finding} (asked: {SMALL_EXCESS:g} or more)")
    grows = report.contrast("tv_excess", {runs[-2]: 1.0, runs[-1]: -1.0, runs[0]: -1.0, runs[1]: 1.0},
                            least=SMALL_EXCESS)
    section.claim("the bias of LANTERN++'s own residual grows with k", grows.holds,
                  f"the difference of tv_excess grows from k {ks[0]} to {ks[-1]} by {grows} (asked: {SMALL_EXCESS:g} "
                  "or more)")


def strips(scope: DiscreteScope) -> dict[str, list[Latency]]:
    """The latencies of each strip of pictures, over delta."""
    return {name: [Latency.of(text) for text in texts] for name, texts in {
        "cool-sd": [f"cool-sd:omega={omega:g}" for omega in (1.0, *scope.omega)],
        "uniform-rsd": [f"uniform-rsd:omega={omega:g}" for omega in (1.0, *scope.omega)],
        "lantern": [lantern(scope.k[0], delta) for delta in (0.0, *scope.delta)]}.items()}


@item(ITEMS, "cool-figure-2", "COOL-SD, Figure 2: the same pictures over delta, with their latency",
      lambda scope: sum(strips(scope).values(), []), quick=False)
def figure_2(report: DiscreteReport, section: Section) -> None:
    jobs = strips(report.scope)
    for name, label in (("cool-sd", "COOL-SD"), ("lantern", f"LANTERN, k {report.scope.k[0]}")):
        section.figure(strip(report, jobs[name]), f"{label}: pictures, each row is a prompt and a seed, each column a "
                                                  "delta, above each are its seconds alone and its tau", f"-{name}")
    section.table([report.latency_row(job) for those in jobs.values() for job in those])
    section.text("COOL-SD's delta is our `omega`. What delta does to tau, by more pictures: `cool-figure-3`.")


def strip(report: DiscreteReport, jobs: list[Latency]):
    """A figure of the pictures that were timed: a column for each job, with its delta and seconds."""
    study = report.study
    count = min(4, study.timed)
    figure, all_axes = axes(count, len(jobs), 1.15, 1.4)
    for column, job in enumerate(jobs):
        timings = study.seconds(job)
        delta = job.method.acceptance.omega if job.method.name == "cool-sd" else job.method.acceptance.delta
        head = f"delta {delta:g}\n{np.mean(timings.method):.2f} +- {np.std(timings.method):.2f} s\n\n"
        for line, picture in enumerate(pixels(study, torch.from_numpy(timings.tokens[:count]))):
            title = f"{timings.method[line]:.2f} s, tau {timings.tau[line]:.2f}"
            show(all_axes[line, column], picture, head * (line == 0) + title)
    return figure
