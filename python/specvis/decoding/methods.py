"""Decoding methods as data: how to draft, in trees of which shape, and the rule by which drafts are accepted."""
import difflib
import math
import re
from dataclasses import dataclass, fields, replace
from typing import get_args

from .bounds import omega_schedule
from .limits import (
    MAX_CHILDREN,
    MAX_DEPTH,
    MAX_GUESSES,
    MAX_NEIGHBORS,
    MAX_NODES,
    MAX_STEPS,
    MAX_TOKENS,
    MAX_TRIES,
    MIN_NUMBER,
    count_within,
    is_count,
    is_number,
)
from .trees import Adaptation, static_tree

DRAFTINGS = ("none", "static", "dynamic", "jacobi")
FINITE = "at least 0 and finite in 32 bits"
CUTOFFS, RESIDUALS = ("tvd", "ratio", "jsd"), ("optimal", "relaxed", "released")
METRICS = ("l2", "raw", "cosine", "random", "rank")
GUESSES, COUPLINGS = ("above", "last"), ("maximal", "none")
MAX_WINDOW, USUAL_WINDOW = 32, 16  # of "auto": the most it chooses; what it is where the tokens depend on the window
VARIANTS, CONDITIONINGS = ("paper", "released", "path"), ("exact", "block")
SCHEDULES = ("linear", "constant", "released")  # of MAR's guidance
OF_MAR = ("num_iter", "steps_first", "steps_last")  # the parameters of MAR's own decoding
DRAFTERS = {"eagle": "the EAGLE head on the target's hidden states", "model": "a smaller model of the target's family"}


def format_value(value) -> str:
    """A parameter's value, as the command line takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Method:
    """One way to decode discrete tokens: how to draft, in a tree of which shape, and which drafts to accept.

    Drafting is one of four:
    "none"     There are no drafts: every target forward gives one token.
    "static"   The tree has the shape `tree`. Children are sampled without replacement; at temperature 0 they are the
               likeliest tokens.
    "dynamic"  The tree is EAGLE-2's: the likeliest tokens, `depth` x `width`, cut to `nodes`. With an `adaptation`
               the depth and the width change from step to step, as ADT-Tree says.
    "jacobi"   There is no drafter. The target itself guesses the next `window` tokens, and improves its guesses from
               forward to forward.

    With `seed_exact`, a draft is accepted if it equals the target's own draw, which the request's seed and the position
    decide: the tokens are those of plain decoding with the same seed. (See `specvis_kernels.draw_tokens`.)

    Without it, a draft x at depth d is accepted if u Q(x) < omega_d rho(x). Here rho(x) is the target's probability of
    x and of those of its first k neighbors that the cutoff admits. After a rejection, `residual` says what is left of
    the target's distribution. (See `specvis_kernels.verify_tree`.) With the metric "rank", the target's probability of
    x and k others is compared with the draft's probability of the same tokens (see `specvis_kernels.couple_tokens`).

    Parameters have limits, see `limits`: a step's memory follows from them.
    """

    name: str
    source: str                          # the paper, and the place in it
    drafting: str = "none"               # "none", "static", "dynamic" or "jacobi"
    seed_exact: bool = False             # accept what equals the target's own draw: plain decoding's tokens
    drafter: str = "eagle"               # "eagle" or "model", see DRAFTERS
    draft_guidance: float = 1.0          # the share of the request's guidance that the drafter gets; 0: none
    tree: str | tuple = ""               # of static drafting: a name or paths, see trees.static_tree
    depth: int = 0                       # drafted levels
    width: int = 0                       # children of a node, and expanded nodes of a level
    nodes: int = 0                       # the tree that is verified has at most this size, the root counted
    adaptation: Adaptation | None = None  # None: every tree has the same depth and width
    window: int | str = 0                # of jacobi: guesses that a forward reads; "auto": as many as are fastest
    guess: str = "above"                 # of a new position: drawn from the row "above" it, or from the "last" row
    coupling: str = "maximal"            # "none": what follows a rejected guess is drawn anew, as SJD is published
    k: int = 0                           # how many neighbors may lend their probability
    cutoff: str = "tvd"                  # delta limits the lent probability ("tvd"), the divergence in nats ("jsd"),
    delta: float = 0.0                   # or the multiple of the draft's own probability ("ratio", LANTERN++'s lambda)
    metric: str = "l2"                   # by which codes are near; "raw": as stored; "rank": by probability
    omega: float | tuple[float, ...] = 1.0  # the factor of acceptance: its mean over the levels, or one for each
    nu: float = 0.0                      # how fast omega falls from level to level (COOL-SD); 0: it does not
    residual: str = "optimal"            # "optimal", "relaxed" or "released"

    def __post_init__(self):
        if isinstance(self.tree, list):
            object.__setattr__(self, "tree", tuple(tuple(p) if isinstance(p, list) else p for p in self.tree))
        if isinstance(self.omega, list):
            object.__setattr__(self, "omega", tuple(self.omega))

        def need(name, condition, wanted):
            if not condition:
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

        need("drafting", self.drafting in DRAFTINGS, f"one of {', '.join(DRAFTINGS)}")
        need("seed_exact", isinstance(self.seed_exact, bool), "True or False")
        if self.drafting == "dynamic":
            need("depth", is_count(self.depth, 1, MAX_DEPTH), count_within(1, MAX_DEPTH))
            need("width", is_count(self.width, 1, MAX_CHILDREN), count_within(1, MAX_CHILDREN))
            need("nodes", is_count(self.nodes, 2, MAX_NODES), f"{count_within(2, MAX_NODES)} (the root is one)")
        if self.drafting == "static":
            need("tree", isinstance(self.tree, (str, tuple)), "a name or a list of paths")
            static_tree(self.tree)
        if self.drafting == "jacobi":
            need("window", self.window == "auto" or is_count(self.window, 1, MAX_GUESSES),
                 f"{count_within(1, MAX_GUESSES)}, or auto")
        need("guess", self.guess in GUESSES, f"one of {', '.join(GUESSES)}")
        need("coupling", self.coupling in COUPLINGS, f"one of {', '.join(COUPLINGS)}")
        need("drafter", self.drafter in DRAFTERS, f"one of {', '.join(DRAFTERS)}")
        need("draft_guidance", is_number(self.draft_guidance, 0), FINITE)
        need("k", is_count(self.k, 0, MAX_NEIGHBORS), count_within(0, MAX_NEIGHBORS))
        need("cutoff", self.cutoff in CUTOFFS, f"one of {', '.join(CUTOFFS)}")
        max_delta = {"tvd": 1.0, "jsd": math.log(2)}.get(self.cutoff)
        if max_delta is None:
            need("delta", is_number(self.delta, 0), f"{FINITE} where cutoff is ratio")
        else:
            need("delta", is_number(self.delta, 0, max_delta), f"within [0, {max_delta:.4g}]")
        need("metric", self.metric in METRICS, f"one of {', '.join(METRICS)}")
        need("residual", self.residual in RESIDUALS, f"one of {', '.join(RESIDUALS)}")
        if self.metric == "rank":
            need("metric", self.drafting == "jacobi", "l2, raw, cosine or random (rank is for jacobi)")
            need("cutoff", self.cutoff == "tvd", "tvd where metric is rank (its delta is a difference)")
            need("residual", self.residual == "optimal",
                 "optimal where metric is rank (both masses are summed, and the others are not defined for that)")
        need("nu", is_number(self.nu, 0), FINITE)
        given = self.omega if isinstance(self.omega, tuple) else (self.omega,)
        need("omega", all(is_number(omega, 0) for omega in given), FINITE)
        if isinstance(self.omega, tuple):
            need("omega", self.drafting == "none" or len(given) == self.max_depth,
                 f"one number, or one for each of the {self.max_depth} levels")
            need("nu", self.nu == 0, "0 where omega is given level by level")
        if self.k and self.residual == "optimal" and min(self.omegas, default=1.0) < 1:
            raise ValueError("omega must be at least 1 at every level where neighbors lend (k > 0) and residual is "
                             "optimal: below, the best residual is not known; got "
                             f"{min(self.omegas):.4g} at the least. Raise omega, or set nu to 0 or residual to relaxed")
        if self.seed_exact and self.drafting != "none":
            why = "with shared noise a draft is accepted if it is the target's own draw"
            if self.k or any(omega != 1 for omega in self.omegas):
                raise ValueError(f"seed_exact must be false where k > 0 or omega is not 1: {why}, which leaves nothing "
                                 f"to relax; got k={self.k} and omega={format_value(self.omega)}. "
                                 "Set seed_exact to false")
            if self.coupling != "maximal":
                raise ValueError(f"coupling must be maximal where seed_exact is true: {why}, and nothing is rejected; "
                                 f"got {self.coupling!r}. Set seed_exact to false")

    @property
    def label(self) -> str:
        """The name, and what differs from the recipe of that name."""
        usual = every_parameter_of(METHODS[self.name]) if self.name in METHODS else {}
        changed = [f"{key}={format_value(value)}"
                   for key, value in every_parameter_of(self).items() if value != usual.get(key, value)
                   and (key, self.drafting) != ("depth", "static")]
        return ":".join([self.name, *changed])

    @property
    def is_baseline(self) -> bool:
        """Is this the method that others are measured against: one token a forward, no drafts?"""
        return self.drafting == "none"

    @property
    def max_depth(self) -> int:
        """How many drafts one step can accept at most."""
        if self.drafting == "static":
            return static_tree(self.tree).depth
        if self.drafting == "jacobi":
            auto = MAX_WINDOW if self.seed_exact else USUAL_WINDOW
            return auto if self.window == "auto" else self.window
        return min(max(self.depth, self.adaptation.depths[1] if self.adaptation else 0), max(self.nodes - 1, 0))

    @property
    def max_nodes(self) -> int:
        """How many nodes one target forward verifies at most, the root counted."""
        if self.drafting == "static":
            return len(static_tree(self.tree).parents)
        if self.drafting == "jacobi":
            return self.max_depth + 1
        if self.adaptation:
            return self.nodes
        return min(self.nodes, 1 + self.width + (self.depth - 1) * self.width ** 2)

    @property
    def max_width(self) -> int:
        """How many children a node can have at most. (A tree of one level may adapt beyond the others' bounds.)"""
        if self.drafting == "static":
            return static_tree(self.tree).max_width
        if self.drafting == "jacobi":
            return 1
        return self.nodes - 1 if self.adaptation else min(self.width, self.nodes - 1)

    @property
    def omegas(self) -> tuple[float, ...]:
        """The factor of acceptance at each level."""
        if self.drafting == "none":
            return ()
        return self.omega if isinstance(self.omega, tuple) else tuple(omega_schedule(self.omega, self.max_depth,
                                                                                     self.nu))

    @property
    def num_neighbors(self) -> int:
        """How many columns a table of neighbors must have. The residual "released" zeroes one more than may lend.

        The metric "rank" needs no table.
        """
        return self.k + (self.residual == "released") if self.k and self.metric != "rank" else 0

    @property
    def lossless(self) -> bool:
        """Are the tokens distributed as the target's?

        Neighbors must lend nothing. The optimal residual then keeps the distribution at every omega up to 1, the other
        residuals at omega 1 only.
        """
        return not self.k and all(omega <= 1 if self.residual == "optimal" else omega == 1 for omega in self.omegas)

    @property
    def tv_bound(self) -> float | None:
        """How far one accept test can move the target's distribution, in total variation; None: not known."""
        omega = max(self.omegas, default=1.0)
        if self.lossless or self.drafting == "none":
            return 0.0
        if not self.k:
            return 1 - 1 / omega if self.residual == "optimal" else None
        if self.metric == "rank" or omega != 1 or min(self.omegas) != 1 or self.residual == "released":
            return None
        return {"tvd": self.delta, "ratio": self.delta / (1 + self.delta)}.get(self.cutoff)

    @property
    def family(self) -> tuple:
        """What methods must have in common to share a forward. The rest may differ from request to request."""
        return (self.drafting, self.seed_exact, self.drafter, self.tree, self.adaptation, self.guess, self.coupling,
                self.k, self.cutoff, self.metric, self.residual)


@dataclass(frozen=True)
class ContinuousMethod:
    """One way to decode continuous tokens with a MAR: its own, or speculatively (CSpD, arXiv:2411.11925).

    One setting is exact: the variant `path` with gamma 1 and without `truncate` draws from the target's distribution,
    up to the bound that `max_tries` leaves (see `specvis_kernels.resample_gaussian`). With a larger gamma, `path`
    deviates in one place: a later draft is verified given the draft's last denoising step of the earlier drafts, while
    the tokens that are kept went through the target's. The other variants, and block conditioning, are approximations.
    """

    name: str
    source: str                        # the paper, and the place in it
    num_iter: int = 0                  # MAR's own decoding takes this many target forwards; 0: one for each token
    steps_first: int = 0               # denoising steps of its first tokens; 0: the model's own number
    steps_last: int = 0                # and of its last ones, linearly between (DiSA); 0: the model's own number
    guidance_schedule: str = "linear"  # how guidance grows with the known tokens, see models.mar.scheduled_guidance
    gamma: int = 0                     # drafted tokens a step; 0: MAR's own decoding
    prefill: float = 0.0               # the share of the tokens that the target draws alone, first
    variant: str = "paper"             # of the density ratio, see specvis_kernels.accept_gaussian
    distance_temperature: float = 1.0  # divides the last step's distances; in the release 42, when it accepts only
    conditioning: str = "exact"        # "exact": a draft is verified given those before it; "block": it is not
    truncate: bool = True              # Algorithm 1: what follows a step's first rejection is drafted anew
    aligned: bool = True               # draft and target denoise the same noise
    max_tries: int = 100               # of resampling; after them the target draws its own sample

    def __post_init__(self):
        def need(name, condition, wanted):
            if not condition:
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

        for name in ("truncate", "aligned"):
            need(name, isinstance(getattr(self, name), bool), "True or False")
        need("num_iter", is_count(self.num_iter, 0, MAX_TOKENS),
             f"{count_within(1, MAX_TOKENS)}, or 0 for one target forward a token")
        for name in ("steps_first", "steps_last"):
            steps = getattr(self, name)
            need(name, is_count(steps, 0, MAX_STEPS) and steps != 1,
                 f"{count_within(2, MAX_STEPS)}, or 0 for the model's own number")
        need("guidance_schedule", self.guidance_schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
        least = int(self.name != "mar")
        need("gamma", is_count(self.gamma, least, MAX_GUESSES), count_within(least, MAX_GUESSES))
        need("prefill", is_number(self.prefill, 0, 1), "within [0, 1]")
        need("variant", self.variant in VARIANTS, f"one of {', '.join(VARIANTS)}")
        need("conditioning", self.conditioning in CONDITIONINGS, f"one of {', '.join(CONDITIONINGS)}")
        need("distance_temperature", is_number(self.distance_temperature, MIN_NUMBER),
             "positive and finite in 32 bits")
        need("distance_temperature", self.variant != "path" or self.distance_temperature == 1,
             "1 where variant is path: it has no distances")
        need("aligned", self.variant != "path" or self.aligned,
             "true where variant is path: there is the draft's noise only")
        need("max_tries", is_count(self.max_tries, 1, MAX_TRIES), count_within(1, MAX_TRIES))

    @property
    def drafting(self) -> str:
        return "chain" if self.gamma else "none"

    @property
    def is_baseline(self) -> bool:
        """Is this the method that others are measured against: one token a forward, no drafts?"""
        return not self.gamma and not any(getattr(self, name) for name in OF_MAR)

    @property
    def label(self) -> str:
        """The name, and what differs from the recipe of that name."""
        usual = parameters_of(CONTINUOUS[self.name]) if self.name in CONTINUOUS else {}
        return ":".join([self.name, *(f"{key}={format_value(value)}" for key, value in parameters_of(self).items()
                                      if value != usual.get(key))])


EAGLE1, LANTERN, COOL_SD = ("EAGLE, arXiv:2401.15077", "LANTERN, arXiv:2410.03355, Algorithm 1",
                            "COOL-SD, arXiv:2601.09212")
SJD = "speculative Jacobi decoding, arXiv:2410.01699"
DYNAMIC = {"drafting": "dynamic", "depth": 4, "width": 6, "nodes": 32}
ADAPTIVE = {"drafting": "dynamic", "depth": 4, "width": 10, "nodes": 60, "adaptation": Adaptation()}
RELAXED = {"k": 100, "delta": 0.2, "residual": "relaxed"}

METHODS = {m.name: m for m in (
    Method("vanilla", "the baseline: a token a target forward"),
    Method("jacobi", f"{SJD}, with the noise of arXiv:2510.24211: no drafter, plain decoding's tokens", "jacobi",
           seed_exact=True, window="auto"),
    Method("speculative", "Leviathan et al., arXiv:2211.17192, Algorithm 1", "static", tree="chain-4"),
    Method("eagle1", f"{EAGLE1}: a static tree, children sampled", "static", tree="mc_sim_7b_63"),
    Method("eagle2", "EAGLE-2, arXiv:2406.16858, section 4", seed_exact=True, **DYNAMIC),
    Method("lantern", LANTERN, **DYNAMIC, **RELAXED),
    Method("lantern++", "LANTERN++, arXiv:2502.06352: static tree, cutoff relative to the draft's probability",
           "static", tree="naive_extend_57", k=10, cutoff="ratio", delta=1.0, residual="relaxed"),
    Method("adt-tree", "ADT-Tree, arXiv:2512.21857", seed_exact=True, **ADAPTIVE),
    Method("adt-tree+lantern", "ADT-Tree, arXiv:2512.21857, with LANTERN's acceptance", **ADAPTIVE, **RELAXED),
    Method("uniform-rsd", f"{COOL_SD}: one factor for all levels", "static", tree="mc_sim_7b_63", omega=1.1),
    Method("cool-sd", f"{COOL_SD}, eq. 10: the factor falls from level to level", "static", tree="mc_sim_7b_63",
           omega=1.1, nu=0.7),
    Method("lantern+optimal", f"{COOL_SD}, section 5.2: LANTERN's acceptance, optimal residual", **DYNAMIC,
           **RELAXED | {"residual": "optimal"}),
    # The numbers are the released code's, which has a table of distances between codes as well.
    Method("gsd", "GSD, arXiv:2508.07747: Jacobi decoding that accepts groups of tokens", "jacobi", window=15,
           coupling="none", k=13, delta=0.15, metric="rank"),
    Method("gsd+coupled", "GSD's groups, arXiv:2508.07747, with the coupling of SCD, arXiv:2510.24211", "jacobi",
           window=16, k=14, delta=0.15, metric="rank"),
)}

CSPD = "CSpD, arXiv:2411.11925"
CONTINUOUS = {m.name: m for m in (
    ContinuousMethod("mar", "MAR, arXiv:2406.11838: a token a target forward, or several at once"),
    ContinuousMethod("cspd", f"{CSPD}, Algorithm 1", gamma=4, prefill=0.05),
    ContinuousMethod("cspd-path", f"{CSPD}, with the density ratio of whole denoising paths", gamma=4, variant="path"),
    ContinuousMethod("cspd-released", f"{CSPD}, as its code has it", gamma=8, prefill=0.15, variant="released",
                     distance_temperature=42.0, conditioning="block", truncate=False),
)}


def takes_float(annotation) -> bool:
    """Has the annotation of a field `float` in it, as in `float | tuple[float, ...]`?"""
    return annotation is float or any(map(takes_float, get_args(annotation)))


ADAPTATION = {field.name for field in fields(Adaptation)}  # parameters of an adaptation, by their own names
FRACTIONAL = {field.name for kind in (Method, Adaptation, ContinuousMethod) for field in fields(kind)
              if takes_float(field.type)}  # parameters that need not be whole numbers
PARAMETERS = {  # name -> what it is; which methods have it, see parameters_of
    "drafter": "who drafts: " + ", ".join(f"{name} ({what})" for name, what in DRAFTERS.items()),
    "draft_guidance": "share of the guidance that the drafter gets; 0: it drafts without",
    "tree": f"static tree: a name, chain-<depth>, or a JSON file of paths; at most {MAX_NODES} nodes",
    "depth": f"levels that a step drafts, at most {MAX_DEPTH}",
    "width": f"children of a node, at most {MAX_CHILDREN}",
    "nodes": f"how many nodes a step verifies at most, the root counted; no more than {MAX_NODES}",
    "start": "where a tree's shape starts from: horizontal, vertical, random or tokenflock",
    "beta": "share of accepted levels from which on trees get deeper, in [0, 1]",
    "depth_step": "levels that a tree gains or loses",
    "width_step": "children a node that a tree loses or gains",
    "depths": "least and most levels",
    "widths": "least and most children a node, of trees deeper than 1",
    "radius": "how many tokens far tokenflock looks",
    "flat_depth": "depth that trees start from, whatever `start` says",
    "flat_width": "width that trees start from, whatever `start` says",
    "window": f"guesses that a forward reads, at most {MAX_GUESSES}, or auto: as many as are fastest here, "
              f"by a short timing at first; {USUAL_WINDOW} where seed_exact is false",
    "guess": "where a new position's first guess is drawn from: the row above it, or the last row",
    "seed_exact": "true: the tokens of plain decoding with the same seed; false: the same distribution",
    "coupling": "maximal: a rejected guess leaves the others as they are; none: they are drawn anew",
    "k": "nearest codes that may lend a draft their probability, fewer than the codebook has; 0: none",
    "delta": "the most they may lend: probability (tvd), nats (jsd), multiple of the draft's own (ratio)",
    "cutoff": "what delta limits: tvd, ratio or jsd",
    "metric": "by which codes are near: l2, raw, cosine, random, or rank (of jacobi): by the target's own probability",
    "omega": "factor of acceptance: its mean over the levels, or one for each, as 1.4,1.2,1,0.9,0.8",
    "nu": "how fast omega falls from level to level; 0: it does not",
    "residual": "what a rejection leaves: optimal, relaxed or released",
}
CONTINUOUS_PARAMETERS = {
    "num_iter": "target forwards of MAR's own decoding; 0: one for each token",
    "steps_first": "denoising steps of the first tokens, at most the model's; 0: the model's own number",
    "steps_last": "denoising steps of the last tokens, linearly between (DiSA); 0: the model's own number",
    "gamma": f"tokens that a step drafts, at most {MAX_GUESSES}",
    "prefill": "share of the tokens that the target draws alone, first",
    "variant": "of the density ratio: paper, released or path",
    "distance_temperature": "divides the last denoising step's distances",
    "conditioning": "exact: a draft is verified given those before it; block: given the step's start",
    "truncate": "true: what follows a step's first rejection is drafted anew; false: it is kept",
    "aligned": "true: draft and target denoise the same noise",
    "max_tries": f"of resampling, before the target draws its own sample; at most {MAX_TRIES}",
    "guidance_schedule": "how guidance grows with the known tokens: linear, constant, or released (linear, but for the "
                         "last tokens)",
}


OF_JACOBI = ("window", "guess", "seed_exact")
OF_ACCEPTANCE = ("coupling", "k", "delta", "cutoff", "metric", "omega", "nu", "residual")


def parameters_of(m: Method | ContinuousMethod) -> dict:
    """The parameters that a method has, with their values."""
    if isinstance(m, ContinuousMethod):
        return {name: getattr(m, name) for name in CONTINUOUS_PARAMETERS
                if name == "guidance_schedule" or (name in OF_MAR) == (m.gamma == 0)}
    if m.drafting == "none":
        return {}
    if m.drafting == "jacobi":
        return {name: getattr(m, name) for name in (OF_JACOBI if m.seed_exact else OF_JACOBI + OF_ACCEPTANCE)}
    values = {name: getattr(m.adaptation, name) if name in ADAPTATION else getattr(m, name)
              for name in PARAMETERS if name not in ADAPTATION or m.adaptation}
    absent = {"tree", "window", "guess", "coupling"}
    if m.drafting == "static":
        values["depth"] = m.max_depth  # of a chain; other trees have their own
        absent = absent - {"tree"} | {"width", "nodes"} | (set() if static_tree(m.tree).is_chain else {"depth"})
    return {name: value for name, value in values.items() if name not in absent}


def settings_of(m: Method | ContinuousMethod) -> dict:
    """Its parameters that say what the method is: without those whose value means that they are off."""
    off = {field.name: field.default for field in fields(type(m)) if field.name != "drafter"}
    return {name: value for name, value in parameters_of(m).items() if value is not None and value != off.get(name)}


def every_parameter_of(m: Method | ContinuousMethod) -> dict:
    """The parameters that a method has, and those that it has without seed_exact."""
    if isinstance(m, ContinuousMethod):
        return parameters_of(m)
    return parameters_of(replace(m, seed_exact=False)) | parameters_of(m)


def method(name: str, /, **parameters) -> Method | ContinuousMethod:
    """The method of that name with some parameters changed (those that are None stay).

    Raises:
        ValueError: unknown name (the nearest are named), a parameter that the method lacks or out of its range
    """
    known = METHODS | CONTINUOUS
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=2, cutoff=0.6)
        raise ValueError(f"unknown method {name!r}; " + (f"did you mean {' or '.join(near)}? " if near else "")
                         + f"known: {', '.join(known)}")
    base = known[name]
    changed = {key: value for key, value in parameters.items() if value is not None}
    usual = every_parameter_of(base)
    for key in changed:
        if key not in usual:
            near = difflib.get_close_matches(key, usual, n=2, cutoff=0.7)
            taken = parameters_of(base) if changed.get("seed_exact", True) else usual
            raise ValueError(f"method {name} has no parameter {key!r}; "
                             + (f"did you mean {' or '.join(near)}? " if near else "")
                             + f"its parameters: {', '.join(taken) or 'none'}")
    if name in CONTINUOUS:
        return replace(base, **changed)
    if base.drafting == "static" and "depth" in changed:
        if "tree" in changed:
            raise ValueError("depth and tree must not be given together: a static tree has its own depth")
        if not is_count(changed["depth"], 1, MAX_DEPTH):
            raise ValueError(f"depth must be {count_within(1, MAX_DEPTH)}, got {changed['depth']!r}")
        changed["tree"] = f"chain-{changed.pop('depth')}"
    if isinstance(changed.get("omega"), (tuple, list)):
        changed.setdefault("nu", 0.0)
    if not changed.get("k", base.k):
        for key in ("delta", "cutoff", "metric"):
            if key in changed:
                raise ValueError(f"{key} must come with k > 0: without neighbors there is nothing to cut off")
    adaptation = {key: changed.pop(key) for key in list(changed) if key in ADAPTATION}
    if adaptation:
        changed["adaptation"] = replace(base.adaptation, **adaptation)
    return replace(base, **changed)


def parse_method(text: str, /, **parameters) -> Method | ContinuousMethod:
    """A method as it is written on the command line, "name" or "name:parameter=value:...", e.g.
    "adt-tree:start=vertical:widths=4,13".

    Raises:
        ValueError: as `method`; or a value is not what the parameter takes
    """
    name, *settings = text.strip().split(":")
    known = every_parameter_of(method(name))
    for setting in settings:
        key, equals, value = setting.partition("=")
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
