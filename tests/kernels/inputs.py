"""Inputs for every op. Each op has a maker of its name: `maker(*sizes)` returns `(args, kwargs)` of the op.

The makers are seeded. The first size is the batch, which may be 0 (UNBATCHED names the ops without one). The first
entry of an op's CASES is the smallest that makes sense (one node, one neighbor). Probabilities are counts over 2**16,
so any sum of them, in any order, is exact: every backend must agree with the oracle bit for bit. Where exp or log is in
the way, the op has a tolerance in TOLERANCES.
"""
import heapq
from collections import Counter
from functools import lru_cache

import torch

from specvis_kernels import (
    DecoderLayer,
    DenoiserBlock,
    TransformerBlock,
    pack_blocks,
    pack_denoiser,
    pack_layers,
    pack_weight,
)
from specvis_kernels.draw_tokens import _oracle as draw_tokens_oracle
from specvis_kernels.guided_probs import _oracle as guided_probs_oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

COMPARED = Counter()  # backend -> tests passed
CASES = {}       # op -> sizes
TOLERANCES = {}  # op -> {index of an output: (rtol, atol)}; everything else is equal bit for bit
# verify_chain's requests are of different lengths, and four ops have weights: their own tests
UNBATCHED = {"codebook_neighbors", "decoder_layers", "denoise_tokens", "packed_linear", "transformer_blocks",
             "verify_chain"}
MUTATES = {      # op -> the arguments that it writes to, contiguous; tensors or lists of them
    "commit_kv": ("caches",),
    "commit_tokens": ("tokens", "counts", "failed", "target_forwards", "num_accepted_at", "num_drafted_at",
                      "tv_excess"),
    "decoder_layers": ("kv_cache",),
}
MAX_ROWS = 512   # are drawn; more rows repeat them


def exact_probs(rows, V, seed=0):
    """(rows, V) float32 probabilities: peaked, as a model's are, and exact to sum."""
    g = torch.Generator().manual_seed(seed)
    draws = (torch.rand(min(rows, MAX_ROWS), 2**16, generator=g) ** 4 * V).long()
    counts = torch.zeros(len(draws), V).scatter_add_(1, draws, torch.ones(()).expand_as(draws))
    probs = (counts / 2**16)[:, torch.randperm(V, generator=g)].to(DEVICE)
    return probs if rows <= MAX_ROWS else probs.repeat(-(-rows // MAX_ROWS), 1)[:rows]


def exact_uniforms(*shape, seed=0):
    """float32 uniforms in [0, 1), multiples of 2**-16."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randint(2**16, shape, generator=g) / 2**16).to(DEVICE)


# guided_probs: logits are multiples of 1/8, guidance of 1/2, temperatures powers of two: exact until the exp.
CASES["guided_probs"] = [
    (1, 1, 2),
    (2, 3, 33, torch.bfloat16),
    (3, 2, 64),
    (2, 1, 1500, torch.float16, False),
    (3, 5, 64, torch.float32, True, None, "each", "p_then_k"),
    (3, 2, 1500, torch.float32, True, [(1.0, 4.0, 5, 0.5), (1.0, 1.0, 40, 0.9)], None, "p_then_k"),
]


def guided_probs(B, N, V, dtype=torch.float32, uncond=True, settings=None, ranges="all", filters="k_then_p"):
    """`settings`: (guidance, temperature, top_k, top_p) of the requests, repeated. `ranges`: "all": the same ids for
    all rows; "each": each row's own, some of them invalid; None: all ids.
    """
    settings = settings or [(3.5, 1.0, V // 2, 0.8), (1.0, 0.0, 0, 0.9), (0.5, 0.5, 5, 1.0)]
    g = torch.Generator().manual_seed(B + N + V)

    def draw():
        return (torch.randn(B, N, V, generator=g) * 16).round().div(8).to(DEVICE, dtype)

    guidance, temperature, top_k, top_p = torch.tensor(settings, device=DEVICE).repeat(B, 1)[:B].unbind(1)
    args = draw(), draw() if uncond else None, guidance, temperature, top_k.int(), top_p
    kwargs = {"filters": filters}
    if ranges == "all":
        kwargs["id_range"] = (V // 8, V - V // 16)
    if ranges == "each":
        first = torch.randint(-V // 8, V, (B, N), generator=g)
        last = torch.randint(V // 2, V + V // 8, (B, N), generator=g)
        kwargs["id_range"] = torch.stack([first, last], -1).to(DEVICE)
    return args, kwargs


# draw_tokens: the same logits. Three quarters of the guesses are right.
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
    guesses = draw_tokens_oracle(*args, seeds, positions, *ids_of(kwargs, V), filters, None, 0)[0]
    kwargs["guesses"] = torch.where(torch.arange(N, device=DEVICE) % 4 < 3, guesses, -1)
    return (*args, seeds, positions), kwargs | {"ahead": ahead}


def noise_keys(B, N, V):
    """Seeds and positions."""
    g = torch.Generator().manual_seed(B + N + V)
    seeds = torch.randint(-2**62, 2**62, (B,), generator=g)
    return seeds.to(DEVICE), torch.randint(-5, 2**33, (B, N), generator=g).to(DEVICE)


def ids_of(kwargs, V):
    """id_range, first_id and last_id as the schemas have them."""
    ids = kwargs.get("id_range")
    return (ids, 0, V) if ids is None or isinstance(ids, torch.Tensor) else (None, *ids)


def neighbor_table(C, k, offset=0, narrow=True, seed=0):
    """(C, k) codes: distinct, each row without itself."""
    return neighbor_codes(C, k, seed).to(DEVICE, torch.uint16 if narrow else torch.int32, copy=True)


@lru_cache(maxsize=1)  # seconds where C is real, and the next case has often the same
def neighbor_codes(C, k, seed):
    g = torch.Generator().manual_seed(seed)
    steps = torch.stack([torch.randperm(C - 1, generator=g)[:k] for _ in range(C)]) + 1
    return ((torch.arange(C).unsqueeze(1) + steps) % C).int()


CASES["neighborhood_sum"] = [
    (1, 2, 1),
    (2, 19, 5, "ratio"),
    (4, 60, 33, "jsd", 7),
    (3, 4500, 300, "tvd", 5, False),
]


def neighborhood_sum(R, V, k, cutoff="tvd", offset=0, narrow=True, delta=None):
    """`delta`: one for all rows; None: several sizes take turns."""
    g = torch.Generator().manual_seed(R + V)
    C = V - 2 * offset
    tokens = torch.randint(offset, offset + C, (R,), generator=g)
    tokens[3:4] = 0  # outside the table where there is an offset
    delta = torch.tensor([0.25, 0.03125, 1.0] if delta is None else [delta]).repeat(R)[:R]
    args = (exact_probs(R, V), tokens.to(DEVICE), neighbor_table(C, k, narrow=narrow), delta.to(DEVICE))
    return args, {"cutoff": cutoff, "offset": offset}


def links(parents):
    """first_child and next_sibling of parents (B, N); siblings are in the order of their indices."""
    first_child, next_sibling = torch.full_like(parents, -1), torch.full_like(parents, -1)
    for b, row in enumerate(parents.tolist()):
        last_child = {}
        for n, parent in enumerate(row[1:], 1):
            table, node = (next_sibling, last_child[parent]) if parent in last_child else (first_child, parent)
            table[b, node] = last_child[parent] = n
    return first_child.to(DEVICE, torch.int32), next_sibling.to(DEVICE, torch.int32)


CASES["verify_tree"] = [
    (1, 1, 2, 1),
    (2, 6, 19, 3),
    (3, 8, 40, 4, {"num_draft_rows": 2, "omega": (1.0, 0.75)}),
    (3, 8, 40, 3, {"k": 6, "cutoff": "ratio", "offset": 4, "residual": "relaxed"}),
    (2, 9, 33, 3, {"k": 5, "cutoff": "jsd", "residual": "released", "narrow": False,
                   "num_draft_rows": 3, "omega": (0.5, 2.0)}),
    (4, 7, 24, 3, {"k": 20, "omega": (1.0, 1.5), "num_draft_rows": 1, "greedy": True}),
    (1, 5, 4500, 3, {"k": 300, "residual": "relaxed", "num_draft_rows": 1}),
    (6, 9, 4, 3, {"k": 3, "residual": "released", "empty": "uniform", "omega": (0.25,)}),
    (3, 7, 24, 3, {"num_draft_rows": 1, "greedy": True, "odd": True}),
]
TOLERANCES["verify_tree"] = {3: (0, 1e-5)}


def verify_tree(B, N, V, max_depth, options=None):
    options = {"k": 0, "cutoff": "tvd", "offset": 0, "narrow": True, "residual": "optimal",
               "num_draft_rows": 0, "omega": None, "greedy": False, "branch": None, "empty": None,
               "drawn": False, "odd": False} | (options or {})
    k, offset, M = options["k"], options["offset"], options["num_draft_rows"]
    g = torch.Generator().manual_seed(B + N + V)
    parents = [[-1] + [max(0, (n - 1 - b % 2) // 3) for n in range(1, N)] for b in range(B)]
    if options["branch"]:  # that many children each, as drafters make them on flat distributions
        parents = [[-1] + [(n - 1) // options["branch"] for n in range(1, N)]] * B
    parents = torch.tensor(parents, dtype=torch.int64).view(B, N)
    target_probs = exact_probs(B * N, V).view(B, N, V)
    # Half of the drafted tokens are likely ones, so that long paths are accepted and neighbors have mass to move.
    likely = target_probs[:, 0].argsort(1, descending=True)[:, torch.arange(N) % V].cpu()
    tokens = torch.where(torch.rand(B, N, generator=g) < 0.5, likely, torch.randint(V, (B, N), generator=g))
    if options["branch"]:  # the likeliest of each node, in order, are its children
        best = target_probs.topk(options["branch"]).indices.cpu()
        tokens[:, 1:] = best.flatten(1)[:, :N - 1]
    kwargs = {"max_depth": max_depth, "residual": options["residual"]}
    if options["drawn"]:  # or drawn from a row of each node that has any, a quarter of which is the target's own
        M = -(-(N - 1) // options["branch"])
        draft_probs = (target_probs[:, :M] + 3 * exact_probs(B * M, V, seed=1).view(B, M, V)) / 4
        races = draft_probs.cpu().log() - torch.empty(B, M, V).exponential_(generator=g).log()
        tokens[:, 1:] = races.topk(options["branch"]).indices.flatten(1)[:, :N - 1]
        node = torch.arange(N, dtype=torch.int32, device=DEVICE)
        kwargs |= {"draft_probs": draft_probs, "draft_row": torch.where(node < M, node, -1).repeat(B, 1)}
    if options["empty"]:
        kwargs["empty"] = options["empty"]
    if options["num_draft_rows"]:
        kwargs["draft_probs"] = exact_probs(B * M, V, seed=1).view(B, M, V)
        kwargs["draft_row"] = torch.randint(-1, M, (B, N), generator=g, dtype=torch.int32).to(DEVICE)
    if k:
        kwargs["neighbors"] = neighbor_table(V - 2 * offset, k, narrow=options["narrow"])
        kwargs["delta"] = torch.tensor([0.25, 0.03125, 2.0]).repeat(B)[:B].to(DEVICE)
        kwargs |= {"cutoff": options["cutoff"], "offset": offset}
    if options["omega"]:
        kwargs["omega"] = torch.tensor(options["omega"]).repeat(B, max_depth)[:, :max_depth].to(DEVICE)
    if options["greedy"]:
        kwargs["greedy"] = (torch.arange(B) % 2 == 0).to(DEVICE)
    if options["odd"]:  # of two likeliest tokens the second is a draft; the row of request 1's drafts is invalid
        target_probs[..., 0] = target_probs.amax(-1)
        tokens[:, 1] = target_probs[:, 0, 1:].argmax(-1).cpu() + 1
        kwargs["draft_probs"][1:2, 0, 0], kwargs["draft_row"][1:2, 0] = torch.nan, 0
    return (target_probs, tokens.to(DEVICE), *links(parents), exact_uniforms(B, N, seed=1)), kwargs


# verify_chain: the options of verify_tree. `num_drafts` of the requests take turns; `width` of the integers.
CASES["verify_chain"] = [
    (1, 2, {"num_drafts": [1]}),
    (3, 19, {}),
    (5, 40, {"draft": True, "omega": (1.0, 0.75), "width": torch.int32, "bonus": True}),
    (4, 40, {"k": 6, "cutoff": "ratio", "offset": 4, "residual": "relaxed", "bonus": True, "empty": "uniform"}),
    (4, 33, {"k": 5, "cutoff": "jsd", "residual": "released", "narrow": False, "draft": True, "omega": (0.5, 2.0)}),
    (6, 24, {"k": 20, "omega": (1.0, 1.5), "draft": True, "greedy": True, "bonus": True}),
    (2, 4500, {"k": 300, "residual": "relaxed", "draft": True, "greedy": True}),
]
TOLERANCES["verify_chain"] = {2: (0, 1e-5)}


def verify_chain(B, V, options=None):
    options = {"num_drafts": [2, 0, 5, 1, 3], "k": 0, "cutoff": "tvd", "offset": 0, "narrow": True,
               "residual": "optimal", "empty": "target", "draft": False, "omega": None, "greedy": False, "bonus": False,
               "width": torch.int64} | (options or {})
    num_drafts = (options["num_drafts"] * B)[:B]
    D, k, offset = sum(num_drafts), options["k"], options["offset"]
    ends = torch.tensor(num_drafts, dtype=torch.int64).cumsum(0)
    g = torch.Generator().manual_seed(B + V)
    target_probs = exact_probs(D if options["bonus"] else D + B, V)
    # Half of the drafts are likely ones after what stands before them.
    first_rows = ends - torch.tensor(num_drafts, dtype=torch.int64) + (0 if options["bonus"] else torch.arange(B))
    rows = [first + i for first, n in zip(first_rows.tolist(), num_drafts) for i in range(n)]
    likely = target_probs[rows].argmax(1).cpu()
    tokens = torch.where(torch.rand(D, generator=g) < 0.5, likely, torch.randint(V, (D,), generator=g))
    kwargs = {name: options[name] for name in ("residual", "empty", "cutoff", "offset")}
    if options["draft"]:
        kwargs["draft_probs"] = exact_probs(D, V, seed=1)
    if k:
        kwargs["neighbors"] = neighbor_table(V - 2 * offset, k, narrow=options["narrow"])
        kwargs["delta"] = torch.tensor([0.25, 0.03125, 2.0]).repeat(B)[:B].to(DEVICE)
    if options["omega"]:
        kwargs["omega"] = torch.tensor(options["omega"]).repeat(B)[:B].to(DEVICE)
    if options["greedy"]:
        kwargs["greedy"] = (torch.arange(B) % 2 == 0).to(DEVICE)
    if options["bonus"]:
        kwargs["bonus_tokens"] = torch.randint(V, (B,), generator=g).to(DEVICE)
    integers = (x.to(DEVICE, options["width"]) for x in (tokens, ends))
    return (target_probs, *integers, exact_uniforms(D + B, seed=1)), kwargs


CASES["verify_greedy"] = [(1, 1, 0), (2, 7, 3), (3, 20, 5), (3, 130, 200), (2, 2500, 6, 40)]


def verify_greedy(B, N, max_depth, branch=3):
    """Long paths are accepted, and siblings have equal tokens. Every third request has links that lead nowhere."""
    g = torch.Generator().manual_seed(B + N)
    parents = torch.tensor([[-1] + [max(0, (n - 1 - b % 2) // branch) for n in range(1, N)] for b in range(B)])
    tokens = torch.randint(branch + 1, (B, N), generator=g)
    target_tokens = torch.randint(branch + 1, (B, N), generator=g)
    for b, n in torch.rand(B, N, generator=g).lt(0.6).nonzero().tolist():  # many drafts are right
        target_tokens[b, max(parents[b, n], 0)] = tokens[b, n]
    first_child, next_sibling = links(parents.view(B, N))
    next_sibling[2::3, 1::2], first_child[2::3, 3::4] = 0, N
    return (target_tokens.to(DEVICE), tokens.to(DEVICE), first_child, next_sibling), {"max_depth": max_depth}


# verify_logits: the logits of guided_probs and the trees of verify_tree, whose options it takes. `ranges` as there;
# `seeds`: verification by equality; `likely`: the tree of the likeliest paths.
CASES["verify_logits"] = [
    (1, 1, 2, 1),
    (3, 6, 33, 3, {"ranges": "all"}),
    (3, 8, 40, 4, {"num_draft_rows": 2, "omega": (1.0, 0.75), "dtype": torch.bfloat16}),
    (3, 8, 40, 3, {"k": 6, "cutoff": "ratio", "offset": 4, "residual": "relaxed", "ranges": "each"}),
    (2, 9, 33, 3, {"k": 5, "cutoff": "jsd", "residual": "released", "narrow": False, "num_draft_rows": 3,
                   "omega": (0.5, 2.0), "dtype": torch.float16, "uncond": False}),
    (4, 7, 24, 3, {"k": 20, "omega": (1.0, 1.5), "num_draft_rows": 1, "filters": "p_then_k", "ranges": "each"}),
    (2, 6, 40, 3, {"k": 12, "residual": "released", "ranges": "all", "settings": [(2.0, 1.0, 9, 0.9)]}),
    (6, 9, 40, 3, {"k": 30, "residual": "released", "omega": (0.25,), "empty": "uniform", "num_draft_rows": 1,
                   "settings": [(1.5, 1.0, 2, 0.9), (1.5, 1.0, 0, 0.9)]}),
    (3, 12, 1500, 3, {"k": 300, "residual": "relaxed", "branch": 4, "settings": [
        (1.5, 1.0, 200, 1.0), (1.5, 0.0, 0, 1.0), (1.5, 2.0, 0, 0.9)]}),
    (2, 12, 1500, 3, {"k": 300, "residual": "relaxed", "branch": 4, "num_draft_rows": 2, "omega": (1.5,),
                      "settings": [(1.5, 1.0, 200, 0.9), (1.5, 2.0, 0, 1.0)]}),
    (1, 12, 4500, 3, {"branch": 4, "num_draft_rows": 2, "settings": [(1.5, 2.0, 0, 1.0)]}),
    (3, 12, 64, 4, {"seeds": True, "ranges": "each", "branch": 3}),
    (3, 12, 1500, 4, {"seeds": True, "filters": "p_then_k", "branch": 3,
                      "settings": [(1.5, 1.0, 100, 0.8), (1.5, 0.0, 0, 1.0), (1.5, 2.0, 0, 1.0)]}),
]
TOLERANCES["verify_logits"] = {3: (0, 1e-5)}


def verify_logits(B, N, V, max_depth, options=None):
    own = {"dtype": torch.float32, "uncond": True, "settings": None, "ranges": None, "filters": "k_then_p",
           "seeds": False, "likely": False}
    options = own | (options or {})
    rule = {name: options[name] for name in options.keys() - own.keys()}
    rows, kwargs = guided_probs(B, N, V, options["dtype"], options["uncond"], options["settings"], options["ranges"],
                                options["filters"])
    if options["likely"]:  # peaked rows, and the condition moves the logits a little, as it does in a model
        cond, noise = rows[0].float() * 3.5, rows[1].float() / 8
        rows = (cond.to(rows[0].dtype), (cond + noise).to(rows[0].dtype), *rows[2:])
    if options["ranges"] == "each":  # two of three requests begin with a valid row
        kwargs["id_range"][:, 0] = torch.tensor([[1, V], [V // 8, V], [-1, V]], device=DEVICE).repeat(B, 1)[:B]
    g = torch.Generator().manual_seed(B + N + V)
    (_, tokens, *tree, uniforms), others = verify_tree(B, N, V, max_depth, rule)
    ids = *ids_of(kwargs, V), options["filters"]
    kwargs |= others
    probs = guided_probs_oracle(*rows, *ids)[0]
    if options["seeds"]:
        kwargs["seeds"], kwargs["positions"] = keys = noise_keys(B, N, V)
        drawn = draw_tokens_oracle(*rows, *keys, *ids, None, 0)[0]
        probs = probs if options["likely"] else probs.scatter(2, drawn[..., None], 1.0)
        uniforms = kwargs.pop("residual") and None
    if options["likely"]:
        tokens, parents = likeliest_paths(probs, max_depth, rule["branch"])
        tree = links(parents)
    else:  # three quarters of the children are likely tokens after their parents, so that long paths are accepted
        best = probs.topk(min(V, 2 if options["seeds"] else 4)).indices
        parents = parents_of(*tree)
        rank = torch.randint(best.shape[2], (B, N), generator=g).to(DEVICE)
        likely = best.gather(1, parents[..., None].expand(-1, -1, best.shape[2])).gather(2, rank[..., None])[..., 0]
        tokens = torch.where(torch.rand(B, N, generator=g).to(DEVICE) < 0.75, likely, tokens)
    logits, uncond, *settings = rows
    return (logits, uncond, tokens, *tree, uniforms, *settings), kwargs


def parents_of(first_child, next_sibling):
    """(B, N) int64, 0 for the root: what links() was given."""
    parents = torch.zeros_like(first_child, dtype=torch.int64)
    for b, row in enumerate(first_child.tolist()):
        for n, child in enumerate(row):
            while child >= 0:
                parents[b, child], child = n, next_sibling[b, child].item()
    return parents


def likeliest_paths(probs, max_depth, branch):
    """tokens and parents (B, N) of the N - 1 likeliest paths down to max_depth, if node n's children are drawn from its
    row of probs (B, N, V), at most `branch` of them. Parents come before children, likelier siblings before others.
    """
    N, best = probs.shape[1], probs.topk(branch)
    trees = []
    for row_probs, row_tokens in zip(best.values.tolist(), best.indices.tolist()):
        nodes = [(1.0, -1, 0, 0)]  # probability, parent, token, depth
        paths = []
        while len(nodes) < N:
            path_prob, _, _, depth = nodes[-1]
            if depth < max_depth:
                n = len(nodes) - 1
                for p, token in zip(row_probs[n], row_tokens[n]):
                    heapq.heappush(paths, (-path_prob * p, n, token, depth + 1))
            cost, *node = heapq.heappop(paths)
            nodes.append((-cost, *node))
        trees.append(nodes)
    trees = torch.tensor([[node[1:3] for node in nodes] for nodes in trees], dtype=torch.int64).view(-1, N, 2)
    return trees[..., 1].to(DEVICE), trees[..., 0]


CASES["commit_kv"] = [
    (1, 1, 0),
    (2, 5, 3),
    (3, 7, 4, {"layout": "layers", "start": True, "dtype": torch.float16}),
    (3, 6, 3, {"layout": "heads", "dtype": torch.uint8}),
    (2, 9, 4, {"layout": "paged", "start": True, "dtype": torch.int64}),
    (1, 70, 8, {"layout": "layers", "count": 150, "width": 3}),
]


def commit_kv(B, N, P, options=None):
    """Trees of N nodes, of which up to P are accepted. some_wrong: every third request has an index out of range.
    all_accepted: every request has P.

    layout: "rows" is a list of (R, T, 2, D), "layers" one tensor (count, R, T, 2, D), "heads" a list of (R, H, T, D),
    "paged" a list of (2, slots, D) whose rows have slots in no order. There are rows with and without the condition.
    """
    options = {"layout": "rows", "start": False, "dtype": torch.float32, "count": 2, "heads": 3, "width": 4,
               "columns": 2 * N + 6, "some_wrong": True, "all_accepted": False} | (options or {})
    layout, count, H, D, T = (options[name] for name in ("layout", "count", "heads", "width", "columns"))
    g = torch.Generator().manual_seed(B + N + P)
    R = 2 * B
    accepted_nodes = torch.rand(B, N - 1, generator=g).argsort(1)[:, :P].sort(1).values + 1
    num_accepted = torch.randint(P + 1, (B,), generator=g)
    num_accepted[:B if options["all_accepted"] else 1] = P
    accepted_nodes[torch.arange(P) >= num_accepted[:, None]] = -1
    lengths = torch.randint(4, (B,), generator=g)
    if options["some_wrong"]:  # nodes behind the end
        lengths[2::3], num_accepted[2::3] = T - N // 2, P
        accepted_nodes[2::3, :1] = N
    kwargs = {"start": (lengths + N // 2).to(DEVICE)} if options["start"] else {}
    shape = {"rows": (R, T, 2, D), "layers": (count, R, T, 2, D), "heads": (R, H, T, D), "paged": (2, R * T + 5, D)}
    caches = [torch.randint(100, shape[layout], generator=g).to(DEVICE, options["dtype"])
              for _ in range(1 if layout == "layers" else count)]
    if layout == "paged":
        kwargs |= {"slots": torch.randperm(R * T + 5, generator=g)[:R * T].view(R, T).to(DEVICE), "row_dim": None}
    if layout in ("layers", "heads"):
        kwargs |= {"row_dim": 1 if layout == "layers" else 0, "column_dim": 2}
    args = (accepted_nodes.to(DEVICE, torch.int32), num_accepted.to(DEVICE, torch.int32), lengths.to(DEVICE))
    return (caches[0] if layout == "layers" else caches, *args), kwargs


CASES["commit_tokens"] = [(1, 1, 0, 1), (3, 7, 3, 9), (8, 20, 6, 5, False), (2, 60, 40, 50), (5, 3, 2, 4, True)]


def commit_tokens(B, N, P, L, excess=True, invalid=True):
    """Images of which some end in this step. `invalid`: some have ended, and some statuses and numbers are bad."""
    g = torch.Generator().manual_seed(B + N + P + L)

    def integers(low, high, *sizes, dtype=torch.int64):
        return torch.randint(low, high, sizes, generator=g).to(DEVICE, dtype)

    counts, num_accepted = integers(0, L, B), integers(0, P + 1, B, dtype=torch.int32)
    accepted_nodes = integers(1, N + invalid, B, P, dtype=torch.int32)  # N is no node
    counts[1::4] = L - 1
    if not invalid:
        accepted_nodes[torch.arange(P, device=DEVICE) >= num_accepted[:, None]] = -1
    else:
        counts[2::5], num_accepted[3::4], num_accepted[4::5] = L + 3, -2, P + 9
    written = (integers(0, 99, B, L + P + 1), counts, (integers(0, 5, B) == 0) & invalid, integers(1, 9, B),
               integers(-1, 9, B, L), integers(0, 9, B, L), torch.rand(B, generator=g).to(DEVICE))
    step_excess = torch.rand(B, generator=g).to(DEVICE) if excess else None
    return (*written, integers(0, 99, B, N), accepted_nodes, num_accepted, integers(0, 99, B), step_excess,
            integers(0, 8 if invalid else 1, B, dtype=torch.int32), integers(0, 9, B)), {}


CASES["couple_tokens"] = [
    (1, 1, 2),
    (2, 4, 19),
    (3, 5, 40, {"omega": (1.0, 0.75, 1.5)}),
    (3, 4, 40, {"k": 6, "cutoff": "ratio", "offset": 4, "residual": "relaxed"}),
    (2, 5, 33, {"k": 5, "cutoff": "jsd", "residual": "released", "narrow": False, "omega": (0.5, 2.0)}),
    (3, 4, 24, {"k": 20, "omega": (1.0, 1.5)}),
    (3, 4, 40, {"group": 6, "omega": (1.0, 2.0)}),
    (1, 6, 4500, {"k": 300, "residual": "relaxed"}),
    (1, 6, 4500, {"group": 300}),
]


def couple_tokens(B, W, V, options=None):
    """Guesses drawn from their rows; half of each new row is the old one."""
    options = {"k": 0, "cutoff": "tvd", "offset": 0, "narrow": True, "residual": "optimal", "omega": None,
               "group": 0} | (options or {})
    k, offset = options["k"], options["offset"]
    g = torch.Generator().manual_seed(B + W + V)
    draft_probs = exact_probs(B * W, V, seed=1)
    target_probs = (exact_probs(B * W, V) + draft_probs) / 2
    thresholds = torch.rand(B * W, 1, generator=g).to(DEVICE)
    tokens = (draft_probs.cumsum(1) <= thresholds).sum(1).clamp(max=V - 1).view(B, W)
    kwargs = {"residual": options["residual"]}
    if k:
        kwargs["neighbors"] = neighbor_table(V - 2 * offset, k, narrow=options["narrow"])
        kwargs["delta"] = torch.tensor([0.25, 0.03125, 2.0]).repeat(B)[:B].to(DEVICE)
        kwargs |= {"cutoff": options["cutoff"], "offset": offset}
    if options["omega"]:
        kwargs["omega"] = torch.tensor(options["omega"]).repeat(B, W)[:, :W].to(DEVICE)
    if options["group"]:  # those around the guess in the order of its new row, the guess among them
        order = target_probs.argsort(1, descending=True)
        ranks = order.argsort(1).gather(1, tokens.view(-1, 1)) + torch.arange(options["group"], device=DEVICE) - 2
        group = torch.where((ranks >= 0) & (ranks < V), order.gather(1, ranks.clamp(0, V - 1)), -1)
        kwargs["groups"] = group.view(B, W, options["group"])
    args = (target_probs.view(B, W, V), draft_probs.view(B, W, V), tokens, exact_uniforms(B, W, 2, seed=2))
    return args, kwargs


CASES["sample_residual"] = [(1, 2), (2, 19), (3, 4500), (3, 40, (1.0, 0.5, 2.0)), (2, 40, None, False)]


def sample_residual(R, V, omega=None, draft=True):
    kwargs = {"omega": torch.tensor(omega).repeat(R)[:R].to(DEVICE)} if omega else {}
    draft_probs = exact_probs(R, V, seed=1) if draft else None
    return (exact_probs(R, V), draft_probs, exact_uniforms(R, seed=2)), kwargs


CASES["accept_gaussian"] = [
    (1, 1, 1),
    (2, 5, 16),
    (3, 7, 33, {"temperature": (42.0, 1.0, 0.5), "truncate": False, "variant": "released"}),
    (3, 40, 4, {"variant": "path", "num_drafted": (40, 0, 5)}),
]


def gaussian_pair(B, G, C, g, apart=0.5):
    """Means and log sigmas of a target and of a draft that is a little off, and tokens of the draft."""
    target_means = torch.randn(B, G, C, generator=g)
    target_log_sigmas = torch.randn(B, G, C, generator=g) / 2 - 2
    draft_log_sigmas = target_log_sigmas + torch.randn(B, G, C, generator=g) / (4 * C**0.5)
    shift, noise = torch.randn(2, B, G, C, generator=g)
    draft_means = target_means + apart / C**0.5 * shift * target_log_sigmas.exp()
    tokens = draft_means + noise * draft_log_sigmas.exp()
    return tokens, (target_means, target_log_sigmas, draft_means, draft_log_sigmas)


def accept_gaussian(B, G, C, options=None):
    options = {"variant": "paper", "truncate": True} | (options or {})
    g = torch.Generator().manual_seed(B + G + C)
    tokens, last_step = gaussian_pair(B, G, C, g)
    log_ratio, uniforms = torch.randn(B, G, generator=g) / 4, torch.rand(B, G, generator=g)
    args = (tokens, log_ratio, uniforms, *(last_step if options["variant"] != "path" else 4 * [None]))
    if "temperature" in options:
        options["temperature"] = torch.tensor(options["temperature"]).repeat(B)[:B].to(DEVICE)
    if "num_drafted" in options:
        options["num_drafted"] = torch.tensor(options["num_drafted"], dtype=torch.int32).repeat(B)[:B].to(DEVICE)
    return tuple(None if a is None else a.to(DEVICE) for a in args), options


CASES["resample_gaussian"] = [
    (1, 1, 1, 1),
    (2, 5, 16, 20),
    (3, 7, 33, 9, {"temperature": (42.0, 1.0, 0.5), "variant": "released"}),
    (3, 5, 4, 18, {"variant": "path"}),
]


def resample_gaussian(B, G, C, M, options=None):
    """A third of the positions is accepted, a third is rejected."""
    options = {"variant": "paper"} | (options or {})
    g = torch.Generator().manual_seed(B + G + C + M)
    tokens, last_step = gaussian_pair(B, G, C, g, apart=1.0)
    third = torch.arange(1, B * G + 1).view(B, G) % 3
    path = options["variant"] == "path"
    log_ratio = torch.randn(B, G, M, generator=g) if path else torch.randn(B, G, generator=g) / 4
    proposals, fallback = torch.randn(B, G, M, C, generator=g), torch.randn(B, G, C, generator=g)
    uniforms = 0.5 + torch.rand(B, G, M, generator=g) / 2  # so that several tries are looked at
    last_step = 4 * [None] if path else last_step
    args = (tokens, third == 0, third == 1, proposals, log_ratio, uniforms, fallback, *last_step)
    if "temperature" in options:
        options["temperature"] = torch.tensor(options["temperature"]).repeat(B)[:B].to(DEVICE)
    return tuple(None if a is None else a.to(DEVICE) for a in args), options


CASES["draw_children"] = [(1, 1, 1, 1), (2, 3, 19, 4), (3, 2, 5, 7), (1, 2, 4500, 6),
                          (1, 1, 1, 1, True), (3, 2, 30, 40, True), (2, 2, 4500, 6, True)]


def draw_children(B, F, V, K, noise=False):
    draft_probs = exact_probs(B * F, V).view(B, F, V)
    if not noise:
        return (draft_probs, exact_uniforms(B, F, K, seed=3)), {}
    g = torch.Generator().manual_seed(V)
    seeds, positions = torch.randint(2**62, (B,), generator=g), torch.randint(576, (B, F), generator=g)
    return (draft_probs,), {"seeds": seeds.to(DEVICE), "positions": positions.to(DEVICE), "num_children": K}


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


CASES["expand_tree"] = [(1, 1, 1, 1), (2, 3, 19, 4), (3, 2, 5, 7), (1, 2, 1100, 6)]


def expand_tree(B, F, V, K):
    """Widths differ in the batch; every request but the first has an unused node."""
    g = torch.Generator().manual_seed(B + F + V)
    scores = -torch.randint(0, 8, (B, F), generator=g).float()
    scores[1:, F - 1:] = -torch.inf
    width = torch.tensor([K, max(K - 2, 1), 1], dtype=torch.int32).repeat(B)[:B]
    return (exact_probs(B * F, V).view(B, F, V), scores.to(DEVICE), width.to(DEVICE)), {"num_children": K}


def random_parents(B, n, g, unused=True):
    """(B, n) parents of nodes 1..n of a tree, level by level; -2 in the last slots of odd requests."""
    parents = (torch.rand(B, n, generator=g) ** 0.7 * torch.arange(1, n + 1)).long().sort(1).values
    if unused:
        parents[1::2, n - n // 4:] = -2
    return parents


CASES["select_tree"] = [(1, 0, 1), (2, 12, 6), (3, 70, 33), (3, 9, 20)]


def select_tree(B, M, N):
    """Scores fall along every path and are often equal. Every seventh candidate does not exist."""
    g = torch.Generator().manual_seed(B + M + N)
    parents = random_parents(B, M, g, unused=False) - 1
    scores = torch.zeros(B, M)
    steps = torch.randint(0, 3, (B, M), generator=g) / 4
    for m in range(M):
        parent_scores = scores.gather(1, parents[:, m:m + 1].clamp(min=0))[:, 0]
        scores[:, m] = torch.where(parents[:, m] < 0, 0.0, parent_scores) - steps[:, m]
    scores[:, 6::7] = -torch.inf
    for m in range(M):  # nor are its descendants
        is_lost = scores.gather(1, parents[:, m:m + 1].clamp(min=0))[:, 0] == -torch.inf
        scores[:, m] = torch.where((parents[:, m] >= 0) & is_lost, -torch.inf, scores[:, m])
    tokens = torch.randint(2**40, (B, M), generator=g)
    size = torch.tensor([N, N // 2, 1], dtype=torch.int32).repeat(B)[:B]
    args = tokens, scores, parents.int(), torch.arange(B), size
    return tuple(a.to(DEVICE) for a in args), {"num_nodes": N}


CASES["tree_links"] = [(1, 1), (2, 7), (3, 20), (4, 130)]


def tree_links(B, N):
    """Every third request has a parent that is out of range, every fourth no node, not even a root."""
    g = torch.Generator().manual_seed(B + N)
    parents = torch.cat([torch.full((B, 1), -1), random_parents(B, N - 1, g)], 1)
    parents[2::3, N // 2:N // 2 + 1] = N
    parents[3::4] = -2
    return (parents.to(DEVICE, torch.int32),), {}


CASES["tree_from_mask"] = [(1, 1), (2, 7), (3, 20), (2, 130)]


def tree_from_mask(B, N):
    """Every third request has a node that sees what its parent does not."""
    (parents,), _ = tree_links(B, N)
    words = ancestors_of(parents[:, 1:].cpu().long() % N)
    mask = (words.repeat_interleave(64, 2) >> torch.arange(64).repeat(words.shape[2]) & 1)[..., :N] == 1
    mask[2::3, N - 1, N // 3] ^= True
    return (mask.to(DEVICE),), {}


CASES["tree_from_paths"] = [(1, 1, 1, 1), (2, 5, 4, 7), (3, 9, 3, 20), (2, 70, 7, 130)]


def tree_from_paths(B, L, D, N):
    """Random rows, each from the root on; many nodes have two parents. Every third request has a node too many."""
    g = torch.Generator().manual_seed(B + L + D + N)
    paths = torch.randint(-N // 2, N, (B, L, D), generator=g).clamp(min=-2)
    paths = torch.where(paths == 0, -1, paths)
    paths[:, :, :1] = 0
    paths[2::3, L // 2, D - 1] = N
    return (paths.to(DEVICE), N), {}


CASES["tree_paths"] = [(1, 1, 0), (2, 7, 2), (3, 20, 19), (2, 130, 4)]


def tree_paths(B, N, max_depth):
    (parents,), _ = tree_links(B, N)
    return (parents, max_depth), {}


def ancestors_of(parents):
    """(B, N, W) words of bits of trees whose nodes from the second on have these parents (B, N - 1), or -2."""
    B, N = parents.shape[0], parents.shape[1] + 1
    is_ancestor = torch.eye(N, dtype=torch.bool).repeat(B, 1, 1)
    for n, parent in enumerate(parents.T, 1):
        is_ancestor[:, n] |= is_ancestor[torch.arange(B), parent.clamp(min=0)]
        is_ancestor[:, n] &= (parent >= 0).unsqueeze(1)
    words = torch.nn.functional.pad(is_ancestor, (0, -N % 64)).unflatten(2, (-1, 64)).long()
    return (words << torch.arange(64)).sum(-1)


CASES["tree_mask"] = [
    (1, 1),
    (2, 7, True, "packed", 20),
    (1, 65, True, "additive", 80, torch.float16),
    (3, 12, True, "bool", 20),
    (1, 5, True, "additive", 9, torch.bfloat16),
    (2, 9, False, "packed"),
    (3, 12, True, "packed_rows", 43, torch.float32, True),
    (2, 70, False, "bool", 100, torch.float32, True),
]


def tree_mask(B, N, lengths=False, form="bool", columns=None, dtype=torch.float32, start=False):
    """Ancestor bits of trees with unused slots; lengths from 0 to more than there are columns.

    start: nodes begin before the cached columns end, behind them, and out of sight.
    """
    g = torch.Generator().manual_seed(B + N)
    ancestors = ancestors_of(random_parents(B, N - 1, g))
    if N % 64:
        ancestors[1::2, :, -1] |= -2**63  # bits beyond the last node are nothing
    each_length = torch.tensor([0, 3, 2**20], dtype=torch.int32).roll(-1 if B < 3 else 0).repeat(B)[:B].to(DEVICE)
    kwargs = {"form": form, "columns": columns, "dtype": dtype}
    if start:
        kwargs["start"] = torch.tensor([5, -2, 2**62]).repeat(B)[:B].to(DEVICE)
    return (ancestors.to(DEVICE), each_length if lengths else None), kwargs


CASES["tree_attention"] = [
    (1, 1, 1, 1, 16),
    (2, 7, 4, 2, 32, {"mask": True}),
    (3, 20, 2, 2, 48, {"dtype": torch.bfloat16, "columns": 60}),
    (1, 70, 3, 1, 100, {"dtype": torch.float16, "columns": 150}),
]
TOLERANCES["tree_attention"] = {0: (1e-2, 1e-3)}  # of 16 bits; tests/kernels/test_tree_attention.py has the others


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


CASES["decoder_layers"] = [
    (1, 1, 16, 1, 1, 16, 16),
    (2, 7, 64, 4, 2, 32, 40, {"mask": True, "halves": True, "extra": True}),
    (3, 14, 48, 3, 3, 16, 100, {"dtype": torch.bfloat16, "first": 3}),
    (1, 33, 64, 2, 1, 48, 64, {"norm": False, "layers": 1}),
]
# Of 16 bits; its own tests have the others. The cache is what is written to, and one of the arguments.
TOLERANCES["decoder_layers"] = dict.fromkeys((0, 1, 4, 5), (1e-2, 2e-2))


def decoder_layers(B, N, E, H, Hkv, D, ffn_dim, options=None):
    """Rows with and without the condition. extra: biases, and LayerNorms of q and k."""
    options = {"dtype": torch.float32, "first": 0, "mask": False, "halves": False, "extra": False, "norm": True,
               "layers": 2} | (options or {})
    dtype, first, L = options["dtype"], options["first"], options["layers"]
    g = torch.Generator().manual_seed(B + N + E + D)

    def normal(*sizes, scale=1.0):
        return (torch.randn(*sizes, generator=g) * scale).to(DEVICE, dtype)

    def layer():
        sizes = ((H + 2 * Hkv) * D, E), (E, H * D), (ffn_dim, E), (ffn_dim, E), (E, ffn_dim)
        norms = 1 + normal(E, scale=0.1), 1 + normal(E, scale=0.1) if options["norm"] else None
        extra = normal((H + 2 * Hkv) * D), normal(E), (1 + normal(H + Hkv, D, scale=0.1), normal(H + Hkv, D))
        return DecoderLayer(*(normal(*size, scale=size[1] ** -0.5) for size in sizes), *norms,
                            *(extra if options["extra"] else ()))

    layers = pack_layers([layer() for _ in range(L)], 1 + normal(E, scale=0.1) if options["norm"] else None, heads=H,
                         rotates_halves=options["halves"])
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


CASES["denoise_tokens"] = [(1, 1, 2, 1, 16, 0), (13, 5, 4, 2, 48, 2), (3, 4, 8, 1, 64, 3)]
TOLERANCES["denoise_tokens"] = {i: (1e-4, 1e-4) for i in range(3)}  # of sums in another order


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
                        lambda n, k: (normal(n, k, scale=k ** -0.5), normal(n, scale=0.1)))
        return TransformerBlock(*norm(), *linear(3 * E, E), *linear(E, E), *norm(), *linear(ffn_dim, E),
                                *linear(E, ffn_dim))

    kwargs = {}
    if options["mask"]:
        kwargs["key_mask"] = (torch.rand(R, N, generator=g) < 0.7).to(DEVICE)
    if options["wanted"] is not None:
        kwargs["wanted"] = torch.randint(N, (R, options["wanted"]), generator=g).to(DEVICE)
    last_norm = (1 + normal(E, scale=0.1), normal(E)) if options["mask"] else None
    blocks = pack_blocks([block() for _ in range(options["layers"])], last_norm, heads=heads)
    return (normal(R, N, E), blocks), kwargs


CASES["packed_linear"] = [(1, 2, 1), (3, 48, 70), (25, 64, 128, torch.bfloat16, False)]
TOLERANCES["packed_linear"] = {0: (1e-5, 1e-5)}  # of sums in another order


def packed_linear(M, K, outputs, dtype=torch.float32, bias=True):
    g = torch.Generator().manual_seed(M + K)
    x, weight = (torch.randn(n, K, generator=g).to(DEVICE, dtype) for n in (M, outputs))
    return (x, pack_weight(weight), outputs, torch.randn(outputs, generator=g).to(DEVICE) if bias else None), {}


CASES["codebook_neighbors"] = [(2, 1, 1), (40, 3, 39), (1100, 4, 7)]


def codebook_neighbors(V, D, k):
    g = torch.Generator().manual_seed(V)
    return (torch.randint(-8, 9, (V, D), generator=g).float().to(DEVICE), k), {}
