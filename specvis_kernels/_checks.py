"""Checks of arguments: each op's public function calls them, and they say what is wrong with which argument."""
import math
import operator
from collections.abc import Iterable
from numbers import Integral, Rational, Real
from string import ascii_lowercase

import torch
from torch import Tensor

MOST_IDS = 2**19   # limit of V, and of ids that are summed for a token: rows of 2.0 sum to 2**62 in fixed point
MOST = 2**31 - 1   # limit of other sizes and counts: nodes, columns and lengths are int32 somewhere
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32)  # tokens, links, lengths, positions and counts may have either dtype
Seeds = Tensor | list[int] | int  # see check_seeds
FLOAT32_MAX = torch.finfo(torch.float32).max


def check(name: str, tensor: Tensor, dtype: torch.dtype | tuple, like: Tensor | None = None, may_be_one: bool = False,
          **sizes: int) -> None:
    """Raise ValueError unless `tensor` has this dtype (or one of these), these sizes and the device of `like`.

    check("tokens", tokens, torch.int64, B=B, N=N) may say
    "tokens must be int64 (B=2, N=5), got int64 (2, 4)". With `may_be_one` its batch B may also be 1.
    """
    check_dense(name, tensor)
    dtypes, shape = dtype if isinstance(dtype, tuple) else (dtype,), tuple(sizes.values())
    if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes or (
            tensor.shape != shape and not (may_be_one and tensor.shape == (1, *shape[1:]))):
        wanted = ", ".join(f"{letter}={size}{' or 1' * (may_be_one and letter == 'B' and size != 1)}"
                           for letter, size in sizes.items())
        got = f"{type(tensor).__name__}, not a tensor"
        if isinstance(tensor, Tensor):
            got = f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}"
        raise ValueError(f"{name} must be {' or '.join(str(d)[6:] for d in dtypes)} ({wanted}), got {got}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like the other tensors, got {tensor.device}")


def check_dense(name: str, tensor: object) -> None:
    """Raise ValueError if `tensor` is sparse, nested or MKL-DNN's: its memory is not that of a usual tensor."""
    if isinstance(tensor, Tensor) and (tensor.layout is not torch.strided or tensor.is_nested):
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise ValueError(f"{name} must be a dense tensor, got one that is {kind} (to_dense, or torch.nested."
                         "to_padded_tensor, makes a dense one)")


def is_exactly(value: object, dtype: torch.dtype, like: Tensor | None, sizes: dict[str, int]) -> bool:
    """Whether `value` is a tensor of this dtype, these sizes and the device of `like`, as nearly every argument is.

    This is asked first, because a step of decoding checks some seventy arguments.
    """
    return (type(value) is Tensor and value.dtype is dtype and value.layout is torch.strided
            and not value.is_nested and value.shape == tuple(sizes.values())
            and (like is None or value.device == like.device))


def integers(name: str, tensor: Tensor, dtype: torch.dtype, like: Tensor | None = None, may_be_one: bool = False,
             **sizes: int) -> Tensor:
    """Convert an int32 or int64 tensor to `dtype`, one of the two; if it `may_be_one`, expand a batch of 1 to B.

    An int64 that does not fit into int32 becomes the nearest number that does, which is out of range too. Raises
    ValueError: another dtype, shape or device.
    """
    if is_exactly(tensor, dtype, like, sizes):
        return tensor
    check(name, tensor, INTEGERS, like, may_be_one, **sizes)
    if tensor.dtype != dtype:
        tensor = tensor.long() if dtype == torch.int64 else tensor.clamp(-MOST - 1, MOST).int()
    return for_each(tensor, sizes["B"]) if may_be_one else tensor


def check_seeds(seeds: Seeds, like: Tensor | None = None, B: int | None = None) -> Tensor:
    """Seeds (B,) as int64: a tensor, or B integers; of one request also an integer. It does not serve several: equal
    seeds draw equal noise. Raises ValueError: another dtype, shape or device, or no integers of 64 bits."""
    if not isinstance(seeds, Tensor):
        numbers = [to_integer(seed) for seed in (seeds if isinstance(seeds, Iterable) else [seeds])]
        B = len(numbers) if B is None else B
        if len(numbers) != B or not all(seed is not None and -2**63 <= seed < 2**63 for seed in numbers):
            raise ValueError(f"seeds must be int64 or int32 (B={B}), or integers of 64 bits, one for each of the B={B} "
                             f"requests, got {seeds!r}")
        seeds = torch.tensor(numbers, dtype=torch.int64, device="cpu" if like is None else like.device)
    return integers("seeds", seeds, torch.int64, like, B=check_dims("seeds", seeds, "B")[0] if B is None else B)


def for_each(tensor: Tensor, B: int) -> Tensor:
    """Expand a tensor of batch B or 1 to batch B."""
    return tensor if tensor.shape[0] == B else tensor.expand(B, *tensor.shape[1:])


def setting(name: str, value: Tensor | float, dtype: torch.dtype, like: Tensor,
            at_least: float | None = None, at_most: float = math.inf, **sizes: int) -> Tensor:
    """A setting as a tensor of these sizes: `value` itself, or one number (one bool) for all of them.

    Bounds apply to a number and not to a tensor: nothing is read back from a device. Raises ValueError: a tensor of
    another dtype, shape or device, or not a number, an integer or a bool as dtype is, or one that is out of bounds.
    """
    if is_exactly(value, dtype, like, sizes):
        return value
    is_integer = dtype == torch.int32
    if isinstance(value, Tensor):
        if is_integer:
            return integers(name, value, dtype, like, **sizes)
        check(name, value, dtype, like=like, **sizes)
        return value
    kinds, kind = {
        torch.bool: (bool, "a bool"),
        torch.int32: ((int, torch.SymInt, Integral), "an integer"),
    }.get(dtype, ((int, float, torch.SymInt, torch.SymFloat, Real), "a number"))
    if not isinstance(value, kinds) or (isinstance(value, bool) and dtype != torch.bool):
        wanted = ", ".join(f"{letter}={size}" for letter, size in sizes.items())
        dtypes = "int64 or int32" if is_integer else str(dtype)[6:]
        raise ValueError(f"{name} must be {dtypes} ({wanted}) or {kind}, got {value!r}")
    if is_integer and not -2**31 <= value < 2**31:
        raise ValueError(f"{name} must fit into int32, got {value}")
    if dtype == torch.float32 and not isinstance(value, (torch.SymInt, torch.SymFloat)):
        value = value if isinstance(value, Rational) else float(value)  # NumPy warns where its halves meet the bound
        if FLOAT32_MAX < abs(value) < math.inf:
            raise ValueError(f"{name} must fit into float32, got {value}")
        if at_least is not None and not at_least <= value <= at_most:
            bounds = f">= {at_least}" if at_most == math.inf else f"in [{at_least}, {at_most}]"
            raise ValueError(f"{name} must be a number {bounds}, got {value}")
        value = float(value)
    return torch.full(tuple(sizes.values()), value, dtype=dtype, device=like.device)


def check_together(**arguments: object) -> None:
    """Raise ValueError, with the missing names, if some of the arguments are None but not all."""
    missing = [name for name, value in arguments.items() if value is None]
    if 0 < len(missing) < len(arguments):
        raise ValueError(f"{' and '.join(arguments)} must be given together, but {' and '.join(missing)} "
                         f"{'is' if len(missing) == 1 else 'are'} missing")


def check_one_of(name: str, value: object, known: Iterable[str]) -> None:
    """Raise ValueError unless `value` is one of the known ones."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def to_integer(value: object) -> int | None:
    """`value` as an integer, of any type with __index__ but bool and tensors; else None."""
    if isinstance(value, (bool, Tensor)):
        return None
    if isinstance(value, (int, torch.SymInt)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_count(name: str, value: int, minimum: int, maximum: int = MOST) -> int:
    """`value` as an integer. Raises ValueError unless it is one within `minimum` and `maximum`."""
    count = to_integer(value)
    if count is None or count < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")
    if count > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {value!r}")
    return count


def check_eps(name: str, value: float, hint: str = "") -> None:
    """Raise ValueError unless `value` can be added to a variance: a number >= 0 in float32. `hint`: to a tensor."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= FLOAT32_MAX:
        got = f"a tensor{hint}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name} must be a number >= 0 that fits into float32, got {got}")


def readable(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy if it is a negative view, or if its elements are not on multiples of their size.

    PyTorch's dispatcher copies negative views, but Triton is called without it. GPUs read no misaligned memory, and a
    read of a weight that FSDP has freed would end every kernel of the process.
    """
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has lost its memory: its storage was freed")
    if tensor.data_ptr() % tensor.itemsize == 0 and not tensor.is_neg():
        return tensor
    return tensor.resolve_neg().clone()


def check_parents(parents: Tensor) -> Tensor:
    """Parents (B, N) as int32. Raises ValueError: another dtype or shape, or N is 0."""
    B, N = check_dims("parents", parents, "BN", not_empty="N")
    return integers("parents", parents, torch.int32, B=B, N=N)


def check_tree(tokens: Tensor, first_child: Tensor, next_sibling: Tensor, max_depth: int | None,
               like: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Raise ValueError unless these are trees with a node for each row of `like` (B, N, ..). Returns them and P."""
    B, N = like.shape[:2]
    return (integers("tokens", tokens, torch.int64, like, B=B, N=N),
            integers("first_child", first_child, torch.int32, like, may_be_one=True, B=B, N=N),
            integers("next_sibling", next_sibling, torch.int32, like, may_be_one=True, B=B, N=N),
            check_count("max_depth", N - 1 if max_depth is None else max_depth, 0))


def check_dims(name: str, tensor: Tensor, letters: str, dtype: torch.dtype | tuple | None = None, *,
               like: Tensor | None = None, not_empty: str = "") -> torch.Size:
    """Raise ValueError unless `tensor` has one dimension per letter, of a size within the limits; returns its shape.

    check_dims("probs", probs, "BNV") may say "probs must have 3 dimensions (B, N, V), got shape (2, 4)". The letters of
    `not_empty` name sizes that are at least 1. With a dtype it is checked too, and the device of `like`.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    check_dense(name, tensor)
    if tensor.ndim != len(letters):
        raise ValueError(f"{name} must have {len(letters)} dimensions ({', '.join(letters)}), "
                         f"got shape {tuple(tensor.shape)}")
    for letter, size in zip(letters, tensor.shape):
        if size > MOST_IDS and (letter in "Vk" or size > MOST):
            most = MOST_IDS if letter in "Vk" else MOST
            raise ValueError(f"{name} must have {letter} <= {most}, got shape {tuple(tensor.shape)}")
        if size == 0 and letter in not_empty:
            raise ValueError(f"{name} must have {letter} >= 1, got shape {tuple(tensor.shape)}")
    if dtype is not None and (tensor.dtype is not dtype or like is not None):
        check(name, tensor, dtype, like, **dict(zip(letters, tensor.shape)))
    return tensor.shape


def check_rows(name: str, rows: Tensor, letter: str, dtype: torch.dtype | tuple, like: Tensor | None = None) -> None:
    """Raise ValueError unless `rows` is a tensor (.., letter), not empty in its last dimension, of this dtype (or one
    of these), and of the shape and device of `like`."""
    check_dense(name, rows)
    if not isinstance(rows, Tensor) or rows.ndim < 1 or rows.shape[-1] < 1:
        got = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"{name} must be a tensor (.., {letter}) with {letter} >= 1, got {got}")
    if like is not None and rows.dtype is dtype and rows.shape == like.shape and rows.device == like.device:
        return
    *others, last = (rows if like is None else like).shape
    check(name, rows, dtype, like, **dict(zip(ascii_lowercase, others)), **{letter: last})


def is_traced(tensor: Tensor) -> bool:
    """Whether there are no values, or the host may not read them: in torch.compile, export, fake tensors, make_fx,
    torch.func or a CUDA graph's capture.
    """
    return (torch.compiler.is_compiling() or tensor.is_meta
            or type(tensor) not in (Tensor, torch.nn.Parameter)
            or torch.utils._python_dispatch._get_current_dispatch_mode() is not None
            or torch._C._functorch.peek_interpreter_stack() is not None
            or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()))
