"""EAGLE's and LANTERN's evaluate_posterior by verify_logits, from rows along every path or from one row a node."""
import random
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from .. import check_status, tree_from_paths, tree_links, verify_logits
from .._checks import check_one_of
from ._settings import UNFILTERED, settings_of

GENERATORS = ("torch", "python")


class TreeLogits(NamedTuple):
    """The result of the patched tree_decoding for evaluate_posterior, in place of the logits along every path.

    Logits along every path are L * D rows, most of them repeated. Here each node has one row, not guided yet.
    """
    logits: Tensor            # (1, N, V), or (2, N, V): with the condition, then without it
    guidance: float | None    # the scale; None without guidance
    tokens: Tensor            # (1, N)
    retrieve_indices: Tensor  # (L, D)


def verify(logits, candidates, logits_processor, *, generator, proposals=None, renumber=False, **rule):
    """evaluate_posterior under any rule of verify_logits.

    Args:
        proposals:  (op, p_indices) of a static tree, as EAGLE-1's evaluate_posterior takes them; None: point masses
        renumber:   whether nodes are numbered in the order of the paths, by which a greedy tie is decided
        rule:       neighbors, delta, cutoff, offset, residual, empty and id_range of verify_logits
    """
    check_generator(generator)
    if isinstance(logits, TreeLogits):
        rows, guidance, tokens, paths = logits
        tokens = tokens[:1].to(rows.device)
        if renumber:
            rows, tokens, paths = _in_order_of_paths(rows, tokens, paths.to(rows.device))
        tree = tree_of(paths, rows.shape[1], rows.device)
        cond, uncond = (rows, None) if guidance is None else rows.split(1)
    else:
        L, D = candidates.shape
        candidates, guidance, uncond = candidates.to(logits.device), None, None
        cond, tokens = logits.reshape(1, L * D, -1), candidates.reshape(1, L * D)
        tree = tree_of(_slots_of(candidates), L * D, logits.device)
    settings = settings_of(logits_processor)
    if settings is None:  # a processor that the ops do not have: it filters every row
        guided = cond[0].float() if uncond is None else uncond[0] + guidance * (cond[0] - uncond[0]).float()
        settings, guidance, cond, uncond = UNFILTERED, None, logits_processor(None, guided)[None], None

    _, N, V = cond.shape
    is_greedy, device = logits_processor is None, cond.device
    if proposals is not None and not is_greedy:
        rule |= _draft_rows(*proposals, tree.paths, N)
    stream = None
    if generator == "torch" or is_greedy:
        uniforms = torch.rand(1, N, dtype=torch.float32, device=device)
    else:
        stream, position = _Stream(N - 1), _number_positions(tree)
        in_order = stream.numbers.to(device, non_blocking=True)[None, position[1:] - 1]
        uniforms = torch.cat([torch.rand(1, 1, dtype=torch.float32, device=device), in_order], 1)
    result = verify_logits(cond, uncond, tokens, tree.first_child, tree.next_sibling, uniforms,
                           1.0 if guidance is None else float(guidance), max_depth=tree.paths.shape[1] - 1, **settings,
                           **rule)

    # The only read from the device. Nodes of a path rise, so the last one is the largest.
    end = result.accepted_nodes.amax(1).clamp_(min=0)
    answers = [(tree.paths == end).any(1).int().argmax(0, keepdim=True), result.num_accepted, result.status]
    if stream is not None:
        answers.append(position[end] + (tree.parents == end).sum(1))
    row, accept_length, status, *num_drawn = torch.cat(answers).tolist()
    if stream is not None:
        stream.draw(*num_drawn)
    if status:
        check_status(result.status, "verify_logits")
    row = torch.tensor(row, device="cpu")
    return row, accept_length, torch.zeros(V, dtype=torch.float32, device=device).scatter_(0, result.next_token, 1.0)


class _Tree(NamedTuple):
    paths: Tensor         # (L, D) int64
    parents: Tensor       # (1, N) int32
    first_child: Tensor   # (1, N) int32
    next_sibling: Tensor  # (1, N) int32
    version: int          # of retrieve_indices: a later write changes it


trees = WeakTensorKeyDictionary()  # retrieve_indices in use -> their tree, static or drafted here


def tree_of(paths, num_nodes, device):
    tree = trees.get(paths)
    if tree is None or tree.parents.shape[1] != num_nodes or tree.paths.device != device \
            or tree.version != paths._version:
        on_device = paths.to(device)
        parents = tree_from_paths(on_device, num_nodes)
        tree = keep_tree(paths, on_device, parents, tree_links(parents))
    return tree


def keep_tree(paths, on_device, parents, links):
    version = -1 if paths.is_inference() else paths._version  # an inference tensor has no version: its tree is not kept
    tree = _Tree(on_device.detach(), parents, links.first_child, links.next_sibling, version)
    if version >= 0:
        trees[paths] = tree
    return tree


def check_generator(generator):
    check_one_of("generator", generator, GENERATORS)


class _Stream:
    """The next numbers of Python's `random`. In the end only the used ones are drawn from it."""

    def __init__(self, length):
        self.state = random.getstate()
        numbers = torch.tensor([random.random() for _ in range(max(length, 1))], dtype=torch.float32, device="cpu")
        self.numbers = numbers.clamp_(max=1 - 2**-24)  # float32 rounds larger ones up to 1

    def draw(self, length):
        random.setstate(self.state)
        for _ in range(length):
            random.random()


def _number_positions(tree):
    """How many numbers the released loop has drawn once it has tried node n: (N,) int32.

    It draws one for each child that it tries, in order, and goes on below the child that it accepts. So a node's number
    follows the number of the sibling before it, or of its parent: the count is the depth in the tree of these links.
    """
    N = tree.parents.shape[1]
    node = torch.arange(N, dtype=torch.int32, device=tree.parents.device)[None]
    child = torch.where(tree.next_sibling < 0, N, tree.next_sibling).long()
    follows = pad(tree.parents, (0, 1)).scatter_(1, child, node)
    return tree_links(follows[:, :N]).depth[0]


def _slots_of(candidates):
    """Paths (L, D) over L * D slots, slot (i, d) = i * D + d; equal prefixes share the slots of their first row."""
    L, D = candidates.shape
    is_equal = (candidates[:, None] == candidates).cumprod(2)  # (L, L, D): whether a row begins like another
    first_row = is_equal.argmax(1)
    slots = first_row * D + torch.arange(D, device=candidates.device)
    return torch.where(candidates >= 0, slots, -1)


def _in_order_of_paths(rows, tokens, paths):
    """Renumber the nodes of a tree in the order in which the paths first reach them."""
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
    sizes = torch.tensor([len(rows) for rows in op], device="cpu")
    row = (sizes.cumsum(0) - sizes)[:paths.shape[1] - 1] + torch.tensor(p_indices, device="cpu")[:, 1:]
    parent = torch.where(paths[:, 1:] >= 0, paths[:, :-1], N)
    draft_row = torch.full((N + 1,), -1, dtype=torch.int32, device=paths.device)
    draft_row[parent.flatten()] = row.flatten().int().to(paths.device)
    return {"draft_probs": torch.cat(list(op))[None].float(), "draft_row": draft_row[None, :N]}
