"""Continuous tokens, read downwards: one request's numbers, MAR's own decoding, CSpD's (arXiv:2411.11925).

Tokens become known in a random order of each request, given by its seed. Where guidance is not 1, each request is one
pair of model rows, with and without condition. The ops read nothing on the host; a step does, some eight times: what
was rejected, and how far the images are.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specvis_kernels import OUT_OF_TRIES, accept_gaussian, resample_gaussian

from .methods import CONTINUOUS, ContinuousMethod, parse_method
from ..models.diffloss import Denoiser
from ..models.mar import MAR, linear_guidance
from .sampling import (ACCEPT, FRESH, NOISE, ORDER, REDRAW, REDRAW_NOISE, UNALIGNED, philox_normals,
                       philox_uniforms)

ROWS = 256        # of a model's forward at most, for the memory that it takes
PATHS_FIRST = 2   # whole paths that are redrawn side by side before looking whether one is kept; then twice as many

Progress = Callable[[int], None]  # called with how many tokens the batch has just gained, or given up


@dataclass(frozen=True)
class ContinuousSampling:
    """How B requests draw their tokens."""

    seeds: Tensor             # (B,) int64
    guidance: float = 1.0     # 1 is none; a token's grows towards this with the known tokens (linear_guidance)
    temperature: float = 1.0  # scales the sigma of each denoising step

    @staticmethod
    def of(seeds: list[int], *, guidance: float = 1.0, temperature: float = 1.0,
           device: torch.device | str = "cpu") -> "ContinuousSampling":
        """
        Raises:
            ValueError: no seeds, guidance not finite, temperature not positive and finite
        """
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
        if not abs(self.guidance) < float("inf"):
            raise ValueError(f"guidance must be a finite number, got {self.guidance}")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be positive and finite for continuous tokens, got {self.temperature}")


@dataclass(frozen=True)
class KnownTokens:
    """Images to go on with: their known tokens come first in the order."""

    tokens: Tensor           # (B, L, C) float32  what stands at unknown positions does not matter
    is_known: Tensor         # (B, L) bool  as many in each image
    num_new: int | None = None  # how many tokens to draw; None: all that are unknown
    order: Tensor | None = None  # (B, L) int64  the place of the n-th token, the known first; None: by the seeds


@dataclass
class ContinuousDecoded:
    """What decoding gave, for B images of L tokens. `order` says which place the n-th token of an image took."""

    tokens: Tensor          # (B, L, C) float32  by place
    order: Tensor           # (B, L) int64   the place of the n-th token
    target_forwards: Tensor # (B,) int64     target passes
    draft_forwards: Tensor  # (B,) int64
    acceptance: Tensor      # (B, L) int8    of the n-th token: 1 the draft was kept, 0 rejected, -1 none was judged
    num_tries: Tensor       # (B, L) int32   of its redraw
    out_of_tries: Tensor    # (B, L) bool    the redraw was given up: it is the target's own sample
    log_r: Tensor           # (B, L) float32 its log density ratio; NaN where none was judged
    drafts: Tensor          # (B, L, C) float32  by place: the draft that was judged there; NaN where none was
    failed: Tensor          # (B,) bool      a model's output was not finite: the image ended there, its rest is 0
    num_drawn: int          # tokens of each image that were drawn, of L unless it was known before

    @property
    def tau(self) -> Tensor:
        """(B,) tokens per target pass; NaN for a failed image."""
        return (self.num_drawn / self.target_forwards).masked_fill(self.failed, torch.nan)

    @property
    def acceptance_rate(self) -> float:
        """Kept drafts per judged draft (alpha), over all images; NaN where none was judged."""
        judged = (self.acceptance >= 0).sum()
        return ((self.acceptance == 1).sum() / judged).item()


class Canvas:
    """The images of a batch while they are being drawn."""

    def __init__(self, mar: MAR, sampling: ContinuousSampling, known: KnownTokens | None):
        c, seeds = mar.config, sampling.seeds
        B, L, T, C = len(seeds), c.tokens, len(mar.diffloss.schedule), c.channels
        self.L, self.T, self.C, self.sampling = L, T, C, sampling
        chance = philox_uniforms(seeds, ORDER, 1, L)[:, 0]
        self.tokens = torch.zeros(B, L, C, device=seeds.device)
        self.start, self.end = 0, L                                                   # tokens to begin and end with
        if known is not None:
            self.start, self.end = check_begun(known, B, L, C)
            self.tokens = known.tokens.masked_fill(~known.is_known[..., None], 0.0)
            chance = torch.where(known.is_known, -1.0, chance)
        given = known is not None and known.order is not None
        self.order = known.order if given else chance.argsort(dim=1, stable=True)
        self.rank = self.order.argsort(1)                                             # of a place: when it is drawn
        drawn = self.order[:, self.start:self.end]
        self.noise = philox_normals(seeds, NOISE, drawn, T * C).unflatten(-1, (T, C))  # of the tokens that are drawn
        self.count = torch.full((B,), self.start, device=seeds.device)                # tokens known
        self.target_forwards, self.draft_forwards = torch.zeros_like(self.count), torch.zeros_like(self.count)
        self.acceptance = torch.full((B, L), -1, dtype=torch.int8, device=seeds.device)
        self.num_tries = torch.zeros(B, L, dtype=torch.int32, device=seeds.device)
        self.out_of_tries = torch.zeros(B, L, dtype=torch.bool, device=seeds.device)
        self.log_r = torch.full((B, L), torch.nan, device=seeds.device)
        self.drafts = torch.full((B, L, C), torch.nan, device=seeds.device)
        self.failed = torch.zeros(B, dtype=torch.bool, device=seeds.device)

    def normals(self, stream: int, requests: Tensor, positions: Tensor, paths: int | None = None,
                turn: int = 0) -> Tensor:
        """Numbers of the requests (R,) for paths at positions (R, n): (R, n, T, C), or (R, n, paths, T, C) of several."""
        shape = (self.T, self.C) if paths is None else (paths, self.T, self.C)
        normals = philox_normals(self.sampling.seeds[requests], stream, positions, math.prod(shape), turn)
        return normals.unflatten(-1, shape)

    def noise_of(self, requests: Tensor, index: Tensor) -> Tensor:
        """(.., T, C): the noise that both models denoise for the n-th tokens `index` (..) of `requests`."""
        return self.noise[requests, index - self.start]

    def is_known(self, counts: Tensor) -> Tensor:
        """(B, L) bool: the positions of the first `counts` (B,) tokens."""
        return self.rank < counts[:, None]

    def fail(self, requests: Tensor) -> None:
        """End the images of `requests` (B,) bool where they are."""
        self.failed |= requests
        self.tokens.masked_fill_(requests[:, None, None] & ~(self.is_known(self.count)[..., None]), 0.0)
        self.count.masked_fill_(requests, self.end)

    def decoded(self) -> ContinuousDecoded:
        return ContinuousDecoded(*(part.cpu() for part in (
            self.tokens, self.order, self.target_forwards, self.draft_forwards, self.acceptance, self.num_tries, self.out_of_tries,
            self.log_r, self.drafts, self.failed)), num_drawn=self.end - self.start)


def check_begun(known: KnownTokens, B: int, L: int, C: int) -> tuple[int, int]:
    """How many tokens are known, and how many are to be in the end; ValueError unless the images fit."""
    if known.tokens.shape != (B, L, C) or known.tokens.dtype != torch.float32:
        raise ValueError(f"tokens must be float32 (B, L, C) = {(B, L, C)}, "
                         f"got {known.tokens.dtype} {tuple(known.tokens.shape)}")
    if known.is_known.shape != (B, L) or known.is_known.dtype != torch.bool:
        raise ValueError(f"is_known must be bool {(B, L)}, got {known.is_known.dtype} {tuple(known.is_known.shape)}")
    counts = known.is_known.sum(1)
    start = counts[0].item()
    if (counts != start).any():
        raise ValueError(f"is_known must hold as many positions in each image, got {counts.tolist()}")
    if not known.tokens[known.is_known].isfinite().all():
        raise ValueError("tokens must be finite where they are known")
    num_new = L - start if known.num_new is None else known.num_new
    if not isinstance(num_new, int) or not 0 <= num_new <= L - start:
        raise ValueError(f"num_new must be an integer within 0..{L - start} (the unknown tokens), got {num_new}")
    if known.order is not None:
        every = torch.arange(L, device=known.order.device)
        whole = known.order.dtype == torch.int64 and known.order.shape == (B, L)
        if not whole or (known.order.sort(1).values != every).any():
            raise ValueError(f"order must be int64 and hold each of the {L} positions once for each of the {B} images")
        if not known.is_known.gather(1, known.order[:, :start]).all():
            raise ValueError("order must have the known positions first")
    return start, start + num_new


class GuidedMAR:
    """A model and the conditions of B requests."""

    def __init__(self, mar: MAR, source: Tensor, sampling: ContinuousSampling):
        B = len(sampling.seeds)
        condition = mar.condition(source)
        if len(condition) != B:
            raise ValueError(f"there must be a condition for each of the {B} seeds, got {len(condition)}")
        self.mar, self.sampling, self.guided = mar, sampling, sampling.guidance != 1.0
        null = mar.null_condition(B)
        null = null[:, None].expand_as(condition) if condition.ndim == 3 else null
        self.condition = torch.stack([condition, null] if self.guided else [condition], 1)  # (B, 1 or 2, ..)

    def z(self, tokens: Tensor, known: Tensor, positions: Tensor, requests: Tensor, most: int) -> Tensor:
        """What conditions the tokens at `positions`.

        Args:
            tokens:   (R, L, C); known: (R, L) bool, at most `most` a row; positions: (R, n) int64
            requests: (R,) int64  whose image each row is
        Returns:
            (R, n, 1 or 2, dim): with condition, and without where there is guidance
        """
        copies = self.condition.shape[1]
        parts = []
        for rows in torch.arange(len(tokens), device=tokens.device).split(max(1, ROWS // copies)):
            condition = self.condition[requests[rows]].flatten(0, 1)
            z = self.mar(tokens[rows].repeat_interleave(copies, 0), known[rows].repeat_interleave(copies, 0),
                         condition, max_known=most).unflatten(0, (len(rows), copies)).transpose(1, 2)  # (r, L, copies, dim)
            parts.append(z[torch.arange(len(rows), device=z.device)[:, None], positions[rows]])
        return torch.cat(parts)

    def denoiser(self, z: Tensor, unknown: Tensor) -> Denoiser:
        """The diffusion given z (R, copies, dim), R any dimensions; unknown (R): tokens left after these."""
        if not self.guided:
            return self.mar.diffloss.denoiser(z[..., 0, :], temperature=self.sampling.temperature)
        scale = linear_guidance(self.sampling.guidance, unknown, self.mar.config.tokens)
        return self.mar.diffloss.denoiser(z[..., 0, :], uncond=z[..., 1, :], guidance=scale,
                                       temperature=self.sampling.temperature)


def mask_lengths(tokens: int, num_iter: int) -> list[int]:
    """How many tokens each pass of MAR's decoding leaves unknown: a cosine, at least one token a pass."""
    if not 1 <= num_iter <= tokens:
        raise ValueError(f"num_iter must be within 1..{tokens} (the tokens to draw), got {num_iter}")
    left, unknown = [], tokens
    for step in range(1, num_iter + 1):
        later = num_iter - step  # each of these num_iter needs one
        unknown = max(later, min(unknown - 1, math.floor(tokens * math.cos(math.pi / 2 * step / num_iter))))
        left.append(unknown)
    return left[:-1] + [0]


def draw_tokens(canvas: Canvas, model: GuidedMAR, start: int, end: int) -> None:
    """Tokens start..end - 1 of every image in one pass, independently given the known ones, which are `start` each."""
    positions = canvas.order[:, start:end]
    B, n = positions.shape
    every = torch.arange(B, device=positions.device)
    z = model.z(canvas.tokens, canvas.is_known(torch.full_like(canvas.count, start)), positions, every, most=start)
    unknown = torch.full((B, n), canvas.L - end, device=positions.device)
    drawn = model.denoiser(z, unknown).sample(canvas.noise[:, start - canvas.start:end - canvas.start]).mean
    going = ~canvas.failed
    canvas.tokens[every[:, None], positions] = torch.where(going[:, None, None], drawn, 0.0)
    canvas.target_forwards += going
    canvas.fail(going & ~drawn.isfinite().all(2).all(1))
    canvas.count.clamp_(min=end)


@torch.inference_mode()
def parallel_decode(mar: MAR, source: Tensor, sampling: ContinuousSampling, num_iter: int | None = None,
                    progress: Progress | None = None, known: KnownTokens | None = None) -> ContinuousDecoded:
    """MAR's own decoding: every pass draws the next tokens of the order, independently given the known ones.

    Args:
        source: (B, ..)  what `mar.condition` embeds
        num_iter: 1 to as many as there are tokens to draw; None: one for each
    """
    canvas, model = Canvas(mar, sampling, known), GuidedMAR(mar, source, sampling)
    start, tokens = canvas.start, canvas.end - canvas.start
    for left in mask_lengths(tokens, tokens if num_iter is None else num_iter) if tokens else ():
        draw_tokens(canvas, model, start, canvas.end - left)
        if progress:
            progress((canvas.end - left - start) * len(canvas.count))
        start = canvas.end - left
    return canvas.decoded()


@dataclass
class Drafted:
    """What the drafter proposed in one step, for R images and up to G tokens each."""

    canvas: Tensor         # (R, L, C) float32  the images with the drafts in their positions
    z: Tensor              # (R, G, copies, dim)
    means: Tensor          # (R, G, C) float32  the drafts: their last denoising step's means
    log_sigmas: Tensor     # (R, G, C) float32
    log_sigma_sum: Tensor  # (R, G) float64
    paths: Tensor | None   # (R, G, T + 1, C) float32, for the variant "path"


@dataclass
class Judged:
    """What the target has to say of them; `accept_gaussian` explains."""

    z: Tensor                # (R, n, copies, dim)
    tokens: Tensor           # (R, G, C) float32
    log_ratio: Tensor        # (R, G) float32
    last_step: list[Tensor]  # four of (R, G, C); none for the variant "path"


@dataclass
class Round:
    """One step: whose turn it is, R images, and what is asked of each."""

    requests: Tensor  # (R,) int64
    count: Tensor     # (R,) int64   tokens drawn before
    drafted: Tensor   # (R,) int32   tokens to draft, 1..G
    index: Tensor     # (R, n) int64 of the drafts, and of the token behind them if the method draws one
    positions: Tensor    # (R, n) int64 of these
    unknown: Tensor   # (R, n) int64 tokens left after each
    most: int         # of `count`


def draft_tokens(canvas: Canvas, drafter: GuidedMAR, turn: Round, G: int, keep_paths: bool) -> Drafted:
    """G tokens a row, one after the other, each given those before it."""
    images, rows = canvas.tokens[turn.requests], torch.arange(len(turn.requests), device=turn.count.device)
    zs, samples = [], []
    for g in range(G):
        positions = turn.positions[:, g:g + 1]
        known = canvas.rank[turn.requests] < turn.index[:, g, None]
        z = drafter.z(images, known, positions, turn.requests, min(canvas.L, turn.most + g))
        noise = canvas.noise_of(turn.requests[:, None], turn.index[:, g:g + 1])
        sample = drafter.denoiser(z, turn.unknown[:, g:g + 1]).sample(noise, keep_path=keep_paths)
        images[rows, positions[:, 0]] = sample.mean[:, 0]
        zs.append(z)
        samples.append(sample)

    def side_by_side(name):
        return torch.cat([getattr(sample, name) for sample in samples], 1)

    canvas.draft_forwards[turn.requests] += turn.drafted
    return Drafted(images, torch.cat(zs, 1), side_by_side("mean"), side_by_side("log_sigma"),
                   side_by_side("log_sigma_sum"), side_by_side("path") if keep_paths else None)


def judge(canvas: Canvas, target: GuidedMAR, draft: GuidedMAR, turn: Round, drafts: Drafted,
          method: ContinuousMethod) -> Judged:
    """One target pass over all drafts, and their density ratios."""
    (R, n), G = turn.index.shape, drafts.means.shape[1]
    if method.conditioning == "block":
        z = target.z(canvas.tokens[turn.requests], canvas.is_known(canvas.count)[turn.requests], turn.positions,
                     turn.requests, turn.most)
    else:
        known = canvas.rank[turn.requests, None] < turn.index[..., None]              # (R, n, L): n masked variants
        z = target.z(drafts.canvas.repeat_interleave(n, 0), known.flatten(0, 1), turn.positions.reshape(-1, 1),
                     turn.requests.repeat_interleave(n), min(canvas.L, turn.most + n - 1))[:, 0].unflatten(0, (R, n))
    p = target.denoiser(z[:, :G], turn.unknown[:, :G])
    if method.variant == "path":
        q = draft.denoiser(drafts.z, turn.unknown[:, :G])
        ratio = p.log_density(drafts.paths) - q.log_density(drafts.paths)
        return Judged(z, p.transition(drafts.paths[..., 1, :], 1)[0], ratio.float(), [])
    positions = turn.positions[:, :G]
    noise = (canvas.noise_of(turn.requests[:, None], turn.index[:, :G]) if method.aligned
             else canvas.normals(UNALIGNED, turn.requests, positions))
    own = p.sample(noise)
    return Judged(z, drafts.means, (drafts.log_sigma_sum - own.log_sigma_sum).float(),
                  [own.mean, own.log_sigma, drafts.means, drafts.log_sigmas])


def tempered(method: ContinuousMethod, rows: int, device: torch.device) -> Tensor | None:
    if method.distance_temperature == 1:
        return None
    return torch.full((rows,), method.distance_temperature, device=device)


def redraw(canvas: Canvas, target: GuidedMAR, draft: GuidedMAR, turn: Round, drafts: Drafted, judged: Judged,
           row: Tensor, column: Tensor, method: ContinuousMethod) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens in place of the rejected drafts at row (n,) and column (n,).

    Returns:
        tokens (n, C), tries (n,) int32, status (n,) int32: where it is OUT_OF_TRIES the token is still to be drawn
    """
    n, C, device = len(row), canvas.C, row.device
    requests, positions = turn.requests[row], turn.positions[row, column][:, None]
    seeds = canvas.sampling.seeds[requests]
    rejected = judged.tokens[row, column][:, None]
    here = torch.ones(n, 1, dtype=torch.bool, device=device)

    def resampled(which: Tensor, proposals: Tensor, log_ratio: Tensor, round: int, *last_step: Tensor,
                  temperature: Tensor | None = None) -> list[Tensor]:
        uniforms = philox_uniforms(seeds[which], REDRAW, positions[which], proposals.shape[1], round)
        results = resample_gaussian(rejected[which], ~here[which], here[which], proposals[:, None], log_ratio[:, None],
                                    uniforms, torch.zeros_like(rejected[which]), *last_step, variant=method.variant,
                                    temperature=temperature)
        return [result[:, 0] for result in results]

    left = torch.arange(n, device=device)
    if method.variant != "path":
        normals = philox_normals(seeds, REDRAW_NOISE, positions, method.max_tries * C)[:, 0].unflatten(-1, (-1, C))
        return tuple(resampled(left, normals, judged.log_ratio[row, column], 0,
                               *(part[row, column][:, None] for part in judged.last_step),
                               temperature=tempered(method, n, device) if method.variant == "paper" else None))
    tokens = torch.zeros(n, C, device=device)
    tries, status = (torch.zeros(n, dtype=torch.int32, device=device) for _ in range(2))
    round = tried = 0
    while len(left) and tried < method.max_tries:
        M = min(PATHS_FIRST << round, method.max_tries - tried)
        at = row[left, None].expand(-1, M), column[left, None].expand(-1, M)
        noise = canvas.normals(REDRAW_NOISE, requests[left], positions[left], M, round)[:, 0]
        sample = target.denoiser(judged.z[at], turn.unknown[at]).sample(noise, keep_path=True)
        log_q = draft.denoiser(drafts.z[at], turn.unknown[at]).log_density(sample.path)
        tokens[left], more, status[left] = resampled(left, sample.mean, (sample.log_density - log_q).float(), round)
        tries[left] += more
        left = left[(status[left] & OUT_OF_TRIES) != 0]
        round, tried = round + 1, tried + M
    return tokens, tries, status


def step(canvas: Canvas, target: GuidedMAR, draft: GuidedMAR, turn: Round, G: int, method: ContinuousMethod,
         uniforms: Tensor) -> None:
    """Draft, judge, redraw; put the tokens that result on the canvas."""
    requests, (R, n), device = turn.requests, turn.index.shape, uniforms.device
    drafts = draft_tokens(canvas, draft, turn, G, keep_paths=method.variant == "path")
    judged = judge(canvas, target, draft, turn, drafts, method)
    coins = uniforms[requests].gather(1, turn.positions[:, :G])
    accepted, keep, rejected, log_r, status = accept_gaussian(
        judged.tokens, judged.log_ratio, coins, *judged.last_step, variant=method.variant, num_drafted=turn.drafted,
        temperature=tempered(method, R, device), truncate=method.truncate)

    gained = (accepted if method.truncate else turn.drafted).long()
    whole = gained + turn.count == canvas.end                             # all that was missing is accepted
    fresh = torch.zeros(R, n, canvas.C, device=device)                    # the step's tokens
    fresh[:, :G] = torch.where(keep[..., None], judged.tokens, 0.0)
    to_draw = torch.zeros(R, n, dtype=torch.bool, device=device)          # by the target alone
    if method.truncate:  # the rejected draft's successor, or the token behind the drafts
        to_draw.scatter_(1, gained[:, None].clamp(max=n - 1), ~whole[:, None])
        to_draw[:, :G] &= ~rejected
        gained = gained + ~whole
    tries = torch.zeros(R, n, dtype=torch.int32, device=device)
    given_up = torch.zeros_like(to_draw)
    row, column = rejected.nonzero(as_tuple=True)
    if len(row):
        new, tries[row, column], state = redraw(canvas, target, draft, turn, drafts, judged, row, column, method)
        given_up[row, column] = (state & OUT_OF_TRIES) != 0
        fresh[row, column] = torch.where((state & ~OUT_OF_TRIES != 0)[:, None], torch.nan, new)
    row, column = (to_draw | given_up).nonzero(as_tuple=True)
    if len(row):
        positions = turn.positions[row, column]
        again = canvas.normals(FRESH, requests[row], positions[:, None])[:, 0]
        used = F.pad(rejected, (0, n - G))[row, column]                   # the draft judged there came of this noise
        noise = torch.where(used[:, None, None], again, canvas.noise_of(requests[row], turn.index[row, column]))
        fresh[row, column] = target.denoiser(judged.z[row, column], turn.unknown[row, column]).sample(noise).mean

    column = torch.arange(n, device=device)
    bad = (status != 0) | (~fresh.isfinite().all(2) & (column < gained[:, None])).any(1)
    row, column = ((column < gained[:, None]) & ~bad[:, None]).nonzero(as_tuple=True)
    canvas.tokens[requests[row], turn.positions[row, column]] = fresh[row, column]
    row, column = ((keep | rejected) & ~bad[:, None]).nonzero(as_tuple=True)
    at = requests[row], turn.index[row, column]
    canvas.acceptance[at] = keep[row, column].to(canvas.acceptance.dtype)
    canvas.num_tries[at], canvas.log_r[at] = tries[row, column], log_r[row, column]
    canvas.out_of_tries[at] = given_up[row, column]
    canvas.drafts[requests[row], turn.positions[row, column]] = drafts.means[row, column]
    canvas.target_forwards[requests] += 1
    canvas.count[requests] += torch.where(bad, 0, gained)
    canvas.fail(torch.zeros_like(canvas.failed).index_fill(0, requests[bad], True))


@torch.inference_mode()
def continuous_decode(target: MAR, draft: MAR, source: Tensor, sampling: ContinuousSampling,
                      method: str | ContinuousMethod, progress: Progress | None = None,
                      known: KnownTokens | None = None) -> ContinuousDecoded:
    """Draft tokens, judge them in one target pass, redraw what is rejected; until every image is whole.

    A NaN in either model's output ends its image.

    Args:
        source: (B, ..)  what the `condition` of either model embeds: class ids or caption features
        method: or its name, see parse_method; with gamma 0 it is parallel_decode
        known:  None: from nothing
    Raises:
        ValueError: not a method for continuous tokens, not a condition for each seed, or the drafter's tokens,
            channels, denoising steps or classes are not the target's
    """
    method = continuous_method(method)
    if not method.gamma:
        return parallel_decode(target, source, sampling, method.num_iter or None, progress, known)
    check_pair(target, draft)
    canvas = Canvas(target, sampling, known)
    target, draft = GuidedMAR(target, source, sampling), GuidedMAR(draft, source, sampling)
    uniforms = philox_uniforms(sampling.seeds, ACCEPT, canvas.L, 1)[..., 0]                 # (B, L) by place
    for start in range(canvas.start, min(round(method.prefill * canvas.L), canvas.end)):
        before = canvas.count.sum()
        draw_tokens(canvas, target, start, start + 1)
        if progress:
            progress((canvas.count.sum() - before).item())
    while (requests := (canvas.count < canvas.end).nonzero()[:, 0]).numel():
        count = canvas.count[requests]
        drafted = (canvas.end - count).clamp(max=method.gamma)
        most, G = torch.stack([count.max(), drafted.max()]).tolist()
        index = (count[:, None] + torch.arange(G + method.truncate, device=count.device)).clamp(max=canvas.end - 1)
        turn = Round(requests, count, drafted.int(), index, canvas.order[requests].gather(1, index),
                     canvas.L - 1 - index, most)
        before = canvas.count.sum()
        step(canvas, target, draft, turn, G, method, uniforms)
        if progress:
            progress((canvas.count.sum() - before).item())
    return canvas.decoded()


def continuous_method(method: str | ContinuousMethod) -> ContinuousMethod:
    """The method, which may be given by its name; ValueError unless it is one for continuous tokens."""
    if isinstance(method, str):
        method = parse_method(method)
    if not isinstance(method, ContinuousMethod):
        raise ValueError(f"method must be one for continuous tokens ({', '.join(CONTINUOUS)}), "
                         f"got {getattr(method, 'name', method)!r}")
    return method


def check_pair(target: MAR, draft: MAR) -> None:
    """Raise ValueError unless both models speak of the same tokens and denoise them in the same steps."""
    for name in ("tokens", "channels", "num_train_timesteps", "num_sampling_steps", "classes"):
        wanted, got = getattr(target.config, name), getattr(draft.config, name)
        if wanted != got:
            raise ValueError(f"draft must have the target's {name}={wanted}, got {name}={got}")
