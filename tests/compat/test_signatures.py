"""`python -m benchmarks.check_compat --vllm .. --sglang ..`, in a folder like both."""
from pathlib import Path

import pytest

from benchmarks import check_compat, signatures

SAMPLER = "tree_speculative_sampling_target_only"
TREE = "candidates, retrive_index, retrive_next_token, retrive_next_sibling"
FILES = {
    "vllm/v1/sample/rejection_sampler.py": """
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
    "vllm/v1/worker/gpu/spec_decode/rejection_sampler.py": "from utils import rejection_sample\n",
    "python/sglang/kernels/ops/speculative/sampling.py":
        f"def {SAMPLER}(predicts, accept_index, accept_token_num, {TREE}, uniform_samples,\n"
        "        uniform_samples_for_final_sampling, target_probs, draft_probs, threshold_single=1.0,\n"
        "        threshold_acc=1.0, deterministic=True):\n    pass\n",
    "python/sglang/kernels/ops/speculative/tree.py":
        "def build_tree_kernel_efficient(parent_list, selected_index, verified_seq_len, tree_mask, positions,\n"
        "        retrive_index, retrive_next_token, retrive_next_sibling, topk, depth, draft_token_num,\n"
        "        tree_mask_mode):\n    pass\n"
        f"def verify_tree_greedy(predicts, accept_index, accept_token_num, {TREE}, target_predict):\n    pass\n",
    "python/sglang/kernels/ops/speculative/spec_tree.py":
        "if is_cuda:\n    from tree import build_tree_kernel_efficient as sgl_build_tree_kernel_efficient\n"
        "def verify():\n    from sglang.kernels.ops.speculative.tree import verify_tree_greedy\n",
    "python/sglang/srt/speculative/eagle_utils.py": f"from verify_sampling import {SAMPLER}\n",
    "python/sglang/srt/speculative/dflash_utils.py":
        f"try:\n    from verify_sampling import {SAMPLER}\nexcept ImportError:\n    {SAMPLER} = None\n",
}


def run(folder: Path, *arguments):
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return check_compat.main([argument.format(folder) for argument in arguments or ("--vllm", "{}", "--sglang", "{}")])


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
    ("spec_tree.py", "speculative.tree import", "other import",
     "no function imports verify_tree_greedy from sglang.kernels.ops.speculative.tree any more"),
    ("spec_tree.py", "if is_cuda:", "def build():", "sgl_build_tree_kernel_efficient is not imported any more"),
    ("spec_tree.py", "def verify():", "if is_cuda:", "no function imports verify_tree_greedy from"),
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


def test_a_folder_without_the_package(tmp_path, capsys):
    assert run(tmp_path, "--sglang", "{}/vllm") == 2
    message = f"{tmp_path}/vllm holds no checkout and no unpacked wheel of sglang: it has no folder sglang"
    assert message in capsys.readouterr().err
