"""Numbers and layouts that a caller might pass by mistake."""
import random

import torch

from tests.laws.test_at_the_door import misaligned

NAN, INF = float("nan"), float("inf")
ABOVE_2, BELOW_1 = 2.0 + 2.0**-22, 1.0 - 2.0**-24
BAD_PROBS = (NAN, INF, -INF, -1.0, -0.0, -1e-45, 3.0, 2.0, ABOVE_2, 1e-45, 2.0**-42, 2.0**-43, 3e38)
UNIFORMS = (0.0, 1.0, NAN, -1.0, INF, -0.0, 0.5, BELOW_1, 1e-45, 7.0)
OMEGAS = (0.0, INF, NAN, -1.0, -0.0, BELOW_1, 1.0, 2.0, 1e-45)
DELTAS = (0.0, INF, NAN, -1.0, -0.0, 1.0, 0.25, 1e-45, 3e38)
LOGITS = (NAN, INF, -INF, 3e38, -3e38, -3.4e38, -65504.0, 1e-45, 0.0, -0.0, 88.0, -88.0)
GAUSSIAN = (NAN, INF, -INF, 3e38, -3e38, 1e-45, 0.0, 700.0, -700.0, 88.0)
TEMPERATURES = (0.0, -0.0, 1.0, 0.5, 2.0, NAN, INF, -1.0, 1e-45, 1e-30, 3e38)
GUIDANCES = (0.0, 1.0, 3.5, -1.0, NAN, INF, 3e38)
TOP_P = (0.0, 1.0, 0.5, 0.9, NAN, -1.0, 2.0, 1e-45, BELOW_1, INF)
INT32 = (-2**31, 2**31 - 1, -7, -2, -1, 0, 1)
INT64 = (-2**63, 2**63 - 1, -2**31, 2**32, -7, -2, -1, 0, 1)


class Values:
    """Draws that a seed decides: numbers, and tensors in which some numbers are bad."""

    is_large = False  # whether the bad integers of all arguments together are the largest of their dtypes

    def __init__(self, seed):
        self.r = random.Random(seed)
        self.g = torch.Generator().manual_seed(self.r.getrandbits(62))
        self.is_wild = self.r.random() < 0.7  # otherwise all numbers are good

    def pick(self, *choices):
        return self.r.choice(choices)

    def chance(self, share):
        return self.r.random() < share

    def uniform(self, *shape):
        return torch.rand(*shape, generator=self.g)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.g)

    def below(self, high, *shape, low=0, dtype=torch.int64):
        """Integers from low to high - 1."""
        return torch.randint(low, max(high, low + 1), shape, generator=self.g, dtype=dtype)

    def hurt(self, tensor, bad, share=0.3):
        """With this chance one element of a tensor, or up to an eighth of them, becomes a bad number."""
        if self.is_large and tensor.numel() and not tensor.is_floating_point():
            most = torch.iinfo(tensor.dtype).max
            bad = most, most - 1, -most - 1
        elif not self.is_wild or not tensor.numel() or not self.chance(share):
            return tensor
        count = self.pick(1, 1, 2, max(1, tensor.numel() // 64), max(1, tensor.numel() // 8))
        values = torch.tensor(bad, dtype=tensor.dtype)
        flat = tensor.flatten()
        flat[self.below(flat.numel(), count)] = values[self.below(len(bad), count)]
        return flat.view(tensor.shape)

    def rows(self, *shape):
        """Rows of probabilities: drawn ones or counts, some flat, of one token, without mass, tiny or too large."""
        *rows, V = shape
        kind = self.pick("counts", "flat", "peaked", "few", "same")
        if kind == "counts":
            picks = (self.uniform(*rows, 64) ** 3 * V).long().clamp(max=V - 1)
            probs = torch.zeros(shape).scatter_add(-1, picks, torch.ones(()).expand(picks.shape)) / 64
        else:
            probs = (self.normal(*shape) * self.pick(0.1, 1, 4, 30)).softmax(-1)
        if kind == "few":
            probs = torch.where(probs < probs.amax(-1, keepdim=True) / 8, 0, probs)
            probs = probs / probs.sum(-1, keepdim=True)
        if kind == "same" and rows and rows[0]:
            probs = probs[:1].expand(shape).clone()
        if self.is_wild and self.chance(0.5):
            which = self.below(self.pick(10, 40), *rows, 1)
            one = torch.zeros(shape).scatter(-1, self.below(V, *rows, 1), 1.0)
            for i, other in enumerate((one, torch.zeros(()), torch.tensor(1 / V), torch.tensor(2.0), probs * 2**-30,
                                       probs * 1e-40, probs * 1.9, one * 2.0**-42)):
                probs = torch.where(which == i, other, probs)
        return self.hurt(probs, BAD_PROBS)

    def uniforms(self, *shape):
        uniforms = self.uniform(*shape) ** self.pick(1, 1, 3)
        if self.chance(0.5):
            uniforms = (uniforms * 64).floor() / 64
        return self.hurt(uniforms, UNIFORMS)

    def setting(self, good, bad, dtype, *shape):
        """A tensor of good numbers, some of which become bad, or one good number: a bad one is refused."""
        if self.chance(0.2):
            return self.pick(*good)
        return self.hurt(torch.tensor(good, dtype=dtype)[self.below(len(good), *shape)], bad)

    def tokens(self, V, *shape):
        return self.hurt(self.below(V, *shape), (-1, V, V - 1, 0, *INT64), 0.2)

    def table(self, C, k, V):
        """Neighbors (C, k): distinct, or random, with the code itself and ids that do not exist."""
        dtype = self.pick(torch.uint16, torch.int32, torch.int64)
        if self.chance(0.5) and C > 1:
            steps = self.uniform(C, C - 1).argsort(1)[:, :k] + 1
            table = (torch.arange(C)[:, None] + steps) % C
            table = torch.cat([table, torch.full((C, k - table.shape[1]), V)], 1)
        else:
            table = self.below(V + self.pick(0, 3), C, k)
            if self.chance(0.3):
                table = table % self.pick(1, 2, 5)
        if dtype != torch.uint16:
            table = self.hurt(table, INT64 if dtype == torch.int64 else INT32)
        return table.clamp(max=65535).to(dtype) if dtype == torch.uint16 else table.to(dtype)

    def parents(self, B, N, unused=0.2):
        """(B, N) int64, parents before their children; some slots are unused."""
        back = self.pick(1, 3, N)
        node = torch.arange(N)
        parents = node - 1 - (self.uniform(B, N) * node.clamp(max=back)).long()
        if self.chance(0.4):
            parents = torch.where(self.uniform(B, N) < 0.6, 0, parents)
        parents[:, :1] = -1
        if self.chance(unused) and N > 1:
            parents = torch.where((self.uniform(B, N) < 0.1) & (node > 0), -2, parents)
        return parents

    def layout(self, tensor, keep=False):
        """The tensor in another memory layout. `keep`: its numbers stay; otherwise elements may share memory too."""
        kind = self.pick("plain", "plain", "plain", "offset", "misaligned", "strided", "transposed", "negated",
                         *["expanded", "overlapping"] * (not keep))
        if not tensor.numel() or not tensor.ndim:
            return tensor
        if kind == "offset":
            return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)
        if kind == "misaligned":
            return misaligned(tensor)
        if kind == "strided":
            return torch.stack([tensor, tensor], -1)[..., 0]
        if kind == "transposed":
            order = self.r.sample(range(tensor.ndim), tensor.ndim)
            return tensor.permute(order).contiguous().permute([order.index(i) for i in range(tensor.ndim)])
        if kind == "expanded":
            dim = self.r.randrange(tensor.ndim)
            return tensor.narrow(dim, self.r.randrange(tensor.shape[dim]), 1).expand(tensor.shape)
        if kind == "overlapping":
            strides = tensor.contiguous().stride()
            return tensor.contiguous().as_strided(tensor.shape, [min(stride, self.pick(0, 1, stride))
                                                                 for stride in strides])
        return torch._neg_view(tensor.neg()) if kind == "negated" and tensor.is_floating_point() else tensor
