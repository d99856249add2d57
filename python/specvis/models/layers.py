"""What LlamaGen's GPT and its EAGLE drafter share: rotary positions on a grid and attention with a cache."""
import torch
import torch.nn.functional as F
from torch import Tensor


def grid_rotations(grid: int, head_dim: int, condition: int, spare: int = 0, base: float = 10000.0) -> Tensor:
    """Rotations (condition + grid**2 + spare, head_dim / 2) complex64 of LlamaGen's 2D RoPE, interleaved pairs.

    A cell's first half turns by its row, its second half by its column. Condition positions are 0, not 1:
    there q = k = 0, so attention from and to them is uniform. `spare` positions behind the grid are 0 too;
    drafted tokens that overshoot the image stand there and are thrown away.
    """
    half = head_dim // 2
    frequencies = 1.0 / base ** (torch.arange(0, half, 2)[: half // 2].float() / half)
    angles = torch.outer(torch.arange(grid).float(), frequencies)                     # (grid, head_dim / 4)
    rows, columns = angles[:, None].expand(grid, grid, -1), angles[None].expand(grid, grid, -1)
    angles = torch.cat([rows, columns], -1).reshape(grid * grid, half)
    cells = torch.polar(torch.ones_like(angles), angles)
    return torch.cat([cells.new_zeros(condition, half), cells, cells.new_zeros(spare, half)])


def rotations_at(module: torch.nn.Module, position_ids: Tensor) -> Tensor:
    """module.rotations at position_ids (R, N) int64; all positions behind the table get its last entry.

    The table is no buffer: Module.to(torch.bfloat16) would cast its complex numbers to real ones.
    """
    if module.rotations.device != position_ids.device:
        module.rotations = module.rotations.to(position_ids.device)
    return module.rotations[position_ids.clamp(max=module.rotations.shape[0] - 1)]


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """x (R, N, H, D) turned pair by pair by rotations (R or 1, N, D / 2)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations[:, :, None]).flatten(-2).type_as(x)


class Cache:
    """Keys and values of all layers, allocated once: `data` (L, 2, R, H, T, D)."""

    def __init__(self, layers: int, rows: int, heads: int, columns: int, head_dim: int, *, device, dtype):
        self.data = torch.zeros(layers, 2, rows, heads, columns, head_dim, device=device, dtype=dtype)

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Put keys and values (R, H, N, D) at columns `slots` (R, N) int64; return the first `columns` of both."""
        index = slots[:, None, :, None].expand_as(keys)
        self.data[layer, 0].scatter_(2, index, keys)
        self.data[layer, 1].scatter_(2, index, values)
        return self.data[layer, 0, :, :, :columns], self.data[layer, 1, :, :, :columns]

    def commit(self, accepted_nodes: Tensor, num_accepted: Tensor, lengths: Tensor) -> None:
        """Move the accepted nodes of a tree to the columns behind its root, in every layer; see `ModelCache.commit`.

        Behind the last accepted node every column is copied onto itself.

        Args:
            accepted_nodes: (R, P) int32, num_accepted: (R,) int32, lengths: (R,) int64  the root's column
        """
        index = torch.arange(accepted_nodes.shape[1], device=lengths.device)
        target = lengths[:, None] + 1 + index
        source = torch.where(index < num_accepted[:, None], lengths[:, None] + accepted_nodes, target)
        heads = self.data.shape[3]
        data = self.data.flatten(0, 1).flatten(1, 2)                       # (2L, RH, T, D), a view
        rows = torch.arange(data.shape[1], device=data.device)[:, None]
        data[:, rows, target.repeat_interleave(heads, 0)] = data[:, rows, source.repeat_interleave(heads, 0)]


def attend(q: Tensor, k: Tensor, v: Tensor, rotations: Tensor, mask: Tensor, *, cache: Cache | None = None,
           layer: int = 0, slots: Tensor | None = None) -> Tensor:
    """Attention of q to k, v (R, N, H, D) and, with a cache, to what it holds; returns (R, N, H * D).

    mask (R or 1, N, T) bool or additive: T = N without a cache, else the number of its columns to look at.
    """
    q, k, v = rotate(q, rotations).transpose(1, 2), rotate(k, rotations).transpose(1, 2), v.transpose(1, 2)
    if cache is not None:
        k, v = cache.write(layer, k, v, slots, mask.shape[-1])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None]).transpose(1, 2).flatten(2)
