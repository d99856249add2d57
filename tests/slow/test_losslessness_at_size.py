"""With 16384 ids, as in an image tokenizer's vocabulary, the emitted tokens are still distributed as the target.

test_losslessness.py knows the law of a few ids exactly. Here are 10^6 draws, two statistics of their counts, and
for each op a rule that is a little wrong, which both must reject:

- the total variation between the draws and the target, above that of perfect draws. The mean of the latter is known
  exactly (`noise_floor`), and the chance to be as far above it has a bound that holds for every target;
- chi-square with rare ids pooled. It also sees what total variation does not, as an id that is lost in every block.

The C++ kernels make the draws: test_every_op.py holds the other backends to equal bits.
"""
import math

import pytest
import torch

from specvis_kernels import backends, couple_tokens, verify_logits, verify_tree
from tests.cases import links
from tests.kernels.test_draw_tokens import test_tokens_have_the_probabilities_of_guided_probs as draws_fit
from tests.kernels.test_losslessness import ACCEPT_ABOVE, REJECT_BELOW, p_value

V, BATCH = 16384, 100
DRAWS = 10**6
needs_kernels = pytest.mark.skipif("cpu" not in backends("verify_tree"), reason="this many draws need the C++ kernels")


def noise_floor(P, n):
    """The mean of the total variation between P and n perfect draws: De Moivre's mean absolute deviation of each id."""
    P = P[(P > 0) & (P < 1)]
    v = (n * P).floor() + 1
    log_chance = math.lgamma(n + 1) - torch.lgamma(v + 1) - torch.lgamma(n - v + 1)  # of v draws, P / (1 - P) aside
    log_chance += v * P.log() + (n - v + 1) * (-P).log1p()
    return (v * log_chance.exp()).sum().item() / n


def p_of_tv(counts, P):
    """A bound on the chance that perfect draws are as far from P: one draw moves the distance by 1/n (McDiarmid)."""
    n = counts.sum().item()
    excess = (counts / n - P).abs().sum().item() / 2 - noise_floor(P, n)
    return math.exp(-2 * n * max(excess, 0) ** 2)


def p_of_chi_square(counts, P, least=12):
    """Ids that expect fewer draws than `least` share a cell with others that are as rare."""
    if counts[P == 0].any():
        return 0.0
    order = P.argsort(descending=True)
    expected, counts = counts.sum() * P[order], counts[order]  # the likeliest first
    rare = expected * (expected < least)
    num_alone = int((rare == 0).sum() - (P == 0).sum())
    cell = ((rare.cumsum(0) - rare) / least).long().clamp(max=int(rare.sum() / least) - 1)
    cell = torch.where(torch.arange(len(P)) < num_alone, torch.arange(len(P)) - num_alone, cell) + num_alone
    cells = torch.zeros(2, int(cell.max()) + 1, dtype=torch.float64)
    cells.index_add_(1, cell, torch.stack([counts.double(), P[order]]))
    return p_value(cells[:1], cells[1:])


def p_values(tokens, P):
    counts = torch.bincount(tokens, minlength=V)
    return p_of_tv(counts, P), p_of_chi_square(counts, P)


def accepts(tokens, P):
    return min(p_values(tokens, P)) > ACCEPT_ABOVE


def rejects(tokens, P):
    return max(p_values(tokens, P)) < REJECT_BELOW


def drawn(P, n, g):
    sums = P.double().cumsum(0)
    return torch.searchsorted(sums, torch.rand(n, generator=g, dtype=torch.float64) * sums[-1], right=True)


def children_of(Q, n, siblings, g):
    """(n, siblings): drawn without replacement, that is, until another id comes."""
    children = drawn(Q, n * siblings, g).view(n, siblings)
    for i in range(1, siblings):
        while (again := (children[:, i:i + 1] == children[:, :i]).any(1)).any():
            children[again, i] = drawn(Q, int(again.sum()), g)
    return children


def rows(peaked, g):
    """P and Q, float32: of 3 nats, which the shipped model has on average, or nearly flat, of 9. Q is 0.1 to 0.2
    away."""
    logits = torch.randn(V, generator=g, dtype=torch.float64) * (5 if peaked else 1)
    draft = logits * 0.9 + torch.randn(V, generator=g, dtype=torch.float64) * 0.4
    return logits.softmax(0).float(), draft.softmax(0).float()


def stars(siblings):
    """first_child and next_sibling of a batch of roots with children."""
    return links(torch.tensor([[-1] + [0] * siblings]).repeat(BATCH, 1))


def first_tokens(result, children):
    accepted = children.gather(1, (result.accepted_nodes.long() - 1).clamp(min=0)).squeeze(1)
    assert not result.status.any()
    return torch.where(result.num_accepted > 0, accepted, result.next_token)


def by_op(op, rows, Q, children, g, **options):
    """By verify_tree or verify_logits. Without Q the children are point masses, or, if it is "seeds", equal draws."""
    siblings = children.shape[1]
    rows, tree = [row.repeat(BATCH, siblings + 1, 1) for row in rows], stars(siblings)
    if torch.is_tensor(Q):
        options |= {"draft_probs": Q.repeat(BATCH, 1, 1), "draft_row": torch.zeros(BATCH, siblings + 1).int()}

    def of(children):
        tokens, uniforms = torch.nn.functional.pad(children, (1, 0)), torch.rand(BATCH, siblings + 1, generator=g)
        if isinstance(Q, str):
            uniforms = None
            options.update(seeds=torch.randint(2**62, (BATCH,), generator=g), positions=torch.zeros_like(tokens))
        return first_tokens(op(*rows, tokens, *tree, uniforms, max_depth=1, **options, backend="cpu"), children)

    return torch.cat([of(part) for part in children.split(BATCH)])


def by_the_unmodified_target(P, Q, children, g):
    """The control of verify_tree: every sibling against P itself, and at the end [P - Q]+."""
    n = len(children)
    tokens, left = torch.full((n,), -1), torch.ones(n)
    for x in children.T:
        share = torch.ones(n) if Q is None else Q[x] / left
        tokens = torch.where((tokens < 0) & (torch.rand(n, generator=g) * share < P[x]), x, tokens)
        left -= 0 if Q is None else Q[x]
    residual = P.scatter(0, children[0], 0.0) if Q is None else (P - Q).clamp(min=0)
    return torch.where(tokens < 0, drawn(residual, n, g), tokens)


@needs_kernels
@pytest.mark.parametrize("peaked, sampled, siblings, omega", [
    (False, True, 2, None), (True, True, 3, 0.7), (True, False, 4, None), (False, True, 3, 0.5), (True, False, 2, 0.7)])
def test_verify_tree(peaked, sampled, siblings, omega):
    g = torch.Generator().manual_seed(0)
    P, Q = rows(peaked, g)
    children = children_of(Q, DRAWS, siblings, g) if sampled else Q.topk(siblings).indices.repeat(DRAWS, 1)
    Q = Q if sampled else None
    target = P.double() / P.double().sum()
    assert accepts(by_op(verify_tree, [P], Q, children, g, omega=omega), target)
    assert rejects(by_the_unmodified_target(P, Q, children, g), target)


def by_couple_tokens(P, Q, guesses, omega, g):
    target_probs, draft_probs = P.repeat(1, BATCH, 1), Q.repeat(1, BATCH, 1)

    def of(guesses):
        result = couple_tokens(target_probs, draft_probs, guesses[None], torch.rand(1, BATCH, 2, generator=g),
                               omega=omega, backend="cpu")
        assert not result.status.any()
        return result.tokens[0]

    return torch.cat([of(part) for part in guesses.split(BATCH)])


@needs_kernels
@pytest.mark.parametrize("peaked, omega", [(False, None), (True, 0.8), (True, None)])
def test_couple_tokens(peaked, omega):
    """Control: after a rejection the token is drawn from P instead of the residual."""
    g = torch.Generator().manual_seed(0)
    P, Q = rows(peaked, g)
    guesses = drawn(Q, DRAWS, g)
    target = P.double() / P.double().sum()
    assert accepts(by_couple_tokens(P, Q, guesses, omega, g), target)
    is_kept = torch.rand(DRAWS, generator=g) * Q[guesses] < (1.0 if omega is None else omega) * P[guesses]
    assert rejects(torch.where(is_kept, guesses, drawn(P, DRAWS, g)), target)


FILTERS = {"guidance": 2.0, "temperature": 0.7, "top_k": 200, "top_p": 0.9}
LEFT_OUT = {"guidance": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def filtered(logits, uncond, guidance, temperature, top_k, top_p):
    """The target in float64."""
    x, order = ((uncond + guidance * (logits - uncond)).double() / temperature).sort(descending=True)
    probs = x.softmax(0)
    probs[top_k:] = 0
    probs /= probs.sum()
    probs[(probs.cumsum(0) - probs) >= top_p] = 0
    return torch.zeros_like(probs).scatter(0, order, probs / probs.sum())


def logits_of_a_row(g):
    """The model's rows, rows without the condition, and Q, which shares some of its 200 likeliest ids with them."""
    logits = torch.randn(V, generator=g) * 1.5
    return logits, logits * 0.7 + torch.randn(V, generator=g) * 0.3, (logits * 1.8).softmax(0)


@needs_kernels
@pytest.mark.parametrize("proposal, omega", [
    ("point masses", None), ("sampled", None), ("sampled", 0.7), ("seeds", None)])
def test_verify_logits(proposal, omega):
    g = torch.Generator().manual_seed(0)
    logits, uncond, Q = logits_of_a_row(g)
    target = filtered(logits, uncond, **FILTERS)
    children = children_of(Q, DRAWS, 2, g) if proposal == "sampled" else target.topk(2).indices.repeat(DRAWS, 1)
    settings = FILTERS if omega is None else FILTERS | {"omega": omega}
    Q = {"sampled": Q, "seeds": "seeds"}.get(proposal)
    assert accepts(by_op(verify_logits, [logits, uncond], Q, children, g, **settings), target)


@needs_kernels
@pytest.mark.parametrize("name", FILTERS)
def test_verify_logits_without_one_of_its_settings_is_found(name):
    g = torch.Generator().manual_seed(0)
    logits, uncond, _ = logits_of_a_row(g)
    target = filtered(logits, uncond, **FILTERS)
    children = target.topk(2).indices.repeat(20_000, 1)
    tokens = by_op(verify_logits, [logits, uncond], None, children, g, **FILTERS | {name: LEFT_OUT[name]})
    assert rejects(tokens, target)


def test_the_noise_floor_by_hand():
    """Two draws of a coin are equal, and so 1/2 away, half of the time. Three draws are 1/2 away or 1/6."""
    coin = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert noise_floor(coin, 2) == pytest.approx(1 / 4) and noise_floor(coin, 3) == pytest.approx(1 / 4)
    assert noise_floor(torch.tensor([1.0, 0.0], dtype=torch.float64), 10) == 0


@pytest.mark.parametrize("peaked", [True, False])
def test_perfect_draws_are_accepted(peaked):
    g = torch.Generator().manual_seed(0)
    P = rows(peaked, g)[0].double()
    assert all(accepts(drawn(P, DRAWS, g), P / P.sum()) for _ in range(5))


def test_lost_ids_are_found():
    """The last id of every block of 256: total variation does not see that they are missing, and chi-square does."""
    g = torch.Generator().manual_seed(0)
    P = rows(False, g)[0].double()
    p_tv, p_chi_square = p_values(drawn(P * (torch.arange(V) % 256 < 255), DRAWS, g), P / P.sum())
    assert p_chi_square < REJECT_BELOW < ACCEPT_ABOVE < p_tv


@pytest.mark.parametrize("settings", [{}, {"top_k": 1000, "top_p": 0.95}])
def test_draw_tokens(settings):
    draws_fit(V, settings, 10_000_000, hotter=1.02)
