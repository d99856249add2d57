"""What is said of each position of pictures."""
import pytest
import torch

import specvis.models.layers
from specvis.decoding.sampling import Sampling
from specvis.pipelines.positions import (
    ROUNDING_STEPS,
    draw_margins,
    forward_numbers,
    is_near_a_filter,
    logit_rounding,
    target_hidden,
)
from specvis_kernels import draw_tokens, guided_probs, gumbel_noise
from tests.tiny import tiny_pipeline

PROMPTS = ["red heart", "blue heart"]


@pytest.fixture(scope="module")
def pipeline():
    return tiny_pipeline()


def test_the_forward_that_drew_each_token():
    drafted = [-1, 2, -1, -1, 0, 1, -1]                       # the first token is the one of the condition's forward
    assert forward_numbers(torch.tensor([drafted, [0] * 7])).tolist() == [[0, 1, 1, 1, 2, 3, 3], list(range(7))]


@pytest.mark.parametrize("name", ["vanilla", "jacobi:window=3", "eagle2", "speculative"])
def test_the_last_token_is_of_the_last_forward(pipeline, name):
    decoded = pipeline.tokens(PROMPTS, name, Sampling.of([0, 1]))
    numbers = forward_numbers(decoded.num_accepted)
    assert (numbers[:, 0] == 0).all() and torch.equal(numbers[:, -1] + 1, decoded.target_forwards)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_margin_is_what_another_token_lacks(pipeline, temperature):
    """The drawn token stays the best if its logit falls by a little less than the margin, and not by a little more."""
    sampling = Sampling.of([3, 4], temperature=temperature, top_k=20)
    tokens = pipeline.tokens(PROMPTS, "vanilla", sampling).tokens
    margins = draw_margins(pipeline, PROMPTS, tokens, sampling)
    logits = pipeline.gpt.logits(target_hidden(pipeline, PROMPTS, tokens)[:, -16:])
    logits = guided_probs(**sampling.rows(logits)).probs.log()
    positions = torch.arange(16).expand(2, -1)
    settings = (torch.ones(2), torch.tensor([float(temperature > 0)] * 2), torch.zeros(2, dtype=torch.int32),
                torch.ones(2), sampling.seeds, positions)
    for factor, is_same in ((0.99, True), (1.01, False)):
        lowered = logits.scatter_add(2, tokens[..., None], -factor * margins[..., None])
        assert ((draw_tokens(lowered, None, *settings).tokens == tokens) == is_same).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_forwards_round_logits_by_no_more(monkeypatch, dtype):
    """One of all positions, and one for each. By modules: the kernels have one order of sums."""
    monkeypatch.setattr(specvis.models.layers, "USE_KERNELS", False)
    pipeline, sampling, read = tiny_pipeline().to(dtype), Sampling.of([3]), []
    tokens, logits = pipeline.tokens(PROMPTS[:1], "vanilla", sampling).tokens, pipeline.gpt.logits
    with torch.inference_mode():
        at_once = logits(target_hidden(pipeline, PROMPTS[:1], tokens))[:, -16:].float()
    monkeypatch.setattr(pipeline.gpt, "logits", lambda hidden: read.append(logits(hidden)) or read[-1], raising=False)
    pipeline.tokens(PROMPTS[:1], "vanilla", sampling)
    one_by_one = torch.cat([row[:, -1:].float() for row in read], 1)
    allowed = torch.tensor([logit_rounding(pipeline, PROMPTS[0], tokens, position) for position in range(16)])
    torch.testing.assert_close(allowed, ROUNDING_STEPS * torch.finfo(dtype).eps * at_once.abs().amax((0, 2)))
    change = (one_by_one - at_once).abs().amax((0, 2))
    assert (change <= allowed).all() and change.any()


def test_rounding_can_change_what_a_filter_keeps(pipeline):
    """At a top-p that just keeps the token which would be drawn of all ids."""
    sampling = Sampling.of([3])
    tokens = pipeline.tokens(PROMPTS[:1], "vanilla", sampling).tokens
    logits = pipeline.gpt.logits(target_hidden(pipeline, PROMPTS[:1], tokens)[:, -16:])
    probs = guided_probs(**sampling.rows(logits)).probs
    scores = probs.log() + gumbel_noise(sampling.seeds, torch.arange(16)[None], probs.shape[-1])
    mass = probs.gather(2, scores.argmax(-1, keepdim=True))
    above = torch.where(probs > mass, probs, 0.0).sum(-1)[0]
    positions = (above > 0.1).nonzero()[:, 0].tolist()
    assert len(positions) > 5
    for position in positions:
        near = [is_near_a_filter(pipeline, PROMPTS[0], tokens, Sampling.of([3], top_p=top_p), position, 1e-4)
                for top_p in (above[position].item(), above[position].item() + mass[0, position, 0].item() / 2)]
        assert near == [True, False]
