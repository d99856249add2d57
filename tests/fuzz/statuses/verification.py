"""Verification: what is accepted, and what a rejection leaves."""
import math

import numpy as np
import torch

import specvis_kernels
from specvis_kernels import EMPTY_RESIDUAL, INVALID_DRAFT, INVALID_ROW, INVALID_RULE, INVALID_TREE
from tests.fuzz.statuses.common import ONE, Unclear, each, not_a_number, of, outside, some, unlike
from tests.fuzz.statuses.rows import guided_is_valid, is_row, ranges, to_mass
from tests.fuzz.statuses.trees import followed


def kept_by(cutoff, delta, masses, token_mass, total):
    """How many leading neighbors of these masses the cutoff keeps."""
    if not delta >= 0:
        return 0
    kept, moved = 0, 0.0
    for mass in masses:
        moved += mass
        if cutoff == "jsd":
            S, r = moved / total, token_mass / total
            mean, relaxed = r + S / 2, r + S
            value = 0.5 * (S * math.log(2) + (r * math.log(r / mean) if r else 0)
                           + (relaxed * math.log(relaxed / mean) if relaxed else 0))
            if abs(value - delta) < 1e-12:
                raise Unclear
            fits = value <= delta
        else:
            fits = delta == math.inf or moved <= delta * (total if cutoff == "tvd" else token_mass)
        if not fits:
            break
        kept += 1
    return kept


class Rule:
    """What relaxes a request's verification. `is_capped`: a token and its neighbors have at most the row's total."""

    def __init__(self, a, b, V, is_capped=True):
        self.is_capped = is_capped
        self.table, self.offset, self.V = a["neighbors"], a["offset"], V
        self.cutoff, self.residual, self.empty = a["cutoff"], a["residual"], a.get("empty", "target")
        self.delta = None if self.table is None else float(np.float32(of(a["delta"], b)))

    def neighbors_of(self, token, mass, total, may_relax=True):
        """ids of the neighbors of a token in the table, V where there is none, and how many are kept."""
        code = token - self.offset
        if self.table is None or not 0 <= code < len(self.table):
            return [], 0
        ids = [int(i) + self.offset for i in self.table[code].tolist()]
        ids = [i if 0 <= i < self.V else self.V for i in ids]
        if not may_relax:
            return ids, 0
        considered = ids[:len(ids) - (self.residual == "released")]
        masses = [mass[i] if i < self.V else 0.0 for i in considered]
        kept = kept_by(self.cutoff, self.delta, masses, mass[token], total)
        while self.is_capped and mass[token] + sum(masses[:kept]) > total:  # ids that repeat
            kept -= 1
        return ids, kept

    def after(self, token, mass, draft, omega, ids, kept):
        """What is left of the target once a token was rejected, in fixed point; `draft` is None for a point mass.

        A point mass leaves the others what they have: they keep their total, however small it is.
        """
        slack = max(0.0, 1 - omega) if self.residual == "optimal" else 0.0
        treated = {"optimal": [], "relaxed": ids[:kept], "released": ids if kept else []}[self.residual]
        treated = [i for i in treated if i < self.V]
        if draft is None:
            left = mass.copy()
            left[treated] = 0
            left[token] = np.floor(slack * mass[token])
            return left
        r = mass / mass.sum()
        if self.residual == "relaxed":
            relaxed = r[token] + sum(r[i] for i in ids[:kept] if i < self.V)
            r = r.copy()
            r[treated] = 0
            r[token] = relaxed
        q = draft / draft.sum()
        if self.residual == "released":
            q = q.copy()
            q[treated] = 0
        left = np.maximum(np.maximum(r - q, slack * r), 0)
        if abs(left.max() - 2.0**-42) < 2.0**-49:
            raise Unclear
        return np.floor(left * ONE)


def lacks_rule(omegas, rule, relaxes):
    least = 1 if relaxes and rule.residual == "optimal" else 0
    return not all(omega >= least for omega in omegas)


def verified(request, rule, row_of, rows_valid, accepted, omegas, in_range):
    """The status of a request whose accepted nodes are known; see verify_tree."""
    tokens, first_child, next_sibling, draft_row, draft_probs, P = request
    N, V, bits = len(tokens), rule.V, 0
    undefined = lacks_rule(omegas, rule, rule.table is not None)
    if undefined:
        bits |= INVALID_RULE
    for depth, node in enumerate([0, *accepted]):
        if not rows_valid[node]:
            return bits | INVALID_ROW
        child = int(first_child[node])
        if undefined or depth >= P or child < 0:
            return bits
        draft = None
        if draft_probs is not None and draft_row[node] >= 0:
            if draft_row[node] >= len(draft_probs):
                return bits | INVALID_TREE
            if not is_row(draft_probs[draft_row[node]]):
                return bits | INVALID_DRAFT
            draft = to_mass(draft_probs[draft_row[node]])
        mass = to_mass(row_of(node))
        goal, before = accepted[depth] if depth < len(accepted) else None, node
        while child >= 0:
            if not before < child < N or not 0 <= tokens[child] < V:
                bits |= INVALID_TREE
                break
            if child == goal:
                break
            token = int(tokens[child])
            if draft is None or draft.sum() > 0:
                ids, kept = rule.neighbors_of(token, mass, mass.sum(), in_range(node, token))
                left = rule.after(token, mass, draft, omegas[min(depth, len(omegas) - 1)] if omegas else 1.0, ids, kept)
                if not left.any():
                    bits |= EMPTY_RESIDUAL
                    left = np.full(V, float(ONE // V)) if rule.empty == "uniform" else to_mass(row_of(node))
                mass = left
                if draft is not None:
                    draft[token] = 0
            before, child = child, int(next_sibling[child])
        if child != goal and goal is not None:
            return f"node {goal} was accepted, but is no child of {node}"
    return bits


def verified_greedily(request, rule, row_of, rows_valid, accepted, in_range):
    """The same of a greedy request: its status, and the path."""
    tokens, first_child, next_sibling, _, _, P = request
    N, V, bits = len(tokens), rule.V, 0
    paths = {0: []}
    for node in range(N):
        if node not in paths or len(paths[node]) >= P or not rows_valid[node]:
            continue
        mass = to_mass(row_of(node))
        child, before = int(first_child[node]), node
        while child >= 0:
            if not before < child < N or not 0 <= tokens[child] < V:
                bits |= INVALID_TREE
                break
            token = int(tokens[child])
            ids, kept = rule.neighbors_of(token, mass, mass.sum(), in_range(node, token))
            raised = mass.copy()
            raised[token] += sum(mass[i] for i in ids[:kept] if i < V)
            if raised.argmax() == token:
                paths[child] = [*paths[node], child]
            before, child = child, int(next_sibling[child])
    path = max((paths[node] for node in sorted(paths)), key=len)
    if path != accepted:
        return f"the accepted nodes are {accepted}, by the docstring {path}"
    return bits if rows_valid[path[-1] if path else 0] else bits | INVALID_ROW


def verify(a, out, probs, valid, greedy, in_range=lambda b, node, token: True):
    """Of verify_tree and verify_logits."""
    accepted_nodes, num_accepted, next_token, tv_excess, status = out
    B, N, V = probs.shape
    P = N - 1 if a["max_depth"] is None else a["max_depth"]

    def of_request(b):
        rule, count = Rule(a, b, V), num_accepted[b]
        accepted = accepted_nodes[b, :count].tolist()
        omegas = [1.0] * P if a["omega"] is None else [float(np.float32(of(a["omega"], b, d))) for d in range(P)]
        request = (a["tokens"][b], a["first_child"][b], a["next_sibling"][b],
                   None if a["draft_row"] is None else a["draft_row"][b],
                   None if a["draft_probs"] is None else a["draft_probs"][b], P)
        at = (request, rule, lambda node: probs[b, node], valid[b], accepted)
        expected = verified_greedily(*at, lambda node, token: in_range(b, node, token)) if greedy[b] else verified(
            *at, omegas, lambda node, token: in_range(b, node, token))
        return expected if isinstance(expected, str) else unlike("status", status[b], expected) or unlike(
            "accepted_nodes", accepted_nodes[b, count:], [-1] * (P - count))

    return (outside("next_token", next_token, V) or outside("num_accepted", num_accepted, min(P, N - 1) + 1)
            or outside("accepted_nodes", accepted_nodes, N, -1) or not_a_number("tv_excess", tv_excess)
            or each(of_request, B))


def verify_tree(a, out):
    probs = a["target_probs"]
    greedy = np.broadcast_to(False if a["greedy"] is None else a["greedy"], len(probs))
    return verify(a, out, probs, is_row(probs), greedy)


def verify_logits(a, out):
    accepted_nodes, num_accepted, next_token, tv_excess, status = out
    B, N, V = a["logits"].shape
    valid, (first, last) = guided_is_valid(a), ranges(a)
    settings = {name: a[name] for name in ("guidance", "temperature", "top_k", "top_p", "filters")}
    rows = {name: torch.as_tensor(a[name].copy()) if isinstance(a[name], np.ndarray) else a[name]
            for name in ("logits", "uncond", "id_range")}
    rows |= {name: torch.as_tensor(v.copy()) if isinstance(v, np.ndarray) else v for name, v in settings.items()}
    if a["seeds"] is None:
        probs = specvis_kernels.guided_probs(**rows).probs.numpy()
        greedy = np.broadcast_to(np.float32(a["temperature"]) == 0, B)
        return verify(a, out, probs, valid, greedy, lambda b, node, token: first[b, node] <= token < last[b, node])

    drawn = specvis_kernels.draw_tokens(**rows, seeds=torch.as_tensor(a["seeds"].copy()),
                                        positions=torch.as_tensor(a["positions"].copy())).tokens.numpy()
    P = N - 1 if a["max_depth"] is None else a["max_depth"]

    def of_request(b):
        path, bits = followed(drawn[b], a["tokens"][b], a["first_child"][b], a["next_sibling"][b], P, valid[b])
        end = path[-1] if path else 0
        return (unlike("status", status[b], bits | (0 if valid[b, end] else INVALID_ROW))
                or unlike("accepted_nodes", accepted_nodes[b], path + [-1] * (P - len(path)))
                or unlike("next_token", next_token[b], drawn[b, end] if valid[b, end] else 0))

    return each(of_request, B)


def verify_chain(a, out):
    num_accepted, next_token, tv_excess, status = out
    ends, drafts, rows = a["cu_num_draft_tokens"].tolist(), a["draft_tokens"], a["target_probs"]
    V, D, B = rows.shape[1], len(drafts), len(ends)
    has_bonus = a["bonus_tokens"] is not None
    in_place = True
    checked = set(some(B))
    for b, (first, end) in enumerate(zip([0, *ends], ends)):
        in_place = in_place and 0 <= first <= end <= D
        if not in_place:
            if status[b] != INVALID_TREE or num_accepted[b] or next_token[b]:
                return f"request {b} has no drafts that are in place, but the status {status[b]}"
            continue
        if b not in checked:
            continue
        n, count = end - first, int(num_accepted[b])
        if count > n:
            return f"request {b} accepted {count} of {n} drafts"
        begin = first if has_bonus else first + b
        own = rows[begin:begin + n + (not has_bonus)]
        if has_bonus:  # a row that is certain stands behind the drafts
            own = np.concatenate([own, np.eye(1, V, dtype=np.float32)])
        rule = Rule(a, b, V)
        omega = 1.0 if a["omega"] is None else float(np.float32(of(a["omega"], b)))
        links = np.array([*range(1, n + 1), -1])
        request = (np.array([0, *drafts[first:end].tolist()]), links, np.full(n + 1, -1),
                   None if a["draft_probs"] is None else np.array([*range(n), -1]),
                   None if a["draft_probs"] is None else a["draft_probs"][first:end], n)
        at = (request, rule, own.__getitem__, is_row(own), [*range(1, count + 1)])
        greedy = a["greedy"] is not None and bool(of(a["greedy"], b))
        try:
            expected = verified_greedily(*at, lambda *_: True) if greedy else verified(
                *at, [omega] * n, lambda *_: True)
        except Unclear:
            continue
        what = expected if isinstance(expected, str) else unlike("status", status[b], expected)
        if what is None and has_bonus and count == n:
            what = unlike("next_token", next_token[b], a["bonus_tokens"][b])
        elif what is None:
            what = outside("next_token", next_token[b:b + 1], V)
        if what:
            return f"request {b}: {what}"
    return not_a_number("tv_excess", tv_excess)


def couple_tokens(a, out):
    tokens, is_kept, num_kept, tv_excess, status = out
    P, Q, guesses = a["target_probs"], a["draft_probs"], a["tokens"]
    B, W, V = P.shape
    valid, draft_valid, known = is_row(P), is_row(Q), (guesses >= 0) & (guesses < V)

    def of_request(b):
        rule = Rule(a, b, V)
        for w in range(W):
            omega = 1.0 if a["omega"] is None else float(np.float32(of(a["omega"], b, w)))
            relaxes = a["neighbors"] is not None or a["groups"] is not None
            bits = INVALID_RULE if lacks_rule([omega], rule, relaxes) else 0
            bits |= 0 if valid[b, w] else INVALID_ROW
            if not bits and not (draft_valid[b, w] and known[b, w]):
                bits = INVALID_TREE if draft_valid[b, w] else INVALID_DRAFT
            may_keep = not bits
            if may_keep and not is_kept[b, w]:
                mass, token = to_mass(P[b, w]), int(guesses[b, w])
                ids, kept = rule.neighbors_of(token, mass, mass.sum())
                bits = 0 if rule.after(token, mass, to_mass(Q[b, w]), omega, ids, kept).any() else EMPTY_RESIDUAL
            if is_kept[b, w] and (not may_keep or tokens[b, w] != guesses[b, w]):
                return f"guess {w} was kept"
            if status[b, w] != bits:
                return f"status of guess {w} is {status[b, w]}, by the docstring {bits}"
        return None

    return (outside("tokens", tokens, V) or not_a_number("tv_excess", tv_excess)
            or unlike("num_kept", num_kept, is_kept.astype(int).cumprod(1).sum(1)) or each(of_request, B))


def neighborhood_sum(a, out):
    relaxed_mass, num_neighbors, status = out
    probs, tokens = a["probs"], a["tokens"]
    V = probs.shape[1]
    valid, known = is_row(probs), (tokens >= 0) & (tokens < V)
    ok = valid & known

    def of_row(i):
        if not ok[i]:
            return unlike("num_neighbors", num_neighbors[i], 0) or unlike("relaxed_mass", relaxed_mass[i], 0)
        rule = Rule(a | {"residual": "optimal"}, i, V, is_capped=False)
        mass, token = to_mass(probs[i]), int(tokens[i])
        ids, kept = rule.neighbors_of(token, mass, ONE)
        total = mass[token] + sum(mass[n] for n in ids[:kept] if n < V)
        return (unlike("num_neighbors", num_neighbors[i], kept)
                or unlike("relaxed_mass", relaxed_mass[i], np.float32(total) / np.float32(ONE)))

    expected = np.where(valid, 0, INVALID_ROW) | np.where(known, 0, INVALID_TREE)
    return unlike("status", status, expected) or each(of_row, len(probs))
