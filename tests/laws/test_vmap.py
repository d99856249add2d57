"""torch.func.vmap is one call of the op, with a larger batch and without a warning."""
import warnings

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import specvis_kernels
from specvis_kernels import codebook_neighbors, commit_kv, neighborhood_sum, sample_residual, tree_links
from tests import cases
from tests.cases import DEVICE
from tests.cases.comparing import Recorder, as_tuple, by_name, make, same

S = 3
LOOPED = {"commit_kv"}  # its caches have their rows in any dimension


@pytest.fixture(autouse=True)
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def run_both(op, named, in_dims, layout=torch.clone):
    """The outputs and written arguments of vmap, and of a loop. In `named` dimension 0 is the mapped one.

    layout: makes the copies that vmap gets
    """
    function = getattr(specvis_kernels, op)
    mapped = [name for name, dim in in_dims.items() if dim is not None]
    others = {name: x for name, x in named.items() if name not in mapped}
    own = {name: tree_map(torch.clone, named[name]) for name in mapped}
    moved = {name: tree_map(lambda x, dim=in_dims[name]: layout(x.movedim(0, dim).contiguous()), named[name])
             for name in mapped}
    got = torch.func.vmap(lambda tensors: as_tuple(function(**tensors, **others)),
                          in_dims=({name: in_dims[name] for name in mapped},))(moved)
    loop = [as_tuple(function(**{name: tree_map(lambda x, s=s: x[s], own[name]) for name in mapped}, **others))
            for s in range(S)]
    written = cases.MUTATES.get(op, ())
    return ((*got, *tree_leaves([moved[name] for name in written if name in moved])),
            (*map(torch.stack, zip(*loop)), *tree_leaves([own[name] for name in written if name in own])))


def stacked(op, case):
    """The op's arguments by name, and in_dims. Tensors with a batch are stacked S times, with the requests rotated."""
    written, others = by_name(op, *make(op, *case))
    named, in_dims = written | others, {}
    for name, x in named.items():
        has_batch = name != "neighbors" and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(x))
        in_dims[name] = 0 if has_batch else None
        if has_batch:
            named[name] = tree_map(lambda x: torch.stack([x.roll(s, 0) for s in range(S)]), x)
    return named, in_dims


@pytest.mark.parametrize("op, case", [(op, case) for op, sizes in cases.CASES.items() if op not in cases.UNBATCHED
                                      for case in sizes[1:3]])
def test_equals_a_loop(op, case):
    named, in_dims = stacked(op, case)
    with Recorder() as recorder:
        got, expected = run_both(op, named, in_dims)
    assert len(recorder.own) == S + (S if op in LOOPED else 1)
    assert len(got) == len(expected) and all(map(same, got, expected))


@pytest.mark.parametrize("op", [op for op in cases.CASES if op not in cases.UNBATCHED | cases.MUTATES.keys()])
def test_what_is_mapped_elsewhere_or_not_at_all(op):
    """Every other tensor is mapped in its last dimension, and each in turn is not mapped."""
    named, in_dims = stacked(op, cases.CASES[op][1])
    names = [name for name, dim in in_dims.items() if dim is not None]
    in_dims |= {name: named[name].ndim - 1 for name in names[::2]}
    for name in names[:4]:
        if len(names) > 1:
            got, expected = run_both(op, named | {name: named[name][1]}, in_dims | {name: None})
            assert all(map(same, got, expected)), name
    got, expected = run_both(op, named, in_dims)
    assert all(map(same, got, expected))


@pytest.mark.parametrize("op", [op for op in cases.MUTATES if op not in cases.UNBATCHED])
def test_what_is_written_may_have_gaps(op):
    """Each request's part is contiguous, as it must be, and the whole is not."""
    named, in_dims = stacked(op, cases.CASES[op][2])
    got, expected = run_both(op, named, in_dims, lambda x: torch.stack([x, x], 1).flatten(0, 1)[::2])
    assert len(got) == len(expected) and all(map(same, got, expected))
    before = tree_leaves([named[name] for name in cases.MUTATES[op] if named[name] is not None])
    assert not all(map(torch.equal, expected[-len(before):], before))


def test_a_mapped_table_is_a_loop():
    (probs, tokens, neighbors, delta), kwargs = make("neighborhood_sum", *cases.CASES["neighborhood_sum"][1])
    tables = torch.stack([neighbors, neighbors.flip(0), neighbors.flip(0)])
    with Recorder() as recorder:
        got = torch.func.vmap(lambda table: neighborhood_sum(probs, tokens, table, delta, **kwargs))(tables)
    assert len(recorder.own) == S
    for s, table in enumerate(tables):
        assert all(same(a[s], b) for a, b in zip(got, neighborhood_sum(probs, tokens, table, delta, **kwargs)))
    codebooks = torch.randn(S, 5, 2, device=DEVICE)
    assert torch.equal(torch.func.vmap(lambda codes: codebook_neighbors(codes, 2).int())(codebooks),
                       torch.stack([codebook_neighbors(codes, 2).int() for codes in codebooks]))


def test_vmap_of_vmap():
    parents = torch.tensor([[-1, 0, 0], [-1, 0, 1], [-1, -2, 0], [-1, 1, 0]], device=DEVICE)
    trees = torch.stack([parents.roll(i, 0) for i in range(6)]).unflatten(0, (2, 3))  # (2, 3, B, N)
    got = torch.func.vmap(torch.func.vmap(tree_links), in_dims=1)(trees)
    expected = tree_links(trees.transpose(0, 1).flatten(0, 2))
    assert all(torch.equal(a.flatten(0, 2), b) for a, b in zip(got, expected))
    target_probs = cases.exact_probs(6, 9).view(2, 3, 1, 9)
    uniforms = torch.rand(3, 1, device=DEVICE)
    got = torch.func.vmap(torch.func.vmap(lambda p, u: sample_residual(p, None, u)), in_dims=(0, None))(
        target_probs, uniforms)
    assert torch.equal(got.tokens, sample_residual(target_probs.view(6, 9), None, uniforms.repeat(2, 1).view(6))
                       .tokens.view(2, 3, 1))


def test_results_keep_their_names_and_a_batch_may_be_empty():
    assert torch.func.vmap(tree_links)(torch.tensor([[[-1, 0, 1]]], device=DEVICE)).depth.tolist() == [[[0, 1, 2]]]
    out = torch.func.vmap(tree_links)(torch.zeros(S, 0, 4, dtype=torch.int32, device=DEVICE))
    assert out.depth.shape == (S, 0, 4) and out.status.shape == (S, 0)


def test_it_compiles():
    torch._dynamo.reset()
    parents = torch.tensor([[[-1, 0, 0]], [[-1, 0, 1]]], device=DEVICE)
    compiled = torch.compile(torch.func.vmap(tree_links), backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, compiled(parents), torch.func.vmap(tree_links)(parents)))


def test_what_is_written_to_must_be_mapped():
    (caches, *others), kwargs = make("commit_kv", *cases.CASES["commit_kv"][1])
    with pytest.raises(ValueError, match="caches must be mapped like the other .*, because commit_kv writes to it"):
        torch.func.vmap(lambda lengths: commit_kv(caches, *others[:2], lengths, **kwargs))(others[2].repeat(S, 1))
