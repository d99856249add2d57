"""Which pictures change with the number of threads or of pictures at once:   python -m benchmarks.determinism

Draws pictures again and again by the shipped models, with fixed prompts and seeds. For each method it prints how many
pictures have other tokens, and how many have other pixels, than the pictures that one thread drew all at once. A
seed-exact method is also compared with plain decoding.
"""
import argparse
from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks import harness
from specvis.cli.options import CONTINUOUS_GUIDANCE, FILTERS, PROMPTS
from specvis.decoding.continuous_state import ContinuousSampling
from specvis.decoding.methods import ContinuousMethod, parse_method
from specvis.decoding.sampling import Sampling
from specvis.pipelines.discrete import Pipeline
from specvis.pipelines.mar import MARPair

THREADS, BATCH = (2, 4, 8), (1, 3)
METHODS = ("vanilla", "jacobi:window=16", "eagle2")


def draw(pipeline: Pipeline | MARPair, name: str, count: int, threads: int, batch: int) -> tuple[Tensor, np.ndarray]:
    """Tokens and pixels; the pictures are decoded together, so that only tokens can make them differ."""
    torch.set_num_threads(threads)
    prompts, seeds = [PROMPTS[i % len(PROMPTS)] for i in range(count)], list(range(count))
    parts = []
    for begin in range(0, count, batch):
        part = slice(begin, begin + batch)
        if isinstance(pipeline, MARPair):
            sampling = ContinuousSampling.of(seeds[part], guidance=CONTINUOUS_GUIDANCE)
        else:
            sampling = Sampling.of(seeds[part], **FILTERS)
        parts.append(pipeline.tokens(prompts[part], name, sampling).tokens)
    tokens = torch.cat(parts)
    return tokens, pixels(pipeline.pictures(tokens))


def pixels(pictures: list[Image.Image]) -> np.ndarray:
    return np.stack([np.asarray(picture) for picture in pictures]).astype(int)


def differences(name: str, count: int) -> Iterator[tuple[str, int, int, int]]:
    """(what is other, pictures with other tokens, with other pixels, the largest difference of a pixel, of 255)."""
    method = parse_method(name)
    pipeline = MARPair.load() if isinstance(method, ContinuousMethod) else Pipeline.load()
    tokens, picture = draw(pipeline, name, count, 1, count)

    def against(what: str, other_tokens: Tensor, other: np.ndarray) -> tuple[str, int, int, int]:
        distance = abs(other - picture)
        num_other = (other_tokens != tokens).flatten(1).any(1).sum(), (distance > 0).any((1, 2, 3)).sum()
        return what, *map(int, num_other), int(distance.max())

    for threads in THREADS:
        yield against(f"{threads} threads", *draw(pipeline, name, count, threads, count))
    for batch in BATCH:
        yield against(f"{batch} at once", *draw(pipeline, name, count, 1, batch))
    if getattr(method, "seed_exact", False) and not method.is_baseline:
        yield against("plain decoding", *draw(pipeline, "vanilla", count, 1, count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("-n", "--count", type=int, default=16, help="pictures")
    arguments = parser.parse_args()
    harness.check_built("cpu")
    print(f"of {arguments.count} pictures      | other tokens | other pixels | by at most (of 255)")
    for name in arguments.methods:
        for what, other_tokens, other_pixels, most in differences(name, arguments.count):
            print(f"{name:10} {what:15} | {other_tokens:12} | {other_pixels:12} | {most:5}", flush=True)


if __name__ == "__main__":
    main()
