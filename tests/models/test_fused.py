"""The models with rms_norm, swiglu and rotate_into_cache, as on a GPU, against PyTorch's operations."""
import pytest
import torch

from specvis.models import layers
from specvis.models.interface import Nodes
from specvis_kernels import tree_links
from tests.cases.comparing import Recorder
from tests.tiny import tiny_pipeline

TREE = tree_links(torch.tensor([[-1, 0, 0, 1, 1]], dtype=torch.int32))
FUSED = {f"specvis_kernels::{op}" for op in ("rms_norm", "swiglu", "rotate_into_cache")}


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


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 0.005), (torch.bfloat16, 0.04)])
def test_the_fused_ops_read_what_pytorch_s_operations_read(dtype, tolerance, monkeypatch):
    pipeline = tiny_pipeline().to(dtype)
    monkeypatch.setattr(layers, "can_pack", lambda *_: False)
    with torch.no_grad():
        expected, names = read(pipeline)
        assert not names & FUSED
        monkeypatch.setattr(layers, "FUSED_DEVICES", {"cpu"})
        got, names = read(pipeline)
        assert names > FUSED and not {name for name in names if "index_copy" in name or "silu" in name}
    for a, b in zip(got, expected):
        assert (a.float() - b.float()).norm() < tolerance * b.float().norm()
    assert not read(pipeline)[1] & FUSED  # with gradients
    monkeypatch.setattr(layers, "USE_KERNELS", False)
    with torch.no_grad():
        assert not read(pipeline)[1] & FUSED
