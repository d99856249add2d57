"""Between two forwards of the target, a small model refreshes the guesses of Jacobi decoding (`jacobi:refresh=2`).

Why is in docs/methods.md. Let l be the target's logits at a position, q the small model's before the forward, and r the
small model's after it, when it has read the newest draws. The guess is the draw, by the position's own noise, from
l + TRUST (r - q), and at a position that the target has not read, from r.
"""
import torch
from torch import Tensor

from ..models.interface import DraftModel, Nodes, chain_ancestors, id_range
from ..models.threads import copy, in_parts
from .batch_state import BatchState
from .sampling import take_nodes

TRUST = 0.6  # 0.3 and 1 gained less
LEAST = torch.finfo(torch.float32).min


class Refresh(BatchState):
    """The small model's state for B requests. A refresh: it reads the newest guesses, and they are drawn anew."""

    PAIRS, CACHES = ("logits", "padding_mask"), ("cache",)

    def __init__(self, draft_model: DraftModel, num_refreshes: int, num_tokens: int, window: int):
        """draft_model reads tokens alone; num_refreshes: between two forwards of the target; window: W, its guesses"""
        self.draft_model, self.num_refreshes = draft_model, num_refreshes
        self.padding_mask, device = draft_model.padding_mask.clone(), draft_model.padding_mask.device
        N = 2 * window + 2  # the most that one read takes: what the target has read, and what it may read next
        self.num_columns = draft_model.prefix_len + num_tokens + N
        self.cache = draft_model.new_cache(self.num_columns)
        self.index = torch.arange(N, device=device)
        self.ancestors = chain_ancestors(len(self.padding_mask), N, device)
        self.logits = None  # (R, 1 + W, V) the small model's newest, of the nodes that the target reads next

    def prefill(self, state, num_known_columns: int) -> None:
        """Read the conditions and that many columns of known tokens, and draw the first guesses."""
        self.draft_model.prefill(None, self.cache)
        for first in range(0, num_known_columns, len(self.index)):
            tokens = state.tokens[:, first:min(first + len(self.index), num_known_columns)]
            self.read(tokens, torch.full_like(state.counts, first), num_known_columns)
        self.redraw(state, state.counts, torch.full_like(state.counts, -1), state.settings.num_tokens)

    def read(self, tokens: Tensor, positions: Tensor, columns: int) -> Tensor:
        """Read tokens (B, N) from positions (B,) of the image on, of caches with at most that many columns of tokens.

        Returns hidden states (R, N, H).
        """
        N, prefix_len = tokens.shape[1], self.draft_model.prefix_len
        nodes = Nodes(self.index[None, :N], positions + prefix_len, self.ancestors[:len(tokens), :N],
                      self.padding_mask, min(prefix_len + columns, self.num_columns))
        return self.draft_model.extend(nodes.of_rows(tokens), None, nodes, self.cache)

    def redraw(self, state, counts: Tensor, num_accepted: Tensor, columns: int,
               target_logits: Tensor | None = None) -> None:
        """Refresh the guesses of the next forward.

        Args:
            counts:        (B,) int64    how many tokens each image had before the target's forward
            num_accepted:  (B,) int64    how many of its guesses were right; -1: there was no forward
            columns:       no image that went on had more tokens before the forward
            target_logits: (R, N, V)     at its nodes; None: there was no forward
        """
        N = 1 + state.settings.window if target_logits is None else target_logits.shape[1]
        nodes = num_accepted[:, None] + 1 + self.index[:N]  # of the forward, if it read them: these come next
        positions, before = counts[:, None] + nodes, None
        ids = id_range(state.settings.target, positions)
        if target_logits is not None:
            before = self.before(target_logits, nodes)
        for number in range(self.num_refreshes):
            if number == 0:  # the tokens that are new, too
                read = (counts - 1)[:, None] + self.index[:2 * N]
                hidden = take_nodes(self.read(state.tokens.gather(1, read), counts - 1, columns + 2 * N), nodes)
            else:
                hidden = self.read(state.tokens.gather(1, positions - 1), counts + num_accepted, columns + 2 * N)
            logits = self.draft_model.logits(hidden)
            state.tokens.scatter_(1, positions, self.guesses(state, positions, ids, logits, before))
        if self.logits is None:
            self.logits = logits.clone()
        copy(self.logits[:, :N], logits)

    def before(self, target_logits: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """What guesses keep of the forward before them: l - TRUST q, or 0 where it did not read them, (R * N, V)
        float32; and by what r is multiplied, (R * N, 1).

        nodes: (B, N) int64  the forward's nodes at the positions of the guesses; it read the first N
        """
        (R, N, V), B = target_logits.shape, len(nodes)
        first = torch.arange(0, R * N, N, device=nodes.device)[:, None]  # of the nodes of each row
        index = (first + nodes.clamp(max=N - 1).repeat(R // B, 1)).view(-1)
        was_read = (nodes < N).repeat(R // B, 1).view(-1, 1)
        target, own = target_logits.flatten(0, 1), self.logits[:, :N].flatten(0, 1)

        def kept(index, was_read):
            rows = target.index_select(0, index).float().sub(own.index_select(0, index), alpha=TRUST)
            return rows.nan_to_num_(LEAST, LEAST, LEAST).mul_(was_read)  # of ids that a model forbids by -inf

        return in_parts(kept, V, index, was_read.float()), torch.where(was_read, TRUST, 1.0)

    def guesses(self, state, positions: Tensor, ids: Tensor | None, logits: Tensor,
                before: tuple[Tensor, Tensor] | None) -> Tensor:
        """Guesses (B, N) at the positions (B, N), where ids (B, N, 2) are allowed, from logits (R, N, V).

        before: of the method of that name; None: there was no forward
        """
        if before:
            kept, weight = before
            rows = logits.float().flatten(0, 1)
            logits = in_parts(torch.addcmul, rows.shape[1], kept, rows, weight).view(logits.shape)
        return state.settings.sampling.draw(logits, positions, ids).tokens
