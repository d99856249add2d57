"""Inputs of attention and of the ops with weights."""
import torch

from specvis_kernels import DenoiserBlock, TransformerBlock, pack_blocks, pack_denoiser, pack_weight
from specvis_kernels.decoder_layers import DecoderLayer, pack_layers
from tests.cases.common import CASES, DEVICE, TOLERANCES, ancestors_of, random_parents

# As many heads of q as of keys, and more; each dtype; more nodes than a tile; a padded condition.
CASES["tree_attention"] = [
    (1, 1, 1, 1, 16),
    (2, 7, 4, 2, 32, {"mask": True}),
    (3, 20, 2, 2, 48, {"dtype": torch.bfloat16, "columns": 60}),
    (1, 70, 3, 1, 100, {"dtype": torch.float16, "columns": 150}),
]
# Of 16 bits, to which a GPU's kernel rounds the weights before it multiplies by v, as others do;
# tests/kernels/test_tree_attention.py has the other dtypes.
TOLERANCES["tree_attention"] = {0: (1e-2, 1e-2 if DEVICE == "cuda" else 1e-3)}


def tree_attention(B, N, H, Hkv, D, options=None):
    """Rows with and without the condition. Keys and values are views of one cache (R, T, 2, Hkv, D).

    lengths: of the requests; None: several that take turns, 0 among them. mask: columns of a padded condition.
    """
    options = {"dtype": torch.float32, "columns": N + 20, "lengths": None, "mask": False} | (options or {})
    dtype, T = options["dtype"], options["columns"]
    g = torch.Generator().manual_seed(B + N + H + D)
    ancestors = ancestors_of(random_parents(B, N - 1, g))
    lengths = options["lengths"] or [T - N, 0, 5]
    q, cache = torch.randn(2 * B, N, H, D, generator=g), torch.randn(2 * B, T, 2, Hkv, D, generator=g)
    k, v = cache.to(DEVICE, dtype).unbind(2)
    kwargs = {"key_mask": (torch.rand(2 * B, 9, generator=g) < 0.5).to(DEVICE)} if options["mask"] else {}
    return (q.to(DEVICE, dtype), k, v, torch.tensor(lengths).repeat(B)[:B].to(DEVICE), ancestors.to(DEVICE)), kwargs


def branch_scale(layers):
    """The scale of the weights that write to the residual stream. As in GPT-2, it falls with the root of the number of
    layers. Then errors of rounding grow little with the layers, and one tolerance fits all."""
    return min(1, (2 / layers) ** 0.5)


# More heads than of keys; biases and norms of q and k; each format of positions; nodes after the first level; one layer
# without norms.
CASES["decoder_layers"] = [
    (1, 1, 16, 1, 1, 16, 16),
    (2, 7, 64, 4, 2, 32, 40, {"mask": True, "halves": True, "extra": True}),
    (3, 14, 48, 3, 3, 16, 100, {"dtype": torch.bfloat16, "first": 3}),
    (1, 33, 64, 2, 1, 48, 64, {"norm": False, "layers": 1}),
]
# Of 16 bits; its own tests have the others. The cache is written to, and is an argument too.
TOLERANCES["decoder_layers"] = dict.fromkeys((0, 1, 4, 5), (1e-2, 3e-2))


def decoder_layers(B, N, E, H, Hkv, D, ffn_dim, options=None):
    """Rows with and without the condition. extra: biases, and LayerNorms of q and k."""
    options = {"dtype": torch.float32, "first": 0, "mask": False, "halves": False, "extra": False, "norm": True,
               "layers": 2, "in_panels": None, "out_norms": False} | (options or {})
    dtype, first, L = options["dtype"], options["first"], options["layers"]
    g = torch.Generator().manual_seed(B + N + E + D)

    def normal(*sizes, scale=1.0):
        return (torch.randn(*sizes, generator=g) * scale).to(DEVICE, dtype)

    def layer():
        sizes = ((H + 2 * Hkv) * D, E), (E, H * D), (ffn_dim, E), (ffn_dim, E), (E, ffn_dim)
        norms = 1 + normal(E, scale=0.1), 1 + normal(E, scale=0.1) if options["norm"] else None
        extra = normal((H + 2 * Hkv) * D), normal(E), (1 + normal(H + Hkv, D, scale=0.1), normal(H + Hkv, D))
        scales = 1, branch_scale(L), 1, 1, branch_scale(L)
        return DecoderLayer(*(normal(*size, scale=scale * size[1] ** -0.5) for size, scale in zip(sizes, scales)),
                            *norms, *(extra if options["extra"] else (None,) * 3),
                            *((1 + normal(E, scale=0.1), normal(E)) if options["out_norms"] else ()))

    layers = pack_layers([layer() for _ in range(L)], 1 + normal(E, scale=0.1) if options["norm"] else None, heads=H,
                         rotates_halves=options["halves"], in_panels=options["in_panels"])
    T = first + N + 20
    angles = torch.rand(T, D // 2, generator=g) * 6
    ancestors = ancestors_of(random_parents(B, first + N - 1, g))[:, first:].contiguous()
    lengths = torch.tensor([20, 0, 5]).repeat(B)[:B].to(DEVICE)
    kwargs = {"first_node": first}
    if options["mask"]:
        kwargs["key_mask"] = (torch.rand(2 * B, 9, generator=g) < 0.5).to(DEVICE)
    return (normal(2 * B, N, E), layers, normal(L, 2 * B, T, 2, Hkv, D), lengths, ancestors.to(DEVICE),
            torch.randint(T + 3, (B, N), generator=g).to(DEVICE),
            torch.stack([angles.cos(), angles.sin()], -1).to(DEVICE)), kwargs


# Short and long rows, and many; with and without a residual; each dtype.
CASES["rms_norm"] = [(1, 1), (3, 20, torch.bfloat16, True), (7, 1280, torch.bfloat16, True), (200, 99),
                     (2, 100, torch.float16, True)]


def rms_norm(M, E, dtype=torch.float32, residual=False):
    g = torch.Generator().manual_seed(M + E)
    x, more = (torch.randn(M, E, generator=g).mul(3).to(DEVICE, dtype) for _ in range(2))
    weight = (1 + torch.randn(E, generator=g) * 0.1).to(DEVICE, dtype)
    return (x, weight), {"residual": more if residual else None}


# Pairs that are neighbors and that are halves; nodes after the first level; each dtype; LayerNorms of heads.
CASES["rotate_into_cache"] = [
    (1, 1, 1, 1, 2),
    (2, 7, 4, 2, 20, {"halves": True, "first": 3}),
    (3, 20, 3, 3, 64, {"dtype": torch.bfloat16}),
    (1, 33, 2, 1, 96, {"dtype": torch.float16, "halves": True}),
    (2, 5, 4, 2, 24, {"norms": True, "dtype": torch.bfloat16}),
    (1, 3, 2, 1, 20, {"halves": True, "pairs": 6}),
]


def rotate_into_cache(B, N, H, Hkv, D, options=None):
    """Rows with and without the condition, and columns and positions that do not exist."""
    options = {"dtype": torch.float32, "first": 0, "halves": False, "columns": N + 20,
               "lengths": None, "norms": False, "pairs": D // 2} | (options or {})
    dtype, first, T = options["dtype"], options["first"], options["columns"]
    g = torch.Generator().manual_seed(B + N + D)
    qkv, cache = (torch.randn(*size, generator=g).to(DEVICE, dtype)
                  for size in ((2 * B, N, (H + 2 * Hkv) * D), (2 * B, T, 2, Hkv, D)))
    lengths = torch.tensor(options["lengths"] or [T - N + 1, 0, -1]).repeat(B)[:B].to(DEVICE)
    angles = torch.rand(T, options["pairs"], generator=g) * 6
    positions = torch.randint(-2, T + 3, (B, N), generator=g).to(DEVICE)
    norms = tuple(torch.randn(2, H + Hkv, D, generator=g).to(DEVICE, dtype)) if options["norms"] else None
    return (qkv, cache, lengths, positions, torch.stack([angles.cos(), angles.sin()], -1).to(DEVICE)), \
        {"first_node": first, "rotates_halves": options["halves"], "head_norms": norms}


# Short and long rows of each dtype.
CASES["swiglu"] = [(1, 1), (3, 50, torch.bfloat16), (5, 700), (2, 2048, torch.float16)]


def swiglu(M, F, dtype=torch.float32):
    g = torch.Generator().manual_seed(M + F)
    gate, up = (torch.randn(M, F, generator=g).mul(8).to(DEVICE, dtype) for _ in range(2))
    return (gate, up), {}


# With and without guidance; no block, and several.
CASES["denoise_tokens"] = [(1, 1, 2, 1, 16, 0), (13, 5, 4, 2, 48, 2), (3, 4, 8, 1, 64, 3)]
TOLERANCES["denoise_tokens"] = {i: (1e-4, 1e-4) for i in range(3)}  # sums are in another order


def denoise_tokens(R, T, C, P, W, blocks):
    """P: rows of z for each token, with guidance 2"""
    g = torch.Generator().manual_seed(R + T + W)

    def normal(*sizes, scale=1.0):
        return (torch.randn(*sizes, generator=g) * scale).to(DEVICE)

    def linear(outputs, inputs):
        return normal(outputs, inputs, scale=inputs ** -0.5), normal(outputs, scale=0.1)

    parts = [DenoiserBlock(1 + normal(W, scale=0.1), normal(W, scale=0.1), *linear(W, W), *linear(W, W),
                           *linear(3 * W, W)) for _ in range(blocks)]
    network = pack_denoiser(parts, *linear(W, C), *linear(2 * W, W), *linear(2 * C, W))
    schedule = torch.tensor([0., 1.1, 0.4, 0.5, 0.5, -1.5, -1.]).repeat(T, 1) + torch.rand(T, 7, generator=g) * 0.1
    kwargs = {"guidance": 1 + torch.rand(R, generator=g).to(DEVICE)} if P == 2 else {}
    return ((normal(R, T, C), normal(R, P, W), normal(T, W), network, schedule.to(DEVICE)),
            kwargs | {"temperature": 0.9, "clip_range": 1.5})


# A mask, only some rows wanted; more rows than a tile of keys.
CASES["transformer_blocks"] = [(1, 1, 16, 1, 16), (3, 130, 48, 3, 80, {"mask": True, "wanted": 5}),
                               (2, 30, 64, 2, 64, {"dtype": torch.bfloat16, "mask": True})]
TOLERANCES["transformer_blocks"] = {0: (1e-2, 2e-2)}  # of 16 bits; its own tests have the others


def transformer_blocks(R, N, E, heads, ffn_dim, options=None):
    options = {"dtype": torch.float32, "mask": False, "wanted": None, "layers": 2} | (options or {})
    g = torch.Generator().manual_seed(R + N + E)

    def normal(*sizes, scale=1.0):
        return (torch.randn(*sizes, generator=g) * scale).to(DEVICE, options["dtype"])

    def block():
        norm, linear = (lambda: (1 + normal(E, scale=0.1), normal(E, scale=0.1)),
                        lambda n, k, scale=1: (normal(n, k, scale=scale * k ** -0.5), normal(n, scale=0.1)))
        scale = branch_scale(options["layers"])
        return TransformerBlock(*norm(), *linear(3 * E, E), *linear(E, E, scale), *norm(), *linear(ffn_dim, E),
                                *linear(E, ffn_dim, scale))

    kwargs = {}
    if options["mask"]:
        kwargs["key_mask"] = (torch.rand(R, N, generator=g) < 0.7).to(DEVICE)
    if options["wanted"] is not None:
        kwargs["wanted"] = torch.randint(N, (R, options["wanted"]), generator=g).to(DEVICE)
    last_norm = (1 + normal(E, scale=0.1), normal(E)) if options["mask"] else None
    blocks = pack_blocks([block() for _ in range(options["layers"])], last_norm, heads=heads)
    return (normal(R, N, E), blocks), kwargs


# Outputs that fill no pack, and one; many rows; 16 bits; with and without a bias.
CASES["packed_linear"] = [(1, 2, 1), (3, 48, 70), (25, 64, 128, torch.bfloat16, False)]
TOLERANCES["packed_linear"] = {0: (1e-5, 2e-6)}  # sums are in another order


def packed_linear(M, K, outputs, dtype=torch.float32, bias=True):
    g = torch.Generator().manual_seed(M + K)
    x, weight = (torch.randn(n, K, generator=g).mul(scale).to(DEVICE, dtype)
                 for n, scale in ((M, 1), (outputs, K ** -0.5)))
    return (x, pack_weight(weight), outputs, torch.randn(outputs, generator=g).to(DEVICE) if bias else None), {}
