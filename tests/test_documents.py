"""The documents are true of the code: snippets run, tables match the files, links lead somewhere."""
import re
import time
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

import pytest
from PIL import Image

import specvis_kernels
from benchmarks import papers, tables
from specvis.cli import options
from specvis.cli.main import main
from specvis.decoding import limits
from specvis.decoding.methods import CONTINUOUS, METHODS, PARAMETERS
from specvis_kernels import _checks

generate = import_module("specvis.cli.generate")  # the module, not the command
ROOT = Path(__file__).parent.parent
PUBLIC = set(specvis_kernels.ops()) & set(specvis_kernels.__all__)
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = sorted(DOCS.glob("**/*.md"))
LINKED = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]
SECONDS = 20  # that a block of a page may take, on one idle core


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def snippets(path: Path) -> list[str]:
    """The blocks of Python of a document, in order."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.S | re.M)


def prose(path: Path) -> str:
    """A document without its blocks of code: fenced, indented and between backticks."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^ {4,}.*$", "", text, flags=re.M))


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub and mkdocs give the headings of a document."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).strip().replace(" ", "-")
            for title in re.findall(r"^#+ +(.+)$", text, re.M)}


def test_the_readme_is_short_and_says_at_once_what_ran_on_a_gpu_and_its_snippets_run(tmp_path, monkeypatch):
    assert len(README.encode()) <= 9 * 1024
    assert "GPU" in README.partition("\n## ")[0]
    monkeypatch.chdir(tmp_path)
    exec(snippets(ROOT / "README.md")[0], names := {})
    assert names["mask"][0].tolist() == [[True, False, False, False], [True, True, False, False],
                                         [True, False, True, False], [True, True, False, True]]
    assert names["result"].status.item() == 0
    assert len(names["new_tokens"]) == names["result"].num_accepted.item() + 1
    assert all(0 <= token < 16 for token in names["new_tokens"])
    exec(snippets(ROOT / "README.md")[1], names := {})
    assert Image.open("cat.png").size == (64, 64) and (names["decoded"].tau >= 1).all()


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=name_of)
def test_the_snippets_of_a_page_run(page, tmp_path, monkeypatch):
    """They run from top to bottom, in one namespace."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    for number, block in enumerate(snippets(page), 1):
        start = time.thread_time()
        exec(compile(block, f"{name_of(page)}, block {number}", "exec"), names)
        assert time.thread_time() - start < SECONDS, f"block {number} of {name_of(page)} is too slow"


def test_the_table_of_ops_is_the_truth():
    page = (DOCS / "ops.md").read_text()
    table = page[page.index("| op |"):].partition("\n\n")[0]
    rows = re.findall(r"^\| \[`(\w+)`\]\(#\1\) \|[^|]*\| (all|none|[^|]*\+\+[^|]*|Triton) \| "
                      r"\[\1\.py\]\(\.\./specvis_kernels/\1\.py\) \|$", table, re.M)
    assert len(rows) == table.count("\n") - 1 and {name for name, _ in rows} == PUBLIC
    for name, kernels in rows:
        files = {"C++": ROOT / "csrc/cpu" / f"{name}.cpp", "CUDA C++": ROOT / "csrc/cuda" / f"{name}.cu",
                 "Triton": ROOT / "specvis_kernels" / "triton" / f"{name}.py"}
        there = [kernel for kernel, file in files.items() if file.exists()]
        assert kernels == {3: "all", 0: "none"}.get(len(there), ", ".join(there)), name


def test_every_op_is_named_once_and_explained():
    """Its heading on the page has its docstring, which tests/laws/test_docstrings.py runs."""
    groups = README[README.index("All ops:"):].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", groups)) == sorted(PUBLIC)
    page = (DOCS / "ops.md").read_text()
    explained = re.findall(r"^### (\w+)\n\n(?:!?\S.*\n\n)*::: specvis_kernels\.\1\.\1$", page, re.M)
    assert sorted(explained) == sorted(PUBLIC)


@pytest.mark.parametrize("page", [DOCS / "ops.md", DOCS / "api.md"], ids=name_of)
def test_what_a_page_takes_from_the_source_is_there(page):
    """mkdocstrings puts the docstring of an object in the place of its name."""
    names = re.findall(r"^::: ([\w.]+)\.(\w+)$", page.read_text(), re.M)
    assert names and len(names) == page.read_text().count("\n:::")
    for module, name in names:
        assert getattr(import_module(module), name).__doc__, f"{module}.{name}"


def test_every_command_method_and_setting_is_in_the_tables():
    """The README names all but the baseline; a method's row says whether it is lossless."""
    row, = re.findall(r"^\| `cli/` \| the commands: (.*) \|$", (DOCS / "design.md").read_text(), re.MULTILINE)
    assert sorted(row.split(", ")) == sorted(f"`{name}`" for name in main.list_commands(None))
    table = (DOCS / "methods.md").read_text()
    for name, method in METHODS.items():
        assert method.is_baseline or f"`{name}`" in README, name
        lossless, = re.findall(rf"^\| `{re.escape(name)}` \|.*\| (yes|no) \| [^|]*\|$", table, re.M)
        assert (lossless == "yes") == method.lossless, name
    for name in CONTINUOUS:
        assert f"`{name}`" in README and f"| `{name}`" in (DOCS / "continuous.md").read_text(), name
    first_cells = " ".join(re.findall(r"^\| (`[^|]*`) \|", table, re.M))
    for name in PARAMETERS:
        assert f"`{name}`" in first_cells, name


@pytest.mark.parametrize("path", LINKED, ids=name_of)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", link):
            assert link.startswith("https://"), link
            continue
        file, _, anchor = unquote(link).partition("#")
        target = path.parent / file if file else path
        assert target.exists(), f"{name_of(path)} links to {link}"
        assert not anchor or anchor in anchors(target), f"{name_of(path)} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_tests_that_a_page_names_exist(page):
    for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", page.read_text()):
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.M), f"{file}::{name}"


def test_all_that_is_said_to_be_deterministic_has_a_test():
    """Every row of every table, without the measurements."""
    page = (DOCS / "determinism.md").read_text().partition("## What was measured")[0]
    rows = [row for row in re.findall(r"^\|(?!---).*\|$", page, re.M) if not row.endswith("| Test |")]
    assert len(rows) > 25
    for row in rows:
        assert "::test_" in row, row


def test_the_site_lists_every_page_and_pages_show_every_drawing():
    nav = re.search(r"^nav:\n((?: +- .*\n)+)", (ROOT / "mkdocs.yml").read_text(), re.M)[1]
    listed = re.findall(r": (\S+\.md)$", nav, re.M)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES)
    drawings = {path.stem for path in (DOCS / "drawings").glob("*.svg")}
    shown = {match for page in PAGES for match in re.findall(r"!\[[^]]+\]\(drawings/(\w+)\.svg\)", page.read_text())}
    assert shown == drawings


def test_the_tables_are_the_files():
    pages = {path: path.read_text() for path in tables.DOCUMENTS}
    for path, page in pages.items():
        assert page == tables.written(page, tables.TABLES), f"python -m benchmarks.tables: {name_of(path)}"
    blocks = [name for page in pages.values() for name, *_ in tables.BLOCK.findall(page)]
    assert sorted(blocks) == sorted([*tables.TABLES, *papers.BLOCKS])


def test_only_blocks_with_a_table_are_written():
    page = "1.0\n<!-- table: new -->\n{}<!-- end -->\n2.0\n<!-- table: old -->\n| 3.0 |\n<!-- end -->\n"
    for before in ("", "| 4.0 |\n"):
        assert tables.written(page.format(before), {"new": lambda: "| 4.0 |"}) == page.format("| 4.0 |\n")


@pytest.mark.parametrize("path", tables.DOCUMENTS, ids=name_of)
def test_prose_has_no_measured_number(path):
    text = " ".join(re.sub(r"^\|.*$", "", prose(path), flags=re.M).split())
    assert not re.findall(r"\d (?:ms|us|times as (?:fast|long)|(?:more )?tokens per (?:target )?forward)\b", text)


def test_the_memory_of_families_is_its_formula():
    """Two rows for each picture, or one, of prompts of 128 and of L tokens."""
    page = (DOCS / "families.md").read_text()
    rows = re.findall(r"^\| (.*) \| ([\d,]+) \| (\d+) \| ([\d.]+) \|$", page.partition("## Memory\n")[2], re.M)
    assert len(rows) == 6
    for name, size, length, shown in rows:
        memory = (1 if name.startswith("GLM") else 2) * (128 + int(length)) * int(size.replace(",", "")) / 1e9
        assert f"{memory:.{len(shown.partition('.')[2])}f}" == shown, name


def test_measurements_have_a_command():
    for section in re.split(r"^## ", (DOCS / "measurements.md").read_text(), flags=re.M)[1:]:
        if re.search(r"\d\.\d", section) and not section.startswith("Not measured"):
            assert re.search(r"specvis compare|make (demo|bench|test)|python -[mX] ", section), section[:40]


def test_the_page_of_faults_has_the_statuses_and_limits_that_hold():
    text = (DOCS / "faults.md").read_text()
    bits = {name: int(value) for name, value in re.findall(r"^\| `(\w+)` \| (\d+) \|", text, re.M)}
    assert bits == {name: getattr(specvis_kernels, name) for name in vars(specvis_kernels)
                    if name.isupper() and isinstance(getattr(specvis_kernels, name), int)}
    rows = re.findall(r"^\| [^|]+ \| ([\d, ]+) \| `(M(?:AX|OST)\w*)`(?:, `(\w+)`)?", text, re.M)
    found = {name: int(value) for values, *names in rows
             for value, name in zip(values.split(", "), filter(None, names))}
    places = (_checks, limits, generate, options)
    assert len(found) == 12
    assert found == {name: next(getattr(place, name) for place in places if hasattr(place, name)) for name in found}
    for name in re.findall(r"`(tests/[\w/.]+)`", text):
        assert (ROOT / name).exists(), name
