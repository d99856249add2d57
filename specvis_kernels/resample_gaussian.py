"""resample_gaussian: continuous tokens in place of the rejected drafts."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import check, check_dims
from ._define import define
from ._gaussian import check_last_step, distance_factor, exp, last_step_log_ratio
from .status import INVALID_ROW, INVALID_RULE, OUT_OF_TRIES


class ResampleGaussianResult(NamedTuple):
    tokens: Tensor     # (B, G, C) float32
    num_tries: Tensor  # (B, G)    int32
    status: Tensor     # (B, G)    int32


def resample_gaussian(tokens: Tensor, is_accepted: Tensor, is_rejected: Tensor, proposals: Tensor, log_ratio: Tensor,
                      uniforms: Tensor, fallback: Tensor,
                      target_means: Tensor | None = None, target_log_sigmas: Tensor | None = None,
                      draft_means: Tensor | None = None, draft_log_sigmas: Tensor | None = None, *,
                      variant: str = "paper", temperature: Tensor | None = None,
                      backend: str | None = None) -> ResampleGaussianResult:
    """Draw a token for every rejected draft, by rejection sampling from the target in at most M tries.

    Try j is accepted with probability max(0, 1 - 1/r(x_j)), that is iff log r(x_j) > 0 and u_j < 1 - exp(-log r(x_j)).
    The first accepted try is the token. If none is accepted, the token is the position's `fallback`, a fresh sample
    of the target. For an exact rule this moves the distribution by at most 1 / (e (M + 1)) in total variation.
    log r is computed and rounded as in accept_gaussian, from

        variant          x_j                                       and the log_ratio
        paper, released  mean_P + sigma_P * proposals[..., j, :]   of the rejected draft, (B, G)
        path             proposals[..., j, :]                      of try j itself, (B, G, M)

    A `path` is rejected as a whole, and a new one needs the target. So its try is the token of a whole new path of
    the target, with log_ratio = log p(path) - log q(path) of that path. For the other two variants a try repeats the
    target's last denoising step alone, and the proposals are standard normal numbers. (CSpD, arXiv:2411.11925.)

    After `truncate` only one position of each request is rejected. Then gather that position and call this op with
    G = 1: the other positions need not be given.

    Args:
        tokens:             (B, G, C)    float32  the drafts
        is_accepted:        (B, G)       bool     the accepted drafts, from accept_gaussian
        is_rejected:        (B, G)       bool     the drafts to replace, from accept_gaussian
        proposals:          (B, G, M, C) float32  standard normal numbers; for `path` tokens of the target
        log_ratio:          (B, G)       float32  for `path` (B, G, M)
        uniforms:           (B, G, M)    float32  in [0, 1)
        fallback:           (B, G, C)    float32  fresh samples of the target
        target_means:       (B, G, C)    float32  None for `path`, as the next three are
        target_log_sigmas:  (B, G, C)    float32  natural logarithms of the standard deviations
        draft_means:        (B, G, C)    float32
        draft_log_sigmas:   (B, G, C)    float32
        variant:            "paper", "released" or "path"
        temperature:        (B,)         float32  of the distances; None is 1, which the release has here
        backend:            None for the device's own kernel; a name from `backends()` to force one

    Returns:
        tokens:     (B, G, C) float32  the draft where it is accepted, the new token where it is rejected, else 0
        num_tries:  (B, G)    int32    how many tries were read; 0 where nothing is rejected
        status:     (B, G)    int32    OUT_OF_TRIES: the token is the fallback; INVALID_ROW: a number that was read
                                       is NaN or infinite, or leads to such a token or log r; INVALID_RULE: the
                                       temperature is not positive and finite. After either of the last two the
                                       token is 0

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above, G, M or C is 0, or the variant is
            unknown

    Examples:
        >>> draft = torch.tensor([[[1.0]]])                      # one rejected draft of one channel
        >>> no, yes = torch.tensor([[False]]), torch.tensor([[True]])
        >>> proposals = torch.tensor([[[[7.0], [8.0], [9.0]]]])  # of three new paths of the target
        >>> log_ratio = torch.tensor([[[-0.5, 1.0, 2.0]]])       # the second is accepted with probability 0.63
        >>> uniforms = torch.tensor([[[0.1, 0.5, 0.5]]])
        >>> fallback = torch.tensor([[[6.0]]])
        >>> result = resample_gaussian(draft, no, yes, proposals, log_ratio, uniforms, fallback, variant="path")
        >>> result.tokens, result.num_tries
        (tensor([[[8.]]]), tensor([[2]], dtype=torch.int32))
    """
    B, G, C = check_dims("tokens", tokens, "BGC", torch.float32, not_empty="GC")
    check("is_accepted", is_accepted, torch.bool, like=tokens, B=B, G=G)
    check("is_rejected", is_rejected, torch.bool, like=tokens, B=B, G=G)
    M = check_dims("proposals", proposals, "BGMC", not_empty="M")[2]
    check("proposals", proposals, torch.float32, like=tokens, B=B, G=G, M=M, C=C)
    check_last_step(variant, tokens, {"B": B, "G": G, "C": C}, temperature,
                    target_means=target_means, target_log_sigmas=target_log_sigmas,
                    draft_means=draft_means, draft_log_sigmas=draft_log_sigmas)
    check("log_ratio", log_ratio, torch.float32, like=tokens, B=B, G=G, **({"M": M} if variant == "path" else {}))
    check("uniforms", uniforms, torch.float32, like=tokens, B=B, G=G, M=M)
    check("fallback", fallback, torch.float32, like=tokens, B=B, G=G, C=C)
    return _call(backend, tokens, is_accepted, is_rejected, proposals,
                 -log_ratio if variant == "released" else log_ratio, uniforms, fallback, target_means,
                 target_log_sigmas, draft_means, draft_log_sigmas, temperature)


def _oracle(tokens: Tensor, is_accepted: Tensor, is_rejected: Tensor, proposals: Tensor, log_ratio: Tensor,
            uniforms: Tensor, fallback: Tensor, target_means: Tensor | None, target_log_sigmas: Tensor | None,
            draft_means: Tensor | None, draft_log_sigmas: Tensor | None, temperature: Tensor | None):
    factor, is_undefined = distance_factor(temperature, tokens)
    M = uniforms.shape[2]
    if target_means is None:
        x, log_r = proposals, log_ratio
    else:
        target_means, target_log_sigmas, draft_means, draft_log_sigmas = (
            t.unsqueeze(2) for t in (target_means, target_log_sigmas, draft_means, draft_log_sigmas))
        x = (target_means.double() + exp(target_log_sigmas.double()) * proposals.double()).float()
        log_r = (log_ratio.double().unsqueeze(2) + last_step_log_ratio(
            x, target_means, target_log_sigmas, draft_means, draft_log_sigmas, factor[:, None, None])).float()

    try_is_valid = log_r.isfinite() & uniforms.isfinite() & x.isfinite().all(-1)
    try_is_accepted = try_is_valid & (log_r > 0) & (uniforms.double() < 1 - exp(-log_r.double()))
    ends = try_is_accepted | ~try_is_valid
    last = (ends.cumsum(2) == 0).sum(2)  # (B, G): the try that ends the search; M: no try does
    index = last.clamp(max=M - 1).unsqueeze(2)
    proposed = x.gather(2, index.unsqueeze(3).expand(-1, -1, 1, x.shape[3])).squeeze(2)

    is_undefined = is_rejected & is_undefined.unsqueeze(1)
    is_resampled = is_rejected & ~is_undefined
    out_of_tries = is_resampled & (last == M)
    chosen = torch.where(is_resampled.unsqueeze(2), proposed, tokens)
    chosen = torch.where(out_of_tries.unsqueeze(2), fallback, chosen)
    try_is_valid = try_is_valid.gather(2, index).squeeze(2) | out_of_tries | ~is_resampled
    is_valid = try_is_valid & chosen.isfinite().all(-1)
    has_token = is_resampled | is_accepted & ~is_rejected
    status = (torch.where(has_token & ~is_valid, INVALID_ROW, 0) | torch.where(is_undefined, INVALID_RULE, 0)
              | torch.where(out_of_tries, OUT_OF_TRIES, 0))
    num_tries = torch.where(is_resampled, (last + 1).clamp(max=M), 0)
    return torch.where((has_token & is_valid).unsqueeze(2), chosen, 0.0), num_tries.int(), status.int()


def _meta(tokens, uniforms):
    B, G, _ = tokens.shape
    num_tries, status = (uniforms.new_empty((B, G), dtype=torch.int32) for _ in range(2))
    return torch.empty_like(tokens), num_tries, status


_call = define("resample_gaussian", oracle=_oracle, meta=_meta, result=ResampleGaussianResult)
