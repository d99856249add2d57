"""Speculative decoding beside MAR's own parallel decoding, and with fewer denoising steps (DiSA)."""
from dataclasses import replace

import numpy as np

from specvis.study.plots import method_style

from . import papers
from .base import Item, features, item
from .continuous import ContinuousReport, ContinuousRun, ContinuousScope
from .cspd import baselines, gallery
from .distances import SampleDistance
from .page import Section, axes, label
from .quality import kernel_distance

ITEMS: dict[str, Item] = {}
SPLITS = 200  # the noise of a distance is taken from this many splits of the baseline's pictures


def parallel_runs(scope: ContinuousScope) -> list[ContinuousRun]:
    return [replace(scope.run(f"mar:num_iter={scope.num_tokens // d}"), count=scope.parallel_batches * scope.images)
            for d in (16, 8, 4, 2)]


def kernel_distances(report: ContinuousReport, run: ContinuousRun) -> SampleDistance:
    """The kernel distance of a run's first pictures to baseline pictures of other prompts, beside that of the
    baseline's own first ones: the same prompts and seeds. Its noise is that of random splits of the baseline's."""
    pictures, baseline = features(report.study, run), features(report.study, report.scope.baseline)
    rng, chance = np.random.default_rng(0), []
    count = min(len(pictures), len(baseline) // 2)
    for _ in range(SPLITS):
        order = rng.permutation(len(baseline))
        chance.append(kernel_distance(baseline[order[:count]], baseline[order[count:]]))
    return SampleDistance(kernel_distance(pictures[:count], baseline[count:]),
                          kernel_distance(baseline[:count], baseline[count:]), float(np.std(chance, ddof=1)))


def distance_and_speed(report: ContinuousReport, runs: list[ContinuousRun]) -> list[dict]:
    """A row for each run: what it takes, and the kernel distance of its pictures beside the baseline's own."""
    rows = []
    for run in runs:
        distance, usual = kernel_distances(report, run), report.row(run)
        rows.append({"method": run.method.label, "speculative": "yes" if run.method.gamma else "no"}
                    | {name: usual[name] for name in ("pictures", "batch", "tau", "target_forwards", "seconds",
                                                      "speedup")}
                    | {"kernel distance": distance.value, "baseline": distance.chance, "+-": 2 * distance.spread,
                       "deviations": distance.deviations})
    return rows


def parallel_figure(rows: list[dict]):
    """Speedup against kernel distance above the baseline's own."""
    figure, ((axis,),) = axes(1, 1, 6, 4)
    for row in rows:
        point = row["speedup"], row["kernel distance"] - row["baseline"]
        axis.errorbar(*point, row["+-"], ms=5, elinewidth=0.5, capsize=2, **method_style(row["method"]))
        label(axis, row["method"], point)
    axis.axhline(0, color="gray", lw=1, label="baseline")
    axis.set(xlabel="speedup over the baseline at the same batch size, seconds",
             ylabel="kernel distance above the baseline's own", xscale="log")
    axis.legend(fontsize=7)
    return figure


def against_parallel(rows: list[dict]) -> str:
    """Say which speculative runs lose: a parallel one is as fast, and by its pictures not shown to be further from the
    baseline."""
    speculative, others = ([row for row in rows if row["speculative"] == which] for which in ("yes", "no"))

    def above(row):
        return row["kernel distance"] - row["baseline"]

    def beaten(row):
        return any(other["speedup"] >= row["speedup"]
                   and above(other) <= above(row) + float(np.hypot(row["+-"], other["+-"])) for other in others)

    left = [row["method"] for row in speculative if not beaten(row)]
    best = max(speculative, key=lambda row: row["speedup"])
    same = [row for row in others if above(row) <= row["+-"]]
    text = (f"For {len(speculative) - len(left)} of {len(speculative)} speculative runs there is a parallel decoding "
            "that is as fast or faster, and that so few pictures do not show to be further from the baseline"
            + (f"; not for {', '.join(left)}. " if left else ". "))
    if same:
        first = max(same, key=lambda row: row["speedup"])
        text += (f"The fastest parallel decoding whose pictures cannot be told from the baseline's is "
                 f"{first['method']}, {first['speedup']:.2f} times the baseline's speed; ")
    else:
        text += "Every parallel decoding can be told from the baseline by its pictures; "
    return text + f"the fastest speculative run is {best['method']}, {best['speedup']:.2f} times."


@item(ITEMS, "parallel", "Speculative against MAR's own parallel decoding", lambda scope: [
    scope.baseline, *baselines(scope.speculative), *parallel_runs(scope), *scope.speculative], uses_network=True)
def parallel(report: ContinuousReport, section: Section) -> None:
    study, scope = report.study, report.scope
    rows = distance_and_speed(report, [*parallel_runs(scope), *scope.speculative])
    report.results["Parallel decoding"] = against_parallel(rows)
    section.text("MAR draws several tokens a forward by itself, independently given the known ones "
                 "(`mar:num_iter=...`). Kernel distance (features of an ImageNet network) is to baseline pictures of "
                 f"other prompts, of {scope.baseline.count} in all; `baseline` is that of the baseline's own pictures "
                 "of the same prompts and seeds, `+-` twice the standard deviation over random splits of the "
                 "baseline's. With so few pictures only large differences show: `distribution` has what sets of tokens "
                 "tell. Speedups are against the baseline at the run's own batch size.")
    section.table(rows)
    section.figure(parallel_figure(rows), "Kernel distance to baseline pictures, above the baseline's own, over the "
                                          "speedup in seconds, a point for each run; bars are two standard deviations "
                                          "of chance")
    runs = [scope.run("mar"), *parallel_runs(scope)[::-1], *scope.middles]
    section.figure(gallery(study, {run.method.label: study.pictures(run).decoded.tokens[:scope.few] for run in runs}),
                   "Pictures, each row is a prompt and a seed, each column a method", "-pictures")
    section.text(report.results["Parallel decoding"])
    speculative, others = ([row for row in rows if row["speculative"] == which] for which in ("yes", "no"))
    faster = [row for row in speculative if any(other["target_forwards"] >= row["target_forwards"]
                                                and other["speedup"] > row["speedup"] for other in others)]
    max_forwards = max(other["target_forwards"] for other in others)
    asked = [row for row in speculative if row["target_forwards"] <= max_forwards]
    section.claim("parallel decoding in as many target forwards is faster (the author, in the repository's issue 1)",
                  len(faster) == len(asked) if asked else None,
                  f"for {len(faster)} of the {len(asked)} speculative runs of at most {max_forwards:.0f} target "
                  "forwards a parallel decoding of as many or more is faster")


def few_steps_runs(scope: ContinuousScope) -> list[ContinuousRun]:
    """MAR's own decoding with the model's number of denoising steps and with ever fewer, in pairs."""
    def run(text):
        return replace(scope.run(text), count=scope.parallel_batches * scope.images)

    settings = ["mar", *(f"mar:num_iter={scope.num_tokens // d}" for d in (4, 16))]
    return [run(text + more) for text in settings for more in ("", f":steps_last={scope.steps_last}")]


@item(ITEMS, "disa", "Fewer denoising steps for later tokens (DiSA)",
      lambda scope: [scope.baseline, *baselines(few_steps_runs(scope)), *few_steps_runs(scope)], uses_network=True)
def disa(report: ContinuousReport, section: Section) -> None:
    study, scope = report.study, report.scope
    runs = few_steps_runs(scope)
    rows = distance_and_speed(report, runs)
    section.text("The number of denoising steps falls linearly from the model's own in the first iteration to "
                 f"{scope.steps_last} in the last one (`steps_last`), because later tokens have less left to decide. "
                 "Kernel distance and its noise are as in `parallel`. The same seeds denoise other noise when "
                 "there are fewer steps, so the pictures of a seed differ.")
    section.table(rows)
    section.figure(gallery(study, {run.method.label: study.pictures(run).decoded.tokens[:scope.few] for run in runs}),
                   "Pictures, each row is a prompt and a seed, each column a method", "-pictures")
    gains = [few["speedup"] / own["speedup"] for own, few in zip(rows[::2], rows[1::2])]
    shifts = [few["kernel distance"] - own["kernel distance"] for own, few in zip(rows[::2], rows[1::2])]
    noise = max(row["+-"] for row in rows)
    least, most = (papers.value("records", "figure", method="DiSA", model="MAR, Harmon", statistic=which)
                   for which in ("minimum", "maximum"))
    section.claim(f"fewer denoising steps for later tokens are faster without a loss that shows (DiSA: {least:g} to "
                  f"{most:g} times on MAR; the abstract)",
                  None if max(shifts) <= noise else False,
                  f"{min(gains):.2f} to {max(gains):.2f} times as fast as with all steps; the kernel distance changes "
                  f"by {min(shifts):+.4f} to {max(shifts):+.4f}, noise {noise:.4f}")
