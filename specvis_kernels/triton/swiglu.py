"""swiglu in Triton: one program per block of a row's entries."""
import triton.language as tl

from ._kernel import cdiv, kernel
from ._noise import exp
from ._rounding import rounded

BLOCK = 1024


@kernel("gate", "up", "gated", "gate_stride", "up_stride", "F")
def swiglu_kernel(gate, up, gated, gate_stride, up_stride, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + row * gate_stride + i, mask=i < F, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + i, mask=i < F, other=0.0).to(tl.float32)
    e = exp(-tl.abs(g))
    silu = tl.div_rn(tl.where(g < 0, g * e, g), 1.0 + e)
    tl.store(gated + row * F + i, rounded(silu * u, gated.dtype.element_ty), mask=i < F)


def swiglu(gate, up):
    M, F = gate.shape
    gated = gate.new_empty(M, F)
    if M > 0:
        swiglu_kernel[(M, cdiv(F, BLOCK))](gate, up, gated, gate.stride(0), up.stride(0), F, BLOCK=BLOCK,
                                           num_warps=4, enable_fp_fusion=False)
    return gated
