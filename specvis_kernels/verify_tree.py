"""verify_tree: accept one path of drafted tokens, and draw the token that follows it."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._candidate import EMPTY, Candidate, check_relaxation, is_undefined, kept_neighbors, residual_mass
from ._checks import check, check_dims, check_one_of, check_together, check_tree, integers, setting
from ._define import checked_once, define
from ._numbers import draw, to_fixed_point, uniform_mass
from .neighborhood_sum import neighbor_prefix
from .status import EMPTY_RESIDUAL, INVALID_DRAFT, INVALID_ROW, INVALID_RULE, INVALID_TREE


class VerifyResult(NamedTuple):
    accepted_nodes: Tensor  # (B, P) int32
    num_accepted: Tensor    # (B,)   int32
    next_token: Tensor      # (B,)   int64
    tv_excess: Tensor       # (B,)   float32
    status: Tensor          # (B,)   int32


@checked_once
def verify_tree(target_probs: Tensor, tokens: Tensor, first_child: Tensor, next_sibling: Tensor,
                uniforms: Tensor, *, max_depth: int | None = None, draft_probs: Tensor | None = None,
                draft_row: Tensor | None = None, neighbors: Tensor | None = None, delta: Tensor | float | None = None,
                cutoff: str = "tvd", offset: int = 0, omega: Tensor | float | None = None, residual: str = "optimal",
                empty: str = "target", greedy: Tensor | bool | None = None, backend: str | None = None) -> VerifyResult:
    """Accept drafted tokens along one path of each request's tree, and draw the token that follows them.

    Verification starts at the root. At each node, R starts as the node's row of target_probs, and the children are
    tried in sibling order. Take a child at depth d with token x and uniform u. Q is the distribution that proposed
    x: all mass on x (a point mass), or the draft row without the tokens of earlier siblings, normalized. The
    relaxed mass of x is R(x) plus the R of the neighbors that the cutoff keeps (see neighborhood_sum). The child is
    accepted if

        u * Q(x) < omega[d] * relaxed mass   and   relaxed mass > 0

    and verification goes on at this child. Otherwise the child is rejected, and R becomes the residual, normalized:

        optimal   max(R - Q, (1 - omega[d]) R, 0)
        relaxed   max(R' - Q, 0). R' is R after the kept neighbors' mass has been moved onto x (LANTERN,
                  equation 3)
        released  max(R - Q, 0), changed as in LANTERN's released code if at least one neighbor was kept: then all
                  neighbors in the table count, kept or not. If Q is a point mass, R is also set to 0 on
                  them. If Q is a draft row, Q is set to 0 on them, so that R loses nothing there. The cutoff does
                  not look at the last column of the table; it is there for this rule alone

    The next sibling is tried against this R. If R is empty (EMPTY_RESIDUAL), the node's row of target_probs takes
    its place; with empty="uniform" the uniform distribution over the whole vocabulary does, as in LANTERN's released
    code. If no child is accepted, the next token is drawn from R. At a leaf and at max_depth it is drawn from
    the node's row.

    docs/verification.md states this rule as Python that can be run. It also says which options keep the target's
    distribution: for instance omega at most 1 with no neighbors and the optimal residual.

    A greedy request uses no draft row, uniform or omega. Each child is verified by itself: it is accepted if its
    token is the argmax of its parent's row, after the token's entry has been raised to the relaxed mass. The lowest
    id wins a tie. The deepest path on which every node is accepted is taken, down to max_depth; of equally deep ones,
    the path whose end has the lowest node number. The argmax of the row at its end is the next token.

    A child with a draft row must have been *sampled* from it: a child that was chosen, such as the likeliest, would
    bias the output. Any child may be a point mass, but then fewer of the sampled children are accepted.

    Sibling order is part of a relaxed method: leaf order in place of draft order took LANTERN's accepted length from
    2.8 to 0.6 in one comparison.

    A neighbor that is listed twice counts twice, and its mass is moved once; the first neighbor that would make the
    relaxed mass larger than the whole of R ends the list. (Distinct ids cannot.)

    Probabilities are in fixed point, floor(p * 2**42), and each side of a comparison is one product in float64. So
    all backends decide alike. A row whose sum is not 1 is renormalized: only the ratios of its entries count. A
    child whose token has no mass in its draft row, without the earlier siblings, is skipped, and reported unless that
    row has no mass left at all. A node whose draft row is invalid counts as a leaf.

    (LANTERN, arXiv:2410.03355; COOL-SD, arXiv:2601.09212, here with the optimal residual at every depth; EAGLE,
    arXiv:2401.15077.)

    Args:
        target_probs:  (B, N, V) float32       the target's distribution after each node; node 0 is the root.
                                               Probabilities, from guided_probs for instance; verify_logits takes
                                               logits
        tokens:        (B, N) int32 or int64   the token at each node, in [0, V); the root's is not read
        first_child:   (B, N) or (1, N) int32 or int64   each node's first child, a later node; negative: no
                                                         child. tree_links gives this and the next
        next_sibling:  (B, N) or (1, N) int32 or int64   the child of the same parent tried next, a later node;
                                                         negative: none
        uniforms:      (B, N)    float32       in [0, 1): column n > 0 decides node n, column 0 the next token
        max_depth:     P, the most nodes that can be accepted; None: N - 1
        draft_probs:   (B, M, V) float32       rows from which children were drawn without replacement
        draft_row:     (B, N) or (1, N) int32 or int64   the row that node n's children were drawn from; if negative,
                                                         each child is a point mass
        neighbors:     (C, k) uint16, int32 or int64  each code's neighbors, nearest first: distinct, itself excluded
        delta:         (B,) float32 or a number >= 0   how much the cutoff allows
        cutoff:        the rule by which delta limits the neighbors: "tvd", "ratio" or "jsd"
        offset:        the token id of code 0; a token outside [offset, offset + C) has no neighbors
        omega:         (B, P) float32 or a number >= 0   the factor on the accept test at depths 1..P; None is 1
        residual:      "optimal", "relaxed" or "released"
        empty:         "target" or "uniform": what takes the place of an empty R
        greedy:        (B,) bool or one bool   which requests are greedy; None: no request
        backend:       None for the device's own kernel; a name from `backends()` to force one

    Returns:
        accepted_nodes:  (B, P) int32    the accepted nodes from the root down, without the root; -1 pads
        num_accepted:    (B,)   int32    how many there are
        next_token:      (B,)   int64    the token that follows them, in [0, V)
        tv_excess:       (B,)   float32  the added total variation, estimated; 0 for lossless rules. It is a sum
                                         over the children that were tried: how much the accept probability
                                         exceeds the one with omega 1 and no neighbors (0 if it does not), times the
                                         probability that all earlier siblings are rejected. For a greedy request:
                                         how many accepted tokens are not the argmax of their parent's row
        status:          (B,)   int32    EMPTY_RESIDUAL: R was empty after a rejection.
                                         INVALID_ROW: the target's row at the end of the path has an entry that is
                                         NaN, negative or above 2, or is 0 in fixed point; next_token is 0.
                                         INVALID_DRAFT: the same errors, in the draft row of a node with children; the
                                         node counts as a leaf. Or a child has probability 0 there, so it was
                                         not drawn from this row, or is there twice; it is rejected, and R stays.
                                         INVALID_TREE: a link that leads to no later node, or a token outside [0, V);
                                         the siblings end there. Or a draft row >= M; the node counts as a leaf.
                                         INVALID_RULE: an omega is negative or NaN, or is below 1 with neighbors and
                                         the optimal residual; nothing is accepted, and next_token is drawn at
                                         the root

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above, N or V or M is 0, draft_probs
            comes without draft_row or neighbors without delta, or "released" with a single column

    Examples:
        >>> row = [0.5, 0.25, 0.125, 0.125]
        >>> target_probs = torch.tensor([[row, row, row]])  # a root and its two children, tokens 0 and 1
        >>> links = tree_links(torch.tensor([[-1, 0, 0]]))
        >>> result = verify_tree(target_probs, torch.tensor([[3, 0, 1]]), links.first_child, links.next_sibling,
        ...                      torch.tensor([[0.9, 0.5, 0.4]]), max_depth=1)
        >>> result.accepted_nodes  # token 0 has 1/2 and is rejected at u = 0.5; token 1 has 1/4 of the 1/2 left
        tensor([[2]], dtype=torch.int32)
        >>> result.next_token      # after node 2, from its row at u = 0.9
        tensor([3])
    """
    B, N, V = check_dims("target_probs", target_probs, "BNV", torch.float32, not_empty="NV")
    *tree, max_depth = check_tree(tokens, first_child, next_sibling, max_depth, target_probs)
    check("uniforms", uniforms, torch.float32, like=target_probs, B=B, N=N)
    draft_row, delta, omega, offset = check_rule(draft_probs, draft_row, neighbors, delta, cutoff, offset, omega,
                                                 residual, empty, max_depth, target_probs)
    if greedy is not None:
        greedy = setting("greedy", greedy, torch.bool, target_probs, B=B)
    return _call(backend, target_probs, *tree, uniforms, draft_probs, draft_row, neighbors, delta, omega, greedy,
                 cutoff, offset, residual, empty, max_depth)


def check_rule(draft_probs: Tensor | None, draft_row: Tensor | None, neighbors: Tensor | None,
               delta: Tensor | float | None, cutoff: str, offset: int, omega: Tensor | float | None, residual: str,
               empty: str, max_depth: int,
               like: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
    """Raise ValueError unless these arguments of `verify_tree` fit together, and fit rows `like` (B, N, V).

    Returns draft_row (B, N), delta (B,) and omega (B, P) as tensors, or None, and the offset.
    """
    B, N, V = like.shape
    check_together(draft_probs=draft_probs, draft_row=draft_row)
    if draft_probs is not None:
        M = check_dims("draft_probs", draft_probs, "BMV", not_empty="M")[1]
        check("draft_probs", draft_probs, torch.float32, like=like, B=B, M=M, V=V)
        draft_row = integers("draft_row", draft_row, torch.int32, like, may_be_one=True, B=B, N=N)
    check_one_of("empty", empty, EMPTY)
    offset = check_relaxation(neighbors, delta, cutoff, offset, residual, like)
    return (draft_row,
            None if delta is None else setting("delta", delta, torch.float32, like, at_least=0, B=B),
            None if omega is None else setting("omega", omega, torch.float32, like, at_least=0, B=B, P=max_depth),
            offset)


def _oracle(target_probs: Tensor, tokens: Tensor, first_child: Tensor, next_sibling: Tensor, uniforms: Tensor,
            draft_probs: Tensor | None, draft_row: Tensor | None, neighbors: Tensor | None, delta: Tensor | None,
            omega: Tensor | None, greedy: Tensor | None, cutoff: str, offset: int, residual: str, empty: str,
            max_depth: int):
    return verify_rows(target_probs, (tokens, first_child, next_sibling, uniforms), draft_probs, draft_row,
                       Rule(neighbors, delta, omega, cutoff, offset, residual, empty, max_depth), greedy)


class Rule(NamedTuple):
    """How drafts are accepted: arguments of `verify_tree`."""
    neighbors: Tensor | None
    delta: Tensor | None
    omega: Tensor | None
    cutoff: str
    offset: int
    residual: str
    empty: str
    max_depth: int


def verify_rows(target_probs, tree, draft_probs, draft_row, rule, greedy, id_range=None):
    """With id_range (B, N, 2) a token outside its parent's range keeps no neighbors: see verify_logits."""
    batch = torch.arange(len(target_probs), device=target_probs.device)
    return verify_nodes(lambda node: target_probs[batch, node], target_probs.shape[2], tree,
                        lambda row: draft_probs[batch, row], 0 if draft_probs is None else draft_probs.shape[1],
                        draft_row, rule, greedy, id_range)


def verify_nodes(target_row, V, tree, draft_row_at, num_draft_rows, draft_row, rule, greedy, id_range=None):
    """Verify with rows from anywhere: target_row(node) and draft_row_at(row) map (B,) int64 to (B, V).

    tree: tokens, first_child, next_sibling and uniforms of `verify_tree`
    """
    result = _verify_sampled(target_row, V, tree, draft_row_at, num_draft_rows, draft_row, rule, id_range)
    if greedy is not None:
        greedy_result = _verify_greedy(target_row, V, tree, rule, id_range)
        result = [torch.where(_to_dims_of(a, greedy), b, a) for a, b in zip(result, greedy_result)]
    accepted_nodes, num_accepted, next_token, tv_excess, status = result
    return accepted_nodes.int(), num_accepted.int(), next_token, tv_excess.float(), status.int()


def _to_dims_of(tensor, flags):
    """flags (B,), shaped to choose among requests of `tensor` (B, ..)."""
    return flags.view(-1, *[1] * (tensor.ndim - 1))


def _is_inside(token, id_range):
    return (token >= id_range[..., 0]) & (token < id_range[..., 1])


class _Node(NamedTuple):
    """The state of each request: its node, the rest of the target there, and the child that is tried next."""
    mass: Tensor         # (B, V) int64    R in fixed point
    total: Tensor        # (B,)   int64    its sum
    is_valid: Tensor     # (B,)   bool     of the node's row of target_probs
    child: Tensor        # (B,)   int64    the child to try, or -1
    previous: Tensor     # (B,)   int64    the sibling before it, else the node: links must lead further
    active: Tensor       # (B,)   bool     whether children may still be tried
    draft_mass: Tensor   # (B, V) int64    the draft row without the earlier siblings
    draft_total: Tensor  # (B,)   int64    its sum
    is_sampled: Tensor   # (B,)   bool     whether children come from the draft row; else they are point masses
    reach_prob: Tensor   # (B,)   float64  the probability that all earlier siblings are rejected
    status: Tensor       # (B,)   int64    the bits that were found on entering


def _verify_sampled(target_row, V, tree, draft_row_at, num_draft_rows, draft_row, rule, id_range):
    """Requests that sample. Links lead to later nodes only, so N steps of one child each reach every request's end."""
    tokens, first_child, next_sibling, uniforms = tree
    neighbors, delta, omega, cutoff, offset, residual, empty, max_depth = rule
    B, N = tokens.shape
    device = tokens.device
    batch = torch.arange(B, device=device)
    accepted_nodes = torch.full((B, max_depth), -1, device=device)
    node, num_accepted, status = (torch.zeros(B, dtype=torch.int64, device=device) for _ in range(3))
    tv_excess = torch.zeros(B, dtype=torch.float64, device=device)
    if omega is None or max_depth == 0:
        omega = torch.ones(B, max(max_depth, 1), dtype=torch.float32, device=device)
    omega = omega.double()
    has_no_rule = is_undefined(omega, neighbors is not None, residual).any(1)
    status = status | torch.where(has_no_rule, INVALID_RULE, 0)

    def enter(node, num_accepted):
        """The state of requests on entering `node`, before its first child."""
        mass, total, is_valid = to_fixed_point(target_row(node))
        status = torch.where(is_valid, 0, INVALID_ROW)
        child = first_child[batch, node].long()
        active = is_valid & ~has_no_rule & (num_accepted < max_depth) & (child >= 0)
        draft_mass, is_sampled = torch.zeros_like(mass), torch.zeros_like(is_valid)
        if num_draft_rows > 0:
            row, M = draft_row[batch, node].long(), num_draft_rows
            is_sampled = row >= 0
            status = status | torch.where(active & (row >= M), INVALID_TREE, 0)
            draft_mass, _, draft_is_valid = to_fixed_point(draft_row_at(row.clamp(0, M - 1)))
            status = status | torch.where(active & is_sampled & (row < M) & ~draft_is_valid, INVALID_DRAFT, 0)
            active = active & (~is_sampled | (draft_is_valid & (row < M)))
        return _Node(mass, total, is_valid, child, node, active, draft_mass, draft_mass.sum(1), is_sampled,
                     torch.ones_like(tv_excess), status)

    at = enter(node, num_accepted)
    for _ in range(N):
        # Which child: a later node than the one before it, with a token in the vocabulary.
        status = status | at.status
        active = at.active & (at.child >= 0)
        child = at.child.clamp(0, N - 1)
        token = tokens[batch, child]
        is_valid = (at.child > at.previous) & (at.child < N) & (token >= 0) & (token < V)
        status = status | torch.where(active & ~is_valid, INVALID_TREE, 0)
        active = active & is_valid
        token = token.clamp(0, V - 1)
        is_tried = active & ~(at.is_sampled & (at.draft_mass[batch, token] == 0))
        status = status | torch.where(active & ~is_tried & (at.draft_total > 0), INVALID_DRAFT, 0)

        neighbor_mass, num_kept, ids = kept_neighbors(
            at.mass, at.total, token, neighbors, delta, cutoff, offset, residual,
            None if id_range is None else _is_inside(token, id_range[batch, node]))
        token_mass = at.mass[batch, token]
        candidate = Candidate(
            token, at.is_sampled, token_mass, token_mass + neighbor_mass, at.total, at.draft_mass[batch, token],
            at.draft_total, omega[batch, num_accepted.clamp(max=omega.shape[1] - 1)])
        is_accepted = is_tried & candidate.accepts(uniforms[batch, child])
        accept_prob = candidate.accept_prob()
        added = at.reach_prob * (accept_prob - candidate.accept_prob(strict=True)).clamp(min=0)
        tv_excess = torch.where(is_tried, tv_excess + added, tv_excess)
        reach_prob = torch.where(is_tried, at.reach_prob * (1 - accept_prob), at.reach_prob)

        # Rejected: the residual takes R's place. If it is empty, `empty` says what does.
        is_rejected = is_tried & ~is_accepted
        mass = residual_mass(residual, at.mass, at.draft_mass, candidate, num_kept, ids)
        is_empty = is_rejected & (mass.sum(1) == 0)
        status = status | torch.where(is_empty, EMPTY_RESIDUAL, 0)
        refill = uniform_mass(V) if empty == "uniform" else to_fixed_point(target_row(node))[0]
        mass = torch.where(is_empty.unsqueeze(1), refill, mass)
        mass = torch.where(is_rejected.unsqueeze(1), mass, at.mass)
        is_token = torch.arange(V, device=device) == token.unsqueeze(1)
        draft_mass = torch.where(is_rejected.unsqueeze(1) & is_token, 0, at.draft_mass)
        stay = at._replace(
            mass=mass, total=torch.where(is_rejected, mass.sum(1), at.total), active=active,
            child=torch.where(active, next_sibling[batch, child].long(), at.child),
            previous=torch.where(active, at.child, at.previous),
            draft_mass=draft_mass, draft_total=draft_mass.sum(1), reach_prob=reach_prob,
            status=torch.zeros_like(status))

        # Accepted: verification goes on at the child.
        node = torch.where(is_accepted, at.child, node)
        if max_depth > 0:
            column = num_accepted.clamp(max=max_depth - 1)
            accepted_nodes[batch, column] = torch.where(is_accepted, at.child, accepted_nodes[batch, column])
        num_accepted = num_accepted + is_accepted
        at = _Node(*[torch.where(_to_dims_of(a, is_accepted), a, b) for a, b in zip(enter(node, num_accepted), stay)])
    next_token = torch.where(at.is_valid, draw(at.mass, at.total, uniforms[:, 0]), 0)
    return accepted_nodes, num_accepted, next_token, tv_excess, status | at.status


def _verify_greedy(target_row, V, tree, rule, id_range):
    """Greedy requests: the nodes in order, each with its chain of children."""
    (tokens, first_child, next_sibling, _), max_depth = tree, rule.max_depth
    B, N = tokens.shape
    device = tokens.device
    status = torch.zeros(B, dtype=torch.int64, device=device)
    depth = torch.full((B, N), -1, device=device)  # of the nodes on an accepted path, else -1
    depth[:, 0] = 0
    parent, num_non_argmax = torch.zeros_like(depth), torch.zeros_like(depth)
    in_vocabulary = (tokens >= 0) & (tokens < V)
    tokens = tokens.clamp(0, V - 1)

    for n in range(N):
        mass, total, row_is_valid = to_fixed_point(target_row(torch.full_like(status, n)))
        max_mass, argmax = mass.max(1, keepdim=True)
        relaxed_mass = mass.gather(1, tokens)  # (B, N): of every token, as if it were node n's child
        if rule.neighbors is not None:
            num_considered = rule.neighbors.shape[1] - (rule.residual == "released")
            neighbor_mass = neighbor_prefix(
                mass.unsqueeze(1).expand(B, N, V), total.unsqueeze(1), tokens, rule.neighbors,
                rule.delta.unsqueeze(1), rule.cutoff, rule.offset, num_considered, limit=total.unsqueeze(1))[0]
            if id_range is not None:
                neighbor_mass = torch.where(_is_inside(tokens, id_range[:, n:n + 1]), neighbor_mass, 0)
            relaxed_mass = relaxed_mass + neighbor_mass
        is_best = ((tokens == argmax) | (relaxed_mass > max_mass) | ((relaxed_mass == max_mass) & (tokens < argmax)))

        active = row_is_valid & (depth[:, n] >= 0) & (depth[:, n] < max_depth)
        child, previous = first_child[:, n].long(), torch.full_like(status, n)
        for _ in range(N - n):
            active = active & (child >= 0)
            index = child.clamp(0, N - 1).unsqueeze(1)
            is_valid = (child > previous) & (child < N) & in_vocabulary.gather(1, index).squeeze(1)
            status = status | torch.where(active & ~is_valid, INVALID_TREE, 0)
            active = active & is_valid
            is_accepted = active.unsqueeze(1) & is_best.gather(1, index)
            count = num_non_argmax[:, n:n + 1] + (tokens.gather(1, index) != argmax)
            depth = depth.scatter(1, index, torch.where(is_accepted, depth[:, n:n + 1] + 1, depth.gather(1, index)))
            parent = parent.scatter(1, index, torch.where(is_accepted, n, parent.gather(1, index)))
            num_non_argmax = num_non_argmax.scatter(
                1, index, torch.where(is_accepted, count, num_non_argmax.gather(1, index)))
            previous, child = child, next_sibling.gather(1, index).squeeze(1).long()

    num_accepted, node = depth.max(1)  # the first of equally deep ones
    tv_excess = num_non_argmax.gather(1, node.unsqueeze(1)).squeeze(1)
    mass, _, is_valid = to_fixed_point(target_row(node))
    status = status | torch.where(is_valid, 0, INVALID_ROW)
    next_token = torch.where(is_valid, mass.argmax(1), 0)
    accepted_nodes = torch.full((B, max_depth + 1), -1, device=device)
    for d in range(min(max_depth, N - 1), 0, -1):
        is_on_path = num_accepted >= d
        accepted_nodes[:, d] = torch.where(is_on_path, node, -1)
        node = torch.where(is_on_path, parent.gather(1, node.unsqueeze(1)).squeeze(1), node)
    return accepted_nodes[:, 1:], num_accepted, next_token, tv_excess.double(), status


def _meta(target_probs, tokens, max_depth):
    B = target_probs.shape[0]
    return (tokens.new_empty(B, max_depth, dtype=torch.int32), tokens.new_empty(B, dtype=torch.int32),
            tokens.new_empty(B), target_probs.new_empty(B), tokens.new_empty(B, dtype=torch.int32))


_call = define("verify_tree", oracle=_oracle, meta=_meta, result=VerifyResult)
