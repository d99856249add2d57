"""tree_mask: ancestor bits as the attention masks that attention kernels take."""
import torch
from torch import Tensor

from ._checks import check, check_count, check_dims, check_one_of, for_each, integers
from ._define import checked_once, checks, define
from .status import check_requests

FORMS = ("bool", "additive", "packed", "packed_rows")
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@checked_once
def tree_mask(ancestors: Tensor, lengths: Tensor | None = None, *, start: Tensor | None = None, form: str = "bool",
              columns: int | None = None, dtype: torch.dtype | str = torch.float32,
              backend: str | None = None) -> Tensor:
    """Make the mask by which each node of a tree attends to the cached tokens, to its ancestors and to itself.

    The keys of request b are its lengths[b] cached tokens and, from column start[b] on, its N nodes. Column c is
    visible to node n iff c < lengths[b], or node c - start[b] is n or an ancestor of n. An unused slot, one without a
    bit, sees only itself, so that no row is empty. Columns between the cached tokens and the nodes are visible to no
    node, and neither are those from start[b] + N on. Nodes without a column of their own are cut off; with
    SPECVIS_CHECK=1 in the environment they are an error (StatusError).

    Args:
        ancestors:  (B, N, W) or (1, N, W) int64   W = ceil(N / 64) words of bits, from `tree_links`
        lengths:    (B,) int32 or int64   how many tokens each request has cached, >= 0; None: no such columns
        start:      (B,) int32 or int64   the column of node 0; None: lengths, the column after the cached tokens
        form:       "bool" is True where visible, as scaled_dot_product_attention takes it; "additive" is 0 where
                    visible, else -inf; "packed" is bits, as FlashInfer packs each request's segment: bit i % 8 of byte
                    i // 8 is entry i of the flat (N, columns) mask; "packed_rows" is bits too, but each node's row
                    begins with a byte of its own
        columns:    columns of the mask; None: N, without `lengths` and `start` only
        dtype:      float32, float16 or bfloat16, of the additive form; or its name
        backend:    None for the device's own kernel; a name from `backends()` to force one

    Returns:
        mask:       (B, N, columns) bool or `dtype`; packed: (B, ceil(N * columns / 8)) uint8; packed_rows:
                    (B, N, ceil(columns / 8)) uint8; bits past the end are 0

    Raises:
        ValueError: a dtype, shape or device differs from the above, N is 0, `form` or `dtype` is unknown,
            or `columns` is < 1, or missing although `lengths` or `start` is given

    Examples:
        >>> parents = torch.tensor([[-1, 0, 0, 1]])                      # 0 -> 1, 2 and 1 -> 3
        >>> lengths = torch.tensor([2])                                  # two cached tokens before the tree
        >>> tree_mask(tree_links(parents).ancestors, lengths, columns=6).int()
        tensor([[[1, 1, 1, 0, 0, 0],
                 [1, 1, 1, 1, 0, 0],
                 [1, 1, 1, 0, 1, 0],
                 [1, 1, 1, 1, 0, 1]]], dtype=torch.int32)
    """
    B, N, W = check_dims("ancestors", ancestors, "BNW", not_empty="N")
    for name, tensor in (("lengths", lengths), ("start", start)):
        if tensor is not None and B == 1:
            B, = check_dims(name, tensor, "B")
    check("ancestors", ancestors, torch.int64, may_be_one=True, B=B, N=N, W=(N + 63) // 64)
    if lengths is not None:
        lengths = integers("lengths", lengths, torch.int32, ancestors, B=B)
    if start is not None:
        start = integers("start", start, torch.int64, ancestors, B=B)
    if columns is None and (lengths is not None or start is not None):
        raise ValueError("columns must be given when lengths or start are")
    columns = check_count("columns", N if columns is None else columns, 1)
    check_one_of("form", form, FORMS)
    dtype = FLOATS.get(dtype, dtype)  # a name
    if dtype not in FLOATS.values():
        raise ValueError(f"dtype must be one of {', '.join(FLOATS)}, got {dtype!r}")
    mask = _call(backend, for_each(ancestors, B), lengths, start, form, columns, dtype)
    if checks(mask):
        first = next((first for first in (start, lengths) if first is not None), torch.zeros(B, dtype=torch.int64))
        check_requests("tree_mask", (first < 0) | (first > columns - N),
                       f"columns={columns} do not hold its cached tokens and N={N} nodes")
    return mask


def _oracle(ancestors: Tensor, lengths: Tensor | None, start: Tensor | None, form: str, columns: int,
            dtype: torch.dtype):
    B, N, W = ancestors.shape
    node = torch.arange(N, device=ancestors.device)
    bits = (ancestors.unsqueeze(-1) >> torch.arange(64, device=ancestors.device)) & 1  # (B, N, W, 64)
    sees_node = bits.view(B, N, W * 64)[..., :N] == 1
    is_used = sees_node.any(-1, keepdim=True)
    sees_node = sees_node | (~is_used & (node == node.unsqueeze(1)))

    length = lengths.long().view(B, 1, 1) if lengths is not None else 0
    column = torch.arange(columns, device=ancestors.device).expand(B, N, columns)
    column_node = column - (length if start is None else start.clamp(-N, columns).view(B, 1, 1))  # no overflow
    is_visible = sees_node.gather(2, column_node.clamp(0, N - 1)) & (column_node >= 0) & (column_node < N)
    is_visible = is_visible | (is_used & (column < length))

    if form == "bool":
        return is_visible
    if form == "additive":
        return torch.where(is_visible, 0.0, -torch.inf).to(dtype)
    rows = is_visible.int() if form == "packed_rows" else is_visible.view(B, N * columns).int()
    num_bits = columns if form == "packed_rows" else N * columns  # of a piece that begins with a byte of its own
    entries = torch.nn.functional.pad(rows, (0, -num_bits % 8)).unflatten(-1, ((num_bits + 7) // 8, 8))
    place_values = 1 << torch.arange(8, device=ancestors.device)
    return (entries * place_values).sum(-1).to(torch.uint8)


def _meta(ancestors, form, columns, dtype):
    B, N, _ = ancestors.shape
    if form == "packed":
        return ancestors.new_empty(B, (N * columns + 7) // 8, dtype=torch.uint8)
    if form == "packed_rows":
        return ancestors.new_empty(B, N, (columns + 7) // 8, dtype=torch.uint8)
    return ancestors.new_empty(B, N, columns, dtype=torch.bool if form == "bool" else dtype)


_call = define("tree_mask", oracle=_oracle, meta=_meta)
