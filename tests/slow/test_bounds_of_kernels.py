"""Kernels keep their bounds of traffic, barriers and steps on a GPU, and worse kernels break them."""
import json
import subprocess
import sys
from pathlib import Path

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


def test_every_kernel_keeps_its_bounds():
    run = subprocess.run([sys.executable, "-m", "tests.cuda_on_cpu.trace", "--check"], cwd=ROOT, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.returncode == 0, run.stdout
