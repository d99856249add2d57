"""Reinforcement learning with fast rollouts: a small GRPO teaches the shipped model to draw in red.

    python examples/grpo.py --updates 100 --out red

Needs specvis. An update draws a group of pictures of one prompt, with guidance, and gets the log-probability of every
token with them. A picture's reward is its share of red pixels; its advantage is how far that is from the group's mean,
in standard deviations (GRPO, arXiv:2402.03300). The last two layers and the head are trained. `--method vanilla` draws
the same tokens one by one, so that the whole run is the same; the output has the seconds. With `--out red` the rewards
are in red.json, and in red.png beside pictures of the first and the last update. On few CPU cores `jacobi` is faster
for one picture at a time (`--batch 1`); a whole group it then decodes plainly.
"""
import argparse
import json
import time

import matplotlib.pyplot as plt
import numpy as np
import torch

from specvis import Pipeline

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--method", default="jacobi", help="how pictures are decoded; see specvis methods")
parser.add_argument("--updates", type=int, default=20)
parser.add_argument("--group", type=int, default=8, help="pictures of an update, at least 2")
parser.add_argument("--batch", type=int, help="how many of them are decoded at once; default: all")
parser.add_argument("--prompt", default="noto grinning face")
parser.add_argument("--out", help="the name of two files with the rewards, without .json and .png")
args = parser.parse_args()
if args.group < 2:
    parser.error(f"--group must be at least 2, as rewards are compared within it, got {args.group}")

GUIDANCE, TEMPERATURE, CLIP, EPOCHS = 1.5, 1.0, 0.2, 2
pipeline = Pipeline.load()
gpt = pipeline.gpt
trained = [*gpt.layers[-2:].parameters(), *gpt.norm.parameters(), *gpt.output.parameters()]
optimizer = torch.optim.Adam([weight.requires_grad_() for weight in trained], lr=1e-4)


def redness(picture):
    """The share of pixels whose red is far above their green and blue."""
    red, green, blue = np.asarray(picture).astype(float).transpose(2, 0, 1) / 255
    return float((red - np.maximum(green, blue) > 0.25).mean())


def log_probs_of(tokens):
    """(B, L) log-probabilities of the tokens, as the rollout gives them, with gradients."""
    condition, padding_mask = pipeline.condition([args.prompt] * len(tokens))
    both = torch.cat([condition, gpt.null_condition(len(tokens))]), torch.cat([padding_mask, padding_mask])
    hidden = gpt.teacher_forced(*both, torch.cat([tokens, tokens]))[:, gpt.prefix_len - 1:]
    logits, uncond = gpt.output(hidden).float().chunk(2)
    guided = (uncond + GUIDANCE * (logits - uncond)) / TEMPERATURE
    return guided.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


curve, shown, drawing, training = [], [], 0.0, 0.0
for update in range(args.updates):
    start = time.perf_counter()
    seeds = list(range(update * args.group, (update + 1) * args.group))
    sampling = pipeline.sampling(seeds, guidance=GUIDANCE, temperature=TEMPERATURE, top_k=0, top_p=1.0, log_probs=True)
    decoded = pipeline.tokens([args.prompt] * args.group, args.method, sampling, batch=args.batch)
    drawing += time.perf_counter() - start

    start = time.perf_counter()
    pictures = pipeline.pictures(decoded.tokens)
    rewards = torch.tensor([redness(picture) for picture in pictures])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    tokens, old = decoded.tokens, decoded.log_probs.full
    for epoch in range(EPOCHS):
        new = log_probs_of(tokens)
        if epoch == 0:
            mismatch = (new - old).abs().max().item()  # of the decoder's log-probabilities and the trainer's
        ratio = (new - old).exp()
        objective = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
        optimizer.zero_grad()
        (-objective.mean()).backward()
        optimizer.step()
    training += time.perf_counter() - start
    curve.append({"reward": rewards.mean().item(), "tokens_per_forward": decoded.tau.mean().item(),
                  "mismatch": mismatch, "checksum": int(decoded.tokens.sum())})
    print(f"update {update + 1:3}: reward {curve[-1]['reward']:.3f}, {curve[-1]['tokens_per_forward']:.2f} tokens per "
          f"forward, log-probabilities agree to {mismatch:.0e}; "
          f"{drawing:.0f} s of drawing, {training:.0f} s of training")
    if update in (0, args.updates - 1):
        shown.append(np.hstack(pictures[:4]))
if args.out:
    with open(f"{args.out}.json", "w") as file:
        json.dump(vars(args) | {"drawing_s": drawing, "training_s": training, "curve": curve}, file, indent=1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    left.plot(range(1, args.updates + 1), [point["reward"] for point in curve])
    left.set(xlabel="update", ylabel="share of red pixels")
    right.imshow(np.vstack(shown))
    right.set(xticks=[], yticks=[], ylabel="last and first update" if len(shown) > 1 else "")
    figure.savefig(f"{args.out}.png", dpi=100)
