"""What the compiled libraries need of a system, the tag by which a wheel says so, and what they leave alone in it."""
import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import specvis_kernels
from tests.test_cuda_build import defined_in_setup

OPS, CUDA = (Path(specvis_kernels.__file__).with_name(name) for name in ("_ops.so", "_ops_cuda.so"))


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
@pytest.mark.parametrize("library, newest", [(OPS, 28), (CUDA, 34)], ids=lambda value: getattr(value, "name", None))
def test_what_a_library_needs(library, newest, monkeypatch):
    """No glibc newer than that of a manylinux image, nothing of a libstdc++; and it gives no name to others."""
    if not library.exists():
        pytest.skip(f"{library.name} is not built")
    said = subprocess.run(["objdump", "-pT", library], capture_output=True, text=True, check=True).stdout
    symbols = re.findall(r"^\w+ .{7} (\S+)\s+\w+ +\(?(\w+?)_([\d.]+)\)? +(?:\.\w+ )?(\w+)$", said, re.M)
    glibc = {name: int(version.split(".")[1]) for where, kind, version, name in symbols if kind == "GLIBC"}
    assert "memcpy" in glibc and {kind for _, kind, _, _ in symbols} <= {"GLIBC", "GCC"}
    assert {name: version for name, version in glibc.items() if version > newest} == {}
    assert not [name for name in re.findall(r"NEEDED +(\S+)", said) if re.match("libstdc|libcu", name)]
    given = re.findall(r"^\w+ .{7} (?!\*UND\*)\S+\s.*?(\S+)$", said, re.M)
    assert given == ["specvis_kernels_cuda_version"] * (library == CUDA)
    manylinux = defined_in_setup(monkeypatch)["manylinux"]
    assert manylinux("linux_x86_64", [library]) == f"manylinux_2_{max(28, *glibc.values())}_x86_64"


@pytest.mark.parametrize("inside, tag", [
    ([b"\0GLIBC_2.2.5\0GLIBC_2.17\0"], "manylinux_2_28_aarch64"),
    ([b"\0GLIBC_2.14\0", b"\0GLIBC_2.34\0GLIBC_2.4\0"], "manylinux_2_34_aarch64"),
    ([b"\0GLIBC_2.36\0GLIBCXX_3.4.24\0"], "manylinux_2_36_aarch64"),
    ([b"\0GLIBC_2.36\0GLIBCXX_3.4.25\0"], "linux_aarch64"),
    ([b"\0"], "linux_aarch64"),  # another libc
    ([], "linux_aarch64"),
])
def test_the_tag_of_a_wheel_is_what_its_libraries_need(inside, tag, tmp_path, monkeypatch):
    libraries = [tmp_path / str(i) for i in range(len(inside))]
    for library, content in zip(libraries, inside):
        library.write_bytes(content)
    assert defined_in_setup(monkeypatch)["manylinux"]("linux_aarch64", libraries) == tag


@pytest.mark.skipif(not OPS.exists(), reason="needs the C++ kernels")
def test_an_error_leaves_no_exception_behind():
    """What the library's libstdc++ throws, torch's catches; both count it in one place."""
    count = ctypes.CDLL("libstdc++.so.6")._ZSt19uncaught_exceptionsv
    for _ in range(2):
        with pytest.raises(RuntimeError, match="tree_links: parents has another number of dimensions"):
            torch.ops.specvis_kernels.tree_links(torch.zeros(3, dtype=torch.int32))
        assert count() == 0
