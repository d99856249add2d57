"""What can be said of each position of pictures that are decoded."""
import torch
from torch import Tensor

from specvis_kernels import guided_probs, gumbel_noise

from ..decoding.sampling import Sampling, cfg_inputs
from ..models.interface import id_range, inference
from .discrete import Pipeline

ROUNDING_STEPS = 5  # in bfloat16, the shipped model's logits in two forwards of one picture differ by up to 4.1


def forward_numbers(num_accepted: Tensor) -> Tensor:
    """Which target forward drew each token, (B, L) int64 from 0: the one that reads the condition draws the first one.

    num_accepted: (B, L) int64 accepted drafts of the step that began at each position; -1 where none began
    """
    began = (num_accepted >= 0).long()
    return began.cumsum(1) - began[:, :1]  # a step that begins at the first token is number 0


def target_hidden(pipeline: Pipeline, prompts: list[str], tokens: Tensor) -> Tensor:
    """The target's hidden states at pictures whose tokens (B, L) are known: (2B, prefix_len - 1 + L, dim).

    The last L of them predict the tokens.
    """
    gpt = pipeline.gpt
    condition, padding_mask = cfg_inputs(gpt, *pipeline.condition(prompts))
    return gpt.teacher_forced(condition, padding_mask, tokens.repeat(len(condition) // len(tokens), 1))


@inference
def logit_rounding(pipeline: Pipeline, prompt: str, tokens: Tensor, position: int) -> float:
    """By how much two forwards may round the logits at a position of a picture differently: ROUNDING_STEPS of the
    model's dtype at the largest of them. Logits are sums of numbers about as large, all of which are rounded.

    tokens (1, L) int64: of the picture
    """
    row = target_hidden(pipeline, [prompt], tokens)[:, position - tokens.shape[1]].unsqueeze(1)
    step = torch.finfo(pipeline.dtype).eps
    return ROUNDING_STEPS * step * pipeline.gpt.logits(row).abs().max().item()


@inference
def is_near_a_filter(pipeline: Pipeline, prompt: str, tokens: Tensor, sampling: Sampling, position: int,
                     size: float, num_tries: int = 256) -> bool:
    """Can changes of the logits by up to `size` change the token that is drawn at a position of a picture?

    They change which ids the filters keep, too. tokens (1, L) int64: of the picture
    """
    row = target_hidden(pipeline, [prompt], tokens)[:, position - tokens.shape[1]].unsqueeze(1)
    logits = pipeline.gpt.logits(row).expand(-1, num_tries, -1)
    generator = torch.Generator(logits.device).manual_seed(0)
    changes = torch.rand(logits.shape, generator=generator, dtype=torch.float32, device=logits.device) * 2 - 1
    changes[:, 0] = 0
    positions = torch.full((1, num_tries), position, device=logits.device)
    drawn = sampling.draw(logits + size * changes, positions, id_range(pipeline.gpt, positions)).tokens
    return bool((drawn != drawn[:, :1]).any())


@inference
def draw_margins(pipeline: Pipeline, prompts: list[str], tokens: Tensor, sampling: Sampling) -> Tensor:
    """By how much the best candidate for each token leads the second best, in what `draw_tokens` compares: (B, L).

    tokens (B, L) int64: of the pictures
    """
    logits = pipeline.gpt.logits(target_hidden(pipeline, prompts, tokens)[:, -tokens.shape[1]:])
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    probs = guided_probs(**sampling.rows(logits), id_range=id_range(pipeline.gpt, positions)).probs
    noise = gumbel_noise(sampling.seeds, positions, probs.shape[-1])
    scores = probs.log() + torch.where(sampling.greedy[:, None, None], 0.0, noise)
    best, second = scores.topk(2, -1).values.unbind(-1)
    return best - second
