"""More of what `python -m tests.fuzz` runs."""
import pytest

from tests.fuzz import cases
from tests.fuzz.test_fuzz import pytestmark  # noqa: F401
from tests.fuzz.test_fuzz import test_nothing_is_found as nothing_is_found


@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("op", cases.ops())
def test_nothing_is_found(op, part):
    nothing_is_found(op, part)
