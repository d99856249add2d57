"""What the benchmarks time."""
import pytest

import specvis_kernels
from benchmarks import ops
from tests.kernels import inputs


@pytest.mark.parametrize("batch", [1, 8])
def test_verify_logits_is_timed_where_it_visits_three_rows_or_more(batch):
    """Of each request on average. The trees hold the likeliest paths of the target's own rows."""
    cases = [case for case in ops.ROWS["verify_logits"][0] if case[0] == batch]
    assert cases
    for case in cases:
        args, kwargs = inputs.verify_logits(*case)
        result = specvis_kernels.verify_logits(*args, **kwargs)
        assert 1 + result.num_accepted.float().mean() >= 3 and not result.status.any()
