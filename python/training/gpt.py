"""The text-conditional GPT: LlamaGen's architecture on the tokens of the emoji pictures."""
from dataclasses import asdict
from pathlib import Path

import click
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from specvis.files import write_json, write_weights
from specvis.models.llamagen import GPT, GPTConfig
from specvis.models.words import Words, repeated
from specvis.pipelines.checkpoint import load_weights, read_config, read_weights
from specvis_kernels import codebook_neighbors

from .run import TrainingRun, compiling, mixed_precision
from .stages import Sampled, arrays_of, made, options, spread, vocabulary_of

CONDITION_TOKENS = 32
NULL_SHARE = 0.1  # the null condition replaces this share of the training captions, for guidance
JITTER = 0.02     # squared distance at which a code replaces another 1/e times as often as itself


class Tokens(Sampled):
    """The tokenized pictures of <runs>/tokens.npz: `ids` (N, 256), `captions` (N, S).

    Training draws them by weight and exchanges codes for near ones, code c for code d with probability in
    proportion to exp(-|c - d|^2 / JITTER): they look alike (0.5 dB), and the model learns that they may stand for
    each other. What it is to predict are these probabilities. (RQ-Transformer, arXiv:2203.01941, does both, with its
    codes' distances to the latents.)
    """

    def __init__(self, runs: Path, device: torch.device):
        self.path = runs / "tokens.npz"
        arrays = arrays_of(self.path, "tokenizer", "tokens", "condition", "held_out", "weight")
        self.ids = torch.from_numpy(arrays["tokens"].astype(np.int64)).to(device)
        captions = [repeated([int(word) for word in row if word], CONDITION_TOKENS) for row in arrays["condition"]]
        self.captions = torch.tensor(captions, device=device)
        super().__init__(arrays["held_out"], arrays["weight"])
        self.vocabulary = vocabulary_of(runs)
        weights = read_weights(made(runs / "tokenizer" / "tokenizer.safetensors", "tokenizer"))
        self.codebook = F.normalize(weights["quantize.embedding.weight"].float(), dim=-1)
        near = codebook_neighbors(self.codebook, 16).long()
        near = torch.cat([torch.arange(len(near))[:, None], near], 1)                   # (V, 17), itself first
        chances = torch.exp(-(self.codebook[:, None] - self.codebook[near]).square().sum(-1) / JITTER)
        self.near, self.chances = near.to(device), (chances / chances.sum(-1, keepdim=True)).to(device)

    def draw(self, batch: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """A training batch: captions (B, S), ids (B, 256), null (B,) bool: which get no caption, original (B, 256).

        `ids` are codes near those in `original`.
        """
        rows = self.rows(batch, generator)
        null = torch.rand(batch, generator=generator) < NULL_SHARE
        original = self.ids[rows]
        choice = torch.multinomial(self.chances.cpu()[original.flatten().cpu()], 1, generator=generator)
        ids = self.near[original].gather(-1, choice.view(*original.shape, 1).to(original.device))[..., 0]
        return self.captions[rows], ids, null.to(ids.device), original

    def cross_entropy(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of `logits` (B, 256, V) and the chances of the codes near `ids` (B, 256)."""
        near = logits.gather(-1, self.near[ids])
        return (logits.logsumexp(-1) - (near * self.chances[ids]).sum(-1)).mean()


class CausalReading:
    """What `Reading` is for entries that each see all before them and are not cached.

    Compiled on a CPU it takes half as long, forward and backward, as PyTorch's attention with a mask: the queries are
    read in PARTS, and a part does not multiply by what is after it; rotations by real numbers are compiled, complex
    ones are not.
    """

    PARTS = 2

    def __init__(self, gpt: GPT, entries: int):
        self.cosine, self.sine = gpt.rotations[:entries, None].unbind(-1)       # (N, 1, D / 2)
        self.mask = torch.full((entries, entries), -torch.inf).triu(1)
        self.bounds = [entries * i // self.PARTS for i in range(self.PARTS + 1)]

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """Queries or keys (R, N, H, D) -> (R, H, N, D), turned by the rotations of their cells."""
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([a * self.cosine - b * self.sine, a * self.sine + b * self.cosine], -1)
        return turned.flatten(-2).to(x.dtype).transpose(1, 2)

    def attend(self, qkv: torch.Tensor, heads: int, layer: int) -> torch.Tensor:
        """Attention of the queries in qkv (R, N, 3 * H * D) to the entries up to theirs: (R, N, H * D)."""
        q, k, v = qkv.unflatten(-1, (3, heads, -1)).unbind(2)
        q, k, v = self.turn(q) * q.shape[-1] ** -0.5, self.turn(k), v.transpose(1, 2)
        parts = []
        for first, end in zip(self.bounds, self.bounds[1:]):
            scores = q[:, :, first:end] @ k[:, :, :end].transpose(-1, -2)
            weights = (scores.float() + self.mask[first:end, :end]).softmax(-1)
            parts.append(weights.to(q.dtype) @ v[:, :, :end])
        return torch.cat(parts, 2).transpose(1, 2).flatten(2)


class Captioned(nn.Module):
    """The GPT and the embeddings of its captions' words, trained together."""

    def __init__(self, config: GPTConfig, vocabulary: list[str]):
        super().__init__()
        self.words = Words(vocabulary, config.condition_tokens, config.caption_dim)
        self.gpt = GPT(config)
        self.reading = CausalReading(self.gpt, config.condition_tokens + config.tokens - 1)

    def condition(self, captions, null=None):
        """Captions (B, S) -> embeddings (B, S, dim), padding_mask (B, S); the null condition where `null` (B,)."""
        condition, padding_mask = self.gpt.condition(self.words(captions))
        if null is not None:
            condition = torch.where(null[:, None, None], self.gpt.null_condition(len(captions)), condition)
        return condition, padding_mask

    def logits(self, captions, ids, null=None):
        """Logits (B, 256, V) float32 of ids (B, 256)."""
        hidden = self.hidden(*self.condition(captions, null), ids)
        return self.gpt.logits(hidden[:, captions.shape[1] - 1:]).float()

    def hidden(self, condition, padding_mask, ids):
        """What `gpt.teacher_forced` returns, hidden states (B, S - 1 + 256, dim), for captions without padding."""
        if ids.device.type != "cpu":
            return self.gpt.teacher_forced(condition, padding_mask, ids)
        return self.gpt(torch.cat([condition, self.gpt.tok_embeddings(ids[:, :-1])], 1), self.reading)


def start(model: Captioned, codebook: torch.Tensor, generator: torch.Generator) -> None:
    """Initialize what learns faster from better values than from small random numbers.

    The embeddings and the output layer are projections of the codes, so that near codes mean nearly the same from the
    beginning. The embeddings of captions are as large as the embeddings of tokens.
    """
    gpt, words = model.gpt, model.words.table.weight
    for table, scale in ((gpt.tok_embeddings.weight, 0.1), (gpt.output.weight, 0.05)):
        projection = torch.randn(codebook.shape[1], gpt.config.dim, generator=generator) * scale
        table.data.copy_(codebook @ projection)
    project = gpt.cls_embedding.cap_proj
    project.fc1.weight.data.normal_(std=1 / (words.std().item() * words.shape[1] ** 0.5), generator=generator)
    project.fc2.weight.data.normal_(std=gpt.config.dim ** -0.5, generator=generator)
    gpt.cls_embedding.uncond_embedding.data.normal_(std=words.std().item(), generator=generator)


def grow(model: Captioned, folder: Path) -> None:
    """Start from the weights of a GPT in `folder`, of as many layers or fewer.

    Layers that it lacks are put after its own, each a copy of the one before with outputs of 0. So at first the deeper
    model computes what the other one does. (To train a shallow model first and stack its layers takes less time in all:
    Gong et al., "Efficient training of BERT by progressively stacking", ICML 2019.)
    """
    mine, needed = model.gpt.config, ("config.json", "gpt.safetensors", "words.safetensors")
    if missing := [name for name in needed if not (folder / name).is_file()]:
        raise ValueError(f"from must be a folder with {', '.join(needed)}, got {folder}, which has no {missing[0]}")
    theirs = read_config(folder / "config.json", GPTConfig)
    if theirs.layers > mine.layers:
        raise ValueError(f"layers must be at least {theirs.layers}, as in {folder}, got {mine.layers}")
    for name, wanted in asdict(theirs).items():
        if name not in ("layers", "dropout") and wanted != getattr(mine, name):
            raise ValueError(f"{name.replace('_', '-')} must be {wanted}, as in {folder}, got {getattr(mine, name)}")
    load_weights(model.words, folder / "words.safetensors")
    shallow, before = GPT(theirs), -1
    load_weights(shallow, folder / "gpt.safetensors")
    model.gpt.load_state_dict(shallow.state_dict(), strict=False)
    for layer, block in enumerate(model.gpt.layers):
        number = layer * theirs.layers // mine.layers
        block.load_state_dict(shallow.layers[number].state_dict())
        if number == before:
            for outputs in (block.attention.wo, block.feed_forward.w2):
                nn.init.zeros_(outputs.weight)
        before = number


@torch.no_grad()
def measure(model: Captioned, tokens: Tokens, which: torch.Tensor, batch: int = 32) -> dict[str, float]:
    """Mean negative log-likelihood, top-1 and top-10 probability and entropy (nats) over pictures `which`."""
    sums, count = torch.zeros(4, dtype=torch.float64), 0
    for rows in which.split(batch):
        log_probs = model.logits(tokens.captions[rows], tokens.ids[rows]).log_softmax(-1)
        probs = log_probs.exp()
        top = probs.topk(10, -1).values
        nll = -log_probs.gather(-1, tokens.ids[rows][..., None])
        entropy = -(probs * log_probs).sum(-1)
        sums += torch.stack([nll.sum(), top[..., 0].sum(), top.sum(), entropy.sum()]).double().cpu()
        count += nll.numel()
    return dict(zip(("nll", "top1", "top10", "entropy"), (sums / count).tolist()))


def training_options(dim: int, layers: int, heads: int, **defaults):
    """The options of a stage that trains a GPT."""
    return options(
        click.option("--dim", type=click.IntRange(1), default=dim, show_default=True, help="Width of the model."),
        click.option("--layers", type=click.IntRange(1), default=layers, show_default=True),
        click.option("--heads", type=click.IntRange(1), default=heads, show_default=True),
        click.option("--dropout", type=click.FloatRange(0, 1, max_open=True), default=0.0, show_default=True),
        **defaults)


def train(folder: Path, model: Captioned, tokens: Tokens, device: torch.device, *, lr: float, minutes: float | None,
          steps: int | None, batch: int, compiled: bool, source: Path | None = None,
          inputs: dict[str, Path] | None = None) -> None:
    """Train, write <folder>/gpt.safetensors, words.safetensors and config.json, and say how well it does.

    source: folder of the GPT to start from, see `grow`; inputs: files that it depends on, besides the tokens
    """
    inputs = {"tokens.npz": tokens.path, **(inputs or {})}
    start(model, tokens.codebook, torch.Generator().manual_seed(0))
    if source is not None:
        grow(model, source)
        inputs["--from"] = source / "gpt.safetensors"
    model.to(device)
    run = TrainingRun(folder, model, lr=lr, weight_decay=0.05, minutes=minutes, steps=steps,
                      configuration=asdict(model.gpt.config), inputs=inputs)

    def loss_of(captions, ids, null, original):
        with mixed_precision(device):
            logits = model.logits(captions, ids, null)
        return tokens.cross_entropy(logits, original)

    def held_out():
        numbers = measure(model, tokens, spread(tokens.test, 96))
        return {"held_out": numbers["nll"], "top1": numbers["top1"], "epochs": run.step * batch / len(tokens.train)}

    train_loss = compiling(loss_of, compiled)
    run.learn(lambda generator: {"loss": train_loss(*tokens.draw(batch, generator))}, 250, held_out)
    with run.averaged():
        for part in ("gpt", "words"):
            write_weights(folder / f"{part}.safetensors", getattr(model, part))
        write_json(folder / "config.json", asdict(model.gpt.config))
        run.report({"training names": lambda: measure(model, tokens, spread(tokens.train, 256)),
                    "held-out names": lambda: measure(model, tokens, tokens.test)}, digits=3)


def captioned(tokens: Tokens, dim: int, layers: int, heads: int, dropout: float, caption_dim: int) -> Captioned:
    config = GPTConfig(dim, layers, heads, vocabulary=len(tokens.codebook), grid=16,
                       condition_tokens=CONDITION_TOKENS, caption_dim=caption_dim, dropout=dropout)
    return Captioned(config, tokens.vocabulary)


@click.command()
@training_options(192, 6, 3, batch=8, lr=1.2e-3)
@click.option("--from", "source", type=click.Path(path_type=Path),
              help="Folder of a GPT whose weights training starts from, instead of random ones. It may have fewer "
                   "layers.")
def gpt(runs, dim, layers, heads, dropout, device, **training):
    """Train the GPT on runs/tokens.npz; writes runs/gpt/gpt.safetensors, words.safetensors and config.json."""
    torch.manual_seed(0)
    device = torch.device(device)
    tokens = Tokens(runs, device)
    train(runs / "gpt", captioned(tokens, dim, layers, heads, dropout, dim), tokens, device, **training)
