"""What is found out about a target once: is it causal, which window is fastest."""
import weakref

import torch

from ..models.interface import Nodes, TargetModel, chain_ancestors

_facts = weakref.WeakKeyDictionary()  # target -> what was found out about it


def check_causal(target: TargetModel) -> None:
    """Raise ValueError if the target's logits at a token depend on the token after it. Each target is asked once."""
    facts = facts_of(target)
    if "is_causal" not in facts:
        condition, S = target.null_condition(1), target.prefix_len
        cache, device = target.new_cache(1, S + 2), condition.device
        padding_mask = torch.ones(1, S, dtype=torch.bool, device=device)
        target.prefill(condition, padding_mask, cache)
        nodes = Nodes(torch.arange(2, device=device)[None], torch.tensor([S], device=device),
                      chain_ancestors(1, 2, device), padding_mask, S + 2)
        first, second = (target.logits(target.extend(torch.tensor([[0, token]], device=device), nodes, cache))[:, 0]
                         for token in (0, target.vocab_size - 1))
        facts["is_causal"] = torch.allclose(first, second, rtol=1e-4, atol=1e-4, equal_nan=True)
    if not facts["is_causal"]:
        raise ValueError("target must be causal, so that its logits at a token do not depend on later tokens: Jacobi "
                         "decoding reads guesses after a token that may change; the logits of "
                         f"{type(target).__name__} do")


def facts_of(target: TargetModel) -> dict:
    """What was found out about a target, for as long as it lives. Nothing is remembered of a target without a hash."""
    try:
        return _facts.setdefault(target, {})
    except TypeError:
        return {}
