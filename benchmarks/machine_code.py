"""Reads listings of machine code for sm_90 and counts what is in them, for benchmarks.sass.

An entry is one number of the rows that a loop loads 16 bytes at a time.
"""
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

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
