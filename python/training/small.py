"""A smaller GPT of the same family, which drafts on its own (LANTERN's Table 1 lets LlamaGen-L draft for the 3B)."""
import click
import torch

from specvis.pipelines.checkpoint import load_weights, read_weights

from .gpt import Tokens, captioned, train, training_options
from .stages import made


@click.command()
@training_options(96, 2, 3, batch=16, lr=2e-3)
def small(runs, dim, layers, heads, dropout, device, **training):
    """Train the smaller GPT on runs/tokens.npz, with the GPT's words; writes runs/small/gpt.safetensors."""
    torch.manual_seed(0)
    device = torch.device(device)
    tokens = Tokens(runs, device)
    words = made(runs / "gpt" / "words.safetensors", "gpt")
    model = captioned(tokens, dim, layers, heads, dropout, read_weights(words)["table.weight"].shape[1])
    load_weights(model.words, words)
    model.words.requires_grad_(False)
    train(runs / "small", model, tokens, device, inputs={words.name: words}, **training)
