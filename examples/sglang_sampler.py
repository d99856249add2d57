"""A verification step with SGLang's tensors: it builds and verifies trees, and compares with the rule in plain Python.

    python examples/sglang_sampler.py

Needs torch and specvis_kernels only. Both models are random; the data have SGLang's layout.
"""
import argparse

import torch

from specvis_kernels.compat.sglang import build_tree_kernel_efficient, tree_speculative_sampling_target_only

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--requests", type=int, default=100)
B = parser.parse_args().requests
topk, depth, N, V, num_steps = 4, 3, 12, 64, 3  # N nodes of a tree, of which a path of num_steps can be accepted
generator = torch.Generator().manual_seed(0)

# The output of SGLang's draft model. Candidates 0 to 3 follow the root. Each of them is expanded, 4 to 19 follow them.
# The best four of these are expanded, and 20 to 35 follow them. parent_list says which candidate is in which slot.
scores = torch.rand(B, topk, generator=generator).sort(descending=True).values
second = (scores[:, :, None] * torch.rand(B, topk, topk, generator=generator)).flatten(1)
best = second.topk(topk).indices.sort().values
third = (second.gather(1, best)[:, :, None] * torch.rand(B, topk, topk, generator=generator)).flatten(1)
parent_list = torch.cat([torch.full((B, 1), -1), torch.arange(topk).expand(B, -1), best + topk], 1)
selected_index = torch.cat([scores, second, third], 1).topk(N - 1).indices.sort().values
siblings = torch.rand(B, 9, V, generator=generator).argsort(2)[..., :topk].flatten(1)  # each slot has different tokens
draft_tokens = siblings.gather(1, selected_index)
tokens = torch.cat([torch.randint(V, (B, 1), generator=generator), draft_tokens], 1)
seq_lens = torch.randint(5, 30, (B,), generator=generator)

# The tensors that SGLang allocates, and its call.
tree_mask = torch.full((N * int(seq_lens.sum()) + B * N * N,), True)
positions = torch.empty(B * N, dtype=torch.int64)
retrive_index, retrive_next_token, retrive_next_sibling = torch.full((3, B, N), -1)
build_tree_kernel_efficient(parent_list, selected_index, seq_lens, tree_mask, positions, retrive_index,
                            retrive_next_token, retrive_next_sibling, topk, depth, N)

# One target forward reads B N tokens at these positions with this mask. Then the drafts are verified.
likely = tokens.gather(1, retrive_next_token.clamp(min=0))[..., None]  # each node's first child
target_probs = (2 * torch.randn(B, N, V, generator=generator)).scatter(2, likely, 6).softmax(-1)
uniforms, last_uniforms = torch.rand(B, N, generator=generator), torch.rand(B, generator=generator)
predict = torch.zeros(B * N, dtype=torch.int32)
accept_index = torch.full((B, num_steps + 1), -1, dtype=torch.int32)
num_correct_drafts = torch.empty(B, dtype=torch.int32)
tree_speculative_sampling_target_only(
    predict, accept_index, num_correct_drafts, tokens, retrive_index, retrive_next_token, retrive_next_sibling,
    uniforms, last_uniforms, target_probs, draft_probs=torch.zeros_like(target_probs))


def by_the_rule(b):
    """The rule: a node's coin accepts its first child up to which the children's probabilities reach it."""
    node, path, left = 0, [b * N], target_probs[b, 0].clone()
    for _ in range(num_steps):
        child, mass = retrive_next_token[b, node].item(), 0.0
        while child != -1:
            mass += target_probs[b, node, tokens[b, child]].item()
            if uniforms[b, node] <= mass:
                break
            left[tokens[b, child]] = 0
            child = retrive_next_sibling[b, child].item()
        if child == -1:
            break
        node, left = child, target_probs[b, child].clone()
        path.append(b * N + node)
    token = (left.cumsum(0) <= last_uniforms[b] * left.sum()).sum().item()
    return path, [*(tokens.view(-1)[n].item() for n in path[1:]), token]


num_equal = 0
for b in range(B):
    path = [index for index in accept_index[b].tolist() if index >= 0]
    emitted = predict[path].tolist()
    num_equal += (path, emitted) == by_the_rule(b)
    if b < 3:
        print(f"request {b}: {len(path) - 1} drafts accepted, new tokens {emitted}")
print(f"{1 + num_correct_drafts.float().mean():.2f} tokens per target forward; "
      f"{num_equal} of {B} requests as the rule in plain Python decides")
