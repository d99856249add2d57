"""Races are found where they are, and nowhere else."""
import os
import shutil
import subprocess

import numpy as np
import pytest

from tests import cuda_on_cpu
from tests.cuda_on_cpu import races
from tests.cuda_on_cpu.test_cuda_on_cpu import examples

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
IS_GCC = COMPILER and "clang" not in subprocess.run([COMPILER, "--version"], capture_output=True, text=True).stdout
pytestmark = pytest.mark.skipif(not IS_GCC, reason="needs g++: races.cpp stands in for its thread sanitizer")


@pytest.fixture(scope="module")
def found():
    """found(kernel, threads, ..): the races of its launch."""
    folder = cuda_on_cpu.BUILD / "cuda_on_cpu_examples_races"
    path = cuda_on_cpu.build([cuda_on_cpu.HERE / "examples.cu"], folder / "examples.so", races=True)
    run, take = examples(path), races.taker(path)

    def races_of(name, threads, **options):
        data = np.zeros(16384, np.int64)
        data[:3] = [0, 1, 2]
        assert run(name, data, threads, **options) == "no error"
        launch, = take()
        return launch["races"]

    return races_of


@pytest.mark.parametrize("right, wrong, threads, options", [
    ("reverse", "without_a_barrier", 256, {}),
    ("passes_on", "passes_on_without_a_barrier", 64, {"blocks": 8, "cluster": 4, "shared": 512}),
    ("own_memory_over_a_relaxed_barrier", "other_memory_over_a_relaxed_barrier", 64, {"blocks": 8, "cluster": 4}),
    ("tells_half_a_warp", "tells_the_other_half_too", 32, {}),
    ("reads_a_counter", "looks_at_an_atomic", 64, {}),
])
def test_races(found, right, wrong, threads, options):
    """In a block, between those of a cluster, in a warp, and with an atomic."""
    assert found(right, threads, **options) == []
    assert found(wrong, threads, **options)


def test_no_barrier_orders_blocks_that_share_no_cluster(found):
    assert found("reads_a_counter", 64, blocks=5)


@pytest.mark.parametrize("name, threads, cluster", [("teams", 96, 1), ("teams", 96, 4), ("arrives_early", 64, 8)])
def test_what_is_right_has_no_race(found, name, threads, cluster):
    assert found(name, threads, blocks=8, cluster=cluster) == []
