"""One picture: a prompt, a method by its name, a PNG.

    python examples/one_picture.py --prompt "fluent-3d red heart" --method eagle1
"""
import argparse

from specvis import Pipeline

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--prompt", default="fluent-3d red heart", help="a style (fluent-3d, fluent-flat, noto) and words")
parser.add_argument("--method", default="jacobi", help="see `specvis methods`")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", default="heart.png")
options = parser.parse_args()

pipeline = Pipeline.load()  # the shipped model; Pipeline.load(folder) for your own
sampling = pipeline.sampling([options.seed])
decoded = pipeline.tokens([options.prompt], options.method, sampling)
pipeline.pictures(decoded.tokens)[0].resize((256, 256)).save(options.out)
print(f"{options.out}: {decoded.tau.item():.2f} tokens per target forward, "
      f"{decoded.acceptance_rate:.0%} of the drafted levels accepted, "
      f"added total variation per token about {decoded.tv_excess.item() / pipeline.num_tokens:.3f}")
