"""Running an op on inputs of its maker, and comparing what two backends return."""
import inspect

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import specvis_kernels
from tests import cases


class Recorder(TorchDispatchMode):
    """`names` of all operations that are called, and `own`: those of this package, with their arguments."""

    def __init__(self):
        super().__init__()
        self.names, self.own = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        if func.namespace == specvis_kernels.__name__:
            self.own.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def make(op, *sizes):
    return getattr(cases, op)(*sizes)


def tensors_of(named):
    return [a for a in tree_leaves(named) if isinstance(a, torch.Tensor)]


def by_name(op, args, kwargs):
    """(the arguments that the op writes to, the other arguments), each by name."""
    named = dict(zip(inspect.signature(getattr(specvis_kernels, op)).parameters, args)) | kwargs
    written = cases.MUTATES.get(op, ())
    return {name: named[name] for name in written}, {name: a for name, a in named.items() if name not in written}


def run(op, args, kwargs, backend=None, function=None, check=True):
    """The op's outputs as a tuple, then the arguments that it writes to. Asserts that it wrote to no other input. It
    writes to copies. `function` may stand for the op. Without `check` tensors need no values."""
    written, others = by_name(op, args, kwargs)
    written = tree_map_only(torch.Tensor, torch.clone, written)
    before = [a.clone() for a in tensors_of(others)] if check else []
    options = {"backend": backend} if backend else {}
    out = as_tuple((function or getattr(specvis_kernels, op))(**written, **others, **options))
    for a, b in zip(before, tensors_of(others)):
        assert same(a, b), f"{op} wrote to an input"
    return (*out, *tensors_of(written)) if written else out


def as_tuple(out):
    return out if isinstance(out, tuple) else (out,)


def same(a, b):
    """Equal shape, dtype and bits, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def assert_agree(op, got, expected, backend=""):
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(got, expected)):
        rtol, atol = cases.TOLERANCES.get(op, {}).get(i, (0, 0))
        if rtol or atol:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol,
                                       msg=lambda m, i=i: f"output {i} of {op} {backend}: {m}")
        else:
            assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b), \
                f"output {i} of {op} {backend}: got {a}, expected {b}"
