"""Jacobi decoding against plain decoding:   python -m benchmarks.jacobi {pictures,size,tau} [--json [FILE]]

`pictures` draws single pictures with the shipped model, by plain decoding and by `jacobi` with each window, in turns,
so that other work on the machine meets all of them alike. `--baseline PATH` lets another checkout take its turn with
its own plain decoding; it must be built (`setup.py build_ext --inplace`).

`size` times a step (a forward and its draws) of a larger LlamaGen with random weights. Such a model accepts nothing, so
the acceptance is the shipped model's: the steps that it took for real pictures, with what a step of their size costs
here.

`tau` prints the shipped model's tokens a forward with each window: `specvis.decoding.window.TAU`, by which `jacobi`
chooses its window.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import torch

from benchmarks import harness
from specvis.cli.options import FILTERS, PROMPTS
from specvis.decoding.decoded import Decoded
from specvis.decoding.methods import parse_method
from specvis.decoding.sampling import Sampling
from specvis.decoding.trees import chain_ancestors
from specvis.decoding.window import TAU
from specvis.models.interface import Nodes
from specvis.models.llamagen import GPT, class_config
from specvis.pipelines.discrete import Pipeline

NODES = (1, 2, 3, 5, 7, 9, 13, 17, 25, 33)
WORKER = """
import json, sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
from importlib.util import find_spec
import specvis_kernels
if find_spec("specvis.decode"):  # as they were called up to revision 044b2b9
    from specvis.decode import Sampling
    from specvis.pipeline import Pipeline
else:
    from specvis.decoding.sampling import Sampling
    from specvis.pipelines.discrete import Pipeline
pipeline = Pipeline.load()
if sys.argv[2] != "float32":
    pipeline.to(getattr(torch, sys.argv[2]))
print(json.dumps([specvis_kernels.__file__, "cpu" in specvis_kernels.backends("verify_tree", "cpu")]), flush=True)
for line in sys.stdin:
    prompt, seed, filters = json.loads(line)
    start = time.perf_counter()
    pipeline.tokens([prompt], "vanilla", Sampling.of([seed], **filters))
    print(time.perf_counter() - start, flush=True)
"""


class Checkout:
    """Plain decoding of another checkout, in a process of its own that waits for its turn."""

    def __init__(self, path: Path, dtype: str):
        environment = os.environ | {"PYTHONPATH": f"{path}:{path / 'python'}"}
        self.process = subprocess.Popen([sys.executable, "-c", WORKER, str(torch.get_num_threads()), dtype], text=True,
                                        env=environment, cwd=path, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.file, has_kernels = json.loads(self.process.stdout.readline())
        if not Path(self.file).is_relative_to(path) or not has_kernels:
            raise SystemExit(f"--baseline must be a checkout with built kernels, got {path}: it runs {self.file}, "
                             f"{'with' if has_kernels else 'without'} kernels for the CPU")

    def seconds(self, prompt: str, seed: int) -> float:
        self.process.stdin.write(json.dumps([prompt, seed, FILTERS]) + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def draw(pipeline: Pipeline, prompt: str, seed: int, method: str) -> tuple[float, Decoded]:
    start = perf_counter()
    decoded = pipeline.tokens([prompt], method, Sampling.of([seed], **FILTERS))
    return perf_counter() - start, decoded


def pictures(windows: list[str], count: int, dtype: str, baseline: Path | None) -> list[dict]:
    """A record for each contender: seconds and tokens a forward of each picture, and how many are as plain's."""
    pipeline = Pipeline.load().to(getattr(torch, dtype))
    checkout = Checkout(baseline.resolve(), dtype) if baseline else None
    methods = ["vanilla", *(f"jacobi:window={window}" for window in windows)]
    names = [*(["baseline"] if checkout else []), *methods]
    seconds, decoded = {name: [] for name in names}, {name: [] for name in methods}
    for turn in range(-1, count):  # the first turn warms up
        prompt, seed = PROMPTS[turn % len(PROMPTS)], max(turn, 0)
        for name in names:
            if name == "baseline":
                spent, tokens = checkout.seconds(prompt, seed), None
            else:
                spent, tokens = draw(pipeline, prompt, seed, name)
            if turn >= 0:
                seconds[name].append(spent)
                decoded.get(name, []).append(tokens)
    if checkout:
        checkout.close()
    records = []
    for name in names:
        record = {"method": name, "dtype": dtype, "median_s": statistics.median(seconds[name]),
                  "mean_s": statistics.mean(seconds[name]), "samples": count,
                  "times_plain": statistics.median(a / b for a, b in zip(seconds["vanilla"], seconds[name]))}
        if checkout:
            record["times_baseline"] = statistics.median(a / b for a, b in zip(seconds["baseline"], seconds[name]))
        if name in decoded:
            record["tau"] = statistics.mean(d.tau.item() for d in decoded[name])
            record["same_tokens"] = sum(d.tokens.equal(plain.tokens)
                                        for d, plain in zip(decoded[name], decoded["vanilla"]))
        records.append({key: float(f"{x:.4g}") if isinstance(x, float) else x for key, x in record.items()})
    return records


def step_of(gpt: GPT, nodes: int, sampling: Sampling):
    """A call that reads `nodes` tokens of one picture, in its middle, and draws what follows them."""
    begin, S = gpt.config.tokens // 2, gpt.prefix_len
    cache, null = gpt.new_cache(2, S + gpt.config.tokens), gpt.null_condition(2)
    gpt.prefill(null, torch.ones(null.shape[:2], dtype=torch.bool), cache)
    read = Nodes(torch.arange(nodes)[None], torch.tensor([S + begin]),
                 chain_ancestors(1, nodes, "cpu"), torch.ones(2, S, dtype=torch.bool), S + begin + nodes)
    tokens, positions = torch.zeros(2, nodes, dtype=torch.int64), begin + 1 + torch.arange(nodes)[None]

    def step():
        hidden = gpt.extend(tokens, read, cache)
        sampling.draw(gpt, hidden, positions, tokens[:1], gpt.grid if nodes > 1 else 0)
    return step


@torch.inference_mode()
def size(name: str, windows: list[int], count: int, dtype: str, seconds: float) -> list[dict]:
    """Milliseconds of a step at each of NODES, and what the shipped model's steps would take with each window."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):  # weights of inference mode are not packed
        torch.manual_seed(0)
        gpt = GPT(class_config(name)).eval().requires_grad_(False).to(getattr(torch, dtype))
    sampling = Sampling.of([0], **FILTERS | {"top_k": 1000, "top_p": 1.0})
    steps, times = {nodes: step_of(gpt, nodes, sampling) for nodes in NODES}, {nodes: [] for nodes in NODES}
    for step in steps.values():
        step()
    start = perf_counter()
    while perf_counter() - start < seconds or len(times[NODES[-1]]) < 5:
        for nodes, step in steps.items():
            begin = perf_counter()
            step()
            times[nodes].append((perf_counter() - begin) * 1e3)
    medians = {nodes: statistics.median(samples) for nodes, samples in times.items()}
    records = [{"size": name, "dtype": dtype, "nodes": nodes, "median_ms": round(medians[nodes], 3),
                "min_ms": round(min(times[nodes]), 3), "samples": len(times[nodes])} for nodes in NODES]
    pipeline = Pipeline.load()
    for window in windows:
        method = parse_method(f"jacobi:window={window}")
        decoded = pipeline.tokens(PROMPTS[:count], method, Sampling.of(list(range(count)), **FILTERS))
        began = decoded.num_accepted >= 0
        nodes = 1 + decoded.num_drafted[began]
        spent = medians[1] * count + sum(interpolated(medians, n) for n in nodes.tolist())  # the first token's forward
        plain = medians[1] * decoded.tokens.numel()
        records.append({"size": name, "dtype": dtype, "window": window, "tau": round(decoded.tau.mean().item(), 3),
                        "times_plain": round(plain / spent, 3), "samples": count})
    return records


def tau(count: int, dtype: str) -> list[dict]:
    """A record for each window that "auto" chooses from."""
    pipeline, prompts = Pipeline.load().to(getattr(torch, dtype)), [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    sampling = Sampling.of(list(range(count)), **FILTERS)
    return [{"window": window, "dtype": dtype, "samples": count, "tau": round(
        pipeline.tokens(prompts, f"jacobi:window={window}", sampling, batch=8).tau.mean().item(), 2)}
        for window in TAU if window]


def interpolated(medians: dict[int, float], nodes: int) -> float:
    """The time of a step with any number of nodes, between those that were measured."""
    below, above = max(n for n in medians if n <= nodes), min(n for n in medians if n >= nodes)
    share = (nodes - below) / max(above - below, 1)
    return medians[below] + share * (medians[above] - medians[below])


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jacobi", description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("pictures", "size", "tau"))
    parser.add_argument("--windows", default="4,8,16,32", help="default 4,8,16,32; pictures also takes auto")
    parser.add_argument("-n", type=int, default=8, help="pictures; default 8")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default float32; bfloat16 for size")
    parser.add_argument("--threads", type=int, help="default: PyTorch's own")
    parser.add_argument("--baseline", type=Path, help="pictures: another checkout, whose plain decoding takes turns")
    parser.add_argument("--size", default="B", help="size: LlamaGen's, default B")
    parser.add_argument("--seconds", type=float, default=20.0, help="size: for the steps; default 20")
    parser.add_argument("--json", nargs="?", const="", metavar="FILE", help="write the records; default FILE: "
                        "benchmarks/results/<machine>-jacobi-<pictures, size or tau>.json")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    windows = options.windows.split(",")
    if options.what == "size" and not all(window.isdigit() and 0 < int(window) < NODES[-1] for window in windows):
        parser.error(f"--windows of size must be numbers from 1 to {NODES[-1] - 1}, got {options.windows}")
    harness.check_built("cpu")
    machine = harness.machine()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    if options.what == "pictures":
        records = pictures(windows, options.n, options.dtype or "float32", options.baseline)
    elif options.what == "tau":
        records = tau(options.n, options.dtype or "float32")
    else:
        records = size(options.size, list(map(int, windows)), options.n, options.dtype or "bfloat16", options.seconds)
    for record in records:
        print("  ".join(f"{name} {value}" for name, value in record.items()), flush=True)
    if options.json is not None:
        name = harness.file_name(machine).replace(".json", f"-jacobi-{options.what}.json")
        file = Path(options.json or harness.ROOT / "benchmarks" / "results" / name)
        file.parent.mkdir(parents=True, exist_ok=True)
        command = " ".join(["python -m benchmarks.jacobi", *sys.argv[1:]])
        file.write_text(json.dumps({"machine": machine, "command": command, "rows": records}, indent=1) + "\n")
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
