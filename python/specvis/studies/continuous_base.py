"""Runs of a MAR pair, kept in a folder: whole pictures, seconds at a batch size, and draws from one state."""
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import specvis_kernels

from ..decoding.continuous import Begun, Conditioned, ContinuousDecoded, ContinuousSampling, Progress, continuous_decode
from ..pipelines.mar import MARPair
from ..decoding.methods import ContinuousMethod, parse_method
from ..models.mar import MAR
from .base import Kept, fingerprint, machine, read_arrays, write

ROWS = 512    # draws of one state side by side
ENOUGH = 2.0  # seconds: what takes less is timed again


@dataclass(frozen=True)
class Run:
    """`count` pictures of a method in batches of `batch`, with the seconds of each batch.

    Picture i is of prompt i modulo the number of prompts, with seed i.
    """

    method: ContinuousMethod
    guidance: float
    count: int
    batch: int
    temperature: float = 1.0
    drafter: bool = False  # its own decoding, without the target
    start: int = 0

    @property
    def plain(self) -> "Run":
        """A batch of the same size and guidance by plain decoding."""
        return Run(parse_method("mar"), self.guidance, self.batch, self.batch)


@dataclass(frozen=True)
class Speed:
    """The seconds of `more` tokens behind the first `known` of `batch` images: those of `begun`, over and over."""

    method: ContinuousMethod
    begun: Run
    batch: int
    known: int
    more: int


@dataclass(frozen=True)
class Draws:
    """`count` independent draws of the `more` tokens behind the first `known` of a picture of `begun`."""

    method: ContinuousMethod
    begun: Run
    known: int
    more: int
    count: int
    picture: int = 0
    drafter: bool = False  # it draws alone
    again: int = 0         # another set of the same kind


Work = Run | Speed | Draws


@dataclass
class Pictures:
    """What a run gave, and the seconds of all its batches."""

    decoded: ContinuousDecoded
    seconds: float

    @property
    def each(self) -> float:
        """Seconds a picture."""
        return self.seconds / len(self.decoded.tokens)

    @property
    def alpha(self) -> tuple[float, float]:
        return share(self.decoded.kept == 1, self.decoded.kept >= 0)

    @property
    def tau(self) -> float:
        return self.decoded.tau.nanmean().item()

    @property
    def tries(self) -> Tensor:
        """(rejections,) of each redraw."""
        return self.decoded.tries[self.decoded.kept == 0]


def share(kept: Tensor, judged: Tensor) -> tuple[float, float]:
    """How much of what is judged is kept, with half a 95 % interval; NaN where nothing is.

    The interval is binomial, of the tokens of these pictures: other pictures may differ by more.
    """
    some, total = kept.sum().item(), judged.sum().item()
    return (some / total, binomial(some, total)) if total else (math.nan, math.nan)


def binomial(some: float, every: float) -> float:
    """Half a 95 % interval of the share some / every (Agresti and Coull: not 0 where all or nothing is kept)."""
    middle = (some + 2) / (every + 4)
    return 1.96 * (middle * (1 - middle) / (every + 4)) ** 0.5


class Merged:
    """A MAR that computes equal rows of a pass once: requests in the same state cost as much as one."""

    def __init__(self, mar: MAR):
        self.mar, self.config, self.diffloss = mar, mar.config, mar.diffloss
        self.condition, self.null_condition = mar.condition, mar.null_condition

    def __call__(self, tokens: Tensor, known: Tensor, condition: Tensor, most: int | None = None) -> Tensor:
        tokens = tokens.masked_fill(~known[..., None], 0.0)
        rows = torch.cat([part.flatten(1).float() for part in (tokens, known, condition)], 1)
        _, which = rows.unique(dim=0, return_inverse=True)
        one = torch.zeros(which.max() + 1, dtype=torch.int64, device=which.device)
        one[which] = torch.arange(len(which), device=which.device)  # any of the equal rows
        return self.mar(tokens[one], known[one], condition[one], most=most)[which]


class ContinuousStudy(Kept):
    """Runs of one pair with the same prompts and seeds; each is done once and kept in `folder`."""

    def __init__(self, pair: MARPair, folder: str | Path, prompts: list[str], *, seed: int = 0):
        """
        Raises:
            ValueError: the folder holds runs of another model, version or setting
        """
        self.pair, self.prompts, self.seed = pair, prompts, seed
        self.device = pair.device
        self.features = pair.features(prompts)  # (P, S, caption_dim)
        self.tokens = pair.places
        self.kept: dict[Run, Pictures] = {}
        model = fingerprint(pair, pair.mar.config, pair.mar_draft.config, pair.tokenizer.config, pair.scaling,
                            pair.words.vocabulary)
        super().__init__(folder, machine(self.device), {
            "model": model, "version": specvis_kernels.__version__, "seed": seed, "prompts": prompts})

    def parts(self, work: Work) -> list[Work]:
        if not isinstance(work, Run):
            return [work]
        starts = range(work.start, work.start + work.count, work.batch)
        return [replace(work, start=start, count=min(work.batch, work.start + work.count - start)) for start in starts]

    def key(self, work: Work) -> list:
        return [type(work).__name__, *super().key(work), self.machine]

    def suffix(self, work: Work) -> str:
        return "npz"

    def title(self, work: Work) -> str:
        label = f"{work.method.label}{' of the draft model' * getattr(work, 'drafter', False)}"
        if isinstance(work, Run):
            return f"{label}, guidance {work.guidance:g}, T = {work.temperature:g}"
        if isinstance(work, Speed):
            return f"{label}, {work.more} tokens of {work.batch} images"
        return f"{label}, {work.count} draws of one state"

    def cost(self, work: Work) -> float:
        run = work if isinstance(work, Run) else work.begun
        rows = work.count if isinstance(work, (Run, Draws)) else work.batch
        tokens = self.tokens if isinstance(work, Run) else work.more
        alone = 0.3 if getattr(work, "drafter", False) else 1.0
        return alone * seconds(work.method, run.guidance, rows, tokens, self.tokens, merged=isinstance(work, Draws))

    def make(self, work: Work, gained: Callable[[float], None]) -> None:
        if isinstance(work, Run):
            self._decode(work, gained)
        elif isinstance(work, Speed):
            self._time(work)
            gained(1)
        else:
            self._draw(work, gained)

    # --- what was done -------------------------------------------------------------------------------------------

    def arrays(self, work: Work) -> dict[str, np.ndarray]:
        """What a work left, done now if it was not before."""
        if not self.path(work).exists():
            self.make(work, lambda share: None)
        return read_arrays(self.path(work))

    def pictures(self, run: Run) -> Pictures:
        if run not in self.kept:
            parts = [self.arrays(part) for part in self.parts(run)]
            of = {field.name: torch.from_numpy(np.concatenate([part[field.name] for part in parts]))
                  for field in fields(ContinuousDecoded) if field.name != "drawn"}
            self.kept[run] = Pictures(ContinuousDecoded(**of, drawn=self.tokens),
                                      sum(float(part["seconds"]) for part in parts))
        return self.kept[run]

    def speed(self, work: Speed) -> float:
        """Seconds a token of one image, the median of as many times as were enough."""
        return float(np.median(self.arrays(work)["seconds"])) / (work.batch * work.more)

    def images_of(self, run: Run) -> np.ndarray:
        """(n, H, W, 3) uint8."""
        return self.images(self.pictures(run).decoded.tokens)

    def images(self, tokens: Tensor) -> np.ndarray:
        return np.stack([np.asarray(image) for part in tokens.split(32)
                         for image in self.pair.pictures(part.to(self.device))])

    def draws(self, work: Draws) -> tuple[Tensor, tuple[float, float], float]:
        """Samples (count, more * C), alpha with its interval, and target passes a draw."""
        kept = self.arrays(work)
        judged = torch.from_numpy(kept["kept"])
        return (torch.from_numpy(kept["samples"]), share(judged == 1, judged >= 0), float(kept["forwards"].mean()))

    def last_steps(self, work: Draws, count: int = 256) -> tuple[float, float]:
        """How far apart the target's and the draft's last denoising steps take the draft's x_1: rms over numbers and
        `count` paths, beside the rms of the tokens' own spread. For the first token of the state of `work`."""
        begun, prompt = self._state(work, 1)
        generator = torch.Generator().manual_seed(self.seed)
        config, every = self.pair.mar.config, torch.zeros(1, dtype=torch.int64, device=self.device)
        noise = torch.randn(count, config.steps, config.channels, generator=generator).to(self.device)
        unknown = torch.full((count,), self.tokens - work.known - 1, device=self.device)
        sampling = ContinuousSampling(torch.zeros_like(every), work.begun.guidance)
        places = begun.order[:, work.known:work.known + 1]
        with torch.inference_mode():
            target, draft = (
                model.denoising(model.z(begun.tokens, begun.known, places, every, work.known)[0].expand(count, -1, -1),
                                unknown)
                for model in (Conditioned(mar, self.features[[prompt]], sampling)
                              for mar in (self.pair.mar, self.pair.mar_draft)))
            path = draft.sample(noise, keep_path=True).path
            gap = target.transition(path[:, 1], 1)[0] - path[:, 0]
        return gap.square().mean().sqrt().item(), path[:, 0].var(0).mean().sqrt().item()

    # --- doing it ------------------------------------------------------------------------------------------------

    def decode(self, method: ContinuousMethod, sampling: ContinuousSampling, prompts: Tensor, drafter: bool = False,
               progress: Progress | None = None, begun: Begun | None = None, wrap: Callable = lambda mar: mar
               ) -> ContinuousDecoded:
        """prompts (B,) int64; drafter: it decodes alone; wrap: of either model."""
        target, draft = wrap(self.pair.mar_draft if drafter else self.pair.mar), wrap(self.pair.mar_draft)
        return continuous_decode(target, draft, self.features[prompts], sampling, method, progress, begun)

    def timed(self, method: ContinuousMethod, *arguments, begun: Begun, **others) -> tuple[ContinuousDecoded, float]:
        """Decode, and the seconds of it, after two tokens that are thrown away: memory is touched, libraries load."""
        warm = replace(method, passes=0, prefill=0.0)
        self.decode(warm, *arguments, begun=replace(begun, more=2), **others | {"progress": None})
        began = time.perf_counter()
        decoded = self.decode(method, *arguments, begun=begun, **others)  # it ends on the CPU
        return decoded, time.perf_counter() - began

    def _decode(self, run: Run, gained: Callable[[float], None]) -> None:
        B, L = run.count, self.tokens
        which = torch.arange(run.start, run.start + B, device=self.device)
        nothing = Begun(torch.zeros(B, L, self.pair.mar.config.channels, device=self.device),
                        torch.zeros(B, L, dtype=torch.bool, device=self.device))
        decoded, taken = self.timed(
            run.method, ContinuousSampling(self.seed + which, run.guidance, run.temperature),
            which % len(self.prompts), run.drafter, progress=lambda new: gained(new / (B * L)), begun=nothing)
        arrays = {field.name: getattr(decoded, field.name).numpy() for field in fields(ContinuousDecoded)
                  if field.name != "drawn"}
        write(self.path(run), lambda file: np.savez_compressed(file, **arrays, seconds=taken))

    def _time(self, work: Speed) -> None:
        decoded = self.pictures(work.begun).decoded
        which = torch.arange(work.batch) % len(decoded.tokens)
        known = decoded.order.argsort(1)[which] < work.known
        begun = Begun(decoded.tokens[which].to(self.device), known.to(self.device), work.more,
                      decoded.order[which].to(self.device))
        sampling = ContinuousSampling(self.seed + torch.arange(work.batch, device=self.device), work.begun.guidance)
        taken = []
        while sum(taken) < ENOUGH:
            taken.append(self.timed(work.method, sampling, which.to(self.device) % len(self.prompts), begun=begun)[1])
        write(self.path(work), lambda file: np.savez(file, seconds=taken))

    def _state(self, work: Draws, rows: int) -> tuple[Begun, int]:
        """The state that is drawn from, `rows` times, and its prompt."""
        decoded = self.pictures(work.begun).decoded
        tokens, order = (part[work.picture].to(self.device).expand(rows, *part.shape[1:])
                         for part in (decoded.tokens, decoded.order))
        return (Begun(tokens, order.argsort(1) < work.known, work.more, order),
                (work.begun.start + work.picture) % len(self.prompts))

    def _draw(self, work: Draws, gained: Callable[[float], None]) -> None:
        digest = hashlib.sha256(repr((self.seed, Kept.key(self, work))).encode()).digest()
        first, parts = int.from_bytes(digest[:6], "little"), []  # seeds of its own: sets of draws are independent
        for rows in torch.arange(work.count, device=self.device).split(ROWS):
            begun, prompt = self._state(work, len(rows))
            sampling = ContinuousSampling(first + rows, work.begun.guidance)
            decoded = self.decode(work.method, sampling, torch.full_like(rows, prompt), work.drafter, begun=begun,
                                  wrap=Merged)
            new = slice(work.known, work.known + work.more)
            places = decoded.order[:, new, None].expand(-1, -1, decoded.tokens.shape[2])
            parts.append((decoded.tokens.gather(1, places).flatten(1), decoded.kept[:, new], decoded.forwards))
            gained(len(rows) / work.count)
        samples, kept, forwards = (torch.cat(part).numpy() for part in zip(*parts))
        write(self.path(work), lambda file: np.savez(file, samples=samples, kept=kept, forwards=forwards))


def seconds(method: ContinuousMethod, guidance: float, rows: int, tokens: int, whole: int, merged: bool = False
            ) -> float:
    """About how many seconds of two processor cores, for the estimate of what is left."""
    copies = 1 if guidance == 1 else 2
    z = 0.01 * copies * rows * (0.5 if merged else 1) * (tokens > 1 or not merged)
    denoised = 0.03 + 0.00125 * copies * rows
    if not method.gamma:
        return (method.passes or tokens) * (z + denoised)
    prefill = 0 if merged else min(tokens, round(method.prefill * whole))
    steps = (tokens - prefill) / (1.3 if method.truncate else method.gamma)
    variants = method.gamma + method.truncate if method.conditioning == "exact" else 1
    paths = 12 if method.variant == "path" else 0.5
    redrawn = rows * min(method.gamma, tokens, 1 if method.truncate else 4)
    return (prefill * (z + denoised) + steps * (method.gamma * (z / 4 + denoised) + variants * z + denoised
                                                + paths * 0.00125 * copies * redrawn))
