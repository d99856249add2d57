"""verify_tree: walk the draft tree from the root, accept one path, draw the token that follows it."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._dispatch import EMPTY_RESIDUAL, INVALID_ROW, INVALID_RULE, INVALID_TREE, check, check_count, check_dims, define
from ._numbers import FIXED_ONE, draw, to_fixed_point
from .neighborhood_sum import check_neighbors, kept_prefix

RESIDUALS = ("optimal", "relaxed", "released")


class VerifyResult(NamedTuple):
    """What `verify_tree` returns; its docstring says what the fields hold."""
    accepted_nodes: Tensor
    num_accepted: Tensor
    next_token: Tensor
    tv_excess: Tensor
    status: Tensor


def verify_tree(target_probs: Tensor, tokens: Tensor, first_child: Tensor, next_sibling: Tensor,
                uniforms: Tensor, *, draft_probs: Tensor | None = None, draft_row: Tensor | None = None,
                neighbors: Tensor | None = None, delta: Tensor | None = None, cutoff: str = "tvd",
                offset: int = 0, omega: Tensor | None = None, residual: str = "optimal",
                greedy: Tensor | None = None, max_depth: int,
                backend: str | None = None) -> VerifyResult:
    """Which drafted tokens stand, and the token after them: without relaxation, distributed as the target.

    At a node, R starts as the node's row of target_probs. Its children are tried in sibling order. Child x at
    depth d with uniform u has relaxed mass rho = R(x) + S, S the sum of the neighbors that the delta keeps
    (see neighborhood_sum; 0 without neighbors), and proposal Q: all mass on x, or the draft row without the
    earlier siblings, renormalized. It is accepted iff

        u * Q(x) < omega_d * rho   and   rho > 0

    and the walk goes on at x. Otherwise R becomes the normalized positive part of

        optimal   max(R - Q, (1 - omega_d) R)  the closest to the target; exact if omega_d <= 1, no neighbors
        relaxed   R' - Q                       R' = R with the kept neighbors' mass moved to x (LANTERN, (3))
        released  R - Q                        as LANTERN's code does it: with at least one neighbor kept, a
                                               point mass also removes the first k + 1 neighbors, a sampled
                                               draft spares them; k + 1 columns, the delta looks at k

    for the next sibling; if nothing is left of it, the target's row (EMPTY_RESIDUAL). When no child is
    accepted the next token is drawn from R; at a leaf, or at depth P, from the node's row. A sibling all of
    whose draft mass sat on earlier siblings is skipped. A node whose draft row is invalid counts as a leaf.

    A greedy request judges every node by itself: child x is accepted iff it is the argmax (lowest id on ties)
    of its parent's row with x's entry raised to rho. The deepest path of at most P accepted nodes wins, the
    first in node order on ties, and the argmax of the row at its end follows. It looks at no draft row,
    uniform or omega.

    Probabilities are fixed point, floor(p * 2**42), and a comparison is of one float64 product a side, so all
    backends decide alike. (LANTERN, arXiv:2410.03355; COOL-SD, arXiv:2601.09212, here with the optimal
    residual at every depth; EAGLE, arXiv:2401.15077.)

    Args:
        target_probs:  (B, N, V) float32       the target's distribution after each node; node 0 is the root
        tokens:        (B, N)    int64         the token at each node, in [0, V); the root's is not looked at
        first_child:   (B, N)    int32         each node's first child, a later node, or -1
        next_sibling:  (B, N)    int32         the child of the same parent tried next, a later node, or -1
        uniforms:      (B, N)    float32       in [0, 1): column n > 0 decides node n, column 0 the next token
        draft_probs:   (B, M, V) float32       rows from which children were drawn without replacement
        draft_row:     (B, N)    int32         the row n's children were drawn from; negative: point masses
        neighbors:     (C, k) uint16 or int32  each code's neighbors, nearest first: distinct, itself excluded
        delta:        (B,)      float32       what the neighbors' sum is compared with
        cutoff:          "tvd", "ratio" or "jsd": how it is compared
        offset:        the token id of code 0; a token outside [offset, offset + C) has no neighbors
        omega:         (B, P)    float32       factor on the acceptance of children at depth 1..P; None is 1
        residual:      "optimal", "relaxed" or "released"
        greedy:        (B,)      bool          which requests are greedy; None is none
        P:             the most nodes that can be accepted
        backend:       None for the device's own kernel; a name from `backends()` to force one

    Returns:
        path:        (B, P) int32    the accepted nodes, without the root; -1 pads
        accepted:    (B,)   int32    how many
        next_token:  (B,)   int64    the token after them, in [0, V)
        excess:      (B,)   float32  fidelity meter: over the tried siblings, the sum of the probability of
                                     reaching one times what its acceptance probability has above that with
                                     omega 1 and no neighbors; greedy: how many nodes of the path strict greedy
                                     would refuse
        status:      (B,)   int32    EMPTY_RESIDUAL
                                     INVALID_ROW: of the target at the path's end (next_token is 0) or of a
                                     draft at a node with children
                                     INVALID_TREE: a link to no later node or to a token outside [0, V), where
                                     the siblings end; a draft row >= M, where the node counts as a leaf
                                     INVALID_RULE: an omega negative, NaN, or below 1 with neighbors and the
                                     optimal residual; nothing is accepted, next_token is drawn at the root

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above, N or V or M is 0, draft_probs
            comes without draft_row or neighbors without delta, or "released" with a single column
    """
    B, N, V = check_dims("target_probs", target_probs, "BNV")
    check("target_probs", target_probs, torch.float32, B=B, N=N, V=V)
    if N < 1 or V < 1:
        raise ValueError(f"target_probs must have N >= 1 and V >= 1, got shape ({B}, {N}, {V})")
    like = target_probs
    check("tokens", tokens, torch.int64, like=like, B=B, N=N)
    check("first_child", first_child, torch.int32, like=like, B=B, N=N)
    check("next_sibling", next_sibling, torch.int32, like=like, B=B, N=N)
    check("uniforms", uniforms, torch.float32, like=like, B=B, N=N)
    check_count("max_depth", max_depth, 0)
    if (draft_probs is None) != (draft_row is None):
        raise ValueError("draft_probs and draft_row must be given together")
    if draft_probs is not None:
        M = check_dims("draft_probs", draft_probs, "BMV")[1]
        check("draft_probs", draft_probs, torch.float32, like=like, B=B, M=M, V=V)
        check("draft_row", draft_row, torch.int32, like=like, B=B, N=N)
        if M < 1:
            raise ValueError(f"draft_probs must have M >= 1, got shape ({B}, {M}, {V})")
    if residual not in RESIDUALS:
        raise ValueError(f"residual must be one of {', '.join(RESIDUALS)}, got {residual!r}")
    if (neighbors is None) != (delta is None):
        raise ValueError("neighbors and delta must be given together")
    if neighbors is not None:
        check_neighbors(neighbors, cutoff, offset, V, like=like)
        check("delta", delta, torch.float32, like=like, B=B)
        if residual == "released" and neighbors.shape[1] < 2:
            raise ValueError("neighbors must have at least two columns under 'released', got one")
    if omega is not None:
        check("omega", omega, torch.float32, like=like, B=B, P=max_depth)
    if greedy is not None:
        check("greedy", greedy, torch.bool, like=like, B=B)
    rows = (target_probs, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors,
            delta, omega, greedy)
    return VerifyResult(*_call(backend, *[None if t is None else t.contiguous() for t in rows], cutoff, offset,
                               residual, max_depth))


def _oracle(target_probs, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors,
            delta, omega, greedy, cutoff, offset, residual, max_depth):
    out = _walk(target_probs, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors,
                delta, omega, cutoff, offset, residual, max_depth)
    if greedy is not None:
        other = _judge(target_probs, tokens, first_child, next_sibling, neighbors, delta, cutoff, offset,
                       residual, max_depth)
        out = [torch.where(greedy.view(-1, *[1] * (a.ndim - 1)), b, a) for a, b in zip(out, other)]
    path, accepted, next_token, excess, status = out
    return path.int(), accepted.int(), next_token, excess.float(), status.int()


def _walk(target_probs, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors,
          delta, omega, cutoff, offset, residual, P):
    """Sampling requests. Links lead to later nodes only, so N steps of one candidate see the whole walk."""
    B, N, V = target_probs.shape
    device = target_probs.device
    each = torch.arange(B, device=device)
    columns = 0 if neighbors is None else neighbors.shape[1]
    path = torch.full((B, P), -1, device=device)
    node, depth, status = (torch.zeros(B, dtype=torch.int64, device=device) for _ in range(3))
    excess = torch.zeros(B, dtype=torch.float64, device=device)
    factors = torch.ones(B, max(P, 1), dtype=torch.float64, device=device)
    if omega is not None and P > 0:
        factors = omega.double()
    refused = (~(factors >= 0)).any(1)
    if neighbors is not None and residual == "optimal":
        refused = refused | (factors < 1).any(1)
    status = status | torch.where(refused, INVALID_RULE, 0)

    def enter(node, depth):
        """The state at `node` before its first child."""
        weights, total, valid = to_fixed_point(target_probs[each, node])
        status = torch.where(valid, 0, INVALID_ROW)
        child = first_child[each, node].long()
        trying = valid & ~refused & (depth < P) & (child >= 0)
        draft, sampled = torch.zeros_like(weights), torch.zeros_like(valid)
        if draft_probs is not None:
            row, M = draft_row[each, node].long(), draft_probs.shape[1]
            status = status | torch.where(trying & (row >= M), INVALID_TREE, 0)
            draft, _, sound = to_fixed_point(draft_probs[each, row.clamp(0, M - 1)])
            status = status | torch.where(trying & (row >= 0) & (row < M) & ~sound, INVALID_ROW, 0)
            sampled = row >= 0
            trying = trying & (~sampled | (sound & (row < M)))
        reach = torch.ones_like(excess)
        return weights, total, valid, child, node, trying, draft, draft.sum(1), sampled, reach, status

    state = enter(node, depth)
    for _ in range(N):
        weights, total, valid, child, previous, trying, draft, draft_total, sampled, reach, found = state
        status = status | found
        trying = trying & (child >= 0)
        at = child.clamp(0, N - 1)
        x = tokens[each, at]
        good = (child > previous) & (child < N) & (x >= 0) & (x < V)
        status = status | torch.where(trying & ~good, INVALID_TREE, 0)
        trying = trying & good
        tried = trying & ~(sampled & (draft_total == 0))
        x = x.clamp(0, V - 1)

        own, drafted = weights[each, x], draft[each, x]
        moved, kept, ids = torch.zeros_like(own), torch.zeros_like(own), x.new_empty(B, 0)
        if neighbors is not None:
            looked = columns - 1 if residual == "released" else columns
            moved, kept, ids = kept_prefix(weights, total, x, neighbors, delta, cutoff, offset, looked)
        rho = own + moved
        factor = factors[each, depth.clamp(max=factors.shape[1] - 1)]
        u = uniforms[each, at].double()
        scale = torch.where(sampled, drafted.double() * total.double(), total.double())
        left = torch.where(sampled, (u * drafted.double()) * total.double(), u * total.double())
        times = torch.where(sampled, draft_total.double(), 1.0)
        gain, strict = (factor * rho.double()) * times, own.double() * times
        accept = tried & (left < gain) & (rho > 0)

        odds = torch.where((rho > 0) & (gain > 0), torch.where(gain >= scale, 1.0, gain / scale), 0.0)
        strict_odds = torch.where(own > 0, torch.where(strict >= scale, 1.0, strict / scale), 0.0)
        excess = torch.where(tried, excess + reach * (odds - strict_odds).clamp(min=0), excess)
        reach = torch.where(tried, reach * (1 - odds), reach)

        # The residual, for the next sibling: the neighbors' part in it is `taken`.
        slack = torch.where(factor < 1, 1 - factor, 0.0)
        place = torch.arange(ids.shape[1], device=device)
        taken = torch.zeros_like(kept) if residual == "optimal" else kept
        if residual == "released":
            taken = torch.where(kept >= 1, columns, 0)
        ids = torch.where(place < taken.unsqueeze(1), ids, V)
        taken = torch.zeros(B, V + 1, dtype=torch.bool, device=device).scatter(1, ids, True)[:, :V]
        itself = torch.arange(V, device=device) == x.unsqueeze(1)

        remnant = torch.where(taken, 0, weights)
        remains = (slack * own.double()).to(torch.int64) if residual == "optimal" else torch.zeros_like(own)
        remnant = torch.where(itself, remains.unsqueeze(1), remnant)

        spread, proposal = weights, draft
        if residual == "relaxed":
            spread = torch.where(itself, rho.unsqueeze(1), torch.where(taken, 0, weights))
        if residual == "released":
            proposal = torch.where(taken, 0, draft)
        r = spread.double() * (1 / total.double()).unsqueeze(1)
        rest = r - proposal.double() * (1 / draft_total.double()).unsqueeze(1)
        if residual == "optimal":
            rest = torch.maximum(rest, slack.unsqueeze(1) * r)
        rest = (torch.where(rest > 0, rest, 0.0) * FIXED_ONE).to(torch.int64)
        remnant = torch.where(sampled.unsqueeze(1), rest, remnant)

        rejected = tried & ~accept
        full, full_total, _ = to_fixed_point(target_probs[each, node])
        empty = rejected & (remnant.sum(1) == 0)
        status = status | torch.where(empty, EMPTY_RESIDUAL, 0)
        remnant = torch.where(empty.unsqueeze(1), full, remnant)
        weights = torch.where(rejected.unsqueeze(1), remnant, weights)
        total = torch.where(empty, full_total, torch.where(rejected, weights.sum(1), total))
        draft = torch.where(rejected.unsqueeze(1) & itself, 0, draft)
        sibling = torch.where(trying, next_sibling[each, at].long(), child)
        previous = torch.where(trying, child, previous)
        stay = (weights, total, valid, sibling, previous, trying, draft, draft.sum(1), sampled, reach,
                torch.zeros_like(found))

        node = torch.where(accept, child, node)
        if P > 0:
            last = depth.clamp(max=P - 1)
            path[each, last] = torch.where(accept, child, path[each, last])
        depth = depth + accept
        state = [torch.where(accept.view(-1, *[1] * (a.ndim - 1)), a, b)
                 for a, b in zip(enter(node, depth), stay)]
    weights, total, valid, status = state[0], state[1], state[2], status | state[-1]
    next_token = torch.where(valid, draw(weights, total, uniforms[:, 0]), 0)
    return path, depth, next_token, excess, status


def _judge(target_probs, tokens, first_child, next_sibling, neighbors, delta, cutoff, offset, residual, P):
    """Greedy requests: nodes in order, each with its chain of children."""
    B, N, V = target_probs.shape
    device = target_probs.device
    status = torch.zeros(B, dtype=torch.int64, device=device)
    depth = torch.full((B, N), -1, device=device)  # of accepted nodes
    depth[:, 0] = 0
    parent, swerves = torch.zeros_like(depth), torch.zeros_like(depth)
    known = (tokens >= 0) & (tokens < V)
    x = tokens.clamp(0, V - 1)

    for n in range(N):
        weights, total, valid = to_fixed_point(target_probs[:, n])
        most, top = weights.max(1, keepdim=True)
        rho = weights.gather(1, x)
        if neighbors is not None:
            looked = neighbors.shape[1] - (residual == "released")
            rho = rho + kept_prefix(weights.unsqueeze(1).expand(B, N, V), total.unsqueeze(1), x, neighbors,
                                    delta.unsqueeze(1), cutoff, offset, looked)[0]
        best = (x == top) | (rho > most) | ((rho == most) & (x < top))

        trying = valid & (depth[:, n] >= 0) & (depth[:, n] < P)
        child, previous = first_child[:, n].long(), torch.full_like(status, n)
        for _ in range(N - n):
            trying = trying & (child >= 0)
            at = child.clamp(0, N - 1).unsqueeze(1)
            good = (child > previous) & (child < N) & known.gather(1, at).squeeze(1)
            status = status | torch.where(trying & ~good, INVALID_TREE, 0)
            trying = trying & good
            accept = trying.unsqueeze(1) & best.gather(1, at)
            swerve = (x.gather(1, at) != top).long() + swerves[:, n:n + 1]
            depth = depth.scatter(1, at, torch.where(accept, depth[:, n:n + 1] + 1, depth.gather(1, at)))
            parent = parent.scatter(1, at, torch.where(accept, n, parent.gather(1, at)))
            swerves = swerves.scatter(1, at, torch.where(accept, swerve, swerves.gather(1, at)))
            previous, child = child, next_sibling.gather(1, at).squeeze(1).long()

    accepted, node = depth.max(1)
    excess = swerves.gather(1, node.unsqueeze(1)).squeeze(1)
    weights, _, valid = to_fixed_point(target_probs[torch.arange(B, device=device), node])
    status = status | torch.where(valid, 0, INVALID_ROW)
    next_token = torch.where(valid, weights.argmax(1), 0)
    path = torch.full((B, P + 1), -1, device=device)
    for d in range(min(P, N - 1), 0, -1):
        on = accepted >= d
        path[:, d] = torch.where(on, node, -1)
        node = torch.where(on, parent.gather(1, node.unsqueeze(1)).squeeze(1), node)
    return path[:, 1:], accepted, next_token, excess.double(), status


def _meta(target_probs, tokens, first_child, next_sibling, uniforms, draft_probs, draft_row, neighbors,
          delta, omega, greedy, cutoff, offset, residual, max_depth):
    B = target_probs.shape[0]
    return (tokens.new_empty(B, max_depth, dtype=torch.int32), tokens.new_empty(B, dtype=torch.int32),
            tokens.new_empty(B), target_probs.new_empty(B), tokens.new_empty(B, dtype=torch.int32))


_call = define(
    "verify_tree(Tensor target_probs, Tensor tokens, Tensor first_child, Tensor next_sibling,"
    " Tensor uniforms, Tensor? draft_probs, Tensor? draft_row, Tensor? neighbors, Tensor? delta,"
    " Tensor? omega, Tensor? greedy, str cutoff, SymInt offset, str residual, SymInt max_depth)"
    " -> (Tensor accepted_nodes, Tensor num_accepted, Tensor next_token, Tensor tv_excess, Tensor status)",
    oracle=_oracle, meta=_meta)
