"""A folder of pictures, tokenized once, with what a target is conditioned on: captions or classes."""
import csv
import json
import zlib
from functools import partial
from pathlib import Path

import click
import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from tqdm import tqdm

from specvis.files import locked, reading, remove_leftovers, write_json, write_whole
from specvis.pipelines.checkpoint import fingerprint
from specvis.pipelines.discrete import Pipeline
from specvis.pipelines.prompts import Captions, ClassIds
from specvis.terminal import printable

from .gpt import NULL_SHARE
from .run import CHECKPOINT

FORMATS = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
TABLES = ("metadata.jsonl", "metadata.csv", "captions.csv")
HELD_OUT = 0.05  # this share of the pictures, chosen by their names
CHUNK = 256      # pictures whose tokens are kept together
SHOWN = 5        # names in a message


class FolderImages:
    """The pictures in `folder`, as the target's tokenizer encodes them, once: see `Examples` in `eagle.py`. Tokens are
    kept in <run>/tokens. A picture that cannot be read is skipped, with a line that says so."""

    def __init__(self, pipeline: Pipeline, target: Path, folder: Path, run: Path, batch: int, **settings: float):
        """batch: how many are encoded at once, and trained on at a step; settings: of the training, see `begin`

        Raises:
            ValueError: no pictures, captions or classes are missing, a prompt that the target cannot read, no
                tokenizer, or a run of another target or other settings
        """
        if pipeline.tokenizer is None:
            raise ValueError(f"target must have a tokenizer (tokenizer.json, tokenizer.safetensors), got {target}")
        self.pipeline = pipeline
        prompts = prompts_of(folder, pipeline.prompts)
        for prompt, name in {prompt: name for name, prompt in reversed(prompts.items())}.items():
            try:
                pipeline.prompts.encode([prompt])
            except ValueError as error:
                raise ValueError(f"{folder / name}: {error}") from error
        encoder = pipeline.settings.text_encoder if isinstance(pipeline.prompts, Captions) else None
        run.mkdir(parents=True, exist_ok=True)
        with locked(run, "runs"):
            begin(run, target, {"images": str(folder.resolve()), "text_encoder": encoder and fingerprint(Path(encoder)),
                                "batch": batch, **settings})
            tokens = tokenized(pipeline, folder, list(prompts), run / "tokens", batch)
        names = [name for name in prompts if name in tokens]
        if len(names) < 2:
            raise ValueError(f"images must have at least two pictures that can be read, got {len(names)} in {folder}")
        self.prompts = [prompts[name] for name in names]
        self.ids = torch.from_numpy(np.stack([tokens[name] for name in names]).astype(np.int64)).to(pipeline.device)
        chance = np.array([zlib.crc32(name.encode()) for name in names]) / 2 ** 32
        held_out = torch.from_numpy(chance <= max(HELD_OUT, chance.min()))
        if held_out.all():
            held_out[0] = False
        self.train, self.test = (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]

    def draw(self, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.train[torch.randint(len(self.train), (batch,), generator=generator)]
        null = (torch.rand(batch, generator=generator) < NULL_SHARE).to(self.ids.device)
        condition, padding_mask, ids = self.take(rows)
        return (torch.where(null[:, None, None], self.pipeline.gpt.null_condition(batch), condition), padding_mask, ids)

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        source = self.pipeline.source([self.prompts[i] for i in rows.tolist()])
        source = [None if x is None else x.clone() for x in source]  # a text encoder's cannot be kept for gradients
        return *self.pipeline.gpt.condition(*source), self.ids[rows.to(self.ids.device)]

    def hidden(self, images: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return self.pipeline.gpt.teacher_forced(*images[:3])


def begin(run: Path, target: Path, settings: dict) -> None:
    """Note in the run's folder which target it is for, and by which settings.

    ValueError if it is for another target, or goes on from a checkpoint that was trained by other settings.
    """
    note = {"target": str(target.resolve()), "model": fingerprint(target, but=("eagle.safetensors",)), **settings}
    path = run / "target.json"
    old = note
    if path.exists():
        with reading(path, "; choose another --runs"):
            old = json.loads(path.read_text())
            old["model"], old["target"]
    if old["model"] != note["model"]:
        raise ValueError(f"runs must be a folder without a run for another target: {run} is for {old['target']} as it "
                         "was; choose another --runs")
    if (run / CHECKPOINT).exists() and (others := [name for name in settings if old.get(name) != settings[name]]):
        differences = ", ".join(f"{name} was {old.get(name)}, now it is {settings[name]}" for name in others)
        raise ValueError(f"runs must be a folder without a run of other settings: in {run} {differences}; "
                         "choose another --runs")
    write_json(path, note)


def prompts_of(folder: Path, kind) -> dict[str, str]:
    """What each picture in the folder is of, by its name there: a caption, or the number of a class.

    kind: what reads the target's prompts, see `pipelines.prompts`
    """
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix.lower() in FORMATS)
    if not names:
        raise ValueError(f"images must be a folder with pictures ({', '.join(sorted(FORMATS))}), got {folder}")
    prompts = classes_of(folder, names, kind.classes) if isinstance(kind, ClassIds) else captions_of(folder, names)
    missing = [name for name in names if not prompts.get(name, "").strip()]
    if missing:
        how = ("be in folders that are numbers of classes" if isinstance(kind, ClassIds) else
               "have captions, as NAME.txt beside them or as file_name and text in metadata.jsonl or metadata.csv")
        raise ValueError(f"images must {how}; {len(missing)} of {len(names)} do not: {listed(missing)}")
    return prompts


def classes_of(folder: Path, names: list[str], classes: int) -> dict[str, str]:
    """The first folder of each name, if it is a number; as many folders as classes are numbered in their order."""
    folders = sorted({Path(name).parts[0] for name in names if len(Path(name).parts) > 1})
    numbers = {name: str(int(name)) for name in folders if name.isdecimal()}
    if not numbers and len(folders) == classes:  # ImageNet's, as torchvision counts them
        numbers = {name: str(i) for i, name in enumerate(folders)}
    return {name: numbers[Path(name).parts[0]] for name in names if Path(name).parts[0] in numbers}


def captions_of(folder: Path, names: list[str]) -> dict[str, str]:
    table = next((folder / name for name in TABLES if (folder / name).exists()), None)
    if table is None:
        texts = {name: (folder / name).with_suffix(".txt") for name in names}
        return {name: read(text).strip() for name, text in texts.items() if text.exists()}
    lines, captions = read(table).splitlines(), {}
    try:
        rows = list(csv.DictReader(lines)) if table.suffix == ".csv" else [json.loads(x) for x in lines if x.strip()]
        for row in rows:
            captions[row["file_name"]] = row["text"] if "text" in row else row["caption"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"images must have a table with file_name and text in each row, got {table}") from error
    return {name: caption for name in names if isinstance(caption := captions.get(name), str)}


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"images must have captions in UTF-8, got {path}") from error


def tokenized(pipeline: Pipeline, folder: Path, names: list[str], cache: Path, batch: int) -> dict[str, np.ndarray]:
    """The tokens (L,) of each picture that can be read; pictures in the cache are not encoded again."""
    def key(name):
        state = (folder / name).stat()
        return f"{folder.resolve() / name}|{state.st_size}|{state.st_mtime_ns}"

    cache.mkdir(parents=True, exist_ok=True)
    remove_leftovers(cache)
    known, keys, unreadable, number = {}, {name: key(name) for name in names}, [], 0
    for path in sorted(cache.glob("*.npz")):
        number = int(path.stem) + 1
        try:
            with reading(path, "; its pictures are encoded again"), np.load(path) as chunk:
                known.update(zip(chunk["keys"].tolist(), chunk["tokens"]))
        except ValueError as error:
            click.echo(printable(str(error)), err=True)
            path.unlink()
    missing = [name for name in names if keys[name] not in known]
    side = pipeline.gpt.config.grid * pipeline.tokenizer.config.stride
    with tqdm(total=len(missing), unit="picture", desc="tokenize", disable=None if missing else True) as bar:
        for start in range(0, len(missing), CHUNK):
            done, tokens, chunk = [], [], missing[start: start + CHUNK]
            for first in range(0, len(chunk), batch):
                some = [(name, picture) for name in chunk[first: first + batch]
                        if (picture := square(folder / name, side)) is not None]
                unreadable += set(chunk[first: first + batch]) - {name for name, _ in some}
                if some:
                    done += [keys[name] for name, _ in some]
                    tokens.append(encoded(pipeline, np.stack([picture for _, picture in some])))
                bar.update(len(chunk[first: first + batch]))
            if done:
                arrays = {"keys": np.array(done), "tokens": np.concatenate(tokens)}
                write_whole(cache / f"{number:05}.npz", partial(np.savez, **arrays))
                known.update(zip(done, arrays["tokens"]))
                number += 1
    if unreadable:
        click.echo(printable(f"{len(unreadable)} of {len(names)} pictures cannot be read and are left out: "
                             f"{listed(sorted(unreadable))}"), err=True)
    return {name: known[keys[name]] for name in names if keys[name] in known}


def square(path: Path, side: int) -> np.ndarray | None:
    """The middle of a picture, (side, side, 3) uint8, on white; None: it cannot be read."""
    try:
        with Image.open(path) as picture:
            picture = ImageOps.fit(ImageOps.exif_transpose(picture).convert("RGBA"), (side, side),
                                   Image.Resampling.BICUBIC)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    white = Image.new("RGBA", picture.size, "white")
    return np.asarray(Image.alpha_composite(white, picture).convert("RGB"))


@torch.no_grad()
def encoded(pipeline: Pipeline, pictures: np.ndarray) -> np.ndarray:
    """Pictures (B, side, side, 3) uint8 -> tokens (B, L) int32."""
    images = torch.from_numpy(pictures).to(pipeline.device).permute(0, 3, 1, 2).float() / 127.5 - 1
    return pipeline.tokenizer.encode(images).cpu().numpy().astype(np.int32)


def listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", .." if len(names) > SHOWN else "")
