"""`specvis tune`: with which window `jacobi` is fastest for a model on this machine, and whether refreshes pay."""
import statistics
from operator import truediv

import click
import torch

from ..decoding.methods import Method, method
from ..decoding.sampling import Sampling
from ..models.words import repeated
from ..pipelines.discrete import Pipeline
from ..pipelines.prompts import with_style
from .options import FAMILY_PROMPTS, MAX_COUNT, PROMPTS, dtype_option, sampling_options
from .progress import Steps
from .runs import timed_in_turns

WINDOWS, REFRESHES = (2, 4, 8, 16, 32), (0, 1, 2)


@click.command()
@click.option("--prompt", "prompts", multiple=True, help="May be repeated. [default: eight, of the shipped model]")
@click.option("--batch", type=click.IntRange(1, MAX_COUNT), default=1, help="How many pictures are drawn at once.")
@click.option("--turns", type=click.IntRange(1, MAX_COUNT), default=4,
              help="How often every method draws, each time other pictures.")
@dtype_option
@sampling_options
def tune(prompts, batch, turns, dtype, seed, filters, model, device):
    """Find the fastest window of jacobi for a model on this machine.

    It tries windows of 2, 4, 8, 16 and 32, and each with one and two refreshes if the model has a small one: minutes.
    Every window draws plain decoding's pictures, so this is a matter of seconds alone. The methods take turns, so that
    other work on the machine slows all alike; a speedup is the median of these turns.
    """
    settings = model.filters(filters)
    Sampling.of([seed], **settings)
    pipeline = model.load(Method, device, dtype=getattr(torch, dtype))
    prompts = prompts or (FAMILY_PROMPTS if model.family else PROMPTS)
    prompts = [with_style(prompt, pipeline.prompts.styles, None, default=True) for prompt in prompts]
    pipeline.prompts.encode(prompts)
    pictures = repeated(prompts, batch * turns)
    sampling = Sampling.of(list(range(seed, seed + len(pictures))), **settings, device=device)
    rows = measured(pipeline, methods_for(pipeline), pictures, sampling, turns)
    click.echo(f"{'method':30}{'tau':>7}{'seconds':>9}{'speedup':>9}")
    for label, tau, seconds, speedup in rows:
        click.echo(f"{label:30}{tau:7.2f}{seconds:9.3f}{speedup:9.2f}")
    label, *_, speedup = max(rows, key=lambda row: row[-1])
    click.echo("(tau: tokens a target forward; seconds of a picture, medians)\n"
               f"fastest here, {batch} at once: --method {label}, {speedup:.2f} times plain decoding")


def methods_for(pipeline: Pipeline) -> list[Method]:
    """Plain decoding, and `jacobi` with each window, without refreshes and with them if there is a small model."""
    refreshes = REFRESHES[:1] if "small" in pipeline.missing_draft_models else REFRESHES
    return [method("vanilla"), *(method("jacobi", window=window, refresh=refresh)
                                 for refresh in refreshes for window in WINDOWS)]


def measured(pipeline: Pipeline, methods: list[Method], prompts: list[str], sampling: Sampling,
             turns: int) -> list[tuple[str, float, float, float]]:
    """Of each method its label, tau, the seconds of a picture, and the speed where the first method's is 1."""
    batch, taus = len(prompts) // turns, {m: [] for m in methods}

    def draw(m: Method, turn: int) -> None:
        numbers = list(range(turn * batch, (turn + 1) * batch))
        if m is methods[0]:
            number = f"turn {len(taus[m])} of {turns}" if taus[m] else "a turn without a clock"
            progress.begin(f"{number}, {len(methods)} methods", len(methods) * batch * pipeline.num_tokens)
        decoded = pipeline.tokens([prompts[i] for i in numbers], m, sampling[numbers], progress.update)
        taus[m].append(decoded.tau.nanmean().item())

    with Steps(turns + 1) as progress:
        for m in methods:  # what is made at first use is not timed
            draw(m, 0)
        seconds = timed_in_turns([lambda turn, m=m: draw(m, turn) for m in methods], turns)
    return [(m.label, statistics.mean(taus[m][1:]), statistics.median(own) / batch,
             statistics.median(map(truediv, seconds[0], own))) for m, own in zip(methods, seconds)]
