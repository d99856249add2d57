"""The study of continuous tokens: whole pictures, seconds at a batch size, draws from one state, and what a report asks
of them."""
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..decoding.continuous import (
    ContinuousDecoded,
    ContinuousSampling,
    GuidedMAR,
    KnownTokens,
    Progress,
    continuous_decode,
)
from ..decoding.methods import ContinuousMethod, parse_method
from ..files import write_whole
from ..models.mar import MAR
from ..pipelines.mar import MARPair
from .base import Report, Run, Scope, Study, decided, reference_pictures
from .cache import read_arrays
from .distances import DISTANCES, SURE
from .page import Section

ROWS = 512         # draws of one state side by side
MIN_SECONDS = 2.0  # what takes less is timed again
FAMILIES = ("cspd-released", "cspd", "cspd-path")
JOINT_TOKENS = 4   # tokens drawn jointly
T_QUANTILE = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # of Student's t, 97.5 %, by the number of batches timed


@dataclass(frozen=True)
class ContinuousRun(Run):
    """A run whose pictures are decoded in batches of `batch`, with the seconds of each batch."""

    batch: int = field(kw_only=True)
    draft_alone: bool = False  # by the draft model, without the target

    @property
    def baseline(self) -> "ContinuousRun":
        """A batch of the same size and guidance, a token a target forward."""
        return ContinuousRun(parse_method("mar"), count=self.batch, guidance=self.guidance, batch=self.batch)


@dataclass(frozen=True)
class TokenTiming:
    """The seconds of `num_new` tokens behind the first `num_known` of `batch` images: those of `source`, over and
    over."""

    method: ContinuousMethod
    source: ContinuousRun
    batch: int
    num_known: int
    num_new: int


@dataclass(frozen=True)
class Draws:
    """`count` independent draws of the `num_new` tokens behind the first `num_known` of a picture of `source`."""

    method: ContinuousMethod
    source: ContinuousRun
    num_known: int
    num_new: int
    count: int
    picture: int = 0
    draft_alone: bool = False
    repeat: int = 0  # another set of the same kind


Job = ContinuousRun | TokenTiming | Draws


@dataclass
class Pictures:
    """What a run gave, and the seconds of all its batches."""

    decoded: ContinuousDecoded
    seconds: float

    @property
    def seconds_each(self) -> float:
        return self.seconds / len(self.decoded.tokens)

    @property
    def alpha(self) -> tuple[float, float]:
        return share(self.decoded.acceptance == 1, self.decoded.acceptance >= 0)

    @property
    def tau(self) -> float:
        return self.decoded.tau.nanmean().item()

    @property
    def num_tries(self) -> Tensor:
        """(rejections,) how many tries the resampling of each rejected token took."""
        return self.decoded.num_tries[self.decoded.acceptance == 0]


def share(is_accepted: Tensor, is_verified: Tensor) -> tuple[float, float]:
    """How much of what was verified is accepted, with half a 95 % interval; NaN where nothing was verified.

    The interval is binomial, of the tokens of these pictures: other pictures may differ by more.
    """
    count, total = is_accepted.sum().item(), is_verified.sum().item()
    return (count / total, half_interval(count, total)) if total else (math.nan, math.nan)


def half_interval(count: float, total: float) -> float:
    """Half a 95 % interval of the share count / total (Agresti and Coull: not 0 where all or nothing is counted)."""
    middle = (count + 2) / (total + 4)
    return 1.96 * (middle * (1 - middle) / (total + 4)) ** 0.5


class DeduplicatedMAR:
    """A MAR that computes equal rows of a forward once: requests in the same state cost as much as one."""

    def __init__(self, mar: MAR):
        self.mar, self.config, self.diffloss = mar, mar.config, mar.diffloss
        self.condition, self.null_condition, self.pack = mar.condition, mar.null_condition, mar.pack

    def __call__(self, tokens: Tensor, is_known: Tensor, condition: Tensor, max_known: int | None,
                 wanted: Tensor) -> Tensor:
        tokens = tokens.masked_fill(~is_known[..., None], 0.0)
        rows = torch.cat([part.flatten(1).float() for part in (tokens, is_known, condition, wanted)], 1)
        _, which = rows.unique(dim=0, return_inverse=True)
        one = torch.zeros(which.max() + 1, dtype=torch.int64, device=which.device)
        one[which] = torch.arange(len(which), device=which.device)  # any of the equal rows
        return self.mar(tokens[one], is_known[one], condition[one], max_known, wanted[one])[which]


class ContinuousStudy(Study):
    """Runs of one pair with the same prompts and seeds; each is computed once and kept in `folder`."""

    def __init__(self, pair: MARPair, folder: str | Path, prompts: list[str], *, seed: int = 0):
        """
        Raises:
            ValueError: the folder holds runs of another model, version or setting; or the pair has no drafter
        """
        pair.check(parse_method("cspd"))
        self.captions = pair.features(prompts)  # (P, S, caption_dim)
        self.device, self.num_tokens = pair.device, pair.num_tokens
        super().__init__(pair, folder, prompts, seed, [
            pair.mar.config, pair.mar_draft.config, pair.tokenizer.config, pair.scaling,
            pair.words and pair.words.vocabulary])

    def parts(self, job: Job) -> list[Job]:
        if not isinstance(job, Run):
            return [job]
        end = job.start + job.count
        return [replace(job, start=start, count=min(job.batch, end - start))
                for start in range(job.start, end, job.batch)]

    def key(self, job: Job) -> list:
        return [type(job).__name__, *super().key(job), self.machine]

    def suffix(self, job: Job) -> str:
        return "npz"

    def title(self, job: Job) -> str:
        label = f"{job.method.label}{' by the draft model alone' * getattr(job, 'draft_alone', False)}"
        if isinstance(job, Run):
            return f"{label}, guidance {job.guidance:g}, T = {job.temperature:g}"
        if isinstance(job, TokenTiming):
            return f"{label}, {job.num_new} tokens of {job.batch} images"
        return f"{label}, {job.count} draws of one state"

    def cost(self, job: Job) -> float:
        run = job if isinstance(job, Run) else job.source
        rows = job.batch if isinstance(job, TokenTiming) else job.count
        tokens = self.num_tokens if isinstance(job, Run) else job.num_new
        factor = 0.3 if getattr(job, "draft_alone", False) else 1.0
        return factor * estimated_seconds(job.method, run.guidance, rows, tokens, self.num_tokens,
                                          deduplicated=isinstance(job, Draws))

    def make(self, job: Job, progress: Callable[[float], None]) -> None:
        """progress: called with the share of the job that was just done"""
        if isinstance(job, Run):
            self._decode(job, progress)
        elif isinstance(job, TokenTiming):
            self._time(job)
            progress(1)
        else:
            self._draw(job, progress)

    # --- what was computed ---------------------------------------------------------------------------------------

    def arrays(self, job: Job) -> dict[str, np.ndarray]:
        """What a job left, computed now if it was not before."""
        shapes = self._shapes(job)
        return self.read_or_make(self.path(job), lambda path: read_arrays(path, shapes),
                         lambda: self.make(job, lambda share: None))

    def _shapes(self, job: Job) -> dict[str, tuple[int | None, ...]]:
        """Of the arrays that a job leaves."""
        L, C = self.num_tokens, self.pipeline.mar.config.channels
        if isinstance(job, TokenTiming):
            return {"seconds": (None,)}
        if isinstance(job, Draws):
            return {"samples": (job.count, job.num_new * C), "acceptance": (job.count, job.num_new),
                    "target_forwards": (job.count,)}
        each, by_position = ("target_forwards", "draft_forwards", "failed"), ("tokens", "drafts")
        return {"seconds": ()} | {
            field.name: (job.count, *(() if field.name in each else (L,)), *((C,) if field.name in by_position else ()))
            for field in fields(ContinuousDecoded) if field.name != "num_drawn"}

    def pictures(self, run: ContinuousRun) -> Pictures:
        if run not in self.loaded:
            parts = [self.arrays(part) for part in self.parts(run)]
            values = {field.name: torch.from_numpy(np.concatenate([part[field.name] for part in parts]))
                      for field in fields(ContinuousDecoded) if field.name != "num_drawn"}
            self.loaded[run] = Pictures(ContinuousDecoded(**values, num_drawn=self.num_tokens),
                                        sum(float(part["seconds"]) for part in parts))
        return self.loaded[run]

    def token_seconds(self, job: TokenTiming) -> float:
        """Seconds a token of one image, the median of as many times as were enough."""
        return float(np.median(self.arrays(job)["seconds"])) / (job.batch * job.num_new)

    def draws(self, job: Draws) -> tuple[Tensor, tuple[float, float], float]:
        """Samples (count, num_new * C), alpha with its interval, and target forwards a draw."""
        arrays = self.arrays(job)
        acceptance = torch.from_numpy(arrays["acceptance"])
        return (torch.from_numpy(arrays["samples"]), share(acceptance == 1, acceptance >= 0),
                float(arrays["target_forwards"].mean()))

    def last_steps(self, job: Draws, count: int = 256) -> tuple[float, float]:
        """How far apart the target's and the draft's last denoising steps take the draft's x_1: rms over numbers and
        `count` paths, beside the rms of the tokens' own spread. For the first token of the state of `job`."""
        known, prompt = self._state(job, 1)
        generator = torch.Generator().manual_seed(self.seed)
        mar, request = self.pipeline.mar, torch.zeros(1, dtype=torch.int64, device=self.device)
        noise = torch.randn(count, len(mar.diffloss.schedule), mar.config.channels, generator=generator)
        num_unknown = torch.full((count,), self.num_tokens - job.num_known - 1, device=self.device)
        sampling = ContinuousSampling(torch.zeros_like(request), job.source.guidance)
        positions = known.order[:, job.num_known:job.num_known + 1]
        with torch.inference_mode():
            target, draft = (
                model.denoiser(model.z(known.tokens, known.is_known, positions, request, job.num_known)[0].expand(
                    count, -1, -1), num_unknown)
                for model in (GuidedMAR(part, self.captions[[prompt]], sampling)
                              for part in (mar, self.pipeline.mar_draft)))
            path = draft.sample(noise.to(self.device), keep_path=True).path
            gap = target.transition(path[:, 1], 1)[0] - path[:, 0]
        return gap.square().mean().sqrt().item(), path[:, 0].var(0).mean().sqrt().item()

    # --- computing it --------------------------------------------------------------------------------------------

    def decode(self, method: ContinuousMethod, sampling: ContinuousSampling, prompts: Tensor,
               draft_alone: bool = False, progress: Progress | None = None, known: KnownTokens | None = None,
               wrap: Callable = lambda mar: mar) -> ContinuousDecoded:
        """prompts (B,) int64; wrap: is called with either model, and gives the one that is used"""
        target = wrap(self.pipeline.mar_draft if draft_alone else self.pipeline.mar)
        return continuous_decode(target, wrap(self.pipeline.mar_draft), self.captions[prompts], sampling, method,
                                 progress, known)

    def timed(self, method: ContinuousMethod, *arguments, known: KnownTokens, **others
              ) -> tuple[ContinuousDecoded, float]:
        """Decode, and the seconds of it, after two tokens that are thrown away: memory is touched, libraries load."""
        warm_up = replace(method, num_iter=0, prefill=0.0)
        self.decode(warm_up, *arguments, known=replace(known, num_new=2), **others | {"progress": None})
        start = time.perf_counter()
        decoded = self.decode(method, *arguments, known=known, **others)  # it ends on the CPU
        return decoded, time.perf_counter() - start

    def _decode(self, run: ContinuousRun, progress: Callable[[float], None]) -> None:
        B, L = run.count, self.num_tokens
        which = torch.arange(run.start, run.start + B, device=self.device)
        nothing = KnownTokens(torch.zeros(B, L, self.pipeline.mar.config.channels, device=self.device),
                              torch.zeros(B, L, dtype=torch.bool, device=self.device))
        decoded, seconds = self.timed(
            run.method, ContinuousSampling(self.seed + which, run.guidance, run.temperature),
            which % len(self.prompts), run.draft_alone, progress=lambda new: progress(new / (B * L)), known=nothing)
        arrays = {field.name: getattr(decoded, field.name).numpy() for field in fields(ContinuousDecoded)
                  if field.name != "num_drawn"}
        write_whole(self.path(run), lambda file: np.savez_compressed(file, **arrays, seconds=seconds))

    def _time(self, job: TokenTiming) -> None:
        decoded = self.pictures(job.source).decoded
        which = torch.arange(job.batch) % len(decoded.tokens)
        is_known = decoded.order.argsort(1)[which] < job.num_known
        known = KnownTokens(decoded.tokens[which].to(self.device), is_known.to(self.device), job.num_new,
                            decoded.order[which].to(self.device))
        sampling = ContinuousSampling(self.seed + torch.arange(job.batch, device=self.device), job.source.guidance)
        prompts, seconds = which.to(self.device) % len(self.prompts), []
        while sum(seconds) < MIN_SECONDS:
            seconds.append(self.timed(job.method, sampling, prompts, known=known)[1])
        write_whole(self.path(job), lambda file: np.savez(file, seconds=seconds))

    def _state(self, job: Draws, rows: int) -> tuple[KnownTokens, int]:
        """The state that is drawn from, `rows` times, and its prompt."""
        decoded = self.pictures(job.source).decoded
        tokens, order = (part[job.picture].to(self.device).expand(rows, *part.shape[1:])
                         for part in (decoded.tokens, decoded.order))
        return (KnownTokens(tokens, order.argsort(1) < job.num_known, job.num_new, order),
                (job.source.start + job.picture) % len(self.prompts))

    def _first_seed(self, job: Draws) -> int:
        """Sets of draws are independent: each has seeds of its own, which count on from a digest of what it is."""
        settings = (self.seed, job.method.label, job.source.guidance, job.num_known, job.num_new, job.count,
                    job.picture, job.draft_alone, job.repeat)
        return int.from_bytes(hashlib.sha256(repr(settings).encode()).digest()[:6], "little")

    def _draw(self, job: Draws, progress: Callable[[float], None]) -> None:
        first, parts = self._first_seed(job), []
        for rows in torch.arange(job.count, device=self.device).split(ROWS):
            known, prompt = self._state(job, len(rows))
            sampling = ContinuousSampling(first + rows, job.source.guidance)
            decoded = self.decode(job.method, sampling, torch.full_like(rows, prompt), job.draft_alone, known=known,
                                  wrap=DeduplicatedMAR)
            new = slice(job.num_known, job.num_known + job.num_new)
            positions = decoded.order[:, new, None].expand(-1, -1, decoded.tokens.shape[2])
            parts.append((decoded.tokens.gather(1, positions).flatten(1), decoded.acceptance[:, new],
                          decoded.target_forwards))
            progress(len(rows) / job.count)
        samples, acceptance, target_forwards = (torch.cat(part).numpy() for part in zip(*parts))
        write_whole(self.path(job), lambda file: np.savez(file, samples=samples, acceptance=acceptance,
                                                         target_forwards=target_forwards))


def estimated_seconds(method: ContinuousMethod, guidance: float, rows: int, tokens: int, num_tokens: int,
                      deduplicated: bool = False) -> float:
    """About how many seconds of two processor cores `tokens` of `num_tokens` take, for the estimate of what is left."""
    copies = 1 if guidance == 1 else 2
    forward = 0.01 * copies * rows * (0.5 if deduplicated else 1) * (tokens > 1 or not deduplicated)
    denoising = 0.03 + 0.00125 * copies * rows
    if not method.gamma:
        return (method.num_iter or tokens) * (forward + denoising)
    prefill = 0 if deduplicated else min(tokens, round(method.prefill * num_tokens))
    steps = (tokens - prefill) / (1.3 if method.truncate else method.gamma)
    variants = method.gamma + method.truncate if method.conditioning == "exact" else 1
    paths = 12 if method.variant == "path" else 0.5
    resampled = rows * min(method.gamma, tokens, 1 if method.truncate else 4)
    return (prefill * (forward + denoising)
            + steps * (method.gamma * (forward / 4 + denoising) + variants * forward + denoising
                       + paths * 0.00125 * copies * resampled))


@dataclass(frozen=True)
class ContinuousScope(Scope):
    """How much is run of continuous tokens. A run's pictures are decoded as one batch."""

    few: int                         # images of a run whose target verifies each draft given those before it: costly
    baseline_batches: int            # that pictures are compared with
    parallel_batches: int            # of each parallel decoding
    gammas: dict[str, tuple[int, ...]]
    batch_sizes: tuple[int, ...]     # that are timed, for `timed_tokens` tokens of each image
    timed_tokens: int
    guidances: tuple[float, ...]
    temperatures: tuple[float, ...]
    known_shares: tuple[float, ...]  # of known tokens of the states that are drawn from
    draws: int                       # of one token
    joint_draws: int                 # of JOINT_TOKENS tokens; 0: none
    guidance: float = 2.5
    num_tokens: int = 256            # of an image
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


FULL = ContinuousScope(4, 2, 5, 2, {"cspd-released": (1, 2, 4, 8, 16, 32), "cspd": (1, 2, 4), "cspd-path": (1, 2, 4)},
                       (1, 8, 32), 8, (1.0, 4.0), (0.9, 1.05), (0.05, 0.25, 0.75), 4096, 128)
QUICK = ContinuousScope(2, 2, 4, 2, {"cspd-released": (2, 8, 32), "cspd": (4,), "cspd-path": (4,)},
                        (1, 8), 8, (4.0,), (0.9,), (0.05, 0.5), 512, 0)


def scope_of(quick: bool, images: int | None, guidance: float | None) -> ContinuousScope:
    """The scope of a report, quick or full.

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
        return T_QUANTILE[len(seconds)] * float(np.std(seconds, ddof=1) / np.mean(seconds)) * 2 ** 0.5

    def higher(self, a: ContinuousRun, b: ContinuousRun, start: int = 0) -> tuple[bool | None, str]:
        """Say whether a's alpha is above b's, of the tokens from number `start`, and the numbers of it."""
        acceptance = [self.study.pictures(run).decoded.acceptance[:, start:] for run in (a, b)]
        (x, half_x), (y, half_y) = (share(part == 1, part >= 0) for part in acceptance)
        half = float(np.hypot(half_x, half_y))
        return decided(x - y, half), f"{a.method.label}: alpha {x:.3f} against {y:.3f}, {x - y:+.3f} +- {half:.3f}"

    def cover(self, command: str, origin: str) -> str:
        scope, results = self.scope, self.results
        config, draft = self.study.pipeline.mar.config, self.study.pipeline.mar_draft.config
        joint = ""
        if scope.joint_draws:
            joint = f" Of {JOINT_TOKENS} tokens jointly: {distributions_kept(results['several'])}"
        return "\n".join([
            "# Speculative decoding of continuous tokens: CSpD's tables and figures on our MAR pair", "",
            f"`{command}`", "", f"Runs: {origin}.", "",
            f"- **Distribution.** Of the next token: {distributions_kept(results['distribution'])}{joint}",
            f"- **Speed.** {speed(results['table-1'])}",
            f"- **Parallel decoding.** {against_parallel(results['parallel'])}", "",
            f"Models: a MAR of {config.encoder_layers} + {config.decoder_layers} layers of width {config.dim}, a "
            f"drafter of {draft.encoder_layers} + {draft.decoder_layers} of width {draft.dim}; {config.tokens} tokens "
            f"of {config.channels} numbers a picture, {len(self.study.pipeline.mar.diffloss.schedule)} denoising "
            f"steps. {scope.images} pictures a run, {scope.few} where each draft is verified given those before it, "
            f"{scope.baseline.count} of the baseline, which is `mar`: a token a target forward; guidance "
            f"{scope.guidance:g} where nothing else is said.", "",
            "The paper's models have 0.2 to 0.9 billion parameters on GPUs at batch 128 and 256, ours are small and on "
            "what is named above: what can agree is a trend. Of the paper's numbers only the speedups of its Table 1 "
            "were at hand, with its range of alpha and its c; a cell that could not be read is not filled in.", "",
            *self.links()])


# --- the summary, from rows alone --------------------------------------------------------------------------------

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
    power = "" if differs(draft) else (" The draft model alone cannot be told from the target either: these draws are "
                                       "too few to decide anything.")
    return (f"no difference from the target is found in {rows[0]['draws']} draws for: {named(same)}. The distribution "
            f"is changed by: {named(other)}. (In brackets the {' and the '.join(DISTANCES)} above chance, in "
            f"standard deviations of chance.){power}")


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
