"""check_status: what an op reports about its inputs, as an error with words."""
import torch
from torch import Tensor

from ._dispatch import INVALID_DRAFT, INVALID_ROW, INVALID_RULE, INVALID_TREE, check

SHOWN = 4  # requests of a kind of error

LOGITS = ("after guidance and temperature a row holds NaN, +inf or nothing but -inf, or its range of ids is empty or "
          "leaves the vocabulary: is an id masked in uncond alone?")
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
                    "2 or no mass: are they logits rather than probabilities?"),
}
INVALID_ROWS = {  # where an invalid row is something else
    **dict.fromkeys(("guided_probs", "draw_tokens", "draft_children", "draft_frontier", "verify_logits"), LOGITS),
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

    EMPTY_RESIDUAL and OUT_OF_TRIES are no errors: the result is what the op's docstring says.

    Args:
        status:  (B,) or (B, N) int32   what an op returned
        op:      the op's name; with it the words fit better

    Raises:
        StatusError: an INVALID_* bit is set; it is a ValueError
        ValueError: status is no int32 tensor

    Example:
        >>> import torch
        >>> from specvis_kernels import StatusError, check_status, sample_residual
        >>> logits = torch.tensor([[0.5, 0.5], [3.0, -1.0]])  # of the second row; the first are probabilities
        >>> result = sample_residual(logits, None, torch.tensor([0.3, 0.3]))
        >>> result.status
        tensor([0, 2], dtype=torch.int32)
        >>> try:
        ...     check_status(result.status, "sample_residual")
        ... except StatusError as error:
        ...     print(str(error)[:54])
        sample_residual: INVALID_ROW at request 1 (a row holds
    """
    if isinstance(status, Tensor):
        check("status", status, torch.int32, **dict(zip("BNM", status.shape)))
    else:
        check("status", status, torch.int32, B=0)
    bits = status.cpu()
    if not (bits & sum(MEANINGS)).any():
        return
    problems = []
    for bit, (name, meaning) in MEANINGS.items():
        at = [", ".join(map(str, place)) for place in (bits & bit).nonzero().tolist()]
        if at:
            if bit == INVALID_ROW:
                meaning = INVALID_ROWS.get(op, meaning)
            places = ", ".join(f"({place})" if bits.ndim > 1 else place for place in at[:SHOWN])
            more = f" and {len(at) - SHOWN} more" if len(at) > SHOWN else ""
            problems.append(f"{name} at request{'s' * (len(at) > 1)} {places}{more} ({meaning})")
    raise StatusError(f"{op or 'status'}: " + "; ".join(problems))


