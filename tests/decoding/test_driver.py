"""The running batch: an image that takes the row of a finished one has the tokens and accounts that it has alone."""
import dataclasses

import pytest
import torch

from specvis.decoding.draft_model import SmallDraftModel
from specvis.decoding.driver import POLL
from specvis.decoding.jacobi import jacobi_decode
from specvis.decoding.methods import method, parse_method
from specvis.decoding.sampling import Sampling, cfg_inputs
from specvis.decoding.speculative import speculative_decode
from tests.models.test_interface import CONDITION, NEIGHBORS, PADDING_MASK, BagModel, Columns
from tests.tiny import tiny_pipeline

N, L = 5, 16
PROMPTS = ["red heart", "blue heart", "plain red heart", "heart", "plain blue"]
NAMES = ["vanilla", "jacobi:window=5", "jacobi:window=5:refresh=2", "jacobi:window=4:seed_exact=false",
         "eagle1", "eagle1:seed_exact=true", "eagle2", "eagle2:draft_model=small",
         "lantern:k=8", "adt-tree", "adt-tree+lantern:k=8:nodes=12", "cool-sd"]
FEW = ["vanilla", "jacobi:window=5", "jacobi:window=5:refresh=2", "eagle1",
       "adt-tree+lantern:k=8:nodes=12"]  # all: tests/slow/test_asked_of_all.py
BATCHES = [3, 2, 1]


@pytest.fixture(scope="module")
def tiny():
    """A target that looks back much, so that a token depends on the condition and on all tokens before it. It is the
    draft model, too, so that many drafts are accepted."""
    pipeline = tiny_pipeline()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for layer in pipeline.gpt.layers:
            for weight in (layer.attention.wqkv.weight, layer.attention.wo.weight):
                weight.normal_(std=0.4)
    pipeline.small = pipeline.gpt
    return pipeline


def settings():
    """Each request has its own."""
    return Sampling.of(list(range(N)), guidance=[2.0, 1.0, 3.0, 1.5, 2.0], temperature=[1.0, 0.0, 0.7, 1.0, 1.5],
                       top_k=[0, 10, 0, 30, 0], top_p=[1.0, 0.9, 1.0, 1.0, 0.8])


def begun(tiny, counts):
    """known_tokens: that many of each image."""
    tokens = tiny.tokens(PROMPTS, "vanilla", Sampling.of(list(range(50, 50 + N)))).tokens
    return tokens.masked_fill(torch.arange(L) >= torch.tensor(counts)[:, None], -1)[:, :max(counts)]


def assert_same(decoded, expected):
    """Excess is rounded as matrix products are."""
    for field in dataclasses.fields(expected)[:-1]:
        torch.testing.assert_close(getattr(decoded, field.name), getattr(expected, field.name), equal_nan=True,
                                   msg=lambda text, field=field: f"{field.name}: {text}")


def assert_the_batch_does_not_matter(tiny, name, batches, known_tokens=None):
    together = tiny.tokens(PROMPTS, name, settings(), known_tokens=known_tokens)
    for batch in batches:
        gained, calls = [], []

        def finished(requests, images, gained=gained, calls=calls):
            calls.append((requests, images, sum(gained)))

        queued = tiny.tokens(PROMPTS, name, settings(), gained.append, known_tokens=known_tokens, batch=batch,
                             finished=finished)
        assert_same(queued, together)
        assert sum(gained) == (L - together.num_known).sum()
        assert sorted(request for requests, *_ in calls for request in requests) == list(range(N))
        for requests, images, _ in calls:
            assert_same(images, together.select(requests))
        assert batch >= N or calls[0][2] < sum(gained)  # before the last is done
    return together


@pytest.mark.parametrize("name", FEW)
def test_a_request_does_not_depend_on_how_many_are_decoded_at_once(tiny, name):
    together = assert_the_batch_does_not_matter(tiny, name, [N, *BATCHES])
    for i in range(N):
        assert_same(tiny.tokens(PROMPTS[i:i + 1], name, settings()[[i]]), together.select([i]))


@pytest.mark.parametrize("counts", [[16, 16, 16, 7, 0], [0, 3, 16, 15, 16]], ids=str)
@pytest.mark.parametrize("name", FEW)
def test_requests_of_a_queue_may_be_begun_or_whole(tiny, name, counts):
    known_tokens = begun(tiny, counts)
    together = assert_the_batch_does_not_matter(tiny, name, BATCHES, known_tokens)
    assert together.num_known.tolist() == counts
    for i in range(N):
        alone = tiny.tokens(PROMPTS[i:i + 1], name, settings()[[i]], known_tokens=known_tokens[i:i + 1, :counts[i]])
        assert_same(alone, together.select([i]))


@pytest.mark.parametrize("name", ["vanilla", "jacobi:window=5", "eagle2"])
def test_a_queue_of_whole_images_decodes_none(tiny, name):
    known_tokens, calls = begun(tiny, [L] * N), []
    decoded = tiny.tokens(PROMPTS, name, settings(), known_tokens=known_tokens, batch=2,
                          finished=lambda requests, images: calls.extend(requests))
    assert torch.equal(decoded.tokens, known_tokens) and sorted(calls) == list(range(N))


@pytest.mark.parametrize("name", FEW)
def test_the_device_may_be_looked_at_now_and_then(tiny, monkeypatch, name):
    known_tokens = begun(tiny, [0, 16, 2, 9, 1])
    expected = tiny.tokens(PROMPTS, name, settings(), known_tokens=known_tokens)
    monkeypatch.setitem(POLL, "cpu", 3)
    for batch in (1, 2):
        assert_same(tiny.tokens(PROMPTS, name, settings(), known_tokens=known_tokens, batch=batch), expected)


@pytest.mark.parametrize("name", ["jacobi:window=5", "eagle2"])
def test_a_finished_image_is_reported_while_others_go_on(tiny, name):
    """Where nobody waits for its place, too."""
    known_tokens, gained, calls = begun(tiny, [0, 15, 0, 8, 0]), [], []
    tiny.tokens(PROMPTS, name, settings(), gained.append, known_tokens=known_tokens,
                finished=lambda requests, images: calls.append((requests, sum(gained))))
    assert calls[0][0] == [1] and calls[0][1] < sum(gained) and len(calls) > 2


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("name", FEW)
def test_a_request_that_fails_leaves_its_place_clean(tiny, monkeypatch, name, batch):
    """Its whole row of the caches is NaN; what a draft model reads of the target then is, too."""
    whole = tiny.tokens(PROMPTS, name, settings(), batch=batch)
    caches, gained, failed, new_cache = [], [], [], tiny.gpt.new_cache

    def remembered(rows, columns):
        caches.append(new_cache(rows, columns))
        return caches[-1]

    def progress(num_tokens):
        gained.append(num_tokens)
        if len(gained) == 2:  # after the first step
            for cache in caches:
                if cache.data.shape[1] == 2 * batch:
                    cache.data[:, 1] = torch.nan

    def finished(requests, images):
        failed.extend(request for request, fails in zip(requests, images.failed.tolist()) if fails)

    monkeypatch.setattr(tiny.gpt, "new_cache", remembered)
    broken = tiny.tokens(PROMPTS, name, settings(), progress, batch=batch, finished=finished)
    others = [0, 2, 3, 4]
    assert_same(broken.select(others), whole.select(others))
    assert failed == [1] and broken.failed.tolist() == [False, True, False, False, False]
    steps = (broken.num_accepted[1] >= 0).nonzero()[:, 0].tolist()
    assert steps[0] == 1 and len(steps) == 2                       # it failed in its second step
    assert torch.equal(broken.tokens[1, :steps[1]], whole.tokens[1, :steps[1]])
    assert broken.tokens[1, steps[1]:].eq(0).all() and whole.tokens[1, steps[1]:].any()
    assert sum(gained) == N * L


def test_the_baseline_counts_a_picture_that_fails_as_others_do(tiny):
    """`decode` reads all images to the end, but an image's accounts end where it does."""
    code = tiny.tokens(PROMPTS, "vanilla", settings()).tokens[0, 6].item()
    embedding = tiny.gpt.tok_embeddings.weight[code].clone()
    tiny.gpt.tok_embeddings.weight[code] = torch.nan
    together, queued = (tiny.tokens(PROMPTS, "vanilla", settings(), batch=batch) for batch in (None, 2))
    tiny.gpt.tok_embeddings.weight[code] = embedding
    assert together.failed.any() and not together.failed.all()
    assert_same(queued, together)


@pytest.mark.parametrize("name", [
    "lantern:k=8", "eagle1:draft_model=small", "eagle1:draft_model=small:seed_exact=true", "eagle2:draft_model=small",
    "adt-tree", "adt-tree:start=vertical", "adt-tree:start=random", "adt-tree:start=tokenflock", "cool-sd:tree=chain-3",
    "jacobi:window=2:seed_exact=false", "jacobi:window=4:seed_exact=false:k=8:delta=0.3"])
def test_whatever_a_step_needs_of_an_image_takes_its_place(tiny, name):
    """These methods have settings, caches and random numbers that the ones above do not have."""
    assert_the_batch_does_not_matter(tiny, name, [2, 1])


@pytest.mark.parametrize("arguments, message", [
    ({"batch": 0}, "batch must be a whole number of at least 1, or None for all images at once, got 0"),
    ({"batch": 2.0}, "batch must be a whole number of at least 1, or None for all images at once, got 2.0"),
    ({"batch": True}, "batch must be a whole number of at least 1, or None for all images at once, got True"),
    ({"batch": 2, "method": [method("eagle2"), *[method("eagle2", depth=3)] * 4]},
     "batch must be None where requests have several methods, got 2 for 5 requests with eagle2 and others"),
    ({"batch": 2, "observe": print}, "batch must be None where someone observes the steps, got 2 for 5 requests"),
    ({"finished": print, "method": ["eagle2", "vanilla", *["eagle2"] * 3]},
     "finished must be None where prompts have methods of several families, got eagle2, vanilla"),
])
def test_what_a_queue_is_not(tiny, arguments, message):
    for name in ("eagle2", "jacobi"):
        with pytest.raises(ValueError) as error:
            tiny.tokens(PROMPTS, **{"method": name, "sampling": settings()} | arguments)
        assert str(error.value) == message


class Insertable(Columns):
    def insert(self, rows, source):
        self.data[rows] = source.data


class QueueModel(BagModel):
    """A user's model whose cache has `insert`, but no `select`: the batch is never compacted."""

    def new_cache(self, rows, columns):
        return Insertable(rows, columns, self.of_token.shape[1])


class Whole:
    """The control: a draft model that cannot be asked for some requests alone."""

    reads_hidden = False

    def __init__(self, draft_model):
        for name in ("prefix_len", "padding_mask", "new_cache", "prefill", "extend", "logits"):
            setattr(self, name, getattr(draft_model, name))


def decoded(model, name, batch=None, small=None, of=lambda draft_model: draft_model, guidance=1.5):
    m, sampling = parse_method(name), Sampling.of(list(range(N)), guidance=guidance)
    draft_model = of(SmallDraftModel(small or model, *cfg_inputs(model, CONDITION, PADDING_MASK)))
    if m.drafting in ("jacobi", "none"):
        return jacobi_decode(model, CONDITION, PADDING_MASK, sampling, [m] * N, NEIGHBORS, batch=batch,
                             draft_model=draft_model)
    return speculative_decode(model, draft_model, CONDITION, PADDING_MASK, sampling, [m] * N, NEIGHBORS, batch=batch)


class Unguided(QueueModel):
    has_guidance, num_rows = False, 0

    def extend(self, tokens, nodes, cache):
        self.num_rows = max(self.num_rows, len(tokens))
        return super().extend(tokens, nodes, cache)


@pytest.mark.parametrize("name", ["jacobi", "jacobi:window=5:refresh=2", "gsd", "eagle1", "eagle2", "speculative"])
def test_a_model_without_guidance_reads_one_row_of_each_request(name):
    name += "" if parse_method(name).drafting == "jacobi" else ":draft_model=small"
    expected = decoded(QueueModel(1), name, guidance=1.0)
    for batch in (None, 2):
        model = Unguided(1)
        assert_same(decoded(model, name, batch, guidance=1.0), expected)
        assert model.num_rows == (batch or N)
    with pytest.raises(ValueError, match="guidance must be 1 for Unguided, which has nothing to measure it"):
        decoded(model, name)


@pytest.mark.parametrize("name", ["vanilla", "jacobi:window=16", "jacobi:window=5:refresh=2", "eagle1", "eagle2"])
def test_a_model_of_ones_own_takes_part_if_its_cache_has_insert(name):
    expected = decoded(BagModel(1), name)
    for batch in (1, 2, 5, 9):
        assert_same(decoded(QueueModel(1), name, batch), expected)
    assert_same(decoded(BagModel(1), name, N), expected)  # nobody waits
    with pytest.raises(ValueError, match="batch must be None for BagModel: its cache has no method insert, by which"):
        decoded(BagModel(1), name, 2)
    if parse_method(name).drafting in ("jacobi", "none") and "refresh" not in name:
        return
    with pytest.raises(ValueError, match="batch must be None for SmallDraftModel: it has no method select, or"):
        decoded(QueueModel(1), name, 2, BagModel(1))
    with pytest.raises(ValueError, match="batch must be None for Whole: it has no method select, or its cache"):
        decoded(QueueModel(1), name, 2, of=Whole)
    assert_same(decoded(QueueModel(1), name, of=Whole), expected)
