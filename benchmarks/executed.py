"""How many instructions of a kernel's machine code a call runs, counted without a GPU.

The emulation of tests/cuda_on_cpu runs the call, compiled so that gcov counts how often each line of source is run.
nvcc compiles the same source, and says of each instruction which line it came from and by which calls. From both: how
often a loop of the machine code runs, by its accesses to memory and its exchanges between lanes, whose number in the
source is known; an instruction in it runs as often as the loop, or as its line if that is less. This is an estimate: of
a line that the compiler copied to several places it is not known which one ran.
"""
import ctypes
import functools
import json
import re
import statistics
import tempfile
from collections import Counter, defaultdict
from multiprocessing import get_context
from pathlib import Path

import specvis_kernels
from benchmarks import machine_code, sass
from tests import cases, cuda_on_cpu

FOLDER = cuda_on_cpu.BUILD / "cuda_on_cpu_coverage"
LINE = re.compile(r'//## File "([^"]+)", line (\d+)')
KERNEL = re.compile(r"(?:void )?(\w+)(?:<(.*)>)?\(specvis::\w+[^{]*$")  # a lambda in a kernel has a "{"
TYPES = {"unsigned char": "uint8", "unsigned short": "uint16", "unsigned int": "uint32", "unsigned long": "uint64",
         "int": "int32", "long": "int64", "true": "1", "false": "0"}  # gcov's names -> the names of benchmarks/sass.py
ANCHORS = {"LDG", "LD", "STG", "ST", "LDS", "STS", "ATOM", "ATOMG", "ATOMS", "RED", "BAR", "VOTE", "REDUX"}


def library_of(op: str) -> Path:
    """The emulation in which lines of the op's kernels are counted."""
    return cuda_on_cpu.build_some([cuda_on_cpu.CSRC / "cuda" / f"{op}.cu"], FOLDER / f"{op}.so", "-O1", "--coverage")


def run_here(library: Path, op: str, case: tuple) -> None:
    """In a process of its own: the call."""
    cuda_on_cpu.register(library)
    args, kwargs = getattr(cases, op)(*case)
    getattr(specvis_kernels, op)(*args, **kwargs, backend="cuda_emulated")
    ctypes.CDLL(None).exit(0)  # C's own exit, so that the counts are written


def runs_of(op: str, case: tuple) -> tuple[Counter, Counter]:
    """(file, line) -> how often threads ran it, 0 where none ran; and (file, function) -> that number."""
    library, counts = library_of(op), FOLDER / f"{op}.cu.gcda"
    counts.unlink(missing_ok=True)
    process = get_context("fork").Process(target=run_here, args=(library, op, case))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{op} must run in the emulation, but ended with status {process.exitcode}")
    lines, functions = Counter(), Counter()
    for file in json.loads(sass.run("gcov", "--json-format", "--stdout", counts))["files"]:
        for line in file["lines"]:
            lines[Path(file["file"]).name, line["line_number"]] += line["count"]
        for function in file["functions"]:
            functions[function["demangled_name"]] += function["execution_count"]
    return lines, functions


@functools.cache
def machine_code_of(op: str) -> tuple[dict, dict]:
    """The routines and the lines of an op's kernels. What nvcc compiled is kept for later processes too."""
    source, built = cuda_on_cpu.CSRC / "cuda" / f"{op}.cu", FOLDER / f"{op}.nvcc.o"
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not cuda_on_cpu.newer(built, [Path(__file__), source, *cuda_on_cpu.CSRC.rglob("*.*h")]):
        sass.run(sass.find_tool("nvcc"), "-O3", "-std=c++17", "-fmad=false", "-w", "-lineinfo", "-DSPECVIS_CUDA",
                 "-gencode", f"arch=compute_90,code={sass.ARCH}", "-c", source, "-o", built)
    with tempfile.TemporaryDirectory() as folder:
        cubin, = sass.cubins(built, Path(folder))
        listing = sass.run(sass.find_tool("nvdisasm"), "-gi", "-c", "-ndf", cubin)
    return machine_code.parse(listing), lines_of(listing)


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


def threads_of(functions: Counter) -> Counter:
    """(kernel, its template's arguments..) -> how many threads ran it."""
    threads = Counter()
    for name, runs in functions.items():
        if match := KERNEL.match(name.replace("specvis::(anonymous namespace)::", "")):
            parts = [part.strip() for part in re.split("[<>,]", match[2] or "") if part.strip()]
            threads[(match[1], *(TYPES.get(part, part) for part in parts))] += runs
    return threads


def count(op: str, case: tuple) -> dict[str, int]:
    """What a call runs: blocks, warps, and of all warps instructions, conversions from and to 64 bits, and fp64."""
    lines, functions = runs_of(op, case)
    total = Counter(blocks=sum(runs for name, runs in functions.items() if name.startswith("cuda_on_cpu::begin(")))
    threads, (kernels, stacks) = threads_of(functions), machine_code_of(op)
    for name, routines in kernels.items():
        warps = threads[(sass.parts_of(name)[1], *sass.template_of(name))] / 32
        if warps:
            total += instructions_run(routines[0], stacks[name], lines, warps)
            total["warps"] += warps
    return {name: round(total[name]) for name in ("blocks", "warps", "instructions", "conversions_64", "fp64")}
