"""`python -m benchmarks.check_compat --vllm .. --sglang .. --transformers ..`, in a folder like all three."""
from pathlib import Path

import pytest

from benchmarks import check_compat, signatures

SAMPLER = "tree_speculative_sampling_target_only"
TREE = "candidates, retrive_index, retrive_next_token, retrive_next_sibling"
DRAWN = "uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs"
BUILD = ("parent_list, selected_index, verified_seq_len, tree_mask, positions, retrive_index, retrive_next_token, "
         "retrive_next_sibling, topk, depth, draft_token_num, tree_mask_mode")
NAMED = ", ".join(f"{name}=0" for name in ("predicts", "accept_index", "accept_token_num", *TREE.split(", "),
                                           *DRAWN.split(", "), "threshold_single", "threshold_acc", "deterministic"))
FILES = {
    "vllm/v1/sample/rejection_sampler.py": """
class RejectionSampler:
    def forward(self):
        return rejection_sample(1, [2], 3, 4, None, 5, 6, self.metadata, synthetic_mode=self.synthetic_mode,
                                synthetic_conditional_rates=self.rates, use_fp64_gumbel=self.use_fp64_gumbel,
                                fly_window_size=self.size, fly_entropy_threshold=0.3, fly_entropy_top_k=3)


def rejection_sample(
    draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits, bonus_token_ids,
    sampling_metadata, synthetic_mode=False, synthetic_conditional_rates=None, use_fp64_gumbel=False,
    fly_window_size=None, fly_entropy_threshold=None, fly_entropy_top_k=3):
    pass
""",
    "vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py": """
# draft_logits is stored pre-temperature
def rejection_sample(
    target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, expanded_idx_mapping,
    expanded_local_pos, temperature, seed, num_speculative_steps, synthetic_conditional_rates=None, use_fp64=False,
    use_block_verification=False, contexts=None, watermarking=None, watermarking_skip_mask=None, watermark_key=None,
    fly_window_size=0, fly_entropy_threshold=0.3, fly_entropy_top_k=3):
    pass
""",
    "vllm/v1/worker/gpu/spec_decode/rejection_sampler.py": """
from utils import rejection_sample

def _watermarking_kwargs(self):
    return {"contexts": 1, "watermarking": 2, "watermarking_skip_mask": 3, "watermark_key": 4}

def verify(self, **named):
    return rejection_sample(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, self.rates, use_fp64=False,
                            use_block_verification=False, fly_window_size=0, fly_entropy_threshold=0.3,
                            fly_entropy_top_k=3, **named)
""",
    "vllm-0.99.0.dist-info/METADATA": "Name: vllm\nVersion: 0.99.0\n",
    "python/sglang/version.py": '__version__ = "0.9.9"\n',
    "python/sglang/kernels/ops/speculative/sampling.py":
        f"def {SAMPLER}(predicts, accept_index, accept_token_num, {TREE}, {DRAWN}, threshold_single=1.0,\n"
        "        threshold_acc=1.0, deterministic=True):\n    pass\n",
    "python/sglang/kernels/ops/speculative/tree.py":
        f"def build_tree_kernel_efficient({BUILD}):\n    pass\n"
        f"def verify_tree_greedy(predicts, accept_index, accept_token_num, {TREE}, target_predict):\n    pass\n",
    "python/sglang/kernels/ops/speculative/spec_tree.py":
        "if is_cuda:\n    from tree import build_tree_kernel_efficient as sgl_build_tree_kernel_efficient\n"
        "def build():\n    sgl_build_tree_kernel_efficient(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)\n"
        "def verify():\n    from sglang.kernels.ops.speculative.tree import verify_tree_greedy\n"
        "    verify_tree_greedy(1, 2, 3, 4, 5, 6, retrive_next_sibling=7, target_predict=8)\n",
    "python/sglang/srt/speculative/eagle_utils.py":
        f"from verify_sampling import {SAMPLER}\ndef sample():\n    sampling_fn({NAMED})\n",
    "python/sglang/srt/speculative/dflash_utils.py":
        f"try:\n    from verify_sampling import {SAMPLER}\nexcept ImportError:\n    {SAMPLER} = None\n"
        f"def sample():\n    {SAMPLER}({NAMED})\n",
    "src/transformers/__init__.py": '__version__ = "9.9.9"\n',
    "src/transformers/generation/utils.py": """
class GenerationMixin:
    def generate(self, **model_kwargs):
        model_kwargs["logits_to_keep"] = 1
        model_kwargs.setdefault("mm_encoder_outputs", {})
        other["anything"] = 2
        return decoding_method(self, input_ids, logits_processor=1, stopping_criteria=2, generation_config=3,
                               **mode_kwargs, **model_kwargs)
""",
    "src/transformers/cache_utils.py": """
class Cache:
    def __init__(self, layers=None, offloading=False):
        pass
    def update(self, key_states, value_states, layer_idx, cache_kwargs=None):
        pass
""",
    "src/transformers/models/llama/modeling_llama.py": """
class LlamaForCausalLM:
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, use_cache=None, *,
                logits_to_keep=0, **kwargs):
        pass
""",
    "src/transformers/generation/logits_process.py": "".join(
        f"class {name}LogitsWarper:\n    def __init__(self, {names}):\n        pass\n" for name, names in (
            ("Temperature", "temperature"), ("TopK", "top_k, min_tokens_to_keep=1"),
            ("TopP", "top_p, min_tokens_to_keep=1"))),
}
ALL = [argument for name in ("vllm", "sglang", "transformers") for argument in (f"--{name}", "{}")]


def run(folder: Path, *arguments):
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return check_compat.main([argument.format(folder) for argument in arguments or ALL])


def test_nothing_has_moved(tmp_path, capsys):
    assert run(tmp_path) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if not line.startswith("    ")] == [
        f"vllm 0.99.0 (tested with 0.33.0): {tmp_path}", f"sglang 0.9.9 (tested with 0.5.23): {tmp_path}",
        f"transformers 9.9.9 (tested with 4.57.6, 5.23.0, 5.24.0): {tmp_path}"]
    assert sum(line.endswith(" as expected") for line in printed) == sum(map(len, signatures.ROWS.values()))


@pytest.mark.parametrize("file, before, after, message", [
    ("v1/sample/rejection_sampler.py", "fly_entropy_top_k=3):", "fly_entropy_top_k=3, use_new_rule=False):",
     "rejection_sample (defined) use_new_rule is new"),
    ("v1/sample/rejection_sampler.py", "fly_entropy_top_k=3)\n\n", "fly_entropy_top_k=3, use_new_rule=1)\n\n",
     "rejection_sample (called) line 4: got an unexpected keyword argument 'use_new_rule'"),
    ("v1/sample/rejection_sampler.py", "draft_probs, target_logits,", "target_logits, draft_probs,",
     "(defined) target_logits is argument 5 there, 6 here; draft_probs is argument 6 there, 5 here"),
    ("v1/sample/rejection_sampler.py", "def rejection_sample", "def reject", "is not defined any more"),
    ("v1/sample/rejection_sampler.py", "return rejection_sample", "return reject", "is not called any more"),
    ("rejection_sampler_utils.py", "fly_window_size=0", "fly_window_size=4",
     "fly_window_size is 4 by default there, 0 here"),
    ("rejection_sampler_utils.py", "pre-temperature", "as it was drawn from",
     "is not said any more: draft_is_scaled must be True before 0.28"),
    ("spec_decode/rejection_sampler.py", "import rejection_sample", "import reject as rejection_sampler",
     "rejection_sample (imported) rejection_sample is not imported any more"),
    ("rejection_sampler_utils.py", "fly_entropy_top_k=3):", "fly_entropy_top_k=3, **options):", "**options is new"),
    ("rejection_sampler_utils.py", "num_speculative_steps,", "num_speculative_steps=4,",
     "num_speculative_steps is 4 by default there, required here"),
    ("spec_decode/rejection_sampler.py", '"watermark_key"', '"watermark_keys"', "line 5: watermark_keys is new"),
    ("spec_decode/rejection_sampler.py", "def _watermarking", "def _marking",
     "_watermarking_kwargs has no keys any more"),
    ("sampling.py", "predicts, ", "", "predicts is gone"),
    ("spec_tree.py", "speculative.tree import", "other import",
     "no function imports verify_tree_greedy from sglang.kernels.ops.speculative.tree any more"),
    ("eagle_utils.py", f"import {SAMPLER}", "import something", f"{SAMPLER} is not imported any more"),
    ("eagle_utils.py", "retrive_index=0", "retrieve_index=0", "missing a required argument: 'retrive_index'"),
    ("spec_tree.py", "10, 11, 12)", "10, 11, 12, 13)", "too many positional arguments"),
    ("generation/utils.py", '"logits_to_keep"', '"tokens_to_keep"', "line 4: tokens_to_keep is new"),
    ("generation/utils.py", '"mm_encoder_outputs"', '"encoded"', "line 5: encoded is new"),
    ("generation/utils.py", "stopping_criteria=2", "criteria=2", "got an unexpected keyword argument 'criteria'"),
    ("cache_utils.py", "layers=None, ", "", "Cache.__init__ (takes) layers is gone"),
    ("modeling_llama.py", " cache=None,", "", "LlamaForCausalLM.forward (takes) cache or past_key_values is gone"),
])
def test_it_says_what_has_moved(tmp_path, capsys, monkeypatch, file, before, after, message):
    name = next(name for name in FILES if name.endswith(file))
    assert before in FILES[name]
    monkeypatch.setitem(FILES, name, FILES[name].replace(before, after))
    assert run(tmp_path) == 1
    moved = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()
             if line.startswith("    ") and not line.endswith(" as expected")]
    assert any(message in line for line in moved)
    assert all(name.endswith(line.split()[0]) for line in moved)


def test_a_file_that_is_gone_and_one_that_is_not_python(tmp_path, capsys, monkeypatch):
    name = "vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py"
    text = FILES.pop(name)
    try:
        assert run(tmp_path, "--vllm", "{}") == 1 and "the file is not there any more" in capsys.readouterr().out
        monkeypatch.setitem(FILES, name, "def def")
        assert run(tmp_path, "--vllm", "{}") == 1
        printed = capsys.readouterr().out
        assert printed.count("it cannot be read: invalid syntax") == 1 and "rejection_sampler.py" in printed
        (tmp_path / name).write_bytes(b"\xff")
        assert check_compat.main(["--vllm", str(tmp_path)]) == 1
        assert "it cannot be read: 'utf-8'" in capsys.readouterr().out
    finally:
        FILES[name] = text


def test_a_folder_without_the_package(tmp_path, capsys):
    assert run(tmp_path, "--sglang", "{}/vllm") == 2
    message = f"{tmp_path}/vllm holds no checkout and no unpacked wheel of sglang: it has no folder sglang"
    assert message in capsys.readouterr().err
