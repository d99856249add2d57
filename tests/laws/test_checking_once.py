"""An op's public function checks once what it is given again, and answers as if it checked each time."""
import gc
import weakref

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

import specvis_kernels
from specvis_kernels import swiglu, tree_attention
from tests import cases
from tests.cases.comparing import make, run, same

# The ops of a step whose arguments need no conversion there. Others may convert: they take lists, numbers for settings.
OF_A_STEP = {"commit_tokens", "couple_tokens", "draw_tokens", "rotate_into_cache", "swiglu", "tree_attention",
             "verify_logits", "verify_tree"}


def memory_of(function):
    """What `function` remembers of its calls: a dictionary."""
    return dict(zip(function.__code__.co_freevars, function.__closure__))["known"].cell_contents


def known_by(function):
    """How `function` calls its op, for each kind of call that it knows."""
    return [way for ways in memory_of(function).values() for way in ways if way[0]]


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
    yield torch.nn.Parameter(tensor) if tensor.is_floating_point() else tensor.long()
    yield tensor[None]
    yield tensor[:, :-1] if tensor.ndim > 1 else tensor[:-1]
    if tensor.ndim > 1:
        yield tensor.mT.clone(memory_format=torch.contiguous_format).mT  # equal, with other strides


OPS = [op for op in sorted(cases.CASES) if hasattr(getattr(specvis_kernels, op), "__wrapped__")]


@pytest.mark.parametrize("op", OPS)
def test_the_answer_is_that_of_a_check(op):
    function = getattr(specvis_kernels, op)
    kept, was_known = function.__wrapped__, False
    for case in cases.CASES[op][:3]:
        args, kwargs = make(op, *case)
        memory_of(function).clear()
        for _ in range(4):
            results = [outcome(op, f, *tree_map_only(torch.Tensor, torch.clone, (args, kwargs)))
                       for f in (function, kept)]
            assert all(map(same, *results))
        if not known_by(function):
            continue
        was_known = True
        places = [*range(len(args)), *kwargs]
        for place in places:
            value = args[place] if isinstance(place, int) else kwargs[place]
            for other in others_of(value) if isinstance(value, torch.Tensor) else (None, True, 1, 1.0, "l2", -1):
                changed = [other if i == place else a for i, a in enumerate(args)]
                more = {name: other if name == place else a for name, a in kwargs.items()}
                got, expected = outcome(op, function, changed, more), outcome(op, kept, changed, more)
                assert len(got) == len(expected), place
                assert all(map(same, got, expected)) if torch.is_tensor(got[0]) else got == expected, place
    assert was_known or op not in OF_A_STEP


def test_equal_tensors_are_not_taken_for_one():
    """One tensor for two arguments, then two that are like it."""
    q, lengths, ancestors = torch.randn(1, 3, 2, 16), torch.tensor([0]), torch.tensor([[[1], [3], [5]]])
    for k, v in [(q, q)] * 4 + [(q.clone(), torch.randn(1, 3, 2, 16))] * 4:
        arguments = q, k, v, lengths, ancestors
        assert tree_attention(*arguments).equal(tree_attention.__wrapped__(*arguments))


def test_what_is_converted_is_converted_each_time():
    q, cache, ancestors = torch.randn(1, 1, 2, 16), torch.randn(2, 1, 9, 2, 16), torch.tensor([[[1]]])
    for length in range(8):
        arguments = q, *cache, torch.tensor([length], dtype=torch.int32), ancestors
        assert tree_attention(*arguments).equal(tree_attention.__wrapped__(*arguments))


def test_no_tensor_is_kept():
    memory_of(swiglu).clear()
    rows = [torch.randn(3, 77) for _ in range(4)]
    for row in rows:
        swiglu(row, row.clone())
    assert known_by(swiglu)
    kept = [weakref.ref(row) for row in rows]
    del rows, row
    gc.collect()
    assert not any(reference() is not None for reference in kept)


@pytest.mark.filterwarnings("ignore")
def test_what_traces_is_not_known():
    """Sizes that are symbols, and those of torch.jit.trace, which are tensors."""
    rows = torch.randn(5, 79)
    memory_of(swiglu).clear()
    for _ in range(3):
        make_fx(lambda gate, up: swiglu(gate, up), tracing_mode="symbolic")(rows, rows.clone())
        torch.jit.trace(swiglu, (rows, rows.clone()), check_trace=False)
    assert not memory_of(swiglu)
    with pytest.raises(ValueError, match="gate must be a dense tensor, got one that is nested"):
        swiglu(*[torch.nested.nested_tensor([row]) for row in rows[:2]])
