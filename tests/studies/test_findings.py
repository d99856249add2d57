"""What pictures decide: the interval holds however often one looks, and a paper's table stands beside ours."""
import csv
import math

import numpy as np
import torch

from studies import page
from studies.adt_tree import correlations, textures
from studies.base import Finding, all_hold, draw_until_decided
from studies.page import Section
from studies.quality import mean_and_error

COUNTS = [24, 48, 96, 192, 384]
STUDIES = 1000


def wrong_share(mean=0.0, counts=COUNTS, looks=None, **asked):
    """The share of studies of normal numbers that decide what is not so; looks: each looks as if it were the only one.
    """
    generator, wrong = np.random.default_rng(0), 0
    truth = abs(mean) < asked["margin"] if "margin" in asked else mean > 0
    for _ in range(STUDIES):
        values = generator.normal(mean, size=counts[-1])

        def estimate(count, values=values):
            return mean_and_error(values[:count], np.zeros(count))

        findings = [draw_until_decided(estimate, [count]) for count in counts] if looks else [
            draw_until_decided(estimate, counts, **asked)]
        decided = [finding.holds for finding in findings if finding.holds is not None]
        wrong += bool(decided) and (mean == 0 and not asked or decided[0] != truth)
    return wrong / STUDIES


def test_looking_again_and_again_decides_by_chance_in_one_study_of_twenty():
    assert wrong_share() <= 0.05
    assert wrong_share(looks="each alone") > 0.1, "the control: without the correction"
    assert wrong_share(mean=0.2, margin=0.2) <= 0.04
    assert wrong_share(mean=0.0, least=0.1) <= 0.04, "it is said to be above 0"
    assert wrong_share(mean=0.1, least=0.1) <= 0.04, "it is said to be below what it is"


def test_what_the_largest_number_of_pictures_can_decide_is_decided():
    """A mean of a quarter of the spread, which 400 pictures see in nearly all studies."""
    generator, decided = np.random.default_rng(0), 0
    for _ in range(200):
        values = generator.normal(0.25, size=COUNTS[-1]) + np.arange(COUNTS[-1]) % 24  # prompts differ by much more
        finding = draw_until_decided(lambda count, values=values: (
            values[:count].mean() - 11.5, *mean_and_error(values[:count], np.arange(count) % 24)[1:]), COUNTS)
        decided += finding.holds is True
    assert decided > 170


def test_pictures_are_drawn_until_they_decide():
    looked = []

    def estimate(count):
        looked.append(count)
        return 0.5, 2 / count ** 0.5, count - 1

    finding = draw_until_decided(estimate, COUNTS)
    assert finding.holds and finding.pictures == 192 and looked == COUNTS[:4]
    assert abs(finding.half - 2.6 * 2 / 192 ** 0.5) < 0.01
    assert str(finding) == "+0.5 +- 0.376, 192 pictures"
    looked.clear()
    hopeless = draw_until_decided(lambda count: estimate(count) and (0.01, 2 / count ** 0.5, 9), COUNTS)
    assert hopeless.holds is None and looked == [24, 48, 96], "no more are drawn where 384 would not decide"
    assert str(hopeless).endswith(", 96 pictures; it would take more than 100,000")
    within = draw_until_decided(lambda count: (0.1, 0.1, 9), COUNTS, margin=1.0)
    assert within.holds and within.pictures == 24
    outside = draw_until_decided(lambda count: (2.0, 0.1, 9), COUNTS, margin=1.0)
    assert outside.holds is False
    small = draw_until_decided(lambda count: (0.1, 0.1, 9), COUNTS, least=1.0)
    assert small.holds is False and small.pictures == 24, "less than is asked"
    looked.clear()
    same = draw_until_decided(lambda count: looked.append(count) or (0.1, 0.0, 9), COUNTS)
    assert same.holds and looked == COUNTS, "that few pictures do not differ is no certainty"
    assert draw_until_decided(lambda count: (0.0, 0.0, 9), COUNTS).holds is False, "equal is not more"
    almost = draw_until_decided(lambda count: (0.3, 0.1, 2), [48])
    assert almost.holds is None and almost.needed > 48
    assert [all_hold(True, True), all_hold(True, None), all_hold(None, False)] == [True, None, False]


def test_what_differs_between_prompts_is_no_error():
    generator = np.random.default_rng(0)
    names = np.arange(96) % 24
    values = 10.0 * names + generator.normal(size=96)
    mean, error, freedom = mean_and_error(values, names)
    assert mean == values.mean() and freedom == 72 and abs(error - 1 / 96 ** 0.5) < 0.02
    assert mean_and_error(values[:24], names[:24])[1:] == (np.std(values[:24], ddof=1) / 24 ** 0.5, 23)


def test_a_factor_is_the_ratio_of_a_logarithm():
    finding = Finding(math.log(2), math.log(1.5), 4, None, 310.0)
    assert finding.factor == "2.00 times (1.33 to 3.00, 4 pictures; it would take about 310)"
    assert str(Finding(0.1875, 0.1881, 48, None, 48.3)) == "+0.188 +- 0.188, 48 pictures; it would take a few more"


def test_our_numbers_stand_after_the_papers(tmp_path, monkeypatch):
    rows = [{"model": "L", "T": "0", "method": "plain", "tau": "1.00", "CLIP": "0.3", "mark": ""},
            {"model": "L", "T": "0", "method": "EAGLE-2", "tau": "", "CLIP": "0.2", "mark": ""},
            {"model": "XL", "T": "1", "method": "LANTERN", "tau": "2.40", "CLIP": "0.1", "mark": "restored"}]
    monkeypatch.setattr(page.papers, "table", lambda name: rows)
    monkeypatch.setattr(page.papers, "caption", lambda name: f"The caption of {name}.")
    section = Section("mine", "Title", tmp_path, "origin")
    section.beside("theirs", lambda row: {} if row["method"] == "plain" else {"tau": 1.5, "nodes": 60}, model="L")
    assert "The caption of theirs." in section.markdown()
    assert list(csv.DictReader(open(tmp_path / "mine.csv"))) == [
        {"T": "0", "method": "plain", "tau, paper": "1.00", "tau": "not run", "CLIP": "0.3", "nodes": "not run"},
        {"T": "0", "method": "EAGLE-2", "tau, paper": "-", "tau": "1.5", "CLIP": "0.2", "nodes": "60"}]


def test_texture_is_what_varies_within_a_token():
    images = np.zeros((1, 4, 4, 3), np.uint8)
    images[0, :2, 2:] = 200           # plain
    images[0, 2:, :2] = [[[0], [100]], [[0], [100]]]
    assert textures(images, 2).tolist() == [[0, 0, 50, 0]]


def test_correlations_are_of_each_picture():
    """One picture has 1, one -1, and one that does not vary has none."""
    a = torch.tensor([[0.0, 1, 2, 3], [100, 101, 102, 103], [5, 5, 5, 5]])
    b = torch.tensor([[0.0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2, 3]])
    assert np.allclose(correlations(a, b), [1, -1, np.nan], equal_nan=True)
