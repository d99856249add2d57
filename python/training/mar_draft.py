"""A smaller MAR on the same tokens, which drafts for the other."""
import click

from .mar import train, training_options


@click.command("mar-draft")
@training_options(128, 2, 2, 192, 2, batch=16, lr=1.5e-3)
def mar_draft(runs, device, **training):
    """Train the smaller MAR on runs/data with the GPT's words; writes runs/mar_draft/mar.safetensors."""
    train(runs / "mar_draft", runs, device, **training)
