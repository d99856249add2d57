"""From published checkpoints to a folder that `Pipeline.load` or `MARPair.load` reads.

What a file holds is found from the names and shapes of its tensors. Tensors are read and written one after the other,
from a file that is mapped into memory: no second copy of the model is held.
"""
import json
import math
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from ..files import first_line, locked, replacing_together, write_json
from ..models import llamagen, mar
from ..models.eagle import EagleHead
from ..models.kl_vae import KL, KLConfig
from ..models.llamagen import GPT, GPTConfig
from ..models.mar import MAR, MARConfig
from ..models.vq import VQ, VQConfig
from .checkpoint import (
    CheckpointError,
    check_draft_config,
    read_config,
    read_settings,
    read_state,
    read_weights,
    tensors_of,
)

IMAGE_SIZES = (256, 384, 512)
CODES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
         torch.int32: "I32", torch.int16: "I16", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL"}
UNREAD = re.compile(r"^loss\.|freqs_cis$|inv_freq$|causal_mask$|_cache$|codebook_used$")  # nor do the releases read it
GROUPS = 32          # of the group norms of the published tokenizers; no tensor's shape says it
SHOWN = 5            # names of missing tensors in an error
SAMPLE = 64          # rows of a table of neighbors that are compared with the codebook
PIECE = 1024         # rows of it that are looked through at once
DRAFTER_SIZES = {"t2i": 256, "t2i2": 512}                        # input_type in the config of LANTERN's drafters
MAR_GUIDANCE = {"B": 2.9, "L": 3.0, "H": 3.2}                    # with which the release evaluates
CAPTIONS, CLASSES = ({"guidance": 7.5, "top_k": 1000, "top_p": 1.0},  # of LlamaGen's demos
                     {"guidance": 4.0, "top_k": 2000, "top_p": 1.0})
SPLIT_NAMES = {      # LANTERN's names of a GPT's tensors, which are Hugging Face's; q, k and v are joined besides
    r"^model\.embed_tokens\.": "tok_embeddings.", r"^lm_head\.": "output.", r"^model\.": "",
    r"\.self_attn\.o_proj\.": ".attention.wo.", r"\.mlp\.gate_proj\.": ".feed_forward.w1.",
    r"\.mlp\.up_proj\.": ".feed_forward.w3.", r"\.mlp\.down_proj\.": ".feed_forward.w2.",
    r"\.input_layernorm\.": ".attention_norm.", r"\.post_attention_layernorm\.": ".ffn_norm.",
}


@dataclass(frozen=True)
class Lazy:
    """A tensor that is read, or made, when it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @staticmethod
    def of(tensor: Tensor) -> "Lazy":
        return Lazy(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def to(self, dtype: torch.dtype | None) -> "Lazy":
        """The tensor in another dtype; None: as it is."""
        return self if dtype in (None, self.dtype) else Lazy(self.shape, dtype, lambda: self.make().to(dtype))


@dataclass
class Source:
    """What was given: tensors by name, and the config.json beside them, if there is one."""

    path: Path
    tensors: dict[str, Lazy]
    config: dict = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor without which the model's size cannot be said."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} lacks {name}")
        return self.tensors[name].shape

    def width(self, name: str, dim: int = 0) -> int:
        if len(shape := self.shape(name)) <= dim:
            raise CheckpointError(f"{self.path} is of no known model: {name} must have more than {dim} dimensions, "
                                  f"got {len(shape)}")
        return shape[dim]

    def count(self, prefix: str) -> int:
        """How many blocks there are whose names begin so and have a number behind it."""
        numbers = [int(match[1]) for name in self.tensors if (match := re.match(rf"{prefix}\.(\d+)\.", name))]
        return max(numbers, default=-1) + 1


@dataclass
class Part:
    """A model that was recognized, with its tensors under this package's names."""

    kind: str            # "gpt", "drafter", "vq", "table", "mar" or "kl"
    source: Source
    name: str            # what it is, in words
    config: object = None

    @property
    def size(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.source.tensors.values())

    def check(self, make: Callable[[], nn.Module]) -> None:
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


def convert(sources: Iterable[str | Path], out: str | Path, *, image_size: int | None = None,
            dtype: torch.dtype | None = None, heads: int | None = None, text_encoder: str | Path | None = None,
            say: Callable[[str], None] = lambda line: None,
            progress: Callable[[int, int], None] = lambda num_bytes, total: None) -> None:
    """Write a folder of published checkpoints. Parts that the folder `out` has already stay, unless they are given.

    Args:
        sources:      files or folders: LlamaGen's GPT and tokenizer, LANTERN's copy of the GPT, its drafter and its
            table of neighbors; or MAR and its autoencoder. Of two GPTs or two MARs the smaller one drafts
        image_size:   pixels a side, of a GPT: no tensor's shape says it
        dtype:        of the weights that are written, but of the tokenizers'; None: as they are stored
        heads:        attention heads, of a GPT or MAR of none of the published sizes
        text_encoder: folder of the T5 that reads prompts, which the folder remembers
        say:          called with a line for each source: what it is, and where it went
        progress:     called with how many bytes were just written, and how many there are in all

    Raises:
        CheckpointError: a source that cannot be read without running code, is of no known model, or lacks tensors; or
            sources that do not belong together
        ValueError:      image_size or text_encoder is missing where it is needed, or is wrong; or heads that a model of
            a published size does not have
    """
    out = Path(out)
    if image_size is not None and image_size not in IMAGE_SIZES:
        raise ValueError(f"image_size must be one of {', '.join(map(str, IMAGE_SIZES))}, got {image_size}")
    parts = sorted((recognized(open_source(Path(path)), heads) for path in sources), key=lambda part: -part.size)
    of_mar = [part for part in parts if part.kind in ("mar", "kl")]
    if of_mar and len(of_mar) < len(parts):
        other = next(part for part in parts if part not in of_mar)
        raise CheckpointError(f"sources must be of one family, got {of_mar[0].source.path} ({of_mar[0].name}) and "
                              f"{other.source.path} ({other.name})")
    other = out / ("config.json" if of_mar else "mar.json")
    if other.exists():
        raise CheckpointError(f"out must be a folder without a model of the other family, but {other} is of "
                              f"{'LlamaGen' if of_mar else 'MAR'}; choose another out")
    models = [part for part in parts if part.kind in ("gpt", "mar")]
    if heads is not None and models and all(part.config.heads != heads for part in models):
        raise ValueError(f"heads must be {models[0].config.heads}, those of {models[0].source.path} "
                         f"({models[0].name}), or not be given, got {heads}")
    plan = plan_mar if of_mar else plan_llamagen
    files, configs = plan(parts, out, image_size, text_encoder)

    weights = {file: part.source.tensors if part.kind in ("vq", "kl", "table") else
               {name: tensor.to(dtype) for name, tensor in part.source.tensors.items()} for file, part in files.items()}
    total = sum(tensor.num_bytes for tensors in weights.values() for tensor in tensors.values())
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"out must be a folder that can be made, got {out}: {error.strerror}") from error
    with locked(out), replacing_together(out, last="mar.json" if of_mar else "config.json") as new:
        for file, tensors in weights.items():
            write_tensors(new / f"{file}.safetensors", tensors, lambda num_bytes: progress(num_bytes, total))
            dtypes = " and ".join(sorted({str(tensor.dtype)[6:] for tensor in tensors.values()}))
            goal = out / f"{file}.safetensors"
            say(f"{files[file].source.path}: {files[file].name}, {dtypes} -> {goal}"
                + (", in place of the one before" if goal.exists() else ""))
        for file, values in configs.items():
            write_json(new / f"{file}.json", values)


# --- sources ----------------------------------------------------------------------------------------------------------

def open_source(path: Path) -> Source:
    """The tensors of a file or folder, none of them read yet."""
    if not path.exists():
        raise CheckpointError(f"source {path} does not exist")
    folder, files = (path, files_of(path)) if path.is_dir() else (path.parent, [path])
    if path.name.endswith(".index.json"):
        files = files_of(folder, path)
    tensors = {}
    for file in files:
        tensors |= open_file(file)
    prefixes = ("module.", "_orig_mod.")  # of PyTorch's wrappers of models
    while tensors and any(all(name.startswith(prefix) for name in tensors) for prefix in prefixes):
        tensors = {name.partition(".")[2]: tensor for name, tensor in tensors.items()}
    config = {}
    if path.is_dir() or path.name.startswith(("model", "pytorch_model")):
        try:
            config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").exists() else {}
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"config {folder / 'config.json'} cannot be read: {error}") from error
    return Source(path, tensors, config if isinstance(config, dict) else {})


def files_of(folder: Path, index: Path | None = None) -> list[Path]:
    """The files of weights in a folder as transformers writes it, one or several with an index."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if index is None and (folder / name).exists():
            return [folder / name]
        listed = index or folder / f"{name}.index.json"
        if listed.exists():
            try:
                files = set(json.loads(listed.read_text())["weight_map"].values())
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(f"index {listed} cannot be read: {error!r}") from error
            return [folder / Path(file).name for file in sorted(files)]
    raise CheckpointError(f"source {folder} must be a file, or a folder with model.safetensors or pytorch_model.bin")


def open_file(path: Path) -> dict[str, Lazy]:
    """The tensors of a file: safetensors, NumPy's, or PyTorch's, of which no code is run."""
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path} does not exist")
    try:
        if path.suffix == ".safetensors":
            dtypes = {code: dtype for dtype, code in CODES.items()}
            with safe_open(path, "pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
                described = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
            if unknown := {code for _, code in described.values()} - set(dtypes):
                raise CheckpointError(f"checkpoint {path} must hold numbers of known types, got {', '.join(unknown)}")

            def read(name):
                with safe_open(path, "pt") as file:
                    return file.get_tensor(name)
            return {name: Lazy(shape, dtypes[code], lambda name=name: read(name))
                    for name, (shape, code) in described.items()}
        if path.suffix in (".npy", ".npz"):
            array = np.load(path, mmap_mode="c", allow_pickle=False)
            arrays = {"table": array} if isinstance(array, np.ndarray) else dict(array)
            return {name: Lazy(value.shape, torch.from_numpy(value[:0].copy()).dtype,
                               lambda value=value: torch.from_numpy(value)) for name, value in arrays.items()}
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # a file that is hurt raises nearly any
        raise CheckpointError(f"checkpoint {path} cannot be read: {first_line(error)}") from error
    state = read_state(path)
    if isinstance(state, Tensor):
        return {"table": Lazy.of(state)}
    return {name: Lazy.of(tensor) for name, tensor in tensors_of(state, path).items()}


# --- what they are ----------------------------------------------------------------------------------------------------

def recognized(source: Source, heads: int | None) -> Part:
    """What a source holds. CheckpointError if it is nothing that is known, or not all of it."""
    tensors = source.tensors

    def has(pattern):
        return any(re.match(pattern, name) for name in tensors)

    if len(tensors) == 1 and (table := next(iter(tensors.values()))) and not table.dtype.is_floating_point:
        return recognized_table(source, table)
    if has(r"layers\.\d+\.attention\."):
        return recognized_gpt(source, heads)
    if has(r"model\.layers\.\d+\.self_attn\.") and has(r"model\.cls_embedding\."):
        source.tensors = joined(source)
        return recognized_gpt(source, heads)
    if has(r"layers\.0\.self_attn\.") and has(r"fc\."):
        width, vocabulary = source.width("fc.weight"), source.width("embed_tokens.weight")
        return Part("drafter", source, f"LANTERN's drafter, an EAGLE head of width {width} for {vocabulary} codes")
    if has(r"diffloss\.net\.|encoder_blocks\."):
        return recognized_mar(source, heads)
    if has(r"(en|de)coder\.conv_blocks\."):
        return recognized_vq(source)
    if has(r"encoder\.down\.\d+\.block\.|decoder\.up\.\d+\.block\.") and not has(r"quantize\."):
        return recognized_kl(source)
    names = ", ".join(list(tensors)[:SHOWN]) or "no tensors"
    raise CheckpointError(f"{source.path} is of no known model: it holds {names}; known are LlamaGen's GPT and "
                          "tokenizer, LANTERN's copy of the GPT, its drafters and its tables, MAR and KL-16")


def size_of(source: Source, sizes: dict, layers: int, dim: int, heads: int | None) -> tuple[str, int]:
    """The name of a published size, and its attention heads; or those that are given."""
    for name, (size_layers, size_heads, size_dim, *_) in sizes.items():
        if (size_layers, size_dim) == (layers, dim):
            return name, size_heads
    heads = heads or source.config.get("num_attention_heads")
    if not isinstance(heads, int):
        known = ", ".join(f"{name}: {size[0]} of {size[2]}" for name, size in sizes.items())
        raise CheckpointError(f"{source.path} has {layers} layers of width {dim}, no published size "
                              f"({known}); heads must be given for another one")
    return f"{layers} layers of width {dim}", heads


def recognized_gpt(source: Source, heads: int | None) -> Part:
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
    part = Part("gpt", source, f"LlamaGen's GPT, {name}, {kind}", GPTConfig(dim, layers, heads, **numbers))
    part.check(lambda: GPT(part.config))
    return part


def joined(source: Source) -> dict[str, Lazy]:
    """A GPT's tensors under LlamaGen's names, from LANTERN's. Rows of wqkv are those of q, then k, then v."""
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


def recognized_vq(source: Source) -> Part:
    channels, inside = (source.width("encoder.conv_in.weight", dim) for dim in (0, 1))
    levels = max(1, source.count(r"encoder\.conv_blocks"))
    multipliers = tuple(max(1, source.width(f"encoder.conv_blocks.{i}.res.0.conv1.weight") // channels)
                        for i in range(levels))
    config = VQConfig(
        channels, source.width("decoder.norm_out.weight") // multipliers[0], multipliers,
        source.count(r"encoder\.conv_blocks\.0\.res"), source.width("quant_conv.weight", 1),
        source.width("quantize.embedding.weight"), source.width("quantize.embedding.weight", 1),
        GROUPS, math.isqrt(inside // 3))
    part = Part("vq", source, f"LlamaGen's tokenizer VQ-{config.stride}, {config.codebook_size} codes of "
                f"{config.codebook_dim} numbers", config)
    part.check(lambda: VQ(config))
    return part


def recognized_mar(source: Source, heads: int | None) -> Part:
    dim, tokens = source.width("mask_token", 2), source.width("diffusion_pos_embed_learned", 1)
    layers = source.count("encoder_blocks")
    name, heads = size_of(source, mar.SIZES, layers, dim, heads)
    config = MARConfig(
        dim, heads, layers, source.count("decoder_blocks"), source.width("diffloss.net.input_proj.weight"),
        source.count(r"diffloss\.net\.res_blocks"), tokens, source.width("z_proj.weight", 1),
        source.width("encoder_pos_embed_learned", 1) - tokens, source.width("class_emb.weight"),
        mlp_ratio=source.width("encoder_blocks.0.mlp.fc1.weight") / dim)
    part = Part("mar", source, f"MAR, {name}, {config.classes} classes, {tokens} tokens", config)
    part.check(lambda: MAR(config))
    return part


def recognized_kl(source: Source) -> Part:
    channels, levels = source.width("encoder.conv_in.weight"), max(1, source.count(r"encoder\.down"))
    config = KLConfig(
        channels, tuple(source.width(f"encoder.down.{i}.block.0.conv1.weight") // channels for i in range(levels)),
        source.count(r"encoder\.down\.0\.block"), source.width("post_quant_conv.weight"), GROUPS)
    part = Part("kl", source, f"MAR's autoencoder KL-{config.stride}, latents of {config.z_channels} numbers", config)
    part.check(lambda: KL(config))
    return part


def recognized_table(source: Source, table: Lazy) -> Part:
    if len(table.shape) != 2 or not 0 < table.shape[1] < table.shape[0]:
        raise CheckpointError(f"{source.path} must be a table of neighbors (V, k) with k < V, got {table.shape}")
    source.tensors = {"neighbors": table.to(torch.uint16 if table.shape[0] <= 65536 else torch.int32)}
    return Part("table", source, f"a table of neighbors, {table.shape[1]} of each of {table.shape[0]} codes", table)


# --- what belongs together --------------------------------------------------------------------------------------------

def only(parts: list[Part], kind: str, limit: int = 1) -> list[Part]:
    """The parts of a kind. CheckpointError if there are more than `limit`."""
    found = [part for part in parts if part.kind == kind]
    if len(found) > limit:
        raise CheckpointError(f"sources must have at most {limit} of a kind, got "
                              f"{', '.join(f'{part.source.path} ({part.name})' for part in found)}")
    return found


def plan_llamagen(parts: list[Part], out: Path, image_size: int | None,
                  text_encoder: str | Path | None) -> tuple[dict[str, Part], dict[str, dict]]:
    """Which part goes into which file, and what the files of numbers hold."""
    gpts, vqs = only(parts, "gpt", 2), only(parts, "vq")
    drafters, tables = only(parts, "drafter"), only(parts, "table")
    if not vqs and not (out / "tokenizer.json").exists():
        raise CheckpointError(f"sources must have the GPT's tokenizer, such as vq_ds16_c2i.pt, which {out} has not yet")
    if not gpts and not (out / "config.json").exists():
        raise CheckpointError(f"sources must have a GPT, such as c2i_B_384.pt, which {out} has not yet")
    vq_config = vqs[0].config if vqs else read_config(out / "tokenizer.json", VQConfig)
    settings, files, configs = read_settings(out), {}, {}
    said = {part.source.path: size for part in parts if (size := size_said(part, vq_config.stride))}
    if gpts:
        image_size = image_size or next(iter(said.values()), None)
        if image_size is None:
            raise ValueError(f"image_size must be given, one of {', '.join(map(str, IMAGE_SIZES))}: no tensor of "
                             "LlamaGen's depends on it (the published files have it in their names)")
        configs_of = [replace(part.config, grid=image_size // vq_config.stride) for part in gpts]
        config = configs_of[0]
        settings = replace(settings, **(CLASSES if config.caption_dim is None else CAPTIONS))
        files["gpt"], configs["config"] = gpts[0], asdict(config)
        if len(gpts) == 2:
            check_draft_config(gpts[1].source.path, configs_of[1], config)
            files["small"], configs["small"] = gpts[1], asdict(configs_of[1])
        if not drafters:
            refuse_left(out, "GPT", "drafter.safetensors")
        if len(gpts) == 1:
            refuse_left(out, "GPT", "small.safetensors", "small.json")
    else:
        config = read_config(out / "config.json", GPTConfig)
    for path, size in said.items():
        if size != config.grid * vq_config.stride:
            raise CheckpointError(f"{path} is for pictures of {size} pixels, not of {config.grid * vq_config.stride}")
    if vq_config.codebook_size != config.vocabulary:
        raise CheckpointError(f"the tokenizer must have the GPT's {config.vocabulary} codes, "
                              f"got {vq_config.codebook_size}")
    if vqs and not tables:
        refuse_left(out, "tokenizer", "neighbors.safetensors")
    if vqs:
        files["tokenizer"], configs["tokenizer"] = vqs[0], asdict(vq_config)
    for part in drafters:
        part.check(lambda: EagleHead(config))
        files["drafter"] = part
    for part in tables:
        codebook = (vqs[0].source.tensors["quantize.embedding.weight"].make() if vqs
                    else read_weights(out / "tokenizer.safetensors")["quantize.embedding.weight"])
        check_table(part, codebook.float())
        files["neighbors"] = part
    if text_encoder is not None:
        check_text_encoder(Path(text_encoder), config)
        settings = replace(settings, text_encoder=str(Path(text_encoder).resolve()))
    return files, configs | {"pipeline": asdict(settings)}


def refuse_left(out: Path, what: str, *files: str) -> None:
    """CheckpointError if the folder has these files, which belong to what is replaced."""
    if left := [str(out / file) for file in files if (out / file).exists()]:
        raise CheckpointError(f"{' and '.join(left)} would stay and belong to the {what} before: give what is to take "
                              f"their place together with the new {what}, or remove them")


def size_said(part: Part, stride: int) -> int | None:
    """The pixels a side that LANTERN's config.json says."""
    if part.kind == "drafter":
        return DRAFTER_SIZES.get(part.source.config.get("input_type"))
    block_size = part.source.config.get("block_size") if part.kind == "gpt" else None
    return math.isqrt(block_size) * stride if isinstance(block_size, int) else None


def check_text_encoder(folder: Path, config: GPTConfig) -> None:
    if config.caption_dim is None:
        raise ValueError("text_encoder must not be given for a class-conditional model: its prompts are class ids")
    try:
        width = json.loads((folder / "config.json").read_text())["d_model"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"text_encoder must be a folder with FLAN-T5-XL as transformers reads it, got {folder}, whose "
                         f"config.json cannot be read: {error!r}") from error
    if width != config.caption_dim:
        raise ValueError(f"text_encoder must have features of width {config.caption_dim}, as the model needs, "
                         f"got {width} in {folder}")


def check_table(part: Part, codebook: Tensor) -> None:
    """CheckpointError unless the table is of this codebook: ids of all its rows, and distances of a sample of them."""
    path, (num_rows, k), V = part.source.path, part.config.shape, len(codebook)
    if num_rows == V:
        table = part.config.make().numpy()
        for first in range(0, V, PIECE):
            piece = table[first: first + PIECE]
            if (low := int(piece.min())) < 0 or int(piece.max()) >= V:
                raise CheckpointError(f"{path} must be a table of ids within 0..{V - 1}, "
                                      f"got {low if low < 0 else int(piece.max())}")
        rows = np.random.default_rng(0).choice(V, min(SAMPLE, V), replace=False)
        ids = torch.from_numpy(table[rows].astype(np.int64))
        if (ids[:, 0].numpy() == rows).all():
            raise CheckpointError(f"{path} must be a table of other codes, but the first column is the code itself: "
                                  "LANTERN's tables leave it out")
        for codes in (codebook, F.normalize(codebook, dim=-1)):
            points = codes[torch.from_numpy(rows)].double()
            listed = torch.stack([(codes[row].double() - point).norm(dim=-1) for row, point in zip(ids, points)])
            nearest = torch.cdist(points, codes.double()).topk(k + 1, largest=False).values[:, 1:]
            if ((listed - nearest).abs() <= 1e-3 * nearest.mean()).all(1).float().mean() > 0.9:
                return
    raise CheckpointError(f"{path} is a table of another codebook: it is {(num_rows, k)}, and its ids are not those of "
                          f"the nearest of the tokenizer's {V} codes")


def plan_mar(parts: list[Part], out: Path, image_size: int | None,
             text_encoder: str | Path | None) -> tuple[dict[str, Part], dict[str, dict]]:
    """The same for MAR."""
    mars, kls = only(parts, "mar", 2), only(parts, "kl")
    if not mars and not (out / "mar.json").exists():
        raise CheckpointError(f"sources must have a MAR, such as checkpoint-last.pth, which {out} has not yet")
    if not kls and not (out / "kl.json").exists():
        raise CheckpointError(f"sources must have MAR's autoencoder, kl16.ckpt, which {out} has not yet")
    if text_encoder is not None:
        raise ValueError("text_encoder must not be given for MAR: its prompts are class ids")
    kl_config = kls[0].config if kls else read_config(out / "kl.json", KLConfig)
    config = mars[0].config if mars else read_config(out / "mar.json", MARConfig)
    pixels = math.isqrt(config.tokens) * kl_config.stride
    if image_size not in (None, pixels):
        raise ValueError(f"image_size must be the MAR's {pixels}, or not be given, got {image_size}")
    if kl_config.z_channels != config.channels:
        raise CheckpointError(f"the autoencoder must have latents of the MAR's {config.channels} numbers, "
                              f"got {kl_config.z_channels}")
    files = dict(zip(("mar", "mar_draft"), mars)) | ({"kl": kls[0]} if kls else {})
    if len(mars) == 2:
        check_draft_config(mars[1].source.path, mars[1].config, config)
    if len(mars) == 1:
        refuse_left(out, "MAR", "mar_draft.safetensors", "mar_draft.json")
    settings = read_settings(out)
    if mars:
        sizes = {(size[0], size[2]): name for name, size in mar.SIZES.items()}
        guidance = MAR_GUIDANCE.get(sizes.get((config.encoder_layers, config.dim)), MAR_GUIDANCE["B"])
        settings = replace(settings, guidance=guidance)
    return files, {file: asdict(part.config) for file, part in files.items()} | {"pipeline": asdict(settings)}


# --- writing ----------------------------------------------------------------------------------------------------------

def write_tensors(path: Path, tensors: dict[str, Lazy], progress: Callable[[int], None]) -> None:
    """A safetensors file, one tensor after the other. (safetensors' own writer takes all of them at once.)"""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # so that each is aligned
    header, start = {}, 0
    for name in order:
        tensor = tensors[name]
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [start, start := start + tensor.num_bytes]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(tensors[name].make().contiguous().reshape(-1).view(torch.uint8).numpy())
            progress(tensors[name].num_bytes)
