"""The kernels under sanitizers, on the CPU."""
import pytest

from tests import cuda_on_cpu
from tests.cases import DEVICE
from tests.cuda_on_cpu.test_cuda_on_cpu import pytestmark, sanitized  # noqa: F401


@pytest.mark.skipif(DEVICE != "cpu", reason="the emulation is for machines without a GPU")
def test_the_sanitizers_find_nothing_in_hostile_inputs():
    """This runs the first cases of tests/fuzz, some with long rows."""
    run = sanitized("-m", "tests.fuzz.sanitized", "14")
    assert run.returncode == 0 and run.stdout.endswith("0 found\n"), run.stdout


OF_EVERY_OP = ("tests/laws/test_every_op.py",)
OF_ITS_OWN = tuple(f"tests/kernels/test_{kernel.stem}.py" for kernel in cuda_on_cpu.kernels())
OF_VERIFY_TREE = ("tests/kernels/test_verify_tree_relaxed.py",)


@pytest.mark.parametrize("tests", [OF_EVERY_OP, OF_ITS_OWN + OF_VERIFY_TREE], ids=["of every op", "of its own"])
@pytest.mark.skipif(DEVICE != "cpu", reason="the emulation is for machines without a GPU")
def test_the_sanitizers_find_nothing(tests):
    """This runs every test of an op. With -s, because pytest would lose a sanitizer's report when it ends the
    process."""
    run = sanitized("-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", *tests,
                    "-k", "(cuda_emulated or oracle) and not triton")
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout


@pytest.mark.parametrize("kernel, threads, shared, cluster, says", [
    ("dynamic_shared_memory", 64, 512, 1, "no error"),
    ("dynamic_shared_memory", 64, 504, 1, "heap-buffer-overflow"),
    ("static_shared_memory", 64, 0, 1, "no error"),
    ("static_shared_memory", 65, 0, 1, "global-buffer-overflow"),
    ("arrays_of_the_last_block", 65, 0, 1, "global-buffer-overflow"),
    ("arrays_of_the_last_block", 64, 0, 2, "no error"),
    ("arrays_of_the_last_block", 65, 0, 2, "use-after-poison"),
])
def test_the_sanitizers_see_shared_memory(kernel, threads, shared, cluster, says):
    """Each thread uses 8 bytes; static ones are there for 64. Another block's are in its image."""
    folder = cuda_on_cpu.BUILD / "cuda_on_cpu_examples_sanitized"
    path = cuda_on_cpu.build([cuda_on_cpu.HERE / "examples.cu"], folder / "examples.so", *cuda_on_cpu.SANITIZE)
    program = f"""if True:
        import numpy as np
        from tests.cuda_on_cpu.test_cuda_on_cpu import examples
        print(examples({str(path)!r})({kernel!r}, np.array([64, 0]), {threads}, {cluster}, {shared}, {cluster}))"""
    run = sanitized("-c", program)
    assert says in run.stdout, run.stdout
