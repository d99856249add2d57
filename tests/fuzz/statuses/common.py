"""What the others look at arguments and outputs with."""
import numpy as np
import torch

ONE = 2**42      # a probability of 1 in fixed point
MOST = 24        # requests of a batch that are looked at one by one


class Unclear(Exception):
    """Rounding decides."""


def to_numpy(a):
    if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor):
        return [to_numpy(item) for item in a]
    if not isinstance(a, torch.Tensor):
        return a
    a = a.resolve_neg()
    return (a.float() if a.dtype in (torch.bfloat16, torch.float16) else a).numpy()


def some(count):
    """Up to MOST of so many requests."""
    return range(0, count, max(1, -(-count // MOST)))


def unlike(name, got, expected):
    """What is wrong with an output, or None."""
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape:
        return f"{name} has the shape {got.shape}, by the docstring {expected.shape}"
    wrong = np.argwhere(got != expected)
    if not len(wrong):
        return None
    at = tuple(int(i) for i in wrong[0])
    return f"{name} at {at} is {got[at]}, by the docstring {expected[at]}"


def outside(name, ids, count, low=0):
    """What is wrong with ids that must be in [low, count), or None."""
    wrong = np.argwhere((ids < low) | (ids >= count))
    return f"{name} at {tuple(map(int, wrong[0]))} is {ids[tuple(wrong[0])]}, not in [{low}, {count})" if len(wrong) \
        else None


def each(problem_of, count):
    """The first problem that problem_of(request) finds among some requests."""
    for b in some(count):
        try:
            what = problem_of(b)
        except Unclear:
            continue
        if what:
            return f"request {b}: {what}"
    return None


def of(setting, *index):
    """A setting of a request: of a tensor, or the one number of all."""
    return setting[index] if isinstance(setting, np.ndarray) else setting


def spread(setting, like, B):
    """A setting as an array that broadcasts over (B, N, V)."""
    values = setting if isinstance(setting, np.ndarray) else np.full(B, setting, dtype=like)
    return values.astype(like).reshape(-1, 1, 1)


def not_a_number(name, numbers):
    return f"{name} is {numbers[~np.isfinite(numbers)][0]}" if not np.isfinite(numbers).all() else None
