"""`python -m training STAGE`: a command per stage.

In the order data, tokenizer, gpt, eagle, small, mar, mar-draft, export.
"""
import click

from specvis.cli.commands import Commands


@click.group(cls=Commands, package=__package__, imported={
    "data": "Fetch and render the pictures.",
    "tokenizer": "Train the tokenizer and tokenize the pictures.",
    "gpt": "Train the GPT on the tokens.",
    "eagle": "Train an EAGLE head on the GPT, or on another target.",
    "small": "Train a smaller GPT that drafts on its own.",
    "mar": "Train the MAR on the tokenizer's continuous latents.",
    "mar-draft": "Train a smaller MAR that drafts.",
    "export": "Put the trained parts together.",
}, context_settings={"help_option_names": ["-h", "--help"]})
def main():
    """Reproduce the shipped model, stage by stage. Every stage resumes where an interruption left it."""
