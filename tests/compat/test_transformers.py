"""Trees and Jacobi decoding inside of transformers' generate, against its own decoding and plain statements of ours."""
import copy
import itertools
import re
import warnings
from pathlib import Path

import pytest
import torch

from specvis_kernels import StatusError, codebook_neighbors, guided_probs, gumbel_noise
from specvis_kernels.compat import _transformers, _versions
from specvis_kernels.compat import transformers as compat
from specvis_kernels.compat._transformers import cache_name
from specvis_kernels.compat.transformers import GuidedProbsProcessor, jacobi_generate, tree_generate
from tests.decoding.test_step import Recorded, recorded  # noqa: F401  a fixture
from tests.families import GRIDS, TEXT, chameleon_model, emu3_model, glm_image_model, janus_model, needs_glm_image

transformers = pytest.importorskip("transformers")
EXAMPLES = Path(__file__).parent.parent.parent / "examples"
V = 24
CHOICES = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
PROMPTS = torch.tensor([[0, 0, 0, 9, 2, 7], [3, 1, 4, 1, 5, 9], [0, 2, 7, 1, 8, 2], [8, 1, 8, 2, 8, 4]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6, [0, 1, 1, 1, 1, 1], [1] * 6])
SEEDS = [5, 6, 2 ** 40, -3]


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.3, attn_implementation=request.param, bos_token_id=1,
        eos_token_id=None, pad_token_id=0)
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def draft(model):
    """The model itself without what came before the last token, and a little flatter."""
    table = (0.8 * model(torch.arange(V)[:, None]).logits[:, 0]).softmax(-1)
    return lambda sequences, mask: table[sequences[..., -1]]


def generate(model, function=None, prompts=PROMPTS, mask=MASK, **options):
    options = dict(max_new_tokens=16, do_sample=False, pad_token_id=0) | options
    return model.generate(prompts, attention_mask=mask, custom_generate=function, **options)


@pytest.fixture(params=["tree", "jacobi", "jacobi on a grid"])
def ours(request, draft):
    """The options of a function of ours."""
    return {"tree": dict(function=tree_generate, draft=draft, choices=CHOICES),
            "jacobi": dict(function=jacobi_generate, window=5),
            "jacobi on a grid": dict(function=jacobi_generate, window=4, grid=4)}[request.param]


@pytest.mark.parametrize("eos_token_id", [None, [5, 13, 21]])
def test_greedy_is_generate(model, ours, eos_token_id):
    stats, options = {}, dict(max_new_tokens=40, eos_token_id=eos_token_id)
    tokens = generate(model, **ours, stats=stats, **options)
    assert torch.equal(tokens, generate(model, **options))
    assert torch.equal(generate(model, **ours, **options, return_dict_in_generate=True).sequences, tokens)
    assert stats["num_tokens"] == [40] * 4 if eos_token_id is None else len(set(stats["num_tokens"])) > 2
    assert stats["target_forwards"] < max(stats["num_tokens"])
    assert [len(row) for row in tokens] == [6 + max(stats["num_tokens"])] * 4


@pytest.mark.parametrize("make", [
    lambda more: transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=V, **more)),
    lambda more: transformers.Emu3ForCausalLM(transformers.Emu3TextConfig(vocab_size=V, **more))])
def test_forwards_of_nodes_are_replayed(make, ours, as_on_a_gpu, request, monkeypatch):
    """On CUDA: after the prompt no module of the layers is called, and the tokens stay what they are."""
    torch.manual_seed(0)
    llama = make(dict(hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                      num_key_value_heads=2, initializer_range=0.3, eos_token_id=None, pad_token_id=0)).eval()
    llama.requires_grad_(False)
    options = dict(seeds=[7, 8, 9, 10], do_sample=True, guidance=2.0, max_new_tokens=40, unconditional_ids=PROMPTS[:1])
    with monkeypatch.context() as patch:
        patch.setattr(_transformers, "decoder_of", lambda model: None)
        expected = generate(llama, **ours, **options)
    calls, replays = [], Recorded.num_replays
    monkeypatch.setattr(type(llama.model.layers[0]), "forward", counted(type(llama.model.layers[0]).forward, calls))
    assert torch.equal(generate(llama, **ours, **options), expected) and len(calls) == 2
    request.getfixturevalue("recorded")
    assert torch.equal(generate(llama, **ours, **options), expected) and Recorded.num_replays > replays
    hook = llama.lm_head.register_forward_hook(lambda *_: calls.clear())  # what a replay would not call
    generate(llama, **ours, **options)
    assert len(calls) < 3
    hook.remove()
    with torch.autocast("cpu", torch.bfloat16):
        generate(llama, **ours, **options)
    assert len(calls) > 10  # these were read by modules, whose products autocast makes


def counted(function, calls):
    return lambda *args, **kwargs: (calls.append(1), function(*args, **kwargs))[1]


def plain(model, prompt, null, seed, num_tokens, temperature=1.0, top_k=0, top_p=1.0, s=1.0, ranges=None, filters=None):
    """One at a time, without a cache, padding or a batch: transformers' filters, and gumbel_noise."""
    if filters is None:
        filters = [transformers.TemperatureLogitsWarper(temperature)]
        filters += [transformers.TopKLogitsWarper(top_k)] if top_k else []
        filters += [transformers.TopPLogitsWarper(top_p)] if top_p < 1 else []
    tokens = []
    for position in range(num_tokens):
        new = torch.tensor(tokens, dtype=torch.int64)
        logits = model(torch.cat([prompt, new])[None]).logits[:, -1]
        if null is not None:
            uncond = model(torch.cat([null, new])[None]).logits[:, -1]
            logits = uncond + s * (logits - uncond)
        if ranges is not None:
            first, last = ranges[min(position, len(ranges) - 1)]
            logits[:, :first] = logits[:, last:] = -torch.inf
        for apply in filters:
            logits = apply(None, logits)
        noise = gumbel_noise(torch.tensor([seed]), torch.tensor([[position]]), V)[0]
        tokens.append((logits.log_softmax(-1) + noise).argmax().item())
    return tokens


def test_with_seeds_the_tokens_are_those_of_one_at_a_time(model, ours):
    stats, settings = {}, dict(temperature=0.8, top_k=12, top_p=0.9)
    tokens = generate(model, **ours, do_sample=True, seeds=SEEDS, stats=stats, **settings)
    for b in range(4):
        assert tokens[b, 6:].tolist() == plain(model, PROMPTS[b][MASK[b] == 1], None, SEEDS[b], 16, **settings)
    assert stats["target_forwards"] < 16 and len(set(tokens[:, 6:].flatten().tolist())) > 6


def test_the_callers_own_warpers_count_and_not_the_configs_numbers(model, ours):
    T, K, P, M = (getattr(transformers, f"{w}LogitsWarper") for w in ("Temperature", "TopK", "TopP", "MinP"))
    for warpers in ([K(1)], [P(0.6), K(3)], [K(3), P(0.6)], [T(0.5), P(0.7)], [K(9), P(0.9), M(0.3)], [T(1.5), M(0.1)]):
        tokens = generate(model, **ours, do_sample=True, seeds=SEEDS, logits_processor=warpers, top_k=0)
        for b in range(4):
            assert tokens[b, 6:].tolist() == plain(model, PROMPTS[b][MASK[b] == 1], None, SEEDS[b], 16, filters=warpers)


def test_min_p_keeps_the_ids_that_transformers_keeps(model, ours):
    x = torch.randn(1000, 300) * 3
    wanted = transformers.MinPLogitsWarper(0.02)(None, transformers.TopKLogitsWarper(40)(None, x)) > -torch.inf
    kept, others = (guided_probs(x[:, None], None, None, 1.0, 40, 1.0, min_p=p).probs[:, 0] > 0 for p in (0.02, 0.021))
    assert torch.equal(kept, wanted) and not torch.equal(others, wanted)
    options = dict(do_sample=True, seeds=SEEDS, temperature=2.0, top_k=0)
    tokens, without = (generate(model, **ours, **options, min_p=p) for p in (0.2, None))
    warpers = [transformers.TemperatureLogitsWarper(2.0), transformers.MinPLogitsWarper(0.2)]
    assert tokens[0, 6:].tolist() == plain(model, PROMPTS[0][MASK[0] == 1], None, SEEDS[0], 16, filters=warpers)
    assert not torch.equal(tokens, without)


RANGES = [(2, 20), (2, 20), (20, 21), (0, 24), (10, 14)]  # for each new token; the last one repeats; token 20 is forced


def test_guidance_with_padding_on_the_left_and_ranges_of_ids(model, ours):
    nulls = torch.tensor([[0, 0, 1, 1, 1, 2, 3, 2], [2, 2, 2, 2, 2, 2, 2, 2]])
    null_mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1]])
    options = ours | dict(
        do_sample=True, top_k=0, seeds=torch.tensor(SEEDS), guidance=2.5, id_range=torch.tensor(RANGES))
    tokens = generate(model, **options, unconditional_ids=nulls, unconditional_mask=null_mask)
    for b in range(4):
        null = nulls[b // 2][null_mask[b // 2] == 1]  # two prompts share one
        assert tokens[b, 6:].tolist() == plain(model, PROMPTS[b][MASK[b] == 1], null, SEEDS[b], 16, s=2.5,
                                               ranges=RANGES)
    each = generate(model, **options | dict(id_range=torch.tensor(RANGES).repeat(4, 1, 1)), unconditional_ids=nulls,
                    unconditional_mask=null_mask)
    assert torch.equal(tokens, each) and (tokens[:, 8] == 20).all()


def test_a_request_does_not_depend_on_the_others(model, ours):
    options = ours | dict(do_sample=True, top_k=0)
    tokens = generate(model, **options, seeds=SEEDS)
    order = [2, 0, 3]
    others = generate(model, **options, prompts=PROMPTS[order], mask=MASK[order], seeds=[SEEDS[b] for b in order])
    assert torch.equal(others, tokens[order])
    alone = generate(model, **options, prompts=PROMPTS[:1, 3:], mask=None, seeds=SEEDS[:1])
    assert torch.equal(alone[:, 3:], tokens[:1, 6:])


def test_without_seeds_torchs_numbers_decide(model, ours):
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(generate(model, **ours, do_sample=True))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_a_sampled_tree_keeps_the_distribution():
    """All sequences of three tokens by their probabilities, and 6000 that a tree has drawn: chi-square."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                      num_attention_heads=1, initializer_range=1.0, eos_token_id=None, pad_token_id=0)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    every = torch.cartesian_prod(*[torch.arange(5)] * 3)
    logits = model(torch.cat([torch.tensor([[1, 2]]).expand(125, -1), every], 1)).logits[:, 1:4] / 1.5
    expected = logits.log_softmax(-1).gather(2, every[..., None]).sum((1, 2)).exp()
    table = torch.randn(5, 5).softmax(-1)
    count = 6000

    def chi_square(choices=((0,), (1,), (0, 0), (0, 1), (1, 0)), **verify):
        tokens = generate(model, tree_generate, torch.tensor([[1, 2]]).expand(count, -1), None, max_new_tokens=3,
                          do_sample=True, temperature=1.5, draft=lambda s, _: table[s[..., -1]],
                          choices=choices, stats=stats, **verify)[:, 2:]
        drawn = (tokens * torch.tensor([25, 5, 1])).sum(1).bincount(minlength=125)
        common = expected * count >= 5
        rest = count - drawn[common].sum(), count * (1 - expected[common].sum())
        statistic = ((drawn[common] - count * expected[common]) ** 2 / (count * expected[common])).sum()
        return (statistic + (rest[0] - rest[1]) ** 2 / rest[1]).item(), common.sum().item()

    stats = {}
    statistic, degrees = chi_square()
    assert statistic < degrees + 3.5 * (2 * degrees) ** 0.5 and stats["target_forwards"] <= 4
    statistic, degrees = chi_square([(1,), (3,), (3, 2)])  # ranks with gaps
    assert statistic < degrees + 3.5 * (2 * degrees) ** 0.5
    neighbors = codebook_neighbors(torch.randn(5, 3), 2)
    relaxed, _ = chi_square(verify=dict(neighbors=neighbors, delta=0.5, residual="relaxed"))
    assert relaxed > 10 * degrees  # the test can tell


@pytest.mark.parametrize("settings", [dict(do_sample=False), dict(do_sample=True, top_k=0),
                                      dict(do_sample=True, top_k=0, seeds=SEEDS)])
def test_the_draft_model_sees_whole_sequences(model, settings):
    """A draft model that is the model itself and knows the padding: every draft is accepted."""
    def draft(sequences, mask):
        B, F, T = sequences.shape
        ids, is_real = sequences.flatten(0, 1), mask.flatten(0, 1).long()
        positions = (is_real.cumsum(1) - 1).clamp(min=0)
        return model(ids, attention_mask=is_real, position_ids=positions).logits[:, -1].softmax(-1).view(B, F, V)

    stats = {}
    tokens = generate(model, tree_generate, draft=draft, choices=[(0,), (0, 0), (0, 0, 0)], stats=stats,
                      max_new_tokens=17, **settings)
    assert settings["do_sample"] or torch.equal(tokens, generate(model, max_new_tokens=17))
    assert stats["target_forwards"] == 5  # the prompt's token, and four in each tree


@pytest.mark.parametrize("options", [dict(window=4), dict(window=4, grid=4), dict(window=4, grid=7)])
def test_every_position_has_a_guess(model, options):
    """A model with one output everywhere: every guess is right, and each forward makes five tokens."""
    same = type(model)(model.config).eval()
    torch.nn.init.zeros_(same.lm_head.weight)
    generate(same, jacobi_generate, do_sample=True, stats=(stats := {}), **options)
    assert stats == dict(target_forwards=4, num_tokens=[16] * 4)


class Stop(transformers.StoppingCriteria):
    """Stops after a token that is divisible by 6, but not before the fourth."""

    def __call__(self, input_ids, scores, **_):
        self.seen.append(input_ids.tolist())
        return (input_ids[:, -1] % 6 == 0) & (input_ids.shape[1] > 6 + 3)


class Never(transformers.StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_stopping_criteria_are_asked_after_every_token(model, ours):
    full = generate(model, max_new_tokens=30)[:, 6:].tolist()
    wanted = [next((i for i, token in enumerate(row) if token % 6 == 0 and i >= 3), 29) + 1 for row in full]
    assert len(set(wanted)) > 1
    stop, stats = Stop(), {}
    stop.seen = []
    tokens = generate(model, **ours, max_new_tokens=30, stopping_criteria=[stop, Never()], stats=stats)
    assert stats["num_tokens"] == wanted and tokens.shape[1] == 6 + max(wanted)
    for row, longer, number in zip(tokens[:, 6:].tolist(), full, wanted):
        assert row == longer[:number] + [0] * (max(wanted) - number)
    of_first = [seen[0] for seen in stop.seen if seen[0][:6] == PROMPTS[0].tolist()]
    assert of_first == [PROMPTS[0].tolist() + full[0][:n] for n in range(1, wanted[0] + 1)]


class Streamer:
    def __init__(self):
        self.tokens, self.has_ended = [], False

    def put(self, value):
        assert value.shape == ((1,) if self.tokens else (1, 6))
        self.tokens += value.flatten().tolist()

    def end(self):
        self.has_ended = True


def test_a_streamer_gets_every_token(model, ours):
    streamer = Streamer()
    tokens = generate(model, **ours, prompts=PROMPTS[1:2], mask=None, token_streamer=streamer)
    assert streamer.tokens == tokens[0].tolist() and streamer.has_ended


@pytest.mark.parametrize("seeds", [None, SEEDS])
def test_log_probabilities_of_the_new_tokens(model, ours, seeds):
    """Against transformers' filters on a forward over the finished sequences. Requests end at different tokens."""
    stats = {}
    options = dict(do_sample=True, temperature=0.8, top_k=7, top_p=0.9, eos_token_id=[5, 13, 21])
    tokens = generate(model, **ours, seeds=seeds, stats=stats, log_probs=True, **options)
    is_real = torch.nn.functional.pad(MASK, (0, tokens.shape[1] - 6), value=1)
    logits = model(tokens, attention_mask=is_real, position_ids=(is_real.cumsum(1) - 1).clamp(min=0)).logits[:, 5:-1]
    new, x = tokens[:, 6:], logits / 0.8
    filtered = transformers.TopPLogitsWarper(0.9)(None, transformers.TopKLogitsWarper(7)(None, x.flatten(0, 1)))
    is_made = torch.arange(new.shape[1]) < torch.tensor(stats["num_tokens"])[:, None]
    assert len(set(stats["num_tokens"])) > 1
    for name, theirs in (("full", x), ("sampled", filtered.view_as(x))):
        expected = theirs.log_softmax(-1).gather(-1, new[..., None])[..., 0]
        torch.testing.assert_close(stats[name], torch.where(is_made, expected, 0.0), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="needs a dict stats with log_probs"):
        generate(model, **ours, log_probs=True)


def test_several_sequences_of_a_prompt(model):
    tokens = generate(model, jacobi_generate, window=5, do_sample=True, num_return_sequences=2,
                      seeds=[*SEEDS, 1, 2, 3, 4])
    assert tokens.shape == (8, 22) and torch.equal(tokens[0, :6], tokens[1, :6])
    assert not torch.equal(tokens[0], tokens[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(model, ours, dtype):
    """In bfloat16 a forward of more tokens rounds otherwise. In float64 transformers' eager padding gives NaN."""
    other = copy.deepcopy(model).to(dtype)
    tokens, wanted = (generate(other, **o, mask=torch.ones_like(PROMPTS)) for o in (ours, {}))
    assert torch.equal(tokens[:, :7], wanted[:, :7]) and (dtype == torch.bfloat16 or torch.equal(tokens, wanted))


REFUSED = [
    (dict(num_beams=2), "jacobi_generate needs num_beams=1, got 2"),
    (dict(repetition_penalty=1.5), "knows temperature, top_k, top_p and min_p alone, got RepetitionPenaltyLogits"
     r"Processor by generation_config.repetition_penalty=1.5 \(off by repetition_penalty=1.0\): give guidance"),
    (dict(return_dict_in_generate=True, output_scores=True), "returns sequences alone, got output_scores"),
    (dict(output_attentions=True), "returns sequences alone, got output_attentions"),
    (dict(inputs_embeds=torch.zeros(4, 6, 32)), "takes prompts of token ids alone, got inputs_embeds"),
    (dict(guidance=2.0), "guidance and unconditional_ids must be given together"),
    (dict(unconditional_ids=PROMPTS), "guidance and unconditional_ids must be given together"),
    (dict(guidance=2.0, unconditional_ids=PROMPTS[:3]),
     r"unconditional_ids must be int64 \(R, S'\) with R a divisor of B=4, got \(3, 6\)"),
    (dict(id_range=torch.zeros(3, 4, 2)), r"id_range must be int64 \(L, 2\) or \(B=4, L, 2\), got float32 \(3, 4, 2\)"),
    (dict(id_range=torch.tensor([0, 5])), r"id_range must be int64 \(L, 2\) or \(B=4, L, 2\), got int64 \(2,\)"),
    (dict(do_sample=True, top_k=0, logits_processor=[transformers.TopPLogitsWarper(0.5, min_tokens_to_keep=3)]),
     "needs temperature before top_k and top_p, and min_p after them, each at most once, without min_tokens_to_keep"),
    (dict(do_sample=True, logits_processor=[transformers.TopKLogitsWarper(1)]),  # the config has top_k=50
     r"got TopKLogitsWarper, TopKLogitsWarper \(off by top_k=0, top_p=1.0 and min_p=None of generate\)"),
    (dict(seeds=1), "integers of 64 bits, one for each of the B=4 requests, got 1"),
    (dict(window=-1), "window must be an integer >= 0, got -1"),
    (dict(window=4, grid=3), "window must be at most grid=3, the tokens of a row, got 4"),
    (dict(grid=0), "grid must be an integer >= 1, got 0"),
    (dict(token_streamer=Streamer()), "needs a batch of one for token_streamer, got 4"),
]


@pytest.mark.parametrize("options, message", REFUSED)
def test_what_is_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, jacobi_generate, **options)


def test_what_a_tree_refuses(model, draft):
    tree = dict(function=tree_generate, draft=draft, choices=CHOICES)
    for options, message in (
            (dict(choices=[]), r"choices must be at least one path of ranks, got \[\]"),
            (dict(choices=None), "choices must be at least one path of ranks, got None"),
            (dict(draft=None), "draft must be a function of sequences and a mask, got None"),
            (dict(choices=[(0, 0)]), "choices must be different paths"),
            (dict(choices=[(0.5,)]), r"choices must be paths of integers, .* got \(0.5,\)"),
            (dict(seeds=SEEDS, verify=dict(delta=0.1)), "verify must be empty with seeds"),
            (dict(draft=lambda s, m: torch.ones(*s.shape[:2], V - 1)),
             r"draft's result must be float32 \(B=4, F=1, V=24\), got float32 \(4, 1, 23\)")):
        with pytest.raises(ValueError, match=message):
            generate(model, **tree | options)


@pytest.mark.parametrize("options", [dict(do_sample=False), dict(do_sample=True), dict(do_sample=True, seeds=SEEDS)])
def test_logits_that_are_not_numbers_raise(model, ours, options):
    broken = copy.deepcopy(model)
    options = ours | options
    options |= {} if ours["function"] is tree_generate or options["do_sample"] else dict(seeds=None)
    torch.nn.init.constant_(broken.lm_head.weight, torch.nan)
    with pytest.raises(StatusError, match="INVALID_ROW at requests 0, 1, 2, 3 .after guidance and temperature a row"):
        generate(broken, **options)
    broken.load_state_dict(model.state_dict())
    rows = iter(range(3))  # the prompt, a forward, and from then on NaN in request 2 alone
    broken.lm_head.register_forward_hook(lambda module, read, out: None if next(rows, None) in (0, 1) else
                                         out.index_fill(0, torch.tensor([2]), torch.nan))
    with pytest.raises(StatusError, match="INVALID_ROW at request 2 "):
        generate(broken, **options)


def test_rows_that_no_token_comes_from_may_be_no_numbers(model, ours):
    options = ours | dict(eos_token_id=[5, 13, 21], max_new_tokens=40)
    wanted = generate(model, **options, stats=(stats := {}))
    shortest = min(range(4), key=stats["num_tokens"].__getitem__)
    broken, num_forwards = type(model)(model.config).eval(), itertools.count()
    broken.load_state_dict(model.state_dict())
    broken.lm_head.register_forward_hook(  # each forward gives a token at least: then this request is finished
        lambda module, read, out: out.index_fill(0, torch.tensor([shortest]), torch.nan)
        if next(num_forwards) >= stats["num_tokens"][shortest] else None)
    assert torch.equal(generate(broken, **options), wanted) and next(num_forwards) > stats["num_tokens"][shortest] + 1


def test_guesses_behind_a_wrong_one_may_be_no_numbers(model):
    options = dict(function=jacobi_generate, window=8, do_sample=True, seeds=SEEDS, top_k=0)
    broken, num_broken = copy.deepcopy(model), itertools.count()
    broken.lm_head.register_forward_hook(lambda module, read, out: next(num_broken) is not None and out.index_fill(
        1, torch.tensor([8]), torch.nan) if out.shape[1] == 9 else None)
    assert torch.equal(generate(broken, **options), generate(model, **options)) and next(num_broken) > 4


def test_a_draft_model_of_no_numbers_raises(model):
    for options in ({}, dict(seeds=SEEDS)):
        with pytest.raises(StatusError, match="draw_children: INVALID_ROW at requests 0, 1, 2, 3 "):
            generate(model, tree_generate, do_sample=True, choices=CHOICES, **options,
                     draft=lambda sequences, mask: torch.full((*sequences.shape[:2], V), torch.nan))


def test_models_that_cannot_be_decoded_so(model):
    cache, rest = transformers.DynamicCache(), dict(generation_config=transformers.GenerationConfig(max_length=22))
    model(PROMPTS[:, :3], **{cache_name(model): cache})
    for name in ("cache", "past_key_values"):  # whichever of the two this version hands over
        with pytest.raises(ValueError, match=f"needs an empty {name}, got one with 3 tokens"):
            jacobi_generate(model, PROMPTS, **{name: cache}, **rest)
        jacobi_generate(model, PROMPTS, **{name: transformers.DynamicCache()}, **rest)
    with pytest.raises(ValueError, match="needs an empty .*, got one with 3 tokens"):
        generate(model, jacobi_generate, mask=None, **{cache_name(model): cache})
    for changed, message in (({"attn_implementation": "flash_attention_2"}, "got 'flash_attention_2'"),
                             ({"layer_types": ["full_attention", "linear_attention"]}, "got linear_attention"),
                             ({"sliding_window": 20}, "got sliding_attention")):
        other = type(model)(transformers.LlamaConfig(**model.config.to_dict()))
        for name, value in changed.items():
            setattr(other.config, "_attn_implementation_internal" if "attn" in name else name, value)
        with pytest.raises(ValueError, match=message):
            jacobi_generate(other, PROMPTS, generation_config=transformers.GenerationConfig(max_length=22))
    other.config.sliding_window = 22  # as long as the sequences
    tokens = jacobi_generate(other, PROMPTS, generation_config=transformers.GenerationConfig(max_length=22))
    assert tokens.shape == (4, 22)


def qwen2_vl_model(seed):
    torch.manual_seed(seed)
    text = TEXT | {"vocab_size": 40, "rope_scaling": {"rope_type": "default", "mrope_section": [3, 2, 3]}}
    vision = {"depth": 1, "embed_dim": 8, "num_heads": 1, "hidden_size": 64, "patch_size": 2}
    ids = {"image_token_id": 30, "video_token_id": 31, "vision_start_token_id": 32, "vision_end_token_id": 33}
    return transformers.Qwen2VLForConditionalGeneration(transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, bos_token_id=1, eos_token_id=2, **ids)).eval()


@needs_glm_image  # a version in which Qwen2-VL's configuration is nested
def test_three_axes_of_text_alone():
    """All three count the same there; the positions of a picture in the prompt are not known."""
    model, options = qwen2_vl_model(0), dict(max_new_tokens=24, eos_token_id=None)
    wanted = generate(model, **options)
    tokens = generate(model, jacobi_generate, window=4, **options)
    assert torch.equal(tokens, wanted) and len(wanted[:, 6:].unique()) > 5
    picture = dict(pixel_values=torch.zeros(4, 24), image_grid_thw=torch.tensor([[1, 2, 2]]),
                   mm_token_type_ids=torch.tensor([[0, 1, 0]]))
    with pytest.raises(ValueError, match="jacobi_generate takes prompts of token ids alone, got .*mm_token_type_ids"):
        generate(model, jacobi_generate, torch.tensor([[32, 30, 33]]), None, **picture, **options)


@pytest.mark.parametrize("make", [chameleon_model, emu3_model, janus_model])
def test_multimodal_classes(make):
    """They get more keyword arguments than text models do, and Emu3 and Chameleon a mask of their image ids."""
    model, options = make(3), dict(max_new_tokens=24, eos_token_id=None)
    prompts, mask = torch.tensor([[0, 0, 20, 21, 9], [1, 22, 23, 24, 25]]), torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    if make is janus_model:
        options.update(generation_mode="text")
    wanted = generate(model, prompts=prompts, mask=mask, **options)
    options.pop("generation_mode", None)
    for function in (dict(window=0), dict(window=4), dict(window=16, grid=16)):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # the cache has the name that this version asks for
            tokens = generate(model, jacobi_generate, prompts, mask, **function, **options, stats=(stats := {}))
        assert torch.equal(tokens, wanted) and stats["target_forwards"] <= 24
    table = torch.randn(wanted.max() + 1, model.get_output_embeddings().weight.shape[0]).softmax(-1)
    tree = dict(draft=lambda sequences, mask: table[sequences[..., -1].clamp(max=len(table) - 1)], choices=CHOICES)
    assert torch.equal(generate(model, tree_generate, prompts, mask, **tree, **options), wanted)
    options.update(do_sample=True, top_k=20, seeds=SEEDS[:2])
    drawn = [generate(model, jacobi_generate, prompts, mask, window=w, **options) for w in (0, 16)]
    drawn.append(generate(model, tree_generate, prompts, mask, **tree, **options))
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], wanted)


GLM_PROMPTS, GLM_MASK = torch.tensor([[0, 0, 20, 21, 7], [1, 22, 23, 24, 7]]), torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
OTHER_GRIDS = [[1, 4, 2], [1, 3, 2]]  # as many tokens as GRIDS, in other places
CODES = torch.tensor([[0, 10]] * 14 + [[11, 12]])  # and the id that ends a picture
DRAWN = dict(prompts=GLM_PROMPTS, mask=GLM_MASK, max_new_tokens=15, eos_token_id=None,
             images_per_sample=torch.tensor([2, 2]), image_grid_thw=torch.tensor(GRIDS + OTHER_GRIDS))


@needs_glm_image
def test_glm_image_draws_its_grids():
    """The positions of three axes are its own; each request has its own grids."""
    model = glm_image_model(3)
    wanted = generate(model, **DRAWN, suppress_tokens=[10, 11, 12])
    wanted[:, -1] = 11
    table = torch.randn(40, 13, generator=torch.Generator().manual_seed(0)).softmax(-1)
    tree = dict(function=tree_generate, draft=lambda sequences, mask: table[sequences[..., -1]], choices=CHOICES)
    jacobi, options = dict(function=jacobi_generate, window=5), dict(do_sample=True, top_k=0, seeds=SEEDS[:2])
    for function in (jacobi, jacobi | dict(window=3, grid=4), tree):
        assert torch.equal(generate(model, **DRAWN, **function, id_range=CODES, stats=(stats := {})), wanted)
        assert stats["target_forwards"] < 15
    plain = generate(model, **DRAWN, **jacobi | dict(window=0), **options, id_range=CODES)
    for function in (jacobi, tree):
        assert torch.equal(generate(model, **DRAWN, **function, **options, id_range=CODES), plain)
    assert len(wanted[1, 5:].unique()) > 5 and len(plain[:, 5:].unique()) > 5
    for b in range(2):  # alone, without padding; a request's own grids count
        alone = dict(prompts=GLM_PROMPTS[b:b + 1, 2 * (b == 0):], mask=None, images_per_sample=None,
                     image_grid_thw=DRAWN["image_grid_thw"][2 * b:][:2])
        one = generate(model, **DRAWN | alone, **jacobi, **options | dict(seeds=SEEDS[b:b + 1]), id_range=CODES)
        assert torch.equal(one[0, -15:], plain[b, -15:])
    nulls = dict(guidance=2.0, unconditional_ids=torch.tensor([[1, 7]]))
    guided = [generate(model, **DRAWN, **jacobi | dict(window=w), **options, **nulls) for w in (0, 5)]
    assert torch.equal(*guided) and not torch.equal(guided[0], plain)


@needs_glm_image
@pytest.mark.parametrize("changed, message", [
    (dict(image_grid_thw=None), "jacobi_generate needs image_grid_thw, the grids that GLM-Image draws"),
    (dict(image_grid_thw=torch.tensor(GRIDS)), r"needs image_grid_thw \(n, 3\), n the sum of images_per_sample, which "
                                               r"is of B=2 prompts, got int64 \(2, 3\) and \[2, 2\]"),
    (dict(images_per_sample=None), "needs images_per_sample, how many of image_grid_thw each of B=2 prompts has"),
    (dict(image_grid_thw=torch.ones(4, 2, dtype=torch.int64)), r"got int64 \(4, 2\) and \[2, 2\]"),
    (dict(prompts=GLM_PROMPTS.masked_fill(GLM_PROMPTS == 21, 11)), "are all drawn, got prompts in which 11 ends 1 pic"),
    (dict(max_new_tokens=16), "needs max_new_tokens of at most 15, the tokens of image_grid_thw and what ends them, g"),
    (dict(mm_encoder_outputs={"image": 1}), "takes prompts of token ids alone, got mm_encoder_outputs")])
def test_grids_that_do_not_fit_the_prompts(changed, message):
    with pytest.raises(ValueError, match=message):
        generate(glm_image_model(0), jacobi_generate, **DRAWN | changed)


def test_what_another_version_may_hand_over(model, monkeypatch):
    """New arguments are ignored where they ask for nothing; else the error says which versions are tested."""
    class Newer(type(model)):
        def forward(self, *read, position_ids=None, scale_of_tomorrow=1.0, **named):
            return super().forward(*read, position_ids=position_ids, **named)

    newer = Newer(model.config).eval()
    newer.load_state_dict(model.state_dict())
    rest = dict(generation_config=transformers.GenerationConfig(max_length=22))
    wanted = jacobi_generate(model, PROMPTS, **rest)
    for named in (dict(mm_encoder_outputs={}), dict(unknown=None), dict(unknown=()), dict(unknown=torch.zeros(0)),
                  dict(scale_of_tomorrow=1.0)):
        assert torch.equal(jacobi_generate(newer, PROMPTS, **named, **rest), wanted)
    tested = re.escape(f"({_versions.versions('transformers')})")
    for named in (dict(mm_encoder_outputs={"image": 1}), dict(unknown=0), dict(unknown=torch.tensor(0)),
                  dict(scale_of_tomorrow=2.0)):
        message = f"takes prompts of token ids alone, got {next(iter(named))} {tested}"
        with pytest.raises(ValueError, match=message):
            jacobi_generate(newer, PROMPTS, **named, **rest)
    monkeypatch.setattr(_versions, "version", lambda decoder: "4.56.2")
    with pytest.raises(ValueError, match=r"transformers must be 4.57 or newer \(transformers 4.56.2 is installed"):
        jacobi_generate(model, PROMPTS, **rest)


def test_the_processor_in_transformers_own_loops(model):
    scores = torch.randn(4, V)
    both = GuidedProbsProcessor(3.0, temperature=0.7, top_k=9, top_p=0.8, id_range=(2, 20))(PROMPTS[:2], scores)
    guided = transformers.ClassifierFreeGuidanceLogitsProcessor(3.0)(PROMPTS[:2], scores)
    wanted = guided_probs(scores[:2, None], scores[2:, None], 3.0, 0.7, 9, 0.8, id_range=(2, 20)).probs[:, 0]
    assert both.shape == (2, V) and torch.equal(both, wanted.log())
    plain = GuidedProbsProcessor(3.0)(PROMPTS[:2], scores)
    assert torch.allclose(plain, guided.log_softmax(-1), atol=1e-5)
    one = dict(doubled=False, id_range=torch.tensor([[3, 4], [5, 9]]), prompt_length=6)
    tokens = generate(model, do_sample=True, top_k=0, logits_processor=transformers.LogitsProcessorList(
        [GuidedProbsProcessor(**one)]))
    assert (tokens[:, 6] == 3).all() and (tokens[:, 7:] >= 5).all() and (tokens[:, 7:] < 9).all()
    greedy = generate(model, logits_processor=[GuidedProbsProcessor(doubled=False, temperature=0.0)])
    assert torch.equal(greedy, generate(model))
    with pytest.raises(ValueError, match="prompt_length must be given with an id_range for each new token"):
        GuidedProbsProcessor(id_range=torch.tensor([[3, 4]]))
    with pytest.raises(ValueError, match=r"id_range must be int64 \(L, 2\), got int64 \(2,\)"):
        GuidedProbsProcessor(id_range=torch.tensor([0, 5]), prompt_length=6)
    with pytest.raises(ValueError, match="prompt_length must be at most the 6 tokens that there are, got 7"):
        GuidedProbsProcessor(**one | dict(prompt_length=7))(PROMPTS, scores)
    with pytest.raises(ValueError, match="scores must have two rows a prompt, .* got 3 for 3 prompts .for a loop"):
        GuidedProbsProcessor(3.0)(PROMPTS[:3], scores[:3])


def test_every_path_of_a_tree_is_drawn_from_its_own_row():
    choices = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]
    tree = compat.StaticTree(reversed(choices), torch.zeros(1))
    order = sorted(choices, key=lambda c: (len(c), c))
    assert tree.num_nodes == 7 and tree.max_depth == 3 and tree.draft_row.tolist() == [[0, 1, 2, -1, 3, -1, -1]]
    made = [(child, level.paths[row].tolist(), rank) for level in tree.levels for child, row, rank in zip(
        *(t.tolist() for t in (level.children, level.row_of_child, level.rank_of_child)))]
    node = {path: n for n, path in enumerate([(), *order])}
    assert made == [(node[c], [node[c[:d]] for d in range(len(c))], c[-1]) for c in order]
    assert [level.num_children for level in tree.levels] == [2, 2, 1] and list(itertools.chain(*(
        [level.depth] * len(level.paths) for level in tree.levels))) == [0, 1, 1, 2]


@pytest.mark.parametrize("are_all_kept", [True, False])
def test_gaps_in_the_ranks(are_all_kept):
    tree = compat.StaticTree([(1,), (4,), (4, 2), (4, 0), (1, 3)], torch.zeros(1), are_all_kept)
    assert [level.rank_of_child.tolist() for level in tree.levels] == ([[0, 1], [0, 0, 1]] if are_all_kept else
                                                                       [[1, 4], [3, 0, 2]])
    assert [level.num_children for level in tree.levels] == ([2, 2] if are_all_kept else [5, 4])


def test_a_folder_can_be_named_in_place_of_the_function(model, tmp_path, monkeypatch):
    """As a repository of the hub can: transformers copies its program to a folder of its own."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    folder, stats = str(EXAMPLES / "jacobi_generate"), {}
    options = dict(max_new_tokens=20, do_sample=True, top_k=9, seeds=SEEDS, window=5)
    tokens = generate(model, folder, trust_remote_code=True, stats=stats, **options)
    assert torch.equal(tokens, generate(model, jacobi_generate, **options))
    assert tokens.shape == (4, 26) and stats["target_forwards"] < 20
    with pytest.raises(ValueError, match="window must be at most grid=2"):
        generate(model, folder, trust_remote_code=True, grid=2, **options)
