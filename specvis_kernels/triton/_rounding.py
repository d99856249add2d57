"""float32 as the dtype of a tensor."""
import os

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def rounded(x, TYPE: tl.constexpr):
    """float32 -> TYPE, to the nearest, ties to even. Triton's interpreter cuts the bits of a bfloat16 off instead."""
    if IS_INTERPRETED and TYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = tl.where(x == x, (bits & -0x10000).to(tl.float32, bitcast=True), x)
    return x.to(TYPE)
