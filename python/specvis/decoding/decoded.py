"""What decoding of discrete tokens returns, and what it reports while it runs."""
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from specvis_kernels import TreeLinksResult, token_log_probs

from .sampling import Sampling


class LogProbs(NamedTuple):
    """Log-probabilities of the tokens of B images, in nats; 0 for known tokens, and from where an image failed."""

    sampled: Tensor  # (B, L) float32  in the target's distribution that tokens are drawn from
    full: Tensor     # (B, L) float32  in the same distribution without top-k and top-p


@dataclass
class Decoded:
    """B images of L tokens, and what they cost."""

    tokens: Tensor           # (B, L) int64
    num_known: Tensor        # (B,) int64    how many of the tokens were known before
    target_forwards: Tensor  # (B,) int64    the one that reads the condition and the known tokens is counted
    num_accepted: Tensor     # (B, L) int64  by the step whose first token is here; -1: no step began here
    num_drafted: Tensor      # (B, L) int64  levels drafted by this step, within the image; 0: no step began here
    tv_excess: Tensor        # (B,) float32  added total variation, estimated, summed over the image's tokens
    failed: Tensor           # (B,) bool     the logits were not finite: the image ended there, its other tokens are 0
    # If Sampling.log_probs asks for them. A method that is not lossless does not draw its tokens from these
    # distributions: they are the target's.
    log_probs: LogProbs | None = None

    @property
    def tau(self) -> Tensor:
        """(B,) new tokens per target forward. The baseline has 1, a failed image NaN, an image known as a whole 0."""
        return ((self.tokens.shape[1] - self.num_known) / self.target_forwards).masked_fill(self.failed, torch.nan)

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts per drafted level, over all steps of all images."""
        return (self.num_accepted.clamp(min=0).sum() / self.num_drafted.sum().clamp(min=1)).item()

    def select(self, images: list[int]) -> "Decoded":
        """These images alone, in this order."""
        return Decoded(*(each_tensor(lambda x: x[images], getattr(self, field.name)) for field in fields(Decoded)))

    @staticmethod
    def merged(parts: "list[Decoded]", order: list[int]) -> "Decoded":
        """The images of all parts as one batch. order[i] is the index of the i-th image in that batch."""
        back = torch.tensor(order, device="cpu").argsort()
        return Decoded(*(each_tensor(lambda *x: torch.cat(x)[back], *(getattr(part, field.name) for part in parts))
                         for field in fields(Decoded)))


def each_tensor(f: Callable, *fields: Tensor | LogProbs | None) -> Tensor | LogProbs | None:
    """f of a field of one or several `Decoded`."""
    if isinstance(fields[0], LogProbs):
        return LogProbs(*map(f, *fields))
    return None if fields[0] is None else f(*fields)


def new_log_probs(sampling: Sampling, width: int) -> Tensor | None:
    """(B, width, 2) where `keep_log_probs` puts them; None if nobody wants them."""
    shape = len(sampling.seeds), width, 2
    return torch.zeros(shape, dtype=torch.float32, device=sampling.seeds.device) if sampling.log_probs else None


def keep_log_probs(state, positions: Tensor, sampling: Sampling, logits: Tensor, tokens: Tensor, ids: Tensor | None,
                   rows: Tensor | None = None) -> None:
    """Put the log-probabilities of tokens (B, K) at positions (B, K), if they are wanted; 0 for an invalid row.

    state: has `log_probs`; logits (R, N, V); ids (B, N, 2): see `id_range`; rows: see `token_log_probs`
    """
    if state.log_probs is not None:
        new = token_log_probs(**sampling.rows(logits), tokens=tokens, rows=rows, id_range=ids)
        values = torch.stack([new.sampled, new.full], -1).masked_fill((new.status != 0)[..., None], 0.0)
        state.log_probs.scatter_(1, positions[..., None].expand(-1, -1, 2), values)


def decoded_log_probs(log_probs: Tensor | None, num_known: Tensor, failed: Tensor) -> LogProbs | None:
    """What `keep_log_probs` has kept of the tokens of whole images. failed: (B, L) bool  where tokens mean nothing"""
    if log_probs is None:
        return None
    L = failed.shape[1]
    is_nothing = failed | (torch.arange(L, device=failed.device) < num_known[:, None])
    return LogProbs(*log_probs[:, :L].masked_fill(is_nothing[..., None], 0.0).unbind(-1))


class Step(NamedTuple):
    """What an observer sees of one step of speculative or Jacobi decoding."""

    links: TreeLinksResult   # of the trees
    position: Tensor         # (B,) int64    of the step's first token in the image
    accepted_nodes: Tensor   # (B, P) int32  -1 after the last
    num_accepted: Tensor     # (B,) int32
    active: Tensor           # (B,) bool     images that were not finished before the step


Progress = Callable[[int], None]                # called with how many tokens the batch has just gained
Observer = Callable[[Step], None]               # called after every step
Finished = Callable[[list[int], Decoded], None]  # called with requests whose images are finished, and their images
