"""`specvis convert`: files in the forms of the published ones, tiny and with random weights."""
import json
import os
import pickle
import re
import weakref
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from specvis.decoding.baseline import decode
from specvis.decoding.continuous import parallel_decode
from specvis.decoding.continuous_state import ContinuousSampling
from specvis.decoding.draft_model import EagleDraftModel
from specvis.decoding.methods import parse_method
from specvis.decoding.sampling import Sampling, cfg_inputs
from specvis.decoding.speculative import speculative_decode
from specvis.models import llamagen
from specvis.models.eagle import EagleHead
from specvis.models.kl_vae import KL, KLConfig
from specvis.models.llamagen import GPT, GPTConfig
from specvis.models.mar import MAR, MARConfig
from specvis.models.vq import VQ, VQConfig
from specvis.pipelines import convert as converting
from specvis.pipelines import sources
from specvis.pipelines.checkpoint import CheckpointError
from specvis.pipelines.convert import convert
from specvis.pipelines.discrete import Pipeline
from specvis.pipelines.mar import MARPair
from specvis.pipelines.recognized import recognized, recognized_table
from specvis_kernels import codebook_neighbors
from tests.cli.conftest import run

CLASSES = GPTConfig(dim=32, layers=2, heads=2, vocabulary=64, grid=16, classes=10, ffn_multiple=16)
CAPTIONS = replace(CLASSES, classes=None, condition_tokens=6, caption_dim=8)
CODES = VQConfig(32, 32, (1, 1, 1, 1, 1), 1, 8, 64, 4)  # as VQ-16, a token for 16 x 16 pixels
LATENTS = KLConfig(32, (1, 1, 1, 1, 1), 1, 4)
DIFFUSION = MARConfig(32, 2, 2, 2, 16, 2, tokens=16, channels=4, buffer=6, classes=10)


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    made = {"gpt": GPT(CLASSES), "text": GPT(CAPTIONS), "small": GPT(replace(CLASSES, dim=16, layers=1)),
            "vq": VQ(CODES), "eagle": EagleHead(CAPTIONS), "mar": MAR(DIFFUSION),
            "mar_draft": MAR(replace(DIFFUSION, dim=16)), "kl": KL(LATENTS)}
    for name in ("gpt", "text", "small"):
        for weight in (made[name].output.weight, made[name].tok_embeddings.weight):
            weight.data.normal_(std=0.5)
    for net in (made["mar"].diffloss.net, made["mar_draft"].diffloss.net):
        for block in (*net.res_blocks, net.final_layer):
            block.adaLN_modulation[1].weight.data.normal_(std=0.2)  # or the tokens would not depend on the class
        net.final_layer.linear.weight.data.normal_(std=0.01)
    return {name: model.requires_grad_(False).eval() for name, model in made.items()}


@pytest.fixture(scope="module")
def files(models, tmp_path_factory):
    """The published files' forms: LlamaGen's wrapped in "model", LANTERN's folders, MAR's."""
    folder = tmp_path_factory.mktemp("published")
    state = {name: model.state_dict() for name, model in models.items()}
    torch.save({"model": state["gpt"], "optimizer": {"state": {0: {"step": torch.zeros(2)}}}, "steps": 7,
                "args": Namespace(gpt_model="GPT-B")}, folder / "c2i_B_256.pt")
    os.link(folder / "c2i_B_256.pt", folder / "c2i_B_384.pt")
    torch.save({"model": state["text"]}, folder / "t2i_XL_stage1_256.pt")
    torch.save({"model": state["small"]}, folder / "c2i_small.pt")
    torch.save({"model": state["vq"]}, folder / "vq_ds16_c2i.pt")
    split = folder / "LlamaGen-T2I"
    split.mkdir()
    renamed = split_names(state["text"])
    names = sorted(renamed)
    shards = {f"model-{i + 1:05}-of-00002.safetensors": names[i::2] for i in range(2)}
    for shard, inside in shards.items():
        save_file({name: renamed[name].contiguous() for name in inside}, split / shard)
    (split / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {}, "weight_map": {name: shard for shard, inside in shards.items() for name in inside}}))
    (split / "config.json").write_text(json.dumps(
        {"block_size": 256, "num_attention_heads": 2, "rms_norm_eps": 1e-5, "input_type": "t2i"}))
    head = folder / "llamagen_drafter"
    head.mkdir()
    torch.save(state["eagle"], head / "pytorch_model.bin")
    (head / "config.json").write_text(json.dumps({"hidden_size": 32, "input_type": "t2i"}))
    table = codebook_neighbors(state["vq"]["quantize.embedding.weight"], 63)
    np.save(folder / "top_63_indices.npy", table.numpy())
    torch.save({"model": state["mar"], "model_ema": state["mar"], "epoch": 400, "args": Namespace(model="mar_base"),
                "optimizer": {"state": {}}}, folder / "checkpoint-last.pth")
    torch.save({"model_ema": state["mar_draft"], "model": {}}, folder / "draft-last.pth")
    torch.save({"model": state["kl"] | {"loss.logvar": torch.zeros(())}}, folder / "kl16.ckpt")
    return folder


@pytest.fixture
def converted(files, tmp_path):
    """A folder that LlamaGen's files have been converted to."""
    convert([files / "c2i_B_256.pt", files / "vq_ds16_c2i.pt"], tmp_path / "m", image_size=256, heads=2)
    return tmp_path / "m"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def split_names(state):
    """A GPT's tensors under Hugging Face's names, as LANTERN's conversion has them."""
    renamed = {}
    for name, tensor in state.items():
        parts = name.split(".")
        if name.endswith("attention.wqkv.weight"):
            for letter, rows in zip("qkv", tensor.chunk(3)):
                renamed[f"model.layers.{parts[1]}.self_attn.{letter}_proj.weight"] = rows
            continue
        for ours, theirs in (("tok_embeddings", "model.embed_tokens"), ("output", "lm_head"), ("norm", "model.norm"),
                             ("cls_embedding", "model.cls_embedding"), ("layers", "model.layers")):
            if parts[0] == ours:
                name = ".".join([theirs, *parts[1:]])
        for ours, theirs in (("attention.wo", "self_attn.o_proj"), ("feed_forward.w1", "mlp.gate_proj"),
                             ("feed_forward.w3", "mlp.up_proj"), ("feed_forward.w2", "mlp.down_proj"),
                             ("attention_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
            name = name.replace(ours, theirs)
        renamed[name] = tensor
    return renamed


def test_two_commands_lead_from_the_files_to_a_picture(models, files, tmp_path):
    command = ("convert", files / "c2i_B_256.pt", files / "vq_ds16_c2i.pt", "--image-size", 256, "--heads", 2,
               "--out", tmp_path / "m")
    planned = run(*command, "--dry-run", status=0).output.splitlines()
    assert not (tmp_path / "m").exists()
    result = run(*command, status=0)
    assert planned[:-1] == result.output.splitlines()[:-1] and planned[-1].startswith("nothing was written; 1.9 MB")
    assert "c2i_B_256.pt: LlamaGen's GPT, 2 layers of width 32, class-conditional (10 classes), float32 -> " \
        in result.output.replace("\n", " ")
    assert "tokenizer VQ-16, 64 codes of 4 numbers" in result.output
    assert f"draw with it: specvis generate --model {tmp_path / 'm'} --prompt 207" in result.output
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "config.json", "gpt.safetensors", "pipeline.json", "tokenizer.json", "tokenizer.safetensors"]
    again = run("convert", files / "vq_ds16_c2i.pt", "--out", tmp_path / "m", status=0)
    assert "tokenizer.safetensors, in place of the one before" in again.output.replace("\n", " ")
    assert "in place of" not in result.output
    shown = run("info", "--model", tmp_path / "m").output.split("\n")
    assert shown[:4] == ["discrete tokens: 16 x 16 of 64 codes, pictures of 256 pixels a side",
                         "prompts: class ids, 0..9", "draft models: none; jacobi needs none",
                         "drawn with, unless one says otherwise: guidance 4.0, top_k 2000, top_p 1.0"]
    assert shown[4].startswith("gpt.safetensors") and shown[4].endswith(" million numbers, float32")
    result = run("generate", "--model", tmp_path / "m", "--prompt", 7, "--seed", 3, "--out", tmp_path / "x.png")
    assert result.exit_code == 0, result.output
    sampling = Sampling.of([3], guidance=4.0, top_k=2000)                     # the demo's numbers
    tokens = decode(models["gpt"], *models["gpt"].condition(torch.tensor([7])), sampling).tokens
    assert torch.equal(Pipeline.load(tmp_path / "m").tokens(["7"], "jacobi", sampling).tokens, tokens)
    image = ((models["vq"].decode(tokens)[0].permute(1, 2, 0) + 1) * 127.5).round().byte().numpy()
    assert np.array_equal(np.array(Image.open(tmp_path / "x.png")), image)
    for arguments, message in (
            ((10,), "the number of a class within 0..9, got '10'"),
            ((1, "--style", "noto"), "style must not be given for this model"),
            ((1, "--method", "mar"), "method must be one for discrete tokens, such as jacobi")):
        result = run("generate", "--model", tmp_path / "m", "--out", tmp_path / "y.png", "--prompt", *arguments)
        assert result.exit_code == 2 and message in result.output


@pytest.mark.parametrize("wrapping", ["bare", "module", "state_dict", "legacy", "safetensors"])
def test_every_wrapping_is_taken_off(models, files, tmp_path, wrapping):
    state = models["gpt"].state_dict()
    path = tmp_path / ("gpt.safetensors" if wrapping == "safetensors" else "gpt.pt")
    if wrapping == "safetensors":
        save_file(state, path)
    elif wrapping in ("bare", "legacy"):
        torch.save(state | {"freqs_cis": torch.zeros(3)}, path, _use_new_zipfile_serialization=wrapping == "bare")
    else:
        torch.save({wrapping: state, "step": 3}, path)
    convert([path, files / "vq_ds16_c2i.pt"], tmp_path / "m", image_size=384, heads=2)
    written = load_file(tmp_path / "m" / "gpt.safetensors")
    assert written.keys() == state.keys() and all(torch.equal(written[name], state[name]) for name in state)
    config = Pipeline.load(tmp_path / "m").gpt.config
    assert (config.grid, config.ffn_dim, config.classes) == (24, CLASSES.ffn_dim, 10)


WRAPPED = [("module._orig_mod.", ""), ("_orig_mod.module.", ""), ("model.", ""), ("gpt.net.", ""), ("", "_orig_mod."),
           ("_fsdp_wrapped_module.", "_fsdp_wrapped_module."), ("", "_checkpoint_wrapped_module."),
           ("_forward_module.model._orig_mod.", "_checkpoint_wrapped_module._fsdp_wrapped_module.")]


@pytest.mark.parametrize("name", ["gpt", "text", "split", "eagle", "vq", "mar", "kl"])
def test_names_that_wrappers_of_modules_add_are_taken_off(models, tmp_path, name):
    state = split_names(models["text"].state_dict()) if name == "split" else models[name].state_dict()
    torch.save(state, tmp_path / "x.pt")
    expected = recognized(sources.open_source(tmp_path / "x.pt"), 2)
    for before, inside in WRAPPED:
        path = tmp_path / f"{before}{inside}.pt"                              # another one each time: files stay mapped
        torch.save({before + re.sub(r"((?:layers|\w+_blocks|down|up)\.\d+\.)", rf"\1{inside}", key): value
                    for key, value in state.items()}, path)
        part = recognized(sources.open_source(path), 2)
        assert (part.kind, part.config) == (expected.kind, expected.config)
        assert part.source.tensors.keys() == expected.source.tensors.keys(), (before, inside)
        assert all(torch.equal(part.source.tensors[key].make(), tensor.make())
                   for key, tensor in expected.source.tensors.items())


def test_of_several_models_in_a_file_none_is_guessed(models, files, tmp_path):
    state, said = models["gpt"].state_dict(), []

    def read(content):
        torch.save(content, tmp_path / "x.pt")
        return recognized(sources.open_source(tmp_path / "x.pt", said.append), 2, said.append)

    def named(prefix, other=state):
        return {prefix + name: value for name, value in other.items()}
    for content, message in (
            (named("generator.") | named("ema_generator."), "x.pt must hold one model, got several, whose names begin "
             "with ema_generator. and generator.; save one of them alone"),
            (named("gpt.") | named("vq.", models["vq"].state_dict()), "begin with gpt. and vq.; save one"),
            (state | named("module."), "holds norm.weight and module.norm.weight, which are one tensor's names"),
            (state | named("ema."), "holds tensors that LlamaGen's GPT, 2 layers .* has not: ema."),
            ({"generator": state, "step": 3}, r"must hold a dictionary of tensors, by itself or in 'model', .*, got "
             r"'generator' \(OrderedDict of 18\), 'step' \(int\)"),
            ({"model": {"\n": [1]}}, r"got 'model' \(dict of 1\)$")):
        if "module.norm.weight" in content:
            content = {"norm.weight": 0, "module.norm.weight": 0} | content   # the first one is named
        with pytest.raises(CheckpointError, match=message):
            read(content)
    assert not said
    part = read({"state_dict": named("model.") | {"loss.weight": torch.ones(1), "ema.decay": torch.ones(1)}})
    assert part.source.tensors.keys() == state.keys()
    assert said == [f"{tmp_path / 'x.pt'}: took the tensors whose names begin with model., and left out 2 others: "
                    "loss.weight, ema.decay"]


@pytest.mark.parametrize("name, keys, taken", [
    ("vq", ("model", "ema"), "ema"), ("vq", ("ema",), "ema"), ("gpt", ("model", "ema"), "model"),
    ("gpt", ("ema",), "ema"), ("gpt", ("module", "model_ema"), "module"), ("eagle", ("ema", "module"), "module"),
    ("kl", ("model", "ema"), "model"), ("mar", ("model", "model_ema"), "model_ema"), ("mar", ("model",), "model"),
    ("gpt", ("model", "ema_params"), "model")])
def test_which_weights_of_a_file_are_taken_is_said(models, tmp_path, name, keys, taken):
    key, weight = next(iter(models[name].state_dict().items()))
    torch.save({each: {f"module.{name}": value + (each == taken) for name, value in models[name].state_dict().items()}
                for each in keys} | {"steps": 3, "optimizer": {"state": {}}}, tmp_path / "x.pt")
    said = []
    part = sources.open_source(tmp_path / "x.pt", said.append)
    assert torch.equal(part.tensors[key].make(), weight + 1)
    others = [each for each in keys if each != taken]
    average = ", a moving average of the weights" * ("ema" in taken)
    expected = f"{tmp_path / 'x.pt'}: took {taken!r}{average}" + "".join(f"; it also has {each!r}" for each in others)
    assert said == ([expected] if others or average else [])


def test_a_commands_lines_say_which_weights_were_taken(models, files, tmp_path):
    state = models["vq"].state_dict()
    torch.save({"model": state, "ema": {name: value + 1 for name, value in state.items()}}, tmp_path / "vq.pt")
    result = run("convert", files / "c2i_B_256.pt", tmp_path / "vq.pt", "--image-size", 256, "--heads", 2, "--out",
                 tmp_path / "m")
    assert result.output.startswith(f"{tmp_path / 'vq.pt'}: took 'ema', a moving average of the weights; it also has "
                                    "'model'\n")
    written = load_file(tmp_path / "m" / "tokenizer.safetensors")
    assert written and all(torch.equal(value, state[name] + 1) for name, value in written.items())


@pytest.mark.parametrize("stored, number, dtype, message", [
    (torch.float32, "nan", None, "float32, got NaN or infinite ones, 2 of 32$"),
    (torch.float16, "-inf", torch.float32, "float16, got NaN or infinite ones, 2 of 32$"),
    (torch.bfloat16, "nan", None, "bfloat16, got NaN or infinite ones, 2 of 32$"),
    (torch.float64, "1e39", None, "float32, got NaN or infinite ones, 2 of 32$"),
    (torch.float32, "70000", torch.float16, "float16, got NaN or infinite ones, 2 of 32; dtype must hold them, as "
     "that of the file does, float32$")])
def test_numbers_that_are_not_finite_do_not_replace_a_model(models, converted, tmp_path, stored, number, dtype,
                                                            message):
    before, said = contents(converted), []
    for name, part in (("gpt", "norm.weight"), ("vq", "encoder.conv_in.bias")):
        if name == "vq" and "dtype" in message:
            continue                                                          # a tokenizer stays in its own
        state = {key: value.to(stored) for key, value in models[name].state_dict().items()}
        state[part] = state[part].clone()
        state[part][3:5] = float(number)
        torch.save({"model": state}, tmp_path / "bad.pt")
        with pytest.raises(CheckpointError, match=rf"bad.pt: {part} must be finite numbers in {message}"):
            convert([tmp_path / "bad.pt"], converted, image_size=256, heads=2, dtype=dtype, say=said.append)
        assert contents(converted) == before and not said


def test_an_image_size_other_than_the_folders_is_refused(files, converted):
    convert([files / "vq_ds16_c2i.pt"], converted, image_size=256)
    with pytest.raises(CheckpointError, match="config.json is for pictures of 256 pixels, not of 384"):
        convert([files / "vq_ds16_c2i.pt"], converted, image_size=384)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_written_in_a_dtype_but_those_of_the_tokenizer(models, files, tmp_path, dtype):
    convert([files / "c2i_B_256.pt", files / "vq_ds16_c2i.pt"], tmp_path, image_size=256, heads=2, dtype=dtype)
    written = load_file(tmp_path / "gpt.safetensors")
    assert all(torch.equal(written[name], value.to(dtype)) for name, value in models["gpt"].state_dict().items())
    assert load_file(tmp_path / "tokenizer.safetensors")["quantize.embedding.weight"].dtype == torch.float32


def test_lanterns_folders_decode_as_the_modules_do(models, files, tmp_path):
    lines = []
    convert([files / "llamagen_drafter", files / "top_63_indices.npy", files / "LlamaGen-T2I",
             files / "vq_ds16_c2i.pt"], tmp_path, say=lines.append)          # config.json says the size and the heads
    assert [line.split(": ")[1].split(",")[0] for line in lines] == [
        "LlamaGen's GPT", "LlamaGen's tokenizer VQ-16", "LANTERN's EAGLE head", "a table of neighbors"]
    pipeline, gpt = Pipeline.load(tmp_path), models["text"]
    state = gpt.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in pipeline.gpt.state_dict().items())
    table = codebook_neighbors(models["vq"].quantize.embedding.weight, 9)    # of the codes as they are stored
    for metric in ("l2", "raw"):
        assert torch.equal(pipeline.neighbors(9, metric), table)
    unit = codebook_neighbors(models["vq"].codebook(), 9)
    assert torch.equal(pipeline.neighbors(9, "cosine"), unit) and not torch.equal(unit, table)
    torch.manual_seed(3)
    features, mask = torch.randn(1, 6, 8), torch.tensor([[False, True, True, True, True, True]])
    sampling, method = Sampling.of([4], guidance=7.5, top_k=50), parse_method("lantern:k=8")
    condition, mask = gpt.condition(features * mask[..., None], mask)
    draft_model = EagleDraftModel(gpt, models["eagle"], *cfg_inputs(gpt, condition, mask))
    expected = speculative_decode(gpt, draft_model, condition, mask, sampling, [method], table).tokens
    pipeline.prompts.source = lambda *_: (features * mask[..., None], mask)  # in place of a T5
    assert torch.equal(pipeline.tokens(["a cat"], method, sampling).tokens, expected)
    assert pipeline.settings.guidance == 7.5 and pipeline.settings.top_k == 1000


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".safetensors"])
def test_tables_of_neighbors_in_other_files(models, converted, tmp_path, suffix):
    table = codebook_neighbors(models["vq"].quantize.embedding.weight, 20)
    path = tmp_path / f"top_20_indices{suffix}"
    if suffix == ".npz":
        np.savez(path, table.numpy())
    elif suffix == ".pt":
        torch.save(table.to(torch.int64), path)
    else:
        save_file({"indices": table.to(torch.int32)}, path)
    convert([path], converted)                                                # a folder takes parts later on, too
    assert torch.equal(load_file(converted / "neighbors.safetensors")["neighbors"], table)
    pipeline = Pipeline.load(converted)
    assert torch.equal(pipeline.neighbors(20), table)
    with pytest.raises(ValueError, match="k must be at most 20, the columns of its table of neighbors, got 21"):
        pipeline.neighbors(21)


def test_mars_files_draw_by_commands(models, files, tmp_path):
    out = tmp_path / "m"
    result = run("convert", files / "kl16.ckpt", files / "checkpoint-last.pth", "--heads", 2, "--out", out)
    assert result.exit_code == 0 and "MAR, 2 layers of width 32, 10 classes, 16 tokens" in result.output
    assert run("info", "--model", out).output.startswith(
        "continuous tokens: 16 of 4 numbers\nprompts: class ids, 0..9\ndraft model: none; mar needs none\n")
    assert "model must be a folder with config.json or mar.json" in run("info", "--model", tmp_path).output
    result = run("generate", "--model", out, "--prompt", 3, "--method", "mar:num_iter=4", "--seed", 5,
                 "--out", tmp_path / "x.png", status=0)
    sampling = ContinuousSampling.of([5], guidance=2.9)
    tokens = parallel_decode(models["mar"], torch.tensor([3]), sampling, 4).tokens
    images = models["kl"].decode_latents(tokens.unflatten(1, (4, 4)))         # which divides by 0.2325
    image = ((images[0].clamp(-1, 1).permute(1, 2, 0) + 1) * 127.5).round().byte().numpy()
    assert image.shape == (64, 64, 3)
    shown = Image.fromarray(image).resize((256, 256), Image.Resampling.BICUBIC)
    assert np.array_equal(np.array(Image.open(tmp_path / "x.png")), np.array(shown))
    for method, message in (("jacobi", "method must be one for continuous tokens, such as mar:num_iter=64"),
                            ("cspd", "method must be mar, which needs no draft model, got cspd: this model has no")):
        result = run("generate", "--model", out, "--prompt", 3, "--method", method, "--out", tmp_path / "y.png")
        assert result.exit_code == 2 and message in result.output
    convert([files / "checkpoint-last.pth", files / "draft-last.pth", files / "kl16.ckpt"], out, heads=2)
    pair = MARPair.load(out)
    assert pair.tokenizer.config.scale == 0.2325
    assert pair.mar_draft.config.dim == 16 and pair.tokens(["3"], "cspd", sampling).draft_forwards.item() > 0


@pytest.mark.parametrize("sources, options, message", [
    (["c2i_B_256.pt"], {}, "sources must have the GPT's tokenizer, such as vq_ds16_c2i.pt"),
    (["vq_ds16_c2i.pt"], {}, "sources must have a GPT, such as c2i_B_384.pt"),
    (["c2i_B_256.pt", "vq_ds16_c2i.pt"], {}, "image_size must be given, one of 256, 384, 512: no tensor of LlamaGen's "
     ".*; the name c2i_B_256.pt says 256"),
    (["c2i_B_384.pt", "vq_ds16_c2i.pt"], {"image_size": 256},
     "image_size must be 384, as the name of .*c2i_B_384.pt says, got 256; rename the file if its name is wrong"),
    (["t2i_XL_stage1_256.pt", "vq_ds16_c2i.pt"], {"image_size": 512}, "must be 256, as the name of .*stage1_256"),
    (["c2i_B_384.pt", "c2i_B_256.pt", "vq_ds16_c2i.pt"], {"image_size": 384}, "must be 256, as the name of .*B_256"),
    (["c2i_B_256.pt", "vq_ds16_c2i.pt"], {"image_size": 300}, "image_size must be one of 256, 384, 512, got 300"),
    (["c2i_B_256.pt", "vq_ds16_c2i.pt"], {"heads": None},
     r"2 layers of width 32, no published size \(B: 12 of 768, .*; heads \(--heads\) must be given"),
    (["c2i_B_256.pt", "kl16.ckpt"], {}, "sources must be of one family, got .*kl16.ckpt .* and .*c2i_B_256.pt"),
    (["c2i_B_256.pt", "t2i_XL_stage1_256.pt", "vq_ds16_c2i.pt"], {"image_size": 256},
     "must have the target's condition_tokens, (1|6), to draft for it, got (1|6)"),
    (["vq_ds16_c2i.pt", "vq_ds16_c2i.pt"], {}, "sources must have at most 1 of a kind, got .*, .*vq_ds16_c2i.pt"),
    (["llamagen_drafter", "LlamaGen-T2I", "vq_ds16_c2i.pt"], {"image_size": 512},
     "llamagen_drafter is for pictures of 256 pixels, not of 512|LlamaGen-T2I is for pictures of 256 pixels"),
    (["c2i_B_256.pt", "vq_ds16_c2i.pt", "llamagen_drafter"], {"image_size": 256, "text_encoder": "."},
     "text_encoder must not be given for a class-conditional model"),
    (["t2i_XL_stage1_256.pt", "vq_ds16_c2i.pt"], {"image_size": 256, "text_encoder": "LlamaGen-T2I"},
     "whose config.json cannot be read: KeyError"),
    (["nothing.pt"], {}, "nothing.pt does not exist"),
    (["kl16.ckpt"], {}, "sources must have a MAR, such as checkpoint-last.pth"),
    (["checkpoint-last.pth"], {}, "sources must have MAR's autoencoder, kl16.ckpt"),
    (["checkpoint-last.pth", "kl16.ckpt"], {"image_size": 256}, "image_size must be the MAR's 64, or not be given"),
    (["checkpoint-last.pth", "kl16.ckpt"], {"text_encoder": "."}, "text_encoder must not be given for MAR"),
])
def test_sources_that_do_not_make_a_model(files, tmp_path, monkeypatch, sources, options, message):
    monkeypatch.chdir(files)
    with pytest.raises(ValueError, match=message) as caught:
        convert([files / source for source in sources], tmp_path / "m", **{"heads": 2} | options)
    assert "\n" not in str(caught.value) and not (tmp_path / "m").exists()


def test_what_a_source_lacks_is_named(models, files, tmp_path):
    def written(state):
        torch.save({"model": state}, tmp_path / "x.pt")
        with pytest.raises(CheckpointError) as caught:
            convert([tmp_path / "x.pt", files / "vq_ds16_c2i.pt"], tmp_path / "m", image_size=256, heads=2)
        return str(caught.value)
    state = models["gpt"].state_dict()
    assert written({name: value for name, value in state.items() if not name.startswith("layers.0.feed_forward.w")}) \
        .endswith("x.pt lacks layers.0.feed_forward.w1.weight")
    some = {name: value for name, value in state.items() if "norm" not in name and "w3" not in name}
    assert written(some).endswith(
        "lacks tensors of LlamaGen's GPT, 2 layers of width 32, class-conditional (10 classes): "
        "layers.0.feed_forward.w3.weight, layers.0.attention_norm.weight, layers.0.ffn_norm.weight, "
        "layers.1.feed_forward.w3.weight, layers.1.attention_norm.weight and 2 more")
    assert written(state | {"wings": torch.zeros(1)}).endswith("(10 classes) has not: wings")
    assert written(state | {"norm.weight": torch.zeros(33)}).endswith("norm.weight must be (32,), got (33,)")
    assert written(state | {"norm.weight": torch.zeros(32, dtype=torch.complex64)}).endswith(
        "must hold numbers of 16, 32 or 64 bits, but norm.weight is complex64")
    assert written({"decoder.conv_blocks.0.res.0.conv1.weight": torch.zeros(1)}).endswith(
        "lacks encoder.conv_in.weight")
    assert written({"encoder.conv_in.weight": torch.zeros(4, 3, 3, 3), "decoder.conv_blocks.0.x": torch.zeros(1)}) \
        .endswith("lacks encoder.conv_blocks.0.res.0.conv1.weight")
    assert "is of no known model: it holds wings; known are" in written({"wings": torch.zeros(1)})
    assert "must be a table of neighbors (V, k) with k < V" in written({"ids": torch.zeros(3, 3, dtype=torch.int64)})
    vqgan = {"encoder.down.0.block.0.conv1.weight": torch.zeros(1), "quantize.embedding.weight": torch.zeros(4, 4)}
    assert "is of no known model" in written(vqgan)                           # Chameleon's tokenizer


def test_a_table_of_another_codebook_is_refused(models, files, converted, tmp_path):
    torch.manual_seed(5)
    for codes in (torch.randn(64, 4), torch.randn(65, 4)):
        np.save(tmp_path / "top.npy", codebook_neighbors(codes, 9).numpy())
        with pytest.raises(CheckpointError, match=r"is a table of another codebook: it is \(6., 9\)"):
            convert([tmp_path / "top.npy"], converted)
    unit = codebook_neighbors(models["vq"].codebook(), 9)                     # a table of normalized codes is one
    np.save(tmp_path / "top.npy", unit.numpy())
    convert([tmp_path / "top.npy"], converted)
    assert torch.equal(Pipeline.load(converted).neighbors(9), unit)
    with pytest.raises(CheckpointError, match="neighbors.safetensors would stay and belong to the tokenizer before"):
        convert([files / "vq_ds16_c2i.pt"], converted)


def test_a_table_is_looked_at_in_all_its_columns_and_over_all_its_rows(models, converted, tmp_path):
    right = codebook_neighbors(models["vq"].quantize.embedding.weight, 63).numpy().astype(np.int32)

    def refused(table):
        np.save(tmp_path / "top.npy", table)
        with pytest.raises(CheckpointError) as caught:
            convert([tmp_path / "top.npy"], converted)
        assert not (converted / "neighbors.safetensors").exists()
        return str(caught.value)

    for number in (-70000, 64):                                               # 64 codes: as uint16 both would be ids
        table = right.copy()
        table[50, 40] = number
        assert refused(table).endswith(f"must be a table of ids within 0..63, got {number}")
    table = right.copy()
    table[:, 40:] = table[:, 40:][:, ::-1]                                    # after the first 40 columns
    assert "is a table of another codebook" in refused(table)
    own = np.concatenate([np.arange(64, dtype=np.int32)[:, None], right[:, :-1]], 1)
    assert refused(own).endswith("the first column is the code itself: LANTERN's tables leave it out")


def test_rows_of_a_table_are_drawn_over_all_of_it():
    torch.manual_seed(0)
    codes = torch.randn(200, 4)
    table = codebook_neighbors(codes, 9).int()
    evenly = np.linspace(0, 199, converting.SAMPLE).astype(int)
    wrong = table.flip(1)
    wrong[evenly] = table[evenly]
    for neighbors, is_right in ((table, True), (wrong, False)):
        source = sources.SourceFile("top.npy", {"table": sources.Lazy.of(neighbors)})
        part = recognized_table(source, source.tensors["table"])
        if is_right:
            converting.check_table(part, codes)
        else:
            with pytest.raises(CheckpointError, match="of another codebook"):
                converting.check_table(part, codes)


def test_a_model_of_the_other_family_is_not_written_over(files, tmp_path):
    llamagen, of_mar = ["c2i_B_256.pt", "vq_ds16_c2i.pt"], ["checkpoint-last.pth", "kl16.ckpt"]
    for first, second, message in ((llamagen, of_mar, "config.json is of LlamaGen; choose another out"),
                                   (of_mar, llamagen, "mar.json is of MAR; choose another out")):
        out = tmp_path / first[0]
        convert([files / name for name in first], out, image_size=256 if first is llamagen else None, heads=2)
        before = contents(out)
        with pytest.raises(CheckpointError, match=f"without a model of the other family, but .*{message}"):
            convert([files / name for name in second], out, image_size=256 if second is llamagen else None, heads=2)
        assert contents(out) == before


def test_what_drafted_for_the_model_before_does_not_stay(models, files, tmp_path):
    gpts, mars = tmp_path / "gpts", tmp_path / "mars"
    sources = [files / name for name in ("c2i_B_256.pt", "c2i_small.pt", "vq_ds16_c2i.pt")]
    convert(sources, gpts, image_size=256, heads=2)
    save_file(EagleHead(CLASSES).state_dict(), gpts / "eagle.safetensors")
    message = "would stay and belong to the {} before: give what is to take their place together with the new"
    with pytest.raises(CheckpointError, match="eagle.safetensors " + message.format("GPT")):
        convert([files / "c2i_B_384.pt"], gpts, image_size=384, heads=2)
    (gpts / "eagle.safetensors").unlink()
    with pytest.raises(CheckpointError, match="small.safetensors and .*small.json " + message.format("GPT")):
        convert([files / "c2i_B_384.pt"], gpts, image_size=384, heads=2)
    convert([files / "c2i_B_384.pt", files / "c2i_small.pt"], gpts, image_size=384, heads=2)  # both again
    assert Pipeline.load(gpts).small.config.grid == 24
    convert([files / name for name in ("checkpoint-last.pth", "draft-last.pth", "kl16.ckpt")], mars, heads=2)
    with pytest.raises(CheckpointError, match="mar_draft.safetensors and .*mar_draft.json " + message.format("MAR")):
        convert([files / "checkpoint-last.pth"], mars, heads=2)

    config = json.loads((gpts / "small.json").read_text())
    (gpts / "small.json").write_text(json.dumps(config | {"grid": 16}))
    with pytest.raises(CheckpointError, match="small.json must have the target's grid, 24, to draft for it, got 16"):
        Pipeline.load(gpts)
    config = json.loads((mars / "mar_draft.json").read_text())
    (mars / "mar_draft.json").write_text(json.dumps(config | {"classes": 9}))
    with pytest.raises(CheckpointError, match="mar_draft.json must have the target's classes, 10, to draft for it"):
        MARPair.load(mars)


def test_heads_that_contradict_a_published_size_are_refused(files, tmp_path, monkeypatch):
    monkeypatch.setitem(llamagen.SIZES, "B", (2, 2, 32))
    sources = [files / "c2i_B_256.pt", files / "vq_ds16_c2i.pt"]
    with pytest.raises(ValueError, match=r"heads must be 2, those of .*c2i_B_256.pt .*, or not be given, got 99"):
        convert(sources, tmp_path / "m", image_size=256, heads=99)
    convert(sources, tmp_path / "m", image_size=256, heads=2)
    convert([files / "c2i_small.pt", *sources], tmp_path / "m", image_size=256, heads=4)  # of the one that drafts
    gpt, small = Pipeline.load(tmp_path / "m").gpt.config, Pipeline.load(tmp_path / "m").small.config
    assert (gpt.heads, small.heads, gpt.dim, small.dim) == (2, 4, 32, 16)


class Runs:
    def __reduce__(self):
        return os.mkdir, ("run-by-a-pickle",)


def test_no_code_in_a_file_is_run(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {}, "x": Runs()}, "zip.pt")
    torch.save({"model": {}, "x": Runs()}, "legacy.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Runs(), protocol=2))
    torch.save({"model": {}, "rng": np.random.RandomState(0).get_state()}, "numpy.pt")
    torch.jit.save(torch.jit.script(torch.nn.Identity()), "script.pt")  # torch's error advises to run it
    for name, needed in (("zip.pt", "posix.mkdir"), ("legacy.pt", "posix.mkdir"), ("numpy.pt", "numpy"),
                         ("script.pt", "TorchScript")):
        match = rf"to read it, code would be run \(.*{needed}.*\), which is refused"
        with pytest.raises(CheckpointError, match=match) as caught:
            convert([name], "m")
        assert str(caught.value).isprintable()                                # no escape codes
    np.save("objects.npy", np.array([Runs()], dtype=object), allow_pickle=True)
    np.savez("objects.npz", np.array([Runs()], dtype=object), allow_pickle=True)
    np.savez_compressed("zeros.npz", np.zeros((10**6, 2), np.int64))
    for name, message in (("plain.pt", ""), ("objects.npy", "cannot be read: .* Python objects"),
                          ("objects.npz", "cannot be read: Object arrays cannot be loaded"),
                          ("zeros.npz", "must unpack to at most 100 times its size, got 15 MB; numpy")):
        with pytest.raises(CheckpointError, match=f"{name} {message}"):
            convert([name], "m")
    assert not (tmp_path / "run-by-a-pickle").exists() and not (tmp_path / "m").exists()


def test_an_interruption_leaves_what_was_there(files, converted):
    before, written = contents(converted), 0
    assert len(before) == 5

    def fails(num_bytes, total):
        nonlocal written
        written += num_bytes
        if written > total // 3:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        convert([files / "c2i_B_384.pt", files / "vq_ds16_c2i.pt"], converted, image_size=384, heads=2,
                dtype=torch.float16, progress=fails)
    assert contents(converted) == before


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    living = set()

    def make(i):
        assert len(living) <= 1, "the one before is gone when the next one is made"
        tensor = torch.full((4,), float(i))
        living.add(i)
        weakref.finalize(tensor, living.discard, i)
        return tensor
    tensors = {str(i): sources.Lazy((4,), torch.float32, lambda i=i: make(i)) for i in range(5)}
    sources.write_lazy_tensors(tmp_path / "x.safetensors", tensors, lambda num_bytes: None)
    assert {name: value[0].item() for name, value in load_file(tmp_path / "x.safetensors").items()} == {
        str(i): i for i in range(5)}
