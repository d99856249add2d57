"""`python -m specvis.train STAGE`: a command per stage.

In the order data, tokenizer, gpt, drafter, small, mar, mar-draft, export.
"""
from importlib import import_module

import click

from ..cli.options import Commands

STAGES = {
    "data": "Fetch and render the pictures.",
    "tokenizer": "Train the tokenizer and tokenize the pictures.",
    "gpt": "Train the GPT on the tokens.",
    "drafter": "Train the drafter on the GPT.",
    "small": "Train a smaller GPT that drafts on its own.",
    "mar": "Train the MAR on the tokenizer's continuous latents.",
    "mar-draft": "Train a smaller MAR that drafts.",
    "export": "Put the trained parts together.",
}


class Stages(Commands):
    """A stage is imported when it is asked for, so that it runs without what only another one needs."""

    def list_commands(self, context):
        return list(STAGES)

    def get_command(self, context, name):
        module = name.replace("-", "_")
        return getattr(import_module(f"{__package__}.{module}"), module) if name in STAGES else None

    def format_commands(self, context, formatter):
        with formatter.section("Stages"):
            formatter.write_dl(list(STAGES.items()))


@click.group(cls=Stages, context_settings={"help_option_names": ["-h", "--help"]})
def main():
    """Reproduce the shipped model, stage by stage. Every stage resumes where an interruption left it."""


if __name__ == "__main__":
    main(prog_name="python -m specvis.train")
