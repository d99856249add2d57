"""`specvis convert` and `specvis generate` on random files in the published ones' form and size: seconds and memory.

    python -m benchmarks.convert B        # LlamaGen-B, class-conditional, 256 pixels, and VQ-16
    python -m benchmarks.convert XL --no-picture
    python -m benchmarks.convert MAR-B    # and KL-16

The peak of memory is the process's. It counts the pages of the files that were read, which the system may take back.
"""
import os
import sys
import tempfile
import time
from pathlib import Path

import click
import torch

from specvis.models import llamagen, mar
from specvis.models.kl_vae import KL, KLConfig
from specvis.models.llamagen import GPT
from specvis.models.mar import MAR
from specvis.models.vq import VQ, VQConfig

MODELS = (*llamagen.SIZES, *(f"MAR-{size}" for size in mar.SIZES))


def write_files(name: str, folder: Path) -> list[Path]:
    """Random weights under the official names, wrapped as the releases wrap them."""
    torch.manual_seed(0)
    if name.startswith("MAR"):
        state = MAR(mar.class_config(name[4:])).state_dict()
        made = {"checkpoint-last.pth": {"model": {}, "model_ema": state, "epoch": 400},
                "kl16.ckpt": {"model": KL(KLConfig()).state_dict()}}
    else:
        made = {f"c2i_{name}_256.pt": {"model": GPT(llamagen.class_config(name)).state_dict()},
                "vq_ds16_c2i.pt": {"model": VQ(VQConfig()).state_dict()}}
    for file, state in made.items():
        torch.save(state, folder / file)
    return [folder / file for file in made]


def measured(*arguments) -> None:
    """Run a command of specvis and print its seconds and its peak of memory."""
    command = [sys.executable, "-m", "specvis", *map(str, arguments)]
    start = time.perf_counter()
    status, usage = os.wait4(os.spawnv(os.P_NOWAIT, sys.executable, command), 0)[1:]
    seconds = time.perf_counter() - start
    print(f"specvis {arguments[0]}: {seconds:.1f} s, {usage.ru_maxrss / 2**20:.2f} GB at the peak\n")
    if status:
        sys.exit(f"specvis {arguments[0]} ended with status {os.waitstatus_to_exitcode(status)}")


@click.command()
@click.argument("name", type=click.Choice(MODELS))
@click.option("--picture/--no-picture", default=True, help="Whether to draw with it, too.")
@click.option("--method", help="[default: jacobi; mar:num_iter=8]")
def main(name, picture, method):
    with tempfile.TemporaryDirectory() as folder:
        folder, is_mar = Path(folder), name.startswith("MAR")
        files = write_files(name, folder)
        for file in files:
            print(f"{file.name}: {file.stat().st_size / 2**30:.2f} GB")
        measured("convert", *files, *([] if is_mar else ["--image-size", 256]), "--out", folder / "model")
        if picture:
            measured("generate", "--model", folder / "model", "--prompt", 207, "--out", folder / "x.png",
                     "--method", method or ("mar:num_iter=8" if is_mar else "jacobi"))


if __name__ == "__main__":
    main()
