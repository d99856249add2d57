"""The one way in which times are taken here, and the machine that every number belongs to."""
import os
import platform
import re
import statistics
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from pathlib import Path
from time import perf_counter

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import specvis_kernels

ROOT = Path(__file__).parent.parent
CACHE = 256 * 2**20  # bytes of inputs that take turns: more than any GPU's cache, and most CPUs'


def check_built(device: str) -> None:
    """Stop unless the ops have kernels for the device: a benchmark of decoding would time the oracles."""
    if specvis_kernels.backends("verify_logits", device) == ["oracle"]:
        sys.exit(f"specvis_kernels in {Path(specvis_kernels.__file__).parent} has no kernels for {device}: in a clone, "
                 "build them with python -m pip install -e .")


def machine() -> dict:
    """Device, versions and git revision, for every record."""
    def git(*arguments):
        try:
            run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
            return run.stdout.strip()
        except FileNotFoundError:
            return ""

    def installed(package):
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "cpu": cpu[1] if cpu else platform.processor(), "cores": os.cpu_count(),
            "threads": torch.get_num_threads(), "torch": torch.__version__, "triton": installed("triton"),
            "python": platform.python_version(), "system": platform.platform(),
            "git": git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")}


def file_name(machine: dict) -> str:
    """E.g. NVIDIA-H200.json or AMD-EPYC-2-cores.json"""
    name = machine["device"] if machine["device"] != "cpu" else f"{machine['cpu']} {machine['cores']} cores"
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") + ".json"


def summary(microseconds: list) -> dict:
    """Median and the quantiles at 10 and 90 per cent."""
    tenths = statistics.quantiles(microseconds * 2, n=10, method="inclusive")  # of one sample too
    return {"median_us": round(statistics.median(microseconds), 3), "p10_us": round(tenths[0], 3),
            "p90_us": round(tenths[-1], 3), "samples": len(microseconds)}


def collect(sample, seconds: float, min_samples: int = 5, max_samples: int = 200) -> list:
    """Samples for about this many seconds; at least `min_samples` of them, unless a single one takes much longer."""
    start, samples = perf_counter(), []
    while len(samples) < max_samples:
        samples.append(sample())
        spent = perf_counter() - start
        if spent > 10 * seconds or spent > seconds and len(samples) >= min_samples:
            break
    return samples


def copies_of(arguments: tuple) -> list:
    """Copies of the arguments that take turns: more than CACHE bytes of them, but at most 64."""
    size = sum(a.nbytes for a in tree_leaves(arguments) if isinstance(a, torch.Tensor))
    return [tree_map_only(torch.Tensor, torch.clone, arguments)
            for _ in range(min(64, 1 + CACHE // max(size, 1)))]


def time_eager(call, arguments: tuple, seconds: float) -> dict:
    """Summaries of call(*arguments), which may wait for the device itself, by mode. "eager": over one input, which a
    large enough cache holds; "eager cold": over copies that take turns."""
    def summary_over(rotation):
        turns = cycle(rotation)

        def sample():
            turn = next(turns)
            start = perf_counter()
            call(*turn)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return (perf_counter() - start) * 1e6

        sample()
        return summary(collect(sample, seconds))

    return {"eager": summary_over([arguments]), "eager cold": summary_over(copies_of(arguments))}


def time_on_cuda(call, arguments: tuple, seconds: float) -> dict:
    """Summaries by mode. "eager": what a loop in Python sees; "graph": the launches replayed, over inputs
    that take turns so that none is in the cache ("cold"), or over one ("warm")."""
    copies = copies_of(arguments)
    calls = max(20, len(copies))

    def eager():
        start = perf_counter()
        for i in range(calls):
            call(*copies[i % len(copies)])
        torch.cuda.synchronize()
        return (perf_counter() - start) * 1e6 / calls

    def replay(rotation):
        for a in rotation:  # compiled, and memory allocated, before the capture
            call(*a)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                call(*rotation[i % len(rotation)])

        def sample():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e3 / calls

        sample()
        return summary(collect(sample, seconds))

    eager()
    return {"eager": summary(collect(eager, seconds)), "graph cold": replay(copies),
            "graph warm": replay(copies[:1])}


def time(call, arguments: tuple, seconds: float) -> dict:
    """Summaries of call(*arguments) by mode, where the arguments are."""
    device = next(a.device.type for a in arguments if isinstance(a, torch.Tensor))
    return (time_on_cuda if device == "cuda" else time_eager)(call, arguments, seconds)


def bandwidth(device: str) -> float:
    """Bytes that a copy larger than any cache reads and writes in a second."""
    source = torch.empty(2 * CACHE, dtype=torch.uint8, device=device)
    times = time(torch.Tensor.copy_, (torch.empty_like(source), source), 0.2)
    return 2 * source.nbytes / times["graph cold" if device == "cuda" else "eager"]["median_us"] * 1e6
