"""The benchmark checks what it times and says what it measured."""
import pytest
import torch

import specvis_kernels
from benchmarks import harness, ops


def both(op, name, *sizes):
    """What the rival and the oracle return."""
    rival, args = ops.prepare(op, sizes, name)
    return rival(*args), ops.prepare(op, sizes, "oracle")[0](*args)


@pytest.mark.parametrize("options", [{}, {"k": 6, "residual": "relaxed"},
                                     {"k": 6, "residual": "relaxed", "offset": 8}])
def test_the_rival_walks_the_same_path(options):
    walks, (path, accepted, next_token, _, _) = both("verify_tree", "python walk", 8, 60, 30, 4,
                                                     {"branch": 5} | options)
    assert accepted.max() > 1
    for b, (nodes, token) in enumerate(walks):
        assert nodes == path[b, :accepted[b]].tolist() and token == next_token[b]


def test_the_rivals_compute_the_same():
    for settings in (ops.IMAGE, ops.NUCLEUS):
        probs, (expected, _) = both("guided_probs", "warpers", 1, 3, 2000, torch.float32, True, settings)
        torch.testing.assert_close(probs, expected)
    (mass, kept), (expected, count, _) = both("neighborhood_sum", "gather", 3, 300, 20, "tvd", 7)
    torch.testing.assert_close(mass, expected)
    assert kept.equal(count.long())
    tokens, (expected, _) = both("sample_residual", "searchsorted", 20, 40)
    assert tokens[:, 0].equal(expected)
    tokens, _ = both("sample_residual", "multinomial", 20, 40)
    assert tokens.shape == (20, 1)
    tokens, (expected, _, _) = both("draw_children", "multinomial", 2, 3, 50, 4)
    assert tokens.shape == expected.shape and tokens.dtype == expected.dtype
    (_, _, best), (_, _, frontier, _) = both("expand_tree", "topk twice", 2, 3, 50, 4)
    assert best[1].shape == frontier.shape


def test_a_record_says_what_was_measured():
    record, *_ = ops.measure("tree_links", (1, 9), "oracle", copy=1e9, seconds=0)
    assert (record["op"], record["backend"], record["shape"], record["dtype"]) == (
        "tree_links", "oracle", "1 9", "int32")
    assert 0 < record["p10_us"] <= record["median_us"] <= record["p90_us"] and record["bytes"] == 9 * 24
    assert record["share_of_copy"] == pytest.approx(9 * 24 / record["median_us"] * 1e6 / 1e9, rel=1e-2)
    assert harness.machine().keys() > {"device", "cpu", "cores", "torch", "triton", "python", "git"}


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    right = specvis_kernels.tree_links

    def off_by_one(parents, *, backend=None):
        ancestors, depth, *rest = right(parents, backend="oracle")
        return ancestors, depth + (backend != "oracle"), *rest

    monkeypatch.setattr(specvis_kernels, "tree_links", off_by_one)
    with pytest.raises(AssertionError, match="output 1 of tree_links"):
        ops.measure("tree_links", (1, 9), "triton", copy=1e9, seconds=0)
