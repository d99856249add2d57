"""What can be said of each position of pictures that are decoded."""
import torch
import torch.nn.functional as F
from torch import Tensor

from ..decoding.sampling import Sampling, cfg_inputs, repeat_for_cfg
from ..models.llamagen import condition_mask
from ..pipelines.discrete import Pipeline


def steps_gain(num_accepted: Tensor) -> Tensor:
    """How many tokens the step that made each position added to the picture.

    Args:
        num_accepted: (B, L) int64  accepted drafts of the step that began at each position; -1 where none began
    Returns:
        (B, L) int64: accepted drafts plus one
    """
    began = torch.where(num_accepted >= 0, torch.arange(num_accepted.shape[1]), 0).cummax(1).values
    return num_accepted.gather(1, began).clamp(min=0) + 1


@torch.inference_mode()
def teacher_forced_probs(pipeline: Pipeline, prompts: list[str], tokens: Tensor,
                         sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The probabilities of target and drafter at each position of pictures whose tokens are known.

    Returns:
        target_probs (B, L, V) and draft_probs (B, L - 1, V), the latter for tokens 1..L - 1
    """
    gpt, prefix_len = pipeline.gpt, pipeline.gpt.config.condition_tokens - 1
    condition, padding_mask = cfg_inputs(gpt, *gpt.condition(pipeline.words(pipeline.words.encode(prompts))))
    hidden = gpt.teacher_forced(condition, padding_mask, repeat_for_cfg(tokens))           # (2B, prefix_len + L, dim)
    shifted = F.pad(repeat_for_cfg(tokens[:, :-1]), (prefix_len, 0))
    position_ids = torch.arange(shifted.shape[1], device=tokens.device)[None]
    drafted = pipeline.drafter(shifted, hidden[:, :-1], position_ids,
                               condition_mask(padding_mask[:, :prefix_len], shifted.shape[1]))
    return sampling.probs(gpt, hidden[:, prefix_len:])[0], sampling.probs(gpt, drafted[:, prefix_len:])[0]
