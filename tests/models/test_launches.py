"""How many kernels the layers of a target launch on a GPU, counted without one, on the device meta."""
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specvis_kernels import DecoderLayer, pack_layers
from specvis_kernels.triton.decoder_layers import decoder_layers


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


# heads of queries and of keys, D, hidden and intermediate size; biases and norms of heads; norms of what is added
SHAPES = {"XL": (20, 20, 64, 1280, 3584, False, False), "Emu3": (32, 8, 128, 4096, 14336, False, False),
          "Chameleon": (32, 32, 128, 4096, 11008, True, False), "Janus": (16, 16, 128, 2048, 5632, False, False),
          "GLM-Image": (32, 2, 128, 4096, 13696, True, True)}


@pytest.mark.parametrize("model", SHAPES)
@torch.inference_mode()
def test_launches_of_a_layer(model, ops_of_layers):
    """Four products, two norms, a rotation, the gate, and attention, whose parts a second kernel merges for few rows.
    What two layers launch and one does not is a layer's."""
    H, G, D, E, F, has_more, has_out_norms = SHAPES[model]

    def launches(number):
        q, (qkv, kv) = torch.empty(2, 17, E), ((H + 2 * G) * D, 700)
        norms = torch.empty(H + G, D), torch.empty(H + G, D)
        more = (torch.empty(qkv), torch.empty(E), norms) if has_more else (None, None, None)
        more = *more, *[torch.empty(E)] * (2 * has_out_norms)
        layers = pack_layers([DecoderLayer(*(torch.empty(*size) for size in (
            (qkv, E), (E, H * D), (F, E), (F, E), (E, F), (E,), (E,))), *more)] * number, torch.empty(E), heads=H)
        cache, integers = torch.empty(number, 2, kv, 2, G, D), torch.empty(1, 17, dtype=torch.int64)
        with Launches() as counted:
            decoder_layers(q, *layers[:3], cache, integers[0, :1], integers[..., None], integers,
                           torch.empty(kv, D // 2, 2), torch.empty(2, 120, dtype=torch.bool), *layers[3:5], 0,
                           *layers[5:])
        return counted.names

    with torch.device("meta"):
        one, two = launches(1), launches(2)
    assert len(two) - len(one) == (12 if has_out_norms else 10), two
    assert len(one) == len(two) // 2 + 1 and one[-1] == "specvis_kernels::rms_norm", one  # the last norm
