"""Decoding of continuous tokens: MAR's own decoding, and the speculative one (CSpD, arXiv:2411.11925).

Each request has a seed. It gives the order in which the tokens of its image become known, and all of its noise. Where
guidance is not 1, each request is two rows of the model, one with its condition and one with the null condition. The
ops read nothing back to the host. A step of the loop does, some eight times: how far the images are, and what was
rejected.
"""
import math

import torch
from torch import Tensor

from ..models.interface import inference
from ..models.mar import MAR
from .continuous_state import (
    ContinuousDecoded,
    ContinuousSampling,
    ContinuousState,
    ContinuousStep,
    Denoisers,
    Drafts,
    GuidedMAR,
    KnownTokens,
)
from .continuous_verify import Verified, verify
from .decoded import Progress
from .methods import CONTINUOUS, SCHEDULES, ContinuousMethod, parse_method


def mask_lengths(num_tokens: int, num_iter: int) -> list[int]:
    """How many tokens are unknown after each iteration of MAR's decoding: a cosine, but one token each at least."""
    if not 1 <= num_iter <= num_tokens:
        raise ValueError(f"num_iter must be within 1..{num_tokens} (the tokens to draw), got {num_iter}")
    lengths, length = [], num_tokens
    for iteration in range(1, num_iter + 1):
        cosine = math.floor(num_tokens * math.cos(math.pi / 2 * iteration / num_iter))
        length = max(num_iter - iteration, min(length - 1, cosine))  # a token for each later iteration
        lengths.append(length)
    return lengths[:-1] + [0]


def denoising_steps(steps_first: int, steps_last: int, num_iter: int) -> list[int]:
    """How many denoising steps each iteration's tokens get: linearly from first to last (DiSA, arXiv:2505.20297)."""
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


@inference
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
            2 to the model's own number, which None means
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


@inference
def continuous_decode(target: MAR, draft_model: MAR | None, source: Tensor, sampling: ContinuousSampling,
                      method: str | ContinuousMethod, progress: Progress | None = None,
                      known: KnownTokens | None = None) -> ContinuousDecoded:
    """Draft tokens, verify them in one target forward, resample what is rejected, until every image is complete.

    A NaN in the output of either model ends its image.

    Args:
        source: (B, ..)  what `condition` of either model embeds: class ids or caption features
        method: a method or its name, see parse_method; with gamma 0 this is parallel_decode
        known:  tokens that are known from the start; None: there are none
    Raises:
        ValueError: not a method for continuous tokens, not one condition for each seed, or the draft model's tokens,
            channels, timesteps, denoising steps or classes are not the target's
    """
    method = continuous_method(method)
    if not method.gamma:
        return parallel_decode(target, source, sampling, method.num_iter or None, progress, known,
                               steps_first=method.steps_first or None, steps_last=method.steps_last or None,
                               guidance_schedule=method.guidance_schedule)
    check_pair(target, draft_model)
    state = ContinuousState(target, sampling, known)
    target, draft_model = (GuidedMAR(mar, source, sampling, method.guidance_schedule) for mar in (target, draft_model))
    for start in range(state.start, min(round(method.prefill * state.num_tokens), state.end)):
        sample_tokens(state, target, start, start + 1)
        state.report(progress)
    while (step := next_step(state, method)) is not None:
        run_step(state, target, draft_model, step, method)
        state.report(progress)
    return state.decoded()


def next_step(state: ContinuousState, method: ContinuousMethod) -> ContinuousStep | None:
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
    return ContinuousStep(requests, state.seeds[requests], counts, num_missing, num_drafted.int(), max_count,
                          max_drafted, ranks, state.order[requests].gather(1, ranks), state.num_tokens - 1 - ranks,
                          state.noise[requests[:, None], ranks - state.start])


def run_step(state: ContinuousState, target: GuidedMAR, draft_model: GuidedMAR, step: ContinuousStep,
             method: ContinuousMethod) -> None:
    """Add tokens to the images of one step."""
    drafts = draft(state, draft_model, step, method)
    denoisers = target_forward(state, target, step, drafts, method)
    verified = verify(step, drafts, denoisers, method)
    commit(state, step, verified)
    update(state, step, drafts, verified)


def draft(state: ContinuousState, draft_model: GuidedMAR, step: ContinuousStep, method: ContinuousMethod) -> Drafts:
    """Draft G tokens for each image, one after the other, each given the drafts before it."""
    images, ranks = state.tokens[step.requests], state.ranks[step.requests]
    rows, keep_paths = torch.arange(len(images), device=images.device), method.variant == "path"
    zs, samples = [], []
    for g in range(step.max_drafted):
        token = slice(g, g + 1)
        z = draft_model.z(images, ranks < step.ranks[:, token], step.positions[:, token], step.requests,
                          min(state.num_tokens, step.max_count + g))
        sample = draft_model.denoiser(z, step.num_unknown[:, token]).sample(step.noise[:, token], keep_paths)
        images[rows, step.positions[:, g]] = sample.mean[:, 0]
        zs.append(z)
        samples.append(sample)

    def joined(name):
        return torch.cat([getattr(sample, name) for sample in samples], 1)

    denoisers = Denoisers(draft_model, torch.cat(zs, 1), step.num_unknown[:, :step.max_drafted])
    return Drafts(images, denoisers, joined("mean"), joined("log_sigma"), joined("log_sigma_sum"),
                  joined("path") if keep_paths else None)


def target_forward(state: ContinuousState, target: GuidedMAR, step: ContinuousStep, drafts: Drafts,
                   method: ContinuousMethod) -> Denoisers:
    """The target's diffusions of the step's tokens (R, n), from one forward.

    With "exact" conditioning, a token is given the drafts before it: an image is n rows of the forward, each of which
    hides the later drafts. With "block" conditioning, all are given the tokens that were known before the step.
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


def commit(state: ContinuousState, step: ContinuousStep, verified: Verified) -> None:
    """Put the step's tokens into the images."""
    index = verified.is_new.nonzero(as_tuple=True)
    state.tokens[step.requests[index[0]], step.positions[index]] = verified.tokens[index]
    state.counts[step.requests] += verified.is_new.sum(1)


def update(state: ContinuousState, step: ContinuousStep, drafts: Drafts, verified: Verified) -> None:
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


def check_pair(target: MAR, draft_model: MAR) -> None:
    """ValueError unless both models have the same tokens and denoise them in the same steps."""
    for name in ("tokens", "channels", "num_train_timesteps", "num_sampling_steps", "classes"):
        wanted, got = getattr(target.config, name), getattr(draft_model.config, name)
        if wanted != got:
            raise ValueError(f"draft_model must have the target's {name}={wanted}, got {name}={got}")
