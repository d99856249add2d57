"""First mistakes of a caller: integers of the other dtype, one tree for all requests, numbers out of their range.

The Python functions accept or refuse these before a kernel is chosen, so PyTorch's choice of backend is enough.
"""
import inspect

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import specvis_kernels
from specvis_kernels import commit_kv, couple_tokens, guided_probs, philox_words, tree_links, verify_logits
from tests.kernels import inputs
from tests.kernels.inputs import DEVICE
from tests.laws.test_every_op import as_tuple, by_name, make, run, same

OTHER = {torch.int32: torch.int64, torch.int64: torch.int32}
STRICT = {"ancestors", "status", "neighbors"}  # words of bits, bits, and a table that kernels read as it is
SHARED = {"ancestors", "first_child", "next_sibling", "draft_row", "depth"}
NAN, INF = float("nan"), float("inf")


def cases_of(op):
    """The arguments of every case by name: (arguments that are written to, the others)."""
    for case in inputs.CASES[op]:
        yield by_name(op, *make(op, *case))


def is_integer(tensor):
    return isinstance(tensor, torch.Tensor) and tensor.dtype in OTHER


@pytest.mark.parametrize("op", [op for op in inputs.CASES if op != "codebook_neighbors"])
def test_integers_of_either_dtype(op):
    """All integers at once; numbers beyond int32 are out of range as in int32."""
    turned = set()
    for written, others in cases_of(op):
        names = {name for name, a in others.items() if is_integer(a)} - STRICT
        small = {name: others[name].clamp(-2**31, 2**31 - 1) for name in names}  # numbers of both dtypes
        expected = run(op, (), written | others | small)
        got = run(op, (), written | others | {name: a.to(OTHER[a.dtype]) for name, a in small.items()})
        assert all(map(same, got, expected))
        turned |= names
        if others.keys() & {"first_child", "parents", "accepted_nodes"}:
            wild = {name: torch.full_like(others[name], sign * 2**31, dtype=torch.int64) for sign in (-1, 1)
                    for name in ("first_child", "next_sibling", "parents", "accepted_nodes") if name in others}
            edge = {name: a.clamp(-2**31, 2**31 - 1).int() for name, a in wild.items()}
            assert all(map(same, run(op, (), written | others | wild), run(op, (), written | others | edge)))
    annotated = set(inspect.signature(getattr(specvis_kernels, op)).parameters) & {
        "tokens", "positions", "seeds", "lengths", "start", "depth", "accepted_nodes", "num_accepted", "parents",
        "first_child", "next_sibling", "draft_row", "guesses", "groups", "width", "size", "root", "candidates"}
    assert annotated - set(inputs.MUTATES.get(op, ())) - turned <= (
        {"tokens"} if op in ("accept_gaussian", "resample_gaussian") else set())


def test_noise_of_either_dtype():
    seeds, positions = torch.tensor([3, -4]), torch.tensor([[0, -1], [5, 2**31 - 1]])
    words = philox_words(seeds, positions, 5, 2)
    assert torch.equal(words, philox_words(seeds.int(), positions.int(), 5, 2))


@pytest.mark.parametrize("op", [op for op in inputs.CASES if SHARED & set(
    inspect.signature(getattr(specvis_kernels, op)).parameters)])
def test_one_tree_for_all_requests(op):
    given = set()
    for written, others in cases_of(op):
        names = {name for name in SHARED & others.keys() if others[name] is not None}
        if op == "tree_mask" and others["lengths"] is None is others.get("start"):
            continue  # the batch is that of the tree
        every = {name: others[name][:1].expand_as(others[name]) for name in names}
        one = {name: others[name][:1] for name in names}
        assert all(map(same, run(op, (), written | others | one), run(op, (), written | others | every)))
        for name in names - {"ancestors"} if op == "tree_mask" else names:  # B is that of these ancestors
            with pytest.raises(ValueError, match=f"{name} must be int64"):
                run(op, (), written | others | {name: torch.cat([every[name], one[name], one[name]])})
        given |= names
    assert given == SHARED & set(inspect.signature(getattr(specvis_kernels, op)).parameters)


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_what_fits_costs_nothing():
    """No copy, no conversion, no other kernel."""
    for op in ("verify_tree", "verify_greedy", "tree_attention", "commit_kv", "tree_mask"):
        args, kwargs = make(op, *inputs.CASES[op][1])
        with Calls() as calls:
            getattr(specvis_kernels, op)(*args, **kwargs)
        assert calls.names == [f"specvis_kernels::{op}"]


def test_conversion_is_traced():
    """It is traced in one graph of torch.compile, in make_fx and by vmap."""
    args, kwargs = make("verify_greedy", *inputs.CASES["verify_greedy"][1])
    target_tokens, tokens, child, sibling = args
    expected = specvis_kernels.verify_greedy(target_tokens, tokens, *(a[:1].expand_as(a) for a in (child, sibling)),
                                             **kwargs)

    def verify(target_tokens, tokens, child, sibling):
        return as_tuple(specvis_kernels.verify_greedy(target_tokens, tokens, child, sibling, **kwargs))

    wide = (target_tokens.int(), tokens.int(), child[:1].long(), sibling[:1].long())
    torch._dynamo.reset()
    for function in (torch.compile(verify, backend="aot_eager", fullgraph=True), make_fx(verify)(*wide)):
        assert all(map(same, function(*wide), expected))
    mapped = torch.func.vmap(verify)(*(torch.stack([a, a]) for a in wide))
    assert all(same(a[1], b) for a, b in zip(mapped, expected))


LOGITS = torch.zeros(2, 3, 5, device=DEVICE)
TREE = tuple(torch.full((2, 3), value, device=DEVICE) for value in (0, -1, -1))
PLAIN = dict(guidance=1.0, temperature=1.0, top_k=0, top_p=1.0)


@pytest.mark.parametrize("op", ["guided_probs", "draw_tokens", "verify_logits", "draft_children", "draft_frontier"])
def test_settings_of_logits_have_ranges(op):
    """This is about numbers. A tensor is not read: its row has INVALID_ROW, or the filter is off."""
    function = getattr(specvis_kernels, op)
    for _, named in cases_of(op):
        for name, numbers, message in [
                ("temperature", (-1.0, -1e-9, NAN, np.float32(-1)), "temperature must be a number >= 0, got "),
                ("top_p", (90, 1.0001, -0.1, NAN, INF), r"top_p must be a number in \[0, 1\], got ")]:
            for number in numbers:
                with pytest.raises(ValueError, match=message):
                    function(**named | {name: number})
            function(**named | {name: torch.full_like(named[name], numbers[0])})
        without = named | {"uncond": None}
        for number in (7.5, 0, -1.0, NAN):
            with pytest.raises(ValueError, match="guidance must be 1 or None without uncond, .*, got "):
                function(**without | {"guidance": number})
        ends = dict(temperature=0, top_k=-1, top_p=0) if named["uncond"] is None else dict(temperature=INF, top_p=1)
        for guidance in (None, 1, 1.0, torch.full_like(named["guidance"], 7.5)):
            function(**without | ends | {"guidance": guidance})


def test_a_wrong_number_in_a_graph():
    compiled = torch.compile(lambda x, p: guided_probs(x, None, **PLAIN | {"top_p": p}).probs, backend="eager")
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="top_p must be a number"):
        compiled(LOGITS, 90)


@pytest.mark.parametrize("op, name", [
    (op, name) for op in inputs.CASES for name in ("omega", "delta")
    if name in inspect.signature(getattr(specvis_kernels, op)).parameters])
def test_what_relaxes_is_not_negative(op, name):
    _, named = next(both for both in cases_of(op) if isinstance(both[1].get(name), torch.Tensor))
    for number in (-0.5, NAN, np.float64(-1)):
        with pytest.raises(ValueError, match=f"{name} must be a number >= 0, got "):
            run(op, (), named | {name: number})
    for number in (0, INF):
        assert all(map(same, run(op, (), named | {name: number}),
                       run(op, (), named | {name: torch.full_like(named[name], number)})))


def test_words_of_errors():
    """The sentence says what to do."""
    nodes, zero = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    pair = (torch.zeros(2, 4, 1), torch.zeros(2, 4, 1))
    for caches, message in [
            ([pair, pair], r"caches\[0\] is a tuple: flatten the pairs into one list of tensors$"),
            ([pair[0], [*pair]], r"caches\[1\] is a list: flatten"),
            ([pair[0], None], r"list of tensors, but caches\[1\] is a NoneType$"),
            ((), "caches must be a tensor or a list of at least one tensor")]:
        with pytest.raises(ValueError, match=message):
            commit_kv(caches, nodes, zero, zero)
    with pytest.raises(ValueError, match="uniforms must be None with seeds: by seeds a token is accepted if it equals "
                                         "the target's own draw, and uniforms plays no part in that"):
        verify_logits(LOGITS, None, *TREE, torch.zeros(2, 3, device=DEVICE), **PLAIN, seeds=zero.to(DEVICE),
                      positions=TREE[0])
    probs = torch.full((2, 3, 4), 0.25)
    with pytest.raises(ValueError, match=r"uniforms must be float32 \(B=2, W=3, accept and draw=2\), got float32"):
        couple_tokens(probs, probs, torch.zeros(2, 3).long(), torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"parents must be int64 or int32 \(B=1, N=2\), got float32 \(1, 2\)"):
        tree_links(torch.tensor([[-1.0, 0.0]]))
