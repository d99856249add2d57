"""SGLang's tree ops over ours: build a draft tree, verify it by sampling, verify it greedily.

The functions have the names, arguments and outputs of the functions in sglang/kernels/ops/speculative/sampling.py and
tree.py of SGLang 0.5.23 (before, of the package `sgl_kernel`). docs/use_it.md says which names SGLang calls them by.
They write to the tensors that SGLang allocated and read nothing back to the host. `register` is the entry point by
which SGLang finds them.
"""
import functools
import os

import torch
from torch import Tensor

from .. import guided_probs, tree_links, verify_greedy, verify_tree
from .. import tree_mask as make_tree_mask
from .._checks import check, check_count, check_dims
from ._plugin import check_own, counted, place_of
from ._versions import called_by

FULL_MASK, QLEN_ONLY, QLEN_ONLY_BITPACKING = range(3)  # SGLang's TreeMaskMode
INTEGERS = (torch.int64, torch.int32)
BYTES = (torch.bool, torch.uint8, torch.int8)
LARGEST_UNIFORM = 1 - 2.0 ** -24

EAGLE, TREES = "sglang.srt.speculative.eagle_utils", "sglang.kernels.ops.speculative.spec_tree"


@called_by("sglang")
def tree_speculative_sampling_target_only(
        predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
        retrive_next_token: Tensor, retrive_next_sibling: Tensor, uniform_samples: Tensor,
        uniform_samples_for_final_sampling: Tensor, target_probs: Tensor, draft_probs: Tensor | None = None,
        threshold_single: float = 1.0, threshold_acc: float = 1.0, deterministic: bool = True) -> Tensor:
    """Accept one path of each request's draft tree, and draw the token after it. This writes to the first three.

    For equal random numbers the tokens are the ones of SGLang's kernel, except for rounding. Its coin belongs to
    a parent: child k is accepted if the coin is at most the mass of the children 1..k, c <= p_1 + .. + p_k. For
    `verify_tree`, child k gets the coin's place in the rest of the row after the earlier children,

        u_k = (c - (p_1 + .. + p_(k-1))) / (1 - (p_1 + .. + p_(k-1)))

    which is uniform if they were rejected. So the emitted tokens are distributed as the target's. (EAGLE-2,
    arXiv:2406.16858, as SGLang verifies it: children are point masses.)

    Args:
        predicts:         (>= B N,) int32   written to: at each accepted node's flat index the token that follows it
        accept_index:     (B, P + 1) int32  written to: the flat indices of the root and of the accepted nodes. What
                                            follows them stays as it is (SGLang fills it with -1 before)
        accept_token_num: (B,) int32        written to: how many nodes were accepted, the root not counted
        candidates:       (B, N) int64 or int32      the token at each node; node 0 is the root
        retrive_index:    (B, N) int64 or int32      the flat index of each node, in [0, len(predicts))
        retrive_next_token:    (B, N) int64 or int32   each node's first child, a later node, or -1
        retrive_next_sibling:  (B, N) int64 or int32   the next child of the same parent, a later node, or -1
        uniform_samples:       (B, N) float32          in [0, 1): column n is the coin for the children of node n
        uniform_samples_for_final_sampling: (B,) float32   in [0, 1), for the token after the path
        target_probs:     (B, N, V) float32          the target's distribution after each node
        draft_probs:      not read: working memory of SGLang's kernel
        threshold_single: must be 1
        threshold_acc:    must be 1
        deterministic:    not read: the result always is

    Returns:
        status:           (B,) int32   as `verify_tree` gives it; SGLang's kernel returns nothing

    Raises:
        ValueError: a dtype, shape or device differs from the above, or a threshold is not 1

    Example:
        >>> import torch
        >>> from specvis_kernels.compat.sglang import tree_speculative_sampling_target_only
        >>> row = [0.5, 0.25, 0.125, 0.125]
        >>> predicts, accept_index, accept_token_num = (torch.full(size, -1, dtype=torch.int32)
        ...                                             for size in ((3,), (1, 2), (1,)))
        >>> status = tree_speculative_sampling_target_only(
        ...     predicts, accept_index, accept_token_num, candidates=torch.tensor([[3, 0, 1]]),
        ...     retrive_index=torch.tensor([[0, 1, 2]]), retrive_next_token=torch.tensor([[1, -1, -1]]),
        ...     retrive_next_sibling=torch.tensor([[-1, 2, -1]]), uniform_samples=torch.tensor([[0.7, 0.0, 0.0]]),
        ...     uniform_samples_for_final_sampling=torch.tensor([0.9]), target_probs=torch.tensor([[row, row, row]]))
        >>> accept_index     # the coin 0.7 is above the 1/2 of token 0, and below the 3/4 of tokens 0 and 1
        tensor([[0, 2]], dtype=torch.int32)
        >>> predicts         # token 1 follows the root, and token 3 follows node 2
        tensor([ 1, -1,  3], dtype=torch.int32)
    """
    for name, threshold in (("threshold_single", threshold_single), ("threshold_acc", threshold_acc)):
        if threshold != 1:
            raise ValueError(f"{name} must be 1, got {threshold}: below 1 SGLang accepts tokens that are merely "
                             "probable enough (typical acceptance), and the tokens are not the target's any more")
    B, N, V = check_dims("target_probs", target_probs, "BNV")
    check("target_probs", target_probs, torch.float32, B=B, N=N, V=V)
    max_depth, links, flat = _check_tree(predicts, accept_index, accept_token_num, candidates, retrive_index,
                                         retrive_next_token, retrive_next_sibling, target_probs)
    check("uniform_samples", uniform_samples, torch.float32, like=target_probs, B=B, N=N)
    check("uniform_samples_for_final_sampling", uniform_samples_for_final_sampling, torch.float32, like=target_probs,
          B=B)
    candidates = candidates.long()
    uniforms = _uniforms_of_children(candidates, *links, uniform_samples, target_probs)
    uniforms[:, 0] = uniform_samples_for_final_sampling
    result = verify_tree(target_probs, candidates, *links, uniforms, max_depth=max_depth)
    _write(predicts, accept_index, accept_token_num, candidates, flat, *result[:3])
    return result.status


@called_by("sglang")
def verify_tree_greedy(predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor,
                       retrive_index: Tensor, retrive_next_token: Tensor, retrive_next_sibling: Tensor,
                       target_predict: Tensor) -> Tensor:
    """Accept the path of each request's draft tree whose tokens are the target's own. This writes to the first three.

    At each node verification goes on at the first child whose token is the target's. If `target_predict` holds argmaxes
    this is greedy decoding. If it holds the draws of `draw_tokens`, sampling with these seeds.

    Args:
        predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling:
            as in `tree_speculative_sampling_target_only`
        target_predict:   (B, N) int64 or int32   the target's token after each node; the entry of node n is at its
                                                  flat index

    Returns:
        status:           (B,) int32   as `verify_greedy` gives it; SGLang's kernel returns nothing

    Raises:
        ValueError: a dtype, shape or device differs from the above

    Example:
        >>> import torch
        >>> from specvis_kernels.compat.sglang import verify_tree_greedy
        >>> predicts, accept_index, accept_token_num = (torch.full(size, -1, dtype=torch.int32)
        ...                                             for size in ((3,), (1, 2), (1,)))
        >>> status = verify_tree_greedy(
        ...     predicts, accept_index, accept_token_num, candidates=torch.tensor([[9, 4, 5]]),
        ...     retrive_index=torch.tensor([[0, 1, 2]]), retrive_next_token=torch.tensor([[1, -1, -1]]),
        ...     retrive_next_sibling=torch.tensor([[-1, 2, -1]]), target_predict=torch.tensor([[5, 0, 7]]))
        >>> predicts, accept_index, accept_token_num
        (tensor([ 5, -1,  7], dtype=torch.int32), tensor([[0, 2]], dtype=torch.int32), tensor([1], dtype=torch.int32))
    """
    B, N = check_dims("target_predict", target_predict, "BN")
    check("target_predict", target_predict, INTEGERS, B=B, N=N)
    max_depth, links, flat = _check_tree(predicts, accept_index, accept_token_num, candidates, retrive_index,
                                         retrive_next_token, retrive_next_sibling, target_predict)
    candidates = candidates.long()
    target_tokens = target_predict.long().view(-1)[flat]
    result = verify_greedy(target_tokens, candidates, *links, max_depth=max_depth)
    _write(predicts, accept_index, accept_token_num, candidates, flat, *result[:3])
    return result.status


@called_by("sglang")
def build_tree_kernel_efficient(
        parent_list: Tensor, selected_index: Tensor, verified_seq_len: Tensor, tree_mask: Tensor, positions: Tensor,
        retrive_index: Tensor, retrive_next_token: Tensor, retrive_next_sibling: Tensor, topk: int, depth: int,
        draft_token_num: int, tree_mask_mode: int = FULL_MASK) -> Tensor:
    """Find mask, positions and links of the trees that SGLang's draft model chose. This writes to the five tensors.

    The draft model's candidates are numbered by level: topk of the root, then topk for each of the topk candidates that
    each level expands. Candidate c has the parent in slot c // topk. Slot 0 is the root, and slot j > 0 is candidate
    parent_list[j]. Node n > 0 of a tree is candidate selected_index[n - 1]; the root is node 0.

    Args:
        parent_list:       (B, S) int64 or int32       S >= topk * (depth - 1) + 1, or 0 with one level
        selected_index:    (B, N - 1) int64 or int32   the candidates of the tree, rising
        verified_seq_len:  (B,) int64 or int32         how many tokens each request has cached
        tree_mask:         written to, by `tree_mask_mode`: a flat buffer of bool, uint8 or int8, 1 where a node sees a
                           column. It may be longer than needed, as SGLang's buffers for the largest batch are.
                           0 (FULL_MASK): request after request N rows of verified_seq_len + N bytes. The columns of
                           cached tokens stay as they are (SGLang fills them with True before).
                           1 (QLEN_ONLY): B N N bytes: the nodes' columns alone.
                           2 (QLEN_ONLY_BITPACKING): mode 1 as little-endian bits, a row in 1, 2 or 4 bytes, so
                           N <= 32; of any dtype
        positions:         (B N,) int64   written to: verified_seq_len and the node's depth
        retrive_index:     (B, N) int64   written to: the node's flat index
        retrive_next_token:    (B, N) int64   written to: the node's first child, or -1
        retrive_next_sibling:  (B, N) int64   written to: the next child of the same parent, or -1
        topk:              candidates of a parent
        depth:             levels of candidates
        draft_token_num:   N
        tree_mask_mode:    0, 1 or 2

    Returns:
        status:            (B,) int32   INVALID_TREE: a node's parent is not in the tree. The node and those below it
                                        are left out (SGLang's kernel prints a warning, and returns nothing)

    Raises:
        ValueError: a dtype, shape or device differs from the above, or tree_mask_mode is unknown

    Example:
        >>> import torch
        >>> from specvis_kernels.compat.sglang import build_tree_kernel_efficient
        >>> links = [torch.empty(1, 4, dtype=torch.int64) for _ in range(3)]
        >>> tree_mask, positions = torch.ones(16, dtype=torch.bool), torch.empty(4, dtype=torch.int64)
        >>> status = build_tree_kernel_efficient(   # two candidates of the root, and of candidate 0 both
        ...     torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 1, 3]]), torch.tensor([7]), tree_mask, positions, *links,
        ...     topk=2, depth=2, draft_token_num=4, tree_mask_mode=1)
        >>> positions, links[1], links[2]
        (tensor([7, 8, 8, 9]), tensor([[ 1,  3, -1, -1]]), tensor([[-1,  2, -1, -1]]))
        >>> tree_mask.view(4, 4)[3]       # node 3 sees the root, node 1 and itself
        tensor([ True,  True, False,  True])
    """
    N = draft_token_num
    for name, value in (("topk", topk), ("depth", depth), ("draft_token_num", N)):
        check_count(name, value, 1)
    B, S = check_dims("parent_list", parent_list, "BS")
    check("parent_list", parent_list, INTEGERS, B=B, S=S)
    if S < (topk * (depth - 1) + 1 if depth > 1 else 0):
        raise ValueError(f"parent_list must have at least topk * (depth - 1) + 1 = {topk * (depth - 1) + 1} columns, "
                         f"got {S}")
    for name, value, sizes in (("selected_index", selected_index, {"B": B, "N - 1": N - 1}),
                               ("verified_seq_len", verified_seq_len, {"B": B}),
                               ("positions", positions, {"B N": B * N}),
                               ("retrive_index", retrive_index, {"B": B, "N": N}),
                               ("retrive_next_token", retrive_next_token, {"B": B, "N": N}),
                               ("retrive_next_sibling", retrive_next_sibling, {"B": B, "N": N})):
        check(name, value, INTEGERS, like=parent_list, **sizes)
    _check_mask(tree_mask, tree_mask_mode, B, N, like=parent_list)

    links = tree_links(_parents(parent_list.long(), selected_index.long(), topk))
    retrive_index.copy_(torch.arange(B * N, device=parent_list.device).view(B, N))
    retrive_next_token.copy_(links.first_child)
    retrive_next_sibling.copy_(links.next_sibling)
    positions.copy_((verified_seq_len[:, None] + links.depth.clamp(min=0)).view(-1))
    entries = tree_mask.view(torch.uint8)
    if tree_mask_mode == QLEN_ONLY_BITPACKING:
        rows = make_tree_mask(links.ancestors, form="packed_rows")
        entries = entries[:B * N * _bytes_of_row(N)].view(B, N, -1)
        entries.zero_()[..., :rows.shape[-1]] = rows
        return links.status
    mask = make_tree_mask(links.ancestors)
    if tree_mask_mode == QLEN_ONLY:
        entries[:B * N * N].view(B, N, N).copy_(mask)
        return links.status
    lengths, node = verified_seq_len.long(), torch.arange(N, device=parent_list.device)
    columns = lengths + N
    starts = N * (columns.cumsum(0) - columns)          # of each request's rows
    first = starts[:, None] + node * columns[:, None] + lengths[:, None]
    entries.scatter_(0, (first[..., None] + node).view(-1), mask.view(-1).byte())
    return links.status


def _check_mask(tree_mask: Tensor, mode: int, B: int, N: int, like: Tensor) -> None:
    if mode not in (FULL_MASK, QLEN_ONLY, QLEN_ONLY_BITPACKING):
        raise ValueError(f"tree_mask_mode must be 0 (FULL_MASK), 1 (QLEN_ONLY) or 2 (QLEN_ONLY_BITPACKING), got {mode}")
    check("tree_mask", tree_mask, tree_mask.dtype if mode == QLEN_ONLY_BITPACKING else BYTES, like=like,
          entries=tree_mask.numel())
    if mode == QLEN_ONLY_BITPACKING and N > 32:
        raise ValueError(f"draft_token_num must be at most 32 under QLEN_ONLY_BITPACKING, got {N}")
    least = B * N * (_bytes_of_row(N) if mode == QLEN_ONLY_BITPACKING else N)  # FULL_MASK has the cached columns too
    if tree_mask.nbytes < least:
        raise ValueError(f"tree_mask must have at least {least} bytes for B={B}, N={N}, got {tree_mask.nbytes}")


def _bytes_of_row(N: int) -> int:
    """Of a row of N bits."""
    return 1 if N <= 8 else 2 if N <= 16 else 4


def _parents(parent_list: Tensor, selected_index: Tensor, topk: int) -> Tensor:
    """(B, N) int32, as tree_links takes them. A node whose parent is not in the tree is out of range: -3."""
    slot = selected_index // topk
    slots = torch.nn.functional.pad(parent_list, (0, 1), value=-1)  # of one level there may be no list
    wanted = slots.gather(1, slot.clamp(0, slots.shape[1] - 1))
    is_parent = wanted[:, :, None] == selected_index[:, None]       # (B, N - 1, N - 1)
    found = torch.where(is_parent.any(2), is_parent.int().argmax(2) + 1 if is_parent.shape[1] else slot, -3)
    return torch.nn.functional.pad(torch.where(slot == 0, 0, found), (1, 0), value=-1).int()


def _check_tree(predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
                retrive_next_sibling, like):
    """The depth to which nodes can be accepted; the links as int32; flat indices as int64."""
    B, N = like.shape[:2]
    num_columns = check_dims("accept_index", accept_index, "BC")[1]
    if num_columns < 1:
        raise ValueError(f"accept_index must have a column for the root, got shape {tuple(accept_index.shape)}")
    for name, value, sizes in (("predicts", predicts, {"B N": max(predicts.numel(), B * N)}),
                               ("accept_index", accept_index, {"B": B, "P + 1": num_columns}),
                               ("accept_token_num", accept_token_num, {"B": B})):
        check(name, value, torch.int32, like=like, **sizes)
    for name, value in (("candidates", candidates), ("retrive_index", retrive_index),
                        ("retrive_next_token", retrive_next_token), ("retrive_next_sibling", retrive_next_sibling)):
        check(name, value, INTEGERS, like=like, B=B, N=N)
    return num_columns - 1, (retrive_next_token.int(), retrive_next_sibling.int()), retrive_index.long()


def _uniforms_of_children(tokens: Tensor, first_child: Tensor, next_sibling: Tensor, of_parents: Tensor,
                          target_probs: Tensor) -> Tensor:
    """(B, N) float32: each child's u_k, see tree_speculative_sampling_target_only. of_parents (B, N): the coins."""
    B, N, V = target_probs.shape
    node = torch.arange(N, device=tokens.device).expand(B, N)

    def inverse(links):  # the node whose link leads to each node; N: no node
        index = torch.where((links >= 0) & (links < N), links, N).long()
        return node.new_full((B, N + 1), N).scatter_(1, index, node)[:, :N]

    def at(table, index, default):  # index N means no node
        return torch.nn.functional.pad(table, (0, 1), value=default).gather(1, index)

    previous, parent_of_first = inverse(next_sibling), inverse(first_child)
    head, rounds = torch.where(previous < N, previous, node), max(N - 1, 1).bit_length()
    for _ in range(rounds):
        head = head.gather(1, head)
    parent = parent_of_first.gather(1, head)
    safe = parent.clamp(max=N - 1)
    # An invalid token gets the mass of a valid one; verify_tree reports it, and tries neither it nor later siblings.
    mass = target_probs.reshape(B, N * V).gather(1, safe * V + tokens.clamp(0, V - 1)).double()
    earlier = at(mass, previous, 0.0)  # summed over 1, 2, 4, .. earlier siblings
    for _ in range(rounds):
        earlier = earlier + at(earlier, previous, 0.0)
        previous = at(previous, previous, N)
    uniforms = (at(of_parents.double(), parent, 0.0) - earlier) / (1 - earlier).clamp(min=2.0 ** -42)
    return uniforms.clamp(0, LARGEST_UNIFORM).float()


def _write(predicts, accept_index, accept_token_num, tokens, flat, accepted_nodes, num_accepted, next_token):
    """Into SGLang's tensors. Behind the end of a path its last node is written again, so that the shapes are fixed."""
    step = torch.arange(accept_index.shape[1], device=tokens.device)
    nodes = torch.nn.functional.pad(accepted_nodes, (1, 0)).long()
    at_end = step >= num_accepted[:, None]
    nodes = nodes.gather(1, step.minimum(num_accepted[:, None].long()))
    index = flat.gather(1, nodes)
    accept_index.copy_(torch.where(step <= num_accepted[:, None], index.int(), accept_index))
    accept_token_num.copy_(num_accepted)
    after = torch.nn.functional.pad(nodes[:, 1:], (0, 1))
    follows = torch.where(at_end, next_token[:, None], tokens.gather(1, after))
    predicts.scatter_(0, index.view(-1), follows.int().view(-1))


@functools.cache  # its hooks are registered once
def register() -> None:
    """Hook the tree functions here into SGLang if SPECVIS_SGLANG is 1 in the environment; without it nothing changes.

    This is the entry point specvis of the group sglang.srt.plugins. docs/use_it.md says what it replaces where.

    Raises:
        ValueError:   SPECVIS_SGLANG is neither 0 nor 1
        RuntimeError: this SGLang has no such functions or no registry of hooks, or another plugin has replaced one of
            them. SGLang logs the error, and its own functions stay
    """
    chosen = os.environ.get("SPECVIS_SGLANG", "")
    if chosen not in ("", "0", "1"):
        raise ValueError(f"SPECVIS_SGLANG must be 0 or 1, got {chosen!r}")
    if chosen != "1":
        return
    hooks, _ = place_of("sglang", "sglang.srt.plugins.hook_registry:HookRegistry.register")
    kinds, _ = place_of("sglang", "sglang.srt.plugins.hook_registry:HookType.REPLACE")
    replaced = {f"{TREES}:build_tree_kernel_efficient_func": build_tree_kernel_efficient_func,
                f"{TREES}:verify_tree_greedy_func": verify_tree_greedy_func,
                f"{EAGLE}:_verify_uses_greedy": _verify_uses_greedy}
    sampling = {f"{EAGLE}:tree_speculative_sampling_target_only": tree_speculative_sampling_target_only,
                f"{EAGLE}:top_k_renorm_prob": top_k_renorm_prob, f"{EAGLE}:top_p_renorm_prob": top_p_renorm_prob}
    missing = []
    for target, function in sampling.items():
        place, name = place_of("sglang", target)
        if getattr(place, name) is None:
            missing.append((place, name, counted("sglang", target, function)))
        elif function is tree_speculative_sampling_target_only:
            replaced[target] = function
    for target in replaced:
        place, name = place_of("sglang", target)
        check_own("sglang", target, getattr(place, name), packages=("sglang", "sgl_kernel", "sgl_kernel_npu"))

    for place, name, function in missing:  # not by a hook: it would replace each None that any module has as a name
        setattr(place, name, function)
    for target, function in replaced.items():
        hooks.register(target.replace(":", "."), counted("sglang", target, function), kinds.REPLACE)


def verify_tree_greedy_func(predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor,
                            retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
                            target_predict: Tensor, topk: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """`verify_tree_greedy` as sglang/kernels/ops/speculative/spec_tree.py calls it for every platform."""
    verify_tree_greedy(predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token,
                       retrieve_next_sibling, target_predict)
    return predicts, accept_index, accept_token_num


def build_tree_kernel_efficient_func(
        parent_list: Tensor, top_scores_index: Tensor, seq_lens: Tensor, tree_mask: Tensor, positions: Tensor,
        retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor, topk: int, spec_steps: int,
        num_verify_tokens: int, tree_mask_mode: int) -> None:
    """`build_tree_kernel_efficient` as sglang/kernels/ops/speculative/spec_tree.py calls it for every platform."""
    build_tree_kernel_efficient(parent_list, top_scores_index, seq_lens, tree_mask, positions, retrieve_index,
                                retrieve_next_token, retrieve_next_sibling, topk, spec_steps, num_verify_tokens,
                                tree_mask_mode)


def _verify_uses_greedy(*, is_all_greedy: bool, is_cpu: bool, is_hip: bool, is_xpu: bool,
                        use_rejection_sampling: bool) -> bool:
    """Whether a batch is verified greedily: if no request asks for sampling, on any platform."""
    return is_all_greedy


def top_k_renorm_prob(probs: Tensor, top_k: Tensor) -> Tensor:
    """(R, V) float32 rows without the ids after the top_k (R,) likeliest, normalized."""
    return guided_probs(probs.log()[:, None], None, None, 1.0, top_k, 1.0).probs[:, 0]


def top_p_renorm_prob(probs: Tensor, top_p: Tensor) -> Tensor:
    """(R, V) float32 rows without the ids after the likeliest whose sum reaches top_p (R,), normalized."""
    return guided_probs(probs.log()[:, None], None, None, 1.0, 0, top_p).probs[:, 0]
