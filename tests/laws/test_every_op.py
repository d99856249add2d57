"""The laws of every op on every backend."""
import inspect
import shutil

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import specvis_kernels
from specvis_kernels import INVALID_ROW, backends
from tests import cases
from tests.cases.comparing import Recorder, assert_agree, by_name, make, run, same, tensors_of

TAKES_NEIGHBORS = [op for op in cases.CASES
                   if "neighbors" in inspect.signature(getattr(specvis_kernels, op)).parameters]
EVERY = [(op, backend) for op in cases.CASES for backend in backends(op, cases.DEVICE)]
BATCHED = [(op, backend) for op, backend in EVERY if op not in cases.UNBATCHED]
ROWS = {"logits", "probs", "draft_probs", "target_probs"}  # first arguments whose rows may be invalid
TAKES_ROWS = [(op, backend) for op, backend in EVERY
              if next(iter(inspect.signature(getattr(specvis_kernels, op)).parameters)) in ROWS]
# One case of each op, and one where tensors that an op may write to are None.
FORMS = [*((op, cases.CASES[op][1]) for op in cases.CASES), ("commit_tokens", cases.CASES["commit_tokens"][2])]


@pytest.mark.parametrize("op, case", [(op, case) for op in cases.CASES for case in cases.CASES[op]])
def test_equals_its_oracle(op, case):
    """Every kernel, and the one that PyTorch chooses."""
    args, kwargs = make(op, *case)
    expected = run(op, args, kwargs, "oracle")
    for backend in [None, *backends(op, cases.DEVICE)]:
        if backend not in ("oracle", "triton"):
            assert_agree(op, run(op, args, kwargs, backend), expected, backend)
            cases.COMPARED[backend or "PyTorch's choice"] += 1


@pytest.mark.parametrize("op, case", [(op, case) for op, backend in EVERY if backend == "triton"
                                      for case in cases.CASES[op]])
def test_triton_equals_its_oracle(op, case):
    args, kwargs = make(op, *case)
    assert_agree(op, run(op, args, kwargs, "triton"), run(op, args, kwargs, "oracle"), "triton")
    cases.COMPARED["triton"] += 1


@pytest.mark.parametrize("op", cases.CASES)
def test_inference_only(op):
    written, others = by_name(op, *make(op, *cases.CASES[op][1]))
    others = {name: a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
              for name, a in others.items()}
    assert not any(out.requires_grad for out in run(op, (), written | others))


@pytest.mark.parametrize("op, backend", BATCHED)
def test_empty_batch(op, backend):
    for _, *sizes in cases.CASES[op]:
        args, kwargs = make(op, 0, *sizes)
        full_args, full_kwargs = make(op, 1, *sizes)
        num_written = len(tensors_of(by_name(op, full_args, full_kwargs)[0]))
        full_outputs = run(op, full_args, full_kwargs, None)
        for empty, full in zip(run(op, args, kwargs, backend), full_outputs[:len(full_outputs) - num_written]):
            assert empty.dtype == full.dtype and empty.shape == (0, *full.shape[1:])


def many(a, times=24):
    """Repeat the requests. A request has two of a model's six rows, three apart."""
    if a.shape[:1] == (3,):
        return torch.cat([a] * times)
    return torch.cat([torch.cat([rows] * times) for rows in a.split(3)]) if a.shape[:1] == (6,) else a


@pytest.mark.parametrize("op, backend", BATCHED)
def test_knows_no_neighbors_in_the_batch(op, backend):
    """A batch of three is three batches of one, and a part of a batch of 72, for which CUDA has other teams."""
    args, kwargs = make(op, 3, *cases.CASES[op][1][1:])
    together = run(op, args, kwargs, backend)
    for i in range(3):
        alone = tree_map_only(torch.Tensor, lambda a, i=i: a[i::3] if a.shape[0] in (3, 6) else a, (args, kwargs))
        alone = tree_map_only(torch.Tensor, torch.Tensor.contiguous, alone)
        for got, expected in zip(run(op, *alone, backend), together):
            assert same(got, expected[i::3])
    if backend != "triton" or cases.DEVICE == "cuda":  # Triton's interpreter takes its time
        larger = tree_map_only(torch.Tensor, many, (args, kwargs))
        assert all(map(same, run(op, *larger, backend), map(many, together)))


@pytest.mark.parametrize("op, backend", TAKES_ROWS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_is_reported_and_hurts_nobody_else(op, backend, bad):
    """Its status says so, ids stay inside the vocabulary, and the other rows of the batch do not change."""
    args, kwargs = make(op, 3, *cases.CASES[op][1][1:])
    rows = args[0].clone()
    V = rows.shape[-1]
    rows.view(-1, V)[0, V // 2] = bad
    clean, got = run(op, args, kwargs, backend), run(op, (rows, *args[1:]), kwargs, backend)
    assert got[-1].flatten()[0] & INVALID_ROW
    for name, a, b in zip(got._fields, got, clean):
        assert same(a[1:], b[1:])
        assert not a.is_floating_point() or not a.isnan().any()
        assert not name.endswith(("token", "tokens")) or 0 <= a.min() and a.max() < V


@pytest.mark.parametrize("op, backend", [(op, backend) for op, backend in EVERY if op in TAKES_NEIGHBORS])
def test_neighbors_may_be_int64(op, backend):
    """Codes out of range are no neighbors, in int64 as in int32."""
    takes_neighbors = []
    for case in cases.CASES[op]:
        _, named = by_name(op, *make(op, *case))
        if named.get("neighbors") is not None and named["neighbors"].shape[1] > 1:
            takes_neighbors.append(named)
    for named in takes_neighbors[:1 if backend == "triton" else None]:  # its interpreter takes its time
        narrow = named["neighbors"].int()
        narrow[::2, 1::3], narrow[1::2, 1::3] = -2**31, 2**31 - 1
        wide = narrow.long()
        wide[::2, 1::3], wide[1::2, 1::3] = -2**63, 2**63 - 1
        got, expected = (run(op, (), named | {"neighbors": table}, backend) for table in (wide, narrow))
        assert all(map(same, got, expected))


class IndexesNoUint16(TorchDispatchMode):
    """As torch 2.10 on CUDA."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.name() != "aten::index.Tensor" or args[0].dtype != torch.uint16
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", TAKES_NEIGHBORS)
def test_an_oracle_indexes_no_uint16(op):
    calls = [make(op, *case) for case in cases.CASES[op]]
    tables = [by_name(op, *call)[1].get("neighbors") for call in calls]
    assert any(table is not None and table.dtype == torch.uint16 for table in tables)
    with IndexesNoUint16():
        for call in calls:
            run(op, *call, "oracle", check=False)


@pytest.mark.parametrize("op, case", FORMS)
def test_is_registered_correctly(op, case):
    args, kwargs = make(op, *case)
    with Recorder() as recorder:
        run(op, args, kwargs)
    (registered, *call), = recorder.own
    assert registered is getattr(torch.ops.specvis_kernels, op).default
    torch.library.opcheck(registered, *call)


@pytest.mark.parametrize("op", cases.CASES)
def test_the_oracle_reads_nothing_back(op):
    """It is the fallback on every device, so it must run where tensors have shapes but no values."""
    args, kwargs = make(op, *cases.CASES[op][1])
    expected = run(op, args, kwargs, "oracle")
    with FakeTensorMode() as mode:
        fake = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        out = run(op, *fake, "oracle", check=False)
    for a, b in zip(out, expected):
        assert a.shape == b.shape and a.dtype == b.dtype


@pytest.mark.parametrize("op, case", FORMS)
def test_compiles_whole(op, case):
    torch._dynamo.reset()
    args, kwargs = make(op, *case)
    compiled = torch.compile(getattr(specvis_kernels, op), backend="aot_eager", fullgraph=True)
    got, expected = run(op, args, kwargs, function=compiled), run(op, args, kwargs)
    assert type(got) is type(expected)
    for a, b in zip(got, expected):
        assert same(a, b)


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a compiler")
def test_compiles_with_inductor():
    torch._dynamo.reset()
    args, kwargs = make("guided_probs", *cases.CASES["guided_probs"][1])

    def step(logits, *others):
        return specvis_kernels.guided_probs(logits + 1, *others, **kwargs).probs * 2

    torch.testing.assert_close(torch.compile(step, fullgraph=True)(*args), step(*args))
