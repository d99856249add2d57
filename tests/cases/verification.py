"""Inputs of the ops that verify and commit."""
import heapq

import torch

from specvis_kernels.draw_tokens import _oracle as draw_tokens_oracle
from specvis_kernels.guided_probs import _oracle as guided_probs_oracle
from tests.cases.common import (
    CASES,
    DEVICE,
    TOLERANCES,
    exact_probs,
    exact_uniforms,
    ids_of,
    links,
    neighbor_table,
    noise_keys,
    parents_of,
)
from tests.cases.rows import guided_probs

# Each cutoff and residual; drafts that are draws, and that are not; greedy requests; tables of int32; ties.
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
    *((6, 9, 40, 4, {"k": k, "residual": residual, "num_draft_rows": 2, "omega": (0.25,), "exact": False})
      for k, residual in ((0, "optimal"), (6, "relaxed"), (6, "released"))),
]
TOLERANCES["verify_tree"] = {3: (0, 1e-5)}


def verify_tree(B, N, V, max_depth, options=None):
    options = {"k": 0, "cutoff": "tvd", "offset": 0, "narrow": True, "residual": "optimal",
               "num_draft_rows": 0, "omega": None, "greedy": False, "branch": None, "empty": None,
               "drawn": False, "odd": False, "exact": True} | (options or {})
    k, offset, M = options["k"], options["offset"], options["num_draft_rows"]
    g = torch.Generator().manual_seed(B + N + V)
    parents = [[-1] + [max(0, (n - 1 - b % 2) // 3) for n in range(1, N)] for b in range(B)]
    if options["branch"]:  # that many children each, as draft models make them on flat distributions
        parents = [[-1] + [(n - 1) // options["branch"] for n in range(1, N)]] * B
    parents = torch.tensor(parents, dtype=torch.int64).view(B, N)
    target_probs = exact_probs(B * N, V, exact=options["exact"]).view(B, N, V)
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
        kwargs["draft_probs"] = exact_probs(B * M, V, 1, options["exact"]).view(B, M, V)
        kwargs["draft_row"] = torch.randint(-1, M, (B, N), generator=g, dtype=torch.int32).to(DEVICE)
    if k:
        kwargs["neighbors"] = neighbor_table(V - 2 * offset, k, narrow=options["narrow"])
        kwargs["delta"] = torch.tensor([0.25, 0.03125, 2.0]).repeat(B)[:B].to(DEVICE)
        kwargs |= {"cutoff": options["cutoff"], "offset": offset}
    if options["omega"]:
        kwargs["omega"] = torch.tensor(options["omega"]).repeat(B, max_depth)[:, :max_depth].to(DEVICE)
    if options["greedy"]:
        kwargs["greedy"] = (torch.arange(B) % 2 == 0).to(DEVICE)
    if options["odd"]:  # two tokens are likeliest, and the second is a draft; the row of request 1's drafts is invalid
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
    (5, 40, {"rule": "block", "draft": True, "bonus": True}),
    (5, 61, {"rule": "block", "draft": True, "greedy": True, "exact": False}),
    (5, 40, {"rule": "fly", "window": 1, "entropy": 0.5, "width": torch.int32}),
    (5, 61, {"rule": "fly", "window": 2, "entropy": 0.3, "draft": True, "greedy": True, "exact": False}),
    (2, 4500, {"rule": "block", "draft": True}),
]
TOLERANCES["verify_chain"] = {2: (0, 1e-5)}


def verify_chain(B, V, options=None):
    options = {"num_drafts": [2, 0, 5, 1, 3], "k": 0, "cutoff": "tvd", "offset": 0, "narrow": True,
               "residual": "optimal", "empty": "target", "draft": False, "omega": None, "greedy": False, "bonus": False,
               "width": torch.int64, "rule": "strict", "window": None, "entropy": None, "exact": True} | (options or {})
    num_drafts = (options["num_drafts"] * B)[:B]
    D, k, offset = sum(num_drafts), options["k"], options["offset"]
    ends = torch.tensor(num_drafts, dtype=torch.int64).cumsum(0)
    g = torch.Generator().manual_seed(B + V)
    target_probs = exact_probs(D if options["bonus"] else D + B, V, exact=options["exact"])
    # Half of the drafts are the likeliest tokens of their rows.
    first_rows = ends - torch.tensor(num_drafts, dtype=torch.int64) + (0 if options["bonus"] else torch.arange(B))
    rows = [first + i for first, n in zip(first_rows.tolist(), num_drafts) for i in range(n)]
    likely = target_probs[rows].argmax(1).cpu()
    tokens = torch.where(torch.rand(D, generator=g) < 0.5, likely, torch.randint(V, (D,), generator=g))
    kwargs = {name: options[name] for name in ("residual", "empty", "cutoff", "offset", "rule", "window", "entropy")}
    if options["draft"]:
        kwargs["draft_probs"] = exact_probs(D, V, 1, options["exact"])
    if options["rule"] == "block":  # a draft model that is not far from the target
        target_probs[rows] = (target_probs[rows] + 3 * kwargs["draft_probs"]) / 4
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


# No depth, more depth than nodes, and many siblings.
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
    probs = guided_probs_oracle(*rows, kwargs["min_p"], *ids)[0]
    if options["seeds"]:
        kwargs["seeds"], kwargs["positions"] = keys = noise_keys(B, N, V)
        drawn = draw_tokens_oracle(*rows, kwargs["min_p"], *keys, *ids, None, 0)[0]
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


def likeliest_paths(probs, max_depth, branch):
    """tokens and parents (B, N) of the N - 1 likeliest paths down to max_depth, if node n's children are drawn from its
    row of probs (B, N, V), at most `branch` of them. Parents come before children, likelier siblings before others."""
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


# Each layout; entries of 1, 2, 4 and 8 bytes; more than a block moves at a time.
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
    if options["some_wrong"]:  # nodes after the end
        lengths[2::3], num_accepted[2::3] = T - N // 2, P
        accepted_nodes[2::3, :1] = N
    kwargs = {"start": (lengths + N // 2).to(DEVICE)} if options["start"] else {}
    shape = {"rows": (R, T, 2, D), "layers": (count, R, T, 2, D), "heads": (R, H, T, D), "paged": (2, R * T + 5, D)}
    caches = [torch.randint(100, shape[layout], generator=g).to(DEVICE, options["dtype"])
              for _ in range(1 if layout == "layers" else count)]
    if layout == "paged":
        kwargs |= {"slots": torch.randperm(R * T + 5, generator=g)[:R * T].view(R, T).to(DEVICE), "row_dim": None}
    if layout != "paged":
        kwargs |= {"row_dim": 1 if layout == "layers" else 0, "column_dim": 1 if layout == "rows" else 2}
    args = (accepted_nodes.to(DEVICE, torch.int32), num_accepted.to(DEVICE, torch.int32), lengths.to(DEVICE))
    return (caches[0] if layout == "layers" else caches, *args), kwargs


# Nothing accepted; images that end in this step; invalid statuses and numbers, and none.
CASES["commit_tokens"] = [(1, 1, 0, 1), (3, 7, 3, 9), (8, 20, 6, 5, False), (2, 60, 40, 50, False), (5, 3, 2, 4)]


def commit_tokens(B, N, P, L, accounts=True, invalid=True):
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
    named = {"failed": (integers(0, 5, B) == 0) & invalid, "target_forwards": integers(1, 9, B),
             "num_accepted_at": integers(-1, 9, B, L), "num_drafted_at": integers(0, 9, B, L),
             "tv_excess": torch.rand(B, generator=g).to(DEVICE), "step_excess": torch.rand(B, generator=g).to(DEVICE),
             "status": integers(0, 8 if invalid else 1, B, dtype=torch.int32), "depth": integers(0, 9, B)}
    args = (integers(0, 99, B, L + accounts * (P + 1)), counts, integers(0, 99, B, N), accepted_nodes, num_accepted,
            integers(0, 99, B))
    return args, named if accounts else dict.fromkeys(named)


# Each cutoff and residual; groups in place of neighbors; sums that are not exact.
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
    *((3, 6, 40, {"k": k, "residual": residual, "omega": (0.75,), "exact": False})
      for k, residual in ((0, "optimal"), (6, "relaxed"), (6, "released"))),
]


def couple_tokens(B, W, V, options=None):
    """Guesses drawn from their rows; half of each new row is the old one."""
    options = {"k": 0, "cutoff": "tvd", "offset": 0, "narrow": True, "residual": "optimal", "omega": None,
               "group": 0, "exact": True} | (options or {})
    k, offset = options["k"], options["offset"]
    g = torch.Generator().manual_seed(B + W + V)
    draft_probs = exact_probs(B * W, V, 1, options["exact"])
    target_probs = (exact_probs(B * W, V, 0, options["exact"]) + draft_probs) / 2
    thresholds = torch.rand(B * W, 1, generator=g).to(DEVICE)
    tokens = (draft_probs.cumsum(1) <= thresholds).sum(1).clamp(max=V - 1).view(B, W)
    kwargs = {"residual": options["residual"]}
    if k:
        kwargs["neighbors"] = neighbor_table(V - 2 * offset, k, narrow=options["narrow"])
        kwargs["delta"] = torch.tensor([0.25, 0.03125, 2.0]).repeat(B)[:B].to(DEVICE)
        kwargs |= {"cutoff": options["cutoff"], "offset": offset}
    if options["omega"]:
        kwargs["omega"] = torch.tensor(options["omega"]).repeat(B, W)[:, :W].to(DEVICE)
    if options["group"]:  # the ids around the guess in the order of its new row, with the guess
        order = target_probs.argsort(1, descending=True)
        ranks = order.argsort(1).gather(1, tokens.view(-1, 1)) + torch.arange(options["group"], device=DEVICE) - 2
        group = torch.where((ranks >= 0) & (ranks < V), order.gather(1, ranks.clamp(0, V - 1)), -1)
        kwargs["groups"] = group.view(B, W, options["group"])
    args = (target_probs.view(B, W, V), draft_probs.view(B, W, V), tokens, exact_uniforms(B, W, 2, seed=2))
    return args, kwargs
