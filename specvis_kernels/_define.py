"""How an op is registered, and how it finds its kernel.

Each op is one torch.library op, `torch.ops.specvis_kernels.<op>`. docs/design.md says which kernel has which key.
PyTorch prefers a device's own key to the oracle's, so where a kernel is missing the oracle answers, and on the ordinary
path Python chooses nothing. _libraries.py loads the compiled kernels, _checks.py checks arguments, and _vmap.py says
what torch.func.vmap does. _mutating.py has what the four ops that write to arguments need beside.

Most ops report on each row or request in `status` (int32), by the bits of status.py. These do not:
codebook_neighbors, commit_kv, commit_tokens, philox_uniforms, rms_norm, rotate_into_cache, swiglu, tree_attention,
tree_mask, and those of whole layers.
"""
import inspect
import os
import sys
from collections.abc import Callable
from functools import cache, lru_cache, wraps
from importlib import import_module
from importlib.util import find_spec
from operator import itemgetter

import torch
from torch import Tensor

from ._checks import check_one_of, is_traced, readable
from ._libraries import load_libraries
from ._mutating import guard
from ._vmap import batching_rule
from .status import check_status

NAMESPACE = __package__
CHECKS = os.environ.get("SPECVIS_CHECK") == "1"  # read once: whether ops check values, as by check_status()
IS_KNOWN = "PyTorch has this process's ops of specvis_kernels already, and keeps them: restart Python to import it anew"
if torch._C._dispatch_has_kernel(f"{NAMESPACE}::tree_links"):
    raise ImportError(IS_KNOWN)
_library = torch.library.Library(NAMESPACE, "DEF")
_kernels: dict[str, dict[str, Callable]] = {}  # op name -> backend name -> kernel
load_libraries()
# Compares tensors in C++, as torch.compile does. A torch that has no such class leaves no check out.
TensorGuards = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
PLAIN, DENSE = {bool, int, float, str, torch.dtype, type(None)}, {Tensor, torch.nn.Parameter}


def define(name: str, *, oracle: Callable, meta: Callable, result: type | None = None, writes: tuple[str, ...] = (),
           strided: tuple[str, ...] = (), batch: str | None = "") -> Callable:
    """Register an op. Returns `call(backend, *args)`, which makes tensors contiguous and runs the op.

    The schema follows from the oracle's annotated arguments: `Tensor | None` becomes `Tensor?`, `int` a `SymInt`, and
    `torch.dtype` a `ScalarType`.

    Args:
        name:    the op's name
        oracle:  the op in plain torch: it says what is right, and runs where there is no kernel
        meta:    some of the oracle's arguments, by their names -> empty outputs of the right shapes
        result:  the named tuple that `call` makes of several outputs (torch.ops returns plain tuples); None: one output
        writes:  the arguments that the op writes to
        strided: the arguments that kernels read by their strides, so that they are not made contiguous
        batch:   the argument whose first size is B, if that is not the first one; None: no tensor leads with B
    """
    if name in _kernels:  # its module is reloaded
        raise ImportError(IS_KNOWN)
    parameters, kinds = inspect.signature(oracle).parameters, inspect.get_annotations(oracle, eval_str=True)
    if any(p.default is not p.empty for p in parameters.values()):
        raise TypeError(f"the oracle of {name} must have no defaults: torch leaves out arguments that equal them")
    oracle.__annotations__["return"] = Tensor if result is None else tuple[(Tensor,) * len(result._fields)]
    _library.define(torch.library.infer_schema(oracle, op_name=name, mutates_args=writes))
    op, names = getattr(getattr(torch.ops, NAMESPACE), name).default, list(parameters)
    written = [names.index(argument) for argument in writes]
    dense = [i for i, argument in enumerate(names)
             if kinds[argument] in (Tensor, Tensor | None) and argument not in (*writes, *strided)]
    if result is not None and result.__doc__.startswith(f"{result.__name__}("):  # the text that NamedTuple makes
        result.__doc__ = f"What `{name}` returns. Its docstring explains the fields."
    kernels = _kernels[name] = {"oracle": _undisturbed(oracle)}
    for key in ("CPU", "CUDA"):
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
            kernels[key.lower()] = op
    if find_spec("triton") and find_spec(f".triton.{name}", __package__):
        kernels["triton"] = _triton_kernel(name)
    if written:
        guard(kernels, op, written, _library)

    meta_reads = [names.index(argument) for argument in inspect.signature(meta).parameters]
    _library.impl(name, kernels["oracle"], "CompositeExplicitAutograd")
    if "triton" in kernels and "cuda" not in kernels:
        _library.impl(name, kernels["triton"], "CUDA")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # inference only: no output asks for gradients
    torch.library.register_fake(op, lambda *args: meta(*(args[i] for i in meta_reads)), lib=_library)
    torch.library.register_vmap(op, batching_rule(op, batch, written), lib=_library)
    return _caller(op, kernels, result, dense)


class _Recorder:
    """Takes the place of a backend's name, and keeps what an op is called with."""
    def __init__(self, backend: str | None):
        self.backend, self.call, self.args, self.result = backend, None, (), None


@lru_cache(256)
def _places(types: tuple[type, ...]) -> tuple[list[int], list[int]]:
    """Where tensors and numbers are among values of these types; nowhere, if there is something else."""
    tensors, others = ([i for i, kind in enumerate(types) if kind in kinds] for kinds in (DENSE, PLAIN))
    return (tensors, others) if len(tensors) + len(others) == len(types) else ([], [])


def checked_once(function: Callable) -> Callable:
    """Decorate an op's public function, which checks its arguments, may convert some, and returns what `call` returns.

    From the third call on with like tensors (in type, dtype, device, sizes, strides) and equal numbers, checks and
    conversions are left out if they changed nothing. So these must read no values, but where SPECVIS_CHECK=1, which
    turns this off.
    """
    if TensorGuards is None or CHECKS:
        return function
    known = {}  # what is no tensor, and the first one's shape -> after the first call, up to four ways to call the op

    @wraps(function)
    def call_again(*args, **kwargs):
        if torch.compiler.is_compiling() or torch._C._get_tracing_state():
            return function(*args, **kwargs)
        values = (*args, *kwargs.values())
        types = (*map(type, values),)
        of_tensors, of_others = _places(types)
        tensors = [values[i] for i in of_tensors]
        if not tensors or tensors[0].is_nested:
            return function(*args, **kwargs)
        key = (types, len(args), *kwargs, *[values[i] for i in of_others], tensors[0].shape)
        ways = known.get(key)
        if ways is None:
            if len(known) >= 64:  # as where a number is another one each time
                known.clear()
            known[key] = []
            return function(*args, **kwargs)
        for guards, call, chosen, numbers in ways:
            if guards and guards.check(*tensors):
                return call(*chosen((*tensors, *numbers)))
        if len(ways) == 4:
            return function(*args, **kwargs)
        recorder = _Recorder(kwargs.get("backend"))
        result = function(*args, **{**kwargs, "backend": recorder})
        place = {id(tensor): i for i, tensor in enumerate(tensors)}
        numbers = [arg for arg in recorder.args if id(arg) not in place]
        if result is not recorder.result or not PLAIN.issuperset(map(type, numbers)) or len(place) < len(tensors):
            ways.append((None, None, None, None))
            return result
        others = iter(range(len(tensors), len(tensors) + len(numbers)))
        chosen = itemgetter(*(place[id(arg)] if id(arg) in place else next(others) for arg in recorder.args))
        guards = TensorGuards(*tensors, dynamic_dims_sizes=[[*tensor.shape] for tensor in tensors],
                              dynamic_dims_strides=[[*tensor.stride()] for tensor in tensors])
        ways.append((guards, recorder.call, chosen, numbers))
        return result

    return call_again


def _caller(op, kernels: dict[str, Callable], result: type | None, dense: list[int]) -> Callable:
    name, has_status = op._schema.name.partition("::")[2], result is not None and result._fields[-1] == "status"

    def forced(backend, args):
        device = next(a for a in args if isinstance(a, Tensor)).device.type
        if backend not in backends(name, device):
            raise ValueError(f"backend of {name} must be one of {', '.join(backends(name, device))} "
                             f"for {device} tensors here, got {backend!r}")
        with torch.no_grad():
            return kernels[backend](*args)

    def call(backend, *args):
        if type(backend) is _Recorder:
            backend.call, backend.args = call, (backend.backend, *args)
            backend.result = call(*backend.args)
            return backend.result
        for i in dense:
            tensor = args[i]
            if tensor is not None and not tensor.is_contiguous():
                args = *args[:i], tensor.contiguous(), *args[i + 1:]
        outputs = op(*args) if backend is None else forced(backend, args)
        if has_status and checks(outputs[-1]):
            check_status(outputs[-1], name)
        return outputs if result is None else result(*outputs)

    return call


def checks(output: Tensor) -> bool:
    """Whether an op with this output is to check values: SPECVIS_CHECK=1 asks for it, and there are some."""
    return CHECKS and not is_traced(output)


def _triton_kernel(name: str) -> Callable:
    @cache
    def kernel():  # imported at the first call: Triton takes a second or two to import
        return getattr(import_module(f".triton.{name}", __package__), name)

    def triton(*args):
        args = [list(map(readable, a)) if isinstance(a, (list, tuple)) else readable(a) if isinstance(a, Tensor) else a
                for a in args]
        with torch.cuda.device_of(next(a for a in args if isinstance(a, Tensor))):  # Triton launches on the current one
            return kernel()(*args)

    return triton


def _undisturbed(oracle: Callable) -> Callable:
    """`oracle`, in the precision of its tensors and with subnormal numbers, whatever the program around it has set."""
    def undisturbed(*args):
        device = next(a for a in args if isinstance(a, Tensor)).device.type
        is_flushing = sys.float_info.min / 2 == 0  # no denormal literal: the parser of one may be flushing, too
        try:
            if is_flushing:
                torch.set_flush_denormal(False)
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return oracle(*args)
            return oracle(*args)
        finally:
            if is_flushing:
                torch.set_flush_denormal(True)

    return undisturbed


def ops() -> list[str]:
    """The name of every op."""
    return list(_kernels)


def backends(name: str, device: str = "cpu") -> list[str]:
    """The backends that op `name` can be forced to for tensors on `device` ("cuda", "cuda:1"), the oracle first.

    Triton runs on CPU tensors only under its interpreter (TRITON_INTERPRET=1, set before the first import).

    Args:
        name:    an op's name, see `ops()`
        device:  where the tensors are

    Returns:
        the names that an op's argument `backend` takes

    Raises:
        ValueError: there is no such op

    Examples:
        >>> backends("tree_links")[0]
        'oracle'
    """
    check_one_of("op", name, _kernels)
    device = str(device).partition(":")[0]
    runs = {"oracle": True, "cpu": device == "cpu", "cuda": device == "cuda",
            "triton": device == "cuda" or device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"}
    return [backend for backend in _kernels[name] if runs.get(backend, device == "cpu")]  # tests add one for CPUs
