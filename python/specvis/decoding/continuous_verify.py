"""How a step of continuous tokens is verified: which drafts are accepted, and what takes the place of the others."""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specvis_kernels import OUT_OF_TRIES, ResampleGaussianResult, accept_gaussian, philox_uniforms, resample_gaussian

from .continuous_state import ContinuousStep, Denoisers, Drafts, path_noise
from .methods import ContinuousMethod
from .sampling import ACCEPT, FRESH, RESAMPLE, RESAMPLE_NOISE, UNALIGNED

NUM_FIRST_PATHS = 2  # whole paths that are first tried side by side to resample; twice as many in each turn after it


@dataclass
class Evaluated:
    """The drafts as the target sees them: arguments of `accept_gaussian`, which explains them."""

    tokens: Tensor           # (R, G, C) float32
    log_ratio: Tensor        # (R, G) float32
    last_step: list[Tensor]  # four of (R, G, C): target_means to draft_log_sigmas; empty for the variant "path"


def evaluate_drafts(step: ContinuousStep, drafts: Drafts, denoisers: Denoisers, method: ContinuousMethod) -> Evaluated:
    """The density ratios of the drafts, target to draft model."""
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
    return torch.full((len(log_ratio),), method.distance_temperature, dtype=torch.float32, device=log_ratio.device)


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


def verify(step: ContinuousStep, drafts: Drafts, denoisers: Denoisers, method: ContinuousMethod) -> Verified:
    """Accept or reject the drafts, resample the rejected ones, and draw what the target adds alone.

    That is the token after the drafts where all are accepted, if the method truncates, and the tokens whose
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


def resample(step: ContinuousStep, drafts: Drafts, denoisers: Denoisers, evaluated: Evaluated,
             index: tuple[Tensor, Tensor], method: ContinuousMethod) -> ResampleGaussianResult:
    """Tokens (m, C) in place of the m rejected drafts at `index`, NaN where a number was not finite.

    Where the status is OUT_OF_TRIES, the token is still to be drawn.
    """
    if method.variant == "path":
        tokens, num_tries, status = resample_paths(step, drafts, denoisers, index, method)
    else:
        tokens, num_tries, status = resample_last_step(step, evaluated, index, method)
    is_invalid = (status & ~OUT_OF_TRIES) != 0
    return ResampleGaussianResult(tokens.masked_fill(is_invalid[:, None], torch.nan), num_tries, status)


def resample_last_step(step: ContinuousStep, evaluated: Evaluated, index: tuple[Tensor, Tensor],
                       method: ContinuousMethod) -> ResampleGaussianResult:
    """Resample the last step of the target's denoising, for the m rejected drafts at `index`."""
    seeds, positions = step.seeds[index[0]], step.positions[index][:, None]
    last_step = [part[index][:, None] for part in evaluated.last_step]                          # each (m, 1, C)
    normals = path_noise(seeds, RESAMPLE_NOISE, positions, (method.max_tries, evaluated.tokens.shape[-1]))[:, 0]
    # the release divides the distances by its temperature when it accepts, but not here
    temperature = distance_temperatures(method, seeds) if method.variant == "paper" else None
    return try_proposals(seeds, positions, normals, evaluated.log_ratio[index], 0, *last_step, variant=method.variant,
                         temperature=temperature)


def resample_paths(step: ContinuousStep, drafts: Drafts, denoisers: Denoisers, index: tuple[Tensor, Tensor],
                   method: ContinuousMethod) -> ResampleGaussianResult:
    """Resample whole paths of the target, for the m rejected drafts at `index`, until one is accepted.

    They are drawn in turns. Each turn tries twice as many paths as the one before.
    """
    seeds, positions = step.seeds[index[0]], step.positions[index][:, None]
    m, (T, C), device = len(seeds), step.noise.shape[2:], seeds.device
    tokens = torch.zeros(m, C, dtype=torch.float32, device=device)
    num_tries, status = (torch.zeros(m, dtype=torch.int32, device=device) for _ in range(2))
    pending, turn, num_tried = torch.arange(m, device=device), 0, 0
    while len(pending) and num_tried < method.max_tries:
        num_paths = min(NUM_FIRST_PATHS << turn, method.max_tries - num_tried)
        repeated = tuple(part[pending, None].expand(-1, num_paths) for part in index)
        noise = path_noise(seeds[pending], RESAMPLE_NOISE, positions[pending], (num_paths, T, C), turn)[:, 0]
        sample = denoisers[repeated].sample(noise, keep_path=True)
        log_ratio = sample.log_density - drafts.denoisers[repeated].log_density(sample.path)
        result = try_proposals(seeds[pending], positions[pending], sample.mean, log_ratio.float(), turn, variant="path")
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


def sample_target(step: ContinuousStep, denoisers: Denoisers, index: tuple[Tensor, Tensor],
                  is_rejected: Tensor) -> Tensor:
    """The target's own samples (m, C) of the tokens at `index`.

    is_rejected (m,): there was a draft, made from the token's noise, so that this sample needs other noise
    """
    noise = step.noise[index]
    fresh_noise = path_noise(step.seeds[index[0]], FRESH, step.positions[index][:, None], noise.shape[1:])[:, 0]
    noise = torch.where(is_rejected[:, None, None], fresh_noise, noise)
    return denoisers[index].sample(noise).mean
