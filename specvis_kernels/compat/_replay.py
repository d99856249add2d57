"""CUDA graphs, and a forward of a transformers model as one: its layers by `decoder_layers`, the rest by itself."""
from collections import Counter
from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor, nn

from .. import commit_kv, decoder_layers
from ._layers import IN_PANELS, are_unchanged, pack_decoder, why_not

# Whose forward does nothing that a graph cannot hold. Others are read by their own modules.
MODELS = {"LlamaForCausalLM", "Emu3ForCausalLM", "Emu3ForConditionalGeneration"}


class CUDAGraphs:
    """CUDA graphs of functions that take turns on the same memory.

    They share one pool of memory for tensors that live within a step. That is safe because they are launched one after
    another, and because the result of one is not needed any more when the next one is launched.
    """

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)  # on the tensors' device, whichever is the current one
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable):
        """Run a function on the stream on which it will be captured: libraries keep workspaces for each stream."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = function()
        current.wait_stream(self.stream)
        return result

    def capture(self, function: Callable) -> tuple[Callable, object]:
        """What launches the function, and its result, which each launch overwrites. Capturing runs nothing.
        RuntimeError if the function does what cannot be captured: nothing was run then, but CUDA may be unusable."""
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer context restores the stream if capturing fails. Other threads may go on allocating memory.
            with torch.cuda.stream(self.stream), torch.cuda.graph(graph, self.pool, self.stream, "thread_local"):
                result = function()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # CUDA raises it for everything that a graph cannot hold
            raise RuntimeError("a step cannot be captured in a CUDA graph: a model that says can_replay must not read "
                               "values back to the host, nor copy any from it, within a step") from error
        return graph.replay, result


GRAPHS = {"cuda": CUDAGraphs}  # how steps are captured on a device


def decoder_of(model: nn.Module) -> nn.Module | None:
    """The decoder in a model that `ReplayedDecoder` can read; None: the model's own modules read it."""
    kind, device = type(model), model.device.type
    if (device in IN_PANELS or kind.__name__ not in MODELS or not kind.__module__.startswith("transformers.")
            or not are_unchanged(model) or torch.is_autocast_enabled(device)):
        return None
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return next((m for m in model.modules() if hasattr(m, "layers") and not why_not(m, num_layers)), None)


class ReplayedDecoder:
    """Reads nodes for R rows after what its cache holds. On CUDA the third read of as many nodes is captured in a
    graph, which later ones replay: they overwrite its logits."""

    def __init__(self, model: nn.Module, decoder: nn.Module, output: Callable, is_real: Tensor, num_columns: int,
                 num_positions: int):
        """output: makes what a decoder gives of hidden states; is_real: (R, S) bool, where the prompts are no padding
        """
        self.output, self.is_real, self.decoder = output, is_real, copy(decoder)
        self.decoder.forward = self.hidden_states  # other threads may use the model: this is a copy, of equal weights
        self.model = with_decoder(model, decoder, self.decoder)
        self.layers, self.rotations = pack_decoder(decoder, num_positions)
        qkv, head_dim = self.layers.matrices[0], 2 * self.rotations.shape[1]
        heads = (len(qkv) // head_dim - self.layers.heads) // 2
        self.data = qkv.new_zeros(decoder.config.num_hidden_layers, len(is_real), num_columns, 2, heads, head_dim)
        self.graphs = GRAPHS[qkv.device.type](qkv.device) if qkv.device.type in GRAPHS else None
        self.inputs, self.num_runs, self.captured = {}, Counter(), {}

    def caches(self) -> list[dict[int, Tensor]]:
        """Keys and values (R, heads, T, D) of each layer, which are parts of `data`."""
        return [dict(enumerate(part.transpose(2, 3))) for part in self.data.unbind(3)]

    def commit(self, accepted_nodes: Tensor, num_accepted: Tensor, lengths: Tensor) -> None:
        commit_kv(self.data, accepted_nodes, num_accepted, lengths, row_dim=1, column_dim=2)

    def logits(self, *new: Tensor) -> Tensor:
        """ids (R, N), positions (R, N), lengths (B,), ancestors (B, N, W) -> (R, N, V)"""
        N = new[0].shape[1]
        if N not in self.inputs:
            self.inputs[N] = tuple(map(torch.clone, new))
        inputs = self.inputs[N]
        for kept, tensor in zip(inputs, new):
            kept.copy_(tensor)
        self.num_runs[N] += 1
        if not self.graphs or self.num_runs[N] <= 2:
            return self.graphs.warm_up(lambda: self.read(*inputs)) if self.graphs else self.read(*inputs)
        if N not in self.captured:
            self.captured[N] = self.graphs.capture(lambda: self.read(*inputs))
        replay, logits = self.captured[N]
        replay()
        return logits

    def read(self, ids: Tensor, positions: Tensor, lengths: Tensor, ancestors: Tensor) -> Tensor:
        self.nodes = lengths, ancestors, positions
        return self.model(ids, position_ids=positions).logits

    def hidden_states(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **_):
        """What the decoder's forward is here; around it the model does what it always does."""
        x = self.decoder.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return self.output(decoder_layers(x, self.layers, self.data, *self.nodes, self.rotations,
                                          key_mask=self.is_real))


def with_decoder(module: nn.Module, decoder: nn.Module, other: nn.Module) -> nn.Module:
    """A copy of a module that has `other` in the place of a decoder, and all its other parts."""
    if module is decoder:
        return other
    new = copy(module)
    new._modules = {name: with_decoder(part, decoder, other) if part is not None and decoder in [*part.modules()]
                    else part
                    for name, part in module._modules.items()}
    return new
