"""How many kernels a forward of the target model launches on a GPU, counted without one, on the device meta."""
import dataclasses
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specvis.models import layers
from specvis.models.interface import Nodes
from specvis.models.llamagen import GPT, text_config


class Launches(TorchDispatchMode):
    """Keeps the names of the operations that launch a kernel: they write to an argument or to new memory. To be used in
    inference mode: there one call of PyTorch's is one operation. On a GPU most of these are one kernel."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, made = ({leaf.untyped_storage()._cdata for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
                       for tree in ((args, kwargs), out))
        if func._schema.is_mutable or not (made & given or "empty" in func.name()):
            self.names += [func.name()] * (2 if func.name() == "specvis_kernels::tree_attention" else 1)
        return out


@torch.inference_mode()
def launches_of_forward(gpt: GPT, num_nodes: int) -> Counter:
    """How often a forward over a tree launches which operation, for one request with guidance. `tree_attention` counts
    twice: if there are as few rows and heads as here, a second kernel merges."""
    cache, integers = gpt.new_cache(2, gpt.prefix_len + gpt.config.tokens + num_nodes), {"dtype": torch.int64}
    nodes = Nodes(torch.empty(1, num_nodes, **integers), torch.empty(1, **integers),
                  torch.empty(1, num_nodes, 1, **integers), torch.empty(2, gpt.prefix_len, dtype=torch.bool), 700)
    for _ in range(2):  # the first one hands tables to the device
        with Launches() as launches:
            gpt.logits(gpt.extend(torch.empty(2, num_nodes, **integers), nodes, cache))
    return Counter(launches.names)


@pytest.mark.parametrize("fused, of_layer, of_others", [(set(), 23, 15), ({"meta"}, 11, 4)])
def test_launches_of_a_layer_and_of_all_else(fused, of_layer, of_others, monkeypatch):
    """Of LlamaGen-XL, with PyTorch's operations and with the fused ones. What two layers launch and one does not is a
    layer's."""
    monkeypatch.setattr(layers, "FUSED_DEVICES", fused)
    with torch.device("meta"):
        one, two = (launches_of_forward(GPT(dataclasses.replace(text_config("XL"), layers=number)).bfloat16(), 60)
                    for number in (1, 2))
    layer = two - one
    assert layer.total() == of_layer, layer
    assert (one - layer).total() == of_others, one - layer
