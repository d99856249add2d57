"""The EAGLE head: it learns to predict the target's next hidden state, and so the target's distribution.

The target is the GPT of the stages before, with their pictures; or that of any folder that `Pipeline.load` reads, with
a folder of pictures (see `images`).
"""
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, Protocol

import click
import torch
import torch.nn.functional as F
from torch import Tensor

from specvis.files import locked, write_weights, write_whole
from specvis.models.eagle import EagleHead
from specvis.models.llamagen import GPT, GPTConfig, condition_mask
from specvis.pipelines.checkpoint import load_weights, read_config
from specvis.pipelines.discrete import Pipeline

from .gpt import Captioned, Tokens
from .images import FolderImages
from .run import TrainingRun, compiling, mixed_precision
from .stages import made, options

FILE = "eagle.safetensors"
REJECTED = 4.0  # weight of the share of drafts that speculative sampling rejects, 1 - sum min(P, Q)


class Images(NamedTuple):
    """B tokenized pictures, and what the target is conditioned on."""

    condition: Tensor     # (B, S, dim)
    padding_mask: Tensor  # (B, S) bool  True where the condition is real
    ids: Tensor           # (B, L) int64


class Examples(Protocol):
    """What the head is trained on. `test` (n,) int64 are the numbers of images that are held out."""

    test: Tensor

    def draw(self, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """The fields of `Images`: a training batch, in which some conditions are the null condition."""

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The fields of `Images`: those with these numbers."""

    def hidden(self, images: Images) -> Tensor:
        """Hidden states (B, S - 1 + L, dim) of the target, teacher-forced."""


class StageImages:
    """The pictures of the stages before, as the GPT was trained on them."""

    def __init__(self, captioned: Captioned, tokens: Tokens):
        self.captioned, self.tokens, self.test = captioned, tokens, tokens.test

    def draw(self, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        captions, ids, null, _ = self.tokens.draw(batch, generator)
        return *self.captioned.condition(captions, null), ids

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *self.captioned.condition(self.tokens.captions[rows]), self.tokens.ids[rows]

    def hidden(self, images: Images) -> Tensor:
        return self.captioned.hidden(*images)


def drafted(head: EagleHead, examples: Examples, images: Images,
            noise: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """Teacher-forced drafts; `noise` is added to the hidden states that the head sees.

    Returns:
        hidden states (B, L - 1, dim) that the head expects, and the target's own, at the first L - 1 ids
    """
    condition, padding_mask, ids = images
    prefix_len = condition.shape[1] - 1  # condition entries of the head
    with torch.no_grad():
        target = examples.hidden(images)                                             # (B, prefix_len + L, dim)
    tokens = F.pad(ids[:, :-1], (prefix_len, 0))                                     # token 0 beside a condition
    position_ids = torch.arange(tokens.shape[1], device=ids.device)[None]
    mask = condition_mask(padding_mask[:, :-1], tokens.shape[1])
    hidden = head.read(tokens, target[:, :-1] + noise, position_ids, mask)
    return hidden[:, prefix_len:], target[:, prefix_len + 1:]


def distance(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Cross entropy plus REJECTED times the total variation distance of the distributions, the means over all."""
    target_probs, draft_log_probs = target_logits.softmax(-1), draft_logits.log_softmax(-1)
    cross_entropy = -(target_probs * draft_log_probs).sum(-1).mean()
    return cross_entropy + REJECTED * (target_probs - draft_log_probs.exp()).abs().sum(-1).mean() / 2


@torch.no_grad()
def measure(head: EagleHead, gpt: GPT, examples: Examples, which: Tensor, batch: int = 32) -> dict[str, float]:
    """How well drafts of one token do, without guidance at temperature 1.

    top1, top3: share of positions where the target's likeliest token is among the head's 1 or 3 likeliest;
    acceptance: E[sum min(P, Q)], what speculative sampling accepts of single drafts.
    """
    sums, count = torch.zeros(3, dtype=torch.float64), 0
    for rows in which.split(batch):
        hidden, target = drafted(head, examples, Images(*examples.take(rows)))
        draft_probs, target_probs = (gpt.logits(h).float().softmax(-1) for h in (hidden, target))
        best = target_probs.argmax(-1, keepdim=True)
        hits = draft_probs.topk(3, -1).indices == best
        overlap = torch.minimum(draft_probs, target_probs).sum()
        sums += torch.stack([hits[..., 0].sum(), hits.sum(), overlap]).double().cpu()
        count += best.numel()
    return dict(zip(("top1", "top3", "acceptance"), (sums / count).tolist()))


def train(folder: Path, gpt: GPT, examples: Examples, device: torch.device, *, lr: float, minutes: float | None,
          steps: int | None, batch: int, noise: float, compiled: bool, inputs: dict[str, Path] | None = None) -> None:
    """Train a head for the GPT, write <folder>/eagle.safetensors, and say how well it does."""
    config, model = gpt.config, EagleHead(gpt.config)
    model.embed_tokens.weight.data.copy_(gpt.tok_embeddings.weight)  # the target's, frozen
    model.embed_tokens.weight.requires_grad_(False)
    model.to(device)
    run = TrainingRun(folder, model, lr=lr, weight_decay=0.01, minutes=minutes, steps=steps,
                      configuration=asdict(config), inputs=inputs)

    def loss_of(images, blur):
        with mixed_precision(device):
            hidden, target = drafted(model, examples, images, blur)
            draft_logits, target_logits = gpt.logits(hidden).float(), gpt.logits(target).float()
        return F.smooth_l1_loss(hidden.float(), target.float()) + distance(draft_logits, target_logits)

    train_loss = compiling(loss_of, compiled)
    shape = (batch, config.condition_tokens + config.tokens - 2, config.dim)

    def losses_of(generator):
        with torch.no_grad(), mixed_precision(device):
            images = Images(*examples.draw(batch, generator))
        blur = (torch.rand(shape, generator=generator) - 0.5).to(device) * noise
        return {"loss": train_loss(images, blur)}

    held_out = examples.test[:: max(1, len(examples.test) // 64)]
    run.learn(losses_of, 100, lambda: measure(model, gpt, examples, held_out))
    with run.averaged():
        write_weights(folder / FILE, model)
        numbers = measure(model, gpt, examples, examples.test)
    run.log(**numbers)
    click.echo("held out: " + ", ".join(f"{key} {value:.3f}" for key, value in numbers.items()))


@click.command()
@options(
    click.option("--target", type=click.Path(path_type=Path),
                 help="Folder with a model, as `specvis convert` makes it. [default: the GPT of the stages before]"),
    click.option("--images", type=click.Path(path_type=Path),
                 help="With --target: folder with pictures and their captions, or a folder of pictures for each "
                      "class."),
    click.option("--text-encoder", type=click.Path(path_type=Path),
                 help="With --target: folder with FLAN-T5-XL, for a model whose prompts are captions."),
    click.option("--out", type=click.Path(path_type=Path),
                 help="With --target: folder for eagle.safetensors. [default: that of --target]"),
    click.option("--replace", is_flag=True, help="With --target: a head that is there is replaced."),
    click.option("--noise", default=0.2, show_default=True, help="Width of the uniform noise on the hidden states."),
    batch=16, lr=1.5e-3)
def eagle(runs, device, target, images, text_encoder, out, replace, **training):
    """Train an EAGLE head on the GPT, or on another target; writes runs/eagle/eagle.safetensors.

    With --target and --images it is written to the target's folder too. Its run is in runs/eagle-NAME, with the
    pictures' tokens.
    """
    torch.manual_seed(0)
    device = torch.device(device)
    if target is None:
        if given := [name for name, value in (("images", images), ("text_encoder", text_encoder), ("out", out),
                                              ("replace", replace)) if value]:
            raise ValueError(f"{given[0]} must not be given without --target")
        captioned, tokens = stages(runs, device)
        files = (tokens.path, runs / "gpt" / "gpt.safetensors", runs / "gpt" / "words.safetensors")
        return train(runs / "eagle", captioned.gpt, StageImages(captioned, tokens), device,
                     inputs={file.name: file for file in files}, **training)
    if images is None:
        raise ValueError("images must be given with --target: a folder with pictures that the head learns from")
    out = out or target
    if (out / FILE).exists() and not replace:
        raise ValueError(f"out must be a folder without {FILE}, or --replace must be given, got {out}")
    folder = runs / f"eagle-{target.resolve().name}"
    pipeline = Pipeline.load(target, device, text_encoder=text_encoder)
    examples = FolderImages(pipeline, target, images, folder, training["batch"], lr=training["lr"],
                            noise=training["noise"])
    train(folder, pipeline.gpt, examples, device, **training)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        write_whole(out / FILE, (folder / FILE).read_bytes())
    click.echo(f"{out / FILE}: " + (f"specvis generate --model {target} --method eagle2 --prompt .."
                                    if out.resolve() == target.resolve() else
                                    f"to draw with it, copy it into {target}, the folder of its target"))


def stages(runs: Path, device: torch.device) -> tuple[Captioned, Tokens]:
    """The GPT that the stages before made, and its pictures."""
    tokens = Tokens(runs, device)
    config = read_config(made(runs / "gpt" / "config.json", "gpt"), GPTConfig)
    captioned = Captioned(config, tokens.vocabulary).to(device).requires_grad_(False).eval()
    for part in ("gpt", "words"):
        load_weights(getattr(captioned, part), made(runs / "gpt" / f"{part}.safetensors", "gpt"))
    return captioned, tokens
