"""The manifest of a folder of pictures: the settings by which they were drawn, and the pictures that exist.

manifest.jsonl has a line with the settings, then one for each picture, in the order in which they were finished. The
line is written after the picture's file is whole. So after an interruption a command draws the pictures that have no
line, and those whose files have changed.
"""
import json
import math
import os
from html import escape
from pathlib import Path
from urllib.parse import quote

from PIL import Image

from ..files import write_whole
from .many import Picture, PictureRequest, encoded

FILE, PAGE, SHEET = "manifest.jsonl", "index.html", "sheet.png"
SHEET_SIDE = 4096  # pixels a side of the sheet, at most
NOTED = ("folder", "drawn_by")  # no picture depends on these settings
TYPES = {"number": int, "prompt": str, "file": str | None, "bytes": int, "failed": bool}  # fields of a picture's line


class Manifest:
    """The pictures of a folder: `drawn` has the manifest's lines of finished ones, by the indices of their requests."""

    def __init__(self, folder: Path, settings: dict, requests: list[PictureRequest]):
        """Read the folder's manifest, if any. ValueError if it cannot be read, or is of other settings or prompts."""
        self.folder, self.path = folder, folder / FILE
        self.settings = json.loads(json.dumps(settings))
        self.drawn, self.size = {}, 0
        if not self.path.is_file():
            return
        header, *lines = self._read()
        for name, value in self.settings.items():
            if header.get(name) != value and name not in NOTED:
                raise ValueError(f"out must be a folder without pictures of other settings: in {folder} {name} was "
                                 f"{header.get(name)!r}, now it is {value!r}; choose another --out")
        for line in sorted(lines, key=lambda line: line["number"]):
            number, index = line["number"], line["number"] - 1
            prompt = requests[index].prompt if index < len(requests) else None
            if prompt != line["prompt"]:
                raise ValueError(f"prompts must be the prompts of {self.path} in the same order: number {number} was "
                                 f"{line['prompt']!r}, now it is {prompt!r}; choose another --out")
            if self._is_whole(line):
                self.drawn[index] = line

    def _read(self) -> list[dict]:
        text, lines = self.path.read_bytes(), []
        for number, part in enumerate(text.splitlines(keepends=True), 1):
            if not part.endswith(b"\n"):
                break  # the last line was being written
            try:
                lines.append(json.loads(part))
                if not isinstance(lines[-1], dict) or len(lines) > 1 and not is_of_a_picture(lines[-1]):
                    raise ValueError("not a line of a manifest")
            except (ValueError, RecursionError) as error:
                raise ValueError(f"out must have a manifest that can be read, got {self.path}, line {number}; "
                                 "choose another --out") from error
            self.size += len(part)
        if not lines:
            raise ValueError(f"out must have a manifest that can be read, got {self.path}; choose another --out")
        return lines

    def _is_whole(self, line: dict) -> bool:
        if line["failed"]:
            return False
        file = self.folder / line["file"]
        return file.is_file() and file.stat().st_size == line["bytes"]

    def begin(self) -> None:
        """Write the settings if the folder has no manifest yet, and drop a last line that is half written."""
        if self.size:
            os.truncate(self.path, self.size)
        else:
            write_whole(self.path, (json.dumps(self.settings, ensure_ascii=False) + "\n").encode())

    def add(self, picture: Picture, file: str) -> None:
        """Write a picture, then its line."""
        request = picture.request
        if picture.png is not None:
            write_whole(self.folder / file, picture.png)
        line = {"number": request.index + 1, "file": None if picture.failed else file, "prompt": request.prompt,
                "line": request.line, "seed": request.seed, "target_forwards": picture.target_forwards,
                "tau": None if math.isnan(picture.tau) else round(picture.tau, 4), "failed": picture.failed,
                "bytes": 0 if picture.failed else len(picture.png)}
        with open(self.path, "a", encoding="utf-8") as manifest:
            manifest.write(json.dumps(line, ensure_ascii=False) + "\n")
        if not picture.failed:
            self.drawn[request.index] = line

    def write_page(self) -> None:
        """Write index.html, which shows the pictures and what is known of each, and sheet.png, all of them in one."""
        lines = [self.drawn[index] for index in sorted(self.drawn)]
        figures = [f'<figure><img src="{quote(line["file"])}" loading="lazy"><figcaption>{escape(line["prompt"])}<br>'
                   + escape(f'seed {line.get("seed")}, {line.get("target_forwards")} forwards, tau {line.get("tau")}') +
                   '</figcaption></figure>' for line in lines]
        write_whole(self.folder / PAGE, "\n".join([
            '<!DOCTYPE html><meta charset="utf-8"><title>specvis</title>', '<style>figure { display: inline-block; '
            'width: 256px; margin: 8px; vertical-align: top; font: 14px sans-serif } img { width: 100% }</style>',
            f'<p>by {escape(str(self.settings.get("drawn_by")))} (<a href="{SHEET}">sheet</a>, '
            f'<a href="{FILE}">manifest</a>)</p>', *figures]) + "\n")
        columns = math.ceil(math.sqrt(len(lines)))
        for i, line in enumerate(lines):
            with Image.open(self.folder / line["file"]) as picture:
                if i == 0:
                    side = min(picture.width, SHEET_SIDE // columns)
                    sheet = Image.new("RGB", (columns * side, -(-len(lines) // columns) * side), "white")
                sheet.paste(picture.resize((side, side)), (i % columns * side, i // columns * side))
        write_whole(self.folder / SHEET, encoded(sheet))


def is_of_a_picture(line: dict) -> bool:
    """Whether a line has the fields that `Manifest` reads, in their types."""
    return (all(name in line and isinstance(line[name], kind) for name, kind in TYPES.items())
            and line["number"] >= 1 and line["failed"] == (line["file"] is None))
