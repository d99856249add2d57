# ruff: noqa: F401, F403
"""Inputs for every op. Each op has a maker of its name: `maker(*sizes)` returns `(args, kwargs)` of the op.

The makers are seeded. The first size is the batch, which may be 0 (UNBATCHED names the ops without one). The first
entry of an op's CASES is the smallest that makes sense (one node, one neighbor). Probabilities are counts over 2**16,
so any sum of them, in any order, is exact: every backend must agree with the oracle bit for bit. Where exp or log is in
the way, the op has a tolerance in TOLERANCES.

Sizes are as small as they can be. Three requests have three settings, or one that is invalid. A row of 19, 33 or 61 ids
ends within a vector and is not aligned; 1500 ids are more than a block's threads, 4500 more than they take at a time;
LARGE has rows of several blocks. 65, 70 and 130 nodes take more than one word of 64 ancestors. A line above an op's
CASES says what else they are for.
"""
from tests.cases.common import *
from tests.cases.gaussians import *
from tests.cases.networks import *
from tests.cases.rows import *
from tests.cases.trees import *
from tests.cases.verification import *
