"""The models as on a GPU, read by one op that multiplies by their own weights, against their modules."""
import copy

import pytest
import torch

from specvis.models import layers
from specvis.models.interface import Nodes
from specvis_kernels import join_weights, tree_links
from tests.cases.comparing import Recorder
from tests.tiny import tiny_pipeline

TREE = tree_links(torch.tensor([[-1, 0, 0, 1, 1]], dtype=torch.int32))
FUSED = {f"specvis_kernels::{op}" for op in ("rms_norm", "swiglu")}


def read(pipeline):
    """Hidden states of a condition and of a tree after it, by both models, and the caches."""
    gpt, eagle = pipeline.gpt, pipeline.eagle
    g = torch.Generator().manual_seed(0)
    dtype = gpt.output.weight.dtype
    condition, padding_mask = gpt.condition(torch.randn(2, 3, 8, generator=g).to(dtype),
                                            torch.tensor([[False, True, True], [True, True, True]]))
    cache, eagle_cache = gpt.new_cache(2, 12), eagle.new_cache(2, 12)
    tokens = torch.randint(64, (2, 5), generator=g)
    with Recorder() as recorder:
        parts = [gpt.prefill(condition, padding_mask, cache)]
        nodes = Nodes(TREE.depth, torch.tensor([3]), TREE.ancestors, padding_mask, 12)
        parts.append(gpt.extend(tokens, nodes, cache))
        parts.append(eagle.extend(tokens, parts[1], nodes, eagle_cache))
    return [*parts, cache.data, eagle_cache.data], set(recorder.names)


def size_of(model):
    """Bytes of all storages of a model's weights."""
    return sum({w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in model.parameters()}.values())


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 0.005), (torch.bfloat16, 0.04)])
@torch.no_grad()
def test_reads_what_modules_read(dtype, tolerance, monkeypatch, as_on_a_gpu):
    pipeline = tiny_pipeline().to(dtype).requires_grad_(False)
    weights, size = copy.deepcopy(pipeline.gpt.state_dict()), size_of(pipeline.gpt)
    got, names = read(pipeline)
    assert names > FUSED and not {name for name in names if "index_copy" in name or "silu" in name}
    assert size_of(pipeline.gpt) == size and all(map(torch.equal, weights.values(),
                                                     pipeline.gpt.state_dict().values()))
    with torch.enable_grad():
        assert not read(pipeline)[1] & FUSED
    monkeypatch.setattr(layers, "USE_KERNELS", False)
    expected, names = read(pipeline)
    assert not names & FUSED
    for a, b in zip(got, expected):
        assert (a.float() - b.float()).norm() < tolerance * b.float().norm()


def test_joined_weights_share_one_memory():
    weights = [torch.nn.Parameter(torch.randn(n, 4)) for n in (2, 3, 1)]
    before, same = [w.detach().clone() for w in weights], weights[1]
    joined = join_weights(weights)
    assert torch.equal(joined, torch.cat(before)) and weights[1] is same and all(map(torch.equal, weights, before))
    assert join_weights(weights).data_ptr() == joined.data_ptr()  # they are joined already
    joined[2:5] = 7
    assert (same == 7).all() and same.requires_grad
    assert join_weights(weights[::-1]).data_ptr() != joined.data_ptr()  # in another order they are not
