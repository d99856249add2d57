"""Draft trees: static ones by name, from a file, or as paths; adaptive ones by the state of an image (ADT-Tree)."""
import difflib
import json
import os
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from .batch_state import BatchState
from .limits import MAX_CHILDREN, MAX_DEPTH, MAX_NODES, MAX_TOKENS, count_within, is_count, is_number, setting
from .sampling import SHAPE, uniforms_at

MAX_FILE = 2**20  # bytes of a file with a tree; one of MAX_NODES has far fewer

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
        """The tree of these paths, as the released decoders list them.

        The path [1, 0] is the first child of the second child of the root. Siblings are drawn without replacement and
        are verified in this order, so a node may not be there without its older siblings.

        Raises:
            ValueError: not a list of lists of child numbers; more than MAX_NODES nodes or MAX_DEPTH levels; or a path
                is empty, is there twice, or is there without its parent or without the sibling before it
        """
        def wrong(problem):
            return ValueError(f"tree must be a list of paths like [[0], [1], [0, 0]]: {problem}")

        if not isinstance(paths, (list, tuple)) or not paths:
            raise wrong(f"got {paths!r}")
        if len(paths) >= MAX_NODES:
            raise wrong(f"it must have at most {MAX_NODES} nodes, the root counted, got {len(paths)} paths")
        nodes = {(): 0}
        for path in paths:
            if not isinstance(path, (list, tuple)) or not path or not all(type(i) is int and i >= 0 for i in path):
                raise wrong(f"got the path {path!r}")
            if len(path) > MAX_DEPTH:
                raise wrong(f"it must have at most {MAX_DEPTH} levels, got a path of {len(path)}")
        for path in sorted(map(tuple, paths), key=lambda path: (len(path), path)):
            if path in nodes:
                raise wrong(f"{list(path)} is there twice")
            if path[:-1] not in nodes:
                raise wrong(f"{list(path)} is there without its parent {list(path[:-1])}")
            older_sibling = (*path[:-1], path[-1] - 1)
            if path[-1] > 0 and older_sibling not in nodes:
                raise wrong(f"{list(path)} is there without its older sibling {list(older_sibling)}")
            nodes[path] = len(nodes)
        return StaticTree(tuple(nodes[path[:-1]] if path else -1 for path in nodes), tuple(len(path) for path in nodes))

    @staticmethod
    def chain(depth: int) -> "StaticTree":
        """That many drafts in a row. ValueError: depth is no whole number within 1..MAX_DEPTH"""
        if not is_count(depth, 1, MAX_DEPTH):
            raise ValueError(f"depth of a chain must be {count_within(1, MAX_DEPTH)}, got {depth}")
        return StaticTree(tuple(range(-1, depth)), tuple(range(depth + 1)))

    @property
    def depth(self) -> int:
        """How many levels it has, the root not counted."""
        return self.depths[-1]

    @property
    def is_chain(self) -> bool:
        """Has every level one node?"""
        return len(self.parents) == 1 + self.depth

    @property
    def max_width(self) -> int:
        """How many children a node has at most."""
        return max(Counter(self.parents[1:]).values())

    def level(self, depth: int) -> list[int]:
        """The nodes at this depth."""
        return [n for n, d in enumerate(self.depths) if d == depth]

    def children(self, node: int) -> list[int]:
        """The children of a node, in the order in which they are verified."""
        return [n for n, parent in enumerate(self.parents) if parent == node]


@lru_cache
def static_tree(name: str | tuple) -> StaticTree:
    """A tree of TREES, "chain-5" (5 drafts in a row), of a JSON file that lists its paths, or of paths. A file is read
    once. ValueError: no such tree and no such file (the nearest names are given), or what `StaticTree.of` refuses"""
    if not isinstance(name, str):
        return StaticTree.of(name)
    if name in TREES:
        paths, level = [], [()]
        for num_children in TREES[name]:
            level = [(*path, i) for path, n in zip(level, num_children) for i in range(n)]
            paths += level
        return StaticTree.of(paths)
    chain, _, depth = name.partition("-")
    if chain == "chain" and depth.isdecimal() and depth.strip("0"):
        return StaticTree.chain(int(depth))
    if name.endswith(".json"):
        return StaticTree.of(read_paths(name))
    near = difflib.get_close_matches(name, TREES, n=2, cutoff=0.4)
    raise ValueError(f"tree must be one of {', '.join(TREES)}, chain-<depth> or a .json file of paths, got {name!r}"
                     + (f"; did you mean {' or '.join(near)}?" if near else ""))


def read_paths(name: str) -> object:
    """The content of a JSON file with a tree."""
    try:
        if (size := os.stat(name).st_size) > MAX_FILE:
            raise ValueError(f"tree {name} must be a file of at most {MAX_FILE} bytes, got {size}")
        return json.loads(Path(name).read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"tree {name} is not a file that can be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"tree {name} is no JSON: {error}") from error


STARTS = ("horizontal", "vertical", "random", "tokenflock")


@dataclass(frozen=True)
class Adaptation:
    """ADT-Tree (arXiv:2512.21857): a tree's depth and width follow what was accepted nearby in the image.

    For every position of an image, the depth and the width of the tree that drew its token are remembered, and its
    success alpha = accepted drafts / depth. The next tree is chosen in two steps. First, `start` says from which depth
    and width to start, and which alpha to look at. Then the shape is adapted: if alpha >= beta, the tree gets
    `depth_step` levels deeper and `width_step` children narrower, else the reverse. The bounds are kept.

    What the paper leaves open is in docs/differences.md. The first tree has the method's own depth and width. It is
    remembered for the tokens before it as well, which no tree drew: the image's first one, and the known tokens.
    """

    start: str = setting("where a tree's shape starts from: horizontal, vertical, random or tokenflock", "horizontal")
    beta: float = setting("share of accepted levels from which on trees get deeper, in [0, 1]", 1.0)
    depth_step: int = setting("levels that a tree gains or loses", 1)
    width_step: int = setting("children a node that a tree loses or gains", 10)
    depths: tuple[int, int] = setting("least and most levels", (1, 9))
    widths: tuple[int, int] = setting("least and most children a node, of trees deeper than 1", (4, 39))
    radius: float = setting("how many tokens far tokenflock looks", 2.0)
    # the paper's ablation
    flat_depth: int | None = setting("depth that trees start from, whatever `start` says", None)
    flat_width: int | None = setting("width that trees start from, whatever `start` says", None)

    def __post_init__(self):
        if self.start not in STARTS:
            raise ValueError(f"start must be one of {', '.join(STARTS)}, got {self.start!r}")
        if not is_number(self.beta, 0, 1):
            raise ValueError(f"beta must be within [0, 1], got {self.beta}")
        if not is_number(self.radius, 1, MAX_TOKENS):
            raise ValueError(f"radius must be within [1, {MAX_TOKENS}], got {self.radius}")
        for name, low, high in (("depth_step", 0, MAX_DEPTH), ("width_step", 0, MAX_CHILDREN),
                                ("flat_depth", 1, MAX_DEPTH), ("flat_width", 1, MAX_CHILDREN)):
            value = getattr(self, name)
            if not is_count(value, low, high) and (value is not None or name.endswith("step")):
                raise ValueError(f"{name} must be {count_within(low, high)}, got {value}")
        for name, limit in (("depths", MAX_DEPTH), ("widths", MAX_CHILDREN)):
            low, high = getattr(self, name)
            if not is_count(low, 1, limit) or not is_count(high, low, limit):
                raise ValueError(f"{name} must be 1 <= least <= most <= {limit}, got {low} and {high}")


class Shapes(BatchState):
    """The depth and width of the next tree of each of B requests, for images of rows of tokens.

    Without an adaptation they never change.
    """

    ROWS = ("depth", "width", "max_nodes", "seeds", "first", "depths", "widths", "alphas")

    def __init__(self, depth: Tensor, width: Tensor, max_nodes: Tensor, columns: int, num_tokens: int,
                 adaptation: Adaptation | None = None, seeds: Tensor | None = None):
        """
        Args:
            depth, width: (B,) int64  of the first tree
            max_nodes:    (B,) int64  how many drafts a tree has at most: no tree is deeper or wider
            columns:      how many tokens a row of the image has
            num_tokens:   L
            seeds:        (B,) int64  for the start "random"
        """
        self.depth, self.width, self.max_nodes = depth.minimum(max_nodes), width.minimum(max_nodes), max_nodes
        self.adaptation, self.seeds = adaptation, seeds
        self.columns, self.num_tokens = columns, num_tokens
        self.first = torch.ones_like(depth)  # (B,) the position of the first token that a tree draws
        self.depths, self.widths, self.alphas = torch.zeros(
            3, len(depth), self.num_tokens, dtype=torch.float32, device=depth.device)

    def record(self, position: Tensor, num_accepted: Tensor, active: Tensor) -> None:
        """Remember a step's tree for the tokens that it drew, and choose the next tree.

        Args:
            position:     (B,) int64  of the step's first token
            num_accepted: (B,) int64  how many of its tokens were drafts; one more token was drawn
            active:       (B,) bool   images that go on; the others get the smallest tree
        """
        if self.adaptation is None:
            return
        a, L = self.adaptation, self.num_tokens
        positions = torch.arange(L, device=position.device)
        begin = torch.where(position == self.first, 0, position)
        is_new = (positions >= begin[:, None]) & (positions <= (position + num_accepted)[:, None])
        alpha = num_accepted / self.depth
        for table, value in ((self.depths, self.depth), (self.widths, self.width), (self.alphas, alpha)):
            table.copy_(torch.where(is_new, value[:, None].float(), table))
        depth, width, alpha = self._start((position + num_accepted + 1).clamp(max=L - 1), alpha)
        grow = alpha >= a.beta
        depth = (depth + torch.where(grow, a.depth_step, -a.depth_step)).clamp(*a.depths).minimum(self.max_nodes)
        width = (width + torch.where(grow, -a.width_step, a.width_step)).clamp(min=1)
        width = torch.where(depth > 1, width.clamp(*a.widths), width).minimum(self.max_nodes)
        self.depth.copy_(torch.where(active, depth, 1))
        self.width.copy_(torch.where(active, width, 1))

    def _start(self, position: Tensor, last_alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Depth and width that the tree at `position` (B,) starts from, and the alpha that decides how it adapts."""
        a = self.adaptation
        if a.start in ("horizontal", "vertical"):
            depth, width, alpha = self._of_neighbor(position)
        else:
            depth, width = self._of_flock(position) if a.start == "tokenflock" else self._random(position)
            alpha = last_alpha
        depth = depth if a.flat_depth is None else torch.full_like(depth, a.flat_depth)
        width = width if a.flat_width is None else torch.full_like(width, a.flat_width)
        return depth.round().long(), width.round().long(), alpha

    def _of_neighbor(self, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Depth, width and alpha of the position to the left or above."""
        row, column = position // self.columns, position % self.columns
        left, up = position - 1, position - self.columns
        prefer_left = column > 0 if self.adaptation.start == "horizontal" else row == 0
        neighbor = torch.where(prefer_left | (up < 0), left, up).clamp(min=0)[:, None]
        return tuple(table.gather(1, neighbor)[:, 0] for table in (self.depths, self.widths, self.alphas))

    def _of_flock(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """The mean depth and width of the earlier positions within the radius, the nearer rows weighing more."""
        n, radius = self.columns, self.adaptation.radius
        positions = torch.arange(self.num_tokens, device=position.device)
        rows_up = (position // n)[:, None] - positions // n                 # how much higher in the image it is
        columns_left = (position % n)[:, None] - positions % n
        distance = (rows_up ** 2 + columns_left ** 2).float().sqrt()
        near = (distance <= radius) & (positions < position[:, None])
        weight = torch.where(near, (radius - rows_up + 1) / radius, 0.0)
        weight = weight / weight.sum(1, keepdim=True)
        return tuple((weight * table).sum(1) for table in (self.depths, self.widths))

    def _random(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Depth and width drawn uniformly within the bounds."""
        u = uniforms_at(self.seeds, position, 2, SHAPE)
        return tuple(low + torch.floor(u[:, i] * (high - low + 1))
                     for i, (low, high) in enumerate((self.adaptation.depths, self.adaptation.widths)))
