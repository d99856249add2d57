"""The cases of verify_logits in the benchmarks; and every row of benchmarks.ops can be timed here."""
import pytest

import specvis_kernels
from benchmarks import ops
from tests import cases
from tests.test_benchmarks import both

GROUPS = [group for group in ops.GROUPS if group != "oracles"]


@pytest.mark.parametrize("batch", [1, 8])
def test_verify_logits_is_timed_where_it_visits_three_rows_or_more(batch):
    """It visits three rows or more of a request on average. The trees hold the likeliest paths of the target's own
    rows."""
    sizes = [case for case in ops.ROWS["verify_logits"][0] if case[0] == batch]
    assert sizes
    for case in sizes:
        args, kwargs = cases.verify_logits(*case)
        result = specvis_kernels.verify_logits(*args, **kwargs)
        assert 1 + result.num_accepted.float().mean() >= 3 and not result.status.any()


@pytest.mark.parametrize("options", [{}, {"k": 60, "residual": "relaxed"}, {"filters": "p_then_k"}, {"seeds": True}])
def test_the_baselines_of_verify_logits_accept_the_same_nodes(options):
    options = {"branch": 5, "likely": True, "settings": [(3.0, 1.0, 90, 0.95), (2.0, 1.0, 60, 1.0)]} | options
    (nodes, num_accepted, token, *_), expected = both("verify_logits", "two ops", 6, 60, 300, 4, options)
    assert nodes.equal(expected.accepted_nodes) and token.equal(expected.next_token) and num_accepted.max() > 1


@pytest.mark.parametrize("op", [op for op in ops.ROWS if ops.jobs([op], GROUPS)])
def test_rows(op):
    """Kernels agree with the oracle, and baselines run."""
    for _, case, backend in ops.jobs([op], GROUPS):
        call, args = ops.prepare(op, case, backend)
        call(*args)
