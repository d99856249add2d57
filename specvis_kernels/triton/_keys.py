"""Floats as integers of the same order, alone or with an id below them."""
import triton
import triton.language as tl

NONE = tl.constexpr(-(2**63))  # below every entry


@triton.jit
def flip(bits):
    """A float's bits -> an integer in the order of the floats, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def keys_of(x):
    """float32 -> int32. The two zeros are one, and every NaN lies outside -inf .. inf."""
    return flip(tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True))


@triton.jit
def floats_of(keys):
    """The floats that have these keys."""
    return flip(keys).to(tl.float32, bitcast=True)


@triton.jit
def entries_of(values, ids, FLOOR: tl.constexpr):
    """int64 in the order of the values and, among equals, of falling ids; NONE if not above FLOOR."""
    return tl.where(values > FLOOR, (keys_of(values).to(tl.int64) << 32) + (0x7FFFFFFF - ids), NONE)


@triton.jit
def id_of(entry):
    return 0x7FFFFFFF - (entry & 0xFFFFFFFF)
