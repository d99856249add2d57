"""The first thing to run on a GPU:   python -m benchmarks.smoke [op ...]

Each kernel gets each small input, and what it gives is compared with the C++ kernel's results on the CPU: bit for bit,
except where `TOLERANCES` has an entry. Then it runs again, and must give the same. Each op has a process of its own,
which waits for every launch, so a crash or a hang takes one op with it, and the first error is the op's own. Where
compute-sanitizer is in PATH, it watches an op that went wrong once more. The exit status is 3 if any did. On a GPU an
op whose CUDA kernel is not there, or cannot be loaded, is wrong.
"""
import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils._pytree import tree_map_only

import specvis_kernels
from benchmarks import harness
from benchmarks.ops import FIRST
from tests import cases
from tests.cases.comparing import assert_agree, run, same

AGAIN = 20     # runs of a kernel that must be equal: a result that changes is a race
SECONDS = 60   # that an op may take
SANITIZER = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "3")


def try_op(op: str) -> None:
    """Raises AssertionError if the kernel's results differ from the CPU's, or from one run to the next."""
    here, on_cpu = specvis_kernels.backends(op, cases.DEVICE), specvis_kernels.backends(op, "cpu")
    ours = next((name for name in ("cuda", "cpu", "triton") if name in here), None)
    assert cases.DEVICE != "cuda" or ours == "cuda" or not (harness.ROOT / f"csrc/cuda/{op}.cu").exists(), \
        f"{op} has no CUDA kernel here: was the library built, and does it load? backends: {here}"
    if ours is None:
        return print(f"{op}: no kernel for {cases.DEVICE}")
    theirs = "cpu" if "cpu" in on_cpu and ours != "cpu" else "oracle"
    for case in [*cases.CASES[op], *cases.LARGE.get(op, ())]:
        args, kwargs = getattr(cases, op)(*case)
        got = run(op, args, kwargs, ours)
        args_there, kwargs_there, got_there = tree_map_only(torch.Tensor, torch.Tensor.cpu, (args, kwargs, tuple(got)))
        expected = run(op, args_there, kwargs_there, theirs)
        differ = [(i, int((a != b).sum()), (a != b).nonzero()[:1].tolist())
                  for i, (a, b) in enumerate(zip(got_there, expected)) if a.shape == b.shape]
        assert_agree(op, got_there, expected, f"{case}, by output, how many differ, and the first: {differ}")
        for _ in range(AGAIN):
            assert all(map(same, run(op, args, kwargs, ours, check=False), got)), f"{case}: it differs from run to run"
    print(f"{op}: {ours} agrees with {theirs}")


def alone(op: str, watch: tuple[str, ...] = ()) -> tuple[bool, str]:
    """Whether all is well with an op, and what its process said."""
    command = [*watch, sys.executable, "-m", "benchmarks.smoke", "--here", op]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS,
                              env=os.environ | {"CUDA_LAUNCH_BLOCKING": "1"})
        return done.returncode == 0, done.stdout if done.returncode == 0 else f"{op}: {done.stdout[-3000:]}"
    except subprocess.TimeoutExpired as error:
        return False, f"{op}: after {SECONDS} s it still runs\n{(error.stdout or b'').decode()[-3000:]}"


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smoke", description=__doc__.partition("\n")[0])
    parser.add_argument("ops", nargs="*", metavar="op", help="default: all, those of a decoding step first")
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args()
    for op in options.ops:
        if op not in cases.CASES:
            parser.error(f"no op {op!r}, only {', '.join(cases.CASES)}")
    ops = options.ops or [*FIRST, *(op for op in cases.CASES if op not in FIRST)]
    if options.here:
        torch.set_printoptions(threshold=100, edgeitems=2)
        for op in ops:
            try_op(op)
        return
    tools = {tool: shutil.which(tool) for tool in ("nvcc", "compute-sanitizer", "ncu")}
    print(*(f"{name} {value}" for name, value in (harness.machine() | tools).items()), sep="\n", flush=True)
    wrong = []
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for op, (is_well, said) in zip(ops, pool.map(alone, ops)):
            print(said, end="", flush=True)
            wrong += [] if is_well else [op]
    for op in wrong if tools["compute-sanitizer"] else []:
        print(f"\n{op}, watched:\n{alone(op, SANITIZER)[1]}", flush=True)
    if wrong:
        print(f"wrong: {' '.join(wrong)}")
        sys.exit(3)


if __name__ == "__main__":
    main()
