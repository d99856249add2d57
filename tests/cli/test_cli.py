"""The command line: what it writes, and one clear line with exit status 2 for bad input."""
import dataclasses
import fcntl
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from specvis.cli.animation import GAP, LINE
from specvis.cli.generate import file_name
from specvis.cli.main import main
from specvis.cli.progress import ProgressBar, Steps
from specvis.decoding.methods import CONTINUOUS, CONTINUOUS_PARAMETERS, METHODS, PARAMETERS
from specvis.decoding.trees import TREES
from specvis.pipelines.discrete import Pipeline
from specvis.pipelines.mar import MARPair
from tests.cli.conftest import run
from tests.cli.test_scale import NAMES, generate, manifest, pictures
from training.main import main as train


def test_generate_draws_the_baselines_picture_by_default(weights, tmp_path):
    pictures = {}
    for name, arguments in (("default", ()), ("vanilla", ("--method", "vanilla")),
                            ("another seed", ("--method", "vanilla", "--seed", 8))):
        out = tmp_path / f"{name}.png"
        result = run("generate", "--prompt", "red heart", "--seed", 7, "--scale", 1, "--out", out, "--model", weights,
                     *arguments, status=0)
        pictures[name] = Image.open(out).tobytes()
        if name == "default":
            assert re.fullmatch(rf"wrote {out}: 1 of 1 pictures, 8 x 8 pixels, drawn and written in \d+\.\d s, by "
                                r"jacobi:window=4, \d+ target forwards a picture, tau \d\.\d\d tokens a forward; "
                                "same picture as --method vanilla --seed 7",
                                result.output.strip())
    assert pictures["default"] == pictures["vanilla"] != pictures["another seed"]
    x = tmp_path / "new" / "folder" / "x.png"
    for verb in ("wrote", "overwrote"):
        several = run("generate", "--prompt", "red heart", "--seed", 7, "-n", 2, "--out", x, "--model", weights)
        assert several.output.startswith(f"{verb} {x}: 2 of 2 pictures, 8 x 8 pixels enlarged 32 times, ")
        assert several.output.strip().endswith("; same pictures as --method vanilla --seed 7")
        assert Image.open(x).size == (2 * 256, 256) and [path.name for path in x.parent.iterdir()] == ["x.png"]
    for arguments in (("lantern:delta=0.2:k=8",), ("vanilla", "--temperature", 0)):
        other = run("generate", "--prompt", "red heart", "--method", *arguments, "--out", tmp_path / "x.png",
                    "--model", weights)
        assert other.output.strip().endswith("tokens a forward")


@pytest.mark.parametrize("arguments, message", [
    ([], "one of --prompt and --prompts must be given"),
    (["--prompt", " "], "prompt must have at least one word"),
    (["--prompt", "red heart", "--batch", "2"], "batch must not be given with --prompt: its pictures are drawn all at"),
    (["--prompt", "red heart", "--workers", "2"], "workers must not be given with --prompt: its pictures are drawn"),
    (["--prompt", "red hart"], "unknown words: 'hart' (near: heart)"),
    (["--prompt", "red heart", "--method", "lantern:k=64"], "k must be within 1..63 (the codebook has 64"),
    (["--prompt", "red heart", "--method", "cspd", "--top-k", "5"], "top_k must not be given with cspd"),
    (["--prompt", "red heart", "--method", "mar", "--temperature", "0"], "temperature must be positive and finite"),
    (["--prompt", "red heart", "--method", "mar:num_iter=17"], "num_iter must be within 1..16"),
    (["--prompt", "red heart", "--method", "eagle1:tree=nowhere.json"], "tree nowhere.json is not a file"),
    (["--prompt", "red heart", "--method", "eagle1:draft_model=small"], "this model has no small.safetensors"),
    (["--prompt", "red heart", "--method", "jacobi:refresh=1"], "refresh must be 0, got 1: this model"),
    (["--prompt", "red heart", "--animate", "x.gif", "--method", "mar"], "method must be one of discrete tokens other"),
    (["--prompt", "red heart", "--animate", "x.gif", "--method", "vanilla"], "method must be one of discrete tokens"),
    (["--prompt", "red heart", "--animate", "x.gif", "--out", "x.png"], "out must not be given with --animate"),
    (["--prompt", "red heart", "--animate", "x.png"], "animate must end in .gif, got x.png"),
    (["--prompt", "red heart", "--animate", "/dev/null/x.gif"], "animate must be a file in a folder that can"),
    (["--prompt", "red heart", "--animate", "x.gif", "-n", "17"], "animate must be given with at most 16 pictures"),
    (["--prompt", "red heart", "--out", "/dev/null/x.png"], "out must be a file in a folder that can be made and"),
    (["--prompt", "fluent-3d heart", "--style", "fluent-3d"], "style must not be given for a prompt that begins with"),
    (["--prompt", "red heart", "--style", "noto"], "style must be one of fluent-3d, got 'noto'"),
    (["--prompt", "red heart", "-n", "many"], "'many' is not a valid integer"),
    (["--prompt", "red heart", "--known", "x.npy:4"], "known must be FILE:ROWS, with 1 to 3 of the 4 rows of tokens"),
    (["--prompt", "red heart", "--known", "x.npy:2"], "known must be a picture or a file of codes, got x.npy: ["),
    (["--prompt", "red heart", "--known", "x.npy:2", "--method", "mar"], "known must be given with --prompt and"),
])
def test_bad_input_is_one_line_and_status_2(weights, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = run("generate", *arguments, "--model", weights, status=2)
    assert message in result.output and "token/s" not in result.output      # found before the work starts
    assert list(tmp_path.iterdir()) == []


def test_a_broken_checkpoint_is_one_line_and_status_2(weights, tmp_path):
    for model, message in ((tmp_path, f"folder {tmp_path} must have config.json"),
                           ("FoundationVision/LlamaGen", "FoundationVision/LlamaGen; the names of a model hub")):
        assert message in run("generate", "--prompt", "red heart", "--model", model, status=2).output
    for file in weights.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: 500 if file.name == "gpt.safetensors" else None])
    result = run("generate", "--prompt", "red heart", "--model", tmp_path, "--out", tmp_path / "x.png", status=2)
    assert "gpt.safetensors cannot be read" in result.output
    assert not (tmp_path / "x.png").exists()


def test_a_picture_whose_logits_are_not_finite_is_left_out(weights, tmp_path, monkeypatch):
    original = Pipeline.tokens

    def broken(self, prompts, *arguments):
        return dataclasses.replace(original(self, prompts, *arguments), failed=torch.tensor([False, True, False]))

    monkeypatch.setattr(Pipeline, "tokens", broken)
    out = tmp_path / "x.png"
    result = run("generate", "--prompt", "red heart", "--method", "vanilla", "-n", 3, "--scale", 1, "--out", out,
                 "--model", weights)
    assert "picture 1 (seed 1) ended early: the model's output was not finite" in result.output
    assert "2 of 3 pictures" in result.output and Image.open(out).size == (16, 8)


@pytest.mark.parametrize("name", ["jacobi", "vanilla", "eagle2", "lantern:k=8"])
def test_generate_draws_each_prompt_of_a_file(weights, lines, tmp_path, name):
    """Picture by picture what --prompt draws with the same seed, however many are drawn at once."""
    for batch in (1, 2, 8):
        result = generate(lines, tmp_path / str(batch), weights, "--method", name, "--seed", 5, "--batch", batch)
        assert result.exit_code == 0, result.output
        assert list(pictures(tmp_path / str(batch))) == NAMES
        assert re.search(rf"{batch}: 4 of 4 pictures, 8 x 8 pixels, drawn and written in \d+\.\d s, \d+\.\d\d pictures "
                         rf"a second, by {name}\S*, \d+ target forwards a picture, tau \d\.\d\d tokens a forward",
                         result.output)
        assert ("same pictures as --method vanilla --seed 5" in result.output) == (name in ("jacobi", "eagle2"))
    for i, prompt in enumerate(("red heart", "blue heart", "red heart", "heart")):
        run("generate", "--prompt", prompt, "--method", name, "--seed", 5 + i, "--scale", 1, "--model", weights,
            "--out", tmp_path / "alone.png")
        drawn = {Image.open(path).tobytes() for path in (tmp_path / "alone.png", *tmp_path.glob(f"*/{NAMES[i]}"))}
        assert len(drawn) == 1


def test_generate_draws_several_pictures_of_each_prompt(weights, lines, tmp_path):
    result = generate(lines, tmp_path / "out", weights, "-n", 2, "--seed", 3, "--style", "fluent-3d")
    assert result.exit_code == 0 and "8 of 8 pictures" in result.output
    written = list(pictures(tmp_path / "out"))
    assert written[1:4] == ["002-red-heart.png", "003-blue-heart.png", "004-blue-heart.png"]
    run("generate", "--prompt", "blue heart", "-n", 2, "--seed", 5, "--scale", 1, "--out", tmp_path / "two.png",
        "--model", weights)
    both = Image.open(tmp_path / "two.png")
    assert [Image.open(tmp_path / "out" / name).tobytes() for name in written[2:4]] == [
        both.crop((x, 0, x + 8, 8)).tobytes() for x in (0, 8)]


def test_each_picture_is_written_as_soon_as_it_is_finished(weights, lines, tmp_path, monkeypatch):
    original, seen = Pipeline.tokens, []

    def watched(self, prompts, method, sampling, progress, *, batch, finished):
        def then(requests, images):
            finished(requests, images)
            seen.append((batch, requests, len(pictures(tmp_path / "out"))))

        return original(self, prompts, method, sampling, progress, batch=batch, finished=then)

    monkeypatch.setattr(Pipeline, "tokens", watched)
    assert generate(lines, tmp_path / "out", weights, "--batch", 1).exit_code == 0
    assert seen == [(1, [0], 1), (1, [1], 2), (1, [2], 3), (1, [3], 4)]


@pytest.mark.parametrize("text, arguments, message", [
    (None, [], "prompts must be a text file that can be read, got prompts.txt: No such file or directory"),
    ("", [], "prompts must be a file with at least one prompt, got prompts.txt"),
    ("# red heart\n\n", [], "prompts must be a file with at least one prompt, got prompts.txt"),
    (b"\xff\xfe", [], "prompts must be a text file that can be read, got prompts.txt: it is not UTF-8"),
    ("red heart\n\nred hart", [], "prompts.txt, line 3: prompt 'fluent-3d red hart' has unknown words: 'hart' (near"),
    ("red hart\nheart\nred red red red", [], "'hart' (near: heart); line 3: a prompt must have 1 to 3 words"),
    ("x" * 10**6, [], ".. " + "x" * 1940),
    ("hart\n" * 21, [], "line 20: prompt 'fluent-3d hart' has unknown words: 'hart' (near: heart); these are the"),
    ("heart", ["--prompt", "heart"], "one of --prompt and --prompts must be given, not both"),
    ("heart", ["--batch", 0], "Invalid value for '--batch': 0 is not in the range 1<=x<=1024"),
    ("heart", ["--gpus-per-worker", 1], "gpus_per_worker must not be given without --workers"),
    ("heart", ["--workers", 1, "--cpus-per-worker", 1.5], "cpus_per_worker must be at most 1 or a whole number, got"),
    ("heart", ["--out", "prompts.txt"], "out must be a folder that can be made, got prompts.txt: File exists"),
    ("heart", ["--out", "prompts.txt/x"], "out must be a folder that can be made, got prompts.txt/x: Not a directory"),
])
def test_bad_prompts_are_one_line_and_status_2(weights, tmp_path, monkeypatch, text, arguments, message):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "prompts.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    result = run("generate", "--prompts", "prompts.txt", "--model", weights, *arguments)
    assert result.exit_code == 2 and message in result.output and "token/s" not in result.output, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"] * (text is not None)


@pytest.mark.parametrize("prompt, total, name", [
    ("red heart", 9, "007-red-heart.png"), ("../../Etc/passwd", 1000, "0007-etc-passwd.png"),
    ("a  'B': c?*", 1, "007-a-b-c.png"), ("...", 1, "007.png"), ("x" * 500, 1, f"007-{'x' * 60}.png")])
def test_names_of_files_are_safe(prompt, total, name):
    assert file_name(7, total, prompt) == name


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch, capsys):
    clock = iter(range(0, 100, 2))
    monkeypatch.setattr("specvis.cli.progress.time.monotonic", lambda: next(clock))
    with Steps(3) as progress:
        progress.begin("vanilla", 10)
        for _ in range(5):
            progress.update(1)
    assert capsys.readouterr().err.splitlines() == ["1 of 3, vanilla", "1 of 3, vanilla: 20%", "1 of 3, vanilla: 40%"]
    clock = iter([0, 70, 72, 230])  # a slow start
    with ProgressBar(1024, "token", "x") as progress:
        for count in (4, 20, 240):
            progress.update(count)
    assert capsys.readouterr().err.splitlines() == ["x: 4 of 1024 tokens, 70 s",
                                                    "x: 264 of 1024 tokens, 230 s, about 468 s left"]
    clock = iter(range(0, 100, 2))
    terminal, screen = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with open(screen, "w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        with Steps(3) as progress:
            progress.begin("for jacobi.png: " + "jacobi:seed_exact=false" * 4, 10)
            progress.update(4)
            progress.bar.refresh()
        shown = ""
        while select.select([terminal], [], [], 0)[0]:
            shown += os.read(terminal, 100_000).decode()
    os.close(terminal)
    assert " 40% |" in shown and all(len(line) <= 80 for line in re.split(r"[\r\n]", shown))


def test_an_animation_shows_each_token_from_its_forward_on(weights, lines, tmp_path):
    out = tmp_path / "x.gif"
    result = run("generate", "--prompts", lines, "--scale", 4, "--animate", out, "--model", weights)
    assert result.exit_code == 0 and re.search(r"x.gif: 4 pictures; target forwards: vanilla 16, jacobi:window=2 \d+$",
                                               result.stdout.strip())
    assert not (tmp_path / "pictures").exists()
    film, gray, left = Image.open(out), [], {0: [], 1: []}
    assert film.is_animated and film.n_frames == 16
    for number in range(film.n_frames):
        film.seek(number)
        pixels = film.convert("RGB")
        unknown = [[pixels.getpixel((GAP + picture * (32 + GAP) + 4 + 8 * (token % 4),
                                     GAP + LINE + row * (32 + GAP + LINE) + 4 + 8 * (token // 4)))
                    for picture in range(4) for token in range(16)] for row in (0, 1)]
        gray = gray or unknown[0][15]
        for row in left:
            left[row].append(unknown[row].count(gray))
    assert left[0] == [4 * n for n in range(15, -1, -1)]
    assert left[1][-1] == 0 and sum(left[1]) < sum(left[0]) and left[1] == sorted(left[1], reverse=True)


def test_methods_and_info_list_what_there_is():
    listed = run("methods").output
    for word in (*METHODS, *CONTINUOUS, *TREES, "arXiv:2410.03355", "delta 0.2", "widths 4,39", "specvis methods NAME"):
        assert word in listed
    assert not re.search(r"nu 0\.0|omega 1\.0|delta 0\.0|k 0|metric l2", listed)     # they are off
    every = "".join(run("methods", name).output for name in ("adt-tree+lantern", "eagle1", "gsd", "mar", "cspd"))
    assert all(f"\n{parameter} " in every for parameter in (*PARAMETERS, *CONTINUOUS_PARAMETERS))
    one, unknown, misspelt = (run("methods", name) for name in ("lantern:k=30", "foo", "jacobi:windo=3"))
    assert one.exit_code == 0 and re.search("^k +30 +nearest codes", one.output, re.M)
    assert "eagle1" not in one.output and "continuous" not in one.output
    assert unknown.exit_code == 2 and unknown.output.startswith("Error: unknown method 'foo'; known: vanilla, jacobi")
    assert "did you mean window? its parameters: window, refresh, seed_exact\n" in misspelt.output
    assert all(len(line) <= 80 for text in (listed, every) for line in text.splitlines())
    listed = run("info").output
    page = re.findall(r"^\| \[`(\w+)`", (Path(__file__).parents[2] / "docs" / "ops.md").read_text(), re.M)
    assert [line.split()[0] for line in listed.splitlines()[1: len(page) + 1]] == page
    for word in ("verify_tree", "oracle", "torch", torch.__version__, "C++ kernels", "CUDA kernels"):
        assert word in listed


@pytest.mark.parametrize("group", [main, train])
def test_the_list_of_commands_says_what_each_says_itself(group):
    """Without a command there is the same. The help of a command that draws names the defaults."""
    result = CliRunner().invoke(group, ["--help"], terminal_width=200)
    assert CliRunner().invoke(group, [], terminal_width=200).output == result.output
    with click.Context(group) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command.name == name
            assert re.search(rf"^  {name} .*\w\.$", result.output, re.M), name
            if group is main:
                assert f"  {command.help.splitlines()[0]}\n" in result.output
                own = run(name, "--help")
                assert own.exit_code == 0 and ("default: 1.2" in own.output) == (
                    name in ("generate", "compare", "tune"))


def test_the_list_of_commands_imports_none_of_them():
    code = ("import sys; from specvis.cli.main import main; main(['--help'], standalone_mode=False); "
            "print(*{'matplotlib', 'torch', 'specvis.cli.options'}.intersection(sys.modules))")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "compare" in result.stdout and result.stdout.splitlines()[-1] == ""


def test_info_lists_the_words_of_the_shipped_model():
    listed = run("info", "--words").output
    for words in ("begins with a style: fluent-3d, fluent-flat, noto.",
                  "Hearts, cat faces, pirate and chequered flags come out well", "1,472 words:", " axe ", "zzz"):
        assert words in listed
    assert max(map(len, listed.splitlines())) <= 100


@pytest.mark.parametrize("name, kind", [("jacobi", Pipeline), ("mar", MARPair)])
def test_the_command_and_python_draw_the_same_picture(weights, tmp_path, name, kind):
    """Both get the seed alone; all other numbers are the folder's."""
    folder = tmp_path / "m"
    shutil.copytree(weights, folder)
    (folder / "pipeline.json").write_text(json.dumps({"guidance": 3.0, "top_k": 9, "top_p": 0.7, "min_p": 0.05}))
    run("generate", "--prompt", "red heart", "--method", name, "--seed", 4, "--scale", 1, "--out", tmp_path / "x.png",
        "--model", folder, status=0)
    pipeline = kind.load(folder)
    sampling = pipeline.sampling([4])
    assert float(sampling.guidance) == 3.0 and float(pipeline.sampling([4], guidance=1.5).guidance) == 1.5
    decoded = pipeline.tokens(["fluent-3d red heart"], name, sampling)
    assert pipeline.pictures(decoded.tokens)[0].tobytes() == Image.open(tmp_path / "x.png").tobytes()
    if kind is Pipeline:
        assert [round(x.item(), 4) for x in (sampling.top_k, sampling.top_p, sampling.min_p)] == [9, 0.7, 0.05]
        unfiltered = pipeline.tokens(["fluent-3d red heart"], name, pipeline.sampling([4], top_k=0, top_p=1.0))
        assert not torch.equal(unfiltered.tokens, decoded.tokens)


def test_a_log_has_a_line_from_time_to_time(weights, tmp_path, monkeypatch):
    monkeypatch.setattr("specvis.cli.progress.EVERY", 0)
    result = run("generate", "--prompt", "red heart", "-n", 3, "--out", tmp_path / "x.png", "--model", weights)
    assert re.match(r"jacobi:window=2: 3 of 48 tokens, 0 s\n(jacobi:window=2: .* s left\n)+"
                    r"decoding pictures: 1 of 3 pictures, .*\n(decoding pictures: .*\n){2}wrote ", result.output)


def test_the_shipped_model_draws(tmp_path):
    out = tmp_path / "heart.png"
    run("generate", "--prompt", "red heart", "--method", "lantern", "--out", out, "--scale", 1, status=0)
    red, green, blue = Image.open(out).convert("RGB").resize((1, 1), box=(20, 20, 44, 44)).getpixel((0, 0))
    assert red > green + 30 and red > blue + 30           # the middle of a red heart is red
    for name, given, temperature in (("jacobi", [], 0.5), ("jacobi", ["--temperature", 1], 1.0), ("mar", [], 1.0)):
        (tmp_path / "prompts").write_text("red heart\n")
        folder = tmp_path / f"{name}{len(given)}"
        run("generate", "--prompts", tmp_path / "prompts", "--method", name, *given, "--out", folder, status=0)
        assert manifest(folder)[0]["temperature"] == temperature
    assert Pipeline.load().sampling([0]).temperature == 0.5


def test_the_first_rows_of_a_picture_are_kept(weights, tmp_path):
    """From a file of codes as they are, and from a picture as the tokenizer reads it."""
    def codes(*arguments, status=0):
        result = run("generate", "--prompt", "red heart", "--scale", 1, "--model", weights, "--out", tmp_path / "y.npy",
                     *arguments, status=status)
        return np.load(tmp_path / "y.npy") if status == 0 else result.output

    drawn = codes("-n", 2)
    (tmp_path / "y.npy").rename(tmp_path / "x.npy")
    known = codes("-n", 2, "--seed", 7, "--known", f"{tmp_path / 'x.npy'}:3")
    assert (known[:, :3] == drawn[:, :3]).all() and (known[:, 3] != drawn[:, 3]).any()
    assert "known must have codes (1, 4, 4), got (2, 4, 4)" in codes("--known", f"{tmp_path / 'x.npy'}:3", status=2)
    np.save(tmp_path / "x.npy", drawn.astype(np.float32))
    assert "Cannot cast array data" in codes("--known", f"{tmp_path / 'x.npy'}:3", status=2)
    picture = np.random.default_rng(0).integers(256, size=(8, 12, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "x.png")
    square = torch.from_numpy(picture[:, 2:10]).permute(2, 0, 1)[None] / 127.5 - 1
    expected = Pipeline.load(weights).tokenizer.encode(square).view(4, 4)[:2].numpy()
    assert (codes("-n", 3, "--known", f"{tmp_path / 'x.png'}:2")[:, :2] == expected).all()
