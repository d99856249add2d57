"""The small MAR: masked autoregression on the tokenizer's continuous latents, with the GPT's embeddings of words."""
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from specvis.files import locked, write_json, write_weights, write_whole
from specvis.models.diffloss import DiffLoss, Schedule
from specvis.models.mar import MAR, MARConfig
from specvis.models.vq import VQ, VQConfig
from specvis.models.words import Words, repeated
from specvis.pipelines.checkpoint import CheckpointError, load_weights, read_config, read_weights
from specvis.pipelines.mar import Scaling

from .gpt import NULL_SHARE
from .run import TrainingRun, compiling, mixed_precision
from .stages import Sampled, arrays_of, made, options, spread, vocabulary_of
from .tokenizer import PictureData

BUFFER = 16          # condition tokens: a caption has at most 10 words
STEPS = 50           # denoising steps; any number can be chosen later
LEAST_MASKED = 0.7   # the smallest share of masked tokens in training; it is normal about 1, cut at 1
SPREAD = 0.25


@dataclass
class Batch:
    features: Tensor   # (B, S, caption_dim)
    null: Tensor       # (B,) bool  which get no caption
    tokens: Tensor     # (B, L, C) float32
    is_known: Tensor   # (B, L) bool
    timesteps: Tensor  # (M, n) int64  1..T, of the n unknown tokens, M for each
    noise: Tensor      # (M, n, C) float32


class Latents(Sampled):
    """The pictures as continuous tokens (N, 256, 8), from runs/latents.npz, which is made if it is missing."""

    def __init__(self, runs: Path, device: torch.device):
        data = PictureData(runs)
        weights = made(runs / "tokenizer" / "tokenizer.safetensors", "tokenizer")
        words = made(runs / "gpt" / "words.safetensors", "gpt")
        self.inputs = {path.name: path for path in (runs / "data" / "pictures.npz", weights, words)}
        path = runs / "latents.npz"
        if not path.exists() or path.stat().st_mtime < weights.stat().st_mtime:
            with locked(runs, "runs"):
                write_latents(runs, data, path, device)
        arrays = arrays_of(path, None, "tokens", "shift", "scale")
        self.scaling = Scaling(tuple(arrays["shift"].tolist()), arrays["scale"].item())
        self.tokens = torch.from_numpy(arrays["tokens"])  # float16
        captions = [repeated([int(word) for word in row if word], BUFFER) for row in data.arrays["captions"]]
        self.captions = torch.tensor(captions)
        super().__init__(data.arrays["held_out"], data.arrays["weights"])
        width = read_weights(words)["table.weight"].shape[1]
        self.words = Words(vocabulary_of(runs), BUFFER, width).requires_grad_(False)
        load_weights(self.words, words)
        self.device = device

    def draw(self, batch: int, num_timesteps: int, num_train_timesteps: int, generator: torch.Generator) -> Batch:
        """A training batch, drawn by weight. Each unknown token is there at `num_timesteps` steps of the diffusion."""
        rows = self.rows(batch, generator)
        null = torch.rand(batch, generator=generator) < NULL_SHARE
        return self.masked(rows, null, num_timesteps, num_train_timesteps, generator)

    def masked(self, rows: Tensor, null: Tensor, num_timesteps: int, num_train_timesteps: int,
               generator: torch.Generator) -> Batch:
        """Pictures `rows` with MAR's share of their tokens unknown, at random positions."""
        tokens = self.tokens[rows].float()
        (B, L, C), M = tokens.shape, num_timesteps
        lowest = torch.special.ndtr(torch.tensor((LEAST_MASKED - 1) / SPREAD))
        share = 1 + SPREAD * torch.special.ndtri(lowest + torch.rand(B, 1, generator=generator) * (0.5 - lowest))
        order = torch.rand(B, L, generator=generator).argsort(1).argsort(1)
        is_known = order >= (share.clamp(LEAST_MASKED, 1) * L).ceil()
        n = int((~is_known).sum())
        # a token's timesteps are evenly apart: they tell more than independent ones
        when = (torch.rand(n, generator=generator) + torch.arange(M)[:, None] / M) % 1
        timesteps = (when * num_train_timesteps).long().clamp(max=num_train_timesteps - 1) + 1
        noise = torch.randn(M, n, C, generator=generator)
        features = self.words(self.captions[rows])
        return Batch(*(part.to(self.device) for part in (features, null, tokens, is_known, timesteps, noise)))


@torch.no_grad()
def write_latents(runs: Path, data: PictureData, path: Path, device: torch.device) -> None:
    """runs/latents.npz: tokens (N, 256, 8) float16, and the shift (8,) and scale that made them of unit latents."""
    vq = VQ(read_config(runs / "tokenizer" / "config.json", VQConfig))
    load_weights(vq, runs / "tokenizer" / "tokenizer.safetensors")
    vq.to(device).eval()
    latents = torch.cat([vq.latents(data.take(rows).to(device)).flatten(1, 2).cpu()
                         for rows in tqdm(torch.arange(len(data.pictures)).split(128), desc="latents")])
    scaling = Scaling.of(latents[data.train].flatten(0, 1))
    tokens, shift, scale = scaling.tokens(latents).half().numpy(), np.array(scaling.shift), np.array(scaling.scale)
    write_whole(path, lambda file: np.savez(file, tokens=tokens, shift=shift, scale=scale))


def diffusion_loss(diffloss: DiffLoss, schedule: Schedule, z: Tensor, tokens: Tensor, timesteps: Tensor,
                   noise: Tensor) -> tuple[Tensor, Tensor]:
    """The two losses of the network (improved DDPM, arXiv:2102.09672). Their sum is the hybrid loss.

    Args:
        schedule: it has all the timesteps
        z, tokens, timesteps, noise: (n, dim), (n, C), (M, n), (M, n, C)
    Returns:
        the mean squared error of the noise, and the variational bound in bits a number. The bound trains the variance
        alone, since the mean is detached.
    """
    net = diffloss.net
    table = schedule.table(tokens.device)
    _, x_coef, noise_coef, coef1, coef2, min_log_sigma, _ = table[timesteps - 1][..., None, :].unbind(-1)  # (M, n, 1)
    x = (tokens + noise_coef * noise) / x_coef
    y = net.time_embed(table[:, 0])[timesteps - 1] + net.cond_embed(z)
    epsilon, var_values = net(x, y).split(diffloss.channels, -1)
    mean, log_sigma = schedule.transition(x, epsilon.detach(), var_values, timesteps)
    first = (timesteps == 1)[..., None]  # a density of the token; all others are divergences between two Gaussians
    wanted = torch.where(first, tokens, coef1 * tokens + coef2 * x)
    distance = (wanted - mean).square() * torch.exp(-2 * log_sigma) / 2
    divergence = log_sigma - min_log_sigma + torch.exp(2 * (min_log_sigma - log_sigma)) / 2 - 0.5 + distance
    density = log_sigma + math.log(2 * math.pi) / 2 + distance
    return (epsilon - noise).square().mean(), torch.where(first, density, divergence).mean() / math.log(2)


def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
    """`F.scaled_dot_product_attention`; on a CPU, forward and backward, it takes half the time of PyTorch's kernel."""
    scores = ((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)).float()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    return scores.softmax(-1).to(q.dtype) @ v


class LearnedMAR(nn.Module):
    """The MAR and its loss."""

    def __init__(self, config: MARConfig, device: torch.device):
        super().__init__()
        self.mar = MAR(config)
        if device.type == "cpu":
            for block in (*self.mar.encoder_blocks, *self.mar.decoder_blocks):
                block.attn.attend = attend
        self.to(device)
        start(self.mar)
        self.schedule = Schedule(config.num_train_timesteps, config.num_train_timesteps)
        self.max_known = config.tokens - math.ceil(LEAST_MASKED * config.tokens)  # known tokens in training

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The losses of a batch, see `diffusion_loss`."""
        condition = self.mar.condition(batch.features)
        null = self.mar.null_condition(len(condition))[:, None]
        condition = torch.where(batch.null[:, None, None], null, condition)
        unknown = ~batch.is_known
        z = self.mar(batch.tokens, batch.is_known, condition, self.max_known)[unknown]
        return diffusion_loss(self.mar.diffloss, self.schedule, z, batch.tokens[unknown], batch.timesteps, batch.noise)


def grid_waves(side: int, width: int) -> Tensor:
    """(side * side, width): sines and cosines of row and column, so that near positions have similar rows."""
    frequencies = 10000.0 ** -(torch.arange(width // 4) / (width // 4))
    angles = torch.arange(side)[:, None] * frequencies
    waves = torch.cat([angles.sin(), angles.cos()], -1)                                 # (side, width / 2)
    return torch.cat([waves[:, None].expand(-1, side, -1), waves.expand(side, -1, -1)], -1).flatten(0, 1)


def start(mar: MAR) -> None:
    """Initialize what learns faster from better values than from small random numbers: embeddings of positions are
    waves, and captions have embeddings as large as tokens."""
    c = mar.config
    for table in (mar.encoder_pos_embed_learned, mar.decoder_pos_embed_learned):
        table.data[0, c.buffer:] = 0.3 * grid_waves(math.isqrt(c.tokens), c.dim)
    for layer in (mar.cap_proj.fc1, mar.cap_proj.fc2):
        layer.weight.data.normal_(std=layer.in_features ** -0.5)
    mar.cap_proj.fc1.weight.data *= 4  # a word's features have a deviation of about 1 / 4


@torch.no_grad()
def measure(model: LearnedMAR, latents: Latents, which: Tensor, device: torch.device) -> dict[str, float]:
    """The losses on pictures `which`. Masks and noise are always the same."""
    generator = torch.Generator().manual_seed(1)
    sums = torch.zeros(2)
    for rows in which.split(32):
        batch = latents.masked(rows, torch.zeros(len(rows), dtype=torch.bool), 2, len(model.schedule), generator)
        with mixed_precision(device):
            sums += torch.stack(model(batch)).cpu() * len(rows)
    return dict(zip(("noise", "bits"), (sums / len(which)).tolist()))


def training_options(dim: int, layers: int, heads: int, width: int, blocks: int, **defaults):
    """The options of a stage that trains a MAR."""
    return options(
        click.option("--dim", type=click.IntRange(1), default=dim, show_default=True, help="Width of the transformer."),
        click.option("--layers", type=click.IntRange(1), default=layers, show_default=True,
                     help="Of the encoder, and of the decoder."),
        click.option("--heads", type=click.IntRange(1), default=heads, show_default=True),
        click.option("--width", type=click.IntRange(1), default=width, show_default=True,
                     help="Of the diffusion's MLP."),
        click.option("--blocks", type=click.IntRange(1), default=blocks, show_default=True,
                     help="Of the diffusion's MLP."),
        click.option("--num-timesteps", type=click.IntRange(1), default=2, show_default=True,
                     help="Diffusion steps of each token and picture."),
        click.option("--from", "source", type=click.Path(path_type=Path),
                     help="File with the weights of a MAR of this size that training starts from, instead of random "
                          "ones."),
        **defaults)


def train(folder: Path, runs: Path, device: str, *, dim: int, layers: int, heads: int, width: int, blocks: int,
          num_timesteps: int, batch: int, lr: float, minutes: float | None, steps: int | None, source: Path | None,
          compiled: bool) -> None:
    """Train, write <folder>/mar.safetensors, config.json and scaling.json, and say how well it does."""
    torch.manual_seed(0)
    device = torch.device(device)
    latents = Latents(runs, device)
    _, tokens, channels = latents.tokens.shape
    config = MARConfig(dim, heads, layers, layers, width, blocks, tokens, channels, BUFFER, num_sampling_steps=STEPS,
                       caption_dim=latents.words.table.embedding_dim,
                       clip_sample_range=round(latents.tokens.abs().max().item(), 3))
    model = LearnedMAR(config, device)
    inputs = latents.inputs
    if source is not None:
        if not source.is_file():
            raise ValueError(f"from must be a file with the weights of a MAR, mar.safetensors, got {source}")
        try:
            load_weights(model.mar, source)
        except CheckpointError as error:
            raise ValueError(f"from must be a MAR of this --dim, --layers, --heads, --width and --blocks: {error}"
                             ) from error
        inputs = inputs | {"--from": source}
    run = TrainingRun(folder, model, lr=lr, weight_decay=0.02, minutes=minutes, steps=steps,
                      configuration=asdict(config), inputs=inputs)
    train_losses = compiling(model, compiled)

    def losses_of(generator):
        drawn = latents.draw(batch, num_timesteps, len(model.schedule), generator)
        with mixed_precision(device):
            return dict(zip(("noise", "bits"), train_losses(drawn)))

    def held_out():
        numbers = measure(model, latents, spread(latents.test, 96), device)
        return {"held_out": numbers["noise"], "held_out_bits": numbers["bits"],
                "epochs": run.step * batch / len(latents.train)}

    run.learn(losses_of, 100, held_out)
    with run.averaged():
        write_weights(folder / "mar.safetensors", model.mar)
        run.report({"training names": lambda: measure(model, latents, spread(latents.train, 256), device),
                    "held-out names": lambda: measure(model, latents, latents.test, device)}, digits=4)
    write_json(folder / "scaling.json", asdict(latents.scaling))
    write_json(folder / "config.json", asdict(config))


@click.command()
@training_options(192, 4, 3, 256, 3, batch=16, lr=1e-3)
def mar(runs, device, **training):
    """Train the MAR on runs/data with the GPT's words; writes runs/mar/mar.safetensors and its JSON files.

    The first run also writes the pictures' continuous tokens, runs/latents.npz.
    """
    train(runs / "mar", runs, device, **training)
