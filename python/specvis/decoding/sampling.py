"""Uniform numbers that depend on a request's seed alone: Philox4x32-10 (Salmon et al., SC 2011)."""
import torch
from torch import Tensor

# streams: what a number is used for
ACCEPT, DRAFT, SHAPE, ORDER, NOISE, UNALIGNED, REDRAW, REDRAW_NOISE, FRESH = range(9)

_WORD = 0xFFFFFFFF


def philox_uniform(seeds: Tensor, stream: int, positions: int | Tensor, columns: int, turn: int = 0) -> Tensor:
    """Uniforms in [0, 1), multiples of 2**-24.

    Args:
        seeds:     (B,) int64  one per request; equal seeds give equal numbers in any batch
        stream:    ACCEPT, DRAFT, ..: what they are for
        positions: numbers are made for image positions 0..positions - 1; or (B, n) int64, these of each request
        columns:   how many for each; a position's first numbers do not depend on how many are made
        turn:      each turn has numbers of its own

    Returns:
        (B, positions, columns) float32 on the seeds' device
    """
    if isinstance(positions, int):
        positions = torch.arange(positions, device=seeds.device).expand(len(seeds), -1)
    blocks = -(-columns // 4)
    zeros = torch.zeros((*positions.shape, blocks), dtype=torch.int64, device=seeds.device)
    counter = [zeros + torch.arange(blocks, device=seeds.device), zeros + positions[..., None], zeros + stream,
               zeros + turn]
    key = [(seeds & _WORD)[:, None, None], ((seeds >> 32) & _WORD)[:, None, None]]
    for _ in range(10):
        left, right = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57  # int64 wraps: the low 64 bits are right
        counter = [((right >> 32) & _WORD) ^ counter[1] ^ key[0], right & _WORD,
                   ((left >> 32) & _WORD) ^ counter[3] ^ key[1], left & _WORD]
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    words = torch.stack(counter, -1).flatten(2)[..., :columns]
    return (words >> 8).float() * 2.0 ** -24


def philox_normal(seeds: Tensor, stream: int, positions: int | Tensor, columns: int, turn: int = 0) -> Tensor:
    """Standard normal numbers from the uniforms of these arguments, by the inverse CDF; none is beyond 5.6."""
    middles = philox_uniform(seeds, stream, positions, columns, turn).double() + 2.0 ** -25
    return torch.special.ndtri(middles).float()
