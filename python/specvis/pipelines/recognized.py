"""What a published checkpoint holds: it is found from the names and shapes of its tensors."""
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ..models import llamagen, mar
from ..models.kl_vae import KL, KLConfig
from ..models.llamagen import GPT, GPTConfig
from ..models.mar import MAR, MARConfig
from ..models.vq import VQ, VQConfig
from .checkpoint import SHOWN, CheckpointError
from .sources import CODES, Lazy, SourceFile

UNREAD = re.compile(r"^loss\.|^n_averaged$|(freqs_cis|inv_freq|causal_mask|_cache|codebook_used)$")  # nor by releases
GROUPS = 32          # the published tokenizers' group norms have 32 groups; no tensor's shape says it
FAMILY_TYPES = "chameleon", "emu3", "janus", "glm_image", "glm_image_text"  # model_type in config.json
KINDS = {            # what is in the names of a model's tensors
    "gpt": (r"layers\.\d+\.attention\.",),
    "split": (r"model\.layers\.\d+\.self_attn\.", r"model\.cls_embedding\."),  # LANTERN's copy of a GPT
    "eagle": (r"layers\.0\.self_attn\.", r"fc\."),
    "mar": (r"(?:diffloss\.net|encoder_blocks)\.",),
    "vq": (r"(?:en|de)coder\.conv_blocks\.",),
    "kl": (r"(?:encoder\.down|decoder\.up)\.\d+\.block\.",),
}
SPLIT_NAMES = {      # LANTERN's names of a GPT's tensors, which are Hugging Face's; q, k and v are joined besides
    r"^model\.embed_tokens\.": "tok_embeddings.", r"^lm_head\.": "output.", r"^model\.": "",
    r"\.self_attn\.o_proj\.": ".attention.wo.", r"\.mlp\.gate_proj\.": ".feed_forward.w1.",
    r"\.mlp\.up_proj\.": ".feed_forward.w3.", r"\.mlp\.down_proj\.": ".feed_forward.w2.",
    r"\.input_layernorm\.": ".attention_norm.", r"\.post_attention_layernorm\.": ".ffn_norm.",
}


@dataclass
class Recognized:
    """A model that was recognized, with its tensors under this package's names."""

    kind: str            # "gpt", "eagle", "vq", "table", "mar" or "kl"
    source: SourceFile
    name: str            # what it is, in words
    config: object = None

    @property
    def size(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.source.tensors.values())

    def check(self, make: Callable[[], nn.Module]) -> "Recognized":
        """CheckpointError unless there are the tensors of the module that `make` makes, in their shapes, and no others.

        The others that releases do not read are dropped.
        """
        with torch.device("meta"):
            expected = {name: tuple(value.shape) for name, value in make().state_dict().items()
                        if not UNREAD.search(name)}
        source = self.source
        source.tensors = {name: value for name, value in source.tensors.items() if not UNREAD.search(name)}
        if missing := [name for name in expected if name not in source.tensors]:
            rest = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
            raise CheckpointError(f"{source.path} lacks tensors of {self.name}: {', '.join(missing[:SHOWN])}{rest}")
        if unknown := [name for name in source.tensors if name not in expected]:
            raise CheckpointError(f"{source.path} holds tensors that {self.name} has not: {', '.join(unknown[:SHOWN])}")
        for name, shape in expected.items():
            if source.tensors[name].shape != shape:
                raise CheckpointError(f"{source.path} is no {self.name}: {name} must be {shape}, "
                                      f"got {source.tensors[name].shape}")
            if not source.tensors[name].dtype.is_floating_point or source.tensors[name].dtype not in CODES:
                raise CheckpointError(f"{source.path} must hold numbers of 16, 32 or 64 bits, but {name} is "
                                      f"{str(source.tensors[name].dtype)[6:]}")
        return self


def kinds_of(names: Iterable[str]) -> list[tuple[str, str]]:
    """What stands before the names of each model in a source, "" in a published one, and the model's kind."""
    found = []
    for kind, patterns in KINDS.items():
        before = [{match[1] for name in names if (match := re.match(rf"((?:[^.]+\.)*?){pattern}", name))}
                  for pattern in patterns]
        found += [(prefix, kind) for prefix in sorted(set.intersection(*before))
                  if kind != "kl" or not any(name.startswith(f"{prefix}quantize.") for name in names)]
    return found


def recognized(source: SourceFile, heads: int | None, say: Callable[[str], None] = lambda line: None) -> Recognized:
    """What a source holds. CheckpointError if it is nothing that is known, or not all of it, or several models.

    What stands before all names of the model, as Lightning's "model.", is taken off. `say` is told what is left out.
    """
    tensors = source.tensors
    if len(tensors) == 1 and (table := next(iter(tensors.values()))) and not table.dtype.is_floating_point:
        return recognized_table(source, table)
    if of_family := of_a_family(source):
        option, what = of_family
        raise CheckpointError(f"{source.path} is {what}, which needs no folder of this kind: give it to specvis "
                              f"generate as {option}, with --family (docs/families.md)")
    if not (found := kinds_of(tensors)):
        names = ", ".join(list(tensors)[:SHOWN]) or "no tensors"
        raise CheckpointError(f"{source.path} is of no known model: it holds {names}; known are LlamaGen's GPT and "
                              "tokenizer, LANTERN's copy of the GPT, its draft models and its tables, MAR and KL-16")
    prefix, kind = min(found, key=lambda pair: pair[0] != "")
    if prefix and len(found) > 1:
        raise CheckpointError(f"{source.path} must hold one model, got several, whose names begin with "
                              f"{' and '.join(dict.fromkeys(prefix for prefix, _ in found))}; save one of them alone")
    source.tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if left := [name for name in tensors if not name.startswith(prefix)]:
        say(f"{source.path}: took the tensors whose names begin with {prefix}, and left out {len(left)} others: "
            + ", ".join(left[:SHOWN]))
    if kind == "split":
        source.tensors = joined(source)
    if kind in ("gpt", "split"):
        return recognized_gpt(source, heads)
    if kind == "eagle":
        width, vocabulary = source.width("fc.weight"), source.width("embed_tokens.weight")
        return Recognized("eagle", source, f"LANTERN's EAGLE head, width {width}, for {vocabulary} codes")
    if kind == "mar":
        return recognized_mar(source, heads)
    return recognized_vq(source) if kind == "vq" else recognized_kl(source)


def of_a_family(source: SourceFile) -> tuple[str, str] | None:
    """What is of one of transformers' families: the option that takes it, and what it is."""
    joined, model_type = "\n".join(source.tensors), source.config.get("model_type")
    if "fc.weight" not in source.tensors and (model_type in FAMILY_TYPES or "model.vqmodel." in joined):
        return "--model", "a model of transformers that draws images"
    if "fc.weight" in source.tensors and re.search(r"^layers\.0\.input_layernorm\.", joined, re.M):
        return "--draft", "an EAGLE head for a model of transformers, such as Anole"
    if "quantize.embedding.weight" in joined and re.search(r"^decoder\.up\.\d+\.block\.", joined, re.M):
        return "--vq", "Chameleon's VQ-GAN"
    return None


def size_of(source: SourceFile, sizes: dict, layers: int, dim: int, heads: int | None) -> tuple[str, int]:
    """The name of a published size, and its attention heads; or the given heads."""
    for name, (size_layers, size_heads, size_dim, *_) in sizes.items():
        if (size_layers, size_dim) == (layers, dim):
            return name, size_heads
    heads = heads or source.config.get("num_attention_heads")
    if not isinstance(heads, int):
        known = ", ".join(f"{name}: {size[0]} of {size[2]}" for name, size in sizes.items())
        raise CheckpointError(f"{source.path} has {layers} layers of width {dim}, no published size "
                              f"({known}); heads (--heads) must be given for another one")
    return f"{layers} layers of width {dim}", heads


def recognized_gpt(source: SourceFile, heads: int | None) -> Recognized:
    vocabulary, dim = source.width("output.weight"), source.width("output.weight", 1)
    layers, ffn_dim = source.count("layers"), source.width("layers.0.feed_forward.w1.weight")
    name, heads = size_of(source, llamagen.SIZES, layers, dim, heads)
    multiples = (2 ** n for n in range(8, -1, -1))
    multiple = next((m for m in multiples if -(-int(8 * dim / 3) // m) * m == ffn_dim), 256)
    numbers = {"vocabulary": vocabulary, "ffn_multiple": multiple, "grid": 1}  # the grid is chosen later
    theirs = {"norm_eps": "rms_norm_eps", "rope_base": "rope_base"}  # in LANTERN's config.json
    numbers |= {name: source.config[other] for name, other in theirs.items() if other in source.config}
    if "cls_embedding.embedding_table.weight" in source.tensors:
        numbers["classes"] = source.width("cls_embedding.embedding_table.weight") - 1
        kind = f"class-conditional ({numbers['classes']} classes)"
    else:
        uncond = "cls_embedding.uncond_embedding"
        numbers |= {"condition_tokens": source.width(uncond), "caption_dim": source.width(uncond, 1)}
        kind = f"text-conditional ({numbers['condition_tokens']} tokens of width {numbers['caption_dim']})"
    config = GPTConfig(dim, layers, heads, **numbers)
    return Recognized("gpt", source, f"LlamaGen's GPT, {name}, {kind}", config).check(lambda: GPT(config))


def joined(source: SourceFile) -> dict[str, Lazy]:
    """A GPT's tensors under LlamaGen's names, from LANTERN's. The rows of wqkv are q, then k, then v."""
    renamed = {}
    for name, tensor in source.tensors.items():
        if match := re.match(r"model\.layers\.(\d+)\.self_attn\.q_proj\.weight$", name):
            parts = [source.tensors.get(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
            if all(part is not None and part.shape[1:] == tensor.shape[1:] for part in parts):
                rows = sum(part.shape[0] for part in parts)
                renamed[f"layers.{match[1]}.attention.wqkv.weight"] = Lazy(
                    (rows, *tensor.shape[1:]), tensor.dtype,
                    lambda parts=parts: torch.cat([part.make() for part in parts]))
        elif not re.search(r"\.self_attn\.[kv]_proj\.weight$", name):
            for pattern, by in SPLIT_NAMES.items():
                name = re.sub(pattern, by, name)
            renamed[name] = tensor
    return renamed


def recognized_vq(source: SourceFile) -> Recognized:
    channels, inside = (source.width("encoder.conv_in.weight", dim) for dim in (0, 1))
    levels = max(1, source.count(r"encoder\.conv_blocks"))
    multipliers = tuple(max(1, source.width(f"encoder.conv_blocks.{i}.res.0.conv1.weight") // channels)
                        for i in range(levels))
    codes, codebook_dim = (source.width("quantize.embedding.weight", dim) for dim in (0, 1))
    config = VQConfig(
        channels, source.width("decoder.norm_out.weight") // multipliers[0], multipliers,
        source.count(r"encoder\.conv_blocks\.0\.res"), source.width("quant_conv.weight", 1), codes, codebook_dim,
        GROUPS, math.isqrt(inside // 3))
    return Recognized("vq", source, f"LlamaGen's tokenizer VQ-{config.stride}, {config.codebook_size} codes of "
                      f"{config.codebook_dim} numbers", config).check(lambda: VQ(config))


def recognized_mar(source: SourceFile, heads: int | None) -> Recognized:
    dim, tokens = source.width("mask_token", 2), source.width("diffusion_pos_embed_learned", 1)
    layers = source.count("encoder_blocks")
    name, heads = size_of(source, mar.SIZES, layers, dim, heads)
    config = MARConfig(
        dim, heads, layers, source.count("decoder_blocks"), source.width("diffloss.net.input_proj.weight"),
        source.count(r"diffloss\.net\.res_blocks"), tokens, source.width("z_proj.weight", 1),
        source.width("encoder_pos_embed_learned", 1) - tokens, source.width("class_emb.weight"),
        mlp_ratio=source.width("encoder_blocks.0.mlp.fc1.weight") / dim)
    name = f"MAR, {name}, {config.classes} classes, {tokens} tokens"
    return Recognized("mar", source, name, config).check(lambda: MAR(config))


def recognized_kl(source: SourceFile) -> Recognized:
    channels, levels = source.width("encoder.conv_in.weight"), max(1, source.count(r"encoder\.down"))
    config = KLConfig(
        channels, tuple(source.width(f"encoder.down.{i}.block.0.conv1.weight") // channels for i in range(levels)),
        source.count(r"encoder\.down\.0\.block"), source.width("post_quant_conv.weight"), GROUPS)
    name = f"MAR's autoencoder KL-{config.stride}, latents of {config.z_channels} numbers"
    return Recognized("kl", source, name, config).check(lambda: KL(config))


def recognized_table(source: SourceFile, table: Lazy) -> Recognized:
    if len(table.shape) != 2 or not 0 < table.shape[1] < table.shape[0]:
        raise CheckpointError(f"{source.path} must be a table of neighbors (V, k) with k < V, got {table.shape}")
    source.tensors = {"neighbors": table.to(torch.uint16 if table.shape[0] <= 65536 else torch.int32)}
    return Recognized("table", source, f"a table of neighbors, {table.shape[1]} of each of {table.shape[0]} codes",
                      table)
