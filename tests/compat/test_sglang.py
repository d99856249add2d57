"""SGLang's interface, compared with a plain statement of its kernels (sgl-kernel/csrc/speculative)."""
import itertools

import pytest
import torch

from specvis_kernels import INVALID_TREE
from specvis_kernels.compat import sglang
from tests.cases import DEVICE


def plain_build(parent_list, selected, length, topk):
    """A tree by SGLang's rule, one request: positions, each node's path, first children, next siblings."""
    N = len(selected) + 1
    first, following, paths = [-1] * N, [-1] * N, [[0]]
    for n in range(1, N):
        slot = selected[n - 1] // topk
        parent = 0 if slot == 0 else selected.index(parent_list[slot]) + 1
        paths.append([*paths[parent], n])
    for n in reversed(range(1, N)):
        parent = paths[n][-2]
        following[n], first[parent] = first[parent], n
    return [length + len(path) - 1 for path in paths], paths, first, following


def choose_tree(generator, topk, depth, N):
    """The arguments that EAGLE gives SGLang: a level expands the topk best candidates of the level above."""
    scores = [torch.rand(topk, generator=generator)]
    parent_list, first = [-1], 0
    for level in range(1, depth):
        best = (scores[-1].flatten().topk(topk).indices + first).sort().values
        parent_list += best.tolist()
        above = torch.cat([s.flatten() for s in scores])[best]
        first = topk if level == 1 else first + topk * topk
        scores.append(above[:, None] * torch.rand(topk, topk, generator=generator))
    flat = torch.cat([s.flatten() for s in scores])
    return parent_list, flat.topk(N - 1).indices.sort().values.tolist()


def build(parent_lists, selected, lengths, topk, depth, mode, prefix=True, dtype=torch.bool, spare=0):
    """Buffers with `spare` entries that are not written, as SGLang allocates them for its largest batch."""
    B, N = len(selected), len(selected[0]) + 1
    sizes = {0: N * (sum(lengths) + B * N), 1: B * N * N, 2: B * N * (1 if N <= 8 else 2 if N <= 16 else 4)}
    value, dtype = (255, torch.uint8) if mode == 2 else (prefix, dtype)
    buffer = torch.full((sizes[mode] + spare,), value, dtype=dtype, device=DEVICE)
    before = buffer.clone()
    positions = torch.full((B * N,), -9, device=DEVICE)
    links = [torch.full((B, N), -9, device=DEVICE) for _ in range(3)]
    status = sglang.build_tree_kernel_efficient(
        torch.tensor(parent_lists, dtype=torch.int64, device=DEVICE), torch.tensor(selected, device=DEVICE),
        torch.tensor(lengths, device=DEVICE), buffer, positions, *links, topk, depth, N, mode)
    assert torch.equal(buffer[sizes[mode]:], before[sizes[mode]:])
    return buffer[:sizes[mode]], positions, links, status


@pytest.mark.parametrize("topk, depth, N",
                         [(4, 3, 12), (3, 5, 20), (3, 5, 30), (2, 3, 8), (5, 1, 6), (1, 4, 5), (8, 4, 64)])
@pytest.mark.parametrize("dtype, spare", [(torch.bool, 0), (torch.uint8, 500)])
def test_trees_are_built_as_sglang_builds_them(topk, depth, N, dtype, spare, host_reads):
    generator, lengths = torch.Generator().manual_seed(N), [5, 0, 17]
    trees = [choose_tree(generator, topk, depth, N) for _ in lengths]
    parent_lists, selected = ([tree[i] for tree in trees] for i in (0, 1))
    if depth == 1:
        parent_lists = [[]] * 3  # SGLang hands over no list of one level
    wanted = [plain_build(*tree, length, topk) for tree, length in zip(trees, lengths)]
    for mode in (0, 1, 2) if N <= 32 else (0, 1):
        host_reads.clear()
        tree_mask, positions, (index, first, following), status = build(parent_lists, selected, lengths, topk, depth,
                                                                        mode, dtype=dtype, spare=spare)
        assert not host_reads and status.tolist() == [0, 0, 0]
        assert index.flatten().tolist() == list(range(3 * N))
        assert positions.view(3, N).tolist() == [w[0] for w in wanted]
        assert first.tolist() == [w[2] for w in wanted] and following.tolist() == [w[3] for w in wanted]
        if mode == 2:
            width = tree_mask.numel() // (3 * N)
            rows = [int.from_bytes(bytes(row), "little") for row in tree_mask.view(3 * N, width).tolist()]
            assert rows == [sum(1 << n for n in path) for w in wanted for path in w[1]]
            continue
        entries = tree_mask.tolist()
        for (_, paths, _, _), length in zip(wanted, lengths if mode == 0 else [0] * 3):
            for path in paths:
                row, entries = entries[:length + N], entries[length + N:]
                assert all(row[:length]) and [c for c, sees in enumerate(row[length:]) if sees] == path
        assert not entries


def test_the_columns_of_cached_tokens_are_left_to_sglang():
    tree_mask, *_ = build([[-1, 0, 1]], [[0, 1, 3]], [2], 2, 2, 0, prefix=False)
    assert not tree_mask.view(4, 6)[:, :2].any() and tree_mask.view(4, 6)[3, 2:].tolist() == [True, True, False, True]


def test_a_node_without_its_parent_is_reported_and_left_out():
    _, positions, (_, first, following), status = build([[-1, 0, 1]], [[1, 2, 4]], [3], 2, 2, 1)  # 2 is 0's, 4 is 1's
    assert status.tolist() == [INVALID_TREE]
    assert first.tolist() == [[1, 3, -1, -1]] and following.tolist() == [[-1] * 4]
    assert positions.tolist() == [3, 4, 3, 5]


@pytest.mark.parametrize("change, message", [
    ({"parent_list": torch.zeros(1, 2, dtype=torch.int64)},
     r"parent_list must have at least topk \* \(depth - 1\) \+ 1 = 3 columns, got 2"),
    ({"selected_index": torch.zeros(1, 4, dtype=torch.int64)},
     r"selected_index must be int64 or int32 \(B=1, N - 1=3\), got int64 \(1, 4\)"),
    ({"positions": torch.zeros(5, dtype=torch.int64)}, r"positions must be int64 or int32 \(B N=4\), got int64 \(5,\)"),
    ({"tree_mask_mode": 3}, "tree_mask_mode must be 0 .FULL_MASK., 1 .QLEN_ONLY. or 2 .QLEN_ONLY_BITPACKING., got 3"),
    ({"tree_mask": torch.ones(15, dtype=torch.bool)}, "tree_mask must have at least 16 bytes for B=1, N=4, got 15"),
    ({"tree_mask": torch.ones(15, dtype=torch.uint8), "tree_mask_mode": 0},
     "tree_mask must have at least 16 bytes for B=1, N=4, got 15"),
    ({"tree_mask": torch.ones(3, dtype=torch.uint8), "tree_mask_mode": 2},
     "tree_mask must have at least 4 bytes for B=1, N=4, got 3"),
    ({"tree_mask": torch.ones(16)}, r"tree_mask must be bool or uint8 or int8 \(entries=16\), got float32 \(16,\)"),
    ({"topk": 0}, "topk must be an integer >= 1, got 0"),
])
def test_arguments_of_the_builder_that_are_refused(change, message):
    arguments = dict(parent_list=torch.tensor([[-1, 0, 1]]), selected_index=torch.tensor([[0, 1, 3]]),
                     verified_seq_len=torch.tensor([7]), tree_mask=torch.ones(16, dtype=torch.bool),
                     positions=torch.zeros(4, dtype=torch.int64), topk=2, depth=2, draft_token_num=4, tree_mask_mode=1,
                     **{name: torch.zeros(1, 4, dtype=torch.int64)
                        for name in ("retrive_index", "retrive_next_token", "retrive_next_sibling")})
    with pytest.raises(ValueError, match=message):
        sglang.build_tree_kernel_efficient(**{**arguments, **change})


def plain_walk(tokens, first, following, max_depth, accepts):
    """The path of one request, and the tokens that are rejected after it. accepts(node, the tokens tried there)."""
    path = [0]
    while True:
        rejected, child = [], first[path[-1]] if len(path) <= max_depth else -1
        while child != -1 and not accepts(path[-1], [*rejected, tokens[child]]):
            rejected.append(tokens[child])
            child = following[child]
        if child == -1:
            return path, rejected
        path.append(child)


def plain_sampling(tokens, first, following, coins, last_coin, rows, max_depth):
    """TreeSpeculativeSamplingTargetOnly of one request with thresholds of 1: path, and the tokens that follow it."""
    path, rejected = plain_walk(tokens, first, following, max_depth, lambda node, tried: coins[node] <= sum(
        rows[node][token] for token in tried))
    left = [0.0 if token in rejected else p for token, p in enumerate(rows[path[-1]])]
    sums, total = itertools.accumulate(left), last_coin * sum(left)
    return path, [*(tokens[n] for n in path[1:]), next(token for token, s in enumerate(sums) if s > total)]


def plain_greedy(tokens, first, following, target, max_depth):
    path, _ = plain_walk(tokens, first, following, max_depth, lambda node, tried: tried[-1] == target[node])
    return path, [*(tokens[n] for n in path[1:]), target[path[-1]]]


def random_trees(B, N, V, seed):
    """Trees whose siblings have different tokens, and rows with zeros."""
    g = torch.Generator().manual_seed(seed)
    tokens, first, following = torch.randint(0, V, (B, N), generator=g).tolist(), [], []
    for b in range(B):
        children = [[] for _ in range(N)]
        for n in range(1, N):
            children[torch.randint(0, n, (), generator=g)].append(n)
        first.append([c[0] if c else -1 for c in children])
        following.append([-1] * N)
        for c in children:
            for a, n in zip(c, c[1:]):
                following[b][a] = n
            for n, token in zip(c, torch.randperm(V, generator=g)):
                tokens[b][n] = token.item()
    rows = (3 * torch.randn(B, N, V, generator=g)).softmax(-1)
    rows = torch.where(rows < 0.01, 0.0, rows)
    rows = rows / rows.sum(-1, keepdim=True)
    return tokens, first, following, rows, torch.rand(B, N + 1, generator=g)


def call(function, tokens, first, following, max_depth, rest, dtype=torch.int64, host_reads=()):
    """The outputs, and the flat index of each node. The host reads nothing: of that `host_reads` is the list."""
    B, N = len(tokens), len(tokens[0])
    order = torch.arange(B * N).view(B, N).flip(0)  # flat indices in another order: requests may be anywhere
    outputs = [torch.full(size, -1, dtype=torch.int32, device=DEVICE) for size in ((B * N + 1,), (B, max_depth + 1),
                                                                                   (B,))]
    tree = [torch.tensor(a, device=DEVICE).to(dtype) for a in (tokens, order.tolist(), first, following)]
    arguments, before = rest(order), len(host_reads)
    status = function(*outputs, *tree, *arguments)
    assert len(host_reads) == before
    assert (status & INVALID_TREE == 0).all()
    return [o.tolist() for o in outputs], order.tolist()


def check(outputs, order, wanted, max_depth):
    predicts = [-1] * len(outputs[0])
    for b, (path, after) in enumerate(wanted):
        for node, token in zip(path, after):
            predicts[order[b][node]] = token
        assert outputs[1][b] == [order[b][node] for node in path] + [-1] * (max_depth + 1 - len(path))
        assert outputs[2][b] == len(path) - 1
    assert outputs[0] == predicts  # nothing else was written


@pytest.mark.parametrize("B, N, V, max_depth",
                         [(40, 12, 9, 4), (20, 40, 50, 8), (10, 3, 5, 1), (6, 1, 7, 3), (4, 9, 9, 0)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_sampling_draws_what_sglangs_kernel_draws(B, N, V, max_depth, dtype, host_reads):
    tokens, first, following, rows, coins = random_trees(B, N, V, seed=N)
    outputs, order = call(
        sglang.tree_speculative_sampling_target_only, tokens, first, following, max_depth,
        lambda _: (coins[:, :N].to(DEVICE), coins[:, N].to(DEVICE), rows.to(DEVICE)), dtype, host_reads)
    wanted = [plain_sampling(tokens[b], first[b], following[b], coins[b].tolist(), coins[b, N].item(),
                             rows[b].tolist(), max_depth) for b in range(B)]
    check(outputs, order, wanted, max_depth)
    if N == 12:
        assert len({len(path) for path, _ in wanted}) > 2  # paths of many lengths


def test_what_is_emitted_is_distributed_as_the_targets():
    """Nodes 1, 2 and 3 follow the root, 4 and 5 follow node 1: the first two tokens, on a grid of coins."""
    tokens, cells, V = [[0, 2, 0, 3, 1, 2]], 40, 4
    first, following = [[1, 4, -1, -1, -1, -1]], [[-1, 2, 3, -1, 5, -1]]
    rows = torch.tensor([[.4, .1, .2, .3], [.1, .2, .3, .4]])[[0, 1, 0, 0, 0, 0]]
    middle = (torch.arange(cells) + 0.5) / cells
    coins = torch.cartesian_prod(middle, middle, middle)  # for the root, for node 1, and the last one
    B = len(coins)
    uniforms = torch.zeros(B, 6)
    uniforms[:, :2] = coins[:, :2]
    outputs, order = call(
        sglang.tree_speculative_sampling_target_only, tokens * B, first * B, following * B, 2,
        lambda _: (uniforms.to(DEVICE), coins[:, 2].to(DEVICE), rows.expand(B, -1, -1).contiguous().to(DEVICE)))
    at_root = torch.tensor([outputs[0][o[0]] for o in order])
    assert torch.allclose(at_root.bincount(minlength=V) / B, rows[0], atol=0.02)
    of_node_1 = [outputs[0][o[1]] for o in order if outputs[0][o[0]] == 2]
    assert torch.allclose(torch.tensor(of_node_1).bincount(minlength=V) / len(of_node_1), rows[1], atol=0.02)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_greedy_takes_the_path_that_sglangs_kernel_takes(dtype, host_reads):
    tokens, first, following, rows, _ = random_trees(60, 12, 4, seed=1)
    target = rows.argmax(-1)
    outputs, order = call(sglang.verify_tree_greedy, tokens, first, following, 4,
                          lambda order: (target.flip(0).to(dtype).to(DEVICE),), dtype, host_reads)
    wanted = [plain_greedy(tokens[b], first[b], following[b], target[b].tolist(), 4) for b in range(60)]
    check(outputs, order, wanted, 4)
    assert len({len(path) for path, _ in wanted}) > 2


def test_sglangs_own_case():
    """The trees and the numbers of SGLang's own test of the kernel."""
    tokens = [[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]]
    first, following = [[1, 2, -1, 4, 5, -1], [4, 2, 3, -1, 5, -1]], [[-1, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1]]
    logits = torch.ones(2, 6, 20)
    for b, n, token in ((0, 0, 3), (0, 3, 4), (0, 4, 5), (1, 0, 11), (1, 4, 12)):
        logits[b, n, token] = 10
    logits = torch.where((logits == 1).all(2)[..., None] & (torch.arange(20) == 18), 10, logits)
    predicts, accept_index, count = (torch.full(size, -1, dtype=torch.int32) for size in ((12,), (2, 4), (2,)))
    sglang.tree_speculative_sampling_target_only(
        predicts, accept_index, count, torch.tensor(tokens), torch.arange(12).view(2, 6), torch.tensor(first),
        torch.tensor(following), torch.full((2, 6), 0.6), torch.full((2,), 0.5), (logits / 0.01).softmax(-1),
        torch.zeros(2, 6, 20), 1, 1)
    assert predicts.tolist() == [3, -1, -1, 4, 5, 18, 11, -1, -1, -1, 12, 18]
    assert accept_index.tolist() == [[0, 3, 4, 5], [6, 10, 11, -1]] and count.tolist() == [3, 2]


@pytest.mark.parametrize("change, message", [
    ({"threshold_single": 0.9}, "threshold_single must be 1, got 0.9: below 1 SGLang accepts .*typical acceptance"),
    ({"threshold_acc": 0}, "threshold_acc must be 1, got 0"),
    ({"predicts": torch.zeros(2, dtype=torch.int32)}, r"predicts must be int32 \(B N=3\), got int32 \(2,\)"),
    ({"accept_index": torch.zeros(1, 2)}, r"accept_index must be int32 \(B=1, P \+ 1=2\), got float32 \(1, 2\)"),
    ({"accept_index": torch.zeros(1, 0, dtype=torch.int32)}, "accept_index must have a column for the root"),
    ({"candidates": torch.zeros(1, 3)}, r"candidates must be int64 or int32 \(B=1, N=3\), got float32 \(1, 3\)"),
    ({"uniform_samples": torch.zeros(1, 2)}, r"uniform_samples must be float32 \(B=1, N=3\), got float32 \(1, 2\)"),
    ({"target_probs": torch.zeros(3, 4)}, "target_probs must have 3 dimensions"),
])
def test_arguments_of_the_sampler_that_are_refused(change, message):
    arguments = dict(predicts=torch.zeros(3, dtype=torch.int32), accept_index=torch.zeros(1, 2, dtype=torch.int32),
                     accept_token_num=torch.zeros(1, dtype=torch.int32), uniform_samples=torch.zeros(1, 3),
                     uniform_samples_for_final_sampling=torch.zeros(1), target_probs=torch.full((1, 3, 4), 0.25),
                     **{name: torch.full((1, 3), -1) for name in ("retrive_next_token", "retrive_next_sibling")},
                     **{name: torch.arange(3)[None] for name in ("candidates", "retrive_index")})
    sglang.tree_speculative_sampling_target_only(**arguments)
    with pytest.raises(ValueError, match=message):
        sglang.tree_speculative_sampling_target_only(**{**arguments, **change})
