"""An EAGLE head for any target: from a folder of pictures to a folder that decodes by it."""
import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file

from specvis.decoding.sampling import Sampling
from specvis.models.vq import VQ
from specvis.pipelines.discrete import Pipeline
from tests.pipelines.test_prompts import t5_folder
from tests.tiny import tiny_pipeline, vq_config
from training.eagle import REJECTED, Images, distance, drafted
from training.images import FolderImages, classes_of, square
from training.main import main
from training.run import TrainingRun

CAPTIONS = ["red heart", "blue heart", "plain"]


def train(*arguments):
    arguments = ("eagle", "--device", "cpu", "--no-compile", "--batch", 4, *arguments)
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def target(tmp_path):
    pipeline = tiny_pipeline()
    pipeline.small = pipeline.eagle = None
    pipeline.save(tmp_path / "target")
    return tmp_path / "target"


def paint(path, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    colors = np.random.default_rng(seed).integers(0, 255, (3, 4, 3), np.uint8)
    Image.fromarray(colors).resize((20, 12)).save(path)


@pytest.fixture
def images(tmp_path):
    """Eleven pictures with captions, one in a folder of its own, and one that is broken."""
    folder = tmp_path / "images"
    for i in range(11):
        path = folder / ("more/10.jpg" if i == 10 else f"{i}.png")
        paint(path, i)
        path.with_suffix(".txt").write_text(CAPTIONS[i % 3] + "\n")
    (folder / "11.png").write_bytes(b"no picture")
    (folder / "11.txt").write_text("plain")
    return folder


def test_a_target_gets_a_draft_model_that_it_decodes_by(target, images, tmp_path):
    arguments = ("--target", target, "--images", images, "--runs", tmp_path / "runs")
    result = train(*arguments, "--steps", 100, "--lr", 0.01)
    assert result.exit_code == 0, result.output
    assert "1 of 12 pictures cannot be read and are left out: 11.png\n" in result.output
    run = tmp_path / "runs" / "eagle-target"
    log, at_the_end = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    assert log["step"] == 99 and 0 < log["acceptance"] < 1
    assert at_the_end["step"] == 100 and f"acceptance {at_the_end['acceptance']:.3f}" in result.output
    trained, untrained = load_file(target / "eagle.safetensors"), tiny_pipeline().eagle.state_dict()
    assert {name: value.shape for name, value in trained.items()} == {n: v.shape for n, v in untrained.items()}
    pipeline = Pipeline.load(target)
    assert torch.equal(trained["embed_tokens.weight"], pipeline.gpt.tok_embeddings.weight.half())
    decoded = pipeline.tokens(CAPTIONS, "eagle2", Sampling.of([0, 1, 2], guidance=1.2))
    baseline = pipeline.tokens(CAPTIONS, "vanilla", Sampling.of([0, 1, 2], guidance=1.2))
    assert torch.equal(decoded.tokens, baseline.tokens)

    result = train(*arguments, "--steps", 100)
    assert result.exit_code == 2 and "out must be a folder without eagle.safetensors, or --replace" in result.output
    before = (target / "eagle.safetensors").read_bytes()
    result = train(*arguments, "--lr", 0.01, "--steps", 101, "--replace")
    assert result.exit_code == 0 and (target / "eagle.safetensors").read_bytes() != before
    shutil.copyfile(target / "gpt.safetensors", tmp_path / "gpt")
    content = (target / "gpt.safetensors").read_bytes()
    (target / "gpt.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    result = train(*arguments, "--lr", 0.01, "--steps", 102, "--replace")
    assert result.exit_code == 2 and "runs must be a folder without a run for another target" in result.output


def test_training_brings_drafts_nearer_to_the_target(target, images, tmp_path):
    """The held-out acceptance that the command prints, after few steps and after more."""
    acceptance = []
    for steps in (1, 150):
        result = train("--target", target, "--images", images, "--runs", tmp_path / str(steps), "--out",
                       tmp_path / f"out{steps}", "--steps", steps, "--lr", 0.01)
        assert result.exit_code == 0, result.output
        acceptance.append(float(result.output.partition("acceptance ")[2].split()[0]))
    assert acceptance[1] > acceptance[0] + 0.1


def test_the_loss_counts_the_drafts_that_are_rejected():
    target, draft = torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]), torch.tensor([[0.25, 0.25, 0.5]] * 2)
    rejected = 1 - torch.minimum(target, draft).sum(-1)  # by speculative sampling
    wanted = (-(target * draft.log()).sum(-1) + REJECTED * rejected).mean()
    assert distance(draft.log() + 3, target.log() - 1).item() == pytest.approx(wanted.item(), rel=1e-5)
    assert rejected.tolist() == pytest.approx([0.25, 1 / 6])


def test_an_interrupted_run_ends_as_an_unbroken_one(target, images, tmp_path, monkeypatch):
    arguments, original = ("--target", target, "--images", images, "--steps", 6), TrainingRun.descend
    assert train(*arguments, "--runs", tmp_path / "whole", "--out", tmp_path / "whole").exit_code == 0

    def stop(self, loss):
        if self.step == 3:
            self.save()
            raise KeyboardInterrupt
        original(self, loss)

    monkeypatch.setattr(TrainingRun, "descend", stop)
    assert train(*arguments, "--runs", tmp_path / "runs").exit_code == 130
    assert not (target / "eagle.safetensors").exists()
    monkeypatch.undo()
    monkeypatch.setattr(VQ, "encode", lambda *arguments: pytest.fail("the pictures were encoded before"))
    result = train(*arguments, "--runs", tmp_path / "runs")
    assert result.exit_code == 0, result.output
    whole, again = (load_file(folder / "eagle.safetensors") for folder in (tmp_path / "whole", target))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_run_of_other_settings_is_not_gone_on_with(target, images, tmp_path):
    """Each setting that the head depends on; a longer run and new pictures in the same folder go on."""
    runs, other = ("--target", target, "--runs", tmp_path / "runs"), tmp_path / "other"
    shutil.copytree(images, other)
    result = train(*runs, "--images", images, "--steps", 2, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert f"/out/eagle.safetensors: to draw with it, copy it into {target}, the folder of its" in result.output
    for arguments, message in (
            (("--images", other, "--noise", 0),
             f"images was {images}, now it is {other}, noise was 0.2, now it is 0.0; choose another --runs"),
            (("--images", images, "--lr", 0.5), "eagle-target lr was 0.0015, now it is 0.5; choose another --runs"),
            (("--images", images, "--batch", 5), "eagle-target batch was 4, now it is 5; choose another --runs")):
        result = train(*runs, *arguments, "--steps", 2, "--out", tmp_path / "out2")
        assert result.exit_code == 2 and message in result.output and "Traceback" not in result.output, result.output
    assert not (tmp_path / "out2").exists()
    paint(images / "20.png", 20)
    (images / "20.txt").write_text("plain")
    result = train(*runs, "--images", images, "--steps", 3)
    assert result.exit_code == 0, result.output
    assert f"eagle.safetensors: specvis generate --model {target} --method eagle2 --prompt ..\n" in result.output


def test_a_run_without_a_step_may_change_its_settings(target, images, tmp_path):
    pipeline = Pipeline.load(target)
    for batch in (4, 2):
        FolderImages(pipeline, target, images, tmp_path / "run", batch, noise=batch)
    assert json.loads((tmp_path / "run" / "target.json").read_text())["noise"] == 2


def test_pictures_are_encoded_once_and_again_where_they_changed(target, images, tmp_path, monkeypatch, capsys):
    pipeline, encoded, original = Pipeline.load(target), [], VQ.encode
    monkeypatch.setattr(VQ, "encode", lambda self, x: (encoded.append(len(x)), original(self, x))[1])
    first = FolderImages(pipeline, target, images, tmp_path / "run", 4)
    assert encoded == [3, 4, 4] and first.ids.shape == (11, 16)
    assert sorted([*first.train.tolist(), *first.test.tolist()]) == list(range(11)) and len(first.test) >= 1
    paint(images / "3.png", 99)
    paint(images / "12.png", 12)
    (images / "12.txt").write_text("plain")
    second = FolderImages(pipeline, target, images, tmp_path / "run", 4)
    assert encoded[3:] == [2] and second.ids.shape == (12, 16)
    same = [i for i, name in enumerate(sorted(["10", "12", *map(str, range(10))], key=lambda n: (n == "10", n)))
            if name not in ("3", "12")]
    assert torch.equal(second.ids[same], first.ids[[i for i in range(11) if i != 3]])
    pixels = torch.from_numpy(square(images / "3.png", 8).copy()).permute(2, 0, 1)[None]
    alone = original(pipeline.tokenizer, pixels / 127.5 - 1)
    assert torch.equal(second.ids[4], alone[0])
    third = FolderImages(pipeline, target, images, tmp_path / "run", 4)
    assert encoded[4:] == [] and torch.equal(third.ids, second.ids)
    chunks = sorted((tmp_path / "run" / "tokens").iterdir())
    chunks[1].write_bytes(b"PK\3\4aaaaaaaa")
    fourth = FolderImages(pipeline, target, images, tmp_path / "run", 4)
    assert encoded[4:] == [2] and torch.equal(fourth.ids, second.ids)
    said = capsys.readouterr().err
    assert "00001.npz cannot be read: " in said and "; its pictures are encoded again" in said


@pytest.mark.parametrize("note", ["{}", "[]", "[", "[" * 100_000])
def test_a_hurt_note_of_a_run_is_named(note, target, images, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "target.json").write_text(note)
    with pytest.raises(ValueError, match="target.json cannot be read: .*; choose another --runs"):
        FolderImages(Pipeline.load(target), target, images, tmp_path / "run", 4)


def test_a_draft_is_compared_with_the_hidden_state_at_its_own_token(target, images, tmp_path):
    pipeline = Pipeline.load(target)
    examples = FolderImages(pipeline, target, images, tmp_path / "run", 4)
    drawn = Images(*examples.take(torch.arange(3)))
    states = drafted(tiny_pipeline().eagle, examples, drawn)
    assert states[0].shape == states[1].shape == (3, 15, 32)
    assert torch.equal(states[1], pipeline.gpt.teacher_forced(*drawn[:3])[:, 3:])  # after the three of the condition


def test_draws_are_conditioned_as_decoding_is(target, images, tmp_path):
    pipeline = Pipeline.load(target)
    examples = FolderImages(pipeline, target, images, tmp_path / "run", 4)
    condition, padding_mask, ids = examples.draw(400, torch.Generator().manual_seed(0))
    null = (condition - pipeline.gpt.null_condition(1)).abs().amax((1, 2)) < 1e-5
    assert 20 < null.sum() < 65
    of_ids = {tuple(row): i for i, row in enumerate(examples.ids.tolist())}
    rows = [of_ids[tuple(row)] for row in ids.tolist()]
    assert set(rows) == set(examples.train.tolist())
    expected, _ = pipeline.condition([examples.prompts[row] for row in rows])
    assert torch.allclose(condition[~null], expected[~null])
    assert torch.equal(examples.take(examples.test)[2], examples.ids[examples.test])


def test_a_class_conditional_target_learns_from_a_folder_of_each_class(tmp_path):
    config = dataclasses.replace(tiny_pipeline().gpt.config, condition_tokens=1, classes=5, caption_dim=None)
    Pipeline(config, vq_config(4), has_eagle=False).save(tmp_path / "target")
    for i in range(6):
        paint(tmp_path / "images" / f"{i % 3 + 2:03}" / f"{i}.png", i)
    arguments = ("--target", tmp_path / "target", "--images", tmp_path / "images", "--runs", tmp_path / "runs")
    result = train(*arguments, "--steps", 2)
    assert result.exit_code == 0, result.output
    pipeline = Pipeline.load(tmp_path / "target")
    assert FolderImages(pipeline, tmp_path / "target", tmp_path / "images", tmp_path / "run", 4).prompts == [
        "2", "2", "3", "3", "4", "4"]
    assert pipeline.tokens(["3"], "eagle2", Sampling.of([0])).tokens.shape == (1, 16)
    paint(tmp_path / "images" / "5" / "6.png", 6)
    result = train(*arguments, "--steps", 2, "--replace")
    assert result.exit_code == 2 and "5/6.png: a prompt of this model must be the number of a class" in result.output
    shutil.rmtree(tmp_path / "images" / "5")
    paint(tmp_path / "images" / "cat" / "6.png", 6)
    result = train(*arguments, "--steps", 2, "--replace")
    assert "images must be in folders that are numbers of classes; 1 of 7 do not: cat/6.png\n" in result.output


def test_a_target_of_captions_learns_by_its_text_encoder(images, tmp_path):
    config = dataclasses.replace(tiny_pipeline().gpt.config, condition_tokens=5)
    Pipeline(config, vq_config(4), has_eagle=False).save(tmp_path / "target")
    arguments = ("--target", tmp_path / "target", "--images", images, "--runs", tmp_path / "runs", "--steps", 2)
    result = train(*arguments)
    assert result.exit_code == 2 and "text_encoder must be a folder with FLAN-T5-XL" in result.output
    result = train(*arguments, "--text-encoder", t5_folder(tmp_path / "t5"))
    assert result.exit_code == 0 and "held out: top1 " in result.output, result.output
    (tmp_path / "t5" / "config.json").write_text((tmp_path / "t5" / "config.json").read_text() + "\n")
    result = train(*arguments, "--text-encoder", tmp_path / "t5", "--replace")
    assert result.exit_code == 2 and "eagle-target text_encoder was " in result.output
    assert Pipeline.load(tmp_path / "target").eagle is not None


def test_as_many_folders_as_classes_are_counted_in_their_order():
    names = ["n02/a.png", "n01/b.png", "n01/c.png", "d.png"]
    assert classes_of(None, names, 2) == {"n02/a.png": "1", "n01/b.png": "0", "n01/c.png": "0"}
    assert classes_of(None, names, 3) == {}


@pytest.mark.parametrize("table, text", [
    ("metadata.jsonl", '{"file_name": "a.png", "text": "red heart"}\n\n{"file_name": "b/c.png", "text": "plain"}\n'),
    ("metadata.csv", 'file_name,text\na.png,red heart\nb/c.png,plain\n'),
    ("captions.csv", 'file_name,caption\na.png,red heart\nb/c.png,plain\nnowhere.png,plain\n')])
def test_captions_may_be_in_a_table(target, tmp_path, table, text):
    folder = tmp_path / "images"
    paint(folder / "a.png", 0)
    paint(folder / "b" / "c.png", 1)
    (folder / table).write_text(text)
    assert FolderImages(Pipeline.load(target), target, folder, tmp_path / "run", 4).prompts == ["red heart", "plain"]


def test_the_middle_of_a_picture_is_read_on_white(tmp_path):
    picture = Image.new("RGBA", (30, 10), (0, 0, 0, 0))
    picture.paste((255, 0, 0, 255), (10, 0, 20, 5))
    picture.save(tmp_path / "x.png")
    pixels = square(tmp_path / "x.png", 10)
    assert pixels.shape == (10, 10, 3) and pixels[1].tolist() == [[255, 0, 0]] * 10
    assert pixels[8].tolist() == [[255] * 3] * 10


@pytest.mark.parametrize("files, arguments, message", [
    ({}, [], "images must be a folder with pictures (.bmp, .jpeg, .jpg, .png, .webp), got "),
    ({f"{i}.png": None for i in range(7)}, [], "in metadata.jsonl or metadata.csv; 7 of 7 do not: 0.png, 1.png, 2.png, "
     "3.png, 4.png, .."),
    ({"0.png": None, "0.txt": " \n"}, [], "1 of 1 do not: 0.png"),
    ({"0.png": None, "0.txt": "green heart"}, [], "0.png: prompt 'green heart' has unknown words: 'green'"),
    ({"0.png": None, "0.txt": "heart"}, [], "images must have at least two pictures that can be read, got 1"),
    ({"0.png": b"", "0.txt": "heart"}, [], "images must have at least two pictures that can be read, got 0"),
    ({"0.png": None, "0.txt": b"\xff"}, [], "images must have captions in UTF-8, got "),
    ({"0.png": None, "metadata.csv": "a,b\n1,2\n"}, [], "a table with file_name and text in each row, got "),
    ({"0.png": None, "metadata.jsonl": "[]"}, [], "a table with file_name and text in each row, got "),
    ({"0.png": None, "metadata.jsonl": '{"file_name": "0.png", "text": 3}'}, [], "1 of 1 do not: 0.png"),
    ({"0.png": None, "metadata.jsonl": "{"}, [], "a table with file_name and text in each row, got "),
    (None, [], "images must be given with --target"),
    (None, ["--target", "nowhere", "--images", "."], "there is no folder nowhere"),
])
def test_bad_input_is_one_line_and_status_2(target, tmp_path, monkeypatch, files, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    for i, (name, content) in enumerate((files or {}).items()):
        if content is None:
            paint(tmp_path / "images" / name, i)
        else:
            (tmp_path / "images" / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    arguments = ["--images", "images"] if files is not None else arguments
    result = train("--steps", 1, "--target", target, *arguments)
    assert result.exit_code == 2 and f"Error: {message}" in result.output or message in result.output, result.output
    assert "Traceback" not in result.output and not (target / "eagle.safetensors").exists()


@pytest.mark.parametrize("option", ["--images", "--text-encoder", "--out"])
def test_options_of_a_target_need_one(tmp_path, option):
    result = train("--steps", 1, "--runs", tmp_path, option, tmp_path)
    assert result.exit_code == 2 and "must not be given without --target" in result.output
