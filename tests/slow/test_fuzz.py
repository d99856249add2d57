"""More cases of `python -m tests.fuzz`, and its command."""
import json
import subprocess
import sys

import pytest

from tests.fuzz import cases, workers
from tests.fuzz.test_fuzz import pytestmark  # noqa: F401
from tests.fuzz.test_fuzz import test_nothing_is_found as nothing_is_found


@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("op", cases.ops())
def test_nothing_is_found(op, part):
    nothing_is_found(op, part)


def test_a_process_that_ends_is_a_finding_and_another_goes_on():
    said = []
    totals = workers.run(["no_such_op"], 7, 0.1, 1, False, {}, said.append)
    first, *others = totals.found
    assert (first["op"], first["number"], first["backend"]) == ("no_such_op", 7, "process")
    assert "KeyError: 'no_such_op'" in first["what"]
    assert [finding["number"] for finding in others] == [8 + i for i in range(len(others))]


def test_the_command(tmp_path):
    path = tmp_path / "fuzz.json"
    options = ["--op", "tree_links", "--minutes", "0.05", "--workers", "1", "--seed", "3", "--json", path]
    run = subprocess.run([sys.executable, "-m", "tests.fuzz", *options], cwd=workers.ROOT, capture_output=True,
                         text=True)
    assert run.returncode == 0 and run.stderr == "", run.stderr
    written = json.loads(path.read_text())
    assert written["first"] == 3 <= written["last"]["tree_links"] and written["found"] == []
    assert written["ops"]["tree_links"]["cpu"]["rows"] > 0 and "tree_links" in run.stdout
