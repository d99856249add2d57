"""build/hub as Hugging Face's library `kernels` loads it, beside the package that is imported."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow.test_install import COMPILER, PIP, copy_sources, run

PROGRAM = """if True:
    import sys
    from pathlib import Path
    import torch
    from kernels import get_local_kernel
    from kernels._rust import Digest, Metadata
    import specvis_kernels
    from tests import cases

    hub = get_local_kernel(Path(sys.argv[1]))
    folder = Path(hub.__file__).parent
    metadata = Metadata.read_from_file(folder / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, folder))
    assert hub.__name__ == metadata.id and hub is not specvis_kernels and hub.ops() == specvis_kernels.ops()
    for op in ("tree_links", "verify_tree", "draw_tokens"):
        args, kwargs = getattr(cases, op)(*cases.CASES[op][1])
        assert hub.backends(op) == ["oracle", "cpu"]
        for ours, other in zip(getattr(hub, op)(*args, **kwargs), getattr(specvis_kernels, op)(*args, **kwargs)):
            assert torch.equal(ours, other)
        schemas = [str(getattr(getattr(torch.ops, name), op).default._schema)
                   for name in (metadata.id, "specvis_kernels")]
        assert schemas[0].removeprefix(metadata.id) == schemas[1].removeprefix("specvis_kernels")
    sys.path.insert(0, str(folder))
    del sys.modules["specvis_kernels"]
    import specvis_kernels
    assert specvis_kernels.verify_tree is hub.verify_tree
    print(metadata.id, metadata.version, metadata.license)"""


@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
def test_the_hubs_loader_loads_it_beside_the_package(tmp_path):
    sources = copy_sources(tmp_path / "sources")
    built = run(sys.executable, "setup.py", "hub", cwd=sources, SPECVIS_CUDA="0", MAX_JOBS="1")
    assert built.returncode == 0, built.stdout
    folder, = (sources / "build/hub/build").iterdir()
    assert {path.name for path in sources.glob("build/hub/*")} == {"build"}
    name = json.loads((folder / "metadata.json").read_text())["id"]

    # Without what checks signatures on the hub, which is large. huggingface_hub is here, by transformers.
    installed = run(*PIP, "install", "--no-deps", "--target", tmp_path / "loader", "kernels==0.17.2", cwd=tmp_path)
    if installed.returncode:
        pytest.skip(f"kernels cannot be installed here: {installed.stdout[-300:]}")
    root = Path(__file__).parent.parent.parent
    loaded = subprocess.run([sys.executable, "-c", PROGRAM, sources / "build/hub"], cwd=root, text=True,
                            env={"PYTHONPATH": f"{tmp_path}/loader", "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1",
                                 "HOME": str(tmp_path)}, capture_output=True)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.splitlines()[-1] == f"{name} 0 Apache-2.0"
