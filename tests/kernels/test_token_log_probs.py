"""token_log_probs on numbers small enough to check by hand, and against float64."""
import math

import pytest
import torch

from specvis_kernels import INVALID_ROW, guided_probs, token_log_probs
from tests import cases
from tests.cases import DEVICE

INF = math.inf
ROW = [8, 4, 2, 1, 1]  # /16


def of_one_row(proportions, tokens, temperature=1.0, top_k=0, top_p=1.0, rows=None, **kwargs):
    """Probabilities (lists) and status of tokens of one row; `rows` of two equal rows."""
    logits = torch.tensor([[[math.log(x) if x else -INF for x in proportions]]], device=DEVICE).repeat(1, 2, 1)
    tokens, rows = (torch.tensor([x], device=DEVICE) for x in (tokens, rows or [0] * len(tokens)))
    result = token_log_probs(logits, None, None, temperature, top_k, top_p, tokens, rows=rows, **kwargs)
    return result.sampled[0].exp().tolist(), result.full[0].exp().tolist(), result.status[0].tolist()


def close(expected):
    return pytest.approx(expected, rel=2e-6, abs=0)  # abs=0: a zero is a zero


@pytest.mark.parametrize("settings, sampled, full", [
    ({}, [8/16, 4/16, 1/16], [8/16, 4/16, 1/16]),
    ({"temperature": 0.5}, [64/86, 16/86, 1/86], [64/86, 16/86, 1/86]),
    ({"top_k": 2}, [8/12, 4/12, 0], [8/16, 4/16, 1/16]),
    ({"top_k": 4}, [8/16, 4/16, 1/16], [8/16, 4/16, 1/16]),                 # a tie is kept
    ({"top_p": 0.4}, [1, 0, 0], [8/16, 4/16, 1/16]),
    ({"top_k": 2, "top_p": 0.6}, [1, 0, 0], [8/16, 4/16, 1/16]),            # 8/12 >= 0.6
    ({"top_k": 2, "top_p": 0.6, "filters": "p_then_k"}, [8/12, 4/12, 0], [8/16, 4/16, 1/16]),
    ({"temperature": 0.5, "top_k": 2}, [64/80, 16/80, 0], [64/86, 16/86, 1/86]),
    ({"temperature": 0.0, "top_k": 2, "top_p": 0.9}, [1, 0, 0], [8/16, 4/16, 1/16]),  # greedy
    ({"id_range": (1, 4)}, [0, 4/7, 1/7], [0, 4/7, 1/7]),                   # the ids outside have no probability
    ({"id_range": (1, 4), "top_k": 1}, [0, 1, 0], [0, 4/7, 1/7]),
])
def test_by_hand(backend, settings, sampled, full):
    got = of_one_row(ROW, [0, 1, 3], backend=backend, **settings)
    assert got[0] == close(sampled) and got[1] == close(full) and got[2] == [0, 0, 0]


def test_tokens_that_are_none_not_there_or_impossible(backend):
    """No row: 0, whose exponential is 1. A row that does not exist: INVALID_ROW. An id that does not exist: never."""
    got = of_one_row([1, 1], [0, 0, 0, -1, 2, 1], rows=[-1, 2, 1, 0, 1, 0], backend=backend)
    assert got[0] == got[1] == close([1, 0, 0.5, 0, 0, 0.5])
    assert got[2] == [0, INVALID_ROW, 0, 0, 0, 0]
    assert of_one_row([1, 0, 1], [0, 1], backend=backend)[:2] == ([0.5, 0], [0.5, 0])
    assert of_one_row([0, 0], [0, 1], backend=backend) == ([0, 0], [0, 0], [INVALID_ROW] * 2)


@pytest.mark.parametrize("V", [33, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_agrees_with_float64(backend, V, temperature):
    """With guidance and rows of several blocks, spread as logits of a model and far wider."""
    g = torch.Generator().manual_seed(V)
    cond, uncond = (torch.randn(2, 2, V, generator=g).mul(torch.tensor([3.0, 30.0])[:, None, None]).to(DEVICE)
                    for _ in range(2))
    tokens = torch.randint(V, (2, 2), generator=g).to(DEVICE)
    settings = 2.0, temperature, V // 3, 0.95
    got = token_log_probs(cond, uncond, *settings, tokens, backend=backend)
    x = (uncond + 2.0 * (cond - uncond)) / torch.tensor(temperature)
    full = x.double().log_softmax(-1)
    is_kept = guided_probs(cond, uncond, 2.0, temperature, V // 3, 0.95).probs > 0
    sampled = torch.where(is_kept, x, -INF).double().log_softmax(-1)
    for ours, theirs in ((got.full, full), (got.sampled, sampled)):
        expected = theirs.gather(-1, tokens[..., None])[..., 0].float()
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", cases.CASES["token_log_probs"])
def test_are_the_logarithms_of_guided_probs(backend, case):
    """As a loop would look them up. At temperature 0 `sampled` has the likeliest tokens."""
    (*args, tokens), kwargs = cases.token_log_probs(*case)
    rows, temperature, (B, N, V) = kwargs.pop("rows"), args[3][:, None, None], args[0].shape
    got = token_log_probs(*args, tokens, rows=rows, **kwargs, backend=backend)
    rows = torch.arange(N, device=DEVICE).expand(B, N) if rows is None else rows
    is_there = (rows < N) & (tokens >= 0) & (tokens < V)
    full, probs = (guided_probs(*args[:4], *filters, **kwargs | off).probs
                   for filters, off in (((0, 1.0), {"min_p": None}), (args[4:], {})))
    likeliest = ((probs == probs.amax(-1, keepdim=True)) & (probs > 0)).float()
    for ours, table in ((got.full, full), (got.sampled, torch.where(temperature == 0, likeliest, probs))):
        theirs = table[torch.arange(B)[:, None], rows.clamp(0, N - 1), tokens.clamp(0, V - 1)] * is_there
        torch.testing.assert_close(ours, torch.where(rows < 0, 0.0, theirs.log()), rtol=2e-6, atol=1e-6)


def test_only_rows_of_tokens_are_read(backend):
    args, kwargs = cases.token_log_probs(2, 3, 33, 2)
    rows = torch.tensor([[0, -1], [2, 0]], device=DEVICE)
    clean = token_log_probs(*args, **kwargs | {"rows": rows}, backend=backend)
    hurt = args[0].clone()
    hurt[:, 1] = math.nan
    assert all(map(torch.equal, token_log_probs(hurt, *args[1:], **kwargs | {"rows": rows}, backend=backend), clean))
    hurt[1, 2] = math.nan
    assert token_log_probs(hurt, *args[1:], **kwargs | {"rows": rows}, backend=backend).status[1, 0] == INVALID_ROW
