"""Put the trained parts together: the package's weights, and a sheet of pictures."""
from pathlib import Path

import click
import numpy as np
from PIL import Image

from specvis.files import locked, write_whole
from specvis.models.llamagen import GPTConfig
from specvis.models.mar import MARConfig
from specvis.models.vq import VQConfig
from specvis.models.words import STYLES
from specvis.pipelines.checkpoint import ModelSettings, load_weights, read_config
from specvis.pipelines.discrete import SHIPPED, Pipeline
from specvis.pipelines.mar import MARPair, Scaling

from .stages import made, runs_option, vocabulary_of

NAMES = ["red heart", "grinning face", "smiling face with sunglasses", "raised fist", "thumbs up", "pirate flag",
         "rainbow flag", "pizza", "red apple", "dog face", "cat face", "soccer ball", "rocket", "sun with face",
         "green circle", "rose"]
MAR_STAGES = ("mar", "mar_draft")


def contact_sheet(pipeline: Pipeline, path: Path) -> None:
    """NAMES across, STYLES down, as `specvis generate` draws them; the n-th name has seed n."""
    sampling = pipeline.sampling(list(range(len(NAMES))))
    rows = []
    for style in STYLES:
        decoded = pipeline.tokens([f"{style} {name}" for name in NAMES], "vanilla", sampling)
        rows.append(np.hstack([np.asarray(picture) for picture in pipeline.pictures(decoded.tokens)]))
    write_whole(path, lambda file: Image.fromarray(np.vstack(rows)).save(file, "PNG", optimize=True))


def save(model: Pipeline | MARPair, runs: Path, weights: Path, **files: str) -> None:
    """Read the parts of a model from the files of the stages, and write them to the folder `weights`."""
    for part, file in files.items():
        load_weights(getattr(model, part), runs / f"{file}.safetensors")
    weights.mkdir(parents=True, exist_ok=True)
    with locked(weights, "weights"):
        model.save(weights)


def export_gpt(runs: Path, weights: Path, sheet: Path) -> None:
    for stage, part in (("eagle", "eagle"), ("small", "gpt")):
        made(runs / stage / f"{part}.safetensors", stage)
    config = read_config(runs / "gpt" / "config.json", GPTConfig)
    vq_config = read_config(made(runs / "tokenizer" / "config.json", "tokenizer"), VQConfig)
    draft_config = read_config(runs / "small" / "config.json", GPTConfig)
    # at temperature 1 most faces are other ones than the prompt says, and hands have no fingers
    pipeline = Pipeline(config, vq_config, vocabulary_of(runs), draft_config, settings=ModelSettings(temperature=0.5))
    save(pipeline, runs, weights, words="gpt/words", gpt="gpt/gpt", eagle="eagle/eagle",
         tokenizer="tokenizer/tokenizer", small="small/gpt")
    contact_sheet(pipeline, sheet)


def export_mar(runs: Path, weights: Path) -> None:
    for stage in MAR_STAGES:
        made(runs / stage / "mar.safetensors", stage.replace("_", "-"))
    configs = [read_config(runs / stage / "config.json", MARConfig) for stage in MAR_STAGES]
    scaling, other = (read_config(runs / stage / "scaling.json", Scaling) for stage in MAR_STAGES)
    if scaling != other:
        raise ValueError("mar and mar-draft must be trained on the same latents, got scales "
                         f"{scaling.scale:.4f} and {other.scale:.4f}")
    vq_config = read_config(made(runs / "tokenizer" / "config.json", "tokenizer"), VQConfig)
    save(MARPair(*configs, vq_config, vocabulary_of(runs), scaling), runs, weights, words="gpt/words",
         tokenizer="tokenizer/tokenizer", mar="mar/mar", mar_draft="mar_draft/mar")


@click.command()
@runs_option
@click.option("--weights", type=click.Path(path_type=Path), default=SHIPPED,
              help="Where the weights go. [default: the package]")
@click.option("--sheet", type=click.Path(path_type=Path), default="benchmarks/results/contact.png", show_default=True,
              help="Where the discrete model's contact sheet goes.")
@click.option("--only", type=click.Choice(["gpt", "mar"]),
              help="The discrete model or the continuous one. [default: both]")
def export(runs, weights, sheet, only):
    """Copy the trained parts to the package, and draw a contact sheet."""
    if only != "mar":
        export_gpt(runs, weights, sheet)
    if only != "gpt":
        export_mar(runs, weights)
