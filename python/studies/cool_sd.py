"""COOL-SD's tables and figures (arXiv:2601.09212), with LANTERN++ (arXiv:2502.06352), which it compares with."""
import numpy as np
import torch

from specvis.study.discrete import Latency, PictureRun

from . import papers
from .base import Item, decided, item, pixels
from .discrete import DiscreteReport, DiscreteScope, lantern
from .general import curve_gap, families, plot_curves
from .page import Section, axes, show

ITEMS: dict[str, Item] = {}
COMPARED = ("eagle1", "lantern++", "cool-sd", "cool-sd:omega=2")


@item(ITEMS, "cool-table-1", "COOL-SD, Table 1: speed and quality of static trees",
      lambda scope: [scope.baseline(), *map(PictureRun.of, COMPARED), *map(Latency.of, COMPARED)])
def table_1(report: DiscreteReport, section: Section) -> None:
    section.text("The paper (from a note on it):")
    section.table(papers.COOL_TABLE_1, "-paper")
    section.text("Here, temperature 1. CLIP score and ImageReward need weights that no package brings.")
    runs = [PictureRun.of(text) for text in COMPARED]
    section.table([report.row(run) for run in runs])
    report.noise(section, runs)
    section.text("Single pictures, each right after the baseline's:")
    section.table([report.latency_row(Latency.of(text)) for text in COMPARED], "-latency")
    section.claim("COOL-SD with delta 1.1 accepts more than Eagle-1 (1.13 times on both models)",
                  *report.tau_gain("cool-sd", "eagle1"))
    section.claim("with delta 2 still more (1.22 times as much as with delta 1.1)",
                  *report.tau_gain("cool-sd:omega=2", "cool-sd"))
    section.claim("LANTERN++ accepts more than Eagle-1 (1.08 to 1.10 times)", *report.tau_gain("lantern++", "eagle1"))
    section.claim("and less than COOL-SD with delta 1.1", *report.tau_gain("cool-sd", "lantern++"))
    section.text("(LANTERN++'s recipe has a tree of its own here, of 57 drafts; the others' has 25.)")


@item(ITEMS, "cool-figure-3", "COOL-SD, Figure 3: annealed against uniform relaxation",
      lambda scope: [scope.baseline(), PictureRun.of("eagle1"), *scope.sweeps])
def figure_3(report: DiscreteReport, section: Section) -> None:
    scope, of = report.scope, families(report.scope)
    runs = {name: [run for run in scope.sweeps if of[name](run.method)]
            for name in ("UniformRSD", "COOL-SD", "LANTERN++")}
    every = [*sum(runs.values(), []), PictureRun.of("eagle1")]
    section.text("Delta of UniformRSD and COOL-SD (our `omega`): " + ", ".join(f"{x:g}" for x in scope.omega)
                 + "; lambda of LANTERN++ (our `delta`, k = 10): " + ", ".join(f"{x:g}" for x in scope.ratio)
                 + ". COOL-SD's tree is EAGLE-1's, LANTERN++'s is its own, which is larger.")
    section.figure(plot_curves(report, every),
                   "Added total variation per token (left) and kernel distance to baseline pictures (right, band: the "
                   "baseline's own) over tokens per target forward: a curve for each method over how much it relaxes, "
                   "and EAGLE-1, which is lossless. Bars: two standard errors over pictures, of distances the noise")
    section.table([report.row(run) for run in every])
    report.noise(section, every)
    gap, half, shared = curve_gap(report, runs["COOL-SD"], runs["UniformRSD"])
    section.claim("at equal speed annealed relaxation is nearer to the target than uniform",
                  decided(-gap, half) if shared else None,
                  f"over tau {shared[0]:.2f} to {shared[1]:.2f} its kernel distance differs by {gap:+.2g} +- {half:.2g}"
                  if shared else "the curves have no tau in common")


def strips(scope: DiscreteScope) -> dict[str, list[Latency]]:
    """The latencies of each strip of pictures, over delta."""
    return {name: [Latency.of(text) for text in texts] for name, texts in {
        "cool-sd": [f"cool-sd:omega={omega:g}" for omega in (1.0, *scope.omega)],
        "uniform-rsd": [f"uniform-rsd:omega={omega:g}" for omega in (1.0, *scope.omega)],
        "lantern": [lantern(100, delta) for delta in (0.0, *scope.delta)]}.items()}


@item(ITEMS, "cool-figure-2", "COOL-SD, Figure 2: the same pictures over delta, with their latency",
      lambda scope: sum(strips(scope).values(), []), quick=False)
def figure_2(report: DiscreteReport, section: Section) -> None:
    jobs = strips(report.scope)
    for name, label in (("cool-sd", "COOL-SD"), ("lantern", "LANTERN, k 100")):
        section.figure(strip(report, jobs[name]), f"{label}: pictures, each row is a prompt and a seed, each column a "
                                                  "delta, above each are its seconds alone and its tau", f"-{name}")
    section.table([report.latency_row(job) for those in jobs.values() for job in those])
    section.text("COOL-SD's delta is our `omega`. What delta does to tau, by more pictures: `cool-figure-3`.")


def strip(report: DiscreteReport, jobs: list[Latency]):
    """A figure of the pictures that were timed: a column for each job, with its delta and seconds."""
    study = report.study
    count = min(4, study.counted(jobs[0]).count)
    figure, all_axes = axes(count, len(jobs), 1.15, 1.4)
    for column, job in enumerate(jobs):
        timings = study.seconds(job)
        delta = job.method.acceptance.omega if job.method.name == "cool-sd" else job.method.acceptance.delta
        head = f"delta {delta:g}\n{np.mean(timings.method):.2f} +- {np.std(timings.method):.2f} s\n\n"
        for line, picture in enumerate(pixels(study, torch.from_numpy(timings.tokens[:count]))):
            title = f"{timings.method[line]:.2f} s, tau {timings.tau[line]:.2f}"
            show(all_axes[line, column], picture, head * (line == 0) + title)
    return figure
