"""The same rows under pytest-benchmark, for comparing two revisions (it waits for the device after every call):

    pytest benchmarks --benchmark-only --benchmark-autosave           before
    pytest benchmarks --benchmark-only --benchmark-compare            after
"""
import pytest
import torch

from benchmarks import harness, ops
from tests.kernels import inputs


@pytest.mark.parametrize("op, backend, case", [
    pytest.param(op, backend, case, id=f"{op}-{backend}-{ops.show(case)}")
    for op, (cases, _) in ops.ROWS.items() for case in cases for backend in ops.measured(op)])
def test_speed(benchmark, op, backend, case):
    call, args = ops.prepare(op, case, backend)

    def finished():
        call(*args)
        if inputs.DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark.group = f"{op} {ops.show(case)}"
    benchmark.extra_info |= harness.machine()
    benchmark(finished)
