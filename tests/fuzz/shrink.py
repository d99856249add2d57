"""A case that fails, made as small and as plain as it can be while it fails, and printed as a test."""
import inspect
import math
import re
import time
from dataclasses import replace

import torch

import specvis_kernels
from tests.fuzz.check import problem

SIZES = {"max_depth": "P", "num_nodes": "N", "num_children": "K"}  # arguments that are sizes of other arguments
TOGETHER = ({"draft_probs", "draft_row"}, {"neighbors", "delta"}, {"seeds", "positions"})


def shrink(case, backend, seconds=20.0):
    """A smaller case that fails on this backend in an equal way: by an equal error, or by a wrong result."""
    wanted = kind_of(problem(case, backend))
    deadline = time.monotonic() + seconds

    def still_fails(named):
        return kind_of(problem(replace(case, named=named), backend)) == wanted

    found = True
    while found and time.monotonic() < deadline:
        found = False
        for change in (without_options, without_requests, smaller, plainer):
            proposals = change(case)
            while time.monotonic() < deadline:
                named = next((named for named in proposals if time.monotonic() > deadline or still_fails(named)), None)
                if named is None or time.monotonic() > deadline:
                    break
                case, found = replace(case, named=named), True
                proposals = change(case)
    return case


def kind_of(what):
    if what and what.startswith("ValueError"):  # a refusal; its words say of which argument
        return re.sub(r"\d+", "", what)
    return what and (re.match(r"\w*(Error|Exception)\b|(?=)", what)[0] or "wrong")


def defaults_of(op):
    return {name: p.default for name, p in inspect.signature(getattr(specvis_kernels, op)).parameters.items()}


def letters_of(op):
    """The letters of each argument's dimensions, from the docstring: {"tokens": ["B", "N"], ..}.

    Arguments that a docstring leaves to `verify_tree` have the letters that they have there.
    """
    lines = re.findall(r"^ +(\w+): +(?:written to: )?\(([^)]*)\)", getattr(specvis_kernels, op).__doc__, re.M)
    letters = {name: [letter.strip() for letter in letters.split(",") if letter.strip()] for name, letters in lines}
    return letters if op == "verify_tree" else letters_of("verify_tree") | letters


def without_options(case):
    """The case without one optional argument, or without two that belong together."""
    for name, default in defaults_of(case.op).items():
        if default is not inspect.Parameter.empty and not is_same(case.named.get(name, default), default):
            together = next((names for names in TOGETHER if name in names), {name})
            yield {key: a for key, a in case.named.items() if key not in together}


def is_same(a, b):
    return a is b or not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and a == b


def smaller(case):
    """Half of a dimension, a fourth, .., one entry less, in all arguments that have it."""
    letters = {name: of for name, of in letters_of(case.op).items()
               if isinstance(case.named.get(name), torch.Tensor) and case.named[name].ndim == len(of)}
    for letter in dict.fromkeys(letter for of in letters.values() for letter in of):
        for also in ({letter}, {letter, "P"}):
            size = next(case.named[name].shape[of.index(letter)] for name, of in letters.items() if letter in of)
            step = size
            while step > 1:
                step = (step + 1) // 2
                for start in range(size - step, -1, -step):
                    yield cut(case.named, letters, also, start, start + step)
                if step == 1:
                    break


def cut(named, letters, which, start, end):
    """The arguments without the entries from start to end of these dimensions."""
    changed = dict(named)
    for name, of in letters.items():
        for dim, letter in enumerate(of):
            if letter in which:
                a = changed[name]
                keep = [i for i in range(a.shape[dim]) if not start <= i < end]
                changed[name] = a[(slice(None),) * dim + (keep,)]
    for name, letter in SIZES.items():
        if letter in which and isinstance(named.get(name), int):
            changed[name] = named[name] - (end - start)
    return changed


def without_requests(case):
    """A request of verify_chain less: its rows, drafts and uniforms."""
    if case.op != "verify_chain":
        return
    ends = case.named["cu_num_draft_tokens"].tolist()
    for b, (first, end) in enumerate(zip([0, *ends], ends)):
        if not 0 <= first <= end <= len(case.named["draft_tokens"]):
            continue
        changed = {name: a for name, a in case.named.items() if a is not None}
        drafts, rows = (first, end), (first + b, end + b + 1)
        parts = {"draft_tokens": drafts, "draft_probs": drafts, "uniforms": rows, "cu_num_draft_tokens": (b, b + 1),
                 "target_probs": drafts if "bonus_tokens" in changed else rows}
        parts |= dict.fromkeys(("bonus_tokens", "delta", "omega", "greedy"), (b, b + 1))
        for name, (left, right) in parts.items():
            if isinstance(changed.get(name), torch.Tensor):
                changed[name] = torch.cat([changed[name][:left], changed[name][right:]])
        changed["cu_num_draft_tokens"][b:] -= end - first
        yield changed


def plainer(case):
    """Plain layouts, and plain numbers: all of a tensor, then each of a small one."""
    for name, a in case.named.items():
        if not isinstance(a, torch.Tensor) or not a.numel():
            continue
        plain = a.clone(memory_format=torch.contiguous_format).resolve_neg()
        if not a.is_contiguous() or a.is_neg() or a.storage_offset() or a.untyped_storage().nbytes() > plain.nbytes:
            yield case.named | {name: plain}
        proposals = [torch.zeros_like(plain), torch.ones_like(plain)]
        if plain.is_floating_point():
            proposals += [(plain * parts).round() / parts for parts in (4, 64)]
        if is_complicated(plain):
            yield from (case.named | {name: other} for other in proposals if weight(other) < weight(plain))
        for i in range(plain.numel() if plain.numel() <= 64 else 0):
            for value in (0, 1, 0.5, 0.25)[:4 if plain.is_floating_point() else 2]:
                other = plain.clone()
                other.view(-1)[i] = value
                if weight(other) < weight(plain):
                    yield case.named | {name: other}


def is_complicated(tensor):
    return weight(tensor) > 0


def weight(tensor):
    """How long a tensor's numbers are when they are written; 0 if all are 0."""
    return sum(len(written(number)) for number in tensor.flatten().tolist()
               if number != 0 or math.copysign(1, number) < 0)


def written(number):
    """The shortest text of a number that gives an equal float32."""
    if isinstance(number, bool | int):
        return repr(number)
    if math.isnan(number) or math.isinf(number):
        return f'float("{number}")'
    return next(text for digits in range(1, 18) if float(torch.tensor(float(text := f"{number:.{digits}g}")))
                == number or float(text) == number)


def literal(a):
    """An argument as Python."""
    if isinstance(a, list):
        return f"[{', '.join(map(literal, a))}]"
    if not isinstance(a, torch.Tensor):
        return written(a) if isinstance(a, float) else repr(a)
    if not a.numel():
        return f"torch.zeros({tuple(a.shape)}, dtype={a.dtype})"
    if a.is_neg():
        return f"torch._neg_view({literal(torch._neg_view(a))})"
    if a.is_contiguous() and not a.storage_offset():
        return f"torch.tensor({nested(a.tolist())}, dtype={a.dtype})"
    memory = torch.empty(0, dtype=a.dtype).set_(a.untyped_storage())
    memory = torch.as_strided(memory, (memory.numel(),), (1,), 0)
    return f"{literal(memory)}.as_strided({tuple(a.shape)}, {a.stride()}, {a.storage_offset()})"


def nested(numbers):
    return f"[{', '.join(map(nested, numbers))}]" if isinstance(numbers, list) else written(numbers)


def as_test(case, backend, what):
    """The case as a test that can be pasted into a file of tests/kernels."""
    lines = [line for name, a in case.named.items() for line in [f"        {name}={literal(a)},"]]
    device = [f'    monkeypatch.setenv("{name}", "{value}")' for name, value in case.environment.items()]
    device = device if backend == "cuda_emulated" else []
    return "\n".join([
        "import torch", "", "from tests.fuzz.cases import Case", "from tests.fuzz.check import problem", "", "",
        f"def test_{case.op}_as_fuzzed({'monkeypatch' if device else ''}):",
        f'    """python -m tests.fuzz --op {case.op} --case {case.number} found: {what[:200]}"""'.replace("\\", "/"),
        *device, "    named = dict(", *lines, "    )",
        f'    assert problem(Case("{case.op}", {case.number}, named{", environment={}" * bool(device)}), '
        f'"{backend}") is None', ""])
