"""What belongs to no paper: every method's speed against its fidelity, every method's latency, and the curves that
several papers draw."""
from collections.abc import Callable, Iterator

import numpy as np

from specvis.decoding.methods import METHODS, Method
from specvis.study.discrete import Latency, PictureRun

from .base import Finding, Item, item
from .discrete import DiscreteReport, DiscreteScope
from .page import Section, axes

ITEMS: dict[str, Item] = {}


def families(scope: DiscreteScope) -> dict[str, Callable[[Method], bool]]:
    """The curves: each is a method whose runs differ in one parameter."""
    def lantern_of(k: int):
        return lambda method: method.name == "lantern" and method.acceptance.k == k

    return {f"LANTERN, k {k}": lantern_of(k) for k in scope.k} | {
        "LANTERN++": lambda method: method.name == "lantern++" and method.acceptance.residual == "relaxed",
        "LANTERN++ with G*": lambda method: method.name == "lantern++" and method.acceptance.residual == "optimal",
        "UniformRSD": lambda method: method.name == "uniform-rsd",
        "COOL-SD": lambda method: method.name == "cool-sd",
    }


def plot_curves(report: DiscreteReport, runs: list[PictureRun]):
    """A figure of distances and tv_excess over tau: runs of a family as curves, other runs by name."""
    def point(run: PictureRun, distance: str | None) -> tuple[float, float]:
        height = report.tv_excess(run) if distance is None else report.quality(run)[distance].value
        return report.study.pictures(run).tau, height

    figure, (three,) = axes(1, 3, 4.6, 3.8)
    for axis, distance in zip(three, ("Frechet distance", "kernel distance", None)):
        if distance is not None:
            score = report.quality(runs[-1])[distance]
            axis.axhspan(score.baseline - score.noise, score.baseline + score.noise, color="gray", alpha=0.25,
                         label="baseline")
        alone = list(runs)
        for family, holds in families(report.scope).items():
            those = [run for run in runs if holds(run.method)]
            alone = [run for run in alone if run not in those]
            if those:
                axis.plot(*zip(*sorted(point(run, distance) for run in those)), "o-", ms=4, lw=1, label=family)
        for run in alone:
            axis.plot(*point(run, distance), "k*" if run.method.lossless else "kx", ms=6)
            axis.annotate(run.method.label, point(run, distance), fontsize=6, xytext=(3, 3),
                          textcoords="offset points")
        axis.set(xlabel="tau: tokens per target forward",
                 ylabel=distance or "tv_excess: added total variation per token")
    figure.legend(*three[0].get_legend_handles_labels(), loc="outside right center", fontsize=7)
    return figure


def curve_gap(report: DiscreteReport, number: str, a: list[PictureRun], b: list[PictureRun]
              ) -> tuple[Finding | None, tuple[float, float]]:
    """How far the curve of a number over tau of runs a lies above that of b, on average where both are.

    Returns:
        the gap, and from which to which tau both curves are; None: nowhere
    """
    tau = {run: report.study.pictures(run).tau for run in a + b}
    low = max(min(tau[run] for run in runs) for runs in (a, b))
    high = min(max(tau[run] for run in runs) for runs in (a, b))
    if low >= high:
        return None, (low, high)
    x = np.linspace(low, high, 50)
    weights = {}  # the mean of a linear interpolation is a weighted sum of its points
    for runs, sign in ((a, 1.0), (b, -1.0)):
        order = sorted(runs, key=tau.get)
        for run in order:
            weights[run] = sign * np.interp(x, [tau[other] for other in order],
                                            [float(other == run) for other in order]).mean()
    return report.contrast(number, weights), (low, high)


def all_methods(scope: DiscreteScope) -> Iterator[PictureRun]:
    yield from scope.grid
    for method in METHODS.values():
        if method.drafting != "none":
            # not the window "auto", which depends on the clock
            yield PictureRun.of("jacobi:window=16") if method.name == "jacobi" else PictureRun(method)
    yield PictureRun.of("eagle1:tree=naive_extend_57")  # lossless on LANTERN++'s tree
    yield from scope.sweeps


@item(ITEMS, "trade-off", "Every method: speed against fidelity",
      lambda scope: [scope.baseline(), *all_methods(scope)])
def trade_off(report: DiscreteReport, section: Section) -> None:
    runs = list(dict.fromkeys(all_methods(report.scope)))
    rows = sorted((report.row(run) for run in runs), key=lambda row: row["tau"])
    section.text("tau is tokens per target forward (of trees of `nodes` nodes), of pictures decoded in batches; "
                 "seconds of single pictures are in `latency`. tv_excess is the added total variation per token, "
                 "estimated: what relaxed acceptance added.")
    section.figure(plot_curves(report, runs), "Speed against distance from baseline pictures (band: the baseline's "
                                              "own), and against tv_excess; stars are lossless")
    section.table(rows)
    report.noise(section, runs)
    best = []
    for budget in (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4):
        run = max((run for run in runs if report.tv_excess(run) <= budget),
                  key=lambda run: report.study.pictures(run).tau)
        best.append({"tv_excess at most": f"{budget:g}", "largest tau": report.study.pictures(run).tau,
                     "method": run.method.label, "nodes": run.method.max_nodes, "tv_excess": report.tv_excess(run),
                     "kernel distance": report.quality(run)["kernel distance"]})
    section.text("Which method needs the fewest target forwards for which budget, among these runs:")
    section.table(best, "-budgets")


def latencies(scope: DiscreteScope) -> list[Latency]:
    return [Latency(method) for method in METHODS.values() if method.drafting != "none"]


@item(ITEMS, "latency", "Latency of single pictures, every method", latencies)
def latency(report: DiscreteReport, section: Section) -> None:
    rows = [report.latency_row(job) for job in latencies(report.scope)]
    section.text("Batch 1, temperature 1. Each picture was timed right after the baseline's of the same prompt and "
                 "seed; speedup is the median of these ratios, min and max their range.")
    section.table(rows)
    figure, ((axis,),) = axes(1, 1, 6, 3.4)
    names = [row["method"] for row in rows]
    middle = np.array([row["speedup"] for row in rows])
    spread = np.array([[row["speedup"] - row["min"], row["max"] - row["speedup"]] for row in rows]).T
    axis.barh(names, middle, xerr=spread, color="tab:blue", ecolor="gray")
    axis.axvline(1, color="black", lw=1)
    axis.invert_yaxis()
    axis.set(xlabel="speedup over the baseline, single pictures")
    section.figure(figure, "Median and range of the speedup in seconds, batch 1")
    fastest = max(rows, key=lambda row: row["speedup"])
    section.claim("speculative decoding is faster than baseline decoding (on GPUs)",
                  True if max(row["min"] for row in rows) > 1 else
                  False if max(row["max"] for row in rows) < 1 else None,
                  f"on {report.study.machine} the fastest is {fastest['method']} at {fastest['speedup']:.2f} times "
                  f"({fastest['min']:.2f} to {fastest['max']:.2f})")
