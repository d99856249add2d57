"""vLLM's interfaces, against exact enumeration of the rule that its kernels follow."""
import inspect
import itertools
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

from specvis_kernels import philox_uniforms
from specvis_kernels.compat import _versions
from specvis_kernels.compat.vllm import STREAM, probabilistic_rejection_sample, rejection_sample
from tests.cases import DEVICE

V, S = 4, 2
g = torch.Generator().manual_seed(0)
TARGET = torch.randn(S + 1, V, generator=g).softmax(-1)  # after no, one, two drafts, whichever they are
DRAFT = torch.randn(S, V, generator=g).softmax(-1)

# what vLLM 0.33.0 names in its two calls, where everything is off
OF_V1 = dict(synthetic_mode=False, synthetic_conditional_rates=None, use_fp64_gumbel=True, fly_window_size=None,
             fly_entropy_threshold=None, fly_entropy_top_k=3)
OF_V2 = dict(use_fp64=False, use_block_verification=False, fly_window_size=0, fly_entropy_threshold=0.3,
             fly_entropy_top_k=3)


def enumerated(num_drafts, is_sampled, bonus=None):
    """Tokens that come out -> their probability. Drafts are drawn from DRAFT, or are 1 and 3."""
    outcomes = Counter()
    for drafts in itertools.product(range(V), repeat=num_drafts) if is_sampled else [(1, 3)[:num_drafts]]:
        weight = 1.0
        for i, x in enumerate(drafts):
            weight *= DRAFT[i, x].item() if is_sampled else 1.0
        for i, x in enumerate(drafts):
            Q = DRAFT[i] if is_sampled else torch.eye(V)[x]
            accept = min(1.0, (TARGET[i, x] / Q[x]).item())
            left = (TARGET[i] - Q).clamp(min=0)
            if accept < 1:
                for y, p in enumerate((left / left.sum()).tolist()):
                    outcomes[(*drafts[:i], y)] += weight * (1 - accept) * p
            weight *= accept
        for y, p in enumerate(TARGET[num_drafts].tolist() if bonus is None else torch.eye(V)[bonus].tolist()):
            outcomes[(*drafts, y)] += weight * p
    return outcomes


def check_distribution(rows, expected):
    """Chi-square of rows of tokens, padded by -1."""
    counts = Counter(tuple(t for t in row if t >= 0) for row in rows)
    assert counts.keys() <= {key for key, p in expected.items() if p > 1e-6}
    cells = [(counts[key], p * len(rows)) for key, p in expected.items() if p * len(rows) >= 5]
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    assert len(cells) > 2 and statistic < len(cells) + 3.5 * (2 * len(cells)) ** 0.5


def batch(counts, is_sampled, seed=0):
    """The drafts of a batch as v1 holds them; and the rows."""
    generator = torch.Generator().manual_seed(seed)
    step = torch.cat([torch.arange(n) for n in counts])
    drafts = torch.multinomial(DRAFT, len(counts), True, generator=generator).T  # (B, S)
    if not is_sampled:
        drafts = torch.tensor([[1, 3]]).expand(len(counts), -1)
    tokens = torch.cat([row[:n] for row, n in zip(drafts, counts)])
    return (tokens.to(DEVICE), list(counts), S, torch.tensor(counts, device=DEVICE).cumsum(0).int(),
            DRAFT[step].to(DEVICE) if is_sampled else None, TARGET[step].to(DEVICE))


def metadata(temperature, generators=None, all_greedy=False):
    """What vLLM says of a batch: a temperature for each request."""
    return SimpleNamespace(all_greedy=all_greedy, temperature=temperature, generators=generators or {})


@pytest.mark.parametrize("is_sampled", [True, False])
@pytest.mark.parametrize("from_logits", [True, False])
def test_what_v1_emits_is_distributed_as_the_rule_says(is_sampled, from_logits):
    counts = [2, 0, 1] * 4000
    arguments = list(batch(counts, is_sampled))
    if from_logits:
        arguments[5] = arguments[5].log() + 3
    named = dict(OF_V1) if from_logits else dict(from_logits=False)  # as 0.33.0 calls it, or as versions with probs do
    torch.manual_seed(1)
    out = rejection_sample(*arguments, torch.full((len(counts), 1), 2, device=DEVICE, dtype=torch.int32),
                           metadata(torch.ones(len(counts), device=DEVICE)), **named)
    assert out.shape == (len(counts), S + 1) and out.dtype == torch.int32
    for n, rows in zip((2, 0, 1), (out[i::3].tolist() for i in range(3))):
        if n == 0:
            assert rows == [[2, -1, -1]] * 4000
        else:
            check_distribution(rows, enumerated(n, is_sampled, bonus=2))


def test_v1_with_generators_does_not_depend_on_the_batch():
    counts = [2, 0, 1, 2, 2, 1]
    tokens, _, _, _, draft_probs, target_probs = batch(counts, True, seed=3)
    starts = [sum(counts[:b]) for b in range(6)]
    bonus = torch.arange(6, device=DEVICE) % V

    def run(order):
        rows = torch.cat([torch.arange(starts[b], starts[b] + counts[b]) for b in order]).to(DEVICE)
        generators = {i: torch.Generator(DEVICE).manual_seed(50 + b) for i, b in enumerate(order)}
        if 4 in order:
            del generators[order.index(4)]  # a request without a seed
        before = {i: generator.get_state() for i, generator in generators.items()}
        of_order = [counts[b] for b in order]
        out = rejection_sample(tokens[rows], of_order, S, torch.tensor(of_order, device=DEVICE).cumsum(0),
                               draft_probs[rows], target_probs[rows], bonus[order][:, None],
                               metadata(torch.ones(len(order), device=DEVICE), generators), from_logits=False)
        assert [torch.equal(before[i], generators[i].get_state()) for i in generators] == [
            counts[order[i]] == 0 for i in generators]
        return {b: row for b, row in zip(order, out.tolist()) if b != 4}

    every = [run(order) for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3], [2, 4, 0])]
    assert all(row == every[0][b] for rows in every[1:] for b, row in rows.items())


@pytest.mark.parametrize("greedy", ["all", "older", "newer", "flags", "one"])
def test_greedy_requests_take_argmaxes(greedy):
    counts, best = [2, 1, 2, 0, 2], TARGET.argmax(-1)
    tokens, counts, _, ends, draft_probs, target_probs = batch(counts, True)
    tokens[:2] = best[:2]       # accepted whole
    tokens[3] = best[0]         # and here one
    tokens[4] = (best[1] + 1) % V
    rows = [tokens[e - n:e].tolist() for e, n in zip(ends.tolist(), counts)]
    wanted = []
    for row in rows:
        kept = next((i for i, token in enumerate(row) if token != best[i]), len(row))
        wanted.append((row[:kept] + [best[kept].item() if kept < len(row) else 3] + [-1] * S)[:S + 1])
    assert len({row.index(-1) if -1 in row else 3 for row in wanted}) == 3
    options = {"all": dict(sampling_metadata=metadata(None, all_greedy=True)),
               "older": dict(sampling_metadata=metadata(torch.full((5,), -1.0, device=DEVICE))),
               "newer": dict(sampling_metadata=metadata(torch.zeros(5, device=DEVICE))),
               "flags": dict(is_greedy=torch.ones(5, dtype=torch.bool, device=DEVICE)), "one": dict(is_greedy=True)}
    target_probs = target_probs ** 0.01  # almost uniform: draws are no argmaxes
    target_probs = target_probs / target_probs.sum(-1, keepdim=True)
    if greedy in ("all", "one"):
        target_probs = 5 * target_probs.log()  # then vLLM hands over logits
    bonus = torch.full((5, 1), 3, device=DEVICE)
    assert rejection_sample(tokens, counts, S, ends, draft_probs, target_probs, bonus, **options[greedy],
                            from_logits=greedy in ("all", "one")).tolist() == wanted


def logits_batch(counts, seeds, is_sampled=True, temperature=1.0, seed=0):
    """The arguments of model runner V2 by name; request b is in state B - 1 - b."""
    B, generator = len(counts), torch.Generator().manual_seed(seed)
    drafts = torch.multinomial(DRAFT, B, True, generator=generator).T
    if not is_sampled:
        drafts = torch.tensor([[1, 3]]).expand(B, -1)
    step = torch.cat([torch.arange(n + 1) for n in counts])
    newest = torch.zeros(B, 1, dtype=torch.int64)
    state = torch.arange(B).flip(0)
    rows = torch.arange(B).repeat_interleave(torch.tensor(counts) + 1)
    return OF_V2 | dict(
        draft_is_scaled=False, target_logits=(TARGET[step].log() - 2).to(DEVICE),
        draft_logits=DRAFT.log().expand(B, -1, -1).to(DEVICE) if is_sampled else None,
        draft_sampled=torch.cat([newest, drafts], 1)[rows, step].to(DEVICE),
        cu_num_logits=torch.nn.functional.pad((torch.tensor(counts) + 1).cumsum(0), (1, 0)).int().to(DEVICE),
        pos=(step + 10).to(DEVICE), idx_mapping=state.int().to(DEVICE), expanded_idx_mapping=state[rows].to(DEVICE),
        expanded_local_pos=step.to(DEVICE), temperature=torch.full((B,), temperature).to(DEVICE),
        seed=torch.tensor(seeds).flip(0).to(DEVICE), num_speculative_steps=S)


def tokens_of(sampled, num_sampled):
    assert sampled.dtype == torch.int64 and num_sampled.dtype == torch.int32
    return [row[:n] for row, n in zip(sampled.tolist(), num_sampled.tolist())]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("draft_is_scaled", [False, True])
def test_draft_logits_before_and_after_the_temperature(temperature, draft_is_scaled):
    """Drafts are drawn from DRAFT, whose logits are kept before the temperature or after it; the other of the two
    answers to draft_is_scaled moves the distribution."""
    arguments = logits_batch([2] * 6000, list(range(6000)), temperature=temperature)
    if not draft_is_scaled:
        arguments["draft_logits"] = arguments["draft_logits"] * temperature

    def first_tokens(draft_is_scaled):
        sampled, _ = probabilistic_rejection_sample(**arguments | dict(draft_is_scaled=draft_is_scaled))
        return (sampled[:, 0].bincount(minlength=V).cpu() / 6000 - TARGET[0]).abs().sum() / 2

    assert first_tokens(draft_is_scaled) < 0.02 < 0.05 < first_tokens(not draft_is_scaled)


@pytest.mark.parametrize("is_sampled", [True, False])
@pytest.mark.parametrize("counts", [[2, 0, 1], [2]])
def test_what_model_runner_v2_emits_is_distributed_as_the_rule_says(is_sampled, counts):
    number = 4000
    out = tokens_of(*probabilistic_rejection_sample(**logits_batch(counts * number, list(range(len(counts) * number)),
                                                                   is_sampled)))
    for i, n in enumerate(counts):
        check_distribution(out[i::len(counts)], enumerated(n, is_sampled))


def test_the_seed_and_the_positions_decide(host_reads):
    counts, seeds = [2, 0, 1, 2, 2], [7, 8, 9, -3, 2 ** 50]
    of_states = torch.randn(5, S, V, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def run(order, **change):
        arguments = logits_batch(counts, seeds) | dict(draft_logits=of_states) | change
        starts = arguments["cu_num_logits"].tolist()
        rows = torch.cat([torch.arange(starts[b], starts[b + 1]) for b in order]).to(DEVICE)
        numbers = torch.tensor([0, *(counts[b] + 1 for b in order)], device=DEVICE)
        for name in ("target_logits", "draft_sampled", "pos", "expanded_idx_mapping", "expanded_local_pos"):
            arguments[name] = arguments[name][rows]
        arguments.update(cu_num_logits=numbers.cumsum(0), idx_mapping=arguments["idx_mapping"][order])
        host_reads.clear()
        result = probabilistic_rejection_sample(**arguments)
        assert not host_reads
        return dict(zip(order, tokens_of(*result)))

    every = run([0, 1, 2, 3, 4])
    for order in ([4, 3, 2, 1, 0], [3], [0, 3, 4], [2, 1]):  # [0, 3, 4]: all have as many drafts as can be
        assert all(row == every[b] for b, row in run(order).items())
    differs = [run([0, 1, 2, 3, 4], seed=torch.arange(5, device=DEVICE) + shift) != every for shift in range(4)]
    assert any(differs)


def test_rows_behind_the_last_request_are_not_read():
    """A buffer that is longer than the batch, by as many rows as a full batch would have."""
    arguments = logits_batch([1, 2], [1, 2], temperature=0.0) | dict(draft_logits=None)
    best = TARGET.argmax(-1).tolist()
    arguments["draft_sampled"][[1, 3, 4]] = torch.tensor([best[0], best[0], best[1]], device=DEVICE)
    for name in ("target_logits", "draft_sampled", "pos"):
        arguments[name] = torch.cat([arguments[name], arguments[name][:1]])
    assert tokens_of(*probabilistic_rejection_sample(**arguments)) == [best[:2], best]


def test_which_number_decides_what():
    seeds = list(range(200))
    out = tokens_of(*probabilistic_rejection_sample(**logits_batch([1] * 200, seeds, is_sampled=False)))
    of_pos_10 = philox_uniforms(torch.tensor(seeds), torch.full((200, 1), 10), 2, stream=STREAM)[:, 0].tolist()
    for row, (first, second) in zip(out, of_pos_10):
        is_accepted = first < TARGET[0, 1]  # the draft is token 1
        left = TARGET[1] if is_accepted else TARGET[0].index_fill(0, torch.tensor(1), 0)
        token = (left.cumsum(0) <= second * left.sum()).sum().item()
        assert row == ([1, token] if is_accepted else [token])


def test_temperature_0_is_greedy_and_a_draft_of_minus_1_is_rejected():
    best = TARGET.argmax(-1).tolist()
    arguments = logits_batch([2, 2, 2], [1, 2, 3], temperature=0.0)
    arguments["draft_sampled"] = torch.tensor([9, *best[:2], 9, best[0], (best[1] + 1) % V, 9, -1, 0], device=DEVICE)
    assert tokens_of(*probabilistic_rejection_sample(**arguments)) == [best, best[:2], best[:1]]
    arguments = logits_batch([2] * 4000, list(range(4000)))
    arguments["draft_sampled"].view(-1, 3)[:, 1] = -1
    sampled, num_sampled = probabilistic_rejection_sample(**arguments)
    assert (num_sampled == 1).all()
    assert torch.allclose(sampled[:, 0].bincount(minlength=V).cpu() / 4000, TARGET[0], atol=0.03)


@pytest.mark.parametrize("width", [3, 6])
def test_vocabularies_of_different_sizes(width):
    arguments = logits_batch([2] * 3000, list(range(3000)))
    draft_logits = torch.full((3000, S, width), -torch.inf, device=DEVICE)
    draft_logits[..., :min(width, V)] = arguments["draft_logits"][..., :width]
    drafts = torch.multinomial(draft_logits[0].softmax(-1), 3000, True).T
    arguments["draft_sampled"].view(-1, 3)[:, 1:] = drafts
    sampled, _ = probabilistic_rejection_sample(**arguments | dict(draft_logits=draft_logits))
    assert torch.allclose(sampled[:, 0].bincount(minlength=V).cpu() / 3000, TARGET[0], atol=0.03)


def test_fly_keeps_a_draft_before_argmaxes():
    """Of both engines: a request of two drafts, one of one, and where the entropy is too high to be reached."""
    best, bonus = TARGET.argmax(-1).tolist(), torch.tensor([[3], [3]], device=DEVICE)
    other = (best[0] + 1) % V
    tokens, *rest = batch([2, 1], True)
    tokens = torch.tensor([other, best[1], other], device=DEVICE)
    v2 = logits_batch([2, 1], [1, 2], temperature=0.0)
    v2["draft_sampled"] = torch.tensor([0, other, best[1], 0, other], device=DEVICE)
    v2["target_logits"] = torch.cat([v2["target_logits"]] + [v2["target_logits"][:1]] * 2)  # a longer buffer
    v2["draft_sampled"], v2["pos"] = (torch.nn.functional.pad(v2[name], (0, 2)) for name in ("draft_sampled", "pos"))
    for threshold, expected in ((0.1, [[other, best[1], 3], [best[0], -1, -1]]), (9.0, [[best[0], -1, -1]] * 2)):
        fly = dict(fly_window_size=1, fly_entropy_threshold=threshold)
        out = rejection_sample(tokens, *rest[:-1], rest[-1].log(), bonus, is_greedy=True, **OF_V1 | fly)
        assert out.tolist() == expected
        out = tokens_of(*probabilistic_rejection_sample(**v2 | fly))
        assert out == [[x if x != 3 else best[2] for x in row if x >= 0] for row in expected]


@pytest.mark.parametrize("is_sampled", [True, False])
def test_block_verification_of_v2_keeps_the_distribution_and_accepts_more(is_sampled, host_reads):
    number = 4000
    arguments = logits_batch([2, 0, 1] * number, list(range(3 * number)), is_sampled)
    host_reads.clear()
    block, strict = (probabilistic_rejection_sample(**arguments | dict(use_block_verification=use))
                     for use in (True, False))
    assert not host_reads
    for i in range(3):  # the first two tokens; where there is one, the target's follows it
        sampled, has_second = block[0][i::3].cpu(), (block[1][i::3] > 1).cpu()
        pairs = (sampled[has_second, 0] * V + sampled[has_second, 1]).bincount(minlength=V * V).view(V, V)
        alone = sampled[~has_second, 0].bincount(minlength=V)
        law = (pairs + alone[:, None] * TARGET[1]) / number
        assert torch.allclose(law, TARGET[0][:, None] * TARGET[1], atol=0.02)
    more = (block[1].float().mean() - strict[1].float().mean()).item()
    assert more > 0.01 if is_sampled else abs(more) < 1e-6


def test_what_is_refused():
    arguments = batch([2, 1], True)
    bonus = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
    for at, value, message in (
            (0, arguments[0][:2], r"draft_token_ids must be int64 or int32 \(D=3\), got int64 \(2,\)"),
            (1, [2, 2], "num_draft_tokens must sum to D=3, got 4"),
            (2, 1, "max_spec_len must be an integer >= 2, got 1"),
            (3, arguments[3].float(), r"cu_num_draft_tokens must be int64 or int32 \(B=2\), got float32 \(2,\)"),
            (4, arguments[4][:2], r"draft_probs must be float32 \(D=3, V=4\), got float32 \(2, 4\)")):
        with pytest.raises(ValueError, match=message):
            rejection_sample(*arguments[:at], value, *arguments[at + 1:], bonus)
    with pytest.raises(ValueError, match=r"bonus_token_ids must be int64 or int32 \(B=2\), got int64 \(1,\)"):
        rejection_sample(*arguments, bonus[:1])
    for named, message in ((dict(synthetic_mode=True), "synthetic_mode must be off"),
                           (dict(fly_window_size=2, fly_entropy_top_k=4), "fly_entropy_top_k must be 3, got 4")):
        with pytest.raises(ValueError, match=message):
            rejection_sample(*arguments, bonus, **OF_V1 | named)
    arguments = logits_batch([2, 1], [1, 2])
    for change, message in (
            (dict(synthetic_conditional_rates=arguments["temperature"]), "synthetic_conditional_rates must be None"),
            (dict(contexts=arguments["pos"][:, None]), "contexts must be None: no watermark is written"),
            (dict(watermarking=arguments["pos"] > 0), "watermarking must be None"),
            (dict(watermarking_skip_mask=arguments["pos"] > 0), "watermarking_skip_mask must be None"),
            (dict(watermark_key=7), "watermark_key must be None"),
            (dict(fly_window_size=3, fly_entropy_top_k=1), "fly_entropy_top_k must be 3, got 1"),
            (dict(fly_window_size=3, use_block_verification=True), "fly_window_size must be 0 with use_block"),
            (dict(draft_is_scaled=None), "draft_is_scaled must be given with draft_logits: False .* from 0.28 on"),
            (dict(pos=arguments["pos"][:3]), r"pos must be int64 or int32 \(T=5\), got int64 \(3,\)"),
            (dict(seed=arguments["seed"][:1]), r"seed must be int64 \(R=2\), got int64 \(1,\)"),
            (dict(draft_logits=arguments["draft_logits"][:, :1]), r"draft_logits must be float32 \(R=2, S=2, V=4\)")):
        with pytest.raises(ValueError, match=message):
            probabilistic_rejection_sample(**arguments | change)


def not_installed(decoder):
    raise PackageNotFoundError(decoder)


def test_a_vllm_that_hands_over_probabilities(monkeypatch):
    arguments = *batch([2, 1], True), torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
    monkeypatch.setattr(_versions, "version", lambda decoder: "0.15.1")
    with pytest.raises(ValueError, match="from_logits must be given: False for .*vllm 0.15.1 is installed"):
        rejection_sample(*arguments)
    rejection_sample(*arguments, from_logits=False)
    monkeypatch.setattr(_versions, "version", not_installed)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.9.2"))  # from a source folder
    with pytest.raises(ValueError, match="vllm 0.9.2 is installed"):
        rejection_sample(*arguments)
    sys.modules["vllm"].__version__ = "0.16.0rc1"
    rejection_sample(*arguments)


@pytest.mark.parametrize("function, arguments", [
    (rejection_sample, lambda: dict(zip(inspect.signature(rejection_sample).parameters, batch([2, 1], True)),
                                    bonus_token_ids=torch.zeros(2, 1, dtype=torch.int64, device=DEVICE))),
    (probabilistic_rejection_sample, lambda: logits_batch([2, 1], [1, 2]))])
def test_a_version_that_calls_them_otherwise(function, arguments, monkeypatch):
    """The error names the argument, the version that is installed and the tested ones; others stay as they are."""
    arguments = arguments()
    function(**arguments)
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument 'use_new_rule' "
                                        r"\(vllm is not installed, tested with 0.33.0\)"), monkeypatch.context() as m:
        m.setattr(_versions, "version", not_installed)
        function(**arguments, use_new_rule=False)
    monkeypatch.setattr(_versions, "version", lambda decoder: "0.40.1")
    name = "num_draft_tokens" if function is rejection_sample else "idx_mapping"
    with pytest.raises(TypeError, match=r"missing 1 required .* \(vllm 0.40.1 is installed, tested with 0.33.0\)"):
        function(**{key: value for key, value in arguments.items() if key != name})
    with pytest.raises(TypeError, match="has no len..$"):
        function(**arguments | {name: 5})
