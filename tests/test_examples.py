"""The programs in examples/ run as they stand, and what they print is true."""
import ast
import runpy
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import specvis_kernels
from specvis.models.interface import TargetModel

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """run("one_op", "--requests", 100): the names of the program afterwards, and what it printed."""
    def run(name, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        names = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return names, capsys.readouterr().out

    return run


def test_each_says_how_it_is_run_and_has_a_test():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {"one_op", "one_picture", "compare_methods", "continuous_picture", "own_model"}
    for name in names:
        text = (EXAMPLES / f"{name}.py").read_text()
        assert f"\n    python examples/{name}.py" in ast.get_docstring(ast.parse(text), clean=False), name


def test_one_op(run):
    names, printed = run("one_op")
    tree = ast.parse((EXAMPLES / "one_op.py").read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)} | {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"argparse", "torch", "specvis_kernels"}
    assert (names["result"].status & ~specvis_kernels.EMPTY_RESIDUAL == 0).all()
    distance = (names["measured"] - names["target"][5]).abs().sum() / 2
    draft_distance = (names["draft"][5] - names["target"][5]).abs().sum() / 2
    assert distance < 0.02 < 0.1 < draft_distance          # 20000 draws, 8 tokens: about 0.005 by chance
    assert f"{names['tau']:.2f} tokens per target forward" in printed and 1.5 < names["tau"] < 2


def test_one_picture(run):
    names, printed = run("one_picture", "--out", "x.png", "--seed", 1)
    assert Image.open("x.png").size == (256, 256)
    assert printed.startswith("x.png: ") and names["decoded"].tau.item() > 1.5


def test_compare_methods(run):
    names, printed = run("compare_methods", "--pictures", 1, "--methods", "vanilla", "eagle1:tree=chain-2")
    (baseline, ones, _), (method, decoded, seconds) = names["rows"]
    assert (ones.tau == 1).all() and (decoded.tau > 1.2).all() and seconds > 0
    assert [line.split()[0] for line in printed.splitlines()] == ["method", baseline.label, method.label]


def test_continuous_picture(run):
    names, printed = run("continuous_picture", "--out", "x.png", "--method", "mar:num_iter=4")
    assert Image.open("x.png").size == (256, 256)
    assert "x.png: 4 target forwards, 64.0 tokens in each" in printed


@pytest.mark.parametrize("method", ["eagle2:drafter=model:depth=3:width=4:nodes=12", "speculative:drafter=model"])
def test_own_model(run, method):
    names, printed = run("own_model", "--method", method)
    assert isinstance(names["target"], TargetModel)
    assert torch.equal(names["decoded"].tokens, names["baseline"].tokens) and "100% of the tokens" in printed
    assert names["decoded"].tau.mean() > 1.3 and not names["decoded"].failed.any()
