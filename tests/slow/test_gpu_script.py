"""benchmarks/gpu.sh without a GPU."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specvis_kernels import backends

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(not shutil.which("bash") or "cpu" not in backends("tree_links"), reason="needs bash, C++ kernels")
def test_a_dry_run_finds_all_that_each_part_calls(tmp_path):
    """It runs where neither of the packages is installed: Python reads no .pth files."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH=$PYTHONPATH:{Path(torch.__file__).parent.parent} '
                      f'exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "BEFORE", "LIMIT")}
    variables |= {"PYTHON": str(python), "OUT": str(tmp_path / "out"), "DRY": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "benchmarks/gpu.sh"], cwd=ROOT, env=variables, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    parts = [line.split(maxsplit=2) for line in (tmp_path / "out/summary.txt").read_text().splitlines()[1:]]
    assert done.returncode == 0 and len(parts) == 17 and {status for _, _, status in parts} == {"ok"}, done.stdout
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"log.txt", "summary.txt", "ops.json", "decode.json"}
