"""Every Triton kernel, at the benchmark's real sizes too, compiles for GPUs that are not here, AMD's among them.

The interpreter, which runs the kernels in the other tests where there is no GPU, accepts more than the
compiler, and cannot share a process with it: so this file is also a program,
`python -m tests.kernels.test_triton_compiles sm_90`. It prints what the kernels use; spilling is no error.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

# Triton's target, and the bytes of shared memory and the threads that a block may have there.
GPUS = {"sm_90": (("cuda", 90, 32), 227 * 1024, 1024), "gfx942": (("hip", "gfx942", 64), 64 * 1024, 1024)}


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
@pytest.mark.parametrize("gpu", GPUS)
def test_every_kernel_compiles(gpu, measured):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-m", "tests.kernels.test_triton_compiles", gpu], env=environment,
                         cwd=Path(__file__).parent.parent.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert kernels
    for op, kernel, *numbers, sizes in kernels:
        measured("Triton compiled ahead of time", op, kernel, gpu, *numbers, sizes)


def registers_and_stack(built):
    """Of one thread; a kernel of Triton has a stack for what it spills."""
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


def main(gpu):
    import torch
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction, mangle_type

    if GPUS[gpu][0][0] == "hip":
        torch.version.hip = "as if it were here"
    import specvis_kernels
    from benchmarks.ops import ROWS
    from tests.kernels import inputs

    (target, most_shared, most_threads), seen = GPUS[gpu], set()
    target = GPUTarget(*target)

    def compile_only(kernel, *args, grid, warmup, **options):
        values = dict(zip(kernel.arg_names, args))
        values |= {name: options.pop(name) for name in kernel.arg_names if name in options}
        constants = {p.name: values[p.name] for p in kernel.params
                     if p.is_constexpr or values[p.name] is None}
        types = {name: "constexpr" if name in constants else mangle_type(values[name])
                 for name in kernel.arg_names}
        if (this := f"{kernel.__name__} {types} {constants} {options}") not in seen:
            seen.add(this)
            print(op, case, this, file=sys.stderr, flush=True)
            built = compile(ASTSource(kernel, types, constants), target, options)
            shared, threads = built.metadata.shared, built.metadata.num_warps * target.warp_size
            assert shared <= most_shared and threads <= most_threads, f"{shared} bytes shared, {threads} threads"
            sizes = " ".join(str(size) for size in case if type(size) is int)
            print(json.dumps([op, kernel.__name__, *registers_and_stack(built), shared, sizes]), flush=True)

    JITFunction.run = compile_only
    specvis_kernels._dispatch.backends = lambda op, device: ["triton"]
    for op, (cases, _) in ROWS.items():
        if find_spec(f"specvis_kernels.triton.{op}"):
            for case in [*inputs.CASES[op], *cases]:
                args, kwargs = getattr(inputs, op)(*case)
                getattr(specvis_kernels, op)(*args, **kwargs, backend="triton")


if __name__ == "__main__":
    main(sys.argv[1])
