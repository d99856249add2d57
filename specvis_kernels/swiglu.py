"""swiglu: the gated activation of a Llama-shaped decoder's feed-forward network."""
from torch import Tensor

from ._checks import FLOATS, check_rows
from ._define import checked_once, define
from ._numbers import exp


@checked_once
def swiglu(gate: Tensor, up: Tensor, *, backend: str | None = None) -> Tensor:
    """Compute silu(gate) * up (SwiGLU, arXiv:2002.05202), with silu(g) = g / (1 + exp(-g)).

    It is computed in float32 and rounded once. All backends give the same bits: exp is the package's own, to about one
    unit in the last place, and 0 below -87.

    Args:
        gate:     (.., F) float32, float16 or bfloat16   gate and up may be halves of one tensor's rows
        up:       (.., F) as gate
        backend:  None for the device's own kernel; a name from `backends("swiglu")` to force one

    Returns:
        gated:    (.., F) as gate

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above

    Examples:
        >>> swiglu(torch.tensor([[0., 100.]]), torch.tensor([[3., 3.]]))
        tensor([[  0., 300.]])
    """
    check_rows("gate", gate, "F", FLOATS)
    check_rows("up", up, "F", gate.dtype, like=gate)
    rows = (part if part.ndim == 2 else part.reshape(-1, part.shape[-1]) for part in (gate, up))
    gated = _call(backend, *(part if part.stride(1) == 1 else part.contiguous() for part in rows))
    return gated if gate.ndim == 2 else gated.view(gate.shape)


def _oracle(gate: Tensor, up: Tensor):
    g = gate.float()
    e = exp(-g.abs())
    silu = (g * e).where(g < 0, g) / (1 + e)
    return (silu * up.float()).to(gate.dtype).contiguous()


_call = define("swiglu", oracle=_oracle, meta=lambda gate: gate.new_empty(gate.shape), strided=("gate", "up"))
