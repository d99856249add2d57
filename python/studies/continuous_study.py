"""The study of continuous tokens: whole pictures, seconds at a batch size, and draws from one state."""
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specvis.decoding.continuous import continuous_decode
from specvis.decoding.continuous_state import ContinuousDecoded, ContinuousSampling, KnownTokens
from specvis.decoding.decoded import Progress
from specvis.decoding.methods import ContinuousMethod, parse_method
from specvis.models.mar import MAR
from specvis.pipelines.mar import MARPair
from specvis.study.discrete import PictureRun
from specvis.study.jobs import Arrays, ArrayShapes, Job, Study

ROWS = 512         # draws of one state side by side
MIN_SECONDS = 2.0  # a shorter timing is repeated
SAVED = [field.name for field in fields(ContinuousDecoded) if field.name != "num_drawn"]


class ContinuousJob(Job):
    """A job of either model of a pair."""

    draft_alone = False

    @property
    def label(self) -> str:
        return f"{self.method.label}{' by the draft model alone' * self.draft_alone}"


@dataclass(frozen=True)
class ContinuousRun(ContinuousJob, PictureRun):
    """A run whose pictures are decoded in batches of `batch`, with the seconds of each batch."""

    batch: int = field(kw_only=True)
    draft_alone: bool = False  # the draft model decodes, without the target

    @property
    def baseline(self) -> "ContinuousRun":
        """A batch of the same size and guidance, a token a target forward."""
        return ContinuousRun(parse_method("mar"), count=self.batch, guidance=self.guidance, batch=self.batch)

    def title(self, study: "ContinuousStudy") -> str:
        return f"{self.label}, guidance {self.guidance:g}, T = {self.temperature:g}"

    def cost(self, study: "ContinuousStudy") -> float:
        return estimated_seconds(self, self.guidance, self.count, study.num_tokens, study.num_tokens)

    def shapes(self, study: "ContinuousStudy") -> ArrayShapes:
        L, C = study.num_tokens, study.pipeline.mar.config.channels
        each, by_position = ("target_forwards", "draft_forwards", "failed"), ("tokens", "drafts")
        return {"seconds": ()} | {name: (self.count, *(() if name in each else (L,)),
                                         *((C,) if name in by_position else ())) for name in SAVED}

    def arrays(self, study: "ContinuousStudy", progress: Callable[[float], None]) -> Arrays:
        B, L, device = self.count, study.num_tokens, study.device
        which = torch.arange(self.start, self.start + B, device=device)
        nothing = KnownTokens(torch.zeros(B, L, study.pipeline.mar.config.channels, device=device),
                              torch.zeros(B, L, dtype=torch.bool, device=device))
        decoded, seconds = study.timed(
            self.method, ContinuousSampling(study.seed + which, self.guidance, self.temperature),
            which % len(study.prompts), self.draft_alone, progress=lambda new: progress(new / (B * L)), known=nothing)
        return {name: getattr(decoded, name).numpy() for name in SAVED} | {"seconds": seconds}


@dataclass(frozen=True)
class TokenTiming(ContinuousJob):
    """The seconds of the next `num_new` tokens where the first `num_known` of `batch` images are known.

    The images come from `source`, again and again.
    """

    method: ContinuousMethod
    source: ContinuousRun
    batch: int
    num_known: int
    num_new: int

    def title(self, study: "ContinuousStudy") -> str:
        return f"{self.label}, {self.num_new} tokens of {self.batch} images"

    def cost(self, study: "ContinuousStudy") -> float:
        return estimated_seconds(self, self.source.guidance, self.batch, self.num_new, study.num_tokens)

    def shapes(self, study: "ContinuousStudy") -> ArrayShapes:
        return {"seconds": (None,)}

    def arrays(self, study: "ContinuousStudy", progress: Callable[[float], None]) -> Arrays:
        decoded, device = study.pictures(self.source).decoded, study.device
        which = torch.arange(self.batch) % len(decoded.tokens)
        is_known = decoded.order.argsort(1)[which] < self.num_known
        known = KnownTokens(decoded.tokens[which].to(device), is_known.to(device), self.num_new,
                            decoded.order[which].to(device))
        sampling = ContinuousSampling(study.seed + torch.arange(self.batch, device=device), self.source.guidance)
        prompts, seconds = which.to(device) % len(study.prompts), []
        while sum(seconds) < MIN_SECONDS:
            seconds.append(study.timed(self.method, sampling, prompts, known=known)[1])
        progress(1)
        return {"seconds": seconds}


@dataclass(frozen=True)
class Draws(ContinuousJob):
    """`count` independent draws of the next `num_new` tokens where the first `num_known` of a picture are known.

    The picture is number `picture` of `source`.
    """

    method: ContinuousMethod
    source: ContinuousRun
    num_known: int
    num_new: int
    count: int
    picture: int = 0
    draft_alone: bool = False
    repeat: int = 0  # another set of the same kind

    def title(self, study: "ContinuousStudy") -> str:
        return f"{self.label}, {self.count} draws of one state"

    def cost(self, study: "ContinuousStudy") -> float:
        return estimated_seconds(self, self.source.guidance, self.count, self.num_new, study.num_tokens)

    def shapes(self, study: "ContinuousStudy") -> ArrayShapes:
        return {"samples": (self.count, self.num_new * study.pipeline.mar.config.channels),
                "acceptance": (self.count, self.num_new), "target_forwards": (self.count,)}

    def state(self, study: "ContinuousStudy", rows: int) -> tuple[KnownTokens, int]:
        """The state from which is drawn, `rows` times, and its prompt."""
        decoded = study.pictures(self.source).decoded
        tokens, order = (part[self.picture].to(study.device).expand(rows, *part.shape[1:])
                         for part in (decoded.tokens, decoded.order))
        return (KnownTokens(tokens, order.argsort(1) < self.num_known, self.num_new, order),
                (self.source.start + self.picture) % len(study.prompts))

    def first_seed(self, study: "ContinuousStudy") -> int:
        """Sets of draws are independent: each has seeds of its own, which count on from a digest of its fields."""
        settings = (study.seed, self.method.label, self.source.guidance, self.num_known, self.num_new, self.count,
                    self.picture, self.draft_alone, self.repeat)
        return int.from_bytes(hashlib.sha256(repr(settings).encode()).digest()[:6], "little")

    def arrays(self, study: "ContinuousStudy", progress: Callable[[float], None]) -> Arrays:
        first, parts = self.first_seed(study), []
        for rows in torch.arange(self.count, device=study.device).split(ROWS):
            known, prompt = self.state(study, len(rows))
            sampling = ContinuousSampling(first + rows, self.source.guidance)
            decoded = study.decode(self.method, sampling, torch.full_like(rows, prompt), self.draft_alone, known=known,
                                   wrap=DeduplicatedMAR)
            new = slice(self.num_known, self.num_known + self.num_new)
            positions = decoded.order[:, new, None].expand(-1, -1, decoded.tokens.shape[2])
            parts.append((decoded.tokens.gather(1, positions).flatten(1), decoded.acceptance[:, new],
                          decoded.target_forwards))
            progress(len(rows) / self.count)
        return dict(zip(("samples", "acceptance", "target_forwards"),
                        (torch.cat(part).numpy() for part in zip(*parts))))


@dataclass
class ContinuousPictures:
    """The pictures of a run, and the seconds of all its batches."""

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
    """The share of verified tokens that is accepted, with half a 95 % interval; NaN where nothing was verified.

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
    """Runs, timings and draws of one pair."""

    def __init__(self, pair: MARPair, folder: str | Path, prompts: list[str], *, seed: int = 0):
        """
        Raises:
            ValueError: the folder holds runs of another model, version or setting; or the pair has no draft model
        """
        pair.check(parse_method("cspd"))
        self.captions = pair.features(prompts)  # (P, S, caption_dim)
        self.device, self.num_tokens = pair.device, pair.num_tokens
        super().__init__(pair, folder, prompts, seed, [
            pair.mar.config, pair.mar_draft.config, pair.tokenizer.config, pair.scaling,
            pair.words and pair.words.vocabulary])

    def key(self, job: Job) -> list:
        return [type(job).__name__, *(getattr(job, field.name) for field in fields(job)), self.machine]

    def parts(self, job: Job) -> list[Job]:
        if not isinstance(job, ContinuousRun):
            return [job]
        end = job.start + job.count
        return [replace(job, start=start, count=min(job.batch, end - start))
                for start in range(job.start, end, job.batch)]

    def pictures(self, run: ContinuousRun) -> ContinuousPictures:
        if run not in self.loaded:
            parts = [self.arrays(part) for part in self.parts(run)]
            values = {name: torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in SAVED}
            self.loaded[run] = ContinuousPictures(ContinuousDecoded(**values, num_drawn=self.num_tokens),
                                                  sum(float(part["seconds"]) for part in parts))
        return self.loaded[run]

    def token_seconds(self, job: TokenTiming) -> float:
        """Seconds of a token of one image, the median of all timings."""
        return float(np.median(self.arrays(job)["seconds"])) / (job.batch * job.num_new)

    def draws(self, job: Draws) -> tuple[Tensor, tuple[float, float], float]:
        """Samples (count, num_new * C), alpha with its interval, and target forwards a draw."""
        arrays = self.arrays(job)
        acceptance = torch.from_numpy(arrays["acceptance"])
        return (torch.from_numpy(arrays["samples"]), share(acceptance == 1, acceptance >= 0),
                float(arrays["target_forwards"].mean()))

    def decode(self, method: ContinuousMethod, sampling: ContinuousSampling, prompts: Tensor,
               draft_alone: bool = False, progress: Progress | None = None, known: KnownTokens | None = None,
               wrap: Callable = lambda mar: mar) -> ContinuousDecoded:
        """prompts (B,) int64; wrap: it is called with either model, and returns the one that is used"""
        target = wrap(self.pipeline.mar_draft if draft_alone else self.pipeline.mar)
        return continuous_decode(target, wrap(self.pipeline.mar_draft), self.captions[prompts], sampling, method,
                                 progress, known)

    def timed(self, method: ContinuousMethod, *arguments, known: KnownTokens, **others
              ) -> tuple[ContinuousDecoded, float]:
        """Decode, and measure the seconds, after two tokens that are dropped: they touch memory and load libraries."""
        warm_up = replace(method, num_iter=0, prefill=0.0)
        self.decode(warm_up, *arguments, known=replace(known, num_new=2), **others | {"progress": None})
        start = time.perf_counter()
        decoded = self.decode(method, *arguments, known=known, **others)  # its result is on the CPU: it has ended
        return decoded, time.perf_counter() - start


def estimated_seconds(job: ContinuousJob, guidance: float, rows: int, tokens: int, num_tokens: int) -> float:
    """Roughly the seconds of `tokens` of `num_tokens` on two processor cores, to estimate the remaining time."""
    method, deduplicated = job.method, isinstance(job, Draws)
    copies = 1 if guidance == 1 else 2
    forward = 0.01 * copies * rows * (0.5 if deduplicated else 1) * (tokens > 1 or not deduplicated)
    denoising = 0.03 + 0.00125 * copies * rows
    share = 0.3 if job.draft_alone else 1.0
    if not method.gamma:
        return share * (method.num_iter or tokens) * (forward + denoising)
    prefill = 0 if deduplicated else min(tokens, round(method.prefill * num_tokens))
    steps = (tokens - prefill) / (1.3 if method.truncate else method.gamma)
    variants = method.gamma + method.truncate if method.conditioning == "exact" else 1
    paths = 12 if method.variant == "path" else 0.5
    resampled = rows * min(method.gamma, tokens, 1 if method.truncate else 4)
    return share * (prefill * (forward + denoising)
                    + steps * (method.gamma * (forward / 4 + denoising) + variants * forward + denoising
                               + paths * 0.00125 * copies * resampled))
