"""Folders like vLLM 0.33.0 and SGLang 0.5.23, with the modules and signatures that the plugins meet, and no more.

Where the packages themselves are installed, the tests of the plugins run the servers' own classes too. Of unpacked
wheels (`make test-servers` sets SPECVIS_UNPACKED=1) their files in Python run, and what these import without calling
it in a test may be absent.
"""
import os
import re
import sys
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNPACKED = os.environ.get("SPECVIS_UNPACKED") == "1"
UNCALLED = set("""
    IPython aiohttp cachetools cbor2 cloudpickle compressed_tensors einops fastapi gguf llguidance openai openai_harmony
    orjson partial_json_parser prometheus_client psutil pybase64 sentencepiece starlette torchvision tvm_ffi uvloop
    xgrammar zmq""".split())
SAMPLER = "tree_speculative_sampling_target_only"
VLLM = {
    "plugins/__init__.py": """
from importlib.metadata import entry_points

def load_general_plugins():
    for plugin in entry_points(group="vllm.general_plugins", name="specvis"):  # an installed vLLM has plugins itself
        plugin.load()()
""",
    "v1/sample/ops/topk_topp_sampler.py": """
import torch

def random_sample(probs, generators, use_fp64_gumbel=False):
    raise AssertionError("drawn by vLLM")

class TopKTopPSampler(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.forward = self.forward_cpu

    def forward_native(self, logits, generators, k, p):
        return random_sample(logits.softmax(-1, dtype=torch.float32), generators, False), None

    def forward_cpu(self, logits, generators, k, p):
        return random_sample(None, None), None
""",
    "v1/sample/sampler.py": """
import torch
from types import SimpleNamespace
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

class Sampler(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.topk_topp_sampler = TopKTopPSampler()

    def forward(self, logits, sampling_metadata):
        tokens = logits.argmax(-1)
        if not sampling_metadata.all_greedy:
            is_greedy = sampling_metadata.temperature == 0
            logits = logits / torch.where(is_greedy, 1, sampling_metadata.temperature)[:, None]
            drawn, _ = self.topk_topp_sampler(logits, sampling_metadata.generators, None, None)
            tokens = torch.where(is_greedy, tokens, drawn)
        return SimpleNamespace(sampled_token_ids=tokens.int()[:, None])
""",
    "v1/sample/rejection_sampler.py": """
import torch
from types import SimpleNamespace

def rejection_sample(draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits,
                     bonus_token_ids, sampling_metadata, synthetic_mode=False, synthetic_conditional_rates=None,
                     use_fp64_gumbel=False, fly_window_size=None, fly_entropy_threshold=None, fly_entropy_top_k=3):
    return "vLLM's own"

class RejectionSampler(torch.nn.Module):
    def __init__(self, sampler):
        super().__init__()
        self.sampler = sampler

    def forward(self, metadata, draft_probs, logits, sampling_metadata):
        bonus = self.sampler(logits[metadata.bonus_logits_indices], sampling_metadata).sampled_token_ids
        target_logits = logits[metadata.target_logits_indices]
        if not sampling_metadata.all_greedy:
            temperature = sampling_metadata.temperature.repeat_interleave(torch.tensor(metadata.num_draft_tokens))
            target_logits = target_logits / torch.where(temperature == 0, 1, temperature)[:, None]
        return SimpleNamespace(sampled_token_ids=rejection_sample(
            metadata.draft_token_ids, metadata.num_draft_tokens, metadata.max_spec_len, metadata.cu_num_draft_tokens,
            draft_probs, target_logits, bonus, sampling_metadata, synthetic_mode=False,
            synthetic_conditional_rates=None, use_fp64_gumbel=False, fly_window_size=None, fly_entropy_threshold=None,
            fly_entropy_top_k=3))
""",
    "v1/spec_decode/custom_class_proposer.py": """
import importlib

def create_custom_proposer(vllm_config):
    module, _, name = vllm_config.speculative_config.model.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)(vllm_config)
    except Exception as error:
        raise RuntimeError(f"Failed to instantiate: {error}") from error
""",
    "v1/worker/gpu_model_runner.py": """
class GPUModelRunner:
    def _sample(self, logits, spec_decode_metadata):
        metadata = self.input_batch.sampling_metadata
        if spec_decode_metadata is None:
            return self.sampler(logits=logits, sampling_metadata=metadata)
        return self.rejection_sampler(spec_decode_metadata, None, logits, metadata)
""",
    "v1/worker/gpu/sample/sampler.py": """
def gumbel_sample(logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature, is_drafting, **rest):
    from specvis_kernels import draw_tokens  # in place of vLLM's noise
    assert not apply_temperature and not is_drafting
    state = expanded_idx_mapping.long()
    return draw_tokens(logits[:, None], None, None, (temperature[state] > 0).float(), 0, 1.0, seed[state],
                       pos[:, None]).tokens[:, 0]
""",
    "v1/worker/gpu/spec_decode/rejection_sampler.py": "def rejection_sample(*arguments, **named):\n    return 'V2'\n",
}
SGLANG = {
    "srt/plugins/__init__.py": """
from importlib.metadata import entry_points
from sglang.srt.plugins.hook_registry import HookRegistry

def load_plugins():
    for plugin in entry_points(group="sglang.srt.plugins", name="specvis"):
        plugin.load()()
    HookRegistry.apply_hooks()
""",
    "srt/plugins/hook_registry.py": """
import functools, importlib, sys
from enum import Enum

class HookType(Enum):
    AFTER = "after"
    REPLACE = "replace"

class HookRegistry:
    _hooks = {}

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
        assert hook_type is HookType.REPLACE
        cls._hooks[target] = hook

    @classmethod
    def apply_hooks(cls):
        for target, hook in cls._hooks.items():
            module, _, name = target.rpartition(".")
            original = getattr(importlib.import_module(module), name)
            wrapped = functools.wraps(original)(lambda *args, _hook=hook, **kwargs: _hook(*args, **kwargs))
            for module in list(sys.modules.values()):
                for key, value in list(getattr(module, "__dict__", {}).items()):
                    if value is original:
                        setattr(module, key, wrapped)
""",
    "kernels/ops/speculative/spec_tree.py": """
def build_tree_kernel_efficient_func(
        parent_list, top_scores_index, seq_lens, tree_mask, positions, retrieve_index, retrieve_next_token,
        retrieve_next_sibling, topk, spec_steps, num_verify_tokens, tree_mask_mode):
    raise AssertionError("SGLang's own")

def verify_tree_greedy_func(predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token,
                            retrieve_next_sibling, target_predict, topk=-1):
    raise AssertionError("SGLang's own")
""",
    "kernels/ops/speculative/verify_sampling.py": """
tree_speculative_sampling_target_only = None
""",
    "srt/speculative/eagle_utils.py": f"""
import torch
from sglang.kernels.ops.speculative.spec_tree import build_tree_kernel_efficient_func, verify_tree_greedy_func
from sglang.kernels.ops.speculative.verify_sampling import {SAMPLER}

top_k_renorm_prob = top_p_renorm_prob = None

def get_spec():
    raise AssertionError("the server has not started")

def eagle_sample(verify_input, batch, logits_output):
    logits, info, (B, N) = logits_output.next_token_logits, batch.sampling_info, verify_input.retrieve_index.shape
    predict = torch.zeros(B * N, dtype=torch.int32)
    accept_index = torch.full((B, verify_input.max_tree_depth), -1, dtype=torch.int32)
    num_correct_drafts = torch.empty(B, dtype=torch.int32)
    candidates = verify_input.draft_token.reshape(B, N)
    if _verify_uses_greedy(is_all_greedy=info.is_all_greedy, is_cpu=True, is_hip=False, is_xpu=False,
                           use_rejection_sampling=get_spec().speculative_use_rejection_sampling):
        predict, accept_index, num_correct_drafts = verify_tree_greedy_func(
            predicts=predict, accept_index=accept_index, accept_token_num=num_correct_drafts, candidates=candidates,
            retrieve_index=verify_input.retrieve_index, retrieve_next_token=verify_input.retrieve_next_token,
            retrieve_next_sibling=verify_input.retrieve_next_sibling,
            target_predict=logits.argmax(-1).reshape(B, N), topk=verify_input.tree_topk)
    else:
        probs = (logits / info.temperatures.repeat_interleave(N, 0)).softmax(-1)
        if info.need_top_k_sampling:
            probs = top_k_renorm_prob(probs, info.top_ks.repeat_interleave(N, 0))
        if info.need_top_p_sampling:
            probs = top_p_renorm_prob(probs, info.top_ps.repeat_interleave(N, 0))
        probs = probs.reshape(B, N, -1)
        tree_speculative_sampling_target_only(
            predicts=predict, accept_index=accept_index, accept_token_num=num_correct_drafts, candidates=candidates,
            retrive_index=verify_input.retrieve_index, retrive_next_token=verify_input.retrieve_next_token,
            retrive_next_sibling=verify_input.retrieve_next_sibling, uniform_samples=torch.rand(B, N),
            uniform_samples_for_final_sampling=torch.rand(B), target_probs=probs, draft_probs=torch.zeros_like(probs),
            threshold_single=get_spec().speculative_accept_threshold_single,
            threshold_acc=get_spec().speculative_accept_threshold_acc, deterministic=True)
    return predict, num_correct_drafts + 1, accept_index

def _verify_uses_greedy(*, is_all_greedy, is_cpu, is_hip, is_xpu, use_rejection_sampling):
    return is_all_greedy or is_cpu or is_xpu or (is_hip and not use_rejection_sampling)
""",
}


class Names(type):
    """Of a class whose attributes are more such classes, by any name."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Names(name, (Anything,), {})


class Anything(metaclass=Names):
    """What an absent module defines: a base class, or a type in annotations and in pydantic's fields."""

    def __init_subclass__(cls, **named):
        pass

    def __class_getitem__(cls, item):
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, source, handler):
        return {"type": "any"}


class Uncalled(MetaPathFinder, Loader):
    """Finds UNCALLED where nothing else does."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in UNCALLED else None

    def exec_module(self, module):
        module.__getattr__ = Anything.__getattr__


if UNPACKED:
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # transformers asks once, and then does without
    sys.meta_path.append(Uncalled())


@contextmanager
def imported_anew(package: str, monkeypatch):
    """Inside, nothing of this package is imported yet. What is imported there is forgotten at the end."""
    def modules():
        return [name for name in sys.modules if name.partition(".")[0] == package]

    for name in modules():
        monkeypatch.delitem(sys.modules, name)  # until the test is over
    yield
    for name in modules():
        del sys.modules[name]


def write(folder: Path, packages: tuple[str, ...] = ("vllm", "sglang")) -> Path:
    """The packages, and the metadata by which their loaders find the plugins of this checkout."""
    for package in packages:
        for name, text in {"__init__.py": "", **{"vllm": VLLM, "sglang": SGLANG}[package]}.items():
            (folder / package / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / package / name).write_text(text)
    groups = re.findall(r'^\[project\.entry-points\."(.+)"\]\n(.+?) = "(.+)"$', (ROOT / "pyproject.toml").read_text(),
                        re.M)
    metadata = folder / "specvis_kernels_here-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: specvis_kernels_here\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("".join(f"[{group}]\n{name} = {value}\n"
                                                       for group, name, value in groups))
    return folder
