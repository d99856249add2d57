"""Commands that are killed at random moments: what they leave is whole, and the repeated command ends like an
undisturbed one.

To import torch takes longer than these commands do. So they are forks of a process that has imported it.
"""
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time

import pytest
import torch
from torch import nn

from specvis.cli.main import main
from specvis.files import PART
from tests.tiny import save_models
from training import run as training

GENERATE = ["generate", "--prompts", "{model}/prompts.txt", "-n", "6", "--batch", "3", "--scale", "2"]
KILLS = 6


def train(folder):
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


def work(name, model, out, log):
    """What a fork does."""
    sys.stdout = sys.stderr = open(log, "w")
    torch.set_num_threads(1)
    if name == "train":
        train(out)
    else:
        main([*(part.format(model=model) for part in GENERATE), "--out", str(out), "--model", str(model)])


@pytest.fixture(scope="module")
def forks():
    if "forkserver" not in multiprocessing.get_all_start_methods():
        pytest.skip("this system has no fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo", "specvis.cli.generate"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        first = context.Process(target=int)  # it waits for the imports
        first.start()
        first.join()
    return context


def read(path):
    """What a file says, without times. Of lines, an unfinished last one does not count. An error: it is not whole."""
    match path.suffix:
        case ".pt":
            state = torch.load(path)
            return [state["step"], *(tensor.tolist() for tensor in state["model"].values())]
        case ".jsonl":
            lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
            return sorted(json.dumps(line | {"seconds": None}) for line in lines)
        case ".json":
            return json.loads(path.read_text())
        case _:
            return path.read_bytes()


def content(folder):
    """What every file says, by its name, but those that a killed command was writing."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: read(path) for name, path in files.items() if not PART.fullmatch(path.name)}


def assert_whole(folder, expected):
    """Every file can be read. Those that are written once are as in the end."""
    for name, found in content(folder).items():
        assert name.endswith((".json", ".jsonl", ".pt")) or found == expected[name], name


def assert_ended(folder, expected):
    assert content(folder) == expected
    assert not [path for path in folder.rglob(".*") if PART.fullmatch(path.name)]


@pytest.mark.parametrize("name", ["generate", "train"])
def test_what_is_there_is_whole_and_what_goes_on_is_as_undisturbed(forks, name, tmp_path):
    model, log, undisturbed, out = (tmp_path / part for part in ("model", "log.txt", "undisturbed", "out"))
    save_models(model)

    def run(folder, seconds=None):
        """The exit status. The command is killed after these seconds, if it is not faster."""
        process = forks.Process(target=work, args=(name, model, folder, log))
        process.start()
        process.join(seconds)
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), log.read_text()
        return process.exitcode

    start = time.perf_counter()
    assert run(undisturbed) == 0
    seconds, expected, chance, kills = time.perf_counter() - start, content(undisturbed), random.Random(0), 0
    while kills < KILLS:
        if run(out, chance.uniform(0, seconds)) == 0:  # it was faster: then from the beginning
            assert_ended(out, expected)
            shutil.rmtree(out)
        else:
            kills += 1
            assert_whole(out, expected)
    assert run(out) == 0
    assert_ended(out, expected)


def test_half_a_file_is_seen(tmp_path):
    """The control: one file of each kind that the commands write, and then half of it."""
    (tmp_path / "a.png").write_bytes(b"a picture")
    (tmp_path / "b.json").write_text('{"origins": []}')
    torch.save({"step": 3, "model": {"weight": torch.zeros(1000)}}, tmp_path / "c.pt")
    expected = content(tmp_path)
    assert_whole(tmp_path, expected)
    for path in list(tmp_path.iterdir()):
        whole = path.read_bytes()
        path.write_bytes(whole[:len(whole) // 2])
        with pytest.raises((ValueError, RuntimeError, AssertionError)):
            assert_whole(tmp_path, expected)
        path.write_bytes(whole)
