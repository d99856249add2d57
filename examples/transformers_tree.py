"""A language model of transformers, decoded with a draft tree and by Jacobi iteration: two arguments of `generate`.

    python examples/transformers_tree.py

Needs `pip install transformers`. The model is tiny and random, and nothing is downloaded. All methods give equal
tokens, two of them in fewer forwards.
"""
import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specvis_kernels.compat.transformers import jacobi_generate, tree_generate

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
parser.add_argument("--max-new-tokens", type=int, default=64)
options = parser.parse_args()

torch.manual_seed(0)
config = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=8, initializer_range=0.1, pad_token_id=0, eos_token_id=None)
model = LlamaForCausalLM(config).eval()

# The draft model: the model's own answer to the last token alone, with image tokens only, ids 32 to 95.
table = model(torch.arange(96)[:, None]).logits[:, 0].detach()
table[:, :32] = -torch.inf
table = table.softmax(-1)


def draft(sequences, mask):
    """All tokens so far (B, F, T), and which of them are real -> (B, F, V) probabilities of the next token."""
    return table[sequences[..., -1]]


# Two prompts, the shorter one padded on the left. Guidance compares with a sequence without the prompt.
prompts = torch.tensor([[0, 0, 41, 8, 20], [3, 17, 5, 60, 2]])
settings = dict(
    attention_mask=(prompts != 0).long(), max_new_tokens=options.max_new_tokens, guidance=1.5,
    unconditional_ids=torch.tensor([[2]]), id_range=(32, 96), seeds=[0, 1], do_sample=options.temperature > 0)
if options.temperature > 0:
    settings.update(temperature=options.temperature, top_k=40)
choices = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]  # paths: (0, 1) is the second child of (0,)
methods = {
    "one at a time": dict(custom_generate=jacobi_generate, window=0),
    "tree": dict(custom_generate=tree_generate, draft=draft, choices=choices),
    "jacobi": dict(custom_generate=jacobi_generate, window=8),
}
tokens, tau = {}, {}
for name, method in methods.items():
    stats = {}
    tokens[name] = model.generate(prompts, **settings, **method, stats=stats)
    tau[name] = max(stats["num_tokens"]) / stats["target_forwards"]
    same = torch.equal(tokens[name], tokens["one at a time"])
    print(f"{name:14} {tau[name]:.2f} tokens per target forward; the same tokens: {'yes' if same else 'no'}")
