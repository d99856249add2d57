"""The numbers in the papers: whole tables, and nowhere else a number of theirs that the tables lack."""
import ast
import math
import re
from pathlib import Path

import pytest

from studies import papers
from studies.cspd import speedup_by_forwards

ROOT = Path(__file__).parents[2]
FOLDER = Path(papers.__file__).parent
INDEX = {row["name"]: row for row in papers.table("tables")}
WORDS = {"method", "model", "target", "draft", "data", "version", "base values", "nearness", "divergence", "mark",
         "guidance", "training-free", "lossless", "source", "statistic", "arXiv", "unit"}  # columns of no numbers
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def test_every_table_is_whole_and_has_a_caption():
    assert sorted(INDEX) == sorted(path.stem for path in FOLDER.glob("*.csv") if path.stem != "tables")
    for name in INDEX:
        rows = papers.table(name)
        assert papers.caption(name).startswith(INDEX[name]["paper"])
        assert len({tuple(row.items()) for row in rows}) == len(rows) > 0, name
        for row in rows:
            assert None not in row and None not in row.values(), (name, row)  # cells beyond the heading, or too few
            assert row.get("mark", "") in ("", "restored", "contradicts")
            assert all(math.isfinite(float(cell)) for column, cell in row.items() if column not in WORDS and cell), row


def test_a_value_is_one_cell():
    assert papers.value("cool-table-1", "tau", method="COOL-SD", delta=2) == 3.34
    assert papers.value("cspd-table-1", "speed-up, batch 256", target="H", draft="B", gamma=32) == 2.33
    assert papers.value("adt-table-1", "tau", T=1.0, method="EAGLE-2", **{"mean depth": "5.00"}) == 1.11
    for where in ({"method": "COOL-SD"}, {"method": "Medusa"}, {"methods": "COOL-SD"}):  # several, none, no column
        with pytest.raises(ValueError, match="cool-table-1 must have one 'tau' where {'method"):
            papers.value("cool-table-1", "tau", **where)
    for column in ("FID", "IS"):  # an empty cell, no such column
        with pytest.raises(ValueError, match=r"got \[\]"):
            papers.value("lantern-table-3", column, version="v1", T=0, method="EAGLE-2")


LUMINA, LLAMAGEN = {"model": "Lumina-mGPT 7B"}, {"model": "LlamaGen-XL 775M"}
EAGLE, EAGLE_2, ADT_TREE = {"method": "Eagle-1"}, {"method": "EAGLE-2"}, {"method": "ADT-Tree"}
RATIOS = [  # of two cells of a column; what is said of them in the studies and documents, rounded
    ("lantern-table-3", "tau", {"version": "v1", "T": 0}, {"method": "LANTERN", "delta": 0.2}, EAGLE_2, "1.81"),
    ("lantern-table-3", "tau", {"version": "v1", "T": 1}, {"method": "LANTERN", "delta": 0.4}, EAGLE_2, "2.00"),
    *(("lantern-table-3", "speed-up", {"version": version, "T": T}, {"method": "LANTERN"} | more, EAGLE_2, ratio)
      for version, T, more, ratio in (("v1", 0, {"delta": 0.2}, "1.76"), ("v1", 1, {"delta": 0.4}, "1.76"),
                                      ("v3", 0, {}, "1.75"), ("v3", 1, {}, "1.82"))),
    *((name, "speed-up", {"T": T}, ADT_TREE, EAGLE_2, ratio)
      for name, T, ratio in (("adt-table-1", 0, "1.36"), ("adt-table-1", 1, "1.39"), ("adt-table-2", 0, "1.13"),
                             ("adt-table-2", 1, "1.96"))),
    ("cool-table-1", "tau", LUMINA, {"method": "COOL-SD", "delta": 1.1}, EAGLE, "1.13"),
    ("cool-table-1", "tau", LLAMAGEN, {"method": "COOL-SD", "delta": 1.1}, EAGLE, "1.13"),
    ("cool-table-1", "tau", LUMINA, {"method": "LANTERN++"}, EAGLE, "1.08"),
    ("cool-table-1", "tau", LLAMAGEN, {"method": "LANTERN++"}, EAGLE, "1.10"),
    ("cool-table-1", "tau", LLAMAGEN, {"method": "COOL-SD", "delta": 2}, EAGLE, "1.38"),
    ("cool-table-1", "tau", LLAMAGEN, {"method": "COOL-SD", "delta": 2}, {"method": "COOL-SD", "delta": 1.1}, "1.22"),
]


@pytest.mark.parametrize("name, column, both, a, b, ratio", RATIOS)
def test_ratios(name, column, both, a, b, ratio):
    assert f"{papers.value(name, column, **both, **a) / papers.value(name, column, **both, **b):.2f}" == ratio


def test_cspds_table_1_has_15_percent_pre_filled():
    for row in papers.table("cspd-table-1"):
        which = {key: row[key] for key in ("target", "draft", "gamma")}
        same = papers.value("cspd-table-4", "speed-up", **which, **{"pre-filled (%)": 15})
        assert float(row["speed-up, batch 8"]) == same, which


def misfit(rows: list[dict], column: str, prefill: int) -> float:
    """The largest relative error of the speed-ups in a column if all rows have one c, the best of all."""
    def error(row: dict, c: float) -> float:
        passes = prefill + math.ceil((256 - prefill) / int(row["gamma"]))
        return abs(speedup_by_forwards(256, passes, 256 - prefill, c) / float(row[column]) - 1)

    return min(max(error(row, i / 1000) for row in rows) for i in range(1000))


def test_one_cost_of_a_draft_gives_cspds_speed_at_every_gamma():
    def rows_of(*pair: str) -> list[dict]:
        return [row for row in papers.table("cspd-table-1") if (row["target"], row["draft"]) == pair]

    for rows in (rows_of("L", "B"), rows_of("H", "B"), rows_of("H", "L")):
        for batch, bound in ((1, 0.045), (8, 0.045), (128, 0.0125), (256, 0.0125)):
            assert len(rows) == 4 and misfit(rows, f"speed-up, batch {batch}", 38) < bound, (rows[0], batch)
    assert misfit(rows_of("H", "B"), "speed-up, batch 256", 0) > 0.0125  # nothing pre-filled


# No number of a paper in the code of the studies.
OURS = {("continuous.py", 1.05), ("lantern.py", 1.05), ("cool_sd.py", 1.15),  # a temperature, inches of plots
        ("continuous_study.py", 1.96)}  # a quantile of the normal distribution
RESULTS = {float(cell) for name in INDEX for row in papers.table(name) for column, cell in row.items()
           if column not in WORDS and re.fullmatch(r"-?\d+\.\d+", cell)}


def literals(source: str) -> list[float]:
    """The numbers of a paper's table in a program: two decimals or more in a string, three digits or more in a float.

    A paper's 0.40 or 1.1 as a float is not seen: settings and sizes of plots are such numbers, too.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += map(float, re.findall(r"(?<![\w.])\d+\.\d{2,}(?!\w)", node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, float):
            found += [node.value] * (len(str(node.value).replace(".", "").strip("0")) >= 3)
    return [number for number in found if number in RESULTS]


def test_the_studies_read_the_papers_numbers_from_the_tables():
    assert {(path.name, number) for path in (ROOT / "python" / "studies").glob("*.py")
            for number in literals(path.read_text())} == OURS


def test_a_number_of_a_paper_in_a_program_is_found():
    source = """print(f"{name}: 1.75 times (arXiv:2410.03355)"); x = {4: "1.62"}; y = 170.14, 0.4"""
    assert sorted(literals(source)) == [1.62, 1.75, 170.14]


# Every number that a document attributes to a paper is in the tables.
ATTRIBUTED = re.compile(r"\b[Pp]apers?\b|\babstract|\bauthors\b|arXiv")
NUMBER = re.compile(r"(?<![\w.,])(?:\d+\.\d+|\d+(?=(?: to [\d.]+)? (?:times|steps|s)\b))(?![\w.]*\d)")
OUR_OWN = {"0.2"}  # the papers' smallest model, in billions


def attributed(text: str) -> list[tuple[str, str]]:
    """The numbers that a Markdown text attributes to papers, each with its block: a paragraph, bullet or table's row.

    Seen are decimal numbers, and whole ones before "times", "steps" or "s", in a block that says "paper", "abstract",
    "authors" or "arXiv", or names a table of the papers as `cool-table-1`. Not seen are percentages, numbers with a
    thousands separator, sections ("section 5.2"), and blocks that name a method and none of these: ours speak of our
    own runs of it.
    """
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    text = re.sub(r"\d{4}\.\d{5}|section [\d.]+", "", text)
    blocks = [" ".join(block.split()) for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\||\d+\. ))", text)]
    return [(number, block) for block in blocks
            if ATTRIBUTED.search(block) or re.search(r"`\w+-table-\d`", block)
            for number in NUMBER.findall(re.sub(r"`[^`]*`", "", block))]


def unknown(text: str) -> list[str]:
    """The attributed numbers that are no cell, rounded as in the text, of a row or table that the block names, nor one
    of the RATIOS."""
    def cells(block: str) -> list[str]:
        return [cell for name, table in INDEX.items() for row in papers.table(name) for cell in row.values()
                if f"`{name}`" in block or table["paper"] in block or row.get("method", table["paper"]) in block]

    def is_known(number: str, block: str) -> bool:
        decimals = len(number.partition(".")[2])
        return number in OUR_OWN or any(number == said and f"`{name}`" in block for name, *_, said in RATIOS) or any(
            f"{float(cell):.{decimals}f}" == number for cell in cells(block) if re.fullmatch(r"-?\d+(\.\d+)?", cell))

    return [number for number, block in attributed(text) if not is_known(number, block)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_says_of_a_paper_is_in_the_tables(path):
    """But for the tables of claims: they are written from reports, which compute what they say of the papers."""
    assert unknown(re.sub(r"<!-- table: claims.*?<!-- end -->", "", path.read_text(), flags=re.S)) == []


def test_a_wrong_number_in_a_document_is_found():
    methods = (ROOT / "docs" / "methods.md").read_text()
    assert unknown(methods.replace("speed-ups of 4.8 to 6.4", "speed-ups of 4.9 to 6.4")) == ["4.9"]
    assert unknown(methods.replace("in 5.7 s in place", "in 5.8 s in place")) == ["5.8"]
    row = "| `cool-table-1` | 1.38 times is delta 2 over Eagle-1 |"
    assert not unknown(row) and unknown(row.replace("1.38", "1.37")) == ["1.37"]
