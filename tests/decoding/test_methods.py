"""Methods as data: what they mean, how they are written, and what is refused before a model runs."""
import math
from dataclasses import replace

import pytest
import torch

from specvis.decoding import methods
from specvis.decoding.method_parts import DRAFT_MODELS, USUAL_WINDOW, Acceptance, JacobiDrafts, StaticDrafts
from specvis.decoding.methods import CONTINUOUS, METHODS, Method, method, parse_method, parse_methods


@pytest.mark.parametrize("name, parameters, message", [
    ("lantren", {}, "unknown method 'lantren'; did you mean lantern"),
    ("lantern", {"delta": -0.1}, r"delta must be within \[0, 1\], got -0.1"),
    ("lantern", {"delta": 0.7, "cutoff": "jsd"}, r"delta must be within \[0, 0.6931\], got 0.7"),
    ("lantern++", {"delta": -1.0}, "delta must be at least 0 and finite in 32 bits where cutoff is ratio, got -1.0"),
    ("lantern++", {"delta": math.inf}, "delta must be at least 0 and finite in 32 bits where cutoff is ratio, got inf"),
    ("lantern", {"k": -1}, "k must be a whole number within 0..524287, got -1"),
    ("lantern", {"cutoff": "kl"}, "cutoff must be one of tvd, ratio, jsd, got 'kl'"),
    ("lantern", {"metric": "l1"}, "metric must be one of l2, raw, cosine, random, rank, got 'l1'"),
    ("lantern", {"residual": "best"}, "residual must be one of optimal, relaxed, released, got 'best'"),
    ("eagle2", {"delta": 0.1}, "delta must come with k > 0"),
    ("eagle2", {"draft_model": "large"}, f"draft_model must be one of {', '.join(DRAFT_MODELS)}, got 'large'"),
    ("eagle2", {"tree": "chain-3"}, "method eagle2 has no parameter 'tree'"),
    ("adt-tree", {"stat": "vertical"}, "no parameter 'stat'; did you mean start"),
    ("adt-tree", {"widths": (9, 4)}, "widths must be 1 <= least <= most <= 128, got 9 and 4"),
    ("vanilla", {"depth": 1}, "method vanilla has no parameter 'depth'; its parameters: none"),
    ("speculative", {"depth": 0}, "depth must be a whole number within 1..128, got 0"),
    ("eagle1", {"tree": "mc_sim"}, "got 'mc_sim'; did you mean mc_sim_7b_63"),
    ("eagle1", {"tree": [[0], [1, 0]]}, r"\[1, 0\] is there without its parent \[1\]"),
    ("eagle2", {"width": 0}, "width must be a whole number within 1..128, got 0"),
    ("eagle2", {"nodes": 1}, r"nodes must be a whole number within 2..1024 \(the root is one\), got 1"),
    ("cool-sd", {"omega": -1.0}, "omega must be at least 0 and finite in 32 bits, got -1.0"),
    ("cool-sd", {"omega": math.inf}, "omega must be at least 0 and finite in 32 bits, got inf"),
    ("cool-sd", {"nu": math.nan}, "nu must be at least 0 and finite in 32 bits, got nan"),
    ("cool-sd", {"omega": (1.0, 2.0), "nu": 0.0}, r"one for each of the 5 levels, got \(1.0, 2.0\)"),
    ("cool-sd", {"omega": (1.0,) * 5, "nu": 0.7}, "nu must be 0 where omega is given level by level, got 0.7"),
    ("cool-sd", {"k": 10}, r"omega must be at least 1 at every level where neighbors lend .* got 0.1736 at the least"),
    ("lantern+optimal", {"omega": 0.9}, "omega must be at least 1 at every level where neighbors lend"),
    ("jacobi", {"window": 0}, "window must be a whole number within 1..1023, got 0"),
    ("jacobi", {"window": True}, "window must be a whole number within 1..1023, got True"),
    ("jacobi", {"window": "all"}, "window must be a whole number within 1..1023, got 'all'"),
    ("jacobi", {"refresh": 9}, "refresh must be a whole number within 0..8, got 9"),
    ("jacobi", {"refresh": -1}, "refresh must be a whole number within 0..8, got -1"),
    ("jacobi", {"refresh": True}, "refresh must be a whole number within 0..8, got True"),
    ("jacobi", {"refresh": 1, "seed_exact": False}, "refresh must be 0 where seed_exact is false: a guess .*, got 1"),
    ("jacobi", {"draft_model": "eagle"}, "jacobi has no parameter 'draft_model'; its parameters: window, refresh"),
    ("jacobi", {"seed_exact": False, "coupling": "half"}, "coupling must be one of maximal, none, got 'half'"),
    ("jacobi", {"seed_exact": "false"}, "seed_exact must be True or False, got 'false'"),
    ("jacobi", {"coupling": "none"}, "coupling must be maximal where seed_exact is true: with shared noise"),
    ("jacobi", {"k": 3}, r"seed_exact must be false where k > 0 or omega is not 1: with .*; got k=3 and omega=1\."),
    ("eagle2", {"omega": 1.1}, "seed_exact must be false where k > 0 or .* nothing to relax; got k=0 and omega=1.1"),
    ("cool-sd", {"seed_exact": True, "omega": 1.0}, "seed_exact must be false where k > 0 or omega is not 1"),  # nu
    ("lantern", {"seed_exact": True}, "seed_exact must be false where k > 0 or omega is not 1"),
    ("gsd", {"residual": "relaxed"}, r"residual must be optimal where metric is rank \(.*\), got 'relaxed'"),
    ("gsd", {"cutoff": "jsd"}, r"cutoff must be tvd where metric is rank \(.*\), got 'jsd'"),
    ("lantern", {"metric": "rank"}, r"metric must be l2, raw, cosine or random \(rank is for jacobi\), got 'rank'"),
    ("cspd", {"gamma": 0}, "gamma must be a whole number within 1..1023, got 0"),
    ("cspd", {"prefill": -0.1}, r"prefill must be within \[0, 1\], got -0.1"),
    ("cspd", {"prefill": 1.1}, r"prefill must be within \[0, 1\], got 1.1"),
    ("cspd", {"variant": "paths"}, "variant must be one of paper, released, path, got 'paths'"),
    ("cspd", {"conditioning": "none"}, "conditioning must be one of exact, block, got 'none'"),
    ("cspd", {"distance_temperature": 0.0}, "distance_temperature must be positive and finite in 32 bits, got 0.0"),
    ("cspd", {"distance_temperature": math.inf}, "distance_temperature must be positive and finite in 32 bits, got"),
    ("cspd-path", {"distance_temperature": 42.0}, "distance_temperature must be 1 where variant is path.* got 42.0"),
    ("cspd", {"variant": "path", "aligned": False}, "aligned must be true where variant is path.* got False"),
    ("cspd", {"max_tries": 0}, "max_tries must be a whole number within 1..1000000, got 0"),
    ("cspd", {"num_iter": 3}, "method cspd has no parameter 'num_iter'.* its parameters: gamma, prefill"),
    ("cspd", {"gama": 3}, "method cspd has no parameter 'gama'; did you mean gamma"),
    ("mar", {"num_iter": -1}, "num_iter must be a whole number within 1..65536, or 0 for one target forward a token"),
    ("cspd", {"gamma": 2.0}, "gamma must be a whole number within 1..1023, got 2.0"),
    ("cspd", {"max_tries": True}, "max_tries must be a whole number within 1..1000000, got True"),
    ("mar", {"steps_last": 1}, "steps_last must be a whole number within 2..100000, or 0 for the model.s own number"),
    ("mar", {"guidance_schedule": "cubic"}, "guidance_schedule must be one of linear, constant, released, got 'cubic'"),
    ("cspd", {"truncate": "false"}, "truncate must be True or False, got 'false'"),
    ("cspd", {"aligned": 0}, "aligned must be True or False, got 0"),
    ("cspd-paths", {}, "unknown method 'cspd-paths'; did you mean cspd-path"),
])
def test_methods_and_parameters_are_checked(name, parameters, message):
    with pytest.raises(ValueError, match=message):
        method(name, **parameters)


@pytest.mark.parametrize("parts, message", [
    (("jacobi",), "drafts must be NoDrafts or JacobiDrafts or StaticDrafts or DynamicDrafts, got str"),
    ((JacobiDrafts(window=3), StaticDrafts(tree="chain-2")), "acceptance must be Acceptance, got StaticDrafts"),
])
def test_parts_of_another_kind_are_refused(parts, message):
    with pytest.raises(TypeError, match=message):
        Method("own", "here", *parts)


def test_a_part_takes_its_own_settings_only():
    with pytest.raises(TypeError, match="window"):
        METHODS["eagle1"].changed(window=3)
    with pytest.raises(TypeError, match="tree"):
        StaticDrafts()
    own = Method("own", "here", StaticDrafts(tree="chain-2", draft_model="small"), Acceptance(omega=(2.0, 1.0)))
    assert own.omegas == (2.0, 1.0) and own.drafting == "static" and own.max_nodes == 3


def test_which_parameters_have_fractions():
    assert methods.FRACTIONAL == {
        "draft_guidance", "delta", "omega", "nu", "beta", "radius", "prefill", "distance_temperature"}


@pytest.mark.parametrize("text, message", [
    ("lantern:delta", "method must be like name:parameter=value, got 'lantern:delta'"),
    ("lantern:delta=much", "delta must be a number, got 'much'"),
    ("lantern:k=1.5", "k must be an integer, got '1.5'"),
    ("lantern:k=1,2", "k must be one number, got '1,2'"),
    ("adt-tree:widths=4", "widths must be two numbers, least,most; got '4'"),
    ("jacobi:window=1.5", "window must be an integer, got '1.5'"),
    ("jacobi:seed_exact=maybe", "seed_exact must be true or false, got 'maybe'"),
    ("lantern:delta=0.1:delta=0.3", "delta must be given once, got 'lantern:delta=0.1:delta=0.3'"),
    ("cspd:truncate=maybe", "truncate must be true or false, got 'maybe'"),
    ("cspd:aligned=1", "aligned must be true or false, got '1'"),
    ("cspd:gamma=two", "gamma must be an integer, got 'two'"),
    ("cspd:prefill=much", "prefill must be a number, got 'much'"),
    ("cspd:gamma", "method must be like name:parameter=value, got 'cspd:gamma'"),
])
def test_how_methods_are_not_written(text, message):
    with pytest.raises(ValueError, match=message):
        parse_method(text)


def test_how_methods_are_written():
    m = parse_method("adt-tree:start=vertical:widths=4,13:beta=0.5:depth=3")
    a = m.drafts.adaptation
    assert (a.start, a.widths, a.beta, m.drafts.depth) == ("vertical", (4, 13), 0.5, 3)
    assert m.label == "adt-tree:depth=3:start=vertical:beta=0.5:widths=4,13"
    assert parse_method(m.label) == m
    assert parse_method("speculative:depth=7").drafts.tree == "chain-7"
    assert [m.label for m in parse_methods(("vanilla, cool-sd:omega=2,1,1,1,0.5,lantern", "eagle2"))] == [
        "vanilla", "cool-sd:omega=2.0,1.0,1.0,1.0,0.5:nu=0.0", "lantern", "eagle2"]
    assert parse_methods(("all",)) == list(METHODS.values())


@pytest.mark.parametrize("text, expected", [
    ("jacobi:window=8", {"window": 8}), ("jacobi:refresh=2", {"refresh": 2}), ("jacobi", {"window": None}),
    ("jacobi:seed_exact=false:coupling=none", {"seed_exact": False, "coupling": "none"}),
    ("jacobi:seed_exact=false:omega=1.2:nu=0.1", {"seed_exact": False, "omega": 1.2, "nu": 0.1}),
    ("gsd:k=6:delta=0.2", {"k": 6, "delta": 0.2, "metric": "rank"}),
    ("gsd+coupled:seed_exact=true:k=0", {"seed_exact": True, "k": 0}),
    ("gsd:seed_exact=true:coupling=maximal:k=0", {"seed_exact": True, "k": 0, "coupling": "maximal"}),
    ("jacobi:residual=relaxed", {"residual": "relaxed"}),
    ("eagle1:seed_exact=true", {"seed_exact": True}), ("eagle2:seed_exact=false", {"seed_exact": False}),
    ("mar:num_iter=8", {"num_iter": 8}), ("mar:steps_first=8:steps_last=5", {"steps_first": 8, "steps_last": 5}),
    ("cspd:gamma=2:prefill=0.5:truncate=false", {"gamma": 2, "prefill": 0.5, "truncate": False}),
    ("cspd-released:max_tries=7", {"max_tries": 7}), ("cspd-path:conditioning=block", {"conditioning": "block"}),
    ("cspd:variant=released:aligned=false", {"variant": "released", "aligned": False}),
    ("cspd:guidance_schedule=constant", {"guidance_schedule": "constant"}),
    ("mar:guidance_schedule=released", {"guidance_schedule": "released"}),
])
def test_labels_read_back(text, expected):
    m = parse_method(text)
    assert expected.items() <= m.parameters.items()
    assert m.label == text and parse_method(m.label) == m


def test_a_label_has_what_the_recipe_of_that_name_lacks():
    assert replace(method("mar"), gamma=4).label.startswith("mar:gamma=4:prefill=0.0")


@pytest.mark.parametrize("text, device, pictures, window", [
    ("jacobi", "cpu", 1, 4), ("jacobi", "cpu", 2, 2), ("jacobi", "cpu", 8, 2), ("jacobi", "cuda:1", 1, 16),
    ("jacobi", torch.device("cuda"), 8, 16), ("jacobi:refresh=2", "cpu", 1, 4), ("jacobi:window=7", "cpu", 1, 7),
    ("jacobi:seed_exact=false", "cpu", 1, 16), ("gsd", "cpu", 1, 15), ("vanilla", "cuda", 1, 0)])
def test_the_window_where_none_is_named(text, device, pictures, window):
    """By device and number of pictures, but for methods whose tokens depend on it."""
    m = parse_method(text)
    assert m.with_window(device, pictures).drafts.window == window
    assert all(METHODS[name].with_window(device, pictures) is METHODS[name] for name in ("eagle2", "gsd"))


def test_what_a_jacobi_method_is():
    m = METHODS["jacobi"]
    assert [name for name in m.parameters if name not in methods.relaxing(m)] == ["window", "refresh", "seed_exact"]
    assert list(METHODS["gsd"].parameters) == ["window", "refresh", "seed_exact", "coupling", "k", "delta", "cutoff",
                                               "metric", "omega", "nu", "residual"]
    assert (m.drafts.window, m.max_depth, m.max_nodes, m.max_width) == (None, USUAL_WINDOW, USUAL_WINDOW + 1, 1)
    assert method("jacobi", window=5).max_nodes == 6
    assert method("jacobi", refresh=1).family != method("jacobi", refresh=2).family
    relaxed = method("jacobi", seed_exact=False, window=5, omega=1.5)
    assert relaxed.omegas == (1.5,) * 5 and relaxed.family == relaxed.changed(omega=2.0).family
    assert len({m.family, relaxed.family, method("jacobi", window=5).family, METHODS["gsd"].family,
                method("jacobi", seed_exact=False, coupling="none").family}) == 5
    assert METHODS["gsd"].family != METHODS["gsd+coupled"].family
    assert METHODS["gsd"].num_neighbors == 0  # the target's own order is no table
    assert not m.is_baseline


def test_gsd_is_as_released_and_the_coupled_form_has_another_name():
    """GSD's code: 15 guesses, 13 others than the draft, within 0.15; all after the first rejection is drawn anew."""
    gsd = METHODS["gsd"]
    assert gsd.parameters == {
        "window": 15, "refresh": 0, "seed_exact": False, "coupling": "none", "k": 13, "delta": 0.15,
        "cutoff": "tvd", "metric": "rank", "omega": 1.0, "nu": 0.0, "residual": "optimal"}
    assert METHODS["gsd+coupled"].parameters == gsd.parameters | {"window": 16, "coupling": "maximal", "k": 14}
    assert parse_method("gsd+coupled:k=6").label == "gsd+coupled:k=6"
    assert "2508.07747" in METHODS["gsd+coupled"].source and "2510.24211" in METHODS["gsd+coupled"].source


@pytest.mark.parametrize("name", [*METHODS, *CONTINUOUS])
def test_every_recipe_says_what_it_is(name):
    m = method(name)
    assert m == (METHODS | CONTINUOUS)[name] and m.name == name == m.label
    assert "arXiv" in m.source or name == "vanilla"
    assert bool(m.parameters) == (name != "vanilla")
    if name in CONTINUOUS:
        assert ("num_iter" in m.parameters) == (name == "mar") == (m.drafting == "none")
    else:
        assert m.seed_exact == (name in ("jacobi", "eagle2", "adt-tree")) and m.lossless >= m.seed_exact


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


@pytest.mark.parametrize("name, parameters, lossless", [
    ("eagle2", {}, True), ("lantern", {}, False), ("uniform-rsd", {"omega": 2.0}, False),
    ("uniform-rsd", {"omega": 0.5}, True), ("uniform-rsd", {"omega": 0.5, "residual": "relaxed"}, False),
    ("vanilla", {}, True), ("jacobi", {}, True), ("jacobi", {"seed_exact": False}, True),
    ("jacobi", {"seed_exact": False, "omega": 2.0}, False), ("gsd", {}, False), ("eagle1", {"seed_exact": True}, True),
])
def test_which_methods_are_lossless(name, parameters, lossless):
    assert method(name, **parameters).lossless == lossless
