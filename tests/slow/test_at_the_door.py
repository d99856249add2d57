"""Arguments that every op must refuse, on the oracle and on emulated CUDA."""
import pytest

from tests.laws.test_at_the_door import test_what_does_not_fit_is_refused_past_python_too as refused


@pytest.mark.parametrize("backend", ["oracle", "cuda_emulated"])
def test_what_does_not_fit_is_refused_past_python_too(backend):
    refused(backend)
