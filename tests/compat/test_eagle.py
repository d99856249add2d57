"""compat.eagle answers EAGLE's interfaces as benchmarks/released.py does, and grows EAGLE-2's tree."""
import random
import sys
from types import SimpleNamespace

import pytest
import torch

from specvis_kernels import StatusError
from specvis_kernels.compat import _posterior, eagle
from specvis_kernels.compat._settings import settings_of
from specvis_kernels.compat.eagle import TreeLogits

from .test_lantern import PROCESSORS, Processors, Step, assert_drawn, counted, greedy, sampled, to_softmax


@pytest.mark.parametrize("form", ["tree", "paths"])
def test_sampled_and_greedy(form):
    for seed in range(30):
        step, (coins, taken) = Step(seed), counted(seed)
        wanted = sampled(step.along, step.candidates, to_softmax, coins)
        random.seed(seed), torch.manual_seed(seed)
        given = step.given(form)
        if form == "tree":  # no guidance here
            given = TreeLogits(step.logits[1:] + 3 * (step.logits[:1] - step.logits[1:]), None, *given[2:])
        answer = eagle.evaluate_posterior(given, step.candidates, Processors(), generator="python")
        assert_drawn(answer, wanted, taken, seed)
        row, length, sample_p = eagle.evaluate_posterior(given, step.candidates, None)
        assert (int(row), length, int(sample_p.argmax())) == greedy(step.along, step.candidates)


def test_equal_tokens_are_one_child():
    """The release looks at tokens: a second sibling with the first one's token is not tried again."""
    logits = torch.tensor([[[0.0, 0.0], [0.0, -50.0]], [[0.0, 0.0], [0.0, -50.0]]])
    candidates = torch.tensor([[0, 1], [0, 1]])
    counts = set()
    for seed in range(20):
        random.seed(seed), torch.manual_seed(seed)
        row, length, _ = eagle.evaluate_posterior(logits, candidates, Processors(), generator="python")
        wanted = sampled(logits, candidates, to_softmax, counted(seed)[0])
        assert (int(row), length) == wanted[:2]
        counts.add((int(row), length))
    assert counts == {(0, 0), (0, 1)}


def test_torchs_generator_leaves_pythons_alone():
    step, lengths = Step(1), set()
    random.seed(0)
    state = random.getstate()
    for seed in range(200):
        torch.manual_seed(seed)
        lengths.add(eagle.evaluate_posterior(step.along, step.candidates, Processors())[1])
    assert random.getstate() == state and len(lengths) > 1
    with pytest.raises(ValueError, match="generator must be one of torch, python, got 'dice'"):
        eagle.evaluate_posterior(step.along, step.candidates, None, generator="dice")


@pytest.mark.parametrize("name, wanted", [
    ("plain", (1.0, 0, 1.0, None, "k_then_p")), ("T, top-p, top-k", (0.8, 6, 0.8, None, "p_then_k")),
    ("top-k, top-p", (1.0, 6, 0.8, None, "k_then_p")), ("unknown", None)])
def test_settings_of_a_list_of_processors(name, wanted):
    settings = settings_of(PROCESSORS[name])
    assert wanted is None and settings is None or tuple(settings.values()) == wanted
    assert list(settings_of(None)) == ["temperature", "top_k", "top_p", "min_p", "filters"]
    temperature, top_p, top_k = PROCESSORS["T, top-p, top-k"]
    assert settings_of([top_k, temperature]) is None and settings_of([top_k, top_k]) is None
    for other in (dict(min_tokens_to_keep=3), dict(filter_value=-1e4), dict(top_p=0.0)):  # ops keep other ids
        assert settings_of([type("TopPLogitsWarper", (), {"top_p": 0.1} | other)()]) is None
    assert settings_of([type("TopKLogitsWarper", (), {"top_k": 5, "min_tokens_to_keep": 3})()])["top_k"] == 5


@pytest.mark.parametrize("processors", [None, Processors(), PROCESSORS["unknown"]])
@pytest.mark.parametrize("form", ["tree", "paths"])
@pytest.mark.parametrize("generator", _posterior.GENERATORS)
def test_logits_that_are_not_numbers_raise(form, processors, generator):
    step = Step(1)
    step.logits.fill_(torch.nan), step.along.fill_(torch.nan)
    with pytest.raises(StatusError, match="verify_logits: INVALID_ROW at request 0 .after guidance and temperature"):
        eagle.evaluate_posterior(step.given(form), step.candidates, processors, generator=generator)


class Layer(SimpleNamespace):
    """A draft layer whose hidden state is a function of the token and of the hidden state before it.

    It checks the mask.
    """

    total_tokens, depth, top_k = 11, 2, 3

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__(embedding=torch.randn(16, 8), tree_mask_init=torch.eye(3)[None, None], read=[],
                         position_ids=torch.zeros(3, dtype=torch.int64), lm_head=torch.nn.Linear(8, 8), norm=torch.tanh,
                         d2t=torch.arange(8) + 1)  # token t of the draft is token 2 t + 1 of the target
        self.lm_head.requires_grad_(False).weight.mul_(4)

    def reset(self):
        self.tree_mask, self.read = None, []

    def __call__(self, hidden, input_ids, past_key_values=None, use_cache=True, position_ids=None):
        assert hidden.shape[1] == input_ids.shape[1]
        out = torch.stack([self.after(*pair) for pair in zip(hidden[0], input_ids[0])])[None]
        if self.tree_mask is not None:  # a node sees itself and what its parent sees
            for row, above in enumerate(hidden[0]):
                parents = [seen for known, seen in self.read if torch.equal(known, above)]
                seen = [*(parents[0] if parents else []), len(self.read)]
                assert self.tree_mask[0, 0, row].nonzero()[:, 0].tolist() == seen
                assert position_ids.tolist() == [self.length + len(seen) - 1] * 3
                self.read.append((out[0, row], seen))
        columns = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        return out, ((torch.zeros(1, 1, columns + input_ids.shape[1], 1),),)

    def after(self, hidden, token):
        return torch.tanh(hidden.roll(1) + self.embedding[token])

    def log_probs(self, hidden):
        return self.lm_head(self.norm(hidden)).double().log_softmax(-1).tolist()


def best_paths(layer, hidden):
    """EAGLE-2's tree as tuples of the target's tokens: the best 11 of the children of three levels, of 3 nodes each."""
    candidates, frontier = [], [((), 0.0, hidden)]
    for _ in range(3):
        children = []
        for path, score, hidden in frontier:
            ranked = sorted(enumerate(layer.log_probs(hidden)), key=lambda pair: -pair[1])[:3]
            children += [((*path, 2 * token + 1), score + log_prob, hidden) for token, log_prob in ranked]
        candidates += children
        frontier = [(path, score, layer.after(hidden, path[-1]))
                    for path, score, hidden in sorted(children, key=lambda child: -child[1])[:3]]
    return {path for path, _, _ in sorted(candidates, key=lambda child: -child[1])[:11]}


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_dynamic_tree(seed, sampled):
    layer, ids = Layer(seed), torch.tensor([[3, 5, 1, 4, 7, 9]])
    for length, known in ((3, 0), (5, 3)):  # the second time three tokens are in the cache already
        hidden, layer.length = torch.randn(1, length - known, 8), length
        wanted = best_paths(layer, layer.after(hidden[0, -1], ids[0, length]))
        tokens, paths, mask, depth = eagle.topK_genrate(layer, hidden, ids[:, :length + 1], None,
                                                        Processors() if sampled else None)
        assert tokens.shape == (1, 12) and tokens[0, 0] == ids[0, length]
        assert layer.stable_kv[0][0].shape[2] == length
        rows = [[node for node in row if node >= 0] for row in paths.tolist()]
        num_leaves = len([row for row in rows if row])
        assert all(rows[:num_leaves]) and len(rows) == 12
        found = {tuple(tokens[0, row[1:i + 1]].tolist()) for row in rows for i in range(1, len(row))}
        assert found == wanted and len(found) == 11
        order = rows[:num_leaves] if sampled else [row[-1] for row in rows[:num_leaves]]
        assert order == sorted(order)
        for row in rows:
            for i, node in enumerate(row):
                assert depth[node] == i and mask[0, 0, node].nonzero()[:, 0].tolist() == sorted(row[:i + 1])


def test_commit_and_draft():
    """The path's columns move to the front, its tokens and hidden states go to the draft model with the next token."""
    cache, lengths = torch.arange(20.0).reshape(1, 1, 2, 10, 1).repeat(2, 1, 1, 1, 1), torch.tensor([8, 8])
    paths, candidates = torch.tensor([[0, 1, 3], [0, 2, -1]]), torch.tensor([[7, 8, 9], [7, 6, -1]])
    hidden = torch.arange(4.0).reshape(1, 4, 1)
    layer = SimpleNamespace(topK_genrate=lambda *read: read)
    model = SimpleNamespace(ea_layer=layer, base_model=SimpleNamespace(lm_head="head"))
    answer = eagle.update_inference_inputs(
        torch.zeros(1, 5, dtype=torch.int64), candidates, torch.tensor(0), 2, paths, "processors", 4, [cache], lengths,
        model, hidden, torch.tensor([0.0, 0.0, 1.0]))
    ids, read_hidden, read_ids, head, processors, new_token, _, token = answer
    assert ids.tolist() == [[0, 0, 0, 0, 0, 7, 8, 9]] and read_ids.tolist() == [[0, 0, 0, 0, 0, 7, 8, 9, 2]]
    assert read_hidden.flatten().tolist() == [0, 1, 3] and (head, processors) == ("head", "processors")
    assert new_token == 7 and token.tolist() == [[2]] and lengths.tolist() == [8, 8]
    assert cache[1, 0, :, :, 0].tolist() == [[0, 1, 2, 3, 4, 5, 6, 8, 8, 9], [10, 11, 12, 13, 14, 15, 16, 18, 18, 19]]


def test_the_forward_over_a_tree():
    def model(ids, output_orig, past_key_values, position_ids):
        assert ids.tolist() == [[4, 5]] and position_ids.tolist() == [[3, 4]] and past_key_values == "cache"
        return {"hidden_states": [torch.ones(1, 2, 1), torch.zeros(1, 2, 1)]}, torch.randn(1, 2, 6), torch.ones(1, 2, 3)

    model.use_eagle3, model.ea_layer = True, SimpleNamespace(lm_head=SimpleNamespace(weight=torch.zeros(1)))
    paths = torch.tensor([[0, 1]])
    read = (torch.tensor([[4, 5]]), "cache", torch.tensor([0, 1]), torch.zeros(1, 3), paths)
    logits, hidden, _ = eagle.tree_decoding(model, *read)
    assert logits.guidance is None and logits.logits.shape == (1, 2, 6) and logits.retrieve_indices is paths
    assert hidden.tolist() == [[[1, 0], [1, 0]]]
    model.use_eagle3 = False
    assert eagle.tree_decoding(model, *read)[1].shape == (1, 2, 3)


def test_a_tree_that_is_freed_is_forgotten():
    paths = torch.tensor([[0, 1], [0, 2]])
    known = len(_posterior.trees)
    tree = _posterior.tree_of(paths, 3, paths.device)
    assert _posterior.tree_of(paths, 3, paths.device) is tree and len(_posterior.trees) == known + 1
    assert tree.first_child.tolist() == [[1, -1, -1]] and _posterior.tree_of(paths, 4, paths.device) is not tree
    del paths
    assert len(_posterior.trees) == known


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_tree_that_is_written_over_is_read_again(mode):
    with mode():
        paths = torch.tensor([[0, 1], [0, 2]])
        assert _posterior.tree_of(paths, 3, paths.device).parents.tolist() == [[-1, 0, 0]]
        paths.copy_(torch.tensor([[0, 1], [1, 2]])).copy_(torch.tensor([[0, 2], [0, 1]]))
        tree = _posterior.tree_of(paths, 3, paths.device)
        assert tree.parents.tolist() == [[-1, 0, 0]] and tree.paths.tolist() == paths.tolist()
        paths.copy_(torch.tensor([[0, 1], [0, -1]]))
        assert _posterior.tree_of(paths, 3, paths.device).parents.tolist() == [[-1, 0, -2]]


def test_patch_and_undo(monkeypatch):
    decode = type("EaModel", (), {"__module__": "their_module"})
    layers = [type(name, (), {"topK_genrate": lambda self: "theirs"}) for name in ("Model", "Model1")]
    module = SimpleNamespace(Model=layers[0], Model1=layers[1], evaluate_posterior="theirs", tree_decoding="theirs")
    monkeypatch.setitem(sys.modules, "their_module", module)
    undo = eagle.patch(decode, generator="python")
    assert module.evaluate_posterior.keywords == {"generator": "python"}
    assert module.tree_decoding is eagle.tree_decoding and not hasattr(module, "update_inference_inputs")
    assert [layer.topK_genrate for layer in layers] == [eagle.topK_genrate, eagle.topK_genrate_by_head]
    undo()
    assert module.evaluate_posterior == module.tree_decoding == layers[0]().topK_genrate() == "theirs"
    with pytest.raises(ValueError, match="EaModel must be EAGLE's, from eagle.model.ea_model, got one of builtins"):
        eagle.patch(int)
