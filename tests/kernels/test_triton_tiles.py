"""Triton's kernels as a GPU runs them, where its interpreter has another way, of fewer operations.

Rows of logits are several tiles there, thresholds are found two bits at a time, and attention's chunks share programs.
"""
import importlib

import numpy as np
import pytest
import torch

import specvis_kernels
from specvis_kernels import backends
from tests import cases
from tests.cases.comparing import assert_agree, run

pytestmark = pytest.mark.skipif("triton" not in backends("verify_tree", cases.DEVICE), reason="needs Triton")
K_AND_P = [(1.5, 1.0, 20, 0.8), (1.0, 0.0, 0, 1.0), (0.5, 2.0, 0, 0.9)]


@pytest.mark.parametrize("op, case", [
    ("guided_probs", (3, 2, 40, torch.float32, True, K_AND_P, "each")),
    ("guided_probs", (3, 1, 33, torch.bfloat16, True, K_AND_P, "all", "p_then_k")),
    ("draw_tokens", (3, 1, 40, torch.float32, True, K_AND_P, None, 3)),
    ("verify_logits", (3, 6, 40, 3, {"settings": K_AND_P, "ranges": "all", "k": 6, "residual": "relaxed"})),
    *((op, case)  # inexact rows
      for op in ("couple_tokens", "draw_children", "neighborhood_sum", "sample_residual", "verify_chain", "verify_tree")
      for case in cases.CASES[op] if case[-1] is False and max(n for n in case if isinstance(n, int)) < 100
      or isinstance(case[-1], dict) and case[-1].get("exact") is False)])
def test_rows_of_several_tiles(op, case, monkeypatch):
    """Or of several blocks."""
    from specvis_kernels.triton import _filters, _rows
    monkeypatch.setattr(_filters, "MAX_TILE", 16)
    monkeypatch.setattr(_filters, "MAX_BITS", 2)
    monkeypatch.setitem(_rows.MAX_BLOCK, "V", 4)
    monkeypatch.setitem(_rows.MAX_BLOCK, "k", 4)
    args, kwargs = getattr(cases, op)(*case)
    assert_agree(op, *(run(op, args, kwargs, backend) for backend in ("triton", "oracle")))


def test_chunks_that_have_programs_of_their_own_give_the_same_bits(monkeypatch):
    """With many rows or few: the chunks end at 128 columns, one of them amid the nodes."""
    kernels = importlib.import_module("specvis_kernels.triton.tree_attention")
    args, kwargs = cases.tree_attention(2, 20, 2, 1, 16, {"columns": 280, "lengths": [250, 3], "mask": True})
    results = []
    for multiprocessors in (1, 99):
        monkeypatch.setattr(kernels, "num_multiprocessors", lambda device, count=multiprocessors: count)
        results.append(specvis_kernels.tree_attention(*args, **kwargs, backend="triton"))
    assert results[0].equal(results[1]) and results[0].any()


def test_batch_invariant_a_chain_has_the_bits_of_its_nodes_one_by_one(monkeypatch):
    """Each node alone, after its ancestors are cached, as plain decoding does. Otherwise tiles of queries differ: a GPU
    adds them in orders of their own, and the interpreter does not."""
    kernels, tiles = importlib.import_module("specvis_kernels.triton.tree_attention"), set()
    (q, *cache, lengths, _), kwargs = cases.tree_attention(1, 20, 2, 1, 32, {"columns": 160, "lengths": [115],
                                                                           "mask": True})

    def product(a, b, dtype):  # NumPy's own adds in another order in another row of a matrix; a GPU's does not
        tiles.add(len(a))
        return (a[:, :, None] * b[None]).sum(1, dtype=dtype)

    def read(first, end):
        links = specvis_kernels.tree_links(torch.arange(-1, end - first - 1, dtype=torch.int32, device=q.device)[None])
        return specvis_kernels.tree_attention(q[:, first:end], *cache, lengths + first, links.ancestors, **kwargs,
                                              backend="triton")

    monkeypatch.setattr(np, "matmul", product)
    for is_invariant, expected in ((True, {32}), (False, {16, 32})):
        monkeypatch.setattr(kernels, "is_batch_invariant", is_invariant)
        tiles.clear()
        assert read(0, 20).equal(torch.cat([read(n, n + 1) for n in range(20)], 1))
        assert tiles == (expected if kernels.IS_INTERPRETED else set())
