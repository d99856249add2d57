"""What a model must offer to be decoded by the loops of `specvis.decoding`: a target, a draft model, and their caches.

These are protocols: a class that has the methods fits, it need not inherit anything. `models.llamagen.GPT` is such a
target; `decoding.draft_model` has two draft models, and one of them makes a draft model of any target.

A model reads R rows at once, which are independent of each other. Row r belongs to request r % B: with guidance each of
B requests has a row that reads its condition and one that reads none. A model's cache has numbered columns, and what is
read is kept there until the column is written again. Every read says in which columns its tokens are and what each of
them sees (`Nodes`). The loop needs this freedom for trees: sibling drafts have the same position in the image, must not
see each other, and have columns of their own.
"""
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from specvis_kernels import tree_links, tree_mask


def inference(function: Callable) -> Callable:
    """`function` without gradients, and with models in their own dtypes: torch.autocast around it changes no token."""
    @wraps(function)
    def run(*args, **kwargs):
        with torch.no_grad(), ExitStack() as stack:
            for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
                stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return run


@dataclass
class Nodes:
    """Where the tokens of one read are, and what they see: N nodes of a tree of drafts for each of R rows.

    Node j of request b is in column lengths[b] + j. A node sees the columns before lengths[b], but for the padding
    of the condition, and of the tree's nodes its ancestors and itself. All shapes stay the same from step to step.
    Where a model has `specvis_kernels.tree_attention`, it needs no mask; others ask for `mask` and `slots`.
    """

    depth: Tensor         # (B or 1, N) integers  how many ancestors each node has; -1: it is not used
    lengths: Tensor       # (B,) int64       the column of node 0, which is prefix_len + its position in the image
    ancestors: Tensor     # (B, N, W) int64  bits, as `tree_links` gives them; a node's own is among them
    padding_mask: Tensor  # (R, S) bool      True where the condition is real
    columns: int          # all of this is before that column of the cache, but in images that are finished
    first: int = 0        # the number of the first node that is read; those before it were read already

    @property
    def position_ids(self) -> Tensor:
        """(R, N) int64 prefix_len + a token's position in the image; after the image any will do. A node that is not
        used has its root's."""
        return self.of_rows(self.lengths[:, None] + self.depth.clamp(min=0))

    @property
    def slots(self) -> Tensor:
        """(R, N) int64 the columns to keep the tokens in. To be written before the mask is applied."""
        index = torch.arange(self.first, self.first + self.depth.shape[1], device=self.lengths.device)
        return self.of_rows(self.lengths[:, None] + index)

    @property
    def mask(self) -> Tensor:
        """(R, N, columns) bool: which columns each token sees."""
        num_nodes = self.first + self.ancestors.shape[1]
        ancestors = F.pad(self.ancestors, (0, 0, self.first, 0))[..., :(num_nodes + 63) // 64]
        mask = tree_mask(ancestors, self.lengths.int(), columns=self.columns)[:, self.first:]
        mask = self.of_rows(mask)
        mask[..., :self.padding_mask.shape[1]].logical_and_(self.padding_mask[:, None])
        return mask

    @staticmethod
    def chain(n: int, lengths: Tensor, padding_mask: Tensor, columns: int) -> "Nodes":
        """n nodes in a row for each request, each the child of the node before it."""
        depth, ancestors = torch.arange(n, device=lengths.device), chain_ancestors(len(lengths), n, lengths.device)
        return Nodes(depth[None], lengths, ancestors, padding_mask, columns)

    def of_rows(self, x: Tensor) -> Tensor:
        """What belongs to each of B requests, for each of R rows."""
        return x.repeat(len(self.padding_mask) // len(x), *[1] * (x.ndim - 1))


def chain_ancestors(batch: int, n: int, device: torch.device) -> Tensor:
    """The ancestors (B, n, W) int64 of the nodes of a chain, in bits as `tree_links` gives them."""
    parents = torch.arange(-1, n - 1, dtype=torch.int32, device=device).expand(batch, -1)
    return tree_links(parents).ancestors


@runtime_checkable
class ModelCache(Protocol):
    """What a model keeps of the entries that it has read: R rows of columns.

    It may also have two methods for batches whose images finish at different times, with rows int64. `select(rows)`
    gives a cache of these rows alone, so that finished images can be let go. `insert(rows, source)` lets them be the
    rows of another cache for as many columns, so that the next image can take the place of a finished one.
    """

    def commit(self, accepted_nodes: Tensor, num_accepted: Tensor, lengths: Tensor) -> None:
        """Move the accepted nodes of a draft tree to the columns after the tree's root.

        In the rows of request b node n is in column lengths[b] + n, and the root is node 0. The i-th accepted node, for
        i from 0 to num_accepted[b] - 1, goes to column lengths[b] + 1 + i. Nodes are moved to the front only, and in
        order, but the ranges may overlap. What is in the columns after the last accepted node does not matter any
        more. `specvis_kernels.commit_kv` does this.

        Args:
            accepted_nodes: (B, P) int32  the nodes of the accepted path, in order; -1 after its end
            num_accepted:   (B,) int32    how many they are
            lengths:        (B,) int64    the column of the root
        """


@runtime_checkable
class TargetModel(Protocol):
    """A model of images: rows of tokens in raster order, after a condition of `prefix_len` entries.

    It may have more, for models whose images are no mere grid of codes; `models.transformers` has all of it:

    id_range(positions):       for positions (..) int64 in the image the ids [first, last) that a token may have there,
                               (.., 2) int64. Where it is [x, x + 1), token x is forced, and no method takes another one
                               for it. Behind the image any range will do, but an empty one. None: all ids, everywhere.
    codes:                     the ids [first, last) that stand for codes, a pair of numbers: a table of neighbors has a
                               row for each. Otherwise all ids do.
    null_inputs(padding_mask): the conditions (B, S, dim) that guidance is measured against, and their own padding masks
                               (B, S), for conditions with these masks (B, S). Otherwise they are `null_condition`'s,
                               under the masks of the conditions.
    has_guidance:              False if there is nothing that guidance could be measured against. Then all requests must
                               have guidance 1, and the model reads one row of each, R = B. Otherwise R = 2B.
    num_tokens:                L, if tokens of another grid come before the grid's own. Otherwise L = rows * columns.

    It may also have an attribute `can_replay`, which is True. Then a CUDA device captures the steps of decoding and
    runs their kernels again without Python. So `extend`, `logits`, `id_range` and the cache's `commit` must do all
    their work on the device, in memory that stays the same: they read nothing back, copy nothing from the host, count
    nothing in Python, and make no memory of the cache anew. A step then reads up to 1024 columns that nobody has
    written yet, so that one graph serves long: attention should skip them, as `tree_attention` does.

    A hidden state is any vector from which the model can tell the logits. It may be the logits themselves. Only a
    draft model that reads hidden states (EAGLE's) needs more of it.
    """

    prefix_len: int   # S, how many entries a condition has, at least 1
    grid: int | tuple[int, int]  # (rows, columns) of tokens: L = rows * columns; or n, for n rows and n columns
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

    def extend(self, tokens: Tensor, nodes: Nodes, cache: ModelCache) -> Tensor:
        """Read tokens after what is in the cache.

        Args:
            tokens: (R, N) int64
            nodes:  where they are, and what they see; a token after the image does not count, but must not be an
                error
        Returns:
            (R, N, H) hidden states, each of which predicts what follows its token
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, N, H) hidden states -> (R, N, V) float32, float16 or bfloat16: the ops read each of them."""


def rows_and_columns(grid: int | tuple[int, int]) -> tuple[int, int]:
    """What `TargetModel.grid` says."""
    return (grid, grid) if isinstance(grid, int) else tuple(grid)


def num_tokens(target: TargetModel) -> int:
    """L, how many tokens an image of a target has."""
    rows, columns = rows_and_columns(target.grid)
    return getattr(target, "num_tokens", rows * columns)


def columns_and_tokens(target: TargetModel) -> tuple[int, int]:
    """How many tokens a row of an image has, and the image (L)."""
    return rows_and_columns(target.grid)[1], num_tokens(target)


def has_guidance(target: TargetModel) -> bool:
    """Whether a model reads each request without its condition, too. See `TargetModel`."""
    return getattr(target, "has_guidance", True)


def id_range(target: TargetModel, positions: Tensor) -> Tensor | None:
    """The ids (.., 2) that tokens may have at positions (..); None: all. See `TargetModel`."""
    of_positions = getattr(target, "id_range", None)
    return None if of_positions is None else of_positions(positions)


def codes(target: TargetModel) -> tuple[int, int]:
    """The ids [first, last) that stand for codes. See `TargetModel`."""
    return getattr(target, "codes", (0, target.vocab_size))


@runtime_checkable
class DraftModel(Protocol):
    """Who proposes tokens for a target, for the same R rows of B requests as it reads (see `sampling.cfg_inputs`).

    It is asked for the same batch from the first token to the last one, so it holds the conditions itself. It may also
    have `select(requests)`, which gives a draft model for some of the B requests alone. That is needed where requests
    wait for a place in a batch; then its cache has `insert`, as `ModelCache` says. And it may have `can_replay`, as
    `TargetModel` says: steps are captured if both say so. If it has a `grid` and a `vocab_size`, they are compared with
    the target's. If its `reads_hidden` is False, it reads tokens alone: then it can refresh the guesses of Jacobi
    decoding, where it gets None in place of hidden states.
    """

    prefix_len: int        # how many entries its cache has before the first token's
    padding_mask: Tensor   # (R, prefix_len) bool  True where these are real

    def new_cache(self, columns: int) -> Any:
        """An empty cache for R rows of at most `columns` entries. The loop only hands it on: a draft model reads the
        accepted tokens once more, so nothing of its drafts is committed."""

    def prefill(self, hidden: Tensor, cache: Any) -> None:
        """Read the conditions into columns 0 to prefix_len - 1. hidden (R, S, H): the target's states at them."""

    def extend(self, tokens: Tensor, previous_hidden: Tensor, nodes: Nodes, cache: Any) -> Tensor:
        """Read tokens after what is in the cache, as `TargetModel.extend` does.

        Args:
            previous_hidden: (R, N, H)  the hidden state before each token: the target's for a token of the image, the
                draft model's own for a draft. A draft model that reads tokens alone ignores it.
        Returns:
            (R, N, H) hidden states
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, N, H) hidden states -> (R, N, V) float32, float16 or bfloat16, of one dtype at every call."""
