"""What an H100 could do at best with each op:   python -m benchmarks.bounds

Counts bytes, instructions and dependent steps and divides them by the H100's rates, for trees of 60 nodes and 16384
ids and batches of 1, 8 and 64. No GPU takes part. It writes benchmarks/results/h100-bounds.json and the table of
docs/gpu.md, in which measured times stand beside the bounds. What nvcc and g++ compiled is kept in build/, and compiled
again after a change of the sources.
"""
import argparse
import json
import os
import re
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

import torch

from benchmarks import executed, harness, ops, sass, tables
from tests.cuda_on_cpu import trace

RESULTS = sass.ROOT / "benchmarks" / "results" / "h100-bounds.json"
PAGE = sass.ROOT / "docs" / "gpu.md"
BATCHES = (1, 8, 64)
RATES = {  # assumed, from NVIDIA's documents, and from what others measured on Hopper GPUs; the copy is measured
    "multiprocessors": 132,
    "cycles_per_us": 1980,
    "copy_bytes_per_us": 2.43e6,
    "warp_instructions_per_cycle": 4,    # on a multiprocessor, as the next two
    "conversions_64_per_cycle": 16,
    "fp64_per_cycle": 64,
    "tensor_flop_per_us": 989e6,         # bfloat16, dense
    "kernel_us": 1.3,                    # an empty kernel in a chain of a CUDA graph
}
HOW = {
    "bytes": "what must be read and written, from the shapes (benchmarks/ops.py); of a walk the root's row alone",
    "memory_us": "bytes / copy_bytes_per_us, as if nothing were in the cache",
    "launches": "of kernels, one after another",
    "instructions": "of warps: what one request runs (benchmarks/executed.py, an estimate: the machine code's loops as "
                    "often as gcov counts their lines in the emulation) with the blocks and threads that each has in "
                    "that batch, times the batch. Of tree_attention: tiles * the instructions of its loop",
    "instructions_us": "instructions / warp_instructions_per_cycle on the multiprocessors that have a block",
    "conversions_us": "of them those from and to 64 bits / conversions_64_per_cycle",
    "fp64_us": "of them those of fp64 / fp64_per_cycle",
    "chain_cycles": "the longest chain of steps that wait for each other, of a block, by the emulation's clock and the "
                    "costs that tests/cuda_on_cpu/trace.cpp assumes; of rows that are alike one is traced, by as many "
                    "blocks as share it in that batch",
    "chain_us": "chain_cycles / cycles_per_us",
    "tensor_us": "multiplications and additions of whole tiles / tensor_flop_per_us",
    "bound_us": "launches * kernel_us + the largest of the others in microseconds: counted, not measured",
    "limit": "which that is; launch, if all of them are less than launches * kernel_us",
}

CASES = [  # title, op, sizes for its maker with batch B
    # The ops of a step of LlamaGen-XL, in order
    ("draft_frontier, 10 pairs of float32", "draft_frontier",
     lambda B: (B, 10, 16384, 10, torch.float32, True, 1, ops.IMAGE)),
    ("draft_children, 10 pairs of float32", "draft_children",
     lambda B: (B, 10, 16384, 10, torch.float32, True, False, ops.IMAGE)),
    ("select_tree, of 410 nodes", "select_tree", lambda B: (B, 410, 60)),
    ("tree_links", "tree_links", lambda B: (B, 60)),
    ("tree_attention, a layer, 576 columns", "tree_attention", lambda B: (B, 60, 20, 20, 64, ops.XL_HEADS)),
    ("verify_logits", "verify_logits", lambda B: (B, 60, 16384, 6, ops.LIKELY)),
    ("verify_logits, LANTERN, k = 1000", "verify_logits", lambda B: (B, 60, 16384, 6, ops.LIKELY | ops.LANTERN)),
    ("draw_tokens, 33 pairs of float32", "draw_tokens", lambda B: (B, 33, 16384, torch.float32, True, ops.IMAGE)),
    ("commit_kv, 6 nodes", "commit_kv", lambda B: (B, 60, 6, ops.XL_CACHE)),
    ("commit_tokens", "commit_tokens", lambda B: (B, 60, 6, 576, True, False)),
    # The others
    ("guided_probs, 60 pairs of bfloat16", "guided_probs",
     lambda B: (B, 60, 16384, torch.bfloat16, True, ops.IMAGE, None)),
    ("expand_tree, 10 rows", "expand_tree", lambda B: (B, 10, 16384, 10)),
    ("draw_children, 10 rows", "draw_children", lambda B: (B, 10, 16384, 10)),
    ("verify_tree", "verify_tree", lambda B: (B, 60, 16384, 6, {"branch": 10})),
    ("verify_tree, LANTERN, k = 1000", "verify_tree", lambda B: (B, 60, 16384, 6, ops.LANTERN)),
    ("verify_tree, draft rows", "verify_tree", lambda B: (B, 60, 16384, 6, ops.STATIC)),
    ("neighborhood_sum, 60 rows, k = 1000", "neighborhood_sum", lambda B: (B * 60, 16384, 1000)),
]


@contextmanager
def share_of(requests: int):
    """Within this, the emulation launches one request as the whole device launches each of this many.

    Launches depend on whether an even number of blocks is at most the multiprocessors, or any number is below them. So
    a share is rounded up: 132 / 8 to 17, of 132 / 64 to 3.
    """
    os.environ["CUDA_ON_CPU_SMS"] = str(-(-RATES["multiprocessors"] // requests))
    try:
        yield
    finally:
        del os.environ["CUDA_ON_CPU_SMS"]


def chain(op: str, B: int, case) -> list[int]:
    """Cycles of each launch of a call, which come one after another. `case(B)`: the sizes for a batch."""
    one = list(case(1))
    requests = B
    if op in ("guided_probs", "draw_tokens"):
        requests, one[1] = B * one[1], 1
    if op == "neighborhood_sum":
        requests, one[0] = B * one[0], 1
    with share_of(requests):
        return [record["chain_cycles"] for record in trace.run(trace.build([op]), [(op, tuple(one))])]


def attention_tiles(kernels: dict[str, dict], case: tuple) -> tuple[int, float]:
    """Instructions of all threads, and floating-point operations, of tree_attention."""
    B, N, H, Hkv, D, options = case
    title = next(title for title in kernels if "bf16" in title and f"BLOCK_D={D}" in title and "BLOCK_M=64" in title)
    kernel = kernels[title]
    block_m, block_t = (int(re.search(rf"BLOCK_{name}=(\d+)", title)[1]) for name in "MT")
    programs = 2 * B * Hkv * -(-N * (H // Hkv) // block_m)
    tiles = programs * (-(-options["lengths"][0] // block_t) + -(-N // block_t))
    loop = next(loop for loop in kernel["loops"] if "matrix_products" in loop)
    return (tiles * loop["instructions"] * kernel["warps"], tiles * 4.0 * block_m * block_t * D)


def bound(title: str, op: str, case: tuple, B: int, one: dict, chains: list[int] | None,
          kernels: dict[str, dict]) -> dict:
    """One row of the results. `one`: what one request runs in that batch; `chains`: see `chain`"""
    num_bytes, flop = ops.ROWS[op][1](*case), 0.0
    counts = {name: B * one.get(name, 0) for name in ("instructions", "conversions_64", "fp64")}
    cycles = min(RATES["multiprocessors"], B * one.get("blocks", 132)) * RATES["cycles_per_us"]  # a us, of all used
    launches = len(chains or [])
    if op == "tree_attention":
        counts["instructions"], flop = attention_tiles(kernels, case)
        launches = 1 + (2 * B * case[3] < RATES["multiprocessors"])  # a second kernel merges, see its file
    parts = {
        "memory_us": num_bytes / RATES["copy_bytes_per_us"],
        "instructions_us": counts["instructions"] / RATES["warp_instructions_per_cycle"] / cycles,
        "conversions_us": counts["conversions_64"] * 32 / RATES["conversions_64_per_cycle"] / cycles,
        "fp64_us": counts["fp64"] * 32 / RATES["fp64_per_cycle"] / cycles,
        "tensor_us": flop / RATES["tensor_flop_per_us"],
        "chain_us": sum(chains or []) / RATES["cycles_per_us"],
    }
    limit, launch_us = max(parts, key=parts.get), launches * RATES["kernel_us"]
    return {"title": title, "op": op, "batch": B, "bytes": num_bytes, "launches": launches, **counts,
            "chain_cycles": sum(chains) if chains else None,
            **{name: round(us, 2) for name, us in parts.items()},
            **({} if chains else {"chain_us": None}),
            "bound_us": round(launch_us + parts[limit], 1),
            "limit": limit.removesuffix("_us") if parts[limit] > launch_us else "launch"}


# --- showing ----------------------------------------------------------------------------------------------------------

def cell(rows: list[dict], name: str, number: str = "{:g}") -> str:
    """1 / 8 / 64, or one where they are equal."""
    texts = ["-" if row.get(name) is None else number.format(row[name]) if name != "limit" else row[name]
             for row in rows]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def table(results: dict) -> str:
    """Of docs/gpu.md: a line for each op, and in a cell the batches of 1 / 8 / 64."""
    tables.READ[RESULTS.name] = True
    times = {(row["op"], row["shape"]): row["median_us"] for row in reversed(tables.rows_of(f"{tables.GPU}.json"))
             if row["mode"] == "graph between"}  # of the first backend: the device's own kernel
    cases = {title: case for title, _, case in CASES}
    lines = []
    for title in dict.fromkeys(row["title"] for row in results["rows"]):
        rows = [row | {"mb": row["bytes"] / 1e6,
                       "measured": times.get((row["op"], ops.format_case(cases[title](row["batch"]))))}
                for row in results["rows"] if row["title"] == title]
        lines.append([re.sub(r"^\w+", r"`\g<0>`", title), cell(rows, "mb", "{:.3g}"),
                      *(cell(rows, name) for name in ("launches", "memory_us", "instructions_us", "chain_us")),
                      cell(rows, "bound_us"), cell(rows, "limit"), f"**{cell(rows, 'measured', '{:.1f}')}**"])
    return tables.markdown(["op", "MB", "launches", "memory", "instructions", "chain", "bound", "limit", "measured"],
                           *lines)


def page_of(page: str, results: dict) -> str:
    """docs/gpu.md with this table."""
    return tables.written(page, {"bounds": lambda: table(results)})


def compile_all() -> None:
    """Everything that takes minutes, by as many processes as there are cores."""
    names = {op for _, op, *_ in CASES} - {"tree_attention"}
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
        jobs = [pool.submit(job, op) for job in (executed.machine_code_of, executed.library_of) for op in names]
        for job in [*jobs, *(pool.submit(trace.build, [op]) for op in names)]:
            job.result()


def rows_of(title: str, op: str, case, attention: dict) -> list[dict]:
    """The results of an op's sizes, for each batch. attention: what `sass.read_triton` says of that op"""
    rows = []
    for B in BATCHES:
        one, chains = {}, None
        if op != "tree_attention":
            chains = chain(op, B, case)
            with share_of(B):
                one = executed.count(op, case(1))
        row = bound(title, op, case(B), B, one, chains, attention)
        rows.append(row)
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return rows


def count_all() -> dict:
    compile_all()
    with ProcessPoolExecutor(1, get_context("fork")) as pool:  # no kernel runs in that process afterwards
        attention = pool.submit(sass.read_triton, ["tree_attention"]).result()[1]["tree_attention"]
    rows = [row for case in CASES for row in rows_of(*case, attention)]
    return {"device": "NVIDIA H100", "note": "counted, not measured", "how": HOW, "rates": RATES,
            "git": harness.machine()["git"], "rows": rows}


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bounds", description=__doc__.partition("\n")[0])
    parser.add_argument("--page", action="store_true", help="only the table of docs/gpu.md, of what was counted")
    if not parser.parse_args().page:
        RESULTS.write_text(harness.text_of(count_all()) + "\n")
    PAGE.write_text(page_of(PAGE.read_text(), json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
