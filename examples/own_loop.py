"""A loop of your own, by the ops alone: plain, Jacobi, tree and chain decoding of your own model with your own cache.

    python examples/own_loop.py

Needs torch and specvis_kernels only. The model is a GPT of two layers with random weights. A request's seed and a
token's position decide the noise of a draw, so the first three loops draw equal pictures, two of them in fewer
forwards. The chain draws by uniforms: its pictures are others, of the same distribution; at temperature 0 the same.
"""
import argparse

import torch
from torch import nn

from specvis_kernels import (
    check_status,
    commit_kv,
    commit_tokens,
    draw_tokens,
    guided_probs,
    philox_uniforms,
    sample_residual,
    tree_links,
    tree_mask,
    verify_chain,
    verify_logits,
)

VOCAB, GRID, DIM, HEADS = 64, 8, 48, 4
LENGTH = GRID * GRID
CLASSES = 10                                       # ids after the VOCAB; the last one is the null condition

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--window", type=int, default=8, help="how many guesses a forward of the Jacobi loop reads")
parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
options = parser.parse_args()
WINDOW, SETTINGS = options.window, dict(guidance=2.0, temperature=options.temperature, top_k=0, top_p=0.95)


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
    def __init__(self, layers):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB + CLASSES, DIM), nn.Embedding(2 * LENGTH, DIM)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(layers)), nn.Linear(DIM, VOCAB)

    def forward(self, tokens, positions, columns, mask, cache):
        """(R, N) tokens, their positions, their columns of the cache, their mask (R, N, T) -> logits (R, N, VOCAB)."""
        x = self.tokens(tokens) + self.positions(positions)
        for layer, part in zip(self.layers, cache):
            x = layer(x, columns, mask, part)
        return 6 * self.head(x)

    def new_cache(self, rows, columns):
        return torch.zeros(len(self.layers), 2, rows, columns, HEADS, DIM // HEADS)


class Reader:
    """Reads every request twice, with its condition and without, into a cache whose column 0 is the condition's."""

    def __init__(self, model, num_columns):
        self.model, self.cache, self.num_forwards = model, model.new_cache(2 * B, num_columns), 0

    def first_tokens(self):
        conditions = VOCAB + torch.cat([classes, torch.full_like(classes, CLASSES - 1)])[:, None]
        zero = torch.zeros_like(conditions)
        logits = self.model(conditions, zero, zero, torch.ones(2 * B, 1, 1, dtype=torch.bool), self.cache).chunk(2)
        self.num_forwards += 1
        return draw_tokens(*logits, **SETTINGS, seeds=seeds, positions=zero[:B]).tokens

    def read(self, *inputs):
        self.num_forwards += 1
        return self.model(*(torch.cat([x, x]) for x in inputs), self.cache).chunk(2)


def one_by_one():
    reader = Reader(model, LENGTH)
    image = reader.first_tokens()
    for position in range(1, LENGTH):              # the newest token's column, after the condition's
        at = torch.full((B, 1), position)
        logits = reader.read(image[:, -1:], at, at, torch.ones(B, 1, position + 1, dtype=torch.bool))
        image = torch.cat([image, draw_tokens(*logits, **SETTINGS, seeds=seeds, positions=at).tokens], 1)
    return image, reader.num_forwards


def jacobi():
    room = LENGTH + WINDOW + 1                     # draws past an image's end are cut off
    reader = Reader(model, room)
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
    reader = Reader(model, LENGTH + len(parents))
    image = torch.zeros(B, LENGTH, dtype=torch.int64)
    image[:, :1], counts = reader.first_tokens(), torch.ones(B, dtype=torch.int64)
    lengths = counts.clone()                       # of the cache before the newest token

    alone = torch.arange(VOCAB)[:, None]
    ones, zeros = torch.ones_like(alone), torch.zeros_like(alone)
    likeliest = model(alone, ones, zeros, ones[..., None] > 0, model.new_cache(VOCAB, 1))[:, 0].argsort(1, True)
    while (counts < LENGTH).any():
        tokens = image.gather(1, counts[:, None] - 1).repeat(1, len(parents))
        for n in node[1:]:
            tokens[:, n] = likeliest[tokens[:, parents[n]], ranks[n]]
        positions = counts[:, None] + links.depth  # of the token after each node
        mask = tree_mask(links.ancestors, lengths, columns=LENGTH + len(parents))
        logits = reader.read(tokens, positions, lengths[:, None] + node, mask)
        verified = verify_logits(*logits, tokens, links.first_child, links.next_sibling, None, **SETTINGS,
                                 seeds=seeds, positions=positions, max_depth=depth)
        check_status(verified.status)
        # The accepted nodes' keys and values follow the root's, and their tokens and the next one enter the image.
        lengths = commit_kv(reader.cache.flatten(0, 1), verified.accepted_nodes, verified.num_accepted, lengths,
                            row_dim=1, column_dim=2).clamp(max=LENGTH)
        commit_tokens(image, counts, tokens, verified.accepted_nodes, verified.num_accepted, verified.next_token)
    return image, reader.num_forwards


def chain(num_drafts=3):
    """A small model drafts tokens one by one, and one forward of the target reads them all. verify_chain keeps the
    target's distribution: each draft was sampled from its row of draft_probs, and no uniform is used twice."""
    room = LENGTH + num_drafts + 1
    reader, drafter = Reader(model, room), Reader(draft_model, room)
    image = torch.zeros(B, LENGTH, dtype=torch.int64)
    image[:, :1], counts = reader.first_tokens(), torch.ones(B, dtype=torch.int64)
    drafter.first_tokens()                         # it reads the conditions
    node, cu_num_draft_tokens = torch.arange(num_drafts + 1), num_drafts * torch.arange(1, B + 1)
    while (counts < LENGTH).any():
        columns, draft_probs = counts[:, None] + node, []
        mask = torch.arange(room) <= columns[..., None]
        # A count never comes again. The first uniforms draw drafts, the others are verify_chain's.
        uniforms = philox_uniforms(seeds, counts[:, None], 2 * num_drafts + 2, stream=0)[:, 0].split(num_drafts + 1, 1)
        tokens = image.gather(1, counts[:, None] - 1)
        for n in node:                             # the last draft is read too, and what would follow it is left out
            at = columns[:, n:n + 1]
            probs = guided_probs(*drafter.read(tokens[:, -1:], at, at, mask[:, n:n + 1]), **SETTINGS).probs
            drawn = sample_residual(probs[:, 0], None, uniforms[0][:, n]).tokens
            draft_probs.append(probs)
            tokens = torch.cat([tokens, drawn[:, None]], 1)
        tokens, draft_probs = tokens[:, :-1], torch.cat(draft_probs[:-1], 1)
        target_probs = guided_probs(*reader.read(tokens, columns, columns, mask), **SETTINGS).probs
        verified = verify_chain(target_probs.flatten(0, 1), tokens[:, 1:].flatten(), cu_num_draft_tokens,
                                uniforms[1].flatten(), draft_probs=draft_probs.flatten(0, 1),
                                greedy=SETTINGS["temperature"] == 0)
        check_status(verified.status)
        commit_tokens(image, counts, tokens, node[1:].repeat(B, 1), verified.num_accepted, verified.next_token)
    return image, reader.num_forwards


torch.manual_seed(0)
model, draft_model = Model(2).requires_grad_(False), Model(1).requires_grad_(False)
draft_model.load_state_dict(model.state_dict(), strict=False)  # in place of training: the target without a layer
classes, seeds = torch.tensor([2, 5, 7]), torch.tensor([11, 12, 13])
B = len(classes)
images, target_forwards = zip(*(loop() for loop in (one_by_one, jacobi, tree, chain)))
for name, image, num_forwards in zip(("one by one", "jacobi", "tree", "chain"), images, target_forwards):
    print(f"{name:12}{num_forwards} forwards, the same pictures: {'yes' if torch.equal(image, images[0]) else 'no'}")
