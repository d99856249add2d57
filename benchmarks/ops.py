"""Every op on every backend:   python -m benchmarks.ops [op ...] [--json [FILE]] [--resume] [--groups kernels,..]

Each backend is compared with the oracle before it is timed. The baselines (benchmarks/baselines.py) are what a decoder
would write without the op; they are only timed. GB/s counts the bytes that must move; "of copy" compares this rate with
a copy's on this machine. benchmarks/harness.py explains the modes.

The file is written after each row. A row that fails is among its "errors", and the others follow. On a GPU the groups
come one after another, and oracles are not timed in graphs, which would have thousands of launches. A row that raises
an error other than a disagreement may leave the device unusable. Then the exit status is 75, and with --resume the next
run does the rest. Otherwise it is 1 if any row failed, now or before.
"""
import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch.utils._pytree import tree_leaves

import specvis_kernels
from benchmarks import harness
from benchmarks.baselines import BASELINES
from tests import cases
from tests.cases.comparing import assert_agree, run

IMAGE = [(7.5, 1.0, 1000, 1.0)]  # guidance, temperature, top_k, top_p
SHIPPED = [(1.2, 1.0, 100, 0.8)]
NUCLEUS = [(7.5, 1.0, 0, 0.9)]
LANTERN = {"branch": 10, "k": 1000, "residual": "relaxed"}
LIKELY = {"branch": 10, "likely": True, "settings": IMAGE}
STATIC = {"branch": 6, "drawn": True}  # children are drawn: of each request about two are accepted, four rejected
FIRST_CODE = 28672  # of 65536 ids, this many lie before the 8192 codes, and as many after them
XL_CACHE = {"layout": "layers", "count": 36, "width": 1280, "columns": 64, "dtype": torch.bfloat16,
            "some_wrong": False, "all_accepted": True}  # of LlamaGen-XL, but no longer than the tree
XL_HEADS = {"columns": 640, "lengths": [576], "dtype": torch.bfloat16}

# op -> (sizes for its maker in tests/cases, from real models; bytes that must move for one of them).
# LlamaGen: V = 16384; Chameleon's family (Anole, Lumina-mGPT): V = 65536, of which 8192 are codes. EAGLE-2 trees:
# N = 60, K = 10; LANTERN: k = 1000; masks: a 24 x 24 image and the tree; MAR: 16 channels, CSpD: 32 drafts and 100
# tries. Batches of 1, 8, 64. ON_GPUS has more sizes, which take a CPU seconds a call or gigabytes.
ROWS = {
    "accept_gaussian": (  # it reads tokens, four parameters, a ratio and a uniform
        [(B, 32, 16) for B in (1, 8, 64, 256)],
        lambda B, G, C: B * G * (C * 20 + 8 + 6)),
    "codebook_neighbors": (
        [(16384, 8, 1000)],
        lambda V, D, k: V * D * 4 + V * k * 2),
    "commit_kv": (  # 6 accepted nodes of 60: the shipped model, LlamaGen-B, as transformers holds it, LlamaGen-XL
        [*((B, 60, 6, {"layout": "layers", "count": 6, "width": 192, "columns": 348, "some_wrong": False,
                       "all_accepted": True}) for B in (1, 8)),
         *((B, 60, 6, {"layout": "layers", "count": 12, "width": 768, "columns": 640, "dtype": torch.bfloat16,
                       "some_wrong": False, "all_accepted": True}) for B in (1, 8)),
         (1, 60, 6, {"layout": "heads", "count": 24, "heads": 12, "width": 64, "columns": 640,
                     "dtype": torch.bfloat16}),
         (1, 60, 6, XL_CACHE)],
        lambda B, N, P, options: 2 * B * P * 2 * (2 if options["layout"] == "layers" else options["heads"])
        * options["count"] * options["width"] * options.get("dtype", torch.float32).itemsize),
    "commit_tokens": (  # 6 levels of a tree of 60 nodes, an image of 576 tokens; what it must write
        [(B, 60, 6, 576, True, False) for B in (1, 8, 64)],
        lambda B, N, P, *_: B * (3 * (P + 1) * 8 + 44)),
    "couple_tokens": (  # Jacobi windows of 16 and 32
        [*((B, W, 16384) for B in (1, 8) for W in (16, 32)), (1, 16, 65536),
         *((1, 16, 16384, options) for options in ({"k": 1000, "residual": "relaxed"}, {"group": 14}))],
        lambda B, W, V, *_: B * W * V * 8),
    "decoder_layers": (  # the shipped model's sizes and LlamaGen-B's, of one node and of a window of 16: the weights
        [(1, N, *sizes, {"layers": 12, "dtype": torch.bfloat16})
         for sizes in ((192, 3, 3, 64, 512), (768, 12, 12, 64, 2048)) for N in (1, 17)],
        lambda B, N, E, H, Hkv, D, ffn_dim, options: options["layers"] * options["dtype"].itemsize
        * E * (2 * (H + Hkv) * D + 3 * ffn_dim)),
    "denoise_tokens": (  # the shipped MAR's tokens and MAR-B's, with guidance: the weights of all steps
        [*((R, 50, 8, 2, 256, 3) for R in (1, 4, 36)), (4, 100, 16, 2, 1024, 6)],
        lambda R, T, C, P, W, blocks: T * 4 * W * ((5 * blocks + 2) * W + 3 * C)),
    "draft_children": (  # a level of 10 nodes of LlamaGen and one of 6 of the shipped model, by uniforms and by noise
        [*((1, *sizes, torch.float32, True, noise, settings) for noise in (False, True)
           for *sizes, settings in ((10, 16384, 10, IMAGE), (6, 4096, 6, SHIPPED))),
         *((B, 10, 16384, 10, torch.bfloat16, True, False, IMAGE) for B in (8, 64))],
        lambda B, F, V, K, dtype, *_: B * F * V * (2 * dtype.itemsize + 4)),
    "draft_frontier": (  # a level of 10 nodes of LlamaGen, one of 6 of the shipped model, and both models' roots
        [*((B, 10, 16384, 10, torch.float32, True, 1, IMAGE) for B in (1, 8, 64)),
         (8, 10, 16384, 10, torch.bfloat16, True, 1, IMAGE), (1, 1, 16384, 10, torch.float32, True, 1, IMAGE),
         *((1, F, 4096, 6, torch.float32, True, 1, SHIPPED) for F in (1, 6))],
        lambda B, F, V, K, dtype, *_: B * F * V * 2 * dtype.itemsize),
    "draw_children": (
        [(B, 10, 16384, 10, *noise) for noise in ((), (True,)) for B in (1, 8, 64)],
        lambda B, F, V, K, *_: B * F * (V * 4 + K * 12)),
    "draw_tokens": (  # pairs with and without condition: a window of 16, and the shipped model's of 1 and of 32
        [*((1, 17, 16384, dtype, True, IMAGE, None, ahead)
           for dtype, ahead in ((torch.float32, 0), (torch.float32, 16), (torch.bfloat16, 16))),
         (1, 17, 16384, torch.float32, True, NUCLEUS), (1, 17, 16384, torch.float32, True, [(7.5, 1.0, 0, 1.0)]),
         *((1, N, 4096, torch.float32, True, SHIPPED, None, 16) for N in (1, 33)),
         (8, 17, 16384, torch.bfloat16, True, IMAGE, None, 16), (1, 17, 65536, torch.float32, True, IMAGE),
         (1, 33, 16384, torch.bfloat16, True, IMAGE)],
        lambda B, N, V, dtype, *_: B * N * V * 2 * dtype.itemsize),
    "expand_tree": (
        [*((B, 10, 16384, 10) for B in (1, 8, 64)), (8, 10, 65536, 10)],
        lambda B, F, V, K: B * F * (V * 4 + K * 12)),
    "guided_probs": (  # pairs with and without condition
        [(1, 60, 16384, torch.float32, True, IMAGE, None),
         (1, 60, 16384, torch.bfloat16, True, IMAGE, None),
         (1, 60, 16384, torch.float32, True, NUCLEUS, None),
         (8, 60, 16384, torch.bfloat16, True, IMAGE, None),
         (64, 1, 16384, torch.bfloat16, True, IMAGE, None),
         (1, 60, 65536, torch.bfloat16, True, IMAGE)],
        lambda B, N, V, dtype, *_: B * N * V * (2 * dtype.itemsize + 4)),
    "neighborhood_sum": (
        [(60, 16384, 1000, "tvd", 0, True, 0.05), (60, 16384, 1000, "tvd", 0, True, 2.0), (480, 16384, 1000),
         (3840, 16384, 1000), (60, 65536, 1000, "tvd", FIRST_CODE, True, 0.05)],
        lambda R, V, k, *_: R * (V * 4 + k * 2)),
    "packed_linear": (  # heads of the shipped model and of LlamaGen-B: the weights
        [(2 * N, *sizes, torch.bfloat16, False) for sizes in ((192, 4096), (768, 16384)) for N in (1, 17)],
        lambda M, K, outputs, dtype, bias: K * outputs * dtype.itemsize),
    "resample_gaussian": (  # a rejected draft at least one try, the others a draft or none
        [*((B, 1, 16, 100) for B in (1, 8, 64, 256)), (64, 32, 16, 100), (64, 1, 16, 100, {"variant": "path"})],
        lambda B, G, C, M, *_: B * G * C * 8),
    "rms_norm": (  # the nodes of LlamaGen-XL's tree, with guidance and a residual
        [(2 * B * 60, 1280, torch.bfloat16, True) for B in (1, 8, 64)],
        lambda M, E, dtype, residual: (4 * M + 1) * E * dtype.itemsize),
    "rotate_into_cache": (
        [*((B, 60, 20, 20, 64, XL_HEADS) for B in (1, 8, 64)),
         *((1, 60, 32, 32, 128, XL_HEADS | {"halves": True, "norms": norms}) for norms in (False, True))],
        lambda B, N, H, Hkv, D, options: 2 * (2 * B * N * (H + 2 * Hkv) * D) * options["dtype"].itemsize),
    "sample_residual": (
        [*((R, 16384) for R in (1, 8, 64)), (8, 65536)],
        lambda R, V: R * V * 8),
    "select_tree": (
        [(B, 410, 60) for B in (1, 8, 64)],
        lambda B, M, N: B * (M * 16 + N * 16)),
    "swiglu": (
        [(2 * B * 60, 3584, torch.bfloat16) for B in (1, 8, 64)],
        lambda M, F, dtype: 3 * M * F * dtype.itemsize),
    "transformer_blocks": (  # the shipped MAR's decoder with guidance, and MAR-B's: the weights
        [(2, 272, 192, 3, 768, {"layers": 4}), (2, 272, 192, 3, 768, {"layers": 4, "wanted": 4}),
         (2, 320, 768, 12, 3072, {"layers": 12, "dtype": torch.bfloat16})],
        lambda R, N, E, heads, ffn_dim, options: options["layers"] * options.get("dtype", torch.float32).itemsize
        * E * (4 * E + 2 * ffn_dim)),
    "tree_attention": (  # the shipped model's heads in the middle of a picture, LlamaGen-B's; LlamaGen-XL's at the end
        [*((1, N, 6, 6, 32, {"columns": 348, "lengths": [165]}) for N in (1, 6, 17, 33, 60)),
         *((1, N, 12, 12, 64, {"columns": 640, "lengths": [325], "dtype": dtype})
           for dtype in (torch.float32, torch.bfloat16) for N in (1, 9, 17, 33, 60)),
         (8, 60, 12, 12, 64, {"columns": 640, "lengths": [325], "dtype": torch.bfloat16}),
         (1, 60, 20, 20, 64, XL_HEADS)],
        lambda B, N, H, Hkv, D, options: 2 * B * ((options["lengths"][0] + N) * 2 * Hkv + 2 * N * H) * D
        * options.get("dtype", torch.float32).itemsize),
    "philox_uniforms": (  # of the nodes of a tree
        [(B, 1, 60) for B in (1, 8, 64)],
        lambda B, L, n: B * L * (8 + n * 4)),
    "tree_links": (
        [(B, 60) for B in (1, 8, 64)],
        lambda B, N: B * N * (4 + 8 + 12)),
    "tree_mask": (
        [(B, 60, True, "additive", 636, torch.bfloat16) for B in (1, 8, 64)],
        lambda B, N, lengths, form, columns, dtype: B * N * (8 + columns * dtype.itemsize)),
    "verify_chain": (  # requests with 1 to 5 drafts, V of a language model too; the first row of each for certain
        [(B, V, {"num_drafts": [1, 2, 3, 4, 5], "draft": draft})
         for B, V, draft in ((64, 16384, False), (16, 16384, True), (8, 151936, False))],
        lambda B, V, options: B * V * 4 * (2 if options["draft"] else 1)),
    "verify_greedy": (  # the root's target and first child, and the results
        [(B, 60, 6, 10) for B in (1, 8, 64)],
        lambda B, N, P, branch: B * (P * 4 + 28)),
    "verify_logits": (  # the pair of the root's rows: no more is read for certain; drafts are the likeliest paths
        [*((B, 60, 16384, 6, LIKELY | options) for B in (1, 8) for options in ({}, LANTERN, {"dtype": torch.bfloat16})),
         (1, 60, 16384, 6, LIKELY | {"seeds": True})],
        lambda B, N, V, P, options: B * V * 2 * options.get("dtype", torch.float32).itemsize),
    "token_log_probs": (  # of a step's tokens, pairs with and without condition
        [(B, 17, 16384, 4, torch.bfloat16, True, IMAGE, None) for B in (1, 8, 64)],
        lambda B, N, V, K, dtype, *_: B * K * V * 2 * dtype.itemsize),
    "verify_tree": (  # the rows of the root: no more than these are read for certain
        [*((B, 60, 16384, 6, options) for B in (1, 8, 64) for options in ({"branch": 10}, LANTERN)),
         (8, 60, 65536, 6, {"branch": 10}), (1, 60, 16384, 6, STATIC)],
        lambda B, N, V, P, options: B * V * 4 * (2 if options.get("drawn") else 1)),
}
ON_GPUS = {  # op -> sizes
    "commit_kv": [(B, 60, 6, XL_CACHE) for B in (8, 64)],
    "draw_tokens": [*((B, 33, 16384, torch.float32, True, IMAGE) for B in (1, 8, 64)),
                    *((B, 33, 16384, torch.bfloat16, True, IMAGE) for B in (8, 64))],
    "guided_probs": [(64, 60, 16384, torch.bfloat16, True, IMAGE, None)],
    "tree_attention": [(B, 60, 20, 20, 64, XL_HEADS) for B in (8, 64)],
    "verify_logits": [(64, 60, 16384, 6, LIKELY | options) for options in ({}, LANTERN)],
    "verify_tree": [(B, 60, 16384, 6, STATIC) for B in (8, 64)],
}
REWINDS = {"commit_tokens": lambda args, kwargs: args[1].zero_()}  # the counts: later calls would find full images
FIRST = ("draft_frontier", "verify_logits", "draft_children", "draw_tokens", "tree_attention", "rotate_into_cache",
         "rms_norm", "swiglu", "select_tree", "commit_kv", "tree_links", "commit_tokens")  # the ops of a step
LAST = ("draw_children", "expand_tree", "guided_probs", "neighborhood_sum", "verify_chain", "verify_greedy",
        "verify_tree")  # these no loop here calls
GROUPS = ("kernels", "others", "baselines", "oracles")
AGAIN = 75  # the exit status that asks for another run, as sysexits.h has it


def format_case(case) -> str:
    return " ".join(str(x).removeprefix("torch.") for x in case)


def prepare(op: str, case: tuple, backend: str, check: bool = True):
    """(call, its args and kwargs). With `check` a backend is first compared with the oracle."""
    args, kwargs = getattr(cases, op)(*case)
    if backend in BASELINES.get(op, {}):
        function = BASELINES[op][backend]
        kwargs.pop("cutoff", None)
    else:
        forced = None if group_of(op, backend) == "kernels" else backend  # forcing takes microseconds
        function = partial(getattr(specvis_kernels, op), backend=forced)
        if check and backend != "oracle":
            assert_agree(op, *(run(op, args, kwargs, name) for name in (backend, "oracle")))
    return lambda args, kwargs: function(*args, **kwargs), (args, kwargs)


def sizes_of(op: str) -> list:
    return ROWS[op][0] + (ON_GPUS.get(op, []) if cases.DEVICE == "cuda" else [])


def measured(op: str) -> list:
    """What is timed here: the oracle first, the baselines last."""
    return [backend for backend in [*specvis_kernels.backends(op, cases.DEVICE), *BASELINES.get(op, {})]
            if (backend, cases.DEVICE) != ("triton", "cpu") and backend != "cuda_emulated"]


def group_of(op: str, backend: str) -> str:
    """One of GROUPS. "kernels" is PyTorch's choice on this device, "others" its choices if that is not built."""
    if backend == "oracle" or backend in BASELINES.get(op, {}):
        return "oracles" if backend == "oracle" else "baselines"
    return "kernels" if backend == next(name for name in measured(op) if name != "oracle") else "others"


def jobs(ops: list, groups: list) -> list:
    """(op, case, backend) of every row. On a GPU the most useful rows come first: all kernels before anything else, and
    of these the ops of a decoding step."""
    every = [(op, case, backend) for op in ops for case in sizes_of(op) for backend in measured(op)
             if group_of(op, backend) in groups]
    if cases.DEVICE == "cuda":
        every.sort(key=lambda job: (GROUPS.index(group_of(job[0], job[2])), job[0] in LAST,
                                    FIRST.index(job[0]) if job[0] in FIRST else len(FIRST)))
    return every


def measure(op: str, case: tuple, backend: str, copy: float, seconds: float) -> list:
    """The records of one row, one for each mode."""
    call, args = prepare(op, case, backend)
    num_bytes = ROWS[op][1](*case)
    times = harness.time(call, args, seconds, graphs=backend != "oracle", rewind=REWINDS.get(op))
    clocks = harness.clocks(perf_counter() // 10) if cases.DEVICE == "cuda" else {}
    return [{"op": op, "backend": backend, "mode": mode, "shape": format_case(case),
             "dtype": str(tree_leaves(args)[0].dtype).removeprefix("torch."), **summary, **clocks, "bytes": num_bytes,
             "share_of_copy": float(f"{num_bytes / summary['median_us'] * 1e6 / copy:.3g}")}
            for mode, summary in times.items()]


SAME = ("device", "torch", "triton", "sources")  # what rows of one file must share; on a CPU these too:
SAME_CPU = ("cpu", "cores", "threads")


class Results:
    """The records of a run, in a file after each change, which is replaced in one step. Without a file, nowhere."""

    def __init__(self, file: Path | None, machine: dict):
        self.file = file
        self.content = {"machine": machine, "copy_bytes_per_second": None, "rows": [], "errors": [], "running": None}

    def resume(self) -> None:
        """Continue the file. If another machine or another revision wrote it, it is renamed and kept."""
        if not self.file.exists():
            return
        found, here = json.loads(self.file.read_text()), self.content["machine"]
        names = SAME if cases.DEVICE == "cuda" else SAME + SAME_CPU
        if all(found["machine"].get(name) == here.get(name) for name in names):
            self.content |= found
            if here not in [found["machine"], *found.get("also_on", [])]:  # another driver, say
                self.content["also_on"] = [*found.get("also_on", []), here]
        else:
            self.file.replace(beside := self.file.with_suffix(".before.json"))
            print(f"{self.file} was of another machine or other sources: it is {beside} now")

    def write(self) -> None:
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            beside = self.file.with_name(self.file.name + ".new")
            beside.write_text(harness.text_of(self.content) + "\n")
            os.replace(beside, self.file)

    def left(self, jobs: list) -> list:
        """The jobs without a row or an error. The job at which an earlier run ended comes last: it may hang."""
        done = {key_of(row) for row in self.content["rows"] + self.content["errors"]}
        running = key_of(self.content["running"] or {})
        return sorted((job for job in jobs if key(*job) not in done), key=lambda job: key(*job) == running)


def key(op: str, case: tuple, backend: str) -> tuple:
    return op, backend, format_case(case)


def key_of(row: dict) -> tuple:
    return row.get("op"), row.get("backend"), row.get("shape")


def report(row: dict, oracle: dict) -> None:
    median = row["median_us"]
    print(f"{row['op']:20}{row['shape'][:46]:48}{row['backend']:14}{row['mode']:12}{median:11.1f}"
          f"{row['p10_us']:11.1f}{row['p90_us']:11.1f}{row['bytes'] / median / 1e3:9.2f}"
          f"{row['share_of_copy']:9.1%}", end="")
    print(f"{oracle[row['mode']] / median:10.1f}" if row["mode"] in oracle else "", flush=True)


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops", description=__doc__.partition("\n")[0])
    parser.add_argument("ops", nargs="*", metavar="op", help=f"of {', '.join(ROWS)}; default: all")
    parser.add_argument("--json", nargs="?", const="", metavar="FILE",
                        help="write the records; default FILE: benchmarks/results/<machine>.json")
    parser.add_argument("--resume", action="store_true", help="go on where FILE ends")
    parser.add_argument("--groups", default=",".join(GROUPS), metavar="GROUP,..", help="default: %(default)s")
    parser.add_argument("--once", action="store_true", help="only call each row once: for a profiler")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each number; default 0.5")
    options = parser.parse_args()
    for op in options.ops:
        if op not in ROWS:
            parser.error(f"no op {op!r}, only {', '.join(ROWS)}")
    for group in options.groups.split(","):
        if group not in GROUPS:
            parser.error(f"no group {group!r}, only {', '.join(GROUPS)}")
    if options.resume and options.json is None:
        parser.error("--resume needs --json")

    wanted = jobs(options.ops or list(ROWS), options.groups.split(","))
    if options.once:
        for op, case, backend in wanted:
            print(op, format_case(case), backend, flush=True)
            call, args = prepare(op, case, backend, check=False)
            call(*args)
        if cases.DEVICE == "cuda":
            torch.cuda.synchronize()
        return
    machine = harness.machine()
    file = Path(options.json or harness.ROOT / "benchmarks" / "results" / harness.file_name(machine))
    results = Results(file if options.json is not None else None, machine)
    if options.resume:
        results.resume()
    content = results.content
    copy = content["copy_bytes_per_second"] or round(harness.bandwidth(cases.DEVICE))
    content["copy_bytes_per_second"] = copy
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(f"a copy moves {copy / 1e9:.0f} GB/s")
    print(f"{'op':20}{'shape':48}{'backend':14}{'mode':12}{'us':>11}{'p10':>11}{'p90':>11}{'GB/s':>9}"
          f"{'of copy':>9}{'x oracle':>10}")

    def add(rows):
        content["rows"] += rows
        results.write()
        for row in rows:
            oracle = row["op"], "oracle", row["shape"]
            report(row, {other["mode"]: other["median_us"] for other in content["rows"] if key_of(other) == oracle})

    for job in results.left(wanted):
        op, case, backend = job
        content["running"] = dict(zip(("op", "backend", "shape"), key(*job)))
        results.write()
        try:
            add(measure(op, case, backend, copy, options.seconds))
        except Exception as error:  # the record keeps any error, and the other rows are still measured
            content["errors"].append(content["running"] | {"error": f"{type(error).__name__}: {error}"[:2000]})
            print(f"{op} {format_case(case)} {backend}: {content['errors'][-1]['error']}", flush=True)
            if not isinstance(error, AssertionError):
                results.write()
                if cases.DEVICE == "cuda":
                    sys.exit(AGAIN)
                raise
    content["running"] = None
    results.write()
    if results.file:
        print(f"wrote {file}")
    sys.exit(1 if content["errors"] else 0)


if __name__ == "__main__":
    main()
