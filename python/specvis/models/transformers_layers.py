"""The cache of transformers' models, and their positions."""
import torch
from torch import Tensor

from .layers import Cache


class SlotCache(Cache):
    """Keys and values of R rows, as transformers asks for them; each read says in which columns to keep its own."""

    is_compileable = False

    def begin_read(self, slots: Tensor, columns: int) -> None:
        """slots (R, N) int64: where the next entries are. They may see the first `columns` columns."""
        self.slots, self.num_columns = self.flat_slots(slots), columns

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Keep (R, heads, N, head_dim) of a layer, and return all that may be seen."""
        heads = tuple(self.data.shape[4:])
        if not heads == keys.shape[1::2] == values.shape[1::2]:
            raise ValueError(f"model must have keys and values of {heads[0]} heads of {heads[1]}, as its configuration "
                             f"says, got {tuple(keys.shape[1::2])} and {tuple(values.shape[1::2])} "
                             "(jacobi_generate takes others)")
        entries = torch.stack([keys, values], 1).permute(0, 3, 1, 2, 4).flatten(0, 1)
        self.data[layer].flatten(0, 1).index_copy_(0, self.slots, entries)
        seen = self.data[layer, :, :self.num_columns].permute(2, 0, 3, 1, 4)
        return seen[0], seen[1]

    def get_seq_length(self, *_) -> int:
        return 0  # asked for where there are no position_ids


def positions_of(position_ids: Tensor, padding_mask: Tensor) -> Tensor:
    """Positions (R, N) that count from each row's first real entry. padding_mask: (R, S) bool"""
    return (position_ids - (~padding_mask).sum(1, keepdim=True)).clamp(min=0)
