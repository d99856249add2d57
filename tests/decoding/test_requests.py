"""What decoding refuses before a model reads anything, and how a request names its method."""
import dataclasses

import pytest
import torch

from specvis.decoding.baseline import decode
from specvis.decoding.draft_model import EagleDraftModel, SmallDraftModel
from specvis.decoding.jacobi import jacobi_decode
from specvis.decoding.methods import METHODS, method
from specvis.decoding.requests import _is_causal
from specvis.decoding.sampling import Sampling, cfg_inputs
from specvis.decoding.speculative import speculative_decode
from specvis.models.eagle import EagleHead
from tests.decoding.pictures import PROMPTS, eagle, fitted


@pytest.mark.parametrize("name", ["vanilla", "eagle2", "jacobi"])
@pytest.mark.parametrize("known_tokens, message", [
    (torch.zeros(3, 2, dtype=torch.int64), r"known_tokens must be int64 \(B=4, K\), got int64 \(3, 2\)"),
    (torch.zeros(4, dtype=torch.int64), r"known_tokens must be int64 \(B=4, K\), got int64 \(4,\)"),
    (torch.zeros(4, 2), r"known_tokens must be int64 \(B=4, K\), got float32 \(4, 2\)"),
    (torch.zeros(4, 17, dtype=torch.int64), "known_tokens must be at most the L=16 tokens of an image, got 17"),
    (torch.tensor([[1, 64]] * 4), r"known_tokens must be within \[0, V=64\), or -1 where no token is known, got 64"),
    (torch.tensor([[1, 2, -2]] * 4), r"known_tokens must be within \[0, V=64\), or -1 .*, got -2"),
    (torch.tensor([[1, 2, -1], [1, -1, 3], [1, -1, -1], [-1] * 3]), "-1 only after the known tokens of an image"),
])
def test_what_known_tokens_are_not(tiny, name, known_tokens, message):
    with pytest.raises(ValueError, match=message):
        tiny.tokens(PROMPTS, name, Sampling.of([1, 2, 3, 4]), known_tokens=known_tokens)
    condition, padding_mask = tiny.gpt.condition(tiny.words(tiny.words.encode(PROMPTS)))
    with pytest.raises(ValueError, match=message):
        decode(tiny.gpt, condition, padding_mask, Sampling.of([1, 2, 3, 4]), known_tokens=known_tokens)


def test_conditions_of_the_wrong_shape_are_refused(tiny):
    condition, padding_mask = tiny.gpt.condition(tiny.words(tiny.words.encode(PROMPTS)))
    for c, mask, seeds, message in (
            (condition[:, :2], padding_mask, 4, r"must be \(B, S=3, dim=32\), got \(4, 2, 32\)"),
            (condition, padding_mask, 3, "got 4 rows and 3 seeds"),
            (condition[:0], padding_mask[:0], 0, "at least one"),
            (condition, padding_mask[:, :2], 4, r"padding_mask must be bool \(B=4, S=3\), got bool \(4, 2\)")):
        with pytest.raises(ValueError, match=message):
            decode(tiny.gpt, c, mask, Sampling.of(list(range(seeds))))
    with pytest.raises(ValueError, match="table of C=.* rows and at least k=8 columns for lantern, got none"):
        speculative_decode(tiny.gpt, eagle(tiny, padding_mask), condition, padding_mask, Sampling.of([0] * 4),
                           [fitted("lantern")] * 4)


class Wrong:
    """A model in which something is wrong."""

    def __init__(self, model, **wrong):
        self.model = model
        vars(self).update(wrong)

    def __getattr__(self, name):
        return getattr(self.model, name)


def on_meta(sampling):
    return dataclasses.replace(sampling, seeds=sampling.seeds.to("meta"))


WRONG_MODELS = {  # what is wrong, from (tiny, condition, padding_mask), and the message
    "prefix": (lambda t, c, m: {"target": Wrong(t.gpt, prefix_len=4)},
               r"target.prefix_len must be the S=3 of its null_condition, got 4"),
    "condition's dtype": (lambda t, c, m: {"condition": c.double()},
                          "condition must be float32 like the target's null_condition, got float64"),
    "device": (lambda t, c, m: {"sampling": on_meta(Sampling.of([0] * 4))},
               "sampling must be on cpu like the target, got meta"),
    "few columns": (lambda t, c, m: {"target": Wrong(t.gpt, new_cache=lambda rows, _: t.gpt.new_cache(rows, 16))},
                    r"cache must be float32 with R=8 rows and at least \d+ columns, got float32 with 8 rows and 16"),
    "few rows": (lambda t, c, m: {"target": Wrong(t.gpt, new_cache=lambda _, columns: t.gpt.new_cache(4, columns))},
                 r"cache must be float32 with R=8 rows and at least \d+ columns, got float32 with 4 rows"),
}


@pytest.mark.parametrize("decoding", ["decode", "jacobi_decode", "speculative_decode"])
@pytest.mark.parametrize("wrong, message", WRONG_MODELS.values(), ids=WRONG_MODELS)
def test_models_and_conditions_that_do_not_fit_are_refused(tiny, monkeypatch, decoding, wrong, message):
    """Before anything is read."""
    condition, padding_mask = tiny.gpt.condition(tiny.words(tiny.words.encode(PROMPTS)))
    given = {"target": tiny.gpt, "condition": condition, "padding_mask": padding_mask,
             "sampling": Sampling.of([0] * 4)} | wrong(tiny, condition, padding_mask)
    if decoding == "jacobi_decode":
        _is_causal[given["target"]] = [True]  # to find this out, the model is read
    monkeypatch.setattr(type(tiny.gpt), "forward", lambda *_: pytest.fail("it was read"))
    with pytest.raises(ValueError, match=message):
        if decoding == "decode":
            decode(**given)
        elif decoding == "jacobi_decode":
            jacobi_decode(**given, methods=[METHODS["jacobi"]] * 4)
        else:
            speculative_decode(**given, draft_model=eagle(tiny, padding_mask), methods=[METHODS["eagle1"]] * 4)


WRONG_DRAFT_MODELS = {
    "grid": (lambda d: Wrong(d, grid=5), "draft_model.grid must be the target's, 4, got 5"),
    "vocabulary": (lambda d: Wrong(d, vocab_size=65), "draft_model.vocab_size must be the target's, 64, got 65"),
    "rows": (lambda d: Wrong(d, padding_mask=d.padding_mask[:4]),
             r"padding_mask must be bool \(R=8, prefix_len=3\) on cpu, 2 for each request, got bool \(4, 3\)"),
    "dtype": (lambda d: Wrong(d, padding_mask=d.padding_mask.int()),
              r"draft_model.padding_mask must be bool .* got int32 \(8, 3\)"),
    "device": (lambda d: Wrong(d, padding_mask=d.padding_mask.to("meta")), "padding_mask must be bool .* on meta"),
}


@pytest.mark.parametrize("wrong, message", WRONG_DRAFT_MODELS.values(), ids=WRONG_DRAFT_MODELS)
def test_draft_models_that_do_not_fit_are_refused(tiny, wrong, message):
    condition, padding_mask = tiny.gpt.condition(tiny.words(tiny.words.encode(PROMPTS)))
    draft_model = SmallDraftModel(tiny.small, *cfg_inputs(tiny.small, *tiny.small.condition(
        tiny.words(tiny.words.encode(PROMPTS)))))
    with pytest.raises(ValueError, match=message):
        speculative_decode(tiny.gpt, wrong(draft_model), condition, padding_mask, Sampling.of([0] * 4),
                           [METHODS["speculative"]] * 4)


def test_a_head_that_is_not_the_target_s_is_refused(tiny):
    padding_mask, config = torch.ones(2, 3, dtype=torch.bool), tiny.gpt.config
    for wrong, message in (
            (EagleHead(dataclasses.replace(config, dim=16)),
             r"target's dim, vocabulary, grid, condition_tokens, \[32, 64, 4, 3\], got \[16, 64, 4, 3\]"),
            (EagleHead(dataclasses.replace(config, vocabulary=65)), r"\[32, 64, 4, 3\], got \[32, 65, 4, 3\]"),
            (EagleHead(config).bfloat16(), "head must have the target's dtype, torch.float32, got torch.bfloat16"),
            (EagleHead(config).to("meta"), "head must have the target's device, cpu, got meta")):
        with pytest.raises(ValueError, match=message):
            EagleDraftModel(tiny.gpt, wrong, tiny.gpt.null_condition(2), padding_mask)


def test_neighbors_on_another_device_are_refused(tiny):
    condition, padding_mask = tiny.gpt.condition(tiny.words(tiny.words.encode(PROMPTS)))
    with pytest.raises(ValueError, match="neighbors must be on cpu like the target, got meta"):
        speculative_decode(tiny.gpt, eagle(tiny, padding_mask), condition, padding_mask, Sampling.of([0] * 4),
                           [fitted("lantern")] * 4, tiny.neighbors(8).to("meta"))


@pytest.mark.parametrize("prompts, seeds", [(1, 3), (2, 1), (0, 0)])
def test_a_seed_for_each_prompt(tiny, prompts, seeds):
    message = f"sampling must have a seed for each of at least one prompt, got {seeds} seeds and {prompts} prompts"
    with pytest.raises(ValueError, match=message):
        tiny.tokens(PROMPTS[:prompts], METHODS["eagle2"], Sampling.of(list(range(seeds))))


def test_methods_by_name(tiny):
    sampling = Sampling.of([0, 1])
    named = tiny.tokens(PROMPTS[:2], "eagle2:depth=2", sampling)
    assert torch.equal(named.tokens, tiny.tokens(PROMPTS[:2], method("eagle2", depth=2), sampling).tokens)
    with pytest.raises(ValueError, match="prompts must be a list of strings, got 'red heart'"):
        tiny.tokens("red heart", METHODS["eagle2"], sampling)


def test_a_method_for_each_prompt(tiny):
    sampling = Sampling.of([0, 1])
    mixed = tiny.tokens(PROMPTS[:2], ["vanilla", METHODS["jacobi"]], sampling)
    assert torch.equal(mixed.tokens, tiny.tokens(PROMPTS[:2], "vanilla", sampling).tokens)
    assert mixed.num_drafted[0].sum() == 0 < mixed.num_drafted[1].sum()
    with pytest.raises(ValueError, match="method must be one, or one for each of the 4 requests, got 2"):
        tiny.tokens(PROMPTS, [METHODS["eagle2"]] * 2, Sampling.of([0] * 4))


def test_k_beyond_the_codebook_is_refused(tiny):
    with pytest.raises(ValueError, match=r"k must be within 1..63 \(the codebook has 64 codes\), got 64"):
        tiny.tokens(PROMPTS, fitted("lantern", k=64), Sampling.of([0] * 4))
