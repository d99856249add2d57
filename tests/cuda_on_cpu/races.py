"""Data races of the CUDA kernels, found on the CPU:   python -m tests.cuda_on_cpu.races [op ...]

What a race is stands in races.cpp. Each op runs with the smallest batches of benchmarks/ops.py.
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
from benchmarks.ops import ROWS, format_case
from tests import cases, cuda_on_cpu

FOLDER = cuda_on_cpu.BUILD / "cuda_on_cpu_races"


def cases_of(op: str) -> list:
    rows = ROWS[op][0]
    return [case for case in rows if case[0] == min(row[0] for row in rows)]


def build(ops) -> Path:
    """A library in which races of these ops are found. Raises CalledProcessError."""
    sources = [cuda_on_cpu.CSRC / f"cuda/{op}.cu" for op in ops]
    if len(ops) == len(cuda_on_cpu.kernels()):
        return cuda_on_cpu.build([*sources, *cuda_on_cpu.bindings()], FOLDER / "emulated.so", races=True)
    return cuda_on_cpu.build_some(sources, FOLDER / f"{'-'.join(sorted(ops))}.so", races=True)


def taker(path: Path):
    """take(): for each launch since the last call its kernel and races, [instruction, another, how often]."""
    library = ctypes.CDLL(str(path))
    library.take_races.restype = ctypes.c_char_p
    return lambda: [json.loads(line) for line in library.take_races().decode().splitlines()]


def lines_of(path: Path, addresses: list) -> dict:
    """Address -> file:line of the source, of the function that others are inlined into last."""
    if not addresses:
        return {}
    out = subprocess.run(["addr2line", "-e", path, *addresses], check=True, capture_output=True, text=True).stdout
    return {address: re.sub(r" \(.*", "", line.rpartition("/")[2])
            for address, line in zip(addresses, out.splitlines(), strict=True)}


def start(library: Path) -> None:
    """Makes backend "cuda_emulated" of this process the one in which races are found."""
    global path, take
    path = library
    torch.set_num_threads(1)
    cuda_on_cpu.register(path)
    take = taker(path)


def races_of(op: str) -> list[str]:
    """A line for each launch, and for each race in it."""
    said = []
    for case in cases_of(op):
        args, kwargs = getattr(cases, op)(*case)
        take()
        getattr(specvis_kernels, op)(*args, **kwargs, backend="cuda_emulated")
        for launch in take():
            said.append(f"{op} {format_case(case)} {launch['kernel']}: {len(launch['races'])} races")
            lines = lines_of(path, sorted({address for *pair, _ in launch["races"] for address in pair}))
            said += [f"    RACE: {lines[first]} and {lines[second]}, {times} times"
                     for first, second, times in launch["races"]]
    return said


def main(arguments=None) -> bool:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_on_cpu.races", description=__doc__.partition("\n")[0])
    known = [kernel.stem for kernel in cuda_on_cpu.kernels()]
    parser.add_argument("ops", nargs="*", metavar="op", help=f"of {', '.join(known)}; default: all")
    ops = parser.parse_args(arguments).ops or known
    for op in ops:
        if op not in known:
            parser.error(f"no op {op!r}, only {', '.join(known)}")
    workers = min(len(ops), int(os.environ.get("MAX_JOBS", os.cpu_count() or 1)))
    with ProcessPoolExecutor(workers, get_context("fork"), start, (build(ops),)) as pool:
        said = [line for lines in pool.map(races_of, ops) for line in lines]
    print(*said, sep="\n")
    return any("RACE" in line for line in said)


if __name__ == "__main__":
    sys.exit(main())
