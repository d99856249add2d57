"""How an op finds its kernel. This file is the whole mechanism.

Each op is one torch.library op, `torch.ops.specvis_kernels.<op>`:

    dispatch key               kernel             file
    CompositeExplicitAutograd  oracle             specvis_kernels/<op>.py
    Meta                       output shapes      specvis_kernels/<op>.py
    CPU                        C++                csrc/<op>.cpp                 if built
    CUDA                       CUDA C++           csrc/<op>.cu                  if built, and the driver is as new
                               else Triton        specvis_kernels/triton/<op>.py

PyTorch prefers a device's own key to the composite one. So where a kernel is missing the oracle answers, and nothing
is chosen in Python on the ordinary path.

Most ops report on each row or request in `status` (int32): 0 is ok, else the sum of the bits below. These do not:
codebook_neighbors, commit_kv, commit_tokens, tree_attention, tree_from_mask, tree_from_paths, tree_mask, tree_paths.

An op that writes to arguments says so in its schema: Tensor(a!) and Tensor(a!)[]. Its meta and its outputs do not name
them. Then torch.compile, fake tensors and the version counters of what is written work as for torch's own operations.
_batching.py says what torch.func.vmap does.
"""
import ctypes
import math
import operator
import os
import re
import warnings
from importlib import import_module
from importlib.util import find_spec
from numbers import Integral, Real
from pathlib import Path

import torch
from torch import Tensor

from ._batching import batching_rule

EMPTY_RESIDUAL = 1  # the residual was empty: the target's own distribution was used instead, or what `empty` says
INVALID_ROW = 2     # a row of logits or probabilities holds NaN, an infinity, a negative number, or no mass, or its
                    # range of ids is empty or leaves the vocabulary; or a Gaussian's mean, log sigma, token or log
                    # ratio is NaN or infinite, or leads to such a number
INVALID_TREE = 4    # a parent, link, row or token id is out of range: it is reported and never followed
INVALID_RULE = 8    # omega is negative, NaN, or < 1 with groups or with neighbors and the optimal residual; or the
                    # temperature of a Gaussian's distances is not positive and finite: nothing is accepted
OUT_OF_TRIES = 16   # no try for a continuous token was accepted: the target's own sample was used instead
INVALID_DRAFT = 32  # the row that drafts were drawn from holds NaN, a negative number, a number above 2, or no mass

MOST_IDS = 2**19   # V, and of the ids that are summed for a token: rows of 2.0 sum to 2**62 in fixed point
MOST = 2**31 - 1   # every other size and count: nodes, columns and lengths are int32 somewhere
INTEGERS = (torch.int64, torch.int32)  # of either are tokens, links, lengths, positions and counts
FLOAT32_MAX = torch.finfo(torch.float32).max

NAMESPACE = __package__
CHECKS = os.environ.get("SPECVIS_CHECK") == "1"  # read once: whether every op ends with check_status()
_library = torch.library.Library(NAMESPACE, "DEF")
_kernels: dict[str, dict] = {}  # op name -> backend name -> callable

_here = Path(__file__).parent
if not (_here / "_ops.so").exists() and (_here.parent / "csrc").exists():
    warnings.warn(f"{_here} is a source folder without built libraries, so only oracles and Triton answer here: "
                  "build it with python -m pip install -e . or import the installed package from elsewhere",
                  stacklevel=2)


def _driver_knows(library: Path) -> bool:
    """Whether the driver is new enough for the CUDA library, whose runtime is its own; it warns if not. A driver runs
    what any release of its major was built with. Without a driver there is nothing to run, so nothing to say."""
    built = re.search(rb"specvis_kernels is built with CUDART_VERSION (\d+)", library.read_bytes())
    version = ctypes.c_int()
    try:
        found = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0
    except (OSError, AttributeError):
        found = False
    if not built or not found or version.value // 1000 >= int(built[1]) // 1000:
        return True
    names = [f"{number // 1000}.{number % 1000 // 10}" for number in (int(built[1]), version.value)]
    warnings.warn(f"{library} is built with CUDA {names[0]}, and the driver knows CUDA {names[1]}: Triton's kernels "
                  f"answer on CUDA, where there is Triton. Build it with CUDA {version.value // 1000} instead",
                  stacklevel=2)
    return False


for _file in ("_ops.so", "_ops_cuda.so"):  # built? then it must load: a broken build is an error, not a fallback
    _path = Path(__file__).with_name(_file)
    if _path.exists() and (_file == "_ops.so" or torch.version.cuda and _driver_knows(_path)):
        try:
            torch.ops.load_library(_path)
        except OSError as error:
            raise ImportError(f"{_path} does not load, build the package again: {error}") from error


def define(schema: str, *, oracle, meta, result: type | None = None, batch: str | None = ""):
    """Register the op that `schema` names. Returns `call(backend, *args)`, which runs it.

    Args:
        schema:  of torch.library, e.g. "tree_mask(Tensor ancestors, SymInt columns) -> Tensor"
        oracle:  the op in plain torch, with the schema's arguments: it says what is right and runs where no kernel does
        meta:    the same arguments -> empty outputs of the right shapes
        result:  the named tuple that `call` makes of several outputs (torch.ops returns plain tuples); None: one output
        batch:   the argument whose first size is B, if that is not the first one; None: no tensor leads with B
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default

    def built(key):
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", key)

    def triton(*args):  # imported at the first call: Triton takes a second or two to import
        kernel = getattr(import_module(f".triton.{name}", __package__), name)
        refuse_overlap(args)
        args = [[readable(each, i in written) for each in a] if isinstance(a, (list, tuple)) else
                readable(a, i in written) if isinstance(a, Tensor) else a for i, a in enumerate(args)]
        with torch.cuda.device_of(next(a for a in args if isinstance(a, Tensor))):  # Triton launches on the current one
            return kernel(*args)

    def checked_oracle(*args):
        refuse_overlap(args)
        return oracle(*args)

    def refuse_overlap(args):
        if written and not torch.compiler.is_compiling():
            check_apart(name, [(a, i in written) for i, arg in enumerate(args)
                               for a in (arg if isinstance(arg, (list, tuple)) else [arg]) if isinstance(a, Tensor)])

    written = [i for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    kernels = _kernels[name] = {"oracle": checked_oracle}
    if built("CPU"):
        kernels["cpu"] = op
    if built("CUDA"):
        kernels["cuda"] = op
    if find_spec("triton") and find_spec(f".triton.{name}", __package__):
        kernels["triton"] = triton

    _library.impl(name, checked_oracle, "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # inference only: no output asks for gradients
    if "triton" in kernels and "cuda" not in kernels:
        _library.impl(name, triton, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", meta, lib=_library)

    def count_versions(keyset, *args):  # as torch's own operations in place do, for who has saved a tensor
        for i in written:
            torch.autograd.graph.increment_version(args[i])
        return op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    torch.library.register_vmap(f"{NAMESPACE}::{name}", batching_rule(op, batch, written), lib=_library)
    if written:
        _library.impl(name, count_versions, "ADInplaceOrView", with_keyset=True)

    def forced(backend, args):
        device = next(a for a in args if isinstance(a, Tensor)).device.type
        if backend not in backends(name, device):
            raise ValueError(f"backend of {name} must be one of {', '.join(backends(name, device))} "
                             f"for {device} tensors here, got {backend!r}")
        return torch.no_grad()(kernels[backend])

    has_status = result is not None and result._fields[-1] == "status"

    def call(backend, *args):
        kernel = op if backend is None else forced(backend, args)
        outputs = kernel(*args)
        if CHECKS and has_status:
            from .check_status import check_status
            if not is_traced(outputs[-1]):
                check_status(outputs[-1], name)
        return outputs if result is None else result(*outputs)

    return call


def is_traced(tensor: Tensor) -> bool:
    """Whether there are no values, or the host may not read them: in torch.compile, export, fake tensors, make_fx,
    torch.func or a CUDA graph's capture.
    """
    return (torch.compiler.is_compiling() or tensor.is_meta
            or type(tensor) not in (Tensor, torch.nn.Parameter)
            or torch.utils._python_dispatch._get_current_dispatch_mode() is not None
            or torch._C._functorch.peek_interpreter_stack() is not None
            or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()))


def ops() -> list[str]:
    """The name of every op."""
    return list(_kernels)


def backends(name: str, device: str = "cpu") -> list[str]:
    """The backends that op `name` can be forced to for tensors on `device` ("cuda", "cuda:1"), the oracle first.

    Triton runs on CPU tensors only under its interpreter (TRITON_INTERPRET=1, set before the first import).

    Raises:
        ValueError: no such op
    """
    if name not in _kernels:
        raise ValueError(f"op must be one of {', '.join(_kernels)}, got {name!r}")
    device = str(device).partition(":")[0]
    runs = {"oracle": True, "cpu": device == "cpu", "cuda": device == "cuda",
            "triton": device == "cuda" or device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"}
    return [backend for backend in _kernels[name] if runs.get(backend, device == "cpu")]  # tests add one for the CPU


def check(name: str, tensor: Tensor, dtype: torch.dtype | tuple, like: Tensor | None = None, may_be_one: bool = False,
          **sizes: int) -> None:
    """Raise ValueError unless `tensor` has this dtype (or one of these), these sizes and the device of `like`.

    check("tokens", tokens, torch.int64, B=B, N=N) may say
    "tokens must be int64 (B=2, N=5), got int64 (2, 4)". With `may_be_one` its batch B may also be 1.
    """
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


def is_exactly(value: object, dtype: torch.dtype, like: Tensor | None, sizes: dict[str, int]) -> bool:
    """What nearly every argument is: a tensor of this dtype, these sizes and the device of `like`. Asked first, since a
    step of decoding checks some seventy arguments."""
    return (type(value) is Tensor and value.dtype is dtype and value.shape == tuple(sizes.values())
            and (like is None or value.device == like.device))


def integers(name: str, tensor: Tensor, dtype: torch.dtype, like: Tensor | None = None, may_be_one: bool = False,
             **sizes: int) -> Tensor:
    """An int32 or int64 tensor as a contiguous one of `dtype`, which is either; of batch B, if it `may_be_one`.

    An int64 that does not fit into int32 becomes the nearest one that does: what is out of range stays so.

    Raises:
        ValueError: another dtype, shape or device
    """
    if is_exactly(tensor, dtype, like, sizes):
        return tensor.contiguous()
    check(name, tensor, INTEGERS, like, may_be_one, **sizes)
    if tensor.dtype != dtype:
        tensor = tensor.long() if dtype == torch.int64 else tensor.clamp(-MOST - 1, MOST).int()
    return for_each(tensor, sizes["B"]) if may_be_one else tensor.contiguous()


def for_each(tensor: Tensor, B: int) -> Tensor:
    """A tensor of batch B or 1 as a contiguous one of batch B."""
    return (tensor if tensor.shape[0] == B else tensor.expand(B, *tensor.shape[1:])).contiguous()


def setting(name: str, value: Tensor | float, dtype: torch.dtype, like: Tensor,
            at_least: float | None = None, at_most: float = math.inf, **sizes: int) -> Tensor:
    """A setting as a contiguous tensor of these sizes: `value` itself, or one number (one bool) for all of them.

    A number is held against the bounds, a tensor is not: nothing is read back from a device.

    Raises:
        ValueError: a tensor of another dtype, shape or device, or not a number; an integer or a bool where dtype is
            one; a number that is NaN or out of bounds, if there are bounds
    """
    if is_exactly(value, dtype, like, sizes):
        return value.contiguous()
    is_integer = dtype == torch.int32
    if isinstance(value, Tensor):
        if is_integer:
            return integers(name, value, dtype, like, **sizes)
        check(name, value, dtype, like=like, **sizes)
        return value.contiguous()
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
        if FLOAT32_MAX < abs(value) < math.inf:
            raise ValueError(f"{name} must fit into float32, got {value}")
        if at_least is not None and not at_least <= value <= at_most:
            bounds = f">= {at_least}" if at_most == math.inf else f"in [{at_least}, {at_most}]"
            raise ValueError(f"{name} must be a number {bounds}, got {value}")
        value = float(value)
    return torch.full(tuple(sizes.values()), value, dtype=dtype, device=like.device)


def check_together(**arguments: object) -> None:
    """Raise ValueError, with the names of those that are missing, if some of the arguments are None but not all."""
    missing = [name for name, value in arguments.items() if value is None]
    if 0 < len(missing) < len(arguments):
        raise ValueError(f"{' and '.join(arguments)} must be given together, but {' and '.join(missing)} "
                         f"{'is' if len(missing) == 1 else 'are'} missing")


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


def check_apart(op: str, tensors: list[tuple[Tensor, bool]]) -> None:
    """Raise ValueError if one of the tensors, of those that are written to (True), shares memory with another one."""
    ends = {}  # storage -> up to where its tensors go so far, and those that are written to
    ranges = [(t.storage_offset() * t.itemsize, (t.storage_offset() + t.numel()) * t.itemsize,
               t.untyped_storage()._cdata, is_written) for t, is_written in tensors if t.numel()]
    for start, end, storage, is_written in sorted(ranges):
        last, last_written = ends.get(storage, (0, 0))
        if start < (last if is_written else last_written):
            raise ValueError(f"{op}: an argument that is written to shares memory with another one")
        ends[storage] = max(last, end), max(last_written, end if is_written else 0)


def readable(tensor: Tensor, is_written: bool) -> Tensor:
    """`tensor`, or a copy if what stands in memory are not its elements, or not on multiples of their size.

    PyTorch's dispatcher does this where it stands in between: it copies negative views. GPUs read no misaligned memory.
    """
    if tensor.data_ptr() % tensor.itemsize == 0 and not tensor.is_neg():
        return tensor
    if is_written:
        raise ValueError("a tensor that is written to must be no negative view, and have aligned elements")
    return tensor.resolve_neg().clone()


def check_parents(parents: Tensor) -> Tensor:
    """Parents (B, N) as contiguous int32. Raises ValueError: another dtype or shape, or N is 0."""
    B, N = check_dims("parents", parents, "BN")
    if N < 1:
        raise ValueError(f"parents must have N >= 1, got shape ({B}, {N})")
    return integers("parents", parents, torch.int32, B=B, N=N)


def check_tree(tokens: Tensor, first_child: Tensor, next_sibling: Tensor, max_depth: int | None,
               like: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Raise ValueError unless these are trees with a node for each row of `like` (B, N, ..). Returns them and P."""
    B, N = like.shape[:2]
    return (integers("tokens", tokens, torch.int64, like, B=B, N=N),
            integers("first_child", first_child, torch.int32, like, may_be_one=True, B=B, N=N),
            integers("next_sibling", next_sibling, torch.int32, like, may_be_one=True, B=B, N=N),
            check_count("max_depth", N - 1 if max_depth is None else max_depth, 0))


def check_dims(name: str, tensor: Tensor, letters: str) -> torch.Size:
    """Raise ValueError unless `tensor` has one dimension per letter, none of them too large; returns its shape.

    check_dims("probs", probs, "BNV") may say "probs must have 3 dimensions (B, N, V), got shape (2, 4)".
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.ndim != len(letters):
        raise ValueError(f"{name} must have {len(letters)} dimensions ({', '.join(letters)}), "
                         f"got shape {tuple(tensor.shape)}")
    for letter, size in zip(letters, tensor.shape):
        most = MOST_IDS if letter in "Vk" else MOST
        if size > most:
            raise ValueError(f"{name} must have {letter} <= {most}, got shape {tuple(tensor.shape)}")
    return tensor.shape
