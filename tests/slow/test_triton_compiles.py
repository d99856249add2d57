"""Every Triton kernel, at the benchmark's real sizes too, compiles for GPUs that are not here, AMD's among them.

At the real sizes it does not spill registers on an H200, and those of a forward load and store 16 bytes at once. It is
not compiled again in the middle of decoding, when the sizes change that change there. The interpreter, which runs the
kernels in the other tests where there is no GPU, accepts more than the compiler, and cannot share a process with it: so
this file is also a program, `python -m tests.slow.test_triton_compiles sm_90`. It prints what the kernels use. With
`sm_90 decoding` it prints how often each would be compiled, and compiles none. With `sm_90 loops` it prints the
variables that a loop assigns and forgets.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import benchmarks.ops

# Triton's target, and the bytes of shared memory and the threads that a block may have there.
GPUS = {"sm_90": (("cuda", 90, 32), 227 * 1024, 1024), "gfx942": (("hip", "gfx942", 64), 64 * 1024, 1024)}

# Kernels of a forward, and what they may move beside 16 bytes: a rotation; positions, lengths, words of bits; of a part
# of the columns the largest score and the sum. "late": a load after threads waited for each other, as for a sum.
FORWARD = {"rms_norm_kernel": set(), "rotate_into_cache_kernel": {"ld.v2.b32", "ld.b64"}, "swiglu_kernel": set(),
           "tree_attention_kernel": {"ld.b64", "st.b32", "late"}, "merge_kernel": {"ld.b64"}}

# Ops whose kernels are compiled more than once in a decoding, and how often at most.
COMPILED_AGAIN = {"tree_attention": 3}  # for up to 16 queries, up to 32, and more


def program(*arguments):
    """The output of this file as a program."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-m", "tests.slow.test_triton_compiles", *arguments], env=environment,
                         cwd=Path(__file__).parent.parent.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
@pytest.mark.parametrize("gpu", GPUS)
def test_every_kernel_compiles(gpu):
    kernels = program(gpu)
    assert kernels
    if gpu == "sm_90":
        release = tuple(map(int, version("triton").split(".")[:2]))
        most = 0 if release >= (3, 9) else 32  # 3.6 to 3.8 give a few kernels a stack of up to 32 bytes
        spilling = [row for row in kernels if row[3] > most and row[-1]]
        assert not spilling, "[op, kernel, registers, bytes spilled, bytes shared, moves, sizes, whether they are real]"
        forward = [row for row in kernels if row[1] in FORWARD and row[-1]]
        assert {row[1] for row in forward} == {*FORWARD}
        assert not [row for row in forward if {*row[5]} - {"ld.v4.b32", "st.v4.b32"} - FORWARD[row[1]]]


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
def test_no_kernel_is_compiled_again_while_decoding():
    counts = program("sm_90", "decoding")
    assert {op for op, *_ in counts} == {op for op in CHANGING if find_spec(f"specvis_kernels.triton.{op}")}
    again = [row for row in counts if row[2] > COMPILED_AGAIN.get(row[0], 1)]
    assert not again, "[op, kernel, how often, by what]"


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
def test_loops_keep_what_they_assign():
    """The interpreter runs loops as Python does. The compiler forgets some assignments, without a word."""
    assert not program("sm_90", "loops"), "[op, function, variable]: it began as an alias of what it is assigned"


def registers_and_stack(built):
    """Registers and stack of one thread; Triton's kernels have a stack for spilled registers."""
    if "amdgcn" in built.asm:
        text, names = built.asm["amdgcn"], (r"\.vgpr_count: +", r"\.private_segment_fixed_size: +")
    else:
        from triton.knobs import nvidia
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            text = subprocess.check_output([nvidia.cuobjdump.path, "--dump-resource-usage", file.name], text=True)
        names = "REG:", "STACK:"
    return [int(re.search(name + r"(\d+)", text)[1]) for name in names]


def moves(built):
    """How a kernel for NVIDIA's GPUs loads and stores, but for copies to shared memory, and whether it loads late."""
    ptx = built.asm.get("ptx", "")
    found = re.findall(r"\b(ld|st)\.global(?:\.L1::\w+)*((?:\.v\d)?\.b\d+)", ptx)
    late = {"late"} if re.search(r"\b(shfl|bar|bar\.warp)\.sync[\s\S]*\bld\.global", ptx) else set()
    return sorted({direction + width for direction, width in found} | late)


V, BATCHES, WINDOWS = 64, (1, 3), (1, 2, 16, 33)
SHAPES = [(depth, width) for depth in (1, 2, 5) for width in (1, 4, 10, 16)]              # sizes of adaptive trees
NODES = sorted({min(60, 1 + width + (depth - 1) * width ** 2) for depth, width in SHAPES} | {1, 16, 64, 70})
LEVELS = sorted({(F, width) for _, width in SHAPES for F in (1, width)} | {(6, 3), (4, 40)})

# op -> what a run fixes, a list for each; in it the sizes, for the op's maker, that the steps of one decoding have:
# trees that adapt, static ones, Jacobi windows, images that end while others go on.
CHANGING = {
    "accept_gaussian": [[(B, G, 16) for B in BATCHES for G in (1, 7, 16, 32)]],
    "commit_kv": [[(B, N, P, {"layout": layout, "columns": 160, "some_wrong": False}) for B in BATCHES for N in NODES
                   for P in (1, 2, 7, 16) if P < N] for layout in ("rows", "layers", "heads")],
    "commit_tokens": [[(B, N, P, 576, accounts, False) for B in BATCHES for N in NODES[1:] for P in (1, 2, 7, 16, 40)]
                      for accounts in (True, False)],
    "couple_tokens": [[(B, W, V, options) for B in BATCHES for W in WINDOWS]
                      for options in ({}, {"k": 6, "residual": "relaxed"}, {"group": 14})],
    "draft_children": [[(B, F, V, K, torch.float32, True, noise) for B in BATCHES for F, K in LEVELS]
                       for noise in (False, True)],
    "draft_frontier": [[(B, F, V, K, torch.float32, True, W) for B in BATCHES for F, K in LEVELS for W in (1, 2)
                        if 2 * K < 60]],
    "draw_children": [[(B, F, V, K, noise) for B in BATCHES for F, K in LEVELS] for noise in (False, True)],
    "draw_tokens": [[(B, W, V, torch.float32, True, None, "each", ahead) for B in BATCHES for W in WINDOWS]
                    for ahead in (0, 24)],
    "philox_uniforms": [[(B, 1, n) for B in BATCHES for n in (2, 34, 60)]],
    "expand_tree": [[(B, F, V, K) for B in BATCHES for F, K in LEVELS]],
    "guided_probs": [[(B, N, V, torch.bfloat16, True, None, ranges) for B in BATCHES for N in (1, 6, 16, 60)]
                     for ranges in ("all", "each")],
    "swiglu": [[(M, V, torch.bfloat16) for M in (1, 16, 60)]],
    "token_log_probs": [[(B, 16, V, K, torch.bfloat16, True, None, "each") for B in BATCHES for K in (1, 6, 16)]],
    "neighborhood_sum": [[(R, V, 33) for R in (1, 16, 60)]],
    "resample_gaussian": [[(B, G, 16, 100) for B in (*BATCHES, 16) for G in (1, 16)]],
    "rms_norm": [[(M, V, torch.bfloat16, residual) for M in (1, 16, 60)] for residual in (False, True)],
    "rotate_into_cache": [[(B, N, 4, 2, V // 8, {"dtype": torch.bfloat16, "halves": halves, "columns": 160})
                           for B in BATCHES for N in NODES] for halves in (False, True)],
    "sample_residual": [[(R, V) for R in (1, 16, 60)]],
    "select_tree": [[(B, width + (depth - 1) * width ** 2, N) for B in BATCHES for depth, width in SHAPES
                     for N in NODES[::3]]],
    "tree_attention": [[(B, N, 4, 4, 32, {"dtype": dtype, "columns": 160}) for B in BATCHES for N in NODES]
                       for dtype in (torch.float32, torch.bfloat16)],
    "tree_links": [[(B, N) for B in BATCHES for N in NODES]],
    "tree_mask": [[(B, N, True, form, columns) for B in BATCHES for N in NODES for columns in (130, 144, 1111)]
                  for form in ("bool", "additive", "packed", "packed_rows")],
    "verify_chain": [[(len(drafts), V, options | {"num_drafts": drafts})
                      for drafts in ([1], [0, 3], [16], [2, 5, 1], [8, 8])]
                     for options in ({}, {"draft": True}, {"k": 6, "residual": "relaxed"},
                                     {"draft": True, "rule": "block"},
                                     {"draft": True, "rule": "fly", "window": 1, "entropy": 0.5})],
    "verify_greedy": [[(B, N, P) for B in BATCHES for N in NODES for P in (1, 7, 16, 40)]],
    "verify_logits": [[(B, N, V, P, options | ({"num_draft_rows": N} if "omega" in options else {}))
                       for B in BATCHES for N in (1, 2, 16, 60) for P in (1, 7, 16)]
                      for options in ({}, {"k": 6, "residual": "relaxed", "ranges": "all"}, {"omega": (1.0, 0.75)},
                                      {"seeds": True})],
    "verify_tree": [[(B, N, V, P, options | ({"num_draft_rows": N} if "omega" in options else {}))
                     for B in BATCHES for N in (1, 2, 16, 60) for P in (1, 7, 16)]
                    for options in ({}, {"k": 6, "residual": "relaxed"}, {"omega": (1.0, 0.75)})],
}


def at_odd_addresses(value):
    """Move tensors that in decoding are a part of a larger one and start anywhere. Rows of V numbers, heads and
    rotations are whole."""
    if not isinstance(value, torch.Tensor) or value.ndim > 3 or value.shape[-1:] in ((V,), (2,)):
        return value
    return torch.cat([value.new_zeros(1), value.flatten()])[1:].view(value.shape)


def real_cases(op):
    """The benchmark's sizes; the first one, a batch or rows, is 1 or 2: larger ones change nothing for the compiler."""
    return [(min(case[0], 2), *case[1:]) for case in benchmarks.ops.ROWS[op][0]]


def print_forgotten(op_of):
    """Triton shall print, for each loop, the variables from before it that it assigns and does not carry on."""
    from triton.compiler.code_generator import CodeGenerator
    set_value, find_carries, seen = CodeGenerator.set_value, CodeGenerator._find_carries, set()

    def set_and_note(self, name, value):
        vars(self).setdefault("assigned", set()).add(name)
        set_value(self, name, value)

    def find_and_compare(self, node, before, ignore=frozenset()):
        outer, self.assigned = vars(self).get("assigned", set()), set()
        carried = find_carries(self, node, before, ignore)
        for name in self.assigned.intersection(before).difference(carried[0], ignore):
            row = op_of(), self.jit_fn.__name__, name
            if row not in seen:
                seen.add(row)
                print(json.dumps(row), flush=True)
        self.assigned |= outer
        return carried

    CodeGenerator.set_value, CodeGenerator._find_carries = set_and_note, find_and_compare


def main(gpu, which="all"):
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    (target, most_shared, most_threads), seen = GPUS[gpu], {}
    target = GPUTarget(*target)
    import specvis_kernels
    from tests import cases

    class Driver:
        """The answers about a GPU that Triton needs before it compiles."""
        get_current_target = staticmethod(lambda: target)
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)

    def compile_only(kernel, *args, grid, warmup, **options):
        built = run(kernel, *args, grid=grid, warmup=True, **options)
        if built is not None and id(built) not in seen:
            seen[id(built)] = built
            print(op, case, kernel.__name__, options, file=sys.stderr, flush=True)
            shared, threads = built.metadata.shared, built.metadata.num_warps * target.warp_size
            assert shared <= most_shared and threads <= most_threads, f"{shared} bytes shared, {threads} threads"
            sizes = " ".join(str(size) for size in case if type(size) is int)
            row = (op, kernel.__name__, *registers_and_stack(built), shared, moves(built), sizes,
                   case in real_cases(op))
            print(json.dumps(row), flush=True)

    def count_only(*, key, fn, compile, **_):
        counted.setdefault(fn.name.rpartition(".")[2], {})[key] = (compile["signature"], compile["constants"],
                                                                   compile["configs"], compile["num_warps"])
        return True                                                   # so that Triton compiles nothing

    class FirstStepDone(Exception):
        pass

    def make_first_step(*args, **kwargs):
        make_ir(*args, **kwargs)
        raise FirstStepDone

    def first_step_only(kernel, *args, grid, warmup, **options):
        with suppress(FirstStepDone):
            run(kernel, *args, grid=grid, warmup=True, **options)

    triton.runtime.driver.set_active(Driver())
    run, JITFunction.run = JITFunction.run, compile_only
    if which == "loops":
        print_forgotten(lambda: op)
        make_ir, ASTSource.make_ir = ASTSource.make_ir, make_first_step
        JITFunction.run, knobs.compilation.always_compile = first_step_only, True
    from specvis_kernels.triton import tree_attention
    tree_attention.num_multiprocessors = lambda device: 132
    specvis_kernels._define.backends = lambda op, device: ["triton"]
    if which != "decoding":
        for op in benchmarks.ops.ROWS:
            sizes = [*real_cases(op), *cases.CASES[op]]
            for case in sizes if find_spec(f"specvis_kernels.triton.{op}") else []:
                args, kwargs = getattr(cases, op)(*case)
                getattr(specvis_kernels, op)(*args, **kwargs, backend="triton")
        return
    knobs.runtime.jit_cache_hook = count_only
    for op, decodings in CHANGING.items():
        for calls in decodings:
            counted = {}
            for case in calls:
                args, kwargs = getattr(cases, op)(*case)
                if isinstance(kwargs.get("id_range"), tuple):
                    kwargs["id_range"] = case[0] - 1, V - case[1] % 16
                for place in (lambda value: value, at_odd_addresses):
                    getattr(specvis_kernels, op)(*map(place, args), backend="triton",
                                                 **{name: place(value) for name, value in kwargs.items()})
            for kernel, keys in counted.items():
                print(json.dumps([op, kernel, len(keys), [str(how) for how in keys.values()][:2]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
