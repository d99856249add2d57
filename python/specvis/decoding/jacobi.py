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
import math
import time
import weakref
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specvis_kernels import DrawTokensResult, tree_links

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
    decode,
    new_cache,
    read_known,
)
from .drafting import chain_ancestors, round_up
from .methods import METHODS, USUAL_WINDOW, Method
from .sampling import Sampling, cfg_inputs, repeat_for_cfg, take_nodes

# The windows that "auto" chooses from, 0 is plain decoding, and the shipped model's tokens a forward with each, over 32
# pictures. `specvis compare --methods vanilla,jacobi:window=4 -n 32 --singles 0` measures one of them.
TAU = {0: 1.0, 1: 1.39, 2: 1.66, 3: 1.9, 4: 2.11, 6: 2.44, 8: 2.71, 12: 3.37, 16: 3.84, 24: 4.29, 32: 4.59}
TIMED = (0, 0, 0, 0, 2, 2, 8, 8, 32)  # the windows of which a step is timed in each round, short steps oftener
ROUNDS = 5                      # the first ones allocate, compile and capture
GAIN = 1.15                     # a window must promise that many times the speed of a step without guesses: the
                                # baseline's own step is quicker than that one, and images differ

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
    given = condition, padding_mask
    condition, padding_mask = cfg_inputs(target, condition, padding_mask)

    auto = USUAL_WINDOW
    if base.seed_exact and any(m.window == "auto" for m in methods):
        both = pairs(list(range(batch)), total)
        auto = auto_window(target, condition[both], padding_mask[both], sampling[list(range(batch))])
        is_plain = auto == 0 and all(m.is_baseline or m.window == "auto" for m in methods)
        if is_plain and batch == total and observe is None and finished is None:
            return decode(target, *given, sampling, progress, known_tokens=known_tokens)

    def begin(requests: list[int]) -> State:
        both = pairs(requests, total)
        own, of_these = [methods[i] for i in requests], sampling[requests]
        settings = Settings(target, padding_mask[both], of_these, own, auto)
        coupling = None
        if base.drafting == "jacobi" and not base.seed_exact:
            coupling = Coupling(own, of_these, neighbors, target, bool(sampling.greedy.any()))
        state = State(settings, [num_known[i] for i in requests], coupling)
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
            observe(chain_step(*spread(slots.requests, total, step, state.settings), state.settings))
        if state.num_steps < state.poll:
            continue
        num_before = sum(state.host_counts)
        state.look()
        if progress:
            progress(sum(state.host_counts) - num_before)
        state = slots.turn_over(state, begin)
    return slots.decoded()


def spread(rows: list[int], batch: int, step: "ChainStep", settings: "Settings") -> tuple[Tensor, Tensor, Tensor]:
    """A step's counts, windows and accepted guesses of the whole batch: images that the loop let go are finished."""
    of_all = torch.tensor([settings.num_tokens, 0, -1], device=step.counts.device)[:, None].repeat(1, batch)
    left = settings.num_tokens - 1 - step.counts
    num_accepted = torch.where(left < 0, -1, step.num_accepted.minimum(left))
    of_all[:, rows] = torch.stack([step.counts, settings.windows, num_accepted])
    return tuple(of_all)


class Settings(Rows):
    """What stays the same while B requests are decoded."""

    ROWS, PAIRS, PARTS = ("windows", "is_own", "lossless", "ancestors"), ("padding_mask",), ("sampling",)

    def __init__(self, target: TargetModel, padding_mask: Tensor, sampling: Sampling, methods: list[Method],
                 auto: int = USUAL_WINDOW):
        """auto: the window of methods whose own is that word"""
        B, L, S, device = len(padding_mask) // 2, num_tokens(target), target.prefix_len, padding_mask.device
        self.padding_mask = padding_mask
        self.target, self.sampling, self.num_tokens, self.prefix_len = target, sampling, L, S
        self.columns = rows_and_columns(target.grid)[1]  # how far the token below is
        # how many guesses a step reads of each image: of more than it has tokens, the first
        self.host_windows = [min(auto if m.window == "auto" else m.window, L) for m in methods]
        self.windows, self.max_window = torch.tensor(self.host_windows, device=device), max(self.host_windows)
        W = self.max_window
        self.from_last = methods[0].guess == "last"
        # how many positions after a draw a guess is drawn with it
        self.ahead = self.columns if methods[0].seed_exact and W and not self.from_last else 0
        self.lossless = torch.tensor([m.lossless for m in methods], device=device)
        self.index = torch.arange(-1, max(self.columns, W + 1) + 1, device=device)  # from the newest token's position
        # (B, 1 + W) which nodes of the widest window are in each request's own; None: all
        is_own = torch.arange(1 + W, device=device) <= self.windows[:, None]
        self.is_own = is_own if len(set(self.host_windows)) > 1 else None
        self.ancestors, self.depths = chain_ancestors(B, 1 + W, device), torch.arange(1 + W, device=device)[None]
        self.num_columns = S + L + W

    def select(self, rows: list[int], batch: int) -> "Settings":
        other = super().select(rows, batch)
        other.host_windows = [self.host_windows[row] for row in rows]
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

    ROWS = ("tokens", "status", "counts", "num_known", "is_step", "tv_excess", "tv_bound")
    PARTS, CACHES = ("settings", "coupling"), ("cache",)

    def __init__(self, settings: Settings, num_known: list[int], coupling: Coupling | None = None):
        B, L, device = len(num_known), settings.num_tokens, settings.padding_mask.device
        self.settings, self.poll = settings, POLL.get(device.type, USUAL_POLL)
        self.cache = new_cache(settings.target, 2 * B, settings.num_columns)
        width = L + 2 * max(settings.columns, settings.max_window + 1) + 2
        self.tokens = torch.zeros(B, width, dtype=torch.int64, device=device)
        self.num_known = torch.tensor(num_known, device=device)
        self.status = torch.zeros(B, width, dtype=torch.int32, device=device)  # of the rows that they were drawn from
        self.counts = self.num_known.clone()  # (B,) tokens that are final; L: the image is finished, or it failed
        self.coupling = coupling  # None: seed-exact
        # (B, L + 1) where steps began; the last column takes those of finished images
        self.is_step = torch.zeros(B, L + 1, dtype=torch.bool, device=device)
        self.tv_excess = torch.zeros(B, device=device)
        self.tv_bound = torch.where(settings.lossless, 0.0, torch.nan)
        # what the host knows
        self.host_counts, self.num_steps = list(num_known), 0
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
        return other

    def look(self) -> None:
        """Tell the host how far the images are: the loop's one host read."""
        self.host_counts, self.num_steps = self.counts.tolist(), 0

    def advance(self, num_accepted: Tensor, status: Tensor) -> None:
        """Each image that is not finished gains num_accepted (B,) guesses and one more token.

        status: (B, N) of the rows that the next tokens were drawn from; an image ends with the first that is not 0
        """
        L = self.settings.num_tokens
        last = status.gather(1, num_accepted.clamp(min=0)[:, None])[:, 0]
        self.counts.add_(num_accepted).add_(1).add_(last, alpha=L).clamp_(max=L)

    def next_shape(self) -> Shape:
        """The shape of the next step, after num_steps steps since the host has looked.

        Towards the end of all images the nodes become fewer, by eights, so that few shapes occur.
        """
        L = self.settings.num_tokens
        going_on = [(count, window) for count, window in zip(self.host_counts, self.settings.host_windows)
                    if count < L]
        left = L - 1 - min(self.host_counts)
        num_nodes = 1 + min(max((window for _, window in going_on), default=0), -(-left // 8) * 8)
        count = max((count for count, _ in going_on), default=L)
        return Shape(num_nodes, min(round_up(count + self.num_steps * (self.settings.max_window + 1)), L))

    def decoded(self) -> Decoded:
        L, settings, is_step = self.settings.num_tokens, self.settings, self.is_step[:, :-1]
        index = torch.arange(L, device=is_step.device)
        is_behind = (self.status[:, :L] * (index >= self.num_known[:, None])).cumsum(1) > 0  # where a failed image ends
        end = (L - is_behind.sum(1) + 1).clamp(max=L)[:, None]
        # a step has accepted what is between its first token and the next one's
        following = F.pad(torch.where(is_step, index, end), (0, 1))[:, 1:]
        following[:, -1:] = end
        following = following.flip(1).cummin(1).values.flip(1)
        num_accepted = torch.where(is_step, following - index - 1, -1)
        num_drafted = torch.where(is_step, settings.windows[:, None].minimum(L - 1 - index), 0)
        return Decoded(self.tokens[:, :L].masked_fill(is_behind, 0), *(account.cpu() for account in (
            self.num_known, 1 + is_step.sum(1), num_accepted, num_drafted, self.tv_excess, self.tv_bound,
            is_behind[:, -1])))


def prefill(state: State, settings: Settings, condition: Tensor, known_tokens: Tensor | None) -> None:
    """Read the conditions (2B, S, dim) and the known tokens, draw the next token, and make the first guesses.

    A position's first guess is from the row above it, as far as there is one, and else from the newest row.
    """
    sampling, columns, device = settings.sampling, settings.columns, condition.device
    K = 0 if known_tokens is None else known_tokens.shape[1]
    if K:
        state.tokens[:, :K] = known_tokens.clamp(min=0)
    hidden = read_known(settings.target, condition, settings.padding_mask, state.tokens[:, :K], state.cache)
    hidden = hidden[:, settings.prefix_len - 1:]  # before each token, the next one too
    num_above, num_behind = min(K, columns - 1), settings.max_window if settings.from_last else columns - 1
    newest = state.num_known[:, None]
    positions = (newest + torch.arange(-num_above, num_behind + 1, device=device)).clamp(min=0)
    hidden = take_nodes(hidden, positions.minimum(newest))
    drawn = sampling.draw(settings.target, hidden, positions, ahead=settings.ahead)
    row = torch.arange(len(positions), device=device)[:, None]
    state.tokens[row, positions[:, num_above:]] = drawn.tokens[:, num_above:]
    state.status[row, newest] = drawn.status[:, num_above:num_above + 1]
    if settings.ahead:
        state.tokens[row, positions + settings.ahead] = drawn.ahead_tokens
    if state.coupling:
        kept = positions[:, :num_above + 1]
        rows = state.coupling.exact(*sampling.probs(settings.target, hidden[:, :num_above + 1], kept))
        state.coupling.keep_rows(kept, rows)
        guess_new(state, settings, hidden, state.counts, state.counts, settings.max_window)
    state.advance(torch.zeros_like(state.counts), drawn.status[:, num_above:])
    state.look()


class ChainStep(NamedTuple):
    """What a step did."""
    counts: Tensor        # (B,) int64  tokens of each image before
    num_accepted: Tensor  # (B,) int64  how many guesses stand, perhaps more than an image has left


def run_step(state: State, settings: Settings) -> ChainStep:
    """One step of all images that are not finished."""
    chain = draft(state, settings)
    hidden = target_forward(state, settings, chain)
    verified = verify(state, settings, chain, hidden)
    commit(state, settings, chain, verified)
    return ChainStep(chain.counts, update(state, settings, chain, hidden, verified))


class Chain(NamedTuple):
    """What a step reads: the newest token of every image and the guesses behind it, N nodes."""
    tokens: Tensor     # (B, N) int64
    guesses: Tensor    # (B, N) int64  of what follows each
    positions: Tensor  # (B, N) int64  of what follows each
    counts: Tensor     # (B,) int64    tokens of each image before the step
    windows: Tensor    # (B,) int64    how many guesses of each are read


def draft(state: State, settings: Settings) -> Chain:
    """As many guesses as the widest window takes."""
    N, windows = state.shape.num_nodes, settings.windows
    positions = state.counts[:, None] + settings.index[:N + 1]
    tokens = state.tokens.gather(1, positions)
    return Chain(tokens[:, :-1], tokens[:, 1:], positions[:, 1:], positions[:, 1],
                 windows if N > settings.max_window else windows.clamp(max=N - 1))


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
        budget = chain.windows.minimum((settings.num_tokens - 1) - chain.counts)
        return state.coupling.couple(*probs, chain.guesses, chain.counts[:, None], budget[:, None])
    return sampling.draw(settings.target, hidden, chain.positions, chain.guesses, settings.ahead)


def commit(state: State, settings: Settings, chain: Chain, verified: DrawTokensResult | Coupled) -> None:
    """The draws are the newest tokens and guesses. Where a window reaches the row below, its own are better.

    A request guesses nothing after its own window.
    """
    def own(positions: Tensor, other: int = state.tokens.shape[1] - 1) -> Tensor:
        is_own = settings.is_own
        return positions if is_own is None else torch.where(is_own[:, :positions.shape[1]], positions, other)

    positions = own(chain.positions)
    if state.coupling:
        state.coupling.keep_rows(own(chain.positions, -1), verified.probs)
    if settings.ahead:
        state.tokens.scatter_(1, own(chain.positions + settings.ahead), verified.ahead_tokens)
    state.tokens.scatter_(1, positions, verified.tokens)
    state.status.scatter_(1, positions, verified.status)


def update(state: State, settings: Settings, chain: Chain, hidden: Tensor,
           verified: DrawTokensResult | Coupled) -> Tensor:
    """Account for the step, and guess what enters the windows. Returns how many guesses stand (B,)."""
    num_accepted = verified.num_accepted.minimum(chain.windows)
    state.is_step.scatter_(1, chain.positions[:, :1], True)
    if state.coupling:
        state.tv_excess += verified.tv_excess
    state.advance(num_accepted, verified.status)
    if state.coupling or settings.from_last:
        guess_new(state, settings, hidden, chain.counts, chain.counts + chain.windows, hidden.shape[1])
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


def facts_of(target: TargetModel) -> dict:
    """What was found out about a target, for as long as it lives. Of one without a hash nothing is remembered."""
    try:
        return _facts.setdefault(target, {})
    except TypeError:
        return {}


def auto_window(target: TargetModel, condition: Tensor, padding_mask: Tensor, sampling: Sampling) -> int:
    """The window of "auto" for a batch of so many images. It is chosen once for a target, batch, dtype and device."""
    facts, key = facts_of(target), ("window", len(sampling.seeds), condition.dtype, condition.device)
    if key not in facts:
        settings = Settings(target, padding_mask, sampling, [METHODS["jacobi"]] * len(sampling.seeds), max(TAU))
        facts[key] = fastest_window(step_seconds(settings, condition)) if settings.num_tokens > 1 else 0
    return facts[key]


def fastest_window(seconds: dict[int, float]) -> int:
    """The window with the most tokens a second, by TAU and the seconds of a step with some windows; 0 unless it
    promises GAIN."""
    speeds = {window: tau / float(np.interp(window, list(seconds), list(seconds.values())))
              for window, tau in TAU.items() if window <= max(seconds)}
    best = max(speeds, key=speeds.get)
    return best if speeds[best] > GAIN * speeds[0] else 0


def step_seconds(settings: Settings, condition: Tensor) -> dict[int, float]:
    """Seconds of a step with each of TIMED, as far as an image has tokens, in the middle of the images."""
    state = State(settings, [settings.num_tokens // 2] * len(settings.windows))
    settings.target.prefill(condition, settings.padding_mask, state.cache)
    run, seconds = Captured(read_again), {}
    narrow, wide = [[min(window, settings.max_window) for window in part] for part in (TIMED[:-1], TIMED[-1:])]
    for windows in (narrow, wide):
        for window in windows * ROUNDS:  # in rounds, so that what else the machine does meets them alike
            seconds[window] = min(seconds.get(window, math.inf), seconds_of(run, state, window))
        if not fastest_window(seconds):  # then none that is wider pays either
            break
    return seconds


def seconds_of(run: Captured, state: State, window: int) -> float:
    settings, state.num_steps = state.settings, 0
    settings.host_windows = [window] * len(settings.windows)
    settings.windows.fill_(window)
    start = time.perf_counter()
    run(state, settings).status.tolist()  # waits for the device
    return time.perf_counter() - start


def read_again(state: State, settings: Settings) -> DrawTokensResult:
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
