"""Jacobi decoding by rejection, a maximal coupling: a guess is kept as often as its new distribution allows.

See `specvis_kernels.couple_tokens`.

A guess needs the row that it was drawn from. So the rows of the newest positions are kept, where seed-exact decoding
keeps none.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specvis_kernels import couple_tokens, philox_uniforms, sample_residual

from ..models.interface import TargetModel, id_range, num_tokens, rows_and_columns
from .batch_state import BatchState
from .methods import Method, acceptance_rule
from .sampling import ACCEPT, DRAFT, Sampling

INT64 = torch.iinfo(torch.int64)


class Coupled(NamedTuple):
    """What rejection made of the guesses of a step. N rows, of what follows each node."""
    tokens: Tensor        # (B, N) int64
    num_accepted: Tensor  # (B,)   int64    leading guesses that were kept
    status: Tensor        # (B, N) int32    of the rows that the tokens were drawn from
    probs: Tensor         # (B, N, V) float32
    tv_excess: Tensor     # (B,)   float32  summed over the tokens that are final now


class Coupling(BatchState):
    """The rule of rejection, its random numbers, and the rows that the guesses were drawn from.

    A step's random numbers belong to the position of its first token, as in speculative decoding. Every step
    has another first token, so a guess that is drawn anew in a later step has new numbers.
    """

    ROWS = ("delta", "is_greedy", "uniforms", "first_uniforms", "rows", "earlier_excess")

    def __init__(self, methods: list[Method], sampling: Sampling, neighbors: Tensor | None, target: TargetModel,
                 any_greedy: bool):
        """any_greedy: may a request have temperature 0, now or later?"""
        base, device, max_depth = methods[0], sampling.seeds.device, max(m.max_depth for m in methods)
        B, L, self.base, self.target = len(methods), num_tokens(target), base, target
        self.columns = rows_and_columns(target.grid)[1]
        W = min(max_depth, L)  # an image has no more to guess
        rule = acceptance_rule(methods, neighbors, target, max_depth, device)
        # at temperature 0 nothing is lent: a guess is kept if it is the likeliest token
        deltas = [0.0 if greedy else m.acceptance.delta for m, greedy in zip(methods, sampling.greedy.tolist())]
        self.delta = torch.tensor(deltas, dtype=torch.float32, device=device)
        self.rule = rule if rule.neighbors is None else rule._replace(delta=self.delta)
        self.is_greedy, self.any_greedy = sampling.greedy[:, None, None], any_greedy
        self.uniforms = philox_uniforms(sampling.seeds, L, 2 * (W + 1), stream=ACCEPT).unflatten(2, (-1, 2))
        self.first_uniforms = philox_uniforms(sampling.seeds, L, W + 1, stream=DRAFT)
        # the row of position p is at p % num_rows; one row more is scratch for positions after a request's own
        # window
        self.num_rows = self.columns + 2 * W + 2
        self.rows = torch.zeros(B, self.num_rows + 1, target.vocab_size, dtype=torch.float32, device=device)
        self.earlier_excess = torch.zeros_like(self.rows[..., 0])  # of tests that kept the guess so far
        self.request = torch.arange(B, device=device)[:, None]

    def exact(self, probs: Tensor, status: Tensor) -> Tensor:
        """At temperature 0 all probability is on the likeliest token, except in rows that are not well."""
        if not self.any_greedy:
            return probs
        likeliest = torch.zeros_like(probs).scatter_(-1, probs.argmax(-1, keepdim=True), 1.0)
        return torch.where(self.is_greedy & (status == 0)[..., None], likeliest, probs)

    def keep_rows(self, positions: Tensor, probs: Tensor) -> None:
        """The guesses at positions (B, N) are from these rows now. At position -1 nothing is kept."""
        self.rows[self.request, torch.where(positions < 0, self.num_rows, positions % self.num_rows)] = probs

    def couple(self, probs: Tensor, status: Tensor, guesses: Tensor, counts: Tensor, budget: Tensor) -> Coupled:
        """Keep the guesses (B, N) for the positions from counts (B, 1) on, or draw them anew, from probs (B, N, V).

        budget: (B, 1) how many guesses can be accepted. The token after them is the target's own.
        """
        N, probs = guesses.shape[1], self.exact(probs, status)
        step = counts.clamp(max=self.uniforms.shape[1] - 1)
        uniforms = self.uniforms[self.request, step][:, 0, :N]
        fresh = sample_residual(probs.flatten(0, 1), None, uniforms[..., 1].flatten()).tokens.view(guesses.shape)
        index = torch.arange(N, device=guesses.device)
        if N == 1:
            return Coupled(fresh, torch.zeros_like(budget[:, 0]), status, probs, torch.zeros_like(probs[:, 0, 0]))
        drafted = guesses[:, :-1]
        old_rows = self.rows[self.request, (counts + index[:-1]) % self.num_rows]
        omega = None if self.rule.omega is None else self.rule.omega[:, :N - 1]
        acceptance, groups = self.base.acceptance, None
        if acceptance.metric == "rank":
            groups = rank_groups(probs[:, :-1], drafted, acceptance.k, self.delta)
        coupled = couple_tokens(probs[:, :-1], old_rows, drafted, uniforms[:, :-1], groups=groups,
                                **self.rule._replace(omega=omega)._asdict())
        num_accepted = coupled.num_kept[:, None].minimum(budget)
        is_final = (index[:-1] <= num_accepted) & (index[:-1] < budget)
        is_fresh = index >= budget
        if acceptance.coupling == "none":
            is_fresh = is_fresh | (index > num_accepted)
        tokens = torch.where(is_fresh, fresh, F.pad(coupled.tokens, (0, 1)))
        place = self.request, (counts + index[:-1]) % self.num_rows
        tv_excess = self.earlier_excess[place] + coupled.tv_excess
        self.earlier_excess[place] = torch.where(coupled.is_kept & ~is_fresh[:, :-1], tv_excess, 0.0)
        return Coupled(tokens, num_accepted[:, 0], status, probs, (tv_excess * is_final).sum(1))

    def first_guesses(self, counts: Tensor, last: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Guess the n positions after last (B, 1), the last ones that have rows, after a step from counts (B, 1) on.

        They are drawn from the rows above them, or from the last row; where other ids are allowed there, as before a
        forced token, they are drawn evenly from the ids that are allowed at the position. So every guess is an allowed
        id, and no rule of acceptance can keep another one. Returns the positions and the tokens (B, n).
        """
        positions = last + 1 + torch.arange(n, device=last.device)
        source, above = last.expand(-1, n), positions - self.columns
        if self.base.drafts.guess == "above":
            source = torch.where((above >= 0) & (above <= last), above, source)
        rows = self.rows[self.request, source % self.num_rows]
        ids = id_range(self.target, positions)
        if ids is not None:
            index = torch.arange(rows.shape[-1], device=rows.device)
            is_inside = (index >= ids[..., :1]) & (index < ids[..., 1:])
            is_other = (ids != id_range(self.target, source)).any(-1, keepdim=True)
            rows = torch.where(is_other, is_inside / is_inside.sum(-1, keepdim=True), rows)
        uniforms = self.first_uniforms[self.request, counts.clamp(max=self.uniforms.shape[1] - 1)][:, 0, :n]
        self.keep_rows(positions, rows)
        self.earlier_excess[self.request, positions % self.num_rows] = torch.zeros_like(uniforms)
        return positions, sample_residual(rows.flatten(0, 1), None, uniforms.flatten()).tokens.view(positions.shape)


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
