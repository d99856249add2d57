"""Every method's step is one graph of torch.compile."""
import pytest

from tests.decoding.conftest import tiny  # noqa: F401
from tests.decoding.test_step import test_a_step_compiles_as_one_graph as compiles


@pytest.mark.parametrize("name", ["vanilla", "jacobi:window=5:seed_exact=false", "eagle1", "lantern:k=8", "adt-tree"])
def test_a_step_compiles_as_one_graph(tiny, monkeypatch, name):  # noqa: F811
    compiles(tiny, monkeypatch, name)
