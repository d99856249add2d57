"""accept_gaussian: which drafts of continuous tokens are accepted."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import check, check_dims, integers
from ._define import define
from ._gaussian import check_last_step, distance_factor, exp, last_step_log_ratio
from .status import INVALID_ROW, INVALID_RULE


class AcceptGaussianResult(NamedTuple):
    num_accepted: Tensor  # (B,)   int32
    is_accepted: Tensor   # (B, G) bool
    is_rejected: Tensor   # (B, G) bool
    log_r: Tensor         # (B, G) float32
    status: Tensor        # (B,)   int32


def accept_gaussian(tokens: Tensor, log_ratio: Tensor, uniforms: Tensor,
                    target_means: Tensor | None = None, target_log_sigmas: Tensor | None = None,
                    draft_means: Tensor | None = None, draft_log_sigmas: Tensor | None = None, *,
                    variant: str = "paper", temperature: Tensor | None = None, num_drafted: Tensor | None = None,
                    truncate: bool = True, backend: str | None = None) -> AcceptGaussianResult:
    """Accept a draft iff log u < log r, where r is the target's density divided by the draft's.

    S is the `log_ratio`. P and Q are the diagonal Gaussians of the target's and the draft's last denoising step.

        variant     log r                       S
        paper       S + log P(x) - log Q(x)     sum of log sigma_Q - log sigma_P over the earlier steps and channels
        released    -S + log P(x) - log Q(x)    the sum of `paper`; the paper's code has its sign wrong
        path        S                           log p(path) - log q(path), both of the draft's path

        log P(x) - log Q(x) = sum over channels of log sigma_Q - log sigma_P + (d_Q^2 - d_P^2) / 2
        d_P = (x - mean_P) / (temperature * sigma_P), and d_Q likewise

    With one denoising step S is 0. Then `paper`, followed by resample_gaussian, emits the target's distribution if
    the `tokens` are samples of Q. With several steps only `path` does. For `path` the last step contributes nothing
    and its four arguments are None; the `tokens` are the target's last step applied to the draft's path.
    (CSpD, arXiv:2411.11925, eq. 5.)

    log r is computed in float64, in one order for every batch and backend, and rounded to float32. The rounded
    number is returned, and it decides, by u < exp(log r). So u = 0 accepts a draft unless exp(log r) is 0 in
    float64, as it is for log r below -708.

    With `truncate`, the paper's Algorithm 1, nothing after a request's first rejected draft is accepted or rejected.
    Without it every position is decided on its own.

    Args:
        tokens:             (B, G, C) float32  the drafts
        log_ratio:          (B, G)    float32  S
        uniforms:           (B, G)    float32  in [0, 1)
        target_means:       (B, G, C) float32  None for `path`, as the next three are
        target_log_sigmas:  (B, G, C) float32  natural logarithms of the standard deviations
        draft_means:        (B, G, C) float32
        draft_log_sigmas:   (B, G, C) float32
        variant:            "paper", "released" or "path"
        temperature:        (B,)      float32  of the distances; None is 1, the paper's; the release has 42
        num_drafted:        (B,) int32 or int64  only this many leading positions are drafts; None, or more than G: all
        truncate:           see above
        backend:            None for the device's own kernel; a name from `backends()` to force one

    Returns:
        num_accepted:  (B,)   int32    how many drafts are accepted; with `truncate` also the first rejected position
        is_accepted:   (B, G) bool     the accepted drafts
        is_rejected:   (B, G) bool     the rejected drafts, which resample_gaussian is to replace
        log_r:         (B, G) float32  0 where there was nothing to decide
        status:        (B,)   int32    INVALID_ROW: a number of a draft, accepted or not, is NaN or infinite, or
                                       leads to such a log r;
                                       INVALID_RULE: a temperature is not positive and finite. After either of them
                                       nothing of the request is accepted or rejected

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above, G or C is 0, or the variant is unknown

    Examples:
        >>> drafts = torch.zeros(1, 3, 16)                  # one request, three drafts of 16 channels
        >>> log_ratio = torch.tensor([[0.5, -1.0, -3.0]])   # r is 1.65, 0.37 and 0.05
        >>> uniforms = torch.tensor([[0.9, 0.2, 0.4]])
        >>> result = accept_gaussian(drafts, log_ratio, uniforms, variant="path")
        >>> result.num_accepted
        tensor([2], dtype=torch.int32)
        >>> result.is_rejected
        tensor([[False, False,  True]])
    """
    B, G, C = check_dims("tokens", tokens, "BGC", torch.float32, not_empty="GC")
    check("log_ratio", log_ratio, torch.float32, like=tokens, B=B, G=G)
    check("uniforms", uniforms, torch.float32, like=tokens, B=B, G=G)
    check_last_step(variant, tokens, {"B": B, "G": G, "C": C}, temperature,
                    target_means=target_means, target_log_sigmas=target_log_sigmas,
                    draft_means=draft_means, draft_log_sigmas=draft_log_sigmas)
    if num_drafted is not None:
        num_drafted = integers("num_drafted", num_drafted, torch.int32, tokens, B=B)
    if not isinstance(truncate, bool):
        raise ValueError(f"truncate must be True or False, got {truncate!r}")
    return _call(backend, tokens, -log_ratio if variant == "released" else log_ratio, uniforms, target_means,
                 target_log_sigmas, draft_means, draft_log_sigmas, temperature, num_drafted, truncate)


def _oracle(tokens: Tensor, log_ratio: Tensor, uniforms: Tensor, target_means: Tensor | None,
            target_log_sigmas: Tensor | None, draft_means: Tensor | None, draft_log_sigmas: Tensor | None,
            temperature: Tensor | None, num_drafted: Tensor | None, truncate: bool):
    factor, is_undefined = distance_factor(temperature, tokens)
    log_r = log_ratio.double()
    if target_means is not None:
        log_r = log_r + last_step_log_ratio(tokens, target_means, target_log_sigmas, draft_means, draft_log_sigmas,
                                            factor[:, None])
    log_r = log_r.float()

    is_drafted = torch.ones_like(log_r, dtype=torch.bool)
    if num_drafted is not None:
        is_drafted = torch.arange(is_drafted.shape[1], device=is_drafted.device) < num_drafted.unsqueeze(1)
    is_finite = log_r.isfinite() & uniforms.isfinite() & tokens.isfinite().all(-1)
    is_valid = (is_finite | ~is_drafted).all(1)
    is_tested = is_drafted & (is_valid & ~is_undefined).unsqueeze(1)

    is_accepted = is_tested & (uniforms.double() < exp(log_r.double()))
    is_rejected = is_tested & ~is_accepted
    if truncate:
        rejections = is_rejected.cumsum(1)
        is_accepted = is_accepted & (rejections == 0)
        is_rejected = is_rejected & (rejections == 1)
    status = torch.where(is_valid, 0, INVALID_ROW) | torch.where(is_undefined, INVALID_RULE, 0)
    return is_accepted.sum(1).int(), is_accepted, is_rejected, torch.where(is_tested, log_r, 0.0), status.int()


def _meta(tokens, uniforms):
    B, G, _ = tokens.shape
    num_accepted, status = (uniforms.new_empty(B, dtype=torch.int32) for _ in range(2))
    is_accepted, is_rejected = (uniforms.new_empty((B, G), dtype=torch.bool) for _ in range(2))
    return num_accepted, is_accepted, is_rejected, torch.empty_like(uniforms), status


_call = define("accept_gaussian", oracle=_oracle, meta=_meta, result=AcceptGaussianResult)
