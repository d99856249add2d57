"""Whatever the options are given: one line and a status, never a traceback, and nothing absurd is begun."""
import json
from dataclasses import asdict

import click
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from specvis.cli import compare, tune
from specvis.cli.main import main
from specvis.decoding.methods import CONTINUOUS, METHODS, parse_method
from tests.tiny import tiny_pair
from training.main import main as train

VALUES = ("-1", "0", "1.5", "99999999999999999999", "-99999999999", "1e308", "1e-320", "nan", "-inf", "", " ", "x",
          "\u2603", "\udcff", "x" * 300, "x" * 300 + ".png", "folder", "folder.png", "noise.png", "noise.json",
          "/dev/full", "no/such/file", "a:b=c", ",", "--", "deep.json", "unreadable.png")


class Begun(ValueError):
    """The command's arguments are right, as far as they are looked at before it begins."""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to be in, with odd files."""
    monkeypatch.chdir(tmp_path)
    for folder in ("folder", "folder.png"):
        (tmp_path / folder).mkdir()
    for file in ("noise.png", "noise.json"):
        (tmp_path / file).write_bytes(bytes(range(256)))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "unreadable.png").touch()
    (tmp_path / "unreadable.png").chmod(0)

    def begun(*_, **__):
        raise Begun("begun")

    monkeypatch.setattr(compare, "run_all", begun)
    monkeypatch.setattr(tune, "measured", begun)
    return tmp_path


def check(words, group=main):
    """What this command answers: one line on stderr where the status is not 0, and no traceback."""
    result = CliRunner().invoke(group, words)
    said = "" if result.exception is None else repr(result.exception)
    assert isinstance(result.exception, (SystemExit, type(None))), (words, said)
    assert result.exit_code in (0, 2, 3), (words, result.exit_code, result.stderr)
    if result.exit_code:
        lines = result.stderr.splitlines()
        assert len(lines) == 1 and lines[0].startswith("Error: "), (words, result.stderr)
    return result


USUAL = {
    "generate": ["--prompt", "red heart", "--scale", "1"],
    "compare": ["--methods", "vanilla", "-n", "1"],
    "tune": [],
    "convert": ["noise.png", "--out", "folder"],
    "info": [],
    "methods": [],
}


@pytest.mark.parametrize("name", USUAL)
def test_every_option_of_every_command(name, weights, place):
    command, before = main.get_command(click.Context(main), name), sorted(weights.iterdir())
    for parameter in command.params:
        for value in VALUES:
            if isinstance(parameter, click.Option) and parameter.is_flag:
                continue
            given = [parameter.opts[0], value] if isinstance(parameter, click.Option) else [value]
            model = ["--model", str(weights)] if any(p.name == "model" for p in command.params) else []
            check([name, *USUAL[name], *model, *given])
    assert sorted(weights.iterdir()) == before


@pytest.mark.parametrize("name", [*METHODS, *CONTINUOUS])
def test_every_parameter_of_every_method(name):
    """Refused or bounded: what is accepted says how large a step is."""
    for parameter in [*(METHODS.get(name) or CONTINUOUS[name]).parameters, "name", "text", "self", "source"]:
        for value in VALUES:
            try:
                method = parse_method(f"{name}:{parameter}={value}")
            except ValueError:
                continue
            if name in METHODS:
                assert 1 <= method.max_nodes <= 1024 and method.max_depth <= 1023
                assert len(method.omegas) == method.max_depth or method.is_baseline


@pytest.mark.parametrize("words, message", [
    ("--top-k 99999999999", "top_k must be a whole number within 0..2147483647, got 99999999999"),
    ("--top-k 2147483647", ""),
    ("--method eagle2:nodes=99999999999:depth=1", "nodes must be a whole number within 2..1024"),
    ("--method eagle2:nodes=1024:depth=1:width=128", ""),
    ("--method eagle2:depth=2:width=100000:nodes=100000", "width must be a whole number within 1..128, got 100000"),
    ("--method eagle2:depth=8:width=128:nodes=1024", ""),
    ("--method eagle1:tree=chain-1000000", "depth of a chain must be a whole number within 1..128, got 1000000"),
    ("--method eagle1:tree=deep.json", "tree deep.json is no JSON"),
    ("--method eagle1:tree=folder.json", "tree folder.json is not a file that can be read"),
    ("--method speculative:depth=128", ""),
    ("--method jacobi:window=1023", ""),
    ("--method jacobi:window=1024", "window must be a whole number within 1..1023, got 1024"),
    ("--method gsd:k=524287", ""),
    ("--method gsd:k=524288", "k must be a whole number within 0..524287, got 524288"),
    ("--method lantern:k=63", ""),
    ("--method lantern:name=x", "method lantern has no parameter 'name'"),
    ("--method adt-tree:depths=8,128:widths=128,128:nodes=1024:width_step=128", ""),
    ("--method cspd:gamma=1023:max_tries=1000000", ""),
    ("--guidance 1e300", "guidance must be a finite number in 32 bits"),
    ("--temperature 1e300", "temperature must be at least 0 and finite in 32 bits"),
    ("--out x.psd", "out must end in the name of a picture format"),
    ("--out x.webp -n 1000 --scale 4", "WEBP holds at most 16383 pixels a side, got 32000 x 32"),
    ("--out x.jpg -n 1000 --scale 10", "JPEG holds at most 65500 pixels a side, got 80000 x 80"),
    ("--scale 100000000", "Invalid value for '--scale': 100000000 is not in the range 1<=x<=1024"),
    ("--scale 1024 -n 3", "scale and n must give a picture of at most 178956970 pixels, got 24576 x 8192"),
    ("--out " + "x" * 300 + ".png", "out must be a file in a folder that can be made and written"),
    ("--device meta", "device must be one that torch"),
    ("--device privateuseone", "device must be one that torch"),
    ("--device cuda:99", "device must be one that torch"),
])
def test_what_is_absurd_is_said_before_anything_is_drawn(words, message, weights, place):
    (place / "folder.json").mkdir()
    result = check(["generate", "--prompt", "red heart", "--model", str(weights), "--scale", "1", *words.split()])
    assert result.exit_code == (2 if message else 0) and message in result.stderr, result.output
    assert (place / "specvis.png").exists() == (not message)
    assert not [path for path in place.iterdir() if path.suffix in (".psd", ".xbm", ".webp", ".jpg")]


@pytest.mark.parametrize("stage", ["gpt", "mar", "eagle", "export"])
def test_every_option_of_a_training_stage(stage, place):
    command = train.get_command(click.Context(train), stage)
    for parameter in command.params:
        for value in VALUES:
            if not parameter.is_flag and isinstance(parameter, click.Option):
                check([stage, parameter.opts[0], value], train)


def test_names_in_files_do_not_steer_the_terminal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file({"x\x1b[31m\x1b]0;title\x07\n": torch.zeros(2)}, "x.safetensors")
    (tmp_path / "vocabulary.json").write_text(json.dumps({"words": ["", "red\x1b[31m"]}))
    (tmp_path / "pipeline.json").write_text(json.dumps({"text_encoder": "\x1b[31m"}))
    (tmp_path / "mar.json").write_text(json.dumps(asdict(tiny_pair().mar.config)))
    for words in (["convert", "x.safetensors", "--out", "o"], ["info", "--words", "--model", "."],
                  ["info", "--model", "."]):
        result = CliRunner().invoke(main, words)
        assert r"\x1b[31m" in result.output and "\x1b" not in result.output, words


@pytest.mark.parametrize("weight_map", [{"a": 5}, {"a": None}, {"a": "x", "b": 5}, {"a": "x" * 5000}, {"a": [1]}])
def test_an_index_of_no_names_is_an_error(weight_map, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    result = check(["convert", str(tmp_path), "--out", str(tmp_path / "o")])
    assert result.exit_code == 2 and len(result.stderr) < 5000
