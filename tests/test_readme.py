"""What the README says of code is true."""
import re
from pathlib import Path

import specvis_kernels

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_snippet_runs():
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.S)
    names = {}
    exec(snippet, names)
    assert names["mask"][0].tolist() == [[True, False, False, False], [True, True, False, False],
                                         [True, False, True, False], [True, True, False, True]]
    assert 0 <= names["next_token"].item() < 16 and 0 <= names["accepted"].item() <= 2
    assert names["status"].item() in (0, specvis_kernels.EMPTY_RESIDUAL)


def test_the_table_of_ops_is_the_truth():
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| (\w*) \| (\w*) ?\| (\w*) ?\|$", README, re.M)
    folder = Path(specvis_kernels.__file__).parent
    assert [row[0] for row in rows] and {row[0] for row in rows} == set(specvis_kernels.ops())
    for name, oracle, cpp, triton in rows:
        assert oracle == "yes"
        assert (cpp == "yes") == (folder.parent / "csrc" / f"{name}.cpp").exists(), name
        assert (triton == "yes") == (folder / "triton" / f"{name}.py").exists(), name


def test_files_that_are_linked_exist():
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (Path(__file__).parent.parent / link).exists(), link
