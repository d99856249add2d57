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


@pytest.mark.parametrize("changes, message", [
    (dict(x=torch.zeros(2, 0)), r"x must be a tensor \(.., E\) with E >= 1, got \(2, 0\)"),
    (dict(x=torch.zeros(2, 4).int()), r"x must be float32 or float16 or bfloat16 \(a=2, E=4\), got int32 \(2, 4\)"),
    (dict(weight=torch.ones(3)), r"weight must be float32 \(E=4\), got float32 \(3,\)"),
    (dict(weight=torch.ones(4).half()), r"weight must be float32 \(E=4\), got float16 \(4,\)"),
    (dict(residual=torch.ones(4, 2)), r"residual must be float32 \(a=2, E=4\), got float32 \(4, 2\)"),
    (dict(residual=torch.ones(2, 4).bfloat16()), r"residual must be float32 \(a=2, E=4\), got bfloat16 \(2, 4\)"),
    (dict(eps=-1e-6), "eps must be a number >= 0 that fits into float32, got -1e-06"),
    (dict(eps=NAN), "eps must be a number >= 0 that fits into float32, got nan"),
    (dict(eps=torch.zeros(2, 4)), "eps must be .* got a tensor: residual is given by name"),
    (dict(eps=1e39), r"eps must be a number >= 0 that fits into float32, got 1e\+39"),
])
def test_says_which_argument_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(**dict(x=torch.zeros(2, 4), weight=torch.ones(4)) | changes)
