"""`specvis compare`: its pictures and its table, and what it checks."""
import csv
import re
from importlib import import_module

import pytest
import torch
from PIL import Image

import specvis_kernels
from specvis.cli.plots import METHOD_STYLES
from specvis.cli.runs import ModelClock
from specvis.decoding.methods import RECIPES
from specvis.decoding.sampling import Sampling
from specvis.models import layers
from specvis.models.layers import Packing
from specvis.pipelines.discrete import Pipeline
from tests.cli.conftest import run
from tests.tiny import tiny_pair

compare_module = import_module("specvis.cli.compare")  # the module, not the command


def test_compare_writes_its_pictures_and_its_table(weights, tmp_path):
    """Every method has a color."""
    assert METHOD_STYLES.keys() == RECIPES.keys()
    run("compare", "--methods", "vanilla,eagle2:depth=2", "--methods", "cool-sd:tree=chain-2", "-n", 3, "--prompt",
        "fluent-3d red heart", "--prompt", "blue heart", "--out", tmp_path / "out", "--temperature", 0, "--temperature",
        1, "--model", weights, status=0)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"compare.png", "compare.csv"}
    rows = list(csv.DictReader(open(tmp_path / "out" / "compare.csv")))
    assert [(row["method"], row["temperature"]) for row in rows] == [
        (name, T) for T in ("0.0", "1.0") for name in ("vanilla", "eagle2:depth=2", "cool-sd:tree=chain-2")]
    vanilla = [row for row in rows if row["method"] == "vanilla"]
    assert all(float(row["tau"]) == 1 and float(row["target_forwards"]) == 16 for row in vanilla)
    assert all(0 < float(row["overhead"]) < 1 for row in rows)
    assert all(float(row["tv_excess"]) == 0 for row in rows if "cool" not in row["method"])
    assert float(rows[5]["tv_excess"]) > 0


def compared(weights, out, *arguments):
    """What `specvis compare` printed of methods at temperature 1 on three pictures, its exit status and its table."""
    result = run("compare", "--temperature", 1, "-n", 3, "--prompt", "red heart", "--out", out, "--model", weights,
                 *arguments)
    return result, {row["method"]: row for row in csv.DictReader(open(out / "compare.csv"))}


def test_compare_checks_that_the_same_seed_draws_the_same_picture(weights, tmp_path):
    result, rows = compared(weights, tmp_path, "--methods", "vanilla,jacobi:window=3,eagle2:seed_exact=true",
                            "--methods", "eagle1:seed_exact=true,lantern:k=8", "--singles", 2)
    assert result.exit_code == 0, result.output
    assert {name: row["same_tokens"] for name, row in rows.items()} == {
        "vanilla": "", "jacobi:window=3": "3 of 3", "eagle2": "3 of 3", "eagle1:seed_exact=true": "3 of 3",
        "lantern:k=8": ""}
    assert all(float(row["seconds"]) > 0 and float(row["speedup"]) > 0 for row in rows.values())
    assert rows["vanilla"]["speedup"] == "1.0" and float(rows["jacobi:window=3"]["tau"]) > 1
    assert 300 < Image.open(tmp_path / "jacobi.png").width < 500  # of the pictures that were drawn alone


@pytest.mark.skipif("cpu" not in specvis_kernels.backends("decoder_layers"), reason="it is not built")
def test_a_forward_whose_seconds_are_counted_is_the_usual_one(weights):
    pipeline = Pipeline.load(weights)
    with ModelClock(pipeline) as clock:
        pipeline.tokens(["fluent-3d red heart"], "eagle1", Sampling.of([0]))
    packings = pipeline.gpt.packing, pipeline.gpt.output_packing, pipeline.eagle.packing
    assert clock.seconds > 0 and all(packing.packed is not None for packing in packings)
    assert "logits" not in vars(pipeline.gpt)
    pair = tiny_pair()
    with ModelClock(pair) as clock:
        pair.tokens(["red heart"], "cspd-released", pair.sampling([0]))
    packings = [packing for mar in (pair.mar, pair.mar_draft) for packing in (mar.packing, mar.diffloss.packing)]
    assert clock.seconds > 0 and all(packing.packed is not None for packing in packings)


def test_compare_runs_what_was_asked_and_each_run_once(weights, tmp_path, monkeypatch):
    """The table and the curve over the window have the same run; the table fits a terminal, also in a pipe."""
    original, ran, drawn = Pipeline.tokens, [], []

    def watched(self, prompts, method, *arguments):
        ran.append((method.label, len(prompts)))
        return original(self, prompts, method, *arguments)

    monkeypatch.setattr(Pipeline, "tokens", watched)
    monkeypatch.setattr(compare_module, "draw_jacobi", lambda _, jacobi, windows, *__: drawn.append((jacobi, windows)))
    long = "jacobi:window=8:seed_exact=false:coupling=none"
    result, rows = compared(weights, tmp_path, "--methods", f"vanilla,jacobi:window=8,jacobi:window=8,{long}",
                            "--singles", 1, "--windows", "4,8", "--temperature", 0)
    assert result.exit_code == 0, result.output
    runs = ["vanilla", "jacobi:window=8", long]
    assert sorted(ran) == sorted([(name, n) for name in runs for n in (1, 1, 3, 3)]
                                 + [("jacobi:window=4", n) for n in (1, 3)])
    (jacobi, windows), = drawn
    assert windows[8] is jacobi and list(windows) == [4, 8] and rows.keys() == set(runs)
    row = next(row for row in csv.DictReader(open(tmp_path / "compare.csv"))
               if row["method"] == "jacobi:window=8" and row["temperature"] == "1.0")
    assert float(row["speedup"]) == round(jacobi.speedup(jacobi.baseline), 2)
    assert torch.equal(jacobi.shown.num_accepted, jacobi.decoded.num_accepted[:1])
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80
    assert "for jacobi.png: jacobi:window=4, temperature 1, 3 at once" in result.stderr
    assert "8 of 8, by each method in turn, 1 of the pictures alone\n" in result.stderr
    assert re.search("method +T +forward +seconds +speedup +tokens +TV\n(.*\n)*.*decoded alone", result.stdout)


def test_the_default_is_plain_decoding_twice_and_windows_by_name(weights, tmp_path, monkeypatch):
    """PyTorch's modules read in one row. `jacobi` names its window for one picture, by which the batch is drawn too."""
    read, original = set(), Packing.get
    option, = (option for option in compare_module.compare.params if option.name == "names")
    monkeypatch.setattr(option, "default", ("vanilla, jacobi, jacobi:window=3",))
    monkeypatch.setattr(compare_module.options, "SHIPPED", weights)

    def watched(self, *arguments):
        read.add((layers.USE_KERNELS, torch.get_num_threads() == 1))
        return original(self, *arguments)

    monkeypatch.setattr(Packing, "get", watched)
    result, rows = compared(weights, tmp_path, "--singles", 1)
    assert result.exit_code == 0, result.output
    assert list(rows) == ["vanilla", "PyTorch's modules", "jacobi:window=4", "jacobi:window=3"]
    assert rows["PyTorch's modules"]["same_tokens"] == "3 of 3" and rows["vanilla"]["same_tokens"] == ""
    assert rows["PyTorch's modules"]["speedup_over_modules"] == "1.0" and (False, True) in read
    assert layers.USE_KERNELS and max(map(len, result.stdout.splitlines()[:-1])) <= 80
    assert "jacobi:window=2" in run("compare", "--methods", "jacobi", "--singles", 0, "--prompt", "red heart", "-n", 2,
                                    "--out", tmp_path, "--model", weights, status=0).stdout


def test_a_curve_over_windows_and_one_small_picture(weights, tmp_path):
    run("compare", "--methods", "vanilla,jacobi", "-n", 1, "--prompt", "red heart", "--windows", "2,16", "--singles", 0,
        "--style", "fluent-3d", "--dtype", "bfloat16", "--out", tmp_path, "--model", weights, status=0)
    assert Image.open(tmp_path / "jacobi.png").width > 500


def test_an_interrupted_compare_says_how_to_go_on(weights, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Pipeline, "tokens", interrupted)
    result = run("compare", "--prompt", "red heart", "--methods", "vanilla", "--out", tmp_path, "--model", weights)
    assert result.exit_code == 130 and list(tmp_path.iterdir()) == []
    assert result.stderr.endswith("Error: interrupted; nothing was written; the same command begins anew\n")


def test_compare_without_a_baseline(weights, tmp_path):
    result, rows = compared(weights, tmp_path, "--methods", "jacobi", "--singles", 1)
    assert result.exit_code == 0 and "same tokens as" not in result.output
    row = rows["jacobi:window=4"]
    assert float(row["seconds"]) > 0 and row["speedup"] == row["batch_speedup"] == row["same_tokens"] == ""


def test_a_picture_that_differs_is_an_error_unless_it_is_rounding(weights, tmp_path, monkeypatch):
    original = Pipeline.tokens

    def differing(self, prompts, method, *arguments):
        decoded = original(self, prompts, method, *arguments)
        if method.name == "jacobi" and len(prompts) == 3:
            decoded.tokens = decoded.tokens.clone()
            decoded.tokens[1, 5] ^= 1
        return decoded

    monkeypatch.setattr(Pipeline, "tokens", differing)
    methods = ("--methods", "vanilla,jacobi:window=4", "--singles", 0)
    result, rows = compared(weights, tmp_path, *methods)
    assert result.exit_code == 1 and rows["jacobi:window=4"]["same_tokens"] == "2 of 3"
    assert rows["jacobi:window=4"]["seconds"] == rows["jacobi:window=4"]["speedup"] == ""
    assert re.search(r"ERROR: jacobi:window=4, temperature 1: 'fluent-3d red heart' \(picture 1\) differs from the "
                     r"baseline's from token 5 on, where its two best candidates are (inf|\d\.\de.\d\d) apart\n",
                     result.output)
    assert "pictures that differ from the baseline's by more than rounding (0.0001): 1" in result.output

    monkeypatch.setattr("specvis.cli.runs.draw_margins", lambda pipeline, prompts, tokens, sampling: tokens * 1e-6)
    result, rows = compared(weights, tmp_path, *methods)
    assert result.exit_code == 0 and rows["jacobi:window=4"]["same_tokens"] == "2 of 3"
    assert "apart: rounding\n" in result.output and "ERROR" not in result.output

    monkeypatch.setattr("specvis.cli.runs.is_near_a_filter", lambda *_: False)
    for dtype, margin, is_rounding in (("float32", 0.005, False), ("bfloat16", 0.005, True), ("bfloat16", 5.0, False)):
        monkeypatch.setattr("specvis.cli.runs.draw_margins", lambda *a, margin=margin: torch.full((1, 16), margin))
        result, _ = compared(weights, tmp_path, *methods, "--dtype", dtype)
        assert (result.exit_code == 0) == ("apart: rounding\n" in result.output) == is_rounding, (dtype, margin)


def test_compare_sets_continuous_tokens_beside_discrete_ones(weights, tmp_path):
    run("compare", "--methods", "vanilla,mar,cspd:gamma=2", "--prompt", "red heart", "-n", 2, "--temperature", 0,
        "--temperature", 1, "--out", tmp_path, "--model", weights, status=0)
    rows = list(csv.DictReader(open(tmp_path / "compare.csv")))
    assert [(row["method"], row["temperature"]) for row in rows] == [
        ("vanilla", "0.0"), ("vanilla", "1.0"), ("mar", "1.0"), ("cspd:gamma=2", "1.0")]
    assert rows[2]["batch_speedup"] == "1.0" and rows[2]["acceptance"] == "" and 0 <= float(rows[3]["acceptance"]) <= 1
    assert 0 < float(rows[3]["overhead"]) < 1 and rows[3]["tv_excess"] == ""
    only = run("compare", "--methods", "continuous", "--prompt", "red heart", "--temperature", 0, "--out", tmp_path,
               "--model", weights, status=2)
    assert "temperature must be positive for mar, got 0" in only.output


def test_compare_refuses_before_any_work(weights):
    for arguments, message in ((["--methods", "vanilla,magic"], "unknown method 'magic'"),
                               (["--methods", "lantern:k=64", "--prompt", "red heart"], "k must be within 1..63"),
                               (["--temperature", "-1"], "temperature must be at least 0"),
                               (["--prompt", "green heart"], "unknown words: 'green'"),
                               (["--out", "/dev/null/x", "--prompt", "red heart"], "out must be a folder that can")):
        assert message in run("compare", *arguments, "--model", weights, status=2).output
