"""Kernels keep their bounds of traffic, barriers and steps on a GPU, and worse kernels break them."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_on_cpu import trace
from tests.cuda_on_cpu.test_trace import pytestmark  # noqa: F401

ROOT = Path(__file__).parent.parent.parent


def records_of(op, folder, changes):
    """Records of the op's bounded sizes, in a process of its own: this process has loaded the unchanged kernels."""
    program = f"""if True:
        import json
        from tests.cuda_on_cpu import trace
        trace.start(trace.build([{op!r}], trace.TRACED.with_name({folder!r}), {changes!r}))
        print(json.dumps([record for case in trace.cases({op!r}, False) for record in trace.trace({op!r}, case)]))"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(run.stdout.splitlines()[-1])


def bound(op):
    return {bound["shape"]: bound for bound in json.loads(trace.BOUNDS.read_text()) if bound["op"] == op}


KEEP = 'asm volatile("" ::: "memory");'  # so that g++ does not merge equal code


def test_a_kernel_keeps_its_bounds_and_a_worse_one_breaks_them():
    """It writes results twice, votes once more, and clears words of which two are in one bank."""
    known = bound("tree_links")
    right, = records_of("tree_links", "cuda_on_cpu_traced", {})
    assert trace.broken(right, known[right["shape"]]) == []
    worse, = records_of("tree_links", "cuda_on_cpu_traced_worse", {"tree_links.cu": [
        ("    batch.depth[i] = used", f"    batch.depth[i] = 0;\n{KEEP}\n    batch.depth[i] = used"),
        ("__any_sync(kAllLanes, invalid)", "__any_sync(kAllLanes, __any_sync(kAllLanes, invalid))"),
        ("children[half][low] = children[half][high] = 0;",
         "children[half][low % 16 * 4 + low / 16] = 0;"),
    ]})
    assert set(trace.broken(worse, known[worse["shape"]])) == {
        "times_written", "warp_operations_a_warp", "conflicts"}


# In expand_tree, whose rows a cluster shares:
IN_SYNC = "cluster_barrier();\n    } else {"


WORSE_ROWS = {
    "times_read": ("fours.cuh", "if (kIsHeld) fours_.load(thread_, threads_, p_);",
                   'if (kIsHeld) fours_.load(thread_, threads_, p_); asm volatile("" : "+m"(p_));'
                   " if (kIsHeld) fours_.load(thread_, threads_, p_);"),
    "sectors_a_request": ("fours.cuh", "if (kIsHeld) fours_.load(thread_, threads_, p_);",
                          "if (kIsHeld) fours_.load(thread_ * kHeldFours, 1, p_);"),
    "chain_cycles": ("fours.cuh", "const float4* const fours = reinterpret_cast<const float4*>(row_);\n#pragma unroll",
                     "const float4* const fours = reinterpret_cast<const float4*>(row_);\n#pragma unroll 1"),
    "cluster_barriers": ("team.cuh", IN_SYNC, "cluster_barrier();\n" + IN_SYNC),
    "barriers": ("team.cuh", IN_SYNC, "__syncthreads();\n" + IN_SYNC),
    "races": ("team.cuh", IN_SYNC, "__syncthreads();\n} else {"),
}


@pytest.mark.parametrize("limit", WORSE_ROWS)
def test_a_worse_way_to_read_rows_breaks_a_bound(limit):
    file, old, new = WORSE_ROWS[limit]
    known = bound("expand_tree")
    worse = records_of("expand_tree", f"cuda_on_cpu_traced_{limit}", {file: [(old, new)]})
    assert all(limit in trace.broken(record, known[record["shape"]]) for record in worse)


def test_every_kernel_keeps_its_bounds():
    run = subprocess.run([sys.executable, "-m", "tests.cuda_on_cpu.trace", "--check"], cwd=ROOT, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.returncode == 0, run.stdout
