"""What LlamaGen's GPT and its EAGLE head share: packed weights, rotary positions on a grid, attention, its cache."""
import zlib
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from specvis_kernels import PackedLayers, commit_kv, decoder_layers, rotate_into_cache, tree_attention
from specvis_kernels.compat._layers import IN_PANELS, is_unchanged, why_not_weights

from .interface import Nodes

USE_KERNELS = True  # False: PyTorch's operations read everything, for who compares the two
GLOBAL_HOOKS = nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks


class Packing:
    """Weights as ops for few rows read them: on a CPU copies, which take as much memory as the weights, on a GPU the
    weights themselves, of which some share memory then.

    A model calls `check` in `new_cache`, where a decoding begins, and `get` at each read. The weights are packed anew
    when they have changed. Only `check` sees that a module was replaced, or that numbers were written through
    `weight.data` where there is a copy. After a read with gradients `get` checks too: an optimizer may write without a
    trace.
    """

    def __init__(self):
        self.owners, self.weights, self.counted, self.hooks, self.dropouts = [], [], [], [], []
        self.state = self.sums = self.packed = self.why_not = None

    def __reduce__(self):
        return Packing, ()  # a copy of a model packs for itself

    def check(self, parts: Sequence[nn.Module], types: tuple[type, ...], pack: Callable[[], Any],
              multiple: int = 16, without_bias: Sequence[nn.Module] = (), why_not: str | None = None,
              on_gpu: bool = False) -> None:
        """Pack, if the ops can do what modules do, and the weights are not packed yet.

        Args:
            parts: the modules whose weights are packed
            types: they and their modules must have one of these
            pack:  makes the copies
            multiple: the number of the weights' inputs must be divisible by it
            without_bias: parts whose modules must have no bias, which `pack` would not read
            why_not: what the caller knows that keeps the ops from it; `self.why_not` says it, or what is found here
            on_gpu: whether there is a kernel for GPUs, too
        """
        modules = [module for part in parts for module in part.modules()]
        self.owners = [(module._parameters, name) for module in modules
                       for name, weight in module._parameters.items() if weight is not None]
        self.weights = [of[name] for of, name in self.owners]
        self.counted = [weight for weight in self.weights if not weight.is_inference()]
        self.hooks = [*GLOBAL_HOOKS, *(hooks for module in modules
                                       for hooks in (module._forward_hooks, module._forward_pre_hooks))]
        self.dropouts = [module for module in modules if isinstance(module, nn.Dropout) and module.p]
        has_bias = any(getattr(module, "bias", None) is not None for part in without_bias for module in part.modules())
        if has_bias or any(GLOBAL_HOOKS) or not all(is_unchanged(module, types) for module in modules):
            why_not = why_not or "modules with hooks, dropout, a bias or a forward of their own"
        self.why_not = why_not or why_not_weights(self.weights, multiple)
        is_copied = bool(self.weights) and self.weights[0].device.type in IN_PANELS
        if self.why_not or not (is_copied or on_gpu):
            self.packed = None
            return
        sums = [zlib.crc32(weight.detach().contiguous().view(torch.uint8).numpy())
                for weight in self.weights if is_copied]
        if not is_copied or self.packed is None or self.state_now() != self.state or sums != self.sums:
            self.packed = pack()
        self.state, self.sums = self.state_now(), sums

    def get(self, x: Tensor, check: Callable[[], None]) -> Any:
        """What `pack` gave, for reading x. None: the modules have to read it. check: calls `check`"""
        if torch.is_grad_enabled():
            self.state = None
            return None
        if (self.packed is None or not USE_KERNELS or x.device != self.weights[0].device
                or x.dtype != self.weights[0].dtype or torch.is_autocast_enabled(x.device.type)
                or is_transformed()):
            return None
        if self.state_now() != self.state:
            check()
        return self.packed

    def state_now(self) -> tuple:
        """Which tensors the weights are, how often each was written to, where it is; what modules would do beside."""
        return ([id(of.get(name)) for of, name in self.owners], [weight._version for weight in self.counted],
                [weight.data_ptr() for weight in self.weights], any(self.hooks),
                any(dropout.training for dropout in self.dropouts))


def is_transformed() -> bool:
    """Whether torch.compile, torch.func or make_fx traces what is done."""
    return (torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
            or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype == torch.float32:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).type_as(x) * self.weight


def grid_rotations(grid: int, head_dim: int, condition: int, spare: int = 0, base: float = 10000.0) -> Tensor:
    """Rotations (condition + grid**2 + spare, head_dim / 2, 2) float32 of LlamaGen's 2D RoPE, interleaved pairs.

    They are cosine and sine. A cell's first half turns by its row, its second half by its column. Condition positions
    are 0, not 1: there q = k = 0, so attention from and to them is uniform. `spare` positions after the grid are 0
    too. Drafted tokens that overshoot the image are there; they are thrown away.
    """
    half = head_dim // 2
    frequencies = 1.0 / base ** (torch.arange(0, half, 2, device="cpu")[: half // 2].float() / half)
    angles = torch.outer(torch.arange(grid, device="cpu").float(), frequencies)       # (grid, head_dim / 4)
    rows, columns = angles[:, None].expand(grid, grid, -1), angles[None].expand(grid, grid, -1)
    angles = torch.cat([rows, columns], -1).reshape(grid * grid, half)
    cells = torch.view_as_real(torch.polar(torch.ones_like(angles), angles))
    return F.pad(cells, (0, 0, 0, 0, condition, spare))


def rotations_of(module: torch.nn.Module, device: torch.device) -> Tensor:
    """module.rotations on this device. The table is no buffer: Module.to(torch.bfloat16) would round it."""
    if module.rotations.device != device:
        module.rotations = module.rotations.to(device)
    return module.rotations


class Cache:
    """Keys and values of all layers, allocated once: `data` (L, R, T, 2, H, D)."""

    def __init__(self, layers: int, rows: int, heads: int, columns: int, head_dim: int, *, device, dtype):
        self.data = torch.zeros(layers, rows, columns, 2, heads, head_dim, device=device, dtype=dtype)

    def select(self, rows: Tensor) -> "Cache":
        """A cache of these rows (int64) alone."""
        other = copy(self)
        other.data = self.data[:, rows]
        return other

    def insert(self, rows: Tensor, source: "Cache") -> None:
        """Let these rows (int64) be the rows of `source`, a cache for as many columns."""
        self.data[:, rows] = source.data

    def check(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        """Raise ValueError unless there are as many rows, at least as many columns, and entries of this dtype."""
        R, T = self.data.shape[1:3]
        if R != rows or T < columns or self.data.dtype != dtype:
            raise ValueError(f"cache must be {str(dtype)[6:]} with R={rows} rows and at least {columns} columns, got "
                             f"{str(self.data.dtype)[6:]} with {R} rows and {T} columns")

    def commit(self, accepted_nodes: Tensor, num_accepted: Tensor, lengths: Tensor) -> None:
        """Move the accepted nodes of a tree to the columns after its root, in every layer; see `ModelCache.commit`."""
        commit_kv(self.data, accepted_nodes, num_accepted, lengths, row_dim=1, column_dim=2)


class Reading:
    """What all layers share when they read N entries of R rows, each of which sees those that a mask says."""

    def __init__(self, module: nn.Module, position_ids: Tensor, mask: Tensor, dtype: torch.dtype):
        """module has a table of rotations, the last for all later positions; mask (R or 1, N, N) bool"""
        table = rotations_of(module, position_ids.device)
        turns = torch.view_as_complex(table[position_ids.clamp(max=len(table) - 1)])
        self.rotations = torch.stack([turns, turns, torch.ones_like(turns)], -2)[..., None, :]  # (.., 3, 1, D / 2)
        self.mask = torch.where(mask, 0.0, -torch.inf).to(dtype)[:, None]

    def attend(self, qkv: Tensor, heads: int, layer: int) -> Tensor:
        """Attention of the queries in qkv (R, N, 3 * H * D) to what they may see: (R, N, H * D)."""
        R, N, width = qkv.shape
        wide = qkv if qkv.dtype.itemsize >= 4 else qkv.float()
        pairs = torch.view_as_complex(wide.view(R, N, 3, heads, self.rotations.shape[-1], 2)) * self.rotations
        q, k, v = torch.view_as_real(pairs).view(R, N, 3, heads, -1).to(qkv.dtype).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return attended.transpose(1, 2).reshape(R, N, width // 3)


class NodesReading(Reading):
    """A reading of nodes after what a cache holds. They see what `Nodes` says."""

    def __init__(self, module: nn.Module, nodes: Nodes, cache: Cache):
        """module: it has a table of rotations"""
        self.module, self.nodes, self.cache = module, nodes, cache
        self.positions = nodes.lengths[:, None] + nodes.depth

    def read(self, x: Tensor, layers: PackedLayers, rotations: Tensor) -> Tensor:
        """All layers at once: hidden states of embeddings x (R, N, dim)."""
        nodes = self.nodes
        return decoder_layers(x, layers, self.cache.data, nodes.lengths, nodes.ancestors, self.positions, rotations,
                              first_node=nodes.first, key_mask=nodes.padding_mask)

    def attend(self, qkv: Tensor, heads: int, layer: int) -> Tensor:
        nodes, data = self.nodes, self.cache.data[layer]
        q = rotate_into_cache(qkv.to(data.dtype), data, nodes.lengths, self.positions,  # autocast has another dtype
                              rotations_of(self.module, qkv.device), first_node=nodes.first)
        return tree_attention(q, *data.unbind(2), nodes.lengths, nodes.ancestors,
                              key_mask=nodes.padding_mask).flatten(2)
