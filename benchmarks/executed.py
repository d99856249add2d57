"""How many instructions of a kernel's machine code a call runs, counted without a GPU.

The emulation of tests/cuda_on_cpu runs the call, compiled so that gcov counts how often each line of source is run.
nvcc compiles the same source, and says of each instruction which line it came from and by which calls. From both: how
often a loop of the machine code runs, by its accesses to memory and its exchanges between lanes, whose number in the
source is known; an instruction in it runs as often as the loop, or as its line if that is less. This is an estimate: of
a line that the compiler copied to several places it is not known which one ran.
"""
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from benchmarks import machine_code, sass

CSRC = sass.ROOT / "csrc"
FOLDER = sass.ROOT / "build" / "cuda_on_cpu_coverage"
LINE = re.compile(r'//## File "([^"]+)", line (\d+)')
KERNEL = re.compile(r"(?:void )?(\w+)(?:<(.*)>)?\(specvis::\w+")
TYPES = {"unsigned char": "uint8", "unsigned short": "uint16", "unsigned int": "uint32", "unsigned long": "uint64",
         "int": "int32", "long": "int64", "true": "1", "false": "0"}  # gcov's names -> the names of benchmarks/sass.py
ANCHORS = {"LDG", "LD", "STG", "ST", "LDS", "STS", "ATOM", "ATOMG", "ATOMS", "RED", "BAR", "VOTE", "REDUX"}


def run_here(op: str, case: str) -> None:
    """In a process of its own: the call, in the emulation that counts lines."""
    import torch

    import specvis_kernels
    from specvis_kernels import _define
    from tests import cuda_on_cpu
    from tests.kernels import inputs

    path = cuda_on_cpu.build([*cuda_on_cpu.kernels(), *cuda_on_cpu.bindings()], FOLDER / "emulated.so", "-O1",
                             "--coverage")
    library = torch.library.Library(cuda_on_cpu.NAMESPACE, "DEF")
    library.define(str(getattr(torch.ops.specvis_kernels, op).default._schema).partition("::")[2])
    _define._kernels[op]["cuda_emulated"] = getattr(getattr(torch.ops, cuda_on_cpu.NAMESPACE), op).default
    torch.ops.load_library(path)
    for file in FOLDER.glob("*.gcda"):
        file.unlink()
    args, kwargs = getattr(inputs, op)(*eval(case, {"torch": torch}))
    getattr(specvis_kernels, op)(*args, **kwargs, backend="cuda_emulated")


def runs_of(op: str, case: tuple) -> tuple[Counter, Counter]:
    """(file, line) -> how often threads ran it, 0 where none ran; and (file, function) -> that number."""
    subprocess.run([sys.executable, "-m", "benchmarks.executed", op, repr(case)], cwd=sass.ROOT, check=True,
                   env=os.environ | {"TRITON_INTERPRET": "1"})
    lines, functions = Counter(), Counter()  # an inline function's may be counted in any of the files that have it
    for text in sass.run("gcov", "--json-format", "--stdout", *FOLDER.glob("*.gcda")).splitlines():
        for file in json.loads(text)["files"]:
            for line in file["lines"]:
                lines[Path(file["file"]).name, line["line_number"]] += line["count"]
            for function in file["functions"]:
                functions[function["demangled_name"]] += function["execution_count"]
    return lines, functions


def lines_of(listing: str) -> dict[str, list[tuple]]:
    """Of each kernel's instructions in order: (file, line) and those from where it was called, innermost first."""
    found, stack, kernel = {}, (), None
    was_comment = False
    for line in listing.splitlines():
        if match := LINE.search(line):
            place = Path(match[1]).name, int(match[2])
            stack = (*stack, place) if was_comment else (place,)
            was_comment = True
            continue
        was_comment = False
        if match := machine_code.SECTION.match(line):
            kernel, stack = found.setdefault(match[1], []), ()
        elif machine_code.LINE.match(line):
            kernel.append(stack)
    return found


def instructions_run(routine: machine_code.Routine, stacks: list[tuple], lines: Counter, warps: float) -> Counter:
    """How often all warps together run each instruction of a kernel's own code, summed by what it is."""
    def alive(stack):
        return all(lines.get(place, 1) for place in stack)

    share = {}  # of a line's runs, for each way to call it
    ways = defaultdict(set)
    for stack in stacks:
        if stack and alive(stack):
            ways[stack[0]].add(stack[1:])
    for place, calls in ways.items():
        weights = {call: min((lines[caller] for caller in call if caller in lines), default=1) for call in calls}
        for call, weight in weights.items():
            share[(place, *call)] = lines.get(place, 0) / 32 * weight / sum(weights.values())
    regions = [(loop.blocks, True) for loop in routine.loops]
    inside = {block.first for blocks, _ in regions for block in blocks}
    regions.append(([block for first, block in routine.blocks.items() if first not in inside], False))
    numbered = [([numbered for block in blocks for numbered in enumerate(block.instructions, block.first)], is_loop)
                for blocks, is_loop in regions]
    copies = [Counter(stacks[i] for i, instruction in region if instruction.group in ANCHORS)
              for region, _ in numbered]
    largest = defaultdict(int)  # of a line, in which loop it stands most often: the others are what remains of it
    for region in copies:
        for stack, many in region.items():
            largest[stack] = max(largest[stack], many)
    total = Counter()
    for (region, is_loop), anchors in zip(numbered, copies):
        trips = float(warps)
        if is_loop:
            known = [share[stack] / many for stack, many in anchors.items()
                     if share.get(stack) and many == largest[stack]]
            if not known and not any(share.get(stack) for stack in anchors):
                known = [share[stacks[i]] for i, _ in region if share.get(stacks[i])]
            trips = statistics.median(known) if known else 0.0
        for i, instruction in region:
            times = min(trips, share[stacks[i]]) if stacks[i] in share else trips * alive(stacks[i])
            total["instructions"] += times
            total["conversions_64"] += times * instruction.is_conversion_64
            total["fp64"] += times * (instruction.group in machine_code.FP64)
    return total


def count(op: str, case: tuple) -> dict[str, int]:
    """What a call runs: blocks, warps, and of all warps instructions, conversions from and to 64 bits, and fp64."""
    lines, functions = runs_of(op, case)
    total = Counter(blocks=sum(runs for name, runs in functions.items() if name.startswith("cuda_on_cpu::begin(")))
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, f"{op}.o")
        sass.run(sass.find_tool("nvcc"), "-O3", "-std=c++17", "-fmad=false", "-w", "-lineinfo", "-DSPECVIS_CUDA",
                 "-gencode", f"arch=compute_90,code={sass.ARCH}", "-c", CSRC / "cuda" / f"{op}.cu", "-o", built)
        cubin, = sass.cubins(built, Path(folder))
        listing = sass.run(sass.find_tool("nvdisasm"), "-gi", "-c", "-ndf", cubin)
    stacks, threads = lines_of(listing), Counter()
    for name, runs in functions.items():
        if match := KERNEL.match(name.replace("specvis::(anonymous namespace)::", "")):
            parts = [part.strip() for part in re.split("[<>,]", match[2] or "") if part.strip()]
            threads[(match[1], *(TYPES.get(part, part) for part in parts))] += runs
    for name, routines in machine_code.parse(listing).items():
        warps = threads[(sass.parts_of(name)[1], *sass.template_of(name))] / 32
        if warps:
            total += instructions_run(routines[0], stacks[name], lines, warps)
            total["warps"] += warps
    return {name: round(total[name]) for name in ("blocks", "warps", "instructions", "conversions_64", "fp64")}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("benchmarks.executed is run by python -m benchmarks.bounds, with an op and its sizes")
    run_here(*sys.argv[1:])
