"""Prompts: words with a style first, class ids, and captions read by a T5."""
import dataclasses
import itertools
import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from specvis.decoding.baseline import decode
from specvis.decoding.sampling import Sampling
from specvis.models.llamagen import GPTConfig
from specvis.pipelines.captions import cleaned
from specvis.pipelines.discrete import Pipeline
from specvis.pipelines.prompts import Captions, ClassIds, imagenet_classes, with_style
from tests.cli.conftest import run
from tests.tiny import tiny_pair, tiny_pipeline, vq_config

CLASSES = GPTConfig(dim=32, layers=2, heads=2, vocabulary=64, grid=4, classes=10, ffn_multiple=16)
CAPTIONS = dataclasses.replace(CLASSES, classes=None, condition_tokens=6, caption_dim=8)


def pipeline_of(config: GPTConfig, **options) -> Pipeline:
    torch.manual_seed(0)
    pipeline = Pipeline(config, vq_config(4), has_eagle=False, **options)
    for weight in (pipeline.gpt.output.weight, pipeline.gpt.tok_embeddings.weight):
        weight.data.normal_(std=0.5)
    return pipeline


def t5_folder(folder, width=8):
    """A T5 with random weights, as transformers writes it; its tokenizer splits words at spaces."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(
        {"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3, "red": 4, "heart": 5}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>",
                                         unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(1)
    transformers.T5EncoderModel(transformers.T5Config(
        vocab_size=6, d_model=width, d_kv=4, d_ff=16, num_layers=2, num_heads=2)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return t5_folder(tmp_path_factory.mktemp("t5"))


def test_one_rule_for_styles():
    """A style that leads is taken; with another one, or where none is, the prompt is refused."""
    styles = ("fluent-3d", "fluent-flat", "noto")
    for prompt in ("noto dog", "Noto: dog"):
        assert with_style(prompt, styles) == with_style(prompt, styles, default=True) == prompt
    assert with_style("dog", styles, "noto") == with_style("dog", styles, "noto", default=True) == "noto dog"
    assert with_style("dog", styles, default=True) == "fluent-3d dog"
    assert with_style("dog", ()) == with_style("dog", (), default=True) == "dog" and with_style(207, ()) == 207
    for arguments, message in (
            (("dog", styles), "prompt must begin with a style: fluent-3d, fluent-flat or noto, got 'dog'"),
            (("noto dog", styles, "fluent-3d"), "style must not be given for a prompt that begins with one, got "
                                                "'fluent-3d' and 'noto dog'"),
            (("dog", styles, "pixel"), "style must be one of fluent-3d, fluent-flat, noto, got 'pixel'"),
            (("dog", (), "noto"), "style must not be given for this model, which was trained without styles")):
        with pytest.raises(ValueError, match=message):
            with_style(*arguments)


@pytest.mark.parametrize("make", [tiny_pipeline, tiny_pair])
def test_a_pipeline_refuses_a_prompt_without_a_style_and_strips_punctuation(make):
    pipeline = make()
    words = pipeline.words
    words.vocabulary = ["", "noto", "red", "blue", "heart"]
    words.ids = {word: i for i, word in enumerate(words.vocabulary)}
    read = pipeline.source if isinstance(pipeline, Pipeline) else pipeline.features
    with pytest.raises(ValueError, match="^prompt must begin with a style: noto, got 'red heart'$"):
        read(["noto heart", "red heart"])
    assert words.encode(["Noto: Red Heart!"]).tolist() == words.encode(["noto red , heart"]).tolist()
    with pytest.raises(ValueError, match=r"unknown words: 'hart' \(near: heart\)$"):
        read(["noto hart!"])


def test_class_ids():
    ids = ClassIds(10)
    assert ids.encode(["3", " 9 ", 0]).tolist() == [3, 9, 0]
    for prompt in ("10", "-1", "3.5", "cat", "", "\u00b2"):
        with pytest.raises(ValueError, match=r"must be the number of a class within 0\.\.9, got '"):
            ids.encode(["3", prompt])
    assert len(set(itertools.chain(*imagenet_classes().values()))) == 1000
    assert ClassIds(1000).encode(["Golden  Retriever", "drake", 207, "bathroom tissue"]).tolist() == [207, 97, 207, 999]
    for prompt, hint in (("crane", "which 134 and 517 have"), ("golden retreiver", r"\(near: golden retriever, ")):
        with pytest.raises(ValueError, match=rf"within 0\.\.999 or its name in ImageNet, got '{prompt}',? {hint}"):
            ClassIds(1000).encode([prompt])


def test_a_class_conditional_folder_draws_what_its_gpt_draws(tmp_path):
    pipeline_of(CLASSES).save(tmp_path)
    assert not {"words.safetensors", "eagle.safetensors"} & {path.name for path in tmp_path.iterdir()}
    pipeline = Pipeline.load(tmp_path)
    assert pipeline.eagle is None and pipeline.words is None
    sampling = Sampling.of([5, 6], guidance=2.0)
    condition = pipeline.gpt.condition(torch.tensor([3, 7]))
    assert torch.equal(pipeline.condition(["3", "7"])[0], condition[0])
    expected = decode(pipeline.gpt, *condition, sampling).tokens
    for method in ("vanilla", "jacobi"):
        assert torch.equal(pipeline.tokens(["3", "7"], method, sampling).tokens, expected)
    assert not torch.equal(expected, pipeline.tokens(["4", "7"], "jacobi", sampling).tokens)
    assert pipeline.pictures(expected)[0].size == (8, 8)


@pytest.mark.parametrize("method", ["eagle2", "lantern:k=4", "speculative"])
def test_without_a_draft_model_methods_that_need_one_are_refused(method):
    pipeline = pipeline_of(CLASSES)
    with pytest.raises(ValueError, match=r"be vanilla, jacobi or gsd, got .*: this model has no eagle.*\(train one"):
        pipeline.tokens(["3"], method, Sampling.of([5]))
    assert pipeline.missing_draft_models == ["eagle", "small"]


@pytest.mark.parametrize("config, kind", [(CLASSES, "class ids"), (CAPTIONS, "words")])
def test_a_text_encoder_for_another_kind_of_prompts_is_refused(tmp_path, config, kind):
    pipeline_of(config, vocabulary=["", "red", "heart"] if kind == "words" else None).save(tmp_path)
    result = run("generate", "--model", tmp_path, "--prompt", "red heart" if kind == "words" else "3",
                 "--text-encoder", "/no/such", "--out", tmp_path / "x.png")
    assert result.exit_code == 2 and not (tmp_path / "x.png").exists()
    assert result.output == (f"Error: text_encoder must not be given for the model in {tmp_path}: "
                             f"its prompts are {kind}\n")


def test_captions_are_padded_on_the_left_and_zero_there(t5):
    captions = Captions(t5, 6, 8)
    assert captions.encode(["A red heart", "heart"]).tolist() == [[3, 4, 5, 1, 0, 0], [5, 1, 0, 0, 0, 0]]
    assert captions.encode(["a a a a a a a a"]).tolist() == [[3, 3, 3, 3, 3, 1]]  # a long one is cut
    features, mask = captions.source(["A red heart", "heart"], torch.device("cpu"), torch.float32)
    assert mask.int().tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]]
    assert features.shape == (2, 6, 8) and not features[~mask].any() and features[mask].abs().sum(1).gt(0).all()
    # as LlamaGen's sample_t2i.py: the last valid_num features, moved to the end
    import transformers
    encoder = transformers.T5EncoderModel.from_pretrained(t5)
    hidden = encoder(input_ids=torch.tensor([[3, 4, 5, 1, 0, 0]]),
                     attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0]])).last_hidden_state[0]
    assert torch.allclose(features[0, 2:], hidden[:4], atol=1e-6)
    alone, _ = captions.source(["heart"], torch.device("cpu"), torch.float32)
    assert torch.equal(alone[0], features[1])                                 # whatever else is in the batch


def test_a_text_conditional_folder_draws_what_its_gpt_draws(t5, tmp_path):
    pipeline = pipeline_of(CAPTIONS)
    pipeline.save(tmp_path)
    pipeline = Pipeline.load(tmp_path, text_encoder=t5)
    sampling = Sampling.of([5, 6], guidance=3.0, top_k=30)
    features, mask = pipeline.source(["a red heart", "a"])
    expected = decode(pipeline.gpt, *pipeline.gpt.condition(features, mask), sampling).tokens
    assert torch.equal(pipeline.tokens(["a red heart", "a"], "jacobi", sampling).tokens, expected)
    unmasked = decode(pipeline.gpt, *pipeline.gpt.condition(features), sampling).tokens
    assert not torch.equal(unmasked, expected)                                # or the mask would say nothing


def test_what_is_missing_for_captions_is_said(t5, tmp_path, monkeypatch):
    def refused(folder, message, caption="a"):
        with pytest.raises(ValueError, match=message) as caught:
            Captions(folder, 6, 8).encode([caption])
        assert "\n" not in str(caught.value)

    refused(None, "FLAN-T5-XL.*give it as --text-encoder")
    refused(tmp_path, "which has no config.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    refused(tmp_path, "which has no tokenizer.json or spiece.model")
    (tmp_path / "tokenizer.json").write_text("{")
    refused(tmp_path, "of which AutoTokenizer says: ")
    with pytest.raises(ValueError, match="features of width 9, as the model needs, got 8"):
        Captions(t5, 6, 9).source(["a"], torch.device("cpu"), torch.float32)
    for file in t5.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(t5 / "model.safetensors")
    del weights["encoder.block.1.layer.0.SelfAttention.q.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lacks encoder.block.1.layer.0.SelfAttention.q.weight"):
        Captions(tmp_path, 6, 8).source(["a"], torch.device("cpu"), torch.float32)
    refused(t5, "words that LlamaGen's cleaning of captions leaves, got 'http://a.com/b'", "http://a.com/b")
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(t5, "read by transformers, which is missing: pip install")


@pytest.mark.parametrize("prompt", ["\udcff red", "a\ud83d\ude00", "\ud800", b"red", 7, None])
def test_a_caption_that_is_no_text_is_named(t5, prompt):
    with pytest.raises(ValueError, match="^a prompt must be text that UTF-8 can write, got ") as caught:
        Captions(t5, 6, 8).encode(["a red heart", prompt])
    assert type(caught.value) is ValueError and str(caught.value).endswith(f"got {prompt!r}")


def test_a_command_refuses_a_prompt_that_is_no_utf8(t5, tmp_path):
    pipeline_of(CAPTIONS).save(tmp_path)
    prompt = b"\xff red".decode(errors="surrogateescape")                      # as Python reads an argument
    result = run("generate", "--model", tmp_path, "--text-encoder", t5, "--prompt", prompt, "--out", tmp_path / "x.png")
    assert result.exit_code == 2 and not (tmp_path / "x.png").exists()
    assert result.output == "Error: a prompt must be text that UTF-8 can write, got '\\udcff red'\n"


@pytest.mark.parametrize("caption, expected", [
    ("A blue Porsche 356 parked on the road.", "a blue porsche 356 parked on the road."),
    ("  <b>Bold</b> &amp; <i>free shipping</i>  ", "bold"),
    ("see https://example.com/x.png now", "see now"),
    ("\u201cHello\u201d \u2014 it\u2019s @me", "\"hello\" - it's"),
    ("this-is-my-cute-cat", "this is my cute cat"),
    ("jc6640 lamp 6640vc231 1200x800 IMG_1234.jpg", "lamp"),
    ("one,two", "one, two"),
    ("\u732b a cat\uff01", "a cat!"),
    ("100%25 wool+sweater", "100% wool sweater"),
    ("\"all quoted\"", "all quoted"),
    ("wait...what?", "wait what?"),
])
def test_captions_are_cleaned(caption, expected):
    assert cleaned(caption) == expected
