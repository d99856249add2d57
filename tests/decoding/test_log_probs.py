"""Log-probabilities of decoded tokens, against a teacher-forced forward over the finished images."""
import pytest
import torch

from specvis.decoding.driver import new_cache, read_known
from specvis.decoding.methods import METHODS, method
from specvis.decoding.sampling import cfg_inputs
from tests.tiny import tiny_pipeline

PROMPTS, SEEDS = ["red heart", "blue heart", "plain heart"], [3, 4, 5]
SETTINGS = dict(guidance=[1.5, 1.0, 3.0], temperature=[1.0, 0.0, 0.7], top_k=[20, 0, 0], top_p=[1.0, 1.0, 0.9])
DISCRETE = {name: method(name, k=5) if m.acceptance.metric in ("l2", "raw") and m.acceptance.k else m
            for name, m in METHODS.items() if hasattr(m, "drafting")}


@pytest.fixture(scope="module")
def pipeline():
    return tiny_pipeline()


def sampling(pipeline, log_probs=True):
    return pipeline.sampling(seeds=SEEDS, **SETTINGS, log_probs=log_probs)


@torch.inference_mode()
def teacher_forced(pipeline, tokens, temperature):
    """Guided logits of all positions / temperature (B, L, V), in float64, by one forward over the whole images."""
    condition, padding_mask = pipeline.gpt.condition(*pipeline.source(PROMPTS))
    condition, padding_mask = cfg_inputs(pipeline.gpt, condition, padding_mask)
    (B, L), S = tokens.shape, condition.shape[1]
    hidden = read_known(pipeline.gpt, condition, padding_mask, tokens, torch.zeros_like(tokens),
                        new_cache(pipeline.gpt, 2 * B, S + L))
    cond, uncond = pipeline.gpt.logits(hidden[:, S - 1:-1]).double().chunk(2)
    guided = uncond + torch.tensor(SETTINGS["guidance"])[:, None, None].double() * (cond - uncond)
    return guided / torch.tensor(temperature)[:, None, None].double()


def expected(pipeline, tokens, temperature=(1.0, 1.0, 0.7)):
    """Log-probabilities of the tokens (B, L) with and without filters, by sorting. Request 1 is greedy."""
    x = teacher_forced(pipeline, tokens, temperature)
    full = x.log_softmax(-1)
    ordered, index = x.sort(-1, descending=True)
    mass = ordered.softmax(-1)
    is_kept = torch.ones_like(x, dtype=torch.bool)
    is_kept[0, :, 20:] = False
    is_kept[1, :, 1:] = False
    is_kept[2] = mass[2].cumsum(-1) - mass[2] < 0.9
    is_kept = torch.zeros_like(is_kept).scatter(-1, index, is_kept)
    sampled = x.masked_fill(~is_kept, -torch.inf).log_softmax(-1)
    return [y.gather(-1, tokens[..., None])[..., 0].float() for y in (sampled, full)]


@pytest.mark.parametrize("name", DISCRETE)
def test_agree_with_a_forward_over_the_image(pipeline, name):
    """Of lossy methods, too: the target's distributions, in which a lent token may have no probability."""
    decoded = pipeline.tokens(PROMPTS, DISCRETE[name], sampling(pipeline))
    sampled, full = expected(pipeline, decoded.tokens)
    torch.testing.assert_close(decoded.log_probs.full, full, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(decoded.log_probs.sampled, sampled, rtol=1e-4, atol=1e-4)
    assert not METHODS[name].lossless or decoded.log_probs.sampled.isfinite().all()
    wrong = expected(pipeline, decoded.tokens, temperature=(1.1, 1.1, 0.8))[1]
    assert ((decoded.log_probs.full - wrong).abs() > 1e-3).any(1).all()


@pytest.mark.parametrize("name", ["vanilla", "jacobi", "jacobi:window=5:refresh=2", "eagle2"])
def test_same_seed_same_log_probs(pipeline, name):
    """Whatever the method, whether the images take turns, and with known tokens, which have none."""
    plain = pipeline.tokens(PROMPTS, "vanilla", sampling(pipeline))
    queued = pipeline.tokens(PROMPTS, name, sampling(pipeline), batch=1)
    known = pipeline.tokens(PROMPTS, name, sampling(pipeline), known_tokens=plain.tokens[:, :6])
    for ours, of_queue, after_known in zip(plain.log_probs, queued.log_probs, known.log_probs):
        torch.testing.assert_close(of_queue, ours)
        torch.testing.assert_close(after_known[:, 6:], ours[:, 6:])
        assert not after_known[:, :6].any()


@pytest.mark.parametrize("name", ["vanilla", "jacobi", "gsd", "eagle2", "lantern"])
def test_without_them_nothing_else_changes(pipeline, name):
    with_them, without = (pipeline.tokens(PROMPTS, DISCRETE[name], sampling(pipeline, x)) for x in (True, False))
    assert without.log_probs is None and torch.equal(with_them.tokens, without.tokens)
    assert torch.equal(with_them.target_forwards, without.target_forwards)


@pytest.mark.parametrize("name", ["vanilla", "jacobi", "gsd", "eagle1", "lantern"])
def test_an_image_that_fails_at_once_has_none(pipeline, name, monkeypatch):
    monkeypatch.setattr(pipeline.gpt, "logits", lambda hidden: torch.full((*hidden.shape[:2], 64), torch.nan))
    decoded = pipeline.tokens(PROMPTS, DISCRETE[name], sampling(pipeline))
    assert decoded.failed.all() and not any(x.any() for x in decoded.log_probs)


@pytest.mark.parametrize("name", ["vanilla", "jacobi", "jacobi:window=5:refresh=2", "gsd", "eagle1", "eagle2"])
def test_an_image_that_fails_has_none_from_there_on(pipeline, name, monkeypatch):
    """The target's logits are NaN after one of the image's tokens. Images beside it go on."""
    plain = pipeline.tokens(PROMPTS, name, sampling(pipeline))
    bad = plain.tokens[0, 7].item()  # reading this token makes the next logits NaN
    embed = pipeline.gpt.tok_embeddings
    monkeypatch.setitem(embed._forward_hooks, -1, lambda module, args, out: out.masked_fill(
        (args[0] == bad)[..., None], torch.nan))
    decoded = pipeline.tokens(PROMPTS, name, sampling(pipeline))
    assert decoded.failed[0]
    for failed, tokens, log_probs in zip(decoded.failed, decoded.tokens, zip(*decoded.log_probs)):
        first = (tokens == bad).nonzero()[0].item() + 1 if failed else len(tokens)
        for x in log_probs:
            assert x.isfinite().all() and not x[first:].any()
    assert not decoded.log_probs.full[0, 8:].any() and decoded.log_probs.full[0, :3].any()
