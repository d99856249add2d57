"""Definitions of the ops for flashinfer-bench, as JSON files:   python -m benchmarks.definitions --out DIR [op ...]

A definition is of an op at sizes from real models (as in benchmarks/ops.py). Its inputs and outputs have the shapes
of the op's docstring: batches vary, other sizes are constants. Its reference is the oracle, with the source of all that
it calls, and needs torch alone. Options, and arguments that are None, are constants of the reference. The format knows
no uint16: tables of ids are int64.

(https://bench.flashinfer.ai/docs/flashinfer-trace/definition)
"""
import argparse
import ast
import inspect
import json
import re
import sys
import types
from pathlib import Path

import torch

import specvis_kernels
from benchmarks.ops import ROWS
from tests.kernels import inputs
from tests.laws.test_every_op import Recorder, as_tuple

# The format has no arguments that are written to, and packed weights are in a layout of our own.
LEFT_OUT = {"commit_kv", "commit_tokens", "decoder_layers", "denoise_tokens", "packed_linear", "rotate_into_cache",
            "transformer_blocks"}
OPS = [op for op in specvis_kernels.ops() if op not in LEFT_OUT]
VARIABLE = {"B", "R", "T", "D", "D + B"}  # axes of requests and of what they bring, where they lead
DTYPES = {"float32", "float16", "bfloat16", "int64", "int32", "bool"}  # that the format knows and ops have


def shapes_of(op: str, part: str) -> dict[str, list[list[str]]]:
    """The names of a part of the docstring, "Args" or "Returns", with the shapes that it mentions there, in letters."""
    text = inspect.getdoc(getattr(specvis_kernels, op)).partition(f"\n{part}:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): +(.*(?:\n     .*)*)", text, re.M)
    return {name: [re.findall(r"[^,\s][^,]*", shape.replace("..", "B"))
                   for shape in re.findall(r"\(((?:[A-Z1]|\.\.,)[^()]*)\)", entry)] for name, entry in entries}


def source_of(function) -> tuple[str, str]:
    """(what the function is called there, source in which it and all that it uses of this package are defined)."""
    parts, known = [], {}  # the latter: name there -> object

    def define(name: str, value) -> str:
        """Append the definition of a global of this package, after the ones that it uses. Returns its name there."""
        is_ours = getattr(value, "__module__", None) in sys.modules and value.__module__.startswith("specvis_kernels.")
        if is_ours:  # every op has an _oracle
            name = value.__name__
            name = value.__module__.rpartition(".")[2] + name if name in ("_oracle", "_meta") else name
        if name in known:
            if known[name] is not value:
                raise ValueError(f"{function.__module__} uses two globals that are named {name}")
            return name
        known[name] = value
        if isinstance(value, types.ModuleType):
            parts.append(f"import {value.__name__}" + f" as {name}" * (name != value.__name__))
        elif is_ours:
            text, seen = inspect.getsource(value), vars(sys.modules[value.__module__])
            used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)} & seen.keys()
            renamed = {old: define(old, seen[old]) for old in sorted(used)} | {value.__name__: name}
            for old, new in renamed.items():
                text = re.sub(rf"\b{old}\b", new, text)
            parts.append(f"\n\n{text.rstrip()}")
        elif hasattr(value, "__name__"):
            parts.append(f"from {value.__module__} import {value.__name__}" + f" as {name}" * (name != value.__name__))
        else:
            parts.append(f"{name} = {value!r}")
        return name

    name = define("", function)
    parts.sort(key=lambda part: 2 if part.startswith("\n") else 1 if " = " in part else 0)  # imports, then constants
    return name, "\n".join(parts)


def definition(op: str, *sizes) -> tuple[dict, list]:
    """The definition of an op at the sizes of its maker in tests/kernels/inputs, and inputs for its reference."""
    args, kwargs = getattr(inputs, op)(*sizes)
    with Recorder() as calls:
        outputs = as_tuple(getattr(specvis_kernels, op)(*args, **kwargs))
    schema, values = calls.own[0][0]._schema, calls.own[0][1]
    given = {argument.name: value for argument, value in zip(schema.arguments, values)}
    axes, shapes = {}, shapes_of(op, "Args")

    def described(name: str, tensor: torch.Tensor, shapes: list[list[str]]) -> dict:
        for letters in shapes:  # the first that fits
            if len(letters) == tensor.dim() and all(axes.get(letter, size) == size
                                                    for letter, size in zip(letters, tensor.shape)):
                axes.update(zip(letters, tensor.shape))
                break
        else:
            raise ValueError(f"{name} of {op} must have one of its docstring's shapes, {shapes} with {axes}, "
                             f"got {tuple(tensor.shape)}")
        dtype = "int64" if tensor.dtype == torch.uint16 else str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ValueError(f"{name} of {op} must have a dtype that the format knows, got {dtype}")
        return {"shape": letters, "dtype": dtype}

    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    described_inputs = {name: described(name, value, shapes[name]) for name, value in tensors.items()}
    variable = VARIABLE & {letters["shape"][0] for letters in described_inputs.values()}
    shapes = shapes_of(op, "Returns")
    described_outputs = {f"out_{name}" if name in tensors else name: described(name, value, shapes[name])
                         for name, value in zip(shapes, outputs)}
    name, source = source_of(sys.modules[f"specvis_kernels.{op}"]._oracle)
    arguments = ", ".join(argument if argument in tensors else repr(value) for argument, value in given.items())
    result = f"{name}({arguments})"
    if any(out.dtype == torch.uint16 for out in outputs):
        result += ".long()"
    options = [str(value).removeprefix("torch.") for value in given.values() if isinstance(value, (str, torch.dtype))]
    optional = [argument.name for argument in schema.arguments
                if argument.name in tensors and isinstance(argument.type, torch.OptionalType)]
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    constants = {letter: size for letter, size in axes.items() if letter not in variable}
    numbers = {argument: value for argument, value in given.items()
               if type(value) is int and value not in (0, *axes.values())}
    return {
        "name": "_".join([op, *(f"{letter}{size}" for letter, size in (constants | numbers).items()
                                if letter.isidentifier()), dtype, *optional, *options]),
        "op_type": op,
        "description": inspect.getdoc(getattr(specvis_kernels, op)).partition("\n")[0],
        "tags": ["status:verified", "fused"],
        "axes": {letter: {"type": "const", "value": size} if letter in constants else {"type": "var"}
                 for letter, size in axes.items()},
        "inputs": described_inputs,
        "outputs": described_outputs,
        "reference": f"from __future__ import annotations\n\n{source}\n\n\n"
                     f"def run({', '.join(tensors)}):\n    return {result}\n",
    }, list(tensors.values())


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.definitions", description=__doc__.partition("\n")[0])
    parser.add_argument("ops", nargs="*", metavar="op", help=f"of {', '.join(OPS)}; default: all")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder of the files")
    options = parser.parse_args()
    for op in options.ops:
        if op not in OPS:
            parser.error(f"no op {op!r}, only {', '.join(OPS)}")
    found = {}
    for op in options.ops or OPS:
        for sizes in ROWS[op][0]:
            content, _ = definition(op, *sizes)
            if found.setdefault(content["name"], content) != content:
                raise ValueError(f"{op} {sizes} has the name of another definition, {content['name']}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name, content in found.items():
        (options.out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {len(found)} definitions to {options.out}")


if __name__ == "__main__":
    main()
