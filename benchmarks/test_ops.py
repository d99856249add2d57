"""The rows of benchmarks.ops under pytest-benchmark, to compare two revisions; it waits for the device in every call:

    pytest benchmarks --benchmark-only --benchmark-autosave           before
    pytest benchmarks --benchmark-only --benchmark-compare            after
"""
import pytest
import torch

from benchmarks import harness, ops
from tests import cases


@pytest.mark.parametrize("op, backend, case", [
    pytest.param(op, backend, case, id=f"{op}-{backend}-{ops.format_case(case)}")
    for op in ops.ROWS for case in ops.sizes_of(op) for backend in ops.measured(op)])
def test_speed(benchmark, op, backend, case):
    call, args = ops.prepare(op, case, backend)

    def run():
        call(*args)
        if cases.DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark.group = f"{op} {ops.format_case(case)}"
    benchmark.extra_info |= harness.machine()
    benchmark(run)
