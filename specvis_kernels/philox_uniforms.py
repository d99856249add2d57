"""philox_uniforms: uniform numbers that a request's seed, a position and a stream decide."""
import torch
from torch import Tensor

from ._checks import Seeds, check_count, check_seeds, to_integer
from ._define import define
from .noise import check_noise, philox_words


def philox_uniforms(seeds: Seeds, positions: Tensor | int, n: int, *, stream: int, turn: int = 0,
                    backend: str | None = None) -> Tensor:
    """Uniforms in [0, 1) that a request's seed decides, whatever the batch. Ops take them as `uniforms`.

    A uniform is the upper 24 bits of a word of `philox_words`, as a fraction. The draws of `draw_tokens` and of other
    ops that take seeds have the stream 9; use another one here.

    Args:
        seeds:     (B,) int32 or int64, or integers   one per request; equal seeds give equal numbers in any batch
        positions: (B, L) int32 or int64   the low 32 bits count; or a number L: 0 to L - 1 in every request
        n:         how many for each position; the first of them do not depend on how many there are
        stream:    what the numbers are for, at least 0
        turn:      each turn has numbers of its own; at least 0
        backend:   None for the device's own kernel; a name from `backends()` to force one

    Returns:
        uniforms:  (B, L, n) float32 on the seeds' device, multiples of 2**-24

    Raises:
        ValueError: a dtype, shape or device differs from the above, or a number is negative

    Examples:
        >>> seeds, length = torch.tensor([7, 8]), torch.tensor([[16], [40]])  # two requests, and how far they are
        >>> uniforms = philox_uniforms(seeds, length, 60, stream=0)[:, 0]     # (B, N), for a tree of 60 nodes
        >>> torch.equal(uniforms[1:], philox_uniforms(seeds[1:], length[1:], 60, stream=0)[:, 0])
        True
    """
    if not isinstance(positions, Tensor):
        length, seeds = to_integer(positions), check_seeds(seeds)
        if length is None or length < 0:
            raise ValueError(f"positions must be int64 or int32 (B, L), or an integer >= 0, got {positions!r}")
        positions = torch.arange(length, device=seeds.device).expand(len(seeds), length)
    seeds, positions, n = check_noise(seeds, positions, n)
    return _call(backend, seeds, positions, n, check_count("stream", stream, 0), check_count("turn", turn, 0))


def _oracle(seeds: Tensor, positions: Tensor, n: int, stream: int, turn: int):
    return (philox_words(seeds, positions, n, stream, turn) >> 8).float() * 2.0 ** -24


_call = define("philox_uniforms", oracle=_oracle,
               meta=lambda positions, n: positions.new_empty(*positions.shape, n, dtype=torch.float32))
