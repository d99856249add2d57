"""A case on its backends, compared with the oracle; and the oracle's statuses, compared with valid.py."""
import os
from dataclasses import dataclass
from unittest.mock import patch

import torch

from tests import cases
from tests.cases.comparing import run
from tests.fuzz import valid


@dataclass
class Finding:
    """What is wrong with a case on one backend; "oracle" if a status of the oracle is not as its docstring says."""

    op: str
    number: int
    backend: str
    what: str


def outcome(op, named, backend):
    """The outputs and after them what the op writes to; or the ValueError by which it refuses its arguments."""
    try:
        return run(op, (), named, backend)
    except ValueError as error:
        return error


def difference(op, got, expected):
    """What differs from the expected outputs, or None. NaN equals NaN."""
    if isinstance(got, ValueError) or isinstance(expected, ValueError):
        return None if repr(got) == repr(expected) else f"got {got!r}, the oracle {expected!r}"
    if len(got) != len(expected):
        return f"{len(got)} outputs, the oracle has {len(expected)}"
    for i, (a, b) in enumerate(zip(got, expected)):
        rtol, atol = cases.TOLERANCES.get(op, {}).get(i, (0, 0))
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {i}: {a.dtype} {tuple(a.shape)}, the oracle's: {b.dtype} {tuple(b.shape)}"
        is_equal = torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=a.is_floating_point())
        if not is_equal.all():
            at = tuple(is_equal.logical_not().nonzero()[0].tolist())
            return (f"output {i} at {at}: got {a[at].item()!r}, the oracle has {b[at].item()!r}; "
                    f"{is_equal.logical_not().sum().item()} of {a.numel()} differ")
    return None


def problem(case, backend):
    """What is wrong with a case on this backend, or None."""
    try:
        with patch.dict(os.environ, case.environment):
            got = outcome(case.op, case.named, backend)
        if isinstance(got, ValueError) and not case.may_be_refused:
            raise got
        if backend != "oracle":
            return difference(case.op, got, outcome(case.op, case.named, "oracle"))
        return None if isinstance(got, ValueError) else valid.problem(case.op, case.named, got)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def check(case, backends=None):
    """The findings of a case: first of the oracle, then of the backends."""
    found = ((backend, problem(case, backend)) for backend in ("oracle", *(backends or case.backends)))
    return [Finding(case.op, case.number, backend, what) for backend, what in found if what]
