"""Decoding of continuous tokens, read downwards: MAR's own decoding, then the speculative one (CSpD, arXiv:2411.11925).

Each request has a seed. It gives the order in which the tokens of its image become known, and all of its noise. Where
guidance is not 1, each request is two rows of the model, one with its condition and one with the null condition. The
ops read nothing back to the host. A step of the loop does, some eight times: how far the images are, and what was
rejected.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specvis_kernels import (
    OUT_OF_TRIES,
    ResampleGaussianResult,
    accept_gaussian,
    philox_uniforms,
    resample_gaussian,
)

from ..models.diffloss import Denoiser
from ..models.mar import MAR, scheduled_guidance
from ..models.threads import in_parts
from .limits import MAX_NUMBER, MIN_NUMBER, is_number
from .methods import CONTINUOUS, SCHEDULES, ContinuousMethod, parse_method
from .sampling import ACCEPT, FRESH, NOISE, ORDER, RESAMPLE, RESAMPLE_NOISE, UNALIGNED, check_seeds, philox_normals

MAX_ROWS = 256       # in one forward of a model, for the memory that it takes
NUM_FIRST_PATHS = 2  # whole paths that are first tried side by side to resample; twice as many in each turn after it

Progress = Callable[[int], None]  # called with how many tokens the batch has just gained or given up


@dataclass(frozen=True)
class ContinuousSampling:
    """How B requests draw their tokens."""

    seeds: Tensor             # (B,) int64
    guidance: float = 1.0     # 1 is none; by default it grows to this while tokens become known
    temperature: float = 1.0  # scales the sigma of each denoising step

    @staticmethod
    def of(seeds: list[int], *, guidance: float = 1.0, temperature: float = 1.0,
           device: torch.device | str = "cpu") -> "ContinuousSampling":
        """The settings, from a list of seeds.

        Raises:
            ValueError: no seeds, guidance not finite, temperature not positive and finite
        """
        check_seeds(seeds)
        return ContinuousSampling(torch.tensor(seeds, dtype=torch.int64, device=device), guidance, temperature)

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
    """Tokens that are known from the start, for inpainting. They come first in the order."""

    tokens: Tensor               # (B, L, C) float32  the values at unknown positions do not matter
    is_known: Tensor             # (B, L) bool  the same number in each image
    num_new: int | None = None   # how many tokens to draw; None: all that are unknown
    order: Tensor | None = None  # (B, L) int64  the position of the n-th token, known ones first; None: by the seeds


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
    num_drawn: int           # how many tokens of each image were drawn: L, less those that were known

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
        self.tokens = torch.zeros(B, L, C, device=device)
        self.start, self.end = 0, L                                           # how many tokens are known before, after
        sort_key = philox_uniforms(seeds, 1, L, stream=ORDER)[:, 0]
        if known is not None:
            self.start, self.end = check_known(known, B, L, C)
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
        self.log_r = torch.full((B, L), torch.nan, device=device)
        self.drafts = torch.full((B, L, C), torch.nan, device=device)
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
        return ContinuousDecoded(**{name: getattr(self, name).cpu() for name in names},
                                 num_drawn=self.end - self.start)


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

    def __init__(self, mar: MAR, source: Tensor, sampling: ContinuousSampling, guidance_schedule: str = "linear"):
        B = len(sampling.seeds)
        mar.pack()
        condition = mar.condition(source)
        if len(condition) != B:
            raise ValueError(f"there must be a condition for each of the {B} seeds, got {len(condition)}")
        self.mar, self.sampling, self.is_guided = mar, sampling, sampling.guidance != 1.0
        self.guidance_schedule = guidance_schedule
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
        """The diffusion given z (R, 1 or 2, dim), R any dimensions.

        Args:
            num_unknown: (R) how many tokens are unknown when these are drawn, by which guidance is chosen
            num_steps:   how many denoising steps; None: the model's own number
        """
        settings = {"temperature": self.sampling.temperature, "num_steps": num_steps}
        if not self.is_guided:
            return self.mar.diffloss.denoiser(z[..., 0, :], **settings)
        guidance = scheduled_guidance(self.sampling.guidance, num_unknown, self.mar.config.tokens,
                                      self.guidance_schedule)
        return self.mar.diffloss.denoiser(z[..., 0, :], uncond=z[..., 1, :], guidance=guidance, **settings)


def mask_lengths(num_tokens: int, num_iter: int) -> list[int]:
    """How many tokens are unknown after each iteration of MAR's decoding: a cosine, but one token each at least."""
    if not 1 <= num_iter <= num_tokens:
        raise ValueError(f"num_iter must be within 1..{num_tokens} (the tokens to draw), got {num_iter}")
    lengths, length = [], num_tokens
    for iteration in range(1, num_iter + 1):
        cosine = math.floor(num_tokens * math.cos(math.pi / 2 * iteration / num_iter))
        length = max(num_iter - iteration, min(length - 1, cosine))  # a token for each of the iterations behind it
        lengths.append(length)
    return lengths[:-1] + [0]


def denoising_steps(steps_first: int, steps_last: int, num_iter: int) -> list[int]:
    """How many denoising steps the tokens of each iteration get: from the first number to the last one, linearly.

    The more tokens are known, the less is left to decide (DiSA, arXiv:2505.20297).
    """
    share = [i / max(1, num_iter - 1) for i in range(num_iter)]
    return [round(steps_first + (steps_last - steps_first) * s) for s in share]


def sample_tokens(state: ContinuousState, model: GuidedMAR, start: int, end: int, num_steps: int | None = None) -> None:
    """Draw tokens start..end - 1 of every image in one forward, independently given the first `start`, the known ones.

    num_steps: how many denoising steps they get; None: the model's own number
    """
    positions = state.order[:, start:end]
    B, n = positions.shape
    requests = torch.arange(B, device=positions.device)
    z = model.z(state.tokens, state.ranks < start, positions, requests, max_known=start)
    num_unknown = torch.full((B, n), state.num_tokens - end, device=positions.device)
    denoiser = model.denoiser(z, num_unknown, num_steps)
    noise = state.noise[:, start - state.start:end - state.start, -len(denoiser.schedule):]  # its last is x_T
    tokens = denoiser.sample(noise).mean
    active = ~state.failed
    state.tokens[requests[:, None], positions] = torch.where(active[:, None, None], tokens, 0.0)
    state.target_forwards += active
    state.fail(active & ~tokens.isfinite().all(2).all(1))
    state.counts.clamp_(min=end)


@torch.inference_mode()
def parallel_decode(mar: MAR, source: Tensor, sampling: ContinuousSampling, num_iter: int | None = None,
                    progress: Progress | None = None, known: KnownTokens | None = None, *,
                    steps_first: int | None = None, steps_last: int | None = None,
                    guidance_schedule: str = "linear") -> ContinuousDecoded:
    """MAR's own decoding: each iteration draws the next tokens of the order, independently given the known ones.

    Args:
        source:   (B, ..)  what `mar.condition` embeds
        num_iter: 1 to the number of tokens to draw; None: one iteration for each token
        known:    tokens that are known from the start; None: there are none
        steps_first, steps_last: denoising steps in the first and in the last iteration, between them linearly (DiSA);
            2 to the model's own number, which None stands for
        guidance_schedule: "linear", "constant" or "released", see `scheduled_guidance`
    Raises:
        ValueError: num_iter, steps_first or steps_last out of its range, another schedule, or `known` does not fit the
            images
    """
    if guidance_schedule not in SCHEDULES:
        raise ValueError(f"guidance_schedule must be one of {', '.join(SCHEDULES)}, got {guidance_schedule!r}")
    most = len(mar.diffloss.schedule)
    steps_first, steps_last = (most if steps is None else steps for steps in (steps_first, steps_last))
    for name, steps in (("steps_first", steps_first), ("steps_last", steps_last)):
        if not 2 <= steps <= most:
            raise ValueError(f"{name} must be within 2..{most} (the model's denoising steps), got {steps}")
    state = ContinuousState(mar, sampling, known)
    model = GuidedMAR(mar, source, sampling, guidance_schedule)
    start, num_new = state.start, state.end - state.start
    lengths = mask_lengths(num_new, num_new if num_iter is None else num_iter) if num_new else []
    for length, num_steps in zip(lengths, denoising_steps(steps_first, steps_last, len(lengths))):
        end = state.end - length
        sample_tokens(state, model, start, end, num_steps)
        if progress:
            progress((end - start) * len(state.counts))
        start = end
    return state.decoded()


@torch.inference_mode()
def continuous_decode(target: MAR, drafter: MAR | None, source: Tensor, sampling: ContinuousSampling,
                      method: str | ContinuousMethod, progress: Progress | None = None,
                      known: KnownTokens | None = None) -> ContinuousDecoded:
    """Draft tokens, verify them in one target forward, resample what is rejected, until every image is complete.

    A NaN in the output of either model ends its image.

    Args:
        source: (B, ..)  what `condition` of either model embeds: class ids or caption features
        method: a method or its name, see parse_method; with gamma 0 this is parallel_decode
        known:  tokens that are known from the start; None: there are none
    Raises:
        ValueError: not a method for continuous tokens, not one condition for each seed, or the drafter's tokens,
            channels, timesteps, denoising steps or classes are not the target's
    """
    method = continuous_method(method)
    if not method.gamma:
        return parallel_decode(target, source, sampling, method.num_iter or None, progress, known,
                               steps_first=method.steps_first or None, steps_last=method.steps_last or None,
                               guidance_schedule=method.guidance_schedule)
    check_pair(target, drafter)
    state = ContinuousState(target, sampling, known)
    target, drafter = (GuidedMAR(model, source, sampling, method.guidance_schedule) for model in (target, drafter))
    for start in range(state.start, min(round(method.prefill * state.num_tokens), state.end)):
        sample_tokens(state, target, start, start + 1)
        state.report(progress)
    while (step := next_step(state, method)) is not None:
        run_step(state, target, drafter, step, method)
        state.report(progress)
    return state.decoded()


@dataclass
class Step:
    """One step of the loop: its R images, and the n tokens of each that it may add.

    The first G of the n are drafted. Where the method truncates, there is one more: the token behind the drafts. Where
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


def next_step(state: ContinuousState, method: ContinuousMethod) -> Step | None:
    """The step that goes on with all images that are not complete; None where all are."""
    requests = (state.counts < state.end).nonzero()[:, 0]
    if not len(requests):
        return None
    counts = state.counts[requests]
    num_missing = state.end - counts
    num_drafted = num_missing.clamp(max=method.gamma)
    max_count, max_drafted = torch.stack([counts.max(), num_drafted.max()]).tolist()
    ranks = counts[:, None] + torch.arange(max_drafted + method.truncate, device=counts.device)
    ranks = ranks.clamp(max=state.end - 1)
    return Step(requests, state.seeds[requests], counts, num_missing, num_drafted.int(), max_count, max_drafted,
                ranks, state.order[requests].gather(1, ranks), state.num_tokens - 1 - ranks,
                state.noise[requests[:, None], ranks - state.start])


def run_step(state: ContinuousState, target: GuidedMAR, drafter: GuidedMAR, step: Step,
             method: ContinuousMethod) -> None:
    """Add tokens to the images of one step."""
    drafts = draft(state, drafter, step, method)
    denoisers = target_forward(state, target, step, drafts, method)
    verified = verify(step, drafts, denoisers, method)
    commit(state, step, verified)
    update(state, step, drafts, verified)


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
    """What the drafter proposes in one step, for R images and up to G tokens of each."""

    images: Tensor         # (R, L, C) float32  the known tokens and the drafts
    denoisers: Denoisers   # (R, G)
    means: Tensor          # (R, G, C) float32  of the last denoising step: these are the drafts
    log_sigmas: Tensor     # (R, G, C) float32  of the last denoising step
    log_sigma_sum: Tensor  # (R, G) float64     over the steps before it
    paths: Tensor | None   # (R, G, T + 1, C) float32  for the variant "path"


def draft(state: ContinuousState, drafter: GuidedMAR, step: Step, method: ContinuousMethod) -> Drafts:
    """Draft G tokens for each image, one after the other, each given those before it."""
    images, ranks = state.tokens[step.requests], state.ranks[step.requests]
    rows, keep_paths = torch.arange(len(images), device=images.device), method.variant == "path"
    zs, samples = [], []
    for g in range(step.max_drafted):
        token = slice(g, g + 1)
        z = drafter.z(images, ranks < step.ranks[:, token], step.positions[:, token], step.requests,
                      min(state.num_tokens, step.max_count + g))
        sample = drafter.denoiser(z, step.num_unknown[:, token]).sample(step.noise[:, token], keep_paths)
        images[rows, step.positions[:, g]] = sample.mean[:, 0]
        zs.append(z)
        samples.append(sample)

    def joined(name):
        return torch.cat([getattr(sample, name) for sample in samples], 1)

    denoisers = Denoisers(drafter, torch.cat(zs, 1), step.num_unknown[:, :step.max_drafted])
    return Drafts(images, denoisers, joined("mean"), joined("log_sigma"), joined("log_sigma_sum"),
                  joined("path") if keep_paths else None)


def target_forward(state: ContinuousState, target: GuidedMAR, step: Step, drafts: Drafts,
                   method: ContinuousMethod) -> Denoisers:
    """The target's diffusions of the step's tokens (R, n), from one forward.

    With "exact" conditioning, a token is given the drafts before it: an image is n rows of the forward, each of which
    hides what comes later. With "block" conditioning, all are given the tokens that were known before the step.
    """
    ranks = state.ranks[step.requests]
    if method.conditioning == "block":
        z = target.z(state.tokens[step.requests], ranks < step.counts[:, None], step.positions, step.requests,
                     step.max_count)
        return Denoisers(target, z, step.num_unknown)
    R, n = step.ranks.shape
    is_known = ranks[:, None] < step.ranks[..., None]                                           # (R, n, L)
    z = target.z(drafts.images.repeat_interleave(n, 0), is_known.flatten(0, 1), step.positions.reshape(-1, 1),
                 step.requests.repeat_interleave(n), min(state.num_tokens, step.max_count + n - 1))
    return Denoisers(target, z[:, 0].unflatten(0, (R, n)), step.num_unknown)


@dataclass
class Evaluated:
    """The drafts as the target sees them: arguments of `accept_gaussian`, which explains them."""

    tokens: Tensor           # (R, G, C) float32
    log_ratio: Tensor        # (R, G) float32
    last_step: list[Tensor]  # four of (R, G, C): target_means to draft_log_sigmas; empty for the variant "path"


def evaluate_drafts(step: Step, drafts: Drafts, denoisers: Denoisers, method: ContinuousMethod) -> Evaluated:
    """The density ratios of the drafts, target to drafter."""
    G = step.max_drafted
    target = denoisers[:, :G]
    if method.variant == "path":
        log_ratio = target.log_density(drafts.paths) - drafts.denoisers[:, :].log_density(drafts.paths)
        return Evaluated(target.transition(drafts.paths[..., 1, :], 1)[0], log_ratio.float(), [])
    noise = step.noise[:, :G]
    if not method.aligned:
        noise = path_noise(step.seeds, UNALIGNED, step.positions[:, :G], noise.shape[2:])
    sample = target.sample(noise)
    return Evaluated(drafts.means, (drafts.log_sigma_sum - sample.log_sigma_sum).float(),
                     [sample.mean, sample.log_sigma, drafts.means, drafts.log_sigmas])


def distance_temperatures(method: ContinuousMethod, log_ratio: Tensor) -> Tensor | None:
    """The ops' `temperature`, for as many requests as log_ratio (R, ..) has; None is 1."""
    if method.distance_temperature == 1:
        return None
    return torch.full((len(log_ratio),), method.distance_temperature, device=log_ratio.device)


@dataclass
class Verified:
    """The tokens that a step adds, and what became of its drafts. All but log_r is 0 where an image failed."""

    tokens: Tensor        # (R, n, C) float32
    is_new: Tensor        # (R, n) bool   the tokens that the step adds: the first of each row
    is_accepted: Tensor   # (R, n) bool   drafts
    is_rejected: Tensor   # (R, n) bool   drafts, which were resampled
    num_tries: Tensor     # (R, n) int32
    out_of_tries: Tensor  # (R, n) bool
    log_r: Tensor         # (R, G) float32
    is_failed: Tensor     # (R,) bool     a number of either model was not finite


def verify(step: Step, drafts: Drafts, denoisers: Denoisers, method: ContinuousMethod) -> Verified:
    """Accept or reject the drafts, resample the rejected ones, and draw what the target adds alone.

    That is the token behind the drafts where all are accepted, if the method truncates, and the tokens whose
    resampling was given up.
    """
    (R, n), G, device = step.ranks.shape, step.max_drafted, step.ranks.device
    evaluated = evaluate_drafts(step, drafts, denoisers, method)
    uniforms = philox_uniforms(step.seeds, step.positions[:, :G], 1, stream=ACCEPT)[..., 0]
    result = accept_gaussian(
        evaluated.tokens, evaluated.log_ratio, uniforms, *evaluated.last_step, variant=method.variant,
        temperature=distance_temperatures(method, uniforms), num_drafted=step.num_drafted, truncate=method.truncate)
    is_accepted, is_rejected = (F.pad(mask, (0, n - G)) for mask in (result.is_accepted, result.is_rejected))
    num_new = (is_accepted | is_rejected).sum(1)
    if method.truncate:
        num_new = (result.num_accepted + 1).minimum(step.num_missing)
    is_new = torch.arange(n, device=device) < num_new[:, None]

    tokens = F.pad(torch.where(result.is_accepted[..., None], evaluated.tokens, 0.0), (0, 0, 0, n - G))
    num_tries = torch.zeros(R, n, dtype=torch.int32, device=device)
    out_of_tries = torch.zeros(R, n, dtype=torch.bool, device=device)
    index = is_rejected.nonzero(as_tuple=True)
    if len(index[0]):
        resampled = resample(step, drafts, denoisers, evaluated, index, method)
        tokens[index], num_tries[index] = resampled.tokens, resampled.num_tries
        out_of_tries[index] = (resampled.status & OUT_OF_TRIES) != 0
    index = ((is_new & ~is_accepted & ~is_rejected) | out_of_tries).nonzero(as_tuple=True)
    if len(index[0]):
        tokens[index] = sample_target(step, denoisers, index, is_rejected[index])

    is_failed = (result.status != 0) | (is_new & ~tokens.isfinite().all(2)).any(1)
    active = ~is_failed[:, None]
    return Verified(tokens, is_new & active, is_accepted & active, is_rejected & active, num_tries, out_of_tries,
                    result.log_r, is_failed)


def resample(step: Step, drafts: Drafts, denoisers: Denoisers, evaluated: Evaluated, index: tuple[Tensor, Tensor],
           method: ContinuousMethod) -> ResampleGaussianResult:
    """Tokens (m, C) in place of the m rejected drafts at `index`, NaN where a number was not finite.

    Where the status is OUT_OF_TRIES, the token is still to be drawn.
    """
    if method.variant == "path":
        tokens, num_tries, status = resample_paths(step, drafts, denoisers, index, method)
    else:
        tokens, num_tries, status = resample_last_step(step, evaluated, index, method)
    is_invalid = (status & ~OUT_OF_TRIES) != 0
    return ResampleGaussianResult(tokens.masked_fill(is_invalid[:, None], torch.nan), num_tries, status)


def resample_last_step(step: Step, evaluated: Evaluated, index: tuple[Tensor, Tensor],
                     method: ContinuousMethod) -> ResampleGaussianResult:
    """Resample the last step of the target's denoising, for the m rejected drafts at `index`."""
    seeds, positions = step.seeds[index[0]], step.positions[index][:, None]
    last_step = [part[index][:, None] for part in evaluated.last_step]                          # each (m, 1, C)
    normals = path_noise(seeds, RESAMPLE_NOISE, positions, (method.max_tries, evaluated.tokens.shape[-1]))[:, 0]
    # the release divides the distances by its temperature when it accepts, but not here
    temperature = distance_temperatures(method, seeds) if method.variant == "paper" else None
    return try_proposals(seeds, positions, normals, evaluated.log_ratio[index], 0, *last_step, variant=method.variant,
                         temperature=temperature)


def resample_paths(step: Step, drafts: Drafts, denoisers: Denoisers, index: tuple[Tensor, Tensor],
                 method: ContinuousMethod) -> ResampleGaussianResult:
    """Resample whole paths of the target, for the m rejected drafts at `index`, until one is accepted.

    They are drawn in turns. Each turn tries twice as many paths as the one before.
    """
    seeds, positions = step.seeds[index[0]], step.positions[index][:, None]
    m, (T, C), device = len(seeds), step.noise.shape[2:], seeds.device
    tokens = torch.zeros(m, C, device=device)
    num_tries, status = (torch.zeros(m, dtype=torch.int32, device=device) for _ in range(2))
    pending, turn, num_tried = torch.arange(m, device=device), 0, 0
    while len(pending) and num_tried < method.max_tries:
        num_paths = min(NUM_FIRST_PATHS << turn, method.max_tries - num_tried)
        repeated = tuple(part[pending, None].expand(-1, num_paths) for part in index)
        noise = path_noise(seeds[pending], RESAMPLE_NOISE, positions[pending], (num_paths, T, C), turn)[:, 0]
        sample = denoisers[repeated].sample(noise, keep_path=True)
        log_ratio = sample.log_density - drafts.denoisers[repeated].log_density(sample.path)
        result = try_proposals(seeds[pending], positions[pending], sample.mean, log_ratio.float(), turn,
                               variant="path")
        tokens[pending], status[pending] = result.tokens, result.status
        num_tries[pending] += result.num_tries
        pending = pending[(result.status & OUT_OF_TRIES) != 0]
        turn, num_tried = turn + 1, num_tried + num_paths
    return ResampleGaussianResult(tokens, num_tries, status)


def try_proposals(seeds: Tensor, positions: Tensor, proposals: Tensor, log_ratio: Tensor, turn: int,
                  *last_step: Tensor, **options) -> ResampleGaussianResult:
    """`resample_gaussian` for m rejected drafts, as if each were a request of its own.

    Args:
        seeds, positions: (m,), (m, 1) int64
        proposals:        (m, M, C) float32
        log_ratio:        (m,) float32, for the variant "path" (m, M)
        last_step:        four of (m, 1, C) float32; none for the variant "path"
        options:          variant and temperature of the op
    Returns:
        tokens (m, C), num_tries (m,), status (m,)
    """
    uniforms = philox_uniforms(seeds, positions, proposals.shape[1], stream=RESAMPLE, turn=turn)  # (m, 1, M)
    is_rejected = torch.ones_like(positions, dtype=torch.bool)
    unused = torch.zeros_like(proposals[:, :1])                                                 # drafts, and fallback
    result = resample_gaussian(unused, ~is_rejected, is_rejected, proposals[:, None], log_ratio[:, None], uniforms,
                               unused, *last_step, **options)
    return ResampleGaussianResult(*(part[:, 0] for part in result))


def sample_target(step: Step, denoisers: Denoisers, index: tuple[Tensor, Tensor], is_rejected: Tensor) -> Tensor:
    """The target's own samples (m, C) of the tokens at `index`.

    is_rejected (m,): there was a draft, made from the token's noise, so that this sample needs other noise
    """
    noise = step.noise[index]
    fresh_noise = path_noise(step.seeds[index[0]], FRESH, step.positions[index][:, None], noise.shape[1:])[:, 0]
    noise = torch.where(is_rejected[:, None, None], fresh_noise, noise)
    return denoisers[index].sample(noise).mean


def commit(state: ContinuousState, step: Step, verified: Verified) -> None:
    """Put the step's tokens into the images."""
    index = verified.is_new.nonzero(as_tuple=True)
    state.tokens[step.requests[index[0]], step.positions[index]] = verified.tokens[index]
    state.counts[step.requests] += verified.is_new.sum(1)


def update(state: ContinuousState, step: Step, drafts: Drafts, verified: Verified) -> None:
    """Record what became of the drafts, and end the images that failed."""
    index = (verified.is_accepted | verified.is_rejected).nonzero(as_tuple=True)
    requests, ranks = step.requests[index[0]], step.ranks[index]
    state.acceptance[requests, ranks] = verified.is_accepted[index].to(state.acceptance.dtype)
    state.num_tries[requests, ranks] = verified.num_tries[index]
    state.out_of_tries[requests, ranks] = verified.out_of_tries[index]
    state.log_r[requests, ranks] = verified.log_r[index]
    state.drafts[requests, step.positions[index]] = drafts.means[index]
    state.target_forwards[step.requests] += 1
    state.draft_forwards[step.requests] += step.num_drafted
    state.fail(torch.zeros_like(state.failed).index_fill(0, step.requests[verified.is_failed], True))


def continuous_method(method: str | ContinuousMethod) -> ContinuousMethod:
    """The method, also from its name. ValueError unless it is one for continuous tokens."""
    if isinstance(method, str):
        method = parse_method(method)
    if not isinstance(method, ContinuousMethod):
        raise ValueError(f"method must be one for continuous tokens ({', '.join(CONTINUOUS)}), "
                         f"got {getattr(method, 'name', method)!r}")
    return method


def check_pair(target: MAR, drafter: MAR) -> None:
    """ValueError unless both models have the same tokens and denoise them in the same steps."""
    for name in ("tokens", "channels", "num_train_timesteps", "num_sampling_steps", "classes"):
        wanted, got = getattr(target.config, name), getattr(drafter.config, name)
        if wanted != got:
            raise ValueError(f"drafter must have the target's {name}={wanted}, got {name}={got}")
