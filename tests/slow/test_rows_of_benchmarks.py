"""Every row of benchmarks.ops can be timed here: its kernel agrees with the oracle, and its baseline runs."""
import pytest

from benchmarks import ops


@pytest.mark.parametrize("op", ops.ROWS)
def test_rows(op):
    for _, case, backend in ops.jobs([op], ["kernels", "baselines"]):
        call, args = ops.prepare(op, case, backend)
        call(*args)
