"""Decoding methods as data: how to draft, in trees of which shape, and the rule by which drafts are accepted."""
import difflib
import math
import re
from dataclasses import dataclass, fields, replace

from .bounds import omega_schedule
from .trees import Adaptation, static_tree

KINDS, RESIDUALS, METRICS = ("tvd", "ratio", "jsd"), ("optimal", "relaxed", "released"), ("l2", "cosine", "random")
VARIANTS, CONDITIONINGS = ("paper", "released", "path"), ("exact", "block")
DRAFTERS = {"eagle": "the EAGLE head on the target's hidden states", "small": "a smaller model of the target's family"}


def written(value) -> str:
    """A parameter's value as the command line takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Method:
    """One way to decode: drafting x tree shape x acceptance rule.

    drafting   "none": plain decoding; "static": children sampled without replacement on the tree `tree` (at temperature
               0 the likeliest ones); "dynamic": EAGLE-2's tree of the likeliest, `depth` x `width`, cut to `nodes`
    adaptation None: every tree has this shape; else ADT-Tree's
    acceptance u Q(x) < omega_d rho(x), where rho is the target's R(x) and what the first of x's k neighbors have, up
               to the cutoff; after a rejection `residual` says what is left (specvis_kernels.verify_tree)
    """

    name: str
    source: str                          # the paper, and where in it
    drafting: str = "none"
    drafter: str = "eagle"
    draft_guidance: float = 1.0          # the share of the request's guidance that the drafter gets; 0: none
    tree: str | tuple = ""               # a name or paths, see trees.static_tree
    depth: int = 0                       # levels drafted
    width: int = 0                       # children a node, and nodes expanded a level
    nodes: int = 0                       # size of the tree that is verified at most, its root counted
    adaptation: Adaptation | None = None
    k: int = 0                           # neighbors that may lend their probability
    kind: str = "tvd"                    # of the cutoff delta: probability lent ("tvd"), divergence in nats ("jsd"),
    delta: float = 0.0                   # or multiple of the draft's own probability ("ratio", LANTERN++'s lambda)
    metric: str = "l2"                   # by which codes are near
    omega: float | tuple[float, ...] = 1.0  # factor of acceptance: its mean over the levels, or one for each
    nu: float = 0.0                      # how fast it falls from level to level (COOL-SD); 0: it does not
    residual: str = "optimal"

    def __post_init__(self):
        if isinstance(self.tree, list):
            object.__setattr__(self, "tree", tuple(tuple(p) if isinstance(p, list) else p for p in self.tree))
        if isinstance(self.omega, list):
            object.__setattr__(self, "omega", tuple(self.omega))

        def need(name, condition, wanted):
            if not condition:
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

        if self.drafting == "dynamic":
            need("depth", self.depth >= 1, "at least 1")
            need("width", self.width >= 1, "at least 1")
            need("nodes", self.nodes >= 2, "at least 2 (the root and a draft)")
        if self.drafting == "static":
            static_tree(self.tree)
        need("drafter", self.drafter in DRAFTERS, f"one of {', '.join(DRAFTERS)}")
        need("draft_guidance", 0 <= self.draft_guidance < math.inf, "at least 0 and finite")
        need("k", self.k >= 0, "at least 0")
        need("kind", self.kind in KINDS, f"one of {', '.join(KINDS)}")
        most = {"tvd": 1.0, "jsd": math.log(2)}.get(self.kind)
        if most is None:
            need("delta", 0 <= self.delta < math.inf, "at least 0 and finite where kind is ratio")
        else:
            need("delta", 0 <= self.delta <= most, f"within [0, {most:.4g}]")
        need("metric", self.metric in METRICS, f"one of {', '.join(METRICS)}")
        need("residual", self.residual in RESIDUALS, f"one of {', '.join(RESIDUALS)}")
        need("nu", 0 <= self.nu < math.inf, "at least 0 and finite")
        given = self.omega if isinstance(self.omega, tuple) else (self.omega,)
        need("omega", all(0 <= omega < math.inf for omega in given), "at least 0 and finite")
        if isinstance(self.omega, tuple):
            need("omega", self.drafting == "none" or len(given) == self.levels,
                 f"one number, or one for each of the {self.levels} levels")
            need("nu", self.nu == 0, "0 where omega is given level by level")
        if self.k and self.residual == "optimal" and min(self.omegas, default=1.0) < 1:
            raise ValueError("omega must be at least 1 at every level where neighbors lend (k > 0) and residual is "
                             "optimal: below, the best residual is not known; got "
                             f"{min(self.omegas):.4g} at the least. Raise omega, or set nu to 0 or residual to relaxed")

    @property
    def label(self) -> str:
        """The name, and what differs from the recipe of that name."""
        usual = parameters_of(METHODS[self.name]) if self.name in METHODS else {}
        changed = [f"{key}={written(value)}"
                   for key, value in parameters_of(self).items() if value != usual.get(key, value)
                   and (key, self.drafting) != ("depth", "static")]
        return ":".join([self.name, *changed])

    @property
    def plain(self) -> bool:
        """Is it what others are measured against: a token a forward, no drafts?"""
        return self.drafting == "none"

    @property
    def levels(self) -> int:
        """The most drafts that one step can accept."""
        if self.drafting == "static":
            return static_tree(self.tree).depth
        return min(max(self.depth, self.adaptation.depths[1] if self.adaptation else 0), max(self.nodes - 1, 0))

    @property
    def tree_nodes(self) -> int:
        """The most nodes verified in one target forward, the root counted."""
        if self.drafting == "static":
            return len(static_tree(self.tree).parents)
        if self.adaptation:
            return self.nodes
        return min(self.nodes, 1 + self.width + (self.depth - 1) * self.width ** 2)

    @property
    def widest(self) -> int:
        """The most children that a node can have. (A tree of one level adapts beyond the bounds of the others.)"""
        if self.drafting == "static":
            return static_tree(self.tree).widest
        return self.nodes - 1 if self.adaptation else min(self.width, self.nodes - 1)

    @property
    def omegas(self) -> tuple[float, ...]:
        """The factor at each level."""
        if self.drafting == "none":
            return ()
        return self.omega if isinstance(self.omega, tuple) else tuple(omega_schedule(self.omega, self.levels, self.nu))

    @property
    def columns(self) -> int:
        """How many neighbors of each code are looked at: "released" zeroes one more than may lend."""
        return self.k + (self.residual == "released") if self.k else 0

    @property
    def lossless(self) -> bool:
        """Are the tokens distributed as the target's? The optimal residual keeps them so up to omega 1, any at 1."""
        return not self.k and all(omega <= 1 if self.residual == "optimal" else omega == 1 for omega in self.omegas)

    @property
    def tv_bound(self) -> float | None:
        """How far in total variation one accept test can move the distribution it judges by; None: not known."""
        omega = max(self.omegas, default=1.0)
        if self.lossless or self.drafting == "none":
            return 0.0
        if not self.k:
            return 1 - 1 / omega if self.residual == "optimal" else None
        if omega != 1 or min(self.omegas) != 1 or self.residual == "released":
            return None
        return {"tvd": self.delta, "ratio": self.delta / (1 + self.delta)}.get(self.kind)

    @property
    def family(self) -> tuple:
        """What methods must have in common to share a forward; the rest may differ from request to request."""
        return (self.drafting, self.drafter, self.tree, self.adaptation, self.k, self.kind, self.metric, self.residual)


@dataclass(frozen=True)
class ContinuousMethod:
    """One way to decode continuous tokens with a MAR: its own, or speculatively (CSpD, arXiv:2411.11925).

    `path`, on one token a step (gamma 1, truncate off), draws from the target's distribution up to the bound of
    `tries` (specvis_kernels.resample_gaussian). With more, later drafts are judged given the draft's last denoising
    step of the earlier ones, where what is kept is the target's: the rest is exact. The other variants, and block
    conditioning, are approximations.
    """

    name: str
    source: str                        # the paper, and where in it
    passes: int = 0                    # MAR's own decoding in so many passes; 0: a token a pass
    gamma: int = 0                     # tokens drafted a step; 0: MAR's own decoding
    prefill: float = 0.0               # the share of the tokens that the target draws alone, first
    variant: str = "paper"             # of the density ratio, see specvis_kernels.accept_gaussian
    distance_temperature: float = 1.0  # divides the last step's distances; in the release 42, when it accepts only
    conditioning: str = "exact"        # "exact": the target judges a draft given those before it; "block": it does not
    truncate: bool = True              # Algorithm 1: what follows a step's first rejection is drafted anew
    aligned: bool = True               # draft and target denoise the same noise
    tries: int = 100                   # of a redraw, then the target's own sample

    def __post_init__(self):
        def need(name, condition, wanted):
            if not condition:
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

        for names, types, wanted in ((("passes", "gamma", "tries"), int, "an integer"),
                                     (("truncate", "aligned"), bool, "True or False"),
                                     (("prefill", "distance_temperature"), (int, float), "a number")):
            for name in names:
                value = getattr(self, name)
                need(name, isinstance(value, types) and (types is bool or not isinstance(value, bool)), wanted)
        need("passes", self.passes >= 0, "at least 1, or 0 for a token a pass")
        need("gamma", self.gamma >= (self.name != "mar"), "at least 1")
        need("prefill", 0 <= self.prefill <= 1, "within [0, 1]")
        need("variant", self.variant in VARIANTS, f"one of {', '.join(VARIANTS)}")
        need("conditioning", self.conditioning in CONDITIONINGS, f"one of {', '.join(CONDITIONINGS)}")
        need("distance_temperature", 0 < self.distance_temperature < math.inf, "positive and finite")
        need("distance_temperature", self.variant != "path" or self.distance_temperature == 1,
             "1 where variant is path: it has no distances")
        need("aligned", self.variant != "path" or self.aligned,
             "true where variant is path: there is the draft's noise only")
        need("tries", self.tries >= 1, "at least 1")

    @property
    def drafting(self) -> str:
        return "chain" if self.gamma else "none"

    @property
    def plain(self) -> bool:
        """Is it what others are measured against: a token a pass, no drafts?"""
        return not self.gamma and not self.passes

    @property
    def label(self) -> str:
        """The name, and what differs from the recipe of that name."""
        usual = parameters_of(CONTINUOUS[self.name]) if self.name in CONTINUOUS else {}
        return ":".join([self.name, *(f"{key}={written(value)}" for key, value in parameters_of(self).items()
                                      if value != usual.get(key))])


EAGLE1, LANTERN, COOL_SD = ("EAGLE, arXiv:2401.15077", "LANTERN, arXiv:2410.03355, Algorithm 1",
                            "COOL-SD, arXiv:2601.09212")
DYNAMIC = {"drafting": "dynamic", "depth": 4, "width": 6, "nodes": 32}
ADAPTIVE = {"drafting": "dynamic", "depth": 4, "width": 10, "nodes": 60, "adaptation": Adaptation()}
RELAXED = {"k": 100, "delta": 0.2, "residual": "relaxed"}

METHODS = {m.name: m for m in (
    Method("vanilla", "plain decoding, a token a forward"),
    Method("speculative", "Leviathan et al., arXiv:2211.17192, Algorithm 1", "static", tree="chain-4"),
    Method("eagle1", f"{EAGLE1}: a static tree, children sampled", "static", tree="mc_sim_7b_63"),
    Method("eagle2", "EAGLE-2, arXiv:2406.16858, section 4", **DYNAMIC),
    Method("lantern", LANTERN, **DYNAMIC, **RELAXED),
    Method("lantern++", "LANTERN++, arXiv:2502.06352: static tree, cutoff relative to the draft's probability",
           "static", tree="naive_extend_57", k=10, kind="ratio", delta=1.0, residual="relaxed"),
    Method("adt-tree", "ADT-Tree, arXiv:2512.21857", **ADAPTIVE),
    Method("adt-tree+lantern", "ADT-Tree, arXiv:2512.21857, with LANTERN's acceptance", **ADAPTIVE, **RELAXED),
    Method("uniform-rsd", f"{COOL_SD}: one factor for all levels", "static", tree="mc_sim_7b_63", omega=1.1),
    Method("cool-sd", f"{COOL_SD}, eq. 10: the factor falls from level to level", "static", tree="mc_sim_7b_63",
           omega=1.1, nu=0.7),
    Method("lantern+optimal", f"{COOL_SD}, section 5.2: LANTERN's acceptance, optimal residual", **DYNAMIC,
           **RELAXED | {"residual": "optimal"}),
)}

CSPD = "CSpD, arXiv:2411.11925"
CONTINUOUS = {m.name: m for m in (
    ContinuousMethod("mar", "MAR, arXiv:2406.11838: a token a pass, or several at once"),
    ContinuousMethod("cspd", f"{CSPD}, Algorithm 1", gamma=4, prefill=0.05),
    ContinuousMethod("cspd-path", f"{CSPD}, with the density ratio of whole denoising paths", gamma=4, variant="path"),
    ContinuousMethod("cspd-released", f"{CSPD}, as its code has it", gamma=8, prefill=0.15, variant="released",
                     distance_temperature=42.0, conditioning="block", truncate=False),
)}

SHAPE = {field.name for field in fields(Adaptation)}  # parameters of an adaptation, by their own names
PARAMETERS = {  # name -> what it is; which methods have it, see parameters_of
    "drafter": "who drafts: " + ", ".join(f"{name} ({what})" for name, what in DRAFTERS.items()),
    "draft_guidance": "share of the guidance that the drafter gets; 0: it drafts without",
    "tree": "static tree: a name, chain-<depth>, or a JSON file of paths",
    "depth": "levels drafted a step",
    "width": "children a node",
    "nodes": "most nodes verified a step, the root counted",
    "start": "where a tree's shape starts from: horizontal, vertical, random or tokenflock",
    "beta": "share of accepted levels from which trees get deeper, in [0, 1]",
    "depth_step": "levels that a tree gains or loses",
    "width_step": "children a node that a tree loses or gains",
    "depths": "least and most levels",
    "widths": "least and most children a node, of trees deeper than 1",
    "radius": "how many tokens far tokenflock looks",
    "flat_depth": "depth to start from instead",
    "flat_width": "width to start from instead",
    "k": "nearest codes that may lend a draft their probability; 0: none",
    "delta": "the most they may lend: probability (tvd), nats (jsd), multiple of the draft's own (ratio)",
    "kind": "of the cutoff delta: tvd, ratio or jsd",
    "metric": "by which codes are near: l2, cosine or random",
    "omega": "factor of acceptance: its mean over the levels, or one for each, as 1.2,1,0.8",
    "nu": "how fast omega falls from level to level; 0: it does not",
    "residual": "what a rejection leaves: optimal, relaxed or released",
}
CONTINUOUS_PARAMETERS = {
    "passes": "target passes of MAR's own decoding; 0: a token a pass",
    "gamma": "tokens drafted a step",
    "prefill": "share of the tokens that the target draws alone, first",
    "variant": "of the density ratio: paper, released or path",
    "distance_temperature": "divides the last denoising step's distances",
    "conditioning": "exact: the target judges a draft given those before it; block: given the step's start",
    "truncate": "true: what follows a step's first rejection is drafted anew; false: it is kept",
    "aligned": "true: draft and target denoise the same noise",
    "tries": "of a redraw, before the target's own sample is taken",
}


def parameters_of(m: Method | ContinuousMethod) -> dict:
    """The parameters that a method has, with their values."""
    if isinstance(m, ContinuousMethod):
        return {name: getattr(m, name) for name in CONTINUOUS_PARAMETERS if (name == "passes") == (m.gamma == 0)}
    if m.drafting == "none":
        return {}
    values = {name: getattr(m.adaptation, name) if name in SHAPE else getattr(m, name) for name in PARAMETERS
              if name not in SHAPE or m.adaptation}
    absent = {"tree"}
    if m.drafting == "static":
        values["depth"] = m.levels  # of a chain; other trees have their own
        absent = {"width", "nodes"} if static_tree(m.tree).is_chain else {"width", "nodes", "depth"}
    return {name: value for name, value in values.items() if name not in absent}


def method(name: str, **parameters) -> Method | ContinuousMethod:
    """The method of that name with some parameters changed (those that are None stay).

    Raises:
        ValueError: unknown name (the nearest are named), a parameter that the method lacks or out of its range
    """
    known = METHODS | CONTINUOUS
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=2, cutoff=0.4)
        raise ValueError(f"unknown method {name!r}; " + (f"did you mean {' or '.join(near)}? " if near else "")
                         + f"known: {', '.join(known)}")
    base = known[name]
    changed = {key: value for key, value in parameters.items() if value is not None}
    for key in changed:
        if key not in parameters_of(base):
            near = difflib.get_close_matches(key, parameters_of(base), n=2, cutoff=0.7)
            raise ValueError(f"method {name} has no parameter {key!r}; "
                             + (f"did you mean {' or '.join(near)}? " if near else "")
                             + f"its parameters: {', '.join(parameters_of(base)) or 'none'}")
    if name in CONTINUOUS:
        return replace(base, **changed)
    if base.drafting == "static" and "depth" in changed:
        if "tree" in changed:
            raise ValueError("depth and tree must not be given together: a static tree has its own depth")
        if changed["depth"] < 1:
            raise ValueError(f"depth must be at least 1, got {changed['depth']}")
        changed["tree"] = f"chain-{changed.pop('depth')}"
    if isinstance(changed.get("omega"), (tuple, list)):
        changed.setdefault("nu", 0.0)
    if not changed.get("k", base.k):
        for key in ("delta", "kind", "metric"):
            if key in changed:
                raise ValueError(f"{key} must come with k > 0: without neighbors there is nothing to cut off")
    shape = {key: changed.pop(key) for key in list(changed) if key in SHAPE}
    if shape:
        changed["adaptation"] = replace(base.adaptation, **shape)
    return replace(base, **changed)


def parse_method(text: str, **parameters) -> Method | ContinuousMethod:
    """A method as it is written on the command line, "name" or "name:parameter=value:...", e.g.
    "adt-tree:start=vertical:widths=4,13".

    Raises:
        ValueError: as `method`; or a value is not what the parameter takes
    """
    name, *settings = text.strip().split(":")
    known = parameters_of(method(name))
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"method must be like name:parameter=value, got {text!r}")
        if parameters.get(key) is not None:
            raise ValueError(f"{key} must be given once, got {value} and {parameters[key]}")
        if isinstance(known.get(key), bool):
            parameters[key] = truth(key, value)
        else:
            parameters[key] = value if key not in known or isinstance(known[key], str) else number(key, value)
    return method(name, **parameters)


def truth(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{name} must be true or false, got {text!r}")
    return text.lower() == "true"


def number(name: str, text: str) -> int | float | tuple:
    """A value for parameter `name`: one number, or several with commas where there may be several."""
    whole = name not in ("draft_guidance", "delta", "omega", "nu", "beta", "radius", "prefill", "distance_temperature")
    try:
        values = tuple((int if whole else float)(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} must be {'an integer' if whole else 'a number'}, got {text!r}") from None
    if name in ("depths", "widths"):
        if len(values) != 2:
            raise ValueError(f"{name} must be two numbers, least,most; got {text!r}")
        return values
    if len(values) > 1 and name != "omega":
        raise ValueError(f"{name} must be one number, got {text!r}")
    return values if len(values) > 1 else values[0]


def parse_methods(texts: tuple[str, ...]) -> list[Method | ContinuousMethod]:
    """Methods with commas between them; "all" is every one of discrete tokens, "continuous" of the others."""
    names = [part.strip() for text in texts for part in re.split(r",\s*(?=[A-Za-z])", text)]
    groups = {"all": METHODS, "continuous": CONTINUOUS}
    return [parse_method(part) for name in names for part in groups.get(name, [name])]
