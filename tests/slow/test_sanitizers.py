"""The kernels under sanitizers, on the CPU."""
import pytest

from tests import cuda_on_cpu
from tests.cuda_on_cpu.test_cuda_on_cpu import sanitized
from tests.kernels.inputs import DEVICE


@pytest.mark.skipif(DEVICE != "cpu", reason="the emulation is for machines without a GPU")
def test_the_sanitizers_find_nothing_in_hostile_inputs():
    """In the first cases of tests/fuzz, among them some of long rows."""
    run = sanitized("-m", "tests.fuzz.sanitized", "14")
    assert run.returncode == 0 and run.stdout.endswith("0 found\n"), run.stdout


OF_EVERY_OP = ("tests/laws/test_every_op.py",)


OF_ITS_OWN = tuple(f"tests/kernels/test_{kernel.stem}.py" for kernel in sorted(cuda_on_cpu.CSRC.glob("*.cu")))


@pytest.mark.parametrize("tests", [OF_EVERY_OP, OF_ITS_OWN], ids=["of every op", "of its own"])
@pytest.mark.skipif(DEVICE != "cpu", reason="the emulation is for machines without a GPU")
def test_the_sanitizers_find_nothing(tests):
    """In any test of an op. With -s, since pytest would lose what a sanitizer says when it ends the process."""
    run = sanitized("-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", *tests, "-k", "cuda_emulated or oracle")
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout
