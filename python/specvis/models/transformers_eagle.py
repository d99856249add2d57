"""EAGLE heads for targets of transformers (arXiv:2401.15077): one layer of the target's kind on its hidden states.

LANTERN (arXiv:2410.03355) has released such heads for Chameleon's family; the names are theirs. Entry j holds token
j + 1 and the target's hidden state at token j, prompts included, and predicts the hidden state at token j + 1. Its
position is that of the hidden state.
"""
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specvis_kernels import pack_weight, packed_linear

from .interface import Nodes
from .layers import Packing
from .llamagen import condition_mask
from .threads import cast, cat
from .transformers import ImageModel, SlotCache


class TransformersEagleHead(nn.Module):
    """Drafts for one target, whose embedding, rotations and head it shares; `EagleDraftModel` decodes with it."""

    def __init__(self, target: ImageModel, bias: bool = True, device: torch.device | str | None = None):
        """An untrained head, of the target's dtype and on its device, if no other is given. bias: whether `fc` has one

        Raises:
            ValueError: the target's decoder has no list of layers that are made of a configuration and a number
        """
        super().__init__()
        dim, device = target.config.hidden_size, device or target.device
        try:
            with torch.device(device):
                layer = type(target.decoder.layers[0])(target.config, 0)
        except (AttributeError, TypeError) as error:
            raise ValueError("target must have a decoder with layers of its configuration, as Llama has them, got a "
                             f"{type(target.decoder).__name__}") from error
        self.fc, self.layers = nn.Linear(2 * dim, dim, bias, device=device), nn.ModuleList([layer])
        self.to(target.embed.weight.dtype).eval()
        self.target, self.reader, self.packing = target, Reader(target, self.layers), Packing()

    def check(self, target: ImageModel) -> None:
        """Raise ValueError unless the head was made for this target, and is of its dtype and on its device."""
        weight = self.fc.weight
        if target is not self.target:
            raise ValueError(f"head must be made for this target, got one for another {type(self.target).__name__}")
        for what, wanted, got in (("dtype", target.embed.weight.dtype, weight.dtype),
                                  ("device", target.device, weight.device)):
            if wanted != got:
                raise ValueError(f"head must have the target's {what}, {wanted}, got {got}")

    @property
    def can_replay(self) -> bool:
        return self.reader.can_replay

    def joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The layer's input (R, N, dim) of the tokens' embeddings and the hidden states before them."""
        x = cat([embedded, hidden.to(embedded.dtype)], -1).to(self.fc.weight.dtype)
        packed = self.packing.get(x, self.pack)
        return self.fc(x) if packed is None else cast(packed_linear(x, packed[0], self.fc.out_features, packed[1]),
                                                      x.dtype)

    def pack(self) -> None:
        def pack():
            return pack_weight(self.fc.weight), None if self.fc.bias is None else self.fc.bias.detach().float()

        self.packing.check([self.fc] if self.reader.packing else [], (nn.Linear,), pack)

    def new_cache(self, rows: int, columns: int) -> SlotCache:
        if bool(self.reader.packing) != bool(self.target.packing):  # use_decoder_layers was called
            self.reader.packing = self.target.packing and Packing()
        self.pack()
        return self.reader.new_cache(rows, columns)

    def prefill(self, condition: Tensor, hidden: Tensor, padding_mask: Tensor, cache: SlotCache) -> None:
        """Read prompts but for their last entries. condition, hidden (R, S, dim); padding_mask (R, S - 1) bool"""
        x = self.joined(condition[:, 1:], hidden[:, :-1])
        slots = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        self.reader.read(x, slots, padding_mask, condition_mask(padding_mask, x.shape[1]), cache, slots)

    def extend(self, tokens: Tensor, previous_hidden: Tensor, nodes: Nodes, cache: SlotCache) -> Tensor:
        """Hidden states (R, N, dim) at tokens (R, N), after what the cache holds. See `DraftModel.extend`."""
        return self.reader.read_nodes(self.joined(self.target.embed_tokens(tokens), previous_hidden), nodes, cache)

    def teacher_forced(self, condition: Tensor, padding_mask: Tensor, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Predict the target's hidden states (B, L - 1, dim) at the first L - 1 tokens.

        Args:
            condition:    (B, S, dim), padding_mask (B, S) bool
            tokens:       (B, L) int64
            hidden:       (B, S + L - 2, dim)  the target's at what is before each entry but the first, from entry 0 on
        """
        embedded = torch.cat([condition[:, 1:], self.target.embed_tokens(tokens[:, :-1])], 1)
        predicted = self.reader.read_causally(self.joined(embedded, hidden), padding_mask[:, :-1])
        return predicted[:, condition.shape[1] - 1:]


class Reader(ImageModel):
    """A target whose decoder has the head's layer in place of its own ones, and no last norm."""

    def __init__(self, target: ImageModel, layers: nn.ModuleList):
        vars(self).update(vars(target))
        self.target, self.packing, self.num_layers, self.decoder = target, None, 1, copy(target.decoder)
        self.decoder._modules = {**target.decoder._modules, "layers": layers, "norm": nn.Identity()}

    def positions(self, position_ids: Tensor, padding_mask: Tensor) -> Tensor:
        """The target's positions of the hidden states. padding_mask (R, S - 1): a prompt's last entry is never padding
        """
        return self.target.positions(position_ids, F.pad(padding_mask, (0, 1), value=True))
