"""`specvis convert`: a folder for `--model` from published checkpoints."""
import math
from pathlib import Path

import click
import torch
from tqdm import tqdm

from ..models.llamagen import GPTConfig
from ..models.mar import MARConfig
from ..models.vq import VQConfig
from ..pipelines.checkpoint import model_type_of, read_config, read_settings
from ..pipelines.convert import IMAGE_SIZES
from ..pipelines.convert import convert as convert_files
from ..pipelines.families import FAMILIES, TOKENIZERS, part_of
from ..pipelines.family_parts import DECODER
from ..pipelines.recognized import of_a_family
from ..pipelines.sources import open_file, open_source
from ..terminal import printable


@click.command()
@click.argument("sources", nargs=-1, type=click.Path(path_type=Path), metavar="SOURCE...")
@click.option("--out", type=click.Path(path_type=Path), required=True,
              help="Folder to write. Parts that it has already stay, except those that are given again.")
@click.option("--image-size", type=int, help="Pixels a side, of LlamaGen's GPT: one of "
              f"{', '.join(map(str, IMAGE_SIZES))}. The name of the published file has it.")
@click.option("--dtype", type=click.Choice(["stored", "float32", "bfloat16", "float16"]), default="stored",
              help="Of the weights in the folder; those of tokenizers stay as they are stored.")
@click.option("--heads", type=click.IntRange(1), help="Attention heads, of a model of no published size.")
@click.option("--text-encoder", type=click.Path(path_type=Path),
              help="Folder with FLAN-T5-XL, which reads the prompts of a text-conditional GPT; it is remembered.")
@click.option("--dry-run", is_flag=True, help="Say what the sources are and what would be written; write nothing.")
def convert(sources, out, image_size, dtype, heads, text_encoder, dry_run):
    """Make a folder for --model from published checkpoints.

    They are files, or folders as Hugging Face has them. LlamaGen: c2i_*.pt or t2i_*.pt, and vq_ds*.pt. LANTERN: its
    copy of the GPT, its draft model, its table of neighbors. MAR: checkpoint-last.pth and kl16.ckpt. Of two GPTs or two
    MARs the smaller one drafts. No code in a file is run.
    """
    if not sources:
        raise ValueError("sources must be at least one file or folder, got none")
    with tqdm(unit="B", unit_scale=True, disable=None) as bar:
        def progress(num_bytes, total):
            bar.total = total
            bar.update(num_bytes)

        lines = []
        convert_files(sources, out, image_size=image_size, heads=heads, text_encoder=text_encoder, dry_run=dry_run,
                      dtype=None if dtype == "stored" else getattr(torch, dtype), say=lines.append, progress=progress)
    for line in lines:
        click.echo(printable(line))
    if not dry_run:
        click.echo(example(out))


def example(model: Path) -> str:
    """A command that draws with the folder."""
    if (model / "vocabulary.json").exists():
        return f'draw with it: specvis generate --model {model} --prompt "red heart"'
    if (model / "mar.json").exists():
        return f"draw with it: specvis generate --model {model} --prompt 207 --method mar:num_iter=64"
    if read_config(model / "config.json", GPTConfig).caption_dim is None:
        return f"draw with it: specvis generate --model {model} --prompt 207"
    encoder = "" if read_settings(model).text_encoder else " --text-encoder FOLDER_OF_FLAN_T5_XL"
    return f'draw with it: specvis generate --model {model}{encoder} --prompt "a photo of an astronaut riding a horse"'


def described_of_family(path: Path) -> list[str]:
    """What a file or folder of one of transformers' families is, in lines."""
    source, model_type = open_source(part_of(path, 0)), model_type_of(path)
    tensors, (option, what) = source.tensors, of_a_family(source) or ("", "")
    if not option:
        raise ValueError("model must be a folder that specvis convert makes, or a model, EAGLE head or VQ-GAN of one "
                         f"of transformers' families, got {path}")
    families = [name for name, family in FAMILIES.items() if family.model_type == model_type or option == "--vq"
                and family.model_type == "chameleon"] or ["NAME"]
    lines = [what, f"option: --family {' or '.join(families)} {option} {path}"]
    if option == "--model":
        tokenizers = [name for name in TOKENIZERS if (part_of(path, 1) / name).exists()]
        lines.append(f"prompts: read by {', '.join(tokenizers)}" if tokenizers else
                     f"prompts: lacks a tokenizer, {' or '.join(TOKENIZERS)}")
        if model_type == "chameleon":
            lines.append("pixels: by the model's own decoder" if any(map(DECODER.match, tensors)) else
                         "pixels: lacks a decoder of codes, --vq vqgan.ckpt")
    dtypes, count = {str(t.dtype)[6:] for t in tensors.values()}, sum(math.prod(t.shape) for t in tensors.values())
    return [*lines, f"{count / 1e6:.1f} million numbers, {' and '.join(sorted(dtypes))}"]


def described(model: Path) -> list[str]:
    """What a folder holds, in lines."""
    lines, settings = [], read_settings(model)
    heads = (model / name for name in ("model.safetensors", "pytorch_model.bin"))
    if model.is_file() or model_type_of(model) or any(file.exists() for file in heads):
        return described_of_family(model)
    if (model / "config.json").exists():
        config, codes = read_config(model / "config.json", GPTConfig), read_config(model / "tokenizer.json", VQConfig)
        lines.append(f"discrete tokens: {config.grid} x {config.grid} of {config.vocabulary} codes, "
                     f"pictures of {config.grid * codes.stride} pixels a side")
        if (model / "vocabulary.json").exists():
            lines.append("prompts: words, see vocabulary.json")
        elif config.caption_dim is None:
            lines.append(f"prompts: class ids, 0..{config.classes - 1}")
        else:
            lines.append(f"prompts: captions, read by {settings.text_encoder or 'the T5 given as --text-encoder'}")
        draft_models = [name for name, file in (("eagle", "eagle"), ("small", "small"))
                    if (model / f"{file}.safetensors").exists()]
        lines.append(f"draft models: {', '.join(draft_models) or 'none; jacobi needs none'}")
    if (model / "mar.json").exists():
        config = read_config(model / "mar.json", MARConfig)
        lines.append(f"continuous tokens: {config.tokens} of {config.channels} numbers")
        lines.append(f"prompts: {'words' if config.classes is None else f'class ids, 0..{config.classes - 1}'}")
        lines.append(f"draft model: {'yes' if (model / 'mar_draft.json').exists() else 'none; mar needs none'}")
    if not lines:
        raise ValueError(f"model must be a folder with config.json or mar.json, got {model}")
    own = {name: value for name, value in vars(settings).items() if value is not None}
    lines.append("drawn with, unless one says otherwise: "
                 + (", ".join(f"{name} {value}" for name, value in own.items()) or "the shipped models' numbers"))
    for path in sorted(model.glob("*.safetensors")):
        tensors = open_file(path).values()
        count, dtypes = sum(math.prod(t.shape) for t in tensors), sorted({str(t.dtype)[6:] for t in tensors})
        lines.append(f"{path.name:24}{count / 1e6:8.1f} million numbers, {' and '.join(dtypes)}")
    return lines
