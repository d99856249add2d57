"""Drafting for a batch: the drafter's cache, and the trees that it proposes, of a static or a dynamic shape."""
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specvis_kernels import TreeLinksResult, draw_children, expand_tree, select_tree, tree_links, tree_mask

from ..models.interface import Drafter
from .methods import Method
from .sampling import DRAFT, SHAPE, Sampling, hide_padding, mask_padding, philox_uniforms, repeat_for_cfg
from .trees import Shapes, StaticTree, static_tree


@dataclass
class Draft:
    """A tree of tokens for each request. Its root is the newest token of the image."""

    tokens: Tensor              # (B, N) int64
    links: TreeLinksResult      # of its nodes
    draft_probs: Tensor | None  # (B, M, V) float32  the rows that children were sampled from; None: chosen, not sampled
    draft_row: Tensor | None    # (B, N) int32  which of these rows a node's children were sampled from


class Drafting(ABC):
    """The drafter at work on B requests, and what it says of the token behind the newest one.

    After `extend` there are, for the newest token of each request, the drafter's hidden state (2B, 1, H) and the
    probabilities (B, 1, V) of the next token. A tree is drafted from these.
    """

    def __init__(self, drafter: Drafter, sampling: Sampling, draft_guidance: Tensor, shapes: Shapes, num_columns: int):
        """
        Args:
            draft_guidance: (B,) float32  the share of each request's guidance that the drafter gets
            shapes:         the depth and the width of each request's next tree
            num_columns:    how many entries a tree adds to the drafter's cache at most
        """
        self.drafter, self.shapes, self.num_tokens = drafter, shapes, shapes.grid ** 2
        guidance = torch.lerp(torch.ones_like(draft_guidance), sampling.guidance, draft_guidance)
        self.sampling = replace(sampling, guidance=guidance)
        num_columns += drafter.prefix_len + self.num_tokens
        self.cache, self.index = drafter.new_cache(num_columns), torch.arange(num_columns, device=sampling.seeds.device)

    @abstractmethod
    def draft(self, root: Tensor, max_depth: int, max_width: int) -> Draft:
        """The next trees, below the newest tokens root (B,).

        max_depth, max_width: the largest depth and width of any request's tree; each request's own are in `shapes`
        """

    def prefill(self, hidden: Tensor) -> None:
        """Read the conditions; hidden (2B, S, H): the target's states at them."""
        self.drafter.prefill(hidden, self.cache)

    def extend(self, new_tokens: Tensor, previous_hidden: Tensor, counts: Tensor, num_new: Tensor,
               max_count: int) -> None:
        """Read the tokens that an image has gained.

        Args:
            new_tokens:      (B, A) int64  the new tokens of each request, and padding behind them
            previous_hidden: (2B, A, H)    the target's hidden state before each
            counts:          (B,) int64    how many tokens each request had before
            num_new:         (B,) int64    how many of `new_tokens` are new, at least 1
            max_count:       the largest of `counts`
        """
        prefix_len, A = self.drafter.prefix_len, new_tokens.shape[1]
        slots = repeat_for_cfg(counts)[:, None] + self.index[prefix_len: prefix_len + A]  # (2B, A)
        mask = self.index[:prefix_len + max_count + A] <= slots[..., None]                # (2B, A, T)
        hidden = self.drafter.extend(repeat_for_cfg(new_tokens), previous_hidden, slots,
                                     hide_padding(self.drafter.padding_mask, mask), self.cache, slots)
        last = repeat_for_cfg(num_new - 1)[:, None, None].expand(-1, -1, hidden.shape[-1])
        self.counts = (counts + num_new).clamp(max=self.num_tokens)
        self.root = self.counts + (prefix_len - 1)                                        # (B,) its column
        self.columns = prefix_len + min(max_count + A, self.num_tokens)                   # that may hold an entry
        self.hidden = hidden.gather(1, last)
        self.probs = self.sampling.probs(self.drafter, self.hidden).probs

    def expand_level(self, tokens: Tensor, previous_hidden: Tensor, ancestors: Tensor,
                     depth: int) -> tuple[Tensor, Tensor]:
        """Read the drafts of one level of the trees.

        Args:
            tokens:          (B, F) int64      the drafts, the last F nodes of `ancestors`
            previous_hidden: (2B, F, H)        the drafter's hidden states at their parents
            ancestors:       (B, n, W) int64   of all nodes that the drafter has read; node 0 is the newest token
            depth:           of the level: 1 for children of the newest token

        Returns:
            hidden states (2B, F, H), probabilities (B, F, V) of their children
        """
        n, F = ancestors.shape[1], tokens.shape[1]
        mask = tree_mask(ancestors, self.root.int(), columns=self.columns + n)[:, n - F:]
        root = repeat_for_cfg(self.root)[:, None]
        hidden = self.drafter.extend(
            repeat_for_cfg(tokens), previous_hidden, (root + depth).expand(-1, F),
            mask_padding(self.drafter.padding_mask, mask), self.cache, root + self.index[n - F: n])
        return hidden, self.sampling.probs(self.drafter, hidden).probs


class StaticPlan:
    """How to draft a static tree level by level, as index tensors on the device.

    Inner nodes are those that have children. They are the nodes that the drafter reads, the root first. Each level
    takes three moves:
    1. Draw K children after each of the F inner nodes of the level above. K is the most that any of them has.
    2. Pick the children that the tree has. They are the n nodes of this level.
    3. Read the inner nodes among these. They are the F of the next level.
    """

    @dataclass
    class Level:
        uniform_index: Tensor  # (F, K) int64  which of the N - 1 uniforms each child is drawn with
        picked: Tensor         # (n,) int64    which of the F * K children the tree has
        inner: Tensor          # (F',) int64   which of the n nodes are inner nodes
        parents: Tensor        # (F',) int64   which of the F nodes above is the parent of each inner node
        ancestors: Tensor      # (B, ., W) int64  of all inner nodes down to this level

    def __init__(self, tree: StaticTree, batch: int, device: torch.device):
        def indices(numbers):
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        def for_each_request(numbers):
            return torch.tensor(numbers, dtype=torch.int32, device=device).expand(batch, -1)

        self.levels = []
        above, inner, inner_parents = [0], [0], [-1]  # inner nodes: of the level above, and all, with their parents
        for depth in range(1, tree.depth + 1):
            nodes, child_lists = tree.level(depth), [tree.children(node) for node in above]
            K = max(map(len, child_lists))
            new = [node for node in nodes if tree.children(node)]
            inner_parents += [inner.index(tree.parents[node]) for node in new]
            inner += new
            self.levels.append(self.Level(
                # node n is drawn with uniform n - 1; where the tree has no such child, any uniform will do
                uniform_index=indices([[node - 1 for node in children] + [0] * (K - len(children))
                                       for children in child_lists]),
                picked=indices([f * K + i for f, children in enumerate(child_lists) for i in range(len(children))]),
                inner=indices([nodes.index(node) for node in new]),
                parents=indices([above.index(tree.parents[node]) for node in new]),
                ancestors=tree_links(for_each_request(inner_parents)).ancestors))
            above = new
        self.num_inner = len(inner)
        self.links = tree_links(for_each_request(tree.parents))
        self.draft_row = for_each_request([inner.index(node) if node in inner else -1
                                           for node in range(len(tree.parents))])


class StaticDrafting(Drafting):
    """Trees of one shape, whose children are sampled without replacement. Greedy requests get the likeliest ones.

    Where drafts are verified by equality, they are drawn with the noise of the target's own draws: the nearer the
    drafter's probabilities are to the target's, the more likely the two draw the same token.
    """

    def __init__(self, drafter: Drafter, sampling: Sampling, draft_guidance: Tensor, shapes: Shapes, plan: StaticPlan,
                 seed_exact: bool):
        super().__init__(drafter, sampling, draft_guidance, shapes, plan.num_inner)
        self.plan, self.any_greedy, self.seed_exact = plan, bool(sampling.greedy.any()), seed_exact
        if not seed_exact:
            num_drafts = plan.links.depth.shape[1] - 1
            self.uniforms = philox_uniforms(sampling.seeds, DRAFT, self.num_tokens, num_drafts)  # (B, L, N - 1)

    def draft(self, root: Tensor, max_depth: int, max_width: int) -> Draft:
        if not self.seed_exact:
            position = (self.counts - 1)[:, None, None].expand(-1, 1, self.uniforms.shape[2])
            uniforms = self.uniforms.gather(1, position.clamp(max=self.num_tokens - 1))[:, 0]
        tokens, rows, hidden, probs = [root[:, None]], [], self.hidden, self.probs
        for depth, level in enumerate(self.plan.levels, 1):
            F, K = level.uniform_index.shape
            if self.seed_exact:
                positions = (self.counts + (depth - 1))[:, None].expand(-1, F)  # the newest token is at counts - 1
                children = draw_children(probs, seeds=self.sampling.seeds, positions=positions, num_children=K).tokens
            else:
                rows.append(probs)
                drawn_with = uniforms.index_select(1, level.uniform_index.flatten()).unflatten(1, (F, K))
                children = draw_children(probs, drawn_with).tokens
            children = self.greedy_or(children, probs)
            tokens.append(children.flatten(1).index_select(1, level.picked))
            if len(level.inner):
                hidden, probs = self.expand_level(tokens[-1].index_select(1, level.inner),
                                                  hidden.index_select(1, level.parents), level.ancestors, depth)
        tokens = torch.cat(tokens, 1)
        if self.seed_exact:
            return Draft(tokens, self.plan.links, None, None)
        return Draft(tokens, self.plan.links, torch.cat(rows, 1), self.plan.draft_row)

    def greedy_or(self, children: Tensor, probs: Tensor) -> Tensor:
        """The likeliest tokens of greedy requests, the children (B, F, K) of the others; probs (B, F, V)."""
        if not self.any_greedy:
            return children
        B, F, K = children.shape
        width = torch.full((B,), K, dtype=torch.int32, device=probs.device)
        likeliest = expand_tree(probs, probs.new_zeros(B, F), width, num_children=K).tokens
        return torch.where(self.sampling.greedy[:, None, None], likeliest, children)


class DynamicDrafting(Drafting):
    """EAGLE-2's trees: each level continues the likeliest paths, and in the end the likeliest drafts are kept."""

    def __init__(self, drafter: Drafter, sampling: Sampling, draft_guidance: Tensor, shapes: Shapes, num_columns: int,
                 sizes: Tensor, max_nodes: int):
        """sizes (B,) int32: how many nodes each request's tree may keep, the root counted; none has over max_nodes."""
        super().__init__(drafter, sampling, draft_guidance, shapes, num_columns)
        self.sizes, self.max_nodes = sizes, max_nodes

    def draft(self, root: Tensor, max_depth: int, max_width: int) -> Draft:
        (B,), K, device = root.shape, max_width, root.device
        width = self.shapes.width.int()
        hidden, probs, scores = self.hidden, self.probs, torch.zeros(B, 1, device=device)
        parents = torch.full((B, 1), -1, dtype=torch.int32, device=device)  # of the nodes that the drafter has read
        candidates, num_candidates = [], 0                         # of each level: tokens, scores, parents' candidates
        frontier_candidates = torch.full((B, K), -1, dtype=torch.int32, device=device)  # -1: the root, or none
        for level in range(1, max_depth + 1):
            tokens, child_scores, frontier, _ = expand_tree(probs, scores, width, num_children=K)
            F = tokens.shape[1]
            origin = frontier_candidates[:, :F, None].expand(B, F, K).reshape(B, F * K)
            tokens, child_scores = tokens.flatten(1), child_scores.flatten(1)
            candidates.append((tokens, child_scores, origin))
            if level == max_depth:
                break
            # The frontier is the best K of the F * K children. The drafter reads it, to draft the next level.
            unused = (frontier < 0) | (self.shapes.depth <= level)[:, None]                      # (B, K)
            chosen = frontier.clamp(min=0).long()
            parent = chosen // K                                                                 # which of the F nodes
            parents = torch.cat([parents, torch.where(unused, -2, parent + parents.shape[1] - F).int()], 1)
            frontier_candidates = torch.where(unused, -1, frontier + num_candidates)
            num_candidates += F * K
            scores = child_scores.gather(1, chosen).masked_fill(unused, -torch.inf)
            parent_hidden = hidden.gather(1, repeat_for_cfg(parent[..., None].expand(-1, -1, hidden.shape[-1])))
            hidden, probs = self.expand_level(tokens.gather(1, chosen), parent_hidden, tree_links(parents).ancestors,
                                              level)
        tokens, scores, origin = (torch.cat(part, 1) for part in zip(*candidates))
        num_nodes = min(self.max_nodes, 1 + max_width + (max_depth - 1) * max_width ** 2)
        tree = select_tree(tokens, scores, origin, root, self.sizes, num_nodes=num_nodes)
        return Draft(tree.tokens, tree_links(tree.parents), None, None)


def new_drafting(drafter: Drafter, sampling: Sampling, methods: list[Method], grid: int) -> Drafting:
    """The drafting that the methods stand for, one for each request and all of one `Method.family`."""
    base, seeds, L = methods[0], sampling.seeds, grid ** 2

    def of_each(value, dtype=torch.int64):
        return torch.tensor([value(m) for m in methods], dtype=dtype, device=seeds.device)

    draft_guidance, max_depth = of_each(lambda m: m.draft_guidance, torch.float32), of_each(lambda m: m.max_depth)
    if base.drafting == "static":
        plan = StaticPlan(static_tree(base.tree), len(methods), seeds.device)
        shapes = Shapes(max_depth, max_depth, max_depth, grid)
        return StaticDrafting(drafter, sampling, draft_guidance, shapes, plan, base.seed_exact)
    shapes = Shapes(of_each(lambda m: m.depth), of_each(lambda m: m.width), of_each(lambda m: m.nodes - 1), grid,
                    base.adaptation, philox_uniforms(seeds, SHAPE, L, 2))
    num_columns = 1 + max(m.max_depth for m in methods) * max(m.max_width for m in methods)
    return DynamicDrafting(drafter, sampling, draft_guidance, shapes, num_columns,
                           of_each(lambda m: m.nodes, torch.int32), max(m.max_nodes for m in methods))
