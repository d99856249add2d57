"""EAGLE's interfaces (github.com/SafeAILab/EAGLE, eagle/model), answered by the ops. Batch 1, as there.

    from eagle.model.ea_model import EaModel
    from specvis_kernels.compat import eagle
    eagle.patch(EaModel)

Shapes below: L paths (rows of retrieve_indices) of D columns, N nodes, V tokens. What has a name of the release keeps
it, and takes and returns what it does there.
"""
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from .. import (
    check_status,
    commit_kv,
    draft_frontier,
    select_tree,
    tree_from_choices,
    tree_from_paths,
    tree_links,
    tree_mask,
    tree_paths,
    verify_logits,
)

GENERATORS = ("torch", "python")


class TreeLogits(NamedTuple):
    """What the patched tree_decoding gives evaluate_posterior in place of the logits along every path.

    Those are L * D rows, most of them several times. Here is one row a node, not guided yet, and what else is needed.
    """
    logits: Tensor            # (1, N, V), or (2, N, V): with the condition, then without it
    guidance: float | None    # the scale; None without guidance
    tokens: Tensor            # (1, N)
    retrieve_indices: Tensor  # (L, D)


def patch(EaModel: type, *, generator: str = "torch") -> Callable[[], None]:
    """Replace the functions of EAGLE's loop by those of this file, wherever `EaModel` was imported from.

    Replaced are tree_decoding, evaluate_posterior, update_inference_inputs and generate_tree_buffers in the module of
    EaModel, and topK_genrate of the draft layers Model (EAGLE-3) and Model1 (EAGLE-1 and 2). `eagenerate` stays.

    Args:
        EaModel:    the class, from eagle.model.ea_model
        generator:  as in `evaluate_posterior`

    Returns:
        undo:       a function without arguments that puts everything back

    Raises:
        ValueError: generator is none of its names, or EaModel's module has no evaluate_posterior
    """
    _check_generator(generator)
    module = sys.modules[EaModel.__module__]
    if not hasattr(module, "evaluate_posterior"):
        raise ValueError(f"EaModel must be EAGLE's, from eagle.model.ea_model, got one of {EaModel.__module__}")
    names = {"tree_decoding": tree_decoding, "evaluate_posterior": partial(evaluate_posterior, generator=generator),
             "update_inference_inputs": update_inference_inputs, "generate_tree_buffers": generate_tree_buffers}
    return replace([(module, names),
                    (getattr(module, "Model", None), {"topK_genrate": topK_genrate}),
                    (getattr(module, "Model1", None), {"topK_genrate": topK_genrate_by_head})])


def replace(parts: list[tuple[object, dict]]) -> Callable[[], None]:
    """Set those attributes of objects that they have already; returns what undoes it."""
    old = [(owner, name, getattr(owner, name)) for owner, names in parts for name in names if hasattr(owner, name)]
    for owner, names in parts:
        for name, value in names.items():
            if hasattr(owner, name):
                setattr(owner, name, value)

    def undo():
        for owner, name, value in old:
            setattr(owner, name, value)

    return undo


@torch.no_grad()
def tree_decoding(model, tree_candidates, past_key_values, tree_position_ids, input_ids, retrieve_indices):
    """The target's forward over the nodes (1, N). Returns TreeLogits, the hidden states and the outputs."""
    outputs, logits, hidden_state = model(tree_candidates, output_orig=True, past_key_values=past_key_values,
                                          position_ids=(tree_position_ids + input_ids.shape[1]).view(1, -1))
    if model.use_eagle3:  # its drafter reads three layers
        device = model.ea_layer.lm_head.weight.device
        hidden_state = torch.cat([states.to(device) for states in outputs["hidden_states"]], -1)
    return TreeLogits(logits[:1], None, tree_candidates, retrieve_indices), hidden_state, outputs


@torch.no_grad()
def evaluate_posterior(logits, candidates, logits_processor, *, generator="torch"):
    """Which path is accepted, how far, and what follows: EAGLE-2's lossless rule, or greedy without a processor.

    The next token is drawn here, from the distribution that the release returns.

    Args:
        logits:            (L, D, V) of every path, or TreeLogits
        candidates:        (L, D)    int64: tokens along the paths, -1 pads
        logits_processor:  None: greedy; or a list of transformers' logits processors (see `settings_of`)
        generator:         where the numbers that accept come from: "torch", its generator of the device; or "python",
                           its module `random`, of which as many are drawn as in the release, for the same children:
                           what is accepted is equal to the release's

    Returns:
        best_candidate:    () int64: the first row of the accepted path
        accept_length:     how many drafts were accepted, an integer
        sample_p:          (V,) float32: 1 at the next token, which is drawn already, and 0 elsewhere

    Raises:
        StatusError: a row on the way holds NaN, or leaves nothing to draw from (`check_status`)
    """
    return verify(logits, candidates, logits_processor, generator=generator)


def verify(logits, candidates, logits_processor, *, generator, proposals=None, renumber=False, **rule):
    """evaluate_posterior under any rule of verify_logits.

    Args:
        proposals:  (op, p_indices) of a static tree, as EAGLE-1's evaluate_posterior takes them; None: point masses
        renumber:   whether nodes are numbered in the order of the paths, by which a greedy tie is decided
        rule:       neighbors, delta, cutoff, offset, residual, empty and id_range of verify_logits
    """
    _check_generator(generator)
    if isinstance(logits, TreeLogits):
        rows, guidance, tokens, paths = logits
        tokens = tokens[:1].to(rows.device)
        if renumber:
            rows, tokens, paths = _in_order_of_paths(rows, tokens, paths.to(rows.device))
        tree = _tree_of(paths, rows.shape[1], rows.device)
        cond, uncond = (rows, None) if guidance is None else rows.split(1)
    else:
        L, D = candidates.shape
        candidates, guidance, uncond = candidates.to(logits.device), None, None
        cond, tokens = logits.reshape(1, L * D, -1), candidates.reshape(1, L * D)
        tree = _tree_of(_slots_of(candidates), L * D, logits.device)
    settings = settings_of(logits_processor)
    if settings is None:  # a processor that the ops do not know: it filters every row
        guided = cond[0].float() if uncond is None else uncond[0] + guidance * (cond[0] - uncond[0]).float()
        settings, guidance, cond, uncond = UNFILTERED, None, logits_processor(None, guided)[None], None

    _, N, V = cond.shape
    is_greedy, device = logits_processor is None, cond.device
    if proposals is not None and not is_greedy:
        rule |= _draft_rows(*proposals, tree.paths, N)
    stream = None
    if generator == "torch" or is_greedy:
        uniforms = torch.rand(1, N, device=device)
    else:
        stream, position = _Stream(N - 1), _number_positions(tree)
        in_order = stream.numbers.to(device, non_blocking=True)[None, position[1:] - 1]
        uniforms = torch.cat([torch.rand(1, 1, device=device), in_order], 1)
    result = verify_logits(cond, uncond, tokens, tree.first_child, tree.next_sibling, uniforms,
                           1.0 if guidance is None else float(guidance), max_depth=tree.paths.shape[1] - 1, **settings,
                           **rule)

    # The one read from the device. Nodes of a path rise, so the last one is the largest.
    end = result.accepted_nodes.amax(1).clamp_(min=0)
    answers = [(tree.paths == end).any(1).int().argmax(0, keepdim=True), result.num_accepted, result.status]
    if stream is not None:
        answers.append(position[end] + (tree.parents == end).sum(1))
    row, accept_length, status, *num_drawn = torch.cat(answers).tolist()
    if stream is not None:
        stream.draw(*num_drawn)
    if status:
        check_status(result.status, "verify_logits")
    return torch.tensor(row), accept_length, torch.zeros(V, device=device).scatter_(0, result.next_token, 1.0)


class _Tree(NamedTuple):
    paths: Tensor         # (L, D) int64
    parents: Tensor       # (1, N) int32
    first_child: Tensor   # (1, N) int32
    next_sibling: Tensor  # (1, N) int32
    version: int          # of retrieve_indices: another one where it has been written to since


_trees = WeakTensorKeyDictionary()  # the trees of retrieve_indices that are in use: a static one's, or one drafted here


def _tree_of(paths, num_nodes, device):
    tree = _trees.get(paths)
    if tree is None or tree.parents.shape[1] != num_nodes or tree.paths.device != device \
            or tree.version != paths._version:
        on_device = paths.to(device)
        parents = tree_from_paths(on_device, num_nodes)
        tree = _keep_tree(paths, on_device, parents, tree_links(parents))
    return tree


def _keep_tree(paths, on_device, parents, links):
    version = -1 if paths.is_inference() else paths._version  # an inference tensor has none: its tree is not kept
    tree = _Tree(on_device.detach(), parents, links.first_child, links.next_sibling, version)
    if version >= 0:
        _trees[paths] = tree
    return tree


def _check_generator(generator):
    if generator not in GENERATORS:
        raise ValueError(f"generator must be one of {', '.join(GENERATORS)}, got {generator!r}")


class _Stream:
    """The next numbers of Python's `random`, of which only those that are used shall be drawn in the end."""

    def __init__(self, length):
        self.state = random.getstate()
        numbers = torch.tensor([random.random() for _ in range(max(length, 1))])
        self.numbers = numbers.clamp_(max=1 - 2**-24)  # what float32 rounds up to 1

    def draw(self, length):
        random.setstate(self.state)
        for _ in range(length):
            random.random()


def _number_positions(tree):
    """How many numbers the released loop has drawn once it has tried node n: (N,) int32.

    It draws one for each child that it tries, in order, and goes on below the one that it accepts. So a number follows
    that of the sibling before, or the parent's: the count is a depth in the tree of who follows whom.
    """
    N = tree.parents.shape[1]
    node = torch.arange(N, dtype=torch.int32, device=tree.parents.device)[None]
    child = torch.where(tree.next_sibling < 0, N, tree.next_sibling).long()
    follows = pad(tree.parents, (0, 1)).scatter_(1, child, node)
    return tree_links(follows[:, :N]).depth[0]


def _slots_of(candidates):
    """Paths (L, D) over L * D slots, slot (i, d) = i * D + d; equal prefixes share the slots of their first row."""
    L, D = candidates.shape
    is_equal = (candidates[:, None] == candidates).cumprod(2)  # (L, L, D): does a row begin as another does
    first_row = is_equal.argmax(1)
    slots = first_row * D + torch.arange(D, device=candidates.device)
    return torch.where(candidates >= 0, slots, -1)


def _in_order_of_paths(rows, tokens, paths):
    """The same tree with its nodes numbered as the paths first come to them."""
    N = rows.shape[1]
    slot = torch.full((N + 1,), paths.numel(), device=paths.device)
    slot.scatter_reduce_(0, torch.where(paths >= 0, paths, N).flatten(),
                         torch.arange(paths.numel(), device=paths.device), "amin")
    order = slot[:N].argsort(stable=True)
    return rows[:, order], tokens[:, order], torch.where(paths >= 0, order.argsort()[paths], -1)


def _draft_rows(op, p_indices, paths, N):
    """The rows that a static tree's children were drawn from: draft_probs and draft_row of verify_logits.

    op holds the rows of each level, p_indices for each path and column which of them its node was drawn from.
    """
    sizes = torch.tensor([len(rows) for rows in op])
    row = (sizes.cumsum(0) - sizes)[:paths.shape[1] - 1] + torch.tensor(p_indices)[:, 1:]
    parent = torch.where(paths[:, 1:] >= 0, paths[:, :-1], N)
    draft_row = torch.full((N + 1,), -1, dtype=torch.int32, device=paths.device)
    draft_row[parent.flatten()] = row.flatten().int().to(paths.device)
    return {"draft_probs": torch.cat(list(op))[None].float(), "draft_row": draft_row[None, :N]}


UNFILTERED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "filters": "k_then_p"}
GREEDY = UNFILTERED | {"temperature": 0.0}
WARPERS = {"TemperatureLogitsWarper": "temperature", "TopKLogitsWarper": "top_k", "TopPLogitsWarper": "top_p"}


def settings_of(logits_processor) -> dict | None:
    """The arguments temperature, top_k, top_p and filters of the ops that do what a logits_processor does.

    Args:
        logits_processor:  None, greedy; or a list of transformers' TemperatureLogitsWarper, TopPLogitsWarper and
                           TopKLogitsWarper, each at most once and the temperature first, as prepare_logits_processor of
                           EAGLE and LANTERN makes it: top-p before top-k

    Returns:
        settings:          the arguments; None where the list holds something else, or in another order, or a warper
                           with what the ops do not have: min_tokens_to_keep of top-p, filter_value, a top_p of 0
    """
    if logits_processor is None:
        return GREEDY
    names = [WARPERS.get(type(processor).__name__) for processor in logits_processor]
    if None in names or len(set(names)) < len(names) or "temperature" in names[1:]:
        return None
    settings = UNFILTERED | {name: getattr(warper, name) for name, warper in zip(names, logits_processor)}
    for name, warper in zip(names, logits_processor):
        if getattr(warper, "filter_value", -torch.inf) != -torch.inf:
            return None
        if name == "top_p" and (warper.top_p <= 0 or getattr(warper, "min_tokens_to_keep", 1) > 1):
            return None  # (a TopKLogitsWarper has its min_tokens_to_keep in top_k already)
    filters = "p_then_k" if names[-2:] == ["top_p", "top_k"] else "k_then_p"
    return settings | {"top_k": int(settings["top_k"]), "filters": filters}


@torch.no_grad()
def update_inference_inputs(input_ids, candidates, best_candidate, accept_length, retrieve_indices, logits_processor,
                            new_token, past_key_values_data_list, current_length_data, model, hidden_state_new,
                            sample_p):
    """Commit the accepted path and draft the next tree. Takes the sample_p of this file's evaluate_posterior."""
    nodes, length = retrieve_indices[best_candidate], input_ids.shape[1]
    input_ids = torch.cat([input_ids, candidates[None, best_candidate, :accept_length + 1].to(input_ids.device)], 1)
    commit(past_key_values_data_list, current_length_data, nodes, accept_length, length)
    token = sample_p.argmax()[None, None]
    hidden_state = hidden_state_new[:, nodes[:accept_length + 1].to(hidden_state_new.device)]
    tree = model.ea_layer.topK_genrate(hidden_state, torch.cat([input_ids, token.to(input_ids.device)], 1),
                                       model.base_model.lm_head, logits_processor)
    return input_ids, *tree, new_token + accept_length + 1, None, token


def commit(past_key_values_data_list: Sequence[Tensor], current_length_data: Tensor, nodes: Tensor,
           accept_length: int, length: int) -> None:
    """Move the keys and values of the accepted path behind the `length` committed columns, in place (`commit_kv`).

    Args:
        past_key_values_data_list:  a tensor (.., columns, dim) on each device; node n is in column length + n
        current_length_data:        every layer's length: written to
        nodes:                      (D,) int64: the row of retrieve_indices that was accepted, from the root
        accept_length:              how many nodes behind the root were
        length:                     how many columns are committed
    """
    for cache in past_key_values_data_list:
        num_accepted = torch.full((1,), accept_length, dtype=torch.int32, device=cache.device)
        lengths = torch.full((1,), length, device=cache.device)
        commit_kv(cache, nodes[None, 1:].to(cache.device, torch.int32), num_accepted, lengths, row_dim=0,
                  column_dim=cache.ndim - 2)
    current_length_data.fill_(length + 1 + accept_length)


@torch.no_grad()
def topK_genrate(self, hidden_states, input_ids, head, logits_processor):
    """EAGLE-3's tree: `head` is not used, the draft layer has its own, of fewer tokens perhaps."""
    return _draft(self, hidden_states, input_ids, lambda hidden: self.lm_head(self.norm(hidden)), logits_processor,
                  getattr(self, "d2t", None))


@torch.no_grad()
def topK_genrate_by_head(self, hidden_states, input_ids, head, logits_processor):
    """EAGLE-2's tree, by the target's head."""
    return _draft(self, hidden_states, input_ids, head, logits_processor)


def _draft(self, hidden_states, input_ids, head, logits_processor, token_offsets=None):
    input_ids = input_ids.to(hidden_states.device)
    root, input_ids = input_ids[:1, -1], input_ids[:, 1:]
    self.reset()
    cached, known = getattr(self, "stable_kv", None), 0
    if cached is not None:
        known = cached[0][0].shape[2]
    hidden, cached = self(hidden_states, input_ids=input_ids[:, known:], past_key_values=cached, use_cache=True)
    self.stable_kv = cached

    def read(hidden, tokens, past_key_values, depth):
        return self(hidden, input_ids=tokens, past_key_values=past_key_values, use_cache=True,
                    position_ids=input_ids.shape[1] + depth + self.position_ids)

    return grow_tree(self, hidden[:, -1:], cached, root, head, read, sampled=logits_processor is not None,
                     settings=GREEDY, token_offsets=token_offsets)


def grow_tree(drafter, hidden: Tensor, cached, root: Tensor, head: Callable, read: Callable, *, sampled: bool,
              settings: dict, guidance: float | None = None, token_offsets: Tensor | None = None,
              id_range: Callable[[int], tuple[int, int] | None] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What topK_genrate does after its first forward: EAGLE-2's dynamic tree, a level a call of `draft_frontier`.

    Nothing is read from the device. So the tree has as many rows of paths as nodes, and those that are not used are -1.

    Args:
        drafter:        with total_tokens, depth, top_k, tree_mask_init, and tree_mask, which is set before each read
        hidden:         (R, 1, H) of the newest token: R = 2 with guidance
        cached:         the draft layer's keys and values
        root:           (1,) int64: the newest token
        head:           hidden states to logits
        read:           read(hidden (R, K, H), tokens (R, K), cached, depth) -> hidden, cached
        sampled:        whether rows of retrieve_indices are in lexicographic order, as the release has them where it
                        samples; else in the order of their leaves, as it has them where it is greedy
        settings:       temperature, top_k, top_p and filters of draft_frontier
        token_offsets:  what is added to a token of the draft's vocabulary to make it one of the target's (d2t)
        id_range:       a function: the size of the vocabulary -> id_range of draft_frontier; None: all ids

    Returns:
        draft_tokens:       (1, N) int64, N = total_tokens + 1
        retrieve_indices:   (N, depth + 2) int64, -1 pads
        tree_mask:          (1, 1, N, N) float32: 1 where visible
        tree_position_ids:  (N,) int64: the nodes' depths
    """
    R, K, device = len(hidden), drafter.top_k, hidden.device
    num_levels, N = drafter.depth + 1, drafter.total_tokens + 1
    width = torch.full((1,), K, dtype=torch.int32, device=device)
    depth = torch.full((1,), num_levels, device=device)
    scores = torch.zeros(1, 1, device=device)
    ancestors = torch.zeros(1, 1, (num_levels * K + 64) // 64, dtype=torch.int64, device=device)
    ancestors[..., 0] = 1
    candidates = torch.full((1, 1), -1, dtype=torch.int32, device=device)
    levels, visible, first_candidate = [], drafter.tree_mask_init.to(device), 0
    for level in range(1, num_levels + 1):
        logits = head(hidden)
        logits, uncond = (logits, None) if guidance is None else logits.split(1)
        drafted = draft_frontier(
            logits, uncond, scores, ancestors, candidates, width, depth, 1.0 if guidance is None else float(guidance),
            num_children=K, level=level, first_node=1 + (level - 1) * K, first_candidate=first_candidate,
            id_range=None if id_range is None else id_range(logits.shape[-1]), **settings)
        children, tokens = drafted.child_tokens, drafted.tokens
        if token_offsets is not None:
            children, tokens = children + token_offsets[children], tokens + token_offsets[tokens]
        levels.append((children, drafted.child_scores, drafted.child_parents))
        if level == num_levels:
            break
        if level > 1:
            visible = torch.cat([visible[:, :, drafted.rows[0]], drafter.tree_mask_init.to(device)], 3)
        drafter.tree_mask = visible
        first_candidate += children.shape[1]
        scores, ancestors, candidates = drafted.scores, drafted.ancestors, drafted.candidates
        hidden, cached = read(hidden[:, drafted.rows[0]], tokens.expand(R, -1), cached, level - 1)

    tokens, parents, _, _ = select_tree(*(torch.cat(part, 1) for part in zip(*levels)), root,
                                        torch.full_like(width, N), num_nodes=N)
    links = tree_links(parents)
    paths = tree_paths(parents, num_levels)[0]
    if not sampled:
        leaf = paths.amax(1)
        paths = paths[torch.where(leaf < 0, N, leaf).argsort(stable=True)]
    _keep_tree(paths, paths, parents, links)
    mask = tree_mask(links.ancestors)[:, None].float()
    return tokens, paths, mask, links.depth[0].long().clamp(min=0)


def generate_tree_buffers(tree_choices: Sequence[Sequence[int]], device="cuda") -> dict:
    """The shape of a static tree, for the verifier: tree_attn_mask, tree_indices, tree_position_ids, retrieve_indices.

    Args:
        tree_choices:       the nodes, each as its ranks from the root: [0], [1], [0, 0], ..

    Returns:
        tree_attn_mask:     (1, 1, N, N) float32: 1 where visible
        tree_indices:       (N,)   int64: where the node's token is among [the root | TOPK tokens for each parent]
        tree_position_ids:  (N,)   int64: depths
        retrieve_indices:   (L, D) int64: -1 pads
    """
    buffers, _ = static_tree(tree_choices)
    return {name: value.to(device) for name, value in buffers.items()}


TOPK = 10  # tokens drafted for each parent of a static tree, whatever the tree makes of them


def static_tree(tree_choices: Sequence[Sequence[int]]) -> tuple[dict, Tensor]:
    """What generate_tree_buffers returns, on the CPU, and the nodes' parents (N,) int64."""
    parents, rank = tree_from_choices(tree_choices)
    links = tree_links(parents)
    parents, depth = parents[0].long(), links.depth[0].long()
    paths = tree_paths(parents[None].int(), int(depth.max()))[0]
    has_children = links.first_child[0] >= 0
    row = has_children.cumsum(0) - 1  # a row of TOPK tokens for each node that has children, in the order of nodes
    index = torch.where(depth > 0, 1 + TOPK * row[parents.clamp(min=0)] + rank[0], 0)
    return {"tree_attn_mask": tree_mask(links.ancestors)[:, None].float(), "tree_indices": index,
            "tree_position_ids": depth, "retrieve_indices": paths[paths[:, 0] >= 0]}, parents
