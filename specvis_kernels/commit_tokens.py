"""commit_tokens: the accepted drafts and the next token enter the images, and the step is accounted for, in place."""
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._checks import check, check_dims, integers
from ._define import define
from .status import INVALID_ROW


class CommitTokensResult(NamedTuple):
    new_tokens: Tensor  # (B, P + 1) int64
    nodes: Tensor       # (B, P + 1) int64
    num_new: Tensor     # (B,)       int64


def commit_tokens(tokens: Tensor, counts: Tensor, failed: Tensor, target_forwards: Tensor, num_accepted_at: Tensor,
                  num_drafted_at: Tensor, tv_excess: Tensor, node_tokens: Tensor, accepted_nodes: Tensor,
                  num_accepted: Tensor, next_token: Tensor, step_excess: Tensor | None, status: Tensor, depth: Tensor,
                  *, backend: str | None = None) -> CommitTokensResult:
    """Put the tokens of a step into the images, and account for the step. This writes to its first seven arguments.

    The new tokens of a request are the tokens of its accepted nodes, and then next_token: a + 1 tokens, where a is its
    num_accepted. An image is finished once it has L tokens; then nothing of it is written. Else, with count tokens,

        tokens[count + i]        becomes new token i, for i = 0, 1, .., a, if count + i < L
        num_accepted_at[count]   becomes a
        num_drafted_at[count]    becomes min(depth, L - 1 - count), the levels of drafts for which there was room
        target_forwards          grows by 1
        tv_excess                grows by step_excess
        counts                   becomes min(count + a + 1, L)

    and if the status has INVALID_ROW, so that next_token is no draw, failed becomes True and counts becomes L.

    num_accepted is clamped to 0..P. A node that is not in the tree counts as the root.

    Args:
        tokens:           written to: (B, C) int64     the images' tokens; C is at least L
        counts:           written to: (B,)   int64     how many tokens each image has
        failed:           written to: (B,)   bool      whether a row of the target was invalid
        target_forwards:  written to: (B,)   int64     how many forwards the images took
        num_accepted_at:  written to: (B, L) int64     how many drafts the step that began with each token accepted
        num_drafted_at:   written to: (B, L) int64     and how many levels it drafted
        tv_excess:        written to: (B,)   float32   the sum over the steps
        node_tokens:      (B, N) int32 or int64   the tokens of the draft tree's nodes
        accepted_nodes:   (B, P) int32 or int64   of each request, from the root down, without the root; as verify_tree
                                                  gives this and the next three
        num_accepted:     (B,)   int32 or int64   how many there are; later entries are not read
        next_token:       (B,)   int32 or int64   the token after the accepted path
        step_excess:      (B,)   float32          the step's tv_excess; None: 0
        status:           (B,)   int32            bits; INVALID_ROW alone counts
        depth:            (B,) or (1,) int32 or int64   how many levels each request's tree has
        backend:          None for the device's own kernel; a name from `backends()` to force one

    Returns:
        new_tokens:       (B, P + 1) int64   the new tokens, then 0; of finished images too
        nodes:            (B, P + 1) int64   the node before each new token: 0, the root, then the accepted nodes,
                                             then 0
        num_new:          (B,)       int64   a + 1

    Raises:
        ValueError: a dtype, shape or device differs from the above, C < L, N or L is 0, or what is written to is not
                    contiguous

    Examples:
        >>> tokens, counts = torch.tensor([[7, 0, 0, 0, 0]]), torch.tensor([1])      # one token of five
        >>> zero, accounts = torch.tensor([0]), torch.zeros(2, 1, 5, dtype=torch.int64)
        >>> step = commit_tokens(tokens, counts, torch.tensor([False]), zero.clone(), *accounts, torch.zeros(1),
        ...                      node_tokens=torch.tensor([[7, 3, 8, 4]]), next_token=torch.tensor([9]),
        ...                      accepted_nodes=torch.tensor([[2, 3]]), num_accepted=torch.tensor([2]),
        ...                      step_excess=None, status=zero.int(), depth=torch.tensor([2]))
        >>> step.new_tokens, step.nodes, step.num_new
        (tensor([[8, 4, 9]]), tensor([[0, 2, 3]]), tensor([3]))
        >>> tokens, counts
        (tensor([[7, 8, 4, 9, 0]]), tensor([4]))
    """
    B, C = check_dims("tokens", tokens, "BC")
    L = check_dims("num_accepted_at", num_accepted_at, "BL")[1]
    written = (("tokens", tokens, torch.int64, {"B": B, "C": C}), ("counts", counts, torch.int64, {"B": B}),
               ("failed", failed, torch.bool, {"B": B}), ("target_forwards", target_forwards, torch.int64, {"B": B}),
               ("num_accepted_at", num_accepted_at, torch.int64, {"B": B, "L": L}),
               ("num_drafted_at", num_drafted_at, torch.int64, {"B": B, "L": L}),
               ("tv_excess", tv_excess, torch.float32, {"B": B}))
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
    if step_excess is not None:
        check("step_excess", step_excess, torch.float32, like=tokens, B=B)
    check("status", status, torch.int32, like=tokens, B=B)
    depth = integers("depth", depth, torch.int64, tokens, may_be_one=True, B=B)
    if L < 1 or C < L:
        raise ValueError(f"tokens must have at least the L={L} columns of num_accepted_at, and L >= 1, got C={C}")
    return _call(backend, tokens, counts, failed, target_forwards, num_accepted_at, num_drafted_at, tv_excess,
                 node_tokens, accepted_nodes, num_accepted, next_token, step_excess, status, depth)


def _oracle(tokens: Tensor, counts: Tensor, failed: Tensor, target_forwards: Tensor, num_accepted_at: Tensor,
            num_drafted_at: Tensor, tv_excess: Tensor, node_tokens: Tensor, accepted_nodes: Tensor,
            num_accepted: Tensor, next_token: Tensor, step_excess: Tensor | None, status: Tensor, depth: Tensor):
    (C, L), N, P = (tokens.shape[1], num_accepted_at.shape[1]), node_tokens.shape[1], accepted_nodes.shape[1]
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
    is_here = is_active[:, None] & (i[:, :L] == 0)
    num_accepted_at.copy_(torch.where(is_here, last[:, None], num_accepted_at))
    num_drafted_at.copy_(torch.where(is_here, depth.minimum(L - 1 - counts)[:, None], num_drafted_at))
    target_forwards.add_(is_active)
    if step_excess is not None:
        tv_excess.copy_(torch.where(is_active, tv_excess + step_excess, tv_excess))
    is_invalid = is_active & ((status & INVALID_ROW) != 0)
    failed.logical_or_(is_invalid)
    counts.copy_(torch.where(is_active, torch.where(is_invalid, L, (counts + last + 1).clamp(max=L)), counts))
    return new_tokens, nodes, last + 1


def _meta(tokens, accepted_nodes):
    B, P = accepted_nodes.shape
    return tokens.new_empty(B, P + 1), tokens.new_empty(B, P + 1), tokens.new_empty(B)


_call = define("commit_tokens", oracle=_oracle, meta=_meta, result=CommitTokensResult, writes=(
    "tokens", "counts", "failed", "target_forwards", "num_accepted_at", "num_drafted_at", "tv_excess"))
