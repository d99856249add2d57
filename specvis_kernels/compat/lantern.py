"""LANTERN's interfaces (github.com/jadohu/LANTERN, models), answered by the ops. Batch 1, as there.

    from models.ea_model_llamagen import EaModel            # or models.ea_model_anole
    from specvis_kernels.compat import lantern
    lantern.patch(EaModel)

The rule is the release's, for dynamic trees and static ones (LANTERN++), sampled and greedy. Shapes are as in eagle.py,
and C codes. Functions with a name of the release keep its arguments and results.
"""
import sys
from collections.abc import Callable
from functools import partial, partialmethod

import torch
from torch import Tensor

from ._posterior import TreeLogits, check_generator, verify
from ._settings import GREEDY, settings_of
from .eagle import TOPK, commit, draft, replace, static_tree
from .eagle import generate_tree_buffers as tree_shape


def patch(EaModel: type, *, residual: str = "released", empty: str = "uniform",
          generator: str = "torch") -> Callable[[], None]:
    """Replace the functions of LANTERN's loop by the functions of this file. `generate` stays as it is.

    Replaced are tree_decoding, evaluate_posterior, evaluate_posterior_v1, generate_tree_buffers and
    update_inference_inputs of EaModel, topK_genrate of its draft layer's class, and generate_tree_buffers in the module
    of that class, where it has them.

    Args:
        EaModel:    the class, from models.ea_model_llamagen or models.ea_model_anole
        residual:   the residual after a rejection: "released", or "optimal" or "relaxed" of `verify_tree`
        empty:      what takes the place of an empty residual: "uniform", as released, or "target"
        generator:  as in `eagle.evaluate_posterior`

    Returns:
        undo:       a function without arguments that puts everything back

    Raises:
        ValueError: generator is unknown, or EaModel has no evaluate_posterior
    """
    check_generator(generator)
    if not hasattr(EaModel, "evaluate_posterior"):
        raise ValueError(f"EaModel must be LANTERN's, with evaluate_posterior, got {EaModel.__name__} without it")
    options = {"residual": residual, "empty": empty, "generator": generator}
    layer = getattr(sys.modules[EaModel.__module__], "Model", None)
    return replace([
        (EaModel, {"tree_decoding": tree_decoding,
                   "evaluate_posterior": partialmethod(evaluate_posterior, **options),
                   "evaluate_posterior_v1": partialmethod(evaluate_posterior_v1, **options),
                   "generate_tree_buffers": generate_tree_buffers,
                   "update_inference_inputs": update_inference_inputs}),
        (layer, {"topK_genrate": topK_genrate}),
        (sys.modules.get(getattr(layer, "__module__", "")), {"generate_tree_buffers": draft_tree_buffers})])


@torch.no_grad()
def tree_decoding(self, tree_candidates, past_key_values, tree_position_ids, input_ids, retrieve_indices, cfg_scale,
                  attention_mask=None, input_position_diff=None):
    """The target's forward over the nodes (2, N). Returns TreeLogits, the hidden states and the outputs.

    `input_position_diff` is Anole's: by how much the positions are lower without the condition.
    """
    position_ids = tree_position_ids + input_ids.shape[1]
    if input_position_diff is not None:
        position_ids = torch.stack([position_ids, position_ids - input_position_diff])
    if attention_mask is not None:
        missing = input_ids.shape[1] + tree_candidates.shape[1] - attention_mask.shape[1]
        attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(attention_mask), missing)], 1)
    outputs, logits, hidden_state = self(input_ids=tree_candidates, output_orig=True, past_key_values=past_key_values,
                                         position_ids=position_ids, attention_mask=attention_mask)
    return TreeLogits(logits, cfg_scale, tree_candidates[:1], retrieve_indices), hidden_state, outputs


@torch.no_grad()
def evaluate_posterior(self, logits, candidates, logits_processor=None, lantern=False, lantern_k=1000,
                       lantern_delta=0.1, *, residual="released", empty="uniform", generator="torch"):
    """Accept a path of a dynamic tree and draw the token after it.

    Args:
        self:              with nearest_latents (C, >= lantern_k + 1), NumPy or torch, where lantern; and
                           image_token_offset, the id of code 0, where that is not 0
        logits, candidates, logits_processor, generator:   as in `eagle.evaluate_posterior`
        lantern:           whether neighbors lend their probability
        lantern_k:         how many neighbors may, besides the token itself
        lantern_delta:     up to 1: LANTERN's limit of the total variation. Above: LANTERN++'s ratio, their mass at most
                           lantern_delta - 1 times the token's
        residual, empty:   as in `patch`

    Returns:
        as `eagle.evaluate_posterior` does; of equally long greedy paths the first

    Raises:
        ValueError:  nearest_latents has too few columns, or non_image_tokens leaves more than one range of ids
        StatusError: a row on the path has a NaN, or nothing to draw from (`check_status`)
    """
    rule = _rule(self, logits, lantern, lantern_k, lantern_delta, residual, empty)
    return verify(logits, candidates, logits_processor, generator=generator,
                  renumber=lantern and logits_processor is None, **rule)


@torch.no_grad()
def evaluate_posterior_v1(self, logits, candidates, logits_processor, cart_candidates_prob, op, p_indices,
                          tree_candidates, b_indices, lantern=False, lantern_k=1000, lantern_delta=0.1, *,
                          residual="released", empty="uniform", generator="torch"):
    """evaluate_posterior for a static tree, whose children were drawn from the rows `op` without replacement.

    `cart_candidates_prob` and `b_indices` are not read: both follow from the rows and the tree.
    """
    rule = _rule(self, logits, lantern, lantern_k, lantern_delta, residual, empty)
    return verify(logits, candidates, logits_processor, generator=generator, proposals=(op, p_indices),
                  renumber=lantern and logits_processor is None, **rule)


def _rule(self, logits, lantern, lantern_k, lantern_delta, residual, empty) -> dict:
    """The arguments of verify_logits for LANTERN's options."""
    rows = logits.logits if isinstance(logits, TreeLogits) else logits
    rule = {"residual": residual, "empty": empty, "id_range": _image_ids(self, rows.shape[-1])}
    if lantern:
        is_ratio = lantern_delta > 1
        columns = lantern_k + (residual == "released")
        rule |= {"neighbors": neighbor_table(self, columns, rows.device), "delta": float(lantern_delta - is_ratio),
                 "cutoff": "ratio" if is_ratio else "tvd", "offset": getattr(self, "image_token_offset", 0)}
    return rule


def _image_ids(self, vocab_size):
    """The ids [first, last) beside self.non_image_tokens, which Anole's two models have; None for LlamaGen's."""
    masked = getattr(self, "non_image_tokens", None)
    if masked is None:
        return None
    if not hasattr(self, "_image_range"):  # read from the device once
        text = set(masked.tolist())
        ids = [token for token in range(vocab_size) if token not in text]
        if not ids or ids[-1] - ids[0] >= len(ids):
            raise ValueError(f"non_image_tokens must leave one range of ids out of the {vocab_size} tokens, "
                             f"got {len(masked)} ids that leave {'others between them' if ids else 'none'}")
        self._image_range = ids[0], ids[-1] + 1
    return self._image_range


def neighbor_table(self, columns: int, device: torch.device | str) -> Tensor:
    """The first columns of self.nearest_latents on a device. They are moved there once, and kept until
    nearest_latents is another object.

    Args:
        self:       with nearest_latents (C, C - 1): NumPy or torch, uint16, int32 or int64, as generate_codebook of
                    LANTERN writes it
        columns:    k, or k + 1 for the residual "released": only that residual uses the last column

    Returns:
        neighbors:  (C, columns) uint16 or int32

    Raises:
        ValueError: the table has fewer columns
    """
    source, kept = getattr(self, "_neighbor_table", (None, None))
    if source is not self.nearest_latents or kept.shape[1] != columns or kept.device != torch.device(device):
        if self.nearest_latents.shape[1] < columns:
            raise ValueError(f"nearest_latents must have at least {columns} columns for this lantern_k, "
                             f"got {self.nearest_latents.shape[1]}")
        kept = torch.as_tensor(self.nearest_latents[:, :columns], device="cpu")
        kept = kept if kept.dtype == torch.uint16 else kept.int()
        kept = kept.to(device, copy=True).contiguous()
        self._neighbor_table = self.nearest_latents, kept
    return kept


@torch.no_grad()
def update_inference_inputs(self, input_ids, candidates, best_candidate, accept_length, retrieve_indices,
                            logits_processor, new_token, past_key_values_data_list, current_length_data,
                            hidden_state_new, sample_p, cfg_scale, input_position_diff=None, attention_mask=None, *,
                            static_tree=False):
    """Commit the accepted path and draft the next tree. Takes the sample_p of this file's evaluate_posterior.

    Anole's `input_position_diff` and `attention_mask`, if given, are handed to the draft layer.
    """
    nodes, length = retrieve_indices[best_candidate], input_ids.shape[1]
    input_ids = torch.cat([input_ids, candidates[None, best_candidate, :accept_length + 1]], 1)
    commit(past_key_values_data_list, current_length_data, nodes, accept_length, length)
    token = sample_p.argmax()[None, None]
    hidden_state = hidden_state_new[:, nodes[:accept_length + 1].to(hidden_state_new.device)]
    read = torch.cat([input_ids, token.to(input_ids.device)], 1).repeat(2, 1)
    draft = self.ea_layer.topK_genrate_v1 if static_tree else self.ea_layer.topK_genrate
    of_anole = {"input_position_diff": input_position_diff, "attention_mask": attention_mask}
    drafted = draft(hidden_state, read, self.base_model.lm_head, logits_processor, cfg_scale,
                    **{name: value for name, value in of_anole.items() if value is not None})
    drafted = (drafted,) if static_tree else drafted
    return input_ids, *drafted, new_token + accept_length + 1, None, token


@torch.no_grad()
def topK_genrate(self, hidden_states, input_ids, head, logits_processor, cfg_scale, input_position_diff=None,
                 attention_mask=None):
    """A dynamic tree; input_position_diff and attention_mask are Anole's. Returns the results of `eagle.grow_tree`."""
    def place(position_ids):
        if input_position_diff is None:
            return position_ids
        return torch.stack([position_ids, (position_ids - input_position_diff).clamp(min=0)]).flatten(0, -2)

    settings = GREEDY if logits_processor is None else settings_of(logits_processor)
    if settings is None:
        raise ValueError("logits_processor must be made by prepare_logits_processor, of temperature, top_p and top_k, "
                         "or have min_p last")
    return draft(self, hidden_states, input_ids, head, place=place,
                 of_layer=None if input_position_diff is None else {"attention_mask": attention_mask},
                 sampled=logits_processor is not None, settings=settings, guidance=cfg_scale,
                 id_range=partial(_image_ids, self))


def generate_tree_buffers(self, tree_choices, device="cuda") -> dict:
    """`eagle.generate_tree_buffers`, and two nested lists that the released evaluate_posterior_v1 reads.

    Returns:
        p_indices:  for each path and column, which row of its level its node's token was drawn from; -1 at the root
        b_indices:  for each path and column, (n,) int64: the earlier siblings; [] without any
    """
    buffers, parents = static_tree(tree_choices)
    depth, paths = buffers["tree_position_ids"], buffers["retrieve_indices"]
    drawn_from, earlier = [-1], [[]]
    for node in range(1, len(parents)):
        on_level = parents[1:][depth[1:] == depth[node]].unique().tolist()
        drawn_from.append(on_level.index(parents[node].item()))
        siblings = (parents[:node] == parents[node]).nonzero()[:, 0]
        earlier.append(siblings.to(device) if len(siblings) else [])
    p_indices = [[drawn_from[node] for node in nodes] for nodes in paths.tolist()]
    b_indices = [[earlier[node] if node >= 0 else [] for node in nodes] for nodes in paths.tolist()]
    return tree_shape(tree_choices, device) | {"p_indices": p_indices, "b_indices": b_indices}


def draft_tree_buffers(tree_choices, device="cuda") -> dict:
    """generate_tree_buffers for the draft model: the inputs of the draft layer at each level of a static tree.

    The layer reads the nodes that have children: F of them on level d, and G on all levels down to it.

    Returns:
        attn_mask:     (1, 1, F, G) float32 of each level: 1 where visible
        tree_indices:  (F,) int64: where the node's token is among TOPK for each node read on the level above
        position_ids:  (F,) int64: 0
        repeat_nums:   a list of each level: how many nodes there are below each node read on the level above
    """
    buffers, parents = static_tree(tree_choices)
    depth, rank = buffers["tree_position_ids"], (buffers["tree_indices"] - 1) % TOPK
    is_read = torch.zeros(len(parents), dtype=torch.bool, device="cpu").index_fill_(0, parents[1:], True)
    nodes = is_read.nonzero()[:, 0]
    levels = {"attn_mask": [], "tree_indices": [], "position_ids": [], "repeat_nums": []}
    for level in range(1, int(depth.max())):
        above, here = (nodes[depth[nodes] == d] for d in (level - 1, level))
        down_to_here = nodes[(depth[nodes] > 0) & (depth[nodes] <= level)]
        row = torch.searchsorted(above, parents[here])
        levels["attn_mask"].append(buffers["tree_attn_mask"][:, :, here][..., down_to_here].to(device))
        levels["tree_indices"].append((TOPK * row + rank[here]).to(device))
        levels["position_ids"].append(torch.zeros(len(here), dtype=torch.int64, device=device))
        levels["repeat_nums"].append(row.bincount().tolist())
    return levels
