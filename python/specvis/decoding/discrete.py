"""Decoding of discrete tokens: `decode`, the baseline, and `speculative_decode`.

Read downwards: what decoding returns, the baseline, then the speculative loop. Each of its steps is five calls: draft,
target_forward, verify, commit, update.

Every request of a batch has a seed, a guidance and a temperature of its own. It is one pair of model rows: row b reads
the condition, row B + b reads none, and guidance moves the probabilities from the second towards the first.

The baseline draws each token with the noise of its position (see `specvis_kernels.draw_tokens`). A seed-exact method
verifies by equality: at every node of a tree the target draws its own token in the same way, and a draft is accepted if
it is this token. So the tokens are the baseline's, whatever the trees.

Images may be begun: the tokens that are known are read with the condition, and the others are drawn behind them.
"""
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specvis_kernels import (
    INVALID_ROW,
    TreeLinksResult,
    VerifyGreedyResult,
    VerifyResult,
    tree_mask,
    verify_greedy,
    verify_tree,
)

from ..models.interface import Drafter, ModelCache, TargetModel
from .bounds import chain_bound, optimal_residual, scaled, vanilla_residual
from .drafting import Draft, Drafting, new_drafting
from .methods import Method
from .sampling import ACCEPT, Sampling, cfg_inputs, mask_padding, philox_uniforms, repeat_for_cfg
from .trees import static_tree

Progress = Callable[[int], None]  # called with how many tokens the batch has just gained


@dataclass
class Decoded:
    """What decoding gives, for B images of L tokens."""

    tokens: Tensor           # (B, L) int64
    num_known: Tensor        # (B,) int64    how many of the tokens were known before
    target_forwards: Tensor  # (B,) int64    the one that reads the condition and the known tokens is counted
    num_accepted: Tensor     # (B, L) int64  by the step whose first token is here; -1: no step began here
    num_drafted: Tensor      # (B, L) int64  levels drafted by this step, as far as the image goes; 0: none began here
    tv_excess: Tensor        # (B,) float32  added total variation, estimated, summed over the image's tokens
    tv_bound: Tensor         # (B,) float32  its bound for sampled chains, COOL-SD's eq. (4), summed; NaN: not known
    failed: Tensor           # (B,) bool     the logits were not finite: the image ended there, its other tokens are 0

    @property
    def tau(self) -> Tensor:
        """(B,) new tokens per target forward. The baseline's is 1, a failed image's is NaN, a known one's is 0."""
        return ((self.tokens.shape[1] - self.num_known) / self.target_forwards).masked_fill(self.failed, torch.nan)

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts per drafted level, over all steps of all images."""
        return (self.num_accepted.clamp(min=0).sum() / self.num_drafted.sum().clamp(min=1)).item()

    def select(self, images: list[int]) -> "Decoded":
        """These images alone, in this order."""
        return Decoded(*(getattr(self, field.name)[images] for field in fields(Decoded)))

    @staticmethod
    def merged(parts: "list[Decoded]", order: Tensor) -> "Decoded":
        """The images of all parts as one batch, in which the i-th of them has index order[i]."""
        back = order.argsort()
        return Decoded(*(torch.cat([getattr(part, field.name) for part in parts])[back] for field in fields(Decoded)))


@torch.inference_mode()
def decode(target: TargetModel, condition: Tensor, padding_mask: Tensor, sampling: Sampling,
           progress: Progress | None = None, *, known_tokens: Tensor | None = None) -> Decoded:
    """The baseline: one target forward for each token.

    All images are read and drawn position by position together. What is known of an image takes the place of the draw.

    Args:
        condition:    (B, S, dim)  as `GPT.condition` gives it
        padding_mask: (B, S) bool  True where the condition is real
        known_tokens: (B, K) int64  the first tokens of each image, -1 behind them; None: there are none
    """
    check_request(target, condition, padding_mask, sampling)
    B, S, L, device = len(condition), target.prefix_len, target.grid ** 2, condition.device
    num_known = check_known_tokens(known_tokens, B, target)
    condition, padding_mask = cfg_inputs(target, condition, padding_mask)
    cache = target.new_cache(2 * B, S + L)
    columns = torch.arange(S + L, device=device).expand(2 * B, -1).split(1, 1)
    mask = mask_padding(padding_mask, torch.ones(B, 1, S + L, dtype=torch.bool, device=device))
    tokens = torch.full((B, L), -1, dtype=torch.int64, device=device)  # -1: not known
    if known_tokens is not None:
        tokens[:, :known_tokens.shape[1]] = known_tokens
    first, is_ragged, positions = min(num_known), min(num_known) < max(num_known), [column[:B] for column in columns]
    status = torch.zeros(B, L, dtype=torch.int32, device=device)

    token_at, status_at = tokens.split(1, 1), status.split(1, 1)        # views, position by position
    for i in range(first, L):
        if i == first:
            hidden = read_known(target, condition, padding_mask, tokens[:, :i], cache)[:, -1:]
        else:
            column = columns[S + i - 1]
            hidden = target.extend(repeat_for_cfg(token_at[i - 1]), column, mask[..., :S + i], cache, column)
        drawn = sampling.draw(target, hidden, positions[i])
        old, new = token_at[i], drawn.tokens
        old.copy_(torch.where(old < 0, new, old) if is_ragged else new)
        status_at[i].copy_(drawn.status)
        if progress:
            progress(sum(n <= i for n in num_known))
    is_new = torch.arange(L, device=device) >= torch.tensor(num_known, device=device)[:, None]
    has_failed = ((status & INVALID_ROW) * is_new).cumsum(1) > 0
    tokens, failed = tokens.masked_fill(has_failed, 0), has_failed[:, -1].cpu()
    num_known, none = torch.tensor(num_known), torch.zeros(B, L, dtype=torch.int64)
    return Decoded(tokens, num_known, (L - num_known).clamp(min=1), none, none, torch.zeros(B), torch.zeros(B), failed)


def read_known(target: TargetModel, condition: Tensor, padding_mask: Tensor, tokens: Tensor,
               cache: ModelCache) -> Tensor:
    """Read the conditions and the first tokens of the images: the forward before anything is drawn.

    Args:
        condition:    (2B, S, dim), padding_mask (2B, S) bool
        tokens:       (B, K) int64  the first tokens; where fewer are known, padding stands behind them
    Returns:
        (2B, S + K, H) hidden states
    """
    hidden, S, K = target.prefill(condition, padding_mask, cache), condition.shape[1], tokens.shape[1]
    if K == 0:
        return hidden
    slots = torch.arange(S, S + K, device=tokens.device)
    causal = torch.arange(S + K, device=tokens.device) <= slots[:, None]
    mask = mask_padding(padding_mask, causal.expand(len(tokens), -1, -1))
    slots = slots.expand(len(condition), -1)
    return torch.cat([hidden, target.extend(repeat_for_cfg(tokens.clamp(min=0)), slots, mask, cache, slots)], 1)


@dataclass
class Step:
    """What one step of speculative decoding did, for an observer."""

    links: TreeLinksResult   # of the trees
    position: Tensor         # (B,) int64    of the step's first token in the image
    accepted_nodes: Tensor   # (B, P) int32  -1 behind the last
    num_accepted: Tensor     # (B,) int32
    active: Tensor           # (B,) bool     images that were not finished before the step


Observer = Callable[[Step], None]


@torch.inference_mode()
def speculative_decode(target: TargetModel, drafter: Drafter, condition: Tensor, padding_mask: Tensor,
                       sampling: Sampling, methods: list[Method], neighbors: Tensor | None = None,
                       progress: Progress | None = None, observe: Observer | None = None, *,
                       known_tokens: Tensor | None = None) -> Decoded:
    """Draft a tree, read it in one target forward, accept a path of it; until every image is whole.

    If the target puts a NaN into its cache, the image ends there, whether the draft was accepted or not.

    Args:
        drafter:      of both rows of each request, see `sampling.cfg_inputs`
        condition:    (B, S, dim)  as `GPT.condition` gives it
        padding_mask: (B, S) bool  True where the condition is real
        methods:      one for each request, all of one `Method.family`
        neighbors:    (V, k) uint16 or int32, as `codebook_neighbors` gives it; needed where k > 0
        observe:      called after every step, with tensors that it must not change
        known_tokens: (B, K) int64  the first tokens of each image, -1 behind them; None: there are none
    """
    check_request(target, condition, padding_mask, sampling)
    check_methods(methods, len(condition), ("static", "dynamic"),
                  "those that draft trees (decode and jacobi_decode take the others)")
    num_known = check_known_tokens(known_tokens, len(condition), target)
    condition, padding_mask = cfg_inputs(target, condition, padding_mask)
    settings = Settings.of(target, padding_mask, sampling, methods, neighbors)
    state = State(settings, new_drafting(drafter, sampling, methods, target.grid), num_known)
    prefill(state, settings, condition, known_tokens)
    if progress:
        progress(sum(state.host_counts) - sum(num_known))
    while min(state.host_counts) < settings.num_tokens:
        total = sum(state.host_counts)
        step = run_step(state, settings)
        if observe:
            observe(step)
        if progress:
            progress(sum(state.host_counts) - total)
    return state.decoded()


@dataclass(frozen=True)
class Settings:
    """What stays the same while B requests are decoded."""

    target: TargetModel
    sampling: Sampling
    padding_mask: Tensor  # (2B, S) bool
    seed_exact: bool      # are drafts verified by equality?
    uniforms: Tensor | None  # (B, L, N) float32  for verification, by the position of a step's first token; else None
    max_nodes: int        # N, how many nodes a tree has at most
    max_depth: int        # P, how many drafts a step can accept at most
    rule: dict            # of acceptance: keyword arguments of verify_tree
    lossless: Tensor      # (B,) bool
    is_chain: bool        # do all trees have one node a level?
    has_bound: bool       # does chain_bound have to be computed?

    @staticmethod
    def of(target: TargetModel, padding_mask: Tensor, sampling: Sampling, methods: list[Method],
           neighbors: Tensor | None) -> "Settings":
        base, device = methods[0], sampling.seeds.device
        max_nodes, max_depth = max(m.max_nodes for m in methods), max(m.max_depth for m in methods)
        uniforms = None
        if not base.seed_exact:
            uniforms = philox_uniforms(sampling.seeds, ACCEPT, target.grid ** 2, max_nodes)
        rule = acceptance_rule(methods, neighbors, target.vocab_size, max_depth, device)
        lossless = torch.tensor([m.lossless for m in methods], device=device)
        is_chain = base.drafting == "static" and static_tree(base.tree).is_chain
        has_bound = is_chain and not base.k and not all(m.lossless for m in methods)
        return Settings(target, sampling, padding_mask, base.seed_exact, uniforms, max_nodes, max_depth, rule, lossless,
                        is_chain, has_bound)

    @property
    def num_tokens(self) -> int:
        """L, how many tokens an image has."""
        return self.target.grid ** 2


class State:
    """What goes around the loop: the images, how far they are, and the accounts of what it took."""

    def __init__(self, settings: Settings, drafting: Drafting, num_known: list[int]):
        """num_known: how many tokens of each image are known."""
        seeds = settings.sampling.seeds
        B, L, N, device = len(seeds), settings.num_tokens, settings.max_nodes, seeds.device
        self.prefix_len, self.num_tokens, self.drafting = settings.target.prefix_len, L, drafting
        self.cache = settings.target.new_cache(2 * B, self.prefix_len + L + N)
        self.index = torch.arange(max(N, settings.max_depth + 1), device=device)
        # What stands in columns from L on is of no use. There the steps of finished images are written.
        self.tokens = torch.zeros(B, L + settings.max_depth + 1, dtype=torch.int64, device=device)
        # the accounts, see Decoded
        self.num_known = torch.tensor(num_known, device=device)
        self.target_forwards = torch.ones(B, dtype=torch.int64, device=device)
        self.num_accepted = torch.full((B, L + 1), -1, dtype=torch.int64, device=device)
        self.num_drafted = torch.zeros(B, L + 1, dtype=torch.int64, device=device)
        self.tv_excess = torch.zeros(B, device=device)
        is_known = settings.lossless | ~settings.sampling.greedy & settings.has_bound
        self.tv_bound = torch.where(is_known, 0.0, torch.nan)
        # what the host knows: the tokens of each image, the largest depth and width of the next trees
        self.host_counts = [min(n + 1, L) for n in num_known]
        self.tree_depth, self.tree_width = drafting.shapes.depth.max().item(), drafting.shapes.width.max().item()

    def advance(self, counts: Tensor) -> None:
        """The images now have counts (B,) tokens. The newest of them, the next tree's root, is not in the cache yet.

        An image that failed counts as finished.
        """
        L = self.num_tokens
        self.counts = counts.clamp(max=L).masked_fill(self.failed, L)
        self.lengths = self.counts + (self.prefix_len - 1)        # (B,) entries in the cache: the root's column
        self.position = self.counts.clamp(max=L - 1)              # (B,) of the next step's first token
        self.budget = (L - 1) - self.counts                       # (B,) drafts that fit, and one more token with them
        self.active = self.counts < L                             # (B,) images that are not finished

    def decoded(self) -> Decoded:
        L = self.num_tokens
        return Decoded(self.tokens[:, :L], *(account.cpu() for account in (
            self.num_known, self.target_forwards, self.num_accepted[:, :L], self.num_drafted[:, :L],
            self.tv_excess, self.tv_bound, self.failed)))


def prefill(state: State, settings: Settings, condition: Tensor, known_tokens: Tensor | None) -> None:
    """Read the conditions (2B, S, dim) and the known tokens with target and drafter. Draw the tokens behind them."""
    sampling, num_known, drafting, S = settings.sampling, state.num_known, state.drafting, state.prefix_len
    K = 0 if known_tokens is None else known_tokens.shape[1]
    if K:
        state.tokens[:, :K] = known_tokens.clamp(min=0)
    hidden = read_known(settings.target, condition, settings.padding_mask, state.tokens[:, :K], state.cache)
    drafting.prefill(hidden[:, :S])
    hidden = hidden[:, S - 1:]                                             # before each token, the next one too
    newest = repeat_for_cfg(num_known)[:, None, None].expand(-1, 1, hidden.shape[-1])
    drawn = sampling.draw(settings.target, hidden.gather(1, newest), num_known[:, None])
    state.tokens.scatter_(1, num_known[:, None], drawn.tokens)
    state.root = drawn.tokens[:, 0]                                        # (B,) the newest token
    state.failed = ((drawn.status[:, 0] & INVALID_ROW) != 0) & (num_known < settings.num_tokens)
    state.advance(num_known + 1)
    drafting.shapes.first = state.counts
    drafting.extend(state.tokens[:, :K + 1], hidden, torch.zeros_like(num_known), num_known + 1, 0)


def run_step(state: State, settings: Settings) -> Step:
    """One step of all images that are not finished."""
    tree = draft(state)
    output = target_forward(state, settings, tree)
    verified = verify(state, settings, tree, output)
    step = Step(tree.links, state.position, verified.accepted_nodes, verified.num_accepted, state.active)
    committed = commit(state, settings, tree, output, verified)
    update(state, settings, tree, output, verified, committed)
    return step


def draft(state: State) -> Draft:
    """The next trees."""
    return state.drafting.draft(state.root, state.tree_depth, state.tree_width)


class TargetOutput(NamedTuple):
    """What the target says of the nodes of the trees."""
    hidden: Tensor         # (2B, N, H)
    probs: Tensor | None   # (B, N, V) float32  of what follows each node; None where verification is by equality
    tokens: Tensor | None  # (B, N) int64       the target's own draw after each node; None where it is not
    status: Tensor         # (B, N) int32


def target_forward(state: State, settings: Settings, tree: Draft) -> TargetOutput:
    """Read all nodes of the trees at once. Each sees the tokens before the root, its ancestors and itself."""
    N, target, sampling = tree.tokens.shape[1], settings.target, settings.sampling
    depth = tree.links.depth.clamp(min=0)
    root = repeat_for_cfg(state.lengths)[:, None]
    columns = state.prefix_len + max(state.host_counts) + N
    mask = mask_padding(settings.padding_mask, tree_mask(tree.links.ancestors, state.lengths.int(), columns=columns))
    hidden = target.extend(repeat_for_cfg(tree.tokens), root + repeat_for_cfg(depth), mask, state.cache,
                           root + state.index[:N])
    if settings.seed_exact:
        drawn = sampling.draw(target, hidden, state.counts[:, None] + depth)
        return TargetOutput(hidden, None, drawn.tokens, drawn.status)
    probs, status = sampling.probs(target, hidden)
    return TargetOutput(hidden, probs, None, status)


def verify(state: State, settings: Settings, tree: Draft, output: TargetOutput) -> VerifyResult | VerifyGreedyResult:
    """Say which drafts are accepted, and draw the token behind them, for which the drafts leave a position."""
    N, fits = tree.tokens.shape[1], tree.links.depth < state.budget[:, None]
    if settings.seed_exact:  # no draft follows a row from which nothing could be drawn
        first_child = torch.where(fits & (output.status == 0), tree.links.first_child, -1)
        return verify_greedy(output.tokens, tree.tokens, first_child, tree.links.next_sibling,
                             max_depth=settings.max_depth)
    uniforms = settings.uniforms[:, :, :N].gather(1, state.position[:, None, None].expand(-1, 1, N))[:, 0]
    first_child = torch.where(fits, tree.links.first_child, -1)
    return verify_tree(output.probs, tree.tokens, first_child, tree.links.next_sibling, uniforms,
                       draft_probs=tree.draft_probs, draft_row=tree.draft_row, greedy=settings.sampling.greedy,
                       max_depth=settings.max_depth, **settings.rule)


class Committed(NamedTuple):
    """The tokens of a step: the accepted drafts and the token that was drawn behind them."""
    new_tokens: Tensor       # (B, P + 1) int64  0 behind the last
    previous_hidden: Tensor  # (2B, P + 1, H)    the target's hidden state before each
    is_invalid: Tensor       # (B,) bool         the last was drawn from a row that was not finite


def commit(state: State, settings: Settings, tree: Draft, output: TargetOutput,
           verified: VerifyResult | VerifyGreedyResult) -> Committed:
    """Put the accepted drafts into the cache, and them and the next token into the images."""
    accepted_nodes, num_accepted, next_token = verified[:3]
    if not settings.is_chain:  # an accepted part of a chain is where it should be
        state.cache.commit(repeat_for_cfg(accepted_nodes), repeat_for_cfg(num_accepted), repeat_for_cfg(state.lengths))
    nodes, last = F.pad(accepted_nodes.clamp(min=0), (1, 0)).long(), num_accepted[:, None].long()  # the root in front
    if settings.seed_exact:
        new_tokens = output.tokens.gather(1, nodes)
    else:
        new_tokens = F.pad(tree.tokens.gather(1, nodes[:, 1:]), (0, 1)).scatter_(1, last, next_token[:, None])
    index = state.index[:nodes.shape[1]]
    new_tokens.masked_fill_(index > last, 0)
    state.tokens.scatter_(1, state.counts[:, None] + index, new_tokens)
    state.root = next_token
    hidden = output.hidden
    previous_hidden = hidden.gather(1, repeat_for_cfg(nodes)[..., None].expand(-1, -1, hidden.shape[-1]))
    return Committed(new_tokens, previous_hidden, output.status.gather(1, nodes.gather(1, last))[:, 0] != 0)


def update(state: State, settings: Settings, tree: Draft, output: TargetOutput,
           verified: VerifyResult | VerifyGreedyResult, committed: Committed) -> None:
    """Account for the step, let the drafter read the new tokens, and choose the next trees' shapes."""
    account(state, settings, tree, output, verified)
    shapes, position, num_accepted = state.drafting.shapes, state.position, verified.num_accepted.long()
    num_new = num_accepted + 1
    state.failed |= state.active & committed.is_invalid
    state.advance(state.counts + num_new)
    shapes.record(position, num_accepted, state.active)
    max_count = min(max(state.host_counts), settings.num_tokens - 1)
    state.drafting.extend(committed.new_tokens, committed.previous_hidden, position, num_new, max_count)
    # the step's one host read
    state.host_counts, depths, widths = torch.stack([state.counts, shapes.depth, shapes.width]).tolist()
    state.tree_depth, state.tree_width = max(depths), max(widths)


def account(state: State, settings: Settings, tree: Draft, output: TargetOutput,
            verified: VerifyResult | VerifyGreedyResult) -> None:
    """Count the step of each active image."""
    active, position = state.active, state.counts[:, None]
    state.num_accepted.scatter_(1, position, verified.num_accepted[:, None].long())
    state.num_drafted.scatter_(1, position, state.drafting.shapes.depth.minimum(state.budget)[:, None])
    state.target_forwards += active
    if not settings.seed_exact:
        state.tv_excess += verified.tv_excess * active
    if settings.has_bound:
        P = settings.max_depth
        accepts = [scaled(settings.rule["omega"][:, i:i + 1].double()) for i in range(P)]
        residual = optimal_residual if settings.rule["residual"] == "optimal" else vanilla_residual
        levels = torch.where(settings.lossless | ~active, 0, state.budget)
        state.tv_bound += chain_bound(output.probs[:, :P], tree.draft_probs, tree.tokens[:, 1:], accepts, residual,
                                      levels)


def acceptance_rule(methods: list[Method], neighbors: Tensor | None, vocab_size: int, max_depth: int,
                    device: torch.device) -> dict:
    """The keyword arguments of verify_tree that methods of one family stand for; max_depth: the largest of theirs."""
    base = methods[0]
    rule = {"residual": base.residual}
    if any(omega != 1 for m in methods for omega in m.omegas):
        padded = [[*m.omegas, *[1.0] * (max_depth - m.max_depth)] for m in methods]
        rule["omega"] = torch.tensor(padded, dtype=torch.float32, device=device)
    k = base.num_neighbors
    if not k:
        return rule
    if neighbors is None or neighbors.shape[0] != vocab_size or neighbors.shape[1] < k:
        have = "none" if neighbors is None else tuple(neighbors.shape)
        raise ValueError(f"neighbors must be a table of V={vocab_size} rows and at least k={k} columns for "
                         f"{base.name}, got {have}")
    return rule | {"neighbors": neighbors[:, :k].contiguous(), "cutoff": base.cutoff,
                   "delta": torch.tensor([m.delta for m in methods], dtype=torch.float32, device=device)}


def check_request(target: TargetModel, condition: Tensor, padding_mask: Tensor, sampling: Sampling) -> None:
    """Raise ValueError unless the condition is (B, S, dim) with B seeds and a (B, S) mask, B >= 1."""
    S, dim = target.null_condition(1).shape[1:]
    if condition.ndim != 3 or condition.shape[1:] != (S, dim):
        raise ValueError(f"condition must be (B, S={S}, dim={dim}), got {tuple(condition.shape)}")
    if len(condition) < 1 or len(condition) != len(sampling.seeds):
        raise ValueError(f"condition must have one row per seed and at least one, "
                         f"got {len(condition)} rows and {len(sampling.seeds)} seeds")
    if padding_mask.shape != condition.shape[:2] or padding_mask.dtype != torch.bool:
        raise ValueError(f"padding_mask must be bool (B={len(condition)}, S={S}), "
                         f"got {str(padding_mask.dtype)[6:]} {tuple(padding_mask.shape)}")


def check_known_tokens(known_tokens: Tensor | None, batch: int, target: TargetModel) -> list[int]:
    """How many tokens of each of B images are known. This reads the host.

    Raises:
        ValueError: not None and not (B, K) int64 with K <= L, or an id outside [0, V) that is not -1 behind the others
    """
    if known_tokens is None:
        return [0] * batch
    L, V = target.grid ** 2, target.vocab_size
    if known_tokens.dtype != torch.int64 or known_tokens.ndim != 2 or len(known_tokens) != batch:
        raise ValueError(f"known_tokens must be int64 (B={batch}, K), "
                         f"got {str(known_tokens.dtype)[6:]} {tuple(known_tokens.shape)}")
    if known_tokens.shape[1] > L:
        raise ValueError(f"known_tokens must be at most the L={L} tokens of an image, got {known_tokens.shape[1]}")
    is_known = known_tokens != -1
    counts, wrong = is_known.sum(1), is_known & ((known_tokens < 0) | (known_tokens >= V))
    if wrong.any():
        raise ValueError(f"known_tokens must be within [0, V={V}), or -1 where no token is known, "
                         f"got {known_tokens[wrong][0].item()}")
    if (is_known.cumprod(1).sum(1) != counts).any():
        raise ValueError("known_tokens must have -1 only behind the known tokens of an image, got -1 before one")
    return counts.tolist()


def check_methods(methods: list[Method], batch: int, drafting: tuple[str, ...], which: str) -> None:
    """Raise ValueError unless there is a method for each request, drafting in one of these ways, all of one family.

    which: such methods, in words, and what decodes the others
    """
    if len(methods) != batch:
        raise ValueError(f"methods must be one for each of the {batch} requests, got {len(methods)}")
    for m in methods:
        if m.drafting not in drafting:
            raise ValueError(f"methods must be {which}, got {m.name}")
        if m.family != methods[0].family:
            raise ValueError(f"methods must be of one family (Method.family), got {methods[0].name} and {m.name}")
