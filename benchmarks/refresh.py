"""Where does a correction matter?   python -m benchmarks.refresh [--windows ..] [--pictures N] [--json FILE]

Jacobi decoding of the shipped model, whose guesses are refreshed between two forwards of the target: by which rule,
by which model, how often. Nothing is timed. What counts are tokens per forward of the target, over pictures of 16
settings: the demo's prompts and others, temperature 1 and 0.7, guidance 1.2 and 2, with filters (top-k 100, top-p 0.8)
and without. A gain is of the mean over all pictures, with a bootstrap interval of 95 %; seconds follow the sum of
forwards, whose gain is smaller: hard pictures count more in it. All rows have the same pictures.

Let d be the target's own draw at a position, x the small model's draw before the forward of the target, y its draw
after it, all by the position's noise. The rules:

    logits     drawn from the target's logits and TRUST times the change of the small model's (decoding/refresh.py)
    changed    y where it is not x, and else d
    credible   the same, where x was d, and else d
    sure       the same, where y is ahead of d by more than 1 in the small model's logits and noise, and else d
    unsure     the same, where d is ahead of y by less than 1 in the target's logits and noise, and else d

At a position that the target has not read, all take y; "row above" takes what the target drew there a row earlier.

On a CPU a row takes some minutes for each window. With --json rows are kept, and a run that is begun again goes on.
"""
import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.tables import markdown
from specvis.cli.options import PROMPTS
from specvis.cli.plots import curve_styles, plt
from specvis.decoding import jacobi, refresh
from specvis.decoding.batch_state import model_rows
from specvis.decoding.draft_model import EagleDraftModel, SmallDraftModel
from specvis.decoding.methods import METHODS
from specvis.decoding.sampling import Sampling, cfg_inputs, repeat_for_cfg, split_rows, take_nodes
from specvis.models.llamagen import GPT
from specvis.pipelines.discrete import Pipeline
from specvis_kernels import gumbel_noise

OTHERS = ["noto rooster", "fluent-3d axe", "noto luggage", "fluent-3d chestnut", "fluent-3d cat face", "noto banana",
          "fluent-flat rocket", "noto umbrella"]
LEVELS = {"prompts": {"the demo's": PROMPTS, "others": OTHERS}, "temperature": {"1": 1.0, "0.7": 0.7},
          "guidance": {"1.2": 1.2, "2": 2.0}, "filters": {"with": (100, 0.8), "without": (0, 1.0)}}
SETTINGS = list(product(*(levels.values() for levels in LEVELS.values())))
AT_ONCE = {"cpu": 16, "cuda": 64}  # pictures that are decoded together


@dataclass(frozen=True)
class Row:
    """A row of the table: which model refreshes the guesses, how often, and by which rule."""

    refreshes: int
    rule: str = "logits"
    draft_model: str = "small"  # or "EAGLE", or how many of the target's first layers
    trust: float = refresh.TRUST
    new: str = "small"          # what new positions get; or "row above"

    @property
    def name(self) -> str:
        if not self.refreshes:
            return "no refresh"
        parts = [self.rule, *([f"TRUST {self.trust:g}"] if self.trust != refresh.TRUST else []),
                 *(["new positions: row above"] if self.new != "small" else [])]
        return ", ".join(parts)

    @property
    def model(self) -> str:
        if not self.refreshes:
            return "-"
        return {"small": "small GPT", "EAGLE": "EAGLE's head"}.get(
            self.draft_model, f"the target's first {self.draft_model} layers")


ROWS = [Row(0), *map(Row, (1, 2, 3, 4, 8)), *(Row(3, trust=trust) for trust in (0.3, 1.0)), Row(3, new="row above"),
        *(Row(n, rule) for rule in ("changed", "credible", "sure", "unsure") for n in (3, 8)),
        *(Row(n, draft_model="EAGLE") for n in (1, 3)),
        *(Row(3, draft_model=n, new="row above") for n in ("2", "6"))]
SHIPPED = [row for row in ROWS if row == Row(row.refreshes)]  # what ships


class ByRule(refresh.Refresh):
    """A refresh by another rule than the shipped one."""

    row: Row

    def redraw(self, state, *forward):
        if isinstance(self.draft_model, EagleGuesses):
            self.draft_model.counts = state.counts
        super().redraw(state, *forward)

    def select(self, rows, batch):
        if isinstance(self.draft_model, EagleGuesses):
            self.draft_model.target.select(rows, batch)
        return super().select(rows, batch)

    def before(self, target_logits, nodes, was_read):
        inside = nodes.clamp(max=nodes.shape[1] - 1)
        rows = [take_nodes(x, inside) for x in (target_logits, self.logits[:, :nodes.shape[1]])]
        return *rows, was_read, super().before(target_logits, nodes, was_read)

    def guesses(self, state, positions, ids, logits, before):
        sampling = state.settings.sampling

        def draw(logits):
            return sampling.draw(logits, positions).tokens

        def ahead(logits, first, second):
            """By how much one token is before another where they are drawn from these logits."""
            guided = torch.lerp(*reversed(split_rows(logits, len(positions))), sampling.guidance[:, None, None])
            scores = guided / sampling.temperature[:, None, None]
            scores += gumbel_noise(sampling.seeds, positions, scores.shape[2])
            return (scores.gather(2, first[..., None]) - scores.gather(2, second[..., None]))[..., 0]

        drawn = draw(logits)
        if before is None:
            return drawn
        target, old, was_read, kept = before
        if self.row.rule == "logits":
            taken = super().guesses(state, positions, ids, logits, kept)
        else:
            own, stale = draw(target), draw(old)
            may = {"changed": was_read, "credible": stale == own, "sure": ahead(logits, drawn, own) > 1,
                   "unsure": ahead(target, own, drawn) < 1}[self.row.rule]
            taken = torch.where((drawn != stale) & may, drawn, own)
        return torch.where(was_read, taken, drawn if self.row.new == "small" else state.tokens.gather(1, positions))


class Remembering:
    """The target, which remembers the hidden state before each token of the image, and at it."""

    def __init__(self, gpt: GPT):
        self.gpt = gpt

    def __getattr__(self, name):
        return getattr(self.gpt, name)

    can_replay = False  # a replayed graph calls no Python

    def prefill(self, condition, padding_mask, cache):
        self.condition = hidden = self.gpt.prefill(condition, padding_mask, cache)
        self.before = hidden[:, -1:].repeat(1, 3 * self.gpt.config.tokens, 1)  # (R, .., dim) by position
        return hidden

    def extend(self, tokens, nodes, cache):
        hidden = self.gpt.extend(tokens, nodes, cache)
        self.keep(nodes.position_ids - self.prefix_len, hidden)
        return hidden

    def select(self, rows: list[int], batch: int) -> None:
        self.before = self.before[model_rows(rows, batch, len(self.before))]

    def keep(self, positions: Tensor, hidden: Tensor) -> None:
        self.before.scatter_(1, (positions + 1)[..., None].expand_as(hidden), hidden)


class EagleGuesses:
    """EAGLE's head, which reads the target's hidden states of the last forward, and its own where tokens are new."""

    reads_hidden = False  # it finds them by itself

    def __init__(self, inner: EagleDraftModel, target: Remembering):
        self.inner, self.target = inner, target

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def prefill(self, hidden, cache):
        self.inner.prefill(self.target.condition, cache)

    def extend(self, tokens, previous_hidden, nodes, cache):
        positions = nodes.of_rows(nodes.lengths[:, None] + nodes.depth) - self.inner.prefix_len
        index = positions[..., None].expand(-1, -1, self.target.before.shape[2])
        hidden = self.inner.extend(tokens, self.target.before.gather(1, index), nodes, cache)
        is_guess = positions >= nodes.of_rows(self.counts[:, None] - 1)  # the target's states at the others are right
        kept = torch.where(is_guess[..., None], hidden, self.target.before.gather(1, index + 1))
        self.target.keep(positions, kept)
        return hidden


def first_layers(gpt: GPT, layers: int) -> GPT:
    """A GPT of the first layers of another, with its last norm and output layer."""
    small = GPT(replace(gpt.config, layers=layers))
    names = small.state_dict().keys()
    small.load_state_dict({name: value for name, value in gpt.state_dict().items() if name in names})
    return small.eval().requires_grad_(False).to(gpt.output.weight.device)


def settings_of(picture: int) -> tuple:
    """A picture's prompt and its levels."""
    number = picture % len(SETTINGS)
    prompts, *levels = SETTINGS[number]
    return prompts[(picture // len(SETTINGS) + number) % len(prompts)], *levels


@torch.inference_mode()
def forwards(pipeline: Pipeline, row: Row | None, window: int, pictures: list[int]) -> tuple[list[int], Tensor]:
    """How many forwards of the target each picture takes, and its tokens (B, L). row: None is plain decoding"""
    prompts, temperature, guidance, filters = zip(*(settings_of(i) for i in pictures))
    top_k, top_p = map(list, zip(*filters))
    sampling = Sampling.of(pictures, guidance=list(guidance), temperature=list(temperature), top_k=top_k, top_p=top_p,
                           device=pipeline.device)
    if row is None:
        decoded = pipeline.tokens(list(prompts), "vanilla", sampling)
        return decoded.target_forwards.tolist(), decoded.tokens.cpu()
    source = pipeline.source(list(prompts))
    condition, mask = pipeline.gpt.condition(*source)
    target = pipeline.gpt
    if row.draft_model == "EAGLE":
        target = Remembering(target)
        draft_model = EagleGuesses(EagleDraftModel(pipeline.gpt, pipeline.eagle, repeat_for_cfg(mask)), target)
    else:
        small = pipeline.small if row.draft_model == "small" else first_layers(target, int(row.draft_model))
        draft_model = SmallDraftModel(small, *cfg_inputs(small, *small.condition(*source)))
    draft_model.can_replay = False  # capturing so few steps costs more than it saves
    with ExitStack() as patches:
        if row not in SHIPPED:
            patches.enter_context(patch.object(jacobi, "Refresh", type("", (ByRule,), {"row": row})))
            patches.enter_context(patch.object(refresh, "TRUST", row.trust))
        decoded = jacobi.jacobi_decode(target, condition, mask, sampling,
                                       METHODS["jacobi"].changed(window=window, refresh=row.refreshes),
                                       draft_model=draft_model)
    return decoded.target_forwards.tolist(), decoded.tokens.cpu()


def gain(taken: np.ndarray, base: np.ndarray, of_sums: bool = False) -> tuple[float, float, float]:
    """By how many per cent more tokens a forward gives than without refresh, and the bootstrap interval of 95 %.

    taken, base: (n,) forwards of the same pictures
    of_sums:     of the tokens per forward of all pictures together; otherwise of their mean
    """
    picked = np.random.default_rng(0).integers(len(taken), size=(4000, len(taken)))
    tau = (lambda forwards: 1 / forwards.mean(-1)) if of_sums else (lambda forwards: (1 / forwards).mean(-1))
    low, high = np.quantile(tau(taken[picked]) / tau(base[picked]), [0.025, 0.975])
    return tuple(100 * (ratio - 1) for ratio in (tau(taken) / tau(base), low, high))


def in_words(taken: np.ndarray, base: np.ndarray, of_sums: bool = False) -> str:
    value, low, high = (f"{round(number):+d}" for number in gain(taken, base, of_sums))
    return f"{value} % [{low}, {high}]"


def tables(records: list[dict], num_tokens: int) -> str:
    """All rows, and gains of the shipped rule by setting, in Markdown."""
    taken = {(r["rule"], r["model"], r["refreshes"], r["window"]): np.array(r["forwards"]) for r in records}
    windows = sorted({window for *_, window in taken})
    base = {window: taken[Row(0).name, Row(0).model, 0, window] for window in windows}
    rules, gains = [], []
    for row in ROWS:
        cells = [taken.get((row.name, row.model, row.refreshes, window)) for window in windows]
        if any(cell is not None for cell in cells):
            rules.append([row.name, row.model, str(row.refreshes), *(
                "-" if cell is None else f"{num_tokens * (1 / cell).mean():.2f}"
                + (" " + in_words(cell, base[window]) if row.refreshes else "")
                for cell, window in zip(cells, windows))])
    num_pictures = len(base[windows[0]])
    kept = [(row, window) for window in windows if window in (16, 32) or len(windows) < 3
            for row in SHIPPED if row.refreshes in (2, 3)]
    for what, of_sums in (("all pictures", False), ("all pictures, of the sums of forwards", True)):
        gains.append([what, *(in_words(taken[row.name, row.model, row.refreshes, window], base[window], of_sums)
                              for row, window in kept)])
    for index, (what, levels) in enumerate(LEVELS.items()):
        for name, level in levels.items():
            own = [i for i in range(num_pictures) if SETTINGS[i % len(SETTINGS)][index] == level]
            gains.append([f"{what}: {name}", *(
                in_words(taken[row.name, row.model, row.refreshes, window][own], base[window][own])
                for row, window in kept)])
    return (markdown(["rule", "model", "refreshes", *(f"window {window}" for window in windows)], *rules) + "\n\n"
            + markdown(["window, refreshes", *(f"{window}, {row.refreshes}" for row, window in kept)], *gains))


def plot(records: list[dict], num_tokens: int, path: Path) -> None:
    """Tokens per forward by window, with two standard errors over pictures, and their gain with its interval: a line
    for each number of refreshes."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    taken = {(r["refreshes"], r["window"]): np.array(r["forwards"]) for r in records
             if any((r["rule"], r["model"], r["refreshes"]) == (row.name, row.model, row.refreshes) for row in SHIPPED)}
    windows = sorted({window for _, window in taken})
    counts = sorted({refreshes for refreshes, _ in taken}, reverse=True)
    for index, (refreshes, style) in enumerate(zip(counts, reversed(curve_styles("jacobi", len(counts))))):
        own = [window for window in windows if (refreshes, window) in taken]
        beside = np.array(own) * 1.03 ** index  # bars beside each other
        tau = [num_tokens / taken[refreshes, window] for window in own]
        left.errorbar(beside, [each.mean() for each in tau], [2 * each.std(ddof=1) / len(each) ** 0.5 for each in tau],
                      elinewidth=0.8, capsize=2, label=str(refreshes), **style)
        if refreshes:
            value, low, high = np.array([gain(taken[refreshes, window], taken[0, window]) for window in own]).T
            right.errorbar(beside, value, [value - low, high - value], capsize=2, **style)
    left.set(ylabel="tokens per forward of the target", ylim=(1, None))
    left.legend(title="refreshes")
    right.set(ylabel="gain over no refresh, %", ylim=(0, None))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(windows, windows)
        axes.set_xlabel("window")
        axes.grid(alpha=0.3)
    harness.save_plot(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", nargs="+", type=int, default=[8, 16, 32, 64], metavar="W",
                        help="default 8 16 32 64")
    parser.add_argument("--pictures", type=int, default=64, metavar="N", help="a multiple of 16; default 64")
    parser.add_argument("--shipped", action="store_true", help="the shipped rule alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default %(default)s")
    parser.add_argument("--json", nargs="?", const="", metavar="FILE", help="write the records, and take those that it "
                        "has; default FILE: benchmarks/results/<machine>-refresh.json")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw tokens per forward by window")
    options = parser.parse_args()
    if options.pictures < 1 or options.pictures % len(SETTINGS):
        parser.error(f"--pictures must be a multiple of {len(SETTINGS)}, got {options.pictures}")
    if min(options.windows) < 1:
        parser.error(f"--windows must be at least 1, got {min(options.windows)}")
    harness.check_built(options.device)
    pipeline, machine, records = Pipeline.load(device=options.device), harness.machine(), []
    file = harness.results(options.json or "", "refresh", machine)
    if options.json is not None and file.is_file():
        records = json.loads(file.read_text())["rows"]
    if any(len(record["forwards"]) != options.pictures for record in records):
        parser.error(f"--pictures must be as in {file}, or name another file")
    num_tokens, step = pipeline.num_tokens, AT_ONCE.get(options.device, 16)
    parts = [list(range(i, min(i + step, options.pictures))) for i in range(0, options.pictures, step)]
    plain = None
    for window, row in product(options.windows, SHIPPED if options.shipped else ROWS):
        known = {"rule": row.name, "model": row.model, "refreshes": row.refreshes, "window": window}
        if any(known.items() <= record.items() for record in records):
            continue
        if plain is None:
            plain = torch.cat([forwards(pipeline, None, 0, part)[1] for part in parts])
        taken, tokens = zip(*(forwards(pipeline, row, window, part) for part in parts))
        taken, tokens = sum(taken, []), torch.cat(tokens)
        record = known | {"git": machine["git"], "differing": int((tokens != plain).any(1).sum()), "forwards": taken}
        records.append(record)
        tau = num_tokens * (1 / np.array(taken)).mean()
        print(f"window {window}, {row.name}, {row.model}, refreshes: {row.refreshes}, {tau:.2f} tokens a forward, "
              f"{record['differing']} pictures differ", file=sys.stderr, flush=True)
        if options.json is not None:
            harness.write(options.json, "refresh", machine, {"rows": records})
    print(tables(records, num_tokens))
    if options.plot:
        plot(records, num_tokens, options.plot)


if __name__ == "__main__":
    main()
