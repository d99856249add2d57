"""swiglu in Triton: one program per block of entries."""
import torch
import triton
import triton.language as tl

from ._kernel import kernel
from ._noise import exp
from ._rounding import rounded

BLOCK = 1024


@kernel("gate", "up", "gated")
def swiglu_kernel(gate, up, gated, numel, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + i, mask=i < numel, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=i < numel, other=0.0).to(tl.float32)
    e = exp(-tl.abs(g))
    silu = tl.div_rn(tl.where(g < 0, g * e, g), 1.0 + e)
    tl.store(gated + i, rounded(silu * u, gated.dtype.element_ty), mask=i < numel)


def swiglu(gate, up):
    gated = torch.empty_like(gate)
    if gate.numel() > 0:
        swiglu_kernel[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, gated, gate.numel(), BLOCK=BLOCK, num_warps=4,
                                                           enable_fp_fusion=False)
    return gated
