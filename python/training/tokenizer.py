"""The tokenizer: it turns pictures of 64 x 64 pixels into 16 x 16 tokens, each one of 4096 codes."""
from dataclasses import asdict
from pathlib import Path

import click
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from specvis.files import locked, write_json, write_tensors, write_whole
from specvis.models.vq import VQ, VQConfig
from specvis.pipelines.checkpoint import load_weights, read_config, read_weights

from .run import TrainingRun, mixed_precision
from .stages import Sampled, arrays_of, options, spread

CONFIG = VQConfig(channels=32, decoder_channels=48, multipliers=(1, 2), residual_blocks=1, z_channels=64,
                  codebook_size=4096, codebook_dim=8, groups=8, patch=2)
PHASES = (0.15, 0.75)  # shares of the run: latents are continuous until the first, codes move until the second
NOISE = 0.1            # on the continuous latents, about the error that 4096 codes will make
DECAY = 0.99           # moving codes are running means with this decay
RARE = 0.03            # a code used less often than this share of its fair part is put elsewhere
BACKGROUND = 1 / 16    # white patches for each other one in the samples that codes are clustered from
COUNTS = "quantize.codebook_used"  # a statistic of the official checkpoints that nothing reads


class PictureData(Sampled):
    """The pictures of <runs>/data: drawn by weight, as floats in [-1, 1]."""

    def __init__(self, runs: Path):
        arrays = arrays_of(runs / "data" / "pictures.npz", "data", "pictures", "captions", "held_out", "weights")
        self.pictures = torch.from_numpy(arrays["pictures"]).permute(0, 3, 1, 2)
        super().__init__(arrays["held_out"], arrays["weights"])
        self.arrays = arrays

    def take(self, rows: Tensor) -> Tensor:
        """(B,) int64 -> (B, 3, 64, 64) float32."""
        return self.pictures[rows].float() / 127.5 - 1

    def draw(self, batch: int, generator: torch.Generator) -> Tensor:
        """Training pictures (B, 3, 64, 64) float32, by weight."""
        return self.take(self.rows(batch, generator))


class LearnedTokenizer(nn.Module):
    """The tokenizer, and the running means from which its codes are made."""

    def __init__(self, config: VQConfig):
        super().__init__()
        self.vq = VQ(config)
        self.vq.quantize.embedding.weight.requires_grad_(False)
        self.register_buffer("phase", torch.tensor(0))
        self.register_buffer("used", torch.ones(config.codebook_size))
        self.register_buffer("sums", self.vq.codebook().clone())

    @torch.no_grad()
    def cluster(self, sample: Tensor, generator: torch.Generator, rounds: int = 12) -> None:
        """Set the codes by spherical k-means on the sample (n, D), which starts from random members of it."""
        size = len(self.used)
        codes = sample[torch.randperm(len(sample), generator=generator)[:size].to(sample.device)]
        for _ in tqdm(range(rounds), desc="cluster", leave=False):
            tokens = torch.cat([(part @ codes.T).argmax(-1) for part in sample.split(16384)])
            count = torch.bincount(tokens, minlength=size).float()
            sums = torch.zeros_like(codes).index_add_(0, tokens, sample)
            spare = sample[torch.randint(len(sample), (size,), generator=generator).to(sample.device)]
            codes = torch.where(count[:, None] > 0, F.normalize(sums, dim=-1), spare)
        self.vq.quantize.embedding.weight.copy_(codes)
        self.used.fill_(1.0)
        self.sums.copy_(codes)

    @torch.no_grad()
    def move_codes(self, latents: Tensor, tokens: Tensor, inside: Tensor, generator: torch.Generator) -> int:
        """One step of the running means. Rarely used codes start again at foreground latents; returns how many did.

        latents: (n, D) float32 of length 1; tokens: (n,) int64, their nearest codes; inside: (n,) bool, the foreground
        """
        share = (1 - DECAY) * len(self.used) / len(tokens)  # used = 1: a fair part of the tokens
        self.used.mul_(DECAY).index_add_(0, tokens, torch.ones_like(latents[:, 0]), alpha=share)
        self.sums.mul_(DECAY).index_add_(0, tokens, latents, alpha=share)
        source = latents[inside]
        rare = (self.used < RARE).nonzero()[:, 0][: len(source)]
        chosen = source[torch.randperm(len(source), generator=generator)[: len(rare)].to(source.device)]
        self.used[rare], self.sums[rare] = 0.5, 0.5 * chosen
        self.vq.quantize.embedding.weight.copy_(F.normalize(self.sums, dim=-1))
        return len(rare)


def foreground(images: Tensor, stride: int) -> Tensor:
    """(B, 3, H, W) -> (B, h * w) bool: tokens whose pixels are not all white."""
    return (-F.max_pool2d(-images.amin(1, keepdim=True), stride) < 0.92).flatten(1)


@torch.no_grad()
def sample_latents(vq: VQ, data: PictureData, pictures: int, generator: torch.Generator) -> Tensor:
    """Latents (n, D) of drawn training pictures, with few of the white patches, which need few codes."""
    inside, outside = [], []
    for _ in range(pictures // 128):
        images = data.draw(128, generator).to(vq.post_quant_conv.weight.device)
        with mixed_precision(images.device):
            latents = vq.latents(images).flatten(0, 2)
        mask = foreground(images, vq.config.stride).flatten()
        inside.append(latents[mask])
        outside.append(latents[~mask])
    inside, outside = torch.cat(inside), torch.cat(outside)
    keep = torch.randperm(len(outside), generator=generator)[: int(len(inside) * BACKGROUND)]
    return torch.cat([inside, outside[keep.to(outside.device)]])


def psnr(vq: VQ, images: Tensor, quantize: bool = True) -> float:
    """The mean PSNR of reconstructions in dB, from tokens or from continuous latents."""
    parts = []
    for batch in images.split(64):
        if quantize:
            result = vq.decode(vq.encode(batch))
        else:
            result = vq.decode_latents(vq.latents(batch)).clamp(-1, 1)
        parts.append(-10 * ((result - batch) / 2).square().mean((1, 2, 3)).log10())
    return torch.cat(parts).mean().item()


def perplexity(counts: Tensor) -> float:
    """The number of equally used codes that would have the entropy of these counts (V,)."""
    share = counts / counts.sum().clamp(min=1)
    return torch.exp(-(share * share.clamp(min=1e-12).log()).sum()).item()


def sheet(vq: VQ, images: Tensor, path: Path, across: int = 16) -> None:
    """Rows of pictures, each above the row of their reconstructions."""
    across = min(across, len(images))
    images = images[: len(images) // across * across]
    pairs = torch.stack([x.unflatten(0, (-1, across)) for x in (images, vq.decode(vq.encode(images)))], 1)
    canvas = pairs.flatten(0, 1).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)    # (height, width, 3)
    picture = Image.fromarray(((canvas + 1) * 127.5).round().byte().cpu().numpy())
    write_whole(path, lambda file: picture.save(file, "PNG"))


@torch.no_grad()
def write_tokens(vq: VQ, data: PictureData, path: Path) -> None:
    """Tokenize all pictures, and say how evenly the codes are used."""
    tokens, inside = [], []
    for rows in tqdm(torch.arange(len(data.pictures)).split(128), desc="tokenize"):
        images = data.take(rows).to(vq.post_quant_conv.weight.device)
        tokens.append(vq.encode(images).cpu())
        inside.append(foreground(images, vq.config.stride).cpu())
    tokens, inside = torch.cat(tokens), torch.cat(inside)
    for part, ids in (("all", tokens.flatten()), ("foreground", tokens[inside])):
        counts = torch.bincount(ids, minlength=vq.config.codebook_size).double()
        used = int((counts > 0).sum())
        click.echo(f"{part}: {len(ids)} tokens, {used} codes, perplexity {perplexity(counts):.0f}")
    arrays = {name: data.arrays[name] for name in ("styles", "names", "categories", "held_out")}
    arrays |= {"condition": data.arrays["captions"], "weight": data.arrays["weights"]}
    write_whole(path, lambda file: np.savez(file, tokens=tokens.numpy().astype(np.uint16), **arrays))


@click.command()
@options(batch=16, lr=2e-3, compiled=False)
@click.option("--keep", type=click.Path(path_type=Path),
              help="Folder of a tokenizer, such as the package's weights, which is used as it is.")
def tokenizer(runs, minutes, steps, batch, lr, device, keep):
    """Train the tokenizer on runs/data; writes runs/tokenizer/ and the pictures' tokens, runs/tokens.npz.

    With --keep none is trained.

    tokens.npz: tokens (N, 256) uint16; condition (N, 10) int16; weight (N,) float64; held_out (N,) bool; and
    styles, names, categories (N,) text. A finished run writes them again.
    """
    torch.manual_seed(0)
    device = torch.device(device)
    data = PictureData(runs)
    if keep is not None:
        vq = VQ(read_config(keep / "tokenizer.json", VQConfig)).to(device).eval()
        finish(vq, runs, data, read_weights(keep / "tokenizer.safetensors"))
        return
    if minutes is None and steps is None:
        raise ValueError("minutes or steps must be set: shares of the length say when codes are made")
    model = LearnedTokenizer(CONFIG).to(device)
    run = TrainingRun(runs / "tokenizer", model, lr=lr, weight_decay=1e-4, minutes=minutes, steps=steps,
                      configuration=asdict(CONFIG), inputs={"pictures.npz": runs / "data" / "pictures.npz"})
    vq, counts = model.vq, torch.zeros(CONFIG.codebook_size, device=device)
    test = data.take(spread(data.test, 64)).to(device)
    for step in run:
        generator = run.generator(step)
        if model.phase < sum(run.done >= share for share in PHASES):
            model.cluster(sample_latents(vq, data, 1024, generator), generator)
            model.phase += 1
        images = data.draw(batch, generator).to(device)
        with mixed_precision(device):
            latents = vq.latents(images)                                                # (B, h, w, D)
        tokens, moved, commitment = None, 0, torch.zeros((), device=device)
        if model.phase == 0:
            noise = torch.randn(latents.shape, generator=generator).to(device)
            given = F.normalize(latents + NOISE * noise, dim=-1)
        else:
            tokens = (latents.detach().flatten(0, 2) @ vq.codebook().T).argmax(-1)
            quantized = vq.codebook()[tokens].view_as(latents)
            commitment = (latents - quantized).square().sum(-1).mean()
            given = latents + (quantized - latents).detach()
        with mixed_precision(device):
            result = vq.decode_latents(given).float()
        difference = result - images
        edges = sum(difference.diff(dim=d).abs().mean() for d in (-1, -2))
        l1 = difference.abs().mean()
        run.descend(l1 + 0.5 * edges + difference.square().mean() + 0.25 * commitment)
        if model.phase == 1:
            inside = foreground(images, CONFIG.stride).flatten()
            moved = model.move_codes(latents.detach().flatten(0, 2), tokens, inside, generator)
        if tokens is not None:
            counts.index_add_(0, tokens, torch.ones_like(tokens, dtype=counts.dtype))
        if run.step % 100 == 99:
            with torch.no_grad():
                quality = psnr(vq, test, quantize=tokens is not None)
            run.log(phase=model.phase, l1=l1.detach(), psnr=quality, perplexity=perplexity(counts),
                    moved=moved, commitment=commitment.detach(), lr=run.lr)
            counts.zero_()
    weights = {name: value.half().contiguous() for name, value in vq.state_dict().items() if name != COUNTS}
    finish(vq, runs, data, weights)


def finish(vq: VQ, runs: Path, data: PictureData, weights: dict[str, Tensor]) -> None:
    """Write the tokenizer of these weights, the tokens as users will get them, and how well it does."""
    folder = runs / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "tokenizer.safetensors", weights)
    write_json(folder / "config.json", asdict(vq.config))
    load_weights(vq, folder / "tokenizer.safetensors")
    with locked(runs, "runs"):
        write_tokens(vq, data, runs / "tokens.npz")
    with torch.no_grad():
        device = vq.post_quant_conv.weight.device
        click.echo(f"held-out names: PSNR {psnr(vq, data.take(data.test).to(device)):.2f} dB")
        sheet(vq, data.take(spread(data.test, 64)).to(device), folder / "reconstructions.png")
