"""python -m specvis.train STAGE: one command per stage, in this order: data, tokenizer, gpt, drafter, ship."""
import click

from .data import data
from .drafter import drafter
from .gpt import gpt
from .ship import ship
from .tokenizer import tokenizer


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main():
    """Reproduce the shipped model, stage by stage. Every stage resumes where an interruption left it."""


for stage in (data, tokenizer, gpt, drafter, ship):
    main.add_command(stage)

if __name__ == "__main__":
    main(prog_name="python -m specvis.train")
