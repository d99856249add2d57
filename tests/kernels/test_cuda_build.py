"""The CUDA library as nvcc builds it: for which GPUs, within which limits, and that it loads without one."""
import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import setuptools

import specvis_kernels

ROOT = Path(__file__).parent.parent.parent
KERNELS = sorted((ROOT / "csrc").glob("*.cu"))
LIBRARY = Path(specvis_kernels.__file__).with_name("_ops_cuda.so")


@pytest.fixture
def setup(monkeypatch):
    """What setup.py defines."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    for name in ("SPECVIS_CUDA", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    return runpy.run_path("setup.py")


NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
needs_nvcc = pytest.mark.skipif(not NVCC, reason="needs nvcc")


@pytest.mark.parametrize("wanted, archs", [
    (None, ["sm_80", "sm_90", "sm_100", "compute_100"]),
    ("", ["sm_80", "sm_90", "sm_100", "compute_100"]),
    ("9.0", ["sm_90"]),
    ("8.6 9.0a+PTX", ["sm_86", "sm_90a", "compute_90a"]),
    ("120", ["sm_120"]),
])
def test_the_gpus_that_are_asked_for(setup, monkeypatch, wanted, archs):
    if wanted is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wanted)
    assert [flag.partition("code=")[2] for flag in setup["gpu_flags"]()[1::2]] == archs


def test_unknown_gpus_are_refused(setup, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0;Hopper")
    with pytest.raises(SystemExit, match="TORCH_CUDA_ARCH_LIST must be like 8.0;9.0.PTX, got 'Hopper'"):
        setup["gpu_flags"]()


def test_where_nvcc_is_looked_for(setup, monkeypatch, tmp_path):
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert setup["find_nvcc"]() == str(nvcc)
    monkeypatch.setenv("SPECVIS_CUDA", "0")
    assert setup["find_nvcc"]() is None
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setenv("SPECVIS_CUDA", "")
    assert setup["find_nvcc"]() is None
    monkeypatch.setenv("SPECVIS_CUDA", "1")
    with pytest.raises(SystemExit, match="SPECVIS_CUDA=1, but no nvcc in CUDA_HOME, PATH or /usr/local/cuda"):
        setup["find_nvcc"]()


@needs_nvcc
def test_every_kernel_stays_in_registers(setup, measured):
    """Without a warning, for every GPU of the build. The build keeps what the compiler said beside each object."""
    def number(what, report):
        return int((re.search(rf"(\d+) {what}", report) or [0, 0])[1])

    spilling = []
    for file in KERNELS:
        newest = max(path.stat().st_mtime for path in [file, *setup["own_files"]()])
        logs = [built.with_suffix(".log").read_text() for built in setup["OBJECTS"].glob(f"*/csrc/{file.name}.o")
                if built.stat().st_mtime > newest]
        assert logs, f"no build of {file.name} is newer than it and what it includes: build the package again"
        for log in logs:
            assert "warning" not in log, log
            reports = log.split("Compiling entry function '")[1:]
            assert reports, log
            for report in reports:
                stack, spills = number("bytes stack frame", report), number("bytes spill stores", report)
                name, arch = re.match(r"(\w+)' for '(\w+)'", report).groups()
                kernel = re.search(r"\d([a-z_]+_kernel)", name)
                measured("CUDA C++ by nvcc (shared: static)", file.stem, kernel[1], arch,
                         number("registers", report), max(stack, spills), number("bytes smem", report))
                if stack or spills:
                    spilling.append(f"{name} for {arch}")
    assert not spilling


@needs_nvcc
def test_the_library_loads_without_a_gpu():
    """On a torch that may be CPU-only, whose loader leaves it alone; every kernel is in it."""
    assert LIBRARY.exists(), "nvcc is here: build the package again"
    program = f"""if True:
        import torch, specvis_kernels
        torch.ops.load_library({str(LIBRARY)!r})
        for op in {[kernel.stem for kernel in KERNELS]}:
            assert torch._C._dispatch_has_kernel_for_dispatch_key("specvis_kernels::" + op, "CUDA"), op"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_a_broken_library_is_an_error(tmp_path):
    shutil.copytree(LIBRARY.parent, tmp_path / "specvis_kernels", ignore=shutil.ignore_patterns("*.so"))
    (tmp_path / "specvis_kernels/_ops.so").write_text("no library")
    run = subprocess.run([sys.executable, "-c", "import specvis_kernels"], cwd=tmp_path,
                         env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True)
    assert "ImportError" in run.stderr and "_ops.so does not load, build the package again" in run.stderr


def test_the_gpus_are_in_the_library(setup):
    if not LIBRARY.exists():
        pytest.skip("needs the CUDA library")
    path = os.environ["PATH"]
    if find_spec("triton"):
        path += os.pathsep + str(Path(find_spec("triton").origin).parent / "backends/nvidia/bin")
    cuobjdump = shutil.which("cuobjdump", path=path)
    if not cuobjdump:
        pytest.skip("needs cuobjdump")
    inside = [subprocess.run([cuobjdump, option, LIBRARY], capture_output=True, text=True).stdout
              for option in ("--list-elf", "--list-ptx")]
    wanted = [flag.partition("code=")[2] for flag in setup["gpu_flags"]()[1::2]]
    for arch in wanted:
        name = arch.replace("compute", "sm")
        found = re.findall(rf"\.{name}\.(?:cubin|ptx)", inside[arch.startswith("compute")])
        assert len(found) >= len(KERNELS), f"{arch} is in {len(found)} of {len(KERNELS)} files"
