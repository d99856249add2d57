"""Jacobi decoding by rejection, a maximal coupling: a guess is kept as often as its new distribution allows.

See `specvis_kernels.couple_tokens`.

A guess needs the row that it was drawn from. So the rows of the newest positions are kept, where seed-exact decoding
keeps none.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specvis_kernels import CoupleTokensResult, couple_tokens, sample_residual

from ..models.interface import TargetModel, columns_and_tokens, id_range
from .batch_state import BatchState
from .methods import Method, acceptance_rule
from .sampling import ACCEPT, DRAFT, Sampling, uniforms_at

INT64 = torch.iinfo(torch.int64)


class Coupled(NamedTuple):
    """What rejection made of the guesses of a step. N rows, of what follows each node."""
    tokens: Tensor        # (B, N) int64
    num_accepted: Tensor  # (B,)   int64    leading guesses that were kept
    status: Tensor        # (B, N) int32    of the rows that the tokens were drawn from
    probs: Tensor         # (B, N, V) float32
    tv_excess: Tensor     # (B,)   float32  summed over the tokens that are final now


class RowRing(BatchState):
    """A row of numbers for each of the newest positions of B images. Position p has the place p % size."""

    ROWS = ("rows",)

    def __init__(self, rows: Tensor):
        """rows: (B, size, ..) the first ones"""
        self.rows, self.request = rows, torch.arange(len(rows), device=rows.device)[:, None]

    def get(self, positions: Tensor) -> Tensor:
        """The rows (B, N, ..) of positions (B, N)."""
        return self.rows[self.request, positions % self.rows.shape[1]]

    def put(self, positions: Tensor, rows: Tensor) -> None:
        self.rows[self.request, positions % self.rows.shape[1]] = rows


class Coupling(BatchState):
    """The rule of rejection, its random numbers, and the rows that the guesses were drawn from.

    A step's random numbers belong to the position of its first token, as in speculative decoding. Every step
    has another first token, so a guess that is drawn anew in a later step has new numbers.
    """

    ROWS, PARTS = ("delta", "is_greedy", "seeds"), ("rows", "excess")

    def __init__(self, methods: list[Method], sampling: Sampling, neighbors: Tensor | None, target: TargetModel,
                 window: int, any_greedy: bool):
        """window: how many guesses a step reads; any_greedy: may a request have temperature 0, now or later?"""
        base, device = methods[0], sampling.seeds.device
        self.acceptance, self.target, self.seeds = base.acceptance, target, sampling.seeds
        self.columns, self.num_tokens = columns_and_tokens(target)
        # at temperature 0 nothing is lent: a guess is kept if it is the likeliest token
        deltas = [0.0 if greedy else m.acceptance.delta for m, greedy in zip(methods, sampling.greedy.tolist())]
        self.delta = torch.tensor(deltas, dtype=torch.float32, device=device)
        rule = acceptance_rule(methods, neighbors, target, base.max_depth, device)
        self.rule = rule if rule.neighbors is None else rule._replace(delta=self.delta)
        self.is_greedy, self.any_greedy = sampling.greedy[:, None, None], any_greedy
        shape = len(methods), self.columns + 2 * window + 2, target.vocab_size
        rows = torch.zeros(shape, dtype=torch.float32, device=device)
        self.rows = RowRing(rows)
        self.excess = RowRing(torch.zeros_like(rows[..., 0]))  # of the tests that kept a guess so far

    def exact(self, probs: Tensor, status: Tensor) -> Tensor:
        """At temperature 0 all probability is on the likeliest token, except in invalid rows."""
        if not self.any_greedy:
            return probs
        likeliest = torch.zeros_like(probs).scatter_(-1, probs.argmax(-1, keepdim=True), 1.0)
        return torch.where(self.is_greedy & (status == 0)[..., None], likeliest, probs)

    def uniforms(self, position: Tensor, n: int, stream: int) -> Tensor:
        """The random numbers (B, n) of the step whose first token is at position (B,)."""
        return uniforms_at(self.seeds, position.clamp(max=self.num_tokens - 1), n, stream)

    def couple(self, probs: Tensor, status: Tensor, guesses: Tensor, positions: Tensor) -> Coupled:
        """Keep the guesses (B, N) for the positions (B, N), or draw them anew, from probs (B, N, V).

        The last one, and what is after the image's last token, is always drawn anew.
        """
        probs, N = self.exact(probs, status), guesses.shape[1]
        uniforms = self.uniforms(positions[:, 0], 2 * N, ACCEPT).unflatten(1, (-1, 2))
        fresh = sample_residual(probs.flatten(0, 1), None, uniforms[..., 1].flatten()).tokens.view(guesses.shape)
        tested = self.test(probs[:, :-1], guesses[:, :-1], positions[:, :-1], uniforms[:, :-1])
        index = torch.arange(N, device=guesses.device)
        budget = (self.num_tokens - 1 - positions[:, :1]).clamp(max=N - 1)
        num_accepted = tested.num_kept[:, None].minimum(budget)
        is_fresh = index >= budget
        if self.acceptance.coupling == "none":
            is_fresh = is_fresh | (index > num_accepted)
        tokens = torch.where(is_fresh, fresh, F.pad(tested.tokens, (0, 1)))
        is_final = ((index <= num_accepted) & (index < budget))[:, :-1]
        tv_excess = self.account(positions[:, :-1], tested, ~is_fresh[:, :-1], is_final)
        return Coupled(tokens, num_accepted[:, 0], status, probs, tv_excess)

    def test(self, probs: Tensor, guesses: Tensor, positions: Tensor, uniforms: Tensor) -> CoupleTokensResult:
        """What the rule says of guesses (B, W) for positions (B, W), from probs (B, W, V)."""
        groups, omega = None, None if self.rule.omega is None else self.rule.omega[:, :guesses.shape[1]]
        if self.acceptance.metric == "rank":
            groups = rank_groups(probs, guesses, self.acceptance.k, self.delta)
        return couple_tokens(probs, self.rows.get(positions), guesses, uniforms, groups=groups,
                             **self.rule._replace(omega=omega)._asdict())

    def account(self, positions: Tensor, tested: CoupleTokensResult, stays: Tensor, is_final: Tensor) -> Tensor:
        """The added total variation (B,) of the tokens that are final now. Of guesses that stay it is kept."""
        tv_excess = self.excess.get(positions) + tested.tv_excess
        self.excess.put(positions, torch.where(tested.is_kept & stays, tv_excess, 0.0))
        return (tv_excess * is_final).sum(1)

    def guess(self, position: Tensor, last: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Guess the n positions after last (B, 1), the last ones that have rows, after a step from position (B,) on.

        They are drawn from the rows above them, or from the last row; where other ids are allowed there, as before a
        forced token, they are drawn evenly from the ids that are allowed at the position. So every guess is an allowed
        id, and no rule of acceptance can keep another one. Returns the positions and the tokens (B, n).
        """
        positions = last + 1 + torch.arange(n, device=last.device)
        source = row_above(positions, last, self.columns)
        rows, ids = self.rows.get(source), id_range(self.target, positions)
        if ids is not None:
            index = torch.arange(rows.shape[-1], device=rows.device)
            is_inside = (index >= ids[..., :1]) & (index < ids[..., 1:])
            is_other = (ids != id_range(self.target, source)).any(-1, keepdim=True)
            rows = torch.where(is_other, is_inside / is_inside.sum(-1, keepdim=True), rows)
        self.rows.put(positions, rows)
        self.excess.put(positions, torch.zeros_like(rows[..., 0]))
        uniforms = self.uniforms(position, n, DRAFT)
        return positions, sample_residual(rows.flatten(0, 1), None, uniforms.flatten()).tokens.view(positions.shape)


def row_above(positions: Tensor, last: Tensor, columns: int) -> Tensor:
    """From which position's row each of these positions (B, n) is guessed: the one above, or else last (B, 1)."""
    above = positions - columns
    return torch.where((above >= 0) & (above <= last), above, last)


def rank_groups(probs: Tensor, tokens: Tensor, k: int, delta: Tensor) -> Tensor:
    """Which ids count with each token: of the k around it in the order of its row, and only within delta of it.

    The likeliest ids come first in that order, and the lower id comes first among equals. k // 2 ids are likelier than
    the token and the other k - k // 2 are less likely, so of 13 it is 6 and 7, as GSD's code has it. At an end of the
    order there are fewer.

    Args:
        probs: (B, W, V) float32, tokens: (B, W) int64, delta: (B,) float32
    Returns:
        (B, W, k) int64, -1 where fewer ids count
    """
    V = probs.shape[-1]
    ids = torch.arange(V, device=probs.device)
    order = (probs.contiguous().view(torch.int32).long() << 32) + (V - 1 - ids)  # no two are equal, largest first
    own = order.gather(-1, tokens[..., None])
    num_before = min(k // 2, V - 1)
    before = torch.where(order > own, order, INT64.max).topk(num_before, -1, largest=False).indices
    after = torch.where(order < own, order, INT64.min).topk(min(k - k // 2, V - 1), -1).indices
    groups, mass = torch.cat([before, after], -1), probs.gather(-1, tokens[..., None])
    is_there = torch.cat([order.gather(-1, before) > own, order.gather(-1, after) < own], -1)
    is_near = (probs.gather(-1, groups) - mass).abs() <= delta[:, None, None]
    return F.pad(torch.where(is_there & is_near, groups, -1), (0, k - groups.shape[-1]), value=-1)
