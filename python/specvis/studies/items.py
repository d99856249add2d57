"""The tables and figures, each a function from a study to a section, with the runs that it looks at."""
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from ..decoding.methods import METHODS, Method, parse_method
from . import papers
from .page import Section, axes, heat, show
from .positions import steps_gain, teacher_forced_probs
from .quality import GROUPS, Score
from .base import CHUNK, Latency, Memory, Run, Study, Work


@dataclass(frozen=True)
class Scope:
    """How much is run: the values of the sweeps."""

    images: int                  # of each run; plain decoding draws GROUPS times as many
    timed: int                   # of each latency
    k: tuple[int, ...]
    delta: tuple[float, ...]     # LANTERN's
    omega: tuple[float, ...]     # COOL-SD's delta
    ratio: tuple[float, ...]     # LANTERN++'s lambda
    depth: tuple[int, ...]       # of the cost model's trees
    width: tuple[int, ...]


FULL = Scope(48, 4, (30, 100, 300, 1000), (0.05, 0.1, 0.2, 0.4), (1.1, 1.5, 2.0, 3.0), (0.5, 1.0, 2.0, 4.0),
             (1, 2, 4, 6), (2, 6, 10))
QUICK = Scope(12, 1, (100, 1000), (0.1, 0.4), (1.1, 2.0), (1.0, 4.0), (1, 4), (2, 10))

Works = Iterator[Work]


@dataclass
class Report:
    """What an item looks at."""

    study: Study
    scope: Scope
    own: np.ndarray                       # features of the prompts' own pictures
    scored: dict[Run, dict[str, Score]] = field(default_factory=dict)

    def quality(self, run: Run) -> dict[str, Score]:
        if run not in self.scored:
            self.scored[run] = self.study.quality(run, self.own)
        return self.scored[run]

    def tau(self, text: str, T: float = 1.0) -> float:
        return self.study.pictures(Run.of(text, T)).tau

    def row(self, run: Run) -> dict:
        """The usual columns: steps, the meter, and every score. No seconds: those are of single pictures."""
        pictures = self.study.pictures(run)
        row = {"method": run.method.label, "T": f"{run.temperature:g}", "nodes": run.method.tree_nodes,
               "tau": pictures.tau, "TV meter": pictures.excess.mean().item()}
        return row | self.quality(run)

    def meter(self, run: Run) -> float:
        return self.study.pictures(run).excess.mean().item()

    def compared(self, statistic: Callable[[Callable[[Run], float]], float], runs: list[Run],
                 name: str = "kernel distance") -> tuple[float, float]:
        """A weighted sum of runs' distances to plain decoding, and what chance alone adds or takes in 19 of 20 cases.

        statistic: from a function that gives each run's distance; linear in it. Every run is taken to have the noise
        that plain decoding has, of its own.
        """
        weights = [statistic(lambda other: float(other == run)) for run in runs]
        value = statistic(lambda run: self.quality(run)[name].value)
        return value, self.quality(runs[0])[name].noise * float(np.linalg.norm(weights))

    def noise(self, section: Section, runs: list[Run]) -> None:
        """What the scores of these runs can tell, below their table."""
        scores, count = self.quality(runs[0]), self.study.images
        parts = [f"{name} {score.plain:.3g} +- {score.noise:.2g}" for name, score in scores.items()]
        chance = 0.05 * len(runs) * len(scores)
        text = (f"{count} pictures of plain decoding beside its others: {'; '.join(parts)}. A star marks what is "
                f"outside; of so many numbers about {chance:.0f} would be by chance alone.")
        relaxed = [self.quality(run)["kernel distance"] for run in runs if not run.method.lossless]
        hidden = sorted(score.pictures_needed(count) for score in relaxed if not score.significant and score.effect)
        if hidden:
            text += (f" {len(hidden)} of {len(relaxed)} relaxed methods cannot be told from plain decoding by the "
                     f"kernel distance of {count} pictures: half of them would need {hidden[len(hidden) // 2]} or "
                     "more.")
        section.text(text)


def decided(value: float, half: float) -> bool | None:
    """Is it above 0? None: its interval has both signs."""
    return None if abs(value) <= half else value > 0


def alike(value: float, half: float, margin: float) -> bool | None:
    """Is a difference within the margin, or for certain not? None: neither."""
    if abs(value) + half <= margin:
        return True
    return False if abs(value) - half > margin else None


def faster(study: Study, a: Latency, b: Latency) -> tuple[bool | None, float]:
    """Does a draw every picture faster than b, both beside plain decoding (None: some), and the median ratio."""
    ratios = study.seconds(a).speedup / study.seconds(b).speedup
    return (True if ratios.min() > 1 else False if ratios.max() < 1 else None), float(np.median(ratios))


@dataclass(frozen=True)
class Item:
    """One table or figure."""

    name: str
    title: str
    works: Callable[[Scope], Works]
    write: Callable[[Report, Section], None]


def items_of(registry: dict[str, Item]):
    """A decorator by which functions that write a section become items of `registry`."""
    def item(name: str, title: str, works: Callable[[Scope], Works]):
        def register(write):
            registry[name] = Item(name, title, works, write)
            return write
        return register
    return item


ITEMS: dict[str, Item] = {}
item = items_of(ITEMS)


def lantern(k: int, delta: float, **others) -> str:
    extra = "".join(f":{key}={value}" for key, value in others.items())
    return f"lantern:k={k}:delta={delta:g}{extra}"


def plain(scope: Scope, T: float = 1.0) -> Run:
    return Run.of("vanilla", T, count=GROUPS * scope.images if T else scope.images)


def grid(scope: Scope) -> Works:
    for k in scope.k:
        for delta in scope.delta:
            yield Run.of(lantern(k, delta))


def strongest(scope: Scope) -> str:
    return lantern(scope.k[-1], scope.delta[-1])


def grows(values: np.ndarray, axis: int, slack: float) -> bool:
    return bool((np.diff(values, axis=axis) >= -slack).all())


# --- all methods -------------------------------------------------------------------------------------------------

def all_methods(scope: Scope) -> Works:
    yield plain(scope)
    yield from grid(scope)
    for m in METHODS.values():
        if m.drafting != "none":
            yield Run(m)
    yield Run.of("eagle1:tree=naive_extend_57")  # lossless on LANTERN++'s tree
    yield from sweeps(scope)


def sweeps(scope: Scope) -> Works:
    for omega in scope.omega:
        yield Run.of(f"uniform-rsd:omega={omega:g}")
        yield Run.of(f"cool-sd:omega={omega:g}")
    for ratio in scope.ratio:
        yield Run.of(f"lantern++:delta={ratio:g}")
        yield Run.of(f"lantern++:delta={ratio:g}:residual=optimal")


def families(scope: Scope) -> dict[str, Callable[[Method], bool]]:
    """The curves: a recipe, whose runs differ in one parameter."""
    def lantern_of(k: int):
        return lambda m: m.name == "lantern" and m.k == k

    return {f"LANTERN, k {k}": lantern_of(k) for k in scope.k} | {
        "LANTERN++": lambda m: m.name == "lantern++" and m.residual == "relaxed",
        "LANTERN++ with G*": lambda m: m.name == "lantern++" and m.residual == "optimal",
        "UniformRSD": lambda m: m.name == "uniform-rsd",
        "COOL-SD": lambda m: m.name == "cool-sd",
    }


def curves(report: Report, runs: list[Run]):
    """A figure of distances and fidelity meter over tau: runs of a family as curves, other runs by name."""
    figure, (three,) = axes(1, 3, 4.6, 3.8)
    for axis, quality in zip(three, ("Frechet distance", "kernel distance", None)):
        def point(run):
            height = report.meter(run) if quality is None else report.quality(run)[quality].value
            return report.study.pictures(run).tau, height

        if quality is not None:
            score = report.quality(runs[-1])[quality]
            axis.axhspan(score.plain - score.noise, score.plain + score.noise, color="gray", alpha=0.25,
                         label="plain decoding")
        alone = list(runs)
        for family, holds in families(report.scope).items():
            those = [run for run in runs if holds(run.method)]
            alone = [run for run in alone if run not in those]
            if those:
                axis.plot(*zip(*sorted(point(run) for run in those)), "o-", ms=4, lw=1, label=family)
        for run in alone:
            axis.plot(*point(run), "k*" if run.method.lossless else "kx", ms=6)
            axis.annotate(run.method.label, point(run), fontsize=6, xytext=(3, 3), textcoords="offset points")
        axis.set(xlabel="tau: tokens per target forward", ylabel=quality or "fidelity meter: TV per token (estimate)")
    figure.legend(*three[0].get_legend_handles_labels(), loc="outside right center", fontsize=7)
    return figure


@item("trade-off", "Every method: speed against fidelity", all_methods)
def trade_off(report: Report, section: Section) -> None:
    runs = [run for run in dict.fromkeys(all_methods(report.scope)) if run.method.drafting != "none"]
    rows = sorted((report.row(run) for run in runs), key=lambda row: row["tau"])
    section.text("tau is tokens per target forward (of trees of so many nodes), of pictures decoded in batches; "
                 "seconds of single pictures are in `latency`. The meter estimates the total variation that "
                 "relaxed acceptance added per token.")
    section.figure(curves(report, runs), "Speed against distance from plain decoding's pictures (band: plain "
                                         "decoding's own), and against the fidelity meter; stars are lossless")
    section.table(rows)
    report.noise(section, runs)
    best = []
    for budget in (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4):
        run = max((run for run in runs if report.meter(run) <= budget), key=lambda run: report.study.pictures(run).tau)
        best.append({"TV meter at most": f"{budget:g}", "largest tau": report.study.pictures(run).tau,
                     "method": run.method.label, "nodes": run.method.tree_nodes, "TV meter": report.meter(run),
                     "kernel distance": report.quality(run)["kernel distance"]})
    section.text("Which method needs the fewest target forwards for which budget, among these runs:")
    section.table(best, "-budgets")


# --- LANTERN -----------------------------------------------------------------------------------------------------

@item("lantern-table-2", "LANTERN, Table 2: average acceptance over k and delta",
      lambda scope: [plain(scope), Run.of("eagle2"), *grid(scope)])
def lantern_table_2(report: Report, section: Section) -> None:
    scope, study = report.scope, report.study
    acceptance, tau = (np.array([[what(study.pictures(Run.of(lantern(k, delta)))) for delta in scope.delta]
                                 for k in scope.k])
                       for what in (lambda p: p.decoded.acceptance_rate, lambda p: p.tau))
    eagle = study.pictures(Run.of("eagle2"))
    section.text("Accepted drafts per drafted level at temperature 1. k counts other codes of "
                 f"{study.pipeline.gpt.config.vocabulary}; LANTERN's k is of 16384, and counts the draft's own.")
    section.table([{"k": 0, **{f"delta {delta:g}": eagle.decoded.acceptance_rate for delta in scope.delta}},
                   *({"k": k, **{f"delta {delta:g}": value for delta, value in zip(scope.delta, line)}}
                     for k, line in zip(scope.k, acceptance.tolist()))])
    figure, (both,) = axes(1, 2, 4.2, 3)
    heat(both[0], acceptance, scope.k, scope.delta, "acceptance", ("k", "delta"))
    heat(both[1], tau, scope.k, scope.delta, "tau", ("k", "delta"))
    section.figure(figure, "Acceptance and tau over k and delta")
    section.text("The paper: a draft of naive speculative decoding is accepted with probability 4 % (a note on the "
                 "paper); the table's numbers were not at hand.")
    section.claim("more neighbors and a larger delta accept more", grows(acceptance, 0, 0.01) and
                  grows(acceptance, 1, 0.01) and acceptance[-1, -1] > eagle.decoded.acceptance_rate,
                  f"from {eagle.decoded.acceptance_rate:.3f} without neighbors to {acceptance[-1, -1]:.3f}")


def table_3(scope: Scope) -> Works:
    for T in (0.0, 1.0):
        yield plain(scope, T)
        for text in ("eagle2", "lantern", strongest(scope)):
            yield Run.of(text, T)
            yield Latency(parse_method(text), T)


@item("lantern-table-3", "LANTERN, Table 3: speed and quality at temperature 0 and 1", table_3)
def lantern_table_3(report: Report, section: Section) -> None:
    works = list(table_3(report.scope))
    runs = [work for work in works if isinstance(work, Run) and work.method.drafting != "none"]
    section.text("The paper, LlamaGen-XL (its abstract gives the ratios 1.75 and 1.82, a note on it these numbers):")
    section.table(papers.LANTERN_TABLE_3, "-paper")
    section.text(f"Here, {report.study.images} pictures in batches:")
    section.table([report.row(run) for run in runs])
    report.noise(section, [run for run in runs if run.temperature])
    section.text("At temperature 0 plain decoding has one picture a prompt: the noise is 0, every change counts.")
    section.text("Single pictures, each right after plain decoding's of the same prompt:")
    section.table([latency_row(report.study, work) for work in works if isinstance(work, Latency)], "-latency")
    for T, ratio in ((0.0, "1.75"), (1.0, "1.82")):
        eagle, ours = (report.tau(text, T) for text in ("eagle2", strongest(report.scope)))
        holds, times = faster(report.study, *(Latency(parse_method(text), T) for text in
                                              (strongest(report.scope), "eagle2")))
        section.claim(f"at temperature {T:g} LANTERN is faster than EAGLE-2, {ratio} times", holds,
                      f"{times:.2f} times in seconds of single pictures; tau grows {ours / eagle:.2f} times, from "
                      f"{eagle:.2f} to {ours:.2f}")
    name = report.quality(Run.of(strongest(report.scope)))["nearest name"]
    section.claim("its agreement with the prompt stays (CLIP score)",
                  False if name.significant and name.value < name.plain else None,
                  f"nearest name {name.value:.3g}, plain decoding {name.plain:.3g} +- {name.noise:.2g}")
    distance = report.quality(Run.of(strongest(report.scope)))["kernel distance"]
    section.claim("its distance (FID) grows somewhat", decided(distance.value - distance.plain, distance.noise),
                  f"kernel distance {distance.value:.3g}, plain decoding's own {distance.plain:.2g} +- "
                  f"{distance.noise:.2g}")


def latency_row(study: Study, latency: Latency) -> dict:
    """Seconds of single pictures. The speed-up is the median of ratios of neighbors in time."""
    seconds = study.seconds(latency)
    return {"method": latency.method.label, "T": f"{latency.temperature:g}",
            "seconds": float(np.mean(seconds.method)), "+-": float(np.std(seconds.method)),
            "plain seconds": float(np.mean(seconds.plain)), "speed-up": float(np.median(seconds.speedup)),
            "least": float(seconds.speedup.min()), "most": float(seconds.speedup.max()),
            "tau": float(np.mean(seconds.tau)), "pictures": len(seconds.tau)}


def table_4(scope: Scope) -> Works:
    yield plain(scope)
    for metric in ("l2", "cosine", "random"):
        yield Run.of(lantern(100, 0.2, metric=metric))
    for delta in (0.02, 0.05, 0.1):
        yield Run.of(lantern(100, delta, kind="jsd"))
    for delta in scope.delta:
        yield Run.of(lantern(100, delta))


@item("lantern-table-4", "LANTERN, Table 4: metric of nearness and measure of divergence", table_4)
def lantern_table_4(report: Report, section: Section) -> None:
    runs = [run for run in dict.fromkeys(table_4(report.scope)) if run.method.drafting != "none"]
    section.table([report.row(run) for run in runs])
    report.noise(section, runs)
    of = {metric: Run.of(lantern(100, 0.2, metric=metric)) for metric in ("l2", "cosine", "random")}
    margin = report.quality(of["l2"])["kernel distance"].noise
    gap, half = report.compared(lambda d: d(of["cosine"]) - d(of["l2"]), list(of.values()))
    same = torch.equal(*(report.study.pictures(of[metric]).decoded.tokens for metric in ("l2", "cosine")))
    section.claim("l2 and cosine are about equal", same or alike(gap, half, margin),
                  "the codes have unit length: both find the same neighbors and draw the same pictures" if same else
                  f"the kernel distance with cosine differs by {gap:+.2g} +- {half:.2g}; plain decoding's own noise is "
                  f"{margin:.2g}")
    gap, half = report.compared(lambda d: d(of["random"]) - (d(of["l2"]) + d(of["cosine"])) / 2, list(of.values()))
    section.claim("near codes are better neighbors than random ones", decided(gap, half),
                  f"with random ones the kernel distance differs by {gap:+.2g} +- {half:.2g}, tau is "
                  f"{report.study.pictures(of['random']).tau:.2f} against {report.study.pictures(of['l2']).tau:.2f}")
    kinds = {kind: sorted((run for run in runs if run.method.kind == kind and run.method.metric == "l2"),
                          key=lambda run: report.study.pictures(run).tau) for kind in ("tvd", "jsd")}
    gap, half, shared = curve_gap(report, kinds["jsd"], kinds["tvd"])
    section.claim("total variation and Jensen-Shannon divergence do equally well at equal speed",
                  alike(gap, half, margin) if shared else None,
                  f"over tau {shared[0]:.2f} to {shared[1]:.2f} the kernel distance with the latter differs by "
                  f"{gap:+.2g} +- {half:.2g}" if shared else "their curves have no tau in common")


def curve_gap(report: Report, a: list[Run], b: list[Run]) -> tuple[float, float, tuple[float, float] | None]:
    """How far the curve of kernel distance over tau of runs a lies above that of b where both are; its half-width."""
    tau = {run: report.study.pictures(run).tau for run in a + b}
    low, high = (pick(pick2(tau[run] for run in runs) for runs in (a, b)) for pick, pick2 in ((max, min), (min, max)))
    if low >= high:
        return float("nan"), float("nan"), None
    x = np.linspace(low, high, 50)

    def gap(distance):
        lines = [np.array(sorted((tau[run], distance(run)) for run in runs)).T for runs in (a, b)]
        return float((np.interp(x, *lines[0]) - np.interp(x, *lines[1])).mean())

    return *report.compared(gap, a + b), (low, high)


@item("lantern-figure-3", "LANTERN, Figure 3: codes re-sampled among their nearest", lambda scope: [plain(scope)])
def lantern_figure_3(report: Report, section: Section) -> None:
    study = report.study
    tokens = study.pictures(plain(report.scope)).decoded.tokens[:report.study.images]
    V = study.pipeline.gpt.config.vocabulary
    generator = torch.Generator().manual_seed(0)
    pick = torch.randint(2**31, tokens.shape, generator=generator)
    versions = {"as drawn": tokens}
    for k in (k for k in (10, 30, 100, 300) if k < V):
        table = study.pipeline.neighbors(k).long().cpu()
        near = torch.cat([torch.arange(V)[:, None], table], 1)     # the code itself is the first of its nearest
        versions[f"{k} nearest"] = near[tokens].gather(2, (pick % k)[..., None])[..., 0]
    versions["any code"] = pick % V
    images = {name: np.concatenate([np.stack([np.asarray(p) for p in study.pipeline.pictures(part)])
                                    for part in version.split(CHUNK)]) for name, version in versions.items()}
    features = {name: study.network(these)[0] for name, these in images.items()}
    shown = min(8, len(tokens))
    figure, all_axes = axes(shown, len(versions), 0.95, 0.95)
    for column, (name, these) in enumerate(images.items()):
        for line, image in enumerate(these[:shown]):
            show(all_axes[line, column], image, name if line == 0 else "")
    section.figure(figure, "Every code of a picture replaced by one drawn uniformly among its nearest, itself counted")
    reference = images["as drawn"].astype(np.float64)

    def cosine(name):
        a, b = (features[n] / np.linalg.norm(features[n], axis=1, keepdims=True) for n in ("as drawn", name))
        return float((a * b).sum(1).mean())

    rows = []
    for name, these in list(images.items())[1:]:
        error = ((these - reference) ** 2).mean((1, 2, 3))
        rows.append({"codes": name, "PSNR (dB)": float((10 * np.log10(255**2 / error.clip(1e-9))).mean()),
                     "cosine of features": cosine(name)})
    section.table(rows)
    section.text(f"Of {V} codes 100 are {100 / V:.1%}; of LlamaGen's 16384 they are 0.6 %: the row of 30 is the like "
                 "of the paper's.")
    survived = next((row for row in rows if row["codes"] == "30 nearest"), rows[0])
    section.claim("the picture survives", survived["cosine of features"] > (1 + rows[-1]["cosine of features"]) / 2,
                  f"features keep a cosine of {survived['cosine of features']:.2f} with 30 nearest, "
                  f"{rows[-1]['cosine of features']:.2f} with any code")


@item("lantern-figures-5-7", "LANTERN, Figures 5 to 7: trade-off curves and grids over k and delta",
      lambda scope: [plain(scope), Run.of("eagle2"), *grid(scope)])
def lantern_figures_5_7(report: Report, section: Section) -> None:
    scope, study = report.scope, report.study
    runs = {(k, delta): Run.of(lantern(k, delta)) for k in scope.k for delta in scope.delta}
    names = list(report.quality(runs[scope.k[0], scope.delta[0]]))
    values = {name: np.array([[report.quality(runs[k, d])[name].value for d in scope.delta] for k in scope.k])
              for name in names}
    tau = np.array([[study.pictures(runs[k, d]).tau for d in scope.delta] for k in scope.k])
    figure, (all_axes,) = axes(1, len(names), 3.6, 3.2)
    for axis, name in zip(all_axes, names):
        for k, x, y in zip(scope.k, tau, values[name]):
            axis.plot(x, y, "o-", ms=4, lw=1, label=f"k {k}")
        score = report.quality(Run.of("eagle2"))[name]
        axis.plot(study.pictures(Run.of("eagle2")).tau, score.value, "k*", label="EAGLE-2")
        axis.axhspan(score.plain - score.noise, score.plain + score.noise, color="gray", alpha=0.25)
        axis.set(xlabel="tau", ylabel=name)
        axis.legend(fontsize=6)
    section.figure(figure, "Each curve is a k, each point a delta; the band is plain decoding and its noise", "-curves")
    figure, (all_axes,) = axes(1, 1 + len(names), 3.0, 2.6)
    for axis, (name, table) in zip(all_axes, {"tau": tau, **values}.items()):
        heat(axis, table, scope.k, scope.delta, name, ("k", "delta"))
    section.figure(figure, "The same as numbers", "-grid")
    for index in (0, 2, 5):
        if index < study.images:
            figure, all_axes = axes(len(scope.k), 1 + len(scope.delta), 1.0, 1.05)
            figure.suptitle(study.prompts[index % len(study.prompts)], fontsize=8)
            for line, k in enumerate(scope.k):
                for column, run in enumerate((plain(scope), *(runs[k, d] for d in scope.delta))):
                    tokens = study.pictures(run).decoded.tokens[index:index + 1]
                    title = "plain" if column == 0 else f"delta {scope.delta[column - 1]:g}, k {k}"
                    show(all_axes[line, column], study.pipeline.pictures(tokens)[0], title)
            section.figure(figure, f"Pictures over k and delta, {study.prompts[index % len(study.prompts)]!r}",
                           f"-pictures-{index}")
    section.claim("larger k and delta are faster", grows(tau, 0, 0.05) and grows(tau, 1, 0.05),
                  f"tau from {tau.min():.2f} to {tau.max():.2f}")
    corners = [runs[k, d] for k in (scope.k[0], scope.k[-1]) for d in (scope.delta[0], scope.delta[-1])]
    gap, half = report.compared(lambda d: d(corners[3]) - d(corners[0]), corners)
    section.claim("and lower the quality", decided(gap, half),
                  f"from the smallest to the largest the kernel distance grows by {gap:+.2g} +- {half:.2g}")
    gap, half = report.compared(lambda d: d(corners[2]) - d(corners[0]), corners)
    margin = report.quality(corners[0])["kernel distance"].noise
    section.claim("at a small delta a larger k is without significant loss", alike(gap, half, margin),
                  f"at delta {scope.delta[0]:g} tau goes from {tau[0, 0]:.2f} to {tau[-1, 0]:.2f}, the kernel distance "
                  f"by {gap:+.2g} +- {half:.2g}; plain decoding's own noise is {margin:.2g}")


# --- ADT-Tree ----------------------------------------------------------------------------------------------------

ADT = ("eagle2", "lantern", "adt-tree", "adt-tree+lantern")


def adt_table_1_works(scope: Scope) -> Works:
    for T in (0.0, 1.0):
        for text in ADT:
            yield Run.of(text, T)
            yield Latency(parse_method(text), T)


@item("adt-table-1", "ADT-Tree, Table I: speed-up, tau and mean depth", adt_table_1_works)
def adt_table_1(report: Report, section: Section) -> None:
    study = report.study
    section.text("The paper, Anole:")
    section.table(papers.ADT_TABLE_1, "-paper")
    section.text("Here; depth is drafted levels (EAGLE-2 drafts 5 there, 4 in our recipe).")
    rows, tau, depth = [], {}, {}
    for T in (0.0, 1.0):
        for text in ADT:
            pictures = study.pictures(Run.of(text, T))
            tau[text, T], depth[text, T] = pictures.tau, pictures.depth
            began = pictures.nodes > 0
            rows.append({"method": text, "T": f"{T:g}", "tau": pictures.tau, "mean depth": pictures.depth,
                         "mean nodes": pictures.nodes[began].float().mean().item(),
                         "acceptance": pictures.decoded.acceptance_rate})
    section.table(rows)
    section.text("Single pictures, each right after plain decoding's:")
    section.table([latency_row(study, Latency(parse_method(text), T)) for T in (0.0, 1.0) for text in ADT], "-latency")
    for T, paper in ((1.0, "at temperature 1 ADT-Tree is faster than EAGLE-2 (1.06 against 0.76 times plain decoding)"),
                     (0.0, "and at temperature 0, where most of its gain is")):
        holds, times = faster(study, *(Latency(parse_method(text), T) for text in ("adt-tree", "eagle2")))
        section.claim(paper, holds, f"{times:.2f} times in seconds of single pictures, tau {tau['adt-tree', T]:.2f} "
                                    f"against {tau['eagle2', T]:.2f}")
    section.claim("LANTERN's acceptance adds to it", *gain(study, "adt-tree+lantern", "adt-tree"))
    section.claim("its trees are shallower than EAGLE-2's at temperature 1",
                  depth["adt-tree", 1.0] < depth["eagle2", 1.0],
                  f"mean depth {depth['adt-tree', 1.0]:.2f} against {depth['eagle2', 1.0]:.2f}")


def gain(study: Study, a: str, b: str) -> tuple[bool | None, str]:
    """Has a the larger tau of the two at temperature 1, and the words for it; by differences of the same pictures."""
    taus = [study.pictures(Run.of(text)).decoded.tau for text in (a, b)]
    change = (taus[0] - taus[1])[~(taus[0] - taus[1]).isnan()]
    half = 2 * change.std().item() / len(change) ** 0.5
    return decided(change.mean().item(), half), (f"tau {taus[0].nanmean():.2f} against {taus[1].nanmean():.2f}, a "
                                                 f"difference of {change.mean():+.2f} +- {half:.2f}")


STARTS = {"horizontal (the default)": "adt-tree", "vertical": "adt-tree:start=vertical",
          "random": "adt-tree:start=random", "TokenFlock": "adt-tree:start=tokenflock",
          "depth from 1": "adt-tree:flat_depth=1", "width from 25": "adt-tree:flat_width=25"}


@item("adt-table-5", "ADT-Tree, Table V: where a tree's shape starts from",
      lambda scope: [Run.of(text) for text in STARTS.values()])
def adt_table_5(report: Report, section: Section) -> None:
    rows = []
    for name, text in STARTS.items():
        pictures = report.study.pictures(Run.of(text))
        rows.append({"start": name, "tau": pictures.tau, "mean depth": pictures.depth,
                     "mean nodes": pictures.nodes[pictures.nodes > 0].float().mean().item(),
                     "acceptance": pictures.decoded.acceptance_rate})
    section.text("At temperature 1. The last two rows are the ablation's fixed starts; where the paper leaves a choice "
                 "open, `Adaptation` in trees.py says what was taken.")
    section.table(rows)
    for name in ("vertical", "random"):
        section.claim(f"the default, the left neighbor's shape, is a better start than {name}",
                      *gain(report.study, STARTS["horizontal (the default)"], STARTS[name]))


@item("adt-figure-3b", "ADT-Tree, Figure 3b: rank of the accepted token",
      lambda scope: [Run.of("eagle2:width=10:nodes=60"), Run.of("adt-tree")])
def adt_figure_3b(report: Report, section: Section) -> None:
    study, rows = report.study, []
    figure, (both,) = axes(1, 2, 4.2, 3.2)
    shares = {}
    for axis, text in zip(both, ("eagle2:width=10:nodes=60", "adt-tree")):
        run = Run.of(text)
        pictures = study.pictures(run)
        top = top_1(report, run)
        ranks = pictures.ranks
        sure = top >= top.median()
        width = 12
        for name, where in (("likelier half of places", sure), ("less likely half", ~sure)):
            those = ranks[where & (ranks >= 0)].clamp(max=width - 1)
            share = torch.bincount(those, minlength=width).float() / max(len(those), 1)
            shares[text, name] = those.float().mean().item() if len(those) else float("nan")
            axis.plot(1 + np.arange(width), share.where(share > 0, torch.nan).numpy(), "o-", ms=4, lw=1, label=name)
            rows.append({"method": run.method.label, "places": name, "accepted drafts": len(those),
                         "mean rank": 1 + shares[text, name], "rank 1": share[0].item(), "rank 2": share[1].item(),
                         "rank 3": share[2].item(), "rank 4 or more": share[3:].sum().item()})
        axis.set(xlabel=f"rank among the siblings ({width}: and beyond)", ylabel="share of accepted drafts",
                 yscale="log")
        axis.set_title(run.method.label, fontsize=8)
        axis.legend(fontsize=7)
    section.figure(figure, "Rank, by the draft's probability, of the sibling that was accepted, for places where the "
                           "target's likeliest token is likelier or less likely than its median")
    section.table(rows)
    section.claim("wide trees pay where prediction is hard", all(
        shares[text, "less likely half"] > shares[text, "likelier half of places"]
        for text in ("eagle2:width=10:nodes=60", "adt-tree")),
        f"EAGLE-2's accepted ranks average {rows[1]['mean rank']:.2f} there, {rows[0]['mean rank']:.2f} elsewhere")


def top_1(report: Report, run: Run) -> torch.Tensor:
    """(n, L) the target's largest probability at each place of a run's finished pictures."""
    return forced(report, run)[0]


def forced(report: Report, run: Run) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of finished pictures (n, L): largest target probability, and for tokens from the second on (n, L - 1) the
    largest draft probability and sum min(P, Q)."""
    study = report.study
    key = ("forced", run)
    if key not in study.kept:
        tokens, parts = study.pictures(run).decoded.tokens, []
        for start in range(0, len(tokens), 8):
            some = tokens[start: start + 8].to(study.pipeline.device)
            target, draft = teacher_forced_probs(study.pipeline, study._prompts(start, len(some)), some,
                                                 study._sampling(start, len(some), run.temperature))
            parts.append((target.max(-1).values, draft.max(-1).values,
                          torch.minimum(target[:, 1:], draft).sum(-1)))
        study.kept[key] = tuple(torch.cat(part).cpu() for part in zip(*parts))
    return study.kept[key]


@item("adt-figures-4-5-9", "ADT-Tree, Figures 4, 5 and 9: maps of the likeliest token's probability",
      lambda scope: [Run.of("eagle2")])
def adt_figures(report: Report, section: Section) -> None:
    study = report.study
    run = Run.of("eagle2")
    pictures = study.pictures(run)
    top, draft, overlap = forced(report, run)
    side = study.pipeline.gpt.config.grid
    gains = steps_gain(pictures.decoded.accepted).float()
    shown = min(6, len(top))
    figure, all_axes = axes(4, shown, 1.5, 1.5)
    for i, image in enumerate(study.pipeline.pictures(pictures.decoded.tokens[:shown])):
        show(all_axes[0, i], image, study.prompts[i % len(study.prompts)])
        show(all_axes[1, i], top[i].view(side, side), "target's top-1")
        first = torch.cat([draft.new_full((1,), float("nan")), draft[i]])
        show(all_axes[2, i], first.view(side, side), "draft's top-1")
        show(all_axes[3, i], gains[i].view(side, side), "tokens of the step")
    section.figure(figure, "Pictures of EAGLE-2, the largest probability of target and draft at each token, and how "
                           "many tokens the step gained that drew it", "-pictures")
    figure, (three,) = axes(1, 3, 3.4, 3)
    for axis, (name, values) in zip(three, {
            "target's top-1": top.mean(0), "tokens of the step": gains.mean(0),
            "sum min(target, draft)": torch.cat([overlap.new_full((1,), float("nan")), overlap.mean(0)])}.items()):
        image = axis.imshow(values.view(side, side).numpy())
        axis.set(xticks=[], yticks=[])
        axis.set_title(f"{name}, mean of {len(top)} pictures", fontsize=8)
        figure.colorbar(image, ax=axis)
    section.figure(figure, "Means over all pictures", "-means")
    correlation = np.corrcoef(top.flatten().numpy(), gains.flatten().numpy())[0, 1]
    left = np.corrcoef(top.view(-1, side, side)[:, :, 1:].flatten().numpy(),
                       top.view(-1, side, side)[:, :, :-1].flatten().numpy())[0, 1]
    up = np.corrcoef(top.view(-1, side, side)[:, 1:].flatten().numpy(),
                     top.view(-1, side, side)[:, :-1].flatten().numpy())[0, 1]
    shared = np.corrcoef(overlap.flatten().numpy(), gains[:, 1:].flatten().numpy())[0, 1]
    section.table([{"correlation over all places of": name, "value": float(value)} for name, value in (
        ("the target's top-1 with the tokens gained by the step", correlation),
        ("sum min(target, draft) with the tokens gained by the step", shared),
        ("the target's top-1 with the left neighbor's", left), ("the target's top-1 with the upper neighbor's", up))])
    section.text("At the edges of the pictures, which are white, the target is unsure among codes that are all white, "
                 "and so is the draft: there top-1 is low, and yet what they share and what is accepted is much.")
    section.claim("difficulty differs between regions, and acceptance follows it", bool(correlation > 0.1),
                  f"correlation of the target's top-1 with the tokens gained {correlation:.2f}")
    section.claim("neighbors are alike", bool(min(left, up) > 0.2),
                  f"correlation with the left neighbor {left:.2f}, with the upper {up:.2f}")


def cost_shapes(scope: Scope) -> list[tuple[Method, Latency, Memory]]:
    methods = [parse_method(f"eagle2:depth={depth}:width={width}:nodes={1 + width + min(depth - 1, 5) * width}")
               for depth in scope.depth for width in scope.width]
    return [(m, Latency(m, 1.0, 2 if len(scope.depth) > 2 else 1), Memory(m)) for m in methods]


@item("adt-cost", "ADT-Tree, equations 4 and 5: cost of a tree in time and space",
      lambda scope: [work for shape in cost_shapes(scope) for work in shape[1:]] + [Memory(parse_method("vanilla"))])
def adt_cost(report: Report, section: Section) -> None:
    study, rows, seen = report.study, [], []
    section.text("The equations' text was not at hand. As cost in time we take C_T = d t_D(w) + t_T(N), d forwards of "
                 "the drafter on w nodes and one of the target on N; as cost in space C_S = N + w + (d - 1) w, the "
                 "rows of V probabilities that the target's and the drafter's forwards give. Memory is the most that "
                 "all tensors of one picture took together, less plain decoding's.")
    plain_bytes = study.memory(Memory(parse_method("vanilla")))
    for m, latency, memory in cost_shapes(report.scope):
        seconds = study.seconds(latency)
        steps = np.array([study.pipeline.gpt.config.tokens / tau for tau in seconds.tau])
        step = 1e3 * float(np.median(np.array(seconds.method) / steps))
        inner = (m.depth - 1) * m.width
        held = (study.memory(memory) - plain_bytes) / 1e6
        seen.append((1, m.depth, inner, m.tree_nodes, m.tree_nodes + m.width + inner, step, held))
        rows.append({"depth d": m.depth, "width w": m.width, "nodes N": m.tree_nodes, "step (ms)": step,
                     "C_T fitted (ms)": 0.0, "rows C_S": m.tree_nodes + m.width + inner, "memory (MB)": held,
                     "C_S fitted (MB)": 0.0, "tau": float(np.mean(seconds.tau))})
    one, depth, inner, nodes, space, step, held = np.array(seen, dtype=np.float64).T
    time_fit, time_weights, time_rest = least_squares(np.stack([one, depth, inner, nodes], 1), step)
    space_fit, space_weights, space_rest = least_squares(np.stack([one, space], 1), held)
    for row, a, b in zip(rows, time_fit, space_fit):
        row |= {"C_T fitted (ms)": float(a), "C_S fitted (MB)": float(b)}
    section.table(rows)
    V = study.pipeline.gpt.config.vocabulary
    few = " (as many weights as trees: R^2 says nothing)" if len(rows) <= time_weights.size else ""
    section.text(f"Least squares, single pictures: a step takes {time_weights[0]:.2f} ms + {time_weights[1]:.2f} ms a "
                 f"level + {time_weights[2]:.3f} ms a drafted inner node + {time_weights[3]:.3f} ms a verified node, "
                 f"R^2 {time_rest:.2f}{few}; memory is {space_weights[0]:.2f} MB + {1e3 * space_weights[1]:.1f} kB a "
                 f"row, R^2 {space_rest:.2f}. (A row of float32 is {4e-3 * V:.1f} kB; a node has two rows of "
                 "logits too.)")
    figure, (three,) = axes(1, 3, 3.6, 3)
    for axis, x, y, unit in ((three[0], step, time_fit, "step (ms)"), (three[1], held, space_fit, "memory (MB)")):
        axis.plot(x, y, "o", ms=4)
        axis.plot([0, 1.05 * max(x.max(), y.max())], [0, 1.05 * max(x.max(), y.max())], "k:", lw=1)
        axis.set(xlabel=f"measured {unit}", ylabel=f"fitted {unit}")
    for width in report.scope.width:
        those = np.array([row["width w"] == width for row in rows])
        three[2].plot(depth[those], step[those], "o-", ms=4, lw=1, label=f"width {width}")
    three[2].set(xlabel="depth", ylabel="measured step (ms)")
    three[2].legend(fontsize=7)
    section.figure(figure, "The linear costs against measured steps and memory of single pictures")


def least_squares(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Fitted values, weights, and the share of y's variance that they explain."""
    weights, *_ = np.linalg.lstsq(x, y, rcond=None)
    spread = ((y - y.mean()) ** 2).sum()
    return x @ weights, weights, float(1 - ((y - x @ weights) ** 2).sum() / spread) if spread else 1.0


@item("peanut-figures-1-2", "PEANUT, Figures 1 and 2: where and how much is accepted",
      lambda scope: [Run.of(text) for text in ("eagle1", *ADT, "cool-sd")])
def peanut_figures(report: Report, section: Section) -> None:
    study, texts = report.study, ("eagle1", *ADT, "cool-sd")
    side = study.pipeline.gpt.config.grid
    gains = {text: steps_gain(study.pictures(Run.of(text)).decoded.accepted).float().mean(0).view(side, side).numpy()
             for text in texts}
    top = max(values.max() for values in gains.values())
    figure, (all_axes,) = axes(1, len(texts), 2.1, 2.2)
    for axis, (text, values) in zip(all_axes, gains.items()):
        image = axis.imshow(values, vmin=1, vmax=top)
        axis.set(xticks=[], yticks=[])
        axis.set_title(f"{text}, mean {values.mean():.2f}", fontsize=8)
    figure.colorbar(image, ax=all_axes, label="tokens of the step")
    section.figure(figure, "Tokens gained by the step that drew each place, mean over pictures, temperature 1 (a step "
                           "of many tokens counts at many places: these means exceed tau)", "-maps")
    figure, (all_axes,) = axes(1, len(texts), 2.1, 2.2)
    rows, most = [], max(study.pictures(Run.of(text)).lengths.max().item() for text in texts)
    for axis, text in zip(all_axes, texts):
        lengths = study.pictures(Run.of(text)).lengths
        share = torch.bincount(lengths, minlength=most + 1).float() / len(lengths)
        axis.bar(range(most + 1), share.numpy())
        axis.set(ylim=(0, 1), xlabel="accepted drafts")
        axis.set_title(text, fontsize=8)
        rows.append({"method": text, **{f"{n}": value.item() for n, value in enumerate(share)},
                     "mean accepted drafts": lengths.float().mean().item()})
    section.figure(figure, "How many drafts a step accepts, share of steps", "-lengths")
    section.table(rows)
    each = steps_gain(study.pictures(Run.of("eagle2")).decoded.accepted).float()
    generator = torch.Generator().manual_seed(0)
    places = torch.stack([torch.stack([torch.randperm(side * side, generator=generator) for _ in each])
                          for _ in range(20)])
    shuffled = [each.gather(1, order).mean(0) for order in places]
    spread, chance = gains["eagle2"].max() / gains["eagle2"].min(), max((m.max() / m.min()).item() for m in shuffled)
    section.claim("acceptance differs strongly between regions", spread > chance,
                  f"EAGLE-2's steps gain {spread:.1f} times as many tokens at the best place as at the worst; with "
                  f"places shuffled in each picture at most {chance:.1f} times")


GUIDED = ("eagle2", "eagle1", "speculative")


def guided_works(scope: Scope) -> Works:
    for guidance in (None, 3.0):
        for text in GUIDED:
            for share in (1, 0):
                yield Run(parse_method(f"{text}:draft_guidance={share}"), 1.0, min(scope.images, CHUNK), 0, guidance)


@item("peanut-figure-7", "PEANUT, Figure 7: drafting with and without guidance", guided_works)
def peanut_figure_7(report: Report, section: Section) -> None:
    rows, gains, usual = [], {}, report.study.settings["guidance"]
    for run in guided_works(report.scope):
        pictures = report.study.pictures(run)
        gains[run.method.name, run.guidance, run.method.draft_guidance] = pictures.tau
        rows.append({"method": run.method.name, "guidance": f"{run.guidance or usual:g}",
                     "drafter": "guided" if run.method.draft_guidance else "not guided", "tau": pictures.tau,
                     "acceptance": pictures.decoded.acceptance_rate})
    section.text("The drafter's distribution is moved by the request's guidance, or is that with the caption "
                 "alone.")
    section.table(rows)
    figure, (all_axes,) = axes(1, 2, 3.6, 2.8)
    for axis, guidance in zip(all_axes, (None, 3.0)):
        for shift, share, label in ((-0.2, 1.0, "guided drafter"), (0.2, 0.0, "not guided")):
            heights = [gains[text, guidance, share] for text in GUIDED]
            axis.bar(np.arange(len(GUIDED)) + shift, heights, 0.4, label=label)
        axis.set(xticks=range(len(GUIDED)), xticklabels=GUIDED, ylabel="tau",
                 title=f"guidance {guidance or usual:g}")
        axis.legend(fontsize=7)
    section.figure(figure, "tau with and without guidance of the drafter")
    better = [gains[text, guidance, 1.0] / gains[text, guidance, 0.0] for text in GUIDED for guidance in (None, 3.0)]
    section.claim("the drafter is guided as the target (the paper's method figure), which pays",
                  True if min(better) > 1 else False if max(better) < 1 else None,
                  f"tau changes by {min(better) - 1:+.1%} to {max(better) - 1:+.1%}")


# --- COOL-SD -----------------------------------------------------------------------------------------------------

COOL = ("eagle1", "lantern++", "cool-sd", "cool-sd:omega=2")


@item("cool-table-1", "COOL-SD, Table 1: speed and quality of static trees",
      lambda scope: [plain(scope), *(Run.of(text) for text in COOL), *(Latency(parse_method(text)) for text in COOL)])
def cool_table_1(report: Report, section: Section) -> None:
    section.text("The paper (from a note on it):")
    section.table(papers.COOL_TABLE_1, "-paper")
    section.text("Here, temperature 1. CLIP score and ImageReward need weights that no package brings.")
    runs = [Run.of(text) for text in COOL]
    section.table([report.row(run) for run in runs])
    report.noise(section, runs)
    section.text("Single pictures, each right after plain decoding's:")
    section.table([latency_row(report.study, Latency(parse_method(text))) for text in COOL], "-latency")
    section.claim("COOL-SD with delta 1.1 accepts more than Eagle-1 (1.13 times on both models)",
                  *gain(report.study, "cool-sd", "eagle1"))
    section.claim("with delta 2 still more (1.38 times)", *gain(report.study, "cool-sd:omega=2", "cool-sd"))
    section.claim("LANTERN++ accepts more than Eagle-1 (1.08 to 1.10 times)",
                  *gain(report.study, "lantern++", "eagle1"))
    section.claim("and less than COOL-SD with delta 1.1", *gain(report.study, "cool-sd", "lantern++"))
    section.text("(LANTERN++'s recipe has a tree of its own here, of 57 drafts; the others' has 25.)")


@item("cool-figure-3", "COOL-SD, Figure 3: annealed against uniform relaxation",
      lambda scope: [plain(scope), Run.of("eagle1"), *sweeps(scope)])
def cool_figure_3(report: Report, section: Section) -> None:
    of = families(report.scope)
    runs = {name: [run for run in sweeps(report.scope) if of[name](run.method)]
            for name in ("UniformRSD", "COOL-SD", "LANTERN++")}
    every = [*sum(runs.values(), []), Run.of("eagle1")]
    section.text("Delta of UniformRSD and COOL-SD (our `omega`): " + ", ".join(f"{x:g}" for x in report.scope.omega)
                 + "; lambda of LANTERN++ (our `delta`, k = 10): " + ", ".join(f"{x:g}" for x in report.scope.ratio)
                 + ". COOL-SD's tree is EAGLE-1's, LANTERN++'s is its own, which is larger.")
    section.figure(curves(report, every), "Distance from plain decoding, and the fidelity meter, over tau")
    section.table([report.row(run) for run in every])
    report.noise(section, every)
    gap, half, shared = curve_gap(report, runs["COOL-SD"], runs["UniformRSD"])
    section.claim("at equal speed annealed relaxation is nearer to the target than uniform",
                  decided(-gap, half) if shared else None,
                  f"over tau {shared[0]:.2f} to {shared[1]:.2f} its kernel distance differs by {gap:+.2g} +- {half:.2g}"
                  if shared else "the curves have no tau in common")


@item("cool-figure-4", "COOL-SD, Figure 4: LANTERN++ with the optimal residual",
      lambda scope: [plain(scope), *sweeps(scope)])
def cool_figure_4(report: Report, section: Section) -> None:
    pairs = [[Run.of(f"lantern++:delta={ratio:g}{tail}") for tail in ("", ":residual=optimal")]
             for ratio in report.scope.ratio]
    runs = sum(pairs, [])
    section.figure(curves(report, runs), "LANTERN++ with its own and with COOL-SD's residual, over lambda, k = 10")
    section.table([report.row(run) for run in runs])
    report.noise(section, runs)
    gap, half = report.compared(lambda d: float(np.mean([d(b) - d(a) for a, b in pairs])), runs)
    section.claim("the optimal residual brings LANTERN++ nearer to the target", decided(-gap, half),
                  f"its kernel distance differs by {gap:+.2g} +- {half:.2g} on average over lambda")


def strip_works(scope: Scope) -> Works:
    for text in ("cool-sd:omega=", "uniform-rsd:omega="):
        for omega in (1.0, *scope.omega):
            yield Latency(parse_method(f"{text}{omega:g}"))
    for delta in (0.0, *scope.delta):
        yield Latency(parse_method(lantern(100, delta)))


@item("cool-figure-2", "COOL-SD, Figure 2: the same pictures over delta, with their latency", strip_works)
def cool_figure_2(report: Report, section: Section) -> None:
    study, works = report.study, list(strip_works(report.scope))
    families = {"COOL-SD": [w for w in works if w.method.name == "cool-sd"],
                "LANTERN, k 100": [w for w in works if w.method.name == "lantern"]}
    for name, those in families.items():
        count = min(4, study.whole(those[0]).count)
        figure, all_axes = axes(count, len(those), 1.15, 1.4)
        for column, work in enumerate(those):
            seconds = study.seconds(work)
            value = work.method.omega if work.method.name == "cool-sd" else work.method.delta
            mean, spread = np.mean(seconds.method), np.std(seconds.method)
            images = study.pipeline.pictures(torch.tensor(seconds.tokens[:count]))
            for line, image in enumerate(images):
                head = f"delta {value:g}\n{mean:.2f} +- {spread:.2f} s\n\n" if line == 0 else ""
                show(all_axes[line, column], image, f"{head}{seconds.method[line]:.2f} s, tau {seconds.tau[line]:.2f}")
        section.figure(figure, f"{name}: each row is a prompt and a seed, each column a delta; the pictures are those "
                               "that were timed, alone", "-" + ("cool-sd" if name == "COOL-SD" else "lantern"))
    section.table([latency_row(study, work) for work in works])
    section.text("COOL-SD's delta is our `omega`. What delta does to tau, by more pictures: `cool-figure-3`.")


@item("latency", "Latency of single pictures, every method",
      lambda scope: [Latency(m) for m in METHODS.values() if m.drafting != "none"])
def latency(report: Report, section: Section) -> None:
    study = report.study
    works = [Latency(m) for m in METHODS.values() if m.drafting != "none"]
    rows = [latency_row(study, work) for work in works]
    section.text("Batch 1, temperature 1. Each picture was timed right after plain decoding's of the same prompt and "
                 "seed; the speed-up is the median of these ratios, least and most their range.")
    section.table(rows)
    figure, ((axis,),) = axes(1, 1, 6, 3.4)
    names = [row["method"] for row in rows]
    middle = np.array([row["speed-up"] for row in rows])
    spread = np.array([[row["speed-up"] - row["least"], row["most"] - row["speed-up"]] for row in rows]).T
    axis.barh(names, middle, xerr=spread, color="tab:blue", ecolor="gray")
    axis.axvline(1, color="black", lw=1)
    axis.invert_yaxis()
    axis.set(xlabel="speed-up over plain decoding, single pictures")
    section.figure(figure, "Median and range of the speed-up in seconds, batch 1")
    fastest = max(rows, key=lambda row: row["speed-up"])
    section.claim("speculative decoding is faster than plain decoding (on GPUs)",
                  True if max(row["least"] for row in rows) > 1 else
                  False if max(row["most"] for row in rows) < 1 else None,
                  f"on {study.machine} the fastest is {fastest['method']} at {fastest['speed-up']:.2f} times "
                  f"({fastest['least']:.2f} to {fastest['most']:.2f})")
