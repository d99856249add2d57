"""packed_linear: a linear layer for few rows."""
import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import check, check_count, check_dims
from ._define import define

PANEL = 32  # outputs of a weight that are stored together
DTYPES = torch.float32, torch.bfloat16


def pack_weight(weight: Tensor) -> Tensor:
    """Copy a weight for `packed_linear`: panels of 32 outputs, the last one filled up with zeros.

    Args:
        weight: (O, K) float32 or bfloat16   K is even

    Returns:
        packed: (panels, 32 K) as weight     a panel holds, input by input, the weights of its 32 outputs; of bfloat16
                                             pair by pair of inputs

    Raises:
        ValueError: another dtype or shape
    """
    outputs, K = check_dims("weight", weight, "OK")
    check("weight", weight, DTYPES, O=outputs, K=K)
    if outputs < 1 or K < 2 or K % 2:
        raise ValueError(f"weight must have an output and an even number of inputs, got shape {tuple(weight.shape)}")
    pair = 4 // weight.itemsize
    whole = F.pad(weight.detach(), (0, 0, 0, -outputs % PANEL))
    return whole.view(-1, PANEL, K // pair, pair).transpose(1, 2).reshape(-1, PANEL * K)


def padded(outputs: int) -> int:
    """How many outputs a packed weight of `outputs` stores: whole panels."""
    return outputs + -outputs % PANEL


def unpacked(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """The weight (outputs, inputs) that pack_weight() made `packed`, of any shape, from."""
    pair = 4 // packed.itemsize
    return packed.reshape(-1, inputs // pair, PANEL, pair).transpose(1, 2).reshape(-1, inputs)[:outputs]


def packed_linear(x: Tensor, weight: Tensor, out_features: int, bias: Tensor | None = None, *,
                  backend: str | None = None) -> Tensor:
    """Compute x W^T + bias for few rows, such as a decoder's head reads, with sums in float32.

    `pack_weight` copies the weight once. On a CPU each output is summed in the order of the inputs: no bit depends on
    other rows or on the number of threads.

    Args:
        x:            (.., K)         float32 or bfloat16
        weight:       (panels, 32 K)  as x   from `pack_weight`
        out_features: O
        bias:         (O,) float32    None: nothing is added
        backend:      None for the device's own kernel; a name from `backends()` to force one

    Returns:
        y:            (.., O) float32

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above

    Examples:
        >>> packed_linear(torch.tensor([[1., 2.]]), pack_weight(torch.tensor([[3., 4.], [5., 6.]])), 2)
        tensor([[11., 17.]])
    """
    if not isinstance(x, Tensor) or x.ndim < 1 or x.shape[-1] < 2 or x.shape[-1] % 2:
        raise ValueError("x must be a tensor (.., K) with an even K, got "
                         f"{tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}")
    rows = x.reshape(-1, x.shape[-1])
    M, K = check_dims("x", rows, "MK", DTYPES)
    out_features = check_count("out_features", out_features, 1)
    check("weight", weight, x.dtype, like=x, panels=-(-out_features // PANEL), inputs=PANEL * K)
    if bias is not None:
        check("bias", bias, torch.float32, like=x, O=out_features)
    return _call(backend, rows, weight, bias, out_features).view(*x.shape[:-1], out_features)


def _oracle(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int):
    y = (x.double() @ unpacked(weight, out_features, x.shape[1]).double().T).float()
    return y if bias is None else y + bias


_call = define("packed_linear", oracle=_oracle, batch=None,
               meta=lambda x, out_features: x.new_empty(x.shape[0], out_features, dtype=torch.float32))
