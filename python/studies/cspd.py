"""CSpD's tables and figures (arXiv:2411.11925), and what users ask beside them, on a MAR pair."""
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from specvis.decoding.methods import parse_method
from specvis.study.jobs import Job
from specvis.study.plots import method_style

from . import papers
from .base import Item, decided, item, pixels
from .continuous import FAMILIES, ContinuousReport, ContinuousRun, ContinuousScope, ContinuousStudy
from .continuous_study import MIN_SECONDS, TokenTiming, half_interval
from .page import Section, axes, show

ITEMS: dict[str, Item] = {}
PAPER = {gamma: papers.value("cspd-table-1", "speed-up, batch 256", target="H", draft="B", gamma=gamma)
         for gamma in (4, 8, 16, 32)}
WINDOWS = 16  # the order is cut into this many


def baselines(runs: list[ContinuousRun]) -> Iterator[Job]:
    """The baselines that the seconds of these runs are compared with, each once."""
    yield from dict.fromkeys(run.baseline for run in runs)


def eq_35(alpha: float, gamma: int, c: float) -> float:
    """The paper's speedup: tokens that a step of Algorithm 1 yields over its cost in target forwards."""
    tokens = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return tokens / (gamma * c + 1)


def speedup_by_forwards(tokens: int, target_forwards: float, draft_forwards: float, c: float) -> float:
    """The speedup if drafted tokens are replaced but never dropped: tokens over the forwards that they took."""
    return tokens / (target_forwards + draft_forwards * c)


def published() -> str:
    """What eq. 35 and the count of forwards make of the paper's own numbers, beside its speedups."""
    rows = [row for row in papers.table("cspd-table-1") if (row["target"], row["draft"]) == ("H", "B")]
    stated, tokens, prefill = papers.value("records", "figure", method="CSpD", unit="c"), 256, 38  # 15 % of the tokens
    by_eq = [eq_35(float(row["alpha"]), int(row["gamma"]), stated) for row in rows]
    speedups = [float(row["speed-up, batch 256"]) for row in rows]
    forwards = [prefill + math.ceil((tokens - prefill) / int(row["gamma"])) for row in rows]
    c = float(np.mean([(tokens / speedup - count) / (tokens - prefill) for speedup, count in zip(speedups, forwards)]))
    counted = [speedup_by_forwards(tokens, count, tokens - prefill, c) for count in forwards]

    def listed(values):
        return ", ".join(f"{value:.2f}" for value in values)

    return ("The paper's table was run with 15 % pre-filled: its column for batch 8 is that of 15 % in its Table 4. "
            f"For MAR-H with MAR-B at batch 256 it has {listed(speedups)}. With its alphas and its c = {stated:g} eq. "
            f"35 gives {listed(by_eq)}; the count of forwards with one c, {c:.3f}, gives {listed(counted)}. So the "
            "published speed is of decoding without truncation, and does not depend on alpha.")


def table_1_jobs(scope: ContinuousScope) -> Iterator[Job]:
    runs = scope.speculative
    yield scope.baseline
    yield from baselines(runs)
    yield from (replace(run, draft_alone=True) for run in baselines(runs))
    yield from runs


def table_1_rows(report: ContinuousReport) -> list[dict]:
    rows = []
    for run in report.scope.speculative:
        row, c, gamma = report.row(run), report.draft_cost(run), run.method.gamma
        by_forwards = speedup_by_forwards(report.study.num_tokens, row["target_forwards"], row["draft_forwards"], c)
        rows.append({"family": run.method.name, "gamma": gamma} | row | {
            "c": c, "eq. 35": eq_35(row["alpha"], gamma, c), "by forwards": by_forwards})
    return rows


def table_1_figure(rows: list[dict], error: float):
    """Acceptance, tau and speedup over gamma, a curve for each family. error: of speedups, relative"""
    figure, (three,) = axes(1, 3, 4, 3.2)
    for name in FAMILIES:
        those = [row for row in rows if row["family"] == name]
        gamma = [row["gamma"] for row in those]
        style = method_style(name)
        three[0].errorbar(gamma, [row["alpha"] for row in those], [row["+-"] for row in those], label=name, **style)
        three[1].plot(gamma, [row["tau"] for row in those], label=name, **style)
        speedups = np.array([row["speedup"] for row in those])
        three[2].errorbar(gamma, speedups, error * speedups, capsize=2, label=f"{name}, seconds", **style)
        three[2].plot(gamma, [row["by forwards"] for row in those], "--", color=style["color"], label="by forwards")
    three[2].plot(*zip(*PAPER.items()), "k*", label="the paper, H and B, batch 256")
    three[2].axhline(1, color="gray", lw=1)
    gammas = sorted({row["gamma"] for row in rows} | set(PAPER))
    for axis, name in zip(three, ("alpha", "tau: tokens per target forward", "speedup")):
        over_gamma(axis, name, gammas)
    return figure


def speed(rows: list[dict]) -> str:
    """Say what the best of each family is in target forwards and in seconds."""
    said = []
    for name in dict.fromkeys(row["family"] for row in rows):
        those = [row for row in rows if row["family"] == name]
        tau, fast = (max(those, key=lambda row: row[column]) for column in ("tau", "speedup"))
        said.append(f"{name} {tau['tau']:.2f} tokens a target forward (gamma {tau['gamma']}), {fast['speedup']:.2f} "
                    f"times the baseline's speed in seconds (gamma {fast['gamma']}, batch {fast['batch']})")
    best = max(rows, key=lambda row: row["speedup"])
    fastest = (f"The fastest in seconds is {best['method']}" if best["speedup"] > 1
               else "None is faster than the baseline in seconds")
    return f"At best: {'; '.join(said)}. {fastest}."


@item(ITEMS, "table-1", "CSpD, Table 1: acceptance and speedup over gamma", table_1_jobs)
def table_1(report: ContinuousReport, section: Section) -> None:
    rows = table_1_rows(report)
    report.results["Speed"] = speed(rows)
    section.text(
        "alpha is the share of verified drafts that were accepted, tau tokens per target forward, speedup in seconds "
        "against the baseline (`mar`: a token a target forward) of as many pictures in one batch; +- is a binomial "
        "95 % interval over the tokens of these pictures, others may differ by more; c is the draft model's time of a "
        "token over the target's, at that batch size.",
        "`eq. 35` is the paper's (1 - alpha^(gamma + 1)) / ((1 - alpha) (gamma c + 1)). It is for Algorithm 1, which "
        "drops what follows a rejection. `by forwards` is L / (target_forwards + draft_forwards c), counted: it holds "
        "for any method, and is the only one for `cspd-released`, which keeps a step's tokens whatever was rejected, "
        "so that its forwards do not depend on alpha. Neither counts that to verify gamma drafts exactly takes "
        "gamma + 1 variants of the image a forward, nor the denoising of resampled tokens.",
        published())
    section.table(rows)
    gammas = {row["gamma"]: row for row in rows if row["family"] == "cspd-released"}
    section.beside("cspd-table-1", lambda row: {} if int(row["gamma"]) not in gammas else {
        "alpha": (ours := gammas[int(row["gamma"])])["alpha"], f"speedup here, batch {ours['batch']}": ours["speedup"],
        "by forwards": ours["by forwards"]}, "-paper")
    section.text("Beside the paper's table: `cspd-released`, one pair of models beside its three.")
    section.figure(table_1_figure(rows, report.timing_error),
                   "Acceptance, tokens per target forward and speedup over gamma, a curve for each method: bars are "
                   "95 % intervals, dashed curves what forwards alone would give, stars the paper's")
    released = [row for row in rows if row["family"] == "cspd-released"]
    speedups = [row["speedup"] for row in released]
    half = report.timing_error
    section.claim(f"a larger gamma is faster ({PAPER[32]:.2f} times at gamma 32)",
                  decided(float(np.log(speedups[-1] / speedups[0])), half),
                  f"cspd-released from {speedups[0]:.2f} to {speedups[-1]:.2f} times in seconds, "
                  f"from {released[0]['by forwards']:.2f} to {released[-1]['by forwards']:.2f} by forwards; a ratio of "
                  f"timings is good to {half:.0%}")
    near = sum(abs(row["by forwards"] - row["speedup"]) < abs(row["eq. 35"] - row["speedup"]) for row in released)
    section.claim("its speedup follows eq. 35", near * 2 < len(released),
                  f"the count of forwards is nearer to cspd-released's seconds in {near} of {len(released)} runs")


def table_2_runs(scope: ContinuousScope) -> list[ContinuousRun]:
    return [replace(run, guidance=guidance) for run in scope.middles
            for guidance in dict.fromkeys((1.0, scope.guidance))]


@item(ITEMS, "table-2", "CSpD, Table 2: with and without guidance",
      lambda scope: [*baselines(table_2_runs(scope)), *table_2_runs(scope)], quick=False)
def table_2(report: ContinuousReport, section: Section) -> None:
    section.text("With guidance 1 nothing is guided. Otherwise a forward has two rows a picture; log sigma, which the "
                 "density ratios weigh, is that of the conditional row alone.")
    report.table(section, table_2_runs(report.scope))
    section.text(papers.caption("cspd-table-2"), "So few pictures have no FID and no inception score beside it:")
    section.table(papers.table("cspd-table-2"), "-paper")


def prefilled(run: ContinuousRun, percent: int) -> ContinuousRun:
    return replace(run, method=replace(run.method, prefill=percent / 100))


def as_published(scope: ContinuousScope, percent: int) -> list[ContinuousRun]:
    """The release's method over the paper's gammas, with this share of the tokens pre-filled."""
    return [prefilled(scope.run(f"cspd-released:gamma={gamma}"), percent) for gamma in PAPER
            if gamma in scope.gammas["cspd-released"]]


def table_3_pairs(scope: ContinuousScope) -> list[tuple[ContinuousRun, ContinuousRun]]:
    """Pairs of runs that differ in one thing: the first is trajectory-aligned, the second is not."""
    return [(run, replace(run, method=replace(run.method, aligned=False)))
            for run in (*as_published(scope, 5), scope.middle("cspd"))]


@item(ITEMS, "table-3", "CSpD, Table 3: with and without trajectory alignment",
      lambda scope: [*baselines([a for a, _ in table_3_pairs(scope)]), *sum(table_3_pairs(scope), ())],
      quick=False)
def table_3(report: ContinuousReport, section: Section) -> None:
    pairs = table_3_pairs(report.scope)
    section.text("Not aligned: the target denoises noise of its own. `cspd-path` has the draft's noise only. 5 % are "
                 "pre-filled, as in the paper: its aligned alphas are those that its Table 4 has for 5 %.")
    report.table(section, list(sum(pairs, ())))
    by_gamma = {pair[0].method.gamma: pair for pair in pairs[:-1]}
    section.beside("cspd-table-3", lambda row: {} if int(row["gamma"]) not in by_gamma else {
        column: report.study.pictures(run).alpha[0]
        for column, run in zip(("alpha, aligned", "alpha, not aligned"), by_gamma[int(row["gamma"])])}, "-paper")
    for pair in pairs:
        if pair[0].method.gamma == report.scope.middle(pair[0].method.name).method.gamma:
            section.claim("trajectory alignment raises acceptance", *report.higher(*pair))


SHARES = (0, 5, 15)  # percent


def table_4_runs(scope: ContinuousScope) -> list[ContinuousRun]:
    return [*(run for share in SHARES for run in as_published(scope, share)),
            *(prefilled(scope.middle("cspd"), share) for share in SHARES)]


@item(ITEMS, "table-4", "CSpD, Table 4: pre-filling",
      lambda scope: [*baselines(table_4_runs(scope)), *table_4_runs(scope)], quick=False)
def table_4(report: ContinuousReport, section: Section) -> None:
    section.text("The share of tokens that the target draws alone, first. alpha is of the tokens that were "
                 "verified, those after it; the trend is of the tokens after the largest share in both rows.")
    report.table(section, table_4_runs(report.scope))
    runs = {(run.method.gamma, share): run for share in SHARES for run in as_published(report.scope, share)}

    def here(row: dict[str, str]) -> dict:
        run = runs.get((int(row["gamma"]), int(row["pre-filled (%)"])))
        return {"alpha": report.study.pictures(run).alpha[0],
                f"speed-up here, batch {run.batch}": report.speedup(run)} if run else {}

    section.beside("cspd-table-4", here, "-paper")
    for middle in map(report.scope.middle, ("cspd-released", "cspd")):
        first = round(SHARES[-1] / 100 * report.study.num_tokens)
        section.claim("pre-filling raises acceptance",
                      *report.higher(prefilled(middle, SHARES[-1]), prefilled(middle, 0), first))


def timings(scope: ContinuousScope) -> dict[int, list[TokenTiming]]:
    """The baseline and two families at each batch size, in the middle of the order."""
    methods = [parse_method("mar"), *(scope.middle(name).method for name in FAMILIES[:2])]
    return {size: [TokenTiming(method, scope.run("mar"), size, scope.num_tokens // 4, scope.timed_tokens)
                   for method in methods] for size in scope.batch_sizes}


@item(ITEMS, "batch", "Batch size", lambda scope: [scope.baseline, *sum(timings(scope).values(), [])])
def batch(report: ContinuousReport, section: Section) -> None:
    study, scope = report.study, report.scope
    section.text(f"What was timed: {scope.timed_tokens} tokens after the first {scope.num_tokens // 4} of baseline "
                 "pictures, used over and over, after two tokens that warm up, again and again until "
                 f"{MIN_SECONDS:g} seconds are timed. Seconds are a token of one image, the median.")
    rows = []
    for size, jobs in timings(scope).items():
        baseline = study.token_seconds(jobs[0])
        rows += [{"method": job.method.label, "batch": size, "tokens timed": size * job.num_new,
                  "seconds a token": study.token_seconds(job), "speedup": baseline / study.token_seconds(job)}
                 for job in jobs]
    section.table(rows)
    figure, ((axis,),) = axes(1, 1, 4.4, 3.2)
    for label in dict.fromkeys(row["method"] for row in rows):
        sizes, seconds = np.array([(row["batch"], row["seconds a token"]) for row in rows if row["method"] == label]).T
        axis.errorbar(sizes, seconds, report.timing_error / 2 ** 0.5 * seconds, capsize=2, label=label,
                      **method_style(label))
    axis.set_xscale("log", base=2)
    axis.set_xticks(scope.batch_sizes, [str(size) for size in scope.batch_sizes])
    axis.set(xlabel="batch", ylabel="seconds a token of one image", yscale="log")
    axis.legend(fontsize=7)
    section.figure(figure, "Seconds a token of one image over the batch size, a curve for each method; bars are 95 % "
                           "intervals, by how much the seconds of the baseline's batches differ")
    speedups = {row["batch"]: row["speedup"] for row in rows if row["method"].startswith("cspd-released")}
    smallest, largest = min(speedups), max(speedups)
    gamma = scope.middle("cspd-released").method.gamma
    gains = [papers.value("cspd-table-1", f"speed-up, batch {size}", target="H", draft="B", gamma=gamma)
             for size in (1, 256)]
    section.claim(f"larger batches gain more (the paper at gamma {gamma}: {gains[0]:.2f} times at batch 1, "
                  f"{gains[1]:.2f} at 256)",
                  decided(float(np.log(speedups[largest] / speedups[smallest])), report.timing_error),
                  f"cspd-released {speedups[smallest]:.2f} times at batch {smallest}, {speedups[largest]:.2f} "
                  f"at {largest}; a ratio of timings is good to {report.timing_error:.0%}")


@item(ITEMS, "figure-9", "CSpD, Figure 9: drafts and what was made of them",
      lambda scope: [scope.run("mar"), scope.run("mar", draft_alone=True), *scope.middles])
def figure_9(report: ContinuousReport, section: Section) -> None:
    study, scope = report.study, report.scope
    columns = {"target alone": study.pictures(scope.run("mar")).decoded.tokens,
               "draft model alone": study.pictures(scope.run("mar", draft_alone=True)).decoded.tokens}
    for run in scope.middles:
        decoded = study.pictures(run).decoded
        columns[f"{run.method.label}, drafts"] = torch.where(decoded.drafts.isnan(), decoded.tokens, decoded.drafts)
        columns[f"{run.method.label}, verified"] = decoded.tokens
    count = min(len(tokens) for tokens in columns.values())
    section.figure(gallery(study, {name: tokens[:count] for name, tokens in columns.items()}),
                   "Pictures, each row is a prompt and a seed, each column a method, its drafts or what was made of "
                   "them. Drafts: the verified ones, the picture's own tokens elsewhere")
    section.text("Prompts: " + "; ".join(study.prompts[i % len(study.prompts)] for i in range(count)) + ".")


def gallery(study: ContinuousStudy, columns: dict[str, torch.Tensor]):
    """A figure with a column of pictures for each name's tokens (n, L, C)."""
    figure, grid = axes(max(map(len, columns.values())), len(columns), 1.3, 1.4)
    for line, (name, tokens) in zip(grid.T, columns.items()):
        for axis in line:
            axis.axis("off")
        for axis, picture in zip(line, pixels(study, tokens)):
            axis.axis("on")
            show(axis, picture)
        line[0].set_title(name.replace(", ", "\n").replace(":", "\n"), fontsize=6)
    return figure


def over_gamma(axis, label: str, gammas: list[int]) -> None:
    """A plot over gamma, on a logarithmic scale."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(gammas, [str(gamma) for gamma in gammas])
    axis.set(xlabel="gamma", ylabel=label)
    axis.legend(fontsize=6)


@item(ITEMS, "figure-11", "CSpD, Figure 11: acceptance along the order", lambda scope: scope.middles)
def figure_11(report: ContinuousReport, section: Section) -> None:
    rows, (figure, ((axis,),)) = [], axes(1, 1, 5, 3.2)
    width = max(1, report.study.num_tokens // WINDOWS)
    for run in report.scope.middles:
        windows = report.study.pictures(run).decoded.acceptance.split(width, 1)
        counts = [((part == 1).sum().item(), (part >= 0).sum().item()) for part in windows]
        run_rows = [{"method": run.method.label, "from token": i * width, "accepted": num_accepted,
                     "verified": num_verified, "alpha": num_accepted / num_verified,
                     "+-": half_interval(num_accepted, num_verified)}
                    for i, (num_accepted, num_verified) in enumerate(counts) if num_verified]
        axis.errorbar([row["from token"] + width / 2 for row in run_rows], [row["alpha"] for row in run_rows],
                      [row["+-"] for row in run_rows], ms=3, lw=1, capsize=2, label=run.method.label,
                      **method_style(run.method.name))
        rows += run_rows
    axis.set(xlabel="tokens known", ylabel="alpha")
    axis.legend(fontsize=7)
    section.figure(figure, f"Share of drafts accepted, over windows of {width} tokens of the order, a curve for each "
                           "method; bars are binomial 95 % intervals")
    section.table(rows)


def block(scope: ContinuousScope, guidance: float | None = None, temperature: float = 1.0) -> list[ContinuousRun]:
    """The three variants of the ratio where verifying is cheap: given the step's start, nothing truncated."""
    cheap = ":gamma=8:conditioning=block:truncate=false"
    runs = [scope.run(text, guidance, temperature) for text in ("cspd-released", f"cspd{cheap}", f"cspd-path{cheap}")]
    return [replace(run, count=scope.few, batch=scope.few) for run in runs]


def sweep(scope: ContinuousScope, name: str) -> dict[float, list[ContinuousRun]]:
    """The runs of `block` at each value of a setting, the usual value among them."""
    values = {"guidance": (*scope.guidances, scope.guidance), "temperature": (*scope.temperatures, 1.0)}[name]
    return {value: block(scope, **{name: value}) for value in sorted(set(values))}


def over(report: ContinuousReport, section: Section, name: str) -> None:
    """Write a figure and a table of alpha over the values of a setting."""
    runs = sweep(report.scope, name)
    figure, ((axis,),) = axes(1, 1, 5, 3.2)
    rows = []
    for those in zip(*runs.values()):
        alphas = [report.study.pictures(run).alpha for run in those]
        label = those[0].method.label
        axis.errorbar(list(runs), *zip(*alphas), capsize=2, label=label, **method_style(label))
        rows += [{"method": run.method.label, "guidance": f"{run.guidance:g}", "T": f"{run.temperature:g}",
                  "pictures": run.count, "alpha": alpha, "+-": half} for run, (alpha, half) in zip(those, alphas)]
    axis.set(xlabel=name, ylabel="alpha")
    axis.legend(fontsize=6)
    section.text("With block conditioning and nothing truncated, which costs least: alpha is what is asked. A draft "
                 "that is verified given those before it is accepted at another rate (`table-1`).")
    section.figure(figure, f"Share of drafts accepted over the {name}, a curve for each method, with 95 % intervals")
    section.table(rows)


@item(ITEMS, "figure-13", "CSpD, Figure 13: acceptance over the guidance",
      lambda scope: sum(sweep(scope, "guidance").values(), []), quick=False)
def figure_13(report: ContinuousReport, section: Section) -> None:
    over(report, section, "guidance")


@item(ITEMS, "figure-14", "CSpD, Figure 14: acceptance over the temperature",
      lambda scope: sum(sweep(scope, "temperature").values(), []), quick=False)
def figure_14(report: ContinuousReport, section: Section) -> None:
    over(report, section, "temperature")


@item(ITEMS, "figure-15", "CSpD, Figure 15: how many tries resampling takes", lambda scope: scope.speculative)
def figure_15(report: ContinuousReport, section: Section) -> None:
    rows, (figure, ((axis,),)) = [], axes(1, 1, 5, 3.2)
    for name in FAMILIES:
        family_rows = []
        for run in report.scope.speculative:
            pictures = report.study.pictures(run)
            if run.method.name == name and len(pictures.num_tries):
                out = pictures.decoded.out_of_tries[pictures.decoded.acceptance == 0]
                family_rows.append({"method": run.method.label, "gamma": run.method.gamma, "resampled": len(out),
                                    "mean tries": pictures.num_tries.float().mean().item(),
                                    "median": pictures.num_tries.float().median().item(),
                                    "out of tries": out.float().mean().item(), "bound": run.method.max_tries})
        if family_rows:
            axis.plot(*zip(*((row["gamma"], row["mean tries"]) for row in family_rows)), label=name,
                      **method_style(name))
        rows += family_rows
    if not rows:
        section.text("No draft was rejected.")
        return
    over_gamma(axis, "mean tries of a resampled token", sorted({row["gamma"] for row in rows}))
    section.text("Out of tries: the share of resampled tokens that reached the bound; the token is then the target's "
                 "own sample (in the release, zero).")
    section.figure(figure, "Mean tries of a resampled token over gamma, a curve for each method")
    section.table(rows)


@item(ITEMS, "figure-16", "CSpD, Figure 16: acceptance over the picture", lambda scope: scope.speculative)
def figure_16(report: ContinuousReport, section: Section) -> None:
    side = round(report.study.num_tokens ** 0.5)
    figure, (line,) = axes(1, len(FAMILIES), 3.6, 3.2)
    rows = []
    for axis, name in zip(line, FAMILIES):
        runs = [run for run in report.scope.speculative if run.method.name == name]
        decoded = [report.study.pictures(run).decoded for run in runs]
        acceptance = torch.cat([torch.zeros_like(d.acceptance).scatter(1, d.order, d.acceptance)
                                for d in decoded])  # by position
        verified = (acceptance >= 0).sum(0)
        alpha = ((acceptance == 1).sum(0) / verified).view(side, side).numpy()
        image = axis.imshow(alpha, vmin=0, vmax=1, cmap="viridis")
        axis.set(xticks=[], yticks=[], title=f"{name}, {len(acceptance)} decodings")
        rows += [{"method": name, "row": i // side, "column": i % side, "verified": count, "alpha": value}
                 for i, (count, value) in enumerate(zip(verified.tolist(), alpha.flat)) if count]
    figure.colorbar(image, ax=line, label="alpha")
    section.text("All gamma of `table-1` together: the same pictures over and over, so that prompts weigh in it.")
    section.figure(figure, "A map for each method: the share of drafts accepted at each position of the picture")
    section.table(rows, csv_only=True)
