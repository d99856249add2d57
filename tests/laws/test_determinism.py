"""An op gives equal bits however it is called: with test_every_op.py, the claims of docs/determinism.md."""
import re
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tests import cases
from tests.cases.comparing import by_name, make, run, tensors_of
from tests.laws.test_at_the_door import misaligned
from tests.laws.test_every_op import BATCHED, EVERY
from tests.laws.test_on_a_gpu import all_same, next_request

CSRC = Path(__file__).parent.parent.parent / "csrc"
LONG = cases.LARGE | {  # enough numbers that torch and the C++ kernels divide them among threads
    "accept_gaussian": [(40, 64, 16)],
    "codebook_neighbors": [(3000, 8, 50)],
    "couple_tokens": [(2, 6, 16384)],
    "draw_children": [(3, 4, 20000, 8)],
    "neighborhood_sum": [(64, 4500, 300)],
    "resample_gaussian": [(16, 64, 16, 8)],
    "sample_residual": [(8, 20000)],
    "tree_attention": [(3, 70, 4, 2, 64, {"columns": 300}), (3, 70, 4, 2, 64, {"dtype": torch.bfloat16})],
    "verify_greedy": [(3, 20, 5)],  # its oracle takes a step for each node
}

# Triton's interpreter takes its time; its kernels have the tests of test_every_op.py.
FAST = [(op, backend) for op, backend in EVERY if backend != "triton" or cases.DEVICE != "cpu"]
FAST_AND_BATCHED = [case for case in FAST if case in BATCHED]


def of_three(op):
    """Three requests; the second case of an op without requests."""
    case = cases.CASES[op][1]
    return make(op, *case) if op in cases.UNBATCHED else make(op, 3, *case[1:])


@pytest.mark.parametrize("op, backend", [(op, backend) for op, backend in EVERY if backend in ("oracle", "cpu")])
def test_the_number_of_threads_is_all_the_same(op, backend, set_threads):
    for case in LONG.get(op, [cases.CASES[op][-1]]):
        args, kwargs = make(op, *case)
        results = []
        for threads in (1, 2, 4, 8):
            set_threads(threads)
            results.append(run(op, args, kwargs, backend))
        assert all(all_same(result, results[0]) for result in results)


@pytest.mark.parametrize("op", [op for op, backend in EVERY if backend == "cuda_emulated"])
def test_any_gpu_gives_the_same(op, monkeypatch):
    """Another order of threads and blocks, another number of multiprocessors, no clusters, less shared memory."""
    for case in (cases.CASES[op][1], cases.CASES[op][-1]):
        args, kwargs = make(op, *case)
        expected = run(op, args, kwargs, "cuda_emulated")
        for name, value in (("SEED", 7), ("SMS", 1), ("SMS", 24), ("CAPABILITY", 8), ("SHARED", 48 * 1024)):
            with monkeypatch.context() as patch:
                patch.setenv(f"CUDA_ON_CPU_{name}", str(value))
                assert all_same(run(op, args, kwargs, "cuda_emulated"), expected), (name, value)


def with_gaps(a):
    return torch.stack([a, torch.zeros_like(a)], -1)[..., 0]


def reversed_in_memory(a):
    """The first dimension is the innermost one."""
    dims = tuple(reversed(range(a.ndim)))
    return a.permute(dims).contiguous().permute(dims)


def one_further(a):
    """At a multiple of an element's size, but not of a vector's."""
    return torch.cat([a.new_zeros(1), a.flatten()])[1:].view(a.shape)


def negative(a):
    return torch._neg_view(-a) if a.is_floating_point() or a.dtype in (torch.int64, torch.int32) else a


@pytest.mark.parametrize("op, backend", EVERY)
def test_the_layout_is_all_the_same(op, backend):
    args, kwargs = make(op, *cases.CASES[op][1])
    written, others = by_name(op, args, kwargs)
    expected = run(op, args, kwargs, backend)
    layouts = [with_gaps, reversed_in_memory, one_further, negative]
    if cases.DEVICE == "cpu":
        layouts.append(misaligned)
        if backend == "triton" and op not in ("commit_kv", "sample_residual"):  # two ops are enough in its interpreter
            layouts = layouts[:1]
    for layout in layouts:
        views = tree_map_only(torch.Tensor, layout, others)
        assert layout is not with_gaps or not any(a.is_contiguous() for a in tensors_of(views) if a.numel() > 1)
        assert all_same(run(op, (), written | views, backend), expected), layout


@pytest.mark.parametrize("op, backend", FAST_AND_BATCHED)
def test_requests_may_be_one_in_memory(op, backend):
    """An expanded dimension has the stride 0."""
    written, others = by_name(op, *of_three(op))
    expanded = tree_map_only(torch.Tensor, lambda a: a[:1].expand(a.shape) if a.shape[0] == 3 else a, others)
    assert any(a.stride(0) == 0 for a in tensors_of(expanded))
    repeated = tree_map_only(torch.Tensor, torch.Tensor.contiguous, expanded)
    assert all_same(run(op, (), written | expanded, backend), run(op, (), written | repeated, backend))


@pytest.mark.parametrize("op", cases.CASES)
def test_traced_by_make_fx_it_is_the_same(op):
    """The numbers differ from the traced ones: none is a constant of the graph."""
    args, kwargs = of_three(op)
    leaves, form = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(*tensors):
        given = dict(zip(places, tensors))
        args, kwargs = tree_unflatten([given.get(i, leaf) for i, leaf in enumerate(leaves)], form)
        return run(op, args, kwargs, check=False)

    traced = make_fx(call)(*[leaves[i] for i in places])
    if op not in cases.UNBATCHED:
        args, kwargs = tree_map_only(torch.Tensor, next_request, (args, kwargs))
    assert all_same(traced(*tensors_of((args, kwargs))), run(op, args, kwargs))


def test_no_cuda_kernel_waits_for_the_device_or_allocates():
    """A CUDA graph needs this. Torch allocates outputs and scratch memory."""
    found = {f"{file.name}: {word}" for file in CSRC.glob("**/*.c*") for word in re.findall(
        r"cuda\w*(?:Synchronize|Memcpy|Malloc|Free)\w*|\.item\b", file.read_text())}
    assert not found
