"""The definitions for flashinfer-bench: the format's rules, and that each reference is its op, with torch alone."""
import ast
import json
import sys

import pytest
import torch

from benchmarks.definitions import DTYPES, LEFT_OUT, OPS, definition, main
from tests.kernels import inputs
from tests.laws.test_every_op import as_tuple, assert_agree, run


def cases():
    """Every third one of an op, beside the smallest. The format has no uint8, as bits of masks are."""
    return [(op, case) for op in OPS for case in inputs.CASES[op][1::3]
            if not {"packed", "packed_rows"} & {*map(str, case)}]


@pytest.mark.parametrize("op, case", cases(), ids=str)
def test_a_reference_equals_its_op(op, case):
    content, tensors = definition(op, *case)
    assert json.loads(json.dumps(content)) == content
    axes, given, made = content["axes"], content["inputs"], content["outputs"]
    assert not given.keys() & made.keys()
    bound = {letter for tensor in given.values() for letter in tensor["shape"]}
    for tensor in (*given.values(), *made.values()):
        assert tensor["dtype"] in DTYPES and set(tensor["shape"]) <= axes.keys()
    assert {letter for letter, axis in axes.items() if axis["type"] == "var"} <= bound
    imported = {getattr(node, "module", None) or node.names[0].name
                for node in ast.walk(ast.parse(content["reference"])) if isinstance(node, (ast.Import, ast.ImportFrom))}
    assert {name.partition(".")[0] for name in imported} <= {"torch", *sys.stdlib_module_names}

    exec(content["reference"], names := {})
    tensors = [tensor.long() if tensor.dtype == torch.uint16 else tensor for tensor in tensors]
    for tensor, (name, said) in zip(tensors, given.items(), strict=True):
        assert str(tensor.dtype) == f"torch.{said['dtype']}" and tensor.dim() == len(said["shape"]), name
    outputs = as_tuple(names["run"](*tensors))
    assert [str(out.dtype) for out in outputs] == [f"torch.{tensor['dtype']}" for tensor in made.values()]
    args, kwargs = getattr(inputs, op)(*case)
    expected = [out.long() if out.dtype == torch.uint16 else out for out in run(op, args, kwargs)]
    assert_agree(op, outputs, expected, "reference")


def test_an_op_without_a_definition_is_known():
    assert sorted([*OPS, *LEFT_OUT]) == sorted(inputs.CASES)
    with pytest.raises(ValueError, match="mask of tree_mask must have a dtype that the format knows, got uint8"):
        definition("tree_mask", *next(case for case in inputs.CASES["tree_mask"] if "packed_rows" in case))


def test_the_command_writes_files_that_say_their_names(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["definitions", "--out", str(tmp_path), "tree_links", "draw_tokens"])
    main()
    files = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert all(content["name"] == name for name, content in files.items())
    assert {content["op_type"] for content in files.values()} == {"tree_links", "draw_tokens"}
    links = files["tree_links_N60_W1_int32"]
    assert links["axes"] == {"B": {"type": "var"}} | {
        letter: {"type": "const", "value": size} for letter, size in (("N", 60), ("W", 1))}
    assert links["inputs"] == {"parents": {"shape": ["B", "N"], "dtype": "int32"}}
    assert capsys.readouterr().out == f"wrote {len(files)} definitions to {tmp_path}\n"
    monkeypatch.setattr(sys, "argv", ["definitions", "--out", str(tmp_path), "commit_kv"])
    with pytest.raises(SystemExit):
        main()
    assert "no op 'commit_kv', only accept_gaussian, " in capsys.readouterr().err
