"""Decoding methods as data: the recipes by name, and how a method is written as text."""
import difflib
import re
from dataclasses import dataclass, fields, replace
from typing import get_args

from .limits import MAX_DEPTH, count_within, is_count
from .method_parts import (
    RECIPES,
    Acceptance,
    ContinuousMethod,
    DynamicDrafts,
    JacobiDrafts,
    NoDrafts,
    Part,
    Recipe,
    StaticDrafts,
    format_value,
)
from .trees import Adaptation


@dataclass(frozen=True)
class Method(Recipe):
    """One way to decode discrete tokens: how to draft, and which drafts to accept.

    Raises:
        TypeError:  a part of another class
        ValueError: parts that do not fit each other
    """

    name: str
    source: str  # the paper, and the place in it
    drafts: NoDrafts | JacobiDrafts | StaticDrafts | DynamicDrafts = NoDrafts()
    acceptance: Acceptance = Acceptance()

    def __post_init__(self):
        for name, kinds in (("drafts", (NoDrafts, JacobiDrafts, StaticDrafts, DynamicDrafts)),
                            ("acceptance", (Acceptance,))):
            if not isinstance(part := getattr(self, name), kinds):
                raise TypeError(f"{name} must be {' or '.join(kind.__name__ for kind in kinds)}, "
                                f"got {type(part).__name__}")
        if self.is_baseline:
            return
        a, omegas = self.acceptance, self.omegas
        a.need("omega", len(omegas) == self.max_depth, f"one number, or one for each of the {self.max_depth} levels")
        a.need("metric", a.metric != "rank" or self.drafting == "jacobi",
               "l2, raw, cosine or random (rank is for jacobi)")
        if a.metric == "rank":
            a.need("cutoff", a.cutoff == "tvd", "tvd where metric is rank (its delta is a difference)")
            a.need("residual", a.residual == "optimal",
                   "optimal where metric is rank (both masses are summed, and the others are not defined for that)")
        if a.k and a.residual == "optimal" and min(omegas) < 1:
            raise ValueError("omega must be at least 1 at every level where neighbors lend (k > 0) and residual is "
                             f"optimal: below, the best residual is not known; got {min(omegas):.4g} at the least. "
                             "Raise omega, or set nu to 0 or residual to relaxed")
        why = "with shared noise a draft is accepted if it is the target's own draw"
        if a.seed_exact and (a.k or any(omega != 1 for omega in omegas)):
            raise ValueError(f"seed_exact must be false where k > 0 or omega is not 1: {why}, which leaves nothing to "
                             f"relax; got k={a.k} and omega={format_value(a.omega)}. Set seed_exact to false")
        if a.seed_exact and a.coupling != "maximal":
            raise ValueError(f"coupling must be maximal where seed_exact is true: {why}, and nothing is rejected; "
                             f"got {a.coupling!r}. Set seed_exact to false")

    def __repr__(self) -> str:
        """All settings in one line. Saved results of studies are found by it, so it must not change."""
        values = {"name": self.name, "source": self.source, "drafting": self.drafting, "seed_exact": self.seed_exact,
                  "drafter": "eagle", "draft_guidance": 1.0, "tree": "", "depth": 0, "width": 0, "nodes": 0,
                  "adaptation": None, "window": 0, "guess": "above"}
        values |= {field.name: getattr(self.drafts, field.name) for field in fields(self.drafts)}
        values |= {name: getattr(self.acceptance, name)
                   for name in ("coupling", "k", "cutoff", "delta", "metric", "omega", "nu", "residual")}
        return f"Method({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.drafts, self.acceptance

    @property
    def drafting(self) -> str:
        """ "none", "jacobi", "static" or "dynamic"."""
        return self.drafts.drafting

    @property
    def seed_exact(self) -> bool:
        """Are the tokens the tokens of plain decoding with the same seed?"""
        return self.acceptance.seed_exact

    @property
    def is_baseline(self) -> bool:
        """Is this the method that others are measured against: one token a forward, no drafts?"""
        return isinstance(self.drafts, NoDrafts)

    @property
    def every_parameter(self) -> dict:
        if self.is_baseline:
            return {}
        every = self.drafts.parameters | self.acceptance.parameters
        if self.drafting != "jacobi":
            del every["coupling"]
        return every

    @property
    def parameters(self) -> dict:
        every = self.every_parameter
        if self.drafting == "jacobi" and self.seed_exact:
            return {name: every[name] for name in (*self.drafts.parameters, "seed_exact")}
        return every

    def changed(self, **parameters) -> "Method":
        """The method with other values of some parameters. The depth of a static tree makes it a chain.

        Raises:
            TypeError:  a parameter that the method does not have
            ValueError: a value out of its range
        """
        def taken(part: type) -> dict:
            return {field.name: parameters.pop(field.name) for field in fields(part) if field.name in parameters}

        acceptance, drafts = replace(self.acceptance, **taken(Acceptance)), self.drafts
        if self.drafting == "static" and "depth" in parameters:
            if "tree" in parameters:
                raise ValueError("depth and tree must not be given together: a static tree has its own depth")
            if not is_count(depth := parameters.pop("depth"), 1, MAX_DEPTH):
                raise ValueError(f"depth must be {count_within(1, MAX_DEPTH)}, got {depth!r}")
            parameters["tree"] = f"chain-{depth}"
        if self.drafting == "dynamic" and drafts.adaptation:
            drafts = replace(drafts, adaptation=replace(drafts.adaptation, **taken(Adaptation)))
        return replace(self, drafts=replace(drafts, **parameters), acceptance=acceptance)

    @property
    def max_depth(self) -> int:
        """How many drafts one step can accept at most."""
        return self.drafts.size(self.seed_exact).depth

    @property
    def max_nodes(self) -> int:
        """How many nodes one target forward verifies at most, the root counted."""
        return self.drafts.size(self.seed_exact).nodes

    @property
    def max_width(self) -> int:
        """How many children a node can have at most."""
        return self.drafts.size(self.seed_exact).width

    @property
    def omegas(self) -> tuple[float, ...]:
        """The factor of acceptance at each level."""
        return self.acceptance.omegas(self.max_depth)

    @property
    def num_neighbors(self) -> int:
        """How many columns a table of neighbors must have. The residual "released" zeroes one more than may lend.

        The metric "rank" needs no table.
        """
        a = self.acceptance
        return a.k + (a.residual == "released") if a.k and a.metric != "rank" else 0

    @property
    def lossless(self) -> bool:
        """Are the tokens distributed as the target's?

        Neighbors must lend nothing. The optimal residual then keeps the distribution at every omega up to 1, the other
        residuals at omega 1 only.
        """
        a = self.acceptance
        return not a.k and all(omega <= 1 if a.residual == "optimal" else omega == 1 for omega in self.omegas)

    @property
    def tv_bound(self) -> float | None:
        """How far one accept test can move the target's distribution, in total variation; None: not known."""
        a, omegas = self.acceptance, self.omegas
        if self.lossless or self.is_baseline:
            return 0.0
        if not a.k:
            return 1 - 1 / max(omegas) if a.residual == "optimal" else None
        if a.metric == "rank" or set(omegas) != {1.0} or a.residual == "released":
            return None
        return {"tvd": a.delta, "ratio": a.delta / (1 + a.delta)}.get(a.cutoff)

    @property
    def family(self) -> tuple:
        """What methods must have in common to share a forward. The rest may differ from request to request."""
        return self.drafts.family + self.acceptance.family


EAGLE1, LANTERN, COOL_SD = ("EAGLE, arXiv:2401.15077", "LANTERN, arXiv:2410.03355, Algorithm 1",
                            "COOL-SD, arXiv:2601.09212")
SJD = "speculative Jacobi decoding, arXiv:2410.01699"
EXACT = Acceptance(seed_exact=True)
STRICT, RELAXED = Acceptance(), Acceptance(k=100, delta=0.2, residual="relaxed")
STATIC, DYNAMIC = StaticDrafts(tree="mc_sim_7b_63"), DynamicDrafts(depth=4, width=6, nodes=32)
ADAPTIVE = DynamicDrafts(depth=4, width=10, nodes=60, adaptation=Adaptation())

METHODS = {m.name: m for m in (
    Method("vanilla", "the baseline: a token a target forward"),
    Method("jacobi", f"{SJD}, with the noise of arXiv:2510.24211: no drafter, plain decoding's tokens",
           JacobiDrafts(window="auto"), EXACT),
    Method("speculative", "Leviathan et al., arXiv:2211.17192, Algorithm 1", StaticDrafts(tree="chain-4"), STRICT),
    Method("eagle1", f"{EAGLE1}: a static tree, children sampled", STATIC, STRICT),
    Method("eagle2", "EAGLE-2, arXiv:2406.16858, section 4", DYNAMIC, EXACT),
    Method("lantern", LANTERN, DYNAMIC, RELAXED),
    Method("lantern++", "LANTERN++, arXiv:2502.06352: static tree, cutoff relative to the draft's probability",
           StaticDrafts(tree="naive_extend_57"), Acceptance(k=10, cutoff="ratio", delta=1.0, residual="relaxed")),
    Method("adt-tree", "ADT-Tree, arXiv:2512.21857", ADAPTIVE, EXACT),
    Method("adt-tree+lantern", "ADT-Tree, arXiv:2512.21857, with LANTERN's acceptance", ADAPTIVE, RELAXED),
    Method("uniform-rsd", f"{COOL_SD}: one factor for all levels", STATIC, Acceptance(omega=1.1)),
    Method("cool-sd", f"{COOL_SD}, eq. 10: the factor falls from level to level", STATIC,
           Acceptance(omega=1.1, nu=0.7)),
    Method("lantern+optimal", f"{COOL_SD}, section 5.2: LANTERN's acceptance, optimal residual", DYNAMIC,
           replace(RELAXED, residual="optimal")),
    # The numbers are the released code's, which has a table of distances between codes as well.
    Method("gsd", "GSD, arXiv:2508.07747: Jacobi decoding that accepts groups of tokens", JacobiDrafts(window=15),
           Acceptance(coupling="none", k=13, delta=0.15, metric="rank")),
    Method("gsd+coupled", "GSD's groups, arXiv:2508.07747, with the coupling of SCD, arXiv:2510.24211",
           JacobiDrafts(window=16), Acceptance(k=14, delta=0.15, metric="rank")),
)}

CSPD = "CSpD, arXiv:2411.11925"
CONTINUOUS = {m.name: m for m in (
    ContinuousMethod("mar", "MAR, arXiv:2406.11838: a token a target forward, or several at once"),
    ContinuousMethod("cspd", f"{CSPD}, Algorithm 1", gamma=4, prefill=0.05),
    ContinuousMethod("cspd-path", f"{CSPD}, with the density ratio of whole denoising paths", gamma=4, variant="path"),
    ContinuousMethod("cspd-released", f"{CSPD}, as its code has it", gamma=8, prefill=0.15, variant="released",
                     distance_temperature=42.0, conditioning="block", truncate=False),
)}
RECIPES |= METHODS | CONTINUOUS


def takes_float(annotation) -> bool:
    """Has the annotation of a field `float` in it, as in `float | tuple[float, ...]`?"""
    return annotation is float or any(map(takes_float, get_args(annotation)))


_KINDS = StaticDrafts, DynamicDrafts, Adaptation, JacobiDrafts, Acceptance, ContinuousMethod
# parameter -> what `specvis methods NAME` says of it
PARAMETERS, CONTINUOUS_PARAMETERS = ({field.name: field.metadata["help"] for kind in kinds for field in fields(kind)
                                      if "help" in field.metadata} for kinds in (_KINDS[:-1], _KINDS[-1:]))
# parameters that need not be whole numbers
FRACTIONAL = {field.name for kind in _KINDS for field in fields(kind) if takes_float(field.type)}


def method(name: str, /, **parameters) -> Method | ContinuousMethod:
    """The method of that name with some parameters changed (None keeps a parameter).

    Raises:
        ValueError: unknown name (the nearest are named), a parameter that the method lacks or out of its range
    """
    if name not in RECIPES:
        near = difflib.get_close_matches(name.lower(), RECIPES, n=2, cutoff=0.6)
        raise ValueError(f"unknown method {name!r}; " + (f"did you mean {' or '.join(near)}? " if near else "")
                         + f"known: {', '.join(RECIPES)}")
    base = RECIPES[name]
    changed = {key: value for key, value in parameters.items() if value is not None}
    usual = base.every_parameter
    for key in changed:
        if key not in usual:
            near = difflib.get_close_matches(key, usual, n=2, cutoff=0.7)
            taken = base.parameters if changed.get("seed_exact", True) else usual
            raise ValueError(f"method {name} has no parameter {key!r}; "
                             + (f"did you mean {' or '.join(near)}? " if near else "")
                             + f"its parameters: {', '.join(taken) or 'none'}")
    if isinstance(changed.get("omega"), (tuple, list)):
        changed.setdefault("nu", 0.0)
    if not changed.get("k", usual.get("k")):
        for key in ("delta", "cutoff", "metric"):
            if key in changed:
                raise ValueError(f"{key} must come with k > 0: without neighbors there is nothing to cut off")
    return base.changed(**changed)


def parse_method(text: str, /, **parameters) -> Method | ContinuousMethod:
    """A method as it is written on the command line, "name" or "name:parameter=value:...", e.g.
    "adt-tree:start=vertical:widths=4,13".

    Raises:
        ValueError: as `method`; or a value is not what the parameter takes
    """
    name, *settings = text.strip().split(":")
    known = method(name).every_parameter
    for part in settings:
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"method must be like name:parameter=value, got {text!r}")
        if parameters.get(key) is not None:
            raise ValueError(f"{key} must be given once, got {value} and {parameters[key]}")
        if isinstance(known.get(key), bool):
            parameters[key] = parse_bool(key, value)
        else:
            is_word = value == "auto" if key == "window" else key not in known or isinstance(known[key], str)
            parameters[key] = value if is_word else parse_number(key, value)
    return method(name, **parameters)


def one_each(methods, count: int, name: str) -> list:
    """A method for each of `count` requests: one of all of them, or a list with one for each. Names are read.

    Raises:
        ValueError: a list of another length, or as `parse_method`; `name`: of the argument
    """
    given = list(methods) if isinstance(methods, (list, tuple)) else [methods] * count
    if len(given) != count:
        raise ValueError(f"{name} must be one, or one for each of the {count} requests, got {len(given)}")
    return [parse_method(m) if isinstance(m, str) else m for m in given]


def parse_bool(name: str, text: str) -> bool:
    """A value for parameter `name`, true or false."""
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{name} must be true or false, got {text!r}")
    return text.lower() == "true"


def parse_number(name: str, text: str) -> int | float | tuple:
    """A value for parameter `name`: one number, or several with commas where there may be several."""
    whole = name not in FRACTIONAL
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
