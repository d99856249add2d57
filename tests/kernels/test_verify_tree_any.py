"""verify_tree on random requests: any rule and any shape, and sometimes broken links, tokens and rows."""
import random

import pytest
import torch

from specvis_kernels import backends, verify_tree
from tests.kernels.inputs import DEVICE, links

OTHERS = [backend for backend in backends("verify_tree", DEVICE) if backend != "oracle"]
NAN, INF = float("nan"), float("inf")


def any_request(seed):
    """Arguments of one small batch: any rule, any shape; sometimes broken links, tokens and rows."""
    g, r = torch.Generator().manual_seed(seed), random.Random(seed)
    B, N, V = r.choice([1, 2, 3]), r.choice([1, 2, 3, 5, 9]), r.choice([1, 2, 3, 5, 17, 32, 64])
    max_depth, exact = r.choice([0, 1, 2, 3, N]), r.random() < 0.5

    def rows(*shape):
        if not exact:
            return (torch.randn(*shape, V, generator=g) * 4).softmax(-1)
        picks = (torch.rand(*shape, 1024, generator=g) ** 3 * V).long()
        return torch.zeros(*shape, V).scatter_add(-1, picks, torch.ones(()).expand_as(picks)) / 1024

    def somewhere(t):
        return tuple(r.randrange(size) for size in t.shape)

    target_probs = rows(B, N)
    if r.random() < 0.2:
        target_probs[somewhere(target_probs)] = r.choice([NAN, -1.0, INF, 3.0])
    if r.random() < 0.1:
        target_probs[r.randrange(B), r.randrange(N)] = 0
    tokens = torch.stack([torch.randperm(max(V, N), generator=g)[:N] % V for _ in range(B)])
    parents = torch.tensor([[-1] + [r.randrange(max(0, n - 5), n) for n in range(1, N)] for _ in range(B)])
    first_child, next_sibling = (t.cpu() for t in links(parents))
    if r.random() < 0.3:
        for t in (first_child, next_sibling):
            t[somewhere(t)] = r.choice([-7, -1, N, 2**31 - 1, -2**31, *range(N)])
    if r.random() < 0.15:
        tokens[somewhere(tokens)] = r.choice([-1, V, 2**63 - 1, -2**63])
    uniforms = torch.rand(B, N, generator=g) * r.choice([1, 1, 0.1])
    kwargs = {"max_depth": max_depth, "residual": r.choice(["optimal", "relaxed", "released"])}
    if r.random() < 0.6:
        M = r.choice([1, 2, N])
        kwargs["draft_probs"] = rows(B, M)
        if r.random() < 0.15:
            kwargs["draft_probs"][somewhere(kwargs["draft_probs"])] = NAN
        if r.random() < 0.2:
            kwargs["draft_probs"] = torch.eye(V)[torch.randint(V, (B, M), generator=g)]
        beyond = M + (r.random() < 0.1)
        kwargs["draft_row"] = torch.randint(-1, beyond, (B, N), generator=g, dtype=torch.int32)
    relaxing = r.random() < 0.65
    if relaxing:
        C, k = r.randrange(1, V + 1), r.choice([2, 3, 6, 20])
        offset = r.randrange(V - C + 1)
        dtype = r.choice([torch.uint16, torch.int32])
        # Out of the contract but harmless: ids that repeat, that are the code itself, or that do not exist.
        kwargs |= {"neighbors": torch.randint(V - offset + r.choice([0, 3]), (C, k), generator=g).to(dtype),
                   "delta": torch.rand(B, generator=g) * r.choice([0.1, 0.6, 2]), "offset": offset,
                   "cutoff": r.choice(["tvd", "ratio", "jsd"])}
        if r.random() < 0.2:
            kwargs["delta"][r.randrange(B)] = r.choice([-1.0, NAN, INF, 0.0, -0.0])
    if r.random() < 0.6 and max_depth:
        kwargs["omega"] = torch.rand(B, max_depth, generator=g) + (0.3 if not relaxing or r.random() < 0.2 else 1.0)
        if r.random() < 0.15:
            kwargs["omega"][somewhere(kwargs["omega"])] = r.choice([NAN, INF, -1.0, 0.0, -0.0])
    if r.random() < 0.5:
        kwargs["greedy"] = torch.rand(B, generator=g) < 0.5
    args = (target_probs, tokens, first_child, next_sibling, uniforms)
    return [a.to(DEVICE) for a in args], {name: a.to(DEVICE) if isinstance(a, torch.Tensor) else a
                                          for name, a in kwargs.items()}


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # omega = inf, interpreted
def test_any_request_as_the_oracle_has_it(backend, monkeypatch):
    count = 40 if backend == "triton" else 400
    if backend == "triton":  # several blocks without long rows
        from specvis_kernels.triton import _rows
        monkeypatch.setitem(_rows.MAX_BLOCK, "V", 8)
        monkeypatch.setitem(_rows.MAX_BLOCK, "k", 2)
    for seed in range(count):
        args, kwargs = any_request(seed)
        if backend == "cuda_emulated":  # shared memory for all of a request's arrays, for some, or for none
            monkeypatch.setenv("CUDA_ON_CPU_SHARED", str(8192 + 16 * (seed % 64) if seed % 2 else 65536))
            monkeypatch.setenv("CUDA_ON_CPU_SMS", str([1, 2, 6, 12, 24][seed % 5]))  # clusters of 1, 2, 4 or 8 blocks
        for i, (got, expected) in enumerate(zip(verify_tree(*args, **kwargs, backend=backend),
                                                verify_tree(*args, **kwargs, backend="oracle"))):
            same = torch.allclose(got, expected, rtol=0, atol=1e-5) if i == 3 else torch.equal(got, expected)
            assert same, f"any_request({seed}), output {i}: got {got}, expected {expected}"
