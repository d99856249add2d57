"""What the public functions accept and refuse: tensors, integers, settings, counts, trees, and what is written to.

They decide before a kernel is chosen, so PyTorch's choice of backend is enough for most of this.
"""
import inspect
import re
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

import specvis_kernels
from specvis_kernels import backends, draw_tokens, guided_probs, philox_uniforms, sample_residual, verify_greedy
from specvis_kernels.noise import philox_words
from specvis_kernels.status import INVALID_DRAFT, INVALID_ROW, StatusError
from tests import cases
from tests.cases import DEVICE
from tests.cases.comparing import Recorder, as_tuple, by_name, make, run, same
from tests.laws.test_every_op import EVERY, TAKES_ROWS

NAN, INF = float("nan"), float("inf")
OPS = sorted(cases.CASES)
PARAMETERS = {op: list(inspect.signature(getattr(specvis_kernels, op)).parameters) for op in OPS}
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
          torch.bool)
FORGIVING = {("packed_linear", "x"), ("rms_norm", "x"), ("swiglu", "gate")}  # of dtype or dimensions
COUNTS = [  # op, the argument that is a count, the least that it may be
    ("codebook_neighbors", "k", 1), ("draft_children", "num_children", 1), ("draft_frontier", "first_candidate", 0),
    ("draft_frontier", "first_node", 1), ("draft_frontier", "level", 1), ("draft_frontier", "num_children", 1),
    ("draw_children", "num_children", 1), ("draw_tokens", "ahead", 0), ("expand_tree", "num_children", 1),
    ("select_tree", "num_nodes", 1), ("tree_mask", "columns", 1), ("verify_greedy", "max_depth", 0),
    ("verify_logits", "max_depth", 0), ("verify_tree", "max_depth", 0),
]
OTHER = {torch.int32: torch.int64, torch.int64: torch.int32}
STRICT = {"ancestors", "status", "neighbors"}  # words of bits, bits, and a table that kernels read as it is
SHARED = {"ancestors", "first_child", "next_sibling", "draft_row", "depth"}
SETTINGS = {"delta": (0.25, np.float32(0.5)), "omega": (1.5, np.float64(1.25)), "guidance": (3, np.float32(1.5)),
            "temperature": (0.5, np.float32(2)), "top_k": (3, np.int64(5)), "top_p": (0.75, np.float64(0.5)),
            "min_p": (0.25, np.float32(0.5)),
            "greedy": (True, False)}
MAY_BE_NUMBERS = [(op, name) for op in OPS for name in SETTINGS if name in PARAMETERS[op]
                  and (name != "temperature" or "top_k" in PARAMETERS[op])]


def cases_of(op):
    """The arguments of every case by name."""
    for case in cases.CASES[op]:
        written, others = by_name(op, *make(op, *case))
        yield written | others


def named_arguments(op):
    """The arguments of the last case, for ops that draw with `seeds` of the last one with these."""
    for named in reversed([*cases_of(op)]):
        if "seeds" not in PARAMETERS[op] or named.get("seeds") is not None:
            return named


def sizes_of(function, name, tensor):
    """How an error states a tensor's sizes, as a pattern: by the docstring's letters, if it has any."""
    letters = re.search(rf"^ +{name}: [^(]*\(([^)]*)\)", function.__doc__, re.M)
    letters = re.findall(r"[^, ]+", letters[1]) if letters else []
    if len(letters) != tensor.ndim:
        letters = [""] * tensor.ndim
    return ", ".join(rf"{letter if letter.isalpha() else '[a-z +A-Z]+'}={size}(?: or 1)?"
                     for letter, size in zip(letters, tensor.shape))


@pytest.mark.parametrize("op", OPS)
def test_a_tensor_that_does_not_fit_is_named(op):
    """Dtypes that are not in the sentence, a dimension more, another size, another device, a number, no tensor."""
    function, calls = getattr(specvis_kernels, op), {}
    for named in cases_of(op):
        for name in PARAMETERS[op]:
            if isinstance(named.get(name), torch.Tensor) and name != "caches":  # a list or a tensor of nearly any kind
                calls.setdefault(name, named)
    for i, (name, named) in enumerate(calls.items()):
        tensor = named[name]
        sizes = sizes_of(function, name, tensor)
        if (op, name) not in FORGIVING:
            with pytest.raises(ValueError) as error:
                function(**named | {name: tensor.to(torch.complex64)})
            said = re.match(rf"{name} must be ([\w ]+) \({sizes}\)(, or .*)?, got complex64 ", str(error.value))
            assert said, error.value
            for dtype in DTYPES:
                if str(dtype)[6:] not in said[1].split():
                    with pytest.raises(ValueError, match=f"{name} must be {said[1]} "):
                        function(**named | {name: tensor.to(dtype)})
            message = rf"{name} must (be {said[1]} \({sizes}\)|have {tensor.ndim} dimensions)"
            with pytest.raises(ValueError, match=message):
                function(**named | {name: tensor[None]})
        if i:  # the first one says where the others must be
            with pytest.raises(ValueError, match=f"{name} must be on {DEVICE}.* like the other tensors, got meta"):
                function(**named | {name: tensor.to("meta")})
        with pytest.raises(ValueError, match=f"{name} must be") as error:
            function(**named | {name: "none"})
        for number in () if re.search("or (an? )?(number|integer|bool)", str(error.value)) else (3, 0.5, True):
            with pytest.raises(ValueError, match=f"{name} must be"):
                function(**named | {name: number})
        for dim in range(tensor.ndim):
            with suppress(ValueError):  # no other error, which would come from a kernel's binding
                function(**named | {name: torch.cat([tensor, tensor], dim)})


@pytest.mark.parametrize("op", OPS)
def test_an_unknown_backend(op):
    message = f"backend of {op} must be one of oracle.* for {DEVICE} tensors here, got 'fast'"
    with pytest.raises(ValueError, match=message):
        getattr(specvis_kernels, op)(**named_arguments(op), backend="fast")


@pytest.mark.parametrize("op", [op for op in cases.CASES if op != "codebook_neighbors"])
def test_integers_of_either_dtype(op):
    """All integers at once; numbers beyond int32 are out of range as in int32."""
    turned = set()
    for named in cases_of(op):
        names = {name for name, a in named.items() if isinstance(a, torch.Tensor) and a.dtype in OTHER}
        names -= {*STRICT, *cases.MUTATES.get(op, ())}
        small = {name: named[name].clamp(-2**31, 2**31 - 1) for name in names}  # numbers of both dtypes
        expected = run(op, (), named | small)
        got = run(op, (), named | {name: a.to(OTHER[a.dtype]) for name, a in small.items()})
        assert all(map(same, got, expected))
        turned |= names
        links = [name for name in ("first_child", "next_sibling", "parents", "accepted_nodes") if name in named]
        for sign in (-1, 1) if links else ():
            wild = {name: torch.full_like(named[name], sign * 2**31, dtype=torch.int64) for name in links}
            edge = {name: a.clamp(-2**31, 2**31 - 1).int() for name, a in wild.items()}
            assert all(map(same, run(op, (), named | wild), run(op, (), named | edge)))
    annotated = {*PARAMETERS[op]} & {
        "tokens", "positions", "seeds", "lengths", "start", "depth", "accepted_nodes", "num_accepted", "parents",
        "first_child", "next_sibling", "draft_row", "guesses", "groups", "width", "size", "root", "candidates"}
    assert annotated - set(cases.MUTATES.get(op, ())) - turned <= (
        {"tokens"} if op in ("accept_gaussian", "resample_gaussian") else set())


def test_seeds_of_either_dtype_or_integers():
    seeds, positions = torch.tensor([3, -4]), torch.tensor([[0, -1], [5, 2**31 - 1]])
    words = philox_words(seeds, positions, 5, 2)
    assert torch.equal(words, philox_words(seeds.int(), positions.int(), 5, 2))
    assert torch.equal(words, philox_words(seeds, positions & (2**32 - 1), 5, 2))
    assert torch.equal(words, philox_words((3, -4), positions, 5, 2))
    assert torch.equal(words[1:], philox_words(-4, positions[1:], 5, 2))
    assert torch.equal(philox_uniforms([3, -4], 2, 5, stream=2), philox_uniforms(seeds, 2, 5, stream=2))
    for wrong in (3, [3], [3, 2**63], [3, 0.5], "34", None):
        with pytest.raises(ValueError, match="seeds must be .* 64 bits, one for each of the B=2 requests, got "):
            draw_tokens(LOGITS, None, **PLAIN, seeds=wrong, positions=TREE[0])


@pytest.mark.parametrize("op", [op for op in OPS if SHARED & {*PARAMETERS[op]}])
def test_one_tree_for_all_requests(op):
    given = set()
    for named in cases_of(op):
        names = {name for name in SHARED & named.keys() if named[name] is not None}
        if op == "tree_mask" and named["lengths"] is None is named.get("start"):
            continue  # the batch is that of the tree
        every = {name: named[name][:1].expand_as(named[name]) for name in names}
        one = {name: named[name][:1] for name in names}
        assert all(map(same, run(op, (), named | one), run(op, (), named | every)))
        for name in names - {"ancestors"} if op == "tree_mask" else names:  # B is that of these ancestors
            with pytest.raises(ValueError, match=f"{name} must be int64"):
                run(op, (), named | {name: torch.cat([every[name], one[name], one[name]])})
        given |= names
    assert given == SHARED & {*PARAMETERS[op]}


def test_what_fits_costs_nothing():
    """No copy, no conversion, no other kernel."""
    for op in ("verify_tree", "verify_greedy", "tree_attention", "commit_kv", "tree_mask"):
        args, kwargs = make(op, *cases.CASES[op][1])
        with Recorder() as recorder:
            getattr(specvis_kernels, op)(*args, **kwargs)
        assert recorder.names == [f"specvis_kernels::{op}"]


def test_conversion_is_traced():
    """It is traced in one graph of torch.compile, in make_fx and by vmap."""
    args, kwargs = make("verify_greedy", *cases.CASES["verify_greedy"][1])
    target_tokens, tokens, child, sibling = args
    expected = verify_greedy(target_tokens, tokens, *(a[:1].expand_as(a) for a in (child, sibling)), **kwargs)

    def verify(target_tokens, tokens, child, sibling):
        return as_tuple(verify_greedy(target_tokens, tokens, child, sibling, **kwargs))

    wide = (target_tokens.int(), tokens.int(), child[:1].long(), sibling[:1].long())
    torch._dynamo.reset()
    for function in (torch.compile(verify, backend="aot_eager", fullgraph=True), make_fx(verify)(*wide)):
        assert all(map(same, function(*wide), expected))
    mapped = torch.func.vmap(verify)(*(torch.stack([a, a]) for a in wide))
    assert all(same(a[1], b) for a, b in zip(mapped, expected))


@pytest.mark.parametrize("op, name", MAY_BE_NUMBERS)
def test_a_number_stands_for_all_requests(op, name):
    """Of Python or NumPy, in every case of the op that has the setting."""
    of_tensors = [named for named in cases_of(op) if isinstance(named.get(name), torch.Tensor)
                  and (name != "guidance" or named.get("uncond", ()) is not None)]
    assert of_tensors
    for named in of_tensors:
        for number in SETTINGS[name]:
            expected = run(op, (), named | {name: torch.full_like(named[name], number)})
            assert all(map(same, run(op, (), named | {name: number}), expected))
    kind, wrong = {"greedy": ("a bool", 1), "top_k": ("an integer", 1.0)}.get(name, ("a number", True))
    for value in ("1", wrong, *([None] if name == "temperature" else [])):
        with pytest.raises(ValueError, match=rf"{name} must be [\w ]+ \(.*\) or {kind}, got {value!r}"):
            run(op, (), named | {name: value})


@pytest.mark.parametrize("op", ["guided_probs", "draw_tokens", "draft_children", "draft_frontier", "verify_logits"])
def test_guidance_may_be_none_without_uncond(op):
    _, named, *_ = cases_of(op)
    without = named | {"uncond": None}
    assert all(map(same, run(op, (), without | {"guidance": None}), run(op, (), without)))
    with pytest.raises(ValueError, match=r"guidance must be float32 \(B=\d\) or a number, got None"):
        run(op, (), named | {"guidance": None})


@pytest.mark.parametrize("op", ["verify_tree", "verify_logits", "verify_greedy"])
def test_max_depth(op):
    """The default is as deep as a tree can be; NumPy's integers count."""
    args, kwargs = make(op, *cases.CASES[op][1])
    N = args[0].shape[1]
    assert all(map(same, run(op, args, kwargs | {"max_depth": None}), run(op, args, kwargs | {"max_depth": N - 1})))
    assert all(map(same, run(op, args, kwargs | {"max_depth": np.int64(2)}), run(op, args, kwargs | {"max_depth": 2})))
    args, kwargs = make(op, *cases.CASES[op][0])  # of one node
    result = getattr(specvis_kernels, op)(*args, **kwargs | {"max_depth": None})
    assert result.accepted_nodes.shape == (1, 0) and result.next_token.shape == (1,)


def test_a_range_of_ids_in_numpys_integers():
    args, kwargs = make("guided_probs", *cases.CASES["guided_probs"][1])
    ids = {"id_range": tuple(map(np.int64, kwargs["id_range"]))}
    assert all(map(same, run("guided_probs", args, kwargs | ids), run("guided_probs", args, kwargs)))


def test_numbers_are_no_constants_of_a_compiled_graph():
    """torch.compile takes numbers too, in one graph."""
    torch._dynamo.reset()
    args, _ = make("sample_residual", *cases.CASES["sample_residual"][1])
    compiled = torch.compile(lambda omega: sample_residual(*args, omega=omega), backend="aot_eager", fullgraph=True)
    for omega in (0.5, 0.75):
        assert all(map(same, compiled(omega), sample_residual(*args, omega=omega)))


LOGITS = torch.zeros(2, 3, 5, device=DEVICE)
TREE = tuple(torch.full((2, 3), value, device=DEVICE) for value in (0, -1, -1))
PLAIN = dict(guidance=1.0, temperature=1.0, top_k=0, top_p=1.0)


@pytest.mark.parametrize("op", ["guided_probs", "draw_tokens", "verify_logits", "draft_children", "draft_frontier"])
def test_settings_of_logits_have_ranges(op):
    """This is about numbers. A tensor is not read: its row has INVALID_ROW, or the filter is off."""
    function = getattr(specvis_kernels, op)
    for named in cases_of(op):
        for name, numbers, message in [
                ("temperature", (-1.0, -1e-9, NAN, np.float32(-1)), "temperature must be a number >= 0, got "),
                ("top_p", (90, 1.0001, -0.1, NAN, INF), r"top_p must be a number in \[0, 1\], got "),
                ("min_p", (90, 1.0001, -0.1, NAN, INF), r"min_p must be a number in \[0, 1\], got ")]:
            for number in numbers:
                with pytest.raises(ValueError, match=message):
                    function(**named | {name: number})
            function(**named | {name: torch.full_like(named["temperature"], numbers[0])})
        off = (function(**named | dict(zip(("top_k", "top_p", "min_p"), filters)))
               for filters in ((None, None, None), (0, 1.0, 0)))
        assert all(map(same, *off))
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


@pytest.mark.parametrize("op, name", [(op, name) for op in OPS for name in ("omega", "delta")
                                      if name in PARAMETERS[op]])
def test_what_relaxes_is_not_negative(op, name):
    named = next(named for named in cases_of(op) if isinstance(named.get(name), torch.Tensor))
    for number in (-0.5, NAN, np.float64(-1)):
        with pytest.raises(ValueError, match=f"{name} must be a number >= 0, got "):
            run(op, (), named | {name: number})
    for number in (0, INF):
        assert all(map(same, run(op, (), named | {name: number}),
                       run(op, (), named | {name: torch.full_like(named[name], number)})))


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


@pytest.mark.parametrize("op", sorted({op for op, _ in TAKES_ROWS}))
def test_rows_have_a_limit(op):
    """Masses of more ids could leave 63 bits."""
    (rows, *others), kwargs = make(op, *cases.CASES[op][1])
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


@pytest.mark.skipif("cuda_emulated" not in backends("tree_links"), reason="needs the emulated CUDA kernels")
@pytest.mark.parametrize("op, error, says", [
    ("draw_tokens", 9, r"draw_tokens: CUDA error: invalid configuration argument$"),
    ("tree_links", 700, r"tree_links: CUDA error: an illegal memory access .* kernel before this one: CUDA_LAUNCH_BLO"),
    ("tree_links", 209, r"tree_links: .* for GPUs of compute capability none, and this GPU has 9.0: build .*_LIST=9.0"),
])
def test_an_error_of_the_device_is_the_ops_that_it_meets(monkeypatch, op, error, says):
    """The message says which op it was, and the next op does not meet the error again."""
    monkeypatch.setenv("CUDA_ON_CPU_ERROR", str(error))
    with pytest.raises(RuntimeError, match=says):
        run(op, *make(op, *cases.CASES[op][1]), "cuda_emulated")
    monkeypatch.delenv("CUDA_ON_CPU_ERROR")
    run("tree_links", *make("tree_links", *cases.CASES["tree_links"][1]), "cuda_emulated")


@pytest.mark.parametrize("backend, says", [("cpu", "tree_mask: ValueError: not today"),
                                           ("cuda_emulated", "tree_mask: CUDA error: an illegal memory access")])
def test_not_every_failed_allocation_is_for_want_of_memory(monkeypatch, backend, says):
    """After a fault of a kernel none succeeds, and torch may have other reasons. From torch 2.13 on it says them."""
    if backend not in backends("tree_mask", DEVICE) or backend == "cpu" and torch.__version__ < "2.13":
        pytest.skip("it is not built, or torch does not say why")

    def refuse(*args, **kwargs):
        raise ValueError("not today")

    monkeypatch.setenv("CUDA_ON_CPU_ERROR", "700")
    library = torch.library.Library("aten", "IMPL")
    library.impl("new_empty", refuse, "CPU")
    try:
        with pytest.raises(RuntimeError, match=says):
            run("tree_mask", *make("tree_mask", *cases.CASES["tree_mask"][1]), backend, check=False)
    finally:
        library._destroy()


@pytest.mark.parametrize("op, name", [(op, name) for op, names in cases.MUTATES.items() for name in names])
def test_what_is_written_to_is_contiguous(op, name):
    named = named_arguments(op)
    with_gaps = tree_map_only(torch.Tensor, lambda a: torch.stack([a, a], -1)[..., 0], named[name])
    with pytest.raises(ValueError, match=f"{name} must be contiguous, since .* written to"):
        getattr(specvis_kernels, op)(**named | {name: with_gaps})


@pytest.mark.parametrize("op, backend", [(op, backend) for op, backend in EVERY if op in cases.MUTATES])
def test_what_is_written_to_shares_no_memory(op, backend):
    _, named, *_ = cases_of(op)

    def call(**changes):
        getattr(specvis_kernels, op)(**named | changes, backend=backend)

    def refuses(**changes):
        with pytest.raises((ValueError, RuntimeError), match="that is written to (shares memory|overlaps)"):
            call(**changes)

    call()
    if op == "commit_tokens":
        twice = torch.zeros(3, dtype=torch.int64)
        refuses(counts=twice, target_forwards=twice)
        refuses(counts=twice, next_token=twice)
        call(counts=torch.zeros(4, dtype=torch.int64)[:3], depth=twice, next_token=twice)  # two that are read may share
        memory = torch.zeros(27, dtype=torch.uint8, device=DEVICE)
        token = memory[:24].view(torch.int64)
        call(next_token=token, failed=memory[24:].view(torch.bool))
        refuses(next_token=token, failed=memory[23:26].view(torch.bool))  # begins in the last byte of what is read
    elif op in ("decoder_layers", "rotate_into_cache"):
        name = "x" if op == "decoder_layers" else "qkv"
        cache, x = named["kv_cache"], named[name]
        memory = torch.zeros(cache.numel() + x.numel() - 1, dtype=x.dtype, device=x.device)
        refuses(**{"kv_cache": memory[:cache.numel()].view(cache.shape), name: memory[-x.numel():].view(x.shape)})
    else:
        cache = named["caches"][0]
        memory = torch.zeros(cache.numel() + 1, dtype=cache.dtype, device=cache.device)
        refuses(caches=[cache, cache])
        refuses(caches=[memory[:-1].view(cache.shape), memory[1:].view(cache.shape)])


def test_meta_has_the_oracle_alone():
    for op in OPS:
        assert backends(op, "meta") == ["oracle"]
        assert backends(op, "cuda:1") == backends(op, "cuda")


TAKES_PROBS = [(op, backend, name) for op, backend in TAKES_ROWS for name in PARAMETERS[op]
               if name in ("probs", "target_probs", "draft_probs")]


@pytest.mark.parametrize("op, backend, name", TAKES_PROBS)
def test_logits_in_place_of_probabilities_are_reported(op, backend, name, monkeypatch):
    named = next(named for named in reversed([*cases_of(op)])  # one with draft rows, and enough of them
                 if named.get(name) is not None and named[name].shape[-2] > 1)
    logits = torch.randn(named[name].shape, generator=torch.Generator().manual_seed(0)).to(DEVICE) * 4
    named |= {name: logits} | ({"greedy": None} if "greedy" in named else {})
    status = run(op, (), named, backend)[-1]
    bit = INVALID_DRAFT if name == "draft_probs" and name != PARAMETERS[op][0] else INVALID_ROW
    assert (status & bit).any() and (bit == INVALID_DRAFT or (status & bit).all())
    monkeypatch.setattr("specvis_kernels._define.CHECKS", True)
    with pytest.raises(StatusError, match="are they logits rather than probabilities"):
        run(op, (), named, backend)
