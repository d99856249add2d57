"""What needs a process of its own: how much memory decoding takes, and another processor."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

MEMORY = """if True:
    import re
    from specvis.decoding.methods import method
    from specvis.decoding.sampling import Sampling
    from specvis.models.llamagen import GPTConfig
    from specvis.models.vq import VQConfig
    from specvis.pipelines.discrete import Pipeline
    def peak():
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 2**20
    config = GPTConfig(dim=16, layers=1, heads=2, vocabulary=65536, grid=3, condition_tokens=2, caption_dim=4,
                       ffn_multiple=8)
    vq = VQConfig(channels=4, decoder_channels=4, multipliers=(1,), residual_blocks=1, z_channels=4,
                  codebook_size=65536, codebook_dim=2, groups=2)
    pipeline = Pipeline(config, vq, ["", "red", "heart"])
    before = peak()
    for m in (method("eagle1", tree="medusa_2_7b_63"), method("eagle2", nodes=64, width=10, depth=5)):
        assert m.max_nodes == 64
        decoded = pipeline.tokens(["red heart"] * 8, m, Sampling.of(list(range(8)), top_k=2000))
    print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_the_memory_of_a_large_vocabulary():
    """V = 65536, 64 nodes, 8 requests: below 2 GB beyond the models."""
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert 0.1 < float(run.stdout) < 2


def test_bfloat16_on_a_cpu_without_its_instructions():
    program = ("import torch; from specvis import Pipeline; p = Pipeline.load(dtype=torch.bfloat16); "
               "torch.set_grad_enabled(False); print(p.gpt.logits(p.gpt.prefill(*p.gpt.condition("
               "p.words(p.words.encode(['noto red heart']))), p.gpt.new_cache(1, 99))).isfinite().all().item())")
    result = subprocess.run([sys.executable, "-c", program], env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}, text=True,
                            capture_output=True)
    assert result.stdout == "True\n", result.stderr
