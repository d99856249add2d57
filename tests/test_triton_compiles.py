"""Every Triton kernel, at the benchmark's real sizes too, compiles for a GPU that is not here.

The interpreter, which runs the kernels in the other tests where there is no GPU, accepts more than the
compiler, and cannot share a process with it: so this file is also a program,
`python -m tests.test_triton_compiles`.
"""
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

GPU, SHARED = 90, 227 * 1024  # Hopper, and the bytes of shared memory that a block may have there


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
def test_every_kernel_compiles():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-m", "tests.test_triton_compiles"], env=environment,
                         cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def main():
    import torch
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction, mangle_type

    import specvis_kernels
    from benchmarks.ops import ROWS
    from tests import inputs

    seen = set()

    def compile_only(kernel, *args, grid, warmup, **options):
        values = dict(zip(kernel.arg_names, args))
        values |= {name: options.pop(name) for name in kernel.arg_names if name in options}
        constants = {p.name: values[p.name] for p in kernel.params
                     if p.is_constexpr or values[p.name] is None}
        types = {name: "constexpr" if name in constants else mangle_type(values[name])
                 for name in kernel.arg_names}
        if (this := f"{kernel.__name__} {types} {constants} {options}") not in seen:
            seen.add(this)
            print(op, case, this, flush=True)
            built = compile(ASTSource(kernel, types, constants), GPUTarget("cuda", GPU, 32), options)
            assert built.metadata.shared <= SHARED, f"{built.metadata.shared} bytes of shared memory"

    JITFunction.run = compile_only
    specvis_kernels._dispatch.backends = lambda op, device: ["triton"]
    for op, (cases, _) in ROWS.items():
        if find_spec(f"specvis_kernels.triton.{op}"):
            for case in [*inputs.CASES[op], *cases]:
                args, kwargs = getattr(inputs, op)(*case)
                getattr(specvis_kernels, op)(*args, **kwargs, backend="triton")


if __name__ == "__main__":
    main()
