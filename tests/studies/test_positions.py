"""What is said of each position of pictures."""
import pytest
import torch

from specvis.decoding.sampling import Sampling
from specvis.studies.positions import draw_margins, forward_numbers, target_hidden
from specvis_kernels import draw_tokens
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
    logits = sampling.probs(pipeline.gpt, target_hidden(pipeline, PROMPTS, tokens)[:, -16:])[0].log()
    positions = torch.arange(16).expand(2, -1)
    settings = (torch.ones(2), torch.tensor([float(temperature > 0)] * 2), torch.zeros(2, dtype=torch.int32),
                torch.ones(2), sampling.seeds, positions)
    for factor, is_same in ((0.99, True), (1.01, False)):
        lowered = logits.scatter_add(2, tokens[..., None], -factor * margins[..., None])
        assert ((draw_tokens(lowered, None, *settings).tokens == tokens) == is_same).all()
