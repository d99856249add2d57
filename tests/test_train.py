"""The training stages: each runs on what the one before made, and an interrupted run ends as an unbroken one."""
import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from specvis.pipeline import Pipeline
from specvis.train.__main__ import main
from specvis.train.data import hold_out, spelled_out, words_of
from specvis.train.run import Run


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def pictures(folder, count=24):
    """Random blots in the form that the data stage writes."""
    generator = np.random.default_rng(0)
    folder.mkdir(parents=True)
    blots = np.full((count, 64, 64, 3), 255, np.uint8)
    blots[:, 16:48, 16:48] = generator.integers(0, 255, (count, 4, 4, 3), np.uint8).repeat(8, 1).repeat(8, 2)
    captions = np.zeros((count, 10), np.int16)
    captions[:, -2:] = generator.integers(1, 4, (count, 2))
    np.savez(folder / "pictures.npz", pictures=blots, captions=captions, weights=np.ones(count),
             held_out=np.arange(count) % 4 == 0,
             **{name: np.array(["a"] * count) for name in ("styles", "names", "categories")})
    (folder / "vocabulary.json").write_text(json.dumps(["", "fluent-3d", "red", "heart"]))


def test_stages_follow_each_other(tmp_path):
    pictures(tmp_path / "data")
    small = ["--dim", 32, "--layers", 1, "--heads", 2]
    for stage, more in (("tokenizer", ["--batch", 2]), ("gpt", ["--batch", 2, *small, "--no-compile"]),
                        ("drafter", ["--batch", 2, "--no-compile"])):
        result = run(stage, "--runs", tmp_path, "--steps", 3, "--device", "cpu", *more)
        assert result.exit_code == 0, result.output
    tokens = np.load(tmp_path / "tokens.npz")
    assert tokens["tokens"].shape == (24, 256) and tokens["tokens"].max() < 4096
    for part, made in {"tokenizer": "tokenizer", "gpt": "gpt", "words": "gpt", "drafter": "drafter"}.items():
        assert (tmp_path / made / f"{part}.safetensors").exists()


@pytest.mark.parametrize("arguments, message", [
    (["tokenizer", "--steps", "1"], "pictures.npz is missing: run `python -m specvis.train data`"),
    (["gpt", "--steps", "1"], "tokens.npz is missing: run `python -m specvis.train tokenizer`"),
    (["ship"], "drafter.safetensors is missing: run `python -m specvis.train drafter`"),
    (["paint"], "No such command 'paint'"),
])
def test_what_is_missing_is_named(tmp_path, arguments, message):
    result = CliRunner().invoke(main, [*arguments, *(["--runs", str(tmp_path)] if arguments != ["paint"] else [])])
    assert result.exit_code == 2 and message in result.output


def test_a_run_has_one_length(tmp_path):
    with pytest.raises(ValueError, match="set exactly one of minutes and steps, got minutes=None, steps=None"):
        Run(tmp_path, nn.Linear(1, 1), lr=0.1, weight_decay=0, minutes=None, steps=None)


def test_an_interrupted_run_ends_as_an_unbroken_one(tmp_path):
    def train(folder, until):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        trained = Run(folder, model, lr=0.1, weight_decay=0.1, minutes=None, steps=6)
        for step in trained:
            if step == until:
                break
            trained.descend(model(torch.rand(8, 4, generator=trained.generator(step))).square().mean())
            trained.log(loss=step)
            if step + 1 == until:
                trained.step += 1          # as the loop would count it before saving
                trained.save()
                trained.step -= 1
        return model, [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]

    whole, whole_log = train(tmp_path / "whole", None)
    train(tmp_path / "broken", 3)
    again, log = train(tmp_path / "broken", None)
    assert torch.equal(whole.weight, again.weight) and log == whole_log == list(range(6))


def test_a_name_becomes_words_with_one_for_a_skin_tone():
    assert words_of("waving-hand-medium-dark-skin-tone") == ["waving", "hand", "skin-medium-dark"]
    assert words_of(spelled_out("man-pilot-dark", "People & Body")) == ["man", "pilot", "skin-dark"]
    assert words_of(spelled_out("hat-dark", "Objects")) == ["hat", "dark"]


def test_a_held_out_name_is_held_out_in_every_spelling():
    names = [f"name-{i}" for i in range(400)] + ["pilot-man", "man-pilot"]
    words = [name.split("-") for name in names]
    words = [["thing", str(int(w[1]) % 20)] if w[0] == "name" else w for w in words]
    held_out = hold_out(names, words)
    groups = {}
    for w, out in zip(words, held_out):
        groups.setdefault(frozenset(w), set()).add(bool(out))
    assert all(len(states) == 1 for states in groups.values())


def test_the_shipped_weights_are_small_enough_to_ship():
    from specvis.pipeline import SHIPPED
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) <= 25e6
    assert Pipeline.load().gpt.config.tokens == 256
