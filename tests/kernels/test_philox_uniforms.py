"""philox_words and philox_uniforms: the published numbers, and what they depend on."""
import pytest
import torch

from specvis_kernels import philox_uniforms, philox_words
from tests.cases import DEVICE


def test_the_published_numbers():
    """Random123's known answer for Philox4x32-10 with counter 0 and key 0."""
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox_words(zero, zero[None], 4, stream=0).tolist() == [[words]]
    assert philox_uniforms(zero, 1, 4, stream=0).tolist() == [[[(word >> 8) / 2**24 for word in words]]]


def test_they_depend_on_the_seed_and_not_on_the_batch():
    seeds = torch.tensor([7, 2**40 + 1, 7, -1], device=DEVICE)
    many = philox_uniforms(seeds, 5, 9, stream=0)
    assert many.dtype == torch.float32 and many.shape == (4, 5, 9) and many.device.type == DEVICE
    assert torch.equal(many[0], many[2]) and not torch.equal(many[0], many[1])
    assert torch.equal(philox_uniforms(seeds[1:2], 5, 6, stream=0)[0], many[1, :, :6])
    assert not torch.equal(philox_uniforms(seeds, 5, 9, stream=1), many)
    assert not torch.equal(philox_uniforms(seeds, 5, 9, stream=0, turn=1), many)


@pytest.mark.parametrize("turn", [0, 3])
def test_given_positions_have_the_numbers_of_all_positions(turn):
    """The low 32 bits of a position count."""
    seeds = torch.tensor([5, 6, 7], device=DEVICE)
    positions = torch.tensor([[8, 0, 3, 3], [1, 2, 3, 4], [7, 7, 0, 5]], device=DEVICE)
    every = philox_uniforms(seeds, 9, 6, stream=2, turn=turn)
    for given in (positions, positions + 2**32, positions - 2**32):
        assert torch.equal(philox_uniforms(seeds, given, 6, stream=2, turn=turn),
                           every.gather(1, positions[..., None].expand(-1, -1, 6)))


def test_they_are_uniform():
    numbers = philox_uniforms(torch.arange(100, device=DEVICE), 100, 4, stream=0)
    assert numbers.min() >= 0 and numbers.max() < 1 and abs(numbers.mean() - 0.5) < 0.01
    assert torch.equal((numbers * 2**24).floor(), numbers * 2**24)
