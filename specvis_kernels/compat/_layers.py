"""Layers of Llama's shape in a model of transformers: whether `decoder_layers` can read them, and their weights."""
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .. import DecoderLayer, PackedLayers, backends, join_weights, pack_layers

IN_PANELS = {"cpu"}  # where the kernel has a copy of the weights; elsewhere it reads the model's own
FAMILIES = "Llama", "Emu3", "Chameleon", "GlmImageText"
KNOWN = {"ModuleList", "Identity", "Linear", "Dropout", "SiLU", "SiLUActivation", "ChameleonLayerNorm",
         "GlmImageRMSNorm"} | {
    family + part for part in ("DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding") for family in FAMILIES}


def is_unchanged(module: nn.Module, types: tuple[type, ...]) -> bool:
    """Whether a module is of one of these types, without hooks, dropout and a forward of its own."""
    return (type(module) in types and not module._forward_hooks and not module._forward_pre_hooks
            and "forward" not in vars(module) and module._compiled_call_impl is None
            and not (module.training and isinstance(module, nn.Dropout) and module.p))


def are_unchanged(model: nn.Module) -> bool:
    """Whether nobody's hooks run in a model or in all modules."""
    of_all = nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks
    return not any(of_all) and all(is_unchanged(module, (type(module),)) for module in model.modules())


def why_not_weights(weights: list[Tensor], multiple: int) -> str | None:
    """What keeps a kernel from reading these weights, for a message; None: nothing. `multiple` divides their inputs."""
    if not weights:
        return "no weights"
    first, device = weights[0], weights[0].device.type
    if kinds := {type(w).__name__ for w in weights} - {"Tensor", "Parameter"}:
        return f"weights that are {', '.join(sorted(kinds))}"
    for what, values in (("dtype", {w.dtype for w in weights}), ("device", {w.device for w in weights})):
        if len(values) > 1:
            return f"weights of more than one {what}, {', '.join(sorted(map(str, values)))}"
    on_cpu = device in IN_PANELS
    if not on_cpu and any(weight.requires_grad for weight in weights):
        return "weights that require gradients, which must not share memory: call model.requires_grad_(False)"
    if not {"cpu" if on_cpu else "triton"} & {*backends("decoder_layers", device)}:
        return f"weights on {device}, for which no kernel is built"
    if first.dtype not in (torch.float32, torch.bfloat16, torch.float16)[:2 if on_cpu else 3]:
        return f"weights of {first.dtype} on {device}"
    if sizes := {w.shape[-1] for w in weights if w.shape[-1] % (multiple if on_cpu else 2)}:
        return f"sizes that are no multiple of {multiple if on_cpu else 2}, {', '.join(map(str, sorted(sizes)))}"
    return None


def parts_of(decoder: nn.Module) -> list[nn.Module]:
    """The modules of a decoder that are read by one op: layers, the last norm, rotary embeddings."""
    layers = getattr(decoder, "layers", ())
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None and len(layers):  # transformers 4
        rotary = getattr(getattr(layers[0], "self_attn", None), "rotary_emb", None)
    return [part for part in (layers, getattr(decoder, "norm", None), rotary) if isinstance(part, nn.Module)]


def why_not(decoder: nn.Module, num_layers: int) -> str | None:
    """What keeps `decoder_layers` from reading what a decoder reads, for a message; None: nothing."""
    parts = parts_of(decoder)
    modules = [module for part in parts for module in part.modules()]
    for module in modules:
        if type(module).__name__ not in KNOWN or not type(module).__module__.startswith(("torch.nn.", "transformers.")):
            return f"a {type(module).__name__}, which is none of {', '.join(FAMILIES)}'s modules"
    for module in (decoder, *modules):
        if not is_unchanged(module, (type(module),)):
            return f"a {type(module).__name__} with hooks, dropout or a forward of its own"
    if len(parts) < 3 or len(parts[0]) != num_layers:
        return f"a {type(decoder).__name__} without its layers, norm and rotary embeddings"
    kind = getattr(parts[2], "rope_type", "default")
    if kind in ("dynamic", "longrope"):
        return f"{kind} rotary embeddings, which follow the length"
    eps = getattr(parts[1], "variance_epsilon", parts[0][0].input_layernorm.variance_epsilon)
    if not all(is_like_llama(layer, i, eps) for i, layer in enumerate(parts[0])):
        return "layers that are not alike, scale their scores, or have a bias in the MLP or heads of no multiple of 16"
    weights = [*parts[0].parameters(), *parts[1].parameters()]
    if hasattr(parts[0][0], "post_mlp_layernorm") and weights[0].device.type in IN_PANELS:
        return "norms after attention and the MLP on a CPU"
    return why_not_weights(weights, 16)


def is_like_llama(layer: nn.Module, index: int, eps: float) -> bool:
    """Whether `weights_of` a layer says all that it does."""
    a = layer.self_attn
    qkv = a.q_proj, a.k_proj, a.v_proj
    biased = {module for module in layer.modules() if getattr(module, "bias", None) is not None}
    return (len({linear.bias is None for linear in qkv}) == 1 and a.head_dim % 16 == 0 and a.layer_idx == index
            and biased <= {*qkv, a.o_proj, getattr(a, "q_norm", None), getattr(a, "k_norm", None)}
            and getattr(a, "scaling", a.head_dim ** -0.5) == a.head_dim ** -0.5
            and layer.input_layernorm.variance_epsilon == layer.post_attention_layernorm.variance_epsilon == eps)


def together(weights: Iterable[Tensor]) -> Tensor:
    """Weights (O, ..) above each other. Where no copy is made of them, they become parts of the result."""
    weights = list(weights)
    return torch.cat(weights) if weights[0].device.type in IN_PANELS else join_weights(weights)


def weights_of(layer: nn.Module) -> DecoderLayer:
    a, mlp = layer.self_attn, layer.mlp
    gate, up = mlp.gate_up_proj.weight.chunk(2) if hasattr(mlp, "gate_up_proj") else (mlp.gate_proj.weight,
                                                                                      mlp.up_proj.weight)
    out_norms = (getattr(getattr(layer, name, None), "weight", None)
                 for name in ("post_self_attn_layernorm", "post_mlp_layernorm"))
    qkv, norms = (a.q_proj, a.k_proj, a.v_proj), None
    if hasattr(a, "q_norm"):
        norms = tuple(together([getattr(a.q_norm, name), getattr(a.k_norm, name)]) for name in ("weight", "bias"))
    bias = None if a.q_proj.bias is None else together(linear.bias for linear in qkv)
    return DecoderLayer(together(linear.weight for linear in qkv), a.o_proj.weight, gate, up,
                        mlp.down_proj.weight, layer.post_attention_layernorm.weight, layer.input_layernorm.weight, bias,
                        a.o_proj.bias, norms, *out_norms)


def packed(layers: Iterable[DecoderLayer], last_norm: Tensor | None, **options) -> PackedLayers:
    """`pack_layers` for a model's device: a copy in panels, or the model's own weights, which then share memory."""
    layers = list(layers)
    in_panels = layers[0].qkv.device.type in IN_PANELS
    for layer in () if in_panels else layers:
        join_weights([layer.gate, layer.up])
    return pack_layers(layers, last_norm, in_panels=in_panels, **options)


def rotations_of(decoder: nn.Module, positions: Tensor, like: Tensor) -> Tensor:
    """Rotations (R * N, d / 2, 2) float32 of positions (R, N), or (3, R, N) on three axes, as for x of like's dtype."""
    turns = torch.stack(parts_of(decoder)[2](like, positions), -1)
    return turns[..., :turns.shape[-2] // 2, :].flatten(0, 1).float()


@torch.no_grad()
def pack_decoder(decoder: nn.Module, num_positions: int) -> tuple[PackedLayers, Tensor]:
    """The layers of a decoder for `decoder_layers`, and rotations (P, d / 2, 2). `why_not` says whether it has such."""
    layers, norm, _ = parts_of(decoder)
    first = layers[0].input_layernorm
    rotations = rotations_of(decoder, torch.arange(num_positions, device=first.weight.device)[None], first.weight)
    return packed(map(weights_of, layers), getattr(norm, "weight", None), heads=decoder.config.num_attention_heads,
                  eps=first.variance_epsilon, rotates_halves=True), rotations
