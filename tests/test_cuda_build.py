"""The CUDA library as nvcc builds it: for which GPUs, within which limits, and that it loads without one, or not at all
where the driver is too old."""
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import setuptools

import specvis_kernels

ROOT = Path(__file__).parent.parent
KERNELS = sorted((ROOT / "csrc/cuda").glob("*.cu"))
LIBRARY = Path(specvis_kernels.__file__).with_name("_ops_cuda.so")


@pytest.fixture
def setup(monkeypatch, tmp_path):
    """What setup.py defines, where nothing is asked for and no tools are in PATH but those of tmp_path."""
    for name in ("SPECVIS_CUDA", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return defined_in_setup(monkeypatch)


def defined_in_setup(monkeypatch) -> dict:
    """What setup.py defines, in its folder."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(sys, "argv", ["setup.py"])  # pytest's own may have the name of a command
    return runpy.run_path("setup.py")


def cuda_build() -> Path:
    """The folder of the objects that the CUDA library is made of. Skips the test where there is no such library; an old
    one is an error."""
    if not LIBRARY.exists():
        pytest.skip("needs the CUDA library: make cuda")
    with pytest.MonkeyPatch.context() as patch:
        setup = defined_in_setup(patch)
        links = sorted(setup["OBJECTS"].resolve().glob(f"*/{LIBRARY.name}.log"), key=lambda log: log.stat().st_mtime)
        assert links, "no objects of the CUDA library: build it again, by make cuda"
        folder = links[-1].parent / "csrc/cuda"
        old = [file.name for file in KERNELS if not setup["is_fresh"](folder / f"{file.name}.o")]
        assert not old, f"the CUDA library is not made of what is in csrc/: make cuda, for {old}"
    return links[-1].parent


def tool(path: Path, said: str) -> str:
    """A program that says this, whatever it is asked."""
    path.write_text(f"#!/bin/sh\n/bin/cat <<'end'\n{said}\nend\n")
    path.chmod(0o755)
    return str(path)


def archs_of(flags):
    return [flag.partition("code=")[2] for flag in flags[1::2]]


NVCC_13 = "75 80 86 87 88 89 90 100 110 103 120 121"  # nvcc --list-gpu-arch


@pytest.mark.parametrize("wanted, known, archs, left_out", [
    (None, NVCC_13, "sm_80 sm_90 sm_100 compute_100", None),
    ("", NVCC_13, "sm_80 sm_90 sm_100 compute_100", None),
    (" ;", "", "sm_80 sm_90 sm_100 compute_100", None),  # this nvcc says nothing: all are taken
    (None, "50 52 80 86 90 90a", "sm_80 sm_90 compute_90", "10.0"),  # for what is later
    (None, "50 70 80 86", "sm_80 compute_80", "9.0, 10.0"),
    ("9.0;", NVCC_13, "sm_90", None),
    ("8.6 9.0A+PTX", NVCC_13, "sm_86 sm_90a compute_90a", None),
    ("120, 12.0f", NVCC_13, "sm_120 sm_120f", None),
    ("7.5 8.0 8.6 9.0 10.0 12.0+PTX", NVCC_13, "sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", "7.5"),  # NVIDIA's image
    ("7.5 8.0 8.6 8.9 9.0 10.0 12.0", NVCC_13, "sm_80 sm_86 sm_89 sm_90 sm_100 sm_120", "7.5"),        # vLLM's
    ("7.5 8.0 8.6 8.9 9.0 10.0 12.0", "75 80 86 89 90", "sm_80 sm_86 sm_89 sm_90 compute_90", "7.5, 10.0, 12.0"),
    ("Ampere;8.0;Hopper", NVCC_13, "sm_80 sm_86 compute_86 sm_90 compute_90", None),
    ("Turing Volta+Tegra Ampere+Tegra Blackwell", "87 100 120 121", "sm_87 sm_100 sm_120 sm_121 compute_121",
     "7.5, 7.0, 10.3"),
    ("All", "75 80 90", "sm_80 sm_90 compute_90", "7.5"),
    ("Common", "80 90", "sm_80 sm_90 compute_90", "8.6, 8.9, 10.0, 12.0"),
    ("7.5", "75 80", None, "of 7.5 no GPU remains: the kernels need 8.0 or later, and .* knows 7.5, 8.0: choose"),
    ("Maxwell 9.0", "50 75", None, "of 5.0, 9.0 no GPU remains"),
    ("", "50", None, "of 8.0, 9.0, 10.0 no GPU remains"),
    ("9.0;Foo", "90", None, "TORCH_CUDA_ARCH_LIST must be like 8.0;9.0.PTX or Ampere;Hopper, got 'foo'"),
])
def test_the_gpus_that_are_asked_for(setup, monkeypatch, tmp_path, capsys, wanted, known, archs, left_out):
    """torch's names too. What the kernels or nvcc do not know is left out, with one line; if nothing is left, a line
    ends the build."""
    if wanted is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wanted)
    nvcc = tool(tmp_path / "nvcc", "\n".join(f"compute_{number}" for number in known.split()))
    if archs is None:
        with pytest.raises(SystemExit, match=f"^specvis_kernels: .*{left_out}"):
            setup["gpu_flags"](nvcc)
        return
    assert archs_of(setup["gpu_flags"](nvcc)) == archs.split()
    said = capsys.readouterr().out
    assert said.startswith(f"specvis_kernels: {left_out} left out: the kernels need 8.0 or later, and {nvcc} knows ") \
        and said.count("\n") == 1 if left_out else said == ""


def test_without_a_list_the_gpus_are_this_machines(setup, monkeypatch, tmp_path):
    """Those that the kernels and nvcc are for, and later ones by PTX."""
    nvcc = tool(tmp_path / "nvcc", "compute_75\ncompute_80\ncompute_86\ncompute_90\ncompute_100")
    for found, archs in [("9.0\n9.0", ["sm_90", "compute_90"]),
                         ("7.5\n9.0\n8.6", ["sm_86", "sm_90", "compute_90"]),
                         ("7.5", ["sm_80", "sm_90", "sm_100", "compute_100"]),  # as without a GPU
                         ("12.1", ["sm_80", "sm_90", "sm_100", "compute_100"]),
                         ("No devices were found", ["sm_80", "sm_90", "sm_100", "compute_100"])]:
        tool(tmp_path / "nvidia-smi", found)
        assert archs_of(setup["gpu_flags"](nvcc)) == archs, found


@pytest.mark.parametrize("cuda, release, is_warned", [("'12.8'", "13.0", True), ("'13.2'", "13.0", False),
                                                      ("None", "13.0", False), ("'13.0'", "12.4", True)])
def test_another_cuda_than_torchs_is_said_at_the_build(setup, tmp_path, capsys, cuda, release, is_warned):
    (tmp_path / "version.py").write_text(f"__version__ = '2.11.0'\ncuda: Optional[str] = {cuda}\nhip = None\n")
    nvcc = tool(tmp_path / "nvcc", f"Cuda compilation tools, release {release}, V{release}.88")
    setup["warn_of_another_cuda"](nvcc, tmp_path)
    said = capsys.readouterr().out
    assert said.count("\n") == said.count(f"nvcc is of CUDA {release}, but torch of CUDA {cuda[1:5]}: ") == is_warned
    assert setup["compression_flags"](nvcc) == (["--compress-mode=size"] if release == "13.0" else [])


def test_an_object_is_built_again_when_what_it_was_made_from_changes(setup, tmp_path):
    """Only then: not for a header that another object includes."""
    target, source, header = (tmp_path / name for name in ("a.cu.o", "a.cu", "a.cuh"))
    for file in (target, source, header):
        file.touch()
    now = time.time() + 10  # newer than setup.py and torch
    os.utime(target, (now, now))
    assert not setup["is_fresh"](target)  # nobody knows what it was made from
    for rule in (f"{target} : {source} \\\n    {header}\n", f"{target}: {source} {header}\n"):
        target.with_suffix(".d").write_text(rule)
        assert setup["read_by"](target) == [source, header]
        os.utime(header)
        assert setup["is_fresh"](target)
        os.utime(header, (now, now))
        assert not setup["is_fresh"](target)
    header.unlink()
    assert not setup["is_fresh"](target)


def test_the_compilers_say_what_they_read(setup):
    """The rules beside the objects of this build name the source and the headers of ours that it includes."""
    found = [file for file in setup["OBJECTS"].rglob("*.o") if setup["is_fresh"](file)]
    if not found:
        pytest.skip("needs a build that is newer than the sources")
    for file in found:
        read = setup["read_by"](file)
        source, = (path for path in read if path.name == file.name.removesuffix(".o"))
        names = {path.name for path in read}
        assert {Path(name).name for name in re.findall(r'#include "(.*)"', source.read_text())} <= names


def test_which_nvcc_builds_the_cuda_library(setup, monkeypatch, tmp_path, capsys):
    """None where torch has no CUDA or there is no nvcc, unless SPECVIS_CUDA says otherwise; the build says why."""
    def said(nvcc: str | None, cuda: str, wanted: str | None = None) -> str:
        torch = tmp_path / "torch"
        torch.mkdir(exist_ok=True)
        (torch / "version.py").write_text(f"__version__ = '2.11.0'\ncuda: Optional[str] = {cuda}\nhip = None\n")
        monkeypatch.setenv("SPECVIS_CUDA", wanted or "")
        assert setup["find_nvcc"](torch) == nvcc
        return capsys.readouterr().out

    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, path: which(name, path=path.removesuffix(":/usr/local/cuda/bin")))
    no_torch = "specvis_kernels: torch has no CUDA: no CUDA kernels are built; SPECVIS_CUDA=1 builds them\n"
    no_nvcc = "no nvcc in CUDA_HOME, PATH or /usr/local/cuda"
    assert said(None, "'12.8'") == f"specvis_kernels: {no_nvcc}: no CUDA kernels are built\n"
    assert said(None, "None") == no_torch
    with pytest.raises(SystemExit, match=f"SPECVIS_CUDA=1, but {no_nvcc}"):
        said(None, "'12.8'", "1")
    nvcc = tool(tmp_path / "nvcc", "")
    assert said(nvcc, "'12.8'") == said(nvcc, "None", "1") == said(nvcc, "'12.8'", "1") == ""
    assert said(None, "None") == no_torch
    assert said(None, "'12.8'", "0") == "specvis_kernels: SPECVIS_CUDA=0: no CUDA kernels are built\n"
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert said(tool(home / "bin/nvcc", ""), "'12.8'") == ""


def test_compilers_are_called_by_ccache_where_it_is(setup, tmp_path):
    compiler = tool(tmp_path / "g++", "")
    assert setup["cached"](compiler) == [compiler]
    ccache = tool(tmp_path / "ccache", "")
    assert setup["cached"](compiler) == [ccache, compiler]
    (tmp_path / "c++").symlink_to(ccache)  # a compiler of ccache's own folder
    assert setup["cached"](str(tmp_path / "c++"), "-m64") == [str(tmp_path / "c++"), "-m64"]


@pytest.mark.parametrize("asked, command, for_nvcc", [
    (None, ["g++"], ["-ccbin", "g++"]),
    ("", ["g++"], ["-ccbin", "g++"]),
    ("  g++ -m64", ["g++", "-m64"], ["-ccbin", "g++", "-Xcompiler=-m64"]),
    ("ccache g++ -m64", ["ccache", "g++", "-m64"], ["-ccbin", "g++", "-Xcompiler=-m64"]),
    ("the c++", ["the c++"], ["-ccbin", "the c++"]),  # one program, in a folder with a space
    ("clang++", "the compiler clang\\+\\+ -std=.* does not run: No such file", None),
    ("broken -m64", r"does not compile int main\(\) {} by broken -m64 .*: broken: fatal error: no cc1plus", None),
])
def test_the_compiler_that_is_asked_for(setup, monkeypatch, tmp_path, asked, command, for_nvcc):
    """It works on a line, or the build ends with one."""
    monkeypatch.setenv("CXX", asked) if asked is not None else monkeypatch.delenv("CXX", raising=False)
    for name in ("g++", "ccache", "the c++", "broken"):
        tool(tmp_path / name, "In a file:\nbroken: fatal error: no cc1plus\nended")
    (tmp_path / "broken").write_text((tmp_path / "broken").read_text() + "exit 1\n")
    if for_nvcc is None:
        with pytest.raises(SystemExit, match=f"^specvis_kernels: .*{command}"):
            setup["find_compiler"]()
    else:
        found = setup["find_compiler"]()
        assert found == [str(tmp_path / command[0]), *command[1:]]
        assert [word.removeprefix(f"{tmp_path}/") for word in setup["for_nvcc"](found)] == for_nvcc


def test_how_many_compilers_run_at_once(setup, monkeypatch, tmp_path):
    """As many as MAX_JOBS says if it is a number, else as the container's cores and memory allow."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    for asked in ("", "0", "auto", "-1"):
        monkeypatch.setenv("MAX_JOBS", asked)
        assert setup["number_of_jobs"](tmp_path) <= 4
        for name, number, jobs in [("cpu.max", "max 100000", 4), ("cpu.max", "250000 100000", 3),
                                   ("memory.max", "max", 3), ("memory.max", "700000000", 2), ("memory.max", "1000", 1)]:
            (tmp_path / name).write_text(f"{number}\n")
            assert setup["number_of_jobs"](tmp_path) == jobs
        for file in tmp_path.glob("*.max"):
            file.unlink()
    monkeypatch.setenv("MAX_JOBS", "7 ")
    assert setup["number_of_jobs"](tmp_path) == 7


def test_every_kernel_stays_in_registers():
    """Without a warning, for every GPU of the build, and with registers for two blocks where threads hold entries of
    rows. The build keeps what the compiler said beside each object."""
    folder, spilling = cuda_build(), []
    for file in KERNELS:
        log = (folder / f"csrc/cuda/{file.name}.log").read_text()
        assert "warning" not in log, log
        reports = log.split("Compiling entry function '")[1:]
        assert reports, log
        for report in reports:
            is_full = "4Held" in report and int(re.search(r"Used (\d+) registers", report)[1]) > 64
            if is_full or {*re.findall(r"(\d+) bytes (?:stack frame|spill stores)", report)} - {"0"}:
                spilling.append(report.partition("\n")[0])
    assert not spilling


def test_the_library_loads_without_a_gpu():
    """On a torch that may be CPU-only, whose loader leaves it alone; every kernel is in it."""
    cuda_build()
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


FAKE_DRIVER = "extern \"C\" int cuDriverGetVersion(int* version) { *version = %d; return 0; }"
FAKE_HEADER = "#define CUDART_VERSION 13020"


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize("driver, torch_cuda, loads", [(13000, "13.0", True), (12080, "12.8", False),
                                                       (None, "13.0", True)])
def test_a_library_for_a_newer_cuda_than_the_drivers_stays_out(tmp_path, driver, torch_cuda, loads):
    """Then Triton's kernels answer, with one warning that says what to do. The library here is nothing but its
    version, and the driver is a fake one."""
    def compile(code, target):
        command = ["g++", "-x", "c++", "-shared", "-fPIC", f"-I{tmp_path}", "-o", target, "-"]
        subprocess.run(command, input=code, text=True, check=True)

    package = shutil.copytree(LIBRARY.parent, tmp_path / "specvis_kernels",
                              ignore=shutil.ignore_patterns("_ops_cuda.so", "__pycache__"))
    (tmp_path / "cuda_runtime_api.h").write_text(FAKE_HEADER)
    compile((ROOT / "csrc/cuda/cuda_version.cpp").read_text(), package / "_ops_cuda.so")
    if driver:
        compile(FAKE_DRIVER % driver, tmp_path / "libcuda.so.1")
    program = f"""if True:
        import warnings
        import torch
        torch.version.cuda = {torch_cuda!r}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            import specvis_kernels
        is_loaded = any("_ops_cuda" in path for path in torch.ops.loaded_libraries)
        print(is_loaded, specvis_kernels.backends("tree_links", "cuda"), *(str(w.message) for w in said), sep="|")"""
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
                         env=os.environ | {"PYTHONPATH": "", "LD_LIBRARY_PATH": str(tmp_path)})
    assert run.returncode == 0, run.stderr
    is_loaded, backends, *warnings = run.stdout.strip().split("|")
    assert is_loaded == str(loads) and ("triton" in backends) == bool(find_spec("triton"))
    assert len(warnings) == (not loads)
    if warnings:
        assert "is built with CUDA 13.2, and the driver knows CUDA 12.8: Triton's kernels answer" in warnings[0]
        assert warnings[0].endswith("Build it with CUDA 12 instead")


def test_the_gpus_are_in_the_library():
    archs, path = cuda_build().name.split("-"), os.environ["PATH"]
    if find_spec("triton"):
        path += os.pathsep + str(Path(find_spec("triton").origin).parent / "backends/nvidia/bin")
    cuobjdump = shutil.which("cuobjdump", path=path)
    if not cuobjdump:
        pytest.skip("needs cuobjdump")
    inside = [subprocess.run([cuobjdump, option, LIBRARY], capture_output=True, text=True).stdout
              for option in ("--list-elf", "--list-ptx")]
    for arch in archs:
        name = arch.replace("compute", "sm")
        found = re.findall(rf"\.{name}\.(?:cubin|ptx)", inside[arch.startswith("compute")])
        assert len(found) >= len(KERNELS), f"{arch} is in {len(found)} of {len(KERNELS)} files"
