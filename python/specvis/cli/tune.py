"""`specvis tune`: the fastest method within a budget of fidelity, or the most faithful that is fast enough."""
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from ..decoding.methods import Method, method, parse_method
from ..decoding.sampling import Sampling
from ..files import csv_text, locked, replacing_together, write_whole
from .measured import DiscreteStudy, Latency, PictureRun
from .options import (
    MAX_COUNT,
    PROMPTS,
    filters_for,
    given_options,
    load_model,
    resumable,
    sampling_options,
    writable_folder,
)
from .plots import plt, save_figure

RULES = (  # rules of acceptance, on the recipe's own tree or window
    "jacobi:window=16", "gsd", "gsd+coupled", "speculative", "eagle1", "eagle2", "adt-tree",
    *(f"{name}:delta={delta}:k={k}" for name in ("lantern", "lantern+optimal") for delta in (0.05, 0.1, 0.2, 0.4)
      for k in (30, 300)),
    *(f"lantern++:delta={delta}{tail}" for delta in (0.5, 1.0, 2.0, 4.0) for tail in ("", ":residual=optimal")),
    *(f"{name}:omega={omega}" for name in ("uniform-rsd", "cool-sd") for omega in (1.1, 1.5, 2.0, 3.0)),
)
TREES = {  # a second round tries these shapes
    "static": [{"tree": name} for name in ("chain-2", "chain-4", "chain-6", "mc_sim_7b_63", "reverse_balanced_25",
                                           "naive_extend_57")],
    "dynamic": [{"depth": depth, "width": width, "nodes": nodes}
                for depth, width, nodes in ((2, 8, 16), (4, 4, 16), (4, 6, 32), (6, 6, 48), (4, 10, 60))],
    "jacobi": [{"window": window} for window in (4, 8, 24, 32)],
}
ROUNDS = ((4, 0), (2, 4), (2, 2), (1, 6))  # one n-th of the pictures; how many of the best trials go on
COLUMNS = ("method", "speedup", "tau", "tv_excess", "+-", "pictures", "frontier", "chosen")


@click.command()
@click.option("--target-tv-excess", type=click.FloatRange(0, 1),
              help="The most total variation added per token, estimated.")
@click.option("--target-speedup", type=click.FloatRange(0, min_open=True), help="The least speedup.")
@click.option("--by", type=click.Choice(["tau", "seconds"]), default="tau",
              help="The speedup is tokens per target forward, or in seconds of single pictures on this machine.")
@click.option("--images", type=click.IntRange(4, MAX_COUNT), default=16,
              help="Pictures by which the last methods are compared.")
@click.option("--out", type=click.Path(path_type=Path), default="out/tune", help="Folder for the table and its runs.")
@sampling_options
def tune(target_tv_excess, target_speedup, by, images, out, seed, guidance, top_k, top_p, model, device):
    """Find the fastest method within a budget of fidelity, or the most faithful that is fast enough.

    Every run is saved in the folder: after an interruption the same command goes on where it stopped.
    """
    if (target_tv_excess is None) == (target_speedup is None):
        raise ValueError("give one of --target-tv-excess and --target-speedup")
    target = Target(target_tv_excess, target_speedup)
    settings = filters_for(model, guidance, top_k, top_p)
    Sampling.of([seed], **settings)
    pipeline = load_model(Method, model, device)
    with locked(writable_folder(out)), resumable():
        study = DiscreteStudy(pipeline, out / "runs", PROMPTS, images=images, seed=seed, **settings)
        trials, chosen = search(study, target, pictures=images, by_seconds=by == "seconds")
        rows = table(trials, chosen)
        with replacing_together(out, last="tune.csv") as new:
            draw_trials(trials, chosen, target, new / "tune.png")
            write_whole(new / "tune.csv", csv_text(rows[0], rows))
    print_frontier(rows)
    click.echo(f"(the frontier of {len(rows)} methods at temperature 1; tv_excess: added total variation per token, "
               f"estimated; all in {out / 'tune.csv'})")
    if chosen is None:
        fastest = max(trials, key=lambda t: t.speed)
        raise click.ClickException(f"no method that was tried reaches a {target.described(by)}; the fastest is "
                                   f"{fastest.method.label} at {fastest.speed:.2f}")
    command = ['specvis generate --prompt "red heart" --method', chosen.method.label,
               *given_options(but=("target_tv_excess", "target_speedup", "by", "images", "out", "seed"))]
    click.echo(f"chosen: {chosen.method.label}, {by} {chosen.speed:.2f}, tv_excess {chosen.tv_excess:.4f} "
               f"+- {chosen.standard_error:.4f}\n  {' '.join(command)}")


@dataclass(frozen=True)
class Trial:
    """The measurements of a method."""

    method: Method
    pictures: int
    tau: float
    tv_excess: float         # per token, mean over pictures
    standard_error: float    # the error of tv_excess
    speedup: float | None    # over the baseline in seconds of single pictures; None: tau is compared

    @property
    def speed(self) -> float:
        return self.tau if self.speedup is None else self.speedup

    @property
    def tv_excess_above(self) -> float:
        """One standard error above the mean. This is compared with a target, and with other methods."""
        return self.tv_excess + self.standard_error


@dataclass(frozen=True)
class Target:
    """One of the two is given."""

    tv_excess: float | None = None  # at most
    speedup: float | None = None    # at least

    def choose(self, trials: list[Trial]) -> Trial | None:
        """The fastest within the budget, or the most faithful that is fast enough; None: no trial is."""
        if self.tv_excess is not None:
            within = [t for t in trials if t.tv_excess_above <= self.tv_excess]
            return max(within, key=lambda t: t.speed, default=None)
        within = [t for t in trials if t.speed >= self.speedup]
        return min(within, key=lambda t: (t.tv_excess_above, -t.speed), default=None)

    def distance(self, trial: Trial) -> float:
        if self.tv_excess is not None:
            return abs(trial.tv_excess_above - self.tv_excess)
        return abs(trial.speed - self.speedup)

    def described(self, by: str) -> str:
        if self.tv_excess is not None:
            return f"tv_excess of {self.tv_excess:g}"
        return f"speedup of {self.speedup:g} by {by}"


def search(study: DiscreteStudy, target: Target, *, pictures: int, by_seconds: bool,
           rules: list[Method] | None = None) -> tuple[list[Trial], Trial | None]:
    """Try methods in four rounds, each of which starts from the best methods of the rounds before.

    1.    All rules, on a quarter of the pictures.
    2, 3. The best methods and variations of them, on a half.
    4.    The best methods, on all pictures. One of these is chosen.

    Returns:
        the trial of each method with the most pictures, and the chosen one; None: no method meets the target
    """
    V, missing = study.pipeline.gpt.config.vocabulary, study.pipeline.missing_draft_models
    methods = [parse_method(text) for text in RULES] if rules is None else rules
    trials: dict[Method, Trial] = {}
    for number, (share, num_best) in enumerate(ROUNDS, 1):
        count, timed = max(4, pictures // share), 1 if share > 1 else 3
        if number > 1:
            methods = [t.method for t in nearest(list(trials.values()), target, num_best)]
            if share > 1:
                methods += [m for base in list(methods) for m in variations(base)]
        methods = [m for m in dict.fromkeys(methods)
                   if m.num_neighbors < V and m.parameters.get("draft_model") not in missing]
        works = [run for m in methods for run in runs_of(m, count)]
        works += [Latency(m, 1.0, timed) for m in methods if by_seconds]
        study.compute(works, f"round {number} of {len(ROUNDS)}, ")
        trials |= {m: trial(study, m, count, by_seconds, timed) for m in methods}
    longest = [t for t in trials.values() if t.pictures == pictures]  # only what was looked at closely is chosen
    return list(trials.values()), target.choose(longest)


def nearest(trials: list[Trial], target: Target, count: int) -> list[Trial]:
    """At most `count` trials: the choice so far, the most faithful, then the frontier's nearest to the target."""
    edge = frontier(trials)
    chosen = target.choose(trials)
    first = [*([chosen] if chosen else []), edge[0]]  # the most faithful keeps a choice possible
    return list(dict.fromkeys([*first, *sorted(edge, key=target.distance)]))[:count]


def frontier(trials: list[Trial]) -> list[Trial]:
    """The trials for which no other is both faster and more faithful, from slow to fast."""
    least, edge = float("inf"), []
    for trial in sorted(trials, key=lambda t: (-t.speed, t.tv_excess_above)):
        if trial.tv_excess_above < least:
            least = trial.tv_excess_above
            edge.append(trial)
    return edge[::-1]


def variations(base: Method) -> Iterator[Method]:
    """The method with other trees or windows, with the other draft model, and with stricter and looser acceptance."""
    changes = list(TREES[base.drafting]) if "start" not in base.parameters else [
        {"start": start} for start in ("vertical", "tokenflock")]
    changes.append({"draft_model": "small"})
    acceptance = base.acceptance
    if acceptance.k:
        changes += [{"delta": round(acceptance.delta * factor, 4)} for factor in (0.7, 1.4)]
    elif acceptance.omega != 1:
        changes += [{"omega": round(1 + (acceptance.omega - 1) * factor, 4)} for factor in (0.7, 1.4)]
    shape = {name for tree in TREES[base.drafting] for name in tree}
    differing = base.differing
    for change in changes:
        replaced = set(change) | (shape if shape & set(change) else set())
        unchanged = {name: value for name, value in differing.items() if name not in replaced}
        try:
            changed = method(base.name, **unchanged, **change)
        except ValueError:  # such as a delta beyond its range, or a draft model of jacobi: no variation then
            continue
        if changed != base:
            yield changed


def runs_of(m: Method, pictures: int) -> list[PictureRun]:
    """The pictures in runs of 4, 4, 8, 16, ...: a longer trial begins with the runs of a shorter one."""
    pieces, start = [], 0
    while start < pictures:
        count = min(max(start, 4), pictures - start)
        pieces.append(PictureRun(m, 1.0, count, start))
        start += count
    return pieces


def trial(study: DiscreteStudy, m: Method, pictures: int, by_seconds: bool, timed: int) -> Trial:
    parts = [study.pictures(run) for run in runs_of(m, pictures)]
    tv_excess = torch.cat([part.tv_excess for part in parts])
    tau = torch.cat([part.decoded.tau for part in parts]).nanmean().item()
    speedup = float(sorted(study.seconds(Latency(m, 1.0, timed)).speedup)[timed // 2]) if by_seconds else None
    standard_error = tv_excess.std().item() / len(tv_excess) ** 0.5 if len(tv_excess) > 1 else 0.0
    return Trial(m, pictures, tau, tv_excess.mean().item(), standard_error, speedup)


def table(trials: list[Trial], chosen: Trial | None) -> list[dict]:
    """A row for each trial, from slow to fast, of COLUMNS; without "speedup" where they were compared by tau."""
    edge = frontier(trials)
    return [{name: value for name, value in zip(COLUMNS, (
        t.method.label, t.speedup and round(t.speedup, 3), round(t.tau, 3), round(t.tv_excess, 4),
        round(t.standard_error, 4), t.pictures, "yes" if t in edge else "", "yes" if t == chosen else ""))
        if value is not None} for t in sorted(trials, key=lambda t: t.speed)]


def print_frontier(rows: list[dict]) -> None:
    columns = [name for name in rows[0] if name not in ("method", "frontier", "chosen")]
    name_width = max(len(row["method"]) for row in rows) + 1
    for row in [dict(zip(COLUMNS, COLUMNS)), *(row for row in rows if row["frontier"])]:
        click.echo(f"{row['method']:{name_width}}" + "".join(f"{row[name]:>10}" for name in columns))


def draw_trials(trials: list[Trial], chosen: Trial | None, target: Target, path: Path) -> None:
    """Every trial, the frontier, the target and the choice, by what is compared: the means plus a standard error."""
    figure, axis = plt.subplots(figsize=(9, 6), layout="constrained")
    axis.plot([t.speed for t in trials], [t.tv_excess_above for t in trials], "o", ms=4, color="lightgray",
              label="tried")
    edge = frontier(trials)
    axis.plot([t.speed for t in edge], [t.tv_excess_above for t in edge], "o-", ms=4, color="tab:blue",
              label="frontier")
    for t in edge:
        axis.annotate(t.method.label, (t.speed, t.tv_excess_above), fontsize=8, xytext=(10 if t == chosen else 4, 2),
                      textcoords="offset points")
    if target.tv_excess is not None:
        axis.axhline(target.tv_excess, color="gray", ls=":", label="target")
    else:
        axis.axvline(target.speedup, color="gray", ls=":", label="target")
    if chosen:
        axis.plot(chosen.speed, chosen.tv_excess_above, "*", ms=14, color="tab:red", label="chosen")
    by = "tokens per target forward (tau)" if trials[0].speedup is None else "speedup in seconds, single pictures"
    axis.set(xlabel=by, ylabel="added total variation per token: estimate and one standard error")
    axis.margins(x=0.2)  # space for the names
    axis.legend()
    save_figure(figure, path)
