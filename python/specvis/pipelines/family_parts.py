"""What drafts for a family's model and what makes its pixels, from released files: heads, tables and the VQ-GAN."""
import re
from pathlib import Path

import torch
from torch import Tensor

from ..models.chameleon_vq import ChameleonVQ
from ..models.kl_vae import KLConfig
from ..models.transformers import ImageModel
from ..models.transformers_eagle import TransformersEagleHead
from .checkpoint import CheckpointError, check_finite
from .recognized import GROUPS, Recognized
from .sources import Lazy, SourceFile, open_source

MAX_NEIGHBORS = 1024  # columns of LANTERN's table that are kept; its release reads no more
DECODER = re.compile(r"((?:[^.]+\.)*?)decoder\.up\.\d+\.block\.")  # of Chameleon's VQ-GAN


def load_eagle(source: SourceFile | str | Path, target: ImageModel) -> TransformersEagleHead:
    """A released EAGLE head for this target: LANTERN's for Anole and Lumina-mGPT, or one that was trained here.

    Its embedding is the target's, and is not kept twice. Norms of queries and keys may be one row for all heads.

    Args:
        source: a folder with model.safetensors or pytorch_model.bin, or a file

    Raises:
        CheckpointError: a tensor is missing, unknown, of another shape, or not finite; or the embedding is not the
            target's
    """
    source = source if isinstance(source, SourceFile) else open_source(Path(source))
    tensors, own = source.tensors, target.embed.weight
    if (embedding := tensors.pop("embed_tokens.weight", None)) is not None:
        if embedding.shape != own.shape or not embedding.dtype.is_floating_point or (
                not own.is_meta and not is_near(embedding.make(), own)):  # meta: offloaded
            raise CheckpointError(f"{source.path} must have the target's embedding, {tuple(own.shape)}, got another "
                                  f"one, {embedding.shape}: it is a head for another model")
    heads = {"q_norm": target.config.num_attention_heads,
             "k_norm": getattr(target.config, "num_key_value_heads", None) or target.config.num_attention_heads}
    for name, tensor in tensors.items():
        num_heads = heads.get(name.rpartition(".")[0].rpartition(".")[2])
        if num_heads and len(tensor.shape) == 2 and tensor.shape[0] and num_heads % tensor.shape[0] == 0:
            rows = num_heads // tensor.shape[0]
            tensors[name] = Lazy((num_heads, tensor.shape[1]), tensor.dtype, lambda tensor=tensor, rows=rows:
                                         tensor.make().repeat_interleave(rows, 0))
    for name in ("rms_norm_eps", "rope_theta"):
        mine = getattr(target.config, name, None) or (getattr(target.config, "rope_parameters", None) or {}).get(name)
        if mine is not None and source.config.get(name, mine) != mine:
            raise CheckpointError(f"{source.path}: config.json must have the target's {name}, {mine}, got "
                                  f"{source.config[name]}")
    bias = "fc.bias" in tensors
    kind = f"EAGLE head for {type(target).__name__}, width {target.config.hidden_size}"
    Recognized("eagle", source, kind).check(lambda: TransformersEagleHead(target, bias, "meta"))
    head = TransformersEagleHead(target, bias)
    weights = {name: t.make().to(head.fc.weight.dtype) for name, t in source.tensors.items()}
    for name, value in weights.items():
        check_finite(source.path, name, value)
    head.load_state_dict(weights)
    return head


def is_near(other: Tensor, own: Tensor) -> bool:
    """Whether two tensors are one, but for the rounding of their dtypes."""
    step = max(torch.finfo(t.dtype).eps for t in (other, own))
    for theirs, ours in zip(other.split(4096), own.detach().split(4096)):
        theirs, ours = theirs.float().cpu(), ours.float().cpu()
        if not ((theirs - ours).abs() <= step * ours.abs() + 1e-6).all():
            return False
    return True


def load_vqgan(source: SourceFile | str | Path, num_codes: int = 8192, codebook: Tensor | None = None) -> ChameleonVQ:
    """The decoder of Chameleon's codes: official vqgan.ckpt, a conversion's shards, or a bare state dictionary.

    Args:
        source:    a file, or a folder as transformers has it
        num_codes: C, of the target
        codebook:  (C, channels) the target's; None: it has none of its own

    Raises:
        CheckpointError: a tensor is missing, unknown, of another shape or not finite; or the codebook is another one
    """
    source = source if isinstance(source, SourceFile) else open_source(Path(source))
    prefixes = {match[1] for name in source.tensors if (match := DECODER.match(name))}
    if len(prefixes) != 1:
        raise CheckpointError(f"{source.path} must have one decoder of Chameleon's VQ-GAN, decoder.up.0.block..., got "
                              f"{len(prefixes)}")
    prefix, = prefixes
    names = {name.removeprefix(prefix): tensor for name, tensor in source.tensors.items() if name.startswith(prefix)}
    source = SourceFile(source.path, {name: tensor for name, tensor in names.items() if name.startswith(
        ("decoder.", "post_quant_conv.", "quantize.embedding."))})
    channels, sizes = source.width("decoder.norm_out.weight"), [source.width("quantize.embedding.weight", i) for i in
                                                                (0, 1)]
    if sizes[0] != num_codes:
        raise CheckpointError(f"{source.path} must have the model's {num_codes} codes, got {sizes[0]}")
    try:
        config = KLConfig(
            channels, tuple(source.width(f"decoder.up.{i}.block.0.conv1.weight") // channels
                            for i in range(source.count(r"decoder\.up"))),
            max(1, source.count(r"decoder\.up\.0\.block") - 1), source.width("decoder.conv_in.weight", 1), GROUPS)
        with torch.device("meta"):
            ChameleonVQ(config, *sizes)
    except (ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{source.path} is no VQ-GAN of Chameleon: {error}") from error
    Recognized("vq", source, "Chameleon's VQ-GAN").check(lambda: ChameleonVQ(config, *sizes))
    vq = ChameleonVQ(config, *sizes)
    weights = {name: tensor.make().float() for name, tensor in source.tensors.items()}
    for name, value in weights.items():
        check_finite(source.path, name, value)
    vq.load_state_dict(weights)
    codes = weights["quantize.embedding.weight"]
    if codebook is not None and (codebook.shape != codes.shape or not is_near(codes.to(codebook.dtype), codebook)):
        raise CheckpointError(f"{source.path} must have the model's codebook, {tuple(codebook.shape)}, got another "
                              f"one, {tuple(codes.shape)} of other numbers: it is another model's VQ-GAN")
    return vq


def read_table(path: Path, num_codes: int) -> Tensor:
    """LANTERN's table of neighbors (C, k) uint16, of codes. CheckpointError: it is none, or of another codebook"""
    tensors = list(open_source(path).tensors.values())
    if len(tensors) != 1 or len(tensors[0].shape) != 2 or tensors[0].shape[0] != num_codes:
        raise CheckpointError(f"neighbors {path} must be a table of {num_codes} codes, got "
                              f"{', '.join(str(tensor.shape) for tensor in tensors)}")
    table = tensors[0].make()[:, :MAX_NEIGHBORS]
    if table.dtype.is_floating_point or not all(0 <= int(part.int().min()) and int(part.int().max()) < num_codes
                                                for part in table.split(256)):
        raise CheckpointError(f"neighbors {path} must be codes within [0, {num_codes})")
    return table.to(torch.uint16 if num_codes <= 65536 else torch.int32)
