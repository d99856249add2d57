"""What tests/decoding/test_driver.py asks of a few methods, asked of all."""
import pytest

from tests.decoding import test_driver as few
from tests.decoding.test_driver import NAMES, UNTIMED, tiny  # noqa: F401


@pytest.mark.parametrize("name", NAMES)
def test_a_request_does_not_depend_on_how_many_are_decoded_at_once(tiny, name):  # noqa: F811
    few.test_a_request_does_not_depend_on_how_many_are_decoded_at_once(tiny, name)


@pytest.mark.parametrize("counts", [[16, 16, 16, 7, 0], [0, 3, 16, 15, 16]], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_requests_of_a_queue_may_be_begun_or_whole(tiny, name, counts):  # noqa: F811
    few.test_requests_of_a_queue_may_be_begun_or_whole(tiny, name, counts)


@pytest.mark.parametrize("name", UNTIMED)
def test_the_device_may_be_looked_at_now_and_then(tiny, monkeypatch, name):  # noqa: F811
    few.test_the_device_may_be_looked_at_now_and_then(tiny, monkeypatch, name)


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("name", UNTIMED)
def test_a_request_that_fails_leaves_its_place_clean(tiny, monkeypatch, name, batch):  # noqa: F811
    few.test_a_request_that_fails_leaves_its_place_clean(tiny, monkeypatch, name, batch)
