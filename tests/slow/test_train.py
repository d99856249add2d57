"""All stages of training, one after the other; a step that is compiled."""
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specvis.pipelines.mar import MARPair
from tests.training.test_run import pictures, run
from training.run import compiling


def test_stages_follow_each_other(tmp_path):
    pictures(tmp_path / "data")
    small = ["--dim", 32, "--layers", 1, "--heads", 2]
    for stage, more in (("tokenizer", ["--batch", 2]), ("gpt", ["--batch", 2, *small, "--no-compile"]),
                        ("eagle", ["--batch", 2, "--no-compile"])):
        run(stage, "--runs", tmp_path, "--steps", 3, "--device", "cpu", *more, status=0)
    tokens = np.load(tmp_path / "tokens.npz")
    shutil.copytree(tmp_path / "tokenizer", tmp_path / "kept")
    (tmp_path / "kept" / "config.json").rename(tmp_path / "kept" / "tokenizer.json")
    result = run("tokenizer", "--runs", tmp_path, "--keep", tmp_path / "kept", "--device", "cpu")
    assert result.exit_code == 0 and "held-out names: PSNR" in result.output
    assert np.array_equal(np.load(tmp_path / "tokens.npz")["tokens"], tokens["tokens"])
    mar = ["--dim", 32, "--layers", 1, "--heads", 2, "--width", 16, "--blocks", 1, "--batch", 2, "--no-compile"]
    for stage in ("mar", "mar-draft"):
        result = run(stage, "--runs", tmp_path, "--steps", 100, "--device", "cpu", *mar, status=0)
    log = (tmp_path / "mar_draft" / "log.jsonl").read_text().splitlines()
    assert f"held-out names: noise {json.loads(log[-1])['held-out names, noise']:.4f}" in result.output
    goes_on_from(tmp_path, mar)
    run("export", "--only", "mar", "--runs", tmp_path, "--weights", tmp_path / "weights", status=0)
    for source, name in (("tokenizer/tokenizer.safetensors", "tokenizer.safetensors"),
                         ("tokenizer/config.json", "tokenizer.json"), ("gpt/words.safetensors", "words.safetensors")):
        shutil.copyfile(tmp_path / source, tmp_path / "weights" / name)
    words = json.loads((tmp_path / "data" / "vocabulary.json").read_text())
    (tmp_path / "weights" / "vocabulary.json").write_text(json.dumps({"words": words}))
    pair, arrays = MARPair.load(tmp_path / "weights"), np.load(tmp_path / "latents.npz")
    assert pair.mar.config.tokens == 256 and pair.features(["fluent-3d red heart"]).shape == (1, 16, 32)
    scaled = torch.from_numpy(arrays["tokens"]).float()
    assert torch.allclose(pair.scaling.latents(scaled).norm(dim=-1), torch.ones(24, 256), atol=0.01)

    assert tokens["tokens"].shape == (24, 256) and tokens["tokens"].max() < 4096
    for part, made in {"tokenizer": "tokenizer", "gpt": "gpt", "words": "gpt", "eagle": "eagle"}.items():
        assert (tmp_path / made / f"{part}.safetensors").exists()


def goes_on_from(runs, options):
    """`mar --from` begins with the weights of a file, and says what else cannot be one."""
    source, whole = runs / "mar" / "mar.safetensors", ["mar", "--steps", 1, "--lr", 1e-9, *options, "--from"]
    assert "was trained with another --from: choose another" in run(*whole, source, "--runs", runs, status=2).output
    (runs / "mar").rename(runs / "first")
    source = runs / "first" / "mar.safetensors"
    for wrong, message in ((runs, "from must be a file with the weights of a MAR"),
                           (runs / "first" / "config.json", "from must be a MAR of this --dim, --layers, --heads")):
        assert message in run(*whole, wrong, "--runs", runs, status=2).output
    for _ in range(2):  # the second time it is finished, and writes its files again
        run(*whole, source, "--runs", runs, status=0)
        before, after = load_file(source), load_file(runs / "mar" / "mar.safetensors")
        assert all(torch.allclose(before[name], after[name], atol=1e-3) for name in before)
    shutil.rmtree(runs / "mar")
    (runs / "first").rename(runs / "mar")


def test_a_step_is_compiled_or_says_why_not(tmp_path, monkeypatch):
    def square(x):
        return (x * x).sum()

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert compiling(square, False) is square
    x = torch.arange(5.0, requires_grad=True)
    compiling(square, True)(x).backward()
    assert torch.equal(x.grad, 2 * x)
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("/no/compiler",))
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="compile must be off, --no-compile, where torch.compile fails: "):
        compiling(lambda x: (x + 1).exp().sum(), True)(x)
