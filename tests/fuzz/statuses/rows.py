"""Ops on rows of logits or probabilities."""
import numpy as np

from specvis_kernels import EMPTY_RESIDUAL, INVALID_DRAFT, INVALID_ROW, INVALID_RULE
from tests.fuzz.statuses.common import ONE, each, outside, some, spread, unlike


def is_row(probs):
    """Rows with no entry that is NaN, negative or above 2, and with an entry that is not 0 in fixed point."""
    return ((probs >= 0) & (probs <= 2)).all(-1) & (probs >= 2.0**-42).any(-1)


def to_mass(row):
    """A row in fixed point; entries that are no probabilities count as 0."""
    return np.floor(np.where((row >= 0) & (row <= 2), row, 0).astype(np.float64) * ONE)


def guided_is_valid(a):
    """Which rows of logits guided_probs takes; (B, N)."""
    x, u = a["logits"].astype(np.float32), a["uncond"]
    B, N, V = x.shape
    if u is not None:
        u = u.astype(np.float32)
        mixed = u + spread(a["guidance"], np.float32, B) * (x - u)
        x = np.where(np.isneginf(x) & (u < np.inf), -np.inf, mixed)
    temperature = spread(a["temperature"], np.float32, B)
    x = np.where(temperature == 0, x, x / np.where(temperature == 0, 1, temperature))
    first, last = ranges(a)
    inside = (np.arange(V) >= first[..., None]) & (np.arange(V) < last[..., None])
    bad = inside & (np.isnan(x) | np.isposinf(x))
    some_left = (inside & (x > -np.inf)).any(-1)
    return (~bad.any(-1) & some_left & (temperature >= 0)[:, :, 0] & (0 <= first) & (first < last) & (last <= V))


def ranges(a):
    """The first id and the id behind the last one of each row; (B, N) each."""
    B, N, V = a["logits"].shape
    if isinstance(a["id_range"], np.ndarray):
        return a["id_range"][..., 0], a["id_range"][..., 1]
    first, last = a["id_range"] or (0, V)
    return np.full((B, N), first), np.full((B, N), last)


def status_of_logits(a):
    return np.where(guided_is_valid(a), 0, INVALID_ROW)


def guided_probs(a, out):
    probs, status = out
    first, last = ranges(a)
    ids = np.arange(probs.shape[2])
    is_outside = (ids < first[..., None]) | (ids >= last[..., None])
    sums = probs.sum(-1, dtype=np.float64)
    if ((probs != 0) & (is_outside | (status != 0)[..., None])).any():
        return "a probability outside of the range, or of an invalid row"
    if (np.abs(sums - 1) > 1e-3)[status == 0].any():
        return f"a row sums to {sums[status == 0][np.abs(sums - 1)[status == 0].argmax()]}"
    return unlike("status", status, status_of_logits(a))


def draw_tokens(a, out):
    tokens, num_accepted, ahead, status = out
    first, last = ranges(a)
    for name, ids in (("tokens", tokens), ("ahead_tokens", ahead)):
        if ((ids < first) | (ids >= last))[status == 0].any() or ids[status != 0].any():
            return f"{name} outside of the range"
    leading = np.zeros(len(tokens), dtype=int)
    if a["guesses"] is not None:
        leading = ((a["guesses"] == tokens) & (status == 0)).cumprod(1).sum(1)
    return unlike("status", status, status_of_logits(a)) or unlike("num_accepted", num_accepted, leading)


def sample_residual(a, out):
    P, Q, omega = a["target_probs"], a["draft_probs"], a["omega"]
    valid, draft_valid = is_row(P), is_row(Q) if Q is not None else True
    omega = np.broadcast_to(np.float32(1 if omega is None else omega), valid.shape)
    undefined = ~(omega >= 0)
    expected = np.where(valid, 0, INVALID_ROW) | np.where(draft_valid, 0, INVALID_DRAFT)
    expected |= np.where(undefined, INVALID_RULE, 0)
    tokens, status = out
    clear = np.ones(len(P), dtype=bool)
    if Q is not None:
        p, q = (to_mass(row) / to_mass(row).sum(1, keepdims=True) for row in (P, Q))
        slack = np.where(omega < 1, 1 - omega.astype(np.float64), 0)[:, None]
        most = np.maximum(p - q, slack * p).max(1)
        clear = ~(np.abs(most - 2.0**-42) < 2.0**-49)
        expected |= np.where(valid & draft_valid & ~undefined & ~(most >= 2.0**-42), EMPTY_RESIDUAL, 0)
    return (outside("tokens", tokens, P.shape[1]) or unlike("status", status[clear], expected[clear])
            or unlike("tokens", tokens[~valid], 0 * tokens[~valid]))


def draw_children(a, out):
    tokens, num_children, status = out
    probs, valid = a["draft_probs"], is_row(a["draft_probs"])
    count = np.where(valid, np.minimum((probs >= 2.0**-42).sum(-1), tokens.shape[2]), 0)
    return (unlike("status", status, np.where(valid, 0, INVALID_ROW)) or unlike("num_children", num_children, count)
            or not_distinct(tokens, count, probs.shape[2]))


def not_distinct(tokens, count, V):
    """What is wrong with the first `count` children of each node, which must be different ids."""
    flat, count = tokens.reshape(-1, tokens.shape[-1]), count.reshape(-1)
    for i in some(len(flat)):
        drawn, rest = flat[i][:count[i]].tolist(), flat[i][count[i]:]
        if len({*drawn}) < len(drawn) or rest.any() or any(not 0 <= token < V for token in drawn):
            return f"the children of row {i} are {flat[i].tolist()}, of which {count[i]} exist"
    return None


def draft_children(a, out):
    tokens, probs, status = out
    count = np.minimum((probs >= 2.0**-42).sum(-1), tokens.shape[2])
    greedy = np.broadcast_to(spread(a["temperature"], np.float32, len(tokens))[..., 0] == 0, status.shape)
    count = np.where(greedy, np.minimum((probs > 0).sum(-1), tokens.shape[2]), count)
    return unlike("status", status, status_of_logits(a)) or not_distinct(tokens, count, probs.shape[2])


def status_of_level(scores, valid):
    return np.where((scores > -np.inf) & ~valid, INVALID_ROW, 0)


def expand_tree(a, out):
    tokens, scores, frontier, status = out
    B, F, K = tokens.shape
    width = np.clip(a["width"], 1, K)
    exists = (a["scores"] > -np.inf) & is_row(a["draft_probs"])
    has_score = scores > -np.inf
    most = np.minimum(np.minimum((a["draft_probs"] > 0).sum(-1), width[:, None]), np.where(exists, K, 0))
    if (has_score.sum(-1) > most).any() or tokens[~has_score].any() or np.isnan(scores).any():
        return "there are more children than can be"
    num_next = np.minimum(has_score.sum((1, 2)), width)
    return (unlike("status", status, status_of_level(a["scores"], is_row(a["draft_probs"])))
            or outside("tokens", tokens, a["draft_probs"].shape[2]) or outside("frontier", frontier, F * K, -1)
            or unlike("frontier's size", (frontier >= 0).sum(1), num_next)
            or each(lambda b: best_first(scores[b].reshape(-1), frontier[b][:num_next[b]]), B))


def best_first(scores, frontier):
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:len(frontier)]
    return unlike("frontier", frontier, order)


def draft_frontier(a, out):
    child_tokens, child_scores, child_parents, tokens, scores, rows, ancestors, candidates, status = out
    B, F, V = a["logits"].shape
    K, level = a["num_children"], a["level"]
    used = scores > -np.inf

    def of_request(b):
        if a["depth"][b] <= level and used[b].any():
            return "a slot is used below the tree's depth"
        for k in np.flatnonzero(used[b]):
            number = candidates[b, k] - a["first_candidate"]
            node = a["first_node"] + int(k)
            bits = [int(word) & (2**64 - 1) for word in a["ancestors"][b, rows[b, k]]]
            bits[node // 64] |= 1 << node % 64
            if number // K != rows[b, k] or child_tokens[b, number] != tokens[b, k] \
                    or child_scores[b, number] != scores[b, k]:
                return f"slot {k} is no candidate of the level"
            if [int(word) & (2**64 - 1) for word in ancestors[b, k]] != bits:
                return f"ancestors of slot {k} are not its parent's and itself"
        return unlike("candidates", candidates[b] >= 0, used[b])

    return (unlike("status", status, status_of_level(a["scores"], guided_is_valid(a))) or outside("rows", rows, F)
            or outside("child_tokens", child_tokens, V) or outside("tokens", tokens, V)
            or unlike("child_parents", child_parents, np.repeat(a["candidates"], K, 1)) or each(of_request, B))
