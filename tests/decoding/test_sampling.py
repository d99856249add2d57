"""How a request draws: its settings, its two rows for guidance, and normal numbers."""
import math

import pytest
import torch

from specvis.decoding.sampling import FRESH, NOISE, Sampling, cfg_inputs, philox_normals, repeat_for_cfg
from tests.decoding.pictures import PROMPTS


def test_guidance_pairs_a_request_with_nothing(tiny):
    condition, padding_mask = tiny.gpt.condition(tiny.words(tiny.words.encode(PROMPTS)))
    both, both_masks = cfg_inputs(tiny.gpt, condition, padding_mask)
    assert both.shape == (8, 3, 32) and torch.equal(both_masks, repeat_for_cfg(padding_mask))


@pytest.mark.parametrize("wrong, message", [
    ({"temperature": "1"}, "temperature must be at least 0 and finite in 32 bits, got '1'"),
    ({"temperature": -1.0}, "temperature must be at least 0 and finite in 32 bits, got -1.0"),
    ({"temperature": math.nan}, "temperature must be at least 0 and finite in 32 bits, got nan"),
    ({"top_k": -1}, "top_k must be a whole number within 0..2147483647, got -1"),
    ({"top_p": 0.0}, r"top_p must be within \(0, 1\], got 0.0"),
    ({"top_p": 1.5}, r"top_p must be within \(0, 1\], got 1.5"),
    ({"min_p": 1.5}, r"min_p must be within \[0, 1\], got 1.5"),
    ({"seeds": None}, "seeds must be a list of whole numbers, one for each image, got None"),
    ({"seeds": [1, 0.5]}, r"seeds must be a list of whole numbers, one for each image, got \[1, 0.5\]"),
    ({"seeds": [1, 2**63]}, r"seeds must be within \[-2\*\*63, 2\*\*63\), got 9223372036854775808"),
    ({"guidance": math.inf}, "guidance must be a finite number in 32 bits, got inf"),
])
def test_settings_out_of_range_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Sampling.of(**{"seeds": [0]} | wrong)


def test_settings_for_each_request(tiny):
    both = Sampling.of([1, 2], guidance=[1.0, 2.0], temperature=[0, 1], top_k=(3, 0), top_p=[1.0, 0.5])
    assert both.guidance.tolist() == [1, 2] and both.greedy.tolist() == [True, False]
    assert both.top_k.tolist() == [3, 0] and both.top_p.tolist() == [1, 0.5]
    one = Sampling.of(7, top_k=None, top_p=None)
    assert (one.seeds.tolist(), one.top_k.tolist(), one.top_p.tolist()) == ([7], [0], [1.0])
    with pytest.raises(ValueError, match="guidance must be one number or 2, one for each seed, got 3"):
        Sampling.of([1, 2], guidance=[1, 2, 3])
    with pytest.raises(ValueError, match=r"top_p must be within \(0, 1\], got 2"):
        Sampling.of([1, 2], top_p=[1, 2])


def test_normal_numbers_are_normal():
    x = philox_normals(torch.arange(100), 50, 20, stream=NOISE).double()
    assert x.shape == (100, 50, 20) and x.mean().abs() < 5 / 10 ** 2.5
    assert (x.var() - 1).abs() < 5 * math.sqrt(2e-5) and (x ** 3).mean().abs() < 5 * math.sqrt(15e-5)
    assert ((x ** 4).mean() - 3).abs() < 5 * math.sqrt(96e-5) and x.abs().max() < 5.6
    z = torch.special.ndtr(x.flatten().sort().values)
    steps = torch.arange(len(z) + 1) / len(z)
    assert max((steps[1:] - z).max(), (z - steps[:-1]).max()) < 2.2 / 10 ** 2.5    # p = 1e-4
    for dim in range(3):                                                           # neighbors know nothing
        a, b = x.movedim(dim, 0)[:-1].flatten(), x.movedim(dim, 0)[1:].flatten()
        assert (a * b).mean().abs() < 5 / len(a) ** 0.5


def test_normal_numbers_depend_on_seed_position_and_turn_alone():
    seeds = torch.tensor([5, 6, 2 ** 40 + 5])
    numbers = philox_normals(seeds, 9, 10, stream=NOISE)
    assert torch.equal(philox_normals(seeds, 9, 7, stream=NOISE), numbers[..., :7])
    assert torch.equal(philox_normals(seeds[1:2], 4, 10, stream=NOISE)[0], numbers[1, :4])
    assert torch.equal(philox_normals(seeds, 9, 10, stream=NOISE, turn=0), numbers)
    others = [philox_normals(seeds, 9, 10, stream=NOISE, turn=1), philox_normals(seeds, 9, 10, stream=FRESH),
              numbers.roll(1, 0), numbers.roll(1, 1), numbers.roll(1, 2)]
    assert all((other != numbers).float().mean() > 0.999 for other in others)
