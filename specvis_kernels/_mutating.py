"""What an op needs beside that writes to arguments: commit_kv, commit_tokens, decoder_layers and rotate_into_cache.

Its schema says so: Tensor(a!) and Tensor(a!)[]. Its meta and its outputs do not name these arguments. Then
torch.compile, fake tensors and the version counters of written tensors work as for torch's own operations.
"""
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ._checks import readable


def guard(kernels: dict[str, Callable], op, written: list[int], library: torch.library.Library) -> None:
    """Let the oracle and Triton, in place, refuse what they cannot write to; the bindings of C++ and CUDA do so too.

    Args:
        kernels:  backend -> kernel
        op:       an overload
        written:  the positions of the arguments that it writes to
        library:  has the op
    """
    name, oracle, triton = op._schema.name.partition("::")[2], kernels["oracle"], kernels.get("triton")

    def writing_oracle(*args):
        if any(t.is_inference() for t in tensors_of(args[i] for i in written)):
            with torch.inference_mode():  # torch's operations write to an inference tensor in this mode alone
                return oracle(*args)
        return oracle(*args)

    def writing_triton(*args):
        if any(readable(tensor) is not tensor for tensor in tensors_of(args[i] for i in written)):
            raise ValueError("a tensor that is written to must have aligned elements, and not be a negative view")
        return triton(*args)

    def apart(kernel):
        def checked(*args):
            if not torch.compiler.is_compiling():
                check_apart(name, [(a, i in written) for i, arg in enumerate(args) for a in tensors_of([arg])])
            return kernel(*args)
        return checked

    def count_versions(keyset, *args):  # as torch's own in-place operations do, for autograd's saved tensors
        torch.autograd.graph.increment_version(
            [t for t in tensors_of(args[i] for i in written) if not t.is_inference()])
        return op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    kernels["oracle"] = apart(writing_oracle)
    if triton:
        kernels["triton"] = apart(writing_triton)
    library.impl(name, count_versions, "ADInplaceOrView", with_keyset=True)


def tensors_of(args: Iterable) -> list[Tensor]:
    """The tensors among arguments, and those of lists among them."""
    return [a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else [arg]) if isinstance(a, Tensor)]


def check_apart(op: str, tensors: list[tuple[Tensor, bool]]) -> None:
    """Raise ValueError if a tensor that is written to (True) shares memory with another one."""
    ends = {}  # storage -> where its tensors so far end, and where its written ones end
    ranges = [(t.storage_offset() * t.itemsize, (t.storage_offset() + t.numel()) * t.itemsize,
               t.untyped_storage()._cdata, is_written) for t, is_written in tensors if t.numel()]
    for start, end, storage, is_written in sorted(ranges):
        last, last_written = ends.get(storage, (0, 0))
        if start < (last if is_written else last_written):
            raise ValueError(f"{op}: an argument that is written to shares memory with another one")
        ends[storage] = max(last, end), max(last_written, end if is_written else 0)
