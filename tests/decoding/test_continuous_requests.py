"""Requests for continuous tokens: how methods are written, what is refused, and pairs of models in files."""
import math
from dataclasses import replace

import pytest
import torch

from specvis.decoding.continuous import continuous_decode, parallel_decode
from specvis.decoding.continuous_state import ContinuousSampling, ContinuousState, KnownTokens
from specvis.decoding.methods import method
from specvis.decoding.sampling import Sampling
from specvis.models.mar import MAR
from specvis.models.words import UnknownWords
from specvis.pipelines.mar import MARPair
from tests.decoding.toys import PROMPTS, SEEDS, decode
from tests.tiny import TINY, tiny_pair, tiny_pipeline


@pytest.mark.parametrize("settings, message", [
    ({"seeds": torch.zeros(2)}, r"seeds must be int64 \(B,\) with B >= 1, got torch.float32 \(2,\)"),
    ({"seeds": torch.zeros(0, dtype=torch.int64)}, r"seeds must be int64 .* got torch.int64 \(0,\)"),
    ({"seeds": torch.zeros(2, 1, dtype=torch.int64)}, r"seeds must be int64 .* got torch.int64 \(2, 1\)"),
    ({"temperature": 0.0}, "temperature must be positive and finite in 32 bits for continuous tokens, got 0.0"),
    ({"temperature": math.inf}, "temperature must be positive and finite in 32 bits for continuous tokens, got inf"),
    ({"seeds": [1, 2]}, "seeds must be an int64 tensor .* got list; ContinuousSampling.of takes a list"),
    ({"guidance": [1.0, 2.0]}, r"guidance must be one number for the whole batch, got \[1.0, 2.0\]"),
    ({"temperature": torch.ones(2)}, "temperature must be one number for the whole batch"),
    ({"guidance": math.nan}, "guidance must be a finite number in 32 bits, got nan"),
    ({"guidance": math.inf}, "guidance must be a finite number in 32 bits, got inf"),
])
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ContinuousSampling(**{"seeds": SEEDS} | settings)


@pytest.mark.parametrize("name, got", [("tokens", 9), ("channels", 5), ("num_sampling_steps", 6),
                                       ("num_train_timesteps", 500), ("classes", 9)])
def test_a_draft_model_of_other_tokens_is_refused(name, got):
    wanted = getattr(TINY, name)
    with pytest.raises(ValueError, match=f"draft_model must have the target's {name}={wanted}, got {name}={got}"):
        continuous_decode(MAR(TINY), MAR(replace(TINY, **{name: got})), torch.tensor([1]),
                          ContinuousSampling(SEEDS[:1]), method("cspd"))


ZEROS, HALF = torch.zeros(6, 16, 4), torch.arange(16).expand(6, -1) < 8


@pytest.mark.parametrize("known, message", [
    (KnownTokens(ZEROS[:2], HALF),
     r"tokens must be float32 \(B, L, C\) = \(6, 16, 4\), got torch.float32 \(2, 16, 4\)"),
    (KnownTokens(ZEROS[..., :2], HALF), r"tokens must be .* got torch.float32 \(6, 16, 2\)"),
    (KnownTokens(ZEROS.double(), HALF), r"tokens must be float32 .* got torch.float64 \(6, 16, 4\)"),
    (KnownTokens(ZEROS, HALF[0]), r"is_known must be bool \(6, 16\), got torch.bool \(16,\)"),
    (KnownTokens(ZEROS, HALF.long()), r"is_known must be bool \(6, 16\), got torch.int64 \(6, 16\)"),
    (KnownTokens(ZEROS, torch.arange(16) < torch.tensor([8, 8, 9, 8, 8, 8])[:, None]),
     r"is_known must have the same number of tokens in each image, got \[8, 8, 9, 8, 8, 8\]"),
    (KnownTokens(ZEROS, HALF, num_new=9), r"num_new must be an integer within 0\.\.8 \(the unknown tokens\), got 9"),
    (KnownTokens(ZEROS, HALF, num_new=1.0), "num_new must be an integer within"),
    (KnownTokens(ZEROS * math.nan, HALF), "tokens must be finite where they are known"),
    (KnownTokens(ZEROS, HALF, order=torch.zeros(6, 16)), "order must be int64 and hold each of the 16 positions once"),
    (KnownTokens(ZEROS, HALF, num_new=-1), r"num_new must be an integer within 0\.\.8 \(the unknown tokens\), got -1"),
])
@pytest.mark.parametrize("m", ["mar", "cspd"])
def test_known_tokens_that_do_not_fit_are_refused(pair, m, known, message):
    with pytest.raises(ValueError, match=message):
        decode(pair, m, known=known)


def test_other_arguments_are_checked(pair):
    with pytest.raises(ValueError, match="guidance_schedule must be one of linear, constant, released, got 'x'"):
        parallel_decode(pair.mar, pair.features(PROMPTS), ContinuousSampling(SEEDS), guidance_schedule="x")
    with pytest.raises(ValueError, match=r"steps_last must be within 2\.\.8 \(the model's denoising steps\), got 9"):
        decode(pair, "mar:steps_last=9")
    with pytest.raises(ValueError, match=r"num_iter must be within 1\.\.16 \(the tokens to draw\), got 17"):
        decode(pair, "mar:num_iter=17")
    with pytest.raises(ValueError, match=r"num_iter must be within 1\.\.8 \(the tokens to draw\), got 9"):
        decode(pair, "mar:num_iter=9", known=KnownTokens(ZEROS, HALF))
    for m in ("mar", "cspd"):
        with pytest.raises(ValueError, match="there must be a condition for each of the 6 seeds, got 2"):
            continuous_decode(pair.mar, pair.mar_draft, pair.features(PROMPTS[:2]), ContinuousSampling(SEEDS),
                              method(m))
        with pytest.raises(ValueError, match=r"caption features must be \(R, S, 8\), got \(6, 6\)"):
            continuous_decode(pair.mar, pair.mar_draft, torch.zeros(6, 6), ContinuousSampling(SEEDS), method(m))


@pytest.mark.parametrize("prompts, m, message", [
    (["red hart"], "cspd", r"prompt 'red hart' has unknown words: 'hart' \(near: heart\)"),
    (["green"], "mar", "prompt 'green' has unknown words: 'green'"),
    ([""], "mar", "a prompt must have 1 to 6 words, style included, got 0"),
    (["heart"], "lantern", "method must be one for continuous tokens .mar, cspd, cspd-path, cspd-released.* 'lantern'"),
    (["heart"], "cspd:gamma=0", "gamma must be a whole number within 1..1023, got 0"),
    ("heart", "cspd", "prompts must be a list of strings, got 'heart'"),
    (["heart", "heart"], "cspd", "sampling must have a seed for each of the 2 prompts, got 1"),
    ([], "cspd", "sampling must have a seed for each of the 0 prompts, got 1"),
])
def test_a_pair_is_asked_for_what_it_can_draw(pair, prompts, m, message):
    with pytest.raises(ValueError, match=message) as error:
        pair.tokens(prompts, m, ContinuousSampling(SEEDS[:1]))
    assert isinstance(error.value, UnknownWords) == ("unknown words" in message)


def test_a_pair_draws_by_prompt(pair):
    sampling = ContinuousSampling(SEEDS, 2.0)
    decoded = pair.tokens(PROMPTS, "cspd-path:gamma=2", sampling)
    expected = decode(pair, "cspd-path:gamma=2")
    assert torch.equal(decoded.tokens, expected.tokens) and decoded.tokens.isfinite().all()
    assert torch.equal(pair.tokens(PROMPTS, method("cspd-path", gamma=2), sampling).tokens, expected.tokens)
    same_seed = pair.tokens(["red heart", "blue"], "mar", ContinuousSampling(torch.tensor([1, 1]), 2.0))
    assert torch.equal(*same_seed.order) and not torch.allclose(*same_seed.tokens, atol=0.05)
    pictures = pair.pictures(decoded.tokens)
    assert len(pictures) == 6 and pictures[0].size == (8, 8)


def test_known_tokens_and_tokens_of_other_shapes(pair):
    decoded = pair.tokens(PROMPTS, "cspd", ContinuousSampling.of(SEEDS.tolist()),
                          known=KnownTokens(ZEROS, HALF, num_new=2))
    assert decoded.num_drawn == 2 and not decoded.tokens[:, :8].any()
    with pytest.raises(ValueError, match=r"tokens must be \(B, L, C\) = \(B, 16, 4\), got \(6, 9, 4\)"):
        pair.pictures(decoded.tokens[:, :9])


def test_tokens_of_another_device(pair, monkeypatch):
    """As those of `ContinuousDecoded`, which are on the CPU. Where there is no GPU, another device is meta."""
    order, seeds = torch.arange(16).repeat(6, 1), SEEDS.to("meta")
    for known in (KnownTokens(ZEROS, HALF), KnownTokens(ZEROS, HALF, order=order)):
        state = ContinuousState(pair.mar, ContinuousSampling(seeds), known)
        assert {state.tokens.device.type, state.order.device.type, state.noise.device.type} == {"meta"}
        assert state.start == 8
    monkeypatch.setattr(MARPair, "device", torch.device("meta"))
    monkeypatch.setattr(pair.tokenizer, "decode_latents", lambda latents: (
        read.append(latents.device.type), torch.zeros(len(latents), 3, 8, 8))[1])
    read = []
    assert len(pair.pictures(ZEROS)) == 6 and read == ["meta"]


@pytest.mark.parametrize("ids", [torch.tensor([10]), torch.tensor([-1]), torch.tensor([1.0]), torch.tensor([[1]])])
def test_class_ids_that_do_not_exist_are_refused(ids):
    with pytest.raises(ValueError, match=r"class ids must be int64 \(R,\) within 0\.\.9, got"):
        continuous_decode(MAR(TINY), MAR(TINY), ids, ContinuousSampling.of([1]), "cspd")


def test_a_pair_saved_is_the_pair_loaded(pair, tmp_path):
    pipeline = tiny_pipeline()
    pipeline.prompts, pipeline.tokenizer = pair.prompts, pair.tokenizer
    pipeline.save(tmp_path)
    pair.save(tmp_path)
    loaded = MARPair.load(tmp_path)
    rounded = tiny_pair()                                       # files hold float16
    for parameter in rounded.parameters():
        parameter.copy_(parameter.half())
    assert loaded.mar.config == pair.mar.config and loaded.mar_draft.config == pair.mar_draft.config
    assert loaded.scaling == pair.scaling and loaded.words.ids == pair.words.ids
    for m in ("mar", "cspd-path"):
        one, other = (pair.tokens(PROMPTS, m, ContinuousSampling(SEEDS, 2.0)) for pair in (loaded, rounded))
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.acceptance, other.acceptance)
    assert [a.tobytes() for a in loaded.pictures(one.tokens)] == [b.tobytes() for b in rounded.pictures(other.tokens)]


def test_the_two_kinds_of_tokens_are_not_mixed_up(pair):
    discrete, continuous_ = Sampling.of([0]), ContinuousSampling.of([0])
    for method_, sampling in (("mar", discrete), ("vanilla", continuous_)):
        with pytest.raises(ValueError, match="must be for discrete tokens.*MARPair decodes continuous ones"):
            tiny_pipeline().tokens(["red heart"], method_, sampling)
    with pytest.raises(ValueError, match="sampling must be a ContinuousSampling, got Sampling"):
        pair.tokens(["red heart"], "mar", discrete)
