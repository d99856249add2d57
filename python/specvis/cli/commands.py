"""A group of commands, each imported when a user calls it, and their exit statuses.

0  It is done.
1  The command ran, and what it checked is wrong.
2  The input or an argument is wrong.
3  The disk failed, the system refused memory, or Ray did not start.
130, 141  It was interrupted, or nobody reads what it writes (128 and the signal's number, as shells count).

With each of 1 to 3 there is one line on stderr that says why.
"""
import os
import sys
from contextlib import contextmanager, suppress
from errno import ELOOP, ENAMETOOLONG
from importlib import import_module

import click

from ..interrupts import INTERRUPTED, quiet, raising
from ..terminal import printable

BAD_INPUT, REFUSED, UNREAD = 2, 3, 141
OUT_OF_MEMORY = ("DefaultCPUAllocator", "alloc_cpu", "not enough memory", "out of memory", "OutOfMemoryError")


class Interrupted(click.ClickException):
    """Ctrl-C, with a line that says how to go on."""

    exit_code = INTERRUPTED


class Commands(click.Group):
    """Every error is one line on stderr and an exit status.

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
        with quiet():
            return getattr(import_module(f"{self.package}.{module}"), module)

    def format_commands(self, context, formatter):
        """Write the list without importing what is in it."""
        with formatter.section("Commands"):
            formatter.write_dl([*self.imported.items(), *((name, command.get_short_help_str(formatter.width))
                                                          for name, command in self.commands.items())])

    def main(self, *args, standalone_mode=True, **extra):
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        try:
            with raising():
                found = super().main(*args, standalone_mode=False, **extra) or 0, None
        except Exception as error:
            if (found := status_and_line(error)) is None:
                raise
        except KeyboardInterrupt:
            found = INTERRUPTED, "Aborted!"
        status, line = found
        with suppress(OSError):
            if line:
                click.echo(line, err=True)
        leave_unwritten()
        sys.exit(status)

    def make_context(self, *args, **extra):  # writes --help
        with unread():
            return super().make_context(*args, **extra)

    def invoke(self, context):
        try:
            with unread():
                return super().invoke(context)
        except EOFError as error:  # click would take it for the end of a user's answers
            raise ValueError(f"an input ends too early{str(error) and f': {error}'}") from error


@contextmanager
def unread():
    """End with a status of its own where nobody reads the output; click's status is 1."""
    try:
        yield
    except BrokenPipeError:
        raise click.exceptions.Exit(UNREAD) from None


def status_and_line(error: Exception) -> tuple[int, str | None] | None:
    """The exit status for an error, and what is said about it; None: the error is a fault of the program's own."""
    if type(error).__name__ == "NoArgsIsHelpError":  # of click since 8.2
        return error.exit_code, error.format_message()
    if isinstance(error, click.Abort):
        return INTERRUPTED, "Aborted!"
    said = error.format_message() if isinstance(error, click.ClickException) else str(error)
    said = printable(" ".join(said.split("\n")).strip())
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return error.exit_code, f"Error: {said} (see {error.ctx.command_path} --help)"
    if isinstance(error, click.ClickException):
        return error.exit_code, f"Error: {said}"
    if isinstance(error, MemoryError):
        return REFUSED, f"Error: memory was refused{said and f': {said}'}"
    if isinstance(error, RuntimeError) and any(words in f"{type(error).__name__}: {said}" for words in OUT_OF_MEMORY):
        return REFUSED, f"Error: memory was refused: {str(error).splitlines()[0]}"
    if isinstance(error, ValueError):
        return BAD_INPUT, f"Error: {said}"
    if isinstance(error, OSError):
        where = f": {printable(str(error.filename))}" if error.filename is not None else ""
        is_input = (isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError))
                    or error.errno in (ENAMETOOLONG, ELOOP))
        return BAD_INPUT if is_input else REFUSED, f"Error: {error.strerror or said or type(error).__name__}{where}"
    return None


def leave_unwritten() -> None:
    """If stdout cannot be written, drop its buffer: Python would try again at its end, and print an error."""
    if sys.stdout is None:  # it was closed from the start
        return
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
