"""Commands that are killed, as tests/interruption.py does it, 20 times in all; by hand 100 times each."""
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import interruption

ROOT = Path(__file__).parent.parent.parent

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@needs_fork
@pytest.mark.parametrize("name, kills", [("generate", 6), ("compare", 1), ("tune", 2), ("report", 2),
                                         ("report --continuous", 3), ("train", 6)])
def test_what_is_there_is_whole_and_what_goes_on_is_as_undisturbed(name, kills):
    run = subprocess.run([sys.executable, "-m", "tests.interruption", "--kills", str(kills), name], cwd=ROOT,
                         env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'python'}"},
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (kills|interrupts|ends)", run.stdout)}
    assert counts["kills"] + counts["interrupts"] == kills and counts["ends"] >= 1


def test_half_a_file_is_seen(tmp_path):
    """Each kind of file that the commands write is read."""
    np.savez(tmp_path / "a.npz", tokens=np.arange(1000))
    interruption.Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(
        tmp_path / "b.png")
    (tmp_path / "c.json").write_text('{"origins": []}')
    (tmp_path / "d.csv").write_text("method,tau\nvanilla,1.0\n")
    whole = interruption.content(tmp_path)
    assert whole.keys() == {"a.npz", "b.png", "c.json", "d.csv"}
    for name, length in (("a.npz", 3000), ("b.png", 2000), ("c.json", 10), ("d.csv", 18)):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:length])
        with pytest.raises(AssertionError, match=f"{name} is not whole"):
            interruption.content(tmp_path)
        (tmp_path / name).write_bytes(content)
    np.savez(tmp_path / "a.npz", tokens=np.arange(1, 1001))
    assert interruption.same("tune", interruption.content(tmp_path), whole) == ["a.npz"]
