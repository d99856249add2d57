"""What needs a process of its own: memory, another processor, no network, interruptions."""
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import weights  # noqa: F401
from tests.cli.test_offline import run
from tests.cli.test_statuses import PROGRAM, answer_interruptions

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
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0.1 < float(done.stdout) < 2


def test_bfloat16_on_a_cpu_without_its_instructions():
    program = ("import torch; from specvis import Pipeline; p = Pipeline.load(dtype=torch.bfloat16); "
               "torch.set_grad_enabled(False); print(p.gpt.logits(p.gpt.prefill(*p.gpt.condition("
               "p.words(p.words.encode(['noto red heart']))), p.gpt.new_cache(1, 99))).isfinite().all().item())")
    result = subprocess.run([sys.executable, "-c", program], env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}, text=True,
                            capture_output=True)
    assert result.stdout == "True\n", result.stderr


def test_commands_run_where_sockets_are_forbidden(weights, tmp_path):  # noqa: F811
    program = """
from specvis.cli.main import main
folder, out = sys.argv[1:]
for command in (["generate", "--prompt", "red heart", "--out", out + "/x.png"],
                ["generate", "--prompt", "red heart", "--method", "mar:num_iter=2", "--out", out + "/y.png"],
                ["compare", "--methods", "vanilla", "-n", "1", "--prompt", "red heart", "--out", out]):
    main([*command, "--model", folder], standalone_mode=False)
"""
    done = run(program, weights, tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"x.png", "y.png", "compare.csv", "compare.png"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("program", ["specvis", "training"])
@pytest.mark.parametrize("module", ["click.core", "numpy", "torch._C", "torch.nn"])
def test_an_interruption_during_imports_is_quiet(program, module):
    """-X importtime writes a line when a module is imported."""
    arguments = ["info"] if program == "specvis" else ["gpt", "--help"]
    process = subprocess.Popen([sys.executable, "-X", "importtime", "-m", program, *arguments],
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                               preexec_fn=answer_interruptions)
    said = []
    for line in process.stderr:
        said.append(line)
        if line.endswith(f" {module}\n"):
            process.send_signal(signal.SIGINT)
            break
    said += process.stderr.readlines()
    assert process.wait() == 130
    assert not [line for line in said if not line.startswith("import time:")]


def test_an_interruption_at_work_is_one_line(weights, tmp_path):  # noqa: F811
    process = subprocess.Popen([*PROGRAM, "generate", "--prompt", "red heart", "--model", weights, "-n", "1000",
                                "--method", "mar:steps_first=8", "--out", tmp_path / "x.png"],
                               stderr=subprocess.PIPE, text=True, preexec_fn=answer_interruptions)
    # the bar is drawn on terminals only: the kernels' library is mapped just before the model is read
    while process.poll() is None and "_ops.so" not in open(f"/proc/{process.pid}/maps").read():
        pass
    process.send_signal(signal.SIGINT)
    said = process.stderr.read()
    assert process.wait() == 130 and said in ("", "\nAborted!\n", "Aborted!\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_after_a_decoding_decodes():
    """OpenMP would wait for the parent's threads."""
    program = """if True:
        import os, signal, torch
        from specvis import Pipeline
        torch.set_num_threads(2)
        pipeline = Pipeline.load()
        def tokens(): return pipeline.tokens(["noto red heart"], "jacobi:window=8", pipeline.sampling([1])).tokens
        wanted = tokens()
        if (child := os.fork()) == 0:
            signal.alarm(100)
            os._exit(0 if torch.equal(tokens(), wanted) else 7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "0\n", done.stderr
