"""EAGLE heads for transformers' families, in tiny sizes: what they read, that they change no law, what they refuse."""

import pytest
import torch
import torch.nn.functional as F

from specvis import METHODS, Sampling, decode, jacobi_decode, method, speculative_decode
from specvis.decoding.bounds import vanilla_residual
from specvis.decoding.draft_model import EagleDraftModel, SmallDraftModel
from specvis.decoding.graphs import GRAPHS
from specvis.decoding.methods import parse_method
from specvis.decoding.sampling import cfg_inputs
from specvis.models.interface import DraftModel, Nodes, has_guidance, id_range, num_tokens
from specvis.models.transformers import Chameleon, GLMImage
from specvis.models.transformers_eagle import TransformersEagleHead
from specvis_kernels import codebook_neighbors, guided_probs, tree_links
from tests.decoding.pictures import chi_square
from tests.decoding.test_step import Recorded, recorded  # noqa: F401  a fixture
from tests.decoding.theory import neighborhood, output_law, relaxed_residual, target_law, vanilla
from tests.families import FAMILIES, S, chameleon_model, target_of

PROMPTS = [[1, 20, 21, 7], [1, 22, 23, 24, 25, 26, 7], [1, 27, 7]]


def head_for(target, seed=1):
    torch.manual_seed(seed)
    return TransformersEagleHead(target)


def sampling_for(target, temperature=1.0, count=3):
    guidance = 2.0 if getattr(target, "has_guidance", True) else 1.0
    return Sampling.of(list(range(count)), guidance=guidance, temperature=temperature)


@pytest.fixture(scope="module", params=FAMILIES)
def target(request):
    return target_of(request.param)


@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_chains_and_trees_are_read_as_whole_sequences(target, packed):
    """Prompts of several lengths are padded together; each alone, in one causal forward, gives the same numbers."""
    if packed and isinstance(target, GLMImage):
        with pytest.raises(ValueError, match="model must have layers as Llama, Emu3 or Chameleon have them"):
            target.use_decoder_layers()
        return
    if packed:
        target.use_decoder_layers()
    head, condition = head_for(target), target.condition(PROMPTS)
    draft_model = EagleDraftModel(target, head, *cfg_inputs(target, *condition))
    assert isinstance(draft_model, DraftModel)
    L, R = 6, len(draft_model.padding_mask)
    ids = id_range(target, torch.arange(L))
    tokens = torch.randint(0, 10, (3, L), generator=torch.Generator().manual_seed(2))
    tokens = (tokens if ids is None else tokens.clamp(min=ids[:, 0])).repeat(R // 3, 1)
    inputs = cfg_inputs(target, *condition)
    hidden = target.teacher_forced(*inputs, tokens)
    expected = head.teacher_forced(*inputs, tokens, hidden[:, :-1])          # (R, L - 1, dim)
    for row, mask in enumerate(inputs[1] if has_guidance(target) else []):  # without padding; GLM-Image counts from S
        alone = inputs[0][row: row + 1, mask], mask[mask][None]
        short = head.teacher_forced(*alone, tokens[row: row + 1], hidden[row: row + 1, (~mask).sum():-1])
        torch.testing.assert_close(short, expected[row: row + 1], atol=2e-5, rtol=1e-4)

    cache = draft_model.new_cache(S + L + 4)
    draft_model.prefill(hidden[:, :S], cache)
    chain = tree_links(torch.arange(-1, 2, dtype=torch.int32).repeat(3, 1)).ancestors
    nodes = Nodes(torch.arange(3)[None], torch.full((3,), S - 1), chain, draft_model.padding_mask, S + L)
    read = draft_model.extend(tokens[:, :3], hidden[:, S - 1: S + 2], nodes, cache)
    torch.testing.assert_close(read, expected[:, :3], atol=2e-5, rtol=1e-4)

    links = tree_links(torch.tensor([[-1, 0, 0]], dtype=torch.int32).repeat(3, 1))  # the third token, and two after it
    nodes = Nodes(links.depth, torch.full((3,), S + 1), links.ancestors, draft_model.padding_mask, S + 8)
    drafts = torch.cat([tokens[:, 2:3], (tokens[:, 3:4] + 1) % 10, tokens[:, 3:4]], 1)
    read = draft_model.extend(drafts, hidden[:, [S + 1, S + 2, S + 2]], nodes, cache)
    torch.testing.assert_close(read[:, 2], expected[:, 3], atol=2e-5, rtol=1e-4)
    target.packing = None


def test_every_method_decodes_and_greedy_lossless_ones_as_plain_decoding(target):
    head, (condition, mask), greedy = head_for(target), target.condition(PROMPTS), sampling_for(target, 0.0)
    inputs, expected = cfg_inputs(target, condition, mask), decode(target, condition, mask, greedy).tokens
    neighbors, lossless = codebook_neighbors(target.codebook, 5), [m.name for m in METHODS.values() if m.lossless]
    allowed = id_range(target, torch.arange(num_tokens(target)))
    assert len(expected.unique()) > 3 and len(lossless) > 4
    for m in METHODS.values():
        m = m.changed(k=min(5, m.acceptance.k)) if m.acceptance.k else m
        if m.drafting in ("jacobi", "none"):
            found = [jacobi_decode(target, condition, mask, greedy, m, neighbors)]
        else:
            drafts = EagleDraftModel(target, head, *inputs), SmallDraftModel(target, *inputs)
            found = [speculative_decode(target, draft_model, condition, mask, greedy, m, neighbors, batch=batch)
                     for draft_model, batch in zip((*drafts, drafts[0]), (3, 3, 2))]
        for decoded in found:
            if m.name in lossless:
                assert torch.equal(decoded.tokens, expected), m.label
            if allowed is not None:
                assert ((decoded.tokens >= allowed[:, 0]) & (decoded.tokens < allowed[:, 1])).all(), m.label


@pytest.mark.parametrize("name", ["vanilla", "jacobi:window=5", "eagle1", "lantern:k=5"])
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_steps_are_run_again(family, name, request, as_on_a_gpu):
    """As CUDA graphs on a GPU: nothing that a step needs is in Python but its shapes."""
    target, m = target_of(family), parse_method(name)
    target.model.requires_grad_(False)
    condition, mask = target.condition(PROMPTS)
    draft_model = EagleDraftModel(target, head_for(target).requires_grad_(False), *cfg_inputs(target, condition, mask))

    def decoded():
        if m.drafting in ("jacobi", "none"):
            return jacobi_decode(target, condition, mask, sampling_for(target), m)
        return speculative_decode(target, draft_model, condition, mask, sampling_for(target), m,
                                  codebook_neighbors(target.codebook, 5) if m.num_neighbors else None)

    request.getfixturevalue("recorded")
    expected, replays = decoded(), Recorded.num_replays  # of the first decoding, too
    assert target.can_replay and (not m.num_neighbors or draft_model.can_replay) and replays > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(GRAPHS, "cpu")
        assert torch.equal(decoded().tokens, expected.tokens) and Recorded.num_replays == replays
    calls = []
    hook = target.model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    decoded()  # by a hook that a replay would not call
    assert not target.can_replay and Recorded.num_replays == replays
    hook.remove()
    target.packing = None
    read_by_modules = decoded()
    assert Recorded.num_replays == replays
    assert (read_by_modules.tokens == expected.tokens).float().mean() > 0.9  # float32: a draw may lie between two


# --- the law of whole pictures, by enumeration: 2 x 2 codes of 3, with newlines in Lumina-mGPT's form ---

SETTINGS = {"guidance": 2.0, "temperature": 1.0}
COUNT, BATCH = 4_000, 2_000


def laws(target, head, settings):
    """The target's and the head's next-token distributions after each prefix: lists of (V,) * (i + 1) float64.

    The head's are for drafts right after the newest token, whose hidden states are all the target's.
    """
    V, L = target.vocab_size, num_tokens(target)
    prefixes = torch.cartesian_prod(*[torch.arange(V)] * (L - 1))
    tokens = F.pad(prefixes, (0, 1))
    inputs = cfg_inputs(target, *(part.expand(len(tokens), *[-1] * (part.ndim - 1))
                                  for part in target.condition(PROMPTS[:1])))
    hidden = target.teacher_forced(*inputs, tokens.repeat(2, 1))
    drafts = head.teacher_forced(*inputs, tokens.repeat(2, 1), hidden[:, :-1])
    each = Sampling.of([0] * len(tokens), **settings)
    found = []
    for states, first in ((hidden[:, S - 1:], 0), (drafts, 1)):
        positions = torch.arange(first, L).expand(len(tokens), -1)
        rows = each.rows(target.logits(states))
        probs = guided_probs(**rows, id_range=id_range(target, positions)).probs.double()
        found.append([probs[:, i].view(*[V] * (L - 1), V) for i in range(L - first)])
    P, Q = ([probs[(*[slice(None)] * t, *[0] * (L - 1 - t))] for t, probs in enumerate(part, first)]
            for part, first in zip(found, (0, 1)))
    return P, Q


def drawn(target, head, m, settings, neighbors=None):
    condition, mask = (part.expand(BATCH, *[-1] * (part.ndim - 1)).contiguous()
                       for part in target.condition(PROMPTS[:1]))
    draft_model = EagleDraftModel(target, head, *cfg_inputs(target, condition, mask))
    return torch.cat([speculative_decode(target, draft_model, condition, mask, Sampling.of(
        list(range(start, start + BATCH)), **settings), m, neighbors).tokens for start in range(0, COUNT, BATCH)])


@pytest.fixture(scope="module", params=["anole", "lumina"])
def small(request):
    newline = 8803 if request.param == "lumina" else None
    target = Chameleon(chameleon_model(2, 3), S, (2, 2), [1, 7], newline)
    head = head_for(target, 3)
    with torch.no_grad():
        target.model.lm_head.weight[target.ids[:3]] *= 0.3  # else one picture has nearly all of the law
        return target, head, *laws(target, head, SETTINGS)


TREE = {"depth": 2, "width": 2, "nodes": 6, "seed_exact": False}


@pytest.mark.parametrize("m", [
    method("eagle1", tree=((0,), (1,), (0, 0), (1, 0))), method("eagle2", **TREE),
    method("adt-tree", **TREE, widths=(2, 3), depths=(1, 3), width_step=1)], ids=["static", "dynamic", "adaptive"])
def test_pictures_have_the_target_s_law(small, m):
    target, head, P, _ = small
    law = target_law(P).flatten()
    assert abs(law.sum() - 1) < 1e-6 and law.max() < 0.5
    assert chi_square(drawn(target, head, m, SETTINGS), law, target.vocab_size) < 4


def test_lantern_has_the_law_that_is_enumerated(small):
    """One draft a step, of which the law is known exactly; far from the target's, so that the test sees LANTERN."""
    target, head, P, Q = small
    V, L, table = target.vocab_size, num_tokens(target), codebook_neighbors(target.codebook, 2)
    rows = F.pad(table.long(), (0, 0, 0, V - 3))
    accept, residual = neighborhood(rows, 0.5), relaxed_residual(rows, 0.5)
    m = method("lantern++", tree="chain-1", k=2, cutoff="tvd", delta=0.5)
    exact, strict = (torch.stack([P[0][first] * output_law(
        [p[first] for p in P[1:]], [q[first] for q in Q], [f], G, again=True)[0] for first in range(V)]).flatten()
        for f, G in ((accept, residual), (vanilla, vanilla_residual)))
    assert (exact - strict).abs().sum() / 2 > 0.02 and L > 3
    torch.testing.assert_close(strict, target_law(P).flatten())
    tokens = drawn(target, head, m, SETTINGS, table)
    assert chi_square(tokens, exact, V) < 4 < chi_square(tokens, strict, V)


def test_a_head_belongs_to_its_target(target):
    head, (condition, mask) = head_for(target), target.condition(PROMPTS)
    inputs = cfg_inputs(target, condition, mask)
    with pytest.raises(ValueError, match="head must be made for this target, got one for another"):
        EagleDraftModel(target_of(next(iter(FAMILIES)), 1), head, *inputs)
    with pytest.raises(ValueError, match="head must have the target's dtype, torch.float32, got torch.bfloat16"):
        EagleDraftModel(target, head.bfloat16(), *inputs)
    with pytest.raises(ValueError, match="head must have the target's device, cpu, got meta"):
        EagleDraftModel(target, head.float().to("meta"), *inputs)
