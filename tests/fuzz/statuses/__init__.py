"""What the docstrings say about statuses, written a second time: in NumPy and in loops, and without the oracles.

A function has the name of its op. It takes the op's arguments by name and its outputs, and returns what is wrong with
them, or None. It says which status each row must have; of ops without one it restates what they return. Of a batch of
many requests it looks at some, unless all of them are looked at at once.

Where a decision hangs by less than rounding (the last bit of a residual, a logarithm that another library takes), it
says nothing.
"""
import inspect

import numpy as np

import specvis_kernels
from tests.fuzz.statuses import committed, gaussians, others, rows, trees, verification
from tests.fuzz.statuses.common import to_numpy

MODULES = (committed, gaussians, others, rows, trees, verification)


def problem(op, named, outputs):
    defaults = {name: p.default for name, p in inspect.signature(getattr(specvis_kernels, op)).parameters.items()}
    arguments = {name: to_numpy(a) for name, a in (defaults | named).items()}
    function = next(getattr(module, op) for module in MODULES if hasattr(module, op))
    with np.errstate(all="ignore"):
        return function(arguments, [to_numpy(a) for a in outputs])
