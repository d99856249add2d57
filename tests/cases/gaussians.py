"""Inputs of the ops on continuous tokens."""
import torch

from tests.cases.common import CASES, DEVICE

# Each variant; requests of different temperatures and numbers of drafts.
CASES["accept_gaussian"] = [
    (1, 1, 1),
    (2, 5, 16),
    (3, 7, 33, {"temperature": (42.0, 1.0, 0.5), "truncate": False, "variant": "released"}),
    (3, 40, 4, {"variant": "path", "num_drafted": (40, 0, 5)}),
]


def gaussian_pair(B, G, C, g, apart=0.5):
    """Means and log sigmas of a target and of a draft that is a little off, and tokens of the draft."""
    target_means = torch.randn(B, G, C, generator=g)
    target_log_sigmas = torch.randn(B, G, C, generator=g) / 2 - 2
    draft_log_sigmas = target_log_sigmas + torch.randn(B, G, C, generator=g) / (4 * C**0.5)
    shift, noise = torch.randn(2, B, G, C, generator=g)
    draft_means = target_means + apart / C**0.5 * shift * target_log_sigmas.exp()
    tokens = draft_means + noise * draft_log_sigmas.exp()
    return tokens, (target_means, target_log_sigmas, draft_means, draft_log_sigmas)


def accept_gaussian(B, G, C, options=None):
    options = {"variant": "paper", "truncate": True} | (options or {})
    g = torch.Generator().manual_seed(B + G + C)
    tokens, last_step = gaussian_pair(B, G, C, g)
    log_ratio, uniforms = torch.randn(B, G, generator=g) / 4, torch.rand(B, G, generator=g)
    args = (tokens, log_ratio, uniforms, *(last_step if options["variant"] != "path" else 4 * [None]))
    if "temperature" in options:
        options["temperature"] = torch.tensor(options["temperature"]).repeat(B)[:B].to(DEVICE)
    if "num_drafted" in options:
        options["num_drafted"] = torch.tensor(options["num_drafted"], dtype=torch.int32).repeat(B)[:B].to(DEVICE)
    return tuple(None if a is None else a.to(DEVICE) for a in args), options


# Each variant; fewer and more tries than tokens; requests of different temperatures.
CASES["resample_gaussian"] = [
    (1, 1, 1, 1),
    (2, 5, 16, 20),
    (3, 7, 33, 9, {"temperature": (42.0, 1.0, 0.5), "variant": "released"}),
    (3, 5, 4, 18, {"variant": "path"}),
]


def resample_gaussian(B, G, C, M, options=None):
    """A third of the positions is accepted, a third is rejected."""
    options = {"variant": "paper"} | (options or {})
    g = torch.Generator().manual_seed(B + G + C + M)
    tokens, last_step = gaussian_pair(B, G, C, g, apart=1.0)
    third = torch.arange(1, B * G + 1).view(B, G) % 3
    path = options["variant"] == "path"
    log_ratio = torch.randn(B, G, M, generator=g) if path else torch.randn(B, G, generator=g) / 4
    proposals, fallback = torch.randn(B, G, M, C, generator=g), torch.randn(B, G, C, generator=g)
    uniforms = 0.5 + torch.rand(B, G, M, generator=g) / 2  # so that several tries are looked at
    last_step = 4 * [None] if path else last_step
    args = (tokens, third == 0, third == 1, proposals, log_ratio, uniforms, fallback, *last_step)
    if "temperature" in options:
        options["temperature"] = torch.tensor(options["temperature"]).repeat(B)[:B].to(DEVICE)
    return tuple(None if a is None else a.to(DEVICE) for a in args), options
