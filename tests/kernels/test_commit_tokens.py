"""commit_tokens on images of a few tokens, and against torch's own operations in its place."""
import pytest
import torch

from benchmarks.baselines import scatter_and_add
from specvis_kernels import EMPTY_RESIDUAL, INVALID_ROW, INVALID_TREE, commit_tokens
from tests import cases
from tests.cases import DEVICE

WRITTEN = cases.MUTATES["commit_tokens"]
ACCOUNTS = (*WRITTEN[2:], "step_excess", "status", "depth")
INT32 = ("accepted_nodes", "num_accepted", "status")


def arguments(**changes):
    """One image of five tokens, with room for two more; two of them exist. A tree of four nodes, all of one path."""
    values = {"tokens": [[7, 6, 0, 0, 0, 50, 51]], "counts": [2], "failed": [False], "target_forwards": [3],
              "num_accepted_at": [[-1] * 5], "num_drafted_at": [[0] * 5], "tv_excess": [0.5],
              "node_tokens": [[6, 3, 8, 4]], "accepted_nodes": [[1, 3, -1]], "num_accepted": [2], "next_token": [9],
              "step_excess": [0.25], "status": [0], "depth": [3]} | changes
    return {name: None if value is None else torch.tensor(value, device=DEVICE).to(
                torch.int32 if name in INT32 else torch.bool if name == "failed" else
                torch.float32 if "excess" in name else torch.int64)
            for name, value in values.items()}


def commit(backend, **changes):
    """(results, what was written to), as lists."""
    given = arguments(**changes)
    out = commit_tokens(**given, backend=backend)
    return [t.tolist() for t in out], {name: given[name].tolist() for name in WRITTEN if given[name] is not None}


def test_by_hand(backend):
    """Nodes 1 and 3 and the next token: 3, 4 and 9. There was room for two drafts: the third level does not count."""
    out, written = commit(backend)
    assert out == [[[3, 4, 9, 0]], [[0, 1, 3, 0]], [3]]
    assert written == {"tokens": [[7, 6, 3, 4, 9, 50, 51]], "counts": [5], "failed": [False], "target_forwards": [4],
                       "num_accepted_at": [[-1, -1, 2, -1, -1]], "num_drafted_at": [[0, 0, 2, 0, 0]],
                       "tv_excess": [0.75]}


@pytest.mark.parametrize("count, tokens, new_count", [
    (2, [7, 6, 3, 4, 9, 50, 51], 5), (5, [7, 6, 0, 0, 0, 3, 4], 7), (7, [7, 6, 0, 0, 0, 50, 51], 7)])
def test_without_accounts(backend, count, tokens, new_count):
    """Then an image has as many tokens as there are columns."""
    out, written = commit(backend, **dict.fromkeys(ACCOUNTS), counts=[count])
    assert out == [[[3, 4, 9, 0]], [[0, 1, 3, 0]], [3]] and written == {"tokens": [tokens], "counts": [new_count]}


@pytest.mark.parametrize("num_accepted, new, nodes, count", [
    (0, [9, 0, 0, 0], [0, 0, 0, 0], 2), (1, [3, 9, 0, 0], [0, 1, 0, 0], 3), (3, [3, 4, 8, 9], [0, 1, 3, 2], 5),
    (-1, [9, 0, 0, 0], [0, 0, 0, 0], 2), (4, [3, 4, 8, 9], [0, 1, 3, 2], 5),  # clamped
])
def test_as_many_as_were_accepted(backend, num_accepted, new, nodes, count):
    out, written = commit(backend, counts=[1], accepted_nodes=[[1, 3, 2]], num_accepted=[num_accepted])
    accepted = min(max(num_accepted, 0), 3)
    assert out == [[new], [nodes], [accepted + 1]]
    assert written["tokens"] == [[7, *new[:count - 1], *[6, 0, 0, 0][count - 1:], 50, 51]]
    assert written["counts"] == [count] and written["num_accepted_at"] == [[-1, accepted, -1, -1, -1]]
    assert written["num_drafted_at"] == [[0, 3, 0, 0, 0]]


def test_what_does_not_fit_is_not_written(backend):
    out, written = commit(backend, counts=[4])
    assert out[0] == [[3, 4, 9, 0]] and written["tokens"] == [[7, 6, 0, 0, 3, 50, 51]] and written["counts"] == [5]
    assert written["num_accepted_at"] == [[-1, -1, -1, -1, 2]] and written["num_drafted_at"] == [[0] * 5]


@pytest.mark.parametrize("count", [5, 6, -1, 2**40])
def test_a_finished_image_is_left_alone(backend, count):
    out, written = commit(backend, counts=[count], status=[INVALID_ROW])
    assert out == [[[3, 4, 9, 0]], [[0, 1, 3, 0]], [3]]
    before = arguments(counts=[count])
    assert written == {name: before[name].tolist() for name in WRITTEN}


@pytest.mark.parametrize("status", [INVALID_ROW, INVALID_ROW | INVALID_TREE, INVALID_TREE | EMPTY_RESIDUAL])
def test_an_image_without_a_next_token_has_failed(backend, status):
    is_invalid = bool(status & INVALID_ROW)
    _, written = commit(backend, counts=[0], num_accepted=[1], next_token=[0], status=[status])
    assert written["failed"] == [is_invalid] and written["counts"] == [5 if is_invalid else 2]
    assert written["tokens"] == [[3, 0, 0, 0, 0, 50, 51]] and written["target_forwards"] == [4]
    assert commit(backend, failed=[True])[1]["failed"] == [True]


def test_a_node_outside_of_the_tree_counts_as_the_root(backend):
    out, _ = commit(backend, accepted_nodes=[[4, -1, 2**31 - 1]], num_accepted=[3])
    assert out[:2] == [[[6, 6, 6, 9]], [[0, 0, 0, 0]]]


def test_a_full_counter_wraps(backend):
    assert commit(backend, target_forwards=[2**63 - 1])[1]["target_forwards"] == [-2**63]


def test_a_tree_without_drafts(backend):
    out, written = commit(backend, node_tokens=[[6]], accepted_nodes=[[]], num_accepted=[0], depth=[0])
    assert out == [[[9]], [[0]], [1]] and written["tokens"] == [[7, 6, 9, 0, 0, 50, 51]]


def test_equals_scatters(backend):
    """Step by step, until every image is finished: results, tokens and accounts."""
    B, L, N, P = 6, 16, 9, 4
    g = torch.Generator().manual_seed(2)
    state = {"tokens": torch.zeros(B, L + P + 1).long(), "counts": torch.tensor([1, 1, 5, 15, 16, 2]),
             "failed": torch.zeros(B).bool(), "target_forwards": torch.ones(B).long(),
             "num_accepted_at": torch.full((B, L), -1), "num_drafted_at": torch.zeros(B, L).long(),
             "tv_excess": torch.zeros(B)}
    ours, theirs = ({name: t.to(DEVICE, copy=True) for name, t in state.items()} for _ in range(2))
    steps = 0
    while (theirs["counts"] < L).any():
        num_accepted = torch.randint(P + 1, (B,), generator=g)
        paths = torch.rand(B, N - 1, generator=g).argsort(1)[:, :P].sort(1).values + 1
        paths[torch.arange(P) >= num_accepted[:, None]] = -1  # as verify_tree pads them
        status = torch.where(torch.arange(B) == 5, INVALID_ROW if steps == 1 else EMPTY_RESIDUAL, 0)
        step = {"node_tokens": torch.randint(99, (B, N), generator=g), "accepted_nodes": paths.int(),
                "num_accepted": num_accepted.int(), "next_token": torch.randint(99, (B,), generator=g),
                "step_excess": torch.rand(B, generator=g), "status": status.int(),
                "depth": torch.randint(1, P + 1, (B,), generator=g)}
        step = {name: t.to(DEVICE) for name, t in step.items()}
        is_done = theirs["counts"] == L  # scatters write into the last columns of these
        at = {name: t[is_done].clone() for name, t in theirs.items()}
        expected, out = scatter_and_add(**theirs, **step), commit_tokens(**ours, **step, backend=backend)
        for name, t in at.items():
            theirs[name][is_done] = t
        for name, a, b in zip(out._fields, out, expected):
            assert a.dtype == b.dtype and a.equal(b), name
        for name, a in ours.items():
            assert a[:, :L].equal(theirs[name][:, :L]) if a.ndim == 2 else a.equal(theirs[name]), f"{name}, {steps}"
        steps += 1
    assert steps > 3 and ours["failed"].tolist() == [False] * 5 + [True]
