"""Between two forwards of the target, a small model redraws the guesses of Jacobi decoding (`jacobi:refresh=2`).

A forward of the target draws all positions of a window at once, each after guesses. So it corrects a token, and what it
draws after that does not know of the correction. A small model says what the correction changes. Let l be the target's
logits at a position, q the small model's before that forward, and r the small model's after it, when it has read the
newest draws. Then the guess is the draw, by the position's own noise, from

    l + TRUST (r - q)

and at a position that the target has not read, from r. The small model reads the new guesses again, and so on: a
correction travels as far as the small model carries it. A seed-exact method may take any guess.
"""
import torch
from torch import Tensor

from ..models.interface import DraftModel, Nodes, id_range
from ..models.threads import copy, in_parts
from .batch_state import BatchState
from .sampling import take_nodes
from .trees import chain_ancestors

TRUST = 0.6  # `python -m benchmarks.refresh` compares it with others


class Refresh(BatchState):
    """The small model's state for B requests."""

    PAIRS, CACHES = ("logits", "padding_mask"), ("cache",)

    def __init__(self, draft_model: DraftModel, num_refreshes: int, num_tokens: int, max_window: int):
        """num_refreshes: forwards of the small model between two of the target; num_tokens: L, of an image"""
        self.draft_model, self.num_refreshes = draft_model, num_refreshes
        self.padding_mask, device = draft_model.padding_mask.clone(), draft_model.padding_mask.device
        N = 2 * max_window + 2  # what a forward of the target has read, and what the next one may read
        self.num_columns = draft_model.prefix_len + num_tokens + N
        self.cache = draft_model.new_cache(self.num_columns)
        self.index = torch.arange(N, device=device)
        self.ancestors = chain_ancestors(len(self.padding_mask), N, device)
        self.logits = None  # (R, 1 + W, V) the small model's newest, of the nodes that the target reads next

    @property
    def num_rows(self) -> int:
        return len(self.padding_mask)

    def prefill(self, state, num_known_columns: int) -> None:
        """Read the conditions and that many columns of known tokens, and draw the first guesses."""
        self.draft_model.prefill(None, self.cache)
        for first in range(0, num_known_columns, len(self.index)):
            tokens = state.tokens[:, first:min(first + len(self.index), num_known_columns)]
            self.read(tokens, torch.full_like(state.counts, first), num_known_columns)
        self.redraw(state, state.counts, torch.full_like(state.counts, -1), state.settings.windows, self.num_columns)

    def read(self, tokens: Tensor, positions: Tensor, columns: int) -> Tensor:
        """Read tokens (B, N) from positions (B,) of the image on, of caches with at most that many columns of tokens.

        Returns hidden states (R, N, H).
        """
        N, prefix_len = tokens.shape[1], self.draft_model.prefix_len
        nodes = Nodes(self.index[None, :N], positions + prefix_len, self.ancestors[:len(tokens), :N],
                      self.padding_mask, min(prefix_len + columns, self.num_columns))
        return self.draft_model.extend(nodes.of_rows(tokens), None, nodes, self.cache)

    def redraw(self, state, counts: Tensor, num_accepted: Tensor, windows: Tensor, columns: int,
               target_logits: Tensor | None = None) -> None:
        """Draw the guesses of the next forward.

        Args:
            counts:        (B,) int64    how many tokens each image had before the target's forward
            num_accepted:  (B,) int64    how many of its guesses were right; -1: there was no forward
            windows:       (B,) int64    how many guesses it read
            columns:       no image that went on had more tokens before it
            target_logits: (R, N, V)     at its nodes; None: there was no forward
        """
        settings = state.settings
        N = 1 + settings.max_window if target_logits is None else target_logits.shape[1]
        nodes = num_accepted[:, None] + 1 + self.index[:N]  # of the forward, if it read them: these come next
        positions, read = counts[:, None] + nodes, (counts - 1)[:, None] + self.index[:2 * N]
        ids, own = id_range(settings.target, positions), settings.own(positions, state.tokens.shape[1] - 1)
        if target_logits is not None:
            was_read = (nodes <= windows[:, None]).repeat(self.num_rows // len(counts), 1).view(-1, 1)
            before = [take_nodes(x, nodes.clamp(max=N - 1)).flatten(0, 1) for x in (target_logits, self.logits[:, :N])]
        for _ in range(self.num_refreshes):
            hidden = self.read(state.tokens.gather(1, read), read[:, 0], columns + 2 * N)
            logits = rows = self.draft_model.logits(take_nodes(hidden, nodes))
            if target_logits is not None:
                rows = in_parts(changed, rows.shape[2], *before, rows.flatten(0, 1), was_read).view_as(rows)
            drawn = settings.sampling.draw_from(rows, positions, ids, log_probs=False)
            state.tokens.scatter_(1, own, drawn.tokens)
        if self.logits is None:
            self.logits = logits.clone()
        copy(self.logits[:, :N], logits)


def changed(target: Tensor, before: Tensor, now: Tensor, was_read: Tensor) -> Tensor:
    """The target's logits (K, V) and how the small model's have changed; where the target has none, the small model's.

    was_read: (K, 1) bool  whether the target has any
    """
    rows = torch.where(was_read, target.add(now - before, alpha=TRUST), now)
    return rows.nan_to_num_(-torch.inf, torch.inf, -torch.inf)  # NaN of ids that both models forbid by -inf
