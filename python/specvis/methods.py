"""Decoding methods as data: how to draft, and the rule by which drafts are accepted."""
import difflib
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Method:
    """One way to decode. `drafting` is "none", "chain" (depth drafts, sampled) or "tree" (EAGLE-2's dynamic tree)."""

    name: str
    source: str                # the paper, and where in it
    drafting: str
    depth: int = 0             # levels drafted
    width: int = 0             # children a node, and nodes expanded a level
    nodes: int = 0             # size of the tree that is verified, its root counted
    k: int = 0                 # neighbors that may lend their probability; 0: lossless
    delta: float = 0.0         # the most probability they may lend (the tvd cutoff)
    residual: str = "optimal"

    def __post_init__(self):
        if self.drafting != "none" and self.depth < 1:
            raise ValueError(f"depth must be at least 1, got {self.depth}")
        if self.drafting == "tree" and self.width < 1:
            raise ValueError(f"width must be at least 1, got {self.width}")
        if self.drafting == "tree" and self.nodes < 2:
            raise ValueError(f"nodes must be at least 2 (the root and a draft), got {self.nodes}")
        if self.k < 0:
            raise ValueError(f"k must be at least 0, got {self.k}")
        if not 0 <= self.delta <= 1:
            raise ValueError(f"delta must be within [0, 1], got {self.delta}")

    @property
    def tree_nodes(self) -> int:
        """Nodes verified in one target forward, the root counted."""
        if self.drafting == "tree":
            return min(self.nodes, 1 + self.width + (self.depth - 1) * self.width ** 2)
        return 1 + self.depth

    @property
    def tv_bound(self) -> float:
        """How far in total variation one accept test may move the distribution it judges by."""
        return self.delta if self.k else 0.0


METHODS = {method.name: method for method in (
    Method("vanilla", "plain decoding, a token a forward", "none"),
    Method("speculative", "Leviathan et al. 2023, Algorithm 1", "chain", depth=4),
    Method("eagle2", "EAGLE-2, arXiv:2406.16858, section 4", "tree", depth=4, width=6, nodes=32),
    Method("lantern", "LANTERN, arXiv:2410.03355, Algorithm 1", "tree", depth=4, width=6, nodes=32,
           k=100, delta=0.2, residual="relaxed"),
)}

PARAMETERS = {"depth": ("chain", "tree"), "width": ("tree",), "nodes": ("tree",), "k": ("tree",), "delta": ("tree",)}


def method(name: str, **parameters) -> Method:
    """The method of that name with some parameters changed (those that are None stay).

    Raises:
        ValueError: unknown name (the nearest are named), a parameter that the method lacks or out of its range
    """
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=2, cutoff=0.4)
        raise ValueError(f"unknown method {name!r}; " + (f"did you mean {' or '.join(near)}? " if near else "")
                         + f"known: {', '.join(METHODS)}")
    base = METHODS[name]
    changed = {key: value for key, value in parameters.items() if value is not None}
    for key in changed:
        relaxed = key not in ("k", "delta") or base.k
        if base.drafting not in PARAMETERS.get(key, ()) or not relaxed:
            has = [p for p in PARAMETERS if base.drafting in PARAMETERS[p] and (p not in ("k", "delta") or base.k)]
            raise ValueError(f"method {name} has no parameter {key!r}; "
                             f"its parameters: {', '.join(has) or 'none'}")
    return replace(base, **changed)
