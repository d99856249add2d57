"""EAGLE's interfaces (github.com/SafeAILab/EAGLE, eagle/model), answered by the ops. Batch 1, as there.

    from eagle.model.ea_model import EaModel
    from specvis_kernels.compat import eagle
    eagle.patch(EaModel)

Shapes below: L paths (rows of retrieve_indices) of D columns, N nodes, V tokens. Functions with a name of the release
keep its arguments and results.
"""
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .. import commit_kv, draft_frontier, select_tree, tree_from_choices, tree_links, tree_mask, tree_paths
from ._posterior import TreeLogits, check_generator, keep_tree, verify
from ._settings import GREEDY


def patch(EaModel: type, *, generator: str = "torch") -> Callable[[], None]:
    """Replace the functions of EAGLE's loop by the functions of this file, wherever `EaModel` was imported from.

    Replaced are tree_decoding, evaluate_posterior, update_inference_inputs and generate_tree_buffers in the module of
    EaModel, and topK_genrate of the draft layers Model (EAGLE-3) and Model1 (EAGLE-1 and 2). `eagenerate` stays.

    Args:
        EaModel:    the class, from eagle.model.ea_model
        generator:  as in `evaluate_posterior`

    Returns:
        undo:       a function without arguments that puts everything back

    Raises:
        ValueError: generator is unknown, or EaModel's module has no evaluate_posterior
    """
    check_generator(generator)
    module = sys.modules[EaModel.__module__]
    if not hasattr(module, "evaluate_posterior"):
        raise ValueError(f"EaModel must be EAGLE's, from eagle.model.ea_model, got one of {EaModel.__module__}")
    names = {"tree_decoding": tree_decoding, "evaluate_posterior": partial(evaluate_posterior, generator=generator),
             "update_inference_inputs": update_inference_inputs, "generate_tree_buffers": generate_tree_buffers}
    return replace([(module, names),
                    (getattr(module, "Model", None), {"topK_genrate": topK_genrate}),
                    (getattr(module, "Model1", None), {"topK_genrate": topK_genrate_by_head})])


def replace(parts: list[tuple[object, dict]]) -> Callable[[], None]:
    """Set attributes of objects, if they exist already; returns a function that undoes it."""
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
    if model.use_eagle3:  # its draft model reads three layers
        device = model.ea_layer.lm_head.weight.device
        hidden_state = torch.cat([states.to(device) for states in outputs["hidden_states"]], -1)
    return TreeLogits(logits[:1], None, tree_candidates, retrieve_indices), hidden_state, outputs


@torch.no_grad()
def evaluate_posterior(logits, candidates, logits_processor, *, generator="torch"):
    """Accept a path and draw the token after it: EAGLE-2's lossless rule, or greedy without a processor.

    The next token is drawn here, from the distribution that the release returns.

    Args:
        logits:            (L, D, V) of every path, or TreeLogits
        candidates:        (L, D)    int64: tokens along the paths, -1 pads
        logits_processor:  None: greedy; or a list of transformers' logits processors (see `settings_of`)
        generator:         the source of the numbers that accept: "torch", its generator of the device; or "python", its
                           module `random`, from which the release's numbers are drawn for its children: so it accepts
                           the release's paths

    Returns:
        best_candidate:    () int64: the first row of the accepted path
        accept_length:     how many drafts were accepted, an integer
        sample_p:          (V,) float32: 1 at the next token, which is drawn already, and 0 elsewhere

    Raises:
        StatusError: a row on the path has a NaN, or nothing to draw from (`check_status`)
    """
    return verify(logits, candidates, logits_processor, generator=generator)


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
    """Move the keys and values of the accepted path after the `length` committed columns, in place (`commit_kv`).

    Args:
        past_key_values_data_list:  a tensor (.., columns, dim) on each device; node n is in column length + n
        current_length_data:        every layer's length: written to
        nodes:                      (D,) int64: the row of retrieve_indices that was accepted, from the root
        accept_length:              how many nodes after the root were accepted
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
    """EAGLE-3's tree. `head` is not used: the draft layer has its own, perhaps for fewer tokens."""
    return draft(self, hidden_states, input_ids, lambda hidden: self.lm_head(self.norm(hidden)),
                 sampled=logits_processor is not None, settings=GREEDY, token_offsets=getattr(self, "d2t", None))


@torch.no_grad()
def topK_genrate_by_head(self, hidden_states, input_ids, head, logits_processor):
    """EAGLE-2's tree, by the target's head."""
    return draft(self, hidden_states, input_ids, head, sampled=logits_processor is not None, settings=GREEDY)


def draft(self, hidden_states, input_ids, head, *, place=lambda position_ids: position_ids, of_layer=None, **tree):
    """The draft layer's first forward, and `grow_tree` with `tree`.

    place: the layer's position_ids of these; of_layer: more arguments of the layer
    """
    input_ids, device = input_ids.to(hidden_states.device), hidden_states.device
    root, input_ids = input_ids[:1, -1], input_ids[:, 1:]
    length = input_ids.shape[1]
    self.reset()
    cached, known = getattr(self, "stable_kv", None), 0
    if cached is not None:
        known = cached[0][0].shape[2]

    def read(hidden, tokens, past_key_values, position_ids):
        return self(hidden, input_ids=tokens, past_key_values=past_key_values, use_cache=True,
                    position_ids=place(position_ids), **of_layer or {})

    def read_level(hidden, tokens, past_key_values, depth):
        return read(hidden, tokens, past_key_values, length + depth + self.position_ids.to(device))

    hidden, cached = read(hidden_states, input_ids[:, known:], cached, torch.arange(known, length, device=device)[None])
    self.stable_kv = cached
    return grow_tree(self, hidden[:, -1:], cached, root, head, read_level, **tree)


def grow_tree(draft_model, hidden: Tensor, cached, root: Tensor, head: Callable, read: Callable, *, sampled: bool,
              settings: dict, guidance: float | None = None, token_offsets: Tensor | None = None,
              id_range: Callable[[int], tuple[int, int] | None] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The part of topK_genrate after its first forward: EAGLE-2's dynamic tree, by `draft_frontier` for each level.

    Nothing is read from the device. So the tree has as many rows of paths as nodes, and unused rows are -1.

    Args:
        draft_model:  with total_tokens, depth, top_k, tree_mask_init, and tree_mask, which is set before each read
        hidden:         (R, 1, H) of the newest token: R = 2 with guidance
        cached:         the draft layer's keys and values
        root:           (1,) int64: the newest token
        head:           hidden states to logits
        read:           read(hidden (R, K, H), tokens (R, K), cached, depth) -> hidden, cached
        sampled:        whether rows of retrieve_indices are in lexicographic order, as in the release when it samples;
                        else they are in the order of their leaves, as in the release when it is greedy
        settings:       temperature, top_k, top_p, min_p and filters of draft_frontier
        token_offsets:  added to a token of the draft's vocabulary, they give the target's token (d2t)
        id_range:       a function: the size of the vocabulary -> id_range of draft_frontier; None: all ids

    Returns:
        draft_tokens:       (1, N) int64, N = total_tokens + 1
        retrieve_indices:   (N, depth + 2) int64, -1 pads
        tree_mask:          (1, 1, N, N) float32: 1 where visible
        tree_position_ids:  (N,) int64: the nodes' depths
    """
    R, K, device = len(hidden), draft_model.top_k, hidden.device
    num_levels, N = draft_model.depth + 1, draft_model.total_tokens + 1
    width = torch.full((1,), K, dtype=torch.int32, device=device)
    depth = torch.full((1,), num_levels, device=device)
    scores = torch.zeros(1, 1, dtype=torch.float32, device=device)
    ancestors = torch.zeros(1, 1, (num_levels * K + 64) // 64, dtype=torch.int64, device=device)
    ancestors[..., 0] = 1
    candidates = torch.full((1, 1), -1, dtype=torch.int32, device=device)
    levels, visible, first_candidate = [], draft_model.tree_mask_init.to(device), 0
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
            visible = torch.cat([visible[:, :, drafted.rows[0]], draft_model.tree_mask_init.to(device)], 3)
        draft_model.tree_mask = visible
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
    keep_tree(paths, paths, parents, links)
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


TOPK = 10  # tokens drafted for each parent of a static tree, whether the tree uses them or not


def static_tree(tree_choices: Sequence[Sequence[int]]) -> tuple[dict, Tensor]:
    """The result of generate_tree_buffers, on the CPU, and the nodes' parents (N,) int64."""
    parents, rank = tree_from_choices(tree_choices)
    links = tree_links(parents)
    parents, depth = parents[0].long(), links.depth[0].long()
    paths = tree_paths(parents[None].int(), int(depth.max()))[0]
    has_children = links.first_child[0] >= 0
    row = has_children.cumsum(0) - 1  # a row of TOPK tokens for each node that has children, in the order of nodes
    index = torch.where(depth > 0, 1 + TOPK * row[parents.clamp(min=0)] + rank[0], 0)
    return {"tree_attn_mask": tree_mask(links.ancestors)[:, None].float(), "tree_indices": index,
            "tree_position_ids": depth, "retrieve_indices": paths[paths[:, 0] >= 0]}, parents
