"""Commands of the program, killed at random moments: their files are whole, and the repeated command ends like one that
was never interrupted.

    python -m tests.interruption [--kills 100] [--seed 0] [COMMAND ...]

Each command runs once undisturbed, on models of 16 tokens an image. Then it is run in another folder, over and over,
and ended by SIGKILL, or one time in four by SIGINT, after a random part of the time that it took. Where it ends before
that, and at last, its folder is compared with the undisturbed one. To import torch takes longer than these commands do:
so they are forks of a process that has imported it.
"""
import argparse
import csv
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a fork has none of its parent's threads

import click  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402  else each command does, in more time than its own work takes
from PIL import Image  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402

from specvis.cli.main import main as specvis  # noqa: E402
from specvis.files import PART  # noqa: E402
from specvis.study import jobs  # noqa: E402
from studies import continuous_study  # noqa: E402
from tests.tiny import tiny_pair, tiny_pipeline  # noqa: E402
from training import run as training  # noqa: E402

WORDS = ["", *"plain fluent-3d fluent-flat noto red blue heart grinning face neutral raised fist thumbs up pirate flag "
         "chequered".split()]
PROMPTS = ["noto red heart", "noto blue heart", "fluent-3d red heart", "noto heart"]
TIMES = ("seconds", "speedup", "single_seconds", "single_speedup", "overhead")  # differ from run to run
COMMANDS = {  # name -> its arguments, after which --out and --model follow
    "generate": ["generate", "--prompts", "{model}/prompts.txt", "-n", "6", "--batch", "3", "--scale", "2"],
    "compare": ["compare", "--prompt", "fluent-3d red heart", "--methods", "vanilla,jacobi,eagle2", "--singles", "1"],
    "tune": ["tune", "--target-tv-excess", "0.05", "--images", "4"],
    "report": ["report", "--only", "seed-exact", "--quick"],
    "report --continuous": ["report", "--continuous", "--only", "figure-15", "--quick", "--images", "2"],
    "train": [],
}


def make_model(folder: Path) -> None:
    """Both families of tokens, with prompts and their pictures."""
    folder.mkdir()
    pipeline, pair = tiny_pipeline(), tiny_pair()
    for one in (pipeline, pair):
        one.words.vocabulary = WORDS
        one.words.table = nn.Embedding(len(WORDS), 8)
        one.requires_grad_(False)
    pipeline.save(folder)
    pair.save(folder)
    (folder / "prompts.txt").write_text("red heart\nblue heart\n")
    (folder / "prompts.json").write_text(json.dumps(PROMPTS))
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / "prompts.png")


def train(folder: Path) -> None:
    """A training run of the program's own kind, which saves often."""
    training.SAVED_EVERY = 0.02
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    run = training.TrainingRun(folder, model, lr=1e-3, weight_decay=0.1, minutes=None, steps=400)
    for step in run:
        loss = model(torch.randn(256, 64, generator=run.generator(step))).square().mean()
        run.descend(loss)
        if run.step % 20 == 19:
            run.log(loss=loss.detach())


def work(name: str, model: Path, out: Path, log: Path) -> None:
    """The work of a fork; it does not return. Ctrl-C is for the command: it waits while a fork begins or ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 1
    with open(log, "w") as file, redirect_stdout(file), redirect_stderr(file):
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
                if name == "train":
                    train(out)
                    status = 0
                else:
                    arguments = [part.format(model=model) for part in COMMANDS[name]]
                    specvis.main([*arguments, "--out", str(out), "--model", str(model)], prog_name="specvis")
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        except SystemExit as end:
            status = end.code or 0
        except KeyboardInterrupt:  # as the entry point does
            status = 130
        file.flush()
    os._exit(status)


def fork(*arguments) -> int:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    process = os.fork()
    if not process:
        try:
            work(*arguments)
        finally:
            os._exit(99)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def status_of(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def content(folder: Path) -> dict:
    """The contents of every file by its name, without times. An error says which file is not whole."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if any(PART.fullmatch(part) for part in path.relative_to(folder).parts):
            continue
        try:
            found[name] = READERS[path.suffix](path)
        except Exception as error:
            raise AssertionError(f"{path} is not whole: {type(error).__name__}: {error}") from error
    return found


def read_picture(path: Path):
    with Image.open(path) as picture:
        picture.load()
        return picture.size, picture.tobytes()


def read_archive(path: Path):
    with np.load(path) as archive:
        return {name: archive[name].tobytes() for name in archive.files if name != "seconds"}


def read_lines(path: Path):
    """An unfinished last line does not count."""
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return sorted(json.dumps({name: value for name, value in line.items() if name != "seconds"}) for line in lines)


def read_table(path: Path):
    rows = list(csv.DictReader(io.StringIO(path.read_text()), strict=True))
    assert rows and all(None not in row and None not in row.values() for row in rows)
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def read_checkpoint(path: Path):
    state = torch.load(path, weights_only=True)
    return [state["step"], *(value.numpy().tobytes() for value in state["model"].values())]


READERS = {".png": read_picture, ".npz": read_archive, ".jsonl": read_lines, ".csv": read_table, ".pt": read_checkpoint,
           ".json": lambda path: json.loads(path.read_text()), ".md": lambda path: path.read_text(),
           ".safetensors": lambda path: {name: t.numpy().tobytes() for name, t in load_file(path).items()}}


def same(name: str, got: dict, expected: dict) -> list[str]:
    """The files that differ. Pictures of times, in a folder of `compare` and on a page of a report, always differ."""
    timed = {"compare": (".png",), "report --continuous": (".png", ".md")}.get(name, ())
    if got.keys() != expected.keys():
        return [f"{name}: only in one" for name in sorted(got.keys() ^ expected.keys())]
    return [file for file in got if not file.endswith(timed) and got[file] != expected[file]]


def disturb(name: str, kills: int, chance: random.Random, model: Path, folder: Path) -> dict:
    """Run a command undisturbed, then disturbed. Returns counts; AssertionError says what is wrong."""
    log, undisturbed, out = folder / "log.txt", folder / "undisturbed", folder / "disturbed"
    start = time.perf_counter()
    status = status_of(fork(name, model, undisturbed, log))
    seconds = time.perf_counter() - start
    assert status == 0, f"{name}: status {status}: {log.read_text()[-2000:]}"
    expected, counts = content(undisturbed), {"kills": 0, "interrupts": 0, "ends": 0}
    while counts["kills"] + counts["interrupts"] < kills:
        start, is_new = time.perf_counter(), not out.exists()
        process = fork(name, model, out, log)
        time.sleep(chance.uniform(0, seconds))
        kind = signal.SIGINT if chance.random() < 0.25 else signal.SIGKILL
        os.kill(process, kind)
        status, said = status_of(process), log.read_text()
        assert status in ((0, 130) if kind == signal.SIGINT else (0, -signal.SIGKILL)), \
            f"{name}: status {status} after {kind.name}: {said[-2000:]}"
        assert "Traceback" not in said, f"{name}: {said[-2000:]}"
        if status:
            counts["interrupts" if kind == signal.SIGINT else "kills"] += 1
            if out.exists():
                content(out)
        else:  # it was faster: then from the beginning
            check_end(name, out, expected)
            counts["ends"] += 1
            seconds = min(seconds, time.perf_counter() - start) if is_new else seconds
            shutil.rmtree(out)
    status = status_of(fork(name, model, out, log))
    assert status == 0, f"{name}: status {status} at last: {log.read_text()[-2000:]}"
    check_end(name, out, expected)
    return counts | {"ends": counts["ends"] + 1}


def check_end(name: str, out: Path, expected: dict) -> None:
    different = same(name, content(out), expected)
    assert not different, f"{name}: not as undisturbed: {', '.join(different)}"
    left = [path for path in out.rglob(".*") if PART.fullmatch(path.name)]
    assert not left, f"{name}: left after: {left}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.interruption", description=__doc__.partition("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=f"of {', '.join(COMMANDS)}; default: all")
    parser.add_argument("--kills", type=int, default=100, help="of each command; default: 100")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    if unknown := [name for name in options.commands if name not in COMMANDS]:
        parser.error(f"no command {unknown[0]!r}, only {', '.join(COMMANDS)}")
    torch.set_num_threads(1)
    continuous_study.MIN_SECONDS = 0.01
    jobs.revision = lambda: "of this run"  # not that of a checkout which changes meanwhile
    chance, failed = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        make_model(model)
        for number, name in enumerate(options.commands or COMMANDS):
            place = Path(folder, str(number))
            place.mkdir()
            try:
                counts = disturb(name, options.kills, chance, model, place)
            except AssertionError as error:
                failed += 1
                click.echo(f"FOUND {error}")
            else:
                click.echo(f"{name:22}" + ", ".join(f"{count} {what}" for what, count in counts.items()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
