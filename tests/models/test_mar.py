"""MAR, its diffusion and its autoencoder: official names and sizes, any set of known tokens, closed forms."""
import dataclasses
import math
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

from specvis.models.diffloss import DiffLoss, Network, Schedule, cosine_alpha_bar
from specvis.models.kl_vae import KL, KLConfig
from specvis.models.mar import MAR, SIZES, MARConfig, class_config, scheduled_guidance
from specvis.models.words import Words
from specvis.pipelines.checkpoint import CheckpointError, load_weights
from tests.tiny import TINY

PUBLISHED = {"B": (208, 35.7), "L": (479, 72.2), "H": (943, 151.2)}  # millions: all rounded up, of them DiffLoss
TINY_KL = KLConfig(channels=8, multipliers=(1, 2), residual_blocks=1, z_channels=3, groups=4)


def parameters(module):
    return sum(p.numel() for p in module.parameters())


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
    """Of TINY_KL: a block a level, attention at the lower."""
    x = functional_residual(under(w, "down.0.block.0."), conv(w, "conv_in", x, padding=1))
    x = conv(w, "down.0.downsample.conv", F.pad(x, (0, 1, 0, 1)), stride=2)
    x = functional_attention(under(w, "down.1.attn.0."), functional_residual(under(w, "down.1.block.0."), x))
    return conv(w, "conv_out", F.silu(group_norm(w, "norm_out", functional_middle(under(w, "mid."), x))), padding=1)


def functional_decoder(w, z):
    """Of TINY_KL: two blocks a level, the lower resolution first."""
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
    assert {name for name in shapes if "decoder_blocks.11." in name} == {
        f"decoder_blocks.11.{layer}.{kind}" for kind in ("weight", "bias")
        for layer in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")}
    assert {name for name in shapes if "res_blocks.5." in name} == {
        f"diffloss.net.res_blocks.5.{layer}.{kind}" for kind in ("weight", "bias")
        for layer in ("in_ln", "mlp.0", "mlp.2", "adaLN_modulation.1")}
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
    assert {"encoder.down.0.downsample.conv.bias", "encoder.down.4.attn.1.proj_out.weight", "encoder.mid.attn_1.q.bias",
            "decoder.up.1.block.2.conv2.weight", "decoder.up.4.upsample.conv.weight", "decoder.norm_out.bias",
            "decoder.up.3.block.0.nin_shortcut.weight", "encoder.mid.block_2.norm1.weight"} <= set(shapes)
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


def test_densities_are_exact_in_half_precision():
    model, tokens, is_known = mar(num_sampling_steps=100), normals(4, 16, 4), known_sets(4)
    torch.manual_seed(0)
    model.diffloss.net = stirred(Stable(channels=4, z_channels=32, width=32, num_blocks=2))
    weights = [weight.clone() for weight in model.diffloss.net.parameters()]
    for cast in (model.bfloat16, model.double, model.half, lambda: model.to("cpu", torch.bfloat16)):
        cast()
        assert all(torch.equal(now, weight) for now, weight in zip(model.diffloss.net.parameters(), weights))
    z = model(tokens, is_known, model.condition(torch.arange(4)))
    assert z.dtype == torch.bfloat16
    denoiser = model.diffloss.denoiser(z)
    sample = denoiser.sample(normals(4, 16, 100, 4, seed=3), keep_path=True)
    log_ratio = denoiser.log_density(sample.path) - sample.log_density                # of a model to itself
    assert log_ratio.abs().max() < 1e-3
    assert math.isclose(log_ratio.clamp(max=0).exp().mean(), 1, abs_tol=1e-3)      # the acceptance probability
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.to("meta").diffloss.net.parameters())
    guided = diffusion().denoiser(normals(4, 5).bfloat16(), uncond=normals(4, 5, seed=2).double(), guidance=2.0)
    assert guided.sample(normals(4, 12, 3)).mean.dtype == torch.float32            # any dtype of z, and of uncond


def test_everything_follows_the_device():
    model, tokens, is_known = mar(classes=None).to("meta"), normals(4, 16, 4).to("meta"), known_sets(4).to("meta")
    z = model(tokens, is_known, model.null_condition(4), max_known=9)
    denoiser = model.diffloss.denoiser(z, uncond=z, guidance=2.0)
    sample = denoiser.sample(torch.empty(4, 16, 8, 4, device="meta"), keep_path=True)
    assert sample.mean.is_meta and denoiser.log_density(sample.path).is_meta


# The schedule

@pytest.mark.parametrize("num_sampling_steps", [2, 7, 100, 1000])
def test_schedule_in_closed_form(num_sampling_steps):
    schedule = Schedule(1000, num_sampling_steps)
    t = schedule.timesteps
    assert t[0] == 0 and t[-1] == 999 and len(schedule) == num_sampling_steps
    assert (t.diff() - 999 / (num_sampling_steps - 1)).abs().max() < 1                          # evenly spread
    angle = ((t[:-1] + 1).double() / 1000 + 0.008) / 1.008 * math.pi / 2           # the very last timestep is clipped
    assert torch.allclose(schedule.alpha_bar[:-1], (angle.cos() / math.cos(0.008 / 1.008 * math.pi / 2)) ** 2)
    assert torch.allclose(cosine_alpha_bar(1000)[999] / cosine_alpha_bar(1000)[998], torch.tensor(0.001).double())
    assert torch.equal(schedule.alpha_bar, cosine_alpha_bar(1000)[t])              # respacing keeps it
    assert torch.allclose((1 - schedule.beta).cumprod(0), schedule.alpha_bar)

    # Bayes: x_(t-1) ~ N(sqrt(a) x_0, 1 - a) before seeing x_t ~ N(sqrt(1 - beta) x_(t-1), beta)
    a, beta = schedule.alpha_bar[:-1], schedule.beta[1:]
    variance = 1 / (1 / (1 - a) + (1 - beta) / beta)
    assert torch.allclose(schedule.posterior_mean_coef1[1:], variance * a.sqrt() / (1 - a))
    assert torch.allclose(schedule.posterior_mean_coef2[1:], variance * (1 - beta).sqrt() / beta)
    assert torch.allclose(schedule.min_log_sigma[1:].exp() ** 2, variance)
    assert torch.allclose(schedule.max_log_sigma.exp() ** 2, schedule.beta)
    assert schedule.posterior_mean_coef1[0] == 1 and schedule.posterior_mean_coef2[0] == 0
    assert schedule.min_log_sigma[0] == schedule.min_log_sigma[1]


def test_the_published_steps():
    schedule = Schedule(1000, 100)
    assert schedule.timesteps[:5].tolist() == [0, 10, 20, 30, 40] and schedule.timesteps[-2] == 989
    assert round(schedule.min_log_sigma[0].exp().item(), 4) == 0.0062
    assert round(schedule.max_log_sigma[0].exp().item(), 4) == 0.0064


def test_timesteps_are_those_of_a_summed_stride():
    differ = []
    for num_sampling_steps in range(2, 1001):
        timestep, expected = 0.0, []
        for _ in range(num_sampling_steps):
            expected.append(round(timestep))
            timestep += 999 / (num_sampling_steps - 1)
        assert Schedule(1000, num_sampling_steps).timesteps.tolist() == expected
        if expected != [round(i * 999 / (num_sampling_steps - 1)) for i in range(num_sampling_steps)]:
            differ.append(num_sampling_steps)
    assert differ[:4] == [21, 23, 27, 35] and len(differ) == 283                   # from multiples of the stride


def test_a_step_from_what_the_network_predicts():
    schedule = Schedule(1000, 10)
    start, epsilon = normals(5, 3), normals(5, 3, seed=2)
    for t in (1, 2, 10):
        a = schedule.alpha_bar[t - 1].float()
        x = a.sqrt() * start + (1 - a).sqrt() * epsilon
        mean, _ = schedule.transition(x, epsilon, torch.zeros(5, 3), t)
        expected = schedule.posterior_mean_coef1[t - 1] * start + schedule.posterior_mean_coef2[t - 1] * x
        assert torch.allclose(mean, expected.float(), atol=1e-5 if t < 10 else 1e-3)  # at t = 1 this is x_0
        for var_values, weight in ((-1.0, 0.0), (0.0, 0.5), (1.0, 1.0), (3.0, 2.0)):
            _, log_sigma = schedule.transition(x, epsilon, torch.full((5, 3), var_values), t)
            expected = torch.lerp(schedule.min_log_sigma[t - 1], schedule.max_log_sigma[t - 1], weight)
            assert torch.allclose(log_sigma, expected.float().expand(5, 3))
    side_by_side = schedule.transition(torch.stack([start, x]), epsilon, start, torch.tensor([3, 10])[:, None])
    for i, t in enumerate((3, 10)):
        alone = schedule.transition([start, x][i], epsilon, start, t)
        assert all(torch.equal(side[i], one) for side, one in zip(side_by_side, alone))


@pytest.mark.parametrize("clip_sample_range", [0.5, 2.0])
def test_a_guess_of_the_token_stays_within_its_range(clip_sample_range):
    schedule, start, epsilon = Schedule(1000, 10), 2 * normals(50, 3), normals(50, 3, seed=2)
    assert (start.abs() > clip_sample_range).any() and (start.abs() < clip_sample_range).any()
    for t in (1, 2, 10):
        a = schedule.alpha_bar[t - 1].float()
        x = a.sqrt() * start + (1 - a).sqrt() * epsilon
        free, log_sigma = schedule.transition(x, epsilon, torch.zeros(50, 3), t)
        clipped, same = schedule.transition(x, epsilon, torch.zeros(50, 3), t, clip_sample_range)
        clipped_start = start.clamp(-clip_sample_range, clip_sample_range)
        expected = schedule.posterior_mean_coef1[t - 1] * clipped_start + schedule.posterior_mean_coef2[t - 1] * x
        assert torch.allclose(clipped, expected.float(), atol=1e-3) and torch.equal(same, log_sigma)
        inside = start.abs() < clip_sample_range - 1e-3
        assert torch.equal(clipped[inside], free[inside]) and not torch.equal(clipped[~inside], free[~inside])


def test_only_a_model_with_a_range_clips_its_guesses():
    free, wide, clipped = mar(), mar(clip_sample_range=1e30), mar(clip_sample_range=1.5)
    z, noise = normals(20, TINY.dim), normals(20, TINY.num_sampling_steps, TINY.channels, seed=2)
    path = free.diffloss.denoiser(z).sample(noise, keep_path=True).path
    assert free.config.clip_sample_range is None and free.diffloss.clip_sample_range == math.inf
    assert path.abs().max() > 100
    for t in range(1, TINY.num_sampling_steps + 1):
        x = path[:, t]
        assert torch.equal(free.diffloss.denoiser(z).transition(x, t)[0], wide.diffloss.denoiser(z).transition(x, t)[0])
    tokens = clipped.diffloss.denoiser(z).sample(noise).mean                          # at t = 1 this is x_0
    assert tokens.abs().max() <= 1.5 + 1e-6 and (tokens.abs() < 1.4).any()
    both = clipped.diffloss.denoiser(z, uncond=z.flip(0), guidance=5.0).sample(noise).mean
    assert both.abs().max() <= 1.5 + 1e-6                                          # the guided guess is clipped


@torch.no_grad()
def test_another_schedule_of_as_many_steps_has_its_own_embeddings():
    model = mar()
    model.pack()
    z, embeddings = torch.zeros(1, model.diffloss.net.cond_embed.in_features), model.diffloss.time_embeddings
    for schedule in Schedule(1000, 8), Schedule(500, 8):
        expected = model.diffloss.net.time_embed(schedule.table(z.device)[:, 0])
        assert torch.equal(embeddings(schedule, z), expected)


def test_the_table_is_copied_to_each_device_once():
    schedule = Schedule(1000, 10)
    meta, cpu = (schedule.table(torch.device(name)) for name in ("meta", "cpu"))
    assert not cpu.is_meta and meta.is_meta                                        # meta gives no values back
    assert schedule.table(torch.device("cpu")) is cpu and schedule.table(torch.device("meta")) is meta


# Sampling

class Exact(nn.Module):
    """The output of a perfect network where tokens are N(z, 0.5^2), and var_values are -1."""

    def __init__(self, schedule):
        super().__init__()
        self.alpha_bar = cosine_alpha_bar(1000).float()
        self.cond_embed, self.schedule = nn.Linear(1, 1), schedule
        self.cond_embed.weight.data.fill_(1), self.cond_embed.bias.data.zero_()

    def time_embed(self, timesteps):
        return 100.0 * timesteps[:, None]                                          # z is small, and this is much larger

    def forward(self, x, y):
        z = (y + 50).remainder(100) - 50
        a = self.alpha_bar[((y - z) / 100).round().long()]
        epsilon = (1 - a).sqrt() * (x - a.sqrt() * z) / (a * 0.25 + 1 - a)
        return torch.cat([epsilon, -torch.ones_like(epsilon)], -1)


def test_a_perfect_network_samples_its_gaussian():
    diffloss = DiffLoss(channels=1, z_channels=1, width=1, num_blocks=0, num_sampling_steps=250)
    diffloss.net = Exact(diffloss.schedule).requires_grad_(False)
    z = torch.tensor([-2.0, 1.0])[:, None, None].expand(2, 20000, 1)
    tokens = diffloss.denoiser(z).sample(normals(2, 20000, 250, 1)).mean
    assert torch.allclose(tokens.mean((1, 2)), torch.tensor([-2.0, 1.0]), atol=0.015)
    assert torch.allclose(tokens.std((1, 2)), torch.tensor(0.5), atol=0.015)
    colder = diffloss.denoiser(z, temperature=0.5).sample(normals(2, 20000, 250, 1)).mean
    assert (colder.std((1, 2)) < 0.4).all()
    shifted = diffloss.denoiser(z, uncond=torch.zeros_like(z), guidance=2.0).sample(normals(2, 20000, 250, 1)).mean
    assert (shifted.mean((1, 2)).abs() > torch.tensor([2.5, 1.2])).all()           # away from uncond's 0


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


def test_sample_against_a_loop():
    model, z, noise = diffusion(), normals(2, 4, 5), normals(2, 4, 12, 3, seed=3)
    denoiser = model.denoiser(z, temperature=0.8)
    sample = denoiser.sample(noise, keep_path=True)
    x, log_density, log_sigma_sum = noise[..., 11, :], 0, 0
    assert torch.equal(sample.path[..., 12, :], x)
    for t in range(12, 1, -1):
        y = model.net.cond_embed(z) + model.net.time_embed(model.schedule.timesteps[t - 1])
        epsilon, var_values = model.net(x, y).chunk(2, -1)
        mean, log_sigma = model.schedule.transition(x, epsilon, var_values, t)
        step = Normal(mean.double(), log_sigma.double().exp() * 0.8)
        x = mean + step.scale.float() * noise[..., t - 2, :]
        log_density = log_density + step.log_prob(x.double()).sum(-1)
        log_sigma_sum = log_sigma_sum + step.scale.log().sum(-1)
        assert torch.allclose(sample.path[..., t - 1, :], x, rtol=1e-4, atol=1e-5)
        x = sample.path[..., t - 1, :]
    mean, log_sigma = denoiser.transition(x, 1)
    assert torch.allclose(sample.mean, mean, atol=1e-5) and torch.equal(sample.path[..., 0, :], sample.mean)
    assert torch.allclose(sample.log_sigma, log_sigma)
    assert torch.allclose(sample.log_sigma_sum, log_sigma_sum, atol=1e-4)
    assert torch.allclose(sample.log_density, log_density, atol=1e-3)
    assert denoiser.sample(noise).path is None and torch.equal(denoiser.sample(noise).mean, sample.mean)


def test_log_density_of_a_path_under_either_model():
    draft, target = diffusion(), diffusion(seed=1)
    z, other, noise = normals(2, 4, 5), normals(2, 4, 5, seed=2), normals(2, 4, 12, 3, seed=3)
    sample = draft.denoiser(z).sample(noise, keep_path=True)
    own = draft.denoiser(z).log_density(sample.path)
    assert own.shape == (2, 4) and own.dtype == torch.float64
    # in one batch instead of step by step, which rounds otherwise: by 2e-4 in torch 2.13, by 1.5e-3 in 2.14
    assert torch.allclose(own, sample.log_density, rtol=1e-4, atol=1e-3)
    under = target.denoiser(other, uncond=z, guidance=torch.full((2, 4), 1.5))
    density = under.log_density(sample.path)
    expected = 0
    for t in range(2, 13):
        mean, log_sigma = under.transition(sample.path[..., t, :], t)
        expected = expected + Normal(mean.double(), log_sigma.double().exp()).log_prob(
            sample.path[..., t - 1, :].double()).sum(-1)
    assert torch.allclose(density, expected, rtol=1e-4)
    assert torch.allclose(under.log_density(sample.path, chunk_size=20), density, rtol=1e-5)
    moved = sample.path.clone()
    moved[..., 0, :] = math.nan                                                    # the token is no part of it
    assert torch.equal(under.log_density(moved), density)
    aligned = target.denoiser(z).sample(noise, keep_path=True)                        # the same noise, another path
    assert torch.equal(aligned.path[..., 12, :], sample.path[..., 12, :])
    assert not torch.allclose(aligned.path[..., 11, :], sample.path[..., 11, :])


def test_guidance_moves_the_noise_only():
    model, z, uncond, x = diffusion(), normals(4, 5), normals(4, 5, seed=2), normals(4, 3, seed=3)
    plain, other = model.denoiser(z), model.denoiser(uncond)
    for t in (1, 5, 12):
        guided = model.denoiser(z, uncond=uncond, guidance=3.0).transition(x, t)
        assert torch.equal(guided[1], plain.transition(x, t)[1])
        expected = other.transition(x, t)[0] + 3 * (plain.transition(x, t)[0] - other.transition(x, t)[0])
        assert torch.allclose(guided[0], expected, rtol=1e-4, atol=1e-4)
    noise = normals(4, 12, 3, seed=4)
    same = model.denoiser(z, uncond=uncond, guidance=1.0).sample(noise)
    assert torch.allclose(same.mean, plain.sample(noise).mean, rtol=1e-3, atol=1e-3)
    each = model.denoiser(z, uncond=uncond, guidance=torch.tensor([1.0, 2.0, 3.0, 4.0])).sample(noise).mean
    for row, guidance in enumerate((1.0, 2.0, 3.0, 4.0)):
        alone = model.denoiser(z, uncond=uncond, guidance=torch.tensor(guidance)).sample(noise).mean
        assert torch.equal(alone[row], each[row])


def test_temperature_scales_sigma():
    model, z, x = diffusion(), normals(4, 5), normals(4, 3, seed=3)
    mean, log_sigma = model.denoiser(z).transition(x, 7)
    cold = model.denoiser(z, temperature=0.5).transition(x, 7)
    assert torch.equal(cold[0], mean) and torch.allclose(cold[1], log_sigma - math.log(2))


def test_leading_dimensions_and_thousand_steps():
    model = diffusion(num_sampling_steps=1000)
    z, noise = normals(2, 3, 5), normals(2, 3, 1000, 3, seed=3)
    sample = model.denoiser(z).sample(noise, keep_path=True)
    flat = model.denoiser(z.flatten(0, 1)).sample(noise.flatten(0, 1))
    assert torch.equal(flat.mean.view(2, 3, 3), sample.mean)
    assert sample.log_density.isfinite().all() and model.denoiser(z).log_density(sample.path).isfinite().all()
    assert model.denoiser(z[:0]).sample(noise[:0]).mean.shape == (0, 3, 3)


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
    with pytest.raises(CheckpointError, match=r"of another size: fake_latent must be \(1, 48\), got \(1, 32\)"):
        load_weights(MAR(dataclasses.replace(TINY, dim=48)), tmp_path / "checkpoint-last.pth")
    with pytest.raises(CheckpointError, match=r"lacks diffloss.net.res_blocks.2.in_ln.weight"):
        load_weights(MAR(dataclasses.replace(TINY, diffusion_blocks=3)), tmp_path / "checkpoint-last.pth")
    with pytest.raises(CheckpointError, match=r"encoder_pos_embed_learned must be \(1, 31, 32\), got \(1, 22, 32\)"):
        load_weights(MAR(dataclasses.replace(TINY, tokens=25)), tmp_path / "checkpoint-last.pth")
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
    with pytest.raises(ValueError, match=message):
        mar()(torch.zeros(tokens), torch.zeros(is_known, dtype=torch.bool), torch.zeros(condition))


def test_is_known_is_a_mask_and_captions_have_their_width():
    with pytest.raises(ValueError, match=r"is_known must be bool \(R=2, L=16\), got torch.float32 \(2, 16\)"):
        mar()(torch.zeros(2, 16, 4), torch.zeros(2, 16), torch.zeros(2, 32))
    with pytest.raises(ValueError, match=r"caption features must be \(R, S, 8\), got \(2, 3, 9\)"):
        mar(classes=None, caption_dim=8).condition(torch.zeros(2, 3, 9))


def test_configs_that_cannot_be():
    with pytest.raises(ValueError, match="at most one of classes and caption_dim, got classes=10, caption_dim=8"):
        dataclasses.replace(TINY, caption_dim=8)
    with pytest.raises(ValueError, match="dim must be a multiple of heads, got 32 / 5"):
        MARConfig(32, 5, 1, 1, 8, 1)
    for number in (1, 1001):
        with pytest.raises(ValueError, match=rf"num_sampling_steps must be within 2..1000 .*, got {number}"):
            MAR(dataclasses.replace(TINY, num_sampling_steps=number))


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


def test_mismatched_noise_and_paths():
    denoiser = diffusion().denoiser(torch.zeros(4, 5))
    with pytest.raises(ValueError, match=r"noise must be \(R, T, C\) = \(4, 12, 3\), got \(4, 11, 3\)"):
        denoiser.sample(torch.zeros(4, 11, 3))
    with pytest.raises(ValueError, match=r"path must be \(R, T \+ 1, C\) = \(4, 13, 3\), got \(4, 13, 2\)"):
        denoiser.log_density(torch.zeros(4, 13, 2))


def test_a_size_that_was_not_published_is_refused():
    with pytest.raises(ValueError, match="size must be one of B, L, H, got 'X'"):
        class_config("X")


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "checkpoint-last.pth").write_bytes(b"hello")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_weights(nn.Linear(1, 1), tmp_path / "checkpoint-last.pth")
