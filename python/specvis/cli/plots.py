"""Figures: matplotlib without a screen, and how each method is drawn."""
import matplotlib
import numpy as np
from matplotlib.colors import to_rgb

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402, F401  the backend is chosen before this import

# A method's color and marker. Among discrete and among continuous methods, which are in other figures, every marker
# is another one, and colors differ for color-blind readers too.
METHOD_STYLES = {
    "vanilla": ("#000000", "o"), "jacobi": ("#114cdb", "s"), "speculative": ("#565667", ">"),
    "eagle1": ("#a07a00", "^"), "eagle2": ("#eaac00", "v"), "lantern": ("#ac3529", "D"),
    "lantern++": ("#d676a9", "P"), "adt-tree": ("#149565", "<"), "adt-tree+lantern": ("#b2ba6f", "X"),
    "uniform-rsd": ("#dcabae", "p"), "cool-sd": ("#8c37a6", "*"), "lantern+optimal": ("#702129", "d"),
    "gsd": ("#5fb7fb", "h"), "gsd+coupled": ("#0a007c", "8"),
    "mar": ("#444444", "o"), "cspd": ("#1f78b4", "s"), "cspd-released": ("#b8500f", "^"), "cspd-path": ("#8fbc45", "D"),
}


def method_color(method: str) -> str:
    """The color of a method, by its name or label."""
    return METHOD_STYLES[method.partition(":")[0]][0]


def method_style(method: str, is_full: bool = True) -> dict[str, str]:
    """The color and the marker of a method, by its name or label, as arguments of a plot."""
    color, marker = METHOD_STYLES[method.partition(":")[0]]
    return {"color": color, "marker": marker, "mfc": color if is_full else "white"}


def shade(color: str, share: float) -> tuple[float, ...]:
    """A color mixed with white. share: of the color"""
    return tuple(1 - share * (1 - np.array(to_rgb(color))))
