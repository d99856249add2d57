"""Put the trained parts together: the package's weights, and the record of the run."""
import json
from collections.abc import Iterable
from pathlib import Path

import click
import numpy as np
import torch
from PIL import Image

from specvis.cli.options import CONTINUOUS_GUIDANCE, FILTERS, PROMPTS
from specvis.decoding.continuous import parallel_decode
from specvis.decoding.continuous_state import ContinuousSampling
from specvis.decoding.methods import METHODS
from specvis.decoding.sampling import Sampling
from specvis.files import locked, write_json, write_whole
from specvis.models.llamagen import GPTConfig
from specvis.models.mar import MAR, MARConfig
from specvis.models.vq import VQConfig
from specvis.models.words import STYLES
from specvis.pipelines.checkpoint import load_weights, read_config
from specvis.pipelines.discrete import SHIPPED, Pipeline
from specvis.pipelines.mar import MARPair, Scaling
from specvis.study.plots import plt, save_figure

from .data import spelled_out, words_of
from .stages import arrays_of, made, runs_option, vocabulary_of

NAMES = ["red heart", "grinning face", "smiling face with sunglasses", "raised fist", "thumbs up", "pirate flag",
         "rainbow flag", "pizza", "red apple", "dog face", "cat face", "soccer ball", "rocket", "sun with face",
         "green circle", "rose"]
MAR_FORWARDS = 32  # target forwards of a picture of the continuous models' contact sheets
CURVES = {  # stage: what is drawn of its log, in which unit
    "tokenizer": (("psnr",), "dB"), "gpt": (("loss", "held_out"), "nats"),
    "eagle": (("top1", "top3", "acceptance"), "share"), "small": (("loss", "held_out"), "nats"),
}
MAR_CURVES = {
    "mar": (("noise", "held_out"), "squared error of the noise"),
    "mar_draft": (("noise", "held_out"), "squared error of the noise"),
}


def copy(source: Path, path: Path) -> None:
    write_whole(path, source.read_bytes())


def keep_logs(runs: Path, record: Path, stages: Iterable[str]) -> None:
    """Copy the stages' logs, and the tokenizer's picture. One that was kept has neither: the record has its own."""
    for stage in stages:
        if stage != "tokenizer":
            copy(made(runs / stage / "log.jsonl", stage.replace("_", "-")), record / f"{stage}.jsonl")
        elif (runs / stage / "log.jsonl").exists():
            copy(runs / stage / "log.jsonl", record / f"{stage}.jsonl")
            copy(runs / stage / "reconstructions.png", record / "reconstructions.png")


def curves(record: Path, path: Path, drawn: dict[str, tuple[tuple[str, ...], str]]) -> None:
    """Draw a panel for each stage that has a log: numbers of it, by step."""
    drawn = {stage: numbers for stage, numbers in drawn.items() if (record / f"{stage}.jsonl").exists()}
    figure, panels = plt.subplots(1, len(drawn), figsize=(4.25 * len(drawn), 3.5), constrained_layout=True)
    for panel, (stage, (keys, unit)) in zip(panels, drawn.items()):
        lines = [json.loads(line) for line in (record / f"{stage}.jsonl").read_text().splitlines()]
        lines = [line for line in lines if "lr" in line]  # not the lines of the end, which are of more pictures
        for key in keys:
            panel.plot([line["step"] for line in lines], [line[key] for line in lines], label=key)
        panel.set(title=stage, xlabel="step", ylabel=unit)
        panel.legend()
    save_figure(figure, path)


def tiled(rows: list[list[Image.Image]]) -> Image.Image:
    """One picture of rows of pictures, which all have the same size."""
    side = rows[0][0].width
    sheet = Image.new("RGB", (side * len(rows[0]), side * len(rows)), "white")
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            sheet.paste(picture, (x * side, y * side))
    return sheet


def contact_sheet(pipeline: Pipeline, path: Path, temperature: float) -> None:
    """NAMES across, STYLES down, by the method vanilla."""
    rows = []
    for style in STYLES:
        sampling = Sampling.of(list(range(len(NAMES))), temperature=temperature, **FILTERS)
        prompts = [f"{style} {name}" for name in NAMES]
        rows.append(pipeline.pictures(pipeline.tokens(prompts, METHODS["vanilla"], sampling).tokens))
    write_whole(path, lambda file: tiled(rows).save(file, "PNG"))


def mar_contact_sheet(pair: MARPair, mar: MAR, path: Path) -> None:
    """NAMES across, STYLES down, by MAR's own decoding; the same orders and noise for any model."""
    rows = []
    for i, style in enumerate(STYLES):
        sampling = ContinuousSampling(len(NAMES) * i + torch.arange(len(NAMES)), CONTINUOUS_GUIDANCE)
        features = pair.features([f"{style} {name}" for name in NAMES])
        rows.append(pair.pictures(parallel_decode(mar, features, sampling, MAR_FORWARDS).tokens))
    write_whole(path, lambda file: tiled(rows).save(file, "PNG"))


def write_reference_prompts(path: Path, weights: Path, across: int = 8) -> None:
    """Write prompts.json and prompts.png: PROMPTS, and prompts drawn as training draws them, with their pictures."""
    data = arrays_of(path, "data", "styles", "names", "categories", "weights", "held_out", "pictures")
    captions = [f"{style} {' '.join(words_of(spelled_out(name, category)))}"
                for style, name, category in zip(*(data[key].tolist() for key in ("styles", "names", "categories")))]
    index = {caption: i for i, caption in enumerate(captions)}
    chances = data["weights"] * ~data["held_out"]
    order = np.random.default_rng(0).choice(len(captions), len(captions) // 2, replace=False, p=chances / chances.sum())
    rows = [index[prompt] for prompt in PROMPTS]
    for i in order:
        if data["names"][i] not in data["names"][rows] and len(captions[i].split()) <= 7 and len(rows) < across ** 2:
            rows.append(i)
    write_json(weights / "prompts.json", [captions[i] for i in rows])
    pictures = data["pictures"][rows]
    side = pictures.shape[1]
    sheet = pictures.reshape(across, across, side, side, 3).swapaxes(1, 2).reshape(across * side, across * side, 3)
    write_whole(weights / "prompts.png", lambda file: Image.fromarray(sheet).save(file, "PNG", optimize=True))


def export_gpt(runs: Path, weights: Path, record: Path) -> None:
    for stage, part in (("eagle", "eagle"), ("small", "gpt")):
        made(runs / stage / f"{part}.safetensors", stage)
    record.mkdir(parents=True, exist_ok=True)
    config = read_config(runs / "gpt" / "config.json", GPTConfig)
    vq_config = read_config(made(runs / "tokenizer" / "config.json", "tokenizer"), VQConfig)
    draft_config = read_config(runs / "small" / "config.json", GPTConfig)
    pipeline = Pipeline(config, vq_config, vocabulary_of(runs), draft_config)
    for part, file in (("words", "gpt/words"), ("gpt", "gpt/gpt"), ("eagle", "eagle/eagle"),
                       ("tokenizer", "tokenizer/tokenizer"), ("small", "small/gpt")):
        load_weights(getattr(pipeline, part), runs / f"{file}.safetensors")
    weights.mkdir(parents=True, exist_ok=True)
    with locked(weights, "weights"):
        pipeline.save(weights)
        write_reference_prompts(runs / "data" / "pictures.npz", weights)
    keep_logs(runs, record, CURVES)
    copy(made(runs / "data" / "manifest.json", "data"), record / "data.json")
    curves(record, record / "curves.png", CURVES)
    for temperature in (1.0, 0.5, 0.0):
        contact_sheet(pipeline, record / f"contact_{temperature:g}.png", temperature)


def export_mar(runs: Path, weights: Path, record: Path) -> None:
    for stage in MAR_CURVES:
        made(runs / stage / "mar.safetensors", stage.replace("_", "-"))
    record.mkdir(parents=True, exist_ok=True)
    configs = [read_config(runs / stage / "config.json", MARConfig) for stage in MAR_CURVES]
    scaling, other = (read_config(runs / stage / "scaling.json", Scaling) for stage in MAR_CURVES)
    if scaling != other:
        raise ValueError("mar and mar-draft must be trained on the same latents, got scales "
                         f"{scaling.scale:.4f} and {other.scale:.4f}")
    vq_config = read_config(made(runs / "tokenizer" / "config.json", "tokenizer"), VQConfig)
    pair = MARPair(*configs, vq_config, vocabulary_of(runs), scaling)
    for part, file in (("words", "gpt/words"), ("tokenizer", "tokenizer/tokenizer"), ("mar", "mar/mar"),
                       ("mar_draft", "mar_draft/mar")):
        load_weights(getattr(pair, part), runs / f"{file}.safetensors")
    weights.mkdir(parents=True, exist_ok=True)
    with locked(weights, "weights"):
        pair.save(weights)
    keep_logs(runs, record, MAR_CURVES)
    for stage in MAR_CURVES:
        mar_contact_sheet(pair, getattr(pair, stage), record / f"contact_{stage}.png")
    curves(record, record / "curves_mar.png", MAR_CURVES)


@click.command()
@runs_option
@click.option("--weights", type=click.Path(path_type=Path), default=SHIPPED,
              help="Where the weights go. [default: the package]")
@click.option("--record", type=click.Path(path_type=Path), default="benchmarks/results/training", show_default=True,
              help="Where logs, curves and the contact sheet go.")
@click.option("--only", type=click.Choice(["gpt", "mar"]),
              help="The discrete model or the continuous one. [default: both]")
def export(runs, weights, record, only):
    """Copy the trained parts to the package, and logs, curves and contact sheets to the record."""
    if only != "mar":
        export_gpt(runs, weights, record)
    if only != "gpt":
        export_mar(runs, weights, record)
