"""The loops: greedy and seed-exact decoding give the baseline's tokens, and sampling gives its distribution."""
from functools import partial
from importlib import import_module
from itertools import pairwise
from pkgutil import iter_modules

import pytest
import torch

import specvis.decoding
import specvis.decoding.sampling
import specvis_kernels
from specvis.decoding.baseline import decode
from specvis.decoding.draft_tree import DraftState, StaticDraftState
from specvis.decoding.jacobi import jacobi_decode
from specvis.decoding.method_parts import DRAFT_MODELS
from specvis.decoding.methods import METHODS, method
from specvis.decoding.sampling import Sampling
from specvis.decoding.speculative import speculative_decode
from specvis.pipelines.positions import draw_margins
from specvis_kernels import backends, philox_uniforms
from tests.decoding.pictures import DYNAMIC, FILTERED, PROMPTS, TREE, UNFILTERED, begun, eagle, far_from_target, fitted

COUPLED = method("jacobi", seed_exact=False, window=3)
LOSSLESS = [m.name for m in METHODS.values() if m.lossless and m.drafting != "none"]


def test_what_is_lossless():
    assert LOSSLESS == ["jacobi", "speculative", "eagle1", "eagle2", "adt-tree"]
    assert method("cool-sd", omega=0.3).lossless and not METHODS["cool-sd"].lossless


@pytest.mark.parametrize("m", [
    *(method(name, draft_model=draft_model) for name in LOSSLESS if name != "jacobi" for draft_model in DRAFT_MODELS),
    fitted("jacobi"), METHODS["jacobi"],
    *(method(name, depth=depth) for name in ("speculative", "eagle2") for depth in (1, 7)),
    *(method("adt-tree", start=start) for start in ("vertical", "random", "tokenflock")),
    method("adt-tree", nodes=5, width=2, depth=1, widths=(1, 3)), method("eagle1", tree="medusa_2_7b_63"),
    *(method(name, draft_guidance=0.0) for name in ("speculative", "eagle2")),
    *(method("eagle2", nodes=nodes, depth=depth) for nodes, depth in ((2, 4), (3, 7))),  # fewer nodes than levels
], ids=lambda m: m.label)
def test_greedy_is_the_baseline_token_for_token(tiny, m):
    sampling = Sampling.of(list(range(4)), temperature=0.0)
    baseline = tiny.tokens(PROMPTS, METHODS["vanilla"], sampling)
    assert torch.equal(tiny.tokens(PROMPTS, m, sampling).tokens, baseline.tokens)


SEED_EXACT = [fitted("jacobi"), *(method(name, seed_exact=True, draft_model=draft_model)
                                  for name in LOSSLESS if name != "jacobi" for draft_model in DRAFT_MODELS)]
SETTINGS = [{"temperature": 0.0}, {"temperature": 0.7, "guidance": 1.0}, {"temperature": 1.0, "guidance": 3.0,
                                                                         "top_k": 30, "top_p": 0.95}]
ROUNDING = 1e-4  # two candidates that are nearer than this may change places by rounding


def assert_same_tokens(pipeline, prompts, tokens, expected, sampling):
    """A picture may part from the expected one only where the two best candidates are as good as equal."""
    parted = (tokens != expected).any(1)
    if not parted.any():
        return
    first = (tokens != expected).int().argmax(1)
    margins = draw_margins(pipeline, prompts, expected, sampling).gather(1, first[:, None])[parted, 0]
    print(f"{len(margins)} of {len(tokens)} pictures part where the best candidate leads by {margins.tolist()}")
    assert (margins <= ROUNDING).all()


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: f"T={settings['temperature']}")
@pytest.mark.parametrize("m", [
    *SEED_EXACT, method("eagle2", depth=7, width=3, nodes=9), method("speculative", seed_exact=True, depth=7),
    method("eagle1", seed_exact=True, tree="naive_extend_57"), method("adt-tree", start="tokenflock"),
    method("speculative", seed_exact=True, draft_guidance=0.0), method("jacobi", window=3),
], ids=lambda m: m.label)
def test_seed_exact_is_the_baseline_token_for_token(twins, m, settings):
    sampling, other = Sampling.of([1, 2, 3, 4], **settings), Sampling.of([5, 6, 7, 8], **settings)
    baseline = twins.tokens(PROMPTS, "vanilla", sampling)
    decoded = twins.tokens(PROMPTS, m, sampling)
    assert_same_tokens(twins, PROMPTS, decoded.tokens, baseline.tokens, sampling)
    assert (decoded.tv_excess == 0).all()
    if m.parameters.get("draft_model") == "small":  # else equality would say nothing of the accepted drafts
        assert (decoded.tau > 2).all()
    if settings["temperature"] > 0:  # the control: another seed
        with pytest.raises(AssertionError):
            assert_same_tokens(twins, PROMPTS, twins.tokens(PROMPTS, m, other).tokens, baseline.tokens, sampling)


def test_seed_exact_requests_of_every_kind_share_a_batch(twins):
    methods = [METHODS["vanilla"], *SEED_EXACT, METHODS["eagle1"]]
    n = len(methods)
    prompts, sampling = (PROMPTS * 4)[:n], Sampling.of(
        list(range(n)), guidance=([1.0, 3.0, 1.5, 2.0] * 4)[:n], temperature=([1.0, 0.0, 0.7, 2.0, 0.3] * 4)[:n],
        top_k=([0, 10] * 8)[:n], top_p=([1.0, 1.0, 0.8] * 6)[:n])
    baseline = twins.tokens(prompts, "vanilla", sampling)
    decoded = twins.tokens(prompts, methods, sampling)
    assert_same_tokens(twins, prompts[:-1], decoded.tokens[:-1], baseline.tokens[:-1], sampling[list(range(n - 1))])
    assert not torch.equal(decoded.tokens[-1], baseline.tokens[-1])  # eagle1 is not seed-exact by itself


@pytest.mark.parametrize("m", [method(name, seed_exact=True, draft_model="small")
                               for name in ("speculative", "eagle1")],
                         ids=lambda m: m.name)
def test_a_draft_model_that_is_the_target_drafts_what_the_target_draws(twins, m):
    """Both draw with the same noise, so every level has its draft accepted; with rejection, too few are."""
    sampling = Sampling.of(list(range(16)), guidance=3.0, top_k=30)
    decoded = twins.tokens(PROMPTS * 4, m, sampling)
    assert torch.equal(decoded.num_accepted.clamp(min=0), decoded.num_drafted)
    rejected = twins.tokens(PROMPTS * 4, method(m.name, draft_model="small", seed_exact=False, omega=0.9), sampling)
    assert not torch.equal(rejected.num_accepted.clamp(min=0), rejected.num_drafted)


def test_a_draft_model_reads_what_the_target_read_before_each_token(twins, monkeypatch):
    """With other hidden states it drafts worse, which no picture shows."""
    calls, extend = [], DraftState.extend
    monkeypatch.setattr(DraftState, "extend", lambda self, *arguments: (
        calls.append([a.clone() for a in arguments[1:4]]), extend(self, *arguments))[1])
    S, L = twins.gpt.prefix_len, twins.gpt.config.tokens
    for m in (method(name, draft_model="small") for name in ("speculative", "eagle2")):
        calls.clear()
        tokens = twins.tokens(PROMPTS, m, Sampling.of([1, 2, 3, 4], temperature=0.5)).tokens
        condition, padding_mask = twins.gpt.condition(twins.words(twins.words.encode(PROMPTS)))
        expected = twins.gpt.teacher_forced(condition, padding_mask, tokens)
        most = 0
        for hidden, counts, num_new in calls:
            for b in (counts < L - 1).nonzero()[:, 0].tolist():  # the others may be finished
                n = min(num_new[b].item(), L - counts[b].item())
                first = S - 1 + counts[b].item()
                torch.testing.assert_close(hidden[b, :n], expected[b, first:first + n], rtol=1e-4, atol=1e-4)
                most = max(most, n)
        assert most > 2


@pytest.mark.parametrize("name", ["eagle1", "eagle2"])
def test_a_draft_model_reads_what_it_read_at_the_parent(tiny, monkeypatch, name):
    levels, expand_level = [], DraftState.expand_level

    def recorded(self, tokens, previous_hidden, nodes):
        if not levels or nodes.first <= levels[-1][0]:
            read = [{0: hidden} for hidden in self.hidden[:4, 0]]  # by number, of each image; the root is number 0
        else:
            read = levels[-1][1]
        hidden, logits = expand_level(self, tokens, previous_hidden, nodes)
        for image, of_nodes in enumerate(nodes.ancestors[:, :, 0].tolist()):
            for f, word in enumerate(of_nodes):
                if word:
                    *_, parent, node = (n for n in range(64) if word >> n & 1)
                    assert torch.equal(previous_hidden[image, f], read[image][parent])
                    read[image][node] = hidden[image, f]
        levels.append((nodes.first, read))
        return hidden, logits

    monkeypatch.setattr(DraftState, "expand_level", recorded)
    shape = {"depth": 4, "width": 3} if name == "eagle2" else {}
    tiny.tokens(PROMPTS, method(name, **shape), Sampling.of([1, 2, 3, 4]))
    assert max(len(of_image) for _, read in levels for of_image in read) > 8


def test_no_number_is_drawn_for_two_ends(tiny, monkeypatch):
    """As a guess and by what it is accepted, say: the tokens would have another distribution."""
    streams, uniforms = [], philox_uniforms
    monkeypatch.setattr(specvis.decoding.sampling, "philox_uniforms",
                        lambda *a, stream: (streams.append(stream), uniforms(*a, stream=stream))[1])
    for name in ("jacobi:seed_exact=false", "eagle1"):
        streams.clear()
        tiny.tokens(PROMPTS, name, Sampling.of([1, 2, 3, 4]))
        assert len(set(streams)) == 2 and all(a != b for a, b in pairwise(streams))


@pytest.mark.parametrize("m", [METHODS["vanilla"], *SEED_EXACT], ids=lambda m: m.label)
@pytest.mark.parametrize("counts", [[0] * 4, [5] * 4, [15] * 4, [16] * 4, [0, 16, 7, 15], [3, 3, 1, 2]], ids=str)
def test_a_begun_image_goes_on_as_it_did(twins, m, counts):
    sampling, n = Sampling.of([1, 2, 3, 4]), torch.tensor(counts)
    whole = twins.tokens(PROMPTS, "vanilla", sampling)
    gained = []
    decoded = twins.tokens(PROMPTS, m, sampling, progress=gained.append, known_tokens=begun(whole.tokens, counts))
    assert_same_tokens(twins, PROMPTS, decoded.tokens, whole.tokens, sampling)
    assert torch.equal(decoded.num_known, n) and sum(gained) == (16 - n).sum()
    if m.is_baseline:
        assert torch.equal(decoded.target_forwards, (16 - n).clamp(min=1))
    else:  # the first forward draws a token, and every other one draws what it accepted and one more
        steps = (decoded.num_accepted >= 0).sum(1)
        assert torch.equal(decoded.target_forwards, 1 + steps)
        assert torch.equal(decoded.num_accepted.clamp(min=0).sum(1) + steps + 1 + n, (16 + (n == 16)).long())
    torch.testing.assert_close(decoded.tau, (16 - n) / decoded.target_forwards)


@pytest.mark.parametrize("name", METHODS)
def test_a_begun_image_keeps_what_was_known(tiny, name):
    m, counts, sampling = fitted(name), [4, 0, 16, 9], Sampling.of([1, 2, 3, 4])
    tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    decoded = tiny.tokens(PROMPTS, m, sampling, known_tokens=begun(tokens, counts))
    is_known = torch.arange(16) < torch.tensor(counts)[:, None]
    assert torch.equal(decoded.tokens[is_known], tokens[is_known]) and not decoded.failed.any()
    assert decoded.num_known.tolist() == counts and not torch.equal(decoded.tokens, tokens)
    alone = tiny.tokens(PROMPTS[3:], m, Sampling.of([4]), known_tokens=tokens[3:, :9])
    assert torch.equal(alone.tokens, decoded.tokens[3:]) and torch.equal(alone.num_accepted, decoded.num_accepted[3:])
    unknown = tiny.tokens(PROMPTS, m, sampling).tokens
    assert torch.equal(decoded.tokens[1], unknown[1]) and not torch.equal(decoded.tokens, unknown)


def test_lantern_with_delta_0_is_eagle2(tiny):
    sampling = Sampling.of(list(range(4)))
    strict = tiny.tokens(PROMPTS, method("eagle2", seed_exact=False), sampling)
    assert torch.equal(tiny.tokens(PROMPTS, fitted("lantern", delta=0.0), sampling).tokens, strict.tokens)


@pytest.mark.parametrize("m, relaxed", [
    (METHODS["eagle2"], fitted("lantern", delta=0.4, k=20)), (COUPLED, COUPLED.changed(omega=1.5)),
    (COUPLED, COUPLED.changed(k=8, delta=0.4, residual="relaxed"))], ids=lambda m: m.label)
def test_relaxing_accepts_more_and_its_tv_excess_says_so(tiny, m, relaxed):
    strict, relaxed = (tiny.tokens(PROMPTS * 16, m, Sampling.of(list(range(64)))) for m in (m, relaxed))
    assert relaxed.target_forwards.sum() < strict.target_forwards.sum()
    assert (strict.tv_excess == 0).all() and (relaxed.tv_excess > 0).any()


@pytest.mark.parametrize("name", METHODS)
def test_accounts_add_up(tiny, name):
    decoded = tiny.tokens(PROMPTS, fitted(name), Sampling.of([5, 6, 7, 8]))
    L = tiny.gpt.config.tokens
    assert decoded.tokens.shape == (4, L) and decoded.tokens.min() >= 0 and decoded.tokens.max() < 64
    if name == "vanilla":
        assert (decoded.tau == 1).all()
        return
    assert (decoded.num_accepted <= decoded.num_drafted).all() and 0 < decoded.acceptance_rate < 1
    for row, target_forwards in zip(decoded.num_accepted, decoded.target_forwards):
        steps = row[row >= 0]
        assert len(steps) == target_forwards - 1                # the first forward reads the condition
        assert 1 + (steps + 1).sum() == L                       # and no draft is after the last token


SEEDS = [3, 1, 4, 1, 5, 9]


def assert_alone_as_together(tiny, prompts, methods, seeds):
    together = tiny.tokens(prompts, methods, Sampling.of(seeds))
    back = list(range(len(prompts)))[::-1]
    turned = tiny.tokens([prompts[i] for i in back], [methods[i] for i in back], Sampling.of([seeds[i] for i in back]))
    for i in range(len(prompts)):
        alone = tiny.tokens(prompts[i: i + 1], methods[i], Sampling.of(seeds[i: i + 1]))
        for other in (turned, together):
            row = back[i] if other is turned else i
            for field in ("tokens", "num_accepted", "num_drafted", "target_forwards", "failed"):
                assert torch.equal(getattr(alone, field)[0], getattr(other, field)[row]), field
            torch.testing.assert_close(alone.tv_excess[0], other.tv_excess[row])  # rounded as matrix products are


@pytest.mark.parametrize("name", METHODS)
def test_a_request_does_not_depend_on_its_batch(tiny, name):
    assert_alone_as_together(tiny, PROMPTS, [fitted(name)] * 4, SEEDS[:4])


@pytest.mark.parametrize("methods", [
    [method("eagle2", depth=d, width=w, nodes=n) for d, w, n in ((1, 1, 2), (4, 6, 32), (2, 9, 12), (7, 3, 9))],
    [method("cool-sd", omega=omega, nu=nu) for omega, nu in ((1.1, 0.7), (0.5, 0.0), (3.0, 0.2), (1.0, 0.0))],
    [fitted("lantern", delta=delta, depth=d) for delta, d in ((0.0, 1), (0.4, 3), (0.1, 6), (1.0, 2))],
    [method("adt-tree", depth=d, width=w, nodes=n) for d, w, n in ((1, 4, 60), (9, 39, 60), (4, 10, 20), (2, 2, 7))],
    [fitted(name) for name in ("vanilla", "lantern++", "adt-tree", "speculative", "lantern+optimal", "adt-tree")],
    [method("eagle2", depth=10, width=1), method("eagle2", depth=1, width=10), method("eagle2", depth=10, nodes=2)],
    [method("adt-tree", depths=(1, 3), widths=(4, 5), depth=2, width=4, beta=0.5)] * 6,
    [method("adt-tree", nodes=20, depth=2, width=3, depths=(1, 4), widths=(1, 4), width_step=1, beta=0.5)] * 6,
    [method("adt-tree", depth=12, depths=(1, 2), widths=(4, 4), width=10)],
    [method("speculative", omega=omega) for omega in (1.0, 1.2, 0.7)],
    [COUPLED.changed(omega=omega) for omega in (1.0, 1.2, 0.8, 2.0)],
], ids=["shapes", "schedules", "cutoffs", "adaptive", "families", "deep and wide", "wider than its bounds",
        "wider and wider", "deeper than its bounds", "chains", "couplings"])
def test_requests_with_methods_of_their_own_share_a_batch(tiny, methods):
    assert_alone_as_together(tiny, (PROMPTS * 2)[:len(methods)], methods, SEEDS[:len(methods)])


@pytest.mark.parametrize("m", [
    fitted("adt-tree+lantern"), fitted("lantern++"), METHODS["cool-sd"], METHODS["vanilla"], METHODS["eagle2"],
    method("eagle1", seed_exact=True), fitted("jacobi"), fitted("gsd+coupled"),
], ids=lambda m: m.name)
def test_every_op_forced_to_the_oracle_gives_the_same_tokens(tiny, monkeypatch, m):
    sampling = Sampling.of(list(range(4)), top_k=30, top_p=0.95)
    ours = tiny.tokens(PROMPTS, m, sampling)
    modules = [import_module(f"{specvis.decoding.__name__}.{module.name}")
               for module in iter_modules(specvis.decoding.__path__)]
    forced = [(module, op) for op in specvis_kernels.ops() for module in modules
              if getattr(module, op, None) is getattr(specvis_kernels, op)]
    assert {op for _, op in forced} == {
        "accept_gaussian", "commit_tokens", "couple_tokens", "draft_children", "draft_frontier", "draw_tokens",
        "guided_probs", "philox_uniforms", "resample_gaussian", "sample_residual", "select_tree", "token_log_probs",
        "tree_links", "verify_logits"}
    assert [module.__name__ for module, op in forced if op == "tree_links"] == [
        f"specvis.decoding.{name}" for name in ("draft_tree", "jacobi")]
    for module, op in forced:
        monkeypatch.setattr(module, op, partial(getattr(module, op), backend="oracle"))
    oracles = tiny.tokens(PROMPTS, m, sampling)
    assert torch.equal(ours.tokens, oracles.tokens) and torch.equal(ours.num_accepted, oracles.num_accepted)


def test_the_draft_model_gets_its_share_of_the_guidance(tiny):
    """Guidance 5 with a share of 0 drafts as guidance 1 does, and a share is each request's own."""
    drafts, shares = {}, (1.0, 0.0, 0.5)
    propose = StaticDraftState.draft

    def watched(self, *arguments):
        draft = propose(self, *arguments)
        drafts.setdefault(key, draft.draft_probs[:, 0].clone())  # the first step's, after the newest token
        return draft

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StaticDraftState, "draft", watched)
        for key in shares:
            tiny.tokens(["red heart"], method("speculative", draft_guidance=key), Sampling.of([1], guidance=5.0))
        key = "together"
        tiny.tokens(["red heart"] * 3, [method("speculative", draft_guidance=share) for share in shares],
                    Sampling.of([1] * 3, guidance=5.0))
    assert torch.allclose(drafts["together"], torch.cat([drafts[share] for share in shares]), atol=1e-6)
    one, none, half = (drafts[share].clamp(min=1e-30).log() for share in shares)
    between = torch.softmax((one + none) / 2, -1)                # guidance moves logits along a line
    assert torch.allclose(half.exp(), between, atol=1e-5) and not torch.allclose(one.exp(), none.exp(), atol=1e-3)
    with pytest.raises(ValueError, match="draft_guidance must be at least 0 and finite in 32 bits, got -1"):
        method("eagle2", draft_guidance=-1)


@pytest.mark.parametrize("m", [METHODS["eagle2"], *(method("jacobi", window=window) for window in (1, 3, 20))],
                         ids=lambda m: m.label)
def test_an_observer_sees_every_step(tiny, m):
    steps, gained = [], []
    decoded = tiny.tokens(PROMPTS, m, Sampling.of(list(range(4))), gained.append, steps.append)
    assert len(steps) == decoded.target_forwards.max() - 1 and sum(gained) == 4 * 16
    for b in range(4):
        mine = [step for step in steps if step.active[b]]
        assert len(mine) == decoded.target_forwards[b] - 1
        num_accepted = decoded.num_accepted[b]
        assert [step.num_accepted[b].item() for step in mine] == num_accepted[num_accepted >= 0].tolist()
        assert [step.position[b].item() for step in mine] == (num_accepted >= 0).nonzero()[:, 0].tolist()
        for step in mine if m.drafting == "jacobi" else ():
            num_nodes = 1 + min(m.drafts.window, 15 - step.position[b].item())
            assert (step.links.depth[b] >= 0).sum() == num_nodes and step.links.depth[b].max() == num_nodes - 1
            accepted = list(range(1, 1 + step.num_accepted[b].item()))
            assert [node for node in step.accepted_nodes[b].tolist() if node >= 0] == accepted


def test_nan_ends_one_picture_and_leaves_the_others(tiny):
    for m in map(fitted, METHODS):
        whole = tiny.tokens(PROMPTS, m, Sampling.of([1, 2, 3, 4]))
        condition, padding_mask = tiny.gpt.condition(tiny.words(tiny.words.encode(PROMPTS)))
        condition[1, -1, 0] = torch.nan
        neighbors = tiny.neighbors(m.num_neighbors) if m.num_neighbors else None
        if m.drafting == "none":
            broken = decode(tiny.gpt, condition, padding_mask, Sampling.of([1, 2, 3, 4]))
        elif m.drafting == "jacobi":
            broken = jacobi_decode(tiny.gpt, condition, padding_mask, Sampling.of([1, 2, 3, 4]), [m] * 4, neighbors)
        else:
            broken = speculative_decode(tiny.gpt, eagle(tiny, padding_mask), condition, padding_mask,
                                        Sampling.of([1, 2, 3, 4]), [m] * 4, neighbors)
        assert broken.failed.tolist() == broken.tau.isnan().tolist() == [False, True, False, False]
        keep = [0, 2, 3]
        assert torch.equal(broken.tokens[keep], whole.tokens[keep])
        assert broken.tokens.min() >= 0 and broken.tokens.max() < 64


def test_a_picture_that_fails_midway_ends_in_zeros(tiny):
    L, bad = tiny.gpt.config.tokens, 13
    for m in (METHODS["vanilla"], METHODS["speculative"], METHODS["eagle2"]):
        whole = tiny.tokens(PROMPTS, m, Sampling.of([1, 2, 3, 4])).tokens
        code = whole[0, bad].item()                                 # its embedding breaks what comes after it
        embedding = tiny.gpt.tok_embeddings.weight[code].clone()
        tiny.gpt.tok_embeddings.weight[code] = torch.nan
        broken = tiny.tokens(PROMPTS, m, Sampling.of([1, 2, 3, 4]))
        counts = [L, 0, 0, bad + 2]                                 # what was known stays
        known = tiny.tokens(PROMPTS, m, Sampling.of([1, 2, 3, 4]), known_tokens=begun(whole[[0, 1, 2, 0]], counts))
        tiny.gpt.tok_embeddings.weight[code] = embedding
        assert broken.failed[0]
        position = (whole[0] == code).nonzero()[0, 0]
        assert position < L - 1 and (broken.tokens[0, position + 1:] == 0).all()
        assert known.failed[3] and not known.failed[0] and torch.equal(known.tokens[0], whole[0])
        assert torch.equal(known.tokens[3, :bad + 2], whole[0, :bad + 2])


@pytest.mark.skipif("cpu" not in backends("tree_attention"), reason="only that kernel reads what a node sees alone")
@pytest.mark.parametrize("name", ["jacobi:window=16", "eagle2", "eagle1:seed_exact=true"])
def test_a_nan_after_a_rejected_draft_ends_no_picture(tiny, name):
    """So the pictures that end are the baseline's, and at the same tokens."""
    embeddings, codes = tiny.gpt.tok_embeddings.weight, [3, 11, 40]
    kept, sampling = embeddings[codes].clone(), Sampling.of(list(range(16)), guidance=2.0)
    embeddings[codes] = torch.nan
    expected, decoded = (tiny.tokens(PROMPTS * 4, m, sampling) for m in ("vanilla", name))
    embeddings[codes] = kept
    assert 0 < expected.failed.sum() < 16 and torch.equal(decoded.failed, expected.failed)
    assert torch.equal(decoded.tokens, expected.tokens)


def test_a_broken_draft_model_costs_speed_and_no_picture(tiny):
    bias = tiny.eagle.fc.bias.clone()
    tiny.eagle.fc.bias[0] = torch.nan
    for m in (METHODS["speculative"], METHODS["eagle2"]):
        decoded = tiny.tokens(PROMPTS, m, Sampling.of([1, 2, 3, 4]))
        assert not decoded.failed.any()
    tiny.eagle.fc.bias.copy_(bias)


@pytest.mark.parametrize(("m", "settings"), [
    (method("speculative", depth=3), UNFILTERED), (method("eagle1", tree=TREE), FILTERED),
    (method("eagle2", **DYNAMIC), UNFILTERED), (method("cool-sd", tree=TREE, omega=0.5), UNFILTERED),
    (COUPLED, UNFILTERED), (COUPLED.changed(coupling="none"), UNFILTERED),
], ids=lambda value: getattr(value, "label", ""))
def test_pictures_have_the_target_distribution(minute, m, settings):
    """A quarter of the pictures of tests/slow/test_picture_laws.py, which has more methods and rules that are wrong."""
    assert m.lossless and abs(far_from_target(minute, m, settings, requests=25_000)) < 4.5
