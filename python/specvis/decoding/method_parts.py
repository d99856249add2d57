"""What methods for discrete tokens are made of: how a method drafts, and which drafts it accepts.

Each setting is a field with its help, which `specvis methods NAME` prints. A setting out of its range is a ValueError.
"""
import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from . import limits
from .bounds import omega_schedule
from .limits import count_within, is_count, is_number, setting
from .trees import Adaptation, static_tree

FINITE = "at least 0 and finite in 32 bits"
CUTOFFS, RESIDUALS = ("tvd", "ratio", "jsd"), ("optimal", "relaxed", "released")
METRICS = ("l2", "raw", "cosine", "random", "rank")
COUPLINGS = ("maximal", "none")
USUAL_WINDOW = 16  # of Jacobi decoding; on a CPU it is smaller, see `Recipe.with_window`
DRAFT_MODELS = {"eagle": "the EAGLE head on the target's hidden states",
                "small": "a smaller model of the target's family"}


class Size(NamedTuple):
    """The most that a step of a method can have."""

    depth: int  # drafts that it accepts
    nodes: int  # nodes that one target forward verifies, the root counted
    width: int  # children of a node


class MethodPart:
    """A part of a method."""

    def need(self, name: str, condition: bool, wanted: str) -> None:
        """Raise ValueError unless the condition holds. wanted: what the setting must be, in words"""
        if not condition:
            raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

    @property
    def parameters(self) -> dict:
        """The settings and their values, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class NoDrafts(MethodPart):
    """Every target forward gives one token. To Jacobi decoding it is a window of no guesses."""

    drafting, window, refresh = "none", 0, 0

    def size(self, seed_exact: bool) -> Size:
        return Size(0, 1, 0)


@dataclass(frozen=True)
class JacobiDrafts(MethodPart):
    """The target itself guesses the next tokens, and improves its guesses from forward to forward. A small model may
    refresh them in between."""

    drafting = "jacobi"

    window: int | None = setting(f"guesses that a forward reads, at most {limits.MAX_GUESSES}; if none is named, "
                                 f"{USUAL_WINDOW}, but on a CPU 4 for one picture and 2 for several at once", None)
    refresh: int = setting("how often a small draft model refreshes the guesses between two target forwards, at most "
                           f"{limits.MAX_REFRESHES}; 0: no draft model", 0)

    def __post_init__(self):
        self.need("window", self.window is None or is_count(self.window, 1, limits.MAX_GUESSES),
                  count_within(1, limits.MAX_GUESSES))
        self.need("refresh", is_count(self.refresh, 0, limits.MAX_REFRESHES), count_within(0, limits.MAX_REFRESHES))

    def size(self, seed_exact: bool) -> Size:
        window = USUAL_WINDOW if self.window is None else self.window
        return Size(window, 1 + window, 1)


@dataclass(frozen=True)
class TreeDrafts(MethodPart):
    """A draft model proposes trees."""

    draft_model: str = setting("who drafts: " + ", ".join(f"{name} ({what})" for name, what in DRAFT_MODELS.items()),
                               "eagle")
    draft_guidance: float = setting("share of the guidance that the draft model gets; 0: it drafts without", 1.0,
                                    per_request=True)

    def __post_init__(self):
        self.need("draft_model", self.draft_model in DRAFT_MODELS, f"one of {', '.join(DRAFT_MODELS)}")
        self.need("draft_guidance", is_number(self.draft_guidance, 0), FINITE)


@dataclass(frozen=True)
class StaticDrafts(TreeDrafts):
    """All trees have one shape. Children are sampled without replacement; at temperature 0 they are the likeliest."""

    drafting = "static"

    tree: str | tuple = setting("static tree: a name, chain-<depth>, or a JSON file of paths; at most "
                                f"{limits.MAX_NODES} nodes")

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.tree, list):
            object.__setattr__(self, "tree", tuple(tuple(p) if isinstance(p, list) else p for p in self.tree))
        self.need("tree", isinstance(self.tree, (str, tuple)), "a name or a list of paths")
        static_tree(self.tree)

    @property
    def parameters(self) -> dict:
        """With the depth of a chain, which may be given in place of the tree."""
        tree = static_tree(self.tree)
        return super().parameters | ({"depth": tree.depth} if tree.is_chain else {})

    def size(self, seed_exact: bool) -> Size:
        tree = static_tree(self.tree)
        return Size(tree.depth, len(tree.parents), tree.max_width)


@dataclass(frozen=True)
class DynamicDrafts(TreeDrafts):
    """The trees are EAGLE-2's: the likeliest tokens, `depth` x `width`, cut to `nodes`.

    With an `adaptation` the depth and the width change from step to step, as ADT-Tree says.
    """

    drafting = "dynamic"

    depth: int = setting(f"levels that a step drafts, at most {limits.MAX_DEPTH}", per_request=True)
    width: int = setting(f"children of a node, at most {limits.MAX_CHILDREN}", per_request=True)
    nodes: int = setting(f"how many nodes a step verifies at most, the root counted; no more than {limits.MAX_NODES}",
                         per_request=True)
    adaptation: Adaptation | None = None  # None: every tree has the same depth and width

    def __post_init__(self):
        super().__post_init__()
        self.need("depth", is_count(self.depth, 1, limits.MAX_DEPTH), count_within(1, limits.MAX_DEPTH))
        self.need("width", is_count(self.width, 1, limits.MAX_CHILDREN), count_within(1, limits.MAX_CHILDREN))
        self.need("nodes", is_count(self.nodes, 2, limits.MAX_NODES),
                  f"{count_within(2, limits.MAX_NODES)} (the root is one)")

    @property
    def parameters(self) -> dict:
        """With the adaptation's parameters in its place."""
        own = super().parameters
        adaptation = own.pop("adaptation")
        return own | (vars(adaptation) if adaptation else {})

    def size(self, seed_exact: bool) -> Size:
        """A tree of one level may adapt beyond the width of the others."""
        if self.adaptation:
            return Size(min(max(self.depth, self.adaptation.depths[1]), self.nodes - 1), self.nodes, self.nodes - 1)
        return Size(min(self.depth, self.nodes - 1),
                    min(self.nodes, 1 + self.width + (self.depth - 1) * self.width ** 2),
                    min(self.width, self.nodes - 1))


@dataclass(frozen=True)
class Acceptance(MethodPart):
    """Which drafts are accepted.

    With `seed_exact`, a draft is accepted if it equals the target's own draw, which the request's seed and the position
    decide: the tokens are the tokens of plain decoding with the same seed. (See `specvis_kernels.draw_tokens`.) The
    other settings mean nothing then.

    Without it, a draft x at depth d is accepted if u Q(x) < omega_d rho(x). Here rho(x) is the target's probability of
    x and of its first k neighbors that the cutoff admits. After a rejection, `residual` says what remains of the
    target's distribution. (See `specvis_kernels.verify_tree`.) With the metric "rank", the target's probability of x
    and k others is compared with the draft's probability of the same tokens (see `specvis_kernels.couple_tokens`).
    """

    seed_exact: bool = setting(
        "true: the tokens of plain decoding with the same seed; false: the same distribution", False)
    coupling: str = setting("maximal: a rejected guess leaves the others as they are; none: they are drawn anew",
                            "maximal")  # of Jacobi decoding alone; none: as SJD is published
    k: int = setting("nearest codes that may lend a draft their probability, fewer than the codebook has; 0: none", 0)
    delta: float = setting(
        "the most they may lend: probability (tvd), nats (jsd), multiple of the draft's own (ratio)", 0.0,
        per_request=True)
    cutoff: str = setting("what delta limits: tvd, ratio or jsd", "tvd")  # ratio: LANTERN++'s lambda
    metric: str = setting("by which codes are near: l2, raw, cosine, random, or rank (of jacobi): by the target's own "
                          "probability", "l2")  # raw: as they are stored
    omega: float | tuple[float, ...] = setting(
        "factor of acceptance: its mean over the levels, or one for each, as 1.4,1.2,1,0.9,0.8", 1.0, per_request=True)
    nu: float = setting("how fast omega falls from level to level; 0: it does not", 0.0, per_request=True)  # COOL-SD
    residual: str = setting("what a rejection leaves: optimal, relaxed or released", "optimal")

    def __post_init__(self):
        if isinstance(self.omega, list):
            object.__setattr__(self, "omega", tuple(self.omega))
        need = self.need
        need("seed_exact", isinstance(self.seed_exact, bool), "True or False")
        need("coupling", self.coupling in COUPLINGS, f"one of {', '.join(COUPLINGS)}")
        need("k", is_count(self.k, 0, limits.MAX_NEIGHBORS), count_within(0, limits.MAX_NEIGHBORS))
        need("cutoff", self.cutoff in CUTOFFS, f"one of {', '.join(CUTOFFS)}")
        max_delta = {"tvd": 1.0, "jsd": math.log(2)}.get(self.cutoff)
        if max_delta is None:
            need("delta", is_number(self.delta, 0), f"{FINITE} where cutoff is ratio")
        else:
            need("delta", is_number(self.delta, 0, max_delta), f"within [0, {max_delta:.4g}]")
        need("metric", self.metric in METRICS, f"one of {', '.join(METRICS)}")
        need("residual", self.residual in RESIDUALS, f"one of {', '.join(RESIDUALS)}")
        need("nu", is_number(self.nu, 0), FINITE)
        is_by_level = isinstance(self.omega, tuple)
        need("omega", all(is_number(omega, 0) for omega in (self.omega if is_by_level else (self.omega,))), FINITE)
        need("nu", not is_by_level or self.nu == 0, "0 where omega is given level by level")

    def omegas(self, num_levels: int) -> tuple[float, ...]:
        """The factor of acceptance at each level."""
        if isinstance(self.omega, tuple) or not num_levels:
            return self.omega if num_levels else ()
        return tuple(omega_schedule(self.omega, num_levels, self.nu))
