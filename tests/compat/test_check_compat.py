"""`python -m benchmarks.check_compat` tells equal functions from different ones, in a folder like a checkout."""
import random
import re
from pathlib import Path

import pytest
import torch

from benchmarks import check_compat, compat_cases

IMPORTS = "import a_package_that_is_not_there\nfrom .models import *\n\n"
CFG = "def cfg_logit_process(combined_logits: Tensor, cfg_scale=4.0) -> Tensor:\n    pass\n"


def method(name, *, of="lantern", before="", after="return answer"):
    """A function of the release's that calls ours; `before` and `after` are lines that may change what it does."""
    return (f"def {name}(self, *read: Unknown, **named) -> Unknown:\n"
            f"    from specvis_kernels.compat import {of} as ours\n    {before or 'pass'}\n"
            f"    answer = ours.{name}(self, *read, **named)\n    {after}\n")


def inside(of, *methods):
    return f"@unknown\nclass {of}(Unknown):\n" + "".join("    " + line + "\n" for text in methods
                                                         for line in text.splitlines())


AS_RELEASED = "named['generator'] = 'python'"


def checkouts(folder: Path, after: str = "return answer"):
    """Folders with the files of LANTERN and EAGLE; `after` ends their evaluate_posterior."""
    evaluate = [method("evaluate_posterior", before=AS_RELEASED, after=after),
                method("evaluate_posterior_v1", before=AS_RELEASED)]
    tree = "TREE = [[0], [1], [0, 0], [0, 2], [1, 1], [0, 0, 1]]\n".replace
    function = method("evaluate_posterior", of="eagle", before=AS_RELEASED)
    files = {
        "LANTERN/models/ea_model_llamagen.py": CFG + "def calculate_tvd():\n    pass\n" + inside(
            "EaModel", *evaluate, method("generate_tree_buffers"), method("tree_decoding"),
            "def pad_path(self):\n    pass", "def generate_candidates(self):\n    pass",
            method("update_inference_inputs")),
        "LANTERN/models/ea_model_anole.py": CFG + "def calculate_tvd():\n    pass\n" + inside(
            "EaModel", *evaluate, method("tree_decoding")),
        "LANTERN/models/drafters/cnets_llamagen.py": CFG + inside("Model", method("topK_genrate")),
        "LANTERN/models/drafters/utils_c.py": "TOPK = 10\nclass node:\n    pass\nclass Tree:\n    pass\n" + method(
            "draft_tree_buffers").replace("def draft_tree_buffers", "def generate_tree_buffers"),
        "LANTERN/models/drafters/choices.py": tree("TREE", "naive_extend_57"),
        "EAGLE/eagle/model/utils.py": "TOPK = 10\ndef pad_path():\n    pass\n" + function + "".join(
            method(name, of="eagle") for name in ("generate_tree_buffers", "tree_decoding", "update_inference_inputs")),
        "EAGLE/eagle/model/cnets.py": inside("Model", method("topK_genrate", of="eagle")),
        "EAGLE/eagle/model/cnets1.py": inside("Model", method("topK_genrate_by_head", of="eagle").replace(
            "def topK_genrate_by_head", "def topK_genrate")),
        "EAGLE/eagle/model/choices.py": tree("TREE", "mc_sim_7b_63"),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(IMPORTS + text)
    return folder / "LANTERN", folder / "EAGLE"


SMALL = ["--cases", "2", "--repeats", "1", "--vocab", "64", "--nodes", "16", "--k", "5", "--threads", "1"]


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_equal_functions(tmp_path, capsys):
    lantern, eagle = checkouts(tmp_path)
    assert check_compat.main(["--lantern", str(lantern), "--eagle", str(eagle), *SMALL]) == 0
    printed = capsys.readouterr().out.splitlines()
    rows = [re.split(r" {2,}", line) for line in printed if re.search(r"\d$", line)]
    assert len(rows) > 50 and all(cases == equal for _, _, cases, equal, *_ in rows)
    assert {name.partition(",")[0] for name, *_ in rows} == {
        "evaluate_posterior", "evaluate_posterior (Anole)", "evaluate_posterior_v1", "generate_tree_buffers",
        "generate_tree_buffers (draft model)", "topK_genrate", "update_inference_inputs", "topK_genrate (EAGLE-3)",
        "topK_genrate (EAGLE-2)"}
    assert len(printed) == len(rows) + 4  # a name and a head for each checkout


@pytest.mark.parametrize("after", [
    "return answer[0], max(answer[1] - 1, 0), answer[2]", "return answer[0], answer[1], answer[2].roll(1)",
    "return answer if random.random() else answer"])
def test_different_functions(tmp_path, capsys, after):
    """A shorter path, another token, one random number more."""
    lantern, _ = checkouts(tmp_path, after)
    assert check_compat.main(["--lantern", str(lantern), *SMALL]) == 1


def test_the_draw_must_be_where_the_number_falls():
    probs = torch.tensor([0.25, 0.0, 0.5, 0.25])
    assert [check_compat.is_their_draw(probs, token, 0.5) for token in range(4)] == [False, False, True, False]
    assert all(check_compat.is_their_draw(probs, token, 0.25) for token in (0, 2))  # on the border either is right
    assert not check_compat.is_their_draw(probs, 3, 0.7499) and not check_compat.is_their_draw(probs, 0, 0.2501)


def test_random_trees():
    random.seed(0), torch.manual_seed(0)
    for nodes in (16, 59):
        parents = compat_cases.random_tree(nodes)
        assert parents[0] == -1 and all(0 <= parent < node for node, parent in enumerate(parents[1:], 1))
        assert parents[1:] == sorted(parents[1:]) and nodes - 6 <= len(parents) <= nodes
        case = compat_cases.dynamic_case(128, nodes, slice(4, 68))
        assert ((case.tokens[0, 1:] >= 4) & (case.tokens[0, 1:] < 68)).all()
    table = compat_cases.ring_of_neighbors(10, 9)
    assert all(set(row) == set(range(10)) - {code} for code, row in enumerate(table.tolist()))


@pytest.mark.parametrize("arguments, message", [
    (["--lantern", "{}/nothing"], r"error: .*nothing is no such checkout: models/ea_model_llamagen.py is not there\n"),
    (["--eagle", "{}/LANTERN"], r"error: .*LANTERN is no such checkout: eagle/model/utils.py is not there\n"),
    (["--eagle", "{}/EAGLE"], r"error: .*EAGLE is no such checkout: eagle/model/cnets.py has no Model.topK_genrate\n"),
])
def test_a_folder_that_is_no_checkout(tmp_path, capsys, arguments, message):
    checkouts(tmp_path)
    (tmp_path / "EAGLE/eagle/model/cnets.py").write_text("class Model:\n    pass\n")
    assert check_compat.main([argument.format(tmp_path) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert re.search(message, captured.err) and captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize("arguments, message", [
    ([], "name a checkout, with --lantern, --eagle or --vllm, --sglang"),
    (["--eagle", ".", "--cases", "0"], "cases, repeats, threads and k must be at least 1, nodes 16, vocab 64 and 2 k"),
    (["--eagle", ".", "--vocab", "100"], "vocab 64 and 2 k"),
])
def test_wrong_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        check_compat.main(arguments)
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_the_help_says_whose_code_runs(capsys):
    with pytest.raises(SystemExit):
        check_compat.main(["--help"])
    assert "The code of a checkout of LANTERN or EAGLE is executed: name one that you trust." in capsys.readouterr().out
