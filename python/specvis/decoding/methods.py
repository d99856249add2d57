"""Decoding methods as data: for discrete and continuous tokens, the recipes by name, and a method as text."""
import difflib
import re
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from ..models.interface import TargetModel, codes
from . import limits
from .limits import count_within, is_count, is_number, setting
from .method_parts import USUAL_WINDOW, Acceptance, DynamicDrafts, JacobiDrafts, MethodPart, NoDrafts, StaticDrafts
from .trees import Adaptation

VARIANTS, CONDITIONINGS = ("paper", "released", "path"), ("exact", "block")
SCHEDULES = ("linear", "constant", "released")  # of MAR's guidance
OF_MAR = ("num_iter", "steps_first", "steps_last")  # the parameters of MAR's own decoding


def format_value(value) -> str:
    """A parameter's value, as the command line takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


class Recipe(MethodPart):
    """A method with a name."""

    @property
    def label(self) -> str:
        """The name, and what differs from the recipe of that name."""
        return ":".join([self.name, *(f"{key}={format_value(value)}" for key, value in self.differing.items())])

    def with_window(self, device: torch.device | str, pictures: int) -> "Recipe":
        """The method as it decodes that many pictures at once. Jacobi decoding gets the usual window if it names none.

        A CPU has little idle arithmetic, so windows are small there: as long as the tokens do not depend on the window.
        """
        if self.drafting != "jacobi" or self.drafts.window is not None:
            return self
        is_small = self.seed_exact and torch.device(device).type == "cpu"
        return self.changed(window=USUAL_WINDOW if not is_small else 4 if pictures == 1 else 2)

    @property
    def differing(self) -> dict:
        """The parameters that differ from the recipe of that name. The depth of a static tree is the tree's own."""
        usual = RECIPES.get(self.name, self).parameters
        return {key: value for key, value in self.parameters.items()
                if value != usual.get(key) and (key, self.drafting) != ("depth", "static")}


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
        if not a.seed_exact and self.drafting == "jacobi":
            self.drafts.need("refresh", self.drafts.refresh == 0, "0 where seed_exact is false: a guess is kept or "
                             "rejected by the row that it was drawn from, which must be the target's")
        if a.seed_exact and a.coupling != "maximal":
            raise ValueError(f"coupling must be maximal where seed_exact is true: {why}, and nothing is rejected; "
                             f"got {a.coupling!r}. Set seed_exact to false")

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
    def parameters(self) -> dict:
        if self.is_baseline:
            return {}
        every = self.drafts.parameters | self.acceptance.parameters
        if self.drafting != "jacobi":
            del every["coupling"]
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
            if not is_count(depth := parameters.pop("depth"), 1, limits.MAX_DEPTH):
                raise ValueError(f"depth must be {count_within(1, limits.MAX_DEPTH)}, got {depth!r}")
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
    def family(self) -> tuple:
        """What methods must have in common to share a forward. The rest may differ from request to request."""
        return self.drafting, *(getattr(part, field.name) for part in (self.drafts, self.acceptance)
                                for field in fields(part) if not field.metadata.get("per_request"))


@dataclass(frozen=True)
class ContinuousMethod(Recipe):
    """One way to decode continuous tokens with a MAR: its own, or speculatively (CSpD, arXiv:2411.11925).

    One setting is exact: the variant `path` with gamma 1 and without `truncate` draws from the target's distribution,
    up to the bound that `max_tries` leaves (see `specvis_kernels.resample_gaussian`). With a larger gamma, `path`
    deviates in one place: a later draft is verified given the draft's last denoising step of the earlier drafts, while
    the tokens that are kept went through the target's. The other variants, and block conditioning, are approximations.
    """

    name: str
    source: str                        # the paper, and the place in it
    num_iter: int = setting("target forwards of MAR's own decoding; 0: one for each token", 0)
    steps_first: int = setting("denoising steps of the first tokens, at most the model's; 0: the model's own number", 0)
    steps_last: int = setting(
        "denoising steps of the last tokens, linearly between (DiSA); 0: the model's own number", 0)
    guidance_schedule: str = setting("how guidance grows with the known tokens: linear, constant, or released (linear, "
                                     "but for the last tokens)", "linear")
    gamma: int = setting(f"tokens that a step drafts, at most {limits.MAX_GUESSES}", 0)  # 0: MAR's own decoding
    prefill: float = setting("share of the tokens that the target draws alone, first", 0.0)
    variant: str = setting("of the density ratio: paper, released or path", "paper")
    distance_temperature: float = setting("divides the last denoising step's distances", 1.0)  # the release: accepting
    conditioning: str = setting("exact: a draft is verified given those before it; block: given the step's start",
                                "exact")
    truncate: bool = setting(  # Algorithm 1
        "true: what follows a step's first rejection is drafted anew; false: it is kept", True)
    aligned: bool = setting("true: draft and target denoise the same noise", True)
    max_tries: int = setting(f"of resampling, before the target draws its own sample; at most {limits.MAX_TRIES}", 100)

    def __post_init__(self):
        need = self.need
        for name in ("truncate", "aligned"):
            need(name, isinstance(getattr(self, name), bool), "True or False")
        need("num_iter", is_count(self.num_iter, 0, limits.MAX_TOKENS),
             f"{count_within(1, limits.MAX_TOKENS)}, or 0 for one target forward a token")
        for name in ("steps_first", "steps_last"):
            steps = getattr(self, name)
            need(name, is_count(steps, 0, limits.MAX_STEPS) and steps != 1,
                 f"{count_within(2, limits.MAX_STEPS)}, or 0 for the model's own number")
        need("guidance_schedule", self.guidance_schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
        least = int(self.name != "mar")
        need("gamma", is_count(self.gamma, least, limits.MAX_GUESSES), count_within(least, limits.MAX_GUESSES))
        need("prefill", is_number(self.prefill, 0, 1), "within [0, 1]")
        need("variant", self.variant in VARIANTS, f"one of {', '.join(VARIANTS)}")
        need("conditioning", self.conditioning in CONDITIONINGS, f"one of {', '.join(CONDITIONINGS)}")
        need("distance_temperature", is_number(self.distance_temperature, limits.MIN_NUMBER),
             "positive and finite in 32 bits")
        need("distance_temperature", self.variant != "path" or self.distance_temperature == 1,
             "1 where variant is path: it has no distances")
        need("aligned", self.variant != "path" or self.aligned,
             "true where variant is path: there is the draft's noise only")
        need("max_tries", is_count(self.max_tries, 1, limits.MAX_TRIES), count_within(1, limits.MAX_TRIES))

    @property
    def drafting(self) -> str:
        return "chain" if self.gamma else "none"

    @property
    def is_baseline(self) -> bool:
        return not self.gamma and not any(getattr(self, name) for name in OF_MAR)

    @property
    def parameters(self) -> dict:
        names = [field.name for field in fields(self) if "help" in field.metadata
                 and field.name != "guidance_schedule" and (field.name in OF_MAR) == (self.gamma == 0)]
        return {name: getattr(self, name) for name in (*names, "guidance_schedule")}

    def changed(self, **parameters) -> "ContinuousMethod":
        return replace(self, **parameters)


EAGLE1, LANTERN, COOL_SD = ("EAGLE, arXiv:2401.15077", "LANTERN, arXiv:2410.03355, Algorithm 1",
                            "COOL-SD, arXiv:2601.09212")
SJD = "speculative Jacobi decoding, arXiv:2410.01699"
EXACT, RELAXED = Acceptance(seed_exact=True), Acceptance(k=100, delta=0.2, residual="relaxed")
STATIC, DYNAMIC = StaticDrafts(tree="mc_sim_7b_63"), DynamicDrafts(depth=4, width=6, nodes=32)
ADAPTIVE = DynamicDrafts(depth=4, width=10, nodes=60, adaptation=Adaptation())

METHODS = {m.name: m for m in (
    Method("vanilla", "the baseline: a token a target forward"),
    Method("jacobi", f"{SJD}, with the noise of arXiv:2510.24211: no draft model, plain decoding's tokens",
           JacobiDrafts(), EXACT),
    Method("speculative", "Leviathan et al., arXiv:2211.17192, Algorithm 1", StaticDrafts(tree="chain-4")),
    Method("eagle1", f"{EAGLE1}: a static tree, children sampled", STATIC),
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
RECIPES = METHODS | CONTINUOUS


def takes_float(annotation) -> bool:
    """Has the annotation of a field `float` in it, as in `float | tuple[float, ...]`?"""
    return annotation is float or any(map(takes_float, get_args(annotation)))


_KINDS = StaticDrafts, DynamicDrafts, Adaptation, JacobiDrafts, Acceptance, ContinuousMethod
# parameter -> what `specvis methods NAME` says of it
PARAMETERS, CONTINUOUS_PARAMETERS = ({field.name: field.metadata["help"] for kind in kinds for field in fields(kind)
                                      if "help" in field.metadata} for kinds in (_KINDS[:-1], _KINDS[-1:]))
# parameters that need not be whole numbers
FRACTIONAL = {field.name for kind in _KINDS for field in fields(kind) if takes_float(field.type)}


def relaxing(method: Method | ContinuousMethod) -> set[str]:
    """The parameters of Jacobi decoding that mean nothing while it is seed-exact. Lists leave them out."""
    if method.drafting != "jacobi" or not method.seed_exact:
        return set()
    return {field.name for field in fields(Acceptance)} - {"seed_exact"}


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
    usual = base.parameters
    for key in changed:
        if key not in usual:
            near = difflib.get_close_matches(key, usual, n=2, cutoff=0.7)
            taken = usual.keys() - relaxing(base) if changed.get("seed_exact", True) else usual
            raise ValueError(f"method {name} has no parameter {key!r}; "
                             + (f"did you mean {' or '.join(near)}? " if near else "")
                             + f"its parameters: {', '.join(name for name in usual if name in taken) or 'none'}")
    if isinstance(changed.get("omega"), (tuple, list)):
        changed.setdefault("nu", 0.0)
    if not changed.get("k", usual.get("k")):
        for key in ("delta", "cutoff", "metric"):
            if key in changed:
                raise ValueError(f"{key} must come with k > 0: without neighbors there is nothing to cut off")
    return base.changed(**changed)


def parse_method(text: str, usual: dict[str, dict] | None = None) -> Method | ContinuousMethod:
    """A method as it is written on the command line, "name" or "name:parameter=value:...", e.g.
    "adt-tree:start=vertical:widths=4,13".

    usual: parameters of some methods by their names, where a model's paper has others than the method
    Raises:
        ValueError: as `method`; or a value is not what the parameter takes
    """
    name, *settings = text.strip().split(":")
    known, parameters = method(name).parameters, {}
    for part in settings:
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"method must be like name:parameter=value, got {text!r}")
        if key in parameters:
            raise ValueError(f"{key} must be given once, got {text!r}")
        parameters[key] = parse_value(key, value, known.get(key, ""))
    return method(name, **(usual or {}).get(name, {}) | parameters)


class Relaxation(NamedTuple):
    """The keyword arguments by which `verify_logits` and `couple_tokens` accept a draft."""
    residual: str
    omega: Tensor | None = None      # (B, P) float32  None: 1
    neighbors: Tensor | None = None  # (C, k)          None: nothing is lent
    delta: Tensor | None = None      # (B,) float32    as neighbors
    cutoff: str = "tvd"
    offset: int = 0


def acceptance_rule(methods: list[Method], neighbors: Tensor | None, target: TargetModel, max_depth: int,
                    device: torch.device) -> Relaxation:
    """The rule of methods of one family. max_depth: the largest of the methods' depths. ValueError if `neighbors` is
    not a table that the methods need, or is on another device."""
    base, omega = methods[0], None
    if any(factor != 1 for m in methods for factor in m.omegas):
        padded = [[*m.omegas, *[1.0] * (max_depth - m.max_depth)] for m in methods]
        omega = torch.tensor(padded, dtype=torch.float32, device=device)
    rule, k = Relaxation(base.acceptance.residual, omega), base.num_neighbors
    if not k:
        return rule
    first, last = codes(target)
    if neighbors is None or neighbors.shape[0] != last - first or neighbors.shape[1] < k:
        have = "none" if neighbors is None else tuple(neighbors.shape)
        raise ValueError(f"neighbors must be a table of C={last - first} rows and at least k={k} columns for "
                         f"{base.name}, got {have}")
    if neighbors.device != device:
        raise ValueError(f"neighbors must be on {device} like the target, got {neighbors.device}")
    return rule._replace(
        neighbors=neighbors[:, :k].contiguous(), cutoff=base.acceptance.cutoff, offset=first,
        delta=torch.tensor([m.acceptance.delta for m in methods], dtype=torch.float32, device=device))


def one_each(methods, count: int, name: str, usual: dict[str, dict] | None = None) -> list:
    """A method for each of `count` requests: one of all of them, or a list with one for each. Names are read.
    ValueError, which has the argument's `name`: a list of another length, or as `parse_method`."""
    given = list(methods) if isinstance(methods, (list, tuple)) else [methods] * count
    if len(given) != count:
        raise ValueError(f"{name} must be one, or one for each of the {count} requests, got {len(given)}")
    return [parse_method(m, usual) if isinstance(m, str) else m for m in given]


def parse_value(name: str, text: str, usual) -> bool | str | int | float | tuple:
    """A value for parameter `name`, of the kind of its usual one: true or false, a word, or one number or several."""
    if isinstance(usual, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{name} must be true or false, got {text!r}")
        return text.lower() == "true"
    if isinstance(usual, str):
        return text
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


def parse_methods(texts: tuple[str, ...], usual: dict[str, dict] | None = None) -> list[Method | ContinuousMethod]:
    """Methods with commas between them; "all" is every one of discrete tokens, "continuous" of the others. usual: see
    `parse_method`"""
    names = [part.strip() for text in texts for part in re.split(r",\s*(?=[A-Za-z])", text)]
    groups = {"all": METHODS, "continuous": CONTINUOUS}
    return [parse_method(part, usual) for name in names for part in groups.get(name, [name])]
