"""Chameleon, Emu3, Janus and GLM-Image as targets, in tiny sizes: what they compute is what transformers does."""
import copy
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from specvis import Sampling, decode, jacobi_decode, method, speculative_decode
from specvis.decoding.draft_model import SmallDraftModel
from specvis.decoding.sampling import cfg_inputs
from specvis.models.interface import ModelCache, Nodes, TargetModel, num_tokens
from specvis.models.layers import Packing
from specvis.models.transformers import (
    Chameleon,
    Emu3,
    GLMImage,
    ImageModel,
    JanusPro,
    anole,
    lumina_mgpt,
)
from specvis_kernels import draw_tokens, tree_links
from specvis_kernels.compat._layers import IN_PANELS
from tests.families import (
    FAMILIES,
    GRIDS,
    HAS_GLM_IMAGE,
    C,
    S,
    chameleon_model,
    emu3_model,
    glm_image_model,
    janus_model,
    needs_glm_image,
    released,
    saved,
    saved_vqgan,
    target_of,
    transformers,
)

pytestmark = pytest.mark.filterwarnings("error::FutureWarning")  # of a name that transformers gives up

B = 3
PROMPTS = [[1, 20, 21, 7], [1, 22, 23, 24, 25, 26, 7], [1, 27, 7]]


def test_a_model_without_janus_ids_is_refused():
    for name, message in (("pad_token_id", "generation_config.bos_token_id and pad_token_id.*, got 1 and None .set"),
                          ("generation_kwargs", "must be a JanusForConditionalGeneration with generation_config")):
        model = janus_model(0)
        setattr(model.generation_config, name, None)
        with pytest.raises(ValueError, match=message):
            JanusPro(model, S)


@pytest.fixture(scope="module")
def targets():
    """(family, seed) -> a target of its own"""
    made = {}

    def of(family, seed=0):
        if (family, seed) not in made:
            made[family, seed] = target_of(family, seed)
        return made[family, seed]
    return of


def own_logits(target, prompt, tokens):
    """Logits (len(tokens) + 1, C) of what follows the prompt, by transformers alone, of one sequence without padding.

    ChameleonForConditionalGeneration sets the logits of image ids to the least number: its head is applied here.
    """
    model, prompt = target.model, torch.tensor([prompt])
    tokens = torch.as_tensor(tokens, dtype=torch.int64)[None]
    with torch.no_grad():
        if isinstance(target, JanusPro):
            x = torch.cat([target.embed(prompt), model.prepare_embeddings_for_image_generation(tokens)], 1)
            logits = model.model.generation_head(model.model.language_model(inputs_embeds=x).last_hidden_state)
        else:
            ids, positions = torch.cat([prompt, target.ids[tokens]], 1), None
            if isinstance(target, GLMImage):
                positions, _ = model.model.get_rope_index(prompt, torch.tensor(GRIDS))
                positions = torch.cat([positions, model.model._cached_decode_position_ids[0, :, None]], 2)
                positions = positions[..., :ids.shape[1]]
            logits = model(input_ids=ids, position_ids=positions).logits
            if isinstance(target, Chameleon):
                logits = model.lm_head(model.model(input_ids=ids).last_hidden_state)
            logits = logits[..., target.ids[:C]]
    return logits[0, prompt.shape[1] - 1:]


def own_null(target, prompt):
    """What guidance is measured against; None: nothing."""
    if isinstance(target, GLMImage):
        return None
    if isinstance(target, JanusPro):
        return [prompt[0], *[0] * (len(prompt) - 2), prompt[-1]]
    ids, is_real = target.null_prompt
    return ids[is_real].tolist()


def tokens_of(target, n, seed=0):
    """n tokens of each of B images, newlines where they belong."""
    random = torch.randint(0, C, (B, n), generator=torch.Generator().manual_seed(seed))
    ids = target.id_range(torch.arange(n).expand(B, -1))
    return random if ids is None else random.clamp(min=ids[..., 0])


def sampling(temperature=1.0, guidance=2.0):
    return Sampling.of([5, 6, 7], guidance=guidance, temperature=temperature)


def sampling_for(target):
    return sampling(guidance=2.0 if own_null(target, PROMPTS[0]) else 1.0)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "decoder_layers", "as_on_a_gpu"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_are_the_models_own(targets, family, attention, request):
    """A prompt is read, a tree after images of different lengths, and a token after the committed nodes."""
    target = targets(family)
    assert isinstance(target, TargetModel) and isinstance(target.new_cache(1, 1), ModelCache)
    if attention == "as_on_a_gpu":
        request.getfixturevalue(attention)
        target, attention = copy.deepcopy(target), "decoder_layers"
        target.model.requires_grad_(False)
    if attention == "decoder_layers" and family == "glm" and IN_PANELS:
        with pytest.raises(ValueError, match="model must have layers as Llama, Emu3 or Chameleon have them, got"):
            target.use_decoder_layers()
        return
    if attention == "decoder_layers":
        target.use_decoder_layers()
    else:
        target.decoder.set_attn_implementation(attention)
    condition, padding_mask = cfg_inputs(target, *target.condition(PROMPTS))
    cache, L = target.new_cache(len(condition), S + 16 + 6), 5
    prompts = [*PROMPTS, *filter(None, (own_null(target, prompt) for prompt in PROMPTS))]
    drawn, counts, drafts = tokens_of(target, L), [5, 2, 3], torch.tensor([[1, 2, 3, 4, 5, 6]]).repeat(B, 1)
    logits = target.logits(target.prefill(condition, padding_mask, cache)[:, -1:])

    def check(logits, node, *paths):
        """paths: the tokens before the node in each image"""
        for row, prompt in enumerate(prompts):
            own = own_logits(target, prompt, paths[row % B])[-1]
            torch.testing.assert_close(logits[row, node, :C], own, atol=2e-4, rtol=1e-5)
        assert logits.dtype == torch.float32 and logits.shape[2] == target.vocab_size

    check(logits, 0, [], [], [])
    causal = tree_links(torch.arange(-1, L - 1)[None].int()).ancestors
    nodes = Nodes(torch.arange(L)[None], torch.full((B,), S), causal.expand(B, -1, -1), padding_mask, S + L)
    target.extend(nodes.of_rows(drawn), nodes, cache)  # all five of each; trees are written over some

    links = tree_links(torch.tensor([[-1, 0, 0, 1, 1, 2]], dtype=torch.int32).repeat(B, 1))
    lengths = torch.tensor(counts) + S - 1                             # the newest token is the root
    drafts[:, 0] = drawn[torch.arange(B), torch.tensor(counts) - 1]
    nodes = Nodes(links.depth, lengths, links.ancestors, padding_mask, S + L + 6)
    logits = target.logits(target.extend(nodes.of_rows(drafts), nodes, cache))
    for node, path in enumerate(([], [2], [3], [2, 4], [2, 5], [3, 6])):
        check(logits, node, *([*drawn[b, :n].tolist(), *path] for b, n in enumerate(counts)))

    accepted = torch.tensor([[2, 5], [1, 4], [1, -1]], dtype=torch.int32)
    num_accepted, paths = torch.tensor([2, 2, 1], dtype=torch.int32), ([3, 6], [2, 5], [2])
    cache.commit(accepted, num_accepted, lengths)
    itself = tree_links(torch.tensor([[-1]], dtype=torch.int32).repeat(B, 1)).ancestors
    nodes = Nodes(torch.zeros(1, 1, dtype=torch.int64), lengths + 1 + num_accepted, itself, padding_mask, S + L + 6)
    num_calls = []
    hook = target.decoder.register_forward_hook(lambda *_: num_calls.append(1))
    logits = target.logits(target.extend(torch.full((len(prompts), 1), 9), nodes, cache))
    hook.remove()
    assert len(num_calls) == (attention != "decoder_layers")
    check(logits, 0, *([*drawn[b, :n].tolist(), *path, 9] for b, (n, path) in enumerate(zip(counts, paths))))
    target.decoder.set_attn_implementation("sdpa")
    target.packing = None


def written_out(target, settings):
    """The baseline by transformers alone: every image by itself, without a cache, without padding, without a mask."""
    L = num_tokens(target)
    images = []
    for b, prompt in enumerate(PROMPTS):
        image, null = [], own_null(target, prompt)
        for i in range(L):
            if target.has_newline and i % target.grid[1] == target.grid[1] - 1:
                image.append(C)
                continue
            rows = (p and own_logits(target, p, image)[-1][None, None] for p in (prompt, null))
            one = settings[[b]]
            image.append(draw_tokens(*rows, one.guidance, one.temperature, one.top_k, one.top_p, one.seeds,
                                     torch.tensor([[i]])).tokens.item())
        images.append(image)
    return torch.tensor(images)


SAME = [method("jacobi", window=5), method("jacobi"),
        method("eagle2", draft_model="small", depth=3, width=3, nodes=10),
        method("adt-tree", draft_model="small", nodes=10),
        method("speculative", draft_model="small", seed_exact=True)]


def decoded(target, draft, m, settings, neighbors=None, **more):
    condition, padding_mask = target.condition(PROMPTS)
    if m.drafting == "jacobi":
        return jacobi_decode(target, condition, padding_mask, settings, [m] * B, neighbors, **more)
    draft_model = SmallDraftModel(draft, *cfg_inputs(draft, condition, padding_mask))
    return speculative_decode(target, draft_model, condition, padding_mask, settings, [m] * B, neighbors, **more)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_method_draws_what_transformers_alone_would(targets, family):
    """Batches of prompts of different lengths, with guidance. The target itself drafts, or another model."""
    target, other = targets(family), targets(family, 1)
    settings = sampling_for(target)
    baseline = decode(target, *target.condition(PROMPTS), settings)
    assert torch.equal(baseline.tokens, written_out(target, settings))
    unguided = decode(target, *target.condition(PROMPTS), sampling(guidance=1.0)).tokens
    assert torch.equal(baseline.tokens, unguided) == (family == "glm")
    for m in SAME:
        result = decoded(target, target, m, settings)
        assert torch.equal(result.tokens, baseline.tokens), m.label
        assert m.drafting == "jacobi" or (result.tau > 1.2).all()
    assert torch.equal(decoded(target, other, SAME[3], settings).tokens, baseline.tokens)
    some = decoded(target, target, SAME[0], settings, batch=2)  # the third takes the place of the first that is done
    assert torch.equal(some.tokens, baseline.tokens)
    begun = decode(target, *target.condition(PROMPTS), settings, known_tokens=baseline.tokens[:, :6])
    assert torch.equal(begun.tokens, baseline.tokens)


def test_greedy_janus_is_its_own_generate(targets):
    target = targets("janus")
    ids, is_real = target.padded(PROMPTS)
    arguments = dict(input_ids=torch.where(is_real, ids, 0), attention_mask=is_real.long(), do_sample=False,
                     generation_mode="image", guidance_scale=3.0, use_cache=True)
    own = target.model.generate(**arguments)
    assert torch.equal(decode(target, *target.condition(ids, is_real), sampling(0.0, 3.0)).tokens, own)
    assert len(own.unique()) > 2


def test_greedy_emu3_is_its_own_generate(targets):
    target = targets("emu3")
    null, is_real = target.null_prompt
    expected = decode(target, *target.condition(PROMPTS), sampling(0.0, 3.0)).tokens
    for prompt, tokens in zip(PROMPTS, expected):
        start = len(prompt)

        def allowed(_, ids, start=start):
            return [5] if (len(ids) - start) % 5 == 4 else list(range(8, 18))

        own = target.model.generate(input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, start).long(),
                                    max_new_tokens=15, do_sample=False, prefix_allowed_tokens_fn=allowed,
                                    guidance_scale=3.0, negative_prompt_ids=null[is_real][None])
        assert torch.equal(own[0, start:], target.ids_of(tokens))
    assert len(expected.unique()) > 3


@needs_glm_image
def test_greedy_glm_image_is_its_own_generate(targets):
    """Its rope index has the positions, and its loop the tokens; prompts of different lengths are padded."""
    target = targets("glm")
    ids, is_real = target.padded(PROMPTS)
    own = target.model.generate(input_ids=torch.where(is_real, ids, 0), attention_mask=is_real.long(),
                                image_grid_thw=torch.tensor(GRIDS * B), images_per_sample=torch.tensor([2] * B),
                                max_new_tokens=14, do_sample=False, suppress_tokens=[10, 11, 12])
    tokens = decode(target, *target.condition(ids, is_real), sampling(0.0, 1.0)).tokens
    assert torch.equal(own[:, S:], target.ids_of(tokens)) and len(tokens.unique()) > 4
    assert torch.equal(target.codes_of(tokens), own[:, S + 6:].view(B, 2, 4))


@needs_glm_image
def test_what_glm_image_refuses(targets):
    target, model = targets("glm"), targets("glm").model
    for grids in ([], [1, 2, 3], GRIDS[:1], [*GRIDS, *GRIDS[:1]], [*GRIDS, GRIDS[0], [1, 3, 3]], [[1, 2], [1, 2]],
                  [[2, 2, 4], [1, 2, 3]], [[1, 2, 4], [1, 0, 3]]):
        with pytest.raises(ValueError, match="image_grid_thw must be 1, rows, columns of the picture and of its prev"):
            GLMImage(model, S, grids)
    assert torch.equal(GLMImage(model, S, torch.tensor(GRIDS * B)).axes, target.axes)
    for prompt in ([1, 20, 21], [1, 7, 20, 11, 21, 7]):
        with pytest.raises(ValueError, match=r"prompts must end with 7, which begins an image, and have no picture, "
                           "whose end is 11: both grids of image_grid_thw are drawn; got a prompt that ends with "
                           f"{prompt[-1]} and has {prompt.count(11)} pictures"):
            target.condition([[1, 7], prompt])
    with pytest.raises(ValueError, match="guidance must be 1 for GLMImage, which has nothing to measure it against, "
                       "got 1.5"):
        decode(target, *target.condition(PROMPTS), sampling(guidance=[1.0, 1.5, 1.0]))
    with pytest.raises(ValueError, match="prefix_len, grid and the number of ids must be at least 1, got 0, "):
        GLMImage(model, 0, GRIDS)
    with pytest.raises(ValueError, match="model must have a decoder of codes .* GlmImageForCond.* has none"):
        target.pictures(tokens_of(target, 14))


def test_pictures_and_what_tokens_stand_for(targets):
    for family, size in (("emu3", (8, 6)), ("janus", (8, 8))):
        target = targets(family)
        pictures = target.pictures(tokens_of(target, target.grid[0] * target.grid[1]))
        assert [picture.size for picture in pictures] == [size] * B
        assert pictures[0].tobytes() != pictures[1].tobytes()
    janus, tokens = targets("janus"), tokens_of(targets("janus"), 16)
    with torch.no_grad():
        own = janus.model.decode_image_tokens(tokens)[2].clamp(-1, 1)
    shown = torch.tensor(list(janus.pictures(tokens)[2].tobytes())).view(own.shape)
    assert ((own + 1) * 127.5 - shown).abs().max() < 0.6
    for family, dtype, step in (("janus", "float32", 1), ("emu3", "float32", 48), ("emu3", "bfloat16", 1)):
        target, steps = targets(family, 7), []
        vq = target.vqmodel.to(getattr(torch, dtype))
        with vq.decoder.conv_out.register_forward_hook(lambda _, given, out, steps=steps: steps.append(out.stride(1))):
            target.pictures(tokens_of(target, target.grid[0] * target.grid[1]))
        assert steps == [step] * B and not vq.decoder.conv_in._forward_pre_hooks  # 1: channels last
        assert all(weight.is_contiguous() for weight in vq.parameters())  # the user's, as they were
    emu3 = targets("emu3")
    tokens = tokens_of(emu3, 15)
    own = emu3.model.model.vocabulary_mapping.convert_bpe2img(emu3.ids_of(tokens).view(B, 3, 5))
    assert torch.equal(emu3.codes_of(tokens), own.long())
    lumina = targets("lumina")
    tokens = tokens_of(lumina, 10)
    bpe2img = lumina.model.model.vocabulary_mapping.bpe2img
    ids = lumina.ids_of(tokens).view(B, 2, 5)
    assert lumina.codes_of(tokens).flatten().tolist() == [bpe2img[i] for i in ids[..., :-1].flatten().tolist()]
    assert (ids[..., -1] == 8803).all() and lumina.null_prompt[0][0, -3:].tolist() == [8197, 8805, 8806]
    with pytest.raises(ValueError, match="model must have a decoder of codes .* ChameleonForCond.* has none"):
        lumina.pictures(tokens)
    with pytest.raises(ValueError, match=r"tokens must be \(B, L=10\), got \(3, 9\)"):
        lumina.codes_of(tokens[:, :9])


class Processor:
    """It replaces the tokenizer or processor of a published checkpoint: it gives ids of tiny models."""

    def __call__(self, text, **_):
        ids = [[1, *self.encode(t), 7] for t in text]
        longest = max(map(len, ids))
        return {"input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in ids]),  # padded on the right
                "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids]),
                "image_sizes": [[3, 4]] * len(text), "image_grid_thw": torch.tensor(GRIDS * len(text)),
                "images_per_sample": torch.tensor([2] * len(text))}

    def encode(self, text, **_):
        return [20 + len(word) for word in str(text).split()][:6]

    def apply_chat_template(self, chat, tokenize=False, **_):
        return self([c[0]["content"][0]["text"] for c in chat]) if tokenize else chat[0]["content"][0]["text"]


class Pipe:
    """It replaces GlmImagePipeline of diffusers: it checks or draws the codes, and its pictures are empty."""

    @classmethod
    def from_pretrained(cls, _, vision_language_encoder, **__):
        pipe = cls()
        pipe.vision_language_encoder = vision_language_encoder
        return pipe

    def __call__(self, prompt, height, width, prior_token_ids=None):
        if prior_token_ids is None:
            inputs = dict(input_ids=torch.tensor([[1, 20, 7]]), image_grid_thw=torch.tensor(GRIDS))
            tokens = self.vision_language_encoder.generate(**inputs, max_new_tokens=15, do_sample=True)
            assert tokens.shape == (1, 18) and tokens[:, 3:].max() < C
        else:
            image = torch.nn.functional.interpolate(prior_token_ids.view(-1, 1, 4, 8).float(), scale_factor=0.5)
            assert torch.equal(prior_token_ids.view(-1, 1, 4, 8), image.repeat_interleave(2, 2).repeat_interleave(2, 3))
        return SimpleNamespace(images=[Image.new("RGB", (8, 8))])


def test_the_programs_of_the_page_run(monkeypatch, tmp_path):
    """As they are, but with tiny models in place of the published ones, and with small pictures of Chameleon's."""
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    whole, *blocks = re.findall(r"^```text\n(.*?)^```", page, re.S | re.M)
    assert len(blocks) == 9
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jadohu").mkdir()
    target = anole(chameleon_model(0), S)
    released(target, tmp_path / "jadohu" / "anole_drafter")
    released(target, tmp_path / "anole_drafter")
    saved("anole", tmp_path / "leloy" / "Anole-7b-v0.1-hf")
    saved_vqgan(tmp_path / "vqgan.ckpt", target.codebook)
    exec(whole.replace('"anole", ', '"anole", image_size=64, '), {})
    models = {"Chameleon": chameleon_model, "Emu3": emu3_model, "Janus": janus_model}
    models |= {"GlmImage": glm_image_model} if HAS_GLM_IMAGE else {}
    monkeypatch.setitem(sys.modules, "diffusers", SimpleNamespace(GlmImagePipeline=Pipe))
    for name, make in models.items():
        monkeypatch.setattr(getattr(transformers, f"{name}ForConditionalGeneration"), "from_pretrained",
                            lambda _, make=make, **__: make(0))
    for name in ("JanusProcessor", "Emu3Processor", "AutoTokenizer", *["GlmImageProcessor"] * HAS_GLM_IMAGE):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", lambda _, **__: Processor())
    names, given = {"lumina_mgpt": lumina_mgpt}, {path.name for path in tmp_path.iterdir()} - {"0.png"}
    pictures = {"a.png", "0.png", "1.png", "heart.png"}
    for block in blocks[:None if HAS_GLM_IMAGE else 6]:
        exec(block.replace("prefix_len=128)", "prefix_len=128, grid=(2, 4))").replace("k=100", "k=5")
             .replace("8828, 8828]", "8805, 8806]")
             .replace(", 100, normalize", ", 5, normalize").replace("16384", "10"), names)
        assert names["decoded"].tau.min() >= 1
        if block == blocks[2]:
            assert names["codes"].shape == (2, 2, 4) and names["condition"].shape == (2, 128, 64)
            assert names["prompts"][0][-4:] == [8710, 8197, 8805, 8806]
    pictures |= {"red heart.png", "zebra.png"} if HAS_GLM_IMAGE else set()
    assert {path.name for path in tmp_path.iterdir()} == pictures | given and names["codes"].shape == (2, 2, 4)


def test_changed_layers_are_read_by_modules(targets):
    target = targets("janus")
    with torch.no_grad():
        target.use_decoder_layers()
        cache, chain = target.new_cache(2, S + 4), tree_links(torch.tensor([[-1]], dtype=torch.int32)).ancestors
        nodes = Nodes(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([S]), chain,
                      torch.ones(2, S, dtype=torch.bool), S + 1)
        mlp = target.decoder.layers[0].mlp
        expected = target.extend(torch.zeros(2, 1).long(), nodes, cache)
        hook = mlp.register_forward_hook(lambda *_: torch.zeros(()))
        target.new_cache(2, S + 4)
        assert not torch.allclose(target.extend(torch.zeros(2, 1).long(), nodes, cache), expected)
        with pytest.raises(ValueError, match="model must have layers as Llama, Emu3 or Chameleon have them, got"):
            target.use_decoder_layers()
        hook.remove()
        target.use_decoder_layers()
        assert torch.equal(target.extend(torch.zeros(2, 1).long(), nodes, cache), expected)
        target.packing = None


def bytes_of(model):
    return sum({w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in model.parameters()}.values())


@pytest.mark.parametrize("family", FAMILIES[1:])
@torch.no_grad()
def test_on_a_gpu_the_weights_are_the_model_s_own(family, tmp_path, as_on_a_gpu):
    """Saved, copied, converted and written to, the model is what it was, and is read as it is then."""
    target = target_of(family)
    model, size = target.model.requires_grad_(False), bytes_of(target.model)

    def tokens(model, packed=True):
        new = copy.copy(target)
        new.model, new.decoder, new.packing = model, model.model, Packing() if packed else None
        new.decoder = next(m for name, m in model.named_modules() if m.__class__ is target.decoder.__class__)
        decoded = jacobi_decode(new, *new.condition(PROMPTS), sampling_for(target), method("jacobi")).tokens
        assert not packed or new.packing.packed
        return decoded

    expected = tokens(model, False)
    assert torch.equal(tokens(model), expected) and bytes_of(model) == size
    model.save_pretrained(tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) < 1.1 * size
    assert torch.equal(tokens(type(model).from_pretrained(tmp_path).eval().requires_grad_(False)), expected)
    copied = copy.deepcopy(model)
    assert torch.equal(tokens(copied), expected) and bytes_of(copied) == size
    mlp = copied.get_submodule(next(name for name, _ in copied.named_modules() if name.endswith("layers.1.mlp")))
    mlp.down_proj.weight += torch.randn(mlp.down_proj.weight.shape)  # as an adapter that is merged
    assert torch.equal(tokens(copied), tokens(copied, False)) and not torch.equal(tokens(copied), expected)
    copied.load_state_dict({name: w.clone() for name, w in model.state_dict().items()}, assign=True)
    copied.requires_grad_(False)
    assert torch.equal(tokens(copied), expected) and torch.equal(tokens(model), expected)
    tokens(copied.bfloat16())
    copied = copy.deepcopy(model)
    with torch.inference_mode():
        tokens(copied)
    assert not any(weight.is_inference() for weight in copied.parameters())  # they can be trained


@pytest.mark.parametrize("change, reason", [
    (lambda d: d.layers[0].mlp.requires_grad_(True), "weights that require gradients, which must not share memory"),
    (lambda d: d.layers[1].mlp.down_proj.half(), "weights of more than one dtype, torch.float16, torch.float32"),
    (lambda d: d.layers[0].mlp.to("meta"), "weights of more than one device, cpu, meta"),
    (lambda d: d.layers.double() and d.norm.double(), "weights of torch.float64 on cpu"),
    (lambda d: d.layers[0].mlp.register_forward_hook(print), "a LlamaMLP with hooks, dropout or a forward of its own"),
    (lambda d: setattr(d.layers[0], "mlp", Wrapped(d.layers[0].mlp)), "a Wrapped, which is none of Llama, Emu3, Cham"),
    (lambda d: setattr(d.rotary_emb, "rope_type", "dynamic"), "dynamic rotary embeddings, which follow the length")])
def test_a_model_that_modules_read_says_why(change, reason, as_on_a_gpu):
    target = target_of("janus")
    target.model.requires_grad_(False)
    target.new_cache(1, 1)
    assert target.can_replay
    change(target.decoder)
    with pytest.warns(UserWarning, match=f"the model's own modules read each step, .* cannot read {reason}"):
        target.new_cache(1, 1)
    assert not target.can_replay


class Wrapped(torch.nn.Module):
    """Twice what a linear layer gives, or the first of what attention gives."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        out = self.layer(*args, **kwargs)
        return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out


def with_bias(linear):
    linear.bias = torch.nn.Parameter(torch.arange(float(linear.out_features)))


@pytest.mark.parametrize("change", [
    lambda d: with_bias(d.layers[1].mlp.gate_proj),
    lambda d: with_bias(d.layers[0].self_attn.k_proj),
    lambda d: setattr(d.layers[0].mlp, "up_proj", Wrapped(d.layers[0].mlp.up_proj)),
    lambda d: setattr(d.layers[0], "self_attn", Wrapped(d.layers[0].self_attn)),
    lambda d: d.register_forward_hook(lambda module, inputs, output: output.__class__(output.last_hidden_state + 1)),
    lambda d: d.rotary_emb.register_forward_hook(lambda module, inputs, output: (output[1], output[0])),
    lambda d: setattr(d.layers[1].self_attn, "scaling", 3.0),
    lambda d: setattr(d.layers[0].input_layernorm, "variance_epsilon", 1.0),
    lambda d: setattr(d.layers[0].mlp, "act_fn", torch.nn.Tanh()),
    lambda d: setattr(d, "layers", d.layers[::-1])])
def test_what_is_not_packed_is_read_by_modules(targets, change):
    target = copy.deepcopy(targets("janus"))
    chain = tree_links(torch.tensor([[-1, 0, 1]], dtype=torch.int32)).ancestors
    nodes = Nodes(torch.arange(3)[None], torch.tensor([S]), chain, torch.ones(2, S, dtype=torch.bool), S + 3)

    def read():
        cache = target.new_cache(2, S + 3)
        cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(0)))
        return target.extend(torch.tensor([[1, 0, 2]] * 2), nodes, cache)

    with torch.no_grad():
        target.use_decoder_layers()
        before = read()
        change(target.decoder)
        after = read()
        target.packing = None
        assert torch.allclose(after, read(), atol=1e-4) and not torch.allclose(after, before, atol=1e-2)


def test_a_wrapped_head_is_called(targets):
    target = copy.deepcopy(targets("emu3"))
    hidden = torch.randn(1, 2, target.model.get_output_embeddings().in_features)
    logits = target.logits(hidden)
    target.model.set_output_embeddings(Wrapped(target.model.get_output_embeddings()))
    assert torch.allclose(target.logits(hidden), 2 * logits, atol=1e-5)


@pytest.mark.parametrize("family", ["emu3", "lumina"])
@pytest.mark.parametrize("dtype, wanted", [(torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32)])
def test_logits_have_the_head_s_dtype_or_one_that_ops_read(targets, family, dtype, wanted):
    target = copy.deepcopy(targets(family))
    head = target.model.get_output_embeddings().to(dtype)
    logits = target.logits(torch.randn(1, 2, head.in_features, dtype=dtype))
    assert logits.dtype == wanted and logits.shape == (1, 2, target.vocab_size)


def test_what_is_refused(targets):
    target = targets("emu3")
    known, flash = torch.tensor([[1, 1, 1, 1, 3]]).repeat(B, 1), emu3_model(0)
    flash.get_decoder().config._attn_implementation = "flash_attention_2"
    at_least_1, model = "prefix_len, grid and the number of ids must be at least 1, got 3, ", target.model
    for call, message in (
            (lambda: target.condition([[1], [1] * 8]), r"prompts must have 1 to prefix_len=7 ids each, got \[1, 8\]"),
            (lambda: Emu3(model, 3, (2, 2), [1] * 5), r"null_prompt must have 1 to prefix_len=3 ids each, got \[5\]"),
            (lambda: ImageModel(model, [3], 3, (0, 2), [1]), at_least_1),
            (lambda: ImageModel(model, [], 3, (2, 2), [1]), at_least_1),
            (lambda: ImageModel(model, [40], 3, (2, 2), [1]), r"ids must be within the vocabulary, \[0, 40\), got 40"),
            (lambda: ImageModel(model, [3, 4], 3, (2, 2), [1], newline=4),
             "ids and newline must all be different, got one twice"),
            (lambda: lumina_mgpt(targets("lumina").model, S, (3, 4)), r"grid must be two even numbers, got \(3, 4\)"),
            (lambda: decode(target, *target.condition(PROMPTS), sampling(), known_tokens=known), "known_tokens must be "
             r"ids that the target allows where they are: within \[10, 11\) at position 4, got 3"),
            (lambda: Emu3(emu3_model(0).train(), S, (2, 2), [1]), "model must be in evaluation mode"),
            (lambda: Emu3(flash, S, (2, 2), [1]), "the attention sdpa or eager, .* got 'flash_attention_2'")):
        with pytest.raises(ValueError, match=message):
            call()
    assert anole(targets("lumina").model, S).grid == (32, 32)
