"""commit_tokens: the accepted drafts and the next token enter the images, in place, and the step is accounted for."""
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._checks import check, check_dims, check_together, integers
from ._define import checked_once, checks, define
from .status import INVALID_ROW, check_requests


class CommitTokensResult(NamedTuple):
    new_tokens: Tensor  # (B, P + 1) int64
    nodes: Tensor       # (B, P + 1) int64
    num_new: Tensor     # (B,)       int64


@checked_once
def commit_tokens(tokens: Tensor, counts: Tensor, node_tokens: Tensor, accepted_nodes: Tensor, num_accepted: Tensor,
                  next_token: Tensor, *, failed: Tensor | None = None, target_forwards: Tensor | None = None,
                  num_accepted_at: Tensor | None = None, num_drafted_at: Tensor | None = None,
                  tv_excess: Tensor | None = None, step_excess: Tensor | None = None, status: Tensor | None = None,
                  depth: Tensor | None = None, backend: str | None = None) -> CommitTokensResult:
    """Put the tokens of a step into the images. This writes to tokens and counts.

    The new tokens of a request are the tokens of its accepted nodes, and then next_token: a + 1 tokens, where a is its
    num_accepted. An image is finished once it has L tokens; then nothing of it is written. Else, with count tokens,

        tokens[count + i]        becomes new token i, for i = 0, 1, .., a, if count + i < L
        counts                   becomes min(count + a + 1, L)

    L is C, or what num_accepted_at says. That is one of eight accounts, which are given together or not at all:

        num_accepted_at[count]   becomes a
        num_drafted_at[count]    becomes min(depth, L - 1 - count), the levels of drafts for which there was room
        target_forwards          grows by 1
        tv_excess                grows by step_excess

    and if the status has INVALID_ROW, so that next_token is no draw, failed becomes True and counts becomes L.

    num_accepted is clamped to 0..P. A node that is not in the tree counts as the root. With SPECVIS_CHECK=1 in the
    environment either, or an accepted root, is an error (StatusError). The drafts of a chain are its nodes 1 to P,
    after the root: accepted_nodes is 1, 2, .., P in each row.

    Args:
        tokens:           written to: (B, C) int64     the images' tokens; C is at least L
        counts:           written to: (B,)   int64     how many tokens each image has
        node_tokens:      (B, N) int32 or int64   the tokens of the draft tree's nodes
        accepted_nodes:   (B, P) int32 or int64   of each request, from the root down, without the root; as verify_tree
                                                  gives this and the next two
        num_accepted:     (B,)   int32 or int64   how many there are; later entries are not read
        next_token:       (B,)   int32 or int64   the token after the accepted path
        failed:           written to: (B,)   bool      whether a row of the target was invalid
        target_forwards:  written to: (B,)   int64     how many forwards the images took
        num_accepted_at:  written to: (B, L) int64     how many drafts the step that began with each token accepted
        num_drafted_at:   written to: (B, L) int64     and how many levels it drafted
        tv_excess:        written to: (B,)   float32   the sum over the steps
        step_excess:      (B,)   float32          the step's tv_excess
        status:           (B,)   int32            the step's bits; INVALID_ROW alone counts
        depth:            (B,) or (1,) int32 or int64   how many levels each request's tree has
        backend:          None for the device's own kernel; a name from `backends()` to force one

    Returns:
        new_tokens:       (B, P + 1) int64   the new tokens, then 0; of finished images too
        nodes:            (B, P + 1) int64   the node before each new token: 0, the root, then the accepted nodes,
                                             then 0. Its row of logits predicted the token
        num_new:          (B,)       int64   a + 1

    Raises:
        ValueError: a dtype, shape or device differs from the above, C < L, N, C or L is 0, some of the eight accounts
                    are missing, or what is written to is not contiguous

    Examples:
        >>> tokens, counts = torch.tensor([[7, 0, 0, 0, 0]]), torch.tensor([1])      # one token of five
        >>> step = commit_tokens(tokens, counts, node_tokens=torch.tensor([[7, 3, 8, 4]]),
        ...                      accepted_nodes=torch.tensor([[2, 3]]), num_accepted=torch.tensor([2]),
        ...                      next_token=torch.tensor([9]))
        >>> step.new_tokens, step.nodes, step.num_new
        (tensor([[8, 4, 9]]), tensor([[0, 2, 3]]), tensor([3]))
        >>> tokens, counts
        (tensor([[7, 8, 4, 9, 0]]), tensor([4]))
        >>> logits = torch.zeros(1, 4, 10)                       # the forward's; of the new tokens, the first num_new:
        >>> token_log_probs(logits, None, None, 1.0, None, None, step.new_tokens, rows=step.nodes).sampled.exp()
        tensor([[0.1000, 0.1000, 0.1000]])
    """
    B, C = check_dims("tokens", tokens, "BC", not_empty="C")
    check_together(failed=failed, target_forwards=target_forwards, num_accepted_at=num_accepted_at,
                   num_drafted_at=num_drafted_at, tv_excess=tv_excess, step_excess=step_excess, status=status,
                   depth=depth)
    written = (("tokens", tokens, torch.int64, {"B": B, "C": C}), ("counts", counts, torch.int64, {"B": B}))
    if failed is not None:
        L = check_dims("num_accepted_at", num_accepted_at, "BL", not_empty="L")[1]
        if C < L:
            raise ValueError(f"tokens must have at least the L={L} columns of num_accepted_at, got C={C}")
        written += (
            ("failed", failed, torch.bool, {"B": B}), ("target_forwards", target_forwards, torch.int64, {"B": B}),
            ("num_accepted_at", num_accepted_at, torch.int64, {"B": B, "L": L}),
            ("num_drafted_at", num_drafted_at, torch.int64, {"B": B, "L": L}),
            ("tv_excess", tv_excess, torch.float32, {"B": B}))
        check("step_excess", step_excess, torch.float32, like=tokens, B=B)
        check("status", status, torch.int32, like=tokens, B=B)
        depth = integers("depth", depth, torch.int64, tokens, may_be_one=True, B=B)
    for name, tensor, dtype, sizes in written:
        check(name, tensor, dtype, like=tokens, **sizes)
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, since it is written to")
    N = check_dims("node_tokens", node_tokens, "BN", not_empty="N")[1]
    P = check_dims("accepted_nodes", accepted_nodes, "BP")[1]
    node_tokens = integers("node_tokens", node_tokens, torch.int64, tokens, B=B, N=N)
    accepted_nodes = integers("accepted_nodes", accepted_nodes, torch.int32, tokens, B=B, P=P)
    num_accepted = integers("num_accepted", num_accepted, torch.int32, tokens, B=B)
    next_token = integers("next_token", next_token, torch.int64, tokens, B=B)
    step = _call(backend, tokens, counts, node_tokens, accepted_nodes, num_accepted, next_token, failed,
                 target_forwards, num_accepted_at, num_drafted_at, tv_excess, step_excess, status, depth)
    if checks(step.num_new):
        is_root = (step.nodes[:, 1:] == 0) & (torch.arange(P, device=tokens.device) < num_accepted[:, None])
        check_requests("commit_tokens", is_root.any(1) | (step.num_new != num_accepted + 1),
                       f"an accepted node is not within 1..{N - 1}, or num_accepted is not within 0..{P}")
    return step


def _oracle(tokens: Tensor, counts: Tensor, node_tokens: Tensor, accepted_nodes: Tensor, num_accepted: Tensor,
            next_token: Tensor, failed: Tensor | None, target_forwards: Tensor | None, num_accepted_at: Tensor | None,
            num_drafted_at: Tensor | None, tv_excess: Tensor | None, step_excess: Tensor | None,
            status: Tensor | None, depth: Tensor | None):
    C, N, P = tokens.shape[1], node_tokens.shape[1], accepted_nodes.shape[1]
    L = C if num_accepted_at is None else num_accepted_at.shape[1]
    last = num_accepted.long().clamp(0, P)
    index = torch.arange(P + 1, device=tokens.device)
    accepted_nodes = torch.where((accepted_nodes >= 0) & (accepted_nodes < N), accepted_nodes, 0).long()
    nodes = torch.where(index <= last[:, None], pad(accepted_nodes, (1, 0)), 0)
    drafted = node_tokens.gather(1, pad(accepted_nodes, (0, 1)))
    new_tokens = torch.where(index < last[:, None], drafted,
                             torch.where(index == last[:, None], next_token[:, None], 0))

    is_active = (counts >= 0) & (counts < L)
    column = torch.arange(C, device=tokens.device)
    i = column - counts[:, None]  # which new token goes into a column
    is_new = is_active[:, None] & (i >= 0) & (i <= last[:, None]) & (column < L)
    tokens.copy_(torch.where(is_new, new_tokens.gather(1, i.clamp(0, P)), tokens))
    new_counts = (counts + last + 1).clamp(max=L)
    if failed is not None:
        is_here = is_active[:, None] & (i[:, :L] == 0)
        num_accepted_at.copy_(torch.where(is_here, last[:, None], num_accepted_at))
        num_drafted_at.copy_(torch.where(is_here, depth.minimum(L - 1 - counts)[:, None], num_drafted_at))
        target_forwards.add_(is_active)
        tv_excess.copy_(torch.where(is_active, tv_excess + step_excess, tv_excess))
        is_invalid = is_active & ((status & INVALID_ROW) != 0)
        failed.logical_or_(is_invalid)
        new_counts.masked_fill_(is_invalid, L)
    counts.copy_(torch.where(is_active, new_counts, counts))
    return new_tokens, nodes, last + 1


def _meta(tokens, accepted_nodes):
    B, P = accepted_nodes.shape
    return tokens.new_empty(B, P + 1), tokens.new_empty(B, P + 1), tokens.new_empty(B)


_call = define("commit_tokens", oracle=_oracle, meta=_meta, result=CommitTokensResult, writes=(
    "tokens", "counts", "failed", "target_forwards", "num_accepted_at", "num_drafted_at", "tv_excess"))
