"""`specvis report`: the papers' tables and figures on this model."""
from contextlib import ExitStack
from pathlib import Path

import click

from ..decoding.continuous_state import ContinuousSampling
from ..decoding.methods import ContinuousMethod, Method
from ..decoding.sampling import Sampling
from ..files import locked
from .options import (
    MAX_COUNT,
    filters_for,
    given_options,
    is_given,
    load_model,
    refuse_filters,
    resumable,
    sampling_options,
    writable_folder,
)

try:
    from studies import continuous, discrete
    from studies.base import choose_items, reference_pictures, write_report
    from studies.continuous import ContinuousReport
    from studies.discrete import DiscreteReport
    from studies.quality import register_scores
    from studies.report import CONTINUOUS_ITEMS, ITEMS
except ModuleNotFoundError as error:
    if error.name != "studies":
        raise
    raise ValueError("report needs the folder python/studies, which is in a clone of the repository and not in the "
                     "installed package: run `make install` in a clone, and then .venv/bin/specvis report") from None


@click.command()
@click.option("--continuous", "is_continuous", is_flag=True, help="CSpD's tables and figures, of continuous tokens.")
@click.option("--only", "names", multiple=True, help=f"What to write, of {', '.join(ITEMS)}; with --continuous of "
              f"{', '.join(CONTINUOUS_ITEMS)}; several with commas. [default: all]")
@click.option("--quick", is_flag=True, help="Few pictures and the main tables only.")
@click.option("--images", type=click.IntRange(1, MAX_COUNT),
              help="Pictures a method, decoded in batches, 12 or more; with --continuous 2 or more. [default: "
              f"{discrete.FULL.images}, quick {discrete.QUICK.images}; with --continuous {continuous.FULL.images}, "
              f"quick {continuous.QUICK.images}]")
@click.option("--timed", type=click.IntRange(1, MAX_COUNT),
              help="Pictures a method, timed alone. [default: "
              f"{discrete.FULL.timed}, quick {discrete.QUICK.timed}]")
@click.option("--most", type=click.IntRange(1, MAX_COUNT),
              help="Pictures that a method may have to decide a claim. [default: "
              f"{discrete.FULL.most}, quick {discrete.QUICK.most}; with --continuous {continuous.FULL.most}, "
              f"quick {continuous.QUICK.most}]")
@click.option("--score", "scores", multiple=True, help="One more score, as clip=my_module:function; the function takes "
              "pictures (n, H, W, 3) uint8 and n prompts and returns n numbers.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the report and its runs. [default: "
              "out/report; with --continuous out/report-continuous]")
@sampling_options
def report(is_continuous, names, quick, images, timed, most, scores, out, seed, guidance, top_k, top_p, model, device):
    """The papers' tables and figures on this model, beside the papers' own numbers.

    Every run is saved in the folder: after an interruption the same command goes on where it stopped.
    """
    if is_continuous:
        refuse_discrete_options()
    items = choose_items(CONTINUOUS_ITEMS if is_continuous else ITEMS, names, quick)
    command = " ".join(["specvis report", *given_options(but=("names", "out", "device"))])
    out = out or Path("out/report-continuous" if is_continuous else "out/report")
    with resumable(), ExitStack() as lock:
        def folder():  # it is made, and kept from other commands, when all options are known to be right
            lock.enter_context(locked(writable_folder(out)))
            return out

        if is_continuous:
            scope = continuous.scope_of(quick, images, most, guidance)
            ContinuousSampling.of([seed], guidance=scope.guidance)
            reference_pictures(model)
            pair = load_model(ContinuousMethod, model, device)
            made = ContinuousReport.of(pair, model, folder(), scope, seed=seed)
        else:
            register_scores(scores)
            settings = filters_for(model, guidance, top_k, top_p)
            Sampling.of([seed], **settings)  # values out of their range are reported before the model is loaded
            scope = discrete.scope_of(quick, images, timed, most, len(reference_pictures(model)[0]))
            pipeline = load_model(Method, model, device)
            made = DiscreteReport.of(pipeline, model, folder(), scope, seed=seed, **settings)
        write_report(made, items, command=command, whole=not names)


def refuse_discrete_options() -> None:
    """Raise ValueError where options are given that mean nothing for continuous tokens."""
    refuse_filters("--continuous")
    for name, reason in (("timed", "what is timed is timed in batches"),
                         ("scores", "its pictures are too few to score")):
        if is_given(name):
            raise ValueError(f"{name.removesuffix('s')} must not be given with --continuous: {reason}")
