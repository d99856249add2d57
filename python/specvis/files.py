"""Files are whole, and one command at a time writes to a folder.

A command first writes beside its goal, under a hidden name of its own, and then renames. So a file
under its name is whole, however the command ended. A killed command may leave such a hidden file; the next command that
writes to the folder removes it.
"""
import csv
import hashlib
import io
import json
import os
import platform
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from safetensors.torch import save
from torch import Tensor, nn

try:
    import fcntl
except ImportError:  # on Windows nothing keeps two commands apart
    fcntl = None

HOST = hashlib.sha256(platform.node().encode()).hexdigest()[:8]  # several hosts may share a folder
PART = re.compile(r"\..*\.part-([0-9a-f]{8})-(\d+)-[0-9a-f]{8}", re.DOTALL)


def beside(path: Path) -> Path:
    """A name in the same folder that no other writer has."""
    return path.with_name(f".{path.name[:50]}.part-{HOST}-{os.getpid()}-{secrets.token_hex(4)}")


def write_whole(path: Path, content: bytes | str | Callable[[BinaryIO], None]) -> None:
    """Write bytes, a text, or what a function writes to an open file. An interruption leaves the old file or the new.
    OSError if it cannot be written, as on a full disk; the old file stays unchanged."""
    with replacing(path) as part, open(part, "xb") as file:
        if callable(content):
            content(file)
        else:
            file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())  # without it, a crash of the computer may leave the name without the content


@contextmanager
def reading(path: Path, advice: str = "") -> Iterator[None]:
    """Around code that reads a file that may be damaged: an error of its parser is a ValueError that names it."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {first_line(error)}{advice}") from error


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name of a file to write. In the end it replaces `path`, or the file to which `path` is a link. ValueError if
    `path` is not a file, but a device or a pipe."""
    goal = Path(os.path.realpath(path))
    if goal.exists() and not goal.is_file() and not goal.is_dir():
        raise ValueError(f"{path} must be a file that can be replaced, got a device, a pipe or a socket")
    part = beside(goal)
    try:
        yield part
        if goal.is_file():
            shutil.copymode(goal, part)
        part.replace(goal)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # users know the goal, not the hidden name
        raise
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def replacing_together(folder: Path, last: str) -> Iterator[Path]:
    """A folder for files that replace the files of `folder` in the end, all of them.

    The file `last` is a table of what the others show. While files are exchanged it does not exist: the old one is
    removed first, and the new one comes last. Other files of earlier commands stay.
    """
    part = beside(folder / "new")
    part.mkdir()
    try:
        yield part
        if (part / last).exists():
            (folder / last).unlink(missing_ok=True)
        for file in sorted(part.iterdir(), key=lambda file: file.name == last):
            file.replace(folder / file.name)
    except OSError as error:  # the hidden folder is gone when a user reads the message
        name = Path(os.fsdecode(error.filename or "")).name
        error.filename, error.filename2 = str(folder / name), None
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_json(path: Path, values: object) -> None:
    write_whole(path, json.dumps(values, indent=1) + "\n")


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file."""
    write_whole(path, save(tensors))  # safetensors' own writer is not whole-or-nothing


def write_weights(path: Path, module: nn.Module, but: str | None = None) -> None:
    """The weights of a module in float16, without the one that is named `but`."""
    write_tensors(path, {name: value.half().contiguous() for name, value in module.state_dict().items() if name != but})


def csv_text(columns: Iterable[str], rows: list[dict]) -> str:
    """A table as CSV. A cell that a row lacks is empty."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


@contextmanager
def locked(folder: Path, option: str = "out") -> Iterator[None]:
    """Keep other commands from writing to a folder. The system removes the lock, however this command ends. ValueError
    if another command writes to it."""
    if fcntl is None:
        yield
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{option} must be a folder that no other command writes to, but one writes to {folder} "
                             f"now: wait until it has ended, or choose another --{option}") from None
        except OSError as error:  # some network drives have no locks
            print(f"{folder} cannot be locked ({error.strerror}): run one command at a time in it", file=sys.stderr)
        remove_leftovers(folder)
        yield
    finally:
        os.close(opened)


def remove_leftovers(folder: Path) -> None:
    """Remove the hidden files of processes that have ended. This process must not have begun to write there."""
    for path in folder.iterdir():
        if (match := PART.fullmatch(path.name)) and match[1] == HOST and not is_running(int(match[2])):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def is_running(process: int) -> bool:
    """Whether another process has this number. In containers a command often has the number of the command before."""
    if process == os.getpid():
        return False
    if fcntl is None:  # Windows cannot ask this: signal 0 is Ctrl-C there
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
