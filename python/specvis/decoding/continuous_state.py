"""State of decoding continuous tokens: settings and images of a batch, its models, and what a step works on."""
import math
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from specvis_kernels import philox_uniforms

from ..models.diffloss import Denoiser
from ..models.mar import MAR, scheduled_guidance
from ..models.threads import in_parts
from .decoded import Progress
from .limits import MAX_NUMBER, MIN_NUMBER, is_number
from .sampling import NOISE, ORDER, check_seeds, philox_normals

MAX_ROWS = 256  # in one forward of a model, for the memory that it takes


@dataclass(frozen=True)
class ContinuousSampling:
    """How B requests draw their tokens."""

    seeds: Tensor             # (B,) int64
    guidance: float = 1.0     # 1 is off; by default it grows to this while tokens become known
    temperature: float = 1.0  # scales the sigma of each denoising step

    @staticmethod
    def of(seeds: list[int] | int, *, guidance: float = 1.0, temperature: float = 1.0,
           device: torch.device | str = "cpu") -> "ContinuousSampling":
        """From a list of seeds. ValueError: none, guidance not finite, temperature not positive and finite"""
        seeds = torch.tensor(check_seeds(seeds), dtype=torch.int64, device=device)
        return ContinuousSampling(seeds, guidance, temperature)

    def __post_init__(self):
        if not isinstance(self.seeds, Tensor):
            raise ValueError(f"seeds must be an int64 tensor (B,), got {type(self.seeds).__name__}; "
                             "ContinuousSampling.of takes a list")
        if self.seeds.ndim != 1 or self.seeds.dtype != torch.int64 or not len(self.seeds):
            raise ValueError(f"seeds must be int64 (B,) with B >= 1, got {self.seeds.dtype} {tuple(self.seeds.shape)}")
        for name in ("guidance", "temperature"):
            if not isinstance(getattr(self, name), (int, float)):
                raise ValueError(f"{name} must be one number for the whole batch, got {getattr(self, name)!r}")
        if not is_number(self.guidance, -MAX_NUMBER):
            raise ValueError(f"guidance must be a finite number in 32 bits, got {self.guidance}")
        if not is_number(self.temperature, MIN_NUMBER):
            raise ValueError("temperature must be positive and finite in 32 bits for continuous tokens, "
                             f"got {self.temperature}")


@dataclass(frozen=True)
class KnownTokens:
    """Tokens that are known from the start, for inpainting, on any device. They come first in the order."""

    tokens: Tensor               # (B, L, C) float32  the values at unknown positions do not matter
    is_known: Tensor             # (B, L) bool  the same number in each image
    num_new: int | None = None   # how many tokens to draw; None: all that are unknown
    order: Tensor | None = None  # (B, L) int64  the position of the n-th token, known ones first; None: by the seeds

    def to(self, device: torch.device) -> "KnownTokens":
        return KnownTokens(self.tokens.to(device), self.is_known.to(device), self.num_new,
                           None if self.order is None else self.order.to(device))


@dataclass
class ContinuousDecoded:
    """What decoding gave, for B images of L tokens. The n-th token of an image is at position `order[.., n]`."""

    tokens: Tensor           # (B, L, C) float32  by position
    order: Tensor            # (B, L) int64  the position of the n-th token
    target_forwards: Tensor  # (B,) int64
    draft_forwards: Tensor   # (B,) int64
    acceptance: Tensor       # (B, L) int8     of the n-th token: 1 draft accepted, 0 draft rejected, -1 not drafted
    num_tries: Tensor        # (B, L) int32    of the resampling of the n-th token
    out_of_tries: Tensor     # (B, L) bool     the n-th token's resampling was given up: it is the target's own sample
    log_r: Tensor            # (B, L) float32  the n-th token's log density ratio; NaN where there was no draft
    drafts: Tensor           # (B, L, C) float32  by position; NaN where there was no draft
    failed: Tensor           # (B,) bool       a model's output was not finite: the image ended there, its rest is 0
    num_drawn: int           # how many tokens of each image were drawn: L, less the known tokens

    @property
    def tau(self) -> Tensor:
        """(B,) tokens per target forward; NaN for a failed image."""
        return (self.num_drawn / self.target_forwards).masked_fill(self.failed, torch.nan)

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts per draft (alpha), over all images; NaN where there was none."""
        num_drafts = (self.acceptance >= 0).sum()
        return ((self.acceptance == 1).sum() / num_drafts).item()


class ContinuousState:
    """The images of a batch while they are being drawn, and the record of how. ContinuousDecoded explains its part."""

    def __init__(self, mar: MAR, sampling: ContinuousSampling, known: KnownTokens | None):
        seeds, device, B = sampling.seeds, sampling.seeds.device, len(sampling.seeds)
        L, T, C = mar.config.tokens, len(mar.diffloss.schedule), mar.config.channels
        self.seeds, self.num_tokens = seeds, L
        self.tokens = torch.zeros(B, L, C, dtype=torch.float32, device=device)
        self.start, self.end = 0, L                                           # how many tokens are known before, after
        sort_key = philox_uniforms(seeds, 1, L, stream=ORDER)[:, 0]
        if known is not None:
            self.start, self.end = check_known(known, B, L, C)
            known = known.to(device)
            self.tokens = known.tokens.masked_fill(~known.is_known[..., None], 0.0)
            sort_key = torch.where(known.is_known, -1.0, sort_key)
        has_order = known is not None and known.order is not None
        self.order = known.order if has_order else sort_key.argsort(dim=1, stable=True)
        self.ranks = self.order.argsort(1)                                    # (B, L) the n of the token at a position
        self.noise = path_noise(seeds, NOISE, self.order[:, self.start:self.end], (T, C))
        self.counts = torch.full((B,), self.start, device=device)             # (B,) how many tokens are known
        self.num_reported = self.start * B
        self.target_forwards, self.draft_forwards = torch.zeros_like(self.counts), torch.zeros_like(self.counts)
        self.acceptance = torch.full((B, L), -1, dtype=torch.int8, device=device)
        self.num_tries = torch.zeros(B, L, dtype=torch.int32, device=device)
        self.out_of_tries = torch.zeros(B, L, dtype=torch.bool, device=device)
        self.log_r = torch.full((B, L), torch.nan, dtype=torch.float32, device=device)
        self.drafts = torch.full((B, L, C), torch.nan, dtype=torch.float32, device=device)
        self.failed = torch.zeros(B, dtype=torch.bool, device=device)

    def fail(self, is_failed: Tensor) -> None:
        """End the images of `is_failed` (B,) bool where they are."""
        self.failed |= is_failed
        is_unknown = self.ranks >= self.counts[:, None]
        self.tokens.masked_fill_((is_failed[:, None] & is_unknown)[..., None], 0.0)
        self.counts.masked_fill_(is_failed, self.end)

    def report(self, progress: Progress | None) -> None:
        """Tell `progress` how many tokens the batch has gained since the last report."""
        if progress:
            total = self.counts.sum().item()
            progress(total - self.num_reported)
            self.num_reported = total

    def decoded(self) -> ContinuousDecoded:
        names = [field.name for field in fields(ContinuousDecoded) if field.name != "num_drawn"]
        return ContinuousDecoded(**{name: getattr(self, name).cpu() for name in names}, num_drawn=self.end - self.start)


def check_known(known: KnownTokens, B: int, L: int, C: int) -> tuple[int, int]:
    """How many tokens are known, and how many will be in the end. ValueError unless they fit the images."""
    if known.tokens.shape != (B, L, C) or known.tokens.dtype != torch.float32:
        raise ValueError(f"tokens must be float32 (B, L, C) = {(B, L, C)}, "
                         f"got {known.tokens.dtype} {tuple(known.tokens.shape)}")
    if known.is_known.shape != (B, L) or known.is_known.dtype != torch.bool:
        raise ValueError(f"is_known must be bool {(B, L)}, got {known.is_known.dtype} {tuple(known.is_known.shape)}")
    counts = known.is_known.sum(1)
    start = counts[0].item()
    if (counts != start).any():
        raise ValueError(f"is_known must have the same number of tokens in each image, got {counts.tolist()}")
    if not known.tokens[known.is_known].isfinite().all():
        raise ValueError("tokens must be finite where they are known")
    num_new = L - start if known.num_new is None else known.num_new
    if not isinstance(num_new, int) or not 0 <= num_new <= L - start:
        raise ValueError(f"num_new must be an integer within 0..{L - start} (the unknown tokens), got {num_new}")
    if known.order is not None:
        positions = torch.arange(L, device=known.order.device)
        fits = known.order.dtype == torch.int64 and known.order.shape == (B, L)
        if not fits or (known.order.sort(1).values != positions).any():
            raise ValueError(f"order must be int64 and hold each of the {L} positions once for each of the {B} images")
        if not known.is_known.gather(1, known.order[:, :start]).all():
            raise ValueError("order must have the known positions first")
    return start, start + num_new


def path_noise(seeds: Tensor, stream: int, positions: Tensor, shape: tuple[int, ...], turn: int = 0) -> Tensor:
    """Standard normals for denoising paths: seeds (R,), positions (R, n) -> (R, n, *shape); a path's is (T, C)."""
    return philox_normals(seeds, positions, math.prod(shape), stream=stream, turn=turn).unflatten(-1, shape)


class GuidedMAR:
    """A model with the conditions of B requests."""

    def __init__(self, mar: MAR, source: Tensor, sampling: ContinuousSampling, schedule: str = "linear"):
        B = len(sampling.seeds)
        mar.pack()
        condition = mar.condition(source)
        if len(condition) != B:
            raise ValueError(f"there must be a condition for each of the {B} seeds, got {len(condition)}")
        self.mar, self.sampling, self.schedule, self.is_guided = mar, sampling, schedule, sampling.guidance != 1.0
        null = mar.null_condition(B)
        null = null[:, None].expand_as(condition) if condition.ndim == 3 else null
        self.condition = torch.stack([condition, null] if self.is_guided else [condition], 1)  # (B, 1 or 2, ..)

    def z(self, tokens: Tensor, is_known: Tensor, positions: Tensor, requests: Tensor, max_known: int) -> Tensor:
        """The z of the tokens at `positions`, which conditions their diffusions.

        Args:
            tokens:    (R, L, C) float32
            is_known:  (R, L) bool   at most `max_known` in a row
            positions: (R, n) int64
            requests:  (R,) int64    the request of each row
        Returns:
            (R, n, 1 or 2, dim): under the condition, and where there is guidance under the null condition
        """
        repeats = self.condition.shape[1]
        parts = []
        for rows in torch.arange(len(tokens), device=tokens.device).split(max(1, MAX_ROWS // repeats)):
            tokens_of, is_known_of, positions_of = (
                part[rows].repeat_interleave(repeats, 0) for part in (tokens, is_known, positions))
            z = self.mar(tokens_of, is_known_of, self.condition_of(requests[rows]), max_known, positions_of)
            parts.append(z.unflatten(0, (len(rows), repeats)).transpose(1, 2))                 # (r, n, 1 or 2, dim)
        return torch.cat(parts)

    def condition_of(self, requests: Tensor) -> Tensor:
        """What `mar` reads for these requests (r,): (r * 1 or 2, ..)"""
        *shape, dim = self.condition.shape[1:]
        table, size = self.condition.reshape(-1, dim), math.prod(shape)
        index = requests[:, None] * size + torch.arange(size, device=requests.device)
        return in_parts(partial(torch.index_select, table, 0), dim, index.flatten()).view(-1, *shape[1:], dim)

    def denoiser(self, z: Tensor, num_unknown: Tensor, num_steps: int | None = None) -> Denoiser:
        """The diffusion given z (R, 1 or 2, dim), R any dimensions, in `num_steps` steps; None: the model's own number.

        num_unknown: (R) how many tokens are unknown when these are drawn, by which guidance is chosen
        """
        settings = {"temperature": self.sampling.temperature, "num_steps": num_steps}
        if not self.is_guided:
            return self.mar.diffloss.denoiser(z[..., 0, :], **settings)
        guidance = scheduled_guidance(self.sampling.guidance, num_unknown, self.mar.config.tokens, self.schedule)
        return self.mar.diffloss.denoiser(z[..., 0, :], uncond=z[..., 1, :], guidance=guidance, **settings)


@dataclass
class ContinuousStep:
    """One step of the loop: its R images, and the n tokens of each that it may add.

    The first G of the n are drafted. Where the method truncates, there is one more: the token after the drafts. Where
    an image needs fewer than n, its last token is repeated.
    """

    requests: Tensor     # (R,) int64  the images that are not complete
    seeds: Tensor        # (R,) int64
    counts: Tensor       # (R,) int64  how many tokens are known
    num_missing: Tensor  # (R,) int64  how many are to be drawn
    num_drafted: Tensor  # (R,) int32  how many to draft, 1..G
    max_count: int       # the largest of `counts`
    max_drafted: int     # G, the largest of `num_drafted`
    ranks: Tensor        # (R, n) int64  which tokens of the order they are
    positions: Tensor    # (R, n) int64  their positions in the image
    num_unknown: Tensor  # (R, n) int64  how many tokens are unknown after each
    noise: Tensor        # (R, n, T, C)  that both models denoise


@dataclass
class Denoisers:
    """The diffusions of a step's tokens under one model. An index selects some of them."""

    model: GuidedMAR
    z: Tensor            # (R, n, 1 or 2, dim)
    num_unknown: Tensor  # (R, n)

    def __getitem__(self, index) -> Denoiser:
        return self.model.denoiser(self.z[index], self.num_unknown[index])


@dataclass
class Drafts:
    """What the draft model proposes in one step, for R images and up to G tokens of each."""

    images: Tensor         # (R, L, C) float32  the known tokens and the drafts
    denoisers: Denoisers   # (R, G)
    means: Tensor          # (R, G, C) float32  of the last denoising step: these are the drafts
    log_sigmas: Tensor     # (R, G, C) float32  of the last denoising step
    log_sigma_sum: Tensor  # (R, G) float64     over the steps before it
    paths: Tensor | None   # (R, G, T + 1, C) float32  for the variant "path"
