"""The tuner: frontier, choice, and what it tries."""

import pytest
from click.testing import CliRunner

from specvis.cli.main import main
from specvis.cli.measured import DiscreteStudy
from specvis.cli.tune import RULES, Target, Trial, frontier, nearest, runs_of, search, variations
from specvis.decoding.methods import METHODS, method, parse_method
from tests.tiny import tiny_pipeline


def trial(name, speed, tv_excess, standard_error=0.0, **parameters):
    return Trial(method(name, **parameters), 16, speed, tv_excess, standard_error, None)


A, B, C = trial("eagle2", 1.5, 0.0), trial("cool-sd", 2.0, 0.03, 0.01), trial("lantern", 3.0, 0.2)
WORSE = trial("lantern++", 1.9, 0.1)


def test_the_frontier_has_no_trial_that_another_beats():
    assert frontier([WORSE, C, A, B]) == [A, B, C]
    assert frontier([trial("eagle1", 2.0, 0.0), A]) == [trial("eagle1", 2.0, 0.0)]


def test_the_choice_keeps_to_the_target():
    every = [A, B, C, WORSE]
    assert Target(tv_excess=0.05).choose(every) == B and Target(tv_excess=0.04).choose(every) == B
    assert Target(tv_excess=0.035).choose(every) == A          # 0.03 and one standard error are more
    assert Target(tv_excess=0.0).choose(every) == A and Target(tv_excess=1.0).choose(every) == C
    assert Target(speedup=1.8).choose(every) == B and Target(speedup=2.5).choose(every) == C
    assert Target(speedup=4.0).choose(every) is None and Target(tv_excess=0.01).choose([B, C]) is None


def test_speed_is_seconds_where_they_were_measured():
    timed = Trial(METHODS["eagle2"], 16, 2.0, 0.0, 0.0, 0.7)
    assert timed.speed == 0.7 and A.speed == 1.5


def test_the_second_round_looks_around_the_target():
    assert nearest([A, B, C, WORSE], Target(tv_excess=0.05), 2) == [B, A]
    assert nearest([A, B, C, WORSE], Target(speedup=2.9), 3) == [C, A, B]
    # the most faithful stays, should the others fail
    assert nearest([A, B, C, WORSE], Target(tv_excess=0.2), 2) == [C, A]


@pytest.mark.parametrize("text", RULES)
def test_every_rule_and_its_variations_are_methods(text):
    base = parse_method(text)
    around = list(variations(base))
    assert len(around) >= 3 and base not in around
    for m in around:
        assert m.name == base.name and all(
            getattr(m.acceptance, name) == getattr(base.acceptance, name) for name in ("residual", "cutoff", "nu"))
    if base.acceptance.k:
        deltas, own = [m.acceptance.delta for m in around], base.acceptance.delta
        assert set(deltas) == {own, *deltas[-2:]} and all(delta != own for delta in deltas[-2:] if delta <= 1)
    assert len({m.max_nodes for m in around}) > 1 or "start" in base.parameters


def test_variations_go_on_from_variations():
    base = parse_method("uniform-rsd:draft_model=small:tree=chain-4:omega=1.5")
    around = [m.label for m in variations(base)]
    assert "uniform-rsd:draft_model=small:tree=chain-4:omega=1.35" in around and base.label not in around
    assert "uniform-rsd:draft_model=small:tree=chain-6:omega=1.5" in around
    assert all("draft_model=small" in m for m in around)
    around = [m.label for m in variations(method("eagle2", depth=6, width=3))]
    assert "eagle2:draft_model=small:depth=6:width=3" in around


def test_a_variation_of_jacobi_has_another_window():
    assert [m.label for m in variations(parse_method("jacobi:guess=last"))] == [
        f"jacobi:window={window}:guess=last" for window in (4, 8, 24, 32)]
    around = [m.label for m in variations(parse_method("jacobi:seed_exact=false:omega=1.5"))]
    assert around[1] == "jacobi:window=8:seed_exact=false:omega=1.5"
    assert around[-1] == "jacobi:seed_exact=false:omega=1.7"


def test_a_variation_keeps_every_other_setting():
    base = parse_method("adt-tree+lantern:start=vertical:beta=0.5:draft_guidance=0.5:depth=3")
    around = [m.label for m in variations(base)]
    start = "start=tokenflock:beta=0.5"
    assert f"adt-tree+lantern:draft_guidance=0.5:depth=3:{start}" in around
    assert "adt-tree+lantern:draft_model=small:draft_guidance=0.5:depth=3:start=vertical:beta=0.5" in around
    assert [m.label for m in variations(parse_method("eagle1:draft_guidance=0.5:residual=relaxed"))][:2] == [
        "eagle1:draft_guidance=0.5:tree=chain-2:residual=relaxed",
        "eagle1:draft_guidance=0.5:tree=chain-4:residual=relaxed"]


def test_a_longer_trial_uses_a_shorter_ones_runs():
    m = METHODS["eagle2"]
    assert [(r.start, r.count) for r in runs_of(m, 16)] == [(0, 4), (4, 4), (8, 8)]
    assert runs_of(m, 8) == runs_of(m, 16)[:2] and [(r.start, r.count) for r in runs_of(m, 7)] == [(0, 4), (4, 3)]


def test_tuning_a_small_model(tmp_path, monkeypatch):
    study = DiscreteStudy(tiny_pipeline(), tmp_path, ["red heart", "blue heart"], images=8)
    rules = [parse_method(text) for text in ("eagle2", "lantern:k=8:delta=0.1", "lantern:k=8:delta=0.6",
                                             "cool-sd:omega=3")]
    trials, chosen = search(study, Target(tv_excess=0.02), pictures=8, by_seconds=False, rules=rules)
    assert chosen is not None and chosen.pictures == 8 and chosen.tv_excess_above <= 0.02
    assert chosen.tau == max(t.tau for t in trials if t.pictures == 8 and t.tv_excess_above <= 0.02)
    assert {t.method for t in trials} > set(rules) and len(trials) > len(rules) + 3

    def refuse(*_):
        raise AssertionError("decoded again")

    monkeypatch.setattr(study.pipeline, "tokens", refuse)
    again, same = search(study, Target(tv_excess=0.02), pictures=8, by_seconds=False, rules=rules)
    assert again == trials and same == chosen


def run(*arguments):
    return CliRunner().invoke(main, ["tune", *(str(argument) for argument in arguments)])


@pytest.mark.parametrize("arguments, message", [
    ([], "give one of --target-tv-excess and --target-speedup"),
    (["--target-tv-excess", "0.1", "--target-speedup", "2"], "give one of --target-tv-excess and --target-speedup"),
    (["--target-tv-excess", "2"], "2.0 is not in the range 0<=x<=1"),
    (["--target-speedup", "0"], "0.0 is not in the range x>0"),
    (["--target-tv-excess", "0.1", "--images", "3"], "3 is not in the range 4<=x<=1000"),
])
def test_bad_input(weights, arguments, message):
    result = run(*arguments, "--model", weights)
    assert result.exit_code == 2 and message in result.output, result.output
