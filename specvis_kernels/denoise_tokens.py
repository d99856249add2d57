"""denoise_tokens: the diffusion of continuous tokens by a small MLP, all of its steps."""
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import check, check_count, check_dims, check_eps, setting
from ._define import define
from .packed_linear import pack_weight, padded, unpacked


class DenoiserBlock(NamedTuple):
    """One block's weights (outputs, inputs) and biases, of width W, float32."""

    norm: Tensor             # (W,)
    norm_bias: Tensor        # (W,)
    up: Tensor               # (W, W)
    up_bias: Tensor          # (W,)
    down: Tensor             # (W, W)
    down_bias: Tensor        # (W,)
    modulation: Tensor       # (3 W, W)  shift, scale and gate
    modulation_bias: Tensor  # (3 W,)


class PackedDenoiser(NamedTuple):
    """The MLP for `denoise_tokens`, as `pack_denoiser` makes it."""

    matrices: Tensor  # (m,)  the packed weights: all modulations as one, the input, the blocks, the output
    vectors: Tensor   # (v,)  biases and norms in this order
    num_blocks: int
    eps: float


class DenoiseTokensResult(NamedTuple):
    states: Tensor         # (R, T + 1, C) float32  entry t is x_t; x_0 is the mean of the last step: the token
    log_sigma: Tensor      # (R, C) float32         of the last step
    log_sigma_sum: Tensor  # (R,) float64           over the channels and the steps T .. 2


def pack_denoiser(blocks: Sequence[DenoiserBlock], input: Tensor, input_bias: Tensor, modulation: Tensor,
                  modulation_bias: Tensor, output: Tensor, output_bias: Tensor, *, eps: float = 1e-6) -> PackedDenoiser:
    """Copy the weights of a denoiser for `denoise_tokens`. Changes of the weights do not reach the copy.

    Args:
        blocks:      any number
        input:       (W, C)      W is a multiple of 16, C even
        modulation:  (2 W, W)    shift and scale of the last norm
        output:      (2 C, W)
        *_bias:      (W,), (2 W,) and (2 C,)
        eps:         of all norms

    Returns:
        network:     the copy, in the order in which the kernel reads it

    Raises:
        ValueError: no blocks, or a weight of another dtype or shape
    """
    W, C = check_dims("input", input, "WC")
    if W % 16 or C % 2 or not W or not C:
        raise ValueError(f"W must be a multiple of 16 and C even, got W={W}, C={C}")
    sizes = DenoiserBlock((W,), (W,), (W, W), (W,), (W, W), (W,), (3 * W, W), (3 * W,))
    named = [(f"{name} of a block", tensor, size) for block in blocks
             for name, tensor, size in zip(block._fields, block, sizes)]
    for name, tensor, size in (
            *named, ("input", input, (W, C)), ("input_bias", input_bias, (W,)), ("modulation", modulation, (2 * W, W)),
            ("modulation_bias", modulation_bias, (2 * W,)), ("output", output, (2 * C, W)),
            ("output_bias", output_bias, (2 * C,))):
        if tensor.shape != size or tensor.dtype != torch.float32:
            raise ValueError(f"{name} must be float32 {size}, got {str(tensor.dtype)[6:]} {tuple(tensor.shape)}")
    matrices = [torch.cat([*(block.modulation for block in blocks), modulation]), input,
                *(weight for block in blocks for weight in (block.up, block.down)), output]
    vectors = [*(block.modulation_bias for block in blocks), modulation_bias, input_bias,
               *(v for block in blocks for v in (block.norm, block.norm_bias, block.up_bias, block.down_bias)),
               output_bias]
    return PackedDenoiser(torch.cat([pack_weight(m).flatten() for m in matrices]),
                          torch.cat([v.detach() for v in vectors]), len(blocks), eps)


def denoise_tokens(noise: Tensor, z: Tensor, time: Tensor, network: PackedDenoiser, schedule: Tensor, *,
                   guidance: float | Tensor = 1.0, temperature: float = 1.0, clip_range: float = math.inf,
                   backend: str | None = None) -> DenoiseTokensResult:
    """Draw continuous tokens by all steps of their diffusion, as MAR's (arXiv:2406.11838) DiffLoss has it.

    A token is x_0 of a path x_T .. x_0, and x_T is noise. In step t = T .. 1 the network reads x = x_t and
    y = silu(z + time[t - 1]):

        h = x W_in
        h = h + gate * (silu(m W_up) W_down),   m = norm(h) (1 + scale) + shift      in each block
        epsilon, v = (norm(h) (1 + scale) + shift) W_out                             each of C numbers

    Norms are LayerNorms; shift, scale and gate are products of y; each product has a bias. If z has two rows a
    token, with and without the condition, epsilon = e_1 + guidance * (e_0 - e_1), and v is v_0. With
    (c_x, c_e, c_0, c_1, low, high) of the step

        x_0 = c_x x - c_e epsilon, clamped to clip_range
        mean = c_0 x_0 + c_1 x;   log sigma = low + (high - low) (v + 1) / 2 + log temperature
        x_(t-1) = mean + sigma * noise[t - 2]

    but in the last step, t = 1, the mean itself is x_0. A NaN stays in its token. On a CPU no bit of a token depends on
    other tokens or on the number of threads. Elsewhere a denoiser's own modules are as quick as the oracle.

    Args:
        noise:       (R, T, C) float32          standard normals: entry T - 1 is x_T, entry t - 2 goes into x_(t-1)
        z:           (R, 1, W) or (R, 2, W) float32   a token's condition, embedded
        time:        (T, W) float32             the embeddings of the steps' times
        network:     from `pack_denoiser`
        schedule:    (T, 7) float32             for each step its time, which is not read, then the six coefficients
        guidance:    a number, or (R,) float32; with one row a token it is 1
        temperature: positive and finite
        clip_range:  positive; infinite: nothing is clamped
        backend:     None for the device's own kernel; a name from `backends()` to force one

    Returns:
        states:        (R, T + 1, C) float32    entry t is x_t: entry 0 is the token
        log_sigma:     (R, C) float32           of the last step
        log_sigma_sum: (R,) float64             over the channels and the steps T .. 2

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above

    Examples:
        >>> w, b = torch.zeros(16, 16), torch.zeros(16)          # W = 16, C = 2: epsilon and v are 0
        >>> block = DenoiserBlock(b, b, w, b, w, b, w.repeat(3, 1), b.repeat(3))
        >>> network = pack_denoiser([block], w[:, :2], b, w.repeat(2, 1), b.repeat(2), w[:4], b[:4])
        >>> schedule = torch.tensor([[0., 2., 1., 1., 0., -1., 1.]]).repeat(2, 1)
        >>> denoise_tokens(torch.ones(1, 2, 2), torch.zeros(1, 1, 16), torch.zeros(2, 16), network, schedule).states[0]
        tensor([[6., 6.],
                [3., 3.],
                [1., 1.]])
    """
    R, T, C = check_dims("noise", noise, "RTC", torch.float32)
    P, W = check_dims("z", z, "RPW")[1:]
    check("z", z, torch.float32, like=noise, R=R, P=P, W=W)
    check("time", time, torch.float32, like=noise, T=T, W=W)
    check("schedule", schedule, torch.float32, like=noise, T=T, numbers=7)
    if not isinstance(network, PackedDenoiser):
        raise ValueError(f"network must be a PackedDenoiser, from pack_denoiser, got {type(network).__name__}")
    if P not in (1, 2) or T < 1:
        raise ValueError(f"there must be a step, and z must have one or two rows a token, got T={T} and P={P}")
    m, v = (sum(sizes) for sizes in part_sizes(check_count("network.num_blocks", network.num_blocks, 0), W, C))
    check("network.matrices", network.matrices, torch.float32, like=noise, m=m)
    check("network.vectors", network.vectors, torch.float32, like=noise, v=v)
    check_eps("network.eps", network.eps)
    if P == 1 and (isinstance(guidance, Tensor) or guidance != 1):
        raise ValueError("guidance needs two rows of z for each token")
    guidance = setting("guidance", guidance, torch.float32, noise, R=R)
    for name, value in (("temperature", temperature), ("clip_range", clip_range)):
        if not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"{name} must be a positive number, got {value!r}")
    if not temperature < math.inf:
        raise ValueError(f"temperature must be finite, got {temperature}")
    return _call(backend, noise, z, time, *network[:2], schedule, guidance, network.num_blocks, network.eps,
                 math.log(temperature), float(clip_range))


def part_sizes(num_blocks: int, W: int, C: int) -> tuple[list[int], list[int]]:
    """How many numbers the packed matrices have, and the vectors."""
    Q = (3 * num_blocks + 2) * W  # of all modulations
    return ([padded(Q) * W, padded(W) * C, *[padded(W) * W] * (2 * num_blocks), padded(2 * C) * W],
            [Q, W, *[W] * (4 * num_blocks), 2 * C])


def _oracle(noise: Tensor, z: Tensor, time: Tensor, matrices: Tensor, vectors: Tensor, schedule: Tensor,
            guidance: Tensor, num_blocks: int, eps: float, log_temperature: float, clip_range: float):
    (R, T, C), (P, W), n = noise.shape, z.shape[1:], num_blocks
    matrix_sizes, vector_sizes = part_sizes(n, W, C)
    matrix = [unpacked(part, outputs, inputs) for part, outputs, inputs in zip(
        matrices.split(matrix_sizes), [(3 * n + 2) * W, *[W] * (2 * n + 1), 2 * C], [W, C, *[W] * (2 * n + 1)])]
    vector = vectors.split(vector_sizes)

    def modulated(x, shift, scale, *norm):
        return F.layer_norm(x, (W,), *norm, eps=eps) * (1 + scale) + shift

    x = noise[:, T - 1]
    states, log_sigma_sum = [x], noise.new_zeros(R, dtype=torch.float64)
    for t in range(T, 0, -1):
        parts = F.linear(F.silu(z + time[t - 1]), matrix[0], vector[0]).split(W, -1)
        h = F.linear(x[:, None], matrix[1], vector[1])
        for i in range(n):
            shift, scale, gate = parts[3 * i: 3 * i + 3]
            norm, norm_bias, up_bias, down_bias = vector[2 + 4 * i: 6 + 4 * i]
            up = F.silu(F.linear(modulated(h, shift, scale, norm, norm_bias), matrix[2 + 2 * i], up_bias))
            h = h + gate * F.linear(up, matrix[3 + 2 * i], down_bias)
        epsilon, v = F.linear(modulated(h, *parts[-2:]), matrix[-1], vector[-1]).split(C, -1)
        epsilon = epsilon[:, 0] if P == 1 else epsilon[:, 1] + guidance[:, None] * (epsilon[:, 0] - epsilon[:, 1])
        _, x_coef, noise_coef, coef0, coef1, low, high = schedule[t - 1].unbind()
        mean = coef0 * (x_coef * x - noise_coef * epsilon).clamp(-clip_range, clip_range) + coef1 * x
        weight = (v[:, 0] + 1) / 2
        log_sigma = weight * high + (1 - weight) * low + log_temperature
        if t > 1:
            log_sigma_sum = log_sigma_sum + log_sigma.double().sum(-1)
            mean = mean + log_sigma.exp() * noise[:, t - 2]
        x = mean
        states.append(x)
    return torch.stack(states[::-1], 1), log_sigma, log_sigma_sum


def _meta(noise):
    R, T, C = noise.shape
    return noise.new_empty(R, T + 1, C), noise.new_empty(R, C), noise.new_empty(R, dtype=torch.float64)


_call = define("denoise_tokens", oracle=_oracle, meta=_meta, result=DenoiseTokensResult, batch=None)
