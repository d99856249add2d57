"""The decoding loop, read downwards: settings, one draw, plain decoding, drafting, speculative decoding.

Every request of a batch has a seed, a guidance and a temperature of its own, and is one pair of model rows:
row b reads the caption, row B + b nothing, and guidance moves from the one towards the other.
"""
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from specvis_kernels import (INVALID_ROW, draw_children, expand_tree, guided_probs, select_tree, tree_links, tree_mask,
                             verify_tree)

from .drafters import Eagle, Independent
from .methods import Method
from ..models.layers import Cache
from ..models.llamagen import GPT, condition_mask
from .bounds import chain_bound, optimal_residual, scaled, vanilla_residual
from .trees import Shapes, StaticTree, static_tree
from .sampling import ACCEPT, DRAFT, SHAPE, philox_uniform


@dataclass(frozen=True)
class Sampling:
    """How each of B requests draws its tokens."""

    seeds: Tensor        # (B,) int64
    guidance: Tensor     # (B,) float32   1 is none
    temperature: Tensor  # (B,) float32   0 is greedy
    top_k: Tensor        # (B,) int32     0 is off
    top_p: Tensor        # (B,) float32   1 is off

    @staticmethod
    def of(seeds: list[int], *, guidance: float | list[float] = 2.0, temperature: float | list[float] = 1.0,
           top_k: int | list[int] = 0, top_p: float | list[float] = 1.0,
           device: torch.device | str = "cpu") -> "Sampling":
        """The same number for all requests, or a list of one for each.

        Raises:
            ValueError: temperature < 0, top_k < 0, top_p outside (0, 1], guidance not finite, a list of another length
        """
        def each(name, value, dtype, holds, wanted):
            values = list(value) if isinstance(value, (list, tuple)) else [value] * len(seeds)
            if len(values) != len(seeds):
                raise ValueError(f"{name} must be one number or {len(seeds)}, one for each seed, got {len(values)}")
            for one in values:
                if not holds(one):
                    raise ValueError(f"{name} must be {wanted}, got {one}")
            return torch.tensor(values, dtype=dtype, device=device)

        infinity = float("inf")
        return Sampling(
            torch.tensor(seeds, dtype=torch.int64, device=device),
            each("guidance", guidance, torch.float32, lambda x: abs(x) < infinity, "a finite number"),
            each("temperature", temperature, torch.float32, lambda x: 0 <= x < infinity, "at least 0 and finite"),
            each("top_k", top_k, torch.int32, lambda x: x >= 0, "at least 0"),
            each("top_p", top_p, torch.float32, lambda x: 0 < x <= 1, "within (0, 1]"))

    def __getitem__(self, requests: list[int]) -> "Sampling":
        return Sampling(*(getattr(self, field.name)[requests] for field in fields(Sampling)))

    def probs(self, model: GPT, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states (2B, N, dim) -> guided probabilities (B, N, V), status (B, N)."""
        conditional, unconditional = model.logits(hidden).chunk(2)
        return guided_probs(conditional, unconditional, self.guidance, self.temperature, self.top_k, self.top_p)

    @property
    def greedy(self) -> Tensor:
        return self.temperature == 0


@dataclass
class Decoded:
    """What decoding gave, for B images of L tokens."""

    tokens: Tensor    # (B, L) int64
    forwards: Tensor  # (B,) int64    target forwards, the one that read the condition counted
    accepted: Tensor  # (B, L) int64  drafts accepted by the step whose first token stands here; -1: no step began here
    drafted: Tensor   # (B, L) int64  levels that this step drafted, as far as the image goes; 0 where none began
    excess: Tensor    # (B,) float32  fidelity meter, summed over the image's tokens
    bound: Tensor     # (B,) float32  its bound for sampled chains, COOL-SD's eq. (4), summed likewise; NaN: not known
    failed: Tensor    # (B,) bool     the logits were not finite: the image ended there, its other tokens are 0

    @property
    def tau(self) -> Tensor:
        """(B,) tokens per target forward; 1 is plain decoding; NaN for a failed image."""
        return (self.tokens.shape[1] / self.forwards).masked_fill(self.failed, torch.nan)

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts per drafted level, over all steps of all images."""
        return (self.accepted.clamp(min=0).sum() / self.drafted.sum().clamp(min=1)).item()

    @staticmethod
    def merged(parts: "list[Decoded]", order: Tensor) -> "Decoded":
        """The images of all parts, of which the i-th goes to place order[i]."""
        back = order.argsort()
        return Decoded(*(torch.cat([getattr(part, field.name) for part in parts])[back] for field in fields(Decoded)))


Progress = Callable[[int], None]  # called with how many tokens the batch has just gained


@dataclass
class Step:
    """What one step of speculative decoding did, for an observer."""

    links: "Links"     # of the trees
    first: Tensor      # (B,) int64     the position that it decided first
    path: Tensor       # (B, P) int32   accepted nodes, -1 behind them
    accepted: Tensor   # (B,) int32     how many
    going: Tensor      # (B,) bool      the images that were not finished before


Observer = Callable[[Step], None]


def check_request(gpt: GPT, condition: Tensor, valid: Tensor, sampling: Sampling) -> None:
    """Raise ValueError unless the condition is (B, S, dim) with B seeds and a (B, S) mask, B >= 1."""
    c = gpt.config
    if condition.ndim != 3 or condition.shape[1:] != (c.condition_tokens, c.dim):
        raise ValueError(f"condition must be (B, S={c.condition_tokens}, dim={c.dim}), got {tuple(condition.shape)}")
    if len(condition) < 1 or len(condition) != len(sampling.seeds):
        raise ValueError(f"condition must have one row per seed and at least one, "
                         f"got {len(condition)} rows and {len(sampling.seeds)} seeds")
    if valid.shape != condition.shape[:2] or valid.dtype != torch.bool:
        raise ValueError(f"valid must be bool (B={len(condition)}, S={c.condition_tokens}), "
                         f"got {str(valid.dtype)[6:]} {tuple(valid.shape)}")


def draw(probs: Tensor, uniforms: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row: verification of a tree that is only its root.

    Args:
        probs (B, V), uniforms (B,), greedy (B,) bool
    Returns:
        tokens (B,) int64, status (B,) int32
    """
    none = torch.full((len(probs), 1), -1, dtype=torch.int32, device=probs.device)
    _, _, token, _, status = verify_tree(probs[:, None], none.long().clamp(min=0), none, none, uniforms[:, None],
                                         greedy=greedy, P=1)
    return token, status


def guidance_pair(gpt: GPT, condition: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Condition (B, S, dim) and mask (B, S) stacked upon the null condition under the same mask, as LlamaGen does."""
    return torch.cat([condition, gpt.null_condition(len(condition))]), twice(valid)


def twice(x: Tensor) -> Tensor:
    """(B, ...) -> (2B, ...): the same for the row with the caption and the row without."""
    return torch.cat([x, x])


def visible(valid: Tensor, mask: Tensor) -> Tensor:
    """mask (B, N, T) for both rows of each request, less the padded conditions of `valid` (2B, S): (2B, N, T)."""
    mask = twice(mask)
    mask[:, :, : valid.shape[1]] &= valid[:, None]
    return mask


def read_condition(gpt: GPT, condition: Tensor, valid: Tensor, cache: Cache) -> Tensor:
    """Fill the cache with the condition (2B, S, dim); hidden states (2B, S, dim)."""
    slots = torch.arange(condition.shape[1], device=condition.device)[None].expand(len(condition), -1)
    return gpt(condition, slots, condition_mask(valid, condition.shape[1]), cache, slots)


@torch.inference_mode()
def decode(gpt: GPT, condition: Tensor, valid: Tensor, sampling: Sampling, progress: Progress | None = None) -> Decoded:
    """Plain decoding: a target forward for each token.

    Args:
        condition: (B, S, dim)  `gpt.condition(...)`
        valid:     (B, S) bool
    """
    check_request(gpt, condition, valid, sampling)
    B, S, L, device = len(condition), gpt.config.condition_tokens, gpt.config.tokens, condition.device
    condition, valid = guidance_pair(gpt, condition, valid)
    cache = gpt.new_cache(2 * B, S + L)
    uniforms = philox_uniform(sampling.seeds, ACCEPT, L, 1)
    tokens = torch.zeros(B, L, dtype=torch.int64, device=device)
    failed = torch.zeros(B, dtype=torch.bool, device=device)

    hidden = read_condition(gpt, condition, valid, cache)[:, -1:]
    for i in range(L):
        if i > 0:
            slots = torch.full((2 * B, 1), S + i - 1, device=device)
            mask = torch.ones(B, 1, S + i, dtype=torch.bool, device=device)
            hidden = gpt(twice(gpt.tok_embeddings(tokens[:, i - 1: i])), slots, visible(valid, mask), cache, slots)
        probs, _ = sampling.probs(gpt, hidden)
        token, status = draw(probs[:, 0], uniforms[:, i, 0], sampling.greedy)
        failed |= (status & INVALID_ROW) != 0
        tokens[:, i] = token.masked_fill(failed, 0)
        if progress:
            progress(B)
    none = torch.zeros(B, L, dtype=torch.int64)
    return Decoded(tokens, torch.full((B,), L), none, none, torch.zeros(B), torch.zeros(B), failed.cpu())


Links = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # what tree_links says of a tree


@dataclass
class Draft:
    """A tree for each request, its root the last token, and the rows that its children were drawn from."""

    tokens: Tensor           # (B, N) int64
    links: Links             # of its nodes
    probs: Tensor | None     # (B, M, V) float32; None: the children are a deterministic choice
    rows: Tensor | None      # (B, N) int32   row of `probs` of a node's children


class StaticPlan:
    """The steps by which a static tree is drafted, level by level, as indices on the device."""

    @dataclass
    class Level:
        children: int      # the most that a node has
        columns: Tensor    # (F, K) int64  the node that each child becomes, less one; 0 where there is no such child
        picked: Tensor     # (nodes of the level,) int64  which of the F * K children they are
        expanded: Tensor   # (F',) int64  which nodes of the level have children
        mothers: Tensor    # (F',) int64  which of the F nodes above they stand on
        ancestors: Tensor  # (B, n, W) int64  of all nodes that the drafter has read then

    def __init__(self, tree: StaticTree, batch: int, device: torch.device):
        def indices(numbers):
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        def rows(numbers):
            return torch.tensor(numbers, dtype=torch.int32, device=device).expand(batch, -1)

        self.levels, read, parents = [], [0], [-1]  # read: nodes that the drafter has read
        above = [0]
        for depth in range(1, tree.depth + 1):
            families = [tree.children(node) for node in above]
            K = max(map(len, families))
            expanded = [node for node in tree.level(depth) if tree.children(node)]
            parents += [read.index(tree.parents[node]) for node in expanded]
            read += expanded
            self.levels.append(self.Level(
                K, indices([[node - 1 for node in family] + [0] * (K - len(family)) for family in families]),
                indices([f * K + j for f, family in enumerate(families) for j in range(len(family))]),
                indices([tree.level(depth).index(node) for node in expanded]),
                indices([above.index(tree.parents[node]) for node in expanded]),
                tree_links(rows(parents))[0]))
            above = expanded
        self.links, self.read = tree_links(rows(tree.parents)), len(read)
        self.draft_rows = rows([read.index(n) if n in read else -1 for n in range(len(tree.parents))])


class Drafting:
    """The drafter at work on a batch: its cache, and the distribution after the newest token."""

    def __init__(self, drafter: Eagle | Independent, sampling: Sampling, share: Tensor, tokens: int, room: int):
        """share (B,): of the guidance, for the drafter; tokens: of an image; room: columns that a draft needs."""
        self.drafter, self.tokens = drafter, tokens
        self.sampling = replace(sampling, guidance=torch.lerp(torch.ones_like(share), sampling.guidance, share))
        self.shown, self.valid = drafter.shown, drafter.valid
        self.cache = drafter.new_cache(self.shown + tokens + room)
        self.any_greedy = bool(sampling.greedy.any())

    def read_tokens(self, tokens: Tensor, hidden: Tensor, before: Tensor, new: Tensor, longest: int) -> None:
        """Take in the tokens that were just emitted.

        Args:
            tokens:  (B, A) int64      new tokens of each request, then padding
            hidden:  (2B, A, dim)      the target's hidden state before each
            before:  (B,) int64        how many tokens each request had
            new:     (B,) int64        how many of `tokens` are new, at least 1
            longest: the most tokens that any request had
        """
        B, A = tokens.shape
        places = self.shown + before[:, None] + torch.arange(A, device=tokens.device)   # (B, A)
        columns = self.shown + longest + A
        mask = torch.arange(columns, device=tokens.device) <= places[..., None]         # (B, A, T)
        out = self.drafter.read(twice(tokens), hidden, twice(places), visible(self.valid, mask), self.cache,
                                twice(places))
        last = twice((new - 1)[:, None, None].expand(-1, -1, out.shape[-1]))
        self.count = (before + new).clamp(max=self.tokens)
        self.columns = self.shown + min(longest + A, self.tokens)
        self.hidden = out.gather(1, last)                                               # (2B, 1, dim)
        self.probs = self.sampling.probs(self.drafter.head, self.hidden)[0]             # (B, 1, V)

    def deepen(self, tokens: Tensor, hidden: Tensor, ancestors: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Read one level of the tree.

        Args:
            tokens:    (B, F) int64      its nodes: the last F of `ancestors`
            hidden:    (2B, F, dim)      the drafter's hidden states at their parents
            ancestors: (B, n, W) int64   of all nodes so far; node 0 is the newest token
            level:     1 for children of the newest token

        Returns:
            hidden states (2B, F, dim), probabilities (B, F, V)
        """
        n, F = ancestors.shape[1], tokens.shape[1]
        root = (self.shown + self.count - 1).int()                                      # the newest token's column
        mask = tree_mask(ancestors, root, columns=self.columns + n)[:, n - F:]
        slots = root[:, None] + torch.arange(n - F, n, device=root.device)
        places = (self.shown + self.count - 1 + level)[:, None].expand(-1, F)
        out = self.drafter.read(twice(tokens), hidden, twice(places), visible(self.valid, mask), self.cache,
                                twice(slots))
        return out, self.sampling.probs(self.drafter.head, out)[0]

    def static(self, root: Tensor, plan: StaticPlan, uniforms: Tensor) -> Draft:
        """A static tree after root (B,), its children sampled without replacement (greedy requests: the likeliest).

        uniforms (B, L, N - 1): one for each node but the root.
        """
        B = len(root)
        position = (self.count - 1)[:, None, None].expand(-1, 1, uniforms.shape[2])
        coins = uniforms.gather(1, position.clamp(max=uniforms.shape[1] - 1))[:, 0]
        tokens, rows, hidden, probs = [root[:, None]], [], self.hidden, self.probs
        for depth, level in enumerate(plan.levels, 1):
            rows.append(probs)
            F, K = level.columns.shape
            children = draw_children(probs, coins[:, level.columns])[0]
            if self.any_greedy:
                scores, width = probs.new_zeros(B, F), torch.full((B,), K, dtype=torch.int32, device=root.device)
                likeliest = expand_tree(probs, scores, width, K=K)[0]
                children = torch.where(self.sampling.greedy[:, None, None], likeliest, children)
            tokens.append(children.flatten(1)[:, level.picked])
            if len(level.expanded):
                hidden, probs = self.deepen(tokens[-1][:, level.expanded], hidden[:, level.mothers], level.ancestors,
                                            depth)
        return Draft(torch.cat(tokens, 1), plan.links, torch.cat(rows, 1), plan.draft_rows)

    def dynamic(self, root: Tensor, shapes: Shapes, nodes: Tensor, deepest: int, widest: int, N: int) -> Draft:
        """EAGLE-2's tree after root (B,): each level expands the likeliest paths, the likeliest nodes of all are kept.

        Args:
            shapes:  depth and width for each request; deepest and widest: the most of them
            nodes:   (B,) int32  the most nodes to keep, at most N
        """
        B, K, device = len(root), widest, root.device
        width = shapes.width.int()
        parents = torch.full((B, 1), -1, dtype=torch.int32, device=device)
        above = torch.full((B, K), -1, dtype=torch.int32, device=device)    # candidates that the frontier stands on
        hidden, probs, scores = self.hidden, self.probs, torch.zeros(B, 1, device=device)
        candidates = []
        for level in range(1, deepest + 1):
            tokens, child_scores, frontier, _ = expand_tree(probs, scores, width, K=K)
            F = tokens.shape[1]
            from_candidate = above[:, :F, None].expand(B, F, K).reshape(B, F * K)
            candidates.append((tokens.flatten(1), child_scores.flatten(1), from_candidate))
            if level == deepest:
                break
            unused = (frontier < 0) | (shapes.depth <= level)[:, None]             # (B, K)
            chosen = frontier.clamp(min=0).long()
            mother = chosen // K                                                   # node of this level's F
            first = parents.shape[1] - F                                           # its number in the drafter's tree
            parents = torch.cat([parents, torch.where(unused, -2, mother + first).int()], 1)
            offset = sum(c[0].shape[1] for c in candidates[:-1])
            above = torch.where(unused, -1, frontier + offset)
            scores = child_scores.flatten(1).gather(1, chosen).masked_fill(unused, -torch.inf)
            hidden = hidden.gather(1, twice(mother[..., None].expand(-1, -1, hidden.shape[-1])))
            hidden, probs = self.deepen(tokens.flatten(1).gather(1, chosen), hidden, tree_links(parents)[0], level)
        tokens, scores, origin = (torch.cat(part, 1) for part in zip(*candidates))
        tokens, parents, _, _ = select_tree(tokens, scores, origin, root, nodes, N=N)
        return Draft(tokens, tree_links(parents), None, None)


@torch.inference_mode()
def speculative_decode(gpt: GPT, drafter: Eagle | Independent, condition: Tensor, valid: Tensor, sampling: Sampling,
                       methods: list[Method], neighbors: Tensor | None = None, progress: Progress | None = None,
                       observe: Observer | None = None) -> Decoded:
    """Draft a tree, read it with the target in one forward, accept a path, commit it; until every image is whole.

    A NaN that the target puts into its cache ends its image, be the draft accepted or not.

    Args:
        drafter:   of both rows of each request, see `guidance_pair`
        condition: (B, S, dim)  `gpt.condition(...)`
        valid:     (B, S) bool
        methods:   one for each request, all of one `Method.family`
        neighbors: (V, k) uint16 or int32  `codebook_neighbors(...)`; needed where k > 0
        observe:   called after every step, with tensors that it must not change
    """
    check_request(gpt, condition, valid, sampling)
    check_methods(methods, len(condition))
    B, S, L, device = len(condition), gpt.config.condition_tokens, gpt.config.tokens, condition.device
    base, P = methods[0], max(m.levels for m in methods)
    most = N = max(m.tree_nodes for m in methods)
    rule = acceptance_rule(methods, neighbors, gpt.config.vocabulary, P, device)
    condition, valid = guidance_pair(gpt, condition, valid)
    cache = gpt.new_cache(2 * B, S + L + N)
    uniforms = philox_uniform(sampling.seeds, ACCEPT, L, N)
    tokens = torch.zeros(B, L + P + 1, dtype=torch.int64, device=device)   # behind L: scratch
    accepted_at = torch.full((B, L), -1, dtype=torch.int64, device=device)
    drafted_at = torch.zeros(B, L, dtype=torch.int64, device=device)
    excess = torch.zeros(B, device=device)

    def of_each(what, dtype=torch.int64):
        return torch.tensor([what(m) for m in methods], dtype=dtype, device=device)

    if base.drafting == "static":
        plan = StaticPlan(static_tree(base.tree), B, device)
        shapes = Shapes(*(of_each(lambda m: m.levels) for _ in range(3)), gpt.config.grid)
        draft_uniforms, room = philox_uniform(sampling.seeds, DRAFT, L, N - 1), plan.read
    else:
        shapes = Shapes(of_each(lambda m: m.depth), of_each(lambda m: m.width), of_each(lambda m: m.nodes - 1),
                        gpt.config.grid, base.adaptation, philox_uniform(sampling.seeds, SHAPE, L, 2))
        nodes = of_each(lambda m: m.nodes, torch.int32)
        room = 1 + P * max(m.widest for m in methods)

    hidden = read_condition(gpt, condition, valid, cache)
    drafting = Drafting(drafter, sampling, of_each(lambda m: m.draft_guidance, torch.float32), L, room)
    drafter.read_condition(hidden, drafting.cache)
    probs, _ = sampling.probs(gpt, hidden[:, -1:])
    root, status = draw(probs[:, 0], uniforms[:, 0, 0], sampling.greedy)
    failed = (status & INVALID_ROW) != 0
    tokens[:, 0] = root
    count = torch.ones(B, dtype=torch.int64, device=device)               # tokens emitted
    forwards = torch.ones(B, dtype=torch.int64, device=device)
    drafting.read_tokens(root[:, None], hidden[:, -1:], count - 1, count, 0)

    counts, deepest, widest = [1] * B, shapes.depth.max().item(), shapes.width.max().item()
    each, chain = torch.arange(B, device=device), base.drafting == "static" and static_tree(base.tree).is_chain
    lossless = of_each(lambda m: m.lossless, torch.bool)
    bounded = chain and not base.k and not all(m.lossless for m in methods)
    bound = torch.where(lossless | ~sampling.greedy & bounded, 0.0, torch.nan)
    if progress:
        progress(B)
    while min(counts) < L:
        if base.drafting == "static":
            draft = drafting.static(root, plan, draft_uniforms)
        else:
            N = min(most, 1 + widest + (deepest - 1) * widest ** 2)
            draft = drafting.dynamic(root, shapes, nodes, deepest, widest, N)
        columns = S + max(counts) + N
        ancestors, depth, first_child, next_sibling, _ = draft.links
        room = (L - 1 - count)[:, None]                                   # drafts before the token that is drawn
        first_child = torch.where(depth < room, first_child, -1)
        lengths = S + count - 1                                           # the root's column
        slots = lengths[:, None] + torch.arange(N, device=device)
        mask = visible(valid, tree_mask(ancestors, lengths.int(), columns=columns))
        places = lengths[:, None] + depth.clamp(min=0)
        hidden = gpt(twice(gpt.tok_embeddings(draft.tokens)), twice(places), mask, cache, twice(slots))
        probs, invalid = sampling.probs(gpt, hidden)
        here = count.clamp(max=L - 1)                                     # the position that this step decides first
        coins = uniforms[:, :, :N].gather(1, here[:, None, None].expand(-1, 1, N))[:, 0]
        path, accepted, next_token, distance, _ = verify_tree(
            probs, draft.tokens, first_child, next_sibling, coins, draft_probs=draft.probs, draft_row=draft.rows,
            greedy=sampling.greedy, P=P, **rule)

        going = (count < L) & ~failed
        accepted_at[each, here] = torch.where(going, accepted.long(), accepted_at[each, here])
        drafted_at[each, here] = torch.where(going, shapes.depth.minimum(room[:, 0]), drafted_at[each, here])
        excess += distance * going
        if observe:
            observe(Step(draft.links, here, path, accepted, going))
        if bounded:
            residual = optimal_residual if base.residual == "optimal" else vanilla_residual
            accepts = [scaled(rule["omega"][:, i:i + 1].double()) for i in range(P)]
            levels = torch.where(lossless | ~going, 0, room[:, 0])
            bound += chain_bound(probs[:, :P], draft.probs, draft.tokens[:, 1:], accepts, residual, levels)
        forwards += going
        if not chain:  # the path moves to the front of the cache; behind its end every column is copied onto itself
            order = torch.arange(P, device=device)
            target = lengths[:, None] + 1 + order
            source = torch.where(order < accepted[:, None], lengths[:, None] + path, target)
            cache.move(twice(source), twice(target))
        # New tokens: the path's, then the drawn one, and the hidden state before each.
        nodes_of_path = torch.cat([torch.zeros_like(path[:, :1]), path.clamp(min=0)], 1).long()   # (B, P + 1)
        fresh = torch.cat([draft.tokens.gather(1, nodes_of_path[:, 1:]), next_token[:, None]], 1)
        end = accepted[:, None].long()
        fresh = fresh.scatter(1, end, next_token[:, None]).masked_fill(torch.arange(P + 1, device=device) > end, 0)
        before = hidden.gather(1, twice(nodes_of_path[..., None].expand(-1, -1, hidden.shape[-1])))
        where = count.clamp(max=L)[:, None] + torch.arange(P + 1, device=device)
        tokens.scatter_(1, where, torch.where(going[:, None], fresh, tokens.gather(1, where)))
        failed |= going & (invalid.gather(1, nodes_of_path.gather(1, end))[:, 0] != 0)
        gained = torch.where(going, accepted + 1, 0)
        old, count = count, torch.where(failed, L, (count + gained).clamp(max=L))
        root = torch.where(going, next_token, root)
        shapes.record(here, accepted.long(), (count < L) & ~failed)
        drafting.read_tokens(fresh, before, old.clamp(max=L - 1), (accepted + 1).long(), min(max(counts), L - 1))

        news, depths, widths = torch.stack([count, shapes.depth, shapes.width]).tolist()  # the step's one host read
        if progress:
            progress(sum(news) - sum(counts))
        counts, deepest, widest = news, max(depths), max(widths)
    accounts = (forwards, accepted_at, drafted_at, excess, bound, failed)
    return Decoded(tokens[:, :L], *(account.cpu() for account in accounts))


def check_methods(methods: list[Method], batch: int) -> None:
    """Raise ValueError unless there is a speculative method for each request, all of one family."""
    if len(methods) != batch:
        raise ValueError(f"methods must be one for each of the {batch} requests, got {len(methods)}")
    for m in methods:
        if m.drafting == "none" or m.family != methods[0].family:
            raise ValueError("methods must be speculative and of one family (Method.family), "
                             f"got {methods[0].name} and {m.name}")


def acceptance_rule(methods: list[Method], neighbors: Tensor | None, vocabulary: int, P: int,
                    device: torch.device) -> dict:
    """The keyword arguments of verify_tree that methods of one family stand for; P: levels."""
    base = methods[0]
    rule = {"residual": base.residual}
    if any(omega != 1 for m in methods for omega in m.omegas):
        padded = [[*m.omegas, *[1.0] * (P - m.levels)] for m in methods]
        rule["omega"] = torch.tensor(padded, dtype=torch.float32, device=device)
    if not base.k:
        return rule
    if neighbors is None or neighbors.shape[0] != vocabulary or neighbors.shape[1] < base.columns:
        have = "none" if neighbors is None else tuple(neighbors.shape)
        raise ValueError(f"neighbors must be a table of V={vocabulary} rows and at least k={base.columns} columns for "
                         f"{base.name}, got {have}")
    return rule | {"neighbors": neighbors[:, : base.columns].contiguous(), "kind": base.kind,
                   "cutoff": torch.tensor([m.delta for m in methods], dtype=torch.float32, device=device)}
