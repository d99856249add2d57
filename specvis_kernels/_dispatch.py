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
        with torch.cuda.device_of(next(a for a in args if isinstance(a, Tensor))):  # Triton launches on the current one
            return kernel(*args)

    kernels = _kernels[name] = {"oracle": oracle}
    if built("CPU"):
        kernels["cpu"] = op
    if built("CUDA"):
        kernels["cuda"] = op
    if find_spec("triton") and find_spec(f".triton.{name}", __package__):
        kernels["triton"] = triton

    _library.impl(name, oracle, "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # inference only: no output asks for gradients
    if "triton" in kernels and "cuda" not in kernels:
        _library.impl(name, triton, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", meta, lib=_library)
    written = [i for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]

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
        return kernels[backend]

    has_status = result is not None and result._fields[-1] == "status"

    def call(backend, *args):
        kernel = op if backend is None else forced(backend, args)
        outputs = kernel(*args)
        if CHECKS and has_status:
            from .check_status import check_unless_traced
            check_unless_traced(outputs[-1], name)
        return outputs if result is None else result(*outputs)

    return call


def ops() -> list[str]:
    """The name of every op."""
    return list(_kernels)


def backends(name: str, device: str = "cpu") -> list[str]:
    """The backends that op `name` can be forced to for tensors on `device`, the oracle first.

    Triton runs on CPU tensors only under its interpreter (TRITON_INTERPRET=1, set before the first import).

    Raises:
        ValueError: no such op
    """
    if name not in _kernels:
        raise ValueError(f"op must be one of {', '.join(_kernels)}, got {name!r}")
    runs = {"oracle": True, "cpu": device == "cpu", "cuda": device == "cuda",
            "triton": device != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"}
    return [backend for backend in _kernels[name] if runs.get(backend, device == "cpu")]  # tests add one for the CPU


def check(name: str, tensor: Tensor, dtype: torch.dtype | tuple, like: Tensor | None = None, **sizes: int) -> None:
    """Raise ValueError unless `tensor` has this dtype (or one of these), these sizes and the device of `like`.

    check("tokens", tokens, torch.int64, B=B, N=N) may say
    "tokens must be int64 (B=2, N=5), got int64 (2, 4)".
    """
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes or tensor.shape != tuple(sizes.values()):
        wanted = ", ".join(f"{letter}={size}" for letter, size in sizes.items())
        got = f"{type(tensor).__name__}, not a tensor"
        if isinstance(tensor, Tensor):
            got = f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}"
        raise ValueError(f"{name} must be {' or '.join(str(d)[6:] for d in dtypes)} ({wanted}), got {got}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like the other tensors, got {tensor.device}")


def setting(name: str, value: Tensor | float, dtype: torch.dtype, like: Tensor, **sizes: int) -> Tensor:
    """A setting as a contiguous tensor of these sizes: `value` itself, or one number (one bool) for all of them.

    Raises:
        ValueError: a tensor of another dtype, shape or device, or not a number; an integer or a bool where dtype is one
    """
    if isinstance(value, Tensor):
        check(name, value, dtype, like=like, **sizes)
        return value.contiguous()
    kinds, kind = {
        torch.bool: (bool, "a bool"),
        torch.int32: ((int, torch.SymInt, Integral), "an integer"),
    }.get(dtype, ((int, float, torch.SymInt, torch.SymFloat, Real), "a number"))
    if not isinstance(value, kinds) or (isinstance(value, bool) and dtype != torch.bool):
        wanted = ", ".join(f"{letter}={size}" for letter, size in sizes.items())
        raise ValueError(f"{name} must be {str(dtype)[6:]} ({wanted}) or {kind}, got {value!r}")
    if dtype == torch.int32 and not -2**31 <= value < 2**31:
        raise ValueError(f"{name} must fit into int32, got {value}")
    return torch.full(tuple(sizes.values()), value, dtype=dtype, device=like.device)


def check_together(**arguments: object) -> None:
    """Raise ValueError, with the names of those that are missing, if some of the arguments are None but not all."""
    missing = [name for name, value in arguments.items() if value is None]
    if 0 < len(missing) < len(arguments):
        raise ValueError(f"{' and '.join(arguments)} must be given together, but {' and '.join(missing)} "
                         f"{'is' if len(missing) == 1 else 'are'} missing")


def check_count(name: str, value: int, minimum: int) -> int:
    """`value` as an integer. Raises ValueError unless it is one (of any type with __index__) and >= `minimum`."""
    if not isinstance(value, (int, torch.SymInt)) and hasattr(value, "__index__") and not isinstance(value, Tensor):
        value = operator.index(value)
    if not isinstance(value, (int, torch.SymInt)) or value < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")
    return value


def check_parents(parents: Tensor) -> Tensor:
    """Parents (B, N) of int32 or int64 as contiguous int32; what does not fit stays out of range.

    Raises:
        ValueError: another dtype or shape, or N is 0
    """
    B, N = check_dims("parents", parents, "BN")
    check("parents", parents, (torch.int32, torch.int64), B=B, N=N)
    if N < 1:
        raise ValueError(f"parents must have N >= 1, got shape ({B}, {N})")
    if parents.dtype == torch.int64:
        parents = parents.clamp(-3, N).int()
    return parents.contiguous()


def check_dims(name: str, tensor: Tensor, letters: str) -> torch.Size:
    """Raise ValueError unless `tensor` has one dimension per letter; returns its shape.

    check_dims("probs", probs, "BNV") may say "probs must have 3 dimensions (B, N, V), got shape (2, 4)".
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.ndim != len(letters):
        raise ValueError(f"{name} must have {len(letters)} dimensions ({', '.join(letters)}), "
                         f"got shape {tuple(tensor.shape)}")
    return tensor.shape
