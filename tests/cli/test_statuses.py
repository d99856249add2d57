"""Exit statuses: what fails is one line on stderr and a status, and no traceback, at any moment."""
import os
import signal
import subprocess
import sys

import click
import pytest
import torch
from click.testing import CliRunner

from specvis.cli.commands import Commands

PROGRAM = [sys.executable, "-m", "specvis"]


def failing(error):
    """A group with a command that raises this."""
    group = Commands("program", package="none", imported={})

    @group.command("fail")
    def fail():
        raise error

    return CliRunner().invoke(group, ["fail"])


@pytest.mark.parametrize("error, status, line", [
    (ValueError("k must be at least 0,\ngot -1"), 2, "Error: k must be at least 0, got -1"),
    (click.ClickException("pictures differ"), 1, "Error: pictures differ"),
    (click.UsageError("one too many"), 2, "Error: one too many (see program fail --help)"),
    (OSError(28, "No space left on device", "a.png"), 3, "Error: No space left on device: a.png"),
    (OSError("odd"), 3, "Error: odd"),
    (OSError(36, "File name too long", "a" * 9000), 2, f"Error: File name too long: {'a' * 2000} .. {'a' * 2000}"),
    (ValueError("\x1b]0;title\x07\x1b[31m\u202eword\udcff"), 2,
     r"Error: \x1b]0;title\x07\x1b[31m\u202eword\udcff"),
    (MemoryError(), 3, "Error: memory was refused"),
    (MemoryError("of 8 TB"), 3, "Error: memory was refused: of 8 TB"),
    (torch.OutOfMemoryError("CUDA out of memory.\nTried"), 3, "Error: memory was refused: CUDA out of memory."),
    (EOFError("No data left in file"), 2, "Error: an input ends too early: No data left in file"),
    (KeyboardInterrupt(), 130, "Aborted!"),
    (BrokenPipeError(32, "Broken pipe"), 141, ""),
])
def test_what_fails_is_one_line_and_a_status(error, status, line):
    result = failing(error)
    assert (result.exit_code, result.stderr.strip()) == (status, line)
    assert result.stdout == ""


def test_memory_that_torch_refuses_is_one_line():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**59, dtype=torch.uint8)
    result = failing(refused.value)
    assert result.exit_code == 3 and result.stderr.startswith("Error: memory was refused: ")
    assert len(result.stderr.splitlines()) == 1


def test_a_fault_of_the_programs_own_keeps_its_traceback():
    error = RuntimeError("shapes differ")
    assert failing(error).exception is error


@pytest.mark.parametrize("command", ["methods", "--help"])
def test_a_full_disk_or_a_reader_that_went_or_a_closed_stdout(command):
    with open("/dev/full", "w") as full:
        said = subprocess.run([*PROGRAM, command], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (said.returncode, said.stderr) == (3, "Error: No space left on device\n")
    read, write = os.pipe()
    os.close(read)
    said = subprocess.run([*PROGRAM, command], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (said.returncode, said.stderr) == (141, "")
    said = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *PROGRAM, command], stderr=subprocess.PIPE, text=True)
    assert (said.returncode, said.stderr) == (0, "")


def answer_interruptions():
    """A command that a script has put in the background is deaf to Ctrl-C, and so is what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
