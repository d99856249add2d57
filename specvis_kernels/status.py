"""The bits of `status`, by which ops report invalid inputs, and check_status, which makes an error of them."""
import torch
from torch import Tensor

from ._checks import check

EMPTY_RESIDUAL = 1  # no error: docs/faults.md has the bits' meanings, MEANINGS what may have happened
INVALID_ROW = 2
INVALID_TREE = 4
INVALID_RULE = 8
OUT_OF_TRIES = 16   # no error
INVALID_DRAFT = 32
SHOWN = 4  # requests of a kind of error

LOGITS = ("after guidance and temperature a row holds NaN, +inf or nothing but -inf, or all ids of its range are "
          "masked by the model, or the range is empty or leaves the vocabulary: is an id masked in uncond alone?")
GAUSSIAN = "a mean, log sigma, token or log ratio is NaN or infinite"
PROBS = ("a row holds NaN, a negative number, a number above 2 or no mass: are they logits rather than probabilities, "
         "is every id masked, or is a temperature negative?")
MEANINGS = {  # bit -> its name, what may have happened
    INVALID_ROW: ("INVALID_ROW", PROBS),
    INVALID_TREE: ("INVALID_TREE", "a parent, link, row or token is out of range, and it was not followed: is a token "
                   "of -1 there as padding, are nodes numbered before their parents, is there a cycle, or do the "
                   "links belong to another tree?"),
    INVALID_RULE: ("INVALID_RULE", "an omega is negative, NaN, or below 1 with neighbors and the optimal residual, or "
                   "a temperature of distances is not positive: nothing was accepted"),
    INVALID_DRAFT: ("INVALID_DRAFT", "the row that drafts were drawn from holds NaN, a negative number, a number above "
                    "2 or no mass: are they logits rather than probabilities? Or it gives a draft probability 0: is it "
                    "the draft's own row (draft_row[n] is for the children of n), with the settings of its draw?"),
}
INVALID_ROWS = {  # where an invalid row is something else
    **dict.fromkeys(("guided_probs", "draw_tokens", "draft_children", "draft_frontier", "verify_logits",
                     "token_log_probs"), LOGITS),
    **dict.fromkeys(("accept_gaussian", "resample_gaussian"), GAUSSIAN),
}


class StatusError(ValueError):
    """An op has reported an invalid input. See `check_status`."""


def check_status(status: Tensor, op: str | None = None) -> None:
    """Raise StatusError if an op has reported an invalid input.

    Ops read nothing back to the host, so they raise nothing about values: a bad row gives token 0 and a bit of
    `status`. This function reads `status`, waits for the device, and says in words which requests have which problem.
    With SPECVIS_CHECK=1 in the environment when specvis_kernels is imported, every op that returns a `status` calls it,
    unless it is being traced or captured.

    EMPTY_RESIDUAL and OUT_OF_TRIES are no errors: the op's docstring says what the result is then.

    Args:
        status:  (B,) or (B, N) int32   an op's result
        op:      the op's name, for the message

    Raises:
        StatusError: an INVALID_* bit is set. StatusError is a ValueError
        ValueError: status is no int32 tensor

    Examples:
        >>> logits = torch.tensor([[0.5, 0.5], [3.0, -1.0]])  # the first row has probabilities, the second logits
        >>> result = sample_residual(logits, None, torch.tensor([0.3, 0.3]))
        >>> result.status
        tensor([0, 2], dtype=torch.int32)
        >>> try:
        ...     check_status(result.status, "sample_residual")
        ... except StatusError as error:
        ...     print(str(error)[:54])
        sample_residual: INVALID_ROW at request 1 (a row holds
    """
    if not isinstance(status, Tensor):
        advice = ": pass result.status" * hasattr(status, "status")
        raise ValueError(f"status must be int32 (B) or (B, N), got {type(status).__name__}{advice}")
    check("status", status, torch.int32, **dict(zip("BNM", status.shape)))
    bits = status.cpu()
    if not (bits & sum(MEANINGS)).any():
        return
    problems = []
    for bit, (name, meaning) in MEANINGS.items():
        if at := _places(bits & bit):
            if bit == INVALID_ROW:
                meaning = INVALID_ROWS.get(op, meaning)
            problems.append(f"{name} at {at} ({meaning})")
    raise StatusError(f"{op or 'status'}: " + "; ".join(problems))


def check_requests(op: str, is_wrong: Tensor, problem: str) -> None:
    """Raise StatusError if any request is wrong (B,). It reads them: call it where SPECVIS_CHECK=1 asks for that."""
    if at := _places(is_wrong):
        raise StatusError(f"{op}: {problem}, at {at}")


def _places(flags: Tensor) -> str:
    """Which requests have one: "requests 0, 2", or ""."""
    at = [", ".join(map(str, place)) for place in flags.nonzero().tolist()]
    places = ", ".join(f"({place})" if flags.ndim > 1 else place for place in at[:SHOWN])
    more = f" and {len(at) - SHOWN} more" if len(at) > SHOWN else ""
    return f"request{'s' * (len(at) > 1)} {places}{more}" if at else ""
