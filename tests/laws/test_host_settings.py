"""Settings of the program around an op change no bit of what it returns."""
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map_only

import specvis_kernels
from specvis_kernels import draw_tokens, swiglu
from tests import cases
from tests.cases.comparing import as_tuple, by_name, make, run, same, tensors_of
from tests.laws.test_every_op import EVERY
from tests.tiny import tiny_pair, tiny_pipeline


@contextmanager
def set_to(set_value, value, usual):
    set_value(value)
    try:
        yield
    finally:
        set_value(usual)


SETTINGS = {
    "autocast, bfloat16": lambda: torch.autocast(cases.DEVICE, torch.bfloat16),
    "autocast, float16": lambda: torch.autocast(cases.DEVICE, torch.float16),
    "default device": lambda: torch.device("meta"),
    "default dtype float64": lambda: set_to(torch.set_default_dtype, torch.float64, torch.float32),
    "default dtype bfloat16": lambda: set_to(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "flush denormal": lambda: set_to(torch.set_flush_denormal, True, False),
    "deterministic": lambda: set_to(torch.use_deterministic_algorithms, True, False),
    "inference mode": torch.inference_mode,
    "gradients": torch.enable_grad,
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("op, backend", EVERY)
def test_bits_do_not_depend_on(setting, op, backend):
    for case in (cases.CASES[op][1], cases.CASES[op][-1]):
        args, kwargs = make(op, *case)
        expected = run(op, args, kwargs, backend)
        with SETTINGS[setting]():
            got = run(op, args, kwargs, backend)
        assert all(map(same, got, expected))


@pytest.mark.parametrize("op, backend", EVERY)
def test_inference_tensors_are_taken(op, backend):
    written, others = by_name(op, *make(op, *cases.CASES[op][1]))
    expected = run(op, (), written | others, backend)
    with torch.inference_mode():
        written, others = tree_map_only(torch.Tensor, torch.clone, (written, others))
    got = as_tuple(getattr(specvis_kernels, op)(**written, **others, backend=backend))
    assert all(map(same, (*got, *tensors_of(written)) if written else got, expected))


def test_a_device_without_autocast_has_oracles():
    x = torch.empty(2, 4, device="meta")
    assert swiglu(x, x, backend="oracle").shape == (2, 4)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", ["vanilla", "jacobi:window=3", "eagle2"])
def test_pictures_do_not_depend_on(setting, method):
    pipeline = tiny_pipeline()

    def picture():
        tokens = pipeline.tokens(["red heart"], method, pipeline.sampling(seeds=[1])).tokens
        return torch.cat([tokens.view(-1), torch.tensor(np.array(pipeline.pictures(tokens)[0]), device="cpu").view(-1)])

    expected = picture()
    with SETTINGS[setting]():
        assert torch.equal(picture(), expected)


@pytest.mark.parametrize("setting", SETTINGS)
def test_continuous_tokens_do_not_depend_on(setting):
    pair = tiny_pair()

    def tokens():
        return pair.tokens(["red heart"], "cspd", pair.sampling(seeds=[1])).tokens

    expected = tokens()
    with SETTINGS[setting]():
        assert torch.equal(tokens(), expected)


@pytest.mark.parametrize("make", [
    torch.Tensor.to_sparse, torch.Tensor.to_mkldnn, lambda x: torch.nested.nested_tensor(list(x)),
    lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged)], ids=["sparse", "mkldnn", "nested", "jagged"])
@pytest.mark.filterwarnings("ignore:.*nested")
def test_other_layouts_are_refused(make):
    logits, positions = torch.randn(1, 2, 8), torch.ones(1, 2)
    with pytest.raises(ValueError, match="logits must be a dense tensor"):
        draw_tokens(make(logits), None, None, 1.0, 0, 1.0, torch.tensor([1]), positions.long())
    with pytest.raises(ValueError, match="positions must be a dense tensor"):
        draw_tokens(logits, None, None, 1.0, 0, 1.0, torch.tensor([1]), make(positions))


@pytest.mark.filterwarnings("error")
def test_a_setting_in_half_precision_warns_of_nothing():
    draw_tokens(torch.randn(1, 1, 8), None, None, 1.0, 0, np.float16(0.5), torch.tensor([1]), torch.tensor([[0]]))


FLUSHED = """
import torch
torch.set_flush_denormal(True)
import specvis_kernels
specvis_kernels.codebook_neighbors(torch.randn(32, 4), 3)
"""


def test_denormal_numbers_are_flushed_before_the_import(tmp_path):
    """A new process compiles the sources, whose oracles answer."""
    shutil.copytree(Path(specvis_kernels.__file__).parent, tmp_path / "specvis_kernels",
                    ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    subprocess.run([sys.executable, "-B", "-c", FLUSHED], cwd=tmp_path, check=True)


AGAIN = """
import importlib, sys, torch, specvis_kernels
for again in (lambda: importlib.reload(sys.modules["specvis_kernels.tree_links"]),
              lambda: [sys.modules.pop(name) for name in list(sys.modules) if "specvis" in name],
              lambda: importlib.import_module("specvis_kernels")):
    try:
        again()
    except ImportError as error:
        print(error)
"""


def test_an_import_that_is_done_anew_says_so():
    said = subprocess.run([sys.executable, "-OO", "-W", "error", "-c", AGAIN], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("restart Python to import it anew") == 2
