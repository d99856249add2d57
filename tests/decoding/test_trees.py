"""Draft trees: the released ones by name, what is refused, and ADT-Tree's steps worked out by hand."""
import json
import math

import pytest
import torch

from specvis.decoding import trees
from specvis.decoding.trees import TREES, Adaptation, Shapes, StaticTree, static_tree


@pytest.mark.parametrize("name, levels, leaves", [
    ("mc_sim_7b_63", [4, 8, 8, 3, 2], 15), ("mc_sim_7b_63_balanced", [3, 8, 9, 3, 2], 16),
    ("reverse_balanced_25", [3, 4, 6, 5, 7], 15), ("naive_extend_57", [5, 13, 16, 14, 9], 33),
    ("medusa_2_7b_63", [10, 23, 23, 7], 42),
])
def test_the_released_trees(name, levels, leaves):
    tree = static_tree(name)
    assert [len(tree.level(d)) for d in range(1, tree.depth + 1)] == levels
    assert sum(not tree.children(n) for n in range(len(tree.parents))) == leaves
    assert name in TREES and not tree.is_chain


def test_paths_in_any_order_are_numbered_level_by_level():
    tree = StaticTree.of([[1], [0, 1], [0], [1, 0], [0, 0], [1, 0, 0]])
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 5) and tree.depths == (0, 1, 1, 2, 2, 2, 3)
    assert tree.max_width == 2 and tree.depth == 3 and tree.children(1) == [3, 4]


def test_a_chain_is_a_tree():
    assert static_tree("chain-3") == StaticTree.of([[0], [0, 0], [0, 0, 0]])
    assert static_tree("chain-3").is_chain and static_tree("chain-3").max_width == 1


def test_a_tree_from_a_file(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps([[0], [1], [1, 0]]))
    assert static_tree(str(file)).parents == (-1, 0, 0, 2)
    file = tmp_path / "broken.json"
    file.write_text("[[0")
    with pytest.raises(ValueError, match="broken.json is no JSON"):
        static_tree(str(file))


@pytest.mark.parametrize("paths, message", [
    ([], r"list of paths like \[\[0\], \[1\], \[0, 0\]\]: got \[\]"),
    ("no list", "got 'no list'"),
    ([[0], []], r"got the path \[\]"),
    ([[0], [0, -1]], r"got the path \[0, -1\]"),
    ([[0], [0.5]], r"got the path \[0.5\]"),
    ([[0], 1], "got the path 1"),
    ([[0], [0, 0], [0]], r"\[0\] is there twice"),
    ([[0], [1, 0]], r"\[1, 0\] is there without its parent \[1\]"),
    ([[0], [0, 1]], r"\[0, 1\] is there without its older sibling \[0, 0\]"),
])
def test_trees_that_are_none(paths, message):
    with pytest.raises(ValueError, match=message):
        StaticTree.of(paths)


@pytest.mark.parametrize("name, message", [
    ("mc_sim_7b", "did you mean mc_sim_7b_63"), ("chain-0", "got 'chain-0'"),
    ("nowhere.json", "tree nowhere.json is not a file"),
])
def test_unknown_trees(name, message):
    with pytest.raises(ValueError, match=message):
        static_tree(name)


def shapes(adaptation, depth=4, width=10, max_nodes=99):
    """For one image of 4 x 4 tokens."""
    return Shapes(*(torch.tensor([n]) for n in (depth, width, max_nodes)), 4, 16, adaptation)


def after(shapes, steps):
    """(depth, width) of the tree after each step, given as how many drafts it accepts."""
    position, seen = 1, []
    for num_accepted in steps:
        shapes.record(torch.tensor([position]), torch.tensor([num_accepted]), torch.tensor([True]))
        seen.append((shapes.depth.item(), shapes.width.item()))
        position += num_accepted + 1
    return seen


def test_horizontal_takes_the_tree_of_the_token_to_the_left():
    steps = after(shapes(Adaptation(width_step=3, widths=(4, 13))), [4, 0, 0, 1])
    # Positions 1 to 5 by (4, 10), all 4 accepted: deeper and narrower. Then nothing, and 7 goes back.
    assert steps[:2] == [(5, 7), (4, 10)]
    # 8 starts a row and looks up, at 4: deeper than (4, 10) again. It accepts 1 of 5, and 10 is right of that.
    assert steps[2:] == [(5, 7), (4, 10)]


def test_horizontal_looks_up_at_the_start_of_a_row():
    s = shapes(Adaptation(width_step=3, widths=(4, 13)))
    # Positions 1 and 2: (4, 10), 1 of 4 accepted. Position 3: (3, 13), none. Position 4 starts a row: what drew 0.
    assert after(s, [1, 0]) == [(3, 13), (3, 13)]
    assert s.alphas[0, :4].tolist() == [0.25, 0.25, 0.25, 0.0] and s.depths[0, :4].tolist() == [4, 4, 4, 3]


@pytest.mark.parametrize("adaptation, steps, expected", [
    # 1..4 by (4, 10), 3 of 4; 5 is below 1: (3, 13). It accepts all 3: 5..8. 9 is below 5: deeper than that, (4, 10).
    (dict(start="vertical", width_step=3, widths=(4, 13)), [3, 3], [(3, 13), (4, 10)]),
    (dict(start="vertical", width_step=3, widths=(4, 13)), [0], [(3, 13)]),  # left in the first row
    (dict(width_step=3, widths=(4, 39), flat_depth=1, flat_width=25), [4, 0, 2], [(2, 22), (1, 28), (2, 22)]),  # fixed
    (None, [4, 0], [(4, 10), (4, 10)]),  # trees stay as they are
])
def test_what_comes_after_each_step(adaptation, steps, expected):
    """Vertical takes the tree above."""
    assert after(shapes(adaptation and Adaptation(**adaptation)), steps) == expected


def test_random_is_drawn_within_the_bounds(monkeypatch):
    monkeypatch.setattr(trees, "uniforms_at",
                        lambda seeds, positions, n, stream: torch.tensor([0.0, 0.999, 0.5])[positions % 3].expand(1, n))
    s = shapes(Adaptation(start="random", width_step=0, depth_step=0, depths=(2, 9), widths=(4, 13)))
    assert after(s, [0, 0, 0]) == [(6, 9), (2, 4), (9, 13)]  # positions 2, 3, 4


def test_tokenflock_is_the_weighted_mean_of_the_neighborhood():
    s = shapes(Adaptation(start="tokenflock", depth_step=0, width_step=0, radius=1.0, widths=(1, 30)))
    for table, scale in ((s.depths, 1.0), (s.widths, 2.0)):
        table[0] = torch.arange(16) * scale
    # Position 6 within distance 1: left, 5, weight (1 - 0 + 1) / 1; above, 2, weight (1 - 1 + 1) / 1.
    depth, width, _ = s._start(torch.tensor([6]), torch.tensor([0.0]))
    assert (depth.item(), width.item()) == (4, 8)       # (2 * 5 + 2) / 3


def test_bounds_are_kept_but_flat_trees_may_be_of_any_width():
    a = Adaptation(width_step=10, depths=(1, 3), widths=(4, 12))
    assert after(shapes(a, depth=3, width=5), [3, 3, 3]) == [(3, 4), (3, 4), (3, 4)]
    assert after(shapes(a, depth=2, width=5), [0, 0]) == [(1, 15), (1, 25)]
    assert after(shapes(a, depth=2, width=5, max_nodes=20), [0, 0]) == [(1, 15), (1, 20)]


def test_a_finished_image_asks_for_the_smallest_tree():
    s = shapes(Adaptation())
    s.record(torch.tensor([1]), torch.tensor([4]), torch.tensor([False]))
    assert (s.depth.item(), s.width.item()) == (1, 1)


@pytest.mark.parametrize("wrong, message", [
    ({"start": "diagonal"}, "start must be one of horizontal, vertical, random, tokenflock, got 'diagonal'"),
    ({"beta": 1.5}, r"beta must be within \[0, 1\], got 1.5"),
    ({"depth_step": -1}, "depth_step must be a whole number within 0..128, got -1"),
    ({"flat_width": 0}, "flat_width must be a whole number within 1..128, got 0"),
    ({"radius": 0.5}, "radius must be within \\[1, 65536\\], got 0.5"),
    ({"radius": math.inf}, "radius must be within \\[1, 65536\\], got inf"),
    ({"widths": (5, 4)}, "widths must be 1 <= least <= most <= 128, got 5 and 4"),
    ({"depths": (0, 4)}, "depths must be 1 <= least <= most <= 128, got 0 and 4"),
])
def test_adaptations_out_of_range(wrong, message):
    with pytest.raises(ValueError, match=message):
        Adaptation(**wrong)
