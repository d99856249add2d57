"""An op's public function checks once what it is given again, and answers as if it checked each time."""
import gc
import weakref

import pytest
import torch
from torch.utils._pytree import tree_map_only

import specvis_kernels
from specvis_kernels import tree_attention
from tests import cases
from tests.cases.comparing import make, run, same

# The ops of a step whose arguments need no conversion there. Others may convert: they take lists, numbers for settings.
OF_A_STEP = {"commit_tokens", "couple_tokens", "draw_tokens", "rotate_into_cache", "select_tree", "swiglu",
             "tree_attention", "tree_links", "verify_greedy", "verify_logits", "verify_tree"}


def known_by(function):
    """How `function` calls its op, for each kind of call that it knows."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__))
    return [how for how in cells["known"].cell_contents.values() if how]


def outcome(op, function, args, kwargs):
    try:
        return run(op, args, kwargs, function=function)
    except (ValueError, RuntimeError, TypeError) as error:
        return type(error), str(error)


def others_of(tensor):
    """Tensors in the place of this one, for most of which the call is wrong."""
    yield tensor.clone()
    yield tensor.to(torch.int16 if tensor.dtype != torch.int16 else torch.int32)
    yield tensor.to("meta")
    yield tensor[None]
    yield tensor[:, :-1] if tensor.ndim > 1 else tensor[:-1]
    if tensor.ndim > 1:
        yield tensor.mT.clone(memory_format=torch.contiguous_format).mT  # equal, with other strides


@pytest.mark.parametrize("op", sorted(cases.CASES))
def test_the_answer_is_that_of_a_check(op):
    function = getattr(specvis_kernels, op)
    kept = function.__wrapped__
    for case in cases.CASES[op][:3]:
        args, kwargs = make(op, *case)
        before = len(known_by(function))
        for _ in range(4):
            results = [outcome(op, f, *tree_map_only(torch.Tensor, torch.clone, (args, kwargs)))
                       for f in (function, kept)]
            assert all(map(same, *results))
        if len(known_by(function)) == before:
            continue
        places = [*range(len(args)), *kwargs]
        for place in places:
            value = args[place] if isinstance(place, int) else kwargs[place]
            for other in others_of(value) if isinstance(value, torch.Tensor) else (None, True, 1, 1.0, "l2", -1):
                changed = [other if i == place else a for i, a in enumerate(args)]
                more = {name: other if name == place else a for name, a in kwargs.items()}
                got, expected = outcome(op, function, changed, more), outcome(op, kept, changed, more)
                assert len(got) == len(expected), place
                assert all(map(same, got, expected)) if torch.is_tensor(got[0]) else got == expected, place
    assert known_by(function) or op not in OF_A_STEP


def test_equal_tensors_are_not_taken_for_one():
    """One tensor for two arguments, then two that are like it."""
    q, lengths, ancestors = torch.randn(1, 3, 2, 16), torch.tensor([0]), torch.tensor([[[1], [3], [5]]])
    for k, v in [(q, q)] * 4 + [(q.clone(), torch.randn(1, 3, 2, 16))] * 4:
        arguments = q, k, v, lengths, ancestors
        assert tree_attention(*arguments).equal(tree_attention.__wrapped__(*arguments))


def test_no_tensor_is_kept():
    links = [torch.tensor([[-1, 0, 0, 1, 1, 1, 1]], dtype=torch.int32) for _ in range(4)]
    for parents in links:
        specvis_kernels.tree_links(parents)
    assert known_by(specvis_kernels.tree_links)
    kept = [weakref.ref(parents) for parents in links]
    del links, parents
    gc.collect()
    assert not any(reference() is not None for reference in kept)
