"""packed_linear: a linear layer for few rows."""
import torch
import torch.nn.functional as F
from torch import Tensor

from ._dispatch import check, check_count, check_dims, define

PANEL = 32  # outputs of a weight that are stored together
DTYPES = torch.float32, torch.bfloat16


def pack_weight(weight: Tensor) -> Tensor:
    """A weight (O, K) in the order in which the kernel reads it: panels of 32 outputs, filled up with zeros.

    Args:
        weight: (O, K) float32 or bfloat16   K is even
    Returns:
        (panels, 32 K) as weight: for each input, or pair of inputs of bfloat16, that of 32 outputs

    Raises:
        ValueError: another dtype or shape
    """
    outputs, K = check_dims("weight", weight, "OK")
    check("weight", weight, DTYPES, O=outputs, K=K)
    if outputs < 1 or K < 2 or K % 2:
        raise ValueError(f"weight must have an output and an even number of inputs, got shape {tuple(weight.shape)}")
    pair = 4 // weight.itemsize
    padded = F.pad(weight.detach(), (0, 0, 0, -outputs % PANEL))
    return padded.view(-1, PANEL, K // pair, pair).transpose(1, 2).reshape(-1, PANEL * K)


def unpacked(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """The weight (outputs, inputs) that `packed` (any shape) is."""
    pair = 4 // packed.itemsize
    return packed.reshape(-1, inputs // pair, PANEL, pair).transpose(1, 2).reshape(-1, inputs)[:outputs]


def packed_linear(x: Tensor, weight: Tensor, out_features: int, bias: Tensor | None = None, *,
                  backend: str | None = None) -> Tensor:
    """x W^T + bias, with sums in float32. It is for few rows, as a decoder's head reads them.

    On a CPU each output is summed in the order of the inputs: not a bit depends on the other rows or on the number of
    threads.

    Args:
        x:            (.., K)         float32 or bfloat16
        weight:       (panels, 32 K)  as x   from `pack_weight`
        out_features: O
        bias:         (O,) float32    None: nothing is added
        backend:      None for the device's own kernel; a name from `backends()` to force one

    Returns:
        (.., O) float32

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above

    Example:
        >>> import torch
        >>> from specvis_kernels import pack_weight, packed_linear
        >>> packed_linear(torch.tensor([[1., 2.]]), pack_weight(torch.tensor([[3., 4.], [5., 6.]])), 2)
        tensor([[11., 17.]])
    """
    if not isinstance(x, Tensor) or x.ndim < 1 or x.shape[-1] < 2 or x.shape[-1] % 2:
        raise ValueError("x must be a tensor (.., K) with an even K, got "
                         f"{tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}")
    rows = x.reshape(-1, x.shape[-1])
    M, K = check_dims("x", rows, "MK")
    check("x", rows, DTYPES, M=M, K=K)
    out_features = check_count("out_features", out_features, 1)
    check("weight", weight, x.dtype, like=x, panels=-(-out_features // PANEL), inputs=PANEL * K)
    if bias is not None:
        check("bias", bias, torch.float32, like=x, O=out_features)
        bias = bias.contiguous()
    return _call(backend, rows.contiguous(), weight.contiguous(), bias, out_features).view(*x.shape[:-1], out_features)


def _oracle(x, weight, bias, out_features):
    y = (x.double() @ unpacked(weight, out_features, x.shape[1]).double().T).float()
    return y if bias is None else y + bias


def _meta(x, weight, bias, out_features):
    return x.new_empty(x.shape[0], out_features, dtype=torch.float32)


_call = define("packed_linear(Tensor x, Tensor weight, Tensor? bias, SymInt out_features) -> Tensor", oracle=_oracle,
               meta=_meta, batch=None)
