"""A toy pair of continuous models, where the target's distribution is known.

It denoises Gaussians in three steps. Their mean depends on the known tokens. Images of the loop are compared with
images of the target alone, by the Kolmogorov-Smirnov test on each token, on sums, differences and products.
"""
import math

import torch
from torch import nn

from specvis.decoding.continuous import continuous_decode, parallel_decode
from specvis.decoding.continuous_state import ContinuousSampling
from specvis.decoding.methods import parse_method
from specvis.models.diffloss import cosine_alpha_bar
from specvis.models.mar import MAR, MARConfig

PROMPTS = ["red heart", "blue heart", "plain red heart", "heart", "plain", "blue"]
SEEDS = torch.tensor([3, 1, 4, 1, 5, 9])
METHODS = ["cspd", "cspd:gamma=2:prefill=0.3:distance_temperature=20", "cspd:aligned=false", "cspd:truncate=false",
           "cspd-path", "cspd-path:gamma=7:prefill=0.5", "cspd-path:gamma=1:truncate=false",
           "cspd-path:conditioning=block", "cspd-released", "cspd-released:truncate=true"]
NUM_REQUESTS, ACCEPT_ABOVE, REFUSE_BELOW = 16384, 1e-4, 1e-8


class Perfect(nn.Module):
    """The output of a perfect network where tokens are N(z, sigma^2), with equal var_values everywhere."""

    def __init__(self, channels, sigma, var_values):
        super().__init__()
        self.sigma, self.var_values, self.alpha_bar = sigma, var_values, cosine_alpha_bar(1000).float()
        self.cond_embed = nn.Linear(channels, channels + 1, bias=False)      # the last is the time's
        self.cond_embed.weight.data = torch.eye(channels + 1, channels)

    def time_embed(self, timesteps):
        return timesteps[..., None] * self.cond_embed.weight.new_tensor([0.0] * self.cond_embed.in_features + [1.0])

    def forward(self, x, y):
        z, a = y[..., :-1], self.alpha_bar[y[..., -1:].nan_to_num().round().long()]
        epsilon = (1 - a).sqrt() * (x - a.sqrt() * z) / (a * self.sigma ** 2 + 1 - a)
        return torch.cat([epsilon, torch.full_like(epsilon, self.var_values)], -1)


class Toy(MAR):
    """z is the condition, plus `coupling` times the sum of the known tokens, plus a number for the position.
    `num_known` collects the number of known tokens of each row of each forward. A row of class 2 that knows `breaks`
    tokens or more gives NaN."""

    def __init__(self, sigma, shift=0.0, coupling=0.8, var_values=0.6, tokens=3, channels=1, breaks=math.inf):
        super().__init__(MARConfig(channels, 1, 0, 0, 1, 0, tokens=tokens, channels=channels, buffer=1, classes=3,
                                   num_sampling_steps=3))
        self.diffloss.net = Perfect(channels, sigma, var_values)
        self.class_emb.weight.data = torch.tensor([0.0, 1.0, 2.0])[:, None].repeat(1, channels)
        self.fake_latent.data.fill_(-0.5)
        self.shift, self.coupling, self.breaks, self.num_known = shift, coupling, breaks, []
        self.requires_grad_(False)

    def forward(self, tokens, is_known, condition, max_known=None, wanted=None):
        counts = is_known.sum(1)
        assert max_known is None or counts.max() <= max_known
        self.num_known.append(counts.tolist())
        z = condition + self.coupling * tokens.masked_fill(~is_known[..., None], 0.0).sum(1) + self.shift
        z = z.masked_fill(((counts >= self.breaks) & (condition[:, 0] == 2))[:, None], torch.nan)
        positions = torch.arange(self.config.tokens)[None] if wanted is None else wanted
        return z[:, None] + 0.2 * positions[..., None]


def toys(**settings):
    """Target and draft model."""
    return Toy(0.6, **settings), Toy(0.9, **{"shift": 0.7, "coupling": 0.5, "var_values": 0.7} | settings)


def classes(num_requests):
    return torch.arange(num_requests) % 2


def z_of(model, source, tokens, is_known):
    return model(tokens, is_known, model.condition(source))


def in_order(decoded, field="tokens"):
    """What is at the position of the n-th token, for n = 0, 1, .."""
    values = getattr(decoded, field)
    return values.gather(1, decoded.order[..., None].expand_as(values))


def features(decoded):
    """(B, F): the n-th tokens, the tokens at each position, and sums, differences and products of them."""
    x = in_order(decoded)
    parts = [x, decoded.tokens, x.diff(dim=1), x.cumsum(1), x[:, 1:] * x[:, :-1], x.cumsum(1)[:, :-1] * x[:, 1:]]
    parts += [x[..., :1] - x[..., 1:], x[..., :1] * x[..., 1:]]
    return torch.cat([part.flatten(1) for part in parts], 1).double()


def p_value(one, other):
    """Kolmogorov's two-sample test on each column (B, F): the smallest p times their number."""
    n, smallest = len(one), 1.0
    assert len(other) == n
    for a, b in zip(one.T.contiguous(), other.T.contiguous()):
        both = torch.cat([a, b]).sort().values
        gap = torch.searchsorted(a.sort().values, both, right=True) - torch.searchsorted(b.sort().values, both,
                                                                                         right=True)
        x = (gap.abs().max() / n).item() ** 2 * n / 2
        smallest = min(smallest, 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * x) for k in range(1, 101)))
    return min(1.0, smallest * one.shape[1])


REFERENCES = {}


def reference(channels=1, guidance=1.0, temperature=1.0):
    """Features of images that the target draws alone, with other seeds."""
    key = channels, guidance, temperature
    if key not in REFERENCES:
        sampling = ContinuousSampling(10 ** 6 + torch.arange(NUM_REQUESTS), guidance, temperature)
        REFERENCES[key] = features(parallel_decode(toys(channels=channels)[0], classes(NUM_REQUESTS), sampling))
    return REFERENCES[key]


def compare(m, channels=1, guidance=1.0, temperature=1.0):
    """The p-value of the method's images being the target's, and the images."""
    sampling = ContinuousSampling(torch.arange(NUM_REQUESTS), guidance, temperature)
    decoded = continuous_decode(*toys(channels=channels), classes(NUM_REQUESTS), sampling, parse_method(m))
    assert not decoded.failed.any()
    return p_value(features(decoded), reference(channels, guidance, temperature)), decoded


def decode(pair, m, seeds=SEEDS, prompts=PROMPTS, guidance=2.0, draft_model=None, **options):
    return continuous_decode(pair.mar, draft_model or pair.mar_draft, pair.features(prompts[:len(seeds)]),
                             ContinuousSampling(seeds, guidance), parse_method(m), **options)
