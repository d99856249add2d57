"""Figures: matplotlib without a screen."""
from pathlib import Path

import matplotlib

from ..files import write_whole

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  the backend is chosen before this import


def save_figure(figure, path: Path, **options) -> None:
    """Write a figure as a PNG, whole, and close it. options: of `Figure.savefig`"""
    write_whole(path, lambda file: figure.savefig(file, dpi=100, format="png", **options))
    plt.close(figure)
