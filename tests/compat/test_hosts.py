"""What a model of transformers may be: what cannot be read as a tree is refused, in `generate` and in `ImageModel`."""
import types

import pytest
import torch

from specvis import Pipeline, Sampling, decode, jacobi_decode, method, speculative_decode
from specvis.decoding.draft_model import SmallDraftModel
from specvis.decoding.sampling import cfg_inputs
from specvis.models.transformers import Emu3, ImageModel, JanusPro, anole, lumina_mgpt
from specvis_kernels import StatusError
from specvis_kernels.compat._versions import is_older
from specvis_kernels.compat.transformers import GuidedProbsProcessor, jacobi_generate, tree_generate
from tests.families import chameleon_model, emu3_model, janus_model

transformers = pytest.importorskip("transformers")
V, PROMPT = 64, torch.tensor([[1, 22, 23, 24, 25, 26, 7]])
SIZE = {"vocab_size": V, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = SIZE | {"intermediate_size": 64, "num_key_value_heads": 2}
GPT2 = {"vocab_size": V, "n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.3, "bos_token_id": 1,
        "eos_token_id": 2}
GREEDY = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None}
IMAGE_IDS = {"id_range": (4, 14)}
JACOBI = {"custom_generate": jacobi_generate}
RANDOM = {"do_sample": True, "top_k": 0, "max_new_tokens": 1, "eos_token_id": None}


def model_of(family, **config):
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
    return model(getattr(transformers, f"{family}Config")(**config)).eval()


TREE = {"custom_generate": tree_generate, "draft": lambda s, mask: torch.full((*s.shape[:2], V), 1 / V),
        "choices": [(0,), (0, 0), (0, 0, 0)]}


def by_generate(model, **options):
    return model.generate(PROMPT, **GREEDY | options)


def target_of(model, grid=(4, 5)):
    return ImageModel(model, range(10, 40), 7, grid, [1, 7])


def image_of(target, draw=jacobi_decode, *rest):
    return draw(target, *target.condition(PROMPT), Sampling.of([0], guidance=1.0, temperature=0.0), *rest).tokens


def images_of(model):
    """The picture's tokens by `ImageModel`, one at a time and by guesses, and by transformers."""
    own = by_generate(model, prefix_allowed_tokens_fn=lambda *_: list(range(10, 40)))[:, 7:] - 10
    target = target_of(model)
    return own, image_of(target, decode), image_of(target, jacobi_decode, [method("jacobi", window=8)])


def rope(kind, trained, **more):
    """In the names of transformers 5 and of transformers 4."""
    values = {"rope_type": kind, "factor": 4.0, **more}
    return LLAMA | {"max_position_embeddings": trained, "rope_parameters": {"rope_theta": 1e4} | values,
                    **({"rope_scaling": values} if is_older("transformers", 5, 0) else {})}


LONG = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


@pytest.mark.parametrize("family, config, message", [
    ("Mistral", LLAMA | {"sliding_window": 26}, "full attention in every layer, got sliding_attention of 26 tokens .*"),
    ("GPTNeo", SIZE | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
     "full attention in every layer, got local"),
    ("Mamba", SIZE, "model must take position_ids, got Mamba"),
    ("Doge", LLAMA | {"keep_window_size": 26}, "must see every token, got keep_window_size=26"),
    ("Llama", LLAMA | {"attn_temperature_tuning": True, "floor_scale": 26}, "attn_temperature_tuning from 26 tokens"),
    ("OpenAIGPT", GPT2 | {"n_positions": 64}, "take a cache and a mask of four dimensions, got OpenAIGPT"),
    ("Bert", SIZE | {"intermediate_size": 64}, "must read from left to right, got Bert.* with is_decoder=False"),
    ("Falcon", SIZE | {"alibi": True}, "take its positions from position_ids, got alibi=True"),
    ("Llama", rope("dynamic", 26), "rotary embeddings at every length up to the 27 .*, got 'dynamic' .* after 26"),
    ("Llama", rope("longrope", 64, original_max_position_embeddings=26, **LONG), "got 'longrope' ones, .* after 26"),
    ("GPT2", GPT2 | {"n_positions": 25}, "for the 26 tokens that are read, got a table of 25"),
])
def test_a_model_that_a_tree_would_be_read_wrongly_by(family, config, message):
    model = model_of(family, **config)
    with pytest.raises(ValueError, match=message):
        by_generate(model, **JACOBI)
    with pytest.raises(ValueError, match=message):
        target_of(model)


@pytest.mark.parametrize("family, config", [
    ("Mistral", LLAMA | {"sliding_window": 27}),
    ("GPTNeo", SIZE | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}),
    ("Llama", rope("dynamic", 27)),
    ("Llama", rope("longrope", 64, original_max_position_embeddings=27, **LONG)),
    ("GPT2", GPT2 | {"n_positions": 26}),
    ("OPT", SIZE | {"ffn_dim": 64, "max_position_embeddings": 26, "word_embed_proj_dim": 64, "init_std": 0.3}),
])
def test_a_model_that_just_fits(family, config):
    """Of tables of positions every entry is read, and none behind them, by guesses, trees and in ragged batches."""
    model = model_of(family, **config)
    wanted = by_generate(model)
    for options in (JACOBI | {"window": 16}, TREE):
        assert torch.equal(by_generate(model, **options), wanted) and len(wanted.unique()) > 8
        two = torch.cat([PROMPT, torch.tensor([[0, 0, 0, 1, 22, 23, 7]])])
        ragged, own = (model.generate(two, attention_mask=(two != 0).long(), **GREEDY, **o) for o in (options, {}))
        assert torch.equal(ragged, own)
    own, *images = images_of(model)
    assert all(torch.equal(image, own) for image in images)
    target = target_of(model)
    draft = SmallDraftModel(target, *cfg_inputs(target, *target.condition(PROMPT)))
    eagle2 = method("eagle2", draft_model="small")
    assert torch.equal(image_of(target, lambda t, *rest: speculative_decode(t, draft, *rest, [eagle2])), own)


def test_layers_are_asked_at_every_decoding():
    model = model_of("Llama", **LLAMA)
    target, own = target_of(model), by_generate(model)
    model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Dropout(0.1)).train()
    with pytest.raises(ValueError, match=r"got training mode with Dropout\(0.1\)"):
        image_of(target, decode)
    model.lm_head = model.lm_head[0].eval()
    for name, value, message in (("attention_dropout", 0.1, "training mode with attention_dropout=0.1"),
                                 ("layer_types", ["full_attention", "linear_attention"], "got linear_attention")):
        old = getattr(model.config, name, None)
        setattr(model.config, name, value)
        model.train(name == "attention_dropout")
        for read in (lambda: image_of(target, decode), lambda: by_generate(model, **JACOBI)):
            with pytest.raises(ValueError, match=message):
                read()
        setattr(model.config, name, old)
    model.train()  # where nothing is dropped, nothing changes
    assert torch.equal(by_generate(model, **JACOBI), own)
    model.gradient_checkpointing_enable()
    if is_older("transformers", 5, 24):
        with pytest.raises(ValueError, match="got training mode with gradient checkpointing"):
            by_generate(model, **JACOBI)
    else:
        assert torch.equal(by_generate(model, **JACOBI), own)
    model.gradient_checkpointing_disable()
    model.model.layers[1].mlp.act_fn = torch.nn.Sequential(model.model.layers[1].mlp.act_fn, torch.nn.Dropout(0.2))
    model.train()
    with pytest.raises(ValueError, match=r"got training mode with Dropout\(0.2\) .call model.eval"):
        image_of(target, decode)


def test_an_adapter_on_the_embedding_is_read():
    model = model_of("Llama", **LLAMA)
    target, before = target_of(model), images_of(model)[0]
    model.set_input_embeddings(torch.nn.Sequential(model.get_input_embeddings(), torch.nn.Linear(64, 64)))
    model.get_input_embeddings().weight = model.get_input_embeddings()[0].weight
    own = by_generate(model, prefix_allowed_tokens_fn=lambda *_: list(range(10, 40)))[:, 7:] - 10
    assert torch.equal(image_of(target, decode), own) and not torch.equal(own, before)


def test_a_head_whose_logits_are_changed_is_not_read_alone():
    for family, more in (("Granite", {"logits_scaling": 8.0}), ("Gemma2", {"head_dim": 16, "sliding_window": 64})):
        with pytest.raises(ValueError, match=f"give the logits of its head as they are, got a {family}ForCausalLM"):
            target_of(model_of(family, **LLAMA | more))
    with pytest.raises(ValueError, match="give the logits of its head as they are, got a CohereForCausalLM"):
        ImageModel(model_of("Cohere", **LLAMA, logit_scale=0.5), range(10, 40), 7, (4, 5), [0])  # its embedding is 0
    with pytest.raises(ValueError, match="logits of its head as they are, got a ChameleonForConditionalGeneration"):
        target_of(chameleon_model(0))


# --- ids that a model masks ---

@pytest.mark.parametrize("id_range", [(4, 14), (3, 5), torch.tensor([[20, 21], [13, 14]])])
def test_ids_that_a_configuration_masks_are_refused(id_range):
    model = chameleon_model(0)
    for options in (JACOBI, TREE):
        with pytest.raises(ValueError, match="without the ids of images, which ChameleonForConditionalGeneration masks "
                           "in its forward: specvis.models.transformers draws them .anole, lumina_mgpt"):
            model.generate(PROMPT, **options, id_range=id_range, **RANDOM)
    assert model.generate(PROMPT, **JACOBI, id_range=(20, 30), **RANDOM)[0, -1] in range(20, 30)
    assert model.generate(PROMPT, **JACOBI, id_range=(0, 8900), **RANDOM).shape == (1, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ids_that_a_forward_masks_are_reported(dtype):
    """By any model, in its own dtype or in float32, which transformers makes of its scores."""
    model = model_of("Llama", **LLAMA).to(dtype)
    model.lm_head.register_forward_hook(lambda module, read, out: out.index_fill(
        -1, torch.arange(4, 14), torch.finfo(dtype).min))
    for options in (JACOBI | IMAGE_IDS,
                    dict(logits_processor=[GuidedProbsProcessor(**IMAGE_IDS, doubled=False)]),
                    dict(logits_processor=[GuidedProbsProcessor(**IMAGE_IDS, doubled=False)], do_sample=False)):
        with pytest.raises(StatusError, match="INVALID_ROW .* all ids of its range are masked by the model"):
            model.generate(PROMPT, **RANDOM | options)
    beside = [GuidedProbsProcessor(id_range=(4, 15), doubled=False)]
    assert model.generate(PROMPT, logits_processor=beside, **RANDOM)[0, -1] == 14


# --- what a model adds to a prompt, or a caller to a model ---

class Tuned:
    """What peft does for prompt tuning: its method in place of the model's."""

    def __init__(self, model, **added):
        self.own, self.added = model.prepare_inputs_for_generation, added
        model.prepare_inputs_for_generation = self.prepare

    def prepare(self, *args, **kwargs):
        return self.own(*args, **kwargs) | self.added


@pytest.mark.parametrize("added, message", [
    ({"inputs_embeds": torch.zeros(1, 12, 64), "input_ids": None},
     "token ids alone, got inputs_embeds by prepare_inputs_for_generation of Tuned, whose own generate reads them"),
    ({"input_ids": PROMPT + 1}, "token ids alone, got others by prepare_inputs_for_generation of Tuned"),
    ({"position_ids": PROMPT}, "needs position_ids that count the ids of attention_mask"),
])
def test_what_a_model_makes_of_a_prompt_is_the_prompt(added, message):
    model = model_of("Llama", **LLAMA)
    Tuned(model)
    by_generate(model, **JACOBI)
    Tuned(model, **added)
    with pytest.raises(ValueError, match=message):
        by_generate(model, **JACOBI)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_positions_of_the_callers_own_are_refused(family):
    model = model_of(family, **(LLAMA if family == "Llama" else GPT2))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    counted = dict(attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    for options in (counted, dict(position_ids=torch.arange(7)[None])):
        assert torch.equal(by_generate(model, **options, **JACOBI),
                           by_generate(model, **{k: v for k, v in options.items() if k == "attention_mask"}))
    jacobi_generate(model, PROMPT, cache_position=torch.arange(7))
    for name, value in (("position_ids", torch.arange(9, 16)[None]), ("position_ids", torch.arange(7)[None] // 2),
                        ("position_ids", torch.arange(6)[None]), ("cache_position", torch.arange(1, 8))):
        with pytest.raises(ValueError, match=f"jacobi_generate needs {name} that count the ids of attention_mask"):
            jacobi_generate(model, PROMPT, **{name: value})


def test_what_a_call_asks_for_is_done_or_refused():
    """By generate, and without it: then the config alone is read."""
    model, config = model_of("Llama", **LLAMA), transformers.GenerationConfig
    for options, message in (
            (dict(attention_mask=torch.tensor([[1, 1, 1, 1, 1, 1, 0]])), "attention_mask must be padded on the left, "),
            (dict(unconditional_ids=torch.tensor([[1, 7]]), unconditional_mask=torch.tensor([[1, 0]]), guidance=2.0),
             "unconditional_mask must be padded on the left"),
            (dict(penalty_alpha=0.6, top_k=4), "needs greedy decoding or sampling, got contrastive_search")):
        with pytest.raises(ValueError, match=message):
            by_generate(model, **JACOBI, **options)
    assert jacobi_generate(model, PROMPT, generation_config=config(max_new_tokens=5)).shape == (1, 12)
    with pytest.raises(ValueError, match="generate, which makes logits processors, for generation_config.repetition_pen"
                                         r"alty=1.5 \(off by repetition_penalty=1.0\)"):
        jacobi_generate(model, PROMPT, generation_config=config(min_p=0.1, repetition_penalty=1.5))


def test_unconditional_prompts_count_as_prompts():
    """The longer of the two decides whether a table or a window is long enough."""
    rest = JACOBI | {"guidance": 2.0}
    model = model_of("GPT2", **GPT2, n_positions=28)
    assert by_generate(model, **rest, unconditional_ids=torch.ones(1, 9, dtype=torch.int64)).shape == (1, 27)
    with pytest.raises(ValueError, match="for the 29 tokens that are read, got a table of 28"):
        by_generate(model, **rest, unconditional_ids=torch.ones(1, 10, dtype=torch.int64))


class Wrapper(torch.nn.Module):
    """What peft puts around a model whose layers have adapters, or before which virtual tokens stand."""

    def __init__(self, model, is_prompt_learning=False):
        super().__init__()
        self.base_model = model
        self.active_peft_config = types.SimpleNamespace(
            is_prompt_learning=is_prompt_learning, peft_type="PROMPT_TUNING")

    def get_base_model(self):
        return self.base_model


@pytest.mark.parametrize("make, target", [
    (emu3_model, lambda m: Emu3(m, 7, (3, 4), [1, 7])), (janus_model, lambda m: JanusPro(m, 7)),
    (chameleon_model, lambda m: anole(m, 7)), (lambda _: model_of("Llama", **LLAMA), target_of)])
def test_a_wrapper_is_taken_off_unless_it_adds_tokens(make, target):
    model = make(0)
    assert target(Wrapper(model)).model is model
    with pytest.raises(ValueError, match=r"got a PeftModel that puts virtual tokens before them .PROMPT_TUNING"):
        target(Wrapper(model, is_prompt_learning=True))
    with pytest.raises(ValueError, match="must be a causal language model of transformers, got a DataParallel .of a "
                       "wrapper, give its .module"):
        target(torch.nn.DataParallel(model))


class Packed(torch.nn.Linear):
    """A quantized head: its weight has another shape, and its module alone can read it."""

    def __init__(self, head):
        super().__init__(1, 1, bias=False)
        self.values = head.weight.detach()

    def forward(self, x):
        return x @ self.values.T


class Int8(torch.nn.Parameter):
    """A weight of torchao, which is no plain tensor."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if "getitem" in getattr(function, "__name__", ""):
            raise RuntimeError("Cannot set version_counter for inference tensor")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})


def test_a_quantized_head_is_called():
    model = model_of("Llama", **LLAMA)
    own, wanted = by_generate(model), images_of(model)[0]
    model.lm_head.weight = Int8(model.lm_head.weight.detach(), requires_grad=False)
    assert torch.equal(image_of(target_of(model), decode), wanted)
    model.lm_head = Packed(model.lm_head)
    for options in (JACOBI, TREE):
        assert torch.equal(by_generate(model, **options), own)
    assert torch.equal(image_of(target_of(model), decode), wanted)


# --- prompts ---

def test_prompts_that_begin_no_image_of_this_size():
    chameleon, janus = chameleon_model(0), JanusPro(janus_model(0), 7)
    for target, begin, wrong in ((anole(chameleon, 7), [8197], [8710]), (janus, [7], [20]),
                                 (lumina_mgpt(chameleon, 7, (2, 6)), [8197, 8805, 8807], [8197, 8806, 8806])):
        assert target.condition([[1, 20, *begin]])[1].sum() == 2 + len(begin)
        with pytest.raises(ValueError, match=f"must end with {', '.join(map(str, begin))}, which begins an image "
                           rf"of grid \(.*, got .*{wrong[-1]}$"):
            target.condition([[1, 20, *begin], [1, 20, *wrong]])
    model = emu3_model(0)
    words = {"<|image start|>": 30, "3": 31, "4": 32, "*": 33, "<|image token|>": 34}
    model.model.vocabulary_mapping.vocab_map |= words
    target = Emu3(model, 7, (3, 4), [1, 7])
    assert target.condition([[1, 20, 30, 31, 33, 32, 34]])[1].all()
    for prompt in ([1, 20], [1, 30, 32, 33, 31, 34], [1, 30, 31, 33, 32]):
        with pytest.raises(ValueError, match=r"end with <\|image start\|>3\*4<\|image token\|>, as Emu3's processor"):
            target.condition([prompt])


def test_padding_without_a_mask_and_ids_of_no_word():
    target = target_of(model_of("Llama", **LLAMA))
    padded = torch.tensor([[0, 0, 1, 22, 7], [1, 22, 23, 24, 7]])
    for ids in (padded, padded.flip(1)):
        with pytest.raises(ValueError, match="attention_mask must be given with padded prompts.* got None and .* 0"):
            target.condition(ids)
    assert target.condition(padded, padded != 0)[1].sum() == 8
    for prompts in (padded[:, 1:], padded.tolist()):
        with pytest.raises(ValueError, match=r"attention_mask must have the shape of prompts, .*, got \(2, 5\)"):
            target.condition(prompts, padded != 0)
    for wrong in (64, -1):
        with pytest.raises(ValueError, match=rf"prompts must be within the vocabulary, \[0, 64\), got {wrong}"):
            target.condition([[1, wrong, 7]])


def test_grids_as_processors_and_people_write_them():
    model = emu3_model(0)
    for grid in ([3, 4], torch.tensor([3, 4]), tuple(torch.tensor([[3, 4]])[0])):
        assert Emu3(model, 7, grid, [1, 7]).grid == (3, 5)
    for grid in ((3.0, 4.0), ("3", "4"), 12, (3, 4, 5), (torch.tensor(3.5), 4)):
        with pytest.raises(ValueError, match="grid must be two whole numbers, rows and columns of codes, got "):
            Emu3(model, 7, grid, [1, 7])


def test_offloaded_weights_are_read_where_their_hooks_bring_them():
    """As accelerate's cpu_offload: weights are on `meta` but for the time of a module's forward."""
    model = model_of("Llama", **LLAMA)
    wanted = images_of(model)[0]
    for module in model.modules():
        kept = {name: weight for name, weight in module._parameters.items() if weight is not None}
        if not kept:
            continue
        module._hf_hook = types.SimpleNamespace(execution_device="cpu")
        away = {name: torch.nn.Parameter(weight.to("meta")) for name, weight in kept.items()}

        def forward(*args, module=module, kept=kept, away=away, own=module.forward, **named):
            module._parameters.update(kept)
            out = own(*args, **named)
            module._parameters.update(away)
            return out

        module.forward = forward
        module._parameters.update(away)
    assert torch.equal(image_of(target_of(model), decode), wanted)


def test_decoded_tensors_may_be_saved_for_gradients():
    target, seen = target_of(model_of("Llama", **LLAMA)), []
    sampling = Sampling.of([1], guidance=1.0, log_probs=True)
    for decoded in (decode(target, *target.condition(PROMPT), sampling),
                    jacobi_decode(target, *target.condition(PROMPT), sampling, [method("jacobi", window=4)],
                                  observe=seen.append)):
        new = target.model(target.ids_of(decoded.tokens)).logits.log_softmax(-1).gather(2, decoded.tokens[..., None])
        ((new[..., 0] - decoded.log_probs.full).exp() * decoded.log_probs.sampled).mean().backward()
        assert not decoded.tokens.is_inference() and target.model.lm_head.weight.grad is not None
    assert seen and not any(x.is_inference() for x in seen[0] if isinstance(x, torch.Tensor))
    pipeline = Pipeline.load()
    assert not pipeline.tokens(["noto red heart"], "jacobi:window=8", pipeline.sampling([1])).tokens.is_inference()
