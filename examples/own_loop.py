"""A loop of your own, by the ops alone: plain, Jacobi and tree decoding of your own model with your own cache.

    python examples/own_loop.py

Needs torch and specvis_kernels only. The model is a GPT of two layers with random weights. A request's seed and a
token's position decide the noise of a draw, so the three loops draw equal pictures, two of them in fewer forwards.
"""
import argparse

import torch
from torch import nn

from specvis_kernels import check_status, commit_kv, draw_tokens, tree_links, tree_mask, verify_logits

VOCAB, GRID, DIM, HEADS, LAYERS = 64, 8, 48, 4, 2
LENGTH = GRID * GRID
CLASSES = 10                                       # ids after the VOCAB; the last one is the null condition
SETTINGS = dict(guidance=2.0, temperature=1.0, top_k=0, top_p=0.95)

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--window", type=int, default=8, help="how many guesses a forward of the Jacobi loop reads")
WINDOW = parser.parse_args().window


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm_of_mlp = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.query_key_value, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x, columns, mask, cache):    # cache: (2, R, T, HEADS, DIM / HEADS)
        query, *new = self.query_key_value(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        for part, entries in zip(cache, new):
            part.scatter_(1, columns[..., None, None].expand_as(entries), entries)
        keys, values = (part[:, :mask.shape[-1]].transpose(1, 2) for part in cache)
        seen = nn.functional.scaled_dot_product_attention(query.transpose(1, 2), keys, values, mask[:, None])
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_of_mlp(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB + CLASSES, DIM), nn.Embedding(2 * LENGTH, DIM)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.Linear(DIM, VOCAB)

    def forward(self, tokens, positions, columns, mask, cache):
        """(R, N) tokens, their positions, their columns of the cache, their mask (R, N, T) -> logits (R, N, VOCAB)."""
        x = self.tokens(tokens) + self.positions(positions)
        for layer, part in zip(self.layers, cache):
            x = layer(x, columns, mask, part)
        return 6 * self.head(x)

    def new_cache(self, rows, columns):
        return torch.zeros(LAYERS, 2, rows, columns, HEADS, DIM // HEADS)


class Reader:
    """Reads every request twice, with its condition and without, into a cache whose column 0 is the condition's."""

    def __init__(self, num_columns):
        self.cache, self.num_forwards = model.new_cache(2 * B, num_columns), 0

    def first_tokens(self):
        conditions = VOCAB + torch.cat([classes, torch.full_like(classes, CLASSES - 1)])[:, None]
        zero = torch.zeros_like(conditions)
        logits = model(conditions, zero, zero, torch.ones(2 * B, 1, 1, dtype=torch.bool), self.cache).chunk(2)
        self.num_forwards += 1
        return draw_tokens(*logits, **SETTINGS, seeds=seeds, positions=zero[:B]).tokens

    def read(self, *inputs):
        self.num_forwards += 1
        return model(*(torch.cat([x, x]) for x in inputs), self.cache).chunk(2)


def one_by_one():
    reader = Reader(LENGTH)
    image = reader.first_tokens()
    for position in range(1, LENGTH):              # the newest token's column, after the condition's
        at = torch.full((B, 1), position)
        logits = reader.read(image[:, -1:], at, at, torch.ones(B, 1, position + 1, dtype=torch.bool))
        image = torch.cat([image, draw_tokens(*logits, **SETTINGS, seeds=seeds, positions=at).tokens], 1)
    return image, reader.num_forwards


def jacobi():
    room = LENGTH + WINDOW + 1                     # draws past an image's end are cut off
    reader = Reader(room)
    image, guesses = torch.zeros(2, B, room + GRID, dtype=torch.int64)
    image[:, :1], counts = reader.first_tokens(), torch.ones(B, dtype=torch.int64)
    node = torch.arange(WINDOW + 1)                # node 0 is the newest token, the others are guesses
    while (counts < LENGTH).any():
        columns = counts[:, None] + node           # of the nodes; each row predicts the token of this index
        tokens = torch.where(node == 0, image.gather(1, columns - 1), guesses.gather(1, columns - 1))
        logits = reader.read(tokens, columns, columns, torch.arange(room) <= columns[..., None])
        # Row n's guess is the token of node n + 1. The last row has none.
        guesses_of_rows = nn.functional.pad(tokens[:, 1:], (0, 1), value=-1)
        drawn = draw_tokens(*logits, **SETTINGS, seeds=seeds, positions=columns, guesses=guesses_of_rows, ahead=GRID)
        check_status(drawn.status)
        # The accepted guesses and the draw after them are final. The later draws are better guesses, and ahead_tokens
        # are first guesses of the tokens one row of the image below.
        image.scatter_(1, columns, torch.where(node <= drawn.num_accepted[:, None], drawn.tokens, 0))
        guesses.scatter_(1, columns + GRID, drawn.ahead_tokens).scatter_(1, columns, drawn.tokens)
        counts = (counts + drawn.num_accepted + 1).clamp(max=LENGTH)
    return image[:, :LENGTH], reader.num_forwards


def tree():
    parents = [-1, 0, 0, 0, 1, 1, 2]               # one tree for all requests. Node n is number ranks[n] of the
    ranks, depth = [0, 0, 1, 2, 0, 1, 0], 2        # likeliest tokens after its parent alone
    links = tree_links(torch.tensor([parents]))
    node = torch.arange(len(parents))
    reader = Reader(LENGTH + len(parents))
    image = torch.zeros(B, LENGTH + depth + 1, dtype=torch.int64)
    image[:, :1], counts = reader.first_tokens(), torch.ones(B, dtype=torch.int64)

    alone = torch.arange(VOCAB)[:, None]
    ones, zeros = torch.ones_like(alone), torch.zeros_like(alone)
    likeliest = model(alone, ones, zeros, ones[..., None] > 0, model.new_cache(VOCAB, 1))[:, 0].argsort(1, True)
    while (counts < LENGTH).any():
        tokens = image.gather(1, counts[:, None] - 1).repeat(1, len(parents))
        for n in node[1:]:
            tokens[:, n] = likeliest[tokens[:, parents[n]], ranks[n]]
        positions = counts[:, None] + links.depth  # of the token after each node
        mask = tree_mask(links.ancestors, counts, columns=LENGTH + len(parents))
        logits = reader.read(tokens, positions, counts[:, None] + node, mask)
        verified = verify_logits(*logits, tokens, links.first_child, links.next_sibling, None, **SETTINGS,
                                 seeds=seeds, positions=positions, max_depth=depth)
        check_status(verified.status)
        commit_kv(reader.cache.flatten(0, 1), verified.accepted_nodes, verified.num_accepted, counts, row_dim=1,
                  column_dim=2)                    # the accepted nodes' keys and values follow the root's
        accepted = tokens.gather(1, verified.accepted_nodes.clamp(min=0).long())
        step, num_accepted = torch.arange(depth + 1), verified.num_accepted[:, None]
        new = torch.where(step < num_accepted, nn.functional.pad(accepted, (0, 1)), verified.next_token[:, None])
        image.scatter_(1, counts[:, None] + step, new)
        counts = (counts + verified.num_accepted + 1).clamp(max=LENGTH)
    return image[:, :LENGTH], reader.num_forwards


torch.manual_seed(0)
model = Model().requires_grad_(False)
classes, seeds = torch.tensor([2, 5, 7]), torch.tensor([11, 12, 13])
B = len(classes)
images, target_forwards = zip(*(loop() for loop in (one_by_one, jacobi, tree)))
for name, image, num_forwards in zip(("one by one", "jacobi", "tree"), images, target_forwards):
    print(f"{name:12}{num_forwards} forwards, the same pictures: {'yes' if torch.equal(image, images[0]) else 'no'}")
