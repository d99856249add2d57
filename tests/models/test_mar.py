"""MAR, its diffusion and its autoencoder: official names and sizes, any set of known tokens, closed forms."""
import dataclasses
import math
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F

from specvis.models.diffloss import DiffLoss, Network
from specvis.models.kl_vae import KL, KLConfig
from specvis.models.mar import MAR, SIZES, class_config, scheduled_guidance
from specvis.models.words import Words
from specvis.pipelines.checkpoint import CheckpointError, load_weights
from tests.models.test_models import parameters
from tests.tiny import TINY

PUBLISHED = {"B": (208, 35.7), "L": (479, 72.2), "H": (943, 151.2)}  # millions: all rounded up, of them DiffLoss
TINY_KL = KLConfig(channels=8, multipliers=(1, 2), residual_blocks=1, z_channels=3, groups=4)


def stirred(module, seed=0):
    """The module with weights that are not at their start, where gates and outputs are 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return module.eval().requires_grad_(False)


def mar(seed=0, **changes):
    torch.manual_seed(seed)
    return stirred(MAR(dataclasses.replace(TINY, **changes)), seed)


def normals(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def known_sets(num_rows, num_tokens=16):
    """(num_rows, num_tokens) bool: sets of 0, 3, 6 .. known tokens."""
    order = torch.rand(num_rows, num_tokens, generator=torch.Generator().manual_seed(2)).argsort(1)
    return order < 3 * torch.arange(num_rows)[:, None]


# The networks once more, written with the official names and functions of tensors alone

def under(state, prefix):
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def linear(w, name, x):
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def conv(w, name, x, **settings):
    return F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], **settings)


def layer_norm(x, weight=None, bias=None):
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)


def functional_block(w, x, heads):
    qkv = linear(w, "attn.qkv", layer_norm(x, w["norm1.weight"], w["norm1.bias"]))
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    x = x + linear(w, "attn.proj", (weights @ v).transpose(1, 2).flatten(2))
    h = linear(w, "mlp.fc1", layer_norm(x, w["norm2.weight"], w["norm2.bias"]))
    return x + linear(w, "mlp.fc2", h * (1 + torch.erf(h / 2 ** 0.5)) / 2)


def functional_diffusion(w, x, z, timesteps, num_blocks):
    angles = timesteps[:, None] * 10000.0 ** (-torch.arange(128) / 128)
    time = linear(w, "time_embed.mlp.0", torch.cat([angles.cos(), angles.sin()], -1))
    y = F.silu(linear(w, "time_embed.mlp.2", F.silu(time)) + linear(w, "cond_embed", z))
    x = linear(w, "input_proj", x)
    for block in (under(w, f"res_blocks.{i}.") for i in range(num_blocks)):
        shift, scale, gate = linear(block, "adaLN_modulation.1", y).chunk(3, -1)
        h = layer_norm(x, block["in_ln.weight"], block["in_ln.bias"]) * (1 + scale) + shift
        x = x + gate * linear(block, "mlp.2", F.silu(linear(block, "mlp.0", h)))
    shift, scale = linear(w, "final_layer.adaLN_modulation.1", y).chunk(2, -1)
    return linear(w, "final_layer.linear", layer_norm(x) * (1 + scale) + shift)


def group_norm(w, name, x):
    return F.group_norm(x, TINY_KL.groups, w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)


def functional_residual(w, x):
    h = conv(w, "conv1", F.silu(group_norm(w, "norm1", x)), padding=1)
    h = conv(w, "conv2", F.silu(group_norm(w, "norm2", h)), padding=1)
    return h + (conv(w, "nin_shortcut", x) if "nin_shortcut.weight" in w else x)


def functional_attention(w, x):
    h = group_norm(w, "norm", x)
    q, k, v = (conv(w, name, h).flatten(2) for name in "qkv")                      # (B, C, H * W)
    weights = (q.mT @ k / q.shape[1] ** 0.5).softmax(-1)
    return x + conv(w, "proj_out", (v @ weights.mT).unflatten(2, x.shape[2:]))


def functional_middle(w, x):
    x = functional_attention(under(w, "attn_1."), functional_residual(under(w, "block_1."), x))
    return functional_residual(under(w, "block_2."), x)


def functional_encoder(w, x):
    """The encoder of TINY_KL: a block a level, attention at the lower level."""
    x = functional_residual(under(w, "down.0.block.0."), conv(w, "conv_in", x, padding=1))
    x = conv(w, "down.0.downsample.conv", F.pad(x, (0, 1, 0, 1)), stride=2)
    x = functional_attention(under(w, "down.1.attn.0."), functional_residual(under(w, "down.1.block.0."), x))
    return conv(w, "conv_out", F.silu(group_norm(w, "norm_out", functional_middle(under(w, "mid."), x))), padding=1)


def functional_decoder(w, z):
    """The decoder of TINY_KL: two blocks a level, the lower resolution first."""
    x = functional_middle(under(w, "mid."), conv(w, "conv_in", z, padding=1))
    x = functional_residual(under(w, "up.1.block.1."), functional_residual(under(w, "up.1.block.0."), x))
    x = conv(w, "up.1.upsample.conv", x.repeat_interleave(2, 2).repeat_interleave(2, 3), padding=1)
    x = functional_residual(under(w, "up.0.block.1."), functional_residual(under(w, "up.0.block.0."), x))
    return conv(w, "conv_out", F.silu(group_norm(w, "norm_out", x)), padding=1)


def test_a_block_of_mar_from_functions():
    model, x = mar().double(), normals(3, 7, 32).double()                          # double: GELUs differ by 1e-4
    for name in ("encoder_blocks.1.", "decoder_blocks.0."):
        expected = functional_block(under(model.state_dict(), name), x, TINY.heads)
        assert torch.allclose(model.get_submodule(name[:-1])(x), expected, rtol=1e-9, atol=1e-9)


def test_the_diffusion_network_from_functions():
    net, x, z = diffusion(network=Network).net, normals(5, 3), normals(5, 5, seed=2)
    timesteps = torch.tensor([0.0, 1.0, 20.0, 500.0, 999.0])
    output = net(x, net.time_embed(timesteps) + net.cond_embed(z))
    assert torch.allclose(output, functional_diffusion(net.state_dict(), x, z, timesteps, num_blocks=2), atol=1e-4)


def test_the_autoencoder_from_functions():
    kl = stirred(KL(TINY_KL)).double()
    images, latents = normals(2, 3, 8, 12).double(), normals(2, 3, 4, 6).double()
    expected = functional_encoder(under(kl.state_dict(), "encoder."), images)
    assert torch.allclose(kl.encoder(images), expected, rtol=1e-9, atol=1e-9)
    expected = functional_decoder(under(kl.state_dict(), "decoder."), latents)
    assert torch.allclose(kl.decoder(latents), expected, rtol=1e-9, atol=1e-9)


# Names and sizes

@pytest.mark.parametrize("size", SIZES)
def test_published_sizes(size):
    with torch.device("meta"):
        model = MAR(class_config(size))
    assert (math.ceil(parameters(model) / 1e6), round(parameters(model.diffloss) / 1e6, 1)) == PUBLISHED[size]


def test_official_names():
    with torch.device("meta"):
        model, kl = MAR(class_config("B")), KL(KLConfig())
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert {name for name in shapes if ".1" not in name and "_blocks.0" not in name
            and not any(f"_blocks.{i}." in name for i in range(2, 10))} == {
        "class_emb.weight", "fake_latent", "z_proj.weight", "z_proj.bias", "z_proj_ln.weight", "z_proj_ln.bias",
        "encoder_pos_embed_learned", "encoder_norm.weight", "encoder_norm.bias", "decoder_embed.weight",
        "decoder_embed.bias", "mask_token", "decoder_pos_embed_learned", "decoder_norm.weight", "decoder_norm.bias",
        "diffusion_pos_embed_learned", *(f"diffloss.net.{layer}.{kind}" for kind in ("weight", "bias") for layer in (
            "time_embed.mlp.0", "time_embed.mlp.2", "cond_embed", "input_proj", "final_layer.linear"))}
    assert shapes["class_emb.weight"] == (1000, 768) and shapes["fake_latent"] == (1, 768)
    assert shapes["encoder_pos_embed_learned"] == (1, 320, 768) and shapes["mask_token"] == (1, 1, 768)
    assert shapes["encoder_blocks.0.attn.qkv.weight"] == (2304, 768) and shapes["z_proj.weight"] == (768, 16)
    assert shapes["diffloss.net.final_layer.linear.weight"] == (32, 1024)
    assert shapes["diffloss.net.final_layer.adaLN_modulation.1.weight"] == (2048, 1024)

    assert round(parameters(kl) / 1e6, 2) == 66.46 and len(kl.state_dict()) == 312
    shapes = {name: tuple(value.shape) for name, value in kl.state_dict().items()}
    assert shapes["encoder.conv_out.weight"] == (32, 512, 3, 3) and shapes["quant_conv.weight"] == (32, 32, 1, 1)
    assert shapes["decoder.conv_in.weight"] == (512, 16, 3, 3) and shapes["post_quant_conv.bias"] == (16,)
    assert shapes["encoder.down.4.block.0.nin_shortcut.weight"] == (512, 256, 1, 1)
    assert {"encoder.down.4.attn.1.proj_out.weight", "decoder.up.4.upsample.conv.weight"} <= set(shapes)
    assert not any("decoder.up" in name and "attn" in name for name in shapes)
    assert "decoder.up.0.upsample.conv.weight" not in shapes


# MAR

def one_row(model, tokens, is_known, condition):
    """One row as the release does it: the encoder gets the known tokens alone."""
    c = model.config
    buffer = condition[torch.arange(c.buffer) % len(condition)]
    x = model.z_proj_ln(torch.cat([buffer, model.z_proj(tokens)]) + model.encoder_pos_embed_learned[0])
    is_read = torch.cat([torch.ones(c.buffer, dtype=torch.bool), is_known])
    x = x[is_read][None]
    for block in model.encoder_blocks:
        x = block(x)
    full = model.mask_token[0].repeat(len(is_read), 1)
    full[is_read] = model.decoder_embed(model.encoder_norm(x))[0]
    x = (full + model.decoder_pos_embed_learned[0])[None]
    for block in model.decoder_blocks:
        x = block(x)
    return model.decoder_norm(x)[0, c.buffer:] + model.diffusion_pos_embed_learned[0]


def test_a_batch_of_masks_equals_each_row_with_its_tokens_dropped():
    model, tokens, is_known = mar(), normals(6, 16, 4), known_sets(6)
    condition = model.condition(torch.arange(6))
    z = model(tokens, is_known, condition)
    for row in range(6):
        expected = one_row(model, tokens[row], is_known[row], condition[row: row + 1])
        assert torch.allclose(z[row], expected, atol=1e-5)
    assert torch.allclose(model(tokens, is_known, condition, max_known=15), z, atol=1e-5)
    assert torch.allclose(model(tokens[:1], is_known[:1], condition[:1], max_known=0), z[:1], atol=1e-5)
    wanted = torch.tensor([[3, 0], [5, 5], [15, 1], [2, 3], [0, 1], [9, 8]])
    for of in (model, mar(decoder_layers=0)):
        z = of(tokens, is_known, condition)[torch.arange(6)[:, None], wanted]
        assert torch.allclose(of(tokens, is_known, condition, 15, wanted), z, atol=1e-5)


def test_unknown_tokens_do_not_matter_and_known_ones_do():
    model, tokens, is_known = mar(), normals(4, 16, 4), known_sets(4)
    condition = model.condition(torch.zeros(4, dtype=torch.int64))
    z = model(tokens, is_known, condition)
    assert torch.equal(model(tokens.masked_fill(~is_known[..., None], math.nan), is_known, condition), z)
    tokens[3, is_known[3].int().argmax()] += 1
    moved = (model(tokens, is_known, condition) - z).abs().amax(-1)
    assert (moved[:3] == 0).all() and (moved[3] > 1e-4).all()


def test_conditions():
    model, tokens, is_known = mar(), normals(2, 16, 4), known_sets(2)
    condition = model.condition(torch.tensor([3, 4]))
    z = model(tokens, is_known, condition)
    assert torch.equal(model(tokens, is_known, condition[:, None]), z)
    assert torch.equal(model(tokens, is_known, condition[:, None].repeat(1, 3, 1)), z)
    assert not torch.allclose(model(tokens, is_known, model.null_condition(2)), z, atol=1e-3)

    words = Words(["", "red", "blue", "heart"], length=4, width=8)
    text = mar(classes=None, caption_dim=8)
    with torch.no_grad():
        condition = text.condition(words(words.encode(["red heart", "heart red"])))
    z = text(tokens, is_known, condition)
    expected = one_row(text, tokens[1], is_known[1], condition[1])
    assert torch.allclose(z[1], expected, atol=1e-5) and not torch.allclose(z[0], z[1], atol=1e-3)

    free = mar(classes=None)
    embedded = normals(2, 5, 32)
    assert torch.equal(free.condition(embedded), embedded) and not hasattr(free, "class_emb")
    expected = one_row(free, tokens[1], is_known[1], embedded[1])
    assert torch.allclose(free(tokens, is_known, embedded)[1], expected, atol=1e-5)


def test_guidance_grows_with_what_is_known():
    num_unknown = torch.tensor([[256, 128], [1, 0]])
    assert scheduled_guidance(3.0, num_unknown, 256).tolist() == [[1.0, 2.0], [1 + 2 * 255 / 256, 3.0]]
    assert scheduled_guidance(3.0, num_unknown, 256, "constant").tolist() == [[3.0, 3.0], [3.0, 3.0]]
    last = 1 + 2 * 255 / 256  # the release's mask_len is at least 1, in its last iteration too
    assert scheduled_guidance(3.0, num_unknown, 256, "released").tolist() == [[1.0, 2.0], [last, last]]


def test_half_precision_stays_near():
    model, tokens, is_known = mar(), normals(4, 16, 4), known_sets(4)
    noise = normals(4, 16, 8, 4)
    z = model(tokens, is_known, model.condition(torch.arange(4)))
    full = model.diffloss.denoiser(z).sample(noise)
    model.to(torch.bfloat16)
    half = model(tokens, is_known, model.condition(torch.arange(4)))
    sample = model.diffloss.denoiser(half).sample(noise)
    assert half.dtype == torch.bfloat16 and sample.mean.dtype == torch.float32
    assert (half.float() - z).norm() < 0.03 * z.norm()
    assert (sample.mean - full.mean).norm() < 0.1 * full.mean.norm()


def test_everything_follows_the_device():
    model, tokens, is_known = mar(classes=None).to("meta"), normals(4, 16, 4).to("meta"), known_sets(4).to("meta")
    z = model(tokens, is_known, model.null_condition(4), max_known=9)
    denoiser = model.diffloss.denoiser(z, uncond=z, guidance=2.0)
    sample = denoiser.sample(torch.empty(4, 16, 8, 4, device="meta"), keep_path=True)
    assert sample.mean.is_meta and denoiser.log_density(sample.path).is_meta


# Sampling

class Stable(Network):
    """A network of random weights finds noise near x itself, so that paths stay as small as a trained one's."""

    def forward(self, x, y):
        epsilon, var_values = super().forward(x, y).chunk(2, -1)
        return torch.cat([x + epsilon, var_values], -1)


def diffusion(seed=0, num_sampling_steps=12, network=Stable):
    torch.manual_seed(seed)
    model = DiffLoss(channels=3, z_channels=5, width=16, num_blocks=2, num_sampling_steps=num_sampling_steps)
    model.net = network(channels=3, z_channels=5, width=16, num_blocks=2)
    return stirred(model, seed)


# The autoencoder

def test_autoencoder():
    kl = stirred(KL(TINY_KL))
    images = normals(2, 3, 8, 12).tanh()
    means = kl.latents(images)
    assert means.shape == (2, 4, 6, 3) and means.dtype == torch.float32
    assert kl.decode_latents(means).shape == images.shape
    moments = kl.quant_conv(kl.encoder(images))
    noise = normals(2, 4, 6, 3, seed=5)
    sigma = (moments[:, 3:] / 2).exp().permute(0, 2, 3, 1)
    assert torch.allclose(means, moments[:, :3].permute(0, 2, 3, 1) * 0.2325)
    assert torch.allclose(kl.latents(images, noise), means + sigma * noise * 0.2325)
    unscaled = kl.decoder(kl.post_quant_conv(moments[:, :3]))
    assert torch.allclose(kl.decode_latents(means), unscaled, atol=1e-5)
    with pytest.raises(ValueError, match=r"images must be \(B, 3, H, W\), H and W multiples of 2, got \(1, 3, 7, 8\)"):
        kl.latents(torch.zeros(1, 3, 7, 8))
    with pytest.raises(ValueError, match=r"noise must be \(B, h, w, C\) = \(2, 4, 6, 3\), got \(2, 3, 4, 6\)"):
        kl.latents(images, normals(2, 3, 4, 6))
    with pytest.raises(ValueError, match=r"latents must be \(B, h, w, C=3\), got \(2, 4, 6, 4\)"):
        kl.decode_latents(torch.zeros(2, 4, 6, 4))


# Checkpoints and bad input

def test_official_checkpoints(tmp_path):
    model, average = mar(), mar(seed=1)
    wrapped = {"model": model.state_dict(), "model_ema": average.state_dict(), "epoch": 400,
               "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}}, "args": Namespace(model="mar_base", lr=1e-4)}
    torch.save(wrapped, tmp_path / "checkpoint-last.pth")
    loaded = MAR(TINY)
    load_weights(loaded, tmp_path / "checkpoint-last.pth")
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in average.state_dict().items())
    torch.save(wrapped | {"model_ema": None}, tmp_path / "no_average.pth")
    load_weights(loaded, tmp_path / "no_average.pth")
    assert torch.equal(loaded.z_proj.weight, model.z_proj.weight)
    kl = KL(TINY_KL)
    trained_against = {"loss.logvar": torch.zeros(()), "loss.discriminator.main.0.weight": torch.zeros(8, 3, 4, 4)}
    torch.save({"model": kl.state_dict() | trained_against}, tmp_path / "kl16.ckpt")
    loaded = KL(TINY_KL)
    load_weights(loaded, tmp_path / "kl16.ckpt")
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in kl.state_dict().items())
    torch.save({"model": kl.state_dict() | {"lossy.weight": torch.zeros(2)}}, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match=r"not of a KL: it holds lossy.weight"):
        load_weights(KL(TINY_KL), tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match=r"lacks fake_latent \(1, 32\) of MAR"):
        load_weights(MAR(TINY), tmp_path / "kl16.ckpt")


@pytest.mark.parametrize("tokens, is_known, condition, message", [
    ((2, 16, 5), (2, 16), (2, 32), r"tokens must be \(R, L=16, C=4\), got \(2, 16, 5\)"),
    ((2, 9, 4), (2, 9), (2, 32), r"tokens must be \(R, L=16, C=4\), got \(2, 9, 4\)"),
    ((2, 16, 4), (3, 16), (2, 32), r"is_known must be bool \(R=2, L=16\), got torch.bool \(3, 16\)"),
    ((2, 16, 4), (2, 16), (2, 33), r"condition must be \(R=2, 32\) or \(R=2, S, 32\) .* 1..6, got \(2, 1, 33\)"),
    ((2, 16, 4), (2, 16), (2, 7, 32), r"S within 1..6, got \(2, 7, 32\)"),
    ((2, 16, 4), (2, 16), (3, 32), r"condition must be \(R=2, 32\)"),
])
def test_mismatched_tokens(tokens, is_known, condition, message):
    """And a mask that is none, and captions of another width."""
    with pytest.raises(ValueError, match=message):
        mar()(torch.zeros(tokens), torch.zeros(is_known, dtype=torch.bool), torch.zeros(condition))
    with pytest.raises(ValueError, match=r"is_known must be bool \(R=2, L=16\), got torch.float32 \(2, 16\)"):
        mar()(torch.zeros(2, 16, 4), torch.zeros(2, 16), torch.zeros(2, 32))
    with pytest.raises(ValueError, match=r"caption features must be \(R, S, 8\), got \(2, 3, 9\)"):
        mar(classes=None, caption_dim=8).condition(torch.zeros(2, 3, 9))


def test_configs_that_cannot_be():
    for changes, message in (
            (dict(caption_dim=8), "at most one of classes and caption_dim, got classes=10, caption_dim=8"),
            (dict(heads=5), "dim must be a multiple of heads, got 32 / 5"),
            (dict(num_sampling_steps=1), "num_sampling_steps must be within 2..1000 .*, got 1$"),
            (dict(num_sampling_steps=1001), "num_sampling_steps must be within 2..1000 .*, got 1001")):
        with pytest.raises(ValueError, match=message):
            MAR(dataclasses.replace(TINY, **changes))
    with pytest.raises(ValueError, match="size must be one of B, L, H, got 'X'"):
        class_config("X")


@pytest.mark.parametrize("settings, message", [
    (dict(z=(4, 6)), r"z must be \(..., 5\), got \(4, 6\)"),
    (dict(uncond=(3, 5)), r"uncond must have z's shape \(4, 5\), got \(3, 5\)"),
    (dict(guidance=2.0), "guidance 2.0 needs uncond"),
    (dict(uncond=(4, 5), guidance=torch.ones(3)), r"guidance must be a number or \(4,\), got \(3,\)"),
    (dict(temperature=0.0), "temperature must be positive and finite, got 0.0"),
    (dict(temperature=math.nan), "temperature must be positive and finite, got nan"),
    (dict(temperature=math.inf), "temperature must be positive and finite, got inf"),
])
def test_mismatched_conditions(settings, message):
    settings = dict(z=(4, 5)) | settings
    settings = {name: torch.zeros(value) if name in ("z", "uncond") else value for name, value in settings.items()}
    with pytest.raises(ValueError, match=message):
        diffusion().denoiser(**settings)
