"""A small model that redraws the guesses of Jacobi decoding: its guesses, and what it is not. That the tokens are plain
decoding's is tested with those of other methods."""
import pytest
import torch

import specvis.decoding.graphs
import specvis.decoding.refresh
from specvis.decoding.baseline import decode
from specvis.decoding.draft_model import SmallDraftModel
from specvis.decoding.jacobi import jacobi_decode
from specvis.decoding.methods import method
from specvis.decoding.refresh import TRUST
from specvis.decoding.sampling import Sampling, cfg_inputs
from specvis.models.interface import id_range, num_tokens, rows_and_columns
from specvis_kernels import draw_tokens
from tests.decoding.pictures import PROMPTS, begun, eagle
from tests.decoding.test_driver import Unguided, tiny  # noqa: F401
from tests.decoding.test_id_range import RowsModel
from tests.decoding.test_jacobi import Counting, jacobi, settings, small_draft_model
from tests.decoding.test_requests import Wrong
from tests.models.test_interface import CONDITION, PADDING_MASK, VOCAB, BagModel, next_logits

B, WINDOWS = len(CONDITION), (1, 7, 3, 20, 2)
VARIED = {"temperature": [1.0, 0.7, 0.0, 1.0, 2.0], "guidance": [1.5, 3.0, 1.5, 0.0, 2.0], "top_k": [0, 0, 5, 3, 0]}


def near(model):
    """A small model that is like a model, but not quite."""
    random = torch.Generator().manual_seed(9)
    model.output += torch.randint(-3, 4, model.output.shape, generator=random)
    return model


class Within(Wrong):
    """The same model. All that it reads is before the column that `Nodes` names."""

    def extend(self, tokens, nodes, cache):
        assert (nodes.slots < nodes.columns).all()
        return self.model.extend(tokens, nodes, cache)


class WrittenOut:
    """Jacobi decoding of request b, once more: every row of logits is a sum over all tokens before it, and no cache,
    batch or window of nodes exists."""

    def __init__(self, target, small, sampling, b):
        self.target, self.small, self.sampling = target, small, sampling[[b]]
        self.inputs = {model: cfg_inputs(model, CONDITION[[b]], PADDING_MASK[[b]]) for model in (target, small)}

    def row(self, model, n):
        """The logits after the first n tokens."""
        condition, mask = self.inputs[model]
        return next_logits(model, condition, mask, torch.tensor([self.x[:n]] * len(condition), dtype=torch.int64))

    def draw(self, logits, p):
        s, position = self.sampling, torch.tensor([[p]])
        both = logits.chunk(2) if len(logits) == 2 else (logits, None)
        return draw_tokens(*both, s.guidance, s.temperature, s.top_k, s.top_p, s.seeds, position,
                           id_range=id_range(self.target, position)).tokens.item()

    def redraw(self, n, W, refresh, of_target=(), before=()):
        """Guess 1 + W tokens from the n-th on. Returns the small model's newest rows for them.

        of_target: the target's rows for them, as far as it has read; before: the small model's rows before that
        """
        for _ in range(refresh):
            after = [self.row(self.small, n + i) for i in range(1 + W)]
            rows = [x + TRUST * (r - q) for x, r, q in zip(of_target, after, before)]
            rows += after[len(rows):]
            self.x[n:n + 1 + W] = [self.draw(row, n + i) for i, row in enumerate(rows)]
        return after

    def num_accepted(self, m, known):
        """How many guesses each step accepted, by the position of its first token."""
        L, columns, n, result = num_tokens(self.target), rows_and_columns(self.target.grid)[1], len(known), {}
        W, refresh = min(m.drafts.window, L), m.drafts.refresh
        self.x = x = [*known, *[0] * (4 * L)]
        if n == L:
            return result
        x[n] = self.draw(self.row(self.target, n), n)
        for p in range(n + 1, n + 1 + max(columns, 1 + W)):
            x[p] = self.draw(self.row(self.target, p - columns if 0 <= p - columns <= n else n), p)
        before, n = self.redraw(n + 1, W, refresh), n + 1
        while n < L:
            rows = [self.row(self.target, n + j) for j in range(1 + W)]
            drawn = [self.draw(row, n + j) for j, row in enumerate(rows)]
            a = next((j for j in range(W) if drawn[j] != x[n + j]), W)
            for j in range(1 + W):
                x[n + j + columns] = self.draw(rows[j], n + j + columns)
            x[n:n + 1 + W] = drawn
            result[n] = min(a, L - 1 - n)
            before, n = self.redraw(n + 1 + a, W, refresh, rows[1 + a:], before[1 + a:]), n + 1 + a
        return result


@pytest.mark.parametrize("refresh", [1, 3])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("model", [BagModel, RowsModel, Unguided], ids=lambda model: model.__name__)
def test_the_guesses_are_those_written_out(monkeypatch, model, window, refresh):
    """Every guess counts: a step accepts as many as are right. Some of the images are begun."""
    monkeypatch.setattr(specvis.decoding.graphs, "BUCKET", 1)  # no column is read that need not be
    target, small = model(1), near(model(1))
    sampling = settings(**VARIED | ({"guidance": 1.0} if model is Unguided else {}))
    m = method("jacobi", window=window, refresh=refresh)
    tokens, L = decode(target, CONDITION, PADDING_MASK, sampling).tokens, num_tokens(target)
    for counts in ([0] * B, [0, 5, L, 3, 11]):
        decoded = jacobi(m, sampling, target, draft_model=small_draft_model(small), known_tokens=begun(tokens, counts))
        assert torch.equal(decoded.tokens, tokens)
        for b, count in enumerate(counts):
            alone = jacobi(m, sampling[[b]], target, [b], known_tokens=tokens[[b], :count],
                           draft_model=small_draft_model(Within(small), [b]))
            expected = WrittenOut(target, small, sampling, b).num_accepted(m, tokens[b, :count].tolist())
            for num_accepted in (decoded.num_accepted[b], alone.num_accepted[0]):
                assert {p: n for p, n in enumerate(num_accepted.tolist()) if n >= 0} == expected, b


def test_as_many_first_guesses_are_right_as_there_are_refreshes():
    """By hand, of a small model that is the target: none is right before the token in front of it is."""
    for refresh in (1, 2, 3, 5):
        decoded = jacobi(method("jacobi", window=7, refresh=refresh), settings(temperature=0.0), Counting(0),
                         draft_model=small_draft_model(Counting(0)))
        assert decoded.num_accepted[:, 1].tolist() == [refresh] * B


def test_a_forward_gives_more_tokens(tiny, monkeypatch):  # noqa: F811
    """The small model is the target. The shipped models: tests/slow/test_refresh.py."""
    def tau(name):
        return tiny.tokens(["red heart"] * 32, name, Sampling.of(list(range(32)), guidance=1.5)).tau.mean()

    few, *more = (tau("jacobi:window=5" + suffix) for suffix in ("", ":refresh=1", ":refresh=2", ":refresh=3"))
    assert few < 1.8 and all(b > a + 0.5 for a, b in zip([few, *more], more))
    with monkeypatch.context() as patch:
        patch.setattr(specvis.decoding.refresh, "TRUST", 0.0)
        assert few + 0.2 < tau("jacobi:window=5:refresh=2") < more[1] - 0.2
    monkeypatch.setattr(specvis.decoding.graphs, "BUCKET", 1)  # no column is read that need not be
    assert tau("jacobi:window=5:refresh=2") == more[1]


class Forbids(BagModel):
    """Three ids have logits of a number, which is as good as -inf."""

    number = -1e4

    def logits(self, hidden):
        return super().logits(hidden).masked_fill(torch.arange(VOCAB) < 3, self.number)


def test_ids_that_both_models_forbid():
    def decoded(number):
        model = Forbids(1)
        model.number = number
        return jacobi(method("jacobi", window=5, refresh=2), model=model, draft_model=small_draft_model(model))

    expected, forbidden = decoded(-1e4), decoded(-torch.inf)
    assert torch.equal(forbidden.tokens, expected.tokens)
    assert torch.equal(forbidden.num_accepted, expected.num_accepted) and expected.tau.mean() > 2


class NotFinite(BagModel):
    """Gives logits that are not finite, of request 1."""

    def logits(self, hidden):
        return super().logits(hidden).masked_fill((torch.arange(len(hidden)) % B == 1)[:, None, None], torch.nan)


def test_a_small_model_that_fails_costs_guesses_alone():
    m = method("jacobi", window=5, refresh=2)
    whole, decoded = (jacobi(m, draft_model=small_draft_model(model)) for model in (BagModel(2), NotFinite(2)))
    assert torch.equal(decoded.tokens, whole.tokens) and not decoded.failed.any()
    others = [0, 2, 3, 4]
    assert torch.equal(decoded.num_accepted[others], whole.num_accepted[others])


class Likeliest7:
    """A draft model that knows nothing. Its cache has no `select`."""

    reads_hidden = False

    def __init__(self, rows):
        self.prefix_len, self.padding_mask = 1, torch.ones(rows, 1, dtype=torch.bool)

    def new_cache(self, columns):
        return object()

    def prefill(self, hidden, cache):
        pass

    def extend(self, tokens, *others):
        return torch.zeros(*tokens.shape, 1)

    def logits(self, hidden):
        return 9.0 * (torch.arange(64) == 7).expand(*hidden.shape[:2], -1)


def test_any_draft_model_may_guess(tiny):  # noqa: F811
    """Images that are finished stay in the batch where a cache has no `select`."""
    condition = tiny.gpt.condition(tiny.words(tiny.words.encode(PROMPTS[:4])))
    sampling, known_tokens = Sampling.of([0, 1, 2, 3]), torch.full((4, 14), -1)
    known_tokens[1:] = 7
    expected = decode(tiny.gpt, *condition, sampling, known_tokens=known_tokens).tokens
    decoded = jacobi_decode(tiny.gpt, *condition, sampling, method("jacobi", window=3, refresh=2),
                            draft_model=Likeliest7(8), known_tokens=known_tokens)
    assert torch.equal(decoded.tokens, expected) and decoded.target_forwards[0] > decoded.target_forwards[1:].max()


def test_draft_models_that_do_not_fit_are_refused(tiny):  # noqa: F811
    m, sampling = method("jacobi", refresh=1), Sampling.of([0] * 4)
    condition, padding_mask = tiny.gpt.condition(tiny.words(tiny.words.encode(PROMPTS[:4])))
    small = SmallDraftModel(tiny.gpt, *cfg_inputs(tiny.gpt, condition, padding_mask))
    for draft_model, message in (
            (None, "must be one whose reads_hidden is False, as a SmallDraftModel, for jacobi:refresh=1, got None"),
            (eagle(tiny, padding_mask), "must be one whose reads_hidden is False, .*, got EagleDraftModel"),
            (Wrong(small, grid=5), "grid must be the target's, 4, got 5"),
            (small.select([0, 1]), r"padding_mask must be bool \(R=8, prefix_len=3\)")):
        with pytest.raises(ValueError, match=f"draft_model.?{message}"):
            jacobi_decode(tiny.gpt, condition, padding_mask, sampling, m, draft_model=draft_model)
