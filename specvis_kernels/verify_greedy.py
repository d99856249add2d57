"""verify_greedy: accept the drafted tokens that equal the target's own."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import check_dims, check_tree, integers
from ._define import define
from .status import INVALID_TREE


class VerifyGreedyResult(NamedTuple):
    accepted_nodes: Tensor  # (B, P) int32
    num_accepted: Tensor    # (B,)   int32
    next_token: Tensor      # (B,)   int64
    status: Tensor          # (B,)   int32


def verify_greedy(target_tokens: Tensor, tokens: Tensor, first_child: Tensor, next_sibling: Tensor, *,
                  max_depth: int | None = None, backend: str | None = None) -> VerifyGreedyResult:
    """Accept the path of each request's tree on which every token is the target's own.

    Verification starts at the root. At each node it goes on at the first child, in sibling order, whose token equals
    the node's target token. Without such a child, and at max_depth, the node's target token is the next token.

    If the target tokens are the target's argmaxes, this is greedy decoding. If they are the draws of `draw_tokens` at
    each node's position, the tokens are the ones that decoding one by one draws with the same seeds, whatever the
    tree. Verification needs neither probabilities nor uniforms.

    Args:
        target_tokens:  (B, N) int32 or int64   the target's token after each node; node 0 is the root
        tokens:         (B, N) int32 or int64   the token at each node; the root's is not read
        first_child:    (B, N) or (1, N) int32 or int64   each node's first child, a later node, or -1
        next_sibling:   (B, N) or (1, N) int32 or int64   the child of the same parent tried next, a later node, or -1
        max_depth:      P, the most nodes that can be accepted; None: N - 1
        backend:        None for the device's own kernel; a name from `backends()` to force one

    Returns:
        accepted_nodes:  (B, P) int32   the accepted nodes from the root down, without the root; -1 pads
        num_accepted:    (B,)   int32   how many there are
        next_token:      (B,)   int64   the token that follows them
        status:          (B,)   int32   INVALID_TREE: a link that was followed leads to no later node; the siblings
                                        end there

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above, N is 0, or max_depth is negative

    Examples:
        >>> links = tree_links(torch.tensor([[-1, 0, 0, 2]]))
        >>> tokens = torch.tensor([[9, 4, 5, 6]])          # 4 and 5 follow the root, 6 follows 5
        >>> target_tokens = torch.tensor([[5, 0, 6, 7]])   # after the root the target says 5, then 6, then 7
        >>> result = verify_greedy(target_tokens, tokens, links.first_child, links.next_sibling, max_depth=2)
        >>> result.accepted_nodes, result.next_token
        (tensor([[2, 3]], dtype=torch.int32), tensor([7]))
    """
    B, N = check_dims("target_tokens", target_tokens, "BN", not_empty="N")
    target_tokens = integers("target_tokens", target_tokens, torch.int64, B=B, N=N)
    return _call(backend, target_tokens, *check_tree(tokens, first_child, next_sibling, max_depth, target_tokens))


def _oracle(target_tokens: Tensor, tokens: Tensor, first_child: Tensor, next_sibling: Tensor, max_depth: int):
    B, N = tokens.shape
    node = torch.zeros(B, dtype=torch.int64, device=tokens.device)
    num_accepted, status = torch.zeros_like(node), torch.zeros_like(node)
    path, is_open = [], torch.ones_like(node, dtype=torch.bool)

    def at(table, node):
        return table.gather(1, node[:, None])[:, 0].long()

    for _ in range(max_depth):
        wanted, child, previous = at(target_tokens, node), at(first_child, node), node
        found, is_searching = torch.full_like(node, -1), is_open
        for _ in range(N):  # a node has fewer children than N: the last turn only reads a link
            is_bad = is_searching & (child != -1) & ((child <= previous) | (child >= N))
            status = torch.where(is_bad, INVALID_TREE, status)
            is_searching = is_searching & (child != -1) & ~is_bad
            safe = torch.where(is_searching, child, 0)
            is_found = is_searching & (at(tokens, safe) == wanted)
            found = torch.where(is_found, safe, found)
            is_searching = is_searching & ~is_found
            previous, child = torch.where(is_searching, safe, previous), torch.where(
                is_searching, at(next_sibling, safe), -1)
        is_open = is_open & (found >= 0)
        path.append(found.int())
        num_accepted = num_accepted + is_open
        node = torch.where(is_open, found, node)
    accepted_nodes = torch.stack(path, 1) if path else tokens.new_empty((B, 0), dtype=torch.int32)
    return accepted_nodes, num_accepted.int(), at(target_tokens, node), status.int()


def _meta(tokens, first_child, max_depth):
    B = tokens.shape[0]
    return (first_child.new_empty((B, max_depth)), first_child.new_empty(B), tokens.new_empty(B),
            first_child.new_empty(B))


_call = define("verify_greedy", oracle=_oracle, meta=_meta, result=VerifyGreedyResult)
