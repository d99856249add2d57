"""How the command lines report bad input."""
import click


class Commands(click.Group):
    """Bad input is one line on stderr and exit status 2, whoever found it."""

    def invoke(self, context):
        try:
            return super().invoke(context)
        except ValueError as error:
            click.echo(f"Error: {error}", err=True)
            context.exit(2)
