"""What `specvis compare` draws."""
import textwrap
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..decoding.methods import Method
from ..decoding.sampling import Sampling
from ..pipelines.discrete import Pipeline
from ..pipelines.positions import forward_numbers, steps_gain, teacher_forced_probs
from ..study import plots
from ..study.plots import plt
from .runs import ComparedResult, Pipelines

SHOWN = 6  # pictures in the figure of jacobi


def draw_all(pipelines: Pipelines, results: list[ComparedResult], prompts: list[str], out: Path) -> None:
    draw_pictures(pipelines, results, prompts, out / "compare.png")
    discrete = [r for r in results if isinstance(r.method, Method)]
    if discrete:
        draw_acceptance(pipelines[Method], discrete, out / "acceptance.png")
    sampled = next((r for r in discrete if r.temperature > 0 and not r.decoded.failed.any()), None)
    if sampled and any(r.method.parameters.get("draft_model") == "eagle" for r in discrete):
        draw_distributions(pipelines[Method], prompts, sampled.decoded.tokens, sampled.sampling,
                           out / "distributions.png")


def save_figure(figure, path: Path) -> None:
    """Write a figure with all that is beside its axes: a few small plots leave their labels no space."""
    plots.save_figure(figure, path, bbox_inches="tight", pad_inches=0.05)


def by_method(results: list[ComparedResult]) -> tuple[list[str], list[float], dict]:
    """Labels of methods and temperatures, in order, and the result of each pair."""
    table = {(r.method.label, r.temperature): r for r in results}
    return list(dict.fromkeys(label for label, _ in table)), list(dict.fromkeys(T for _, T in table)), table


def draw_pictures(pipelines: Pipelines, results: list[ComparedResult], prompts: list[str], path: Path) -> None:
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


def draw_acceptance(pipeline: Pipeline, results: list[ComparedResult], path: Path) -> None:
    """How many tokens the step gave that made each position, mean over pictures (ADT-Tree, Figure 2)."""
    labels, temperatures, table = by_method([r for r in results if r.method.drafting != "none"])
    if not table:
        return
    grid = pipeline.gpt.config.grid
    gains = {key: steps_gain(r.decoded.num_accepted).float().mean(0).view(grid, grid).numpy()
             for key, r in table.items()}
    figure, axes = plt.subplots(len(temperatures), len(labels), squeeze=False, layout="constrained",
                                figsize=(2.0 * len(labels) + 0.8, 2.4 * len(temperatures)))
    top = max(gain.max() for gain in gains.values())
    for (label, temperature), gain in gains.items():
        axis = axes[temperatures.index(temperature), labels.index(label)]
        image = axis.imshow(gain, vmin=1, vmax=top, cmap="viridis")
        axis.set(xticks=[], yticks=[])
        tau = table[label, temperature].decoded.tau.nanmean()
        axis.set_title(label.replace(":", "\n") + f"\nT = {temperature:g}, tau {tau:.2f}", fontsize=8)
    figure.colorbar(image, ax=axes, label="tokens of the step\nthat made this position")
    save_figure(figure, path)


def draw_distributions(pipeline: Pipeline, prompts: list[str], tokens: Tensor, sampling: Sampling, path: Path) -> None:
    """Target and EAGLE head over the union of their 20 likeliest tokens (LANTERN, Figure 2b); top-1 maps
    (ADT-Tree, Figure 4)."""
    if tokens.shape[1] < 4:
        return  # no room for three positions to look at
    target, draft = (probs.cpu() for probs in teacher_forced_probs(pipeline, prompts, tokens, sampling))
    grid = pipeline.gpt.config.grid
    figure, axes = plt.subplots(2, 3, constrained_layout=True, figsize=(12, 6))
    positions = [min(row * grid * grid // 4 + grid // 2, grid * grid - 1) for row in (1, 2, 3)]
    for axis, position in zip(axes[0], positions):
        p, q = target[0, position], draft[0, position - 1]
        likeliest = min(20, len(p))
        union = torch.cat([p.topk(likeliest).indices, q.topk(likeliest).indices]).unique()
        union = union[p[union].argsort(descending=True)]
        x = np.arange(len(union))
        axis.bar(x - 0.2, p[union].numpy(), 0.4, label="target")
        axis.bar(x + 0.2, q[union].numpy(), 0.4, label="draft (EAGLE head)")
        overlap = torch.minimum(p, q).sum()
        axis.set(xticks=[], xlabel="union of the 20 likeliest tokens of each", ylabel="probability",
                 title=f"{prompts[0]}\nrow {position // grid}, column {position % grid}, sum of min {overlap:.2f}")
        axis.legend()
    top = target.max(-1).values
    for axis, (name, values) in zip(axes[1], {prompts[0]: top[0], "mean of all prompts": top.mean(0)}.items()):
        image = axis.imshow(values.view(grid, grid).numpy(), vmin=0, vmax=1)
        axis.set(xticks=[], yticks=[], title=f"top-1 probability of the target\n{name}")
        figure.colorbar(image, ax=axis)
    axes[1, 2].hist(top.flatten().numpy(), bins=40, range=(0, 1), density=True)
    axes[1, 2].set(xlabel="top-1 probability of the target", ylabel="density of positions",
                   title=f"mean {top.mean():.3f}, top-10 {target.topk(10, -1).values.sum(-1).mean():.3f}")
    save_figure(figure, path)


def draw_jacobi(pipeline: Pipeline, jacobi: ComparedResult, windows: dict[int, ComparedResult], prompts: list[str],
                path: Path) -> None:
    """The first pictures by the baseline and by `jacobi`; which target forward drew which token; and, if there are
    `windows`, what the window changes."""
    baseline, count, grid = jacobi.baseline, min(len(prompts), SHOWN), pipeline.gpt.config.grid
    figure = plt.figure(figsize=(1.45 * count + 1.2 + 3.8 * bool(windows), 5), layout="constrained")
    left, *right = figure.subfigures(1, 1 + bool(windows), squeeze=False,
                                     width_ratios=[1.45 * count + 1.2, 3.8][:1 + bool(windows)])[0]
    axes = left.subplots(3, count, squeeze=False)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    for row, result in zip(axes, (baseline, jacobi)):
        forwards = result.decoded.target_forwards.tolist()
        for i, picture in enumerate(pipeline.pictures(result.decoded.tokens[:count])):
            row[i].imshow(picture)
            seconds = f", {result.single_seconds[i]:.2f} s" if i < len(result.single_seconds) else ""
            row[i].set_xlabel(f"{forwards[i]} forwards{seconds}", fontsize=8)
    numbers = forward_numbers(jacobi.decoded.num_accepted)[:count].view(count, grid, grid).numpy()
    for axis, number in zip(axes[2], numbers):
        axis.imshow(number * 3 % 10, cmap="tab10", vmin=0, vmax=9)  # neighbors in time have other colors
    for axis, prompt in zip(axes[0], prompts):
        axis.set_title("\n".join(textwrap.wrap(prompt, 13)), fontsize=8)
    same = jacobi.same_tokens
    for row, name in zip(axes, (baseline.method.label, f"{jacobi.method.label}\n\nsame tokens:\n{same.sum()} of "
                                f"{len(same)}", "tokens that one\nforward drew\nhave one color\n(ten, in turn)")):
        row[0].set_ylabel(name, rotation=0, ha="right", va="center")
    if windows:
        draw_windows(right[0], baseline.method.label, windows, len(prompts))
    save_figure(figure, path)


def draw_windows(figure, baseline: str, windows: dict[int, ComparedResult], count: int) -> None:
    """Tokens per forward and speed over the window, in a part of a figure."""
    above, below = figure.subplots(2, 1, sharex=True)
    x, results = list(windows), list(windows.values())
    above.plot(x, [r.decoded.tau.nanmean().item() for r in results], "o-", color="tab:blue")
    above.set(ylabel="tokens per\ntarget forward", title=f"mean of {count} pictures", ylim=(0, None))
    if alone := len(results[0].single_seconds):
        below.plot(x, [r.single_speedup for r in results], "o-", color="tab:blue", label=f"alone, median of {alone}")
    if count > 1 or not alone:
        below.plot(x, [r.speedup for r in results], "s--", color="tab:gray", label=f"in a batch of {count}")
    below.axhline(1, color="black", lw=0.8, ls=":")
    below.set_xscale("log", base=2)
    below.set(xlabel="window: guesses that a forward reads", ylabel=f"speed, {baseline} is 1", xticks=x, ylim=(0, None))
    below.set_xticklabels(map(str, x))
    below.legend(fontsize=8)
