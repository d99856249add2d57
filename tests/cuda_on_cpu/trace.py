"""What the CUDA kernels do, counted on the CPU:   python -m tests.cuda_on_cpu.trace [op ...] [--json FILE] [--sites]

For each launch: traffic, coalescing, bank conflicts, barriers, the longest chain of steps that wait for each other, and
races. The rules, and the cycles that a step is assumed to take, are in trace.cpp. Nothing here is a measurement.
"""
import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

import specvis_kernels
from benchmarks import harness
from benchmarks.ops import ROWS, format_case
from tests import cases, cuda_on_cpu

TRACED = cuda_on_cpu.BUILD / "cuda_on_cpu_traced"
BOUNDS = cuda_on_cpu.HERE / "bounds.json"
COLUMNS = {  # heading -> of a record
    "blocks": lambda r: f"{r['blocks']}/{r['cluster']}",
    "threads": lambda r: r["threads"],
    "KB read": lambda r: f"{r['read_bytes'] / 1000:.1f}",
    "times": lambda r: f"{ratio(r, 'read'):.2f}",
    "sectors": lambda r: r["read_sectors"],
    "a request": lambda r: f"{r['read_sectors'] / max(1, r['read_requests']):.2f}",
    "KB written": lambda r: f"{r['write_bytes'] / 1000:.1f}",
    "wavefronts": lambda r: r["shared_wavefronts"],
    "conflicts": lambda r: r["shared_conflicts"],
    "barriers": lambda r: f"{r['barriers']}+{r['cluster_barriers']}",
    "warp ops": lambda r: f"{r['warp_operations'] / r['warps']:.1f}",
    "chain": lambda r: r["chain_cycles"],
    "races": lambda r: len(r["races"]),
}
LEGEND = """blocks: all / of a cluster; times: bytes that requests read / distinct bytes; a request: sectors of 32 bytes
that one of a warp reads; barriers: of the block + of the cluster; warp ops: of a warp; chain: cycles, as trace.cpp
assumes them"""


# What may not worsen -> of a record, and by how much a bound that is written from it is larger.
LIMITS = {
    "times_read": (lambda r: ratio(r, "read"), 1.02),
    "times_written": (lambda r: ratio(r, "write"), 1.02),
    "sectors_a_request": (lambda r: r["read_sectors"] / max(1, r["read_requests"]), 1.02),
    "conflicts": (lambda r: r["shared_conflicts"], 1),
    "barriers": (lambda r: r["barriers"], 1),
    "cluster_barriers": (lambda r: r["cluster_barriers"], 1),
    "warp_operations_a_warp": (lambda r: r["warp_operations"] / r["warps"], 1.02),
    "chain_cycles": (lambda r: r["chain_cycles"], 1.1),
}


def bound_of(record: dict) -> dict:
    return {name: record[name] for name in ("op", "shape", "kernel")} | {
        name: round(value(record) * slack, 2) for name, (value, slack) in LIMITS.items()}


def broken(record: dict, bound: dict) -> list:
    """The names of the limits that a record breaks; `races` is one of them."""
    return [name for name, (value, _) in LIMITS.items() if round(value(record), 2) > bound[name]] + [
        "races"] * bool(record["races"])


def compare(records: list, bounds: list) -> list:
    """A sentence for each limit that is broken, and for each launch without a bound."""
    known = {(bound["op"], bound["shape"], bound["kernel"]): bound for bound in bounds}
    says = []
    for record in records:
        key = record["op"], record["shape"], record["kernel"]
        if key not in known:
            says.append(f"{' '.join(key)}: no bound")
            continue
        for name in broken(record, known[key]):
            value, bound = (LIMITS[name][0](record), known[key][name]) if name in LIMITS else (record["races"], "none")
            says.append(f"{' '.join(key)}: {name} {value}, bound {bound}")
    return says


def ratio(record: dict, what: str) -> float:
    return record[f"{what}_bytes"] / max(1, record[f"{what}_distinct_bytes"])


def cases_of(op: str, every: bool) -> list:
    """The sizes of benchmarks/ops.py: of its rows those with the smallest batch, or every one."""
    rows = ROWS[op][0]
    return [case for case in rows if every or case[0] == min(row[0] for row in rows)]


def copy_sources(folder: Path, changes: dict) -> Path:
    """csrc as g++ is to see it: it knows `#pragma unroll` by another name. `changes`: file -> [(old, new)]."""
    for file in cuda_on_cpu.CSRC.rglob("*.*"):
        copy = folder / file.relative_to(cuda_on_cpu.CSRC)
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_text()
        for old, new in changes.get(file.name, []):
            if text.count(old) != 1:
                raise ValueError(f"{file.name} has {text.count(old)} times {old!r}")
            text = text.replace(old, new)
        text = re.sub(r"#pragma unroll *(\d*)", lambda found: f"#pragma GCC unroll {found[1] or 16}", text)
        if not copy.exists() or copy.read_text() != text:
            copy.write_text(text)
    return folder


def build(ops, folder: Path = TRACED, changes=None) -> Path:
    """A library in which the kernels of these ops are traced. Raises CalledProcessError."""
    copy = copy_sources(folder / "csrc", changes or {})
    sources = [copy / f"cuda/{op}.cu" for op in ops]
    if len(ops) == len(cuda_on_cpu.kernels()):
        return cuda_on_cpu.build([*sources, *cuda_on_cpu.bindings()], folder / "emulated.so", trace=True)
    return cuda_on_cpu.build_some(sources, folder / f"{'-'.join(sorted(ops))}.so", trace=True)


def taker(path: Path):
    """take(): the records of the launches since the last call."""
    library = ctypes.CDLL(str(path))
    library.take_trace.restype = ctypes.c_char_p
    return lambda: [json.loads(line) for line in library.take_trace().decode().splitlines()]


def lines_of(path: Path, addresses: list) -> dict:
    """Address -> file:line of the source, of the function that others are inlined into last."""
    if not addresses:
        return {}
    out = subprocess.run(["addr2line", "-e", path, *addresses], check=True, capture_output=True, text=True).stdout
    return {address: re.sub(r" \(.*", "", line.rpartition("/")[2])
            for address, line in zip(addresses, out.splitlines(), strict=True)}


def trace(op: str, case: tuple) -> list:
    """A record for each launch, in a process that has registered a traced library."""
    args, kwargs = getattr(cases, op)(*case)
    take()
    getattr(specvis_kernels, op)(*args, **kwargs, backend="cuda_emulated")
    records = [{"op": op, "shape": format_case(case), **record} for record in take()]
    for record in records:
        races, sites = record["races"], record["sites"]
        lines = lines_of(path, sorted({site[0] for site in sites}))
        record["races"] = [[lines[first], lines[second], times] for first, second, times in races]
        record["sites"] = [[lines[address], *rest] for address, *rest in sites]
    return records


def start(library: Path) -> None:
    """Makes backend "cuda_emulated" of this process the traced one."""
    global path, take
    path = library
    torch.set_num_threads(1)
    cuda_on_cpu.register(path)
    take = taker(path)


def run(library: Path, jobs: list) -> list:
    """The records of [(op, case)], each op in one of as many processes as there are cores."""
    workers = min(len(jobs), int(os.environ.get("MAX_JOBS", os.cpu_count() or 1)))
    with ProcessPoolExecutor(workers, get_context("fork"), start, (library,)) as pool:
        return [record for records in pool.map(trace, *zip(*jobs, strict=True)) for record in records]


def show(records: list, sites: bool) -> None:
    rows = [["op", "shape", "kernel", *COLUMNS]]
    rows += [[r["op"], r["shape"][:36], r["kernel"].removesuffix("_kernel"), *(str(f(r)) for f in COLUMNS.values())]
             for r in records]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, record in zip(rows, [None, *records], strict=True):
        print("  ".join(cell.ljust(width) if i < 3 else cell.rjust(width)
                        for i, (cell, width) in enumerate(zip(row, widths, strict=True))))
        if record:
            for first, second, times in record["races"]:
                print(f"    RACE: {first} and {second}, {times} times")
            for line, what, *numbers in record["sites"] if sites else []:
                print("    {:28} {:14} requests {:7} lanes {:8} bytes {:9} {} {:7} conflicts {}".format(
                    line, what, *numbers[:3], "wavefronts" if "shared" in what else "sectors", *numbers[3:]))


def main(arguments=None) -> bool:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_on_cpu.trace", description=__doc__.partition("\n")[0])
    known = [kernel.stem for kernel in cuda_on_cpu.kernels()]
    parser.add_argument("ops", nargs="*", metavar="op", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--every", action="store_true", help="every size of benchmarks/ops.py; default: small batches")
    parser.add_argument("--json", metavar="FILE", help="write the records")
    parser.add_argument("--check", action="store_true", help=f"fail where a bound of {BOUNDS.name} is broken")
    parser.add_argument("--write-bounds", action="store_true", help=f"into {BOUNDS.name}, from this run")
    parser.add_argument("--sites", action="store_true", help="what each line of source accesses, too")
    options = parser.parse_args(arguments)
    for op in options.ops:
        if op not in known:
            parser.error(f"no op {op!r}, only {', '.join(known)}")
    ops = options.ops or known
    records = run(build(ops), [(op, case) for op in ops for case in cases_of(op, options.every)])
    show(records, options.sites)
    print(LEGEND)
    if options.json:
        flat = [{name: value for name, value in record.items() if name != "sites"} for record in records]
        Path(options.json).write_text(harness.text_of(flat) + "\n")
    bounds = json.loads(BOUNDS.read_text()) if BOUNDS.exists() else []
    if options.write_bounds:
        bounds = [bound for bound in bounds if bound["op"] not in ops] + [bound_of(record) for record in records]
        bounds.sort(key=lambda bound: bound["op"])
        BOUNDS.write_text("[\n" + ",\n".join(map(json.dumps, bounds)) + "\n]\n")
    says = compare(records, bounds) if options.check else [
        f"{record['op']}: races" for record in records if record["races"]]
    print(*says, sep="\n")
    return bool(says)


if __name__ == "__main__":
    sys.exit(main())
