"""Is the target's distribution kept? Draws of the next tokens from one state, by each method and by the target."""
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import numpy as np

from specvis.decoding.methods import parse_method
from specvis.study.jobs import Job
from specvis.study.plots import method_color

from .base import Item, item
from .continuous import ContinuousReport, ContinuousScope, ContinuousStudy
from .continuous_study import Draws
from .distances import DISTANCES, SURE, SampleDistance, compare, joint
from .page import Section, axes

ITEMS: dict[str, Item] = {}
JOINT_TOKENS = 4  # tokens drawn jointly

ONE = {"cspd": "cspd:gamma=1:prefill=0", "cspd, distances / 42": "cspd:gamma=1:prefill=0:distance_temperature=42",
       "cspd, not aligned": "cspd:gamma=1:prefill=0:aligned=false",
       "cspd-released": "cspd-released:gamma=1:prefill=0", "cspd-path": "cspd-path:gamma=1:prefill=0"}
SEVERAL = {name: f"{text}:gamma={JOINT_TOKENS}:prefill=0" for name, text in {
    "cspd": "cspd", "cspd, nothing truncated": "cspd:truncate=false",
    "cspd, block, nothing truncated": "cspd:truncate=false:conditioning=block", "cspd-released": "cspd-released",
    "cspd-path": "cspd-path", "cspd-path, nothing truncated": "cspd-path:truncate=false"}.items()}
SEVERAL |= {"parallel, 2 forwards": "mar:num_iter=2", "parallel, 1 forward": "mar:num_iter=1"}


def differs(row: dict) -> bool:
    """Say whether a row's distances are further from the target than chance explains."""
    return not all(row[f"{distance}, deviations"] <= SURE for distance in DISTANCES)  # a distance may be NaN


def distributions_kept(rows: list[dict]) -> str:
    """Say which methods keep the target's distribution, and which change it."""
    def named(those):
        return "; ".join(f"{row['method']} ({'; '.join(about(row))})" for row in those) or "none"

    def about(row):
        if row["alpha"] != "":
            yield f"alpha {row['alpha']:.3f}"
        yield ", ".join(f"{row[f'{distance}, deviations']:+.1f}" for distance in DISTANCES)

    methods = [row for row in rows if row["method"] not in ("target again", "draft model alone")]
    same, other = ([row for row in methods if differs(row) is which] for which in (False, True))
    draft = next(row for row in rows if row["method"] == "draft model alone")
    power = "" if differs(draft) else (" Not even the draft model alone is found to differ: these draws are "
                                       "too few to decide anything.")
    return (f"no difference from the target is found in {rows[0]['draws']} draws for: {named(same)}. The distribution "
            f"is changed by: {named(other)}. (In brackets the {' and the '.join(DISTANCES)} above chance, in "
            f"standard deviations of chance.){power}")


def draw_sets(scope: ContinuousScope, num_known: int, num_new: int, count: int, picture: int = 0) -> dict[str, Draws]:
    """Draws from one state by the target, twice, by the draft model, and by each method."""
    target = Draws(parse_method("mar"), scope.run("mar"), num_known, num_new, count, picture)
    return {"target": target, "target again": replace(target, repeat=1),
            "draft model alone": replace(target, draft_alone=True),
            **{name: replace(target, method=parse_method(text))
               for name, text in (ONE if num_new == 1 else SEVERAL).items()}}


def one_token(scope: ContinuousScope) -> list[dict[str, Draws]]:
    """The sets of draws of the next token, for each state."""
    return [draw_sets(scope, max(1, round(share * scope.num_tokens)), 1, scope.draws, i % scope.images)
            for i, share in enumerate(scope.known_shares)]


def several(scope: ContinuousScope) -> list[dict[str, Draws]]:
    """The sets of draws of the next JOINT_TOKENS tokens, from one state; a quick report has none."""
    return [draw_sets(scope, scope.num_tokens // 4, JOINT_TOKENS, scope.joint_draws)] if scope.joint_draws else []


def distance_rows(study: ContinuousStudy, states: list[dict[str, Draws]]) -> list[dict]:
    """A row for each method: its distances over all states, beside what chance makes of them."""
    compared, alphas, all_forwards = [], {}, {}
    for state in states:
        samples = {}
        for name, job in state.items():
            samples[name], alpha, target_forwards = study.draws(job)
            alphas.setdefault(name, []).append(alpha)
            all_forwards.setdefault(name, []).append(target_forwards)
        spread = samples["target"].var(0).mean().sqrt()  # the unit, so that each state counts as much
        samples = {name: x / spread for name, x in samples.items()}
        compared.append(compare({name: x for name, x in samples.items() if name != "target"}, samples["target"],
                                samples["target again"]))
    rows = []
    for name in compared[0]:
        alpha, half = np.array(alphas[name]).T
        row = {"method": name, "states": len(states), "draws": len(states) * next(iter(states[0].values())).count,
               "target_forwards": float(np.mean(all_forwards[name])),
               "alpha": "" if np.isnan(alpha).any() else float(alpha.mean()),
               "+-": "" if np.isnan(half).any() else float(np.linalg.norm(half) / len(half))}
        for distance in DISTANCES:
            row |= distance_columns(distance, *([state[of][distance] for state in compared]
                                                for of in (name, "draft model alone")))
        rows.append(row | {"finding": "differs" if differs(row) else "no difference found"})
    return rows


def distance_columns(name: str, parts: list[SampleDistance], drafts: list[SampleDistance]) -> dict:
    """The columns of a distance, from the distances of a method and of the draft model in each state."""
    share = distance_excess(parts) / distance_excess(drafts) if joint(drafts) > SURE else ""
    return {name: float(np.mean([part.value for part in parts])),
            f"{name}, by chance": float(np.mean([part.chance for part in parts])),
            f"{name}, deviations": joint(parts), f"{name}, share of draft": share}


def distance_excess(parts: list[SampleDistance]) -> float:
    """Distance above chance, of several states together."""
    return sum(part.value - part.chance for part in parts)


def distance_figure(study: ContinuousStudy, rows: list[dict], state: dict[str, Draws]):
    """How far each method is from the target, and the samples of one state along the way from target to draft."""
    figure, ((left, right),) = axes(1, 2, 5, 3.4)
    names, styles, lines = [row["method"] for row in rows], {}, {}
    for name, job in state.items():
        color = "darkgray" if job.draft_alone else method_color(job.method.name)
        line = lines.setdefault(color, cycle(("-", "--", ":", "-.")))
        styles[name] = {"color": color, "ls": next(line)}
    left.barh(names, [max(0.1, row["energy distance, deviations"]) for row in rows],
              color=[styles[name]["color"] for name in names], edgecolor="white",
              hatch=["//" if differs(row) else "" for row in rows])
    left.axvline(SURE, color="black", lw=1)
    left.set(xscale="log", xlabel="energy distance, standard deviations of chance")
    left.invert_yaxis()
    left.tick_params(labelsize=6)
    samples = {name: study.draws(job)[0].double() for name, job in state.items() if name != "target again"}
    way = samples["draft model alone"].mean(0) - samples["target"].mean(0)
    way = way / way.norm().clamp(min=1e-12)
    bins = np.histogram_bin_edges(np.concatenate([(x @ way).numpy() for x in samples.values()]), 40)
    for name, x in samples.items():
        right.hist((x @ way).numpy(), bins, histtype="step", density=True, label=name,
                   lw=2 if name == "target" else 1, **styles[name])
    right.set(xlabel="along the line from the target's mean to the draft's", ylabel="density")
    right.legend(fontsize=5)
    return figure


def distribution_jobs(scope: ContinuousScope) -> Iterator[Job]:
    yield scope.run("mar")
    for state in one_token(scope) + several(scope):
        yield from state.values()


@item(ITEMS, "distribution", "Is the target's distribution kept?", distribution_jobs)
def distribution(report: ContinuousReport, section: Section) -> None:
    study, scope = report.study, report.scope
    states = one_token(scope)
    rows = distance_rows(study, states)
    counts = ", ".join(str(state["target"].num_known) for state in states)
    section.text(f"The next token, drawn {scope.draws} times from each of {len(states)} states (the first {counts} "
                 "tokens of baseline pictures known), each set with seeds of its own, by the decoding loop itself. "
                 "Distances are to a set of the target's, in units of its spread; chance is what they are between "
                 "halves of two sets of the target's. A method differs if either distance is more than "
                 f"{SURE:g} standard deviations above chance; `share of draft` is 0 for the target and 1 for the draft "
                 "model alone, and blank where not even that differs. To keep one token's distribution is necessary, "
                 "not sufficient.")
    section.table(rows)
    section.figure(distance_figure(study, rows, states[0]),
                   "Left: energy distance from the target's distribution, a bar for each method (beyond the line it "
                   "differs; hatched: it differs by this or the other distance). Right: densities of the samples of "
                   "the first state, a curve for each method, from the target's mean to the draft's")
    report.results["Distribution"] = f"Of the next token: {distributions_kept(rows)}"
    section.text(report.results["Distribution"])
    for state in several(scope):
        joint_distribution(report, section, state)
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


def joint_distribution(report: ContinuousReport, section: Section, state: dict[str, Draws]) -> None:
    """The part of `distribution` about several tokens."""
    study, known = report.study, state["target"].num_known
    rows = distance_rows(study, [state])
    section.text(f"The next {JOINT_TOKENS} tokens jointly, {report.scope.joint_draws} draws from one state ({known} "
                 "known), with MAR's own parallel decoding beside:")
    section.table(rows, "-several")
    section.figure(distance_figure(study, rows, state), "Left: distance from the target's distribution of "
                   f"{JOINT_TOKENS} joint tokens, a bar for each method. Right: densities of their samples, "
                   "a curve for each method", "-several")
    kept = f"Of {JOINT_TOKENS} tokens jointly: {distributions_kept(rows)}"
    section.text(kept)
    report.results["Distribution"] += f" {kept}"


def deviations(row: dict) -> str:
    energy, sliced = (row[f"{distance}, deviations"] for distance in DISTANCES)
    return f"energy distance {energy:+.1f}, sliced Wasserstein {sliced:+.1f} standard deviations of chance"
