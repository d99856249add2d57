"""verify_greedy on trees small enough to check by hand."""
import pytest
import torch

from specvis_kernels import INVALID_TREE, backends, verify_greedy, verify_tree
from tests import cases
from tests.cases import DEVICE, links

BACKENDS = backends("verify_greedy", DEVICE)


def walk(backend, target_tokens, tokens, first_child, next_sibling, max_depth):
    """One request: its accepted nodes with the padding, how many they are, the next token, the status. After it is
    another request, whose tokens are all wanted: a kernel that reads on finds them."""
    wanted, none = [target_tokens[0]] * len(tokens), [-1] * len(tokens)
    ids = (torch.tensor(rows, device=DEVICE) for rows in ([target_tokens, wanted], [tokens, wanted]))
    tree = (torch.tensor([row, none], dtype=torch.int32, device=DEVICE) for row in (first_child, next_sibling))
    return tuple(a[0].tolist() for a in verify_greedy(*ids, *tree, max_depth=max_depth, backend=backend))


def walk_tree(backend, target_tokens, tokens, parents, max_depth):
    tree = (a[0].tolist() for a in links(torch.tensor([parents])))
    return walk(backend, target_tokens, tokens, *tree, max_depth)


# Node 0 has the children 1, 2, 3, node 2 has 4 and 5, node 5 has 6.
PARENTS, TOKENS = [-1, 0, 0, 0, 2, 2, 5], [9, 10, 11, 12, 10, 11, 2**40]


@pytest.mark.parametrize("target_tokens, max_depth, path, next_token", [
    ([11, 0, 11, 0, 0, 2**40, 7], 3, [2, 5, 6], 7),
    ([11, 0, 11, 0, 0, 2**40, 7], 5, [2, 5, 6, -1, -1], 7),      # there is no child after node 6
    ([11, 0, 11, 0, 0, 2**40, 7], 2, [2, 5], 2**40),             # as deep as max_depth
    ([11, 0, 11, 0, 0, 2**40, 7], 0, [], 11),
    ([11, 0, 10, 0, 3, 2**40, 7], 3, [2, 4, -1], 3),
    ([11, 0, 12, 0, 3, 2**40, 7], 3, [2, -1, -1], 12),           # the root's child 12 is not a child of node 2
    ([10, 8, 10, 0, 3, 2**40, 7], 3, [1, -1, -1], 8),
    ([12, 8, 10, 6, 3, 2**40, 7], 3, [3, -1, -1], 6),
    ([9, 8, 10, 0, 3, 2**40, 7], 3, [-1, -1, -1], 9),            # the root's own token is not looked at
    ([11, 0, 11, 0, 0, 0, 7], 3, [2, 5, -1], 0),                 # 2**40 is not 0
])
def test_walks_by_hand(backend, target_tokens, max_depth, path, next_token):
    accepted = sum(node >= 0 for node in path)
    assert walk_tree(backend, target_tokens, TOKENS, PARENTS, max_depth) == (path, accepted, next_token, 0)


def test_the_first_of_equal_siblings_is_accepted(backend):
    """Nodes 1 to 3 have one token. The right continuation is below the second, which is not visited."""
    assert walk_tree(backend, [4, 5, 5, 5, 6], [0, 4, 4, 4, 5], [-1, 0, 0, 0, 2], 2) == ([1, -1], 1, 5, 0)
    # The links decide, not the nodes' order: here node 2 is no child of the root.
    assert walk(backend, [4, 5, 5, 5, 6], [0, 3, 4, 4, 5], [1, -1, -1, 4, -1], [-1, 3, -1, -1, -1], 2) == (
        [3, 4], 2, 6, 0)


def test_a_chain(backend):
    chain = [-1, 0, 1, 2, 3]
    assert walk_tree(backend, [1, 2, 3, 4, 5], [0, 1, 2, 3, 4], chain, 4) == ([1, 2, 3, 4], 4, 5, 0)
    assert walk_tree(backend, [1, 2, 0, 4, 5], [0, 1, 2, 3, 4], chain, 4) == ([1, 2, -1, -1], 2, 0, 0)


@pytest.mark.parametrize("max_depth", [0, 1, 3])
def test_a_root_alone(backend, max_depth):
    assert walk(backend, [17], [3], [-1], [-1], max_depth) == ([-1] * max_depth, 0, 17, 0)


@pytest.mark.parametrize("first_child, next_sibling, path, next_token, status", [
    ([5, -1, -1, -1], [-1, -1, -1, -1], [-1, -1], 8, INVALID_TREE),      # beyond the tree
    ([4, -1, -1, -1], [-1, -1, -1, -1], [-1, -1], 8, INVALID_TREE),
    ([0, -1, -1, -1], [-1, -1, -1, -1], [-1, -1], 8, INVALID_TREE),      # the root is nobody's child
    ([-2, -1, -1, -1], [-1, -1, -1, -1], [-1, -1], 8, INVALID_TREE),
    ([1, -1, -1, -1], [-1, 1, -1, -1], [-1, -1], 8, INVALID_TREE),       # a circle
    ([2, -1, -1, -1], [-1, -1, 1, -1], [-1, -1], 8, INVALID_TREE),       # an earlier node
    ([1, -1, -1, -1], [-1, 2**31 - 1, -1, -1], [-1, -1], 8, INVALID_TREE),
    ([1, -1, -1, -1], [-1, 2, 3, 0], [3, -1], 5, 0),                     # wrong links that nobody follows
    ([1, 9, 0, -1], [0, 2, 3, -7], [3, -1], 5, 0),
    ([1, -1, -1, 3], [-1, 3, -1, -1], [3, -1], 5, INVALID_TREE),         # wrong after a node was accepted
    ([1, -1, -1, -1], [-1, 2, -1, -1], [-1, -1], 8, 0),
])
def test_a_link_that_leads_to_no_later_node_ends_the_siblings(backend, first_child, next_sibling, path, next_token,
                                                              status):
    """After the root the target says 8, the token of node 3 alone; there it says 5."""
    accepted = sum(node >= 0 for node in path)
    assert walk(backend, [8, 0, 0, 5], [8, 1, 2, 8], first_child, next_sibling, 2) == (
        path, accepted, next_token, status)


def test_links_at_max_depth_are_not_followed(backend):
    assert walk(backend, [1, 2], [0, 1], [1, 7], [-1, -1], 1) == ([1], 1, 2, 0)
    assert walk(backend, [1, 2], [0, 1], [1, 7], [-1, -1], 2) == ([1, -1], 1, 2, INVALID_TREE)


def test_the_last_of_the_most_children(backend):
    """All other nodes are the root's children, and the link of the last one is followed too."""
    assert walk(backend, [6, 0, 0, 0], [0, 1, 2, 6], [1, -1, -1, -1], [-1, 2, 3, 0], 1) == ([3], 1, 0, 0)
    assert walk(backend, [7, 0, 0, 0], [0, 1, 2, 6], [1, -1, -1, -1], [-1, 2, 3, -1], 1) == ([-1], 0, 7, 0)
    assert walk(backend, [7, 0, 0, 0], [0, 1, 2, 6], [1, -1, -1, -1], [-1, 2, 3, 0], 1) == ([-1], 0, 7, INVALID_TREE)
    assert walk(backend, [7], [0], [1], [-1], 1) == ([-1], 0, 7, INVALID_TREE)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b in backends("verify_tree", DEVICE)])
@pytest.mark.parametrize("B, N, V, max_depth", [(6, 9, 5, 3), (5, 40, 7, 6)])
def test_agrees_with_greedy_verify_tree(backend, B, N, V, max_depth):
    """No siblings are equal. Nearly all mass of verify_tree's rows is on the target's token."""
    g = torch.Generator().manual_seed(N)
    parents = torch.tensor([[-1] + [(n - 1) // 3 for n in range(1, N)]] * B)
    tokens = torch.rand(B, N, V, generator=g).argsort(-1)[:, :, 0]
    for first in range(1, N, 3):  # three different ones for each node's children
        tokens[:, first:first + 3] = torch.rand(B, V, generator=g).argsort(-1)[:, :min(3, N - first)]
    target_tokens = torch.randint(V, (B, N), generator=g)
    for b, n in torch.rand(B, N, generator=g).lt(0.3).nonzero().tolist():
        target_tokens[b, max(parents[b, n], 0)] = tokens[b, n]
    target_probs = torch.full((B, N, V), 2.0**-10).scatter_(2, target_tokens[..., None], 0.5).to(DEVICE)
    tree, tokens, target_tokens = links(parents), tokens.to(DEVICE), target_tokens.to(DEVICE)
    expected = verify_tree(target_probs, tokens, *tree, torch.zeros(B, N, device=DEVICE), max_depth=max_depth,
                           greedy=torch.ones(B, dtype=torch.bool, device=DEVICE), backend=backend)
    got = verify_greedy(target_tokens, tokens, *tree, max_depth=max_depth, backend=backend)
    assert got.accepted_nodes.equal(expected.accepted_nodes) and got.num_accepted.equal(expected.num_accepted)
    assert got.next_token.equal(expected.next_token) and got.num_accepted.max() > 1 and not got.status.any()


def test_the_makers_paths_are_long_and_some_links_are_wrong():
    """The inputs make a comparison of backends worth something."""
    results = [verify_greedy(*args, **kwargs, backend="oracle")
               for args, kwargs in (cases.verify_greedy(*case) for case in cases.CASES["verify_greedy"])]
    assert max(result.num_accepted.max() for result in results) > 2 and any(result.status.any() for result in results)
