"""rms_norm on numbers worked out by hand, and against float64."""
import pytest
import torch

from specvis_kernels import rms_norm
from tests.cases import DEVICE

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("row, residual, eps, normed, stream", [
    ([3., 4., 0., 0.], None, 0.0, [1.2, 3.2, 0., 0.], None),          # the root mean square is 2.5
    ([3., 4., 0., 0.], [-3., 1., 0., 0.], 0.0, [0., 4., 0., 0.], [0., 5., 0., 0.]),
    ([0., 0., 0., 0.], None, 1.0, [0., 0., 0., 0.], None),
    ([0., 0., 0., 0.], None, 0.0, [NAN] * 4, None),
    ([NAN, 1., 1., 1.], None, 0.0, [NAN] * 4, None),
    ([INF, 1., 0., -1.], None, 0.0, [NAN, 0., 0., 0.], None),
    ([3e37, 3e37, -3e37, 3e37], None, 0.0, [1., 2., -3., 4.], None),  # the mean of the squares is no float32
])
def test_rows(row, residual, eps, normed, stream, backend):
    x, weight = torch.tensor([row], device=DEVICE), torch.tensor([1., 2., 3., 4.], device=DEVICE)
    more = None if residual is None else torch.tensor([residual], device=DEVICE)
    result = rms_norm(x, weight, eps, residual=more, backend=backend)
    got = result if residual is None else result.normed
    torch.testing.assert_close(got, torch.tensor([normed], device=DEVICE), equal_nan=True)
    assert residual is None or result.stream.tolist() == [stream]


@pytest.mark.parametrize("dtype, rounding", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 2**-22)])
def test_rounds_once_and_normalizes_what_it_returns_as_the_sum(dtype, rounding, backend):
    g = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(2, 3, 768, generator=g).to(DEVICE, dtype) for _ in range(2))
    weight = torch.rand(768, generator=g).add(0.5).to(DEVICE, dtype)
    normed, stream = rms_norm(x, weight, 1e-6, residual=residual, backend=backend)
    assert stream.equal(x + residual) and normed.equal(rms_norm(stream, weight, 1e-6, backend=backend))
    exact = stream.double() * (stream.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    error = ((normed.double() - exact) / exact)[exact.abs() > 1e-3].abs().max()
    assert rounding / 2 < error < rounding * 1.01 or dtype == torch.float32 and error < rounding
