"""What `specvis compare` draws."""
import textwrap
from pathlib import Path

from ..files import write_whole
from ..pipelines.discrete import Pipeline
from ..pipelines.positions import forward_numbers
from .plots import method_style, plt
from .runs import ComparedResult, Pipelines

SHOWN = 6  # pictures in the figure of jacobi


def save_figure(figure, path: Path) -> None:
    """Write a figure with all that is beside its axes: a few small plots leave their labels no space."""
    write_whole(path, lambda file: figure.savefig(file, dpi=100, format="png", bbox_inches="tight", pad_inches=0.05))
    plt.close(figure)


def draw_pictures(pipelines: Pipelines, results: list[ComparedResult], prompts: list[str], path: Path) -> None:
    """Rows are methods, columns prompts, once for each temperature; if there are several, each is written once."""
    labels = list(dict.fromkeys(result.method.label for result in results))
    temperatures, count = list(dict.fromkeys(result.temperature for result in results)), len(prompts)
    figure, axes = plt.subplots(len(labels), count * len(temperatures), squeeze=False, layout="constrained",
                                figsize=(0.95 * count * len(temperatures) + 1.8, 0.95 * len(labels) + 0.7))
    figure.get_layout_engine().set(w_pad=0.01, h_pad=0.01, wspace=0, hspace=0)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    for result in results:
        row, start = axes[labels.index(result.method.label)], count * temperatures.index(result.temperature)
        pictures = pipelines[type(result.method)].pictures(result.decoded.tokens)
        for axis, picture in zip(row[start: start + count], pictures):
            axis.imshow(picture)
        row[0].set_ylabel(result.method.label.replace(":", "\n"), rotation=0, ha="right", va="center")
    for start, temperature in enumerate(temperatures):
        for axis, prompt in zip(axes[0, count * start:], prompts):
            axis.set_title("\n".join(textwrap.wrap(prompt, 13)), fontsize=7)
        if len(temperatures) > 1:
            axes[0, count * start].text(0, 1.7, f"T = {temperature:g}", transform=axes[0, count * start].transAxes)
    save_figure(figure, path)


def draw_jacobi(pipeline: Pipeline, jacobi: ComparedResult, windows: dict[int, ComparedResult], prompts: list[str],
                path: Path) -> None:
    """The first pictures by the baseline and by `jacobi`, alone if some were; which target forward drew which token;
    and, if there are `windows`, what the window changes."""
    baseline, count = jacobi.baseline, min(len(jacobi.shown.tokens), SHOWN)
    figure = plt.figure(figsize=(1.45 * count + 1.2 + 3.8 * bool(windows), 5), layout="constrained")
    left, *right = figure.subfigures(1, 1 + bool(windows), squeeze=False,
                                     width_ratios=[1.45 * count + 1.2, 3.8][:1 + bool(windows)])[0]
    axes = left.subplots(3, count, squeeze=False)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    for row, result in zip(axes, (baseline, jacobi)):
        forwards = result.shown.target_forwards.tolist()
        for i, picture in enumerate(pipeline.pictures(result.shown.tokens[:count])):
            row[i].imshow(picture)
            seconds = f", {result.seconds[i]:.2f} s" if result.seconds else ""
            row[i].set_xlabel(f"{forwards[i]} forwards{seconds}", fontsize=8)
    numbers = pipeline.on_grid(forward_numbers(jacobi.shown.num_accepted)[:count]).numpy()
    for axis, number in zip(axes[2], numbers):
        axis.imshow(number * 3 % 10, cmap="tab10", vmin=0, vmax=9)  # neighbors in time have other colors
    for axis, prompt in zip(axes[0], prompts):
        axis.set_title("\n".join(textwrap.wrap(prompt, 13)), fontsize=8)
    same = (jacobi.shown.tokens == baseline.shown.tokens).all(1)[:count]
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
    style = method_style(results[0].method.name)
    above.plot(x, [r.decoded.tau.nanmean().item() for r in results], **style)
    above.set(ylabel="tokens per\ntarget forward", title=f"mean of {count} pictures", ylim=(0, None))
    if alone := len(results[0].seconds):
        below.plot(x, [r.speedup(r.baseline) for r in results], label=f"alone, median of {alone}", **style)
    if count > 1 or not alone:
        below.plot(x, [r.batch_speedup for r in results], "o--", color="tab:gray", label=f"in a batch of {count}")
    below.axhline(1, color="black", lw=0.8, ls=":")
    below.set_xscale("log", base=2)
    below.set(xlabel="window: guesses that a forward reads", ylabel=f"speed, {baseline} is 1", xticks=x, ylim=(0, None))
    below.set_xticklabels(map(str, x))
    below.legend(fontsize=8)
