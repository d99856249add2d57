"""The work of the ops in plain PyTorch, as released decoders write it: what a decoder has without the ops.

BASELINES[op][name] takes the op's arguments without `backend` and `cutoff`. Baselines round and draw in their own ways.
Where the results can be compared, tests/test_benchmarks.py checks them against the oracle too.
"""
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from specvis_kernels import (
    INVALID_ROW,
    draw_children,
    draw_tokens,
    expand_tree,
    guided_probs,
    tree_mask,
    verify_greedy,
    verify_tree,
)


def index_and_put(caches, accepted_nodes, num_accepted, lengths, *, row_dim=0, column_dim=1):
    """Every column of a path is read and written to its place; columns after the accepted nodes keep theirs."""
    caches = [caches] if isinstance(caches, Tensor) else caches
    R = caches[0].shape[row_dim]
    each_row = torch.arange(R, device=lengths.device) % len(lengths)
    nodes, length = accepted_nodes[each_row], lengths[each_row, None]
    index = torch.arange(nodes.shape[1], device=lengths.device)
    target = length + 1 + index
    source = torch.where(index < num_accepted[each_row, None], length + nodes, target)
    rows = torch.arange(R, device=lengths.device)[:, None]
    for cache in caches:
        entries = cache.movedim((row_dim, column_dim), (0, 1))
        entries[rows, target] = entries[rows, source]
    return lengths + 1 + num_accepted


def guided_multinomial(logits, uncond, guidance, temperature, top_k, top_p, seeds, positions, **others):
    """One draw a row, as decoders draw from a row of probabilities."""
    probs = guided_probs(logits, uncond, guidance, temperature, top_k, top_p).probs
    return torch.multinomial(probs.flatten(0, 1), 1).view(positions.shape)


def scatter_and_add(tokens, counts, node_tokens, accepted_nodes, num_accepted, next_token, *, failed, target_forwards,
                    num_accepted_at, num_drafted_at, tv_excess, step_excess, status, depth):
    """commit_tokens by torch's own operations. Finished images write into the last columns, which nobody reads."""
    L = num_accepted_at.shape[1]
    nodes, last = pad(accepted_nodes.clamp(min=0), (1, 0)).long(), num_accepted[:, None].long()
    index, is_active = torch.arange(nodes.shape[1], device=tokens.device), counts < L
    new_tokens = pad(node_tokens.gather(1, nodes[:, 1:]), (0, 1)).scatter_(1, last, next_token[:, None])
    new_tokens.masked_fill_(index > last, 0)
    position = counts.clamp(max=L - 1)[:, None]
    tokens.scatter_(1, position + index, new_tokens)
    num_accepted_at.scatter_(1, position, last)
    num_drafted_at.scatter_(1, position, depth[:, None].minimum(L - 1 - position))
    target_forwards += is_active
    tv_excess += step_excess * is_active
    failed |= is_active & (status & INVALID_ROW != 0)
    counts.copy_((counts + last[:, 0] + 1).clamp(max=L).masked_fill_(failed, L))
    return new_tokens, nodes, last[:, 0] + 1


def children_by_ops(logits, uncond, uniforms, guidance, temperature, top_k, top_p, *, seeds=None, positions=None,
                    num_children=None, **ids):
    """draft_children as guided_probs and draw_children, for requests whose temperature is not 0."""
    probs, status = guided_probs(logits, uncond, guidance, temperature, top_k, top_p, **ids)
    tokens = draw_children(probs, uniforms, seeds=seeds, positions=positions, num_children=num_children).tokens
    return tokens, probs, status


def level_by_ops(logits, uncond, scores, ancestors, candidates, width, depth, guidance, temperature, top_k, top_p, *,
                 num_children, level, first_node, first_candidate, **ids):
    """draft_frontier as guided_probs, expand_tree, and tensors that are put together from their results."""
    (B, F, _), K = logits.shape, num_children
    probs = guided_probs(logits, uncond, guidance, temperature, top_k, top_p, **ids).probs
    tokens, child_scores, frontier, status = expand_tree(probs, scores, width, num_children=K)
    origin = candidates[:, :, None].expand(B, F, K).reshape(B, F * K)
    tokens, child_scores = tokens.flatten(1), child_scores.flatten(1)
    unused = (frontier < 0) | (depth <= level)[:, None]
    chosen = frontier.clamp(min=0).long()
    rows = chosen // K
    nodes = first_node + torch.arange(K, device=logits.device)
    words = torch.zeros(K, ancestors.shape[2], dtype=torch.int64, device=logits.device)
    words.scatter_(1, nodes[:, None] // 64, (torch.ones_like(nodes) << nodes % 64)[:, None])
    new_ancestors = ancestors.gather(1, rows[..., None].expand(-1, -1, ancestors.shape[2])) | words
    frontier_scores = child_scores.gather(1, chosen).masked_fill(unused, -torch.inf)
    return (tokens, child_scores, origin, tokens.gather(1, chosen), frontier_scores, rows,
            new_ancestors.masked_fill(unused[..., None], 0), torch.where(unused, -1, frontier + first_candidate),
            status)


def padded_tree(target_probs, draft_tokens, cu_num_draft_tokens, uniforms, *, draft_probs=None, rule, window, entropy,
                **settings):
    """verify_chain by verify_tree, which has the strict rule alone, once every request has as many rows as the longest.
    """
    assert rule == "strict" and window is None and entropy is None
    first = torch.nn.functional.pad(cu_num_draft_tokens[:-1], (1, 0))
    num_drafts = cu_num_draft_tokens - first
    N, device = int(num_drafts.max()) + 1, target_probs.device
    node = torch.arange(N, device=device)
    row = (first + torch.arange(len(first), device=device)).unsqueeze(1) + node
    row = row.clamp(max=len(target_probs) - 1)
    draft = (first.unsqueeze(1) + node).clamp(max=len(draft_tokens) - 1)
    tokens = torch.nn.functional.pad(draft_tokens[draft[:, :-1]], (1, 0))
    first_child = torch.where(node < num_drafts.unsqueeze(1), node + 1, -1).int()
    if draft_probs is not None:
        settings |= {"draft_probs": draft_probs[draft], "draft_row": node.int().expand(len(first), N)}
    return verify_tree(target_probs[row], tokens, first_child, torch.full_like(first_child, -1), uniforms[row],
                       max_depth=N - 1, **settings)


def all_rows_first(logits, uncond, tokens, first_child, next_sibling, uniforms, guidance, temperature, top_k, top_p, *,
                   max_depth, filters="k_then_p", seeds=None, positions=None, **rule):
    """The ops that verify_logits replaces, one after another."""
    settings, tree = (guidance, temperature, top_k, top_p), (tokens, first_child, next_sibling)
    if seeds is not None:
        drawn = draw_tokens(logits, uncond, *settings, seeds, positions, filters=filters)
        return verify_greedy(drawn.tokens, *tree, max_depth=max_depth)
    probs = guided_probs(logits, uncond, *settings, filters=filters).probs
    return verify_tree(probs, *tree, uniforms, max_depth=max_depth, **rule)


def attention_under_a_mask(q, k_cache, v_cache, lengths, ancestors, *, key_mask=None):
    """PyTorch's attention of all columns up to the last node, under an additive mask, which it is given each time."""
    columns = int(lengths.max()) + q.shape[1]
    mask = tree_mask(ancestors, lengths.int(), columns=columns).repeat(len(q) // len(lengths), 1, 1)
    if key_mask is not None:
        mask[:, :, :key_mask.shape[1]] &= key_mask[:, None]
    additive = torch.where(mask, 0.0, -torch.inf).to(q.dtype)[:, None]
    k, v = (cache[:, :columns].transpose(1, 2) for cache in (k_cache, v_cache))
    attended = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=additive,
                                                                enable_gqa=q.shape[2] != k_cache.shape[2])
    return attended.transpose(1, 2)


def liger_norm(x, weight, eps=1e-5, residual=None):
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward
    from liger_kernel.ops.rms_norm import rms_norm_forward

    if residual is None:
        return rms_norm_forward(x, weight, eps, 0.0, "llama", None)[0]
    return fused_add_rms_norm_forward(x, residual, weight, eps, 0.0, "llama")[:2]


def flashinfer_norm(x, weight, eps=1e-5, residual=None):
    """With a residual it writes to both."""
    from flashinfer.norm import fused_add_rmsnorm, rmsnorm

    return rmsnorm(x, weight, eps) if residual is None else fused_add_rmsnorm(x, residual, weight, eps)


def liger_swiglu(gate, up):
    from liger_kernel.ops.swiglu import swiglu_forward

    return swiglu_forward(gate, up)[2]


def flashinfer_swiglu(gate, up):
    """It reads both from one tensor, which is made at the first call."""
    from flashinfer.activation import silu_and_mul

    if gate not in JOINED:
        JOINED[gate] = torch.cat([gate, up], -1)
    return silu_and_mul(JOINED[gate])


JOINED = WeakTensorKeyDictionary()
LIGER, FLASHINFER = (torch.cuda.is_available() and find_spec(name) is not None
                     for name in ("liger_kernel", "flashinfer"))
BASELINES = {
    "commit_kv": {"index and put": index_and_put},
    "commit_tokens": {"scatter": scatter_and_add},
    "draft_children": {"two ops": children_by_ops},
    "draft_frontier": {"two ops": level_by_ops},
    "draw_tokens": {"multinomial": guided_multinomial},
    "rms_norm": {**({"Liger's": liger_norm} if LIGER else {}),
                 **({"flashinfer's": flashinfer_norm} if FLASHINFER else {})},
    "swiglu": {**({"Liger's": liger_swiglu} if LIGER else {}),
               **({"flashinfer's": flashinfer_swiglu} if FLASHINFER else {})},
    "tree_attention": {"attention": attention_under_a_mask},
    "verify_chain": {"padded": padded_tree},
    "verify_logits": {"two ops": all_rows_first},
}
