"""Inputs for every op, one maker each: `make(*sizes)` gives `(args, kwargs)` of the public function, seeded.

The first size is the batch, and 0 is a batch too (UNBATCHED names the ops without one). The first entry of CASES is
the smallest that makes sense (one node, one neighbor). Probabilities are counts over 2**16, so any sum of them, in any
order, is exact: every backend must agree with the oracle bit for bit. Where exp or log is in the way the op has a
tolerance in TOLERANCES.
"""
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

CASES = {}       # op -> sizes
TOLERANCES = {}  # op -> {index of an output: (rtol, atol)}; everything else is equal bit for bit
UNBATCHED = {"codebook_neighbors"}


def exact_probs(rows, V, seed=0):
    """(rows, V) float32 probabilities: peaked, as a model's are, and exact to sum."""
    g = torch.Generator().manual_seed(seed)
    draws = (torch.rand(rows, 2**16, generator=g) ** 4 * V).long()
    counts = torch.zeros(rows, V).scatter_add_(1, draws, torch.ones(()).expand_as(draws))
    return (counts / 2**16)[:, torch.randperm(V, generator=g)].to(DEVICE)


def exact_uniforms(*shape, seed=0):
    """float32 uniforms in [0, 1), multiples of 2**-16."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randint(2**16, shape, generator=g) / 2**16).to(DEVICE)


# guided_probs: logits are multiples of 1/8, guidance of 1/2, temperatures powers of two: exact until the exp.
CASES["guided_probs"] = [(1, 1, 2), (2, 3, 33, torch.bfloat16), (3, 2, 64), (2, 1, 1500, torch.float16, False)]
TOLERANCES["guided_probs"] = {0: (1e-5, 1e-9)}


def guided_probs(B, N, V, dtype=torch.float32, uncond=True):
    g = torch.Generator().manual_seed(B + N + V)

    def draw():
        return (torch.randn(B, N, V, generator=g) * 16).round().div(8).to(DEVICE, dtype)

    def per_request(values, dtype):  # different settings side by side in one batch
        return torch.tensor(values, dtype=dtype, device=DEVICE).repeat(B)[:B]

    args = (draw(), draw() if uncond else None, per_request([3.5, 1.0, 0.5], torch.float32),
            per_request([1.0, 0.0, 0.5], torch.float32), per_request([V // 2, 0, 5], torch.int32),
            per_request([0.8, 0.9, 1.0], torch.float32))
    return args, {"first_id": V // 8, "last_id": V - V // 16}
