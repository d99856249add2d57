"""verify_chain by hand, and request by request compared with verify_tree on an equal chain."""
import itertools

import pytest
import torch

from specvis_kernels import backends, verify_chain, verify_tree
from specvis_kernels._candidate import RESIDUALS
from specvis_kernels.neighborhood_sum import CUTOFFS
from specvis_kernels.status import EMPTY_RESIDUAL, INVALID_DRAFT, INVALID_ROW, INVALID_RULE, INVALID_TREE
from tests.cases import DEVICE, exact_probs, exact_uniforms, neighbor_table, tensor

BACKENDS = backends("verify_chain", DEVICE)
ROW = [0.5, 0.25, 0.125, 0.125]


def verify(backend, num_rows, drafts, ends, uniforms, row=ROW, **options):
    """Every row is `row`. Results as lists."""
    result = verify_chain(tensor(row).repeat(num_rows, 1), tensor(drafts, torch.int64), tensor(ends, torch.int64),
                          tensor(uniforms), backend=backend, **options)
    return [x.tolist() for x in result]


def test_point_masses(backend):
    """Drafts 0, 1 of request 0, none of request 1, draft 0 of request 2. Tokens 0 and 1 have 1/2 and 1/4."""
    # 0.4 < 1/2; 0.3 is not below 1/4, and of 4, 0, 1, 1 sixths 0.7 draws token 2. Request 1 draws 0.6 from its row.
    # Request 2 rejects token 0 at 0.5; of 2, 1, 1 fourths 0.5 draws token 2.
    uniforms = [0.7, 0.4, 0.3, 0.6, 0.5, 0.5]
    assert verify(backend, 6, [0, 1, 0], [2, 2, 3], uniforms) == [[1, 0, 0], [2, 1, 2], [0.0] * 3, [0] * 3]
    # All are accepted: the next tokens come from the rows after them.
    uniforms = [0.7, 0.4, 0.2, 0.0, 0.8, 0.49]
    assert verify(backend, 6, [0, 1, 0], [2, 2, 3], uniforms)[:2] == [[2, 0, 1], [1, 0, 2]]


def test_a_bonus_token_stands_for_the_last_row(backend):
    """One row less for each request. The token is handed on as it is, where all drafts are accepted."""
    bonus = tensor([-7, 2**40, 3], torch.int64)
    got = verify(backend, 3, [0, 1, 0], [2, 2, 3], [0.7, 0.4, 0.3, 0.6, 0.5, 0.49], bonus_tokens=bonus)
    assert got == [[1, 0, 1], [2, 2**40, 3], [0.0] * 3, [0] * 3]
    # Greedy: token 0 is every row's argmax.
    got = verify(backend, 3, [0, 0, 1], [2, 2, 3], [0.9] * 6, bonus_tokens=bonus, greedy=True)
    assert got == [[2, 0, 0], [-7, 2**40, 0], [0.0] * 3, [0] * 3]


@pytest.mark.parametrize("width", [torch.int64, torch.int32])
@pytest.mark.parametrize("ends, num_valid", [
    ([1, 0, 3], 1), ([-1, 2, 3], 0), ([1, 2, 4], 2), ([4, 4, 4], 0), ([2, 1, 3], 1), ([0, 2**31 - 1, 1], 1),
    ([-2**31, 0, 3], 0), ([0, 0, 2], 3),  # the last leaves a draft to nobody
])
def test_drafts_that_are_nowhere(backend, ends, num_valid, width):
    """From the first such request on, nothing is accepted. Requests before it do not change."""
    rows, drafts, uniforms = tensor(ROW).repeat(6, 1), tensor([0, 0, 0], width), tensor([0.0] * 6)
    for bonus in (None, tensor([1, 2, 3], torch.int64)):
        for greedy in (None, True):
            result = verify_chain(rows if bonus is None else rows[:3], drafts, tensor(ends, width), uniforms,
                                  bonus_tokens=bonus, greedy=greedy, backend=backend)
            assert result.status.tolist() == [0] * num_valid + [INVALID_TREE] * (3 - num_valid)
            assert not any(x[num_valid:].any() for x in result[:3])
            assert result.num_accepted.tolist()[:num_valid] == [
                b - a for a, b in itertools.pairwise([0, *ends])][:num_valid]


def test_a_token_outside_of_the_vocabulary_ends_the_drafts(backend):
    got = verify(backend, 6, [0, 4, -1], [2, 3, 3], [0.6, 0.0, 0.0, 0.6, 0.0, 0.0])
    assert got == [[1, 0, 0], [1, 1, 0], [0.0] * 3, [INVALID_TREE, INVALID_TREE, 0]]


def test_bad_rows_are_those_of_the_request(backend):
    """Rows 0 to 2 are of request 0, row 3 of request 1, rows 4 and 5 of request 2."""
    args = tensor([0, 1, 0], torch.int64), tensor([2, 2, 3], torch.int64), tensor([0.0] * 6)
    for bad, status in enumerate([(1, 0, 0), (1, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 1)]):
        rows = tensor(ROW).repeat(6, 1)
        rows[bad, 3] = float("nan")
        got = verify_chain(rows, *args, backend=backend)
        assert got.status.tolist() == [INVALID_ROW * x for x in status]
        assert got.num_accepted.tolist() == [min(2, bad), 0, 0 if bad == 4 else 1]
    draft_probs = tensor(ROW).repeat(3, 1)
    for bad in 4 * [0.0], [1.0, 0.0, 0.0, 0.0]:  # no mass at all, or none of the draft
        draft_probs[1] = tensor(bad)
        got = verify_chain(tensor(ROW).repeat(6, 1), *args, draft_probs=draft_probs, backend=backend)
        assert got.status.tolist() == [INVALID_DRAFT, 0, 0] and got.num_accepted.tolist() == [1, 0, 1]


@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("num_requests", [0, 2])
def test_without_drafts(backend, bonus, num_requests):
    options = {"draft_probs": torch.ones(0, 4, device=DEVICE), "neighbors": neighbor_table(4, 2), "delta": 0.5}
    if bonus:
        options["bonus_tokens"] = torch.arange(num_requests, device=DEVICE)
    rows = tensor([[0.0, 0.0, 1.0, 0.0]] * (0 if bonus else num_requests)).view(-1, 4)
    for greedy in (None, True, False):
        result = verify_chain(rows, tensor([], torch.int64), tensor([0] * num_requests, torch.int32),
                              tensor([0.0] * num_requests), greedy=greedy, backend=backend, **options)
        assert result.num_accepted.tolist() == result.status.tolist() == [0] * num_requests
        assert result.next_token.tolist() == (list(range(num_requests)) if bonus else [2] * num_requests)


def random_batch(seed):
    """(arguments of verify_chain, its options, how many drafts each request has). Every rule gets its turn."""
    g = torch.Generator().manual_seed(seed)
    B, V = 10, [3, 8, 20][seed // 2 % 3]

    def pick(*choices):
        return choices[torch.randint(len(choices), (), generator=g).item()]

    num_drafts = torch.randint(5, (B,), generator=g)
    D = int(num_drafts.sum())
    rows = exact_probs(D + B, V, seed=seed)
    best = rows.argmax(1)
    is_certain = (torch.rand(D + B, 1, generator=g) < 0.5).to(DEVICE)
    rows = torch.where(is_certain, torch.nn.functional.one_hot(best, V).float(), rows)
    residual, cutoff = RESIDUALS[seed % 3], CUTOFFS[seed // 3 % 3]
    options = {"residual": residual, "cutoff": cutoff, "empty": pick("target", "uniform")}
    if V > 3 and seed % 4:
        options |= {"neighbors": neighbor_table(V - 2, 3, narrow=pick(True, False), seed=seed), "offset": 1,
                    "delta": (torch.rand(B, generator=g) * 2).to(DEVICE)}
    if pick(True, True, True, False):
        omegas = [1.0, 1.5, 2.0] if residual == "optimal" and "neighbors" in options else [0.0, 0.25, 0.5, 1.5, -1.0]
        options["omega"] = torch.tensor([pick(*omegas) for _ in range(B)], device=DEVICE)
    if pick(True, False, False):
        options["greedy"] = torch.rand(B, generator=g).lt(0.5).to(DEVICE)
    drafts = torch.randint(V, (D,), generator=g).to(DEVICE)
    row_of = torch.arange(D) + torch.arange(B).repeat_interleave(num_drafts)  # whose draw the draft would be
    drafts = torch.where(torch.rand(D, generator=g).to(DEVICE) < 0.7, best[row_of.to(DEVICE)], drafts)
    if pick(True, False):
        is_certain = (torch.rand(D, 1, generator=g) < 0.5).to(DEVICE)
        options["draft_probs"] = torch.where(is_certain, torch.nn.functional.one_hot(drafts, V).float(),
                                             exact_probs(D, V, seed=seed + 1))
    return (rows, drafts, num_drafts.cumsum(0).to(DEVICE), exact_uniforms(D + B, seed=seed)), options, num_drafts


def tree_of(args, options, b, first, n):
    """verify_tree on request b alone, as a tree that is a chain."""
    rows, drafts, _, uniforms = args
    nodes = slice(first + b, first + b + n + 1)
    own = {name: options[name][b:b + 1] for name in ("delta", "greedy") if name in options}
    own |= {name: options[name] for name in ("residual", "cutoff", "empty", "neighbors", "offset") if name in options}
    if "omega" in options:
        own["omega"] = options["omega"][b].expand(1, n)
    if n and "draft_probs" in options:
        own |= {"draft_probs": options["draft_probs"][None, first:first + n],
                "draft_row": torch.arange(n + 1, dtype=torch.int32, device=DEVICE).remainder(n)[None]}
    first_child = tensor([[*range(1, n + 1), -1]], torch.int32)
    return verify_tree(rows[None, nodes], torch.nn.functional.pad(drafts[None, first:first + n], (1, 0)), first_child,
                       torch.full_like(first_child, -1), uniforms[None, nodes], max_depth=n, backend="oracle", **own)


@pytest.fixture(scope="module")
def batches():
    """Random batches, and what verify_tree says of their requests: all but the accepted nodes."""
    def expected(args, options, num_drafts):
        firsts = (num_drafts.cumsum(0) - num_drafts).tolist()
        results = [tree_of(args, options, b, first, n)[1:]
                   for b, (first, n) in enumerate(zip(firsts, num_drafts.tolist()))]
        return [torch.cat(x) for x in zip(*results)]

    return [(*batch, expected(*batch)) for batch in map(random_batch, range(24))]


def test_the_batches_reach_every_rule(batches):
    status = torch.cat([expected[3] for *_, expected in batches])
    assert all((status & bit != 0).sum() > 3 for bit in (EMPTY_RESIDUAL, INVALID_RULE))
    assert (status == 0).sum() > 50
    assert {(options["empty"], bool(expected[3].bitwise_and(EMPTY_RESIDUAL).any()))
            for _, options, _, expected in batches} == {(x, y) for x in ("target", "uniform") for y in (False, True)}


def test_decides_as_verify_tree_does_on_each_chain(batches, backend):
    """Bit for bit, with the token after the last row as a bonus token too."""
    step = 5 if (backend, DEVICE) == ("triton", "cpu") else 1  # its interpreter takes its time
    for seed, (args, options, num_drafts, expected) in list(enumerate(batches))[::step]:
        assert_same(verify_chain(*args, **options, backend=backend), expected, seed)

        rows, drafts, ends, uniforms = args
        is_last = torch.zeros(len(rows), dtype=torch.bool, device=DEVICE)
        is_last[ends + torch.arange(len(ends), device=DEVICE)] = True
        bonus = torch.arange(len(ends), device=DEVICE) + 1000
        with_bonus = verify_chain(rows[~is_last], drafts.int(), ends.int(), uniforms, bonus_tokens=bonus, **options,
                                  backend=backend)
        all_accepted = expected[0] == num_drafts.to(DEVICE)
        num_accepted, next_token, *others = expected
        with_token = num_accepted, torch.where(all_accepted, bonus, next_token), *others
        assert_same(with_bonus, with_token, seed)


def assert_same(got, expected, seed):
    """The decisions bit for bit; tv_excess is a sum that may be rounded otherwise."""
    num_accepted, next_token, tv_excess, status = got
    assert all(map(torch.equal, (num_accepted, next_token, status), (*expected[:2], expected[3]))), seed
    torch.testing.assert_close(tv_excess, expected[2], rtol=0, atol=1e-6)
