"""Fixtures of all tests of decoding: small models."""
import pytest
import torch

from specvis.models.llamagen import GPTConfig
from specvis.models.vq import VQConfig
from specvis.pipelines.discrete import Pipeline
from tests.tiny import tiny_pair, tiny_pipeline


@pytest.fixture(scope="module")
def tiny():
    return tiny_pipeline()


@pytest.fixture(scope="module")
def twins():
    """The draft model is the target itself, so that many of its drafts are accepted."""
    pipeline = tiny_pipeline()
    pipeline.small = pipeline.gpt
    return pipeline


@pytest.fixture(scope="module")
def minute():
    """Four tokens of five codes: small enough to know the probability of every picture."""
    torch.manual_seed(3)
    config = GPTConfig(dim=8, layers=1, heads=2, vocabulary=5, grid=2, condition_tokens=2, caption_dim=4,
                       ffn_multiple=8)
    vq_config = VQConfig(channels=4, decoder_channels=4, multipliers=(1,), residual_blocks=1, z_channels=4,
                         codebook_size=5, codebook_dim=2, groups=2)
    pipeline = Pipeline(config, vq_config, ["", "red", "heart"])
    for weight in (pipeline.gpt.output.weight, pipeline.gpt.tok_embeddings.weight):
        weight.data.normal_(std=0.5)
    return pipeline


@pytest.fixture(scope="module")
def pair():
    return tiny_pair()
