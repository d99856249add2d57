"""Methods side by side on the same prompts and seeds: pictures, plots and a table."""
import csv
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ..decoding.continuous import ContinuousDecoded, ContinuousSampling
from ..decoding.discrete import Decoded, Sampling, guidance_pair, twice
from ..pipelines.mar import MARPair
from ..decoding.methods import ContinuousMethod, Method
from ..models.llamagen import condition_mask
from ..pipelines.discrete import Pipeline

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  the backend is chosen first: there may be no screen

PROMPTS = ["fluent-3d red heart", "fluent-flat blue heart", "fluent-3d grinning face", "noto neutral face",
           "fluent-flat raised fist", "fluent-3d thumbs up", "fluent-flat pirate flag", "noto chequered flag"]
COLUMNS = ("method", "temperature", "tau", "forwards", "seconds", "speed-up", "overhead", "acceptance", "TV test",
           "TV meter", "TV bound")


@dataclass
class Result:
    """One method at one temperature on all prompts."""

    method: Method | ContinuousMethod
    temperature: float
    decoded: Decoded | ContinuousDecoded
    seconds: float          # wall time of the whole batch
    forwards: float | None  # of that, in forwards of the models; None: not measured

    @property
    def overhead(self) -> float | None:
        """The share of the time that is not forwards of the models."""
        return None if self.forwards is None else 1 - self.forwards / self.seconds


class ModelClock:
    """Adds up the seconds that a pipeline's models spend, on the CPU: elsewhere to wait for them would cost time."""

    def __init__(self, pipeline: Pipeline | MARPair):
        if isinstance(pipeline, MARPair):
            models = (pipeline.mar, pipeline.mar_draft)
            self.modules = [*models, *(part for m in models for part in (m.diffloss.net, m.diffloss.net.time_embed,
                                                                         m.diffloss.net.cond_embed))]
        else:
            gpts = [gpt for gpt in (pipeline.gpt, pipeline.small) if gpt is not None]
            self.modules = [*gpts, *(gpt.output for gpt in gpts), pipeline.drafter]
        self.seconds = 0.0 if pipeline.device.type == "cpu" else None

    def __enter__(self):
        def before(*_):
            self.start = time.perf_counter()

        def after(*_):
            self.seconds += time.perf_counter() - self.start

        measured = [] if self.seconds is None else self.modules
        self.hooks = [hook for module in measured
                      for hook in (module.register_forward_pre_hook(before), module.register_forward_hook(after))]
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()


def compare_methods(pipelines: dict[type, Pipeline | MARPair],
                    runs: list[tuple[Method | ContinuousMethod, float, Sampling | ContinuousSampling]], out: Path,
                    prompts: list[str]) -> list[dict]:
    """Decode all prompts as one batch in each run; write pictures, two plots and compare.csv to `out`.

    Args:
        pipelines: the models, by the type of the methods that they decode by
        runs:      method, temperature, and how each prompt's request draws
    Returns:
        the table, a dictionary per row
    """
    results = []
    for m, *_ in runs:
        pipelines[type(m)].check(m)  # and the neighbors are found, before the clock starts
    total = len(prompts) * sum(pipelines[type(m)].places for m, *_ in runs)
    with tqdm(total=total, unit="token", smoothing=0.05, disable=None) as bar:
        for m, temperature, sampling in runs:
            bar.set_description(f"{m.label}, temperature {temperature:g}")
            with ModelClock(pipelines[type(m)]) as clock:
                start = time.perf_counter()
                decoded = pipelines[type(m)].tokens(prompts, m, sampling, bar.update)
                seconds = time.perf_counter() - start
            results.append(Result(m, temperature, decoded, seconds, clock.seconds))
    rows = table(results)
    draw_pictures(pipelines, results, prompts, out / "compare.png")
    discrete = [r for r in results if isinstance(r.method, Method)]
    if discrete:
        draw_acceptance(pipelines[Method], discrete, out / "acceptance.png")
    sampled = next((r for r in discrete if r.temperature > 0 and not r.decoded.failed.any()), None)
    if sampled:
        sampling = next(s for m, temperature, s in runs if (m, temperature) == (sampled.method, sampled.temperature))
        draw_distributions(pipelines[Method], prompts, sampled.decoded.tokens, sampling, out / "distributions.png")
    with open(out / "compare.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    print_table(rows, len(prompts))
    for result in results:
        for i in result.decoded.failed.nonzero()[:, 0].tolist():
            print(f"{result.method.label}: {prompts[i]!r} ended early: the model's output was not finite")
    return rows


def table(results: list[Result]) -> list[dict]:
    """The numbers of each result; `seconds` a picture, `speed-up` against plain decoding at the same temperature."""
    plain = {(type(r.method), r.temperature): r.seconds for r in results if r.method.plain}
    rows = []
    for r in results:
        (images, L), discrete = r.decoded.tokens.shape[:2], isinstance(r.method, Method)
        speculative, kind = r.method.drafting != "none", (type(r.method), r.temperature)
        rows.append({
            "method": r.method.label,
            "temperature": r.temperature,
            "tau": round(r.decoded.tau.nanmean().item(), 2),
            "forwards": round(r.decoded.forwards.float().mean().item(), 1),
            "seconds": round(r.seconds / images, 2),
            "speed-up": round(plain[kind] / r.seconds, 2) if kind in plain else "",
            "overhead": "" if r.overhead is None else round(r.overhead, 3),
            "acceptance": round(r.decoded.acceptance_rate, 3) if speculative else "",
        } | ({
            "TV test": "" if r.method.tv_bound is None else round(r.method.tv_bound, 3),
            "TV meter": round(r.decoded.excess.mean().item() / L, 4),
            "TV bound": "" if r.decoded.bound.isnan().any() else round(r.decoded.bound.mean().item() / L, 4),
        } if discrete else dict.fromkeys(("TV test", "TV meter", "TV bound"), "")))
    return rows


def print_table(rows: list[dict], batch: int) -> None:
    wide = max(len(row["method"]) for row in rows) + 1
    print(f"{'method':{wide}}" + "".join(f"{name:>12}" for name in COLUMNS[1:]))
    for row in rows:
        print(f"{row['method']:{wide}}" + "".join(f"{row[name]:>12}" for name in COLUMNS[1:]))
    print(f"tau: tokens a target forward; seconds a picture in a batch of {batch}; overhead: the share of them that is "
          "not model\nforwards; acceptance: accepted drafts per drafted level, of continuous tokens per judged draft; "
          "TV test: how far one\naccept test may move the distribution it judges by (empty: not known); TV meter: the "
          "estimate of the distance that\nrelaxed acceptance added per token (0: lossless; at temperature 0 the share "
          "of tokens that strict acceptance would\nhave refused); TV bound: its bound per token, COOL-SD's eq. (4), as "
          "the drafted chains let estimate it")


def by_method(results: list[Result]) -> tuple[list[str], list[float], dict]:
    """Labels of methods and temperatures, in order, and the result of each pair."""
    table = {(r.method.label, r.temperature): r for r in results}
    return list(dict.fromkeys(label for label, _ in table)), list(dict.fromkeys(T for _, T in table)), table


def draw_pictures(pipelines: dict[type, Pipeline | MARPair], results: list[Result], prompts: list[str],
                  path: Path) -> None:
    """Rows are methods, columns prompts, once for each temperature."""
    labels, temperatures, table = by_method(results)
    count = len(prompts)
    figure, axes = plt.subplots(len(labels), count * len(temperatures), squeeze=False, layout="constrained",
                                figsize=(0.95 * count * len(temperatures) + 1.8, 0.95 * len(labels) + 0.7))
    figure.get_layout_engine().set(w_pad=0.01, h_pad=0.01, wspace=0, hspace=0)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    for (label, temperature), result in table.items():
        row, start = axes[labels.index(label)], count * temperatures.index(temperature)
        pictures = pipelines[type(result.method)].pictures(result.decoded.tokens)
        for axis, picture in zip(row[start: start + count], pictures):
            axis.imshow(picture)
        row[0].set_ylabel(label.replace(":", "\n"), rotation=0, ha="right", va="center")
    for start, temperature in enumerate(temperatures):
        for axis, prompt in zip(axes[0, count * start:], prompts):
            axis.set_title(f"T = {temperature:g}\n" + "\n".join(textwrap.wrap(prompt, 13)), fontsize=7)
    save_figure(figure, path)


def draw_acceptance(pipeline: Pipeline, results: list[Result], path: Path) -> None:
    """Tokens gained by the step that made each position, mean over pictures (ADT-Tree, Figure 2)."""
    labels, temperatures, table = by_method([r for r in results if r.method.drafting != "none"])
    grid = pipeline.gpt.config.grid
    if not table:
        return
    figure, axes = plt.subplots(len(temperatures), len(labels), squeeze=False, layout="constrained",
                                figsize=(2.0 * len(labels) + 0.8, 2.4 * len(temperatures)))
    gained = {key: steps_gain(r.decoded.accepted).float().mean(0).view(grid, grid).numpy() for key, r in table.items()}
    top = max(gains.max() for gains in gained.values())
    for (label, temperature), gains in gained.items():
        axis = axes[temperatures.index(temperature), labels.index(label)]
        shown = axis.imshow(gains, vmin=1, vmax=top, cmap="viridis")
        axis.set(xticks=[], yticks=[])
        axis.set_title(label.replace(":", "\n") + f"\nT = {temperature:g}, mean {gains.mean():.2f}", fontsize=8)
    figure.colorbar(shown, ax=axes, label="tokens gained by the step here")
    save_figure(figure, path)


def steps_gain(accepted: Tensor) -> Tensor:
    """accepted (B, L), -1 where no step began -> tokens gained by the step that made each position (B, L)."""
    began = torch.where(accepted >= 0, torch.arange(accepted.shape[1]), 0).cummax(1).values
    return accepted.gather(1, began).clamp(min=0) + 1


@torch.inference_mode()
def teacher_forced_probs(pipeline: Pipeline, prompts: list[str], tokens: Tensor,
                         sampling: Sampling) -> tuple[Tensor, Tensor]:
    """What target and drafter held likely at each token of finished pictures.

    Returns:
        target_probs (B, L, V) and draft_probs (B, L - 1, V), the latter for tokens 1..L - 1
    """
    gpt, shown = pipeline.gpt, pipeline.gpt.config.condition_tokens - 1
    condition, valid = guidance_pair(gpt, *gpt.condition(pipeline.words(pipeline.words.encode(prompts))))
    hidden = gpt.teacher_forced(condition, valid, twice(tokens))                           # (2B, shown + L, dim)
    shifted = F.pad(twice(tokens[:, :-1]), (shown, 0))
    places = torch.arange(shifted.shape[1], device=tokens.device)[None]
    drafted = pipeline.drafter(shifted, hidden[:, :-1], places, condition_mask(valid[:, :shown], shifted.shape[1]))
    return sampling.probs(gpt, hidden[:, shown:])[0], sampling.probs(gpt, drafted[:, shown:])[0]


def draw_distributions(pipeline: Pipeline, prompts: list[str], tokens: Tensor, sampling: Sampling, path: Path) -> None:
    """Target and draft over the union of their 20 likeliest tokens (LANTERN, Figure 2b); top-1 maps
    (ADT-Tree, Figure 4)."""
    if tokens.shape[1] < 4:
        return  # no room for three places to look at
    target, draft = teacher_forced_probs(pipeline, prompts, tokens, sampling)
    grid, target = pipeline.gpt.config.grid, target.cpu()
    draft = draft.cpu()
    figure, axes = plt.subplots(2, 3, constrained_layout=True, figsize=(12, 6))
    places = [min(row * grid * grid // 4 + grid // 2, grid * grid - 1) for row in (1, 2, 3)]
    for axis, place in zip(axes[0], places):
        p, q = target[0, place], draft[0, place - 1]
        likeliest = min(20, len(p))
        union = torch.cat([p.topk(likeliest).indices, q.topk(likeliest).indices]).unique()
        union = union[p[union].argsort(descending=True)]
        x = np.arange(len(union))
        axis.bar(x - 0.2, p[union].numpy(), 0.4, label="target")
        axis.bar(x + 0.2, q[union].numpy(), 0.4, label="draft")
        overlap = torch.minimum(p, q).sum()
        axis.set(xticks=[], xlabel="union of the 20 likeliest tokens of each", ylabel="probability",
                 title=f"{prompts[0]}\nrow {place // grid}, column {place % grid}, sum of min {overlap:.2f}")
        axis.legend()
    top = target.max(-1).values
    for axis, (name, values) in zip(axes[1], {prompts[0]: top[0], "mean of all prompts": top.mean(0)}.items()):
        shown = axis.imshow(values.view(grid, grid).numpy(), vmin=0, vmax=1)
        axis.set(xticks=[], yticks=[], title=f"top-1 probability of the target\n{name}")
        figure.colorbar(shown, ax=axis)
    axes[1, 2].hist(top.flatten().numpy(), bins=40, range=(0, 1), density=True)
    axes[1, 2].set(xlabel="top-1 probability of the target", ylabel="density of positions",
                   title=f"mean {top.mean():.3f}, top-10 {target.topk(10, -1).values.sum(-1).mean():.3f}")
    save_figure(figure, path)


def save_figure(figure, path: Path) -> None:
    """Write beside the goal first, so that an interruption leaves no half of a picture."""
    part = path.with_name(f".{path.name}.part")
    figure.savefig(part, dpi=100, format="png")
    plt.close(figure)
    part.replace(path)
