"""Inputs of the ops on rows of logits or probabilities."""
import torch

from specvis_kernels.draw_tokens import _oracle as draw_tokens_oracle
from specvis_kernels.guided_probs import _oracle as guided_probs_oracle
from tests.cases.common import CASES, DEVICE, exact_probs, exact_uniforms, ids_of, neighbor_table, noise_keys, repeated

# guided_probs: logits are multiples of 1/8, guidance of 1/2, temperatures powers of two: exact until the exp.
# All three dtypes, with and without `uncond`; top-k, top-p, both, neither and temperature 0; each order of the filters;
# min-p that decides, that the others precede, and none.
CASES["guided_probs"] = [
    (1, 1, 2),
    (2, 3, 33, torch.bfloat16),
    (3, 2, 64),
    (2, 1, 1500, torch.float16, False),
    (3, 5, 64, torch.float32, True, None, "each", "p_then_k"),
    (3, 2, 1500, torch.float32, True, [(1.0, 4.0, 5, 0.5), (1.0, 1.0, 40, 0.9)], None, "p_then_k"),
    (3, 2, 64, torch.float32, True, [(1.0, 1.0, 0, 1.0, 0.05), (1.0, 2.0, 0, 0.9, 1.0), (1.0, 1.0, 20, 1.0, 0.0)]),
]


def guided_probs(B, N, V, dtype=torch.float32, uncond=True, settings=None, ranges="all", filters="k_then_p"):
    """`settings`: (guidance, temperature, top_k, top_p, perhaps min_p) of the requests, repeated. `ranges`: "all": one
    range for all rows; "each": each row's own, some of them invalid; None: all ids."""
    settings = settings or [(3.5, 1.0, V // 2, 0.8, 0.1), (1.0, 0.0, 0, 0.9, 0.5), (0.5, 0.5, 5, 1.0, 1e-3)]
    g = torch.Generator().manual_seed(B + N + V)

    def draw():
        return repeated(lambda n: (torch.randn(n, V, generator=g) * 16).round().div(8).to(DEVICE, dtype),
                        B * N).view(B, N, V)

    guidance, temperature, top_k, top_p, *min_p = torch.tensor(settings, device=DEVICE).repeat(B, 1)[:B].unbind(1)
    args = draw(), draw() if uncond else None, guidance, temperature, top_k.int(), top_p
    kwargs = {"filters": filters, "min_p": min_p[0].contiguous() if min_p else None}
    if ranges == "all":
        kwargs["id_range"] = (V // 8, V - V // 16)
    if ranges == "each":
        first = torch.randint(-V // 8, V, (B, N), generator=g)
        last = torch.randint(V // 2, V + V // 8, (B, N), generator=g)
        kwargs["id_range"] = torch.stack([first, last], -1).to(DEVICE)
    return args, kwargs


# draw_tokens: the logits of guided_probs. Three quarters of the guesses are right.
# Noise that is `ahead` by fewer and by more positions than there are rows; settings and orders of guided_probs.
CASES["draw_tokens"] = [
    (1, 1, 2),
    (2, 3, 33, torch.bfloat16),
    (3, 5, 64, torch.float32, True, None, "each", 3),
    (2, 2, 1500, torch.float16, False, None, None, 24),
    (3, 2, 4500, torch.float32, True, [(3.5, 1.0, 100, 0.8), (2.0, 0.7, 0, 0.9), (1.5, 1.3, 0, 1.0)], "each", 7),
    (3, 3, 64, torch.float32, True, None, "all", 3, "p_then_k"),
    (3, 2, 4500, torch.float32, True, [(3.5, 1.0, 100, 0.8), (2.0, 0.7, 40, 0.9)], "each", 7, "p_then_k"),
]


def draw_tokens(B, N, V, dtype=torch.float32, uncond=True, settings=None, ranges=None, ahead=0, filters="k_then_p"):
    args, kwargs = guided_probs(B, N, V, dtype, uncond, settings, ranges, filters)
    seeds, positions = noise_keys(B, N, V)
    # its own oracle, also where tests replace the backends
    guesses = draw_tokens_oracle(*args, kwargs["min_p"], seeds, positions, *ids_of(kwargs, V), filters, None, 0)[0]
    kwargs["guesses"] = torch.where(torch.arange(N, device=DEVICE) % 4 < 3, guesses, -1)
    return (*args, seeds, positions), kwargs | {"ahead": ahead}


CASES["philox_uniforms"] = [(1, 1, 1), (2, 3, 9), (3, 1, 0), (2, 2, 300)]


def philox_uniforms(B, L, n):
    return (*noise_keys(B, L, n), n), {"stream": 2**31 - 1 - n, "turn": n}


# token_log_probs: the logits of guided_probs. With K, tokens of any rows, some of which are none or do not exist.
CASES["token_log_probs"] = [
    (1, 1, 2),
    (2, 3, 33, None, torch.bfloat16),
    (3, 5, 64, 4, torch.float32, True, None, "each"),
    (2, 2, 1500, 3, torch.float16, False, None, None),
    (3, 2, 4500, None, torch.float32, True, [(3.5, 1.0, 100, 0.8), (2.0, 0.7, 0, 0.9), (1.5, 1.3, 0, 1.0)], "each"),
    (3, 2, 4500, 4, torch.float32, True, [(3.5, 1.0, 100, 0.8), (2.0, 0.7, 40, 0.9)], "all", "p_then_k"),
]


def token_log_probs(B, N, V, K=None, dtype=torch.float32, uncond=True, settings=None, ranges="all", filters="k_then_p"):
    """Every other token is the likeliest of its row, which the filters keep."""
    args, kwargs = guided_probs(B, N, V, dtype, uncond, settings, ranges, filters)
    g = torch.Generator().manual_seed(B + N + V)
    number = torch.arange(K or N)
    rows = (number * 3 % (N + 2) - 1).expand(B, -1).to(DEVICE)
    tokens = torch.randint(-1, V + 1, (B, K or N), generator=g).to(DEVICE)
    likeliest = guided_probs_oracle(*args, kwargs["min_p"], *ids_of(kwargs, V), filters)[0].argmax(-1)
    likeliest = likeliest if K is None else likeliest.gather(1, rows.clamp(0, N - 1))
    tokens = torch.where(number.to(DEVICE) % 2 == 0, likeliest, tokens)
    return (*args, tokens), kwargs | {"rows": None if K is None else rows}


# Each cutoff; the widest table; sums that are not exact must be added in one order too.
CASES["neighborhood_sum"] = [
    (1, 2, 1),
    (2, 19, 5, "ratio"),
    (4, 60, 33, "jsd", 7),
    *((30, 60, 30, cutoff, 0, True, None, False) for cutoff in ("tvd", "ratio", "jsd")),
    (3, 4500, 300, "tvd", 5, False),
]


def neighborhood_sum(R, V, k, cutoff="tvd", offset=0, narrow=True, delta=None, exact=True):
    """`delta`: one for all rows; None: several sizes take turns."""
    g = torch.Generator().manual_seed(R + V)
    C = V - 2 * offset
    tokens = torch.randint(offset, offset + C, (R,), generator=g)
    tokens[3:4] = 0  # outside the table where there is an offset
    delta = torch.tensor([0.25, 0.03125, 1.0] if delta is None else [delta]).repeat(R)[:R]
    probs = exact_probs(R, V, exact=exact)
    args = (probs, tokens.to(DEVICE), neighbor_table(C, k, narrow=narrow), delta.to(DEVICE))
    return args, {"cutoff": cutoff, "offset": offset}


# With and without omega and draft rows, at sums that are exact and not.
CASES["sample_residual"] = [(1, 2), (2, 19), (3, 4500), (3, 40, (1.0, 0.5, 2.0)), (2, 40, None, False),
                            (30, 60, (1.0, 0.5, 2.0), True, False)]


def sample_residual(R, V, omega=None, draft=True, exact=True):
    kwargs = {"omega": torch.tensor(omega).repeat(R)[:R].to(DEVICE)} if omega else {}
    draft_probs = exact_probs(R, V, seed=1, exact=exact) if draft else None
    return (exact_probs(R, V, exact=exact), draft_probs, exact_uniforms(R, seed=2)), kwargs


# By uniforms and by seeds; a row of fewer ids than children; sums that are not exact.
CASES["draw_children"] = [(1, 1, 1, 1), (2, 3, 19, 4), (3, 2, 5, 7), (1, 2, 4500, 6),
                          (1, 1, 1, 1, True), (3, 2, 30, 40, True), (2, 2, 4500, 6, True),
                          (4, 3, 61, 9, False, False), (4, 3, 61, 9, True, False)]


def draw_children(B, F, V, K, noise=False, exact=True):
    draft_probs = exact_probs(B * F, V, exact=exact).view(B, F, V)
    if not noise:
        return (draft_probs, exact_uniforms(B, F, K, seed=3)), {}
    g = torch.Generator().manual_seed(V)
    seeds, positions = torch.randint(2**62, (B,), generator=g), torch.randint(576, (B, F), generator=g)
    return (draft_probs,), {"seeds": seeds.to(DEVICE), "positions": positions.to(DEVICE), "num_children": K}


# By uniforms and by seeds; settings and orders of guided_probs; the fifth has EAGLE's ten children.
CASES["draft_children"] = [
    (1, 1, 2, 1),
    (3, 3, 64, 4, torch.bfloat16),
    (2, 2, 33, 40, torch.float32, True, True),
    (3, 2, 1500, 5, torch.float16, False),
    (3, 6, 1100, 10, torch.float32, True, True, [(7.5, 1.0, 100, 1.0), (1.2, 1.0, 100, 0.8), (2.0, 0.7, 0, 1.0)]),
    (3, 5, 64, 6, torch.float32, True, True, None, "each", "p_then_k"),
    (3, 2, 1500, 8, torch.float32, True, False, None, "all", "p_then_k"),
]


def draft_children(B, F, V, K, dtype=torch.float32, uncond=True, noise=False, settings=None, ranges=None,
                   filters="k_then_p"):
    """The second request is greedy."""
    (logits, uncond, *settings), ids = guided_probs(B, F, V, dtype, uncond, settings, ranges, filters)
    draw_args, kwargs = draw_children(B, F, V, K, noise)
    return (logits, uncond, None if noise else draw_args[1], *settings), kwargs | ids


# Settings and orders of guided_probs; the third has two words of ancestors, the fifth EAGLE's ten children.
CASES["draft_frontier"] = [
    (1, 1, 2, 1),
    (2, 3, 300, 4, torch.bfloat16),
    (3, 2, 64, 7, torch.float32, True, 2),
    (2, 1, 1500, 5, torch.float16, False),
    (3, 10, 1100, 10, torch.float32, True, 1, [(7.5, 1.0, 100, 1.0), (1.2, 1.0, 100, 0.8), (2.0, 0.7, 0, 1.0)]),
    (3, 5, 64, 6, torch.float32, True, 1, None, "each", "p_then_k"),
    (3, 2, 1500, 8, torch.float32, True, 1, None, "all", "p_then_k"),
]


def draft_frontier(B, F, V, K, dtype=torch.float32, uncond=True, W=1, settings=None, ranges=None, filters="k_then_p"):
    """A level in the middle of a tree. Trees end after different levels; every request but one has an unused node."""
    logits, kwargs = guided_probs(B, F, V, dtype, uncond, settings, ranges, filters)
    _, scores, width = expand_tree(B, F, V, K)[0]
    first_node = 64 * (W - 1) + F + 1
    node = torch.arange(first_node - F, first_node)[:, None]
    words = torch.where(torch.arange(W) == node // 64, torch.ones_like(node) << node % 64, 0)
    words[:, 0] |= 1
    candidates = torch.arange(F, dtype=torch.int32).repeat(B, 1) + 5
    candidates[1:, F - 1:] = -1
    depth = torch.tensor([4, 3, 2]).repeat(B)[:B]
    args = (*logits[:2], scores, words.repeat(B, 1, 1).to(DEVICE), candidates.to(DEVICE), width,
            depth.to(DEVICE), *logits[2:])
    return args, kwargs | {"num_children": K, "level": 2, "first_node": first_node, "first_candidate": 40}


# One child, and more than there are ids.
CASES["expand_tree"] = [(1, 1, 1, 1), (2, 3, 19, 4), (3, 2, 5, 7), (1, 2, 1100, 6)]


def expand_tree(B, F, V, K):
    """Widths differ in the batch; every request but the first has an unused node."""
    g = torch.Generator().manual_seed(B + F + V)
    scores = -torch.randint(0, 8, (B, F), generator=g).float()
    scores[1:, F - 1:] = -torch.inf
    width = torch.tensor([K, max(K - 2, 1), 1], dtype=torch.int32).repeat(B)[:B]
    return (exact_probs(B * F, V).view(B, F, V), scores.to(DEVICE), width.to(DEVICE)), {"num_children": K}


# k = 1, all others, and a codebook of more than one block of distances.
CASES["codebook_neighbors"] = [(2, 1, 1), (40, 3, 39), (1100, 4, 7)]


def codebook_neighbors(V, D, k):
    g = torch.Generator().manual_seed(V)
    return (torch.randint(-8, 9, (V, D), generator=g).float().to(DEVICE), k), {}
