"""accept_gaussian: which drafts of continuous tokens are kept."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._dispatch import INVALID_ROW, INVALID_RULE, check, check_dims, define
from ._gaussian import at_least_one, check_last_step, exp, distance_weight_of, last_step_log_ratio


class AcceptGaussianResult(NamedTuple):
    """What `accept_gaussian` returns."""
    num_accepted: Tensor  # (B,) int32
    is_accepted: Tensor   # (B, G) bool
    is_rejected: Tensor   # (B, G) bool
    log_r: Tensor         # (B, G) float32
    status: Tensor        # (B,) int32


def accept_gaussian(tokens: Tensor, log_ratio: Tensor, uniforms: Tensor,
                    target_means: Tensor | None = None, target_log_sigmas: Tensor | None = None,
                    draft_means: Tensor | None = None, draft_log_sigmas: Tensor | None = None, *,
                    variant: str = "paper", temperature: Tensor | None = None, num_drafted: Tensor | None = None,
                    truncate: bool = True, backend: str | None = None
                    ) -> AcceptGaussianResult:
    """Keep a draft iff log u < log r, where r is the density of the target over that of the draft.

    With S for log_ratio, and P and Q the diagonal Gaussians of the last denoising step of target and draft:

        variant     log r                       S
        paper       S + log P(x) - log Q(x)     sum of log sigma_Q - log sigma_P over the earlier steps and channels
        released    -S + log P(x) - log Q(x)    the same; the sign is what the paper's code turns around
        path        S                           log p(path) - log q(path), both of the draft's path

        log P(x) - log Q(x) = sum over channels of log sigma_Q - log sigma_P + (d_Q^2 - d_P^2) / 2
        d_P = (x - mean_P) / (temperature * sigma_P), d_Q likewise

    With one denoising step S is 0 and `paper`, with resample_gaussian, emits the target's distribution if `tokens` are
    samples of Q; with several only `path` does. For `path` the last step contributes nothing, its four arguments are
    None, and `tokens` are the target's last step applied to the draft's path. (CSpD, arXiv:2411.11925, eq. 5.)

    log r is computed in float64, in one order whatever the batch and the backend, and rounded to float32: that
    number is returned and decides, by u < exp(log r). So u = 0 keeps a draft unless exp(log r) is 0 in float64,
    which it is below -708.

    `truncate` is the paper's Algorithm 1: nothing after a request's first rejected draft is kept or redrawn.
    Otherwise every position is judged by itself.

    Args:
        tokens:             (B, G, C) float32  the drafts
        log_ratio:          (B, G)    float32  S
        uniforms:           (B, G)    float32  in [0, 1)
        target_means:       (B, G, C) float32  or None, as the next three, for `path`
        target_log_sigmas:  (B, G, C) float32  natural logarithms of the standard deviations
        draft_means:        (B, G, C) float32
        draft_log_sigmas:   (B, G, C) float32
        variant:            "paper", "released" or "path"
        temperature:        (B,)      float32  of the distances; None is 1, the paper's; the release has 42
        num_drafted:            (B,)      int32    only the first so many positions are drafts; None, or more than G: all
        truncate:           see above
        backend:            None for the device's own kernel; a name from `backends()` to force one

    Returns:
        num_accepted:  (B,)   int32    how many drafts are kept; with `truncate` the first rejected one's position
        is_accepted:      (B, G) bool     the drafts that are kept
        is_rejected:    (B, G) bool     the rejected ones that resample_gaussian is to replace
        log_r:     (B, G) float32  0 where nothing was to be judged
        status:    (B,)   int32    INVALID_ROW: a number of a draft, kept or not, is NaN, infinite, or leads to a log
                                   r that is;
                                   INVALID_RULE: a temperature not positive and finite. Either ends the request:
                                   nothing is kept or redrawn

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above, G or C is 0, no such variant
    """
    B, G, C = check_dims("tokens", tokens, "BGC")
    check("tokens", tokens, torch.float32, B=B, G=G, C=C)
    at_least_one("tokens", tokens, G=G, C=C)
    check("log_ratio", log_ratio, torch.float32, like=tokens, B=B, G=G)
    check("uniforms", uniforms, torch.float32, like=tokens, B=B, G=G)
    check_last_step(variant, tokens, {"B": B, "G": G, "C": C}, temperature,
                    target_means=target_means, target_log_sigmas=target_log_sigmas,
                    draft_means=draft_means, draft_log_sigmas=draft_log_sigmas)
    if num_drafted is not None:
        check("num_drafted", num_drafted, torch.int32, like=tokens, B=B)
    if not isinstance(truncate, bool):
        raise ValueError(f"truncate must be True or False, got {truncate!r}")
    inputs = [tokens, -log_ratio if variant == "released" else log_ratio, uniforms, target_means, target_log_sigmas,
              draft_means, draft_log_sigmas, temperature, num_drafted]
    return _call(backend, *[None if t is None else t.contiguous() for t in inputs], truncate)


def _oracle(tokens, log_ratio, uniforms, target_means, target_log_sigmas, draft_means, draft_log_sigmas,
            temperature, num_drafted, truncate):
    distance_weight, refused = distance_weight_of(temperature, tokens)
    log_r = log_ratio.double()
    if target_means is not None:
        log_r = log_r + last_step_log_ratio(tokens, target_means, target_log_sigmas, draft_means, draft_log_sigmas,
                                            distance_weight[:, None])
    log_r = log_r.float()

    here = torch.ones_like(log_r, dtype=torch.bool)
    if num_drafted is not None:
        here = torch.arange(here.shape[1], device=here.device) < num_drafted.unsqueeze(1)
    sound = log_r.isfinite() & uniforms.isfinite() & tokens.isfinite().all(-1)
    valid = (sound | ~here).all(1)
    judged = here & (valid & ~refused).unsqueeze(1)

    is_accepted = judged & (uniforms.double() < exp(log_r.double()))
    is_rejected = judged & ~is_accepted
    if truncate:
        rejections = is_rejected.cumsum(1)
        is_accepted = is_accepted & (rejections == 0)
        is_rejected = is_rejected & (rejections == 1)
    status = torch.where(valid, 0, INVALID_ROW) | torch.where(refused, INVALID_RULE, 0)
    return is_accepted.sum(1).int(), is_accepted, is_rejected, torch.where(judged, log_r, 0.0), status.int()


def _meta(tokens, log_ratio, uniforms, target_means, target_log_sigmas, draft_means, draft_log_sigmas,
          temperature, num_drafted, truncate):
    B, G, _ = tokens.shape
    num_accepted, status = (uniforms.new_empty(B, dtype=torch.int32) for _ in range(2))
    is_accepted, is_rejected = (uniforms.new_empty((B, G), dtype=torch.bool) for _ in range(2))
    return num_accepted, is_accepted, is_rejected, torch.empty_like(uniforms), status


_call = define(
    "accept_gaussian(Tensor tokens, Tensor log_ratio, Tensor uniforms, Tensor? target_means,"
    " Tensor? target_log_sigmas, Tensor? draft_means, Tensor? draft_log_sigmas, Tensor? temperature,"
    " Tensor? num_drafted, bool truncate)"
    " -> (Tensor num_accepted, Tensor is_accepted, Tensor is_rejected, Tensor log_r, Tensor status)",
    oracle=_oracle, meta=_meta, result=AcceptGaussianResult)
