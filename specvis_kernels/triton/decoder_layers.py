"""decoder_layers on a GPU: PyTorch's products, and between them Triton's kernels for few rows."""
from torch.nn.functional import linear

from .._define import _undisturbed
from ..decoder_layers import plain_layers
from .rms_norm import rms_norm
from .rotate_into_cache import rotate_into_cache
from .swiglu import swiglu
from .tree_attention import tree_attention


def normed(x, weight, eps):
    return x if weight is None else rms_norm(x, weight, None, eps)[0]


def add_norm(stream, update, weight, eps):
    """The norm of stream + update, and their sum; without an update, or without a weight, what is left of that."""
    if weight is None:
        stream = stream if update is None else stream + update
        return stream, stream
    if update is None:
        return normed(stream, weight, eps), stream
    return rms_norm(update, weight, stream, eps)


@_undisturbed
def decoder_layers(x, matrices, vectors, last_norm, kv_cache, lengths, ancestors, positions, rotations, key_mask, heads,
                   ffn_dim, first_node, eps, head_eps, has_first_norm, has_head_norms, rotates_halves):
    R, N, E = x.shape
    G, D = kv_cache.shape[4:]
    stream, update = x.view(R * N, E), None
    plain = plain_layers(matrices, vectors, E, heads, G, D, ffn_dim, has_first_norm, has_head_norms)
    for cache, layer in zip(kv_cache, plain):
        qkv, out, gate_up, down, first_norm, ffn_norm, out_bias, qkv_bias, scale, shift, *out_norms = (
            part if part is None else part.to(x.dtype) for part in layer)
        x, stream = add_norm(stream, update, first_norm, eps)
        y = linear(x, qkv, qkv_bias).view(R, N, -1)
        q = rotate_into_cache(y, cache, lengths, positions, rotations, scale, shift, first_node, rotates_halves,
                              head_eps)
        attended = tree_attention(q, *cache.unbind(2), lengths, ancestors, key_mask, D ** -0.5)
        update = normed(linear(attended.view(R * N, -1), out, out_bias), out_norms[0], eps)
        x, stream = add_norm(stream, update, ffn_norm, eps)
        update = normed(linear(swiglu(*linear(x, gate_up).chunk(2, 1)), down), out_norms[1], eps)
    last_norm = None if last_norm is None else last_norm.to(x.dtype)
    return add_norm(stream, update, last_norm, eps)[0].view(R, N, E)
