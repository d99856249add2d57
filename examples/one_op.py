"""One op: a draft tree is verified, and the emitted tokens are distributed as the target's.

    python examples/one_op.py

Needs torch and specvis_kernels only.
"""
import argparse

import torch

from specvis_kernels import draw_children, tree_links, verify_tree

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--requests", type=int, default=20000, help="how many times, side by side")
B = parser.parse_args().requests

# Two models of 8 tokens. Row x of each has the probabilities of the token after x.
generator = torch.Generator().manual_seed(0)
target = torch.randn(8, 8, generator=generator).softmax(-1)
draft = (target.log() + 0.5 * torch.randn(8, 8, generator=generator)).softmax(-1)

# The tree: node 0 is the newest token, nodes 1 to 3 are drafts of the next token, drawn without replacement.
root = torch.full((B, 1), 5)
draft_probs = draft[root]                                                      # (B, 1, 8): the root's row
children = draw_children(draft_probs, torch.rand(B, 1, 3, generator=generator))
tokens = torch.cat([root, children.tokens[:, 0]], 1)                           # (B, 4)
links = tree_links(torch.tensor([[-1, 0, 0, 0]]))                              # one tree for all requests

# One target forward gives the target's row after each of the four nodes; the op decides.
draft_row = torch.tensor([[0, -1, -1, -1]])                                    # the root's children are from row 0
result = verify_tree(target[tokens], tokens, links.first_child, links.next_sibling,
                     torch.rand(B, 4, generator=generator), draft_probs=draft_probs, draft_row=draft_row, max_depth=1)

child = tokens.gather(1, result.accepted_nodes.clamp(min=0).long())[:, 0]   # meaningless if no draft was accepted
first = torch.where(result.num_accepted > 0, child, result.next_token)      # the first new token of each request
measured = first.bincount(minlength=8) / B
print("token       " + "".join(f"{x:8}" for x in range(8)))
print("target      " + "".join(f"{p:8.3f}" for p in target[5]))
print("draft       " + "".join(f"{p:8.3f}" for p in draft[5]))
print("came out    " + "".join(f"{p:8.3f}" for p in measured))
tau = 1 + result.num_accepted.float().mean().item()
print(f"{tau:.2f} tokens per target forward")
