"""Two methods side by side: the same prompts and seeds, the target forwards and seconds of each.

    python examples/compare_methods.py --methods vanilla jacobi eagle1 --pictures 4

`specvis compare` draws the pictures too.
"""
import argparse
import time

from specvis import Pipeline, parse_method

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--methods", nargs="+", default=["vanilla", "jacobi"], help="see `specvis methods`")
parser.add_argument("--pictures", type=int, default=2, help="decoded as one batch")
options = parser.parse_args()

pipeline = Pipeline.load()
prompts = ["fluent-3d red heart"] * options.pictures
sampling = pipeline.sampling(list(range(options.pictures)))
print(f"{'method':24}{'tau':>8}{'target_forwards':>17}{'seconds':>9}")
rows = []
for text in options.methods:
    method = parse_method(text)
    pipeline.check(method)  # prepares the method before the clock starts
    start = time.perf_counter()
    decoded = pipeline.tokens(prompts, method, sampling)
    seconds = time.perf_counter() - start
    rows.append((method, decoded, seconds))
    print(f"{method.label:24}{decoded.tau.mean():8.2f}{decoded.target_forwards.float().mean():17.1f}{seconds:9.2f}")
