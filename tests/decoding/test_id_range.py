"""Images that are no square of codes: rows that end in a forced token, ids by position, a null condition of its own."""
import itertools

import pytest
import torch

from specvis.decoding.baseline import decode
from specvis.decoding.draft_model import SmallDraftModel
from specvis.decoding.jacobi import jacobi_decode
from specvis.decoding.methods import METHODS, method
from specvis.decoding.sampling import Sampling, cfg_inputs
from specvis.decoding.speculative import speculative_decode
from specvis.decoding.trees import Adaptation, Shapes
from specvis_kernels import codebook_neighbors, draw_tokens, guided_probs
from tests.decoding.pictures import chi_square
from tests.decoding.test_jacobi import Fixed
from tests.models.test_interface import CONDITION, DIM, PADDING_MASK, VOCAB, BagModel, S, next_logits

B, ROWS, COLUMNS = len(CONDITION), 3, 5
FIRST, LAST, NEWLINE = 2, 9, 10  # of the ids in [0, 12) seven are codes, and one is what ends a row
POSITIONS = torch.arange(ROWS * COLUMNS)
IS_NEWLINE = POSITIONS % COLUMNS == COLUMNS - 1
NEIGHBORS = codebook_neighbors(torch.randn(LAST - FIRST, 4, generator=torch.Generator().manual_seed(1)), 6)


class RowsModel(BagModel):
    """Three rows of four codes; after each of them id 10 is forced."""

    grid, codes = (ROWS, COLUMNS), (FIRST, LAST)

    def id_range(self, positions):
        is_newline = positions % COLUMNS == COLUMNS - 1
        return torch.stack([torch.where(is_newline, NEWLINE, FIRST), torch.where(is_newline, NEWLINE + 1, LAST)], -1)

    def null_inputs(self, padding_mask):
        """Of another length than the conditions: the first entry does not count."""
        null = torch.ones(len(padding_mask), S, DIM, dtype=torch.float64)
        return null, (torch.arange(S) > 0).expand(len(padding_mask), -1)

    def logits(self, hidden):  # the ids outside are the likeliest ones
        return super().logits(hidden) + 3 * (torch.arange(VOCAB) >= LAST)


def sampling(temperature=1.0, seeds=range(B)):
    return Sampling.of(list(seeds), guidance=1.5, temperature=temperature, top_k=[0, 3, 5, 0, 0] * (len(seeds) // B))


def written_out(model, settings):
    """The baseline once more: the whole prefix is read anew for every token, and newlines are put where they belong."""
    null = torch.ones(B, S, DIM, dtype=torch.float64)
    both_masks = torch.cat([PADDING_MASK, (torch.arange(S) > 0).expand(B, -1)])
    tokens = torch.zeros(B, 0, dtype=torch.int64)
    for i in POSITIONS.tolist():
        logits = next_logits(model, torch.cat([CONDITION, null]), both_masks, torch.cat([tokens, tokens]))
        drawn = draw_tokens(*logits[..., :LAST].index_fill(-1, torch.arange(FIRST), -torch.inf).chunk(2),
                            settings.guidance, settings.temperature, settings.top_k, settings.top_p, settings.seeds,
                            torch.full((B, 1), i)).tokens
        tokens = torch.cat([tokens, torch.full((B, 1), NEWLINE) if IS_NEWLINE[i] else drawn], 1)
    return tokens


def run(m, settings, target=None, draft=None, neighbors=NEIGHBORS):
    target, draft = target or RowsModel(1), draft or RowsModel(2)
    draft_model = SmallDraftModel(draft, *cfg_inputs(draft, CONDITION, PADDING_MASK))
    if m.drafting == "jacobi":
        return jacobi_decode(target, CONDITION, PADDING_MASK, settings, [m] * B, neighbors, draft_model=draft_model)
    return speculative_decode(target, draft_model, CONDITION, PADDING_MASK, settings, [m] * B, neighbors)


ALL = [method(name, k=5) if m.acceptance.k else m for name, m in METHODS.items() if m.drafting != "none"]
EXACT = [m for m in ALL if m.seed_exact] + [
    method("jacobi", window=3), method("jacobi", window=3, refresh=2),
    method("speculative", seed_exact=True), method("eagle1", seed_exact=True)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_tokens_are_the_baselines(temperature):
    settings = sampling(temperature)
    expected = written_out(RowsModel(1), settings)
    assert torch.equal(decode(RowsModel(1), CONDITION, PADDING_MASK, settings).tokens, expected)
    for m in EXACT if temperature else [*EXACT, *(m for m in ALL if m.lossless)]:
        for draft in (RowsModel(1), RowsModel(2)):
            assert torch.equal(run(m, settings, draft=draft).tokens, expected), m.label


RELAXED = [*(m for m in ALL if not m.lossless), *(method(name, delta=1.0, k=11) for name in ("gsd", "gsd+coupled")),
           method("lantern", k=6, delta=1.0), method("jacobi", seed_exact=False, k=6, delta=1.0)]


@pytest.mark.parametrize("m", RELAXED, ids=lambda m: m.label)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_method_relaxes_what_is_forced(m, temperature):
    decoded = run(m, sampling(temperature))
    assert (decoded.tokens[:, IS_NEWLINE] == NEWLINE).all() and not decoded.failed.any()
    codes = decoded.tokens[:, ~IS_NEWLINE]
    assert codes.min() >= FIRST and codes.max() < LAST


@pytest.mark.parametrize("m", [method("jacobi", seed_exact=False, window=4), method("speculative"), method("eagle1")],
                         ids=lambda m: m.label)
def test_the_tokens_around_a_newline_have_the_baselines_distribution(m):
    """The three tokens after a known beginning: a code, the newline, a code. 4000 images against their exact law."""
    n, model, known = 4000, RowsModel(1), torch.tensor([[2, 5, 3]])
    probs = torch.zeros(LAST - FIRST, LAST - FIRST)
    condition, mask = cfg_inputs(model, CONDITION[:1], PADDING_MASK[:1])

    def row(tokens):
        logits = next_logits(model, condition, mask, tokens.repeat(2, 1))[..., FIRST:LAST]
        return guided_probs(*logits.chunk(2), 1.5, 1.0, 0, 1.0).probs[0, 0]

    first = row(known)
    for i in range(LAST - FIRST):
        probs[i] = first[i] * row(torch.cat([known, torch.tensor([[FIRST + i, NEWLINE]])], 1))
    settings = Sampling.of(list(range(n)), guidance=1.5)
    arguments = {"known_tokens": known.repeat(n, 1)}
    condition, mask = CONDITION[:1].repeat(n, 1, 1), PADDING_MASK[:1].repeat(n, 1)
    if m.drafting == "jacobi":
        decoded = jacobi_decode(model, condition, mask, settings, [m] * n, **arguments)
    else:
        draft_model = SmallDraftModel(RowsModel(2), *cfg_inputs(RowsModel(2), condition, mask))
        decoded = speculative_decode(model, draft_model, condition, mask, settings, [m] * n, **arguments)
    assert (decoded.tokens[:, 4] == NEWLINE).all()
    assert chi_square(decoded.tokens[:, [3, 5]] - FIRST, probs.flatten(), LAST - FIRST) < 4


class ByColumn(Fixed, RowsModel):
    """At temperature 0 the code at column c is 2 + c, whatever came before."""

    def logits(self, hidden):
        return 50.0 * torch.nn.functional.one_hot(FIRST + hidden[..., 0].long() % COLUMNS, VOCAB)


class Constant(ByColumn):
    """All codes are 2."""

    def logits(self, hidden):
        return super().logits(0 * hidden)


def steps(m, model):
    """By position of a step's first token, how many guesses or drafts it accepted, of each image."""
    decoded = run(m, sampling(0.0), model, model)
    assert (decoded.tokens[:, IS_NEWLINE] == NEWLINE).all()
    return [{p: n for p, n in enumerate(row) if n >= 0} for row in decoded.num_accepted.tolist()]


def test_guesses_are_from_the_token_above_and_of_ids_that_may_stand_there():
    """By hand. The first code of the first guesses is wrong, and from the third row on all are what is above them."""
    for m in (method("jacobi", window=2), method("jacobi", window=2, seed_exact=False)):
        assert steps(m, ByColumn(0)) == [{1: 0, 2: 2, 5: 2, 8: 2, 11: 2, 14: 0}] * B
    for m in (method("jacobi", window=20), method("jacobi", window=20, seed_exact=False)):
        assert steps(m, Constant(0)) == [{1: 13}] * B, m.label


def test_drafts_are_of_ids_that_may_stand_there():
    """A draft model that is the target itself, and is sure of its tokens: all drafts are accepted, newlines too."""
    for m in (method("eagle2", depth=4, width=2, nodes=9), method("speculative", tree="chain-4"),
              method("speculative", tree="chain-4", seed_exact=True)):
        assert steps(m, ByColumn(0)) == [{1: 4, 6: 4, 11: 3}] * B, m.label


class AllCodes(RowsModel):
    """Equal codes with equal neighbors, in a table for all ids."""

    codes = (0, VOCAB)


@pytest.mark.parametrize("m", [method("lantern", k=5, delta=0.5), method("jacobi", seed_exact=False, k=5, delta=0.5)],
                         ids=lambda m: m.name)
def test_neighbors_are_those_of_the_codes(m):
    table = torch.zeros(VOCAB, 6, dtype=torch.int32)
    table[FIRST:LAST] = NEIGHBORS.int() + FIRST
    expected = run(m, sampling())
    assert torch.equal(run(m, sampling(), AllCodes(1), neighbors=table).tokens, expected.tokens)
    assert (expected.tv_excess > 0).all()


def test_adapted_trees_know_how_long_a_row_is():
    """Of two rows of five: above position 7 is position 2, and the start of a row has no token to its left."""
    def shapes(start):
        one = Shapes(*(torch.tensor([n]) for n in (2, 3, 20)), 5, 10, Adaptation(start=start, depths=(1, 9)))
        one.depths, one.alphas = torch.arange(10.0)[None] + 1, torch.ones(1, 10)
        return one

    for start, position, depth in itertools.chain(
            zip(["horizontal"] * 3, (5, 6, 7), (1, 6, 7)), zip(["vertical"] * 3, (5, 7, 3), (1, 3, 3))):
        assert shapes(start)._of_neighbor(torch.tensor([position]))[0] == depth, (start, position)
    near = shapes("tokenflock")._of_flock(torch.tensor([7]))[0]  # 6 at distance 1, 5 at 2, and 1, 2, 3 above
    assert near.item() == pytest.approx((1.5 * (7 + 6) + 1.0 * (2 + 3 + 4)) / (1.5 * 2 + 1.0 * 3))


def test_a_table_of_neighbors_is_of_the_codes():
    with pytest.raises(ValueError, match="neighbors must be a table of C=7 rows and at least k=5 columns for lantern"):
        draft_model = SmallDraftModel(RowsModel(2), *cfg_inputs(RowsModel(2), CONDITION, PADDING_MASK))
        speculative_decode(RowsModel(1), draft_model,
                           CONDITION, PADDING_MASK, sampling(), [method("lantern", k=5)] * B,
                           torch.zeros(VOCAB, 5, dtype=torch.int32))
