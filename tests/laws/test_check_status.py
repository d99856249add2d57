"""check_status, and SPECVIS_CHECK=1, which calls it after every op."""
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import specvis_kernels
from specvis_kernels import (
    _define,
    commit_kv,
    commit_tokens,
    guided_probs,
    sample_residual,
    tree_mask,
    verify_chain,
    verify_tree,
)
from specvis_kernels.status import EMPTY_RESIDUAL, MEANINGS, OUT_OF_TRIES, StatusError, check_status
from tests.cases import DEVICE
from tests.tiny import tiny_pipeline

NAMES = {getattr(specvis_kernels, name): name for name in (
    "INVALID_ROW", "INVALID_TREE", "INVALID_RULE", "INVALID_DRAFT")}


def message(status, op=None):
    with pytest.raises(StatusError) as error:
        check_status(torch.tensor(status, dtype=torch.int32, device=DEVICE), op)
    assert isinstance(error.value, ValueError) and "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("status", [0, EMPTY_RESIDUAL, OUT_OF_TRIES, EMPTY_RESIDUAL | OUT_OF_TRIES])
def test_what_is_no_error(status):
    check_status(torch.tensor([0, status], dtype=torch.int32, device=DEVICE))
    check_status(torch.zeros(0, dtype=torch.int32, device=DEVICE))


def test_each_bit_has_words():
    assert {bit: name for bit, (name, _) in MEANINGS.items()} == NAMES
    for bit, name in NAMES.items():
        assert message([0, bit | EMPTY_RESIDUAL]).startswith(f"status: {name} at request 1 (")
        assert [other in message([bit]) for other in NAMES.values()] == [other == name for other in NAMES.values()]


def test_which_requests():
    assert message([2, 0, 2, 6], "verify_tree").startswith("verify_tree: INVALID_ROW at requests 0, 2, 3 (a row")
    assert "; INVALID_TREE at request 3 (" in message([2, 0, 2, 6])
    assert "at requests 0, 1, 2, 3 and 5 more (" in message([2] * 9)
    assert "at requests (0, 1), (1, 0) (after guidance" in message([[0, 2], [2, 0]], "guided_probs")


def test_the_usual_mistakes():
    """Logits instead of probabilities, and tokens padded by -1."""
    logits = torch.tensor([[[1.0, -2.0], [0.5, 3.0]]], device=DEVICE)
    tree = [torch.tensor([row], dtype=torch.int32, device=DEVICE) for row in ([1, -1], [-1, -1])]
    uniforms, tokens = torch.zeros(1, 2, device=DEVICE), torch.tensor([[0, -1]], device=DEVICE)
    settings = dict(guidance=1.0, temperature=1.0, top_k=0, top_p=1.0)
    with pytest.raises(StatusError, match="INVALID_ROW at request 0 .*are they logits rather than probabilities"):
        check_status(verify_tree(logits, tokens, *tree, uniforms, max_depth=1).status)
    with pytest.raises(StatusError, match="INVALID_TREE at request 0 .*is a token of -1 there as padding"):
        check_status(verify_tree(logits.softmax(-1), tokens, *tree, uniforms, max_depth=1).status)
    masked = torch.tensor([0.0, -torch.inf], device=DEVICE).expand(1, 2, 2)
    with pytest.raises(StatusError, match=r"INVALID_ROW at requests \(0, 0\), \(0, 1\) .*in uncond alone"):
        check_status(guided_probs(logits, masked, **settings).status, "guided_probs")


@pytest.mark.parametrize("status", [torch.zeros(2, dtype=torch.int64), torch.zeros(2), [0]])
def test_says_what_status_must_be(status):
    with pytest.raises(ValueError, match="status must be int32"):
        check_status(status)
    with pytest.raises(ValueError, match="got SampleResidualResult: pass result.status"):
        check_status(sample(torch.ones(2, 3, device=DEVICE)))


def sample(rows):
    return sample_residual(rows, None, torch.full((2,), 0.5, device=DEVICE))


@pytest.fixture
def checks(monkeypatch):
    monkeypatch.setattr(_define, "CHECKS", True)


def test_every_op_can_check_itself(checks):
    sample(torch.full((2, 3), 0.25, device=DEVICE))
    tree_mask(torch.ones(1, 2, 1, dtype=torch.int64, device=DEVICE))  # has no status
    with pytest.raises(StatusError, match="sample_residual: INVALID_ROW at requests 0, 1"):
        sample(torch.full((2, 3), -1.0, device=DEVICE))


@pytest.mark.parametrize("is_checked", [True, False])
def test_what_else_is_checked(monkeypatch, is_checked):
    """A cache that is too short, counts that were not summed up, masks without columns for the nodes, and nodes that
    are none, too many, or the root."""
    monkeypatch.setattr(_define, "CHECKS", is_checked)
    integers = [torch.tensor(a, device=DEVICE) for a in ([[2], [2]], [1, 1], [0, 2], [[1, 3], [1, 3]], [2, 3])]
    nodes, counts, lengths, ancestors, cached = integers
    rows, uniforms, cache = (torch.full(shape, 0.5, device=DEVICE) for shape in ((6, 2), (6,), (2, 4)))
    tokens = torch.zeros(4, dtype=torch.int64, device=DEVICE)

    def commit(nodes, num_accepted):
        commit_tokens(ancestors.clone(), counts.clone(), ancestors, nodes, num_accepted, cached)

    for call, message in (
            (lambda: commit_kv(cache, nodes, counts, lengths), "commit_kv: .* T=4 .* request 1"),
            (lambda: verify_chain(rows, tokens, 2 * counts, uniforms), "verify_chain: .* D=4, got 2: are the c"),
            (lambda: tree_mask(ancestors[:, :, None], cached, columns=4), "tree_mask: columns=4 .* N=2 .* request 1"),
            (lambda: tree_mask(ancestors[:, :, None], columns=1), "tree_mask: columns=1 .* N=2 .* requests 0, 1"),
            (lambda: commit(nodes, counts), r"commit_tokens: .* within 1\.\.1, or .* within 0\.\.1, at requests 0, 1$"),
            (lambda: commit(nodes - 1, lengths), "commit_tokens: .* at request 1$"),
            (lambda: commit(nodes - 2, lengths // 2), "commit_tokens: .* at request 1$")):
        with pytest.raises(StatusError, match=message) if is_checked else nullcontext():
            call()


def test_nothing_is_checked_where_there_are_no_values(checks):
    torch._dynamo.reset()
    bad = torch.full((2, 3), -1.0, device=DEVICE)
    assert torch.compile(sample, backend="aot_eager", fullgraph=True)(bad).status.tolist() == [2, 2]
    assert make_fx(sample)(bad)(bad).status.tolist() == [2, 2]
    assert torch.func.vmap(sample)(bad[None]).status.tolist() == [[2, 2]]
    with FakeTensorMode() as mode:
        assert sample(mode.from_tensor(bad)).status.shape == (2,)


def test_the_environment_asks_for_it():
    """SPECVIS_CHECK is read when the package is imported."""
    program = "import specvis_kernels._define as d; print(d.CHECKS)"
    for value, expected in (("1", "True"), ("0", "False")):
        run = subprocess.run([sys.executable, "-c", program], env=os.environ | {"SPECVIS_CHECK": value},
                             capture_output=True, text=True)
        assert run.stdout.strip() == expected, run.stderr


@pytest.mark.parametrize("name", [
    "jacobi", "jacobi:window=5:refresh=2", "jacobi:seed_exact=false:k=10:delta=0.3", "gsd", "gsd+coupled", "eagle1",
    "eagle2", "lantern:k=10", "cool-sd"])
def test_no_method_of_ours_makes_what_is_reported(name, monkeypatch):
    monkeypatch.setattr(_define, "CHECKS", True)
    pipeline = tiny_pipeline()
    sampling = pipeline.sampling(seeds=[1, 2, 3], top_k=20)
    assert not pipeline.tokens(["red heart", "blue heart", "plain heart"], name, sampling).failed.any()
