"""benchmarks/released.py accepts and draws as our ops and loops do, so that its seconds may be compared with ours."""
import random

import pytest
import torch

from benchmarks import released
from specvis.decoding.draft_model import EagleDraftModel, SmallDraftModel
from specvis.decoding.methods import parse_method
from specvis.decoding.sampling import Sampling, cfg_inputs
from specvis_kernels import tree_links, verify_tree
from tests.tiny import tiny_pipeline

WIDE = {"guidance": 1.2, "temperature": 1.5, "top_k": 24, "top_p": 0.95}  # tiny draft models are accepted often


def decode_as_released(pipeline, draft_model, prompts, method, sampling, known_tokens=None):
    with torch.inference_mode():
        features = pipeline.words(pipeline.words.encode(prompts))
        condition, padding_mask = pipeline.gpt.condition(features)
        draft_model = draft_model(features, padding_mask)
    neighbors = pipeline.neighbors(method.num_neighbors) if method.num_neighbors else None
    return released.released_decode(pipeline.gpt, draft_model, condition, padding_mask, sampling, method, neighbors,
                                    known_tokens=known_tokens)


@pytest.mark.parametrize("text", ["eagle1", "lantern:k=6:delta=0.4:width=4:nodes=12"])
def test_the_loop_accepts_and_draws_as_ours(text):
    pipeline, method, B = tiny_pipeline(), parse_method(text), 400
    L, prompts, sampling = pipeline.num_tokens, ["red heart"] * B, Sampling.of(list(range(B)), **WIDE)
    at = L - 3  # where the first step begins; two levels are in the image, and the released loop drafts beyond it
    known = torch.randint(64, (1, at - 1), generator=torch.Generator().manual_seed(3)).repeat(B, 1)

    def draft_model(*source):
        inputs = cfg_inputs(pipeline.gpt, *pipeline.gpt.condition(*source))
        return EagleDraftModel(pipeline.gpt, pipeline.eagle, *inputs)

    both = (pipeline.tokens(prompts, method, sampling, known_tokens=known),
            decode_as_released(pipeline, draft_model, prompts, method, sampling, known))
    accepted = [decoded.num_accepted[:, at].double() for decoded in both]
    assert accepted[0].mean() > 0.15
    assert abs(accepted[0].mean() - accepted[1].mean()) < 4 * sum(a.var() / B for a in accepted) ** 0.5
    for position in (at - 1, at, at + 1):
        ours, theirs = (torch.bincount(decoded.tokens[:, position], minlength=64).double() for decoded in both)
        chi_square = ((ours - theirs) ** 2 / (ours + theirs).clamp(min=1)).sum()
        freedom = (ours + theirs > 0).sum() - 1
        assert chi_square < freedom + 4 * (2 * freedom) ** 0.5 + 4


@pytest.mark.parametrize("text", ["eagle1", "lantern:k=0"])
def test_the_loop_finds_the_likeliest_tokens(text):
    """The target drafts for itself, so all drafts are right, as deep as the tree is."""
    pipeline, method, prompts = tiny_pipeline(), parse_method(text), ["red heart", "blue", "plain heart"]
    sampling = Sampling.of([0, 1, 2], guidance=1.5, temperature=1e-3)
    for layer in pipeline.gpt.layers:  # weights by which earlier tokens matter
        layer.attention.wqkv.weight.data.normal_(std=0.4, generator=torch.Generator().manual_seed(1))
        layer.attention.wo.weight.data.normal_(std=0.8, generator=torch.Generator().manual_seed(2))
    expected = pipeline.tokens(prompts, "vanilla", sampling).tokens

    def itself(features, padding_mask):
        return SmallDraftModel(pipeline.gpt, *cfg_inputs(pipeline.gpt, *pipeline.gpt.condition(features)))

    decoded = decode_as_released(pipeline, itself, prompts, method, sampling)
    assert decoded.tokens.equal(expected) and decoded.num_accepted[:, 1].tolist() == [method.max_depth] * 3
    assert decode_as_released(pipeline, itself, prompts, method, sampling, expected[:, :5]).tokens.equal(expected)


class FixedDraftModel:
    """Has one distribution, whatever it reads."""
    prefix_len = 1

    def __init__(self, row, batch):
        self.row, self.padding_mask = row, torch.ones(2 * batch, 1, dtype=torch.bool)

    def new_cache(self, columns):
        return None

    def extend(self, tokens, *others):
        return torch.zeros(*tokens.shape, 1)

    def logits(self, hidden):
        return self.row.log().expand(*hidden.shape[:2], -1)


@pytest.mark.parametrize("text", ["eagle1", "eagle1:k=2:delta=0.2:residual=relaxed", "lantern:k=0:width=3:nodes=8",
                                  "lantern:k=2:delta=0.2:width=3:nodes=8",
                                  "lantern++:k=2:delta=1.0:tree=mc_sim_7b_63"])
def test_the_walk_has_the_rule_of_verify_tree(text):
    """For equal trees both accept equally many drafts, and emit one distribution."""
    method, B, V = parse_method(text), 2000, 6
    torch.manual_seed(0)
    p, q = torch.tensor([0.05, 0.3, 0.05, 0.35, 0.05, 0.2]), torch.tensor([0.4, 0.05, 0.3, 0.05, 0.15, 0.05])
    neighbors = torch.tensor([[1, 2], [0, 3], [4, 5], [1, 5], [3, 0], [2, 4]], dtype=torch.int32)
    drafts = released.Drafts(FixedDraftModel(q, B), released.Warpers(1.0, 1.0, 0, 1.0), method, 16)
    drafts.extend(torch.zeros(B, 1, dtype=torch.int64), torch.zeros(2 * B, 1, 1), [0] * B, [1] * B)
    tree = drafts.draft(torch.zeros(B, dtype=torch.int64))
    N = tree.tokens.shape[1]
    rule = method.acceptance
    relaxation = released.Relaxation(neighbors, rule.k, rule.delta, rule.cutoff) if rule.k else None
    emitted, num_accepted, coins = torch.zeros(2, V), [[], []], random.Random(0)
    for b in range(B):
        path, accepted, probs = released.walk(tree.along_paths(b), lambda path, level: p, lambda *_: coins.random(),
                                              relaxation, *tree.drawn(b))
        first = tree.tokens[b, tree.shapes[b].paths[path, 1]]
        emitted[0] += torch.eye(V)[first] if accepted else probs
        num_accepted[0].append(accepted)
    links = tree_links(torch.tensor([shape.parents for shape in tree.shapes], dtype=torch.int32))
    options = {"residual": rule.residual}
    if tree.probs is not None:
        options |= {"draft_probs": tree.probs.contiguous(),
                    "draft_row": torch.tensor([tree.draft_row] * B, dtype=torch.int32)}
    if rule.k:
        options |= {"neighbors": neighbors, "delta": torch.full((B,), rule.delta), "cutoff": rule.cutoff}
    for _ in range(4):
        ours = verify_tree(p.expand(B, N, V), tree.tokens, links.first_child, links.next_sibling, torch.rand(B, N),
                           max_depth=method.max_depth, **options)
        first = tree.tokens.gather(1, ours.accepted_nodes[:, :1].clamp(min=0).long())[:, 0]
        emitted[1] += torch.bincount(torch.where(ours.num_accepted > 0, first, ours.next_token), minlength=V) / 4
        num_accepted[1] += ours.num_accepted.tolist()
    theirs, ours = (torch.tensor(numbers).double() for numbers in num_accepted)
    assert abs(theirs.mean() - ours.mean()) < 4 * ours.std() / B ** 0.5 and ours.mean() > 0.1
    assert (emitted[0] - emitted[1]).abs().sum() / 2 < 0.03 * B
    if method.lossless:
        assert (emitted[0] - B * p).abs().sum() / 2 < 0.03 * B


def test_the_loop_refuses_what_no_release_has():
    with pytest.raises(ValueError, match="method must be eagle1, lantern, lantern\\+\\+ or speculative, got eagle2"):
        released.released_decode(None, None, None, None, None, parse_method("eagle2"))
