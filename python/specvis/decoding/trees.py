"""Draft trees: static ones by name, from a file, or as paths; adaptive ones by the state of an image (ADT-Tree)."""
import difflib
import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

# The trees of the released decoders (EAGLE, Medusa, LANTERN): how many children each node has, level by level, in
# order; the nodes left out at the end of a level have none.
TREES = {
    "mc_sim_7b_63": ((4,), (3, 2, 2, 1), (3, 2, 2, 1), (3,), (2,)),
    "mc_sim_7b_63_balanced": ((3,), (3, 3, 2), (3, 2, 0, 2, 2), (3,), (2,)),
    "reverse_balanced_25": ((3,), (2, 1, 1), (3, 2, 1), (3, 2), (4, 3)),
    "naive_extend_57": ((5,), (4, 3, 3, 2, 1), (4, 3, 3, 2, 2, 1, 0, 1), (4, 3, 2, 1, 2, 1, 0, 1),
                        (3, 2, 0, 0, 2, 1, 0, 1)),
    "medusa_2_7b_63": ((10,), (10, 5, 2, 2, 1, 1, 1, 1), (9, 4, 2, 1, 1, 1, 0, 0, 0, 0, 3, 1, 0, 0, 0, 1),
                       (4, 1, 1, 0, 0, 0, 0, 0, 0, 1)),
}


@dataclass(frozen=True)
class StaticTree:
    """A tree whose shape is known before it is drafted. Nodes are numbered level by level, the root is 0."""

    parents: tuple[int, ...]  # of every node; the root's is -1
    depths: tuple[int, ...]   # of every node; the root's is 0

    @staticmethod
    def of(paths) -> "StaticTree":
        """The tree of these paths, as the released decoders list them: [1, 0] is the first child of the second
        child of the root. Children are tried in this order, and drawn without replacement, so none is left out.

        Raises:
            ValueError: not a list of lists of child numbers, or a path is empty, twice there, or without its parent
                or its elder sibling
        """
        def wrong(problem):
            return ValueError(f"tree must be a list of paths like [[0], [1], [0, 0]]: {problem}")

        if not isinstance(paths, (list, tuple)) or not paths:
            raise wrong(f"got {paths!r}")
        nodes = {(): 0}
        for path in paths:
            if not isinstance(path, (list, tuple)) or not path or not all(type(i) is int and i >= 0 for i in path):
                raise wrong(f"got the path {path!r}")
        for path in sorted(map(tuple, paths), key=lambda path: (len(path), path)):
            if path in nodes:
                raise wrong(f"{list(path)} is there twice")
            if path[:-1] not in nodes:
                raise wrong(f"{list(path)} is there without its parent {list(path[:-1])}")
            elder = (*path[:-1], path[-1] - 1)
            if path[-1] > 0 and elder not in nodes:
                raise wrong(f"{list(path)} is there without {list(elder)}")
            nodes[path] = len(nodes)
        return StaticTree(tuple(nodes[path[:-1]] if path else -1 for path in nodes), tuple(len(path) for path in nodes))

    @staticmethod
    def chain(depth: int) -> "StaticTree":
        return StaticTree(tuple(range(-1, depth)), tuple(range(depth + 1)))

    @property
    def depth(self) -> int:
        """Its levels, the root not counted."""
        return self.depths[-1]

    @property
    def is_chain(self) -> bool:
        return len(self.parents) == 1 + self.depth

    @property
    def widest(self) -> int:
        """The most children that a node has."""
        return max(self.parents.count(n) for n in range(len(self.parents)))

    def level(self, depth: int) -> list[int]:
        """Its nodes at this depth."""
        return [n for n, d in enumerate(self.depths) if d == depth]

    def children(self, node: int) -> list[int]:
        return [n for n, parent in enumerate(self.parents) if parent == node]


@lru_cache
def static_tree(name: str | tuple) -> StaticTree:
    """A tree of TREES, "chain-5" (so many drafts in a row), of a JSON file that lists its paths, or of paths.

    A file is read once.

    Raises:
        ValueError: no such tree and no such file (the nearest names are given), or what `StaticTree.of` refuses
    """
    if not isinstance(name, str):
        return StaticTree.of(name)
    if name in TREES:
        paths, level = [], [()]
        for counts in TREES[name]:
            level = [(*path, i) for path, count in zip(level, counts) for i in range(count)]
            paths += level
        return StaticTree.of(paths)
    chain, _, depth = name.partition("-")
    if chain == "chain" and depth.isdecimal() and int(depth) > 0:
        return StaticTree.chain(int(depth))
    if name.endswith(".json") and Path(name).is_file():
        try:
            return StaticTree.of(json.loads(Path(name).read_text()))
        except json.JSONDecodeError as error:
            raise ValueError(f"tree {name} is no JSON: {error}") from error
    if name.endswith(".json"):
        raise ValueError(f"tree {name} is not a file")
    near = difflib.get_close_matches(name, TREES, n=2, cutoff=0.4)
    raise ValueError(f"tree must be one of {', '.join(TREES)}, chain-<depth> or a .json file of paths, got {name!r}"
                     + (f"; did you mean {' or '.join(near)}?" if near else ""))


STARTS = ("horizontal", "vertical", "random", "tokenflock")


@dataclass(frozen=True)
class Adaptation:
    """ADT-Tree (arXiv:2512.21857): trees as deep and as wide as their neighborhood in the image lets expect.

    The state of an image is, for every position, depth, width and success of the tree that drew the token there.
    A step starts from the shape that `start` says and adapts it by success alpha = accepted / depth: from beta on it
    gets depth_step deeper and width_step narrower, else the reverse, within the bounds.

    What the paper leaves open is decided so: alpha is that of the position that the shape comes from ("horizontal",
    "vertical"), else that of the token before; at the start of a row "horizontal" looks up, and in the first row
    "vertical" looks left; the first tree of an image has the method's own depth and width, unadapted, and counts for
    the image's first token too, which no tree drew; every tree keeps at most the method's `nodes`.
    """

    start: str = "horizontal"
    beta: float = 1.0
    depth_step: int = 1
    width_step: int = 10
    depths: tuple[int, int] = (1, 9)   # least and most
    widths: tuple[int, int] = (4, 39)  # least and most; where the new depth is 1 any width may be
    radius: float = 2.0                # "tokenflock": how many tokens far it looks
    flat_depth: int | None = None      # start from this depth
    flat_width: int | None = None      # or this width, whatever the neighborhood says: the paper's ablation

    def __post_init__(self):
        if self.start not in STARTS:
            raise ValueError(f"start must be one of {', '.join(STARTS)}, got {self.start!r}")
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta must be within [0, 1], got {self.beta}")
        if not 1 <= self.radius < math.inf:
            raise ValueError(f"radius must be at least 1 and finite, got {self.radius}")
        for name, least in (("depth_step", 0), ("width_step", 0), ("flat_depth", 1), ("flat_width", 1)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("depths", "widths"):
            least, most = getattr(self, name)
            if not 1 <= least <= most:
                raise ValueError(f"{name} must be 1 <= least <= most, got {least} and {most}")


class Shapes:
    """Depth and width of the next tree of each request, for images of `grid` x `grid` tokens.

    Without an adaptation they stay what they are at the start.
    """

    def __init__(self, depth: Tensor, width: Tensor, most: Tensor, grid: int, adaptation: Adaptation | None = None,
                 uniforms: Tensor | None = None):
        """depth and width (B,) int64 of the first tree; no tree is deeper or wider than `most` (B,).

        uniforms (B, L, 2): for "random".
        """
        self.depth, self.width, self.most = depth.minimum(most), width.minimum(most), most
        self.grid, self.adaptation, self.uniforms = grid, adaptation, uniforms
        self.depths, self.widths, self.alphas = torch.zeros(3, len(depth), grid * grid, device=depth.device)

    def record(self, first: Tensor, accepted: Tensor, going: Tensor) -> None:
        """A step drew the tokens from `first` (B,) on, `accepted` (B,) of them drafts: choose the next tree.

        going (B,) bool: the images that this step was for; the others get the smallest tree.
        """
        if self.adaptation is None:
            return
        a, L = self.adaptation, self.grid * self.grid
        places = torch.arange(L, device=first.device)
        begin = torch.where(first == 1, 0, first)
        new = (places >= begin[:, None]) & (places <= (first + accepted)[:, None])
        alpha = accepted / self.depth
        for table, value in ((self.depths, self.depth), (self.widths, self.width), (self.alphas, alpha)):
            table.copy_(torch.where(new, value[:, None].float(), table))
        depth, width, alpha = self._start((first + accepted + 1).clamp(max=L - 1), alpha)
        grow = alpha >= a.beta
        depth = (depth + torch.where(grow, a.depth_step, -a.depth_step)).clamp(*a.depths).minimum(self.most)
        width = (width + torch.where(grow, -a.width_step, a.width_step)).clamp(min=1)
        width = torch.where(depth > 1, width.clamp(*a.widths), width).minimum(self.most)
        self.depth, self.width = torch.where(going, depth, 1), torch.where(going, width, 1)

    def _start(self, position: Tensor, last_alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The shape that the tree at `position` (B,) starts from, and the alpha that it is judged by."""
        a, n = self.adaptation, self.grid
        row, column = position // n, position % n
        if a.start in ("horizontal", "vertical"):
            left, up = position - 1, position - n
            wish_left = column > 0 if a.start == "horizontal" else row == 0
            source = torch.where(wish_left | (up < 0), left, up).clamp(min=0)[:, None]
            depth, width, alpha = (t.gather(1, source)[:, 0] for t in (self.depths, self.widths, self.alphas))
        elif a.start == "tokenflock":
            place = torch.arange(n * n, device=position.device)
            down = row[:, None] - place // n                                    # how much higher in the image
            far = (down ** 2 + (column[:, None] - place % n) ** 2).float().sqrt()
            near = (far <= a.radius) & (place < position[:, None])
            weight = torch.where(near, (a.radius - down + 1) / a.radius, 0.0)
            weight = weight / weight.sum(1, keepdim=True)
            depth, width = ((weight * t).sum(1) for t in (self.depths, self.widths))
            alpha = last_alpha
        else:
            u = self.uniforms.gather(1, position[:, None, None].expand(-1, 1, 2))[:, 0]
            depth, width = (least + torch.floor(u[:, i] * (most - least + 1))
                            for i, (least, most) in enumerate((a.depths, a.widths)))
            alpha = last_alpha
        depth = depth if a.flat_depth is None else torch.full_like(depth, a.flat_depth)
        width = width if a.flat_width is None else torch.full_like(width, a.flat_width)
        return depth.round().long(), width.round().long(), alpha
