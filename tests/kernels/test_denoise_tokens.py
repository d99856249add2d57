"""denoise_tokens against PyTorch's modules, and that not a bit of a token depends on the others."""
import pytest
import torch

from specvis.models import layers
from specvis.models.diffloss import DiffLoss
from specvis_kernels import DenoiserBlock, denoise_tokens, pack_denoiser
from tests import cases

CPU = pytest.mark.skipif(cases.DEVICE != "cpu", reason="only the CPU's kernel promises this")


@CPU
@pytest.mark.parametrize("rows", [1, 2])
def test_no_bit_depends_on_tokens_or_threads(rows, set_threads):
    (noise, z, *others), kwargs = cases.denoise_tokens(33, 7, 8, rows, 80, 2)
    guidance = kwargs.pop("guidance", torch.ones(33))

    def run(part, backend=None):
        given = {"guidance": guidance[part]} if rows == 2 else {}
        return denoise_tokens(noise[part], z[part], *others, **kwargs, **given, backend=backend)

    set_threads(1)
    alone = [torch.cat(parts) for parts in zip(*(run(slice(i, i + 1)) for i in range(33)))]
    for num_threads in (1, 2, 3):
        set_threads(num_threads)
        for n in (1, 2, 3, 5, 7, 12, 13, 33):
            assert all(torch.equal(got, expected[:n]) for got, expected in zip(run(slice(n)), alone))
    oracle = run(slice(33), "oracle")
    assert not torch.equal(oracle.states, alone[0])  # the above is about sums in another order


@CPU
@pytest.mark.parametrize("is_guided", [False, True])
def test_is_what_the_modules_compute(is_guided, monkeypatch):
    """For any dimensions of tokens, with temperature, guidance for each token and the clamp."""
    torch.manual_seed(0)
    diffloss = DiffLoss(6, 20, 48, 2, num_sampling_steps=9, clip_sample_range=1.5)
    for weight in diffloss.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    z, uncond = torch.randn(2, 2, 3, 20)
    options = {"uncond": uncond, "guidance": torch.rand(2, 3) * 3} if is_guided else {}
    noise = torch.randn(2, 3, 9, 6)
    with torch.inference_mode():
        diffloss.pack()
        assert diffloss.packing.packed is not None
        denoiser = diffloss.denoiser(z, temperature=0.8, **options)
        got = denoiser.sample(noise, keep_path=True)
        one = diffloss.denoiser(z[0, 1], temperature=0.8, **{name: value[0, 1] for name, value in options.items()})
        torch.testing.assert_close(one.sample(noise[0, 1]).mean, got.mean[0, 1], rtol=1e-5, atol=1e-4)
        monkeypatch.setattr(layers, "USE_KERNELS", False)
        expected = denoiser.sample(noise, keep_path=True)
    for name in ("mean", "log_sigma", "log_sigma_sum", "log_density", "path"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=1e-5, atol=1e-4)
    assert not torch.equal(got.path, expected.path)


@CPU
def test_follows_its_weights():
    torch.manual_seed(0)
    diffloss = DiffLoss(4, 8, 32, 1, num_sampling_steps=3)
    torch.nn.init.normal_(diffloss.net.final_layer.linear.weight)
    noise, denoiser = torch.randn(2, 3, 4), diffloss.denoiser(torch.randn(2, 8))
    diffloss.pack()
    with torch.no_grad():
        before = denoiser.sample(noise).mean
        diffloss.net.final_layer.linear.weight.mul_(2)
        assert not torch.allclose(denoiser.sample(noise).mean, before)
    assert denoiser.sample(noise).mean.requires_grad  # the modules', where gradients are wanted
    diffloss.net.res_blocks[0].register_forward_hook(lambda *_: None)
    diffloss.pack()
    assert diffloss.packing.packed is None


@CPU
def test_a_nan_stays_in_its_token():
    (noise, z, *others), kwargs = cases.denoise_tokens(5, 3, 4, 2, 32, 1)
    clean = denoise_tokens(noise, z, *others, **kwargs)
    z[2, 1, 3] = torch.nan
    hurt = denoise_tokens(noise, z, *others, **kwargs)
    assert hurt.states[2, 0].isnan().all()
    for got, expected in zip(hurt, clean):
        assert torch.equal(got[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


def test_refuses_what_does_not_fit():
    args, kwargs = cases.denoise_tokens(2, 3, 4, 2, 32, 1)
    named = dict(zip(("noise", "z", "time", "network", "schedule"), args)) | kwargs
    for name, value, message in (
            ("noise", named["noise"].double(), "noise must be float32 .*, got float64"),
            ("noise", named["noise"][..., :2], r"network.matrices must be float32 \(m=\d+\)"),
            ("z", named["z"].repeat(1, 2, 1), "z must have one or two rows a token, got T=3 and P=4"),
            ("z", named["z"][:, :1], "guidance needs two rows of z"),
            ("time", named["time"][:2], r"time must be float32 \(T=3, W=32\)"),
            ("network", named["network"]._replace(num_blocks=None), "network.num_blocks must be an integer >= 0"),
            ("network", named["network"]._replace(eps=-1.0), "network.eps must be a number >= 0 .*, got -1.0"),
            ("network", None, "network must be a PackedDenoiser, from pack_denoiser, got NoneType"),
            ("schedule", named["schedule"][:, :6], r"schedule must be float32 \(T=3, numbers=7\)"),
            ("temperature", 0, "temperature must be a positive number, got 0"),
            ("temperature", torch.inf, "temperature must be finite, got inf"),
            ("clip_range", None, "clip_range must be a positive number, got None")):
        with pytest.raises(ValueError, match=message):
            denoise_tokens(**named | {name: value})


def test_weights_that_cannot_be_packed():
    w, b = torch.zeros(16, 16), torch.zeros(16)
    block = DenoiserBlock(b, b, w, b, w, b, w.repeat(3, 1), b.repeat(3))
    rest = w[:, :2], b, w.repeat(2, 1), b.repeat(2), w[:4], b[:4]
    for blocks, others, message in (
            ([], (w[:, :3], *rest[1:]), "and C even, got W=16, C=3"),
            ([block._replace(up=w[:8])], rest, r"up of a block must be float32 \(16, 16\), got float32 \(8, 16\)"),
            ([block], (*rest[:-1], b[:4].double()), r"output_bias must be float32 \(4,\), got float64 \(4,\)")):
        with pytest.raises(ValueError, match=message):
            pack_denoiser(blocks, *others)
