"""The tokenizer: 64-pixel pictures to 16 x 16 tokens out of 4096 codes."""
import json
from dataclasses import asdict
from pathlib import Path

import click
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from ..models.vq import VQ, VQConfig
from .run import Run

CONFIG = VQConfig(channels=32, decoder_channels=48, multipliers=(1, 2), residual_blocks=1, z_channels=64,
                  codebook_size=4096, codebook_dim=8, groups=8, patch=2)
PHASES = (0.15, 0.75)  # shares of the run: continuous latents until the first, moving codes until the second, then fixed
NOISE = 0.1            # on the continuous latents, about the error that 4096 codes will make
DECAY = 0.99           # of the running means that the moving codes are
RARE = 0.03            # a code used less often than this share of its fair part is put elsewhere
BACKGROUND = 1 / 16    # white patches for each other one in the samples that codes are clustered from


class Pictures:
    """The pictures of <runs>/data: drawn by weight, as floats in [-1, 1]."""

    def __init__(self, runs: Path):
        arrays = np.load(runs / "data" / "pictures.npz")
        self.pictures = torch.from_numpy(arrays["pictures"]).permute(0, 3, 1, 2)
        held_out = torch.from_numpy(arrays["held_out"])
        self.train, self.test = (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]
        self.weights = torch.from_numpy(arrays["weights"]).float()[self.train]
        self.arrays = arrays

    def take(self, rows: Tensor) -> Tensor:
        return self.pictures[rows].float() / 127.5 - 1

    def draw(self, batch: int, generator: torch.Generator) -> Tensor:
        return self.take(self.train[torch.multinomial(self.weights, batch, replacement=True, generator=generator)])


class Learned(nn.Module):
    """The tokenizer and the running means that its codes are."""

    def __init__(self, config: VQConfig):
        super().__init__()
        self.vq = VQ(config)
        self.vq.quantize.embedding.weight.requires_grad_(False)
        self.register_buffer("phase", torch.tensor(0))
        self.register_buffer("used", torch.ones(config.codebook_size))
        self.register_buffer("sums", self.vq.codebook().clone())

    @torch.no_grad()
    def cluster(self, sample: Tensor, generator: torch.Generator, rounds: int = 12) -> None:
        """Spherical k-means of the sample (n, D), from random members of it, becomes the codes."""
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
        """One step of the running means; rarely used codes restart at foreground latents. Returns how many."""
        share = (1 - DECAY) * len(self.used) / len(tokens)      # a code with its fair part of the tokens has used = 1
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
def sample_latents(vq: VQ, data: Pictures, pictures: int, generator: torch.Generator) -> Tensor:
    """Latents (n, D) of drawn training pictures, with few of the white patches: they need few codes."""
    inside, outside = [], []
    for _ in range(pictures // 128):
        images = data.draw(128, generator).to(vq.post_quant_conv.weight.device)
        with torch.autocast(images.device.type, torch.bfloat16):
            latents = vq.latents(images).flatten(0, 2)
        mask = foreground(images, vq.config.stride).flatten()
        inside.append(latents[mask])
        outside.append(latents[~mask])
    inside, outside = torch.cat(inside), torch.cat(outside)
    keep = torch.randperm(len(outside), generator=generator)[: int(len(inside) * BACKGROUND)]
    return torch.cat([inside, outside[keep.to(outside.device)]])


def psnr(vq: VQ, images: Tensor, quantize: bool = True) -> float:
    """Mean over pictures, in dB, of reconstructions from tokens or else from continuous latents."""
    parts = []
    for batch in images.split(64):
        result = vq.decode(vq.encode(batch)) if quantize else vq.decode_latents(vq.latents(batch)).clamp(-1, 1)
        parts.append(-10 * ((result - batch) / 2).square().mean((1, 2, 3)).log10())
    return torch.cat(parts).mean().item()


def perplexity(counts: Tensor) -> float:
    """The number of equally used codes that would have the entropy of these counts (V,)."""
    share = counts / counts.sum().clamp(min=1)
    return torch.exp(-(share * share.clamp(min=1e-12).log()).sum()).item()


def sheet(vq: VQ, images: Tensor, path: Path) -> None:
    """Pictures above their reconstructions."""
    pairs = torch.cat([images.unflatten(0, (-1, 16)), vq.decode(vq.encode(images)).unflatten(0, (-1, 16))], 1)
    rows = pairs.unflatten(1, (2, 16)).flatten(0, 1)                                   # (rows, 16, 3, H, W)
    canvas = rows.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    Image.fromarray(((canvas.clamp(-1, 1) + 1) * 127.5).round().byte().numpy()).save(path)


@click.command()
@click.option("--runs", type=click.Path(path_type=Path), default="runs", show_default=True,
              help="Folder of the training stages.")
@click.option("--minutes", type=float, help="Length of the run in minutes, counted across interruptions.")
@click.option("--steps", type=int, help="Length of the run in steps, instead of minutes.")
@click.option("--batch", default=16, show_default=True, help="Pictures a step.")
@click.option("--lr", default=2e-3, show_default=True, help="Peak learning rate.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
def tokenizer(runs, minutes, steps, batch, lr, device):
    """Train the tokenizer on runs/data; writes runs/tokenizer/ and the tokens of all pictures, runs/tokens.npz."""
    torch.manual_seed(0)
    device = torch.device(device)
    data = Pictures(runs)
    model = Learned(CONFIG).to(device)
    run = Run(runs / "tokenizer", model, lr=lr, weight_decay=1e-4, minutes=minutes, steps=steps)
    vq, counts = model.vq, torch.zeros(CONFIG.codebook_size, device=device)
    test = data.take(data.test[:: max(1, len(data.test) // 64)]).to(device)
    for step in run:
        generator = run.generator(step)
        if model.phase < sum(run.done >= share for share in PHASES):
            model.cluster(sample_latents(vq, data, 1024, generator), generator)
            model.phase += 1
        images = data.draw(batch, generator).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            latents = vq.latents(images)                                               # (B, h, w, D)
        tokens, moved, commitment = None, 0, torch.zeros((), device=device)
        if model.phase == 0:
            noise = torch.randn(latents.shape, generator=generator).to(device)
            given = F.normalize(latents + NOISE * noise, dim=-1)
        else:
            tokens = (latents.detach().flatten(0, 2) @ vq.codebook().T).argmax(-1)
            quantized = vq.codebook()[tokens].view_as(latents)
            commitment = (latents - quantized).square().sum(-1).mean()
            given = latents + (quantized - latents).detach()
        with torch.autocast(device.type, torch.bfloat16):
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
            run.log(phase=model.phase, l1=l1.detach(), psnr=quality, perplexity=perplexity(counts), moved=moved,
                    commitment=commitment.detach(), lr=run.lr)
            counts.zero_()

    folder = runs / "tokenizer"
    weights = {name: value.half().contiguous() for name, value in vq.state_dict().items() if "codebook_used" not in name}
    save_file(weights, folder / "tokenizer.safetensors")
    (folder / "config.json").write_text(json.dumps(asdict(CONFIG), indent=1))
    half = {name: value.float() for name, value in load_file(folder / "tokenizer.safetensors").items()}
    vq.load_state_dict(half | {"quantize.codebook_used": vq.quantize.codebook_used})  # tokens as users will get them
    with torch.no_grad():
        rows = torch.arange(len(data.pictures))
        ids = torch.cat([vq.encode(data.take(r).to(device)).cpu() for r in tqdm(rows.split(128), desc="tokenize")])
        test = data.take(data.test).to(device)
        click.echo(f"held-out names: PSNR {psnr(vq, test):.2f} dB; codes used {len(ids.unique())}")
        sheet(vq.cpu(), test.cpu()[:: max(1, len(test) // 64)][:64], folder / "reconstructions.png")
    arrays = data.arrays
    np.savez(runs / "tokens.npz", tokens=ids.numpy().astype(np.uint16), condition=arrays["captions"],
             weight=arrays["weights"], **{name: arrays[name] for name in ("styles", "names", "categories", "held_out")})
