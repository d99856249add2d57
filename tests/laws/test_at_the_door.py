"""Arguments that every op must refuse, even when it is called below Python's checks: shapes, dtypes and memory that a
kernel cannot read.

This file is also a program, `python -m tests.laws.test_at_the_door BACKEND`: it calls each kernel past Python's
checks with arguments that do not fit, prints what it calls, and ends with an error at the first call that neither
raises nor returns what the oracle returns. A test runs it as a process, so that a crash fails that test alone.
"""
import inspect
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import specvis_kernels
from specvis_kernels import INVALID_DRAFT, INVALID_ROW, StatusError, _define, backends
from tests.kernels import inputs
from tests.laws.test_every_op import EVERY, TAKES_ROWS, by_name, run, same, tensors_of

OPS = sorted(inputs.CASES)
PARAMETERS = {op: list(inspect.signature(getattr(specvis_kernels, op)).parameters) for op in OPS}
COUNTS = [  # op, the argument that is a count, the least that it may be
    ("codebook_neighbors", "k", 1), ("draft_children", "num_children", 1), ("draft_frontier", "first_candidate", 0),
    ("draft_frontier", "first_node", 1), ("draft_frontier", "level", 1), ("draft_frontier", "num_children", 1),
    ("draw_children", "num_children", 1), ("draw_tokens", "ahead", 0), ("expand_tree", "num_children", 1),
    ("select_tree", "num_nodes", 1), ("tree_from_paths", "num_nodes", 1), ("tree_mask", "columns", 1),
    ("tree_paths", "max_depth", 0), ("verify_greedy", "max_depth", 0), ("verify_logits", "max_depth", 0),
    ("verify_tree", "max_depth", 0),
]
HUGE = (2**31, -2**63)


class Recorder(TorchDispatchMode):
    """`calls`: the arguments that the public functions pass to the registered ops."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == specvis_kernels.__name__:
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def raw_call(op):
    """(schema, arguments) of the op's case with the most tensors."""
    recorder = Recorder()
    with recorder:
        for case in inputs.CASES[op][1:]:
            run(op, *getattr(inputs, op)(*case))
    func, args = max(recorder.calls, key=lambda call: len(tensors_of(call[1])))
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
        return a if not a.is_contiguous() else misaligned(a) if a.data_ptr() % a.element_size() else a.clone()

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
                        rtol, atol = inputs.TOLERANCES.get(op, {}).get(n, (0, 0))
                        is_equal = torch.allclose(a, b, rtol, atol, equal_nan=True) if rtol or atol else same(a, b)
                        assert is_equal, f"output {n}: {a} and {b}"


@pytest.mark.skipif(inputs.DEVICE == "cuda", reason="an access out of bounds would hurt the GPU's context")
@pytest.mark.parametrize("backend", ["cpu"])  # others that refuse it: tests/slow/test_at_the_door.py
def test_what_does_not_fit_is_refused_past_python_too(backend):
    if backend not in backends(OPS[-1]):
        pytest.skip("it is not built")
    result = subprocess.run([sys.executable, "-m", __name__, backend], capture_output=True, text=True,
                            env=os.environ | {"TRITON_INTERPRET": "1"})
    last = result.stdout.strip().rpartition("\n")[2]
    assert result.returncode == 0, f"{last}: exit {result.returncode}\n{result.stderr[-2000:]}"
    assert last.startswith(OPS[-1])


def named_arguments(op):
    """The arguments by name of the last case, for ops that draw with `seeds` of the last one with these."""
    for case in reversed(inputs.CASES[op]):
        written, others = by_name(op, *getattr(inputs, op)(*case))
        if "seeds" not in PARAMETERS[op] or others.get("seeds") is not None:
            break
    return written | others


@pytest.mark.parametrize("op, name, least", COUNTS)
def test_counts_have_limits(op, name, least):
    named = named_arguments(op)
    for value in (2**31, 2**62, 2**63 - 1, 2**63, 2**70):
        with pytest.raises(ValueError, match=f"{name} must be at most [0-9]+, got {value}"):
            getattr(specvis_kernels, op)(**named | {name: value})
    for value in (least - 1, -2**70, True, False, 2.0, "2", np.True_, torch.tensor(2)):
        with pytest.raises(ValueError, match=f"{name} must be an integer >= {least}, got"):
            getattr(specvis_kernels, op)(**named | {name: value})


@pytest.mark.parametrize("op, name", [(op, name) for op in OPS for name in PARAMETERS[op]
                                      if (op, name, 0) in COUNTS or (op, name, 1) in COUNTS
                                      or name in ("offset", "column_dim", "seed")])
def test_any_integer_will_do(op, name):
    """NumPy's too, but no bool."""
    named = named_arguments(op)
    value = 1 if named.get(name) is None else int(named[name])
    outputs = [run(op, (), named | {name: kind(value)}) for kind in (int, np.int64, np.uint16)]
    assert all(same(a, b) for other in outputs[1:] for a, b in zip(outputs[0], other))
    with pytest.raises(ValueError, match=f"{name} must be an integer"):
        getattr(specvis_kernels, op)(**named | {name: True})


@pytest.mark.parametrize("op", sorted({op for op, _ in TAKES_ROWS}))
def test_rows_have_a_limit(op):
    """Masses of more ids could leave 63 bits."""
    (rows, *others), kwargs = getattr(inputs, op)(*inputs.CASES[op][1])
    rows = rows[..., :1].expand(*rows.shape[:-1], 2**19 + 1)
    with pytest.raises(ValueError, match=f"{PARAMETERS[op][0]} must have V <= 524288, got shape"):
        getattr(specvis_kernels, op)(rows, *others, **kwargs)


@pytest.mark.parametrize("backend", ["cpu", "cuda_emulated"])
def test_what_does_not_fit_into_memory_is_a_memory_error(backend):
    ancestors = torch.ones(1, 1, 1, dtype=torch.int64).expand(2**17, 1, 1)  # 2**48 elements: more than addresses
    if backend not in backends("tree_mask"):
        pytest.skip("it is not built")
    with pytest.raises(MemoryError, match=r"tree_mask: there is no memory for a tensor \(131072, 1, 2147483647\)"):
        specvis_kernels.tree_mask(ancestors, columns=2**31 - 1, lengths=torch.zeros(2**17).int(), backend=backend)


@pytest.mark.parametrize("op, backend", [(op, backend) for op, backend in EVERY if op in inputs.MUTATES])
def test_what_is_written_to_shares_no_memory(op, backend):
    def call(**changes):
        written, others = by_name(op, *getattr(inputs, op)(*inputs.CASES[op][1]))
        getattr(specvis_kernels, op)(**written | others | changes, backend=backend)

    call()
    if op == "commit_tokens":
        twice = torch.zeros(3, dtype=torch.int64)
        wrong = [{"counts": twice, "target_forwards": twice}, {"counts": twice, "next_token": twice},
                 {"counts": torch.zeros(4, dtype=torch.int64)[:3], "depth": twice, "next_token": twice}]
        for changes in wrong[:2]:
            with pytest.raises((ValueError, RuntimeError), match="that is written to (shares memory|overlaps)"):
                call(**changes)
        call(**wrong[2])  # two that are read may share
        memory = torch.zeros(27, dtype=torch.uint8, device=inputs.DEVICE)
        token = memory[:24].view(torch.int64)
        call(next_token=token, failed=memory[24:].view(torch.bool))
        with pytest.raises((ValueError, RuntimeError), match="that is written to (shares memory|overlaps)"):
            call(next_token=token, failed=memory[23:26].view(torch.bool))  # begins in the last byte of what is read
    elif op == "decoder_layers":
        written, others = by_name(op, *inputs.decoder_layers(*inputs.CASES[op][1]))
        cache, x = written["kv_cache"], others["x"]
        memory = torch.zeros(cache.numel() + x.numel() - 1, dtype=x.dtype, device=x.device)
        with pytest.raises((ValueError, RuntimeError), match="that is written to (shares memory|overlaps)"):
            call(kv_cache=memory[:cache.numel()].view(cache.shape), x=memory[-x.numel():].view(x.shape))
    else:
        cache = by_name(op, *getattr(inputs, op)(*inputs.CASES[op][1]))[0]["caches"]
        cache = cache[0] if isinstance(cache, list) else cache
        memory = torch.zeros(cache.numel() + 1, dtype=cache.dtype, device=cache.device)
        for caches in ([cache, cache], [memory[:-1].view(cache.shape), memory[1:].view(cache.shape)]):
            with pytest.raises((ValueError, RuntimeError), match="that is written to (shares memory|overlaps)"):
                call(caches=caches)


@pytest.mark.parametrize("op, name", [("draw_tokens", "temperature"), ("guided_probs", "guidance"),
                                      ("neighborhood_sum", "delta"), ("verify_tree", "omega")])
def test_numbers_fit_into_float32(op, name):
    named = named_arguments(op)
    outputs = [run(op, (), named | {name: number}) for number in (2**70, 2.0**70)]
    assert all(map(same, *outputs))
    for number in (2**2000, 1e300, -1e39):
        with pytest.raises(ValueError, match=f"{name} must fit into float32, got "):
            getattr(specvis_kernels, op)(**named | {name: number})
    run(op, (), named | {name: float("inf")})


def test_meta_has_the_oracle_alone():
    for op in OPS:
        assert backends(op, "meta") == ["oracle"]
        assert backends(op, "cuda:1") == backends(op, "cuda")


TAKES_PROBS = [(op, backend, name) for op, backend in TAKES_ROWS for name in PARAMETERS[op]
               if name in ("probs", "target_probs", "draft_probs")]


@pytest.mark.parametrize("op, backend, name", TAKES_PROBS)
def test_logits_in_place_of_probabilities_are_reported(op, backend, name, monkeypatch):
    for case in reversed(inputs.CASES[op]):  # one with draft rows, and enough of them
        _, named = by_name(op, *getattr(inputs, op)(*case))
        if named.get(name) is not None and named[name].shape[-2] > 1:
            break
    logits = torch.randn(named[name].shape, generator=torch.Generator().manual_seed(0)).to(inputs.DEVICE) * 4
    named |= {name: logits} | ({"greedy": None} if "greedy" in named else {})
    status = run(op, (), named, backend)[-1]
    bit = INVALID_DRAFT if name == "draft_probs" and name != PARAMETERS[op][0] else INVALID_ROW
    assert (status & bit).any() and (bit == INVALID_DRAFT or (status & bit).all())
    monkeypatch.setattr(_define, "CHECKS", True)
    with pytest.raises(StatusError, match="are they logits rather than probabilities"):
        run(op, (), named, backend)


if __name__ == "__main__":
    from tests import cuda_on_cpu
    if sys.argv[1] == "cuda_emulated":
        cuda_on_cpu.load()
    main(sys.argv[1])
