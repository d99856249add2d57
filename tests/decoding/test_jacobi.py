"""Jacobi decoding gives plain decoding's tokens; by rejection, tokens with plain decoding's distribution."""
import dataclasses

import pytest
import torch

import specvis.decoding.coupling
import specvis.decoding.jacobi
from specvis.decoding.baseline import decode
from specvis.decoding.coupling import rank_groups
from specvis.decoding.draft_model import SmallDraftModel
from specvis.decoding.jacobi import jacobi_decode
from specvis.decoding.methods import METHODS, method
from specvis.decoding.sampling import Sampling, cfg_inputs
from specvis.models.interface import Nodes
from specvis_kernels import CoupleTokensResult
from tests.decoding.pictures import PROMPTS, begun, coupled
from tests.models.test_interface import CONDITION, PADDING_MASK, VOCAB, BagModel, CacheFreeModel, L, S

B, SEEDS = len(CONDITION), [3, 1, 4, 1, 5]
VANILLA = METHODS["vanilla"]


def settings(**parameters):
    return Sampling.of(SEEDS, **{"guidance": 1.5} | parameters)


def jacobi(methods, sampling=None, model=None, rows=slice(None), **arguments):
    """methods: one for all, or one for each request"""
    condition, padding_mask = CONDITION[rows], PADDING_MASK[rows]
    methods = methods if isinstance(methods, list) else [methods] * len(condition)
    arguments = {"draft_model": small_draft_model(rows=rows)} | arguments
    return jacobi_decode(model or BagModel(1), condition, padding_mask, sampling or settings(), methods, **arguments)


def small_draft_model(model=None, rows=slice(None)):
    """It redraws guesses, where a method asks for that."""
    model = model or BagModel(2)
    return SmallDraftModel(model, *cfg_inputs(model, CONDITION[rows], PADDING_MASK[rows]))


def plain(sampling, model=None, **arguments):
    return decode(model or BagModel(1), CONDITION, PADDING_MASK, sampling, **arguments)


# --- seed-exact -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("parameters", [
    {"temperature": 0.0}, {"temperature": 0.7}, {}, {"guidance": 1.0}, {"top_k": 5, "top_p": 0.9},
    {"temperature": [0.0, 0.7, 1.0, 2.0, 1.0], "guidance": [1.0, 3.0, 1.5, 0.0, 2.0], "top_k": [0, 3, 5, 0, 1]},
], ids=str)
@pytest.mark.parametrize("methods", [
    VANILLA, *(method("jacobi", window=window) for window in (None, 1, 3, 7, 20, 32)),
    *(method("jacobi", window=window, refresh=refresh) for window, refresh in ((1, 3), (3, 1), (7, 2), (None, 2))),
], ids=lambda m: f"{m.drafts.window} {m.drafts.refresh}")
def test_the_tokens_are_plain_decodings(methods, parameters):
    sampling = settings(**parameters)
    expected = plain(sampling).tokens
    for model in (BagModel(1), CacheFreeModel(1)):
        assert torch.equal(jacobi(methods, sampling, model).tokens, expected)
    counts = [0, 5, L, 3, 11]
    assert torch.equal(jacobi(methods, sampling, known_tokens=begun(expected, counts)).tokens, expected)
    if sampling.temperature.max() > 0:  # the control: other seeds
        other = dataclasses.replace(sampling, seeds=sampling.seeds + 10)
        assert not torch.equal(jacobi(methods, other).tokens, expected)


class Fixed(BagModel):
    """At temperature 0 the token at position p is p % V, whatever came before."""

    def extend(self, tokens, nodes, cache):
        return (nodes.position_ids - S + 1).double()[..., None]

    def prefill(self, condition, padding_mask, cache):
        return torch.zeros(len(condition), S, 1, dtype=torch.float64)

    def logits(self, hidden):
        return torch.nn.functional.one_hot(hidden[..., 0].long() % VOCAB, VOCAB).float()


class Counting(Fixed):
    """The next token is the last one and 1: no guess is right before the token in front of it is."""

    def extend(self, tokens, nodes, cache):
        return (tokens + 1).double()[..., None]


class Constant(Fixed):
    """Every token is 0: every guess is right."""

    def extend(self, tokens, nodes, cache):
        return torch.zeros(*tokens.shape, 1, dtype=torch.float64)


@pytest.mark.parametrize("model, window, num_accepted", [
    # what one forward read wrong is right in the next; then come guesses from the row above, wrong by GRID
    (Fixed(0), 3, {1: 0, 2: 3, 6: 0, 7: 3, 11: 0, 12: 3}), (Fixed(0), 6, {1: 0, 2: 6, 9: 0, 10: 5}),
    (Counting(0), 3, {p: 0 for p in range(1, L)}), (Constant(0), 3, {1: 3, 5: 3, 9: 3, 13: 2}),
    (Constant(0), 20, {1: 14}), (Constant(0), 1, {p: 1 if p < L - 1 else 0 for p in range(1, L, 2)}),
], ids=lambda x: type(x).__name__ if isinstance(x, Fixed) else str(x))
def test_the_forwards_are_those_worked_out_by_hand(model, window, num_accepted):
    decoded = jacobi(method("jacobi", window=window), settings(temperature=0.0), model)
    for row, drafted, target_forwards in zip(decoded.num_accepted, decoded.num_drafted, decoded.target_forwards):
        assert {p: n for p, n in enumerate(row.tolist()) if n >= 0} == num_accepted
        assert drafted.tolist() == [min(window, L - 1 - p) if p in num_accepted else 0 for p in range(L)]
        assert target_forwards == 1 + len(num_accepted)
    assert torch.equal(decoded.tokens, plain(settings(temperature=0.0), model).tokens)
    assert decoded.tv_excess.eq(0).all()


class OneToken(BagModel):
    grid = 1


@pytest.mark.parametrize("window", [1, None])
def test_an_image_of_one_token(window):
    decoded = jacobi(method("jacobi", window=window), model=OneToken(1))
    assert torch.equal(decoded.tokens, plain(settings(), OneToken(1)).tokens) and decoded.target_forwards.eq(1).all()


class Indifferent(BagModel):
    """One row of logits for all positions: a guess is right if it was drawn with the noise of its own position."""

    def logits(self, hidden):
        return super().logits(torch.zeros_like(hidden))


def test_a_guess_has_the_noise_of_its_own_position():
    decoded = jacobi(method("jacobi", window=3), model=Indifferent(1))
    is_step = decoded.num_accepted >= 0
    assert decoded.num_accepted[is_step].sum() > 0
    assert torch.equal(decoded.num_accepted[is_step], decoded.num_drafted[is_step])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("m", [METHODS["jacobi"], method("jacobi", window=5), method("jacobi", window=5, refresh=2)])
def test_finished_images_leave_the_batch(tiny, monkeypatch, m, temperature):
    """Each has its own tokens and accounts then, its own number of known tokens too. Where someone observes, all stay.
    """
    sampling = Sampling.of(list(range(6)), guidance=2.0, temperature=temperature)
    words = tiny.words(tiny.words.encode(PROMPTS[:2] * 3))
    condition = tiny.gpt.condition(words)
    small = {"draft_model": SmallDraftModel(tiny.small, *cfg_inputs(tiny.small, *tiny.small.condition(words)))}
    known_tokens = begun(decode(tiny.gpt, *condition, sampling).tokens, [0, 15, 3, 12, 0, 8])
    batches, extend, num_steps = [], tiny.gpt.extend, torch.ones(6, dtype=torch.int64)

    def counting(tokens, *others):
        batches.append(len(tokens))
        return extend(tokens, *others)

    def observe(step):
        num_steps.add_(step.active)

    specvis.decoding.jacobi.check_causal(tiny.gpt)
    monkeypatch.setattr(tiny.gpt, "extend", counting)
    usual = jacobi_decode(tiny.gpt, *condition, sampling, [m] * 6, known_tokens=known_tokens, observe=observe, **small)
    assert {*batches} == {12} and torch.equal(num_steps, usual.target_forwards)  # rows: two an image
    decoded = jacobi_decode(tiny.gpt, *condition, sampling, [m] * 6, known_tokens=known_tokens, **small)
    assert min(batches) < 12 == max(batches)
    for field in dataclasses.fields(decoded)[:-1]:
        assert torch.equal(getattr(decoded, field.name), getattr(usual, field.name)), field.name


def test_the_sizes_of_a_step(monkeypatch):
    """One forward a step, of the newest token and the guesses."""
    model, sizes = Constant(0), []
    monkeypatch.setattr(model, "extend", lambda tokens, *a: (sizes.append(tokens.shape), Constant.extend(
        model, tokens, *a))[1], raising=False)
    specvis.decoding.jacobi.check_causal(model)
    sizes.clear()
    decoded = jacobi(method("jacobi", window=5), settings(temperature=0.0), model)
    assert sizes == [(2 * B, 6)] * 3 and decoded.target_forwards.tolist() == [4] * B


class Broken(BagModel):
    """Gives logits that are not finite after a token 3 of request 1."""

    def extend(self, tokens, nodes, cache):
        hidden = super().extend(tokens, nodes, cache)
        rows = torch.arange(len(tokens)) % B == 1
        return torch.where((rows[:, None] & (tokens == 3))[..., None], torch.nan, hidden)


@pytest.mark.parametrize("m", [method("jacobi", window=4), METHODS["jacobi"], VANILLA,
                               method("jacobi", window=4, refresh=2), method("jacobi", window=4, seed_exact=False)],
                         ids=lambda m: m.label)
def test_logits_that_are_not_finite_end_an_image(m):
    whole, broken = jacobi(m), jacobi(m, model=Broken(1))
    assert (whole.tokens[1] == 3).any() and broken.failed.tolist() == [False, True, False, False, False]
    end = (whole.tokens[1] == 3).nonzero()[0, 0] + 1
    assert torch.equal(broken.tokens[1, :end], whole.tokens[1, :end]) and broken.tokens[1, end:].eq(0).all()
    others = [0, 2, 3, 4]
    assert torch.equal(broken.tokens[others], whole.tokens[others]) and broken.tau[1].isnan()
    if m.seed_exact or m is VANILLA:
        assert torch.equal(broken.tokens, plain(settings(), Broken(1)).tokens)


@pytest.mark.parametrize("m", [method("jacobi", window=1023), method("jacobi", window=1023, seed_exact=False)],
                         ids=lambda m: m.label)
def test_a_window_is_no_larger_than_an_image(m):
    decoded, other = jacobi(m), jacobi(m.changed(window=L - 1))
    assert torch.equal(decoded.tokens, other.tokens) and torch.equal(decoded.num_drafted, other.num_drafted)


# --- bad input --------------------------------------------------------------------------------------------------------

class LooksAhead(BagModel):
    """Ignores its mask: a token sees the tokens after it."""

    class Unmasked(Nodes):
        @property
        def mask(self):
            mask = super().mask
            return mask | mask.any(1, keepdim=True)

    def extend(self, tokens, nodes, cache):
        return super().extend(tokens, self.Unmasked(**vars(nodes)), cache)


def test_a_target_that_is_not_causal_is_refused():
    for model in (LooksAhead(1), LooksAhead(2)):
        for _ in range(2):
            with pytest.raises(ValueError, match="target must be causal.* the logits of LooksAhead do"):
                jacobi(method("jacobi", window=3), model=model)
    decode(LooksAhead(1), CONDITION, PADDING_MASK, settings())  # plain decoding reads no guesses


@pytest.mark.parametrize("methods, message", [
    ([METHODS["jacobi"]] * (B - 1), f"methods must be one, or one for each of the {B} requests, got {B - 1}"),
    ([METHODS["eagle2"]] * B, r"must be Jacobi decoding or vanilla \(speculative_decode .*\), got eagle2$"),
    ([METHODS["jacobi"]] * (B - 1) + [VANILLA], "methods must be of one family .*, got jacobi and vanilla"),
    ([METHODS["jacobi"]] * (B - 1) + [method("jacobi", window=4)], "must be of one family .* jacobi and jacobi:window"),
    ([method("jacobi", seed_exact=False, k=3, delta=0.1)] * B, f"neighbors must be a table of C={VOCAB} rows"),
])
def test_methods_that_do_not_fit_are_refused(methods, message):
    with pytest.raises(ValueError, match=message):
        jacobi(methods)


# --- by rejection -----------------------------------------------------------------------------------------------------

def test_by_rejection_greedy_decoding_is_greedy_decoding(tiny):
    sampling = Sampling.of([1, 2, 3, 4], temperature=0.0)
    expected = tiny.tokens(PROMPTS, "vanilla", sampling)
    lending = [coupled(k=8, delta=1.0, residual=residual) for residual in ("optimal", "relaxed", "released")]
    for m in (coupled(), coupled(coupling="none"), coupled(window=20), coupled(omega=0.5),
              coupled(omega=3.0), *lending, coupled(k=8, cutoff="ratio", delta=9.0), method("gsd", delta=1.0),
              method("gsd+coupled", delta=1.0)):
        decoded = tiny.tokens(PROMPTS, m, sampling)
        assert torch.equal(decoded.tokens, expected.tokens) and decoded.tv_excess.eq(0).all()


class BrokenConstant(Constant):
    """Gives logits that are not finite after token `last` of request 1."""

    last = 5

    def extend(self, tokens, nodes, cache):
        rows = torch.arange(len(tokens)) % B == 1
        return torch.where((rows[:, None] & (nodes.position_ids == S + self.last))[..., None], torch.nan,
                           super().extend(tokens, nodes, cache))

    def logits(self, hidden):
        return super().logits(hidden.nan_to_num()).masked_fill(hidden.isnan(), torch.nan)


@pytest.mark.parametrize("last", [5, L - 2])
@pytest.mark.parametrize("m", [coupled(), method("jacobi", window=4), VANILLA], ids=lambda m: m.name)
def test_at_temperature_0_an_image_ends_at_logits_that_are_not_finite(m, last):
    """At the logits of its last token, too."""
    model = BrokenConstant(0)
    model.last = last
    decoded = jacobi(m, settings(temperature=0.0), model)
    assert decoded.failed.tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("num_falling, num_tests", [(1, 1 + 2 + 3 * (L - 4)), (0, 3 + 3 + 3 + 2)])
def test_tv_excess_counts_every_test_that_kept_a_guess(monkeypatch, num_falling, num_tests):
    """Of three guesses the first always falls. So a position is tested at distance 3, 2 and 1 before it is final; the
    first two of the image fewer times, and the last one is the target's own. Or none falls: each is tested once."""
    def couple(target_probs, draft_probs, tokens, uniforms, **_):
        is_kept = (torch.arange(tokens.shape[1]) >= num_falling).expand_as(tokens)
        none = torch.zeros(tokens.shape, dtype=torch.int32)
        num_kept = none[:, 0] + (0 if num_falling else tokens.shape[1])
        return CoupleTokensResult(tokens, is_kept, num_kept, torch.full(tokens.shape, 0.125), none)

    monkeypatch.setattr(specvis.decoding.coupling, "couple_tokens", couple)
    decoded = jacobi([coupled(window=3)] * 5)
    assert decoded.tv_excess.tolist() == [0.125 * num_tests] * 5


def test_the_ids_around_a_token_in_the_order_of_its_row():
    probs = torch.tensor([[[0.3, 0.1, 0.2, 0.1, 0.25, 0.05]]])  # the order is 0, 4, 2, 1, 3, 5
    for token, k, delta, expected in ((2, 2, 1.0, {4, 1}), (2, 4, 1.0, {0, 4, 1, 3}), (0, 4, 1.0, {4, 2}),
                                      (5, 4, 1.0, {1, 3}), (3, 2, 1.0, {1, 5}), (1, 3, 1.0, {2, 3, 5}),
                                      (2, 4, 0.06, {4}), (2, 4, 0.0, set()), (2, 14, 1.0, {0, 4, 1, 3, 5})):
        groups = rank_groups(probs, torch.tensor([[token]]), k, torch.tensor([delta]))
        assert groups.shape == (1, 1, k) and {*groups.flatten().tolist()} - {-1} == expected


@pytest.mark.parametrize("token, gsd, both", [  # ids in the order of the row are 19, 18, .., 0
    (9, {15, 14, 13, 12, 11, 10, 8, 7, 6, 5, 4, 3, 2}, {16, 15, 14, 13, 12, 11, 10, 8, 7, 6, 5, 4, 3, 2}),
    (19, {18, 17, 16, 15, 14, 13, 12}, {18, 17, 16, 15, 14, 13, 12}),  # the likeliest
    (1, {7, 6, 5, 4, 3, 2, 0}, {8, 7, 6, 5, 4, 3, 2, 0})])
def test_the_group_of_gsd_is_seven_less_likely_ids_and_six_likelier_ones(token, gsd, both):
    """As GSD's code slices them: sorted from the least likely one on, [place - 7 : place + 7]."""
    probs = (torch.arange(20.0) + 1) / 210
    for m, expected in (METHODS["gsd"], gsd), (METHODS["gsd+coupled"], both):
        groups = rank_groups(probs.expand(1, 1, -1), torch.tensor([[token]]), m.acceptance.k,
                             torch.tensor([m.acceptance.delta]))
        assert {*groups.flatten().tolist()} - {-1} == expected
    assert {*range(max(0, token - 7), min(20, token + 7))} - {token} == gsd
