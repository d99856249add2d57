"""`python -m benchmarks.signatures --vllm .. --sglang ..`, in a folder like both."""
from pathlib import Path

import pytest

from benchmarks import signatures
from tests.compat.servers import SAMPLER, SGLANG, VLLM

FILES = {
    "vllm/v1/sample/rejection_sampler.py": VLLM["v1/sample/rejection_sampler.py"],
    "vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py": """
# draft_logits is stored pre-temperature
def rejection_sample(
    target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, expanded_idx_mapping,
    expanded_local_pos, temperature, seed, num_speculative_steps, synthetic_conditional_rates=None, use_fp64=False,
    use_block_verification=False, contexts=None, watermarking=None, watermarking_skip_mask=None, watermark_key=None,
    fly_window_size=0, fly_entropy_threshold=0.3, fly_entropy_top_k=3):
    pass
""",
    "vllm/v1/worker/gpu/spec_decode/rejection_sampler.py": "from utils import rejection_sample\n",
    "vllm/v1/worker/gpu/sample/sampler.py": "from gumbel import gumbel_sample\ngumbel_sample(is_drafting=False,)\n",
    "vllm/v1/sample/ops/topk_topp_sampler.py": "random_sample(probs, generators, self.use_fp64_gumbel)\n",
    "vllm/v1/worker/gpu_model_runner.py": """
self.model_config = 0
self.positions[:total_num_scheduled_tokens] = self.query_start_loc.gpu[0] + self.input_batch.generators.get(0)
self.rejection_sampler()
cast(Any, self.drafter).propose()
""",
    "vllm/config/model.py": "class ModelConfig:\n    seed: int = 0\n",
    "vllm/v1/spec_decode/custom_class_proposer.py": "user_class(vllm_config)\n",
    "python/sglang/kernels/ops/speculative/sampling.py":
        f"def {SAMPLER}(predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,\n"
        "        retrive_next_sibling, uniform_samples, uniform_samples_for_final_sampling, target_probs,\n"
        "        draft_probs, threshold_single=1.0, threshold_acc=1.0, deterministic=True):\n    pass\n",
    "python/sglang/kernels/ops/speculative/spec_tree.py": SGLANG["kernels/ops/speculative/spec_tree.py"],
    "python/sglang/srt/speculative/eagle_utils.py": SGLANG["srt/speculative/eagle_utils.py"]
        + "if is_cuda:\n    from renorm import top_k_renorm_prob, top_p_renorm_prob\n",
    "python/sglang/srt/plugins/hook_registry.py": SGLANG["srt/plugins/hook_registry.py"],
    "python/sglang/srt/speculative/dflash_utils.py":
        f"try:\n    from verify_sampling import {SAMPLER}\nexcept ImportError:\n    {SAMPLER} = None\n",
}


def run(folder: Path, *arguments):
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return signatures.main([argument.format(folder) for argument in arguments or ("--vllm", "{}", "--sglang", "{}")])


def test_nothing_has_moved(tmp_path, capsys):
    assert run(tmp_path) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if not line.startswith("    ")] == [
        f"vllm (tested with 0.33.0): {tmp_path}", f"sglang (tested with 0.5.23): {tmp_path}"]
    assert sum(line.endswith(" as expected") for line in printed) == sum(map(len, signatures.ROWS.values()))


@pytest.mark.parametrize("file, before, after, message", [
    ("v1/sample/rejection_sampler.py", "fly_entropy_top_k=3):", "fly_entropy_top_k=3, use_new_rule=False):",
     "rejection_sample (defined) use_new_rule is new"),
    ("v1/sample/rejection_sampler.py", "draft_probs, target_logits,", "target_logits, draft_probs,",
     "(defined) target_logits is argument 5 there, 6 here; draft_probs is argument 6 there, 5 here"),
    ("v1/sample/rejection_sampler.py", "def rejection_sample", "def reject", "is not defined any more"),
    ("rejection_sampler_utils.py", "fly_window_size=0", "fly_window_size=4",
     "fly_window_size is 4 by default there, 0 here"),
    ("rejection_sampler_utils.py", "pre-temperature", "as it was drawn from",
     "is not said any more: draft_is_scaled must be True before 0.28"),
    ("rejection_sampler_utils.py", "fly_entropy_top_k=3):", "fly_entropy_top_k=3, *, new=1, **options):",
     "new is new; **options is new"),
    ("rejection_sampler_utils.py", "num_speculative_steps,", "num_speculative_steps=4,",
     "num_speculative_steps is 4 by default there, required here"),
    ("spec_decode/rejection_sampler.py", "import rejection_sample", "import reject as rejection_sampler",
     "rejection_sample (imported) rejection_sample is not imported any more"),
    ("sampling.py", "predicts, ", "", "predicts is gone"),
    ("spec_tree.py", "topk=-1):", "topk=-1, coins=None):", "verify_tree_greedy_func (defined) coins is new"),
    ("eagle_utils.py", "if is_cuda:", "def build():", "top_p_renorm_prob is not imported any more"),
    ("eagle_utils.py", "is_xpu,", "is_xpu, is_tpu,", "_verify_uses_greedy (defined) is_tpu is new"),
    ("gpu_model_runner.py", ".gpu[0]", ".cpu[0]", "is not said any more: seed_exact reads seeds and positions there"),
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


@pytest.mark.parametrize("text, message", [
    (None, "the file is not there any more"), ("def def", "it cannot be read: invalid syntax"),
    (b"\xff", "it cannot be read: 'utf-8'")])
def test_a_file_that_is_gone_and_one_that_is_not_python(tmp_path, capsys, monkeypatch, text, message):
    name = "vllm/v1/worker/gpu/spec_decode/rejection_sampler.py"
    monkeypatch.delitem(FILES, name) if text is None else monkeypatch.setitem(FILES, name, text)
    assert run(tmp_path, "--vllm", "{}") == 1
    assert capsys.readouterr().out.count(message) == 1


def test_a_folder_without_the_package_and_none(tmp_path, capsys):
    assert run(tmp_path, "--sglang", "{}/vllm") == 2
    message = f"{tmp_path}/vllm holds no checkout and no unpacked wheel of sglang: it has no folder sglang"
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        signatures.main([])
    assert "name a folder, with --vllm or --sglang" in capsys.readouterr().err
