"""`specvis tune`: the fastest method within a budget of fidelity, or the most faithful that is fast enough."""
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch

from .compare import save_figure
from ..decoding.methods import Method, method, parse_method
from ..studies.base import Latency, Run, Study

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  the backend is chosen first: there may be no screen

RULES = (  # of acceptance, on the recipe's own tree
    "speculative", "eagle1", "eagle2", "adt-tree",
    *(f"{name}:delta={delta}:k={k}" for name in ("lantern", "lantern+optimal") for delta in (0.05, 0.1, 0.2, 0.4)
      for k in (30, 300)),
    *(f"lantern++:delta={delta}{tail}" for delta in (0.5, 1.0, 2.0, 4.0) for tail in ("", ":residual=optimal")),
    *(f"{name}:omega={omega}" for name in ("uniform-rsd", "cool-sd") for omega in (1.1, 1.5, 2.0, 3.0)),
)
TREES = {  # shapes that a second round tries
    "static": [{"tree": name} for name in ("chain-2", "chain-4", "chain-6", "mc_sim_7b_63", "reverse_balanced_25",
                                           "naive_extend_57")],
    "dynamic": [{"depth": depth, "width": width, "nodes": nodes}
                for depth, width, nodes in ((2, 8, 16), (4, 4, 16), (4, 6, 32), (6, 6, 48), (4, 10, 60))],
}
COLUMNS = ("method", "speed-up", "tau", "TV meter", "+-", "pictures", "frontier", "chosen")


@dataclass(frozen=True)
class Trial:
    """What is known of a method."""

    method: Method
    pictures: int
    tau: float
    tv: float               # fidelity meter per token, mean over pictures
    error: float            # its standard error
    seconds: float | None   # speed-up over plain decoding of single pictures; None: judged by tau

    @property
    def speed(self) -> float:
        return self.tau if self.seconds is None else self.seconds

    @property
    def tv_at_most(self) -> float:
        """What the meter is held to: one standard error above its mean."""
        return self.tv + self.error


def frontier(trials: list[Trial]) -> list[Trial]:
    """Those that no other is both faster and more faithful than, from slow to fast."""
    best, kept = float("inf"), []
    for trial in sorted(trials, key=lambda t: (-t.speed, t.tv_at_most)):
        if trial.tv_at_most < best:
            best = trial.tv_at_most
            kept.append(trial)
    return kept[::-1]


def choose(trials: list[Trial], target_tv: float | None, target_speedup: float | None) -> Trial | None:
    """The fastest within the budget, or the most faithful that is fast enough; None: there is none."""
    if target_tv is not None:
        within = [trial for trial in trials if trial.tv_at_most <= target_tv]
        return max(within, key=lambda t: t.speed, default=None)
    within = [trial for trial in trials if trial.speed >= target_speedup]
    return min(within, key=lambda t: (t.tv_at_most, -t.speed), default=None)


def variations(base: Method) -> Iterator[Method]:
    """The method with other trees, a drafter more, and acceptance somewhat stricter and looser."""
    changes = list(TREES[base.drafting]) if base.adaptation is None else [
        {"start": start} for start in ("vertical", "tokenflock")]
    changes.append({"drafter": "small"})
    if base.k:
        changes += [{"delta": round(base.delta * factor, 4)} for factor in (0.7, 1.4)]
    elif base.omega != 1:
        changes += [{"omega": round(1 + (base.omega - 1) * factor, 4)} for factor in (0.7, 1.4)]
    shape = {"static": ("tree",), "dynamic": ("depth", "width", "nodes")}[base.drafting]
    for change in changes:
        keep = ("drafter", "k", "kind", "delta", "metric", "residual", "omega", "nu",
                *(shape if not set(shape) & set(change) else ()))
        kept = {key: getattr(base, key) for key in keep if getattr(base, key) != getattr(method(base.name), key)}
        try:
            changed = method(base.name, **kept | change)
        except ValueError:  # such as a delta beyond its range: no variation then
            continue
        if changed != base:
            yield changed


def runs_of(m: Method, pictures: int) -> list[Run]:
    """The run in pieces 4, 4, 8, 16, ..., of which a longer trial uses a shorter one's."""
    pieces, start = [], 0
    while start < pictures:
        count = min(max(start, 4), pictures - start)
        pieces.append(Run(m, 1.0, count, start))
        start += count
    return pieces


def trial(study: Study, m: Method, pictures: int, by_seconds: bool, timed: int) -> Trial:
    parts = [study.pictures(run) for run in runs_of(m, pictures)]
    tv = torch.cat([part.excess for part in parts])
    tau = torch.cat([part.decoded.tau for part in parts]).nanmean().item()
    seconds = float(sorted(study.seconds(Latency(m, 1.0, timed)).speedup)[timed // 2]) if by_seconds else None
    error = tv.std().item() / len(tv) ** 0.5 if len(tv) > 1 else 0.0
    return Trial(m, pictures, tau, tv.mean().item(), error, seconds)


def nearest(trials: list[Trial], target_tv: float | None, target_speedup: float | None, count: int) -> list[Trial]:
    """The best choice now, the most faithful of all, and the trials of the frontier that are nearest to the target."""
    by = (lambda t: abs(t.tv_at_most - target_tv)) if target_tv is not None else (
        lambda t: abs(t.speed - target_speedup))
    edge = frontier(trials)
    chosen = choose(trials, target_tv, target_speedup)
    first = [*([chosen] if chosen else []), edge[0]]  # the last of them keeps a choice possible
    return list(dict.fromkeys([*first, *sorted(edge, key=by)]))[:count]


def tune(study: Study, target_tv: float | None, target_speedup: float | None, *, pictures: int, by_seconds: bool,
         rules: list[Method] | None = None) -> tuple[list[Trial], Trial | None]:
    """All rules on a quarter of the pictures; twice variations of the best, on a half; the best on all.

    Returns:
        all trials, each method by its longest, and the chosen one
    """
    has_small = study.pipeline.small is not None
    methods = [parse_method(text) for text in RULES] if rules is None else rules
    V = study.pipeline.gpt.config.vocabulary
    known: dict[Method, Trial] = {}
    for number, (share, kept) in enumerate(((4, 0), (2, 4), (2, 2), (1, 6)), 1):
        count, timed = max(4, pictures // share), 1 if share > 1 else 3
        if number > 1:
            best = nearest(list(known.values()), target_tv, target_speedup, kept)
            methods = [t.method for t in best]
            if share > 1:
                methods += [m for base in best for m in variations(base.method)]
        methods = [m for m in dict.fromkeys(methods)
                   if m.columns < V and (has_small or m.drafter != "small")]
        works = [run for m in methods for run in runs_of(m, count)]
        study.do(works + [Latency(m, 1.0, timed) for m in methods if by_seconds], f"round {number} of 4: ")
        known |= {m: trial(study, m, count, by_seconds, timed) for m in methods}
    trials = list(known.values())
    whole = [t for t in trials if t.pictures == pictures]  # only what was looked at closely is chosen
    return trials, choose(whole, target_tv, target_speedup)


def rows_of(trials: list[Trial], chosen: Trial | None) -> list[dict]:
    edge = frontier(trials)
    return [{"method": t.method.label, "speed-up": "" if t.seconds is None else round(t.seconds, 3),
             "tau": round(t.tau, 3), "TV meter": round(t.tv, 4), "+-": round(t.error, 4), "pictures": t.pictures,
             "frontier": "yes" if t in edge else "", "chosen": "yes" if t == chosen else ""}
            for t in sorted(trials, key=lambda t: t.speed)]


def write_trials(rows: list[dict], path: Path) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def draw_trials(trials: list[Trial], chosen: Trial | None, target_tv: float | None, target_speedup: float | None,
                path: Path) -> None:
    """Every trial, the frontier, the target and the choice."""
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axis.errorbar([t.speed for t in trials], [t.tv for t in trials], [t.error for t in trials], fmt="o", ms=4,
                  color="lightgray", ecolor="lightgray", label="tried")
    edge = frontier(trials)
    axis.plot([t.speed for t in edge], [t.tv for t in edge], "o-", ms=4, color="tab:blue", label="frontier")
    for t in edge:
        axis.annotate(t.method.label, (t.speed, t.tv), fontsize=6, xytext=(4, 2), textcoords="offset points")
    if target_tv is not None:
        axis.axhline(target_tv, color="gray", ls=":", label="target")
    else:
        axis.axvline(target_speedup, color="gray", ls=":", label="target")
    if chosen:
        axis.plot(chosen.speed, chosen.tv, "*", ms=14, color="tab:red", label="chosen")
    by = "tokens per target forward (tau)" if trials[0].seconds is None else "speed-up in seconds, single pictures"
    axis.set(xlabel=by, ylabel="fidelity meter: TV per token (estimate)")
    axis.margins(x=0.2)  # room for the names
    axis.legend()
    save_figure(figure, path)
