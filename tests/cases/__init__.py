# ruff: noqa: F401, F403
"""Inputs for every op. Each op has a maker of its name: `maker(*sizes)` returns `(args, kwargs)` of the op.

The makers are seeded. The first size is the batch, which may be 0 (UNBATCHED names the ops without one). The first
entry of an op's CASES is the smallest that makes sense (one node, one neighbor). Probabilities are counts over 2**16,
so any sum of them, in any order, is exact: every backend must agree with the oracle bit for bit. Where exp or log is in
the way, the op has a tolerance in TOLERANCES.
"""
from tests.cases.common import *
from tests.cases.gaussians import *
from tests.cases.networks import *
from tests.cases.rows import *
from tests.cases.trees import *
from tests.cases.verification import *
