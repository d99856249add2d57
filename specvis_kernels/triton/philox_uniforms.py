"""philox_uniforms in Triton: a program makes the words of some blocks of one position."""
import torch
import triton.language as tl

from ._kernel import cdiv, kernel


@kernel()
def philox_uniforms_kernel(
        seeds, positions,  # (B), (B, L)
        uniforms,          # (B, L, n)
        L, n, stream, turn, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    blocks = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = blocks * 0
    position = tl.load(positions + row).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seeds + row // L), blocks, zero + position, zero + stream.to(tl.uint32),
                               zero + turn.to(tl.uint32))
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])
    i = first + tl.arange(0, BLOCK)
    tl.store(uniforms + row * n + i, (words >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08, mask=i < n)


def philox_uniforms(seeds, positions, n, stream, turn):
    B, L = positions.shape
    uniforms = positions.new_empty(B, L, n, dtype=torch.float32)
    if uniforms.numel() > 0:
        philox_uniforms_kernel[(B * L, cdiv(n, 128))](seeds, positions, uniforms, L, n, stream, turn, BLOCK=128,
                                                      num_warps=1)
    return uniforms
