"""Uniform numbers that depend on a request's seed alone: Philox4x32-10 (Salmon et al., SC 2011)."""
import torch
from torch import Tensor

ACCEPT, DRAFT, SHAPE = 0, 1, 2  # streams: what a number is used for

_WORD = 0xFFFFFFFF


def philox_uniform(seeds: Tensor, stream: int, positions: int, columns: int) -> Tensor:
    """Uniforms in [0, 1), multiples of 2**-24.

    Args:
        seeds:     (B,) int64  one per request; equal seeds give equal numbers in any batch
        stream:    ACCEPT, DRAFT or SHAPE
        positions: numbers are made for image positions 0..positions - 1
        columns:   how many for each; a position's first numbers do not depend on how many are made

    Returns:
        (B, positions, columns) float32 on the seeds' device
    """
    blocks = -(-columns // 4)
    shape = (len(seeds), positions, blocks)
    ranges = [torch.arange(n, device=seeds.device) for n in (blocks, positions)]
    zeros = torch.zeros(shape, dtype=torch.int64, device=seeds.device)
    counter = [zeros + ranges[0], zeros + ranges[1][:, None], zeros + stream, zeros]
    key = [(seeds & _WORD)[:, None, None], ((seeds >> 32) & _WORD)[:, None, None]]
    for _ in range(10):
        left, right = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57  # int64 wraps: the low 64 bits are right
        counter = [((right >> 32) & _WORD) ^ counter[1] ^ key[0], right & _WORD,
                   ((left >> 32) & _WORD) ^ counter[3] ^ key[1], left & _WORD]
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    words = torch.stack(counter, -1).flatten(2)[..., :columns]
    return (words >> 8).float() * 2.0 ** -24
