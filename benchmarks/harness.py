"""How all benchmarks take times, and the description of the machine in every record."""
import hashlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from pathlib import Path
from time import perf_counter

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import specvis_kernels

ROOT = Path(__file__).parent.parent
CACHE = 256 * 2**20  # bytes of inputs that take turns on a CPU: more than the cache of most
MAX_COPIES = 64      # of one input
WARM_UP = 0.1        # seconds of calls before a CPU's first sample. PyTorch's threads, which an oracle uses, stay busy
                     # for a while. A kernel that meets them takes one thread for the next 50 ms.


def check_built(device: str) -> None:
    """Stop unless the ops have kernels for the device: a benchmark of decoding would time the oracles."""
    if specvis_kernels.backends("verify_logits", device) == ["oracle"]:
        sys.exit(f"specvis_kernels in {Path(specvis_kernels.__file__).parent} has no kernels for {device}: in a clone, "
                 "build them with python -m pip install -e .")


def said_by(*command: str) -> str:
    """The output of a program; empty if it does not exist."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def asked_of_the_gpu(*fields: str) -> list:
    """The answers of nvidia-smi about the first GPU, None for each that is missing."""
    said = said_by("nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    values = [value.strip() for value in said.split(",")]
    return values if len(values) == len(fields) else [None] * len(fields)


@lru_cache(maxsize=1)
def clocks(tens: int) -> dict:
    """The GPU's clocks in MHz, asked once in ten seconds: nvidia-smi takes up to one. tens: perf_counter() // 10"""
    return dict(zip(("sm_mhz", "memory_mhz"), asked_of_the_gpu("clocks.sm", "clocks.mem")))


def sources() -> str:
    """A fingerprint of the timed code and of the benchmark: it identifies the revision where there is no git."""
    patterns = ("csrc/**/*.*", "specvis_kernels/**/*.py", "tests/cases/*.py",
                *(f"benchmarks/{name}.py" for name in ("baselines", "harness", "ops", "released")))
    files = [file for pattern in patterns for file in sorted(ROOT.glob(pattern))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def installed(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)


def machine() -> dict:
    """Device, versions and git revision, for every record."""
    git = partial(said_by, "git")
    changed = git("status", "--porcelain", ":(top,exclude)benchmarks/results")  # what a run writes changes no run

    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    gpu = {}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        driver, sm_mhz, memory_mhz = asked_of_the_gpu("driver_version", "clocks.max.sm", "clocks.max.mem")
        gpu = {"cuda": torch.version.cuda, "driver": driver, "multiprocessors": properties.multi_processor_count,
               "l2_bytes": properties.L2_cache_size, "most_sm_mhz": sm_mhz, "most_memory_mhz": memory_mhz}
    return {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", **gpu,
            "cpu": cpu[1] if cpu else platform.processor(), "cores": os.cpu_count(),
            "threads": torch.get_num_threads(), "torch": torch.__version__, "triton": installed("triton"),
            "python": platform.python_version(), "system": platform.platform(),
            "git": git("rev-parse", "--short", "HEAD") + ("+" if changed else ""),
            "sources": sources()}


def file_name(machine: dict) -> str:
    """E.g. NVIDIA-H200.json or AMD-EPYC-2-cores.json"""
    name = machine["device"] if machine["device"] != "cpu" else f"{machine['cpu']} {machine['cores']} cores"
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") + ".json"


def text_of(content: dict | list, depth: int = 2) -> str:
    """JSON with a line for each row of a table: what is deeper than `depth`, or short and flat, is one line."""
    parts = content.values() if isinstance(content, dict) else content if isinstance(content, (list, tuple)) else []
    text = json.dumps(content)
    if not depth or len(text) < 600 and not any(isinstance(part, (dict, list)) for part in parts):
        return text
    keys = [f"{json.dumps(key)}: " for key in content] if isinstance(content, dict) else [""] * len(parts)
    lines = ",\n".join(key + text_of(part, depth - 1) for key, part in zip(keys, parts)).replace("\n", "\n ")
    return f"{text[0]}\n {lines}\n{text[-1]}"


def write(file: str, what: str, machine: dict, content: dict) -> None:
    """Write a benchmark's records, by default to benchmarks/results/<machine>-<what>.json."""
    path = Path(file or ROOT / "benchmarks" / "results" / file_name(machine).replace(".json", f"-{what}.json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join([f"python -m benchmarks.{what}", *sys.argv[1:]])
    path.write_text(text_of({"machine": machine, "command": command} | content) + "\n")
    print(f"wrote {path}")


def save_plot(figure, path: Path) -> None:
    """Write a figure, and say where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def summary(microseconds: list) -> dict:
    """Median and the quantiles at 10 and 90 per cent."""
    tenths = statistics.quantiles(microseconds * 2, n=10, method="inclusive")  # works for one sample too
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


def time_on_cpu(call, arguments: tuple, seconds: float, rewind: Callable | None = None) -> dict:
    """Summaries of call(*arguments) by mode. "eager": over one input, which a large enough cache holds; "eager cold":
    over copies that take turns: more than CACHE bytes of them, but at most MAX_COPIES."""
    def summary_over(rotation):
        turns = cycle(rotation)

        def sample():
            turn = next(turns)
            if rewind:
                rewind(*turn)
            start = perf_counter()
            call(*turn)
            return (perf_counter() - start) * 1e6

        collect(sample, WARM_UP, len(rotation), sys.maxsize)  # baselines prepare each copy at its first call
        return summary(collect(sample, seconds))

    num_bytes = sum(a.nbytes for a in tree_leaves(arguments) if isinstance(a, torch.Tensor))
    copies = [tree_map_only(torch.Tensor, torch.clone, arguments)
              for _ in range(min(MAX_COPIES - 1, CACHE // max(num_bytes, 1)))]
    return {"eager": summary_over([arguments]), "eager cold": summary_over([arguments, *copies])}


def reads_back(call, arguments: tuple) -> str:
    """Why the call cannot be captured: PyTorch's message if the host waits for the device in it. Otherwise empty.

    A failed capture may leave the process's allocator and random generators in the state of a capture. So this is
    asked before.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(*arguments)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


@lru_cache(maxsize=1)
def products() -> Callable:
    """A call of two products of other shapes, as a model's forward has them between two ops."""
    x, weight = (torch.ones(rows, 1280, dtype=torch.bfloat16, device="cuda") for rows in (120, 3840))
    return lambda: x @ weight.T @ weight


def captured(calls: list):
    """A function that replays the calls, and returns how many microseconds that took."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def replay() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    replay()
    return replay


def between(calls: list, others: Callable) -> Callable:
    """A function that replays the calls, each after the others, and returns how many microseconds the calls took."""
    others()
    both, alone = captured([one for each in calls for one in (others, each)]), captured([others] * len(calls))
    return lambda: max(both() - alone(), 1e-3)  # a difference of clocks may be 0


def time_on_cuda(call, arguments: tuple, seconds: float, graphs: bool) -> dict:
    """Summaries by mode, over one input.

    "eager" is the time of a loop in Python, which waits for the device after up to 64 calls. With `graphs`, "graph
    between" follows where the call can be captured: the device's time alone, of launches of a CUDA graph between
    products of matrices, whose kernels leave little of the op's code in the instruction caches. Their own time is
    subtracted.
    """
    def eager(calls):
        start = perf_counter()
        for _ in range(calls):
            call(*arguments)
        torch.cuda.synchronize()
        return (perf_counter() - start) * 1e6 / calls

    eager(1)
    calls = max(1, min(64, int(seconds / 5 * 1e6 / eager(1))))
    times = {"eager": summary(collect(lambda: eager(calls), seconds)) | {"calls": calls}}
    if graphs and (why := reads_back(call, arguments)):
        times["eager"]["not_captured"] = why
    elif graphs:
        amid = between([partial(call, *arguments)] * 20, products())
        times["graph between"] = summary(collect(lambda: amid() / 20, seconds))
    return times


def time(call, arguments: tuple, seconds: float, graphs: bool = True, rewind: Callable | None = None) -> dict:
    """Summaries of call(*arguments) by mode, on the device of the arguments.

    Args:
        graphs:   whether a GPU's graphs are timed too
        rewind:   rewind(*arguments) undoes what a call changes, for the next one; on a CPU, and not timed
    """
    device = next(a.device.type for a in tree_leaves(arguments) if isinstance(a, torch.Tensor))
    if device != "cuda":
        return time_on_cpu(call, arguments, seconds, rewind)
    return time_on_cuda(call, arguments, seconds, graphs)


def bandwidth(device: str) -> float:
    """Bytes that a copy larger than any cache reads and writes in a second."""
    source = torch.empty(2 * CACHE, dtype=torch.uint8, device=device)
    times = time(torch.Tensor.copy_, (torch.empty_like(source), source), 0.2)
    return 2 * source.nbytes / times["eager"]["median_us"] * 1e6
