"""commit_kv: the keys and values of the accepted nodes move next to their root, in place."""
from collections.abc import Sequence

import torch
from torch import Tensor

from ._checks import check_dims, integers, to_integer
from ._define import checks, define
from .status import check_requests


def commit_kv(caches: Tensor | Sequence[Tensor], accepted_nodes: Tensor, num_accepted: Tensor, lengths: Tensor, *,
              row_dim: int | None = 0, column_dim: int | None = None, start: Tensor | None = None,
              slots: Tensor | None = None, backend: str | None = None) -> Tensor:
    """Move the keys and values of a draft tree's accepted nodes to the front of a cache. This writes to the caches.

    A target forward caches node n of request b in column start[b] + n. Then

        the root, node 0, moves to column lengths[b]
        the i-th accepted node (i = 1, 2, ..) moves to column lengths[b] + i

    in every cache and every layer. All other columns stay as they are. Row r of a cache belongs to request
    r % B: of R = 2 B rows the first B are the rows with the condition, the others the rows without it.

    A request is left alone, and its length is returned unchanged, if its numbers are out of range: its accepted nodes
    are not positive and rising, num_accepted is not within 0..P, lengths[b] is negative or above start[b], or a column
    or slot is not in the cache. So nothing is ever read or written out of bounds, and no move overwrites what a later
    one reads. With SPECVIS_CHECK=1 in the environment such a request is an error (StatusError).

    Args:
        caches:          written to: a tensor or a list of tensors of one shape and dtype, contiguous, with 1, 2, 4 or 8
                         bytes an element, no two in the same memory. (R, T, Hkv, D), as tree_attention reads it, has
                         column_dim 1; (R, H, T, D), as transformers has it, column_dim 2; and
                         (layers, R, T, 2, H, D) row_dim 1 and column_dim 2
        accepted_nodes:  (B, P) int32 or int64   of each request, from the root down, without the root; as verify_tree
                                                 gives them
        num_accepted:    (B,)   int32 or int64   how many there are; later entries are not read
        lengths:         (B,)   int32 or int64   how many columns are committed: the root's new column
        row_dim:         the dimension of the R rows, R a multiple of B; None with `slots`
        column_dim:      the dimension of the T columns, after row_dim; with `slots` the dimension of the slots. None:
                         1, but caches of four dimensions need it
        start:           (B,)   int32 or int64   the root's column now; None: lengths, where it stays
        slots:           (R, T) int32 or int64   of a paged cache: the slot of column t of row r. Two columns that
                                                 move do not share a slot. None: not paged
        backend:         None for the device's own kernel; a name from `backends()` to force one

    Returns:
        new_lengths:     (B,)   int64   lengths + 1 + num_accepted

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above, a cache is not contiguous or unlike the
            first, or the list is empty or has pairs: a list of pairs (k, v) must be flattened

    Examples:
        >>> cache = torch.tensor([[7, 8, 10, 11, 12, 13, 0]])    # columns 0 and 1 are committed, then nodes 0 to 3
        >>> commit_kv(cache, torch.tensor([[2, 3]]), torch.tensor([2]), torch.tensor([2]))
        tensor([5])
        >>> cache                                                # the root stays, nodes 2 and 3 follow it
        tensor([[ 7,  8, 10, 12, 13, 13,  0]])
    """
    caches = [caches] if isinstance(caches, Tensor) else caches
    if not isinstance(caches, (list, tuple)) or not caches:
        raise ValueError("caches must be a tensor or a list of at least one tensor")
    for i, cache in enumerate(caches):
        if not isinstance(cache, Tensor):
            advice = ": flatten the pairs into one list of tensors" * isinstance(cache, (list, tuple))
            raise ValueError(f"caches must be a tensor or a list of tensors, but caches[{i}] is a "
                             f"{type(cache).__name__}{advice}")
    B, P = check_dims("accepted_nodes", accepted_nodes, "BP")
    accepted_nodes = integers("accepted_nodes", accepted_nodes, torch.int32, B=B, P=P)
    num_accepted = integers("num_accepted", num_accepted, torch.int32, accepted_nodes, B=B)
    lengths = integers("lengths", lengths, torch.int64, accepted_nodes, B=B)
    if start is not None:
        start = integers("start", start, torch.int64, accepted_nodes, B=B)
    first = caches[0]
    for cache in caches:
        if cache.shape != first.shape or cache.dtype != first.dtype:
            raise ValueError(f"caches must have one shape and dtype, got {str(first.dtype)[6:]} {tuple(first.shape)} "
                             f"and {str(cache.dtype)[6:]} {tuple(cache.shape)}")
        if cache.device != accepted_nodes.device:
            raise ValueError(f"caches must be on {accepted_nodes.device} like the other tensors, got {cache.device}")
        if not cache.is_contiguous():
            raise ValueError("caches must be contiguous, since they are written to")
    if first.dtype.itemsize not in (1, 2, 4, 8):
        raise ValueError(f"caches must have 1, 2, 4 or 8 bytes an element, got {first.dtype}")
    if (row_dim is None) != (slots is not None):
        raise ValueError(f"row_dim must be None with slots, and only then, got {row_dim}")
    if column_dim is None:
        if first.ndim == 4:
            raise ValueError("column_dim must be given for caches of four dimensions: 1 for (R, T, Hkv, D), as "
                             f"tree_attention reads them, 2 for (R, H, T, D), as transformers has them, got "
                             f"{tuple(first.shape)}")
        column_dim = 1
    for name, value in (("row_dim", row_dim), ("column_dim", column_dim)):
        if to_integer(value) is None and (value is not None or name == "column_dim"):
            raise ValueError(f"{name} must be an integer{' or None' * (name == 'row_dim')}, got {value!r}")
    row_dim, column_dim = to_integer(row_dim), to_integer(column_dim)
    if not -1 < column_dim < first.ndim or row_dim is not None and not -1 < row_dim < column_dim:
        raise ValueError(f"row_dim and column_dim must be dimensions of {tuple(first.shape)}, the row's first, "
                         f"got {row_dim} and {column_dim}")
    R, T = check_dims("slots", slots, "RT") if row_dim is None else (first.shape[row_dim], first.shape[column_dim])
    if slots is not None:
        slots = integers("slots", slots, torch.int64, accepted_nodes, R=R, T=T)
    if R % B if B else R:
        raise ValueError(f"the rows must be a multiple of B={B}, got {R}")
    if T < 1 or first.shape[column_dim] < 1:
        raise ValueError(f"caches must have a column, got shape {tuple(first.shape)}")
    new_lengths = _call(backend, list(caches), accepted_nodes, num_accepted, lengths, start, slots,
                        -1 if row_dim is None else row_dim, column_dim)
    if checks(new_lengths):
        check_requests("commit_kv", new_lengths != lengths + 1 + num_accepted,
                       f"a request is left alone, since its accepted nodes do not rise from 1 on, num_accepted is not "
                       f"within 0..{P}, or a column is not among the T={T} of the caches (is column_dim={column_dim} "
                       "theirs?)")
    return new_lengths


def _oracle(caches: list[Tensor], accepted_nodes: Tensor, num_accepted: Tensor, lengths: Tensor, start: Tensor | None,
            slots: Tensor | None, row_dim: int, column_dim: int):
    B, P = accepted_nodes.shape
    num_slots = caches[0].shape[column_dim]
    is_paged = slots is not None
    if not is_paged:  # then a slot is a column of a row
        R, T = caches[0].shape[row_dim], num_slots
        num_slots = R * T
        slots = torch.arange(num_slots, device=lengths.device).view(R, T)
    R, T = slots.shape
    start = lengths if start is None else start

    index = torch.arange(P + 1, device=lengths.device)
    nodes = torch.cat([torch.zeros_like(lengths)[:, None], accepted_nodes.long()], 1)
    is_moved = index <= num_accepted[:, None]
    target, source = lengths[:, None] + index, start[:, None] + nodes
    is_valid = (num_accepted >= 0) & (num_accepted <= P) & (lengths >= 0) & (lengths <= start)
    is_valid = is_valid & ((target < T) & (source < T) | ~is_moved).all(1)
    is_valid = is_valid & ((nodes[:, 1:] > nodes[:, :-1]) | ~is_moved[:, 1:]).all(1)

    def in_rows(of_requests):
        return of_requests.repeat(R // max(B, 1), *[1] * (of_requests.ndim - 1))

    target, source = (slots.gather(1, in_rows(columns).clamp(0, T - 1)) for columns in (target, source))
    is_outside = (target < 0) | (target >= num_slots) | (source < 0) | (source >= num_slots)
    is_outside = (is_outside & in_rows(is_moved)).view(R // max(B, 1), B, P + 1).any(2).any(0)
    is_valid = is_valid & ~is_outside
    is_moved = in_rows(is_moved & is_valid[:, None])

    source_of = torch.arange(num_slots + 1, device=lengths.device)  # the last one takes the columns that do not move
    source_of.scatter_(0, torch.where(is_moved, target, num_slots).flatten(),
                       torch.where(is_moved, source, num_slots).flatten())
    source_of = source_of[:-1]
    for cache in caches:
        if is_paged:
            entries = cache.movedim(column_dim, 0)
            entries.copy_(entries[source_of])
        else:
            entries = cache.movedim((row_dim, column_dim), (0, 1))
            entries.copy_(entries[(source_of // T).view(R, T), (source_of % T).view(R, T)])
    return torch.where(is_valid, lengths + 1 + num_accepted, lengths)


_call = define("commit_kv", oracle=_oracle, writes=("caches",), batch=None,
               meta=lambda accepted_nodes, lengths: lengths.new_empty(accepted_nodes.shape[0]))
