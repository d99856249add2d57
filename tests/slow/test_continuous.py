"""What tests/decoding/test_continuous.py asks of a few methods, asked of all."""
import pytest

from tests.decoding import test_continuous as few
from tests.decoding.conftest import pair  # noqa: F401
from tests.decoding.toys import METHODS


@pytest.mark.parametrize("m", ["mar", "mar:num_iter=5", *METHODS])
def test_a_request_does_not_depend_on_its_batch(pair, m):  # noqa: F811
    few.test_a_request_does_not_depend_on_its_batch(pair, m)
