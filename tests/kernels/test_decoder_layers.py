"""decoder_layers against PyTorch's modules, and that not a bit depends on what is read beside a node."""
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from specvis_kernels import DecoderLayer, backends, decoder_layers, pack_layers, tree_links
from tests import cases
from tests.cases.comparing import assert_agree, make, run

CPU = pytest.mark.skipif(cases.DEVICE != "cpu", reason="only the CPU's kernel promises this")


def chain(n):
    return tree_links(torch.arange(-1, n - 1, dtype=torch.int32)[None]).ancestors


def read(x, layers, cache, widths, rotations, first=3):
    """Nodes of a chain after `first` columns, some at a time."""
    cache, parts, done = cache.clone(), [], 0
    for n in widths:
        at = torch.full((1,), first + done)
        parts.append(decoder_layers(x[:, done: done + n], layers, cache, at, chain(n), at + torch.arange(n)[None],
                                    rotations))
        done += n
    return torch.cat(parts, 1), cache


@CPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_nodes_batch_or_threads(dtype, set_threads):
    (x, layers, cache, _, _, _, rotations), _ = cases.decoder_layers(1, 33, 192, 3, 3, 64, 500, {"dtype": dtype})
    set_threads(1)
    one_by_one, written = read(x, layers, cache, [1] * 33, rotations)
    for num_threads in (1, 2, 3):
        set_threads(num_threads)
        for widths in ([33], [2, 3, 5, 9, 14], [17, 16]):
            got, got_cache = read(x, layers, cache, widths, rotations)
            assert torch.equal(got, one_by_one) and torch.equal(got_cache, written)
    many = read(x.repeat(6, 1, 1), layers, cache.repeat(1, 6, 1, 1, 1, 1), [17, 16], rotations)[0]
    assert torch.equal(many, one_by_one.repeat(6, 1, 1))
    oracle = decoder_layers(x, layers, cache.clone(), torch.tensor([3]), chain(33), 3 + torch.arange(33)[None],
                            rotations, backend="oracle")
    assert not torch.equal(oracle, one_by_one)  # the above is about products in another order


@CPU
def test_a_tree_is_read_as_its_paths():
    (x, layers, cache, _, _, _, rotations), _ = cases.decoder_layers(1, 4, 64, 2, 1, 32, 64, {"dtype": torch.bfloat16})
    x[:, 3] = x[:, 1]  # a root with children 1 and 2; 3 is the child of 2
    parents = torch.tensor([[-1, 0, 0, 2]], dtype=torch.int32)
    at, depth = torch.tensor([5]), torch.tensor([[0, 1, 1, 2]])
    tree = decoder_layers(x, layers, cache.clone(), at, tree_links(parents).ancestors, at + depth, rotations)
    path, _ = read(x[:, [0, 2, 3]], layers, cache, [1, 2], rotations, 5)
    assert torch.equal(tree[:, [0, 2, 3]], path)


def test_is_a_llama_layer():
    """PyTorch's own operations in float64, with everything that a layer may have."""
    (x, layers, cache, *_), _ = cases.decoder_layers(1, 3, 64, 4, 2, 16, 40)
    g = torch.Generator().manual_seed(1)
    E, H, G, D = 64, 4, 2, 16
    w = {name: torch.randn(*size, generator=g) * size[1] ** -0.5 for name, size in {
        "qkv": ((H + 2 * G) * D, E), "out": (E, H * D), "gate": (40, E), "up": (40, E), "down": (E, 40)}.items()}
    v = {name: torch.randn(n, generator=g) for name, n in (("ffn_norm", E), ("attention_norm", E),
                                                           ("qkv_bias", (H + 2 * G) * D), ("out_bias", E))}
    scale, shift = torch.randn(2, H + G, D, generator=g)
    layers = pack_layers([DecoderLayer(**w, **v, head_norms=(scale, shift))], heads=H, eps=1e-6, rotates_halves=True)
    angles = torch.rand(6, D // 2, generator=g)
    rotations = torch.stack([angles.cos(), angles.sin()], -1)
    positions = torch.tensor([[2, 3, 4]])
    cache = torch.zeros(1, 2, 3, 2, G, D)
    got = decoder_layers(x, layers, cache, torch.tensor([0]), chain(3), positions, rotations)

    x, w, v = x.double(), {k: t.double() for k, t in w.items()}, {k: t.double() for k, t in v.items()}
    y = F.rms_norm(x, (E,), v["attention_norm"], 1e-6) @ w["qkv"].T + v["qkv_bias"]
    q, k, value = y.view(2, 3, -1, D).split([H, G, G], 2)
    q, k = (F.layer_norm(t, (D,)) * a + b for t, a, b in ((q, scale[:H], shift[:H]), (k, scale[H:], shift[H:])))
    cosine, sine = (t[positions[0]].repeat(1, 2)[:, None].double() for t in (angles.cos(), angles.sin()))
    q, k = (t * cosine + torch.cat([-t[..., D // 2:], t[..., :D // 2]], -1) * sine for t in (q, k))
    attended = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, value)), is_causal=True,
                                              enable_gqa=True).transpose(1, 2).flatten(2)
    x = x + attended @ w["out"].T + v["out_bias"]
    y = F.rms_norm(x, (E,), v["ffn_norm"], 1e-6)
    x = x + (F.silu(y @ w["gate"].T) * (y @ w["up"].T)) @ w["down"].T
    torch.testing.assert_close(got.double(), x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache[0].transpose(1, 2).double(), torch.stack([k, value], 1), rtol=1e-5, atol=1e-5)


@CPU
@pytest.mark.parametrize("backend", backends("decoder_layers", cases.DEVICE))
@pytest.mark.parametrize("length", [-1, 2**63 - 1])
def test_a_nan_stays_in_its_row_and_nothing_is_written_outside(length, backend):
    args, kwargs = cases.decoder_layers(2, 5, 64, 2, 2, 32, 64)
    x, layers, cache, _, ancestors, positions, rotations = args
    T, lengths = cache.shape[2], torch.tensor([cache.shape[2] - 2, length])  # three nodes have no column; no node has
    before = cache.clone()
    x[2] = torch.nan  # row 2 is request 0's
    hidden = decoder_layers(x, layers, cache, lengths, ancestors, positions, rotations, **kwargs, backend=backend)
    assert hidden[2].isnan().all() and not hidden[[0, 1, 3]].isnan().any()
    assert torch.equal(cache[:, 1::2], before[:, 1::2]) and torch.equal(cache[:, ::2, :T - 2], before[:, ::2, :T - 2])
    assert not torch.equal(cache[:, 0, T - 2:], before[:, 0, T - 2:])


@pytest.mark.parametrize("more", [{}, {"dtype": torch.float16},
                                  {"out_norms": True, "extra": True, "dtype": torch.float32}])
@pytest.mark.parametrize("case", cases.CASES["decoder_layers"])
def test_weights_are_read_where_they_are(case, more, monkeypatch):
    """Products of PyTorch's, and between them the other ops by this device's kernels: what a GPU runs."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # else a CPU has no such backend
    *sizes, options = case if isinstance(case[-1], dict) else (*case, {})
    args, kwargs = make("decoder_layers", *sizes, options | more | {"in_panels": False})
    expected = run("decoder_layers", args, kwargs, "oracle")
    with torch.autocast("cpu", torch.bfloat16):  # which changes no op
        assert_agree("decoder_layers", run("decoder_layers", args, kwargs, "triton"), expected, "triton")
    assert all(v.is_contiguous() for v in args[1].vectors)
    if not more:  # in panels, too
        in_panels, _ = make("decoder_layers", *sizes, options | {"in_panels": True})
        for backend in ("oracle", "triton"):
            assert_agree("decoder_layers", run("decoder_layers", in_panels, kwargs, backend), expected, backend)
    with pytest.raises(RuntimeError, match="must be packed in_panels|must be float32 or bfloat16"):
        run("decoder_layers", args, kwargs, "cpu")
    with pytest.raises(ValueError, match="must be None for a CPU's kernel" if "out_norms" in more else "got float16"):
        make("decoder_layers", *sizes, options | (more or {"dtype": torch.float16}) | {"in_panels": True})


SETS = ["DEFAULT", "AVX2", "AVX512"]


@CPU
@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_every_kind_of_processor(capability):
    """The instruction sets of this processor. PyTorch's variable chooses, so another process runs the comparisons."""
    best = torch.backends.cpu.get_cpu_capability()
    if capability.upper() not in SETS[:1 + SETS.index(best) if best in SETS else 1]:
        pytest.skip(f"this processor has {best}")
    code = ("from tests import cases\nfrom tests.cases.comparing import *\n"
            "for op in ('decoder_layers', 'denoise_tokens', 'packed_linear', 'transformer_blocks', 'tree_attention'):\n"
            "    for case in cases.CASES[op]:\n"
            "        args, kwargs = make(op, *case)\n"
            "        assert_agree(op, run(op, args, kwargs, 'cpu'), run(op, args, kwargs, 'oracle'))")
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"ATEN_CPU_CAPABILITY": capability})


def test_refuses_what_does_not_fit():
    args, kwargs = cases.decoder_layers(1, 2, 64, 2, 1, 32, 64)
    named = dict(zip(("x", "layers", "kv_cache", "lengths", "ancestors", "positions", "rotations"), args)) | kwargs
    L, R, T = named["kv_cache"].shape[:3]
    by_hand = [("layers", args[1]._replace(**{name: value}), message) for name, value, message in (
        ("matrices", None, "layers.matrices must be a list of .* tensors, as pack_layers makes it, got NoneType"),
        ("vectors", [args[1].vectors[0][:, 1:]], rf"layers.vectors\[0\] must be float32 \(m={L}, n="),
        ("vectors", None, "layers.vectors must be a list of 1 tensors, .*, got NoneType"),
        ("last_norm", args[2].new_zeros(8), r"layers.last_norm must be float32 \(E=64\), got float32 \(8,\)"),
        ("heads", "2", "layers.heads must be an integer >= 1, got '2'"),
        ("ffn_dim", None, "layers.ffn_dim must be an integer >= 1, got None"),
        ("eps", float("nan"), "layers.eps must be a number >= 0 that fits into float32, got nan"),
        ("head_eps", -1, "layers.head_eps must be a number >= 0 that fits into float32, got -1"))]
    for name, value, message in (
            *by_hand, ("x", args[0].bfloat16(), "kv_cache must be bfloat16 .*, got float32"),
            ("layers", None, "layers must be PackedLayers, from pack_layers, got NoneType"),
            ("kv_cache", args[2].bfloat16(), "kv_cache must be float32 .*, got bfloat16"),
            ("kv_cache", args[2].transpose(1, 2), rf"kv_cache must be float32 \(L={L}, R={R}, .*got float32"),
            ("kv_cache", args[2][..., :16].contiguous(), "rotations must be float32 .*pairs=8"),
            ("first_node", 63, "ancestors must have a word for each 64 nodes, got W=1 for 65 nodes"),
            ("first_node", -1, "first_node must be an integer >= 0, got -1"),
            ("positions", args[5].float(), "positions must be int32 or int64|positions must be int64 or int32")):
        with pytest.raises(ValueError, match=message):
            decoder_layers(**named | {name: value})


def test_layers_that_cannot_be_packed():
    w = torch.zeros(16, 16)
    layer = DecoderLayer(qkv=w.repeat(3, 1), out=w, gate=w, up=w, down=w, ffn_norm=w[0], attention_norm=None)
    for layers, heads, message in (
            ([], 1, "layers must be DecoderLayers, at least one"),
            (layer, 1, "layers must be DecoderLayers, at least one"),
            ([layer], 0, "heads must be an integer >= 1, got 0"),
            ([layer], 2, r"layers must have E and D that are multiples of 16, .*, got E=16, D=8"),
            ([layer._replace(up=w[:8])], 1, r"layers\[0\].up must be float32 \(F=16, E=16\), got float32 \(8, 16\)"),
            ([layer, layer._replace(out=None)], 1, r"layers\[1\].out must be float32 \(E=16, HD=16\), got NoneType"),
            ([layer._replace(qkv=w.repeat(4, 1))], 1, r"qkv must have \(H \+ 2 Hkv\) D outputs, .* got 64"),
            ([layer._replace(qkv=w.repeat(5, 1))], 1, "with H=1 a multiple of Hkv, and D=16, got 80"),
            ([layer._replace(head_norms=(w[:2],))], 1, r"layers\[0\].head_norms must be two tensors, scale and shift"),
            ([layer._replace(head_norms=(w[:2], w[:3]))], 1, r"head_norms must be float32 \(heads=2, D=16\), got"),
            ([layer, layer._replace(attention_norm=w[0])], 1, "layers must all have equal norms"),
            ([DecoderLayer(**{k: t if t is None else t.half() for k, t in layer._asdict().items()
                               if k[-4:] != "bias" and k != "head_norms"})], 1, "float32 or bfloat16, got float16")):
        with pytest.raises(ValueError, match=message):
            pack_layers(layers, heads=heads)
    with pytest.raises(ValueError, match=r"last_norm must be float32 or bfloat16 \(E=16\), got float32 \(8,\)"):
        pack_layers([layer], w[0, :8], heads=1)
