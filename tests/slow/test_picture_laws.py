"""Loops on a model so small that the probability of each picture is known: 100,000 pictures of each method.

Rules that are a little wrong, in which the pictures' law is far from the target's, show that the number is enough.
tests/decoding has fewer pictures of fewer methods.
"""
import pytest

import specvis.decoding.coupling
import specvis.decoding.speculative
from specvis.decoding.methods import METHODS, method
from tests.decoding.conftest import minute  # noqa: F401
from tests.decoding.pictures import DYNAMIC, FILTERED, TREE, UNFILTERED, coupled, far_from_target

IN_TREES = [
    METHODS["vanilla"], method("speculative", depth=3), method("eagle1", tree=TREE), method("eagle2", **DYNAMIC),
    method("adt-tree", widths=(1, 4), width_step=1, **DYNAMIC), method("cool-sd", tree=TREE, omega=0.5)]
BY_JACOBI = [coupled(window=2), coupled(), coupled(coupling="none"), coupled(omega=0.5), method("jacobi", window=2)]


@pytest.mark.parametrize("m, settings", [*((m, UNFILTERED) for m in IN_TREES + BY_JACOBI),
                                         *((m, FILTERED) for m in IN_TREES)], ids=lambda it: getattr(it, "label", None))
def test_pictures_have_the_target_distribution(minute, m, settings):  # noqa: F811
    assert m.lossless and abs(far_from_target(minute, m, settings)) < 4.5


@pytest.mark.parametrize("m", [
    method("cool-sd", tree=TREE, omega=1.1, nu=0.0),  # acceptance above one
    method("lantern", depth=2, width=3, nodes=8, k=2, delta=0.05),  # by 0.015 in total variation, of many more pictures
    coupled(omega=1.5), METHODS["gsd"], METHODS["gsd+coupled"], coupled(k=2, delta=0.4, residual="relaxed"),
], ids=lambda m: m.label)
def test_the_distribution_test_rejects_relaxed_acceptance(minute, m):  # noqa: F811
    assert not m.lossless and far_from_target(minute, m, UNFILTERED) > 10


def test_the_distribution_test_rejects_rows_of_the_wrong_iteration(minute, monkeypatch):  # noqa: F811
    """The row that a guess was drawn from is the one of the last forward, not its first one."""
    put = specvis.decoding.coupling.RowRing.put
    monkeypatch.setattr(specvis.decoding.coupling.RowRing, "put",
                        lambda self, positions, rows: put(self, positions, rows.roll(1, 1)))
    assert far_from_target(minute, coupled(), UNFILTERED) > 10
