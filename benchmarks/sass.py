"""What the compiler made of the GPU kernels:   python -m benchmarks.sass [op ...] [--triton] [--json [FILE]]

Reads the machine code for sm_90 (H100, H200) of specvis_kernels/_ops_cuda.so, or of Triton's kernels, which it
compiles. It needs no GPU: everything is counted in the code, nothing is measured. For every kernel and each of its
loops: instructions; global loads and how many of them are in flight before the first is used; shared loads and
stores; conversions from and to 64 bits; divisions; fp64; barriers, fences and atomics. Instructions of an
inner loop do not count for the outer one. An entry is one number of the rows that a loop loads 16 bytes at a time.
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import specvis_kernels

ROOT = Path(__file__).parent.parent
LIBRARY = Path(specvis_kernels.__file__).with_name("_ops_cuda.so")
RESULTS = ROOT / "benchmarks" / "results" / "sm_90-machine-code.json"
PAGE = RESULTS.with_name("machine_code.md")
ARCH = "sm_90"
SIZES = {"float": 4, "__half": 2, "__nv_bfloat16": 2}  # type in a kernel's template -> bytes of an entry

LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\d) )?([A-Z][\w.]*)\s*(.*?) ?;$")
LABEL = re.compile(r"^([.$\w]+):$")
ROUTINE = re.compile(r"^\s+\.type\s+(\S+),@function$")
SECTION = re.compile(r"^\s+\.section\s+\.text\.(\S+?),")
TARGET = re.compile(r"`\(([.$\w]+)\)")
REGISTER = re.compile(r"(?<![\w.])R(\d+)(\.64)?")


# --- reading ----------------------------------------------------------------------------------------------------------

@dataclass(slots=True)
class Instruction:
    name: str           # with its modifiers: LDG.E.128
    guard: str | None   # the predicate that it depends on
    operands: str
    group: str = field(init=False)      # LDG
    modifiers: set = field(init=False)  # {"E", "128"}
    width: int = field(init=False)      # bytes that a load or store moves for a thread
    touched: tuple | None = field(init=False, default=None)

    def __post_init__(self):
        self.group, *modifiers = self.name.split(".")
        self.modifiers = set(modifiers)
        self.width = next((WIDTHS[part] for part in modifiers if part in WIDTHS), 4)

    def has(self, *modifiers: str) -> bool:
        return not self.modifiers.isdisjoint(modifiers)

    @property
    def is_conversion_64(self) -> bool:
        return self.group in ("F2I", "I2F", "F2F", "FRND") and self.has("S64", "U64", "F64")

    def touches(self, registers: set[int]) -> bool:
        if self.touched is None:
            written, read = self.registers()
            self.touched = written | read
        return not self.touched.isdisjoint(registers)

    def registers(self) -> tuple[set[int], set[int]]:
        """The registers that it writes, and the registers that it reads."""
        parts = [[(int(number), wide) for number, wide in REGISTER.findall(part)]
                 for part in re.split(r",(?![^\[]*\])", self.operands)]
        if self.group in STORES or self.group in ("BRA", "EXIT", "RET"):
            target, sources = [], parts
        else:
            first = 1 if re.match(r"U?P[T\d]", self.operands) and len(parts) > 1 else 0  # a predicate comes before it
            target, sources = parts[first], parts[:first] + parts[first + 1:]
            if "[" in self.operands.split(",")[first]:
                target, sources = [], parts
        written = {target[0][0] + i for i in range(self.written_registers())} if target else set()
        span = max(1, self.width // 4) if self.group in STORES else 4 if "MMA" in self.group else 2 if (
            self.group in FP64 or ".64" in self.name or self.has("WIDE", "F64", "S64", "U64")) else 1
        read = set()
        for part in sources:
            for number, wide in part:
                read |= {number + i for i in range(max(span, 2 if wide else 1))}
        return written, read

    def written_registers(self) -> int:
        if self.group in LOADS:
            return max(1, self.width // 4)
        if "MMA" in self.group:
            return 4
        return 2 if self.group in FP64 or "64" in self.name or self.has("WIDE") else 1


WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
GLOBAL_LOADS = ("LDG", "LD")  # LD is generic: the compiler does not know which memory it reads
LOADS = (*GLOBAL_LOADS, "LDS", "LDL", "LDC", "LDSM", "ATOM", "ATOMG", "ATOMS")
STORES = ("STG", "ST", "STS", "STL", "RED", "REDG", "STSM", "LDGSTS")
FP64 = ("DADD", "DMUL", "DFMA", "DSETP", "DMNMX")


@dataclass
class Block:
    """Instructions that are run one after another, and where the blocks that may follow begin."""

    first: int
    instructions: list[Instruction]
    next: list[int] = field(default_factory=list)


@dataclass
class Routine:
    """A kernel, or a routine that it calls; `labels` maps to numbers of instructions."""

    name: str
    instructions: list[Instruction]
    labels: dict[str, int]

    @cached_property
    def blocks(self) -> dict[int, Block]:
        """The blocks that the entry reaches, by their first instruction.

        The code for lanes of a warp that are apart at a shuffle (BRA.DIV) is left out: these kernels never run it.
        """
        ends = [i + 1 for i, instruction in enumerate(self.instructions) if instruction.group in JUMPS]
        starts = sorted({0, *self.labels.values(), *ends} - {len(self.instructions)})
        blocks = {first: Block(first, self.instructions[first:end])
                  for first, end in zip(starts, [*starts[1:], len(self.instructions)])}
        for first, block in blocks.items():
            after = first + len(block.instructions)
            block.next = [i for i in self.following(after - 1) if i in blocks]
        reached, waiting = {0}, [0]
        while waiting:
            for following in blocks[waiting.pop()].next:
                if following not in reached:
                    reached.add(following)
                    waiting.append(following)
        return {first: block for first, block in blocks.items() if first in reached}

    def following(self, i: int) -> list[int]:
        last = self.instructions[i]
        if last.group == "BRA" and not last.has("DIV"):
            is_certain = last.guard is None and not last.operands.partition("`")[0].strip()
            return ([] if is_certain else [i + 1]) + self.targets(last)
        if last.group == "BRX":
            return self.targets(last)
        if last.group in ("EXIT", "RET") and last.guard is None:
            return []
        if last.group == "BSYNC":  # to where the last BSSY with this barrier said
            barrier = last.operands.strip()
            for before in reversed(self.instructions[:i]):
                if before.group == "BSSY" and before.operands.startswith(barrier + ","):
                    return self.targets(before)
        return [i + 1]

    def targets(self, instruction: Instruction) -> list[int]:
        return [self.labels[name] for name in TARGET.findall(instruction.operands) if name in self.labels]

    @cached_property
    def dominators(self) -> dict[int, int]:
        """For each block, the last block through which every path to it goes (Cooper, Harvey and Kennedy)."""
        order, done, stack = [], {0}, [(0, iter(self.blocks[0].next))]
        while stack:
            first, rest = stack[-1]
            following = next((i for i in rest if i not in done), None)
            if following is None:
                order.append(first)
                stack.pop()
            else:
                done.add(following)
                stack.append((following, iter(self.blocks[following].next)))
        place = {first: i for i, first in enumerate(reversed(order))}
        before = {first: [] for first in self.blocks}
        for first, block in self.blocks.items():
            for following in block.next:
                before[following].append(first)
        dominators, changed = {0: 0}, True
        while changed:
            changed = False
            for first in sorted(place, key=place.get)[1:]:
                common = None
                for other in before[first]:
                    if other not in dominators:
                        continue
                    while common is not None and common != other:
                        if place[common] > place[other]:
                            common = dominators[common]
                        else:
                            other = dominators[other]
                    common = other
                changed |= dominators.get(first) != common
                dominators[first] = common
        return dominators

    def dominates(self, first: int, other: int) -> bool:
        while other > 0 and other != first:
            other = self.dominators[other]
        return first == other

    @cached_property
    def loops(self) -> list["Loop"]:
        """Outer ones first."""
        bodies, before = {}, {}
        for first, block in self.blocks.items():
            for following in block.next:
                before.setdefault(following, []).append(first)
        for first, block in self.blocks.items():
            for head in block.next:
                if self.dominates(head, first):
                    body = bodies.setdefault(head, {head})
                    waiting = [first]
                    while waiting:
                        inside = waiting.pop()
                        if inside not in body:
                            body.add(inside)
                            waiting += before.get(inside, [])
        loops = []
        for head, body in sorted(bodies.items(), key=lambda item: (-len(item[1]), item[0])):
            depth = sum(head in outer and head != other for other, outer in bodies.items())
            inner = set().union(*(other for start, other in bodies.items() if start in body and start != head))
            loops.append(Loop(head, depth, [self.blocks[i] for i in sorted(body - inner)], bool(inner)))
        return sorted(loops, key=lambda loop: loop.head)

    @cached_property
    def once(self) -> list[list[Instruction]]:
        """Instructions outside of loops, in runs that no loop interrupts."""
        inside = {block.first for loop in self.loops for block in loop.blocks}
        runs, was_inside = [], True
        for first, block in sorted(self.blocks.items()):
            if first not in inside:
                if was_inside:
                    runs.append([])
                runs[-1] += block.instructions
            was_inside = first in inside
        return runs


JUMPS = ("BRA", "BRX", "EXIT", "RET", "BSYNC")


@dataclass
class Loop:
    head: int
    depth: int
    blocks: list[Block]  # that are in no inner loop
    is_outer: bool

    @property
    def instructions(self) -> list[Instruction]:
        return [instruction for block in self.blocks for instruction in block.instructions]


def parse(text: str) -> dict[str, list[Routine]]:
    """The routines of each kernel of a listing by `nvdisasm -c`, the kernel itself first."""
    kernels, routines = {}, []
    for line in text.splitlines():
        if match := LINE.match(line):
            guard, name, operands = match.groups()
            routines[-1].instructions.append(Instruction(name, guard, operands))
        elif match := SECTION.match(line):
            routines = kernels.setdefault(match[1], [])
        elif match := ROUTINE.match(line):
            routines.append(Routine(match[1], [], {}))
        elif (match := LABEL.match(line)) and routines:
            routines[-1].labels[match[1]] = len(routines[-1].instructions)
    return kernels


# --- counting ---------------------------------------------------------------------------------------------------------

def in_flight(instructions: list[Instruction], least: int = 1) -> int:
    """The most global loads of at least `least` bytes that wait at once. A load waits until an instruction reads or
    writes one of its registers; earlier loads have arrived by then."""
    waiting, groups, most = [], 0, 0
    for instruction in instructions:
        used = [i for i, (registers, _) in enumerate(waiting) if registers and instruction.touches(registers)]
        if used:
            waiting = [load for i, load in enumerate(waiting) if i > used[-1] or load[1] is not None]
        if instruction.group in GLOBAL_LOADS and instruction.width >= least:
            waiting.append((instruction.registers()[0], None))
        elif instruction.group == "LDGSTS" and instruction.width >= least:  # into shared memory; groups are waited for
            waiting.append((set(), groups))
        elif instruction.group == "LDGDEPBAR":
            groups += 1
        elif instruction.group == "DEPBAR" and (match := re.search(r"SB0, (0x[0-9a-f]+)", instruction.operands)):
            waiting = [load for load in waiting if load[1] is None or load[1] >= groups - int(match[1], 16)]
        most = max(most, len(waiting))
    return most


def accesses(instructions, *groups) -> dict[str, int]:
    """How many there are of each width: {"16 bytes": 4}"""
    widths = Counter(instruction.width for instruction in instructions if instruction.group in groups)
    return {f"{width} bytes": widths[width] for width in sorted(widths, reverse=True)}


def count(instructions: list[Instruction], repeats: bool, size: int) -> dict:
    """Counts of a loop's instructions, or of those outside of loops; zeros are left out."""
    distinct = {}  # an instruction of each name, and how many there are
    for instruction in instructions:
        distinct.setdefault(instruction.name, [instruction, 0])[1] += 1

    def number(test):
        return sum(many for instruction, many in distinct.values() if test(instruction))

    instructions_in_turn = instructions * (1 + repeats)
    wide = 16 * number(lambda i: i.group in (*GLOBAL_LOADS, "LDGSTS") and i.width == 16)
    counts = {
        "instructions": len(instructions),
        "loads": accesses(instructions, *GLOBAL_LOADS, "LDGSTS"),
        "loads_in_flight": in_flight(instructions_in_turn),
        "wide_in_flight": in_flight(instructions_in_turn, 16),
        "generic_loads": number(lambda i: i.group == "LD"),
        "constant_loads": number(lambda i: i.group == "LDG" and i.has("CONSTANT")),
        "stores": accesses(instructions, "STG", "ST"),
        "shared_loads": accesses(instructions, "LDS", "LDSM"),
        "shared_stores": accesses(instructions, "STS", "STSM"),
        "local": number(lambda i: i.group in ("LDL", "STL")),
        "conversions_64": number(lambda i: i.is_conversion_64),
        "reciprocals": number(lambda i: i.group == "MUFU" and i.has("RCP", "RCP64H")),
        "division_calls": sum(i.group == "CALL" and ("_div_" in i.operands or "_rem_" in i.operands)
                              for i in instructions),
        "exponentials": number(lambda i: i.group == "MUFU" and i.has("EX2")),
        "fp64": number(lambda i: i.group in FP64),
        "shuffles": number(lambda i: i.group in ("SHFL", "VOTE", "MATCH", "REDUX", "CREDUX")),
        "barriers": number(lambda i: i.group == "BAR"),
        "cluster_barriers": number(lambda i: i.group == "UCGABAR_WAIT"),
        "fences": number(lambda i: i.group in ("MEMBAR", "CCTL", "ERRBAR", "CGAERRBAR", "FENCE")),
        "atomics": number(lambda i: i.group in ("ATOM", "ATOMG", "RED", "REDG")),
        "shared_atomics": number(lambda i: i.group == "ATOMS"),
        "matrix_products": number(lambda i: "MMA" in i.group),
    }
    if wide:
        counts["instructions_per_entry"] = round(len(instructions) * size / wide, 1)
    return {name: value for name, value in counts.items() if value}


def largest(parts: list[dict], name: str):
    return max((part.get(name, 0) for part in parts), default=0)


def total(parts: list[dict], name: str) -> int:
    return sum(part.get(name, 0) for part in parts)


IN_FLIGHT = ("loads_in_flight", "wide_in_flight")


def report(routines: list[Routine], size: int = 4) -> dict:
    """All counts of a kernel: of all instructions, of those outside of loops, and of each loop.

    `size`: bytes of an entry.
    """
    kernel = routines[0]
    once = [count(run, False, size) for run in kernel.once]
    loops = [{"depth": loop.depth, **count(loop.instructions, True, size)} for loop in kernel.loops]
    return {
        **count([i for block in kernel.blocks.values() for i in block.instructions], False, size),
        **{name: largest([*once, *loops], name) for name in IN_FLIGHT},
        "once": count([i for run in kernel.once for i in run], False, size) | {
            name: largest(once, name) for name in IN_FLIGHT},
        "loops": loops,
        "called": {routine.name.rpartition("__cuda_")[2]: len(routine.instructions) for routine in routines[1:]},
    }


def bounds_of(kernel: dict) -> dict:
    """The numbers of a report that tests/slow/test_machine_code.py holds: wide_in_flight may not fall, and the other
    numbers may not rise."""
    loops = kernel["loops"]
    rows = [loop for loop in loops if "instructions_per_entry" in loop]
    return {
        "registers": kernel["registers"],
        "instructions": kernel["instructions"],
        "wide_in_flight": kernel["wide_in_flight"],
        "single_loads": sum(loop["wide_in_flight"] < 2 for loop in rows),
        "instructions_per_entry": largest(rows, "instructions_per_entry"),
        **{name: kernel.get(name, 0) for name in ("local", "conversions_64", "reciprocals", "division_calls", "fp64",
                                                  "barriers", "cluster_barriers", "fences", "atomics",
                                                  "constant_loads")},
        **{f"{name}_in_loops": total(loops, name) for name in ("generic_loads", "conversions_64", "reciprocals",
                                                               "division_calls", "fp64")},
    }


# --- where the code is ------------------------------------------------------------------------------------------------

def find_tool(name: str) -> str:
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    if find_spec("triton"):
        folders.append(str(Path(find_spec("triton").origin).parent / "backends/nvidia/bin"))
    if find_spec("nvidia"):
        folders += map(str, Path(next(iter(find_spec("nvidia").submodule_search_locations))).glob("*/bin"))
    tool = shutil.which(name, path=os.pathsep.join(folders))
    if not tool:
        sys.exit(f"no {name} in PATH, in /usr/local/cuda/bin or in Triton's package: "
                 "python -m pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    return tool


def run(*command) -> str:
    return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout


def compiler_of(cubin: Path) -> str:
    match = re.search(rb"release [\d.]+, (V[\d.]+)", cubin.read_bytes())
    return match[1].decode() if match else ""


def cubins(file: Path, folder: Path) -> list[Path]:
    """The GPU code of a library or object: a file for each source file."""
    subprocess.run([find_tool("cuobjdump"), "-xelf", ARCH, file.resolve()], cwd=folder, check=True,
                   capture_output=True)
    found = {path: [int(number) for number in re.findall(r"\d+", path.name)] for path in folder.glob(f"*.{ARCH}.cubin")}
    return sorted(found, key=found.get)


def reports(cubin: Path, names: re.Pattern | None = None) -> dict[str, dict]:
    """The report of every kernel, by its name in the machine code."""
    used = run(find_tool("cuobjdump"), "--dump-resource-usage", cubin)
    listing = run(find_tool("nvdisasm"), "-c", "-ndf", cubin)
    if " BRX" in listing:  # only the full analysis finds where such a branch may lead
        listing = run(find_tool("nvdisasm"), "-c", cubin)
    kernels = {}
    for name, routines in parse(listing).items():
        if names is None or names.search(name):
            numbers = re.search(rf"Function {re.escape(name)}:\n(.*)", used)[1]
            registers, stack, shared = (int(re.search(what + r":(\d+)", numbers)[1])
                                        for what in ("REG", "STACK", "SHARED"))
            size = next((SIZES[part] for part in template_of(name) if part in SIZES), 4)
            kernels[name] = {"registers": registers, "stack": stack, "shared": shared, **report(routines, size)}
    return kernels


KERNEL = re.compile(r"\d_([a-z]\w*?)_cu_[0-9a-f]{8}(?:_\d+?)?(\d{1,3})(?=[a-z])(\w+)")
TYPES = {"f": "float", "h": "uint8", "t": "uint16", "j": "uint32", "m": "uint64", "i": "int32", "l": "int64"}


def parts_of(name: str) -> tuple[str, str, str]:
    """The parts of a kernel's name in the machine code: the file, the function, and the rest."""
    if match := KERNEL.search(name):
        file, digits, rest = match.groups()
        for length in (int(digits[i:]) for i in range(len(digits))):  # a process's number may come before the length
            if rest[length:length + 1] in ("E", "I"):
                return file, rest[:length], rest[length:]
    return "", name, ""


def template_of(name: str) -> list[str]:
    """The template arguments of a C++ kernel, in order: ["Held", "float"]"""
    rest, parts, depth = parts_of(name)[2], [], 0
    while rest and (depth or rest[0] == "I"):
        if match := re.match(r"L[a-z](\d+)E|S\d*_", rest):  # a number; or a name that was used before
            parts += [match[1]] if match[1] else []
            rest = rest[match.end():]
        elif match := re.match(r"\d+", rest):
            end = match.end() + int(match[0])
            parts.append(rest[match.end():end])
            rest = rest[end:]
        else:
            depth += {"I": 1, "N": 1, "E": -1}.get(rest[0], 0)
            parts += [TYPES[rest[0]]] if rest[0] in TYPES else []
            rest = rest[1:]
    return parts


def title_of(name: str) -> tuple[str, str]:
    """The op, and the kernel as it is shown: ("verify_logits", "verify_by_seeds<float>")"""
    op, function, _ = parts_of(name)
    parts = ", ".join(part.strip("_") for part in template_of(name))
    return op, function.removesuffix("_kernel") + (f"<{parts}>" if parts else "")


def read_library(file: Path = LIBRARY, ops: list[str] = ()) -> tuple[str, dict[str, dict]]:
    """The compiler's version, and op -> kernel -> report."""
    found, compiler = {}, ""
    names = re.compile("|".join(rf"\d_{op}_cu_" for op in ops)) if ops else None
    with tempfile.TemporaryDirectory() as folder:
        for cubin in cubins(file, Path(folder)):
            compiler = compiler or compiler_of(cubin)
            if names and not names.search(run(find_tool("cuobjdump"), "--dump-resource-usage", cubin)):
                continue
            for name, kernel in reports(cubin, names).items():
                op, title = title_of(name)
                found.setdefault(op, {})[title] = kernel
    return compiler, dict(sorted(found.items()))


def read_triton(ops: list[str] = ()) -> tuple[str, dict[str, dict]]:
    """read_library for Triton's kernels, compiled by tests/slow/test_triton_compiles.py, for its sizes.

    The process must not use Triton's interpreter, and cannot run a kernel afterwards.
    """
    import benchmarks.ops
    from tests.slow import test_triton_compiles

    found, compiler, rows = {}, "", benchmarks.ops.ROWS

    def read(built):
        nonlocal compiler
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder, "kernel.cubin")
            cubin.write_bytes(built.asm["cubin"])
            compiler = compiler or compiler_of(cubin)
            kernel, = reports(cubin).values()
        kernel["shared"], kernel["warps"] = built.metadata.shared, built.metadata.num_warps
        op, names, constants = built.src.fn.__module__, built.src.fn.arg_names, built.src.constants
        types = {type.strip("*") for type in built.src.signature.values() if type.startswith("*")} & FLOATS
        sizes = [f"{names[i]}={value}" for (i, *_), value in constants.items() if value is not None]
        title = f"{built.src.fn.__name__.removesuffix('_kernel')}<{', '.join([*sorted(types), *sizes])}>"
        found.setdefault(op.rpartition(".")[2], {})[title] = kernel
        return [kernel["registers"], kernel["stack"]]

    test_triton_compiles.registers_and_stack = read
    benchmarks.ops.ROWS = {op: rows[op] for op in ops or rows}
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        test_triton_compiles.main(ARCH)
    benchmarks.ops.ROWS = rows
    return compiler, found


FLOATS = {"fp32", "fp16", "bf16"}


# --- showing ----------------------------------------------------------------------------------------------------------

COLUMNS = {  # title -> the names of the counts that it shows
    "instr": ("instructions",), "/entry": ("instructions_per_entry",), "loads": ("loads",),
    "in flight": ("loads_in_flight",), "LDS": ("shared_loads",), "STS": ("shared_stores",),
    "LD": ("generic_loads",), "cvt64": ("conversions_64",), "rcp": ("reciprocals",), "div": ("division_calls",),
    "fp64": ("fp64",), "exp": ("exponentials",), "shfl": ("shuffles",), "bar": ("barriers", "cluster_barriers"),
    "fence": ("fences",), "atom": ("atomics", "shared_atomics"), "mma": ("matrix_products",),
}


def cells(counts: dict) -> str:
    texts = []
    for title, names in COLUMNS.items():
        value = counts.get(names[0], 0)
        if isinstance(value, dict):
            text = " ".join(f"{number}x{width.partition(' ')[0]}" for width, number in value.items())
        else:
            text = "+".join(str(counts[name]) for name in names if counts.get(name))
        texts.append(f"{text:>{width_of(title)}}")
    return "".join(texts)


def width_of(title: str) -> int:
    return 19 if title in ("loads", "LDS", "STS") else max(7, len(title) + 2)


def show(found: dict[str, dict]) -> None:
    heads = "".join(f"{title:>{width_of(title)}}" for title in COLUMNS)
    for op, kernels in found.items():
        for title, kernel in kernels.items():
            local = f", {kernel['stack']} bytes of stack" if kernel["stack"] else ""
            print(f"\n{op}: {title}: {kernel['registers']} registers, {kernel['shared']} bytes shared{local}")
            print(f"{'':12}{heads}")
            print(f"{'all':12}{cells(kernel)}\n{'once':12}{cells(kernel['once'])}")
            for loop in kernel["loops"]:
                print(f"{'  ' * loop['depth'] + 'loop':12}{cells(loop)}")
            if kernel["called"]:
                print("calls " + ", ".join(f"{name} ({size})" for name, size in kernel["called"].items()))


def text_of(results: dict, bounds: dict[str, dict]) -> str:
    """The file of bounds: JSON with a line for each kernel."""
    ops = (f'  {json.dumps(op)}: {{\n' + ",\n".join(f"   {json.dumps(title)}: {json.dumps(kernel)}"
                                                 for title, kernel in kernels.items()) + "}"
           for op, kernels in bounds.items())
    return json.dumps(results, indent=1)[:-2] + ',\n "kernels": {\n' + ",\n".join(ops) + "}}\n"


def page_of(bounds: dict[str, dict]) -> str:
    """A table of the bounds. It leaves out the kernels for float16, whose counts are nearly those for bfloat16."""
    names = {"registers": "registers", "instructions": "instructions", "wide_in_flight": "wide loads in flight",
             "generic_loads_in_loops": "generic loads", "conversions_64_in_loops": "64-bit conversions",
             "reciprocals_in_loops": "divisions", "fp64_in_loops": "fp64", "barriers": "barriers"}
    rows = [[f"`{title}`", *(str(kernel[name]) for name in names)] for kernels in bounds.values()
            for title, kernel in kernels.items() if "half" not in title]
    table = [["kernel", *names.values()], ["---"] * (1 + len(names)), *rows]
    return PAGE_HEAD + "".join(f"| {' | '.join(row)} |\n" for row in table)


PAGE_HEAD = """# The machine code of the CUDA kernels

The compiler's work for sm_90, **counted, not measured**. `python -m benchmarks.sass --bounds` writes this page. Loads
of 16 bytes are wide. Generic loads, conversions, divisions and fp64 are counted in loops alone.

"""


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sass", description=__doc__.partition("\n")[0])
    parser.add_argument("ops", nargs="*", metavar="op", help="default: all that have such a kernel")
    parser.add_argument("--triton", action="store_true", help="Triton's kernels, compiled now; it takes minutes")
    parser.add_argument("--file", type=Path, default=[], action="append",
                        help="a library or object of nvcc's to read; default: specvis_kernels/_ops_cuda.so")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was counted")
    parser.add_argument("--bounds", action="store_true",
                        help=f"write the bounds of the tests: {RESULTS.relative_to(ROOT)} and {PAGE.name} beside it")
    options = parser.parse_args()
    if options.bounds and (options.ops or options.triton or options.file):
        parser.error("--bounds is for all kernels of the library: without ops, --triton and --file")
    found = {}
    for file in options.file or [LIBRARY]:
        if not options.triton and not file.exists():
            parser.error(f"there is no {file}: build it by make cuda")
        compiler, kernels = read_triton(options.ops) if options.triton else read_library(file, options.ops)
        found |= kernels
    if missing := [op for op in options.ops if op not in found]:
        parser.error(f"no kernel of {', '.join(missing)}, only of {', '.join(found) or 'other ops'}")
    show(found)
    results = {"arch": ARCH, "compiler": compiler, "note": "counted in the machine code, not measured"}
    if options.json:
        options.json.write_text(json.dumps({**results, "kernels": found}, indent=1) + "\n")
    if options.bounds:
        bounds = {op: {title: bounds_of(kernel) for title, kernel in kernels.items()} for op, kernels in found.items()}
        RESULTS.write_text(text_of(results, bounds))
        PAGE.write_text(page_of(bounds))


if __name__ == "__main__":
    main()
