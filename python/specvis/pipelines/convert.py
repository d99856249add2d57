"""From published checkpoints to a folder that `Pipeline.load` or `MARPair.load` reads."""
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..decoding.limits import MAX_TOKENS, is_count
from ..files import locked, replacing_together, write_json
from ..models import mar
from ..models.eagle import EagleHead
from ..models.kl_vae import KLConfig
from ..models.llamagen import GPTConfig
from ..models.mar import MARConfig
from ..models.vq import VQConfig
from .checkpoint import CheckpointError, check_draft_config, check_finite, read_config, read_settings, read_weights
from .recognized import Recognized, recognized
from .sources import Lazy, open_source, write_lazy_tensors

IMAGE_SIZES = (256, 384, 512)
SAMPLE = 64          # rows of a table of neighbors that are compared with the codebook
PIECE = 1024         # rows of it that are looked through at once
EAGLE_SIZES = {"t2i": 256, "t2i2": 512}                          # input_type in the config of LANTERN's heads
MAR_GUIDANCE = {"B": 2.9, "L": 3.0, "H": 3.2}                    # the release evaluates with it
CAPTIONS, CLASSES = ({"guidance": 7.5, "top_k": 1000, "top_p": 1.0},  # from LlamaGen's demos
                     {"guidance": 4.0, "top_k": 2000, "top_p": 1.0})


def convert(sources: Iterable[str | Path], out: str | Path, *, image_size: int | None = None,
            dtype: torch.dtype | None = None, heads: int | None = None, text_encoder: str | Path | None = None,
            dry_run: bool = False, say: Callable[[str], None] = lambda line: None,
            progress: Callable[[int, int], None] = lambda num_bytes, total: None) -> None:
    """Write a folder of published checkpoints. Parts that the folder `out` has already stay, unless they are given.

    Args:
        sources:      files or folders: LlamaGen's GPT and tokenizer, LANTERN's copy of the GPT, its draft model and its
            table of neighbors; or MAR and its autoencoder. Of two GPTs or two MARs the smaller one drafts
        image_size:   pixels a side, of a GPT: no tensor's shape says it
        dtype:        weights are written in it, except the tokenizers'; None: as they are stored
        heads:        attention heads, of a GPT or MAR of none of the published sizes
        text_encoder: folder of the T5 that reads prompts, which the folder remembers
        dry_run:      write nothing. Of the numbers only those of a table and its codebook are read
        say:          called with a line for each source: what it is, and where it went; and first with what was
            taken of a source that has more than one model needs
        progress:     called with how many bytes were just written, and how many there are in all
    Raises:
        CheckpointError: a source that cannot be read without running code, is of no known model, lacks tensors, or has
            numbers that are not finite, or are not in dtype; or sources that do not belong together
        ValueError:      image_size or text_encoder is missing where it is needed, or is wrong; or heads that a model of
            a published size does not have; or an image_size other than that in a GPT's name
    """
    out = Path(out)
    if image_size is not None and image_size not in IMAGE_SIZES:
        raise ValueError(f"image_size must be one of {', '.join(map(str, IMAGE_SIZES))}, got {image_size}")
    parts = sorted((recognized(open_source(Path(path), say), heads, say) for path in sources),
                   key=lambda part: -part.size)
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
    files, configs = (plan_mar if of_mar else plan_llamagen)(parts, out, image_size, text_encoder)

    weights = {file: {name: finite(part, name, None if part.kind in ("vq", "kl", "table") else dtype)
                      for name in part.source.tensors} for file, part in files.items()}
    total = sum(tensor.num_bytes for tensors in weights.values() for tensor in tensors.values())
    lines = []
    for file, tensors in weights.items():
        dtypes = " and ".join(sorted({str(tensor.dtype)[6:] for tensor in tensors.values()}))
        goal = out / f"{file}.safetensors"
        lines.append(f"{files[file].source.path}: {files[file].name}, {dtypes} -> {goal}"
                     + (", in place of the one before" if goal.exists() else ""))
    if dry_run:
        lines.append(f"nothing was written; {total / 1e6:.1f} MB would be, and "
                     + ", ".join(f"{name}.json" for name in configs))
    else:
        write(out, weights, configs, lambda num_bytes: progress(num_bytes, total))
    for line in lines:
        say(line)


def write(out: Path, weights: dict[str, dict[str, Lazy]], configs: dict[str, dict],
          progress: Callable[[int], None]) -> None:
    """The files of a folder, all of them or none."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"out must be a folder that can be made, got {out}: {error.strerror}") from error
    with locked(out), replacing_together(out, last="mar.json" if "mar" in configs else "config.json") as new:
        for file, tensors in weights.items():
            write_lazy_tensors(new / f"{file}.safetensors", tensors, progress)
        for file, values in configs.items():
            write_json(new / f"{file}.json", values)


def finite(part: Recognized, name: str, dtype: torch.dtype | None = None) -> Lazy:
    """A part's tensor in another dtype; None: as it is. CheckpointError when it is made and has numbers not finite."""
    tensor, path = part.source.tensors[name], part.source.path

    def make():
        value = tensor.make()
        check_finite(path, name, value.float() if value.dtype == torch.float64 else value)  # models are read in float32
        if dtype not in (None, value.dtype):
            stored, value = str(value.dtype)[6:], value.to(dtype)
            check_finite(path, name, value, f"; dtype must hold them, as that of the file does, {stored}")
        return value
    return Lazy(tensor.shape, dtype or tensor.dtype, make)


def only(parts: list[Recognized], kind: str, limit: int = 1) -> list[Recognized]:
    """The parts of a kind. CheckpointError if there are more than `limit`."""
    found = [part for part in parts if part.kind == kind]
    if len(found) > limit:
        raise CheckpointError(f"sources must have at most {limit} of a kind, got "
                              f"{', '.join(f'{part.source.path} ({part.name})' for part in found)}")
    return found


def plan_llamagen(parts: list[Recognized], out: Path, image_size: int | None,
                  text_encoder: str | Path | None) -> tuple[dict[str, Recognized], dict[str, dict]]:
    """Which part goes into which file, and what the files of numbers hold."""
    gpts, vqs = only(parts, "gpt", 2), only(parts, "vq")
    heads, tables = only(parts, "eagle"), only(parts, "table")
    if not vqs and not (out / "tokenizer.json").exists():
        raise CheckpointError(f"sources must have the GPT's tokenizer, such as vq_ds16_c2i.pt, which {out} has not yet")
    if not gpts and not (out / "config.json").exists():
        raise CheckpointError(f"sources must have a GPT, such as c2i_B_384.pt, which {out} has not yet")
    vq_config = vqs[0].config if vqs else read_config(out / "tokenizer.json", VQConfig)
    settings, files, configs = read_settings(out), {}, {}
    said = {part.source.path: size for part in parts if (size := size_said(part, vq_config.stride))}
    if gpts:
        named = {path: sizes for part in gpts if (sizes := sizes_named(path := part.source.path)) and path not in said}
        image_size = image_size or next(iter(said.values()), None)
        if image_size is None:
            hint = "".join(f"; the name {path.name} says {sizes[0]}" for path, sizes in named.items())
            raise ValueError(f"image_size must be given, one of {', '.join(map(str, IMAGE_SIZES))}: no tensor of "
                             f"LlamaGen's depends on it (the published files have it in their names{hint})")
        for path, sizes in named.items():
            if image_size not in sizes:
                raise ValueError(f"image_size must be {sizes[0]}, as the name of {path} says, got {image_size}; rename "
                                 "the file if its name is wrong")
        configs_of = [replace(part.config, grid=image_size // vq_config.stride) for part in gpts]
        config = configs_of[0]
        settings = replace(settings, **(CLASSES if config.caption_dim is None else CAPTIONS))
        files["gpt"], configs["config"] = gpts[0], asdict(config)
        if len(gpts) == 2:
            check_draft_config(gpts[1].source.path, configs_of[1], config)
            files["small"], configs["small"] = gpts[1], asdict(configs_of[1])
        if not heads:
            refuse_left(out, "GPT", "eagle.safetensors")
        if len(gpts) == 1:
            refuse_left(out, "GPT", "small.safetensors", "small.json")
    else:
        config = read_config(out / "config.json", GPTConfig)
        said[out / "config.json"] = config.grid * vq_config.stride
    for path, size in said.items():
        if size != (pixels := image_size or config.grid * vq_config.stride):
            raise CheckpointError(f"{path} is for pictures of {size} pixels, not of {pixels}")
    if vq_config.codebook_size != config.vocabulary:
        raise CheckpointError(f"the tokenizer must have the GPT's {config.vocabulary} codes, "
                              f"got {vq_config.codebook_size}")
    if vqs and not tables:
        refuse_left(out, "tokenizer", "neighbors.safetensors")
    if vqs:
        files["tokenizer"], configs["tokenizer"] = vqs[0], asdict(vq_config)
    for part in heads:
        part.check(lambda: EagleHead(config))
        files["eagle"] = part
    for part in tables:
        codebook = (finite(vqs[0], "quantize.embedding.weight").make() if vqs
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


def size_said(part: Recognized, stride: int) -> int | None:
    """The pixels a side that LANTERN's config.json says."""
    if part.kind == "eagle":
        return EAGLE_SIZES.get(str(part.source.config.get("input_type")))
    block_size = part.source.config.get("block_size") if part.kind == "gpt" else None
    return math.isqrt(block_size) * stride if is_count(block_size, 1, MAX_TOKENS) else None


def sizes_named(path: Path) -> list[int]:
    """The pixels a side that a file's name says, as c2i_B_384.pt."""
    sizes = "|".join(map(str, IMAGE_SIZES))
    return [int(size) for size in re.findall(rf"[_-]({sizes})(?:px)?(?![0-9a-wyz])", path.name)]


def check_text_encoder(folder: Path, config: GPTConfig) -> None:
    if config.caption_dim is None:
        raise ValueError("text_encoder must not be given for a class-conditional model: its prompts are class ids")
    try:
        width = json.loads((folder / "config.json").read_text("utf-8"))["d_model"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"text_encoder must be a folder with FLAN-T5-XL as transformers reads it, got {folder}, whose "
                         f"config.json cannot be read: {error!r}") from error
    if width != config.caption_dim:
        raise ValueError(f"text_encoder must have features of width {config.caption_dim}, as the model needs, "
                         f"got {width} in {folder}")


def check_table(part: Recognized, codebook: Tensor) -> None:
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


def plan_mar(parts: list[Recognized], out: Path, image_size: int | None,
             text_encoder: str | Path | None) -> tuple[dict[str, Recognized], dict[str, dict]]:
    """`plan_llamagen` for MAR."""
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
    elif mars:
        refuse_left(out, "MAR", "mar_draft.safetensors", "mar_draft.json")
    settings = read_settings(out)
    if mars:
        sizes = {(size[0], size[2]): name for name, size in mar.SIZES.items()}
        size = sizes.get((config.encoder_layers, config.dim), "B")
        settings = replace(settings, guidance=MAR_GUIDANCE[size])
    return files, {file: asdict(part.config) for file, part in files.items()} | {"pipeline": asdict(settings)}
