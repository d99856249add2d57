"""Requests for images of discrete tokens, and all checks of them, before a model reads anything.

Every request of a batch has a seed, a guidance and a temperature of its own. It is one pair of model rows: row b reads
the condition, row B + b reads none, and guidance moves the probabilities from the second towards the first. Of a model
without guidance it is row b alone.
"""
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.interface import DraftModel, Nodes, TargetModel, has_guidance, id_range, num_tokens, rows_and_columns
from .batch_state import model_rows
from .decoded import Observer
from .methods import Method, one_each
from .sampling import Sampling, cfg_inputs

_is_causal = weakref.WeakKeyDictionary()  # of the targets that have been asked


@dataclass(frozen=True)
class Requests:
    """B requests that have passed all checks. A list of numbers selects some of them."""

    condition: Tensor            # (R, S, dim)   as `cfg_inputs` gives them
    padding_mask: Tensor         # (R, S) bool   True where the condition is real
    sampling: Sampling
    methods: list[Method]        # all of one family
    known_tokens: Tensor | None  # (B, K) int64  the first tokens of each image, -1 after them
    num_known: list[int]         # how many these are

    def __len__(self) -> int:
        return len(self.methods)

    def __getitem__(self, numbers: list[int]) -> "Requests":
        rows, known_tokens = model_rows(numbers, len(self), len(self.condition)), self.known_tokens
        return Requests(self.condition[rows], self.padding_mask[rows], self.sampling[numbers],
                        [self.methods[i] for i in numbers], None if known_tokens is None else known_tokens[numbers],
                        [self.num_known[i] for i in numbers])


def checked_requests(target: TargetModel, condition: Tensor, padding_mask: Tensor, sampling: Sampling, methods,
                     known_tokens: Tensor | None, drafting: tuple[str, ...], which: str) -> Requests:
    """The requests of `speculative_decode` and `jacobi_decode`, whose arguments these are.

    Args:
        drafting: how their methods may draft, see `Method.drafting`
        which:    these methods in words, and what decodes the others
    Raises:
        ValueError: as `check_request` and `check_known_tokens`; or a method drafts in another way, is for continuous
            tokens, or is of another family
    """
    check_request(target, condition, padding_mask, sampling)
    methods = one_each(methods, len(condition), "methods")
    for m in methods:
        if not isinstance(m, Method):
            raise ValueError(f"methods must be of discrete tokens, each a Method or a name, got {type(m).__name__}")
        if m.drafting not in drafting:
            raise ValueError(f"methods must be {which}, got {m.name}")
        if m.family != methods[0].family:
            raise ValueError(f"methods must be of one family (Method.family), got {methods[0].label} and {m.label}")
    num_known = check_known_tokens(known_tokens, len(condition), target)
    return Requests(*cfg_inputs(target, condition, padding_mask), sampling, methods, known_tokens, num_known)


def check_request(target: TargetModel, condition: Tensor, padding_mask: Tensor, sampling: Sampling) -> None:
    """Raise ValueError unless the condition is (B, S, dim) with B seeds and a (B, S) mask, B >= 1, as the target's."""
    for name, value, kind in (("condition", condition, Tensor), ("padding_mask", padding_mask, Tensor),
                              ("sampling", sampling, Sampling)):
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    if not has_guidance(target) and (sampling.guidance != 1).any():
        raise ValueError(f"guidance must be 1 for {type(target).__name__}, which has nothing to measure it against, "
                         f"got {sampling.guidance[sampling.guidance != 1][0].item():g}")
    null = target.null_condition(1)
    S, dim = null.shape[1:]
    if target.prefix_len != S:
        raise ValueError(f"target.prefix_len must be the S={S} of its null_condition, got {target.prefix_len}")
    if condition.ndim != 3 or condition.shape[1:] != (S, dim):
        raise ValueError(f"condition must be (B, S={S}, dim={dim}), got {tuple(condition.shape)}")
    if len(condition) < 1 or len(condition) != len(sampling.seeds):
        raise ValueError(f"condition must have one row per seed and at least one, "
                         f"got {len(condition)} rows and {len(sampling.seeds)} seeds")
    if padding_mask.shape != condition.shape[:2] or padding_mask.dtype != torch.bool:
        raise ValueError(f"padding_mask must be bool (B={len(condition)}, S={S}), "
                         f"got {str(padding_mask.dtype)[6:]} {tuple(padding_mask.shape)}")
    if condition.dtype != null.dtype:
        raise ValueError(f"condition must be {str(null.dtype)[6:]} like the target's null_condition, "
                         f"got {str(condition.dtype)[6:]}")
    for name, tensor in (("condition", condition), ("padding_mask", padding_mask), ("sampling", sampling.seeds)):
        if tensor.device != null.device:
            raise ValueError(f"{name} must be on {null.device} like the target, got {tensor.device}")


def check_known_tokens(known_tokens: Tensor | None, batch: int, target: TargetModel) -> list[int]:
    """How many tokens of each of B images are known. This reads the host.

    ValueError: not None and not (B, K) int64 with K <= L, or an id outside [0, V) that is not -1 after the others
    """
    if known_tokens is None:
        return [0] * batch
    L, V = num_tokens(target), target.vocab_size
    if not isinstance(known_tokens, Tensor):
        raise ValueError(f"known_tokens must be an int64 tensor (B={batch}, K), got {type(known_tokens).__name__}")
    if known_tokens.dtype != torch.int64 or known_tokens.ndim != 2 or len(known_tokens) != batch:
        raise ValueError(f"known_tokens must be int64 (B={batch}, K), "
                         f"got {str(known_tokens.dtype)[6:]} {tuple(known_tokens.shape)}")
    if known_tokens.shape[1] > L:
        raise ValueError(f"known_tokens must be at most the L={L} tokens of an image, got {known_tokens.shape[1]}")
    is_known = known_tokens != -1
    counts, wrong = is_known.sum(1), is_known & ((known_tokens < 0) | (known_tokens >= V))
    if wrong.any():
        raise ValueError(f"known_tokens must be within [0, V={V}), or -1 where no token is known, "
                         f"got {known_tokens[wrong][0].item()}")
    if (is_known.cumprod(1).sum(1) != counts).any():
        raise ValueError("known_tokens must have -1 only after the known tokens of an image, got -1 before one")
    ids = id_range(target, torch.arange(known_tokens.shape[1], device=known_tokens.device))
    if ids is not None:
        wrong = is_known & ((known_tokens < ids[:, 0]) | (known_tokens >= ids[:, 1]))
        if wrong.any():
            image, position = wrong.nonzero()[0].tolist()
            first, last = ids[position].tolist()
            raise ValueError(f"known_tokens must be ids that the target allows where they are: within [{first}, {last})"
                             f" at position {position}, got {known_tokens[image, position].item()}")
    return counts.tolist()


def check_draft_model(target: TargetModel, draft_model: DraftModel, condition: Tensor) -> None:
    """Raise ValueError unless a draft model has the rows of each condition (B, S, dim) and is of the target's kind."""
    for name, same in (("grid", rows_and_columns), ("vocab_size", int)):
        if same(getattr(draft_model, name, getattr(target, name))) != same(getattr(target, name)):
            raise ValueError(f"draft_model.{name} must be the target's, {getattr(target, name)}, "
                             f"got {getattr(draft_model, name)}")
    rows = 1 + has_guidance(target)
    mask, wanted = draft_model.padding_mask, (rows * len(condition), draft_model.prefix_len)
    if mask.dtype != torch.bool or mask.shape != wanted or mask.device != condition.device:
        raise ValueError(f"draft_model.padding_mask must be bool (R={wanted[0]}, prefix_len={wanted[1]}) on "
                         f"{condition.device}, {rows} for each request, got {str(mask.dtype)[6:]} {tuple(mask.shape)} "
                         f"on {mask.device}")


def check_causal(target: TargetModel) -> None:
    """Raise ValueError if the target's logits at a token depend on the token after it. Each target is asked once."""
    try:
        answer = _is_causal.setdefault(target, [])
    except TypeError:  # a target without a hash is asked again
        answer = []
    if not answer:
        answer.append(is_causal(target))
    if not answer[0]:
        raise ValueError("target must be causal, so that its logits at a token do not depend on later tokens: Jacobi "
                         "decoding reads guesses after a token that may change; the logits of "
                         f"{type(target).__name__} do")


def is_causal(target: TargetModel) -> bool:
    condition, S = target.null_condition(1), target.prefix_len
    cache, device = target.new_cache(1, S + 2), condition.device
    padding_mask = torch.ones(1, S, dtype=torch.bool, device=device)
    target.prefill(condition, padding_mask, cache)
    nodes = Nodes.chain(2, torch.tensor([S], device=device), padding_mask, S + 2)
    first, second = (target.logits(target.extend(torch.tensor([[0, token]], device=device), nodes, cache))[:, 0]
                     for token in (0, target.vocab_size - 1))
    return torch.allclose(first, second, rtol=1e-4, atol=1e-4, equal_nan=True)


def check_batch(batch: int | None, methods: list[Method], observe: Observer | None, target: TargetModel,
                draft_model: DraftModel | None = None) -> int:
    """How many images are decoded at once.

    ValueError: not None and no whole number of at least 1; or requests would wait for a row although they have several
    methods, someone observes, or the caches of the model or the draft model have no `insert`
    """
    if batch is None:
        return len(methods)
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise ValueError(f"batch must be a whole number of at least 1, or None for all images at once, got {batch!r}")
    if batch >= len(methods):
        return len(methods)
    if any(m != methods[0] for m in methods):
        raise ValueError(f"batch must be None where requests have several methods, got {batch} for {len(methods)} "
                         f"requests with {methods[0].label} and others")
    if observe:
        raise ValueError("batch must be None where someone observes the steps, "
                         f"got {batch} for {len(methods)} requests")
    if not hasattr(target.new_cache(1, 1), "insert"):
        raise ValueError(f"batch must be None for {type(target).__name__}: its cache has no method insert, by which "
                         "an image could take the place of a finished one")
    if draft_model and not (hasattr(draft_model, "select") and hasattr(draft_model.new_cache(1), "insert")):
        raise ValueError(f"batch must be None for {type(draft_model).__name__}: it has no method select, or its cache "
                         "no method insert, by which an image could take the place of a finished one")
    return batch
