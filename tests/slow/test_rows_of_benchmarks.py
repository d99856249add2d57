"""Every row of benchmarks.ops can be timed here: its kernels agree with the oracle, and its baselines run."""
import pytest

from benchmarks import ops

GROUPS = [group for group in ops.GROUPS if group != "oracles"]


@pytest.mark.parametrize("op", [op for op in ops.ROWS if ops.jobs([op], GROUPS)])
def test_rows(op):
    for _, case, backend in ops.jobs([op], GROUPS):
        call, args = ops.prepare(op, case, backend)
        call(*args)
