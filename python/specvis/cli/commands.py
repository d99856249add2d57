"""A group of commands, each imported when it is asked for."""
from importlib import import_module

import click


class Commands(click.Group):
    """Bad input is one line on stderr and exit status 2, whoever found it.

    Args:
        package:  where the modules of the commands are
        imported: name -> the line of `--help`; command `mar-draft` is `mar_draft` of the package's module `mar_draft`
    """

    def __init__(self, *args, package: str, imported: dict[str, str], **attrs):
        super().__init__(*args, **attrs)
        self.package, self.imported = package, imported

    def list_commands(self, context):
        return [*self.imported, *self.commands]

    def get_command(self, context, name):
        if name not in self.imported:
            return super().get_command(context, name)
        module = name.replace("-", "_")
        return getattr(import_module(f"{self.package}.{module}"), module)

    def format_commands(self, context, formatter):
        """Write the list without importing what is in it."""
        with formatter.section("Commands"):
            formatter.write_dl([*self.imported.items(), *((name, command.get_short_help_str(formatter.width))
                                                          for name, command in self.commands.items())])

    def invoke(self, context):
        try:
            return super().invoke(context)
        except ValueError as error:
            click.echo(f"Error: {error}", err=True)
            context.exit(2)
