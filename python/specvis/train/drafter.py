"""The EAGLE head: it learns to predict the target's next hidden state, and so the target's distribution."""
import json

import click
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from ..models.eagle import EagleHead
from ..models.llamagen import GPTConfig, condition_mask
from .gpt import Captioned, Tokens, mixed_precision
from .run import Run, made, options


def drafted(drafter, captioned, captions, ids, null=None, noise=0.0):
    """Teacher-forced drafts; `noise` is added to the hidden states that the drafter sees.

    Returns:
        hidden states (B, 255, dim) that the drafter expects, and the target's own, at ids 0..254
    """
    prefix_len = captions.shape[1] - 1  # condition entries of the drafter
    condition, padding_mask = captioned.condition(captions, null)
    with torch.no_grad():
        target = captioned.gpt.teacher_forced(condition, padding_mask, ids)          # (B, prefix_len + 256, dim)
    tokens = F.pad(ids[:, :-1], (prefix_len, 0))                                     # token 0 beside a condition
    position_ids = torch.arange(tokens.shape[1], device=ids.device)[None]
    mask = condition_mask(padding_mask[:, :-1], tokens.shape[1])
    hidden = drafter.read(tokens, target[:, :-1] + noise, position_ids, mask)
    return hidden[:, prefix_len:], target[:, prefix_len + 1:]


@torch.no_grad()
def measure(drafter, captioned, tokens, which, batch: int = 32) -> dict[str, float]:
    """How well drafts of one token do, without guidance at temperature 1.

    top1, top3: share of positions where the target's likeliest token is among the drafter's 1 or 3 likeliest;
    acceptance: E[sum min(P, Q)], what speculative sampling accepts of single drafts.
    """
    sums, count = torch.zeros(3, dtype=torch.float64), 0
    for rows in which.split(batch):
        hidden, target = drafted(drafter, captioned, tokens.captions[rows], tokens.ids[rows])
        draft_probs, target_probs = (captioned.gpt.logits(h).softmax(-1) for h in (hidden, target))
        best = target_probs.argmax(-1, keepdim=True)
        hits = draft_probs.topk(3, -1).indices == best
        overlap = torch.minimum(draft_probs, target_probs).sum()
        sums += torch.stack([hits[..., 0].sum(), hits.sum(), overlap]).double().cpu()
        count += best.numel()
    return dict(zip(("top1", "top3", "acceptance"), (sums / count).tolist()))


@click.command()
@options(batch=16, lr=1.5e-3)
@click.option("--noise", default=0.2, show_default=True, help="Width of the uniform noise on the hidden states.")
@click.option("--compile/--no-compile", "compiled", default=True, show_default=True,
              help="Compile the training step (about 1.2 times faster, a minute to start).")
def drafter(runs, minutes, steps, batch, lr, noise, device, compiled):
    """Train the drafter on runs/gpt; writes runs/drafter/drafter.safetensors."""
    torch.manual_seed(0)
    device = torch.device(device)
    tokens = Tokens(runs, device)
    config = GPTConfig(**json.loads(made(runs / "gpt" / "config.json", "gpt").read_text()))
    captioned = Captioned(config, tokens.vocabulary).to(device).requires_grad_(False).eval()
    for part in ("gpt", "words"):
        weights = load_file(runs / "gpt" / f"{part}.safetensors")
        getattr(captioned, part).load_state_dict({name: value.float() for name, value in weights.items()})
    model = EagleHead(config)
    model.embed_tokens.weight.data.copy_(captioned.gpt.tok_embeddings.weight)  # the target's, frozen
    model.embed_tokens.weight.requires_grad_(False)
    model.to(device)
    run = Run(runs / "drafter", model, lr=lr, weight_decay=0.01, minutes=minutes, steps=steps)

    def loss_of(captions, ids, null, noise):
        with mixed_precision(device):
            hidden, target = drafted(model, captioned, captions, ids, null, noise)
            draft_logits, target_logits = captioned.gpt.logits(hidden), captioned.gpt.logits(target)
        cross_entropy = -(target_logits.softmax(-1) * draft_logits.log_softmax(-1)).sum(-1).mean()
        return F.smooth_l1_loss(hidden.float(), target.float()) + cross_entropy

    train_loss = torch.compile(loss_of) if compiled else loss_of
    recent = []
    for step in run:
        generator = run.generator(step)
        captions, ids, null = tokens.draw(batch, generator)
        shape = (batch, config.condition_tokens + config.tokens - 2, config.dim)
        blur = (torch.rand(shape, generator=generator) - 0.5).to(device) * noise
        loss = train_loss(captions, ids, null, blur)
        run.descend(loss)
        recent.append(loss.detach())
        if run.step % 100 == 99:
            with mixed_precision(device):
                held_out = measure(model, captioned, tokens, tokens.test[:: max(1, len(tokens.test) // 64)])
            run.log(loss=torch.stack(recent).mean(), **held_out, lr=run.lr)
            recent = []
    half = {name: value.half().contiguous() for name, value in model.state_dict().items()}
    save_file(half, runs / "drafter" / "drafter.safetensors")
    numbers = measure(model, captioned, tokens, tokens.test)
    click.echo("held-out names: " + ", ".join(f"{key} {value:.3f}" for key, value in numbers.items()))
