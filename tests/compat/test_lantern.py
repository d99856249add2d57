"""compat.lantern answers LANTERN's interfaces as benchmarks/released.py does, and replaces methods of a decoder."""
import random
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.released import Relaxation, walk
from specvis_kernels.compat import lantern
from specvis_kernels.compat.eagle import TreeLogits

from .steps import (
    GUIDANCE,
    Processors,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    dynamic_case,
    ring_of_neighbors,
)

V, OFFSET = 24, 4
PROCESSORS = {"plain": Processors(),
              "T, top-p, top-k": Processors([TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.8), TopKLogitsWarper(6)]),
              "top-k, top-p": Processors([TopKLogitsWarper(6), TopPLogitsWarper(0.8)]),
              "unknown": Processors([lambda ids, x: x.clamp(max=3)])}


class Step(SimpleNamespace):
    """A random step: the logits of both rows (2, N, V), the guided ones along the paths, the tokens, the table."""

    def __init__(self, seed, offset=0):
        random.seed(seed), torch.manual_seed(seed)
        logits, tokens, paths = dynamic_case(V, 20, slice(offset, None))
        candidates = torch.cat([tokens, torch.full((1, 1), -1)], 1)[0, paths]
        cond, uncond = logits = logits / 2  # flatter: rejections and equally long paths are frequent
        super().__init__(logits=logits, paths=paths, tokens=tokens, along=(uncond + GUIDANCE * (cond - uncond))[paths],
                         candidates=candidates, table=ring_of_neighbors(V - offset, V - offset - 1),
                         N=tokens.shape[1])

    def model(self, **parts):
        return SimpleNamespace(nearest_latents=self.table, **parts)

    def given(self, form):
        """The argument of evaluate_posterior: TreeLogits, or the logits along the paths."""
        return TreeLogits(self.logits, GUIDANCE, self.tokens, self.paths) if form == "tree" else self.along


def to_softmax(row):
    return row.softmax(0)


def relaxation_of(table=None, k=0, delta=0.0, offset=0):
    """The release's rule: delta limits a sum up to 1, and above 1 its ratio to the draft's own probability."""
    limit = (delta, "tvd") if delta <= 1 else (delta - 1, "ratio")
    return None if table is None else Relaxation(table, k, *limit, offset, "released", "uniform")


def sampled(along, candidates, to_probs, coins, *rule, draft_row_of=None, share_of=None):
    """The row of the accepted path, how many drafts are accepted, and the next token's distribution, in float64."""
    return walk(candidates, lambda path, level: to_probs(along[path, level]).double(), lambda *_: next(coins),
                relaxation_of(*rule), draft_row_of, share_of)


def greedy(along, candidates, *rule):
    """The first of the longest paths, its length, and the next token.

    A token is accepted if it is the likeliest, once it has borrowed what its neighbors lend; each token by itself.
    """
    lengths, relaxation = [], relaxation_of(*rule)
    for path, rows in zip(candidates.tolist(), along):
        length = 0
        for token, row in zip(path[1:], rows):
            probs = row.double().softmax(0)
            if token >= 0 and relaxation:
                probs[token] += relaxation.lent(probs, token)[0]
            if token < 0 or probs.argmax() != token:
                break
            length += 1
        lengths.append(length)
    best = lengths.index(max(lengths))
    return best, lengths[best], int(along[best, lengths[best]].argmax())


def counted(seed):
    """Numbers of Python's random for this seed, and the list of the numbers that were taken."""
    stream, taken = random.Random(seed), []
    return iter(lambda: taken.append(stream.random()) or taken[-1], None), taken


def assert_drawn(answer, wanted, taken, seed):
    """The release's row, length and count of random numbers; a token where the uniform falls in its distribution."""
    row, length, sample_p = answer
    assert (int(row), length) == wanted[:2]
    following = random.Random(seed)
    assert [following.random() for _ in taken] == taken and random.random() == following.random()
    torch.manual_seed(seed)
    uniform, token, ends = torch.rand(1, 1).item(), sample_p.argmax(), wanted[2].cumsum(0)
    assert sample_p.sum() == 1 and sample_p.shape == (V,)
    assert ends[token] - wanted[2][token] - 1e-5 <= uniform <= ends[token] + 1e-5


RULES = {"lossless": (), "delta 0.2": (True, 5, 0.2), "delta 1": (True, 3, 1.0), "ratio 2.5": (True, 6, 2.5)}


@pytest.mark.parametrize("form", ["tree", "paths"])
@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("rule", RULES)
def test_sampled_dynamic_trees(rule, processors, form):
    lengths, rules, processor = set(), RULES[rule], PROCESSORS[processors]

    def to_probs(row):
        return processor(None, row[None])[0].softmax(0)

    for seed in range(12):
        step, (coins, taken) = Step(seed), counted(seed)
        wanted = sampled(step.along, step.candidates, to_probs, coins, *((step.table, *rules[1:]) if rules else ()))
        random.seed(seed), torch.manual_seed(seed)
        answer = lantern.evaluate_posterior(step.model(), step.given(form), step.candidates, processor, *rules,
                                            generator="python")
        assert_drawn(answer, wanted, taken, seed)
        lengths.add(answer[1])
    assert len(lengths) > 2


@pytest.mark.parametrize("form", ["tree", "paths"])
@pytest.mark.parametrize("rule", [(), (True, 5, 0.2), (True, 4, 3.0)])
def test_greedy(rule, form):
    """Of several longest paths the first row counts, in any order of the rows."""
    ties = 0
    for seed in range(80):
        step = Step(seed)
        order = torch.randperm(len(step.paths))
        step.paths, step.along, step.candidates = step.paths[order], step.along[order], step.candidates[order]
        answer = lantern.evaluate_posterior(step.model(), step.given(form), step.candidates, None, *rule)
        table = (step.table, *rule[1:]) if rule else ()
        best, length, token = greedy(step.along, step.candidates, *table)
        assert (int(answer[0]), answer[1], int(answer[2].argmax())) == (best, length, token)
        again = greedy(step.along.flip(0), step.candidates.flip(0), *table)
        ties += step.candidates.flip(0)[again[0], :length + 1].tolist() != step.candidates[best, :length + 1].tolist()
    assert ties > 0 if rule else ties == 0


@pytest.mark.parametrize("empty", ["uniform", "target"])
def test_nothing_left(empty):
    """All other tokens are neighbors, so a rejection leaves nothing: the release then draws from all tokens alike."""
    step, ends = Step(3), set()
    logits = torch.full((2, step.N, V), -30.0)
    logits[:, :, :2] = 0
    step.tokens[0, 1:] = step.tokens[0, 1:].clamp(min=2)
    candidates = torch.cat([step.tokens, torch.full((1, 1), -1)], 1)[0, step.paths]
    table = torch.tensor([[other for other in range(V) if other != code] for code in range(V)])
    for seed in range(60):
        coins, taken = counted(seed)
        wanted = sampled(logits[0][step.paths], candidates, to_softmax, coins, table, V - 2, 0.6)
        random.seed(seed), torch.manual_seed(seed)
        answer = lantern.evaluate_posterior(
            SimpleNamespace(nearest_latents=table), TreeLogits(logits, 3.0, step.tokens, step.paths), candidates,
            Processors(), True, V - 2, 0.6, empty=empty, generator="python")
        if empty == "uniform":
            assert_drawn(answer, wanted, taken, seed)
        ends.add(int(answer[2].argmax()))
    assert len(ends) > 8 if empty == "uniform" else ends == {0, 1}


def test_codes_after_text():
    """Anole: code 0 is token 4, and text is masked in the forward."""
    for seed in range(40):
        step = Step(seed, OFFSET)
        model = step.model(image_token_offset=OFFSET, non_image_tokens=torch.tensor([0, 1, 2, 3, V - 1, V]),
                           _image_range=(OFFSET, V))
        along = step.along.clone()
        along[..., :OFFSET] = torch.finfo(along.dtype).min
        coins, taken = counted(seed)
        wanted = sampled(along, step.candidates, to_softmax, coins, step.table, 5, 0.3, OFFSET)
        random.seed(seed), torch.manual_seed(seed)
        answer = lantern.evaluate_posterior(model, step.given("tree"), step.candidates, Processors(), True, 5, 0.3,
                                            generator="python")
        assert_drawn(answer, wanted, taken, seed)


def test_the_ids_of_pictures_are_one_range_that_is_read_once():
    for text, wanted in (([0, 1], (2, 11)), ([9, 10], (0, 9)), ([], (0, 11)), ([10, 11, 12], (0, 10)),
                         ([0, 1, 2, 3, 8, 9, 10], (4, 8))):
        model = SimpleNamespace(non_image_tokens=torch.tensor(text))
        assert lantern._image_ids(model, 11) == wanted
        model.non_image_tokens = torch.tensor([4])
        assert lantern._image_ids(model, 11) == wanted
    assert lantern._image_ids(SimpleNamespace(), 11) is None
    for text in ([0, 5, 10], [0, 5], [*range(11)]):
        with pytest.raises(ValueError, match="non_image_tokens must leave one range of ids out of the 11 tokens, got "
                                             f"{len(text)} ids"):
            lantern._image_ids(SimpleNamespace(non_image_tokens=torch.tensor(text)), 11)


@pytest.mark.parametrize("text, image", [([0, 1, 2, 3, 12], range(4, 12)), ([0, 1, 2, 3, 4], range(5, 13))])
def test_a_draft_model_of_pictures_drafts_no_text(text, image):
    class Layer(SimpleNamespace):
        total_tokens, depth, top_k, reset = 8, 2, 3, lambda self: None

        def __call__(self, hidden, input_ids, past_key_values=None, use_cache=True, position_ids=None):
            columns = 0 if past_key_values is None else past_key_values[0][0].shape[2]
            return embedding[input_ids], ((torch.zeros(2, 1, columns + input_ids.shape[1], 1),),)

    torch.manual_seed(0)
    embedding = torch.randn(13, 13)
    layer = Layer(tree_mask_init=torch.eye(3)[None, None], position_ids=torch.zeros(3, dtype=torch.int64),
                  non_image_tokens=torch.tensor(text))
    tokens, *_ = lantern.topK_genrate(layer, torch.randn(2, 2, 13), torch.tensor([[0, 7, 8], [0, 7, 8]]),
                                      lambda hidden: hidden, Processors(), 3.0)
    assert tokens.shape == (1, 9) and set(tokens[0, 1:].tolist()) <= {*image}


CHOICES = [[0], [1], [0, 0], [0, 2], [1, 1], [0, 0, 1]]


@pytest.mark.parametrize("form", ["tree", "paths"])
@pytest.mark.parametrize("rule", RULES)
def test_sampled_static_trees(rule, form):
    buffers, lengths = lantern.generate_tree_buffers(None, CHOICES, "cpu"), set()
    paths, parents = buffers["retrieve_indices"], [-1, 0, 0, 1, 1, 2, 3]
    for seed in range(30):
        random.seed(seed), torch.manual_seed(seed)
        guided = 2 * torch.randn(7, V)
        drafts = (guided + torch.randn(7, V)).softmax(1)
        drawn = drafts.multinomial(3)
        tokens = torch.tensor([[0, *(drawn[parent, path[-1]].item() for parent, path in zip(parents[1:], CHOICES))]])
        candidates = torch.cat([tokens, torch.full((1, 1), -1)], 1)[0, paths]
        op = [drafts[[0]], drafts[[1, 2]], drafts[[3]]]  # nodes with children, level by level
        table = Step(seed).table
        coins, taken = counted(seed)
        rules = RULES[rule]
        share = torch.ones(7, dtype=torch.float64)  # the probability of each draft without its earlier siblings
        for node in range(1, 7):
            row = drafts[parents[node]].double()
            earlier = sum(row[tokens[0, other]] for other in range(1, node) if parents[other] == parents[node])
            share[node] = row[tokens[0, node]] / (1 - earlier)
        wanted = sampled(guided[paths], candidates, to_softmax, coins, *((table, *rules[1:]) if rules else ()),
                         draft_row_of=lambda path, level, drafts=drafts: drafts[paths[path, level]].double(),
                         share_of=lambda path, level, share=share: share[paths[path, level]])
        random.seed(seed), torch.manual_seed(seed)
        given = TreeLogits(guided[None], None, tokens, paths) if form == "tree" else guided[paths]
        answer = lantern.evaluate_posterior_v1(
            SimpleNamespace(nearest_latents=table), given, candidates, Processors(), None, op, buffers["p_indices"],
            tokens, buffers["b_indices"], *rules, generator="python")
        assert_drawn(answer, wanted, taken, seed)
        lengths.add(answer[1])
    assert len(lengths) > 2


def test_the_shape_of_a_static_tree():
    buffers = lantern.generate_tree_buffers(None, CHOICES, "cpu")
    assert buffers["tree_indices"].tolist() == [0, 1, 2, 11, 13, 22, 32]  # 1 + 10 * row of its parent + rank
    assert buffers["tree_position_ids"].tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert buffers["retrieve_indices"].tolist() == [[0, 1, 3, 6], [0, 1, 4, -1], [0, 2, 5, -1]]
    assert buffers["tree_attn_mask"].shape == (1, 1, 7, 7)
    assert [row.nonzero()[:, 0].tolist() for row in buffers["tree_attn_mask"][0, 0]] == [
        [0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 1, 3, 6]]
    assert buffers["p_indices"] == [[-1, 0, 0, 0], [-1, 0, 0, 0], [-1, 0, 1, 0]]
    assert [[list(map(int, part)) for part in path] for path in buffers["b_indices"]] == [
        [[], [], [], []], [[], [], [3], []], [[], [1], [], []]]
    # what a draft model reads of it
    buffers = lantern.draft_tree_buffers(CHOICES, "cpu")  # it reads nodes 1 and 2, then node 3
    assert [mask.tolist() for mask in buffers["attn_mask"]] == [[[[[1, 0], [0, 1]]]], [[[[1, 0, 1]]]]]
    assert [index.tolist() for index in buffers["tree_indices"]] == [[0, 1], [0]]
    assert [index.tolist() for index in buffers["position_ids"]] == [[0, 0], [0]]
    assert buffers["repeat_nums"] == [[2], [1]]
    # only the second of two nodes has a child that is read: it is the second row of tokens
    late = lantern.draft_tree_buffers([[0], [1], [0, 0], [1, 0], [1, 0, 3]], "cpu")
    assert late["tree_indices"][1].tolist() == [10] and late["repeat_nums"] == [[2], [0, 1]]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int32, torch.int64])
def test_the_table_is_cut_and_moved_once(dtype):
    table = torch.tensor([[1, 2, 3], [0, 2, 3], [3, 1, 0], [2, 1, 0]]).to(dtype)
    model = SimpleNamespace(nearest_latents=table if dtype != torch.uint16 else table.numpy())
    kept = lantern.neighbor_table(model, 2, "cpu")
    assert kept.tolist() == [[1, 2], [0, 2], [3, 1], [2, 1]]
    assert kept.dtype == (torch.uint16 if dtype == torch.uint16 else torch.int32) and kept.is_contiguous()
    assert lantern.neighbor_table(model, 2, "cpu") is kept
    assert lantern.neighbor_table(model, 3, "cpu").shape == (4, 3)
    with pytest.raises(ValueError, match="nearest_latents must have at least 4 columns for this lantern_k, got 3"):
        lantern.neighbor_table(model, 4, "cpu")
    other = torch.tensor([[2, 1, 0], [3, 1, 0], [0, 2, 3], [1, 2, 3]]).to(dtype)  # from another tokenizer
    model.nearest_latents = other if dtype != torch.uint16 else other.numpy()
    assert lantern.neighbor_table(model, 3, "cpu").tolist() == other.tolist()


@pytest.mark.parametrize("residual", ["released", "optimal", "relaxed"])
def test_k_neighbors_lend_under_each_residual(residual):
    """Token 0 has 0.1, and its nearest neighbor 0.3: it is accepted with 0.4, whatever the second neighbor has."""
    logits = torch.tensor([[[0.1, 0.3, 0.6]] * 2]).log()
    model = SimpleNamespace(nearest_latents=torch.tensor([[1, 2], [0, 2], [1, 0]]))
    for seed in range(40):
        random.seed(seed)
        coin = random.random()
        random.seed(seed)
        _, length, _ = lantern.evaluate_posterior(model, logits, torch.tensor([[2, 0]]), [], True, 1, 1.0,
                                                  residual=residual, generator="python")
        assert length == (coin < 0.4)


def test_patch_and_undo(monkeypatch):
    decode = type("EaModel", (), {"evaluate_posterior": lambda self: "theirs", "generate": lambda self: "generate",
                                  "__module__": "their_module"})
    layer = type("Model", (), {"topK_genrate": lambda self: "theirs", "__module__": "their_layer"})
    monkeypatch.setitem(sys.modules, "their_module", SimpleNamespace(Model=layer))
    monkeypatch.setitem(sys.modules, "their_layer", SimpleNamespace(generate_tree_buffers=None))
    undo = lantern.patch(decode, residual="optimal")
    assert decode.__dict__["evaluate_posterior"].keywords["residual"] == "optimal"
    assert layer.topK_genrate is lantern.topK_genrate and decode().generate() == "generate"
    assert sys.modules["their_layer"].generate_tree_buffers is lantern.draft_tree_buffers
    assert not hasattr(decode, "evaluate_posterior_v1")
    undo()
    assert decode().evaluate_posterior() == "theirs" == layer().topK_genrate()
    assert sys.modules["their_layer"].generate_tree_buffers is None
    with pytest.raises(ValueError, match="generator must be one of torch, python, got 'dice'"):
        lantern.patch(decode, generator="dice")
    with pytest.raises(ValueError, match="EaModel must be LANTERN's, with evaluate_posterior, got int without it"):
        lantern.patch(int)
