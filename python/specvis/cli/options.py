"""What the command lines have in common."""
import click
import torch


class Commands(click.Group):
    """Bad input is one line on stderr and exit status 2, whoever found it."""

    def invoke(self, context):
        try:
            return super().invoke(context)
        except ValueError as error:
            click.echo(f"Error: {error}", err=True)
            context.exit(2)


def usable_device(context, parameter, device: str) -> str:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device must be one that torch {torch.__version__} can use here, got {device}") from error
    return device


device_option = click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True,
                             callback=usable_device, help="Where to compute.")
