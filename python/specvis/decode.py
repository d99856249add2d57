"""The decoding loop, read downwards: settings, one draw, plain decoding, drafting, speculative decoding.

Every request of a batch has a seed, a guidance and a temperature of its own, and is one pair of model rows:
row b reads the caption, row B + b nothing, and guidance moves from the one towards the other.
"""
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specvis_kernels import (INVALID_ROW, expand_tree, guided_probs, sample_residual, select_tree, tree_links,
                             tree_mask, verify_tree)

from .methods import Method
from .models.eagle import Drafter
from .models.layers import Cache
from .models.llamagen import GPT, condition_mask
from .uniforms import ACCEPT, DRAFT, philox_uniform


@dataclass(frozen=True)
class Sampling:
    """How each of B requests draws its tokens."""

    seeds: Tensor        # (B,) int64
    guidance: Tensor     # (B,) float32   1 is none
    temperature: Tensor  # (B,) float32   0 is greedy
    top_k: Tensor        # (B,) int32     0 is off
    top_p: Tensor        # (B,) float32   1 is off

    @staticmethod
    def of(seeds: list[int], *, guidance: float = 2.0, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
           device: torch.device | str = "cpu") -> "Sampling":
        """The same numbers for all requests.

        Raises:
            ValueError: temperature < 0, top_k < 0, top_p outside (0, 1], guidance not finite
        """
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0 and finite, got {temperature}")
        if top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {top_k}")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be within (0, 1], got {top_p}")
        if not abs(guidance) < float("inf"):
            raise ValueError(f"guidance must be a finite number, got {guidance}")

        def each(value, dtype):
            return torch.full((len(seeds),), value, dtype=dtype, device=device)

        return Sampling(torch.tensor(seeds, dtype=torch.int64, device=device), each(guidance, torch.float32),
                        each(temperature, torch.float32), each(top_k, torch.int32), each(top_p, torch.float32))

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
    excess: Tensor    # (B,) float32  fidelity meter, summed over the image's tokens
    failed: Tensor    # (B,) bool     the logits were not finite: the image ended there, its other tokens are 0

    @property
    def tau(self) -> Tensor:
        """(B,) tokens per target forward; 1 is plain decoding; NaN for a failed image."""
        return (self.tokens.shape[1] / self.forwards).masked_fill(self.failed, torch.nan)

    def acceptance_rate(self, depth: int) -> float:
        """Accepted drafts per drafted level that could be, over all steps of all images."""
        steps = self.accepted >= 0
        left = torch.arange(self.accepted.shape[1] - 1, -1, -1).clamp(max=depth)  # no draft stands for the last token
        return (self.accepted[steps].sum() / (steps * left).sum().clamp(min=1)).item()


Progress = Callable[[int], None]  # called with how many tokens the batch has just gained


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
    return Decoded(tokens, torch.full((B,), L), torch.zeros(B, L, dtype=torch.int64), torch.zeros(B), failed.cpu())


@dataclass
class Draft:
    """A tree for each request, its root the last token, and the rows that its children were drawn from."""

    tokens: Tensor           # (B, N) int64
    parents: Tensor          # (B, N) int32   -1 the root, -2 unused
    probs: Tensor | None     # (B, M, V) float32; None: the children are a deterministic choice
    rows: Tensor | None      # (B, N) int32   row of `probs` of a node's children


class Drafting:
    """The drafter at work on a batch: its cache, and the distribution after the newest token."""

    def __init__(self, gpt: GPT, drafter: Drafter, sampling: Sampling, method: Method, valid: Tensor):
        self.gpt, self.drafter, self.sampling, self.method = gpt, drafter, sampling, method
        self.shown = gpt.config.condition_tokens - 1  # the drafter is one position behind the target
        self.valid = valid[:, : self.shown]
        self.tokens = gpt.config.tokens
        drafted = 1 + method.depth * max(1, method.width)
        self.cache = drafter.new_cache(len(valid), self.shown + self.tokens + drafted)
        self.uniforms = philox_uniform(sampling.seeds, DRAFT, self.tokens, method.depth)

    def read_condition(self, hidden: Tensor) -> None:
        """Fill the cache with the condition; hidden (2B, S, dim) are the target's states there."""
        if self.shown:
            places = torch.arange(self.shown, device=hidden.device)[None].expand(len(hidden), -1)
            self.drafter(torch.zeros_like(places), hidden[:, : self.shown], places,
                         condition_mask(self.valid, self.shown), self.cache, places)

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
        out = self.drafter(twice(tokens), hidden, twice(places), visible(self.valid, mask), self.cache, twice(places))
        last = twice((new - 1)[:, None, None].expand(-1, -1, out.shape[-1]))
        self.count = (before + new).clamp(max=self.tokens)
        self.columns = self.shown + min(longest + A, self.tokens)
        self.hidden = out.gather(1, last)                                               # (2B, 1, dim)
        self.probs = self.sampling.probs(self.gpt, self.hidden)[0]                      # (B, 1, V)

    def deepen(self, tokens: Tensor, hidden: Tensor, parents: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Read one level of the tree.

        Args:
            tokens:  (B, F) int64      its nodes: the last F of `parents`
            hidden:  (2B, F, dim)      the drafter's hidden states at their parents
            parents: (B, 1 + n) int32  of all nodes so far; node 0 is the newest token
            level:   1 for children of the newest token

        Returns:
            hidden states (2B, F, dim), probabilities (B, F, V)
        """
        n, F = parents.shape[1], tokens.shape[1]
        ancestors = tree_links(parents)[0]
        root = (self.shown + self.count - 1).int()                                      # the newest token's column
        mask = tree_mask(ancestors, root, columns=self.columns + n)[:, n - F:]
        slots = root[:, None] + torch.arange(n - F, n, device=root.device)
        places = (self.shown + self.count - 1 + level)[:, None].expand(-1, F)
        out = self.drafter(twice(tokens), hidden, twice(places), visible(self.valid, mask), self.cache,
                           twice(slots))
        return out, self.sampling.probs(self.gpt, out)[0]

    def chain(self, root: Tensor) -> Draft:
        """`depth` tokens in a row, each sampled (greedy requests: the likeliest), after root (B,)."""
        B, depth = len(root), self.method.depth
        parents = torch.arange(-1, depth, dtype=torch.int32, device=root.device).expand(B, -1)
        position = (self.count - 1)[:, None, None].expand(-1, 1, depth)
        uniforms = self.uniforms.gather(1, position.clamp(max=self.uniforms.shape[1] - 1))[:, 0]  # (B, depth)
        tokens, rows, hidden = [root], [self.probs], self.hidden
        for level in range(1, depth + 1):
            tokens.append(draw(rows[-1][:, 0], uniforms[:, level - 1], self.sampling.greedy)[0])
            if level < depth:
                hidden, probs = self.deepen(tokens[-1][:, None], hidden, parents[:, : level + 1].contiguous(), level)
                rows.append(probs)
        row = torch.arange(depth + 1, dtype=torch.int32, device=root.device).expand(B, -1)
        return Draft(torch.stack(tokens, 1), parents, torch.cat(rows, 1), torch.where(row < depth, row, -1))

    def tree(self, root: Tensor) -> Draft:
        """EAGLE-2's dynamic tree: each level expands the likeliest paths; the likeliest nodes of all are kept."""
        B, K, device = len(root), self.method.width, root.device
        width = torch.full((B,), K, dtype=torch.int32, device=device)
        parents = torch.full((B, 1), -1, dtype=torch.int32, device=device)
        above = torch.full((B, K), -1, dtype=torch.int32, device=device)    # candidates that the frontier stands on
        hidden, probs, scores = self.hidden, self.probs, torch.zeros(B, 1, device=device)
        candidates = []
        for level in range(1, self.method.depth + 1):
            tokens, child_scores, frontier, _ = expand_tree(probs, scores, width, K=K)
            F = tokens.shape[1]
            from_candidate = above[:, :F, None].expand(B, F, K).reshape(B, F * K)
            candidates.append((tokens.flatten(1), child_scores.flatten(1), from_candidate))
            if level == self.method.depth:
                break
            unused, chosen = frontier < 0, frontier.clamp(min=0).long()                # (B, K)
            mother = chosen // K                                                   # node of this level's F
            first = parents.shape[1] - F                                           # its number in the drafter's tree
            parents = torch.cat([parents, torch.where(unused, -2, mother + first).int()], 1)
            offset = sum(c[0].shape[1] for c in candidates[:-1])
            above = torch.where(unused, -1, frontier + offset)
            scores = child_scores.flatten(1).gather(1, chosen).masked_fill(unused, -torch.inf)
            hidden = hidden.gather(1, twice(mother[..., None].expand(-1, -1, hidden.shape[-1])))
            hidden, probs = self.deepen(tokens.flatten(1).gather(1, chosen), hidden, parents, level)
        tokens, scores, origin = (torch.cat(part, 1) for part in zip(*candidates))
        size = torch.full((B,), self.method.tree_nodes, dtype=torch.int32, device=device)
        tokens, parents, _, _ = select_tree(tokens, scores, origin, root, size, N=self.method.tree_nodes)
        return Draft(tokens, parents, None, None)


@torch.inference_mode()
def speculative_decode(gpt: GPT, drafter: Drafter, condition: Tensor, valid: Tensor, sampling: Sampling, method: Method,
                       neighbors: Tensor | None = None, progress: Progress | None = None) -> Decoded:
    """Draft a tree, read it with the target in one forward, accept a path, commit it; until every image is whole.

    A NaN that the target computes anywhere in a tree ends its image, be the draft accepted or not.

    Args:
        condition: (B, S, dim)  `gpt.condition(...)`
        valid:     (B, S) bool
        neighbors: (V, k) uint16 or int32  `codebook_neighbors(...)`; needed where method.k > 0
    """
    check_request(gpt, condition, valid, sampling)
    rule = acceptance_rule(method, neighbors, gpt.config.vocabulary, len(condition), condition.device)
    B, S, L, device = len(condition), gpt.config.condition_tokens, gpt.config.tokens, condition.device
    N = method.tree_nodes
    P = min(method.depth, N - 1)                                          # no path is longer
    condition, valid = guidance_pair(gpt, condition, valid)
    cache = gpt.new_cache(2 * B, S + L + N)
    uniforms = philox_uniform(sampling.seeds, ACCEPT, L, N)
    tokens = torch.zeros(B, L + P + 1, dtype=torch.int64, device=device)   # behind L: scratch
    accepted_at = torch.full((B, L), -1, dtype=torch.int64, device=device)
    excess = torch.zeros(B, device=device)

    hidden = read_condition(gpt, condition, valid, cache)
    drafting = Drafting(gpt, drafter, sampling, method, valid)
    drafting.read_condition(hidden)
    probs, _ = sampling.probs(gpt, hidden[:, -1:])
    root, status = draw(probs[:, 0], uniforms[:, 0, 0], sampling.greedy)
    failed = (status & INVALID_ROW) != 0
    tokens[:, 0] = root
    count = torch.ones(B, dtype=torch.int64, device=device)               # tokens emitted
    forwards = torch.ones(B, dtype=torch.int64, device=device)
    drafting.read_tokens(root[:, None], hidden[:, -1:], count - 1, count, 0)

    counts = [1] * B
    if progress:
        progress(B)
    while min(counts) < L:
        columns = S + max(counts) + N
        draft = drafting.chain(root) if method.drafting == "chain" else drafting.tree(root)
        ancestors, depth, first_child, next_sibling, _ = tree_links(draft.parents)
        room = (L - 1 - count)[:, None]                                   # drafts before the token that is drawn
        first_child = torch.where(depth < room, first_child, -1)
        lengths = S + count - 1                                           # the root's column
        slots = lengths[:, None] + torch.arange(N, device=device)
        mask = visible(valid, tree_mask(ancestors, lengths.int(), columns=columns))
        places = lengths[:, None] + depth.clamp(min=0)
        hidden = gpt(twice(gpt.tok_embeddings(draft.tokens)), twice(places), mask, cache, twice(slots))
        probs, invalid = sampling.probs(gpt, hidden)
        here = count.clamp(max=L - 1)                                     # the position that this step decides first
        coins = uniforms.gather(1, here[:, None, None].expand(-1, 1, N))[:, 0]
        path, accepted, next_token, distance, _ = verify_tree(
            probs, draft.tokens, first_child, next_sibling, coins, draft_probs=draft.probs, draft_row=draft.rows,
            greedy=sampling.greedy, P=P, **rule)

        going = (count < L) & ~failed
        accepted_at[torch.arange(B, device=device), here] = torch.where(
            going, accepted.long(), accepted_at[torch.arange(B, device=device), here])
        excess += distance * going
        forwards += going
        # The path moves to the front of the cache; behind its end every column is copied onto itself.
        order = torch.arange(P, device=device)
        target = lengths[:, None] + 1 + order
        source = torch.where(order < accepted[:, None], lengths[:, None] + path, target)
        cache.move(twice(source), twice(target))
        # New tokens: the path's, then the drawn one, and the hidden state before each.
        nodes = torch.cat([torch.zeros_like(path[:, :1]), path.clamp(min=0)], 1).long()   # (B, P + 1)
        fresh = torch.cat([draft.tokens.gather(1, nodes[:, 1:]), next_token[:, None]], 1)
        end = accepted[:, None].long()
        fresh = fresh.scatter(1, end, next_token[:, None]).masked_fill(torch.arange(P + 1, device=device) > end, 0)
        before = hidden.gather(1, twice(nodes[..., None].expand(-1, -1, hidden.shape[-1])))
        where = count.clamp(max=L)[:, None] + torch.arange(P + 1, device=device)
        tokens.scatter_(1, where, torch.where(going[:, None], fresh, tokens.gather(1, where)))
        failed |= going & (invalid.gather(1, nodes.gather(1, end))[:, 0] != 0)
        gained = torch.where(going, accepted + 1, 0)
        old, count = count, torch.where(failed, L, (count + gained).clamp(max=L))
        root = torch.where(going, next_token, root)
        drafting.read_tokens(fresh, before, old.clamp(max=L - 1), (accepted + 1).long(), min(max(counts), L - 1))

        news = count.tolist()                                             # the step's one host read
        if progress:
            progress(sum(news) - sum(counts))
        counts = news
    return Decoded(tokens[:, :L], forwards.cpu(), accepted_at.cpu(), excess.cpu(), failed.cpu())


def acceptance_rule(method: Method, neighbors: Tensor | None, vocabulary: int, batch: int,
                    device: torch.device) -> dict:
    """The keyword arguments of verify_tree that a method stands for."""
    if not method.k:
        return {"residual": method.residual}
    if neighbors is None or neighbors.shape[0] != vocabulary or neighbors.shape[1] < method.k:
        have = "none" if neighbors is None else tuple(neighbors.shape)
        raise ValueError(f"neighbors must be a table of V={vocabulary} rows and at least k={method.k} columns for "
                         f"{method.name}, got {have}")
    return {"residual": method.residual, "neighbors": neighbors[:, : method.k].contiguous(), "kind": "tvd",
            "cutoff": torch.full((batch,), method.delta, device=device)}
