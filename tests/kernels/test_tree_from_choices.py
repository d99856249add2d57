"""tree_from_choices: static trees as lists of ranks."""
import pytest
import torch

from specvis_kernels import tree_from_choices, tree_paths


def test_by_hand():
    """The choices may have any order; nodes are numbered by length, then in the order of lists. Ranks may have gaps."""
    parents, rank = tree_from_choices([[2], [0, 1], [0], (0, 0), [1], [2, 0, 5], [2, 0]])
    assert parents.tolist() == [[-1, 0, 0, 0, 1, 1, 3, 6]] and parents.dtype == torch.int32
    assert rank.tolist() == [[0, 0, 1, 2, 0, 1, 0, 5]] and rank.dtype == torch.int64
    assert [a.tolist() for a in tree_from_choices([])] == [[[-1]], [[0]]]


def test_the_paths_of_ranks_can_be_read_off():
    """A binary tree of depth 4: the rank of each node on the path to a leaf, as numbers of two digits."""
    choices = [[n >> d & 1 for d in reversed(range(length))] for length in range(1, 5) for n in range(2**length)]
    parents, rank = tree_from_choices(choices)
    paths = tree_paths(parents, 4)[0, :16]
    assert rank[0][paths][:, 1:].tolist() == choices[-16:]


@pytest.mark.parametrize("choices, message", [
    ([[0], [1, 0]], r"got \[1, 0\] without its parent's"),
    ([[0], [0, 0], [0]], r"got \[0\] twice"),
    ([[0], []], r"got \[\] among them"),
    ([[0], [-1]], r"got \[-1\] among them"),
])
def test_what_is_no_tree_is_refused(choices, message):
    with pytest.raises(ValueError, match="choices must be different paths of ranks >= 0.*" + message):
        tree_from_choices(choices)


@pytest.mark.parametrize("choices, got", [([0, 1], "0"), ([[0], [0.5]], r"\[0.5\]"), (["0"], "'0'"), (3, "3")])
def test_what_is_no_path_is_refused(choices, got):
    with pytest.raises(ValueError, match=rf"must be paths of integers, e.g. \[\[0\], \[1\], \[0, 0\]\], got {got}$"):
        tree_from_choices(choices)


def test_ranks_of_any_integer_type():
    wanted = tree_from_choices([[0], [1], [1, 0]])
    for choices in ([torch.tensor([0]), torch.tensor([1]), torch.tensor([1, 0])], iter([(0,), (True,), (1, 0)])):
        assert all(map(torch.equal, tree_from_choices(choices), wanted))
