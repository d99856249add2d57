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
from tests.fuzz.sanitized import runtimes

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

    def run(name, data, threads, blocks=1, shared=0, cluster=1):
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
        return library.run(name.encode(), blocks, threads, shared, pointer, cluster).decode()

    return run


def test_warp_operations(run):
    data = np.zeros(64 * 8 + 1, np.int64)
    values = data[:64] = np.random.default_rng(0).integers(0, 1000, 64)
    values = values.copy()
    assert run("warp_operations", data, 64) == "no error"
    out = data[64:-1].reshape(64, 7)
    for i in range(64):
        first = i - i % 32
        warp = values[first:first + 32]
        assert out[i, 0] == values[i - 3 if i % 8 >= 3 else i]
        assert out[i, 1] == values[i - i % 16 + 5]
        assert out[i, 2] == sum(1 << lane for lane in range(32) if warp[lane] % 3 == 0)
        assert out[i, 3] == sum(1 << lane for lane in range(32) if warp[lane] % 5 == values[i] % 5)
        assert out[i, 4] == warp.max()
        assert out[i, 5] == values[i ^ 2 if i % 2 else i ^ 4]
    assert data[-1] == 64 and out[:, 6].all()


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


@pytest.mark.parametrize("kernel, found", [("static_shared_memory", -1), ("shared_memory_of_templates", -6)])
def test_static_shared_memory(run, kernel, found):
    """It starts as -1 in every block, also where a template declares it."""
    data = np.zeros(3, np.int64)
    assert run(kernel, data, 64, blocks=3) == "no error"
    assert data.tolist() == [found] * 3


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("threads", [32, 96, 256])
def test_sums_and_scans_of_teams(run, threads, cluster):
    """Of 24 / cluster teams: the odd ones have one negative value, by the last thread but two."""
    teams, members = 24 // cluster, threads * cluster
    rng = np.random.default_rng(members)
    data = rng.integers(0, 2**50, (teams, members, 7))
    data[1::2, -3, 0] *= -1
    values, negative = data[..., 0].copy(), np.arange(teams)[:, None] % 2
    assert run("teams", data, threads, blocks=24, cluster=cluster) == "no error"
    assert (data[..., 0] == values.sum(1, keepdims=True)).all()
    assert (data[..., 1] == np.where(negative, data[..., 1], data[..., 0])).all()
    assert (data[..., 2] == 1 - negative).all()
    assert (data[..., 3] == values.cumsum(1) - values).all()
    assert (data[..., 4].view(np.uint64) == values.view(np.uint64).max(1, keepdims=True)).all()
    assert (data[..., 5] == negative).all()
    assert (data[..., 6] == 1).all()


@pytest.mark.parametrize("cluster", [2, 4, 8])
def test_shared_memory_of_other_blocks(run, monkeypatch, cluster):
    """Static and dynamic. Without a barrier some order of blocks reads what was not there yet, or no longer is."""
    values = np.random.default_rng(cluster).integers(0, 500, (16 // cluster, cluster, 64))
    passed = np.roll(values, 1, axis=1) * 1001

    def results(name):
        for seed in range(1, 9):
            monkeypatch.setenv("CUDA_ON_CPU_SEED", str(seed))
            data = values.copy()
            yield run(name, data, 64, blocks=16, cluster=cluster, shared=512) == "no error" and (data == passed).all()

    assert all(results("passes_on"))
    assert not all(results("passes_on_without_a_barrier"))
    assert not all(results("passes_on_without_the_last_barrier"))


def test_arriving_early_at_a_barrier(run):
    data = np.zeros(8, np.int64)
    assert run("arrives_early", data, 64, blocks=8, cluster=4) == "no error"
    assert data.tolist() == [103, 102, 101, 100, 107, 106, 105, 104]


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


@pytest.mark.parametrize("name, message", [
    ("a_cluster_barrier_for_some", "0 in a warp operation, 64 at the cluster's barrier, 192 have exited"),
    ("a_cluster_barrier_for_some_threads", "128 at the cluster's barrier, 128 have exited"),
    ("two_cluster_barriers", "arrives at the cluster's barrier of examples.cu"),
    ("arrives_twice", "arrives twice at the cluster's barrier without waiting, at examples.cu"),
    ("waits_alone", "waits for the cluster without having arrived, at examples.cu"),
    ("block_that_left", "maps to block 1 of the cluster, which has exited, at team.cuh"),
    ("maps_a_local", "maps what is no shared memory of its block, at team.cuh"),
    ("maps_too_far", "maps to block 4 of a cluster of 4, at team.cuh"),
])
def test_what_is_wrong_in_a_cluster_is_reported(run, name, message):
    says = run(name, np.zeros(64, np.int64), 64, blocks=8, cluster=4)
    assert says.startswith("kernel, block (") and "thread" in says and message in says, says
    assert run("arrives_early", np.zeros(8, np.int64), 64, blocks=8, cluster=4) == "no error"


@pytest.mark.parametrize("blocks, cluster, message", [
    (6, 4, "6 blocks cannot be divided into clusters of 4"), (16, 16, "a cluster has 1 to 8 blocks, not 16"),
    (4, 0, "a cluster has 1 to 8 blocks, not 0")])
def test_clusters_that_no_gpu_takes(run, blocks, cluster, message):
    assert run("teams", np.zeros(8, np.int64), 64, blocks, cluster=cluster) == f"kernel: {message}"


def test_an_older_gpu_has_no_clusters(run, monkeypatch):
    monkeypatch.setenv("CUDA_ON_CPU_CAPABILITY", "8")
    says = run("teams", np.zeros(8 * 128, np.int64), 64, blocks=2, cluster=2)
    assert says == "kernel: clusters need compute capability 9"
    assert run("teams", np.zeros(8 * 128, np.int64), 64, blocks=2, cluster=1) == "no error"


@pytest.mark.parametrize("variables, rows, clusters", [
    ({}, [1, 8, 16, 17, 32, 33, 64, 65], [8, 8, 8, 4, 4, 2, 2, 1]), ({"CAPABILITY": "8"}, [1, 8], [1, 1]),
    ({"SMS": "16"}, [1, 2, 3, 4, 8, 9], [8, 8, 4, 4, 2, 1])])
def test_variables_make_another_device(run, monkeypatch, variables, rows, clusters):
    """cluster_for() of team.cuh, which asks a device once."""
    for name, value in variables.items():
        monkeypatch.setenv(f"CUDA_ON_CPU_{name}", value)
    data = np.array([len(rows), *rows])
    assert run("cluster_for", data, 0) == "no error"
    assert data[1:].tolist() == clusters


def test_a_missing_barrier_gives_wrong_results(run):
    values = np.arange(256)
    right, wrong = values.copy(), values.copy()
    assert run("reverse", right, 256) == "no error" and (right == values).all()
    assert run("without_a_barrier", wrong, 256) == "no error" and (wrong != values).any()


def sanitized(*command):
    """Runs Python with the runtimes of g++'s sanitizers."""
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=os.environ | runtimes(), stderr=subprocess.STDOUT,
                          stdout=subprocess.PIPE, text=True)
