"""Ops that write to their arguments."""
import numpy as np

from specvis_kernels import INVALID_ROW
from tests.fuzz.statuses.common import each, unlike


def commit_tokens(a, out):
    new_tokens, nodes, num_new = out[:3]
    names = ("tokens", "counts", "failed", "target_forwards", "num_accepted_at", "num_drafted_at", "tv_excess")
    after = dict(zip(names, out[3:]))
    N, P, L = a["node_tokens"].shape[1], a["accepted_nodes"].shape[1], a["num_accepted_at"].shape[1]

    def of_request(b):
        count, accepted = int(a["counts"][b]), max(0, min(P, int(a["num_accepted"][b])))
        path = [int(n) if 0 <= n < N else 0 for n in a["accepted_nodes"][b, :accepted]]
        new = [int(a["node_tokens"][b, n]) for n in path] + [int(a["next_token"][b])]
        was = {name: a[name][b].copy() for name in names}
        if 0 <= count < L:
            for i, token in enumerate(new):
                if count + i < L:
                    was["tokens"][count + i] = token
            was["num_accepted_at"][count] = accepted
            was["num_drafted_at"][count] = min(int(a["depth"][b]), L - 1 - count)
            was["target_forwards"] = was["target_forwards"] + 1
            if a["step_excess"] is not None:
                was["tv_excess"] = was["tv_excess"] + a["step_excess"][b]
            is_invalid = int(a["status"][b]) & INVALID_ROW != 0
            was["failed"] = was["failed"] or is_invalid
            was["counts"] = L if is_invalid else min(count + len(new), L)
        for name in names:
            expected, got = was[name], after[name][b]
            if not np.array_equal(got, expected, equal_nan=name == "tv_excess"):
                return f"{name} became {got}, by the docstring {expected}"
        behind = [0] * (P - accepted)
        return (unlike("new_tokens", new_tokens[b], new + behind) or unlike("nodes", nodes[b], [0, *path, *behind])
                or unlike("num_new", num_new[b], accepted + 1))

    return each(of_request, len(num_new))


def commit_kv(a, out):
    new_lengths, caches = out[0], out[1:]
    before = a["caches"] if isinstance(a["caches"], list) else [a["caches"]]
    B, P = a["accepted_nodes"].shape
    row_dim, column_dim = a["row_dim"], a["column_dim"]
    shape = before[0].shape
    R, T = a["slots"].shape if row_dim is None else (shape[row_dim], shape[column_dim])

    def place(r, t):
        """The index of a column of a row in a cache, or None."""
        index = [slice(None)] * len(shape)
        if row_dim is None:
            index[column_dim] = int(a["slots"][r, t])
            return tuple(index) if 0 <= index[column_dim] < shape[column_dim] else None
        index[row_dim], index[column_dim] = r, t
        return tuple(index)

    def of_request(b):
        count, length = int(a["num_accepted"][b]), int(a["lengths"][b])
        start = length if a["start"] is None else int(a["start"][b])
        is_valid, moves = 0 <= count <= P and 0 <= length <= start, []
        if is_valid:
            nodes = [0, *map(int, a["accepted_nodes"][b, :count])]
            is_valid = all(left < right for left, right in zip(nodes, nodes[1:]))
            columns = [(start + node, length + i) for i, node in enumerate(nodes)]
            is_valid = is_valid and all(source < T and target < T for source, target in columns)
        if is_valid:
            moves = [(place(r, source), place(r, target)) for r in range(b, R, B) for source, target in columns]
            is_valid = all(source and target for source, target in moves)
        for was, got in zip(before, caches):
            for source, target in moves if is_valid else []:
                if not np.array_equal(got[target], was[source]):
                    return f"what was at {source} is not at {target}"
        return unlike("new_lengths", new_lengths[b], length + 1 + count if is_valid else length)

    return each(of_request, B)
