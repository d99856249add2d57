"""The released rules of EAGLE and LANTERN as plain statements: paths one by one, in float64, apart from the ops.

A path is a row of `candidates`: tokens from the root's on, -1 pads. logits (L, D, V) are the guided ones along paths.
"""
import torch
from torch import Tensor


def lent_mass(probs: Tensor, token: int, neighbors: list[int], delta: float) -> tuple[float, int]:
    """What the nearest neighbors lend a token, and how many: all up to the last one at which their sum keeps the limit.

    The limit is delta, or (delta - 1) times the token's own probability where delta is above 1.
    """
    limit = delta if delta <= 1 else (delta - 1) * probs[token].item()
    total, kept, lent = 0.0, 0, 0.0
    for number, neighbor in enumerate(neighbors, 1):
        total += probs[neighbor].item()
        if total <= limit:
            kept, lent = number, total
    return lent, kept


def sampled(logits, candidates, to_probs, coins, table=None, k=0, delta=0.0, offset=0, draft_rows=None):
    """The row of the accepted path, how many drafts were accepted, and the distribution of the next token.

    Children are tried in the order of the rows, one of `coins` (an iterator) each. Without draft_rows a child is a
    point mass, else draft_rows(tokens of the path so far) is the distribution that children were drawn from without
    replacement. table[token - offset] lists neighbors, of which k may lend and k + 1 are treated after a rejection.
    """
    paths, row, accepted = candidates.tolist(), 0, candidates[0, :1].tolist()
    while True:
        level, tried = len(accepted) - 1, []
        probs = to_probs(logits[row, level]).double()
        for number, path in enumerate(paths):
            if level + 1 == len(path) or path[:level + 1] != accepted or path[level + 1] in (-1, *tried):
                continue
            token, coin = path[level + 1], next(coins)
            neighbors = [] if table is None else [int(code) + offset for code in table[token - offset][:k + 1]]
            lent, kept = lent_mass(probs, token, neighbors[:k], delta)
            proposal = torch.zeros_like(probs)
            proposal[token] = 1
            if draft_rows is not None:
                proposal = draft_rows(accepted).double()
                proposal[tried] = 0
                proposal = proposal / proposal.sum()
            tried.append(token)
            if coin * proposal[token] <= probs[token] + lent:
                row, accepted = number, path[:level + 2]
                break
            if draft_rows is None:
                probs[token] = 0
                probs[neighbors if kept else []] = 0
            else:
                proposal[neighbors if kept else []] = 0
                probs = (probs - proposal).clamp(min=0)
            probs = probs / probs.sum() if probs.sum() > 0 else torch.full_like(probs, 1 / len(probs))
        else:
            return row, level, probs


def greedy(logits, candidates, table=None, k=0, delta=0.0, offset=0):
    """The first of the longest paths, its length, and the next token.

    A token is accepted if it is the likeliest, once it has borrowed what its neighbors lend; each token by itself.
    """
    lengths = []
    for path, rows in zip(candidates.tolist(), logits):
        length = 0
        for token, row in zip(path[1:], rows):
            if token < 0:
                break
            probs = row.double().softmax(0)
            neighbors = [] if table is None else [int(code) + offset for code in table[token - offset][:k]]
            probs[token] += lent_mass(probs, token, neighbors, delta)[0]
            if probs.argmax() != token:
                break
            length += 1
        lengths.append(length)
    best = lengths.index(max(lengths))
    return best, lengths[best], int(logits[best, lengths[best]].argmax())
