"""Ops on trees."""
import math

import numpy as np

from specvis_kernels import INVALID_TREE
from tests.fuzz.statuses.common import each, unlike


def depths(parents):
    """Of the nodes of requests (B, N), -1 where unused; and which requests are valid."""
    B, N = parents.shape
    depth = np.full((B, N), -1)
    depth[:, 0] = np.where(parents[:, 0] == -1, 0, -1)
    valid = parents[:, 0] == -1
    for n in range(1, N):
        before = (parents[:, n] >= 0) & (parents[:, n] < n)
        above = np.where(before, depth[np.arange(B), np.where(before, parents[:, n], 0)], -1)
        depth[:, n] = np.where(above >= 0, above + 1, -1)
        valid &= (above >= 0) | (parents[:, n] == -2)
    return depth, valid


def tree_links(a, out):
    ancestors, depth, first_child, next_sibling, status = out
    parents = a["parents"].astype(np.int64)
    B, N = parents.shape
    expected, valid = depths(parents)

    def of_request(b):
        used = [n for n in range(N) if expected[b, n] >= 0]
        children = {n: [m for m in used if m and parents[b, m] == n] for n in used}
        first = [children[n][0] if children.get(n) else -1 for n in range(N)]
        following = [-1] * N
        words = np.zeros((N, ancestors.shape[2]), dtype=np.uint64)
        for n in used:
            for left, right in zip(children[n], children[n][1:]):
                following[left] = right
            if n:
                words[n] = words[parents[b, n]]
            words[n, n // 64] |= np.uint64(1) << np.uint64(n % 64)
        return (unlike("first_child", first_child[b], first) or unlike("next_sibling", next_sibling[b], following)
                or unlike("ancestors", ancestors[b].view(np.uint64), words))

    return (unlike("depth", depth, expected) or unlike("status", status, np.where(valid, 0, INVALID_TREE))
            or each(of_request, B))


def tree_paths(a, out):
    paths, parents = out[0], a["parents"].astype(np.int64)
    B, N = parents.shape
    P = N - 1 if a["max_depth"] is None else a["max_depth"]
    depth, _ = depths(parents)

    def of_request(b):
        def below(path):
            children = [n for n in range(1, N) if depth[b, n] >= 0 and parents[b, n] == path[-1]]
            if not children or len(path) > P:
                return [path]
            return [longer for child in children for longer in below([*path, child])]

        found = below([0]) if depth[b, 0] == 0 else []
        rows = [path + [-1] * (P + 1 - len(path)) for path in found] + [[-1] * (P + 1)] * (N - len(found))
        return unlike("paths", paths[b], rows)

    return each(of_request, B)


def tree_from_mask(a, out):
    mask = a["mask"] != 0
    N = mask.shape[-1]
    mask = mask.reshape(-1, N, N)

    def of_request(b):
        sees = [{m for m in range(N) if mask[b, n, m] and m != n} for n in range(N)]
        parents = []
        for n in range(N):
            parent = max(sees[n], default=-1)
            is_tree = parent < n and sees[n] == (sees[parent] | {parent} if parent >= 0 else set())
            parents.append(-1 - min(n, 1) if parent < 0 else parent if is_tree else N)
        return unlike("parents", out[0][b], parents)

    return each(of_request, len(mask))


def tree_from_paths(a, out):
    paths, N = a["paths"], a["num_nodes"]
    paths = paths[None] if paths.ndim == 2 else paths

    def of_request(b):
        above = {}
        for path in paths[b].tolist():
            for parent, child in zip(path, path[1:]):
                if child >= 0:
                    above.setdefault(min(child, N), set()).add(max(-1, min(parent, N)))
        parents = [min(above[n]) if n in above and len(above[n]) == 1 else N if n in above else -2 for n in range(N)]
        parents[0] = N if 0 in above or (paths[b] >= N).any() else -1
        return unlike("parents", out[0][b], parents)

    return each(of_request, len(paths))


def tree_mask(a, out):
    ancestors, columns, N = a["ancestors"], a["columns"], a["ancestors"].shape[1]
    columns = N if columns is None else columns

    def of_request(b):
        length = 0 if a["lengths"] is None else int(a["lengths"][b])
        start = length if a["start"] is None else int(a["start"][b])
        visible = np.zeros((N, columns), dtype=bool)
        for n in range(N):
            bits = sum((int(word) & (2**64 - 1)) << 64 * w for w, word in enumerate(ancestors[b, n]))
            seen = {m for m in range(N) if bits >> m & 1}
            for c in range(columns):
                visible[n, c] = c < length and bool(seen) or c - start in (seen or {n})
        if a["form"] == "bool":
            return unlike("mask", out[0][b], visible)
        if a["form"] == "additive":
            return unlike("mask", out[0][b], np.where(visible, 0, -np.inf))
        rows = visible if a["form"] == "packed_rows" else visible.reshape(-1)
        return unlike("mask", out[0][b], np.packbits(rows, axis=-1, bitorder="little"))

    return each(of_request, len(ancestors))


def select_tree(a, out):
    tokens, parents, source, status = out
    N, M = a["num_nodes"], a["scores"].shape[1]

    def of_request(b):
        scores = [-math.inf if math.isnan(score) else score for score in a["scores"][b].tolist()]
        kept = [m for m in sorted(range(M), key=lambda m: (-scores[m], m)) if scores[m] > -math.inf]
        kept = sorted(kept[:max(1, min(int(a["size"][b]), N)) - 1])
        node = {m: i for i, m in enumerate(kept, 1)}
        slots = [[0] * N, [-2] * N, [-1] * N]
        slots[0][0], slots[1][0] = a["root"][b], -1
        expected = 0
        for m in kept:
            above = int(a["parents"][b, m])
            if above != -1 and not (0 <= above < m and above in node):
                expected = INVALID_TREE
                continue
            for slot, value in zip(slots, (a["tokens"][b, m], 0 if above == -1 else node[above], m)):
                slot[node[m]] = value
        return (unlike("status", status[b], expected) or unlike("tokens", tokens[b], slots[0])
                or unlike("parents", parents[b], slots[1]) or unlike("source", source[b], slots[2]))

    return each(of_request, len(tokens))


def children_on(child, node, next_sibling, N):
    """(child, is its link fine) for the children of a node in order, up to a link that leads to no later node."""
    while child != -1:
        is_fine = node < child < N
        yield child, is_fine
        if not is_fine:
            return
        node, child = child, int(next_sibling[child])


def verify_greedy(a, out):
    accepted_nodes, num_accepted, next_token, status = out
    N = a["tokens"].shape[1]
    P = N - 1 if a["max_depth"] is None else a["max_depth"]

    def of_request(b):
        path, bits = followed(a["target_tokens"][b], a["tokens"][b], a["first_child"][b], a["next_sibling"][b], P)
        return (unlike("status", status[b], bits) or unlike("num_accepted", num_accepted[b], len(path))
                or unlike("accepted_nodes", accepted_nodes[b], path + [-1] * (P - len(path)))
                or unlike("next_token", next_token[b], a["target_tokens"][b, path[-1] if path else 0]))

    return each(of_request, len(status))


def followed(target_tokens, tokens, first_child, next_sibling, P, is_valid=None):
    """The path on which tokens equal the target's, and the status of its links. An invalid row ends it."""
    path, node, bits = [], 0, 0
    while len(path) < P and (is_valid is None or is_valid[node]):
        for child, is_fine in children_on(int(first_child[node]), node, next_sibling, len(tokens)):
            if not is_fine:
                bits = INVALID_TREE
            elif tokens[child] == target_tokens[node]:
                path.append(child)
                break
        if not path or path[-1] == node:
            break
        node = path[-1]
    return path, bits
