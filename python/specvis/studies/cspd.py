"""CSpD's tables and figures (arXiv:2411.11925), and what users ask beside them, on a MAR pair.

Of the paper's own tables only the speed-ups of Table 1 were at hand, with its range of alpha and its c.
"""
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from ..pipelines.mar import MARPair
from ..decoding.methods import parse_method
from . import papers
from .continuous_base import ENOUGH, ContinuousStudy, Draws, Run, Speed, Work, binomial, share
from .distances import DISTANCES, SURE, Compared, compare, joint
from .items import Item, decided, items_of
from .page import Section, axes, show
from .quality import kernel_distance
from .write import judged, links, write_items

FAMILIES = ("cspd-released", "cspd", "cspd-path")
SPLITS = 200  # of plain decoding's pictures, from which the noise of a distance is taken
T_QUANTILE = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # of Student's t, 97.5 %, by the number of batches timed
WINDOWS = 16  # of the order
AHEAD = 4     # tokens drawn jointly


@dataclass(frozen=True)
class Scope:
    """How much is run: numbers of pictures, and the values of the sweeps."""

    images: int                     # of each run, decoded as one batch
    few: int                        # of a run whose target judges each draft given those before it: that costs more
    plain: int                      # batches of plain decoding that pictures are compared with
    parallel: int                   # batches of each parallel decoding
    gammas: dict[str, tuple[int, ...]]
    batches: tuple[int, ...]        # of images that are timed, for `more` tokens each
    more: int
    guidances: tuple[float, ...]
    temperatures: tuple[float, ...]
    known: tuple[float, ...]        # shares of known tokens of the states that are drawn from
    draws: int                      # of one token
    ahead: int                      # draws of AHEAD tokens; 0: none
    guidance: float = 2.5
    tokens: int = 256               # of a picture

    def run(self, text: str, guidance: float | None = None, temperature: float = 1.0, drafter: bool = False) -> Run:
        method = parse_method(text)
        count = self.few if method.gamma and method.conditioning == "exact" else self.images
        return Run(method, self.guidance if guidance is None else guidance, count, count, temperature, drafter)

    @property
    def plain_run(self) -> Run:
        """The pictures that others are compared with."""
        return replace(self.run("mar"), count=self.plain * self.images)

    @property
    def speculative(self) -> list[Run]:
        """Table 1's."""
        return [self.run(f"{name}:gamma={gamma}") for name in FAMILIES for gamma in self.gammas[name]]

    def middle(self, name: str) -> Run:
        """The run of a family that other items look at."""
        usual = parse_method(name).gamma
        return self.run(f"{name}:gamma={min(self.gammas[name], key=lambda gamma: abs(gamma - usual))}")

    @property
    def middles(self) -> list[Run]:
        return [self.middle(name) for name in FAMILIES]


FULL = Scope(4, 2, 5, 2, {"cspd-released": (1, 2, 4, 8, 16, 32), "cspd": (1, 2, 4), "cspd-path": (1, 2, 4)},
             (1, 8, 32), 8, (1.0, 4.0), (0.9, 1.05), (0.05, 0.25, 0.75), 4096, 128)
QUICK = Scope(2, 2, 4, 2, {"cspd-released": (2, 8, 32), "cspd": (4,), "cspd-path": (4,)},
              (1, 8), 8, (4.0,), (0.9,), (0.05, 0.5), 512, 0)
LEFT_OUT = ("table-2", "table-3", "table-4", "figure-13", "figure-14")

ITEMS: dict[str, Item] = {}
item = items_of(ITEMS)
Works = Iterator[Work]


@dataclass
class Report:
    """What an item looks at."""

    study: ContinuousStudy
    scope: Scope
    known: dict = field(default_factory=dict)  # what several items ask for

    def once(self, name: str, make):
        if name not in self.known:
            self.known[name] = make()
        return self.known[name]

    def speedup(self, run: Run) -> float:
        """Against plain decoding at the same batch size and guidance, in seconds a picture."""
        return self.study.pictures(run.plain).each / self.study.pictures(run).each

    def draft_share(self, run: Run) -> float:
        """c: the draft model's seconds of plain decoding over the target's, at the batch size of `run`."""
        return self.study.pictures(replace(run.plain, drafter=True)).each / self.study.pictures(run.plain).each

    def row(self, run: Run) -> dict:
        """The usual columns."""
        pictures, method = self.study.pictures(run), run.method
        alpha, half = pictures.alpha
        decoded = pictures.decoded
        return {"method": method.label, "guidance": f"{run.guidance:g}", "T": f"{run.temperature:g}",
                "pictures": run.count, "batch": run.batch, "judged tokens": int((decoded.kept >= 0).sum()),
                "alpha": alpha if method.gamma else "", "+-": half if method.gamma else "", "tau": pictures.tau,
                "target passes": decoded.forwards.float().mean().item(),
                "draft passes": decoded.draft_forwards.float().mean().item(),
                "seconds a picture": pictures.each, "speed-up": self.speedup(run)}

    def rows(self, section: Section, runs: list[Run]) -> None:
        """The table of these runs, with a remark on pictures that failed."""
        section.table([self.row(run) for run in runs])
        failed = sum(int(self.study.pictures(run).decoded.failed.sum()) for run in runs)
        if failed:
            section.text(f"{failed} pictures ended early: a model's output was not finite.")

    @property
    def timing(self) -> float:
        """Half a 95 % interval of the ratio of two timings, relative: from the seconds of plain decoding's batches."""
        seconds = [float(self.study.arrays(part)["seconds"]) for part in self.study.parts(self.scope.plain_run)]
        return T_QUANTILE[len(seconds)] * float(np.std(seconds, ddof=1) / np.mean(seconds)) * 2 ** 0.5

    def higher(self, a: Run, b: Run, behind: int = 0) -> tuple[bool | None, str]:
        """Is a's alpha above b's, of the tokens from number `behind`?"""
        kept = [self.study.pictures(run).decoded.kept[:, behind:] for run in (a, b)]
        (x, half_x), (y, half_y) = (share(part == 1, part >= 0) for part in kept)
        half = float(np.hypot(half_x, half_y))
        return decided(x - y, half), f"{a.method.label}: alpha {x:.3f} against {y:.3f}, {x - y:+.3f} +- {half:.3f}"


def plains(runs: list[Run]) -> Works:
    """Plain decoding that their seconds are compared with."""
    yield from dict.fromkeys(run.plain for run in runs)


def eq_35(alpha: float, gamma: int, c: float) -> float:
    """The paper's speed-up: tokens that a step of Algorithm 1 yields over its cost in target passes."""
    tokens = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return tokens / (gamma * c + 1)


def kept_speedup(tokens: int, passes: float, draft_passes: float, c: float) -> float:
    """Where every drafted token is kept or replaced by itself: tokens over the passes that they took."""
    return tokens / (passes + draft_passes * c)


# --- the paper's -------------------------------------------------------------------------------------------------

def table_1_works(scope: Scope) -> Works:
    runs = scope.speculative
    yield scope.plain_run
    yield from plains(runs)
    yield from (replace(run, drafter=True) for run in plains(runs))
    yield from runs


def table_1_rows(report: Report) -> list[dict]:
    rows = []
    for run in report.scope.speculative:
        row, c, gamma = report.row(run), report.draft_share(run), run.method.gamma
        by_passes = kept_speedup(report.study.tokens, row["target passes"], row["draft passes"], c)
        rows.append({"family": run.method.name, "gamma": gamma} | row | {
            "c": c, "eq. 35": eq_35(row["alpha"], gamma, c), "by passes": by_passes,
            "the paper's speed-up": papers.CSPD_TABLE_1.get(gamma, "") if not run.method.truncate else ""})
    return rows


@item("table-1", "CSpD, Table 1: acceptance and speed-up over gamma", table_1_works)
def table_1(report: Report, section: Section) -> None:
    rows = report.once("table-1", lambda: table_1_rows(report))
    section.text(
        "alpha is the share of judged drafts that were kept, tau tokens per target pass, speed-up in seconds against "
        "plain decoding (a token a pass) of as many pictures in one batch; +- is a binomial 95 % interval over the "
        "tokens of these pictures, others may differ by more; c is the draft model's time of a token over "
        "the target's, at that batch size.",
        "`eq. 35` is the paper's (1 - alpha^(gamma + 1)) / ((1 - alpha) (gamma c + 1)). It is for Algorithm 1, which "
        "drops what follows a rejection. `by passes` is L / (target passes + draft passes c), counted: it holds for "
        "any method, and is the only one for `cspd-released`, which keeps a step's tokens whatever was rejected, so "
        "that its passes do not depend on alpha. Neither counts that to judge gamma drafts exactly takes gamma + 1 "
        "variants of the image a pass, nor the denoising of redrawn tokens.",
        "The paper's speed-ups (MAR-H with MAR-B, batch 256) were at hand for gamma 4 to 32, with alpha from 0.19 to "
        "0.30 and c = 0.38 (of batch 128); none of its other numbers. With these eq. 35 gives 0.09 to 0.57, the count "
        "of passes 1.54 to 2.26 if 5 % are pre-filled (for this table it is not stated): the published 1.62 to 2.33 "
        "are near the second, so they seem to be of decoding without truncation, with which they stand in one row.")
    section.table(rows)
    figure, (three,) = axes(1, 3, 4, 3.2)
    for name in FAMILIES:
        those = [row for row in rows if row["family"] == name]
        gamma = [row["gamma"] for row in those]
        three[0].errorbar(gamma, [row["alpha"] for row in those], [row["+-"] for row in those], marker="o", label=name)
        three[1].plot(gamma, [row["tau"] for row in those], "o-", label=name)
        line, = three[2].plot(gamma, [row["speed-up"] for row in those], "o-", label=f"{name}, seconds")
        three[2].plot(gamma, [row["by passes"] for row in those], "--", color=line.get_color(), label="by passes")
    three[2].plot(*zip(*((gamma, float(value)) for gamma, value in papers.CSPD_TABLE_1.items())), "k*",
                  label="the paper")
    three[2].axhline(1, color="gray", lw=1)
    gammas = sorted({row["gamma"] for row in rows} | set(papers.CSPD_TABLE_1))
    for axis, what in zip(three, ("alpha", "tau: tokens per target pass", "speed-up")):
        over_gamma(axis, what, gammas)
    section.figure(figure, "Acceptance, tokens per target pass and speed-up over gamma")
    released = [row for row in rows if row["family"] == "cspd-released"]
    gains = [row["speed-up"] for row in released]
    half = report.timing
    section.claim("a larger gamma is faster (2.33 times at gamma 32)",
                  decided(float(np.log(gains[-1] / gains[0])), half),
                  f"cspd-released from {gains[0]:.2f} to {gains[-1]:.2f} times in seconds, "
                  f"from {released[0]['by passes']:.2f} to {released[-1]['by passes']:.2f} by passes; a ratio of "
                  f"timings is good to {half:.0%}")
    near = sum(abs(row["by passes"] - row["speed-up"]) < abs(row["eq. 35"] - row["speed-up"]) for row in released)
    section.claim("its speed-up follows eq. 35", near * 2 < len(released),
                  f"the count of passes is nearer to cspd-released's seconds in {near} of {len(released)} runs")


def table_2_runs(scope: Scope) -> list[Run]:
    return [replace(run, guidance=guidance) for run in scope.middles
            for guidance in dict.fromkeys((1.0, scope.guidance))]


@item("table-2", "CSpD, Table 2: with and without guidance",
      lambda scope: [*plains(table_2_runs(scope)), *table_2_runs(scope)])
def table_2(report: Report, section: Section) -> None:
    section.text("Guidance 1 is none. With guidance a model pass is over two rows a picture; log sigma, which the "
                 "density ratios weigh, is that of the conditional row alone.")
    report.rows(section, table_2_runs(report.scope))


def table_3_pairs(scope: Scope) -> list[tuple[Run, Run]]:
    """Aligned and not."""
    runs = [run for run in scope.middles if run.method.variant != "path"]
    return [(run, replace(run, method=replace(run.method, aligned=False))) for run in runs]


@item("table-3", "CSpD, Table 3: with and without trajectory alignment",
      lambda scope: [*plains([a for a, _ in table_3_pairs(scope)]), *sum(table_3_pairs(scope), ())])
def table_3(report: Report, section: Section) -> None:
    section.text("Not aligned: the target denoises noise of its own. `cspd-path` has the draft's noise only.")
    report.rows(section, list(sum(table_3_pairs(report.scope), ())))
    for pair in table_3_pairs(report.scope):
        section.claim("trajectory alignment raises acceptance", *report.higher(*pair))


def table_4_runs(scope: Scope) -> list[list[Run]]:
    """A list for each method, over the prefill."""
    return [[replace(run, method=replace(run.method, prefill=prefill)) for prefill in (0.0, 0.05, 0.15)]
            for run in map(scope.middle, ("cspd-released", "cspd"))]


@item("table-4", "CSpD, Table 4: pre-filling",
      lambda scope: [*plains(sum(table_4_runs(scope), [])), *sum(table_4_runs(scope), [])])
def table_4(report: Report, section: Section) -> None:
    section.text("The share of tokens that the target draws alone, first. alpha is of the tokens that were judged, "
                 "those behind it; the trend is of the tokens behind the largest share in all rows.")
    report.rows(section, sum(table_4_runs(report.scope), []))
    for runs in table_4_runs(report.scope):
        behind = round(runs[-1].method.prefill * report.study.tokens)
        section.claim("pre-filling raises acceptance", *report.higher(runs[-1], runs[0], behind))


def timed(scope: Scope) -> dict[int, list[Speed]]:
    """Plain decoding and the families at each batch size, in the middle of the order."""
    methods = [parse_method("mar"), *(run.method for run in (scope.middle(name) for name in FAMILIES[:2]))]
    return {batch: [Speed(method, scope.run("mar"), batch, scope.tokens // 4, scope.more) for method in methods]
            for batch in scope.batches}


@item("batch", "Batch size", lambda scope: [scope.plain_run, *sum(timed(scope).values(), [])])
def batch(report: Report, section: Section) -> None:
    study, scope = report.study, report.scope
    section.text(f"What was timed: {scope.more} tokens behind the first {scope.tokens // 4} of begun images (those of "
                 "plain decoding, over and over), after two tokens that warm up, again and again until "
                 f"{ENOUGH:g} seconds are timed. Seconds are a token of one image, the median.")
    rows = []
    for size, works in timed(scope).items():
        plain = study.speed(works[0])
        rows += [{"method": work.method.label, "batch": size, "tokens timed": size * work.more,
                  "seconds a token": study.speed(work), "speed-up": plain / study.speed(work)} for work in works]
    section.table(rows)
    figure, ((axis,),) = axes(1, 1, 4.4, 3.2)
    for label in dict.fromkeys(row["method"] for row in rows):
        axis.plot(*zip(*((row["batch"], row["seconds a token"]) for row in rows if row["method"] == label)), "o-",
                  label=label)
    axis.set_xscale("log", base=2)
    axis.set_xticks(scope.batches, [str(size) for size in scope.batches])
    axis.set(xlabel="batch", ylabel="seconds a token of one image", yscale="log")
    axis.legend(fontsize=7)
    section.figure(figure, "Seconds a token over the batch size")
    gains = {row["batch"]: row["speed-up"] for row in rows if row["method"].startswith("cspd-released")}
    section.claim("larger batches gain more (the paper's are of 128 and 256)",
                  decided(float(np.log(gains[max(gains)] / gains[min(gains)])), report.timing),
                  f"cspd-released {gains[min(gains)]:.2f} times at batch {min(gains)}, {gains[max(gains)]:.2f} at "
                  f"{max(gains)}; a ratio of timings is good to {report.timing:.0%}")


@item("figure-9", "CSpD, Figure 9: drafts and what was made of them",
      lambda scope: [scope.run("mar"), scope.run("mar", drafter=True), *scope.middles])
def figure_9(report: Report, section: Section) -> None:
    study, scope = report.study, report.scope
    columns = {"target alone": study.pictures(scope.run("mar")).decoded.tokens,
               "draft model alone": study.pictures(scope.run("mar", drafter=True)).decoded.tokens}
    for run in scope.middles:
        decoded = study.pictures(run).decoded
        columns[f"{run.method.label}, drafts"] = torch.where(decoded.drafts.isnan(), decoded.tokens, decoded.drafts)
        columns[f"{run.method.label}, verified"] = decoded.tokens
    count = min(len(tokens) for tokens in columns.values())
    section.figure(gallery(study, {name: tokens[:count] for name, tokens in columns.items()}),
                   "Each row is a prompt and a seed. Drafts: those that were judged, the picture's own tokens "
                   "elsewhere")
    section.text("Prompts: " + "; ".join(study.prompts[i % len(study.prompts)] for i in range(count)) + ".")


def gallery(study: ContinuousStudy, columns: dict[str, torch.Tensor]):
    """A figure with a column of pictures for each name's tokens (n, L, C)."""
    figure, grid = axes(max(map(len, columns.values())), len(columns), 1.3, 1.4)
    for line, (name, tokens) in zip(grid.T, columns.items()):
        for axis in line:
            axis.axis("off")
        for axis, image in zip(line, study.images(tokens)):
            axis.axis("on")
            show(axis, image)
        line[0].set_title(name.replace(", ", "\n").replace(":", "\n"), fontsize=6)
    return figure


def over_gamma(axis, what: str, gammas: list[int]) -> None:
    """A plot over gamma, on a logarithmic scale."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(gammas, [str(gamma) for gamma in gammas])
    axis.set(xlabel="gamma", ylabel=what)
    axis.legend(fontsize=6)


@item("figure-11", "CSpD, Figure 11: acceptance along the order", lambda scope: scope.middles)
def figure_11(report: Report, section: Section) -> None:
    rows, (figure, ((axis,),)) = [], axes(1, 1, 5, 3.2)
    width = max(1, report.study.tokens // WINDOWS)
    for run in report.scope.middles:
        kept = report.study.pictures(run).decoded.kept.split(width, 1)
        points = [((part == 1).sum().item(), (part >= 0).sum().item()) for part in kept]
        own = [{"method": run.method.label, "from token": i * width, "kept": some, "judged": every,
                "alpha": some / every, "+-": binomial(some, every)}
               for i, (some, every) in enumerate(points) if every]
        axis.errorbar([row["from token"] + width / 2 for row in own], [row["alpha"] for row in own],
                      [row["+-"] for row in own], marker="o", ms=3, lw=1, capsize=2, label=run.method.label)
        rows += own
    axis.set(xlabel="tokens known", ylabel="alpha")
    axis.legend(fontsize=7)
    section.figure(figure, f"Share of drafts kept, over windows of {width} tokens of the order; bars are binomial 95 % "
                           "intervals")
    section.table(rows)


def block(scope: Scope, guidance: float | None = None, temperature: float = 1.0) -> list[Run]:
    """The three variants of the ratio where judging is cheap: given the step's start, nothing truncated."""
    cheap = ":gamma=8:conditioning=block:truncate=false"
    runs = [scope.run(text, guidance, temperature) for text in ("cspd-released", f"cspd{cheap}", f"cspd-path{cheap}")]
    return [replace(run, count=scope.few, batch=scope.few) for run in runs]


def sweep(scope: Scope, name: str) -> dict[float, list[Run]]:
    """Runs over a setting, the usual one among them."""
    values = {"guidance": (*scope.guidances, scope.guidance), "temperature": (*scope.temperatures, 1.0)}[name]
    return {value: block(scope, **{name: value}) for value in sorted(set(values))}


def over(report: Report, section: Section, name: str) -> None:
    """alpha over a setting."""
    runs = sweep(report.scope, name)
    figure, ((axis,),) = axes(1, 1, 5, 3.2)
    rows = []
    for those in zip(*runs.values()):
        alphas = [report.study.pictures(run).alpha for run in those]
        axis.errorbar(list(runs), *zip(*alphas), marker="o", capsize=2, label=those[0].method.label)
        rows += [{"method": run.method.label, "guidance": f"{run.guidance:g}", "T": f"{run.temperature:g}",
                  "pictures": run.count, "alpha": alpha, "+-": half} for run, (alpha, half) in zip(those, alphas)]
    axis.set(xlabel=name, ylabel="alpha")
    axis.legend(fontsize=6)
    section.text("With block conditioning and nothing truncated, which costs least: alpha is what is asked. Judged "
                 "given the drafts before it, a draft is accepted at another rate (`table-1`).")
    section.figure(figure, f"Share of drafts kept over the {name}, with 95 % intervals")
    section.table(rows)


@item("figure-13", "CSpD, Figure 13: acceptance over the guidance",
      lambda scope: sum(sweep(scope, "guidance").values(), []))
def figure_13(report: Report, section: Section) -> None:
    over(report, section, "guidance")


@item("figure-14", "CSpD, Figure 14: acceptance over the temperature",
      lambda scope: sum(sweep(scope, "temperature").values(), []))
def figure_14(report: Report, section: Section) -> None:
    over(report, section, "temperature")


@item("figure-15", "CSpD, Figure 15: tries of a redraw", lambda scope: scope.speculative)
def figure_15(report: Report, section: Section) -> None:
    rows, (figure, ((axis,),)) = [], axes(1, 1, 5, 3.2)
    for name in FAMILIES:
        own = []
        for run in report.scope.speculative:
            pictures = report.study.pictures(run)
            if run.method.name == name and len(pictures.tries):
                out = pictures.decoded.out_of_tries[pictures.decoded.kept == 0]
                own.append({"method": run.method.label, "gamma": run.method.gamma, "redraws": len(out),
                            "mean tries": pictures.tries.float().mean().item(),
                            "median": pictures.tries.float().median().item(),
                            "out of tries": out.float().mean().item(), "bound": run.method.tries})
        if own:
            axis.plot(*zip(*((row["gamma"], row["mean tries"]) for row in own)), "o-", label=name)
        rows += own
    if not rows:
        section.text("No draft was rejected.")
        return
    over_gamma(axis, "mean tries of a redraw", sorted({row["gamma"] for row in rows}))
    section.text("Out of tries: the share of redraws that reached the bound; the token is then the target's own sample "
                 "(in the release, zero).")
    section.figure(figure, "Mean tries of a redraw over gamma")
    section.table(rows)


@item("figure-16", "CSpD, Figure 16: acceptance over the picture", lambda scope: scope.speculative)
def figure_16(report: Report, section: Section) -> None:
    side = round(report.study.tokens ** 0.5)
    figure, (line,) = axes(1, len(FAMILIES), 3.6, 3.2)
    rows = []
    for axis, name in zip(line, FAMILIES):
        runs = [run for run in report.scope.speculative if run.method.name == name]
        decoded = [report.study.pictures(run).decoded for run in runs]
        kept = torch.cat([torch.zeros_like(d.kept).scatter(1, d.order, d.kept) for d in decoded])  # by place
        judged = (kept >= 0).sum(0)
        alpha = ((kept == 1).sum(0) / judged).view(side, side).numpy()
        image = axis.imshow(alpha, vmin=0, vmax=1, cmap="viridis")
        axis.set(xticks=[], yticks=[], title=f"{name}, {len(kept)} decodings")
        rows += [{"method": name, "row": place // side, "column": place % side, "judged": count, "alpha": value}
                 for place, (count, value) in enumerate(zip(judged.tolist(), alpha.flat)) if count]
    figure.colorbar(image, ax=line, label="alpha")
    section.text("All gamma of `table-1` together: the same pictures over and over, so that prompts weigh in it.")
    section.figure(figure, "Share of drafts kept at each place of the picture")
    save_rows(section, rows)


def save_rows(section: Section, rows: list[dict]) -> None:
    """As CSV only: it is long."""
    section.table(rows)
    section.parts[-1] = section.parts[-1].rpartition("\n\n")[2]


# --- fidelity ----------------------------------------------------------------------------------------------------

ONE = {"cspd": "cspd:gamma=1:prefill=0", "cspd, distances / 42": "cspd:gamma=1:prefill=0:distance_temperature=42",
       "cspd, not aligned": "cspd:gamma=1:prefill=0:aligned=false",
       "cspd-released": "cspd-released:gamma=1:prefill=0", "cspd-path": "cspd-path:gamma=1:prefill=0"}
SEVERAL = {name: f"{text}:gamma={AHEAD}:prefill=0" for name, text in {
    "cspd": "cspd", "cspd, nothing truncated": "cspd:truncate=false",
    "cspd, block, nothing truncated": "cspd:truncate=false:conditioning=block", "cspd-released": "cspd-released",
    "cspd-path": "cspd-path", "cspd-path, nothing truncated": "cspd-path:truncate=false"}.items()}
SEVERAL |= {"parallel, 2 passes": "mar:passes=2", "parallel, 1 pass": "mar:passes=1"}


def sets(scope: Scope, known: int, more: int, count: int, picture: int = 0) -> dict[str, Draws]:
    """Draws from one state by the target, twice, by the draft model, and by each method."""
    plain = Draws(parse_method("mar"), scope.run("mar"), known, more, count, picture)
    methods = ONE if more == 1 else SEVERAL
    return {"target": plain, "target again": replace(plain, again=1), "draft model alone": replace(plain, drafter=True),
            **{name: replace(plain, method=parse_method(text)) for name, text in methods.items()}}


def one_token(scope: Scope) -> list[dict[str, Draws]]:
    return [sets(scope, max(1, round(share * scope.tokens)), 1, scope.draws, i % scope.images)
            for i, share in enumerate(scope.known)]


def several(scope: Scope) -> list[dict[str, Draws]]:
    return [sets(scope, scope.tokens // 4, AHEAD, scope.ahead)] if scope.ahead else []


def fidelity_rows(study: ContinuousStudy, states: list[dict[str, Draws]]) -> list[dict]:
    """A row for each method: its distances over all states, beside what chance makes of them."""
    compared, alphas, passes = [], {}, {}
    for state in states:
        samples = {}
        for name, work in state.items():
            samples[name], alpha, forwards = study.draws(work)
            alphas.setdefault(name, []).append(alpha)
            passes.setdefault(name, []).append(forwards)
        spread = samples["target"].var(0).mean().sqrt()  # the unit, so that each state counts as much
        samples = {name: x / spread for name, x in samples.items()}
        compared.append(compare({name: x for name, x in samples.items() if name != "target"}, samples["target"],
                                samples["target again"]))
    rows, drafts = [], [state["draft model alone"] for state in compared]
    told = {distance: joint([state[distance] for state in drafts]) > SURE for distance in DISTANCES}
    for name in compared[0]:
        alpha, half = np.array(alphas[name]).T
        row = {"method": name, "states": len(states), "draws": len(states) * next(iter(states[0].values())).count,
               "target passes a draw": float(np.mean(passes[name])),
               "alpha": "" if np.isnan(alpha).any() else float(alpha.mean()),
               "+-": "" if np.isnan(half).any() else float(np.linalg.norm(half) / len(half))}
        for distance in DISTANCES:
            parts, those = [state[name][distance] for state in compared], [state[distance] for state in drafts]
            row |= {distance: float(np.mean([part.value for part in parts])),
                    f"{distance}, by chance": float(np.mean([part.floor for part in parts])),
                    f"{distance}, deviations": joint(parts),
                    f"{distance}, share of draft": excess(parts) / excess(those) if told[distance] else ""}
        rows.append(row | {"verdict": "differs" if differs(row) else "no difference found"})
    return rows


def excess(parts: list[Compared]) -> float:
    """Distance above chance, of several states together."""
    return sum(part.value - part.floor for part in parts)


def differs(row: dict) -> bool:
    return not all(row[f"{distance}, deviations"] <= SURE for distance in DISTANCES)  # a distance may be NaN


def fidelity_figure(study: ContinuousStudy, rows: list[dict], state: dict[str, Draws]):
    """How far each method is from the target, and the samples of one state along the way from target to draft."""
    figure, ((left, right),) = axes(1, 2, 5, 3.4)
    names = [row["method"] for row in rows]
    left.barh(names, [max(0.1, row["energy distance, deviations"]) for row in rows],
              color=["tab:red" if differs(row) else "tab:green" for row in rows])
    left.axvline(SURE, color="black", lw=1)
    left.set(xscale="log", xlabel="energy distance, standard deviations of chance")
    left.invert_yaxis()
    left.tick_params(labelsize=6)
    samples = {name: study.draws(work)[0].double() for name, work in state.items() if name != "target again"}
    way = samples["draft model alone"].mean(0) - samples["target"].mean(0)
    way = way / way.norm().clamp(min=1e-12)
    bins = np.histogram_bin_edges(np.concatenate([(x @ way).numpy() for x in samples.values()]), 40)
    for name, x in samples.items():
        right.hist((x @ way).numpy(), bins, histtype="step", density=True, label=name,
                   lw=2 if name == "target" else 1, color="black" if name == "target" else None)
    right.set(xlabel="along the line from the target's mean to the draft's", ylabel="density")
    right.legend(fontsize=5)
    return figure


def distribution_works(scope: Scope) -> Works:
    yield scope.run("mar")
    for state in one_token(scope) + several(scope):
        yield from state.values()


@item("distribution", "Is the target's distribution kept?", distribution_works)
def distribution(report: Report, section: Section) -> None:
    study, scope = report.study, report.scope
    states = one_token(scope)
    rows = report.once("distribution", lambda: fidelity_rows(study, states))
    counts = ", ".join(str(state["target"].known) for state in states)
    section.text(f"The next token, drawn {scope.draws} times from each of {len(states)} states (the first {counts} "
                 "tokens of pictures of plain decoding known), each set with seeds of its own, by the decoding loop "
                 "itself. Distances are to a set of the target's, in units of its spread; chance is what they are "
                 "between halves of two sets of the target's. A method differs if either distance is more than "
                 f"{SURE:g} standard deviations above chance; `share of draft` is 0 for the target and 1 for the draft "
                 "model alone, and blank where not even that differs. To keep one token's distribution is necessary, "
                 "not sufficient.")
    section.table(rows)
    section.figure(fidelity_figure(study, rows, states[0]), "Distance from the target's distribution (line: where a "
                   "difference is believed), and samples of the first state")
    section.text(f"Of the next token: {fidelity(rows)}")
    gaps = [{"tokens known": state["target"].known, "paths": 256, "rms gap": gap, "rms spread of the token": spread}
            for state in states for gap, spread in [study.last_steps(state["target"])]]
    section.text("`cspd-path` with gamma above 1 judges later drafts given the draft's last denoising step of the "
                 "earlier ones, and keeps the target's. How far these are apart, from the same x_1 of the draft's:")
    section.table(gaps, "-last-step")
    for state in several(scope):
        more = report.once("several", lambda: fidelity_rows(study, [state]))
        section.text(f"The next {AHEAD} tokens jointly, {scope.ahead} draws from one state ({state['target'].known} "
                     "known), with MAR's own parallel decoding beside:")
        section.table(more, "-several")
        section.figure(fidelity_figure(study, more, state), f"The same of {AHEAD} tokens jointly", "-several")
        section.text(f"Of {AHEAD} tokens jointly: {fidelity(more)}")
    row_of = {row["method"]: row for row in rows}
    draft = row_of["draft model alone"]
    for name in ("cspd", "cspd-released"):
        row = row_of[name]
        # the energy distance of a mixture falls with the square of what it takes from the draft
        tested = row["alpha"] != "" and row["alpha"] ** 2 * draft["energy distance, deviations"] > SURE
        section.claim("the output distribution is kept (its abstract)",
                      False if differs(row) else True if tested else None,
                      f"{name}: alpha {row['alpha'] if row['alpha'] == '' else format(row['alpha'], '.3f')}, "
                      f"{deviations(row)}; the draft model alone: {deviations(draft)}")


def deviations(row: dict) -> str:
    energy, sliced = (row[f"{distance}, deviations"] for distance in DISTANCES)
    return f"energy distance {energy:+.1f}, sliced Wasserstein {sliced:+.1f} standard deviations of chance"


# --- against parallel decoding -----------------------------------------------------------------------------------

def parallel_runs(scope: Scope) -> list[Run]:
    return [replace(scope.run(f"mar:passes={scope.tokens // d}"), count=scope.parallel * scope.images)
            for d in (16, 8, 4, 2)]


def kernel_noise(report: Report, run: Run) -> Compared:
    """The kernel distance of a run's first pictures to plain decoding's of other prompts, beside that of plain
    decoding's own first ones: the same prompts and seeds. Its noise is that of random splits of the plain ones."""
    seen, plain = report.study.seen(run), report.study.seen(report.scope.plain_run)
    rng, own = np.random.default_rng(0), []
    count = min(len(seen), len(plain) // 2)
    for _ in range(SPLITS):
        order = rng.permutation(len(plain))
        own.append(kernel_distance(plain[order[:count]], plain[order[count:]]))
    return Compared(kernel_distance(seen[:count], plain[count:]), kernel_distance(plain[:count], plain[count:]),
                    float(np.std(own, ddof=1)))


def parallel_rows(report: Report) -> list[dict]:
    runs = [*parallel_runs(report.scope), *report.scope.speculative]
    rows = []
    for run in runs:
        distance, usual = kernel_noise(report, run), report.row(run)
        rows.append({"method": run.method.label, "speculative": "yes" if run.method.gamma else "no"}
                    | {name: usual[name] for name in ("pictures", "batch", "tau", "target passes",
                                                      "seconds a picture", "speed-up")}
                    | {"kernel distance": distance.value, "plain": distance.floor, "+-": 2 * distance.spread,
                       "deviations": distance.deviations})
    return rows


@item("parallel", "Speculative against MAR's own parallel decoding", lambda scope: [
    scope.plain_run, *plains(scope.speculative), *parallel_runs(scope), *scope.speculative])
def parallel(report: Report, section: Section) -> None:
    study, scope = report.study, report.scope
    rows = report.once("parallel", lambda: parallel_rows(report))
    section.text("MAR draws several tokens a pass by itself, independently given the known ones (`mar:passes=...`). "
                 "Kernel distance (features of an ImageNet network) is to plain decoding's pictures of other prompts, "
                 f"of {scope.plain_run.count} in all; `plain` is that of plain decoding's own pictures of the same "
                 "prompts and seeds, `+-` twice the standard deviation over random splits of the plain ones. With so "
                 "few pictures only large differences show: `distribution` has what sets of tokens tell. Speed-ups "
                 "are against plain decoding at the run's own batch size.")
    section.table(rows)
    figure, ((axis,),) = axes(1, 1, 6, 4)
    for which, marker in (("no", "s"), ("yes", "o")):
        those = [row for row in rows if row["speculative"] == which]
        axis.errorbar([row["speed-up"] for row in those], [row["kernel distance"] - row["plain"] for row in those],
                      [row["+-"] for row in those], fmt=marker, ms=5, lw=0.5, capsize=2,
                      label="speculative" if which == "yes" else "parallel")
        for row in those:
            axis.annotate(row["method"], (row["speed-up"], row["kernel distance"] - row["plain"]), fontsize=5,
                          xytext=(3, 3), textcoords="offset points")
    axis.axhline(0, color="gray", lw=1, label="plain decoding")
    axis.set(xlabel="speed-up over plain decoding at the same batch size, seconds",
             ylabel="kernel distance above plain decoding's own", xscale="log")
    axis.legend(fontsize=7)
    section.figure(figure, "Speed against the distance from plain decoding's pictures; bars are two standard "
                           "deviations of chance")
    count = scope.few
    runs = [scope.run("mar"), *parallel_runs(scope)[::-1], *scope.middles]
    section.figure(gallery(study, {run.method.label: study.pictures(run).decoded.tokens[:count] for run in runs}),
                   "The same prompts and seeds", "-pictures")
    section.text(against_parallel(rows))
    faster = [speculative for speculative in rows if speculative["speculative"] == "yes" and any(
        other["target passes"] >= speculative["target passes"] and other["speed-up"] > speculative["speed-up"]
        for other in rows if other["speculative"] == "no")]
    asked = [row for row in rows if row["speculative"] == "yes"
             and row["target passes"] <= max(other["target passes"] for other in rows if other["speculative"] == "no")]
    section.claim("parallel decoding in as many target passes is faster (the author, in the repository's issue 1)",
                  len(faster) == len(asked) if asked else None,
                  f"parallel decoding in as many passes or more is faster than {len(faster)} of the {len(asked)} "
                  "speculative runs that need no more passes than it was run with")


# --- the summary, from rows alone --------------------------------------------------------------------------------

def fidelity(rows: list[dict]) -> str:
    """Which methods keep the target's distribution."""
    def named(those):
        return "; ".join(f"{row['method']} ({'; '.join(about(row))})" for row in those) or "none"

    def about(row):
        if row["alpha"] != "":
            yield f"alpha {row['alpha']:.3f}"
        yield ", ".join(f"{row[f'{distance}, deviations']:+.1f}" for distance in DISTANCES)

    methods = [row for row in rows if row["method"] not in ("target again", "draft model alone")]
    same, other = ([row for row in methods if differs(row) is which] for which in (False, True))
    draft = next(row for row in rows if row["method"] == "draft model alone")
    power = "" if differs(draft) else (" The draft model alone cannot be told from the target either: these draws are "
                                       "too few to decide anything.")
    return (f"no difference from the target is found in {rows[0]['draws']} draws for: {named(same)}. The distribution "
            f"is changed by: {named(other)}. (In brackets the {' and the '.join(DISTANCES)} above chance, in "
            f"standard deviations of chance.){power}")


def speed(rows: list[dict]) -> str:
    """The best of each family in passes and in seconds."""
    said = []
    for name in dict.fromkeys(row["family"] for row in rows):
        those = [row for row in rows if row["family"] == name]
        tau, fast = (max(those, key=lambda row: row[column]) for column in ("tau", "speed-up"))
        said.append(f"{name} {tau['tau']:.2f} tokens a target pass (gamma {tau['gamma']}), {fast['speed-up']:.2f} "
                    f"times plain decoding's speed in seconds (gamma {fast['gamma']}, batch {fast['batch']})")
    best = max(rows, key=lambda row: row["speed-up"])
    verdict = (f"The fastest in seconds is {best['method']}" if best["speed-up"] > 1
               else "None is faster than plain decoding in seconds")
    return f"At best: {'; '.join(said)}. {verdict}."


def against_parallel(rows: list[dict]) -> str:
    """Which speculative runs lose: a parallel one is as fast, and by its pictures not shown to be further from plain
    decoding."""
    speculative, others = ([row for row in rows if row["speculative"] == which] for which in ("yes", "no"))

    def above(row):
        return row["kernel distance"] - row["plain"]

    def beaten(row):
        return any(other["speed-up"] >= row["speed-up"]
                   and above(other) <= above(row) + float(np.hypot(row["+-"], other["+-"])) for other in others)
    left = [row["method"] for row in speculative if not beaten(row)]
    best = max(speculative, key=lambda row: row["speed-up"])
    same = [row for row in others if above(row) <= row["+-"]]
    text = (f"For {len(speculative) - len(left)} of {len(speculative)} speculative runs there is a parallel decoding "
            "that is as fast or faster, and that so few pictures do not show to be further from plain decoding"
            + (f"; not for {', '.join(left)}. " if left else ". "))
    if same:
        first = max(same, key=lambda row: row["speed-up"])
        text += (f"The fastest parallel decoding whose pictures cannot be told from plain decoding's is "
                 f"{first['method']}, {first['speed-up']:.2f} times plain decoding's speed; ")
    else:
        text += "Every parallel decoding can be told from plain decoding by its pictures; "
    return text + f"the fastest speculative run is {best['method']}, {best['speed-up']:.2f} times."


def cover(report: Report, sections: list[Section], command: str, origin: str) -> str:
    """The first page: what came out, what was run, a line for each trend."""
    study, scope = report.study, report.scope
    config, draft = study.pair.mar.config, study.pair.mar_draft.config
    ahead = f" Of {AHEAD} tokens jointly: {fidelity(report.known['several'])}" if scope.ahead else ""
    return "\n".join([
        "# Speculative decoding of continuous tokens: CSpD's tables and figures on our MAR pair", "",
        f"`{command}`", "", f"Runs: {origin}.", "",
        f"- **Fidelity.** Of the next token: {fidelity(report.known['distribution'])}{ahead}",
        f"- **Speed.** {speed(report.known['table-1'])}",
        f"- **Parallel decoding.** {against_parallel(report.known['parallel'])}", "",
        f"Models: a MAR of {config.encoder_layers} + {config.decoder_layers} layers of width {config.dim}, a drafter "
        f"of {draft.encoder_layers} + {draft.decoder_layers} of width {draft.dim}; {config.tokens} tokens of "
        f"{config.channels} numbers a picture, {config.steps} denoising steps. {scope.images} pictures a run, "
        f"{scope.few} where each draft is judged given those before it, {scope.plain_run.count} of plain decoding; "
        f"guidance {scope.guidance:g} where nothing else is said.", "",
        "The paper's models have 0.2 to 0.9 billion parameters on GPUs at batch 128 and 256, ours are small and on "
        "what is named above: what can agree is a trend. Of the paper's numbers only the speed-ups of its Table 1 were "
        "at hand, with its range of alpha and its c; a cell that could not be read is not filled in.", "",
        "| | the paper says | here | |", "|---|---|---|---|", *links(sections)])


def scope_of(quick: bool, images: int | None, guidance: float | None) -> Scope:
    """
    Raises:
        ValueError: a single picture has no other to be compared with
    """
    scope = QUICK if quick else FULL
    if images is not None:
        if images < 2:
            raise ValueError(f"images must be at least 2 for continuous tokens, got {images}: distances are between "
                             "pictures of different prompts")
        scope = replace(scope, images=images, few=max(2, images // 2))
    return scope if guidance is None else replace(scope, guidance=guidance)


def write_report(pair: MARPair, weights: Path, out: Path, items: list[Item], scope: Scope, *, command: str,
                 whole: bool, seed: int) -> None:
    """As write.write_report, of a MAR pair.

    Raises:
        ValueError: `out` holds runs of another model, version or setting, or a package is missing
    """
    study = ContinuousStudy(pair, out / "runs", judged(weights)[0], seed=seed)
    if ITEMS["parallel"] in items:
        study.network  # a package that is missing is told before hours of work
    scope = replace(scope, tokens=study.tokens)
    study.do([work for item in items for work in item.works(scope)])
    write_items(Report(study, scope), items, out, command, cover if whole else None)
