"""Put the trained parts together: the package's weights, and the record of the run."""
import json
import shutil
from pathlib import Path

import click
import matplotlib
import numpy as np
from PIL import Image

from ..checkpoint import load_weights, read_config
from ..compare import PROMPTS
from ..decode import Sampling
from ..methods import METHODS
from ..models.llamagen import GPTConfig
from ..models.vq import VQConfig
from ..pipeline import SHIPPED, Pipeline
from .data import spelled_out, words_of
from .run import made

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  the backend is chosen first: there may be no screen

SHOWN = ["red heart", "grinning face", "smiling face with sunglasses", "raised fist", "thumbs up", "pirate flag",
         "rainbow flag", "pizza", "red apple", "dog face", "cat face", "soccer ball", "rocket", "sun with face",
         "green circle", "rose"]
STYLES = ["fluent-3d", "fluent-flat", "noto"]


def curves(runs: Path, path: Path) -> None:
    """One panel per stage: what its log holds, against steps."""
    figure, panels = plt.subplots(1, 4, figsize=(17, 3.5), constrained_layout=True)
    for panel, (stage, keys) in zip(panels, {"tokenizer": ("psnr",), "gpt": ("loss", "held_out"),
                                            "drafter": ("top1", "top3", "acceptance"),
                                            "small": ("loss", "held_out")}.items()):
        lines = [json.loads(line) for line in (runs / stage / "log.jsonl").read_text().splitlines()]
        for key in keys:
            panel.plot([line["step"] for line in lines], [line[key] for line in lines], label=key)
        panel.set(title=stage, xlabel="step", ylabel={"tokenizer": "dB", "drafter": "share"}.get(stage, "nats"))
        panel.legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def contact_sheet(pipeline: Pipeline, path: Path, temperature: float, guidance: float, top_k: int,
                  top_p: float) -> None:
    """SHOWN across, STYLES down, decoded plainly."""
    rows = []
    for style in STYLES:
        sampling = Sampling.of(list(range(len(SHOWN))), guidance=guidance, temperature=temperature, top_k=top_k,
                               top_p=top_p)
        prompts = [f"{style} {name}" for name in SHOWN]
        rows.append(pipeline.pictures(pipeline.tokens(prompts, METHODS["vanilla"], sampling).tokens))
    side = rows[0][0].width
    sheet = Image.new("RGB", (side * len(SHOWN), side * len(STYLES)), "white")
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            sheet.paste(picture, (x * side, y * side))
    sheet.save(path)


def judged_prompts(pictures: Path, weights: Path, across: int = 8) -> None:
    """prompts.json and prompts.png: PROMPTS and names drawn as training draws them, with their pictures."""
    with np.load(pictures) as data:
        data = dict(data)
    captions = [f"{style} {' '.join(words_of(spelled_out(name, category)))}"
                for style, name, category in zip(*(data[key].tolist() for key in ("styles", "names", "categories")))]
    index = {caption: i for i, caption in enumerate(captions)}
    chances = data["weights"] * ~data["held_out"]
    order = np.random.default_rng(0).choice(len(captions), len(captions) // 2, replace=False, p=chances / chances.sum())
    kept = [index[prompt] for prompt in PROMPTS]
    for i in order:
        if data["names"][i] not in data["names"][kept] and len(captions[i].split()) <= 7 and len(kept) < across ** 2:
            kept.append(i)
    (weights / "prompts.json").write_text(json.dumps([captions[i] for i in kept], indent=1) + "\n")
    shown = data["pictures"][kept]
    sheet = shown.reshape(across, across, *shown.shape[1:]).swapaxes(1, 2).reshape(across * shown.shape[1], -1, 3)
    Image.fromarray(sheet).save(weights / "prompts.png", optimize=True)


@click.command()
@click.option("--runs", type=click.Path(path_type=Path), default="runs", show_default=True,
              help="Folder of the training stages.")
@click.option("--weights", type=click.Path(path_type=Path), default=SHIPPED,
              help="Where the weights go. [default: the package]")
@click.option("--record", type=click.Path(path_type=Path), default="benchmarks/results/training", show_default=True,
              help="Where logs, curves and the contact sheet go.")
@click.option("--guidance", default=1.2, show_default=True)
@click.option("--top-k", default=100, show_default=True)
@click.option("--top-p", default=0.8, show_default=True)
def ship(runs, weights, record, guidance, top_k, top_p):
    """Copy the trained parts to the package, and logs, curves and a contact sheet to the record."""
    for stage, part in (("drafter", "drafter"), ("small", "gpt")):
        made(runs / stage / f"{part}.safetensors", stage)
    record.mkdir(parents=True, exist_ok=True)
    config = read_config(runs / "gpt" / "config.json", GPTConfig)
    vq_config = read_config(runs / "tokenizer" / "config.json", VQConfig)
    small = read_config(runs / "small" / "config.json", GPTConfig)
    pipeline = Pipeline(config, vq_config, json.loads((runs / "data" / "vocabulary.json").read_text()), small)
    for part, file in (("words", "gpt/words"), ("gpt", "gpt/gpt"), ("drafter", "drafter/drafter"),
                       ("tokenizer", "tokenizer/tokenizer"), ("small", "small/gpt")):
        load_weights(getattr(pipeline, part), runs / f"{file}.safetensors")
    pipeline.save(weights)
    judged_prompts(runs / "data" / "pictures.npz", weights)
    for stage in ("tokenizer", "gpt", "drafter", "small"):
        shutil.copyfile(runs / stage / "log.jsonl", record / f"{stage}.jsonl")
    shutil.copyfile(runs / "data" / "manifest.json", record / "data.json")
    shutil.copyfile(runs / "tokenizer" / "reconstructions.png", record / "reconstructions.png")
    curves(runs, record / "curves.png")
    for temperature in (1.0, 0.0):
        contact_sheet(pipeline, record / f"contact_{temperature:g}.png", temperature, guidance, top_k, top_p)
