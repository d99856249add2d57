"""The benchmark checks what it times and says what it measured."""
import pytest
import torch

import specvis_kernels
from benchmarks import harness, jacobi, ops
from tests.kernels import inputs


def both(op, name, *sizes):
    """What the baseline and the oracle return."""
    baseline, args = ops.prepare(op, sizes, name)
    return baseline(*args), ops.prepare(op, sizes, "oracle")[0](*args)


@pytest.mark.parametrize("options", [{}, {"k": 6, "residual": "relaxed"},
                                     {"k": 6, "residual": "relaxed", "offset": 8}])
def test_the_baseline_accepts_the_same_nodes(options):
    results, expected = both("verify_tree", "python loop", 8, 60, 30, 4, {"branch": 5} | options)
    assert expected.num_accepted.max() > 1
    for b, (nodes, token) in enumerate(results):
        assert nodes == expected.accepted_nodes[b, :expected.num_accepted[b]].tolist()
        assert token == expected.next_token[b]


@pytest.mark.parametrize("options", [{}, {"k": 60, "residual": "relaxed"}, {"filters": "p_then_k"}, {"seeds": True}])
def test_the_baselines_of_verify_logits_accept_the_same_nodes(options):
    options = {"branch": 5, "likely": True, "settings": [(3.0, 1.0, 90, 0.95), (2.0, 1.0, 60, 1.0)]} | options
    (nodes, num_accepted, token, *_), expected = both("verify_logits", "two ops", 6, 60, 300, 4, options)
    assert nodes.equal(expected.accepted_nodes) and token.equal(expected.next_token) and num_accepted.max() > 1
    results, _ = both("verify_logits", "LANTERN's loop", 6, 60, 300, 4, options)
    for b, (nodes, token) in enumerate(results):
        assert "seeds" in options or nodes == expected.accepted_nodes[b, :expected.num_accepted[b]].tolist()
        assert "seeds" in options or token == expected.next_token[b]


def test_verify_logits_is_timed_where_it_visits_three_rows_or_more():
    """Of each request on average. The trees hold the likeliest paths of the target's own rows."""
    for case in ops.ROWS["verify_logits"][0]:
        args, kwargs = inputs.verify_logits(*case)
        result = specvis_kernels.verify_logits(*args, **kwargs)
        assert 1 + result.num_accepted.float().mean() >= 3 and not result.status.any()


def test_the_baseline_finds_the_same_equal_tokens():
    results, expected = both("verify_greedy", "python loop", 2, 60, 6, 4)
    assert expected.num_accepted.max() > 2 and not expected.status.any()
    for b, (nodes, token) in enumerate(results):
        assert nodes == expected.accepted_nodes[b, :expected.num_accepted[b]].tolist()
        assert token == expected.next_token[b]


def test_the_baselines_compute_the_same():
    for settings in (ops.IMAGE, ops.NUCLEUS):
        probs, (expected, _) = both("guided_probs", "warpers", 1, 3, 2000, torch.float32, True, settings)
        torch.testing.assert_close(probs, expected)
    (relaxed_mass, count), expected = both("neighborhood_sum", "gather", 3, 300, 20, "tvd", 7)
    torch.testing.assert_close(relaxed_mass, expected.relaxed_mass)
    assert count.equal(expected.num_neighbors.long())
    tokens, (expected, _) = both("sample_residual", "searchsorted", 20, 40)
    assert tokens[:, 0].equal(expected)
    tokens, _ = both("sample_residual", "multinomial", 20, 40)
    assert tokens.shape == (20, 1)
    tokens, expected = both("draw_tokens", "multinomial", 2, 3, 50)
    assert tokens.shape == expected.tokens.shape and tokens.dtype == expected.tokens.dtype
    tokens, (expected, _, _) = both("draw_children", "multinomial", 2, 3, 50, 4)
    assert tokens.shape == expected.shape and tokens.dtype == expected.dtype
    (tokens, probs, _), expected = both("draft_children", "two ops", 3, 3, 50, 4)
    assert tokens[0].equal(expected.tokens[0]) and probs.equal(expected.probs)
    level, expected = both("draft_frontier", "two ops", 3, 3, 50, 4)
    assert all(a.equal(b) for a, b in zip(level, expected, strict=True))
    (_, _, best), (_, _, frontier, _) = both("expand_tree", "topk twice", 2, 3, 50, 4)
    assert best[1].shape == frontier.shape


def test_the_baseline_attends_to_the_same():
    attended, expected = both("tree_attention", "attention", 1, 9, 4, 2, 32, {"mask": False})
    torch.testing.assert_close(attended, expected)


@pytest.mark.parametrize("layout", ["layers", "heads"])
def test_the_baseline_moves_the_same_columns(layout):
    caches = []
    for name in ("index and put", "oracle"):
        call, args = ops.prepare("commit_kv", (2, 9, 4, {"layout": layout}), name)
        caches.append((call(*args), *args[0]))
    assert all(a.equal(b) for a, b in zip(*caches))


def test_the_baseline_commits_the_same_tokens():
    steps = []
    for name in ("scatter", "oracle"):
        call, args = ops.prepare("commit_tokens", (8, 20, 6, 30, True, False), name)
        out = call(*args)
        tokens, counts = args[0][:, :30], args[1]
        is_written = torch.arange(30, device=tokens.device) < counts[:, None]  # the baseline writes zeros behind
        steps.append((*out, tokens.where(is_written, 0), *args[1:7]))
    assert all(a.equal(b) for a, b in zip(*steps, strict=True)) and steps[0][2].max() > 3


@pytest.mark.parametrize("options", [{}, {"k": 6, "residual": "relaxed"}, {"group": 6}, {"omega": (1.5, 2.0)}])
def test_the_baseline_keeps_the_same_guesses(options):
    (tokens, is_kept, num_kept), expected = both("couple_tokens", "multinomial", 8, 16, 30, options)
    assert is_kept.equal(expected.is_kept) and 0 < is_kept.sum() < is_kept.numel()
    assert tokens[is_kept].equal(expected.tokens[is_kept]) and num_kept.equal(expected.num_kept.long())


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
        ancestors, depth, *others = right(parents, backend="oracle")
        return ancestors, depth + (backend != "oracle"), *others

    monkeypatch.setattr(specvis_kernels, "tree_links", off_by_one)
    with pytest.raises(AssertionError, match="output 1 of tree_links"):
        ops.measure("tree_links", (1, 9), "triton", copy=1e9, seconds=0)


def test_the_cost_of_a_step_lies_between_those_that_were_measured():
    medians = {1: 10.0, 2: 11.0, 5: 20.0}
    assert [jacobi.interpolated(medians, nodes) for nodes in (1, 2, 3, 4, 5)] == [10, 11, 14, 17, 20]


@pytest.mark.parametrize("windows", ["auto", "4,33", "0", "4,,8"])
def test_a_size_is_timed_with_windows_that_its_steps_have(windows, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["jacobi", "size", "--windows", windows])
    with pytest.raises(SystemExit):
        jacobi.main()
    assert f"--windows of size must be numbers from 1 to 32, got {windows}" in capsys.readouterr().err
