"""Arguments that every op must refuse, even when it is called below Python's checks: shapes, dtypes and memory that a
kernel cannot read.

This file is also a program, `python -m tests.laws.test_at_the_door BACKEND`: it calls each kernel past Python's
checks with arguments that do not fit, prints what it calls, and ends with an error at the first call that neither
raises nor returns what the oracle returns. A test runs it as a process, so that a crash fails that test alone.
"""
import os
import subprocess
import sys

import pytest
import torch
from torch.utils._pytree import tree_map_only

from specvis_kernels import _define, backends
from tests import cases
from tests.cases.comparing import Recorder, make, run, same, tensors_of

OPS = sorted(cases.CASES)
HUGE = (2**31, -2**63)


def raw_call(op):
    """(schema, arguments) of the op's case with the most tensors."""
    with Recorder() as recorder:
        for case in cases.CASES[op][1:]:
            run(op, *make(op, *case))
    func, args, _ = max(recorder.own, key=lambda call: len(tensors_of(call[1])))
    return func._schema, args


def resized(tensor, dim, size):
    """`tensor` with another size of one dimension: a part of it, or its last entry again."""
    if size > tensor.shape[dim] == 0:
        return tensor.new_zeros(*tensor.shape[:dim], size, *tensor.shape[dim + 1:])
    index = torch.arange(size, device=tensor.device).clamp(max=max(tensor.shape[dim] - 1, 0))
    return tensor.index_select(dim, index)


def misaligned(tensor):
    """The values, one byte after where they could be."""
    raw = torch.empty(tensor.numel() * tensor.itemsize + 1, dtype=torch.uint8)
    raw[1:] = tensor.contiguous().view(-1).view(torch.uint8)
    if tensor.numel() == 0:
        return tensor
    return torch.frombuffer(raw.numpy(), dtype=tensor.dtype, offset=1).view(tensor.shape)


def freed(tensor):
    """A tensor whose storage was made smaller, as FSDP frees weights, behind an offset."""
    longer = torch.cat([tensor.flatten(), tensor.new_zeros(1)])
    result = longer[1:].view(tensor.shape)
    longer.untyped_storage().resize_(tensor.itemsize)
    return result


def others_of(value, is_huge_tried):
    """(what was changed, another argument in the place of this one)"""
    if isinstance(value, list):
        yield "none", []
        for what, other in others_of(value[-1], is_huge_tried):
            yield what, [*value[:-1], other]
    if isinstance(value, torch.Tensor):
        yield "one dimension more", value[None]
        yield "another dtype", value.to(torch.float64 if value.is_floating_point() else torch.int16)
        yield "a byte of offset", misaligned(value)
        yield "missing", None
        if is_huge_tried and value.numel():  # torch's own operations end by a signal
            yield "freed", freed(value)
        for dim, size in enumerate(value.shape):
            yield f"no dimension {dim}", value.select(dim, 0) if size else value.flatten()
            yield f"dimension {dim} of one value", value.expand(*value.shape[:dim], -1, *value.shape[dim + 1:]) \
                if size == 1 else resized(value, dim, 1).expand(value.shape)
            for other in {0, max(size - 1, 0), size + 1} - {size}:
                yield f"dimension {dim} of size {other}", resized(value, dim, other)
            if dim:
                yield f"dimension {dim} in front", value.movedim(dim, 0).contiguous().movedim(0, dim)
    if isinstance(value, int) and not isinstance(value, bool):
        for other in {-1, 0, value - 1, value + 1, *(HUGE if is_huge_tried else ())} - {value}:
            yield f"{other}", other
    if isinstance(value, str):
        yield "another name", "none of them"


def call(kernel, args):
    """The outputs and the arguments after the call, or None if it raises; it writes to copies."""
    def copied(a):  # a copy begins at an even address
        if not a.is_contiguous() or a.untyped_storage().nbytes() < a.nbytes:
            return a
        return misaligned(a) if a.data_ptr() % a.element_size() else a.clone()

    args = tree_map_only(torch.Tensor, copied, list(args))
    try:
        outputs = kernel(*args)
    except Exception:
        return None
    return [*tensors_of(outputs), *tensors_of(args)]


def main(backend):
    for op in OPS:
        kernels = _define._kernels[op]
        if backend not in kernels:
            continue
        schema, args = raw_call(op)
        assert call(kernels[backend], args) is not None, op
        for i, argument in enumerate(schema.arguments):
            for what, other in others_of(args[i], backend != "oracle"):
                print(op, argument.name, what, flush=True)
                changed = [*args[:i], other, *args[i + 1:]]
                out = call(kernels[backend], changed)
                if out is not None and backend != "oracle":
                    expected = call(kernels["oracle"], changed)
                    assert expected is not None, "the oracle refuses this"
                    for n, (a, b) in enumerate(zip(out, expected)):
                        rtol, atol = cases.TOLERANCES.get(op, {}).get(n, (0, 0))
                        is_equal = torch.allclose(a, b, rtol, atol, equal_nan=True) if rtol or atol else same(a, b)
                        assert is_equal, f"output {n}: {a} and {b}"


@pytest.mark.skipif(cases.DEVICE == "cuda", reason="an access out of bounds would hurt the GPU's context")
@pytest.mark.parametrize("backend", ["cpu"])  # others that refuse it: tests/slow/test_asked_of_all.py
def test_what_does_not_fit_is_refused_past_python_too(backend):
    if backend not in backends(OPS[-1]):
        pytest.skip("it is not built")
    result = subprocess.run([sys.executable, "-m", __name__, backend], capture_output=True, text=True,
                            env=os.environ | {"TRITON_INTERPRET": "1"})
    last = result.stdout.strip().rpartition("\n")[2]
    assert result.returncode == 0, f"{last}: exit {result.returncode}\n{result.stderr[-2000:]}"
    assert last.startswith(OPS[-1])


if __name__ == "__main__":
    from tests import cuda_on_cpu
    if sys.argv[1] == "cuda_emulated":
        cuda_on_cpu.load()
    main(sys.argv[1])
