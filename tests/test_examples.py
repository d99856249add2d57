"""The programs in examples/ run as they stand, and what they print is true."""
import ast
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

import specvis_kernels
from specvis import jacobi_decode, method, speculative_decode
from specvis.decoding.draft_model import SmallDraftModel
from specvis.decoding.sampling import cfg_inputs
from specvis.models.interface import ModelCache, TargetModel
from specvis_kernels.compat import lantern
from tests.decoding.pictures import chi_square

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
    assert names == {"one_op", "own_loop", "own_model", "lantern", "transformers_model", "grpo"}
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


@pytest.mark.parametrize("window, temperature", [(8, 1), (20, 1), (8, 0)])
def test_own_loop(run, window, temperature):
    names, printed = run("own_loop", "--window", window, "--temperature", temperature)
    images, (one_by_one, jacobi, tree, chain) = names["images"], names["target_forwards"]
    assert images[0].shape == (3, 64) and len(images[0].unique()) > 20 and not torch.equal(images[0][0], images[0][1])
    num_equal = sum(torch.equal(image, images[0]) for image in images)
    assert num_equal == printed.count("the same pictures: yes") == (3 if temperature else 4)
    assert jacobi < (40 if window == 20 else 50 if temperature else 56) and tree < 60 and chain < 40
    assert one_by_one == 64


def test_the_chain_of_own_loop_has_the_targets_distribution(run):
    """Three tokens of 4096 pictures of one class; the first is drawn without a draft."""
    names, _ = run("own_loop")
    ids = torch.arange(64)
    prefixes = torch.cartesian_prod(ids, ids)
    B = len(prefixes)
    names["chain"].__globals__.update(B=B, LENGTH=4, classes=torch.full((B,), 3), seeds=torch.arange(B))
    drawn = names["chain"]()[0][:, :3]
    reader, columns = names["Reader"](names["model"], 3), torch.tensor([[1, 2]]).repeat(B, 1)
    reader.first_tokens()
    logits = reader.read(prefixes, columns, columns, torch.ones(3, 3).tril().bool()[1:].repeat(B, 1, 1))
    second, third = specvis_kernels.guided_probs(*logits, **names["SETTINGS"]).probs.double().unbind(1)
    first = drawn[:, 0].bincount(minlength=64)[prefixes[:, :1]] / B
    assert chi_square(drawn, (first * second.gather(1, prefixes[:, 1:]) * third).flatten(), 64) < 4


@pytest.mark.parametrize("method", ["eagle2:draft_model=small:depth=3:width=4:nodes=12",
                                    "speculative:draft_model=small:seed_exact=true", "jacobi:window=8",
                                    "jacobi:window=8:refresh=2", "vanilla"])
def test_own_model(run, method):
    names, printed = run("own_model", "--method", method)
    assert isinstance(names["target"], TargetModel)
    assert torch.equal(names["decoded"].tokens, names["baseline"].tokens) and "100% of the tokens" in printed
    assert names["decoded"].tau.mean() > (1.3 if method != "vanilla" else 0.9) and not names["decoded"].failed.any()


def test_grpo(run, tmp_path):
    """The decoder's log-probabilities are the trainer's, and both methods train the same model."""
    curves = []
    for name in ("jacobi:window=8", "vanilla"):
        names, printed = run("grpo", "--updates", 2, "--group", 2, "--method", name, "--out", "red")
        curves.append(json.loads((tmp_path / "red.json").read_text())["curve"])
        assert printed.count("reward") == 2 and all(point["mismatch"] < 1e-3 for point in curves[-1])
    jacobi, plain = curves
    for ours, theirs in zip(jacobi, plain):
        assert ours["checksum"] == theirs["checksum"] and ours["reward"] == theirs["reward"]
    assert jacobi[0]["tokens_per_forward"] > 1.5 and plain[0]["tokens_per_forward"] == 1
    assert jacobi[0]["checksum"] != jacobi[1]["checksum"]


@pytest.mark.parametrize("method, temperature", [("jacobi:window=16", 1), ("jacobi:window=5", 0.7),
                                                 ("jacobi:window=16", 0)])
def test_transformers_model(run, method, temperature):
    names, printed = run("transformers_model", "--method", method, "--temperature", temperature)
    target, decoded, baseline = names["target"], names["decoded"], names["baseline"]
    assert isinstance(target, TargetModel) and isinstance(target.new_cache(2, 8), ModelCache)
    assert torch.equal(decoded.tokens, baseline.tokens) and "100% of the tokens" in printed
    rows = target.ids_of(decoded.tokens).view(3, 6, 9)
    assert (rows[..., 8] == 96).all() and 32 <= rows[..., :8].min() and 64 < rows[..., :8].max() < 96  # no id of text
    assert str(rows[0, 0].tolist()) in printed
    assert decoded.tau.mean() > (1.3 if temperature else 1.05) and not decoded.failed.any()
    again = jacobi_decode(target, names["condition"], names["is_real"], names["sampling"][[2, 2, 2]],
                          [names["method"]] * 3)
    assert temperature == 0 or not torch.equal(again.tokens, baseline.tokens)  # another seed, other tokens

    # what is known of transformers itself: the whole image in one forward, without a cache
    is_newline, settings = torch.arange(54) % 9 == 8, names["sampling"]
    ids_of_rows = torch.where(is_newline[None, :, None], torch.tensor([64, 65]), torch.tensor([0, 64]))
    for i, (prompt, ids) in enumerate(zip(names["prompts"], rows.flatten(1))):
        logits, uncond = (names["model"](torch.tensor([[*before, *ids]])).logits[:, len(before) - 1:-1, 32:]
                          for before in (prompt, [0]))
        drawn = specvis_kernels.draw_tokens(
            logits, uncond, settings.guidance[i:i + 1], settings.temperature[i:i + 1], settings.top_k[i:i + 1],
            settings.top_p[i:i + 1], settings.seeds[i:i + 1], torch.arange(54)[None], id_range=ids_of_rows).tokens[0]
        assert torch.equal(drawn, ids - 32)


def test_transformers_model_in_a_tree(run):
    """The cache of the example commits the path of a draft tree."""
    names, _ = run("transformers_model")
    target, condition, is_real = names["target"], names["condition"], names["is_real"]
    draft_model = SmallDraftModel(target, *cfg_inputs(target, condition, is_real))
    decoded = speculative_decode(target, draft_model, condition, is_real, names["sampling"],
                                 [method("eagle2", draft_model="small", depth=3, width=4, nodes=12)] * 3)
    assert torch.equal(decoded.tokens, names["baseline"].tokens) and decoded.tau.mean() > 1.3


@pytest.mark.parametrize("temperature, delta", [(1, 0.1), (0, 0.1), (0, 0)])
def test_lantern(run, temperature, delta):
    names, printed = run("lantern", "--tokens", 48, "--temperature", temperature, "--delta", delta)
    (_, theirs), (_, ours) = names["runs"].items()
    assert theirs.tokens.shape == ours.tokens.shape == (1, 48) and theirs.tau > 1.5 and ours.tau > 1.5
    assert printed.count("tokens per target forward") == 2
    if temperature == 0:  # no token is drawn
        assert torch.equal(theirs.tokens, ours.tokens) and theirs.tau == ours.tau and "100% of the tokens" in printed
    assert names["EaModel"].__dict__["evaluate_posterior"].__module__ == "__main__"  # the patch is undone


def test_lantern_drafts_the_tree_of_the_example(run):
    """topK_genrate of compat and the example's own in plain torch."""
    names, _ = run("lantern", "--tokens", 1)
    layer, target = names["model"].ea_layer, names["model"].base_model
    no_filter, top_k = names["Processors"](), names["Processors"]([names["TopKLogitsWarper"](20)])
    for seed, processors in enumerate([no_filter, top_k, None]):
        torch.manual_seed(seed)
        hidden, ids = torch.randn(2, 3, 32), torch.randint(4096, (1, 4)).repeat(2, 1)
        trees = []
        for draft in (type(layer).topK_genrate, lantern.topK_genrate):
            layer.stable_kv = None
            trees.append(draft(layer, hidden, ids, target.lm_head, processors, 3.0))
        (tokens, paths, mask, depth), (our_tokens, our_paths, our_mask, our_depth) = trees
        assert torch.equal(tokens, our_tokens) and torch.equal(mask, our_mask) and torch.equal(depth, our_depth)
        assert torch.equal(paths, our_paths[:len(paths), :paths.shape[1]]) and (our_paths[len(paths):] == -1).all()
