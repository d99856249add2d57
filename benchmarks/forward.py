"""A forward on a CPU, and what limits it:   python -m benchmarks.forward [--sizes ..] [--llama PYTHON] [--json]

A forward reads 1 to 33 nodes for each of a guided pair of rows, in the middle of a picture, with their logits: by
`decoder_layers`, by PyTorch's modules; and llama.cpp reads as many rows with a random Llama of equal sizes. PyTorch has
two processes, in which OpenMP waits as by default or passively, and llama.cpp has its own. They take turns, and a
process is stopped outside its turns, so that its threads take no time from the others. A single thread's time is its
own, without what other programs take.

The limits are measured in these turns too, with as many threads: the rate at which memory is read, and the rate of the
products of `packed_linear` where the weights are in a core's cache.
"""
import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, thread_time

import torch

from benchmarks import harness
from specvis.models import layers
from specvis.models.interface import Nodes, chain_ancestors
from specvis.models.llamagen import GPT, SIZES, GPTConfig, class_config
from specvis.pipelines.discrete import Pipeline
from specvis_kernels import pack_weight, packed_linear

NODES = (1, 2, 3, 5, 9, 17, 33)
SECONDS = 0.06  # that a turn lasts
GPTS = {"tiny": GPTConfig(dim=32, layers=1, heads=2, vocabulary=64, grid=4, classes=10, ffn_multiple=16)}
MISSING = "llama.cpp is not measured: pip install llama-cpp-python gguf, or name a Python that has them with --llama"


def gpt_of(size: str, dtype: str) -> GPT:
    """The shipped model, or one with random weights."""
    torch.manual_seed(0)
    gpt = Pipeline.load().gpt if size == "shipped" else GPT(GPTS.get(size) or class_config(size))
    return gpt.eval().requires_grad_(False).to(getattr(torch, dtype))


def forward_of(gpt: GPT, nodes: int):
    """A call that reads that many nodes in the middle of a picture, with and without its condition."""
    first, null = gpt.prefix_len + gpt.config.tokens // 2, gpt.null_condition(2)
    cache, mask = gpt.new_cache(2, first + nodes), torch.ones(null.shape[:2], dtype=torch.bool)
    gpt.prefill(null, mask, cache)
    depth, ancestors = torch.arange(nodes)[None], chain_ancestors(1, nodes, "cpu")
    read = Nodes(depth, torch.tensor([first]), ancestors, mask, first + nodes)
    tokens = torch.zeros(2, nodes, dtype=torch.int64)
    return lambda: gpt.logits(gpt.extend(tokens, read, cache))


def bandwidth(dtype: str):
    """A call, and the GB that it reads."""
    data = torch.ones(2**27)
    return data.sum, data.nbytes / 1e9


def product(dtype: str):
    """A call that multiplies blocks of 12 rows, and its GFLOPs."""
    x, weight = torch.ones(192, 256, dtype=getattr(torch, dtype)), torch.ones(1024, 256, dtype=getattr(torch, dtype))
    packed = pack_weight(weight)
    return lambda: packed_linear(x, packed, 1024), 2 * len(x) * weight.numel() / 1e9


@torch.inference_mode()
def serve(size: str, dtype: str) -> None:
    """Answer each line [what, nodes, threads, seconds] with the milliseconds of forwards, or with rates."""
    with torch.inference_mode(False):  # weights of inference mode are not packed
        gpt, calls = gpt_of(size, dtype), {}
        weights = [p for name, p in gpt.named_parameters() if "embedding" not in name]
    c = gpt.config
    print(json.dumps([sum(p.nbytes for p in weights), [c.layers, c.heads, c.dim, c.ffn_dim, c.vocabulary]]), flush=True)
    for line in sys.stdin:
        what, nodes, threads, seconds = json.loads(line)
        torch.set_num_threads(threads)
        layers.USE_KERNELS = what == "decoder_layers"
        if (what, nodes) not in calls:
            limit = {"bandwidth": bandwidth, "product": product}.get(what)
            call, amount = limit(dtype) if limit else (forward_of(gpt, nodes), None)
            calls[what, nodes] = call, amount
        (call, amount), results, start = calls[what, nodes], [], perf_counter()
        now = thread_time if threads == 1 else perf_counter
        while len(results) < 2 or perf_counter() - start < seconds:  # the first warms up
            begin = now()
            call()
            spent = now() - begin
            results.append(amount / spent if amount else 1e3 * spent)
        print(json.dumps(results[1:]), flush=True)


def environment(waiting: str) -> dict[str, str]:
    """The environment in which OpenMP waits as `waiting` says: "default" or "passive"."""
    others = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    return others | ({"OMP_WAIT_POLICY": "PASSIVE"} if waiting == "passive" else {})


class Worker:
    """A process that runs only in its turns. It prints a first line, and then answers questions."""

    def __init__(self, command: list[str], waiting: str = "default"):
        self.process = subprocess.Popen(command, env=environment(waiting), cwd=harness.ROOT, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.said = self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        self.process.send_signal(signal.SIGSTOP)
        return json.loads(line) if line else sys.exit(f"a process ended: {' '.join(self.process.args)}")

    def ask(self, *question) -> list[float]:
        self.process.send_signal(signal.SIGCONT)
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return self.answer()


@contextmanager
def workers_of(size: str, dtype: str, llama: str | None = None):
    """The processes: PyTorch's by how OpenMP waits, and llama.cpp's if there is a Python for it."""
    workers = {}
    try:
        for waiting in ("default", "passive"):
            command = [sys.executable, "-m", "benchmarks.forward", "--serve", size, dtype]
            workers[waiting] = Worker(command, waiting)
        if llama:
            sizes = map(str, workers["default"].said[1])
            workers["llama.cpp"] = Worker([llama, str(Path(__file__).with_name("llama.py")), dtype, *sizes])
        yield workers
    finally:
        for worker in workers.values():  # a stopped process would never end
            worker.process.kill()
            worker.process.communicate()


def measure(size: str, dtype: str, seconds: float, llama: str | None) -> tuple[list[dict], dict]:
    """A record for each of NODES and each contender; and the limits, in GB/s and GFLOP/s."""
    most = torch.get_num_threads()
    contenders = [("decoder_layers", "default", 1), ("decoder_layers", "default", most), ("eager", "default", 1),
                  ("eager", "default", most), ("eager", "passive", most)]
    contenders += [("llama.cpp", "llama.cpp", 1), ("llama.cpp", "llama.cpp", most)] if llama else []
    times = {(contender, nodes): [] for nodes in NODES for contender in dict.fromkeys(contenders)}
    rates, turns = {(what, threads): [] for what in ("bandwidth", "product") for threads in (1, most)}, 0
    with workers_of(size, dtype, llama) as workers:
        start = perf_counter()
        while turns < 2 or perf_counter() - start < seconds:
            for (what, threads), values in rates.items():
                values += workers["default"].ask(what, 0, threads, SECONDS)
            for ((what, waiting, threads), nodes), samples in times.items():
                question = (2 * nodes,) if what == "llama.cpp" else (what, nodes)
                samples += workers[waiting].ask(*question, threads, SECONDS)
            turns += 1
        weights = workers["default"].said[0]
    limits, records = {key: max(values) for key, values in rates.items()}, []
    for ((what, waiting, threads), nodes), samples in times.items():
        best, median = min(samples), statistics.median(samples)
        record = {"size": size, "dtype": dtype, "nodes": nodes, "what": what, "threads": threads, "waiting": waiting,
                  "median_ms": median, "min_ms": best, "samples": len(samples),
                  "of_bandwidth": weights / 1e6 / best / limits["bandwidth", threads],
                  "of_product": 4 * nodes * weights / getattr(torch, dtype).itemsize / 1e6 / best
                  / limits["product", threads]}
        records.append({key: float(f"{x:.4g}") if isinstance(x, float) else x for key, x in record.items()})
    return records, {f"{what}, {threads}": round(rate, 1) for (what, threads), rate in limits.items()}


def best_of(records: list[dict]) -> dict[tuple[str, int], dict]:
    """The records by contender, with its threads, and nodes. PyTorch's eager forward has its best setting."""
    best = {}
    for r in records:
        name = "PyTorch" if r["what"] == "eager" else f"{r['what']}, threads: {r['threads']}"
        key = name, r["nodes"]
        best[key] = min(r, best.get(key, r), key=lambda one: one["median_ms"])
    return best


def table(records: list[dict], limits: dict[str, float]) -> list[str]:
    """Markdown: median and least milliseconds, and the shares of the limits that `decoder_layers` reaches."""
    best = best_of(records)
    names = list(dict.fromkeys(name for name, _ in best))
    ours = [name for name in names if name.startswith("decoder_layers")]
    r, columns = records[0], ' | '.join(names)
    head = f"| {r['size']}, {r['dtype']}: nodes | {columns} | of bandwidth | of product |"
    lines = [head, "|---" * (len(names) + 3) + "|"]
    for nodes in NODES:
        cells = [f"{best[name, nodes]['median_ms']:.2f} ({best[name, nodes]['min_ms']:.2f})" for name in names]
        shares = [", ".join(f"{best[name, nodes][share]:.0%}" for name in ours)
                  for share in ("of_bandwidth", "of_product")]
        lines.append(f"| {nodes} | {' | '.join(cells + shares)} |")
    return [*lines, "Limits (GB/s, GFLOP/s; threads): " + "; ".join(f"{key}: {x}" for key, x in limits.items())]


def main():
    if sys.argv[1:2] == ["--serve"]:
        return serve(*sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forward", description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["shipped:float32", "shipped", "B", "L", "XL"], metavar="SIZE",
                        help=f"of shipped, {', '.join(SIZES)}, with :float32 or in bfloat16; default shipped:float32 "
                        "shipped B L XL")
    parser.add_argument("--seconds", type=float, default=60.0, help="of turns, for each size; at least two turns are "
                        "taken; default 60")
    parser.add_argument("--llama", default=sys.executable, metavar="PYTHON", help="one that has llama-cpp-python and "
                        "gguf; default: this one")
    parser.add_argument("--json", nargs="?", const="", metavar="FILE", help="write the records; default FILE: "
                        "benchmarks/results/<machine>-forward.json")
    options = parser.parse_args()
    for text in options.sizes:
        if text.partition(":")[0] not in ("shipped", *SIZES, *GPTS) or text.partition(":")[2] not in ("", "float32"):
            parser.error(f"--sizes must be of shipped, {', '.join(SIZES)}, or with :float32, got {text!r}")
    harness.check_built("cpu")
    version = harness.said_by(options.llama, "-c", "import gguf, llama_cpp; print(llama_cpp.__version__)")
    llama = options.llama if version else print(MISSING)
    machine, records, limits = harness.machine() | {"llama_cpp": version or None}, [], {}
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    for text in options.sizes:
        size, _, dtype = text.partition(":")
        rows, limits[text] = measure(size, dtype or "bfloat16", options.seconds, llama)
        records += rows
        print(*table(rows, limits[text]), sep="\n", flush=True)
    if options.json is not None:
        harness.write(options.json, "forward", machine, {"limits": limits, "rows": records})


if __name__ == "__main__":
    main()
