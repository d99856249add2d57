"""An EAGLE head for one of transformers' families, in tiny sizes: it learns from what the target draws."""
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from specvis import speculative_decode
from specvis.decoding.draft_model import EagleDraftModel
from specvis.decoding.sampling import cfg_inputs
from specvis.models.transformers_eagle import TransformersEagleHead
from specvis.pipelines.families import FamilyPipeline
from tests.families import saved
from training.family import SHARD, FamilyImages
from training.main import main

PROMPTS = [f"a {'red ' * (i % 4)}heart {i}" for i in range(2 * SHARD + 3)]


def train(*arguments):
    arguments = ("eagle", "--device", "cpu", "--no-compile", "--batch", 4, "--family", "lumina-mgpt", *arguments)
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    return saved("lumina-mgpt", folder / "lumina")


def accepted(pipeline, head):
    """Tokens a forward, of pictures of known prompts that the head has not seen."""
    inputs, target = pipeline.condition(PROMPTS), pipeline.gpt
    decoded = speculative_decode(target, EagleDraftModel(target, head, *cfg_inputs(target, *inputs)), *inputs,
                                 pipeline.sampling(list(range(90, 90 + len(PROMPTS)))), "speculative")
    return decoded.tau.mean().item()


def test_a_trained_head_is_accepted_more_often(target, tmp_path):
    runs, prompts = tmp_path / "runs", target.parent / "prompts.txt"
    arguments = ("--target", target, "--prompts", prompts, "--image-size", 64, "--runs", runs)
    result = train(*arguments, "--steps", 200)
    assert result.exit_code == 0 and f"draw: {len(PROMPTS)} of {len(PROMPTS)} pictures" in result.output, result.output
    draft = runs / "eagle-lumina" / "draft"
    assert f"--draft {draft} --method eagle2" in result.output
    pipeline = FamilyPipeline.load(target, "lumina-mgpt", image_size=64, draft=draft)
    torch.manual_seed(0)
    untrained = TransformersEagleHead(pipeline.gpt)
    assert accepted(pipeline, pipeline.eagle) > 1.15 * accepted(pipeline, untrained)
    assert "out must be a folder without model.safetensors" in train(*arguments, "--steps", 210).output
    shards = sorted((runs / "eagle-lumina" / "draws").glob("*/*"))
    before = [path.read_bytes() for path in shards]
    shards[1].unlink()  # as after an interruption
    assert "draw: 16 of 19 pictures" in train(*arguments, "--steps", 210, "--replace").output
    assert [path.read_bytes() for path in shards] == before


def test_what_it_learns_from_is_what_decoding_reads(target, tmp_path):
    pipeline = FamilyPipeline.load(target, "lumina-mgpt", image_size=64)
    examples = FamilyImages(pipeline, target, target.parent / "prompts.txt", tmp_path, 4)
    condition, mask, ids, hidden = examples.take(torch.tensor([0, 9]))
    whole = pipeline.gpt
    torch.testing.assert_close(hidden, whole.teacher_forced(condition, mask, ids), atol=1e-5, rtol=1e-4)
    tokens = pipeline.tokens([PROMPTS[0], PROMPTS[9]], "vanilla", pipeline.sampling([0, 9])).tokens
    assert torch.equal(ids, tokens) and whole.prefix_len < 30
    rows = torch.tensor([0, 8])
    null, null_mask, ids, hidden = examples.take(rows, torch.tensor([True, True]))
    expected = whole.null_inputs(examples.padding_masks[rows])
    assert torch.equal(null, expected[0]) and torch.equal(null_mask, expected[1])
    torch.testing.assert_close(hidden, whole.teacher_forced(null, null_mask, ids), atol=1e-5, rtol=1e-4)
    masks = [examples.draw(8, torch.Generator().manual_seed(seed))[1] for seed in range(20)]
    share = torch.cat([(mask == expected[1][0]).all(1) for mask in masks]).float().mean()
    assert 0.03 < share < 0.25 and len(examples.test) >= 1
    assert not set(examples.test.tolist()) & set(examples.train.tolist())
    assert {"ids", "hidden", "null_hidden"} == set(load_file(examples.shards[0]))
    (tmp_path / "others.txt").write_text("\n".join(prompt.replace("heart", "zebra") for prompt in PROMPTS))
    pipeline = FamilyPipeline.load(target, "lumina-mgpt", image_size=64)
    others = FamilyImages(pipeline, target, tmp_path / "others.txt", tmp_path, 4)  # in the same run's folder
    condition, mask, ids, hidden = others.take(torch.tensor([0, 9]))
    torch.testing.assert_close(hidden, pipeline.gpt.teacher_forced(condition, mask, ids), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("given, message", [
    (["--prompts", "p"], "family and prompts must be given together"),
    (["--family", "emu3"], "family and prompts must be given together"),
    (["--family", "emu3", "--prompts", "p", "--images", "i"], "must not be given with --family"),
    (["--image-size", 64, "--images", "i"], "image_size must not be given without --family"),
    (["--family", "anole", "--prompts", "p", "--out", "."], "out must be .* never the target's")])
def test_what_is_refused(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["eagle", "--target", ".", *map(str, given)])
    with pytest.raises(ValueError, match=message):
        raise result.exception if isinstance(result.exception, ValueError) else ValueError(result.output)
