"""What tests of decoding do with small models of pictures, and the distribution that the pictures must have."""
import math

import torch

from specvis.decoding.draft_model import EagleDraftModel
from specvis.decoding.methods import METHODS, method
from specvis.decoding.sampling import Sampling, cfg_inputs
from specvis.pipelines.positions import target_hidden
from specvis_kernels import guided_probs

PROMPTS = ["red heart", "blue heart", "plain red heart", "heart"]


def fitted(name, **parameters):
    """The recipe, with no more neighbors than a small codebook has, and with a window that no clock chooses."""
    changed = {"k": 8} if METHODS[name].acceptance.k else {"window": 16} if name == "jacobi" else {}
    return method(name, **changed | parameters)


def coupled(**parameters):
    return method("jacobi", **{"seed_exact": False, "window": 3} | parameters)


def eagle(pipeline, padding_mask):
    condition = pipeline.gpt.null_condition(len(padding_mask))
    return EagleDraftModel(pipeline.gpt, pipeline.eagle, *cfg_inputs(pipeline.gpt, condition, padding_mask))


def begun(tokens, counts):
    """The first counts[b] tokens of each image, -1 after them."""
    return torch.where(torch.arange(tokens.shape[1]) < torch.tensor(counts)[:, None], tokens, -1)[:, :max(counts)]


TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0))


def exact_pictures(pipeline, prompt, sampling):
    """The probability of each of the V**L pictures, (V**L,) float64: the chain rule over teacher-forced reading."""
    V, L = pipeline.gpt.config.vocabulary, pipeline.gpt.config.tokens
    pictures = torch.cartesian_prod(*[torch.arange(V)] * L)
    each = sampling[[0] * len(pictures)]
    with torch.inference_mode():
        hidden = target_hidden(pipeline, [prompt] * len(pictures), pictures)
        target = guided_probs(**each.rows(pipeline.gpt.logits(hidden[:, -L:]))).probs
    return target.double().gather(-1, pictures[..., None])[..., 0].prod(-1)


def chi_square(tokens, probs, V):
    """How many standard deviations the sampled pictures lie from `probs`. Rare cells are put together."""
    cells = (tokens * V ** torch.arange(tokens.shape[1] - 1, -1, -1)).sum(-1)
    count = torch.bincount(cells, minlength=len(probs)).double()
    expected = probs * len(tokens)
    rare = expected < 10
    count = torch.cat([count[~rare], count[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    freedom = len(count) - 1
    statistic = ((count - expected).square() / expected.clamp(min=1e-9)).sum().item()
    return 3 * math.sqrt(freedom / 2) * ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom))  # Wilson-Hilferty


def sampled_pictures(pipeline, m, settings, requests=100_000, batch=25_000):
    """400,000 tokens: enough to see a law that is off by a total variation of 0.02 or less, as tests below show."""
    parts = [pipeline.tokens(["red heart"] * batch, m, Sampling.of(list(range(i, i + batch)), **settings)).tokens
             for i in range(0, requests, batch)]
    return torch.cat(parts)


def far_from_target(pipeline, m, settings, requests=100_000):
    probs = exact_pictures(pipeline, "red heart", Sampling.of([0], **settings))
    assert abs(probs.sum() - 1) < 1e-4
    return chi_square(sampled_pictures(pipeline, m, settings, requests), probs, pipeline.gpt.config.vocabulary)


UNFILTERED, FILTERED = {"guidance": 2.0}, {"guidance": 1.0, "temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.1}
DYNAMIC = {"depth": 2, "width": 3, "nodes": 8, "seed_exact": False}  # where seed-exact, equality proves the law
