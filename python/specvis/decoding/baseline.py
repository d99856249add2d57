"""Plain decoding, the baseline: one target forward for each token.

This is the loop to read first. Each token is drawn with the noise of its position (see `specvis_kernels.draw_tokens`).
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from specvis_kernels import INVALID_ROW

from ..models.interface import Nodes, TargetModel, chain_ancestors, id_range, inference, num_tokens
from .decoded import Decoded, Progress, decoded_log_probs, keep_log_probs, new_log_probs
from .driver import new_cache, read_known
from .graphs import Captured, can_replay, round_up
from .requests import check_known_tokens, check_request
from .sampling import Sampling, cfg_inputs


@inference
def decode(target: TargetModel, condition: Tensor, padding_mask: Tensor, sampling: Sampling,
           progress: Progress | None = None, *, known_tokens: Tensor | None = None) -> Decoded:
    """Draw the images position by position, all images together. A known token takes the place of the draw.

    Args:
        condition:    (B, S, dim)  as `GPT.condition` gives it
        padding_mask: (B, S) bool  True where the condition is real
        known_tokens: (B, K) int64  the first tokens of each image, -1 after them; None: no token is known
    Raises:
        ValueError: an argument differs from the above
    """
    check_request(target, condition, padding_mask, sampling)
    num_known = check_known_tokens(known_tokens, len(condition), target)
    condition, padding_mask = cfg_inputs(target, condition, padding_mask)
    state = BaselineState(target, padding_mask, sampling, known_tokens, num_known)
    run = Captured(baseline_step)
    for i in range(state.first, state.num_tokens):
        if i == state.first:
            hidden = read_known(target, condition, padding_mask, state.tokens[:, :i], state.tokens, state.cache)
            draw_next(state, hidden[:, -1:])
        else:
            run(state)
        if progress:
            progress(sum(n <= i for n in num_known))
    return state.decoded()


def baseline_step(state: "BaselineState") -> None:
    """Read the newest token of every image, and draw the next one."""
    lengths = state.position[:, 0] + (state.target.prefix_len - 1)
    nodes = Nodes(state.depth, lengths, state.itself, state.padding_mask, state.graph_key)
    draw_next(state, state.target.extend(nodes.of_rows(state.newest), nodes, state.cache))


def draw_next(state: "BaselineState", hidden: Tensor) -> None:
    """Draw the next token of every image from hidden states (R, 1, H), unless it is known."""
    logits, ids = state.target.logits(hidden), id_range(state.target, state.position)
    drawn = state.sampling.draw(logits, state.position, ids)
    tokens = drawn.tokens
    if state.is_ragged:
        known = state.tokens.gather(1, state.position)
        tokens = torch.where(known < 0, tokens, known)
    state.tokens.scatter_(1, state.position, tokens)
    state.status.scatter_(1, state.position, drawn.status)
    keep_log_probs(state, state.position, state.sampling, logits, tokens, ids)
    state.newest.copy_(tokens)
    state.position += 1


class BaselineState:
    """The images of the batch: a step draws the same position of all of them."""

    def __init__(self, target: TargetModel, padding_mask: Tensor, sampling: Sampling, known_tokens: Tensor | None,
                 num_known: list[int]):
        """padding_mask (R, S) bool"""
        B, L, device = len(num_known), num_tokens(target), padding_mask.device
        self.target, self.padding_mask, self.sampling, self.num_tokens = target, padding_mask, sampling, L
        self.num_columns, self.num_known = target.prefix_len + L, num_known
        self.cache = new_cache(target, len(padding_mask), self.num_columns)
        self.can_replay = can_replay(target)  # which may depend on what new_cache found
        self.tokens = torch.full((B, L), -1, dtype=torch.int64, device=device)  # -1: not known
        if known_tokens is not None:
            self.tokens[:, :known_tokens.shape[1]] = known_tokens
        self.status = torch.zeros(B, L, dtype=torch.int32, device=device)
        self.log_probs = new_log_probs(sampling, L)
        self.first, self.is_ragged, self.num_steps = min(num_known), min(num_known) < max(num_known), 0
        self.position = torch.full((B, 1), self.first, device=device)  # of the token that is drawn next
        self.newest = torch.zeros_like(self.position)                  # the token before it
        self.depth, self.itself = torch.zeros_like(self.position), chain_ancestors(B, 1, device)

    def next_graph_key(self) -> int:
        """How many columns of the cache the next step sees at most."""
        return min(round_up(self.target.prefix_len + self.first + 1 + self.num_steps, self), self.num_columns)

    def decoded(self) -> Decoded:
        """The images, each of which ends at its first failure. The first forward draws a token, so it is no step."""
        index, num_known = torch.arange(self.num_tokens, device="cpu"), torch.tensor(self.num_known, device="cpu")
        has_failed = ((self.status.cpu() & INVALID_ROW) * (index >= num_known[:, None])).cumsum(1) > 0  # here or before
        is_step = (index > num_known[:, None]) & ~F.pad(has_failed, (1, -1))
        zeros = torch.zeros(len(num_known), dtype=torch.float32, device="cpu")
        failed = has_failed.to(self.tokens.device)
        return Decoded(self.tokens.masked_fill(failed, 0), num_known, 1 + is_step.sum(1),
                       is_step.long() - 1, torch.zeros_like(is_step, dtype=torch.int64), zeros,
                       has_failed[:, -1], decoded_log_probs(self.log_probs, num_known.to(failed.device), failed))
