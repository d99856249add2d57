"""The most that the parameters of methods and requests may be. More than that is an error before memory is taken.

The limits are far above the papers' values (in brackets), and a step within them takes gigabytes at most.
"""
from dataclasses import MISSING, field
from numbers import Integral, Real

from ..models.sizes import MAX_NUMBER

MAX_NODES = 1024           # of a tree [64], the root counted: a forward reads as many positions, and gives their logits
MAX_DEPTH = 128            # levels of a tree [9]: the draft model is run once a level
MAX_CHILDREN = 128         # children of a node [39]: a level has as many nodes, and the square of it in candidates
MAX_GUESSES = MAX_NODES - 1  # guesses of Jacobi decoding [64], or drafts of a step of continuous tokens [32]
MAX_REFRESHES = 8          # of the guesses between two forwards of the target: each is a forward of the small model
MAX_NEIGHBORS = 2**19 - 1  # columns of a table [1000]: the ops take codebooks of at most 2**19
MAX_TOKENS = 2**16         # of an image [1024]
MAX_STEPS = 100_000        # of denoising [1000]
MAX_TRIES = 1_000_000      # of resampling [100]
MAX_TOP_K = 2**31 - 1      # kept in 32 bits; more than a codebook has is all
MIN_NUMBER = 2.0**-126     # numbers are kept in float32, see MAX_NUMBER


def is_count(value, low: int, high: int) -> bool:
    """Is it a whole number within these?"""
    return isinstance(value, Integral) and not isinstance(value, bool) and low <= value <= high


def is_number(value, low: float, high: float = MAX_NUMBER) -> bool:
    """Is it a number within these, and not NaN?"""
    return isinstance(value, Real) and not isinstance(value, bool) and low <= value <= high


def count_within(low: int, high: int) -> str:
    """What such a number must be, in an error."""
    return f"a whole number within {low}..{high}"


def setting(help: str, default=MISSING, per_request: bool = False):
    """A field of a dataclass that is a parameter of methods, with what `specvis methods NAME` says of it.

    per_request: may it differ among the requests of a batch?
    """
    return field(default=default, metadata={"help": help, "per_request": per_request}, kw_only=True)
