"""A causal language model of transformers, decoded by `jacobi`: the same tokens as one by one, in fewer forwards.

    python examples/transformers_model.py

Needs `pip install transformers`. The model is tiny and random, and nothing is downloaded. Its vocabulary is mixed: ids
of text, then ids of image tokens. From `SlotCache` to `ImageModel` is what any other such model needs too.
"""
import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specvis import Sampling, decode, jacobi_decode, parse_method
from specvis_kernels import commit_kv


class SlotCache:
    """Keys and values of R rows; each read says in which columns to keep its own."""

    def __init__(self, config, rows, columns, like):
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, columns, config.head_dim)
        self.keys, self.values = like.new_zeros(2, *shape)

    def update(self, keys, values, layer, *_, **__):
        """What transformers calls in every layer: keep (R, heads, N, head_dim), return all that may be seen."""
        index = self.slots[:, None, :, None].expand_as(keys)
        self.keys[layer].scatter_(2, index, keys)
        self.values[layer].scatter_(2, index, values)
        return self.keys[layer][:, :, :self.columns], self.values[layer][:, :, :self.columns]

    def get_seq_length(self, *_):
        return 0  # asked for where there are no position_ids

    def commit(self, accepted_nodes, num_accepted, lengths):
        """For draft trees: the accepted nodes move to the columns behind their root's."""
        commit_kv([self.keys, self.values], accepted_nodes, num_accepted, lengths, row_dim=1, column_dim=3)


class ImageModel:
    """A causal language model as a model of images: prompts of `prefix_len` ids, then grid x grid image tokens.

    Token 0 of the image is id `first_id`; `vocab_size` of them can be drawn. No other id is ever looked at.
    """

    def __init__(self, model, prefix_len, grid, first_id, vocab_size, null_id):
        self.model, self.embed, self.null_id = model.base_model, model.get_input_embeddings(), null_id
        self.prefix_len, self.grid, self.first_id, self.vocab_size = prefix_len, grid, first_id, vocab_size
        self.head = model.get_output_embeddings().weight[first_id: first_id + vocab_size]

    def null_condition(self, batch):
        return self.embed(torch.full((batch, self.prefix_len), self.null_id, device=self.head.device))

    def new_cache(self, rows, columns):
        return SlotCache(self.model.config, rows, columns, self.head)

    def prefill(self, condition, padding_mask, cache):
        slots = torch.arange(self.prefix_len, device=condition.device).expand(len(condition), -1)
        itself = torch.eye(self.prefix_len, dtype=torch.bool, device=condition.device)
        causal = torch.ones_like(itself).tril()
        return self.read(condition, slots, causal & padding_mask[:, None] | itself, cache, slots)

    def extend(self, tokens, nodes, cache):
        return self.read(self.embed(tokens + self.first_id), nodes.position_ids, nodes.mask, cache, nodes.slots)

    def read(self, x, position_ids, mask, cache, slots):
        cache.slots, cache.columns = slots, mask.shape[-1]
        return self.model(inputs_embeds=x, attention_mask=mask[:, None], position_ids=position_ids,
                          past_key_values=cache, use_cache=True).last_hidden_state

    def logits(self, hidden):
        return (hidden @ self.head.T).float()


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--method", default="jacobi:window=16", help="jacobi and its settings, see `specvis methods`")
parser.add_argument("--temperature", type=float, default=1.0)
options = parser.parse_args()

torch.manual_seed(0)
config = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=8, initializer_range=0.2, attn_implementation="sdpa")
target = ImageModel(LlamaForCausalLM(config).eval().requires_grad_(False), prefix_len=5, grid=8, first_id=32,
                    vocab_size=64, null_id=0)

prompts, is_real = torch.randint(1, 32, (3, 5)), torch.ones(3, 5, dtype=torch.bool)
is_real[0, :2] = False  # a shorter prompt is padded on the left
condition = target.embed(prompts)
sampling = Sampling.of([0, 1, 2], guidance=1.5, temperature=options.temperature, top_k=20)
method = parse_method(options.method)
baseline = decode(target, condition, is_real, sampling)
decoded = jacobi_decode(target, condition, is_real, sampling, [method] * 3)
print(f"{method.label}: {decoded.tau.mean():.2f} tokens per target forward; "
      f"{(decoded.tokens == baseline.tokens).float().mean():.0%} of the tokens are the baseline's")
