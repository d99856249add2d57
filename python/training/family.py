"""What an EAGLE head for one of transformers' families learns from: pictures that the target draws of prompts.

Tokens and hidden states are kept in shards, of some pictures each: after an interruption the missing ones are made.
"""
import zlib
from copy import copy
from pathlib import Path

import click
import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from specvis.cli.generate import read_prompts
from specvis.files import locked, reading, remove_leftovers, write_tensors
from specvis.models.interface import has_guidance
from specvis.models.transformers import ImageModel
from specvis.pipelines.families import FamilyPipeline
from specvis.terminal import printable

from .gpt import NULL_SHARE
from .images import HELD_OUT, begin

SHARD = 8  # pictures; each is about 10 MB of a 7B model
WITH_NULL = 4  # one picture in so many has hidden states of the unconditional prompt, too


class FamilyImages:
    """The target's pictures of the prompts in a file, each drawn once. See `Examples` in `eagle.py`."""

    def __init__(self, pipeline: FamilyPipeline, target: Path, file: Path, run: Path, batch: int, **settings: float):
        """batch: how many are drawn at once, and trained on at a step; settings: of the training, see `begin`

        Raises:
            ValueError: fewer than two prompts, one that is too long, or a run of another target or other settings
        """
        prompts = list(dict.fromkeys(read_prompts(file).values()))
        if len(prompts) < 2:
            raise ValueError(f"prompts must be a file with at least two prompts, got {len(prompts)} in {file}")
        ids = pipeline.prompts.encode(prompts)
        self.target = pipeline.gpt = shortened(pipeline.gpt, max(map(len, ids)))
        self.prompt_ids, self.padding_masks = self.target.padded(ids)
        drawn = zlib.crc32(repr((pipeline.name, self.target.grid, self.target.prefix_len, prompts)).encode())
        run.mkdir(parents=True, exist_ok=True)
        with locked(run, "runs"):
            begin(run, target, {"drawn": drawn, "batch": batch, **settings})
            self.shards = self.made(pipeline, prompts, run / "draws" / f"{drawn:08x}", batch)
        chance = torch.tensor([zlib.crc32(prompt.encode()) for prompt in prompts]) / 2 ** 32
        held_out = chance <= max(HELD_OUT, chance.min().item())
        if held_out.all():
            held_out[0] = False
        self.train, self.test = (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]
        self.train_null = self.train[self.train % WITH_NULL == 0] if has_guidance(self.target) else self.train[:0]

    def draw(self, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        is_null = torch.rand(batch, generator=generator) < (NULL_SHARE if len(self.train_null) else 0)
        rows = [(some := self.train_null if null else self.train)[torch.randint(len(some), (), generator=generator)]
                for null in is_null.tolist()]
        return self.take(torch.stack(rows), is_null)

    def take(self, rows: Tensor, is_null: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The fields of `Images` of pictures with these numbers; where `is_null`, of the unconditional prompt."""
        is_null = (torch.zeros(len(rows), dtype=torch.bool) if is_null is None else is_null).to(self.target.device)
        condition, mask = self.condition(rows)
        ids, hidden = zip(*(self.read(*pair) for pair in zip(rows.tolist(), is_null.tolist())))
        if is_null.any():
            null, null_mask = self.target.null_inputs(mask)
            condition = torch.where(is_null[:, None, None], null, condition)
            mask = torch.where(is_null[:, None], null_mask, mask)
        return condition, mask, torch.stack(ids).to(mask.device).long(), torch.stack(hidden).to(mask.device)

    def condition(self, rows: Tensor | list[int]) -> tuple[Tensor, Tensor]:
        """Embeddings (n, S, dim) and padding masks (n, S) of prompts with these numbers."""
        return self.target.embed(self.prompt_ids[rows]), self.padding_masks[rows]

    def read(self, number: int, is_null: bool) -> tuple[Tensor, Tensor]:
        """A picture's tokens (L,), and the target's hidden states (S - 1 + L, dim)."""
        path, row = self.shards[number // SHARD], number % SHARD
        with reading(path, "; remove it, and it is made again"), safe_open(path, "pt") as file:
            name, at = ("null_hidden", row // WITH_NULL) if is_null else ("hidden", row)
            return file.get_slice("ids")[row], file.get_slice(name)[at]

    @torch.no_grad()
    def made(self, pipeline: FamilyPipeline, prompts: list[str], folder: Path, batch: int) -> list[Path]:
        """The files of all pictures; those that are missing are made, pictures of SHARD prompts each."""
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        shards = [list(range(len(prompts)))[start: start + SHARD] for start in range(0, len(prompts), SHARD)]
        paths = [folder / f"{number:05}.safetensors" for number in range(len(shards))]
        missing = [(path, rows) for path, rows in zip(paths, shards) if not path.exists()]
        num_missing = sum(len(rows) for _, rows in missing)
        with tqdm(total=len(prompts), initial=len(prompts) - num_missing, unit="picture", desc="draw",
                  disable=None if missing else True) as bar:
            for path, rows in missing:
                write_tensors(path, self.shard(pipeline, prompts, rows, batch))
                bar.update(len(rows))
                if bar.disable:
                    click.echo(printable(f"draw: {rows[-1] + 1} of {len(prompts)} pictures"), err=True)
        return paths

    def shard(self, pipeline: FamilyPipeline, prompts: list[str], rows: list[int], batch: int) -> dict[str, Tensor]:
        """Tokens and hidden states of pictures of these prompts, and for some of them of the unconditional prompt."""
        def states(condition, mask, tokens):
            return torch.cat([self.target.teacher_forced(*some) for some in zip(
                condition.split(batch), mask.split(batch), tokens.split(batch))]).cpu()

        some = [prompts[row] for row in rows]
        decoded = pipeline.tokens(some, "jacobi", pipeline.sampling(rows), batch=batch)
        if decoded.failed.any():
            raise ValueError(f"target must draw whole pictures, got logits that are not finite for {some}")
        found = {"ids": decoded.tokens.int().cpu(), "hidden": states(*self.condition(rows), decoded.tokens)}
        if has_guidance(self.target):
            null = self.target.null_inputs(self.padding_masks[rows][::WITH_NULL])
            found["null_hidden"] = states(*null, decoded.tokens[::WITH_NULL])
        return found


def shortened(target: ImageModel, prefix_len: int) -> ImageModel:
    """The target for prompts of at most so many ids, or of as many as its unconditional prompt has."""
    other, (ids, is_real) = copy(target), target.null_prompt
    other.prefix_len = prefix_len = max(prefix_len, int(is_real.sum()))
    other.null_prompt = ids[:, -prefix_len:], is_real[:, -prefix_len:]
    return other
