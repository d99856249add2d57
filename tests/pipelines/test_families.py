"""Families of transformers from folders as users have them, with tiny random weights: load, draw, refuse."""
import json
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file, save_file

from specvis.cli import tune
from specvis.cli.main import main
from specvis.cli.manifest import FILE
from specvis.cli.many import Drawing, PictureRequest
from specvis.cli.options import ModelFiles
from specvis.cli.workers import Worker
from specvis.decoding.methods import parse_method
from specvis.pipelines.families import FAMILIES, FamilyPipeline, code_colors
from specvis.pipelines.family_parts import load_eagle, load_vqgan
from tests.families import HAS_GLM_IMAGE, C, released, saved, saved_vqgan

SIZES = {"anole": 64, "lumina-mgpt": 64, "emu3": 32, "janus-pro": None, "glm-image": 64}
NAMES = [name for name in FAMILIES if HAS_GLM_IMAGE or name != "glm-image"]
PROMPT = "a red heart"


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments if argument is not None])


def options(family, folder, *more):
    size = () if SIZES[family] is None else ("--image-size", SIZES[family])
    return "--family", family, "--model", folder, *size, *more


def load(family, folder, **more):
    return FamilyPipeline.load(folder, family, **{"image_size": SIZES[family]} | more)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """family -> a folder with its model, and one with a head for it"""
    root, made = tmp_path_factory.mktemp("families"), {}

    def of(family):
        if family not in made:
            folder = saved(family, root / family)
            made[family] = folder, released(load(family, folder).gpt, root / f"{family} head")
        return made[family]
    return of


@pytest.mark.parametrize("family", NAMES)
def test_commands_draw_what_the_pipeline_draws(folders, family, tmp_path, monkeypatch):
    folder, head = folders(family)
    given, out = options(family, folder, "--draft", head), tmp_path / "a.png"
    result = run("generate", *given, "--method", "eagle2", "--prompt", PROMPT, "-n", 2, "--out", out, "--scale", 1)
    assert result.exit_code == 0 and "same pictures as --method vanilla" in result.output, result.output
    pipeline = load(family, folder, draft=head)
    decoded = pipeline.tokens([PROMPT] * 2, "vanilla", pipeline.sampling([0, 1]))
    side = pipeline.side
    assert [np.asarray(Image.open(out))[:, i * side: (i + 1) * side].tobytes() for i in (0, 1)] == [
        picture.tobytes() for picture in pipeline.pictures(decoded.tokens)]
    if family == "glm-image":  # with its preview of 16 x 16 codes it takes a minute for the rest
        return
    run("generate", *given, "--prompt", PROMPT, "-n", 2, "--out", tmp_path / "a.npy")
    assert np.array_equal(np.load(tmp_path / "a.npy"), pipeline.on_grid(decoded.tokens).numpy())

    methods = "vanilla,jacobi,eagle2,lantern:k=5,gsd:k=3"
    assert torch.equal(pipeline.tokens([PROMPT], "eagle2", pipeline.sampling([0])).num_drafted, pipeline.tokens(
        [PROMPT], parse_method("eagle2", FAMILIES[family].methods), pipeline.sampling([0])).num_drafted)
    result = run("compare", *given, "--methods", methods, "-n", 2, "--singles", 1, "--out", tmp_path / "out")
    assert result.exit_code == 0 and "2 of 2" in result.output, result.output
    monkeypatch.setattr(tune, "WINDOWS", (2, 4))
    result = run("tune", *given, "--turns", 1)
    assert result.exit_code == 0 and "fastest here, 1 at once: --method" in result.output, result.output
    result = run("generate", *given, "--method", "jacobi", "--prompt", PROMPT, "--animate", tmp_path / "a.gif")
    assert result.exit_code == 0, result.output


def test_a_file_of_prompts_is_drawn_and_gone_on_with(folders, tmp_path):
    folder, head = folders("anole")
    file, out = tmp_path / "prompts.txt", tmp_path / "out"
    file.write_text("a red heart\na zebra at noon\na heart\n")
    arguments = "generate", *options("anole", folder, "--draft", head), "--prompts", file, "--out", out, "--batch", 2
    assert run(*arguments).exit_code == 0 and len(list(out.glob("*.png"))) == 3
    pictures = {path.name: path.read_bytes() for path in out.glob("*.png")}
    (out / "002-a-zebra-at-noon.png").unlink()
    assert "3 of 3 pictures (2 were there)" in run(*arguments).output
    assert pictures == {path.name: path.read_bytes() for path in out.glob("*.png")}
    assert json.loads((out / FILE).read_text().splitlines()[0])["family"] == "anole"
    assert "out must be a folder without pictures of other settings" in run(*arguments[:-2], "--guidance", 2).output
    files = ModelFiles(folder, "anole", head, image_size=64)
    drawing = Drawing(file, files, None, "float32", "cpu", None, parse_method("eagle2", files.methods()), scale=None,
                      batch=2, **files.filters())
    worker = Worker()
    requests = [PictureRequest(i, i + 1, text, i) for i, text in enumerate(file.read_text().splitlines())]
    assert worker.load(pickle.loads(pickle.dumps(drawing)), requests, torch.get_num_threads())[1] is None
    assert {picture.png for picture in worker.draw(requests)} == set(pictures.values())


def test_a_family_s_numbers_are_used(folders):
    pipelines = {family: load(family, folders(family)[0]) for family in NAMES}
    for family, pipeline in pipelines.items():
        sampling, usual = pipeline.sampling(0), FAMILIES[family].settings
        assert sampling.guidance.item() == usual.guidance and sampling.top_k.item() == usual.top_k
        assert sampling.temperature.item() == pytest.approx(usual.temperature or 1.0)
        assert f"{pipeline.side} x {pipeline.side} pixels" in repr(pipeline)
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    for family, names in (("anole", "eagle2 lantern adt-tree adt-tree+lantern"), ("lumina-mgpt", "eagle2")):
        assert all(f"`{parse_method(name, FAMILIES[family].methods).label}`" in page for name in names.split())
    assert parse_method("adt-tree:nodes=20", FAMILIES["anole"].methods).drafts.adaptation.widths == (4, 13)
    assert parse_method("eagle2", FAMILIES["lumina-mgpt"].methods).max_depth == 6
    anole, lumina = pipelines["anole"].prompts, pipelines["lumina-mgpt"].prompts
    assert anole.encode([PROMPT]) == [[0, 20, 21, 22, 8710, 8197]]
    assert lumina.encode([PROMPT])[0][-7:] == [20, 21, 22, 8710, 8197, 8806, 8806]


@pytest.mark.parametrize("rows", [1, 2])
def test_norms_of_one_row_are_every_head_s(folders, tmp_path, rows):
    target = load("lumina-mgpt", folders("lumina-mgpt")[0]).gpt
    head = load_eagle(released(target, tmp_path / "head", rows), target)
    given = torch.load(tmp_path / "head" / "pytorch_model.bin")["layers.0.self_attn.q_norm.weight"]
    assert torch.equal(head.layers[0].self_attn.q_norm.weight, given.repeat_interleave(4 // rows, 0))


@pytest.mark.parametrize("changes, message", [
    ({"fc.weight": None}, "lacks tensors of EAGLE head for Chameleon, width 64: fc.weight"),
    ({"layers.0.input_layernorm.weight": None}, "lacks tensors of EAGLE head .* layers.0.input_layernorm.weight"),
    ({"layers.1.mlp.up_proj.weight": torch.zeros(48, 64), "step": torch.zeros(())}, "holds tensors that EAGLE head .*"),
    ({"fc.weight": torch.zeros(64, 64)}, r"fc.weight must be \(64, 128\), got \(64, 64\)"),
    ({"layers.0.self_attn.q_norm.weight": torch.zeros(3, 16)}, r"q_norm.weight must be \(4, 16\), got \(3, 16\)"),
    ({"layers.0.mlp.up_proj.weight": torch.full((48, 64), torch.nan)}, "up_proj.weight must be finite numbers"),
    ({"embed_tokens.weight": torch.zeros(8900, 64)}, "must have the target's embedding.*a head for another model"),
    ({"embed_tokens.weight": torch.zeros(8900, 32)}, r"the target's embedding, \(8900, 64\), got another one")])
def test_what_heads_are_refused(folders, tmp_path, changes, message):
    target = load("anole", folders("anole")[0]).gpt
    with pytest.raises(ValueError, match=message):
        load_eagle(released(target, tmp_path / "head", **changes), target)


def test_a_smaller_model_and_the_released_table(folders, tmp_path):
    folder, head = folders("anole")
    shutil.copytree(head, tmp_path / "head")
    table = np.stack([np.roll(np.arange(C), -i)[1:] for i in range(C)]).astype(np.uint16)
    np.save(tmp_path / "head" / "top_9_indices.npy", table)
    pipeline = load("anole", folder, draft=tmp_path / "head")
    assert torch.equal(pipeline.neighbors(4), torch.from_numpy(table[:, :4]))
    np.save(tmp_path / "head" / "top_9_indices.npy", table + 1)
    with pytest.raises(ValueError, match=r"neighbors .* must be codes within \[0, 10\)"):
        load("anole", folder, draft=tmp_path / "head")
    if HAS_GLM_IMAGE:
        glm = folders("glm-image")[0]
        assert load("glm-image", glm, draft=glm).missing_draft_models == ["eagle"]
    other = saved("anole", tmp_path / "small", 1)
    pipeline = load("anole", folder, draft=other)
    sampling = pipeline.sampling([3])
    assert torch.equal(pipeline.tokens([PROMPT], "eagle2:draft_model=small", sampling).tokens,
                       pipeline.tokens([PROMPT], "vanilla", sampling).tokens)
    with pytest.raises(ValueError, match=r"be eagle2:draft_model=small, vanilla, jacobi or gsd, got eagle2: this model "
                                         r"has no EAGLE head \(--draft\)"):
        pipeline.tokens([PROMPT], "eagle2", sampling)


def test_chameleon_s_vqgan(folders, tmp_path):
    """Official names give pictures of any grid; in a converted model's own shards they are found."""
    folder, _ = folders("anole")
    target = load("anole", folder).gpt
    saved_vqgan(tmp_path / "vqgan.ckpt", target.codebook)
    pipeline = load("anole", folder, vq=tmp_path / "vqgan.ckpt")
    assert not pipeline.note and pipeline.side == 64 and "--vq" in load("anole", folder).note
    decoded = pipeline.tokens([PROMPT], "vanilla", pipeline.sampling([0]))
    picture = pipeline.pictures(decoded.tokens)[0]
    assert picture.size == (64, 64) and len(set(picture.get_flattened_data())) > 9
    vq = load_vqgan(tmp_path / "vqgan.ckpt", C)
    assert vq.decode(torch.zeros(1, 2, 3, dtype=torch.int64)).shape == (1, 3, 32, 48)
    own = shutil.copytree(folder, tmp_path / "own")
    tensors = load_file(own / "model.safetensors") | {
        f"model.vqmodel.{name}": tensor for name, tensor in vq.state_dict().items() if name.startswith("decoder.")}
    tensors |= {f"model.vqmodel.{name}": tensor for name, tensor in vq.post_quant_conv.state_dict(
        prefix="post_quant_conv.").items()}
    save_file(tensors, own / "model.safetensors", {"format": "pt"})
    assert load("anole", own).pictures(decoded.tokens)[0].tobytes() == picture.tobytes()
    result = run("generate", *options("anole", folder, "--vq", tmp_path / "vqgan.ckpt"), "--prompt", PROMPT, "--out",
                 tmp_path / "a.png", "--scale", 1)
    assert result.exit_code == 0 and Image.open(tmp_path / "a.png").tobytes() == picture.tobytes()

    saved_vqgan(tmp_path / "other.ckpt", target.codebook + 1)
    saved_vqgan(tmp_path / "few.ckpt", target.codebook[:4])
    for file, message in (("other.ckpt", "must have the model's codebook.* another model's VQ-GAN"),
                          ("few.ckpt", "must have the model's 10 codes, got 4")):
        with pytest.raises(ValueError, match=message):
            load("anole", folder, vq=tmp_path / file)
    for changes, message in (({"decoder.mid.attn_1.q.weight": None}, "lacks tensors of Chameleon's VQ-GAN"),
                             ({"decoder.up.0.attn.0.q.weight": torch.zeros(1)}, "holds tensors that Chameleon's VQ-"),
                             ({"decoder.norm_out.weight": torch.zeros(0)}, "is no VQ-GAN of Chameleon"),
                             ({"quantize.embedding.weight": torch.zeros(C)}, "must have more than 1 dimensions")):
        state = torch.load(tmp_path / "vqgan.ckpt")["state_dict"] | changes
        torch.save({name: tensor for name, tensor in state.items() if tensor is not None}, tmp_path / "wrong.ckpt")
        with pytest.raises(ValueError, match=message):
            load("anole", folder, vq=tmp_path / "wrong.ckpt")


def test_a_codebook_that_the_files_lack_is_not_made_up(folders, tmp_path):
    folder = shutil.copytree(folders("lumina-mgpt")[0], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    codebook = tensors["model.vqmodel.quantize.embedding.weight"]
    tensors = {name: tensor for name, tensor in tensors.items() if ".vqmodel." not in name}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    pipeline = load("lumina-mgpt", folder, draft=folders("lumina-mgpt")[1])
    with pytest.raises(ValueError, match="vq must be given .* for neighbors of codes: the files of .* lack the"):
        pipeline.check(parse_method("lantern:k=5"))
    assert pipeline.pictures(pipeline.tokens([PROMPT], "jacobi", pipeline.sampling([0])).tokens)[0].size == (64, 64)
    saved_vqgan(tmp_path / "vqgan.ckpt", codebook)
    assert load("lumina-mgpt", folder, vq=tmp_path / "vqgan.ckpt").neighbors(5).shape == (C, 5)


def test_codes_as_colors():
    line = torch.arange(5.0)[:, None] * torch.tensor([[3.0, 0, 4]])
    first, _ = code_colors(torch.tensor([[[0, 1, 2, 3, 4]], [[0, 0, 0, 0, 0]]]), line)
    assert first.size == (5, 1) and len(set(first.get_flattened_data())) == 5


def without_images(folder):
    config = json.loads((folder / "config.json").read_text())
    config["vocabulary_map"] = {"<image>": 3}
    (folder / "config.json").write_text(json.dumps(config))


def without_a_layer(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("change, family, message", [
    (lambda folder: None, "emu3", "config.json of model_type emu3, as emu3 has it, got chameleon in"),
    (lambda folder: (folder / "config.json").unlink(), "anole", "got none that can be read in"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "anole", "its tokenizer .tokenizer.json, .* has none"),
    (lambda folder: (folder / "model.safetensors").unlink(), "anole", "model.safetensors or pytorch_model.bin"),
    (without_a_layer, "anole", "lacks model.layers.1.mlp.up_proj.weight and 0 more tensors of ChameleonForCond"),
    (without_images, "anole", "the number of ids must be at least 1, got 256, .* and 0"),
    (lambda folder: None, "chameleon", "family must be one of anole, lumina-mgpt, emu3, janus-pro, glm-image, got")])
def test_what_models_are_refused(folders, tmp_path, change, family, message):
    folder = shutil.copytree(folders("anole")[0], tmp_path / "model")
    change(folder)
    with pytest.raises(ValueError, match=message):
        FamilyPipeline.load(folder, family)


def test_what_arguments_are_refused(folders, tmp_path):
    folder, head = folders("anole")
    anole = options("anole", folder)
    for given, message in ((("--draft", head), "draft must not be given without --family"),
                           (("--family", "anole"), "model must be given with --family anole"),
                           ((*anole, "--prompt", "a " * 300), "at most prefix_len=256 ids .* got 303 of"),
                           ((*anole, "--method", "mar"), "for discrete tokens"),
                           ((*anole, "--method", "eagle2"), "draft must be given for eagle2: an EAGLE head"),
                           ((*anole, "--style", "noto"), "style must not be given with --family anole"),
                           ((*anole, "--vq", "a/vqgan.ckpt"), "no file or folder a/vqgan.ckpt\\n"),
                           ((*anole, "--draft", "a/b"), "fetch it first: hf download a/b"),
                           (options("emu3", folders("emu3")[0], "--vq", head), "vq must not be given"),
                           (("--family", "anole", "--model", tmp_path / "none"), "there is no file or folder"),
                           (("--model", folder), "is of transformers, a model of type chameleon: give")):
        result = run("generate", "--prompt", "a", *given, "--out", tmp_path / "a.png")
        assert result.exit_code == 2, result.output
        assert re.search(message, result.output), result.output
    for family, size, step in (("anole", 24, 16), ("anole", 0, 16), ("anole", "64", 16), ("lumina-mgpt", 48, 32)):
        with pytest.raises(ValueError, match=f"image_size must be a positive multiple of {step} for {family}, got"):
            load(family, folder, image_size=size)
    with pytest.raises(ValueError, match="image_size must not be given for janus-pro, whose grid its files say"):
        load("janus-pro", folders("janus-pro")[0], image_size=384)
    for source, message in ((head, "an EAGLE head .* as --draft"), (folder, "a model of transformers .* as --model")):
        assert re.search(message, run("convert", source, "--out", tmp_path / "out").output)
    assert "--family anole or lumina-mgpt --model" in run("info", "--model", folder).output
    for family in NAMES:
        described = run("info", "--model", folders(family)[0]).output
        assert "--family" in described and family in described and "lacks a tokenizer" not in described
    assert "option: --family anole or lumina-mgpt --draft" in run("info", "--model", head).output


def test_prompts_must_fit(folders):
    pipeline = load("anole", folders("anole")[0])
    for prompt in ("", "  ", 7):
        with pytest.raises(ValueError, match="a prompt must be text with at least one word"):
            pipeline.tokens([prompt], "jacobi", pipeline.sampling([0]))
