"""Random words that a request's seed alone decides: Philox4x32-10 (Salmon et al., SC 2011), and Gumbel noise from them.

These are plain torch. The kernels make equal words inside, by csrc/shared/noise.h and triton/_noise.py.
"""
import torch
from torch import Tensor

from ._checks import Seeds, check_count, check_dims, check_seeds, integers
from ._numbers import log, log1p_of_negative

WORD = 0xFFFFFFFF
GUMBEL_STREAM = 9  # of the draws of tokens; the program's other streams are lower


def philox_words(seeds: Seeds, positions: Tensor, n: int, stream: int, turn: int = 0) -> Tensor:
    """Words of 32 bits that depend on these arguments alone.

    Word i of a position is word i % 4 of the block with the counter (i // 4, position, stream, turn) under the key
    (low, high half of the seed).

    Args:
        seeds:     (B,) int32 or int64, or integers   one per request; equal seeds give equal words in any batch
        positions: (B, L) int32 or int64   the low 32 bits count
        n:         how many words for each position; the first of them do not depend on how many there are
        stream:    what the words are for, at least 0
        turn:      each turn has words of its own; at least 0

    Returns:
        words:     (B, L, n) int64 in [0, 2**32)

    Raises:
        ValueError: a dtype, shape or device differs from the above, or a number is negative

    Examples:
        >>> words = philox_words(torch.tensor([0]), torch.tensor([[0, 1]]), 3, stream=0)
        >>> words.shape, hex(words[0, 0, 0])  # the first known answer of the paper's library
        (torch.Size([1, 2, 3]), '0x6627e8d5')
    """
    seeds, positions, n = check_noise(seeds, positions, n)
    stream, turn = check_count("stream", stream, 0), check_count("turn", turn, 0)
    blocks = -(-n // 4)
    zeros = torch.zeros((*positions.shape, blocks), dtype=torch.int64, device=seeds.device)
    counter = [zeros + torch.arange(blocks, device=seeds.device), zeros + (positions & WORD)[..., None],
               zeros + (stream & WORD), zeros + (turn & WORD)]
    key = [(seeds & WORD)[:, None, None], ((seeds >> 32) & WORD)[:, None, None]]
    for _ in range(10):
        left, right = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57  # int64 wraps: the low 64 bits are right
        counter = [((right >> 32) & WORD) ^ counter[1] ^ key[0], right & WORD,
                   ((left >> 32) & WORD) ^ counter[3] ^ key[1], left & WORD]
        key = [(key[0] + 0x9E3779B9) & WORD, (key[1] + 0xBB67AE85) & WORD]
    return torch.stack(counter, -1).flatten(2)[..., :n]


def gumbel_noise(seeds: Seeds, positions: Tensor, n: int) -> Tensor:
    """The Gumbel noise of the ids 0 to n - 1, with which `draw_tokens` and `draw_children` draw.

    v = (floor(word / 2) + 1/2) 2**-31 is uniform in (0, 1), and -log(-log(1 - v)) is standard Gumbel. Small v give the
    large noise that decides, and there v has a fine resolution: the largest noise is 22.2.

    (The Gumbel-max trick: Maddison, Tarlow and Minka, arXiv:1411.0030.)

    Args:
        seeds:     (B,) int32 or int64, or integers   one per request
        positions: (B, L) int32 or int64   in the image
        n:         how many ids

    Returns:
        noise:     (B, L, n) float32 on the seeds' device, with equal bits on every backend

    Raises:
        ValueError: a dtype, shape or device differs from the above, or n is negative

    Examples:
        >>> noise = gumbel_noise(torch.tensor([7, 7]), torch.tensor([[0, 1], [1, 2]]), 5)
        >>> torch.equal(noise[0, 1], noise[1, 0])  # the same seed and position
        True
    """
    return to_gumbel(philox_words(seeds, positions, n, GUMBEL_STREAM))


def check_noise(seeds: Seeds, positions: Tensor, n: int) -> tuple[Tensor, Tensor, int]:
    """Raise ValueError unless these are the arguments of `philox_words`; returns them."""
    B, L = check_dims("positions", positions, "BL")
    positions = integers("positions", positions, torch.int64, seeds if isinstance(seeds, Tensor) else None, B=B, L=L)
    return check_seeds(seeds, positions, B), positions, check_count("n", n, 0)


def to_gumbel(words: Tensor) -> Tensor:
    """Words (int64, of 32 bits) -> standard Gumbel noise, float32."""
    v = ((words >> 1).float() + 0.5) * 2.0 ** -31
    return -log(-log1p_of_negative(v.clamp(max=1 - 2.0 ** -24)))
