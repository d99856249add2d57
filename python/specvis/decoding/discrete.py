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
from torch.utils._pytree import tree_map

from specvis_kernels import (
    INVALID_ROW,
    CommitTokensResult,
    DrawTokensResult,
    TreeLinksResult,
    VerifyResult,
    commit_tokens,
    philox_uniforms,
    verify_logits,
)

from ..models.interface import Drafter, ModelCache, Nodes, TargetModel, codes, id_range, num_tokens, rows_and_columns
from ..models.layers import Cache
from .batching import Finished, Rows, Slots, pairs
from .bounds import chain_bound, optimal_residual, scaled, vanilla_residual
from .capture import Captured, can_replay
from .drafting import Draft, Drafting, chain_ancestors, new_drafting, round_up
from .methods import Method, one_each
from .sampling import ACCEPT, Sampling, cfg_inputs, repeat_for_cfg, take_nodes
from .trees import static_tree

Progress = Callable[[int], None]  # called with how many tokens the batch has just gained

POLL = {"cpu": 1}  # steps from one look of the host at the device to the next
USUAL_POLL = 4     # of other devices: a look waits for all that the device was asked for


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
    B, L = len(condition), num_tokens(target)
    num_known = check_known_tokens(known_tokens, B, target)
    condition, padding_mask = cfg_inputs(target, condition, padding_mask)
    state = BaselineState(target, sampling, padding_mask, known_tokens, num_known)
    run = Captured(baseline_step)
    for i in range(state.first, L):
        if i == state.first:
            known = state.tokens[:, :i]
            hidden = read_known(target, condition, padding_mask, known, state.cache)[:, -1:]
            put_drawn(state, sampling.draw(target, hidden, state.position))
        else:
            run(state, sampling)
        if progress:
            progress(sum(n <= i for n in num_known))
    index, num_known = torch.arange(L), torch.tensor(num_known)
    has_failed = ((state.status.cpu() & INVALID_ROW) * (index >= num_known[:, None])).cumsum(1) > 0  # here or before
    is_step = (index > num_known[:, None]) & ~F.pad(has_failed, (1, -1))  # the first forward draws a token, too
    tokens = state.tokens.masked_fill(has_failed.to(state.tokens.device), 0)
    return Decoded(tokens, num_known, 1 + is_step.sum(1), is_step.long() - 1, torch.zeros(B, L, dtype=torch.int64),
                   torch.zeros(B), torch.zeros(B), has_failed[:, -1])


class BaselineState:
    """What goes around the baseline's loop: all images, of which a step draws the same position."""

    def __init__(self, target: TargetModel, sampling: Sampling, padding_mask: Tensor, known_tokens: Tensor | None,
                 num_known: list[int]):
        """padding_mask (2B, S) bool"""
        B, L, device = len(num_known), num_tokens(target), padding_mask.device
        self.target, self.padding_mask, self.num_columns = target, padding_mask, target.prefix_len + L
        self.cache = new_cache(target, 2 * B, self.num_columns)
        self.tokens = torch.full((B, L), -1, dtype=torch.int64, device=device)  # -1: not known
        if known_tokens is not None:
            self.tokens[:, :known_tokens.shape[1]] = known_tokens
        self.status = torch.zeros(B, L, dtype=torch.int32, device=device)
        self.first, self.is_ragged, self.num_steps = min(num_known), min(num_known) < max(num_known), 0
        self.position = torch.full((B, 1), self.first, device=device)  # of the token that is drawn next
        self.newest = torch.zeros_like(self.position)                  # the token before it
        self.depth, self.itself = torch.zeros_like(self.position), chain_ancestors(B, 1, device)

    @property
    def can_replay(self) -> bool:
        return can_replay(self.target)

    def next_shape(self) -> int:
        """How many columns of the cache the next step sees at most."""
        return min(round_up(self.target.prefix_len + self.first + 1 + self.num_steps), self.num_columns)


def baseline_step(state: BaselineState, sampling: Sampling) -> None:
    """Read the newest token of every image, and draw the next one."""
    lengths = state.position[:, 0] + (state.target.prefix_len - 1)
    nodes = Nodes(state.depth, lengths, state.itself, state.padding_mask, state.shape)
    hidden = state.target.extend(repeat_for_cfg(state.newest), nodes, state.cache)
    put_drawn(state, sampling.draw(state.target, hidden, state.position))


def put_drawn(state: BaselineState, drawn: DrawTokensResult) -> None:
    """The next token of every image is the one drawn, unless it is known."""
    tokens = drawn.tokens
    if state.is_ragged:
        known = state.tokens.gather(1, state.position)
        tokens = torch.where(known < 0, tokens, known)
    state.tokens.scatter_(1, state.position, tokens)
    state.status.scatter_(1, state.position, drawn.status)
    state.newest.copy_(tokens)
    state.position += 1


def read_known(target: TargetModel, condition: Tensor, padding_mask: Tensor, tokens: Tensor,
               cache: ModelCache) -> Tensor:
    """Read the conditions and the first tokens of the images: the forward before anything is drawn.

    Args:
        condition:    (2B, S, dim), padding_mask (2B, S) bool
        tokens:       (B, K) int64  the first tokens; where fewer are known, padding stands behind them
    Returns:
        (2B, S + K, H) hidden states
    """
    hidden, (B, K), S = target.prefill(condition, padding_mask, cache), tokens.shape, condition.shape[1]
    if K == 0:
        return hidden
    lengths = torch.full((B,), S, device=tokens.device)
    depth = torch.arange(K, device=tokens.device)[None]
    nodes = Nodes(depth, lengths, chain_ancestors(B, K, tokens.device), padding_mask, S + K)
    return torch.cat([hidden, target.extend(repeat_for_cfg(tokens.clamp(min=0)), nodes, cache)], 1)


class Step(NamedTuple):
    """What one step of speculative decoding did, for an observer."""

    links: TreeLinksResult   # of the trees
    position: Tensor         # (B,) int64    of the step's first token in the image
    accepted_nodes: Tensor   # (B, P) int32  -1 behind the last
    num_accepted: Tensor     # (B,) int32
    active: Tensor           # (B,) bool     images that were not finished before the step


Observer = Callable[[Step], None]


@torch.inference_mode()
def speculative_decode(target: TargetModel, drafter: Drafter, condition: Tensor, padding_mask: Tensor,
                       sampling: Sampling, methods: str | Method | list[str | Method], neighbors: Tensor | None = None,
                       progress: Progress | None = None, observe: Observer | None = None, *,
                       known_tokens: Tensor | None = None, batch: int | None = None,
                       finished: Finished | None = None) -> Decoded:
    """Draft a tree, read it in one target forward, accept a path of it; until every image is whole.

    If the target puts a NaN into its cache, the image ends there; where the draft is rejected, it may end or go on.

    Args:
        drafter:      of both rows of each request, see `sampling.cfg_inputs`
        condition:    (B, S, dim)  as `GPT.condition` gives it
        padding_mask: (B, S) bool  True where the condition is real
        methods:      one of all requests, or one for each, all of one `Method.family`; or their names
        neighbors:    (C, k) uint16 or int32, as `codebook_neighbors` gives it; needed where k > 0. Of V codes, or of
            those that the target's `codes` says
        observe:      called after every step, with tensors that it must not change
        known_tokens: (B, K) int64  the first tokens of each image, -1 behind them; None: there are none
        batch:        how many images are decoded at once; when one is finished, the next takes its place. Then all
            have one method, and nobody observes. None: all of them
        finished:     called with the numbers of requests whose images are finished, and with these images
    """
    check_request(target, condition, padding_mask, sampling)
    methods = checked_methods(methods, len(condition), ("static", "dynamic"),
                              "those that draft trees (decode and jacobi_decode take the others)")
    check_drafter(target, drafter, condition)
    num_known = check_known_tokens(known_tokens, len(condition), target)
    batch, total = check_batch(batch, methods, observe, target, drafter), len(methods)
    condition, padding_mask = cfg_inputs(target, condition, padding_mask)

    def begin(requests: list[int]) -> State:
        both, of_these = pairs(requests, total), sampling[requests]
        own = [methods[i] for i in requests]
        settings = Settings.of(target, padding_mask[both], of_these, own, neighbors)
        own_drafter = drafter if len(requests) == total else drafter.select(requests)
        state = State(settings, new_drafting(own_drafter, of_these, own, target), [num_known[i] for i in requests])
        prefill(state, settings, condition[both], None if known_tokens is None else known_tokens[requests])
        if progress:
            progress(sum(state.host_counts) - sum(num_known[i] for i in requests))
        return state

    slots = Slots(total, batch, finished)
    state = slots.turn_over(begin(slots.requests), begin)  # those whose tokens are all known are finished already
    run = Captured(run_step)
    while min(state.host_counts) < state.settings.num_tokens:
        step = run(state, state.settings)
        if observe:
            observe(tree_map(torch.clone, step))  # the next step may be written over this one
        if state.num_steps < state.poll:
            continue
        num_before = sum(state.host_counts)
        state.look()
        if progress:
            progress(sum(state.host_counts) - num_before)
        state = slots.turn_over(state, begin)
    return slots.decoded()


@dataclass
class Settings(Rows):
    """What stays the same while B requests are decoded."""

    ROWS, PAIRS, PARTS = ("uniforms", "lossless"), ("padding_mask",), ("sampling",)

    target: TargetModel
    sampling: Sampling
    padding_mask: Tensor  # (2B, S) bool
    seed_exact: bool      # are drafts verified by equality?
    uniforms: Tensor | None  # (B, L, N) float32  for verification, by the position of a step's first token; else None
    max_nodes: int        # N, how many nodes a tree has at most
    max_depth: int        # P, how many drafts a step can accept at most
    max_width: int        # how many children a node has at most
    rule: dict            # of acceptance: keyword arguments of verify_logits
    lossless: Tensor      # (B,) bool
    is_chain: bool        # do all trees have one node a level?
    has_bound: bool       # does chain_bound have to be computed?

    def __post_init__(self):
        self.num_tokens, self.has_id_range = num_tokens(self.target), hasattr(self.target, "id_range")

    @staticmethod
    def of(target: TargetModel, padding_mask: Tensor, sampling: Sampling, methods: list[Method],
           neighbors: Tensor | None) -> "Settings":
        base, device = methods[0], sampling.seeds.device
        max_nodes, max_depth = max(m.max_nodes for m in methods), max(m.max_depth for m in methods)
        uniforms = None
        if not base.seed_exact:
            uniforms = philox_uniforms(sampling.seeds, num_tokens(target), max_nodes, stream=ACCEPT)
        rule = acceptance_rule(methods, neighbors, target, max_depth, device)
        lossless = torch.tensor([m.lossless for m in methods], device=device)
        is_chain = base.drafting == "static" and static_tree(base.tree).is_chain
        has_bound = is_chain and not base.k and not all(m.lossless for m in methods)
        return Settings(target, sampling, padding_mask, base.seed_exact, uniforms, max_nodes, max_depth,
                        max(m.max_width for m in methods), rule, lossless, is_chain, has_bound)


class Shape(NamedTuple):
    """What a step takes from the host: all that its shapes depend on."""
    max_depth: int  # no tree is deeper
    max_width: int  # no node has more children
    max_count: int  # no image that goes on has more tokens; rounded up, so that many steps have the same number


class State(Rows):
    """What goes around the loop: the images, how far they are, and the accounts of what it took.

    All of it stays in the same memory. What the host knows of it is as old as its last `look`; a step reads nothing
    back, and takes nothing from the host but its `shape`.
    """

    ROWS = ("tokens", "num_known", "counts", "root", "failed", "target_forwards", "num_accepted", "num_drafted",
            "tv_excess", "tv_bound")
    PARTS, CACHES = ("settings", "drafting"), ("cache",)
    can_select = False  # a drafter's plans are for one batch size

    @property
    def can_replay(self) -> bool:
        return can_replay(self.settings.target) and can_replay(self.drafting.drafter)

    def __init__(self, settings: Settings, drafting: Drafting, num_known: list[int]):
        """num_known: how many tokens of each image are known."""
        seeds = settings.sampling.seeds
        B, L, device = len(seeds), settings.num_tokens, seeds.device
        self.settings, self.drafting, self.poll = settings, drafting, POLL.get(device.type, USUAL_POLL)
        self.num_columns = settings.target.prefix_len + L + settings.max_nodes
        self.cache = new_cache(settings.target, 2 * B, self.num_columns)
        self.tokens = torch.zeros(B, L, dtype=torch.int64, device=device)
        self.num_known = torch.tensor(num_known, device=device)
        self.counts = self.num_known + 1  # (B,) tokens of each image; L: it is finished, or it failed
        self.root = torch.zeros(B, dtype=torch.int64, device=device)  # (B,) the newest token: not in the cache yet
        self.failed = torch.zeros(B, dtype=torch.bool, device=device)
        # the accounts, see Decoded
        self.target_forwards = torch.ones(B, dtype=torch.int64, device=device)
        self.num_accepted = torch.full((B, L), -1, dtype=torch.int64, device=device)
        self.num_drafted = torch.zeros(B, L, dtype=torch.int64, device=device)
        self.tv_excess = torch.zeros(B, device=device)
        is_known = settings.lossless | ~settings.sampling.greedy & settings.has_bound
        self.tv_bound = torch.where(is_known, 0.0, torch.nan)
        self.look()
        self.shape = self.next_shape()

    def look(self) -> None:
        """Tell the host how far the images are, and how deep and wide the next trees: the loop's one host read."""
        shapes = self.drafting.shapes
        self.host_counts, depths, widths = torch.stack([self.counts, shapes.depth, shapes.width]).tolist()
        self.num_steps, self.host_depth, self.host_width = 0, max(depths), max(widths)
        if self.poll > 1 and shapes.adaptation:  # trees may grow before the next look
            self.host_depth, self.host_width = self.settings.max_depth, self.settings.max_width

    def next_shape(self) -> "Shape":
        """The shape of the next step, after num_steps steps since the host has looked."""
        L = self.settings.num_tokens
        count = max((count for count in self.host_counts if count < L), default=L)
        max_count = min(round_up(count + self.num_steps * (self.settings.max_depth + 1)), L)
        return Shape(self.host_depth, self.host_width, max_count)

    def decoded(self) -> Decoded:
        return Decoded(self.tokens, *(account.cpu() for account in (
            self.num_known, self.target_forwards, self.num_accepted, self.num_drafted, self.tv_excess, self.tv_bound,
            self.failed)))


def prefill(state: State, settings: Settings, condition: Tensor, known_tokens: Tensor | None) -> None:
    """Read the conditions (2B, S, dim) and the known tokens with target and drafter. Draw the tokens behind them."""
    sampling, num_known, drafting = settings.sampling, state.num_known, state.drafting
    S, L = settings.target.prefix_len, settings.num_tokens
    K = 0 if known_tokens is None else known_tokens.shape[1]
    if K:
        state.tokens[:, :K] = known_tokens.clamp(min=0)
    hidden = read_known(settings.target, condition, settings.padding_mask, state.tokens[:, :K], state.cache)
    drafting.prefill(hidden[:, :S])
    hidden = hidden[:, S - 1:]                                             # before each token, the next one too
    drawn = sampling.draw(settings.target, take_nodes(hidden, num_known[:, None]), num_known[:, None])
    is_whole = num_known == L
    last = num_known.clamp(max=L - 1)[:, None]
    state.tokens.scatter_(1, last, torch.where(is_whole[:, None], state.tokens.gather(1, last), drawn.tokens))
    state.root.copy_(drawn.tokens[:, 0])
    state.failed.copy_(((drawn.status[:, 0] & INVALID_ROW) != 0) & ~is_whole)
    state.counts.copy_((num_known + 1).clamp(max=L).masked_fill(state.failed, L))
    drafting.shapes.first = state.counts.clone()
    new_tokens = F.pad(state.tokens, (0, 1))[:, :K + 1]
    drafting.extend(new_tokens, hidden, torch.zeros_like(num_known), num_known + 1, 0)
    state.look()


def run_step(state: State, settings: Settings) -> Step:
    """One step of all images that are not finished."""
    position = state.counts.clamp(max=settings.num_tokens - 1)
    active = state.counts < settings.num_tokens
    tree = draft(state)
    output = target_forward(state, settings, tree, position)
    verified = verify(settings, tree, output, position)
    committed = commit(state, settings, tree, output, verified)
    update(state, settings, tree, output, verified, committed, position, active)
    return Step(tree.links, position, verified.accepted_nodes, verified.num_accepted, active)


def draft(state: State) -> Draft:
    """The next trees."""
    shape = state.shape
    return state.drafting.draft(state.root, state.counts, shape.max_count, shape.max_depth, shape.max_width)


class TargetOutput(NamedTuple):
    """What the target says of the nodes of the trees."""
    hidden: Tensor   # (2B, N, H)
    logits: Tensor   # (2B, N, V)
    lengths: Tensor  # (B,) int64  the root's column


def target_forward(state: State, settings: Settings, tree: Draft, position: Tensor) -> TargetOutput:
    """Read all nodes of the trees at once. Each sees the tokens before the root, its ancestors and itself."""
    N, S, target = tree.tokens.shape[1], settings.target.prefix_len, settings.target
    lengths, columns = position + (S - 1), min(S - 1 + state.shape.max_count + N, state.num_columns)
    nodes = Nodes(tree.links.depth, lengths, tree.links.ancestors, settings.padding_mask, columns)
    hidden = target.extend(repeat_for_cfg(tree.tokens), nodes, state.cache)
    return TargetOutput(hidden, target.logits(hidden), lengths)


def verify(settings: Settings, tree: Draft, output: TargetOutput, position: Tensor) -> VerifyResult:
    """Say which drafts are accepted, and draw the token behind them, for which the drafts leave a position."""
    N, sampling, links, position = tree.tokens.shape[1], settings.sampling, tree.links, position[:, None]
    first_child = torch.where(links.depth < (settings.num_tokens - 1) - position, links.first_child, -1)
    ids = None
    if settings.seed_exact or settings.has_id_range:
        positions = position + links.depth.clamp(min=0)  # of what follows each node
        ids = id_range(settings.target, positions)
    if settings.seed_exact:
        by, uniforms = {"seeds": sampling.seeds, "positions": positions}, None
    else:
        uniforms = take_nodes(settings.uniforms, position)[:, 0, :N]
        by = {"draft_probs": tree.draft_probs, "draft_row": tree.draft_row, **settings.rule}
    return verify_logits(*output.logits.chunk(2), tree.tokens, first_child, links.next_sibling, uniforms,
                         sampling.guidance, sampling.temperature, sampling.top_k, sampling.top_p,
                         max_depth=settings.max_depth, id_range=ids, **by)


def commit(state: State, settings: Settings, tree: Draft, output: TargetOutput,
           verified: VerifyResult) -> CommitTokensResult:
    """Put the accepted drafts into the cache, and them and the next token into the images and their accounts."""
    if not settings.is_chain:  # an accepted part of a chain is where it should be
        state.cache.commit(verified.accepted_nodes, verified.num_accepted, output.lengths)
    state.root.copy_(verified.next_token)
    return commit_tokens(state.tokens, state.counts, state.failed, state.target_forwards, state.num_accepted,
                         state.num_drafted, state.tv_excess, tree.tokens, verified.accepted_nodes,
                         verified.num_accepted, verified.next_token, verified.tv_excess, verified.status,
                         state.drafting.shapes.depth)


def update(state: State, settings: Settings, tree: Draft, output: TargetOutput, verified: VerifyResult,
           committed: CommitTokensResult, position: Tensor, active: Tensor) -> None:
    """Let the drafter read the new tokens, and choose the next trees' shapes."""
    if settings.has_bound:
        add_bound(state, settings, tree, output, position, active)
    shapes = state.drafting.shapes
    if shapes.adaptation:
        shapes.record(position, verified.num_accepted.long(), active & (state.counts < settings.num_tokens))
    hidden = take_nodes(output.hidden, committed.nodes)
    state.drafting.extend(committed.new_tokens, hidden, position, committed.num_new, state.shape.max_count)


def add_bound(state: State, settings: Settings, tree: Draft, output: TargetOutput, position: Tensor,
              active: Tensor) -> None:
    """Add the bound of COOL-SD's eq. (4) for the chains of a step."""
    P, L = settings.max_depth, settings.num_tokens
    positions = position[:, None] + torch.arange(P, device=position.device)
    probs = settings.sampling.of_logits(output.logits[:, :P], id_range(settings.target, positions)).probs
    accepts = [scaled(settings.rule["omega"][:, i:i + 1].double()) for i in range(P)]
    residual = optimal_residual if settings.rule["residual"] == "optimal" else vanilla_residual
    levels = torch.where(settings.lossless | ~active, 0, L - 1 - position)
    state.tv_bound += chain_bound(probs, tree.draft_probs, tree.tokens[:, 1:], accepts, residual, levels)


def acceptance_rule(methods: list[Method], neighbors: Tensor | None, target: TargetModel, max_depth: int,
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
    first, last = codes(target)
    if neighbors is None or neighbors.shape[0] != last - first or neighbors.shape[1] < k:
        have = "none" if neighbors is None else tuple(neighbors.shape)
        raise ValueError(f"neighbors must be a table of C={last - first} rows and at least k={k} columns for "
                         f"{base.name}, got {have}")
    if neighbors.device != device:
        raise ValueError(f"neighbors must be on {device} like the target, got {neighbors.device}")
    return rule | {"neighbors": neighbors[:, :k].contiguous(), "cutoff": base.cutoff, "offset": first,
                   "delta": torch.tensor([m.delta for m in methods], dtype=torch.float32, device=device)}


def check_request(target: TargetModel, condition: Tensor, padding_mask: Tensor, sampling: Sampling) -> None:
    """Raise ValueError unless the condition is (B, S, dim) with B seeds and a (B, S) mask, B >= 1, as the target's."""
    for name, value, kind in (("condition", condition, Tensor), ("padding_mask", padding_mask, Tensor),
                              ("sampling", sampling, Sampling)):
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    null = target.null_condition(1)
    S, dim = null.shape[1:]
    if target.prefix_len != S:
        raise ValueError(f"target.prefix_len must be the S={S} of its null_condition, got {target.prefix_len}")
    if condition.ndim != 3 or condition.shape[1:] != (S, dim):
        raise ValueError(f"condition must be (B, S={S}, dim={dim}), got {tuple(condition.shape)}")
    if len(condition) < 1 or len(condition) != len(sampling.seeds):
        raise ValueError(f"condition must have one row per seed and at least one, "
                         f"got {len(condition)} rows and {len(sampling.seeds)} seeds")
    if padding_mask.shape != condition.shape[:2] or padding_mask.dtype != torch.bool:
        raise ValueError(f"padding_mask must be bool (B={len(condition)}, S={S}), "
                         f"got {str(padding_mask.dtype)[6:]} {tuple(padding_mask.shape)}")
    if condition.dtype != null.dtype:
        raise ValueError(f"condition must be {str(null.dtype)[6:]} like the target's null_condition, "
                         f"got {str(condition.dtype)[6:]}")
    for name, tensor in (("condition", condition), ("padding_mask", padding_mask), ("sampling", sampling.seeds)):
        if tensor.device != null.device:
            raise ValueError(f"{name} must be on {null.device} like the target, got {tensor.device}")


def check_drafter(target: TargetModel, drafter: Drafter, condition: Tensor) -> None:
    """Raise ValueError unless a drafter is for both rows of each condition (B, S, dim), and of the target's kind."""
    for name, same in (("grid", rows_and_columns), ("vocab_size", int)):
        if same(getattr(drafter, name, getattr(target, name))) != same(getattr(target, name)):
            raise ValueError(f"drafter.{name} must be the target's, {getattr(target, name)}, "
                             f"got {getattr(drafter, name)}")
    mask, wanted = drafter.padding_mask, (2 * len(condition), drafter.prefix_len)
    if mask.dtype != torch.bool or mask.shape != wanted or mask.device != condition.device:
        raise ValueError(f"drafter.padding_mask must be bool (R={wanted[0]}, prefix_len={wanted[1]}) on "
                         f"{condition.device}, two rows a request, got {str(mask.dtype)[6:]} {tuple(mask.shape)} on "
                         f"{mask.device}")


def new_cache(target: TargetModel, rows: int, columns: int) -> ModelCache:
    """A target's cache for all that a loop will read.

    Raises:
        ValueError: it is a `Cache` of another size. Of other classes the loop does not know how large they are
    """
    cache = target.new_cache(rows, columns)
    if isinstance(cache, Cache):
        cache.check(rows, columns, cache.data.dtype)
    return cache


def check_known_tokens(known_tokens: Tensor | None, batch: int, target: TargetModel) -> list[int]:
    """How many tokens of each of B images are known. This reads the host.

    Raises:
        ValueError: not None and not (B, K) int64 with K <= L, or an id outside [0, V) that is not -1 behind the others
    """
    if known_tokens is None:
        return [0] * batch
    L, V = num_tokens(target), target.vocab_size
    if not isinstance(known_tokens, Tensor):
        raise ValueError(f"known_tokens must be an int64 tensor (B={batch}, K), got {type(known_tokens).__name__}")
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
    ids = id_range(target, torch.arange(known_tokens.shape[1], device=known_tokens.device))
    if ids is not None:
        wrong = is_known & ((known_tokens < ids[:, 0]) | (known_tokens >= ids[:, 1]))
        if wrong.any():
            image, position = wrong.nonzero()[0].tolist()
            first, last = ids[position].tolist()
            raise ValueError(f"known_tokens must be ids that the target allows where they are: within [{first}, {last})"
                             f" at position {position}, got {known_tokens[image, position].item()}")
    return counts.tolist()


def check_batch(batch: int | None, methods: list[Method], observe: Observer | None, target: TargetModel,
                drafter: Drafter | None = None) -> int:
    """How many images are decoded at once.

    Raises:
        ValueError: not None and no whole number of at least 1; or requests would wait for a place although they have
            several methods, someone observes, or the model or the drafter has no way to let them in
    """
    if batch is None:
        return len(methods)
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise ValueError(f"batch must be a whole number of at least 1, or None for all images at once, got {batch!r}")
    if batch >= len(methods):
        return len(methods)
    if any(m != methods[0] for m in methods):
        raise ValueError(f"batch must be None where requests have several methods, got {batch} for {len(methods)} "
                         f"requests with {methods[0].label} and others")
    if observe:
        raise ValueError("batch must be None where someone observes the steps, "
                         f"got {batch} for {len(methods)} requests")
    if not hasattr(target.new_cache(1, 1), "insert"):
        raise ValueError(f"batch must be None for {type(target).__name__}: its cache has no method insert, by which "
                         "an image could take the place of a finished one")
    if drafter and not (hasattr(drafter, "select") and hasattr(drafter.new_cache(1), "insert")):
        raise ValueError(f"batch must be None for {type(drafter).__name__}: it has no method select, or its cache has "
                         "no method insert, by which an image could take the place of a finished one")
    return batch


def checked_methods(methods: str | Method | list[str | Method], batch: int, drafting: tuple[str, ...],
                    which: str) -> list[Method]:
    """A method for each request. ValueError unless all draft in one of these ways and are of one family.

    which: such methods, in words, and what decodes the others
    """
    methods = one_each(methods, batch, "methods")
    for m in methods:
        if not isinstance(m, Method):
            raise ValueError(f"methods must be of discrete tokens, each a Method or a name, got {type(m).__name__}")
        if m.drafting not in drafting:
            raise ValueError(f"methods must be {which}, got {m.name}")
        if m.family != methods[0].family:
            raise ValueError(f"methods must be of one family (Method.family), got {methods[0].name} and {m.name}")
    return methods
