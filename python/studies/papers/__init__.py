"""What the papers say of their own experiments: a CSV for each table, to be read beside ours.

`tables.csv` names the paper, its version and the setting of each. tau is the mean accepted length, the target's own
token counted. A cell that the paper lacks is empty. `mark` says `restored` where the text of a row was damaged and
other places of the paper gave its cells, and `contradicts` where the paper contradicts itself. The papers' models
(LlamaGen-XL 775M, Anole and Lumina-mGPT 7B on GPUs) are another world than a 4M model on two processor cores: what can
agree is a trend.
"""
import csv
from pathlib import Path


def table(name: str) -> list[dict[str, str]]:
    """The rows of a table, in the paper's order."""
    with open(Path(__file__).with_name(f"{name}.csv"), newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def value(name: str, column: str, /, **where: str | float) -> float:
    """The number in this column of the one row whose other columns have these values.

        value("cool-table-1", "tau", method="COOL-SD", delta=2)
        value("cspd-table-1", "speed-up, batch 256", target="H", draft="B", gamma=32)

    Raises:
        ValueError: no row or several have a number there
    """
    wanted = {key: cell if isinstance(cell, str) else f"{cell:g}" for key, cell in where.items()}
    found = [row[column] for row in table(name) if row.get(column) and wanted.items() <= row.items()]
    if len(found) != 1:
        raise ValueError(f"{name} must have one {column!r} where {wanted}, got {found}")
    return float(found[0])


def caption(name: str) -> str:
    """One sentence: the paper, its version, the table and its setting."""
    row, = (row for row in table("tables") if row["name"] == name)
    source = ", ".join(filter(None, [row["arXiv"] and f"arXiv:{row['arXiv']}", row["version"]]))
    return f"{row['paper']} ({source}), {row['title']}; {row['setting']}."
