"""The benchmark checks what it times, and one small case of every kernel for comparing two revisions:

    pytest tests/test_benchmarks.py --benchmark-autosave            before
    pytest tests/test_benchmarks.py --benchmark-compare             after
"""
import pytest

import specvis_kernels
from benchmarks import harness, ops
from tests import inputs
from tests.test_every_op import assert_agree, run

COMPILED = [(op, backend) for op in inputs.CASES for backend in specvis_kernels.backends(op, inputs.DEVICE)
            if backend != "oracle" and (backend, inputs.DEVICE) != ("triton", "cpu")]


@pytest.mark.parametrize("op, backend", COMPILED)
def test_speed(benchmark, op, backend):
    args, kwargs = getattr(inputs, op)(*inputs.CASES[op][1])
    out = benchmark(getattr(specvis_kernels, op), *args, **kwargs, backend=backend)
    assert_agree(op, out if isinstance(out, tuple) else (out,), run(op, args, kwargs, "oracle"))


def test_a_record_says_what_was_measured():
    record, *_ = ops.measure("tree_links", (1, 9), "oracle", copy=1e9, seconds=0)
    assert (record["op"], record["backend"], record["shape"], record["dtype"]) == (
        "tree_links", "oracle", "1 9", "int32")
    assert 0 < record["p10_us"] <= record["median_us"] <= record["p90_us"] and record["bytes"] == 9 * 24
    assert record["share_of_copy"] == pytest.approx(9 * 24 / record["median_us"] * 1e6 / 1e9, rel=1e-2)
    assert harness.machine().keys() > {"device", "cpu", "cores", "torch", "triton", "python", "git"}


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    right = specvis_kernels.tree_links

    def off_by_one(parents, *, backend=None):
        ancestors, depth, *rest = right(parents, backend="oracle")
        return ancestors, depth + (backend != "oracle"), *rest

    monkeypatch.setattr(specvis_kernels, "tree_links", off_by_one)
    with pytest.raises(AssertionError, match="output 1 of tree_links"):
        ops.measure("tree_links", (1, 9), "triton", copy=1e9, seconds=0)
