"""What figures share: labels that do not overlap, and a color and a marker for each method."""
from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Annotation

from specvis.decoding.methods import CONTINUOUS, METHODS
from specvis.study.plots import METHOD_STYLES, curve_styles, method_color, method_style, plt
from studies.page import Section, axes, label, spread_labels

# What dichromats see of linear red, green and blue (Machado et al., 2009, severity 1).
SIGHTS = {"usual": np.eye(3),
          "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                         [-0.003882, -0.048116, 1.051998]],
          "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                           [-0.011820, 0.042940, 0.968881]],
          "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                         [0.004733, 0.691367, 0.303900]]}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


@pytest.fixture
def crowded():
    """A figure of two plots with many labelled points in a corner each, some of them equal."""
    figure, (two,) = axes(1, 2, 5, 3.6)
    for axis, side in zip(two, (1, -1)):
        points = side * np.random.default_rng(0).normal(size=(16, 2)).round(1) * 0.1
        for i, point in enumerate([*points, points[0], (-side, -side)]):
            axis.errorbar(*point, 0.05, fmt="o", ms=5)
            label(axis, f"method:k={i}", tuple(point))
    yield figure
    plt.close(figure)


def boxes(figure, axis):
    figure.draw_without_rendering()
    return [text.get_window_extent() for text in axis.texts if isinstance(text, Annotation) and text.get_text()]


def num_overlaps(figure) -> int:
    return sum(a.fully_overlaps(b) for axis in figure.axes for a, b in combinations(boxes(figure, axis), 2))


def test_crowded_labels_do_not_overlap(crowded):
    assert num_overlaps(crowded) > 20
    spread_labels(crowded)
    assert num_overlaps(crowded) == 0
    for axis in crowded.axes:
        points = axis.transData.transform([text.xy for text in axis.texts])
        for box in boxes(crowded, axis):
            assert axis.bbox.count_contains(box.get_points()) == 2 and not box.count_contains(points)


def test_a_label_with_space_stays_beside_its_point():
    figure, ((axis,),) = axes(1, 1, 4, 3)
    for x in (0, 1):
        axis.plot(x, 0.5, "o")
        label(axis, "method", (x, 0.5))
    spread_labels(figure)
    assert [text.get_ha() for text in axis.texts] == ["left", "right"]  # the second would be cut at the right
    assert [text.get_position()[1] for text in axis.texts] == [0, 0]
    plt.close(figure)


def test_labels_do_not_overlap_in_a_written_figure(crowded, tmp_path):
    Section("name", "title", tmp_path, "origin " * 40).figure(crowded, "caption")
    assert (tmp_path / "name.png").stat().st_size and num_overlaps(crowded) == 0


def test_every_method_has_a_color_and_a_marker_of_its_own():
    assert set(METHOD_STYLES) == {*METHODS, *CONTINUOUS}
    assert len({method_color(name) for name in METHOD_STYLES}) == len(METHOD_STYLES)
    for kind in (METHODS, CONTINUOUS):
        assert len({method_style(name)["marker"] for name in kind}) == len(kind)
    assert method_style("lantern:k=10") == method_style("lantern") != method_style("lantern", is_full=False)
    assert len({style["color"] for style in curve_styles("lantern", 4)}) == 4
    assert np.allclose(curve_styles("lantern", 4)[-1]["color"], to_rgb(method_color("lantern")))
    assert np.allclose(curve_styles("lantern", 1)[0]["color"], to_rgb(method_color("lantern")))


def lab(colors: np.ndarray, sight) -> np.ndarray:
    """Colors (n, 3) RGB -> (n, 3) CIE Lab as a dichromat sees them."""
    linear = np.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4)
    xyz = (linear @ np.transpose(sight)).clip(0, 1) @ XYZ.T / XYZ.sum(1)
    root = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.stack([116 * root[:, 1] - 16, 500 * (root[:, 0] - root[:, 1]), 200 * (root[:, 1] - root[:, 2])], 1)


@pytest.mark.parametrize("kind", (METHODS, CONTINUOUS), ids=("discrete", "continuous"))
@pytest.mark.parametrize("sight", SIGHTS)
def test_colors_differ_for_every_sight(kind, sight):
    seen = lab(np.array([to_rgb(method_color(name)) for name in kind]), SIGHTS[sight])
    least = min(np.linalg.norm(a - b) for a, b in combinations(seen, 2))
    assert least > 15  # about 2 is just visible
