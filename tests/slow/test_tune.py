"""specvis tune as a command."""
import csv

import pytest

from tests.cli.test_tune import run
from tests.tiny import save_models


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    save_models(folder)
    return folder


def test_the_command_prints_the_frontier_and_the_choice(weights, tmp_path):
    result = run("--target-tv-excess", 0.05, "--images", 4, "--out", tmp_path, "--model", weights)
    assert result.exit_code == 0, result.output
    assert "chosen: " in result.output and "specvis generate --prompt" in result.output
    rows = list(csv.DictReader(open(tmp_path / "tune.csv")))
    assert "speedup" not in rows[0] and "round 1 of 4, 1 of" in result.stderr  # by tau, the column would be empty
    assert sum(row["chosen"] == "yes" for row in rows) == 1 and any(row["frontier"] for row in rows)
    assert (tmp_path / "tune.png").stat().st_size > 5000


def test_what_cannot_be_reached_is_said(weights, tmp_path):
    result = run("--target-speedup", 50, "--images", 4, "--out", tmp_path, "--model", weights)
    assert result.exit_code == 1
    assert "no method that was tried reaches a speedup of 50 by tau; the fastest is" in result.output
    assert (tmp_path / "tune.csv").exists()
