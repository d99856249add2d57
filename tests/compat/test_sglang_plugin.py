"""The plugin for SGLang on a CPU, in SGLang's own registry and verification where it is installed, and in stubs."""
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from specvis_kernels.compat import sglang as ours
from specvis_kernels.compat._plugin import place_of
from tests.compat import servers
from tests.compat.test_sglang import choose_tree, plain_build

ROW = torch.tensor([0.05, 0.4, 0.2, 0.35])  # the argmax is token 1
SPECULATION = SimpleNamespace(speculative_use_rejection_sampling=False, speculative_accept_threshold_single=1.0,
                              speculative_accept_threshold_acc=1.0)


class Kernels(ModuleType):
    """sgl_kernel, SGLang's kernels for CPUs, which are built from its source. None of them may be called."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return pytest.fail


@pytest.fixture(params=["stubs", pytest.param("installed", marks=pytest.mark.skipif(
    find_spec("sglang") is None, reason="SGLang is not installed"))])
def sglang(request, tmp_path, monkeypatch):
    """SGLang's package, imported anew. Gives the test's monkeypatch."""
    monkeypatch.syspath_prepend(servers.write(tmp_path, ("vllm", "sglang") if request.param == "stubs" else ()))
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setenv("SPECVIS_SGLANG", "1")
    monkeypatch.setitem(sys.modules, "sgl_kernel", Kernels("sgl_kernel"))
    ours.register.cache_clear()
    with servers.imported_anew("sglang", monkeypatch):
        yield monkeypatch
    ours.register.cache_clear()


def load(monkeypatch):
    """What each process of a server does first."""
    import_module("sglang.srt.plugins").load_plugins()
    eagle = import_module(ours.EAGLE)
    monkeypatch.setattr(eagle, "get_spec", lambda: SPECULATION)
    if find_spec("sglang.srt.runtime_context"):
        group = SimpleNamespace(tp_group=SimpleNamespace(world_size=1), attn_tp_group=SimpleNamespace(world_size=1))
        monkeypatch.setattr(import_module("sglang.srt.runtime_context"), "get_parallel", lambda: group)
        monkeypatch.setattr(import_module("sglang.srt.layers.dp_attention"), "is_dp_attention_enabled", lambda: False)
    return eagle


def verify(eagle, B, **settings):
    """The first token after the root, of B requests whose tree has the children 2 and 0."""
    def tensor(*nodes):
        return torch.tensor(nodes).expand(B, -1).contiguous()

    tree = SimpleNamespace(draft_token=tensor(3, 2, 0).flatten(), draft_token_num=3, max_tree_depth=2, tree_topk=2,
                           retrieve_index=torch.arange(3 * B).view(B, 3), retrieve_next_token=tensor(1, -1, -1),
                           retrieve_next_sibling=tensor(-1, 2, -1), draft_probs=None)
    info = SimpleNamespace(**dict(
        is_all_greedy=False, temperatures=torch.ones(B, 1), need_top_k_sampling=False, need_top_p_sampling=False,
        need_min_p_sampling=False, acc_additive_penalties=None, acc_scaling_penalties=None, logit_bias=None,
        sampling_seed=None, has_watermark_candidates=False) | settings)
    batch = SimpleNamespace(device="cpu", forward_mode=SimpleNamespace(is_idle=lambda: False), sampling_info=info,
                            seq_lens=torch.full((B,), 7))
    logits = SimpleNamespace(next_token_logits=ROW.log().repeat(3 * B, 1))
    torch.manual_seed(0)
    predict, accept_lens, accept_index = eagle.eagle_sample(tree, batch, logits)
    assert torch.equal(accept_lens, (accept_index >= 0).sum(1).int())
    return predict.view(B, 3)[:, 0].bincount(minlength=4) / B


def test_requests_that_ask_for_sampling_are_sampled_on_a_cpu(sglang):
    eagle, B = load(sglang), 8000
    assert torch.allclose(verify(eagle, B), ROW, atol=0.02)
    flat = ROW.sqrt() / ROW.sqrt().sum()
    assert torch.allclose(verify(eagle, B, temperatures=torch.full((B, 1), 2.0)), flat, atol=0.02)
    two = torch.tensor([0, 0.4, 0, 0.35]) / 0.75
    assert torch.allclose(verify(eagle, B, need_top_k_sampling=True, top_ks=torch.full((B,), 2, dtype=torch.int32)),
                          two, atol=0.02)
    assert torch.allclose(verify(eagle, B, need_top_p_sampling=True, top_ps=torch.full((B,), 0.7)), two, atol=0.02)
    assert verify(eagle, 3, is_all_greedy=True).tolist() == [0, 1, 0, 0]
    assert eagle.tree_speculative_sampling_target_only.num_calls == 4


def test_a_tree_is_built_by_ours(sglang):
    parent_list, selected = choose_tree(torch.Generator().manual_seed(0), 3, 4, 12)
    buffers = [torch.full((12,), -9), *(torch.full((1, 12), -1) for _ in range(3))]
    mask = torch.ones(12 * 12, dtype=torch.bool)
    load(sglang).build_tree_kernel_efficient_func(
        torch.tensor([parent_list]), torch.tensor([selected]), torch.tensor([5]), mask, *buffers, 3, 4, 12, 1)
    positions, _, first, following = plain_build(parent_list, selected, 5, 3)
    assert [buffers[0].tolist(), *(b[0].tolist() for b in buffers[2:])] == [positions, first, following]


def test_nothing_changes_unless_it_is_asked_for(sglang):
    for value in ("", "0"):
        sglang.setenv("SPECVIS_SGLANG", value)
        ours.register()
        ours.register.cache_clear()
    eagle = load(sglang)
    assert eagle.tree_speculative_sampling_target_only is None
    assert eagle._verify_uses_greedy(is_all_greedy=False, is_cpu=True, is_hip=False, is_xpu=False,
                                     use_rejection_sampling=False)
    ours.register.cache_clear()
    sglang.setenv("SPECVIS_SGLANG", "yes")
    with pytest.raises(ValueError, match="SPECVIS_SGLANG must be 0 or 1, got 'yes'"):
        ours.register()


@pytest.mark.parametrize("sampler", [
    lambda eagle: None,  # as on a CPU
    lambda eagle: eagle.get_spec,  # any function that SGLang defines, as on CUDA
    lambda eagle: eval("lambda *arguments: None", {"__name__": "sgl_kernel_npu.sample"})])  # as on an NPU and on MUSA
def test_a_sampler_is_hooked_in_all_modules_that_have_imported_it(sglang, sampler):
    """A hook replaces every name of the original: one that is None may be None for other reasons, and stays."""
    eagle, other = import_module(ours.EAGLE), import_module(ours.TREES)
    eagle.another, theirs = None, sampler(eagle)
    other.imported = eagle.tree_speculative_sampling_target_only = theirs
    load(sglang)
    assert eagle.another is None and (theirs is not None or other.imported is None)
    for function in (eagle.tree_speculative_sampling_target_only, *[other.imported] * (theirs is not None)):
        with pytest.raises(TypeError, match="missing .* tested with 0.5.23"):
            function()


def test_another_plugin_and_another_version(sglang):
    target = f"{ours.TREES}:verify_tree_greedy_func"
    with sglang.context() as m:
        m.setattr(*place_of("sglang", target), lambda *arguments: None)
        with pytest.raises(RuntimeError, match=f"{target} must be sglang's own function, got one of {__name__}: "
                                               "another plugin .* SGLANG_PLUGINS"):
            ours.register()
    with sglang.context() as m:
        m.delattr(*place_of("sglang", "sglang.srt.plugins.hook_registry:HookRegistry.register"))
        with pytest.raises(RuntimeError, match="sglang must have .*:HookRegistry.register, .*no attribute"):
            ours.register()
    assert import_module(ours.EAGLE).tree_speculative_sampling_target_only is None  # nothing is half installed
    sglang.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)  # as before there was a registry
    with pytest.raises(RuntimeError, match="sglang must have sglang.srt.plugins.hook_registry:HookRegistry.register, .*"
                                           "tested with 0.5.23"):
        ours.register()
