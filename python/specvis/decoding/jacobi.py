"""Jacobi decoding: the target guesses its own next tokens, and every forward improves the guesses.

A step reads the newest token and the guesses of the next positions in one forward, and draws all these positions anew,
each with its own noise (see `specvis_kernels.draw_tokens`). What was guessed right so far is final, and so is the first
draw behind it: it followed the right tokens. The other draws are better guesses. A position that no forward has reached
yet is guessed from the row of the position above it, with its own noise. (Speculative Jacobi decoding,
arXiv:2410.01699; with the same noise in every forward, arXiv:2510.24211.)

A position's noise never changes. So the tokens are those that `decode` draws with the same seed, whatever the window.
(By rejection, see `coupling`, they are others.)

Read downwards, as `discrete`: each step is five calls: draft, target_forward, verify, commit, update.
"""
import time
import weakref
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specvis_kernels import INVALID_ROW, DrawTokensResult, tree_links

from ..models.interface import Nodes, TargetModel, id_range, num_tokens, rows_and_columns
from .batching import Finished, Rows, Slots, pairs
from .capture import Captured, can_replay
from .coupling import Coupled, Coupling
from .discrete import (
    POLL,
    USUAL_POLL,
    Decoded,
    Observer,
    Progress,
    Step,
    check_batch,
    check_known_tokens,
    check_request,
    checked_methods,
    new_cache,
    read_known,
)
from .drafting import chain_ancestors, round_up
from .methods import MAX_WINDOW, Method
from .sampling import Sampling, cfg_inputs, repeat_for_cfg, take_nodes

WINDOWS = (0, 2, 4, 6, 8, 12, 16, 24, MAX_WINDOW)  # what "auto" chooses from; 0 is one token a forward
# The share of guesses that are right where those before them are, at distance 1, 2, ..; the last number goes on. Of the
# model of 6 layers that was shipped before, at a window of 32: 64 pictures of specvis tune's prompts at its settings
# (`Decoded.num_accepted`)
STANDING = (0.39, 0.76, 0.88, 0.90, 0.93, 0.90, 0.92, 0.89, 0.89, 0.87, 0.88, 0.85, 0.80, 0.74, 0.51, 0.61, 0.80, 0.85)
PRIOR_STEPS = 8.0    # as many steps STANDING counts as
MEMORY = 0.9         # of a step's record is left after the next REVIEW steps
REVIEW = 4           # steps from one choice of a window to the next
ROUNDS = 6           # in which every window is timed; the first is slower, since it allocates
TIMING_ERROR = 0.05  # a wider window must promise so much more speed than a narrower one

_facts = weakref.WeakKeyDictionary()  # target -> what was found out about it, see facts_of


@torch.inference_mode()
def jacobi_decode(target: TargetModel, condition: Tensor, padding_mask: Tensor, sampling: Sampling,
                  methods: str | Method | list[str | Method], neighbors: Tensor | None = None,
                  progress: Progress | None = None, observe: Observer | None = None, *,
                  known_tokens: Tensor | None = None, batch: int | None = None,
                  finished: Finished | None = None) -> Decoded:
    """Read the newest token and the guesses behind it in one target forward, and draw all of them anew; until every
    image is whole.

    If the target puts a NaN into its cache, the image ends there; where the guess was wrong, it may end or go on.

    Args:
        condition:    (B, S, dim)  as `GPT.condition` gives it
        padding_mask: (B, S) bool  True where the condition is real
        methods:      one of all requests, or one for each, all of one `Method.family`; or their names. `vanilla` has a
            window of no guesses
        neighbors:    (C, k) uint16 or int32, as `codebook_neighbors` gives it; needed where k > 0, except by rank. Of V
            codes, or of those that the target's `codes` says
        observe:      called after every step, with tensors that it must not change
        known_tokens: (B, K) int64  the first tokens of each image, -1 behind them; None: there are none
        batch:        how many images are decoded at once; when one is finished, the next takes its place. Then all
            have one method, and nobody observes. None: all of them
        finished:     called with the numbers of requests whose images are finished, and with these images

    Raises:
        ValueError: an argument differs from the above, or what the target says at a token depends on later tokens
    """
    check_request(target, condition, padding_mask, sampling)
    methods = checked_methods(methods, len(condition), ("jacobi", "none"),
                              "Jacobi decoding or vanilla (speculative_decode takes those with a drafter)")
    num_known = check_known_tokens(known_tokens, len(condition), target)
    check_causal(target)
    batch, base, total = check_batch(batch, methods, observe, target), methods[0], len(methods)
    condition, padding_mask = cfg_inputs(target, condition, padding_mask)

    def begin(requests: list[int], choice: WindowChoice | None = None) -> State:
        both = pairs(requests, total)
        own, of_these = [methods[i] for i in requests], sampling[requests]
        settings = Settings(target, padding_mask[both], of_these, own)
        coupling = None
        if base.drafting == "jacobi" and not base.seed_exact:
            coupling = Coupling(own, of_these, neighbors, target, bool(sampling.greedy.any()))
        if choice is None and "auto" in settings.windows and settings.num_tokens > 1:  # of one token there is no step
            choice = WindowChoice(step_seconds(settings, condition[both]))
        state = State(settings, [num_known[i] for i in requests], choice, coupling)
        prefill(state, settings, condition[both], None if known_tokens is None else known_tokens[requests])
        if progress:
            progress(sum(state.host_counts) - sum(num_known[i] for i in requests))
        return state

    def turn_over(state: State) -> State:
        return slots.turn_over(state, lambda requests: begin(requests, state.choice))

    slots = Slots(total, batch, finished)
    state = turn_over(begin(slots.requests))  # those whose tokens are all known are finished already
    run = Captured(run_step)
    while min(state.host_counts) < state.settings.num_tokens:
        step = run(state, state.settings)
        if observe:
            observe(chain_step(*spread(slots.requests, total, step, state.settings), state.settings))
        if state.num_steps < state.poll:
            continue
        num_before = sum(state.host_counts)
        state.look()
        if progress:
            progress(sum(state.host_counts) - num_before)
        state = turn_over(state)
    return slots.decoded()


def spread(rows: list[int], batch: int, step: "ChainStep", settings: "Settings") -> tuple[Tensor, Tensor, Tensor]:
    """A step's counts, windows and accepted guesses of the whole batch: images that the loop let go are finished."""
    of_all = torch.tensor([settings.num_tokens, 0, -1], device=step.counts.device)[:, None].repeat(1, batch)
    of_all[:, rows] = torch.stack([step.counts, step.windows, step.num_accepted])
    return tuple(of_all)


class Settings(Rows):
    """What stays the same while B requests are decoded."""

    ROWS, PAIRS, PARTS = ("lossless", "ancestors"), ("padding_mask",), ("sampling",)

    def __init__(self, target: TargetModel, padding_mask: Tensor, sampling: Sampling, methods: list[Method]):
        B, L, S, device = len(padding_mask) // 2, num_tokens(target), target.prefix_len, padding_mask.device
        self.padding_mask = padding_mask
        self.target, self.sampling, self.num_tokens, self.prefix_len = target, sampling, L, S
        self.columns = rows_and_columns(target.grid)[1]  # how far the token below is
        # a number or "auto"; of more guesses than an image has tokens, the first are read
        self.windows = [m.window if m.window == "auto" else min(m.window, L) for m in methods]
        self.max_window = W = min(max(m.max_depth for m in methods), L)
        self.from_last = methods[0].guess == "last"
        self.lossless = torch.tensor([m.lossless for m in methods], device=device)
        self.index = torch.arange(-1, max(self.columns, W + 1) + 1, device=device)  # from the newest token's position
        self.ancestors, self.depths = chain_ancestors(B, 1 + W, device), torch.arange(1 + W, device=device)[None]
        self.num_columns = S + L + W

    def select(self, rows: list[int], batch: int) -> "Settings":
        other = super().select(rows, batch)
        other.windows = [self.windows[row] for row in rows]
        return other


class Shape(NamedTuple):
    """What a step takes from the host: all that its shapes depend on."""
    num_nodes: int  # that it reads: the newest token and the guesses of the widest window
    max_count: int  # no image that goes on has more tokens; rounded up, so that many steps have the same number


class State(Rows):
    """What goes around the loop: the images, their guesses, how far they are, and the accounts of what it took.

    `tokens` holds the image so far and, behind it, the newest guess of every position. What stands behind the image is
    of no use; its last column takes what is drawn behind a request's own window, and what of finished images.
    All of it stays in the same memory. What the host knows of it is as old as its last `look`; a step reads nothing
    back, and takes nothing from the host but its `shape`.
    """

    ROWS = ("tokens", "counts", "ends", "num_known", "windows", "target_forwards", "num_accepted", "num_drafted",
            "num_equal", "tv_excess", "tv_bound")
    PARTS, CACHES = ("settings", "coupling"), ("cache",)

    def __init__(self, settings: Settings, num_known: list[int], choice: "WindowChoice | None" = None,
                 coupling: Coupling | None = None):
        B, L, device = len(num_known), settings.num_tokens, settings.padding_mask.device
        self.settings, self.poll = settings, POLL.get(device.type, USUAL_POLL)
        self.cache = new_cache(settings.target, 2 * B, settings.num_columns)
        width = L + 2 * max(settings.columns, settings.max_window + 1) + 2
        self.tokens = torch.zeros(B, width, dtype=torch.int64, device=device)
        self.num_known = torch.tensor(num_known, device=device)
        self.counts = self.num_known.clone()       # (B,) tokens that are final; L: the image is finished, or it failed
        self.ends = torch.full_like(self.counts, L)  # (B,) where a failed image ends
        self.windows = torch.zeros_like(self.counts)
        self.coupling = coupling  # None: seed-exact
        # the accounts, see Decoded; the last column takes what is not to be counted
        self.target_forwards = torch.ones_like(self.counts)
        self.num_accepted = torch.full((B, L + 1), -1, dtype=torch.int64, device=device)
        self.num_drafted = torch.zeros(B, L + 1, dtype=torch.int64, device=device)
        self.num_equal = torch.zeros_like(self.counts)  # of the last step: leading guesses that were right
        self.tv_excess = torch.zeros(B, device=device)
        self.tv_bound = torch.where(settings.lossless, 0.0, torch.nan)
        # what the host knows
        self.choice, self.host_counts, self.num_steps = choice, list(num_known), 0
        self.set_windows()
        self.shape = self.next_shape()

    @property
    def can_select(self) -> bool:
        return self.coupling is None and hasattr(self.cache, "select")

    @property
    def can_replay(self) -> bool:
        return can_replay(self.settings.target)

    def select(self, rows: list[int], batch: int) -> "State":
        other = super().select(rows, batch)
        other.host_counts = [self.host_counts[row] for row in rows]
        other.host_windows = [self.host_windows[row] for row in rows]
        if self.choice:
            self.choice.shrink(len(rows) / batch)
        return other

    def insert(self, rows: list[int], batch: int, source: "State") -> None:
        super().insert(rows, batch, source)
        self.windows.copy_(torch.tensor(self.host_windows))  # those that the host chose for all rows

    def set_windows(self) -> None:
        """How many guesses the next steps read of each image."""
        chosen = self.choice.next_window() if self.choice else 0
        self.host_windows = [chosen if window == "auto" else window for window in self.settings.windows]
        self.windows.copy_(torch.tensor(self.host_windows))

    def look(self) -> None:
        """Tell the host how far the images are, and choose the next windows: the loop's one host read."""
        before, num_nodes = self.host_counts, self.shape.num_nodes
        self.host_counts, num_equal = torch.stack([self.counts, self.num_equal]).tolist()
        if self.choice and self.num_steps:
            for count, equal, window in zip(before, num_equal, self.host_windows):
                if count < self.settings.num_tokens:
                    self.choice.record(equal, min(num_nodes, window + 1, self.settings.num_tokens - count))
            self.set_windows()
        self.num_steps = 0

    def advance(self, num_accepted: Tensor, status: Tensor) -> None:
        """Each image gains num_accepted (B,) guesses and one more token; those with -1 gain none.

        status: (B,) of the rows that the last tokens were drawn from
        """
        has_failed = ((status & INVALID_ROW) != 0) & (num_accepted >= 0)
        self.counts += num_accepted + 1
        self.ends.copy_(torch.where(has_failed, self.counts - 1, self.ends))
        self.counts.masked_fill_(has_failed, self.settings.num_tokens)

    def next_shape(self) -> Shape:
        """The shape of the next step, after num_steps steps since the host has looked.

        Towards the end of all images the nodes become fewer, by eights, so that few shapes occur.
        """
        L = self.settings.num_tokens
        going_on = [(count, window) for count, window in zip(self.host_counts, self.host_windows) if count < L]
        left = L - 1 - min(self.host_counts)
        num_nodes = 1 + min(max((window for _, window in going_on), default=0), -(-left // 8) * 8)
        count = max((count for count, _ in going_on), default=L)
        return Shape(num_nodes, min(round_up(count + self.num_steps * (self.settings.max_window + 1)), L))

    def decoded(self) -> Decoded:
        L = self.settings.num_tokens
        is_behind = torch.arange(L, device=self.ends.device) >= self.ends[:, None]
        tokens = self.tokens[:, :L].masked_fill(is_behind, 0)
        return Decoded(tokens, *(account.cpu() for account in (
            self.num_known, self.target_forwards, self.num_accepted[:, :L], self.num_drafted[:, :L], self.tv_excess,
            self.tv_bound, self.ends < L)))


def prefill(state: State, settings: Settings, condition: Tensor, known_tokens: Tensor | None) -> None:
    """Read the conditions (2B, S, dim) and the known tokens, draw the next token, and make the first guesses.

    A position's first guess is from the row above it, as far as there is one, and else from the newest row.
    """
    sampling, columns, L, device = settings.sampling, settings.columns, settings.num_tokens, condition.device
    K = 0 if known_tokens is None else known_tokens.shape[1]
    if K:
        state.tokens[:, :K] = known_tokens.clamp(min=0)
    hidden = read_known(settings.target, condition, settings.padding_mask, state.tokens[:, :K], state.cache)
    hidden = hidden[:, settings.prefix_len - 1:]  # before each token, the next one too
    num_above, num_behind = min(K, columns - 1), settings.max_window if settings.from_last else columns - 1
    newest = state.num_known[:, None]
    positions = (newest + torch.arange(-num_above, num_behind + 1, device=device)).clamp(min=0)
    hidden = take_nodes(hidden, positions.minimum(newest))
    drawn = sampling.draw(settings.target, hidden, positions, ahead=columns)
    row = torch.arange(len(positions), device=device)[:, None]
    state.tokens[row, positions[:, num_above:]] = drawn.tokens[:, num_above:]
    if not settings.from_last:
        state.tokens[row, positions + columns] = drawn.ahead_tokens
    if state.coupling:
        kept = positions[:, :num_above + 1]
        rows = state.coupling.exact(*sampling.probs(settings.target, hidden[:, :num_above + 1], kept))
        state.coupling.keep_rows(kept, rows)
        guess_new(state, settings, hidden, state.counts, state.counts, settings.max_window)
    state.advance(torch.where(state.counts < L, 0, -1), drawn.status[:, num_above])
    state.look()


class ChainStep(NamedTuple):
    """What a step did."""
    counts: Tensor        # (B,) int64  tokens of each image before
    windows: Tensor       # (B,) int64  how many guesses of each were read
    num_accepted: Tensor  # (B,) int64  how many of them were accepted; -1: the image was finished


def run_step(state: State, settings: Settings) -> ChainStep:
    """One step of all images that are not finished."""
    chain = draft(state, settings)
    hidden = target_forward(state, settings, chain)
    verified = verify(state, settings, chain, hidden)
    commit(state, settings, chain, verified)
    return ChainStep(chain.counts, state.windows, update(state, settings, chain, hidden, verified))


class Chain(NamedTuple):
    """What a step reads: the newest token of every image and the guesses behind it, N nodes."""
    tokens: Tensor     # (B, N) int64
    guesses: Tensor    # (B, N) int64  of what follows each
    positions: Tensor  # (B, N) int64  of what follows each
    counts: Tensor     # (B,) int64    tokens of each image before the step
    budget: Tensor     # (B,) int64    how many guesses can be accepted; -1: the image is finished


def draft(state: State, settings: Settings) -> Chain:
    """As many guesses as the widest window takes."""
    N, L, counts = state.shape.num_nodes, settings.num_tokens, state.counts.clone()
    positions = counts[:, None] + settings.index[:N + 1]
    tokens = state.tokens.gather(1, positions)
    return Chain(tokens[:, :-1], tokens[:, 1:], positions[:, 1:], counts, state.windows.minimum((L - 1) - counts))


def target_forward(state: State, settings: Settings, chain: Chain) -> Tensor:
    """Read all nodes of the chains at once: (2B, N, H). A guess that is kept is in its column of the cache already."""
    N, S = chain.tokens.shape[1], settings.prefix_len
    columns = min(S - 1 + state.shape.max_count + N, settings.num_columns)
    nodes = Nodes(settings.depths[:, :N], chain.counts + (S - 1), settings.ancestors[:, :N], settings.padding_mask,
                  columns)
    return settings.target.extend(repeat_for_cfg(chain.tokens), nodes, state.cache)


def verify(state: State, settings: Settings, chain: Chain, hidden: Tensor) -> DrawTokensResult | Coupled:
    """Draw the token behind each node, and say how many leading guesses stand.

    Seed-exact: those that equal their draws; and the token below each is drawn, too. The token behind the last node is
    compared with a guess that no node has read. Otherwise: those that rejection keeps.
    """
    sampling = settings.sampling
    if state.coupling:
        probs = sampling.probs(settings.target, hidden, chain.positions)
        return state.coupling.couple(*probs, chain.guesses, chain.counts[:, None], chain.budget[:, None])
    return sampling.draw(settings.target, hidden, chain.positions, chain.guesses, settings.columns)


def commit(state: State, settings: Settings, chain: Chain, verified: DrawTokensResult | Coupled) -> None:
    """The draws are the newest tokens and guesses. Where a window reaches the row below, its own are better.

    A request guesses nothing behind its own window, and a finished one nothing at all.
    """
    scratch, N = state.tokens.shape[1] - 1, chain.tokens.shape[1]
    is_own = settings.index[1:N + 1] <= torch.where(chain.budget < 0, -1, state.windows)[:, None]
    if state.coupling:
        state.coupling.keep_rows(torch.where(is_own, chain.positions, -1), verified.probs)
    else:
        below = torch.where(is_own, chain.positions + settings.columns, scratch)
        state.tokens.scatter_(1, below, verified.ahead_tokens)
    state.tokens.scatter_(1, torch.where(is_own, chain.positions, scratch), verified.tokens)


def update(state: State, settings: Settings, chain: Chain, hidden: Tensor,
           verified: DrawTokensResult | Coupled) -> Tensor:
    """Account for the step, and guess what enters the windows. How many guesses were accepted (B,); -1: finished."""
    num_accepted, column = verified.num_accepted.minimum(chain.budget), chain.counts[:, None]
    state.num_equal.copy_(verified.num_accepted)
    state.target_forwards += num_accepted >= 0
    state.num_accepted.scatter_(1, column, num_accepted[:, None])
    state.num_drafted.scatter_(1, column, chain.budget[:, None])
    if state.coupling:
        state.tv_excess += verified.tv_excess
    state.advance(num_accepted, verified.status.gather(1, num_accepted.clamp(min=0)[:, None])[:, 0])
    if state.coupling or settings.from_last:
        last = chain.counts + state.windows.clamp(max=hidden.shape[1] - 1)
        guess_new(state, settings, hidden, chain.counts, last, hidden.shape[1])
    return num_accepted


def guess_new(state: State, settings: Settings, hidden: Tensor, counts: Tensor, last: Tensor, n: int) -> None:
    """Guess the n positions behind `last` (B,), of which some enter the windows after a step from `counts` (B,) on.

    hidden (2B, N, H): what the step's nodes are.
    """
    if state.coupling:
        positions, tokens = state.coupling.first_guesses(counts[:, None], last[:, None], n)
    else:
        logits = settings.target.logits(take_nodes(hidden, (last - counts)[:, None])).expand(-1, n, -1)
        positions = (last + 1)[:, None] + settings.index[1:n + 1]
        tokens = settings.sampling.draw_from(logits, positions, id_range(settings.target, positions)).tokens
    state.tokens.scatter_(1, positions, tokens)


def chain_step(counts: Tensor, windows: Tensor, num_accepted: Tensor, settings: Settings) -> Step:
    """For an observer: the step that accepted so many guesses of images that had `counts` (B,) tokens."""
    device, P, L = counts.device, settings.max_window, settings.num_tokens
    depth = windows.minimum(L - 1 - counts).clamp(min=0)
    node = torch.arange(P + 1, device=device)
    links = tree_links(torch.where(node <= depth[:, None], node - 1, -2).int())
    accepted_nodes = torch.where(node[1:] <= num_accepted[:, None], node[1:], -1).int()
    return Step(links, counts.clamp(max=L - 1), accepted_nodes, num_accepted.clamp(min=0).int(), num_accepted >= 0)


class WindowChoice:
    """Which of WINDOWS gives the most tokens a second: by the seconds of a step, and by how many guesses it accepts.

    A step with a window of W tells what every narrower one would accept, and whether the guess behind its window is
    right, too. So a decoding that went back to no guesses learns when to guess again.
    """

    def __init__(self, seconds: dict[int, float]):
        self.timed, self.share, self.seconds, self.num_steps = seconds, 1.0, seconds, 0
        self.usual = [*STANDING, *STANDING[-1:] * (MAX_WINDOW + 1)][:MAX_WINDOW + 1]
        # by distance: how often a guess was looked at behind guesses that were right, and how often it was right
        self.looks, self.rights = ([0.0] * (MAX_WINDOW + 1) for _ in range(2))
        self.window = self.fastest()

    def record(self, num_equal: int, num_read: int) -> None:
        """Of the num_read guesses of a step, the first num_equal were right."""
        for distance in range(min(num_equal + 1, num_read, len(self.looks))):
            self.looks[distance] += 1
            self.rights[distance] += distance < num_equal

    def shrink(self, share: float) -> None:
        """The batch has this share of its images left: a step now takes what one with as many nodes took before."""
        self.share *= share
        timed = sorted(self.timed.items())
        nodes, seconds = [1 + window for window, _ in timed], [time for _, time in timed]
        self.seconds = {window: float(np.interp(self.share * (1 + window), nodes, seconds)) for window in self.timed}

    def next_window(self) -> int:
        """The window of the next step. It changes every few steps."""
        if self.num_steps and self.num_steps % REVIEW == 0:
            self.window = self.fastest()
            self.looks, self.rights = ([MEMORY * x for x in record] for record in (self.looks, self.rights))
        self.num_steps += 1
        return self.window

    def fastest(self) -> int:
        expected, chance, speeds = 1.0, 1.0, {}  # tokens of a step; the chance that all guesses so far are right
        for window, (usual, looks, rights) in enumerate(zip(self.usual, self.looks, self.rights)):
            if window in self.seconds:
                speeds[window] = expected / self.seconds[window]
            chance *= (PRIOR_STEPS * usual + rights) / (PRIOR_STEPS + looks)
            expected += chance
        enough = (1 - TIMING_ERROR) * max(speeds.values())
        return min(window for window, speed in speeds.items() if speed >= enough)


def facts_of(target: TargetModel) -> dict:
    """What was found out about a target, for as long as it lives. Of one without a hash nothing is remembered."""
    try:
        return _facts.setdefault(target, {})
    except TypeError:
        return {}


def step_seconds(settings: Settings, condition: Tensor) -> dict[int, float]:
    """Seconds of a step with each of WINDOWS, in the middle of the images. A target is timed once for each batch."""
    key = "seconds", (B := len(condition) // 2), condition.device, condition.dtype
    facts = facts_of(settings.target)
    if key not in facts:
        state = State(settings, [max(1, settings.num_tokens // 2)] * B, WindowChoice({0: 1.0}))
        settings.target.prefill(condition, settings.padding_mask, state.cache)
        run = Captured(read_again)
        # in rounds, so that what else the machine does meets all windows alike
        rounds = [{window: seconds_of(run, state, window) for window in WINDOWS} for _ in range(ROUNDS)]
        facts[key] = {window: min(seconds[window] for seconds in rounds) for window in WINDOWS}
    return facts[key]


def seconds_of(run: Captured, state: State, window: int) -> float:
    state.host_windows, state.num_steps = [window] * len(state.host_counts), 0
    state.windows.fill_(window)
    start = time.perf_counter()
    run(state, state.settings).status.tolist()  # waits for the device
    return time.perf_counter() - start


def read_again(state: State, settings: Settings) -> DrawTokensResult | Coupled:
    """What takes the time of a step. The images do not change."""
    chain = draft(state, settings)
    verified = verify(state, settings, chain, target_forward(state, settings, chain))
    commit(state, settings, chain, verified)
    return verified


def check_causal(target: TargetModel) -> None:
    """Raise ValueError if what the target says at a token depends on the token behind it. Each target is asked once."""
    facts = facts_of(target)
    if "is_causal" not in facts:
        condition, S = target.null_condition(1), target.prefix_len
        cache, device = target.new_cache(1, S + 2), condition.device
        padding_mask = torch.ones(1, S, dtype=torch.bool, device=device)
        target.prefill(condition, padding_mask, cache)
        nodes = Nodes(torch.arange(2, device=device)[None], torch.tensor([S], device=device),
                      chain_ancestors(1, 2, device), padding_mask, S + 2)
        first, second = (target.logits(target.extend(torch.tensor([[0, token]], device=device), nodes, cache))[:, 0]
                         for token in (0, target.vocab_size - 1))
        facts["is_causal"] = torch.allclose(first, second, rtol=1e-4, atol=1e-4, equal_nan=True)
    if not facts["is_causal"]:
        raise ValueError("target must be causal, so that its logits at a token do not depend on later tokens: Jacobi "
                         f"decoding reads guesses behind a token that may change; those of {type(target).__name__} do")
