"""A step of transformers' models, beside their `generate`:   python -m benchmarks.families [--models ..] [--json]

Models of transformers with random weights in bfloat16: "janus-1.3b" is a Llama with the sizes of Janus-Pro-1B's decoder
(its image tokens have an embedding and a head of their own, of equal sizes), "7b" a Chameleon of Anole's sizes.
Prompts have 32 ids, there is no guidance, which `generate` has not either, and tokens are drawn without filters.

A step is a forward for each picture, with its draws; with random weights no guess is right, so only steps are compared.
Our loops read by the model's modules, and by what the target takes in their place where it takes something: the column
"reader" has the ops of layers that were called. Beside them stand `generate`, with sdpa and a cache that grows; on a
GPU `generate` with a static cache too, whose forward transformers compiles; and the time in which a large tensor of as
many bytes as the weights is read. All take turns. On a GPU the first steps are not timed. On a CPU a single thread's
time (OMP_NUM_THREADS=1) is its own, without what other programs take.
"""
import argparse
import statistics
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import thread_time
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.decode import SETTLING, Enough, Steps
from benchmarks.forward import bandwidth
from benchmarks.watch import Clock, ops_replaced
from specvis.decoding.baseline import decode
from specvis.decoding.graphs import can_replay
from specvis.decoding.jacobi import jacobi_decode
from specvis.decoding.methods import Method, parse_method
from specvis.decoding.sampling import Sampling
from specvis.models import layers
from specvis.models.interface import num_tokens
from specvis.models.transformers import ImageModel

PROMPT = 32  # ids of a prompt
READS = 5    # that are timed together
LAYER_OPS = ("decoder_layers", "tree_attention", "rotate_into_cache", "rms_norm", "swiglu")
MODELS = {  # family; hidden and intermediate size, layers, heads, ids; first code, codes; rows of a picture
    "janus-1.3b": ("Llama", 2048, 5632, 24, 16, 16384, 0, 16384, 24),
    "7b": ("Chameleon", 4096, 11008, 32, 32, 65536, 4, 8192, 32),
    "tiny": ("Llama", 64, 48, 2, 4, 40, 8, 10, 8)}
CODES = {"vocabulary_map": {"<image>": 3, "IMGIMGAZ": 4}, "vq_config": {"base_channels": 32}}  # Chameleon asks for both
WEIGHTS, COMPILED = "weights, read once", "generate, compiled"
LINE = "{:12}{:>6}  {:20}{:28}{:>10}{:>10}{:>15}"


class Target(ImageModel):
    has_guidance = False


def target_of(name: str, device: str) -> Target:
    """The model, made on the device. It reads by `decoder_layers` where it can."""
    import transformers

    family, hidden, intermediate, num_layers, heads, ids, first, codes, rows = MODELS[name]
    kind, more = ("ImageTextToText", CODES) if family == "Chameleon" else ("CausalLM", {})
    config = getattr(transformers, f"{family}Config")(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=num_layers, num_attention_heads=heads,
        num_key_value_heads=heads, vocab_size=ids, max_position_embeddings=4096, eos_token_id=None, **more)
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"AutoModelFor{kind}").from_config(config, dtype=torch.bfloat16)
    target = Target(model.eval().requires_grad_(False), range(first, first + codes), PROMPT, (rows, rows), [0])
    with suppress(ValueError):  # a device on which it does not read, or reads without being asked
        target.use_decoder_layers()
    return target


def weights_of(target: Target) -> int:
    """Bytes of the weights that a forward reads: of the layers, the norm, and the codes' rows of the head."""
    head = target.model.get_output_embeddings().weight[target.head_rows]
    return head.nbytes + sum(weight.nbytes for part in (target.decoder.layers, target.decoder.norm)
                             for weight in part.parameters())


def generate(target: Target, prompts: Tensor, progress: Callable[[int], None], **options) -> None:
    def criterion(ids, scores):
        progress(len(ids))
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    target.model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0, top_k=0,
                          top_p=1.0, max_new_tokens=num_tokens(target), stopping_criteria=[criterion], **options)


def ours(target: Target, prompts: Tensor, progress: Callable[[int], None], method: Method, by_modules: bool) -> None:
    seeds = list(range(len(prompts)))
    request = *target.condition(prompts), Sampling.of(seeds, guidance=1.0, device=target.device)
    with patch.object(layers, "USE_KERNELS", not by_modules):
        if method.is_baseline:
            decode(target, *request, progress)
        else:
            jacobi_decode(target, *request, [method] * len(seeds), None, progress)


def step_ms(call: Callable, clock: Clock, num_steps: int, is_ours: bool) -> float:
    steps = Steps(clock, SETTLING if clock.is_cuda else 0, num_steps, not is_ours, None)
    with steps.counted(), suppress(Enough):
        call(steps.progress)
    return 1e3 * (clock.now() - steps.begin) / steps.num


def read_ms(call: Callable, num_reads: float, clock: Clock) -> float:
    """num_reads: how many times what the call reads the weights are"""
    begin = clock.now()
    for _ in range(READS):
        call()
    return 1e3 * (clock.now() - begin) / READS * num_reads


def reader_of(call: Callable) -> str:
    """The ops of layers that a call calls."""
    called = set()
    with ops_replaced(lambda op, kernel: lambda *args, **more: called.add(op) or kernel(*args, **more)):
        call()
    return " + ".join(op for op in LAYER_OPS if op in called) or "modules"


def measure(target: Target, name: str, methods: list[Method], batch: int, num_steps: int, runs: int) -> list[dict]:
    """A record for each contender. The first run of each, which is not timed, says what it reads by."""
    clock = Clock(target.device)
    if not clock.is_cuda and torch.get_num_threads() == 1:
        clock.now = thread_time
    with torch.device(target.device):
        prompts = torch.randint(3, len(target.embed.weight), (batch, PROMPT))
        read, gigabytes = bandwidth("")
    times = {(WEIGHTS, ""): (partial(read_ms, read, weights_of(target) / 1e9 / gigabytes, clock), [])}
    contenders = [("generate", partial(generate, target, prompts))]
    if clock.is_cuda:
        torch.compiler.reset()  # or the second batch is compiled for batches of any size
        contenders.append((COMPILED, partial(generate, target, prompts, cache_implementation="static")))
    else:
        print(f"{COMPILED}: left out, as transformers compiles for GPUs alone")
    contenders += [(method.label, partial(ours, target, prompts, method=method, by_modules=by_modules))
                   for method in methods for by_modules in (True, False)]
    for what, call in contenders:
        print(f"{name}, batch of {batch}: {what} warms up", file=sys.stderr, flush=True)
        timed = partial(step_ms, call, clock, num_steps, call.func is ours)
        reader = reader_of(timed)
        if call.func is ours and clock.is_cuda and can_replay(target):
            reader += ", replayed"
        if what == COMPILED and not hasattr(target.model, "_compiled_call"):
            reader += ", not compiled"
        times.setdefault((what, reader), (timed, []))
    for _ in range(runs):
        for timed, samples in times.values():
            samples.append(timed())
    limit = statistics.median(times[WEIGHTS, ""][1])
    return [{"model": name, "batch": batch, "what": what, "reader": reader,
             "step_ms": float(f"{statistics.median(samples):.4g}"), "min_ms": float(f"{min(samples):.4g}"),
             "times_weights": round(statistics.median(samples) / limit, 2), "runs": runs}
            for (what, reader), (_, samples) in times.items()]


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["janus-1.3b", "7b"], choices=MODELS, metavar="MODEL",
                        help=f"of {', '.join(MODELS)}; default janus-1.3b 7b")
    parser.add_argument("--methods", nargs="+", default=["vanilla", "jacobi:window=16"], metavar="METHOD",
                        help="without a draft model; default vanilla jacobi:window=16")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], metavar="B", help="default 1 8")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default %(default)s")
    parser.add_argument("--steps", type=int, help="of a run; default 16 on a CPU, 64 on a GPU")
    parser.add_argument("--runs", type=int, default=5, help="of each, in turns; default 5")
    parser.add_argument("--json", nargs="?", const="", metavar="FILE", help="write the records; default FILE: "
                        "benchmarks/results/<machine>-families.json")
    options = parser.parse_args()
    try:
        methods = [parse_method(text) for text in options.methods]
    except ValueError as error:
        parser.error(str(error))
    if wrong := [m.label for m in methods if m.drafting not in ("none", "jacobi") or m.drafts.refresh]:
        parser.error(f"--methods must have no draft model, got {wrong[0]}")
    if min(*options.batch, options.runs, options.steps or 1) < 1:
        parser.error("--batch, --steps and --runs must be at least 1")
    harness.check_built(options.device)
    machine, records = harness.machine() | {"transformers": harness.installed("transformers")}, []
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(LINE.format(*("model batch what reader step_ms min_ms times_weights".split())), flush=True)
    for name in options.models:
        target, num_steps = target_of(name, options.device), options.steps or (64 if "cuda" in options.device else 16)
        for batch in options.batch:
            rows = measure(target, name, methods, batch, num_steps, options.runs)
            print(*(LINE.format(*row.values()) for row in rows), sep="\n", flush=True)
            records += rows
            if options.json is not None:  # what is measured is kept, whatever ends the rest
                harness.write(options.json, "families", machine, {"rows": records})
        del target  # one model at a time


if __name__ == "__main__":
    main()
