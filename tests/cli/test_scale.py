"""Many pictures: the manifest by which a command goes on, and several workers, of which some end."""
import dataclasses
import itertools
import json
import re
import shutil
import sys
from collections import deque
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from specvis.cli import workers
from specvis.cli.many import Picture, PictureRequest
from specvis.cli.workers import Crew, Seat, per_worker
from specvis.pipelines.checkpoint import ModelSettings, fingerprint
from specvis.pipelines.discrete import Pipeline
from tests.cli.conftest import LINES, run
from tests.pipelines.test_prompts import t5_folder
from tests.tiny import tiny_pipeline

NAMES = ["001-red-heart.png", "002-blue-heart.png", "003-red-heart.png", "004-heart.png"]
LINE = {"number": 1, "prompt": "red heart", "file": "001-red-heart.png", "bytes": 3, "failed": False}


def generate(file, out, weights, *arguments, status=None):
    return run("generate", "--prompts", file, "--scale", 1, "--out", out, "--model", weights, *arguments, status=status)


def pictures(folder):
    """The files of pictures that are there, with their bytes."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "manifest.jsonl"}


def manifest(folder):
    """The settings and the pictures' lines, by their numbers."""
    settings, *rest = map(json.loads, (folder / "manifest.jsonl").read_text().splitlines())
    return settings, sorted(rest, key=lambda line: line["number"])


def test_the_manifest_says_by_which_settings_each_picture_was_drawn(weights, lines, tmp_path):
    result = generate(lines, tmp_path / "out", weights, "--method", "lantern:k=8", "--seed", 5, "--guidance", 1.5,
                      "--batch-invariant")
    assert result.exit_code == 0 and "4 of 4 pictures, " in result.output, result.output
    settings, drawn = manifest(tmp_path / "out")
    assert len(settings.pop("model")) == 16
    assert settings == {"specvis": version("specvis"), "folder": str(weights), "text_encoder": None, "dtype": "float32",
                        "style": None, "method": "lantern:k=8", "drawn_by": "lantern:k=8", "guidance": 1.5,
                        "temperature": 1.0, "top_k": 100, "top_p": 0.8, "min_p": None, "scale": 1, "seed": 5,
                        "n": 1, "batch_invariant": True}
    files = pictures(tmp_path / "out")
    for i, (line, number) in enumerate(zip(drawn, (1, 4, 5, 6))):
        assert line.pop("target_forwards") == round(16 / line.pop("tau"))
        assert line == {"number": i + 1, "file": NAMES[i], "prompt": LINES.split("\n")[number - 1].strip(),
                        "line": number, "seed": 5 + i, "failed": False, "bytes": len(files[NAMES[i]])}
    assert list(files) == NAMES and files[NAMES[0]] != files[NAMES[2]]  # a line that is repeated has its own seed


def test_the_same_command_draws_what_is_missing(weights, lines, tmp_path, monkeypatch):
    out, asked, original = tmp_path / "out", [], Pipeline.tokens

    def watched(self, prompts, method, sampling, *arguments, **options):
        asked.append(sampling.seeds.tolist())
        return original(self, prompts, method, sampling, *arguments, **options)

    monkeypatch.setattr(Pipeline, "tokens", watched)
    assert generate(lines, out, weights).exit_code == 0
    whole = pictures(out)
    monkeypatch.setattr(Pipeline, "load", lambda *arguments: pytest.fail("nothing is missing"))
    result = generate(lines, out, weights)
    assert result.exit_code == 0 and result.output == f"{out}: 4 of 4 pictures (4 were there)\n"
    monkeypatch.undo()
    monkeypatch.setattr(Pipeline, "tokens", watched)

    (out / NAMES[0]).write_bytes(whole[NAMES[0]][:-1])                 # half of a picture
    (out / NAMES[1]).unlink()
    text = (out / "manifest.jsonl").read_text()
    last = text.splitlines()[-1]
    (out / "manifest.jsonl").write_text(text[:text.index(last) + 20])  # half of a line: its picture does not count
    lines.write_text(LINES + "blue\n")                                 # one more prompt
    again = {0, 1, json.loads(last)["number"] - 1, 4}
    result = generate(lines, out, weights)
    assert result.exit_code == 0 and f"5 of 5 pictures ({5 - len(again)} were there), " in result.output
    assert asked == [[0, 1, 2, 3], sorted(again)]
    assert list(pictures(out)) == [*NAMES, "005-blue.png"] and pictures(out) | whole == pictures(out)
    assert {line["number"] for line in manifest(out)[1]} == {1, 2, 3, 4, 5}
    assert generate(lines, out, weights, "--page").output.endswith("5 of 5 pictures (5 were there)\n")
    shown = (out / "index.html").read_text()
    assert re.findall('img src="(.*?)"', shown) == [*NAMES, "005-blue.png"] and shown.count("<br>seed 3, ") == 1
    sheet = Image.open(out / "sheet.png")
    assert sheet.size == (24, 16) and sheet.crop((8, 8, 16, 16)).tobytes() == Image.open(out / "005-blue.png").tobytes()


def test_an_interrupted_command_leaves_whole_pictures(weights, lines, tmp_path, monkeypatch):
    out, original = tmp_path / "out", Path.replace
    generate(lines, tmp_path / "undisturbed", weights)

    def stop(self, goal):
        if Path(goal).name == NAMES[2]:  # its bytes are written, under another name
            raise KeyboardInterrupt
        return original(self, goal)

    monkeypatch.setattr(Path, "replace", stop)
    result = generate(lines, out, weights, "--batch", 1)
    assert result.exit_code == 130 and "interrupted; the same command goes on from here" in result.output
    monkeypatch.undo()
    assert [line["number"] for line in manifest(out)[1]] == [1, 2] and not (out / NAMES[2]).exists()
    assert generate(lines, out, weights).exit_code == 0
    assert pictures(out) == pictures(tmp_path / "undisturbed")


def test_a_picture_that_ended_early_is_tried_again(weights, lines, tmp_path, monkeypatch):
    """If no picture is finished, the status is 1."""
    out, original, failing = tmp_path / "out", Pipeline.tokens, {0, 1, 2, 3}

    def broken(self, *arguments, batch, finished):
        return original(self, *arguments, batch=batch, finished=lambda requests, images: finished(
            requests, dataclasses.replace(images, failed=torch.tensor([i in failing for i in requests]))))

    monkeypatch.setattr(Pipeline, "tokens", broken)
    result = generate(lines, out, weights)
    assert result.exit_code == 1 and "no picture was finished" in result.output and not pictures(out)
    shutil.rmtree(out)
    failing -= {0, 2, 3}
    result = generate(lines, out, weights)
    assert "picture 002, 'Blue   heart' (seed 1) ended early" in result.output and "3 of 4 pictures, " in result.output
    assert [(line["file"], line["tau"]) for line in manifest(out)[1] if line["failed"]] == [(None, None)]
    monkeypatch.undo()
    assert "4 of 4 pictures (3 were there)" in generate(lines, out, weights).output


@pytest.mark.parametrize("arguments, text, message", [
    (["--temperature", 0.5], LINES, "temperature was 1.0, now it is 0.5; choose another --out"),
    (["--text-encoder", "."], LINES, "text_encoder was None, now it is "),
    ([], LINES.replace("Blue", "red"), "number 2 was 'Blue   heart', now it is 'red   heart'; choose another --out"),
    ([], "red heart\n", "in the same order: number 2 was 'Blue   heart', now it is None; choose another --out"),
])
def test_a_folder_of_other_settings_is_refused(weights, lines, tmp_path, arguments, text, message):
    generate(lines, tmp_path / "out", weights)
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    lines.write_text(text)
    result = generate(lines, tmp_path / "out", weights, *arguments)
    assert result.exit_code == 2 and message in result.output and result.output.count("\n") == 1, result.output
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_another_model_is_refused(weights, lines, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(weights, other)
    content = (other / "gpt.safetensors").read_bytes()
    (other / "gpt.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    generate(lines, tmp_path / "out", weights)
    assert " model was " in generate(lines, tmp_path / "out", other, status=2).output
    weights.rename(tmp_path / "moved")
    assert "(4 were there)" in generate(lines, tmp_path / "out", tmp_path / "moved").output
    (tmp_path / "moved").rename(weights)


def test_the_text_encoder_of_the_models_folder_is_noted(lines, tmp_path):
    pipeline = tiny_pipeline()
    config = dataclasses.replace(pipeline.gpt.config, condition_tokens=6)
    model, settings = tmp_path / "model", ModelSettings(text_encoder=str(t5_folder(tmp_path / "t5")))
    Pipeline(config, pipeline.tokenizer.config, has_eagle=False, settings=settings).save(model)
    generate(lines, tmp_path / "out", model, status=0)
    noted = manifest(tmp_path / "out")[0]["text_encoder"]
    generate(lines, tmp_path / "given", model, "--text-encoder", tmp_path / "t5")
    assert len(noted) == 16 and manifest(tmp_path / "given")[0]["text_encoder"] == noted
    weights = load_file(tmp_path / "t5" / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, tmp_path / "t5" / "model.safetensors",
              {"format": "pt"})
    assert f"text_encoder was {noted!r}, now it is " in generate(lines, tmp_path / "out", model, status=2).output


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".model"])
def test_a_change_in_any_tensor_is_another_model(tmp_path, suffix):
    state = {str(i): torch.full((60000,), float(i)) for i in range(5)}
    known = set()

    def write(state):
        if suffix == ".safetensors":
            save_file(state, tmp_path / "x.safetensors")
        else:
            torch.save(state, tmp_path / f"x{suffix}", _use_new_zipfile_serialization=suffix == ".bin")
        known.add(fingerprint(tmp_path))

    for change, at in itertools.product(state, (0, -1)):
        changed = {name: value.clone() for name, value in state.items()}
        changed[change][at] = 7.0
        write(changed)
    write(state)
    assert len(known) == 11
    write(state)
    assert len(known) == 11


@pytest.mark.parametrize("text, message", [
    ("", "manifest that can be read, got"), ("pictures", "manifest that can be read, got"),
    ("pictures\n", "manifest.jsonl, line 1; choose another --out"),
    ("{}\n" + "[" * 100000 + "\n", "manifest.jsonl, line 2; choose another --out"),
    ("{}\n", "specvis was None, now it is"), ("{}\n[]\n", "manifest.jsonl, line 2; choose another --out"),
    ("[]\n{}\n", "manifest.jsonl, line 1; choose another --out"),
    ('{}\n{"number": 1}\n', "manifest.jsonl, line 2; choose another --out"),
    *(("{}\n" + json.dumps(LINE | change) + "\n", "manifest.jsonl, line 2; choose another --out")
      for change in ({"number": "1"}, {"number": 0}, {"file": 3}, {"file": None}, {"bytes": None}, {"failed": 1})),
])
def test_a_manifest_that_is_none_is_refused(weights, lines, tmp_path, text, message):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.jsonl").write_text(text)
    result = generate(lines, tmp_path / "out", weights)
    assert result.exit_code == 2 and message in result.output and result.output.count("\n") == 1, result.output


@pytest.mark.parametrize("name", ["mar:num_iter=4", "cspd"])
def test_continuous_tokens_are_drawn_of_a_file_too(weights, lines, tmp_path, name):
    for batch in (1, 3):
        result = generate(lines, tmp_path / str(batch), weights, "--method", name, "--batch", batch)
        assert result.exit_code == 0 and "4 of 4 pictures, " in result.output, result.output
    assert pictures(tmp_path / "1") == pictures(tmp_path / "3") and len(pictures(tmp_path / "1")) == 4
    assert manifest(tmp_path / "1")[0]["top_k"] is None


# --- workers ----------------------------------------------------------------------------------------------------------

class Ended(Exception):
    """What the driver hears of a worker that ended."""


class Actor:
    """A worker that ends where it meets one of these requests."""

    def __init__(self, poison, order):
        self.poison, self.order, self.draw = poison, order, SimpleNamespace(remote=self.drawn)

    def drawn(self, share):
        self.order.append([request.index for request in share])
        for request in share:
            yield None if request.index in self.poison else Picture(request, b"", 1, 1.0, 8)


def crew(num_requests, num_workers, poison=()):
    """A crew on something that does as Ray does, and the shares that it hands out."""
    order = []

    def get(what):
        if what is None:
            raise Ended
        return what

    ray = SimpleNamespace(wait=lambda pending, num_returns: (pending[:1], pending[1:]), get=get, kill=id,
                          exceptions=SimpleNamespace(RayError=Ended))
    numbers = itertools.count()
    requests = [PictureRequest(i, i, f"prompt {i}", i) for i in range(num_requests)]
    return Crew(ray, num_workers, lambda: Seat(Actor(poison, order), (f"worker {next(numbers)}", None)), requests,
                2), order


def drawn(*arguments):
    """What a crew has lost, the shares that it handed out, the requests of the pictures that it kept, what it said."""
    (it, order), begun, kept, said = crew(*arguments), [], [], []
    it.draw(lambda: begun.append(True), kept.append, said.append)
    assert begun == [True]
    return it.lost, order, sorted(picture.request.index for picture in kept), said


def test_shares_get_smaller_so_that_workers_end_together():
    lost, order, kept, said = drawn(40, 2)
    assert [len(share) for share in order] == [8, 8, 6, 5, 4, 3, 2, 1, 1, 1, 1]
    assert [i for share in order for i in share] == kept == [*range(40)] and not lost and not said


def test_what_a_worker_did_not_finish_is_drawn_again_one_by_one():
    lost, order, kept, said = drawn(8, 1, [1])
    assert order == [[0, 1, 2, 3], [4, 5], [6], [7], [1], [2], [3], [1]]
    assert kept == [0, 2, 3, 4, 5, 6, 7] and lost == {1: "its process ended"}
    assert said == [f"worker worker {n} is replaced: its process ended" for n in (0, 1, 2)]


def test_workers_that_end_are_replaced_but_not_for_ever():
    lost, _, kept, said = drawn(12, 1, [1, 4, 7, 10])
    assert len(said) > workers.DEATHS and set(lost) == {1, 4, 7, 10} and len(kept) == 8
    lost, _, kept, said = drawn(30, 2, range(3, 30))
    assert len(said) == workers.DEATHS * 2 and said[-1].startswith("10 workers ended one after the other without a")
    assert set(lost) == set(range(3, 30)) and len(kept) == 3


def test_what_a_worker_says_of_the_input_ends_the_command():
    it, _ = crew(2, 2)
    for seat in it.seats:
        seat.pending = ("1", "prompts.txt, line 7: unknown words")
    with pytest.raises(ValueError, match="prompts.txt, line 7: unknown words"):
        it.draw(lambda: pytest.fail("nothing is right yet"), None, None)


def test_the_reason_of_an_error_is_its_first_line():
    (it, _), said = crew(2, 1), []
    error = Ended()
    error.cause = RuntimeError("out of memory\nand more")
    seat = it.seats[0]
    seat.share = {0: it.waiting.popleft()}
    it.replace(seat, error, said.append)
    assert said == ["worker that was starting is replaced: RuntimeError: out of memory"]
    assert it.alone == deque([PictureRequest(0, 0, "prompt 0", 0)]) and it.seats[0] is not seat


@pytest.mark.parametrize("nodes, num_workers, cpus, gpus, each", [
    ([(8, 0)], 2, None, 0.0, 4), ([(8, 0)], 3, None, 0.0, 2), ([(16, 0), (16, 0)], 3, None, 0.0, 8),
    ([(4, 8)], 8, None, 1.0, None), ([(8, 8)], 8, None, 1.0, 1), ([(8, 1)], 2, None, 0.5, 4),
    ([(2, 0)], 4, 0.5, 0.0, 0.5), ([(8, 1), (8, 1)], 3, None, 1.0, None), ([(2, 0)], 3, None, 0.0, None)])
def test_each_worker_has_a_place(nodes, num_workers, cpus, gpus, each):
    nodes = [{"CPU": float(c), "GPU": float(g)} if g else {"CPU": float(c)} for c, g in nodes]
    if each is None:
        with pytest.raises(ValueError, match="workers must be at most [0-9] of 1 CPUs and [01] GPUs each"):
            per_worker(nodes, num_workers, cpus, gpus)
    else:
        assert per_worker(nodes, num_workers, cpus, gpus) == (each, gpus)


@pytest.mark.parametrize("error", [Exception("The current node\ntimed out"), RuntimeError(), ConnectionError("no"),
                                   ValueError("address")])
def test_ray_that_does_not_start_is_one_line(weights, lines, tmp_path, monkeypatch, error):
    def init(**_):
        raise error

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init,
                                                             shutdown=lambda: None))
    result = generate(lines, tmp_path / "out", weights, "--workers", 2)
    assert result.exit_code == 3 and not (tmp_path / "out").exists()
    said = str(error).split("\n")[0] or "RuntimeError"
    assert result.stderr.splitlines() == [f"Error: Ray does not start: {said}; the same command tries again, and "
                                          "without --workers no Ray is needed"]


def test_without_ray_a_line_says_what_to_install(weights, lines, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    result = generate(lines, tmp_path / "out", weights, "--workers", 2)
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    assert result.output == 'Error: workers must be 0 without Ray: pip install "specvis[ray]"\n'
