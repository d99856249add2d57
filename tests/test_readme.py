"""What the README says of code is true."""
import re
from pathlib import Path

from PIL import Image

import specvis_kernels

README = (Path(__file__).parent.parent / "README.md").read_text()


def snippets():
    return re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_snippet_of_ops_runs():
    names = {}
    exec(snippets()[0], names)
    assert names["mask"][0].tolist() == [[True, False, False, False], [True, True, False, False],
                                         [True, False, True, False], [True, True, False, True]]
    assert 0 <= names["next_token"].item() < 16 and 0 <= names["accepted"].item() <= 2
    assert names["status"].item() in (0, specvis_kernels.EMPTY_RESIDUAL)
    assert len(names["emitted"]) == names["accepted"].item() + 1


def test_the_snippet_of_pictures_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(snippets()[1], names)
    assert Image.open("heart.png").size == (64, 64) and (names["decoded"].tau >= 1).all()


def test_the_snippets_of_continuous_tokens_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(snippets()[2], names)
    assert Image.open("heart.png").size == (64, 64) and 0 <= names["again"].acceptance_rate <= 1
    exec(snippets()[3], names := {})
    assert names["accepted"] == 4 or names["redraw"][0, names["accepted"]] and names["tries"].max() >= 1


def test_the_table_of_ops_is_the_truth():
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| (\w*) \| (\w*) ?\| (\w*) ?\| (\w*) ?\|$", README, re.M)
    folder = Path(specvis_kernels.__file__).parent
    assert [row[0] for row in rows] and {row[0] for row in rows} == set(specvis_kernels.ops())
    for name, oracle, cpp, cuda, triton in rows:
        assert oracle == "yes"
        assert (cpp == "yes") == (folder.parent / "csrc" / f"{name}.cpp").exists(), name
        assert (cuda == "yes") == (folder.parent / "csrc" / f"{name}.cu").exists(), name
        assert (triton == "yes") == (folder / "triton" / f"{name}.py").exists(), name


def test_files_that_are_linked_exist():
    for link in re.findall(r"\]\((?!https:)([^)]+)\)", README):
        assert (Path(__file__).parent.parent / link).exists(), link
