"""tree_mask: ancestor bits as the attention masks that attention kernels take."""
import torch
from torch import Tensor

from ._dispatch import check, check_count, check_dims, define

FORMS = ("bool", "additive", "packed")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def tree_mask(ancestors: Tensor, lengths: Tensor | None = None, *, form: str = "bool",
              columns: int | None = None, dtype: torch.dtype = torch.float32,
              backend: str | None = None) -> Tensor:
    """Make the mask by which each node of a tree attends to the cached tokens, to its ancestors and to itself.

    The keys of request b are its lengths[b] cached tokens and then its N nodes. Column c is visible to node n iff
    c < lengths[b], or node c - lengths[b] is n or an ancestor of n. An unused slot, one without a bit, sees only
    itself, so that no row is empty. Columns from lengths[b] + N on are visible to no node.

    Args:
        ancestors:  (B, N, W) int64   W = ceil(N / 64) words of bits, from `tree_links`
        lengths:    (B,)      int32   how many tokens each request has cached, >= 0; None: no such columns
        form:       "bool" is True where visible; "additive" is 0 where visible, else -inf; "packed" is bits, as
                    FlashInfer packs each request's segment: bit i % 8 of byte i // 8 is entry i of the flat
                    (N, columns) mask
        columns:    columns of the mask; None: N, without `lengths` only
        dtype:      float32, float16 or bfloat16, of the additive form
        backend:    None for the device's own kernel; a name from `backends()` to force one

    Returns:
        mask:       (B, N, columns) bool or `dtype`; packed: (B, ceil(N * columns / 8)) uint8, bits past the end 0

    Raises:
        ValueError: a dtype, shape or device differs from the above, N is 0, `form` or `dtype` is none of the
            above, or `columns` is < 1, or missing beside `lengths`

    Example:
        >>> import torch
        >>> from specvis_kernels import tree_links, tree_mask
        >>> parents = torch.tensor([[-1, 0, 0, 1]], dtype=torch.int32)   # 0 -> 1, 2 and 1 -> 3
        >>> lengths = torch.tensor([2], dtype=torch.int32)               # two cached tokens before the tree
        >>> tree_mask(tree_links(parents).ancestors, lengths, columns=6).int()
        tensor([[[1, 1, 1, 0, 0, 0],
                 [1, 1, 1, 1, 0, 0],
                 [1, 1, 1, 0, 1, 0],
                 [1, 1, 1, 1, 0, 1]]], dtype=torch.int32)
    """
    B, N, W = check_dims("ancestors", ancestors, "BNW")
    check("ancestors", ancestors, torch.int64, B=B, N=N, W=(N + 63) // 64)
    if N < 1:
        raise ValueError(f"ancestors must have N >= 1, got shape ({B}, {N}, {W})")
    if lengths is not None:
        check("lengths", lengths, torch.int32, like=ancestors, B=B)
        lengths = lengths.contiguous()
        if columns is None:
            raise ValueError("columns must be given when lengths are")
    columns = N if columns is None else columns
    check_count("columns", columns, 1)
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be one of {', '.join(str(d)[6:] for d in FLOATS)}, got {dtype}")
    return _call(backend, ancestors.contiguous(), lengths, form, columns, dtype)


def _oracle(ancestors, lengths, form, columns, dtype):
    B, N, W = ancestors.shape
    node = torch.arange(N, device=ancestors.device)
    bits = (ancestors.unsqueeze(-1) >> torch.arange(64, device=ancestors.device)) & 1  # (B, N, W, 64)
    sees_node = bits.view(B, N, W * 64)[..., :N] == 1
    is_used = sees_node.any(-1, keepdim=True)
    sees_node = sees_node | (~is_used & (node == node.unsqueeze(1)))

    length = lengths.long().view(B, 1, 1) if lengths is not None else 0
    column = torch.arange(columns, device=ancestors.device).expand(B, N, columns)
    column_node = column - length
    is_visible = sees_node.gather(2, column_node.clamp(0, N - 1)) & (column_node >= 0) & (column_node < N)
    is_visible = is_visible | (is_used & (column < length))

    if form == "bool":
        return is_visible
    if form == "additive":
        return torch.where(is_visible, 0.0, -torch.inf).to(dtype)
    entries = torch.nn.functional.pad(is_visible.view(B, N * columns).int(), (0, -N * columns % 8))
    place_values = 1 << torch.arange(8, device=ancestors.device)
    return (entries.view(B, (N * columns + 7) // 8, 8) * place_values).sum(-1).to(torch.uint8)


def _meta(ancestors, lengths, form, columns, dtype):
    B, N, _ = ancestors.shape
    if form == "packed":
        return ancestors.new_empty(B, (N * columns + 7) // 8, dtype=torch.uint8)
    return ancestors.new_empty(B, N, columns, dtype=torch.bool if form == "bool" else dtype)


_call = define(
    "tree_mask(Tensor ancestors, Tensor? lengths, str form, SymInt columns, ScalarType dtype) -> Tensor",
    oracle=_oracle, meta=_meta)
