"""The argument log_probs of the ops that emit tokens: one token after the other, as a loop would look them up."""
import pytest
import torch

import specvis_kernels
from specvis_kernels import draw_tokens, guided_probs, token_log_probs
from tests.kernels import inputs

OPS = ["couple_tokens", "draw_tokens", "verify_chain", "verify_logits", "verify_tree"]


def call(op, i, backend=None, log_probs=True):
    args, kwargs = getattr(inputs, op)(*inputs.CASES[op][i])
    parameters = [*specvis_kernels.__dict__[op].__annotations__]
    named = dict(zip(parameters, args)) | kwargs
    return named, getattr(specvis_kernels, op)(*args, **kwargs, log_probs=log_probs, backend=backend)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)


def walk(named, result):
    """(request, index, row, token) of each token that a verified tree emits."""
    tokens = named["tokens"].long()
    for b, n in enumerate(result.num_accepted.tolist()):
        path = result.accepted_nodes[b, :n].tolist()
        new_tokens = [*tokens[b, path].tolist(), result.next_token[b].item()]
        for i, (row, token) in enumerate(zip([0, *path], new_tokens)):
            yield b, i, row, token


@pytest.mark.parametrize("op", OPS)
def test_without_them_nothing_else_changes(op):
    (_, with_them), (_, without) = call(op, 1), call(op, 1, log_probs=False)
    assert without.log_probs is None and with_them.log_probs is not None and isinstance(with_them, type(without))
    assert len(with_them) == len(without) and all(map(torch.equal, with_them, without))


@pytest.mark.parametrize("op", OPS)
def test_compiles_whole(op):
    args, kwargs = getattr(inputs, op)(*inputs.CASES[op][1])

    def log_probs(*args, **kwargs):
        return getattr(specvis_kernels, op)(*args, **kwargs, log_probs=True).log_probs

    compiled = torch.compile(log_probs, backend="eager", fullgraph=True)(*args, **kwargs)
    expected = log_probs(*args, **kwargs)
    assert all(map(torch.equal, compiled, expected))


@pytest.mark.parametrize("i", range(len(inputs.CASES["verify_tree"])))
def test_verify_tree(i, backend):
    named, result = call("verify_tree", i, backend)
    expected = torch.zeros_like(result.log_probs)
    for b, index, row, token in walk(named, result):
        expected[b, index] = named["target_probs"][b, row, token].log()
    close(result.log_probs, expected)


@pytest.mark.parametrize("i", range(len(inputs.CASES["verify_logits"])))
def test_verify_logits(i, backend):
    """By uniforms and by seeds. The filtered probabilities are guided_probs', the others those without filters."""
    named, result = call("verify_logits", i, backend)
    logits, uncond, ids = named["logits"], named["uncond"], {"id_range": named.get("id_range")}
    settings = [named[name] for name in ("guidance", "temperature", "top_k", "top_p")]
    probs = guided_probs(logits, uncond, *settings, **ids, filters=named.get("filters", "k_then_p")).probs
    plain = guided_probs(logits, uncond, *settings[:2], 0, 1.0, **ids).probs
    for b, index, row, token in walk(named, result):
        greedy = named["temperature"][b] == 0
        sampled = probs[b, row, token] if not greedy else (probs[b, row, token] == probs[b, row].max()).float()
        is_there = probs[b, row].sum() > 0
        close(result.log_probs.sampled[b, index], (sampled * is_there).log())
        close(result.log_probs.full[b, index], plain[b, row, token].log())
    after = torch.arange(result.accepted_nodes.shape[1] + 1, device=inputs.DEVICE) > result.num_accepted[:, None]
    assert not result.log_probs.sampled[after].any() and not result.log_probs.full[after].any()


@pytest.mark.parametrize("i", range(len(inputs.CASES["verify_chain"])))
def test_verify_chain(i, backend):
    named, result = call("verify_chain", i, backend)
    ends, drafts = named["cu_num_draft_tokens"].tolist(), named["draft_tokens"].tolist()
    expected, num_bonus_rows, begin, row = torch.zeros_like(result.log_probs), named.get("bonus_tokens") is None, 0, 0
    for b, end in enumerate(ends):
        if not begin <= end <= len(drafts):
            break
        n = result.num_accepted[b].item()
        tokens = [*drafts[begin:begin + n], result.next_token[b].item()]
        for index, token in enumerate(tokens[:end - begin + num_bonus_rows]):
            expected[row + index] = named["target_probs"][row + index, token].log()
        begin, row = end, row + end - begin + num_bonus_rows
    close(result.log_probs, expected)


@pytest.mark.parametrize("i", range(len(inputs.CASES["couple_tokens"])))
def test_couple_tokens(i, backend):
    named, result = call("couple_tokens", i, backend)
    close(result.log_probs, named["target_probs"].gather(-1, result.tokens[..., None])[..., 0].log())


@pytest.mark.parametrize("i", range(len(inputs.CASES["draw_tokens"])))
def test_draw_tokens(i, backend):
    named, result = call("draw_tokens", i, backend)
    arguments = [named[name] for name in ("logits", "uncond", "guidance", "temperature", "top_k", "top_p")]
    ids = {name: named[name] for name in ("id_range", "filters") if name in named}
    expected = token_log_probs(*arguments, result.tokens, **ids)
    is_final = torch.arange(result.tokens.shape[1], device=inputs.DEVICE) <= result.num_accepted[:, None]
    for ours, each in zip(result.log_probs, expected):
        assert torch.equal(ours, torch.where(is_final, each, 0))
    is_valid = result.status == 0
    assert (expected.sampled[is_valid] > -20).all() and (expected.sampled[~is_valid] == -torch.inf).all()
    arguments = [*arguments, named["seeds"], named["positions"]]
    assert all(map(torch.equal, draw_tokens(*arguments, **ids, log_probs=True, backend=backend).log_probs, expected))


def test_a_probability_of_zero(backend):
    """A draft that neighbors keep although the target never draws it; and a denormal counts as 0."""
    probs = torch.tensor([[[0.0, 1.0, 1e-40]] * 2], device=inputs.DEVICE)
    tokens, links = torch.tensor([[0, 0]], device=inputs.DEVICE), torch.tensor([[1, -1]], device=inputs.DEVICE)
    neighbors = torch.tensor([[1], [0], [1]], dtype=torch.int32, device=inputs.DEVICE)
    result = specvis_kernels.verify_tree(
        probs, tokens, links, torch.full_like(links, -1), torch.full((1, 2), 0.25, device=inputs.DEVICE),
        neighbors=neighbors, delta=1.0, log_probs=True, backend=backend)
    assert result.num_accepted == 1 and result.log_probs.tolist() == [[-torch.inf, 0.0]]


def test_a_row_of_nan(backend):
    """No probability of the token is known: it counts as 0, as in token_log_probs."""
    row = torch.tensor([[[torch.nan, 1.0, 0.0]]], device=inputs.DEVICE)
    zero, none = torch.zeros(1, 1, device=inputs.DEVICE), torch.full((1, 1), -1, device=inputs.DEVICE)
    rest, uniforms = dict(log_probs=True, backend=backend), zero[..., None].repeat(1, 1, 2)
    results = [specvis_kernels.verify_tree(row, zero.long(), none, none, zero, **rest),
               specvis_kernels.couple_tokens(row, row.nan_to_num(0.5), zero.long(), uniforms, **rest),
               specvis_kernels.verify_chain(row[0], zero[0, :0].long(), zero[0].long(), zero[0], **rest),
               specvis_kernels.verify_logits(row, None, zero.long(), none, none, zero, None, 1.0, 0, 1.0, **rest),
               specvis_kernels.draw_tokens(row, None, None, 1.0, 0, 1.0, zero[0].long(), zero.long(), **rest)]
    for result in results:
        assert all(x.flatten().tolist() == [-torch.inf] for x in
                   (result.log_probs[:2] if isinstance(result.log_probs, tuple) else [result.log_probs]))


def test_a_bonus_token_of_any_id(backend):
    """It has no row. Rows after the last request's have no token."""
    probs = torch.full((3, 4), 0.25, device=inputs.DEVICE)
    drafts, ends, bonus = (torch.tensor(x, device=inputs.DEVICE) for x in ([1, 2, 3], [2], [-7]))
    result = specvis_kernels.verify_chain(probs, drafts, ends, torch.zeros(4, device=inputs.DEVICE), bonus_tokens=bonus,
                                          log_probs=True, backend=backend)
    assert result.next_token.tolist() == [-7]
    close(result.log_probs, torch.tensor([0.25, 0.25, 1.0], device=inputs.DEVICE).log())
