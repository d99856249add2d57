"""The plugin for vLLM, in vLLM's own classes where it is installed, and in stubs of them: tests/compat/servers.py."""
import inspect
import logging
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from specvis_kernels import draw_tokens
from specvis_kernels.compat import vllm as ours
from specvis_kernels.compat._plugin import place_of
from tests.compat import servers
from tests.compat.test_vllm import logits_batch, tokens_of

V, WINDOW, LENGTH = 32, 6, 24
SEEDS, TEMPERATURES = (5, 2 ** 64 - 1, None, 7), (1.0, 0.7, 1.0, 0.0)  # the last one is greedy
PROMPTS = ((3, 1, 4), (1, 5), (9, 2, 6, 5), (3,))
REPLACED = (ours.V1_REJECTION_SAMPLE, ours.V2_REJECTION_SAMPLE, "vllm.v1.sample.ops.topk_topp_sampler:random_sample",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
            *(f"vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_{name}" for name in ("native", "cpu")))


@pytest.fixture(params=["stubs", pytest.param("installed", marks=pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed"))])
def vllm(request, tmp_path, monkeypatch):
    """vLLM's package, whose functions are its own again after the test. Gives the test's monkeypatch."""
    if request.param == "stubs":
        monkeypatch.syspath_prepend(servers.write(tmp_path))
    else:
        for target in REPLACED:
            place, name = place_of("vllm", target)
            monkeypatch.setattr(place, name, place.__dict__[name])
        place, name = place_of("vllm", "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens")
        monkeypatch.setattr(place, name, expand_batch_to_tokens)
        if servers.UNPACKED:  # without vLLM's compiled operators for CPUs
            monkeypatch.setattr(torch.ops._C, "greedy_argmax", lambda logits: logits.argmax(-1), raising=False)
    monkeypatch.setattr(ours, "_draws", ours._TargetDraws())
    ours.register.cache_clear()
    with servers.imported_anew("vllm", monkeypatch) if request.param == "stubs" else nullcontext():
        yield monkeypatch
    ours.register.cache_clear()


@pytest.fixture
def seed_exact(vllm):
    """vLLM's package where SPECVIS_VLLM=seed_exact has replaced functions. Gives the test's monkeypatch."""
    vllm.setenv("SPECVIS_VLLM", "seed_exact")
    ours.register()
    return vllm


def expand_batch_to_tokens(values, ends, num_tokens, replace_from=0, replace_to=0):
    """In place of vLLM's Triton kernel, which runs on GPUs alone."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    return torch.where(values == replace_from, replace_to, values).repeat_interleave(counts)


def row_of(prefix, dependence=1.0):
    """A toy target's logits: they depend on the whole prefix, or nearly not, or with dependence 0 on nothing."""
    def noise(seed):
        return torch.randn(V, generator=torch.Generator().manual_seed(seed & (2 ** 63 - 1)))
    return 2 * ((1 - dependence) * noise(0) + dependence * noise(hash(tuple(prefix))))


def metadata_of(module, name, **fields):
    """vLLM's class, or anything with its fields where a stub has none."""
    try:
        return getattr(import_module(module), name)(**fields)
    except ModuleNotFoundError:
        return SimpleNamespace(**fields, max_spec_len=max(fields.get("num_draft_tokens", [0])))


class Server:
    """A step of vLLM's v1 engine around GPUModelRunner._sample: rows, positions and drafts in vLLM's layout."""

    def __init__(self, seeds=SEEDS, temperatures=TEMPERATURES, dependence=1.0):
        def of(path):
            place, name = place_of("vllm", f"vllm.v1.{path}")
            return getattr(place, name)

        sampler = of("sample.sampler:Sampler")()
        self.runner = SimpleNamespace(
            sampler=sampler, rejection_sampler=of("sample.rejection_sampler:RejectionSampler")(sampler),
            model_config=SimpleNamespace(seed=0), use_async_scheduling=False, _draft_token_req_ids=None,
            _get_spec_decode_draft_probs=lambda metadata: None)
        self.step = of("worker.gpu_model_runner:GPUModelRunner._sample")
        self.sequences, self.num_steps, self.dependence = [list(prompt) for prompt in PROMPTS], 0, dependence
        temperature = torch.tensor(temperatures)
        processors = SimpleNamespace(argmax_invariant=[], non_argmax_invariant=[])
        self.sampling = metadata_of(
            "vllm.v1.sample.metadata", "SamplingMetadata", temperature=temperature, all_greedy=not temperature.any(),
            all_random=bool(temperature.all()), top_p=None, top_k=None, max_num_logprobs=None, no_penalties=True,
            generators={b: torch.Generator().manual_seed(seed) for b, seed in enumerate(seeds) if seed is not None},
            prompt_token_ids=None, frequency_penalties=None, presence_penalties=None, repetition_penalties=None,
            output_token_ids=[], allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=processors)

    def decode(self, propose, length=LENGTH):
        """propose(emitted, lengths) -> drafts; None: the server has no speculation. Returns the requests' tokens."""
        drafts = [[] for _ in PROMPTS]
        while min(map(len, self.sequences)) < length:
            emitted = self.sample(drafts, is_speculative=propose is not None)
            for sequence, tokens in zip(self.sequences, emitted):
                sequence += tokens
            if propose is not None:
                drafts = propose(emitted, [len(sequence) for sequence in self.sequences])
        return [sequence[:length] for sequence in self.sequences]

    def sample(self, drafts, is_speculative):
        counts = [len(tokens) for tokens in drafts]
        scheduled = [len(sequence) if self.num_steps == 0 else n + 1 for sequence, n in zip(self.sequences, counts)]
        ends = torch.tensor(scheduled).cumsum(0)  # the first step reads the prompts
        self.runner.query_start_loc = SimpleNamespace(gpu=torch.nn.functional.pad(ends, (1, 3)).int())
        self.runner.positions = torch.cat([torch.arange(len(sequence) + n - rows, len(sequence) + n)
                                           for sequence, n, rows in zip(self.sequences, counts, scheduled)])
        self.runner.input_batch = SimpleNamespace(
            num_reqs=len(PROMPTS), req_ids=[f"request-{b}" for b in range(len(PROMPTS))],
            generators=self.sampling.generators, sampling_metadata=self.sampling,
            update_async_output_token_ids=lambda: None)
        logits = torch.stack([row_of(sequence + tokens[:i], self.dependence)
                              for sequence, tokens in zip(self.sequences, drafts) for i in range(len(tokens) + 1)])
        sampled = torch.tensor(counts) + 1
        is_bonus = torch.zeros(len(logits), dtype=torch.bool)
        is_bonus[sampled.cumsum(0) - 1] = True
        metadata = metadata_of(
            "vllm.v1.spec_decode.metadata", "SpecDecodeMetadata",
            draft_token_ids=torch.tensor(sum(drafts, []), dtype=torch.int32), num_draft_tokens=counts,
            cu_num_draft_tokens=torch.tensor(counts).cumsum(0).int(), cu_num_sampled_tokens=sampled.cumsum(0).int(),
            target_logits_indices=(~is_bonus).nonzero()[:, 0], bonus_logits_indices=is_bonus.nonzero()[:, 0],
            logits_indices=torch.arange(len(logits))) if is_speculative else None
        self.num_steps += 1
        with torch.inference_mode():
            out = self.step(self.runner, logits, metadata).sampled_token_ids
        return [[token for token in row if token != -1] for row in out.tolist()]


def plain(seed, temperature, sequence, dependence=1.0):
    """Decoding one by one: the rule itself."""
    sequence = list(sequence)
    while len(sequence) < LENGTH:
        row = row_of(sequence, dependence)
        if temperature == 0:
            sequence.append(row.argmax().item())
            continue
        logits = (row / temperature).softmax(-1).log()
        signed = seed - (seed >> 63 << 64)
        sequence.append(draw_tokens(logits[None, None], None, None, 1.0, 0, 1.0, torch.tensor([signed]),
                                    torch.tensor([[len(sequence) - 1]])).tokens.item())
    return sequence


def proposer(**change):
    config = dict(use_v2_model_runner=False, model_config=SimpleNamespace(max_model_len=LENGTH),
                  speculative_config=SimpleNamespace(num_speculative_tokens=WINDOW,
                                                     model="specvis_kernels.compat.vllm.JacobiProposer"))
    place, name = place_of("vllm", "vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer")
    made = getattr(place, name)(SimpleNamespace(**config | change))
    made.load_model(None)
    return lambda emitted, lengths: made.propose(emitted, lengths, None, slot_mappings=None)


def random_drafts(emitted, lengths):
    """Some of which are right: V is small."""
    g = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, V, (b % 4,), generator=g).tolist() for b in range(len(lengths))]


def test_no_drafts_change_a_token(seed_exact):
    without = Server().decode(None)
    for b, (seed, temperature) in enumerate(zip(SEEDS, TEMPERATURES)):
        assert seed is None or without[b] == plain(seed, temperature, PROMPTS[b])
    right = iter(without[0][len(PROMPTS[0]):])

    def some_right(emitted, lengths):
        next(right)
        return [tokens[n:n + 3] for tokens, n in zip(without, lengths)]

    def few(emitted, lengths):
        return [[] for _ in emitted]

    for propose in (random_drafts, some_right, few, proposer()):
        server = Server()
        assert server.decode(propose) == without
        if propose is some_right:
            assert server.num_steps < 9  # four tokens a step, of 23
    other = Server(seeds=(6, 8, None, 9)).decode(random_drafts)
    assert [a == b for a, b in zip(other, without)] == [False, False, True, True]  # no seed; greedy


@pytest.mark.parametrize("temperatures", [TEMPERATURES, (1.0,) * 4, (0.0,) * 4])
def test_jacobi_drafts_are_accepted_where_rows_depend_little_on_the_prefix(seed_exact, temperatures):
    for dependence, most_steps in ((0, 1 + -(-(LENGTH - 2) // (WINDOW + 1))), (0.05, LENGTH // 2)):
        without, jacobi = (Server(temperatures=temperatures, dependence=dependence) for _ in range(2))
        assert jacobi.decode(proposer()) == without.decode(None)
        assert jacobi.num_steps <= most_steps < without.num_steps == LENGTH - 1  # the shortest prompt is one token


def test_drafts_are_the_draws_after_the_first_miss(seed_exact):
    """And they leave room for the longest length; a request that emits nothing gets none."""
    propose, server = proposer(), Server()
    emitted = server.sample([[]] * 4, True)
    first = propose(emitted, [4, 4, 4, 4])
    assert [len(tokens) for tokens in first] == [WINDOW] * 4
    for sequence, tokens in zip(server.sequences, emitted):
        sequence += tokens
    emitted = server.sample(first, True)
    chains = ours._draws.chains()
    drafts = propose([[], *emitted[1:]], [0, LENGTH - 2, 0, LENGTH + 1])
    assert drafts[0] == drafts[3] == [] and len(drafts[1]) == 2
    assert drafts[2] == chains[2][len(emitted[2]):][:WINDOW] and chains[2][:len(emitted[2])] == emitted[2]


def test_each_function_counts_its_calls_and_says_once_that_it_is_ours(seed_exact, caplog):
    server = Server()
    seed_exact.setattr(logging.getLogger("vllm"), "propagate", True)  # vLLM's logger writes by itself
    with caplog.at_level("INFO", "vllm.specvis_kernels"):
        server.decode(random_drafts)
    assert ours._draws.seeds is None  # outside a step the samplers are vLLM's
    place, name = place_of("vllm", ours.V1_REJECTION_SAMPLE)
    assert getattr(place, name).num_calls == server.num_steps
    assert [record.getMessage() for record in caplog.records].count(
        f"{ours.V1_REJECTION_SAMPLE} is the one of specvis_kernels") == 1
    assert len([record for record in caplog.records if record.name == "vllm.specvis_kernels"]) == 3


def test_samplers_outside_a_step_are_vllms(vllm):
    """vLLM runs them to measure memory, with rows of no request."""
    vllm.setenv("SPECVIS_VLLM", "seed_exact")
    own = getattr(*place_of("vllm", ours.V1_REJECTION_SAMPLE))
    vllm.setattr(ours, "replace", lambda decoder, functions: [None, own, "drawn".format, None])
    draws = ours._TargetDraws()
    draws.install()
    assert draws.random_sample(None, {}) == "drawn"
    calls = []
    draws.own_rejection_sample = lambda *arguments, **named: calls.append((arguments, named))
    draws.rejection_sample(*range(8), synthetic_mode=False)
    assert calls == [(tuple(range(8)), {"synthetic_mode": False})]


def test_modes(vllm):
    def current():
        return [getattr(*place_of("vllm", target)) for target in REPLACED]

    own = current()
    for mode in ("", None):
        vllm.setenv("SPECVIS_VLLM", mode) if mode is not None else vllm.delenv("SPECVIS_VLLM")
        ours.register()
        ours.register.cache_clear()
        assert current() == own
    for mode in ("jacobi", "rejection,seed_exact"):
        vllm.setenv("SPECVIS_VLLM", mode)
        with pytest.raises(ValueError, match=f"SPECVIS_VLLM must be rejection or seed_exact, one of .*, got '{mode}'"):
            ours.register()
    vllm.setenv("SPECVIS_VLLM", "rejection")
    ours.register()
    ours.register()  # vLLM may call it again
    v1, v2, *others = current()
    assert v1.__wrapped__ is ours.rejection_sample and others == own[2:]
    arguments = logits_batch([2] * 40, list(range(40)), temperature=0.5)
    del arguments["draft_is_scaled"]
    of_answer = {is_scaled: tokens_of(*ours.probabilistic_rejection_sample(**arguments, draft_is_scaled=is_scaled))
                 for is_scaled in (False, True)}
    assert tokens_of(*v2(**arguments)) == of_answer[False] != of_answer[True]


def test_another_plugin(vllm):
    vllm.setenv("SPECVIS_VLLM", "rejection")
    place, name = place_of("vllm", ours.V1_REJECTION_SAMPLE)
    vllm.setattr(place, name, lambda *arguments: None)
    with pytest.raises(RuntimeError, match=f"{name} must be vllm's own function, got one of {__name__}: another plugin "
                                           ".* VLLM_PLUGINS"):
        ours.register()


@pytest.mark.parametrize("mode, missing", [
    ("rejection", ours.V1_REJECTION_SAMPLE), ("rejection", ours.V2_REJECTION_SAMPLE),
    ("seed_exact", ours.V2_REJECTION_SAMPLE), ("seed_exact", "vllm.v1.worker.gpu.sample.sampler:gumbel_sample")])
def test_nothing_is_replaced_where_one_function_is_missing(vllm, mode, missing):
    """And a second call says the same."""
    vllm.setenv("SPECVIS_VLLM", mode)
    targets = [target for target in REPLACED if target != missing]
    own = [getattr(*place_of("vllm", target)) for target in targets]
    vllm.delattr(*place_of("vllm", missing))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"vllm must have {missing}, .*tested with 0.33.0"):
            ours.register()
    assert [getattr(*place_of("vllm", target)) for target in targets] == own


def test_where_the_proposer_is_refused(vllm):
    with pytest.raises(RuntimeError, match="v1 model runner, got V2, .* VLLM_USE_V2_MODEL_RUNNER must be 0 or unset"):
        proposer(use_v2_model_runner=True)
    vllm.setenv("SPECVIS_VLLM", "rejection")
    ours.register()
    with pytest.raises(RuntimeError, match="SPECVIS_VLLM=seed_exact installs, got SPECVIS_VLLM='rejection'"):
        proposer()


def test_model_runner_v2_accepts_what_vllm_would_draw(vllm):
    vllm.setenv("SPECVIS_VLLM", "seed_exact")
    calls = []

    def gumbel_sample(logits, expanded_idx_mapping, temperature, seed, pos, **named):  # vLLM's is for GPUs
        calls.append(named)
        return (7 * seed[expanded_idx_mapping.long()] + pos) % 4

    vllm.setattr(*place_of("vllm", "vllm.v1.worker.gpu.sample.sampler:gumbel_sample"), gumbel_sample)
    ours.register()
    arguments = logits_batch([2, 0, 2, 1], [0, 1, 2, 3])  # rows at positions 10, 11, 12
    drawn = [[(7 * b + pos) % 4 for pos in (10, 11, 12)] for b in range(4)]
    miss = (drawn[2][1] + 1) % 4
    tokens = [0, *drawn[0][:2], 0, 0, drawn[2][0], miss, 0, -1]
    arguments["draft_sampled"] = torch.tensor(tokens, device=arguments["pos"].device)
    del arguments["draft_is_scaled"]
    places = [*inspect.signature(ours.probabilistic_rejection_sample).parameters][:11]
    by_place = [arguments.pop(name) for name in places]  # as vLLM hands them over
    out = getattr(*place_of("vllm", ours.V2_REJECTION_SAMPLE))(*by_place, **arguments)
    assert tokens_of(*out) == [drawn[0], drawn[1][:1], drawn[2][:2], drawn[3][:1]]
    assert calls == [dict(apply_temperature=False, is_drafting=False, use_fp64=False)]


def test_target_tokens_leave_no_room_for_relaxed_acceptance():
    arguments = logits_batch([1], [1])
    rows = arguments["draft_sampled"]
    for name, value in dict(verify=dict(delta=0.1), use_block_verification=True, fly_window_size=2).items():
        with pytest.raises(ValueError, match=f"{name} must be off with target_tokens, .*SPECVIS_VLLM=seed_exact"):
            ours.probabilistic_rejection_sample(**arguments | {name: value}, target_tokens=rows)
    with pytest.raises(ValueError, match="fly_window_size must be off with target_tokens"):
        ours.rejection_sample(rows[:1], [1], 1, rows[:1] * 0 + 1, None, torch.zeros(1, 4), rows[:1, None],
                              fly_window_size=1, fly_entropy_threshold=0.3, target_tokens=rows[:1])
    with pytest.raises(ValueError, match=r"target_tokens must be int64 or int32 \(T=2\), got int64 \(1,\)"):
        ours.probabilistic_rejection_sample(**arguments, target_tokens=rows[1:])
