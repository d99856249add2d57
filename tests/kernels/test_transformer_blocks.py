"""transformer_blocks against PyTorch's modules, and that not a bit of a row depends on the others."""
import pytest
import torch

import specvis_kernels
from specvis.models import layers
from specvis.models.mar import MAR, MARConfig
from specvis_kernels import TransformerBlock, pack_blocks, transformer_blocks
from tests import cases

CPU = pytest.mark.skipif(cases.DEVICE != "cpu", reason="only the CPU's kernel promises this")


@CPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_rows_wanted_or_threads(dtype, set_threads):
    (x, blocks), kwargs = cases.transformer_blocks(5, 130, 48, 3, 80, {"dtype": dtype, "mask": True})
    mask, wanted = kwargs["key_mask"], torch.randint(130, (5, 7), generator=torch.Generator().manual_seed(0))
    set_threads(1)
    alone = torch.cat([transformer_blocks(x[r: r + 1], blocks, key_mask=mask[r: r + 1]) for r in range(5)])
    for num_threads in (1, 2, 3):
        set_threads(num_threads)
        for rows in (1, 2, 5):
            assert torch.equal(transformer_blocks(x[:rows], blocks, key_mask=mask[:rows]), alone[:rows])
        some = transformer_blocks(x, blocks, key_mask=mask, wanted=wanted)
        assert torch.equal(some, alone[torch.arange(5)[:, None], wanted])
    oracle = transformer_blocks(x, blocks, key_mask=mask, backend="oracle")
    assert not torch.equal(oracle, alone)  # the above is about sums in another order


@CPU
@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-5), (torch.bfloat16, 0.06)])
def test_is_what_the_modules_compute(dtype, atol, monkeypatch):
    torch.manual_seed(0)
    config = MARConfig(dim=48, heads=3, encoder_layers=2, decoder_layers=3, diffusion_width=32, diffusion_blocks=1,
                       tokens=30, channels=4, buffer=6, num_sampling_steps=3)
    mar = MAR(config).to(dtype).eval()
    tokens, is_known, condition = torch.randn(3, 30, 4), torch.rand(3, 30) < 0.5, torch.randn(3, 48).to(dtype)
    wanted = torch.randint(30, (3, 5))
    with torch.inference_mode():
        mar.pack()
        assert mar.packing.packed is not None
        got, some = mar(tokens, is_known, condition), mar(tokens, is_known, condition, wanted=wanted)
        monkeypatch.setattr(layers, "USE_KERNELS", False)
        expected = mar(tokens, is_known, condition)
    torch.testing.assert_close(got, expected, rtol=atol, atol=atol)
    assert torch.equal(some, got[torch.arange(3)[:, None], wanted]) and not torch.equal(got, expected)


@CPU
def test_a_row_that_sees_nothing_and_a_nan():
    (x, blocks), _ = cases.transformer_blocks(3, 9, 16, 1, 16, {"layers": 1})
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[1], mask[2, 3:] = False, False
    clean = transformer_blocks(x, blocks, key_mask=mask)
    torch.testing.assert_close(clean, transformer_blocks(x, blocks, key_mask=mask, backend="oracle"))
    x[2, 5] = torch.nan  # which is hidden
    hurt = transformer_blocks(x, blocks, key_mask=mask)
    assert hurt[2, 5].isnan().all() and torch.equal(hurt[2, :5], clean[2, :5]) and torch.equal(hurt[:2], clean[:2])


@pytest.mark.parametrize("backend", specvis_kernels.backends("transformer_blocks", cases.DEVICE))
def test_nothing_may_be_wanted(backend):
    (x, blocks), _ = cases.transformer_blocks(2, 5, 32, 2, 48)
    nothing = torch.zeros(2, 0, dtype=torch.int64, device=x.device)
    assert transformer_blocks(x, blocks, wanted=nothing, backend=backend).shape == (2, 0, 32)


def test_refuses_what_does_not_fit():
    (x, blocks), _ = cases.transformer_blocks(2, 5, 32, 2, 48)
    for named, message in (
            ({"x": x.bfloat16()}, "blocks.matrices must be bfloat16 .*, got float32"),
            ({"x": x[..., :16]}, r"blocks.matrices must be float32 \(L=2, m=\d+\)"),
            ({"x": x[:, :0]}, "x must have N >= 1"),
            ({"blocks": blocks._replace(vectors=blocks.vectors[:, 1:])}, r"blocks.vectors must be float32 \(L=2, v="),
            ({"blocks": blocks._replace(last_norm=x.new_zeros(32))}, r"blocks.last_norm must be float32 \(two_E=64\)"),
            ({"blocks": blocks._replace(heads=3)}, "blocks.heads must divide E=32 into heads of at most 256, got 3"),
            ({"blocks": blocks._replace(eps=float("nan"))}, "blocks.eps must be a number >= 0 .*, got nan"),
            ({"blocks": None}, "blocks must be PackedBlocks, from pack_blocks, got NoneType"),
            ({"key_mask": torch.ones(2, 4, dtype=torch.bool)}, r"key_mask must be bool \(R=2, N=5\)"),
            ({"wanted": torch.zeros(3, 1, dtype=torch.int64)}, r"wanted must be int64 or int32 \(R=2, n=1\)")):
        with pytest.raises(ValueError, match=message):
            transformer_blocks(**{"x": x, "blocks": blocks} | named)


def test_blocks_that_cannot_be_packed():
    w, b = torch.zeros(16, 16), torch.zeros(16)
    block = TransformerBlock(b, b, w.repeat(3, 1), b.repeat(3), w, b, b, b, w, b, w, b)
    for blocks, heads, message in (
            ([], 1, "blocks must be at least one"), ([block], 3, "E=16, F=16, heads=3"),
            ([block._replace(out=w[:8])], 1, r"blocks must have out float32 \(16, 16\), got float32 \(8, 16\)")):
        with pytest.raises(ValueError, match=message):
            pack_blocks(blocks, heads=heads)
