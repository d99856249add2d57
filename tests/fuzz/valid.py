"""Which arguments are valid, by the docstrings.

The status of a row, request or position has a bit INVALID_* if and only if its arguments are not valid. Tests of the
kernels say which bit it is, and check.py compares it between backends.

A function has the name of its op. It takes the arguments by name and the outputs, and returns True or False for each
entry of `status`, or None where rounding decides. A walk is judged by the nodes that it visited. Of a large batch some
requests are judged where that takes a loop.
"""
import inspect

import numpy as np
import torch

import specvis_kernels
from specvis_kernels import INVALID_DRAFT, INVALID_ROW, INVALID_RULE, INVALID_TREE, OUT_OF_TRIES

INVALID = INVALID_DRAFT | INVALID_ROW | INVALID_RULE | INVALID_TREE


def problem(op, named, outputs):
    """What is wrong with the status of an op, or None. Of ops without one only codebook_neighbors is judged."""
    if op not in globals() and op != "codebook_neighbors":
        return None
    defaults = {name: p.default for name, p in inspect.signature(getattr(specvis_kernels, op)).parameters.items()}
    arguments = {name: to_numpy(a) for name, a in (defaults | named).items()}
    outputs = [to_numpy(a) for a in outputs]
    if op == "codebook_neighbors":
        return problem_of_neighbors(arguments, outputs[0])
    with np.errstate(all="ignore"):
        valid = np.array(globals()[op](arguments, outputs), dtype=float).reshape(outputs[-1].shape)  # NaN for None
    for at in np.argwhere(~np.isnan(valid) & ((outputs[-1] & INVALID == 0) != (valid == 1))).tolist():
        at = tuple(at)
        return f"status at {at} is {outputs[-1][at]}, but its arguments are {'valid' if valid[at] else 'not valid'}"
    return None


def problem_of_neighbors(a, table):
    """What is wrong with the table of codebook_neighbors, or None: it has no kernel to be compared with."""
    V, k, codes = len(table), a["k"], a["codebook"].astype(np.float64)
    is_plain = a["metric"] == "l2" and not a["normalize"] and (np.abs(codes) < 1e6).all()
    for i in range(0, V, max(1, -(-V // 24))):
        row = table[i].astype(int)
        if len({i, *row}) != k + 1 or row.min() < 0 or row.max() >= V:
            return f"neighbors of code {i} are {row}"
        distances = ((codes - codes[i]) ** 2).sum(1)
        distances[i] = np.inf
        if is_plain and not np.allclose(distances[row], np.sort(distances)[:k], 1e-9, 1e-9 * (codes**2).sum(1).max()):
            return f"neighbors of code {i} are {row}, which are not the nearest"
    return None


def to_numpy(a):
    if not isinstance(a, torch.Tensor):
        return a
    a = a.resolve_neg()
    return (a.float() if a.dtype == torch.bfloat16 else a).numpy()


def each(is_valid, count):
    """is_valid(request) of at most 24 requests, None of the others."""
    step = max(1, -(-count // 24))
    return [is_valid(b) if b % step == 0 else None for b in range(count)]


def setting(value, like, *index):
    """A setting of a request: one number for all, or an entry of a tensor."""
    return like(value[index] if isinstance(value, np.ndarray) else value)


def is_row(probs):
    """No entry is NaN, negative or above 2, and some entry is not 0 in fixed point."""
    return ((probs >= 0) & (probs <= 2)).all(-1) & (probs >= 2.0**-42).any(-1)


def have_mass(rows, tokens):
    """Whether each row has some at its token."""
    at = tokens[..., None].clip(0, rows.shape[-1] - 1).astype(int)
    return np.take_along_axis(rows, at, -1)[..., 0] >= 2.0**-42


def ranges(a):
    """The first id of each row (B, N), and the id after the last one."""
    if isinstance(a["id_range"], np.ndarray):
        return a["id_range"][..., 0], a["id_range"][..., 1]
    return tuple(np.full(a["logits"].shape[:2], end) for end in a["id_range"] or (0, a["logits"].shape[2]))


def guided_probs(a, out):
    x, u = a["logits"].astype(np.float32), a["uncond"]
    is_masked = x <= (-65504 if a["logits"].dtype == np.float16 else -255 * 2.0**120)
    B, _, V = x.shape
    guidance, temperature = (np.broadcast_to(np.float32(a[name]), B)[:, None, None]
                             for name in ("guidance", "temperature"))
    if u is not None:
        u = u.astype(np.float32)
        x = np.where(np.isneginf(x) & (u < np.inf), -np.inf, u + guidance * (x - u))
    x = np.where(temperature == 0, x, x / np.where(temperature == 0, 1, temperature))
    first, last = ranges(a)
    is_inside = (np.arange(V) >= first[..., None]) & (np.arange(V) < last[..., None])
    return ((~is_inside | (x < np.inf)).all(-1) & (is_inside & (x > -np.inf)).any(-1) & (temperature >= 0)[:, :, 0]
            & (is_inside & ~is_masked).any(-1) & (0 <= first) & (first < last) & (last <= V))


draw_tokens = draft_children = guided_probs


def token_log_probs(a, out):
    is_valid, rows = guided_probs(a, out), a["rows"]
    if rows is None:
        return is_valid
    N = is_valid.shape[1]
    return (rows < 0) | (rows < N) & np.take_along_axis(is_valid, rows.clip(0, N - 1).astype(int), 1)


def draft_frontier(a, out):
    return ~(a["scores"] > -np.inf) | guided_probs(a, out)


def expand_tree(a, out):
    return ~(a["scores"] > -np.inf) | is_row(a["draft_probs"])


def draw_children(a, out):
    return is_row(a["draft_probs"])


def sample_residual(a, out):
    omega = np.float32(1 if a["omega"] is None else a["omega"])
    return is_row(a["target_probs"]) & (a["draft_probs"] is None or is_row(a["draft_probs"])) & (omega >= 0)


def neighborhood_sum(a, out):
    return is_row(a["probs"]) & (0 <= a["tokens"]) & (a["tokens"] < a["probs"].shape[1])


def couple_tokens(a, out):
    omega, tokens = np.float32(1 if a["omega"] is None else a["omega"]), a["tokens"]
    return (is_row(a["target_probs"]) & is_row(a["draft_probs"]) & (0 <= tokens)
            & (tokens < a["target_probs"].shape[2]) & (omega >= least_omega(a))
            & (have_mass(a["draft_probs"], tokens) | (a["neighbors"] is not None) | (a["groups"] is not None)))


def least_omega(a):
    is_relaxed = a["neighbors"] is not None or a.get("groups") is not None
    return 1 if is_relaxed and a["residual"] == "optimal" else 0


def tree_links(a, out):
    def of_request(b):
        parents, is_used = a["parents"][b].tolist(), [a["parents"][b, 0] == -1]
        for n, parent in enumerate(parents[1:], 1):
            is_used.append(0 <= parent < n and is_used[parent])
        return is_used[0] and all(used or parent == -2 for used, parent in zip(is_used[1:], parents[1:]))

    return each(of_request, len(a["parents"]))


def select_tree(a, out):
    def of_request(b):
        scores, parents = np.where(np.isnan(a["scores"][b]), -np.inf, a["scores"][b]), a["parents"][b]
        best = np.argsort(-scores, kind="stable")[:max(1, min(int(a["size"][b]), a["num_nodes"])) - 1]
        kept = {int(m) for m in best if scores[m] > -np.inf}
        return all(parents[m] == -1 or parents[m] < m and int(parents[m]) in kept for m in kept)

    return each(of_request, len(a["size"]))


# --- walks ------------------------------------------------------------------------------------------------------------

def walked(path, first_child, next_sibling, max_depth, row_is_valid, draft_is_valid, is_child, ends=range(-2**31, 0)):
    """Whether the nodes on a path, and their children up to the accepted ones, are valid. `ends`: ends of a list."""
    for depth, node in enumerate(path):
        if not row_is_valid(node):
            return False
        child, before, accepted = int(first_child[node]), node, [*path, None][depth + 1]
        if depth >= max_depth or child in ends:
            return True
        if not draft_is_valid(node):
            return False
        tried = []
        while child not in ends and child != accepted:
            if not before < child < len(first_child) or not is_child(node, child, tried):
                return False
            tried.append(child)
            before, child = child, int(next_sibling[child])
    return True


def searched(first_child, next_sibling, rows, is_token):
    """True if all that a search can visit is valid; None if it is not, as the search may not have visited it."""
    links = [*enumerate(first_child), *enumerate(next_sibling)]
    are_valid = (child < 0 or node < child < len(rows) and is_token(child) for node, child in links)
    return True if rows.all() and all(are_valid) else None


def verify_tree(a, out, rows=None, greedy=None):
    rows = is_row(a["target_probs"]) if rows is None else rows
    B, N = a["tokens"].shape
    V = (a["target_probs"] if "target_probs" in a else a["logits"]).shape[2]
    P = N - 1 if a["max_depth"] is None else a["max_depth"]
    greedy = np.broadcast_to(bool(a["greedy"]) if not isinstance(a["greedy"], np.ndarray) else a["greedy"], B) \
        if greedy is None else greedy

    def of_request(b):
        def is_token(child):
            return 0 <= a["tokens"][b, child] < V

        def draft_is_valid(node):
            row = row_of(node)
            return row < 0 or row < a["draft_probs"].shape[1] and is_row(a["draft_probs"][b, row])

        def row_of(node):
            return -1 if a["draft_probs"] is None else int(a["draft_row"][b, node])

        def is_child(node, child, tried):
            if not is_token(child) or row_of(node) < 0:
                return is_token(child)
            left = a["draft_probs"][b, row_of(node)].copy()
            left[a["tokens"][b, tried].astype(int)] = 0
            return have_mass(left, a["tokens"][b, child]) or not is_row(left)

        if greedy[b]:
            return searched(a["first_child"][b], a["next_sibling"][b], rows[b], is_token)
        omega = [1.0] if a["omega"] is None else [setting(a["omega"], np.float32, b, d) for d in range(P)]
        path = [0, *map(int, out[0][b, :out[1][b]])]
        return all(x >= least_omega(a) for x in omega) and walked(
            path, a["first_child"][b], a["next_sibling"][b], P, rows[b].__getitem__, draft_is_valid, is_child)

    return each(of_request, B)


def verify_logits(a, out):
    rows = guided_probs(a, out)
    if a["seeds"] is None:
        return verify_tree(a, out, rows, np.broadcast_to(np.float32(a["temperature"]) == 0, len(rows)))
    return verify_greedy(a, out, rows)


def verify_greedy(a, out, rows=None):
    N = a["tokens"].shape[1]
    P = N - 1 if a["max_depth"] is None else a["max_depth"]
    return each(lambda b: walked(
        [0, *map(int, out[0][b, :out[1][b]])], a["first_child"][b], a["next_sibling"][b], P,
        lambda node: rows is None or rows[b, node], lambda node: True, lambda *_: True, (-1,)), len(a["tokens"]))


def verify_chain(a, out):
    ends, drafts, V = a["cu_num_draft_tokens"].tolist(), a["draft_tokens"], a["target_probs"].shape[1]
    has_bonus, rows = a["bonus_tokens"] is not None, is_row(a["target_probs"])
    draft_rows = None if a["draft_probs"] is None else is_row(a["draft_probs"])

    def of_request(b):
        starts = [0, *ends[:b]]
        if not all(0 <= start <= end <= len(drafts) for start, end in zip(starts, ends)):
            return False
        first, n = starts[b], ends[b] - starts[b]
        own = [*rows[first + (0 if has_bonus else b):][:n + (not has_bonus)], True][:n + 1]
        are_tokens = (0 <= drafts[first:first + n]) & (drafts[first:first + n] < V)
        if a["greedy"] is not None and setting(a["greedy"], bool, b):
            return True if are_tokens.all() and all(own) else None
        are_drafts = are_tokens if draft_rows is None else are_tokens & have_mass(
            a["draft_probs"][first:first + n], drafts[first:first + n])
        if a["rule"] == "block" and draft_rows is not None:  # reads on up to a draft that cannot be accepted
            return True if are_drafts.all() and all(own) and draft_rows[first:first + n].all() else None
        omega = 1.0 if a["omega"] is None else setting(a["omega"], np.float32, b)
        return (n == 0 or omega >= least_omega(a)) and walked(
            range(int(out[0][b]) + 1), [*range(1, n + 1), -1], [-1] * (n + 1), n, own.__getitem__,
            lambda node: draft_rows is None or draft_rows[first + node], lambda _, child, __: are_drafts[child - 1])

    return each(of_request, len(ends))


# --- continuous tokens ------------------------------------------------------------------------------------------------

def last_step_of(a, b, g):
    names = "target_means", "target_log_sigmas", "draft_means", "draft_log_sigmas"
    return [None if a[name] is None else a[name][b, g] for name in names]


def try_is_valid(numbers, last_step, temperature):
    """Whether the density ratio can be computed; None where it may be too large, of which the kernels' tests know."""
    largest = np.array([np.abs(t).max() for t in (*numbers, *last_step) if t is not None])
    if not np.isfinite(largest).all():
        return False
    return True if last_step[0] is None or largest.max() < 15 and temperature > 0.01 else None


def all_of(parts):
    """False if a part is False, None if one is unclear."""
    parts = list(parts)
    return False if False in parts else None if None in parts else True


def temperature_of(a, b):
    return np.float32(1) if a["temperature"] is None else a["temperature"][b]


def accept_gaussian(a, out):
    B, G, _ = a["tokens"].shape
    counts = np.full(B, G) if a["num_drafted"] is None else a["num_drafted"].clip(0, G)

    def of_request(b):
        temperature = temperature_of(a, b)
        return 0 < temperature < np.inf and all_of(
            try_is_valid([a[name][b, g] for name in ("tokens", "uniforms", "log_ratio")], last_step_of(a, b, g),
                         temperature) for g in range(counts[b]))

    return each(of_request, B)


def resample_gaussian(a, out):
    (B, G), dims = a["is_rejected"].shape, a["log_ratio"].ndim  # variant "path" has a log_ratio for each try
    num_tries, status = out[1].reshape(-1), out[2].reshape(-1)

    def of_position(i):
        b, g = divmod(i, G)
        if not a["is_rejected"][b, g]:
            return bool(not a["is_accepted"][b, g] or np.isfinite(a["tokens"][b, g]).all())
        if not 0 < temperature_of(a, b) < np.inf:
            return False
        tries = [try_is_valid([a["proposals"][b, g, m], a["uniforms"][b, g, m], a["log_ratio"][(b, g, m)[:dims]]],
                              last_step_of(a, b, g), temperature_of(a, b)) for m in range(num_tries[i])]
        if status[i] & OUT_OF_TRIES:
            tries.append(bool(np.isfinite(a["fallback"][b, g]).all()))
        return all_of(tries)

    return each(of_position, B * G)
