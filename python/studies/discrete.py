"""What a report on discrete tokens asks: how much is run, and the rows and scores that its items share."""
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from specvis.pipelines.discrete import Pipeline
from specvis.study.discrete import DiscreteStudy, Latency, PictureRun

from .base import (
    SMALL_CHANGE,
    Finding,
    Report,
    Scope,
    draw_until_decided,
    features,
    look_counts,
    mean_and_half,
    pixels,
    reference_pictures,
)
from .page import Section
from .quality import (
    GROUPS,
    MORE_SCORES,
    Baseline,
    Score,
    kernel_contrast,
    mean_and_error,
    nearest_names,
    network,
    quality,
)

LEAST_IMAGES = 12  # with about this many the kernel distance of the strongest relaxation exceeds the noise


PAPER_CODES = 16384  # of LlamaGen, in LANTERN's paper
TREES = "depth=5:width=10:nodes=60"  # of EAGLE-2, as LANTERN and ADT-Tree compare with it
EAGLE2 = f"eagle2:{TREES}"


MC_SIM = "lantern++:tree=mc_sim_7b_63"  # on EAGLE-1's tree, as COOL-SD compares with it


def lantern(k: int, delta: float, **others) -> str:
    """LANTERN with these parameters on its paper's trees, as the command line has it."""
    return f"lantern:{TREES}:k={k}:delta={delta:g}" + "".join(f":{key}={value}" for key, value in others.items())


@dataclass(frozen=True)
class DiscreteScope(Scope):
    """How much is run of discrete tokens."""

    most: int                    # pictures that a run may have for a claim
    timed: int                   # pictures of each latency
    curves: bool                 # does the trade-off have them?
    temperatures: tuple[float, ...]
    paper_k: tuple[int, ...]     # LANTERN's, as its paper has them
    delta: tuple[float, ...]     # LANTERN's
    omega: tuple[float, ...]     # COOL-SD's delta
    ratio: tuple[float, ...]     # LANTERN++'s lambda
    codes: int = PAPER_CODES     # of the model's codebook

    def own_k(self, k: int) -> int:
        """As large a part of the model's codebook as k is of LlamaGen's, and at most k."""
        return min(k, max(1, round(k * self.codes / PAPER_CODES)))

    @property
    def k(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(map(self.own_k, self.paper_k)))

    def about_k(self, *ks: int) -> str:
        """A sentence: our k beside these of the paper."""
        ours, theirs = (", ".join(map(str, those)) for those in (map(self.own_k, ks), ks))
        return f"Here k is {ours} of {self.codes} codes: as large a part as {theirs} of LlamaGen's {PAPER_CODES}."

    def baseline(self, temperature: float = 1.0) -> PictureRun:
        """Pictures that others are compared with. `jacobi` draws them: they are plain decoding's, token for token.

        Greedy ones do not differ by their seed: one a prompt.
        """
        count = max(look_counts(self.images, self.most)[-1], GROUPS * self.images) if temperature else self.images
        return PictureRun.of("jacobi", temperature, count=count)

    @property
    def grid(self) -> list[PictureRun]:
        """LANTERN over k and delta."""
        return [PictureRun.of(lantern(k, delta)) for k in self.k for delta in self.delta]

    @property
    def sweeps(self) -> list[PictureRun]:
        """The methods on static trees, over how much they relax."""
        names = ("uniform-rsd", "cool-sd")
        return [*(PictureRun.of(f"{name}:omega={omega:g}") for omega in self.omega for name in names),
                *(PictureRun.of(f"{MC_SIM}:delta={ratio:g}") for ratio in self.ratio)]


FULL = DiscreteScope(16, 16, 4, True, (0.0, 1.0), (100, 300, 1000), (0.05, 0.1, 0.2, 0.4), (1.1, 1.5, 2.0, 3.0),
                     (0.5, 1.0, 2.0, 4.0))
QUICK = DiscreteScope(12, 12, 1, False, (1.0,), (100, 1000), (0.1, 0.4), (1.1, 2.0), (1.0, 4.0))


def scope_of(quick: bool, images: int | None, timed: int | None, most: int | None, num_prompts: int) -> DiscreteScope:
    """The scope of a report, quick or full.

    Raises:
        ValueError: too few pictures for a score, or not every prompt equally often
    """
    scope = QUICK if quick else FULL
    scope = replace(scope, images=images or scope.images, timed=timed or scope.timed, most=most or scope.most)
    if scope.images < LEAST_IMAGES:
        raise ValueError(f"images must be at least {LEAST_IMAGES}, got {scope.images}: with fewer, baseline pictures "
                         "differ more by chance than the strongest relaxation makes them. The report says how many "
                         "would be needed to tell a method from the baseline")
    if scope.images > num_prompts and scope.images % num_prompts:
        raise ValueError(f"images must be at most {num_prompts} or a multiple of it, the number of prompts, "
                         f"got {scope.images}")
    return scope


@dataclass
class DiscreteReport(Report):
    """What the items on discrete tokens look at."""

    study: DiscreteStudy
    scope: DiscreteScope
    references: np.ndarray = field(kw_only=True)  # features of the pictures that the prompts name

    @staticmethod
    def of(pipeline: Pipeline, weights: Path, out: Path, scope: DiscreteScope, **settings) -> "DiscreteReport":
        """A report in `out`, whose runs are in `out`/runs.

        Raises:
            ValueError: `out` holds runs of another model, version or setting, or a package is missing
        """
        prompts, pictures = reference_pictures(weights)
        scope = replace(scope, codes=pipeline.gpt.config.vocabulary)
        study = DiscreteStudy(pipeline, out / "runs", prompts, images=scope.images, timed=scope.timed, **settings)
        references, _ = network()(pictures[:min(scope.images, len(prompts))])
        return DiscreteReport(study, scope, out, references=references)

    def quality(self, run: PictureRun) -> dict[str, Score]:
        """Distances to baseline pictures at the same temperature, and scores."""
        return self.once(("quality", run), lambda: self._quality(run))

    def _quality(self, run: PictureRun) -> dict[str, Score]:
        count = run.count or self.study.num_images
        baseline = self.scope.baseline(run.temperature)
        beside = self.once(("baseline", baseline), lambda: Baseline.of(features(self.study, baseline), count,
                                                                       self.references))
        scores = quality(features(self.study, run), beside, self.references)
        for name in MORE_SCORES:
            groups = self._more(name, baseline).reshape(-1, count).mean(1)
            scores[name] = Score.of(self._more(name, run).mean(), groups.tolist())
        return scores

    def _more(self, name: str, run: PictureRun) -> np.ndarray:
        """(n,) one of quality.MORE_SCORES."""
        prompts = self.study.prompts_of(run.start, run.count or self.study.num_images)
        def score():
            pictures = pixels(self.study, self.study.pictures(run).decoded.tokens)
            return np.asarray(MORE_SCORES[name](pictures, prompts), dtype=np.float64)

        return self.once((name, run), score)

    def tau(self, text: str, temperature: float = 1.0) -> float:
        return self.study.pictures(PictureRun.of(text, temperature)).tau

    def tv_excess(self, run: PictureRun) -> float:
        """Added total variation per token, estimated, of all its pictures."""
        return self.study.pictures(run).tv_excess.mean().item()

    def cells(self, run: PictureRun) -> dict:
        """What a table says of a run: tau, tv_excess and every score. No seconds: those are of single pictures."""
        return {"tau": self.study.pictures(run).tau, "nodes": run.method.max_nodes,
                "tv_excess": self.tv_excess(run)} | self.quality(run)

    def row(self, run: PictureRun) -> dict:
        """A run's row of a table."""
        return {"method": run.method.label, "T": f"{run.temperature:g}"} | self.cells(run)

    def speedup(self, run: PictureRun) -> float:
        """The speed of the run's method over the baseline's, in seconds of single pictures."""
        return self.latency_row(Latency(run.method, run.temperature))["speedup"]

    def latency_row(self, latency: Latency) -> dict:
        """Seconds of a picture. The speedup is the median of ratios of neighbors in time."""
        timings = self.study.seconds(latency)
        return {"method": latency.method.label, "T": f"{latency.temperature:g}",
                "seconds": float(np.mean(timings.method)), "+-": float(np.std(timings.method)),
                "baseline_seconds": float(np.mean(timings.baseline)), "speedup": float(np.median(timings.speedup)),
                "min": float(timings.speedup.min()), "max": float(timings.speedup.max()),
                "tau": float(np.mean(timings.tau)), "pictures": latency.batch * len(timings.tau)}

    def with_error(self, number: str, run: PictureRun) -> tuple[float, float]:
        """A number of a run, for a point with a bar: twice its standard error, or the noise of a distance."""
        if number in ("tau", "tv_excess"):
            return mean_and_half(torch.from_numpy(self.numbers(number, run)))
        score = self.quality(run)[number]
        return score.value, score.noise

    def contrast(self, number: str, weights: dict[str | PictureRun, float],
                 of: Callable[[PictureRun], np.ndarray] | None = None, **asked: float) -> Finding:
        """Is a weighted sum of runs' numbers above 0? Pictures are drawn until it is decided.

        number: "tau", "tv_excess", "mean depth" or "nearest name", which are means over pictures, or "kernel distance"
        of:     for another number: from a run its value (n,) of each picture, NaN for one that has none
        asked:  `least` or `margin` of `draw_until_decided`
        """
        runs = {PictureRun.of(run) if isinstance(run, str) else run: weight for run, weight in weights.items()}
        temperature, = {run.temperature for run in runs}

        def estimate(count: int) -> tuple[float, float, int]:
            these = {replace(run, count=count): weight for run, weight in runs.items()}
            self.study.compute(list(these), f"{self.at_work}, {number} of {count} pictures: ")
            if number == "kernel distance":
                return kernel_contrast([(weight, features(self.study, run)) for run, weight in these.items()],
                                       features(self.study, self.scope.baseline(temperature)))
            values = sum(weight * (of(run) if of else self.numbers(number, run)) for run, weight in these.items())
            drawn = np.flatnonzero(~np.isnan(values))
            if len(drawn) < 2:
                return 0.0, math.inf, 1
            return mean_and_error(values[drawn], drawn % len(self.study.prompts))

        most = min(self.scope.most, 2 * self.scope.most // len(runs))  # not many times as long for several runs
        return draw_until_decided(estimate, self.looks(self.scope.images, most, temperature), **asked)

    def numbers(self, number: str, run: PictureRun) -> np.ndarray:
        """(n,) a number of each picture of a run, NaN for one that failed."""
        pictures = self.study.pictures(run)
        values = (nearest_names(features(self.study, run), self.references) if number == "nearest name" else
                  {"tau": pictures.decoded.tau, "tv_excess": pictures.tv_excess, "mean depth": pictures.depths}[number]
                  .double().numpy())
        return np.where(pictures.decoded.failed, np.nan, values)

    def looks(self, first: int, most: int, temperature: float) -> list[int]:
        """The numbers of pictures that a claim is looked at with, not fewer than the tables have; greedy ones do not
        differ by their seed."""
        most = max(first, most) if temperature else min(max(first, most), len(self.study.prompts))
        return look_counts(min(first, most), most)

    def faster(self, a: str, b: str, temperature: float = 1.0) -> Finding:
        """Is a faster than b in seconds of single pictures, each beside the baseline's? Its `factor` is the ratio."""
        def estimate(count: int) -> tuple[float, float, int]:
            jobs = [replace(Latency.of(text, temperature), count=count) for text in (a, b)]
            self.study.compute(jobs, f"{self.at_work}, seconds of {count} pictures: ")
            ratios = np.log(self.study.seconds(jobs[0]).speedup / self.study.seconds(jobs[1]).speedup)
            return mean_and_error(ratios, np.zeros(count))

        counts = self.looks(max(8, self.scope.timed), self.scope.most // 3, temperature)  # of four, drift decides
        return draw_until_decided(estimate, counts, least=math.log1p(SMALL_CHANGE))

    def gain(self, a: str, b: str, *, margin: float | None = None, larger: bool = True) -> tuple[bool | None, str]:
        """Say whether a's tau is larger than b's at temperature 1, and put it in words.

        margin: another question, a share: is it nearer to b's than this?
        larger: False asks whether it is not larger
        """
        asked = {"least": SMALL_CHANGE} if margin is None else {"margin": margin}
        usual = self.tau(b)
        finding = self.contrast("tau", {a: 1.0, b: -1.0}, **{name: share * usual for name, share in asked.items()})
        tau = [self.study.pictures(PictureRun.of(text, count=finding.pictures)).tau for text in (a, b)]
        wanted = (f"within {margin:.0%}" if margin else f"above 0, {SMALL_CHANGE:.0%} or more measured" if larger else
                  f"less than {SMALL_CHANGE:.0%} more")
        holds = None if finding.holds is None else finding.holds == larger
        return holds, (f"tau {tau[0]:.2f} against {tau[1]:.2f}, {tau[0] / tau[1]:.2f} times: {finding} (asked: "
                       f"{wanted})")

    def noise(self, section: Section, runs: list[PictureRun]) -> None:
        """Write below a table of these runs what their scores can tell."""
        scores, count = self.quality(runs[0]), self.study.num_images
        parts = [f"{name} {score.baseline:.3g} +- {score.noise:.2g}" for name, score in scores.items()]
        chance = 0.05 * len(runs) * len(scores)
        text = (f"{count} baseline pictures beside the other baseline pictures: {'; '.join(parts)}. A star marks what "
                f"is outside; of that many numbers about {chance:.0f} would be by chance alone.")
        relaxed = [self.quality(run)["kernel distance"] for run in runs if not run.method.lossless]
        hidden = sorted(score.pictures_needed(count) for score in relaxed if not score.significant and score.effect)
        if hidden:
            text += (f" {len(hidden)} of {len(relaxed)} relaxed methods cannot be told from the baseline by the "
                     f"kernel distance of {count} pictures: half of them would need {hidden[len(hidden) // 2]} or "
                     "more.")
        section.text(text)

    def cover(self, command: str, origin: str) -> str:
        config, settings, scope = self.study.pipeline.gpt.config, self.study.settings, self.scope
        return "\n".join([
            "# The papers' tables and figures on our model", "",
            f"`{command}`", "",
            f"Runs: {origin}.", "",
            f"Model: {config.layers} layers of width {config.dim}, {config.vocabulary} codes, {config.tokens} tokens a "
            f"picture. {scope.images} pictures of each method, {scope.baseline().count} of the baseline, of "
            f"{len(self.study.prompts)} prompts; guidance {settings['guidance']:g}, top-k {settings['top_k']}, "
            f"top-p {settings['top_p']:g}. Seconds are of single pictures, {scope.timed} of each method; "
            "all other numbers are of pictures that were decoded in batches. A speed is the median of ratios to the "
            "baseline's seconds right before, not the ratio of two rows.", "",
            "The baseline is plain decoding, `vanilla`. Its pictures are drawn by `jacobi`, whose tokens are the "
            "same. Frechet and kernel distance are distances to these pictures, on features of an ImageNet "
            "network (EfficientNet-Lite0); the inception score is on its classes. Nearest name is the share of "
            "pictures whose features are nearer to their prompt's picture than to any other's. `tv_excess` is "
            "added total variation per token, estimated. CLIP score, HPSv2, ImageReward and the aesthetic "
            "predictor need weights that no package brings: not measured (`--score` takes them).", "",
            "An interval of 95 %, over pictures of these prompts, decides each claim. The claim agrees if the "
            "whole interval is on the side that the claim asks for, and does not agree if the whole interval is "
            "on the other side. If a row does not say what is asked, it asks for a number above 0; a gain below "
            f"{SMALL_CHANGE:.0%} in tau or in seconds counts as none. Pictures are drawn until the interval decides, "
            f"at most {look_counts(scope.images, scope.most)[-1]} of a method (`--most`), a third of this number for "
            "claims in seconds, and fewer for claims "
            "that compare more than two runs. The interval is corrected for looking again. Drawing stops early "
            "if the largest number of pictures would not decide; the row then estimates how many would. Each row "
            "names its number of pictures, so that its numbers may differ from the numbers in the tables.", "",
            "The papers' models have 0.8 to 7 billion parameters on GPUs, ours has millions on what is named above: "
            "only trends can agree. In their tables (python/studies/papers) `mark` says `restored` where a damaged "
            "text was mended from other places of the paper, and `contradicts` where the paper contradicts itself; a "
            "cell that the paper lacks is empty.", "",
            *self.links()])
