"""Draft trees of a batch: the draft model's state, and the trees that it proposes, of a static or a dynamic shape."""
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specvis_kernels import TreeLinksResult, draft_children, draft_frontier, select_tree, tree_links

from ..models.interface import DraftModel, Nodes, TargetModel, chain_ancestors, columns_and_tokens, id_range, num_tokens
from ..models.threads import cat, copy
from .batch_state import BatchState
from .methods import Method
from .sampling import DRAFT, Sampling, take_nodes, uniforms_at
from .trees import Shapes, StaticTree, static_tree


@dataclass
class DraftTree:
    """A tree of tokens for each request. Its root is the newest token of the image."""

    tokens: Tensor              # (B, N) int64
    links: TreeLinksResult      # of its nodes
    draft_probs: Tensor | None  # (B, M, V) float32  the rows that children were sampled from; None: chosen, not sampled
    draft_row: Tensor | None    # (B, N) int32  which of these rows a node's children were sampled from


class DraftState(BatchState, ABC):
    """State of the draft model for B requests, including its logits for the next token.

    After `extend` it holds the draft model's hidden state (R, 1, H) at the newest token of each request, and its
    logits (R, 1, V) for the next token. A tree is drafted from these.
    """

    PAIRS, PARTS, CACHES = ("hidden", "logits", "padding_mask"), ("sampling", "shapes"), ("cache",)

    def __init__(self, draft_model: DraftModel, target: TargetModel, sampling: Sampling, draft_guidance: Tensor,
                 shapes: Shapes, num_nodes: int, max_depth: int):
        """target: says which ids are allowed at a position; draft_guidance: (B,) float32 the share of each request's
        guidance that the draft model gets; num_nodes: how many nodes of a tree it reads at most, the root among them"""
        self.draft_model, self.target, self.shapes, self.num_tokens = draft_model, target, shapes, num_tokens(target)
        self.has_id_range = hasattr(target, "id_range")
        self.padding_mask = draft_model.padding_mask.clone()
        guidance = torch.lerp(torch.ones_like(draft_guidance), sampling.guidance, draft_guidance)
        self.sampling, seeds = replace(sampling, guidance=guidance), sampling.seeds
        self.num_columns = draft_model.prefix_len + self.num_tokens + max(num_nodes, max_depth + 1)
        self.cache = draft_model.new_cache(self.num_columns)
        self.depths = torch.arange(max_depth + 1, device=seeds.device)[None]  # of the nodes of a chain
        self.chain = chain_ancestors(len(seeds), max_depth + 1, seeds.device)
        self.hidden, self.logits = None, None

    @abstractmethod
    def draft(self, root: Tensor, counts: Tensor, max_count: int, max_depth: int, max_width: int) -> DraftTree:
        """The next trees.

        Args:
            root:       (B,) int64  the newest tokens
            counts:     (B,) int64  how many tokens each image has, the newest among them
            max_count:  the most that an image which goes on may have
            max_depth, max_width: the largest depth and width of any request's tree; each one's own are in `shapes`
        """

    def prefill(self, hidden: Tensor) -> None:
        """Read the conditions; hidden (R, S, H): the target's states at them."""
        self.draft_model.prefill(hidden, self.cache)

    def extend(self, new_tokens: Tensor, previous_hidden: Tensor, counts: Tensor, num_new: Tensor,
               max_count: int) -> None:
        """Read the tokens that an image has gained.

        Args:
            new_tokens:      (B, A) int64  the new tokens of each request, padding follows them
            previous_hidden: (R, A, H)     the target's hidden state before each
            counts:          (B,) int64    how many tokens each request had before; of a finished one at most L
            num_new:         (B,) int64    how many of `new_tokens` are new, at least 1
            max_count:       the largest of `counts` of the images that go on
        """
        B, A = new_tokens.shape
        is_step = A == self.depths.shape[1]  # else it is the prefill, with any number of known tokens
        depths, ancestors = (self.depths, self.chain) if is_step else (
            torch.arange(A, device=counts.device)[None], chain_ancestors(B, A, counts.device))
        nodes = self.nodes(depths, counts + self.draft_model.prefix_len, ancestors, max_count + A)
        hidden = self.draft_model.extend(nodes.of_rows(new_tokens), previous_hidden, nodes, self.cache)
        hidden = take_nodes(hidden, (num_new - 1)[:, None])
        logits = self.draft_model.logits(hidden)
        if self.hidden is None:
            self.hidden, self.logits = hidden.clone(), logits.clone()
        copy(self.hidden, hidden)
        copy(self.logits, logits)

    def nodes(self, depth: Tensor, lengths: Tensor, ancestors: Tensor, max_columns: int, first: int = 0) -> Nodes:
        """The nodes of the draft model's tree. max_columns: after the condition"""
        columns = min(self.draft_model.prefix_len + max_columns, self.num_columns)
        return Nodes(depth, lengths, ancestors, self.padding_mask, columns, first)

    def id_range(self, counts: Tensor, depth: int, num_nodes: int) -> Tensor | None:
        """The ids (B, F, 2) of the children of F nodes, at this depth of trees from counts (B,) on; None: all."""
        ids = id_range(self.target, (counts + (depth - 1))[:, None]) if self.has_id_range else None
        return None if ids is None else ids.expand(-1, num_nodes, -1)

    def expand_level(self, tokens: Tensor, previous_hidden: Tensor, nodes: Nodes) -> tuple[Tensor, Tensor]:
        """Read the drafts of one level of the trees.

        Args:
            tokens:          (B, F) int64  the drafts
            previous_hidden: (R, F, H)     the draft model's hidden states at their parents
        Returns:
            hidden states (R, F, H), logits (R, F, V) of their children
        """
        hidden = self.draft_model.extend(nodes.of_rows(tokens), previous_hidden, nodes, self.cache)
        return hidden, self.draft_model.logits(hidden)


class StaticPlan:
    """How to draft a static tree level by level, as index tensors on the device.

    Each level takes three moves:
    1. Draw K children after each of the F inner nodes of the level above. K is the most that any of them has.
    2. Pick the children that are inner nodes: the inner nodes of this level.
    3. Read them. They are the F of the next level.
    In the end the nodes of the tree are picked from all children.

    A node has up to three numbers. The root's is 0 in each, and each counts level by level:

        tree node    among all nodes of the tree, as in `StaticTree`
        inner node   among the nodes that have children: the draft model reads these
        drawn child  among all tokens that are drawn, also those that the tree has no node for
    """

    @dataclass
    class Level:
        num_children: int   # K
        inner: Tensor       # (F',) int64  which of the F * K children are inner nodes
        parents: Tensor     # (F',) int64  which of the F nodes above is the parent of each
        depth: Tensor       # (1, F') int64  of these nodes
        ancestors: Tensor   # (B, F', W) int64  of the inner nodes, in bits for all inner nodes of the tree
        first: int          # the number of the first of them among all inner nodes

    def __init__(self, tree: StaticTree, batch: int, device: torch.device):
        def indices(numbers):
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        def for_each_request(numbers):
            return torch.tensor(numbers, dtype=torch.int32, device=device).expand(batch, -1)

        inner_levels = [[n for n in tree.level(depth) if tree.children(n)] for depth in range(tree.depth + 1)]
        inner, drawn_levels = sum(inner_levels, []), [drawn_nodes(tree, above) for above in inner_levels[:-1]]
        ancestors = tree_links(for_each_request([inner.index(tree.parents[n]) if n else -1 for n in inner])).ancestors
        self.levels, first = [], 1
        for depth, (above, drawn, new) in enumerate(zip(inner_levels, drawn_levels, inner_levels[1:]), 1):
            self.levels.append(self.Level(
                len(drawn) // len(above), indices([drawn.index(node) for node in new]),
                indices([above.index(tree.parents[node]) for node in new]), indices([[depth] * len(new)]),
                ancestors[:, first: first + len(new)], first))
            first += len(new)
        self.num_drawn, drawn = list(map(len, drawn_levels)), sum(drawn_levels, [0])
        # node n is drawn with uniform n - 1; where the tree has no such child, any uniform will do
        self.uniforms = indices([max(node - 1, 0) for node in drawn[1:]])
        self.nodes = indices([drawn.index(node) for node in range(len(tree.parents))])
        self.num_inner, self.links = len(inner), tree_links(for_each_request(tree.parents))
        self.draft_row = for_each_request([inner.index(n) if n in inner else -1 for n in range(len(tree.parents))])


def drawn_nodes(tree: StaticTree, above: list[int]) -> list[int]:
    """The tree nodes that are drawn after the nodes of the level above, K after each; -1 where the tree has none."""
    child_lists = [tree.children(node) for node in above]
    K = max(map(len, child_lists))
    return [node for children in child_lists for node in children + [-1] * (K - len(children))]


class StaticDraftState(DraftState):
    """Trees of one shape, whose children are sampled without replacement. Greedy requests get the likeliest ones.

    Where drafts are verified by equality, they are drawn with the noise of the target's own draws: the nearer the
    draft model's probabilities are to the target's, the more likely the two draw the same token.
    """

    def __init__(self, draft_model: DraftModel, target: TargetModel, sampling: Sampling, draft_guidance: Tensor,
                 shapes: Shapes, plan: StaticPlan, seed_exact: bool):
        super().__init__(draft_model, target, sampling, draft_guidance, shapes, plan.num_inner, len(plan.levels))
        self.plan, self.seed_exact = plan, seed_exact

    def draft(self, root: Tensor, counts: Tensor, max_count: int, max_depth: int, max_width: int) -> DraftTree:
        B, newest = len(counts), (counts - 1)[:, None]                           # the position of the newest token
        column = newest[:, 0] + self.draft_model.prefix_len                      # (B,) its column
        if not self.seed_exact:
            uniforms = uniforms_at(self.sampling.seeds, counts - 1, self.plan.nodes.shape[0] - 1, DRAFT)
            uniforms = uniforms.index_select(1, self.plan.uniforms).split(self.plan.num_drawn, 1)
        drawn, rows, hidden, logits = [root[:, None]], [], self.hidden, self.logits
        for depth, level in enumerate(self.plan.levels, 1):
            F, K = logits.shape[1], level.num_children
            ids = self.id_range(counts, depth, F)
            if self.seed_exact:
                by = {"uniforms": None, "seeds": self.sampling.seeds, "positions": (newest + depth).expand(-1, F),
                      "num_children": K}
            else:
                by = {"uniforms": uniforms[depth - 1].view(B, F, K)}
            children = draft_children(**self.sampling.rows(logits), id_range=ids, **by)
            if not self.seed_exact:
                rows.append(children.probs)
            drawn.append(children.tokens.view(B, F * K))
            if len(level.inner):
                nodes = self.nodes(level.depth, column, level.ancestors, max_count + self.plan.num_inner, level.first)
                hidden, logits = self.expand_level(drawn[-1].index_select(1, level.inner),
                                                   hidden.index_select(1, level.parents), nodes)
        tokens = torch.cat(drawn, 1).index_select(1, self.plan.nodes)
        if self.seed_exact:
            return DraftTree(tokens, self.plan.links, None, None)
        return DraftTree(tokens, self.plan.links, cat(rows, 1), self.plan.draft_row)


class DynamicDraftState(DraftState):
    """EAGLE-2's trees: each level continues the likeliest paths, and in the end the likeliest drafts are kept."""

    def __init__(self, draft_model: DraftModel, target: TargetModel, sampling: Sampling, draft_guidance: Tensor,
                 shapes: Shapes, num_nodes: int, max_depth: int, sizes: Tensor, max_nodes: int):
        """sizes (B,) int32: how many nodes each request's tree may keep, the root counted; none has over max_nodes."""
        super().__init__(draft_model, target, sampling, draft_guidance, shapes, num_nodes, max_depth)
        self.sizes, self.max_nodes = sizes, max_nodes
        B, device = len(sizes), sizes.device
        self.depths_of_levels = [torch.full((1, 1), level, device=device) for level in range(max_depth)]
        # The root is the first frontier: its score, its bit among all nodes that the draft model reads, no candidate.
        self.root_score = torch.zeros(B, 1, dtype=torch.float32, device=device)
        self.root_ancestors = torch.zeros(B, 1, (num_nodes + 63) // 64, dtype=torch.int64, device=device)
        self.root_ancestors[..., 0] = 1
        self.root_candidate = torch.full((B, 1), -1, dtype=torch.int32, device=device)

    def draft(self, root: Tensor, counts: Tensor, max_count: int, max_depth: int, max_width: int) -> DraftTree:
        K, width, levels = max_width, self.shapes.width.int(), []
        column = counts + (self.draft_model.prefix_len - 1)                      # (B,) of the newest token
        hidden, logits = self.hidden, self.logits
        scores, ancestors, candidates = self.root_score, self.root_ancestors, self.root_candidate
        num_candidates = 0
        for level in range(1, max_depth + 1):
            first = 1 + (level - 1) * K                                          # of the next frontier's nodes
            grown = draft_frontier(**self.sampling.rows(logits), scores=scores, ancestors=ancestors,
                                   candidates=candidates, width=width, depth=self.shapes.depth, num_children=K,
                                   level=level, first_node=first, first_candidate=num_candidates,
                                   id_range=self.id_range(counts, level, logits.shape[1]))
            levels.append((grown.child_tokens, grown.child_scores, grown.child_parents))
            if level == max_depth:
                break
            num_candidates += grown.child_tokens.shape[1]
            scores, ancestors, candidates = grown.scores, grown.ancestors, grown.candidates
            depth = self.depths_of_levels[level].expand(1, K)
            nodes = self.nodes(depth, column, ancestors, max_count + first + K, first)
            hidden, logits = self.expand_level(grown.tokens, take_nodes(hidden, grown.rows), nodes)
        tokens, scores, parents = (cat(part, 1) for part in zip(*levels))
        num_nodes = min(self.max_nodes, 1 + max_width + (max_depth - 1) * max_width ** 2)
        tree = select_tree(tokens, scores, parents, root, self.sizes, num_nodes=num_nodes)
        return DraftTree(tree.tokens, tree_links(tree.parents), None, None)


def new_draft_state(draft_model: DraftModel, sampling: Sampling, methods: list[Method],
                    target: TargetModel) -> DraftState:
    """The state of the draft model for these methods, one for each request and all of one `Method.family`."""
    base, seeds, sizes = methods[0], sampling.seeds, columns_and_tokens(target)

    def of_each(value, dtype=torch.int64):
        return torch.tensor([value(m) for m in methods], dtype=dtype, device=seeds.device)

    draft_guidance = of_each(lambda m: m.drafts.draft_guidance, torch.float32)
    if base.drafting == "static":
        plan = StaticPlan(static_tree(base.drafts.tree), len(methods), seeds.device)
        max_depth = of_each(lambda m: m.max_depth)
        shapes = Shapes(max_depth, max_depth, max_depth, *sizes)
        return StaticDraftState(draft_model, target, sampling, draft_guidance, shapes, plan, base.seed_exact)
    shapes = Shapes(of_each(lambda m: m.drafts.depth), of_each(lambda m: m.drafts.width),
                    of_each(lambda m: m.drafts.nodes - 1), *sizes, base.drafts.adaptation, seeds)
    deepest, widest = max(m.max_depth for m in methods), max(m.max_width for m in methods)
    return DynamicDraftState(draft_model, target, sampling, draft_guidance, shapes, 1 + deepest * widest, deepest,
                             of_each(lambda m: m.drafts.nodes, torch.int32), max(m.max_nodes for m in methods))
