"""CUDA kernels run on the CPU as they would on a GPU, and what is wrong with one shows."""
import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import cuda_on_cpu
from tests.kernels.inputs import DEVICE

ROOT = Path(__file__).parent.parent.parent
COMPILER = os.environ.get("CXX", "g++")
pytestmark = pytest.mark.skipif(not shutil.which(COMPILER), reason="needs a C++ compiler")


@pytest.fixture(scope="module", params=[(), ("-DCUDA_ON_CPU_UCONTEXT",)], ids=["", "any processor"])
def run(request):
    folder = cuda_on_cpu.BUILD / ("cuda_on_cpu_examples" + "_ucontext" * len(request.param))
    built = cuda_on_cpu.build([cuda_on_cpu.HERE / "examples.cu"], folder / "examples.so", *request.param)
    return examples(built)


def examples(path):
    """run(kernel, data, threads): what CUDA says of it; `data` int64 is changed."""
    library = ctypes.CDLL(str(path))
    library.run.restype = ctypes.c_char_p

    def run(name, data, threads, blocks=1, shared=0):
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
        return library.run(name.encode(), blocks, threads, shared, pointer).decode()

    return run


@pytest.mark.parametrize("threads", [32, 64, 160, 1024])
def test_sums_and_scans_of_blocks(run, threads):
    rng = np.random.default_rng(threads)
    data = rng.integers(0, 2**60 // threads, (2, threads, 4))
    data[0, threads - 3:, 0] *= -1
    values = data[..., 0].copy()
    assert run("collectives", data, threads, blocks=2) == "no error"
    assert (data[..., 0] == values.sum(1, keepdims=True)).all()
    assert (data[..., 1] == values.cumsum(1) - values).all()
    assert (data[0, :, 2] == threads - 3).all() and (data[1, :, 2] == -1).all()
    assert (data[..., 3] == 3).all()


def test_warp_operations(run):
    data = np.zeros(64 * 9 + 1, np.int64)
    values = data[:64] = np.random.default_rng(0).integers(0, 1000, 64)
    values = values.copy()
    assert run("warp_operations", data, 64) == "no error"
    out = data[64:-1].reshape(64, 8)
    for i in range(64):
        first = i - i % 32
        warp = values[first:first + 32]
        assert out[i, 0] == values[i - 3 if i % 8 >= 3 else i]
        assert out[i, 1] == values[i + 3 if i % 8 < 5 else i]
        assert out[i, 2] == values[i - i % 16 + 5]
        assert out[i, 3] == sum(1 << lane for lane in range(32) if warp[lane] % 3 == 0)
        assert out[i, 4] == sum(1 << lane for lane in range(32) if warp[lane] % 5 == values[i] % 5)
        assert out[i, 5] == warp.max()
        assert out[i, 6] == values[i ^ 2 if i % 2 else i ^ 4]
    assert data[-1] == 64 and out[:, 7].all()


def test_dynamic_shared_memory(run, monkeypatch):
    """It starts as -1, 48 KB need no asking, and there is a limit."""
    for name, bytes, says in [("dynamic_shared_memory", 49152, "no error"),
                              ("dynamic_shared_memory", 49160, "invalid argument"),
                              ("more_shared_memory", 227 * 1024, "no error"),
                              ("more_shared_memory", 227 * 1024 + 8, "invalid argument")]:
        data = np.array([bytes // 8, 0])
        assert run(name, data, 64, shared=bytes) == says
        assert data.tolist() == ([-1, 63 * 32] if says == "no error" else [bytes // 8, 0])
    monkeypatch.setenv("CUDA_ON_CPU_SHARED", "65536")
    assert run("more_shared_memory", np.array([8192, 0]), 64, shared=65536) == "no error"
    assert run("more_shared_memory", np.array([8193, 0]), 64, shared=65544) == "invalid argument"


def test_static_shared_memory(run):
    """It starts as -1 in every block."""
    data = np.zeros(3, np.int64)
    assert run("static_shared_memory", data, 64, blocks=3) == "no error"
    assert data.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("blocks, threads", [(0, 32), (1, 0), (1, 1025), (2**31, 32)])
def test_a_grid_that_no_gpu_takes(run, blocks, threads):
    assert run("reverse", np.zeros(2, np.int64), threads, blocks) == "invalid configuration argument"


@pytest.mark.parametrize("name, message", [
    ("a_barrier_for_some", "divergence: 32 threads wait at a barrier, 0 in a warp operation, 32 have exited"),
    ("two_barriers", "waits at the barrier of examples.cu"),
    ("a_missing_lane", "divergence: 2 threads wait at a barrier, 62 in a warp operation, 0 have exited"),
    ("a_lane_that_left", "lane 5 of the mask has exited, at examples.cu"),
    ("a_lane_outside_its_mask", "not in the mask of its own warp operation at examples.cu"),
])
def test_divergence_is_reported(run, name, message):
    """And the next launch is a new one."""
    says = run(name, np.zeros(64, np.int64), 64, blocks=3)
    assert "block (0, 0, 0), " in says and "thread" in says and message in says
    assert run("reverse", np.arange(64), 64) == "no error"


def test_a_missing_barrier_gives_wrong_results(run):
    values = np.arange(256)
    right, wrong = values.copy(), values.copy()
    assert run("reverse", right, 256) == "no error" and (right == values).all()
    assert run("without_a_barrier", wrong, 256) == "no error" and (wrong != values).any()


def sanitized(*command):
    """Runs Python with the runtimes of g++'s sanitizers."""
    libraries = [subprocess.check_output([COMPILER, f"-print-file-name={name}"], text=True).strip()
                 for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    environment = os.environ | {"LD_PRELOAD": " ".join(libraries), "CUDA_ON_CPU_SANITIZE": "1",
                                "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, stderr=subprocess.STDOUT,
                          stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("kernel, threads, shared, says", [
    ("dynamic_shared_memory", 64, 512, "no error"),
    ("dynamic_shared_memory", 64, 504, "heap-buffer-overflow"),
    ("static_shared_memory", 64, 0, "no error"),
    ("static_shared_memory", 65, 0, "global-buffer-overflow"),
])
def test_the_sanitizers_see_shared_memory(kernel, threads, shared, says):
    """Each thread uses 8 bytes; static ones are there for 64."""
    folder = cuda_on_cpu.BUILD / "cuda_on_cpu_examples_sanitized"
    path = cuda_on_cpu.build([cuda_on_cpu.HERE / "examples.cu"], folder / "examples.so",
                             *cuda_on_cpu.SANITIZE)
    program = f"""if True:
        import numpy as np
        from tests.cuda_on_cpu.test_cuda_on_cpu import examples
        print(examples({str(path)!r})({kernel!r}, np.array([64, 0]), {threads}, shared={shared}))"""
    run = sanitized("-c", program)
    assert says in run.stdout, run.stdout


OF_EVERY_OP = ("tests/kernels/test_every_op.py",)
OF_ITS_OWN = tuple(f"tests/kernels/test_{kernel.stem}.py" for kernel in sorted(cuda_on_cpu.CSRC.glob("*.cu")))


@pytest.mark.parametrize("tests", [pytest.param(OF_EVERY_OP, id="of every op"),
                                   pytest.param(OF_ITS_OWN, id="of its own", marks=pytest.mark.slow)])
@pytest.mark.skipif(DEVICE != "cpu", reason="the emulation is for machines without a GPU")
def test_the_sanitizers_find_nothing(tests):
    """In any test of an op. With -s, since pytest would lose what a sanitizer says when it ends the process."""
    run = sanitized("-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", *tests, "-k", "cuda_emulated")
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout
