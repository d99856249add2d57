"""The report on continuous tokens: distances and formulas by hand, runs that are kept, every section, the summary."""
import csv
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from specvis.cli.main import main
from specvis.decoding.continuous import continuous_decode
from specvis.decoding.continuous_state import ContinuousDecoded, ContinuousSampling, KnownTokens
from specvis.decoding.methods import parse_method
from specvis.pipelines.mar import MARPair
from studies import continuous_study
from studies.base import pixels, write_report
from studies.continuous import FULL, QUICK, ContinuousReport
from studies.continuous_study import ContinuousRun, ContinuousStudy, DeduplicatedMAR, TokenTiming, share
from studies.cspd import eq_35, speed, speedup_by_forwards
from studies.distances import (
    DISTANCES,
    SampleDistance,
    chance_distances,
    compare,
    energy_distance,
    joint,
    sliced_distance,
)
from studies.distribution import distance_rows, distributions_kept, draw_sets
from studies.parallel import against_parallel
from studies.report import CONTINUOUS_ITEMS as ITEMS
from tests.studies.test_quality import NETWORK
from tests.tiny import tiny_pair

PROMPTS = ["red heart", "blue heart", "plain red heart", "heart"]
SCOPE = dataclasses.replace(
    FULL, baseline_batches=2, parallel_batches=1, images=2, most=4,
    gammas={"cspd-released": (2, 4), "cspd": (2,), "cspd-path": (2,)}, batch_sizes=(1, 2), timed_tokens=4,
    guidances=(1.0,), temperatures=(0.9,), known_shares=(0.25, 0.5), draws=64, joint_draws=16, num_tokens=16)


@pytest.fixture(scope="module")
def pair():
    """A draft model that is the target with noise, so that some of its tokens are accepted."""
    tiny = tiny_pair()
    pair = MARPair(tiny.mar.config, tiny.mar.config, tiny.tokenizer.config, tiny.words.vocabulary, tiny.scaling)
    pair.load_state_dict({name.replace("mar_draft.", "mar."): value for name, value in tiny.state_dict().items()
                          if not name.startswith("mar_draft.")}, strict=False)
    generator = torch.Generator().manual_seed(0)
    for weight in pair.mar.diffloss.parameters():
        weight.data += 0.05 * torch.randn(weight.shape, generator=generator)
    pair.mar_draft.load_state_dict(pair.mar.state_dict())
    for weight in pair.mar_draft.diffloss.net.final_layer.parameters():
        weight.data += 0.03 * torch.randn(weight.shape, generator=generator)
    pair.mar.diffloss.clip_sample_range = pair.mar_draft.diffloss.clip_sample_range = 3.0
    return pair


@pytest.fixture(scope="module")
def weights(pair, tmp_path_factory):
    """The same in a folder, with pictures of its prompts."""
    folder = tmp_path_factory.mktemp("weights")
    (folder / "prompts.json").write_text(json.dumps(PROMPTS))
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "prompts.png")
    return folder


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(continuous_study, "MIN_SECONDS", 0.01)


@pytest.fixture
def study(pair, tmp_path):
    return ContinuousStudy(pair, tmp_path / "runs", PROMPTS)


def run(*arguments):
    return CliRunner().invoke(main, ["report", "--continuous", *(str(argument) for argument in arguments)])


def refuse(*_, **__):
    raise AssertionError("decoded again")


# --- numbers ---------------------------------------------------------------------------------------------------------

def test_energy_distance_by_hand():
    """2 * mean(|0-1|, |0-3|, |2-1|, |2-3|) - |0-2| - |1-3| = 2 * 1.5 - 2 - 2."""
    a, b = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [3.0]])
    assert energy_distance(a, b) == pytest.approx(-1.0)
    far = torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([[3.0, 4.0], [3.0, 4.0]])
    assert energy_distance(*far) == pytest.approx(10.0)


def test_sliced_distance_of_a_shift_in_one_dimension_is_the_shift():
    x = torch.randn(200, 1, generator=torch.Generator().manual_seed(0))
    assert sliced_distance(x + 0.7, x) == pytest.approx(0.7)
    plane = torch.cat([x, x.flip(0)], 1)
    assert sliced_distance(plane, plane) == 0 and 0.3 < sliced_distance(plane + torch.tensor([0.7, 0.0]), plane) < 0.6


def test_differences_are_measured_in_deviations_of_chance():
    generator = torch.Generator().manual_seed(0)
    a, b, same, other = torch.randn(4, 300, 2, generator=generator)
    result = compare({"same": same, "other": other + 1.0}, a, b)
    for distance in ("energy distance", "sliced Wasserstein"):
        assert result["same"][distance].deviations < 4 < 10 < result["other"][distance].deviations
    assert joint([SampleDistance(3.0, 1.0, 1.0)] * 4) == pytest.approx(4.0)


def test_the_noise_of_distances_is_that_of_splits():
    a, b = torch.randn(2, 30, 3, generator=torch.Generator().manual_seed(1))
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    halves = [torch.cat([a, b])[part] for part in order.split(30)]
    for name, distance in DISTANCES.items():
        chance = chance_distances(a, b)[name]
        assert chance[0] == pytest.approx(distance(*halves)) and len(set(chance)) > 100
    assert abs(sum(chance_distances(a, b)["energy distance"])) / 200 < 0.02     # 0 in the mean


def test_speedups_by_hand():
    assert eq_35(0.5, 2, 0.25) == pytest.approx(1.75 / 1.5)
    assert eq_35(0.0, 4, 0.5) == pytest.approx(1 / 3) and eq_35(1.0, 4, 0.5) == pytest.approx(5 / 3)
    assert eq_35(0.19, 32, 0.38) == pytest.approx(0.094, abs=0.001)     # the paper's alpha and c: not its 2.33
    target_forwards = 13 + math.ceil(243 / 32)
    assert speedup_by_forwards(256, target_forwards, 243, 0.38) == pytest.approx(2.26, abs=0.03)


def test_the_interval_of_a_share():
    is_accepted = torch.tensor([[True, False, False, False], [True, True, True, True]])
    value, half = share(is_accepted, torch.ones(2, 4, dtype=torch.bool))
    assert value == 5 / 8 and half == pytest.approx(1.96 * (7 / 12 * 5 / 12 / 12) ** 0.5)
    assert math.isnan(share(is_accepted & False, is_accepted & False)[0])


# --- runs ------------------------------------------------------------------------------------------------------------

def test_a_run_is_what_the_pair_draws_and_is_kept(study, pair, monkeypatch):
    wanted = ContinuousRun(parse_method("cspd:gamma=2"), 0.9, 3, guidance=2.0, batch=2)
    pictures = study.pictures(wanted)
    expected = pair.tokens(PROMPTS[:3], wanted.method, ContinuousSampling(torch.arange(3), 2.0, 0.9))
    for field in dataclasses.fields(ContinuousDecoded):
        ours, theirs = (getattr(decoded, field.name) for decoded in (pictures.decoded, expected))
        if field.name in ("tokens", "drafts", "log_r"):
            torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-3, atol=1e-3)
        else:
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs)), field.name
    assert 0 < pictures.seconds and pixels(study, pictures.decoded.tokens).shape == (3, 8, 8, 3)
    monkeypatch.setattr(study, "decode", refuse)
    study.loaded.clear()
    assert study.pending([wanted]) == [] and study.pictures(wanted).seconds == pictures.seconds
    longer = dataclasses.replace(wanted, count=6)
    assert [(part.start, part.count) for part in study.pending([longer])] == [(2, 2), (4, 2)]


def test_equal_rows_are_computed_once(pair):
    calls, forward = [], pair.mar.forward
    tokens = torch.randn(1, 16, 4, generator=torch.Generator().manual_seed(0)).repeat(5, 1, 1)
    is_known = torch.zeros(5, 16, dtype=torch.bool)
    is_known[:, :3] = True
    tokens[1, 7] += 1.0                                                 # not known: no difference
    is_known[3, 5] = True
    condition = pair.mar.condition(pair.features(["red heart"] * 4 + ["heart"]))
    wanted = torch.tensor([[3, 9]]).repeat(5, 1)
    expected = forward(tokens, is_known, condition, 4, wanted)

    def counted(tokens, *others, **more):
        calls.append(len(tokens))
        return forward(tokens, *others, **more)

    merged = DeduplicatedMAR(pair.mar)
    merged.mar = counted
    assert torch.allclose(merged(tokens, is_known, condition, 4, wanted), expected, atol=1e-5) and calls == [3]


def test_an_order_may_be_given(pair):
    features = pair.features(["heart"] * 3)
    sampling = ContinuousSampling(torch.arange(3))
    whole = continuous_decode(pair.mar, pair.mar_draft, features, sampling, parse_method("mar"))
    first = whole.order[:1].expand(3, -1)
    known = KnownTokens(whole.tokens[:1].expand(3, -1, -1), first.argsort(1) < 5, 2, first)
    more = continuous_decode(pair.mar, pair.mar_draft, features, sampling, parse_method("mar"), known=known)
    assert torch.equal(more.order, first)
    new = first[0, 5:7]
    assert torch.allclose(more.tokens[0, new], whole.tokens[0, new], atol=1e-4)  # the same seed and order
    assert (more.tokens[1, new] - more.tokens[0, new]).abs().max() > 0.1
    for bad, says in ((first.flip(1), "known positions first"), (first * 0, "each of the 16 positions once")):
        with pytest.raises(ValueError, match=f"order must .*{says}"):
            continuous_decode(pair.mar, pair.mar_draft, features, sampling, parse_method("mar"),
                              known=dataclasses.replace(known, order=bad))


def test_draws_are_of_one_state_and_independent(study):
    state = draw_sets(SCOPE, 4, 1, 600)
    decoded = study.pictures(SCOPE.run("mar")).decoded
    samples = {name: study.draws(job)[0] for name, job in state.items() if name in ("target", "target again")}
    for x in samples.values():
        assert x.shape == (600, 4) and len(x.unique(dim=0)) == 600
    assert not torch.equal(*samples.values())
    known, prompt = state["target"].state(study, 2)
    assert prompt == 0 and torch.equal(known.tokens[1], decoded.tokens[0]) and known.is_known.sum(1).tolist() == [4, 4]
    found = compare({"again": samples["target again"]}, samples["target"], samples["target again"])["again"]
    assert abs(found["energy distance"].deviations) < 3


def test_what_keeps_the_distribution_and_what_does_not(study):
    """The path ratio keeps one token's; the draft alone does not."""
    scope = dataclasses.replace(SCOPE, draws=1500)
    state = draw_sets(scope, 8, 1, 1500)
    rows = {row["method"]: row for row in distance_rows(study, [state])}
    assert rows["cspd-path"]["finding"] == rows["target again"]["finding"] == "no difference found"
    assert rows["draft model alone"]["finding"] == "differs"
    assert rows["draft model alone"]["energy distance, share of draft"] == 1
    assert 0 < rows["cspd-path"]["alpha"] < 1 and rows["draft model alone"]["alpha"] == ""


def test_a_batch_is_timed(study):
    job = TokenTiming(parse_method("cspd:gamma=2"), SCOPE.run("mar"), 3, 4, 4)
    taken = study.token_seconds(job)
    assert 0 < taken and study.pending([job]) == [] and study.token_seconds(job) == taken


# --- sections --------------------------------------------------------------------------------------------------------

@NETWORK
def test_every_section_is_written_and_nothing_is_done_twice(pair, weights, tmp_path, monkeypatch):
    def write():
        report = ContinuousReport.of(pair, weights, tmp_path, SCOPE, seed=0)
        write_report(report, list(ITEMS.values()), command="specvis report --continuous", whole=True)

    write()
    cover = (tmp_path / "README.md").read_text()
    assert all(f"**{word}.**" in cover for word in ("Distribution", "Speed", "Parallel decoding"))
    for name, item in ITEMS.items():
        text = (tmp_path / f"{name}.md").read_text()
        assert text.startswith(f"## {item.title}") and f"({name}.md)" in cover
        assert "nan" not in text, text
        for link in [part.split(")")[0] for part in text.split("](")[1:]]:
            assert (tmp_path / link).stat().st_size > 0, link
    rows = list(csv.DictReader(open(tmp_path / "table-1.csv")))
    assert [row["gamma"] for row in rows] == ["2", "4", "2", "2"]
    beside = [row for row in csv.DictReader(open(tmp_path / "table-1-paper.csv")) if row["draft"] == "B"]
    assert [row["alpha"] for row in beside if row["gamma"] == "4"] == [rows[1]["alpha"]] * 2
    assert {row["alpha"] for row in beside if row["gamma"] != "4"} == {"not run"}
    for row in rows:
        numbers = {name: float(row[name]) for name in ("alpha", "c", "eq. 35", "target_forwards", "draft_forwards")}
        assert numbers["eq. 35"] == pytest.approx(eq_35(numbers["alpha"], int(row["gamma"]), numbers["c"]), rel=0.05)
    assert len(list(csv.DictReader(open(tmp_path / "figure-16.csv")))) == 48
    assert {row["method"] for row in csv.DictReader(open(tmp_path / "distribution-several.csv"))} > {
        "parallel, 1 forward", "cspd-path, nothing truncated"}
    monkeypatch.setattr(ContinuousStudy, "decode", refuse)
    write()
    assert (tmp_path / "README.md").read_text() == cover


def test_a_quick_report_is_shorter(pair, tmp_path):
    study = ContinuousStudy(pair, tmp_path, PROMPTS)
    costs = [sum(job.cost(study) for item in items for job in set(item.jobs(scope))) for items, scope in (
        ([item for item in ITEMS.values() if item.quick], QUICK), (ITEMS.values(), FULL))]
    assert 0 < 3 * costs[0] < costs[1]


def distance_row(method, energy, sliced=0.0):
    return {"method": method, "draws": 100, "alpha": 0.5, "energy distance, deviations": energy,
            "energy distance, share of draft": energy / 50 if energy else "", "sliced Wasserstein, deviations": sliced}


def test_the_summary_says_what_the_draws_say():
    draft = distance_row("draft model alone", 50.0)
    text = distributions_kept([distance_row("cspd-path", 1.0), distance_row("cspd", 12.0), draft])
    assert "100 draws for: cspd-path (" in text and "changed by: cspd (" in text and "too few" not in text
    text = distributions_kept([distance_row("cspd-path", 1.0, 6.0), distance_row("cspd", 2.0), draft])
    assert "draws for: cspd (alpha 0.500; +2.0, +0.0)" in text and "changed by: cspd-path (" in text
    same = [distance_row("cspd", 0.0), distance_row("draft model alone", 0.0)]
    assert "too few to decide" in distributions_kept(same)


def test_the_summary_says_who_is_fastest():
    rows = [{"family": "a", "method": "a:gamma=1", "gamma": 1, "tau": 2.0, "speedup": 0.5, "batch": 4},
            {"family": "a", "method": "a:gamma=2", "gamma": 2, "tau": 1.0, "speedup": 0.9, "batch": 4}]
    assert "a 2.00 tokens a target forward (gamma 1), 0.90 times" in speed(rows) and "None is faster" in speed(rows)
    rows[0]["speedup"] = 1.5
    assert "The fastest in seconds is a:gamma=1." in speed(rows)


def test_the_summary_says_who_wins():
    def row(method, times, distance, speculative):
        return {"method": method, "speedup": times, "kernel distance": distance, "baseline": 0.0, "+-": 0.1,
                "speculative": speculative}

    parallel, slow = row("mar:num_iter=64", 4.0, 0.05, "no"), row("cspd", 2.0, 0.0, "yes")
    text = against_parallel([parallel, slow])
    assert "For 1 of 1 speculative" in text and "; not for" not in text and "is mar:num_iter=64, 4.00 times" in text
    text = against_parallel([parallel, row("cspd", 5.0, 0.0, "yes")])
    assert "For 0 of 1" in text and "; not for cspd. " in text and "run is cspd, 5.00 times" in text
    text = against_parallel([row("mar:num_iter=64", 4.0, 1.0, "no"), slow, row("cspd-released", 1.0, 1.0, "yes")])
    assert "For 1 of 2" in text and "; not for cspd. " in text and "Every parallel decoding can be told" in text


@pytest.mark.parametrize("arguments, message", [
    (["--only", "table-9"], "unknown table or figure 'table-9'; known: table-1, table-2"),
    (["--only", "lantern-table-2"], "unknown table or figure 'lantern-table-2'; known: table-1"),
    (["--top-k", "5"], "top_k must not be given with --continuous: continuous tokens have no filters"),
    (["--top-p", "0.5"], "top_p must not be given with --continuous"),
    (["--timed", "2"], "timed must not be given with --continuous"),
    (["--score", "a=b:c"], "score must not be given with --continuous"),
    (["--images", "1"], "images must be at least 2 for continuous tokens, got 1"),
    (["--guidance", "inf"], "guidance must be a finite number"),
])
def test_bad_input_is_one_clear_line(weights, tmp_path, arguments, message):
    result = run(*arguments, "--out", tmp_path / "out", "--model", weights)
    assert result.exit_code == 2 and message in result.output, result.output
    assert not (tmp_path / "out").exists()


def test_the_command_writes_a_section(weights, pair, tmp_path, monkeypatch):
    monkeypatch.setattr(MARPair, "load", lambda *_: pair)
    monkeypatch.setattr("studies.continuous.QUICK", SCOPE)
    result = run("--quick", "--only", "figure-15,figure-11", "--images", "2", "--guidance", "1.5", "--seed", "3",
                 "--out", tmp_path, "--model", weights)
    assert result.exit_code == 0, result.output
    text = (tmp_path / "figure-11.md").read_text()
    assert text.startswith("## CSpD, Figure 11") and not (tmp_path / "README.md").exists()
    assert json.loads((tmp_path / "runs" / "study.json").read_text())["seed"] == 3
