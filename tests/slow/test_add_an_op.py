"""The page that shows how to add an op is right: an op that is added by its blocks passes the tests that it names."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "add_an_op.md"
BLOCK = re.compile(r"^`(\S+)`, (?:a new file|before `([^\n]+)`):\n\n```\w+\n(.*?)```$", re.M | re.S)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the tracked files, with the blocks of the page in their places, built."""
    folder = tmp_path_factory.mktemp("add_an_op") / "clone"
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) == PAGE.read_text().count("\n```") / 2  # a block that is in no file would be of no use
    for name, anchor, text in blocks:
        file = folder / name
        if anchor:
            lines = file.read_text().splitlines(keepends=True)
            place = next(i for i, line in enumerate(lines) if line.lstrip().startswith(anchor))
            text = "".join([*lines[:place], text, *lines[place:]])
        else:
            assert not file.exists()
        file.write_text(text)
    if (ROOT / "build").exists():  # compile only what the op changes
        shutil.copytree(ROOT / "build", folder / "build")
    run(folder, "setup.py", "build_ext", "--inplace")
    return folder


def run(folder, *command):
    path = os.pathsep.join(map(str, (folder / "python", folder)))
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": path, "SPECVIS_CUDA": "0"})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_the_op_passes_the_tests_of_the_page(clone):
    passed = run(clone, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels", "tests/laws", "tests/fuzz",
                 "-k", "count_above")
    assert int(re.search(r"(\d+) passed", passed)[1]) > 20
    run(clone, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/laws/test_at_the_door.py",
        "tests/test_package.py", "tests/test_documents.py", "-k", "not install")


def test_the_op_is_as_tidy_as_the_others(clone):
    run(clone, "-m", "ruff", "check")
