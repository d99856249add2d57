"""The headline tables of the papers, beside what their methods do on the shipped models:

    python -m benchmarks.papers             measure what is missing, then write docs/papers.md and its plot
    python -m benchmarks.papers --tables    write them from what is measured

Single pictures are drawn, in turns with plain decoding of the same prompt and seed: picture by picture by all methods.
So a load of the machine changes few of the ratios. Each number is kept when it is measured, and the same command goes
on after an interruption. The papers' numbers are CSV files in benchmarks/published.
"""
import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from time import perf_counter

import numpy as np
import torch

from specvis.cli.options import CONTINUOUS_GUIDANCE, FILTERS, PROMPTS
from specvis.cli.plots import method_style, plt
from specvis.decoding.continuous_state import ContinuousDecoded, ContinuousSampling
from specvis.decoding.decoded import Decoded
from specvis.decoding.methods import ContinuousMethod, Method, parse_method
from specvis.decoding.sampling import Sampling
from specvis.pipelines.discrete import Pipeline
from specvis.pipelines.mar import MARPair

from . import harness, tables

PUBLISHED = Path(__file__).parent / "published"
PAGE = tables.ROOT / "docs" / "papers.md"
PLOT = tables.RESULTS / "papers.png"
PICTURES = {Method: 4, ContinuousMethod: 2}  # of each method


# --- which method is run for which row --------------------------------------------------------------------------------

LANTERNS_TREES = "depth=5:width=10:nodes=60"  # of EAGLE-2, as LANTERN and ADT-Tree compare with it
EAGLE2 = f"eagle2:{LANTERNS_TREES}"
MC_SIM = "lantern++:tree=mc_sim_7b_63"        # on EAGLE-1's tree, as COOL-SD compares with it
ANOLE = "width_step=3:widths=4,13"            # ADT-Tree's steps and bounds for Anole; the recipe has LlamaGen's
SJD = "jacobi:window=16:seed_exact=false"
PUBLISHED_CODES, CODES = 16384, 4096          # of LlamaGen's codebook and of the shipped model's


def lantern(k: str | int, delta: str | float) -> str:
    """LANTERN on its paper's trees. Its k is as large a part of the codebook as the paper's."""
    return f"lantern:{LANTERNS_TREES}:k={round(int(k) * CODES / PUBLISHED_CODES)}:delta={delta}"


def of_lantern(row: dict) -> str:
    return {"plain": "vanilla", "EAGLE-2": EAGLE2}.get(row["method"]) or lantern(row["k"], row["delta"])


def of_adt(row: dict) -> str:
    return {"Anole": "vanilla", "EAGLE-2": EAGLE2, "LANTERN": lantern(1000, 0.4), "ADT-Tree": f"adt-tree:{ANOLE}",
            "ADT-Tree + LANTERN": f"adt-tree+lantern:{ANOLE}:k=250:delta=0.4"}[row["method"]]


def of_base_values(row: dict) -> str:
    return {"TokenFlock": "adt-tree:start=tokenflock", "depth from 1": "adt-tree:flat_depth=1",
            "width from 25": "adt-tree:flat_width=25", "ADT-Tree": "adt-tree",
            "depth from 1, width from 25": "adt-tree:flat_depth=1:flat_width=25"}[row["base values"]]


def of_cool(row: dict) -> str:
    return {"plain": "vanilla", "Eagle-1": "eagle1", "LANTERN++": f"{MC_SIM}:delta=2"}.get(
        row["method"]) or f"cool-sd:omega={row['delta']}"


def of_jacobi(row: dict) -> str | None:
    """None: not implemented"""
    return {"plain": "vanilla", "EAGLE": "eagle1", "SJD": f"{SJD}:coupling=none", "SCD": SJD, "LANTERN++": "lantern++",
            "GSD": "gsd"}.get(row["method"])


def of_cspd(row: dict, prefill: int, **more) -> str:
    """As the release decodes: the paper's speed-ups are those of blocks that are kept whole. prefill: per cent"""
    settings = {"gamma": row["gamma"], "prefill": f"{prefill / 100:g}", **more}
    return "cspd-released:" + ":".join(f"{name}={value}" for name, value in settings.items())


@dataclass(frozen=True)
class Table:
    """A paper's table. Its columns: heading -> the paper's column, or what is measured of a method."""

    name: str                                      # of the CSV
    columns: dict[str, str | Callable[[dict], str | None]]
    methods: dict[str, Callable[[dict], str | None]]   # heading -> the method of a row; the first one's is shown
    measured: dict[str, tuple[str, str]]           # heading -> which of `methods`, and which number of NUMBERS
    where: Callable[[dict], bool] = lambda row: True


def here(*names: str) -> dict[str, tuple[str, str]]:
    return {f"{name} here": ("method here", name) for name in names}


def columns(*names: str) -> dict[str, str]:
    return dict(zip(names, names))


def of_h_and_b(row: dict) -> bool:
    return (row["target"], row["draft"]) == ("H", "B")


TABLES = (
    Table("lantern-table-2", columns("method", "k", "delta", "acceptance"), {"method here": of_lantern},
          here("first accepted", "acceptance", "tau", "tv_excess")),
    Table("lantern-table-3", columns("T", "method", "k", "delta", "speed-up", "tau", "FID", "CLIP"),
          {"method here": of_lantern}, here("speed-up", "tau", "tv_excess"), lambda row: row["version"] == "v1"),
    Table("lantern++", columns("method", "speed-up", "of"), {"method here": lambda row: "lantern++"},
          here("speed-up", "tau", "acceptance", "tv_excess")),
    Table("adt-table-1", columns("T", "method", "speed-up", "tau", "mean depth", "HPSv2", "CLIP"),
          {"method here": of_adt}, here("speed-up", "tau", "mean depth", "tv_excess")),
    Table("adt-table-5", columns("base values", "speed-up", "tau", "mean depth"),
          {"method here": of_base_values}, here("speed-up", "tau", "mean depth"),
          lambda row: row["model"] == "LlamaGen-XL"),
    Table("cool-table-1", columns("model", "method", "delta", "CLIP", "FID", "ImageReward", "tau", "speed-up"),
          {"method here": of_cool}, here("tau", "speed-up", "acceptance", "tv_excess")),
    Table("jacobi", columns("method", "lossless", "source", "steps", "speed-up", "FID", "CLIP x 100"),
          {"method here": of_jacobi}, here("tau", "speed-up", "acceptance", "tv_excess")),
    Table("cspd-table-1", columns("gamma", "alpha", *(f"speed-up, batch {n}" for n in (1, 256))),
          {"method here": partial(of_cspd, prefill=15)}, here("alpha", "speed-up", "tau"), of_h_and_b),
    Table("cspd-table-3", columns("gamma", "alpha, not aligned", "alpha, aligned"),
          {"method here": partial(of_cspd, prefill=5, aligned="false"), "aligned": partial(of_cspd, prefill=5)},
          {"not aligned here": ("method here", "alpha"), "aligned here": ("aligned", "alpha")}, of_h_and_b),
    Table("cspd-table-4", columns("gamma", "pre-filled (%)", "alpha", "speed-up"),
          {"method here": lambda row: of_cspd(row, int(row["pre-filled (%)"]))}, here("alpha", "speed-up"),
          lambda row: of_h_and_b(row) and row["pre-filled (%)"] != "15"),  # that share is Table 1's
)
CURVES = {  # of the plot: of one method over how much it relaxes, or over its window; without a colon: points
    "`jacobi`: window": [f"jacobi:window={window}" for window in (4, 8, 16, 32)],
    "lossless trees": [EAGLE2, "eagle1", f"adt-tree:{ANOLE}"],
    "SJD, SCD": [f"{SJD}:coupling=none", SJD],
    "GSD": ["gsd", "gsd+coupled"],
    "LANTERN: delta": [lantern(1000, delta) for delta in (0.05, 0.1, 0.2, 0.4)],
    "LANTERN++: delta": [f"{MC_SIM}:delta={ratio}" for ratio in (0.5, 1, 2, 4)],
    "UniformRSD: omega": [f"uniform-rsd:omega={omega}" for omega in (1.1, 1.5, 2, 3)],
    "COOL-SD: omega": [f"cool-sd:omega={omega}" for omega in (1.1, 1.5, 2, 3)],
}
SHOWN = ("lossless trees", "SJD, SCD", "LANTERN: delta")  # in the papers' tables already
CONTINUOUS = ("mar:num_iter=64", "mar:num_iter=16", "cspd:gamma=1", "cspd-path:gamma=1")
Key = tuple[str, float]  # a method as the command line has it, and its temperature


def published(name: str) -> list[dict[str, str]]:
    with open(PUBLISHED / f"{name}.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rows_of(table: Table) -> Iterator[tuple[dict[str, str], dict[str, Key | None]]]:
    """The paper's rows, each with the runs of its methods."""
    for row in filter(table.where, published(table.name)):
        texts = {heading: method(row) for heading, method in table.methods.items()}
        yield row, {heading: text and (text, float(row.get("T", 1))) for heading, text in texts.items()}


def runs() -> list[Key]:
    """All that is measured, discrete tokens first, by temperature."""
    keys = [key for table in TABLES for _, of_row in rows_of(table) for key in of_row.values()]
    keys += [(text, 1.0) for curve in CURVES.values() for text in curve] + [(text, 1.0) for text in CONTINUOUS]
    known = [key for key in dict.fromkeys(keys) if key and key[0] != "vanilla"]
    return sorted(known, key=lambda key: (isinstance(parse_method(key[0]), ContinuousMethod), -key[1]))


# --- measuring --------------------------------------------------------------------------------------------------------

def numbers(decoded: Decoded | ContinuousDecoded) -> dict[str, float]:
    """What is kept of a picture."""
    found = {"tau": decoded.tau.item(), "acceptance": decoded.acceptance_rate}
    if isinstance(decoded, Decoded):
        accepted, levels = decoded.num_accepted[0], decoded.num_drafted[0]
        whole = accepted[:-10] >= 0  # the picture's end cuts the trees of its last ten tokens
        found |= {"first accepted": (accepted[levels > 0] > 0).float().mean().item(),
                  "mean depth": levels[:-10][whole].float().mean().item(),
                  "tv_excess": decoded.tv_excess.item() / decoded.tokens.shape[1]}
    return {name: round(value, 4) for name, value in found.items() if value == value}


def sampling_of(kind: type, seed: int, temperature: float) -> Sampling | ContinuousSampling:
    if kind is ContinuousMethod:
        return ContinuousSampling.of([seed], guidance=CONTINUOUS_GUIDANCE)
    return Sampling.of([seed], temperature=temperature, **FILTERS)


def measure(pipeline: Pipeline | MARPair, keys: list[Key], pictures: int, records: dict[Key, dict],
            kept: Callable[[], None]) -> None:
    """Draw this many pictures by each method, and add their numbers to `records`. kept: is called after each."""
    kind = type(parse_method(keys[0][0]))
    plain = "mar" if kind is ContinuousMethod else "vanilla"

    def timed(text: str, picture: int, temperature: float) -> tuple[float, Decoded | ContinuousDecoded]:
        sampling, start = sampling_of(kind, picture, temperature), perf_counter()
        decoded = pipeline.tokens([PROMPTS[picture % len(PROMPTS)]], text, sampling)
        return perf_counter() - start, decoded

    for text, _ in keys:
        pipeline.check(parse_method(text))  # the neighbors are found before the clock starts
    is_warm = False
    for picture in range(pictures):
        seconds, until, of = 0.0, 0.0, None
        for text, temperature in keys:
            record = records.setdefault((text, temperature), {
                "method": text, "temperature": temperature, "plain_seconds": [], "seconds": []})
            if len(record["seconds"]) > picture:
                continue
            if not is_warm:
                is_warm = timed(plain, picture, temperature) and timed(text, picture, temperature)
            if of != temperature or perf_counter() > until:  # the last plain one is too long ago
                seconds, of = timed(plain, picture, temperature)[0], temperature
                until = perf_counter() + 3 * seconds
            taken, decoded = timed(text, picture, temperature)
            record["plain_seconds"].append(round(seconds, 4))
            record["seconds"].append(round(taken, 4))
            for name, value in numbers(decoded).items():
                record.setdefault(name, []).append(value)
            print(f"picture {picture + 1} of {pictures}, T = {temperature:g}, {text}: {taken:.2f} s, plain "
                  f"{seconds:.2f} s, tau {decoded.tau.item():.2f}", file=sys.stderr, flush=True)
            kept()


# --- the page ---------------------------------------------------------------------------------------------------------

def results() -> dict[Key, dict]:
    return {(row["method"], row["temperature"]): row for row in tables.rows_of(f"{tables.CPU}-papers.json")}


def speedup(record: dict) -> float:
    return sum(record["plain_seconds"]) / sum(record["seconds"])


def cell(record: dict | None, name: str) -> str:
    """A number of a method; with twice the standard error over pictures, where it is tau."""
    if record is None:
        return "-"
    if name == "speed-up":
        return f"{speedup(record):.2f}"
    values = record.get({"alpha": "acceptance"}.get(name, name))
    if not values:
        return "-"
    error = 2 * np.std(values, ddof=1) / len(values) ** 0.5 if name == "tau" and len(values) > 1 else 0
    return f"{fmean(values):.{3 if name == 'tv_excess' else 2}f}" + (f" ± {error:.2f}" if error else "")


def caption(name: str) -> str:
    row, = (row for row in published("tables") if row["name"] == name)
    source = f"arXiv:{row['arXiv']}, {row['version']}"
    return f"{row['paper']} ({source}), {row['title']}; {row['setting']}."


def shown(table: Table) -> str:
    """The paper's rows with ours beside them."""
    records, lines = results(), []
    for row, keys in rows_of(table):
        first = keys[next(iter(keys))]
        ours = ["1" if keys[of] and keys[of][0] == "vanilla" and name in ("speed-up", "tau")
                else cell(records.get(keys[of]), name) for of, name in table.measured.values()]
        lines.append([*(row[column] or "-" for column in table.columns.values()),
                      f"`{first[0]}`" if first else "-", *ours])
    return tables.markdown([*table.columns, "method here", *table.measured], *lines) + f"\n\n{caption(table.name)}"


def trade_off() -> str:
    records = results()
    names = ("tau", "speed-up", "acceptance", "tv_excess")
    return tables.markdown(["curve", "method", *names], *(
        [title, f"`{text}`", *(cell(records.get((text, 1.0)), name) for name in names)]
        for title, curve in CURVES.items() if title not in SHOWN for text in curve))


def continuous() -> str:
    records = results()
    names = ("alpha", "tau", "speed-up")
    return tables.markdown(["method", *names], *(
        [f"`{text}`", *(cell(records.get((text, 1.0)), name) for name in names)] for text in CONTINUOUS))


BLOCKS = {**{table.name.replace("+", "p"): partial(shown, table) for table in TABLES}, "trade-off": trade_off,
          "cspd-here": continuous, "revisions": lambda: f"Revisions: {tables.origin(f'{tables.CPU}-papers.json')}."}


def draw(records: dict[Key, dict], path: Path) -> None:
    """tv_excess over tau, and speed-up over tv_excess: a curve for each of CURVES."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for title, curve in CURVES.items():
        found = [records[text, 1.0] for text in curve if (text, 1.0) in records]
        style = method_style(curve[0], not title.startswith("SJD")) | {"label": title.replace("`", ""), "lw": 1}
        if ": " not in title:  # methods that no parameter joins
            style |= {"ls": ""}
        tau, excess = ([fmean(record[name]) for record in found] for name in ("tau", "tv_excess"))
        left.plot(tau, excess, **style)
        right.plot(excess, [speedup(record) for record in found], **style)
    right.axhline(1, color="black", lw=0.8, ls=":")
    left.set(xlabel="tokens per target forward (tau)", ylabel="added total variation per token (tv_excess)")
    right.set(xlabel="added total variation per token (tv_excess)", ylabel="speed-up over plain decoding")
    left.legend(fontsize=7)
    harness.save_plot(figure, path)


def write_page() -> None:
    PAGE.write_text(tables.written(PAGE.read_text(), BLOCKS, captions=False))
    print(f"wrote {PAGE.relative_to(tables.ROOT)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    parser.add_argument("--pictures", type=int, default=PICTURES[Method], metavar="N",
                        help="of each method of discrete tokens; default %(default)s")
    parser.add_argument("--continuous", type=int, default=PICTURES[ContinuousMethod], metavar="N",
                        help="of each method of continuous tokens; default %(default)s")
    options = parser.parse_args()
    file = tables.RESULTS / f"{tables.CPU}-papers.json"
    if not options.tables:
        harness.check_built("cpu")
        machine = harness.machine()
        before = json.loads(file.read_text()) if file.exists() else {"machine": {}, "rows": []}
        revisions = [*before["machine"].get("git", "").split(), machine["git"]]
        machine["git"] = " ".join(dict.fromkeys(revisions))
        records = {(row["method"], row["temperature"]): row for row in before["rows"]}

        def keep() -> None:
            known = [records[key] for key in runs() if key in records]
            new = file.with_suffix(".new")  # a kill leaves the file of before
            new.write_text(harness.text_of({"machine": machine, "command": "python -m benchmarks.papers",
                                            "rows": known}) + "\n")
            new.replace(file)

        for kind, pipeline, pictures in ((Method, Pipeline, options.pictures),
                                         (ContinuousMethod, MARPair, options.continuous)):
            keys = [key for key in runs() if isinstance(parse_method(key[0]), kind)]
            if pictures and any(len(records.get(key, {}).get("seconds", [])) < pictures for key in keys):
                measure(pipeline.load(), keys, pictures, records, keep)
    draw(results(), PLOT)
    write_page()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
