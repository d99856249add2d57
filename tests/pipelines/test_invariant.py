"""What specvis.batch_invariant() sets, sets back and refuses, on a GPU that is pretended."""
import os
from contextlib import nullcontext

import pytest
import torch

import specvis
from specvis.cli import options
from specvis.pipelines import invariant
from tests.cli.conftest import run

attention = pytest.importorskip("specvis_kernels.triton.tree_attention")


@pytest.fixture
def settings(monkeypatch):
    """What is set now, and whether the environment is."""
    preferred, matmul = ["default"], torch.backends.cuda.matmul
    for name, value in {"is_available": True, "is_initialized": False, "get_device_capability": (9, 0),
                        "get_device_name": "a GPU"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    monkeypatch.setattr(invariant, "check_device", lambda device: None)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library",
                        lambda name=None: preferred.append(name) if name else preferred[-1])
    monkeypatch.setattr(os, "environ", os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    return lambda: ([attention.is_batch_invariant, preferred[-1], *(
        getattr(matmul, name + part) for name in invariant.REDUCTIONS for part in ("", "_split_k"))],
        os.environ.items() >= invariant.WORKSPACES.items())


def test_it_sets_and_sets_back(settings, monkeypatch):
    before = settings()
    with specvis.batch_invariant("cpu"):
        assert settings() == before
    with pytest.raises(KeyError), specvis.batch_invariant():
        assert settings() == ([True, "cublaslt", *4 * [False]], True)
        raise KeyError
    assert settings() == (before[0], True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with specvis.batch_invariant("cuda:0"):  # cuBLAS has read the environment
        assert attention.is_batch_invariant


@pytest.mark.parametrize("what, value, error, match", [
    ("torch.cuda.is_initialized", lambda: True, RuntimeError, "set CUBLAS_WORKSPACE_CONFIG=:16:8 CUBLASLT_.*=1 before"),
    ("torch.cuda.get_device_capability", lambda device: (8, 9), ValueError, "capability 9.0 or newer.* got a GPU"),
    ("torch.version.hip", "6.4", ValueError, "must be an NVIDIA GPU"),
    ("specvis.pipelines.invariant.backends", lambda *args: ["oracle"], ValueError, "with Triton installed")])
def test_it_refuses(settings, monkeypatch, what, value, error, match):
    before = settings()
    monkeypatch.setattr(what, value)
    with pytest.raises(error, match=match), specvis.batch_invariant():
        pass
    assert settings() == before


def test_the_command_line_begins_it_before_it_looks_at_the_device(monkeypatch):
    calls = []
    for name in ("batch_invariant", "check_device"):
        monkeypatch.setattr(options, name, lambda device, name=name: calls.append(name) or nullcontext())
    run("generate", "--device", "cuda", "--prompt", "", "--batch-invariant", status=2)
    assert calls == ["batch_invariant", "check_device"]
