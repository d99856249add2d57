"""Jacobi decoding on this model: the curves over window, batch and temperature, what relaxing it buys, and trees that
are verified as it is."""
from dataclasses import replace

import numpy as np

from specvis.study.discrete import Latency, PictureRun
from specvis.study.plots import curve_styles, method_color, method_style

from . import papers
from .base import Item, item, mean_and_half
from .discrete import DiscreteReport, DiscreteScope
from .page import Section, axes, label

ITEMS: dict[str, Item] = {}
WINDOWS = (1, 2, 4, 8, 16, 32)
BATCHES = (1, 2, 4, 8)
BATCH_WINDOWS = ("auto", 2, 8)
SJD, SCD, GSD = "SJD, arXiv:2410.01699", "coupled SJD, arXiv:2510.24211", "GSD, arXiv:2508.07747"


def windows(scope: DiscreteScope) -> tuple[int, ...]:
    """The windows of the curves: of a quick report every second one."""
    return WINDOWS if scope.curves else WINDOWS[1::2]


def window_runs(scope: DiscreteScope) -> dict[str, list[PictureRun]]:
    """The curves: a name, and a run for each window."""
    curves = {f"T = {T:g}": [PictureRun.of(f"jacobi:window={W}", T) for W in windows(scope)]
              for T in scope.temperatures}
    return curves | {"T = 1, guesses from the last row": [PictureRun.of(f"jacobi:window={W}:guess=last")
                                                          for W in windows(scope)]}


def window_latencies(scope: DiscreteScope) -> list[Latency]:
    return [Latency.of(f"jacobi:window={W}") for W in (*windows(scope), "auto")]


def same_tokens(report: DiscreteReport, run: PictureRun) -> str:
    """In how many pictures every token is the baseline's of that seed."""
    pictures = report.study.pictures(run).decoded.tokens
    baseline = report.study.pictures(PictureRun.of("vanilla", run.temperature)).decoded.tokens
    return f"{(pictures == baseline).all(1).sum()} of {len(pictures)}"


def tau_row(report: DiscreteReport, run: PictureRun) -> dict:
    tau = report.study.pictures(run).decoded.tau
    mean, half = mean_and_half(tau)
    return {"method": run.method.label, "T": f"{run.temperature:g}", "window": run.method.drafts.window,
            "tau": mean, "+-": half, "least": tau.min().item(),
            "most": tau.max().item(), "same tokens as the baseline": same_tokens(report, run)}


@item(ITEMS, "jacobi-window", "Jacobi decoding over the window and the temperature", lambda scope: [
    *(PictureRun.of("vanilla", T) for T in scope.temperatures),
    *(run for runs in window_runs(scope).values() for run in runs), *window_latencies(scope)])
def jacobi_window(report: DiscreteReport, section: Section) -> None:
    curves = {name: [tau_row(report, run) for run in runs] for name, runs in window_runs(report.scope).items()}
    section.text("No draft model, nothing trained: a target forward reads the newest token and a window of guesses, "
                 "draws every position again with the noise of its seed, and keeps the guesses in front that did not "
                 "change. The tokens are the baseline's for the same seeds; the last column counts the pictures in "
                 "which all of them are. tau is tokens per target forward, +- twice its standard error over pictures.")
    section.table([row for rows in curves.values() for row in rows])
    latencies = [report.latency_row(job) for job in window_latencies(report.scope)]
    section.text("Seconds of single pictures at temperature 1, each right after the baseline's of the same prompt and "
                 "seed; `auto` is the window that the method chooses once for this machine:")
    section.table(latencies, "-seconds")
    figure, ((left, right),) = axes(1, 2, 4.4, 3.2)
    for (name, rows), style in zip(curves.items(), curve_styles("jacobi", len(curves))):
        left.errorbar([row["window"] for row in rows], [row["tau"] for row in rows], [row["+-"] for row in rows],
                      ms=4, lw=1, capsize=2, label=name, **style)
    left.set(xscale="log", xlabel="window", ylabel="tau: tokens per target forward")
    left.legend(fontsize=7)
    timed = latencies[:-1]
    right.errorbar(windows(report.scope), [row["speedup"] for row in timed],
                   [[row["speedup"] - row["min"] for row in timed], [row["max"] - row["speedup"] for row in timed]],
                   ms=4, lw=1, capsize=2, **method_style("jacobi"))
    right.axhline(latencies[-1]["speedup"], color=method_color("jacobi"), ls="--", lw=1, label="window=auto")
    right.axhline(1, color="black", lw=1, label="baseline")
    right.set(xscale="log", xlabel="window", ylabel="speedup of single pictures")
    for axis in (left, right):
        axis.set_xticks(windows(report.scope), windows(report.scope))
        axis.minorticks_off()
    right.legend(fontsize=7)
    section.figure(figure, "Left: tokens per target forward over the window, a curve for each temperature and one with "
                           "guesses from the last row; bars are two standard errors over pictures. Right: speedup over "
                           "the baseline in seconds of single pictures; bars are the range over pictures, lines the "
                           "baseline and the window that the method chooses")


def batch_latencies(scope: DiscreteScope) -> list[Latency]:
    return [replace(Latency.of(f"jacobi:window={W}"), batch=B) for B in BATCHES for W in BATCH_WINDOWS]


@item(ITEMS, "jacobi-batch", "Jacobi decoding over the batch size", batch_latencies, quick=False)
def jacobi_batch(report: DiscreteReport, section: Section) -> None:
    rows = [{"batch": job.batch} | report.latency_row(job) for job in batch_latencies(report.scope)]
    section.text("Seconds of a picture when `batch` are decoded at once, each batch right after the baseline's. Wide "
                 "forwards are bound by arithmetic, so the best window shrinks while the batch grows.")
    section.table(rows)
    figure, ((axis,),) = axes(1, 1, 5.4, 3.2)
    for W, style in zip(BATCH_WINDOWS, curve_styles("jacobi", len(BATCH_WINDOWS))):
        those = [row for row, job in zip(rows, batch_latencies(report.scope)) if job.method.drafts.window == W]
        speedup, least, most = np.array([[row[name] for name in ("speedup", "min", "max")] for row in those]).T
        axis.errorbar(BATCHES, speedup, [speedup - least, most - speedup], ms=4, lw=2 if W == "auto" else 1,
                      elinewidth=0.5, capsize=2, label=f"window={W}", **style)
    axis.axhline(1, color="black", lw=1)
    axis.set(xscale="log", xlabel="batch size", ylabel="speedup at this batch size")
    axis.set_xticks(BATCHES, BATCHES)
    axis.minorticks_off()
    axis.legend(fontsize=7)
    section.figure(figure, "Speedup over the baseline in seconds, over the batch size, a curve for each window: median "
                           "and range of the batches; the line at 1 is the baseline")


def relaxed_runs(scope: DiscreteScope) -> list[PictureRun]:
    """At one window: the exact forms, then ever more relaxed ones."""
    texts = ["jacobi:window=16", "jacobi:seed_exact=false", "jacobi:seed_exact=false:coupling=none",
             *(f"jacobi:seed_exact=false:omega={omega:g}" for omega in scope.omega),
             *(f"jacobi:seed_exact=false:k=10:cutoff=ratio:delta={ratio:g}" for ratio in scope.ratio),
             *(f"jacobi:seed_exact=false:k=100:delta={delta:g}" for delta in scope.delta[1::2]),
             "gsd", "gsd+coupled", "gsd+coupled:k=6", "gsd+coupled:delta=1"]
    return [PictureRun.of(text) for text in texts]


@item(ITEMS, "jacobi-relaxed", "Jacobi decoding, coupled, not coupled and relaxed",
      lambda scope: [scope.baseline(), *relaxed_runs(scope)], uses_network=True, quick=False)
def jacobi_relaxed(report: DiscreteReport, section: Section) -> None:
    runs = relaxed_runs(report.scope)
    section.text(f"All at a window of {runs[0].method.drafts.window}. `jacobi` draws with shared noise and "
                 "verifies by equality. `seed_exact=false` accepts by rejection and redraws from the residual "
                 f"({SCD}), `coupling=none` draws anew all that comes after the first rejection ({SJD}). Both keep the "
                 "target's distribution. omega, neighborhoods (k, delta) and groups move it: tv_excess is the added "
                 f"total variation per token, estimated. `gsd` is groups without coupling ({GSD}); `gsd+coupled` has "
                 "both.")
    section.table([report.row(run) for run in runs])
    report.noise(section, runs)
    figure, ((axis,),) = axes(1, 1, 6, 3.6)
    for run in runs:
        (x, x_error), (y, y_error) = report.with_error("tv_excess", run), report.with_error("tau", run)
        axis.errorbar(x, y, y_error, x_error, ms=5, elinewidth=0.5,
                      **method_style(run.method.name, run.method.lossless))
        label(axis, run.method.label.replace("jacobi:seed_exact=false:", ""), (x, y))
    axis.set(xlabel="tv_excess: added total variation per token", ylabel="tau: tokens per target forward")
    section.figure(figure, "Tokens per target forward over added total variation per token, a point for each run; full "
                           "markers are lossless; bars are two standard errors over pictures")
    coupled, uncoupled, group = (PictureRun.of(text) for text in (
        "jacobi:seed_exact=false", "jacobi:seed_exact=false:coupling=none", "gsd"))
    for text, a, b, margin in (
            (f"coupled redraws keep more guesses than fresh ones ({SCD})", coupled, uncoupled, None),
            ("shared noise keeps as many as rejection with coupled redraws (within a tenth)", runs[0], coupled,
             0.1),
            (f"groups accept more than single tokens ({GSD})", group, uncoupled, None)):
        section.claim(text, *report.gain(a.method.label, b.method.label, margin=margin))
    lost = report.contrast("kernel distance", {group: 1.0})
    section.claim("groups move the distribution a little (GSD's FID grows)", lost.holds,
                  f"kernel distance to the baseline {lost}")


RIVALS = {"plain": "vanilla", "EAGLE": "eagle1", "SJD": "jacobi:seed_exact=false:coupling=none",
          "LANTERN++": "lantern++", "GSD": "gsd", "SCD": "jacobi:seed_exact=false"}


def table_jobs(scope: DiscreteScope) -> list[PictureRun | Latency]:
    texts = list(RIVALS.values())[1:]
    return [*map(PictureRun.of, texts), *map(Latency.of, texts)]


@item(ITEMS, "jacobi-table", "Jacobi decoding and its rivals, as published", table_jobs, quick=False)
def jacobi_table(report: DiscreteReport, section: Section) -> None:
    def here(row: dict[str, str]) -> dict:
        if row["method"] not in RIVALS or row["data"] == "video":
            return {}
        run = PictureRun.of(RIVALS[row["method"]])
        steps, speedup = (1.0, 1.0) if run.method.is_baseline else (report.study.pictures(run).tau, report.speedup(run))
        return {"steps": steps, "speed-up": speedup, "method here": run.method.label}

    section.beside("jacobi", here)
    section.text("Steps are how many times fewer target forwards: tau. Here one model stands beside all. SJD2, "
                 "SJD-PAC and PJD are not implemented. Records, as published:")
    section.text(papers.caption("records"))
    section.table(papers.table("records"), "-records")


TREES = ("speculative", "eagle1", "eagle1:tree=naive_extend_57", "eagle2")


def tree_runs(text: str) -> tuple[PictureRun, PictureRun]:
    """A tree verified by shared noise and equality, and by rejection."""
    return PictureRun.of(f"{text}:seed_exact=true"), PictureRun.of(f"{text}:seed_exact=false")


@item(ITEMS, "seed-exact", "Trees verified by equality and by rejection", lambda scope: [
    PictureRun.of("vanilla"), *(run for text in TREES for run in tree_runs(text))], quick=False)
def seed_exact(report: DiscreteReport, section: Section) -> None:
    rows = []
    for text in TREES:
        exact, usual = tree_runs(text)
        taus = [report.study.pictures(run).decoded.tau for run in (exact, usual)]
        mean, half = mean_and_half(taus[0] - taus[1])
        rows.append({"method": text, "tau by equality": taus[0].nanmean().item(),
                     "tau by rejection": taus[1].nanmean().item(), "difference": mean, "+-": half,
                     "same tokens as the baseline": same_tokens(report, exact)})
    section.text("Both are lossless. By equality (`seed_exact=true`) the target draws at every node with the noise of "
                 "its position, sampled children are drawn with the same noise, and the tokens are the baseline's; by "
                 "rejection the tokens are other draws of the same distribution. Differences are of the same prompts "
                 "and seeds, +- twice their standard error.")
    section.table(rows)
