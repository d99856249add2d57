"""The command line: specvis generate | convert | compare | tune | methods | info."""
import os
import platform
import shutil
import textwrap
from dataclasses import fields
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler prints no line when it starts

import click  # noqa: E402  torch reads the variable when it is first imported

from ..interrupts import quiet  # noqa: E402
from ..terminal import printable  # noqa: E402
from .commands import Commands  # noqa: E402


@click.group(cls=Commands, package=__package__, imported={
    "generate": "Draw pictures of a prompt, side by side, or of each prompt of a file.",
    "convert": "Make a folder for --model from published checkpoints.",
    "compare": "Run methods side by side: pictures, plots, a table.",
    "tune": "Find the fastest window of jacobi for a model on this machine.",
}, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="specvis")
def main():
    """Pictures from words, token by token, with and without speculative decoding."""


def echo_wrapped(head: str, text: str) -> None:
    """A text wrapped at the terminal's width, beside its head."""
    width = max(60, min(120, shutil.get_terminal_size().columns))
    click.echo(textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * len(head)))


@main.command("methods")
@click.argument("name", required=False)
def list_methods(name):
    """List the decoding methods, or all parameters of the one of this NAME."""
    with quiet():
        from ..decoding.methods import (
            CONTINUOUS,
            CONTINUOUS_PARAMETERS,
            METHODS,
            PARAMETERS,
            format_value,
            parse_method,
            relaxing,
        )
        from ..decoding.trees import TREES, static_tree

    if name is not None:
        method = parse_method(name)
        echo_wrapped(f"{method.name:18}", method.source)
        every, also = method.parameters, relaxing(method)
        if not every:
            click.echo("\nno parameters")
        column = f"{'':21}{'default' if method.name == name else 'value'}"
        for heading, names in ((column, every.keys() - also), ("with seed_exact=false also:", also)):
            if names:
                click.echo(f"\n{heading}")
            for parameter in (parameter for parameter in every if parameter in names):
                unset = "by device" if parameter == "window" else "none"
                value = unset if every[parameter] is None else format_value(every[parameter])
                echo_wrapped(f"{parameter:21}{value:21}", (PARAMETERS | CONTINUOUS_PARAMETERS)[parameter])
        return
    for method in [*METHODS.values(), *CONTINUOUS.values()]:
        if method.name == next(iter(CONTINUOUS)):
            click.echo("\ncontinuous tokens:\n")
        echo_wrapped(f"{method.name:18}", method.source)
        parts = (method.drafts, method.acceptance) if method.name in METHODS else (method,)
        off = {field.name: field.default for part in parts for field in fields(part) if field.name != "draft_model"}
        settings = ", ".join(f"{name} {format_value(value)}" for name, value in method.parameters.items()
                             if value is not None and value != off.get(name))
        if settings:
            echo_wrapped(" " * 18, settings)
    click.echo("\nParameters that are off are not shown. All of a method's: specvis methods NAME\n"
               "To change some: --method jacobi:window=8, --methods gsd,lantern:delta=0.1:k=300\n")
    for name in TREES:
        tree = static_tree(name)
        click.echo(f"tree {name:24}{len(tree.parents) - 1} drafts on {tree.depth} levels")


@main.command()
@click.option("--model", type=click.Path(path_type=Path), help="Show what this folder holds instead.")
@click.option("--words", is_flag=True, help="List the words that prompts may have, of the shipped model or --model.")
def info(model, words):
    """Show which ops have which backends here, versions and devices."""
    if words:
        return list_words(model)
    if model is not None:
        with quiet():
            from .convert import described
        return click.echo("\n".join(map(printable, described(model))))
    with quiet():
        from importlib.metadata import PackageNotFoundError, version

        import torch

        import specvis_kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = ("oracle", "cpu", "triton", "cuda")
    click.echo(f"{'op':20}" + "".join(f"{name:>8}" for name in names))
    for op in (name for name in specvis_kernels.__all__ if name in specvis_kernels.ops()):
        backends = specvis_kernels.backends(op, device)
        click.echo(f"{op:20}" + "".join(f"{'yes' if name in backends else '-':>8}" for name in names))
    click.echo(f"(for {device} tensors; Triton runs on a CPU only under its interpreter, TRITON_INTERPRET=1)\n")
    folder = Path(specvis_kernels.__file__).parent
    for name, file, use in (("C++", "_ops.so", ""), ("CUDA", "_ops_cuda.so", ", for a torch with CUDA")):
        click.echo(f"{f'{name} kernels':20}" + (f"built{use}" if (folder / file).exists() else "not built"))
    for package in ("specvis", "specvis_kernels", "torch", "triton", "numpy"):
        try:
            known = torch.__version__ if package == "torch" else version(package)  # "+cu130" may be in the former alone
            click.echo(f"{package:20}{known}")
        except PackageNotFoundError:
            click.echo(f"{package:20}not installed")
    click.echo(f"{'python':20}{platform.python_version()}")
    click.echo(f"{'devices':20}cpu with {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"
               + "".join(f", {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())))


def list_words(model: Path | None) -> None:
    """The words that prompts of a model may have; None: of the shipped one, with what it draws well."""
    with quiet():
        from ..models.words import STYLES
        from ..pipelines.checkpoint import Vocabulary, read_config
        from ..pipelines.discrete import SHIPPED
    if model is not None and not model.is_dir():
        raise ValueError(f"model must be a folder, got {model}")
    file = (model or SHIPPED) / "vocabulary.json"
    if not file.exists():
        raise ValueError(f"words must be of a model whose prompts are words: {model} has no vocabulary.json")
    _, *words = read_config(file, Vocabulary).words
    if styles := [style for style in STYLES if style in words]:
        click.echo(f"A prompt begins with a style: {', '.join(styles)}.\n"
                   f"specvis generate puts {styles[0]} before one that does not.")
    if model is None:
        click.echo("Hearts, cat faces, pirate and chequered flags come out well. A face is often a different one from\n"
                   "the prompt's, and most objects come out badly.")
    click.echo(f"{len(words):,} words:\n")
    click.echo(textwrap.fill(" ".join(map(printable, words)), 100, break_on_hyphens=False))
