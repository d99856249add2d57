"""What belongs to no paper: every method's speed against its fidelity, every method's latency, and the curves that
several papers draw."""
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from specvis.decoding.methods import METHODS, Method
from specvis.study.discrete import Latency, PictureRun
from specvis.study.plots import curve_styles, method_color, method_style

from .base import SMALL_EXCESS, Finding, Item, item
from .discrete import DiscreteReport, DiscreteScope
from .jacobi import relaxed_runs
from .page import Section, axes, label

ITEMS: dict[str, Item] = {}
TAU, EXCESS = "tau: tokens per target forward", "tv_excess: added total variation per token"


def families(scope: DiscreteScope) -> dict[str, Callable[[Method], bool]]:
    """The curves: each is a method whose runs differ in one parameter."""
    def lantern_of(k: int):
        return lambda method: PictureRun(method) in scope.grid and method.acceptance.k == k

    def jacobi_by(changed: Callable[[Method], bool]):
        return lambda method: method.name == "jacobi" and not method.seed_exact and changed(method)

    return {f"LANTERN, k {k}": lantern_of(k) for k in scope.k} | {
        "Jacobi, omega": jacobi_by(lambda method: method.acceptance.omega != 1),
        "Jacobi, ratio": jacobi_by(lambda method: method.acceptance.cutoff == "ratio"),
        "LANTERN++": lambda method: PictureRun(method) in scope.sweeps and method.name == "lantern++",
        "UniformRSD": lambda method: method.name == "uniform-rsd",
        "COOL-SD": lambda method: method.name == "cool-sd",
    }


def plot_curves(report: DiscreteReport, runs: list[PictureRun], timed: Sequence[Latency] = ()):
    """A figure of tv_excess and of kernel distance over tau: runs of a family as curves, other runs by name; and, of
    what is `timed`, of speed over tv_excess."""
    def point(run: PictureRun) -> tuple[tuple[float, float], ...]:
        """tau, tv_excess and kernel distance, each with its error."""
        return tuple(report.with_error(number, run) for number in ("tau", "tv_excess", "kernel distance"))

    figure, (panels,) = axes(1, 2 + bool(timed), 4.6, 3.8)
    curves = {family: [run for run in runs if holds(run.method)] for family, holds in families(report.scope).items()}
    names = [those[0].method.name for those in curves.values() if those]
    styles = {name: iter(curve_styles(name, names.count(name))) for name in names}
    drawn = [(those, next(styles[those[0].method.name]) | {"mfc": "white", "label": family})
             for family, those in curves.items() if those]
    alone = [run for run in runs if not any(run in those for those in curves.values())]
    drawn += [([run], method_style(run.method.name, run.method.lossless)) for run in alone]
    score = report.quality(runs[-1])["kernel distance"]
    panels[1].axhspan(score.baseline - score.noise, score.baseline + score.noise, color="gray", alpha=0.25,
                      label="baseline")
    for axis, height, name in ((panels[0], 1, EXCESS), (panels[1], 2, "kernel distance")):
        for those, style in drawn:
            points = np.array(sorted(map(point, those)))
            (x, x_error), (y, y_error) = points[:, 0].T, points[:, height].T
            axis.errorbar(x, y, y_error, x_error, ms=5, lw=1, elinewidth=0.4, **style)
            if those[0] in alone and axis is panels[0]:
                label(axis, those[0].method.label, (x[0], y[0]))
        axis.set(xlabel=TAU, ylabel=name)
    if timed:
        plot_speeds(report, timed, panels[2])
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside right center", fontsize=7)
    return figure


def plot_speeds(report: DiscreteReport, timed: Sequence[Latency], axis) -> None:
    """Speed in seconds over tv_excess, a point for each method, by name."""
    for job in timed:
        row, method = report.latency_row(job), job.method
        # a window that was chosen by the clock has no pictures of its own, but is lossless
        x, error = (0.0, 0.0) if method.lossless else report.with_error("tv_excess", PictureRun(method))
        axis.errorbar(x, row["speedup"], [[row["speedup"] - row["min"]], [row["max"] - row["speedup"]]], error, ms=5,
                      elinewidth=0.4, **method_style(method.name, method.lossless))
        label(axis, method.label, (x, row["speedup"]))
    axis.axhline(1, color="black", lw=0.8, ls=":")
    axis.set(xlabel=EXCESS, ylabel="speedup over the baseline, single pictures")


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
    least = {"least": SMALL_EXCESS} if number == "tv_excess" else {}
    weights = {}  # the mean of a linear interpolation is a weighted sum of its points
    for runs, sign in ((a, 1.0), (b, -1.0)):
        order = sorted(runs, key=tau.get)
        for run in order:
            weights[run] = sign * np.interp(x, [tau[other] for other in order],
                                            [float(other == run) for other in order]).mean()
    return report.contrast(number, {run: weight for run, weight in weights.items() if weight}, **least), (low, high)


def all_methods(scope: DiscreteScope) -> Iterator[PictureRun]:
    for method in METHODS.values():
        if method.drafting != "none":
            # not the window "auto", which depends on the clock
            yield PictureRun.of("jacobi:window=32") if method.name == "jacobi" else PictureRun(method)
    yield PictureRun.of("eagle1:tree=naive_extend_57")  # lossless on LANTERN++'s tree
    if scope.curves:
        # without neighborhoods with an absolute delta, which leave all others in a corner of the figure
        yield from (run for run in relaxed_runs(scope) if run.method.acceptance.k != 100)
        yield from scope.grid + scope.sweeps


@item(ITEMS, "trade-off", "Every method: speed against fidelity",
      lambda scope: [scope.baseline(), *all_methods(scope), *latencies(scope)], quick=False)
def trade_off(report: DiscreteReport, section: Section) -> None:
    runs, timed = list(dict.fromkeys(all_methods(report.scope))), latencies(report.scope)
    speedups = {job.method: {"speedup": report.latency_row(job)["speedup"]} for job in timed}
    rows = sorted((report.row(run) | speedups.get(run.method, {}) for run in runs), key=lambda row: row["tau"])
    section.text("tau is tokens per target forward (of trees of `nodes` nodes), of pictures decoded in batches. "
                 "speedup is in seconds of single pictures, of the methods that `latency` times: as their recipes "
                 "have them, so that Jacobi decoding chooses its window and LANTERN's k is 100. tv_excess is the added "
                 "total variation per token, estimated: what relaxed acceptance added.")
    section.figure(plot_curves(report, runs, timed),
                   "Left and middle: added total variation per token and kernel distance to baseline pictures (band: "
                   "the baseline's own), over tokens per target forward, a curve for each relaxed method over how much "
                   "it relaxes and a point, named on the left, for each other run. Right: speedup in seconds over "
                   "added total variation, a point for each method (line: the baseline). Full markers are lossless. "
                   "Bars: two standard errors over pictures, of distances the noise, of speedups the range over "
                   "pictures")
    section.table(rows)
    report.noise(section, runs)
    best = []
    for budget in (0.0, 0.02, 0.05, 0.1, 0.2):
        for drafts in ("no", "yes"):
            run = max((run for run in runs if report.tv_excess(run) <= budget
                       and (drafts == "no") == (run.method.drafting == "jacobi")),
                      key=lambda run: report.study.pictures(run).tau)
            tau, error = report.with_error("tau", run)
            best.append({"tv_excess at most": f"{budget:g}", "draft model": drafts, "method": run.method.label,
                         "nodes": run.method.max_nodes, "tau": tau, "+-": error, "tv_excess": report.tv_excess(run)})
    section.text("Which method needs the fewest target forwards for which budget, among these runs, without a draft "
                 "model and with one:")
    section.table(best, "-budgets")


def latencies(scope: DiscreteScope) -> list[Latency]:
    return [Latency(method) for method in METHODS.values() if method.drafting != "none"]


@item(ITEMS, "latency", "Latency of single pictures, every method", latencies, quick=False)
def latency(report: DiscreteReport, section: Section) -> None:
    rows = [report.latency_row(job) for job in latencies(report.scope)]
    section.text("Batch 1, temperature 1. Each picture was timed right after the baseline's of the same prompt and "
                 "seed; speedup is the median of these ratios, min and max their range.")
    section.table(rows)
    figure, ((axis,),) = axes(1, 1, 6, 3.4)
    names = [row["method"] for row in rows]
    middle = np.array([row["speedup"] for row in rows])
    spread = np.array([[row["speedup"] - row["min"], row["max"] - row["speedup"]] for row in rows]).T
    axis.barh(names, middle, xerr=spread, color=[method_color(name) for name in names], ecolor="gray")
    axis.axvline(1, color="black", lw=1)
    axis.invert_yaxis()
    axis.set(xlabel="speedup over the baseline, single pictures")
    section.figure(figure, "Speedup over the baseline in seconds of single pictures, a bar for each method: median "
                           "and range over pictures; the line at 1 is the baseline")
    for name, what in (("jacobi", "Jacobi decoding"), ("speculative", "speculative decoding with a draft model")):
        finding = report.faster(name, "vanilla")
        section.claim(f"{what} is faster than plain decoding (on GPUs)", finding.holds,
                      f"on {report.study.machine} `{name}` is {finding.factor}")
