"""`specvis convert`: a folder for `--model` from published checkpoints."""
from pathlib import Path

import click
import torch
from tqdm import tqdm

from ..models.llamagen import GPTConfig
from ..pipelines.checkpoint import read_config, read_settings
from ..pipelines.convert import IMAGE_SIZES
from ..pipelines.convert import convert as convert_files


@click.command()
@click.argument("sources", nargs=-1, type=click.Path(path_type=Path), metavar="SOURCE...")
@click.option("--out", type=click.Path(path_type=Path), required=True,
              help="Folder to write. What it has already stays.")
@click.option("--image-size", type=int, help="Pixels a side, of LlamaGen's GPT: one of "
              f"{', '.join(map(str, IMAGE_SIZES))}. The name of the published file has it.")
@click.option("--dtype", type=click.Choice(["stored", "float32", "bfloat16", "float16"]), default="stored",
              help="Of the weights in the folder; those of tokenizers stay as they are stored.")
@click.option("--heads", type=click.IntRange(1), help="Attention heads, of a model of no published size.")
@click.option("--text-encoder", type=click.Path(path_type=Path),
              help="Folder with FLAN-T5-XL, which reads the prompts of a text-conditional GPT; it is remembered.")
def convert(sources, out, image_size, dtype, heads, text_encoder):
    """Make a folder for --model from published checkpoints: files, or folders as Hugging Face has them.

    LlamaGen: c2i_*.pt or t2i_*.pt, and vq_ds*.pt. LANTERN: its copy of the GPT, its drafter, its table of neighbors.
    MAR: checkpoint-last.pth and kl16.ckpt. Of two GPTs or two MARs the smaller one drafts. No code in a file is run.
    """
    if not sources:
        raise ValueError("sources must be at least one file or folder, got none")
    with tqdm(unit="B", unit_scale=True, disable=None) as bar:
        def progress(num_bytes, total):
            bar.total = total
            bar.update(num_bytes)

        lines = []
        convert_files(sources, out, image_size=image_size, heads=heads, text_encoder=text_encoder,
                      dtype=None if dtype == "stored" else getattr(torch, dtype), say=lines.append, progress=progress)
    for line in lines:
        click.echo(line)
    click.echo(example(out))


def example(model: Path) -> str:
    """A command that draws with the folder."""
    if (model / "mar.json").exists():
        return f"draw with it: specvis generate --model {model} --prompt 207 --method mar:num_iter=64"
    if read_config(model / "config.json", GPTConfig).caption_dim is None:
        return f"draw with it: specvis generate --model {model} --prompt 207"
    encoder = "" if read_settings(model).text_encoder else " --text-encoder FOLDER_OF_FLAN_T5_XL"
    return f'draw with it: specvis generate --model {model}{encoder} --prompt "a photo of an astronaut riding a horse"'
