"""The models: official names and sizes, caches that change nothing, and errors that name what is wrong."""
import copy
import dataclasses
import json

import pytest
import torch
import torch.nn.utils.prune
from safetensors.torch import save_file

import specvis.models.layers
from benchmarks.baselines import attention_under_a_mask
from specvis.decoding.sampling import Sampling
from specvis.models.eagle import EagleHead
from specvis.models.interface import Nodes, chain_ancestors
from specvis.models.layers import grid_rotations
from specvis.models.llamagen import GPT, SIZES, GPTConfig, class_config, text_config
from specvis.models.vq import VQ, VQConfig
from specvis.models.words import UnknownWords, Words
from specvis.pipelines.checkpoint import CheckpointError, load_weights, read_weights
from specvis.pipelines.discrete import Pipeline
from specvis_kernels import backends
from tests.tiny import tiny_pipeline

MILLIONS = {"B": 111, "L": 343, "XL": 775, "XXL": 1411, "XXXL": 3893, "1B": 1200, "3B": 3097, "7B": 6615}


def parameters(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes(size):
    with torch.device("meta"):
        assert round(parameters(GPT(class_config(size))) / 1e6) == MILLIONS[size]


def test_text_model_and_eagle_head_have_the_published_names_and_sizes():
    with torch.device("meta"):
        gpt, head, vq = GPT(text_config("XL")), EagleHead(text_config("XL")), VQ(VQConfig())
    assert round(parameters(gpt) / 1e6) == 778
    names = {name: tuple(value.shape) for name, value in gpt.state_dict().items()}
    assert names["cls_embedding.uncond_embedding"] == (120, 2048)
    assert names["cls_embedding.cap_proj.fc1.weight"] == (1280, 2048)
    assert names["layers.35.attention.wqkv.weight"] == (3840, 1280)
    assert names["layers.0.feed_forward.w2.weight"] == (1280, 3584)
    assert round(parameters(head) / 1e6, 1) == 44.6
    assert set(head.state_dict()) == {
        "embed_tokens.weight", "fc.weight", "fc.bias", "layers.0.post_attention_layernorm.weight",
        *(f"layers.0.self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down"))}
    assert round(parameters(vq) / 1e6, 1) == 71.9 and len(vq.state_dict()) == 344
    assert "decoder.conv_blocks.1.res.0.nin_shortcut.weight" in vq.state_dict()
    assert "decoder.conv_blocks.0.attn.2.proj_out.weight" in vq.state_dict()
    assert "encoder.conv_blocks.3.downsample.conv.weight" in vq.state_dict()


def test_rotations_are_zero_at_conditions_and_turn_by_row_then_column():
    rotations = grid_rotations(grid=4, head_dim=8, condition=3)
    assert rotations.shape == (3 + 16, 4, 2) and (rotations[:3] == 0).all()
    cosine, sine = rotations[3 + 4 * 2 + 1].unbind(-1)             # row 2, column 1; frequencies 1 and 1/100
    assert torch.allclose(torch.atan2(sine, cosine), torch.tensor([2.0, 0.02, 1.0, 0.01]))
    assert torch.allclose(cosine ** 2 + sine ** 2, torch.ones(4))


def test_the_null_class_and_the_head_s_rotations():
    """The null class comes after the others. The head's positions are the target's, without the first condition's."""
    gpt = GPT(GPTConfig(dim=8, layers=1, heads=2, vocabulary=5, grid=2, classes=3))
    assert torch.equal(gpt.null_condition(2)[:, 0], gpt.cls_embedding.embedding_table.weight[[3, 3]])
    pipeline = tiny_pipeline()
    assert torch.equal(pipeline.eagle.rotations, pipeline.gpt.rotations[1:])


def test_half_precision_keeps_the_rotations():
    pipeline = tiny_pipeline().to(torch.bfloat16)
    condition, padding_mask = pipeline.gpt.condition(pipeline.words(pipeline.words.encode(["red heart"])))
    half = pipeline.gpt.teacher_forced(condition, padding_mask, torch.arange(16)[None]).float()
    pipeline.float()
    whole = pipeline.gpt.teacher_forced(condition.float(), padding_mask, torch.arange(16)[None])
    assert pipeline.gpt.rotations.dtype == torch.float32 and (half - whole).norm() < 0.03 * whole.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["vanilla", "jacobi:window=5", "jacobi:window=5:refresh=2", "lantern:k=8"])
def test_logits_of_the_model_s_dtype_give_the_tokens_of_float32(monkeypatch, method, dtype):
    """The ops compute in float32, so they may read what the model made. By modules: `packed_linear` gives float32."""
    monkeypatch.setattr(specvis.models.layers, "USE_KERNELS", False)
    pipeline, made, logits = tiny_pipeline().to(dtype), [], GPT.logits

    def tokens(as_float32):
        def seen(gpt, hidden):
            made.append(logits(gpt, hidden))
            return made[-1].float() if as_float32 else made[-1]

        monkeypatch.setattr(GPT, "logits", seen)
        return pipeline.tokens(["red heart", "blue heart"], method, Sampling.of([0, 1], guidance=2.0)).tokens

    assert torch.equal(tokens(False), tokens(True))
    assert {each.dtype for each in made} == {dtype}


@pytest.mark.parametrize("config", [
    GPTConfig(dim=32, layers=2, heads=2, vocabulary=64, grid=4, classes=10, ffn_multiple=16),
    GPTConfig(dim=40, layers=2, heads=2, vocabulary=64, grid=4, condition_tokens=3, caption_dim=8, ffn_multiple=16),
])
def test_reading_token_by_token_equals_reading_at_once(config):
    torch.manual_seed(0)
    gpt = GPT(config).eval()
    tokens = torch.randint(64, (2, 16))
    source = torch.tensor([1, 10]) if config.classes else torch.randn(2, 3, 8)
    padding_mask = None if config.classes else torch.tensor([[False, True, True], [True, True, True]])
    condition, padding_mask = gpt.condition(source, padding_mask)
    S = condition.shape[1]
    whole = gpt.teacher_forced(condition, padding_mask, tokens)
    cache = gpt.new_cache(2, S + 16)
    parts = [gpt.prefill(condition, padding_mask, cache)]
    for i in range(15):
        nodes = Nodes(torch.zeros(1, 1, dtype=torch.int64), torch.full((2,), S + i),
                      torch.ones(2, 1, 1, dtype=torch.int64), padding_mask, S + 16)
        parts.append(gpt.extend(tokens[:, i: i + 1], nodes, cache))
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)


def test_a_changed_weight_is_never_read_as_it_was():
    gpt = tiny_pipeline().gpt
    condition, padding_mask = gpt.condition(torch.randn(1, 3, 8))
    tokens = torch.randint(64, (1, 16))

    def logits():
        with torch.no_grad():
            return gpt.logits(gpt.teacher_forced(condition, padding_mask, tokens))

    def by_plain_layers():  # with gradients no weight is packed
        model = copy.deepcopy(gpt)
        return model.logits(model.teacher_forced(condition, padding_mask, tokens)).detach()

    @torch.enable_grad()
    def fused_step():  # it writes to the weights and does not count that
        gpt.requires_grad_(True)
        gpt.logits(gpt.teacher_forced(condition.detach(), padding_mask, tokens)).square().mean().backward()
        torch.optim.AdamW(gpt.parameters(), lr=0.1, fused=True).step()
        gpt.requires_grad_(False)

    before = logits()
    for change in (
            lambda: gpt.layers[1].feed_forward.w2.weight.add_(0.1),
            lambda: gpt.output.weight.mul_(2),
            lambda: gpt.load_state_dict({name: value + 0.1 for name, value in gpt.state_dict().items()}),
            lambda: (gpt.layers[0].attention.wqkv.weight.data.mul_(4), gpt.new_cache(1, 1)),
            lambda: (gpt.layers[0].feed_forward.w1.weight.data.neg_(), gpt.new_cache(1, 1)),
            lambda: (gpt.output.weight.data.neg_(), gpt.new_cache(1, 1)),
            lambda: (gpt.output.weight.data.mul_(-2), gpt.new_cache(1, 1)),
            lambda: (gpt.to(torch.bfloat16).float(), gpt.new_cache(1, 1)),  # the memory may be where the old one was
            lambda: (gpt.output.weight.data.copy_(gpt.output.weight.data.flip(0)), gpt.new_cache(1, 1)),
            lambda: (gpt.output.weight.data.copy_(gpt.output.weight.data.flip(1)), gpt.new_cache(1, 1)),
            lambda: setattr(gpt.output.weight, "data", gpt.output.weight.data + 0.3),
            fused_step,
            lambda: setattr(gpt.layers[0].attention.wo, "weight", torch.nn.Parameter(torch.eye(32))),
            lambda: (setattr(gpt.layers[0].attention.wo.weight, "data", gpt.layers[0].attention.wo.weight.data.flip(1)),
                     gpt.new_cache(1, 1)),  # the sum of its numbers is the same
            lambda: (setattr(gpt.output, "bias", torch.nn.Parameter(torch.arange(64.0))), gpt.new_cache(1, 1)),
            lambda: (setattr(gpt.output, "bias", None), gpt.new_cache(1, 1)),
            lambda: torch.nn.utils.prune.l1_unstructured(gpt.output, "weight", 0.5)):
        with torch.no_grad():
            change()
        after = logits()
        error = (after - by_plain_layers()).abs().max()
        assert error < 1e-5 * after.abs().max() and 20 * error < (after - before).abs().max()
        before = after
    assert torch.equal(copy.deepcopy(gpt).tok_embeddings.weight, gpt.tok_embeddings.weight)
    assert torch.equal(copy.deepcopy(gpt).logits(condition), gpt.logits(condition))


class Adapted(torch.nn.Module):
    """A linear layer and what was added to it by training, as LoRA does."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer, self.added = layer, torch.nn.Linear(layer.in_features, layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.added(x)


def read_into_a_cache(gpt, condition, padding_mask):
    torch.manual_seed(0)  # for dropout
    return gpt.prefill(condition, padding_mask, gpt.new_cache(1, 3))


@pytest.mark.parametrize("change", [
    lambda gpt, hook: None,
    lambda gpt, hook: setattr(gpt.layers[0].attention, "wqkv", Adapted(gpt.layers[0].attention.wqkv)),
    lambda gpt, hook: setattr(gpt.layers[1].feed_forward, "w2", torch.nn.Linear(96, 32)),  # it has a bias
    lambda gpt, hook: gpt.layers[0].attention.register_forward_hook(hook),
    lambda gpt, hook: setattr(gpt, "layers", gpt.layers[1:]),
    lambda gpt, hook: gpt.train()], ids=["none", "adapter", "bias", "hook", "fewer", "dropout"])
def test_decoding_reads_the_layers_that_are_there(change):
    gpt, calls = tiny_pipeline().gpt.requires_grad_(True), []
    for block in gpt.layers:
        block.dropout.p = 0.5
    condition, padding_mask = gpt.condition(torch.randn(1, 3, 8))
    with torch.no_grad():
        read_into_a_cache(gpt, condition, padding_mask)
    change(gpt, lambda *_: calls.append(1))
    with torch.no_grad():
        packed, num_calls = read_into_a_cache(gpt, condition, padding_mask), len(calls)
    plain = read_into_a_cache(gpt, condition.detach(), padding_mask)  # with gradients no weight is packed
    assert plain.requires_grad and torch.allclose(packed, plain, atol=1e-5) and len(calls) == 2 * num_calls


@torch.no_grad()
def test_autocast_around_a_model():
    """Products are in bfloat16 then, and the cache stays as it is."""
    gpt = tiny_pipeline().gpt
    condition, padding_mask = gpt.condition(torch.randn(1, 3, 8))
    plain = read_into_a_cache(gpt, condition, padding_mask)
    with torch.autocast("cpu", torch.bfloat16):
        assert (read_into_a_cache(gpt, condition, padding_mask) - plain).abs().max() < 0.1 * plain.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("register", [
    lambda gpt, hook: gpt.layers[1].register_forward_hook(hook),
    lambda gpt, hook: torch.nn.modules.module.register_module_forward_hook(hook)], ids=["layer", "global"])
def test_a_hook_that_is_added_while_a_picture_is_decoded_is_called(register):
    gpt, calls = tiny_pipeline().gpt, []
    condition, padding_mask = gpt.condition(torch.randn(1, 3, 8))
    cache = gpt.new_cache(1, 3)
    handle = register(gpt, lambda module, *_: calls.append(module))
    try:
        gpt.prefill(condition, padding_mask, cache)
    finally:
        handle.remove()
    assert gpt.layers[1] in calls


@pytest.mark.skipif("cpu" not in backends("decoder_layers"), reason="needs the C++ kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_read_to_the_same_bits_beside_others(dtype, monkeypatch):
    torch.manual_seed(0)
    config = GPTConfig(dim=128, layers=3, heads=2, vocabulary=512, grid=12, classes=10, ffn_multiple=16)
    gpt = GPT(config).eval().requires_grad_(False).to(dtype)
    for weight in gpt.parameters():
        weight.mul_(5) if weight.ndim == 2 else None     # scores that matter
    condition, padding_mask = gpt.condition(torch.tensor([1, 10]))
    tokens = torch.randint(512, (2, 144))

    def logits_by(width):
        """Logits at all tokens, `width` at a time."""
        cache, parts = gpt.new_cache(2, 1 + 144), []
        gpt.prefill(condition, padding_mask, cache)
        for first in range(0, 144, width):
            chunk = tokens[:, first: first + width]
            n = chunk.shape[1]
            nodes = Nodes(torch.arange(n)[None], torch.full((2,), 1 + first),
                          chain_ancestors(2, n, "cpu"), padding_mask, 1 + first + n)
            parts.append(gpt.logits(gpt.extend(chunk, nodes, cache)))
        return torch.cat(parts, 1)

    with torch.no_grad():
        one_by_one = logits_by(1)
        assert all(torch.equal(logits_by(width), one_by_one) for width in (2, 5, 9, 17, 33))
        monkeypatch.setattr(specvis.models.layers, "USE_KERNELS", False)
        monkeypatch.setattr(specvis.models.layers, "tree_attention", attention_under_a_mask)
        assert not torch.equal(logits_by(17), logits_by(1))  # what the above would say of PyTorch's modules


def test_padding_of_a_caption_changes_nothing():
    pipeline = tiny_pipeline()
    tokens = torch.randint(64, (2, 16))
    padding_mask = torch.tensor([[False, False, True], [True, True, True]])
    condition, padding_mask = pipeline.gpt.condition(torch.randn(2, 3, 8), padding_mask)
    before = pipeline.gpt.teacher_forced(condition, padding_mask, tokens)[:, 2:]
    condition[0, 0] += 1.0
    assert torch.equal(pipeline.gpt.teacher_forced(condition, padding_mask, tokens)[:, 2:], before)


def test_tokenizer_round_trip_keeps_shapes_and_codes_are_unit():
    """A code decodes as its unit vector."""
    vq = tiny_pipeline().tokenizer
    tokens = vq.encode(torch.rand(3, 3, 8, 8) * 2 - 1)
    assert tokens.shape == (3, 16) and tokens.dtype == torch.int64
    assert vq.decode(tokens).shape == (3, 3, 8, 8)
    assert torch.allclose(vq.codebook().norm(dim=-1), torch.ones(64))
    with pytest.raises(ValueError, match=r"images must be \(B, 3, H, W\), H and W multiples of 2, got \(1, 3, 7, 8\)"):
        vq.encode(torch.zeros(1, 3, 7, 8))
    before = vq.decode(torch.arange(16)[None])
    vq.quantize.embedding.weight.data *= 3
    assert torch.allclose(vq.decode(torch.arange(16)[None]), before, atol=1e-6)


def test_prompt_words():
    words = Words(["", "fluent-3d", "red", "heart"], length=3, width=4)
    assert words.encode(["red heart", "heart"]).tolist() == [[2, 3, 2], [3, 3, 3]]
    with pytest.raises(UnknownWords, match=r"'hart' \(near: heart\), 'xyzzy' \(nothing near it; specvis info --words"):
        words.encode(["red hart xyzzy"])
    for prompt, count in (("red red red heart", 4), ("", 0)):
        with pytest.raises(ValueError, match=f"1 to 3 words, style included, got {count}"):
            words.encode([prompt])


def test_a_checkpoint_of_another_model_names_the_tensor(tmp_path):
    config = GPTConfig(dim=32, layers=1, heads=2, vocabulary=64, grid=4, classes=10, ffn_multiple=16)
    gpt = GPT(config)
    torch.save({"model": gpt.state_dict()}, tmp_path / "official.pt")           # as the official files are wrapped
    save_file({"other": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    save_file(gpt.state_dict() | {"extra": torch.zeros(1)}, tmp_path / "more.safetensors")
    load_weights(GPT(config), tmp_path / "official.pt")
    for changes, file, message in (
            ({"dim": 64}, "official.pt", r"embedding_table.weight must be \(11, 64\), got \(11, 32\)"),
            ({"layers": 2}, "official.pt", "lacks layers.1.attention.wqkv.weight"),
            ({}, "foreign.safetensors", "lacks cls_embedding"), ({}, "more.safetensors", "it holds extra")):
        with pytest.raises(CheckpointError, match=message):
            load_weights(GPT(dataclasses.replace(config, **changes)), tmp_path / file)
    for content in (b"hello", b"\x89PNG\r\n\x1a\n" + bytes(100)):  # nobody is advised to run code in it
        (tmp_path / "file.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"file.pt cannot be read \(truncated, or not a checkpoint\?\)$"):
            read_weights(tmp_path / "file.pt")


def test_a_pipeline_saved_and_loaded_is_the_same_to_half_precision(tmp_path):
    pipeline = tiny_pipeline()
    pipeline.save(tmp_path)
    loaded = Pipeline.load(tmp_path)
    for name, value in pipeline.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.half().float() if "used" not in name else value), name
    assert Pipeline.load(tmp_path, dtype=torch.bfloat16).gpt.output.weight.dtype == torch.bfloat16


def test_a_config_says_which_fields_are_wrong(tmp_path):
    with pytest.raises(ValueError, match="dim / heads must be a multiple of 4 and at most 256, got 520 / 2"):
        GPTConfig(dim=520, layers=1, heads=2, classes=10)
    GPTConfig(dim=512, layers=1, heads=2, classes=10)
    tiny_pipeline().save(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for changed, message in (
            (config | {"wings": 2}, "unknown field 'wings'; its fields are dim, layers, heads, .*, ffn_multiple, "),
            ({name: value for name, value in config.items() if name != "heads"}, "missing field 'heads'; its fields"),
            ({"dim": 8, "wings": 2}, "unknown field 'wings', missing field 'layers', missing field 'heads'; its"),
            ([1], "cannot be read as GPTConfig: 'list' object has no attribute 'items'")):
        path.write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=f"config .*config.json:? {message}"):
            Pipeline.load(tmp_path)
    path.write_text(json.dumps(config))
    (tmp_path / "vocabulary.json").write_text(json.dumps({"texts": [""]}))
    with pytest.raises(CheckpointError, match="unknown field 'texts', missing field 'words'; its fields are words"):
        Pipeline.load(tmp_path)


@torch.inference_mode()
def test_a_prompt_that_is_longer_than_the_cache_is_refused():
    gpt = tiny_pipeline().gpt
    condition, padding_mask = gpt.condition(torch.zeros(2, 3, 8))
    for cache, got in ((gpt.new_cache(2, 2), "float32 with 2 rows and 2 columns"),
                       (gpt.new_cache(3, 9), "float32 with 3 rows and 9 columns"),
                       (tiny_pipeline().gpt.bfloat16().new_cache(2, 9), "bfloat16 with 2 rows and 9 columns")):
        with pytest.raises(ValueError, match=f"cache must be float32 with R=2 rows and at least 3 columns, got {got}"):
            gpt.prefill(condition, padding_mask, cache)


def test_hooks_see_every_forward():
    """`specvis compare` times models by them."""
    pipeline, calls = tiny_pipeline(), []
    for name in ("gpt", "eagle"):
        getattr(pipeline, name).register_forward_hook(lambda *_, name=name: calls.append(name))
    decoded = pipeline.tokens(["red heart"], "eagle1:tree=chain-2", Sampling.of([0]))
    steps = decoded.target_forwards.item() - 1
    assert calls.count("gpt") == 1 + steps
    assert calls.count("eagle") == 2 + 2 * steps  # it reads the condition, the new tokens, and the inner drafts
