"""A fixed part of the cases of `python -m tests.fuzz`; and planted errors, which it must find."""

import pytest
import torch

import specvis_kernels
from specvis_kernels import _define
from tests.cases import DEVICE
from tests.cases.comparing import as_tuple, same, tensors_of
from tests.fuzz import cases, check

pytestmark = [pytest.mark.skipif(DEVICE != "cpu", reason="the cases are for backends that run on a CPU"),
              pytest.mark.filterwarnings("ignore")]
STATUS_BITS = {name: getattr(specvis_kernels, name) for name in (
    "EMPTY_RESIDUAL", "INVALID_DRAFT", "INVALID_ROW", "INVALID_RULE", "INVALID_TREE", "OUT_OF_TRIES")}
HAVE_STATUS = [op for op in cases.ops() if " status:" in getattr(specvis_kernels, op).__doc__.split("Returns:")[1]]


@pytest.mark.parametrize("op", cases.ops())
def test_nothing_is_found(op, part=0):
    for number in range(cases.TURN * part, cases.TURN * (part + 1)):
        assert check.check(cases.make(op, number)) == []


@pytest.mark.parametrize("op, number", [
    ("commit_kv", 3403),     # a table of slots repeated: columns that share slots, which is forbidden
    ("verify_tree", 2101)])  # a row of one unit in fixed point, of which a rejected point mass leaves a quarter
def test_nothing_is_found_where_cases_were_wrong(op, number):
    assert check.check(cases.make(op, number)) == []


@pytest.mark.parametrize("op", HAVE_STATUS)
def test_the_cases_reach_every_status(op):
    """Each bit that the docstring names, and status 0."""
    says = getattr(specvis_kernels, op).__doc__.split(" status:")[1].split("Raises:")[0]
    missing = {bit for name, bit in STATUS_BITS.items() if name in says} | {0}
    for number in range(4 * cases.TURN):
        case = cases.make(op, number)
        result = check.outcome(op, case.named, None)
        if not isinstance(result, ValueError):
            missing -= {bit for bit in missing if ((result.status & bit != 0) if bit else result.status == 0).any()}
        if not missing:
            return
    raise AssertionError(f"no case of {op} has the status bits {missing}")


def test_a_number_is_a_case():
    for op in cases.ops():
        one, other = (cases.make(op, 5) for _ in range(2))
        assert str(one) == str(other) and one.rows == other.rows
        assert all(map(same, tensors_of(one.named), tensors_of(other.named)))


def test_a_case_shows_its_arguments():
    case = cases.Case("commit_kv", 7, {
        "caches": [torch.zeros(40, 40)], "accepted_nodes": torch.tensor([[2]]), "row_dim": 0})
    assert str(case) == ("commit_kv --case 7\ncaches[0]: torch.float32 (40, 40), strides (40, 1)\n"
                         "accepted_nodes: torch.int64 (1, 1), strides (1, 1)\ntensor([[2]])\nrow_dim = 0")


def found(op, monkeypatch, wrong, backend="wrong", most=64):
    """The first case with a finding, and this finding, if wrong(outputs, arguments) changes the oracle's outputs."""
    oracle = _define._kernels[op]["oracle"]

    def kernel(*arguments):
        outputs = [a.clone() for a in as_tuple(oracle(*arguments))]
        wrong(outputs, arguments)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    monkeypatch.setitem(_define._kernels[op], backend, kernel)
    for number in range(most):
        case = cases.make(op, number)
        findings = [finding for finding in check.check(case, [backend]) if finding.backend == backend]
        if findings:
            return case, findings[0]
    raise AssertionError(f"nothing was found in {most} cases")


def one_off(outputs, _):
    """Change the last element of the first output."""
    if outputs[0].numel():
        outputs[0].view(-1)[-1:] = ~outputs[0].view(-1)[-1:] if outputs[0].dtype == torch.bool else torch.where(
            outputs[0].view(-1)[-1:] == 1, 0, 1).to(outputs[0].dtype)


def without_status(outputs, _):
    outputs[-1].zero_()


@pytest.mark.parametrize("op", cases.ops())
def test_a_wrong_element_is_found(op, monkeypatch):
    case, finding = found(op, monkeypatch, one_off, most=4)
    assert finding.backend == "wrong" and finding.what.startswith("output 0 at ")


@pytest.mark.parametrize("op", HAVE_STATUS)
def test_a_missing_status_is_found(op, monkeypatch):
    """A kernel's status differs from the oracle's; the oracle's own is contradicted by valid.py alone."""
    case, finding = found(op, monkeypatch, without_status)
    assert finding.backend == "wrong"
    case, finding = found(op, monkeypatch, without_status, "oracle")
    assert finding.backend == "oracle" and "Error" not in finding.what


@pytest.mark.parametrize("wrong", [lambda table: table.flip(1), lambda table: table[:, :1].expand_as(table)])
def test_a_wrong_table_of_neighbors_is_found(wrong, monkeypatch):
    _, finding = found("codebook_neighbors", monkeypatch, lambda out, _: out[0].copy_(wrong(out[0].int())), "oracle")
    assert finding.what.startswith("neighbors of code ")


def writes(_, arguments):
    arguments[2].mul_(0.5)


def fails(_, arguments):
    if arguments[0].shape[1] == 3:
        raise RuntimeError("three tokens")


def refuses(_, arguments):
    raise ValueError("target_probs must be otherwise")


@pytest.mark.parametrize("wrong, backend, what", [
    (writes, "wrong", "AssertionError: sample_residual wrote to an input"),
    (fails, "wrong", "RuntimeError: three tokens"),
    (refuses, "wrong", "ValueError: target_probs must be otherwise"),
    (refuses, "oracle", "ValueError: target_probs must be otherwise"),
])
def test_what_a_kernel_must_not_do_is_found(wrong, backend, what, monkeypatch):
    case, finding = found("sample_residual", monkeypatch, wrong, backend)
    assert finding.what.startswith(what) and case.rows > 0


def test_a_refusal_for_another_reason_is_found():
    assert check.difference("sample_residual", ValueError("one"), ValueError("other")) is not None
    assert check.difference("sample_residual", ValueError("one"), ValueError("one")) is None
