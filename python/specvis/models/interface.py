"""What a model must offer to be decoded by the loops of `specvis.decoding`: a target, a drafter, and their caches.

These are protocols: a class that has the methods fits, it need not inherit anything. `models.llamagen.GPT` is such a
target; `decoding.drafters` has two drafters, and one of them makes a drafter of any target.

A model reads R rows at once, which are independent of each other. Its cache has numbered columns, and what is read is
kept there until the column is written again. Every read says in which columns to keep its entries (`slots`) and which
columns each entry may see (`mask`). The loop needs this freedom for trees: sibling drafts have the same position in
the image, must not see each other, and stand in columns of their own.
"""
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class ModelCache(Protocol):
    """What a model keeps of the entries that it has read: R rows of columns.

    It may also have `select(rows)`, rows int64, which gives a cache of these rows alone. Then Jacobi decoding lets the
    images of a batch go that are finished before the others.
    """

    def commit(self, accepted_nodes: Tensor, num_accepted: Tensor, lengths: Tensor) -> None:
        """Move the accepted nodes of a draft tree to the columns behind the tree's root.

        Node n of row r is in column lengths[r] + n, the root is node 0. The i-th accepted node, for i from 0 to
        num_accepted[r] - 1, goes to column lengths[r] + 1 + i. Nodes are moved to the front only, and in order, but
        the ranges may overlap. What is in the columns behind the last accepted node does not matter any more.

        Args:
            accepted_nodes: (R, P) int32  the nodes of the accepted path, in order; -1 behind its end
            num_accepted:   (R,) int32    how many they are
            lengths:        (R,) int64    the column of the root
        """


@runtime_checkable
class TargetModel(Protocol):
    """A model of images: grid x grid tokens in raster order, behind a condition of `prefix_len` entries.

    A hidden state is any vector from which the model can tell the logits. It may be the logits themselves. Only a
    drafter that reads hidden states (EAGLE's) needs more of it.
    """

    prefix_len: int   # S, how many entries a condition has, at least 1
    grid: int         # an image has L = grid * grid tokens
    vocab_size: int   # V

    def null_condition(self, batch: int) -> Tensor:
        """The condition (batch, S, dim) that guidance is measured against."""

    def new_cache(self, rows: int, columns: int) -> ModelCache:
        """An empty cache for `rows` rows of at most `columns` entries."""

    def prefill(self, condition: Tensor, padding_mask: Tensor, cache: ModelCache) -> Tensor:
        """Read the conditions into columns 0 to S - 1.

        Args:
            condition:    (R, S, dim)
            padding_mask: (R, S) bool  True where the condition is real; the padding must not count
        Returns:
            (R, S, H) hidden states; the last one predicts the first token
        """

    def extend(self, tokens: Tensor, position_ids: Tensor, mask: Tensor, cache: ModelCache, slots: Tensor) -> Tensor:
        """Read tokens behind what is in the cache.

        Args:
            tokens:       (R, N) int64
            position_ids: (R, N) int64    S + a token's position in the image; behind the image a token does not
                count, but must not be an error
            mask:         (R, N, T) bool  which of the first T columns each token sees: the conditions, the tokens
                before it, and itself
            slots:        (R, N) int64    the columns to keep the tokens in, below T; they are written before the mask
                is applied, so that the tokens of one read see each other
        Returns:
            (R, N, H) hidden states, each of which predicts what follows its token
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, N, H) hidden states -> (R, N, V) float32."""


@runtime_checkable
class Drafter(Protocol):
    """Who proposes tokens for a target, for both rows of each of B requests: R = 2B (see `sampling.cfg_inputs`).

    It is asked for the same batch from the first token to the last one, so it holds the conditions itself.
    """

    prefix_len: int        # how many entries its cache has before the first token's
    padding_mask: Tensor   # (R, prefix_len) bool  True where these are real

    def new_cache(self, columns: int) -> Any:
        """An empty cache for R rows of at most `columns` entries. The loop only hands it on: a drafter reads the
        accepted tokens once more, so nothing of its drafts is committed."""

    def prefill(self, hidden: Tensor, cache: Any) -> None:
        """Read the conditions into columns 0 to prefix_len - 1. hidden (R, S, H): the target's states at them."""

    def extend(self, tokens: Tensor, previous_hidden: Tensor, position_ids: Tensor, mask: Tensor, cache: Any,
               slots: Tensor) -> Tensor:
        """Read tokens behind what is in the cache, as `TargetModel.extend` does.

        Args:
            previous_hidden: (R, N, H)  the hidden state before each token: the target's for a token of the image, the
                drafter's own for a draft. A drafter that reads tokens alone ignores it.
            position_ids:    (R, N) int64  prefix_len + a token's position in the image
        Returns:
            (R, N, H) hidden states
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, N, H) hidden states -> (R, N, V) float32."""
