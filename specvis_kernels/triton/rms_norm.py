"""rms_norm in Triton: one program per row, which it reads once."""
import triton.language as tl

from ._kernel import kernel, next_power_of_2
from ._rounding import rounded


@kernel("x", "weight", "residual", "normed", "stream", "E")
def rms_norm_kernel(
        x, weight, residual,             # (M, E), (E), (M, E) or None
        normed, stream,                  # (M, E); stream is written with a residual
        E, eps, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * E
    i = tl.arange(0, BLOCK)
    w = tl.load(weight + i, mask=i < E, other=0.0).to(tl.float32)  # before the wait for the sum
    row = tl.load(x + start + i, mask=i < E, other=0.0).to(tl.float32)
    if residual is not None:
        row += tl.load(residual + start + i, mask=i < E, other=0.0).to(tl.float32)
        to_store = rounded(row, stream.dtype.element_ty)
        tl.store(stream + start + i, to_store, mask=i < E)
        row = to_store.to(tl.float32)
    wide = row.to(tl.float64)
    mean = tl.sum(wide * wide, axis=0) / E
    factor = (1.0 / tl.sqrt(mean + eps)).to(tl.float32)
    tl.store(normed + start + i, rounded(row * factor * w, normed.dtype.element_ty), mask=i < E)


def rms_norm(x, weight, residual, eps):
    M, E = x.shape
    normed, stream = x.new_empty(M, E), x.new_empty(0) if residual is None else x.new_empty(M, E)
    if M > 0:
        block = next_power_of_2(E)
        rms_norm_kernel[(M,)](x, weight, residual, normed, stream, E, eps, BLOCK=block,
                              num_warps=min(max(block // 256, 1), 16), enable_fp_fusion=False)
    return normed, stream
