"""Triton's noise has the bits of gumbel_noise, for every word that matters."""
import os
from importlib.util import find_spec

import pytest
import torch

from specvis_kernels import gumbel_noise
from specvis_kernels.noise import to_gumbel
from tests.cases import DEVICE

if not find_spec("triton") or DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton, and a GPU or its interpreter", allow_module_level=True)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from specvis_kernels.triton import _noise  # noqa: E402


@triton.jit
def noise_kernel(seeds, positions, out, first, COUNT: tl.constexpr):
    r = tl.program_id(0)
    noise = _noise.gumbel_noise(tl.load(seeds + r), tl.load(positions + r), first, COUNT)
    tl.store(out + r * COUNT + tl.arange(0, COUNT), noise)


@triton.jit
def gumbel_kernel(words, out, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(out + i, _noise.to_gumbel(tl.load(words + i).to(tl.uint32)))


@pytest.mark.parametrize("first, count", [(0, 4), (0, 64), (68, 16)])
def test_noise_of_any_seed_and_position(first, count):
    """Both halves of a seed count, and the low 32 bits of a position."""
    seeds = torch.tensor([0, 7, -1, 2**62 + 2**31 + 5, -2**63], device=DEVICE)
    positions = torch.tensor([0, 5, -3, 2**33 + 7, 2**31], device=DEVICE)
    out = torch.empty(5, count, device=DEVICE)
    noise_kernel[(5,)](seeds, positions, out, first, count, enable_fp_fusion=False)
    assert torch.equal(out, gumbel_noise(seeds, positions[:, None], first + count)[:, 0, first:])


def test_every_kind_of_word():
    """The smallest, the largest, both sides of every power of two, and 4000 others."""
    powers = [2**n + d for n in range(33) for d in range(-3, 3)]
    random = torch.randint(2**32, (4000,), generator=torch.Generator().manual_seed(0))
    words = torch.cat([torch.tensor(powers).clamp(0, 2**32 - 1), random])[:4096].to(DEVICE)
    words = torch.nn.functional.pad(words, (0, 4096 - len(words)))
    out = torch.empty(4096, device=DEVICE)
    gumbel_kernel[(1,)](words, out, 4096, enable_fp_fusion=False)
    assert torch.equal(out, to_gumbel(words)) and out.isfinite().all()
