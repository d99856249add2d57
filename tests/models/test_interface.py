"""A model of one's own: the loop asks for no more than `specvis.models.interface` says."""
import pytest
import torch

from specvis.decoding.baseline import decode
from specvis.decoding.draft_model import EagleDraftModel, SmallDraftModel
from specvis.decoding.methods import METHODS, method
from specvis.decoding.sampling import Sampling, cfg_inputs, repeat_for_cfg
from specvis.decoding.speculative import speculative_decode
from specvis.models.interface import DraftModel, ModelCache, TargetModel
from specvis_kernels import codebook_neighbors, commit_kv, draw_tokens
from tests.tiny import tiny_pipeline

GRID, VOCAB, S, DIM, HIDDEN = 4, 12, 2, 3, 8
L = GRID * GRID


class Columns:
    """What a model keeps of each entry that it has read: R rows of columns."""

    def __init__(self, rows, columns, size):
        self.data = torch.zeros(rows, columns, size, dtype=torch.float64)

    def commit(self, accepted_nodes, num_accepted, lengths):
        commit_kv(self.data, accepted_nodes, num_accepted, lengths)


class BagModel:
    """An entry is a vector of its token and its position; a hidden state is the sum of all entries that it sees."""

    prefix_len, grid, vocab_size = S, GRID, VOCAB

    def __init__(self, seed):
        random = torch.Generator().manual_seed(seed)
        self.of_condition, self.of_token, self.of_position, self.output = (
            torch.randint(-8, 9, size, generator=random).double()  # whole numbers: their sums are exact in any order
            for size in ((DIM, HIDDEN), (VOCAB, HIDDEN), (S + L + 1, HIDDEN), (HIDDEN, VOCAB)))

    def embed(self, tokens, position_ids):
        return self.of_token[tokens] * self.of_position[position_ids.clamp(max=S + L)]

    def null_condition(self, batch):
        return torch.zeros(batch, S, DIM, dtype=torch.float64)

    def new_cache(self, rows, columns):
        return Columns(rows, columns, HIDDEN)

    def prefill(self, condition, padding_mask, cache):
        cache.data[:, :S] = condition @ self.of_condition
        return padding_mask[:, None].expand(-1, S, -1).double() @ cache.data[:, :S]

    def extend(self, tokens, nodes, cache):
        entries = self.embed(tokens, nodes.position_ids)
        cache.data.scatter_(1, nodes.slots[..., None].expand_as(entries), entries)
        return nodes.mask.double() @ cache.data[:, :nodes.columns]

    def logits(self, hidden):
        return (torch.sin(hidden) @ self.output / 8).float()


class Lookup(BagModel):
    """The same model, which looks its positions up in a table that begins with the image."""

    def embed(self, tokens, position_ids):
        of_position = torch.nn.functional.embedding((position_ids - S).clamp(max=L), self.of_position[S:])
        return self.of_token[tokens] * of_position


class CacheFreeModel(BagModel):
    """The same model, which keeps no result: it notes what it read, and recomputes every entry in every forward."""

    def new_cache(self, rows, columns):
        return Columns(rows, columns, DIM + 2)  # condition, token, position

    def prefill(self, condition, padding_mask, cache):
        cache.data[:, :S, :DIM] = condition
        return super().prefill(condition, padding_mask, Columns(len(condition), S, HIDDEN))

    def extend(self, tokens, nodes, cache):
        rows = torch.arange(len(tokens))[:, None]
        cache.data[rows, nodes.slots, DIM:] = torch.stack([tokens, nodes.position_ids], -1).double()
        notes = cache.data[:, :nodes.columns]
        read, read_ids = notes[:, S:, DIM:].long().unbind(-1)
        return nodes.mask.double() @ torch.cat([notes[:, :S, :DIM] @ self.of_condition, self.embed(read, read_ids)], 1)


B = 5
CONDITION = torch.randint(-2, 3, (B, S, DIM), generator=torch.Generator().manual_seed(0)).double()
PADDING_MASK = torch.tensor([[True, True], [False, True], [True, True], [False, True], [True, True]])
NEIGHBORS = codebook_neighbors(torch.randn(VOCAB, 4, generator=torch.Generator().manual_seed(1)), 6)
DRAFTING = [method(name, k=5) if m.acceptance.k else m for name, m in METHODS.items()
            if m.drafting in ("static", "dynamic")]
def sampling(temperature):
    return Sampling.of(list(range(B)), guidance=1.5, temperature=temperature)


def speculative(m, target, draft, temperature):
    draft_model = SmallDraftModel(draft, *cfg_inputs(draft, CONDITION, PADDING_MASK))
    return speculative_decode(target, draft_model, CONDITION, PADDING_MASK, sampling(temperature), [m] * B, NEIGHBORS)


def test_the_protocols_are_what_the_models_here_offer():
    pipeline = tiny_pipeline()
    condition, padding_mask = pipeline.gpt.condition(torch.zeros(1, 3, 8))
    assert isinstance(pipeline.gpt, TargetModel) and isinstance(pipeline.gpt.new_cache(1, 1), ModelCache)
    assert isinstance(EagleDraftModel(pipeline.gpt, pipeline.eagle, condition, padding_mask), DraftModel)
    for model in (pipeline.small, BagModel(0)):
        assert isinstance(model, TargetModel)
        assert isinstance(SmallDraftModel(model, condition, padding_mask), DraftModel)
    assert not isinstance(pipeline.tokenizer, TargetModel)


def next_logits(model, condition, padding_mask, tokens):
    """The logits after `tokens` (R, n), by one sum over everything, without a cache and without the loop."""
    of_condition = (condition @ model.of_condition * padding_mask[..., None]).sum(1)
    of_tokens = model.embed(tokens, S + torch.arange(tokens.shape[1])).sum(1)
    return model.logits((of_condition + of_tokens)[:, None])


def recomputed(model, temperature):
    """The baseline once more, written out: the whole prefix is read anew for every token."""
    settings = sampling(temperature)
    both, both_masks = cfg_inputs(model, CONDITION, PADDING_MASK)
    tokens = torch.zeros(B, 0, dtype=torch.int64)
    for i in range(L):
        logits = next_logits(model, both, both_masks, repeat_for_cfg(tokens))
        drawn = draw_tokens(*logits.chunk(2), settings.guidance, settings.temperature, settings.top_k, settings.top_p,
                            settings.seeds, torch.full((B, 1), i))
        tokens = torch.cat([tokens, drawn.tokens], 1)
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_baseline_is_the_model_without_a_cache(temperature):
    tokens = recomputed(BagModel(1), temperature)
    for model in (BagModel, CacheFreeModel):
        assert torch.equal(decode(model(1), CONDITION, PADDING_MASK, sampling(temperature)).tokens, tokens)
    assert not torch.equal(recomputed(BagModel(2), temperature), tokens)


@pytest.mark.parametrize("m", DRAFTING, ids=lambda m: m.name)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_of_ones_own_decodes_by_every_method(m, temperature):
    """The draft model is another such model: EAGLE's head needs the hidden states of a GPT that it was trained on."""
    for draft in (1, 2):  # 1 is the target itself, whose drafts are mostly accepted
        decoded = speculative(m, BagModel(1), BagModel(draft), temperature)
        cache_free = speculative(m, CacheFreeModel(1), CacheFreeModel(draft), temperature)
        assert torch.equal(decoded.tokens, cache_free.tokens)
        assert torch.equal(decoded.num_accepted, cache_free.num_accepted)
        assert draft == 2 or (decoded.tau > 1.3).all()
        if m.seed_exact or temperature == 0 and m.lossless:
            assert torch.equal(decoded.tokens, recomputed(BagModel(1), temperature))


def test_every_position_is_one_of_the_image_or_behind_it():
    """The unused nodes of a request's tree have such positions too."""
    methods = [METHODS["eagle2"] if i % 2 else method("eagle2", depth=1, width=1, nodes=2) for i in range(B)]

    def decoded(model):
        draft_model = SmallDraftModel(BagModel(2), *cfg_inputs(BagModel(2), CONDITION, PADDING_MASK))
        return speculative_decode(model(1), draft_model, CONDITION, PADDING_MASK, sampling(1.0), methods)

    assert torch.equal(decoded(Lookup).tokens, decoded(BagModel).tokens)
