"""What takes one of PyTorch's threads is what PyTorch itself does, and a step of decoding asks for no second one."""
from dataclasses import replace

import pytest
import torch
import torch.fx.experimental.proxy_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import specvis.decoding.jacobi
import specvis.decoding.speculative
from specvis.decoding.continuous import parallel_decode
from specvis.decoding.continuous_state import ContinuousSampling
from specvis.decoding.sampling import Sampling
from specvis.models import layers
from specvis.models.llamagen import GPTConfig
from specvis.models.mar import MAR
from specvis.models.threads import MOST, cast, cat, copy, embed, in_parts, layer_norm
from specvis.pipelines.discrete import Pipeline
from specvis_kernels import backends
from tests.tiny import TINY, VOCABULARY, vq_config

DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def numbers(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).mul(99).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [4, MOST // 12, MOST], ids=["few", "more", "many"])
def test_each_is_what_pytorch_does(dtype, size):
    x, y = numbers(3, 4, size, dtype=dtype), numbers(3, 2, size, dtype=dtype)
    with torch.inference_mode():
        for dim, parts in ((1, [x, y]), (1, [x[:, 1:], y]), (-1, [x, x[..., :3]]), (0, [x.transpose(0, 1), x[0][None].
                                                                                        expand(4, 4, -1)[:, :3]])):
            assert torch.equal(cat(parts, dim), torch.cat(parts, dim))
        for other in DTYPES:
            assert torch.equal(cast(x, other), x.to(other)) and cast(x, other).dtype == other
        for source in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
            to = torch.zeros_like(x)
            copy(to, source)
            assert torch.equal(to, x)
        assert torch.equal(in_parts(lambda a, b: a + b, size, x.flatten(0, 1), x.flatten(0, 1)), (x + x).flatten(0, 1))


def test_embeddings_and_norms():
    embedding, norm = torch.nn.Embedding(50, 96), torch.nn.LayerNorm(96, eps=1e-5)
    torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
    tokens, others = torch.randint(50, (2, 400)), torch.randint(50, (2, 400))
    with torch.no_grad():
        assert torch.equal(embed(embedding, tokens), embedding(tokens))
        assert torch.equal(torch.func.vmap(lambda ids: embed(embedding, ids))(tokens), embedding(tokens))
        traced = torch.fx.experimental.proxy_tensor.make_fx(lambda ids: embed(embedding, ids))(tokens)
        assert torch.equal(traced(others), embedding(others))
        x = 3 * embedding(tokens) + 1
        assert torch.allclose(layer_norm(norm, x), norm(x), atol=1e-5)
    embed(embedding, tokens).sum().backward()  # gradients go through
    assert embedding.weight.grad.sum() == tokens.numel() * 96
    calls = []
    embedding.register_forward_hook(lambda *_: calls.append(1))  # it is called once
    with torch.no_grad():
        assert embed(embedding, tokens).shape == (2, 400, 96) and calls == [1]


class Largest(TorchDispatchMode):
    """The operations of PyTorch that write more numbers than it gives one thread."""

    def __init__(self):
        super().__init__()
        self.found, self.is_paused = [], True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        writes = func.namespace == "aten" and "empty" not in func.name() and not any(
            r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        for tensor in tree_leaves(result) if writes and not self.is_paused else ():
            if isinstance(tensor, torch.Tensor) and tensor.numel() > MOST:
                self.found.append((func.name(), tuple(tensor.shape)))
        return result

    def seen(self, function, skip=0):
        """The same function, watched from this call on."""
        calls = []

        def call(*args, **kwargs):
            calls.append(None)
            self.is_paused = len(calls) <= skip
            result = function(*args, **kwargs)
            self.is_paused = True
            return result
        return call


requires_ops = pytest.mark.skipif("cpu" not in backends("decoder_layers"), reason="the modules take threads")


@requires_ops
@pytest.mark.parametrize("by_ops", [True, False], ids=["ops", "modules"])
@pytest.mark.parametrize("method", ["jacobi:window=8", "eagle1", "lantern:k=8", "adt-tree"])
def test_a_step_on_eight_pictures_takes_one_thread_of_pytorchs(monkeypatch, method, by_ops):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPTConfig(dim=128, layers=1, heads=4, vocabulary=8192, grid=6, condition_tokens=3, caption_dim=8,
                           ffn_multiple=16)
        pipeline = Pipeline(config, replace(vq_config(4), codebook_size=8192), VOCABULARY, None).to(torch.bfloat16)
    largest = Largest()
    monkeypatch.setattr(layers, "USE_KERNELS", by_ops)
    for module in (specvis.decoding.jacobi, specvis.decoding.speculative):
        monkeypatch.setattr(module, "run_step", largest.seen(module.run_step))
    with largest:
        pipeline.tokens(["red heart"] * 8, method, Sampling.of(list(range(8)), guidance=2.0))
    assert bool(largest.found) is not by_ops, largest.found


@requires_ops
@pytest.mark.parametrize("by_ops", [True, False], ids=["ops", "modules"])
def test_a_forward_of_mar_takes_one_thread_of_pytorchs(monkeypatch, by_ops):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        mar = MAR(replace(TINY, dim=128, tokens=256, buffer=64)).eval().requires_grad_(False)
    largest = Largest()
    monkeypatch.setattr(layers, "USE_KERNELS", by_ops)
    monkeypatch.setattr(mar, "forward", largest.seen(mar.forward))
    with largest:
        parallel_decode(mar, torch.tensor([3]), ContinuousSampling.of([1], guidance=2.0), 2)
    assert bool(largest.found) is not by_ops, largest.found
