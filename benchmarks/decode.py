"""Where the time of a picture goes:   python -m benchmarks.decode [--sizes ..] [--methods ..] [--batch ..] [--json]

Every method is timed beside plain decoding and, where EAGLE's and LANTERN's releases have it, beside a loop like theirs
(benchmarks/released.py), with the same models, trees and settings. All take turns, so that other work on the
machine meets them alike, and what is compared are the runs of one turn. A size is "shipped", the shipped model in
float32 or `--dtype`, or one of LlamaGen's with random weights in bfloat16. `--forwards` says what makes
the models' forwards: `decoder_layers` ("fast"), PyTorch's modules ("eager"), or these compiled ("compile", of plain
decoding alone).

How the seconds of a step divide is found out in a run of its own, in which a clock is read before and after every call
of target, draft model and ops of specvis_kernels (on a GPU the device is waited for each time). A step is what lies
between two calls of `progress`. The notes under the table say what its columns are.

With random weights nothing would be accepted. So acceptance is imposed: the steps of the shipped model are recorded,
and before each walk the target's logits are changed such that it accepts as many drafts as were recorded, and rejects
all drafts after them. The ops do all their work; the time of the change is not counted. Accepted drafts are first
children, as far as these lead deep enough. So fewer siblings are tried than in real steps, which favors the released
loop: it pays for each. Of larger sizes than B only steps in the middle of pictures are timed, and what a picture takes
follows from the recorded tokens a step.

On a GPU nothing is imposed, since a step takes as long whatever it accepts: steps are replayed as CUDA graphs, and of
all sizes but the shipped model steps in the middle of pictures are timed, after the first graphs are captured. Only
steps whose parts are timed are not replayed. `--ours` leaves the released loop out, which takes minutes there.
"""
import argparse
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import torch
from matplotlib.patches import Patch
from torch import Tensor

import specvis_kernels
from benchmarks import harness
from benchmarks.released import released_decode
from benchmarks.watch import Clock, Script, Timed, Watch, ops_replaced
from specvis.cli.options import FILTERS, PROMPTS
from specvis.cli.plots import method_color, plt, shade
from specvis.decoding.baseline import decode
from specvis.decoding.decoded import Decoded
from specvis.decoding.draft_model import EagleDraftModel, SmallDraftModel
from specvis.decoding.graphs import GRAPHS, Captured
from specvis.decoding.jacobi import jacobi_decode
from specvis.decoding.methods import METHODS, Method, parse_method
from specvis.decoding.sampling import Sampling, cfg_inputs
from specvis.decoding.speculative import speculative_decode
from specvis.models import layers
from specvis.models.eagle import EagleHead
from specvis.models.llamagen import GPT, SIZES, GPTConfig, class_config
from specvis.pipelines.discrete import Pipeline

RANDOM = FILTERS | {"top_k": 1000, "top_p": 1.0}  # for random weights
WHOLE = ("shipped", "B")       # sizes of which whole pictures are timed
STEPS = 8                      # that a turn times of the other sizes, at least
SETTLING = 8                   # steps on a GPU before these: the third captures a graph
RELEASED = ("eagle1", "lantern", "lantern++", "speculative")  # the methods of the released loop
FORWARDS = ("fast", "eager", "compile")
SHADES = {"target": 1.0, "draft": 0.6, "ops": 0.3, "rest": 0.1}  # of a method's color, for each part of its time
PARTS = tuple(SHADES)
PEAK = 8.0                     # the deviation of random logits: with it, dynamic trees are as deep as a trained model's


@dataclass
class Subject:
    """A model of one size, with all that decoding needs."""

    size: str
    gpt: GPT
    head: EagleHead
    small: GPT
    filters: dict
    source: Callable[[list[int]], Tensor]    # what the GPTs' `condition` takes, for pictures with these numbers
    neighbors: Callable[[int, str], Tensor]  # as Pipeline.neighbors
    recorder: "Recorder | None" = None       # decides what is accepted; None: the model does
    whole: bool = True                       # are whole pictures timed, or steps?

    @staticmethod
    def of_pipeline(pipeline: Pipeline, prompts: list[str], filters: dict = FILTERS) -> "Subject":
        features = pipeline.words(pipeline.words.encode(prompts))
        return Subject("shipped", pipeline.gpt, pipeline.eagle, pipeline.small, filters,
                       lambda numbers: features[[n % len(prompts) for n in numbers]], pipeline.neighbors)

    @staticmethod
    def random(size: str, config: GPTConfig, recorder: "Recorder", device: str = "cpu",
               dtype: torch.dtype = torch.bfloat16) -> "Subject":
        """A class-conditional model with random weights. (They are made outside of inference mode: only such weights
        can be packed.) The small model has two layers and half the width, as the shipped one."""
        small_config = replace(config, layers=2, heads=config.heads // 2, dim=config.dim // 2)
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
            torch.manual_seed(0)
            gpt, head, codebook = GPT(config), EagleHead(config), torch.randn(config.vocabulary, 8)
            torch.nn.init.normal_(gpt.output.weight, std=PEAK / config.dim ** 0.5)
            gpt, head, small = (model.eval().requires_grad_(False).to(device, dtype)
                                for model in (gpt, head, GPT(small_config)))
        tables = {}

        def neighbors(k, metric):
            if k not in tables:
                tables[k] = specvis_kernels.codebook_neighbors(codebook.to(device), k)
            return tables[k]

        return Subject(size, gpt, head, small, RANDOM,
                       lambda numbers: torch.tensor([n % config.classes for n in numbers], device=device), neighbors,
                       recorder, size in WHOLE and device == "cpu")


class Recorder:
    """How many drafts each step of the shipped model accepts."""

    def __init__(self, pipeline: Pipeline, prompts: list[str], filters: dict = FILTERS):
        self.pipeline, self.prompts, self.filters, self.decoded = pipeline, prompts, filters, {}

    def __call__(self, method: Method) -> Decoded:
        if method not in self.decoded:
            sampling = Sampling.of(list(range(len(self.prompts))), **self.filters, device=self.pipeline.device)
            self.decoded[method] = self.pipeline.tokens(self.prompts, method, sampling)
        return self.decoded[method]

    def steps(self, method: Method, numbers: list[int], first: int) -> dict[int, list[int]]:
        """For each of these pictures, the accepted drafts of its steps from position `first` on."""
        decoded, result = self(method), {}
        for number in numbers:
            row = decoded.num_accepted[number % len(self.prompts)]
            result[number] = row[first:][row[first:] >= 0].tolist() or [0]
        return result

    def tau(self, method: Method) -> float:
        """Tokens per forward, of all pictures together: seconds follow the forwards."""
        if method.is_baseline:
            return 1.0
        forwards = self(method).target_forwards
        return self.pipeline.num_tokens * len(forwards) / forwards.sum().item()


@dataclass
class Contender:
    """A method, decoded by our loop or by the released one, with one of FORWARDS."""

    method: Method
    is_released: bool = False
    forward: str = "fast"

    @property
    def name(self) -> str:
        return (f"{'released ' if self.is_released else ''}{self.method.label}"
                f"{'' if self.forward == 'fast' else f' ({self.forward})'}")

    @contextmanager
    def reads(self, gpt: GPT):
        """Let the models' forwards be made so."""
        graph = torch.compile(gpt.forward, fullgraph=True, dynamic=False) if self.forward == "compile" else None
        with patch.object(layers, "USE_KERNELS", self.forward == "fast"), \
                patch.object(gpt, "forward", graph) if graph else nullcontext():
            yield


@dataclass
class Run:
    """The times of one run."""

    seconds: float       # all of it, for the batch
    step_seconds: float  # without what comes before the first token: the sum of the steps
    num_steps: int
    tau: float           # tokens a target forward; where steps are timed, the new tokens of a step and picture
    parts: Counter = field(default_factory=Counter)  # seconds of the steps, by part


class Enough(Exception):
    """The wanted number of steps is reached."""


class Steps:
    """Counts the steps of a run and the tokens of its batch, from the first token or the end of `settling` steps on.

    The released loop calls `progress` after the first token and after every step. Ours, on a GPU, calls it less often.
    """

    def __init__(self, clock: Clock, settling: int, most: int | None, is_released: bool, watch: Watch | None):
        self.clock, self.settling, self.most, self.is_released, self.watch = clock, settling, most, is_released, watch
        self.num, self.num_new, self.begin = -is_released, 0, None  # begin: the time

    @contextmanager
    def counted(self):
        """Count the steps of our loops."""
        def counted(*args, call=Captured.__call__):
            self.num += 1
            return call(*args)

        with patch.object(Captured, "__call__", counted):
            yield

    def progress(self, count: int) -> None:
        self.num += self.is_released
        if self.begin is not None:
            self.num_new += count
        elif self.num >= self.settling:
            self.num, self.begin = 0, self.clock.now()
            if self.watch:
                self.watch.seconds.clear()
        if self.most is not None and self.begin is not None and self.num >= self.most:
            raise Enough


@torch.inference_mode()
def run(subject: Subject, contender: Contender, batch: int, turn: int, max_steps: int | None = None,
        watch: Watch | None = None) -> Run:
    """Decode a batch of pictures. Each turn has other pictures.

    Args:
        max_steps: stop after this number of steps in the middle of pictures; None: whole pictures
        watch:     times the parts; None: only the whole and its steps are timed
    """
    method, gpt, device = contender.method, subject.gpt, subject.gpt.output.weight.device
    clock = watch.clock if watch else Clock(device)
    numbers, known, num_known = [turn * batch + i for i in range(batch)], None, 0
    if max_steps is not None:
        generator, num_known = torch.Generator().manual_seed(turn), gpt.config.tokens // 2
        known = torch.randint(gpt.config.vocabulary, (batch, num_known), generator=generator).to(device)
    script = None
    if subject.recorder and not method.is_baseline and not clock.is_cuda:
        script = Script(subject.recorder.steps(method, numbers, num_known), clock)
    settling = SETTLING if clock.is_cuda and max_steps is not None else 0  # the timed steps share a graph
    steps = Steps(clock, settling, max_steps, contender.is_released, watch)
    decode_all, decoded = loop_of(subject, contender, numbers, known, watch, script, steps), None
    with intercepted(contender, script, watch), steps.counted(), contender.reads(subject.gpt):
        begin = clock.now()
        with suppress(Enough):
            decoded = decode_all()
        end = clock.now()
    tau = (gpt.config.tokens * batch / decoded.target_forwards.sum().item() if decoded
           else steps.num_new / max(steps.num, 1) / batch)
    return Run(end - begin, end - steps.begin, steps.num, tau, Counter(watch.seconds if watch else {}))


def loop_of(subject: Subject, contender: Contender, numbers: list[int], known: Tensor | None, watch: Watch | None,
            script: Script | None, steps: Steps) -> Callable[[], Decoded]:
    """The contender's loop, with all its arguments."""
    method, gpt, condition = contender.method, subject.gpt, subject.gpt.condition(subject.source(numbers))
    sampling = Sampling.of(numbers, **subject.filters, device=gpt.output.weight.device)
    target = watch.target if watch else gpt
    if method.drafting == "none":
        return partial(decode, target, *condition, sampling, steps.progress, known_tokens=known)
    draft_model = EagleDraftModel(gpt, subject.head, *cfg_inputs(gpt, *condition))
    if method.drafting == "jacobi":
        draft_model = SmallDraftModel(subject.small, *cfg_inputs(
            subject.small, *subject.small.condition(subject.source(numbers))))
    if watch:
        draft_model = Timed(draft_model, "draft", watch)
    if method.drafting == "jacobi":
        return partial(jacobi_decode, target, *condition, sampling, [method] * len(numbers), None, steps.progress,
                       draft_model=draft_model, known_tokens=known)
    neighbors = subject.neighbors(method.num_neighbors, method.acceptance.metric) if method.num_neighbors else None
    if contender.is_released:
        return partial(released_decode, target, draft_model, *condition, sampling, method, neighbors,
                       steps.progress, script.released(neighbors) if script else None, known_tokens=known)
    return partial(speculative_decode, target, draft_model, *condition, sampling, [method] * len(numbers), neighbors,
                   steps.progress, known_tokens=known)


@contextmanager
def intercepted(contender: Contender, script: Script | None, watch: Watch | None):
    """Calls of ops are timed by `watch` and changed by `script`: the calls of a replayed step would not be."""
    def replacement(name, call):
        call = watch.timed("ops", call) if watch else call
        return script.around(name, call) if script and not contender.is_released else call

    with ops_replaced(replacement), patch.dict(GRAPHS, {} if script else GRAPHS, clear=True):
        yield


def contenders_of(methods: list[Method], kinds: tuple[str, ...] = ("fast",), ours: bool = False) -> list[Contender]:
    """The methods, and after each the released loop's version where it exists, unless `ours` are wanted alone."""
    return [Contender(method, is_released, forward) for forward in kinds for method in methods
            if forward != "compile" or method.is_baseline
            for is_released in (False, True)[:1 + (method.name in RELEASED and not ours)]]


def measure(subject: Subject, methods: list[Method], batch: int, seconds: float, say: Callable[[str], None],
            kinds: tuple[str, ...] = ("fast",), ours: bool = False) -> list:
    """A record for each contender."""
    contenders = contenders_of(methods, kinds, ours)
    watch = Watch(Clock(subject.gpt.output.weight.device), subject.gpt)
    max_steps = None if subject.whole else STEPS
    runs = {contender.name: [] for contender in contenders}
    for contender in contenders:  # weights are packed, and forwards are compiled
        say(f"{subject.size}, batch of {batch}: {contender.name} warms up")
        run(subject, contender, batch, 0, max_steps if contender.forward == "compile" else 2)
    start, turn = perf_counter(), 0
    while turn < 2 or perf_counter() - start < seconds:
        for contender in contenders:
            taken = run(subject, contender, batch, turn, max_steps)
            runs[contender.name].append(taken)
            say(f"{subject.size}, batch of {batch}, turn {turn + 1}: {contender.name} {taken.seconds:.2f} s, "
                f"{1e3 * taken.step_seconds / max(taken.num_steps, 1):.2f} ms a step")
        turn += 1
    records = []
    for contender in contenders:
        say(f"{subject.size}, batch of {batch}: the parts of {contender.name}")
        parts = run(subject, contender, batch, 0, max_steps, watch)
        records.append(record_of(subject, contender, batch, runs, parts))
    return records


def record_of(subject: Subject, contender: Contender, batch: int, runs: dict[str, list[Run]], parts: Run) -> dict:
    """The record of a contender. parts: the run in which its parts were timed."""
    taken, method, imposed = runs[contender.name], contender.method, None
    if subject.recorder and not method.is_baseline:
        imposed = subject.recorder.tau(method)

    def cost(one: Run, of: Method) -> float:
        """Seconds for a picture. Where steps are timed, it takes as many as the recorded tokens a step ask for."""
        if subject.whole:
            return one.seconds / batch
        return one.step_seconds / one.num_steps * subject.gpt.config.tokens / subject.recorder.tau(of) / batch

    def ratio_to(other: Contender) -> float | None:
        pairs = zip(runs.get(other.name, []), taken)
        return statistics.median([cost(a, other.method) / cost(b, method) for a, b in pairs] or [0]) or None

    shares = {part: parts.parts[part] / parts.step_seconds for part in PARTS[:-1]}
    shares["rest"] = 1 - sum(shares.values())
    record = {
        "size": subject.size, "dtype": str(subject.gpt.output.weight.dtype)[6:], "batch": batch,
        "method": contender.name, "timed": "pictures" if subject.whole else "steps", "turns": len(taken),
        "picture_s": statistics.median(cost(one, method) for one in taken),
        "step_ms": 1e3 * statistics.median(one.step_seconds / one.num_steps for one in taken),
        "tau": statistics.mean(one.tau for one in taken), "imposed_tau": imposed, **shares,
        "split_step_ms": 1e3 * parts.step_seconds / parts.num_steps,
        "times_vanilla": ratio_to(Contender(METHODS["vanilla"], forward=contender.forward)),
        "times_released": None if contender.is_released else ratio_to(Contender(method, True, contender.forward))}
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in record.items()}


HEADER = (f"{'size':9}{'batch':>6}  {'method':32}{'picture s':>10}{'step ms':>9}{'tau':>6}{'imposed':>8}"
          + "".join(f"{part:>9}" for part in PARTS) + f"{'x vanilla':>11}{'x released':>11}")


def line_of(record: dict) -> str:
    def number(key, width, digits):
        return f"{'' if record[key] is None else f'{record[key]:.{digits}f}':>{width}}"

    star = "" if record["timed"] == "pictures" else "*"
    return (f"{record['size'] + star:9}{record['batch']:>6}  {record['method']:32}{number('picture_s', 10, 3)}"
            f"{number('step_ms', 9, 2)}{number('tau', 6, 2)}{number('imposed_tau', 8, 2)}"
            + "".join(f"{record[part]:>9.1%}" for part in PARTS)
            + number("times_vanilla", 11, 2) + number("times_released", 11, 2))


NOTES = (
    "picture s: of one picture, its share of the batch's seconds. step ms: of the batch. Both are medians of runs in "
    "which nothing else was timed.",
    "target, draft (model), ops, rest: their shares of the steps, in a run of its own that times every call of them. "
    "Checks of arguments, torch's own operations and Python are the rest.",
    "imposed: the model has random weights, and each step accepts as many drafts as a recorded step of the shipped "
    "model, whose tau this is. tau: what the timed runs reached. On a GPU nothing is imposed: this tau only gives "
    "picture s.",
    "*: steps in the middle of pictures were timed; picture s follows from them and from the recorded tau.",
    "x vanilla, x released: how many times as fast as plain decoding and as the released loop, with the same forwards. "
    "Medians of the ratios of a turn's runs.")


def plot(records: list[dict], path: Path) -> None:
    """Stacked bars: the milliseconds that a token of one picture takes, by part, in shades of its method's color."""
    groups = list(dict.fromkeys((r["size"], r["batch"]) for r in records))
    names = list(dict.fromkeys(r["method"] for r in records))
    figure, axes = plt.subplots(1, len(groups), squeeze=False, layout="constrained",
                                figsize=(1.2 + 2.6 * len(groups), 1.4 + 0.35 * len(names)))
    for axis, group in zip(axes[0], groups):
        rows = [r for r in records if (r["size"], r["batch"]) == group]
        ends = [0.0] * len(rows)
        colors = [method_color(r["method"].removeprefix("released ").split()[0]) for r in rows]
        for part, share in SHADES.items():
            # where steps are timed they are too few to tell tau
            taus = [r["tau"] if r["timed"] == "pictures" else r["imposed_tau"] or 1.0 for r in rows]
            widths = [r[part] * r["step_ms"] / r["batch"] / tau for r, tau in zip(rows, taus)]
            axis.barh([r["method"] for r in rows], widths, left=ends, height=0.7, lw=0.5,
                      color=[shade(color, share) for color in colors], edgecolor=colors)
            ends = [end + width for end, width in zip(ends, widths)]
        axis.invert_yaxis()
        axis.set_title(f"{group[0]}, batch of {group[1]}", fontsize=9)
        axis.set_xlabel("ms a token", fontsize=8)
        axis.tick_params(labelsize=7, labelleft=axis is axes[0][0] or len(rows) != len(names))
    figure.legend(handles=[Patch(facecolor=shade("black", share), edgecolor="black", lw=0.5, label=part)
                           for part, share in SHADES.items()],
                  loc="outside lower center", ncols=len(PARTS), fontsize=8, frameon=False)
    harness.save_plot(figure, path)


def timed_methods(texts: list[str]) -> list[Method]:
    """Raises ValueError, which names what there is, for what cannot be timed here."""
    can_be = [m.name for m in METHODS.values() if is_timed(m)]
    methods = []
    for text in texts:
        name = text.partition(":")[0]
        method = parse_method(text) if name in can_be else None
        if method is None or not is_timed(method):
            raise ValueError(f"methods must be of {', '.join(can_be)}, got {text!r}")
        methods.append(method)
    return methods


def is_timed(method: Method) -> bool:
    """Can its acceptance be imposed, and is the draft model of its trees the EAGLE head?"""
    has_head = method.parameters.get("draft_model", "eagle") == "eagle"
    return has_head and (method.drafting != "jacobi" or method.seed_exact)


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["shipped", "B", "L", "XL"], metavar="SIZE",
                        help=f"of shipped, {', '.join(SIZES)}; default shipped B L XL")
    parser.add_argument("--methods", nargs="+", default=["vanilla", "jacobi:window=8", "eagle1", "lantern"],
                        metavar="METHOD",
                        help="as `specvis generate` takes them; default vanilla jacobi:window=8 eagle1 lantern")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], metavar="B", help="default 1 8")
    parser.add_argument("--seconds", type=float, default=60.0, help="of turns, for each size and batch; at least two "
                        "turns are taken; default 60")
    parser.add_argument("--forwards", nargs="+", default=["fast"], choices=FORWARDS, help="default fast")
    parser.add_argument("--ours", action="store_true", help="without the released loop")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                        help="of the shipped model; default %(default)s")
    parser.add_argument("--json", nargs="?", const="", metavar="FILE", help="write the records; default FILE: "
                        "benchmarks/results/<machine>-decode.json")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the parts of a token's time")
    options = parser.parse_args()
    for size in options.sizes:
        if size not in ("shipped", *SIZES):
            parser.error(f"no size {size!r}, only shipped, {', '.join(SIZES)}")
    try:
        methods = timed_methods(options.methods)
    except ValueError as error:
        parser.error(str(error))
    if min(options.batch) < 1:
        parser.error(f"--batch must be at least 1, got {min(options.batch)}")
    harness.check_built(options.device)
    machine = harness.machine() | {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY")}
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(*NOTES, HEADER, sep="\n", flush=True)

    def say(text):
        print(text, file=sys.stderr, flush=True)

    pipeline = Pipeline.load(device=options.device, dtype=getattr(torch, options.dtype))
    recorder, records = Recorder(pipeline, PROMPTS), []
    for size in options.sizes:
        if size == "shipped":
            subject = Subject.of_pipeline(pipeline, PROMPTS)
        else:
            for method in methods:
                if not method.is_baseline:
                    say(f"{size}: the shipped model's steps by {method.label} are recorded")
                    recorder(method)
            subject = Subject.random(size, class_config(size), recorder, options.device)
        for batch in options.batch:
            for record in measure(subject, methods, batch, options.seconds, say, options.forwards, options.ours):
                records.append(record)
                print(line_of(record), flush=True)
            if options.json is not None:  # what is measured is kept, whatever ends the rest
                harness.write(options.json, "decode", machine, {"notes": NOTES, "rows": records})
        del subject  # one model at a time
    if options.plot:
        plot(records, options.plot)


if __name__ == "__main__":
    main()
