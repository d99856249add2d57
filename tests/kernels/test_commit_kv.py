"""commit_kv on caches whose entries say where they stood."""
import pytest
import torch

from specvis_kernels import commit_kv
from tests import cases
from tests.cases import DEVICE

T = 9


def commit(backend, caches, accepted_nodes, num_accepted, lengths, **options):
    options = {name: torch.tensor(value, device=DEVICE) if name in ("start", "slots") else value
               for name, value in options.items()}
    numbers = (torch.tensor(a, dtype=torch.int32, device=DEVICE) for a in (accepted_nodes, num_accepted))
    return commit_kv(caches, *numbers, torch.tensor(lengths, device=DEVICE), **options, backend=backend).tolist()


def columns(*rows):
    return torch.tensor(rows, dtype=torch.float32, device=DEVICE)


@pytest.mark.parametrize("nodes, accepted, length, start, expected", [
    ([2, 4, -1], 2, 3, None, [0, 1, 2, 3, 5, 7, 6, 7, 8]),   # the root in column 3, node n in 3 + n
    ([1, 2, 3], 3, 3, None, [0, 1, 2, 3, 4, 5, 6, 7, 8]),    # they are in place already
    ([2, 3, 5], 3, 3, None, [0, 1, 2, 3, 5, 6, 8, 7, 8]),    # the target of the third is the source of the second
    ([4, -1, -1], 0, 3, None, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ([2, 3, -1], 2, 0, 4, [4, 6, 7, 3, 4, 5, 6, 7, 8]),      # the root moves too
    ([-1, -1, -1], 0, 0, 4, [4, 1, 2, 3, 4, 5, 6, 7, 8]),
    ([2, 9, -7], 1, 5, None, [0, 1, 2, 3, 4, 5, 7, 7, 8]),   # nodes that are not accepted do not matter
    ([3, -1, -1], 1, 5, None, [0, 1, 2, 3, 4, 5, 8, 7, 8]),  # the last column
    ([1, 2, 3], 3, 5, None, [0, 1, 2, 3, 4, 5, 6, 7, 8]),    # to the last column
])
def test_moves_by_hand(backend, nodes, accepted, length, start, expected):
    cache = columns(range(T))
    options = {} if start is None else {"start": [start]}
    assert commit(backend, cache, [nodes], [accepted], [length], **options) == [length + 1 + accepted]
    assert cache.tolist() == [expected]


@pytest.mark.parametrize("nodes, accepted, length, start", [
    ([4, -1], 1, 5, 5),            # column 9
    ([2, 2**31 - 1], 2, 0, 4),
    ([0, 1], 2, 1, 2),             # the root is no accepted node
    ([-3, 1], 1, 1, 4),
    ([2, 2], 2, 1, 1),
    ([3, 2], 2, 1, 1),             # a path goes down
    ([1, 2], 3, 1, 1),             # more than there are
    ([1, 2], -1, 1, 1),
    ([1, 2], 1, -1, 1),
    ([1, 2], 0, 9, 9),
    ([1, 2], 2, 3, 2),             # to the back
    ([1, 2], 2, 7, 7),
    ([1, 2], 1, 2**63 - 1, 2**63 - 1),
    ([1, 2], 1, 0, 2**63 - 1),
])
def test_what_is_out_of_range_is_left_alone(backend, nodes, accepted, length, start):
    """The request beside it is not."""
    cache = columns(*[range(T)] * 4)
    new_lengths = commit(backend, cache, [nodes, [2, -1]], [accepted, 1], [length, 1], start=[start, 1])
    assert new_lengths == [length, 3]
    assert cache.tolist() == [[*range(T)], [0, 1, 3, 3, 4, 5, 6, 7, 8]] * 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape, row_dim, column_dim", [
    ((4, T), 0, 1), ((3, 4, T, 2, 3, 5), 1, 2), ((4, 3, T, 16), 0, 2), ((2, 4, 3, 2, T), 1, 4), ((4, T, 64), 0, 1)])
def test_every_layout(backend, dtype, shape, row_dim, column_dim):
    """Rows 0 and 2 are request 0, rows 1 and 3 request 1. Every cache of a list moves alike."""
    g = torch.Generator().manual_seed(len(shape))
    caches = [torch.randint(100, shape, generator=g).to(DEVICE, dtype) for _ in range(3)]
    expected = [cache.clone() for cache in caches]
    for cache in expected:
        rows = cache.movedim((row_dim, column_dim), (0, 1))
        rows[0::2, [2, 3, 4]] = rows[0::2, [3, 5, 8]]
        rows[1::2, [1, 2]] = rows[1::2, [1, 4]]
    numbers = [[2, 5], [3, -1]], [2, 1], [2, 1]
    dims = {"row_dim": row_dim, "column_dim": column_dim}
    assert commit(backend, caches, *numbers, start=[3, 1], **dims) == [5, 3]
    assert all(cache.equal(wanted) for cache, wanted in zip(caches, expected))


def test_more_caches_than_a_launch_takes(backend):
    caches = [columns(range(i, i + 3)) for i in range(257)]
    assert commit(backend, caches, [[2]], [1], [0]) == [2]
    assert torch.cat(caches).tolist() == [[i, i + 2, i + 2] for i in range(257)]


def test_memory_that_is_not_aligned(backend):
    memory = torch.arange(4 * T * 16 + 1, device=DEVICE, dtype=torch.int16)
    cache = memory[1:].view(4, T, 16)
    expected = cache.clone()
    expected[:, 2] = expected[:, 4]
    assert commit(backend, cache, [[3]], [1], [1]) == [3] and cache.equal(expected) and memory[0] == 0


def test_a_paged_cache(backend):
    """Slots in no order; another row's slots do not change."""
    cache = torch.arange(2 * 24, device=DEVICE).view(2, 24)  # a layer a row
    slots = [[23, 5, 0, 7, 9], [1, 22, 11, 3, 2]]
    expected = cache.clone()
    expected[:, [0, 7]] = cache[:, [7, 9]]
    expected[:, 22] = cache[:, 3]
    new_lengths = commit(backend, cache, [[2, 3], [3, -1]], [2, 1], [1, 0], slots=slots, row_dim=None)
    assert new_lengths == [4, 2] and cache.equal(expected)


@pytest.mark.parametrize("slot", [-1, 12])
@pytest.mark.parametrize("column, hurts", [(2, True), (4, True), (0, False), (3, False)])
def test_a_slot_that_is_not_there(backend, slot, column, hurts):
    """It is the unconditional row's, and then no row of the request moves. Other columns' slots are not looked at."""
    cache = columns(range(12))
    slots = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    slots[1][column] = slot
    expected = [*range(12)]
    if not hurts:
        expected[2], expected[7] = 4, 9
    new_lengths = commit(backend, cache, [[3]], [1], [1], slots=slots, row_dim=None)
    assert new_lengths == [1 if hurts else 3] and cache.tolist() == [expected]


def test_caches_without_layers_or_entries(backend):
    no_layers, no_width = torch.zeros(0, 2, T, 3, device=DEVICE), torch.zeros(2, 2, T, 0, device=DEVICE)
    for caches in (no_layers, no_width):
        assert commit(backend, caches, [[2]], [1], [3], row_dim=1, column_dim=2) == [5]


def test_versions_are_counted():
    """So autograd sees that a tensor it saved was written to."""
    caches = [columns(range(T)) for _ in range(2)]
    before = [cache._version for cache in caches]
    commit(None, caches, [[2]], [1], [3])
    assert all(cache._version > version for cache, version in zip(caches, before))


def test_a_compiled_step_moves_though_nothing_uses_the_lengths():
    torch._dynamo.reset()

    def step(cache, *args):
        before = cache.sum()
        commit_kv(cache, *args)
        return before, cache.sum()

    cache = columns(range(T))
    args = [torch.tensor(a, dtype=torch.int32, device=DEVICE) for a in ([[3, -1]], [1])]
    args.append(torch.tensor([2], device=DEVICE))
    before, after = torch.compile(step, backend="aot_eager", fullgraph=True)(cache, *args)
    assert (before, after) == (36, 38) and cache.equal(columns([0, 1, 2, 5, 4, 5, 6, 7, 8]))


def test_the_makers_nodes_move_and_some_requests_are_wrong():
    """The inputs make a comparison of backends worth something."""
    moved, left = 0, 0
    for case in cases.CASES["commit_kv"]:
        args, kwargs = cases.commit_kv(*case)
        before = args[0].clone() if isinstance(args[0], torch.Tensor) else args[0][0].clone()
        lengths = commit_kv(*args, **kwargs, backend="oracle")
        after = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
        moved, left = moved + int(not after.equal(before)), left + int((lengths == args[3]).sum())
    assert moved > 3 and left > 1
