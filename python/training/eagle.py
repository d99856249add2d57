"""The EAGLE head: it learns to predict the target's next hidden state, and so the target's distribution.

The target is the GPT of the stages before, with their pictures; that of any folder that `Pipeline.load` reads, with a
folder of pictures (see `images`); or a model of one of transformers' families, with its own draws (see `family`).
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
from specvis.models.interface import TargetModel, codes, id_range, num_tokens
from specvis.models.llamagen import GPT, GPTConfig
from specvis.models.transformers_eagle import TransformersEagleHead
from specvis.pipelines.checkpoint import load_weights, read_config
from specvis.pipelines.discrete import Pipeline
from specvis.pipelines.families import FAMILIES, FamilyPipeline, found

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
    hidden: Tensor | None = None  # (B, S - 1 + L, dim) of the target, where they are kept


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
        return self.captioned.hidden(*images[:3])


def drafted(head: EagleHead | TransformersEagleHead, examples: Examples, images: Images,
            noise: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """Teacher-forced drafts; `noise` is added to the hidden states that the head sees.

    Returns:
        hidden states (B, L - 1, dim) that the head expects, and the target's own, at the first L - 1 ids
    """
    with torch.no_grad():
        target = examples.hidden(images) if images.hidden is None else images.hidden
    hidden = head.teacher_forced(*images[:3], target[:, :-1] + noise)
    return hidden, target[:, images.condition.shape[1]:]


def code_logits(target: TargetModel, hidden: Tensor, images: Images) -> Tensor:
    """The target's logits of codes after these hidden states (B, L - 1, dim); not where a newline is forced."""
    logits, (first, last) = target.logits(hidden.to(images.condition.dtype)), codes(target)
    ids = id_range(target, torch.arange(1, images.ids.shape[1], device=hidden.device))
    return logits if ids is None else logits[:, ids[:, 1] - ids[:, 0] > 1, first:last]


def distance(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Cross entropy plus REJECTED times the total variation distance of the distributions, the means over all."""
    target_probs, draft_log_probs = target_logits.softmax(-1), draft_logits.log_softmax(-1)
    cross_entropy = -(target_probs * draft_log_probs).sum(-1).mean()
    return cross_entropy + REJECTED * (target_probs - draft_log_probs.exp()).abs().sum(-1).mean() / 2


@torch.no_grad()
def measure(head: EagleHead | TransformersEagleHead, target: TargetModel, examples: Examples, which: Tensor,
            batch: int = 32) -> dict[str, float]:
    """How well drafts of one token do, without guidance at temperature 1.

    top1, top3: share of positions where the target's likeliest token is among the head's 1 or 3 likeliest;
    acceptance: E[sum min(P, Q)], what speculative sampling accepts of single drafts.
    """
    sums, count = torch.zeros(3, dtype=torch.float64), 0
    for rows in which.split(batch):
        images = Images(*examples.take(rows))
        draft_probs, target_probs = (code_logits(target, hidden, images).float().softmax(-1)
                                     for hidden in drafted(head, examples, images))
        best = target_probs.argmax(-1, keepdim=True)
        hits = draft_probs.topk(3, -1).indices == best
        overlap = torch.minimum(draft_probs, target_probs).sum()
        sums += torch.stack([hits[..., 0].sum(), hits.sum(), overlap]).double().cpu()
        count += best.numel()
    return dict(zip(("top1", "top3", "acceptance"), (sums / count).tolist()))


def head_of(gpt: GPT) -> EagleHead:
    """An untrained head for a GPT, whose embedding it has, frozen."""
    head = EagleHead(gpt.config)
    head.embed_tokens.weight.data.copy_(gpt.tok_embeddings.weight)
    head.embed_tokens.weight.requires_grad_(False)
    return head.to(gpt.output.weight.device)


def train(folder: Path, target: TargetModel, model: EagleHead | TransformersEagleHead, examples: Examples,
          device: torch.device, *, lr: float, minutes: float | None, steps: int | None, batch: int, noise: float,
          compiled: bool, configuration: dict, inputs: dict[str, Path] | None = None) -> None:
    """Train a head for the target, write <folder>/eagle.safetensors, and say how well it does."""
    run = TrainingRun(folder, model, lr=lr, weight_decay=0.01, minutes=minutes, steps=steps,
                      configuration=configuration, inputs=inputs)

    def loss_of(images, blur):
        with mixed_precision(device):
            states = drafted(model, examples, images, blur)
            draft_logits, target_logits = (code_logits(target, hidden, images).float() for hidden in states)
        return F.smooth_l1_loss(*(hidden.float() for hidden in states)) + distance(draft_logits, target_logits)

    train_loss = compiling(loss_of, compiled)
    shape = (batch, target.prefix_len + num_tokens(target) - 2, model.fc.out_features)

    def losses_of(generator):
        with torch.no_grad(), mixed_precision(device):
            images = Images(*examples.draw(batch, generator))
        blur = (torch.rand(shape, generator=generator) - 0.5).to(device) * noise
        return {"loss": train_loss(images, blur)}

    held_out = examples.test[:: max(1, len(examples.test) // 64)]
    run.learn(losses_of, 100, lambda: measure(model, target, examples, held_out, batch))
    with run.averaged():
        write_weights(folder / FILE, model)
        numbers = measure(model, target, examples, examples.test, batch)
    run.log(**numbers)
    click.echo("held out: " + ", ".join(f"{key} {value:.3f}" for key, value in numbers.items()))


@click.command()
@options(
    click.option("--target", type=click.Path(path_type=Path),
                 help="Folder with a model, as `specvis convert` makes it; with --family as transformers has it, or "
                      "its name on a model hub, if it was fetched. [default: the GPT of the stages before]"),
    click.option("--family", type=click.Choice(list(FAMILIES)), help="Of --target: one of transformers' families."),
    click.option("--prompts", type=click.Path(path_type=Path),
                 help="With --family: a file with a prompt a line, of which the target draws what the head learns."),
    click.option("--image-size", type=click.IntRange(1), help="With --family: pixels a side."),
    click.option("--images", type=click.Path(path_type=Path),
                 help="With --target: folder with pictures and their captions, or a folder of pictures for each "
                      "class."),
    click.option("--text-encoder", type=click.Path(path_type=Path),
                 help="With --target: folder with FLAN-T5-XL, for a model whose prompts are captions."),
    click.option("--out", type=click.Path(path_type=Path),
                 help="With --target: folder for the head. [default: that of --target; with --family in the run's]"),
    click.option("--replace", is_flag=True, help="With --target: a head that is there is replaced."),
    click.option("--noise", default=0.2, show_default=True, help="Width of the uniform noise on the hidden states."),
    batch=16, lr=1.5e-3)
def eagle(runs, device, target, family, prompts, image_size, images, text_encoder, out, replace, **training):
    """Train an EAGLE head on the GPT, or on another target; writes runs/eagle/eagle.safetensors.

    With --target and --images it is written to the target's folder too. Its run is in runs/eagle-NAME, with the
    pictures' tokens. With --family and --prompts the target draws the pictures first; they take much disk.
    """
    torch.manual_seed(0)
    device = torch.device(device)
    if target is None:
        if given := [name for name, value in (("images", images), ("text_encoder", text_encoder), ("out", out),
                                              ("replace", replace), ("family", family)) if value]:
            raise ValueError(f"{given[0]} must not be given without --target")
        captioned, tokens = stages(runs, device)
        files = (tokens.path, runs / "gpt" / "gpt.safetensors", runs / "gpt" / "words.safetensors")
        return train(runs / "eagle", captioned.gpt, head_of(captioned.gpt), StageImages(captioned, tokens), device,
                     configuration=asdict(captioned.gpt.config), inputs={file.name: file for file in files}, **training)
    if (family is None) != (prompts is None):
        raise ValueError("family and prompts must be given together")
    if family is not None:
        if images or text_encoder:
            raise ValueError("images and text_encoder must not be given with --family: the target draws what it learns")
        return train_family(runs, device, target, family, prompts, image_size, out, replace, training)
    if image_size is not None:
        raise ValueError("image_size must not be given without --family")
    if images is None:
        raise ValueError("images must be given with --target: a folder with pictures that the head learns from")
    out = out or target
    if (out / FILE).exists() and not replace:
        raise ValueError(f"out must be a folder without {FILE}, or --replace must be given, got {out}")
    folder = runs / f"eagle-{target.resolve().name}"
    pipeline = Pipeline.load(target, device, text_encoder=text_encoder)
    examples = FolderImages(pipeline, target, images, folder, training["batch"], lr=training["lr"],
                            noise=training["noise"])
    train(folder, pipeline.gpt, head_of(pipeline.gpt), examples, device, configuration=asdict(pipeline.gpt.config),
          **training)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        write_whole(out / FILE, (folder / FILE).read_bytes())
    click.echo(f"{out / FILE}: " + (f"specvis generate --model {target} --method eagle2 --prompt .."
                                    if out.resolve() == target.resolve() else
                                    f"to draw with it, copy it into {target}, the folder of its target"))


def train_family(runs: Path, device: torch.device, target: Path, family: str, prompts: Path, image_size: int | None,
                 out: Path | None, replace: bool, training: dict) -> None:
    """Draw pictures of the prompts, and train a head for a model of one of transformers' families."""
    from .family import FamilyImages

    source, folder = found(target), runs / f"eagle-{target.resolve().name}"
    out = out or folder / "draft"
    if (out / "model.safetensors").exists() and not replace or out.resolve() == source.resolve():
        raise ValueError("out must be a folder without model.safetensors, or --replace must be given, and never the "
                         f"target's, got {out}")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    pipeline = FamilyPipeline.load(source, family, device, dtype=dtype, image_size=image_size)
    examples = FamilyImages(pipeline, source, prompts, folder, training["batch"], lr=training["lr"],
                            noise=training["noise"])
    head = TransformersEagleHead(examples.target).float().requires_grad_(True)
    train(folder, examples.target, head, examples, device, configuration={
        "family": family, "width": head.fc.out_features, "grid": list(examples.target.grid)}, **training)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        write_whole(out / "model.safetensors", (folder / FILE).read_bytes())
    size = f" --image-size {image_size}" if image_size else ""
    click.echo(f"{out}: specvis generate --family {family} --model {target}{size} --draft {out} --method eagle2 "
               "--prompt ..")


def stages(runs: Path, device: torch.device) -> tuple[Captioned, Tokens]:
    """The GPT that the stages before made, and its pictures."""
    tokens = Tokens(runs, device)
    config = read_config(made(runs / "gpt" / "config.json", "gpt"), GPTConfig)
    captioned = Captioned(config, tokens.vocabulary).to(device).requires_grad_(False).eval()
    for part in ("gpt", "words"):
        load_weights(getattr(captioned, part), made(runs / "gpt" / f"{part}.safetensors", "gpt"))
    return captioned, tokens
