"""What the compiler made of the GPU kernels:   python -m benchmarks.sass [op ...] [--triton] [--json [FILE]]

Reads the machine code for sm_90 (H100, H200) of specvis_kernels/_ops_cuda.so, or of Triton's kernels, which it
compiles. It needs no GPU: everything is counted in the code, nothing is measured. For every kernel and each of its
loops: instructions; global loads and how many of them are in flight before the first is used; shared loads and
stores; conversions from and to 64 bits; divisions; fp64; barriers, fences and atomics. Instructions of an
inner loop do not count for the outer one. An entry is one number of the rows that a loop loads 16 bytes at a time.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import specvis_kernels
from benchmarks import harness
from benchmarks.machine_code import bounds_of, parse, report
from benchmarks.tables import markdown

ROOT = Path(__file__).parent.parent
LIBRARY = Path(specvis_kernels.__file__).with_name("_ops_cuda.so")
RESULTS = ROOT / "benchmarks" / "results" / "sm_90-machine-code.json"
PAGE = RESULTS.with_name("machine_code.md")
ARCH = "sm_90"


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
            kernels[name] = {"registers": registers, "stack": stack, "shared": shared, **report(routines)}
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
    """The template arguments of a C++ kernel, in order: ["Held", "1"]"""
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


def page_of(bounds: dict[str, dict]) -> str:
    """A table of the bounds. It leaves out the kernels for float16, whose counts are nearly those for bfloat16."""
    names = {"registers": "registers", "instructions": "instructions", "wide_in_flight": "wide loads in flight",
             "generic_loads_in_loops": "generic loads", "conversions_64_in_loops": "64-bit conversions",
             "reciprocals_in_loops": "divisions", "fp64_in_loops": "fp64", "barriers": "barriers"}
    rows = [[f"`{title}`", *(str(kernel[name]) for name in names)] for kernels in bounds.values()
            for title, kernel in kernels.items() if "half" not in title]
    return PAGE_HEAD + markdown(["kernel", *names.values()], *rows) + "\n"


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
        options.json.write_text(harness.text_of(results | {"kernels": found}, 3) + "\n")
    if options.bounds:
        bounds = {op: {title: bounds_of(kernel) for title, kernel in kernels.items()} for op, kernels in found.items()}
        RESULTS.write_text(harness.text_of(results | {"kernels": bounds}, 3) + "\n")
        PAGE.write_text(page_of(bounds))


if __name__ == "__main__":
    main()
