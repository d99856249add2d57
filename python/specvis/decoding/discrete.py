"""Decoding of discrete tokens: `decode`, the baseline, and `speculative_decode`.

Read downwards: what decoding returns, the baseline, then the speculative loop. Each of its steps is five calls: draft,
target_forward, verify, commit, update.

Every request of a batch has a seed, a guidance and a temperature of its own. It is one pair of model rows: row b reads
the condition, row B + b reads none, and guidance moves the probabilities from the second towards the first.
"""
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from specvis_kernels import INVALID_ROW, TreeLinksResult, VerifyResult, tree_mask, verify_tree

from ..models.interface import Drafter, TargetModel
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
        """(B,) new tokens per target forward. The baseline's is 1, a failed image's is NaN."""
        return ((self.tokens.shape[1] - self.num_known) / self.target_forwards).masked_fill(self.failed, torch.nan)

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts per drafted level, over all steps of all images."""
        return (self.num_accepted.clamp(min=0).sum() / self.num_drafted.sum().clamp(min=1)).item()

    @staticmethod
    def merged(parts: "list[Decoded]", order: Tensor) -> "Decoded":
        """The images of all parts as one batch, in which the i-th of them has index order[i]."""
        back = order.argsort()
        return Decoded(*(torch.cat([getattr(part, field.name) for part in parts])[back] for field in fields(Decoded)))


@torch.inference_mode()
def decode(target: TargetModel, condition: Tensor, padding_mask: Tensor, sampling: Sampling,
           progress: Progress | None = None) -> Decoded:
    """The baseline: one target forward for each token.

    Args:
        condition:    (B, S, dim)  as `GPT.condition` gives it
        padding_mask: (B, S) bool  True where the condition is real
    """
    check_request(target, condition, padding_mask, sampling)
    B, S, L, device = len(condition), target.prefix_len, target.grid ** 2, condition.device
    condition, padding_mask = cfg_inputs(target, condition, padding_mask)
    cache = target.new_cache(2 * B, S + L)
    uniforms = philox_uniforms(sampling.seeds, ACCEPT, L, 1)
    tokens = torch.zeros(B, L, dtype=torch.int64, device=device)
    failed = torch.zeros(B, dtype=torch.bool, device=device)

    hidden = target.prefill(condition, padding_mask, cache)[:, -1:]
    for i in range(L):
        if i > 0:
            slots = torch.full((2 * B, 1), S + i - 1, device=device)
            mask = mask_padding(padding_mask, torch.ones(B, 1, S + i, dtype=torch.bool, device=device))
            hidden = target.extend(repeat_for_cfg(tokens[:, i - 1: i]), slots, mask, cache, slots)
        probs, _ = sampling.probs(target, hidden)
        token, status = draw_token(probs[:, 0], uniforms[:, i, 0], sampling.greedy)
        failed |= (status & INVALID_ROW) != 0
        tokens[:, i] = token.masked_fill(failed, 0)
        if progress:
            progress(B)
    none = torch.zeros(B, L, dtype=torch.int64)
    return Decoded(tokens, none[:, 0], torch.full((B,), L), none, none, torch.zeros(B), torch.zeros(B), failed.cpu())


def draw_token(probs: Tensor, uniforms: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row: verification of a tree that is only its root.

    Args:
        probs (B, V), uniforms (B,), greedy (B,) bool
    Returns:
        tokens (B,) int64, status (B,) int32
    """
    no_link = torch.full((len(probs), 1), -1, dtype=torch.int32, device=probs.device)
    root = torch.zeros_like(no_link, dtype=torch.int64)
    drawn = verify_tree(probs[:, None], root, no_link, no_link, uniforms[:, None], greedy=greedy, max_depth=1)
    return drawn.next_token, drawn.status


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
                       progress: Progress | None = None, observe: Observer | None = None) -> Decoded:
    """Draft a tree, read it in one target forward, accept a path of it; until every image is whole.

    If the target puts a NaN into its cache, the image ends there, whether the draft was accepted or not.

    Args:
        drafter:      of both rows of each request, see `sampling.cfg_inputs`
        condition:    (B, S, dim)  as `GPT.condition` gives it
        padding_mask: (B, S) bool  True where the condition is real
        methods:      one for each request, all of one `Method.family`
        neighbors:    (V, k) uint16 or int32, as `codebook_neighbors` gives it; needed where k > 0
        observe:      called after every step, with tensors that it must not change
    """
    check_request(target, condition, padding_mask, sampling)
    check_methods(methods, len(condition))
    condition, padding_mask = cfg_inputs(target, condition, padding_mask)
    settings = Settings.of(target, padding_mask, sampling, methods, neighbors)
    state = prefill(settings, new_drafting(drafter, sampling, methods, target.grid), condition)
    if progress:
        progress(len(methods))
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
    uniforms: Tensor      # (B, L, N) float32  for verification, by the position of a step's first token
    max_depth: int        # P, how many drafts a step can accept at most
    rule: dict            # of acceptance: keyword arguments of verify_tree
    lossless: Tensor      # (B,) bool
    is_chain: bool        # do all trees have one node a level?
    has_bound: bool       # does chain_bound have to be computed?

    @staticmethod
    def of(target: TargetModel, padding_mask: Tensor, sampling: Sampling, methods: list[Method],
           neighbors: Tensor | None) -> "Settings":
        base, device = methods[0], sampling.seeds.device
        uniforms = philox_uniforms(sampling.seeds, ACCEPT, target.grid ** 2, max(m.max_nodes for m in methods))
        max_depth = max(m.max_depth for m in methods)
        rule = acceptance_rule(methods, neighbors, target.vocab_size, max_depth, device)
        lossless = torch.tensor([m.lossless for m in methods], device=device)
        is_chain = base.drafting == "static" and static_tree(base.tree).is_chain
        has_bound = is_chain and not base.k and not all(m.lossless for m in methods)
        return Settings(target, sampling, padding_mask, uniforms, max_depth, rule, lossless, is_chain, has_bound)

    @property
    def num_tokens(self) -> int:
        """L, how many tokens an image has."""
        return self.target.grid ** 2


class State:
    """What goes around the loop: the images, how far they are, and the accounts of what it took."""

    def __init__(self, settings: Settings, drafting: Drafting):
        (B, L, N), device = settings.uniforms.shape, settings.uniforms.device
        self.prefix_len, self.num_tokens, self.drafting = settings.target.prefix_len, L, drafting
        self.cache = settings.target.new_cache(2 * B, self.prefix_len + L + N)
        self.tokens = torch.zeros(B, L + settings.max_depth + 1, dtype=torch.int64, device=device)  # behind L: scratch
        self.root = self.tokens[:, 0]                                      # (B,) the newest token
        self.failed = torch.zeros(B, dtype=torch.bool, device=device)
        # the accounts, see Decoded
        self.target_forwards = torch.ones(B, dtype=torch.int64, device=device)
        self.num_accepted = torch.full((B, L), -1, dtype=torch.int64, device=device)
        self.num_drafted = torch.zeros(B, L, dtype=torch.int64, device=device)
        self.tv_excess = torch.zeros(B, device=device)
        is_known = settings.lossless | ~settings.sampling.greedy & settings.has_bound
        self.tv_bound = torch.where(is_known, 0.0, torch.nan)
        # what the host knows: the tokens of each image, the largest depth and width of the next trees
        self.host_counts = [1] * B
        self.tree_depth, self.tree_width = drafting.shapes.depth.max().item(), drafting.shapes.width.max().item()

    def advance(self, counts: Tensor) -> None:
        """The images now have counts (B,) tokens. The newest of them, the next tree's root, is not in the cache yet."""
        self.counts = counts
        self.lengths = self.prefix_len + counts - 1               # (B,) entries in the cache: the root's column
        self.position = counts.clamp(max=self.num_tokens - 1)     # (B,) of the next step's first token
        self.budget = self.num_tokens - 1 - counts                # (B,) drafts that fit, and one more token with them
        self.active = (counts < self.num_tokens) & ~self.failed   # (B,) images that are not finished

    def decoded(self) -> Decoded:
        return Decoded(self.tokens[:, :self.num_tokens], *(account.cpu() for account in (
            torch.zeros_like(self.target_forwards), self.target_forwards, self.num_accepted, self.num_drafted,
            self.tv_excess, self.tv_bound, self.failed)))


def prefill(settings: Settings, drafting: Drafting, condition: Tensor) -> State:
    """Read the conditions (2B, S, dim) with target and drafter, and draw the first token of every image."""
    state, sampling = State(settings, drafting), settings.sampling
    hidden = settings.target.prefill(condition, settings.padding_mask, state.cache)
    drafting.prefill(hidden)
    probs, _ = sampling.probs(settings.target, hidden[:, -1:])
    state.root, status = draw_token(probs[:, 0], settings.uniforms[:, 0, 0], sampling.greedy)
    state.tokens[:, 0] = state.root
    state.failed = (status & INVALID_ROW) != 0
    state.advance(torch.ones_like(state.root))
    drafting.extend(state.root[:, None], hidden[:, -1:], state.counts - 1, state.counts, 0)
    return state


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
    hidden: Tensor  # (2B, N, H)
    probs: Tensor   # (B, N, V) float32  of what follows each node
    status: Tensor  # (B, N) int32


def target_forward(state: State, settings: Settings, tree: Draft) -> TargetOutput:
    """Read all nodes of the trees at once. Each sees the tokens before the root, its ancestors and itself."""
    N = tree.tokens.shape[1]
    slots = state.lengths[:, None] + torch.arange(N, device=tree.tokens.device)
    position_ids = state.lengths[:, None] + tree.links.depth.clamp(min=0)
    columns = state.prefix_len + max(state.host_counts) + N
    mask = mask_padding(settings.padding_mask, tree_mask(tree.links.ancestors, state.lengths.int(), columns=columns))
    hidden = settings.target.extend(repeat_for_cfg(tree.tokens), repeat_for_cfg(position_ids), mask, state.cache,
                                    repeat_for_cfg(slots))
    return TargetOutput(hidden, *settings.sampling.probs(settings.target, hidden))


def verify(state: State, settings: Settings, tree: Draft, output: TargetOutput) -> VerifyResult:
    """Say which drafts are accepted, and draw the token behind them, for which the drafts leave a position."""
    N = tree.tokens.shape[1]
    uniforms = settings.uniforms[:, :, :N].gather(1, state.position[:, None, None].expand(-1, 1, N))[:, 0]
    first_child = torch.where(tree.links.depth < state.budget[:, None], tree.links.first_child, -1)
    return verify_tree(output.probs, tree.tokens, first_child, tree.links.next_sibling, uniforms,
                       draft_probs=tree.draft_probs, draft_row=tree.draft_row, greedy=settings.sampling.greedy,
                       max_depth=settings.max_depth, **settings.rule)


class Committed(NamedTuple):
    """The tokens of a step: the accepted drafts and the token that was drawn behind them."""
    new_tokens: Tensor       # (B, P + 1) int64  0 behind the last
    previous_hidden: Tensor  # (2B, P + 1, H)    the target's hidden state before each
    is_invalid: Tensor       # (B,) bool         the last was drawn from a row that was not finite


def commit(state: State, settings: Settings, tree: Draft, output: TargetOutput, verified: VerifyResult) -> Committed:
    """Put the accepted drafts into the cache, and them and the next token into the images."""
    accepted_nodes, num_accepted, next_token = verified[:3]
    if not settings.is_chain:  # an accepted part of a chain is where it should be
        state.cache.commit(repeat_for_cfg(accepted_nodes), repeat_for_cfg(num_accepted), repeat_for_cfg(state.lengths))
    nodes = torch.cat([torch.zeros_like(accepted_nodes[:, :1]), accepted_nodes.clamp(min=0)], 1).long()  # and the root
    index, last = torch.arange(nodes.shape[1], device=nodes.device), num_accepted[:, None].long()
    new_tokens = torch.cat([tree.tokens.gather(1, nodes[:, 1:]), next_token[:, None]], 1)
    new_tokens = new_tokens.scatter(1, last, next_token[:, None]).masked_fill(index > last, 0)
    positions = state.counts.clamp(max=settings.num_tokens)[:, None] + index
    old_tokens = state.tokens.gather(1, positions)
    state.tokens.scatter_(1, positions, torch.where(state.active[:, None], new_tokens, old_tokens))
    state.root = torch.where(state.active, next_token, state.root)
    hidden = output.hidden
    previous_hidden = hidden.gather(1, repeat_for_cfg(nodes[..., None].expand(-1, -1, hidden.shape[-1])))
    return Committed(new_tokens, previous_hidden, output.status.gather(1, nodes.gather(1, last))[:, 0] != 0)


def update(state: State, settings: Settings, tree: Draft, output: TargetOutput, verified: VerifyResult,
           committed: Committed) -> None:
    """Account for the step, let the drafter read the new tokens, and choose the next trees' shapes."""
    account(state, settings, tree, output, verified)
    shapes, position, num_new = state.drafting.shapes, state.position, verified.num_accepted + 1
    state.failed |= state.active & committed.is_invalid
    counts = (state.counts + torch.where(state.active, num_new, 0)).clamp(max=settings.num_tokens)
    state.advance(torch.where(state.failed, settings.num_tokens, counts))
    shapes.record(position, verified.num_accepted.long(), state.active)
    max_count = min(max(state.host_counts), settings.num_tokens - 1)
    state.drafting.extend(committed.new_tokens, committed.previous_hidden, position, num_new.long(), max_count)
    # the step's one host read
    state.host_counts, depths, widths = torch.stack([state.counts, shapes.depth, shapes.width]).tolist()
    state.tree_depth, state.tree_width = max(depths), max(widths)


def account(state: State, settings: Settings, tree: Draft, output: TargetOutput, verified: VerifyResult) -> None:
    """Count the step of each active image."""
    request = torch.arange(len(state.counts), device=state.counts.device)
    position, active = state.position, state.active
    num_drafted = state.drafting.shapes.depth.minimum(state.budget)
    for table, value in ((state.num_accepted, verified.num_accepted.long()), (state.num_drafted, num_drafted)):
        table[request, position] = torch.where(active, value, table[request, position])
    state.target_forwards += active
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
    if not base.k:
        return rule
    k = base.num_neighbors
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


def check_methods(methods: list[Method], batch: int) -> None:
    """Raise ValueError unless there is a speculative method for each request, all of one family."""
    if len(methods) != batch:
        raise ValueError(f"methods must be one for each of the {batch} requests, got {len(methods)}")
    for m in methods:
        if m.drafting == "none" or m.family != methods[0].family:
            raise ValueError("methods must be speculative and of one family (Method.family), "
                             f"got {methods[0].name} and {m.name}")
