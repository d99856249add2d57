"""What fast tests ask of a few methods and backends, asked of all."""
import pytest

from tests.decoding import test_continuous, test_driver, test_step
from tests.decoding.conftest import pair  # noqa: F401
from tests.decoding.conftest import tiny as tiny_target  # noqa: F401
from tests.decoding.test_driver import NAMES, tiny  # noqa: F401
from tests.decoding.toys import METHODS
from tests.laws import test_at_the_door


@pytest.mark.parametrize("backend", ["oracle", "cuda_emulated"])
def test_what_does_not_fit_is_refused_past_python_too(backend):
    test_at_the_door.test_what_does_not_fit_is_refused_past_python_too(backend)


@pytest.mark.parametrize("m", ["mar", "mar:num_iter=5", *METHODS])
def test_a_request_does_not_depend_on_its_batch(pair, m):  # noqa: F811
    test_continuous.test_a_request_does_not_depend_on_its_batch(pair, m)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("test, more", [
    ("a_request_does_not_depend_on_how_many_are_decoded_at_once", {}),
    ("requests_of_a_queue_may_be_begun_or_whole", {"counts": [16, 16, 16, 7, 0]}),
    ("requests_of_a_queue_may_be_begun_or_whole", {"counts": [0, 3, 16, 15, 16]}),
    ("the_device_may_be_looked_at_now_and_then", {"monkeypatch": ...}),
    ("a_request_that_fails_leaves_its_place_clean", {"monkeypatch": ..., "batch": 2}),
    ("a_request_that_fails_leaves_its_place_clean", {"monkeypatch": ..., "batch": 3})])
def test_what_the_driver_does(tiny, monkeypatch, name, test, more):  # noqa: F811
    more = {key: monkeypatch if value is ... else value for key, value in more.items()}
    getattr(test_driver, f"test_{test}")(tiny, name=name, **more)


@pytest.mark.parametrize("name", ["vanilla", "jacobi:window=5:seed_exact=false", "jacobi:window=5:refresh=2", "eagle1",
                                  "lantern:k=8", "adt-tree"])
def test_a_step_compiles_as_one_graph(tiny_target, monkeypatch, name):  # noqa: F811
    test_step.test_a_step_compiles_as_one_graph(tiny_target, monkeypatch, name)
