"""A case: the arguments of one call of an op, by name. An op's name and a number decide it."""
import inspect
from dataclasses import dataclass, field

import torch

import specvis_kernels
from specvis_kernels import pack_weight
from specvis_kernels._candidate import EMPTY
from specvis_kernels._gaussian import VARIANTS
from specvis_kernels.codebook_neighbors import METRICS
from specvis_kernels.neighborhood_sum import CUTOFFS
from specvis_kernels.tree_mask import FORMS
from tests import cases
from tests.fuzz.maker import FLOATS, REFUSED, ROWS, TURN, Maker
from tests.fuzz.values import DELTAS, GAUSSIAN, INT32, INT64, NAN, OMEGAS, TEMPERATURES

MOST_SHOWN = 256       # elements of a tensor whose numbers are printed
MOST_EMULATED = 2**16  # elements of a tensor: larger ones would take a minute with sanitizers
KEEPS = {  # arguments whose numbers a layout must not change, because the docstring forbids the result
    "commit_kv": {"slots"}, "decoder_layers": {"x", "lengths", "ancestors", "positions", "rotations", "key_mask"},
    "denoise_tokens": {"time", "schedule"}, "packed_linear": {"weight"}, "rms_norm": {"x", "weight", "residual"},
    "rotate_into_cache": {"lengths", "positions"}, "swiglu": {"gate", "up"},
    "transformer_blocks": {"x", "key_mask", "wanted"},
    "tree_attention": {"k_cache", "v_cache", "lengths", "ancestors", "q", "key_mask"}}


@dataclass
class Case:
    """A call of an op, and where it runs."""

    op: str
    number: int
    named: dict
    backends: tuple[str, ...] = ()                              # to be compared with the oracle
    environment: dict[str, str] = field(default_factory=dict)   # the device that is emulated
    rows: int = 1                                               # 0 if it may be refused
    may_be_refused: bool = False

    def __str__(self):
        arguments = map(text_of, self.named, self.named.values())
        environment = [f"{name}={value}" for name, value in self.environment.items()]
        return "\n".join([f"{self.op} --case {self.number}", *arguments, *environment])


def text_of(name, a):
    """An argument as torch prints it, without the numbers of a large tensor."""
    if isinstance(a, list):
        return "\n".join(text_of(f"{name}[{i}]", one) for i, one in enumerate(a))
    if not isinstance(a, torch.Tensor):
        return f"{name} = {a!r}"
    numbers = f"\n{a}" if a.numel() <= MOST_SHOWN else ""
    return f"{name}: {a.dtype} {tuple(a.shape)}, strides {a.stride()}{numbers}"


def sample_residual(d):
    R, V = d.batch(), d.vocabulary()
    P = d.rows(R, V)
    Q = d.pick(None, P, d.rows(R, V), d.rows(R, V))
    omega = d.setting((1.0, 0.5, 2.0, 0.25), OMEGAS, torch.float32, R) if d.chance(0.6) else None
    return {"target_probs": P, "draft_probs": Q, "uniforms": d.uniforms(R), "omega": omega}


def neighborhood_sum(d):
    R, V = d.batch(), d.vocabulary()
    C = min(d.pick(V, d.r.randint(1, V)), 300)
    offset = d.r.randint(0, V - C)
    k = min(d.pick(1, 2, 5, 20, V, V - 1) or 1, 3000)
    return {"probs": d.rows(R, V), "tokens": d.tokens(V, R), "neighbors": d.table(C, k, V - offset),
            "delta": d.setting((0.1, 0.5, 2.0, 0.25), DELTAS, torch.float32, R), "cutoff": d.pick(*CUTOFFS),
            "offset": offset}


def guided_probs(d):
    N, V = d.nodes(), d.vocabulary()
    B = d.batch(N)
    return d.logits(B, N, V) | d.settings(B, V)


def draw_tokens(d):
    N, V = d.nodes(), d.vocabulary()
    B = d.batch(N)
    named = d.logits(B, N, V) | d.settings(B, V) | d.seeds(B, N)
    return named | {"guesses": d.tokens(V, B, N) if d.chance(0.6) else None, "ahead": d.pick(0, 0, 1, 24, 2**31 - 1)}


def token_log_probs(d):
    N, V = d.nodes(), d.vocabulary()
    B, K = d.batch(N), d.number(1, 2, 5)
    named = d.logits(B, N, V) | d.settings(B, V)
    if d.chance(0.5):
        return named | {"tokens": d.tokens(V, B, N)}
    return named | {"tokens": d.tokens(V, B, K), "rows": d.tokens(N, B, K)}


def draw_children(d):
    F, V, K = d.nodes(), d.vocabulary(), d.number(1, 2, 5, 9)
    B = d.batch(F)
    named = {"draft_probs": d.rows(B, F, V)}
    return named | ({"uniforms": d.uniforms(B, F, K)} if d.chance(0.5) else d.seeds(B, F) | {"num_children": K})


def draft_children(d):
    F, V, K = d.nodes(), d.vocabulary(), d.number(1, 2, 5, 9)
    B = d.batch(F)
    named = d.logits(B, F, V) | d.settings(B, V) | {"uniforms": None}
    return named | ({"uniforms": d.uniforms(B, F, K)} if d.chance(0.5) else d.seeds(B, F) | {"num_children": K})


def scores_of(d, *shape):
    scores = -(d.normal(*shape).abs() * d.pick(0, 1, 4))
    if d.chance(0.5):
        scores = scores.round()
    scores = torch.where(d.uniform(*shape) < d.pick(0, 0.2), -torch.inf, scores)
    return d.hurt(scores, (NAN, -torch.inf, -0.0, -3e38, 1e-45))


def expand_tree(d):
    F, V, K = d.nodes(), d.vocabulary(), d.number(1, 2, 5, 9)
    B = d.batch(F)
    return {"draft_probs": d.rows(B, F, V), "scores": scores_of(d, B, F), "num_children": K,
            "width": d.hurt(d.below(K + 1, B, low=1, dtype=torch.int32), (*INT32, K + 1))}


def draft_frontier(d):
    F, V, K, W = d.nodes(), d.vocabulary(), d.number(1, 2, 5, 9), d.pick(1, 1, 2, 3)
    B = d.batch(F)
    return d.logits(B, F, V) | d.settings(B, V) | {
        "scores": scores_of(d, B, F), "num_children": K, "level": d.pick(1, 2, 3),
        "first_node": d.pick(1, 64 * W - K, d.r.randint(1, 64 * W - K)), "first_candidate": d.pick(0, 7, 1000),
        "ancestors": d.hurt(d.below(2**62, B, F, W), INT64),
        "candidates": d.hurt(d.below(50, B, F, low=-1, dtype=torch.int32), INT32),
        "width": d.hurt(d.below(K + 1, B, low=1, dtype=torch.int32), (*INT32, K + 1)),
        "depth": d.hurt(d.below(5, B, low=1), INT64)}


def select_tree(d):
    N, M = d.nodes(), d.number(0, 1, 2, 7, 20)
    B = d.batch(max(M, 1))
    parents = d.parents(B, M + 1, unused=0)[:, 1:] - 1
    scores = scores_of(d, B, M)
    if d.chance(0.7):
        scores = scores.sort(1, descending=True).values
    return {"tokens": d.tokens(2**40, B, M), "scores": scores, "num_nodes": N,
            "parents": d.hurt(parents.int(), (M, *INT32, *range(min(M, 9)))), "root": d.tokens(99, B),
            "size": d.hurt(d.below(N + 2, B, dtype=torch.int32), INT32)}


def any_parents(d, most=24):
    N = d.nodes(most) if d.size != "small" or d.chance(0.7) else d.pick(63, 64, 65, 130)
    parents = d.hurt(d.parents(d.batch(N), N), (N, *INT32, *range(min(N, 9))), 0.5)
    return parents if d.chance(0.3) else parents.int()


def tree_links(d):
    return {"parents": any_parents(d)}


def tree_mask(d):
    N = d.nodes() if d.size != "small" or d.chance(0.8) else d.pick(63, 64, 65, 70)
    B = d.batch(N)
    ancestors = d.hurt(cases.ancestors_of(d.parents(B, N)[:, 1:]), INT64)
    columns = d.pick(N, 1, N + 1, N + 7, N + 40, 2 * N + 3)
    lengths = d.hurt(d.below(columns + 2, B, dtype=torch.int32), INT32) if d.chance(0.7) else None
    start = d.below(columns + 2, B, low=-2) if d.chance(0.4) else None
    start = None if start is None else d.hurt(start, INT64) if d.chance(0.5) else d.hurt(start.int(), INT32)
    return {"ancestors": ancestors, "lengths": lengths, "start": start, "form": d.pick(*FORMS), "columns": columns,
            "dtype": d.pick(*FLOATS, "float16")}


def tree_attention(d):
    N, D, Hkv, W = d.nodes(9), d.pick(1, 3, 16, 32, 33, 64), d.pick(1, 2), d.pick(1, 1, 2)
    B, heads = min(d.batch(N), 64), d.pick(1, 2, 3)
    R, T = B * d.pick(1, 2, 3), d.pick(1, N, N + 5, N + 33)
    dtype = d.pick(*FLOATS)
    ancestors = d.hurt(torch.nn.functional.pad(cases.ancestors_of(d.parents(B, N)[:, 1:]), (0, W - 1)), INT64)
    lengths = d.hurt(d.below(T + 1, B), (T, T + 1, -1, *INT64), 0.4)
    scale = d.pick(None, None, 0.0, 1.0, -1.0)
    k, v = d.normal(2, R, T, Hkv, D)
    if d.chance(0.3) and R:  # what no query of a row sees
        column = torch.arange(T)
        ends = lengths.clamp(0, T).repeat(R // B) + 64 * ancestors.shape[2]
        unseen = (column >= ends[:, None]) | (lengths < 0).repeat(R // B)[:, None]
        k, v = (torch.where(unseen[..., None, None], NAN, t) for t in (k, v))
    key_mask = d.uniform(R, d.pick(0, 1, 5, T + 3)) < 0.5 if d.chance(0.4) else None
    return {"q": d.normal(R, N, heads * Hkv, D).to(dtype), "k_cache": k.to(dtype), "v_cache": v.to(dtype),
            "lengths": lengths, "ancestors": ancestors, "key_mask": key_mask, "scale": scale}


def decoder_layers(d):
    heads, kv_heads = d.pick((1, 1), (2, 1), (3, 3))
    N, B = d.nodes(9), d.r.randint(1, 3)
    options = {"dtype": d.pick(torch.float32, torch.bfloat16), "first": d.pick(0, 0, 2), "mask": d.chance(0.4),
               "halves": d.chance(0.5), "extra": d.chance(0.4), "norm": d.chance(0.7), "layers": d.pick(1, 2)}
    args, kwargs = cases.decoder_layers(B, N, d.pick(16, 48), heads, kv_heads, d.pick(16, 32), d.pick(1, 16, 40),
                                         options)
    named = dict(zip(("x", "layers", "kv_cache", "lengths", "ancestors", "positions", "rotations"), args)) | kwargs
    T = named["kv_cache"].shape[2]
    return named | {"lengths": d.hurt(d.below(T, B), (T, T - 1, -1, *INT64), 0.3),
                    "positions": d.hurt(named["positions"], INT64, 0.2)}


def packed_linear(d):
    M, K, outputs = d.r.randint(1, ROWS[d.size]), 2 * d.r.randint(1, 40), d.r.randint(1, 100)
    dtype = d.pick(torch.float32, torch.bfloat16)
    return {"x": d.hurt(d.normal(M, K), (torch.nan, torch.inf), 0.3).to(dtype),
            "weight": pack_weight((d.normal(outputs, K) * K ** -0.5).to(dtype)), "out_features": outputs,
            "bias": d.normal(outputs) if d.chance(0.5) else None}


def rms_norm(d):
    M, E, dtype = d.r.randint(1, ROWS[d.size]), d.r.randint(1, 100), d.pick(*FLOATS)
    rows = (d.hurt(d.normal(M, E), (torch.nan, torch.inf, 0.0), 0.3).to(dtype) for _ in range(2))
    return {"x": next(rows), "weight": d.normal(E).to(dtype), "eps": d.pick(0.0, 1e-6, 1.0),
            "residual": next(rows) if d.chance(0.5) else None}


def swiglu(d):
    M, F, dtype = d.r.randint(1, ROWS[d.size]), d.r.randint(1, 100), d.pick(*FLOATS)
    return {name: d.hurt(d.normal(M, F) * 40, (torch.nan, torch.inf, -torch.inf, -0.0), 0.3).to(dtype)
            for name in ("gate", "up")}


def rotate_into_cache(d):
    N, B = d.nodes(9), d.r.randint(1, 3)
    options = {"dtype": d.pick(*FLOATS), "first": d.pick(0, 0, 2), "halves": d.chance(0.5)}
    args, kwargs = cases.rotate_into_cache(B, N, d.pick(1, 3), d.pick(1, 2), d.pick(2, 6, 32), options)
    named = dict(zip(("qkv", "kv_cache", "lengths", "positions", "rotations"), args)) | kwargs
    return named | {"qkv": d.hurt(named["qkv"].float(), (torch.nan, torch.inf), 0.3).to(options["dtype"]),
                    **{name: d.hurt(named[name], INT64, 0.3) for name in ("lengths", "positions")}}


def denoise_tokens(d):
    T, P = d.r.randint(1, 4), d.pick(1, 2)
    args, kwargs = cases.denoise_tokens(d.r.randint(1, 20), T, d.pick(2, 4, 10), P, d.pick(16, 32, 48), d.pick(1, 2))
    named = dict(zip(("noise", "z", "time", "network", "schedule"), args)) | kwargs
    del named["temperature"]  # a huge one lets the squares of norms overflow
    named |= {name: d.hurt(named[name], (torch.nan, torch.inf), 0.3) for name in ("noise", "z")}
    return named | {"clip_range": d.pick(0.5, torch.inf)}


def transformer_blocks(d):
    options = {"dtype": d.pick(torch.float32, torch.bfloat16), "mask": d.chance(0.5), "layers": d.pick(1, 2),
               "wanted": d.pick(None, 1, 3, 9)}
    args, kwargs = cases.transformer_blocks(d.r.randint(1, 3), d.nodes(40), *d.pick((16, 1), (48, 3)), d.pick(16, 48),
                                             options)
    named = dict(zip(("x", "blocks"), args)) | kwargs
    if "wanted" in named:
        named["wanted"] = d.hurt(named["wanted"], INT64, 0.2)
    return named


def gaussians(d, B, G, C, share=0.2):
    """The four arguments of the last step."""
    mean, sigma = d.normal(B, G, C), d.normal(B, G, C) / 2 - d.pick(0, 2)
    rest = (mean, sigma, mean + d.normal(B, G, C) * 0.3 * sigma.exp(), sigma + d.normal(B, G, C) / 8)
    names = "target_means", "target_log_sigmas", "draft_means", "draft_log_sigmas"
    return {name: d.hurt(t, GAUSSIAN, share) for name, t in zip(names, rest)}


def gaussian_sizes(d):
    G, C = d.number(1, 2, 5), d.pick(1, 3, 4, 16, 17, 33 if d.size != "big" else 5)
    return d.batch(G), G, C


def accept_gaussian(d):
    B, G, C = gaussian_sizes(d)
    named = {"variant": d.pick(*VARIANTS), "truncate": d.chance(0.5), "uniforms": d.uniforms(B, G),
             "log_ratio": d.hurt(d.normal(B, G), GAUSSIAN)}
    last_step = gaussians(d, B, G, C)
    tokens = last_step["draft_means"] + d.normal(B, G, C) * last_step["draft_log_sigmas"].clamp(max=9).exp()
    named["tokens"] = d.hurt(tokens if d.chance(0.5) else d.normal(B, G, C), GAUSSIAN)
    if d.chance(0.5):
        named["num_drafted"] = d.hurt(d.below(G + 1, B, dtype=torch.int32), INT32)
    if named["variant"] == "path":
        return named
    if d.chance(0.5):
        named["temperature"] = d.hurt(d.uniform(B) + 0.1, TEMPERATURES)
    return named | last_step


def resample_gaussian(d):
    (B, G, C), M = gaussian_sizes(d), d.pick(1, 2, 5, 18)
    variant = d.pick(*VARIANTS)
    third = d.below(4, B, G)
    named = {"tokens": d.hurt(d.normal(B, G, C), GAUSSIAN), "is_accepted": (third == 0) | (third == 3),
             "is_rejected": (third == 1) | (third == 3), "proposals": d.hurt(d.normal(B, G, M, C), GAUSSIAN),
             "uniforms": d.uniforms(B, G, M), "fallback": d.hurt(d.normal(B, G, C), GAUSSIAN), "variant": variant}
    if variant == "path":
        return named | {"log_ratio": d.hurt(d.normal(B, G, M), GAUSSIAN)}
    if d.chance(0.5):
        named["temperature"] = d.hurt(d.uniform(B) + 0.1, TEMPERATURES)
    return named | gaussians(d, B, G, C, 0.1) | {"log_ratio": d.hurt(d.normal(B, G), GAUSSIAN)}


def couple_tokens(d):
    W, V = d.nodes(), d.vocabulary()
    B = d.batch(W)
    P = d.rows(B, W, V)
    named = {"target_probs": P, "draft_probs": d.pick(P, d.rows(B, W, V), d.rows(B, W, V)),
             "tokens": d.tokens(V, B, W), "uniforms": d.uniforms(B, W, 2)} | d.rule(V, B, B, W)
    if "neighbors" not in named and d.chance(0.5):
        k = d.pick(0, 1, 3, V)
        named |= {"groups": d.hurt(distinct(d, V, B, W, min(k, 64)), (-1, V, *INT64)), "residual": "optimal"}
    return named


def distinct(d, V, *shape):
    """Different ids in each row, then -1; in long rows the ids follow each other."""
    *rows, k = shape
    start = d.below(V, *rows, 1)
    ids = start + torch.arange(k)
    return torch.where(ids < V, ids, -1)


def commit_kv(d):
    N, P = d.nodes(), d.pick(0, 1, 2, 5)
    P = min(P, N - 1)
    B = min(d.batch(N), 200)
    options = {"layout": d.pick("rows", "layers", "heads", "paged"), "start": d.chance(0.5),
               "width": 0 if d.is_large and d.chance(0.5) else d.pick(1, 3),
               "dtype": d.pick(torch.float16, torch.uint8, torch.int64, torch.float32), "columns": 2 * N + d.pick(0, 6),
               "some_wrong": d.chance(0.5)}
    if not B and options["layout"] == "paged":
        options["layout"] = "rows"
    (caches, nodes, num_accepted, lengths), named = cases.commit_kv(B, N, P, options)
    named |= {"caches": caches, "accepted_nodes": d.hurt(nodes, (N, *INT32, *range(min(N, 9)))),
              "num_accepted": d.hurt(num_accepted, (P + 1, *INT32)), "lengths": d.hurt(lengths, INT64)}
    if "start" in named:
        named["start"] = d.hurt(named["start"], INT64)
    if "slots" in named:
        named["slots"] = d.hurt(named["slots"], (-1, -2**63, 2**63 - 1, 2**32, caches[0].shape[1]))
    return named


def commit_tokens(d):
    N, P, L = d.nodes(), d.pick(0, 1, 3, 6), d.pick(1, 2, 9, 30)
    args, accounts = cases.commit_tokens(d.batch(), N, P, L, d.chance(0.7), N == 1 or d.chance(0.7))
    named = dict(zip(inspect.signature(specvis_kernels.commit_tokens).parameters, args)) | accounts
    for name, bad in (("counts", (L, L - 1, *INT64)), ("num_accepted", (P + 1, *INT32)), ("status", INT32),
                      ("accepted_nodes", (N, *INT32)), ("depth", INT64), ("tv_excess", DELTAS),
                      ("step_excess", DELTAS), ("next_token", INT64), ("target_forwards", INT64)):
        if named[name] is not None:
            named[name] = d.hurt(named[name], bad)
    return named


def verify_greedy(d):
    N = d.nodes()
    B, V = d.batch(N), d.pick(1, 2, 3, 9)
    return d.tree(B, N, V) | {"target_tokens": d.tokens(V, B, N), "max_depth": d.pick(None, 0, 1, 3, N + 2)}


def verified(d, B, N, V, P):
    """A tree, how its children were drawn, and the rule."""
    named = d.tree(B, N, V) | d.rule(V, B, B, P) | {"uniforms": d.uniforms(B, N), "max_depth": P,
                                                    "empty": d.pick(*EMPTY)}
    if d.chance(0.5):
        M = d.pick(1, 2, N)
        draft_row = d.below(M, B, N, low=-1, dtype=torch.int32)
        named |= {"draft_probs": d.rows(B, M, V), "draft_row": d.hurt(draft_row, (M, *INT32), 0.15)}
    return named


def verify_tree(d):
    N, V = d.nodes(), d.vocabulary()
    B = d.batch(N)
    named = verified(d, B, N, V, d.pick(N - 1, 0, 1, 2, 3, N + 1)) | {"target_probs": d.rows(B, N, V)}
    if "draft_probs" in named and d.chance(0.2):
        named["draft_probs"] = named["target_probs"][:, :named["draft_probs"].shape[1]].clone()
    if d.chance(0.5):  # likely tokens, so that paths are long
        likely = named["target_probs"].nan_to_num(0).argmax(-1)
        named["tokens"] = torch.where(d.uniform(B, N) < 0.5, likely[:, d.below(N, N)], named["tokens"])
    return named | {"greedy": d.pick(None, True, d.uniform(B) < 0.5, d.uniform(B) < 0.5)}


def verify_logits(d):
    N, V = d.nodes(), d.vocabulary()
    B, P = d.batch(N), d.pick(N - 1, 0, 1, 2, 3, N + 1)
    named = d.logits(B, N, V) | d.settings(B, V)
    if d.chance(0.3):
        return named | d.tree(B, N, min(V, 3)) | d.seeds(B, N) | {"uniforms": None, "max_depth": P}
    return named | verified(d, B, N, V, P)


def verify_chain(d):
    V, B = d.vocabulary(), d.batch(3)
    lengths = d.below(d.pick(1, 2, 5), B)
    ends = d.hurt(lengths.cumsum(0), (-1, *INT64), 0.2)
    D = int(lengths.sum()) + d.pick(0, 0, 1, 3)
    is_narrow = d.chance(0.5)
    tokens = d.tokens(V, D)
    named = {"cu_num_draft_tokens": ends.clamp(-2**31, 2**31 - 1).int() if is_narrow else ends,
             "draft_tokens": tokens.clamp(-2**31, 2**31 - 1).int() if d.chance(0.5) else tokens,
             "uniforms": d.uniforms(D + B), "empty": d.pick(*EMPTY),
             "greedy": d.pick(None, True, d.uniform(B) < 0.5)} | d.rule(V, B, B)
    if d.chance(0.4):
        named["bonus_tokens"] = d.below(2**40, B, low=-5)
    if d.chance(0.5):
        named["draft_probs"] = d.rows(D, V)
    if d.chance(0.4):
        for name in ("neighbors", "delta", "omega", "residual", "empty"):
            named.pop(name, None)
        named["rule"] = d.pick("block", "fly")
        if named["rule"] == "fly":
            named |= {"window": d.pick(1, 1, 2, 3, 2**31 - 1), "entropy": d.pick(0.0, 0.3, 1.0, torch.inf)}
    return named | {"target_probs": d.rows(D + B * ("bonus_tokens" not in named), V)}


def philox_uniforms(d):
    B, L = d.batch(), d.nodes()
    return d.seeds(B, L) | {"n": d.pick(0, 1, 5, 130), "stream": d.pick(0, 9, 2**31 - 1),
                            "turn": d.pick(0, 1, 2**31 - 1)}


def codebook_neighbors(d):
    V, D = d.pick(2, 3, 9, 40, 150), d.pick(1, 2, 5)
    codebook = d.normal(V, D) * d.pick(1, 1e-20, 1e20)
    if d.chance(0.6):
        codebook = codebook.round()
    return {"codebook": codebook.to(d.pick(torch.float64, *FLOATS)), "k": d.pick(1, V - 1, max(1, V // 2)),
            "metric": d.pick(*METRICS), "normalize": d.chance(0.3), "seed": d.pick(0, 2**40)}


COUNTED = {"sample_residual": 1, "neighborhood_sum": 1, "verify_chain": 1, "commit_tokens": 1, "codebook_neighbors": 1,
           "commit_kv": 1, "packed_linear": 1, "denoise_tokens": 1, "rms_norm": 1,
           "swiglu": 1}  # leading dimensions that count as rows; else two


def rows_of(op, named):
    """How many rows or nodes a case has."""
    first = {"commit_kv": "accepted_nodes", "verify_chain": "uniforms"}.get(op)
    tensor = named[first or next(name for name, a in named.items() if isinstance(a, torch.Tensor) and name in (
        "logits", "target_probs", "draft_probs", "probs", "parents", "mask", "ancestors", "tokens", "codebook",
        "target_tokens", "x", "noise", "gate", "qkv", "positions"))]
    return tensor.shape[:COUNTED.get(op, 2)].numel()


def backends_of(d, op, named):
    names = [name for name in specvis_kernels.backends(op, "cpu") if name != "oracle"]
    if d.size != "tiny":
        names = [name for name in names if name != "triton"]
    if d.size == "big" or any(a.numel() > MOST_EMULATED for a in named.values() if isinstance(a, torch.Tensor)):
        names = [name for name in names if name != "cuda_emulated"]
    return tuple(names)


def environment(d):
    """A device to emulate: some have little shared memory, few multiprocessors, or no clusters."""
    shared = d.pick(28672, 65536, 65536, 232448, 28672 + 64 * d.r.randrange(300))
    return {"CUDA_ON_CPU_SHARED": str(shared), "CUDA_ON_CPU_SMS": str(d.pick(1, 2, 6, 12, 24, 132)),
            "CUDA_ON_CPU_CAPABILITY": str(d.pick(8, 9, 9, 9)), "CUDA_ON_CPU_SEED": str(d.r.randrange(2**31))}


def spoil(d, op, named):
    """Spoil one argument: another dtype or size, a dimension more or less, or no tensor."""
    name = d.pick(*[name for name, a in named.items() if a is not None])
    a = named[name]
    if isinstance(a, (list, tuple)):
        return named | {name: a[:-1]}
    if not isinstance(a, torch.Tensor):
        return named | {name: d.pick(-1, 2.5, "none of them", torch.zeros(3), 2**70, None)}
    other = d.pick("dtype", "more", "less", "size", "none", "number", "complex")
    if other == "dtype":
        dtypes = [torch.float64, torch.int8, torch.uint8, torch.int64, torch.int32, torch.bool, torch.float16]
        return named | {name: torch.zeros(a.shape, dtype=d.pick(*dtypes))}
    if other == "size":
        dim = d.r.randrange(max(a.ndim, 1))
        if a.ndim:
            a = a.narrow(dim, 0, 0) if name in KEEPS.get(op, ()) else torch.cat([a, a], dim)
        return named | {name: a}
    changed = {"more": a[None], "less": a[0] if a.ndim and len(a) else a.flatten(), "none": None, "number": 0.5,
               "complex": torch.zeros(a.shape, dtype=torch.complex64)}
    return named | {name: changed[other]}


def ops():
    """Ops by name, in the order of the alphabet."""
    return sorted(specvis_kernels.ops())


def make(op, number):
    d = Maker(op, number)
    named = globals()[op](d)
    written, rows = cases.MUTATES.get(op, ()), rows_of(op, named)
    for name, a in named.items():
        if isinstance(a, torch.Tensor) and name not in written:
            named[name] = d.layout(a, name in KEEPS.get(op, ()))
    if named.get("uncond") is None and isinstance(named.get("guidance"), float):
        named["guidance"] = 1.0  # another number is refused
    given = spoil(d, op, named) if number % TURN in REFUSED else named
    may_be_refused = number % TURN in REFUSED or op == "codebook_neighbors" and not named["codebook"].isfinite().all()
    return Case(op, number, given, backends_of(d, op, named), environment(d), 0 if may_be_refused else rows,
                bool(may_be_refused))
