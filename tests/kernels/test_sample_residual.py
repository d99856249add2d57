"""sample_residual on numbers small enough to check by hand."""
import pytest
import torch

from specvis_kernels import EMPTY_RESIDUAL, INVALID_DRAFT, INVALID_ROW, INVALID_RULE, sample_residual, verify_tree
from tests.cases import DEVICE, backends_but, cells, tensor

NAN, INF = float("nan"), float("inf")
TARGET, DRAFT = [0.5, 0.25, 0.125, 0.125], [0.25, 0.5, 0.25, 0.0]


def one(backend, target, draft, uniform, omega=None):
    token, status = sample_residual(
        tensor([target]), None if draft is None else tensor([draft]), tensor([uniform]),
        omega=None if omega is None else tensor([omega]), backend=backend)
    return token.item(), status.item()


@pytest.mark.parametrize("draft, omega, masses", [
    # The rest, in sixteenths; P is 8 4 2 2, Q is 4 8 4 0.
    (DRAFT, None, [4, 0, 0, 2]),
    (DRAFT, 1.0, [4, 0, 0, 2]),
    (DRAFT, 3.0, [4, 0, 0, 2]),
    (DRAFT, INF, [4, 0, 0, 2]),
    (DRAFT, 0.5, [4, 2, 1, 2]),              # half of P is 4 2 1 1
    (DRAFT, 0.0, [8, 4, 2, 2]),
    ([0.125, 0.25, 0.125, 0.0], None, [4, 0, 0, 2]),  # Q counts relative to its total
    (None, None, [8, 4, 2, 2]),
    (None, 0.5, [8, 4, 2, 2]),
])
def test_residuals_by_hand(backend, draft, omega, masses):
    for uniform, token in cells(masses):
        assert one(backend, TARGET, draft, uniform, omega) == (token, 0)


@pytest.mark.parametrize("uniform, token", [(0.0, 1), (0.49, 1), (0.5, 3), (1.0, 3), (NAN, 1), (INF, 3), (-1.0, 1)])
def test_the_draw_stays_where_mass_is(backend, uniform, token):
    """Equality goes on to the next token, and no uniform leads outside."""
    assert one(backend, [0.0, 0.5, 0.0, 0.5, 0.0], None, uniform) == (token, 0)


def test_the_smallest_mass_has_its_turn(backend):
    assert one(backend, [2.0**-42, 1.0], None, 0.0) == (0, 0)
    assert one(backend, [2.0**-42, 1.0], None, 2.0**-42) == (1, 0)


@pytest.mark.parametrize("draft", [None, [0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0]])
def test_a_draw_that_falls_between_two_blocks(backend, draft, triton_takes):
    """Exactly half of the mass is before token 4, which has none."""
    triton_takes(V=4)
    row = [0.25, 0.25, 0.0, 0.0, 0.0, 0.25, 0.25, 0.0]
    assert one(backend, row, draft, 0.5) == (5, 0)
    assert one(backend, row, draft, 0.499) == (1, 0)


def test_an_empty_residual_is_the_target(backend):
    assert one(backend, TARGET, TARGET, 0.49) == (0, EMPTY_RESIDUAL)
    assert one(backend, TARGET, TARGET, 0.5) == (1, EMPTY_RESIDUAL)
    assert one(backend, TARGET, TARGET, 0.5, 0.5) == (1, 0)  # half of P remains


@pytest.mark.parametrize("bad", [[NAN, 0.5, 0.5, 0.0], [INF, 0, 0, 0.0], [-0.5, 0.5, 0.5, 0.5], 4 * [0.0]])
def test_bad_rows(backend, bad):
    assert one(backend, bad, DRAFT, 0.9) == (0, INVALID_ROW)
    token, _ = one(backend, TARGET, None, 0.9)
    assert one(backend, TARGET, bad, 0.9) == (token, INVALID_DRAFT)
    assert one(backend, bad, bad, 0.9) == (0, INVALID_ROW | INVALID_DRAFT)
    assert one(backend, bad, None, 0.9) == (0, INVALID_ROW)


@pytest.mark.parametrize("omega", [-0.5, NAN])
def test_an_undefined_omega_draws_from_the_target(backend, omega):
    assert one(backend, TARGET, DRAFT, 0.5, omega) == (1, INVALID_RULE)
    assert one(backend, [NAN] * 4, DRAFT, 0.5, omega) == (0, INVALID_RULE | INVALID_ROW)


def test_is_what_verify_tree_draws_after_one_rejection(backend):
    """The two ops agree on each row, token for token, with inexact probabilities too."""
    g = torch.Generator().manual_seed(0)
    R, V = (20, 30) if backend == "triton" else (500, 30)
    target, draft = ((torch.randn(R, V, generator=g) * 2).softmax(-1).to(DEVICE) for _ in range(2))
    uniforms = torch.rand(R, 2, generator=g).to(DEVICE)
    omega = (torch.rand(R, generator=g) * 1.5).to(DEVICE)
    uniforms[:, 1] = 0.999
    child = torch.multinomial(draft, 1, generator=g if DEVICE == "cpu" else None)
    links = torch.tensor([[1, -1]], dtype=torch.int32, device=DEVICE).repeat(R, 1)
    verified = verify_tree(
        target.unsqueeze(1).repeat(1, 2, 1), torch.cat([child, child], 1), links, torch.full_like(links, -1),
        uniforms, draft_probs=draft.unsqueeze(1), draft_row=torch.zeros_like(links), omega=omega.unsqueeze(1),
        max_depth=1, backend=backend)
    alone, status = sample_residual(target, draft, uniforms[:, 0].contiguous(), omega=omega, backend=backend)
    rejected = verified.num_accepted == 0
    assert rejected.sum() > R / 4 and torch.equal(alone[rejected], verified.next_token[rejected]) and not status.any()


@pytest.mark.parametrize("backend", backends_but("sample_residual", "triton"))
def test_a_row_longer_than_the_registers_of_a_cluster(backend):
    """The draft is even over the first 100,000 ids, so that the others are left, evenly too."""
    V = 150000
    draft = torch.where(torch.arange(V, device=DEVICE) < 100000, 2.0**-17, 0.0)
    for uniform, token in [(0.0, 100000), (0.25, 112500), (0.5, 125000), (0.75, 137500), (1.0, V - 1)]:
        assert one(backend, [2.0**-18] * V, draft.tolist(), uniform) == (token, 0)
    assert one(backend, [2.0**-18] * V, None, 0.5) == (75000, 0)
