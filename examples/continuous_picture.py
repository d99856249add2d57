"""A picture of continuous tokens: a MAR draws its 256 tokens in 16 target forwards.

    python examples/continuous_picture.py --method mar:num_iter=16

`--method cspd` decodes speculatively: a smaller MAR drafts.
"""
import argparse

from specvis import MARPair

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--prompt", default="fluent-3d red heart", help="a style (fluent-3d, fluent-flat, noto) and words")
parser.add_argument("--method", default="mar:num_iter=16", help="see `specvis methods`")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", default="heart.png")
options = parser.parse_args()

pair = MARPair.load()
sampling = pair.sampling([options.seed])
decoded = pair.tokens([options.prompt], options.method, sampling)
pair.pictures(decoded.tokens)[0].resize((256, 256)).save(options.out)
print(f"{options.out}: {decoded.target_forwards.item()} target forwards, {decoded.tau.item():.1f} tokens in each")
