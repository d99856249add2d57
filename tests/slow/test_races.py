"""No CUDA kernel has a data race, at the smallest batches of benchmarks/ops.py."""
import subprocess
import sys
from pathlib import Path

from tests import cuda_on_cpu
from tests.cuda_on_cpu.test_races import pytestmark  # noqa: F401

ROOT = Path(__file__).parent.parent.parent


def test_no_kernel_has_a_race():
    run = subprocess.run([sys.executable, "-m", "tests.cuda_on_cpu.races"], cwd=ROOT, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.returncode == 0, run.stdout
    assert {line.split()[0] for line in run.stdout.splitlines() if line.endswith(": 0 races")} == {
        kernel.stem for kernel in cuda_on_cpu.kernels()}, run.stdout
