"""A model of your own, decoded speculatively: only what `specvis.models.interface.TargetModel` needs.

    python examples/own_model.py

The model is one layer of attention on random weights. A noisy copy of it is the draft model; the method
`jacobi` needs none.
"""
import argparse
from copy import deepcopy

import torch
from torch import nn

from specvis import Sampling, decode, jacobi_decode, parse_method, speculative_decode
from specvis.decoding.draft_model import SmallDraftModel
from specvis.decoding.sampling import cfg_inputs
from specvis_kernels import commit_kv


class OwnCache:
    """Keys and values of the tokens read: R rows of columns."""

    def __init__(self, rows, columns, dim):
        self.keys, self.values = torch.zeros(2, rows, columns, dim)

    def write(self, keys, values, slots):
        index = slots[..., None].expand_as(keys)
        self.keys.scatter_(1, index, keys)
        self.values.scatter_(1, index, values)

    def commit(self, accepted_nodes, num_accepted, lengths):
        commit_kv([self.keys, self.values], accepted_nodes, num_accepted, lengths)


class OwnModel(nn.Module):
    """Images of 4 x 4 tokens with 32 values, after a condition of 2 entries."""

    prefix_len, grid, vocab_size = 2, 4, 32

    def __init__(self, dim):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(self.vocab_size, dim), nn.Embedding(self.prefix_len + 16, dim)
        self.query_key_value, self.head = nn.Linear(dim, 3 * dim), nn.Linear(dim, self.vocab_size)
        self.null = nn.Parameter(torch.zeros(self.prefix_len, dim))

    def null_condition(self, batch):
        return self.null.expand(batch, -1, -1)

    def new_cache(self, rows, columns):
        return OwnCache(rows, columns, self.null.shape[1])

    def prefill(self, condition, padding_mask, cache):
        slots = torch.arange(self.prefix_len).expand(len(condition), -1)
        causal, itself = torch.ones(2, 2, dtype=torch.bool).tril(), torch.eye(2, dtype=torch.bool)
        return self.read(condition, slots, causal & padding_mask[:, None] | itself, cache, slots)

    def extend(self, tokens, nodes, cache):
        return self.read(self.tokens(tokens), nodes.position_ids, nodes.mask, cache, nodes.slots)

    def read(self, x, position_ids, mask, cache, slots):
        x = x + self.positions(position_ids.clamp(max=self.positions.num_embeddings - 1))
        query, key, value = self.query_key_value(x).chunk(3, -1)
        cache.write(key, value, slots)
        keys, values = (part[:, : mask.shape[-1]] for part in (cache.keys, cache.values))
        return x + nn.functional.scaled_dot_product_attention(query, keys, values, mask)

    def logits(self, hidden):
        return 4 * self.head(hidden)


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--method", default="eagle2:draft_model=small:depth=3:width=4:nodes=12",
                    help="see `specvis methods`")
parser.add_argument("--temperature", type=float, default=1.0,
                    help="a seed-exact method draws the baseline's tokens at every temperature, a lossless one at 0")
options = parser.parse_args()

torch.manual_seed(0)
target = OwnModel(16).requires_grad_(False)
model = deepcopy(target)
for weight in model.parameters():
    weight += 0.1 * torch.randn_like(weight)

condition, padding_mask = torch.randn(3, 2, 16), torch.ones(3, 2, dtype=torch.bool)  # of three requests
sampling = Sampling.of([0, 1, 2], guidance=1.5, temperature=options.temperature)
method = parse_method(options.method)
baseline = decode(target, condition, padding_mask, sampling)
draft_model = SmallDraftModel(model, *cfg_inputs(model, condition, padding_mask))
if method.drafting in ("jacobi", "none"):
    decoded = jacobi_decode(target, condition, padding_mask, sampling, [method] * 3, draft_model=draft_model)
else:
    decoded = speculative_decode(target, draft_model, condition, padding_mask, sampling, [method] * 3)
print(f"{method.label}: {decoded.tau.mean():.2f} tokens per target forward; "
      f"{(decoded.tokens == baseline.tokens).float().mean():.0%} of the tokens are the baseline's")
