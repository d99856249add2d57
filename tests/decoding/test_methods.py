"""Methods as data: what they stand for, how they are written, and what is refused before a model runs."""
import math

import pytest

from specvis.decoding.methods import (
    DRAFTERS,
    FRACTIONAL,
    METHODS,
    method,
    parameters_of,
    parse_method,
    parse_methods,
)


@pytest.mark.parametrize("name, parameters, message", [
    ("lantren", {}, "unknown method 'lantren'; did you mean lantern"),
    ("lantern", {"delta": -0.1}, r"delta must be within \[0, 1\], got -0.1"),
    ("lantern", {"delta": 0.7, "cutoff": "jsd"}, r"delta must be within \[0, 0.6931\], got 0.7"),
    ("lantern++", {"delta": -1.0}, "delta must be at least 0 and finite where cutoff is ratio, got -1.0"),
    ("lantern++", {"delta": math.inf}, "delta must be at least 0 and finite where cutoff is ratio, got inf"),
    ("lantern", {"k": -1}, "k must be at least 0, got -1"),
    ("lantern", {"cutoff": "kl"}, "cutoff must be one of tvd, ratio, jsd, got 'kl'"),
    ("lantern", {"metric": "l1"}, "metric must be one of l2, cosine, random, got 'l1'"),
    ("lantern", {"residual": "best"}, "residual must be one of optimal, relaxed, released, got 'best'"),
    ("eagle2", {"delta": 0.1}, "delta must come with k > 0"),
    ("eagle2", {"drafter": "large"}, f"drafter must be one of {', '.join(DRAFTERS)}, got 'large'"),
    ("eagle2", {"tree": "chain-3"}, "method eagle2 has no parameter 'tree'"),
    ("eagle2", {"start": "vertical"}, "method eagle2 has no parameter 'start'"),
    ("adt-tree", {"stat": "vertical"}, "no parameter 'stat'; did you mean start"),
    ("adt-tree", {"widths": (9, 4)}, "widths must be 1 <= least <= most, got 9 and 4"),
    ("vanilla", {"depth": 1}, "method vanilla has no parameter 'depth'; its parameters: none"),
    ("speculative", {"depth": 0}, "depth must be at least 1, got 0"),
    ("eagle1", {"depth": 3}, "method eagle1 has no parameter 'depth'"),
    ("eagle1", {"tree": "mc_sim"}, "got 'mc_sim'; did you mean mc_sim_7b_63"),
    ("eagle1", {"tree": [[0], [1, 0]]}, r"\[1, 0\] is there without its parent \[1\]"),
    ("eagle2", {"width": 0}, "width must be at least 1, got 0"),
    ("eagle2", {"nodes": 1}, r"nodes must be at least 2 \(the root and a draft\), got 1"),
    ("cool-sd", {"omega": -1.0}, "omega must be at least 0 and finite, got -1.0"),
    ("cool-sd", {"omega": math.inf}, "omega must be at least 0 and finite, got inf"),
    ("cool-sd", {"nu": math.nan}, "nu must be at least 0 and finite, got nan"),
    ("cool-sd", {"omega": (1.0, 2.0), "nu": 0.0}, r"one for each of the 5 levels, got \(1.0, 2.0\)"),
    ("cool-sd", {"omega": (1.0,) * 5, "nu": 0.7}, "nu must be 0 where omega is given level by level, got 0.7"),
    ("cool-sd", {"k": 10}, r"omega must be at least 1 at every level where neighbors lend .* got 0.1736 at the least"),
    ("lantern+optimal", {"omega": 0.9}, "omega must be at least 1 at every level where neighbors lend"),
])
def test_methods_and_parameters_are_checked(name, parameters, message):
    with pytest.raises(ValueError, match=message):
        method(name, **parameters)


def test_which_parameters_have_fractions():
    assert FRACTIONAL == {"draft_guidance", "delta", "omega", "nu", "beta", "radius", "prefill", "distance_temperature"}


@pytest.mark.parametrize("text, message", [
    ("lantern:delta", "method must be like name:parameter=value, got 'lantern:delta'"),
    ("lantern:delta=much", "delta must be a number, got 'much'"),
    ("lantern:k=1.5", "k must be an integer, got '1.5'"),
    ("lantern:k=1,2", "k must be one number, got '1,2'"),
    ("adt-tree:widths=4", "widths must be two numbers, least,most; got '4'"),
])
def test_how_methods_are_not_written(text, message):
    with pytest.raises(ValueError, match=message):
        parse_method(text)


def test_a_parameter_is_given_once():
    with pytest.raises(ValueError, match="delta must be given once, got 0.1 and 0.3"):
        parse_method("lantern:delta=0.1", delta=0.3)


def test_how_methods_are_written():
    m = parse_method("adt-tree:start=vertical:widths=4,13:beta=0.5", depth=3)
    assert (m.adaptation.start, m.adaptation.widths, m.adaptation.beta, m.depth) == ("vertical", (4, 13), 0.5, 3)
    assert m.label == "adt-tree:depth=3:start=vertical:beta=0.5:widths=4,13"
    assert parse_method(m.label) == m
    assert parse_method("speculative", depth=7).tree == "chain-7"
    assert [m.label for m in parse_methods(("vanilla, cool-sd:omega=2,1,1,1,0.5,lantern", "eagle2"))] == [
        "vanilla", "cool-sd:omega=2.0,1.0,1.0,1.0,0.5:nu=0.0", "lantern", "eagle2"]
    assert parse_methods(("all",)) == list(METHODS.values())


@pytest.mark.parametrize("name", METHODS)
def test_every_recipe_says_what_it_is(name):
    m = METHODS[name]
    assert m.name == name == m.label and "arXiv" in m.source or name == "vanilla"
    assert bool(parameters_of(m)) == (name != "vanilla")


def test_a_tree_has_no_more_nodes_than_candidates():
    assert method("eagle2", depth=1, width=3, nodes=60).max_nodes == 4      # 1 + 3
    assert method("eagle2", depth=2, width=3, nodes=60).max_nodes == 13     # 1 + 3 + 9
    assert METHODS["eagle1"].max_nodes == 26 and METHODS["lantern++"].max_nodes == 58
    assert METHODS["adt-tree"].max_nodes == 60 and METHODS["adt-tree"].max_depth == 9


def test_a_schedule_falls_and_has_its_mean():
    omegas = METHODS["cool-sd"].omegas
    assert [round(omega, 3) for omega in omegas] == [2.855, 1.418, 0.704, 0.350, 0.174]
    assert sum(omegas) / 5 == pytest.approx(1.1)
    assert METHODS["uniform-rsd"].omegas == (1.1,) * 5


@pytest.mark.parametrize("name, parameters, bound", [
    ("eagle2", {}, 0.0), ("lantern", {}, 0.2), ("lantern+optimal", {"delta": 0.4}, 0.4), ("lantern++", {}, 0.5),
    ("uniform-rsd", {"omega": 2.0}, 0.5), ("uniform-rsd", {"omega": 0.5}, 0.0), ("lantern", {"cutoff": "jsd"}, None),
    ("lantern", {"residual": "released"}, None),
    ("uniform-rsd", {"omega": 2.0, "residual": "relaxed"}, None), ("vanilla", {}, 0.0),
])
def test_how_far_one_accept_test_can_go(name, parameters, bound):
    m = method(name, **parameters)
    assert m.tv_bound == bound and m.lossless == (bound == 0)
