"""Settings as one number for all requests, of Python or NumPy; and settings that may be left out."""
import inspect

import numpy as np
import pytest
import torch

import specvis_kernels
from specvis_kernels import sample_residual, tree_links, verify_greedy, verify_tree
from tests.kernels import inputs
from tests.kernels.inputs import DEVICE
from tests.laws.test_every_op import make, run, same


def case(op, i=1):
    args, kwargs = make(op, *inputs.CASES[op][i])
    return list(args), dict(kwargs)


def arguments_of(op):
    return list(inspect.signature(getattr(specvis_kernels, op)).parameters)


@pytest.mark.parametrize("op, name, value", [
    ("verify_tree", "delta", 0.25), ("verify_tree", "omega", 0.75), ("verify_tree", "greedy", True),
    ("verify_tree", "greedy", False), ("verify_logits", "delta", 0.25), ("verify_logits", "omega", 0.75),
    ("neighborhood_sum", "delta", 0.25), ("sample_residual", "omega", 0.75), ("couple_tokens", "delta", 0.25),
    ("couple_tokens", "omega", 1.5),
])
def test_a_number_stands_for_all_requests(op, name, value):
    """This holds in every case of the op that has the setting."""
    num_cases = 0
    for i in range(len(inputs.CASES[op])):
        args, kwargs = case(op, i)
        named = dict(zip(arguments_of(op), args)) | kwargs
        if not isinstance(named.get(name), torch.Tensor):
            continue
        num_cases += 1
        expected = run(op, (), named | {name: torch.full_like(named[name], value)})
        for number in [value] if isinstance(value, bool) else [value, np.float32(value), np.float64(value)]:
            assert all(map(same, run(op, (), named | {name: number}), expected))
    assert num_cases


@pytest.mark.parametrize("name, number", [("guidance", 3), ("temperature", np.float32(0.5)), ("top_k", np.int64(3)),
                                          ("top_p", 0.75)])
def test_settings_of_logits(name, number):
    args, kwargs = case("guided_probs", 1)
    at = ["guidance", "temperature", "top_k", "top_p"].index(name) + 2
    full = [*args[:at], torch.full_like(args[at], number), *args[at + 1:]]
    assert all(map(same, run("guided_probs", [*args[:at], number, *args[at + 1:]], kwargs),
                   run("guided_probs", full, kwargs)))


@pytest.mark.parametrize("op", ["guided_probs", "draw_tokens", "draft_children", "draft_frontier", "verify_logits"])
def test_guidance_may_be_none_without_uncond(op):
    args, kwargs = case(op, 1)
    at = arguments_of(op).index("guidance")
    args[1] = None
    kwargs.pop("uncond", None)
    expected = run(op, args, kwargs)
    args[at] = None
    assert all(map(same, run(op, args, kwargs), expected))
    args, kwargs = case(op, 1)
    args[at] = None
    with pytest.raises(ValueError, match=r"guidance must be float32 \(B=\d\) or a number, got None"):
        run(op, args, kwargs)


@pytest.mark.parametrize("op", ["verify_tree", "verify_logits", "verify_greedy"])
def test_max_depth(op):
    """The default is as deep as a tree can be; NumPy's integers count."""
    args, kwargs = case(op, 1)
    N = args[0].shape[1]
    assert all(map(same, run(op, args, kwargs | {"max_depth": None}), run(op, args, kwargs | {"max_depth": N - 1})))
    assert all(map(same, run(op, args, kwargs | {"max_depth": np.int64(2)}), run(op, args, kwargs | {"max_depth": 2})))


def test_a_default_of_one_node():
    links = tree_links(torch.tensor([[-1]], device=DEVICE))
    token = torch.tensor([[5]], device=DEVICE)
    result = verify_greedy(token, token, links.first_child, links.next_sibling)
    assert result.accepted_nodes.shape == (1, 0) and result.next_token.tolist() == [5]


TREE = {"target_probs": torch.full((2, 1, 4), 0.25, device=DEVICE),
        "tokens": torch.zeros(2, 1, dtype=torch.int64, device=DEVICE),
        "first_child": torch.full((2, 1), -1, dtype=torch.int32, device=DEVICE),
        "next_sibling": torch.full((2, 1), -1, dtype=torch.int32, device=DEVICE),
        "uniforms": torch.zeros(2, 1, device=DEVICE)}


@pytest.mark.parametrize("arguments, message", [
    ({"max_depth": 1.0}, "max_depth must be an integer >= 0, got 1.0"),
    ({"max_depth": torch.tensor(1)}, r"max_depth must be an integer >= 0, got tensor\(1\)"),
    ({"omega": "1"}, r"omega must be float32 \(B=2, P=0\) or a number, got '1'"),
    ({"omega": True}, r"omega must be float32 \(B=2, P=0\) or a number, got True"),
    ({"omega": torch.ones(2, 3)}, r"omega must be float32 \(B=2, P=0\), got float32 \(2, 3\)"),
    ({"greedy": 1}, r"greedy must be bool \(B=2\) or a bool, got 1"),
    ({"delta": 0.5}, "neighbors and delta must be given together, but neighbors is missing"),
    ({"neighbors": torch.zeros(4, 1, dtype=torch.int32)},
     "neighbors and delta must be given together, but delta is missing"),
    ({"draft_probs": TREE["target_probs"]},
     "draft_probs and draft_row must be given together, but draft_row is missing"),
])
def test_says_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        verify_tree(**TREE | arguments)


def test_an_integer_setting_takes_no_fraction():
    args, kwargs = case("guided_probs", 1)
    args[4] = 2.5
    with pytest.raises(ValueError, match=r"top_k must be int64 or int32 \(B=2\) or an integer, got 2.5"):
        run("guided_probs", args, kwargs)


def test_a_range_of_ids_in_numpys_integers():
    args, kwargs = case("guided_probs", 1)
    ids = {"id_range": tuple(map(np.int64, kwargs["id_range"]))}
    assert all(map(same, run("guided_probs", args, kwargs | ids), run("guided_probs", args, kwargs)))


def test_numbers_are_no_constants_of_a_compiled_graph():
    """torch.compile takes numbers too, in one graph."""
    torch._dynamo.reset()
    args, _ = case("sample_residual", 1)
    compiled = torch.compile(lambda omega: sample_residual(*args, omega=omega), backend="aot_eager", fullgraph=True)
    for omega in (0.5, 0.75):
        assert all(map(same, compiled(omega), sample_residual(*args, omega=omega)))
