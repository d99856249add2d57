"""swiglu against float64, at the ends of exp, and its messages."""
import pytest
import torch

from specvis_kernels import backends, swiglu
from tests.cases import DEVICE

NAN, INF = float("nan"), float("inf")


def test_at_the_ends(backend):
    gate = torch.tensor([0., -0., 100., -100., INF, -INF, NAN, 1.], device=DEVICE)
    got = swiglu(gate, torch.full_like(gate, 2.), backend=backend)
    torch.testing.assert_close(got, torch.tensor([0., 0., 200., 0., INF, NAN, NAN, 2 / (1 + 0.36787944)]).to(DEVICE),
                               equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype, rounding", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 2**-21)])
def test_rounds_once(dtype, rounding, backend):
    g = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(2, 3, 500, generator=g).mul(scale).to(DEVICE, dtype) for scale in (3, 30))
    got = swiglu(gate, up, backend=backend)
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    error = ((got.double() - exact) / exact)[exact.abs() > 1e-3].abs().max()
    assert rounding / 2 < error < rounding * 1.01 or dtype == torch.float32 and error < rounding


@pytest.mark.parametrize("kernel", backends("swiglu", DEVICE)[1:])  # the oracle's operations end by a signal
def test_a_freed_storage_is_an_error(kernel):
    gate = torch.randn(4, 8, device=DEVICE)
    gate.untyped_storage().resize_(0)
    with pytest.raises((ValueError, RuntimeError), match="lost its memory: its storage was freed"):
        swiglu(gate, torch.randn(4, 8, device=DEVICE), backend=kernel)
