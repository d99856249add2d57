"""Sizes, and groups of arguments that several ops have, for the makers of cases."""
import torch

from specvis_kernels._candidate import RESIDUALS
from specvis_kernels._filters import FILTERS
from specvis_kernels.neighborhood_sum import CUTOFFS
from tests import cases
from tests.fuzz.values import DELTAS, GUIDANCES, INT32, INT64, LOGITS, OMEGAS, TEMPERATURES, TOP_P, Values

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
TURN = 32        # case numbers with these remainders are not the usual large batches of small rows
TINY = {0}       # interpreted by Triton too
SMALL = {1, 2, 3, 4, 5, 6, 7, 8}  # and emulated
LONG = {9, 10}   # with long rows
REFUSED = {11}   # an argument has a wrong kind
LARGE = {1, 12, 13}  # integers near 2**63
ROWS = {"tiny": 6, "small": 64, "long": 2, "big": 2048}
VOCABULARIES = {"tiny": (1, 2, 3, 5, 17), "small": (1, 2, 3, 5, 17, 32, 33, 64, 129, 600),
                "big": (1, 2, 3, 5, 8, 17, 33), "long": (4097, 16383, 16384, 65537, 262143)}


class Maker(Values):
    """Draws sizes and arguments for the makers of cases."""

    def __init__(self, op, number):
        super().__init__(f"{op} {number}")
        turn = number % TURN
        self.size = "tiny" if turn in TINY else "small" if turn in SMALL else "long" if turn in LONG else "big"
        self.is_large = turn in LARGE
        if turn in REFUSED:
            self.size = "small"

    def batch(self, nodes=1):
        """A number of requests with `nodes` rows each; sometimes 0."""
        if self.chance(0.02):
            return 0
        most = max(1, ROWS[self.size] // max(nodes, 1))
        return most if self.size == "big" else self.r.randint(1, most)

    def nodes(self, most=24):
        """How many nodes a tree has."""
        if self.size in ("tiny", "long"):
            return self.pick(1, 2, 3)
        return min(most, self.pick(1, 2, 3, 5, 8, 9, 12, 24))

    def vocabulary(self):
        return self.pick(*VOCABULARIES[self.size])

    def number(self, *small):
        return self.pick(*small) if self.size in ("tiny", "big") else self.pick(*small, 16, 33, 40)

    def settings(self, B, V):
        """guidance, temperature, top_k, top_p and min_p."""
        return {"guidance": self.setting((1.0, 3.5, 0.0, 2.0), GUIDANCES, torch.float32, B),
                "temperature": self.setting((1.0, 0.0, 0.7, 2.0), TEMPERATURES, torch.float32, B),
                "top_k": self.setting((0, 1, 2, 5, V, V // 2), (*INT32, V + 1, V - 1), torch.int32, B),
                "top_p": self.setting((1.0, 0.5, 0.9, 0.0), TOP_P, torch.float32, B),
                "min_p": self.setting((0.0, 0.05, 0.5, 1.0), TOP_P, torch.float32, B) if self.chance(0.3) else None}

    def logits(self, B, N, V):
        """logits, uncond, and the arguments for the ids that count."""
        dtype = self.pick(*FLOATS)
        logits = self.normal(B, N, V) * self.pick(0.01, 1, 4, 20)
        if self.chance(0.4):
            logits = (logits * 2).round() / 8
        if self.chance(0.1):
            logits = torch.zeros_like(logits)
        if self.chance(0.2):
            masked = self.pick(-torch.inf, torch.finfo(dtype).min)
            logits = torch.where(self.uniform(B, N, V) < self.pick(0.1, 0.9), masked, logits)
        uncond = logits + self.normal(B, N, V).nan_to_num() if self.chance(0.5) else None
        if uncond is not None and self.chance(0.5):
            uncond = self.normal(B, N, V)
        named = {"logits": self.hurt(logits, LOGITS).to(dtype),
                 "uncond": None if uncond is None else self.hurt(uncond, LOGITS, 0.2).to(dtype)}
        ranges = self.pick(None, None, "pair", "rows")
        if ranges == "pair":
            first = self.r.randrange(V)
            named["id_range"] = (first, self.r.randint(first + 1, V))
        if ranges == "rows":
            first = self.below(V, B, N)
            last = first + 1 + (self.uniform(B, N) * (V - first)).long().clamp(max=V - 1)
            named["id_range"] = self.hurt(torch.stack([first, last], -1), (-1, V, V + 1, *INT64))
        return named | {"filters": self.pick(*FILTERS)}

    def rule(self, V, B, *omega_shape, residuals=RESIDUALS):
        """Arguments that relax verification; half of the cases have none."""
        named = {"residual": self.pick(*residuals), "cutoff": self.pick(*CUTOFFS)}
        if self.chance(0.5):
            C = self.pick(V, self.r.randint(1, V))
            if self.size == "long":
                C = min(C, 64)
            k = self.pick(V, V - 1, 1, 2, 3, 6, 20, 700 if self.size == "long" else 4)
            k = max(1 + (named["residual"] == "released"), min(k, 1000))
            offset = self.r.randint(0, V - C)
            named |= {"neighbors": self.table(C, k, V - offset), "offset": offset,
                      "delta": self.setting((0.1, 0.5, 2.0, 0.0), DELTAS, torch.float32, B)}
        if self.chance(0.6) and all(omega_shape):
            good = (1.0, 1.5, 1.25, 2.0) if "neighbors" in named else (1.0, 0.5, 0.75, 2.0, 0.25)
            named["omega"] = self.setting(good, OMEGAS, torch.float32, *omega_shape)
        return named

    def tree(self, B, N, V):
        """tokens, first_child and next_sibling; links may lead anywhere."""
        shapes = self.parents(min(B, 40), N)
        child, sibling = (links[self.below(len(shapes), B)] for links in cases.links(shapes.clamp(min=-1)))
        hurt = (N, *INT32, *range(min(N, 9)))
        tokens = self.tokens(V, B, N)
        if self.chance(0.5):  # siblings of one token
            tokens = torch.where(self.uniform(B, N) < 0.7, tokens % self.pick(1, 2, 3), tokens)
        return {"tokens": tokens, "first_child": self.hurt(child, hurt, 0.4),
                "next_sibling": self.hurt(sibling, hurt, 0.4)}

    def seeds(self, B, *nodes):
        return {"seeds": self.hurt(self.below(2**62, B), INT64),
                "positions": self.hurt(self.below(2**33, B, *nodes, low=-5), INT64)}
