"""What the tracer counts, and which races it finds."""
import os
import shutil
import subprocess

import numpy as np
import pytest

from tests import cuda_on_cpu
from tests.cuda_on_cpu import trace
from tests.cuda_on_cpu.test_cuda_on_cpu import examples

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
IS_GCC = COMPILER and "clang" not in subprocess.run([COMPILER, "--version"], capture_output=True, text=True).stdout
pytestmark = pytest.mark.skipif(not IS_GCC, reason="needs g++: the tracer sets options of its thread sanitizer")


@pytest.fixture(scope="module")
def traced():
    """traced(kernel, threads, ..): the record of its launch."""
    folder = cuda_on_cpu.BUILD / "cuda_on_cpu_examples_traced"
    path = cuda_on_cpu.build([cuda_on_cpu.HERE / "examples.cu"], folder / "examples.so", trace=True)
    run, take = examples(path), trace.taker(path)

    def record(name, threads, **options):
        data = np.zeros(16384 + 4, np.int64)
        data = data[-data.ctypes.data % 32 // 8:]  # begins with a sector
        data[:3] = [0, 1, 2]
        assert run(name, data, threads, **options) == "no error"
        one, = take()
        return one

    return record


@pytest.mark.parametrize("right, wrong, threads, options", [
    ("reverse", "without_a_barrier", 256, {}),
    ("ticket", "ticket_without_fences", 64, {"blocks": 5}),
    ("passes_on", "passes_on_without_a_barrier", 64, {"blocks": 8, "cluster": 4, "shared": 512}),
    ("own_memory_over_a_relaxed_barrier", "other_memory_over_a_relaxed_barrier", 64, {"blocks": 8, "cluster": 4}),
    ("tells_half_a_warp", "tells_the_other_half_too", 32, {}),
    ("waits_for_a_volatile", "looks_at_an_atomic", 64, {}),
])
def test_races(traced, right, wrong, threads, options):
    """In a block, between blocks, between those of a cluster, in a warp, and with an atomic."""
    assert traced(right, threads, **options)["races"] == []
    assert traced(wrong, threads, **options)["races"]


@pytest.mark.parametrize("name, threads, cluster", [
    ("teams", 96, 1), ("teams", 96, 4), ("arrives_early", 64, 8)])
def test_what_is_right_has_no_race(traced, name, threads, cluster):
    assert traced(name, threads, blocks=8, cluster=cluster)["races"] == []


@pytest.mark.parametrize("name, wavefronts, conflicts", [
    ("stores_in_a_row", 2, 0), ("stores_in_one_bank", 64, 62), ("stores_in_every_bank", 2, 0)])
def test_bank_conflicts(traced, name, wavefronts, conflicts):
    """A store and a load of a warp."""
    record = traced(name, 32)
    assert (record["shared_wavefronts"], record["shared_conflicts"]) == (wavefronts, conflicts)


@pytest.mark.parametrize("name, sectors", [("loads_in_a_row", 16), ("loads_uncoalesced", 64)])
def test_coalescing(traced, name, sectors):
    """Two warps load 32 times 8 bytes each."""
    record = traced(name, 64)
    assert (record["read_requests"], record["read_sectors"]) == (2, sectors)
    assert record["read_bytes"] == record["read_distinct_bytes"] == record["write_distinct_bytes"] == 512
    assert record["barriers"] == 1


@pytest.mark.parametrize("name, cycles", [("four_loads_at_once", 700 + 4), ("four_loads_in_turn", 700 + 3 * 35 + 4)])
def test_the_longest_chain(traced, name, cycles):
    """Of loads that overlap, and of one that is executed four times; a store follows."""
    assert traced(name, 32)["chain_cycles"] == cycles


def test_barriers_and_warp_operations(traced):
    record = traced("teams", 64, blocks=8, cluster=4)
    assert record["cluster_barriers"] == 13 and record["barriers"] == 12 and record["cluster"] == 4
    assert traced("teams", 64)["barriers"] == 13
    assert traced("tells_half_a_warp", 32)["warp_operations"] == 2
