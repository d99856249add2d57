"""Files are written whole, and one command at a time writes to a folder."""
import errno
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import nn

from specvis import files
from tests.cli.conftest import run
from tests.tiny import save_models
from training.run import TrainingRun


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_an_error_leaves_what_was_there_before(tmp_path):
    path = tmp_path / "a.csv"
    files.write_whole(path, "before")

    def breaks(file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        files.write_whole(path, breaks)
    assert path.read_text() == "before" and names(tmp_path) == ["a.csv"]
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ValueError, match="pipe.png must be a file that can be replaced, got a device, a pipe"):
        files.write_whole(tmp_path / "pipe.png", b"new")
    assert names(tmp_path) == ["a.csv", "pipe.png"] and (tmp_path / "pipe.png").is_fifo()


def test_a_link_stays_one_and_a_file_keeps_its_mode(tmp_path):
    goal, link = tmp_path / "far" / "a.png", tmp_path / "a.png"
    goal.parent.mkdir()
    link.symlink_to(goal)
    files.write_whole(link, b"new")
    goal.chmod(0o600)
    files.write_whole(link, b"newer")
    assert link.is_symlink() and goal.read_bytes() == b"newer" and goal.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["a.png", "far"] and names(goal.parent) == ["a.png"]
    long = tmp_path / ("ä" * 125 + ".png")
    files.write_whole(long, b"1")
    assert names(tmp_path) == ["a.png", "far", long.name]


@pytest.mark.parametrize("error, said", [(KeyError("x"), "'x'"), (EOFError(), "EOFError"),
                                         (RecursionError("a\nb"), "a")])
def test_what_a_parser_raises_names_the_file(error, said):
    with pytest.raises(ValueError, match=f"^a.npz cannot be read: {said}; remove it$"):
        with files.reading(Path("a.npz"), "; remove it"):
            raise error
    with pytest.raises(FileNotFoundError), files.reading(Path("a.npz")):
        raise FileNotFoundError


def test_two_writers_of_a_file_do_not_meet(tmp_path):
    """The first waits in the middle of its file until the second has ended."""
    path, is_half, other_ended = tmp_path / "a.bin", threading.Event(), threading.Event()

    def slowly(file):
        file.write(b"A" * 1000)
        is_half.set()
        assert other_ended.wait(10)
        file.write(b"A" * 1000)

    first = threading.Thread(target=files.write_whole, args=(path, slowly))
    first.start()
    assert is_half.wait(10)
    files.write_whole(path, b"B" * 3000)
    assert path.read_bytes() == b"B" * 3000
    other_ended.set()
    first.join()
    assert path.read_bytes() == b"A" * 2000 and names(tmp_path) == ["a.bin"]


def test_what_belongs_together_is_replaced_together(tmp_path, monkeypatch):
    for name in ("a.png", "b.png", "table.csv"):
        (tmp_path / name).write_text("before")

    def rewrite():
        with files.replacing_together(tmp_path, last="table.csv") as new:
            for name in ("table.csv", "b.png", "a.png"):
                (new / name).write_text("after")
            yield

    with pytest.raises(RuntimeError):
        for _ in rewrite():
            raise RuntimeError
    with pytest.raises(ValueError), files.replacing_together(tmp_path, last="table.csv") as new:
        (new / "a.png").write_text("after")
        raise ValueError
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ("a.png", "b.png", "table.csv"), "before")

    states, replace = [], Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, goal: (replace(path, goal), states.append(
        {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()})))
    for _ in rewrite():
        pass
    before, after = "before", "after"
    assert states == [{"a.png": after, "b.png": before}, {"a.png": after, "b.png": after},
                      {"a.png": after, "b.png": after, "table.csv": after}]
    assert names(tmp_path) == ["a.png", "b.png", "table.csv"]


def holder(folder):
    """A process that keeps others from the folder until it is ended."""
    program = f"""if True:
        import sys
        from pathlib import Path
        from specvis.files import locked
        with locked(Path({str(folder)!r})):
            print("locked", flush=True)
            sys.stdin.read()"""
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert process.stdout.readline() == b"locked\n"
    return process


def test_one_command_at_a_time_writes_to_a_folder(tmp_path):
    """Until the other one has ended, in whatever way."""
    model, out = tmp_path / "model", tmp_path / "out"
    save_models(model)
    out.mkdir()
    commands = (["compare", "--prompt", "red heart", "--methods", "vanilla"],
                ["generate", "--prompts", str(model / "prompts.txt")])
    process = holder(out)
    try:
        for command in commands:
            result = run(*command, "--out", out, "--model", model)
            assert result.exit_code == 2 and result.stderr == (
                f"Error: out must be a folder that no other command writes to, but one writes to {out} now: wait until "
                "it has ended, or choose another --out\n")
            assert names(out) == []
        training = TrainingRun(out, nn.Linear(2, 2), lr=1e-3, weight_decay=0.1, minutes=None, steps=1)
        with pytest.raises(ValueError, match="runs must be a folder that no other .* choose another --runs"):
            next(iter(training))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with files.locked(out), pytest.raises(ValueError, match="must be a folder that no other"), files.locked(out):
        pass


def test_what_killed_processes_left_is_removed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    left = [f".a.png.part-{files.HOST}-{process.pid}-0123abcd", f".new.part-{files.HOST}-{process.pid}-0123abcd",
            f".a.png.part-{files.HOST}-{os.getpid()}-0123abcd"]  # in a container the next command has an equal number
    stays = [f".a.png.part-{files.HOST}-{os.getppid()}-0123abcd", f".a.png.part-01234567-{process.pid}-0123abcd",
             ".a.part", f"a.part-{files.HOST}-{process.pid}-0123abcd", ".hidden"]
    (tmp_path / left[1]).mkdir()
    for name in (left[0], f"{left[1]}/a.png", left[2], *stays):
        (tmp_path / name).write_text("half")
    with files.locked(tmp_path):
        assert names(tmp_path) == sorted(stays)


@contextmanager
def full_disk(size):
    """No file can grow beyond `size` bytes, which the system says as an error of writing."""
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("command", [
    ["generate", "--prompt", "red heart", "--scale", "8", "--out", "{out}/a.png"],
    ["generate", "--prompts", "{model}/prompts.txt", "--scale", "8", "--out", "{out}"],
    ["compare", "--prompt", "red heart", "--methods", "vanilla,jacobi", "--singles", "0", "--out", "{out}"],
], ids=lambda command: " ".join(command[:2]))
def test_a_full_disk_is_one_line_and_leaves_what_was_there(command, tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    save_models(model)
    out.mkdir()

    def answer():
        result = run(*(part.format(model=model, out=out) for part in command), "--model", model)
        return result, {path.name: path.read_bytes() for path in out.iterdir() if path.suffix in (".png", ".csv")}

    if command[0] == "compare":  # over an older result
        assert answer()[0].exit_code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with full_disk(500):
        result, found = answer()
    assert result.exit_code == 3, result.output
    assert re.fullmatch(rf"Error: .*{out}.*File too large.*|Error: .*File too large.*{out}.*",
                        result.stderr.splitlines()[-1])
    assert found == before and not [name for name in names(out) if name.startswith(".")]
    result, found = answer()
    assert result.exit_code == 0 and found.keys() >= before.keys() and found
