"""What a report on continuous tokens asks: how much is run, and the rows and comparisons that its items share."""
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.stats import t
from torch import Tensor

from specvis.decoding.methods import parse_method
from specvis.pipelines.mar import MARPair

from .base import Report, Scope, draw_until_decided, look_counts, reference_pictures
from .continuous_study import ContinuousRun, ContinuousStudy
from .page import Section
from .quality import mean_and_error

FAMILIES = ("cspd-released", "cspd", "cspd-path")
SUMMARY = ("Distribution", "Speed", "Parallel decoding")  # what items say on the first page


@dataclass(frozen=True)
class ContinuousScope(Scope):
    """How much is run of continuous tokens. A run's pictures are decoded as one batch."""

    few: int                         # images of a run whose target verifies each draft given those before it: costly
    most: int                        # images that decide a claim
    baseline_batches: int            # others are compared with these pictures
    parallel_batches: int
    gammas: dict[str, tuple[int, ...]]
    batch_sizes: tuple[int, ...]     # they are timed, for `timed_tokens` tokens of each image
    timed_tokens: int
    guidances: tuple[float, ...]
    temperatures: tuple[float, ...]
    known_shares: tuple[float, ...]  # tokens that the states know from which is drawn
    draws: int                       # each draws one token
    joint_draws: int                 # each draws JOINT_TOKENS tokens; 0: no such draws
    guidance: float = 2.5
    num_tokens: int = 256
    steps_last: int = 5              # denoising steps of the last tokens, where they fall

    def run(self, text: str, guidance: float | None = None, temperature: float = 1.0, draft_alone: bool = False
            ) -> ContinuousRun:
        method = parse_method(text)
        count = self.few if method.gamma and method.conditioning == "exact" else self.images
        return ContinuousRun(method, temperature, count, guidance=self.guidance if guidance is None else guidance,
                             batch=count, draft_alone=draft_alone)

    @property
    def baseline(self) -> ContinuousRun:
        """The pictures that others are compared with."""
        return replace(self.run("mar"), count=self.baseline_batches * self.images)

    @property
    def speculative(self) -> list[ContinuousRun]:
        """The runs of Table 1: each family with each gamma."""
        return [self.run(f"{name}:gamma={gamma}") for name in FAMILIES for gamma in self.gammas[name]]

    def middle(self, name: str) -> ContinuousRun:
        """The run of a family that other items look at."""
        usual = parse_method(name).gamma
        return self.run(f"{name}:gamma={min(self.gammas[name], key=lambda gamma: abs(gamma - usual))}")

    @property
    def middles(self) -> list[ContinuousRun]:
        return [self.middle(name) for name in FAMILIES]


FULL = ContinuousScope(4, 2, 16, 5, 2, {"cspd-released": (1, 2, 4, 8, 16, 32), "cspd": (1, 2, 4),
                                        "cspd-path": (1, 2, 4)},
                       (1, 8, 32), 8, (1.0, 4.0), (0.9, 1.05), (0.05, 0.25, 0.75), 4096, 128)
QUICK = ContinuousScope(2, 2, 2, 4, 2, {"cspd-released": (2, 8, 32), "cspd": (1,), "cspd-path": (1,)},
                        (1, 8), 8, (4.0,), (0.9,), (0.05, 0.5), 512, 0)


def scope_of(quick: bool, images: int | None, most: int | None, guidance: float | None) -> ContinuousScope:
    """The scope of a report, quick or full.

    Raises:
        ValueError: a single picture has no other to be compared with
    """
    scope = QUICK if quick else FULL
    scope = replace(scope, most=most or scope.most)
    if images is not None:
        if images < 2:
            raise ValueError(f"images must be at least 2 for continuous tokens, got {images}: distances are between "
                             "pictures of different prompts")
        scope = replace(scope, images=images, few=max(2, images // 2))
    return scope if guidance is None else replace(scope, guidance=guidance)


def alphas_of(acceptance: Tensor) -> np.ndarray:
    """(n,) the share of each picture's verified tokens (n, L) that is accepted."""
    return ((acceptance == 1).sum(1) / (acceptance >= 0).sum(1).clamp(min=1)).double().numpy()


@dataclass
class ContinuousReport(Report):
    """What the items on continuous tokens look at."""

    study: ContinuousStudy
    scope: ContinuousScope

    @staticmethod
    def of(pair: MARPair, weights: Path, out: Path, scope: ContinuousScope, *, seed: int = 0) -> "ContinuousReport":
        """A report in `out`, whose runs are in `out`/runs.

        Raises:
            ValueError: `out` holds runs of another model, version or setting
        """
        study = ContinuousStudy(pair, out / "runs", reference_pictures(weights)[0], seed=seed)
        return ContinuousReport(study, replace(scope, num_tokens=study.num_tokens), out)

    def speedup(self, run: ContinuousRun) -> float:
        """The speedup over the baseline at the same batch size and guidance, in seconds a picture."""
        return self.study.pictures(run.baseline).seconds_each / self.study.pictures(run).seconds_each

    def draft_cost(self, run: ContinuousRun) -> float:
        """c: the draft model's seconds of a token over the target's, at the batch size of `run`."""
        draft, target = (self.study.pictures(part).seconds_each
                         for part in (replace(run.baseline, draft_alone=True), run.baseline))
        return draft / target

    def row(self, run: ContinuousRun) -> dict:
        """A run's row of a table, with the columns that most tables have."""
        pictures, method = self.study.pictures(run), run.method
        alpha, half = pictures.alpha
        decoded = pictures.decoded
        return {"method": method.label, "guidance": f"{run.guidance:g}", "T": f"{run.temperature:g}",
                "pictures": run.count, "batch": run.batch, "verified": int((decoded.acceptance >= 0).sum()),
                "alpha": alpha if method.gamma else "", "+-": half if method.gamma else "", "tau": pictures.tau,
                "target_forwards": decoded.target_forwards.float().mean().item(),
                "draft_forwards": decoded.draft_forwards.float().mean().item(),
                "seconds": pictures.seconds_each, "speedup": self.speedup(run)}

    def table(self, section: Section, runs: list[ContinuousRun]) -> None:
        """The table of these runs, with a remark on pictures that failed."""
        section.table([self.row(run) for run in runs])
        failed = sum(int(self.study.pictures(run).decoded.failed.sum()) for run in runs)
        if failed:
            section.text(f"{failed} pictures ended early: a model's output was not finite.")

    @property
    def timing_error(self) -> float:
        """Half a 95 % interval of the ratio of two timings, relative: from the seconds of the baseline's batches."""
        seconds = [float(self.study.arrays(part)["seconds"]) for part in self.study.parts(self.scope.baseline)]
        return float(t.ppf(0.975, len(seconds) - 1)) * float(np.std(seconds, ddof=1) / np.mean(seconds)) * 2 ** 0.5

    def higher(self, a: ContinuousRun, b: ContinuousRun, start: int = 0) -> tuple[bool | None, str]:
        """Say whether a's alpha is above b's, of the tokens from number `start`, and put it in words."""
        def estimate(count: int) -> tuple[float, float, int]:
            runs = [replace(run, count=count) for run in (a, b)]
            self.study.compute(runs, f"{self.at_work}, alpha of {count} pictures: ")
            alphas[:] = (alphas_of(self.study.pictures(run).decoded.acceptance[:, start:]) for run in runs)
            return mean_and_error(alphas[0] - alphas[1], np.zeros(count))

        alphas = []
        most = self.scope.most * a.count // self.scope.images  # of costly runs fewer
        finding = draw_until_decided(estimate, look_counts(a.count, most))
        x, y = (values.mean() for values in alphas)
        return finding.holds, f"{a.method.label}: alpha {x:.3f} against {y:.3f}, {finding}"

    def cover(self, command: str, origin: str) -> str:
        scope = self.scope
        config, draft = self.study.pipeline.mar.config, self.study.pipeline.mar_draft.config
        return "\n".join([
            "# Speculative decoding of continuous tokens: CSpD's tables and figures on our MAR pair", "",
            f"`{command}`", "", f"Runs: {origin}.", "",
            *(f"- **{name}.** {self.results[name]}" for name in SUMMARY), "",
            f"Models: a MAR of {config.encoder_layers} + {config.decoder_layers} layers of width {config.dim}, a "
            f"draft model of {draft.encoder_layers} + {draft.decoder_layers} of width {draft.dim}; {config.tokens} "
            f"tokens of {config.channels} numbers a picture, {len(self.study.pipeline.mar.diffloss.schedule)} "
            f"denoising steps. {scope.images} pictures a run, {scope.few} where each draft is verified given those "
            f"before it, {scope.baseline.count} of the baseline, which is `mar`: a token a target forward; guidance "
            f"{scope.guidance:g} where nothing else is said. Where an interval of 95 % leaves it open whether a method "
            f"accepts more, up to {scope.most} pictures decide (`--most`; half as many of the costly ones), corrected "
            "for looking again.", "",
            "The paper's models have 0.2 to 0.9 billion parameters on GPUs at batch 1 to 256, ours are small and on "
            "what is named above: what can agree is a trend. Its tables are in python/studies/papers.", "",
            *self.links()])
